"""Flower from outside: the folder that it bundles, the API that starts and follows a run."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import os
import shutil
import sys
import sysconfig
import threading
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fedapp import process
from fedapp.errors import BadRequest

PACKAGES = ("fedapp", "strategies", "clients")
"""Importable packages that make up the app."""

BUNDLED_SUFFIXES = (".py", ".toml", ".md", ".yaml", ".yml", ".json")
"""File types that a Flower App Bundle carries; only these are staged."""

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Environment variables of all Flower processes: no telemetry, no look for updates, no installation per run."""

NO_TOKEN = "asks for the operator's token: fedapp operator login {} --token-file operator.token"
"""Why a SuperLink refuses a call; with the connection's name."""


class LaunchError(RuntimeError):
    """The simulation could not be started or stopped; not the fault of the request."""


def stage(dest: Path) -> Path:
    """Copy the app into a small folder, so that bundling it never walks an environment or a data folder.

    Parameters
    ----------
    dest : folder to fill; made if it does not exist.

    Returns
    -------
    ``dest``, with the packages of :data:`PACKAGES` and ``pyproject.toml``. That file loses the bundle's include and
    exclude patterns: Flower refuses patterns that match nothing, and the copy holds nothing to exclude.

    Raises
    ------
    BadRequest : a package or the project file is missing; the message names it and says how to install.
    """
    home = _package_folder("fedapp").parent
    project = tomllib.loads(_project_file(home).read_text(encoding="utf-8"))
    for key in ("fab-include", "fab-exclude"):
        project["tool"]["flwr"]["app"].pop(key, None)
    dest.mkdir(parents=True, exist_ok=True)
    for name in PACKAGES:
        # The three travel together: a folder of the same common name elsewhere on the path must not be taken instead.
        source = home / name if (home / name / "__init__.py").is_file() else _package_folder(name)
        shutil.copytree(source, dest / name, ignore=_not_bundled, dirs_exist_ok=True)
    (dest / "pyproject.toml").write_text(tomli_w.dumps(project), encoding="utf-8")
    return dest


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        raise BadRequest(
            f"package '{name}' is not installed: pip install -e . in the project folder, or install its wheel"
        )
    return Path(places[0])


def _project_file(home: Path) -> Path:
    candidates = (home / "pyproject.toml", home / "fedapp" / "_pyproject.toml")
    for path in candidates:
        if path.is_file():
            content = tomllib.loads(path.read_text(encoding="utf-8"))
            if content.get("project", {}).get("name") == "fedapp" and "app" in content.get("tool", {}).get("flwr", {}):
                return path
    places = " nor ".join(map(str, candidates))
    raise BadRequest(
        f"the app's project file is missing: neither {places}; install with pip install -e . or from a wheel"
    )


def _not_bundled(folder: str, names: list[str]) -> set[str]:
    """Name the files that are not copied: caches, and file types that Flower would not bundle."""
    return {
        name
        for name in names
        if name in ("__pycache__", "_pyproject.toml")
        or not ((Path(folder) / name).is_dir() or name.endswith(BUNDLED_SUFFIXES))
    }


def environment() -> dict[str, str]:
    """Return this process's environment for one of Flower's commands, which start their helpers by bare name."""
    scripts = dict.fromkeys([str(Path(sys.executable).parent), sysconfig.get_path("scripts")])
    return {**os.environ, **QUIET, "PATH": os.pathsep.join([*scripts, os.environ.get("PATH") or os.defpath])}


def executable(name: str, path: str) -> str:
    """Return the path of one of Flower's commands.

    Raises
    ------
    LaunchError : it is not installed.
    """
    found = shutil.which(name, path=path)
    if found is None:
        raise LaunchError(f"'{name}' is not installed next to {sys.executable}: pip install 'flwr[simulation]'")
    return found


class Control:
    """Flower's control API of one SuperLink.

    It is called in this process, because each call of the command line costs a second of a core that the clients could
    use.

    Parameters
    ----------
    connect : makes a client of the API. The log is read through a second one, in another thread.
    federation : id of the federation that runs are started in; empty = the account's own.
    name : of the connection in Flower's configuration.
    """

    def __init__(self, connect: Callable[[], Any], federation: str = "", name: str = "") -> None:
        self._connect = connect
        self._client = connect()
        self._federation, self._name = federation, name

    @classmethod
    def of_connection(cls, connection: Any) -> Control:
        """Connect as ``flwr`` does, with the certificates and the account of a connection in Flower's configuration."""
        from flwr.cli.utils import init_http_client_from_connection

        def connect() -> Any:
            with contextlib.redirect_stdout(io.StringIO()):  # Flower prints the connection's name
                try:
                    return init_http_client_from_connection(connection)
                except ImportError as e:  # a SOCKS proxy without the package for it
                    raise BadRequest(f"the SuperLink cannot be called: {e} Or unset ALL_PROXY") from e

        return cls(connect, connection.federation or "", connection.name)

    @classmethod
    def of_port(cls, port: int) -> Control:
        """Connect to a SuperLink without TLS on this machine, past any proxy of the environment."""
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

        def connect() -> Any:
            # The HTTP library reads these variables when the client is made.
            with process.environment(NO_PROXY="*", no_proxy="*"):
                return ControlHttpClient.from_server_address(
                    server_address=f"127.0.0.1:{port}",
                    insecure=True,
                    root_certificates=None,
                    interceptors=[RuntimeVersionHttpInterceptor(component_name="fedapp")],
                )

        return cls(connect)

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def start(
        self, app: Path, run_config: Mapping[str, Any], federation_config: Mapping[str, Any] | None = None
    ) -> int:
        """Bundle an app and start a run, as ``flwr run`` does in a process of its own; return Flower's run id.

        Parameters
        ----------
        app : folder of the app.   run_config : overrides of the app's run-config.
        federation_config : nodes and resources of a simulation, by Flower's names; None = none are sent.

        Raises
        ------
        BadRequest : Flower refuses the run-config.
        LaunchError : no answer, or another error; with Flower's message.
        """
        import click
        from flwr.cli.build import build_fab_from_disk
        from flwr.cli.utils import flwr_cli_exc_handler
        from flwr.common.serde import user_config_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.proto.fab_pb2 import Fab
        from flwr.supercore.utils import simulation_config_from_json

        try:
            bundle = build_fab_from_disk(app)
            federation = {key.replace("-", "_"): value for key, value in (federation_config or {}).items()}
            request = StartRunRequest(
                fab=Fab(hash_str=hashlib.sha256(bundle).hexdigest(), content=bundle),
                override_config=user_config_to_proto(dict(run_config)),
                federation=self._federation,
                override_federation_config=simulation_config_from_json(federation) if federation else None,
            )
            with flwr_cli_exc_handler():
                reply = self._client.StartRun(request)
        except (click.ClickException, ValueError, OSError) as error:
            message = str(getattr(error, "message", error)).strip()
            refused = "Invalid run configuration" in message or "[code: 15]" in message
            raise (BadRequest if refused else LaunchError)(f"Flower: {message}") from error
        if not reply.HasField("run_id"):
            raise LaunchError(f"Flower: the run did not start {reply.note}".strip())
        return int(reply.run_id)

    def status(self, run_id: int) -> tuple[str, str]:
        """Return a run's status and details in Flower's words, ``unknown`` when the SuperLink gives no answer."""
        from flwr.proto.control_pb2 import ListRunsRequest

        try:
            run = self._client.ListRuns(ListRunsRequest(run_id=run_id)).run_dict[run_id]
        except Exception as error:
            return "unknown", f"{type(error).__name__}: {error}"
        return ":".join(filter(None, (run.status.status, run.status.sub_status))), run.status.details

    def stop(self, run_id: int) -> None:
        """Stop a run; no error if it has ended already or the SuperLink does not answer."""
        from flwr.proto.control_pb2 import StopRunRequest

        with contextlib.suppress(Exception):
            self._client.StopRun(StopRunRequest(run_id=run_id))

    def nodes(self) -> list[tuple[int, str]]:
        """Return (id, status) of all registered nodes."""
        from flwr.proto.control_pb2 import ListNodesRequest

        return [(n.node_id, n.status) for n in self._client.ListNodes(ListNodesRequest()).nodes_info]

    def register(self, public_key: bytes) -> int:
        """Register a node's public key (PEM) and return the node's id; a registered key keeps its id.

        Raises
        ------
        BadRequest : the SuperLink does not answer or refuses.
        """
        from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest

        try:
            known = self._client.ListNodes(ListNodesRequest()).nodes_info
            for node in known:
                if node.public_key == public_key and not node.unregistered_at:
                    return int(node.node_id)
            return int(self._client.RegisterNode(RegisterNodeRequest(public_key=public_key)).node_id)
        except Exception as e:
            if getattr(getattr(e, "response", None), "status_code", 0) == 401:
                raise BadRequest(f"the SuperLink {NO_TOKEN.format(self._name)}") from e
            raise BadRequest(f"the SuperLink did not register the key: {type(e).__name__}: {e}") from e

    def read_log(self, run_id: int, take: Callable[[str], object], ended: threading.Event) -> threading.Thread:
        """Start a thread that hands over what a run prints, until the run ends or `ended` is set.

        A broken stream is resumed where it broke.
        """
        from flwr.proto.control_pb2 import StreamLogsRequest

        client = self._connect()

        def read() -> None:
            seen = 0.0
            while not ended.is_set():
                try:
                    for reply in client.StreamLogs(StreamLogsRequest(run_id=run_id, after_timestamp=seen)):
                        take(reply.log_output)
                        seen = max(seen, reply.latest_timestamp)
                    break
                except Exception:
                    ended.wait(1.0)
            with contextlib.suppress(Exception):
                client.close()

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread
