"""Tail masses of rows of `scale * q.k`, in exact arithmetic, from the stored numbers alone.

It shares no code with the library: products are integers times one power of two, and weights are
Arb balls. Most rows are first judged in float64 from exact differences of scores, and in Arb if
that leaves a doubt.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from flint import arb, ctx, fmpq

Array = np.ndarray


def integers(values: Array) -> tuple[Array, int]:
    """Python integers and one exponent: `values == integers * 2**exponent`, exactly."""
    fraction, exponent = np.frexp(values.astype(np.float64))
    mantissa = np.ldexp(fraction, 53).astype(np.int64)
    used = mantissa != 0
    if not used.any():
        return np.zeros(values.shape, object), 0
    exponent = exponent.astype(np.int64) - 53
    least = int(exponent[used].min())
    shift = np.where(used, exponent - least, 0)
    return mantissa.astype(object) * 2 ** shift.astype(object), least


def exact_scores(queries: Array, keys: Array, scale: float) -> tuple[Array, Fraction]:
    """Integers (m, n) and a unit: the real scores are the integers times the unit."""
    (q, a), (k, b) = integers(queries), integers(keys)
    return q @ k.T, Fraction(scale) * Fraction(2) ** (a + b)


def best(scores: Array, unit: Fraction) -> list[int]:
    """Positions in decreasing order of the real scores, equal ones by position."""
    sign = (unit > 0) - (unit < 0)
    gaps = (-sign * scores).tolist()
    return sorted(range(len(gaps)), key=lambda i: (gaps[i], i))


def below_top(scores: Array, unit: Fraction) -> Array:
    """Integers (n,) of which each times the unit is how far a score is below the row's largest."""
    return np.asarray(scores - (scores.max() if unit >= 0 else scores.min()), object)


def in_nats(gaps: Array, unit: Fraction) -> Array:
    """Gaps as float64, relatively off by less than 2**-50; those below -1000 are -1000."""
    large = gaps * unit.numerator
    power = unit.denominator.bit_length() - 1
    assert unit.denominator == 1 << power
    if max(abs(int(large.min())), abs(int(large.max()))).bit_length() > 1000:
        return np.array([float(max(unit * gap, Fraction(-1000))) for gap in gaps.tolist()])
    return np.maximum(np.ldexp(large.astype(np.float64), -power), -1000.0)


def inside(scores: Array, unit: Fraction, kept: Array, lower: float, upper: float) -> bool:
    """Return True if the real tail mass lies in `[lower, upper]`."""
    if kept.all():
        return lower == 0.0 <= upper
    if not kept.any():
        return lower <= 1.0 == upper
    gaps = below_top(scores, unit)
    weights = np.exp(in_nats(gaps, unit))
    head, tail = math.fsum(weights[kept]), math.fsum(weights[~kept])
    about = tail / (head + tail)
    if about > 1e-290 and lower * (1 + 1e-11) <= about <= upper * (1 - 1e-11):
        return True
    return surely_inside(gaps.tolist(), unit, kept, lower, upper)


def surely_inside(gaps: list[int], unit: Fraction, kept: Array, lower: float, upper: float) -> bool:
    """The same in Arb; what 4096 bits cannot tell from equal is equal."""
    old = ctx.prec
    try:
        for bits in (128, 512, 4096):
            ctx.prec = bits
            step = arb(fmpq(unit.numerator, unit.denominator))
            weights = [(step * gap).exp() for gap in gaps]
            tail = sum((w for w, keep in zip(weights, kept, strict=True) if not keep), arb(0))
            mass = tail / sum(weights, arb(0))
            if mass < arb(lower) or mass > arb(upper):
                return False
            if mass >= arb(lower) and mass <= arb(upper):
                return True
        return True
    finally:
        ctx.prec = old
