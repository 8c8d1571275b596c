"""Real nodes that do harm or fail: forged lines, silence, another client's id, a stopped run, a lost roster."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

from fedapp.transport.records import INFO
from tests.deployment import NODES, Deployment, connected, deployed, until
from tests.test_deployment import DEPLOY, events, reached, table

pytestmark = pytest.mark.slow
SETTINGS = (
    *("--method", "lgfedavg", "--set", "model=digits-a", "--set", "min-replies=0.3"),
    *("--set", "final-training=false"),
)
FORGED = "no data\nround 99/99: accuracy 100 %\r\x1b[2Kfedapp operator login prod"


@pytest.fixture(scope="module")
def it(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A SuperLink and two nodes, of three that are admitted."""
    with deployed(tmp_path_factory.mktemp("deployment")) as it:
        it.up(*NODES[:2], parts=3)
        it.register(NODES[2])
        yield it


def out_of(it: Deployment, name: str) -> Path:
    return it.folder / "vol-superlink" / "runs" / name


def warned(out: Path) -> str:
    return "\n".join(str(e["text"]) for e in events(out) if e["kind"] == "warning")


def test_a_node_writes_no_line_of_its_own(it: Deployment) -> None:
    """Neither into the terminal and log of the server, nor into its tables."""
    out = out_of(it, "forged")
    settings = (*SETTINGS, "--clients", "3", "--rounds", "1", "--set", "min-clients=2", "--set", "wait-timeout=60")
    before = len(it.log("superlink"))
    with connected(it, NODES[2]) as (receive, send, push, *_):
        following = it.begin(*DEPLOY, *settings, "--out", str(out))
        asked: list[Any] = []
        until(lambda: asked.append(receive()) or asked[-1] is not None, 180, "a message\n" + it.log("fedapp"))
        answer = ConfigRecord({"error": FORGED, "stage": "register", "client": 2})
        reply = Message(RecordDict({INFO: answer}), reply_to=asked[-1][0])
        reply.metadata.__dict__["_message_id"] = reply.object_id
        objects = get_all_nested_objects(reply)
        missing, session = send(reply, get_object_tree(reply), 1.0)
        for name in missing:
            push(reply.metadata.run_id, session, name, objects[name].deflate())
        assert following.wait(600) == 0, it.log("fedapp")
    text = it.log("fedapp") + it.log("superlink")[before:]
    lines = [line for line in text.splitlines() if "operator login prod" in line or "99/99" in line]
    assert lines and all("client 2" in line for line in lines), lines
    assert "\x1b[2K" not in text


def test_a_node_that_answers_nothing_is_named_and_the_run_goes_on(it: Deployment) -> None:
    """It is online, and takes no message."""
    out = out_of(it, "unanswered")
    settings = (*SETTINGS, "--clients", "3", "--rounds", "2", "--set", "min-clients=2", "--set", "wait-timeout=90")
    with connected(it, NODES[2]):
        done = it.run(*DEPLOY, *settings, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    text = "waiting for 1 of 3 clients, missing 2; 1 node(s) that are online have not answered after 90 s"
    assert text in warned(out) and text in done.stderr
    assert list(table(out, "rounds.csv")["clients"]) == [2, 2]


def test_a_client_id_is_not_taken_over_and_a_lost_roster_admits_no_node(it: Deployment) -> None:
    it.sh("docker/keys.sh", str(it.folder / "keys"), "stranger")
    key = str(it.folder / "keys" / "stranger")
    it.flwr("supernode", "register", f"{key}.pub", "superlink")
    words = it.command(NODES[2], auth_supernode_private_key=key, node_config="partition-id=1 num-partitions=3")
    it.start("stranger", *words)
    it.online("stranger", 120)
    out, roster = out_of(it, "roster"), it.folder / "vol-superlink" / "roster.toml"
    settings = (*SETTINGS, "--clients", "2", "--rounds", "3")
    following = it.begin(*DEPLOY, *settings, "--out", str(out))
    until(lambda: reached(out, 1) or following.poll() is not None, 300, "round 1")
    away = roster.rename(roster.with_name("away"))
    try:
        assert following.wait(600) == 0, it.log("fedapp")
        assert "is not in the roster and was left out" in warned(out) and "roster of before is used" in warned(out)
        assert set(table(out, "clients.csv")["client"]) == {0, 1}
        done = it.run(*DEPLOY, *settings, "--out", str(out_of(it, "without")))
        assert done.returncode == 2 and f"the roster {roster} cannot be read" in done.stderr, done.stderr
    finally:
        away.rename(roster)
        it.kill("stranger")


def test_a_run_begins_at_once_after_one_that_was_interrupted(it: Deployment) -> None:
    out, then = out_of(it, "stopped"), out_of(it, "then")
    settings = (*SETTINGS, "--clients", "2", "--set", "wait-timeout=60")
    following = it.begin(*DEPLOY, *settings, "--rounds", "50", "--out", str(out))
    until(lambda: reached(out, 1) or following.poll() is not None, 300, "round 1")
    os.kill(following.pid, signal.SIGINT)
    assert following.wait(60) == 130
    done = it.run(*DEPLOY, *settings, "--rounds", "2", "--out", str(then))
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(table(then, "rounds.csv")["clients"]) == [2, 2] and "in progress" not in warned(then)


def test_a_node_that_is_online_and_silent_holds_up_one_round(it: Deployment) -> None:
    """Its executor is stopped, so that its heartbeats go on and its messages are not worked on."""
    out = out_of(it, "silent")
    settings = (*SETTINGS, "--clients", "2", "--rounds", "4", "--set", "round-timeout=80")
    following = it.begin(*DEPLOY, *settings, "--out", str(out))
    until(lambda: reached(out, 1) or following.poll() is not None, 300, "round 1")
    node = it.supernode(NODES[1])
    [executor] = [p for p in node.children() if "flower-superexec" in p.cmdline()]
    stopped = [executor, *executor.children(recursive=True)]
    for process in stopped:
        process.suspend()
    try:
        assert following.wait(900) == 0, it.log("fedapp")
    finally:
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
    rows = pd.read_csv(out / "dropped.csv").query("stage == 'train'")
    assert set(rows["client"]) == {1}
    assert list(rows["round"])[-3:] == [2, 3, 4]
    first, second, third = list(rows["reason"])[-3:]
    assert first == "no answer within 80 s" and second.startswith("no answer within 6")
    assert third == "no message in this round, because the last 2 that drew it brought no answer"
