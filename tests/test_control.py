"""Flower from outside: the staged app, the API that starts and follows a run; without a SuperLink."""

from __future__ import annotations

import hashlib
import io
import threading
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from flwr.common.serde import user_config_from_proto
from flwr.proto.control_pb2 import StartRunResponse

from fedapp.config import from_flat
from fedapp.engines import control, deploy
from fedapp.engines.control import Control, LaunchError
from fedapp.errors import BadRequest


def test_stage_holds_the_app_and_nothing_else(tmp_path: Path) -> None:
    app = control.stage(tmp_path / "app")
    assert {path.name for path in app.iterdir()} == {"fedapp", "strategies", "clients", "pyproject.toml"}
    source = Path(control.__file__).parents[1]
    assert (app / "fedapp" / "engines" / "control.py").read_bytes() == Path(control.__file__).read_bytes()
    staged = {path.relative_to(app / "fedapp") for path in (app / "fedapp").rglob("*.py")}
    assert staged == {path.relative_to(source) for path in source.rglob("*.py")}
    suffixes = {path.suffix for path in app.rglob("*") if path.is_file()}
    assert suffixes <= {".py", ".toml", ".md", ".yaml", ".yml", ".json"}
    project = tomllib.loads((app / "pyproject.toml").read_text())
    assert project["project"]["name"] == "fedapp"
    assert project["tool"]["flwr"]["app"]["components"]["serverapp"] == "fedapp.server_app:app"


def fake_installation(home: Path) -> Path:
    for name in control.PACKAGES:
        (home / name / "__pycache__").mkdir(parents=True)
        (home / name / "__init__.py").write_text(f"NAME = '{name}'\n")
        (home / name / "__pycache__" / "x.pyc").touch()
        (home / name / "weights.npz").touch()
    return home


APP_TABLE = '[project]\nname = "fedapp"\n[tool.flwr.app]\nfab-exclude = ["tests/**"]\npublisher = "fedapp"\n'


@pytest.mark.parametrize("place", ["pyproject.toml", "fedapp/_pyproject.toml"])
def test_stage_takes_the_project_file_beside_the_packages_or_the_wheels(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = fake_installation(tmp_path / "site")
    (home / place).write_text(APP_TABLE)
    monkeypatch.setattr(control, "_package_folder", lambda name: home / name)
    app = control.stage(tmp_path / "app")
    names = sorted(str(path.relative_to(app)) for path in app.rglob("*") if path.is_file())
    assert names == ["clients/__init__.py", "fedapp/__init__.py", "pyproject.toml", "strategies/__init__.py"]
    # A pattern that matches nothing in the copy would make Flower refuse it.
    assert tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"] == {"publisher": "fedapp"}


def test_stage_says_in_one_line_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = fake_installation(tmp_path / "site")
    (home / "pyproject.toml").write_text('[project]\nname = "another"\n')
    monkeypatch.setattr(control, "_package_folder", lambda name: home / name)
    with pytest.raises(BadRequest, match=r"project file is missing.*pip install") as caught:
        control.stage(tmp_path / "app")
    assert "\n" not in str(caught.value)


def test_a_missing_package_is_named() -> None:
    with pytest.raises(BadRequest, match="'no_such_package' is not installed"):
        control._package_folder("no_such_package")


def test_a_missing_command_is_one_clear_line() -> None:
    with pytest.raises(LaunchError, match=r"'flower-nothing' is not installed .*flwr\[simulation\]"):
        control.executable("flower-nothing", "")


def small_app(folder: Path) -> Path:
    """Write an app that Flower bundles."""
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "toy"\nversion = "1"\n[tool.flwr.app]\npublisher = "x"\n'
        '[tool.flwr.app.components]\nserverapp = "toy:app"\nclientapp = "toy:app"\n'
    )
    (folder / "toy.py").write_text("app = 1\n")
    return folder


def test_a_run_is_started_with_its_bundle_and_configuration(tmp_path: Path) -> None:
    asked: list[Any] = []

    def start(request: Any) -> Any:
        asked.append(request)
        return StartRunResponse(run_id=12345)

    connection = Control(lambda: SimpleNamespace(StartRun=start), federation="@me/here")
    values = {"a.b": "x 'y'", "lr": 0.5, "n": 3, "on": True}
    app = small_app(tmp_path / "app")
    assert connection.start(app, values, {"num-supernodes": 2, "client-resources-num-gpus": 0.5}) == 12345
    [request] = asked
    assert user_config_from_proto(request.override_config) == values and request.federation == "@me/here"
    assert request.override_federation_config.num_supernodes == 2
    assert request.override_federation_config.client_resources_num_gpus == 0.5
    assert hashlib.sha256(request.fab.content).hexdigest() == request.fab.hash_str
    with zipfile.ZipFile(io.BytesIO(request.fab.content)) as bundle:
        assert {"pyproject.toml", "toy.py"} <= set(bundle.namelist())
    connection.start(app, values)
    assert not asked[1].HasField("override_federation_config"), "real nodes have no such settings"


def refusal(status: int, text: str) -> Callable[[Any], Any]:
    """Return a call that Flower answers with an HTTP error."""

    def fails(request: Any) -> Any:
        raise httpx.HTTPStatusError(
            "bad", request=httpx.Request("POST", "http://x"), response=httpx.Response(status, text=text)
        )

    return fails


def unreachable(request: Any) -> Any:
    raise httpx.ConnectError("no route")


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (refusal(400, '{"detail": "[code: 15] Invalid run configuration: x"}'), BadRequest, "Flower: .*code: 15"),
        (refusal(500, '{"detail": "broken"}'), LaunchError, "Flower: broken"),
        (refusal(401, ""), LaunchError, "Authentication failed"),
        (unreachable, LaunchError, "Flower: .*"),
        (lambda request: StartRunResponse(note="no room"), LaunchError, "did not start no room"),
    ],
)
def test_what_flower_does_not_take_is_an_error_with_its_message(
    call: Callable[[Any], Any], kind: type[Exception], says: str, tmp_path: Path
) -> None:
    with pytest.raises((BadRequest, LaunchError), match=says) as caught:
        Control(lambda: SimpleNamespace(StartRun=call)).start(small_app(tmp_path / "app"), {})
    assert caught.type is kind


def api(**calls: Any) -> Control:
    return Control(lambda: SimpleNamespace(close=lambda: None, **calls))


class Impatient(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


def test_a_broken_log_is_resumed_where_it_broke() -> None:
    since: list[float] = []

    def stream(request: Any) -> Any:
        since.append(request.after_timestamp)
        yield SimpleNamespace(log_output=f"piece {len(since)}", latest_timestamp=10.0 * len(since))
        if len(since) < 3:
            raise ConnectionError("gone")

    taken: list[str] = []
    reader = api(StreamLogs=stream).read_log(1, taken.append, Impatient())
    reader.join(10)
    assert taken == ["piece 1", "piece 2", "piece 3"] and since == [0.0, 10.0, 20.0]


def test_a_superlink_that_does_not_answer_is_unknown_and_stops_nothing() -> None:
    def refuse(request: Any) -> Any:
        raise ConnectionError("nobody there")

    silent = api(ListRuns=refuse, StopRun=refuse)
    assert silent.status(1) == ("unknown", "ConnectionError: nobody there")
    silent.stop(1)
    run = SimpleNamespace(status=SimpleNamespace(status="finished", sub_status="failed", details="why"))
    assert api(ListRuns=lambda request: SimpleNamespace(run_dict={1: run})).status(1) == ("finished:failed", "why")


def test_the_copy_of_a_remote_run_has_each_round_once(tmp_path: Path) -> None:
    copy = deploy.DirectoryCopy(tmp_path, from_flat({}), "/there")

    def finished(server_round: int, accuracy: float) -> None:
        copy.event({"kind": "round", "rounds": 3, "time": 1.5, "round": server_round, "trained_accuracy": accuracy})

    def rounds() -> str:
        return (tmp_path / "rounds.csv").read_text()

    copy.event({"kind": "start", "done": 0})
    for server_round, accuracy in ((1, 0.1), (2, 0.30000000000000004), (3, float("nan"))):
        finished(server_round, accuracy)
    assert rounds() == "round,trained_accuracy\n1,0.1\n2,0.30000000000000004\n3,\n"
    copy.event({"kind": "start", "done": 1})  # resumed after round 1
    assert rounds() == "round,trained_accuracy\n1,0.1\n"
    finished(2, 0.5)
    finished(2, 0.75)  # the log was read again
    assert rounds() == "round,trained_accuracy\n1,0.1\n2,0.75\n"
    copy.event({"kind": "start", "done": 0})
    finished(1, 1.0)
    assert rounds() == "round,trained_accuracy\n1,1\n"
    assert len((tmp_path / "progress.jsonl").read_text().splitlines()) == 9
