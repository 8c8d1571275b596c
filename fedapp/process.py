"""The process of a client or server: threads, heap, device, memory, and advice when memory runs out."""

from __future__ import annotations

import ctypes
import errno
import functools
import multiprocessing
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from threadpoolctl import threadpool_limits

from fedapp.errors import BadRequest
from fedapp.lazy import torch

FEWER = "in a simulation let fewer clients work at a time (--client-cpus 2 or more)"
FEWER_ON_GPU = "in a simulation let fewer clients share a GPU (a larger --client-gpus, such as 0.5)"

_simulated = False


@contextmanager
def simulation(inside: bool = True) -> Iterator[None]:
    """Mark what runs in this block as a simulation in this process."""
    global _simulated
    before, _simulated = _simulated, inside
    try:
        yield
    finally:
        _simulated = before


def real_node() -> bool:
    """Return whether a client that runs now is a real node's: not in this process's simulation, nor in a worker of Ray.

    The process itself says so, and no message of a server: a real node looks after its own files, data and code.
    """
    ray = sys.modules.get("ray")
    return not (_simulated or (ray is not None and ray.is_initialized()))


def worker() -> bool:
    """Return whether a client that runs now is in a worker of Ray, apart from the server of the same simulation."""
    return not (_simulated or real_node())


class _Apart(SpawnProcess):
    """A new process that does not run the user's script again to have its `__main__`."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")  # without a file, so that no process runs one again
        try:
            return SpawnProcess._Popen(process_obj)
        finally:
            sys.modules["__main__"] = main


class _ApartContext(SpawnContext):
    Process = _Apart


def uses_main(configs: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether one of these flat run-configs names own code of `__main__`, the script that the user has started.

    A new process has that code only if it runs the script again, which therefore needs a guard.
    """
    return any("__main__:" in value for flat in configs for value in flat.values() if isinstance(value, str))


def check_main(configs: Iterable[Mapping[str, Any]], on_ray: bool) -> None:
    """Refuse own code of `__main__` that a new process cannot load: that of a notebook, or any on Ray.

    Raises
    ------
    BadRequest : says to put the code into a file.
    """
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    module = getattr(main, "__spec__", None) is not None  # of python -m
    if uses_main(configs) and (on_ray or not (module or (file and Path(file).is_file()))):
        why = (
            "workers of Ray cannot load it" if on_ray else "other processes cannot load it from a notebook or a prompt"
        )
        raise BadRequest(
            f"own code of __main__: {why}. Write it to a file, such as net.py in the current folder (in a notebook "
            "with %%writefile net.py), and name it net:Net"
        )


def new_processes(configs: Iterable[Mapping[str, Any]]) -> SpawnContext:
    """Return the context in which processes for these flat run-configs start, without a guard in the user's script."""
    return multiprocessing.get_context("spawn") if uses_main(configs) else _ApartContext()


@functools.cache
def keep_heap() -> bool:
    """Make glibc keep freed blocks; otherwise the kernel takes them back and each step pays for the page faults.

    This works on Linux with glibc; elsewhere it does nothing. The price is that the process does not shrink.

    Returns
    -------
    Whether glibc accepted the setting.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        libc = ctypes.CDLL("libc.so.6")
        m_trim_threshold, m_mmap_max = -1, -4
        return bool(libc.mallopt(m_mmap_max, 0)) and bool(libc.mallopt(m_trim_threshold, 2**31 - 1))
    except (OSError, AttributeError):
        return False


@functools.cache
def quiet_blas() -> None:
    """Limit NumPy's and SciPy's BLAS to one thread.

    Its threads spin while they wait. They slow each other and those of PyTorch down: CCVR's statistics took 2.5 times
    as long with two threads each, and a head on features of 100 clients twice the processor time.
    """
    threadpool_limits(1, user_api="blas")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # SciPy has a BLAS of its own, which is loaded later


def cpu_facts() -> dict[str, str]:
    """Return what Linux says of the processor, such as `model name` and `flags`; nothing elsewhere."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    return {}


def processor() -> str:
    """Return the processor's name, on Linux with family and model, which tell virtual ones apart."""
    facts = cpu_facts()
    if "model name" in facts:
        return f"{facts['model name']} (family {facts.get('cpu family')}, model {facts.get('model')})"
    return platform.processor() or "unknown processor"


def prepare(threads: int) -> None:
    """Set the number of threads of this process, which affects the last bits of every sum, and keep its heap."""
    keep_heap()
    quiet_blas()
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set environment variables inside the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def device() -> torch.device:
    """Return the device to train on: the GPU if this process sees one, else the CPU."""
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")


def hand_over(x: torch.Tensor, to: torch.device) -> torch.Tensor:
    """Copy a tensor of the host, such as random draws, to the training device without waiting for a GPU.

    A copy from ordinary memory waits until the GPU has finished all earlier work; a copy from pinned memory does not.
    Pinning a new block may wait too, but PyTorch keeps the blocks, so that happens in the first epochs only.
    """
    if x.device.type != "cpu" or to.type == "cpu":
        return x.to(to)
    return x.pin_memory().to(to, non_blocking=True)


def reset_peak() -> None:
    """Make :func:`peak_memory` count from now on, if the system supports it (Linux)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def high_water(pid: int | str) -> int | None:
    """Return the peak of a process's main memory in bytes, or None if the system does not report it."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))
    return None


def peak_memory() -> int:
    """Return the peak of this process's main memory in bytes, libraries and mapped files included.

    On Linux the peak since :func:`reset_peak`, elsewhere the peak since the start of the process.
    """
    if (peak := high_water("self")) is not None:
        return peak
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(most if sys.platform == "darwin" else 1024 * most)


def out_of_memory(error: BaseException) -> str | None:
    """Return one sentence on what to change if `error` means that memory ran out; None for every other error.

    PyTorch has an error class only for GPU memory. For main memory it raises a plain RuntimeError, which only its
    message identifies.
    """
    words = str(error).lower()
    plain = isinstance(error, RuntimeError)
    if isinstance(error, torch.OutOfMemoryError) or (
        plain and ("alloc_failed" in words or ("cuda" in words and "out of memory" in words))
    ):
        return f"the GPU's memory ran out: lower batch-size, take a smaller model, or {FEWER_ON_GPU}"
    refused = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    if refused or (plain and any(w in words for w in ("can't allocate memory", "not enough memory", "bad_alloc"))):
        return f"the main memory ran out: lower batch-size, take a smaller model, or {FEWER}"
    return None
