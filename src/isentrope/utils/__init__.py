"""Files, text, command-line values, optional packages, progress and provenance."""
