"""The console script `fedapp`."""

from __future__ import annotations

import shlex
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedapp import __version__
from fedapp.cli import deployment, listing
from fedapp.cli.options import Application, Commands, Set, collect
from fedapp.cli.printing import on_terminal, show
from fedapp.errors import BadRequest, listed
from fedapp.files import absolute, explained
from fedapp.results import terminal
from fedapp.results.terminal import echo, print_anything

if TYPE_CHECKING:
    from fedapp.experiments import recipes

app = Application(
    name="fedapp",
    cls=Commands,
    help="Federated learning where the classifier head does the work.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
Engine = Literal["ray", "local", "deploy"]
File = Annotated[
    Path | None,
    typer.Argument(
        help="TOML file of run-config keys, or the name of a shipped recipe (fedapp recipes)", metavar="[FILE.toml]"
    ),
]
Scale = Annotated[
    float | None,
    typer.Option(help="factor (0 to 1) for FILE's rounds and data; large models are replaced by small ones"),
]
Track = Annotated[
    list[str] | None,
    typer.Option(help="tracker that follows the run: tensorboard, mlflow, wandb or a package's; repeatable"),
]


def _version(wanted: bool) -> None:
    if wanted:
        echo(f"fedapp {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Federated learning where the classifier head does the work."""


def main(app: Application = app) -> None:
    """Run a command line.

    An invalid request prints a few lines and exits with 2, a failed start its lines and 1, other errors a traceback.
    """
    print_anything()
    try:
        app(standalone_mode=True)
    except BadRequest as e:
        echo(f"{app.info.name}: {e}", err=True)
        raise SystemExit(2) from None
    except Exception as e:
        from fedapp.engines.control import LaunchError

        echo(f"{app.info.name}: {e}\n" if isinstance(e, LaunchError) else traceback.format_exc(), err=True, nl=False)
        raise SystemExit(1) from None


def found(file: Path | None) -> recipes.Recipe | None:
    """Read the file or the shipped recipe of a command; own code may lie next to a file."""
    from fedapp import plugins
    from fedapp.data.names import is_there
    from fedapp.experiments import recipes

    if file is None or is_there(file):  # without a file, own code may lie in the current folder
        plugins.import_code_next_to(file or Path("run.toml"))
    return recipes.find(file) if file is not None else None


@app.command(rich_help_panel="Run")
def run(
    file: File = None,
    method: Annotated[str | None, typer.Option(help="id of the method (fedapp methods)")] = None,
    dataset: Annotated[str | None, typer.Option(help="data set")] = None,
    clients: Annotated[int | None, typer.Option(help="number of clients (default 10)")] = None,
    rounds: Annotated[int | None, typer.Option(help="total number of rounds", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="seed of every random draw", min=0)] = None,
    engine: Annotated[
        Engine,
        typer.Option(help="where clients run. ray: simulation by flwr run; local: this process; deploy: real nodes"),
    ] = "ray",
    superlink: Annotated[
        str | None, typer.Option(help="for --engine deploy: name of a connection in Flower's configuration")
    ] = None,
    client_cpus: Annotated[int | None, typer.Option(help="CPUs of each virtual client", min=1)] = None,
    client_gpus: Annotated[float | None, typer.Option(help="GPU fraction of each virtual client", min=0)] = None,
    out: Annotated[Path | None, typer.Option(help="run directory (default ./runs/...)")] = None,
    resume: Annotated[Path | None, typer.Option(help="continue the run in this directory")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show configuration and traffic without training")] = False,
    scale: Scale = None,
    track: Track = None,
    sets: Set = None,
) -> None:
    """Run one federation and write a run directory.

    Exit codes: 0 every round had enough valid replies; 1 the run failed; 2 invalid request; 130 interrupted.
    """
    if engine != "deploy" and clients is not None and clients < 1:
        raise BadRequest(f"--clients {clients}: a simulation has at least 1 client")
    if engine != "deploy" and superlink is not None:
        raise BadRequest("--superlink needs --engine deploy: add it, or leave out --superlink")
    options = {
        "method": method, "dataset": dataset, "clients": clients, "num-server-rounds": rounds, "seed": seed,
        "track": ",".join(track) if track else None, "out": None if out is None else str(out),
    }  # fmt: skip
    recipe = found(file)
    if resume is not None and scale is not None:
        raise BadRequest("--resume takes all settings but --rounds from the run: leave out --scale")
    values = collect(options, sets, recipe.settings if recipe else None, scale)
    out = Path(place) if (place := values.pop("out", "")) else None
    terminal.announce("reading settings and data")
    from fedapp import config
    from fedapp.engines import local as engines
    from fedapp.engines import runner

    if resume is None and "method" not in values:
        echo(f"no method given: {config.DEFAULTS['method']}", err=True)
    if resume is not None:
        values = engines.resumed(resume, values, *(["the file"] if file else []), out=out)
        out = resume
    elif values.get("resume"):
        raise BadRequest("resume = true names no run: give --resume DIR")
    if engine == "deploy":
        from fedapp.engines import deploy

        if client_cpus is not None or client_gpus is not None:
            raise BadRequest("--client-cpus and --client-gpus need --engine ray: leave them out for real nodes")
        raise typer.Exit(deploy.run(values, out, superlink, dry_run))
    raise typer.Exit(runner.run_and_report(values, out, engine, client_cpus, client_gpus, dry_run))


@app.command(rich_help_panel="Run")
def partition(
    file: File = None,
    dataset: Annotated[str | None, typer.Option(help="data set")] = None,
    clients: Annotated[int | None, typer.Option(help="number of clients (default 10)", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="seed", min=0)] = None,
    out: Annotated[Path | None, typer.Option(help="folder for partition.npz and partition.png")] = None,
    sets: Set = None,
) -> None:
    """Show the division of the data: classes x clients and sizes.

    --out adds a figure.
    """
    from fedapp import config
    from fedapp.data.card import data_card, leaks
    from fedapp.results.figures import maps
    from fedapp.tasks import simulated as tasks

    recipe = found(file)
    options = {"dataset": dataset, "clients": clients, "seed": seed}
    values = collect(options, sets, recipe.settings if recipe else None)
    settings = tasks.settled(config.from_flat(values), 10)
    data = tasks.federated(settings, settings.data.clients)
    card = data_card(data.dataset, data.partition)
    echo(card.text())
    for warning in leaks(data.dataset, data.partition):
        echo(f"warning: {warning}")
    echo(f"hash {data.partition.hash}")
    if out is not None:
        with explained(f"{out} cannot be written", "choose another --out"):
            out.mkdir(parents=True, exist_ok=True)
            data.partition.save(out / "partition.npz")
            maps.label_heat(card.train, card.classes).savefig(out / "partition.png", facecolor="white")
        echo(f"written to {out}")


@app.command(rich_help_panel="Run")
def compare(
    file: File = None,
    methods: Annotated[
        str | None,
        typer.Option(help='comma-separated ids, optionally with values of their own: "local,fedprox(mu=0.1 lr=0.01)"'),
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="data set")] = None,
    datasets: Annotated[str, typer.Option(help="several data sets, comma-separated")] = "",
    partitions: Annotated[
        str, typer.Option(help='several partitions, with alpha or classes per client: "pathological:2,dirichlet:0.1"')
    ] = "",
    sweep: Annotated[
        str, typer.Option(help='several values of a common key, each a setting: "fraction-train=0.1,0.5,1"')
    ] = "",
    grid: Annotated[
        str,
        typer.Option(
            help="search hyperparameters of the methods: every point is run, the score on validation rows chooses "
            '(with --set validation=0.1): "lr=0.01,0.1;fedprox.mu=0.1,1"'
        ),
    ] = "",
    tune: Annotated[
        str,
        typer.Option(
            help="search common keys, the same values for every method, with the first seed; the chosen values run "
            'with all seeds: "lr=0.01,0.03,0.1"'
        ),
    ] = "",
    on: Annotated[str, typer.Option(help="rows on which --tune chooses: validation")] = "",
    clients: Annotated[int | None, typer.Option(help="number of clients (default 10)", min=1)] = None,
    rounds: Annotated[int | None, typer.Option(help="total number of rounds", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="first seed", min=0)] = None,
    seeds: Annotated[int, typer.Option(help="number of seeds; intervals need 3", min=1)] = 3,
    reference: Annotated[
        str | None, typer.Option(help="method that the others are compared with (default: local, added where absent)")
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(help="count rounds and bytes to this accuracy, such as 0.9 (default: the reference's last)"),
    ] = None,
    engine: Annotated[
        Literal["ray", "local"],
        typer.Option(help="where runs are done. local: processes of this machine; ray: flwr run"),
    ] = "local",
    workers: Annotated[
        int | None, typer.Option(help="for --engine local: processes at a time (default: one per core)", min=1)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="folder of the comparison (default ./runs/compare-...); an existing one is continued"),
    ] = None,
    scale: Scale = None,
    track: Track = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="print failures only")] = False,
    sets: Set = None,
) -> None:
    """Compare methods on the same data, partition and sampled clients.

    Repeat the command with its --out to continue an interrupted comparison.

    Without --methods: the rows of the recipe, else the file's method and training alone. Exit codes as fedapp run.
    """
    recipe = found(file)
    options = {
        "dataset": dataset, "clients": clients, "num-server-rounds": rounds, "seed": seed,
        "track": ",".join(track) if track else None,
    }  # fmt: skip
    if on and not tune:
        raise BadRequest(f"--on {on} goes with --tune: add --tune lr=0.01,0.03,0.1, or leave out --on")
    if tune and on != "validation":
        raise BadRequest(f"--tune chooses on validation rows{f', not on {on} rows' if on else ''}: add --on validation")
    values = collect(options, sets, recipe.settings if recipe else None, scale)
    given = set(collect(options, sets))
    lists = {"dataset": listed(datasets), "partition": listed(partitions)}
    for key, several in lists.items():
        if several and key in given:
            raise BadRequest(
                f"{key} is given twice: --{key}s {','.join(several)}, and {key} = {values[key]!r}; give it once"
            )
    for key in ("out", "resume"):
        values.pop(key, None)
    if methods is None:
        methods = (recipe.methods if recipe else "") or (f"local,{values['method']}" if "method" in values else "")
    with terminal.quiet(quiet):
        terminal.announce("reading settings and data")
        from fedapp.experiments import compare as comparing  # slow to load: refusals above come first

        plan = comparing.Plan(
            values, methods or comparing.DEFAULT_METHODS, seeds, lists["dataset"], lists["partition"], sweep, grid,
            tune, reference, target,
        )  # fmt: skip
        code = comparing.run(plan, out, engine, workers)
    raise typer.Exit(code)


@app.command(rich_help_panel="Run")
def features(
    data: Annotated[str, typer.Argument(help="data set, or a file or folder of your own data", metavar="DATA")],
    body: Annotated[
        str, typer.Option("--with", help="efficientnet-lite0, minilm, FILE.onnx or module:function", metavar="BODY")
    ],
    out: Annotated[Path, typer.Option(help="file to write, .npz; repeat the command to continue one")],
    weights: Annotated[str, typer.Option(help="for module:function: file of its weights")] = "",
    size: Annotated[int, typer.Option(help="side in pixels to which pictures are resized", min=0)] = 0,
    mean: Annotated[str, typer.Option(help="for pictures: mean of grey levels 0 .. 255, or one for each channel")] = "",
    std: Annotated[str, typer.Option(help="the same for their standard deviation")] = "",
    text: Annotated[str, typer.Option(help="column of texts in a .csv, .json or .parquet file")] = "",
    tokenizer: Annotated[str, typer.Option(help="for FILE.onnx on texts: its tokenizer.json")] = "",
    tokens: Annotated[int, typer.Option(help="most tokens of a text (default 256)", min=0)] = 0,
    workers: Annotated[int | None, typer.Option(help="processes (default: one per core)", min=1)] = None,
    sets: Set = None,
) -> None:
    """Extract features once with a pretrained body, for heads on top of them.

    Labels, clients, splits and groups of the data are kept.
    """
    from fedapp import plugins
    from fedapp.bodies import known
    from fedapp.engines import extraction

    plugins.import_code_next_to(Path("run.toml"))
    given = extraction.source(data, text, collect({}, sets))
    levels = {name: known.levels(f"--{name}", text) for name, text in (("mean", mean), ("std", std)) if text}
    chosen = known.chosen(body, weights, size, **levels, tokenizer=tokenizer, tokens=tokens)
    with terminal.counting("rows") as progress:
        found = extraction.extract(given, chosen, out, workers, progress)
    about = found.about
    echo(f"{found.rows} rows of {about['width']} features, {about['dead-columns']} of them 0 everywhere")
    if left := about.get("left-out"):
        echo(f"{len(left)} left out because they cannot be used: {', '.join(left[:5])}{', ...' if left[5:] else ''}")
    if cut := about.get("texts-cut"):
        echo(f"{cut} texts have more than {about['tokens']} tokens and were cut")
    echo(f"body {about['name']} {about['body'][:8]}, {found.seconds:.0f} s, written to {found.out}")
    echo(
        f"next: fedapp compare --dataset npz --set {shlex.quote(f'data-dir={found.out}')} --methods "
        '"local,lda(personal=true),fed3r(personal=true)"'
    )


Client = Annotated[
    str | None, typer.Option(help="number of the client, as in final.csv, or its name in the data (name:3 if a number)")
]
RunFolder = Annotated[
    Path | None, typer.Option("--run", help="run directory, or a node's STATE-DIR/<federation>", metavar="DIR")
]

WithBody = Annotated[
    str,
    typer.Option(
        "--with",
        help="take raw pictures or texts: the body on whose features the model was trained, as in 'text.onnx "
        "tokenizer=tokenizer.json'; if the run has several heads: the first 8 digits of the body, "
        "as `fedapp features` prints them",
        metavar="BODY",
    ),
]
Allow = Annotated[
    str, typer.Option(help="own models in stored files whose code may be imported, such as 'mypkg.*'", metavar="NAMES")
]


def _loaded(run: Path, client: str | None, received: bool = False, allow: str = "", body: str = "") -> Any:
    """Load the model that the command line names; without a client the global model."""
    from fedapp.results.loading import load, load_with_body

    number = int(client) if client is not None and client.isdecimal() else client
    number = number.removeprefix("name:") if isinstance(number, str) else number
    how: dict[str, Any] = {"client": number, "point": "received" if received else "trained", "allow": allow}
    return load_with_body(run, body, **how) if body else load(run, **how)


@app.command(rich_help_panel="Use a model")
def predict(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="pictures or folders of them, .npz files (column x), or tables, .csv or .parquet", metavar="FILE..."
        ),
    ],
    run: RunFolder = None,
    client: Client = None,
    received: Annotated[bool, typer.Option("--received", help="the client's model before local training")] = False,
    model: Annotated[
        Path | None, typer.Option(help="instead of --run: a personal.safetensors, or a run's models/last.safetensors")
    ] = None,
    body: WithBody = "",
    text: Annotated[str, typer.Option(help="with --with: column of texts in a .csv, .json or .parquet file")] = "",
    top: Annotated[int, typer.Option(min=1, help="number of classes to show per sample")] = 3,
    dataset: Annotated[str, typer.Option(help="for a server's model: the data set it was trained on")] = "",
    out: Annotated[Path | None, typer.Option(help="also write classes and probabilities to this .csv file")] = None,
    allow: Allow = "",
) -> None:
    """Classify samples with a model that a run or a node saved."""
    from fedapp import plugins
    from fedapp.results import predict as predicting
    from fedapp.results.cells import write_table

    plugins.import_code_next_to(Path("run.toml"))
    if (run is None) == (model is None):
        raise BadRequest("give --run DIR, perhaps with --client, or --model FILE")
    if run is None and (client is not None or received):
        raise BadRequest("--client and --received go with --run: a model file holds one model")
    if run is not None and dataset:
        raise BadRequest("--dataset goes with --model: the data set of a run is known")
    if text and not body:
        raise BadRequest("--text goes with --with: the body that turns texts into features")
    if model is not None:
        head = predicting.read_model(model, dataset, allow=allow)
        net = head.with_body(body) if body else head
    else:
        net = _loaded(run or Path(), client, received, allow, body)
    found = predicting.run(net, files, text)
    if out is not None:
        with explained(f"{out} cannot be written", "choose another --out"):
            write_table(out, found)
    probabilities = found.filter(regex="^p_").to_numpy()
    order = (-probabilities).argsort(axis=1, kind="stable")[:, :top]
    heads = ["sample", *(f"{place}." for place in range(1, order.shape[1] + 1))]
    cells, piped = [], []
    for name, places, p in zip(found["sample"], order, probabilities, strict=True):
        cells.append([name, *(f"{net.classes[i]} {100 * p[i]:.1f} %" for i in places)])
        piped.append([name, *(text for i in places for text in (net.classes[i], f"{p[i]:.4f}"))])
    if not on_terminal():
        echo(net.about, err=True)
    show(net.about, heads, cells, piped)


@app.command(rich_help_panel="Use a model")
def export(
    run: Annotated[Path, typer.Argument(help="run directory, or a node's STATE-DIR/<federation>", metavar="DIR")],
    out: Annotated[Path, typer.Option(help="file to write")],
    to: Annotated[Literal["pt2", "onnx"], typer.Option(help="pt2: torch.export; onnx needs fedapp[onnx]")] = "pt2",
    client: Client = None,
    received: Annotated[bool, typer.Option("--received", help="the client's model before local training")] = False,
    body: WithBody = "",
    allow: Allow = "",
) -> None:
    """Write a trained model as one graph on raw samples.

    The graph holds the transform. It is checked against the module.
    """
    from fedapp import plugins
    from fedapp.results import exporting

    plugins.import_code_next_to(Path("run.toml"))
    net = _loaded(run, client, received, allow, body)
    difference = exporting.write(net, to, out)
    echo(f"{net.about}\ntakes {net.wanted()}, returns logits (N, {len(net.classes)})")
    echo(f"largest difference from the module on {exporting.CHECKED} samples: {difference:.2g}\nwritten to {out}")


@app.command(rich_help_panel="Look at results")
def report(
    directory: Annotated[Path, typer.Argument(help="a run directory, or a folder with run directories", metavar="DIR")],
    figures: Annotated[
        Path | None, typer.Option(help="also write the figures as PNG and SVG files to this folder")
    ] = None,
    allow: Allow = "",
) -> None:
    """Write a page about a run or a comparison that opens offline.

    The page is DIR/report.html.
    """
    from fedapp import plugins
    from fedapp.results import report as reporting
    from fedapp.results.directory import short_path

    with plugins.only(allow, installed=True):
        page = reporting.write(directory, figures)
    echo(f"report: {short_path(page)}")
    if figures is not None:
        echo(f"figures: {absolute(figures)}")


@app.command("show", rich_help_panel="Look at results")
def show_results(
    directory: Annotated[Path, typer.Argument(help="a run directory, or the folder of a comparison", metavar="DIR")],
    everything: Annotated[bool, typer.Option("--all", help="all methods, alerts and tables")] = False,
) -> None:
    """Show the answer of a finished comparison, or the scores of a finished run."""
    from fedapp.data.names import is_there
    from fedapp.results.runs import RUN_MARK, Comparison, folder_at, read_comparison, read_run

    path = folder_at(directory)
    if is_there(path / RUN_MARK):
        from fedapp.engines.runner import print_run

        print_run(read_run(path), everything)
        return
    from fedapp.results import answers

    echo(answers.screen(Comparison(path, ()), everything))
    if everything:
        from fedapp.results import tables

        tables.print_tables(read_comparison(path))


@app.command("track", rich_help_panel="Look at results")
def track_runs(
    directory: Annotated[Path, typer.Argument(help="a run directory, or a folder with run directories", metavar="DIR")],
    to: Annotated[list[str], typer.Option(help="tensorboard, mlflow, wandb or a package's; repeatable")],
) -> None:
    """Send finished runs to a tracker, or the part that it lacks."""
    from fedapp.results.runs import RunResult, read
    from fedapp.tracking import following

    found = read(directory)
    runs, names = [found] if isinstance(found, RunResult) else found.runs, ",".join(to)
    complete = [following.track(r, names, lambda e: echo(e["text"]) if "text" in e else None) for r in runs]
    if not all(complete):
        raise typer.Exit(1)


for _listed in (listing.methods, listing.keys, listing.models, listing.datasets, listing.partitions, listing.recipes):
    app.command(rich_help_panel="Lists")(_listed)

ANY_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}
DEVICES = "Real devices"
for _passed_on in (deployment.superlink, deployment.supernode):
    app.command(context_settings=ANY_OPTIONS, rich_help_panel=DEVICES)(_passed_on)
app.command(rich_help_panel=DEVICES)(deployment.admit)
app.add_typer(deployment.operator, name="operator", rich_help_panel=DEVICES)
app.add_typer(deployment.deployment, name="deploy", rich_help_panel=DEVICES)


@app.command("figure", context_settings=ANY_OPTIONS, rich_help_panel="Papers")
@app.command("reproduce", context_settings=ANY_OPTIONS, rich_help_panel="Papers")
def elsewhere(context: typer.Context) -> None:
    """Point to `python -m reproduction` of a clone.

    The package holds no figures or claims of the papers.
    """
    command = "figure" if context.info_name == "figure" else "claim"
    raise BadRequest(f"{context.info_name} needs a clone of the repository: python -m reproduction {command}")
