"""The version, for results files and the package."""

__version__ = "0.2.0"
