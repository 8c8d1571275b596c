"""Training through PyTorch's compiler: the same numbers, one compilation for all clients, and one for all processes."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedapp import config
from fedapp.core import products
from fedapp.engines.local import RunResult
from fedapp.errors import BadRequest
from fedapp.learning import training
from fedapp.learning.training import TrainSpec
from tests.house import ROOT
from tests.test_training import flat, go, network

needs_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="needs a C++ compiler")
SPEC = TrainSpec(epochs=2, batch_size=17, lr=0.1)
"""50 samples are batches of 17, 17 and 16."""


@pytest.fixture
def graphs() -> Iterator[Callable[[], int]]:
    """Return how many graphs have been compiled since the test began, in a compiler that knows none."""
    torch._dynamo.reset()
    counts = torch._dynamo.utils.counters["stats"]
    counts.clear()
    yield lambda: counts["unique_graphs"]
    torch._dynamo.reset()


def apart(a: nn.Module, b: nn.Module, start: nn.Module) -> float:
    """Return the distance of two trained models beside the length of the training."""
    return float((flat(a) - flat(b)).norm() / (flat(b) - flat(start)).norm())


def with_dropout() -> nn.Sequential:
    return nn.Sequential(*network(), nn.Dropout(0.5))


def through_onednn() -> nn.Sequential:
    net = network()
    net[1] = products.Linear(64, 12)
    return net


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize("make", [network, with_dropout, through_onednn])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2)])
def test_the_numbers_are_the_same_and_only_full_batches_are_compiled(
    make: Callable[[], nn.Sequential],
    precision: str,
    tolerance: float,
    graphs: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "WORTH", 1)
    monkeypatch.setattr(products, "onednn_is_faster", lambda: make is through_onednn)
    start = make()
    fast, plain = copy.deepcopy(start), copy.deepcopy(start)
    spec = TrainSpec(**{**SPEC.__dict__, "precision": precision})
    report = go(fast, TrainSpec(**{**spec.__dict__, "compiled": True}))
    assert graphs() == 1, "the batch of 16 was not compiled"
    assert not torch._dynamo.utils.counters["graph_break"], "the loss is one piece"
    again = go(plain, spec)
    assert apart(fast, plain, start) < tolerance
    assert report.loss == pytest.approx(again.loss, rel=tolerance)
    assert (report.steps, report.samples) == (again.steps, again.samples) == (6, 100)


@needs_compiler
@pytest.mark.full
def test_other_models_of_the_same_kind_are_not_compiled_again_and_other_sizes_are_by_themselves(
    graphs: Callable[[], int],
) -> None:
    for seed in (1, 2, 3):
        go(network(seed), TrainSpec(batch_size=17, compiled=True))
    assert graphs() == 1
    # Were the second size compiled for any size, which is slow, there would be no third compilation.
    go(network(), TrainSpec(batch_size=25, compiled=True))
    go(network(), TrainSpec(batch_size=10, compiled=True))
    assert graphs() == 3


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize(("method", "most"), [("fedprox", 1), ("cwfedavg", 2), ("moon", 3)])
def test_a_method_with_a_loss_of_its_own_trains_as_without_the_compiler(
    method: str, most: int, tiny: Callable[..., RunResult], graphs: Callable[[], int]
) -> None:
    """cwFedAvg counts images in its loss, and MOON keeps a tensor of all of them: neither compiles once a client."""
    settings = {"method": method, "batch_size": 16, "clients": 4, "data_fraction": 1.0, "lr": 0.05}
    plain, fast = tiny(**settings), tiny(**settings, compile=True)
    assert 1 <= graphs() <= most
    for column in ("trained_loss", "received_loss"):
        assert list(fast.rounds[column]) == pytest.approx(list(plain.rounds[column]), rel=1e-3)


PROGRAM = """
import torch
from fedapp.learning.training import TrainSpec
from tests.test_training import go, network
net = network()
go(net, TrainSpec(batch_size=25, compiled=True))
found = torch._dynamo.utils.counters["inductor"]
print("counted", found["fxgraph_cache_miss"], found["fxgraph_cache_hit"], float(sum(p.sum() for p in net.parameters())))
"""


@needs_compiler
@pytest.mark.full
def test_a_second_process_takes_the_code_of_the_first(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHINDUCTOR_")}
    environment["FEDAPP_CACHE"] = str(tmp_path)

    def files() -> set[Path]:
        return {*(tmp_path / "compiled").rglob("*.so")}

    def counted() -> list[float]:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return [float(word) for word in done.stdout.partition("counted")[2].split()]

    first, made = counted(), files()
    assert first[0] > 0 and first[1] == 0 and made
    second = counted()
    assert second[0] == 0 and second[1] == first[0], "all from the cache"
    assert files() == made and second[2] == first[2]


# ---- without it ------------------------------------------------------------------------------------------------------


def test_no_other_training_goes_near_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(training, "compiled", refused)
    go(network(), SPEC)
    assert not config.from_flat({}).train_spec().compiled
    with pytest.raises(AssertionError, match="compiled"):
        go(network(), config.from_flat({"compile": True}).train_spec())


def test_without_a_compiler_a_run_does_not_start(tiny: Callable[..., RunResult]) -> None:
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        with pytest.raises(BadRequest, match=r"compile = true needs a C\+\+ compiler .* leave compile out"):
            tiny(method="fedavg", compile=True)
        with pytest.raises(BadRequest, match=r"C\+\+ compiler"):
            go(network(), TrainSpec(compiled=True))


def test_a_compiler_that_fails_is_named(graphs: Callable[[], int], tmp_path: Path) -> None:
    broken = tmp_path / "g++"
    broken.write_text('#!/bin/sh\ncase "$*" in *version*) echo g++ 12.2.0; exit 0;; esac\nexit 1\n')
    broken.chmod(0o755)
    places = torch._inductor.config.patch({"cpp.cxx": (str(broken),), "fx_graph_cache": False})
    with (
        places,
        pytest.raises(BadRequest, match=r"compile = true: the loss .* cannot be compiled .* leave compile out"),
    ):
        go(network(), TrainSpec(batch_size=25, compiled=True))


def test_gradients_of_single_images_are_not_compiled() -> None:
    settings = {"method": "fedavg", "dp": "sgd", "dataset": "digits", "normalise": "none"}
    with pytest.raises(BadRequest, match=r"dp = 'sgd': .*leave compile out"):
        config.from_flat({**settings, "compile": True})


def test_a_compiled_loss_leaves_other_batches_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def compile_(function: Callable[[training.Batch], Tensor], **options: object) -> Callable[[training.Batch], Tensor]:
        return lambda batch: called.append(len(batch.y)) or function(batch)  # type: ignore[func-returns-value]

    monkeypatch.setattr(torch, "compile", compile_)
    go(network(), TrainSpec(batch_size=17, compiled=True))
    assert called == [17, 17]
