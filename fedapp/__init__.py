"""fedapp: federated learning where the classifier head does the work."""

from __future__ import annotations

__version__ = "0.1.0"
