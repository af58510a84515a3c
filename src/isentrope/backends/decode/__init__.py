"""Attention of one query a row against a cache, by a Triton kernel."""
