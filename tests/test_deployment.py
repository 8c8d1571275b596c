"""Real SuperLink and SuperNodes on loopback, with TLS and node keys: docker/compose.yml without containers."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from fedapp import registry
from fedapp.cli import app, main
from fedapp.engines.local import run
from fedapp.errors import BadRequest
from fedapp.transport.boundary import FACTS_SIZE
from tests.deployment import NODES, Deployment, connected, deployed, free_port, until
from tests.liars import Forge, forged, often

MODELS = "digits-a,digits-b,digits-c"
HEADS = (
    *("fedper", "fedrep", "fedbabu", "fedrod", "fedpac", "ditto", "scaffold", "feddbe", "fedetf"),
    *("fedncm", "fed3r", "lda", "qda", "fedcof", "fedtgp", "pfedfda", "fedghg", "pccvr"),
)
"""Methods with a head of their own at each client or one from statistics, beside the four of the README."""
DEPLOY = ("run", "--engine", "deploy", "--superlink", "superlink")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A SuperLink and three registered nodes with data of their own."""
    with deployed(tmp_path_factory.mktemp("deployment")) as it:
        it.up(*NODES)
        yield it


def table(folder: Path, name: str) -> pd.DataFrame:
    frame = pd.read_csv(folder / name)
    return frame[[c for c in frame if not c.endswith("seconds")]]


def same(real: Path, simulated: Path, *names: str, without: str = "\0") -> None:
    """Tables are equal to the last bit, apart from times and columns that contain a word of `without`."""
    for name in names:
        a, b = table(real, name), table(simulated, name)
        columns = [c for c in b if not any(word in c for word in without.split())]
        pd.testing.assert_frame_equal(a[columns], b[columns], check_exact=True, obj=name)


@pytest.mark.full
def test_fedclassavg_with_three_architectures_equals_the_simulation(three: Deployment, tmp_path: Path) -> None:
    settings = ("--method", "fedclassavg", "--clients", "3", "--rounds", "2", "--seed", "0", "--set", f"model={MODELS}")
    out = three.folder / "vol-superlink" / "runs" / "heads"
    done = three.run(*DEPLOY, *settings, "--out", str(out))
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "round 2/2" in done.stderr and "fedclassavg on digits, 3 clients, 2 rounds" in done.stdout
    assert json.loads((out / "summary.json").read_text())["ok"] is True
    run(method="fedclassavg", clients=3, rounds=2, seed=0, model=MODELS, out=tmp_path / "simulated")
    # The union of all clients' test images exists in simulation only.
    same(out, tmp_path / "simulated", "rounds.csv", "clients.csv", "final.csv", without="balanced")
    for k, name in enumerate(NODES):
        assert (three.folder / f"vol-{name}" / "state" / "run" / str(k) / "personal.safetensors").is_file()


@pytest.mark.full
def test_ccvr_on_one_architecture_equals_the_simulation(three: Deployment, tmp_path: Path) -> None:
    settings = ("--method", "ccvr", "--clients", "3", "--rounds", "1", "--seed", "0", "--set", "model=digits-a")
    settings = (*settings, "--track", "tensorboard")
    mirror = tmp_path / "mirror"
    done = three.run(*DEPLOY, *settings, "--out", str(mirror))
    assert done.returncode == 0, done.stdout + done.stderr
    # The SuperLink's owner decides where runs lie; whoever submits gets a mirror.
    out = three.folder / "vol-superlink" / "runs" / "mirror"
    assert str(out) in done.stdout and json.loads((mirror / "summary.json").read_text())["ok"] is True
    pd.testing.assert_frame_equal(table(out, "rounds.csv"), table(mirror, "rounds.csv"), check_dtype=False)
    run(method="ccvr", clients=3, rounds=1, seed=0, model="digits-a", out=tmp_path / "simulated")
    same(out, tmp_path / "simulated", "clients.csv", "final.csv", without="balanced")
    events = EventAccumulator(str(mirror / "tensorboard")).Reload()
    for client, score in zip(*table(out, "clients.csv")[["client", "trained_accuracy"]].to_numpy().T, strict=True):
        [point] = events.Scalars(f"client_trained_accuracy/{client:.0f}")
        assert point.step == 1 and point.value == pytest.approx(score, rel=1e-6)
    assert "this machine has no models of the run, so they are not tracked" in done.stderr
    calibration = json.loads((out / "summary.json").read_text())["calibration"]
    scored = table(tmp_path / "simulated", "final.csv")["received_accuracy"].mean()
    assert calibration["after"] == pytest.approx(scored, abs=0) and calibration["score"].startswith("received")


@pytest.mark.slow
@pytest.mark.parametrize("method", HEADS)
def test_a_method_of_heads_equals_the_simulation(method: str, three: Deployment, tmp_path: Path) -> None:
    """Also what is asked for after the last round: statistics, a second model, the head alone."""
    model = MODELS if registry.get(method).heterogeneous else "digits-a"
    settings = ("--method", method, "--clients", "3", "--rounds", "2", "--seed", "0", "--set", f"model={model}")
    out = three.folder / "vol-superlink" / "runs" / method
    done = three.run(*DEPLOY, *settings, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    run(method=method, clients=3, rounds=2, seed=0, model=model, out=tmp_path / "simulated")
    # The union of all clients' test images exists in simulation only.
    same(out, tmp_path / "simulated", "rounds.csv", "clients.csv", "final.csv", without="balanced global")


@pytest.mark.full
def test_the_node_uses_its_model(three: Deployment, tmp_path: Path) -> None:
    model = three.folder / "vol-supernode-1" / "state" / "run" / "1" / "personal.safetensors"
    with np.load(three.folder / "sites" / "site1" / "data.npz") as data:
        x, y = data["x_test"][:40, :, :, 0], data["y_test"][:40]
    pictures = [tmp_path / f"{i}.png" for i in range(len(x))]
    for path, image in zip(pictures, x, strict=True):
        Image.fromarray(np.rint(image * (255 / 16)).astype(np.uint8)).save(path)
    done = three.run("predict", "--model", str(model), "--top", "1", *map(str, pictures))
    assert done.returncode == 0, done.stderr
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert [r[0] for r in rows] == [str(p) for p in pictures]
    assert np.mean([r[1] == str(label) for r, label in zip(rows, y, strict=True)]) > 0.8


@pytest.mark.full
def test_the_check_finds_nothing_wrong(three: Deployment) -> None:
    folder = three.folder
    config = f"client-id=0 data-path='{folder}/sites/site0' model='digits-a' state-dir='{folder}/vol-supernode-0/state'"
    done = three.run(
        "deploy", "check", "--superlink", "superlink", "--certificate", f"{folder}/certs/server.crt",
        "--key", f"{folder}/keys/supernode-0", "--node-config", config,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line.split("\t")[1]: line.split("\t") for line in done.stdout.splitlines()}
    assert {r[0] for r in rows.values()} == {"ok"}, done.stdout
    assert "3 online of 3" in rows["nodes"][2] and "secp384r1" in rows["key"][2] and "flwr there" in rows
    assert "487 rows to train, 162 to test" in rows["data"][2]


def ends(three: Deployment, name: str, seconds: float = 60, **changes: str) -> str:
    """Start a SuperNode that must not come in; returns its log once it has given up, or been refused for a while."""
    words = three.command("supernode-0", **changes)
    process = three.start(name, "flower-supernode", *words[1:], "--max-retries", "1")
    until(lambda: process.poll() is not None, seconds, f"{name} ends\n{three.log(name)[-1500:]}")
    assert process.returncode != 0 and "SuperNode ID" not in three.log(name)
    return three.log(name)


def check(*arguments: str) -> str:
    """Return the line that failed."""
    done = CliRunner().invoke(app, ["deploy", "check", *arguments])
    assert done.exit_code == 1, done.output
    return next(line for line in done.output.splitlines() if line.startswith("fail"))


@pytest.mark.full
def test_a_node_without_a_registered_key_is_refused(three: Deployment) -> None:
    three.sh("docker/keys.sh", str(three.folder / "keys"), "stranger")
    log = ends(three, "stranger", auth_supernode_private_key=str(three.folder / "keys" / "stranger"))
    assert "305" in log and "Failed to activate SuperNode: its key is not registered" in log


@pytest.mark.full
def test_a_foreign_authority_is_refused(three: Deployment) -> None:
    three.sh("docker/certs.sh", str(three.folder / "foreign"), "localhost", "127.0.0.1")
    ca = str(three.folder / "foreign" / "ca.crt")
    log = ends(three, "foreigner", root_certificates=ca)
    assert "CERTIFICATE_VERIFY_FAILED" in log or "certificate verify failed" in log
    row = check("--address", f"127.0.0.1:{three.port}", "--root-certificates", ca)
    assert "TLS" in row and "take the ca.crt that signed" in row


@pytest.mark.full
def test_an_expired_certificate_is_refused(three: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = three.folder / "expired"
    folder.mkdir()
    for name in ("ca.key", "ca.crt"):
        (folder / name).write_bytes((three.folder / "certs" / name).read_bytes())
    expire(folder)
    port = free_port()
    files = {"ssl_certfile": str(folder / "server.crt"), "ssl_keyfile": str(folder / "server.key")}
    guarded = three.command("superlink", public="127.0.0.1:0", private=f"127.0.0.1:{port}", **files)
    late = three.start("late", *guarded)
    until(lambda: late.poll() is not None, 60, "its own helper would not trust it\n" + three.log("late")[-1500:])
    assert late.returncode == 2 and "certificate has expired" in three.log("late")
    assert "Traceback" not in three.log("late")
    plain = [word for word in guarded[guarded.index("--ssl-ca-certfile") :] if not word.endswith(".db")][:-1]
    three.start("plain", "flower-superlink", "--port", str(port), "--enable-supernode-auth", *plain)
    until(lambda: "startup complete" in three.log("plain"), 60, "the second SuperLink\n" + three.log("plain")[-1500:])
    log = ends(three, "punctual", superlink=f"127.0.0.1:{port}")
    assert "certificate has expired" in log
    row = check("--address", f"127.0.0.1:{port}", "--root-certificates", str(folder / "ca.crt"))
    assert "expired" in row and "docker/certs.sh" in row
    assert "expired" in check("--certificate", str(folder / "server.crt"))


def expire(folder: Path) -> None:
    """Write a server certificate of the authority in `folder` that ended yesterday."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    signer = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=30))
        .not_valid_after(now - datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .sign(signer, hashes.SHA256())
    )
    (folder / "server.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "server.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


def test_bad_requests_are_found_before_anything_is_submitted(
    three: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLWR_HOME", three.env("superlink")["FLWR_HOME"])
    for arguments, says in (
        (("--superlink", "prod"), "it has superlink"),
        (("--superlink", "superlink", "--set", "lr=fast"), "must be a number"),
        (("--superlink", "superlink", "--client-cpus", "1"), "--engine ray"),
        (("--superlink", "superlink", "--resume", str(tmp_path)), "no run to resume"),
    ):
        monkeypatch.setattr(sys, "argv", ["fedapp", "run", "--engine", "deploy", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        errors = capsys.readouterr().err
        assert ended.value.code == 2 and says in errors and "Traceback" not in errors, errors


def test_nobody_there_is_a_bad_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedapp.engines import deploy

    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    with pytest.raises(BadRequest, match=r"config\.toml does not exist: write it with\n.*\naddress = .localhost:8001"):
        deploy.connection("superlink")
    (tmp_path / "config.toml").write_text(f'[superlink.a]\naddress = "127.0.0.1:{free_port()}"\ninsecure = true\n'
                                          '[superlink.b]\naddress = ":local:"\n')  # fmt: skip
    with pytest.raises(BadRequest, match="it has a; give one"):
        deploy.connection("c")
    with pytest.raises(BadRequest, match="is for simulations"):
        deploy.connection("b")
    with pytest.raises(BadRequest, match="did not accept the run"):
        deploy.run({"method": "local"}, tmp_path / "out", "a")


# ---- slow: what dies, and what comes back --------------------------------------------------------------------------


def events(out: Path) -> list[dict[str, Any]]:
    path = out / "progress.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def reached(out: Path, server_round: int) -> bool:
    return any(e["kind"] == "round" and e["round"] == server_round for e in events(out))


@pytest.mark.slow
def test_a_killed_node_and_a_killed_superlink(tmp_path: Path) -> None:
    limit = 45  # seconds; the SuperLink misses two heartbeats 30 to 60 seconds after a node was killed
    with deployed(tmp_path / "deployment") as it:
        it.up(*NODES, parts=3, restart_after=5)
        out = it.folder / "vol-superlink" / "runs" / "killed"
        settings = ("--method", "fedclassavg", "--clients", "3", "--rounds", "12", "--set", f"model={MODELS}")
        following = it.begin(*DEPLOY, *settings, "--set", f"round-timeout={limit}", "--out", str(out))
        until(lambda: reached(out, 1), 180, "round 1\n" + it.log("fedapp"))

        # A node is killed in round 2: the round ends at the limit without it, or when its heartbeats are missed.
        it.supernode("supernode-1").kill()
        began = time.monotonic()
        until(lambda: reached(out, 2), limit + 60, "round 2")
        assert time.monotonic() - began < limit + 30
        first, second = [e for e in events(out) if e["kind"] == "round"][:2]
        assert (first["clients"], second["clients"], second["dropped"]) == (3, 2, 1)
        reasons = [e["reason"] for e in events(out) if e["kind"] == "dropped" and e["round"] == 2]
        assert len(reasons) == 1
        assert reasons[0] == f"no answer within {limit} s" or "failed to report a heartbeat" in reasons[0]
        state = it.folder / "vol-supernode-1" / "state" / "run" / "1"
        assert list(state.glob("*.000001.safetensors"))

        # It comes back once the SuperLink lets it in, and goes on with its own model.
        until(lambda: it.log("supernode-1").count("SuperNode ID") == 2, 180, "supernode-1 is back")
        until(lambda: reached(out, 3), limit + 60, "round 3")

        # The SuperLink is killed in a later round: the run has failed, and the command reports it.
        it.kill("superlink")
        assert following.wait(120) == 1
        assert "the run failed" in it.log("fedapp") and f"--resume {out}" in it.log("fedapp")
        assert json.loads((out / "summary.json").read_text())["ok"] is False

        # Registrations survive; a resumed run goes on from the last complete round.
        last = max(e["round"] for e in events(out) if e["kind"] == "round")
        assert last < 12, "the SuperLink was killed before the end"
        it.superlink()
        until(lambda: "3 online of 3" in it.run("deploy", "check", "--superlink", "superlink").stdout, 180, "all nodes")
        done = it.run(*DEPLOY, "--resume", str(out))
        print(it.log("fedapp"), done.stdout, done.stderr)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "round 12/12" in done.stderr and f"round {last}/12" not in done.stderr
        rounds = table(out, "rounds.csv")
        assert list(rounds["round"]) == list(range(1, 13)) and list(rounds["clients"])[::11] == [3, 3]
        clients = table(out, "clients.csv")
        back = clients[(clients["client"] == 1) & (clients["round"] == 12)]["received_accuracy"].iloc[0]
        assert back > 0.5, "a new body under the averaged head would guess"


@pytest.mark.slow
def test_a_run_resumed_after_its_superlink_was_killed_equals_the_simulation(tmp_path: Path) -> None:
    with deployed(tmp_path / "deployment") as it:
        it.up(*NODES, parts=3)
        out = it.folder / "vol-superlink" / "runs" / "killed"
        settings = ("--method", "fedclassavg", "--clients", "3", "--rounds", "2", "--set", f"model={MODELS}")
        following = it.begin(*DEPLOY, *settings, "--out", str(out))
        until(lambda: reached(out, 1), 180, "round 1\n" + it.log("fedapp"))
        it.kill("superlink")
        it.superlink()
        assert following.wait(120) == 1, it.log("fedapp")
        done = it.run(*DEPLOY, "--resume", str(out))
        print(it.log("fedapp"), done.stdout, done.stderr)
        assert done.returncode == 0, done.stdout + done.stderr
        run(method="fedclassavg", clients=3, rounds=2, model=MODELS, out=tmp_path / "simulated")
        same(out, tmp_path / "simulated", "rounds.csv", "clients.csv", "final.csv")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["locked", "full"])
def test_a_database_that_takes_no_writes_for_a_while_ends_nothing(how: str, tmp_path: Path) -> None:
    names = NODES[:2]
    with deployed(tmp_path / "deployment", nodes=names) as it:
        it.up(*names, parts=2)
        volume = it.folder / "vol-superlink"
        out = volume / "runs" / how
        settings = ("--method", "fedavg", "--clients", "2", "--rounds", "4", "--set", "model=digits-a")
        following = it.begin(*DEPLOY, *settings, "--set", "min-replies=1", "--out", str(out))
        until(lambda: reached(out, 1), 180, "round 1\n" + it.log("fedapp"))
        with (locked if how == "locked" else full)(volume / "superlink.db", it.processes["superlink"].pid):
            time.sleep(45)
        assert following.wait(300) == 0, it.log("fedapp") + it.log("superlink")[-3000:]
        rounds = table(out, "rounds.csv")
        assert list(rounds["clients"]) == [2] * 4 and list(rounds["dropped"]) == [0] * 4, "no reply is lost"
        # The nodes and the helper that starts runs are still there: a second run needs them.
        assert [it.processes[name].poll() for name in ("superlink", *names)] == [None] * 3
        assert [it.log(name).count("SuperNode ID") for name in names] == [1, 1]
        done = it.run(*DEPLOY, *settings, "--out", str(volume / "runs" / "second"))
        assert done.returncode == 0, done.stdout + done.stderr


@contextlib.contextmanager
def locked(database: Path, pid: int) -> Iterator[None]:
    """Keep everybody else from writing to a database."""
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield


@contextlib.contextmanager
def full(database: Path, pid: int) -> Iterator[None]:
    """Let no file of a process grow, as on a full disk."""
    process = psutil.Process(pid)
    before = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        process.rlimit(psutil.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_a_node_that_cannot_take_part_ends_the_run_before_training(tmp_path: Path) -> None:
    with deployed(tmp_path / "deployment", nodes=("supernode-0",)) as it:
        it.superlink()
        it.register("supernode-0")
        it.node("supernode-0", node_config="client-id=3 data-path='/does/not/exist'")
        it.online("supernode-0")
        settings = ("--method", "fedavg", "--clients", "1", "--set", "wait-timeout=20")  # client 0 might still come
        done = it.run(*DEPLOY, *settings, "--out", str(tmp_path / "out"))
        assert done.returncode == 2 and "client 3 cannot take part" in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
        lines = [line for line in it.log("supernode-0").splitlines() if "cannot take part" in line]
        assert len(lines) == 1 and "data-path /does/not/exist does not exist on this node" in lines[0]


@pytest.mark.slow
def test_an_interrupted_run_is_stopped(tmp_path: Path) -> None:
    import signal

    with deployed(tmp_path / "deployment", nodes=("supernode-0",)) as it:
        it.superlink()
        following = it.begin(*DEPLOY, "--method", "local", "--clients", "1", "--out", str(tmp_path / "out"))
        until(lambda: "submitted" in it.log("fedapp"), 90, "submitted")
        time.sleep(3)
        os.kill(following.pid, signal.SIGINT)
        assert following.wait(60) == 130
        done = subprocess.run(
            [str(Path(sys.executable).parent / "flwr"), "list", "superlink", "--format", "json"],
            env=it.env("superlink"), capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert json.loads(done.stdout[done.stdout.index("{") :])["runs"][0]["status"] == "finished:stopped"


@pytest.mark.slow
def test_a_reply_that_is_no_message_ends_nothing(tmp_path: Path) -> None:
    """Nor one of 4 MiB which says that it has 400 GiB: the run goes on with the third node."""
    with deployed(tmp_path / "deployment") as it:
        it.up(NODES[0], parts=3)
        it.register(*NODES[1:])
        out = it.folder / "vol-superlink" / "runs" / "forged"
        settings = ("--method", "lgfedavg", "--clients", "3", "--rounds", "1", "--set", f"model={MODELS}")
        changes: dict[str, Forge] = {
            NODES[1]: lambda kind, body: b"garbage" if kind == "RecordDict" else body,
            NODES[2]: often(100_000),
        }
        with contextlib.ExitStack() as stack, told():
            calls = {name: stack.enter_context(connected(it, name)) for name in changes}
            following = it.begin(*DEPLOY, *settings, "--set", "min-clients=1", "--out", str(out))
            noise = {name: ArrayRecord([np.frombuffer(os.urandom(4 << 20), np.uint8)]) for name in changes}
            contents = {name: RecordDict({"arrays": arrays}) for name, arrays in noise.items()}
            foreseen: list[str] = []
            for name, (receive, send, push, *_) in calls.items():
                asked: list[Any] = []
                until(lambda: asked.append(receive()) or asked[-1] is not None, 180, "a message\n" + it.log("fedapp"))  # noqa: B023
                reply = Message(contents[name], reply_to=asked[-1][0])
                pieces = forged(reply, changes[name])
                *parts, root = pieces
                reply.metadata.__dict__["_message_id"] = root
                tree = ObjectTree(object_id=root, children=[ObjectTree(object_id=part) for part in parts])
                if name == NODES[1]:  # it names an object of the other one too, with a part that it does not have
                    other = forged(Message(contents[NODES[2]], reply_to=asked[-1][0]), changes[NODES[2]])
                    foreseen = [next(part for part in other if part not in parts)]  # the bytes of its array
                    tree.children.extend(ObjectTree(object_id=part, children=tree.children[:1]) for part in foreseen)
                    missing, session = send(reply, tree, 1.0)
                    assert foreseen and set(missing) == {*pieces, *foreseen}
                else:
                    missing, session = send(reply, tree, 1.0)
                    assert set(foreseen) < set(missing) == set(pieces)
                for part, body in pieces.items():
                    push(reply.metadata.run_id, session, part, body)
            assert following.wait(600) == 0, it.log("fedapp") + it.log("superlink")[-3000:]
        warned = [e["text"] for e in events(out) if e["kind"] == "warning" and "left out" in e["text"]]
        assert len(warned) == 2 and set(table(out, "clients.csv")["client"]) == {0}
        assert any("its reply is not a message" in text for text in warned), warned
        assert any("the arrays of its reply have more than" in text for text in warned)


@pytest.mark.slow
def test_a_node_that_sends_without_end_fills_nothing(tmp_path: Path) -> None:
    """Memory is what the SuperLink holds at most beyond the most that it holds for one reply of the allowed size.

    That is what the server expects of the run's model, far below the listener's own limit of 256 MiB. What the node did
    not send when it registered, it may send now.
    """
    allowed, piece = FACTS_SIZE, 1 << 20
    with deployed(tmp_path / "deployment") as it:
        it.up(*NODES[:2], parts=3)
        it.register(NODES[2])
        database = it.folder / "vol-superlink" / "superlink.db"
        superlink = psutil.Process(it.processes["superlink"].pid)

        def held() -> int:
            found = superlink.memory_info()
            return int(found.rss - found.shared)  # SQLite maps its file, whose pages the system keeps as it likes

        def written() -> int:
            return sum(f.stat().st_size for f in database.parent.glob(f"{database.name}*"))

        settings = ("--clients", "3", "--rounds", "1", "--set", f"model={MODELS}", "--set", "min-clients=2")
        settings = (*settings, "--set", "wait-timeout=120", "--method", "lgfedavg")

        def exchange(out: Path, calls: Any, replies: int, pieces: int, at_once: int) -> tuple[int, int]:
            """Begin a run and answer its first message that often; return the bytes taken, and the most held."""
            receive, send, push, *_ = calls
            asked: list[Any] = []
            following = it.begin(*DEPLOY, *settings, "--out", str(out))
            until(lambda: asked.append(receive()) or asked[-1] is not None, 180, "a message\n" + it.log("fedapp"))
            most, over = held(), threading.Event()

            def watch() -> None:
                nonlocal most
                while not over.wait(0.01):
                    most = max(most, held())

            watching = threading.Thread(target=watch)
            watching.start()
            taken = 0
            for _ in range(replies):
                arrays = [np.frombuffer(os.urandom(piece), np.uint8) for _ in range(pieces)]
                reply = Message(RecordDict({"arrays": ArrayRecord(arrays)}), reply_to=asked[-1][0])
                reply.metadata.__dict__["_message_id"] = reply.object_id
                objects = get_all_nested_objects(reply)

                def sent(body: bytes, do: Any) -> int:
                    with contextlib.suppress(Exception):
                        do()
                        return len(body)
                    return 0

                with contextlib.suppress(Exception):
                    missing, session = send(reply, get_object_tree(reply), 1.0)
                    bodies = {name: objects[name].deflate() for name in missing}
                    if replies > 1:  # it never becomes complete, so that the SuperLink waits for the rest
                        del bodies[min(bodies, key=lambda name: len(bodies[name]))]
                    with ThreadPoolExecutor(at_once) as pool:
                        run_id = reply.metadata.run_id
                        done = [
                            pool.submit(sent, body, partial(push, run_id, session, name, body))
                            for name, body in bodies.items()
                        ]
                    taken += sum(d.result() for d in done)
            over.set()
            watching.join()
            assert following.wait(600) == 0, it.log("fedapp") + it.log("superlink")[-3000:]
            assert set(table(out, "clients.csv")["client"]) == {0, 1}
            return taken, most

        figures: dict[str, int] = {}
        with connected(it, NODES[2]) as calls, told():  # it keeps errors to itself
            runs = it.folder / "vol-superlink" / "runs"
            start = held()
            one, peak = exchange(runs / "honest", calls, 1, allowed // piece - 1, 2)
            disk = written()
            taken, most = exchange(runs / "flooded", calls, 2, 5 * allowed // piece, 24)
            figures = {"start": start, "one reply": peak, "without end": most, "bytes taken": taken}
        assert figures, it.log("fedapp")
        print({name: f"{value / 2**20:.1f} MiB" for name, value in figures.items()}, written() - disk)
        assert one > allowed - 2 * piece and taken <= 2 * allowed - one, "it wanted to send 10 times what it may"
        assert most - peak < 2 * allowed and written() - disk < 3 * allowed
        assert f"sent more than {allowed} bytes" in it.log("superlink")


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Print an error before somebody keeps it to himself."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        raise
