"""Memory of a process: measured, and told in one sentence where it runs out."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Error, Message, RecordDict

from fedapp import process, server_app
from fedapp.client_app import app as client_app
from fedapp.config import from_flat
from fedapp.transport.local_grid import LocalGrid
from fedapp.transport.traffic import RoundFailed
from fedapp.transport.validation import failure

CUDA = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.00 GiB"
CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"


@pytest.mark.parametrize(
    ("error", "where", "setting"),
    [
        (torch.OutOfMemoryError(CUDA), "the GPU's memory ran out", "--client-gpus"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), "the GPU's memory", "--client-gpus"),
        (RuntimeError(CUBLAS), "the GPU's memory", "--client-gpus"),
        (MemoryError(), "the main memory ran out", "--client-cpus"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to"), "the main memory", "--client-cpus"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "the main memory", "--client-cpus"),
    ],
)
def test_out_of_memory_is_one_sentence_that_names_the_settings(error: Exception, where: str, setting: str) -> None:
    advice = process.out_of_memory(error)
    assert advice is not None and "\n" not in advice
    assert where in advice and setting in advice and "batch-size" in advice and "model" in advice


def test_memory_that_cannot_be_had_is_recognised() -> None:
    """The very errors that PyTorch and NumPy raise, for a thousand terabytes."""
    for allocate in (lambda: torch.empty(10**15, dtype=torch.uint8), lambda: np.empty(10**15, np.uint8)):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            allocate()
        assert "the main memory ran out" in str(process.out_of_memory(caught.value))


def test_other_errors_are_left_alone() -> None:
    for error in (
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("out of memory lane"),
        OSError(),
    ):
        assert process.out_of_memory(error) is None


def run(tmp_path: Path, grid: type[LocalGrid] = LocalGrid) -> None:
    values = {"method": "fedavg", "clients": 3, "num-server-rounds": 1, "local-epochs": 1, "out": str(tmp_path / "run")}
    flat = from_flat(values).to_flat()
    server_app.serve(grid(client_app, flat, 3), flat)


def test_a_client_out_of_memory_ends_the_run_with_that_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError(CUDA)

    monkeypatch.setattr("clients.base.train", full)
    with pytest.raises(RoundFailed, match=r"the GPU's memory ran out: lower batch-size.*--client-gpus"):
        run(tmp_path)


DIED = (
    "<class 'ray.exceptions.ActorDiedError'>:<'The actor died unexpectedly before finishing this task.\n"
    "\tclass_name: ClientAppActor\nThe actor is dead because its worker process has died. Worker exit type: "
    "SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file.'>"
)
EVICTED = (
    "<class 'ray.exceptions.OutOfMemoryError'>:<'Task was killed due to the node running low on memory.\n"
    "Memory on the node was 22.9GB / 24GB (0.95), which exceeds the memory usage threshold of 0.95'>"
)


@pytest.mark.parametrize(
    ("reason", "cause"), [(DIED, "most often because memory ran out"), (EVICTED, "(memory ran out)")]
)
def test_a_worker_that_was_killed_is_told_with_what_to_do(reason: str, cause: str, tmp_path: Path) -> None:
    class Killed(LocalGrid):
        """A grid whose worker dies with client 1."""

        def pull_messages(self, message_ids: Any) -> Any:
            return [
                Message(Error(code=0, reason=reason), reply_to=self.asked[r.metadata.reply_to_message_id])
                if r.metadata.src_node_id == 1001 and r.metadata.message_type == "train"
                else r
                for r in super().pull_messages(message_ids)
            ]

        def push_messages(self, messages: Any) -> Any:
            messages = list(messages)
            ids = list(super().push_messages(messages))
            self.asked = getattr(self, "asked", {}) | dict(zip(ids, messages, strict=True))
            return ids

    with pytest.raises(RoundFailed, match=r"client 1: the client's worker process was killed") as caught:
        run(tmp_path, Killed)
    assert cause in str(caught.value) and "--client-cpus" in str(caught.value) and "batch-size" in str(caught.value)


def test_what_a_client_app_raises_keeps_its_own_words() -> None:
    ask = Message(RecordDict(), 1, "train")
    ask.metadata.__dict__["_message_id"] = "1"
    words = "<class 'ray.exceptions.RayTaskError(ClientAppException)'>:<'boom'>"
    assert failure(Message(Error(code=2, reason=words), reply_to=ask)).reason == words


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak cannot be reset elsewhere")
def test_the_peak_counts_from_the_reset_and_keeps_what_was_given_back() -> None:
    process.reset_peak()
    before = process.peak_memory()
    block = np.ones(64 << 20, np.uint8)
    assert block[-1] == 1
    del block
    grown = process.peak_memory() - before
    assert 48 << 20 < grown < 128 << 20
    process.reset_peak()
    assert process.peak_memory() < before + (32 << 20)


@pytest.mark.full
@pytest.mark.parametrize(
    "lines", ["import numpy, scipy.linalg\nprocess.prepare(1)", "process.prepare(2)\nimport scipy.linalg"]
)
def test_blas_has_one_thread_whenever_it_is_loaded(lines: str) -> None:
    script = (
        "from threadpoolctl import threadpool_info\n"
        f"from fedapp import process\n{lines}\n"
        "print({p['num_threads'] for p in threadpool_info() if p['user_api'] == 'blas'})\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    env["OMP_NUM_THREADS"] = "2"
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{1}"
