"""A client's own ledger of its noised releases, and the one way to make them.

There is one ledger for each client and data set, for all runs and federations: the budget belongs to the images. Every
release is booked and on the disk before a noised number leaves the function that draws the noise. A release that would
pass the budget is refused. The ledger is a text file, one JSON object a line, in the folder of the node's state:
``STATE-DIR/privacy/<client>-<data set>.jsonl``.

In a secure sum each client adds its share of the noise (`Privacy.share`), and the release is booked with the noise that
the sum has at least, so epsilon is that of the sum.

Each line names the hash of all lines before it. The hash of the last one also stands in the client's state (`head`), in
each federation, and the server sends each client its number of releases. So an older copy of the ledger that was
put back is noticed: it would give the budget back that was spent since. If state and ledger are put back together, of a
client that no run goes on with, it is not noticed.

Releases for images add up as Gaussians do, and steps of DP-SGD by their moments (`core.privacy`). A release for whole
clients moves by up to twice its bound if one image changes, so for images it counts with half its noise. The other way
round nothing can be said, and a release for clients is refused after one for images.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.core.noise import Source, seeded, system
from fedapp.core.privacy import Float64, Privacy, Steps, composed, epsilon_of, noise_for, noised_steps, on_grid, step_of
from fedapp.errors import BadRequest
from fedapp.files import atomic, locked, private_folder, synced
from fedapp.learning.dp_sgd import NoisySteps

SCHEMA = 2
"""Of lines with steps of a training; those of single releases have 1. An older fedapp reads only the latter."""
KEPT = 9
"""Earlier runs whose released statistics stay, for a repeated exchange."""
PATIENCE = 60.0
"""Seconds to wait for another process that books in the same ledger."""
ROUNDING = 1e-6
"""Share by which a sum of releases may pass the budget that their noise was computed from."""


def path_of(root: Path, client: int, dataset: str) -> Path:
    """Return the ledger of a client and a data set, given by its name or by the path of own data."""
    word = re.sub(r"[^a-zA-Z0-9]+", "-", Path(dataset).name)[:40] or "data"
    return root / "privacy" / f"{client}-{word}-{hashlib.sha256(dataset.encode()).hexdigest()[:12]}.jsonl"


@dataclass(frozen=True)
class Spent:
    """What a ledger adds up to: releases, and epsilon at the delta that was asked for."""

    releases: int
    epsilon: float


class Ledger:
    """The releases of one client from one data set.

    Parameters
    ----------
    path : of the file; it and its folder are made with the first release.
    head : file that keeps the number of releases and the hash of the last one apart from the ledger; None = nowhere.
    known : releases that the server has counted.
    """

    def __init__(self, path: Path, head: Path | None = None, known: int = 0) -> None:
        self.path = path
        self.head = head
        self.known = known

    def entries(self) -> list[dict[str, Any]]:
        """Return all releases, the oldest first.

        A last line without its end was not booked: nothing was released after it.

        Raises
        ------
        BadRequest : a line is damaged, or lines are missing.
        """
        return self._read()[0]

    def _read(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Return all releases, and the hashes of the lines up to each of them, from none to all."""
        whole = self.path.read_bytes() if self.path.is_file() else b""
        found, hashes = [], [""]
        for number, body in enumerate(whole.split(b"\n")[:-1], start=1):
            line = body.decode("utf-8", errors="replace")
            try:
                entry = json.loads(line)
                known = entry["schema"] in (1, SCHEMA) and entry["unit"] in ("example", "client")
                if not (known and entry["noise"] > 0):
                    raise ValueError("it is not a release")
                if entry.get("after", hashes[-1]) != hashes[-1]:
                    raise ValueError("a line before it is missing or was changed")
                if entry["schema"] == SCHEMA and not (0 < entry["rate"] <= 1 and entry["steps"] >= 1):
                    raise ValueError("invalid steps of a training")
            except (ValueError, TypeError, KeyError) as e:
                raise BadRequest(
                    f"{self.path}, line {number} of this client's ledger of releases cannot be read ({e}): put a good "
                    "copy back; without the ledger the spent budget is unknown"
                ) from e
            found.append(entry)
            hashes.append(_chained(hashes[-1], body))
        self._check(hashes)
        return found, hashes

    def _check(self, hashes: list[str]) -> None:
        """Refuse a ledger that lacks releases which the client's state or the server has counted."""
        count, same = self.known, True
        for head in self._heads():
            try:
                noted = json.loads(head.read_text(encoding="utf-8"))
                releases = int(noted["releases"])
                same &= releases < len(hashes) and hashes[releases] == str(noted["hash"])
            except (OSError, ValueError, TypeError, KeyError) as e:
                raise BadRequest(f"cannot read {head} (length of this client's ledger; {e}): "
                                 "put a good copy of it back") from e  # fmt: skip
            count = max(count, releases)
        if count >= len(hashes) or not same:
            raise BadRequest(
                f"{self.path} is an older copy of this client's ledger, or another one: it has {len(hashes) - 1} "
                f"releases, and {count} were made. Put the newest copy back: with an older one the budget would be "
                "spent twice"
            )

    def _heads(self) -> list[Path]:
        """Return the notes on this ledger in the states of all federations, which have it in common."""
        if self.head is None:
            return []
        client = self.head.parent
        return sorted(client.parent.parent.glob(f"*/{client.name}/{self.head.name}"))

    def spent(self, unit: str, delta: float) -> Spent:
        """Return how many releases there are, and their epsilon for a unit; infinite for clients after images."""
        entries = self.entries()
        if unit == "client" and any(e["unit"] == "example" for e in entries):
            return Spent(len(entries), float("inf"))
        return Spent(len(entries), _epsilon(entries, unit, delta))

    def book(self, privacy: Privacy, about: dict[str, Any], steps: Steps | None = None) -> Spent:
        """Write one release down; it is on the disk when this returns.

        Parameters
        ----------
        steps : of the training that is released, with `privacy.sgd`.

        Raises
        ------
        BadRequest : the release would pass the budget, or the ledger cannot be read or written.
        """
        private_folder(self.path.parent, durable=True)
        taken = f"{self.path} is held by another process: end it, then start again"
        try:
            with locked(Path(f"{self.path}.lock"), taken, PATIENCE):
                return self._book(privacy, about, steps)
        except OSError as e:
            raise BadRequest(f"{self.path} cannot be written ({e.strerror}), so nothing is released") from e

    def _book(self, privacy: Privacy, about: dict[str, Any], steps: Steps | None) -> Spent:
        (entries, hashes), unit = self._read(), privacy.unit
        if unit == "client" and any(e["unit"] == "example" for e in entries):
            raise BadRequest(
                "the ledger of this client holds releases for single samples, after which nothing can be stated for "
                "the whole client: use dp = 'example' or 'sgd', or other data"
            )
        entry = {"schema": 1, "unit": unit, "noise": privacy.noise, "time": time.time(), "test": privacy.test}
        if steps is not None:
            entry |= {"schema": SCHEMA, "noise": steps.noise, "rate": steps.rate, "steps": steps.count}
        if privacy.summed:
            entry |= {"summed": privacy.summed, "share": privacy.share}
        before = _epsilon(entries, unit, privacy.delta)
        after = _epsilon([*entries, entry], unit, privacy.delta)
        if after > privacy.epsilon * (1 + ROUNDING):
            raise BadRequest(
                f"a further release would spend epsilon = {after:.4g} of {privacy.epsilon:g} (delta = "
                f"{privacy.delta:g}), and {len(entries)} earlier ones spent {before:.4g}: resume "
                "with fewer rounds (--rounds), or begin a run with more noise (dp-noise) or a larger budget"
            )
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # What a writer that was killed has left of a line is not a release: the next one takes its place.
            whole = os.pread(handle, os.fstat(handle).st_size, 0)
            end = whole.rfind(b"\n") + 1
            os.ftruncate(handle, end)
            if not end:  # it may be new
                synced(self.path.parent)
            line = json.dumps({**entry, "after": hashes[-1], **about}).encode()
            if os.pwrite(handle, line + b"\n", end) != len(line) + 1:
                raise OSError(0, "the disk is full")
            os.fsync(handle)
        finally:
            os.close(handle)
        if self.head is not None:
            self._note(len(entries) + 1, _chained(hashes[-1], line))
        return Spent(len(entries) + 1, after)

    def _note(self, releases: int, last: str) -> None:
        """Keep the number of releases and the hash of the last one; it is on the disk when this returns."""
        assert self.head is not None
        private_folder(self.head.parent, durable=True)
        with atomic(self.head, durable=True) as part:
            part.write_text(json.dumps({"releases": releases, "hash": last}), encoding="utf-8")


def _chained(before: str, line: bytes) -> str:
    """Return the hash of a line and all lines before it, whose hash is `before`."""
    return hashlib.sha256(before.encode() + line).hexdigest()


def _epsilon(entries: list[dict[str, Any]], unit: str, delta: float) -> float:
    """Return epsilon of all releases; steps of trainings count as such, all others add up to one release."""
    noises = [
        float(e["noise"]) / (2 if unit == "example" and e["unit"] == "client" else 1)
        for e in entries
        if e["schema"] == 1
    ]
    steps = [Steps(float(e["noise"]), float(e["rate"]), int(e["steps"])) for e in entries if e["schema"] == SCHEMA]
    return epsilon_of(composed(noises), delta, steps)


class Releaser:
    """Books releases and adds their noise: the only way in which numbers leave a client of a run with `dp`.

    Parameters
    ----------
    privacy : the run's statement.   ledger : of this client and its data.
    about : notes of each release, such as run and round.
    seed : of the noise in tests (`privacy.test`).

    Attributes
    ----------
    done : releases of this object.
    steps : where the server sees only a sum: the last release in steps of the grid, (m,) int64. It has only a share of
        the noise, so that it may leave the client hidden, and in no other form.
    """

    def __init__(self, privacy: Privacy, ledger: Ledger, about: dict[str, Any], seed: int = 0) -> None:
        self.privacy = privacy
        self.ledger = ledger
        self.about = about
        self.done = 0
        self.steps: npt.NDArray[np.int64] | None = None
        self._source: Source = seeded(seed) if privacy.test else system

    def release(self, values: Float64, sensitivity: float, what: str, around: Float64 | float = 0.0) -> Float64:
        """Return values (m,) with noise, after the release is booked.

        Parameters
        ----------
        around : what the receiver knows already; it is added after the noise.

        Raises
        ------
        BadRequest : it would pass the budget; nothing is released.
        """
        stated = self.privacy
        self.ledger.book(stated, {**self.about, "what": what, "numbers": len(values)})
        found, step = noised_steps(values, sensitivity, stated.own, self._source, stated.largest)
        self.done += 1
        if stated.summed:
            try:
                known = on_grid(np.broadcast_to(around, values.shape), step, stated.largest)
            except ValueError as e:
                raise BadRequest(
                    "the model's values are too large compared with the noise on a sum: raise clip-update, or lower lr"
                ) from e
            self.steps = (found + known).astype(np.int64)
        return found * step + around

    def release_once(self, values: Float64, sensitivity: float, what: str) -> tuple[Float64, bool]:
        """Return `release`, and whether an earlier process of this run has made it: repeating it reveals nothing more.

        Test noise, and shares of the noise on a sum, are drawn each time.
        """
        if self.privacy.test or self.privacy.summed:
            return self.release(values, sensitivity, what), False
        ledger, run = self.ledger.path, hashlib.sha256(f"{self.about.get('run')} {what}".encode()).hexdigest()[:16]
        kept = ledger.with_name(f"{ledger.stem}.{run}.npy")
        with contextlib.suppress(OSError, ValueError):
            if (before := np.load(kept, allow_pickle=False)).shape == values.shape:
                return before, True
        found = self.release(values, sensitivity, what)
        for former in sorted(ledger.parent.glob(f"{ledger.stem}.*.npy"), key=os.path.getmtime)[:-KEPT]:
            former.unlink(missing_ok=True)
        with atomic(kept, durable=True) as part, part.open("wb") as file:
            np.save(file, found)
        return found, False

    def training(self, count: int, epochs: int, numbers: int, booked: bool) -> NoisySteps:
        """Return what makes the steps of a local training private (`privacy.sgd`), after the training is booked.

        Parameters
        ----------
        count : steps of an epoch; each draws every image with probability 1 / count.
        numbers : that are trained.
        booked : False where nothing leaves the client that depends on the training.

        Raises
        ------
        BadRequest : it would pass the budget; nothing may be trained.
        """
        stated, rate = self.privacy, 1 / count
        try:
            budget = min(stated.asked, stated.epsilon)
            every = count * epochs * stated.rounds
            noise = stated.noise or noise_for(budget, stated.delta, every, rate)
            step_of(numbers, stated.bound, noise)
        except ValueError as e:
            raise BadRequest(f"dp = 'sgd': {e}: raise dp-epsilon, or take fewer rounds, epochs or parameters") from e
        if booked:
            self.ledger.book(stated, {**self.about, "what": "training"}, Steps(noise, rate, count * epochs))
            self.done += 1
        return NoisySteps(rate, count, stated.bound, noise, self._source)

    def spent(self) -> Spent:
        """Return the client's releases from these data, in this run and all others."""
        return self.ledger.spent(self.privacy.unit, self.privacy.delta)
