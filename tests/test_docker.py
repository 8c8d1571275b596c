"""The files of docker/ without a Docker daemon: linted where linters are there, and consistent with each other.

The slow test builds the image and runs docker/smoke.sh in it, with buildah and runc in the daemon's place.
test_deployment.py runs the commands of compose.yml without the image, on loopback.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedapp.deployment.deploy_check import parsed
from fedapp.tasks.node import Node
from tests.deployment import COMPOSE, ROOT, image_env

DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
SCRIPTS = sorted(DOCKER.glob("*.sh"))
NODES = [name for name in COMPOSE["services"] if name.startswith("supernode-")]


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def lint(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, cwd=DOCKER)
    assert done.returncode == 0, done.stdout + done.stderr


def test_hadolint() -> None:
    lint(tool("hadolint"), "Dockerfile")


def test_compose_schema() -> None:
    lint(tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", "compose.yml")


def test_compose_config() -> None:
    docker = tool("docker")
    if subprocess.run([docker, "compose", "version"], capture_output=True).returncode != 0:
        pytest.skip("docker has no compose plugin")
    lint(docker, "compose", "-f", "compose.yml", "config", "--quiet")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_scripts(script: Path) -> None:
    assert os.access(script, os.X_OK) and script.read_text(encoding="utf-8").startswith("#!/bin/sh\n")
    lint("sh", "-n", str(script))
    lint(tool("shellcheck"), str(script))


def test_the_image_runs_as_nobody_in_particular_and_keeps_quiet() -> None:
    user = re.findall(r"^USER (\S+)$", DOCKERFILE, re.M)
    assert user[-1] == "10001:10001" and DOCKERFILE.rindex("USER") > DOCKERFILE.rindex("RUN")
    env = image_env()
    assert env["FLWR_TELEMETRY_ENABLED"] == "0" and env["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert env["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    for key in ("FLWR_HOME", "FEDAPP_RUNS", "FEDAPP_STATE", "FEDAPP_CACHE"):
        assert env[key].startswith("/var/lib/fedapp/")  # the one folder that is a volume


def test_the_base_and_every_package_of_the_image_are_pinned() -> None:
    bases = re.findall(r"^FROM (\S+)$", DOCKERFILE, re.M)
    assert len(bases) == 1 and re.fullmatch(r"python:3\.11\.\d+-slim-\w+@sha256:[0-9a-f]{64}", bases[0])
    for command in re.findall(r"pip install[^\n;&]*", DOCKERFILE.replace("\\\n", " ")):
        own = {"--no-deps", "--no-build-isolation"} <= set(command.split())
        assert " -c constraints.txt" in command or own, command


def test_the_image_gets_all_that_it_copies_and_nothing_private() -> None:
    ignored = (DOCKER / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    assert ignored[0] == "*"
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    copied = set()
    for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.M):
        words = [w for w in line.split() if not w.startswith("--")]
        copied |= set(words[:-1])
    assert copied == allowed
    assert all((ROOT / path).exists() for path in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    needed = {"README.md", "hatch_build.py", *packages, *project["project"]["license-files"]}
    assert needed <= copied
    assert not copied & {"docker/certs", "docker/keys", "docker/sites"}
    hidden = (DOCKER / ".gitignore").read_text(encoding="utf-8").split()
    assert {"/certs/", "/keys/", "/sites/"} <= set(hidden)


def test_three_nodes_with_their_own_key_data_and_volume() -> None:
    services = COMPOSE["services"]
    assert len(NODES) == 3
    numbers, volumes = set(), set()
    for name in NODES:
        service = services[name]
        words = service["command"]
        option = dict(zip(words[1::2], words[2::2], strict=True))
        config = parsed(re.sub(r"\$\{\w+:-(.*?)\}", r"\1", option["--node-config"]))
        node = Node.parse(config)
        assert node.own and node.data_path == "/data" and node.state_dir == image_env()["FEDAPP_STATE"]
        numbers.add(node.client)
        volumes |= {v.split(":")[0] for v in service["volumes"]}
        assert any(v.endswith(":/data:ro") for v in service["volumes"])
        assert option["--auth-supernode-private-key"] == f"/run/secrets/{name}"
        assert sorted(service["secrets"]) == sorted(["ca.crt", name])  # nobody else's key, not the server's
        assert service["depends_on"]["superlink"]["condition"] == "service_healthy"
        assert "--insecure" not in words and option["--superlink"] == "superlink:8000"
    assert numbers == {0, 1, 2} and len(volumes) == 6


def test_the_superlink_is_encrypted_authenticated_and_on_loopback_unless_asked() -> None:
    service = COMPOSE["services"]["superlink"]
    words = service["command"]
    assert words[:2] == ["fedapp", "superlink"] and {"--database", "--ssl-certfile"} <= set(words)
    assert words[words.index("--private") + 1] == "127.0.0.1:8001", "operators are inside the container"
    assert service["ports"] == ["${FEDAPP_LISTEN:-127.0.0.1}:8000:8000"]
    assert "ca.key" not in str(COMPOSE)
    keys = {c["source"] for c in service["configs"]}
    assert keys == {f"{name}.pub" for name in NODES}


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_every_service_is_confined_watched_and_restarted(name: str) -> None:
    service: dict[str, Any] = COMPOSE["services"][name]
    assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["restart"] == "unless-stopped"
    assert service["mem_limit"] == "${FEDAPP_MEMORY:-8g}" and service["pids_limit"] == 1024
    assert service["security_opt"] == ["no-new-privileges:true"] and service["healthcheck"]["retries"] >= 3
    for secret in service["secrets"]:
        assert secret in COMPOSE["secrets"]
    for config in service.get("configs", []):
        assert config["source"] in COMPOSE["configs"]
    program = service["command"][0]
    assert program == "fedapp" or (DOCKER / program).is_file()
    # A health check that is not Python would be found out only by a daemon.
    code = service["healthcheck"]["test"][-1]
    compile(code, name, "exec")


def test_the_connection_inside_the_image_is_the_service() -> None:
    connection = tomllib.loads((DOCKER / "connection.toml").read_text(encoding="utf-8"))["superlink"]
    assert connection[connection["default"]] == {
        "address": "localhost:8001", "root-certificates": "/run/secrets/ca.crt",
    }  # fmt: skip


def test_certificates_and_keys(tmp_path: Path) -> None:
    if shutil.which("openssl") is None or shutil.which("ssh-keygen") is None:
        pytest.skip("openssl and ssh-keygen are needed")

    def sh(script: str, *arguments: str) -> str:
        done = subprocess.run([DOCKER / script, *arguments], capture_output=True, text=True, check=True)
        return done.stdout

    certs, keys = tmp_path / "certs", tmp_path / "keys"
    said = sh("certs.sh", str(certs), "superlink.example.org", "10.0.0.7", "fe80::1")
    assert "DNS:superlink.example.org, IP:10.0.0.7, IP:fe80::1" in said
    before = (certs / "ca.crt").read_bytes(), (certs / "server.crt").read_bytes()
    for name in ("ca.key", "server.key"):
        assert stat.S_IMODE((certs / name).stat().st_mode) == 0o600
    sh("certs.sh", str(certs), "superlink.example.org")
    assert (certs / "ca.crt").read_bytes() == before[0] and (certs / "server.crt").read_bytes() != before[1]
    before = (certs / "server.key").read_bytes(), (certs / "server.crt").read_bytes()
    wrong = [DOCKER / "certs.sh", certs, "superlink.example.org", "192.0.2.300"]
    done = subprocess.run(wrong, capture_output=True, text=True)
    assert done.returncode == 1 and "192.0.2.300" in done.stderr
    assert before == ((certs / "server.key").read_bytes(), (certs / "server.crt").read_bytes())
    verify = ["openssl", "verify", "-x509_strict", "-CAfile", str(certs / "ca.crt"), "-purpose", "sslserver",
              "-verify_hostname", "superlink.example.org", str(certs / "server.crt")]  # fmt: skip
    assert subprocess.run(verify, capture_output=True).returncode == 0
    sh("keys.sh", str(keys), "a", "b")
    first = (keys / "a").read_bytes()
    assert "is kept" in sh("keys.sh", str(keys), "a") and (keys / "a").read_bytes() == first
    assert stat.S_IMODE((keys / "a").stat().st_mode) == 0o600
    assert (keys / "b.pub").read_text().startswith("ecdsa-sha2-nistp384 ")
    for script in ("certs.sh", "keys.sh"):
        assert subprocess.run([DOCKER / script], capture_output=True).returncode == 2
    # A certificate without names would hold for this machine alone.
    done = subprocess.run([DOCKER / "certs.sh", tmp_path / "none"], capture_output=True, text=True)
    assert done.returncode == 2 and "NAME-OR-ADDRESS" in done.stderr and not (tmp_path / "none").exists()


def test_a_supernode_is_started_again_and_stopped_in_order(tmp_path: Path) -> None:
    """supernode.sh around a stand-in that notes its starts: fails twice, then runs until it is told to stop."""
    fake = tmp_path / "fedapp"
    fake.write_text(
        f'#!/bin/sh\necho "start $*" >> {tmp_path}/log\n'
        f'[ "$(grep -c start {tmp_path}/log)" -ge 3 ] || exit 49\n'
        f"trap 'echo stopped >> {tmp_path}/log; exit 3' TERM\nwhile :; do sleep 0.1; done\n"
    )
    fake.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "RESTART_AFTER": "0"}
    process = subprocess.Popen(
        [DOCKER / "supernode.sh", "--superlink", "x y"], env=env, stderr=subprocess.PIPE, text=True
    )
    from tests.deployment import until

    until(lambda: (tmp_path / "log").is_file() and (tmp_path / "log").read_text().count("start") == 3, 30, "3 starts")
    process.terminate()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0 and errors.count("ended with code 49; next try in 0 s") == 2
    assert (tmp_path / "log").read_text().splitlines() == ["start supernode --superlink x y"] * 3 + ["stopped"]


def test_yaml_and_smoke_test_name_the_same_things() -> None:
    smoke = (DOCKER / "smoke.sh").read_text(encoding="utf-8")
    assert COMPOSE["x-common"]["image"] in smoke
    for name in NODES:
        assert name in smoke
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert COMPOSE["x-common"]["image"] == f"{project['name']}:{project['version']}"
    assert yaml.safe_load((DOCKER / "compose.yml").read_text())["name"] == project["name"]


@pytest.mark.slow
def test_the_image_is_built_and_its_containers_do_what_smoke_says(tmp_path: Path) -> None:
    missing = [t for t in ("buildah", "debootstrap", "runc", "ip", "openssl", "ssh-keygen") if shutil.which(t) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"root is needed, and {missing}")
    tree = tmp_path / "tree"
    skip = shutil.ignore_patterns("__pycache__", "certs", "keys", "sites")
    tree.mkdir()
    for line in (DOCKER / "Dockerfile.dockerignore").read_text(encoding="utf-8").split():
        path = ROOT / line[1:]
        if line.startswith("!") and path.parent == ROOT:
            if path.is_dir():
                shutil.copytree(path, tree / path.name, ignore=skip)
            else:
                shutil.copy(path, tree)
    for folder in ("docker", "tools"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=skip)
    done = subprocess.run([tree / "tools" / "check-image.sh"], env={**os.environ, "PYTHON": sys.executable},
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0 and "== every step succeeded" in done.stdout
    assert "fedapp-smoke" not in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
