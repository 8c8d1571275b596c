"""The settings with which a method is another one: whole runs are equal bit for bit, and with other settings not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedapp import registry
from fedapp.engines.local import RunResult, run
from fedapp.learning.state import read_safetensors
from tests.handmade import deterministic
from tests.matrix import TYPICAL

SMALL = {"dataset": "digits", "data_fraction": 0.3, "rounds": 3, "clients": 3, "local_epochs": 1, "seed": 2}
HALF = {"clients": 4, "fraction_train": 0.5, "alpha": 0.3}
"""Half of the clients in each round."""
MIXED: dict[str, Any] = {"model": "digits-a,digits-b"}
UNSEEN = {**HALF, "unseen": "1", "adapt_epochs": "1"}
PUBLIC = {**MIXED, "public_data": "0.1"}
ONE_CLIENT = {"clients": 1}
DISJOINT = {"clients": 5, "partition": "pathological", "classes_per_client": 2}
LAST = {"final_training": False}
CLIPPED = {**MIXED, "clip": 0.3}
SCORES = "received|trained|train_loss"
BASES = sorted(m.id for m in registry.discover().values() if m.global_model and m.linear and m.resolve is None)

REDUCTIONS: list[tuple[str, str, str, int, str, dict[str, Any]]] = [
    ("fedprox mu=0", "fedavg", "mu=0.1", 1, "", HALF),
    ("moon mu=0", "fedavg", "mu=5", 0, "", HALF),
    ("feduv lam=0 mu=0", "fedavg", "", 1, "", HALF),
    ("feddbe kappa=0 memory=false", "fedavg", "kappa=1 memory=false", 2, SCORES, {}),
    ("fedetf etf=false gamma=0", "fedavg", "etf=false", 1, SCORES, HALF),
    ("fedavgm momentum=0", "fedavg", "momentum=0.5", 3, "", HALF),
    ("fedavgm momentum=0 nesterov=true", "fedavg", "", 0, "", HALF),
    ("scaffold weights=samples correct=false", "fedavg", "weights=samples", 2, SCORES, {"lr": 0.1, "momentum": 0.0}),
    ("cwfedavg layers=none lam=0", "fedavg", "lam=0", 2, "", HALF),
    ("cwfedavg layers=all lam=0", "fedavg", "layers=all", 1, "", ONE_CLIENT),
    ("cwfedavg share=head layers=none lam=0", "lgfedavg", "share=head lam=0", 2, "", {**HALF, **MIXED}),
    ("cfl start_round=99 weighting=samples", "fedavg", "start_round=99", 2, "", HALF),
    ("ifca clusters=1", "fedavg", "clusters=2", 0, "", HALF),
    ("fedper share=all start=own", "fedavg", "share=features", 2, "", HALF),
    ("fedper share=features+head", "fedavg", "", 0, "", HALF),
    ("fedper share=none start=own", "local", "", 1, "", HALF),
    ("ditto lam=0 start=own", "local", "lam=0.5 start=own", 1, "trained_(correct|loss)|train_loss", HALF),
    ("ditto lam=0.5", "fedavg", "", 0, "received_(correct|loss)|global", HALF),
    ("fedrod gamma=0", "fedavg", "", 1, "global", {**HALF, "clip": 0.5}),
    ("fedrep phases=joint", "fedper", "", 1, "", UNSEEN),
    ("fedrep phases=joint start=own", "fedper start=own", "", 0, "", UNSEEN),
    ("fedpac lam=0 combine=own", "fedrep head_epochs=1", "lam=0", 2, SCORES, UNSEEN),
    ("fedclassavg contrastive=0 rho=0", "lgfedavg", "contrastive=0", 1, "", {**HALF, **MIXED, "augment": "weak"}),
    ("fedproto lam=0", "local", "", 2, SCORES, MIXED),
    ("fedproto lam=0 collect=train average=count down=all", "local", "", 0, SCORES, MIXED),
    ("fedtgp lam=0 server_epochs=2", "local", "server_epochs=2", 2, SCORES, MIXED),
    ("fd gamma=0 collect=train", "local", "", 2, SCORES, MIXED),
    ("fd", "local", "include_self=true", 2, SCORES, DISJOINT),
    ("ktpfl distil_epochs=0", "local", "", 2, SCORES, PUBLIC),
    ("ktpfl share=weights distil_epochs=0", "local", "share=weights", 2, SCORES, HALF),
    ("fml alpha=1 beta=1 average=samples", "local", "", 1, "received|trained", MIXED),
    ("fml alpha=1 beta=1 average=samples", "local", "", 1, "received|trained", CLIPPED),
    ("fedkd distil=0 energy_start=1 energy_end=1", "local", "", 1, "received|trained", MIXED),
    ("fedkd distil=0 energy_start=1 energy_end=1", "local", "", 1, "received|trained", CLIPPED),
    ("fedgh mode=frozen", "fedgh header_lr=0", "header_lr=0.5", 2, "", MIXED),
    ("fedghg cov=none header_epochs=2", "fedgh header_epochs=2", "header_epochs=2", 2, "", MIXED),
    ("fedamp lam=0", "fedavg", "lam=1", 1, "train", {"rounds": 1, **LAST}),
    ("fedamp xi=0.1 lam=0 start=own", "fedamp xi=1 lam=0", "alpha=1 start=own", 1, "train", {**HALF, **LAST}),
    ("pccvr epochs=0", "fedavg", "", 0, "", HALF),
    *((f"ccvr base={base} epochs=0", base, "", 0, "", HALF) for base in BASES),
]
"""Method with arguments, the other method, arguments with which they differ, from which round on the scores do, the
columns that are compared, settings of the runs.  Round 0: nothing is said of other arguments; no columns: all."""
ENGINE_WIDE = [r[0] for r in REDUCTIONS if r[0].startswith("ccvr") and r[1] not in TYPICAL]
PARAMETERS = [pytest.param(*r, marks=pytest.mark.full if r[0] in ENGINE_WIDE else ()) for r in REDUCTIONS]
Runs = Callable[..., RunResult]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs on digits; equal ones are made once."""
    kept: dict[str, RunResult] = {}

    def go(text: str, **settings: Any) -> RunResult:
        key = f"{text} {settings}"
        if key not in kept:
            method, _, args = text.partition(" ")
            out = tmp_path_factory.mktemp("run") / "run"
            kept[key] = run(method=method, method_args=args, out=out, **{**SMALL, **settings})
        return kept[key]

    return go


def tables(one: RunResult, two: RunResult, columns: str) -> list[tuple[pd.DataFrame, pd.DataFrame]]:
    """The tables of two runs with the chosen columns that both have."""
    found = []
    for name in ("rounds", "clients", "final", "unseen"):
        a, b = (deterministic(getattr(r, name)) for r in (one, two))
        both = [c for c in a.columns if c in b.columns and re.search(columns, c)]
        found.append((a[both], b[both]))
    return found


@pytest.mark.parametrize(("ours", "theirs", "other", "since", "columns", "settings"), PARAMETERS)
def test_a_method_is_another_one(
    ours: str, theirs: str, other: str, since: int, columns: str, settings: dict[str, Any], runs: Runs
) -> None:
    one, two = runs(ours, **settings), runs(theirs, **settings)
    pairs = tables(one, two, columns)
    assert sum(len(a.columns) for a, _ in pairs) >= 2
    for a, b in pairs:
        pd.testing.assert_frame_equal(a, b, check_exact=True)
    models = [r.out / "models" / "last.safetensors" for r in (one, two)]
    if not columns and all(m.exists() for m in models):
        arrays, expected = (read_safetensors(m)[0] for m in models)
        assert arrays.keys() == expected.keys() and all(np.array_equal(arrays[n], expected[n]) for n in arrays)
    if since:
        a, b = tables(runs(f"{ours.split()[0]} {other}".strip(), **settings), two, columns or SCORES)[0]
        pd.testing.assert_frame_equal(a[: since - 1], b[: since - 1], check_exact=True)
        assert not a[since - 1 : since].equals(b[since - 1 : since])
