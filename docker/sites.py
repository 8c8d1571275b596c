"""Data of three imaginary sites: scikit-learn's handwritten digits, unevenly partitioned, one .npz file per site.

    python docker/sites.py DIR [--sites 3] [--seed 0] [--owner UID]

Each file holds its own training and test images and the names of the ten classes. A site may lack some classes.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np

from fedapp.data import datasets, partitions
from fedapp.settings import DataSettings


def write(folder: Path, sites: int = 3, seed: int = 0) -> list[Path]:
    """Write `folder/siteK/data.npz` for K = 0 .. sites - 1: the clients of the simulation with this seed."""
    digits = datasets.load("digits")
    settings = DataSettings(partition="dirichlet", split="holdout", clients=sites, partition_seed=seed)
    partition = partitions.make(digits, settings)
    paths = []
    for number, rows in enumerate(partition.clients):
        path = folder / f"site{number}" / "data.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        (x_train, y_train), (x_test, y_test) = digits.take(rows.train), digits.take(rows.test)
        names = np.array(digits.classes)
        np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test, class_names=names)
        paths.append(path)
    return paths


def main() -> None:
    """Write the files and print the number of images in each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--owner", type=int, default=-1)
    given = parser.parse_args()
    for path in write(given.folder, given.sites, given.seed):
        if given.owner >= 0:
            os.chown(path, given.owner, -1)
        with np.load(path) as data:
            print(f"{path}: {len(data['y_train'])} images to train, {len(data['y_test'])} to test")


if __name__ == "__main__":
    main()
