"""What docker/smoke.sh asks of `docker`, on a machine without its daemon: images by buildah, containers by runc.

    DOCKER="python tools/docker_on_runc.py" docker/smoke.sh        tools/check-image.sh does it

A container gets what compose.yml says: command, user, environment, read-only file system, no capabilities, limits of
memory and processes, secrets, configs, volumes, and a host of its own (tools/hosts.sh) that others know by its name.
Not taken over: `init`, `restart`, `ports`. Needs root. `CHECK_FOLDER` holds volumes and logs, `BASE_IMAGE` takes the
place of the Dockerfile's base, and `PIP_CONF` is pip's configuration while the image is built.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
FOLDER = Path(os.environ.get("CHECK_FOLDER", "."))
UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def call(*command: object, shown: bool = False) -> str:
    """Run a command and return what it prints, or let it be `shown` as it comes; an error ends the program."""
    done = subprocess.run([str(word) for word in command], stdout=None if shown else subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(str(word) for word in command[:4])} ... ended with {done.returncode}")
    return "" if shown else done.stdout.strip()


class Project:
    """The services of a Compose file, under a project's name.

    Parameters
    ----------
    file : the Compose file.   name : first part of the names of containers, hosts and volumes.
    """

    def __init__(self, file: Path, name: str) -> None:
        text = re.sub(r"\$\{(\w+):-(.*?)\}", lambda m: os.environ.get(m[1]) or m[2], file.read_text(encoding="utf-8"))
        self.all: dict[str, Any] = yaml.safe_load(text)
        self.services: dict[str, Any] = self.all["services"]
        self.folder, self.name = file.resolve().parent, name

    def build(self, service: str) -> None:
        """Build a service's image; the base is made on this machine, for no registry of images may be at hand."""
        image, build = self.services[service]["image"], self.services[service]["build"]
        context = self.folder / build["context"]
        file = context / build["dockerfile"]
        secret = os.environ.get("PIP_CONF")
        options = [f"--secret=id=pip.conf,src={secret}"] if secret else []
        options += [f"--build-arg={key}={value or ''}" for key, value in build["args"].items()]
        call(
            "buildah", "build", "--isolation=chroot", "--layers", f"--from={os.environ['BASE_IMAGE']}", *options,
            f"--ignorefile={file}.dockerignore", "-f", file, "-t", image, context, shown=True,
        )  # fmt: skip

    def up(self, names: list[str]) -> None:
        """Start services that do not run, after those that they depend on, and wait until they are healthy."""
        if not Path(f"/run/netns/{self.name}").exists():
            hosts = [f"{service}=10.78.0.{10 + k}/24" for k, service in enumerate(self.services)]
            call(HERE / "hosts.sh", "up", self.name, *hosts)
        for name in names or self.services:
            for needed in self.services[name].get("depends_on", {}):
                self.up([needed])
            if self.running(name):
                continue
            subprocess.run(["runc", "delete", "--force", self.container(name)], capture_output=True)
            bundle = FOLDER / "containers" / name
            bundle.mkdir(parents=True, exist_ok=True)
            (bundle / "config.json").write_text(json.dumps(self.specification(name, bundle)), encoding="utf-8")
            with (bundle / "log").open("ab") as log:
                command = ["runc", "run", "--detach", "--bundle", str(bundle), self.container(name)]
                subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True)
        for name in names or self.services:
            self.healthy(name)

    def container(self, service: str) -> str:
        """The name of a service's container."""
        return f"{self.name}-{service}"

    def running(self, service: str) -> bool:
        """Return whether a service's container exists and its first process lives."""
        done = subprocess.run(["runc", "state", self.container(service)], capture_output=True, text=True)
        return done.returncode == 0 and json.loads(done.stdout)["status"] == "running"

    def healthy(self, service: str) -> None:
        """Wait for a service's health check."""
        check = self.services[service]["healthcheck"]
        seconds = [int(check[key].rstrip("s")) for key in ("start_period", "interval", "timeout")]
        end = time.monotonic() + seconds[0] + check["retries"] * (seconds[1] + seconds[2])
        while self.execute(service, check["test"][1:], quiet=True) != 0:
            if not self.running(service) or time.monotonic() > end:
                sys.exit(f"{service} is not healthy")
            time.sleep(2)

    def execute(self, service: str, command: list[str], quiet: bool = False) -> int:
        """Run a command in a service's container; return its exit code."""
        streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} if quiet else {}
        return subprocess.run(["runc", "exec", self.container(service), *command], **streams).returncode

    def specification(self, name: str, bundle: Path) -> dict[str, Any]:
        """Return what runc is told of a service: its own default, and what compose.yml and the image say."""
        service = self.services[name]
        image = json.loads(call("buildah", "inspect", "--type", "image", service["image"]))["OCIv1"]["config"]
        root = self.mounted(name)
        (bundle / "config.json").unlink(missing_ok=True)
        call("runc", "spec", "--bundle", bundle)
        it: dict[str, Any] = json.loads((bundle / "config.json").read_text(encoding="utf-8"))
        user, group = (int(number) for number in image["User"].split(":"))
        it["process"] |= {
            "terminal": False, "args": service["command"], "env": image["Env"], "cwd": image["WorkingDir"],
            "user": {"uid": user, "gid": group}, "noNewPrivileges": True,
        }  # fmt: skip
        if service["cap_drop"] == ["ALL"]:
            it["process"]["capabilities"] = {}
        it["hostname"] = name
        it["root"] = {"path": str(root), "readonly": service["read_only"]}
        memory = int(service["mem_limit"][:-1]) * UNITS[service["mem_limit"][-1]]
        it["linux"]["resources"] |= {"memory": {"limit": memory}, "pids": {"limit": service["pids_limit"]}}
        it["linux"]["cgroupsPath"] = f"/{self.container(name)}"
        for namespace in it["linux"]["namespaces"]:
            if namespace["type"] == "network":
                namespace["path"] = f"/run/netns/{self.name}-{name}"

        def bind(source: Path, target: str, mode: str = "ro") -> None:
            options = ["rbind", mode]
            it["mounts"].append({"type": "bind", "source": str(source), "destination": target, "options": options})

        for target in service["tmpfs"]:
            options = ["noexec", "nosuid", "nodev"]
            it["mounts"].append({"type": "tmpfs", "source": "tmpfs", "destination": target, "options": options})
        for volume in service["volumes"]:
            source, target, *mode = volume.split(":")
            if source in self.all["volumes"]:
                bind(self.volume(source, root / target.lstrip("/")), target, "rw")
            else:
                bind((self.folder / source).resolve(), target, *mode)
        for secret in service["secrets"]:
            bind(self.folder / self.all["secrets"][secret]["file"], f"/run/secrets/{secret}")
        for config in service.get("configs", []):
            bind(self.folder / self.all["configs"][config["source"]]["file"], config["target"])
        bind(Path(f"/etc/netns/{self.name}-{name}/hosts"), "/etc/hosts")
        return it

    def mounted(self, service: str) -> Path:
        """Return where the file system of a service's container is mounted."""
        name = self.container(service)
        if subprocess.run(["buildah", "mount", name], capture_output=True).returncode != 0:
            call("buildah", "from", "--pull-never", "--name", name, self.services[service]["image"])
        return Path(call("buildah", "mount", name))

    def volume(self, name: str, content: Path) -> Path:
        """Return a volume's folder; a new one begins with what the image has there, and its owner."""
        folder = FOLDER / "volumes" / name
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            call("cp", "-a", content, folder)
        return folder.resolve()

    def logs(self, lines: int) -> None:
        """Print the end of each service's log."""
        for log in sorted((FOLDER / "containers").glob("*/log")):
            for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]:
                print(f"{log.parent.name}  | {line}")

    def down(self) -> None:
        """Remove containers, hosts and volumes."""
        for name in self.services:
            for command in (["runc", "delete", "--force"], ["buildah", "rm"]):
                subprocess.run([*command, self.container(name)], capture_output=True)
        if Path(f"/run/netns/{self.name}").exists():
            call(HERE / "hosts.sh", "down", self.name)
        for folder in ("containers", "volumes"):
            shutil.rmtree(FOLDER / folder, ignore_errors=True)


def main(words: list[str]) -> int:
    """Carry out one command of `docker`; return its exit code."""
    if words[0] == "run":
        # `docker run` and `buildah run` have the same options here.
        at = next(k for k, word in enumerate(words) if re.fullmatch(r"[a-z]+:[\d.]+", word))
        container = call("buildah", "from", "--pull-never", words[at])
        options = [word for word in words[1:at] if word != "--rm"]
        code = subprocess.run(["buildah", "run", "--isolation=chroot", *options, container, "--", *words[at + 1 :]])
        call("buildah", "rm", container)
        return code.returncode
    parser = argparse.ArgumentParser(prog="docker compose")
    parser.add_argument("-f", type=Path, required=True)
    parser.add_argument("-p", required=True)
    parser.add_argument("command", choices=("build", "up", "exec", "kill", "logs", "down"))
    parser.add_argument("words", nargs=argparse.REMAINDER)
    given = parser.parse_args(words[1:])
    project = Project(given.f, given.p)
    match given.command, *given.words:
        case "build", service:
            project.build(service)
        case "up", "-d", "--wait", *services:
            project.up(services)
        case "exec", "-T", service, *command:
            return project.execute(service, command)
        case "kill", "--signal", signal, service:
            call("runc", "kill", project.container(service), signal)
        case "logs", "--tail", lines:
            project.logs(int(lines))
        case "down", "--volumes", *_:
            project.down()
        case _:
            parser.error(f"{given.command} {' '.join(given.words)} is not taken over")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
