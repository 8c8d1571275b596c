"""Commands that list what a run can be made of: methods, keys, models, data sets, partitions, recipes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedapp.cli.printing import entries, kind, on_terminal, tell_broken
from fedapp.errors import BadRequest, suggest
from fedapp.results.terminal import echo

if TYPE_CHECKING:
    from fedapp.method import Method


def methods(
    method: Annotated[
        str | None, typer.Argument(help="method whose hyperparameters are listed", metavar="[ID]")
    ] = None,
) -> None:
    """List all methods: whether they allow different architectures, what travels, and the paper.

    With the id of a method: its hyperparameters, with type, default and meaning.
    """
    from fedapp import registry

    if method is not None:
        hyperparameters(registry.get(method))
        return
    tell_broken()
    rows = [
        (m.id, m.title, "yes" if m.heterogeneous else "no", m.travels, m.paper) for m in registry.discover().values()
    ]
    entries(
        rows,
        lambda row: (f"travels: {row[3]}", f"{row[1]}; {row[4]}" + "; different architectures" * (row[2] == "yes")),
    )


def hyperparameters(method: Method) -> None:
    """List the hyperparameters of a method with type, default and meaning."""
    found = method.hparams.model_json_schema()["properties"] if method.hparams.model_fields else {}
    rows = [
        (name, kind(schema), shown(schema["default"]), schema.get("description", "")) for name, schema in found.items()
    ]
    if on_terminal():
        echo(f"{method.title}; {method.paper}\ntravels: {method.travels}")
        example = next((f"{name}={default or 'VALUE'}" for name, _, default, _ in rows), "")
        how = f'give them as --method "{method.id}({example})" or --set method-args="{example}"\n'
        echo(how if rows else f"{method.id} takes no hyperparameters")
    entries(rows, lambda row: (row[3], f"{row[1]}; default {row[2] or 'empty'}"))


def shown(default: object) -> str:
    """Return a default as it is written on the command line."""
    if default is None:
        return ""
    return str(default).lower() if isinstance(default, bool) else str(default)


def keys(
    word: Annotated[str | None, typer.Argument(help="show keys whose name or meaning has this word")] = None,
) -> None:
    """List the run-config keys with type, default and meaning; a method's own settings go into method-args.

    Values of method, dataset, model and partition: fedapp methods, datasets, models, partitions.
    """
    from fedapp.config import GROUPS, KEYS

    unsorted = {k: v for group in GROUPS.values() for k, v in group.model_json_schema()["properties"].items()}
    found = {key: unsorted[key] for key in KEYS}
    rows = []
    for name, schema in found.items():
        rows.append((name, kind(schema), shown(schema["default"]), schema.get("description", "")))
    if word is not None:
        named = [row for row in rows if word.lower() in row[0]]
        rows = [row for row in rows if row in named or word.lower() in row[3].lower()]
        rows.sort(key=lambda row: (row[0] != word.lower(), row not in named))
    if not rows:
        raise BadRequest(f"no key has '{word}' in its name or meaning{suggest(str(word), found)}: see fedapp keys")
    entries(rows, lambda row: (row[3], f"{row[1]}; default {row[2] or 'empty'}"))


def models() -> None:
    """List the models: the features that their heads see, the samples that they take, and what they are."""
    from fedapp.models import own, zoo

    rows = [(name, str(width), takes, words) for name, width, takes, words in zoo.listed()]
    rows += [(name, "", "", str(entry)) for name, entry in own.installed().items()]
    entries(rows, lambda row: (row[3], f"{row[1]} features; {row[2]}" if row[1] else "installed"))


def datasets() -> None:
    """List the data sets by name, and the forms that your own data may have."""
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
    """List the ways to divide a data set over the clients, each with the key that sets it."""
    from fedapp.data.partitions import MEANING, PARTITION_PARAMETER

    rows = [(name, PARTITION_PARAMETER[name] or "", words) for name, words in MEANING.items()]
    rows.append(("flwr:NAME", "partition-args", "a partitioner of flwr-datasets, such as flwr:DirichletPartitioner"))
    entries(rows, lambda row: (row[2], f"set by {row[1]}" if row[1] else ""))


def recipes(
    name: Annotated[str | None, typer.Argument(help="recipe to print as a TOML file", metavar="[NAME]")] = None,
) -> None:
    """List the shipped recipes (the settings of the papers' tables), or print one of them."""
    from fedapp.experiments import recipes

    if name is not None:
        echo(recipes.find(Path(name)).text, nl=False)
        return
    entries([(r.name, r.title) for r in recipes.shipped().values()], lambda row: (row[1], ""))
