"""The scores and row options that select, certify and keep_set share, ready for `_native`."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _arrays
from .errors import CertkError

Options = tuple[
    object,  # kind
    object,  # scale
    NDArray[Any] | None,  # mask
    str | None,  # mask_dtype
    NDArray[np.int64] | None,  # lengths
    NDArray[np.int64] | None,  # indptr
    object,  # causal_offset
]


class Rows(NamedTuple):
    """Lent scores with their row options."""

    scores: NDArray[Any]
    dtype: str
    shape: tuple[int | None, ...]
    """Shape of the scores, (..., n), or (rows, None) for ragged rows."""
    batch: tuple[int, ...]
    """The leading axes; their product is the number of rows."""
    options: Options
    """In the order in which every function of `_native` takes them."""

    @property
    def indptr(self) -> NDArray[np.int64] | None:
        """Where each ragged row starts, (rows + 1,), or None."""
        return self.options[5]


def lend_rows(
    scores: ArrayLike,
    kind: object,
    scale: object,
    mask: ArrayLike | None,
    lengths: ArrayLike | None,
    indptr: ArrayLike | None,
    causal_offset: object,
) -> Rows:
    """Coerce the scores (..., n) and their row options; see `certk_rs.select` for their meaning."""
    array, dtype = _arrays.lend_floats("scores", scores)
    shape: tuple[int | None, ...] = array.shape
    batch = array.shape[:-1]
    starts = None
    if indptr is not None:
        starts = _arrays.integers("indptr", indptr)
        if starts.ndim != 1 or starts.size == 0:
            raise CertkError(f"indptr has shape {starts.shape}; pass rows + 1 integers")
        if array.ndim != 1:
            raise CertkError(
                f"indptr is given, but scores has shape {array.shape}; pass one flat buffer"
            )
        starts.setflags(write=False)
        batch = (starts.size - 1,)
        shape = (starts.size - 1, None)
    bias = bias_dtype = valid = None
    if mask is not None:
        bias, bias_dtype = _arrays.lend_mask(mask, array.shape)
    if lengths is not None:
        valid = _arrays.per_row_integers("lengths", lengths, batch)
    options = (kind, scale, bias, bias_dtype, valid, starts, causal_offset)
    return Rows(array, dtype, shape, batch, options)


def budgets(
    eps: object, batch: tuple[int, ...]
) -> tuple[NDArray[np.float64], float | NDArray[np.float64]]:
    """Coerce tail-mass budgets to read-only float64 of shape () or of the batch shape.

    Returns:
        The array, and what `_native` takes for it: one number, or one for each row.
    """
    if type(eps) is float:
        return _one_budget(eps)
    array = _arrays.per_row_floats("eps", eps, batch)
    array.setflags(write=False)
    return array, array.reshape(-1)


@lru_cache(maxsize=64)
def _one_budget(eps: float) -> tuple[NDArray[np.float64], float]:
    # Most calls use one number over and over, and for one short row making the array would show.
    array = np.array(eps)
    array.setflags(write=False)
    return array.view(), eps  # a view of read-only memory can never be made writeable
