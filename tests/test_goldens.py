"""Ten small runs give the numbers of the base commit, and all methods declare what the table says."""

from __future__ import annotations

import difflib
import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tools import cases, declarations, goldens


@pytest.mark.full
def test_ten_small_runs_give_what_the_base_commit_gives(capfd: pytest.CaptureFixture[str]) -> None:
    code = goldens.main(["--smallest"])
    text = "".join(capfd.readouterr())
    assert code == 0, text
    assert f"{len(cases.SMALLEST)} cases" in text and len(cases.SMALLEST) == 10


def test_a_clone_without_the_base_says_how_to_fetch_it(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"git fetch --depth=1 origin {'0' * 40}"):
        goldens.check_out("0" * 40, tmp_path)


def test_the_declarations_of_all_methods_are_those_of_the_table() -> None:
    old, new = declarations.TABLE.read_text(encoding="utf-8").splitlines(), declarations.table().splitlines()
    changed = [line for line in difflib.ndiff(old, new) if line[0] in "+-"]
    assert not changed, "\n".join(["python -m tools.declarations writes the table:", *changed])


@pytest.mark.parametrize(
    ("file", "base", "this", "words"),
    [
        (
            "run/rounds.csv",
            "round,loss,seconds\n1,0.5,3\n",
            "round,loss,seconds\n1,0.6,4\n",
            "loss: '0.6', in the base",
        ),
        ("run/rounds.csv", "round,loss\n1,0.5\n", "round,loss\n1,0.5\n2,0.4\n", "2 entries, in the base 1"),
        ("run/rounds.csv", "round\n1\n", "round,loss\n1,1\n", "has ['round', 'loss']"),
        ("run/summary.json", '{"ok": true, "seconds": 1}', '{"ok": 1, "seconds": 2}', "ok: 1, in the base True"),
        ("run/config.toml", "a = 1\n", "a = 2\n", "2 lines: ['-a = 1', '+a = 2']"),
        ("stderr.txt", "1 s left\nx\n", "2 s left\ny\n", "2 lines: ['-x', '+y']"),
    ],
)
def test_a_change_of_a_file_is_named_and_times_are_not(
    file: str, base: str, this: str, words: str, tmp_path: Path
) -> None:
    found = []
    for name, text in (("base", base), ("this", this), ("again", base.replace("3\n", "5\n"))):
        folder = tmp_path / name
        (folder / file).parent.mkdir(parents=True)
        (folder / "ended").touch()
        (folder / file).write_text(text)
        found.append(goldens.read_case(folder))
    ((table, texts),) = goldens.changes(found[0], found[1]).items()
    assert table == Path(file).name and words in texts[0]
    assert not goldens.changes(found[0], found[2])


def test_the_folder_of_a_case_is_no_difference(tmp_path: Path) -> None:
    found = []
    for name in ("base", "this"):
        folder = tmp_path / name / "case"
        folder.mkdir(parents=True)
        (folder / "ended").touch()
        (folder / "stdout.txt").write_text(f"in {folder}/run\n")
        save_file({"w": np.zeros(1)}, folder / "a.safetensors", {"fedapp": json.dumps({"lost": f"{folder}/run"})})
        found.append(goldens.read_case(folder))
    assert not goldens.changes(*found)


def test_a_case_that_was_killed_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="did not end: run it alone"):
        goldens.read_case(tmp_path)


def test_arrays_are_compared_bit_by_bit() -> None:
    base = {"models": {"last": {"w": np.array([0.0, 1.0], np.float32)}}}
    assert not goldens.changes(base, {"models": {"last": {"w": np.array([0.0, 1.0], np.float32)}}})
    for other, words in (
        (np.array([-0.0, 1.0], np.float32), "up to 0 from"),
        (np.array([0.0, 1.5], np.float32), "up to 0.5 from"),
        (np.array([0.0], np.float32), "float32 (1,), in the base float32 (2,)"),
    ):
        assert goldens.changes(base, {"models": {"last": {"w": other}}})["models"][0].startswith(f"last: w: {words}")


def test_every_difference_of_a_table_is_named() -> None:
    base, this = ({"checkpoint": {"a": {"notes": n, "w": np.full(2, w)}}} for n, w in ((1, 0.0), (2, 9.0)))
    assert goldens.changes(base, this)["checkpoint"] == ["a: notes: 2, in the base 1", "a: w: up to 9 from the base"]


def test_no_expected_change_accepts_a_table_of_all_cases() -> None:
    entries = tomllib.loads(goldens.EXPECTED.read_text(encoding="utf-8")).get("change", [])
    assert not [e for e in entries if e["case"] == "*" and e.get("part", "*") == "*"]


def test_a_pattern_without_a_case_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        goldens.main(["--cases", "robsut/*"])
    assert "no case matches 'robsut/*'" in capsys.readouterr().err


def test_only_expected_changes_are_accepted_and_each_must_occur(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(tree: Path, chosen: dict[str, cases.Steps], folder: Path) -> None:
        for case in chosen:
            (folder / case).mkdir(parents=True)
            moved = tree == goldens.ROOT and case == "a/moved"
            (folder / case / "ended").touch()
            (folder / case / "stdout.txt").write_text(f"{moved}\n")

    monkeypatch.setattr(goldens, "run_all", write)
    monkeypatch.setattr(goldens, "check_out", lambda commit, folder: None)
    chosen: dict[str, cases.Steps] = {"a/moved": [], "a/same": []}
    for number, (listed, wrong) in enumerate(
        [(["a/moved"], 0), (["a/*"], 0), ([], 1), (["a/same"], 2), (["a/moved", "a/same"], 1), (["a/moved", "b/*"], 0)]
    ):
        entries = [{"case": case, "table": "std*", "part": "*: 2 lines*", "reason": "a better mean"} for case in listed]
        (tmp_path / str(number)).mkdir()
        assert goldens.compare("c", chosen, entries, tmp_path / str(number)) == wrong
    assert "a/same std*: does not differ, but expected_changes.toml lists it" in capsys.readouterr().out
