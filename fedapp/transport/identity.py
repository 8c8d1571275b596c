"""Whose key a key is: signed by a node's own key, and checked against a list that the server has no hand in.

In secure sums the server passes the clients' keys on, and could pass on its own. A node with `node-key` signs its key
with the private key that it registered with. A node with `peers`, a copy of the roster that its owner got from the
other sites, takes part only with keys that are signed by the nodes in that list.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Mapping
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
    load_ssh_private_key,
)

from fedapp.errors import BadRequest
from fedapp.files import absolute
from fedapp.transport import roster

PROOF = 512
"""Bytes of a proof: the node's public key and a signature, zeros without a proof."""


class Identity:
    """A node's own key and the list of those that it trusts.

    Parameters
    ----------
    key : file of the private key that the node registered with, "" = none.   peers : file of the roster, "" = none.
    """

    def __init__(self, key: str = "", peers: str = "") -> None:
        self._key = _private(absolute(key)) if key else None
        found = roster.read(absolute(peers)) if peers else None
        self._peers = None if found is None else {entry.client: entry.key for entry in found.values()}

    def proof(self, run: str, client: int, key: bytes) -> bytes:
        """Return the proof that a key is this client's in a run; zeros for a node without `node-key`."""
        if self._key is None:
            return bytes(PROOF)
        public = self._key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        signature = self._key.sign(_signed(run, client, key), ec.ECDSA(SHA256()))
        return struct.pack(">HH", len(public), len(signature)) + (public + signature).ljust(PROOF - 4, b"\0")

    def problem_of(self, run: str, keys: Mapping[int, bytes], proofs: Mapping[int, bytes]) -> str | None:
        """Return the problem of the keys' proofs, or None; a node without `peers` asks for no proofs."""
        if self._peers is None:
            return None
        for client, key in keys.items():
            if client not in self._peers:
                return f"client {client} is not in this node's list of peers"
            if not _proves(proofs[client], self._peers[client], _signed(run, client, key)):
                return f"the key that is said to be client {client}'s is not signed by its node (node-key there)"
        return None


def unproved(reason: str) -> set[int]:
    """Return the client whose key is not proved by a text of `Identity.problem_of`."""
    return {int(n) for n in re.findall(r"to be client ([0-9]{1,18})'s is not signed by its node", reason)[:1]}


def _signed(run: str, client: int, key: bytes) -> bytes:
    return b"fedapp secure sum key\0" + struct.pack(">Q", client) + key + run.encode()


def _proves(proof: bytes, fingerprint: str, text: bytes) -> bool:
    long, rest = struct.unpack(">HH", proof[:4])
    public, signature = proof[4 : 4 + long], proof[4 + long : 4 + long + rest]
    if hashlib.sha256(public).hexdigest() != fingerprint:
        return False
    try:
        key = load_pem_public_key(public)
        if not isinstance(key, ec.EllipticCurvePublicKey):
            return False
        key.verify(signature, text, ec.ECDSA(SHA256()))
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        return False
    return True


def _private(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        text = path.read_bytes()
        load = load_ssh_private_key if b"OPENSSH PRIVATE KEY" in text else load_pem_private_key
        key = load(text, None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as e:
        raise BadRequest(f"node-key: {path} is not a private key ({e}): give the one that docker/keys.sh made") from e
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise BadRequest(f"node-key: {path} is not an elliptic-curve key: give the one that docker/keys.sh made")
    return key
