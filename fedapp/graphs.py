"""Training steps that are recorded once as a CUDA graph and then replayed.

A step of a small model is dozens of kernels, each of which takes longer to launch than to run; a graph launches all of
them at once. It repeats the same operations on the same memory, so each batch is copied to where the recorded one lay.
What Python decides in a step is decided when it is recorded: the loop records anew for every shape of batch, and after
every epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

WARM_UP = 3
"""Steps that are run before one is recorded, for each shape: they choose kernels and allocate what lasts."""

Run = Callable[[], Tensor]


class Recorder(Protocol):
    """Runs steps, and records them."""

    def run(self, step: Run) -> Tensor:
        """Run a step as it is, on the way to recording one."""

    def record(self, step: Run) -> tuple[Tensor, Callable[[], None]]:
        """Run a step once; return its loss, and what runs it again and writes into that same tensor."""


class CudaRecorder:
    """Records CUDA graphs, on a stream of its own as they ask for."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def run(self, step: Run) -> Tensor:
        """Run a step on the stream that will record."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            loss = step()
        torch.cuda.current_stream().wait_stream(self._stream)
        return loss

    def record(self, step: Run) -> tuple[Tensor, Callable[[], None]]:
        """Record a step, which runs nothing, and replay it once.

        Raises
        ------
        RuntimeError : the step does what a graph cannot hold, such as waiting for the GPU; says what to set.
        """
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Other threads of the process, such as Ray's, may do as they like meanwhile.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                loss = step()
            except BaseException as e:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise RuntimeError(f"the step cannot be recorded ({e}): set cuda-graphs = false") from e
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph.replay()
        return loss, graph.replay


class Replayed:
    """A training step that is replayed once it is recorded.

    Parameters
    ----------
    step : takes a batch as tensors, runs it and returns its loss, (). It does the same operations on the same memory
        for all batches of one shape until `forget` is called, and draws random numbers on the device only.
    recorder : what records; on a GPU a :class:`CudaRecorder`.
    """

    def __init__(self, step: Callable[..., Tensor], recorder: Recorder) -> None:
        self._step, self._recorder = step, recorder
        self._warm: dict[tuple[torch.Size, ...], int] = {}
        self._recorded: dict[tuple[torch.Size, ...], tuple[list[Tensor], Tensor, Callable[[], None]]] = {}

    def __call__(self, *batch: Tensor) -> Tensor:
        """Run a step and return its loss, which the next one overwrites."""
        shapes = tuple(t.shape for t in batch)
        if shapes in self._recorded:
            place, loss, replay = self._recorded[shapes]
            for there, here in zip(place, batch, strict=True):
                there.copy_(here)
            replay()
        elif self._warm.setdefault(shapes, 0) < WARM_UP:
            self._warm[shapes] += 1
            loss = self._recorder.run(lambda: self._step(*batch))
        else:
            place = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t) for t in batch]
            loss, replay = self._recorder.record(lambda: self._step(*place))
            self._recorded[shapes] = place, loss, replay
        return loss

    def forget(self) -> None:
        """Record anew from here on."""
        self._recorded.clear()
