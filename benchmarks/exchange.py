"""What a round costs on real nodes: `python -m benchmarks.exchange`.

Two nodes train FedAvg on handwritten digits with TLS and node keys, each in processes of its own on this machine: with
`fedapp supernode`, with nodes that import everything for each message (`--cold`), and with Flower's own SuperLink, in
turns. It also counts the processor seconds of all processes by their kinds.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pandas as pd
import psutil
import typer

from benchmarks.pages import markdown
from fedapp import process
from tests.deployment import NODES, Deployment, deployed, until


class Plain(Deployment):
    """The same deployment with Flower's own SuperLink, which has one listener for nodes and operators."""

    def superlink(self, *more: str) -> None:
        """Start it; operators use the nodes' port."""
        words = self.command("superlink")
        files = words[words.index("--ssl-ca-certfile") :]
        config = self.folder / "vol-superlink" / "flwr" / "config.toml"
        config.write_text(config.read_text().replace(f"localhost:{self.private}", f"localhost:{self.port}"))
        self.private = self.port
        host = ("--host", "127.0.0.1", "--port", str(self.port), "--enable-supernode-auth")
        started = self.start("superlink", "flower-superlink", *host, *files, *more)
        until(lambda: self.healthy() or started.poll() is not None, 60, "SuperLink answers /health")
        if started.poll() is not None:
            raise RuntimeError(self.log("superlink")[-2000:])


KINDS: dict[str, tuple[type[Deployment], bool]] = {
    "fedapp supernode": (Deployment, False),
    "fedapp supernode --cold": (Deployment, True),
    "--cold, flower-superlink": (Plain, True),
}
"""The deployments, and whether their nodes import everything for each message."""
PROGRAMS = {
    "fedapp/deployment/warm.py": "warm processes",
    "fedapp supernode": "SuperNodes",
    "flwr-serverapp": "the server's process",
    "fedapp superlink": "SuperLink",
    "flower-superlink": "SuperLink",
    "flower-superexec": "executors",
}
"""Kinds of processes by a part of their command lines; the first that fits counts."""
MESSAGES = "messages"


@dataclass
class Turn:
    """What was measured in one run: seconds of its rounds but the first, processor seconds by kind, messages."""

    seconds: list[float] = field(default_factory=list)
    used: dict[str, float] = field(default_factory=dict)
    messages: int = 0


def used(it: Deployment) -> dict[str, float]:
    """Return the processor seconds of a deployment until now, by the kinds of its processes."""
    found: dict[str, float] = defaultdict(float)
    for each in it.family():
        with contextlib.suppress(psutil.Error):
            times, line, above = each.cpu_times(), " ".join(each.cmdline()), each.parent()
            kind = next((kind for words, kind in PROGRAMS.items() if words in line), "")
            if kind == "executors" and not (above and "fedapp supernode" in " ".join(above.cmdline())):
                kind = "the server's executor"
            if kind:
                found[kind] += times.user + times.system
            if kind in ("executors", "warm processes"):  # their children are messages, or who asks for them
                found[MESSAGES] += times.children_user + times.children_system
    return found


def run(kind: type[Deployment], cold: bool, folder: Path, rounds: int) -> Turn:
    """Return what a run of so many rounds took."""
    out, turn = folder / "run", Turn()
    with deployed(folder / "deployment", kind, nodes=NODES[:2]) as it:
        it.up(*NODES[:2], parts=2, cold=cold)
        time.sleep(5)  # warm processes have imported what they need
        before = used(it)
        done = it.begin(
            "run", "--engine", "deploy", "--superlink", "superlink", "--method", "fedavg", "--clients", "2",
            "--rounds", str(rounds), "--out", str(out),
        )  # fmt: skip
        most: dict[str, float] = {}
        while done.poll() is None:
            time.sleep(0.5)
            most |= {kind: max(seconds, most.get(kind, 0.0)) for kind, seconds in used(it).items()}
        if done.returncode:
            raise RuntimeError(it.log("fedapp")[-2000:])
        most |= used(it)
        turn.used = {kind: seconds - before.get(kind, 0.0) for kind, seconds in most.items()}
        turn.messages = sum(it.log(name).count("Receiving: ") for name in NODES[:2])
    turn.seconds = [float(took) for took in pd.read_csv(out / "rounds.csv")["round_seconds"][1:]]
    return turn


def main(
    turns: int = 2,
    rounds: Annotated[int, typer.Option(help="rounds of a run; the first is not counted")] = 7,
) -> None:
    """Print the tables, and what every turn took."""
    done: dict[str, list[Turn]] = {kind: [] for kind in KINDS}
    for turn in range(turns):
        for name in list(done)[:: -1 if turn % 2 else 1]:
            with tempfile.TemporaryDirectory(prefix="fedapp-bench-") as folder:
                found = run(*KINDS[name], Path(folder), rounds)
            print(f"turn {turn + 1}, {name}: " + ", ".join(f"{took:.1f}" for took in found.seconds), flush=True)
            done[name].append(found)
    print("\n".join(table(done)))
    print(f"\n{psutil.cpu_count()} cores of {process.processor()}; load {psutil.getloadavg()[1]:.1f} at the end")


def table(turns: dict[str, list[Turn]]) -> list[str]:
    """Return the lines of two tables."""
    rows = []
    for name, done in turns.items():
        found = [took for turn in done for took in turn.seconds]
        each = sum(turn.used.get(MESSAGES, 0.0) for turn in done) / max(1, sum(turn.messages for turn in done))
        spread = f"{min(found):.2f} to {max(found):.2f}"
        rows.append((f"`{name}`", f"{statistics.median(found):.2f}", spread, len(found), f"{each:.2f}"))
    rounds = markdown("nodes|seconds a round, median:|min to max:|rounds:|processor seconds a message:", rows)
    kinds = sorted({kind for done in turns.values() for turn in done for kind in turn.used})
    means = [
        (kind, *(f"{statistics.mean(turn.used.get(kind, 0.0) for turn in done):.1f}" for done in turns.values()))
        for kind in kinds
    ]
    heads = "|".join(["processor seconds of a run", *(f"`{name}`:" for name in turns)])
    return [*rounds, "", *markdown(heads, means)]


if __name__ == "__main__":
    typer.run(main)
