"""Errors that a user can mend, and the small pieces of text that messages and generated pages need."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class BadRequest(ValueError):
    """A request that cannot be carried out as it stands; the message says what to do.

    Raised before anything is trained. The command line prints the message without a traceback and exits with code 2.
    """


def suggest(word: str, known: Iterable[str]) -> str:
    """Return `, did you mean '...'?` for the nearest known word, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.55)
    return f", did you mean '{near[0]}'?" if near else ""


def between(text: str, start: str, end: str) -> tuple[str, str, str] | None:
    """Return what stands before, between and after two markers; None where they are not there in this order."""
    head, opened, rest = text.partition(start)
    body, closed, tail = rest.partition(end)
    return (head, body, tail) if opened and closed else None
