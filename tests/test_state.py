"""Client state on disk: rounds, runs, methods, damage, and notes of the heads' norms."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fedapp import files
from fedapp.learning.state import (
    ClientStore,
    Expected,
    StateError,
    read_head_norms,
    read_safetensors,
    write_safetensors,
)
from fedapp.method import Arrays


def store(folder: Path, run: str = "aa", method: str = "m", warm: bool = False) -> ClientStore:
    return ClientStore(folder / "3", method, run, warm)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "3").iterdir())


def test_arrays_and_header_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "x.safetensors"
    arrays = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(7), "empty": np.zeros((0, 4))}
    write_safetensors(path, arrays, {"a": [1, None, "b"]})
    back, header = read_safetensors(path)
    assert header == {"a": [1, None, "b"]} and back.keys() == arrays.keys()
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype and back[name].shape == array.shape
        assert np.array_equal(back[name], array)
    assert [p.name for p in path.parent.iterdir()] == ["x.safetensors"]


def test_a_file_says_what_it_is(tmp_path: Path) -> None:
    path = store(tmp_path).save(4, {"x": np.ones(1)})
    assert path == tmp_path / "3" / "aa.000004.safetensors"
    place = {"federation": tmp_path.name, "client": "3"}
    header = read_safetensors(path)[1]
    assert 0 < int(str(header.pop("saved"))) <= time.time_ns()
    assert header == {"schema": 2, "method": "m", "run": "aa", **place, "round": 4, "expected": ""}


def test_the_newest_state_before_a_round_is_loaded_and_three_are_kept(tmp_path: Path) -> None:
    s = store(tmp_path)
    assert s.load(before=1) is None
    for server_round in (1, 2, 4, 5):
        s.save(server_round, {"x": np.full(3, server_round, np.float32)})
    assert names(tmp_path) == [f"aa.00000{r}.safetensors" for r in (2, 4, 5)]
    for before, found in ((9, 5), (6, 5), (5, 4), (4, 2), (3, 2)):
        stored = s.load(before=before)
        assert stored is not None and stored.round == found and stored.arrays["x"].tolist() == [found] * 3
        assert stored.path == tmp_path / "3" / f"aa.{found:06d}.safetensors"
    assert s.load(before=2) is None


def test_rounds_that_are_repeated_drop_what_was_rolled_back(tmp_path: Path) -> None:
    s = store(tmp_path)
    for server_round in (2, 5, 3):
        s.save(server_round, {"x": np.full(1, server_round)})
    assert names(tmp_path) == ["aa.000002.safetensors", "aa.000003.safetensors"]


def test_rounds_are_numbers_not_text(tmp_path: Path) -> None:
    s = store(tmp_path)
    for server_round in (999_998, 999_999):
        s.save(server_round, {"x": np.ones(1)})
    stored = s.load(before=1_000_000)
    assert stored is not None and stored.round == 999_999


def test_the_state_of_a_round_that_may_be_chosen_is_kept(tmp_path: Path) -> None:
    """This client took part in rounds 1, 3, 4, 6, 7 and 8. Round 5 leads: what it has from then is of round 4."""
    for server_round, leader in ((1, 0), (3, 2), (4, 2), (6, 5), (7, 5), (8, 5)):
        s = ClientStore(tmp_path / "3", "m", "aa", keep=leader)
        s.save(server_round, {"x": np.full(1, server_round)})
        kept = {1: [1], 3: [1, 3], 4: [1, 3, 4], 6: [3, 4, 6], 7: [4, 6, 7], 8: [4, 6, 7, 8]}[server_round]
        assert names(tmp_path) == [f"aa.{r:06d}.safetensors" for r in kept]
    stored = s.load(before=6)
    assert stored is not None and stored.round == 4


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    s = store(tmp_path)
    (tmp_path / "3").mkdir()
    for name in ("notes.txt", "aa.1.safetensors", "AA.000001.safetensors", "aa.000001.safetensors.bak"):
        (tmp_path / "3" / name).write_text("mine")
    assert s.load(before=5) is None
    for server_round in (1, 2, 3, 4):
        s.save(server_round, {"x": np.ones(1)})
    assert len(names(tmp_path)) == 7


def test_states_of_runs_side_by_side_stay_apart(tmp_path: Path) -> None:
    one, two = store(tmp_path, run="aa"), store(tmp_path, run="bb")
    for server_round in (1, 2, 3):
        one.save(server_round, {"x": np.full(1, 1.0)})
        two.save(server_round, {"x": np.full(1, 2.0)})
    first, second = one.load(4), two.load(4)
    assert first is not None and second is not None
    assert (first.arrays["x"][0], second.arrays["x"][0]) == (1.0, 2.0)
    assert len(names(tmp_path)) == 6
    assert store(tmp_path, run="cc").load(before=9) is None


def test_a_state_of_other_classes_is_refused(tmp_path: Path) -> None:
    def with_classes(names: str, run: str = "aa", warm: bool = False) -> ClientStore:
        return ClientStore(tmp_path / "3", "m", run, warm, about={"names of classes": names})

    with_classes("x").save(1, {"x": np.ones(1)})
    for run, warm in (("aa", False), ("bb", True)):
        assert with_classes("x", run, warm).load(before=2) is not None
        with pytest.raises(StateError, match="was made with other names of classes than there are now"):
            with_classes("y", run, warm).load(before=2)
    store(tmp_path).save(2, {"x": np.ones(1)})
    assert with_classes("y").load(before=3) is not None, "earlier versions do not say it"


def test_a_warm_start_does_not_go_by_the_times_of_files(tmp_path: Path) -> None:
    """`cp -r` gives copies times of their own, in any order."""
    files = [store(tmp_path, run=run).save(r, {"x": np.full(1, r)}) for run in ("bb", "aa") for r in (1, 2, 3)]
    for when, file in enumerate(reversed(files)):
        os.utime(file, ns=(when, when))
    stored = store(tmp_path, run="cc", warm=True).load(before=1)
    assert stored is not None and stored.path == files[-1] and stored.arrays["x"][0] == 3.0
    for file in files:
        arrays, header = read_safetensors(file)
        write_safetensors(file, arrays, {k: v for k, v in header.items() if k != "saved"})
        os.utime(file, ns=(1, 1))
    os.utime(files[0], ns=(2, 2))
    os.utime(files[2], ns=(2, 2))
    stored = store(tmp_path, run="cc", warm=True).load(before=1)
    assert stored is not None and stored.path == files[2], "without a time in files: the last round of the newest run"


def test_a_warm_start_takes_the_newest_state_of_another_run(tmp_path: Path) -> None:
    old = store(tmp_path, run="aa").save(8, {"x": np.full(1, 8.0)})
    new = store(tmp_path, run="bb").save(4, {"x": np.full(1, 4.0)})
    os.utime(old, ns=(1_000, 1_000))
    os.utime(new, ns=(2_000, 2_000))
    warm = store(tmp_path, run="cc", warm=True)
    stored = warm.load(before=1)
    assert stored is not None and stored.round == 0 and stored.path == new and stored.arrays["x"][0] == 4.0
    warm.save(1, {"x": np.full(1, 1.0)})
    assert len(names(tmp_path)) == 3, "with one state of its own, a resumed run may still need the old ones"
    own = warm.load(before=2)
    assert own is not None and own.round == 1 and own.arrays["x"][0] == 1.0
    back = warm.load(before=1)
    assert back is not None and back.round == 0 and back.path == new
    for server_round in (2, 3):
        warm.save(server_round, {"x": np.ones(1)})
    kept = [f"cc.00000{r}.safetensors" for r in (1, 2, 3)]
    assert names(tmp_path) == [old.name, new.name, *kept], "the other runs may be in progress, or may be resumed"
    assert store(tmp_path, run="dd", warm=False).load(before=1) is None


def test_a_state_of_another_method_or_schema_is_refused(tmp_path: Path) -> None:
    path = store(tmp_path).save(4, {"x": np.ones(1)})
    with pytest.raises(StateError, match=r"method is 'm', expected 'other'; use another state-dir"):
        store(tmp_path, method="other").load(before=9)
    write_safetensors(path, {"x": np.ones(1)}, {"schema": 99, "method": "m"})
    with pytest.raises(StateError, match="has schema 99, this version reads 2"):
        store(tmp_path).load(before=9)


@pytest.mark.parametrize("damage", ["cut", "no header", "no JSON", "absent"])
def test_damaged_state_is_an_error_not_a_fresh_start(damage: str, tmp_path: Path) -> None:
    path = store(tmp_path).save(1, {"x": np.ones(100)})
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:50])
    elif damage == "absent":
        path.unlink()
    else:
        save_file({"x": np.ones(1)}, path, metadata={} if damage == "no header" else {"fedapp": "{"})
    with pytest.raises(StateError, match=r"aa\.000001\.safetensors cannot be read .*delete it"):
        read_safetensors(path)


def test_a_file_of_fedapp_0_1_is_named(tmp_path: Path) -> None:
    save_file({"x": np.ones(1)}, tmp_path / "a.safetensors", metadata={"fedapp": "{}"})
    with pytest.raises(StateError, match=r"no digest: fedapp 0\.1 wrote it"):
        read_safetensors(tmp_path / "a.safetensors")


def test_a_damaged_state_is_ignored_where_neither_client_nor_server_needs_it(tmp_path: Path) -> None:
    before = store(tmp_path)
    path = before.save(1, {"x": np.ones(1)})
    path.write_bytes(path.read_bytes()[:-1])
    for binding, needed in ((True, True), (True, False), (False, True), (False, False)):
        again = ClientStore(path.parent, "m", "aa", expected=Expected(before.written, binding))
        if binding or needed:
            with pytest.raises(StateError, match="cannot be read"):
                again.load(2, needed=needed)
        else:
            assert again.load(2, needed=False) is None and "cannot be read" in again.ignored


def test_a_state_of_another_client_run_federation_or_round_is_refused(tmp_path: Path) -> None:
    """Files that were copied to another place say where they belong."""
    path = ClientStore(tmp_path / "a" / "3", "m", "aa").save(2, {"x": np.ones(1)})
    for federation, client, run, server_round, words in (
        ("a", "4", "aa", 2, "client is '3', expected '4'"),
        ("b", "3", "aa", 2, "federation is 'a', expected 'b'"),
        ("a", "3", "bb", 2, "run is 'aa', expected 'bb'"),
        ("a", "3", "aa", 3, "round is '2', expected '3'"),
    ):
        to = tmp_path / federation / client / f"{run}.{server_round:06d}.safetensors"
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, to)
        with pytest.raises(StateError, match=rf"{to.name}: {words}; .* put this client's own file back"):
            ClientStore(to.parent, "m", run).load(9)


def test_every_changed_bit_of_an_array_is_seen(tmp_path: Path) -> None:
    path = store(tmp_path).save(1, {"x": np.arange(4, dtype=np.float32), "n": np.arange(3), "b": np.array(True)})
    whole = path.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    assert len(whole) - begin == 4 * 4 + 3 * 8 + 1
    for byte in range(begin, len(whole)):
        path.write_bytes(whole[:byte] + bytes([whole[byte] ^ 1]) + whole[byte + 1 :])
        with pytest.raises(StateError, match=r"SHA-256 of '[xnb]' is .*, its header says"):
            store(tmp_path).load(9)
    path.write_bytes(whole)
    assert store(tmp_path).load(9) is not None


def test_a_digest_is_of_names_types_shapes_and_bytes_and_of_nothing_else(tmp_path: Path) -> None:
    x = np.arange(6, dtype=np.float32)
    one = write_safetensors(tmp_path / "a", {"x": x, "y": x[:0]}, {"round": 1})
    assert one == write_safetensors(tmp_path / "b", {"y": x[:0], "x": x.copy()}, {"round": 2}) and len(one) == 64
    others = [{"z": x, "y": x[:0]}, {"x": x.view(np.int32), "y": x[:0]}, {"x": x.reshape(2, 3), "y": x[:0]}, {"x": x}]
    assert len({one, *(write_safetensors(tmp_path / "c", o, {}) for o in others)}) == 5


def test_only_this_user_can_read_a_state(tmp_path: Path) -> None:
    (tmp_path / "3").mkdir(mode=0o755)
    path = store(tmp_path).save(1, {"x": np.ones(1)})
    deep = ClientStore(tmp_path / "new" / "7", "m", "aa").save(1, {"x": np.ones(1)})
    for p, mode in ((path, 0o600), (path.parent, 0o700), (deep.parent, 0o700), (deep.parent.parent, 0o700)):
        assert p.stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("durable", [True, False])
def test_a_node_removes_what_a_killed_writer_has_left(durable: bool, tmp_path: Path) -> None:
    parts = {".aa.000001.safetensors.x_y.part", ".personal.safetensors.x_y.part", ".tmpa1B2c3"}
    (tmp_path / "3").mkdir()
    for name in (*parts, ".lock"):
        (tmp_path / "3" / name).write_text("half")
    ClientStore(tmp_path / "3", "m", "aa", durable=durable).save(2, {"x": np.ones(1)})
    assert set(names(tmp_path)) == {".lock", "aa.000002.safetensors", *(() if durable else parts)}


def test_an_interrupted_write_leaves_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s = store(tmp_path)
    s.save(1, {"x": np.ones(3)})

    def broken(*args: object, **kwargs: object) -> None:
        Path(str(args[1])).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("fedapp.learning.state.save_file", broken)
    with pytest.raises(OSError, match="disk full"):
        s.save(2, {"x": np.zeros(3)})
    assert names(tmp_path) == ["aa.000001.safetensors"]


def test_norms_of_the_heads_rows_are_noted_round_by_round(tmp_path: Path) -> None:
    s = store(tmp_path)
    rounds, norms = read_head_norms(s.folder, "aa")
    assert rounds.shape == (0,) and norms.shape == (0, 0)
    for server_round in (1, 2, 4):
        s.note_head_norms(server_round, np.array([server_round, 10.0]))
    rounds, norms = read_head_norms(s.folder, "aa")
    assert rounds.tolist() == [1, 2, 4] and rounds.dtype == np.int64
    assert norms.tolist() == [[1, 10], [2, 10], [4, 10]] and norms.dtype == np.float32
    s.note_head_norms(2, np.array([7.0, 7.0]))  # a resumed run repeats round 2
    rounds, norms = read_head_norms(s.folder, "aa")
    assert rounds.tolist() == [1, 2] and norms.tolist() == [[1, 10], [7, 7]]
    assert read_safetensors(s.folder / "aa.head-norms")[1] == {"schema": 2, "run": "aa"}
    (s.folder / "aa.head-norms").write_bytes(b"damaged")
    s.note_head_norms(3, np.array([3.0, 3.0]))
    assert read_head_norms(s.folder, "aa")[0].tolist() == [3], "notes for figures stop no training"


def test_notes_go_with_the_states_of_their_run(tmp_path: Path) -> None:
    old, other, gone = (store(tmp_path, run=r) for r in ("aa", "bb", "cc"))
    for s in (old, other, gone):
        s.note_head_norms(1, np.ones(2))
        s.save(1, {"x": np.ones(1)})
    next((tmp_path / "3").glob("cc.0*")).unlink()
    old.note_head_norms(2, np.ones(2))
    assert [n for n in names(tmp_path) if n.endswith("head-norms")] == ["aa.head-norms", "bb.head-norms"]


def test_arrays_are_read_by_prefix(tmp_path: Path) -> None:
    s = store(tmp_path)
    path = s.save(1, {"own/a": np.ones(1), "own/b": np.zeros(1), "other": np.ones(1)})
    assert sorted(read_safetensors(path, "own/")[0]) == ["own/a", "own/b"]
    stored, whole = s.load(2, "own/"), s.load(2)
    assert stored is not None and sorted(stored.arrays) == ["own/a", "own/b"]
    assert whole is not None and len(whole.arrays) == 3
    warm = store(tmp_path, run="bb", warm=True).load(1, "own/")
    assert warm is not None and sorted(warm.arrays) == ["own/a", "own/b"]


def in_memory(path: Path) -> float:
    """Return the share of a file that the kernel keeps in memory."""
    with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY) as view:
        pages = (ctypes.c_ubyte * -(-len(view) // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(view)
        where, size = ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(view))
        assert ctypes.CDLL(None).mincore(where, size, pages) == 0
        del first
        return sum(page & 1 for page in pages) / len(pages)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what it keeps")
def test_the_kernel_keeps_no_large_file_that_nobody_reads_soon(tmp_path: Path) -> None:
    """The memory of a file that has arrived on the disk is free with the next file."""
    if subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True).stdout.strip() == "tmpfs":
        pytest.skip("the folder for tests is in memory")
    arrays = {"large": np.random.default_rng(0).random(1 << 20), "small": np.ones(9)}

    def saved(client: int, unread: list[str], arrays: Arrays = arrays) -> Path:
        path = ClientStore(tmp_path / str(client), "m", "aa").save(1, arrays, unread)
        files.synced(path)
        return path

    read = [saved(0, []), saved(1, ["small"]), saved(2, ["x"], {"x": np.ones(1 << 18)})]
    gone = saved(3, ["large"])
    saved(4, ["large"])
    assert [in_memory(path) for path in read] == [1.0, 1.0, 1.0] and in_memory(gone) < 0.2
    assert np.array_equal(read_safetensors(gone)[0]["large"], arrays["large"])
