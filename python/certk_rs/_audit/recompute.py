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
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_U = 2.0**-53
_TINY = 2.0**-1000  # below this no mass is told apart from it (upper end) or from 0 (lower end)
_CHUNK = 4096
_MOST_RADIUS = 100.0
_TILE = 16  # keys
_TILE_PRODUCTS = 1 << 17  # numbers that are multiplied in one product of matrices


@dataclass(frozen=True)
class Side:
    """The softmax of some rows (b) on the kept or on the dropped keys.

    Terms (b, j) times their factors (b,) are the softmax of these keys.
    """

    terms: Floats
    factors: Floats


@dataclass(frozen=True)
class Rows:
    """Some rows (b) of one head over its n keys, recomputed.

    Proven ends of the tail mass and of the kept mass, each with full relative precision (b,), the
    softmax of the kept and of the dropped keys, and how far its logarithm may be off (b,).
    """

    tail_low: Floats
    tail_high: Floats
    kept_low: Floats
    kept_high: Floats
    sides: tuple[Side, ...]
    spread: Floats

    def mixture(self, weights: Floats) -> Floats:
        """Sum the softmax of the kept and then the dropped keys over rows, weighted (n,).

        Of each row the lower end is taken: its softmax is not below what enters here.
        """
        rows = np.flatnonzero(weights)
        lower = weights[rows] * np.exp(-self.spread[rows])
        return np.concatenate(
            [(lower * side.factors[rows]) @ side.terms[rows] for side in self.sides]
        )

    # Near 1 a float64 tells masses apart by no more than 2^-53, but 1 - bound is exact from 1/2 on.

    def lose_at_most(self, bound: Floats) -> NDArray[np.bool_]:
        """Return which tail masses are proven to be <= bound (b,)."""
        return np.where(bound < 0.5, self.tail_high <= bound, self.kept_low >= 1 - bound)

    def lose_at_least(self, bound: Floats) -> NDArray[np.bool_]:
        """Return which tail masses are proven to be >= bound (b,)."""
        return np.where(bound < 0.5, self.tail_low >= bound, self.kept_high <= 1 - bound)

    def refute(self, lower: Floats, upper: Floats) -> NDArray[np.bool_]:
        """Return which tail masses are proven not to be in [lower, upper] (b,)."""
        above = np.where(upper < 0.5, self.tail_low > upper, self.kept_high < 1 - upper)
        below = np.where(lower < 0.5, self.tail_high < lower, self.kept_low > 1 - lower)
        return above | below


class Keys:
    """Vectors (j, d) of kept or of dropped keys, and their positions (j,) in the cache."""

    def __init__(self, vectors: Floats, positions: NDArray[np.int64]) -> None:
        self.vectors = vectors
        self.positions = positions
        self.longest = float(_norms(vectors).max(initial=0.0))
        self.last = int(positions.max(initial=-1))


def recompute(q: Floats, kept: Keys, dropped: Keys, scale: float, seen: NDArray[np.int64]) -> Rows:
    """Return tail masses of the rows scale * q.k, q (b, d), when only the `kept` keys are left.

    Row j sees the keys at positions below seen[j]; a row that sees none loses nothing.
    """
    n, d = len(kept.positions) + len(dropped.positions), q.shape[1]
    # Vectors and scale may be anything: a row whose scores overflow is NaN, which confirms nothing.
    with np.errstate(all="ignore"):
        longest = float(np.maximum(kept.longest, dropped.longest))
        radius = (d + 8) * _U * (1 + 2.0**-20) * abs(scale) * _norms(q) * longest
        radius = np.where(radius <= _MOST_RADIUS, radius, np.nan)
        spread = 2 * radius + 2 * (_CHUNK + n / _CHUNK + 256) * _U + 2.0**-40
        shift_s, head, kept_terms = _exp_sum(q, kept, scale, seen)
        shift_t, tail, dropped_terms = _exp_sum(q, dropped, scale, seen)
        odds = (shift_t - shift_s) + np.log(tail / head)
        # A side without keys has no rounding: the mass is 0 without a tail, 1 without a head.
        odds = np.where(tail == 0, -np.inf, np.where(head == 0, np.inf, odds))
        sides = (
            Side(kept_terms, _mass(-odds) / np.where(head == 0, 1, head)),
            Side(dropped_terms, _mass(odds) / np.where(tail == 0, 1, tail)),
        )
        tail_low, tail_high = _ends(odds - spread, odds + spread)
        kept_low, kept_high = _ends(-odds - spread, -odds + spread)
    return Rows(tail_low, tail_high, kept_low, kept_high, sides, spread)


def _ends(low: Floats, high: Floats) -> tuple[Floats, Floats]:
    """Return masses from the ends of ln(odds), rounded outward; exact if one side is empty."""
    lower = _mass(low) * (1 - 2.0**-48)
    upper = np.minimum(np.maximum(_mass(high) * (1 + 2.0**-48), _TINY), 1.0)
    lower = np.where(np.isposinf(low), 1.0, np.where(lower < _TINY, 0.0, lower))
    return lower, np.where(np.isneginf(high), 0.0, upper)


def _exp_sum(
    q: Floats, keys: Keys, scale: float, seen: NDArray[np.int64]
) -> tuple[Floats, Floats, Floats]:
    """Return shift (b,), sum of exp(score - shift) (b,) and terms (b, j); 0 if none is seen."""
    scores = _products(q, keys.vectors)
    scores *= scale
    if keys.last >= seen.min():
        scores[keys.positions >= seen[:, None]] = -np.inf
    shift = scores.max(axis=1, initial=-np.inf)
    scores -= np.where(np.isneginf(shift), 0.0, shift)[:, None]
    terms = np.exp(scores, out=scores)
    starts = range(0, terms.shape[1], _CHUNK)
    parts = [terms[:, start : start + _CHUNK].sum(axis=1) for start in starts]
    return shift, np.sum(parts, axis=0) if parts else np.zeros(len(q)), terms


def _products(q: Floats, vectors: Floats) -> Floats:
    """Return all q.k (b, j), by products of matrices too small for the threads of a BLAS.

    Ours are enough, and those of a BLAS wait for each other where there are more than processors:
    on two busy ones that took three times as long.
    """
    b, d = q.shape
    count = len(vectors)
    scores = np.empty((b, count))
    whole = count - count % _TILE
    tiles = vectors[:whole].reshape(-1, _TILE, d).swapaxes(1, 2)
    step = max(1, _TILE_PRODUCTS // (_TILE * d))
    for start in range(0, b, step):
        some = q[start : start + step]
        out = scores[start : start + step]
        if whole:
            place = out[:, :whole].reshape(len(some), -1, _TILE)
            np.matmul(some[None], tiles, out=place.swapaxes(0, 1))
        np.matmul(some, vectors[whole:].T, out=out[:, whole:])
    return scores


def _mass(odds: Floats) -> Floats:
    """Return e^x / (1 + e^x), without overflow."""
    small: Floats = np.exp(-np.abs(odds))
    mass: Floats = np.where(odds < 0, small, 1.0)
    mass /= 1.0 + small
    return mass


def _norms(vectors: Floats) -> Floats:
    """Return norms of the rows, rounded up (d <= 2^20 squares, none of which underflows)."""
    norms: Floats = np.sqrt(np.sum(np.square(vectors), axis=1)) * (1 + 2.0**-30)
    return norms


def ball_radius(pieces: Callable[[], Iterable[Floats]], count: int) -> float:
    """Return the radius of a ball around `count` vectors, which come in pieces (j, d), twice.

    Any centre will do, and every distance from it is rounded up: the differences and the norm are
    off by less than (d/2 + 3) u, d <= 2^20, for which 2^-30 is taken. The centre is the mean, moved
    into the box around the vectors: where all are equal the radius is 0.
    """
    total, least, most = 0.0, np.inf, -np.inf
    for piece in pieces():
        total = total + piece.sum(axis=0)
        least = np.minimum(least, piece.min(axis=0))
        most = np.maximum(most, piece.max(axis=0))
    centre = np.clip(total / max(count, 1), least, most)
    radii = [float(_norms(piece - centre).max()) for piece in pieces()]
    return float(np.max(radii, initial=0.0))  # NaN if one of them is


class Proof:
    """Re-proves a lower bound from the recorded weights y of the rows.

    A set S whose tail masses are within the limits b_j loses, of the mixture c = sum_j y_j P_j, at
    most sum_j y_j b_j; a set of L - 1 units (keys, or blocks of them) that has the forced ones
    loses at least what its best choice leaves of c. If that is more, no set of L - 1 units will
    do. P_j enters with its lower ends. Sums over m rows and over the B keys of a block are off by
    less than 2 (m + B) u and a few u more, for which each side has a margin of 2^-30 + 4 (m + B) u;
    products that underflow by at most 2^-1070 for each row and key.

    Args:
        positions: Of the keys, in the order of the softmax of the rows.
        forced: Which keys are in every set.
        block: How many positions make a unit.
    """

    def __init__(
        self, positions: NDArray[np.int64], forced: NDArray[np.bool_], block: int = 1
    ) -> None:
        self._block = block
        self._unit_of = positions // block
        count = int(self._unit_of.max(initial=-1)) + 1
        self._forced = np.zeros(count, bool)
        self._forced[self._unit_of[forced]] = True
        self._mixture = np.zeros(count)
        self._budget = 0.0
        self._at_least = int(self._forced.sum())
        self._rows = self._keys = 0

    def add(self, rows: Rows, weights: Floats, limits: Floats, seen: NDArray[np.int64]) -> None:
        """Take in some rows, each with its weight, its limit b_j, and how many keys it sees.

        A row that nothing is promised for has the weight 0 and the limit 1.
        """
        if weights.any():
            mixture = rows.mixture(weights)
            self._mixture += np.bincount(self._unit_of, mixture, len(self._mixture))
            self._budget += float(np.sum(weights * limits))
        self._rows += len(weights)
        # Without weights: a row needs one of the keys it sees, and all if it may lose nothing.
        all_seen = -(-seen // self._block)
        needs = np.where(limits == 0, all_seen, np.minimum(seen, 1) * (limits < 1))
        self._at_least = max(self._at_least, int(needs.max(initial=0)))

    def join(self, other: Proof) -> None:
        """Take in what another proof has of other rows over the same keys."""
        self._mixture += other._mixture
        self._budget += other._budget
        self._rows += other._rows
        self._at_least = max(self._at_least, other._at_least)

    def holds_for(self, bound: int) -> bool:
        """Return True if no set of fewer than `bound` units is within the limits."""
        if bound <= self._at_least:
            return True
        left = len(self._forced) - (bound - 1)
        if left < 0:
            return False
        lost = math.fsum(np.sort(self._mixture[~self._forced])[:left])
        margin = 2.0**-30 + 4 * (self._rows + self._block) * _U
        vanished = self._rows * left * self._block * 2.0**-1070
        return lost * (1 - margin) > self._budget * (1 + margin) + vanished
