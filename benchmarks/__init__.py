"""Measurements of speed that the documentation quotes: `python -m benchmarks`."""
