"""The runs behind the ledger of claims: settings scaled down from the papers' in a stated way, and shared by claims.

A study is one setting (data, partition, models, budget) and several variants (a method with its hyperparameters). All
variants of a study share seeds, partition and sampled clients. Nothing here was tuned on test data: optimizer settings
are the methods' defaults or the paper's, and the scale (share of the data, light models, fewer rounds) was fixed
beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LIGHT = "cnn-a,cnn-b,cnn-c,cnn-d"


@dataclass(frozen=True)
class Study:
    """One setting with its variants.

    Attributes
    ----------
    id : name of its folder.
    settings : run-config keys that all variants share.
    variants : name -> (method, method-args, further run-config keys).
    scaled : what differs from the paper, in words.
    """

    id: str
    title: str
    settings: Mapping[str, Any]
    variants: Mapping[str, tuple[str, str, Mapping[str, Any]]]
    scaled: str
    seeds: int = 3

    @property
    def paper(self) -> Mapping[str, str]:
        """The paper's number for each variant that it has, in %."""
        return PAPER.get(self.id, {})


def _v(method: str, args: str = "", **more: Any) -> tuple[str, str, Mapping[str, Any]]:
    return method, args, {k.replace("_", "-"): v for k, v in more.items()}


PAPER: dict[str, dict[str, str]] = {
    "hetero-cifar10": {
        "local": "68.9 ± 6.7", "fedproto": "47.4 ± 3.2", "ktpfl": "62.3 ± 7.8", "fedclassavg": "76.7 ± 5.3",
        "ca": "61.5", "ca-pr": "63.1", "ca-cl": "75.1",
    },
    "hetero-cifar10-skewed": {"local": "88.7 ± 4.2", "fedclassavg": "92.0 ± 5.6"},
    "hetero-fashion": {"local": "88.4 ± 7.0", "ktpfl": "90.4 ± 4.4", "fedclassavg": "93.0 ± 3.1", "ca": "85.8"},
    "homo-cifar10": {
        "fedavg": "77.3 ± 5.0", "fedprox": "81.2 ± 3.6", "head": "76.5 ± 4.5", "weight": "85.5 ± 4.1",
    },
    "fedgh-cifar10": {
        "local": "96.6", "lgfedavg": "96.4", "fedproto": "96.5", "fd": "96.1", "fml": "did not converge",
        "fedkd": "80.2", "fedgh": "97.6",
    },
    "cw-pathological": {
        "fedavg": "60.7 ± 0.8", "fedprox": "60.7 ± 0.9", "fedamp": "88.8 ± 0.2", "fedfomo": "90.8 ± 0.6",
        "cfl": "60.6 ± 0.2", "ifca": "72.8 ± 4.8", "fednh": "50.8 ± 0.3", "feduv": "88.1 ± 0.1",
        "cwfedavg": "91.2 ± 0.0", "cw-all": "91.0 ± 0.2",
    },
    "cw-dirichlet": {
        "fedavg": "61.9 ± 0.6", "fedprox": "62.5 ± 0.9", "fedamp": "89.5 ± 0.1", "fedfomo": "88.1 ± 0.1",
        "cfl": "61.4 ± 0.2", "ifca": "70.1 ± 0.1", "fednh": "56.4 ± 0.2", "feduv": "88.6 ± 0.1",
        "cwfedavg": "88.7 ± 0.2", "cw-all": "88.4 ± 0.1",
    },
    "cw-mnist": {
        "fedavg": "98.7 ± 0.0", "fedprox": "98.7 ± 0.1", "fedamp": "99.3 ± 0.0", "fedfomo": "99.1 ± 0.0",
        "cfl": "98.7 ± 0.0", "ifca": "99.1 ± 0.1", "fednh": "98.9 ± 0.3", "feduv": "99.3 ± 0.1",
        "cwfedavg": "99.5 ± 0.0",
    },
    "ccvr-0.5": {"fedavg": "68.6 to 71.0"},
    "ccvr-0.1": {
        "fedavg": "58.6 to 62.7", "fedprox": "58.9 to 62.6", "fedavgm": "59.2 to 62.6", "moon": "57.4 to 62.2",
        "mc-50": "58.6 to 61.1",
    },
    "ccvr-0.05": {"fedavg": "52.3 to 55.0"},
}  # fmt: skip
"""Published accuracies (FedClassAvg Tables 2 to 4: std over clients; cwFedAvg Table 1 and CCVR Table 2: over seeds)."""

_HETERO: dict[str, Any] = {
    "clients": 20, "partition": "dirichlet", "alpha": 0.5, "model": LIGHT, "data-fraction": 0.1,
    "num-server-rounds": 12, "local-epochs": 1, "batch-size": 32, "protocols": "received,trained", "min-samples": 20,
}  # fmt: skip
_HETERO_SCALED = (
    "10 % of the images, four light trunks instead of ResNet-18, ShuffleNetV2, GoogLeNet and AlexNet, 12 rounds "
    "instead of up to 1000, SGD with momentum 0.9 and batches of 32"
)
_FEDGH: dict[str, Any] = {
    "dataset": "cifar10", "clients": 10, "partition": "classes", "classes-per-client": 2, "model": LIGHT,
    "data-fraction": 0.1, "num-server-rounds": 15, "local-epochs": 1, "batch-size": 32,
    "protocols": "received,trained", "clip": 50.0, "weight-decay": 0.001,
}  # fmt: skip
_CW: dict[str, Any] = {
    "clients": 20, "split": "merged", "model": "cnn-a", "data-fraction": 0.1, "num-server-rounds": 10,
    "local-epochs": 1, "batch-size": 10, "protocols": "received,trained", "min-samples": 20,
}  # fmt: skip
_CW_SCALED = (
    "10 % of the images, a light CNN instead of the 4-layer CNN, 10 rounds instead of 1000, SGD lr 0.01 with momentum "
    "0.9 instead of lr 0.005 without, last round instead of best"
)
_CCVR: dict[str, Any] = {
    "dataset": "cifar10", "clients": 10, "partition": "dirichlet", "split": "official", "model": "moon",
    "data-fraction": 0.2, "num-server-rounds": 10, "local-epochs": 2, "batch-size": 32, "lr": 0.01, "min-samples": 10,
}  # fmt: skip
_CCVR_SCALED = (
    "20 % of the images, 10 rounds of 2 epochs instead of 100 of 10, batches of 32, no augmentation; the central test "
    "set is the same share of the official test images"
)
_TABLE1 = {
    "local": _v("local"),
    "fedavg": _v("fedavg"),
    "fedprox": _v("fedprox"),
    "fedamp": _v("fedamp"),
    "fedfomo": _v("fedfomo"),
    "cfl": _v("cfl"),
    "ifca": _v("ifca"),
    "fednh": _v("fednh"),
    "feduv": _v("feduv"),
    "cwfedavg": _v("cwfedavg", "lam=10"),
}
_FEDAVGM_MOON = {"fedavgm": _v("fedavgm"), "moon": _v("moon")}

STUDIES: dict[str, Study] = {
    s.id: s
    for s in (
        Study(
            "hetero-cifar10",
            "20 clients with different architectures, CIFAR-10, Dirichlet 0.5",
            {**_HETERO, "dataset": "cifar10"},
            {
                "local": _v("local"),
                "local-weak": _v("local", augment="weak"),
                "fedclassavg": _v("fedclassavg"),
                "ca": _v("fedclassavg", "contrastive=0 rho=0"),
                "ca-pr": _v("fedclassavg", "contrastive=0"),
                "ca-cl": _v("fedclassavg", "rho=0"),
                "no-federation": _v("fedclassavg", "share=none"),
                "lgfedavg": _v("lgfedavg"),
                "fedproto": _v("fedproto"),
                "ktpfl": _v("ktpfl"),
                "fml": _v("fml"),
                "fedkd": _v("fedkd"),
                "fd": _v("fd"),
                "fedgh": _v("fedgh"),
            },
            _HETERO_SCALED,
        ),
        Study(
            "hetero-cifar10-skewed",
            "20 clients with different architectures, CIFAR-10, two classes each",
            {**_HETERO, "dataset": "cifar10", "partition": "two-class"},
            {"local": _v("local"), "fedclassavg": _v("fedclassavg"), "lgfedavg": _v("lgfedavg")},
            _HETERO_SCALED,
        ),
        Study(
            "hetero-fashion",
            "20 clients with different architectures, Fashion-MNIST, Dirichlet 0.5",
            {**_HETERO, "dataset": "fashion_mnist", "num-server-rounds": 8},
            {
                "local": _v("local"),
                "fedclassavg": _v("fedclassavg"),
                "ca": _v("fedclassavg", "contrastive=0 rho=0"),
                "ktpfl": _v("ktpfl"),
                "lgfedavg": _v("lgfedavg"),
            },
            _HETERO_SCALED.replace("12 rounds", "8 rounds"),
        ),
        Study(
            "homo-cifar10",
            "20 clients with one architecture, CIFAR-10, Dirichlet 0.5",
            {**_HETERO, "dataset": "cifar10", "model": "cnn-a"},
            {
                "fedavg": _v("fedavg"),
                "fedprox": _v("fedprox"),
                "head": _v("fedclassavg"),
                "weight": _v("fedclassavg", "share=all"),
            },
            "10 % of the images, a light CNN instead of ResNet-18, 12 rounds",
        ),
        Study(
            "fedgh-cifar10",
            "10 clients with different architectures, CIFAR-10, two classes each",
            _FEDGH,
            {
                "local": _v("local"),
                "lgfedavg": _v("lgfedavg"),
                "fedproto": _v("fedproto"),
                "fd": _v("fd"),
                "fml": _v("fml"),
                "fedkd": _v("fedkd"),
                "fedgh": _v("fedgh"),
                "fedgh-frozen": _v("fedgh", "mode=frozen"),
                "fedgh-0.001": _v("fedgh", "header_lr=0.001"),
                "fedgh-1": _v("fedgh", "header_lr=1.0"),
            },
            "10 % of the images, four light trunks instead of CNN-1 to CNN-5, 15 rounds of 1 epoch instead of up to "
            "500 of 10 to 30, no augmentation",
        ),
        Study(
            "fedgh-cifar10-6",
            "10 clients with different architectures, CIFAR-10, six classes each",
            {**_FEDGH, "classes-per-client": 6},
            {"lgfedavg": _v("lgfedavg"), "fedproto": _v("fedproto"), "fedgh": _v("fedgh")},
            "as fedgh-cifar10",
        ),
        Study(
            "cw-pathological",
            "20 clients, CIFAR-10, pathological: two classes each, in blocks",
            {**_CW, "dataset": "cifar10", "partition": "pathological", "classes-per-client": 2},
            {
                **_TABLE1,
                "cw-all": _v("cwfedavg", "lam=10 layers=all"),
                "cw-no-wdr": _v("cwfedavg", "lam=0 layers=all"),
            },
            _CW_SCALED,
        ),
        Study(
            "cw-dirichlet",
            "20 clients, CIFAR-10, Dirichlet 0.1",
            {**_CW, "dataset": "cifar10", "partition": "dirichlet", "alpha": 0.1},
            {
                **_TABLE1,
                "cw-all": _v("cwfedavg", "lam=10 layers=all"),
                "cw-no-wdr": _v("cwfedavg", "lam=0 layers=all"),
                "cw-empirical": _v("cwfedavg", "lam=0 layers=all dist=empirical"),
            },
            _CW_SCALED,
        ),
        Study(
            "cw-dirichlet-1",
            "20 clients, CIFAR-10, Dirichlet 1.0",
            {**_CW, "dataset": "cifar10", "partition": "dirichlet", "alpha": 1.0},
            {"fedavg": _v("fedavg"), "cwfedavg": _v("cwfedavg", "lam=10")},
            _CW_SCALED,
        ),
        Study(
            "cw-mnist",
            "20 clients, MNIST, Dirichlet 0.1",
            {**_CW, "dataset": "mnist", "partition": "dirichlet", "alpha": 0.1, "num-server-rounds": 6},
            {**_TABLE1, **_FEDAVGM_MOON},
            _CW_SCALED.replace("10 rounds", "6 rounds"),
        ),
        *(
            Study(
                f"ccvr-{alpha}",
                f"10 clients, CIFAR-10, Dirichlet {alpha}",
                {**_CCVR, "alpha": alpha},
                {
                    "fedavg": _v(
                        "ccvr",
                        "base=fedavg oracle=true "
                        + ("samples=100 epochs=30" if alpha == 0.5 else "samples=2000 epochs=3"),
                    ),
                    **(
                        {
                            "fedprox": _v("ccvr", "base=fedprox oracle=true samples=2000 epochs=3"),
                            "fedavgm": _v("ccvr", "base=fedavgm oracle=true samples=2000 epochs=3"),
                            "moon": _v("ccvr", "base=moon oracle=true samples=2000 epochs=3"),
                            "mc-50": _v("ccvr", "base=fedavg samples=50 epochs=60"),
                            "transform": _v("ccvr", "base=fedavg samples=2000 epochs=3 transform=sample"),
                            "clsnorm": _v("ccvr", "base=fedavg samples=2000 epochs=0 clsnorm=true"),
                        }
                        if alpha == 0.1
                        else {}
                    ),
                },
                _CCVR_SCALED,
            )
            for alpha in (0.5, 0.1, 0.05)
        ),
    )
}


@dataclass(frozen=True)
class RunKey:
    """One run of the ledger."""

    study: str
    variant: str
    seed: int

    @property
    def folder(self) -> str:
        """Its folder below the output directory."""
        return f"{self.study}/{self.variant}-s{self.seed}"


def settings_of(key: RunKey, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Flat run-config of one run."""
    study = STUDIES[key.study]
    method, args, more = study.variants[key.variant]
    return {**study.settings, **more, **(extra or {}), "method": method, "method-args": args, "seed": key.seed}


def keys_of(pairs: list[tuple[str, str]]) -> list[RunKey]:
    """All seeds of the named (study, variant) pairs."""
    return [RunKey(s, v, seed) for s, v in pairs for seed in range(STUDIES[s].seeds)]


__all__ = ["STUDIES", "RunKey", "Study", "keys_of", "settings_of"]
