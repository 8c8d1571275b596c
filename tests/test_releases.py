"""The client's ledger of releases: booked before, on the disk, across runs, and never past the budget."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

from fedapp.core.privacy import Privacy, composed, epsilon_of, noise_for, step_of
from fedapp.errors import BadRequest
from fedapp.learning import releases
from fedapp.learning.releases import Ledger, Releaser, path_of
from fedapp.transport.clipping import private_update

ONE = Privacy("example", 1.0, 1e-5, noise_for(1.0, 1e-5, 1))


def halves(unit: str = "example", epsilon: float = 1.0, **more: float) -> Privacy:
    return Privacy(unit, epsilon, 1e-5, noise_for(epsilon, 1e-5, 2), **more)  # type: ignore[arg-type]


def test_a_release_past_the_budget_is_refused_and_not_booked(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "privacy" / "a.jsonl")
    assert ledger.book(halves(), {"run": "a1"}).releases == 1
    spent = ledger.book(halves(), {"run": "b2", "federation": "other"})
    assert spent.releases == 2 and spent.epsilon == pytest.approx(1.0, rel=0.01)
    before = ledger.path.read_bytes()
    with pytest.raises(BadRequest, match=r"would spend epsilon = 1\.\d+ of 1 .*2 earlier ones spent (1|0\.99)"):
        ledger.book(halves(), {"run": "c3"})
    assert ledger.path.read_bytes() == before
    assert ledger.spent("example", 1e-5) == spent
    assert [e["run"] for e in ledger.entries()] == ["a1", "b2"]
    assert oct(ledger.path.stat().st_mode & 0o777) == "0o600"
    assert oct(ledger.path.parent.stat().st_mode & 0o777) == "0o700"


def test_another_delta_is_another_epsilon(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "a.jsonl")
    ledger.book(ONE, {})
    assert ledger.spent("example", 1e-5).epsilon == pytest.approx(1, rel=1e-3)
    assert ledger.spent("example", 1e-9).epsilon > 1.3


def test_the_line_is_on_the_disk_before_anything_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, draw = os.fsync, releases.noised_steps

    def synced(handle: int) -> None:
        events.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{handle}')).name}")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", synced)

    def noised(*args: object) -> object:
        events.append(f"draw after {len(ledger.entries())}")
        return draw(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(releases, "noised_steps", noised)
    ledger = Ledger(tmp_path / "p" / "a.jsonl", tmp_path / "h" / "a.head")
    releaser = Releaser(ONE, ledger, {"run": "a"})
    sent = releaser.release(np.zeros(5), 1.0, "sums")
    order = [events.index(event) for event in ("fsync p", "fsync a.jsonl", "fsync h", "draw after 1")]
    assert order == sorted(order), "a head without its ledger would refuse every release"
    assert releaser.done == 1 and (sent != 0).all()
    assert ledger.entries()[0] | {"time": 0} == {
        "schema": 1, "unit": "example", "noise": ONE.noise, "time": 0, "test": False, "after": "", "run": "a",
        "what": "sums", "numbers": 5,
    }  # fmt: skip
    with pytest.raises(BadRequest, match="would spend"):
        releaser.release(np.zeros(5), 1.0, "sums")
    assert events[-1] != "draw after 2" and releaser.done == 1


def test_half_a_line_of_a_writer_that_was_killed_is_no_release(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "a.jsonl")
    ledger.book(halves(), {})
    whole = ledger.path.read_bytes()
    ledger.path.write_bytes(whole + whole[:-1] + b" " * 500)
    assert len(ledger.entries()) == 1
    ledger.book(halves(), {})
    assert len(ledger.entries()) == 2
    assert ledger.path.read_bytes().count(b"\n") == 2 and ledger.path.read_bytes().endswith(b"}\n")


@pytest.mark.parametrize("damage", [b"garbage\n", b'{"schema": 1}\n', b"[1]\n", b'{"schema": 9, "unit": "example"}\n',
                                    b'{"schema": 1, "unit": "example", "noise": -1}\n', b"\xff\xfe\n"])  # fmt: skip
def test_a_damaged_ledger_is_never_begun_anew(tmp_path: Path, damage: bytes) -> None:
    ledger = Ledger(tmp_path / "a.jsonl")
    ledger.book(halves(), {})
    ledger.path.write_bytes(damage + ledger.path.read_bytes())
    with pytest.raises(BadRequest, match="line 1 of this client's ledger of releases cannot be read"):
        ledger.book(halves(), {})
    with pytest.raises(BadRequest, match="the spent budget is unknown"):
        ledger.spent("example", 1e-5)


def test_an_older_copy_of_a_ledger_is_refused(tmp_path: Path) -> None:
    """With it the budget would be spent twice. The client's state notices it, and so does what the server knows."""
    head = tmp_path / "state" / "a.head"
    ledger = Ledger(tmp_path / "privacy" / "a.jsonl", head)
    privacy = Privacy("example", 9.0, 1e-5, 4.0)
    ledger.book(privacy, {})
    older = ledger.path.read_bytes()
    ledger.book(privacy, {})
    newest = ledger.path.read_bytes()
    for back in (older, b"", newest[len(older) :]):
        ledger.path.write_bytes(back)
        with pytest.raises(BadRequest, match=r"older copy of this client's ledger|a line before it is missing"):
            ledger.book(privacy, {})
    ledger.path.unlink()
    with pytest.raises(BadRequest, match="it has 0 releases, and 2 were made"):
        ledger.spent("example", 1e-5)
    ledger.path.write_bytes(newest)
    assert ledger.book(privacy, {}).releases == 3
    head.unlink()  # ledger and state were put back together: the server still knows
    ledger.path.write_bytes(older)
    with pytest.raises(BadRequest, match="it has 1 releases, and 3 were made"):
        Ledger(ledger.path, head, known=3).book(privacy, {})
    assert Ledger(ledger.path, head, known=1).book(privacy, {}).releases == 2
    other = json.loads(ledger.path.read_bytes().split(b"\n")[0]) | {"noise": 400.0}
    ledger.path.write_bytes(json.dumps(other).encode() + b"\n" + ledger.path.read_bytes().split(b"\n", 1)[1])
    with pytest.raises(BadRequest, match=r"line 2 .*a line before it is missing or was changed"):
        ledger.entries()


def test_an_older_copy_is_refused_in_each_federation(tmp_path: Path) -> None:
    privacy, path = Privacy("example", 9.0, 1e-5, 4.0), tmp_path / "privacy" / "a.jsonl"
    one, other = (Ledger(path, tmp_path / name / "1" / "a.head") for name in ("one", "other"))
    one.book(privacy, {})
    older = path.read_bytes()
    assert other.book(privacy, {}).releases == 2 and one.book(privacy, {}).releases == 3
    path.write_bytes(older)
    for ledger in (one, other, Ledger(path, tmp_path / "third" / "1" / "a.head")):
        with pytest.raises(BadRequest, match="it has 1 releases, and 3 were made"):
            ledger.book(privacy, {})


def test_a_ledger_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "a.jsonl", tmp_path / "a.head")
    ledger.path.write_text('{"schema": 1, "unit": "example", "noise": 4.0, "time": 0, "test": false}\n')
    assert ledger.book(Privacy("example", 9.0, 1e-5, 4.0), {}).releases == 2 and len(ledger.entries()) == 2


def test_a_ledger_that_cannot_be_written_releases_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    releaser = Releaser(ONE, Ledger(tmp_path / "a.jsonl"), {})
    with pytest.raises(BadRequest, match=r"No space left on device.*nothing is released"):
        releaser.release(np.zeros(2), 1.0, "sums")


def test_units_count_for_each_other_as_far_as_they_can(tmp_path: Path) -> None:
    """One image moves a client's clipped update by up to twice its bound; for clients after images nothing holds."""
    ledger = Ledger(tmp_path / "a.jsonl")
    client = Privacy("client", 8.0, 1e-5, 10.0)
    ledger.book(client, {})
    assert ledger.spent("client", 1e-5).epsilon == pytest.approx(epsilon_of(10, 1e-5))
    assert ledger.spent("example", 1e-5).epsilon == pytest.approx(epsilon_of(5, 1e-5))
    example = Privacy("example", 8.0, 1e-5, 4.0)
    assert ledger.book(example, {}).epsilon == pytest.approx(epsilon_of(composed([5, 4]), 1e-5))
    with pytest.raises(BadRequest, match="after which nothing can be stated for the whole client"):
        ledger.book(client, {})
    assert ledger.spent("client", 1e-5).epsilon == float("inf")


def _book_one(path: str) -> bool:
    try:
        Ledger(Path(path)).book(Privacy("example", 1.0, 1e-5, noise_for(1.0, 1e-5, 6)), {})
    except BadRequest:
        return False
    return True


@pytest.mark.slow
def test_processes_that_book_at_once_do_not_pass_the_budget(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        booked = pool.map(_book_one, [str(tmp_path / "a.jsonl")] * 12, chunksize=1)
    assert sum(booked) == 6 and len(Ledger(tmp_path / "a.jsonl").entries()) == 6


def test_a_ledger_belongs_to_client_and_data_whatever_the_run_is_called(tmp_path: Path) -> None:
    names = {path_of(tmp_path, c, d).name for c in (0, 1) for d in ("digits", "/data/a", "/other/a", "/data/ä b")}
    assert len(names) == 8
    assert all(json.dumps(n).isascii() and "/" not in n for n in names)


# ---- updates of whole clients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0.1, 7.0])
def test_an_update_is_clipped_and_then_noised(tmp_path: Path, length: float) -> None:
    rng = np.random.default_rng(0)
    received = {n: rng.normal(size=s).astype(np.float32) for n, s in (("w", (300, 100)), ("b", (100,)))}
    raw = rng.normal(size=30_100)
    raw *= length / np.linalg.norm(raw)
    sent = {"w": (received["w"] + raw[:30_000].reshape(300, 100)).astype(np.float32),
            "b": (received["b"] + raw[30_000:]).astype(np.float32)}  # fmt: skip
    privacy = Privacy("client", 1000.0, 1e-5, 0.05, bound=2.0, test=True)
    releaser = Releaser(privacy, Ledger(tmp_path / "a.jsonl"), {}, seed=1)
    new = private_update(sent, received, releaser)
    assert {n: a.dtype for n, a in new.items()} == {"w": np.float32, "b": np.float32}
    change = np.concatenate([(new[n].astype(np.float64) - received[n]).ravel() for n in ("w", "b")])
    direction = raw / np.linalg.norm(raw)
    assert change @ direction == pytest.approx(min(length, 2.0), abs=0.4)
    noise = change - min(length, 2.0) * direction
    assert noise.std() == pytest.approx(0.1, rel=0.03)
    assert releaser.done == 1


def test_an_array_that_was_not_received_has_no_bound(tmp_path: Path) -> None:
    releaser = Releaser(Privacy("client", 8.0, 1e-5, 1.0), Ledger(tmp_path / "a.jsonl"), {})
    with pytest.raises(RuntimeError, match="'lar' is not the change of a received array"):
        private_update({"w": np.zeros(2, np.float32), "lar": np.zeros(2, np.float32)}, {"w": np.zeros(2)}, releaser)
    with pytest.raises(RuntimeError, match="it has no bound"):
        private_update({"n": np.zeros(2, np.int64)}, {"n": np.zeros(2, np.int64)}, releaser)
    assert not releaser.ledger.path.exists()


def test_what_the_receiver_knows_is_added_in_steps_of_the_noise(tmp_path: Path) -> None:
    """A release into a sum: around 3 it is the one around 0, moved by as many steps as 3 has."""
    privacy = Privacy("client", 1000.0, 1e-5, 1.0, test=True, summed=3)
    found = []
    for i, around in enumerate((0.0, np.array([3.0, -1.0]))):
        releaser = Releaser(privacy, Ledger(tmp_path / f"{i}.jsonl"), {}, seed=1)
        released = releaser.release(np.array([0.5, 0.25]), 1.0, "update", around)
        assert releaser.steps is not None
        found.append((released, releaser.steps))
    step = step_of(2, 1.0, 1.0)
    assert (found[1][1] - found[0][1]).tolist() == np.rint(np.array([3.0, -1.0]) / step).tolist()
    np.testing.assert_allclose(found[1][0] - found[0][0], [3.0, -1.0], atol=1e-12)
