"""Attention statistics of models, and entropy under temperature laws."""
