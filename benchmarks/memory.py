"""Peak memory of a tree of processes; shared pages count once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator

import psutil


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


def trees(pids: Iterable[int]) -> Iterator[psutil.Process]:
    """Yield processes and all of their descendants; skip those that no longer exist."""
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(pid)
            yield from [root, *root.children(recursive=True)]
