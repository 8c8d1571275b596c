"""Update what README.md quotes: `python -m tests.readme [DIR]`. DIR is a finished comparison, for the first table."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pandas as pd

from fedapp import registry
from fedapp.results.statistics import DASH

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


def files(text: str) -> str:
    """Fill in quoted files."""

    def put(match: re.Match[str]) -> str:
        body = (ROOT / match["path"]).read_text(encoding="utf-8").rstrip()
        return f"<!-- file:{match['path']} -->\n```python\n{body}\n```\n<!-- /file -->"

    return re.sub(r"<!-- file:(?P<path>\S+) -->.*?<!-- /file -->", put, text, flags=re.S)


def methods_table() -> str:
    """Build the table of methods from the registry."""
    lines = ["| id | method | different architectures | what travels | paper |", "|---|---|---|---|---|"]
    for m in registry.discover().values():
        hetero = "yes" if m.heterogeneous else "no"
        page = f"[`{m.id}`](docs/methods/{m.id}.md)"
        lines.append(f"| {page} | {m.title} | {hetero} | {m.travels} | {m.paper} |")
    return "\n".join(lines)


def demo_table(results: Path) -> str:
    """Build the table of the demonstration from the results.csv of a comparison."""
    table = pd.read_csv(results / "results.csv")
    columns = ["received_last", "trained_last", "received_balanced", "trained_balanced"]
    seeds = table["seed"].nunique()
    lines = [
        "| % after 20 rounds | own received | own trained | balanced received | balanced trained | bytes up |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for label, rows in table.groupby("variant", sort=False):
        cells = [f"{100 * rows[c].mean():.1f} ± {100 * rows[c].std(ddof=1):.1f}" for c in columns]
        method = str(rows["method"].iloc[0])
        if method == "local":  # it receives nothing
            cells = [DASH if c.startswith("received") else cell for c, cell in zip(columns, cells)]
        title = f"{registry.get(method).title} {str(label).removeprefix(method)}".strip()
        lines.append(f"| {title} | {' | '.join(cells)} | {rows['bytes_up'].mean():,.0f} |")
    note = (
        f"Mean ± standard deviation over {seeds} seeds: `fedapp compare fedapp/conf/digits.toml "
        f'--methods "{",".join(dict.fromkeys(table["variant"]))}" --seeds {seeds}`, 2 CPU cores; `make run` shows '
        "seed 0 of the first three."
    )
    return "\n".join([*lines, "", note])


def between(text: str, name: str, body: str) -> str:
    """Replace the text between two markers."""
    pattern = rf"<!-- table:{name} -->.*?<!-- /table:{name} -->"
    return re.sub(pattern, lambda _: f"<!-- table:{name} -->\n{body}\n<!-- /table:{name} -->", text, flags=re.S)


def renewed(text: str, results: Path | None = None) -> str:
    """Return the README with every quotation up to date."""
    text = between(files(text), "methods", methods_table())
    return between(text, "demo", demo_table(results)) if results else text


if __name__ == "__main__":
    README.write_text(
        renewed(README.read_text(encoding="utf-8"), Path(sys.argv[1]) if len(sys.argv) > 1 else None), encoding="utf-8"
    )
