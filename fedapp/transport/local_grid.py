"""`LocalGrid`: Flower's Grid in this process, without Ray: runs the same ServerApp and ClientApp.

Two lines use internals of Flower 1.41: the identity of the running task in `_identify`, and the id that a SuperLink
gives to a message in `push_messages`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedapp import process

SERVER = 1
FIRST_NODE = 1000


def _identify(node: int) -> None:
    # A message takes its sender from here; in Flower a process has one identity, here it changes with every client.
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, node


class LocalGrid(Grid):
    """Runs clients one after another in this process, each when its reply is pulled.

    Parameters
    ----------
    client_app : the ClientApp.
    run_config : what `context.run_config` holds.
    clients : number of nodes, with partition ids 0 .. clients - 1.
    """

    one_at_a_time = True
    """Clients never run in parallel, so the server need not start long ones first."""

    def __init__(self, client_app: ClientApp, run_config: Mapping[str, Any], clients: int) -> None:
        self.client_app = client_app
        self.pull_interval = 0.01
        self._ids = itertools.count(1)
        self._waiting: dict[str, Message] = {}
        self.contexts = {
            FIRST_NODE + i: Context(
                run_id=1, node_id=FIRST_NODE + i, node_config={"partition-id": i, "num-partitions": clients},
                state=RecordDict(), run_config=dict(run_config),
            )
            for i in range(clients)
        }  # fmt: skip
        _identify(SERVER)

    def set_run(self, run: Any) -> None:
        """Do nothing: there is only one run."""

    @property
    def run(self) -> Any:
        """Return None: there is only one run, without a record of it."""
        return None

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Build a message."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the node ids."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue messages and return their ids; their clients run when replies are pulled."""
        ids = []
        for message in messages:
            message_id = f"local-{next(self._ids)}"
            message.metadata.__dict__["_message_id"] = message_id
            self._waiting[message_id] = message
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Run the client of the first queued message among `message_ids`; return its reply, or nothing."""
        wanted = set(message_ids)
        chosen = next((i for i in self._waiting if i in wanted), None)
        if chosen is None:
            return []
        message = self._waiting.pop(chosen)
        node = message.metadata.dst_node_id
        _identify(node)
        threads = torch.get_num_threads()
        try:
            # Without a polling interval it stands for real nodes, in tests.
            with process.simulation(hasattr(self, "pull_interval")):
                reply = self.client_app(message, self.contexts[node])
        except Exception as e:
            reply = Message(Error(code=2, reason=f"{type(e)}:<{e}>"), reply_to=message)
        finally:
            _identify(SERVER)
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)  # the client set its own number in the server's process
        return [reply]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and run all their clients; `timeout` has no effect."""
        waiting = set(self.push_messages(messages))
        replies: list[Message] = []
        while waiting:
            for reply in self.pull_messages(waiting):
                waiting.discard(reply.metadata.reply_to_message_id)
                replies.append(reply)
        return replies
