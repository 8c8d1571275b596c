"""Totals of exact sums: stored at the end of a run, and read by a later one whose clients join or leave them.

The file has the sums over all clients, no single client's, and in its header all that later sums must agree with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedapp.core.gaussian import pack, unpack
from fedapp.errors import BadRequest
from fedapp.federation.hook import Setup
from fedapp.learning.state import StateError, read_checked, write_safetensors
from fedapp.method import ServerState
from fedapp.models import frozen
from fedapp.tasks.node import fingerprint

FILE = "totals.safetensors"
KEPT = ("bits", "largest", "scale", "exact")
"""Entries of the header that go on into later totals."""


def store(run: Setup, state: ServerState) -> None:
    """Store the totals in the final state, if it has any; not of features that this run's clients standardised."""
    found = state.get(run.method.id, {}).get("totals")
    if not found or frozen.of(run.config.model.model, run.config.model).scaled:
        return
    before, now = run.strategy.context.totals, {_site(run, client) for client in found["clients"]}
    sites = now ^ set(before["sites"]) if before else now
    arrays = {name: pack(array) if name == "a" else array for name, array in found["sums"].items()}
    header = {**_identity(run), **{name: found[name] for name in KEPT}, "sites": sorted(sites)}
    write_safetensors(run.directory.path / FILE, arrays, header)


def read(run: Setup) -> ServerState | None:
    """Return the totals that the run names, None where it names none.

    Raises
    ------
    BadRequest : they cannot be read, are of another method, body, classes or width, already hold a client that would
        join, or do not hold one that would leave.
    """
    hparams: Any = run.config.method_and_hparams()[1]
    if not getattr(hparams, "totals", ""):
        return None
    path, told = Path(hparams.totals), f"totals = '{hparams.totals}'"
    try:
        arrays, header, _ = read_checked(path / FILE if path.is_dir() else path, remedy="take a good copy of it")
        found: dict[str, Any] = {name: header[name] for name in (*KEPT, "sites", *_identity(run))}
    except (StateError, KeyError) as e:
        raise BadRequest(f"{told}: no totals: {e}. A run of exact sums without secure-sum stores them") from e
    for name, own in _identity(run).items():
        if found[name] != own:
            raise BadRequest(f"{told}: {name} is {found[name]} there and {own} here: totals need the same")
    here, there = {_site(run, i.client) for i in run.infos}, set(found["sites"])
    for site in sorted(here - there if hparams.leave else here & there):
        wrong = "is not in them" if hparams.leave else "is in them already"
        raise BadRequest(f"{told}: client {site} {wrong}: name it in unseen, or leave it out")
    sums = {name: unpack(a, arrays["b"].shape[1]) if name == "a" else a for name, a in arrays.items()}
    return {**found, "sums": sums}


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
