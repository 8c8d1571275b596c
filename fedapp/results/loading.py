"""The model that one gets back: `fedapp.load` makes a module of a run directory, or of a node's stored model.

| `point`    | a client of a simulation                                    | a client of real devices             |
|------------|-------------------------------------------------------------|--------------------------------------|
| `trained`  | with `keep-models` the model that `trained_accuracy` of     | `personal.safetensors` of the node   |
|            | final.csv scores; else its model after its last training    |                                      |
| `received` | with `keep-models` the model of `received_accuracy`         | `received.safetensors` of the node   |

With `final-training = false` the model after the last training is the one that final.csv scores. With `select =
validation` the chosen round replaces the last one. Without a client it is
the global model of the method, as the server published it at the end.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from fedapp.config import RunConfig
from fedapp.data import datasets
from fedapp.data.names import absent, is_there
from fedapp.errors import BadRequest, suggest
from fedapp.files import absolute
from fedapp.learning.state import StateError, read_safetensors
from fedapp.models import own
from fedapp.results.analysis import client_folders
from fedapp.results.predict import FILES, LoadedModel, read_model
from fedapp.results.predict import rebuilt as rebuild
from fedapp.results.runs import RUN_MARK, RunResult, read_json, read_run
from fedapp.results.whole import AnotherBody, WholeModel


def load(
    run_dir: str | Path,
    client: int | str | None = None,
    point: Literal["trained", "received", "tuned"] = "trained",
    allow: str = "",
    body: str = "",
) -> LoadedModel:
    """Return a model that a run has trained, as a module in evaluation mode that takes raw samples.

    Parameters
    ----------
    run_dir : a run directory; on a node `STATE-DIR/<federation>`, or the folder of a client in it.
    client : number of the client, as in final.csv, or its name in the data; None = the global model of the method.
    point : `trained` = after local training, `received` = as the server sent it, `tuned` = fine-tuned, by methods
        that do so; see the head of this module. The attribute `about` says which model was found.
    allow : own models that the run may name, `package.module:function` or `package.*` with commas between them; their
        code is imported.
    body : first 8 or more digits of the digest of a pretrained body, where the run has one head for each (`bodies`).

    Returns
    -------
    With the attributes `classes`, `kind`, `model` (the `SplitModel`), and the functions `transform(raw)` and
    `predict(raw)`, class probabilities (N, C). With `with_body(body)` a head on features takes raw pictures or texts.

    Raises
    ------
    BadRequest : no client or model has this name; the message lists those that exist, or how to get one.

    Examples
    --------
    >>> net = load("runs/a", client=3)  # doctest: +SKIP
    >>> net.predict(x).argmax(axis=1)  # doctest: +SKIP
    """
    place, body = absolute(run_dir), body.lower()
    if point not in FILES:
        raise BadRequest(f"point = {point!r}: choose from {', '.join(FILES)}")
    if is_there(place / RUN_MARK):
        run = read_run(place)
        if run.config is None:
            raise BadRequest(f"this version does not accept the configuration of {place}: {run.problem}")
        if client is None:
            net = _global(run, run.config, allow, body)
        else:
            net = _client(run, run.config, _number(run, run.config, client), point, allow)
        if not net.inputs.body.startswith(body):
            raise BadRequest(f"the model of {run.out} is of the body {net.inputs.body or '(none)'}, not of {body}")
        return net
    if not is_there(place):
        raise absent(place, "give a run directory, or on a node STATE-DIR/<federation>")
    own = place / str(client) if isinstance(client, int) else place
    if (own / FILES[point]).is_file():
        return read_model(own / FILES[point], allow=allow)
    raise BadRequest(
        f"{own} holds no {FILES[point]}, and {place} is not a run directory: give a run directory, or on a node "
        "STATE-DIR/<federation> with the number of the client"
    )


def load_with_body(run_dir: str | Path, body: str, **how: Any) -> LoadedModel | WholeModel:
    """Return a model that a run has trained together with its pretrained body; of several heads the one of this body.

    Parameters
    ----------
    body : see :meth:`LoadedModel.with_body`; or as in `load`, for the head alone.   how : see `load`.

    Raises
    ------
    BadRequest : see both.
    """
    if re.fullmatch("[0-9a-fA-F]{8,64}", body):
        return load(run_dir, **how, body=body)
    heads = _heads(absolute(run_dir)) if how.get("client") is None else []
    found, problems = dict[str, WholeModel](), list[BadRequest]()
    for digits in heads:
        try:
            found[digits] = load(run_dir, **how, body=digits).with_body(body)
        except BadRequest as e:
            problems += [] if isinstance(e, AnotherBody) else [e]
    if len(found) > 1:
        raise BadRequest(f"'{body}' is the body of the heads {', '.join(found)}: write its size, mean and std too")
    if problems and not found:
        raise problems[0]
    return next(iter(found.values())) if found else load(run_dir, **how).with_body(body)


def _heads(run_dir: Path) -> list[str]:
    """Return the first 8 digits of each body that has a head of its own."""
    return sorted(path.stem.removeprefix("last-") for path in (run_dir / "models").glob("last-*.safetensors"))


def _facts(run: RunResult, config: RunConfig) -> dict[str, Any]:
    """Return the run's record of its data: shape, normalisation, classes, names of the clients."""
    if config.data.normalise == "client":
        raise BadRequest(
            f"in {run.out} every client normalised by itself (normalise = client), and only kept models say how: give "
            "a client, of a run with keep-models = true (up to 100 clients it is the default)"
        )
    if (facts := read_json(run.out / "inputs.json")).keys() - {"clients"}:
        return facts
    if facts:
        raise BadRequest(
            f"the clients of {run.out} have samples of several shapes, and only kept models say which: give a client, "
            "of a run with keep-models = true (up to 100 clients it is the default)"
        )
    known = datasets.published(config.data.dataset)
    if known is None:
        raise BadRequest(
            f"{run.out} has no inputs.json with the normalisation of the samples (a run of an earlier version, or of "
            "real devices): give a node's personal.safetensors, or run again"
        )
    return {**vars(known), "shape": known.shape, "num_classes": len(known.classes)}


def _names(run: RunResult) -> list[str]:
    names = read_json(run.out / "inputs.json").get("clients", [])
    return [str(name) for name in names] if isinstance(names, list) else []


def _number(run: RunResult, config: RunConfig, client: int | str) -> int:
    """Return the number of a client that is given by number or by name."""
    if isinstance(client, str):
        names = _names(run)
        if not names:
            raise BadRequest(f"the clients of {run.out} have no names: give a number, as in final.csv")
        if client not in names:
            choice = f"choose from {', '.join(names[:40])}"
            raise BadRequest(f"no client '{client}'{suggest(client, names, choice)}")
        return names.index(client)
    count = int(run.summary.get("clients") or config.data.clients or len(run.counts))
    if isinstance(client, bool) or client < 0 or (count and client >= count):
        raise BadRequest(f"no client {client}: {run.out} has the clients 0 .. {count - 1}")
    return client


def _scored_round(run: RunResult) -> int:
    """Return the round whose models final.csv scores: the last one, or the one chosen on validation rows."""
    last = int(run.rounds["round"].max()) if len(run.rounds) else 0
    return int(run.summary.get("round") or last)


def _client(run: RunResult, config: RunConfig, client: int, point: str, allow: str) -> LoadedModel:
    names = _names(run)
    scored = _scored_round(run)
    more: dict[str, Any] = {"client": client, "name": names[client] if client < len(names) else ""}
    kept = run.out / "models" / "clients" / str(client) / FILES[point]
    if kept.is_file():
        after = {"trained": " and one more local training", "tuned": ", fine-tuned"}
        when = f"after round {scored}" + after.get(point, ", as received")
        return read_model(kept, more={**more, "when": when}, allow=allow)
    if point != "trained":
        if run.alone:
            raise BadRequest(f"clients of {run.method} receive nothing: leave out point")
        if point == "tuned" and "tuned" not in run.protocols:
            raise BadRequest(f"clients of {run.method} do not fine-tune the received model: leave out point")
        raise BadRequest(
            f"{run.out} has not kept the received model of client {client}: run again with keep-models = true (up to "
            "100 clients it is the default), or take the model after training"
        )
    folder = client_folders(run).get(client)
    files = sorted(folder.glob(f"{run.versions.get('run', '')}.*.safetensors")) if folder else []
    files = [f for f in files if f.name.split(".")[1] <= f"{scored:06d}"]
    if not files:
        trained = sorted(set(run.clients.get("client", ())))
        if client not in trained:
            told = ", ".join(map(str, trained[:40])) + (", ..." if len(trained) > 40 else "")
            raise BadRequest(f"client {client} has never trained in {run.out}; those that have: {told or 'none'}")
        where = config.storage.state_dir or run.out / "state"
        raise BadRequest(
            f"the state of client {client} is not in {where}. If it was deleted, run again: fedapp run "
            f"{run.out / RUN_MARK}. Real nodes keep it themselves: give "
            f"STATE-DIR/{config.storage.federation or 'run'} there"
        )
    try:
        arrays, header = read_safetensors(files[-1])
    except StateError as e:
        raise BadRequest(str(e)) from e
    head = {
        **_facts(run, config),
        **more,
        "method": config.federation.method,
        "method-args": config.federation.method_args,
        "model": config.model.name_of(client),
        "model-options": own.header(config.model, config.privacy.unit_features),
        "made-with": run.versions,
        "when": f"after its last training, in round {header.get('round')}",
    }
    model = {name.removeprefix("model/"): a for name, a in arrays.items() if name.startswith("model/")}
    return rebuild(files[-1], head, model, allow)


def _global(run: RunResult, config: RunConfig, allow: str, body: str) -> LoadedModel:
    method, _ = config.method_and_hparams()
    if not method.global_model:
        raise BadRequest(
            f"{config.federation.method} has no global model: give the client whose model you want, such as client=0"
        )
    heads = _heads(run.out)
    of = heads if len(heads) == 1 and not body else [digits for digits in heads if body.startswith(digits)]
    if heads and not of:
        raise BadRequest(
            f"{run.out} has a head for each of the bodies {', '.join(heads)}: name one of these bodies with --with (in "
            f"Python body='{heads[0]}')"
        )
    path = run.out / "models" / (f"last-{of[0]}.safetensors" if of else "last.safetensors")
    if not path.is_file():
        raise BadRequest(f"{path} is not there: no round of the run has finished, or the file was deleted")
    scored = _scored_round(run)
    more = {"when": f"global model after round {scored}"}
    return read_model(path, more=more, facts=lambda: _facts(run, config), allow=allow)
