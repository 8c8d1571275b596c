"""A Flower app of its own for the tests of launching, and what they look at processes with."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

PYPROJECT = """
[project]
name = "toyapp"
version = "0.1.0"
description = "A server that asks its clients who they are"
license = "Apache-2.0"
dependencies = ["flwr[simulation]"]
[tool.flwr.app]
publisher = "fedapp"
[tool.flwr.app.components]
serverapp = "toyapp.server:app"
clientapp = "toyapp.client:app"
[tool.flwr.app.config]
out = ""
mode = "good"
text-value = ""
some-flag = false
whole = 1
method.mu = 0.5
"""

CLIENT = """
import os
import time
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.query()
def query(msg, context):
    print("client speaking", flush=True)
    time.sleep(msg.content["ask"]["sleep"])
    facts = {"pid": os.getpid(), "parent": os.getppid(), "partition": int(context.node_config["partition-id"])}
    return Message(RecordDict({"facts": ConfigRecord(facts)}), reply_to=msg)
"""

SERVER = """
import json
import os
import time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    config = dict(context.run_config)
    out = Path(config["out"])
    out.mkdir(parents=True, exist_ok=True)

    def emit(**event):
        with (out / "progress.jsonl").open("a") as file:
            file.write(json.dumps(event) + "\\n")

    environment = {key: os.environ.get(key) for key in ("FLWR_TELEMETRY_ENABLED", "FLWR_HOME", "PATH", "RAY_ADDRESS")}
    emit(event="start", config=config, cwd=os.getcwd(), file=__file__, pid=os.getpid(), environment=environment)
    mode = config["mode"]
    if mode == "raise":
        raise ValueError("boom in the server")
    if mode == "error":
        error = {"client": 3, "round": 1, "stage": "train", "message": "boom", "traceback": "Traceback ..."}
        (out / "error.json").write_text(json.dumps(error))
    if mode in ("error", "die"):
        os._exit(9)
    while not list(grid.get_node_ids()):
        time.sleep(0.05)
    content = RecordDict({"ask": ConfigRecord({"sleep": {"hang": 3600.0, "slow": 0.5}.get(mode, 0.0)})})
    for number in (1, 2):
        emit(event="round", round=number)
        nodes = grid.get_node_ids()
        messages = [Message(content, dst_node_id=node, message_type="query", group_id=str(number)) for node in nodes]
        replies = [dict(reply.content["facts"]) for reply in grid.send_and_receive(messages)]
        emit(event="replies", round=number, replies=replies)
    (out / "summary.json").write_text(json.dumps({"ok": mode in ("good", "slow")}))
"""


def make_toy(folder: Path) -> Path:
    (folder / "toyapp").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "toyapp" / "__init__.py").touch()
    (folder / "toyapp" / "client.py").write_text(CLIENT)
    (folder / "toyapp" / "server.py").write_text(SERVER)
    return folder


def ignore(event: dict[str, Any]) -> None:
    pass


def running(pids: set[int]) -> set[int]:
    alive = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                alive.add(pid)
    return alive


def wait_for(condition: Callable[[], Any], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return bool(condition())
