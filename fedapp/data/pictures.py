"""Pictures decoded into arrays: the published archives of Tiny ImageNet and CINIC-10, and a user's own folder.

Every reader fills the images row by row into files of the store, so that no data set need fit into memory, and returns
its arrays and the names of its classes: `x_train`, `x_test` uint8 (N, S, S, channels) and `y_train`, `y_test` int64
(N,).
"""

from __future__ import annotations

import contextlib
import gzip
import io
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt

from fedapp.data.cache import Store
from fedapp.errors import BadRequest

UInt8 = npt.NDArray[np.uint8]
Item = TypeVar("Item")
Arrays = dict[str, np.ndarray]

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PICTURE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"})
STANDARD_SIZES = (28, 32, 64)


# --- published archives --------------------------------------------------------------------------------------------


def read_tiny_imagenet(path: Path, store: Store) -> tuple[Arrays, Sequence[str]]:
    """Decode ``tiny-imagenet-200.zip``; classes are sorted by WordNet id and named by their first word.

    Raises
    ------
    OSError, KeyError, zipfile.BadZipFile : if the archive is damaged or has another layout.
    """
    top = "tiny-imagenet-200/"
    with zipfile.ZipFile(path) as archive:
        ids = archive.read(top + "wnids.txt").decode().split()
        words: dict[str, str] = {}
        for line in archive.read(top + "words.txt").decode().splitlines():
            identifier, _, text = line.partition("\t")
            words[identifier] = text.split(",")[0].strip()
        ids.sort()
        label_of = {identifier: label for label, identifier in enumerate(ids)}
        train = sorted(
            member
            for member in archive.namelist()
            if member.startswith(top + "train/") and member.upper().endswith(".JPEG")
        )
        annotations = archive.read(top + "val/val_annotations.txt").decode().splitlines()
        test = sorted((f"{top}val/images/{row.split()[0]}", row.split()[1]) for row in annotations if row.strip())
        pairs = {
            "train": [(member, label_of[member.split("/")[2]]) for member in train],
            "test": [(member, label_of[identifier]) for member, identifier in test],
        }
        if not pairs["train"]:
            raise KeyError(f"no training images below {top}train/")
        arrays: dict[str, np.ndarray] = {}
        for split, rows in pairs.items():
            x = store.create(f"x_{split}", (len(rows), 64, 64, 3), np.uint8)
            for row, (member, _) in enumerate(_progress(rows, f"tiny_imagenet {split}")):
                with archive.open(member) as stream:
                    x[row] = _decode(stream, 64, member)
            arrays[f"x_{split}"] = x
            arrays[f"y_{split}"] = np.array([label for _, label in rows], np.int64)
    names = [words.get(identifier, identifier) for identifier in ids]
    classes = [text if names.count(text) == 1 else f"{text} ({ids[i]})" for i, text in enumerate(names)]
    return arrays, classes


def read_cinic10(path: Path, store: Store) -> tuple[Arrays, Sequence[str]]:
    """Decode the train and test parts of ``CINIC-10.tar.gz``; its classes are those of CIFAR-10.

    Raises
    ------
    OSError, EOFError, KeyError, tarfile.TarError : if the archive is damaged or has another layout.
    """
    # A gzip stream can only be read from its start. The first pass finds the names, so that the second one can write
    # every image to its row (sorted by name) without holding the data set in memory.
    with _stream_tar(path) as archive:
        members = [place for entry in archive if entry.isfile() and (place := _cinic10_place(entry.name)) is not None]
    rows: dict[str, tuple[np.ndarray, int]] = {}
    arrays: dict[str, np.ndarray] = {}
    for split in ("train", "test"):
        found = sorted(place for place in members if place[0] == split)
        if not found:
            raise KeyError(f"no images below {split}/")
        x = store.create(f"x_{split}", (len(found), 32, 32, 3), np.uint8)
        arrays[f"x_{split}"] = x
        arrays[f"y_{split}"] = np.array([CIFAR10_CLASSES.index(label) for _, label, _ in found], np.int64)
        rows.update({"/".join(place): (x, row) for row, place in enumerate(found)})
    with _stream_tar(path) as archive:
        for entry in _progress(archive, "cinic10"):
            place = _cinic10_place(entry.name) if entry.isfile() else None
            stream = archive.extractfile(entry) if place is not None else None
            if place is not None and stream is not None:
                x, row = rows["/".join(place)]
                x[row] = _decode(io.BytesIO(stream.read()), 32, entry.name)
    return arrays, CIFAR10_CLASSES


@contextlib.contextmanager
def _stream_tar(path: Path) -> Iterator[tarfile.TarFile]:
    """Read a .tar.gz from front to back; `EOFError` if it was cut, which tarfile's own gzip reader does not notice."""
    with gzip.open(path) as stream:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            yield archive
        while stream.read(1 << 20):  # the checksum is at the very end
            pass


def _cinic10_place(member: str) -> tuple[str, str, str] | None:
    """Return (split, class, file) of a picture that is used; None for all other members."""
    parts = Path(member).parts[-3:]
    if len(parts) != 3 or parts[0] not in ("train", "test") or not parts[2].lower().endswith(".png"):
        return None
    if parts[1] not in CIFAR10_CLASSES or parts[2].startswith("."):
        return None
    return parts[0], parts[1], parts[2]


def _decode(stream: Any, size: int, what: str) -> UInt8:
    """Decode one colour picture of a known size to uint8 (size, size, 3)."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(stream) as picture:
            pixels = np.asarray(picture.convert("RGB"))
    except (UnidentifiedImageError, SyntaxError) as error:
        raise OSError(f"{what} is not a picture") from error
    if pixels.shape != (size, size, 3):
        raise OSError(f"{what} is {pixels.shape[1]} x {pixels.shape[0]} pixels, expected {size} x {size}")
    return pixels


def _progress(items: Iterable[Item], text: str) -> Iterable[Item]:
    from rich.console import Console
    from rich.progress import track

    return track(items, f"decoding {text}", console=Console(stderr=True)) if sys.stderr.isatty() else items


# --- a folder of pictures ------------------------------------------------------------------------------------------


def class_folders(root: Path) -> tuple[dict[str, list[Path]], dict[str, list[Path]]]:
    """List the pictures of a user's folder: ``train/<class>/*`` and ``test/<class>/*``, or ``<class>/*`` alone.

    Returns
    -------
    train, test : class name -> its files, both sorted by name; `test` is empty where there is no test set.

    Raises
    ------
    BadRequest : if a folder is empty, holds other files, or has classes that the training folder lacks.
    """
    if not (root / "train").is_dir():
        return _pictures(root), {}
    others = [p.name for p in sorted(root.iterdir()) if p.is_dir() and not p.name.startswith(".")]
    others = [name for name in others if name not in ("train", "test")]
    if others:
        raise BadRequest(f"{root}: beside train and test there is {others[0]!r}, which would not be used: move it away")
    train = _pictures(root / "train")
    test = _pictures(root / "test") if (root / "test").is_dir() else {}
    foreign = sorted(set(test) - set(train))
    if foreign:
        raise BadRequest(f"{root / 'test'}: class {foreign[0]!r} has no folder in {root / 'train'}")
    return train, test


def _pictures(root: Path) -> dict[str, list[Path]]:
    """Return class name -> its pictures, both sorted by name."""
    groups: dict[str, list[Path]] = {}
    for folder in sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")):
        files = [
            path
            for path in sorted(folder.iterdir())
            if not path.name.startswith(".") and path.name not in ("Thumbs.db", "desktop.ini")
        ]
        for path in files:
            if path.suffix.lower() not in PICTURE_SUFFIXES or not path.is_file():
                raise BadRequest(
                    f"{path} is not a picture that can be read ({', '.join(sorted(PICTURE_SUFFIXES))}): move it away"
                )
        if not files:
            raise BadRequest(f"{folder} holds no pictures: fill it or remove it")
        groups[folder.name] = files
    if not groups:
        raise BadRequest(f"{root} holds no class folders: put the pictures of each class into a folder <class>/")
    return groups


def read_folder(
    train: Mapping[str, list[Path]], test: Mapping[str, list[Path]], store: Store
) -> tuple[Arrays, Sequence[str]]:
    """Decode a user's pictures (see `class_folders`) to squares of one size, grey if every picture is grey.

    Raises
    ------
    BadRequest : if a picture cannot be read or has more than 8 bits per channel.
    """
    from PIL import Image, ImageOps

    classes = list(train)
    lists = {
        split: [(path, classes.index(label)) for label, paths in group.items() for path in paths]
        for split, group in (("train", train), ("test", test))
    }
    shapes, grey = [], True
    for path, _ in (*lists["train"], *lists["test"]):
        with _readable(path) as stream, Image.open(stream) as picture:
            if picture.mode.startswith(("I", "F")):
                raise BadRequest(f"{path} has more than 8 bits per channel ({picture.mode}): convert it to 8 bits")
            grey = grey and picture.mode in ("1", "L", "LA")
            shapes.append(picture.size)
    size = picture_size(shapes)
    mode, channels = ("L", 1) if grey else ("RGB", 3)
    arrays: dict[str, np.ndarray] = {}
    for split, rows in lists.items():
        x = store.create(f"x_{split}", (len(rows), size, size, channels), np.uint8)
        for row, (path, _) in enumerate(_progress(rows, f"folder {split}")):
            with _readable(path) as stream, Image.open(stream) as picture:
                upright = ImageOps.exif_transpose(picture).convert(mode)
                if upright.size != (size, size):
                    upright = ImageOps.fit(upright, (size, size), Image.Resampling.BILINEAR)
                x[row] = np.asarray(upright).reshape(size, size, channels)
        arrays[f"x_{split}"] = x
        arrays[f"y_{split}"] = np.array([label for _, label in rows], np.int64)
    return arrays, classes


def picture_size(shapes: Sequence[tuple[int, int]]) -> int:
    """Return the side in pixels to which all pictures of a folder, given as (width, height), are resized.

    It is the common side if all are the same square of at most 64 pixels; else the largest of 28, 32 and 64 that is not
    above the median of the shorter sides, at least 28.
    """
    if len(set(shapes)) == 1 and shapes[0][0] == shapes[0][1] <= STANDARD_SIZES[-1]:
        return shapes[0][0]
    median = float(np.median([min(shape) for shape in shapes]))
    return max([size for size in STANDARD_SIZES if size <= median], default=STANDARD_SIZES[0])


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[BinaryIO]:
    """Open a picture; errors inside the block become a `BadRequest` that names the file."""
    from PIL import UnidentifiedImageError

    try:
        with path.open("rb") as stream:
            yield stream
    except (OSError, SyntaxError, UnidentifiedImageError) as error:
        raise BadRequest(f"cannot read the picture {path} ({error}): repair it or move it away") from error
