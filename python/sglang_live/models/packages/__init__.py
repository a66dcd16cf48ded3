"""Weights that are parts of published Python packages: pins, download, licences."""
