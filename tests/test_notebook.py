"""Notebooks: the quickstart runs, and what it uses of `fedapp` in Python: on_round, the bar, data_card, compare."""

from __future__ import annotations

import ast
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import fedapp
from fedapp import compare, data_card, process, run
from fedapp.engines import local, progress
from fedapp.errors import BadRequest
from fedapp.experiments import compare as comparing
from fedapp.results import report
from fedapp.results.runs import RunResult
from tests import own_nets

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart.ipynb"


# ---- the quickstart --------------------------------------------------------------------------------------------------


def test_the_quickstart_uses_names_that_exist() -> None:
    """Ruff checks that its cells parse and that all names are defined."""
    nbformat = pytest.importorskip("nbformat")
    stored = nbformat.read(QUICKSTART, as_version=4)
    nbformat.validate(stored)
    cells = [c for c in stored.cells if c.cell_type == "code"]
    outputs = [o for c in cells for o in c.outputs]
    pictures = [o for o in outputs if "image/png" in o.get("data", {})]
    assert len(cells) > 5 and len(pictures) == 4, "store its outputs: jupyter nbconvert --execute --inplace"
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"], "no warnings"
    imported: list[str] = []
    for cell in cells:
        source = "\n".join(line for line in cell.source.splitlines() if not line.startswith("%"))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                imported += [f"{getattr(node, 'module', '')}:{name.name}" for name in node.names]
    public = {f"fedapp:{name}" for name in fedapp.__all__}
    ours = {name for name in imported if "fedapp" in name}
    assert len(ours) == 4 and ours <= public, "a notebook uses the public API alone"
    for link in (part.split(")")[0] for c in stored.cells for part in c.source.split("](")[1:]):
        assert (QUICKSTART.parent / link).is_file(), link


@pytest.mark.slow
def test_the_quickstart_runs(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    stored = nbformat.read(QUICKSTART, as_version=4)
    seen: list[str] = []
    client = nbclient.NotebookClient(stored, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    taken = client.process_message

    def process(message: Any, cell: Any, index: int) -> Any:
        if message["msg_type"] == "update_display_data":
            seen.extend(message["content"]["data"])
        return taken(message, cell, index)

    client.process_message = process
    begun = time.monotonic()
    client.execute()
    assert time.monotonic() - begun < 600
    outputs = [o for c in stored.cells if c.cell_type == "code" for o in c.outputs]
    data = [o["data"] for o in outputs if "data" in o]
    assert seen.count("image/png") == seen.count("text/html") == 8  # the live plot and the bar, once a round
    assert sum("image/png" in d for d in data) == 4 and sum("<table" in d.get("text/html", "") for d in data) == 2
    assert not [o for o in outputs if o.get("name") == "stderr"]
    assert any("8/8 received" in d.get("text/plain", "") for d in data)
    printed = "".join(o.get("text", "") for o in outputs)
    assert printed.count("on the test images of client") == 2 and (tmp_path / "runs").is_dir()


# ---- what it uses ----------------------------------------------------------------------------------------------------


class Shown:
    """Stands in for IPython's display: keeps what a reader would see."""

    def __init__(self) -> None:
        self.pictures: list[str] = []

    def display(self, thing: Any, display_id: bool) -> Shown:
        assert display_id
        self.update(thing)
        return self

    def update(self, thing: Any) -> None:
        self.pictures.append(thing._repr_html_())
        assert repr(thing).split()[1] in self.pictures[-1]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Shown:
    """Let this process look like a notebook's kernel."""
    shown = Shown()
    shell = SimpleNamespace(kernel=object())
    ipython = SimpleNamespace(get_ipython=lambda: shell, display=SimpleNamespace(display=shown.display))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
    return shown


def test_a_notebook_shows_a_bar_that_moves(
    kernel: Shown, tiny: Callable[..., RunResult], capsys: pytest.CaptureFixture[str]
) -> None:
    assert progress.in_notebook()
    result = tiny(method="fedavg", rounds=3)
    assert [f'value="{n}" max="3"' in p for n, p in enumerate(kernel.pictures)] == [True] * 4
    assert re.search("[1-9] s left", kernel.pictures[2]) and kernel.pictures[3].count("last scores follow") == 1
    assert "s left" not in kernel.pictures[3]
    percent = f"trained {100 * result.rounds['trained_accuracy'].iloc[-1]:.1f} %"
    assert percent in kernel.pictures[3] and capsys.readouterr() == ("", "")
    kernel.pictures.clear()
    tiny(resume=result.out, rounds=4)
    assert 'value="3" max="4"' in kernel.pictures[0]
    tiny(method="fedavg", rounds=1, progress=False)
    assert len(kernel.pictures) == 2


def test_the_text_of_a_bar_is_no_markup(kernel: Shown) -> None:
    bar = progress.Bar()
    bar.update(bar.add_task("<b>", total=2), completed=1, text="<script>")
    assert "&lt;b&gt;" in kernel.pictures[-1] and "<script>" not in kernel.pictures[-1]


def test_without_a_notebook_progress_is_lines_and_only_when_asked_for(
    tiny: Callable[..., RunResult], capsys: pytest.CaptureFixture[str]
) -> None:
    assert not progress.in_notebook()
    tiny(method="local", rounds=1)
    assert capsys.readouterr().err == ""
    tiny(method="local", rounds=1, progress=True)
    assert "round 1/1: received" in capsys.readouterr().err


def test_on_round_gets_the_rows_of_the_table(tiny: Callable[..., RunResult]) -> None:
    rows: list[dict[str, Any]] = []
    result = tiny(method="fedavg", rounds=2, on_round=lambda row: rows.append(dict(row)))
    assert [r["round"] for r in rows] == [1, 2]
    assert list(rows[0]) == list(result.rounds)
    assert [r["train_loss"] for r in rows] == list(result.rounds["train_loss"])


def test_an_error_of_on_round_ends_the_run_which_can_be_resumed(tiny: Callable[..., RunResult], tmp_path: Path) -> None:
    def stop(row: Any) -> None:
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        tiny(method="fedavg", rounds=2, on_round=stop, out=tmp_path / "run")
    assert len(run(resume=tmp_path / "run").rounds) == 2


def test_rounds_are_given_once(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="rounds = 2 and num_server_rounds = 3"):
        run(rounds=2, num_server_rounds=3, out=tmp_path)


def test_paths_lists_and_dicts_are_what_their_text_is(tmp_path: Path) -> None:
    given = local.flat(
        {
            "method": "fedprox", "method_args": {"mu": 0.5}, "data_dir": tmp_path, "model": ["digits-a", "digits-b"],
            "adapt_epochs": (0, 3), "columns": {"x": ["a", "b"], "y": "c"}, "clients": np.int64(3),
            "lr": np.float32(0.5), "rounds": 2,
        }
    )  # fmt: skip
    assert given == {
        "method": "fedprox", "method-args": "mu=0.5", "data-dir": str(tmp_path), "model": "digits-a,digits-b",
        "adapt-epochs": "0,3", "columns": "x=a,b y=c", "clients": 3, "lr": 0.5, "num-server-rounds": 2,
    }  # fmt: skip
    assert local.flat({"method": "fedprox(mu=0.1 lr=0.2)"}) == {"method": "fedprox", "method-args": "mu=0.1", "lr": 0.2}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"methods": 3}, "methods = 3: must be text, or a list of texts"),
    ({"methods": ["local", 3]}, "methods = .*: must be text, or a list of texts"),
    ({"seeds": "two"}, "seeds = 'two': must be a whole number"),
    ({"seeds": 0}, "--seeds 0: at least 1"),
    ({"workers": "2"}, "workers = '2': must be a whole number"),
    ({"target": "0.9"}, "target = '0.9': must be a number"),
    ({"engine": "Ray"}, "engine = 'Ray': choose local or ray"),
    ({"datasets": 1}, "datasets = 1: must be text, or a list of texts"),
    ({"sweep": {"clients": [1]}}, "sweep = .*: must be text"),
    ({"out": 3}, "out = 3: must be text or a path"),
    ({"values": {}}, "unknown key 'values'"),
    ({"rounds": np.arange(900)}, r"num-server-rounds = array\(\[ *0, .{0,80}\.\.\.: must be a whole number"),
    ({"seed": "x"}, "seed = 'x': must be a whole number"),
    ({"model": {"a": 1}}, "model = {'a': 1}: must be text"),
    ({"mu": 0.1}, 'it is a hyperparameter of fedprox, .*method = "fedprox.mu=0.1."'),
    ({"rounds": -1}, "must be at least 0"),
    ({"clients": -1}, "must be at least 0"),
]


@pytest.mark.parametrize(("given", "told"), WRONG)
def test_a_wrong_argument_is_refused_and_leaves_no_folder(
    given: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_turn: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadRequest, match=told) as error:
        compare(**{"methods": "local", "rounds": 1, **given})
    assert len(str(error.value)) < 300
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    ("given", "told"), [({"out": 3}, "out = 3"), ({"resume": 3}, "resume"), ({"on_round": 3}, "on_round")]
)
def test_a_wrong_argument_of_a_run_is_refused(
    given: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadRequest, match=told):
        run(method="local", **given)
    assert not list(tmp_path.iterdir())


def test_a_folder_is_removed_again_if_the_data_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparing.tasks, "check", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compare(["local"], rounds=1)
    assert not list(tmp_path.glob("runs/*"))


def test_a_quiet_comparison_prints_what_failed_alone(
    tmp_path: Path, in_turn: list[str], no_page: list[Path], monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    small = {"clients": 2, "local_epochs": 1, "data_fraction": 0.2, "rounds": 1, "quiet": True, "seeds": 1}
    assert len(compare(["local"], out=tmp_path / "one", **small).table) == 1
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr("tests.conftest.run_local", lambda config: 1 / 0)
    with pytest.raises(RuntimeError):
        compare(["local"], out=tmp_path / "two", **small)
    said = capfd.readouterr()
    assert not said.out and "local s0 failed: ZeroDivisionError" in said.err and len(said.err.splitlines()) == 2


def test_a_notebook_has_no_live_display_of_rich_which_needs_ipywidgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.live.Live.start", lambda *_, **__: pytest.fail("it warns several times a second"))
    with report.on_terminal() as progress:
        progress(1, 2, "a figure")
    with comparing.RunsProgress({}) as shown:
        assert shown.bar is None


def test_the_data_card_is_that_of_the_run(tiny: Callable[..., RunResult]) -> None:
    settings = {"dataset": "digits", "clients": 3, "data_fraction": 0.3, "alpha": 0.2, "seed": 4}
    card = data_card(**settings, rounds=1)
    result = tiny(method="local", rounds=1, **settings)
    assert card.train.tolist() == result.card["train"] and card.partition.hash == result.card["hash"]


def test_compare_returns_the_comparison(tmp_path: Path, in_turn: list[str], no_page: list[Path]) -> None:
    small = {"clients": 3, "local_epochs": 1, "batch_size": 64, "data_fraction": 0.3}
    found = compare("local,fedavg", seeds=2, out=tmp_path / "both", rounds=1, **small, reference="fedavg")
    assert [r.method for r in found.finished] == ["local", "fedavg", "local", "fedavg"] and len(found.table) == 4
    assert set(found.significance["reference"]) == {"fedavg"} and len(in_turn) == 4


def test_own_code_of_a_notebook_runs_and_a_comparison_refuses_it_at_once(
    tiny: Callable[..., RunResult], in_turn: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = ModuleType("__main__")  # as in a notebook: without a file
    vars(main)["net"] = own_nets.digits_a
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert tiny(method="local", rounds=1, model="__main__:net").ok
    small: dict[str, Any] = {"clients": 2, "data_fraction": 0.3, "rounds": 1, "out": tmp_path / "c"}
    for methods, more in (("local", {"model": "__main__:net"}), ("local(model=__main__:net)", {})):
        with pytest.raises(BadRequest, match=r"from a notebook or a prompt\. Write it to a file, such as net\.py"):
            compare(methods, **small, **more)
    assert not in_turn and not (tmp_path / "c").exists()
    main.__file__ = __file__
    process.check_main([{"model": "__main__:net"}], on_ray=False)
    with pytest.raises(BadRequest, match=r"workers of Ray cannot load it\. Write it to a file"):
        compare("local", engine="ray", model="__main__:net", **small)


def test_a_comparison_that_fails_says_so(
    tmp_path: Path, in_turn: list[str], no_page: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.conftest.run_local", lambda config: 1 / 0)
    with pytest.raises(RuntimeError, match="is not complete: see the lines above"):
        compare("local", out=tmp_path / "one", rounds=1, clients=3, data_fraction=0.3, seeds=1)
