"""The exact bounds of Clopper and Pearson on a probability, from a count of what happened.

C. J. Clopper, E. S. Pearson, "The use of confidence or fiducial limits illustrated in the case of
the binomial", Biometrika 26 (1934). They hold for independent trials of equal probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..errors import CertkError

# Relative errors of lgamma, log and sums of some thousand terms stay far below this.
_MARGIN = 1e-9


def clopper_pearson(hits: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Ends of an interval that holds the probability with at least this confidence.

    Each end leaves half of what is missing to 1. Rounded outward by a relative 1e-9.

    Args:
        hits: How often it happened, 0 <= hits <= trials.
        trials: Of how many trials, >= 0; none: the interval is [0, 1].
        confidence: In (0, 1).

    Raises:
        CertkError: Arguments out of range.
    """
    if not 0 <= hits <= trials:
        raise CertkError(f"hits is {hits}: give a count from 0 to trials, which is {trials}")
    if not 0 < confidence < 1:
        raise CertkError(f"confidence is {confidence!r}: give a number in (0, 1)")
    side = (1 - confidence) / 2
    low, high = 0.0, 1.0
    if hits > 0:
        # P(X >= hits) rises with p; below the end it is less than `side`.
        low = _root(lambda p: 1 - _at_most(hits - 1, trials, p) < side) * (1 - _MARGIN)
    if hits < trials:
        high = min(1.0, _root(lambda p: _at_most(hits, trials, p) > side) * (1 + _MARGIN))
    return low, high


def _root(before: Callable[[float], bool]) -> float:
    """Where a monotone condition on (0, 1) ceases to hold."""
    low, high = 0.0, 1.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if before(middle) else (low, middle)
    return (low + high) / 2


def _at_most(hits: int, trials: int, p: float) -> float:
    """P(X <= hits) of a binomial; the shorter tail is summed, from its largest term outward."""
    if p <= 0:
        return 1.0
    if p >= 1:
        return 1.0 if hits >= trials else 0.0
    # As logarithms, since 1 - p has lost what a small p is.
    yes, no = math.log(p), math.log1p(-p)
    if hits + 1 > (trials + 1) * p:
        return 1 - _tail(trials - hits - 1, trials, no, yes)
    return _tail(hits, trials, yes, no)


def _tail(hits: int, trials: int, yes: float, no: float) -> float:
    """P(X <= hits) where terms fall from `hits` downward; logarithms of p and 1 - p."""
    if hits < 0:
        return 0.0
    log = (
        math.lgamma(trials + 1)
        - math.lgamma(hits + 1)
        - math.lgamma(trials - hits + 1)
        + hits * yes
        + (trials - hits) * no
    )
    total, term, odds = 0.0, 1.0, math.exp(no - yes)
    for i in range(hits, -1, -1):
        total += term
        term *= i / (trials - i + 1) * odds
        if term < total * 1e-17:
            break
    return min(1.0, math.exp(log) * total)
