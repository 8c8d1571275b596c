"""Data sets, partitions over clients, and batched transforms."""

from __future__ import annotations
