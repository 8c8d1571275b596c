"""Errors that a user can mend."""

from __future__ import annotations


class BadRequest(ValueError):
    """A request that cannot be carried out as it stands; the message says what to do.

    Raised before anything is trained. The command line prints the message without a traceback and exits with code 2.
    """
