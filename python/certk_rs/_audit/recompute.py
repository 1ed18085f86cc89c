"""The audit's own arithmetic: tail masses and lower bounds recomputed from vectors in float64.

Nothing here is shared with the selector, and nothing of the package is imported.

Let u = 2^-53, d <= 2^20 the vector length, n the number of keys, s* = scale * q.k the real score,
s' = fl(scale * fl(q.k)) ours, R = |scale| |q| max|k| of a row, ln(odds) = ln(tail mass / kept
mass).

- |s' - s*| <= (gamma_d + u (1 + gamma_d)) R for any order of summation, with FMA or without: F16,
  BF16 and F32 widen exactly, and nothing over- or underflows.
- Kept and dropped keys have a shift each, c_S and c_T, the largest s' among them; the roundings of
  s' - c, of c_T - c_S and of two more sums of that size are 2 u R each. So exponents are within r =
  (d + 8) u (1 + 2^-20) R of the real ones, and ln(odds) within 2 r.
- NumPy's exp and log are taken to be within 16 units in the last place (its documentation promises
  nothing, its implementations claim 4). Exponents are <= 0 and the largest is 0, so what underflows
  is below n 2^-1022 of a sum that is >= 1.
- Sums of non-negative terms are made 4096 terms at a time and then over the parts, each in any
  order: gamma_{4096 + n/4096}.

Together: ln(odds) within 2 r + 2 delta + 2^-40, delta = (4096 + n/4096 + 256) u. Where r is above
100 (or no number) nothing is known: scores may overflow, and -inf would look like a key not seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_U = 2.0**-53
_TINY = 2.0**-1000  # below this no mass is told apart from it (upper end) or from 0 (lower end)
_CHUNK = 4096
_MOST_RADIUS = 100.0


@dataclass(frozen=True)
class Rows:
    """Some rows (b) of one head over its n keys, recomputed.

    Proven ends of the tail mass and of the kept mass, each with full relative precision (b,), the
    softmax (b, n) of the kept and then the dropped keys, and how far its logarithm may be off (b,).
    """

    tail_low: Floats
    tail_high: Floats
    kept_low: Floats
    kept_high: Floats
    softmax: Floats
    spread: Floats

    # Near 1 a float64 tells masses apart by no more than 2^-53, but 1 - bound is exact from 1/2 on.

    def lose_at_most(self, bound: Floats) -> NDArray[np.bool_]:
        """Which tail masses are proven to be <= bound (b,)."""
        return np.where(bound < 0.5, self.tail_high <= bound, self.kept_low >= 1 - bound)

    def lose_at_least(self, bound: Floats) -> NDArray[np.bool_]:
        """Which tail masses are proven to be >= bound (b,)."""
        return np.where(bound < 0.5, self.tail_low >= bound, self.kept_high <= 1 - bound)

    def refute(self, lower: Floats, upper: Floats) -> NDArray[np.bool_]:
        """Which tail masses are proven not to be in [lower, upper] (b,)."""
        above = np.where(upper < 0.5, self.tail_low > upper, self.kept_high < 1 - upper)
        below = np.where(lower < 0.5, self.tail_high < lower, self.kept_low > 1 - lower)
        return above | below


class Keys:
    """Vectors (j, d) of kept or of dropped keys, and their positions (j,) in the cache."""

    def __init__(self, vectors: Floats, positions: NDArray[np.int64]) -> None:
        self.vectors = vectors
        self.positions = positions
        self.longest = float(_norms(vectors).max(initial=0.0))


def recompute(q: Floats, kept: Keys, dropped: Keys, scale: float, seen: NDArray[np.int64]) -> Rows:
    """Tail masses of the rows scale * q.k, q (b, d), when only the `kept` keys are left.

    Row j sees the keys at positions below seen[j]; a row that sees none loses nothing.
    """
    n, d = len(kept.positions) + len(dropped.positions), q.shape[1]
    # Vectors and scale may be anything: a row whose scores overflow is NaN, which confirms nothing.
    with np.errstate(all="ignore"):
        longest = max(kept.longest, dropped.longest)
        radius = (d + 8) * _U * (1 + 2.0**-20) * abs(scale) * _norms(q) * longest
        radius = np.where(radius <= _MOST_RADIUS, radius, np.nan)
        spread = 2 * radius + 2 * (_CHUNK + n / _CHUNK + 256) * _U + 2.0**-40
        shift_s, head, kept_terms = _exp_sum(q, kept, scale, seen)
        shift_t, tail, dropped_terms = _exp_sum(q, dropped, scale, seen)
        odds = (shift_t - shift_s) + np.log(tail / head)
        # A side without keys has no rounding: the mass is 0 without a tail, 1 without a head.
        odds = np.where(tail == 0, -np.inf, np.where(head == 0, np.inf, odds))
        kept_terms *= (_mass(-odds) / np.where(head == 0, 1, head))[:, None]
        dropped_terms *= (_mass(odds) / np.where(tail == 0, 1, tail))[:, None]
        tail_low, tail_high = _ends(odds - spread, odds + spread)
        kept_low, kept_high = _ends(-odds - spread, -odds + spread)
    softmax = np.concatenate([kept_terms, dropped_terms], axis=1)
    return Rows(tail_low, tail_high, kept_low, kept_high, softmax, spread)


def _ends(low: Floats, high: Floats) -> tuple[Floats, Floats]:
    """Masses from the ends of ln(odds), rounded outward; exact where one side holds nothing."""
    lower = _mass(low) * (1 - 2.0**-48)
    upper = np.minimum(np.maximum(_mass(high) * (1 + 2.0**-48), _TINY), 1.0)
    lower = np.where(np.isposinf(low), 1.0, np.where(lower < _TINY, 0.0, lower))
    return lower, np.where(np.isneginf(high), 0.0, upper)


def _exp_sum(
    q: Floats, keys: Keys, scale: float, seen: NDArray[np.int64]
) -> tuple[Floats, Floats, Floats]:
    """Shift (b,), sum of exp(score - shift) (b,), and the terms (b, j); 0 where nothing is seen."""
    scores = np.ascontiguousarray((keys.vectors @ q.T).T)
    scores *= scale
    scores[keys.positions >= seen[:, None]] = -np.inf
    shift = scores.max(axis=1, initial=-np.inf)
    scores -= np.where(np.isneginf(shift), 0.0, shift)[:, None]
    terms = np.exp(scores, out=scores)
    starts = range(0, terms.shape[1], _CHUNK)
    parts = [terms[:, start : start + _CHUNK].sum(axis=1) for start in starts]
    return shift, np.sum(parts, axis=0) if parts else np.zeros(len(q)), terms


def _mass(odds: Floats) -> Floats:
    """e^x / (1 + e^x), without overflow."""
    small: Floats = np.exp(-np.abs(odds))
    mass: Floats = np.where(odds < 0, small, 1.0)
    mass /= 1.0 + small
    return mass


def _norms(vectors: Floats) -> Floats:
    """Euclidean norms of the rows, rounded up (d <= 2^20 squares, none of which underflows)."""
    norms: Floats = np.sqrt(np.sum(np.square(vectors), axis=1)) * (1 + 2.0**-30)
    return norms


class Proof:
    """Re-proves a lower bound from the recorded weights y of the rows.

    A set S whose tail masses are within the limits b_j loses, of the mixture c = sum_j y_j P_j, at
    most sum_j y_j b_j; a set of L - 1 keys that has the forced ones loses at least what its best
    choice leaves of c. If that is more, no set of L - 1 keys will do. P_j enters with its lower
    ends. Sums over m rows are off by less than 2 m u and a few u more, for which each side has a
    margin of 2^-30 + 4 m u; products that underflow by at most 2^-1070 for each row and key.
    """

    # `forced` says which keys are, in the order of the softmax of the rows.
    def __init__(self, forced: NDArray[np.bool_]) -> None:
        self._forced = forced
        self._mixture = np.zeros(len(forced))
        self._budget = 0.0
        self._at_least = int(forced.sum())
        self._rows = 0

    def add(self, rows: Rows, weights: Floats, limits: Floats, seen: NDArray[np.int64]) -> None:
        """Take in some rows, each with its weight, its limit b_j, and how many keys it sees."""
        self._mixture += (weights * np.exp(-rows.spread)) @ rows.softmax
        self._budget += float(np.sum(weights * limits))
        self._rows += len(weights)
        # Without weights: a row needs one of the keys it sees, and all if it may lose nothing.
        needs = np.where(limits == 0, seen, np.minimum(seen, 1) * (limits < 1))
        self._at_least = max(self._at_least, int(needs.max(initial=0)))

    def holds_for(self, bound: int) -> bool:
        """Whether no set of fewer than `bound` keys does it."""
        if bound <= self._at_least:
            return True
        left = len(self._forced) - (bound - 1)
        lost = math.fsum(np.sort(self._mixture[~self._forced])[:left])
        margin = 2.0**-30 + 4 * self._rows * _U
        vanished = self._rows * left * 2.0**-1070
        return lost * (1 - margin) > self._budget * (1 + margin) + vanished
