"""Recompute each interval of docs/reproduction.md from the runs of the ledger, with NumPy and SciPy alone.

`python reproduction/check_intervals.py` prints every interval that differs from the page, and how many agree. It shares
no code with fedapp. See docs/reproduction.md for the rules.
"""

import json
import re
import tomllib
from pathlib import Path

import numpy as np
from scipy import stats

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "reproduction" / "ledger"


def runs(pair):
    """Return the runs of `study/variant`, seed by seed."""
    study, variant = pair.split("/")
    lines = [json.loads(line) for line in (FOLDER / "runs" / f"{study}.jsonl").read_text().splitlines()[1:]]
    return sorted((run for run in lines if run["variant"] == variant), key=lambda run: run["seed"])


def column(run, name):
    """Return a column of the final scores (K,); a single value is that of all clients."""
    return np.broadcast_to(run["final"][name], len(run["final"]["client"]))


def accuracies(run, score):
    """Return the accuracy of each client (K,)."""
    return column(run, f"{score}_correct") / column(run, f"{score}_total")


def number(run, measure):
    """Return one number of a run: an accuracy around calibration, the mean over clients, or their spread."""
    if measure in ("before", "after", "oracle"):
        return run["summary"]["calibration"][measure]
    values = accuracies(run, measure.split()[0])
    return values.std() if "spread" in measure else values.mean()


def rounds_to(run, target):
    """Return the completed rounds until the mean after local training is first at the target."""
    curve = [*run["rounds"]["trained_accuracy"], accuracies(run, "trained").mean()]
    return next((i for i, value in enumerate(curve) if value >= target), len(curve))


def difference(test):
    """Return the difference of each seed (n,), the runs behind it, and the factor to the unit of the page."""
    if test["rule"] == "fewer rounds":
        few, more = runs(test["fewer"]), runs(test["more"])
        target = np.mean([accuracies(run, "trained").mean() for run in runs(test["level_of"])]) - 0.01
        return np.array([rounds_to(m, target) - rounds_to(f, target) for f, m in zip(few, more)]), [], 1
    score = test.get("protocol")
    pairs = [test.get("better") or test.get("first"), test.get("worse") or test.get("second")]
    sides = [[(pair, score)] for pair in pairs]
    if score is None:
        sides = [[text.split(" ", 1) for text in test[side]] for side in ("larger", "smaller")]
    found = [[(runs(pair), measure) for pair, measure in side] for side in sides]
    n = min(len(members) for side in found for members, _ in side)
    values = [[np.array([number(run, m) for run in members[:n]]) for members, m in side] for side in found]
    first, second = (side[0] - side[1] if len(side) > 1 else side[0] for side in values)
    return first - second, [run for side in found for members, _ in side for run in members[:n]], 100


def interval(test):
    """Return the interval of a test as the page writes it."""
    d, used, factor = difference(test)
    totals = [column(run, "trained_total") for run in used]
    step = max((1 / (len(t) * np.median(t)) for t in totals), default=1.0)
    level = 0.022 if len(d) > 3 else 0.05
    tail = level if "margin" in test else level / 2
    half = stats.t.ppf(1 - tail, len(d) - 1) * np.sqrt(max(d.var(ddof=1), step**2 / 12) / len(d))
    return f"{factor * (d.mean() - half):+.1f} to {factor * (d.mean() + half):+.1f}"


def main():
    """Compare all intervals with the page; return how many differ and how many agree."""
    page, wrong, right = (ROOT / "docs" / "reproduction.md").read_text(), 0, 0
    for claim in tomllib.loads((FOLDER / "claims.toml").read_text())["claim"]:
        row = re.search(rf"^\| \*\*{claim['id']}\*\*.*$", page, re.M)[0]
        for test in claim["tests"]:
            if "bytes" not in test["rule"]:
                agrees = interval(test) in row
                right, wrong = right + agrees, wrong + (not agrees)
                if not agrees:
                    print(claim["id"], interval(test), "is not in", row)
    print(f"{right} intervals agree, {wrong} differ")
    return wrong, right


if __name__ == "__main__":
    raise SystemExit(main()[0])
