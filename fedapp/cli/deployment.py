"""Commands for real devices: checks, the SuperLink, its operator, and the nodes that may take part."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from fedapp.cli.options import Application, Commands, Set, collect
from fedapp.cli.printing import show
from fedapp.errors import BadRequest, counted
from fedapp.results.terminal import echo

deployment = Application(
    cls=Commands, no_args_is_help=True, help="Real devices: find problems and show how to solve them."
)


@deployment.callback()
def _deployment() -> None:
    """Real devices."""


@deployment.command("check")
def deploy_check(
    places: Annotated[
        list[str] | None,
        typer.Option("--superlink", "--address", help="name of a connection in Flower's configuration, or HOST:PORT"),
    ] = None,
    root_certificates: Annotated[Path | None, typer.Option(help="with HOST:PORT: the CA's certificate")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="with HOST:PORT: plain HTTP")] = False,
    node_config: Annotated[
        str | None, typer.Option(help="on a node: the value of fedapp supernode --node-config")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="on a node: its private key")] = None,
    certificate: Annotated[Path | None, typer.Option(help="on the server: its certificate")] = None,
    roster: Annotated[
        Path | None, typer.Option(envvar="FEDAPP_ROSTER", help="on the server: its roster, next to the database")
    ] = None,
    sets: Set = None,
) -> None:
    """Check a node or the server: versions, clock, certificates, reachability, data, model, disk.

    Exit codes: 0 no check failed; 1 a check failed; 2 invalid request.
    """
    from fedapp.deployment import deploy_check as deploycheck
    from fedapp.engines import deploy

    place, *others = places or [""]
    if others:
        raise BadRequest("--superlink and --address exclude each other: name a connection, or give an address")
    if (named := place if ":" not in place else "") and (root_certificates or insecure):
        raise BadRequest("--root-certificates and --insecure go with HOST:PORT: the connection names its own")
    if insecure and root_certificates:
        raise BadRequest("--insecure is plain HTTP without certificates: leave out --root-certificates or --insecure")
    to = deploy.connection(named) if named else deploycheck.unnamed(place, root_certificates, insecure)
    found = deploycheck.check(to, node_config, key, certificate, roster, collect({}, sets))
    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    rows = [(Text(f.state, style=colours[f.state]), f.name, f.found, f.remedy) for f in found]
    show("fedapp deploy check", ("", "what", "found", "what to do"), rows)
    raise typer.Exit(int(any(f.state == deploycheck.FAIL for f in found)))


@deployment.command("remove-states")
def remove_states(
    node_config: Annotated[str, typer.Option(help="the value of fedapp supernode --node-config; it names state-dir")],
    days: Annotated[float, typer.Option(help="smallest age of an ended run, in days", min=0)] = 30.0,
    remove: Annotated[bool, typer.Option("--remove", help="remove them; otherwise they are counted")] = False,
) -> None:
    """On a node: remove the states of runs that have ended. They can then no longer go on for more rounds."""
    from fedapp.deployment.deploy_check import parsed
    from fedapp.tasks import claim
    from fedapp.tasks.node import Node

    root = Node.parse(parsed(node_config)).state_root()
    runs, size = claim.remove_ended(root, days, remove)
    what = "removed" if remove else "found, and --remove removes them"
    echo(f"{root}: states of {counted(runs, 'ended run')}, {size / 2**20:.1f} MiB: {what}")


def superlink(
    context: typer.Context,
    public: Annotated[str, typer.Option(help="HOST:PORT that nodes reach")] = "0.0.0.0:8000",
    private: Annotated[str, typer.Option(help="HOST:PORT on loopback, for the operator")] = "127.0.0.1:8001",
    operator_token_file: Annotated[
        Path | None, typer.Option(help="made if it does not exist; default: operator.token next to the database")
    ] = None,
    max_reply: Annotated[int, typer.Option(help="MiB that a node may send for one reply", min=1)] = 256,
) -> None:
    """Start a SuperLink whose public port serves nodes only. Further options go to flower-superlink.

    TLS and node keys are always on; the command line needs the operator's token (fedapp operator login).
    """
    from fedapp.deployment import server

    raise typer.Exit(server.serve(public, private, operator_token_file, max_reply << 20, context.args))


def supernode(
    context: typer.Context,
    cold: Annotated[
        bool, typer.Option("--cold", help="let every message import PyTorch and Flower again, as flower-supernode does")
    ] = False,
) -> None:
    """Start a SuperNode that imports PyTorch and Flower once. Further options go to flower-supernode.

    Each message still has a process of its own, which is forked from one that has imported the libraries.
    """
    from fedapp.deployment import supernode as nodes

    raise typer.Exit(nodes.serve(context.args, cold))


operator = Application(
    cls=Commands, no_args_is_help=True, help="Log in as the operator of a SuperLink that fedapp superlink started."
)


@operator.callback()
def _operator() -> None:
    """Log in as the operator of a SuperLink."""


@operator.command("login")
def operator_login(
    connection: Annotated[str, typer.Argument(help="name of a connection in Flower's configuration")],
    token_file: Annotated[Path, typer.Option(help="the SuperLink's operator.token, or a copy")],
) -> None:
    """Let flwr and fedapp use the operator's token for a connection."""
    from fedapp.deployment import credentials
    from fedapp.engines import deploy

    to = deploy.connection(connection)
    if not token_file.is_file():
        raise BadRequest(f"{token_file} does not exist: fedapp superlink makes it next to its database")
    credentials.login(to.address, credentials.operator_token(token_file))
    echo(f"flwr and fedapp now use this token for {connection} ({to.address})")


def admit(
    key: Annotated[Path, typer.Argument(help="a node's public key", metavar="KEY.pub")],
    client: Annotated[int, typer.Option(help="client id of this node", min=0)],
    connection: Annotated[
        str | None, typer.Option("--superlink", help="name of a connection in Flower's configuration")
    ] = None,
    roster: Annotated[
        Path | None, typer.Option(envvar="FEDAPP_ROSTER", help="the server's roster, roster.toml next to its database")
    ] = None,
    max_examples: Annotated[
        int, typer.Option(help="most training rows, and most test rows, that it may report; 0 = no limit", min=0)
    ] = 0,
) -> None:
    """Register a node's key and bind it to a client id. Run it on the server."""
    from fedapp.deployment import credentials
    from fedapp.engines import control, deploy

    if roster is None:
        raise BadRequest("give --roster FILE, the roster.toml next to the SuperLink's database")
    with control.Control.of_connection(deploy.connection(connection)) as api:
        node = credentials.admit(api, key, client, roster, max_examples)
    echo(f"node {node} is client {client} ({roster})")
