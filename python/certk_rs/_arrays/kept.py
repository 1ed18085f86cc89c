"""The ways to say which keys are kept: a mask, a Selection, padded indices, lists of indices."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .._ragged import starts_of
from ..errors import CertkError
from ..results import Selection
from . import coerce
from .rows import batch_shape

if TYPE_CHECKING:
    from .._native import _Keep

Keep = ArrayLike | Selection | Sequence[ArrayLike]
_PADDING = -1


def as_native_kept(keep: Keep, scores: NDArray[Any], indptr: NDArray[np.int64] | None) -> _Keep:
    """Coerce a kept set to a mask with the scores' shape, or to CSR indices (indptr, indices).

    Only bool dtype is a mask. Range and repetition of the indices are judged in Rust.
    """
    if isinstance(keep, Selection):
        return None, *_of_selection(keep, scores, indptr)
    batch = batch_shape(scores, indptr)
    if isinstance(keep, list | tuple) and not _is_mask(keep):
        return None, *_of_list(keep, batch)
    array, dtype = coerce.borrow("keep", keep)
    if dtype == "bool":
        return coerce.broadcast("keep", array, scores.shape), None, None
    return None, *_of_padded(coerce.integers("keep", keep), batch)


def _of_selection(
    keep: Selection, scores: NDArray[Any], indptr: NDArray[np.int64] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    shape = scores.shape if indptr is None else (indptr.size - 1, None)
    if keep.shape != shape:
        raise CertkError(
            f"keep is a Selection of shape {keep.shape}, but the scores have shape {shape}"
        )
    starts = keep.score_indptr
    if starts is not None and indptr is not None and not np.array_equal(starts, indptr):
        raise CertkError("keep is a Selection of ragged rows with another indptr than the scores")
    return keep.indptr, keep.indices.astype(np.int64)


def _of_padded(
    keep: NDArray[np.int64], batch: tuple[int, ...]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if keep.shape[:-1] != batch and not (keep.ndim == 1 and prod(batch) == 1):
        raise CertkError(
            f"keep has shape {keep.shape}; pass indices of shape {_padded_shape(batch)}, "
            f"padded with {_PADDING}, or a boolean mask"
        )
    keep = keep.reshape(prod(batch), keep.shape[-1])
    real = keep != _PADDING
    return starts_of(real.sum(axis=-1)), keep[real]


def _padded_shape(batch: tuple[int, ...]) -> str:
    return "(" + "".join(f"{axis}, " for axis in batch) + "k)"


def _of_list(
    keep: Sequence[Any], batch: tuple[int, ...]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """One entry per row, each a flat array of indices; or one flat list of integers for one row."""
    n_rows = prod(batch)
    if n_rows == 1 and all(np.ndim(entry) == 0 for entry in keep):
        keep = [list(keep)]
    if len(keep) != n_rows:
        raise CertkError(
            f"keep lists {len(keep)} entries, but the scores have {n_rows} rows; pass one array of "
            "indices per row"
        )
    entries = [coerce.integers(f"keep[{i}]", entry) for i, entry in enumerate(keep)]
    for i, entry in enumerate(entries):
        if entry.ndim != 1:
            raise CertkError(f"keep[{i}] has shape {entry.shape}; pass a flat array of indices")
    joined = np.concatenate([*entries, np.empty(0, dtype=np.int64)])
    return starts_of([entry.size for entry in entries]), joined


def _is_mask(keep: Sequence[Any]) -> bool:
    """Return True if nested lists hold booleans, judged by their first number."""
    first: Any = keep
    while isinstance(first, list | tuple):
        if not first:
            return False
        first = first[0]
    return getattr(first, "dtype", None) == np.bool_ or isinstance(first, bool)
