"""Recompute each interval of docs/reproduction.md from the runs of the ledger, without fedapp.

`python reproduction/check_intervals.py` prints every interval that differs from the page, and how many agree.
"""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

ROOT = Path(__file__).parent.parent
LEDGER = ROOT / "reproduction" / "ledger"


def runs(pair: str) -> list[Any]:
    """Return the runs of `study/variant`, seed by seed."""
    study, variant = pair.split("/")
    lines = [json.loads(line) for line in (LEDGER / "runs" / f"{study}.jsonl").read_text().splitlines()[1:]]
    return sorted((run for run in lines if run["variant"] == variant), key=lambda run: run["seed"])


def column(run: Any, name: str) -> Any:
    """Return a column of the final scores (K,); a single value is that of all clients."""
    return np.broadcast_to(run["final"][name], len(run["final"]["client"]))


def number(run: Any, measure: str) -> float:
    """Return one number of a run: a mean over clients, their spread, or an accuracy around calibration."""
    if measure in ("before", "after", "oracle"):
        return float(run["summary"]["calibration"][measure])
    score, *spread = measure.split()
    accuracies = column(run, f"{score}_correct") / column(run, f"{score}_total")
    return float(accuracies.std() if spread else accuracies.mean())


def rounds_to(run: Any, target: float) -> int:
    """Return the completed rounds until the mean after local training is first at the target."""
    curve = [*run["rounds"]["trained_accuracy"], number(run, "trained")]
    return next((i for i, value in enumerate(curve) if value >= target), len(curve))


def differences(test: Any) -> tuple[Any, list[Any], int]:
    """Return the difference of each seed (n,), the runs behind them, and the factor to the unit of the page."""
    if test["rule"] == "fewer rounds":
        target = float(np.mean([number(run, "trained") for run in runs(test["level_of"])])) - 0.01
        pairs = zip(runs(test["fewer"]), runs(test["more"]))
        return np.array([rounds_to(more, target) - rounds_to(few, target) for few, more in pairs]), [], 1
    names = [name for name in ("better", "worse", "first", "second", "larger", "smaller") if name in test]
    sides = [[text.split(" ", 1) for text in test[name]] for name in names] if "larger" in test else None
    sides = sides or [[[test[name], test["protocol"]]] for name in names]
    found = [[(runs(pair), measure) for pair, measure in side] for side in sides]
    n = min(len(members) for side in found for members, _ in side)
    values = [[np.array([number(run, m) for run in members[:n]]) for members, m in side] for side in found]
    first, second = (side[0] - side[1] if len(side) > 1 else side[0] for side in values)
    return first - second, [run for side in found for members, _ in side for run in members[:n]], 100


def interval(test: Any) -> str:
    """Return the interval of a test as the page writes it."""
    d, used, factor = differences(test)
    totals = [column(run, "trained_total") for run in used]
    step = max((1 / (len(t) * np.median(t)) for t in totals), default=1.0)
    level = 0.022 if len(d) > 3 else 0.05
    quantile = stats.t.ppf(1 - (level if "margin" in test else level / 2), len(d) - 1)
    half = quantile * np.sqrt(max(d.var(ddof=1), step**2 / 12) / len(d))
    return f"{factor * (d.mean() - half):+.1f} to {factor * (d.mean() + half):+.1f}"


def main() -> tuple[int, int]:
    """Return how many intervals differ from the page, and how many agree."""
    page, agreed = (ROOT / "docs" / "reproduction.md").read_text(), []
    for claim in tomllib.loads((LEDGER / "claims.toml").read_text())["claim"]:
        row = next(line for line in page.splitlines() if re.match(rf"\| \*\*{claim['id']}\*\*", line))
        agreed += [(interval(t) in row, claim["id"], interval(t)) for t in claim["tests"] if "bytes" not in t["rule"]]
    print(*(f"{name}: {text} is not on the page" for same, name, text in agreed if not same), sep="\n")
    return sum(not same for same, *_ in agreed), sum(same for same, *_ in agreed)


if __name__ == "__main__":
    print("{} intervals differ, {} agree".format(*main()))
