"""The process a client or server runs in: threads, kept heap, device, memory and what to do when it runs out."""

from __future__ import annotations

import ctypes
import errno
import functools
import sys
from contextlib import suppress
from pathlib import Path

import torch
from threadpoolctl import threadpool_limits

FEWER = "in a simulation let fewer clients work at a time (--client-cpus 2 or more)"
FEWER_ON_GPU = "in a simulation let fewer clients share a GPU (a larger --client-gpus, such as 0.5)"


@functools.cache
def keep_heap() -> bool:
    """Ask glibc to keep freed blocks instead of giving them back to the kernel and faulting them in at every step.

    Linux with glibc only, a no-op elsewhere; the price is that the process does not shrink.
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
    """Let NumPy's and SciPy's BLAS work on one thread where PyTorch has several.

    Both pools wait for work by spinning, so that calls in turn slow each other: CCVR's statistics took 2.5 times as
    long with two threads each. What is left to BLAS gives the same bits with any number of threads.
    """
    threadpool_limits(1, user_api="blas")


def prepare(threads: int) -> None:
    """Set the thread count of this process (it decides the last bits of every sum) and keep its heap."""
    keep_heap()
    if threads > 1:
        quiet_blas()
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def device() -> torch.device:
    """Return the device to train on: the GPU that this process may see, else the CPU."""
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")


def hand_over(x: torch.Tensor, to: torch.device) -> torch.Tensor:
    """Return a tensor of the host, such as random draws, on the device to train on, without waiting for a GPU.

    A copy from ordinary memory would wait until the GPU has done all that was asked of it before. From memory that is
    pinned it need not; PyTorch keeps pinned blocks, so that new ones, which may wait too, are made in the first epochs.
    """
    if x.device.type != "cpu" or to.type == "cpu":
        return x.to(to)
    return x.pin_memory().to(to, non_blocking=True)


def reset_peak() -> None:
    """Let :func:`peak_memory` count from now on, where the system can (Linux)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def high_water(pid: int | str) -> int | None:
    """Return the most bytes of main memory that a process has held at a time, or None where the system does not say."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))
    return None


def peak_memory() -> int:
    """Return the most bytes of main memory that this process has held at a time, libraries and mapped files included.

    Counted since :func:`reset_peak` on Linux, elsewhere since the process began.
    """
    if (peak := high_water("self")) is not None:
        return peak
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(most if sys.platform == "darwin" else 1024 * most)


def out_of_memory(error: BaseException) -> str | None:
    """Say in one sentence what to change where `error` means that memory ran out; None for every other error.

    PyTorch has an error class of its own for a GPU's memory only; main memory that cannot be had is a plain
    RuntimeError, which its words tell from others.
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
