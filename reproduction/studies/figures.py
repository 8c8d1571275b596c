"""All pictures of docs/figures.md, and of heads on the pages of methods, by the commands on these pages.

`python -m reproduction study figures --data DIR`

The commands run in OUT, one after the other; those whose folder is complete are not run again. Each picture is then
drawn from the runs that its section or its command names, and docs/figures/drawn.json notes with which commands. A test
compares these notes with the pages, so that no picture is older than its commands.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from PIL import Image

from fedapp.errors import BadRequest
from reproduction.figures import papers

PAGE = Path(__file__).parents[2] / "docs" / "figures.md"
DRAWN = PAGE.parent / "figures" / "drawn.json"
OTHERS = tuple(PAGE.parent / "methods" / f"{name}.md" for name in ("fedgh", "fedclassavg"))
"""Pages with a picture of heads and its commands: the last one draws it from the folder of its name."""
OUT = re.compile(r"--out (runs/[\w-]+)")


class Picture(NamedTuple):
    """A picture of the page: its file, the id of its figure, the folders of its runs, and the commands of these."""

    file: str
    figure: str
    runs: tuple[str, ...]
    commands: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the figure, the folders and the commands."""
        return hashlib.sha256(json.dumps(self[1:]).encode()).hexdigest()


def all_pages() -> str:
    """Return the text of the pages."""
    return "\n".join(page.read_text(encoding="utf-8") for page in (PAGE, *OTHERS))


def commands_of(text: str) -> dict[str, str]:
    """Return the page's commands that make runs, by their folder."""
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if "fedapp " in line]
    return {found[1]: line for line in lines if (found := OUT.search(line))}


def pictures_of(text: str) -> list[Picture]:
    """Return the pictures of the pages in their order.

    Raises
    ------
    BadRequest : a section names neither one folder for each picture nor folders for all, or one that no command makes.
    """
    commands, names = commands_of(text), dict(re.findall(r"\b([A-Z]+)=(runs/\S+)", text))
    found = []
    for figure, section in re.findall(r"^### ([\w-]+): .*?\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL):
        files = re.findall(r"!\[[^\]]+\]\(figures/([^)]+)\)", section)
        line = re.search(r"^Runs: (.*)\.$", section, re.MULTILINE)
        runs = re.findall(r"`([^`]+)`", line[1]) if line else OUT.findall(section)
        runs = [names.get(run.removeprefix("$"), run) for run in runs]
        if len(files) not in (1, len(runs)):
            raise BadRequest(
                f"{figure}: {len(files)} pictures of {len(runs)} runs: give one picture, or one for each run"
            )
        for file, own in zip(files, [runs] if len(files) == 1 else [[run] for run in runs], strict=True):
            made = {"/".join(run.split("/")[:2]) for run in own}
            if missing := made - set(commands):
                raise BadRequest(f"{figure}: no command of the page makes {', '.join(sorted(missing))}")
            found.append(Picture(file, figure, tuple(own), tuple(commands[m] for m in sorted(made))))
    drawn = re.findall(r"^python -m reproduction figure (\S+) (.+) --out (\S+-heads\.png)$", text, re.MULTILINE)
    for figure, folders, file in drawn:
        found.append(Picture(file, figure, tuple(folders.split()), (commands[f"runs/{Path(file).stem}"],)))
    return found


def run_commands(commands: dict[str, str], out: Path, data: Path) -> list[str]:
    """Run the commands whose folder is not complete; return those that failed."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done, failed = out / "done", []
    done.mkdir(parents=True, exist_ok=True)
    for folder, command in commands.items():
        note = done / hashlib.sha256(command.encode()).hexdigest()
        if note.is_file():
            continue
        print(f"$ {command}", flush=True)
        shutil.rmtree(out / folder, ignore_errors=True)
        line = command.replace("data-dir=DIR", f"data-dir={shlex.quote(str(data))}")
        # A comparison in which a run diverged exits with 1; its figure names that run.
        code = subprocess.run(["bash", "-c", line], cwd=out, env=environment, check=False).returncode
        if code == 0 or ("compare" in command and code == 1):
            note.touch()
        else:
            failed.append(command)
    return failed


def main(
    data: Annotated[Path, typer.Option(help="folder with mnist.npz")],
    out: Annotated[Path, typer.Option(help="folder in which the commands run")] = Path("runs/figures"),
) -> int:
    """Run, draw, note."""
    text = all_pages()
    pictures = pictures_of(text)
    failed = run_commands(commands_of(text), out, data.expanduser().absolute())
    drawn = json.loads(DRAWN.read_text()) if DRAWN.is_file() else {}
    for picture in pictures:
        if set(picture.commands) & set(failed):
            continue
        drawing = papers.draw(picture.figure, [out / run for run in picture.runs])
        papers.save(drawing, DRAWN.parent / picture.file)
        if picture.file.endswith(".png"):  # 64 colours: a quarter of the bytes
            with Image.open(DRAWN.parent / picture.file) as image:
                small = image.convert("RGB").quantize(64)
            small.save(DRAWN.parent / picture.file, optimize=True)
        print(f"{picture.file}: {drawing.caption}", flush=True)
        drawn[picture.file] = picture.digest
        DRAWN.write_text(json.dumps({p.file: drawn[p.file] for p in pictures if p.file in drawn}, indent=1) + "\n")
    for command in failed:
        print(f"failed: {command}", file=sys.stderr)
    return int(bool(failed))
