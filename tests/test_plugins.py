"""Packages that add methods, models and data sets by entry points: found, refused in one line, and not on nodes."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from fedapp import cli, plugins, registry
from fedapp.config import from_flat
from fedapp.data import datasets
from fedapp.engines.local import run
from fedapp.errors import BadRequest
from fedapp.models import build_model, head_width
from fedapp.results.loading import load
from fedapp.tasks import simulated
from fedapp.tasks.node import Node

METHOD = """
from clients.base import FedClient
from fedapp.method import Method
from strategies.base import Strategy

METHOD = Method(id="plain", title="Plain", paper="nobody, 2026", strategy=Strategy, client=FedClient)
"""
NETS = """
from torch import nn

def build(num_classes, input_shape, hidden=16):
    size = 1
    for n in input_shape:
        size *= n
    return nn.Sequential(nn.Flatten(), nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))
"""
DATA = """
import numpy as np

def load(data_dir):
    rng = np.random.default_rng(0)
    y = np.repeat([0, 1], 60)
    x = rng.normal(size=(120, 5)) + y[:, None]
    return {"x": x.astype(np.float32), "y": y, "client": np.tile([0, 1, 2], 40)}
"""
GOOD = {
    "methods": {"plain": "addon.method:METHOD"},
    "models": {"tiny": "addon.nets:build"},
    "datasets": {"site": "addon.data:load"},
}
Install = Callable[..., None]


def _forget() -> None:
    importlib.invalidate_caches()
    plugins._read.cache_clear()
    registry.forget()
    for name in [n for n in sys.modules if n.partition(".")[0] in ("addon", "other")]:
        del sys.modules[name]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Lay a package out as pip does, with its modules and its entry points."""
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(str(site))

    def put(package: str = "addon", points: dict[str, dict[str, str]] = GOOD, **modules: str) -> None:
        folder, info = site / package, site / f"{package}-1.2.dist-info"
        folder.mkdir(parents=True)
        info.mkdir()
        for name, text in {"__init__": "", "method": METHOD, "nets": NETS, "data": DATA, **modules}.items():
            (folder / f"{name}.py").write_text(text)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(
            "".join(
                f"[fedapp.{group}]\n" + "".join(f"{n} = {target}\n" for n, target in found.items())
                for group, found in points.items()
            )
        )
        _forget()

    yield put
    _forget()


def go(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["fedapp", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_a_package_adds_a_method_a_model_and_a_data_set(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install()
    assert list(registry.discover()) == [*registry.ORDER, "plain"] and registry.broken() == {}
    code, out, err = go(monkeypatch, capsys, "methods")
    assert code == 0 and out.splitlines()[-1].startswith("plain\tPlain\t") and not err
    assert head_width("tiny", 2, (5,)) == 16
    result = run(
        method="plain", model="tiny", model_args="hidden=7", dataset="site", rounds=1, local_epochs=1,
        out=tmp_path / "run",
    )  # fmt: skip
    assert len(result.final) == 3 and result.summary["bytes_up"] == 4 * (5 * 7 + 7 + 7 * 2 + 2)
    net = load(tmp_path / "run", client=1)
    assert net.model.width == 7 and net.predict(np.zeros((2, 5), np.float32)).shape == (2, 2)


def test_a_data_set_is_read_once_for_each_version_of_its_code(install: Install, tmp_path: Path) -> None:
    install()
    first = datasets.load("site")
    assert (first.kind, first.num_classes, first.owner_names) == ("table", 2, ("0", "1", "2"))
    file = tmp_path / "site" / "addon" / "data.py"
    # Of another length: Python takes a compiled file of the same second and length for the same code.
    file.write_text(file.read_text().replace("size=(120, 5)", "size=(120, 16)"))
    _forget()
    assert datasets.load("site").shape == (16,)


@pytest.mark.parametrize(
    ("points", "modules", "said"),
    [
        (
            GOOD,
            {"method": "import a_package_that_nobody_has\n"},
            "the method 'plain' of the package addon 1.2 cannot be",
        ),
        (GOOD, {"method": "raise SystemExit(3)\n"}, "the method 'plain' of the package addon 1.2 cannot be imported"),
        (GOOD, {"method": "METHOD = 3\n"}, "addon.method:METHOD is not METHOD = Method"),
        ({"methods": {"dull": "addon.method:METHOD"}}, {}, "METHOD.id = 'plain', it must be the entry point's name"),
        ({"methods": {"plain": "addon.method"}}, {}, "'addon.method' is not package.module:attribute"),
        ({"methods": {"pl ain": "addon.method:METHOD"}}, {}, "a name has letters, digits"),
        ({"methods": {"fedavg": "addon.method:METHOD"}}, {}, "fedapp has one of this name, rename it"),
    ],
)
def test_a_wrong_package_is_one_line(
    points: dict[str, dict[str, str]], modules: dict[str, str], said: str, install: Install,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    install(points=points, **modules)
    code, out, err = go(monkeypatch, capsys, "methods")
    assert code == 0 and [line.split("\t")[0] for line in out.splitlines()] == ["id", *registry.ORDER]
    assert len(err.splitlines()) == 1 and said in err and "addon 1.2" in err
    name = next(iter(points["methods"]))
    if name == "fedavg":
        assert registry.get(name).paper != "nobody, 2026"
    else:
        with pytest.raises(BadRequest, match=r"no method .*addon 1\.2"):
            from_flat({"method": name})


@pytest.mark.parametrize(("group", "key"), [("methods", "method"), ("models", "model"), ("datasets", "dataset")])
def test_two_packages_of_one_name_are_refused(group: str, key: str, install: Install) -> None:
    install(points={group: {"same": GOOD[group][next(iter(GOOD[group]))]}})
    install("other", points={group: {"same": "other.nets:build"}})
    with pytest.raises(BadRequest, match=r"'same'.* is in the packages addon 1\.2 and other 1\.2: uninstall one"):
        from_flat({key: "same"})
    assert "addon" not in sys.modules and "other" not in sys.modules


@pytest.mark.parametrize(("key", "name"), [("model", "cnn"), ("dataset", "digits")])
def test_the_names_of_fedapp_cannot_be_taken(key: str, name: str, install: Install) -> None:
    install(points={f"{key}s": {name: "addon.nets:build"}})
    known = from_flat({"method": "fedavg", key: name})
    assert simulated.check(known.replaced(dataset="digits", model="digits-a"), 3)
    if key == "model":
        assert build_model("cnn", num_classes=3, shape=(1, 28, 28), seed=0).width == 512
    assert "addon" not in sys.modules


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return 3", r"cannot be read \(TypeError.*it returns a dict of columns"),
        ("raise OSError('no disk')", r"addon 1\.2 cannot be read \(OSError: no disk \(.*, line [0-9]+, in "),
        ("return {'x': [[1.0]]}", "the data set 'site' of the package addon 1.2"),
        ("return {'x': [[1, 2], [3]], 'y': [0, 1]}", r"addon 1\.2 cannot be read \(ValueError"),
        ("raise SystemExit(3)", r"addon 1\.2 cannot be read \(SystemExit: 3"),
    ],
)
def test_a_wrong_data_set_is_refused(body: str, said: str, install: Install) -> None:
    install(data=f"def load(data_dir):\n    {body}\n")
    with pytest.raises(BadRequest, match=said):
        datasets.load("site")


def test_unknown_names_list_those_of_packages(install: Install) -> None:
    install()
    for key, said in (("model", "did you mean 'tiny'"), ("dataset", "site"), ("method", "did you mean 'plain'")):
        with pytest.raises(BadRequest, match=said):
            from_flat({key: {"model": "tinny", "dataset": "sight", "method": "plian"}[key]})


def test_a_node_imports_only_packages_that_its_owner_allows(install: Install) -> None:
    install()
    own = {"client-id": 0, "data-path": "/data"}
    with plugins.only(""):
        for settings in ({"method": "plain"}, {"dataset": "site", "method": "fedavg"}):
            with pytest.raises(BadRequest, match=r"code that is not imported here.*allow 'addon"):
                datasets.load(from_flat(settings).data.dataset)
        named = from_flat({"model": "tiny", "method": "fedavg"})
        with pytest.raises(BadRequest, match=r"allow='addon\.nets:build'"):
            Node.parse(own).check(named)
        with pytest.raises(BadRequest, match="not imported here"):
            build_model("tiny", num_classes=2, shape=(5,), seed=0)
        assert "addon" not in sys.modules
    with plugins.only("addon.*"):
        assert from_flat({"method": "plain"}).federation.method == "plain" and datasets.load("site").num_classes == 2
        Node.parse({**own, "allow": "addon.*"}).check(named)
        assert build_model("tiny", num_classes=2, shape=(5,), seed=0).width == 16


@pytest.mark.full
def test_the_client_app_imports_no_package_before_it_knows_the_node(install: Install, tmp_path: Path) -> None:
    install(method="raise RuntimeError('imported')")
    code = "import sys, fedapp.client_app; sys.exit('addon' in sys.modules)"
    paths = os.pathsep.join([str(tmp_path / "site"), *sys.path])
    assert not subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}).returncode
