"""Many runs on the local engine, as many at a time as there are cores: one process per run, one thread per process.

Runs on different cores do not slow each other down as threads within one run would. Each gives the numbers that it
would give alone: the number of threads decides the last bits, and it is fixed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedapp import config as configuration
from fedapp import process
from fedapp.config import RunConfig
from fedapp.engines import local as engines
from fedapp.engines.resources import usable_cores
from fedapp.errors import plain, raised
from fedapp.results.terminal import echo


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended: its directory, and the error's message if it failed."""

    out: Path
    error: str | None


def _run(flat: dict[str, object]) -> FinishedRun:
    config = configuration.from_flat(flat)
    out = Path(config.storage.out)
    failed: list[Mapping[str, Any]] = []

    def note_event(event: Mapping[str, Any]) -> None:
        if event["kind"] == "failed":
            failed.append(event)
        elif event["kind"] == "warning" and "tracker" in event:
            echo(f"fedapp: {plain(event['text'])}", err=True, must=True)

    try:
        engines.run_local(config, note_event)
    except Exception as e:
        echo(plain("".join(event["traceback"] for event in failed)), err=True, nl=False, must=True)
        return FinishedRun(out, raised(e))
    return FinishedRun(out, None)


def begin_worker() -> None:
    """Leave Ctrl-C to the parent, which ends the pool, and end with the parent, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait until a worker is there; one that starts after the end of the pool shows an error."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[object] = []
    before = signal.signal(signal.SIGINT, lambda *signalled: came.append(signalled))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


@contextmanager
def started(
    workers: int, configs: Iterable[Mapping[str, Any]], initializer: Callable[..., None], initargs: tuple[Any, ...] = ()
) -> Iterator[ProcessPoolExecutor]:
    """Start a pool of processes with one thread each for flat run-configs; they end at once if the block fails."""
    with process.environment(OMP_NUM_THREADS="1"):  # the workers inherit it
        pool = ProcessPoolExecutor(
            workers, mp_context=process.new_processes(configs), initializer=initializer, initargs=initargs
        )
        try:
            yield pool
        except BaseException:
            _end(pool)
            raise
        pool.shutdown()


def _end(pool: ProcessPoolExecutor) -> None:
    """End the workers of a pool at once."""
    for worker in list((pool._processes or {}).values()):
        worker.terminate()
    pool.shutdown(wait=False, cancel_futures=True)


def run_all(
    configs: Sequence[RunConfig],
    workers: int | None = None,
    on_end: Callable[[FinishedRun], None] = lambda ended: None,
    deadline: Callable[[], bool] = lambda: False,
) -> list[FinishedRun]:
    """Run prepared configurations; later ones start as earlier ones end.

    Parameters
    ----------
    workers : processes at a time, default one per core.
    on_end : called in this process as each run ends.
    deadline : asked before each start; True starts no more runs, and those at work are finished.

    Returns
    -------
    The runs that were started, in the order of their ends.
    """
    workers = min(workers or usable_cores(), max(1, len(configs)))
    ended: list[FinishedRun] = []
    queue = list(configs)
    with started(workers, (c.to_flat() for c in configs), begin_worker) as pool:
        running: set[Future[FinishedRun]] = set()
        while queue or running:
            while queue and len(running) < workers and not deadline():
                with uninterrupted():
                    running.add(pool.submit(_run, queue.pop(0).to_flat()))
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                ended.append(future.result())
                on_end(ended[-1])
    return ended
