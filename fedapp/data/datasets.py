"""Data sets as arrays that all processes of a machine share.

===================  ======================================================================================
name                 where it comes from
===================  ======================================================================================
``digits``           embedded: 1,797 real handwritten digits (8x8, grey levels 0..16) that ship with
                     scikit-learn. They have no test set: use split ``holdout``.
``mnist``            ``mnist.npz`` in the data folder, else torchvision. Likewise ``fashion_mnist``,
                     ``emnist_letters`` (26 classes, labels 0..25, images upright), ``cifar10``, ``cifar100``.
``tiny_imagenet``    ``tiny_imagenet.npz``, else the published ``tiny-imagenet-200.zip`` in the data folder. The
                     labelled validation images are the test set; the unlabelled test images are not used.
``cinic10``          ``cinic10.npz``, else the published ``CINIC-10.tar.gz``: its train and its test part; the
                     validation part is not used.
``npz``              your own arrays, `fedapp.data.columns`: data-dir is an ``.npz`` file, or a folder with one file
                     per client, ``<client>.npz``, or ``train/<client>.npz`` and ``test/<client>.npz``.
``csv``, ``parquet``  a table, `fedapp.data.tables`: a file, or a folder with one file per client.
``folder``           your own pictures: ``<class>/*``, or ``train/<class>/*`` and, if they exist, ``validation/...`` and
                     ``test/<class>/*``; or the same below one folder per client.
``hf``               a data set of the library `datasets`, `fedapp.data.hub`.
===================  ======================================================================================

``NAME.npz`` of a published data set holds ``x_train``, ``y_train`` and, if there is a test set, ``x_test``, ``y_test``:
images uint8 (N, H, H) or (N, H, H, C), labels integers 0..C-1 (N,); optionally ``class_names``.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import inspect
import json
import socket
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp import plugins
from fedapp.data import pictures
from fedapp.data.cache import Store, build_once, cache_root, file_identity, open_array
from fedapp.data.columns import BODY, PARTS, PLAIN, Own, form_of, of_clients, read_client, read_npz
from fedapp.data.columns import own as check_columns
from fedapp.data.dataset import Dataset
from fedapp.data.names import HUB, PART_OF, entries_of, files_of, is_there, readable, readable_at
from fedapp.data.pictures import CIFAR10_CLASSES
from fedapp.errors import BadRequest, raised, suggest_choice
from fedapp.files import absolute
from fedapp.lazy import torchvision
from fedapp.settings import DataSettings

UInt8 = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]
ARRAYS = ("x_train", "y_train", "x_test", "y_test")

FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """What is known of a published data set: names of its classes, mean and standard deviation of x / scale."""

    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    side: int
    scale: float = 255.0

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the images as published."""
        return len(self.mean), self.side, self.side


def _numbers(count: int) -> tuple[str, ...]:
    return tuple(str(i) for i in range(count))


# Mean and standard deviation over all pixels of the official training images, per channel. MNIST, Fashion-MNIST and
# CIFAR-10 were recomputed from the images; CINIC-10: the values that its authors publish; the others: the customary
# values of the PyTorch community. Digits: over all 1,797 images.
_FACTS: dict[str, Facts] = {
    "digits": Facts(_numbers(10), (0.305,), (0.376,), 8, 16.0),
    "mnist": Facts(_numbers(10), (0.1307,), (0.3081,), 28),
    "fashion_mnist": Facts(FASHION_CLASSES, (0.2860,), (0.3530,), 28),
    "emnist_letters": Facts(tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), (0.1722,), (0.3309,), 28),
    "cifar10": Facts(CIFAR10_CLASSES, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), 32),
    "cifar100": Facts(_numbers(100), (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), 32),
    "tiny_imagenet": Facts(_numbers(200), (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821), 64),
    "cinic10": Facts(CIFAR10_CLASSES, (0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587), 32),
}
_TORCHVISION = {
    "mnist": ("MNIST", {}),
    "fashion_mnist": ("FashionMNIST", {}),
    "emnist_letters": ("EMNIST", {"split": "letters"}),
    "cifar10": ("CIFAR10", {}),
    "cifar100": ("CIFAR100", {}),
}
_ARCHIVES = {
    "tiny_imagenet": ("tiny-imagenet-200.zip", "http://cs231n.stanford.edu/tiny-imagenet-200.zip"),
    "cinic10": ("CINIC-10.tar.gz", "https://datashare.ed.ac.uk/handle/10283/3192"),
}
OWN_FORMS = {
    "npz": "NumPy files with arrays x and y, or x_train, y_train, x_test, y_test; data-dir names the file or folder",
    "csv": "a table, or a folder with a table for each client; the key columns gives their meaning",
    "parquet": "the same as Parquet files",
    "folder": "pictures in folders named by their classes, or in a folder for each client",
    "hf": "a data set in the form of Hugging Face datasets; data-dir names its place",
}
"""Forms of the user's own data, each in one sentence."""
OWN = tuple(OWN_FORMS)
DATASET_NAMES: tuple[str, ...] = (*_FACTS, *OWN)
"""Every name that :func:`load` knows."""


def installed() -> dict[str, plugins.Entry]:
    """Return the data sets that installed packages add, by name; nothing is imported."""
    return plugins.entries("datasets", DATASET_NAMES)


def published(name: str) -> Facts | None:
    """Return the known facts of a published data set without loading it, or None for the user's own."""
    return _FACTS.get(name)


def origin(name: str) -> str:
    """Return the source of a published data set."""
    wins = f"{name}.npz in data-dir"
    if name == "digits":
        return "comes with scikit-learn; nothing is downloaded"
    if name in _TORCHVISION:
        return f"{wins}, else downloaded by torchvision to data-dir"
    archive, address = _ARCHIVES[name]
    return f"{wins}, or {archive} from {address} in it"


def check_name(name: str) -> None:
    """Refuse the name of a data set that neither fedapp nor an installed package has.

    Raises
    ------
    BadRequest : unknown; says which there are.
    """
    if name in DATASET_NAMES or name in installed():
        return
    if name in (problems := plugins.problems("datasets", DATASET_NAMES)):
        raise BadRequest(problems[name])
    known = (*DATASET_NAMES, *installed())
    raise BadRequest(f"unknown dataset '{name}'{suggest_choice(name, known)}")


_Source = tuple[Mapping[str, Any], Callable[[Store], Own]]
"""Where a data set comes from: the identity of its files, and the reader that fills a store."""


_latest: dict[tuple[object, ...], Dataset] = {}
"""What `load` returned last, by its arguments."""


def load(name: str, data_dir: str | Path | None = None, settings: DataSettings = PLAIN, node: bool = False) -> Dataset:
    """Return a data set, decoding or downloading it the first time.

    Parameters
    ----------
    name : one of :data:`DATASET_NAMES`, or of :func:`installed`.
    data_dir : the user's data folder. ``NAME.npz`` in it wins over every other source; downloads go into it (into the
        cache folder if None). For ``npz``, ``csv`` and ``parquet`` the file itself or a folder with one file per
        client; for ``folder`` the folder of the pictures.
    settings : how own data are read.   node : the data are a real node's own, which other nodes cannot see.

    Raises
    ------
    BadRequest : unknown name; data absent and not to be downloaded; wrong arrays, labels or pictures; cache not
        writable.

    Notes
    -----
    Pictures of a ``folder`` are turned as their EXIF tag says, cropped to the central square and resized to one size:
    their own if all are the same square of at most 64 pixels, else the largest of 28, 32 and 64 that is not above the
    median of the shorter sides (28 if all are smaller). `settings.image_size` chooses another size.
    Grey stays grey if every picture is grey; transparency is ignored.
    """
    check_name(name)
    root = _root(data_dir)

    def built(store: Store) -> dict[str, Any]:
        with readable_at(root):
            own = build(store)
        return _finish(store, name, own)

    with readable_at(root):
        key, build = _find(name, root, settings, node)
    found = build_once(name, key, built, partial(_open, name))
    _latest[name, root, settings.reading] = found
    return found


def _root(data_dir: str | Path | None) -> Path | None:
    """Return the absolute path of a data folder; a name of the hub stays as it is."""
    place = str(data_dir or "")
    return Path(place) if place.startswith(HUB) else absolute(place) if place else None


def version(name: str, place: str, settings: DataSettings) -> Mapping[str, Any]:
    """Return what tells one version of a node's own files from another: nothing is read but their names and times."""
    root = absolute(place)
    with readable_at(root):
        return _find(name, root, settings, node=True)[0]


def latest(name: str, data_dir: str | Path | None = None, settings: DataSettings = PLAIN) -> Dataset:
    """Return a data set as this process last loaded it, without a look at its files: there may be very many.

    `load` looks, so a run that begins with it has the data that are there then, and keeps them until its end.
    """
    root = _root(data_dir)
    return _latest.get((name, root, settings.reading)) or load(name, data_dir, settings)


def are_features(name: str, data_dir: str) -> bool:
    """Return whether own data are features of a pretrained body, by the names of a file's arrays; no array is read."""
    if name != "npz" or not data_dir:
        return False
    place = absolute(data_dir)
    with contextlib.suppress(OSError, zipfile.BadZipFile, StopIteration):
        file = place if place.is_file() else next(place.rglob("*.npz"))
        with zipfile.ZipFile(file) as archive:
            return "about.npy" in archive.namelist()
    return False


def source(place: Path) -> str:
    """Return the name under which :func:`load` reads a file or folder of own data that exists."""
    kinds = ("csv", "parquet")
    if place.is_file():
        suffix = place.suffix.lower()[1:]
        return suffix if suffix in kinds else "npz"
    if (place / "state.json").is_file() or (place / "dataset_dict.json").is_file():
        return "hf"
    places = (place, *(place / part for part in PARTS))
    return next((kind for kind in ("npz", *kinds) if any(files_of(p, kind) for p in places)), "folder")


@lru_cache(maxsize=8)
def _open(name: str, folder: Path) -> Dataset:
    """Return the data set in a folder of the cache.

    Raises
    ------
    BadRequest : the folder is damaged.
    """
    try:
        found = _opened(name, folder)
        samples = [x for one in found.parts or (found,) for x in (one.x_train, one.x_test)]
        if found.about and _sha256(samples) != found.identity["samples"]:  # else a wrong bit shows nowhere
            raise ValueError("its features are not those that were stored")
        return found
    except BadRequest:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise BadRequest(f"damaged cache folder {folder} ({raised(error)}): delete it and try again") from error


def _opened(name: str, folder: Path) -> Dataset:
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    arrays: dict[str, Any] = {key: open_array(folder / f"{key}.npy") for key in (*ARRAYS, *meta.get("columns", ()))}
    whole = Dataset(
        name=name,
        classes=tuple(meta["classes"]),
        scale=float(meta["scale"]),
        kind=meta.get("kind", "image"),
        owner_names=tuple(meta.get("owner_names", ())),
        identity=meta["identity"],
        skipped=tuple(meta["skipped"]),
        **_described(meta),
        **arrays,
    )
    if whole.part is None:
        return whole
    train, test = np.split(whole.part, [whole.num_train])
    parts = []
    for number, facts in enumerate(meta["parts"]):
        samples: dict[str, Any] = {key: open_array(folder / f"{key}_{number}.npy") for key in ("x_train", "x_test")}
        labels = whole.labels_of(np.flatnonzero(train == number), np.flatnonzero(test == number))
        parts.append(replace(whole, skipped=(), **_described(facts), **samples, **labels | {"part": None}))
    return replace(whole, parts=tuple(parts))


def _described(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``meta.json`` says of samples of one size."""
    return {
        "mean": tuple(meta["mean"]),
        "std": tuple(meta["std"]),
        "ignored": tuple(meta.get("ignored", ())),
        "features": tuple(meta.get("features", ())),
        "about": meta.get("about", {}),
        "categories": {name: tuple(found) for name, found in meta.get("categories", {}).items()},
    }


def _find(name: str, root: Path | None, settings: DataSettings, node: bool) -> _Source:
    """Return the source of a data set: the user's arrays first, then an installed or published one."""
    if name not in DATASET_NAMES:
        return _of_package(installed()[name], root)
    own = root / f"{name}.npz" if root is not None else None
    key: dict[str, Any]
    if name in ("npz", "csv", "parquet"):
        files = _own_files(root, name)
        assert root is not None
        key = {name: [file_identity(path) for path in files], **({"skip_bad": True} if settings.skip_bad else {})}
        if name == "npz":
            bodies = () if node else settings.named_bodies
            key |= {"bodies": bodies} if bodies else {}
            return key, lambda _: _build_npz(name, files, root, settings.skip_bad, bodies)
        key |= {"columns": settings.columns, "node": node}
        from fedapp.data import tables  # imports pandas, which takes a while, and images need none

        return key, lambda _: tables.read(files, root, settings, node)
    if name == "hf":
        from fedapp.data import hub

        place = "" if root is None else str(root)
        key = {
            **hub.identity(place),
            "columns": settings.columns,
            "image_size": None if settings.image_size == "auto" else settings.image_size,
            "node": node,
            **({"skip_bad": True} if settings.skip_bad else {}),
        }
        return key, lambda _: hub.read(place, settings, node)
    if name == "folder":
        if root is None or not is_there(root) or not root.is_dir():
            given = f"{root} is not a folder" if root is not None else "data-dir is not given"
            raise BadRequest(
                f"data set 'folder' needs data-dir ({given}): a folder with train/<class>/* and, if there is a test "
                "set, test/<class>/*; or with <class>/* alone"
            )
        listing = pictures.listed(root, settings.layout)
        key = {"folder": str(root.resolve()), "files": [file_identity(path) for path in listing.files]}
        # Only what differs from the defaults, with which folders of earlier versions were read.
        key |= {k: v for k in ("image_size", "layout", "skip_bad") if (v := getattr(settings, k)) != getattr(PLAIN, k)}
        return key, lambda store: pictures.read_folder(listing, store, settings)
    if own is not None and own.is_file():
        return {"npz": file_identity(own)}, lambda _: _build_npz(name, [own], own.parent)
    if name == "digits":
        return {"scikit-learn": importlib.metadata.version("scikit-learn")}, lambda _: _build_digits()
    if name in _ARCHIVES:
        return _archive_source(name, root)
    return {"source": "torchvision"}, lambda _: _build_torchvision(name, root)


def _finish(store: Store, name: str, own: Own) -> dict[str, Any]:
    """Write the arrays that are not in the store yet and return the data set's ``meta.json``."""
    for key, array in own.arrays.items():
        if isinstance(array, np.memmap):
            array.flush()
        elif not (store.folder / f"{key}.npy").exists():
            store.put(key, array)
    classes, facts = own.classes, _FACTS.get(name)
    if classes is None:
        largest = max(int(own.arrays[key].max(initial=0)) for key in ("y_train", "y_test"))
        classes = facts.classes if facts else _numbers(largest + 1)
    scale = (facts.scale if facts else 255.0) if own.kind == "image" else 1.0
    for number, one in enumerate(own.parts):
        for key in ("x_train", "x_test"):
            store.put(f"{key}_{number}", one.arrays[key])
    samples = [_samples(one, facts) for one in own.parts or (own,)]
    bodies = [one.about[BODY] for one in own.parts or (own,) if one.about]
    return {
        "classes": list(classes),
        "scale": scale,
        "kind": own.kind,
        "columns": [key for key in own.arrays if key not in ARRAYS],
        "owner_names": list(own.owner_names),
        "skipped": list(own.skipped),
        "identity": _identity(own, classes) | ({BODY: ",".join(bodies)} if bodies else {}),
        **samples[0],
        **({"parts": samples, "ignored": list(own.ignored)} if own.parts else {}),
    }


def _samples(own: Own, facts: Facts | None) -> dict[str, Any]:
    """Return what ``meta.json`` says of samples of one size."""
    known = facts is not None and len(facts.mean) == own.arrays["x_train"].shape[3]
    return {
        "mean": list(facts.mean) if facts and known else [],
        "std": list(facts.std) if facts and known else [],
        "ignored": list(own.ignored),
        "features": list(own.features),
        "about": dict(own.about),
        "categories": {name: list(found) for name, found in own.categories.items()},
    }


def _identity(own: Own, classes: Sequence[str]) -> dict[str, str]:
    """Return SHA-256 of the data, part by part, so that a message can name the change."""
    sized = own.parts or (own,)
    parts: dict[str, list[Any]] = {
        "samples": [one.arrays[key] for one in sized for key in ("x_train", "x_test")],
        "labels": [own.arrays["y_train"], own.arrays["y_test"]],
        "features": [[one.features, {name: list(found) for name, found in one.categories.items()}] for one in sized],
        "classes": [list(classes)],
        "clients": [own.owner_names, *(own.arrays[key] for key in ("owners", "part") if key in own.arrays)],
        "groups": [own.arrays[key] for key in ("groups", "held_out") if key in own.arrays],
    }
    return {name: _sha256(values) for name, values in parts.items()}


def _sha256(values: Sequence[Any]) -> str:
    """Return the SHA-256 of arrays, with their dtypes and shapes, and of JSON values."""
    digest = hashlib.sha256()
    for value in values:
        about = [value.dtype.str, value.shape] if isinstance(value, np.ndarray) else value
        digest.update(json.dumps(about).encode() + b"\n")
        if isinstance(value, np.ndarray) and value.size:
            digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _build_digits() -> Own:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = images.reshape(-1, 8, 8, 1).astype(np.uint8)
    y = labels.astype(np.int64)
    return Own({"x_train": x, "y_train": y, "x_test": x[:0], "y_test": y[:0]}, None, "image")


# --- arrays in a .npz file -----------------------------------------------------------------------------------------


def _own_files(root: Path | None, kind: str) -> list[Path]:
    """Return the files of `data-dir` with the suffix `kind`: one, or one per client."""
    wanted = f"a .{kind} file, or a folder with one .{kind} file per client"
    wanted = wanted.replace("a .npz", "an .npz")
    if root is None:
        raise BadRequest(f"data set '{kind}' needs data-dir: {wanted}")
    if is_there(root) and root.is_file():
        return [root]
    if not is_there(root) or not root.is_dir():
        raise BadRequest(f"data-dir {root} does not exist: give {wanted}")
    files = files_of(root, kind)
    places = [root / part for part in PARTS if (root / part).is_dir()]
    parted = [path for place in places for path in files_of(place, kind)]
    for folder in [f for place in (root, *places) for f in entries_of(place) if f.is_dir() and f not in places]:
        part = PART_OF.get(folder.name.casefold(), "")
        # Runs, and an extraction that is not complete, may lie next to their data.
        written = folder.suffix == ".parts" or any((folder / name).exists() for name in ("config.toml", "runs"))
        if (part or files or parted) and not written and files_of(folder, kind):
            advice = f"call it {part}, or " if part not in ("", folder.name) else ""
            raise BadRequest(f"the .{kind} files in {folder} would not be read: {advice}move it away")
    # A single .npz file is all of the data, whatever its name.
    for path in [*files, *parted] if kind != "npz" or parted or len(files) > 1 else []:
        if path.stem.casefold() in PART_OF:
            part = PART_OF[path.stem.casefold()]
            raise BadRequest(
                f"{path} would be the client '{path.stem}': if it is a part of the data, write one table with a column "
                f"split, or put a file for each client into {root / part}; if it is a client, rename it"
            )
    if files and parted:
        raise BadRequest(f"data-dir {root} has {files[0].name} next to {parted[0].parent.name}/: move one of them away")
    if not files and not parted:
        raise BadRequest(f"data-dir {root} holds no .{kind} file: give a file, or a folder with one file per client")
    return files or parted


def _build_npz(name: str, paths: list[Path], root: Path, skip_bad: bool = False, bodies: Sequence[str] = ()) -> Own:
    """Read and check the user's arrays; published names also have their own classes and grey levels."""
    facts = _FACTS.get(name)
    if len(paths) == 1 and paths[0].parent in (root, root.parent):  # a folder above it may be called train or test
        own = check_columns(paths[0], read_npz(paths[0]), facts.classes if facts else None)
    else:
        found, skipped = readable(root, paths, partial(read_client, root=root), form_of, skip_bad)
        own = replace(of_clients(root, found, bodies), skipped=skipped)
    x = own.arrays["x_train"]
    if facts is not None and own.kind != "image":
        raise BadRequest(f"{paths[0]}: {name} has uint8 images, found {x.dtype} of shape {x.shape}")
    if facts is not None and int(x.max(initial=0)) > facts.scale:
        raise BadRequest(f"{paths[0]}: {name} has grey levels 0 .. {facts.scale:g}, found {int(x.max())}")
    return own


# --- installed packages ----------------------------------------------------------------------------------------


def _of_package(entry: plugins.Entry, root: Path | None) -> _Source:
    """Call the function of an installed package once per version of it, of its file, and of the files in `data-dir`."""
    function = entry.load()
    if not callable(function):
        raise BadRequest(f"{entry}: {entry.target} is not a function of data_dir")
    files = [root] if root is not None and root.is_file() else sorted(root.rglob("*")) if root is not None else []
    code = inspect.getsourcefile(function) if inspect.isroutine(function) and hasattr(function, "__code__") else None
    key = {
        "package": [entry.package, entry.target],
        "code": file_identity(Path(code)) if code and Path(code).is_file() else [],
        "data-dir": "" if root is None else str(root.resolve()),
        "files": [file_identity(f) for f in files if f.is_file()],
    }

    def build(_: Store) -> Own:
        try:
            columns = function("" if root is None else str(root))
            columns = {str(k): np.asarray(v) for k, v in dict(columns).items()}
        except BadRequest:
            raise
        except (Exception, SystemExit) as e:
            raise BadRequest(
                f"{entry} cannot be read ({raised(e)}): it returns a dict of columns, x and y at least"
            ) from e
        return check_columns(entry, columns)

    return key, build


# --- torchvision ---------------------------------------------------------------------------------------------------


def _build_torchvision(name: str, root: Path | None) -> Own:
    class_name, options = _TORCHVISION[name]
    target = root if root is not None else cache_root() / "downloads"
    reader = getattr(torchvision.datasets, class_name)
    before = socket.getdefaulttimeout()
    try:
        target.mkdir(parents=True, exist_ok=True)
        # torchvision opens its connections without a time limit; behind a firewall that drops packets it would hang.
        socket.setdefaulttimeout(30.0)
        parts = {
            split: reader(str(target), train=split == "train", download=True, **options) for split in ("train", "test")
        }
    except (OSError, RuntimeError) as error:  # no network, no right to write, a damaged download
        place = f"in {root}" if root is not None else "in a folder and name it with data-dir"
        reason = " ".join(str(error).split()) or type(error).__name__
        raise BadRequest(
            f"data set {name!r} is not here and could not be downloaded: either put {name}.npz {place}, with "
            "the arrays x_train, y_train, x_test, y_test (images uint8 N x H x W [x C], labels 0 .. C-1), or connect "
            f"to the network so that torchvision downloads it into {target} ({reason})"
        ) from error
    finally:
        socket.setdefaulttimeout(before)
    arrays: dict[str, np.ndarray] = {}
    for split, part in parts.items():
        x, y = np.asarray(part.data), np.asarray(part.targets, dtype=np.int64)
        if name == "emnist_letters":
            x, y = upright_letters(x, y)
        arrays[f"x_{split}"] = x if x.ndim == 4 else x[..., None]
        arrays[f"y_{split}"] = y
    return Own(arrays, tuple(parts["train"].classes) if name == "cifar100" else None, "image")


def upright_letters(x: UInt8, y: Int64) -> tuple[UInt8, Int64]:
    """Turn EMNIST Letters as published into upright images uint8 (N, 28, 28) and labels 0..25.

    Its files have rows and columns exchanged, as NIST's have, and labels 1 for A .. 26 for Z.
    """
    return np.ascontiguousarray(x.transpose(0, 2, 1)), y - 1


# --- published archives --------------------------------------------------------------------------------------------


def _archive_source(name: str, root: Path | None) -> _Source:
    file_name, address = _ARCHIVES[name]
    path = (root or cache_root() / "downloads") / file_name
    if not path.is_file():
        where = f"{root}" if root is not None else "a folder that you name with data-dir"
        raise BadRequest(
            f"data set {name!r} is not here: put {name}.npz (x_train, y_train, x_test, y_test; images uint8, "
            f"labels 0 .. C-1) into {where}, or download the published {file_name} ({address}) into it; "
            "it is decoded once"
        )
    reader = pictures.read_tiny_imagenet if name == "tiny_imagenet" else pictures.read_cinic10

    def build(store: Store) -> Own:
        try:
            return reader(path, store)
        except (OSError, EOFError, KeyError, zipfile.BadZipFile, tarfile.TarError, zlib.error) as error:
            raise BadRequest(f"cannot read {path} ({error}): download it again from {address}") from error

    return {"archive": file_identity(path)}, build
