"""Update the files and tables that docs/ quotes: `python -m tests.readme`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedapp import registry
from fedapp.cli.listing import notes
from fedapp.cli.printing import kind
from fedapp.method import Method
from fedapp.results.statistics import DASH
from fedapp.tasks.node import Node

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
OWN_MODELS = ROOT / "docs" / "own-models.md"
METHODS = tuple(sorted((ROOT / "docs" / "methods").glob("*.md")))
GUIDES = tuple(
    ROOT / "docs" / f"{page}.md" for page in ("own-data", "own-method", "choosing", "deployment", "training")
)
TUTORIALS = tuple(sorted((ROOT / "docs" / "tutorials").glob("*.md")))
QUOTING = (README, OWN_MODELS, *GUIDES, *TUTORIALS, *METHODS)
OPEN = '<div class="keys" markdown>'
"""Begin of a table that narrow screens show as a list (`docs/site.css`)."""
READS = (
    "fedclassavg",
    "fedgh",
    "ccvr",
    "moon",
    "fedncm",
    "fed3r",
    "lda",
    "qda",
    "fedcof",
    "pccvr",
    "fedproto",
    "fedkd",
    "fd",
    "fednh",
    "feduv",
    "fedtgp",
    "fedghg",
    "pfedfda",
    "fedrod",
    "feddbe",
    "fedpac",
    "fedrep",
)
"""Methods that use a model's representations apart from its logits; `tests/test_own_models.py` runs each and looks."""


def files(text: str) -> str:
    """Fill in quoted files."""

    def put(match: re.Match[str]) -> str:
        body = (ROOT / match["path"]).read_text(encoding="utf-8").rstrip()
        return f"<!-- file:{match['path']} -->\n```python\n{body}\n```\n<!-- /file -->"

    return re.sub(r"<!-- file:(?P<path>\S+) -->.*?<!-- /file -->", put, text, flags=re.S)


def methods_table() -> str:
    """Build the table of methods from the registry."""
    lines = ["| id | method | different architectures | exchanged | paper |", "|---|---|---|---|---|"]
    for m in registry.discover().values():
        hetero = "yes" if m.heterogeneous else "no"
        page = f"[`{m.id}`](docs/methods/{m.id}.md)"
        lines.append(f"| {page} | {m.title} | {hetero} | {m.travels} | {m.paper} |")
    return "\n".join(lines)


def needs_table() -> str:
    """Build the table of what each method needs of a model, from what the methods declare."""
    lines = [
        "| method | architectures | common width | reads | one global model | further |",
        "|---|---|---|---|---|---|",
    ]
    for m in registry.discover().values():
        width = "yes" if m.heterogeneous and m.same_width else "any" if m.heterogeneous else "is the same"
        further = [
            "a second model, `small`" if "small" in m.hparams.model_fields else "",
            f"public rows (by default {m.public_share:.0%} of the training rows)" if m.public_share else "",
            "2 augmented views of each batch (`augment`)" if m.defaults.augment != "none" else "",
            "another method, `base`" if "base" in m.hparams.model_fields else "",
        ]
        cells = [
            f"`{m.id}`",
            "may differ" if m.heterogeneous else "one for all",
            width,
            "representations" if m.id in READS else "logits",
            "yes" if m.global_model else "no",
            "; ".join(filter(None, further)) or DASH,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def choosing_table() -> str:
    """Build the table of what each method needs and costs: declared by the method, and counted by `tests.costs`."""
    lines = [
        "| method | exchanged | architectures may differ | one global model | public rows | reveals classes "
        "| up, kB | down, kB | once, kB | passes |",
        "|---|---|---|---|---|---|---:|---:|---:|---:|",
    ]
    for m in registry.discover().values():
        costs = zip(("up", "down", "once", "passes"), notes().get(m.id, {}).get("costs", [0.0] * 4), strict=True)
        least = m.class_threshold(m.hparams())
        classes = "no" if least is None else "yes" + (f", from `{least}` on" if least else "")
        cells = [
            f"`{m.id}`",
            m.travels,
            "yes" if m.heterogeneous else "no",
            "yes" if m.global_model else "no",
            f"{m.public_share:.0%}" if m.public_share else DASH,
            classes,
            *(f"{cost:.1f}" if cost or column != "once" else DASH for column, cost in costs),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def defaults_table() -> str:
    """Build the table of the authors' settings beside ours."""
    lines = ["| method | ours | authors' | why |", "|---|---|---|---|"]
    for name, known in notes().items():
        lines.append(f"| `{name}` | {known.get('ours', DASH)} | {known.get('authors', DASH)} | {known['why']} |")
    return "\n".join(lines)


def node_table() -> str:
    """Build the table of the keys of a node-config."""
    rows = []
    for name, field in Node.model_fields.items():
        keys = (field.title or name.replace("_", "-")).split(", ")
        rows.append(f"| {', '.join(f'`{key}`' for key in keys)} | {field.description} |")
    return "\n".join(["| node-config key | |", "|---|---|", *rows])


def families() -> dict[str, list[Method]]:
    """Return all methods in four groups, by what they declare."""
    found: dict[str, list[Method]] = {}
    for m in registry.discover().values():
        kinds = {
            "Different architectures": m.heterogeneous,
            "A head computed after training": "base" in m.hparams.model_fields,
            "One global model": m.global_model and m.deploy_as == "received",
            "A model for each client": True,
        }
        found.setdefault(next(name for name, fits in kinds.items() if fits), []).append(m)
    return found


def families_list() -> str:
    """Build the list of all methods in these groups."""

    def name(method: Method, group: str) -> str:
        return f"{method.title} (also a global one)" if "each" in group and method.global_model else method.title

    return "\n".join(
        f"- **{group}**: {', '.join(name(m, group) for m in found)}." for group, found in families().items()
    )


def cell(text: str) -> str:
    """Return plain text as a cell of a table, without marks that Markdown or HTML would take for its own."""
    return re.sub(r"([\\|*_<>`\[\]~])", r"\\\1", " ".join(text.split()))


def code(value: object) -> str:
    """Return a value as code in a cell."""
    return f"`{value}`".replace("|", "\\|")


def shown(value: object) -> str:
    if isinstance(value, bool):
        return code(str(value).lower())
    return code(value) if value not in ("", None) else "empty"


def fields(schema: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the table of fields of a pydantic class; with a `prefix` each row has the anchor `prefix` + name."""
    rows = [OPEN, "", "| name | type | default | meaning |", "|---|---|---|---|"]
    for name, field in schema["properties"].items():
        label = f"`{name}`{{ #{prefix}{name} }}" if prefix else f"`{name}`"
        cells = [label, kind(field, code), shown(field["default"]), cell(field.get("description", ""))]
        rows.append(f"| {' | '.join(cells)} |")
    return [*rows, "", "</div>"]


def between(text: str, name: str, body: str) -> str:
    """Replace the text between two markers."""
    pattern = rf"<!-- table:{name} -->.*?<!-- /table:{name} -->"
    return re.sub(pattern, lambda _: f"<!-- table:{name} -->\n{body}\n<!-- /table:{name} -->", text, flags=re.S)


def renewed(text: str) -> str:
    """Return a page with every quotation up to date."""
    for m in registry.discover().values():
        if f"<!-- table:hyperparameters-{m.id} -->" in text:
            table = "\n".join(fields(m.hparams.model_json_schema()))
            text = between(text, f"hyperparameters-{m.id}", table)
    text = between(between(files(text), "needs", needs_table()), "node", node_table())
    text = between(between(text, "defaults", defaults_table()), "families", families_list())
    return between(text, "choose", choosing_table())


if __name__ == "__main__":
    for page in QUOTING:
        page.write_text(renewed(page.read_text(encoding="utf-8")), encoding="utf-8")
