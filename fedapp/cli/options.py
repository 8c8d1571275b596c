"""What the commands share: their groups, the option --set, and how options become a run-config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import click
import typer
from typer.core import TyperCommand, TyperGroup
from typer.utils import get_params_from_function

from fedapp.errors import BadRequest, suggest
from fedapp.results.terminal import echo

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Help:
    """What commands and groups of commands share: their help, and the refusal of an option that they do not have."""

    def format_arguments(self, ctx: Any, formatter: Any) -> None:
        """Write nothing: Typer writes the arguments together with the options, click 8.5 would write them again."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options; Typer escapes their brackets for rich, which does not print this help."""
        super().format_options(ctx, formatter)  # type: ignore[misc]
        formatter.buffer = [piece.replace("\\[", "[") for piece in formatter.buffer]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options. One that does not exist is refused with the option, key or hyperparameter that is meant."""
        try:
            read: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.NoSuchOption as e:
            raise _refused(_no_option(e.option_name, ctx.command), ctx) from None
        except click.UsageError as e:
            text = e.format_message()
            if "extra argument" in text and any("--methods" in param.opts for param in ctx.command.params):
                text += ": separate methods with commas and no blanks, --methods local,fedavg"
            raise _refused(text, ctx) from None
        return read


def _refused(text: str, context: Any) -> BadRequest:
    """Return the error for words that a command does not take."""
    ends = "" if text.endswith(("?", ".")) else "."
    return BadRequest(f"{text[0].lower()}{text[1:]}{ends} See: {context.command_path} --help")


def _no_option(option: str, command: click.Command) -> str:
    """Return the message for an option that a command does not have."""
    from fedapp import config

    known = {option: param for param in command.params for option in param.opts if isinstance(param, click.Option)}
    text = f"no such option '{option}'"
    name = option.lstrip("-")
    key = config.key_of(name)
    if "--set" in known and key is not None:
        others = {"num-server-rounds": "--rounds"}  # options that have another name than their key
        meant = next((o for o in (f"--{key}", others.get(key, "")) if o in known), f"--set {key}=VALUE")
        return f"{text}, did you mean '{meant}'?"
    if near := suggest(option, known):
        return text + near
    give = "--methods " if "--methods" in known else "--method "
    if "--set" in known and (found := config.hyperparameter_text(name, "VALUE", give)):
        text += f". {name} is {found}"
    return text


class Command(_Help, TyperCommand):
    """A command."""


class Application(typer.Typer):
    """Commands of this program; all that are added are a :class:`Command`."""

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = Command, **settings: Any
    ) -> Callable[[_Function], _Function]:
        """Return a decorator that adds a command."""
        return super().command(name, cls=cls, **settings)


class Commands(_Help, TyperGroup):
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

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command; click and Typer would each add what may be meant by an unknown one."""
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise _refused(f"no such command '{args[0]}'{suggest(args[0], self.list_commands(ctx))}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands in groups, each with its first sentence."""
        groups: dict[str, list[tuple[str, str]]] = {}
        names = self.list_commands(ctx)
        for name in names:
            command = self.get_command(ctx, name)
            group = getattr(command, "rich_help_panel", None) or "Commands"
            groups.setdefault(group, []).append((name.ljust(max(map(len, names))), command.short_help))
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl(rows)

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
    BadRequest : the command line gives a key twice with different values, `--set` is not key=value or gives the run
        directory to a command whose `options` lack `out`, or a value has a wrong type or is out of its range.
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
        key, text = key.strip(), text.strip()
        if key not in config.KEYS:
            give, method = ("--method ", str(options["method"])) if "method" in options else ("--methods ", "")
            raise BadRequest(config.unknown_key(key, text, give, method.partition("(")[0]))
        if key in ("out", "resume") and options and "out" not in options:
            raise BadRequest(f"--set {item} has no effect here: give --out DIR")
        put(key, config.parse_value(key, text), f"--set {item}")
    chosen = config.expanded({k: v for k, (v, _) in given.items()})
    values = {**(settings or {}), **chosen}
    config.validated(config.expanded(values))
    if scale is not None:
        from fedapp.experiments import recipes

        values, told = recipes.scaled(values, scale, chosen)
        echo(told, err=True)
    return values
