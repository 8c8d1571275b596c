"""Clients of a run with `dp = example`: noised counts, sums and second moments take the place of exact statistics.

What one image can change is known only if the body does not depend on the client's images: all clients have the
same one, as the run gives it. Where a method trains round by round (FedGH), its clients train the head alone. Their
statistics are then the same in all rounds, so they are released once, and the same numbers are sent again, which
reveals nothing more.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from clients.base import FedClient
from clients.fedgh import FedGHClient
from fedapp.core.names import prefixed
from fedapp.learning.task import ModelSpec, with_common_seed
from fedapp.learning.training import Phase
from fedapp.method import HEAD, Arrays, BaseHParams, Method, Payload
from fedapp.privacy import statistics
from fedapp.reduce.noised import Noised, noised

if TYPE_CHECKING:
    from fedapp.models import SplitModel


class NoisedAnswers(FedClient):
    """Answers a query for statistics with noised ones.

    Attributes
    ----------
    forms : the reductions with noise, by exchange.
    """

    forms: ClassVar[dict[str, Noised]] = {}

    def answer(self, kind: str, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        """Release the statistics, or answer as the method does where nothing has noise."""
        form = self.forms.get(f"query.{kind}")
        if form is None:
            return super().answer(kind, payload)
        found = statistics.release(self, self.feature_batches(kind), form.moments, kind)
        return prefixed(form.prefix, found), self.measure("received")


class NoisedFedGHClient(NoisedAnswers, FedGHClient):
    """Trains the header alone (FedGH, Eq. 6 without phi), and sends noised counts (C,) and sums (C, d)."""

    def lars(self) -> Arrays:
        """Return the statistics, from the first round on the same."""
        form, names = self.forms["train"], ("count", "sum")
        if all(f"released/{n}" in self.own for n in names):
            self.released = True
        else:
            found = statistics.release(self, self.feature_batches("train"), form.moments, "class means")
            self.own |= {f"released/{n}": found[n] for n in names}
        return {form.prefix + n: self.own[f"released/{n}"] for n in names}

    def phases(self) -> Sequence[Phase]:
        """Train the head alone."""
        return [Phase(self.step_loss, self.training, HEAD)]

    @classmethod
    def build_model(cls, spec: ModelSpec, hparams: Any) -> SplitModel:
        """Build the model with the values of the server's, since means must be comparable."""
        return super().build_model(with_common_seed(spec), hparams)


@functools.lru_cache(maxsize=32)
def _noised(kind: type[FedClient], forms: tuple[tuple[str, Noised], ...]) -> type[FedClient]:
    outer = NoisedFedGHClient if issubclass(kind, FedGHClient) else NoisedAnswers
    return type(f"Noised{kind.__name__}", (outer, kind), {"forms": dict(forms), "__doc__": kind.__doc__})


def noised_client(method: Method, hparams: BaseHParams) -> type[FedClient]:
    """Return the class of the method's clients in a run with `dp = example`; the method's own if nothing has noise."""
    found = {exchange: [noised(r) for r in of.values()] for exchange, of in method.reductions(hparams).items()}
    forms = tuple((exchange, r) for exchange, of in found.items() for r in of if isinstance(r, Noised))
    kind: Any = method.client
    return _noised(kind, forms) if forms else method.client
