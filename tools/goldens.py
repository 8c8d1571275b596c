"""Compare what a base commit and this working tree compute: every number, table, text and file of many small runs.

`python -m tools.goldens` checks the base out, runs all cases of `tools.cases` with it and then with this working tree,
on this machine, and names each table that differs. Equal means equal bits, without times, versions, and tokens of runs.
The last bits depend on the processor and on the versions of the libraries, so nothing is stored. Only the command line
is called, so a rebuild of the inside changes no case.

`tools/expected_changes.toml` names the base commit. A commit that changes numbers on purpose lists them there: case,
table, and reason. The command accepts the listed changes and no others, and fails if a listed one does not occur. The
base moves, and the list becomes empty, in a commit without product code, after the command has passed.
"""

from __future__ import annotations

import argparse
import csv
import difflib
import fnmatch
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from tools import cases
from tools.cases import ROOT, Steps

EXPECTED = Path(__file__).with_name("expected_changes.toml")
Content = dict[str, dict[str, Any]]
"""Content of a run by table and file."""
SKIPPED = ("versions.json", "progress.jsonl", ".lock")
"""Files of versions and locks, and the events that stderr shows."""
CHANGING = ("saved", "run", "time", "contents", "traceback")
"""Names of values that differ between two runs of one commit, or that repeat others; so do all that end in seconds."""
OMITTED = re.compile(r"^(client \d+:( {2}.*|.*Traceback.*)|waiting for .*)\n", re.MULTILINE)
"""Lines of output with line numbers of the code, and those that a slow machine adds."""


def check_out(commit: str, folder: Path) -> None:
    """Write the files of a commit to `folder`.

    Raises
    ------
    SystemExit : the clone does not hold it; the message gives the command that fetches it.
    """
    git = ["git", "-C", str(ROOT)]
    if subprocess.run([*git, "cat-file", "-e", f"{commit}^{{commit}}"], capture_output=True, check=False).returncode:
        raise SystemExit(f"this clone lacks the commit {commit}: git fetch --depth=1 origin {commit}")
    archive = subprocess.run([*git, "archive", commit], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")


def run_all(tree: Path, chosen: Mapping[str, Steps], folder: Path) -> None:
    """Run the cases with the package in `tree`, as many at a time as there are cores; results are in `folder`/NAME."""
    listed = folder.with_suffix(".json")
    listed.write_text(json.dumps(chosen), encoding="utf-8")
    fixed = {
        "PYTHONPATH": str(tree), "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
        "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1", "COLUMNS": "120",
        "NO_COLOR": "1", "FEDAPP_CACHE": str(folder / "cache"),
    }  # fmt: skip
    script = Path(__file__).with_name("run_cases.py")
    subprocess.run(
        [sys.executable, script, listed, folder, str(os.cpu_count())], env={**os.environ, **fixed}, check=True
    )


def without_changing(value: Any) -> Any:
    """Return parsed JSON without the values that differ between two runs of one commit."""
    if isinstance(value, dict):
        return {k: without_changing(v) for k, v in value.items() if k not in CHANGING and not k.endswith("seconds")}
    return [without_changing(v) for v in value] if isinstance(value, list) else value


def read_file(path: Path, folder: Path) -> Any:
    """Return the content of a file of a case in `folder`, as far as it must not change."""
    if path.suffix == ".safetensors" or path.name.endswith("head-norms"):
        with safe_open(path, "np") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            header = (file.metadata() or {}).get("fedapp", "{}").replace(str(folder), "FOLDER")
            return {**arrays, "header": without_changing(json.loads(header))}
    if path.suffix == ".npz":
        with np.load(path) as file:
            return dict(file)
    text = path.read_text(encoding="utf-8").replace(str(folder), "FOLDER")
    if path.suffix == ".json":
        return without_changing(json.loads(text))
    if path.suffix == ".jsonl":
        # In a ledger of releases `after` is the hash of the line before, with its time.
        return [without_changing({**json.loads(line), "after": ""}) for line in text.splitlines()]
    if path.suffix == ".csv":
        return [without_changing(row) for row in csv.DictReader(io.StringIO(text))]
    return re.sub(r"\d+ s left", "s left", OMITTED.sub("", text)).splitlines()


def read_case(folder: Path) -> Content:
    """Return what a case wrote, by table: `stdout.txt`, `rounds.csv`, `models`, ..."""
    found: Content = {}
    if not (folder / "ended").exists():
        raise RuntimeError(f"{folder} did not end: run it alone, with --cases and --keep")
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in SKIPPED):
        name = path.relative_to(folder).as_posix().removeprefix("run/")
        # The name of a client's state begins with the token of the run.
        file = re.sub(r"[0-9a-f]{12}\.", "", name)
        found.setdefault(name.partition("/")[0], {})[file] = read_file(path, folder)
    return found


def differences(base: Any, this: Any, place: str = "") -> Iterator[str]:
    """Yield the place of each difference of two contents, and both values."""
    if isinstance(base, dict) and isinstance(this, dict):
        if list(base) != list(this):
            yield f"{place}has {list(this)!r:.300}, the base {list(base)!r:.300}"
        parts: Iterable[Any] = [key for key in base if key in this]
    elif isinstance(base, list) and isinstance(this, list) and all(isinstance(v, str) for v in (*base, *this)):
        changed = list(difflib.unified_diff(base, this, n=0, lineterm=""))[2:]
        if lines := [line for line in changed if not line.startswith("@@")]:
            yield f"{place}{len(lines)} lines: {lines!r:.300}"
        return
    elif isinstance(base, list) and isinstance(this, list):
        if len(base) != len(this):
            yield f"{place}{len(this)} entries, in the base {len(base)}"
        parts = range(min(len(base), len(this)))
    elif isinstance(base, np.ndarray) and isinstance(this, np.ndarray):
        if (base.dtype, base.shape) != (this.dtype, this.shape) or base.dtype.kind != "f":
            if (base.dtype, base.shape, base.tobytes()) != (this.dtype, this.shape, this.tobytes()):
                yield f"{place}{this.dtype} {this.shape}, in the base {base.dtype} {base.shape}"
        elif base.tobytes() != this.tobytes():
            yield f"{place}up to {np.nanmax(np.abs(base.astype(float) - this.astype(float))):.3g} from the base"
        return
    else:
        if type(base) is not type(this) or base != this:
            yield f"{place}{this!r:.200}, in the base {base!r:.200}"
        return
    for part in parts:
        yield from differences(base[part], this[part], f"{place}{part}: ")


def changes(base: Content, this: Content) -> dict[str, list[str]]:
    """Return the tables that differ, each with its differences."""
    found = {table: list(differences(base.get(table), this.get(table))) for table in sorted({*base, *this})}
    return {table: texts for table, texts in found.items() if texts}


def compare(against: str, chosen: Mapping[str, Steps], entries: Sequence[Mapping[str, str]], root: Path) -> int:
    """Run the cases with a commit and with this working tree, print what differs, and return how much is unexpected.

    Parameters
    ----------
    chosen : cases of `cases.all_cases(root / "data")`.
    entries : expected changes: `case`, `table` and `part` (patterns; of any difference where it is left out), `reason`.
    root : folder for all files.
    """
    cases.write_data(root / "data", any(case.startswith("recipe/") for case in chosen))
    check_out(against, root / "tree")
    run_all(root / "tree", chosen, root / "base")
    run_all(ROOT, chosen, root / "this")
    wrong, differing, occurred = 0, 0, set[int]()
    for case in chosen:
        found = changes(read_case(root / "base" / case), read_case(root / "this" / case))
        differing += bool(found)
        for table, texts in found.items():
            for text in texts:
                of = {"case": case, "table": table, "part": text}
                meant = [i for i, e in enumerate(entries) if all(fnmatchcase(of[k], e.get(k, "*")) for k in of)]
                occurred.update(meant)
                wrong += not meant
                if not meant or text == texts[0]:
                    print(f"{case} {table}: {text}", *(f"(expected: {entries[i]['reason']})" for i in meant))
    for i, entry in enumerate(entries):
        if i not in occurred and fnmatch.filter(chosen, entry["case"]):
            wrong += 1
            print(f"{entry['case']} {entry['table']}: does not differ, but expected_changes.toml lists it")
    print(f"{len(chosen)} cases against {against}: {differing} differ, {wrong} differences that are not as expected")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """Compare; return 1 if anything differs that is not expected, or if an expected change does not occur."""
    expected = tomllib.loads(EXPECTED.read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", default=expected["base"], help="base (default: %(default)s)")
    parser.add_argument("--cases", metavar="PATTERN", default="*", help="such as 'robust/*' (default: all)")
    parser.add_argument("--smallest", action="store_true", help="only the ten cases that CI runs")
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="new folder that keeps the files of all runs")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="goldens-") as temporary:
        root = (args.keep or Path(temporary) / "work").absolute()
        root.mkdir(parents=True)
        every = cases.all_cases(root / "data")
        names = cases.SMALLEST if args.smallest else fnmatch.filter(every, args.cases)
        if not names:
            parser.error(f"no case matches '{args.cases}'")
        chosen = {name: every[name] for name in names}
        return bool(compare(args.against, chosen, expected.get("change", []), root))


if __name__ == "__main__":
    sys.exit(main())
