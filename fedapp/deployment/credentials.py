"""Credentials of a federation: nodes' signatures, the operator's token, secrets in files, the server's certificate."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import secrets
import shutil
import ssl
import stat
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin

from fedapp.deployment.asgi import Scope, header
from fedapp.engines import control
from fedapp.errors import BadRequest
from fedapp.transport import roster

if TYPE_CHECKING:
    from flwr.superlink.config_loader import SuperLinkLifespanConfig

KEY, STAMP = 1 << 10, 64
"""Most bytes of the header with a node's key, where the largest curve needs 400, and of the one with the time that it
signed. Each used time is kept for five minutes, and Python reads times with any number of digits."""
UNREGISTERED, USED = -1, -2
"""Results without a node's id: the key that signed a request is not registered; the signature was used before."""


class Signatures:
    """Which node's registered key has signed a request in the last minutes, and that it has not done so before.

    Flower checks the signature too, and whether the key belongs to the node, but only after it has read and parsed the
    body, and it logs keys. A signature covers its time alone, and would be good for any request.

    Parameters
    ----------
    app : the SuperLink.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        self._lock = threading.Lock()
        self._used: dict[tuple[int, bytes], float] = {}
        """For each node and time that were signed when this can be forgotten, the oldest first."""

    def __call__(self, scope: Scope) -> int | None:
        """Return the node's id, `UNREGISTERED`, `USED`, or None if the signature is wrong; for threads."""
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
        from fastapi import HTTPException, Request
        from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
        from flwr.proto.fleet_pb2 import ActivateNodeRequest
        from flwr.superlink.routers.fleet.node_auth import authenticate_node

        given, stamp = header(scope, b"flwr-public-key"), header(scope, TIMESTAMP_HEADER.encode())
        if len(given) > KEY or len(stamp) > STAMP:
            return None
        try:
            key = base64.b64decode(given, validate=True)
            if not isinstance(load_pem_public_key(key), ec.EllipticCurvePublicKey):
                return None
            authenticate_node(Request({**scope, "state": {"protobuf_request": ActivateNodeRequest(public_key=key)}}))
        except (ValueError, UnsupportedAlgorithm, HTTPException):
            return None
        node: int | None = self.app.state.linkstate_factory.state().get_node_id_by_public_key(key)
        if node is None:
            return UNREGISTERED
        now, signed = time.monotonic(), (node, stamp)
        with self._lock:
            while self._used and self._used[oldest := next(iter(self._used))] < now:
                del self._used[oldest]
            if signed in self._used:
                return USED
            self._used[signed] = now + TIMESTAMP_TOLERANCE + 2 * SYSTEM_TIME_TOLERANCE
        return node


def fingerprint(key: bytes) -> str:
    """Return the start of a public key's SHA-256; `key` is the value of Flower's header, base64 of the PEM text."""
    with contextlib.suppress(ValueError):
        key = base64.b64decode(key, validate=True)
    return hashlib.sha256(key).hexdigest()[:16]


class OperatorToken(NoOpControlAuthnPlugin):
    """Flower's hook for the command line's credentials: a call is good if it carries the operator's token.

    The process keeps the token's SHA-256, not the token.
    """

    def __init__(self, token: str) -> None:
        self._digest = hashlib.sha256(token.encode()).digest()

    def validate_tokens_in_metadata(self, metadata: Sequence[tuple[str, str | bytes]]) -> tuple[bool, Any]:
        """Return whether the token is right, and Flower's default account, to which all runs and nodes belong."""
        from flwr.common.constant import ACCESS_TOKEN_KEY

        given = dict(metadata).get(ACCESS_TOKEN_KEY, "")
        digest = hashlib.sha256(given if isinstance(given, bytes) else given.encode()).digest()
        good, account = hmac.compare_digest(digest, self._digest), super().validate_tokens_in_metadata(metadata)[1]
        return good, account if good else None

    def refresh_tokens(self, metadata: Sequence[tuple[str, str | bytes]]) -> tuple[None, None]:
        """Refuse: the token does not expire, so a call that asks for another one has a wrong one."""
        return None, None


def write_secret(path: Path, content: bytes) -> None:
    """Make a file that only this user can read; `FileExistsError` if it is there."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def operator_token(path: Path) -> str:
    """Read the operator's token, or make it: 32 random bytes as text, readable by this user only.

    Raises
    ------
    BadRequest : the file cannot be read or written, others can read it, or it holds no token.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            write_secret(path, secrets.token_urlsafe(32).encode() + b"\n")
        mode = stat.S_IMODE(path.stat().st_mode)
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise BadRequest(f"the operator's token {path}: {e}") from e
    if mode & 0o077:
        raise BadRequest(f"the operator's token {path} can be read by others ({mode:o}): chmod 600 {path}")
    if len(text) < 32 or not text.isascii() or not text.isprintable() or " " in text:
        raise BadRequest(f"{path} holds no token: remove it, and a new one is made")
    return text


def login(address: str, token: str) -> None:
    """Write the token where `flwr` and `fedapp` look for the credentials of a SuperLink.

    Parameters
    ----------
    address : HOST:PORT as in Flower's configuration.   token : the operator's token.
    """
    from flwr.cli.constant import ACCESS_TOKEN_STORE_KEY, AUTHN_TYPE_STORE_KEY, REFRESH_TOKEN_STORE_KEY
    from flwr.common.constant import AuthnType
    from flwr.supercore.credential_store import get_credential_store

    store = get_credential_store()
    store.set(AUTHN_TYPE_STORE_KEY % address, AuthnType.OIDC.encode())
    for key in (ACCESS_TOKEN_STORE_KEY, REFRESH_TOKEN_STORE_KEY):
        store.set(key % address, token.encode())


def admit(api: control.Control, file: Path, client: int, known: Path, max_examples: int = 0) -> int:
    """Register a node's public key and bind it to a client id.

    Parameters
    ----------
    api : the SuperLink.   file : public key (NAME.pub).   client : client id.   known : the roster.
    max_examples : largest number of training rows, and of test rows, that the client may report; 0 = no limit.

    Returns
    -------
    The id of the node. A key that is registered already keeps its id.

    Raises
    ------
    BadRequest : the file is not a public key, the client id is taken, or the SuperLink refuses.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    if client < 0 or max_examples < 0:
        raise BadRequest("--client and --max-examples are not negative")
    try:
        key = load_ssh_public_key(file.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as e:
        raise BadRequest(f"{file} is not a public key ({e}): give the .pub file that docker/keys.sh made") from e
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise BadRequest(f"{file} is not an elliptic-curve key: make it with docker/keys.sh")
    text = public_key_to_bytes(key)
    entries = roster.read(known) if known.exists() else {}
    roster.check_free(known, entries, client)
    node = api.register(text)
    roster.add(known, roster.Admitted(client, node, hashlib.sha256(text).hexdigest(), max_examples))
    return node


def check_certificate(config: SuperLinkLifespanConfig, host: str) -> None:
    """Check that the helper process and the operator will trust the server's certificate.

    Parameters
    ----------
    config : of the SuperLink, with the paths of certificate, key and authority.   host : of the private listener.

    Raises
    ------
    BadRequest : a file cannot be used, or the certificate is expired, another authority's or for other names.
    """
    files = f"{config.ssl_certfile} with {config.ssl_keyfile} and {config.ssl_ca_certfile}"
    assert config.ssl_certfile  # `fedapp superlink` starts with TLS only
    try:
        server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        server.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=lambda: b"")
        client = ssl.create_default_context(cafile=config.ssl_ca_certfile)
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = client.wrap_bio(there, back, server_hostname=host), server.wrap_bio(back, there, server_side=True)
        for end in ends * 3:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except (OSError, ValueError) as e:
        why = getattr(e, "verify_message", "") or e
        raise BadRequest(
            f"{files} cannot be used ({why}): docker/certs.sh DIR NAME ... makes them, with localhost and {host} among "
            "the names"
        ) from e


def make_secrets_folder(folder: Path) -> None:
    """Make an empty folder that only this user can read, also where a killed process left one.

    Raises
    ------
    BadRequest : the folder is a link, belongs to another user, or cannot be made.
    """
    try:
        if folder.is_symlink() or folder.exists():
            shutil.rmtree(folder)  # it refuses links
        folder.mkdir(0o700, parents=True)
    except OSError as e:
        raise BadRequest(f"the folder for secrets {folder} cannot be made ({e}): remove it") from e
