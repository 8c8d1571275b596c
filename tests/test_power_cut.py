"""A writer that dies at any system call of a save, and a disk that loses what was not synced: the old or the new state.

The fault layer stands between the writer and the file system. It counts the calls and dies at the k-th. What a power
cut may leave follows the rules of POSIX: the bytes of a file are sure after fsync of the file, and the entries of a
folder after fsync of the folder. Of everything since then any part may be there, in any combination.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from fedapp import server_app
from fedapp.errors import BadRequest
from fedapp.learning import state
from fedapp.learning.state import ClientStore, StateError
from fedapp.transport import checkpoint, secure

OLD = {"x": np.arange(300, dtype=np.float32), "y": np.zeros((2, 3))}
NEW = {"x": np.arange(300, dtype=np.float32) + 1, "y": np.ones((2, 3))}

Write = Callable[[Path, int, dict[str, Any]], object]
Read = Callable[[Path], tuple[int, dict[str, Any]]]


class Killed(BaseException):
    """The process is dead: nothing that follows, clean-up included, reaches the file system."""


class Disk:
    """The folder as the writer sees it is real; here is what of it a power cut would leave.

    Attributes
    ----------
    sure : entries that are on the disk, name -> number of the file.
    since : changes of entries since the folder was synced, (name that goes or "", name that comes or "", file).
    data : bytes of each file as written; synced : of those that were synced.
    """

    def __init__(self, folder: Path, kill_at: int) -> None:
        self.folder, self.kill_at, self.calls, self.trace = folder, kill_at, 0, list[str]()
        self.data = {k: p.read_bytes() for k, p in enumerate(sorted(folder.iterdir()))}
        self.sure = {p.name: k for k, p in enumerate(sorted(folder.iterdir()))}
        self.synced = dict(self.data)
        self.seen = dict(self.sure)
        self.since: list[tuple[str, str, int]] = []
        self.open: dict[int, Path] = {}

    def call(self, name: str) -> None:
        self.calls += 1
        self.trace.append(name)
        if self.calls >= self.kill_at:
            raise Killed(name)

    def change(self, gone: str, come: str, file: int) -> None:
        self.since.append((gone, come, file))
        self.seen.pop(gone, None)
        if come:
            self.seen[come] = file

    def install(self, patch: pytest.MonkeyPatch) -> None:
        real = {n: getattr(os, n) for n in ("open", "close", "fsync", "replace", "unlink", "listdir", "chmod")}

        def open_(path: Any, flags: int, *args: Any, **more: Any) -> int:
            self.call("open")
            handle = int(real["open"](path, flags, *args, **more))
            self.open[handle] = Path(path)
            if flags & os.O_CREAT:
                number = len(self.data)
                self.data[number] = b""
                self.change("", Path(path).name, number)
            return handle

        def fsync(handle: int) -> None:
            self.call("fsync")
            path = self.open[handle]
            if path == self.folder:
                self.sure, self.since = dict(self.seen), []
            else:
                number = self.seen[path.name]
                self.data[number] = path.read_bytes()
                self.synced[number] = self.data[number]

        def replace(a: Any, b: Any) -> None:
            self.call("replace")
            self.data[self.seen[Path(a).name]] = Path(a).read_bytes()
            real["replace"](a, b)
            self.change(Path(a).name, Path(b).name, self.seen[Path(a).name])

        def unlink(path: Any) -> None:
            self.call("unlink")
            real["unlink"](path)
            self.change(Path(path).name, "", -1)

        def write(arrays: Any, name: str, metadata: Any) -> None:
            self.call("create")
            save_file(arrays, name, metadata=metadata)
            whole = Path(name).read_bytes()
            for part in (whole[: len(whole) // 2], whole):
                self.data[self.seen[Path(name).name]] = part
                self.call("write")

        def plain(name: str) -> Callable[..., Any]:
            def act(*args: Any, **more: Any) -> Any:
                self.call(name)
                return real[name](*args, **more)

            return act

        for name, function in {"open": open_, "fsync": fsync, "replace": replace, "unlink": unlink}.items():
            patch.setattr(os, name, function)
        for name in ("close", "listdir", "chmod"):
            patch.setattr(os, name, plain(name))
        patch.setattr(state, "save_file", write)

    def left(self) -> Iterator[dict[str, bytes]]:
        """Yield every content of the folder that a power cut may leave now."""
        for happened in itertools.product((False, True), repeat=len(self.since)):
            entries = dict(self.sure)
            for did, (gone, come, number) in zip(happened, self.since, strict=True):
                if did:
                    entries.pop(gone, None)
                    if come:
                        entries[come] = number
            choices = []
            for number in entries.values():
                whole = self.data[number]
                torn = {b"", whole[: len(whole) // 2], whole, self.synced.get(number, b"")}
                choices.append([whole] if self.synced.get(number) == whole else sorted(torn))
            for bytes_ in itertools.product(*choices):
                yield dict(zip(entries, bytes_, strict=True))


def save_client(folder: Path, server_round: int, arrays: dict[str, Any], durable: bool = True) -> None:
    ClientStore(folder, "m", "aa", durable=durable).save(server_round, arrays)


def load_client(folder: Path) -> tuple[int, dict[str, Any]]:
    stored = ClientStore(folder, "m", "aa").load(99)
    assert stored is not None
    return stored.round, stored.arrays


def save_server(folder: Path, server_round: int, arrays: dict[str, Any]) -> None:
    checkpoint.save(folder, server_round, {"model": arrays}, {}, {"run": "aa"})


def load_server(folder: Path) -> tuple[int, dict[str, Any]]:
    found, _ = checkpoint.recover(folder, {"run": "aa"})
    assert found is not None
    return found[0], found[1]["model"]


def opened_sums(folder: Path) -> secure.Opened:
    folder.mkdir(exist_ok=True)
    settings = SimpleNamespace(secure_sum=True, secure_dropout=0.3, secure_colluders=0)
    run: Any = SimpleNamespace(config=SimpleNamespace(secure=settings), out=folder, body="", manager=None)
    session = server_app.secure_sums(run)
    assert session is not None
    return session.opened


def save_sums(folder: Path, server_round: int, arrays: dict[str, Any]) -> None:
    opened_sums(folder).add(f"train {server_round}", range(server_round))


def load_sums(folder: Path) -> tuple[int, dict[str, Any]]:
    sets = opened_sums(folder).sets
    assert sets == {f"train {n}": [*range(n)] for n in range(2, 2 + len(sets))}
    return 1 + len(sets), {4: OLD, 5: NEW}[1 + len(sets)]


def after_cut(
    folder: Path, save: Write, read: Read, kill_at: int, patch: pytest.MonkeyPatch
) -> tuple[Disk, list[int | str]]:
    """Kill a save of round 5 at a call; return what a reader finds on each possible disk: the round, or an error."""
    live = folder / "f" / "3"
    live.parent.mkdir(parents=True)
    for server_round in (2, 3, 4):
        save(live, server_round, OLD)
    disk = Disk(live, kill_at)
    with patch.context() as p:
        disk.install(p)
        with contextlib.suppress(Killed):
            save(live, 5, NEW)
    found: list[int | str] = []
    for number, content in enumerate(disk.left()):
        place = folder / str(number) / "f" / "3"
        place.mkdir(parents=True)
        for name, data in content.items():
            (place / name).write_bytes(data)
        try:
            server_round, arrays = read(place)
        except (StateError, BadRequest, AssertionError, KeyError) as e:
            found.append(f"{type(e).__name__}: {e}")
            continue
        wanted = {4: OLD, 5: NEW}.get(server_round)
        same = wanted is not None and all(np.array_equal(arrays[n], wanted[n]) for n in wanted)
        found.append(server_round if same else f"round {server_round} with other arrays")
    shutil.rmtree(folder)
    return disk, found


SAVES = [(save_client, load_client), (save_server, load_server), (save_sums, load_sums)]


@pytest.mark.parametrize(("save", "read"), SAVES)
def test_a_power_cut_at_any_call_leaves_the_old_or_the_new(
    save: Write, read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, found = after_cut(tmp_path / "whole", save, read, 10**6, monkeypatch)
    assert found and set(found) == {5}, "after a save has returned, the new state is there"
    assert whole.trace.count("fsync") == 2 and whole.trace.count("replace") == 1
    assert ("unlink" in whole.trace) == (save is not save_sums)
    disks, rounds = 0, set[int | str]()
    for kill_at in range(1, whole.calls + 1):
        _, found = after_cut(tmp_path / str(kill_at), save, read, kill_at, monkeypatch)
        disks += len(found)
        rounds |= set(found)
    assert rounds == {4, 5} and disks > whole.calls


def test_without_syncing_the_layer_sees_a_state_that_is_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a simulation does without for speed; the digest names such a file."""

    def save(folder: Path, server_round: int, arrays: dict[str, Any]) -> None:
        save_client(folder, server_round, arrays, durable=False)

    _, found = after_cut(tmp_path / "whole", save, load_client, 10**6, monkeypatch)
    assert any("cannot be read" in str(f) for f in found)


# ---- real system calls -----------------------------------------------------------------------------------------------


def child(save: Write, folder: Path) -> tuple[int, int]:
    """Fork a writer that saves round 5 as soon as a byte comes through the pipe; return its id and the pipe."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(write_end)
            os.read(read_end, 1)
            save(folder, 5, NEW)
        finally:
            os._exit(0)
    os.close(read_end)
    return pid, write_end


def traced(save: Write, folder: Path, *options: str) -> str:
    """Run a save under strace; return the calls that strace printed."""
    log = folder.parent / "strace.log"
    pid, go = child(save, folder)
    tracer = subprocess.Popen(["strace", "-qq", "-p", str(pid), "-o", str(log), *options], stderr=subprocess.PIPE)
    end = time.monotonic() + 20
    while f"TracerPid:\t{tracer.pid}" not in Path(f"/proc/{pid}/status").read_text():
        if tracer.poll() is not None or time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pytest.skip(f"strace cannot trace here: {tracer.communicate()[1].decode()}")
        time.sleep(0.005)
    os.write(go, b"x")
    os.close(go)
    os.waitpid(pid, 0)
    tracer.wait(20)
    return log.read_text()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize(("save", "read"), SAVES)
def test_a_writer_killed_at_every_system_call(save: Write, read: Read, tmp_path: Path) -> None:
    def fresh(name: str) -> Path:
        folder = tmp_path / name / "f" / "3"
        folder.parent.mkdir(parents=True)
        for server_round in (2, 3, 4):
            save(folder, server_round, OLD)
        return folder

    calls: dict[str, int] = {}
    for line in traced(save, fresh("whole"), "-e", "trace=all").splitlines():
        name = line.split("(")[0]
        if name.isidentifier() and not name.startswith("exit"):
            calls[name] = calls.get(name, 0) + 1
    assert calls["fsync"] == 2 and {"rename", "renameat", "renameat2"} & calls.keys()
    rounds = []
    for name, count in calls.items():
        for k in range(1, count + 1):
            folder = fresh(f"{name}-{k}")
            said = traced(save, folder, "-e", f"trace={name}", "-e", f"inject={name}:signal=KILL:when={k}")
            server_round, arrays = read(folder)
            wanted = {4: OLD, 5: NEW}[server_round]
            assert all(np.array_equal(arrays[n], wanted[n]) for n in wanted), (name, k)
            assert "killed by SIGKILL" in said or server_round == 5, (name, k)
            rounds.append(server_round)
    assert len(rounds) == sum(calls.values()) and set(rounds) == {4, 5}
