"""Peak memory: of a tree of processes (shared pages counted once), and of one call in a process of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import psutil

from fedapp.process import high_water, peak_memory, reset_peak


class Watch:
    """Samples the memory of processes until told to stop.

    Attributes
    ----------
    peak : largest sum over the processes, in bytes: proportional set size, so that shared pages count once.
    """

    def __init__(self, roots: Callable[[], list[psutil.Process]], interval: float) -> None:
        self.peak = 0
        self._roots, self._interval = roots, interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._stop.wait(self._interval):
            total = 0
            for process in self._roots():
                with contextlib.suppress(psutil.Error):
                    total += process.memory_full_info().pss
            self.peak = max(self.peak, total)


@contextlib.contextmanager
def watching(roots: Callable[[], list[psutil.Process]], interval: float = 0.5) -> Iterator[Watch]:
    """Watch processes while the block runs."""
    watch = Watch(roots, interval)
    watch._thread.start()
    try:
        yield watch
    finally:
        watch._stop.set()
        watch._thread.join()


def _measure(call: Callable[[], Callable[[], object]], pipe: Any) -> None:
    work = call()
    reset_peak()
    before = peak_memory()
    work()
    pipe.send(peak_memory() - before)


def peak_of(prepare: Callable[[], Callable[[], object]]) -> int:
    """Bytes by which the peak memory of a new process grows when it runs what `prepare` returns.

    `prepare` makes the inputs, which do not count; it must be importable by name.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    worker = context.Process(target=_measure, args=(prepare, there))
    worker.start()
    there.close()
    try:
        grown = int(here.recv())
    finally:
        worker.join()
    return grown


def peaks(processes: Iterable[psutil.Process]) -> int:
    """Sum of the peaks of processes since they began, in bytes: cheap, but pages that they share count in each."""
    return sum(high_water(process.pid) or 0 for process in processes)


def tree(pid: int) -> list[psutil.Process]:
    """A process and all that descend from it."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []
