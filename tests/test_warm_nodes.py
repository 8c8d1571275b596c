"""Real nodes with and without a warm process, on loopback."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fedapp.engines import supernode, warm
from fedapp.engines.local import run
from tests.deployment import NODES, Deployment, deployed, until
from tests.test_deployment import DEPLOY, same

pytestmark = [pytest.mark.full, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it needs Linux")]
SETTINGS = ("--method", "fedclassavg", "--clients", "3", "--rounds", "2", "--seed", "0")
MODELS = "digits-a,digits-b,digits-c"


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A node with a warm process, one without, and one of Flower's own."""
    with deployed(tmp_path_factory.mktemp("mixed")) as it:
        it.sites()
        it.superlink()
        it.register(*NODES)
        it.node(NODES[0])
        it.node(NODES[1], cold=True)
        it.start(NODES[2], "flower-supernode", *it.command(NODES[2])[1:])
        for name in NODES:
            it.online(name, 120)
        yield it


def warm_processes(it: Deployment) -> list[psutil.Process]:
    """The processes of the deployment that fork messages, without the forks."""
    found = [p for p in it.family() if any(word.endswith("engines/warm.py") for word in p.cmdline())]
    return [p for p in found if p.parent() not in found]


def forked(process: psutil.Process) -> float:
    """Return the processor seconds that ended forks have used."""
    times = process.cpu_times()
    return float(times.children_user + times.children_system)


def trained(it: Deployment, out: Path) -> None:
    """A run must end well and equal the simulation to the last bit."""
    done = it.run(*DEPLOY, *SETTINGS, "--set", f"model={MODELS}", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    run(method="fedclassavg", clients=3, rounds=2, seed=0, model=MODELS, out=out.parent / f"{out.name}-simulated")
    names = ("rounds.csv", "clients.csv", "final.csv")
    same(out, out.parent / f"{out.name}-simulated", *names, without="balanced")


def test_a_warm_node_a_cold_one_and_flowers_own_equal_the_simulation(mixed: Deployment) -> None:
    [process] = warm_processes(mixed)
    folder = Path(process.cmdline()[3])
    assert folder.stat().st_mode & 0o777 == 0o700
    before = forked(process)
    trained(mixed, mixed.folder / "vol-superlink" / "runs" / "mixed")
    assert forked(process) > before and not process.children()
    for name in NODES:
        assert mixed.log(name).count("Start `flwr-clientapp` process") >= 3 and "Traceback" not in mixed.log(name)


def test_without_its_warm_process_a_node_starts_messages_itself(mixed: Deployment) -> None:
    [process] = warm_processes(mixed)
    folder = Path(process.cmdline()[3])
    process.kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        until(lambda: process.status() == psutil.STATUS_ZOMBIE, 20, "it is killed")
    trained(mixed, mixed.folder / "vol-superlink" / "runs" / "fallen-back")
    shutil.rmtree(folder)  # who was killed leaves it behind


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_warm_process_ends_with_its_supernode(mixed: Deployment, number: signal.Signals) -> None:
    name = f"ends-{number.name.lower()}"
    mixed.sh("docker/keys.sh", str(mixed.folder / "keys"), name)
    key = str(mixed.folder / "keys" / name)
    mixed.flwr("supernode", "register", f"{key}.pub", "superlink")
    words = mixed.command("supernode-0", auth_supernode_private_key=key)[1:]
    mixed.start(name, "fedapp", "supernode", *words)
    mixed.online(name, 120)
    node = psutil.Process(mixed.processes[name].pid)
    assert "flower-supernode" in " ".join(node.cmdline()), "it has become Flower's"
    [process] = [p for p in warm_processes(mixed) if p.ppid() == node.pid]
    folder = Path(process.cmdline()[3])
    assert (folder / warm.PLACE).exists() and (folder / supernode.PROGRAM).exists()
    node.send_signal(number)
    mixed.processes[name].wait(30)
    until(lambda: not folder.exists(), 30, "its folder is removed")
    until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, 30, "it has ended")
