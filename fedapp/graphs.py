"""Training steps that are recorded once as a CUDA graph and then replayed.

A step of a small model is dozens of kernels, each of which takes longer to launch than to run; a graph launches all of
them at once. It repeats the same operations on the same memory, so each batch is copied to where the recorded one lay.
What Python decides in a step is decided when it is recorded: the loop records anew for every shape of batch, and after
every epoch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

WARM_UP = 3
"""Steps of each shape that are run before one is recorded: they choose kernels and allocate what lasts."""

Run = Callable[[], Tensor]


class Recorder(Protocol):
    """Runs steps, and records them."""

    def run(self, step: Run) -> Tensor:
        """Run a step as it is, on the way to recording one."""

    def record(self, step: Run) -> tuple[Tensor, Callable[[], None]]:
        """Run a step once; return its loss, and what runs it again and writes into that same tensor."""

    def wait(self) -> None:
        """Wait until all that was begun has ended."""


class CudaRecorder:
    """Records CUDA graphs; one a process, so that all recordings share one stream and one pool of memory.

    What a graph uses is free for the next one as soon as it is dropped. That is safe because steps follow each other
    on one stream, and none reads what another one left but parameters and optimizer state, which lie outside.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.MemPool()
        # Adam says so of every step that is run before one is recorded.
        warnings.filterwarnings("ignore", "This instance was constructed with capturable=True")

    def run(self, step: Run) -> Tensor:
        """Run a step on the stream that will record."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            loss = step()
        torch.cuda.current_stream().wait_stream(self._stream)
        return loss

    def record(self, step: Run) -> tuple[Tensor, Callable[[], None]]:
        """Record a step without running it, then replay it once.

        Raises
        ------
        RuntimeError : the step does what a graph cannot hold, such as waiting for the GPU; says what to set.
        OutOfMemoryError : as in a step that is run.
        """
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            try:
                # Other threads of the process, such as Ray's, may do as they like meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    loss = step()
                except BaseException:
                    with suppress(RuntimeError):  # the recording is of no use any more, and says so
                        graph.capture_end()
                    raise
                graph.capture_end()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as e:
                raise RuntimeError(f"the step cannot be recorded ({e}): set cuda-graphs = false") from e
        torch.cuda.current_stream().wait_stream(self._stream)
        graph.replay()
        return loss, graph.replay

    def wait(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize()


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
        """Run a step and return its loss, which the next one overwrites.

        Batches of one shape must agree in strides and types too.
        """
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
        """Record anew from here on, after one more step of each shape that is run: Python may decide otherwise now."""
        self._recorder.wait()
        self._recorded.clear()
        self._warm = {shapes: min(count, WARM_UP - 1) for shapes, count in self._warm.items()}
