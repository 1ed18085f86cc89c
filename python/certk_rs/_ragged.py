"""Rows of different lengths, one behind the other in a flat array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def starts_of(lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the starts of rows of these lengths, and the end of the last: (rows + 1,)."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def padded(flat: NDArray[Any], lengths: NDArray[np.int64], fill: int = -1) -> NDArray[Any]:
    """Rows of these lengths side by side, (rows, longest), with `fill` behind each."""
    table = np.full((lengths.size, int(lengths.max(initial=0))), fill, dtype=flat.dtype)
    table[np.arange(table.shape[1]) < lengths[:, None]] = flat
    return table
