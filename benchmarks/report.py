"""Write measurements to `docs/performance.json` and to the tables of `docs/performance.md`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import Speeds
from benchmarks.pages import markdown, replaced
from benchmarks.server import Found
from benchmarks.timing import Times

EMPTY = "# Performance\n\n" + "\n\n".join(
    f"<!-- table:{n} -->\n<!-- /table:{n} -->" for n in ("targets", "machines", "benchmark")
)


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


MACHINES = {"earlier run": "first", "Zen 4": "zen4", "Zen 4, later": "zen4-now", "Intel": "intel"}
"""Other runs, and the ends of their files' names: performance-first.json."""


RATIOS = {
    "fedavg_vs_reference_fp32": ("reference_fedavg", "fedavg"),
    "fedavg_vs_reference_bf16": ("reference_fedavg", "fedavg_bf16"),
    "cwfedavg_vs_reference_fp32": ("reference_cwfedavg", "cwfedavg"),
    "fedavg_over_floor": ("fedavg", "floor"),
}
"""The alternatives that are compared, the slower first."""


def spread(name: str, values: Sequence[float]) -> dict[str, Any]:
    """Return the median of a figure's turns, and their range."""
    return {name: statistics.median(values), f"{name}_range": [min(values), max(values)]}


def round_figures(times: Times) -> dict[str, Any]:
    """Return the ratios and seconds of benchmark (a), with their ranges over turns."""
    found = {key: times.ratios(slow, fast) for key, (slow, fast) in RATIOS.items() if fast in times.seconds}
    found |= {f"{name}_round_seconds": seconds for name, seconds in times.seconds.items()}
    return {name: value for key, values in found.items() for name, value in spread(key, values).items()}


def server_figures(found: list[Found]) -> dict[str, Any]:
    """Return the ratios of benchmark (c), and the rows of its table."""
    figures: dict[str, Any] = {f.row.key: f.speedup for f in found if f.row.key}
    figures |= {f.row.key.replace("_vs_naive", "_over_floor"): f.over for f in found if f.row.key.startswith("average")}
    rows = [
        {"name": f.row.name, "sizes": f.row.sizes, "threads": f.threads, "naive_seconds": f.times.median("naive"),
         "seconds": f.times.median("ours"), "vs_naive": f.speedup, "over_floor": f.over}
        for f in found
    ]  # fmt: skip
    return {**figures, "server": rows}


def _measured(known: Mapping[str, Any], name: str, peak: str) -> tuple[str, str, str]:
    """Return the cells of a figure in seconds: median, range and peak memory in MB."""
    low, high = known[f"{name}_range"]
    return f"{known[name]:.2f}", f"{low:.2f} to {high:.2f}", f"{known[peak] / 1e6:,.0f}" if peak in known else "-"


def _judged(value: float, side: str, bound: float) -> tuple[str, bool]:
    """Return two digits of a value, or three where rounding would hide the verdict, and whether it is reached."""
    met, rounded = (v >= bound if side == "at least" else v <= bound for v in (value, round(value, 2)))
    return f"{value:.{2 if rounded == met else 3}f}", met


def targets_table(figures: Mapping[str, float]) -> list[str]:
    """Return the table of targets and measured figures."""
    rows = []
    for key, text, side, bound in TARGETS:
        if (value := figures.get(key)) is not None:
            shown, met = _judged(value, side, bound)
            rows.append((f"{text} (`{key}`)", f"{side} {bound:g}", shown, "reached" if met else "not reached"))
    return markdown("figure|target:|measured:|", rows)


def machines_table(runs: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the table of the same figures in other runs, one column for each run."""
    rows = [
        (key, f"{side} {bound:g}", *(_judged(run[key], side, bound)[0] if key in run else "" for run in runs.values()))
        for key, _, side, bound in TARGETS
    ]
    return markdown("|".join(["figure", "target:", *(f"{name}:" for name in runs)]), [(f"`{k}`", *r) for k, *r in rows])


NAMES = {
    "reference_fedavg": "reference loop, FedAvg",
    "fedavg": "app, FedAvg",
    "floor": "bare floor",
    "fedavg_bf16": "app, FedAvg, bf16",
    "reference_cwfedavg": "reference loop, cwFedAvg",
    "cwfedavg": "app, cwFedAvg, all layers",
}


def rounds_table(known: Mapping[str, Any]) -> list[str]:
    """Return the tables of seconds per round and of ratios."""
    seconds = [
        (name, *_measured(known, f"{key}_round_seconds", f"{key}_peak_bytes"))
        for key, name in NAMES.items()
        if f"{key}_round_seconds" in known
    ]
    ratios = [
        (f"{NAMES[slow]} / {NAMES[fast]}", *_measured(known, key, "")[:2])
        for key, (slow, fast) in RATIOS.items()
        if key in known
    ]
    return [
        *markdown("|seconds a round:|min to max:|peak memory, MB:", seconds), "",
        *markdown("ratio|median over turns:|min to max:", ratios),
    ]  # fmt: skip


def overhead_table(known: Mapping[str, Any]) -> list[str]:
    """Return the table of seconds per round and memory by payload and number of clients."""
    names = [name for name in known if name.startswith("overhead_") and name.endswith("_seconds")]
    rows = [(f"`{name}`", *_measured(known, name, name.replace("_seconds", "_peak_bytes"))) for name in names]
    return markdown("case|seconds a round, median:|min to max:|peak MB:", rows)


def server_table(known: Mapping[str, Any]) -> list[str]:
    """Return the table of the server's computations."""
    rows = [
        (row["name"], row["sizes"] + (f", {row['threads']} threads" if row["threads"] > 1 else ""),
         *(f"{1e3 * row[name]:,.1f}" for name in ("naive_seconds", "seconds")),
         *(f"{row[name]:.2f}" for name in ("vs_naive", "over_floor")))
        for row in known.get("server", ())
    ]  # fmt: skip
    return markdown("computation|size|naive ms:|ours ms:|naive/ours:|ours/floor:", rows)


def gpu_table(known: Mapping[str, Any]) -> list[str]:
    """Return the table of clients per second on a GPU."""
    prefix = "gpu_clients_per_second_"
    names = [name for name in known if name.startswith(prefix) and not name.endswith("_range")]
    rows = [(name.removeprefix(prefix), *_measured(known, name, "")[:2]) for name in names]
    return markdown("processes on the GPU:|clients per second:|min to max:", rows)


def machine_text(known: Mapping[str, Any]) -> list[str]:
    """Describe the machine in one paragraph."""
    machine, speeds = known["machine"], [Speeds(**speed) for speed in known["speeds"]]
    measured = "; ".join(f"with {s.threads} thread{'s' if s.threads > 1 else ''} {s}" for s in speeds)
    return [
        f"{machine['cores']} cores of {machine['processor']}, {machine['memory_gib']} GiB, GPU: {machine['gpu']}, "
        f"{machine['system']}; Python {machine['python']}, torch {machine['torch']}, numpy {machine['numpy']}, BLAS of "
        f"NumPy and SciPy {machine['blas']}, flwr {machine['flwr']}, ray {machine['ray']}. Measured speeds: {measured}."
    ]


TABLES = {
    "A round of federated learning": rounds_table,
    "Clients per second on a GPU": gpu_table,
    "Overhead of a round": overhead_table,
    "The server's mathematics": server_table,
    "Machine": machine_text,
}
"""Titles of the measured tables of performance.md, in their order."""


def page(text: str, known: Mapping[str, Any], folder: Path) -> str:
    """Return performance.md with the tables that the figures of performance.json give; an empty one has two lines."""
    made = {title: table(known) for title, table in TABLES.items()}
    lines = ["\n".join([f"### {title}", "", *table]) for title, table in made.items() if len(table) != 2]
    files = {name: folder / f"performance-{end}.json" for name, end in MACHINES.items()}
    others = {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.is_file()}
    text = replaced(replaced(text, "targets", targets_table(known)), "machines", machines_table(others))
    return replaced(text, "benchmark", ["\n\n".join(lines)])


def write(folder: Path, figures: Mapping[str, Any]) -> None:
    """Update performance.json, and performance.md, which is made if missing. Figures that were not measured stay."""
    folder.mkdir(parents=True, exist_ok=True)
    store, place = folder / "performance.json", folder / "performance.md"
    known = {**(json.loads(store.read_text(encoding="utf-8")) if store.is_file() else {}), **figures}
    store.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    text = place.read_text(encoding="utf-8") if place.is_file() else EMPTY
    place.write_text(page(text, known, folder), encoding="utf-8")
