"""`fedapp export`: a stored model with its transform as one graph, for programs that have no fedapp.

The graph maps raw samples (N, ...), of any N, to logits (N, C). With a pretrained body it holds the body too
(:mod:`fedapp.bodies.graph`). The names of the classes and what a raw sample is
travel in the file: `fedapp.json` among the extra files of `.pt2`, the metadata entry `fedapp` of `.onnx`. With a body
`kind` is `image`, uint8 (n, h, w, c), or `text`, ids of the tokenizer whose SHA-256 `extraction` names, and their mask.
"""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedapp.bodies.extractor import INPUTS, Extractor, padded
from fedapp.bodies.graph import joined
from fedapp.core.products import Linear
from fedapp.data.columns import BODY
from fedapp.errors import BadRequest
from fedapp.files import atomic, explained
from fedapp.results.predict import LoadedModel, described
from fedapp.results.whole import WholeModel

FORMATS = ("pt2", "onnx")
CHECKED = 8
"""Random samples on which a written file is compared with the module."""
CLOSE = 1e-4
"""Largest difference of two logits that another engine may cause, relative to the largest logit."""


def examples(net: LoadedModel, count: int) -> Tensor:
    """Draw raw samples (count, *raw_shape), the same in every call."""
    generator = torch.Generator().manual_seed(0)
    shape = (count, *net.raw_shape)
    if net.kind == "image":
        return torch.randint(0, int(net.inputs.scale) + 1, shape, generator=generator, dtype=torch.uint8)
    axes = (1, -1, *(1 for _ in net.raw_shape[1:]))
    mean, std = (torch.tensor(v, dtype=torch.float32).view(axes) for v in (net.inputs.mean, net.inputs.std))
    return mean + std * torch.randn(shape, generator=generator)


def samples(net: WholeModel, count: int) -> tuple[list[Any], dict[str, NDArray[Any]]]:
    """Draw raw samples, and the inputs of a graph for them."""
    if net.kind == "text":
        texts = [" ".join(("a", "my card", "how", "ten")[: 1 + row % 4]) for row in range(count)]
        return texts, dict(zip(INPUTS, padded(net.extractor.tokens(texts)), strict=False))
    x = np.random.default_rng(0).integers(0, 256, (count, 40, 50, net.extractor.channels), dtype=np.uint8)
    return list(x), {"raw": x}


def write(net: LoadedModel | WholeModel, to: str, path: Path) -> float:
    """Write a model as one graph, read it again, and compare it with the module.

    Parameters
    ----------
    to : `pt2` (torch.export) or `onnx`.

    Returns
    -------
    The largest difference of two logits on `CHECKED` random samples.

    Raises
    ------
    BadRequest : unknown format, the packages for ONNX are missing, the file cannot be written, or the model is none
        that one graph computes for any number of samples.
    RuntimeError : the file computes something else than the module.
    """
    if to not in FORMATS:
        raise BadRequest(f"--to {to}: choose from {', '.join(FORMATS)}")
    extractor, facts = None, _facts(net)
    if isinstance(net, WholeModel):
        if to != "onnx":
            raise BadRequest(f"--to {to} takes no body of ONNX: choose --to onnx")
        (raw, given), extractor = samples(net, CHECKED), net.extractor
        x, head = torch.from_numpy(net.features(raw)), net.head
        assert isinstance(head, LoadedModel)
        net = head
    else:
        x = examples(net, CHECKED)
        given = {"raw": x.numpy()}
    net = net.cpu().eval()
    with torch.inference_mode(), _traced():
        wanted = net(x)  # before tracing, so that the transform's cached constants are real tensors
    with explained(f"{path} cannot be written", "choose another --out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic(path, mode=0o666) as part:
            with _traced():
                twin = _traceable(net)
                found = _pt2(twin, part, facts, x) if to == "pt2" else _onnx(twin, part, facts, x, given, extractor)
            difference = float((found - wanted).detach().abs().max())
            if not difference <= CLOSE * max(1.0, float(wanted.abs().max())):
                raise RuntimeError(f"the exported graph differs from the model by {difference:g}; nothing was kept")
    return difference


def _facts(net: LoadedModel | WholeModel) -> str:
    """Return classes and raw samples as JSON."""
    if isinstance(net, LoadedModel):
        return json.dumps(described(net.inputs, net.classes))
    found = described(net.head.inputs, net.classes)  # shape and normalisation in it are of the features
    return json.dumps({"kind": net.kind, **{key: found[key] for key in ("classes", "num_classes", BODY, "extraction")}})


@contextmanager
def _traced() -> Iterator[None]:
    """Explain why the model cannot be exported as one graph."""
    try:
        yield
    except (OSError, BadRequest):
        raise
    except Exception as e:
        why = next((line.strip() for line in str(e).splitlines() if line.strip()), "")
        raise BadRequest(
            f"the model cannot be exported ({type(e).__name__}: {why[:200]}): forward must be one graph for any number "
            "of samples, so write x.flatten(1), not x.view(32, -1), and choose nothing by the values or the number of "
            "samples; in Python fedapp.load uses it as it is"
        ) from e


def _traceable(net: LoadedModel) -> LoadedModel:
    """Return a copy with PyTorch's own linear layers: ours choose a kernel by the size of the batch."""
    twin = copy.deepcopy(net)
    for module in twin.modules():
        if type(module) is Linear:
            module.__class__ = nn.Linear  # type: ignore[assignment]
    return twin


def _pt2(net: LoadedModel, path: Path, facts: str, x: Tensor) -> Tensor:
    # Two rows: a batch of one would be taken as a constant.
    program = torch.export.export(net, (x[:2],), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    written = io.BytesIO()  # PyTorch's own writer aborts the process where the disk is full
    torch.export.save(program, written, extra_files={"fedapp.json": facts})
    path.write_bytes(written.getbuffer())
    # By a name that does not end in .pt2, PyTorch warns.
    with torch.inference_mode(), path.open("rb") as file:
        logits: Tensor = torch.export.load(file).module()(x)
    return logits


def _onnx(
    net: LoadedModel, path: Path, facts: str, x: Tensor, given: Mapping[str, NDArray[Any]], extractor: Extractor | None
) -> Tensor:
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as e:
        raise BadRequest(f"--to onnx needs the package {e.name}: pip install 'fedapp[onnx]', or choose --to pt2") from e
    program = torch.onnx.export(
        net, (x[:2],), dynamo=True, dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
        input_names=["features" if extractor else "raw"], output_names=["logits"], verbose=False,
    )  # fmt: skip
    assert program is not None
    model = joined(extractor, program.model_proto) if extractor else program.model_proto
    onnx.helper.set_model_props(model, {"fedapp": facts})
    path.write_bytes(model.SerializeToString())  # weights in the same file
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    found: NDArray[np.float32] = session.run(["logits"], {**given})[0]
    return torch.from_numpy(found)
