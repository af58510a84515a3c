"""Files, optional packages, progress and provenance."""
