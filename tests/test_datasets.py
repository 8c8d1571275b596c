"""Data sets: readers on generated files of the published layouts, the shared cache, and what users get wrong."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import textwrap
import urllib.error
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedapp.data import cache, datasets, pictures
from fedapp.data.dataset import sample
from fedapp.data.datasets import DATASET_NAMES, load, upright_letters
from fedapp.data.moments import moments
from fedapp.data.pictures import CIFAR10_CLASSES, picture_size
from fedapp.data.transforms import InputSpec
from fedapp.errors import BadRequest
from fedapp.results import predict
from fedapp.settings import DataSettings

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("FEDAPP_CACHE", str(folder))
    return folder


def arrays(num_train=20, num_test=10, size=6, channels=3, num_classes=5, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "x_train": rng.integers(0, 256, (num_train, size, size, channels), dtype=np.uint8),
        "y_train": np.arange(num_train) % num_classes,
        "x_test": rng.integers(0, 256, (num_test, size, size, channels), dtype=np.uint8),
        "y_test": np.arange(num_test) % num_classes,
    }


def write(path: Path, **changes) -> Path:
    """Write good arrays with some replaced, or left out where the change is None."""
    content = {key: value for key, value in {**arrays(), **changes}.items() if value is not None}
    np.savez(path, **content)
    return path


# --- digits --------------------------------------------------------------------------------------------------------


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    data = load("digits")
    bunch = load_digits()
    assert np.array_equal(np.asarray(data.x_train)[..., 0], bunch.images)
    assert np.array_equal(data.y_train, bunch.target)
    assert (data.num_train, data.num_test, data.shape, data.num_classes) == (1797, 0, (1, 8, 8), 10)
    assert data.x_test.shape == (0, 8, 8, 1)
    assert (data.scale, data.mean, data.std) == (16.0, (0.305,), (0.376,))
    scaled = bunch.images / 16
    assert scaled.mean() == pytest.approx(data.mean[0], abs=5e-4)
    assert scaled.std() == pytest.approx(data.std[0], abs=5e-4)


def test_arrays_are_mapped_and_read_only():
    data = load("digits")
    assert isinstance(data.x_train, np.memmap)
    assert isinstance(data.y_train, np.memmap)
    for array in (data.x_train, data.y_train, data.x_test, data.y_test, data.pool_labels):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
    assert load("digits") is data


# --- .npz ----------------------------------------------------------------------------------------------------------


def test_npz_of_a_name_wins(tmp_path):
    content = arrays(num_classes=10, channels=1)
    np.savez(tmp_path / "mnist.npz", **{**content, "x_train": content["x_train"][..., 0]})
    data = load("mnist", tmp_path)
    assert np.array_equal(data.x_train, content["x_train"])
    assert np.array_equal(data.x_test, content["x_test"])
    assert np.array_equal(data.pool_labels, np.concatenate([content["y_train"], content["y_test"]]))
    assert data.pool_labels.dtype == data.y_train.dtype == np.int64
    assert data.classes == tuple(str(i) for i in range(10))
    assert data.mean == (0.1307,)


def test_digits_npz_wins_too(tmp_path):
    x = np.full((10, 8, 8), 16, np.uint8)
    np.savez(tmp_path / "digits.npz", x_train=x, y_train=np.arange(10))
    assert load("digits", tmp_path).num_train == 10
    assert load("digits", tmp_path / "absent").num_train == 1797


def test_take_reads_the_virtual_pool(tmp_path):
    content = arrays()
    data = load("npz", write(tmp_path / "own.npz"))
    x = np.concatenate([content["x_train"], content["x_test"]])
    y = np.concatenate([content["y_train"], content["y_test"]])
    for rows in ([3, 25, 0, 29, 3], [1, 2], [20, 21], []):
        got_x, got_y = data.take(rows)
        assert np.array_equal(got_x, x[np.array(rows, int)])
        assert np.array_equal(got_y, y[np.array(rows, int)])
        assert (got_x.dtype, got_y.dtype) == (np.uint8, np.int64)
        assert type(got_x) is np.ndarray
        assert got_x.flags.writeable
    for wrong in ([30], [-1]):
        with pytest.raises(IndexError):
            data.take(wrong)


def test_mean_and_std_of_own_data_come_from_its_training_images(tmp_path):
    content = arrays(num_train=5000, size=4)
    data = load("npz", write(tmp_path / "own.npz", **content))
    scaled = content["x_train"] / 255.0
    mean, std = moments(data.x_train, data.scale)
    np.testing.assert_allclose(mean, scaled.mean(axis=(0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(std, scaled.std(axis=(0, 1, 2)), rtol=1e-12)
    assert not data.mean, "nothing is published for own data"
    flat = load(
        "npz", write(tmp_path / "flat.npz", x_train=np.full((20, 6, 6), 51, np.uint8), x_test=None, y_test=None)
    )
    assert moments(flat.x_train, flat.scale) == ((pytest.approx(0.2),), (1.0,))


def test_own_npz_without_test_images(tmp_path):
    data = load("npz", write(tmp_path / "own.npz", x_test=None, y_test=None))
    assert data.num_test == 0
    assert data.x_test.shape == (0, 6, 6, 3)


def test_class_names_are_kept_and_may_name_absent_classes(tmp_path):
    names = np.array(["a", "b", "c", "d", "e", "never seen"])
    data = load("npz", write(tmp_path / "own.npz", class_names=names))
    assert data.classes == tuple(names)


def test_folder_with_one_npz(tmp_path):
    write(tmp_path / "one.npz")
    assert load("npz", tmp_path).num_train == 20
    write(tmp_path / "two.npz")
    with pytest.raises(BadRequest, match=r"one\.npz: no column 'x' \(found: x_test"):
        load("npz", tmp_path)  # several files are one per client, with columns


X, Y = arrays()["x_train"], arrays()["y_train"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_train": None}, "no array 'x_train' (found: x_test, y_test, y_train)"),
        ({"y_test": None}, "both be there"),
        ({"x_train": X / 255.0}, "x_train is float64, x_test uint8, so they are read as array and image"),
        ({"x_train": X[:, 0, 0]}, "read as table and image"),
        ({"x_train": X[:, :4]}, "one sample of x_test has the shape (6, 6, 3), of x_train (4, 6, 3)"),
        ({"x_train": X[..., :2]}, "one sample of x_test has the shape (6, 6, 3), of x_train (6, 6, 2)"),
        ({"x_train": np.moveaxis(X, 3, 1)}, "channels first: write x.transpose(0, 2, 3, 1)"),
        ({"x_train": X[:0], "y_train": Y[:0]}, "x_train has no rows"),
        ({"x_train": X[:9]}, "9 rows but y_train has 20 labels"),
        ({"x_test": X[:10, :5, :5]}, "one sample of x_test has the shape (5, 5, 3), of x_train (6, 6, 3)"),
        ({"y_train": Y.astype(float)}, "y_train is float64, wanted integer"),
        ({"y_train": Y[:, None]}, "one entry per row"),
        ({"y_train": Y - 1}, "label -1 is out of range: labels must be 0 .. 4"),
        ({"y_train": Y + 1, "y_test": arrays()["y_test"] + 1}, "no row has label 0"),
        ({"class_names": np.array(["a", "b"])}, "label 4 is out of range: labels must be 0 .. 1"),
        ({"y_train": np.array([None] * 20)}, "cannot read"),
    ],
)
def test_wrong_arrays(tmp_path, changes, message):
    path = write(tmp_path / "own.npz", **changes)
    with pytest.raises(BadRequest) as caught:
        load("npz", path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_train": Y + 10}, "label 14 is out of range: labels must be 0 .. 9"),
        ({"class_names": np.array(["a", "b"])}, "2 class_names for 10 classes"),
    ],
)
def test_wrong_arrays_of_a_published_set(tmp_path, changes, message):
    write(tmp_path / "cifar10.npz", **changes)
    with pytest.raises(BadRequest) as caught:
        load("cifar10", tmp_path)
    assert message in str(caught.value)


def test_digits_have_seventeen_grey_levels(tmp_path):
    np.savez(tmp_path / "digits.npz", x_train=np.full((10, 8, 8), 17, np.uint8), y_train=np.arange(10))
    with pytest.raises(BadRequest, match=r"0 \.\. 16, found 17"):
        load("digits", tmp_path)


@pytest.mark.parametrize("damage", ["text", "cut", "flipped", "array"])
def test_damaged_npz(tmp_path, damage):
    path = tmp_path / "own.npz"
    np.savez_compressed(path, **arrays(num_train=200))
    content = bytearray(path.read_bytes())
    if damage == "text":
        path.write_text("not an archive")
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        middle = len(content) // 4
        content[middle : middle + 8] = bytes(255 - byte for byte in content[middle : middle + 8])
        path.write_bytes(content)
    else:
        with path.open("wb") as stream:
            np.save(stream, np.arange(3))
    with pytest.raises(BadRequest, match=r"own\.npz"):
        load("npz", path)


@pytest.mark.parametrize(
    ("name", "data_dir", "message"),
    [
        ("minst", None, "did you mean 'mnist'"),
        ("zzz", None, ", ".join(DATASET_NAMES)),
        ("npz", None, "needs data-dir"),
        ("npz", "absent", "does not exist"),
        ("npz", "empty", "holds no .npz file"),
        ("folder", None, "needs data-dir"),
        ("folder", "absent", "is not a folder"),
        ("folder", "empty", "no class folders"),
        ("tiny_imagenet", None, "tiny-imagenet-200.zip"),
        ("tiny_imagenet", "empty", "tiny_imagenet.npz"),
        ("cinic10", "empty", "CINIC-10.tar.gz"),
    ],
)
def test_nothing_there(tmp_path, name, data_dir, message):
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadRequest) as caught:
        load(name, tmp_path / data_dir if data_dir else None)
    assert message in str(caught.value)


# --- torchvision ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [urllib.error.URLError("no route"), RuntimeError("Error downloading x"), TimeoutError()]
)
def test_offline_names_both_remedies(tmp_path, monkeypatch, error):
    import torchvision.datasets

    def refuse(*_args, **_options):
        raise error

    monkeypatch.setattr(torchvision.datasets, "MNIST", refuse)
    with pytest.raises(BadRequest) as caught:
        load("mnist", tmp_path)
    text = str(caught.value)
    assert "put mnist.npz in" in text
    assert str(tmp_path) in text
    assert "x_train, y_train, x_test, y_test" in text
    assert "connect to the network so that torchvision downloads" in text
    assert "\n" not in text
    assert (str(error) or "TimeoutError") in text


def test_what_torchvision_gives_is_stored_once(tmp_path, monkeypatch):
    import torchvision.datasets

    content = arrays(num_classes=100, num_train=200, size=32)
    calls = []

    class Published:
        classes = tuple(f"class {i}" for i in range(100))

        def __init__(self, root, train, download):
            calls.append((root, train, download))
            split = "train" if train else "test"
            self.data, self.targets = content[f"x_{split}"], content[f"y_{split}"].tolist()

    monkeypatch.setattr(torchvision.datasets, "CIFAR100", Published)
    data = load("cifar100", tmp_path)
    assert calls == [(str(tmp_path), True, True), (str(tmp_path), False, True)]
    assert np.array_equal(data.x_train, content["x_train"])
    assert np.array_equal(data.y_test, content["y_test"])
    assert data.classes[7] == "class 7"
    load("cifar100", None)
    assert len(calls) == 2


def idx(path: Path, values: np.ndarray) -> None:
    """Write the format of the MNIST family: magic number, dimensions, bytes."""
    header = struct.pack(">BBBB", 0, 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(header + values.astype(np.uint8).tobytes())


def test_emnist_letters_are_upright_and_start_at_zero(tmp_path):
    # Files as NIST publishes them, read by torchvision itself: columns first, labels from 1.
    raw = tmp_path / "EMNIST" / "raw"
    raw.mkdir(parents=True)
    upright = np.zeros((26, 28, 28), np.uint8)
    upright[:, 20:24, 4:24] = 255  # a bar at the bottom
    for split in ("byclass", "bymerge", "balanced", "letters", "digits", "mnist"):
        for part in ("train", "test"):
            idx(raw / f"emnist-{split}-{part}-images-idx3-ubyte", upright.transpose(0, 2, 1))
            idx(raw / f"emnist-{split}-{part}-labels-idx1-ubyte", np.arange(1, 27))
    data = load("emnist_letters", tmp_path)
    assert np.array_equal(np.asarray(data.x_train)[..., 0], upright)
    assert np.array_equal(data.y_test, np.arange(26))
    assert data.classes[0] == "A"
    assert data.num_classes == 26


def test_upright_letters():
    x = np.arange(6, dtype=np.uint8).reshape(1, 2, 3)
    turned, labels = upright_letters(x, np.array([26]))
    assert turned.tolist() == [[[0, 3], [1, 4], [2, 5]]]
    assert labels.tolist() == [25]


# --- published archives --------------------------------------------------------------------------------------------


def picture(array: np.ndarray, form: str) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, form, **({"quality": 95} if form == "JPEG" else {}))
    return stream.getvalue()


def flat(size: int, value: int, channels: int = 3) -> np.ndarray:
    shape = (size, size, channels) if channels == 3 else (size, size)
    return np.full(shape, value, np.uint8)


def tiny_imagenet(path: Path) -> None:
    top = "tiny-imagenet-200/"
    ids = ["n02", "n01", "n03"]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(top + "wnids.txt", "\n".join(ids) + "\n")
        archive.writestr(
            top + "words.txt", "n00\tnothing\nn01\tgoldfish, Carassius auratus\nn02\tcrane\nn03\tcrane, bird\n"
        )
        for identifier in ids:
            for number in range(3):
                value = 50 * int(identifier[1:]) + 10 * number
                # Some of the published pictures are grey.
                image = flat(64, value, channels=1 if number == 2 else 3)
                archive.writestr(f"{top}train/{identifier}/images/{identifier}_{number}.JPEG", picture(image, "JPEG"))
            archive.writestr(f"{top}train/{identifier}/{identifier}_boxes.txt", "box")
        archive.writestr(
            top + "val/val_annotations.txt", "val_1.JPEG\tn03\t0\t0\t62\t62\nval_0.JPEG\tn01\t0\t0\t62\t62\n"
        )
        for number in range(2):
            archive.writestr(f"{top}val/images/val_{number}.JPEG", picture(flat(64, 200 + number), "JPEG"))
        archive.writestr(f"{top}test/images/test_0.JPEG", picture(flat(64, 9), "JPEG"))


def cinic10(path: Path) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for split in ("valid", "test", "train"):
            for label, name in reversed(list(enumerate(CIFAR10_CLASSES))):
                for number in (1, 0):
                    image = flat(32, {"train": 0, "test": 100, "valid": 200}[split] + 2 * label + number)
                    content = picture(image, "PNG")
                    entry = tarfile.TarInfo(f"./{split}/{name}/cifar10-{split}-{number}.png")
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
        entry = tarfile.TarInfo("./README.md")
        archive.addfile(entry, io.BytesIO())


def test_tiny_imagenet(tmp_path):
    tiny_imagenet(tmp_path / "tiny-imagenet-200.zip")
    data = load("tiny_imagenet", tmp_path)
    assert data.x_train.shape == (9, 64, 64, 3)
    # Classes in the order of their identifiers; images in the order of their names.
    assert data.y_train.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    expected = [50, 60, 70, 100, 110, 120, 150, 160, 170]
    assert np.abs(np.asarray(data.x_train)[:, 32, 32, 1].astype(int) - expected).max() <= 2
    assert data.y_test.tolist() == [0, 2]
    assert np.abs(np.asarray(data.x_test)[:, 5, 5, 0].astype(int) - [200, 201]).max() <= 2
    assert data.classes == ("goldfish", "crane (n02)", "crane (n03)")


def test_cinic10(tmp_path):
    cinic10(tmp_path / "CINIC-10.tar.gz")
    data = load("cinic10", tmp_path)
    assert data.y_train.tolist() == sorted(list(range(10)) * 2)
    assert np.asarray(data.x_train)[:, 3, 3, 2].tolist() == list(range(20))
    assert np.asarray(data.x_test)[:, 3, 3, 2].tolist() == list(range(100, 120))
    assert data.x_test.shape == (20, 32, 32, 3)
    assert data.classes == CIFAR10_CLASSES


def test_archives_are_decoded_once(tmp_path, monkeypatch):
    tiny_imagenet(tmp_path / "tiny-imagenet-200.zip")
    first = load("tiny_imagenet", tmp_path)
    datasets._open.cache_clear()
    monkeypatch.setattr(pictures, "_decode", None)  # a second decoding would fail
    again = load("tiny_imagenet", tmp_path)
    assert again is not first
    assert np.array_equal(again.x_train, first.x_train)


@pytest.mark.parametrize("damage", ["cut", "text", "other layout", "no picture", "size"])
@pytest.mark.parametrize(("name", "file"), [("tiny_imagenet", "tiny-imagenet-200.zip"), ("cinic10", "CINIC-10.tar.gz")])
def test_damaged_archives(tmp_path, own_cache, name, file, damage):
    path = tmp_path / file
    make = tiny_imagenet if name == "tiny_imagenet" else cinic10
    make(path)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif damage == "text":
        path.write_text("moved permanently")
    else:
        content = {"other layout": b"", "no picture": b"nothing", "size": picture(flat(20, 1), "PNG")}[damage]
        if name == "tiny_imagenet":
            member = "tiny-imagenet-200/train/n01/images/n01_9.JPEG"
            if damage == "other layout":
                with zipfile.ZipFile(path, "w") as archive:
                    archive.writestr("readme.txt", "x")
            else:
                with zipfile.ZipFile(path, "a") as archive:
                    archive.writestr(member, content)
        else:
            with tarfile.open(path, "w:gz") as archive:
                member = "readme.txt" if damage == "other layout" else "./train/cat/x.png"
                for name_ in (member, member.replace("train", "test")):
                    entry = tarfile.TarInfo(name_)
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
    with pytest.raises(BadRequest, match=r"cannot read.*download it again"):
        load(name, tmp_path)
    assert not [item for item in (own_cache / "datasets").iterdir() if item.is_dir()]


@pytest.mark.parametrize("missing", [4, 20])
def test_a_cut_gzip_stream_is_noticed(tmp_path, missing):
    path = tmp_path / "CINIC-10.tar.gz"
    cinic10(path)
    plain = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(plain)[:-missing])
    with pytest.raises(BadRequest, match="cannot read"):
        load("cinic10", tmp_path)


# --- folders of pictures -------------------------------------------------------------------------------------------


def save(path: Path, array: np.ndarray, **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path, **options)


def test_folder_of_pictures(tmp_path):
    for label, name in enumerate(["apple", "pear"]):
        for number in range(3):
            save(tmp_path / "train" / name / f"{number}.png", flat(20, 40 * label + number))
        save(tmp_path / "test" / name / "0.png", flat(20, 100 + label))
    (tmp_path / "train" / "apple" / ".hidden").write_text("x")
    data = load("folder", tmp_path)
    assert data.classes == ("apple", "pear")
    assert data.x_train.shape == (6, 20, 20, 3)
    assert np.asarray(data.x_train)[:, 0, 0, 0].tolist() == [0, 1, 2, 40, 41, 42]
    assert data.y_train.tolist() == [0, 0, 0, 1, 1, 1]
    assert np.asarray(data.x_test)[:, 9, 9, 2].tolist() == [100, 101]


def test_folder_without_test_pictures_brings_them_to_one_size(tmp_path):
    wide = np.zeros((40, 80, 3), np.uint8)
    wide[:, 40:] = 200
    save(tmp_path / "a" / "wide.jpg", wide, quality=95)
    save(tmp_path / "b" / "tall.png", np.ascontiguousarray(wide.transpose(1, 0, 2)))
    data = load("folder", tmp_path)
    assert data.x_train.shape == (2, 32, 32, 3)
    assert data.num_test == 0
    x = np.asarray(data.x_train).astype(int)
    # The middle square is kept: dark on one side, light on the other, not squeezed.
    assert x[0, :, :14].max() < 10
    assert x[0, :, 18:].min() > 190
    assert np.abs(x[0].transpose(1, 0, 2) - x[1]).max() <= 6


def test_grey_folder_stays_grey_and_exif_is_obeyed(tmp_path):
    half = np.zeros((16, 16), np.uint8)
    half[:8] = 255
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    save(tmp_path / "a" / "0.png", half)
    save(tmp_path / "b" / "0.jpg", half, quality=95, exif=exif)
    data = load("folder", tmp_path)
    assert data.x_train.shape == (2, 16, 16, 1)
    x = np.asarray(data.x_train)[..., 0].astype(int)
    assert x[0, 2].min() > 250
    assert x[1, 2].max() < 5
    assert x[1, 13].min() > 250


@pytest.mark.parametrize(
    ("shapes", "size"),
    [
        ([(20, 20)] * 3, 20),
        ([(64, 64)], 64),
        ([(96, 96)], 64),
        ([(20, 20), (22, 22)], 28),
        ([(30, 40), (31, 50), (200, 300)], 28),
        ([(32, 40), (33, 50), (200, 300)], 32),
        ([(640, 480)] * 2, 64),
        ([(20, 24)] * 2, 28),
    ],
)
def test_size_of_pictures(shapes, size):
    assert picture_size(shapes) == size


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda root: (root / "train" / "c").mkdir(), "holds no pictures"),
        (lambda root: (root / "train" / "a" / "notes.txt").write_text("x"), "notes.txt is not a picture"),
        (lambda root: (root / "train" / "a" / "1.png").write_text("x"), "cannot read the picture"),
        (lambda root: (root / "val").mkdir(), "'val', which would not be used"),
        (lambda root: save(root / "9.png", flat(8, 1)), "9.png is in no folder of a class"),
        (lambda root: save(root / "train" / "9.png", flat(8, 1)), "9.png is in no folder of a class"),
        (lambda root: (root / "train" / "a" / "7.png").symlink_to("gone"), "7.png is a link to a file that is not"),
        (lambda root: (root / "train").rename(root / "Train"), "Train: a part of the data is called train: rename it"),
        (lambda root: (root / "train").rename(root / "test"), "no pictures for training"),
        (lambda root: (root / "train" / "c").symlink_to("gone"), "c is a link to nothing: repair or remove it"),
        (lambda root: (root / "test").symlink_to("test"), "test is a link to nothing: repair or remove it"),
        (lambda root: (root / os.fsdecode(b"train/c\xe9")).mkdir(), "its name is not UTF-8: rename it"),
        (lambda root: save(root / "train" / "a" / "9.png", np.full((8, 8), 999, np.uint16)), "more than 8 bits"),
    ],
)
def test_wrong_folders(tmp_path, spoil, message):
    for name in ("a", "b"):
        save(tmp_path / "train" / name / "0.png", flat(8, 1))
    spoil(tmp_path)
    with pytest.raises(BadRequest) as caught:
        load("folder", tmp_path)
    assert message in str(caught.value)


def test_the_size_of_pictures_is_chosen(tmp_path):
    for name in ("a", "b"):
        save(tmp_path / name / "0.png", np.arange(30 * 40, dtype=np.uint16).reshape(30, 40).astype(np.uint8))
    as_they_are = load("folder", tmp_path, DataSettings(image_size=0))
    assert as_they_are.shape == (1, 30, 40)
    assert np.array_equal(as_they_are.x_train[0, ..., 0], np.asarray(Image.open(tmp_path / "a" / "0.png")))
    chosen = load("folder", tmp_path, DataSettings(image_size=30))
    # The shorter side fits already, so that this is the middle of the picture alone.
    assert np.array_equal(chosen.x_train[0, ..., 0], as_they_are.x_train[0, :, 5:35, 0])
    assert load("folder", tmp_path).shape == (1, 28, 28)
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter
    save(tmp_path / "b" / "1.jpg", flat(10, 1).repeat(10, 0).repeat(12, 1), exif=turned)  # 100 x 120
    save(tmp_path / "a" / "1.png", flat(100, 1))
    assert load("folder", tmp_path, DataSettings(image_size=0)).shape == (3, 64, 64)  # median of 30, 30, 100, 100


def test_turned_pictures_have_the_size_that_they_show(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    save(tmp_path / "a" / "0.jpg", np.zeros((20, 30), np.uint8), exif=exif)
    save(tmp_path / "b" / "0.png", np.zeros((30, 20), np.uint8))
    assert load("folder", tmp_path, DataSettings(image_size=0)).shape == (1, 30, 20)


def test_too_large_pictures_name_the_size_that_fits(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "MOST_BYTES", 5000)
    for name in ("a", "b"):
        save(tmp_path / name / "0.png", flat(60, 1))
    with pytest.raises(BadRequest, match="image-size = 28 or less"):  # 2 x 3 x 28 x 28 = 4704
        load("folder", tmp_path, DataSettings(image_size=29))
    assert load("folder", tmp_path, DataSettings(image_size=28)).shape == (3, 28, 28)


def test_folders_of_clients(tmp_path):
    for number, client in enumerate(["10", "9"]):
        for label, name in enumerate(["apple", "pear"]):
            for part, count in (("train", 3), ("validation", 2), ("test", 1)):
                for i in range(count):
                    grey = 100 * number + 40 * label + 10 * ("train", "validation", "test").index(part) + i
                    save(tmp_path / client / part / name / f"{i}.png", flat(12, grey))
    (tmp_path / "9" / "test" / "pear" / "0.png").rename(tmp_path / "9" / "test" / "apple" / "1.png")
    (tmp_path / "9" / "test" / "pear").rmdir()  # a client may lack a class
    data = load("folder", tmp_path)
    assert data.owner_names == ("9", "10") and data.classes == ("apple", "pear")
    grey = data.take(np.arange(data.num_train + data.num_test))[0][:, 0, 0, 0].astype(int)
    assert [data.owner_names[o] for o in data.owners] == ["10" if g < 100 else "9" for g in grey]
    assert data.held_out.tolist() == [g % 20 // 10 == 1 for g in grey[: data.num_train]] and data.held_out.sum() == 8
    assert (data.num_train, data.num_test) == (20, 4)
    labels = data.pool_labels[: data.num_train].tolist()
    assert labels == [int(g % 100 >= 40) for g in grey[: data.num_train]]
    for part in ("train", "validation"):
        shutil.rmtree(tmp_path / "9" / part)
    assert np.bincount(load("folder", tmp_path).owners, minlength=2).tolist() == [2, 12], "with test pictures alone"


def test_the_layout_is_decided_by_the_levels_or_given(tmp_path):
    for client in ("train", "test"):
        for name in ("a", "b"):
            save(tmp_path / client / name / "0.png", flat(12, 1))
    assert load("folder", tmp_path).owners is None
    assert load("folder", tmp_path, DataSettings(layout="clients")).owner_names == ("test", "train")
    save(tmp_path / "plain" / "x" / "c" / "0.png", flat(12, 1))
    save(tmp_path / "plain" / "y" / "0.png", flat(12, 1))
    with pytest.raises(BadRequest, match="x holds folders, as a client does, and y holds none"):
        load("folder", tmp_path / "plain")


def deep(form: str) -> bytes:
    """Write a picture of 4 x 4 pixels with 16 bits per channel, which Pillow does not."""
    pixels = (np.arange(48).reshape(4, 4, 3) * 80).astype(">u2")  # of 12 bits
    if form == "ppm":
        return b"P6 4 4 4095\n" + pixels.tobytes()
    channels, rows = (2, pixels[..., :2]) if form == "la.png" else (3, pixels)
    raw = b"".join(b"\0" + row.tobytes() for row in rows)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 16, {2: 4, 3: 2}[channels], 0, 0, 0)),
              (b"IDAT", zlib.compress(raw)), (b"IEND", b"")]  # fmt: skip
    packed = [struct.pack(">I", len(c)) + k + c + struct.pack(">I", zlib.crc32(k + c)) for k, c in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


@pytest.mark.parametrize("form", ["png", "la.png", "ppm"])
def test_colours_of_sixteen_bits_are_refused_everywhere(tmp_path, form):
    for name in ("a", "b"):
        save(tmp_path / "all" / name / "0.png", flat(4, 1))
    path = tmp_path / "all" / "a" / f"1.{form}"
    path.write_bytes(deep(form))
    with Image.open(path) as picture:
        assert not picture.mode.startswith("I")  # Pillow would cut it to 8 bits
    told = "it has more than 8 bits per channel .*: convert it to 8 bits"
    with pytest.raises(BadRequest, match=told):
        load("folder", tmp_path / "all")
    assert load("folder", tmp_path / "all", DataSettings(skip_bad=True)).skipped == (f"a/1.{form}",)
    with pytest.raises(BadRequest, match=told):
        predict.read_images([path], InputSpec((3, 4, 4), 255.0, (0.5,) * 3, (0.5,) * 3))
    with pytest.raises(ValueError, match=told):  # as a data set of Hugging Face checks them
        pictures.check_format(io.BytesIO(deep(form)))


def test_a_damaged_exif_tag_is_named_or_left_out(tmp_path):
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "hello"
    for name in ("a", "b"):
        save(tmp_path / "all" / name / "0.png", flat(16, 1))
    path = tmp_path / "all" / "a" / "1.jpg"
    save(path, flat(16, 1), exif=exif)
    content = bytearray(path.read_bytes())
    assert content[41] == 14
    content[41] = 62
    path.write_bytes(content)
    with pytest.raises(BadRequest, match=r"cannot read the picture .*1\.jpg"):
        load("folder", tmp_path / "all")
    assert load("folder", tmp_path / "all", DataSettings(skip_bad=True)).skipped == ("a/1.jpg",)
    with pytest.raises(BadRequest, match=r"1\.jpg"):
        predict.read_images([path], InputSpec((3, 4, 4), 255.0, (0.5,) * 3, (0.5,) * 3))


def test_a_bitmap_of_sixteen_bits_per_pixel_has_fewer_per_channel(tmp_path):
    head = struct.pack("<2sIHHI", b"BM", 54 + 32, 0, 0, 54) + struct.pack(
        "<IiiHHIIiiII", 40, 4, 4, 1, 16, 0, 32, 0, 0, 0, 0
    )
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.bmp").write_bytes(head + bytes(32))
    save(tmp_path / "b" / "0.png", flat(4, 1))
    assert load("folder", tmp_path).num_train == 2


def test_all_bad_pictures_are_named_at_once_or_left_out(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        for i in range(8):
            save(tmp_path / name / f"{i}.png", rng.integers(0, 256, (16, 16, 3), dtype=np.uint8))
    kept = [tmp_path / n / f"{i}.png" for n in ("a", "b") for i in (0, 6, 7)]
    (tmp_path / "a" / "1.png").write_text("x")
    (tmp_path / "a" / "2.txt").write_text("x")
    whole = (tmp_path / "b" / "3.png").read_bytes()
    (tmp_path / "b" / "3.png").write_bytes(whole[: len(whole) // 2])  # its head alone can be read
    save(tmp_path / "b" / "4.png", np.full((8, 8), 999, np.uint16))
    with pytest.raises(BadRequest) as caught:
        load("folder", tmp_path)
    message = str(caught.value)
    assert "4 of 17 files" in message and "skip-bad = true" in message
    assert all(
        name in message
        for name in ("a/1.png", "a/2.txt is not a picture", "b/3.png", "b/4.png (it has more than 8 bits")
    )
    data = load("folder", tmp_path, DataSettings(skip_bad=True))
    assert (data.num_train, data.skipped) == (
        13,
        ("a/1.png", "a/2.txt", "b/3.png", "b/4.png"),
    ) and data.y_train.tolist() == [0] * 7 + [1] * 6
    rows = {x.tobytes() for x in data.x_train}
    assert all(np.asarray(Image.open(path)).tobytes() in rows for path in kept)
    for path in [*(tmp_path / "b").iterdir()]:
        path.write_text("x")
    with pytest.raises(BadRequest, match="10 of 17 files"):
        load("folder", tmp_path)
    with pytest.raises(BadRequest, match="class 'b' has no picture left for training"):
        load("folder", tmp_path, DataSettings(skip_bad=True))


# --- the cache -----------------------------------------------------------------------------------------------------


def test_a_changed_file_is_read_anew(tmp_path):
    path = write(tmp_path / "own.npz")
    first = load("npz", path)
    stat = path.stat()
    write(path, x_train=255 - X)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000_000))
    second = load("npz", path)
    assert np.array_equal(second.x_train, 255 - np.asarray(first.x_train))


def test_two_processes_build_once(tmp_path, own_cache):
    write(tmp_path / "own.npz")
    script = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from fedapp.data import datasets

        folder, me = Path(sys.argv[1]), sys.argv[2]
        original = datasets._build_npz

        def slow(*arguments):
            (folder / f"built-{me}").touch()
            time.sleep(1.0)  # long enough for the other process to come and find the build under way
            return original(*arguments)

        datasets._build_npz = slow
        (folder / f"ready-{me}").touch()
        while len(list(folder.glob("ready-*"))) < 2:
            time.sleep(0.005)
        data = datasets.load("npz", folder / "own.npz")
        print(int(data.x_train.astype("int64").sum()), type(data.x_train).__name__)
        """
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for i in range(2)
    ]
    results = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], results
    assert {out.strip() for out, _ in results} == {f"{int(X.astype(np.int64).sum())} memmap"}
    assert len(list(tmp_path.glob("built-*"))) == 1
    assert len([item for item in (own_cache / "datasets").iterdir() if item.is_dir()]) == 1


def test_a_build_that_died_leaves_nothing_in_the_way(own_cache):
    def explode(store):
        store.put("x_train", np.zeros(3))
        raise RuntimeError("killed")

    key = {"k": 1}
    with pytest.raises(RuntimeError):
        cache.build_once("thing", key, explode, Path)
    folders = [item for item in (own_cache / "datasets").iterdir() if item.is_dir()]
    assert not folders

    # What a process that was killed leaves: a temporary folder under the hidden name of its data set.
    final = cache.build_once("thing", key, lambda _: {}, Path)
    stale = final.parent / f".{final.name}.tmp-abc"
    stale.mkdir()
    (stale / "x_train.npy").write_bytes(b"half")
    (final / "meta.json").unlink()
    again = cache.build_once("thing", key, lambda store: (store.put("a", np.arange(3)), {"n": 1})[1], Path)
    assert again == final
    assert not stale.exists()
    assert np.array_equal(cache.open_array(again / "a.npy"), np.arange(3))


def test_cache_folder_is_chosen_by_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDAPP_CACHE", str(tmp_path / "there"))
    load("digits")
    assert list((tmp_path / "there" / "datasets").glob("digits-*"))
    monkeypatch.delenv("FEDAPP_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_root() == tmp_path / "xdg" / "fedapp"


def test_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("FEDAPP_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(BadRequest, match="FEDAPP_CACHE"):
        load("digits")


DAMAGE = {
    "no identity": lambda folder: edited(folder, lambda meta: meta.pop("identity")),
    "another form": lambda folder: edited(folder, lambda meta: meta.update(classes=3)),
    "no object": lambda folder: (folder / "meta.json").write_text("[]"),
    "cut description": lambda folder: (folder / "meta.json").write_text('{"classes": ["a"'),
    "cut array": lambda folder: os.truncate(folder / "x_train.npy", 1000),
    "no header": lambda folder: (folder / "y_train.npy").write_bytes(b"\x93NUMPY"),
    "no array": lambda folder: (folder / "x_test.npy").unlink(),
}


def edited(folder, change):
    meta = json.loads((folder / "meta.json").read_text())
    change(meta)
    (folder / "meta.json").write_text(json.dumps(meta))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_folder_of_the_cache_that_cannot_be_read_is_built_again(own_cache, damage):
    first = load("digits")
    folder = Path(first.x_train.filename).parent
    rows = np.array(first.x_train), np.array(first.y_train)  # a map of a file that is cut must not be read
    datasets._open.cache_clear()
    DAMAGE[damage](folder)
    again = load("digits")
    assert again is not first and again.identity == first.identity and again.classes == first.classes
    assert np.array_equal(again.x_train, rows[0]) and np.array_equal(again.y_train, rows[1])
    assert [item.name for item in (own_cache / "datasets").iterdir() if item.is_dir()] == [folder.name]


def test_rows_that_are_mapped_have_their_place_on_the_disk(tmp_path):
    """A write into a map of a sparse file ends the process where the disk is full."""
    cache.Store(tmp_path).create("x", (5, 1 << 19), np.uint8)
    assert (tmp_path / "x.npy").stat().st_blocks * 512 >= 5 << 19


FULL = OSError(errno.ENOSPC, "No space left on device")
CUT = OSError("8192 requested and 3072 written")  # what NumPy says


@pytest.mark.parametrize(
    ("broken", "error"), [("numpy.save", CUT), ("pathlib.Path.write_text", FULL), ("pathlib.Path.touch", FULL),
                          ("tempfile.mkdtemp", FULL), ("numpy.lib.format.open_memmap", FULL)],
)  # fmt: skip
def test_a_full_disk_says_what_to_do(tmp_path, monkeypatch, broken, error):
    def full(*_, **__):
        raise error

    save(tmp_path / "a" / "0.png", flat(8, 1))
    save(tmp_path / "b" / "0.png", flat(8, 2))
    monkeypatch.setattr(broken, full)
    with pytest.raises(
        BadRequest, match=r"cannot write the data cache .*(device|written)\): free some space .* FEDAPP_C"
    ):
        load("folder", tmp_path)


def test_unfinished_rows_are_mapped_while_written(tmp_path):
    store = cache.Store(tmp_path)
    rows = store.create("x", (4, 2), np.uint8)
    rows[2] = 7
    rows.flush()
    assert cache.open_array(tmp_path / "x.npy")[2].tolist() == [7, 7]
    assert store.create("none", (0, 2), np.uint8).shape == (0, 2)
    assert cache.open_array(tmp_path / "none.npy").shape == (0, 2)


def test_a_sample_keeps_the_share_of_every_class_and_the_order() -> None:
    whole = datasets.load("digits")
    half = sample(whole, 0.5, np.random.default_rng(1))
    for c in range(10):
        assert (half.y_train == c).sum() == round(0.5 * int((whole.y_train == c).sum()))
    flat = whole.x_train.reshape(len(whole.x_train), -1)
    place = {row.tobytes(): i for i, row in enumerate(flat)}
    kept = [place[row.tobytes()] for row in half.x_train.reshape(len(half.x_train), -1)]
    assert kept == sorted(kept) and np.array_equal(whole.y_train[kept], half.y_train)
    assert sample(whole, 1.0, np.random.default_rng(1)) is whole
    again = sample(whole, 0.5, np.random.default_rng(1))
    assert np.array_equal(half.x_train, again.x_train)
    other = sample(whole, 0.5, np.random.default_rng(2))
    assert not np.array_equal(half.x_train, other.x_train)
