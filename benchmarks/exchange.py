"""What `fedapp superlink` costs a round on real nodes, beside Flower's own SuperLink: `python -m benchmarks.exchange`.

Two nodes train FedAvg on handwritten digits under either SuperLink in turns, with TLS and node keys, each in processes
of its own on this machine. A round is mostly the start of two processes that import PyTorch.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

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


KINDS = {"fedapp superlink": Deployment, "flower-superlink": Plain}


def run(kind: type[Deployment], folder: Path, rounds: int, settings: Sequence[str]) -> list[float]:
    """Return the seconds of all rounds but the first."""
    out = folder / "run"
    with deployed(folder / "deployment", kind, nodes=NODES[:2]) as it:
        it.up(*NODES[:2], parts=2)
        sets = [word for pair in settings for word in ("--set", pair)]
        done = it.run(
            "run", "--engine", "deploy", "--superlink", "superlink", "--method", "fedavg", "--clients", "2",
            "--rounds", str(rounds), "--out", str(out), *sets,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    return [float(took) for took in pd.read_csv(out / "rounds.csv")["round_seconds"][1:]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and what every turn took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7, help="of a run, of which the first does not count")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a run-config key")
    given = parser.parse_args(arguments)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(given.turns):
        for name in list(KINDS)[:: -1 if turn % 2 else 1]:
            with tempfile.TemporaryDirectory(prefix="fedapp-bench-") as folder:
                found = run(KINDS[name], Path(folder), given.rounds, given.set)
            print(f"turn {turn + 1}, {name}: " + ", ".join(f"{took:.1f}" for took in found), flush=True)
            seconds[name] += found
    print("\n".join(table(seconds)))


def table(seconds: dict[str, list[float]]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield "| SuperLink | seconds a round, median | min to max | rounds |"
    yield "|---|---:|---:|---:|"
    for name, found in seconds.items():
        yield f"| `{name}` | {statistics.median(found):.2f} | {min(found):.2f} to {max(found):.2f} | {len(found)} |"


if __name__ == "__main__":
    main()
