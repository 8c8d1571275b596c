"""Weights & Biases, offline unless WANDB_MODE says otherwise: files in `wandb/` of the run directory."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from fedapp.tracking.base import Tracked, Tracker


class Wandb(Tracker):
    """Configuration, history, images and artifacts of one run of the project WANDB_PROJECT, else `fedapp`."""

    def __init__(self, run: Tracked) -> None:
        self.run = run
        # A login of an earlier program does not permit sending anything.
        mode: Any = os.environ.get("WANDB_MODE") or "offline"
        self.key = run.key or secrets.token_hex(4)
        quiet = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True)
        self.session = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "fedapp", name=run.name, id=self.key, resume="allow", mode=mode,
            dir=str(run.out), config={**run.settings}, tags=[run.tags["method"], run.tags["dataset"]],
            reinit="create_new", allow_val_change=True, settings=quiet,
        )  # fmt: skip
        self.session.define_metric("step")
        self.session.define_metric("*", step_metric="step")
        # A resumed run has several folders of one id; W&B puts them together in the order of their beginnings.
        sync = f"wandb sync {shlex.quote(str(run.out / 'wandb'))}/offline-run-*-{self.key}"
        self.where = f"offline, to send it: {sync}" if mode == "offline" else str(self.session.url or f"mode {mode}")

    def log(self, step: int, scores: Mapping[str, float]) -> None:
        """Add a line of the history; its `step` is the round."""
        self.session.log({"step": step, **scores})

    def figure(self, name: str, title: str, file: Path) -> None:
        """Add an image."""
        self.session.log({f"figures/{name}": wandb.Image(str(file), caption=title)})

    def files(self, folder: str, files: Sequence[Path]) -> None:
        """Add an artifact, a new version of it where a resumed run ends again."""
        artifact = wandb.Artifact(f"{self.key}-{folder}", type={"models": "model"}.get(folder, "dataset"))
        for file in files:
            artifact.add_file(str(file), name=str(file.relative_to(self.run.out)))
        self.session.log_artifact(artifact)

    def end(self, status: str, summary: Mapping[str, float], error: str) -> None:
        """Write the final scores and close the run."""
        self.session.summary.update({f"final/{name}": value for name, value in summary.items()})
        self.session.summary["status"] = f"{status}: {error}" if error else status
        self.session.finish(exit_code=int(status != "finished"))
