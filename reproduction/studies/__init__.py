"""Measuring studies, whose tables stand in docs/: `python -m reproduction study NAME`."""
