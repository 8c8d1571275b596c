"""Totals of exact sums: stored at the end of a run, and read by a later one whose clients join or leave them.

The file has the sums over all clients, no single client's, and in its header all that later sums must agree with.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedapp.core import sums
from fedapp.core.gaussian import pack, unpack
from fedapp.errors import BadRequest, faults
from fedapp.federation.hook import Setup
from fedapp.learning.state import StateError, read_checked, write_safetensors
from fedapp.method import Arrays, ServerState
from fedapp.models import frozen
from fedapp.tasks.node import fingerprint

FILE = "totals.safetensors"
FEWEST_SITES = 2
"""The totals of fewer sites would be the sums of one."""


class Kept(BaseModel):
    """Entries of the header that later sums continue with; `sites` are their training rows by name."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    bits: Annotated[int, Field(ge=sums.LEAST_BITS, le=sums.MOST_BITS)]
    largest: Annotated[float, Field(ge=0)]
    scale: Annotated[float, Field(gt=0)]
    exact: bool
    sites: dict[str, Annotated[int, Field(ge=1)]]


def store(run: Setup, state: ServerState) -> None:
    """Store the totals in the final state, if it has any; not of features that this run's clients standardised.

    Totals of secure sums are not stored either: the difference between two totals is the sum of few clients.
    """
    found, config = state.get(run.method.id, {}).get("totals"), run.config
    scaled = frozen.of(config.model.model, config.model).scaled or config.data.normalise == "data"
    if not found or scaled or config.secure.secure_sum or not run.infos[0].body:
        return
    before = run.strategy.context.totals
    now = {_site(run, client): rows for client, rows in found["clients"].items()}
    earlier = before["sites"] if before else {}
    sites = {name: n for name, n in (earlier | now).items() if name not in earlier or name not in now}
    if len(sites) < FEWEST_SITES:
        run.warn(f"{FILE} is not stored: the totals of one client are its own sums")
        return
    if before and len(now) == 1:
        run.warn(
            f"the new totals differ from the former ones by the sums of client {next(iter(now))}: delete the older "
            "file to keep them private"
        )
    arrays = {name: pack(array) if name == "a" else array for name, array in found["sums"].items()}
    kept = {name: found[name] for name in ("bits", "largest", "scale", "exact")}
    write_safetensors(run.directory.path / FILE, arrays, {**_identity(run), **kept, "sites": sites})


def read(run: Setup) -> ServerState | None:
    """Return the totals that the run names, None where it names none.

    Raises
    ------
    BadRequest : they cannot be read, are of another method, body, classes or width, cannot be sums of features, already
        hold a client that would join, or do not hold one that would leave with as many rows.
    """
    hparams: Any = run.config.method_and_hparams()[1]
    if not getattr(hparams, "totals", ""):
        return None
    path, told, here = Path(hparams.totals), f"totals = '{hparams.totals}'", _identity(run)
    try:
        arrays, header, _ = read_checked(path / FILE if path.is_dir() else path, remedy="take a good copy of it")
        there = {name: header[name] for name in here}
    except (StateError, KeyError) as e:
        raise BadRequest(f"{told}: no totals: {e}. A run of exact sums without secure-sum stores them") from e
    for name, own in here.items():
        if there[name] != own:
            raise BadRequest(f"{told}: {name} is {there[name]} there and {own} here: totals need the same")
    try:
        kept = Kept.model_validate(header)
    except ValidationError as e:
        raise BadRequest(f"{told} is damaged: {faults(e)[0]}") from e
    if fault := _fault(arrays, kept, *here["classes and features"]):
        raise BadRequest(f"{told} is damaged: {fault}: take a good copy of it")
    _check_sites(run, kept.sites, told, leave=hparams.leave)
    whole = {name: unpack(a, arrays["b"].shape[1]) if name == "a" else a for name, a in arrays.items()}
    return {**kept.model_dump(), "sums": whole}


def _fault(arrays: Arrays, kept: Kept, classes: int, width: int) -> str | None:
    """Say why arrays of a file cannot be the exact sums of these sites, or return None."""
    if fault := sums.problem_of(arrays, classes, width, np.dtype(np.float64).type if "a" in arrays else None):
        return fault
    if arrays["b"][:, -1].sum() != sum(kept.sites.values()):
        return "the sites have other numbers of rows than the sums"
    for name, power in {"b": 1, "a": 2}.items():
        steps = arrays.get(name, np.zeros(1)) * 2.0 ** (power * kept.bits)
        if kept.exact and (np.any(np.rint(steps) != steps) or np.abs(steps).max() > 2.0**53):
            return f"{name} holds no exact sums"
    return None


def _check_sites(run: Setup, there: Mapping[str, int], told: str, *, leave: bool) -> None:
    """Refuse clients that join a second time, that leave without having joined, or with other rows, or as the last."""
    here = {_site(run, i.client): i.num_samples for i in run.infos}
    for site in sorted(here.keys() - there if leave else here.keys() & there):
        wrong = "is not in them" if leave else "is in them already"
        raise BadRequest(f"{told}: client {site} {wrong}: name it in unseen, or leave it out")
    if not leave:
        return
    if not there.keys() - here:
        raise BadRequest(f"{told}: no client would be left: with leave=true a run has the clients that leave alone")
    if run.split not in ("", "given"):
        raise BadRequest(f"{told}: a client leaves with its own training rows: give the data a column split")
    for site, rows in here.items():
        if rows != there[site]:
            raise BadRequest(f"{told}: client {site} has {rows} training rows, and {there[site]} are in them")


def _identity(run: Setup) -> dict[str, Any]:
    """Return what sums must have in common."""
    manager, named = run.cohort.manager, run.header.get("classes")
    facts = manager.facts[manager.reference]
    # Nodes with data of their own state their classes; else the server has the names.
    classes = facts.get("classes") or (fingerprint(tuple(named)) if isinstance(named, list) else "")
    shape = [run.header["num_classes"], int(facts["width"])]
    return {"method": run.method.id, "body": run.infos[0].body, "classes": classes, "classes and features": shape}


def _site(run: Setup, client: int) -> str:
    """Return the name by which a client is known from run to run."""
    return run.names[client] if run.names else str(client)
