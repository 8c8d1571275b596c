"""Several methods on the same data, partition and sampled clients: run directories, one tidy table, one report.

`DIR/runs/<method>-s<seed>/` are full run directories; finished ones are not run again, broken ones are continued from
their last checkpoint. `DIR/results.csv` holds a row a run.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import typer
from rich.console import Console
from rich.table import Table

from fedapp import config as configuration
from fedapp import engine as engines
from fedapp import launch, registry, runner, tasks
from fedapp.config import RunConfig
from fedapp.data.partitions import data_card
from fedapp.errors import BadRequest


@dataclass(frozen=True)
class Job:
    """One run of a comparison."""

    method: str
    seed: int
    config: RunConfig

    @property
    def out(self) -> Path:
        """The run directory."""
        return Path(self.config.out)


def jobs_of(values: Mapping[str, Any], methods: Sequence[str], seeds: int, out: Path) -> list[Job]:
    """Make the effective configuration of every run and check it before anything is trained.

    Raises
    ------
    BadRequest : an unknown method, none at all, or a configuration that one of the methods refuses.
    """
    if not methods:
        raise BadRequest("no method given: --methods local,fedavg,...")
    if seeds < 1:
        raise BadRequest(f"--seeds {seeds}: at least 1")
    for method in methods:
        registry.get(method)
    if len(set(methods)) < len(methods):
        raise BadRequest("a method is named twice in --methods")
    first = int(values.get("seed", 0))
    jobs = []
    for seed in range(first, first + seeds):
        for method in methods:
            folder = out / "runs" / f"{method}-s{seed}"
            config = engines.effective({**values, "method": method, "seed": seed}).replaced(out=str(folder))
            tasks.check(config, config.clients)
            jobs.append(Job(method, seed, config))
    return jobs


def pending_config(config: RunConfig) -> RunConfig | None:
    """Return what is still to run: None if the run is complete, a resuming configuration if it broke off.

    Raises
    ------
    BadRequest : the directory holds a run with another configuration.
    """
    out = Path(config.out)
    saved = out / "config.toml"
    if not saved.is_file():
        if out.is_dir():
            shutil.rmtree(out)
        return config
    if configuration.from_flat(configuration.read_toml(saved)) != config:
        raise BadRequest(f"{out} holds a run with another configuration; give a new --out")
    if engines.summary_of(out).get("ok"):
        return None
    if any((out / "checkpoint").glob("*.safetensors")):
        return config.replaced(resume=True)
    shutil.rmtree(out)
    return config


def differences(jobs: Sequence[Job]) -> list[str]:
    """Name the training settings in which methods differ, since `auto` is each method's own."""
    first = {j.method: j.config.to_flat() for j in reversed(jobs)}
    lines = []
    for key in ("lr", "optimizer", "momentum", "weight-decay", "clip", "augment"):
        values = {m: flat[key] for m, flat in first.items()}
        if len(set(values.values())) > 1:
            lines.append(f"{key}: " + ", ".join(f"{m} {v}" for m, v in values.items()))
    return lines


def run(values: Mapping[str, Any], methods: Sequence[str], seeds: int, out: Path, engine: str) -> int:
    """Run a comparison and print its table; returns the exit code (1 if any run did not end well)."""
    out = out.expanduser().absolute()
    jobs = jobs_of(values, methods, seeds, out)
    (out / "runs").mkdir(parents=True, exist_ok=True)
    data = tasks.federated(jobs[0].config, jobs[0].config.clients)
    typer.echo(data_card(data.dataset, data.partition).text(), err=True)
    todo = [(job, config) for job in jobs if (config := pending_config(job.config)) is not None]
    if len(todo) < len(jobs):
        typer.echo(f"{len(jobs) - len(todo)} of {len(jobs)} runs are there already", err=True)
    failed: list[str] = []
    if engine == "ray" and todo:
        resources = launch.choose_resources(jobs[0].config.clients)
        with launch.Session(log=out / "superlink.log", ray_cpus=resources.total_cpus) as session:
            for job, config in todo:
                with runner.Follower(f"{job.method} s{job.seed}") as follower:
                    if runner.run_in(session, config, resources, follower):
                        failed.append(job.out.name)
    else:
        for job, config in todo:
            with runner.Follower(f"{job.method} s{job.seed}") as follower:
                if runner.local(config, follower):
                    failed.append(job.out.name)
    table = collect(jobs)
    table.to_csv(out / "results.csv", index=False)
    print_table(table, differences(jobs))
    typer.echo(f"results: {out}")
    if failed:
        typer.echo(f"did not end well: {', '.join(failed)} (run the same command again to continue)", err=True)
    return 1 if failed else 0


def collect(jobs: Sequence[Job]) -> pd.DataFrame:
    """Return a row a finished run: scores by protocol, traffic, time."""
    rows = []
    for job in jobs:
        summary = engines.summary_of(job.out)
        if not summary.get("ok"):
            continue
        row: dict[str, Any] = {
            "method": job.method, "dataset": job.config.dataset, "partition": job.config.partition, "seed": job.seed,
            "clients": summary["clients"], "rounds": summary["rounds"],
        }  # fmt: skip
        for protocol in configuration.PROTOCOLS:
            scores = summary["accuracy"].get(protocol, {})
            for name in ("last", "best", "last_std", "balanced"):
                row[f"{protocol}_{name}"] = scores.get(name)
        calibration = summary.get("calibration") or {}
        row.update({f"calibration_{k}": calibration.get(k) for k in ("before", "after")})
        row.update(bytes_up=summary["bytes_up"], bytes_down=summary["bytes_down"], dropped=summary["dropped"])
        row.update(test_mean=summary["test_sizes"]["mean"], run_seconds=summary["seconds"])
        rows.append(row)
    return pd.DataFrame(rows)


def spread(values: pd.Series) -> str:
    """Format mean and spread over seeds (ddof 1) in percent."""
    numbers = pd.to_numeric(values, errors="coerce").dropna()
    if numbers.empty:
        return "-"
    text = f"{100 * numbers.mean():.1f}"
    return f"{text} ± {100 * numbers.std(ddof=1):.1f}" if len(numbers) > 1 else text


def print_table(table: pd.DataFrame, notes: Sequence[str]) -> None:
    """Print local and balanced accuracy in both protocols, a row a method."""
    if table.empty:
        return
    columns = {
        "local received": "received_last", "local trained": "trained_last", "balanced received": "received_balanced",
        "balanced trained": "trained_balanced", "global": "global_last",
    }  # fmt: skip
    seeds = table["seed"].nunique()
    title = f"{table['dataset'].iloc[0]}, {table['partition'].iloc[0]}, {table['clients'].iloc[0]} clients, after "
    title += f"{int(np.max(table['rounds']))} rounds, in %" + (f", mean ± std over {seeds} seeds" if seeds > 1 else "")
    shown = Table(title=title)
    shown.add_column("method")
    for name in columns:
        shown.add_column(name, justify="right")
    shown.add_column("bytes up", justify="right")
    for method in dict.fromkeys(table["method"]):
        rows = table[table["method"] == method]
        cells = [spread(rows[c]) for c in columns.values()]
        shown.add_row(registry.get(method).title, *cells, f"{rows['bytes_up'].mean():,.0f}")
    console = Console(highlight=False)
    console.print(shown)
    lines = [
        "local: own test split, mean over clients; balanced: mean recall over all classes on all clients' test images.",
        "received: as handed out, before local training; trained: after it. All methods share partition and sampling.",
        f"test images per client: {table['test_mean'].mean():.0f} on average, so one image is "
        f"{100 / max(1.0, float(table['test_mean'].mean())):.1f} points of one client's local score.",
    ]
    console.print("\n".join([*lines, *(f"settings differ, {n}" for n in notes)]))


def read(out: Path) -> pd.DataFrame:
    """Read a comparison's table back."""
    path = out / "results.csv"
    if not path.is_file():
        raise BadRequest(f"{out} holds no comparison (no results.csv)")
    return pd.read_csv(path)
