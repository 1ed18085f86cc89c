"""The numbers of a cache file as they are stored: widened exactly, and seen to be finite."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_EXPONENT = {"F32": ("<u4", 0x7F80_0000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}


def widen(raw: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    """Stored F32, F16 or BF16 (its 16 bits) as float64, exactly.

    Also where the processor was told to take subnormal numbers for zero (torch.set_flush_denormal):
    those are made of integers.
    """
    if dtype == "F16":
        return raw.astype(np.float64)
    bits = raw.astype(np.uint32) << 16 if dtype == "BF16" else raw.view(np.uint32)
    wide = bits.view(np.float32).astype(np.float64)
    size = bits & np.uint32(0x7FFFFFFF)
    small = (size > 0) & (size < 1 << 23)
    if small.any():
        signs = np.where(bits[small] >> 31 == 1, -(2.0**-149), 2.0**-149)
        wide[small] = signs * size[small]
    return wide


def not_finite(raw: NDArray[Any], dtype: str) -> NDArray[np.intp]:
    """The positions of NaN and infinities among stored F32, F16 or BF16 (its 16 bits)."""
    unsigned, ones = _EXPONENT[dtype]
    bits = raw.view(unsigned)
    return np.flatnonzero((bits & ones) == ones)
