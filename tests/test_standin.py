"""Every method on a stand-in for a GPU (`tests.standin`): one device, no waiting within a step, equal numbers."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedapp import registry
from fedapp.data.transforms import AUGMENTATIONS, InputSpec
from fedapp.learning.training import Phase, train
from fedapp.models import build_model
from fedapp.process import hand_over
from tests.handmade import short
from tests.standin import runs

SETTINGS: dict[str, Any] = {
    "dataset": "digits", "clients": 2, "rounds": 2, "local_epochs": 1, "batch_size": 16, "alpha": 5.0,
    "data_fraction": 0.15, "seed": 3,
}  # fmt: skip
ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("torch.utils.backend_registration")
    if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this version of PyTorch does not support devices written in Python")
    folder = tmp_path_factory.mktemp("standin")
    subprocess.run(
        [sys.executable, "-m", "tests.standin", str(folder), json.dumps(SETTINGS)], cwd=ROOT, check=True, timeout=600
    )
    return dict(json.loads((folder / "standin.json").read_text()))


def test_what_the_standin_records(found: dict[str, Any]) -> None:
    """The stand-in must refuse what a GPU refuses, and count as waiting what a GPU waits for."""
    assert found["noted"] == {
        "two devices": "refused",
        "rows of the host": "refused",
        "a stacked number of the host": "refused",
        "a generator of the host": "refused",
        "a number of the host": [],
        "on the device": [],
        "a value": [True],
        "a value in a backward pass": ["backward"],
        "a mask": [True],
        "back": [True],
        "there": [True],
        "there, without waiting": [True],  # ordinary memory is copied to pinned memory first
        "from pinned memory": [True],
        "from pinned memory, without waiting": [False],
        "into": [True],
        "indices of the host": [True],
        "gradient": [0.0, 2.0, 8.0, 18.0],
    }


@pytest.mark.parametrize("name", list(runs()))
def test_every_method_on_a_device(name: str, found: dict[str, Any]) -> None:
    run = found["runs"][name]
    assert run["equal"], "the same tables as on the CPU"
    assert run["equal_arrays"] == run["arrays"] > 0, "the same arrays of server and clients"
    assert run["in_steps"] == {}, "within a step nothing is copied between host and device, forward or backward"
    # One wait per training, for its loss. The constants that normalise images are copied once per process.
    waits = dict(run["waits_in_training"])
    assert waits.pop("transforms.py:_affine", 0) <= 2
    # Steps are those of the rounds, trainings also those before the final scores: a wait in each step would show.
    assert waits == {"training.py:train": run["trainings"]} and run["steps"] > 2 * run["trainings"]


def test_augmentation_never_waits(found: dict[str, Any]) -> None:
    assert all(not any(waits) and len(waits) <= 4 for waits in found["augmentation"].values())
    assert found["augmentation"]["none 3x32"] == [] and found["augmentation"]["strong 3x32"] == [False] * 4


@pytest.mark.parametrize("name", list(runs()))
def test_images_stay_on_the_device(name: str, found: dict[str, Any]) -> None:
    """Images and labels of two training splits, two test splits and the union are copied once, not every round.

    So is the central test set, on which a method with a global model is scored.
    """
    central = 2 * registry.get(name.split()[0]).global_model
    assert found["runs"][name]["elsewhere"]["simulated.py:on_device"] == 10 + central


def test_an_evaluation_waits_as_often_with_any_number_of_images(found: dict[str, Any]) -> None:
    few, many = found["evaluation"]
    assert few == many <= 4


def test_handing_over_on_the_cpu_copies_nothing() -> None:
    x = torch.ones(3)
    assert hand_over(x, torch.device("cpu")) is x


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", AUGMENTATIONS)
def test_a_training_on_a_gpu_waits_once(kind: str) -> None:
    """PyTorch's own synchronisation warnings, on a real GPU."""
    device = torch.device("cuda")
    inputs = InputSpec(shape=(3, 32, 32), scale=255.0, mean=(0.5,) * 3, std=(0.25,) * 3)
    model = build_model("cnn", num_classes=10, shape=(3, 32, 32), seed=1).to(device)
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.integers(0, 256, (200, 32, 32, 3), dtype=np.uint8)).to(device)
    y = torch.from_numpy(rng.integers(0, 10, 200)).to(device)
    spec = short(local_epochs=2, batch_size=10, augment=kind)

    def once() -> None:
        train(
            model, x, y, Phase(lambda batch: F.cross_entropy(model(batch.x), batch.y), spec), inputs,
            torch.Generator().manual_seed(0),
        )  # fmt: skip

    once()  # fills caches
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            once()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert sum("synchroniz" in str(w.message) for w in warned) == 1
