"""What a round costs a client: bytes as the run counted them, floating-point operations of the local training.

FedClassAvg's Table 5 compares bytes. Its text says that the bytes of the head grow as O(N) with the N numbers before
the head, and that local training costs what it costs without federation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from fedapp.learning.training import batch_slices
from fedapp.models import head_width, is_own
from fedapp.results.analysis import Unavailable, config_of, counts_of, method_of
from fedapp.results.runs import RunResult
from fedapp.tasks import simulated as tasks
from reproduction.analysis.models import data_of
from strategies.base import first_payload


@dataclass(frozen=True)
class Cost:
    """Means over the clients of a run.

    Attributes
    ----------
    up, down : bytes per client and round.   flops : floating-point operations of a client's local training in a round;
        a multiplication and an addition are two.
    """

    up: float
    down: float
    flops: float


def cost(run: RunResult) -> Cost:
    """Return the cost of a round of a run; nothing is trained but one batch for each architecture.

    The operations of a step are counted on the method's own first step, with all its views and models, and scaled to
    the clients' images and epochs. What a method does only from round 2 on (KT-pFL's distillation) is not in them.
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
            report = one.optimise(payload)
        per_image[name] = counter.get_total_flops() / report.samples
    each = [per_image[name] * size * config.training.local_epochs for name, size in zip(built, sizes, strict=True)]
    return Cost(float(run.summary["bytes_up"]), float(run.summary["bytes_down"]), float(np.mean(each)))


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
