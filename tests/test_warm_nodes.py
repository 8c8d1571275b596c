"""Real nodes with and without a warm process, on loopback."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.exchange import PROGRAMS, used
from fedapp.deployment import forks, warm
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
    found = [p for p in it.family() if any(word.endswith("deployment/warm.py") for word in p.cmdline())]
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
    kinds = {*PROGRAMS.values(), "the server's executor"} - {"the server's process"}
    assert kinds <= used(mixed).keys(), "the benchmark of an exchange counts them all"


def test_helpers_that_are_killed_are_started_again(mixed: Deployment) -> None:
    node = mixed.supernode(NODES[0])
    helpers = [p for p in node.children() if p.name() == warm.NAME or "flower-superexec" in p.cmdline()]
    assert len(helpers) == 2
    for helper in helpers:
        helper.kill()
    until(lambda: mixed.log(NODES[0]).count("is started again") >= 2, 30, "both are started again")
    [process] = warm_processes(mixed)
    assert process not in helpers
    before = forked(process)
    trained(mixed, mixed.folder / "vol-superlink" / "runs" / "again")
    assert forked(process) > before, "messages are forked again"


def test_the_log_of_a_node_has_times_and_no_colours(mixed: Deployment) -> None:
    lines = mixed.log(NODES[0]).splitlines()
    assert lines and all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ", line) for line in lines)
    assert "\x1b" not in mixed.log(NODES[0]) and re.search(r"\[RUN \d+, ROUND 2\]", mixed.log(NODES[0]))


def test_another_user_of_the_machine_gets_no_task(mixed: Deployment) -> None:
    """A task is given to a caller that knows a secret, and no command line shows its token."""
    following = mixed.begin(*DEPLOY, *SETTINGS, "--out", str(mixed.folder / "vol-superlink" / "runs" / "other"))
    node = mixed.supernode(NODES[0])
    port = int(node.cmdline()[node.cmdline().index("--port") + 1])
    words: set[str] = set()
    answers: set[int] = set()
    while following.poll() is None:
        answers.add(acquire(port))
        for process in node.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words |= set(process.cmdline())
    assert following.returncode == 0, mixed.log("fedapp")
    assert answers == {401} and "--token-file" in words and "--token" not in words
    [secret] = {word for word in words if word.endswith("superexec.secret")}
    assert secret.startswith(f"{mixed.folder}/vol-{NODES[0]}/"), "it is among the node's states"


def acquire(port: int) -> int:
    """Ask a node for a task as a stranger does; return the status."""
    from flwr.proto.runtime_pb2 import AcquireTaskRequest

    body = AcquireTaskRequest(supported_task_types=["flwr-clientapp"]).SerializeToString()
    head = {"Content-Type": "application/protobuf", "Accept": "application/protobuf"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/runtime/acquire-task", body, head)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as e:
        return int(e.code)


@pytest.mark.slow
def test_a_node_without_acknowledged_heartbeats_ends_with_code_1(tmp_path: Path) -> None:
    """Every call of a node that was unregistered is refused (401). Flower itself would end with code 0 then."""
    with deployed(tmp_path / "deployment", nodes=NODES[:1]) as it:
        it.up(NODES[0], parts=1)
        process = it.supernode(NODES[0])
        port = process.cmdline()[process.cmdline().index("--port") + 1]

        def health() -> int:
            with contextlib.suppress(urllib.error.HTTPError):
                return int(urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status)
            return 503

        assert health() == 200
        listed = json.loads(it.flwr("supernode", "list", "superlink", "--format", "json"))
        it.flwr("supernode", "unregister", listed["nodes"][0]["node-id"], "superlink")
        until(lambda: health() == 503, 90, "its /health says so")
        until(lambda: "the SuperNode ended with code 1; next try" in it.log(NODES[0]), 60, "it ends")
        assert "no heartbeat was acknowledged for 90 s" in it.log(NODES[0]) and "401" in it.log(NODES[0])
        until(lambda: not any(p.name() == warm.NAME for p in it.family()), 30, "its helpers have ended too")


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
    [process] = [p for p in warm_processes(mixed) if p.ppid() == node.pid]
    folder = Path(process.cmdline()[3])
    assert (folder / warm.PLACE).exists() and (folder / forks.PROGRAM).exists()
    node.send_signal(number)
    mixed.processes[name].wait(30)
    until(lambda: not folder.exists(), 30, "its folder is removed")
    until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, 30, "it has ended")
