"""Mutation tests: put small faults into the methods and the mathematics, and see which the tests do not notice.

    python -m tools.mutants                                          300 faults drawn from all files
    python -m tools.mutants --only strategies/fedgh.py --sample 40   40 of one file
    python -m tools.mutants --page docs/mutants.md                   also write the page: `make mutants`

For each fault only the tests named for its file run (`tests_for`). A fault is killed when one of them fails or runs
out of time. Results are kept as JSON lines and reused as long as the faulty file and its tests stay the same.
Survivors that behave like the original are listed with the reason in `mutants.toml`.

Importing PyTorch and Flower takes longer than most tests. One process therefore imports all libraries and forks a
child for each fault, which imports the faulty file in place of the real one and runs pytest.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import importlib.machinery
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tools.mutate import Mutant, mutants

FOLDERS = (
    "strategies",
    "clients",
    "fedapp/core",
    "fedapp/learning",
    "fedapp/federation",
    "fedapp/privacy",
    "fedapp/reduce",
)
NAMED = {
    "fedapp/core/fourier.py": ["tests/test_random_features.py"],
    "fedapp/reduce/scaling.py": ["tests/test_random_features.py"],
    "strategies/_maths.py": ["tests/test_base.py", "tests/test_flower_loop.py", "tests/test_reduce.py"],
    "strategies/base.py": [
        "tests/test_engine.py",
        "tests/test_cohorts.py",
        "tests/test_flower_loop.py",
        "tests/test_robust.py",
    ],
    "strategies/_composition.py": ["tests/test_ccvr.py", "tests/test_fed3r.py", "tests/test_robust.py"],
    "strategies/_sums.py": [
        "tests/test_fed3r.py",
        "tests/test_secure_sums.py",
        "tests/test_choice.py",
        "tests/test_exact_sums.py",
        "tests/test_totals.py",
        "tests/test_personal_heads.py",
    ],
    "strategies/_shares.py": ["tests/test_pccvr.py", "tests/test_personal_heads.py"],
    "clients/shares.py": ["tests/test_pccvr.py", "tests/test_personal_heads.py"],
    "fedapp/federation/loop.py": ["tests/test_base.py", "tests/test_engine.py", "tests/test_offences.py"],
    "fedapp/federation/context.py": ["tests/test_measure.py", "tests/test_engine.py"],
    "fedapp/federation/releases.py": ["tests/test_private_sums.py"],
    "fedapp/federation/participants.py": [
        "tests/test_base.py",
        "tests/test_engine.py",
        "tests/test_offences.py",
        "tests/test_secure_sums.py",
    ],
    "fedapp/federation/central.py": ["tests/test_engine.py", "tests/test_scores.py"],
    "fedapp/federation/server_model.py": ["tests/test_own_models.py", "tests/test_hostile.py"],
    "fedapp/federation/summary.py": ["tests/test_engine.py", "tests/test_scores.py", "tests/test_private_runs.py"],
    "fedapp/federation/hook.py": ["tests/test_hooks.py", "tests/test_base.py", "tests/test_offences.py"],
    "fedapp/federation/hooks/events.py": ["tests/test_tracking.py", "tests/test_engine.py"],
    "fedapp/federation/hooks/rollback.py": ["tests/test_offences.py"],
    "fedapp/federation/hooks/scores.py": ["tests/test_chosen_round.py", "tests/test_hooks.py", "tests/test_unseen.py"],
    "fedapp/federation/hooks/tables.py": ["tests/test_engine.py", "tests/test_hooks.py", "tests/test_scores.py"],
    "fedapp/federation/hooks/training.py": [
        "tests/test_resume.py",
        "tests/test_hooks.py",
        "tests/test_scores.py",
        "tests/test_private_runs.py",
    ],
    "fedapp/federation/hooks/soundness.py": ["tests/test_offences.py"],
    "strategies/_flower.py": ["tests/test_flower_loop.py", "tests/test_robust.py"],
    "clients/base.py": [
        "tests/test_engine.py",
        "tests/test_training.py",
        "tests/test_phases.py",
        "tests/test_lost_state.py",
        "tests/test_pccvr.py",
        "tests/test_fedproto.py",
        "tests/test_further_metrics.py",
        "tests/test_dp_sgd.py",
        "tests/test_fedbabu.py",
    ],
    "clients/_checks.py": [
        "tests/test_own_models.py",
        "tests/test_given_features.py",
        "tests/test_private_runs.py",
        "tests/test_single_images.py",
    ],
    "clients/_initial.py": ["tests/test_engine.py", "tests/test_base.py"],
    "clients/_models.py": [
        "tests/test_fedrod.py",
        "tests/test_fednh.py",
        "tests/test_ccvr.py",
        "tests/test_fedetf.py",
        "tests/test_feddbe.py",
        "tests/test_fedproto.py",
    ],
    "fedapp/core/names.py": ["tests/test_selection.py"],
    "fedapp/reduce/spec.py": ["tests/test_reduce.py", "tests/test_fedproto.py", "tests/test_scaffold.py"],
    "fedapp/reduce/plain.py": ["tests/test_reduce.py", "tests/test_fedproto.py", "tests/test_ccvr.py"],
    "fedapp/reduce/robust.py": ["tests/test_reduce.py", "tests/test_robust.py"],
    "fedapp/reduce/noised.py": ["tests/test_reduce.py", "tests/test_count_cap.py", "tests/test_private_runs.py"],
    "fedapp/reduce/rules_ccvr.py": ["tests/test_ccvr.py", "tests/test_core_robust.py"],
    "fedapp/reduce/rules_cwfedavg.py": ["tests/test_cwfedavg.py", "tests/test_core_robust.py"],
    "fedapp/reduce/rules_fedgh.py": ["tests/test_core_robust.py", "tests/test_fedtgp.py"],
    "fedapp/reduce/rules_fedghg.py": ["tests/test_fedghg.py"],
    "fedapp/reduce/reader.py": [
        "tests/test_reduce.py",
        "tests/test_scaffold.py",
        "tests/test_count_cap.py",
        "tests/test_fedtgp.py",
        "tests/test_secure_sums.py",
    ],
    "fedapp/privacy/clients.py": ["tests/test_private_runs.py"],
    "fedapp/privacy/statistics.py": ["tests/test_private_runs.py"],
    "fedapp/core/averages.py": ["tests/test_core_robust.py"],
    "fedapp/core/privacy.py": ["tests/test_private_sums.py"],
    "fedapp/core/sums.py": ["tests/test_exact_sums.py", "tests/test_fedcof.py"],
    "fedapp/core/masks.py": ["tests/test_core_secure_sum.py"],
    "fedapp/core/secret_shares.py": ["tests/test_core_secure_sum.py"],
    "fedapp/core/adaptation.py": ["tests/test_pfedfda.py"],
    "fedapp/core/collaboration.py": ["tests/test_fedpac.py"],
    "fedapp/core/mixture.py": ["tests/test_fedghg.py"],
    "fedapp/core/prototypes.py": ["tests/test_fedtgp.py"],
    "clients/_flower.py": ["tests/test_base.py", "tests/test_engine.py"],
    "clients/mutual.py": ["tests/test_fml.py", "tests/test_fedkd.py"],
    "fedapp/learning/evaluation.py": ["tests/test_further_metrics.py"],
    "fedapp/learning/optimizers.py": ["tests/test_training_options.py"],
    "fedapp/learning/releases.py": ["tests/test_dp_sgd.py"],
    "fedapp/learning/training.py": [
        "tests/test_dp_sgd.py",
        "tests/test_training_options.py",
        "tests/test_phases.py",
        "tests/test_single_images.py",
    ],
    "clients/posthoc.py": ["tests/test_fed3r.py", "tests/test_ccvr.py"],
    "clients/sums.py": [
        "tests/test_fed3r.py",
        "tests/test_fedncm.py",
        "tests/test_personal_heads.py",
        "tests/test_exact_sums.py",
    ],
    "fedapp/core/quadratic.py": ["tests/test_qda.py"],
    "clients/classmeans.py": ["tests/test_fedgh.py", "tests/test_fedproto.py", "tests/test_fd.py"],
}
"""Further tests of files that other files' tests exercise."""
TABLES = ("tests/test_defaults.py", "tests/test_aggregation.py", "tests/test_reductions.py")
"""Tests of all methods. Of these only the cases of methods whose own tests run are tried."""
OPTIONS = ["-x", "-q", "-o", "addopts=", "-m", "not slow and not ray and not deploy", "-p", "no:cacheprovider"]
EQUIVALENT = Path(__file__).with_name("mutants.toml")


def tests_for(file: str, root: Path) -> tuple[str, ...]:
    """Return the tests named for a file: `test_core_<x>.py` for the core, else `test_<x>.py`.

    Files of the two sides of methods have the tables as well.
    """
    own = f"tests/test_{'core_' if '/core/' in file else ''}{Path(file).stem}.py"
    found = [*([own] if (root / own).exists() else []), *NAMED.get(file, [])]
    if not found:
        raise FileNotFoundError(f"{file} has no {own}: write one, or name its tests in tools/mutants.py")
    tables = [table for table in TABLES if file.startswith(FOLDERS[:2]) and (root / table).exists()]
    return (*found, *(table for table in tables if table not in found))


def of_methods(item: pytest.Item, tests: Sequence[str]) -> bool:
    """Return whether a case of a table is one of the methods that have a file among `tests`."""
    methods = {Path(test).stem.removeprefix("test_") for test in tests}
    given = item.callspec.params.values() if hasattr(item, "callspec") else ()
    words = {word for value in given if isinstance(value, str) for word in value.split()}
    return not item.nodeid.startswith(TABLES) or not words or not methods.isdisjoint(words)


@dataclass(frozen=True)
class Job:
    """Tests to run, with a fault or (the first time) without one."""

    tests: tuple[str, ...]
    timeout: float
    mutant: Mutant | None = None


class _Watch:
    """Runs the quickest tests first, and records how long each takes and which one failed."""

    def __init__(self, seconds: dict[str, float], tests: Sequence[str]) -> None:
        self.known, self.tests, self.seconds, self.failed = seconds, tests, dict[str, float](), ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if of_methods(item, self.tests)]
        items.sort(key=lambda item: self.known.get(item.nodeid, 0.0))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        self.failed = self.failed or (report.nodeid if report.failed else "")


class _Faulty(importlib.machinery.SourceFileLoader):
    """Imports one file of the project with a fault."""

    def __init__(self, root: Path, mutant: Mutant) -> None:
        self.mutant, self.file = mutant, root / mutant.file
        super().__init__(mutant.file.removesuffix(".py").replace("/", "."), str(self.file))

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        return importlib.util.spec_from_loader(name, self) if name == self.name else None

    def get_code(self, fullname: str) -> Any:
        source = self.mutant.applied(self.file.read_text(encoding="utf-8"))
        return compile(source, str(self.file), "exec", dont_inherit=True)


def _child(root: Path, job: Job, seconds: dict[str, float], folder: Path) -> int:
    """Run a job's tests in this process; write `seconds` and what failed to `found.json`."""
    os.setpgid(0, 0)
    os.chdir(root)
    out = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.path.insert(0, str(root))
    if job.mutant:
        sys.meta_path.insert(0, _Faulty(root, job.mutant))
    watch = _Watch(seconds, job.tests)
    code = int(pytest.main([*OPTIONS, f"--basetemp={folder / 'tmp'}", *job.tests], plugins=[watch]))
    # Only libraries: every child must import the project anew, with its fault.
    modules = {n: getattr(m, "__file__", None) or "" for n, m in list(sys.modules.items())}
    libraries = [n for n, f in modules.items() if "site-packages" in f or f.startswith(os.path.dirname(os.__file__))]
    found = {"failed": watch.failed, "seconds": watch.seconds, "libraries": libraries}
    (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")
    return code


def run(root: Path, jobs: Sequence[Job], seconds: dict[str, float], at_once: int) -> Iterator[tuple[Job, str, Any]]:
    """Fork a child for each job; yield the job, `passed`, `failed` or `timeout`, and what the child found."""
    waiting, running = list(reversed(jobs)), dict[int, tuple[Job, float, Path]]()
    while waiting or running:
        while waiting and len(running) < at_once:
            job, folder = waiting.pop(), Path(tempfile.mkdtemp(prefix="mutant-"))
            sys.stdout.flush()
            if (pid := os.fork()) == 0:
                try:
                    os._exit(_child(root, job, seconds, folder))
                finally:
                    os._exit(99)
            running[pid] = (job, time.monotonic() + job.timeout, folder)
        time.sleep(0.02)
        for pid, (job, deadline, folder) in list(running.items()):
            late = time.monotonic() > deadline
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended and not late:
                continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # with the processes that tests started
            if not ended:
                os.waitpid(pid, 0)
            del running[pid]
            found = folder / "found.json"
            told = json.loads(found.read_text(encoding="utf-8")) if found.exists() else {}
            told["log"] = (folder / "log").read_text(encoding="utf-8", errors="replace")[-2000:]
            shutil.rmtree(folder, ignore_errors=True)
            state = "timeout" if not ended else "passed" if os.waitstatus_to_exitcode(status) == 0 else "failed"
            yield job, state, told


def digest(root: Path, mutant: Mutant, tests: Sequence[str]) -> str:
    """Return a digest of what a result depends on: the faulty file and its tests."""
    source = mutant.applied((root / mutant.file).read_text(encoding="utf-8"))
    texts = [mutant.file, source, *((root / t).read_text(encoding="utf-8") for t in tests)]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def sample(root: Path, files: Sequence[str], number: int, seed: int) -> list[Mutant]:
    """Draw faults from all faults of the files, each equally likely.

    A fault's lot depends only on its own text and the seed, so a change elsewhere does not change the other draws.
    """
    sources = {file: (root / file).read_text(encoding="utf-8") for file in files}
    equal, lots = Counter[str](), dict[Mutant, str]()
    for m in sorted((m for file, source in sources.items() for m in mutants(file, source)), key=lambda m: m.start):
        old = sources[m.file].encode()[m.start : m.end].decode()
        text = "\0".join((str(seed), m.file, m.function, old, m.new))
        # The number among equal faults of a function: without it they would all be drawn together.
        lots[m] = hashlib.sha256(f"{text}\0{equal[text]}".encode()).hexdigest()
        equal[text] += 1
    pool = sorted(lots, key=lots.__getitem__, reverse=True)
    drawn: list[Mutant] = []
    while pool and len(drawn) < number:
        if (mutant := pool.pop()).changes(sources[mutant.file]):
            drawn.append(mutant)
    return sorted(drawn, key=lambda m: (m.file, m.start, m.end, m.new))


def judge(root: Path, drawn: Sequence[Mutant], results: Path, at_once: int) -> list[dict[str, Any]]:
    """Return a record for each fault: from `results` where it is known, otherwise from a run, and appended there."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    known = {record["digest"]: record for record in map(json.loads, lines)}
    tests = {m: tests_for(m.file, root) for m in drawn}
    digests = {m: digest(root, m, tests[m]) for m in drawn}
    new = [m for m in drawn if digests[m] not in known]
    seconds, limits = dict[str, float](), dict[tuple[str, ...], float]()
    first = [Job(t, 1800.0) for t in dict.fromkeys(tests[m] for m in new)]
    broken = ""
    for job, state, told in run(root, first, seconds, at_once):
        if state != "passed":
            broken += f"{' '.join(job.tests)}: {state} without any fault\n{told['log']}\n"
            continue
        seconds |= told["seconds"]
        limits[job.tests] = 30.0 + 5 * sum(told["seconds"].values())
        for name in told["libraries"]:
            if name not in sys.modules and not name.startswith("_hypothesis"):
                with contextlib.suppress(Exception):  # parts of libraries that only their own package can import
                    importlib.import_module(name)
    if broken:
        sys.exit(broken)
    results.parent.mkdir(parents=True, exist_ok=True)
    for job, state, told in run(root, [Job(tests[m], limits[tests[m]], m) for m in new], seconds, at_once):
        assert job.mutant is not None
        source = (root / job.mutant.file).read_text(encoding="utf-8")
        before, after = job.mutant.lines(source)
        record = {
            "digest": digests[job.mutant], "file": job.mutant.file, "function": job.mutant.function,
            "line": source.encode()[: job.mutant.start].count(b"\n") + 1, "before": before, "after": after,
            "result": "survived" if state == "passed" else state, "by": told.get("failed") or told["log"][-300:],
        }  # fmt: skip
        known[record["digest"]] = record
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        print(".x!"[["failed", "survived", "timeout"].index(record["result"])], end="", flush=True)
    print()
    return [known[digests[m]] for m in drawn]


def reasons(path: Path = EQUIVALENT) -> dict[tuple[str, str, str, str], str]:
    """Read the reasons why faults change nothing, by file, function, and the changed lines before and after."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["equivalent"] if path.exists() else []
    return {(e["file"], e["function"], e["before"].strip(), e["after"].strip()): e["reason"] for e in entries}


def page(records: Sequence[dict[str, Any]], command: str) -> str:
    """Write the page: the command, the date, K of N, and the survivors with their reasons."""
    known, survived = reasons(), [r for r in records if r["result"] == "survived"]
    killed = len(records) - len(survived)
    rows = []
    for r in survived:
        reason = known.get((r["file"], r["function"], r["before"], r["after"]), "**not explained yet**")
        before, after = (" ".join(r[k].split()) for k in ("before", "after"))
        rows.append(
            f"- {' '.join(f'`{r[k]}`' for k in ('file', 'function') if r[k])}: {reason}.<br>`{before}`<br>`{after}`"
        )
    return f"""# Mutation tests

A test that cannot fail proves nothing. `make mutants` puts small faults into the product's files, one at a time, and
runs the tests named for the faulty file. A fault that no test notices survives: either the tests miss something, or the
fault makes no difference.

**{killed} of {len(records)} killed** ({killed / max(1, len(records)):.1%}), {len(survived)} survived.
Command: `{command}`. Date: {time.strftime("%Y-%m-%d")}.

The faults change operators, constants, bounds, arguments and return values, or remove statements and calls.
They are drawn with a seed from all possible ones in {", ".join(f"`{folder}`" for folder in FOLDERS)}. A test
that runs out of time counts as killed. The reasons are kept in `tools/mutants.toml`.

{chr(10).join(rows) if survived else "No fault survived."}
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="files or folders, comma-separated")
    parser.add_argument("--sample", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=Path("runs/mutants.jsonl"), help="JSON lines, kept and reused")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="children at a time")
    parser.add_argument("--page", type=Path, help="write the results here as Markdown")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="another project, for tests")
    given = parser.parse_args(argv)
    root = given.root.resolve()
    files = [f.relative_to(root).as_posix() for folder in FOLDERS for f in sorted((root / folder).rglob("*.py"))]
    files = [f for f in files if not f.endswith("__init__.py")]
    if given.only:
        files = [f for f in files if any(f == o or f.startswith(o.rstrip("/") + "/") for o in given.only.split(","))]
    if not files:
        parser.error(f"no file matches '{given.only}'")
    drawn = sample(root, files, given.sample, given.seed)
    records = judge(root, drawn, given.results.resolve(), given.jobs)
    known, survived = reasons(), [r for r in records if r["result"] == "survived"]
    for r in survived:
        why = known.get((r["file"], r["function"], r["before"], r["after"]))
        print(f"\n{r['file']}:{r['line']} {r['function']}" + (f"  (equivalent: {why})" if why else ""))
        print("\n".join([f"  - {b}" for b in r["before"].splitlines()] + [f"  + {a}" for a in r["after"].splitlines()]))
    print(f"\n{len(records) - len(survived)} of {len(records)} killed")
    if given.page:
        chosen = f" --only {given.only}" if given.only else ""
        command = f"python -m tools.mutants --sample {given.sample} --seed {given.seed}{chosen}"
        given.page.write_text(page(records, command), encoding="utf-8")


if __name__ == "__main__":
    main()
