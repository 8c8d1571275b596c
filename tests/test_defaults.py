"""The default of every hyperparameter, the values that it may have, and the models that may take part.

A change of a default is a change of the published numbers, and must be meant.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import pytest

from fedapp import registry
from fedapp.cli import listing
from fedapp.errors import BadRequest
from fedapp.method import TrainDefaults

CCVR: dict[str, Any] = {
    "base": "fedavg",
    "base_args": "",
    "samples": 100,
    "mc_mode": "fixed",
    "transform": "none",
    "cov": "full",
    "rank": 16,
    "dtype": "float32",
    "shrink": 0.0,
    "min_count": 1,
    "lr": 0.01,
    "momentum": 0.9,
    "weight_decay": 1e-05,
    "epochs": 30,
    "batch": 64,
    "oracle": False,
    "oracle_samples": 0,
    "clsnorm": False,
    "clsprox": 0.0,
}
SUMS = {"base": "fedavg", "base_args": "", "min_count": 1, "scale": "trained", "personal": False, "choose": False}
TOTALS = {**SUMS, "totals": "", "leave": False}
"""Of all heads from sums."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "fedclassavg": {
        "preset": "khosla",
        "rho": 0.1,
        "contrastive": 1.0,
        "share": "head",
        "temperature": None,
        "base_temperature": None,
        "normalise": None,
        "proximal": None,
        "warmup_epochs": None,
        "beta1": 0.5,
    },
    "cwfedavg": {"lam": "auto", "wdr": "paper", "layers": "output", "dist": "approx", "tau": 0.0, "share": "all"},
    "fedgh": {
        "header_lr": 0.01,
        "header_batch": "sample",
        "header_epochs": 1,
        "header_clip": 50.0,
        "order": "shuffled",
        "mode": "trained",
        "min_class_count": 1,
    },
    "ccvr": CCVR,
    "pccvr": {**CCVR, "tau": 1.0, "smooth": 1.0, "shares": "own"},
    "lgfedavg": {"average": "samples"},
    "fedprox": {"mu": 0.01},
    "fedavgm": {"momentum": 0.5, "server_lr": 1.0, "dampening": 0.0, "nesterov": False},
    "fedyogi": {"server_lr": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 0.001},
    "moon": {"mu": 1.0, "tau": 0.5},
    "fedncm": {**TOTALS, "metric": "cosine"},
    "fed3r": {
        **TOTALS,
        "lam": 0.01,
        "random_features": 0,
        "wire": "f64",
        "relative": False,
        "normalise": False,
        "bias": True,
    },
    "lda": {**TOTALS, "shrink": 0.1, "wire": "f64", "prior": "uniform"},
    "qda": {
        "base": "fedavg",
        "base_args": "",
        "min_count": 1,
        "scale": "fit",
        "personal": False,
        "share": 0.7,
        "shrink": 0.2,
        "prior": "uniform",
        "force": False,
    },
    "fedcof": {**SUMS, "gamma": 1.0},
    "fedproto": {
        "lam": 1.0,
        "distance": "mse",
        "average": "plain",
        "collect": "eval",
        "down": "own",
        "inference": "classifier",
    },
    "ktpfl": {
        "step": "self-scaled",
        "lr_c": 0.02,
        "rho": 0.7,
        "coefficients": "softmax",
        "temperature": 10.0,
        "distil": "kl",
        "scale": True,
        "distil_epochs": 1,
        "public_batch": 0,
        "epochs": "fixed",
        "freeze_bn": False,
        "ship": "indices",
        "share": "predictions",
    },
    "fml": {"small": "auto", "alpha": 0.5, "beta": 0.5, "divergence": "batch", "average": "plain"},
    "fedkd": {
        "small": "auto",
        "energy_start": 0.95,
        "energy_end": 0.98,
        "energy_rounds": 20,
        "distil": 1.0,
        "floor": 1.0,
        "divergence": "batch",
        "average": "plain",
    },
    "fd": {"gamma": 1.0, "output": "softmax", "include_self": False, "collect": "eval", "down": "own"},
    "fedamp": {"form": "cosine", "scale": 25.0, "xi": 0.5, "sigma": 10.0, "alpha": 10.0, "lam": 1.0, "start": "mix"},
    "fedfomo": {"models": 5, "baseline": "before", "validation": 0.2, "epsilon": 0.3, "decay": 0.95},
    "cfl": {
        "thresholds": "relative",
        "r1": 0.4,
        "r2": 0.5,
        "eps1": 0.4,
        "eps2": 1.6,
        "linkage": "single",
        "gamma": 0.7,
        "smooth": 3,
        "start_round": 10,
        "min_size": 2,
        "max_stale": 0,
        "weighting": "uniform",
    },
    "ifca": {"clusters": 2, "weighting": "samples", "trunk": "clustered"},
    "fednh": {"rho": 0.9, "scale": 20.0, "train_scale": True, "weights": "uniform"},
    "feduv": {"lam": 2.5, "mu": 0.5},
    "feddbe": {"kappa": "auto", "mu": 1.0, "mean": "split", "memory": True},
    "fedbabu": {"weights": "samples", "tune": "full", "tune_epochs": 5, "tune_lr": None},
    "fedetf": {
        "gamma": 1.0,
        "absent": "one",
        "scale": None,
        "train_scale": True,
        "etf": True,
        "tune_epochs": 1,
        "tune_cycles": 3,
        "tune_etf": 1,
        "tune_projection": 1,
    },
    "scaffold": {"server_lr": 1.0, "weights": "uniform", "correct": True},
    "fedtgp": {
        "lam": "auto",
        "inference": "classifier",
        "server_epochs": 100,
        "server_lr": 0.01,
        "server_batch": 10,
        "tau": 100.0,
        "network": True,
    },
    "pfedfda": {"beta": "cv", "eps": 0.0001, "min_count": 2},
    "fedghg": {
        "header_lr": 0.01,
        "header_batch": "sample",
        "header_epochs": 20,
        "header_clip": 50.0,
        "order": "shuffled",
        "mode": "trained",
        "min_class_count": 1,
        "cov": "diag",
        "source": "client",
        "weights": "equal",
        "force": False,
    },
    "fedper": {"start": "common", "share": "features"},
    "fedrep": {
        "start": "common",
        "phases": "turns",
        "head_epochs": 10,
        "body_epochs": None,
        "average": "samples",
    },
    "ditto": {"start": "common", "lam": 1.0, "personal_epochs": None},
    "fedrod": {"gamma": 1.0, "absent": "drop"},
    "fedpac": {"lam": "auto", "head_epochs": 1, "head_rate": 1.0, "combine": "weighted"},
}


@pytest.mark.parametrize("method", registry.discover())
def test_defaults(method: str) -> None:
    found = registry.get(method).hparams().settled().model_dump()
    assert found == DEFAULTS.get(method, {}), f"state the defaults of {method} in DEFAULTS of this file"


def test_the_table_of_the_authors_settings_has_every_method_and_its_defaults() -> None:
    """Each `name=value` under *ours* is the default; a default step that is not the common one is in the table."""
    assert list(listing.notes()) == registry.ORDER
    common = asdict(TrainDefaults())
    for name, known in listing.notes().items():
        method, ours = registry.get(name), known.get("ours", "")
        own, step = method.hparams().settled().model_dump(), asdict(method.defaults)
        stated = dict(re.findall(r"`(\w+)=([^`]+)`", ours))
        for key, value in stated.items():
            assert str({**step, **own}[key]).lower() == value, (name, key)
        assert {k for k, v in step.items() if v != common[k]} <= stated.keys() and known["why"], name


CCVR_LIMITS = (
    "samples >= 1, rank >= 1, shrink >= 0, shrink <= 1, min_count >= 1, lr > 0, momentum >= 0, momentum < "
    "1, weight_decay >= 0, epochs >= 0, batch >= 1, oracle_samples >= 0, clsprox >= 0"
)
LIMITS: dict[str, str] = {
    "fedclassavg": "rho >= 0, contrastive >= 0, temperature > 0, base_temperature > 0, warmup_epochs >= 0, beta1 >= 0, "
    "beta1 < 1",
    "cwfedavg": "tau >= 0",
    "fedgh": "header_lr >= 0, header_epochs >= 1, header_clip >= 0, min_class_count >= 1",
    "ccvr": CCVR_LIMITS,
    "fedprox": "mu >= 0",
    "fedavgm": "momentum >= 0, momentum < 1, server_lr > 0, dampening >= 0, dampening < 1",
    "fedyogi": "server_lr > 0, beta1 >= 0, beta1 < 1, beta2 >= 0, beta2 < 1, tau > 0",
    "moon": "mu >= 0, tau > 0",
    "fedncm": "min_count >= 1",
    "fed3r": "min_count >= 1, random_features >= 0",
    "lda": "min_count >= 1, shrink > 0, shrink <= 1",
    "qda": "min_count >= 1, share >= 0, share <= 1, shrink >= 1e-09, shrink <= 1",
    "fedcof": "min_count >= 1",
    "pccvr": f"{CCVR_LIMITS}, tau >= 0, smooth > 0",
    "fedproto": "lam >= 0",
    "ktpfl": "lr_c >= 0, rho >= 0, temperature > 0, distil_epochs >= 0, public_batch >= 0",
    "fml": "alpha >= 0, alpha <= 1, beta >= 0, beta <= 1",
    "fedkd": "energy_start > 0, energy_start <= 1, energy_end > 0, energy_end <= 1, energy_rounds >= 1, distil >= "
    "0, floor >= 0",
    "fd": "gamma >= 0",
    "fedamp": "scale >= 0, xi >= 0, xi <= 1, sigma > 0, alpha > 0, lam >= 0",
    "fedfomo": "models >= 0, validation > 0, validation < 1, epsilon >= 0, epsilon <= 1, decay > 0, decay <= 1",
    "cfl": "r1 >= 0, r2 >= 0, eps1 >= 0, eps2 >= 0, gamma >= 0, gamma <= 1, smooth >= 1, start_round >= 0, "
    "min_size >= 1, max_stale >= 0",
    "ifca": "clusters >= 1",
    "fednh": "rho >= 0, rho <= 1, scale > 0",
    "feduv": "lam >= 0, mu >= 0",
    "scaffold": "server_lr > 0",
    "feddbe": "mu > 0, mu <= 1",
    "fedbabu": "tune_epochs >= 0, tune_lr > 0",
    "fedetf": "gamma >= 0, scale > 0, tune_epochs >= 0, tune_cycles >= 0, tune_etf >= 0, tune_projection >= 0",
    "fedtgp": "server_epochs >= 0, server_lr >= 0, server_batch >= 1, tau >= 0",
    "fedghg": "header_lr >= 0, header_epochs >= 1, header_clip >= 0, min_class_count >= 1",
    "pfedfda": "eps > 0, eps <= 1, min_count >= 1",
    "fedrep": "head_epochs >= 0, body_epochs >= 0",
    "ditto": "lam >= 0, personal_epochs >= 0",
    "fedrod": "gamma >= 0",
    "fedpac": "head_epochs >= 0, head_rate > 0",
}
"""What a hyperparameter may be, where a number of its field says so."""
SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@pytest.mark.parametrize("method", registry.discover())
def test_limits(method: str) -> None:
    found = [
        f"{name} {sign} {getattr(bound, kind):g}"
        for name, field in registry.get(method).hparams.model_fields.items()
        for bound in field.metadata
        for kind, sign in SIGNS.items()
        if getattr(bound, kind, None) is not None
    ]
    assert ", ".join(found) == LIMITS.get(method, ""), f"state the limits of {method} in LIMITS of this file"


FREE = {"base", "totals", "base_args", "layers"}
"""Hyperparameters that are texts; what they name is looked up later."""
FURTHER_LIMITS = [
    "cwfedavg lam=-1",
    "fed3r lam=0",
    "fedcof gamma=0",
    "fedgh header_batch=0",
    "fedghg header_batch=-1",
    "pccvr clsnorm=true",
    "fedavgm nesterov=true dampening=0.1",
]


@pytest.mark.parametrize("method", registry.discover())
def test_a_word_that_is_no_value_is_refused_and_so_is_an_unknown_name(method: str) -> None:
    entry = registry.get(method)
    for name in [*(entry.hparams.model_fields.keys() - FREE), "nonsense"]:
        with pytest.raises(BadRequest, match=name):
            registry.parse_args(entry, f"{name}=nonsense")


@pytest.mark.parametrize("text", FURTHER_LIMITS)
def test_further_limits(text: str) -> None:
    method, _, args = text.partition(" ")
    with pytest.raises(BadRequest, match=args.partition("=")[0]):
        registry.configured(method, args)


MIXED = {"fd": False, "fedkd": False, "fml": False, "ktpfl": False, "local": False} | dict.fromkeys(
    ("fedclassavg", "fedgh", "fedghg", "fedproto", "fedtgp", "lgfedavg"), True
)
"""Methods whose clients may have different architectures, and whether these must have one feature width."""


def test_which_models_may_take_part() -> None:
    found = registry.discover().values()
    assert {m.id: m.same_width for m in found if m.heterogeneous} == MIXED
    assert all(m.same_width for m in found if not m.heterogeneous)


ADDING = {
    "fedclassavg", "cwfedavg", "fedprox", "moon", "fedproto", "fml", "fedkd", "fd", "fedamp", "feduv", "feddbe",
    "fedetf", "fedtgp", "ditto", "fedrod", "fedpac", "ccvr(base=fedavg clsprox=0.1)", "ccvr(base=moon)",
}  # fmt: skip
"""Methods whose `train-loss` holds more than the cross-entropy, which is what their figures say of it."""


@pytest.mark.parametrize("method", [*registry.discover(), "ccvr(base=fedavg)", *sorted(m for m in ADDING if "(" in m)])
def test_a_method_adds_to_the_loss_where_its_client_has_one_of_its_own(method: str) -> None:
    name, _, args = method.rstrip(")").partition("(")
    found = registry.get(name)
    adds = registry.resolve(found, registry.parse_args(found, args)).client.adds_to_loss()
    assert adds is (method in ADDING)
