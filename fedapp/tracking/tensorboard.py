"""TensorBoard: event files in `tensorboard/` of the run directory."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from fedapp.tracking.base import Tracked, Tracker


class TensorBoard(Tracker):
    """Scalars, figures, the configuration as text and as hyperparameters. It keeps no files, so it names them."""

    def __init__(self, run: Tracked) -> None:
        self.run = run
        folder = run.out / "tensorboard"
        self.where = f"tensorboard --logdir {shlex.quote(str(folder))}"
        self.key = folder.name
        self.step = run.step
        self.writer = SummaryWriter(str(folder))
        rows = "".join(f"| {k} | {str(v) or '(empty)'} |\n" for k, v in run.settings.items())
        self._text("configuration", f"| key | value |\n|---|---|\n{rows}")

    def _text(self, name: str, text: str) -> None:
        self.writer.add_text(name, text, self.step)

    def log(self, step: int, scores: Mapping[str, float]) -> None:
        """Write a scalar for each number."""
        self.step = step
        for name, value in scores.items():
            self.writer.add_scalar(name, value, step)
        # A process that is killed must not take rounds along that the run directory counts as tracked.
        self.writer.flush()

    def figure(self, name: str, title: str, file: Path) -> None:
        """Write an image."""
        with Image.open(file) as image:
            pixels = np.asarray(image.convert("RGB"))
        self.writer.add_image(f"figures/{name}", pixels, self.step, dataformats="HWC")

    def files(self, folder: str, files: Sequence[Path]) -> None:
        """Write a list of the files, with their sizes."""
        lines = "".join(f"- `{f}` ({f.stat().st_size:,} bytes)\n" for f in files)
        self._text(folder, f"TensorBoard keeps no files; these lie in the run directory:\n\n{lines}")

    def end(self, status: str, summary: Mapping[str, float], error: str) -> None:
        """Write the hyperparameters next to the final scores, and close."""
        self._text("status", f"{status}: {error}" if error else status)
        if summary:
            final = {f"final/{name}": value for name, value in summary.items()}
            settings = {k: v for k, v in self.run.settings.items() if v != ""}
            writer = self.writer._get_file_writer()  # type: ignore[no-untyped-call]
            for part in hparams(settings, final):  # type: ignore[no-untyped-call]
                writer.add_summary(part)
            for name, value in final.items():
                self.writer.add_scalar(name, value, self.step)
        self.writer.close()
