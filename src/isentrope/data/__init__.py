"""Corpora, partitions, training batches and retrieval examples."""
