"""Write measurements to `docs/performance.json` and to the tables of `docs/performance.md`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.machine import Speeds
from benchmarks.pages import markdown, replaced
from benchmarks.server import FORMS, Found
from benchmarks.timing import Times

ORDER = (
    "A round of federated learning", "Clients per second on a GPU", "Overhead of a round", "The server's mathematics",
    "Machine",
)  # fmt: skip
"""Titles of the measured tables of performance.md, in their order."""
EMPTY = "# Performance\n\n" + "\n\n".join(f"<!-- table:{n} -->\n<!-- /table:{n} -->" for n in ("targets", "benchmark"))


TARGETS = [
    ("fedavg_vs_reference_fp32", "FedAvg: reference loop over the app, fp32", "at least", 2.2),
    ("fedavg_vs_reference_bf16", "FedAvg: reference loop (fp32) over the app in bf16", "at least", 3.0),
    ("cwfedavg_vs_reference_fp32", "cwFedAvg, all layers: reference loop over the app, fp32", "at least", 2.2),
    ("fedavg_over_floor", "FedAvg: the app over the bare floor", "at most", 1.10),
    ("overhead_20x4mb_seconds", "seconds a round, 20 clients, 4 MB each way", "at most", 0.6),
    ("overhead_1000_sample_100_seconds", "seconds a round, 100 of 1,000 clients, 20 KB", "at most", 1.0),
    ("cwfedavg_server_vs_naive_k100", "cwFedAvg's server step, M = K = 100, all layers", "at least", 10),
    ("ccvr_statistics_vs_numpy", "CCVR's statistics over NumPy's, K = 10", "at least", 1.4),
    ("ccvr_merging_vs_numpy", "CCVR's merging over NumPy's, M = 100", "at least", 2.5),
    ("ccvr_sampling_vs_numpy", "CCVR's sampling over NumPy's, K = 10", "at least", 4),
    ("average_over_floor", "averages over the memory floor, 20 x 45 MB", "at most", 1.5),
]
"""Figures of performance.json, in words, and the bounds that they are to reach: ratios or seconds."""


RATIOS = {
    "fedavg_vs_reference_fp32": ("reference_fedavg", "fedavg"),
    "fedavg_vs_reference_bf16": ("reference_fedavg", "fedavg_bf16"),
    "cwfedavg_vs_reference_fp32": ("reference_cwfedavg", "cwfedavg"),
    "fedavg_over_floor": ("fedavg", "floor"),
}
"""The alternatives that are compared, the slower first."""


def round_figures(times: Times) -> dict[str, float]:
    """Return the ratios and seconds of benchmark (a)."""
    return {
        **{key: times.ratio(slow, fast) for key, (slow, fast) in RATIOS.items() if fast in times.seconds},
        **{f"{name}_round_seconds": times.median(name) for name in times.seconds},
    }


def server_figures(found: list[Found]) -> dict[str, float]:
    """Return the ratios of benchmark (c)."""
    figures = {f.row.key: f.speedup for f in found if f.row.key}
    figures |= {f.row.key.replace("_vs_naive", "_over_floor"): f.over for f in found if f.row.key.startswith("average")}
    return figures


def _mb(value: float | None) -> str:
    return "-" if not value else f"{value / 1e6:,.0f}"


def _spread(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def targets_table(figures: Mapping[str, float]) -> list[str]:
    """Return the table of targets and measured figures."""
    rows = []
    for key, text, side, bound in TARGETS:
        if (value := figures.get(key)) is not None:
            # Two digits of the value, or three where rounding would hide the verdict.
            met, rounded = (v >= bound if side == "at least" else v <= bound for v in (value, round(value, 2)))
            shown = f"{value:.{2 if rounded == met else 3}f}"
            rows.append((f"{text} (`{key}`)", f"{side} {bound:g}", shown, "reached" if met else "not reached"))
    return markdown("figure|target:|measured:|", rows)


NAMES = {
    "reference_fedavg": "reference loop, FedAvg",
    "fedavg": "app, FedAvg",
    "floor": "bare floor",
    "fedavg_bf16": "app, FedAvg, bf16",
    "reference_cwfedavg": "reference loop, cwFedAvg",
    "cwfedavg": "app, cwFedAvg, all layers",
}


def rounds_table(times: Times, peaks: Mapping[str, int]) -> list[str]:
    """Return the tables of seconds per round and of ratios."""
    seconds = [
        (name, f"{times.median(key):.2f}", _spread(times.seconds[key]), len(times.seconds[key]), _mb(peaks.get(key)))
        for key, name in NAMES.items()
        if key in times.seconds
    ]
    ratios = [
        (f"{NAMES[slow]} / {NAMES[fast]}", f"{times.ratio(slow, fast):.2f}", _spread(times.ratios(slow, fast)))
        for slow, fast in RATIOS.values()
        if fast in times.seconds
    ]
    return [
        *markdown("|seconds a round:|min to max:|turns:|peak memory, MB:", seconds), "",
        *markdown("ratio|median over turns:|min to max:", ratios),
    ]  # fmt: skip


def overhead_table(rounds: Mapping[str, list[float]], peaks: Mapping[str, int]) -> list[str]:
    """Return the table of seconds per round and memory by payload and number of clients."""
    return markdown(
        "case|seconds a round, median:|min to max:|rounds:|peak MB:",
        [(f"`{k}`", f"{statistics.median(v):.2f}", _spread(v), len(v), _mb(peaks[k])) for k, v in rounds.items()],
    )


def server_table(found: list[Found]) -> list[str]:
    """Return the table of the server's computations."""
    return markdown(
        "computation|size|threads:|naive ms:|ours ms:|naive/ours:|ours/floor:|error:|MB naive:|ours:",
        [
            (
                f.row.name, f.row.sizes, f.threads, *(f"{1e3 * f.times.median(n):,.1f}" for n in FORMS),
                f"{f.speedup:.2f}", f"{f.over:.2f}", "random" if f.error is None else f"{f.error:.0e}",
                *(_mb(f.memory.get(n)) for n in FORMS),
            )
            for f in found
        ],
    )  # fmt: skip


def gpu_table(found: Mapping[int, list[float]]) -> list[str]:
    """Return the table of clients per second on a GPU."""
    return markdown(
        "processes on the GPU:|clients per second:|min to max:",
        [(workers, f"{statistics.median(rates):.2f}", _spread(rates)) for workers, rates in found.items()],
    )


def machine_text(machine: Mapping[str, Any], speeds: Iterable[Speeds]) -> str:
    """Describe the machine in one paragraph."""
    measured = "; ".join(f"with {s.threads} thread{'s' if s.threads > 1 else ''} {s}" for s in speeds)
    return (
        f"{machine['cores']} cores of {machine['processor']}, {machine['memory_gib']} GiB, GPU: {machine['gpu']}, "
        f"{machine['system']}; Python {machine['python']}, torch {machine['torch']}, numpy {machine['numpy']}, BLAS of "
        f"NumPy and SciPy {machine['blas']}, flwr {machine['flwr']}, ray {machine['ray']}. Measured speeds: {measured}."
    )


def page(text: str, known: Mapping[str, Any]) -> str:
    """Return performance.md with the tables that the figures and `tables` of performance.json give."""
    tables: Mapping[str, list[str]] = known["tables"]
    ordered = [title for title in ORDER if title in tables]
    lines = "\n\n".join("\n".join([f"### {title}", "", *tables[title]]) for title in ordered)
    return replaced(replaced(text, "targets", targets_table(known)), "benchmark", [lines])


def write(folder: Path, figures: Mapping[str, Any], sections: Mapping[str, list[str]]) -> None:
    """Update the figures and tables of performance.json, and performance.md, which is made if missing.

    Figures and sections that were not measured this time stay. The table of targets covers all figures.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store, place = folder / "performance.json", folder / "performance.md"
    known = json.loads(store.read_text(encoding="utf-8")) if store.is_file() else {}
    known |= {**figures, "tables": {**known.get("tables", {}), **sections}}
    store.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    text = place.read_text(encoding="utf-8") if place.is_file() else EMPTY
    place.write_text(page(text, known), encoding="utf-8")
