"""`python -m reproduction figure | claim | study`, from the root of a clone."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

from fedapp import plugins
from fedapp.cli import Allow, main
from fedapp.cli.options import Application, Commands
from fedapp.cli.printing import entries
from fedapp.errors import BadRequest, listed, suggest
from fedapp.results.terminal import echo

app = Application(
    name="reproduction",
    cls=Commands,
    help="Figures of the papers, the ledger of their claims, and measuring studies.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
STUDIES = {
    "adapters": "a common head over private adapters of two bodies: docs/frozen.md",
    "attacks": "accuracy of honest clients by attack, rule and method: docs/robustness.md",
    "choosing": "all methods on seven settings: docs/choosing.md",
    "figures": "all pictures of docs/figures.md, by the commands on that page",
    "frozen": "heads on frozen pretrained features, in one exchange: docs/frozen.md",
    "frozen_gradient": "heads trained in rounds on the same features: docs/frozen.md",
    "har": "methods on 30 persons' movements: docs/har.md",
    "har_plain": "FedPer on HAR in plain PyTorch, a check of docs/har.md",
    "heads": "heads in closed form on one extractor: docs/methods/fed3r.md",
    "leakage": "information in the clients' replies: docs/threat-model.md",
    "privacy": "accuracy and attacks by epsilon: docs/privacy.md",
    "secure_sums": "bytes and processor seconds of secure sums: docs/secure-sums.md",
    "trust": "processor seconds of the checks of replies: docs/robustness.md",
}
"""Modules of `reproduction.studies` with a command line of their own, and what each measures."""


@app.command()
def figure(
    name: Annotated[str | None, typer.Argument(help="a figure's id, such as fedgh-2", metavar="[PAPER-NUMBER]")] = None,
    runs: Annotated[
        list[Path] | None, typer.Argument(help="run directories, or folders of run directories", metavar="[RUN...]")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="file to write, .svg or .png (default ./PAPER-NUMBER.svg)")] = None,
    allow: Allow = "",
) -> None:
    """Draw a figure of one of the papers from your own runs; without arguments, list the figures."""
    from reproduction.figures import papers

    if name is None:
        rows = [(known, drawn.title, f"needs {drawn.needs or 'no run'}") for known, drawn in papers.FIGURES.items()]
        entries(rows, lambda row: (row[1], row[2]))
        return
    with plugins.only(allow, installed=True):
        drawing = papers.draw(name, runs or [])
    file = (out or Path(f"{name}.svg")).expanduser().absolute()
    papers.save(drawing, file)
    echo(f"{drawing.caption}\nfigure: {file}")


@app.command()
def claim(
    out: Annotated[
        Path | None, typer.Option(help="folder of the runs; finished runs are not repeated (default: nothing is run)")
    ] = None,
    data_dir: Annotated[str, typer.Option(help="folder with mnist.npz, fashion_mnist.npz, cifar10.npz")] = "",
    claims: Annotated[str, typer.Option(help="comma-separated ids (default: all)")] = "",
    studies: Annotated[str, typer.Option(help="also run all variants of these studies, comma-separated")] = "",
    minutes: Annotated[float, typer.Option(help="start no run after this many minutes; 0 = no limit", min=0)] = 0.0,
    workers: Annotated[int | None, typer.Option(help="runs at a time (default: one per core)", min=1)] = None,
    doc: Annotated[Path | None, typer.Option(help="Markdown file whose ledger is updated")] = None,
    kept: Annotated[
        Path | None, typer.Option("--from", help="folder that --keep has written: its runs count as finished")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(help="folder that takes up what decides the claims of each finished run, as text")
    ] = None,
) -> None:
    """Run what the ledger of the papers' claims needs, decide each claim and print the table; resumable."""
    from reproduction.ledger import reproduce

    if out is None and kept is None:
        raise BadRequest(
            "give --out, a folder for the runs, or --from, a folder of kept runs such as reproduction/ledger/runs"
        )
    raise typer.Exit(
        reproduce.reproduce(out, data_dir, listed(claims), listed(studies), minutes, workers, doc, kept, keep)
    )


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def study(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="a study's name; further arguments are its own")] = None,
) -> None:
    """Measure what a page of docs/ quotes; without arguments, list the studies. NAME --help shows its options."""
    if name is None or name == "--help":
        entries(list(STUDIES.items()), lambda row: (row[1], ""))
        return
    if name not in STUDIES:
        raise BadRequest(f"no study '{name}'{suggest(name, STUDIES)} (python -m reproduction study lists them all)")
    module = importlib.import_module(f"reproduction.studies.{name}")
    command = Application(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    command.command(help="\b\n" + str(module.__doc__).replace("\n\n", "\n\n\b\n"))(module.main)
    called = f"python -m reproduction study {name}"
    raise typer.Exit(command(context.args, prog_name=called, standalone_mode=False) or 0)


if __name__ == "__main__":
    main(app)
