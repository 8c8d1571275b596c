"""The services of docker/compose.yml without containers: the same commands, on loopback, with paths of this machine.

Certificates and keys come from docker/certs.sh and docker/keys.sh, the environment from the image's ENV lines.
Processes are started, killed and restarted by PID.
"""

from __future__ import annotations

import contextlib
import os
import re
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
from typing import Any, TypeVar

import psutil
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.supernode.fleet_http_connection import http_request_response

ROOT = Path(__file__).parent.parent
MARK = "FEDAPP_TEST_MARK"
BIN = Path(sys.executable).parent
NODES = ("supernode-0", "supernode-1", "supernode-2")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


COMPOSE = yaml.safe_load((ROOT / "docker" / "compose.yml").read_text(encoding="utf-8"))


def image_env() -> dict[str, str]:
    """The ENV lines of docker/Dockerfile."""
    text = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.removeprefix("ENV ") for line in text.splitlines() if line.startswith("ENV ")]
    return dict(pair.split("=", 1) for line in lines for pair in line.split())


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

    def __init__(self, folder: Path, nodes: tuple[str, ...] = NODES) -> None:
        self.folder = folder
        self.port, self.private = free_port(), free_port()
        self.mark = uuid.uuid4().hex
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self.sh("docker/certs.sh", str(folder / "certs"), "localhost", "127.0.0.1", "superlink")
        self.sh("docker/keys.sh", str(folder / "keys"), *nodes)
        self.env("superlink")
        connection = (ROOT / "docker" / "connection.toml").read_text(encoding="utf-8")
        (folder / "vol-superlink" / "flwr" / "config.toml").write_text(self.here(connection, "superlink"))

    # ---- processes -----------------------------------------------------------------------------------------------

    def env(self, name: str) -> dict[str, str]:
        """The image's environment, with the volume of a service in a folder of this machine."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("FLWR_", "FEDAPP_", "PYTHONDONTWRITE"))}
        env["PATH"] = os.pathsep.join([str(ROOT / "docker"), str(BIN), env.get("PATH", os.defpath)])
        env |= dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
        env |= {k: self.here(v, name) for k, v in image_env().items() if k != "XDG_CACHE_HOME"}
        volume = self.folder / f"vol-{name}"
        (volume / "flwr").mkdir(parents=True, exist_ok=True)
        # The decoded data sets are the same for all: one cache saves time.
        return env | {MARK: self.mark, "FEDAPP_CACHE": str(self.folder / "cache"), "OMP_NUM_THREADS": "1"}

    def here(self, text: str, name: str) -> str:
        """What a word of a container's command or environment is on this machine."""
        text = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", text)
        text = text.replace("/run/secrets/supernode", f"{self.folder}/keys/supernode")
        text = text.replace("/run/secrets", f"{self.folder}/certs").replace(
            "/var/lib/fedapp", f"{self.folder}/vol-{name}"
        )
        text = text.replace("'/data'", f"'{self.folder}/sites/{name.replace('supernode-', 'site')}'")
        return self.addresses(text)

    def addresses(self, text: str) -> str:
        """All on loopback, with ports that are free."""
        text = re.sub(r"(localhost|127\.0\.0\.1):8001", f"localhost:{self.private}", text)
        return re.sub(r"(superlink|0\.0\.0\.0):8000", f"127.0.0.1:{self.port}", text)

    def where(self, name: str) -> list[str]:
        """What stands before a command that runs where a service is."""
        return []

    def command(self, service: str, **changes: str) -> list[str]:
        """The command of a service; `changes` replaces the value of an option (named without dashes)."""
        words = [self.here(str(w), service) for w in COMPOSE["services"][service]["command"]]
        if service != "superlink":
            changes.setdefault("port", str(free_port()))
        for option, value in changes.items():
            words[words.index("--" + option.replace("_", "-")) + 1] = value
        return words

    def start(self, name: str, *command: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*self.where(name), *command],
                cwd=self.folder,
                env={**self.env(name), **(env or {})},
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

    def superlink(self, *more: str) -> None:
        started = self.start("superlink", *self.command("superlink"), *more)
        until(lambda: self.healthy() or started.poll() is not None, 60, "SuperLink answers /health")
        assert started.poll() is None, self.log("superlink")[-2000:]
        self.token = self.folder / "vol-superlink" / "operator.token"
        done = self.run("operator", "login", "superlink", "--token-file", str(self.token))
        assert done.returncode == 0, done.stdout + done.stderr

    def healthy(self) -> bool:
        context = ssl.create_default_context(cafile=str(self.folder / "certs" / "ca.crt"))
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        with contextlib.suppress(urllib.error.URLError, OSError):
            return bool(opener.open(f"https://127.0.0.1:{self.private}/health", timeout=2).status == 200)
        return False

    def register(self, *names: str) -> None:
        for name in names:
            key, client = self.folder / "keys" / f"{name}.pub", name.rpartition("-")[2]
            done = self.run("admit", str(key), "--client", client, "--superlink", "superlink")
            assert done.returncode == 0, done.stdout + done.stderr

    def flwr(self, *arguments: str) -> str:
        done = subprocess.run(
            [str(BIN / "flwr"), *arguments], cwd=self.folder, env=self.env("superlink"), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def node(self, name: str, restart_after: int = 65, cold: bool = False, **changes: str) -> subprocess.Popen[bytes]:
        """Start a SuperNode below the script that starts it again; `cold`: without a warm process."""
        words = [*self.command(name, **changes), *(["--cold"] if cold else [])]
        return self.start(name, *words, env={"RESTART_AFTER": str(restart_after)})

    def online(self, name: str, seconds: float = 60) -> None:
        """Wait until a node that was just started has its id."""
        process = self.processes[name]
        until(
            lambda: process.poll() is not None or "SuperNode ID" in self.log(name),
            seconds, f"{name} is online",
        )  # fmt: skip
        assert process.poll() is None, self.log(name)[-2000:]

    def up(self, *names: str, options: tuple[str, ...] = (), parts: int = 0, **changes: Any) -> None:
        """Start the SuperLink with options, admit the nodes and wait until all are online.

        The nodes have data of their own, or with `parts` so many parts of digits, one each.
        """
        if not parts:
            self.sites()
        self.superlink(*options)
        self.register(*names)
        for k, name in enumerate(names):
            config = {"node_config": f"partition-id={k} num-partitions={parts}"} if parts else {}
            self.node(name, **config, **changes)
        for name in names:
            self.online(name, 120)

    def sites(self) -> None:
        """Write the data of three sites."""
        sys.path.insert(0, str(ROOT / "docker"))
        import sites

        sites.write(self.folder / "sites")

    def run(self, *arguments: str, timeout: float = 1800) -> subprocess.CompletedProcess[str]:
        """Call `fedapp` where the SuperLink is."""
        return subprocess.run(
            [*self.where("superlink"), sys.executable, "-m", "fedapp.cli", *arguments],
            cwd=ROOT, env=self.env("superlink"), capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip

    def begin(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start `fedapp` in the background; its output goes to fedapp.log."""
        env = {**self.env("superlink"), "PYTHONPATH": str(ROOT)}
        return self.start("fedapp", sys.executable, "-m", "fedapp.cli", *arguments, env=env)

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

    def supernode(self, name: str) -> psutil.Process:
        """The SuperNode below its script."""
        children = psutil.Process(self.processes[name].pid).children()
        return next(c for c in children if "supernode" in c.cmdline())

    def close(self) -> None:
        for started in self.processes.values():
            if started.poll() is None:
                started.terminate()  # nginx writes its title over its environment, and so over the mark
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


D = TypeVar("D", bound=Deployment)


@contextlib.contextmanager
def deployed(folder: Path, kind: type[D] = Deployment, **settings: object) -> Iterator[D]:  # type: ignore[assignment]
    """A deployment that leaves no process behind."""
    if shutil.which("openssl") is None or shutil.which("ssh-keygen") is None:
        import pytest

        pytest.skip("openssl and ssh-keygen are needed")
    it = kind(folder, **settings)  # type: ignore[arg-type]
    try:
        yield it
    finally:
        it.close()


@contextlib.contextmanager
def connected(it: Deployment, name: str) -> Iterator[Any]:
    """Be a node without the SuperNode's program: what it calls to receive, reply, push, see a run, and its id."""
    key = serialization.load_ssh_private_key((it.folder / "keys" / name).read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    certificate = (it.folder / "certs" / "ca.crt").read_bytes()
    keys = (key, key.public_key())
    with http_request_response(f"127.0.0.1:{it.port}", False, certificate, keys, max_retries=0) as calls:
        yield calls[1], calls[2], calls[6], calls[3], calls[0]
