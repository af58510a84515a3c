"""Temperatures fitted to text."""
