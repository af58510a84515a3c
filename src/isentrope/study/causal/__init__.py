"""Causal models under recipes: read, questioned, calibrated, compared."""
