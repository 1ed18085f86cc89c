"""Measurements: each module has SECTIONS (name to title) and `run`, which yields entries."""
