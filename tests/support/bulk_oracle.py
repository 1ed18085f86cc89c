"""A rigorous checker for many rows at once: long double with an error bound, Arb where it is open.

Weights ``exp(score - top score)`` are computed in `np.longdouble` (64-bit mantissa on x86) and
summed there.  Every comparison has a margin `slack` that covers the rounding of the scores, of
exp and of the sums many times over; a comparison inside its margin is handed to the exact
oracle.  So the verdict is that of real arithmetic, and only the time is that of long double.

The relative error of a weight: the exponent carries two roundings of relative size u = 2**-64,
so |x| * 2u <= 2**-49.5 for |x| <= 11400 (below that the weight is under 1e-4900 and counted as an
absolute error); glibc's expl is within 2 ulp; a sequential sum of n <= 2**20 terms adds
n u <= 2**-44.  An additive mask adds 4u (|scale s| + |mask|).  `slack` starts at 2**-42.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cached_property

import numpy as np

from cases import Case
from oracle import ExactRow, outward, widen

LD = np.longdouble
U = float(np.finfo(LD).eps) / 2
# Far above everything that exp can flush or round as a subnormal, far below any eps.
TINY = np.finfo(LD).smallest_normal * LD(2.0) ** 60


class Truth:
    """The exact facts of every row of a case, computed once."""

    def __init__(self, case: Case) -> None:
        """Weights, order and sums of all rows; nothing is decided yet."""
        self.case = case
        self.visible = case.visible()
        self.count = self.visible.sum(axis=1)
        self.forced = case.forced(self.visible)
        stored = np.where(self.visible, widen(case.scores), 0.0)
        self.slack = np.full(case.rows, max(2.0**-42, 2.0**22 * U))
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            self.key, self.weight = self._weigh(stored)
        self._rows: dict[int, ExactRow] = {}
        self.exact_decisions = 0

    def _weigh(self, stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The sort key (larger is better, exact ties preserved) and the weight, hidden ones 0."""
        case, low = self.case, -np.inf
        if case.kind == "probs":
            key = np.where(self.visible, stored, low)
            top = np.max(key, axis=1, keepdims=True, initial=low)
            weight = key.astype(LD) / np.where(top > 0, top, 1.0).astype(LD)
            return key, np.where(self.visible, weight, LD(0))
        bias = case.bias()
        if bias is None:
            # The order is that of the stored scores, reversed by a negative scale.
            key = np.where(self.visible, stored * np.sign(case.scale), low)
            top = np.max(key, axis=1, keepdims=True, initial=low)
            x = key.astype(LD) - np.where(np.isfinite(top), top, 0.0).astype(LD)
            x *= LD(abs(case.scale))
        else:
            product = stored.astype(LD) * LD(case.scale)
            added = np.where(self.visible, bias, 0.0).astype(LD)
            size = np.max(np.abs(product) + np.abs(added), axis=1, initial=LD(0))
            self.slack = self.slack + (8 * U * size).astype(np.float64)
            key = np.where(self.visible, product + added, LD(low))
            top = np.max(key, axis=1, keepdims=True, initial=LD(low))
            x = key - np.where(np.isfinite(top), top, LD(0))
        return key, np.where(self.visible, np.exp(x), LD(0))

    def exact(self, row: int) -> ExactRow:
        """The exact oracle's view of a row, made once."""
        if row not in self._rows:
            self._rows = {row: self.case.exact(row)}
        self.exact_decisions += 1
        return self._rows[row]

    @cached_property
    def order(self) -> np.ndarray:
        """(rows, n) positions: forced ones, then the others, each best first; hidden ones last.

        For additive masks the keys are rounded to 64 bits, so neighbours closer than that may
        be swapped here; `checks` allows such swaps.
        """
        best = np.argsort(-self.key, axis=1, kind="stable")
        if not self.forced.any():
            return best
        group = np.where(self.forced, 0, np.where(self.visible, 1, 2))
        again = np.argsort(np.take_along_axis(group, best, axis=1), axis=1, kind="stable")
        return np.take_along_axis(best, again, axis=1)

    @cached_property
    def ladder(self) -> tuple[np.ndarray, np.ndarray]:
        """(rows, n + 1) kept and dropped weight after 0..n keys of `order`; no cancellation."""
        sorted_weight = np.take_along_axis(self.weight, self.order, axis=1)
        zero = np.zeros((self.case.rows, 1), dtype=LD)
        head = np.concatenate([zero, np.cumsum(sorted_weight, axis=1)], axis=1)
        tail = np.cumsum(sorted_weight[:, ::-1], axis=1)[:, ::-1]
        return head, np.concatenate([tail, zero], axis=1)

    def least(self) -> np.ndarray:
        """(rows,) keys that the constraints other than eps ask for."""
        least = np.maximum(self.forced.sum(axis=1), max(self.case.min_keep, 1))
        return np.minimum(least, self.count)

    def minimal_k(self, eps: np.ndarray | None = None) -> np.ndarray:
        """(rows,) exact minimum under the constraints (block size 1)."""
        budget = self.case.eps if eps is None else eps
        head, tail = self.ladder
        left = tail * (LD(1) - budget.astype(LD)[:, None])
        right = head * budget.astype(LD)[:, None]
        margin = self.slack.astype(LD)[:, None]
        steps = np.arange(self.case.n + 1)[None, :]
        allowed = (steps >= self.least()[:, None]) & (steps <= self.count[:, None])
        whole = steps == self.count[:, None]
        sure = allowed & (whole | (left * (1 + margin) + TINY <= right * (1 - margin)))
        maybe = allowed & (whole | (left * (1 - margin) <= right * (1 + margin) + TINY))
        answer = np.argmax(sure, axis=1)
        for row in np.flatnonzero(answer != np.argmax(maybe, axis=1)):
            forced = np.flatnonzero(self.forced[row]).tolist()
            exact = self.exact(int(row))
            answer[row] = exact.minimal_k(
                Fraction(float(budget[row])), forced=forced, min_keep=self.case.min_keep
            )
        return answer

    def loosest_k(self, factor: float, flush: float) -> np.ndarray:
        """(rows,) an upper bound on k_min(eps (1 - factor) - n flush), from certain sums only."""
        head, tail = self.ladder
        budget = self.case.eps.astype(LD) * LD(1 - factor) - self.count * LD(flush)
        budget = np.maximum(budget, LD(0))[:, None] * (1 - LD(2.0) ** -50)
        margin = self.slack.astype(LD)[:, None]
        steps = np.arange(self.case.n + 1)[None, :]
        fits = tail * (LD(1) - budget) * (1 + margin) + TINY <= head * budget * (1 - margin)
        allowed = (steps >= self.least()[:, None]) & (steps <= self.count[:, None])
        return np.argmax(allowed & (fits | (steps == self.count[:, None])), axis=1)

    def tail_mass(self, keep: np.ndarray) -> np.ndarray:
        """(rows,) true tail masses of `keep` (rows, n), relative error `slack` (+ TINY)."""
        head = np.sum(np.where(keep, self.weight, LD(0)), axis=1)
        tail = np.sum(np.where(keep, LD(0), self.weight), axis=1)
        total = head + tail
        return np.where(self.count > 0, tail / np.where(total > 0, total, LD(1)), LD(0))

    def violations(
        self, keep: np.ndarray, lower: np.ndarray, upper: np.ndarray
    ) -> list[tuple[int, str]]:
        """Rows whose interval [lower, upper] does not hold the true tail mass of `keep`."""
        tau, margin = self.tail_mass(keep), self.slack.astype(LD)
        dropped = (self.visible & ~keep).any(axis=1)
        kept = (self.visible & keep).any(axis=1)
        sure = (lower.astype(LD) <= tau * (1 - margin)) & (
            tau * (1 + margin) + TINY <= upper.astype(LD)
        )
        sure |= ~dropped & (lower == 0.0) & (upper >= 0.0)  # exactly 0
        sure |= dropped & ~kept & (lower <= 1.0) & (lower >= 0.0) & (upper == 1.0)  # exactly 1
        bad = []
        for row in np.flatnonzero(~sure):
            ball = self.exact(int(row)).tail_mass(np.flatnonzero(keep[row]).tolist())
            low, high = outward(ball)
            if not (float(lower[row]) <= low and float(upper[row]) >= high):
                told = f"[{float(lower[row])!r}, {float(upper[row])!r}]"
                bad.append((int(row), f"{told} does not hold the true tail mass {ball}"))
        return bad
