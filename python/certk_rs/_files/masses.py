"""Stored tail masses: F32 where that is fine enough, rounded outward.

The rounding works on the bits of floats, which have the order of integers. So a host that takes
subnormal numbers for zero (torch.set_flush_denormal) makes no difference.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

Budgets = Mapping[int, tuple[float, ...]]
"""Of every layer, by its number, one budget for each of its groups."""

# Budgets below this are told apart by F64 only.
_SMALLEST_F32_BUDGET = 2.0**-100
# The least mass that is stored: a mass > 0 becomes at least this, or 0 as a lower end.
_LEAST = {"F32": 2.0**-126, "F64": 2.0**-1000}


def mass_dtype(eps: Budgets) -> str:
    """Return the dtype of the masses of a file with these budgets: F32, or F64 for tiny ones."""
    budgets = [budget for groups in eps.values() for budget in groups]
    return "F64" if any(0 < budget < _SMALLEST_F32_BUDGET for budget in budgets) else "F32"


def storable_budget(eps: float, dtype: str) -> float:
    """Return the largest number of that dtype that is <= eps.

    An upper end within it is still within `eps` when it is rounded up for storage.
    """
    if dtype == "F64":
        return eps
    return float(lower_ends(np.array([eps]), dtype)[0])


def upper_ends(masses: NDArray[np.float64], dtype: str) -> NDArray[np.floating]:
    """Round masses up to F32 or F64; a mass > 0 becomes at least 2^-126 or 2^-1000."""
    least = _LEAST[dtype]
    bits = _bits(masses)
    wide = np.where(bits < _bits_of(least), least, masses)
    wide[bits <= 0] = 0.0
    if dtype == "F64":
        return wide
    rounded = wide.astype(np.float32)
    short = rounded.astype(np.float64) < wide
    return (rounded.view(np.int32) + short).astype(np.int32).view(np.float32)


def lower_ends(masses: NDArray[np.float64], dtype: str) -> NDArray[np.floating]:
    """Round masses down to F32 or F64; a mass below 2^-126 or 2^-1000 becomes 0."""
    wide = np.where(_bits(masses) < _bits_of(_LEAST[dtype]), 0.0, masses)
    if dtype == "F64":
        return wide
    rounded = wide.astype(np.float32)
    beyond = rounded.astype(np.float64) > wide
    return (rounded.view(np.int32) - beyond).astype(np.int32).view(np.float32)


def storable_weights(
    weights: NDArray[np.float64], heaviest: float | None = None
) -> NDArray[np.float64]:
    """Return weights as F32 numbers, times a power of two that brings `heaviest` to [1/2, 1).

    Exact for weights that are F32 numbers from 2^-125 of the heaviest on; others are rounded, and
    below that they are 0. None stands for the largest; the rows of all layers that share a set
    need one `heaviest` for all of them, since only ratios count.
    """
    _, exponent = np.frexp(weights.max(initial=0.0) if heaviest is None else heaviest)
    return stored_weights(np.ldexp(weights, -int(exponent))).astype(np.float64)


def stored_weights(weights: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return weights in F32; those below 2^-126 become 0."""
    return np.where(_bits(weights) < _bits_of(_LEAST["F32"]), 0.0, weights).astype(np.float32)


def _bits(masses: Iterable[float] | NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the bits, which rise with numbers >= 0 and are negative for negative ones."""
    return np.ascontiguousarray(masses, np.float64).view(np.int64)


def _bits_of(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", number))[0])
