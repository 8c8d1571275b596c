"""`fedapp deploy check`: what keeps a node or a server from taking part, in a table with remedies.

It changes nothing and trains nothing: versions, switches, clock, certificates, reachability, key, data, model, disk.
"""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import http.client
import json
import os
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
from fedapp.engines import deploy
from fedapp.errors import BadRequest
from fedapp.tasks import node as nodes

OK, WARN, FAIL = "ok", "warn", "fail"
FLOWER = (1, 41)
AHEAD, BEHIND = 5.0, 300.0
"""Seconds by which a node's clock may be ahead of or behind the SuperLink's: beyond, its signatures are refused."""
SOON = 30
"""Days before the end of a certificate from which on it is time to renew it."""
LITTLE, TIGHT = 0.2, 2.0
"""GiB of free disk below which a run will fail, or may."""


@dataclass(frozen=True)
class Finding:
    """One line of the table; `remedy` is empty where nothing is to be done."""

    name: str
    state: str
    found: str
    remedy: str = ""


def check(
    *,
    superlink: str | None = None,
    address: str | None = None,
    root_certificates: Path | None = None,
    insecure: bool = False,
    node_config: str | None = None,
    key: Path | None = None,
    certificate: Path | None = None,
    values: Mapping[str, Any] | None = None,
) -> list[Finding]:
    """Look at this machine, and at the SuperLink from here.

    Parameters
    ----------
    superlink : connection in Flower's configuration; or `address` (host:port), with `root_certificates` (CA file) or
        `insecure`. Neither: nothing is said about reachability.
    node_config : what `flower-supernode --node-config` gets.   key : a SuperNode's private key.
    certificate : the SuperLink's own certificate file, to be checked on the server.
    values : run-config keys that decide what data and model are checked against (`dataset`, `class-names`, `model`).
    """
    found = [*_versions(), _switches(), _device()]
    to = deploy.connection(superlink) if superlink else None
    if to is not None:
        address, insecure = to.address, to.insecure
        root_certificates = Path(to.root_certificates) if to.root_certificates else None
    if root_certificates is not None:
        found.append(_certificate("CA certificate", root_certificates, "docker/certs.sh with another folder"))
    if certificate is not None:
        found.append(
            _certificate("server certificate", certificate, "run docker/certs.sh again, restart the SuperLink")
        )
    if address:
        found += _reach(address, root_certificates, insecure)
    if to is not None and all(f.state != FAIL for f in found if f.name == "reachability"):
        found.append(_registered(to))
    if key is not None:
        found.append(_key(key))
    folders = {"cache": cache_root()}
    if os.environ.get("FEDAPP_RUNS"):
        folders["runs"] = Path(os.environ["FEDAPP_RUNS"])
    if node_config is not None:
        found += _node(node_config, values or {}, folders)
    return [*found, *(_disk(name, folder) for name, folder in folders.items())]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(p) for p in text.split(".")[:2] if p.isdigit())


def _versions() -> Iterator[Finding]:
    found = {p: metadata.version(p) for p in ("flwr", "torch", "numpy")}
    text = f"fedapp {_own()}, flwr {found['flwr']}, torch {found['torch']}, Python {sys.version.split()[0]}"
    fits = _version(found["flwr"]) == FLOWER
    yield Finding(
        "versions", OK if fits else FAIL, text, "" if fits else f"pip install 'flwr=={FLOWER[0]}.{FLOWER[1]}.*'"
    )
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    missing = [
        p for p in ("flower-superlink", "flower-supernode", "flower-superexec") if not shutil.which(p, path=path)
    ]
    hidden = [p for p in ("flower-superexec",) if not shutil.which(p)]
    if missing:
        yield Finding("programs", FAIL, f"missing: {', '.join(missing)}", "pip install flwr beside this Python")
    elif hidden:
        yield Finding(
            "programs", WARN, "not in PATH", f"PATH={Path(sys.executable).parent}:$PATH: Flower starts helpers by name"
        )
    else:
        yield Finding("programs", OK, "in PATH")


def _own() -> str:
    try:
        return metadata.version("fedapp")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _switches() -> Finding:
    wanted = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }
    wrong = [f"{k}={v}" for k, v in wanted.items() if os.environ.get(k) != v]
    if wrong:
        return Finding("switches", WARN, f"not set: {len(wrong)} of {len(wanted)}", f"export {' '.join(wrong)}")
    return Finding("switches", OK, "telemetry, update check and installation at run time are off")


def _device() -> Finding:
    return Finding("device", OK, f"trains on {process.device()}")


def _days(end: datetime.datetime) -> float:
    return (end - datetime.datetime.now(datetime.UTC)).total_seconds() / 86400


def _dated(name: str, start: datetime.datetime, end: datetime.datetime, subject: str, remedy: str) -> Finding:
    left = _days(end)
    text = f"{subject}, {start:%Y-%m-%d} to {end:%Y-%m-%d}"
    if _days(start) > 0:
        return Finding(name, FAIL, f"{text}: not valid yet", "set this machine's clock, or make it anew")
    if left < 0:
        return Finding(name, FAIL, f"{text}: expired", remedy)
    if left < SOON:
        return Finding(name, WARN, f"{text}: {left:.0f} days left", remedy)
    return Finding(name, OK, f"{text}: {left:.0f} days left")


def _certificate(name: str, path: Path, remedy: str) -> Finding:
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as e:
        return Finding(name, FAIL, f"{path}: {e.strerror}", "copy it here and give its absolute path")
    except ValueError:
        return Finding(name, FAIL, f"{path} is no PEM certificate", "give the .crt file, not the .key file")
    subject = found.subject.rfc4514_string()
    with contextlib.suppress(x509.ExtensionNotFound):
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        subject = "for " + ", ".join(str(n.value) for n in names)
    return _dated(name, found.not_valid_before_utc, found.not_valid_after_utc, subject, remedy)


def _reach(address: str, root_certificates: Path | None, insecure: bool) -> Iterator[Finding]:
    """Name resolution, TCP, TLS, /health, clock and version, up to the first that fails."""
    name = "reachability"
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit():
        yield Finding(name, FAIL, f"'{address}' is no HOST:PORT", "write it like superlink.example.org:8000")
        return
    try:
        raw = socket.create_connection((host, int(port)), timeout=10)
    except socket.gaierror:
        yield Finding(name, FAIL, f"{host}: no such name", "check the name, or DNS, or /etc/hosts")
        return
    except ConnectionRefusedError:
        yield Finding(
            name, FAIL, f"{address} refuses connections", "start the SuperLink; in a container --host 0.0.0.0"
        )
        return
    except OSError as e:
        yield Finding(name, FAIL, f"{address}: {e}", f"open port {port} (TCP, outgoing here, incoming there)")
        return
    if insecure:
        raw.close()
        yield Finding(
            "TLS", WARN, "plain HTTP was asked for", "only on loopback: everybody on the way can read and change"
        )
        connection: http.client.HTTPConnection = http.client.HTTPConnection(host, int(port), timeout=10)
    else:
        try:
            context = ssl.create_default_context(cafile=str(root_certificates) if root_certificates else None)
            with context.wrap_socket(raw, server_hostname=host) as secure:
                peer = dict(secure.getpeercert() or {})
        except ssl.SSLCertVerificationError as e:
            remedy = {
                10: "renew it with docker/certs.sh, restart the SuperLink",
                9: "set this machine's clock",
                62: "make the server certificate with this name: docker/certs.sh DIR NAME ...",
                64: "make the server certificate with this address: docker/certs.sh DIR ADDRESS ...",
            }.get(e.verify_code, "take the ca.crt that signed the SuperLink's certificate")
            yield Finding("TLS", FAIL, e.verify_message, remedy)
            return
        except (ssl.SSLError, OSError) as e:
            yield Finding("TLS", FAIL, f"{address} speaks no TLS ({e})", "start the SuperLink with --ssl-certfile ...")
            return
        end = datetime.datetime.fromtimestamp(ssl.cert_time_to_seconds(str(peer["notAfter"])), datetime.UTC)
        start = datetime.datetime.fromtimestamp(ssl.cert_time_to_seconds(str(peer["notBefore"])), datetime.UTC)
        yield _dated("TLS", start, end, "trusted", "docker/certs.sh, then restart the SuperLink")
        connection = http.client.HTTPSConnection(host, int(port), timeout=10, context=context)
    try:
        sent = time.time()
        connection.request("GET", "/health")
        reply = connection.getresponse()
        reply.read()
        now = (sent + time.time()) / 2
    except (OSError, http.client.HTTPException) as e:
        yield Finding(name, FAIL, f"{address} gives no answer to /health ({e})", "is it a SuperLink? with TLS?")
        return
    finally:
        connection.close()
    healthy = reply.status == 200
    yield Finding(
        name, OK if healthy else FAIL, f"{address}/health: {reply.status}", "" if healthy else "see the SuperLink's log"
    )
    if reply.getheader("Date"):
        # The header counts whole seconds.
        yield _clock(now - email.utils.parsedate_to_datetime(str(reply.getheader("Date"))).timestamp() - 0.5)
    yield from _theirs(host, int(port), None if insecure else context)


def _clock(ahead: float) -> Finding:
    text = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the SuperLink's"
    if ahead > AHEAD or ahead < -BEHIND:
        return Finding("clock", FAIL, text, "synchronise it (chrony, systemd-timesyncd): signatures are refused")
    return Finding("clock", WARN if abs(ahead) > 2 else OK, text, "synchronise it" if abs(ahead) > 2 else "")


def _theirs(host: str, port: int, context: ssl.SSLContext | None) -> Iterator[Finding]:
    """Compare Flower's version there with the one here."""
    connection = (
        http.client.HTTPSConnection(host, port, timeout=10, context=context)
        if context is not None
        else http.client.HTTPConnection(host, port, timeout=10)
    )
    try:
        connection.request("GET", "/openapi.json")
        theirs = str(json.loads(connection.getresponse().read())["info"]["version"])
    except (OSError, http.client.HTTPException, ValueError, KeyError):
        return
    finally:
        connection.close()
    ours = metadata.version("flwr")
    same = _version(theirs) == _version(ours)
    yield Finding(
        "flwr there",
        OK if same else FAIL,
        f"{theirs}, here {ours}",
        "" if same else "same minor version on all machines",
    )


def _registered(to: deploy.Connection) -> Finding:
    try:
        control = deploy.Control(to)
        found = control.nodes()
        control.close()
    except Exception as e:
        return Finding("nodes", WARN, f"cannot be listed: {type(e).__name__}", "see the SuperLink's log")
    online = sum(status == "online" for _, status in found)
    remedy = "" if online else "start flower-supernode; with keys: flwr supernode register NAME.pub CONNECTION"
    return Finding("nodes", OK if online else WARN, f"{online} online of {len(found)} registered", remedy)


def _key(path: Path) -> Finding:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    try:
        content = path.read_bytes()
        mode = stat.S_IMODE(path.stat().st_mode)
        loaded = load_ssh_private_key(content, None)
    except OSError as e:
        return Finding("key", FAIL, f"{path}: {e.strerror}", "make it with docker/keys.sh, readable by this user")
    except (ValueError, TypeError):
        return Finding("key", FAIL, f"{path} is no private key without passphrase", "give NAME, not NAME.pub")
    if not isinstance(loaded, ec.EllipticCurvePrivateKey):
        return Finding("key", FAIL, f"{path} is no elliptic-curve key", "make it with docker/keys.sh")
    if mode & 0o077:
        return Finding("key", WARN, f"{path} can be read by others ({mode:o})", f"chmod 600 {path}")
    return Finding("key", OK, f"{path}, {loaded.curve.name}")


def _node(text: str, values: Mapping[str, Any], folders: dict[str, Path]) -> Iterator[Finding]:
    """Check what a node brings along: its node-config, data, model and state folder."""
    try:
        given = parsed(text)
        node = nodes.Node.parse(given)
    except BadRequest as e:
        yield Finding("node-config", FAIL, str(e), "write --node-config as docs/deployment.md shows")
        return
    kind = "own data" if node.own else f"share of {node.partitions}"
    yield Finding("node-config", OK, f"client {node.client}, {kind}")
    try:
        config = configuration.resolve(configuration.from_flat(dict(values)))
        task = nodes.task_of(config, node, process.device())
    except BadRequest as e:
        yield Finding("data and model", FAIL, str(e), "as it says")
    else:
        counts = f"{len(task.y_train)} images to train, {len(task.y_test)} to test"
        inputs = task.inputs
        yield Finding(
            "data",
            OK if len(task.y_test) else WARN,
            f"{counts}, {inputs.size}x{inputs.size}x{inputs.channels}, {len(set(task.y_train.tolist()))} of "
            f"{task.num_classes} classes",
            "" if len(task.y_test) else "no test images: this node will have no accuracy",
        )
        yield Finding("model", OK, task.model)
        try:
            folders["state"] = node.state_root(config)
        except BadRequest as e:
            yield Finding("state", FAIL, str(e), "as it says")


def parsed(text: str) -> dict[str, Any]:
    """Read a node-config the way flower-supernode does: key=value, with TOML values."""
    import re

    pairs = re.findall(r"(\S+?)=('[^']*'|\"[^\"]*\"|\S+)", text)
    try:
        return tomllib.loads("\n".join(f"{k} = {v}" for k, v in pairs))
    except tomllib.TOMLDecodeError as e:
        raise BadRequest(
            f"node-config {text!r} cannot be read ({e}); text values need quotation marks: key='value'"
        ) from e


def _disk(name: str, folder: Path) -> Finding:
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free / 2**30
    text = f"{free:.1f} GiB free for {name} at {folder}"
    if not os.access(place, os.W_OK):
        return Finding(
            "disk", FAIL, f"{place} cannot be written", f"give user {os.getuid()} the folder, or another one"
        )
    state = FAIL if free < LITTLE else WARN if free < TIGHT else OK
    return Finding("disk", state, text, "" if state == OK else "free some, or take another folder")
