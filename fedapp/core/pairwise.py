"""Kernels on all clients' models at once: linear combinations, Gram, distance and cosine matrices.

FedAMP mixes models by their squared distances (Huang et al., AAAI 2021), CFL splits clusters by the cosines of updates
(Sattler et al., TNNLS 2021), FedFomo weighs by distances (Zhang et al., ICLR 2021), cwFedAvg mixes models class by
class (Lee and Choi, ICCV 2025). All of them are products with the m x D matrix whose rows are models.

Models are given either as such a matrix or as a sequence of m mappings from names to arrays. They are worked through in
blocks of ``chunk`` columns, so that beyond models and result only a few m x chunk blocks are held.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch

from fedapp.core.averages import as_tensor
from fedapp.core.products import matmul

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]
Model = Mapping[str, Array]

CHUNK = 1 << 14
"""Default number of columns worked on at a time."""

__all__ = [
    "CHUNK",
    "Layout",
    "combine",
    "cosine_from_gram",
    "cosine_matrix",
    "distances_from_gram",
    "gram",
    "product",
    "squared_distances",
    "stack",
    "unstack",
]


@dataclass(frozen=True)
class Layout:
    """Where the arrays of a model lie in a flat vector: names in order, with their shapes."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of entries of each array."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def size(self) -> int:
        """Number of entries D of the whole model."""
        return sum(self.sizes)


def _layout(models: Sequence[Model]) -> Layout:
    """Return the common layout of models; refuse names or shapes that differ and arrays that are not floating point."""
    if not models:
        raise ValueError("at least one model is needed")
    layout = Layout(tuple(models[0]), tuple(tuple(array.shape) for array in models[0].values()))
    for position, model in enumerate(models):
        if set(model) != set(layout.names):
            raise ValueError(
                f"model {position} has other arrays than model 0: {sorted(set(model) ^ set(layout.names))}"
            )
        for name, shape in zip(layout.names, layout.shapes):
            if tuple(model[name].shape) != shape:
                raise ValueError(
                    f"array {name!r} of model {position} has shape {model[name].shape}, of model 0 {shape}"
                )
            if not np.issubdtype(model[name].dtype, np.floating):
                raise TypeError(
                    f"array {name!r} of model {position} has dtype {model[name].dtype}: only floating point"
                )
    return layout


def stack(models: Sequence[Model], names: Sequence[str] | None = None) -> tuple[Array, Layout]:
    """Copy models into the rows of one float32 matrix.

    Parameters
    ----------
    models : sequence of mapping of str to ndarray
        m models with equal names, shapes and floating-point arrays.
    names : sequence of str, optional
        The arrays to take, in this order; all of them, in the order of the first model, if omitted.

    Returns
    -------
    theta : ndarray, (m, D), float32
        One model a row.
    layout : Layout
        What `unstack` needs to go back.

    Raises
    ------
    ValueError
        No model, or names or shapes differ.
    TypeError
        An array is not floating point.
    """
    if names is not None:
        models = [{name: model[name] for name in names} for model in models]
    layout = _layout(models)
    theta = np.empty((len(models), layout.size), dtype=np.float32)
    ends = list(itertools.accumulate(layout.sizes))
    for row, model in zip(theta, models):
        for name, size, end in zip(layout.names, layout.sizes, ends):
            row[end - size : end] = model[name].reshape(-1)
    return theta, layout


def unstack(theta: Array, layout: Layout) -> list[dict[str, Array]]:
    """Return the models that the rows of a matrix hold, as views of it.

    Parameters
    ----------
    theta : ndarray, (m, D)
        One model a row.
    layout : Layout
        As `stack` returned it.

    Returns
    -------
    list of dict of str to ndarray
        m models whose arrays share the memory of ``theta``.
    """
    if theta.ndim != 2 or theta.shape[1] != layout.size:
        raise ValueError(f"the layout needs a matrix of {layout.size} columns, got shape {theta.shape}")
    ends = list(itertools.accumulate(layout.sizes))
    return [
        {
            name: row[end - math.prod(shape) : end].reshape(shape)
            for name, shape, end in zip(layout.names, layout.shapes, ends)
        }
        for row in theta
    ]


def _working_dtype(dtypes: Sequence[np.dtype[Any]]) -> torch.dtype:
    """Return float64 if anything is float64, else float32 (half precision is widened)."""
    return torch.float64 if np.result_type(np.float32, *dtypes) == np.float64 else torch.float32


def _flat_rows(models: Sequence[Model], layout: Layout) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Give, array by array, its flat views in all models."""
    for name in layout.names:
        yield name, [as_tensor(np.asarray(model[name], order="C")).view(-1) for model in models]


def _gather(rows: Sequence[torch.Tensor], block: slice, scratch: torch.Tensor) -> torch.Tensor:
    """Copy one block of columns of all models into the front of a scratch matrix."""
    width = min(block.stop, rows[0].numel()) - block.start
    gathered = scratch[:, :width]
    for target, row in zip(gathered, rows):
        target.copy_(row[block])
    return gathered


def _blocks(models: Sequence[Model] | Array, chunk: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Give the m x D matrix of models in blocks of at most ``chunk`` columns, each valid until the next one."""
    if isinstance(models, np.ndarray):
        theta = as_tensor(models)
        for start in range(0, theta.shape[1], chunk):
            yield theta[:, start : start + chunk].to(dtype)
        return
    layout = _layout(models)
    scratch = torch.empty(len(models), min(chunk, max(layout.sizes, default=0)), dtype=dtype)
    for _, rows in _flat_rows(models, layout):
        for start in range(0, rows[0].numel(), chunk):
            yield _gather(rows, slice(start, start + chunk), scratch)


def _check_matrix(theta: Array, chunk: int) -> None:
    if theta.ndim != 2 or theta.shape[0] == 0:
        raise ValueError(f"stacked models must have shape (m, D) with at least one row, got {theta.shape}")
    if not np.issubdtype(theta.dtype, np.floating):
        raise TypeError(f"stacked models have dtype {theta.dtype}: only floating point")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")


@overload
def product(factors: Sequence[Array], theta: Array, *, out: Array | None = None, chunk: int = CHUNK) -> Array: ...
@overload
def product(
    factors: Sequence[Array],
    theta: Sequence[Model],
    *,
    out: Sequence[Mapping[str, Array]] | None = None,
    chunk: int = CHUNK,
) -> list[dict[str, Array]]: ...
def product(
    factors: Sequence[Array],
    theta: Array | Sequence[Model],
    *,
    out: Any = None,
    chunk: int = CHUNK,
) -> Array | list[dict[str, Array]]:
    """Return ``F_1 F_2 ... F_r Theta``, multiplied from the right, one block of columns at a time.

    Parameters
    ----------
    factors : sequence of ndarray
        Matrices whose shapes chain; the last has m columns, the first R rows.
    theta : ndarray, (m, D), or sequence of m mappings of str to ndarray
        Floating-point models. Float64 models are multiplied in float64, all others in float32.
    out : optional
        Where the result goes: an (R, D) matrix, or R mappings with all names, in the precision of the product. It may
        be ``theta`` itself when R = m. New memory if omitted.
    chunk : int
        Columns at a time. Beyond models and result the function holds at most ``(m + R + largest inner size) x chunk``
        entries, whatever D is.

    Returns
    -------
    ndarray, (R, D), or list of R dicts
        In the form of ``theta``. New dicts hold views of one block of memory for each array name.

    Raises
    ------
    ValueError
        Shapes that do not chain, models that differ, or an ``out`` of another shape or dtype.
    TypeError
        Models that are not floating point.
    """
    count = len(theta)
    for left, right in itertools.pairwise([*(factor.shape for factor in factors), (count, 0)]):
        if len(left) != 2 or left[1] != right[0]:
            raise ValueError(f"factors of shapes {[f.shape for f in factors]} do not chain with {count} models")
    if not factors:
        raise ValueError("at least one factor is needed")
    if isinstance(theta, np.ndarray):
        _check_matrix(theta, chunk)
        dtype = _working_dtype([theta.dtype])
        target = _new((factors[0].shape[0], theta.shape[1]), dtype) if out is None else out
        _check_out(target, (factors[0].shape[0], theta.shape[1]), dtype)
        # With result and models in the same memory a product must not be written before its block was read.
        aside = np.may_share_memory(target, theta)
        chain = [torch.from_numpy(np.asarray(factor, dtype=np.float64)).to(dtype) for factor in factors]
        columns = torch.from_numpy(target)
        start = 0
        for block in _blocks(theta, chunk, dtype):
            part = columns[:, start : start + block.shape[1]]
            _multiply(chain, block, part, aside)
            start += block.shape[1]
        return target
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    layout = _layout(theta)
    results: list[dict[str, Array]] = [{} for _ in range(factors[0].shape[0])] if out is None else list(out)
    if len(results) != factors[0].shape[0]:
        raise ValueError(f"the product has {factors[0].shape[0]} rows, out has {len(results)}")
    wide = [torch.from_numpy(np.asarray(factor, dtype=np.float64)) for factor in factors]
    for (name, rows), shape in zip(_flat_rows(theta, layout), layout.shapes):
        dtype = _working_dtype([model[name].dtype for model in theta])
        if out is None:
            block_of_name = _new((len(results), *shape), dtype)
            for position, result in enumerate(results):
                result[name] = block_of_name[position, ...]
        for result in results:
            if name not in result:
                raise ValueError(f"out has no array {name!r}")
            _check_out(result[name], shape, dtype)
        whole = _one_block([model[name] for model in theta], dtype)
        target = _one_block([result[name] for result in results], dtype) if out is None else None
        chain = [factor.to(dtype) for factor in wide]
        size = rows[0].numel()
        scratch = torch.empty(count if whole is None else 0, min(chunk, size), dtype=dtype)
        mixed = torch.empty(len(results) if target is None else 0, scratch.shape[1], dtype=dtype)
        for start in range(0, size, chunk):
            columns_of = slice(start, min(start + chunk, size))
            block = _gather(rows, columns_of, scratch) if whole is None else whole[:, columns_of]
            if target is not None:
                _multiply(chain, block, target[:, columns_of], False)
                continue
            blend = mixed[:, : block.shape[1]]
            _multiply(chain, block, blend, False)
            for result, row in zip(results, blend):
                torch.from_numpy(result[name]).view(-1)[columns_of] = row
    return results


def _one_block(arrays: Sequence[Array], dtype: torch.dtype) -> torch.Tensor | None:
    """Return the (m, n) matrix of arrays that lie one behind the other, as those of `product` do; None of others."""
    block = arrays[0].base
    if (
        not isinstance(block, np.ndarray)
        or block.shape != (len(arrays), *arrays[0].shape)
        or not block.flags.c_contiguous
        or torch.from_numpy(block[:0]).dtype != dtype
    ):
        return None
    places = [array.__array_interface__["data"][0] for array in arrays]
    start, step = block.__array_interface__["data"][0], block[0].nbytes
    behind = places == list(range(start, start + step * len(arrays), step)) if step else True
    if not behind or any(array.base is not block or not array.flags.c_contiguous for array in arrays):
        return None
    return as_tensor(block).view(len(arrays), -1)


def _new(shape: tuple[int, ...], dtype: torch.dtype) -> Array:
    return np.empty(shape, dtype=np.float64 if dtype == torch.float64 else np.float32)


def _check_out(out: Array, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    expected = np.dtype(np.float64 if dtype == torch.float64 else np.float32)
    if out.shape != shape or out.dtype != expected or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(
            f"out must be a writeable C-ordered {expected} array of shape {shape}, got {out.dtype} of shape {out.shape}"
        )


def _multiply(chain: Sequence[torch.Tensor], block: torch.Tensor, out: torch.Tensor, aside: bool) -> None:
    """Write the product of all factors with one block into ``out``, through new memory if they overlap."""
    for factor in reversed(chain[1:]):
        block = matmul(factor, block)
        aside = False
    if aside:
        out.copy_(matmul(chain[0], block))
    else:
        matmul(chain[0], block, out=out)


@overload
def combine(weights: Array, theta: Array, *, out: Array | None = None, chunk: int = CHUNK) -> Array: ...
@overload
def combine(
    weights: Array,
    theta: Sequence[Model],
    *,
    out: Sequence[Mapping[str, Array]] | None = None,
    chunk: int = CHUNK,
) -> list[dict[str, Array]]: ...
def combine(
    weights: Array,
    theta: Array | Sequence[Model],
    *,
    out: Any = None,
    chunk: int = CHUNK,
) -> Array | list[dict[str, Array]]:
    """Return R linear combinations of m models, ``weights @ Theta``; see `product` for forms, memory and errors.

    Parameters
    ----------
    weights : ndarray, (R, m)
        Row r holds the weights of the m models in result r.
    theta : ndarray, (m, D), or sequence of m mappings of str to ndarray
        Models.
    out : optional
        As in `product`.
    chunk : int
        As in `product`.
    """
    return product([weights], theta, out=out, chunk=chunk)


def gram(theta: Array | Sequence[Model], chunk: int = CHUNK, *, centred: bool = False) -> Float64:
    """Return the m x m matrix of inner products of models.

    Parameters
    ----------
    theta : ndarray, (m, D), or sequence of m mappings of str to ndarray
        Floating-point models.
    chunk : int
        Columns at a time; the function holds one m x chunk block in float64, two if centred.
    centred : bool
        Subtract model 0 from all first. Distances do not change by that, and the small differences of models that all
        come from one received model are not lost beside the length they share.

    Returns
    -------
    ndarray, (m, m), float64
        Exactly symmetric, summed in float64.
    """
    if isinstance(theta, np.ndarray):
        _check_matrix(theta, chunk)
    total = torch.zeros(len(theta), len(theta), dtype=torch.float64)
    for block in _blocks(theta, chunk, torch.float64):
        rows = block - block[0] if centred else block
        total.addmm_(rows, rows.T)
    result: Float64 = (0.5 * (total + total.T)).numpy()
    return result


def distances_from_gram(inner: Float64) -> Float64:
    """Return squared distances ``G_ii + G_jj - 2 G_ij``, never negative, with a zero diagonal.

    Parameters
    ----------
    inner : ndarray, (m, m)
        A Gram matrix.
    """
    norms = np.diag(inner)
    squared: Float64 = np.maximum(norms[:, None] + norms[None, :] - 2.0 * inner, 0.0)
    np.fill_diagonal(squared, 0.0)
    return squared


def cosine_from_gram(inner: Float64) -> Float64:
    """Return cosines ``G_ij / sqrt(G_ii G_jj)`` in [-1, 1], with a diagonal of ones.

    A zero vector has no direction: its cosine with every other one is 0.

    Parameters
    ----------
    inner : ndarray, (m, m)
        A Gram matrix.
    """
    norms = np.sqrt(np.diag(inner))
    scale = np.where(norms > 0, norms, 1.0)
    cosine: Float64 = np.clip(inner / (scale[:, None] * scale[None, :]), -1.0, 1.0)
    np.fill_diagonal(cosine, 1.0)
    return cosine


def squared_distances(theta: Array | Sequence[Model], chunk: int = CHUNK) -> Float64:
    """Return the m x m matrix of squared Euclidean distances of models, from their centred `gram`.

    Parameters and memory are those of `gram`; the result is symmetric, not negative, and zero on the diagonal.
    """
    return distances_from_gram(gram(theta, chunk, centred=True))


def cosine_matrix(theta: Array | Sequence[Model], chunk: int = CHUNK) -> Float64:
    """Return the m x m matrix of cosines of models or updates, from their `gram`.

    Parameters and memory are those of `gram`; see `cosine_from_gram` for the result and for zero vectors.
    """
    return cosine_from_gram(gram(theta, chunk))
