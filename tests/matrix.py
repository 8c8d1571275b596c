"""Which methods stand for the others where a test is about the engine and not about a method.

`make test` runs such a test for `TYPICAL` alone; `make full`, which CI runs, takes all. What each method computes has a
file of its own, `tests/test_<id>.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from fedapp import registry

TYPICAL = ("fedavg", "fedclassavg", "cwfedavg", "fedgh", "ccvr", "fedproto", "fedkd", "fedrep", "scaffold", "fed3r")
"""Each works in its own way: averages, heads, one aggregate a class, a server that trains, a head after the last round,
means of classes, a second model, two phases, a correction of gradients, sums of statistics."""


def methods(ids: Iterable[str] | None = None) -> list[Any]:
    """Return these methods (default: all) as parameters of a test; all but the typical ones are marked `full`."""
    chosen = registry.discover() if ids is None else ids
    return [m if m in TYPICAL else pytest.param(m, marks=pytest.mark.full) for m in sorted(chosen)]
