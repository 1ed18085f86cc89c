"""The exact oracle: what real arithmetic says about one row of attention scores.

It shares no code with the library.  Every stored float is an exact dyadic number, so

* logits: the score of a key is the exact dyadic number ``scale * s + mask``, held as a Python
  integer times one power of two.  The order, and every tie, is decided in integers.  Weights
  ``exp(score)`` are Arb balls (python-flint), and the precision is raised until a comparison
  is certain;
* probs: weights are integers times one power of two, so tail masses are exact fractions.

A comparison ``tau(S) <= eps`` of sums of exponentials can only be an equality when, for every
distinct score, the kept and the dropped copies balance by themselves (Lindemann-Weierstrass:
exponentials of distinct algebraic numbers are linearly independent over the algebraic numbers).
Such copies are taken out in integers before the precision is raised, so that it ends.

Slow by design and for one row at a time; `bulk_oracle.py` treats many rows and calls this module
wherever long double cannot decide.  Axes: n positions of a row; scores in natural-log units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from functools import cached_property, cmp_to_key
from itertools import accumulate

import numpy as np
from flint import arb, ctx, fmpq, fmpz

START_PREC = 128
MAX_PREC = 1 << 16

Exact = int | float | Fraction


class Precision:
    """Context manager: work at `bits` bits of Arb precision, then restore the old precision."""

    def __init__(self, bits: int) -> None:
        """Remember the precision to use."""
        self.bits = bits

    def __enter__(self) -> None:
        """Set the precision."""
        self.old, ctx.prec = ctx.prec, self.bits

    def __exit__(self, *_: object) -> None:
        """Restore the precision."""
        ctx.prec = self.old


def dyadic(values: np.ndarray) -> tuple[list[int], list[int]]:
    """Mantissas and exponents with ``value == m * 2**e`` exactly, for finite float64 values."""
    fraction, exponent = np.frexp(values)
    mantissa = np.ldexp(fraction, 53).astype(np.int64)
    return mantissa.tolist(), (exponent.astype(np.int64) - 53).tolist()


def widen(stored: np.ndarray) -> np.ndarray:
    """float64 copy of float16, bfloat16, float32 or float64 values; exact for each of them."""
    return np.asarray(stored).astype(np.float64)


def additive_masked(mask: np.ndarray) -> np.ndarray:
    """Entries of an additive mask that hide their key: at most half the dtype's lowest value."""
    if mask.dtype.name == "bfloat16":
        lowest = -float.fromhex("0x1.fep127")
    else:
        lowest = float(np.finfo(mask.dtype).min)
    return widen(mask) <= lowest / 2


class ExactRow:
    """One row in exact arithmetic.

    `scores` (n,) stored floats; `kind` "logits", "logprobs" or "probs"; `mask` (n,) bool (True =
    may be kept) or float (added after the scale); `prefix` positions at and past it are hidden.
    Positions are always those of the stored row.
    """

    def __init__(
        self,
        scores: np.ndarray,
        *,
        kind: str = "logits",
        scale: float = 1.0,
        mask: np.ndarray | None = None,
        prefix: int | None = None,
    ) -> None:
        """Find the visible positions and the exact value of each."""
        stored = widen(scores)
        hidden = np.isneginf(stored)
        if kind == "probs":
            hidden |= stored == 0.0
        if prefix is not None:
            hidden[max(prefix, 0) :] = True
        bias: np.ndarray | None = None
        if mask is not None and mask.dtype == np.bool_:
            hidden |= ~mask
        elif mask is not None:
            hidden |= additive_masked(mask)
            bias = widen(mask)
        self.n = stored.shape[0]
        self.kind = kind
        self.visible = np.flatnonzero(~hidden)
        self._units(stored[self.visible], scale, None if bias is None else bias[self.visible])
        self._masses: dict[int, dict[int, arb]] = {}

    def _units(self, stored: np.ndarray, scale: float, bias: np.ndarray | None) -> None:
        """Write every visible value as an integer times 2**unit, and index it by position."""
        mantissa, exponent = dyadic(stored)
        if self.kind != "probs":
            (scale_m,), (scale_e,) = dyadic(np.array([scale]))
            mantissa = [m * scale_m for m in mantissa]
            exponent = [e + scale_e for e in exponent]
        parts = list(zip(mantissa, exponent, strict=True))
        extra = list(zip(*dyadic(bias), strict=True)) if bias is not None else []
        self.unit = min((e for m, e in parts + extra if m), default=0)
        values = [m << (e - self.unit) if m else 0 for m, e in parts]
        if extra:
            added = [m << (e - self.unit) if m else 0 for m, e in extra]
            values = [a + b for a, b in zip(values, added, strict=True)]
        self.value: dict[int, int] = dict(zip(self.visible.tolist(), values, strict=True))
        self.top = max(values, default=0)

    @cached_property
    def order(self) -> list[int]:
        """Visible positions, best first: real scores descending, ties lower position first."""
        return sorted(self.value, key=lambda i: (-self.value[i], i))

    def weights(self, prec: int = START_PREC) -> dict[int, arb]:
        """Weight of every visible position: exp(score - top score), or the stored weight."""
        if prec not in self._masses:
            with Precision(prec):
                if self.kind == "probs":
                    balls = {i: arb(v) for i, v in self.value.items()}
                else:
                    balls = {
                        i: arb((fmpz(v - self.top), fmpz(self.unit))).exp()
                        for i, v in self.value.items()
                    }
            self._masses[prec] = balls
        return self._masses[prec]

    def forced(self, keep_first: int = 0, keep_last: int = 0) -> set[int]:
        """Positions of the first and last visible keys that must be kept."""
        seen = self.visible.tolist()
        return set(seen[:keep_first]) | set(seen[max(0, len(seen) - keep_last) :])

    def ranked(self, forced: Iterable[int] = ()) -> list[int]:
        """The forced positions, then all others, each part best first."""
        must = set(forced)
        return [i for i in self.order if i in must] + [i for i in self.order if i not in must]

    def exact_tail(self, kept: Iterable[int]) -> Fraction | None:
        """The tail mass as a fraction where it is rational by inspection, else None."""
        keep = set(kept)
        if not self.value or len(keep) == len(self.value):
            return Fraction(0)
        if not keep:
            return Fraction(1)
        if self.kind == "probs":
            total = sum(self.value.values())
            return Fraction(total - sum(self.value[i] for i in keep), total)
        # The same share of every level of equal scores is that share of all.
        every = Counter(self.value.values())
        kept = Counter(self.value[i] for i in keep)
        shares = {Fraction(count - kept[level], count) for level, count in every.items()}
        return shares.pop() if len(shares) == 1 else None

    def tail_mass(self, kept: Iterable[int], prec: int = START_PREC) -> arb:
        """A ball around the true tail mass of `kept` (positions, all visible)."""
        keep = set(kept)
        exact = self.exact_tail(keep)
        with Precision(prec):
            if exact is not None:
                return arb(fmpq(exact.numerator, exact.denominator))
            balls = self.weights(prec)
            head = sum((w for i, w in balls.items() if i in keep), arb(0))
            tail = sum((w for i, w in balls.items() if i not in keep), arb(0))
            return tail / (head + tail)

    def fits(self, kept: Iterable[int], eps: Exact) -> bool:
        """Decide exactly whether the true tail mass of `kept` is at most `eps`."""
        return self._decide(set(kept), Fraction(eps), None)

    def _decide(self, keep: set[int], eps: Fraction, sums: tuple[arb, arb] | None) -> bool:
        """`fits`; `sums` are the head and tail weights at START_PREC when they are known."""
        exact = self.exact_tail(keep)
        if exact is not None:
            return exact <= eps
        if eps <= 0 or eps >= 1:
            return eps >= 1
        if sums is not None:
            with Precision(START_PREC):
                left = sums[1] * arb(fmpq((1 - eps).numerator, eps.denominator))
                right = sums[0] * arb(fmpq(eps.numerator, eps.denominator))
                if left <= right:
                    return True
                if left > right:
                    return False
        return self._excess_sign(keep, eps) <= 0

    def _excess_sign(self, keep: set[int], eps: Fraction) -> int:
        """The sign of T (1 - eps) - H eps, as one rational coefficient per distinct score."""
        kept = Counter(self.value[i] for i in keep)
        every = Counter(self.value.values())
        return self._sign({v: (every[v] - kept[v]) * (1 - eps) - kept[v] * eps for v in every})

    def _sign(self, part: dict[int, Fraction]) -> int:
        """The sign of a sum of coefficient * exp(score) over distinct scores, always decided.

        What cancels has been taken out in integers: of (0, 0, -1e38) at eps = 1/2, k = 1 only
        the last score is left, and no precision could have shown it beside the zeros.
        """
        part = {v: c for v, c in part.items() if c}
        if not part:
            return 0
        top, prec = max(part), START_PREC
        while prec <= MAX_PREC:
            with Precision(prec):
                total = arb(0)
                for v, c in part.items():
                    weight = arb((fmpz(v - top), fmpz(self.unit))).exp()
                    total += weight * arb(fmpq(c.numerator, c.denominator))
                if total > 0 or total < 0:
                    return 1 if total > 0 else -1
            prec *= 2
        raise ArithmeticError(f"undecided at {MAX_PREC} bits")

    def minimal_k(self, eps: Exact, *, forced: Iterable[int] = (), min_keep: int = 1) -> int:
        """The fewest keys of any set that holds `forced` and `min_keep` keys and fits `eps`."""
        must = set(forced)
        ranked = self.ranked(must)
        budget = Fraction(eps)
        least = min(max(len(must), min_keep, 1), len(ranked))
        if not ranked:
            return 0
        balls = self.weights()
        with Precision(START_PREC):
            heads = list(accumulate((balls[i] for i in ranked), initial=arb(0)))
            tails = list(accumulate((balls[i] for i in reversed(ranked)), initial=arb(0)))
        low, high = least, len(ranked)
        while low < high:
            k = (low + high) // 2
            sums = (heads[k], tails[len(ranked) - k])
            if self._decide(set(ranked[:k]), budget, sums):
                high = k
            else:
                low = k + 1
        return low

    def minimal_set(
        self, eps: Exact, *, forced: Iterable[int] = (), min_keep: int = 1
    ) -> list[int]:
        """The documented answer: the minimal top set, positions ascending."""
        must = set(forced)
        k = self.minimal_k(eps, forced=must, min_keep=min_keep)
        return sorted(self.ranked(must)[:k])

    def minimal_blocks(
        self, eps: Exact, block_size: int, *, forced: Iterable[int] = (), min_keep: int = 1
    ) -> list[int]:
        """Positions kept by the fewest whole blocks, ranked by block mass (ties: lower block)."""
        blocks: dict[int, list[int]] = {}
        for i in self.visible.tolist():
            blocks.setdefault(i // block_size, []).append(i)
        must = {i // block_size for i in forced}
        ranked = self._rank_blocks(blocks)
        ranked = [b for b in ranked if b in must] + [b for b in ranked if b not in must]
        budget = Fraction(eps)
        kept: set[int] = set()
        for count, block in enumerate(ranked):
            enough = len(kept) >= min(min_keep, len(self.value)) and count >= len(must)
            if kept and enough and self.fits(kept, budget):
                break
            kept |= set(blocks[block])
        return sorted(kept)

    def _rank_blocks(self, blocks: dict[int, list[int]]) -> list[int]:
        """Blocks by exact mass, descending; equal masses (equal multisets) by position."""
        balls = self.weights()
        with Precision(START_PREC):
            mass = {b: sum((balls[i] for i in pos), arb(0)) for b, pos in blocks.items()}

        def compare(one: int, two: int) -> int:
            if mass[one] > mass[two] or mass[one] < mass[two]:
                return -1 if mass[one] > mass[two] else 1
            if self.kind == "probs":
                more = sum(self.value[i] for i in blocks[one])
                sign = more - sum(self.value[i] for i in blocks[two])
            else:
                ones = Counter(self.value[i] for i in blocks[one])
                twos = Counter(self.value[i] for i in blocks[two])
                sign = self._sign({v: Fraction(ones[v] - twos[v]) for v in ones | twos})
            return -1 if sign > 0 else 1 if sign < 0 else one - two

        return sorted(blocks, key=cmp_to_key(compare))


def outward(ball: arb) -> tuple[float, float]:
    """The tightest float64 interval, inside [0, 1], that is certain to hold the ball."""
    with Precision(2200):
        low, high = float(ball.lower()), float(ball.upper())
        while arb(low) > ball.lower():
            low = float(np.nextafter(low, -1.0))
        while arb(high) < ball.upper():
            high = float(np.nextafter(high, 2.0))
    return max(low, 0.0), min(high, 1.0)
