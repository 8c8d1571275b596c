"""Settings of the process a client or server runs in: threads, kept heap, device."""

from __future__ import annotations

import ctypes
import functools
import sys

import torch


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


def prepare(threads: int) -> None:
    """Set the thread count of this process (it decides the last bits of every sum) and keep its heap."""
    keep_heap()
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def device() -> torch.device:
    """Return the device to train on: the GPU that this process may see, else the CPU."""
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
