"""`fedapp deploy check` row by row, without a SuperLink; tests that use a port are marked `deploy`."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedapp.cli import app
from fedapp.deployment import deploy_check as deploycheck
from fedapp.deployment.deploy_check import FAIL, OK, WARN, Finding, unnamed
from fedapp.engines import control
from fedapp.errors import BadRequest
from fedapp.transport import roster
from tests.deployment import free_port


def rows(found: list[Finding]) -> dict[str, Finding]:
    return {f.name: f for f in found}


@pytest.mark.parametrize(
    ("ahead", "state"), [(0.4, OK), (-1.9, OK), (3.0, WARN), (-100.0, WARN), (5.1, FAIL), (-301.0, FAIL)]
)
def test_a_clock_that_is_ahead_is_worse_than_one_behind(ahead: float, state: str) -> None:
    found = deploycheck._clock(ahead)
    assert found.state == state and ("synchronise" in found.remedy) == (state != OK)


@pytest.mark.parametrize(
    ("config", "state", "says"),
    [
        ("partition-id=0 num-partitions=3", OK, "client 0, share of 3"),
        ("client-id=3", FAIL, "data-path missing"),
        ("client-id=3 data-path=/data", FAIL, "quotation marks"),
        ("client-idd=3", FAIL, "did you mean 'client-id'"),
    ],
)
def test_node_config(config: str, state: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDAPP_STATE", str(tmp_path))
    found = rows(deploycheck.check(node_config=config))["node-config"]
    assert found.state == state and says in found.found


def test_data_model_and_state_of_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.zeros((8, 8, 8), np.uint8)
    np.savez(tmp_path / "a.npz", x_train=x, y_train=np.arange(8) % 2, class_names=np.array(["cat", "dog"]))
    monkeypatch.setenv("FEDAPP_STATE", str(tmp_path / "state"))
    config = f"client-id=1 data-path='{tmp_path}/a.npz' model='digits-b'"
    good = rows(deploycheck.check(node_config=config, values={"dataset": "npz", "class-names": "cat,cow,dog"}))
    assert "6 rows to train, 2 to test, images of 8x8 pixels with 1 channel, 2 of 3 classes" in good["data"].found
    assert good["model"].found == "digits-b" and good["disk"].state == OK
    bad = rows(deploycheck.check(node_config=config, values={"dataset": "npz", "class-names": "cat,cow"}))
    assert bad["data and model"].state == FAIL and "'dog'" in bad["data and model"].found
    big = rows(deploycheck.check(node_config=config.replace("digits-b", "resnet18"), values={"dataset": "npz"}))
    assert big["data and model"].state == FAIL and "resnet18" in big["data and model"].found
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDAPP_STATE", str(tmp_path / "file" / "x"))
    assert rows(deploycheck.check(node_config=config, values={"dataset": "npz"}))["state"].state == FAIL


def test_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    monkeypatch.setenv("FLWR_DISABLE_UPDATE_CHECK", "1")
    monkeypatch.setenv("FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION", "1")
    found = rows(deploycheck.check())["switches"]
    assert found.state == WARN and found.remedy == "export FLWR_TELEMETRY_ENABLED=0"
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    assert rows(deploycheck.check())["switches"].state == OK


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("nowhere", "not of the form HOST:PORT"),
        ("no-such-host.invalid:8000", "unknown host name"),
        ("127.0.0.1:FREE", "refuses connections"),
    ],
)
def test_what_cannot_be_reached(address: str, says: str) -> None:
    found = rows(deploycheck.check(unnamed(address.replace("FREE", str(free_port())))))["reachability"]
    assert found.state == FAIL and says in found.found and found.remedy


@pytest.fixture
def plain() -> Iterator[str]:
    """A plain HTTP server that answers /health."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_plain_http_must_be_asked_for(plain: str) -> None:
    found = rows(deploycheck.check(unnamed(plain)))
    assert found["TLS"].state == FAIL and "does not speak TLS" in found["TLS"].found
    found = rows(deploycheck.check(unnamed(plain, insecure=True)))
    assert found["TLS"].state == WARN and found["reachability"].state == OK and found["clock"].state == OK


def test_keys_and_certificates_that_are_not(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("junk")
    to = unnamed("", tmp_path / "no")
    found = rows(deploycheck.check(to, key=tmp_path / "x", certificate=tmp_path / "x"))
    assert "not a private key" in found["key"].found and "not a PEM certificate" in found["server certificate"].found
    assert "No such file" in found["CA certificate"].found
    assert {f.state for f in (found["key"], found["server certificate"], found["CA certificate"])} == {FAIL}


def test_the_roster_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Api:
        def __enter__(self) -> Api:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def nodes(self) -> list[tuple[int, str]]:
            return [(7, "online"), (8, "offline")]

    monkeypatch.setattr(control.Control, "of_connection", lambda connection: Api())

    def looked(path: Path | None) -> Finding:
        return rows(list(deploycheck._registered(None, path)))["roster"]

    path = tmp_path / "roster.toml"
    assert looked(None).state == "warn" and "--roster FILE" in looked(None).remedy
    assert looked(path).state == "fail" and "cannot be read" in looked(path).found
    roster.add(path, roster.Admitted(0, 7, "ab"))
    assert looked(path).state == "warn" and "registered and not admitted: 8" in looked(path).found
    roster.add(path, roster.Admitted(1, 8, "cd"))
    assert looked(path).state == "ok" and "2 clients admitted" in looked(path).found


def test_the_command_and_its_exit_codes(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["deploy", "check"])
    assert done.exit_code == 0 and done.output.splitlines()[0].startswith("ok\tversions\tfedapp")
    assert CliRunner().invoke(app, ["deploy", "check", "--key", str(tmp_path / "no")]).exit_code == 1
    for clash in (["--superlink", "a", "--address", "b:1"], ["--insecure", "--root-certificates", "x"]):
        assert isinstance(CliRunner().invoke(app, ["deploy", "check", *clash]).exception, BadRequest)
