"""Stored numbers of a cache file: exact widening, and checks that they are finite."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_EXPONENT = {"F32": ("<u4", 0x7F80_0000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}


def widen(raw: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    """Convert stored F32, F16 or BF16 (its 16 bits) to float64, exactly.

    Subnormal numbers are made of integers, so a processor that takes them for zero
    (torch.set_flush_denormal) makes no difference.
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
    """A check for NaN and infinities in one pass, with memory of its own that it reuses."""

    _BLOCK = 1 << 19  # bytes, which stay in the cache of a core

    def __init__(self, dtype: str) -> None:
        unsigned, ones = _EXPONENT[dtype]
        self._kind = np.dtype(unsigned)
        self._ones = self._kind.type(ones)
        self._bits = np.empty(self._BLOCK // self._kind.itemsize, self._kind)

    def first_bad(self, raw: NDArray[np.uint8]) -> int | None:
        """Return the position of the first NaN or infinity in these bytes, or None."""
        stored = raw.view(self._kind)
        for start in range(0, len(stored), len(self._bits)):
            block = stored[start : start + len(self._bits)]
            bits = np.bitwise_and(block, self._ones, out=self._bits[: len(block)])
            if bits.max() == self._ones:
                return start + int(np.argmax(bits == self._ones))
        return None
