"""Names of classes, clients and columns of own data, and of the files that hold them."""

from __future__ import annotations

import unicodedata


def composed(text: str) -> str:
    """Return a name in the composed form of Unicode (NFC), so that two encodings of one name are one name."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)
