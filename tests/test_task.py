"""What a client trains on: counts and the specification of its model."""

from __future__ import annotations

import numpy as np
import torch

from fedapp import sampling
from fedapp.data.transforms import InputSpec
from fedapp.learning.task import ModelSpec, Task
from tests.handmade import short

INPUTS = InputSpec(shape=(3, 8, 8), scale=255.0, mean=(0.5,) * 3, std=(0.2,) * 3)


def task() -> Task:
    x = torch.zeros(5, 8, 8, 3, dtype=torch.uint8)
    y = torch.tensor([0, 2, 2, 1, 2])
    return Task(2, 7, 4, INPUTS, "digits-b", x, y, x[:2], torch.tensor([3, 0]), train=short())


def test_counts_are_those_of_the_training_split() -> None:
    assert task().num_samples == 5
    counts = task().class_counts()
    assert counts.tolist() == [1, 1, 3, 0] and counts.dtype == np.int64


def test_the_model_takes_its_shape_from_the_data_and_its_seed_from_the_caller() -> None:
    assert task().spec(11) == ModelSpec(
        "digits-b", num_classes=4, shape=(3, 8, 8), seed=11, common=sampling.server_model_seed(7)
    )
