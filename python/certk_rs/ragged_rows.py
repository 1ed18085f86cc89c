"""Keys or values of which each head has another number, in one array without padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ._arrays import coerce
from .errors import CertkError


@dataclass(frozen=True, eq=False)
class RaggedRows:
    """Rows of all heads in one array, without padding; k or v of `certk_rs.attention`."""

    rows: ArrayLike
    """(N, d): float16, bfloat16, float32 or float64."""
    starts: ArrayLike
    """(..., kv_heads): the first row of each head."""
    counts: ArrayLike
    """(..., kv_heads): the number of its rows, one behind the other."""

    def _parts(self, argument: str) -> tuple[Any, tuple[list[int], list[int], list[int]]]:
        """Return the rows and the heads as `_native` takes them."""
        stored = array, _ = coerce.as_native_floats(argument, self.rows)
        starts, counts = (coerce.integers(argument, each) for each in (self.starts, self.counts))
        if array.ndim != 2 or starts.shape != counts.shape:
            raise CertkError(
                f"{argument} has rows of shape {array.shape}, starts of {starts.shape} and counts "
                f"of {counts.shape}: pass (N, d), and two of (..., kv_heads)"
            )
        if starts.size and min(int(starts.min()), int(counts.min())) < 0:
            raise CertkError(f"{argument} has a start or a count below 0")
        flat = [np.ravel(each).tolist() for each in (starts, counts)]
        return stored, (list(starts.shape), flat[0], flat[1])
