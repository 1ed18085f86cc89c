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


class FiniteCheck:
    """Whether stored numbers are finite, in one pass over them and no fresh memory each time."""

    _BLOCK = 1 << 19  # bytes, which stay in the cache of a core

    def __init__(self, dtype: str) -> None:
        unsigned, ones = _EXPONENT[dtype]
        self._kind = np.dtype(unsigned)
        self._ones = self._kind.type(ones)
        self._bits = np.empty(self._BLOCK // self._kind.itemsize, self._kind)

    def first_bad(self, raw: NDArray[np.uint8]) -> int | None:
        """The position of the first NaN or infinity among the numbers in these bytes, or None."""
        stored = raw.view(self._kind)
        for start in range(0, len(stored), len(self._bits)):
            block = stored[start : start + len(self._bits)]
            bits = np.bitwise_and(block, self._ones, out=self._bits[: len(block)])
            if bits.max() == self._ones:
                return start + int(np.argmax(bits == self._ones))
        return None


def not_finite(raw: NDArray[Any], dtype: str) -> NDArray[np.intp]:
    """The positions of NaN and infinities among stored F32, F16 or BF16 (its 16 bits)."""
    unsigned, ones = _EXPONENT[dtype]
    bits = raw.view(unsigned)
    return np.flatnonzero((bits & ones) == ones)
