"""Text and batches to train and evaluate on."""
