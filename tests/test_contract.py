"""What every registered method must do, from the first one on."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import clients.base
import strategies.base
from clients.base import FedClient
from fedapp import registry
from fedapp.cli.listing import NOTES, notes
from fedapp.core import names
from fedapp.engines.local import RunResult, run
from fedapp.method import BaseHParams, Reply
from fedapp.registry import ORDER
from fedapp.transport import checkpoint
from strategies.base import Strategy
from tests.costs import SETTINGS, costs, counted, mixed
from tests.handmade import deterministic
from tests.house import FILES, MODULES, module, room
from tests.matrix import methods

METHODS = list(registry.discover())


@pytest.mark.parametrize("method", METHODS)
def test_two_rounds_and_only_the_declared_set_leaves(
    method: str, tmp_path: Path, replies: list[tuple[str, Reply]]
) -> None:
    with counted() as seen:
        result = run(method=method, rounds=2, out=tmp_path / "run", model=mixed(method), **SETTINGS)
    summary = result.summary
    assert summary["ok"] and summary["rounds"] == 2 and summary["clients"] == 3 and summary["dropped"] == 0
    received = summary["accuracy"]["received"]
    assert 0.0 <= received["last"] <= 1.0 and 0.0 <= received["balanced"] <= 1.0
    assert list(result.rounds["round"]) == [1, 2]
    assert len(result.final) == 3 and len(result.clients) == 6
    declared = registry.get(method)
    hparams = registry.parse_args(declared, "")
    actual = registry.resolve(declared, hparams)
    prefixes = actual.up_prefixes(hparams)
    for kind, reply in replies:
        for name in reply.arrays:
            assert actual.allows(name) or any(name.startswith(p) for p in prefixes), f"{name} left in {kind}"
        if kind == "evaluate":
            assert not reply.arrays
    # What a new method still lacks in the pages comes last.
    renew = f"run python -m tests.costs {method}, then python -m tests.readme"
    assert method in notes(), f"{NOTES} has no row of {method}: add it, then {renew}"
    assert notes()[method]["costs"] == costs(result, seen), f"{NOTES} has other costs of {method}: {renew}"


VARIANTS = (
    "cfl start_round=1 smooth=1 r1=1 r2=0 gamma=0", "fedamp form=distance", "fedamp start=own", "fedfomo models=2",
    "ifca clusters=3", "moon mu=5", "ccvr base=fedavgm epochs=3 samples=20",
)  # fmt: skip


@pytest.mark.parametrize("text", [*methods(), *(pytest.param(v, marks=pytest.mark.full) for v in VARIANTS)])
def test_resume_is_exact(text: str, tmp_path: Path) -> None:
    """Four rounds equal two rounds, an end, and two resumed rounds, bit for bit."""
    method, _, args = text.partition(" ")
    common = {
        **SETTINGS, "method": method, "method_args": args, "fraction_train": 0.67, "clients": 4,
        "model": mixed(method), "seed": 3, "buffers": "local" if args else "global",
    }  # fmt: skip
    straight = run(rounds=4, out=tmp_path / "straight", **common)
    run(rounds=2, out=tmp_path / "broken", **common)
    resumed = run(resume=tmp_path / "broken", rounds=4)
    pd.testing.assert_frame_equal(deterministic(straight.rounds), deterministic(resumed.rounds), check_exact=True)
    pd.testing.assert_frame_equal(deterministic(straight.clients), deterministic(resumed.clients), check_exact=True)
    pd.testing.assert_frame_equal(deterministic(straight.final), deterministic(resumed.final), check_exact=True)
    assert straight.summary["accuracy"] == resumed.summary["accuracy"]
    assert straight.summary["bytes_up"] == resumed.summary["bytes_up"]
    a, b = (checkpoint.latest(r.out / "checkpoint") for r in (straight, resumed))
    assert a is not None and b is not None and a[0] == b[0] == 4
    left, right = checkpoint.flatten(a[1]), checkpoint.flatten(b[1])
    assert left[0].keys() == right[0].keys() and left[1] == right[1]
    assert all(np.array_equal(left[0][n], right[0][n]) for n in left[0])


@pytest.mark.parametrize("method", METHODS)
def test_a_page_and_a_row_for_each_method(method: str) -> None:
    entry = registry.get(method)
    for name in ("title", "paper", "travels"):
        assert getattr(entry, name), f"METHOD of {method} has no {name}: the tables of methods show it"
    page = Path(__file__).parent.parent / "docs" / "methods" / f"{method}.md"
    assert page.is_file(), f"write docs/methods/{method}.md: CONTRIBUTING.md says what stands in it"
    text = page.read_text(encoding="utf-8")
    for field in type(registry.parse_args(entry, "")).model_fields:
        assert f"`{field}" in text, f"{page.name} does not name the hyperparameter `{field}`: add it to its table"


@pytest.mark.parametrize("method", METHODS)
def test_tests_of_its_own_for_each_method(method: str) -> None:
    path = Path(__file__).with_name(f"test_{method}.py")
    written = path.is_file() and re.search(r"^def test_", path.read_text(encoding="utf-8"), flags=re.M)
    assert written, f"write tests/test_{method}.py: at least one test of what {method} computes"


def test_no_page_of_a_method_that_is_gone() -> None:
    pages = (Path(__file__).parent.parent / "docs" / "methods").glob("*.md")
    gone = sorted({page.stem for page in pages} - set(METHODS))
    assert not gone, f"remove docs/methods/{', '.join(gone)}: no method has that id"


def test_the_four_and_their_baselines_are_there() -> None:
    assert set(ORDER) <= set(METHODS)
    assert METHODS[: len(ORDER)] == list(ORDER)


def test_same_seed_same_numbers_and_another_seed_not(tiny: Callable[..., RunResult]) -> None:
    first, second, other = tiny(seed=1), tiny(seed=1), tiny(seed=2)
    pd.testing.assert_frame_equal(deterministic(first.rounds), deterministic(second.rounds), check_exact=True)
    a = (first.out / "clients.csv").read_text()
    assert a != (other.out / "clients.csv").read_text()
    assert not deterministic(first.rounds).equals(deterministic(other.rounds))


def test_heads_only_methods_send_the_head_alone(tiny: Callable[..., RunResult]) -> None:
    result = tiny(method="fedclassavg", model="digits-a,digits-b,digits-c")
    assert result.summary["bytes_up"] == result.summary["bytes_down"] == 4 * (64 * 10 + 10)
    half = tiny(method="fedclassavg", model="digits-a,digits-b,digits-c", wire_dtype="fp16")
    assert half.summary["bytes_up"] == 2 * (64 * 10 + 10)


def test_averages_recompute_from_the_clients_rows(tiny: Callable[..., RunResult]) -> None:
    result = tiny(method="fedavg")
    for protocol in ("received", "trained"):
        for server_round, rows in result.clients.groupby("round"):
            row = result.rounds.set_index("round").loc[server_round]
            accuracy = rows[f"{protocol}_correct"] / rows[f"{protocol}_total"]
            assert row[f"{protocol}_accuracy"] == pytest.approx(accuracy.mean(), abs=1e-12)
            assert row[f"{protocol}_accuracy_std"] == pytest.approx(accuracy.std(ddof=0), abs=1e-12)
            pooled = rows[f"{protocol}_correct"].sum() / rows[f"{protocol}_total"].sum()
            assert row[f"{protocol}_accuracy_pooled"] == pytest.approx(pooled, abs=1e-12)


def test_selection_names_are_whole_components() -> None:
    assert names.matches("head.weight", ("head.",))
    assert not names.matches("header.weight", ("head.",))


HOOKS = {
    "build_model", "configure_model", "common_facts", "receive", "before_training", "phases", "step_loss", "after_step",
    "after_epoch", "after_training", "score", "tuning", "answer", "answer_prepare", "feature_batches",
}  # fmt: skip
"""Functions that a method's client may define."""


def test_the_table_of_a_client_lists_its_hooks() -> None:
    listed = re.findall(r"^\| `(\w+)\(", clients.base.__doc__ or "", flags=re.M)
    assert set(listed) == HOOKS and len(listed) == len(set(listed))
    assert all(callable(getattr(FedClient, name)) for name in listed)


def classes_of(base: type[Any]) -> Iterator[type[Any]]:
    """All classes of the project that inherit from a base."""
    for kind in base.__subclasses__():
        yield from classes_of(kind)
        if kind.__module__.startswith(("clients.", "strategies.", "fedapp.")):
            yield kind


@pytest.mark.parametrize(("base", "module"), [(FedClient, clients.base), (Strategy, strategies.base)])
def test_a_method_replaces_nothing_of_its_base_but_what_the_contract_names(base: type[Any], module: Any) -> None:
    for name in MODULES:
        importlib.import_module(name) if name.startswith(("clients.", "strategies.", "fedapp.privacy.")) else None
    named = set(re.findall(r"`(\w+)", module.__doc__))
    assert len(list(classes_of(base))) > 20
    for kind in classes_of(base):
        own = {n for n in vars(kind) if hasattr(base, n) and not n.startswith("__") and n != "_abc_impl"}
        assert own <= named, f"{kind.__module__}.{kind.__name__}"


ASKED = {"METHOD", "pull_interval", "getuid", "__func__", "shape", "model"}
"""Attributes of other objects, and one of `FedClient`, for which is asked before they exist."""


def test_nothing_is_asked_of_a_method_that_its_contract_does_not_name() -> None:
    named = ASKED | set(re.findall(r"`(\w+)`", BaseHParams.__doc__ or ""))
    rooms = ("clients", "strategies", "client_app", "client_steps", "config", "federation", "method", "privacy",
             "reduce", "registry", "server_app", "tasks")  # fmt: skip
    for path in (p for p in FILES if room(module(p)) in rooms):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("getattr", "hasattr")
            ):
                name = node.args[1]
                assert not isinstance(name, ast.Constant) or name.value in named, f"{path}:{node.lineno}"
