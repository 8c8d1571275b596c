"""The default of every hyperparameter: a change of one is a change of the published numbers, and must be meant."""

from __future__ import annotations

from typing import Any

import pytest

from fedapp import registry

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
    "cwfedavg": {"lam": "auto", "wdr": "paper", "layers": "output", "dist": "approx", "tau": 0.0},
    "fedgh": {
        "header_lr": 0.01,
        "header_batch": "sample",
        "header_epochs": 1,
        "header_clip": 50.0,
        "order": "shuffled",
        "mode": "trained",
        "min_class_count": 1,
    },
    "ccvr": {
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
    },
    "lgfedavg": {"average": "samples"},
    "fedprox": {"mu": 0.01},
    "fedavgm": {"momentum": 0.5, "server_lr": 1.0, "dampening": 0.0, "nesterov": False},
    "moon": {"mu": 1.0, "tau": 0.5},
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
    "fedtgp": {
        "lam": 10.0,
        "inference": "classifier",
        "server_epochs": 100,
        "server_lr": 0.01,
        "server_batch": 10,
        "tau": 100.0,
        "network": True,
    },
}


@pytest.mark.parametrize("method", registry.discover())
def test_defaults(method: str) -> None:
    assert registry.get(method).hparams().model_dump() == DEFAULTS.get(method, {})
