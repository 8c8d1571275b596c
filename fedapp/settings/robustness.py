"""Limits and rules against malicious clients."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated

from pydantic import Field

from fedapp.settings._group import AUTO, Group, NonNegative, OrAuto


class RobustnessSettings(Group):
    """Limits and rules against malicious clients."""

    max_abs: float = Field(
        10_000.0, gt=0, description="largest value in heads and in means of representations that the server accepts"
    )
    max_growth: Annotated[NonNegative, OrAuto] = Field(
        AUTO,
        description="largest norm of a model as a multiple of 1 + that of the last round: a longer one of a client is "
        "dropped, and a round that would make one is void; 0 = no limit; auto = 10 on real nodes, else 0",
    )
    clip_update: float = Field(
        0.0, ge=0, description="largest L2 norm of the change in the arrays that a client sends back; 0 = no limit"
    )
    robust: str = Field(
        "none",
        description="rules against malicious clients, for every average of their replies, from left to right: norm, "
        "median, trimmed, krum, multikrum, geomedian, such as norm+trimmed; own = the rule of the method's page",
    )
    robust_f: int = Field(1, ge=0, description="clients of a round that may be malicious, for robust")
    count_cap: Annotated[float, OrAuto] = Field(
        AUTO,
        description="cap on a client's reported sample count, as a multiple of the clients' median; 0 = no limit; "
        "auto = 2 with robust, 10 on real nodes without secure-sum (which hides counts; CCVR, Personal CCVR, QDA 2), "
        "else 0. Test counts in pooled scores have the same cap (auto = 10 on real nodes, else 0)",
    )

    @cached_property
    def rules(self) -> tuple[str, ...]:
        """The rules from left to right; empty = plain averages."""
        return () if self.robust == "none" else tuple(part.strip() for part in self.robust.split("+"))

    @cached_property
    def averages(self) -> tuple[str, ...]:
        """The rules for averages, without a method's own."""
        return tuple(rule for rule in self.rules if rule != "own")

    @property
    def active(self) -> bool:
        """Whether there is any measure against malicious clients, in a resolved group."""
        return bool(self.rules or self.count_cap)
