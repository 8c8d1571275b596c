"""The figures of the four papers by number, drawn from runs on any data.

`FIGURES` is the table: a figure's id, what it shows, which runs it needs, and what draws it. `docs/figures.md` has the
command and a picture of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedapp.errors import BadRequest, suggest
from fedapp.registry import title_of
from fedapp.results.analysis import Unavailable
from fedapp.results.figures import gallery
from fedapp.results.figures import heads as own_heads
from fedapp.results.figures.scores import by_method
from fedapp.results.figures.style import MUTED, Drawing, one_look_each
from fedapp.results.figures.words import Runs, Words, titled
from fedapp.results.runs import RunResult, labelled, read
from reproduction.figures import accuracy, calibration, costs, heads, pathways, representations
from reproduction.figures.inversion import DRAWN


@dataclass(frozen=True)
class PaperFigure:
    """One figure of a paper.

    Attributes
    ----------
    title : what it shows.   needs : the runs that it is drawn from, in one line; empty where it needs none.
    draw : makes caption, words and figure from the runs; raises `Unavailable` with the reason.
    """

    title: str
    needs: str
    draw: Callable[[Runs], Words]


FIGURES: dict[str, PaperFigure] = {
    "fedclassavg-2": PaperFigure(
        "Label distribution over clients, CIFAR-10: 2a Dir(0.5), 2b two classes each",
        "one run, of 2b with partition=two-class",
        gallery.FIGURES["labels-heat"][3],
    ),
    "fedclassavg-3": PaperFigure(
        "Label distribution over clients, EMNIST: 3a Dir(0.5), 3b two classes each",
        "one run, of 3b with partition=two-class",
        gallery.FIGURES["labels-heat"][3],
    ),
    "fedclassavg-4": PaperFigure(
        "Accuracy by local epochs", "runs of several methods with different architectures", accuracy.by_epochs,
    ),
    "fedclassavg-5": PaperFigure(
        "Accuracy by local epochs, skewed", "the same with partition=two-class", accuracy.by_epochs,
    ),
    "fedclassavg-6": PaperFigure(
        "Accuracy by local epochs, one architecture", "runs of several methods with one architecture",
        accuracy.by_epochs,
    ),
    "fedclassavg-7": PaperFigure(
        "Accuracy by local epochs, sampled clients", "the same with fraction-train=0.1 and evaluate-every=1",
        accuracy.by_epochs,
    ),
    "fedclassavg-8": PaperFigure(
        "Representations of all clients before the ReLU", "a run of Standalone and a run of FedClassAvg",
        representations.embedding,
    ),
    "fedclassavg-9": PaperFigure(
        "Units that matter for one image", "a run of Standalone and a run of FedClassAvg", representations.conductance,
    ),
    "fedclassavg-table5": PaperFigure(
        "Bytes and operations of a round", "runs of FedAvg, KT-pFL and FedClassAvg", costs.bytes_and_flops,
    ),
    "fedclassavg-scaling": PaperFigure(
        "Bytes against the width of the representation",
        "runs of FedClassAvg with models of different widths on data of one number of classes",
        costs.head_scaling,
    ),
    "fedgh-2": PaperFigure("Accuracy by round", "runs of several methods", accuracy.by_round),
    "fedgh-3": PaperFigure(
        "Accuracy against classes per client", "a comparison with --partitions classes:2,classes:4,...",
        partial(accuracy.against, key="classes-per-client"),
    ),
    "fedgh-4": PaperFigure(
        "Accuracy against participation", "a comparison with --sweep fraction-train=0.1,0.5,1",
        partial(accuracy.against, key="fraction-train"),
    ),
    "fedgh-5": PaperFigure(
        "Accuracy against the header's learning rate", "runs of FedGH with several header_lr",
        partial(accuracy.against_hyperparameter, method="fedgh", name="header_lr"),
    ),
    "ccvr-1": PaperFigure(
        "CKA of all pairs of clients at three layers", "two runs of one method: IID and not", calibration.cka_maps,
    ),
    "ccvr-2": PaperFigure("Mean CKA of clients by layer", "two runs of one method: IID and not", calibration.cka),
    "ccvr-3": PaperFigure(
        "Labels, and norms of the clients' heads by round", "runs of one method with several partitions",
        calibration.norms_by_round,
    ),
    "ccvr-4": PaperFigure("Calibration with real features", "runs with one global model", calibration.real_sweep),
    "ccvr-5": PaperFigure("Predictions before and after calibration", "one run of ccvr", calibration.calibration_map),
    "ccvr-6": PaperFigure(
        "Accuracy and its upper bound against separability", "two or more runs with one global model",
        calibration.separability,
    ),
    "ccvr-7": PaperFigure("Virtual samples per class", "runs with one global model", calibration.samples_sweep),
    "ccvr-8": PaperFigure(
        "Images recovered from features", "one run with one global model", partial(calibration.inverted, counts=(1,)),
    ),
    "ccvr-9": PaperFigure(
        "Images recovered from class means", "one run with one global model",
        partial(calibration.inverted, counts=(3, 10, DRAWN)),
    ),
    "ccvr-10": PaperFigure(
        "Norms of the global head before and after calibration", "runs of ccvr with several bases",
        calibration.norms_before_after,
    ),
    "ccvr-11": PaperFigure("Mean CKA of clients by layer and method", "runs of several methods", calibration.cka),
    "ccvr-12": PaperFigure(
        "Norms of the clients' heads by round and method", "runs of several methods", calibration.norms_by_round,
    ),
    "ccvr-13": PaperFigure(
        "Predictions before and after calibration, by base", "runs of ccvr with several bases",
        calibration.calibration_map,
    ),
    "ccvr-14": PaperFigure(
        "Virtual samples per class, by base", "runs of ccvr with several bases", calibration.samples_sweep,
    ),
    "ccvr-15": PaperFigure("Label distribution by partition", "runs with several partitions", calibration.label_maps),
    "cwfedavg-1": PaperFigure("Critical pathways of the toy task", "", pathways.pathways),
    "cwfedavg-2": PaperFigure(
        "Evolution of head norms by batch", "one to three runs on one partition, such as cwfedavg(lam=0) and cwfedavg",
        heads.batch_evolution,
    ),
    "cwfedavg-3": PaperFigure(
        "Norms of heads, pathological setting", "a run of fedavg and one of cwfedavg", heads.personalisation_maps,
    ),
    "cwfedavg-4": PaperFigure(
        "Training loss by round", "runs of several methods, such as fedavg and cwfedavg", own_heads.training_loss,
    ),
    "cwfedavg-5": PaperFigure(
        "Accuracy and R against lambda", "runs of cwfedavg with several values of lam", heads.regularisation,
    ),
    "cwfedavg-6": PaperFigure(
        "Norms of heads, practical setting", "a run each of fedavg, fedamp, ifca and cwfedavg",
        heads.personalisation_maps,
    ),
    "cwfedavg-s1": PaperFigure(
        "Training loss of single clients (supplement)", "a run of each method to compare", heads.client_loss,
    ),
    "cwfedavg-s2": PaperFigure(
        "Memory of the server (supplement)", "a run of each method to compare", heads.server_memory,
    ),
}  # fmt: skip
"""By id, `<paper>-<number>`; a figure with several parts may have ids such as `ccvr-8a`."""


def failed(runs: Iterable[RunResult]) -> str:
    """Name the methods with failed runs, with seeds, round and reason; an empty string where none failed."""
    lost = by_method([run for run in runs if not run.ok])
    texts = (
        f"{title_of(label)}, seed {', '.join(str(r.seed) for r in members)} ({members[0].failure})"
        for label, members in lost.items()
    )
    return f"Failed, and not drawn: {'; '.join(texts)}." if lost else ""


def draw(name: str, paths: Sequence[Path]) -> Drawing:
    """Draw a paper's figure from run directories, or from folders of run directories.

    Raises
    ------
    BadRequest : no such figure, a folder without finished runs, or runs that it cannot be drawn from.
    """
    if name not in FIGURES:
        raise BadRequest(f"no figure '{name}'{suggest(name, FIGURES)} (python -m reproduction figure lists them all)")
    figure = FIGURES[name]
    if figure.needs and not paths:
        raise BadRequest(f"{name} ({figure.title}) needs {figure.needs}: name the run directories or their folder")
    runs: list[RunResult] = []
    lost: list[RunResult] = []
    for path in paths:
        found = read(path)
        if isinstance(found, RunResult):
            (runs if found.ok else lost).append(found)
        else:
            runs += [r for label in found.labels for r in found.finished if r.label == label]
            lost += [r for label in found.labels for r in found.runs if r.label == label and not r.ok]
    if figure.needs and not runs:
        raise BadRequest(f"no run below {', '.join(map(str, paths))} has finished; {name} needs {figure.needs}")
    if len({(r.label, r.seed, *r.setting.items()) for r in runs}) < len(runs):
        runs = labelled(runs)  # run directories from several places, which no comparison has named
    runs = [titled(r) for r in runs]
    try:
        with one_look_each([r.label for r in runs]):
            caption, alt, drawn = figure.draw(runs)
    except Unavailable as e:
        command = f": {e.command}" if e.command else ""
        raise BadRequest(f"{name} needs {figure.needs}; {e.why}{command}") from e
    if lost:
        names = ", ".join(dict.fromkeys(title_of(r.label) for r in lost))
        drawn.suptitle(f"failed, and not drawn: {names}", fontsize=8, color=MUTED, x=0.01, ha="left")
    return Drawing(name, figure.title, f"{caption} {failed(lost)}".strip(), alt, drawn, name)


def save(drawing: Drawing, file: Path) -> None:
    """Write a drawing as the file's ending says.

    Raises
    ------
    BadRequest : the ending is neither .svg nor .png, or the file cannot be written.
    """
    if file.suffix not in (".svg", ".png"):
        raise BadRequest(f"--out {file}: give a name that ends in .svg or .png")
    data = drawing.png() if file.suffix == ".png" else drawing.svg(text=False).encode()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    except OSError as e:
        raise BadRequest(f"{file} cannot be written ({e.strerror})") from e
