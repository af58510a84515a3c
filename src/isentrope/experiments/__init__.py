"""Experiments: from a plan to a results file."""
