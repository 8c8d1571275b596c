"""A pretrained body in this process: pictures, arrays or texts in, features out.

ONNX Runtime in float32 with one thread. A second thread would spin while it waits for a core, so more cores are used by
more processes. The features of a row do not depend on the other rows of its batch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from fedapp import __version__
from fedapp.bodies.known import Body
from fedapp.data.cache import cache_root
from fedapp.errors import BadRequest, described
from fedapp.files import atomic, explained
from fedapp.lazy import F, nn, torch

Float32 = npt.NDArray[np.float32]

PICTURES, TEXTS = 8, 32
"""Rows that run at a time."""
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
"""Names of the inputs that a body of texts may have."""


def needed(*modules: str) -> None:
    """Refuse to go on without modules of the extra `features`.

    Raises
    ------
    BadRequest : one of them is missing; says what to install.
    """
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise BadRequest(f"bodies need {module}: pip install 'fedapp[features]'")


class Extractor:
    """A session of one body; `fit` comes before rows or texts.

    Attributes
    ----------
    body : with the `size` that an ONNX file fixes, and after `fit` with `pooling` and `width`.
    file : the ONNX file.   inputs : of the session, by name.   batch : number of samples that the file fixes, else 0.
    channels : of the pictures that the body takes; 0 before `fit`, and for other samples.
    cut : texts so far that had more tokens than the body takes.

    Raises
    ------
    BadRequest : a package is missing, or a file cannot be read.
    """

    def __init__(self, body: Body) -> None:
        needed("onnxruntime", *(["onnx"] if body.make else []), *(["tokenizers"] if body.tokenizer else []))
        self.cut, self.channels = 0, 0
        self.file = _exported(body) if body.make else body.file
        self._session = _session(self.file)
        self.inputs = {i.name: i for i in self._session.get_inputs()}
        self._tokenizer: Any = _tokenizer(body) if body.tokenizer else None
        first = next(iter(self.inputs.values()), None)
        if first is None or not first.shape:
            raise BadRequest(f"the body '{body.name}' takes no batch of samples: its first input must be (n, ...)")
        # What the file fixes of a batch and of one sample: numbers, and 0 where any will do.
        self.batch, *self._fixed = (n if isinstance(n, int) else 0 for n in first.shape)
        side = self._fixed[1] if len(self._fixed) == 3 and self._fixed[1] == self._fixed[2] else 0
        if side and body.size not in (0, side):
            raise BadRequest(f"size = {body.size}: the body '{body.name}' takes {side} x {side} pixels")
        self.body = replace(body, size=side or body.size)

    def fit(self, shape: tuple[int, ...] | None, image: bool = False) -> None:
        """Compare the body with samples, and run it once.

        Parameters
        ----------
        shape : of one sample, (C, H, W) pictures, others as they are; None = texts.   image : they are pictures.

        Raises
        ------
        BadRequest : the body does not take such samples; says what to give.
        """
        body, inputs = self.body, list(self.inputs.values())
        if (shape is None) != (body.tokenizer is not None):
            takes, given = ("texts", "none are named") if shape else ("no texts", "no tokenizer is given")
            raise BadRequest(
                f"the body '{body.name}' takes {takes}, and {given}: "
                + ("name their column with text" if shape else "give its tokenizer.json")
            )
        if shape is None:
            if unknown := sorted(set(self.inputs) - set(INPUTS)):
                raise BadRequest(f"the body '{body.name}' has an input '{unknown[0]}': texts have {', '.join(INPUTS)}")
            found = self.texts(["a", "a"])  # two, so that a body that mixes samples shows
        else:
            if len(inputs) != 1 or inputs[0].type != "tensor(float)" or len(self._fixed) != len(shape):
                takes = "; ".join(f"{i.name} {i.type} {i.shape}" for i in inputs)
                raise BadRequest(f"the body '{body.name}' takes {takes}, and the data have {described(shape)}")
            self._fit_pictures(shape[0]) if image else self._fit_arrays(shape)
            found = self.rows(np.zeros((2, *shape), np.float32))
        self.body = replace(self.body, width=found.shape[1])

    def _fit_arrays(self, shape: tuple[int, ...]) -> None:
        if self.body.mean or any(n not in (0, there) for n, there in zip(self._fixed, shape, strict=True)):
            raise BadRequest(f"the body '{self.body.name}' takes {self._fixed}, and the data have {described(shape)}")
        self.body = replace(self.body, size=0)

    def _fit_pictures(self, channels: int) -> None:
        body = self.body
        if not body.size or not body.mean:
            raise BadRequest(
                f"the body '{body.name}' takes pictures: give size, and mean and std in grey levels 0 .. 255; "
                "torchvision's weights want 123.675,116.28,103.53 and 58.395,57.12,57.375"
            )
        self.channels = self._fixed[0] or 3
        if {len(body.mean), len(body.std)} - {1, self.channels} or channels not in (1, self.channels):
            raise BadRequest(
                f"the body '{body.name}' takes {self.channels} channels: the data have {channels}, mean "
                f"{len(body.mean)} and std {len(body.std)}"
            )

    def rows(self, x: npt.NDArray[Any]) -> Float32:
        """Return the features (n, width) of pictures (n, C, H, W) with levels 0 .. 255, or of other arrays."""
        (name,) = self.inputs
        parts = []
        for start in range(0, len(x), size := self.batch or PICTURES):
            rows = torch.from_numpy(np.array(x[start : start + size], np.float32))
            if self.channels:
                mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (self.body.mean, self.body.std))
                rows, side = rows.expand(-1, self.channels, -1, -1), (self.body.size,) * 2
                rows = (F.interpolate(rows, side, mode="bilinear", align_corners=False) - mean) / std
            parts.append(self._run({name: rows.numpy()}))
        return np.concatenate(parts)

    def texts(self, texts: Sequence[str]) -> Float32:
        """Return the features (n, width) of texts, with norm 1."""
        found: dict[int, Float32] = {}
        encoded = self.tokens(texts)
        order = sorted(range(len(texts)), key=lambda row: len(encoded[row]))  # little padding in a batch
        for start in range(0, len(order), size := self.batch or TEXTS):
            batch = order[start : start + size]
            ids, mask = padded([encoded[row] for row in batch])
            given = dict(zip(INPUTS, (ids, mask, np.zeros_like(ids)), strict=True))
            z = self._run({name: given[name] for name in self.inputs}, mask)
            norm = np.linalg.norm(z, axis=1, keepdims=True)
            found |= zip(batch, z / np.where(norm > 0, norm, 1), strict=True)
        return np.stack([found[row] for row in range(len(texts))])

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the numbers of the tokens of each text, and count those that are cut."""
        encoded = self._tokenizer.encode_batch([*texts])
        self.cut += sum(bool(e.overflowing) for e in encoded)
        return [e.ids for e in encoded]

    def _run(self, inputs: dict[str, npt.NDArray[Any]], mask: npt.NDArray[np.int64] | None = None) -> Float32:
        """Run one batch; the mean over positions, or over the tokens of a mask, is taken where there are any."""
        body, count = self.body, len(next(iter(inputs.values())))
        lacking = max(0, self.batch - count)
        filled = {name: np.concatenate([rows, rows[-1:].repeat(lacking, axis=0)]) for name, rows in inputs.items()}
        try:
            z = np.asarray(self._session.run(None, filled)[0])
        except Exception as e:  # ONNX Runtime has errors of its own
            shapes = ", ".join(f"{name} {array.shape}" for name, array in inputs.items())
            raise BadRequest(f"the body '{body.name}' fails on {shapes} ({' '.join(str(e).split())[:300]})") from e
        if z.shape[:1] != (count + lacking,):
            raise BadRequest(
                f"the body '{body.name}' returns {z.shape} for {count + lacking} samples, not a row for each: in "
                "PyTorch write x.flatten(1), not x.view(len(x), -1)"
            )
        z = z[:count]
        pooling = "none" if z.ndim == 2 else "mean" if z.ndim == (4 if mask is None else 3) else ""
        if not pooling or body.pooling not in ("", pooling) or z.dtype != np.float32:
            raise BadRequest(f"the body '{body.name}' returns {z.dtype} {z.shape}: wanted is float32 (n, width)")
        self.body = replace(body, pooling=pooling)
        if z.ndim == 4:
            return np.asarray(z.mean(axis=(2, 3)), np.float32)
        if z.ndim == 3 and mask is not None:
            weight = mask[..., None].astype(np.float32)
            return np.asarray((z * weight).sum(axis=1) / np.maximum(weight.sum(axis=1), 1), np.float32)
        return z


def padded(tokens: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the tokens of texts as `input_ids`, filled up with 0, and the mask of real tokens; both int64 (n, t)."""
    ids, mask = (np.zeros((len(tokens), max(1, *map(len, tokens))), np.int64) for _ in range(2))
    for row, numbers in enumerate(tokens):
        ids[row, : len(numbers)], mask[row, : len(numbers)] = numbers, 1
    return ids, mask


def _session(file: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    try:
        # From bytes no tensor can be read from another file, which the SHA-256 would not cover.
        return onnxruntime.InferenceSession(file.read_bytes(), options, providers=["CPUExecutionProvider"])
    except Exception as e:
        raise BadRequest(
            f"{file} cannot be read as ONNX ({' '.join(str(e).split())[:300]}): export it again, as one file with its "
            "weights"
        ) from e


def _tokenizer(body: Body) -> Any:
    import tokenizers

    try:
        found = tokenizers.Tokenizer.from_file(str(body.tokenizer))
    except Exception as e:  # the library raises bare exceptions
        raise BadRequest(f"{body.tokenizer} cannot be read as tokenizer.json ({' '.join(str(e).split())[:200]})") from e
    if body.tokens <= (special := found.num_special_tokens_to_add(False)):
        raise BadRequest(f"tokens = {body.tokens}: the tokenizer adds {special} to each text: give more")
    # Files may fix another truncation, and padding up to it.
    found.enable_truncation(body.tokens)
    found.no_padding()
    return found


def _exported(body: Body) -> Path:
    """Return the ONNX file of a network in PyTorch, exported once a machine."""
    assert body.make is not None
    unfit = replace(body, pooling="", width=0)  # the same before and after `fit`
    made_by = [unfit.digest, body.package, __version__, str(torch.__version__)]
    key = hashlib.sha256(json.dumps(made_by).encode()).hexdigest()[:16]
    final = cache_root() / "bodies" / f"{key}.onnx"
    if not final.is_file():
        net = body.make(body.file).eval()
        with explained(f"cannot write {final.parent}", "set FEDAPP_CACHE to another folder"):
            final.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(final.with_suffix(".lock")), atomic(final, durable=True) as part:
                _export(net, body, part)
    return final


def _export(net: nn.Module, body: Body, file: Path) -> None:
    sample = torch.zeros(1, 3, body.size, body.size)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it prefers another exporter, which needs a further package
            torch.onnx.export(
                net, (sample,), str(file), input_names=["x"], output_names=["z"], opset_version=17, dynamo=False,
                dynamic_axes={"x": {0: "n"}, "z": {0: "n"}},
            )  # fmt: skip
    except Exception as e:
        raise BadRequest(f"the body '{body.name}' cannot be exported ({' '.join(str(e).split())[:300]})") from e
