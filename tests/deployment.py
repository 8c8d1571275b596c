"""A SuperLink and SuperNodes on loopback with TLS and node keys, for tests: started, killed and restarted by PID."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
MARK = "FEDAPP_TEST_MARK"
BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(true: Callable[[], object], seconds: float, what: str) -> None:
    """Wait for something; a test that waits in vain says for what."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.1)


class Deployment:
    """One SuperLink and its nodes below a folder.

    Parameters
    ----------
    folder : everything lies here: certs, keys, logs, state, Flower's homes.
    nodes : names of the nodes that get keys.
    """

    def __init__(self, folder: Path, nodes: tuple[str, ...] = ("sn0", "sn1", "sn2")) -> None:
        self.folder = folder
        self.port = free_port()
        self.mark = uuid.uuid4().hex
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self.sh("docker/certs.sh", str(folder / "certs"), "localhost", "127.0.0.1")
        self.sh("docker/keys.sh", str(folder / "keys"), *nodes)
        home = folder / "home-cli"
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "prod"\n[superlink.prod]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{folder}/certs/ca.crt"\n'
        )

    # ---- processes -----------------------------------------------------------------------------------------------

    def env(self, home: str) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("FLWR_", "FEDAPP_"))}
        env["PATH"] = os.pathsep.join([str(BIN), env.get("PATH", os.defpath)])
        env |= {name: "127.0.0.1,localhost" for name in ("NO_PROXY", "no_proxy")}
        (self.folder / home).mkdir(exist_ok=True)
        return env | {
            MARK: self.mark,
            "FLWR_HOME": str(self.folder / home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
            "FEDAPP_CACHE": str(self.folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }

    def start(self, name: str, *command: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**self.env(f"home-{name}"), **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def sh(self, script: str, *arguments: str) -> None:
        subprocess.run([str(ROOT / script), *arguments], check=True, capture_output=True, cwd=self.folder)

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.is_file() else ""

    def superlink(self, *extra: str) -> None:
        certs = self.folder / "certs"
        self.start(
            "superlink", str(BIN / "flower-superlink"),
            "--ssl-ca-certfile", str(certs / "ca.crt"), "--ssl-certfile", str(certs / "server.crt"),
            "--ssl-keyfile", str(certs / "server.key"), "--enable-supernode-auth",
            "--disable-runtime-dependency-installation", "--host", "127.0.0.1", "--port", str(self.port),
            "--database", str(self.folder / "state.db"), *extra,
        )  # fmt: skip
        until(self.healthy, 60, "SuperLink answers /health\n" + self.log("superlink")[-2000:])

    def healthy(self) -> bool:
        context = ssl.create_default_context(cafile=str(self.folder / "certs" / "ca.crt"))
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        with contextlib.suppress(urllib.error.URLError, OSError):
            return bool(opener.open(f"https://127.0.0.1:{self.port}/health", timeout=2).status == 200)
        return False

    def register(self, *names: str) -> None:
        for name in names:
            self.flwr("supernode", "register", str(self.folder / "keys" / f"{name}.pub"), "prod")

    def flwr(self, *arguments: str) -> str:
        done = subprocess.run(
            [str(BIN / "flwr"), *arguments], cwd=self.folder, env=self.env("home-cli"), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def node(
        self, name: str, config: str, ca: Path | None = None, key: str | None = None, restart_after: int | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a SuperNode; with `restart_after` below the script that starts it again."""
        command = str(BIN / "flower-supernode") if restart_after is None else str(ROOT / "docker" / "supernode.sh")
        return self.start(
            name, command,
            "--root-certificates", str(ca or self.folder / "certs" / "ca.crt"),
            "--superlink", f"127.0.0.1:{self.port}", "--port", str(free_port()),
            "--auth-supernode-private-key", str(self.folder / "keys" / (key or name)),
            "--node-config", config,
            env={"FEDAPP_STATE": str(self.folder / f"state-{name}"), "RESTART_AFTER": str(restart_after)},
        )  # fmt: skip

    def online(self, name: str, seconds: float = 60) -> None:
        """Wait until a node that was just started has its id."""
        process = self.processes[name]
        until(
            lambda: process.poll() is not None or "SuperNode ID" in self.log(name),
            seconds, f"{name} is online",
        )  # fmt: skip
        assert process.poll() is None, self.log(name)[-2000:]

    def run(self, *arguments: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        """Call `fedapp`."""
        return subprocess.run(
            [sys.executable, "-m", "fedapp.cli", *arguments],
            cwd=ROOT, env=self.env("home-cli"), capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip

    def begin(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start `fedapp` in the background; its output goes to fedapp.log."""
        return self.start("fedapp", sys.executable, "-m", "fedapp.cli", *arguments,
                          env={"FLWR_HOME": str(self.folder / "home-cli"), "PYTHONPATH": str(ROOT)})  # fmt: skip

    def kill(self, name: str) -> None:
        """Kill one process outright, by its PID."""
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait()

    def family(self) -> list[psutil.Process]:
        """All processes that this deployment started, directly or not."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.uids().real == os.getuid() and process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found

    def close(self) -> None:
        for sign in (signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):
            for process in self.family():
                with contextlib.suppress(psutil.Error):
                    process.send_signal(sign)
            _, alive = psutil.wait_procs(self.family(), timeout=2)
            if not alive and not self.family():
                break
        for started in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(5)
        assert not self.family()


@contextlib.contextmanager
def deployed(folder: Path, **settings: object) -> Iterator[Deployment]:
    """A deployment that leaves no process behind."""
    if shutil.which("openssl") is None or shutil.which("ssh-keygen") is None:
        import pytest

        pytest.skip("openssl and ssh-keygen are needed")
    it = Deployment(folder, **settings)  # type: ignore[arg-type]
    try:
        yield it
    finally:
        it.close()


def told(text: str) -> str:
    """A command as one would type it, for the output of a test."""
    return shlex.join(text.split())
