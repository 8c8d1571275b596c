"""A user's own model: any function or class that returns an `nn.Module`, named `package.module:function`.

An installed package can give such a function a short name (`fedapp.plugins`). The function is called with those
of these arguments that its signature names, and with `model-args`:

===============  ======================================================================================
`num_classes`    outputs of the head; a function that takes any keyword (`**kwargs`) gets it too
`input_shape`    of one sample: (C, H, W) images, (C, T) series, (F,) table rows
`kind`           `image`, `series`, `table`, or `array` for samples with more axes
===============  ======================================================================================

What it returns maps (B, *input_shape) float32 to logits (B, num_classes), or is a `SplitModel`. The head of a module is
its last `nn.Linear` with `num_classes` outputs, or the layer that the key `head` names; an identity takes its place,
and the rest is the body (`features`). With the key `width` a linear layer to so many features takes its place, so
that different networks can share a head. Logits stay the same to the last bit where nothing follows the head.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from fedapp import plugins
from fedapp.errors import BadRequest, counted, described, named_values, plain_value, raised
from fedapp.lazy import F, Tensor, nn, torch
from fedapp.models import weights
from fedapp.settings import ModelSettings, unless_auto

if TYPE_CHECKING:
    from fedapp.models.split import SplitModel

KINDS = {1: "table", 2: "series", 3: "image"}
CLOSE = 1e-5
"""Largest difference between the logits of a model and those of its body and head."""


PLAIN = ModelSettings()
"""What a model is built with where nothing is asked for."""


def side(settings: ModelSettings) -> int:
    """Return the side in pixels to which an own model's images are resized; 0 = as they are."""
    known = weights.preprocessing(settings.names[0]) if settings.weights else None
    return unless_auto(settings.input_size, known[0] if known else 0)


def header(settings: ModelSettings, unit: bool) -> dict[str, object]:
    """Return what the header of a stored model keeps of the settings that it was built with."""
    same = settings.model_dump(include={"head", "width", "weights", "freeze"})
    return {"args": settings.model_args, **same, "side": side(settings), "unit": unit}


def installed() -> dict[str, plugins.Entry]:
    """Return the models that installed packages add, by name; nothing is imported."""
    from fedapp.models.zoo import MODEL_NAMES  # the zoo builds on this module

    return plugins.entries("models", MODEL_NAMES)


def is_own(name: str) -> bool:
    """Whether a model is not fedapp's: `package.module:function`, or a name that an installed package adds."""
    from fedapp.models.zoo import MODEL_NAMES

    return ":" in name or (name not in MODEL_NAMES and name in installed())


def target(name: str) -> str:
    """Return the code that an own model stands for, `package.module:function`."""
    return name if ":" in name else installed()[name].target


def check_form(name: str, settings: ModelSettings) -> None:
    """Refuse a name that is not of the form `package.module:function`, and `model-args` that are not name=value.

    Raises
    ------
    BadRequest : says what to write. Nothing is imported.
    """
    if not plugins.well_formed(target(name)):
        raise BadRequest(f"model '{name}' is not of the form package.module:function")
    given = named_values("model-args", settings.model_args, f"They are the arguments of {name}")
    for taken in ("num_classes", "input_shape", "kind"):
        if taken in given:
            raise BadRequest(f"model-args: {taken} comes from the data: leave it out")


def factory(name: str) -> Callable[..., Any]:
    """Import the function or class that an own model names.

    Raises
    ------
    BadRequest : it cannot be imported (see `plugins.imported`), or cannot be called.
    """
    check_form(name, PLAIN)
    found = plugins.imported(name, f"model '{name}'") if ":" in name else installed()[name].load()
    if not callable(found):
        raise BadRequest(f"model '{name}' is not a function or class, but {type(found).__name__}")
    return found  # type: ignore[no-any-return]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Build on the CPU with random values of `seed`; the global random state is left as it was."""
    # Where it changes nothing it would only look at every call of PyTorch.
    here = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    with torch.random.fork_rng(devices=[]), here:
        # Seeds the CPU generator alone: torch.manual_seed would also reset the generators of all GPUs.
        torch.default_generator.manual_seed(seed)
        yield


def _input_shape(name: str, shape: tuple[int, ...], settings: ModelSettings) -> tuple[int, ...]:
    size = side(settings)
    if not size:
        return shape
    if len(shape) != 3:
        raise BadRequest(f"input-size is for images, and '{name}' gets {described(shape)}: leave it out")
    return shape[0], size, size


def resized(x: Tensor, side: int) -> Tensor:
    """Return images (B, C, H, W) as (B, C, side, side), bilinear; 0 = as they are."""
    if not side or x.shape[-2:] == (side, side):
        return x
    smaller = side < max(x.shape[-2:])
    return F.interpolate(x, (side, side), mode="bilinear", align_corners=False, antialias=smaller)


def _made(name: str, num_classes: int, shape: tuple[int, ...], settings: ModelSettings) -> nn.Module:
    """Call the user's function."""
    make = factory(name)
    shape = _input_shape(name, shape, settings)
    offered = {"num_classes": num_classes, "input_shape": shape, "kind": KINDS.get(len(shape), "array")}
    try:
        takes = dict(inspect.signature(make).parameters)
    except (TypeError, ValueError):  # some builtins and extensions have none
        takes = {}
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in takes.values())
    arguments = {n: v for n, v in offered.items() if n in takes or (n == "num_classes" and open_ended)}
    written = named_values("model-args", settings.model_args, f"They are the arguments of {name}")
    arguments |= {n: plain_value(v) for n, v in written.items()}
    try:
        net = make(**arguments)
    except (Exception, SystemExit) as e:
        called = ", ".join(f"{n}={v!r}" for n, v in arguments.items())
        raise BadRequest(
            f"model '{name}' cannot be built: {raised(e)}. It was called with ({called}); it takes "
            f"({', '.join(map(str, takes.values()))}): give the rest in model-args"
        ) from e
    if not isinstance(net, nn.Module):
        raise BadRequest(f"model '{name}' returns {type(net).__name__}: return an nn.Module")
    if any(nn.parameter.is_lazy(value) for value in (*net.parameters(), *net.buffers())):
        training = net.training
        # Lazy layers take their size from a first batch. It has no constant rows, which a model may divide by.
        _logits(name, net.eval(), torch.linspace(-1, 1, 2 * math.prod(shape)).view(2, *shape), num_classes)
        net.train(training)
    return net


def _head_path(name: str, net: nn.Module, num_classes: int, settings: ModelSettings) -> str:
    linear: dict[str, nn.Linear] = {path: layer for path, layer in net.named_modules() if isinstance(layer, nn.Linear)}
    fitting = [path for path, layer in linear.items() if layer.out_features == num_classes]
    if settings.head:
        if settings.head not in fitting:
            what = f"a Linear with {num_classes} outputs" if settings.head in linear else "a Linear layer of it"
            raise BadRequest(f"model '{name}': head = '{settings.head}' is not {what}: {_choices(linear, fitting)}")
        return settings.head
    if not fitting:
        raise BadRequest(f"model '{name}' has no Linear with {num_classes} outputs: {_choices(linear, fitting)}")
    return fitting[-1]


def _choices(linear: dict[str, nn.Linear], fitting: list[str]) -> str:
    if fitting:
        return f"set head to one of: {', '.join(fitting)}"
    sizes = ", ".join(f"{path} ({layer.out_features})" for path, layer in linear.items()) or "none"
    return f"end it with nn.Linear(..., num_classes), or return a SplitModel. Its Linear layers: {sizes}"


def _split(name: str, net: nn.Module, num_classes: int, settings: ModelSettings) -> SplitModel:
    """Cut a module into body and head; both keep their values."""
    from fedapp.models.split import SplitModel

    if isinstance(net, SplitModel):
        if settings.head or settings.width:
            raise BadRequest(f"model '{name}' is a SplitModel and has a head of its own: leave out head and width")
        if net.num_classes != num_classes:
            raise BadRequest(
                f"model '{name}' has a head with {counted(net.num_classes, 'output')}, the data have "
                f"{counted(num_classes, 'class')}: pass num_classes on"
            )
        if odd := next((n for n in net.state_dict() if not n.startswith(("features.", "head."))), ""):
            raise BadRequest(f"model '{name}': '{odd}' is outside features and head: put it into features")
        if type(net.head) is not nn.Linear:
            raise BadRequest(f"model '{name}' has a head of type {type(net.head).__name__}: make it a plain nn.Linear")
        _check_apart(name, net.head, net.features)
        net.name = name
        return net
    path = _head_path(name, net, num_classes, settings)
    old = net.get_submodule(path)
    assert isinstance(old, nn.Linear)
    # A plain layer: the names head.weight and head.bias must be the same in all models.
    head = nn.Linear(old.in_features, num_classes)
    with torch.no_grad():
        head.weight.copy_(old.weight)
        if old.bias is None:
            head.bias.zero_()
        else:
            head.bias.copy_(old.bias)
    rest: nn.Module = nn.Identity()
    if settings.width:
        rest, head = nn.Linear(old.in_features, settings.width), nn.Linear(settings.width, num_classes)
        if old.bias is None:
            nn.init.zeros_(head.bias)
    if path:
        parent, _, leaf = path.rpartition(".")
        setattr(net.get_submodule(parent), leaf, rest)
    else:
        net = rest  # the model is its head
    _check_apart(name, old, net)
    return SplitModel(name=name, features=net, activation=nn.Identity(), head=head)


def _check_apart(name: str, head: nn.Module, body: nn.Module) -> None:
    if {*head.parameters()} & {*body.parameters()}:
        raise BadRequest(f"model '{name}': head and body share an array: give the head one of its own")


@functools.lru_cache(maxsize=64)
def head_of(name: str, num_classes: int, shape: tuple[int, ...], settings: ModelSettings) -> tuple[int, bool]:
    """Return the number of features that the head of an own model takes, and whether the user's layer has no bias.

    Raises
    ------
    BadRequest : it cannot be imported or built, or has no head.
    """
    from fedapp.models.split import SplitModel

    with seeded(0):
        net = _made(name, num_classes, shape, settings)
        bare = False
        if not isinstance(net, SplitModel):
            bare = getattr(net.get_submodule(_head_path(name, net, num_classes, settings)), "bias", None) is None
        return _split(name, net, num_classes, settings).width, bare


def build(
    name: str, *, num_classes: int, shape: tuple[int, ...], seed: int, settings: ModelSettings, unit: bool = False
) -> SplitModel:
    """Build an own model with random values of `seed`, the head first, as `build_model` does.

    Models of the same width, own or of the zoo, therefore start with the same head; a head without bias gets zeros.

    Raises
    ------
    BadRequest : it cannot be imported or built, or has no head.
    """
    from fedapp.models.split import SplitModel

    features, bare = head_of(name, num_classes, shape, settings)
    with seeded(seed):
        drawn = nn.Linear(features, num_classes)
        net = _made(name, num_classes, shape, settings)
        if settings.weights:
            split = isinstance(net, SplitModel)
            head = "head" if split else _head_path(name, net, num_classes, settings)
            weights.fill(name, net, settings.weights, head)
        model = _split(name, net, num_classes, settings)
    if model.width != features:
        raise BadRequest(f"model '{name}' has {counted(features, 'feature')} at one call and {model.width} at the next")
    with torch.no_grad():
        model.head.weight.copy_(drawn.weight)
        model.head.bias.copy_(torch.zeros_like(drawn.bias) if bare else drawn.bias)
    if settings.freeze:
        weights.freeze(name, model, settings.freeze)
    model.unit = unit
    model.features.register_forward_pre_hook(functools.partial(_prepared, side(settings)))
    return model


def _prepared(side: int, module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Give images their size, and store them by channel: on channels_last batches x.view(len(x), -1) fails."""
    return tuple(by_channel(resized(a, side)) for a in arguments)


def by_channel(x: Tensor) -> Tensor:
    """Return the same values with the strides of a new tensor; a single channel may have those of channels_last."""
    return x.contiguous().flatten(1).view(x.shape)


def check(name: str, x: Tensor, *, num_classes: int, settings: ModelSettings) -> None:
    """Try an own model on real rows before anything is trained.

    Parameters
    ----------
    x : (2, *shape) float32, two rows as local training feeds them.

    Raises
    ------
    BadRequest : says which of these is not so: logits of shape (2, num_classes), the same twice, finite, equal to
        those of body and head; a loss that can be differentiated; initial values that the seed decides.
    """
    shape = tuple(x.shape[1:])
    _input_shape(name, shape, settings)
    x = by_channel(resized(x, side(settings)))
    with seeded(0):
        net = _made(name, num_classes, shape, settings).eval()
        logits, again = (_logits(name, net, x, num_classes) for _ in range(2))
        _logits(name, net, x[:1], num_classes)
        if not torch.equal(logits, again):
            raise BadRequest(
                f"model '{name}' returns something else for the same rows in evaluation mode: switch off "
                "randomness unless self.training"
            )
        model = _split(name, net, num_classes, settings.replaced(width=0))
        with torch.no_grad():
            try:
                z = model.represent(x)
                if z.shape != (len(x), model.width):
                    raise BadRequest(
                        f"model '{name}' has features of shape {tuple(z.shape)}, not ({len(x)}, {model.width}): "
                        "flatten them before the head"
                    )
                gap = float((model.classify(z) - logits).abs().max())
            except BadRequest:
                raise
            except Exception as e:
                raise BadRequest(
                    f"model '{name}' does not run without its head ({raised(e)}): call the head as a "
                    "layer, or return a SplitModel"
                ) from e
        if gap > CLOSE * max(1.0, float(logits.abs().max())):
            raise BadRequest(
                f"model '{name}': something follows the head (largest difference {gap:.2g}): return logits, or a "
                "SplitModel, or name the last layer in head"
            )
    with seeded(0):
        _backward(name, _checked_copy(name, x, shape, num_classes, settings), x, num_classes)


def _checked_copy(
    name: str, x: Tensor, shape: tuple[int, ...], num_classes: int, settings: ModelSettings
) -> SplitModel:
    """Return a copy of a model whose initial values the seed decides, and whose state dict holds all that it draws."""
    first, second, third = (
        build(name, num_classes=num_classes, shape=shape, seed=seed, settings=settings) for seed in (1, 1, 2)
    )
    values, others = first.state_dict(), second.state_dict()
    if values.keys() != others.keys() or not all(torch.equal(v, others[n]) for n, v in values.items()):
        raise BadRequest(f"model '{name}' gets other initial values at each call: draw them with PyTorch alone")
    try:
        tried = copy.deepcopy(first)
    except Exception as e:
        raise BadRequest(
            f"model '{name}' cannot be copied, and every client works on a copy ({' '.join(str(e).split())[:160]}): "
            "hold no lock or file, and take weight_norm from torch.nn.utils.parametrizations, not from torch.nn.utils"
        ) from e
    third.load_state_dict(values)
    pairs = zip(first.named_buffers(), third.buffers(), strict=True)
    odd = next((f"buffer '{n}'" for (n, buffer), other in pairs if not torch.equal(buffer, other)), "")
    logits, again = (_logits(name, model.eval(), x, num_classes) for model in (first, third))
    if odd or not torch.allclose(logits, again, rtol=CLOSE, atol=CLOSE):
        raise BadRequest(
            f"model '{name}': {odd or 'a tensor'} depends on the seed and is not stored: register it as a buffer with "
            "persistent=True"
        )
    return tried


def _logits(name: str, net: nn.Module, x: Tensor, num_classes: int) -> Tensor:
    try:
        with torch.no_grad():
            logits = net(x)
    except Exception as e:
        raise BadRequest(f"model '{name}' fails on {described(tuple(x.shape[1:]))}: {raised(e)}") from e
    if not isinstance(logits, Tensor):
        raise BadRequest(f"model '{name}' returns {type(logits).__name__}: return logits (B, {num_classes}) alone")
    if logits.shape != (len(x), num_classes):
        raise BadRequest(
            f"model '{name}' returns {tuple(logits.shape)}, the data have {counted(num_classes, 'class')}: pass "
            f"num_classes on, and return ({len(x)}, {num_classes}) for {counted(len(x), 'row')}"
        )
    if not logits.isfinite().all():
        raise BadRequest(f"model '{name}' returns logits that are not finite: check its initial values")
    return logits


def _backward(name: str, model: SplitModel, x: Tensor, num_classes: int) -> None:
    """Try one backward pass in training mode, where dropout, BatchNorm and auxiliary outputs are on, after a score."""
    try:
        with torch.inference_mode():
            model.eval()(x)
        logits = model.train()(x)
        F.cross_entropy(logits, torch.arange(len(x)) % num_classes).backward()  # type: ignore[no-untyped-call]
    except Exception as e:
        remedy = "return logits alone, also in training mode (such as aux_logits=false in model-args)"
        if "inference tensor" in str(e).lower():
            remedy = "make tensors that it keeps from one forward to the next in __init__, as buffers"
        raise BadRequest(f"model '{name}' cannot be trained ({raised(e)}): {remedy}") from e
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if model.head.weight.grad is None or not all(bool(g.isfinite().all()) for g in gradients):
        raise BadRequest(f"model '{name}' has gradients that are not finite, or none: check its forward function")
