"""Pictures decoded into arrays: the published archives of Tiny ImageNet and CINIC-10, and a user's own folder.

Every reader fills the images row by row into files of the store, so that no data set need fit into memory, and returns
its arrays and the names of its classes: `x_train`, `x_test` uint8 (N, S, S, channels) and `y_train`, `y_test` int64
(N,).
"""

from __future__ import annotations

import contextlib
import gzip
import io
import math
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fedapp.data.cache import Store
from fedapp.data.columns import PARTS, Own, entries
from fedapp.data.names import PART_OF, PICTURE_SUFFIXES, SHOWN, distinct, entries_of, name_of, unusable
from fedapp.errors import BadRequest
from fedapp.lazy import Image
from fedapp.settings import Auto, DataSettings

UInt8 = npt.NDArray[np.uint8]
Item = TypeVar("Item")
Key = TypeVar("Key", Path, int)
Arrays = dict[str, np.ndarray]

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "PPM", "TIFF")
"""Formats that are read, whatever a file's name. For some others Pillow starts a program, such as Ghostscript."""
STANDARD_SIZES = (28, 32, 64)
ALL_SIZES = (*STANDARD_SIZES, 96, 128, 160, 224)
MOST_BYTES = 4 * 2**30
"""What pictures of a size that the user chose may take, decoded."""
ORIENTATION = 0x0112
"""EXIF tag."""
GREY = ("1", "L", "LA")
"""Modes of grey pictures."""


# --- published archives --------------------------------------------------------------------------------------------


def read_tiny_imagenet(path: Path, store: Store) -> Own:
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
        names = archive.namelist()
        train = sorted(n for n in names if n.startswith(top + "train/") and n.upper().endswith(".JPEG"))
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
    return Own(arrays, tuple(classes), "image")


def read_cinic10(path: Path, store: Store) -> Own:
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
    return Own(arrays, CIFAR10_CLASSES, "image")


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
    part, label, file = ("", "", "", *Path(member).parts)[-3:]
    used = part in ("train", "test") and label in CIFAR10_CLASSES
    return (part, label, file) if used and file.lower().endswith(".png") and not file.startswith(".") else None


def _decode(stream: Any, size: int, what: str) -> UInt8:
    """Decode one colour picture of a known size to uint8 (size, size, 3)."""
    from PIL import UnidentifiedImageError

    try:
        with Image.open(stream, formats=FORMATS) as picture:
            pixels = np.asarray(picture.convert("RGB"))
    except (UnidentifiedImageError, SyntaxError) as error:
        raise OSError(f"{what} is not a picture") from error
    if pixels.shape != (size, size, 3):
        raise OSError(f"{what} is {pixels.shape[1]} x {pixels.shape[0]} pixels, expected {size} x {size}")
    return pixels


def _progress(items: Iterable[Item], text: str) -> Iterable[Item]:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(items, f"decoding {text}", console=console) if console.is_terminal else items


# --- a folder of pictures ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Picture:
    """A file of a user's folder, its class, its part, and its client where there are clients."""

    path: Path
    label: str
    part: str = "train"
    client: str = ""


@dataclass(frozen=True)
class Listing:
    """The files of a user's folder, and those that are no pictures, with the reason."""

    root: Path
    pictures: tuple[Picture, ...]
    bad: Mapping[Path, str]

    @property
    def files(self) -> list[Path]:
        """All of them, each once."""
        return sorted({*self.bad, *(p.path for p in self.pictures)})


def listed(root: Path, layout: str = "auto") -> Listing:
    """List a user's pictures, sorted by client, part, class and name.

    Parameters
    ----------
    layout : `classes` for ``<class>/*`` or ``train/<class>/*``, ``validation/<class>/*``, ``test/<class>/*``; `clients`
        for the same below one folder per client; `auto` decides by the number of levels.

    Raises
    ------
    BadRequest : a folder is empty, or its name is not UTF-8; there are both layouts, or nothing to train on.
    """
    found: list[Picture] = []
    bad: dict[Path, str] = {}
    if layout == "clients" or (layout == "auto" and _has_clients(root)):
        clients = distinct(_folders(root), suffix=True)
        if not clients:
            raise BadRequest(f"{root} holds no folders: make one per client, with a folder <class>/ for each class")
        _note_loose(root, bad)
        for folder in clients:
            found += _parts(folder, name_of(folder, suffix=True), bad)
    else:
        found = _parts(root, "", bad)
    if all(picture.part == "test" for picture in found):
        raise BadRequest(f"{root} has no pictures for training: put them into train/<class>/")
    return Listing(root, tuple(found), bad)


def _folders(root: Path) -> list[Path]:
    return [path for path in entries_of(root) if path.is_dir()]


def _note_loose(root: Path, bad: dict[Path, str]) -> None:
    """Note pictures outside of the folders of classes or clients."""
    for path in entries_of(root):
        if path.suffix.lower() in PICTURE_SUFFIXES and not path.is_dir():
            bad[path] = f"{path} is in no folder of a class"


def _check_parts(root: Path) -> None:
    """Refuse a folder of classes that is called like a part of the data, such as Training, but for its spelling."""
    for folder in _folders(root):
        part = PART_OF.get(folder.name.casefold(), folder.name)
        if part != folder.name and _folders(folder):
            raise BadRequest(
                f"{folder}: a part of the data is called {part}: rename it, or set layout = clients if it is a client"
            )


def _has_clients(root: Path) -> bool:
    """Return whether the folders hold folders, and so are clients; refuse a mixture."""
    folders = _folders(root)
    _check_parts(root)
    if any(folder.name in PARTS for folder in folders):
        return False
    deep = [folder for folder in folders if _folders(folder)]
    flat = [folder for folder in folders if not _folders(folder)]
    if deep and flat:
        raise BadRequest(
            f"{root}: {deep[0].name} holds folders, as a client does, and {flat[0].name} holds none, as a class does: "
            "move one of them away, or say which with layout = classes or clients"
        )
    return bool(deep)


def _parts(root: Path, client: str, bad: dict[Path, str]) -> list[Picture]:
    """List ``<class>/*``, or ``train/<class>/*`` and so on."""
    _check_parts(root)
    if not any((root / part).is_dir() and (part == "train" or _folders(root / part)) for part in PARTS):
        return _pictures(root, "train", client, bad)
    others = [folder.name for folder in _folders(root) if folder.name not in PARTS]
    if others:
        raise BadRequest(
            f"{root}: next to a part there is {others[0]!r}, which would not be used ({', '.join(PARTS)} are): move it "
            "away"
        )
    _note_loose(root, bad)
    return [p for part in PARTS if (root / part).is_dir() for p in _pictures(root / part, part, client, bad)]


def _pictures(root: Path, part: str, client: str, bad: dict[Path, str]) -> list[Picture]:
    found = []
    _note_loose(root, bad)
    for folder in _folders(root):
        label = name_of(folder, suffix=True)
        files = [path for path in entries_of(folder) if path.name not in ("Thumbs.db", "desktop.ini")]
        if not files:
            raise BadRequest(f"{folder} holds no pictures: fill it or remove it")
        for path in files:
            if path.is_symlink() and not path.exists():
                bad[path] = f"{path} is a link to a file that is not there"
            elif path.suffix.lower() not in PICTURE_SUFFIXES or not path.is_file():
                bad[path] = f"{path} is not a picture ({', '.join(sorted(PICTURE_SUFFIXES))})"
            found.append(Picture(path, label, part, client))
    if not found:
        raise BadRequest(f"{root} holds no class folders: put the pictures of each class into a folder <class>/")
    return found


def read_folder(listing: Listing, store: Store, settings: DataSettings) -> Own:
    """Decode a user's pictures to one size, grey if every picture is grey.

    Raises
    ------
    BadRequest : pictures cannot be read or have more than 8 bits per channel (all are named); or they would take more
        than :data:`MOST_BYTES` in the size that was asked for.
    """
    bad = dict(listing.bad)
    while True:
        # Only sizes that are kept depend on how pictures are turned; of a PNG file that is known once it is decoded.
        shapes, grey = _sizes(listing, bad, turn=settings.image_size == 0)
        good = [p for p in listing.pictures if p.path not in bad]
        if not good or (bad and not settings.skip_bad and not shapes):
            raise _refused(listing, bad)
        channels = 1 if grey else 3
        size = _size(listing.root, shapes, channels, settings.image_size)
        known, number = len(bad), {label: c for c, label in enumerate(sorted({p.label for p in listing.pictures}))}
        arrays: Arrays = {}
        for split, parts in (("train", PARTS[:2]), ("test", PARTS[2:])):
            # Training pictures first, then those for validation.
            rows = [p for part in parts for p in good if p.part == part]
            x = store.create(f"x_{split}", (len(rows), *size, channels), np.uint8)
            for row, path in enumerate(_progress([p.path for p in rows], f"folder {split}")):
                with _noted(path, bad), Image.open(path, formats=FORMATS) as picture:
                    x[row] = pixels(picture, x.shape[1:])
            arrays[f"x_{split}"] = x
            arrays[f"y_{split}"] = np.array([number[p.label] for p in rows], np.int64)
        if bad and not settings.skip_bad:
            raise _refused(listing, bad)
        if len(bad) == known:
            break
        # Only decoding shows that a file is cut: without it, size and colour may be others.
    trained, left = ({p.label for p in some if p.part == "train"} for some in (listing.pictures, good))
    empty = sorted(trained - left)
    if empty:
        raise BadRequest(
            f"{listing.root}: class {empty[0]!r} has no picture left for training: {_refused(listing, bad)}"
        )
    order = [p for part in PARTS for p in good if p.part == part]
    owner_names: tuple[str, ...] = ()
    if order[0].client:
        names, owners = np.unique(entries(np.array([p.client for p in order])), return_inverse=True)
        owner_names = tuple(map(str, names))
        arrays["owners"] = owners.reshape(-1).astype(np.int64)
    held = np.array([p.part == "validation" for p in order if p.part != "test"], bool)
    if held.any():
        arrays["held_out"] = held
    skipped = tuple(str(path.relative_to(listing.root)) for path in sorted(bad))
    return Own(arrays, tuple(number), "image", owner_names, skipped=skipped)


def _refused(listing: Listing, bad: Mapping[Path, str]) -> BadRequest:
    return unusable(listing.root, [bad[path] for path in sorted(bad)], len(listing.files))


def _sizes(listing: Listing, bad: dict[Path, str], turn: bool) -> tuple[list[tuple[int, int]], bool]:
    """Return (width, height) of every picture, upright if `turn`, and whether all are grey; bad files are noted."""
    shapes, grey = [], True
    for path in (p.path for p in listing.pictures if p.path not in bad):
        with _noted(path, bad), Image.open(path, formats=FORMATS) as picture:
            check_depth(picture)
            shapes.append(_upright(picture) if turn else picture.size)
            grey = grey and picture.mode in GREY
    return shapes, grey


def pixels(picture: Any, shape: tuple[int, ...]) -> UInt8:
    """Return an opened picture upright, as uint8 of the shape (H, W, channels)."""
    from PIL import ImageOps

    height, width, channels = shape
    upright = ImageOps.exif_transpose(picture).convert("L" if channels == 1 else "RGB")
    if upright.size != (width, height):
        upright = ImageOps.fit(upright, (width, height), Image.Resampling.BILINEAR)
    return np.asarray(upright).reshape(shape)


def whole(path: Path, channels: int) -> UInt8:
    """Return a file's picture upright and in its own size, uint8 (H, W, channels)."""
    with Image.open(path, formats=FORMATS) as picture:
        picture.load()  # only then the EXIF tag of a PNG file is known
        width, height = _upright(picture)
        return pixels(picture, (height, width, channels))


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Name the file in the error of the block, which reads its picture."""
    try:
        yield
    except ValueError as e:
        raise BadRequest(f"cannot read the picture {path} ({e})") from e
    except Exception as e:  # a damaged picture raises errors of any kind
        reason = "does not exist" if isinstance(e, FileNotFoundError) else "is not a picture that can be read"
        raise BadRequest(f"{path} {reason}") from e


def check_format(source: Any) -> None:
    """Refuse a picture, a path or a stream, that another library decodes, as a folder's would be refused.

    Raises
    ------
    OSError, ValueError : it is none of `FORMATS`, or has more than 8 bits per channel.
    """
    with Image.open(source, formats=FORMATS) as picture:
        check_depth(picture)


def check_depth(picture: Any) -> None:
    """Refuse a picture, opened and not decoded yet, with more than 8 bits per channel.

    Pillow has no mode for colours of 16 bits: it cuts them to 8, and pictures of 12 bits would be black.

    Raises
    ------
    ValueError : it has; says what to do.
    """
    # Arguments of the decoder: `RGB;16B` of PNG and TIFF, the largest value of PPM.
    told = [a for tile in picture.tile for a in (tile[3] if isinstance(tile[3], tuple) else (tile[3],))]
    deep = {
        "PNG": any(";16" in str(a) for a in told),
        "TIFF": any(";16" in str(a) for a in told),
        "PPM": any(isinstance(a, int) and a > 255 for a in told),
    }
    if deep.get(picture.format, False) or picture.mode.startswith(("I", "F")):
        raise ValueError(f"it has more than 8 bits per channel ({picture.mode}): convert it to 8 bits")


def stacked(
    where: str, cells: Sequence[Any], opened: Callable[[Any], Any], settings: DataSettings
) -> tuple[UInt8, list[int]]:
    """Return pictures as uint8 (N, H, W, channels), brought to one size as those of a folder are.

    Parameters
    ----------
    where : name of the source, for messages.   cells : None = no picture.   opened : decodes a cell.

    Returns
    -------
    x : of the rows with a picture.   bad : the other rows, with `settings.skip_bad`; else there are none.

    Raises
    ------
    BadRequest : pictures are missing, cannot be read or have more than 8 bits (all are named), or are too large
        together.
    """
    shapes, grey = [], True
    bad: dict[int, str] = {}
    for row, cell in enumerate(cells):
        if cell is None:
            bad[row] = f"row {row} has no picture"
            continue
        with _noted(row, bad):
            picture = opened(cell)
            shapes.append(_upright(picture))
            grey = grey and picture.mode in GREY
    if bad and not (settings.skip_bad and shapes):
        more = f" ({len(bad)} in all)" if len(bad) > SHOWN else ""
        raise BadRequest(
            f"{where}: {'; '.join(list(bad.values())[:SHOWN])}{more}: repair these rows, or leave them out with "
            "skip-bad = true"
        )
    shape = (*_size(where, shapes, 1 if grey else 3, settings.image_size), 1 if grey else 3)
    x = np.empty((len(shapes), *shape), np.uint8)
    good = (cell for row, cell in enumerate(cells) if row not in bad)
    for row, cell in enumerate(good):
        x[row] = pixels(opened(cell), shape)
    return x, list(bad)


def _upright(picture: Any) -> tuple[int, int]:
    """Return width and height that a picture has once it is turned as its EXIF tag says."""
    width, height = picture.size
    return (height, width) if picture.getexif().get(ORIENTATION) in (5, 6, 7, 8) else (width, height)


def _size(root: object, shapes: Sequence[tuple[int, int]], channels: int, wanted: int | Auto) -> tuple[int, int]:
    """Return height and width to which all pictures are brought.

    Raises
    ------
    BadRequest : in the wanted size they would take more than :data:`MOST_BYTES`; names one that fits.
    """
    if wanted == "auto":
        side = picture_size(shapes)
        return side, side
    if wanted:
        height = width = wanted
    elif len(set(shapes)) == 1:
        width, height = shapes[0]
    else:
        height = width = rounded_down(shapes, ALL_SIZES)
    total = len(shapes) * height * width * channels
    if total > MOST_BYTES:
        fits = math.isqrt(MOST_BYTES // (len(shapes) * channels))
        raise BadRequest(
            f"{root}: {len(shapes)} pictures of {width} x {height} pixels would take "
            f"{total / 2**30:.1f} GiB, more than {MOST_BYTES / 2**30:g}: set image-size = {fits} or less"
        )
    return height, width


def picture_size(shapes: Sequence[tuple[int, int]]) -> int:
    """Return the side in pixels to which all pictures of a folder, given as (width, height), are resized.

    It is the common side if all are the same square of at most 64 pixels; else the largest of 28, 32 and 64 that is not
    above the median of the shorter sides, at least 28.
    """
    if len(set(shapes)) == 1 and shapes[0][0] == shapes[0][1] <= STANDARD_SIZES[-1]:
        return shapes[0][0]
    return rounded_down(shapes, STANDARD_SIZES)


def rounded_down(shapes: Sequence[tuple[int, int]], sizes: Sequence[int]) -> int:
    """Return the largest size that is not above the median of the shorter sides, at least the smallest one."""
    median = float(np.median([min(shape) for shape in shapes]))
    return max([size for size in sizes if size <= median], default=sizes[0])


@contextlib.contextmanager
def _noted(where: Key, bad: dict[Key, str]) -> Iterator[None]:
    """Note the file, or the row of a table, if the block, which opens its picture, fails."""
    from PIL import UnidentifiedImageError

    try:
        yield
    except Exception as error:  # a damaged picture raises errors of any kind
        if isinstance(where, Path):
            bad[where] = f"cannot read the picture {where} ({error})"
        else:  # the error would name where in memory the bytes lie
            why = "it is of no known format" if isinstance(error, UnidentifiedImageError) else error
            bad[where] = f"row {where} has a picture that cannot be read ({why})"
