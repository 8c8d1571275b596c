"""The mutation runner: the faults it makes, and what it reports for a toy whose tests have known gaps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools import mutants as runner
from tools.mutate import mutants

ROOT = Path(__file__).parents[1]

TOY = '''"""A toy."""
LIMIT: int = 3


def mean(values, weights=None):
    """Weighted mean of at most 3 values."""
    total = 0.0
    if weights is None:
        return sum(values) / len(values)
    for value, weight in zip(values, weights, strict=True):
        total += weight * value
    return total / sum(weights)


def untested(x):
    return x + 1
'''
CHECKS = """from strategies.toy import LIMIT, mean


def test_limit():
    assert LIMIT == 3


def test_plain():
    assert mean([1.0, 2.0]) == 1.5


def test_weighted():
    assert mean([1.0, 2.0], [1.0, 3.0]) == 1.75
"""


def faults(source: str) -> list[tuple[str, str]]:
    return [m.lines(source) for m in mutants("x.py", source) if m.changes(source)]


@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        ("y = a - b", {"y = a + b"}),
        ("y = a @ b.detach()", {"y = a @ b"}),
        ("y = a // 2", {"y = a * 2", "y = a // 3"}),
        ("w -= lr * g", {"pass", "w += lr * g", "w -= lr / g"}),
        ("y = a if b == c else d", {"y = a if b != c else d"}),
        ("y = a if b < c else d", {"y = a if b <= c else d", "y = a if (not (b < c)) else d"}),
        ("y = f(a, b)", {"y = f(b, a)"}),
        ("y = max(a, b)", {"y = min(a, b)"}),
        ("y = x[:n]", {"y = x[:n + 1]"}),
        ("y = x[-1]", {"y = x[-2]"}),
        ("y = -x", {"y = x"}),
        ("y = range(n)", {"y = range(n - 1)"}),
        ("y = sorted(x)", {"y = (x)"}),
        ("y = [k for k in x if k > 0]", {f"y = [k for k in x if {c}]" for c in ("k >= 0", "k > 1", "(not (k > 0))")}),
        ("model.eval()", {"pass", "model"}),
        ("x.a = b", {"pass"}),
        ("y = f(keep=True)", {"y = f(keep=False)"}),
        ("y = zip(a, a, strict=True)", set()),
        ("y: Annotated[float, Field(ge=0)] = 0.5", {"y: Annotated[float, Field(ge=0)] = 1.0"}),
        ("y = Field(0.5, description=f'at most {1 + 1}')", {"y = Field(1.0, description=f'at most {1 + 1}')"}),
        ("'''A docstring with 1 number.'''", set()),
        ("__all__ = [a, b][:2]", set()),
        ("log.info('%d', 1 + 1)", set()),
        ("raise ValueError(1 + 1)", {"pass"}),
    ],
)  # fmt: skip
def test_faults_of_a_line(line: str, becomes: set[str]) -> None:
    found = faults(f"def f():\n    é = 'wide letters before it'\n    {line}\n")
    assert {after for _, after in found} == becomes and len(found) == len(becomes)
    assert {before for before, _ in found} <= {line}


def test_a_method_returns_none_and_knows_its_name() -> None:
    source = "class A:\n    @wraps(1)\n    def f(self, n: int = 2) -> Literal[3]:\n        return n\n"
    found = [(m.function, m.lines(source)[1]) for m in mutants("x.py", source)]
    assert found == [("A.f", "def f(self, n: int = 3) -> Literal[3]:"), ("A.f", "return None")]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    for name, text in {"strategies/__init__.py": "", "strategies/toy.py": TOY, "tests/test_toy.py": CHECKS}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def judged(folder: Path, *options: str) -> str:
    command = [sys.executable, "-m", "tools.mutants", "--root", str(folder), "--results", str(folder / "out.jsonl")]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
def test_a_toy_with_gaps(toy: Path) -> None:
    shown = judged(toy, "--page", str(toy / "page.md"))
    records = [json.loads(line) for line in (toy / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    survived = {(r["function"], r["after"]) for r in records if r["result"] == "survived"}
    assert survived == {
        ("untested", "return None"),
        ("untested", "return x - 1"),
        ("untested", "return x + 2"),
        ("mean", "for value, weight in zip(weights, values, strict=True):"),  # a product either way
    }
    killed = {r["after"]: r["by"] for r in records if r["result"] == "failed"}
    assert killed["LIMIT: int = 4"] == "tests/test_toy.py::test_limit"
    assert killed["total -= weight * value"] == killed["pass"] == "tests/test_toy.py::test_weighted"
    assert len(records) == len(faults(TOY)) == 16
    last = "12 of 16 killed"
    assert shown.rstrip().endswith(last) and "  - return x + 1\n  + return x - 1\n" in shown
    assert f"**{last}**" in (toy / "page.md").read_text(encoding="utf-8")

    # A second run finds everything known; tests that fail without a fault end it.
    assert "." not in judged(toy).splitlines()[0]
    (toy / "tests" / "test_toy.py").write_text(CHECKS.replace("1.75", "1.75 + 1"), encoding="utf-8")
    with pytest.raises(AssertionError, match="failed without any fault"):
        judged(toy)


def test_an_endless_loop_is_killed(tmp_path: Path) -> None:
    (tmp_path / "test_endless.py").write_text("def test_endless():\n    while True:\n        pass\n", encoding="utf-8")
    ((_, state, _),) = runner.run(tmp_path, [runner.Job(("test_endless.py",), 3.0)], {}, 1)
    assert state == "timeout"


def test_every_file_has_tests() -> None:
    files = [f for folder in runner.FOLDERS for f in (ROOT / folder).rglob("*.py") if f.name != "__init__.py"]
    for file in files:
        assert all((ROOT / test).is_file() for test in runner.tests_for(file.relative_to(ROOT).as_posix(), ROOT))
    assert runner.NAMED.keys() <= {file.relative_to(ROOT).as_posix() for file in files}


def test_equal_faults_of_a_function_are_drawn_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f():\n    return (" + "1, " * 60 + ")\n", encoding="utf-8")
    first, second = (runner.sample(tmp_path, ["a.py"], 20, seed) for seed in (0, 1))
    assert len({m.start for m in first}) == 20 and {m.start for m in first} != {m.start for m in second}


def test_a_pattern_without_a_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runner.main(["--only", "nowhere.py"])
    assert "no file matches 'nowhere.py'" in capsys.readouterr().err


def test_explained_faults_are_of_lines_that_exist() -> None:
    for file, _, before, after in runner.reasons():
        lines = [line.strip() for line in (ROOT / file).read_text(encoding="utf-8").splitlines()]
        assert before.splitlines()[0] in lines and before != after, f"{file}: {before}"


def test_survivors_without_a_reason_stand_out() -> None:
    record = {"file": "a.py", "function": "f", "before": "x | y", "after": "x & y", "result": "survived"}
    text = runner.page([record], "python -m tools.mutants")
    assert "**0 of 1 killed**" in text and "- `a.py` `f`: **not explained yet**.<br>`x | y`<br>`x & y`" in text
