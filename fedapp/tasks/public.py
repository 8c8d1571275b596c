"""The public set: unlabelled images that all clients may see, for methods that distil knowledge on them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedapp import sampling
from fedapp.config import RunConfig
from fedapp.data import datasets
from fedapp.data.datasets import DATASET_NAMES, OWN
from fedapp.data.moments import Samples
from fedapp.data.transforms import InputSpec
from fedapp.errors import BadRequest, described

PUBLIC_IMAGES = 3000
"""Images that are drawn from another data set where `public-data` gives no number (KT-pFL's published setting)."""


@dataclass(frozen=True)
class PublicSource:
    """Where the public images come from: a share of the clients' training images, or another data set.

    Attributes
    ----------
    share : in (0, 1): this share of every client's training images is held back; 0 = another data set.
    dataset, count : name of the other data set, and how many of its training images are drawn.
    """

    share: float = 0.0
    dataset: str = ""
    count: int = 0


def public_source(config: RunConfig) -> PublicSource | None:
    """Read `public-data`: a share such as `0.05`, or `NAME`, `NAME:COUNT` of another data set.

    A share in the configuration is held back from the clients of *every* method, so that methods which are compared
    train on the same private images. A method's own default share, and another data set, concern that method alone.

    Returns
    -------
    None where no images are public.

    Raises
    ------
    BadRequest : neither a share between 0 and 1 nor another data set with a whole number of images.
    """
    needed = config.method_and_hparams()[0].public_share
    text = config.data.public_data.strip()
    if not text:
        return PublicSource(share=needed) if needed else None
    try:
        share = float(text)
    except ValueError:
        source = _other_source(config, text)  # checked for every method, used by those that need it
        return source if needed else None
    if not 0 < share < 1:
        raise BadRequest(f"public-data = '{text}': a share of the training rows lies between 0 and 1")
    return PublicSource(share=share)


def _other_source(config: RunConfig, text: str) -> PublicSource:
    """Read `NAME` or `NAME:COUNT`."""
    name, _, count = text.partition(":")
    if count and not (count.isascii() and count.isdigit() and int(count) > 0):
        raise BadRequest(f"public-data = '{text}': give the number of rows after the colon, as in {name}:3000")
    others = [d for d in DATASET_NAMES if d not in (*OWN, config.data.dataset)]
    if name not in others:
        raise BadRequest(
            f"public-data = '{text}': give a share of the training rows such as 0.05, or another data set "
            f"({', '.join(others)}), NAME or NAME:COUNT"
        )
    return PublicSource(dataset=name, count=int(count or PUBLIC_IMAGES))


def draw_images(source: PublicSource, private: str, inputs: InputSpec, data_dir: str, seed: int) -> Samples:
    """Draw training images of another data set.

    Parameters
    ----------
    source : names a data set.
    private : what the clients' own data are called, for messages.   inputs : their specification.
    data_dir : where data sets lie.   seed : decides the draw.

    Returns
    -------
    (P, H, W, C) uint8, in the order of that data set.

    Raises
    ------
    BadRequest : its images have another size, another number of channels or of grey levels, or there are too few.
    """
    other = datasets.load(source.dataset, data_dir or None)
    if (other.shape, other.scale) != (inputs.shape, inputs.scale):
        raise BadRequest(
            f"public-data = '{source.dataset}' has {described(other.shape)} and grey levels to {other.scale:g}; "
            f"{private} has {described(inputs.shape)} and {inputs.scale:g}: choose a data set with equal images, or a "
            "share such as 0.05"
        )
    if source.count > other.num_train:
        raise BadRequest(
            f"public-data = '{source.dataset}:{source.count}': {source.dataset} has {other.num_train} training rows"
        )
    drawn = sampling.rng(seed, "public").choice(other.num_train, source.count, replace=False)
    return other.take(np.sort(drawn))[0]


def node_images(config: RunConfig, inputs: InputSpec) -> Samples | None:
    """Return the public images (P, H, W, C) uint8 for a node with its own data, or None where the method needs none.

    Raises
    ------
    BadRequest : a share is configured, which nodes with their own data cannot hold back together.
    """
    source = public_source(config)
    if source is None:
        return None
    if source.share:
        raise BadRequest(
            f"{config.federation.method} needs public rows, and nodes with their own data have none in common: "
            "give public-data = NAME or NAME:COUNT, a data set that every node has in its data-dir"
        )
    return draw_images(source, "the node's data", inputs, config.data.data_dir, config.data_seed)
