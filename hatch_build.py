"""What the metadata of the package say of where it is published; the README there has no folder beside it.

`FEDAPP_REPOSITORY=https://host/owner/fedapp` at the time of the build makes the README's links absolute and fills in
the project's URLs. Without it the links become plain text, and one sentence says where the named pages are.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(?P<image>!?)\[(?P<label>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?!https?://|#)(?P<target>[^()\s]+)\)")
ELSEWHERE = (
    "The pages and folders that this text names, such as `docs/`, are in the source distribution of this package."
)


def published(text: str, address: str) -> str:
    """Return the README for a place without the repository's files; `address` is that of the repository, or empty."""

    def put(match: re.Match[str]) -> str:
        image, label, target = match["image"], match["label"], match["target"]
        if not address:
            return label
        return f"{image}[{label}]({address}/{'raw' if image else 'blob'}/HEAD/{target})"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)
    text = "".join(part if part.startswith("```") else LINK.sub(put, part) for part in parts)
    title, rest = text.split("\n", 1)
    return text if address else f"{title}\n\n{ELSEWHERE}\n{rest}"


def repository() -> str:
    """Return the address of the repository.

    Raises
    ------
    ValueError : it is no plain https address, such as one with a password.
    """
    address = os.environ.get("FEDAPP_REPOSITORY", "").rstrip("/")
    if address and not re.fullmatch(r"https://[\w.-]+(:\d+)?(/[\w.~-]+)+", address):
        raise ValueError(f"FEDAPP_REPOSITORY = '{address}': must be of the form https://host/owner/name")
    return address


class Published(MetadataHookInterface):
    """The dynamic fields `readme` and `urls` of pyproject.toml."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in the fields."""
        address = repository()
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": published(text, address)}
        pages = {"Repository": "", "Documentation": "/blob/HEAD/docs", "Changelog": "/blob/HEAD/CHANGELOG.md"}
        pages["Issues"] = "/issues"
        metadata["urls"] = {name: address + page for name, page in pages.items()} if address else {}
