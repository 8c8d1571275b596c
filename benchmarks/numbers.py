"""The numbers of every method, to show that a refactoring changed none of them.

`python -m benchmarks.numbers --write FILE` runs two rounds of every method on the embedded digits. It writes the final
accuracies, the traffic, and a hash of each table. `--against FILE` runs them again and compares. Equal hashes mean
equal bits, apart from the columns that measure time. The last bits depend on the processor and on the versions of the
libraries, so both runs belong on one machine. `docs/numbers.json` is the present state on an AMD EPYC
processor; CHANGELOG says which numbers a version changed.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

from fedapp import registry, run

MIXED = {"model": "digits-a,digits-b,digits-c"}
VARIANTS: dict[str, dict[str, Any]] = {
    "fedavg, half of the clients": {"method": "fedavg", "fraction_train": 0.5, "evaluate_every": 1},
    "fedavg, two classes a client, adam": {"method": "fedavg", "partition": "pathological", "optimizer": "adam"},
    "fedclassavg, preset=paper": {"method": "fedclassavg", "method_args": "preset=paper", "optimizer": "adam"},
    "fedclassavg, preset=authors": {"method": "fedclassavg", "method_args": "preset=authors", "optimizer": "adam"},
    "fedclassavg, share=all": {"method": "fedclassavg", "method_args": "share=all"},
    "cwfedavg, half of the clients": {"method": "cwfedavg", "fraction_train": 0.5},
    "fedgh, half of the clients": {"method": "fedgh", "fraction_train": 0.5, **MIXED},
    "ccvr, base=fedprox, cov=sums": {"method": "ccvr", "method_args": "base=fedprox cov=sums"},
    "ccvr, base=moon, transform=feature": {"method": "ccvr", "method_args": "base=moon transform=feature oracle=true"},
}
"""Runs in addition to each method with its defaults."""


def cases() -> dict[str, dict[str, Any]]:
    """Return the settings of every run by its name."""
    found: dict[str, dict[str, Any]] = {}
    for name, method in registry.discover().items():
        found[name] = {"method": name}
        if method.heterogeneous:
            found[f"{name}, three architectures"] = {"method": name, **MIXED}
    return found | VARIANTS


def digest(path: Path) -> str:
    """Hash a table without the columns that measure time."""
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    text = io.StringIO()
    table[[c for c in table.columns if not c.endswith("seconds")]].to_csv(text, index=False)
    return hashlib.sha256(text.getvalue().encode()).hexdigest()[:16]


def measure(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run one case and return its numbers."""
    result = run(out=folder, **{"clients": 6, "rounds": 2, **settings})
    accuracy = {p: scores["last"] for p, scores in result.summary["accuracy"].items()}
    return {
        "accuracy": accuracy,
        "rounds": digest(folder / "rounds.csv"),
        "clients": digest(folder / "clients.csv"),
        "final": digest(folder / "final.csv"),
        "bytes": [result.summary["bytes_up"], result.summary["bytes_down"]],
    }


def main() -> int:
    """Run all cases; with `--against`, return 1 if any number differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--write", type=Path, help="file to write the numbers to")
    group.add_argument("--against", type=Path, help="file with the numbers to compare with")
    parser.add_argument("--only", default="", help="names of the runs to do, separated by semicolons (default: all)")
    args = parser.parse_args()
    former = json.loads(args.against.read_text(encoding="utf-8")) if args.against else {}
    chosen = {n: s for n, s in cases().items() if not args.only or n in args.only.split(";")}
    numbers: dict[str, Any] = {}
    differ = []
    with tempfile.TemporaryDirectory() as root:
        for i, (name, settings) in enumerate(chosen.items()):
            numbers[name] = measure(settings, Path(root) / str(i))
            state = ""
            if args.against:
                same = former.get(name) == numbers[name]
                state = "same" if same else f"DIFFERS from {former.get(name)}"
                differ += [] if same else [name]
            accuracy = ", ".join(f"{p} {v:.4f}" for p, v in numbers[name]["accuracy"].items() if v is not None)
            print(f"{name}: {accuracy} {numbers[name]['rounds']} {state}".rstrip(), flush=True)
    if args.write:
        lines = [f"{json.dumps(name)}: {json.dumps(found)}" for name, found in numbers.items()]
        args.write.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{len(chosen) - len(differ)} of {len(chosen)} the same" if args.against else f"{len(chosen)} runs")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
