"""The server's model: the first one named by clients that the server can build and that fits most of them."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from fedapp.config import RunConfig
from fedapp.errors import BadRequest
from fedapp.learning.task import ModelSpec
from fedapp.method import Arrays, ClientInfo
from fedapp.models import MODEL_NAMES, check_model, weights
from fedapp.models.bounded import Bounded
from fedapp.transport.cohort import Cohort


def known_model(config: RunConfig, clients: Sequence[ClientInfo]) -> str:
    """Return the run's `model` with `auto` replaced by the model that the clients name.

    Only by a name of the zoo: code that a client names must not get into the run's configuration.
    """
    theirs = [i.model for i in clients if config.model.name_of(i.client) == "auto" and i.model in MODEL_NAMES]
    auto = Counter(theirs).most_common(1)[0][0] if theirs else "auto"
    return ",".join(auto if name == "auto" else name for name in config.model.names)


def buildable(infos: Sequence[ClientInfo], config: RunConfig) -> list[ClientInfo]:
    """Return the clients whose architecture the server may build: of the zoo, or an own model of its own run.

    A node may name any text as its model, and the server imports no code for that.

    Raises
    ------
    BadRequest : there is none; says what to do.
    """
    found = [i for i in infos if i.model in (*MODEL_NAMES, *config.model.names)]
    if not found:
        names = ", ".join(sorted({i.model for i in infos}))
        raise BadRequest(
            f"the nodes have models ({names}) that this run does not name, and the server "
            "builds one of them for its initial values: name it in the run's model, or give one node a model of fedapp"
        )
    return found


def impossible(manager: Cohort) -> dict[int, str]:
    """Return why clients cannot have the model that they name, by client: it does not take their samples."""

    @functools.cache
    def problem(model: str, shape: tuple[int, ...]) -> str:
        try:
            check_model(model, shape)
        except BadRequest as e:
            return f"cannot have the model that it names: {e}"
        return ""

    named = {i.client: i.model for i in manager.infos.values() if i.model in MODEL_NAMES}
    found = {c: problem(model, manager.shape_of(c)) for c, model in named.items()}
    return {c: f"client {c} {text}" for c, text in found.items() if text}


def choose(
    manager: Cohort, infos: Sequence[ClientInfo], config: RunConfig, initial: Callable[[ModelSpec], Arrays]
) -> ModelSpec:
    """Choose the server's model for the clients of one body, and leave out those that do not fit it.

    A client may name any model. So the server takes the first one that it can build and whose shared arrays have
    the shapes that more than half of the clients state, or the one that fits most of them.

    Parameters
    ----------
    infos : the clients that take part, of one body.   initial : returns the shared arrays of a new model.

    Raises
    ------
    BadRequest : there is no model that the server may build, or too few clients are left.
    Exception : none can be built: that of the first.
    """
    failed: list[Exception] = []
    alike = {c: i for c, i in manager.infos.items() if i.body == infos[0].body}
    found: tuple[ModelSpec, dict[int, str]] | None = None
    for built in manager.candidates(buildable(infos, config), infos):
        shape = manager.shape_of(built.client)  # a method for several architectures may have inputs of several shapes
        spec = ModelSpec(built.model, built.num_classes, shape, 0, config.model, config.privacy.unit_features)
        # The size of a model of the zoo follows from the shape that a client states.
        limit = Bounded(manager.most_numbers, f"a model for samples of the shape {shape} is too large")
        try:
            with limit if built.model in MODEL_NAMES else contextlib.nullcontext():
                wrong = _misfits(alike, initial(spec))
        except Exception as e:  # another client's model may be one that the server can build
            failed.append(e)
            continue
        if found is None or len(wrong) < len(found[1]):
            found = spec, wrong
        if 2 * len(wrong) < len(alike):
            break
    if found is None:
        raise failed[0]
    spec, wrong = found
    wrong |= _other_weights(alike, config)
    if wrong:
        manager.leave_out(wrong)
    return spec


def _misfits(infos: Mapping[int, ClientInfo], initial: Arrays) -> dict[int, str]:
    """Return by client a shared array whose stated shape is not the one in the server's model."""
    own = {name: tuple(array.shape) for name, array in initial.items()}
    # Clients of a simulation share the shapes of the one that was asked.
    wrong = {
        id(s): [name for name, shape in own.items() if s.get(name) != shape]
        for s in {id(i.shapes): i.shapes for i in infos.values()}.values()
    }
    return {
        i.client: f"'{name}' has shape {i.shapes.get(name)} at client {i.client}, {own[name]} in the server's "
        "model: use the same version of fedapp everywhere"
        for i in infos.values()
        for name in wrong[id(i.shapes)]
    }


def _other_weights(infos: Mapping[int, ClientInfo], config: RunConfig) -> dict[int, str]:
    """Return which clients have other stored weights than the server, with the reason."""
    with_weights = [i for i in infos.values() if "weights" in i.common]
    # Without a file of its own the server has nothing that such a client could share.
    checksum = weights.checksum(config.model.weights) if with_weights and config.model.weights else ""
    return {
        i.client: f"weights = '{config.model.weights}' is another file on the server than on the nodes "
        f"(client {i.client}), by its SHA-256, and layers in freeze must be the same everywhere: use the same file"
        for i in with_weights
        if i.common["weights"] != checksum
    }
