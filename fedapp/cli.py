"""The console script `fedapp`."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedapp.errors import BadRequest

app = typer.Typer(
    name="fedapp",
    help="Federated learning where the classifier head does the work.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
Engine = Literal["ray", "local", "deploy"]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="any run-config key, as key=value; repeatable", metavar="KEY=VALUE")
]


def main() -> None:
    """Run the command line; bad requests are a few lines and exit code 2."""
    try:
        app(standalone_mode=True)
    except BadRequest as e:
        typer.echo(f"fedapp: {e}", err=True)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        typer.echo("fedapp: interrupted", err=True)
        raise SystemExit(130) from None
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None


def collect(options: dict[str, Any], sets: list[str] | None, file: Path | None = None) -> dict[str, Any]:
    """Join a file's keys, options and `--set` values; the command line goes before the file.

    Raises
    ------
    BadRequest : a key given twice on the command line with different values, or `--set` that is not key=value.
    """
    from fedapp import config

    given: dict[str, tuple[Any, str]] = {}

    def put(key: str, value: Any, how: str) -> None:
        if key in given and given[key][0] != value:
            raise BadRequest(f"{key} is given twice: {given[key][1]} says {given[key][0]!r}, {how} says {value!r}")
        given.setdefault(key, (value, how))

    for key, value in options.items():
        if value is not None:
            put(key, value, "--" + {"num-server-rounds": "rounds"}.get(key, key))
    for item in sets or []:
        key, sep, text = item.partition("=")
        if not sep:
            raise BadRequest(f"--set {item}: write --set key=value")
        put(key.strip(), config.parse_value(key.strip(), text.strip()), f"--set {item}")
    values = config.read_toml(file) if file is not None else {}
    return {**values, **{k: v for k, (v, _) in given.items()}}


@app.command()
def run(
    file: Annotated[Path | None, typer.Argument(help="TOML file of run-config keys", metavar="[FILE.toml]")] = None,
    method: Annotated[str | None, typer.Option(help="id of the method (fedapp methods)")] = None,
    dataset: Annotated[str | None, typer.Option(help="data set")] = None,
    clients: Annotated[int | None, typer.Option(help="number of clients (default 10)")] = None,
    rounds: Annotated[int | None, typer.Option(help="rounds in all")] = None,
    seed: Annotated[int | None, typer.Option(help="seed of every random draw")] = None,
    engine: Annotated[Engine, typer.Option(help="ray: flwr run; local: this process; deploy: real nodes")] = "ray",
    superlink: Annotated[str | None, typer.Option(help="connection in Flower's configuration, for deploy")] = None,
    client_cpus: Annotated[int | None, typer.Option(help="CPUs of each virtual client")] = None,
    client_gpus: Annotated[float | None, typer.Option(help="GPU fraction of each virtual client")] = None,
    out: Annotated[Path | None, typer.Option(help="run directory (default ./runs/...)")] = None,
    resume: Annotated[Path | None, typer.Option(help="continue the run in this directory")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show configuration and traffic, train nothing")] = False,
    sets: Set = None,
) -> None:
    """Run one federation and write a run directory.

    Exit codes: 0 every round had enough good replies; 1 the run did not end well; 2 bad request; 130 interrupted.
    """
    from fedapp import runner

    if engine != "deploy" and superlink is not None:
        raise BadRequest("--superlink goes with --engine deploy")
    options = {
        "method": method, "dataset": dataset, "clients": clients, "num-server-rounds": rounds, "seed": seed,
    }  # fmt: skip
    values = collect(options, sets, file)
    if resume is not None:
        values = runner.resume_values(resume, values, out, file)
        out = resume
    elif "out" in values:
        if out is not None and str(out) != values["out"]:
            raise BadRequest(f"out is given twice: --out says {out}, --set says {values['out']}")
        out = Path(str(values.pop("out")))
    raise typer.Exit(
        runner.run_and_report(
            values,
            out,
            engine=engine,
            superlink=superlink,
            client_cpus=client_cpus,
            client_gpus=client_gpus,
            dry_run=dry_run,
        )
    )


@app.command()
def methods() -> None:
    """List all methods: heterogeneous yes/no, what travels, paper."""
    from fedapp import registry

    rows = [
        (m.id, m.title, "yes" if m.heterogeneous else "no", m.travels, m.paper) for m in registry.discover().values()
    ]
    if not sys.stdout.isatty():
        for row in rows:
            sys.stdout.write("\t".join(row) + "\n")
        return
    table = Table(title="Methods", show_lines=False)
    for name in ("id", "method", "different architectures", "what travels", "paper"):
        table.add_column(name)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


@app.command()
def partition(
    dataset: Annotated[str | None, typer.Option(help="data set")] = None,
    clients: Annotated[int | None, typer.Option(help="number of clients (default 10)")] = None,
    seed: Annotated[int | None, typer.Option(help="seed")] = None,
    out: Annotated[Path | None, typer.Option(help="folder for partition.npz and partition.png")] = None,
    sets: Set = None,
) -> None:
    """Show how data would be dealt to clients: classes x clients, sizes, majority-class score; with --out a picture."""
    from fedapp import config, tasks
    from fedapp.data import partitions

    values = collect({"dataset": dataset, "clients": clients, "seed": seed}, sets)
    settings = config.resolve(config.from_flat(values))
    data = tasks.federated(settings, settings.clients or 10)
    card = partitions.data_card(data.dataset, data.partition)
    typer.echo(card.text())
    typer.echo(f"hash {data.partition.hash}")
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
            data.partition.save(out / "partition.npz")
            partitions.draw(card, out / "partition.png")
        except OSError as e:
            raise BadRequest(f"{out} cannot be written ({e.strerror})") from e
        typer.echo(f"written to {out}")


@app.command()
def compare(
    file: Annotated[Path | None, typer.Argument(help="TOML file of run-config keys", metavar="[FILE.toml]")] = None,
    methods: Annotated[str, typer.Option(help="ids with commas")] = "local,lgfedavg,fedclassavg",
    dataset: Annotated[str | None, typer.Option(help="data set")] = None,
    clients: Annotated[int | None, typer.Option(help="number of clients (default 10)")] = None,
    rounds: Annotated[int | None, typer.Option(help="rounds in all")] = None,
    seed: Annotated[int | None, typer.Option(help="first seed")] = None,
    seeds: Annotated[int, typer.Option(help="number of seeds")] = 1,
    engine: Annotated[
        Literal["ray", "local"], typer.Option(help="local: this machine's processes; ray: flwr run")
    ] = "local",
    out: Annotated[Path | None, typer.Option(help="folder of the comparison (default ./runs/compare-...)")] = None,
    sets: Set = None,
) -> None:
    """Run several methods on the same data, partition and sampled clients, and print one table; resumable."""
    import time

    from fedapp import compare as comparing

    options = {"dataset": dataset, "clients": clients, "num-server-rounds": rounds, "seed": seed}
    values = collect(options, sets, file)
    for key in ("method", "out", "resume"):
        values.pop(key, None)
    names = [m.strip() for m in methods.split(",") if m.strip()]
    folder = out or Path("runs") / f"compare-{time.strftime('%Y%m%d-%H%M%S')}"
    raise typer.Exit(comparing.run(values, names, seeds, folder, engine))


@app.command()
def predict(
    images: Annotated[list[Path], typer.Argument(help="pictures", metavar="IMAGE...")],
    model: Annotated[Path, typer.Option(help="a node's personal.safetensors, or a run's models/last.safetensors")],
    top: Annotated[int, typer.Option(min=1, help="classes to show per picture")] = 3,
    dataset: Annotated[str, typer.Option(help="for a server's model: the data set it was trained on")] = "",
) -> None:
    """Classify pictures with a model that a node kept after training."""
    from fedapp import predict as predicting

    rows = predicting.run(model, images, top, dataset)
    if not sys.stdout.isatty():
        for path, found in rows:
            sys.stdout.write("\t".join([path, *(f"{name}\t{p:.4f}" for name, p in found)]) + "\n")
        return
    table = Table(title=predicting.load(model, dataset).about)
    table.add_column("picture")
    for place in range(1, len(rows[0][1]) + 1):
        table.add_column(f"{place}.")
    for path, found in rows:
        table.add_row(path, *(f"{name} {100 * p:.1f} %" for name, p in found))
    Console().print(table)


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(help="a run directory, or a folder with run directories", metavar="DIR")],
    figures: Annotated[Path | None, typer.Option(help="folder for the figures as PNG and SVG files too")] = None,
) -> None:
    """Write DIR/report.html: one page of a run or of a comparison that opens offline."""
    from fedapp import report as reporting

    typer.echo(f"report: {reporting.write(directory, figures)}")
    if figures is not None:
        typer.echo(f"figures: {figures.expanduser().absolute()}")


deployment = typer.Typer(no_args_is_help=True, help="Real devices: what is wrong, and what to do about it.")
app.add_typer(deployment, name="deploy")


@deployment.callback()
def _deployment() -> None:
    """Real devices."""


@deployment.command("check")
def deploy_check(
    superlink: Annotated[str | None, typer.Option(help="connection in Flower's configuration")] = None,
    address: Annotated[str | None, typer.Option(help="or the SuperLink's HOST:PORT")] = None,
    root_certificates: Annotated[Path | None, typer.Option(help="with --address: the CA's certificate")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="with --address: plain HTTP")] = False,
    node_config: Annotated[str | None, typer.Option(help="what flower-supernode --node-config gets")] = None,
    key: Annotated[Path | None, typer.Option(help="this node's private key")] = None,
    certificate: Annotated[Path | None, typer.Option(help="on the server: its certificate")] = None,
    sets: Set = None,
) -> None:
    """Check a node or the server: versions, clock, certificates, reachability, data, model, disk.

    Exit codes: 0 nothing failed; 1 something did; 2 bad request.
    """
    from fedapp import deploycheck

    if superlink and (address or root_certificates or insecure):
        raise BadRequest("--superlink names a connection; --address, --root-certificates, --insecure stand for one")
    if insecure and root_certificates:
        raise BadRequest("--insecure and --root-certificates clash: plain HTTP has no certificates")
    found = deploycheck.check(
        superlink=superlink, address=address, root_certificates=root_certificates, insecure=insecure,
        node_config=node_config, key=key, certificate=certificate, values=collect({}, sets),
    )  # fmt: skip
    failed = any(f.state == deploycheck.FAIL for f in found)
    if not sys.stdout.isatty():
        for f in found:
            sys.stdout.write("\t".join([f.state, f.name, f.found, f.remedy]).rstrip() + "\n")
        raise typer.Exit(int(failed))
    table = Table(title="fedapp deploy check")
    for name in ("", "what", "found", "what to do"):
        table.add_column(name, overflow="fold")
    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    for f in found:
        table.add_row(f"[{colours[f.state]}]{f.state}[/]", *(escape(text) for text in (f.name, f.found, f.remedy)))
    Console().print(table)
    raise typer.Exit(int(failed))


if __name__ == "__main__":
    main()
