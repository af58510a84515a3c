"""Attention inside a band around the diagonal, by a Triton kernel."""
