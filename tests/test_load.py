"""`fedapp.load`: the module that comes back is the model that the run scored."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import fedapp
from fedapp import registry
from fedapp.cli import app
from fedapp.data.transforms import channels_first, normalise
from fedapp.errors import BadRequest
from fedapp.results.runs import RunResult
from fedapp.tasks import simulated as tasks
from tests import own_nets
from tests.matrix import methods
from tests.test_predict import trained

METHODS: list[dict[str, Any]] = [
    {"method": "fedavg"},
    {"method": "fedclassavg", "model": "digits-a,digits-b"},
    {"method": "cwfedavg"},
    {"method": "fedproto", "model": "digits-a,digits-b"},
    {"method": "ccvr", "method_args": "transform=feature clsnorm=true"},
    {"method": "local"},
    {"method": "fednh"},
    {"method": "ifca"},
    {"method": "ditto"},
    {"method": "fedrod"},
]


def hits(net: fedapp.results.predict.LoadedModel, run: RunResult, client: int) -> int:
    """Count the client's test rows that a loaded model classifies correctly."""
    assert run.config is not None
    task = tasks.simulated_task(run.config, client, len(run.final), torch.device("cpu"))
    return int((net.predict(task.x_test.numpy()).argmax(1) == task.y_test.numpy()).sum())


def of_global(net: fedapp.results.predict.LoadedModel, run: RunResult) -> float:
    """Return the accuracy of a loaded model on the central test set."""
    assert run.config is not None
    x, y = tasks.federated(run.config, 3).central(torch.device("cpu")) or pytest.fail("no central test set")
    return float((net.predict(x).argmax(1) == y.numpy()).mean())


@pytest.mark.full
@pytest.mark.parametrize("values", METHODS, ids=lambda v: v["method"])
def test_the_loaded_model_scores_what_final_csv_says(values: dict[str, Any], tiny: Any) -> None:
    run = tiny(**values)
    final = run.final.set_index("client")
    for client in final.index:
        net = fedapp.load(run.out, client)
        assert hits(net, run, client) == final.loc[client, "trained_correct"], client
        assert not net.training and net.model.name == run.config.model.name_of(client)
        assert net.classes == tuple("0123456789") and net.kind == "image"
        assert f"client {client}, " in net.about and "after round 2 and one more local training" in net.about
        if values["method"] != "local":
            received = fedapp.load(run.out, client, point="received")
            assert hits(received, run, client) == final.loc[client, "received_correct"], client
            pairs = zip(received.parameters(), net.parameters(), strict=True)
            assert any(not torch.equal(a, b) for a, b in pairs), "received and trained are two models"


@pytest.mark.full
@pytest.mark.parametrize("values", [*METHODS[:4], METHODS[5], *METHODS[-2:]], ids=lambda v: v["method"])
def test_without_kept_models_it_is_the_model_after_the_last_training(values: dict[str, Any], tiny: Any) -> None:
    run = tiny(**values, keep_models=False, final_training=False)
    assert not (run.out / "models" / "clients").exists()
    for client, row in run.final.set_index("client").iterrows():
        net = fedapp.load(run.out, int(client))
        assert hits(net, run, int(client)) == row["trained_correct"]
        assert "after its last training, in round 2" in net.about


@pytest.mark.parametrize("kept", [True, False])
def test_the_chosen_round_stands_in_place_of_the_last(kept: bool, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedapp.federation.hooks.scores import ValidationChoice

    def first(self: ValidationChoice) -> int | None:
        return 1 if 1 in self.run.directory.table("evaluations.csv").get("round", ()) else None

    monkeypatch.setattr(ValidationChoice, "best_round", first)
    run = tiny(
        method="fedclassavg", rounds=3, validation=0.2, select="validation", evaluate_every=1, keep_models=kept,
        final_training=kept,
    )  # fmt: skip
    assert run.summary["round"] == 1
    net = fedapp.load(run.out, 0)
    assert hits(net, run, 0) == run.final.set_index("client").loc[0, "trained_correct"]
    assert ("after round 1 and one more local training" if kept else "in round 1") in net.about


@pytest.mark.parametrize("method", methods(m.id for m in registry.discover().values() if m.global_model))
def test_the_global_model(method: str, tiny: Any) -> None:
    run = tiny(method=method, rounds=1)
    net = fedapp.load(run.out)
    assert of_global(net, run) == pytest.approx(run.summary["accuracy"]["global"]["last"], abs=1e-12)
    assert "global model after " in net.about


def test_methods_without_a_global_model_ask_for_a_client(tiny: Any) -> None:
    with pytest.raises(BadRequest, match="fedclassavg has no global model: give the client"):
        fedapp.load(tiny(method="fedclassavg").out)


@pytest.mark.parametrize("freeze", ["", "features.bn"])
def test_the_global_model_has_what_only_its_weights_hold(freeze: str, tiny: Any, tmp_path: Path) -> None:
    """A mask of whole numbers is never sent, nor are the statistics of a frozen BatchNorm without parameters."""
    net, file = own_nets.Normed(10, (1, 8, 8)), tmp_path / "w.pt"
    net.mask.copy_(torch.arange(64).reshape(1, 8, 8) % 3 == 0)
    net.bn.running_mean.fill_(0.5)
    net.bn.running_var.fill_(9)
    torch.save(net.state_dict(), file)
    run = tiny(method="fedavg", model="tests.own_nets:Normed", weights=str(file), freeze=freeze)
    loaded = fedapp.load(run.out, allow="tests.*")
    assert of_global(loaded, run) == pytest.approx(run.summary["accuracy"]["global"]["last"], abs=1e-12)
    assert torch.equal(loaded.model.state_dict()["features.mask"], net.mask)
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(BadRequest, match="was made with other weights"):
        fedapp.load(run.out, allow="tests.*")


@pytest.mark.parametrize("buffers", ["local", "drop"])
def test_a_global_model_without_its_statistics_is_refused(buffers: str, tiny: Any) -> None:
    run = tiny(method="fedavg", model="tests.own_nets:Normed", buffers=buffers, rounds=1)
    with pytest.raises(BadRequest, match=r"holds only the shared part of fedavg .* take a client's model"):
        fedapp.load(run.out, allow="tests.*")


def test_it_is_one_module_on_raw_samples(tiny: Any) -> None:
    run = tiny(method="fedavg")
    net = fedapp.load(run.out, 1)
    x = tasks.federated(run.config, 3).dataset.x_train[:5]
    raw = torch.from_numpy(np.array(x))
    normalised = normalise(channels_first(raw), net.inputs)
    assert torch.equal(net.transform(raw), normalised) and torch.equal(net(raw), net.model(normalised))
    p = net.predict(x)
    assert p.shape == (5, 10) and np.allclose(p, torch.softmax(net(raw), 1).detach().numpy(), atol=1e-7)
    assert np.array_equal(net.predict(x[..., 0]), p), "grey images without the last axis"
    assert net.predict(x[:0]).shape == (0, 10)
    long = np.concatenate([x] * 60)
    assert np.allclose(net.predict(long), np.concatenate([p] * 60), atol=1e-6), "more than one batch"
    for wrong in (x.astype(np.float32), np.zeros((5, 8, 9, 1), np.uint8), np.zeros((5, 64), np.uint8), x[0], x + 200):
        with pytest.raises(BadRequest, match="this model takes"):
            net.predict(wrong)
    with pytest.raises(BadRequest, match=r"images uint8 \(N, 8, 8, 1\), but was given float32"):
        net(raw.float())


def test_series_of_clients_with_names(tiny: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 120)
    x = rng.standard_normal((120, 2, 32)).astype("float32") + 7 * y[:, None, None]
    people = np.array(["ada", "bob", "cleo"])[np.arange(120) // 40]
    np.savez(tmp_path / "s.npz", x=x, y=np.array(["walk", "run", "sit"])[y], client=people)
    run = tiny(method="lgfedavg", dataset="npz", data_dir=str(tmp_path / "s.npz"), clients=0)
    facts = json.loads((run.out / "inputs.json").read_text())
    assert facts["clients"] == ["ada", "bob", "cleo"] and facts["shape"] == [2, 32] and facts["kind"] == "series"
    (tmp_path / "s.npz").unlink()
    net = fedapp.load(run.out, "bob")
    assert net.kind == "series" and net.classes == ("run", "sit", "walk") and "client 1 (bob)" in net.about
    assert np.array_equal(net.predict(x), fedapp.load(run.out, 1).predict(x))
    assert not np.array_equal(net.predict(x), fedapp.load(run.out, 2).predict(x))
    assert np.array_equal(net.predict(x.astype("float64")), net.predict(x))
    shutil.rmtree(run.out / "models" / "clients")
    assert "after its last training" in fedapp.load(run.out, "bob").about
    with pytest.raises(BadRequest, match=r"no client 'bop', did you mean 'bob'.*ada, bob, cleo"):
        fedapp.load(run.out, "bop")
    with pytest.raises(BadRequest, match="nan at"):
        net.predict(np.full((1, 2, 32), np.nan, "float32"))


def test_clients_without_a_model_are_named(tiny: Any, tmp_path: Path) -> None:
    run = tiny(method="fedavg", clients=5, fraction_train=0.4, rounds=1, keep_models=False)
    taken = sorted(run.clients["client"])
    missing = next(c for c in range(5) if c not in taken)
    with pytest.raises(BadRequest, match=f"client {missing} has never trained.*have: {taken[0]}, {taken[1]}$"):
        fedapp.load(run.out, missing)
    fedapp.load(run.out, taken[0])
    with pytest.raises(BadRequest, match="keep-models = true"):
        fedapp.load(run.out, taken[0], point="received")
    shutil.rmtree(run.out / "state")
    with pytest.raises(BadRequest, match=r"state of client \d is not in .*If it was deleted, run again: fedapp run"):
        fedapp.load(run.out, taken[0])
    for client, says in ((5, "no client 5: .* has the clients 0 .. 4"), (-1, "no client -1"), ("ada", "have no names")):
        with pytest.raises(BadRequest, match=says):
            fedapp.load(run.out, client)
    with pytest.raises(BadRequest, match="give a run directory, or on a node"):
        fedapp.load(tmp_path / "nothing", 1)
    with pytest.raises(BadRequest, match="point = 'last'"):
        fedapp.load(run.out, 0, point="last")  # type: ignore[arg-type]


def test_from_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = trained(tmp_path, monkeypatch, method="fedclassavg", model="digits-b")
    final = pd.read_csv(tmp_path / "run" / "final.csv").set_index("client")
    run = fedapp.results.runs.read_run(tmp_path / "run")
    for net in (fedapp.load(folder), fedapp.load(folder.parent, 1)):
        assert hits(net, run, 1) == final.loc[1, "trained_correct"]
    assert hits(fedapp.load(folder, point="received"), run, 1) == final.loc[1, "received_correct"]
    with pytest.raises(BadRequest, match="Real nodes keep it themselves: give STATE-DIR/run"):
        fedapp.load(tmp_path / "run", 1)


def test_a_resumed_run_leaves_no_models_of_its_earlier_end(tiny: Any) -> None:
    run = tiny(method="fedavg", rounds=1)
    before = fedapp.load(run.out, 0)
    more = tiny(resume=run.out, rounds=2)
    after = fedapp.load(more.out, 0)
    assert "after round 2 and one more" in after.about
    assert not torch.equal(before.model.head.weight, after.model.head.weight)
    assert hits(after, more, 0) == more.final.set_index("client").loc[0, "trained_correct"]


def test_many_clients_keep_no_models_by_default(tiny: Any) -> None:
    from fedapp.config import from_flat

    auto = from_flat({})
    assert auto.evaluation.keeps_models(100) and not auto.evaluation.keeps_models(101)
    assert from_flat({"keep-models": True}).evaluation.keeps_models(101) and not from_flat(
        {"keep-models": False}
    ).evaluation.keeps_models(1)


def test_a_model_that_does_not_predict_alone_warns(tiny: Any) -> None:
    run = tiny(method="fedproto", method_args="inference=prototype", rounds=1)
    with pytest.warns(UserWarning, match="not those of the stored model alone"):
        fedapp.load(run.out, 0)


def test_a_damaged_description_is_refused(tiny: Any) -> None:
    run = tiny(method="fedavg", rounds=1, keep_models=False)
    good = json.loads((run.out / "inputs.json").read_text())
    for wrong in ({**good, "mean": "x"}, {**good, "std": []}, {**good, "shape": [1, "a"]}, {**good, "classes": ["0"]}):
        (run.out / "inputs.json").write_text(json.dumps(wrong))
        with pytest.raises(BadRequest, match="is damaged"):
            fedapp.load(run.out, 0)
    (run.out / "inputs.json").unlink()
    assert fedapp.load(run.out, 0).inputs.scale == 16, "a published data set says it itself"


def command(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["predict", *arguments])
    assert done.exit_code == 0 or isinstance(done.exception, BadRequest), done.output
    told = done.stderr.splitlines() if not done.exit_code else ["client"]
    assert len(told) == 1 and ("client" in told[0] or "global model" in told[0]), "it names the model"
    return done.exit_code, done.stdout + (str(done.exception) if done.exception else "")


def test_predict_takes_pictures_and_arrays_of_a_run(tiny: Any, tmp_path: Path) -> None:
    run = tiny(method="fedclassavg", rounds=1)
    x = np.array(tasks.federated(run.config, 3).dataset.x_train[:3])
    np.savez(tmp_path / "x.npz", x=x)
    Image.fromarray((x[0, ..., 0].astype(float) * 255 / 16).round().astype("uint8")).save(tmp_path / "a.png")
    code, text = command(
        str(tmp_path / "a.png"), str(tmp_path / "x.npz"), "--run", str(run.out), "--client", "2", "--top", "2",
        "--out", str(tmp_path / "out.csv"),
    )  # fmt: skip
    assert code == 0, text
    p = fedapp.load(run.out, 2).predict(np.concatenate([x[:1], x]))
    found = pd.read_csv(tmp_path / "out.csv")
    assert [Path(n).name for n in found["sample"]] == ["a.png", "x.npz:0", "x.npz:1", "x.npz:2"]
    assert found["class"].tolist() == p.argmax(1).tolist() and np.allclose(found["probability"], p.max(1))
    assert np.allclose(found[[f"p_{c}" for c in range(10)]], p)
    rows = [line.split("\t") for line in text.splitlines()]
    assert [r[1] for r in rows] == [str(c) for c in p.argmax(1)] and [len(r) for r in rows] == [5] * 4
    received = fedapp.load(run.out, 2, "received").predict(x)
    _, text = command(str(tmp_path / "x.npz"), "--run", str(run.out), "--client", "2", "--received")
    assert [line.split("\t")[2] for line in text.splitlines()] == [f"{v:.4f}" for v in received.max(1)]
    for arguments, says in (
        (["--client", "1"], "give --run DIR"),
        (["--run", str(run.out), "--model", "m"], "give --run DIR"),
        (["--model", "m", "--client", "1"], "go with --run"),
        (["--run", str(run.out)], "no global model"),
        (["--run", str(run.out), "--client", "name:0"], "have no names"),
        (["--run", str(run.out), "--client", "0", "--out", str(tmp_path / "no" / "x.csv")], "cannot be written"),
    ):
        code, text = command(str(tmp_path / "x.npz"), *arguments)
        assert code and says in text, (arguments, text)
    np.savez(tmp_path / "y.npz", y=x)
    for name, says in (("y.npz", "no column 'x'"), ("no.npz", "does not exist"), ("x.csv", "are for tables")):
        (tmp_path / "x.csv").write_text("1,2\n")
        assert says in command(str(tmp_path / name), "--run", str(run.out), "--client", "0")[1]


def test_predict_takes_the_rows_of_a_table(tiny: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 90)
    x = (rng.standard_normal((90, 3)) + 3 * y[:, None]).astype("float32")
    np.savez(tmp_path / "t.npz", x=x, y=np.array(["ill", "well"])[y], client=np.array([7, 8, 9])[np.arange(90) // 30])
    run = tiny(method="fedavg", dataset="npz", data_dir=str(tmp_path / "t.npz"), clients=0, rounds=1)
    table = pd.DataFrame(x[:4], columns=["a", "b", "c"])
    table.loc[1, "b"] = np.nan
    table.to_csv(tmp_path / "plain.csv", index=False, header=False)
    table.assign(y="ill", client=7).to_csv(tmp_path / "named.csv", index=False)
    wanted = fedapp.load(run.out, 1).predict(table.to_numpy("float32")).max(1)
    for name in ("plain.csv", "named.csv"):
        for client in ("1", "name:8"):
            code, text = command(str(tmp_path / name), "--run", str(run.out), "--client", client)
            assert code == 0 and [line.split("\t")[2] for line in text.splitlines()] == [f"{v:.4f}" for v in wanted]
    for content, says in (
        ("1,2\n", "has 2 columns of features, but the model takes 3"),
        ("a,b,c\n1,x,3\n", "'b' has 'x' (row 0), which is not a number"),
        ("1,2,3\n1,2,3,4\n", "cannot read the table"),
        ("", "is empty: its first line must name the columns"),
    ):
        (tmp_path / "bad.csv").write_text(content)
        code, text = command(str(tmp_path / "bad.csv"), "--run", str(run.out), "--client", "1")
        assert code and says in text, text
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    assert (
        "give them as .npz (column x), .csv or .parquet" in command(str(tmp_path / "a.png"), "--run", str(run.out))[1]
    )


def test_predict_finds_the_columns_of_a_table_by_their_names(tiny: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    ill = rng.random(120) < 0.5
    table = pd.DataFrame(
        {
            "age": rng.normal(45 + 20 * ill, 5).round(), "smoker": ill ^ (rng.random(120) < 0.2),
            "blood": rng.choice(["0", "A", "AB"], 120), "y": np.where(ill, "ill", "well"),
            "client": np.arange(120) % 3, "split": np.where(np.arange(120) < 80, "train", "test"),
        }
    )  # fmt: skip
    table.to_csv(tmp_path / "t.csv", index=False)
    run = tiny(
        method="fedavg", dataset="csv", data_dir=str(tmp_path / "t.csv"), columns="x=age,smoker,blood", clients=0,
        rounds=1,
    )  # fmt: skip
    net = fedapp.load(run.out, 1)
    assert net.inputs.features == ("age", "smoker", "blood=0", "blood=A", "blood=AB")
    test = table[80:].reset_index(drop=True)
    test.loc[2, "age"] = np.nan
    encoded = np.stack([test["age"], test["smoker"], *(test["blood"] == b for b in ("0", "A", "AB"))], 1)
    wanted = [f"{v:.4f}" for v in net.predict(encoded.astype("float32")).max(1)]
    other = test.assign(note="x")[["note", "blood", "y", "age", "client", "smoker"]]
    other.to_csv(tmp_path / "new.csv")
    code, text = command(str(tmp_path / "new.csv"), "--run", str(run.out), "--client", "name:1")
    assert code == 0 and [line.split("\t")[2] for line in text.splitlines()] == wanted
    other.to_csv(tmp_path / "semicolons.csv", sep=";", na_rep="NA", index=False)
    other.to_parquet(tmp_path / "new.parquet")
    for name in ("semicolons.csv", "new.parquet"):
        code, text = command(str(tmp_path / name), "--run", str(run.out), "--client", "name:1")
        assert code == 0 and [line.split("\t")[2] for line in text.splitlines()] == wanted, text
    for content, says in (
        ("age,smoker\n1,true\n", "lacks blood: the model was trained on age, smoker, blood=0"),
        ("age,blood,smoker\n1,A,yes\n", "'smoker' has 'yes' (row 0), which is not a number"),
        ("age,age,blood,smoker\n1,1,A,true\n", "several columns are called 'age'"),
    ):
        (tmp_path / "bad.csv").write_text(content)
        code, text = command(str(tmp_path / "bad.csv"), "--run", str(run.out), "--client", "1")
        assert code and says in text, text
