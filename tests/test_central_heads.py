"""Heads of one exchange against heads that scikit-learn and NumPy make of all rows together, and worked numbers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge
from sklearn.neighbors import NearestCentroid

from fedapp.core import sums
from fedapp.core.gaussian import unpack
from fedapp.engines.local import run
from fedapp.learning.state import read_safetensors
from fedapp.results.runs import RunResult

Tiny = Callable[..., RunResult]
FOLDER = "FEDAPP_TEST_FEATURES"
"""Environment variable with the folder of `cifar10.npz`, `banking77.npz` and `clinc150.npz` by `fedapp features`."""


def written(place: Path, x: np.ndarray, y: np.ndarray, owner: np.ndarray, classes: int) -> Path:
    """Write features with an `about`; every fourth row is a test row."""
    about = json.dumps({"body": "a" * 64, "width": x.shape[1]})
    split = np.where(np.arange(len(y)) % 4 == 3, "test", "train")
    np.savez(place, x=x, y=y, client=owner, split=split, about=np.array(about), class_names=[*map(str, range(classes))])
    return place


def trained(place: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the training rows of a file, features float64 and labels as numbers."""
    with np.load(place) as arrays:
        train, names = arrays["split"] == "train", [str(n) for n in arrays["class_names"]]
        y = arrays["y"][train]
        number = {name: c for c, name in enumerate(names)}
        return arrays["x"][train].astype(np.float64), y if y.dtype.kind == "i" else np.array([number[n] for n in y])


def head(found: RunResult) -> np.ndarray:
    """Return the rows (C, d + 1) of a run's head, before its factor."""
    arrays, _ = read_safetensors(found.out / "models" / "last.safetensors")
    rows = np.column_stack([arrays["head.weight"], arrays["head.bias"]]).astype(np.float64)
    return rows / found.summary["calibration"]["scale"]


def central(method: str, z: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the head of the classes with rows, by scikit-learn."""
    seen, counts = np.unique(y, return_counts=True)
    if method.startswith("fed3r"):
        h = np.column_stack([z, np.ones(len(y))])
        return Ridge(2.0, fit_intercept=False, solver="cholesky").fit(h, np.eye(seen.max() + 1)[y]).coef_[seen]
    if method.startswith("lda"):
        found = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.1).fit(z, y)
        # Its covariance is divided by N, and not by N less the number of classes.
        log, factor = np.log(counts / len(y)), (len(y) - len(seen)) / len(y)
        return np.column_stack([factor * found.coef_, factor * (found.intercept_ - log) + log])
    means = NearestCentroid().fit(z, y).centroids_
    return np.column_stack([means, -0.5 * (means**2).sum(axis=1)])


@pytest.mark.full
@pytest.mark.parametrize("kind", ["plain", "offset 100", "one row a class"])
@pytest.mark.parametrize("method", ["fed3r lam=2", "lda prior=pooled", "fedncm metric=euclidean"])
def test_the_head_is_that_of_all_rows_together(method: str, kind: str, tmp_path: Path, tiny: Tiny) -> None:
    """To the rounding of a stored head, for 1, 20, 100 clients; class 3 is absent; features are multiples of 1/64."""
    rng, name, args = np.random.default_rng(0), *method.split()
    y = rng.choice([0, 1, 2, 4], 600)
    if kind == "one row a class":
        y = np.arange(600) % 2
        y[:2] = 2, 4
    x = rng.normal(size=(5, 12))[y] + rng.normal(size=(600, 12)) + (100 if kind == "offset 100" else 0)
    x = np.rint(64 * x).astype(np.float32) / 64
    for clients in (1, 20, 100):
        owner = np.concatenate([np.tile(np.arange(clients), 4), rng.integers(0, clients, 600 - 4 * clients)])
        place = written(tmp_path / f"{clients}.npz", x, y, owner, 5)
        found = head(tiny(dataset="npz", clients=0, data_dir=str(place), method=name, method_args=args, min_samples=1))
        z, labels = trained(place)
        wanted = central(method, z, labels)
        np.testing.assert_allclose(found[np.unique(labels)], wanted, rtol=1e-7, atol=2e-7 * np.abs(wanted).max())


@pytest.mark.full
def test_a_small_penalty_with_as_many_rows_as_features_is_a_trap(tmp_path: Path, tiny: Tiny) -> None:
    """1,281 rows of 1,280 features: at 0.01 the head of all rows, by scikit-learn, is near chance too."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 10, 1708)
    x = (0.2 * rng.normal(size=(10, 1280))[y] + rng.normal(size=(1708, 1280))).astype(np.float32)
    place = written(tmp_path / "f.npz", x, y, rng.permutation(1708) % 4, 10)
    z, labels = trained(place)
    assert len(z) == 1281
    found = {}
    for args in ("lam=0.01", "lam=auto"):
        done = tiny(dataset="npz", clients=0, data_dir=str(place), method="fed3r", method_args=args)
        found[args] = done.summary["accuracy"]["global"]["last"]
    h, test = np.column_stack([z, np.ones(1281)]), np.arange(1708) % 4 == 3
    bare = Ridge(0.01, fit_intercept=False).fit(h, np.eye(10)[labels])
    right = bare.predict(np.column_stack([x[test], np.ones(427)])).argmax(axis=1) == y[test]
    assert abs(found["lam=0.01"] - right.mean()) < 0.01
    assert found["lam=auto"] > found["lam=0.01"] + 0.3


def test_sums_in_single_precision_fail_where_those_in_double_do_not() -> None:
    """Rows of norm 1 with three dead columns, as sentences have them, moved by 10 in each feature."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 20, 3000)
    z = rng.normal(size=(20, 96))[y] + rng.normal(size=(3000, 96))
    z[:, :3] = 0
    z = (z / np.linalg.norm(z, axis=1, keepdims=True) + 10).astype(np.float32)
    h, target = np.column_stack([z, np.ones(3000)]), np.eye(20)[y]
    # Least squares on rows that are stacked with the penalty: the second moments are never formed.
    stacked = np.vstack([h.astype(np.float64), 0.1 * np.eye(97)])
    wanted = np.linalg.lstsq(stacked, np.vstack([target, np.zeros((97, 20))]), rcond=None)[0].T
    own = sums.FeatureSums(20, 96)
    own.update(torch.from_numpy(z), torch.from_numpy(y))
    arrays = own.arrays()
    h, target = h.astype(np.float32), target.astype(np.float32)
    single = (h.T @ h).astype(np.float64), (target.T @ h).astype(np.float64)
    gaps = [
        np.abs(sums.ridge(a, b, 0.01) - wanted).max() / np.abs(wanted).max()
        for a, b in ((unpack(arrays["a"], 97), arrays["b"]), single)
    ]
    assert gaps[0] < 1e-6 and gaps[1] > 1


# ---- features of published data sets -------------------------------------------------------------------------------


def published(name: str) -> Path:
    """Return the file of features of a data set."""
    place = Path(os.environ.get(FOLDER, "")) / f"{name}.npz"
    if FOLDER not in os.environ or not place.is_file():
        pytest.skip(f"{FOLDER} names no folder with {name}.npz, which fedapp features writes")
    return place


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method", "first", "trace", "accuracy"),
    [
        ("cifar10", "fed3r lam=30", 10081.267378, 55619840.16, 85.49),
        ("cifar10", "fed3r lam=auto", 10081.267378, 55619840.16, 85.43),
        ("banking77", "fed3r lam=0.01", 18.314550044, 20006.001688587, 88.15),
        ("banking77", "lda shrink=0.02", 18.314550044, 20006.001688587, 90.49),
        ("clinc150", "fed3r lam=0.01", None, 30000, 91.13),
        ("clinc150", "lda shrink=0.05", None, 30000, 92.96),
    ],
)
def test_sums_and_accuracies_of_published_data_sets(
    name: str, method: str, first: float | None, trace: float, accuracy: float, tmp_path: Path
) -> None:
    """Sums of training rows: equal to NumPy's, and to 1e-3 the prototype's; accuracy on test rows: to 0.3 points."""
    place, (identity, args) = published(name), method.split()
    clients = {} if name == "clinc150" else {"clients": 20, "partition": "dirichlet", "alpha": 0.1}
    given: dict[str, Any] = {"dataset": "npz", "data_dir": str(place), "out": tmp_path / "run", **clients}
    found = run(method=identity, method_args=args, **given)
    z, y = trained(place)
    arrays, header = read_safetensors(found.out / "totals.safetensors")
    a, b, bits = unpack(arrays["a"], z.shape[1] + 1), arrays["b"], int(str(header["bits"]))
    if first is not None:
        assert a[0, 0] == pytest.approx(first, rel=1e-3)
    assert np.trace(a) == pytest.approx(trace, rel=1e-3) and a[-1, -1] == len(z)
    h = np.column_stack([np.rint(z * 2.0**bits) / 2.0**bits, np.ones(len(z))])
    assert np.array_equal(a, h.T @ h) and np.array_equal(b, np.eye(len(b))[y].T @ h)
    assert 100 * found.summary["accuracy"]["global"]["last"] == pytest.approx(accuracy, abs=0.3)
    if method == "fed3r lam=auto":
        # The unit of the grid is now the mean square of centred features, so the best penalty is a neighbour in it.
        assert abs(np.log10(found.summary["calibration"]["lam"] / 868.38)) < 1 / 4
    if method == "fed3r lam=30":
        biases = (.080524, .061277, .105090, .141692, .130408, .065614, .126406, .008149, .173206, .031852)  # fmt: skip
        np.testing.assert_allclose(head(found)[:, -1], biases, atol=1e-3)
        np.testing.assert_allclose(head(found)[0, :3], (-0.0012663, -0.0074565, 0.0051450), rtol=0.02)
        np.testing.assert_allclose(np.linalg.eigvalsh(a)[[0, -1]], (94.19, 1.807e7), rtol=0.01)
        assert b[0, 0] == pytest.approx(905.459386, rel=1e-3)


@pytest.mark.slow
def test_the_sums_of_clinc150_with_its_validation_rows() -> None:
    with np.load(published("clinc150")) as arrays:
        z = arrays["x"][arrays["split"] != "test"].astype(np.float64)
    assert (z[:, 0] ** 2).sum() == pytest.approx(50.449536657, rel=1e-3)
    assert (z**2).sum() + len(z) == pytest.approx(36000.010074159, rel=1e-3)
