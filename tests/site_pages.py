"""Pages of the documentation site that are made from the program: keys, hyperparameters, commands, methods, API.

`make docs` makes them while the site is built (`tests/site_build.py`), so no copy of them can become out of date.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import typer

import fedapp
from clients.base import FedClient
from fedapp import cli, registry
from fedapp.cli.listing import notes, secure_sums
from fedapp.config import GROUPS, KEYS
from fedapp.method import BaseHParams, Method
from fedapp.results.report import bibtex
from reproduction.studies import choosing
from strategies.base import Strategy
from tests.house import FILES, module
from tests.readme import OPEN, ROOT, cell, code, families, fields, methods_table

GUIDES: dict[str, dict[str, dict[str, str]]] = {
    "Get started": {
        "": {
            "Quick start": "quickstart.md",
            "Install": "installing.md",
            "Notebook": "notebook.md",
            "Tutorial: pictures": "tutorials/pictures.md",
            "Tutorial: sensors": "tutorials/sensors.md",
            "Tutorial: a table": "tutorials/table.md",
            "Questions and errors": "faq.md",
        },
    },
    "Guides": {
        "Understand": {
            "A federated round": "round.md",
            "Scores": "scores.md",
            "Glossary": "glossary.md",
        },
        "Choose and compare": {
            "Which method": "choosing.md",
            "A frozen body": "frozen.md",
            "Compare methods": "comparing.md",
            "Track runs": "tracking.md",
        },
        "Data and models": {
            "Your data": "own-data.md",
            "Your model": "own-models.md",
            "Local training": "training.md",
            "Add a method": "own-method.md",
        },
        "Simulate and deploy": {
            "Simulate": "simulation.md",
            "Deploy": "deployment.md",
            "Operate": "operating.md",
        },
        "Trust": {
            "Threat model": "threat-model.md",
            "Robustness": "robustness.md",
            "Secure sums": "secure-sums.md",
            "Differential privacy": "privacy.md",
        },
    },
    "Results": {
        "": {
            "Reproduction": "reproduction.md",
            "Natural clients": "har.md",
            "Figures of the papers": "figures.md",
            "Performance": "performance.md",
            "Scaling": "scaling.md",
        },
    },
    "Project": {
        "": {
            "How to cite": "citing.md",
            "Architecture": "architecture.md",
            "Contributing": "CONTRIBUTING.md",
            "Changelog": "CHANGELOG.md",
            "Security": "SECURITY.md",
        },
    },
}
"""Pages written by hand: tab, section, title and place. Pages that this table lacks come last among the guides."""
LINKED = {"mutants.md"}
"""Pages outside the navigation, which other pages link (`not_in_nav` in mkdocs.yml)."""

API: dict[str, tuple[str, ...]] = {
    "Runs and models": (
        "fedapp.engines.local",
        "fedapp.results.runs",
        "fedapp.results.loading",
        "fedapp.results.predict",
        "fedapp.results.exporting",
        "fedapp.results.statistics",
        "fedapp.config",
        "fedapp.errors",
    ),
    "A method of your own": (
        "fedapp.method",
        "fedapp.reduce.spec",
        "strategies.base",
        "clients.base",
        "fedapp.registry",
        "fedapp.plugins",
        "fedapp.sampling",
    ),
}
"""Modules of the API pages; the packages of `ROOMS` follow with all of their modules."""
ROOMS = {
    "fedapp.core": "Mathematics",
    "fedapp.data": "Data",
    "fedapp.models": "Models",
    "fedapp.learning": "Local learning",
}


def _inner(name: str) -> list[str]:
    """Return a package and its modules, by name."""
    return sorted(m for m in map(module, FILES) if m == name or m.startswith(f"{name}."))


def api() -> dict[str, list[str]]:
    """Return the modules of the API pages by section, without those of the methods."""
    return {**{k: list(v) for k, v in API.items()}, **{title: _inner(name) for name, title in ROOMS.items()}}


def keys() -> str:
    """Return the page of all run-config keys, from the classes of their groups."""
    lines = [
        "# Configuration keys",
        "",
        f"The {len(KEYS)} keys of a run, in {len(GROUPS)} groups. They go into a TOML file (`fedapp run FILE.toml`), "
        "after `--set` (`fedapp run --set lr=0.1`), into `fedapp.run(lr=0.1)` with underscores instead of hyphens, "
        "and into `flwr run . --run-config`. The command line wins over the file. A run directory's `config.toml` "
        "holds all of them, and `fedapp run config.toml` repeats the run.",
        "",
        "`auto` stands for a value that the method, the data or the engine decides. Hyperparameters of a method are "
        "given by `method-args`; [Hyperparameters](hyperparameters.md) lists them.",
        "",
    ]
    for title, group in GROUPS.items():
        schema = group.model_json_schema()
        lines += [f"## {title.capitalize()}", "", schema["description"], ""]
        lines += [*fields(schema, "key-"), ""]
    return "\n".join(lines)


def hyperparameters() -> str:
    """Return the page of all methods' hyperparameters, from their classes."""
    lines = [
        "# Hyperparameters",
        "",
        'They are given as `--set method-args="name=value name=value"`, and in a comparison as '
        '`--methods "fedprox(mu=0.1)"`. The page of a method says how its authors chose theirs.',
        "",
    ]
    without = []
    for m in registry.discover().values():
        schema = m.hparams.model_json_schema()
        if m.hparams is BaseHParams or not schema["properties"]:
            without.append(f"[{m.title}](../methods/{m.id}.md)")
            continue
        lines += [f"## {m.title} {{ #{m.id} }}", "", f"`{m.id}`, [page](../methods/{m.id}.md)", ""]
        lines += [*fields(schema, f"{m.id}-"), ""]
    lines += ["## Methods without hyperparameters", "", ", ".join(without) + "."]
    return "\n".join(lines)


def _parameter_type(parameter: Any) -> str:
    kind = parameter.type
    if getattr(kind, "choices", None):
        return ", ".join(map(code, kind.choices))
    words = {"TEXT": "text", "INTEGER": "whole number", "FLOAT": "number", "PATH": "path", "BOOLEAN": "switch"}
    name = str(getattr(kind, "name", kind)).upper()
    low = getattr(kind, "min", None)
    base = "whole number" if name.startswith("INTEGER") else words.get(name, name.lower())
    return f"{base}, at least {low}" if low is not None else base


def _command(command: Any, name: str) -> list[str]:
    """Return the section of one command with its arguments and options, and those of its inner commands."""
    if getattr(command, "commands", None):
        found = [(inner, command.get_command(None, inner)) for inner in command.commands]
        return [line for inner, c in found for line in _command(c, f"{name} {inner}")]
    said = [re.sub(r"\s+", " ", part) for part in (command.help or "").strip().split("\n\n")]
    taken = [p for p in command.params if p.name != "help"]
    arguments = [p for p in taken if p.param_type_name == "argument"]
    options = [p for p in taken if p.param_type_name != "argument"]
    usage = " ".join([name, "[OPTIONS]", *(p.metavar or p.name.upper() for p in arguments)])
    lines = [f"## {name}", "", *(part for text in said for part in (cell(text), "")), f"```console\n{usage}\n```", ""]
    if taken:
        lines += [OPEN, "", "| option | type | default | meaning |", "|---|---|---|---|"]
    for p in [*arguments, *options]:
        given = p.metavar or p.name.upper() if p in arguments else ", ".join(p.opts)
        switch = getattr(p, "is_flag", False)
        default = "required" if p.required else "off" if switch else "" if p.default in (None, "") else code(p.default)
        meaning = "; ".join(filter(None, [p.help or "", f"environment: {p.envvar}" if p.envvar else ""]))
        kind = "switch" if switch else code(p.metavar) if p.metavar and p in options else _parameter_type(p)
        lines.append(f"| {code(given)} | {kind} | {default} | {cell(meaning)} |")
    return [*lines, "", *(["</div>", ""] if taken else [])]


def commands() -> str:
    """Return the page of all commands with their options, from the Typer app."""
    app = typer.main.get_command(cli.app)
    lines = [
        "# Commands",
        "",
        f"{app.help} `fedapp COMMAND --help` prints the same. Exit codes: 0 all is well; 1 the work failed; 2 an "
        "invalid request, which one line explains; 130 interrupted.",
        "",
        *_command(app, "fedapp"),
    ]
    return "\n".join(lines)


def methods() -> str:
    """Return the page of all methods, in the groups of the navigation."""
    lines = [
        "# Methods",
        "",
        f"{len(registry.discover())} methods, each with a page: when to use it, its formula, its payload in "
        "bytes, its hyperparameters with the paper's values, and where we differ and why. "
        "[Which method](../choosing.md) compares what they need and cost.",
        "",
    ]
    table = methods_table().replace("docs/methods/", "").splitlines()
    for title, members in families().items():
        rows = [row for row in table[2:] if any(f"({m.id}.md)" in row for m in members)]
        lines += [f"## {title}", "", *table[:2], *rows, ""]
    return "\n".join(lines)


def reference(name: str, title: str | None = None) -> str:
    """Return the page of one module of the API; mkdocstrings fills it in."""
    return f"# {title or name}\n\n::: {name}\n"


def notebook() -> str:
    """Return the notebook with its stored outputs as a page."""
    lines: list[str] = []
    for one in json.loads((ROOT / "examples" / "quickstart.ipynb").read_text(encoding="utf-8"))["cells"]:
        source = "".join(one["source"])
        if one["cell_type"] == "markdown":
            lines += [source.replace("](../docs/", "]("), ""]
            continue
        lines += ["```python", source, "```", ""]
        for output in one["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                lines.append(f"![output](data:image/png;base64,{data['image/png'].strip()})")
            elif "text/html" in data:
                lines.append("".join(data["text/html"]))
            else:
                lines += ["```text", "".join(output.get("text", data.get("text/plain", ""))).rstrip(), "```"]
            lines.append("")
    return "\n".join(lines)


def contract(base: type, derived: Iterable[type]) -> list[str]:
    """Return the table of a base class's functions that the methods of fedapp write themselves, in the order there."""
    classes = {c for one in derived for c in one.__mro__ if issubclass(c, base) and c is not base}
    names = dict.fromkeys(name for c in reversed(base.__mro__) for name in vars(c))
    rows = ["| function | meaning |", "|---|---|"]
    for name in names:
        function = getattr(base, name)
        if not name.startswith("_") and inspect.isroutine(function) and any(name in vars(c) for c in classes):
            rows.append(f"| `{name}` | {cell((inspect.getdoc(function) or '').partition(chr(10))[0])} |")
    return rows


def public() -> str:
    """Return the page of the public API: what `fedapp` exports, and the classes of a method of one's own."""
    lines = [
        "# Public API",
        "",
        "These functions and classes are the API of fedapp. All other modules may change without notice.",
        "",
        "```python",
        "import fedapp",
        "",
        'card = fedapp.data_card(dataset="digits", clients=8)                    # the partition; nothing is trained',
        'result = fedapp.run(method="fedclassavg", dataset="digits", rounds=5)   # one run',
        'found = fedapp.compare("local,fedavg,fedclassavg", seeds=3, rounds=5)   # several methods on the same data',
        "net = fedapp.load(result.out, client=0)                                 # a client's model as a torch module",
        "```",
        "",
    ]
    for name in sorted(set(fedapp.__all__) - {"__version__"}, key=str.lower):
        place = getattr(fedapp, name).__module__
        lines += [f"## fedapp.{name}", "", f"::: {place}.{name}", "    options:"]
        lines += ["      heading_level: 3", "      show_source: false", "      skip_local_inventory: true", ""]
    methods = registry.discover().values()
    sides = {
        "A strategy": (Strategy, [m.strategy for m in methods], "computes the payload and combines replies"),
        "A client": (FedClient, [m.client for m in methods], "trains on its rows and replies"),
    }
    for title, (base, classes, does) in sides.items():
        lines += [
            f"## {title}",
            "",
            f"`{base.__module__}.{base.__name__}` {does}. A method overrides the functions in which it differs from "
            f"FedAvg ([an example](../own-method.md), [all functions]({base.__module__}.md)).",
            "",
            *contract(base, classes),
            "",
        ]
    lines += ["`METHOD` in `strategies/ID.py` is a `fedapp.method.Method` ([fields](fedapp.method.md)).", ""]
    return "\n".join(lines)


def _see(method: Method) -> str:
    page, values = (
        f"[The method's page](../methods/{method.id}.md)",
        "[Hyperparameters](../reference/hyperparameters.md",
    )
    known = f" {values}#{method.id}) lists its settings." if method.hparams.model_fields else ""
    return f"{page} says what it does.{known}"


def flows(method: Method) -> dict[str, str]:
    """Return what a method declares to send: `down` and `up` in each round, and `once` in a run."""
    each, _, once = method.travels.partition("; once, ")
    if found := re.match(r"the payload of ([\w ]+)", each):
        return flows(next(m for m in registry.discover().values() if m.title == found[1]))
    if found := re.match(r"(.+) up, (.+) down$", each):
        return {"down": found[2], "up": found[1], "once": once}
    if found := re.match(r"(.+) down[,;] (.+) up\b(.*)", each):
        return {"down": found[1], "up": found[2] + found[3], "once": once}
    both = each.partition(", both ways")[0]
    return {"down": both, "up": both, "once": once}


def scheme(method: Method) -> str:
    """Return the picture of server, clients and the arrays between them, with what the method declares to need."""
    said = {"down": "↓ {}", "up": "↑ {}", "once": "↑ once: {}"}
    arrows = [f'<span class="{way}">{said[way].format(text)}</span>' for way, text in flows(method).items() if text]
    shared = method.shared_prefixes(method.hparams())
    kept = [word for prefix, word in {"features.": "body", "head.": "head"}.items() if prefix not in shared]
    facts = [
        "Architectures may differ" if method.heterogeneous else "One architecture",
        f"{'one' if method.global_model else 'no'} global model",
        f"sends {'no ' if method.class_threshold(method.hparams()) is None else ''}class statistics",
        f"secure sums: {secure_sums(method)}",
        f"{notes()[method.id]['costs'][0]:g} kB up per client and round (`digits-a`)",
    ]
    return "\n".join([
        '<div class="scheme">',
        '<span class="box">server</span>',
        f'<span class="arrows">{"".join(arrows)}</span>',
        f'<span class="box">clients{", which keep their " + " and ".join(kept) if kept else ""}</span>',
        "</div>",
        "",
        f"*{', '.join(facts)}.*",
        "",
    ])  # fmt: skip


@cache
def measured() -> list[tuple[choosing.Block, choosing.Compared]]:
    """Return the settings of docs/choosing.md with every method's difference to training alone."""
    return choosing.every_block(list(choosing.load(ROOT / "docs" / "choosing.jsonl").values()))


def reached(name: str) -> list[str]:
    """Return a method's differences to training alone, a row for each setting."""
    rows = [
        f"| {block.title} | {choosing.in_points(c.methods[name])} | {c.methods[name].word(c.margin)} |"
        for block, c in measured()
        if name in c.methods
    ]
    heads = ["| setting | difference to training alone, points | |", "|---|---|---|"]
    about = "At its defaults, with three seeds and few rounds ([Which method](../choosing.md))."
    return ["", "## Scores reached", "", about, "", *heads, *rows] if rows else []


def in_code(name: str) -> str:
    """Return the site's part of a method's page: scores, code, the entry to cite, and figures."""
    m = registry.get(name)
    links = [f"[API of {m.title}](../api/{m.id}.md)"]
    if m.hparams.model_fields:
        links.append(f"[hyperparameters with types and defaults](../reference/hyperparameters.md#{m.id})")
    lines = [*reached(name), "", "## In the code", "", ", ".join(links) + "."]
    if m.paper and name != "local":
        text = (ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8")
        found = re.search(r"^(.+): \*(.+?)\*, ", text, flags=re.M)
        entry = bibtex(name, found[2], m.paper, found[1]) if found else bibtex(name, m.title, m.paper)
        lines += ["", "## Cite", "", f"```bibtex\n{entry}\n```"]
    pages = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
    drawn = re.findall(rf"!\[([^\]]+)\]\((figures/{name}-[^)]+)\)", pages)
    if drawn:
        lines += ["", "## Figures", "", f"Drawn from small runs with the commands in [Figures](../figures.md#{name})."]
        lines += ["", '<div class="grid" markdown>', ""]
        lines += [f"[![{alt}](../{file}){{ loading=lazy }}](../{file})\n" for alt, file in drawn]
        lines += ["</div>"]
    return "\n".join([*lines, ""])


def of_method(method: Method) -> str:
    """Return the API page of a method: its server, and its client where it has one of its own."""
    files = [f"{side}.{method.id}" for side in ("strategies", "clients")]
    there = [m for m in files if (ROOT / f"{m.replace('.', '/')}.py").is_file()]
    lines = [f"# {method.title}", "", f"{_see(method)}", ""]
    for m in there:
        lines += [f"## {m}", "", f"::: {m}", "    options:", "      heading_level: 3", ""]
    return "\n".join(lines)


def generated() -> dict[str, str]:
    """Return all pages that are made, by their place below `docs/`."""
    pages = {
        "reference/keys.md": keys(),
        "reference/hyperparameters.md": hyperparameters(),
        "reference/commands.md": commands(),
        "methods/index.md": methods(),
        "api/index.md": public(),
        "notebook.md": notebook(),
    }
    pages |= {f"api/{name}.md": reference(name) for names in api().values() for name in names}
    pages |= {f"api/{m.id}.md": of_method(m) for m in registry.discover().values()}
    return pages


def _guides() -> dict[str, list[Any]]:
    """Return the navigation of the pages that are written by hand, by tab."""
    found: dict[str, list[Any]] = {}
    for tab, sections in GUIDES.items():
        lists = {title: [{k: v} for k, v in pages.items()] for title, pages in sections.items()}
        found[tab] = [*lists.pop("", []), *({title: pages} for title, pages in lists.items())]
    known = {
        "index.md",
        *LINKED,
        *(p for sections in GUIDES.values() for pages in sections.values() for p in pages.values()),
    }
    found["Guides"] += sorted(p.name for p in (ROOT / "docs").glob("*.md") if p.name not in known)
    return found


def searched(place: str) -> dict[str, Any]:
    """Return the weight of a page in the search: guides come first, and internal modules are left out."""
    folder, _, name = place.rpartition("/")
    if folder == "api" and name.startswith("fedapp.") and name.removesuffix(".md") not in sum(API.values(), ()):
        return {"exclude": True}
    if place == "api/index.md":
        return {"boost": 2}
    return {"boost": 0.5 if folder in ("api", "reference") or place == "CHANGELOG.md" else 2}


def navigation() -> list[Any]:
    """Return the navigation of the site for MkDocs."""
    guides = _guides()
    groups = [{title: [{m.title: f"methods/{m.id}.md"} for m in members]} for title, members in families().items()]
    modules = [
        {title: [{name.removeprefix("fedapp."): f"api/{name}.md"} for name in names]} for title, names in api().items()
    ]
    return [
        {"Home": "index.md"},
        {"Get started": guides["Get started"]},
        {"Guides": guides["Guides"]},
        {"Methods": ["methods/index.md", *groups]},
        {
            "Reference": [
                {"Configuration keys": "reference/keys.md"},
                {"Hyperparameters": "reference/hyperparameters.md"},
                {"Commands": "reference/commands.md"},
            ]
        },
        {
            "API": [
                {"Public API": "api/index.md"},
                *modules,
                {"Methods": [{m.title: f"api/{m.id}.md"} for m in registry.discover().values()]},
            ]
        },
        {"Results": guides["Results"]},
        {"Project": guides["Project"]},
    ]
