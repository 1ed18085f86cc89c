"""The scores and row options that select, certify and keep_set share, ready for `_native`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import CertkError
from . import coerce

if TYPE_CHECKING:
    from .._native import _Rows


def as_native_rows(
    scores: ArrayLike,
    mask: ArrayLike | None,
    lengths: ArrayLike | None,
    indptr: ArrayLike | None,
    kind: str,
    scale: float,
    causal_offset: int | None,
) -> tuple[_Rows, NDArray[Any], NDArray[np.int64] | None]:
    """Coerce the scores (..., n) and what goes with them; see `certk_rs.select` for the meaning.

    Returns the rows, and of them the scores and indptr.
    """
    stored = coerce.as_native_floats("scores", scores)
    array, _ = stored
    starts = bias = valid = None
    if indptr is not None:
        starts = coerce.integers("indptr", indptr)
        if starts.ndim != 1 or starts.size == 0:
            raise CertkError(f"indptr has shape {starts.shape}; pass rows + 1 integers")
        if array.ndim != 1:
            raise CertkError(
                f"indptr is given, but scores has shape {array.shape}; pass one flat buffer"
            )
        starts.setflags(write=False)
    if mask is not None:
        bias = coerce.as_native_mask(mask, array.shape)
    if lengths is not None:
        valid = coerce.per_row_integers("lengths", lengths, batch_shape(array, starts))
    return (stored, kind, scale, bias, valid, starts, causal_offset), array, starts


def batch_shape(scores: NDArray[Any], indptr: NDArray[np.int64] | None) -> tuple[int, ...]:
    """Return the leading axes, whose product is the number of rows; (rows,) for ragged rows."""
    return scores.shape[:-1] if indptr is None else (indptr.size - 1,)


def budgets(
    eps: object, scores: NDArray[Any], indptr: NDArray[np.int64] | None
) -> float | NDArray[np.float64]:
    """Coerce tail-mass budgets to a float, or to read-only float64 of shape () or the batch's."""
    if isinstance(eps, float):
        return eps
    array = coerce.per_row_floats("eps", eps, batch_shape(scores, indptr))
    array.setflags(write=False)
    return array
