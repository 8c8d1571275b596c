"""What the commands share: their groups, the option --set, and how options become a run-config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.utils import get_params_from_function

from fedapp.errors import BadRequest
from fedapp.results.terminal import echo


class Commands(TyperGroup):
    """The group of commands. Ctrl-C prints one line and exits with 130; some versions of Typer would exit with 1."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command with the help of its arguments; with click 8.5 Typer 0.20 loses it."""
        command = super().get_command(ctx, cmd_name)
        said = get_params_from_function(command.callback) if command and command.callback else {}
        for param in command.params if command else ():
            if param.param_type_name == "argument" and param.help is None and param.name in said:
                param.help = said[param.name].default.help
        if command and command.help and not command.short_help:  # all of the first sentence in the list of commands
            first = " ".join(command.help.split("\n\n")[0].split()).partition(". ")[0]
            command.short_help = f"{first.rstrip('.')}."
        return command

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            echo("fedapp: interrupted", err=True)
            raise typer.Exit(130) from None


Set = Annotated[
    list[str] | None, typer.Option("--set", help="any run-config key, as key=value; repeatable", metavar="KEY=VALUE")
]


def collect(
    options: dict[str, Any],
    sets: list[str] | None,
    settings: Mapping[str, Any] | None = None,
    scale: float | None = None,
) -> dict[str, Any]:
    """Join a recipe's settings, options and `--set` values. The command line overrides the recipe and is not scaled.

    Raises
    ------
    BadRequest : the command line gives a key twice with different values, or `--set` is not key=value.
    """
    from fedapp import config

    given: dict[str, tuple[Any, str]] = {}

    def put(key: str, value: Any, how: str) -> None:
        if key in given and given[key][0] != value:
            raise BadRequest(
                f"{key} is given twice: {given[key][1]} says {given[key][0]!r}, {how} says {value!r}; give it once"
            )
        given.setdefault(key, (value, how))

    for key, value in options.items():
        if value is not None:
            put(key, value, "--" + {"num-server-rounds": "rounds"}.get(key, key))
    for item in sets or []:
        key, sep, text = item.partition("=")
        if not sep:
            raise BadRequest(f"--set {item} has no value: write --set key=value")
        put(key.strip(), config.parse_value(key.strip(), text.strip()), f"--set {item}")
    values = dict(settings or {})
    chosen = {k: v for k, (v, _) in given.items()}
    if scale is not None:
        from fedapp.experiments import recipes

        shrunk, told = recipes.scaled(
            {**values, **({"dataset": chosen["dataset"]} if "dataset" in chosen else {})}, scale
        )
        echo(told, err=True)
        values = shrunk
    return {**values, **chosen}


def names(text: str) -> list[str]:
    """Return the names in a text with commas between them."""
    return [name.strip() for name in text.split(",") if name.strip()]
