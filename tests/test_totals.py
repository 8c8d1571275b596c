"""Stored totals: clients that join or leave later, without any message to the others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array as FlowerArray
from flwr.app import Message

from fedapp.core import sums
from fedapp.core.gaussian import unpack
from fedapp.engines.local import run as resume
from fedapp.errors import BadRequest
from fedapp.federation.participants import Participants
from fedapp.learning.state import read_safetensors, write_safetensors
from fedapp.results.runs import RunResult
from fedapp.transport.records import ARRAYS
from tests.liars import federate

Tiny = Callable[..., RunResult]
CLASSES, WIDTH = 4, 9
SHAPE = "classes and features"
METHODS = ["fed3r", "lda prior=pooled", "fedncm"]


def rows(
    sites: list[str], place: Path, body: str = "a", scale: float = 1.0, classes: str = "abcd", given: bool = True
) -> Path:
    """Write features of some of the sites `p` to `t`; site `t` has rows of one class, class 3 is at `s` alone."""
    rng, parts = np.random.default_rng(5), []
    centres = rng.normal(size=(CLASSES, WIDTH))
    for site in "pqrst":
        y = np.full(31, 1) if site == "t" else rng.integers(0, 4 if site == "s" else 3, 50)
        x = centres[y] + rng.normal(size=(len(y), WIDTH))
        parts.append((x, y, np.full(len(y), site), np.where(np.arange(len(y)) % 3 == 2, "test", "train")))
    x, y, client, split = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    own = np.isin(client, sites)
    more = {"split": split[own]} if given else {}
    if body:
        more["about"] = np.array(json.dumps({"body": body * 64, "width": WIDTH}))
    np.savez(
        place, x=(scale * x[own]).astype(np.float32), y=y[own], client=client[own], class_names=list(classes), **more
    )  # fmt: skip
    return place


@pytest.fixture
def go(tmp_path: Path, tiny: Tiny) -> Callable[..., RunResult]:
    """Run a method, with hyperparameters after its name, on features of some sites."""

    def run(text: str, sites: str, *, totals: Path | None = None, leave: bool = False, **more: Any) -> RunResult:
        given = {key: more.pop(key) for key in ("body", "scale", "classes", "given") if key in more}
        place = rows(list(sites), tmp_path / f"{sites}.npz", **given)
        words = [f"totals={totals}"] * bool(totals) + ["leave=true"] * leave
        method, *args = text.split()
        common = {"dataset": "npz", "clients": 0, "data_dir": str(place), "min_samples": 1}
        return tiny(method=method, method_args=" ".join([*args, *words]), **common, **more)

    return run


def test_a_relative_path_below_a_folder_with_a_blank_is_named(
    go: Callable[..., RunResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my runs").mkdir()
    monkeypatch.chdir(tmp_path / "my runs")
    with pytest.raises(BadRequest, match="my runs/t1 has one: rename its folder"):
        go("fed3r", "p", totals=Path("t1"))


def totals(run: RunResult) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    return read_safetensors(run.out / "totals.safetensors")


def head(run: RunResult) -> dict[str, bytes]:
    arrays, _ = read_safetensors(run.out / "models" / "last.safetensors")
    return {name: array.tobytes() for name, array in arrays.items()}


@pytest.mark.parametrize("method", METHODS)
def test_clients_join_and_leave_as_if_they_had_always_or_never_been_there(method: str, go: Any) -> None:
    """A, b and the head have equal bits; `t` has rows of one class, and class 3 comes with `s`."""
    text = f"{method} scale=none"
    begun, whole, fewer = go(text, "pqr"), go(text, "pqrst"), go(text, "qr")
    joined = go(text, "st", totals=begun.out)
    left = go(text, "st", totals=joined.out, leave=True)
    rest = go(text, "p", totals=left.out / "totals.safetensors", leave=True)
    for found, wanted in ((joined, whole), (left, begun), (rest, fewer)):
        (mine, told), (theirs, said) = totals(found), totals(wanted)
        assert sorted(mine) == sorted(theirs) == (["b"] if method == "fedncm" else ["a", "b"])
        assert all(np.array_equal(mine[name], theirs[name]) for name in mine)
        assert head(found) == head(wanted)
        assert told["sites"].keys() == said["sites"].keys() and told["lost"] == said["lost"] == 0
        for name in ("samples", "clients", "samples_left_out", "classes_unseen"):
            assert found.summary["calibration"][name] == wanted.summary["calibration"][name]
    a, b = (np.zeros((WIDTH + 1, WIDTH + 1)), np.zeros((CLASSES, WIDTH + 1)))
    with np.load(rows(list("pqrst"), begun.out / "all.npz")) as arrays:
        train, bits = arrays["split"] == "train", totals(whole)[1]["bits"]
        h = np.column_stack([np.rint(arrays["x"][train].astype(float) * 2.0**bits), np.full(train.sum(), 2.0**bits)])
        a, b = h.T @ h / 4.0**bits, np.eye(CLASSES)[arrays["y"][train]].T @ h / 2.0**bits
    assert np.array_equal(totals(joined)[0]["b"], b), "NumPy adds whole numbers"
    if method != "fedncm":
        assert np.array_equal(unpack(totals(joined)[0]["a"], WIDTH + 1), a)


def test_the_factor_of_the_logits_stays_and_scores_are_of_the_clients_that_take_part(go: Any) -> None:
    begun = go("lda personal=true", "pqr")
    joined = go("lda personal=true", "st", totals=begun.out)
    left = go("lda personal=true", "st", totals=joined.out, leave=True)
    assert head(left) == head(begun) != head(joined)
    factors = {run.summary["calibration"]["scale"] for run in (begun, joined, left)}
    assert len(factors) == 1 and "bytes_up_query.losses" not in joined.summary
    assert joined.summary["headline"]["clients"] == 2 and joined.summary["calibration"]["clients"] == 5
    assert "lda: the head is of 5 clients, scores are of the 2 of this run alone" in joined.summary["warnings"]
    assert "lda: the head is of 3 clients, scores are of the 2 of this run alone" in left.summary["warnings"]
    other = go("lda personal=true shrink=0.9", "st", totals=begun.out)
    for run, told in ((joined, False), (left, False), (other, True)):
        assert any("fitted with other values of shrink" in text for text in run.summary["warnings"]) is told


def test_a_newcomer_with_large_features_ends_the_exactness_for_good(go: Any) -> None:
    """The bound on the rounding is that of the largest totals: after the newcomer has left, it is a larger share."""
    begun = go("fed3r", "pqr")
    joined = go("fed3r", "s", totals=begun.out, scale=300.0)
    left = go("fed3r", "s", totals=joined.out, leave=True, scale=300.0)
    again = go("fed3r", "t", totals=left.out)
    shares = []
    for run in (joined, left, again):
        arrays, header = totals(run)
        shares += [header["lost"] / np.abs(arrays["a"]).max()]
        told = f"the totals are not exact: rounding is up to {shares[-1]:.0e} of their largest number"
        assert len([w for w in run.summary["warnings"] if told in w]) == 1
    assert 0 < shares[0] < 1e-13 < 1e-11 < shares[1]
    for name, array in totals(begun)[0].items():
        assert np.abs(totals(left)[0][name] - array).max() <= totals(left)[1]["lost"]


def test_sums_that_were_rounded_once_are_never_called_exact_again(go: Any, tmp_path: Path) -> None:
    """136 rows are too many for features of this size, the 102 that stay are not."""
    begun = go("fed3r", "pqr")
    with np.load(rows(["s"], tmp_path / "one.npz")) as arrays:
        most = np.abs(arrays["x"][arrays["split"] == "train"]).max()
    scale = 2.0 ** (26.5 - totals(begun)[1]["bits"]) / np.sqrt(118) / most
    joined = go("fed3r", "s", totals=begun.out, scale=scale)
    left = go("fed3r", "s", totals=joined.out, leave=True, scale=scale)
    header = totals(left)[1]
    assert sums.exact(102, header["largest"], header["bits"]) and not sums.exact(136, header["largest"], header["bits"])
    assert totals(left)[0]["b"][:, -1].sum() == 102 and header["lost"] > 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("sites", "given", "more", "words"),
    [
        ("s", "", {"body": "b"}, "body is aaaa.* there and bbbb"),
        ("s", "", {"classes": "abce"}, "classes is .* there and"),
        ("s", "", {"classes": "abcde"}, "classes and features is .* there and"),
        ("rs", "", {}, "client r is in them already"),
        ("s", "leave=true", {}, "client s is not in them"),
        ("q", "leave=true", {"scale": 2.0}, "client q has other training rows than those with which it joined"),
        ("q", "leave=true", {"scale": 1.001}, "client q has other training rows"),
        ("s", "min_count=2", {}, "leave base and min_count out"),
        ("s", "base=fedavg", {}, "leave base and min_count out"),
        ("st", "", {"count_cap": 1.0}, "sums are added only where they are exact and of all rows"),
        ("s", "choose=true", {}, "totals are exact sums of all rows: leave choose and wire out"),
        ("s", "wire=f32", {}, "totals are exact sums of all rows: leave choose and wire out"),
        ("s", "", {"secure_sum": True}, "totals: the difference between two totals is the sum of the clients that"),
        ("s", "", {"bodies": "a" * 64}, "totals: they are of one body: leave bodies out"),
        ("s", "", {"dp": "example"}, "totals: the noise of a client's second answer is not that of its first"),
        ("s", "", {"model_args": "standardise=true"}, "standardised by this run's clients alone"),
        ("s", "", {"normalise": "data"}, "standardised by this run's clients alone: leave normalise out"),
        ("pqr", "leave=true", {}, "no client would be left"),
        ("q", "leave=true", {"given": False}, "client q has other training rows"),
        ("q", "leave=true", {"data_fraction": 0.5}, "client q has other training rows"),
    ],
)
def test_totals_are_refused_in_one_line(sites: str, given: str, more: dict[str, Any], words: str, go: Any) -> None:
    begun = go("fed3r", "pqr")
    with pytest.raises(BadRequest, match=words) as refused:
        go(f"fed3r {given}", sites, totals=begun.out, **more)
    assert "\n" not in str(refused.value)


def test_a_file_that_holds_no_totals_is_refused(go: Any, tmp_path: Path) -> None:
    begun = go("lda", "pqr")
    for place in (begun.out / "models" / "last.safetensors", tmp_path / "none", begun.out / "config.toml"):
        with pytest.raises(BadRequest, match="no totals: "):
            go("lda", "s", totals=place)
    with pytest.raises(BadRequest, match="method is lda there and fed3r here"):
        go("fed3r", "s", totals=begun.out)
    with pytest.raises(BadRequest, match="leave=true needs totals"):
        go("lda leave=true", "s")
    arrays, header = totals(begun)
    cut = {"a": arrays["a"][: 9 * 10 // 2], "b": arrays["b"][:, 1:].copy()}
    write_safetensors(tmp_path / "cut.safetensors", cut, {**header, SHAPE: [CLASSES, WIDTH - 1]})
    with pytest.raises(BadRequest, match=r"is \[4, 8\] there and \[4, 9\] here"):
        go("lda", "s", totals=tmp_path / "cut.safetensors")


@pytest.mark.parametrize(
    ("text", "more", "stored"),
    [("lda", {}, True), ("lda choose=true", {}, True), ("lda", {"secure_sum": True}, False), ("fedcof", {}, False),
     ("lda", {"dp": "example"}, False), ("lda min_count=2", {}, False), ("lda wire=f32", {}, False),
     ("lda", {"model_args": "random-features=20"}, False), ("lda", {"count_cap": 1.0}, False)],
)  # fmt: skip
def test_totals_are_stored_where_they_are_exact_sums_of_all_rows(
    text: str, more: dict[str, Any], stored: bool, go: Any
) -> None:
    run = go(text, "st" if "count_cap" in more else "pqrst", **more)
    assert (run.out / "totals.safetensors").is_file() is stored


@pytest.mark.full
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"scale": float("nan")}, "scale"), ({"scale": -1.0}, "scale"), ({"bits": -5}, "bits"), ({"bits": 4.5}, "bits"),
        ({"lost": -1}, "lost"), ({"largest": "x"}, "largest"), ({"sites": "pqr"}, "sites"), ({"salt": 1}, "salt"),
        ({"sites": {"p": ""}}, "sites"), ({"a": None}, "sums consist of"), ({"a": 3}, "'a' must be"),
        ({"b": 1e12}, "samples"), ({"a": 1.1}, "'a'"), ({"b": "one"}, "'b' must be"), ({"bits": 4}, "no sums of"),
        ({"lost": float("inf")}, "lost"), ({"largest": 0.5}, "is larger than 102 rows with features up to 0.5"),
    ],
)  # fmt: skip
def test_a_forged_file_of_totals_is_refused_in_one_line(
    changed: dict[str, Any], words: str, go: Any, tmp_path: Path
) -> None:
    arrays, header = totals(go("lda", "pqr"))
    for name, value in changed.items():
        if name not in arrays:
            header[name] = value
        elif value is None:
            del arrays[name]
        else:
            whole = arrays[name]
            arrays[name] = whole[:1].copy() if value == "one" else whole[:value].copy() if value == 3 else whole * value
    header = {name: value for name, value in header.items() if name not in ("format", "schema")}
    write_safetensors(tmp_path / "forged.safetensors", arrays, header)
    with pytest.raises(BadRequest, match=words) as refused:
        go("lda", "s", totals=tmp_path / "forged.safetensors")
    assert "\n" not in str(refused.value)


def test_the_first_client_may_be_blocked_in_the_only_exchange(tmp_path: Path) -> None:
    def lie(kind: str, reply: Message) -> Message:
        if kind == "query.sums":
            reply.content[ARRAYS]["evil"] = FlowerArray(np.zeros(3))
        return reply

    given = {"dataset": "npz", "data-dir": str(rows([*"pqrs"], tmp_path / "a.npz")), "min-samples": 1}
    run = federate(tmp_path / "run", {0}, lie, 4, method="fed3r", partition="by-client", min_replies=0.5, **given)
    assert run.summary["blocked"] == [0] and [*totals(run)[1]["sites"]] == [*"qrs"]


def test_the_sums_of_one_client_are_not_stored_and_a_difference_that_shows_them_is_said(go: Any) -> None:
    one, begun = go("lda", "p"), go("lda", "pqr")
    left = go("lda", "pq", totals=begun.out, leave=True)
    for run in (one, left):
        assert not (run.out / "totals.safetensors").exists()
        assert any("the totals of one client are its own sums" in w for w in run.summary["warnings"])
    joined = go("lda", "s", totals=begun.out)
    assert any("by the sums of client s: delete the older file" in w for w in joined.summary["warnings"])
    assert not (go("lda", "pqr", body="").out / "totals.safetensors").exists()


def test_a_resumed_run_reads_no_older_totals_and_one_that_has_ended_stays_as_it_is(
    go: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = go("lda", "pqr")
    whole = go("lda", "s", totals=begun.out)
    score, out = Participants.score, tmp_path / "cut"
    monkeypatch.setattr(Participants, "score", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        go("lda", "s", totals=begun.out, out=out)
    monkeypatch.setattr(Participants, "score", score)
    shutil.rmtree(begun.out)
    again = resume(resume=out)
    assert head(again) == head(whole) and [*totals(again)[1]["sites"]] == [*"pqrs"]
    assert not (out / "totals-before.safetensors").exists()
    before = (out / "summary.json").read_bytes()
    with pytest.raises(BadRequest, match=r"the run in .* has ended: more clients join or leave in a new run"):
        resume(resume=out)
    assert (out / "summary.json").read_bytes() == before and not (out / "error.json").exists()
