"""Time of a pretrained body and of a head that is trained alone: `python -m benchmarks.frozen DIR`.

DIR holds `cifar10.npz`, `fashion_mnist.npz`, and `banking77.csv` with the columns text and label. Alternatives run in
turns on an idle machine:

- extraction in one process against the bare forward pass: the same session over the same batches, ready in memory.
  Imports, the start of the session, and reading (of rows, or of tokens of texts) are excluded; processor seconds;
- a round of FedRep (ten epochs of the head, one of the body) against one of FedAvg (one epoch): Fashion-MNIST, 20
  clients, Dirichlet 0.1, under Ray with one worker per core; seconds.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import numpy as np
import pandas as pd
import typer

from benchmarks.pages import markdown
from benchmarks.rounds import Scale, Visits
from benchmarks.timing import Times, alternate
from fedapp import process
from fedapp.bodies import extraction, known
from fedapp.bodies.extraction import Source
from fedapp.bodies.extractor import Extractor
from fedapp.bodies.known import Body
from fedapp.settings import DataSettings

LIMITS = {"extraction / forward pass, pictures": 1.15, "extraction / forward pass, sentences": 1.15,
          "round of FedRep / of FedAvg": 1.8}  # fmt: skip
"""Upper limits of the ratios."""


class Recorder:
    """A session that keeps its inputs."""

    def __init__(self, session: Any) -> None:
        self.session, self.inputs = session, list[dict[str, Any]]()

    def run(self, names: None, inputs: dict[str, Any]) -> Any:
        """Run the session."""
        self.inputs.append(inputs)
        return self.session.run(names, inputs)


def processor_seconds(call: Callable[[], object]) -> float:
    """Call and return the seconds of this process."""
    started = time.process_time()
    call()
    return time.process_time() - started


def extracted(given: Source, body: Body, folder: Path, turns: int) -> Times:
    """Return the processor seconds of `extraction` without reading, of the `forward` pass, and of `reading`."""
    out, extractor = folder / "features.npz", Extractor(body)
    session = extractor._session
    extractor._session = recorder = Recorder(session)
    chunks, found = extraction.Chunks(folder, "", len(given)), given.found

    def extract() -> None:
        with mock.patch.object(extraction, "Extractor", return_value=extractor):
            extraction.extract(given, body, out, extraction.in_turn, lambda done, rows: None)
        out.unlink()

    def read() -> None:
        for rows in map(chunks.rows, range(len(chunks))):
            if isinstance(found, list):
                extractor.tokens(found[rows.start : rows.stop])
            else:
                found.take(np.arange(rows.start, rows.stop))

    extract()
    extractor._session = session
    last: list[float] = []

    def reading() -> float:
        last[:] = [processor_seconds(read)]
        return last[0]

    alternatives: dict[str, Callable[[], object]] = {
        "reading": reading,
        "extraction": lambda: processor_seconds(extract) - last[0],
        "forward": partial(processor_seconds, lambda: [session.run(None, inputs) for inputs in recorder.inputs]),
    }
    return alternate(alternatives, turns)


def rounds(data: Path, folder: Path, scale: Scale) -> Times:
    """Return the seconds of a round of `fedrep` and of `fedavg`."""
    common = {"dataset": "fashion_mnist", "split": "auto", "batch-size": 16, "lr": 0.01}
    visits = {name: Visits(data, folder / name, scale, method=name, **common) for name in ("fedrep", "fedavg")}
    for visit in visits.values():
        visit.warm_up()
    return alternate(visits, scale.repeats, warmup=0)


def table(found: dict[str, tuple[Times, str, str]]) -> list[str]:
    """Return the lines of a table: the ratio of two alternatives, and the seconds of all."""
    rows = []
    for name, (times, slow, fast) in found.items():
        ratios, limit = times.ratios(slow, fast), LIMITS[name]
        seconds = ", ".join(f"{key} {times.median(key):.2f}" for key in times.seconds)
        value = times.ratio(slow, fast)
        rows.append((name, f"{value:.2f}", f"{ratios[0]:.2f} to {ratios[-1]:.2f}", len(ratios), f"{limit:g}",
                     "reached" if value <= limit else "not reached", seconds))  # fmt: skip
    return markdown("ratio|median over turns:|min to max:|turns:|at most:||seconds, median", rows)


def main(
    data: Annotated[Path, typer.Argument(help="folder of the three files")],
    turns: int = 6,
    pictures: Annotated[int, typer.Option(help="rows of CIFAR-10; a row takes 0.2 MB of memory")] = 4000,
    sentences: Annotated[int, typer.Option(help="rows of Banking77")] = 4000,
    clients: int = 20,
) -> None:
    """Print the ratios."""
    process.prepare(1)
    data, (of_pictures, of_texts, of_rounds) = data.expanduser().absolute(), LIMITS
    with tempfile.TemporaryDirectory(prefix="fedapp-bench-") as name:
        folder = Path(name)
        with np.load(data / "cifar10.npz") as arrays:
            np.savez(folder / "pictures.npz", x=arrays["x_train"][:pictures], y=arrays["y_train"][:pictures])
        pd.read_csv(data / "banking77.csv")[:sentences].to_csv(folder / "texts.csv", index=False)
        found = {}
        for key, file, text, body in (
            (of_pictures, "pictures.npz", "", "efficientnet-lite0"), (of_texts, "texts.csv", "text", "minilm")
        ):  # fmt: skip
            columns = DataSettings(columns="y=label" if text else "")
            given = extraction.of_files(folder / file, text, columns)
            found[key] = extracted(given, known.chosen(body, "", 0), folder, turns), "extraction", "forward"
        print("\n".join(table(found)), flush=True)
        took = rounds(data, folder, Scale(clients=clients, repeats=max(1, turns // 2)))
    print("\n".join(table({of_rounds: (took, "fedrep", "fedavg")})))


if __name__ == "__main__":
    typer.run(main)
