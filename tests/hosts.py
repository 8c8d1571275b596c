"""The services of docker/compose.yml on hosts of their own: network namespaces that tools/hosts.sh makes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.deployment import COMPOSE, NODES, ROOT, Deployment

SCRIPT = ROOT / "tools" / "hosts.sh"


class Hosts(Deployment):
    """A SuperLink and its nodes, with the ports and names of docker/compose.yml.

    The test itself is on none of the hosts: whatever asks for an address runs there.
    """

    def __init__(self, folder: Path, nodes: tuple[str, ...] = NODES) -> None:
        if os.geteuid() != 0 or any(shutil.which(tool) is None for tool in ("ip", "tc")):
            pytest.skip("root and iproute2 are needed")
        self.net = f"fedapp-{uuid.uuid4().hex[:6]}"
        names = ("superlink", *nodes)
        made = self.script("up", *(f"{name}=10.77.0.{10 + k}/24" for k, name in enumerate(names)))
        if made.returncode != 0:
            self.script("down")
            pytest.skip(f"no network namespaces here: {made.stderr}")
        super().__init__(folder, nodes)

    def script(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Call tools/hosts.sh for this network."""
        return subprocess.run([SCRIPT, command, self.net, *arguments], capture_output=True, text=True)

    def change(self, command: str, *arguments: str) -> None:
        """Cut off a host, join it again, slow it down or move it."""
        done = self.script(command, *arguments)
        assert done.returncode == 0, done.stderr

    def addresses(self, text: str) -> str:
        return text

    def where(self, name: str) -> list[str]:
        return ["ip", "netns", "exec", f"{self.net}-{'superlink' if name == 'fedapp' else name}"]

    def command(self, service: str, **changes: str) -> list[str]:
        return super().command(service, **({"port": "9094"} if service != "superlink" else {}), **changes)

    def healthy(self) -> bool:
        code = self.here(COMPOSE["services"]["superlink"]["healthcheck"]["test"][-1], "superlink")
        asked = subprocess.run([*self.where("superlink"), sys.executable, "-c", code], capture_output=True)
        return asked.returncode == 0

    def close(self) -> None:
        super().close()
        self.change("down")
