"""What lying clients do to the honest ones, by attack, rule and method: `python -m reproduction study attacks`.

Ten clients share the embedded digits (Dirichlet 0.5 or 0.1, 8 rounds), and clients 0 and 1 lie. Measured are the
accuracy of what the honest clients receive after the last round, on their own test images, and for the backdoor how
often these models take an image of another class for class 0 once it carries the patch. `min-replies` is 0.7, so that a
run goes on where the server refuses what the liars send. A run that ends with an error counts as accuracy 0 and is
marked.

| attack     | what the liars send                                                                                   |
|------------|-------------------------------------------------------------------------------------------------------|
| `none`     | what they trained                                                                                     |
| `flip`     | what they trained on labels C - 1 - y                                                                 |
| `count`    | the same, as clients of 1e9 images                                                                    |
| `sign`     | what they received minus their update                                                                 |
| `times-10` | what they received minus ten times their update                                                       |
| `times1000`| what they received plus a thousand times their update                                                 |
| `huge`     | 3e38, with the sign of their update                                                                   |
| `min-max`  | the honest mean against its direction, as far as no honest update is farther from the others          |
|            | (Shejwalkar and Houmansadr, NDSS 2021)                                                                |
| `little`   | the honest mean minus 1.5 standard deviations of each coordinate (Baruch et al., NeurIPS 2019)        |
| `backdoor` | ten times the update of training in which half of the images carry a white patch of 2 x 2 and the     |
|            | label 0 (Bagdasaryan et al., AISTATS 2020)                                                            |
| `permute`  | CCVR: class means of other classes, with counts of 1e6                                                |
| `swap`     | CCVR: class means of other classes, with the true counts                                              |
| `shift`    | CCVR: class means moved by 70 % of the way to that of another class                                   |
| `wide`     | CCVR: covariances times 1e4                                                                           |

Results are added to `docs/attacks.json` as runs finish; runs that are in it are not repeated. `--table` prints the
tables of what is there, with what each rule costs and holds, and puts them between the markers of `docs/robustness.md`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import numpy as np
import torch
import typer
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, Context, Message
from numpy.typing import NDArray
from scipy.spatial.distance import cdist, pdist

import fedapp
from benchmarks import machine
from benchmarks.pages import markdown, replaced
from fedapp import client_app, server_app
from fedapp import config as configuration
from fedapp.engines.local import prepare, resumed
from fedapp.learning.task import Task
from fedapp.results.directory import write_text
from fedapp.results.runs import read_run
from fedapp.tasks.simulated import federated
from fedapp.transport import records
from fedapp.transport.local_grid import FIRST_NODE, LocalGrid
from fedapp.transport.virtual import Member

CLIENTS, LIARS, F = 10, (0, 1), 2
SETTINGS: dict[str, Any] = {
    "dataset": "digits", "clients": CLIENTS, "num-server-rounds": 8, "protocols": "received",
    "final-training": False, "min-replies": 0.7,
}  # fmt: skip
FACTORS = {"sign": -1, "times-10": -10, "times1000": 1000, "backdoor": 10}
"""Of a liar's own update."""
ON_DATA = ("flip", "count", "backdoor")
ON_STATISTICS = ("permute", "swap", "shift", "wide")
CLAIMED = 10**9
"""Images that a liar says it has, where it lies about that."""
ALPHAS = ("0.5", "0.1")
ATTACKS = ("none", *ON_DATA, "sign", "times-10", "times1000", "huge", "min-max", "little", *ON_STATISTICS)
METHODS = ("fedavg", "lgfedavg", "cwfedavg", "fedgh", "ccvr")
RULES = (
    "none", "cap", "norm", "median", "trimmed", "norm+trimmed", "multikrum", "multikrum+trimmed", "geomedian", "own",
)  # fmt: skip
FILE, PAGE = Path("docs/attacks.json"), Path("docs/robustness.md")

Vector = NDArray[np.float64]


def poisoned(task: Task, attack: str) -> Task:
    """Return what a liar trains on."""
    if attack in ("flip", "count"):
        return dataclasses.replace(task, y_train=task.num_classes - 1 - task.y_train)
    x, y = task.x_train.clone(), task.y_train.clone()
    x[::2, -2:, -2:] = x.max()
    y[::2] = 0
    return dataclasses.replace(task, x_train=x, y_train=y)


def lie(attack: str, own: Vector, honest: NDArray[np.float64]) -> Vector:
    """Return a liar's update (D,), made of its own and of those of the honest clients (K, D)."""
    if attack in FACTORS:
        return FACTORS[attack] * own
    if attack == "huge":
        return np.where(own < 0, -3e38, 3e38)
    mean, spread = honest.mean(axis=0), honest.std(axis=0)
    if attack == "little":
        return np.asarray(mean - 1.5 * spread)
    if attack == "min-max":
        direction = -mean / max(float(np.linalg.norm(mean)), 1e-12)
        farthest = float(pdist(honest).max())
        low, high = 0.0, 100 * farthest
        for _ in range(50):
            middle = (low + high) / 2
            far = float(cdist([mean + middle * direction], honest).max()) > farthest
            low, high = (low, middle) if far else (middle, high)
        return np.asarray(mean + low * direction)
    return own


class AttackedGrid(LocalGrid):
    """Lets all clients of an exchange run, and then changes what the liars send: they know what the others send."""

    def __init__(self, flat: Mapping[str, Any], attack: str) -> None:
        super().__init__(self._client, flat, CLIENTS)  # type: ignore[arg-type]
        self.attack = attack
        self.sent: dict[int, dict[str, NDArray[Any]]] = {}

    def _client(self, message: Message, context: Context) -> Message:
        made = client_app._task
        try:
            if self.attack in ON_DATA and message.metadata.dst_node_id - FIRST_NODE in LIARS:
                client_app._task = lambda *given: poisoned(made(*given), self.attack)
            return client_app.app(message, context)
        finally:
            client_app._task = made

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Keep what every client is sent."""
        given = list(messages)
        for message in given:
            self.sent[message.metadata.dst_node_id] = records.payload_of(message)[0].all()
        return super().push_messages(given)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Run all clients that were asked, and return all replies."""
        wanted, replies = set(message_ids), list[Message]()
        while got := list(super().pull_messages(wanted)):
            replies += got
        if self.attack != "none" and replies:
            self._change(replies)
        return replies

    def _change(self, replies: list[Message]) -> None:
        kind = replies[0].metadata.message_type
        liars = [r for r in replies if r.metadata.src_node_id - FIRST_NODE in LIARS and not r.has_error()]
        if self.attack in ("count", "permute"):  # also when it registers, so that its counts agree
            for reply in liars:
                reply.content.metric_records[records.METRICS]["num-examples"] = CLAIMED
        if kind == "train" and self.attack not in ("flip", "count", *ON_STATISTICS):
            others = [r for r in replies if not any(r is x for x in liars) and not r.has_error()]
            for reply in liars:
                self._change_arrays(reply, others)
        if kind == "query.statistics" and self.attack in ON_STATISTICS:
            for reply in liars:
                self._change_statistics(reply)

    def _arrays(self, reply: Message) -> dict[str, NDArray[Any]]:
        # Every liar reads every reply, and all were written in this process: they are read where they lie.
        sent = reply.content.array_records[records.ARRAYS]
        return {name: records.decoded(array, checked=True) for name, array in sent.items()}

    def _update(self, reply: Message, names: Sequence[str]) -> Vector:
        """Return the change of what was sent; class means and the like have none and count from 0."""
        sent, arrays = self.sent[reply.metadata.src_node_id], self._arrays(reply)
        parts = [arrays[n].astype(np.float64) - (sent[n] if _same(sent, arrays, n) else 0) for n in names]
        return np.concatenate([p.ravel() for p in parts])

    def _change_arrays(self, reply: Message, others: Sequence[Message]) -> None:
        arrays, sent = self._arrays(reply), self.sent[reply.metadata.src_node_id]
        names = [n for n, a in arrays.items() if a.dtype.kind == "f"]
        if not names:
            return  # the liar has failed by itself
        own = self._update(reply, names)
        alike = [r for r in others if all(_same(self._arrays(r), arrays, n) for n in names)]
        if self.attack in ("min-max", "little") and len(alike) < 2:
            return  # class means of unlike classes: these attacks need updates of one shape
        new = lie(self.attack, own, np.stack([self._update(r, names) for r in alike]) if alike else own[None])
        ends = np.cumsum([arrays[n].size for n in names])[:-1]
        for n, part in zip(names, np.split(new, ends)):
            start = sent[n] if _same(sent, arrays, n) and self.attack != "huge" else 0
            arrays[n] = (start + part.reshape(arrays[n].shape)).astype(arrays[n].dtype)
        reply.content[records.ARRAYS] = ArrayRecord({n: FlowerArray(a) for n, a in arrays.items()})

    def _change_statistics(self, reply: Message) -> None:
        arrays = self._arrays(reply)
        for name, array in arrays.items():
            if self.attack in ("permute", "swap") and name.endswith("/mean"):
                arrays[name] = np.roll(array, 1, axis=0)
            elif self.attack == "shift" and name.endswith("/mean"):
                arrays[name] = (0.3 * array + 0.7 * np.roll(array, 1, axis=0)).astype(array.dtype)
            elif self.attack == "permute" and name.endswith("/count"):
                arrays[name] = np.full_like(array, 10**6)
            elif self.attack == "wide" and name.endswith("/cov"):
                arrays[name] = array * np.float32(1e4)
        reply.content[records.ARRAYS] = ArrayRecord({n: FlowerArray(a) for n, a in arrays.items()})


def _same(a: Mapping[str, NDArray[Any]], b: Mapping[str, NDArray[Any]], name: str) -> bool:
    return name in a and a[name].shape == b[name].shape


def rule_settings(rule: str) -> dict[str, Any]:
    """Return the run-config keys of a rule."""
    if rule == "none":
        return {}
    return {"count-cap": 2.0} if rule == "cap" else {"robust": rule, "robust-f": F}


def fits(method: str, attack: str, rule: str) -> bool:
    """Whether a method takes a rule, and an attack has something to attack."""
    guards = configuration.from_flat({"method": method}).method_and_hparams()
    known = guards[0].guarded_by(guards[1])
    takes = {"none": True, "cap": "count-cap" in known, "own": "own" in known}.get(rule, "rules" in known)
    if method == "fedgh" and attack in ("min-max", "little"):
        return False  # class means of unlike classes
    return takes and (method == "ccvr" or attack not in ON_STATISTICS) and (attack != "count" or "count-cap" in known)


def members(run: server_app.Run, clients: int, attack: str) -> list[Member]:
    """Return the clients of a run; liars may be registered with a count that they made up, as on real nodes."""
    found = _members(run, clients)
    lies = attack in ("count", "permute")
    return [dataclasses.replace(m, examples=CLAIMED) if lies and m.client in LIARS else m for m in found]


_members = server_app.members


def backdoor_success(run: Path, seed: int, alpha: str) -> float:
    """Return how often the models that honest clients receive take a patched image of another class for class 0."""
    data = federated(configuration.from_flat({**SETTINGS, "seed": seed, "alpha": float(alpha)}), CLIENTS)
    shares = []
    for client in range(CLIENTS):
        if client in LIARS:
            continue
        x, y = (t.numpy() for t in data.tensors("test", client, torch.device("cpu")))
        x = x[y != 0].copy()
        x[:, -2:, -2:] = data.dataset.x_train.max()
        model = fedapp.load(run, client=client, point="received")
        shares.append(float((np.asarray(model.predict(x)).argmax(axis=1) == 0).mean()))
    return float(np.mean(shares))


def measure(
    method: str, attack: str, rule: str, seed: int, alpha: str, folder: Path, trained: Path | None = None
) -> dict[str, Any]:
    """Run one federation; return the honest clients' accuracy and what the attack reached.

    Parameters
    ----------
    folder : of the run.   trained : of the same run without an attack, for attacks on what is asked after the training.
    """
    started = time.perf_counter()
    if trained is not None and trained.is_dir():
        shutil.copytree(trained, folder)
        config = prepare(resumed(folder, {}), folder)
    else:
        values = {**SETTINGS, **rule_settings(rule), "method": method, "seed": seed, "alpha": float(alpha)}
        config = prepare(values, folder)
    flat = configuration.for_context(config)
    try:
        with mock.patch.object(server_app, "members", lambda run, clients: members(run, clients, attack)):
            server_app.serve(AttackedGrid(flat, attack), flat)
    except Exception as e:
        return {"accuracy": 0.0, "ended": f"{type(e).__name__}: {e}"[:200]}
    final = read_run(folder).final
    honest = final[~final["client"].isin(LIARS)]
    found: dict[str, Any] = {"accuracy": float(honest["received_accuracy"].mean())}
    if attack == "backdoor":
        found["backdoor"] = backdoor_success(folder, seed, alpha)
    return {**found, "seconds": round(time.perf_counter() - started, 1)}


def name_of(*cell: object) -> str:
    """Return the name of a run by method, attack, rule, seed and alpha."""
    return " ".join(map(str, cell))


def table(known: Mapping[str, Any]) -> str:
    """Return what the rules hold, and one table of the measured cells for each method and distribution."""
    runs: Mapping[str, Mapping[str, Any]] = known["runs"]
    keys = [tuple(name.split()) for name in runs]
    seeds = sorted({k[3] for k in keys})

    def cell(method: str, attack: str, rule: str, alpha: str) -> list[Mapping[str, Any]]:
        names = (name_of(method, attack, rule, int(s), alpha) for s in seeds)
        return [runs[n] for n in names if n in runs]

    machines = known["machine"].replace(" and ", ", ", known["machine"].count(" and ") - 1)
    lines = [
        f"`python -m reproduction study attacks`, seeds {', '.join(seeds)}, {machines}. "
        f"{CLIENTS} clients, two of them (0 and 1) malicious, digits, 8 rounds, `robust-f = {F}`, `min-replies = 0.7`.",
        "", "What a rule costs without liars, and what the worst of the measured attacks costs with it: points of the "
        "honest clients' accuracy, against the method without rule and without attack, mean over seeds.", "",
    ]  # fmt: skip
    sets = [(a, m) for a in ALPHAS for m in METHODS if any((k[0], k[4]) == (m, a) for k in keys)]
    held = [
        (method, alpha, rule, *_held(cell, method, rule, alpha))
        for alpha, method in sets for rule in RULES if cell(method, "none", rule, alpha)
    ]  # fmt: skip
    lines += [
        *markdown("method|Dirichlet|rule|without attack|worst attack|backdoor's success", held),
        "", "All cells: the mean over seeds of the honest clients' received accuracy, with its lowest value in "
        "brackets; for the backdoor, its success follows. `†`: a run ended with an error and counts as 0. Cells with "
        "fewer than three seeds say how many.",
    ]  # fmt: skip
    for alpha, method in sets:
        mine = [k for k in keys if (k[0], k[4]) == (method, alpha)]
        rules = [r for r in RULES if any(k[2] == r for k in mine)]
        attacked = [a for a in ATTACKS if any(k[1] == a for k in mine)]
        rows = [(attack, *(_cell(cell(method, attack, rule, alpha)) for rule in rules)) for attack in attacked]
        lines += ["", f"**{method}**, Dirichlet {alpha}", "", *markdown("|".join(["attack", *rules]), rows)]
    return "\n".join(lines) + "\n"


def _held(cell: Callable[..., list[Mapping[str, Any]]], method: str, rule: str, alpha: str) -> tuple[str, str, str]:
    """Return three cells: what a rule costs, what the worst attack costs under it, and the backdoor's success."""

    def mean(attack: str, rule: str) -> float:
        return float(np.mean([f["accuracy"] for f in cell(method, attack, rule, alpha)]))

    clean = mean("none", "none")
    found = {a: clean - mean(a, rule) for a in ATTACKS if a != "none" and cell(method, a, rule, alpha)}
    worst = max(found, key=lambda a: found[a], default="")
    success = [f["backdoor"] for f in cell(method, "backdoor", rule, alpha) if "backdoor" in f]
    cost = "–" if rule == "none" else f"{100 * (clean - mean('none', rule)):.1f}"
    lost = f"{100 * found[worst]:.1f} ({worst})" if found else "–"
    return cost, lost, f"{np.mean(success):.2f}" if success else "–"


def _cell(found: Sequence[Mapping[str, Any]]) -> str:
    if not found:
        return "–"
    scores = [f["accuracy"] for f in found]
    text = f"{np.mean(scores):.3f} ({min(scores):.3f})" + ("†" if any("ended" in f for f in found) else "")
    reached = [f["backdoor"] for f in found if "backdoor" in f]
    text += f", success {np.mean(reached):.2f}" if reached else ""
    return text + (f", {len(found)} of 3" if len(found) < 3 else "")


def main(
    methods: str = ",".join(METHODS),
    attacks: str = ",".join(ATTACKS),
    rules: str = ",".join(RULES),
    seeds: str = "0,1,2",
    alphas: str = ",".join(ALPHAS),
    minutes: Annotated[float, typer.Option(help="begin no further run after that time")] = math.inf,
    file: Path = FILE,
    tables: Annotated[bool, typer.Option("--table", help=f"print the tables and write them into {PAGE}")] = False,
) -> None:
    """Measure what is not in the file yet."""
    known: dict[str, Any] = {"machine": "", "runs": {}}
    if file.is_file():
        known = json.loads(file.read_text(encoding="utf-8"))
    if tables:
        text = table(known)
        sys.stdout.write(text)
        PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), "attacks", text.splitlines()), encoding="utf-8")
        return
    torch.set_num_threads(1)
    here = machine.describe()["processor"]
    if here not in known["machine"]:
        known["machine"] = " and ".join(filter(None, [known["machine"], here]))
    cells = itertools.product(*(text.split(",") for text in (alphas, methods, rules, seeds, attacks)))
    with tempfile.TemporaryDirectory() as folder:
        fill(known, cells, minutes, file, Path(folder))


def fill(known: dict[str, Any], cells: Iterable[Sequence[str]], minutes: float, file: Path, folder: Path) -> None:
    """Run what is not known yet of alphas, methods, rules, seeds and attacks, and write the file after each run."""
    started = time.monotonic()
    for alpha, method, rule, seed, attack in cells:
        name = name_of(method, attack, rule, int(seed), alpha)
        if name in known["runs"] or not fits(method, attack, rule):
            continue
        if time.monotonic() - started > 60 * minutes:
            return
        # Attacks on statistics all begin where the training ends, so that is done once for them.
        trained = folder / name_of(method, "trained", rule, int(seed), alpha).replace(" ", "-")
        if attack in ON_STATISTICS and not trained.is_dir():
            measure(method, "none", rule, int(seed), alpha, trained)
        run = folder / "run"
        known["runs"][name] = measure(
            method, attack, rule, int(seed), alpha, run, trained if attack in ON_STATISTICS else None
        )
        if method == "ccvr" and attack == "none":
            run.rename(trained)
        shutil.rmtree(run, ignore_errors=True)
        sys.stdout.write(f"{name}: {known['runs'][name]}\n")
        sys.stdout.flush()
        write_text(file, json.dumps(known, indent=1) + "\n")
