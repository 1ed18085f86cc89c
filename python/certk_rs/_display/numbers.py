"""Numbers as summaries show them: a bound that is shown is still a bound."""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from .. import _native

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def count(flags: NDArray[np.bool_]) -> int:
    """Count what is true."""
    return int(flags.sum())


def tally(values: NDArray[np.uint8], kinds: type[IntEnum]) -> str:
    """Count each kind, of those that there are: "3 certified, 1 empty"."""
    counts = ((count(values == kind), kind.name.lower().replace("_", " ")) for kind in kinds)
    return ", ".join(f"{number} {name}" for number, name in counts if number)


def percent(part: int, whole: int) -> str:
    """Return a share in per cent, rounded down, so that 100 means all."""
    return f"{part * 10000 // whole / 100:g} %" if part < whole else "100 %"


def rounded(value: float, rounding: str) -> str:
    """Return six digits, rounded to the given side: a bound that is shown is still a bound."""
    with _native.DefaultFloats():
        return f"{Context(prec=6, rounding=rounding).create_decimal(float(value)).normalize():g}"


def percent_of_bound(share: float, rounding: str) -> str:
    """Return a bound on a share in per cent, six digits rounded to the given side."""
    with _native.DefaultFloats():
        context = Context(prec=6, rounding=rounding)
        # Exact but for the one rounding.
        return f"{context.multiply(Decimal(float(share)), Decimal(100)).normalize():g} %"


def span(values: NDArray[Any]) -> str:
    """Return the least and the largest, six digits each."""
    if values.size == 0:
        return "none"
    with _native.DefaultFloats():
        low, high = f"{values.min():g}", f"{values.max():g}"
    return low if low == high else f"{low}..{high}"


def worst(upper: NDArray[np.float64]) -> str:
    """Return the largest upper end, rounded up."""
    with _native.DefaultFloats():
        return rounded(upper.max(initial=0.0), ROUND_CEILING)


def masses(lower: NDArray[np.float64], upper: NDArray[np.float64]) -> str:
    """Return the range of the tail masses of some rows, and their mean."""
    if upper.size == 0:
        return "none"
    with _native.DefaultFloats():
        least, mean = rounded(lower.min(), ROUND_FLOOR), rounded(upper.mean(), ROUND_CEILING)
    return f"{least} to {worst(upper)}, at most {mean} in the mean"


def rows_of(n: int) -> str:
    """Name a number of rows."""
    return "1 row" if n == 1 else f"{n} rows"
