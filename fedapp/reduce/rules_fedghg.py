"""The rule of FedGHG: that of FedGH for class means, and bounds for their covariances and counts."""

from __future__ import annotations

import dataclasses

import numpy as np

from fedapp.core.robust import capped_statistics
from fedapp.method import Arrays
from fedapp.reduce.rules_ccvr import scale_covariances
from fedapp.reduce.rules_fedgh import ScreenedRows
from fedapp.reduce.spec import LABELS, ClassRows, Rows
from fedapp.settings import RobustnessSettings


class BoundedGaussians(ScreenedRows):
    """Rows with covariances and counts; with `robust` covariances far above the others' of their class are shortened.

    `count-cap` bounds the counts.
    """

    def __init__(self, spec: Rows, robust: RobustnessSettings) -> None:
        super().__init__(spec)
        self.robust = robust

    def result(self) -> list[ClassRows]:
        """Return the rows that are left; the arrays of their replies are bounded."""
        found = [of for of in (super().result() if self.robust.rules else self._found) if len(of.labels)]
        sent = [self._statistics(of.reply.arrays) for of in found]
        if self.robust.rules and any("cov" in arrays for arrays in sent):
            scale_covariances(sent)
        if self.robust.count_cap and self.spec.counted:
            capped = capped_statistics([{"count": arrays["count"]} for arrays in sent], self.robust.count_cap)
            sent = [{**arrays, self.spec.counted: of["count"]} for arrays, of in zip(sent, capped, strict=True)]
        return [
            dataclasses.replace(of, reply=dataclasses.replace(of.reply, arrays=arrays))
            for of, arrays in zip(found, sent, strict=True)
        ]

    def _statistics(self, arrays: Arrays) -> Arrays:
        """Return the arrays of a reply under the names of the statistics of CCVR too."""
        count = arrays.get(self.spec.counted, np.full(len(arrays[LABELS]), 2))
        return {**arrays, "ids": arrays[LABELS], "mean": arrays[self.spec.rows], "count": count}
