"""Run directories: writing them, reading them, statistics, figures, reports, predictions."""
