"""What the numbers of a run depend on and its configuration only names: data, own code, stored weights.

A run directory keeps a SHA-256 of each in `versions.json`:

==========================================  ==========================================================================
``data samples``, ``data labels``, ...      the parts of the data set as it is read (`Dataset.identity`)
``public ...``                              the same of another data set that public rows are drawn from
``code of MODULE``                          the file of an own model, metric or method
``weights``                                 the file of stored weights
==========================================  ==========================================================================
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

from fedapp import plugins
from fedapp.config import RunConfig
from fedapp.data import datasets
from fedapp.files import absolute
from fedapp.models import is_own, own, weights
from fedapp.tasks.public import public_source

OWN_ROOMS = ("fedapp", "clients", "strategies")


def of_data(config: RunConfig) -> dict[str, str]:
    """Return the SHA-256 of the data of a simulation, by the name of the part.

    Raises
    ------
    BadRequest : the data are not there.
    """
    data = datasets.latest(config.data.dataset, config.data.data_dir or None, config.data)
    found = {f"data {name}": value for name, value in data.identity.items()}
    source = public_source(config)
    if source is not None and source.dataset:
        folder = config.data.data_dir if datasets.published(config.data.dataset) else ""
        public = datasets.latest(source.dataset, folder or None).identity
        found |= {f"public {name}": value for name, value in public.items()}
    return found


def of_files(config: RunConfig) -> dict[str, str]:
    """Return the SHA-256 of own code and of stored weights, as far as the files are here."""
    method, _ = config.method_and_hparams()
    models = [own.target(name) for name in (*config.model.names, config.second_model) if is_own(name)]
    classes = [f"{kind.__module__}:{kind.__name__}" for kind in (method.strategy, method.client)]
    others = [*map(str.strip, config.evaluation.metrics.split(",")), *classes]
    found = code_of([*models, *(t for t in others if t.partition(":")[0].split(".")[0] not in OWN_ROOMS)])
    if config.model.weights and absolute(config.model.weights).is_file():
        found["weights"] = weights.checksum(config.model.weights)
    return found


def code_of(targets: Collection[str]) -> dict[str, str]:
    """Return the SHA-256 of the files of `package.module:attribute`, by `code of MODULE`; nothing is imported."""
    files = {t.partition(":")[0]: plugins.code_file(t) for t in targets if plugins.well_formed(t)}
    return {f"code of {m}": hashlib.sha256(f.read_bytes()).hexdigest() for m, f in files.items() if f is not None}


def data_hash(noted: Mapping[str, str]) -> str:
    """Return one SHA-256 of the data that a run noted; empty for a run of an earlier version, which noted none."""
    data = sorted((name, value) for name, value in noted.items() if name.startswith("data "))
    return hashlib.sha256(repr(data).encode()).hexdigest() if data else ""


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Name what both have and is not the same, with commas; empty if all is."""
    return ", ".join(name for name, value in now.items() if name in before and before[name] != value)
