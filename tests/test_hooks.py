"""The round loop and its hooks: their size, kills after each of them, and an exchange before round 1."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import pandas as pd
import pytest
from flwr.app import Message

from clients.base import FedClient
from fedapp import server_app
from fedapp.config import RunConfig, from_flat
from fedapp.engines.local import run
from fedapp.federation import loop
from fedapp.federation.hook import Hook
from fedapp.federation.hooks.events import ProgressEvents
from fedapp.federation.hooks.rollback import Rollback
from fedapp.federation.hooks.soundness import TwoVoids
from fedapp.federation.hooks.tables import Tables
from fedapp.federation.hooks.training import Checkpoint, EarlyStop
from fedapp.learning.state import read_safetensors
from fedapp.method import Arrays, BaseHParams, Payload, ServerState
from fedapp.reduce.spec import Mean, Query, Total
from fedapp.results.directory import RunDirectory
from fedapp.results.runs import RunResult
from fedapp.transport import checkpoint
from fedapp.transport.traffic import RoundFailed
from strategies._sums import class_sums
from strategies.base import Strategy
from strategies.fedavg import METHOD as FEDAVG
from tests.handmade import deterministic
from tests.house import MODULES, ROOT, imports
from tests.liars import Lie, change_arrays, federate
from tests.test_offences import Wild, nan_score, times, use_strategy
from tests.test_robust import QUICK

Tiny = Callable[..., RunResult]
FOLDER = ROOT / "fedapp" / "federation" / "hooks"


def lines_of_code(function: Any) -> int:
    """Lines of a function without its docstring, comments and blank lines."""
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in quoted(function).splitlines())


def quoted(function: Any) -> str:
    """The source of a function without its docstring."""
    source = inspect.getsource(function)
    docstring = ast.get_source_segment(source, ast.parse(source).body[0].body[0])  # type: ignore[attr-defined]
    return source.replace(f"    {docstring}\n", "")


def test_the_loop_and_its_attempt_are_short_and_the_architecture_page_quotes_them() -> None:
    assert lines_of_code(loop.federate) + lines_of_code(loop.train_once) <= 40
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for function in (loop.federate, loop.train_once):
        assert quoted(function) in page, f"quote {function.__name__} as it stands in the file"


def test_a_hook_is_short_and_knows_no_other_hook() -> None:
    for path in sorted(FOLDER.glob("[a-z]*.py")):
        assert not [m for m in imports(path) & MODULES if m.startswith("fedapp.federation.hooks.")], path
    for hook in server_app.HOOKS:
        assert len(inspect.getsource(hook).splitlines()) <= 110, hook


KINDS = {"Cohort", "VirtualCohort", "NodeCohort", "Simulation", "Deployment"}
ABOUT_KINDS = {"in_turn", "own", "several", "by_size", "simulation", "real_node", "pull_interval"}


def test_no_branch_of_a_run_depends_on_its_kind() -> None:
    """The loop, the hooks and the server know the clients by one protocol; one function chooses the kind of a run."""
    for path in [ROOT / "fedapp" / "server_app.py", *(ROOT / "fedapp" / "federation").rglob("*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        chosen = [
            n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.name == "kind_of" for n in ast.walk(f)
        ]
        for node in (n for n in ast.walk(tree) if n not in chosen):
            tests = [node.test] if isinstance(node, ast.If | ast.IfExp | ast.While) else getattr(node, "ifs", [])
            inside = [n for test in tests for n in ast.walk(test)]
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
                inside += ast.walk(node)
            names = {n.id for n in inside if isinstance(n, ast.Name)} & KINDS
            names |= {n.attr for n in inside if isinstance(n, ast.Attribute)} & ABOUT_KINDS
            assert not names, f"{path}:{getattr(node, 'lineno', 0)}"


def whole(result: RunResult) -> dict[str, Any]:
    """All numbers of a run that two equal runs have in common."""
    tables = ("rounds", "clients", "evaluations", "final", "unseen", "dropped")
    found: dict[str, Any] = {name: deterministic(getattr(result, name)).to_csv() for name in tables}
    found["summary"] = {k: v for k, v in result.summary.items() if not k.endswith("seconds")}
    for path in sorted((result.out / "models").glob("*.safetensors")):
        arrays, header = read_safetensors(path)
        found[path.name] = {n: a.tobytes() for n, a in arrays.items()}, header.get("round")
    for folder in ("checkpoint", "selected"):
        for path in sorted((result.out / folder).glob("round-*")):
            number, state, remembered = checkpoint.load(path.parent, int(path.stem[-6:]))
            remembered["Checkpoint"] = {}
            arrays, scalars = checkpoint.flatten({"state": state, **remembered})
            found[f"{folder} {number}"] = {n: (a.dtype, a.shape, a.tobytes()) for n, a in arrays.items()}, scalars
    return found


def interrupted(act: Callable[..., Any], after: int = 1) -> Callable[..., Any]:
    """Kill a run after a hook has acted so many times."""
    calls: list[Any] = []

    def killed(self: Hook, *given: Any) -> Any:
        found = act(self, *given)
        calls.append(given)
        if len(calls) == after:
            raise KeyboardInterrupt
        return found

    return killed


SETTINGS: dict[str, Any] = {
    "method": "fedgh", "rounds": 4, "clients": 5, "fraction_train": 0.7, "unseen": "1", "patience": 3, "lr": 1e-4,
    "seed": 1, "min_replies": 0.5, "select": "validation", "validation": 0.2, "evaluate_every": 1, "max_growth": 20.0,
}  # fmt: skip
# Loss and accuracy are no better in rounds 3 and 4 than before, so what is remembered decides.
FEW: dict[str, Any] = {"method": "fedavg", "min_replies": 0.5, "clients": 4, "lr": 0.05, **QUICK}


class Play(NamedTuple):
    """A run that is killed.

    Attributes
    ----------
    after : number of calls of a function of the hooks, after which the run is killed.
    hooks : those after which it is killed.   void : rounds.
    lie : makes the lie of the clients `liars`, which may count their replies.
    """

    settings: dict[str, Any]
    after: dict[str, int]
    hooks: tuple[type[Hook], ...]
    liars: tuple[int, ...] = ()
    lie: Callable[[], Lie] = lambda: far_off
    void: frozenset[int] = frozenset()


def far_off(kind: str, reply: Message) -> Message:
    """Send what passes and what no other client can train on."""
    return change_arrays(reply, lambda n, a: np.full_like(a, 9e3)) if kind == "train" else reply


PLAYS = {
    "chosen": Play(SETTINGS, {
        "begin": 2, "checks": 3, "replies": 3, "judge": 3, "after_round": 3, "after_evaluation": 3, "choose": 1,
        "finish": 1,
    }, server_app.HOOKS),
    "rollback": Play(
        {**FEW, "rounds": 4}, {"begin": 2, "recover": 1, "judge": 3, "after_round": 3}, (Rollback, Checkpoint), (0,)
    ),
    "end": Play(
        {**FEW, "rounds": 2}, {"recover_end": 1}, (Rollback,), (0, 1, 2), lambda: times("evaluate", "2", 1, nan_score)
    ),
    "void": Play(
        {**FEW, "rounds": 3, "max_growth": 10.0}, {"judge": 2, "after_round": 2}, (TwoVoids, Checkpoint),
        void=frozenset({2}),
    ),
    "two voids": Play(
        {**FEW, "rounds": 4, "max_growth": 10.0}, {"after_round": 2}, (TwoVoids, Checkpoint), void=frozenset({2, 3})
    ),
    "private": Play({
        **FEW, "rounds": 2, "dp": "client", "dp_epsilon": 100.0, "clip_update": 1.0, "dp_test": True,
    }, {"after_round": 2}, (Checkpoint,)),  # killed earlier, a client would noise the round a second time
}  # fmt: skip
CASES = [(p, h, s) for p, play in PLAYS.items() for s in play.after for h in play.hooks if s in vars(h)]
"""A kill after a hook that does nothing at a stage is one after the hook before it."""


def outcome(play: Play, out: Path, resumed: bool) -> dict[str, Any]:
    """The numbers of a run, or why it failed."""
    with pytest.MonkeyPatch.context() as patch:
        use_strategy(Wild, patch) if play.void else None
        patch.setattr(Wild, "rounds", play.void)
        given = {"data_fraction": 0.3, "local_epochs": 1, "batch_size": 64, **play.settings, "resume": resumed}
        try:
            return whole(federate(out, play.liars, play.lie(), **given))
        except RoundFailed as e:
            return {"failed": str(e)}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    return functools.cache(lambda name: outcome(PLAYS[name], tmp_path_factory.mktemp("whole") / "run", False))


@pytest.mark.full
@pytest.mark.parametrize(("name", "hook", "stage"), CASES, ids=lambda v: v if isinstance(v, str) else v.__name__)
def test_a_run_that_was_killed_after_a_hook_goes_on_with_the_same_bits(
    name: str, hook: type[Hook], stage: str, unbroken: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    """A kill at `begin` is one of a run that was killed before and goes on."""
    play = PLAYS[name]
    expected, kills = unbroken(name), [(hook, stage, play.after[stage])]
    kills += [(Checkpoint, "after_round", play.after["after_round"])] if stage == "begin" else []
    with pytest.MonkeyPatch.context() as patch:
        for kind, function, after in kills:
            patch.setattr(kind, function, interrupted(getattr(kind, function), after))
        for earlier, _ in enumerate(kills):
            with pytest.raises(KeyboardInterrupt):
                outcome(play, tmp_path / "run", earlier > 0)
    assert outcome(play, tmp_path / "run", True) == expected


class Counting(FedClient):
    """A client that states the sum of its inputs when it is asked before round 1."""

    asked: list[int]

    def answer(self, kind: str, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        assert kind == "prepare"
        self.asked.append(self.task.client)
        return {"n/sum": np.asarray(self.task.x_train.double().sum())}, {}


class Shifted(Strategy):
    """The initial model is moved by a sum over all clients."""

    def prepare(self, state: ServerState, query: Query) -> ServerState:
        total = query("prepare", Payload()).totals("n")
        shift = np.float32(0.01 * np.tanh(total.sums["sum"] / 1e4))
        return {"model": {name: array + shift for name, array in state["model"].items()}}


TOTAL = Total("n/", lambda context: {"sum": np.zeros(())}, lambda context, arrays, lost: None)
PREPARED = dataclasses.replace(
    FEDAVG, strategy=Shifted, client=Counting, extra_up=("n/",), queries=("prepare",),
    reduces={"train": {"model": Mean()}, "prepare": {"n": TOTAL}},
)  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Let runs have the method PREPARED; holds the clients that were asked."""
    found: list[int] = []
    monkeypatch.setattr(RunConfig, "method_and_hparams", lambda self: (PREPARED, BaseHParams()))
    monkeypatch.setattr(Counting, "asked", found, raising=False)
    yield found


@pytest.mark.full
@pytest.mark.parametrize("more", [{}, {"secure_sum": True}], ids=["plain", "secure sum"])
def test_a_method_asks_all_clients_before_round_1_and_once_alone(
    more: Mapping[str, Any], asked: list[int], tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"method": "fedavg", "rounds": 3, "fraction_train": 0.67, **more}
    straight = tiny(**settings)
    assert sorted(asked) == [0, 1, 2] and straight.summary["bytes_up_query.prepare"] > 0
    moved = checkpoint.load(straight.out / "checkpoint", 0)[1]["model"]
    assert not np.allclose(moved["head.bias"], 0.0), "the state before round 1 is there"
    for kill, hook, name, asks in (("written", Checkpoint, "begin", 1), ("asked", ProgressEvents, "after_query", 2)):
        asked.clear()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(hook, name, interrupted(getattr(hook, name)))
            tiny(**settings, out=tmp_path / kill)
        resumed = run(resume=tmp_path / kill)
        assert sorted(asked) == sorted([0, 1, 2] * asks), "a state that was written is not made again"
        for name in ("rounds", "clients", "final"):
            a, b = (deterministic(getattr(r, name)) for r in (straight, resumed))
            sizes = [c for c in a if c.startswith("bytes")]  # of secrets, which differ from run to run
            pd.testing.assert_frame_equal(a.drop(columns=sizes), b.drop(columns=sizes), check_exact=True)
        assert resumed.summary["bytes_up_query.prepare"] > 0
    asked.clear()
    later = run(resume=straight.out, rounds=4)
    assert not asked and list(later.rounds["round"]) == [1, 2, 3, 4]


def test_noise_of_an_answer_before_round_1_is_drawn_and_booked_once(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"method": "fed3r", "method_args": "base=none", "dp": "example", "dp_test": True}
    values = {k.replace("_", "-"): v for k, v in settings.items()}
    method, hparams = from_flat(values).method_and_hparams()
    calls: list[int] = []

    class Early(method.strategy):  # type: ignore[name-defined, misc]
        answers: ClassVar[Mapping[str, str]] = {"prepare": "sums/"}

        def prepare(self, state: ServerState, query: Query) -> ServerState:
            return super().finalize(state, lambda kind, payload: query("prepare", payload))  # type: ignore[no-any-return]

        def finalize(self, state: ServerState, query: Query) -> ServerState:
            return state

    class Answers(method.client):  # type: ignore[name-defined, misc]
        def answer(self, kind: str, payload: Payload) -> Any:
            assert kind == "prepare"
            calls.append(self.task.client)
            return super().answer("sums", payload)

    asked = {"train": {}, "prepare": {"sums": class_sums(np.float64, False, False)}}
    early = dataclasses.replace(method, strategy=Early, client=Answers, queries=("prepare",), reduces=asked)
    monkeypatch.setattr(RunConfig, "method_and_hparams", lambda self: (early, hparams))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Checkpoint, "begin", interrupted(Checkpoint.begin))
        tiny(**settings, rounds=1, out=tmp_path / "run")
    assert checkpoint.load(tmp_path / "run" / "checkpoint", 0)[1]["fed3r"]["head"]
    resumed = run(resume=tmp_path / "run")
    assert sorted(calls) == [0, 1, 2] and resumed.summary["privacy"]["releases"] == 1


def test_no_client_alone_decides_that_the_loss_falls() -> None:
    stop = EarlyStop(cast(Any, None))
    assert [stop.fell({0: 9.0, 1: loss, 2: -9.0}) for loss in (3.0, 3.0, 2.0, 2.5)] == [True, False, True, False]


@pytest.mark.parametrize(("cap", "most"), [(2.0, 12.0), (0.0, np.inf)])
def test_pooled_scores_count_test_samples_up_to_the_cap(cap: float, most: float) -> None:
    """The sizes are 4, 6 and 1000; the client without test samples does not count."""
    facts = {k: {"test-examples": n} for k, n in enumerate((0, 4, 6, 1000))}
    given = SimpleNamespace(test_cap=cap, cohort=SimpleNamespace(manager=SimpleNamespace(facts=facts)))
    assert Tables.most(cast(Any, SimpleNamespace(run=given))) == most


@pytest.mark.parametrize(("known", "stays"), [(0, True), (-1, False)])
def test_dropped_answers_from_before_round_1_stay_with_the_state_of_round_0(
    known: int, stays: bool, tiny: Tiny
) -> None:
    """A run without that state asks again."""
    result = tiny(method="local", rounds=1)
    (result.out / "final.csv").unlink()
    path = result.out / "dropped.csv"
    path.write_text("round,client,stage,reason\n0,1,query.prepare,late\n1,1,train,late\n")
    RunDirectory(result.out, result.config, known)
    assert ("0,1,query.prepare" in path.read_text()) == stays and "1,1,train" not in path.read_text()


@pytest.mark.parametrize("ended", [False, True])
def test_dropped_messages_of_secure_sums_stay_with_their_round(ended: bool, tiny: Tiny) -> None:
    """After `final.csv` those of the last round may be those of `finalize`, which is repeated."""
    result = tiny(method="local", rounds=2)
    if not ended:
        (result.out / "final.csv").unlink()
    rows = ["0,1,query.prepare,late", "0,1,query.keys,late", "1,1,query.shares,late", "1,1,train,late"]
    last, repeated = ["2,2,query.unmask,late"], ["0,1,query.sums,late", "2,1,evaluate,late", "2,1,query.sums,late"]
    path = result.out / "dropped.csv"
    path.write_text("\n".join(["round,client,stage,reason", *rows, *last, *repeated]) + "\n")
    RunDirectory(result.out, result.config, 2)
    assert path.read_text().splitlines()[1:] == [*rows, *([] if ended else last)]


def test_the_seconds_of_a_run_are_those_of_all_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.perf_counter", lambda: 12.0)
    hook = Checkpoint(cast(Any, SimpleNamespace(started=10.0)))
    assert hook.seconds == 2.0
    hook.load_state_dict({"seconds": 5.0})
    assert hook.seconds == 7.0
