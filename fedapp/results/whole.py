"""A trained head together with the pretrained body under it: raw pictures or texts in, classes out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedapp.bodies.extraction import of_files
from fedapp.bodies.extractor import Extractor
from fedapp.bodies.known import of_text
from fedapp.data import pictures, tables
from fedapp.data.columns import PLAIN, features_problem, read_unlabelled
from fedapp.data.transforms import InputSpec
from fedapp.errors import BadRequest, raised

Raw: TypeAlias = NDArray[Any] | Sequence[NDArray[Any]] | Sequence[str]


class AnotherBody(BadRequest):
    """A head is on features of another body than the given one."""


class Head(Protocol):
    """What is needed of a classifier of features, such as a `LoadedModel`."""

    classes: tuple[str, ...]
    inputs: InputSpec
    about: str

    def predict(self, raw: NDArray[Any]) -> NDArray[np.float32]:
        """Return the class probabilities (N, C) of features (N, width)."""


class WholeModel:
    """A trained classifier of raw samples: a pretrained body and a head on its features.

    Raw samples are texts, or pictures with levels 0 .. 255, uint8 (N, H, W, C) or (N, H, W). A list of pictures may
    have several sizes.

    Parameters
    ----------
    head : trained on features.   body : as :func:`fedapp.bodies.known.of_text` reads it; what it lacks of the
        preprocessing is taken from the model.

    Attributes
    ----------
    head, extractor : its parts.   kind : `image` or `text`.   classes, about : of the head.

    Raises
    ------
    BadRequest : the head is on no features, or on those of another body; or a package is missing.
    """

    def __init__(self, head: Head, body: str) -> None:
        inputs = head.inputs
        if not inputs.body:
            raise BadRequest("this model was not trained on features of a pretrained body: leave the body out")
        told: dict[str, Any] = json.loads(inputs.extraction or "{}")
        self.head, self.classes, self.about = head, head.classes, head.about
        if told.get("resize") not in (None, "", "bilinear"):
            raise BadRequest(
                f"this model was trained on features of pictures {told['resize']} (data set hf), and raw pictures are "
                "resized in another way: give features that fedapp features extracts of a data set hf"
            )
        try:
            found = of_text(body, told)
            differ = ["weights"] if told.get("weights", found.weights) != found.weights else []
            if not differ:
                self.extractor, self.kind = Extractor(found), "text" if found.tokenizer else "image"
                self.extractor.fit(None if found.tokenizer else (1, 8, 8), self.kind == "image")
                found = self.extractor.body
        except BadRequest:
            raise
        except (TypeError, ValueError, OverflowError, RuntimeError, MemoryError) as e:
            raise BadRequest(f"the record of the model's body is damaged ({raised(e)}): take another copy") from e
        if differ or found.digest != inputs.body:
            differ = differ or [key for key, value in found.identity().items() if told.get(key, value) != value]
            raise AnotherBody(
                f"the body '{found.name}' is not the one of this model ({inputs.body[:8]}): give the one whose "
                "features it was trained on" + (f"; {', '.join(differ)} differ" if differ else "")
            )

    def wanted(self) -> str:
        """Return in words which raw samples the model takes."""
        return "texts" if self.kind == "text" else "pictures uint8 (N, H, W, C) of any size, grey or in colour"

    def features(self, raw: Raw) -> NDArray[np.float32]:
        """Return the features (N, width) of raw samples.

        Raises
        ------
        BadRequest : samples of another kind, or features that are not finite or all zero.
        """
        if self.kind == "text":
            if isinstance(raw, str) or not all(isinstance(text, str) and text.strip() for text in raw):
                raise BadRequest("this model takes texts, and none may be empty: give one as a list, [text]")
            parts = [self.extractor.texts([str(text).strip() for text in raw])] if len(raw) else []
        else:
            axes = np.shape(raw) if isinstance(raw, np.ndarray) else ()
            if len(axes) in (1, 2) or (len(axes) == 3 and axes[2] in (1, self.extractor.channels)):
                raise BadRequest(f"this model takes {self.wanted()}, but was given {axes}: give one picture as x[None]")
            parts = [self.extractor.rows(self._picture(picture)) for picture in raw]
        found = np.concatenate([np.zeros((0, self.extractor.body.width), np.float32), *parts])
        with np.errstate(over="ignore"):
            problem = features_problem(found.astype(np.float16))
        if problem:
            raise BadRequest(f"of the features of these samples {problem} as float16: leave such samples out")
        return found

    def _picture(self, given: Any) -> NDArray[np.uint8]:
        """Return one picture as (1, C, H, W)."""
        x = np.asarray(given)
        x = x[..., None] if x.ndim == 2 else x
        if x.dtype != np.uint8 or x.ndim != 3 or x.shape[2] not in (1, self.extractor.channels) or not x.size:
            raise BadRequest(f"this model takes {self.wanted()}, but one is {x.dtype} {x.shape}")
        return x.transpose(2, 0, 1)[None]

    def predict(self, raw: Raw) -> NDArray[np.float32]:
        """Return the class probabilities (N, C) of raw samples.

        Features are rounded to float16, as in the files that `fedapp features` writes.

        Raises
        ------
        BadRequest : see `features`.
        """
        return self.head.predict(self.features(raw).astype(np.float16).astype(np.float32))

    def read(self, path: Path, text: str = "") -> tuple[Raw, list[str]]:
        """Read the raw samples of one file: a picture, pictures in column `x` of an `.npz` file, or texts of a table.

        Parameters
        ----------
        text : the column of texts.

        Returns
        -------
        The samples, and their names: the file, and the row where it has several.

        Raises
        ------
        BadRequest : the file cannot be read, or does not fit the model.
        """
        x: Raw
        if (self.kind == "text") != bool(text):
            raise BadRequest(
                "name the column of the texts with --text" if not text else "--text is for models of texts"
            )
        if self.kind == "text":
            x = tables.column_of_texts(Path(of_files(path, text, PLAIN).place), text)
        elif path.suffix.lower() == ".npz":
            x = read_unlabelled(path)["x"]
        else:
            with pictures.named(path):
                pictures.check_format(path)
                return [pictures.whole(path, self.extractor.channels)], [str(path)]
        return x, [f"{path}:{row}" for row in range(len(x))]
