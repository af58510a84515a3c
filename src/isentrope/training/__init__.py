"""Training on a prepared corpus."""
