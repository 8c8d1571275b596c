"""MLflow: the server that MLFLOW_TRACKING_URI names, else MLflow's own file `mlflow.db` in the working folder."""

from __future__ import annotations

import logging
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from filelock import FileLock

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # MLflow reports usage by default; it reads this once
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # by default a server that is gone delays by minutes
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from fedapp.tracking.base import Tracked, Tracker

BATCH = 100
"""Entries of one request; MLflow's servers take no more parameters at a time."""
STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


def _name(text: str) -> str:
    """Return a name with letters that MLflow takes."""
    return re.sub(r"[^\w./ -]", "_", text)


class MLflow(Tracker):
    """Parameters, metrics, tags and artifacts of one run in the experiment MLFLOW_EXPERIMENT_NAME, else `fedapp`."""

    def __init__(self, run: Tracked) -> None:
        self.run = run
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        uri, _, known = run.key.rpartition("#")
        uri = uri or mlflow.get_tracking_uri()
        # Runs of a comparison begin at the same time, and two processes must not make the same tables.
        with FileLock(Path(tempfile.gettempdir()) / f"fedapp-mlflow-{getattr(os, 'getuid', int)()}.lock"):
            self.client = MlflowClient(uri)
            if known:
                self.client.update_run(known, status="RUNNING")
            else:
                known = self._create(os.environ.get("MLFLOW_EXPERIMENT_NAME") or "fedapp")
        self.id, self.step = known, run.step
        # An address may hold a password, which must not get into the run directory: it is asked for again.
        place = urlsplit(uri)
        shown = uri if place.scheme in ("", "file", "sqlite") else ""
        self.key = f"{shown}#{known}"
        self.where = f"run {known} in {place.hostname or shown or place.scheme}"
        settings = [(_name(k), str(v)[:6000]) for k, v in run.settings.items()]
        there = self.client.get_run(known).data.params
        new = [Param(k, v) for k, v in settings if k not in there]
        for start in range(0, len(new), BATCH):
            self.client.log_batch(known, params=new[start : start + BATCH])
        # MLflow never changes a parameter: what a resumed run has otherwise becomes a tag.
        tags = {**run.tags, **{k: v for k, v in settings if there.get(k, v) != v}}
        self.client.log_batch(known, tags=[RunTag(k, v) for k, v in tags.items()])

    def _create(self, experiment: str) -> str:
        found = self.client.get_experiment_by_name(experiment)
        number = found.experiment_id if found is not None else self.client.create_experiment(experiment)
        return str(self.client.create_run(number, run_name=self.run.name).info.run_id)

    def log(self, step: int, scores: Mapping[str, float]) -> None:
        """Log metrics."""
        self.step = step
        now = int(1000 * time.time())
        metrics = [Metric(_name(name), value, now, step) for name, value in scores.items()]
        for start in range(0, len(metrics), BATCH):
            self.client.log_batch(self.id, metrics=metrics[start : start + BATCH])

    def figure(self, name: str, title: str, file: Path) -> None:
        """Attach a figure."""
        self.client.log_artifact(self.id, str(file), "figures")

    def files(self, folder: str, files: Sequence[Path]) -> None:
        """Attach files."""
        for file in files:
            self.client.log_artifact(self.id, str(file), str(file.parent.relative_to(self.run.out)).strip(".") or None)

    def end(self, status: str, summary: Mapping[str, float], error: str) -> None:
        """Log the final scores and set the run's status."""
        if summary:
            self.log(self.step, {f"final/{name}": value for name, value in summary.items()})
        if error:
            self.client.set_tag(self.id, "error", error[:5000])
        self.client.set_terminated(self.id, STATUS[status])
