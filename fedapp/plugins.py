"""Code that is not fedapp's own: what installed packages add by entry points, and what may be imported at all.

A package adds to fedapp with entry points in its `pyproject.toml`:

    [project.entry-points."fedapp.methods"]     # METHOD = Method(id="mymethod", ...)
    mymethod = "mypkg.method:METHOD"
    [project.entry-points."fedapp.models"]      # a function as for `model = package.module:function`
    mynet = "mypkg.nets:build"
    [project.entry-points."fedapp.datasets"]    # (data_dir: str) -> dict of columns, as in an .npz of one's own
    mysite = "mypkg.data:load"
    [project.entry-points."fedapp.trackers"]    # a class derived from fedapp.tracking.base.Tracker
    mytracker = "mypkg.tracking:MyTracker"

Reading the entry points imports nothing. Models, methods and data sets of others are imported by `imported` alone.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from fedapp.errors import BadRequest, raised
from fedapp.files import absolute

WHAT = {"methods": "method", "models": "model", "datasets": "data set", "trackers": "tracker"}
"""The entry-point groups, without `fedapp.`, and what one entry of each is."""


@dataclass(frozen=True)
class Entry:
    """An entry point: its group, its name, `package.module:attribute`, and the package that adds it, with version."""

    group: str
    name: str
    target: str
    package: str

    def __str__(self) -> str:
        return f"the {WHAT[self.group]} '{self.name}' of the package {self.package}"

    def load(self) -> Any:
        """Import what the entry point names.

        Raises
        ------
        BadRequest : it cannot be imported, or may not be; one line that names the package.
        """
        return imported(self.target, str(self))


def well_formed(target: str) -> bool:
    """Whether a text is of the form `package.module:attribute`."""
    module, _, attribute = target.partition(":")
    return attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))


@functools.cache
def _read(group: str) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = defaultdict(list)
    for point in metadata.entry_points(group=f"fedapp.{group}"):
        package = f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unknown package"
        found[point.name].append(Entry(group, point.name, point.value.replace(" ", ""), package))
    return dict(sorted(found.items()))


def entries(group: str, taken: Collection[str]) -> dict[str, Entry]:
    """Return what installed packages add to a group, by name; nothing is imported.

    Parameters
    ----------
    group : a key of `WHAT`.   taken : names of fedapp's own, which no package can take.
    """
    refused = problems(group, taken)
    return {name: found[0] for name, found in _read(group).items() if name not in refused}


def problems(group: str, taken: Collection[str]) -> dict[str, str]:
    """Return the entries that are left out, name -> one line that names the package and says why."""
    refused: dict[str, str] = {}
    for name, found in _read(group).items():
        packages = " and ".join(sorted(e.package for e in found))
        if name in taken:
            refused[name] = f"{found[0]}: fedapp has one of this name, rename it"
        elif len(found) > 1:
            refused[name] = f"the {WHAT[group]} '{name}' is in the packages {packages}: uninstall one of them"
        elif not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name) or name == "auto":
            refused[name] = f"{found[0]}: a name has letters, digits, '-' and '_', and is not auto"
        elif not well_formed(found[0].target):
            refused[name] = f"{found[0]}: '{found[0].target}' is not package.module:attribute"
    return refused


# ---- code next to a configuration ------------------------------------------------------------------------------------

CODE_FOLDER = "FEDAPP_CODE_FOLDER"
"""Environment variable with the folder of the configuration file, for the processes of a simulation."""


def import_code_next_to(file: Path) -> None:
    """Let modules next to a configuration file be found, here and in the processes that this one starts.

    They come after all others, so that no file next to a configuration takes the place of an installed package.
    """
    os.environ[CODE_FOLDER] = str(absolute(file).parent)
    _extend()


def _extend() -> None:
    folder = os.environ.get(CODE_FOLDER)
    if folder and folder not in sys.path:
        sys.path.append(folder)


_extend()


def code_file(target: str) -> Path | None:
    """Return the file of the module that `package.module:attribute` names, or None; nothing is imported."""
    first, *rest = target.partition(":")[0].split(".")
    try:
        spec = importlib.util.find_spec(first)
    except ValueError:  # `__main__` may have none
        return None
    if spec is None or not spec.origin:
        return None
    file = Path(spec.origin)
    for name in rest:
        folder = file.parent / name
        file = folder / "__init__.py" if folder.is_dir() else file.parent / f"{name}.py"
    return file if file.is_file() else None


# ---- what may be imported --------------------------------------------------------------------------------------------

_permitted: tuple[str, bool] | None = None
"""What may be imported, in the form of `allow`, and whether entry points may be; None = everything, because the user
names it in this process."""


def allowed(name: str, allow: str) -> bool:
    """Return whether `allow` names code: `mypkg.*, torchvision.models:resnet18`, exact or a package with `.*`.

    `mypkg.*` stands for every attribute of the module `mypkg` and of the modules below it. Nothing is imported.
    """
    module = name.partition(":")[0]
    texts = [entry.strip() for entry in allow.split(",")]
    return any(name == e or (e.endswith(".*") and f"{module}.".startswith(e[:-1])) for e in texts if e)


@contextmanager
def only(allow: str, *, installed: bool = False) -> Iterator[None]:
    """Import no code here but what `allow` names; for names that come from a server or from a stored file.

    Parameters
    ----------
    installed : entry points of installed packages may be imported too.
    """
    global _permitted
    before, _permitted = _permitted, (allow, installed)
    try:
        yield
    finally:
        _permitted = before


def is_permitted_by_name(target: str) -> bool:
    """Whether it may be because it is named itself, in `allow` or by an installed package."""
    if _permitted is None or target in (entry.strip() for entry in _permitted[0].split(",")):
        return True
    return _permitted[1] and any(e.target == target for group in WHAT for found in _read(group).values() for e in found)


def imported(target: str, what: str) -> Any:
    """Import what `package.module:attribute` names.

    Parameters
    ----------
    what : names it in messages.

    Raises
    ------
    BadRequest : it cannot be imported, or `only` does not allow it. A package that is allowed as a whole, `mypkg.*`,
        stands for what it defines, not for what it imports: `mypkg.nets:system` may be `os.system`.
    """
    if not (_permitted is None or allowed(target, _permitted[0]) or is_permitted_by_name(target)):
        raise BadRequest(
            f"{what} is code that is not imported here: if you trust it, allow '{target}' (on a node in the "
            "node-config, on the command line with --allow)"
        )
    module, _, attribute = target.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as e:  # a script ends the process when it is imported
        raise BadRequest(
            f"{what} cannot be imported ({raised(e)}): check the name, and install the package or put its folder on "
            "PYTHONPATH"
        ) from e
    whole = _permitted is not None and not is_permitted_by_name(target)
    home = getattr(found, "__module__", module) if inspect.isroutine(found) or inspect.isclass(found) else module
    if whole and str(home).partition(".")[0] != module.partition(".")[0]:
        raise BadRequest(
            f"{what} is defined in {home}, which '{_permitted and _permitted[0]}' does not stand for: allow '{target}' "
            "itself if you trust it"
        )
    return found


def check_place(target: str, *forbidden: Path) -> None:
    """Refuse code that lies directly in one of these folders, before it is imported.

    Raises
    ------
    BadRequest : it does, or there is no such package.
    """
    top = target.partition(":")[0].partition(".")[0]
    found = importlib.util.find_spec(top)
    if found is None:
        raise BadRequest(f"'{target}' cannot be imported: there is no package '{top}' on this node, install it")
    files = [
        *(found.submodule_search_locations or ()),
        *([found.origin] if found.has_location and found.origin else ()),
    ]
    places = {Path(file).resolve().parent for file in files if Path(file).name != "__init__.py"}
    if places & {folder.resolve() for folder in forbidden}:
        raise BadRequest(
            f"'{target}' would be imported from {sorted(places)[0]}, the working or the data folder of this node: "
            "install it as a package"
        )
