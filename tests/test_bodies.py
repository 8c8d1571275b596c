"""Clients with features of several pretrained bodies: one sum, one head, one score and one file for each (`bodies`)."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

import fedapp
from clients.sums import SumsClient
from fedapp.cli import app
from fedapp.config import from_flat
from fedapp.errors import BadRequest
from fedapp.experiments import compare
from fedapp.federation.participants import Participants
from fedapp.learning.state import read_safetensors
from fedapp.results.runs import RunResult
from fedapp.tasks.node import own_data
from fedapp.transport.traffic import RoundFailed
from tests.test_features import SIDE, picture_body
from tests.test_nodes import start
from tests.test_raw_samples import photos

Tiny = Callable[..., RunResult]
Rows = tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.bool_]]
W, B = "head.weight", "head.bias"
FIRST, SECOND = "a1" * 32, "b2" * 32
BOTH = "a1a1a1a1,b2b2b2b2"
CLASSES = 4


def site(
    path: Path, body: str, width: int, seed: int, rows: int = 60, offset: float = 0.0, classes: int = CLASSES
) -> Rows:
    """Write the features of one client, a quarter of them for testing."""
    rng = np.random.default_rng(seed)
    y, train = rng.integers(0, CLASSES, rows), np.arange(rows) % 4 != 0
    x = np.random.default_rng(width).normal(size=(CLASSES, width))[y] + rng.normal(size=(rows, width)) + offset
    about = json.dumps({"body": body, "width": width})
    names = [str(c) for c in range(classes)]
    x = x.astype(np.float16)
    np.savez(path, x=x, y=y, split=np.where(train, "train", "test"), about=np.array(about), class_names=names)
    return x.astype(np.float64), y, train


def sites(folder: Path, widths: tuple[int, int] = (12, 20), clients: int = 6, **changes: Any) -> dict[str, list[Rows]]:
    """Write clients of two bodies in turn; return their rows by body."""
    folder.mkdir()
    found: dict[str, list[Rows]] = {FIRST: [], SECOND: []}
    for k in range(clients):
        body = (FIRST, SECOND)[k % 2]
        found[body].append(site(folder / f"s{k}.npz", body, widths[k % 2], k, **changes if k == 0 else {}))
    return found


def head(out: Path, body: str = "") -> dict[str, NDArray[np.float32]]:
    arrays, _ = read_safetensors(out / "models" / f"last{body and '-'}{body[:8]}.safetensors")
    return arrays


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def alone(folder: Path, body: str, to: Path) -> Path:
    """Copy the files of one body."""
    to.mkdir()
    for file in folder.glob("*.npz"):
        with np.load(file) as arrays:
            mine = json.loads(str(arrays["about"]))["body"] == body
        if mine:
            shutil.copy(file, to)
    return to


@pytest.mark.parametrize("widths", [(12, 20), (12, 12), (384, 1280)])
def test_each_head_is_the_ridge_regression_of_the_rows_of_its_body(
    widths: tuple[int, int], tmp_path: Path, tiny: Tiny
) -> None:
    rows = sites(tmp_path / "data", widths)
    run = tiny(dataset="npz", clients=0, data_dir=tmp_path / "data", bodies=BOTH, method="fed3r(lam=2 scale=none)")
    own = run.final.set_index("client")["received_accuracy"]
    assert not (run.out / "models" / "last.safetensors").exists()
    for number, (body, given) in enumerate(rows.items()):
        z, y, train = (np.concatenate(column) for column in zip(*given, strict=True))
        h = np.column_stack([z, np.ones(len(z))])
        a, b = h[train].T @ h[train], h[train].T @ np.eye(CLASSES)[y[train]]
        wanted = np.linalg.solve(a + 2 * np.eye(len(a)), b).T
        found = head(run.out, body)
        np.testing.assert_allclose(np.column_stack([found[W], found[B]]), wanted, rtol=1e-4, atol=2e-6)
        told = run.summary["bodies"][body[:8]]
        assert told["clients"] == [number, number + 2, number + 4] and told["body"] == body
        assert told["calibration"]["samples"] == train.sum()
        right = (h[~train] @ wanted.T).argmax(axis=1) == y[~train]
        assert told["accuracy"]["global"] == pytest.approx(right.mean())
        assert told["accuracy"]["received"] == pytest.approx(own[told["clients"]].mean())
        for client, (x, labels, trains) in zip(told["clients"], given, strict=True):
            logits = np.column_stack([x, np.ones(len(x))])[~trains] @ wanted.T
            assert own[client] == pytest.approx((logits.argmax(axis=1) == labels[~trains]).mean())


@pytest.mark.full
@pytest.mark.parametrize(
    "method",
    ["fed3r(personal=true)", "lda(choose=true)", "qda(personal=true)", "fedncm(min_count=2)", "fedcof(personal=true)"],
)
def test_a_head_is_that_of_a_run_of_its_body_alone(method: str, tmp_path: Path, tiny: Tiny) -> None:
    sites(tmp_path / "data", (12, 12))
    common: dict[str, Any] = {"dataset": "npz", "clients": 0, "method": method}
    run = tiny(**common, data_dir=tmp_path / "data", bodies=BOTH)
    for body in (FIRST, SECOND):
        files = alone(tmp_path / "data", body, tmp_path / body[:2])
        single, named = tiny(**common, data_dir=files), tiny(**common, data_dir=files, bodies=body)
        assert same(head(run.out, body), head(single.out)) and same(head(named.out, body), head(single.out))
        told = run.summary["bodies"][body[:8]]
        assert told["calibration"] == single.summary["calibration"]
        choices = (found.get("choice", {}) for found in (told, single.summary))  # rows are held out by client number
        assert len({of.get("default") for of in choices}) == 1
        personal = (found.get("personal", {}).get("adjusted", {}) for found in (told, single.summary))
        assert len({of.get("local") for of in personal}) == 1
        sizes = [key for key in single.summary if key.startswith("bytes_up_query.")]
        assert sizes and all(run.summary[key] == single.summary[key] for key in sizes)
        scores = single.final.filter(like="_accuracy")
        mine = run.final[run.final["client"].isin(told["clients"])].filter(like="_accuracy")
        assert np.array_equal(mine.to_numpy(), scores.to_numpy(), equal_nan=True)
        final = named.final.drop(columns="client_seconds")
        assert final.equals(single.final.drop(columns="client_seconds"))
        keys = single.summary.keys() - {
            "seconds",
            "calibration",
            "choice",
            "personal",
            "accuracy",
            "headline",
            "metrics",
        }
        assert all(named.summary[key] == single.summary[key] for key in keys)


def test_no_client_changes_the_head_of_another_body(tmp_path: Path, tiny: Tiny) -> None:
    common: dict[str, Any] = {"dataset": "npz", "clients": 0, "method": "lda", "bodies": BOTH}
    sites(tmp_path / "one")
    sites(tmp_path / "two", offset=3.0)
    one, two = (tiny(**common, data_dir=tmp_path / name) for name in ("one", "two"))
    assert not same(head(one.out, FIRST), head(two.out, FIRST))
    assert same(head(one.out, SECOND), head(two.out, SECOND))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bodies": "a1a1"}, "'a1a1' is not the first 8 or more digits"),
        ({"bodies": "a1a1a1a1," + "b" * 65}, "is not the first 8 or more digits"),
        (
            {"method": "fedavg"},
            "fedavg shares layers or statistics .* set model = adapter and take lgfedavg",
        ),
        ({"method": "lgfedavg", "model": "identity"}, "lgfedavg shares layers or statistics of features"),
        ({"method": "local", "model_args": "standardise=true"}, "local shares layers or statistics of features"),
        ({"method": "fed3r(base=fedavg)"}, "set model = adapter"),
        ({"model": "mlp", "method": "lda(base=none)"}, "with model = identity"),
        ({"method": "fed3r", "dp": "example"}, "dp is for clients of one body"),
        ({"method": "fed3r(random_features=30)"}, "model-args is for clients of one body"),
        ({"bodies": "a1a1a1a1"}, r"different bodies \(s\d.npz of a1a1a1a1, s\d.npz of b2b2b2b2\)"),
        ({"bodies": f"a1a1a1a1,{FIRST}"}, "two begin with the same 8 digits"),
        ({"unseen": "0"}, "unseen is for clients of one body"),
        ({"bodies": ""}, "extract all with one body, or name each in bodies"),
    ],
)
def test_wrong_settings_are_refused(values: dict[str, Any], message: str, tmp_path: Path, tiny: Tiny) -> None:
    sites(tmp_path / "data")
    common: dict[str, Any] = {"dataset": "npz", "clients": 0, "data_dir": tmp_path / "data", "bodies": BOTH}
    with pytest.raises(BadRequest, match=message):
        tiny(**{**common, "method": "lda", **values})


def test_digits_that_two_bodies_begin_with_stand_for_the_more_frequent_one(tmp_path: Path, tiny: Tiny) -> None:
    other = FIRST[:60] + "beef"
    for number, body in enumerate((other, FIRST, FIRST)):
        site(tmp_path / f"{number}.npz", body, 12, number)
    common: dict[str, Any] = {"dataset": "npz", "clients": 0, "data_dir": tmp_path, "method": "lda"}
    with pytest.raises(BadRequest, match=rf"client 0 \({other}\) is not among those of the run \({FIRST}\)"):
        tiny(**common, bodies="a1a1a1a1")
    run = tiny(**common, bodies="a1a1a1a1,c3c3c3c3", min_clients=2)
    assert run.summary["bodies"]["a1a1a1a1"]["clients"] == [1, 2]
    assert "no client has the body c3c3c3c3 that bodies lists" in run.summary["warnings"]


@pytest.mark.parametrize(("method", "model"), [("local", "identity"), ("lgfedavg", "adapter"), ("fedgh", "adapter")])
def test_clients_with_layers_of_their_own_may_have_several_bodies(
    method: str, model: str, tmp_path: Path, tiny: Tiny
) -> None:
    sites(tmp_path / "data")
    common: dict[str, Any] = {"dataset": "npz", "clients": 0, "data_dir": tmp_path / "data", "bodies": BOTH}
    run = tiny(**common, method=method, model=model, rounds=2)
    assert len(run.final) == 6 and "bodies" not in run.summary and np.isfinite(run.final["trained_accuracy"]).all()


def test_without_kept_models_the_shape_of_a_client_is_unknown(tmp_path: Path, tiny: Tiny) -> None:
    sites(tmp_path / "data")
    common: dict[str, Any] = {"method": "lgfedavg", "model": "adapter", "bodies": BOTH, "keep_models": False}
    run = tiny(dataset="npz", clients=0, data_dir=tmp_path / "data", rounds=1, **common)
    with pytest.raises(BadRequest, match="samples of several shapes"):
        fedapp.load(run.out, client=0)


def test_heads_of_bodies_are_compared_with_each_client_alone(tmp_path: Path) -> None:
    sites(tmp_path / "data")
    values = {"dataset": "npz", "data-dir": str(tmp_path / "data"), "bodies": BOTH.upper()}
    variants = compare.parse_variants("local,lda(personal=true),qda")
    jobs = compare.jobs_of(values, variants, {"": {}}, 1, tmp_path / "both")
    assert [job.config.bodies_apart for job in jobs] == [(), (FIRST[:8], SECOND[:8]), (FIRST[:8], SECOND[:8])]


# ---- secure sums, resume, and the models that come back --------------------------------------------------------------


@pytest.mark.parametrize("few", [0, 1])
def test_a_secure_sum_is_opened_for_no_body_of_too_few_clients(few: int, tmp_path: Path, tiny: Tiny) -> None:
    (tmp_path / "data").mkdir()
    for k in range(5):
        site(tmp_path / "data" / f"s{k}.npz", *((SECOND, 20) if k == few else (FIRST, 12)), k)
    common: dict[str, Any] = {"dataset": "npz", "clients": 0, "method": "lda(personal=true)"}
    mixed: dict[str, Any] = {**common, "data_dir": tmp_path / "data", "bodies": BOTH, "secure_sum": True}
    with pytest.raises(BadRequest, match="the body b2b2b2b2 has too few clients: secure-sum with 1 client"):
        tiny(**mixed)
    run, there = tiny(**mixed, min_clients=4), [k for k in range(5) if k != few]
    assert [text.partition(":")[0] for text in run.summary["left_out"]] == ["the body b2b2b2b2 has too few clients"]
    assert [*run.summary["bodies"]] == ["a1a1a1a1"] and [*run.final["client"]] == there
    opened = json.loads((run.out / "opened-sums-a1a1a1a1.json").read_text())
    assert opened == {"query": there} and len([*run.out.glob("opened-sums*")]) == 1
    single = tiny(**common, data_dir=alone(tmp_path / "data", FIRST, tmp_path / "single"))
    assert same(head(run.out, FIRST), head(single.out)), "secure sums of rounded features are exact"


def test_each_body_has_a_secure_sum_of_its_own(tmp_path: Path, tiny: Tiny) -> None:
    sites(tmp_path / "data", clients=8)
    common: dict[str, Any] = {"dataset": "npz", "clients": 0, "data_dir": tmp_path / "data", "bodies": BOTH}
    secure, plain = (tiny(**common, method="fed3r", secure_sum=given) for given in (True, False))
    for body, clients in ((FIRST, [0, 2, 4, 6]), (SECOND, [1, 3, 5, 7])):
        assert same(head(secure.out, body), head(plain.out, body))
        assert json.loads((secure.out / f"opened-sums-{body[:8]}.json").read_text()) == {"query": clients}


def test_a_run_that_ended_in_the_second_body_is_resumed(
    tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites(tmp_path / "data", clients=8)
    common: dict[str, Any] = {"dataset": "npz", "clients": 0, "data_dir": tmp_path / "data", "bodies": BOTH}
    whole = tiny(**common, method="lda", secure_sum=True)
    query, asked = Participants.query, [0]

    def killed(self: Participants, at: Any) -> Any:
        asked[0] += 1
        if asked[0] == 2:
            raise KeyboardInterrupt
        return query(self, at)

    monkeypatch.setattr(Participants, "query", killed)
    with pytest.raises(KeyboardInterrupt):
        tiny(**common, method="lda", secure_sum=True, out=tmp_path / "cut")
    monkeypatch.setattr(Participants, "query", query)
    tiny(resume=tmp_path / "cut")
    for body in (FIRST, SECOND):
        assert same(head(tmp_path / "cut", body), head(whole.out, body))


def test_the_digits_of_a_body_choose_its_head(tmp_path: Path, tiny: Tiny) -> None:
    rows = sites(tmp_path / "data")
    run = tiny(dataset="npz", clients=0, data_dir=tmp_path / "data", bodies=BOTH, method="lda")
    with pytest.raises(
        BadRequest, match="has a head for each of the bodies a1a1a1a1, b2b2b2b2: name one of these bodies with --with"
    ):
        fedapp.load(run.out)
    with pytest.raises(BadRequest, match="has a head for each of the bodies a1a1a1a1, b2b2b2b2"):
        fedapp.load(run.out, body="c3c3c3c3")
    for where in ({"body": "a1a1a1a1" + "f" * 56}, {"body": "b2b2b2b2", "client": 0}):
        with pytest.raises(BadRequest, match=f"is of the body {FIRST}, not of "):
            fedapp.load(run.out, **where)
    for number, (body, given) in enumerate(rows.items()):
        net = fedapp.load(run.out, body=body[:10].upper())
        assert net.inputs.body == body
        x = np.concatenate([x[~train] for x, _, train in given]).astype(np.float32)
        y = np.concatenate([y[~train] for _, y, train in given])
        accuracy = run.summary["bodies"][body[:8]]["accuracy"]["global"]
        assert (net.predict(x).argmax(axis=1) == y).mean() == pytest.approx(accuracy)
        file = str(tmp_path / "data" / f"s{number}.npz")
        told = CliRunner().invoke(app, ["predict", file, "--run", str(run.out), "--with", body[:8]])
        assert told.exit_code == 0 and len(told.stdout.splitlines()) == 60
        told = CliRunner().invoke(app, ["predict", file, "--run", str(run.out)])
        assert isinstance(told.exception, BadRequest) and "name one of these bodies with --with" in str(told.exception)


def test_the_terminal_has_a_score_for_each_body(tmp_path: Path) -> None:
    sites(tmp_path / "data")
    words = ["run", "--method", "lda", "--dataset", "npz", "--set", f"data-dir={tmp_path / 'data'}", "--set",
             f"bodies={BOTH}", "--engine", "local", "--out", str(tmp_path / "run")]  # fmt: skip
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0, told.output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    for digits, found in summary["bodies"].items():
        assert f"body {digits}: 3 clients, received {100 * found['accuracy']['received']:.1f} %" in told.output


# ---- nodes -----------------------------------------------------------------------------------------------------------


def bodies_of(tmp_path: Path, means: Sequence[int]) -> tuple[list[str], list[Path], dict[int, dict[str, Any]]]:
    """Return the digests of a body with several means, the pictures of a node for each, and the node-configs."""
    body = picture_body(tmp_path / "body.onnx", side=SIDE)
    places = [photos(tmp_path / f"site{k}", k) for k in range(len(means))]
    options = [f"{body} mean={mean} std=128" for mean in means]
    nodes = {
        70 + k: {"client-id": k, "data-path": str(place), "features-with": option}
        for k, (place, option) in enumerate(zip(places, options, strict=True))
    }
    found = [own_data(str(p), None, from_flat({"dataset": "npz"}).data, o).inputs.body for p, o in zip(places, options)]
    return found, places, nodes


@pytest.fixture
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDAPP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDAPP_STATE", str(tmp_path / "state"))


SETTINGS = {"method": "fed3r", "dataset": "npz", "class-names": "blue,green,red", "model": "identity"}


@pytest.mark.usefixtures("own_places")
def test_nodes_of_listed_bodies_take_part_and_another_is_left_out(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    digests, _, nodes = bodies_of(tmp_path, (127, 127, 120, 120, 100))
    listed = ",".join(dict.fromkeys(digest[:8] for digest in digests[:4]))
    summary, grid, events = start(tmp_path, nodes, **SETTINGS, clients=5, bodies=listed)
    told = " ".join(map(str, events))
    assert f"the body of client 4 ({digests[4]}) is not among those of the run ({digests[0]}, {digests[2]})" in told
    assert grid.told[74] == ["query.register"] and grid.told[72].count("query.sums") == 1
    groups = {digests[0]: [0, 1], digests[2]: [2, 3]}
    assert {found["body"]: found["clients"] for found in summary["bodies"].values()} == groups
    for body, clients in groups.items():
        mine = {70 + c: {**nodes[70 + c], "client-id": i} for i, c in enumerate(clients)}
        start(tmp_path / body[:8], mine, **SETTINGS, clients=2)
        assert same(head(tmp_path / "run", body), head(tmp_path / body[:8] / "run"))


@pytest.mark.usefixtures("own_places")
@pytest.mark.parametrize("fault", ["answer", "classes"])
def test_a_body_that_fails_is_left_out_and_the_others_go_on(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for k, body in enumerate([SECOND, FIRST, FIRST]):
        site(tmp_path / f"{k}.npz", body, 12, k, classes=CLASSES + (k == 0 and fault == "classes"))
    nodes = {70 + k: {"client-id": k, "data-path": str(tmp_path / f"{k}.npz")} for k in range(3)}
    answer = SumsClient.answer

    def failing(self: Any, kind: str, payload: Any) -> Any:
        if self.task.client == 0 and fault == "answer":
            raise RuntimeError("no memory")
        return answer(self, kind, payload)

    monkeypatch.setattr(SumsClient, "answer", failing)
    values = {"dataset": "npz", "model": "identity", "clients": 3, "bodies": f"{SECOND[:8]},{FIRST[:8]}"}
    summary, grid, _ = start(tmp_path, nodes, method="lda", **values)
    words = {"answer": "fails: round 0: 0 valid replies of 1, .*no memory", "classes": "fails: client 0 has 5 classes"}
    assert re.search(f"the body b2b2b2b2 {words[fault]}", " ".join(summary["left_out"]))
    assert [*summary["bodies"]] == ["a1a1a1a1"] and summary["bodies"]["a1a1a1a1"]["clients"] == [1, 2]
    assert summary["headline"]["clients"] == 2 and "evaluate" not in grid.told[70]
    assert not (tmp_path / "run" / "models" / "last-b2b2b2b2.safetensors").exists()
    if fault == "answer":
        with pytest.raises(RoundFailed, match="no memory"):
            start(tmp_path / "alone", {70: nodes[70]}, method="lda", **{**values, "clients": 1})


@pytest.mark.usefixtures("own_places")
def test_a_raw_picture_goes_to_the_head_of_the_body_that_is_given(tmp_path: Path, tiny: Tiny) -> None:
    pytest.importorskip("onnxruntime")
    body, data = picture_body(tmp_path / "body.onnx", side=SIDE), tmp_path / "data"
    data.mkdir()
    means = (127, 120)
    how: dict[str, Any] = {"std": [128], "workers": 1}
    made = [fedapp.features(photos(tmp_path / f"site{k}", k), body, data / f"{k}.npz", mean=[mean], **how)
            for k, mean in enumerate(means)]  # fmt: skip
    digests = [found.about["body"] for found in made]
    run = tiny(dataset="npz", clients=0, data_dir=data, bodies=",".join(d[:8] for d in digests), method="fed3r")
    picture = str(tmp_path / "site0" / "test" / "red" / "3.png")
    for mean in means:
        words = ["--with", f"{body} mean={mean} std=128"]
        told = CliRunner().invoke(app, ["predict", picture, "--run", str(run.out), *words, "--top", "1"])
        assert told.exit_code == 0 and told.stdout.split("\t")[1] == "red", told.output
    told = CliRunner().invoke(app, ["predict", picture, "--run", str(run.out), "--with", f"{body} mean=99 std=128"])
    assert isinstance(told.exception, BadRequest) and "name one of these bodies with --with" in str(told.exception)
    wrong = {str(body): "is the body of the heads", f"{body} mean=127 std=0": "a deviation is above 0",
             "minilm tokens=9": "has its own tokens"}  # fmt: skip
    for words, message in wrong.items():
        told = CliRunner().invoke(app, ["predict", picture, "--run", str(run.out), "--with", words])
        assert isinstance(told.exception, BadRequest) and message in str(told.exception)
    damaged = run.out / "models" / f"last-{digests[1][:8]}.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:100])  # the head of the other body is not needed
    words = ["--with", f"{body} mean=127 std=128", "--top", "1"]
    told = CliRunner().invoke(app, ["predict", picture, "--run", str(run.out), *words])
    assert told.exit_code == 0, told.output
    number = ["--client", "1", "--with", f"{body} mean=120 std=128"]
    told = CliRunner().invoke(app, ["predict", picture, "--run", str(run.out), *number, "--top", "1"])
    assert told.exit_code == 0, told.output
