"""Class statistics with noise (`dp = example`): what FedGH, FedNCM, Fed3R, LDA and CCVR send instead of exact ones.

Features have norm 1 (`SplitModel.unit`), so one image moves counts, sums and second moments by a known distance
(`core.privacy.Joint`). This holds only where the body does not depend on the client's images: it is the one that
the run gives, and no client trains it. Always all classes are sent; those that a client lacks are noise alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from fedapp.core.gaussian import pack
from fedapp.core.privacy import BOUND, Joint, Squares, clip_rows
from fedapp.core.sums import FeatureSums
from fedapp.lazy import Tensor, torch
from fedapp.learning.releases import Releaser
from fedapp.learning.task import Task
from fedapp.method import Array, Arrays

if TYPE_CHECKING:
    from fedapp.models import SplitModel

NAMES = ("count", "sum", "square")
"""Parts of a release, see `Joint.shapes`."""


class Client(Protocol):
    """A client with a ledger, its classes and the width of its features."""

    task: Task
    model: SplitModel
    releaser: Releaser | None
    released: bool


def release(client: Client, rows: Iterable[tuple[Tensor, Tensor]], squares: Squares, what: str) -> Arrays:
    """Return noised counts, sums and second moments of features, booked before.

    Parameters
    ----------
    rows : features (n, d) with labels (n,), in parts.
    squares : which second moments, see `Joint`.
    what : for the ledger.

    Raises
    ------
    BadRequest : the release would pass the client's budget.
    RuntimeError : no noise mechanism exists.
    """
    if client.releaser is None:
        raise RuntimeError("dp is enabled but no noise mechanism exists; reply withheld")
    joint = Joint(client.task.num_classes, client.model.width, squares)
    apart = joint.classes if squares == "classes" else 1
    found = [FeatureSums(joint.classes, joint.width, squares != "none") for _ in range(apart)]
    for z, label in rows:
        # In float64 again: rounding must not make a row longer than what the noise is for.
        short = torch.from_numpy(clip_rows(z, BOUND))
        for c, part in enumerate(found):
            chosen = label.cpu() == c if apart > 1 else slice(None)
            part.update(short[chosen], label.cpu()[chosen])
    b = sum((part.b for part in found[1:]), found[0].b)
    exact: dict[str, Array] = {"count": b[:, -1], "sum": b[:, :-1]}
    if squares != "none":
        moments: list[Any] = [pack(part.squares()) for part in found]
        exact["square"] = moments[0] if apart == 1 else torch.stack([torch.from_numpy(m) for m in moments]).numpy()
    numbers, client.released = client.releaser.release_once(joint.vector(exact), joint.sensitivity, what)
    return joint.parts(numbers)
