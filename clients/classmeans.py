"""A client that sends one mean per class: of its representations (FedProto) or of its outputs (federated distillation).

`hparams.collect` says how they are collected: `eval`, in a pass over the training images after training, in evaluation
mode and without augmentation; `train`, from the rows of the last local epoch, computed while the weights changed.
"""

from __future__ import annotations

import numpy as np

from clients.base import FedClient
from fedapp.core.classmeans import ClassMeans, Rows
from fedapp.lazy import Tensor, torch
from fedapp.method import Payload


class ClassMeansClient(FedClient):
    """Collects means per class of the rows that `rows_of` of a method returns; its step calls `collect`."""

    means: ClassMeans
    epoch: int

    def rows_of(self, representations: Tensor) -> Tensor:
        """Return the averaged rows, (n, rows_width), from representations (n, width)."""
        return representations

    @property
    def rows_width(self) -> int:
        """Length of one row."""
        return self.model.width

    def received_rows(self, payload: Payload, name: str) -> tuple[Tensor, Tensor]:
        """Return the rows (C, rows_width) of a payload by their labels, and which classes have one, (C,)."""
        arrays, classes = payload.all(), self.task.num_classes
        labels = torch.from_numpy(arrays["labels"].astype(np.int64)).to(self.device)
        rows = torch.zeros(classes, self.rows_width, device=self.device)
        rows[labels] = torch.from_numpy(arrays[name].astype(np.float32)).to(self.device)
        known = torch.zeros(classes, dtype=torch.bool, device=self.device)
        known[labels] = True
        return rows, known

    def before_training(self, payload: Payload) -> None:
        """Begin with empty sums."""
        self.epoch = 0
        self.means = ClassMeans(self.task.num_classes, self.rows_width, self.device)

    def after_epoch(self, epoch: int) -> None:
        """Count epochs."""
        self.epoch = epoch + 1

    def collect(self, representations: Tensor, labels: Tensor) -> None:
        """Add the rows of a training step in the last epoch of `collect=train`."""
        if self.hparams.collect == "train" and self.epoch == self.training.local_epochs - 1:
            self.means.add(self.rows_of(representations), labels)

    def class_rows(self) -> Rows:
        """Return the means of the classes of the training split."""
        if self.hparams.collect == "eval":
            for z, labels in self.feature_batches("train"):
                self.means.add(self.rows_of(z), labels)
        return self.means.rows()
