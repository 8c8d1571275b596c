"""What a round costs a client: bytes as the run counted them, floating-point operations of the local training.

FedClassAvg's Table 5 compares bytes. Its text says that the bytes of the head grow as O(N) with the N numbers before
the head, and that local training costs what it costs without federation.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from fedapp.engines.measure import first_payload
from fedapp.learning.training import batch_slices
from fedapp.models import head_width, is_own
from fedapp.results.analysis import Unavailable, config_of, counts_of, method_of
from fedapp.results.figures.pieces import Curve
from fedapp.results.figures.plots import curves
from fedapp.results.figures.words import Runs, Words, each
from fedapp.results.runs import RunResult
from fedapp.tasks import simulated as tasks
from reproduction.figures import plots
from reproduction.figures.models import data_of


def cost(run: RunResult) -> tuple[float, float, float]:
    """Return the cost of a round of a run; nothing is trained but one batch for each architecture.

    The operations of a step are counted on the method's own first step, with all its views and models, and scaled to
    the clients' images and epochs. What a method does only from round 2 on (KT-pFL's distillation) is not in them.

    Returns
    -------
    Means over the clients: bytes up, bytes down, and floating-point operations of the local training, of which a
    multiplication and an addition are two.
    """
    config, (method, hparams) = config_of(run), method_of(run)
    data = data_of(run)  # which checks that they are those of the run
    sizes = counts_of(run).sum(axis=1)
    built = [(config.model.name_of(client), data.size_of(client).shape) for client in range(len(sizes))]
    per_image: dict[tuple[str, tuple[int, ...]], float] = {}
    for client, name in enumerate(built):
        if name in per_image:
            continue
        task = tasks.simulated_task(config, client, len(sizes), torch.device("cpu"))
        count = batch_slices(task.num_samples, config.training.batch_size)[0].stop
        few = replace(
            task, x_train=task.x_train[:count], y_train=task.y_train[:count], train=task.train.replaced(local_epochs=1)
        )
        one, payload = method.client(few, method, hparams), first_payload(method, hparams, few)
        one.round = 1
        one.restore(1, payload)
        one.receive(payload)
        one.before_training(payload)
        with FlopCounterMode(display=False) as counter:
            report = one.run_phases()
        per_image[name] = counter.get_total_flops() / report.samples
    flops = [per_image[name] * size * config.training.local_epochs for name, size in zip(built, sizes, strict=True)]
    return float(run.summary["bytes_up"]), float(run.summary["bytes_down"]), float(np.mean(flops))


def head_bytes(run: RunResult) -> tuple[int, int, float]:
    """Return N, the classes C, and the bytes that a client sends in a round, as the run counted them.

    Raises
    ------
    Unavailable : the method sends something else than a head.
    """
    config, (method, hparams) = config_of(run), method_of(run)
    if method.up_prefixes(hparams) != ("head.",) or method.extra_up:
        raise Unavailable(f"{run.method} sends other arrays than the head", "fedapp run --method fedclassavg ...")
    name = config.model.names[0]
    data = data_of(run) if is_own(name) else None
    facts = () if data is None else (data.dataset.num_classes, data.inputs.shape, config.model)
    return head_width(name, *facts), len(run.classes), float(run.summary["bytes_up"])


def bytes_and_flops(runs: Runs) -> Words:
    """Bytes and operations of a client in a round, one mark per method (FedClassAvg, Table 5)."""
    found = each(runs, cost)
    said = "; ".join(
        f"{n}: {up:,.0f} B up, {down:,.0f} B down, {flops / 1e9:.3g} GFLOP" for n, (up, down, flops) in found.items()
    )
    return (
        "Bytes that a client sends and receives in a round, against the floating-point operations of its local "
        f"training (a multiplication and an addition are two). Mean over clients: {said}.",
        f"Scatter plot of operations against bytes. {said}.",
        plots.cost({n: (up + down, flops) for n, (up, down, flops) in found.items()}),
    )


def head_scaling(runs: Runs) -> Words:
    """Bytes against the N numbers before the head (FedClassAvg, Section 5.4: O(N))."""
    found = sorted({head_bytes(run) for run in runs})
    classes = {c for _, c, _ in found}
    if len({n for n, _, _ in found}) < 2 or len(classes) > 1:
        raise Unavailable(
            "it needs runs on data of one number of classes with models of different widths",
            "fedapp run --method fedclassavg --set model=... for moon, fedgh-5 and cnn",
        )
    c = classes.pop()
    n, sent = np.array([w for w, _, _ in found], float), np.array([b for _, _, b in found])
    said = ", ".join(f"{b:,.0f} B for N = {w:g}" for w, b in zip(n, sent))
    return (
        f"Bytes of the head that a client sends in a round, as the runs counted them: {said}. Dashed: 4 C (N + 1), "
        f"weight and bias as float32 for C = {c} classes.",
        f"Line chart of bytes against the width of the representation: {said}.",
        curves(
            {"": [Curve("measured", n, sent), Curve(f"4 C (N + 1), C = {c}", n, 4 * c * (n + 1))]},
            "numbers before the head, N", "bytes up per client and round", percent=False,
        ),
    )  # fmt: skip
