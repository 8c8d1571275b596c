"""Sums in which the server sees no single client."""

from __future__ import annotations

from pydantic import Field

from fedapp.settings._group import Group


class SecureSettings(Group):
    """Sums in which the server sees no single client."""

    secure_sum: bool = Field(
        False,
        description="clients hide their replies behind masks that cancel in the sum: the server sees only sums "
        "over clients; for methods that need no more",
    )
    secure_dropout: float = Field(
        0.34,
        ge=0,
        lt=0.5,
        description="with secure-sum: share of the clients of a round that may drop out in it; with more the run ends",
    )
    secure_colluders: int = Field(
        0, ge=0, description="with secure-sum: clients that may give the server all their secrets"
    )
