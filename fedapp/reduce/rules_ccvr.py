"""The rule of CCVR: statistics that are out of line are bounded or left out, and each client's effect is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fedapp.core.gaussian import ClassMoments
from fedapp.core.names import under
from fedapp.core.robust import FAR, FEW, pulls, screened_statistics
from fedapp.method import Arrays, Reply, ServerContext, ServerState
from fedapp.reduce.plain import PlainMoments
from fedapp.reduce.spec import Audit, Gaussians


class ScreenedMoments(PlainMoments):
    """Gaussians of all clients, screened class by class and then pooled."""

    def __init__(self, spec: Gaussians, context: ServerContext, state: ServerState) -> None:
        super().__init__(spec, context, state)
        self._answers: dict[int, Arrays] = {}
        self._screened: dict[str, int] = {}

    def add(self, reply: Reply) -> None:
        """Keep the statistics of a reply."""
        self._answers[reply.client] = under(self.spec.prefix, reply.arrays)

    def result(self) -> ClassMoments:
        """Return the pooled Gaussians that are left."""
        kept, self._screened = screened_statistics(list(self._answers.values()))
        self._answers = dict(zip(self._answers, kept, strict=True))
        return self._pooled(kept)

    def audit(self, fit: Callable[[ClassMoments], Arrays], whole: Arrays) -> Audit:
        """Repeat a fit without each client; a move that is longer than `FAR` times the median one is named."""
        clients = list(self._answers) if len(self._answers) >= FEW else []
        without = [fit(self._pooled(a for c, a in self._answers.items() if c != client)) for client in clients]
        far = {c: round(float(p), 2) for c, p in zip(clients, pulls(without, whole), strict=True) if p > FAR}
        return Audit(self._screened, far)

    def _pooled(self, answers: Iterable[Arrays]) -> ClassMoments:
        pool = self._empty()
        for arrays in answers:
            pool.add(arrays)
        return pool.moments()
