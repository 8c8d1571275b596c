"""What the measurements ran on, and its two speeds: of memory and of matrix products."""

from __future__ import annotations

import os
import platform
import statistics
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

CPUINFO = Path("/proc/cpuinfo")


def describe() -> dict[str, Any]:
    """Processor, cores, memory and versions, as they go into the tables' heads."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "bf16": "bf16" in (CPUINFO.read_text(encoding="utf-8") if CPUINFO.is_file() else ""),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("flwr", "numpy", "ray", "torch")},
    }


def _processor() -> str:
    lines = CPUINFO.read_text(encoding="utf-8").splitlines() if CPUINFO.is_file() else []
    facts = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    if not facts:
        return platform.processor()
    return f"{facts.get('model name', '')} (family {facts.get('cpu family')}, model {facts.get('model')})"


def _best(call: Any, repeats: int = 7) -> float:
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def memory_speed(size: int = 1 << 28) -> float:
    """Bytes a second at which all threads read `size` bytes that no cache holds."""
    block = torch.from_numpy(np.ones(size // 4, dtype=np.float32))
    return size / _best(block.sum)


def product_speed(dtype: torch.dtype = torch.float32, n: int = 2048) -> float:
    """Floating-point operations a second of a square matrix product."""
    a, b = torch.ones(n, n, dtype=dtype), torch.ones(n, n, dtype=dtype)
    return 2 * n**3 / _best(lambda: a @ b, 3)
