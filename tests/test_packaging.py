"""The distribution: its metadata, its README on a package index, and an installation beside packages of other names.

The slow tests build wheel and sdist and install the wheel into an empty environment. What it needs (torch and others,
6 GB) is not installed again: a .pth file there names the folder of this environment's libraries. The folder is searched
after the wheel, and an editable installation in it does not count, since only .pth files of the environment itself do.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import tomllib
import types
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import pytest
import yaml
from flwr.cli.build import get_filtered_fab_paths

import fedapp
from fedapp import cli
from fedapp.engines.control import PACKAGES
from hatch_build import ELSEWHERE, published, repository
from tests import deployment
from tests.readme import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_versions_agree() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert PROJECT["version"] == fedapp.__version__ == citation["version"]
    assert PROJECT["license"] == citation["license"]
    assert {"title", "message", "authors", "cff-version"} <= set(citation)


def test_packages_are_marked_as_typed() -> None:
    for name in ("fedapp", "strategies", "clients"):
        assert (ROOT / name / "py.typed").is_file()
    assert "Typing :: Typed" in PROJECT["classifiers"]


def test_every_extra_is_described() -> None:
    page = (ROOT / "docs" / "installing.md").read_text(encoding="utf-8")
    assert set(PROJECT["optional-dependencies"]) <= set(re.findall(r"`(\w+)`", page))


def test_the_readme_of_an_index_has_absolute_links_or_none() -> None:
    text = "# T\n\n[a](docs/a.md#x) ![b](p.png) [c](https://x.org)\n\n```python\nd[0](e)\n```\n"
    there = published(text, "https://example.org/o/fedapp")
    assert there == (
        "# T\n\n[a](https://example.org/o/fedapp/blob/HEAD/docs/a.md#x) "
        "![b](https://example.org/o/fedapp/raw/HEAD/p.png) [c](https://x.org)\n\n```python\nd[0](e)\n```\n"
    )
    assert published(text, "") == f"# T\n\n{ELSEWHERE}\n\na b [c](https://x.org)\n\n```python\nd[0](e)\n```\n"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for address in ("", "https://example.org/o/fedapp"):
        assert all(t.startswith("https://") for t in re.findall(r"\]\(([^()\s]+)\)", published(readme, address)))


@pytest.mark.parametrize("bad", ["http://x.org/a", "https://me:secret@x.org/a/b", "https://x.org", "git@x.org:a/b"])
def test_an_address_with_a_password_or_of_another_form_is_refused(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDAPP_REPOSITORY", bad)
    with pytest.raises(ValueError, match="must be of the form"):
        repository()


def test_a_package_of_the_same_name_that_was_imported_first_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    other = types.ModuleType("clients")
    other.__path__ = ["/elsewhere/clients"]
    monkeypatch.setitem(sys.modules, "clients", other)
    with pytest.raises(ImportError, match=r"/elsewhere/clients of the same name was imported first: rename"):
        fedapp._take_own("clients")


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder that has packages `clients` and `strategies` of its own."""
    for name in ("clients", "strategies"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise RuntimeError('the {name} of the folder')\n")
    return tmp_path


def test_packages_of_the_folder_do_not_stand_in_the_way(foreign: Path) -> None:
    code = "import fedapp, clients, strategies; print(clients.__file__, strategies.__file__)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(["", str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=foreign, env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == [str(ROOT / n / "__init__.py") for n in ("clients", "strategies")], done.stderr


@dataclass
class Installed:
    """The wheel in an environment of its own, below `folder`."""

    folder: Path

    @property
    def bin(self) -> Path:
        return self.folder / "env" / "bin"

    def __call__(self, where: Path, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment in a folder; it must succeed."""
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"FEDAPP_CACHE": str(self.folder / "cache")}
        done = subprocess.run(
            [self.bin / command[0], *command[1:]], cwd=where, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done


@pytest.fixture(scope="module")
def dists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with wheel and sdist."""
    folder = tmp_path_factory.mktemp("dists")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def installed(dists: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    it = Installed(tmp_path_factory.mktemp("installed"))
    venv.create(it.folder / "env", with_pip=True)
    (wheel,) = dists.glob("*.whl")
    it(it.folder, "python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    packages = it.folder / "env" / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (packages / "heavy.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # Commands of Flower and Ray start with this environment's interpreter.
    for library in ("flwr", "ray"):
        for entry in distribution(library).entry_points.select(group="console_scripts"):
            script = (
                f"#!{it.bin}/python\nimport sys\nfrom {entry.module} import {entry.attr}\nsys.exit({entry.attr}())\n"
            )
            (it.bin / entry.name).write_text(script)
            (it.bin / entry.name).chmod(0o755)
    yield it


RUN = ("fedapp", "run", "--method", "fedavg", "--clients", "3", "--rounds", "1")


@pytest.mark.slow
def test_wheel_and_sdist_hold_what_they_should(dists: Path, tmp_path: Path) -> None:
    (wheel,), (sdist,) = dists.glob("*.whl"), dists.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    assert {n.partition("/")[0] for n in names} == {
        "fedapp",
        "strategies",
        "clients",
        f"fedapp-{fedapp.__version__}.dist-info",
    }
    assert {
        "fedapp/_pyproject.toml",
        "fedapp/py.typed",
        "fedapp/conf/digits.toml",
        "fedapp/results/report.html.jinja",
    } <= set(names)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    for name in ("docs/scores.md", "tests/test_packaging.py", "LICENSE", "CITATION.cff", "hatch_build.py"):
        assert (source / name).is_file(), name
    # A wheel that is built from the sdist is the same.
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel"], cwd=source, check=True, capture_output=True
    )
    (again,) = (source / "dist").glob("*.whl")
    ours, theirs = zipfile.ZipFile(wheel), zipfile.ZipFile(again)
    assert {n: ours.read(n) for n in names} == {n: theirs.read(n) for n in theirs.namelist()}


@pytest.mark.parametrize(
    ("command", "instead"), [("figure ccvr-8 RUN --out F", "figure"), ("reproduce --from X", "claim")]
)
def test_the_command_says_in_one_line_where_figures_and_claims_are(
    command: str, instead: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fedapp", *command.split()])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(f"needs a clone of the repository: python -m reproduction {instead}")


def test_neither_wheel_nor_bundle_holds_more_than_the_packages() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    assert tool["hatch"]["build"]["targets"]["wheel"]["packages"] == list(PACKAGES)
    files: dict[str, bytes | Path] = {
        str(path.relative_to(ROOT)): path
        for folder in (*PACKAGES, "reproduction", "tests")
        for path in (ROOT / folder).rglob("*.py")
    }
    files |= {name: ROOT / name for name in ("LICENSE", "fedapp/conf/digits.toml", "reproduction/ledger/claims.toml")}
    assert {name.partition("/")[0] for name in get_filtered_fab_paths(files, {"tool": tool})} == {*PACKAGES, "LICENSE"}


@pytest.mark.slow
def test_it_runs_in_an_empty_folder(installed: Installed, tmp_path: Path) -> None:
    where = installed(tmp_path, "python", "-c", "import fedapp, clients; print(fedapp.__file__, clients.__file__)")
    assert all(p.startswith(str(installed.folder)) for p in where.stdout.split())
    assert "fedclassavg" in installed(tmp_path, "fedapp", "methods").stdout
    assert "python -m reproduction figure" in installed(tmp_path, "fedapp", "figure", "--help").stdout
    installed(tmp_path, *RUN, "--engine", "local", "--out", "run")
    installed(tmp_path, "fedapp", "report", "run")
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


@pytest.mark.slow
def test_it_runs_in_a_folder_with_packages_of_the_same_names(installed: Installed, foreign: Path) -> None:
    """The command, `python -m`, a script of one's own, processes of a comparison, workers of Ray."""
    assert "fedclassavg" in installed(foreign, "python", "-m", "fedapp.cli", "methods").stdout
    (foreign / "own.py").write_text(
        textwrap.dedent("""
            from fedapp import run

            if __name__ == "__main__":
                print(run(method="fedavg", clients=3, rounds=1, out="own").summary["ok"])
        """)
    )
    assert installed(foreign, "python", "own.py").stdout.splitlines()[-1] == "True"
    compare = ("--methods", "local,fedavg", "--clients", "3", "--rounds", "1", "--seeds", "1",
               "--workers", "2", "--out", "compared")  # fmt: skip
    installed(foreign, "fedapp", "compare", *compare)
    installed(foreign, "python", "-m", "fedapp.cli", *RUN[1:], "--engine", "ray", "--out", "ray")
    tables = [(foreign / name / "rounds.csv").read_text().splitlines()[0] for name in ("own", "ray")]
    assert tables[0] == tables[1]


@pytest.mark.slow
def test_real_nodes_start_in_a_folder_with_packages_of_the_same_names(
    installed: Installed, foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SuperLink and SuperNodes have this folder as their working directory, and as PYTHONPATH."""
    monkeypatch.setattr(deployment, "BIN", installed.bin)
    monkeypatch.setenv("PYTHONPATH", "")
    nodes = ("supernode-0", "supernode-1")
    with deployment.deployed(foreign, nodes=nodes) as it:
        monkeypatch.setenv("PYTHONPATH", str(foreign))
        it.up(*nodes)
        command = [
            installed.bin / "fedapp",
            "run",
            "--engine",
            "deploy",
            "--superlink",
            "superlink",
            "--method",
            "fedavg",
        ]
        command += ["--clients", "2", "--rounds", "1", "--out", str(foreign / "out")]
        done = subprocess.run(
            command, cwd=foreign, env=it.env("superlink"), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads((foreign / "out" / "summary.json").read_text())["ok"] is True
