"""Attention over chosen blocks of far keys."""
