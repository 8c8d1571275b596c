"""`fedapp deploy check`: what keeps a node or a server from taking part, in a table with remedies.

It trains nothing: versions, switches, clock, certificates, reachability, key, data, model, disk. Only the cache of the
node's own samples, or of their features (`features-with`), is filled, which may take hours.
"""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import http.client
import json
import os
import re
import shutil
import socket
import ssl
import stat
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from fedapp import config as configuration
from fedapp import process
from fedapp.data.cache import cache_root
from fedapp.deployment.executor import FLOWER, minor
from fedapp.deployment.gate import NODES_ONLY
from fedapp.engines import control
from fedapp.errors import BadRequest, counted, described
from fedapp.results.directory import versions
from fedapp.tasks import node as nodes
from fedapp.transport import roster as rosters

OK, WARN, FAIL = "ok", "warn", "fail"
AHEAD, BEHIND = 5.0, 300.0
"""Seconds that a node's clock may be ahead of or behind the SuperLink's; beyond, its signatures are refused."""
RENEWAL = 30
"""Days before its end from which on a certificate should be renewed."""
DISK_FAIL, DISK_WARN = 0.2, 2.0
"""GiB of free disk below which a run will fail, or may."""


@dataclass(frozen=True)
class Finding:
    """One row of the table; `remedy` is empty where nothing needs to be done."""

    name: str
    state: str
    found: str
    remedy: str = ""


def unnamed(address: str = "", root_certificates: Path | None = None, insecure: bool = False) -> Any:
    """Return a connection (Flower's `SuperLinkConnection`) that Flower's configuration does not name."""
    from flwr.cli.typing import SuperLinkConnection

    return SuperLinkConnection("", address, str(root_certificates.absolute()) if root_certificates else None, insecure)


def check(
    to: Any = None,
    node_config: str | None = None,
    key: Path | None = None,
    certificate: Path | None = None,
    roster: Path | None = None,
    values: Mapping[str, Any] | None = None,
) -> list[Finding]:
    """Look at this machine, and at the SuperLink from here.

    Parameters
    ----------
    to : connection to the SuperLink. Without its address, reachability is not checked; without its name, the nodes.
    node_config : the value of `fedapp supernode --node-config`.   key : a SuperNode's private key.
    certificate : on the server, the SuperLink's own certificate file.   roster : there, which node is which client.
    values : run-config keys that data and model are checked against (`dataset`, `class-names`, `model`).
    """
    found = [*_versions(), _switches(), Finding("device", OK, f"trains on {process.device()}")]
    to = to or unnamed()
    root = Path(to.root_certificates) if to.root_certificates else None
    if root is not None:
        found.append(_certificate("CA certificate", root, "docker/certs.sh with another folder"))
    if certificate is not None:
        remedy = "run docker/certs.sh again, restart the SuperLink"
        found.append(_certificate("server certificate", certificate, remedy))
    if to.address:
        found += _reach(to.address, root, to.insecure)
    if to.name and all(f.state != FAIL for f in found if f.name == "reachability"):
        found += _registered(to, roster)
    if key is not None:
        found.append(_key(key))
    folders = {"cache": cache_root()}
    if os.environ.get("FEDAPP_RUNS"):
        folders["runs"] = Path(os.environ["FEDAPP_RUNS"])
    if node_config is not None:
        found += _node(node_config, values or {}, folders)
    return [*found, *(_disk(name, folder) for name, folder in folders.items())]


def _versions() -> Iterator[Finding]:
    found = versions()
    text = ", ".join(f"{name} {found[name]}" for name in ("fedapp", "flwr", "torch", "python"))
    if minor(found["flwr"]) == FLOWER:
        yield Finding("versions", OK, text)
    else:
        yield Finding("versions", FAIL, text, f"pip install 'flwr=={FLOWER[0]}.{FLOWER[1]}.*'")
    folder = Path(sys.executable).parent
    path = os.pathsep.join([str(folder), os.environ.get("PATH", "")])
    programs = ("flower-superlink", "flower-supernode", "flower-superexec")
    missing = [p for p in programs if not shutil.which(p, path=path)]
    if missing:
        yield Finding("programs", FAIL, f"missing: {', '.join(missing)}", "pip install flwr next to this Python")
    elif not shutil.which("flower-superexec"):
        yield Finding("programs", WARN, "not in PATH", f"PATH={folder}:$PATH: Flower starts helpers by name")
    else:
        yield Finding("programs", OK, "in PATH")


def _switches() -> Finding:
    wrong = [f"{k}={v}" for k, v in control.QUIET.items() if os.environ.get(k) != v]
    if wrong:
        return Finding("switches", WARN, f"not set: {len(wrong)} of {len(control.QUIET)}", f"export {' '.join(wrong)}")
    return Finding("switches", OK, "telemetry, update check and installation at run time are off")


def _validity(name: str, start: datetime.datetime, end: datetime.datetime, subject: str, remedy: str) -> Finding:
    now = datetime.datetime.now(datetime.UTC)
    days = (end - now).total_seconds() / 86400
    text = f"{subject}, {start:%Y-%m-%d} to {end:%Y-%m-%d}"
    if start > now:
        return Finding(name, FAIL, f"{text}: not valid yet", "set this machine's clock, or issue the certificate again")
    if days < 0:
        return Finding(name, FAIL, f"{text}: expired", remedy)
    text += f": {days:.0f} days left"
    return Finding(name, WARN, text, remedy) if days < RENEWAL else Finding(name, OK, text)


def _certificate(name: str, path: Path, remedy: str) -> Finding:
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as e:
        return Finding(name, FAIL, f"{path}: {e.strerror}", "copy it here and give its absolute path")
    except ValueError:
        return Finding(name, FAIL, f"{path} is not a PEM certificate", "give the .crt file, not the .key file")
    subject = found.subject.rfc4514_string()
    with contextlib.suppress(x509.ExtensionNotFound):
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        subject = "for " + ", ".join(str(n.value) for n in names)
    return _validity(name, found.not_valid_before_utc, found.not_valid_after_utc, subject, remedy)


VERIFY_REMEDIES = {
    9: "set this machine's clock",
    10: "renew it with docker/certs.sh, restart the SuperLink",
    62: "make the server certificate with this name: docker/certs.sh DIR NAME ...",
    64: "make the server certificate with this address: docker/certs.sh DIR ADDRESS ...",
}
"""What to do about OpenSSL's verify codes: not yet valid, expired, host name mismatch, address mismatch."""


def _reach(address: str, root_certificates: Path | None, insecure: bool) -> Iterator[Finding]:
    """Check name resolution, TCP, TLS, /health, clock and version, up to the first that fails."""

    def fail(found: str, remedy: str, name: str = "reachability") -> Finding:
        return Finding(name, FAIL, found, remedy)

    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit():
        yield fail(f"'{address}' is not of the form HOST:PORT", "write it like superlink.example.org:8000")
        return
    connection: http.client.HTTPConnection
    try:
        if insecure:
            connection = http.client.HTTPConnection(host, int(port), timeout=10)
        else:
            context = ssl.create_default_context(cafile=str(root_certificates) if root_certificates else None)
            connection = http.client.HTTPSConnection(host, int(port), timeout=10, context=context)
        connection.connect()
    except socket.gaierror:
        yield fail(f"{host}: unknown host name", "check the name, or DNS, or /etc/hosts")
        return
    except ConnectionRefusedError:
        yield fail(f"{address} refuses connections", "start the SuperLink; in a container --host 0.0.0.0")
        return
    except ssl.SSLCertVerificationError as e:
        remedy = VERIFY_REMEDIES.get(e.verify_code, "take the ca.crt that signed the SuperLink's certificate")
        yield fail(e.verify_message, remedy, "TLS")
        return
    except (ssl.SSLError, ConnectionResetError) as e:
        yield fail(f"{address} does not speak TLS ({e})", "start the SuperLink with --ssl-certfile ...", "TLS")
        return
    except OSError as e:
        yield fail(f"{address}: {e}", f"open port {port} (TCP, outgoing here, incoming there)")
        return
    if isinstance(connection.sock, ssl.SSLSocket):
        peer = dict(connection.sock.getpeercert() or {})
        start, end = (
            datetime.datetime.fromtimestamp(ssl.cert_time_to_seconds(str(peer[k])), datetime.UTC)
            for k in ("notBefore", "notAfter")
        )
        yield _validity("TLS", start, end, "trusted", "docker/certs.sh, then restart the SuperLink")
    else:
        remedy = "only on loopback: others on the network can read and change everything"
        yield Finding("TLS", WARN, "plain HTTP was requested", remedy)

    def get(path: str) -> tuple[http.client.HTTPResponse, bytes]:
        with contextlib.closing(connection):  # the next request connects again
            connection.request("GET", path)
            reply = connection.getresponse()
            return reply, reply.read()

    try:
        sent = time.time()
        reply, said = get("/health")
        now = (sent + time.time()) / 2
    except (OSError, http.client.HTTPException) as e:
        yield fail(f"{address} does not answer /health ({e})", "is it a SuperLink? with TLS?")
        return
    text = f"{address}/health: {reply.status}"
    if said == NODES_ONLY.encode():
        yield Finding("reachability", OK, f"{address} answers, and serves nodes only")
    elif reply.status != 200:
        yield fail(text, "see the SuperLink's log")
    elif host in ("127.0.0.1", "::1", "localhost"):
        yield Finding("reachability", OK, text)
    else:
        remedy = "start it with fedapp superlink: with the CA's certificate alone code can be submitted to this port"
        yield Finding("reachability", WARN, f"{text}; it also serves operators", remedy)
    if reply.getheader("Date"):
        # The header counts whole seconds.
        yield _clock(now - email.utils.parsedate_to_datetime(str(reply.getheader("Date"))).timestamp() - 0.5)
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError, KeyError):
        theirs, ours = str(json.loads(get("/openapi.json")[1])["info"]["version"]), metadata.version("flwr")
        same = minor(theirs) == minor(ours)
        remedy = "" if same else "same minor version on all machines"
        yield Finding("flwr there", OK if same else FAIL, f"{theirs}, here {ours}", remedy)


def _clock(ahead: float) -> Finding:
    text = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the SuperLink's"
    if ahead > AHEAD or ahead < -BEHIND:
        return Finding("clock", FAIL, text, "synchronise it (chrony, systemd-timesyncd): signatures are refused")
    return Finding("clock", WARN, text, "synchronise it") if abs(ahead) > 2 else Finding("clock", OK, text)


def _registered(to: Any, roster: Path | None) -> Iterator[Finding]:
    try:
        with control.Control.of_connection(to) as api:
            found = api.nodes()
    except Exception as e:
        if getattr(getattr(e, "response", None), "status_code", 0) == 401:
            yield Finding("nodes", FAIL, "cannot be listed", f"the SuperLink {control.NO_TOKEN.format(to.name)}")
        else:
            yield Finding("nodes", WARN, f"cannot be listed: {type(e).__name__}", "see the SuperLink's log")
        return
    online = sum(status == "online" for _, status in found)
    remedy = "" if online else "start fedapp supernode; with keys: flwr supernode register NAME.pub CONNECTION"
    yield Finding("nodes", OK if online else WARN, f"{online} online of {len(found)} registered", remedy)
    if roster is None:
        remedy = "on the server give --roster FILE, the roster.toml next to the SuperLink's database"
        yield Finding("roster", WARN, "not named: without one the first node that is online holds a client id", remedy)
        return
    try:
        admitted = rosters.read(roster)
    except BadRequest as e:
        yield Finding("roster", FAIL, str(e), "put a good copy back, or admit all nodes again with fedapp admit")
        return
    strangers = [node for node, _ in found if node not in admitted]
    text = f"{len(admitted)} clients admitted in {roster}"
    if strangers:
        remedy = "fedapp admit KEY.pub --client N, or flwr supernode unregister"
        yield Finding("roster", WARN, f"{text}; registered and not admitted: {', '.join(map(str, strangers))}", remedy)
    else:
        yield Finding("roster", OK, text)


def _key(path: Path) -> Finding:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        loaded = load_ssh_private_key(path.read_bytes(), None)
    except OSError as e:
        return Finding("key", FAIL, f"{path}: {e.strerror}", "make it with docker/keys.sh, readable by this user")
    except (ValueError, TypeError):
        return Finding("key", FAIL, f"{path} is not a private key without passphrase", "give NAME, not NAME.pub")
    if not isinstance(loaded, ec.EllipticCurvePrivateKey):
        return Finding("key", FAIL, f"{path} is not an elliptic-curve key", "make it with docker/keys.sh")
    if mode & 0o077:
        return Finding("key", WARN, f"{path} can be read by others ({mode:o})", f"chmod 600 {path}")
    return Finding("key", OK, f"{path}, {loaded.curve.name}")


def _node(text: str, values: Mapping[str, Any], folders: dict[str, Path]) -> Iterator[Finding]:
    """Check a node's side: its node-config, data, model and state folder, which is added to `folders`."""
    try:
        node = nodes.Node.parse(parsed(text))
    except BadRequest as e:
        yield Finding("node-config", FAIL, str(e), "write --node-config as docs/deployment.md shows")
        return
    yield Finding(
        "node-config", OK, f"client {node.client}, {'own data' if node.own else f'share of {node.partitions}'}"
    )
    try:
        config = configuration.from_flat(dict(values))
        if "method" in values:  # otherwise no run is meant
            node.check(config)
        task = nodes.node_task(config, node, process.device())
    except BadRequest as e:
        yield Finding("data and model", FAIL, str(e), "as it says")
        return
    i, train, test = task.inputs, len(task.y_train), len(task.y_test)
    classes = f"{len(set(task.y_train.tolist()))} of {counted(task.num_classes, 'class')}"
    counts = f"{counted(train, 'row')} to train, {test} to test, {described(i.shape)}, {classes}"
    remedy = "" if test else "no test rows: this node will have no accuracy"
    yield Finding("data", OK if test else WARN, counts, remedy)
    yield Finding("model", OK, task.model)
    try:
        folders["state"] = node.state_root()
    except BadRequest as e:
        yield Finding("state", FAIL, str(e), "as it says")


def parsed(text: str) -> dict[str, Any]:
    """Read a node-config the way flower-supernode does: key=value, with TOML values."""
    pairs = re.findall(r"(\S+?)=('[^']*'|\"[^\"]*\"|\S+)", text)
    try:
        return tomllib.loads("\n".join(f"{k} = {v}" for k, v in pairs))
    except tomllib.TOMLDecodeError as e:
        raise BadRequest(
            f"node-config {text!r} cannot be read ({e}); text values need quotation marks: key='value'"
        ) from e


def _disk(name: str, folder: Path) -> Finding:
    place = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(place).free / 2**30
    text = f"{free:.1f} GiB free for {name} at {folder}"
    if not os.access(place, os.W_OK):
        return Finding("disk", FAIL, f"{place} cannot be written", f"give it to user {os.getuid()}, or name another")
    state = FAIL if free < DISK_FAIL else WARN if free < DISK_WARN else OK
    return Finding("disk", state, text, "" if state == OK else "free some, or name another folder")
