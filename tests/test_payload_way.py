"""The way of a payload and of its reply: few functions of ours pass it on, as a trace of a round shows.

A function is on its way if it takes, returns or yields all arrays together, in any of their forms; checks of a whole
reply are among them, and functions of one array are not.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array as FlowerArray
from flwr.app import Message

from clients.base import FedClient
from fedapp.client_app import app
from fedapp.client_steps import Outcome
from fedapp.config import RunConfig, from_flat
from fedapp.method import Arrays, Payload, Reply, ServerState
from fedapp.server_app import serve
from fedapp.transport.boundary import Good
from fedapp.transport.local_grid import LocalGrid
from fedapp.transport.records import Part
from strategies.base import Strategy

ROOT = Path(__file__).parents[1]
OURS = tuple(f"{ROOT / room}/" for room in ("fedapp", "strategies", "clients"))
DOWN, UP = np.float32(0.15625), np.float32(0.46875)
"""The values that all arrays of the payload, and of the reply, have."""
SIDES = ("server out", "client in", "client out", "server in")
MOST = 12


class Marking(Strategy):
    __module__ = "strategies.marking"  # with the reductions of FedAvg

    def send(self, state: ServerState, server_round: int, client: int) -> Payload:
        return Payload(common={name: np.full_like(array, DOWN) for name, array in state["model"].items()})


class Marked(FedClient):
    def after_training(self, payload: Payload) -> tuple[Arrays, dict[str, Any]]:
        with torch.no_grad():
            for values in self.model.parameters():
                values.fill_(float(UP))
        return super().after_training(payload)


def holds(value: Any, mark: np.float32) -> bool:
    """Whether a value is, or has, an array of the payload or of the reply."""
    if isinstance(value, np.ndarray):
        return value.size > 9 and value.dtype == np.float32 and value.flat[0] == value.flat[-1] == mark
    if isinstance(value, FlowerArray):
        return bytes(value.data[-8:]) == mark.tobytes() * 2
    if isinstance(value, Payload):
        return holds({**value.common, **value.arrays}, mark)
    if isinstance(value, (Reply, Good, Outcome)):
        return holds(value.arrays, mark)
    if isinstance(value, Message) and value.has_error():
        return False
    if isinstance(value, (Message, Part)):
        return holds(value.content, mark)
    if isinstance(value, Mapping):
        return not isinstance(value.get("model"), dict) and any(holds(v, mark) for v in value.values())
    return isinstance(value, (tuple, list)) and any(holds(v, mark) for v in value)


def whole(value: Any, mark: np.float32) -> bool:
    """Whether a value is the payload or the reply, in any of their forms."""
    return not isinstance(value, (np.ndarray, FlowerArray)) and holds(value, mark)


@dataclass
class Call:
    """A call of a function of ours, and which marks it takes."""

    name: str
    at_client: bool
    takes: set[np.float32]


class Trace:
    """Lists the functions by side, in the order in which they are called, until the first reply is reduced."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, None]] = {side: {} for side in SIDES}
        self.calls: list[Call] = []
        self.at_client = self.trained = self.done = False

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        code = frame.f_code
        if self.done or event not in ("call", "return") or not code.co_filename.startswith(OURS):
            return
        name = re.sub(r"^.*<locals>\.", "", code.co_qualname)
        name = name if "." in name or "<" in name else f"{Path(code.co_filename).stem}.{name}"
        sys.setprofile(None)
        if event == "call":
            given = [frame.f_locals.get(n) for n in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
            self.at_client = self.at_client or name == "App.__call__"
            self.calls.append(Call(name, self.at_client, {m for m in (DOWN, UP) if any(whole(v, m) for v in given)}))
        else:
            self.end(self.calls.pop(), value)
        sys.setprofile(self)

    def end(self, call: Call, value: Any) -> None:
        """Note a function that ends or yields."""
        self.trained = self.trained or call.name == "FedClient.train_round"
        for mark in (DOWN, UP) if self.trained else (DOWN,):
            returns = whole(value, mark)
            if not returns and mark not in call.takes:
                continue
            if "<" in call.name or call.name.startswith(("LocalGrid.", "Payload.")):
                continue  # a part of a function, Flower's grid, and the dict of both kinds of arrays
            client = self.at_client if returns else call.at_client
            self.found[SIDES[2 * (mark == UP) + (client == (mark == DOWN))]].setdefault(call.name)
        self.at_client = self.at_client and call.name != "App.__call__"
        self.done = call.name == "MeanReducer.add"


@pytest.fixture(scope="module")
def way(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    flat = from_flat(
        {"method": "fedavg", "clients": 2, "num-server-rounds": 1, "local-epochs": 1, "server-threads": 1,
         "out": str(tmp_path_factory.mktemp("way") / "run")}
    ).to_flat()  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        original = RunConfig.method_and_hparams

        def marked(config: RunConfig) -> tuple[Any, Any]:
            method, hparams = original(config)
            return replace(method, strategy=Marking, client=Marked), hparams

        patch.setattr(RunConfig, "method_and_hparams", marked)
        trace = Trace()
        sys.setprofile(trace)
        try:
            serve(LocalGrid(app, flat, 2), flat)
        finally:
            sys.setprofile(None)
    assert trace.done
    return {side: list(found) for side, found in trace.found.items()}


@pytest.mark.parametrize("side", SIDES)
def test_few_functions_take_or_return_a_payload(side: str, way: dict[str, list[str]]) -> None:
    assert 3 < len(way[side]) <= MOST, way[side]


@pytest.mark.parametrize("side", SIDES)
def test_the_documentation_names_all_of_them(side: str, way: dict[str, list[str]]) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith(f"- **{side.capitalize()}**:"))
    assert set(re.findall(r"`([\w.]+)`", row)) == set(way[side])
