"""The warm process of a node, and `fedapp supernode`, which starts it; real processes without Flower."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from fedapp.deployment import caller, forks, supernode, warm
from fedapp.errors import BadRequest
from tests.deployment import until
from tests.house import ROOT

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a warm process needs Linux")

ENTRY = """
import os, signal, sys, time
loaded = os.getpid()

def entry():
    globals()[sys.argv[1]](*sys.argv[2:])

def tell():
    import json
    left = [name for name in sys.modules if name.startswith("left_")] + [n for n in os.environ if n.startswith("LEFT")]
    found = [os.environ.get(name) for name in ("MINE", "PYTHONPATH")]
    print(json.dumps([os.getpid(), loaded, os.getppid(), os.getcwd(), sys.argv, found, left, sys.path[0],
                      sys.stdin.read()]))
    print("to errors", file=sys.stderr)

def leave():
    sys.modules["left_behind"] = os
    os.environ["LEFT_BEHIND"] = "yes"
    sys.path.insert(0, "left")
    globals()["entry"] = None
    os.chdir("/")
    sys.exit(3)

def crash(how):
    if how == "exit":
        os._exit(7)
    if how == "raise":
        raise RuntimeError("wrong")
    os.kill(os.getpid(), signal.SIGSEGV)

def hang(file):
    def told(number, frame):
        open(file, "a").write(f"{number} ")
        if number == signal.SIGTERM:
            sys.exit(5)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, told)
    open(file, "a").write(f"{os.getpid()} ")
    while True:
        time.sleep(0.05)

def sleep(file):
    open(file, "w").write(f"{os.getpid()} ")
    time.sleep(60)

def draws():
    import random
    random.random(), time.sleep(0)
    import numpy.random
    print(random.random(), numpy.random.rand())
"""
REAL = "#!/bin/sh\necho cold $* > {}/cold\nexit 9\n"


class Node:
    """A warm process, and callers of it."""

    def __init__(self, folder: Path, *libraries: str, entry: str = "entry_of_test:entry", **variables: str) -> None:
        self.folder, self.real = folder, folder / "real"
        self.at = folder / "warm-folder"
        self.at.mkdir(0o700)
        self.library = folder / "library"
        self.library.mkdir(exist_ok=True)
        (self.library / "entry_of_test.py").write_text(ENTRY)
        self.real.write_text(REAL.format(folder))
        self.real.chmod(0o700)
        module = entry.partition(":")[0]
        command = [sys.executable, "-P", warm.__file__, self.at, str(self.real), entry, module, *libraries]
        env = {**os.environ, "PYTHONPATH": str(self.library), **variables}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, env=env, start_new_session=True)
        until(lambda: (self.at / warm.PLACE).exists(), 20, "the warm process listens")

    def call(self, *words: str, **settings: object) -> subprocess.Popen[str]:
        """Start the small program."""
        command = [sys.executable, "-I", "-S", caller.__file__, str(self.at / warm.PLACE), str(self.real), *words]
        files = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, text=True, **{**files, **settings})  # type: ignore[call-overload,no-any-return]

    def ask(self, *words: str, **settings: object) -> tuple[int, str, str]:
        """Return exit code and output of a call."""
        process = self.call(*words, **settings)
        out, errors = process.communicate("typed in", timeout=60)
        return process.returncode, out, errors

    def tells(self, **settings: object) -> list[object]:
        """Return what a fork says of itself."""
        code, out, errors = self.ask("tell", **settings)
        assert (code, errors) == (0, "to errors\n"), errors
        told: list[object] = json.loads(out)
        return told

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(20)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    it = Node(tmp_path)
    try:
        yield it
    finally:
        it.close()


def test_a_message_has_a_process_of_its_own_that_looks_like_the_program(node: Node, tmp_path: Path) -> None:
    (elsewhere := tmp_path / "else where").mkdir()
    first = node.tells(cwd=elsewhere, env={"MINE": "é=\n", "PATH": "/bin"})
    pid, loaded, parent, cwd, argv, mine, left, path, typed = first
    assert loaded == parent == node.process.pid != pid
    assert (cwd, argv, mine) == (str(elsewhere), [str(node.real), "tell"], ["é=\n", None])
    assert (left, path, typed) == ([], str(node.folder), "typed in")
    assert node.tells()[0] != pid
    assert not (tmp_path / "cold").exists()


def test_what_one_message_leaves_behind_the_next_does_not_find(node: Node) -> None:
    assert node.ask("leave")[0] == 3
    assert node.tells()[6:8] == [[], str(node.folder)]


@pytest.mark.parametrize(("how", "code"), [("exit", 7), ("raise", 1), ("signal", 128 + signal.SIGSEGV)])
def test_a_message_that_crashes_ends_nothing_else(node: Node, how: str, code: int) -> None:
    ended, _, errors = node.ask("crash", how)
    assert ended == code and ("RuntimeError: wrong" in errors) == (how == "raise")
    assert node.tells()[1] == node.process.pid


def hanging(node: Node, file: Path, what: str = "hang") -> tuple[subprocess.Popen[str], psutil.Process]:
    """Start a message that waits for signals."""
    process = node.call(what, str(file))
    until(lambda: file.exists() and file.read_text().endswith(" "), 20, "it hangs")
    return process, psutil.Process(int(file.read_text().split()[0]))


def test_signals_reach_the_fork_once(node: Node, tmp_path: Path) -> None:
    process, fork = hanging(node, file := tmp_path / "told")
    for count, number in enumerate((signal.SIGINT, signal.SIGHUP, signal.SIGTERM), start=2):
        process.send_signal(number)
        until(lambda count=count: len(file.read_text().split()) == count, 20, f"{count} words")  # type: ignore[misc]
    assert process.wait(20) == 5 and file.read_text().split()[1:] == ["2", "1", "15"]
    assert not fork.is_running() and node.tells()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 128 + 15), (signal.SIGINT, 1)])
def test_a_fork_has_pythons_own_handlers_of_signals(node: Node, tmp_path: Path, number: int, code: int) -> None:
    process, fork = hanging(node, tmp_path / "told", "sleep")
    process.send_signal(number)
    assert process.wait(20) == code and not fork.is_running() and node.process.poll() is None and node.tells()


def test_a_fork_whose_caller_was_killed_is_killed(node: Node, tmp_path: Path) -> None:
    process, fork = hanging(node, tmp_path / "told")
    process.kill()
    fork.wait(20)
    assert node.tells()


BATCHES = {
    "a fork that ended": ["woken", "fork", "input"],
    "the listener": ["input", "listener"],
    "who asks": ["listener", "input"],  # no accept works on this socket
}


@pytest.mark.parametrize("gone", BATCHES)
def test_an_event_of_what_was_closed_by_an_event_of_the_same_time(gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller passes a signal on while its fork ends; somebody asks for a fork as the SuperNode ends."""
    served = warm.ForkServer.__new__(warm.ForkServer)
    served.listener, other = socket.socketpair()
    connection, caller_end = socket.socketpair()
    served.woken, wakes = os.pipe()
    os.write(wakes, b"\0")
    served.selector, served.forks, served.until = selectors.SelectSelector(), {}, None
    for source in (served.listener, served.woken, 0):
        served.selector.register(source, selectors.EVENT_READ)
    served.selector.register(connection, selectors.EVENT_READ, 1)
    keys = {name: served.selector.get_key(of) for name, of in
            {"woken": served.woken, "input": 0, "listener": served.listener, "fork": connection}.items()}  # fmt: skip

    def reap() -> None:
        served.selector.unregister(connection)
        connection.close()

    monkeypatch.setattr(served, "reap", reap)
    monkeypatch.setattr(served.selector, "select", lambda timeout: [(keys[name], 1) for name in BATCHES[gone]])
    monkeypatch.setattr(os, "read", lambda file, size: b"" if file == 0 else b"\0")
    assert served.serve() is None
    for end in (other, caller_end):
        end.close()


@pytest.mark.full
def test_it_ends_with_its_supernode_and_what_does_not_end_by_itself_is_killed(tmp_path: Path) -> None:
    node = Node(tmp_path)
    process, fork = hanging(node, file := tmp_path / "told")
    began = time.monotonic()
    node.close()
    assert node.process.returncode == 0 and not node.at.exists()
    assert time.monotonic() - began > warm.GRACE - 0.5
    assert process.wait(20) == 1 and not fork.is_running() and file.read_text().split()[1:] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_when_it_is_told_to(tmp_path: Path, number: signal.Signals) -> None:
    node = Node(tmp_path)
    node.process.send_signal(number)
    assert node.process.wait(20) == 0 and not node.at.exists()


def test_where_nobody_answers_the_program_itself_is_started(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.process.kill()
    node.process.wait()
    assert (node.at / warm.PLACE).exists() and node.ask("tell", "me")[0] == 9
    assert (tmp_path / "cold").read_text() == "cold tell me\n"
    shutil.rmtree(node.at)
    assert node.ask("again")[0] == 9 and (tmp_path / "cold").read_text() == "cold again\n"


def test_a_library_that_is_missing_is_the_affair_of_who_needs_it(tmp_path: Path) -> None:
    node = Node(tmp_path, "no_such_library")
    assert node.tells()
    node.close()


def test_another_user_is_refused(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert warm.same_user(ours)
        theirs.sendall(b"\0\0\0\0")
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert not warm.same_user(ours) and warm.receive_request(ours) is None
        assert ours.recv(4) == b"\0\0\0\0", "nothing was read"


def test_requests_that_are_none_change_nothing(node: Node) -> None:
    assert node.tells()
    before = psutil.Process(node.process.pid).num_fds()
    place, null = str(node.at / warm.PLACE), os.open(os.devnull, os.O_RDWR)
    try:
        for files, sent in [
            ([], b""), ([], b"\0\0\0\1x"), ([null], b"\0\0\0\3/\x000"), ([null] * 3, b"\xff\xff\xff\xff"),
            ([null] * 3, b"\0\0\0\3a\0x"), ([null] * 3, b"\0\0\0\1a"), ([null] * 3, b"\0\0"),
        ]:  # fmt: skip
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(place)
                if files or sent:
                    socket.send_fds(client, [sent], files)
                client.shutdown(socket.SHUT_WR)
                client.settimeout(5)
                with contextlib.suppress(ConnectionResetError):  # not all was read
                    assert client.recv(1) == b"", (files, sent)
    finally:
        os.close(null)
    assert node.tells()
    until(lambda: psutil.Process(node.process.pid).num_fds() <= before, 20, "all is closed")


def test_forks_draw_random_numbers_of_their_own(tmp_path: Path) -> None:
    node = Node(tmp_path, "numpy.random")
    drawn = " ".join(node.ask("draws")[1] for _ in range(2)).split()
    assert len(set(drawn)) == 4
    node.close()


# ---- fedapp supernode ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--allow-runtime-dependency-installation",), "installs libraries"),
        (("--isolation", "subprocess"), ""),
    ],
)
def test_what_keeps_a_node_cold(words: tuple[str, ...], why: str) -> None:
    assert why in supernode.obstacle(words) and bool(why) == bool(supernode.obstacle(words))


@pytest.mark.full
def test_its_folder_is_where_programs_may_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = {tmp_path / "tmp"}
    for name in ("tmp", "home"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(
        os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC if path in closed else 0), raising=True
    )
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    environment = {**os.environ, "FLWR_HOME": str(tmp_path / "home"), "PATH": str(Path(sys.executable).parent)}
    started = forks.Forks(environment)
    [folder] = (tmp_path / "home").iterdir()
    assert started.path("x").split(os.pathsep)[0] == str(folder) and not any((tmp_path / "tmp").iterdir())
    started.end()
    assert started.process.wait(30) == 0 and not folder.exists()
    closed.add(tmp_path / "home")
    with pytest.raises(forks.ForkServerUnavailable, match="set TMPDIR to another folder"):
        forks.Forks(environment)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(long))
    (long := tmp_path / ("x" * 100)).mkdir()
    with pytest.raises(forks.ForkServerUnavailable, match="too long for a socket"):
        forks.Forks(environment)
    assert not any(long.iterdir())


def test_a_killed_warm_process_is_started_again_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    environment = {**os.environ, "PATH": str(Path(sys.executable).parent)}
    started = forks.Forks(environment)
    started.process.kill()
    started.process.wait(30)
    started.end()
    started.start()
    assert (
        "usage: flwr-clientapp"
        in subprocess.run(
            [forks.PROGRAM, "--help"], env={**environment, "PATH": started.path("")}, capture_output=True, text=True
        ).stdout
    )
    started.process.terminate()
    assert started.process.wait(30) == 0, "told to end, it removes its folder"
    with pytest.raises(forks.ForkServerUnavailable, match="is gone"):
        started.start()


@pytest.mark.full
def test_the_libraries_are_all_that_a_client_imports_of_others() -> None:
    """What is missing there is imported anew by every message; fedapp's own modules come with the run."""
    program = (
        "import sys; from importlib import import_module as load\n"
        "load('flwr.supernode.cli'); [load(name) for name in sys.argv[1:]]\n"
        "before = set(sys.modules); assert not {'fedapp', 'clients', 'strategies', 'ray'} & before\n"
        "import fedapp.client_app, torch\n"
        "for kind in (torch.optim.SGD, torch.optim.Adam):\n"
        "    kind([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()\n"
        "ours = ('fedapp', 'clients', 'strategies')\n"
        "print(*(name for name in set(sys.modules) - before if name.partition('.')[0] not in ours))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *forks.LIBRARIES], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_the_warm_process_has_no_thread_and_no_gpu_and_ends_quietly(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told = "import os, torch\n    print(len(os.listdir('/proc/self/task')), torch.cuda.is_initialized())"
    entry = f"import flwr.supernode.cli\ndef entry():\n    {told}\n"
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "imports_flower.py").write_text(entry)
    node = Node(tmp_path, *forks.LIBRARIES, entry="imports_flower:entry", OPENBLAS_NUM_THREADS="1")
    assert node.ask("x")[1].split() == ["1", "False"]
    assert psutil.Process(node.process.pid).num_threads() == 1
    assert not psutil.Process(node.process.pid).net_connections("inet")
    node.close()
    assert capfd.readouterr().err == ""


def node_of(tmp_path: Path, flower: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `fedapp supernode` where Flower's program is a function with this body."""
    program = (
        "import sys, os, subprocess\nfrom fedapp.deployment import forks, supernode\n"
        "from flwr.supernode.cli import flower_supernode\n"
        "module = sys.modules['flwr.supernode.cli.flower_supernode']\n"
        f"def flower():\n    {flower}\n"
        "module.flower_supernode = flower\nforks.LIBRARIES = ()\n"
        "supernode.serve(sys.argv[1:], '--cold' in os.environ.get('HOW', ''))"
    )
    (tmp_path / "tmp").mkdir(exist_ok=True)
    env = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "HOW": " ".join(words)}
    env.pop("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", None)
    command = [sys.executable, "-c", program, "--insecure", "--port", "1"]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.full
@pytest.mark.parametrize("cold", [False, pytest.param(True, marks=pytest.mark.full)])
def test_it_runs_flowers_node_with_a_private_folder_first(tmp_path: Path, cold: bool) -> None:
    told = "print(os.environ['FLWR_SUPEREXEC_TASK_POLL_INTERVAL'], sys.argv, os.umask(0), os.environ['PATH'])"
    done = node_of(tmp_path, f"{told}; raise SystemExit(0)", *(["--cold"] if cold else []))
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[-1]
    assert f"0.25 ['flower-supernode', '--insecure', '--port', '1'] {0o077} " in line
    first = Path(line.rpartition(" ")[2].split(os.pathsep)[0])
    assert (first.parent == tmp_path / "tmp") == (not cold)
    until(lambda: not any((tmp_path / "tmp").glob("fedapp-*")), 20, "the helpers have ended")


@pytest.mark.full
@pytest.mark.parametrize(
    ("flower", "code"), [("pass", 1), ("raise SystemExit(1)", 1), ("raise OSError('x')", 1), ("sys.exit()", 0)]
)
def test_a_node_ends_with_code_0_if_it_was_told_to_end_only(tmp_path: Path, flower: str, code: int) -> None:
    assert node_of(tmp_path, flower, "--cold").returncode == code


@pytest.mark.full
def test_lines_of_a_node_have_a_time_and_rule_no_terminal(tmp_path: Path) -> None:
    text = r"\\033[92mINFO \\033[0m: [RUN 7, ROUND 2 84818120]\\n\\033]0;x\\007"
    done = node_of(tmp_path, f"subprocess.run(['printf', '{text}']); sys.exit()", "--cold")
    first, second = done.stdout.splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ INFO : \[RUN 7, ROUND 2\]", first)
    assert second.endswith(r"Z \x1b]0;x\x07")


def test_a_node_needs_a_key() -> None:
    with pytest.raises(BadRequest, match="--auth-supernode-private-key is needed"):
        supernode.serve(["--superlink", "127.0.0.1:1"], cold=True)


def test_what_the_superlink_refuses_is_tried_again(capsys: pytest.CaptureFixture[str]) -> None:
    """A refused call would end the node with code 0, and a failed heartbeat all further heartbeats."""
    node = supernode.Node({})
    beat, pull, activate = (f"/v1/fleet/{name}" for name in ("send-node-heartbeat", "pull-messages", "activate-node"))

    def answers(status: int, success: bool = True) -> Callable[[], Any]:
        def call() -> Any:
            request = httpx.Request("POST", "https://host/x")
            httpx.Response(status, request=request).raise_for_status()
            return SimpleNamespace(success=success)

        return call

    with pytest.raises(httpx.HTTPStatusError):
        node.answered(activate, answers(401))  # Flower says that the key is not registered
    node.answered(activate, answers(200))
    for path, status, success in ((beat, 500, True), (beat, 401, True), (beat, 200, False), (pull, 401, True)):
        with pytest.raises(httpx.ConnectError):
            node.answered(path, answers(status, success))
    with pytest.raises(httpx.HTTPStatusError):
        node.answered(pull, answers(404))
    assert capsys.readouterr().err.count("is tried again") == 1
    node.answered(beat, answers(200))
    assert "acknowledged again" in capsys.readouterr().err


def test_secrets_of_an_executor_lie_where_no_cleaner_removes_them(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    old, living = (tmp_path / f"{supernode.SECRETS}{pid}" for pid in (gone.pid, os.getppid()))
    old.mkdir()
    living.mkdir()
    node = supernode.Node({"client-id": 0, "data-path": "x", "state-dir": str(tmp_path)})
    for _ in range(2):
        folder = node.folder()
        assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
    assert not old.exists() and living.exists()


def test_a_node_whose_executor_cannot_be_started_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(supernode.os, "_exit", codes.append)
    node = supernode.Node({})

    def start() -> Any:
        raise OSError(28, "No space left on device")

    node.helpers.append(SimpleNamespace(process=None, start=start, end=list))  # type: ignore[arg-type]
    node._watching.start()
    node._watching.join(30)
    assert codes == [1] and "No space left on device" in capsys.readouterr().err
