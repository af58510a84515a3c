"""Experiments: from a configuration to a results file."""
