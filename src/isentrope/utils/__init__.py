"""Files, messages, command-line values, optional packages, progress and provenance."""
