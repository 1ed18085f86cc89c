"""Queries that are set aside to try kept sets on, and what the outcome says of other queries.

They are drawn at random, once for all heads of a layer, so that the share of them that loses more
than its budget speaks for queries drawn like those of the file, and not for later ones of another
kind. The sets that are tried are not written: those of an output are made afterwards for all
queries of the file, as one refits after cross-validation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ..errors import CertkError

CONFIDENCE = 0.95
_SEED = 0x686F6C646F7574
# Relative errors of log and sums of some thousand terms stay far below the first, those of lgamma
# below the second for each trial.
_MARGIN = 1e-9, 2.0**-46


def held_out_queries(
    m: int, share: float, first_seeing: int = 0, causal: bool = False
) -> NDArray[np.int64]:
    """Return the positions, ascending, of the queries set aside: at least one, if another stays.

    Args:
        m: The number of queries.
        share: Of those that see a key, in [0, 1); with 0 there are none.
        first_seeing: The first query that sees a key.
        causal: Whether later queries see more keys. Then the last one stays: which positions are
            visible at all, and so which are the last ones, goes by what it sees.
    """
    seeing = m - first_seeing
    count = min(max(1, round(share * seeing)), seeing - 1) if share else 0
    eligible = seeing - 1 if causal else seeing
    if count <= 0:
        return np.empty(0, np.int64)
    # The same for every file and layer of this length: what is random is the query at a place.
    draw = np.random.Generator(np.random.PCG64([_SEED, m, first_seeing]))
    return first_seeing + np.sort(draw.permutation(eligible)[:count]).astype(np.int64)


@dataclass(frozen=True)
class HeldOut:
    """The trial of a kept set on queries that it was not chosen for.

    A query counts as a violation if it may lose more than the budget in any query head that shares
    the set. There are at least `violations` and at most `most` of them; None: not known.
    """

    queries: int
    violations: int | None
    most: int | None = None

    def __post_init__(self) -> None:
        if self.most is None:
            object.__setattr__(self, "most", self.violations)

    @property
    def rate(self) -> float:
        """Share of the queries set aside that are violations; 0 where there are none."""
        return (self.violations or 0) / self.queries if self.queries else 0.0

    @property
    def low(self) -> float:
        """Lower end of the 95 % interval of Clopper and Pearson for their probability."""
        return _interval(self.violations or 0, self.queries)[0]

    @property
    def high(self) -> float:
        """Upper end of the same interval."""
        return _interval(self.queries if self.most is None else self.most, self.queries)[1]


@cache
def _interval(violations: int, queries: int) -> tuple[float, float]:
    return clopper_pearson(violations, queries, CONFIDENCE)


def clopper_pearson(hits: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return an interval that holds a probability with at least this confidence.

    C. J. Clopper, E. S. Pearson, "The use of confidence or fiducial limits illustrated in the case
    of the binomial", Biometrika 26 (1934): for independent trials of equal probability. Each end
    leaves half of what is missing to 1, and is rounded outward by a relative 1e-9, or by
    more for millions of trials.

    Args:
        hits: Trials that had the outcome, 0 <= hits <= trials.
        trials: Number of trials, >= 0; none: the interval is [0, 1].
        confidence: In (0, 1).

    Raises:
        CertkError: Arguments out of range.
    """
    if not 0 <= hits <= trials:
        raise CertkError(f"hits is {hits}: give a count from 0 to trials, which is {trials}")
    if not 0 < confidence < 1:
        raise CertkError(f"confidence is {confidence!r}: give a number in (0, 1)")
    side = (1 - confidence) / 2
    margin = _MARGIN[0] + trials * _MARGIN[1]
    low, high = 0.0, 1.0
    if hits > 0:
        # P(X >= hits) rises with p; below the end it is less than `side`.
        low = _root(lambda p: 1 - _at_most(hits - 1, trials, p) < side) * (1 - margin)
    if hits < trials:
        high = min(1.0, _root(lambda p: _at_most(hits, trials, p) > side) * (1 + margin))
    return low, high


def _root(before: Callable[[float], bool]) -> float:
    """Return where a monotone condition on (0, 1) ceases to hold."""
    low, high = 0.0, 1.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if before(middle) else (low, middle)
    return (low + high) / 2


def _at_most(hits: int, trials: int, p: float) -> float:
    """Return P(X <= hits) of a binomial; the shorter tail is summed, its largest term first."""
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
    """Return P(X <= hits) where terms fall from `hits` downward; logarithms of p and 1 - p."""
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
