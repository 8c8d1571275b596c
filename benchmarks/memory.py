"""Peak memory of a tree of processes (shared pages count once), and of one call in a separate process."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor

import psutil

from fedapp.process import peak_memory, reset_peak


class Watch:
    """Samples the memory of processes while its block runs.

    Attributes
    ----------
    peak : largest sum over the processes, in bytes, of the proportional set size, so that shared pages count once.
    """

    def __init__(self, processes: Callable[[], Iterable[psutil.Process]], interval: float = 0.5) -> None:
        self.peak = 0
        self._processes, self._interval = processes, interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._stop.wait(self._interval):
            total = 0
            for process in self._processes():
                with contextlib.suppress(psutil.Error):
                    total += process.memory_full_info().pss
            self.peak = max(self.peak, total)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def _measure(prepare: Callable[[], Callable[[], object]]) -> int:
    work = prepare()
    reset_peak()
    before = peak_memory()
    work()
    return peak_memory() - before


def peak_of(prepare: Callable[[], Callable[[], object]]) -> int:
    """Return the bytes by which the peak memory of a new process grows when it calls what `prepare` returns.

    `prepare` makes the inputs, whose memory does not count. It must be importable by name.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure, prepare).result()


def trees(pids: Iterable[int]) -> Iterator[psutil.Process]:
    """Yield processes and all of their descendants; skip those that no longer exist."""
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(pid)
            yield from [root, *root.children(recursive=True)]
