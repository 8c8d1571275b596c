"""Commands that list what a run can be made of: methods, keys, models, data sets, partitions, recipes."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fedapp.cli.printing import entries, kind, on_terminal, show, tell_broken
from fedapp.errors import BadRequest, suggest
from fedapp.results.terminal import Screen, echo

if TYPE_CHECKING:
    from fedapp.method import Method

NOTES = Path(__file__).parents[1] / "conf" / "lists" / "methods.toml"
COLUMNS = (
    "architectures: any = clients may differ, one = the same for all; global: one global model; classes: sends class "
    "statistics (without them weights still show class sizes); sums: secure sums hide single replies; kB up: payload "
    "of a client in a round, on digits with the model digits-a.\n"
    "fedapp methods ID: all facts of one method"
)


@functools.cache
def notes() -> dict[str, dict[str, Any]]:
    """Return counted costs and the authors' settings of each method that is part of the package."""
    import tomllib

    return tomllib.loads(NOTES.read_text(encoding="utf-8"))


def secure_sums(method: Method) -> str:
    """Return whether secure sums work with a method: `yes`, `no`, or the hyperparameter with which they do."""
    fields = method.hparams.model_json_schema().get("properties", {})
    values = [{}, *({name: value} for name, field in fields.items() for value in field.get("enum", ()))]
    found = next((given for given in values if method.sums(method.hparams(**given)) is not None), None)
    return "no" if found is None else next((f"{name}={value}" for name, value in found.items()), "yes")


def facts(method: Method) -> dict[str, Any]:
    """Return the facts of a method: its declaration, its counted costs, its authors' settings."""
    from importlib.metadata import metadata

    known, threshold = notes().get(method.id, {}), method.class_threshold(method.hparams())
    module = sys.modules.get(f"strategies.{method.id}") or sys.modules[method.strategy.__module__]
    costs = dict(zip(("kb_up", "kb_down", "kb_at_end", "passes_over_rows"), known.get("costs", ()), strict=False))
    pages = [url for url in metadata("fedapp").get_all("Project-URL") or [] if url.startswith("Documentation, ")]
    return {
        "id": method.id,
        "title": method.title,
        "paper": method.paper,
        "summary": " ".join((module.__doc__ or "").partition("\n\n")[0].split()),
        "different_architectures": method.heterogeneous,
        "global_model": method.global_model,
        "class_info": threshold is not None,
        "class_threshold": threshold or "",
        "secure_sums": secure_sums(method),
        "public_share": method.public_share,
        "headline": method.deploy_as,
        "payload": method.travels,
        **costs,
        "counted_on": "digits with the model digits-a" if costs else "",
        "authors_settings": known.get("authors", ""),
        "our_settings": known.get("ours", "").replace("`", ""),
        "reason": known.get("why", ""),
        "page": f"{pages[0].partition(', ')[2] if pages else 'docs'}/methods/{method.id}.md",
        "hyperparameters": {
            name: {"type": kind(schema), "default": schema["default"], "meaning": schema.get("description", "")}
            for name, schema in method.hparams.model_json_schema().get("properties", {}).items()
        },
    }


def methods(
    method: Annotated[str | None, typer.Argument(help="method to describe", metavar="[ID]")] = None,
    different_architectures: Annotated[
        bool, typer.Option("--different-architectures", help="those that allow different architectures")
    ] = False,
    no_class_info: Annotated[
        bool,
        typer.Option("--no-class-info", help="those that send no class statistics"),
    ] = False,
    global_model: Annotated[bool, typer.Option("--global-model", help="those with one global model")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print all facts as JSON")] = False,
) -> None:
    """List the methods: what they need, reveal and send.

    With the id of a method: its payload, the authors' settings, and its hyperparameters with type, default and meaning.
    """
    from fedapp import registry

    if method is not None:
        if different_architectures or no_class_info or global_model:
            raise BadRequest(f"options that choose methods go without an id: leave out {method}, or the options")
        found = facts(registry.get(method))
        echo(json.dumps(found, indent=2)) if as_json else describe(found)
        return
    tell_broken()
    chosen = [
        m
        for m in map(facts, registry.discover().values())
        if m["different_architectures"] >= different_architectures
        and m["class_info"] <= (not no_class_info)
        and m["global_model"] >= global_model
    ]
    if as_json:
        echo(json.dumps(chosen, indent=2))
        return
    facts_of = (
        "id", "title", "different_architectures", "payload", "paper", "global_model", "class_info", "secure_sums",
        "kb_up",
    )  # fmt: skip
    piped = [[_cell(m.get(name, "")) for name in facts_of] for m in chosen]
    rows = [
        (name, title, "any" if several == "yes" else "one", *further) for name, title, several, _, _, *further in piped
    ]
    show("", ("id", "method", "architectures", "global", "classes", "sums", "kB up"), rows, [facts_of, *piped], COLUMNS)


def _cell(value: object) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def describe(method: Mapping[str, Any]) -> None:
    """Print the facts of one method, and its hyperparameters with type, default and meaning."""
    rows = [
        (name, field["type"], shown(field["default"]), field["meaning"])
        for name, field in method["hyperparameters"].items()
    ]
    if on_terminal():
        example = next((f"{name}={default or 'VALUE'}" for name, _, default, _ in rows), "")
        told = {**method, "hyperparameters": f'--method "{method["id"]}({example})"' if rows else "none"}
        table = Table.grid(padding=(0, 2))
        for name, value in told.items():
            if value != "":
                table.add_row(name.replace("_", " "), _cell(value))
        Screen(highlight=False).print(table, "", sep="\n")
    elif rows:
        rows.insert(0, ("hyperparameter", "type", "default", "meaning"))
    else:
        echo(f"{method['title']} has no hyperparameters")
    entries(rows, lambda row: (row[3], f"{row[1]}; default {row[2] or 'empty'}"))


def shown(default: object) -> str:
    """Return a default as it is written on the command line."""
    if default is None:
        return ""
    return str(default).lower() if isinstance(default, bool) else str(default)


def keys(
    word: Annotated[
        str | None, typer.Argument(help="group of keys, or a word in their names or meanings", metavar="[GROUP|WORD]")
    ] = None,
) -> None:
    """List the groups of run-config keys, or keys with type, default and meaning.

    Values of method, dataset, model and partition: fedapp methods, datasets, models, partitions.
    """
    from fedapp import config

    groups = {name: group.model_json_schema() for name, group in config.GROUPS.items()}
    if word is None and on_terminal():
        entries(
            [(name, *group["properties"]) for name, group in groups.items()],
            lambda row: (", ".join(row[1:]), f"{len(row) - 1} keys. {groups[row[0]]['description']}"),
        )
        echo("\nfedapp keys GROUP: its keys with type, default and meaning")
        echo("fedapp keys WORD: keys with a word in their names or meanings")
        return
    fields = {key: field for group in groups.values() for key, field in group["properties"].items()}
    rows = [(k, kind(fields[k]), shown(fields[k]["default"]), fields[k].get("description", "")) for k in config.KEYS]
    typed = (word or "").lower().replace("_", "-")
    if typed in groups:
        rows = [row for row in rows if row[0] in groups[typed]["properties"]]
    elif typed:
        meant = config.key_of(typed)
        named = [row for row in rows if typed in row[0] or row[0] == meant]
        rows = [row for row in rows if row in named or typed in row[3].lower()]
        rows.sort(key=lambda row: (row[0] != meant, row not in named))
        if meant is None and (field := config.hyperparameter_text(typed, "VALUE", "--method ")):
            echo(f"{word} is {field}")
            return
        if not rows:
            near = suggest(typed, [*fields, *groups], "see fedapp keys")
            raise BadRequest(f"no key has '{word}' in its name or meaning{near}")
    entries(rows, lambda row: (row[3], f"{row[1]}; default {row[2] or 'empty'}"))


def models() -> None:
    """List the models, the features of their heads and their samples."""
    from fedapp.models import own, zoo

    rows = [(name, str(width or "all"), takes, words) for name, width, takes, words in zoo.listed()]
    rows += [(name, "", "", str(entry)) for name, entry in own.installed().items()]
    entries(rows, lambda row: (row[3], f"{row[1]} features; {row[2]}" if row[1] else "installed"))


def datasets() -> None:
    """List the data sets, and the forms that your own data may have."""
    from fedapp.data import datasets

    rows = []
    for name in datasets.DATASET_NAMES:
        facts = datasets.published(name)
        if facts is None:
            rows.append((name, "your own", "", datasets.OWN_FORMS[name]))
        else:
            channels, height, width = facts.shape
            size = f"{len(facts.classes)} classes, {height}x{width}x{channels}"
            rows.append((name, "published", size, datasets.origin(name)))
    rows += [(name, "installed", "", str(entry)) for name, entry in datasets.installed().items()]
    entries(rows, lambda row: (row[3], "; ".join(filter(None, row[1:3]))))


def partitions() -> None:
    """List the ways to divide a data set over the clients."""
    from fedapp.data.partitions import MEANING, PARTITION_PARAMETER

    rows = [(name, PARTITION_PARAMETER[name] or "", words) for name, words in MEANING.items()]
    rows.append(("flwr:NAME", "partition-args", "a partitioner of flwr-datasets, such as flwr:DirichletPartitioner"))
    entries(rows, lambda row: (row[2], f"set by {row[1]}" if row[1] else ""))


def recipes(
    name: Annotated[str | None, typer.Argument(help="recipe to print as a TOML file", metavar="[NAME]")] = None,
) -> None:
    """List the recipes of the papers' tables, or print one of them."""
    from fedapp.experiments import recipes

    if name is not None:
        echo(recipes.find(Path(name)).text, nl=False)
        return
    found = sorted(recipes.shipped().values(), key=lambda r: _numbered(r.name))
    entries([(r.name, r.title) for r in found], lambda row: (row[1], ""))


def _numbered(name: str) -> list[str | float]:
    """Split a name at its numbers, so that 50 comes before 100."""
    return [float(part) if part[:1].isdigit() else part for part in re.split(r"(\d+(?:\.\d+)?)", name)]
