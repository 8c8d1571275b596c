"""Small pieces of text for messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggest(word: str, known: Iterable[str]) -> str:
    """Return `, did you mean '...'?` for the nearest known word, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.55)
    return f", did you mean '{near[0]}'?" if near else ""
