"""Files that give no method: named in one line, while all others work."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import strategies
from fedapp import cli, registry
from fedapp.config import from_flat
from fedapp.errors import BadRequest

FILES = {
    "torn.py": "def aggregate(:\n",
    "lost.py": "import json\n\nimport a_package_that_nobody_has\n",
    "deep.py": "from strategies import fedavg\n\nMETHOD = fedavg.METHODS\n",
    "bare.py": "METHODS = ()\n",
    "alias.py": "from strategies.fedavg import METHOD\n",
}
SAYS = {
    "torn": "strategies/torn.py cannot be imported: SyntaxError: invalid syntax (torn.py, line 1)",
    "lost": "strategies/lost.py cannot be imported: ModuleNotFoundError: No module named 'a_package_that_nobody_has' "
    "(strategies/lost.py, line 3)",
    "deep": "strategies/deep.py cannot be imported: AttributeError: module 'strategies.fedavg' has no attribute "
    "'METHODS' (strategies/deep.py, line 3)",
    "bare": "strategies/bare.py states no METHOD = Method(...)",
    "alias": "strategies/alias.py states METHOD.id = 'fedavg'; it must be the file's name",
}


@pytest.fixture
def crowded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`strategies/` with five further files that are wrong."""
    folder = tmp_path / "strategies"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    monkeypatch.setattr(strategies, "__path__", [*strategies.__path__, str(folder)])
    registry.forget()
    yield
    registry.forget()
    for name in SAYS:
        sys.modules.pop(f"strategies.{name}", None)


def test_every_file_of_the_project_gives_a_method() -> None:
    assert registry.broken() == {}
    assert list(registry.discover()) == registry.ORDER, "a method of the project stands in ORDER of fedapp/registry.py"


def test_a_broken_file_is_named_and_the_others_work(crowded: None) -> None:
    assert registry.broken() == SAYS
    assert list(registry.discover()) == registry.ORDER
    assert registry.get("fedavg").id == "fedavg"
    for name, text in SAYS.items():
        with pytest.raises(BadRequest) as caught:
            registry.get(name)
        assert str(caught.value) == f"no method '{name}': {text}"


def test_the_commands_say_so(
    crowded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def go(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedapp", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    told = [f"fedapp: left out: {text}" for text in SAYS.values()]
    code, out, err = go("methods")
    assert code == 0 and [line.split("\t")[0] for line in out.splitlines()] == ["id", *registry.ORDER]
    assert sorted(err.splitlines()) == sorted(told)
    code, out, err = go("run", "--method", "fedavg", "--dry-run", "--engine", "local")
    assert code == 0 and 'method = "fedavg"' in out and err == "reading settings and data\n", (
        "other methods are not looked at"
    )
    for words in (["run", "--method", "torn", "--engine", "local"], ["compare", "--methods", "local,torn"]):
        code, _, err = go(*words, "--out", str(tmp_path / "out"))
        assert code == 2 and err.splitlines()[-1] == f"fedapp: no method 'torn': {SAYS['torn']}"
        assert "Traceback" not in err


def test_a_value_out_of_range_is_refused_in_the_same_words_everywhere() -> None:
    """Keys had plain words, and hyperparameters those of pydantic."""
    for values, place in (({"momentum": -1.0}, "momentum"), ({"method": "fedprox", "method-args": "mu=-1"}, "mu")):
        with pytest.raises(BadRequest, match=rf"{place} = '?-1(\.0)?'?: must be at least 0"):
            from_flat(values)
