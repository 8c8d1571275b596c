"""Kernels on all clients' models at once: linear combinations, Gram matrix, distances, cosines.

FedAMP mixes models by their squared distances (Huang et al., AAAI 2021), CFL splits clusters by the cosines of updates
(Sattler et al., TNNLS 2021), FedFomo moves along weighted differences of models (Zhang et al., ICLR 2021), cwFedAvg
mixes models class by class (Lee and Choi, ICCV 2025). All of these are products with the m x D matrix ``Theta`` whose
rows are the models, each flattened to D numbers.

``Theta`` is never formed: models are m mappings from names to arrays, and are worked through array by array in blocks
of at most `CHUNK` columns. Beyond models and result, only a few m x `CHUNK` blocks are in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.core.averages import as_tensor
from fedapp.lazy import torch

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]
Model = Mapping[str, Array]

CHUNK = 1 << 14
"""Columns of Theta that are worked on at a time."""


def _check(models: Sequence[Model]) -> None:
    """Refuse models whose names or shapes differ, and arrays that are not floating point."""
    if not models:
        raise ValueError("at least one model is needed")
    for position, model in enumerate(models):
        if set(model) != set(models[0]):
            raise ValueError(f"model {position} has other arrays than model 0: {sorted(set(model) ^ set(models[0]))}")
        for name, first in models[0].items():
            if model[name].shape != first.shape:
                got = f"{model[name].shape}, of model 0 {first.shape}"
                raise ValueError(f"array {name!r} of model {position} has shape {got}")
            if not np.issubdtype(model[name].dtype, np.floating):
                raise TypeError(
                    f"array {name!r} of model {position} has dtype {model[name].dtype}: only floating point"
                )


def _blocks(arrays: Sequence[Array], dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield the columns of Theta that belong to one array, `CHUNK` at a time; a block is valid until the next one."""
    whole = _one_block(arrays, dtype)
    rows = [as_tensor(np.asarray(array, order="C")).view(-1) for array in arrays]
    size = arrays[0].size
    scratch = torch.empty(len(rows), min(CHUNK, size), dtype=dtype)
    for start in range(0, size, CHUNK):
        columns = slice(start, min(start + CHUNK, size))
        if whole is not None:
            yield columns, whole[:, columns]
            continue
        block = scratch[:, : columns.stop - start]
        for target, row in zip(block, rows):
            target.copy_(row[columns])
        yield columns, block


def _one_block(arrays: Sequence[Array], dtype: torch.dtype) -> torch.Tensor | None:
    """Return arrays that lie one behind the other, as those of `product` do, as one (m, n) matrix; None of others.

    They need no copy: cwFedAvg sends mixes of the K models that a product has just made.
    """
    block = arrays[0].base
    if not isinstance(block, np.ndarray) or block.shape != (len(arrays), *arrays[0].shape):
        return None
    matrix = as_tensor(block) if block.flags.c_contiguous else None
    start, step = block.__array_interface__["data"][0], block[0].nbytes
    in_order = all(
        array.base is block
        and array.flags.c_contiguous
        and array.__array_interface__["data"][0] == start + position * step
        for position, array in enumerate(arrays)
    )
    return matrix.view(len(arrays), -1) if matrix is not None and matrix.dtype == dtype and in_order else None


def product(factors: Sequence[Array], models: Sequence[Model]) -> list[dict[str, Array]]:
    """Return the R models ``F_1 F_2 ... F_r Theta``, multiplied from the right, one block of columns at a time.

    Parameters
    ----------
    factors : sequence of ndarray
        Matrices whose shapes chain; the last has m columns, the first R rows.
    models : sequence of m mappings of str to ndarray
        Floating-point models, only read. An array is multiplied in float64 where any model has it in float64, else in
        float32.

    Returns
    -------
    list of R dicts of str to ndarray
        Views of one block of memory per array name, in the precision of the product.

    Raises
    ------
    ValueError
        Models that differ in names or shapes.
    TypeError
        Models that are not floating point.
    """
    from fedapp.core.products import matmul  # a class there inherits from PyTorch's

    _check(models)
    wide = [torch.from_numpy(np.asarray(factor, dtype=np.float64)) for factor in factors]
    results: list[dict[str, Array]] = [{} for _ in range(factors[0].shape[0])]
    for name, first in models[0].items():
        arrays = [model[name] for model in models]
        target = np.empty((len(results), *first.shape), np.result_type(np.float32, *(a.dtype for a in arrays)))
        for position, result in enumerate(results):
            result[name] = target[position, ...]
        out = torch.from_numpy(target).view(len(results), -1)
        chain = [factor.to(out.dtype) for factor in wide]
        for columns, block in _blocks(arrays, out.dtype):
            for factor in reversed(chain[1:]):
                block = matmul(factor, block)
            matmul(chain[0], block, out=out[:, columns])
    return results


def combine(weights: Array, models: Sequence[Model]) -> list[dict[str, Array]]:
    """Return R linear combinations of m models, ``weights @ Theta``; see `product` for the rest.

    Parameters
    ----------
    weights : ndarray, (R, m)
        Row r holds the weights of the m models in result r.
    models : sequence of m mappings of str to ndarray
        Models.
    """
    return product([weights], models)


def gram(models: Sequence[Model], *, centred: bool = False) -> Float64:
    """Return the matrix of inner products of models, ``Theta Theta^T``.

    Parameters
    ----------
    models : sequence of m mappings of str to ndarray
        Floating-point models, only read.
    centred : bool
        Subtract model 0 from all first. Distances do not change, and the small differences of models that all come
        from one received model are not lost against the length that they share.

    Returns
    -------
    ndarray, (m, m), float64
        Exactly symmetric. Products and sums are float64: distances are small differences of large inner products.
    """
    _check(models)
    total = torch.zeros(len(models), len(models), dtype=torch.float64)
    for name in models[0]:
        for _, block in _blocks([model[name] for model in models], torch.float64):
            rows = block - block[0] if centred else block
            total.addmm_(rows, rows.T)
    result: Float64 = (0.5 * (total + total.T)).numpy()
    return result


def squared_distances(models: Sequence[Model]) -> Float64:
    """Return the squared Euclidean distances of models, ``G_ii + G_jj - 2 G_ij`` of their centred `gram`.

    Returns
    -------
    ndarray, (m, m), float64
        Symmetric, never negative, with a zero diagonal.
    """
    inner = gram(models, centred=True)
    norms = np.diag(inner)
    squared: Float64 = np.maximum(norms[:, None] + norms[None, :] - 2.0 * inner, 0.0)
    np.fill_diagonal(squared, 0.0)
    return squared


def cosine_from_gram(inner: Float64) -> Float64:
    """Return the cosines ``G_ij / sqrt(G_ii G_jj)`` of a Gram matrix (m, m), in [-1, 1] with a diagonal of ones.

    A zero vector has no direction: its cosine with every other vector is 0.
    """
    norms = np.sqrt(np.diag(inner))
    scale = np.where(norms > 0, norms, 1.0)
    cosine: Float64 = np.clip(inner / (scale[:, None] * scale[None, :]), -1.0, 1.0)
    np.fill_diagonal(cosine, 1.0)
    return cosine


def cosine_matrix(models: Sequence[Model]) -> Float64:
    """Return the m x m matrix of cosines of models or updates; see `cosine_from_gram`."""
    return cosine_from_gram(gram(models))
