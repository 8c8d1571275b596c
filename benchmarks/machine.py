"""The machine of the measurements, and its speeds: of memory and of matrix products."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import psutil
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from benchmarks.timing import alternate
from fedapp.core.products import matmul
from fedapp.engines.resources import usable_cores
from fedapp.process import processor
from fedapp.tasks.simulated import bf16_works

BLAS_VARIABLES = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
"""Variables that make OpenBLAS use kernels for another processor, which changes its speed."""


def describe() -> dict[str, Any]:
    """Return processor, cores, memory and versions, for the section on the machine."""
    return {
        "processor": processor(),
        "cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "bf16": bf16_works(),
        "blas": _blas(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("flwr", "numpy", "ray", "torch")},
    }


def _blas() -> str:
    """Return versions and kernels of NumPy's and SciPy's BLAS, and the variables that may have selected the kernels."""
    pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    found = {f"{p['internal_api']} {p['version']} ({p.get('architecture', 'kernels unknown')})" for p in pools}
    chosen = [f"{name}={os.environ[name]}" for name in BLAS_VARIABLES if name in os.environ]
    return ", ".join([*sorted(found), *chosen]) or "unknown"


def _median(call: Callable[[], object]) -> float:
    return alternate({"call": call}, repeats=7).median("call")


@dataclass(frozen=True)
class Speeds:
    """Speed of memory in bytes per second, and of float32 and float64 matrix products in operations per second."""

    threads: int
    memory: float
    single: float
    double: float

    def __str__(self) -> str:
        return (
            f"memory {self.memory / 1e9:.0f} GB/s, products {self.single / 1e9:.0f} GFLOP/s in float32 and "
            f"{self.double / 1e9:.0f} in float64"
        )


def speeds(threads: int, small: bool = False) -> Speeds:
    """Measure the speeds with a number of threads.

    Memory is read by a sum over 256 MiB, which fit in no cache. For products the fastest of several forms counts.
    """
    torch.set_num_threads(threads)
    size, n = (1 << 20, 64) if small else (1 << 28, 1024)
    block = torch.from_numpy(np.ones(size // 4, dtype=np.float32))
    products = []
    with threadpool_limits(threads, user_api="blas"):
        for dtype in (torch.float32, torch.float64):
            a, b = torch.ones(n, n, dtype=dtype), torch.ones(n, n, dtype=dtype)
            ways = [partial(torch.mm, a, b), partial(np.matmul, a.numpy(), b.numpy())]
            if dtype == torch.float32:
                ways.append(partial(matmul, a, b))
            products.append(2 * n**3 / min(_median(way) for way in ways))
    return Speeds(threads, size / _median(block.sum), *products)
