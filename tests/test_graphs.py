"""Training steps that are replayed: the same numbers as steps that are run, for every method."""

from __future__ import annotations

import contextlib
import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedapp import graphs, process, registry
from fedapp.config import from_flat
from fedapp.data.transforms import InputSpec
from fedapp.engines.local import run
from fedapp.graphs import WARM_UP, Replayed
from fedapp.learning import training
from fedapp.learning.training import Batch, TrainSpec, train
from fedapp.models import build_model
from fedapp.transport import checkpoint
from tests.handmade import deterministic
from tests.recording import TapeRecorder

METHODS = list(registry.discover())
INPUTS = InputSpec(channels=1, size=8, scale=16.0, mean=(0.305,), std=(0.376,))
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


SETTINGS_OF_STEPS: list[tuple[str, dict[str, Any]]] = [
    ("digits-a", {}),
    ("digits-b", {"clip": 0.1, "weight_decay": 0.01}),
    ("digits-c", {"optimizer": "adam", "momentum": 0.0}),
    ("digits-a", {"augment": "weak", "views": 2}),
    ("digits-a", {"precision": "bf16"}),
    ("normalised", {"momentum": 0.0}),
]


def arrays(model: nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    return {n: t.detach().cpu().numpy().copy() for n, t in model.state_dict().items()}


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> TapeRecorder:
    """Record on the CPU wherever graphs are asked for."""
    recorder = TapeRecorder()
    adam = sys.modules[torch.optim.Adam.__module__]
    monkeypatch.setattr(adam, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"])
    monkeypatch.setattr(training, "recorder_for", lambda device: recorder)
    return recorder


def made(name: str) -> nn.Module:
    """A model of the zoo, or one with what draws random numbers and what keeps statistics."""
    if name != "normalised":
        return build_model(name, num_classes=10, channels=1, size=8, seed=1)
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(288, 10)
    )


def trained(model: nn.Module, n: int = 100, views: int = 1, **values: Any) -> float:
    generator = np.random.default_rng(0)
    device = next(model.parameters()).device
    x = torch.from_numpy(generator.integers(0, 17, (n, 8, 8, 1), dtype=np.uint8)).to(device)
    y = torch.from_numpy(generator.integers(0, 10, n)).to(device)
    spec = TrainSpec(**{"epochs": 2, "batch_size": 9, "lr": 0.02, "momentum": 0.9, **values})

    def loss(batch: Batch) -> Tensor:
        return sum((F.cross_entropy(model(v), batch.y) for v in batch.views), torch.zeros((), device=device))

    return train(model, x, y, spec, INPUTS, loss, torch.Generator().manual_seed(5), views=views).loss


@pytest.mark.parametrize(("name", "values"), SETTINGS_OF_STEPS)
def test_replayed_steps_equal_run_ones(name: str, values: dict[str, Any], tape: TapeRecorder) -> None:
    model = made(name)
    other = copy.deepcopy(model)
    assert trained(model, graphs=True, **values) == pytest.approx(trained(other, graphs=False, **values), rel=1e-6)
    ours, right = arrays(model), arrays(other)
    if values.get("optimizer") == "adam":  # which counts its steps in float32 where it is to be recorded
        assert all(np.allclose(ours[n], right[n], atol=1e-4) for n in right)
    else:
        assert all(np.array_equal(ours[n], right[n]) for n in right)
    assert all(p.grad is None for p in model.parameters())
    # 11 steps of 9 or 10 in an epoch: both sizes are warmed up, and recorded in either epoch.
    assert tape.run_plainly + tape.recorded + tape.replayed == 22 and tape.replayed >= 4 and tape.recorded >= 2


def test_each_shape_is_recorded_and_forgotten() -> None:
    seen: list[int] = []

    def step(x: Tensor) -> Tensor:
        seen.append(len(x))
        return (2 * x).sum()

    recorder = TapeRecorder()
    replayed = Replayed(step, recorder)
    for _ in range(WARM_UP + 3):
        for n in (2, 3):
            x = torch.rand(n)
            assert replayed(x) == (2 * x).sum()
    assert len(seen) == 2 * (WARM_UP + 1) and recorder.replayed == 4
    replayed.forget()
    for _ in range(3):
        replayed(torch.rand(2))
    assert recorder.recorded == 3 and recorder.replayed == 5, "one step is run, one recorded, one replayed"


def test_a_step_that_waits_for_the_device_cannot_be_recorded() -> None:
    """What this file's recorder is for: it must see what a GPU would refuse, and repeat nothing but operations."""
    recorder = TapeRecorder()
    for step in (
        lambda x: x * x.sum().item(),
        lambda x: x[x > 0.5].sum(),
        lambda x: x.nonzero().sum(),
        lambda x: x.sum() + torch.tensor(1.0),
        lambda x: torch.bincount(x.long()).sum(),
    ):
        with pytest.raises(RuntimeError, match="while recording"):
            recorder.record(lambda step=step: step(torch.rand(4)))
    count = 0

    def counts(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x * count

    stale = Replayed(counts, recorder)
    results = [float(stale(torch.ones(()))) for _ in range(WARM_UP + 3)]
    assert results == [1, 2, 3, 4, 4, 4]


SETTINGS: dict[str, Any] = {
    "dataset": "digits", "clients": 2, "rounds": 2, "local_epochs": 2, "batch_size": 16, "alpha": 5.0,
    "data_fraction": 0.4, "seed": 3, "optimizer": "sgd",
}  # fmt: skip


VARIANTS = [(method, "", {}) for method in METHODS] + [
    ("fd", "collect=train", {}),
    ("fedproto", "collect=train", {}),
    ("moon", "", {"augment": "weak"}),
    ("cwfedavg", "layers=all", {"clip": 0.5}),
    ("fedclassavg", "", {"augment": "strong", "momentum": 0.9}),
]


@pytest.mark.parametrize(("method", "args", "values"), VARIANTS)
def test_every_method_can_be_replayed(
    method: str, args: str, values: dict[str, Any], tmp_path: Path, tape: TapeRecorder
) -> None:
    """No step reads a value on the host, or changes with what Python remembers within an epoch."""
    values = {**SETTINGS, **values, "method_args": args}
    plain = run(method=method, out=tmp_path / "plain", **values)
    again = run(method=method, out=tmp_path / "again", cuda_graphs=True, **values)
    assert tape.replayed > 20
    pd.testing.assert_frame_equal(deterministic(plain.clients), deterministic(again.clients), check_exact=True)
    pd.testing.assert_frame_equal(deterministic(plain.final), deterministic(again.final), check_exact=True)
    a, b = (checkpoint.latest(r.out / "checkpoint") for r in (plain, again))
    assert a is not None and b is not None
    left, right = checkpoint.flatten(a[1]), checkpoint.flatten(b[1])
    assert left[0].keys() == right[0].keys() and all(np.array_equal(left[0][n], right[0][n]) for n in left[0])


def test_without_a_gpu_the_key_changes_nothing() -> None:
    assert training.recorder_for(torch.device("cpu")) is None
    assert from_flat({"cuda-graphs": True}).train_spec().graphs
    assert not from_flat({}).train_spec().graphs
    model = build_model("digits-a", num_classes=10, channels=1, size=8, seed=1)
    other = copy.deepcopy(model)
    assert trained(model, graphs=True) == trained(other)


class FakeGraph:
    """Stands for `torch.cuda.CUDAGraph` where there is no GPU: notes what is asked of it."""

    def __init__(self, fails: bool = False) -> None:
        self.log: list[str] = []
        self.fails = fails

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self.log.append(f"begin {pool} {capture_error_mode}")

    def capture_end(self) -> None:
        self.log.append("end")
        if self.fails:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        self.log.append("replay")


class FakeStream:
    def wait_stream(self, other: object) -> None: ...


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[FakeGraph]:
    """PyTorch's interface to CUDA, as far as recording needs it; graphs are taken from the list, the last one first."""
    ready = [FakeGraph(), FakeGraph()]
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "MemPool", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", ready.pop)
    return ready


def test_what_is_asked_of_cuda(cuda: list[FakeGraph]) -> None:
    second, first = cuda
    recorder = graphs.CudaRecorder()
    assert recorder.run(lambda: torch.zeros(())) == 0
    loss, replay = recorder.record(lambda: torch.ones(()))
    replay()
    assert loss == 1 and first.log == ["begin pool thread_local", "end", "replay", "replay"]
    recorder.record(lambda: torch.ones(()))
    assert second.log == ["begin pool thread_local", "end", "replay"], "the same pool for all"


@pytest.mark.parametrize(
    ("raised", "expected", "says"),
    [
        (RuntimeError("not permitted while capturing"), RuntimeError, r"not permitted.*set cuda-graphs = false"),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError, "^CUDA out of memory$"),
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
        (None, RuntimeError, r"previous error.*set cuda-graphs = false"),
    ],
)  # fmt: skip
def test_a_step_that_fails_while_it_is_recorded(
    raised: BaseException | None, expected: type[BaseException], says: str, cuda: list[FakeGraph]
) -> None:
    """The recording is ended, and only what it cannot hold is said to be its fault."""
    cuda[-1].fails = True
    graph = cuda[-1]

    def step() -> Tensor:
        if raised is not None:
            raise raised
        return torch.ones(())

    with pytest.raises(expected, match=says):
        graphs.CudaRecorder().record(step)
    assert graph.log == ["begin pool thread_local", "end"]


@GPU
@pytest.mark.parametrize(("name", "values"), SETTINGS_OF_STEPS)
def test_cuda_graphs_equal_eager_steps(name: str, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    process.prepare(1)
    recorded: list[int] = []
    original = graphs.CudaRecorder.record
    monkeypatch.setattr(graphs.CudaRecorder, "record", lambda *args: (recorded.append(1), original(*args))[1])
    model = made(name).cuda()
    other = copy.deepcopy(model)
    assert trained(model, graphs=True, **values) == pytest.approx(trained(other, **values), rel=1e-4)
    ours, right = arrays(model), arrays(other)
    for name in right:
        np.testing.assert_allclose(ours[name], right[name], rtol=1e-4, atol=1e-4)
    assert len(recorded) >= 2


@GPU
def test_memory_does_not_grow_with_recordings() -> None:
    model = made("digits-a").cuda()
    held = []
    for _ in range(40):
        trained(model, graphs=True)
        held.append(torch.cuda.memory_reserved())
    assert held[-1] == held[4]


@GPU
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_in_cuda_graphs(method: str, tmp_path: Path) -> None:
    plain = run(method=method, out=tmp_path / "plain", **SETTINGS)
    again = run(method=method, out=tmp_path / "again", cuda_graphs=True, **SETTINGS)
    np.testing.assert_allclose(plain.clients["train_loss"], again.clients["train_loss"], rtol=1e-3)
