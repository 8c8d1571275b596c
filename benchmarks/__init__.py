"""Measurements that the documentation quotes: `python -m benchmarks` (speed), `python -m benchmarks.leakage`."""
