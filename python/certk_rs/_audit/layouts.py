"""Where the bytes of codes lie in a file: of every layout a byte for each entry is made.

A byte of 128 stands for 0. Rows are those of whole groups of sixteen, and entries those of whole
fours or sixteens: whoever asks looks at the missing ones, too.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

GROUP, STEP, BIAS = 16, 4, 128
_HALF_BIAS = 8


def code_bytes(count: int, d: int) -> int:
    """Return the bytes of the codes of so many keys."""
    return -(-count // GROUP) * GROUP * -(-d // STEP) * STEP


def of_keys(stored: Bytes, d: int) -> Bytes:
    """Return codes of keys from their lines, each of four entries of sixteen keys."""
    steps = -(-d // STEP)
    lines = stored.reshape(-1, steps, GROUP, STEP).swapaxes(1, 2)
    return lines.reshape(-1, steps * STEP)


def of_values(stored: Bytes, d: int, bits: int) -> Bytes:
    """Return codes of values from their lines, each of all entries of four values, or of eight."""
    width = -(-d // GROUP) * GROUP
    lines = stored.reshape(-1, bits // 2, width, 4).swapaxes(2, 3)
    codes = lines.reshape(-1, 2 * bits, width)
    if bits == 4:
        codes = np.concatenate([codes << 4, codes & 0xF0], axis=1)
    return codes.reshape(-1, width)


def of_low(stored: Bytes, bits: int) -> Bytes:
    """Return the codes of the low plane from rows, a key in each."""
    if bits == 8:
        return stored
    halves = np.concatenate([stored & 0x0F, stored >> 4], axis=1)
    return halves + np.uint8(BIAS - _HALF_BIAS)
