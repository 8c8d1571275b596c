"""Models and data of a run directory: what is refused, and whose code is imported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fedapp import plugins
from fedapp.engines.local import run
from fedapp.errors import BadRequest
from fedapp.results.analysis import Unavailable
from fedapp.results.runs import read_run
from reproduction.figures import models, papers
from tests.test_identity import changed_one, rewritten
from tests.test_normalise import drawn, written
from tests.test_own_models import NETS
from tests.test_sizes import folder, went


def test_data_that_changed_since_the_run_are_not_used(tmp_path: Path, tiny: Any) -> None:
    values = drawn("npz")
    keys = written("npz", tmp_path / "data", values)
    settings = {"dataset": "npz", "data_dir": keys["data-dir"], "rounds": 1, "clients": 0, "model": "mlp"}
    there = tiny(method="fedavg", **settings)
    facts = json.loads((there.out / "inputs.json").read_text())
    (there.out / "inputs.json").write_text(json.dumps({**facts, "mean": [0.5] * 4}))
    assert models.inputs_of(there).mean == (0.5,) * 4, "the normalisation of the training"
    rewritten("npz", tmp_path / "data", changed_one(values))
    with pytest.raises(BadRequest, match="have changed"):
        run(resume=there.out, rounds=2)  # which reads the data again
    with pytest.raises(Unavailable, match=r"have changed since the run \(SHA-256\): data samples"):
        models.data_of.__wrapped__(there)
    moved = tmp_path / "moved"
    shutil.copytree(there.out, moved)
    card = json.loads((moved / "data_card.json").read_text())
    (moved / "data_card.json").write_text(json.dumps({**card, "hash": "0" * 64}))
    with pytest.raises(Unavailable, match="changed since the run"):
        models.data_of(read_run(moved))


def test_clients_that_normalise_or_measure_differently_see_no_common_sample(tmp_path: Path, tiny: Any) -> None:
    keys = written("npz", tmp_path / "own", drawn("npz"))
    settings = {"dataset": "npz", "data_dir": keys["data-dir"], "rounds": 1, "clients": 0, "model": "mlp"}
    with pytest.raises(Unavailable, match="each client normalises its own"):
        models.inputs_of(tiny(method="fedavg", normalise="client", **settings))
    apart = went(folder(tmp_path / "data"), tmp_path / "out", "fedclassavg", num_server_rounds=1)
    with pytest.raises(BadRequest, match="differ in size, so no two models see the same one"):
        papers.draw("fedclassavg-8", [apart.out])


def test_no_code_is_imported_that_a_run_names(tmp_path: Path) -> None:
    run(method="fedavg", model=f"{NETS}:Wide", clients=3, rounds=1, local_epochs=1, out=tmp_path / "run")
    done = read_run(tmp_path / "run")
    with plugins.only(""), pytest.raises(BadRequest, match="not imported here"):
        models.client_models(done)
    with plugins.only("tests.*"):
        assert len(models.client_models(done)) == 3
