"""The data and their partition over the clients."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field

from fedapp.errors import listed
from fedapp.settings._group import AUTO, Auto, Group, OrAuto


class DataSettings(Group):
    """The data and their partition over the clients."""

    dataset: str = Field(
        "digits", description="name of the data set, or npz, csv, parquet, folder, hf for your own; see fedapp datasets"
    )
    data_dir: str = Field("", description="folder with NAME.npz, or to download to; else the place of your own data")
    columns: str = Field(
        "",
        description='meaning of the columns of csv, parquet and hf, such as "x=age,pulse y=diagnosis client=hospital '
        'split=part group=patient"; empty = y, label or target, client, split and group by name, all other numeric '
        "columns are features; x=* takes text columns too",
    )
    image_size: Annotated[int, Field(ge=0, le=4096)] | Auto = Field(
        "auto",
        description="side in pixels of the pictures of folder and hf: their shorter side, then the central square; "
        "0 = as they are if all are equal; auto = at most 64",
    )
    layout: Literal["auto", "classes", "clients"] = Field(
        "auto", description="meaning of the folders in a folder of pictures; auto = by the number of levels"
    )
    normalise: Literal["auto", "data", "client", "none"] = Field(
        "auto",
        description="mean and standard deviation by which samples are normalised: data = of the training rows of all "
        "clients that train, client = of each client's own, none; auto = those of torchvision's weights or published "
        "for the data set, else as data, with public rows; on real nodes as client, with model = identity as data",
    )
    skip_bad: bool = Field(False, description="leave out files and pictures that cannot be used; they are counted")
    data_fraction: float = Field(
        1.0, gt=0, le=1, description="share of the rows of each class that is used, for small studies"
    )
    clients: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="number of clients; 0 = the nodes present, in a simulation all that the data name, else 10",
    )
    partition: str = Field(
        "auto",
        description="assignment of rows to clients; auto = by-client if the data have a column client, else dirichlet; "
        "flwr:NAME = a partitioner of flwr-datasets; see fedapp partitions",
    )
    partition_args: str = Field(
        "", description='arguments of a partitioner of flwr-datasets, "name=value name=value"; see partition'
    )
    partition_file: str = Field("", description="index file of partition = file: .npz of a run, .json or .csv")
    alpha: float = Field(0.5, gt=0, description="Dirichlet concentration")
    classes_per_client: int = Field(2, ge=1, description="for the partitions pathological and classes")
    min_samples: int = Field(10, ge=1, description="smallest number of samples a client may get")
    split: Literal["auto", "official", "merged", "holdout", "given"] = Field(
        "auto",
        description="source of test data; auto = official (by-client: given, flwr: by another column than "
        "label: merged) if the data set has a test set, else holdout",
    )
    test_share: float = Field(
        0.25,
        gt=0,
        lt=1,
        description="in a simulation with split = merged or holdout: share of each client's rows for testing",
    )
    validation: float = Field(
        0.0, ge=0, lt=1, description="share of each client's training rows that is held out for validation scores"
    )
    public_data: str = Field(
        "",
        description="public set of KT-pFL: a share such as 0.05 of the training rows, held back from the clients of "
        "every method, or another data set, NAME or NAME:COUNT; empty = the method's default share",
    )
    class_names: str = Field(
        "", description="the federation's classes, comma-separated, for nodes with their own data; empty = data set's"
    )
    bodies: str = Field(
        "",
        description="pretrained bodies of the clients' features, which get one head each: the first 8 or more digits "
        "that `fedapp features` prints, comma-separated; empty = all clients have one body",
    )
    partition_seed: Annotated[int, Field(ge=0, lt=2**31), OrAuto] = Field(
        AUTO,
        description="seed of the choice, partition and splits of the rows; auto = seed: each seed has a partition "
        "of its own",
    )

    @cached_property
    def named_bodies(self) -> tuple[str, ...]:
        """First digits of the digest of each body."""
        return tuple(listed(self.bodies.lower()))

    @cached_property
    def reading(self) -> tuple[str, int | Auto, str, bool]:
        """The settings that decide how own data are read: `columns`, `image_size`, `layout` and `skip_bad`."""
        return self.columns, self.image_size, self.layout, self.skip_bad
