"""GAU-α as a transformers model."""
