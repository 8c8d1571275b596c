"""Run cases of `tools.goldens` with the package that comes first on PYTHONPATH: `run_cases.py CASES.json FOLDER JOBS`.

A case is a list of steps; a step is the arguments of the command `fedapp`, or `["delete", PATH]`. The command line is
imported once, and each case runs in a process forked from this one, in a folder of its own. So a case costs no start
of Python, and no case sees what another one left in memory. This file imports nothing of the package but its command.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

LONGEST = 300
"""Seconds after which a case is ended."""


def command(arguments: list[str]) -> int:
    """Run the command `fedapp` in this process and return its exit code."""
    from fedapp import cli

    sys.argv = ["fedapp", *arguments]
    try:
        cli.main()
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else int(e.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def run_case(steps: list[list[str]], folder: Path) -> None:
    """Run the steps of a case in `folder`, with its output in `stdout.txt` and `stderr.txt`."""
    signal.alarm(LONGEST)
    folder.mkdir(parents=True)
    os.chdir(folder)
    for number, name in ((1, "stdout.txt"), (2, "stderr.txt")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    for step in steps:
        if step[0] == "delete":
            shutil.rmtree(step[1], ignore_errors=True)
        else:
            with Path("exit_codes.txt").open("a") as file:
                file.write(f"{command(step)}\n")
    Path("ended").touch()


def main(cases: dict[str, list[list[str]]], folder: Path, jobs: int) -> None:
    """Run all cases, `jobs` at a time, each in `folder`/NAME."""
    import_folder = folder / "import"  # a dry run imports most of what a run needs; here no thread may start
    import_folder.mkdir(parents=True)
    os.chdir(import_folder)
    saved = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    command(["run", "--engine", "local", "--dry-run"])
    os.dup2(saved, 1)
    running = 0
    for name, steps in cases.items():
        if running == jobs:
            os.wait()
            running -= 1
        running += 1
        if os.fork() == 0:
            code = 1
            try:
                run_case(steps, folder / name)
                code = 0
            finally:
                os._exit(code)
    for _ in range(running):
        os.wait()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]), int(sys.argv[3]))
