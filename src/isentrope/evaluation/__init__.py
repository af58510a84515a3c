"""Metrics of models under recipes: perplexity, retrieval, masked tokens."""
