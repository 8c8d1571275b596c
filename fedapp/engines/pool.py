"""Many runs on the local engine, as many at a time as there are cores: one process a run, one thread a process.

Runs on different cores do not slow each other down as threads within one run would, and each gives the numbers it would
give alone, since threads decide bits and their number is fixed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedapp import config as configuration
from fedapp.config import RunConfig
from fedapp.engines import local as engines
from fedapp.engines.resources import usable_cores


@dataclass(frozen=True)
class Ended:
    """How one run ended: its directory, and the error's last words if it did not end well."""

    out: Path
    error: str | None


def _one(flat: dict[str, object]) -> Ended:
    config = configuration.from_flat(flat)
    out = Path(config.out)
    try:
        engines.run_local(config)
    except Exception as e:
        traceback.print_exc()
        return Ended(out, f"{type(e).__name__}: {e}")
    return Ended(out, None)


def _quiet() -> None:
    """Leave Ctrl-C to the parent, which ends the pool; and end with the parent, however it ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Worker processes inherit one OpenMP thread each."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("OMP_NUM_THREADS", None)
        else:
            os.environ["OMP_NUM_THREADS"] = before


def run_all(
    configs: Sequence[RunConfig],
    workers: int | None = None,
    on_end: Callable[[Ended], None] = lambda ended: None,
    deadline: Callable[[], bool] = lambda: False,
) -> list[Ended]:
    """Run prepared configurations; later ones start as earlier ones end.

    Parameters
    ----------
    workers : processes at a time, default one a core.
    on_end : called in this process as each run ends.
    deadline : asked before each start; True starts no more (those under way are finished).

    Returns
    -------
    How the runs that were started ended, in the order of their ends.
    """
    workers = min(workers or usable_cores(), max(1, len(configs)))
    ended: list[Ended] = []
    queue = list(configs)
    with _one_thread():
        pool = ProcessPoolExecutor(
            workers, mp_context=multiprocessing.get_context("spawn"), initializer=_quiet, max_tasks_per_child=None
        )
        try:
            running: set[Future[Ended]] = set()
            while queue or running:
                while queue and len(running) < workers and not deadline():
                    running.add(pool.submit(_one, queue.pop(0).to_flat()))
                if not running:
                    break
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    ended.append(future.result())
                    on_end(ended[-1])
        except BaseException:
            for process in list((pool._processes or {}).values()):
                process.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()
    return ended
