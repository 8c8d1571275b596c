"""Totals of exact sums: stored at the end of a run, and read by a later one whose clients join or leave them.

The file has the sums over all clients, no single client's, and in its header all that later sums must agree with. Of
each client there is a digest of its sums, by which it is known when it leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedapp.config import RunConfig
from fedapp.core import sums
from fedapp.core.gaussian import pack
from fedapp.errors import BadRequest, faults
from fedapp.federation.hook import Setup
from fedapp.learning.state import StateError, read_checked, write_safetensors
from fedapp.method import Arrays, ServerState
from fedapp.models import frozen
from fedapp.tasks.node import fingerprint

FILE = "totals.safetensors"
BEFORE = "totals-before.safetensors"
"""The totals that a run names, until it has ended: a resumed run reads them here."""
FEWEST_SITES = 2
"""The totals of fewer sites would be the sums of one."""


class Kept(BaseModel):
    """Entries of the header that later sums continue with.

    Attributes
    ----------
    fitted : hyperparameters on which `scale` depends.   sites : digests of the clients' sums, by name.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    bits: Annotated[int, Field(ge=sums.LEAST_BITS, le=sums.MOST_BITS)]
    largest: Annotated[float, Field(ge=0)]
    scale: Annotated[float, Field(gt=0)]
    lost: Annotated[float, Field(ge=0)]
    fitted: dict[str, Any] = {}
    salt: str
    sites: Annotated[dict[str, str], Field(min_length=FEWEST_SITES)]


def store(run: Setup, state: ServerState) -> None:
    """Store the totals in the final state, if it has any; not of features that this run's clients standardised.

    Totals of secure sums are not stored either: the difference between two totals is the sum of few clients.
    """
    found, config = state.get(run.method.id, {}).get("totals"), run.config
    scaled = frozen.of(config.model.model, config.model).scaled or config.data.normalise == "data"
    if not found or scaled or config.secure.secure_sum or not run.infos[0].body:
        return
    before = run.strategy.context.totals
    now = {_site(run, client): digest for client, digest in found["clients"].items()}
    earlier = before["sites"] if before else {}
    sites = {name: own for name, own in (earlier | now).items() if name not in earlier or name not in now}
    if len(sites) < FEWEST_SITES:
        run.warn(f"{FILE} is not stored: the totals of one client are its own sums")
        return
    if before and len(now) == 1:
        run.warn(
            f"the new totals differ from the former ones by the sums of client {next(iter(now))}: delete the older "
            "file to keep them private"
        )
    arrays = {name: pack(array) if name == "a" else array for name, array in found["sums"].items()}
    kept = {name: found[name] for name in Kept.model_fields if name != "sites"}
    write_safetensors(run.directory.path / FILE, arrays, {**_identity(run), **kept, "sites": sites})


def named(config: RunConfig) -> tuple[Arrays, dict[str, Any]] | None:
    """Return arrays and header of the totals that a run names, None where it names none.

    Raises
    ------
    BadRequest : they cannot be read.
    """
    if not (given := getattr(config.method_and_hparams()[1], "totals", "")):
        return None
    path = Path(given) / FILE if Path(given).is_dir() else Path(given)
    try:
        arrays, header, _ = read_checked(path, remedy="take a good copy of it")
        if "bits" not in header:
            raise StateError(f"{path} has other arrays")
        return arrays, header
    except StateError as e:
        raise BadRequest(
            f"totals = '{given}': no totals: {e}. A run of exact sums without secure-sum stores them"
        ) from e


def read(run: Setup) -> ServerState | None:
    """Return the totals that the run names, None where it names none; `leaving` has names and digests by client.

    Raises
    ------
    BadRequest : they are of another method, body, classes or width, cannot be sums of features, already hold a client
        that would join, or do not hold one that would leave.
    """
    hparams: Any
    method, hparams = run.config.method_and_hparams()
    if not (given := getattr(hparams, "totals", "")):
        return None
    told, here = f"totals = '{given}'", _identity(run)
    arrays, header, _ = read_checked(run.directory.path / BEFORE)
    for name, own in here.items():
        if header.get(name) != own:
            there = header.get(name, "missing")
            raise BadRequest(f"{told}: {name} is {there} there and {own} here: totals need the same")
    total: Any = method.reductions(hparams)["query.sums"]["sums"]
    try:
        kept = Kept.model_validate(header)
    except ValidationError as e:
        raise BadRequest(f"{told} is damaged: {faults(e)[0]}") from e
    context = run.strategy.context
    fault = total.check(context, arrays, kept.lost) or sums.problem_of_rounding(
        arrays, kept.bits, total.samples(arrays), kept.largest
    )
    if fault:
        raise BadRequest(f"{told} is damaged: {fault}: take a good copy of it")
    leaving = _check_sites(run, kept.sites, told, leave=hparams.leave)
    return {**kept.model_dump(), "sums": total.read(context, arrays), "leaving": leaving}


def _check_sites(run: Setup, there: Mapping[str, str], told: str, *, leave: bool) -> dict[int, tuple[str, str]]:
    """Refuse clients that join a second time, that leave without having joined, or as the last; see `read`."""
    here = {i.client: _site(run, i.client) for i in run.infos}
    for site in here.values():
        if leave != (site in there):
            wrong = "is not in them" if leave else "is in them already"
            raise BadRequest(f"{told}: client {site} {wrong}: name it in unseen, or leave it out")
    if leave and not there.keys() - here.values():
        raise BadRequest(f"{told}: no client would be left: with leave=true a run has the clients that leave alone")
    return {client: (site, there[site]) for client, site in here.items()} if leave else {}


def _identity(run: Setup) -> dict[str, Any]:
    """Return what sums must have in common."""
    manager, named = run.cohort.manager, run.header.get("classes")
    facts = manager.facts[manager.reference]
    # Nodes with data of their own state their classes; else the server has the names.
    classes = facts.get("classes") or (fingerprint(tuple(named)) if isinstance(named, list) else "")
    shape = [run.header["num_classes"], int(facts["width"])]
    return {"method": run.method.id, "body": run.infos[0].body, "classes and features": shape, "classes": classes}


def _site(run: Setup, client: int) -> str:
    """Return the name by which a client is known from run to run."""
    return run.names[client] if run.names else str(client)
