"""The audit's arithmetic against exact masses, and its proofs against all sets there are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest

from certk_rs._audit import recompute

flint = pytest.importorskip("flint")

U = 2.0**-53


@pytest.fixture(autouse=True)
def bits() -> Iterator[None]:
    """Balls of 500 bits: the products below cancel, and some masses are tiny."""
    before, flint.ctx.prec = flint.ctx.prec, 500
    yield
    flint.ctx.prec = before


def rows_of(
    q: np.ndarray, k: np.ndarray, scale: float, kept: np.ndarray, seen: np.ndarray | None = None
) -> recompute.Rows:
    sides = (recompute.Keys(k[side], np.flatnonzero(side)) for side in (kept, ~kept))
    return recompute.recompute(q, *sides, scale, np.full(len(q), len(k)) if seen is None else seen)


def softmax_of(rows: recompute.Rows) -> np.ndarray:
    """The softmax of the kept and then the dropped keys."""
    return np.concatenate([side.terms * side.factors[:, None] for side in rows.sides], axis=1)


def exact_weights(q: np.ndarray, k: np.ndarray, scale: float) -> list[list[flint.arb]]:
    """exp(scale * q.k) of all rows and keys, as balls of nothing but the rounding of exp."""

    def dot(a: np.ndarray, b: np.ndarray) -> Fraction:
        return sum((Fraction(x) * Fraction(y) for x, y in zip(a.tolist(), b.tolist(), strict=True)))

    def ball(x: Fraction) -> flint.arb:
        return flint.arb(flint.fmpq(x.numerator, x.denominator))

    scores = [[Fraction(scale) * dot(row, key) for key in k] for row in q]
    return [[ball(s - max(row)).exp() for s in row] for row in scores]


def total(weights: list[flint.arb], which: np.ndarray) -> flint.arb:
    return sum((w for w, use in zip(weights, which, strict=True) if use), flint.arb(0))


def nearly_cancelling(
    rng: np.random.Generator, rows: int, n: int, d: int
) -> tuple[np.ndarray, np.ndarray]:
    """Float32 vectors: pairs of products near 1e8 that cancel, and a few small ones that stay."""
    pairs = d // 3
    half, few = rng.uniform(8e3, 16e3, (rows, pairs)), rng.standard_normal((rows, d - 2 * pairs))
    q = np.concatenate([half, half, few], axis=1)
    other = rng.uniform(8e3, 16e3, (n, pairs)) * rng.choice([-1, 1], (n, pairs))
    k = np.concatenate([other, -other, rng.standard_normal((n, d - 2 * pairs))], axis=1)
    order = rng.permutation(d)
    q, k = (a[:, order].astype(np.float32).astype(np.float64) for a in (q, k))
    return q, k


@pytest.mark.parametrize("scale", [1.0, -0.3])
@pytest.mark.parametrize("d", [6, 64, 256])
def test_products_that_nearly_cancel(d: int, scale: float) -> None:
    """The rounding of what cancels is far above that of the rest, and inside the interval."""
    rng = np.random.default_rng(d)
    q, k = nearly_cancelling(rng, 4, 16, d)
    assert 1e8 < abs(q[:, None] * k).max() < 3e8
    kept = rng.random(16) < 0.4
    found, off = rows_of(q, k, scale, kept), 0.0
    for j, weights in enumerate(exact_weights(q, k, scale)):
        everything = total(weights, kept | True)
        for which, low, high in (
            (~kept, found.tail_low[j], found.tail_high[j]),
            (kept, found.kept_low[j], found.kept_high[j]),
        ):
            mass = total(weights, which) / everything
            assert flint.arb(float(low)) <= mass <= flint.arb(float(high))
            assert 0 < low < high <= low * math.exp(4.1 * found.spread[j]) + 2.0**-990
            middle = math.sqrt(low) * math.sqrt(high)
            off = max(off, abs(float(flint.arb(middle) / mass - 1)))
        for ours, real in zip(softmax_of(found)[j], weights_by_side(weights, kept), strict=True):
            share = real / everything
            least = flint.arb(float(ours)) * (-flint.arb(float(found.spread[j]))).exp()
            assert least <= share + flint.arb(2.0**-1000)
    assert off > 2.0**-32  # without the radius the masses would be outside


def test_recomputed_masses_enclose_the_exact_ones() -> None:
    """Against balls of 200 bits, over scores from flat to far beyond the range of exp."""
    flint.ctx.prec = 200
    rng = np.random.default_rng(7)
    for spread in (0.0, 0.1, 1.0, 5.0, 40.0):
        q, k = (spread * rng.standard_normal(shape) for shape in ((4, 3), (9, 3)))
        q, k = (a.astype(np.float32).astype(np.float64) for a in (q, k))
        kept, scale = rng.random(9) < 0.5, -0.7
        kept[0] = True
        seen = np.array([9, 5, 1, 0])
        rows = rows_of(q, k, scale, kept, seen)
        for j in range(4):
            dots = [
                sum((flint.arb(a) * b for a, b in zip(q[j].tolist(), ki, strict=True)))
                for ki in k[: seen[j]].tolist()
            ]
            exact = [(flint.arb(scale) * dot).exp() for dot in dots]
            total = sum(exact, flint.arb(0))
            if seen[j] == 0:
                assert rows.tail_low[j] == rows.tail_high[j] == 0
                continue
            for inside, low, high in (
                (~kept, rows.tail_low[j], rows.tail_high[j]),
                (kept, rows.kept_low[j], rows.kept_high[j]),
            ):
                parts = [e for e, use in zip(exact, inside, strict=False) if use]
                if len(parts) in (0, len(exact)):
                    assert low == high == bool(parts)
                    continue
                mass = sum(parts, flint.arb(0)) / total
                assert flint.arb(float(low)) <= mass
                assert high == 1 or mass <= flint.arb(float(high))
                if low > 0 and spread < 5:
                    assert high <= low * (1 + 1e-9)


def test_masses_near_one_are_told_apart() -> None:
    """1 - 1e-14 and 1 - 2e-14: their float64 are 90 steps apart, the kept masses a factor 2."""
    gap = math.log(1e14)
    q, k = np.array([[1.0]]), np.array([[0.0], [gap]])
    rows = rows_of(q, k, 1.0, np.array([True, False]), np.array([2]))
    assert rows.lose_at_most(np.array([1 - 0.99e-14]))
    assert not rows.lose_at_most(np.array([1 - 1.02e-14]))
    assert rows.lose_at_least(np.array([1 - 1.02e-14]))
    assert rows.refute(np.array([0.0]), np.array([1 - 1.02e-14]))
    assert rows.refute(np.array([1 - 0.98e-14]), np.array([1.0]))
    assert not rows.refute(np.array([0.0]), np.array([1.0]))


def weights_by_side(weights: list[flint.arb], kept: np.ndarray) -> list[flint.arb]:
    order = [*np.flatnonzero(kept), *np.flatnonzero(~kept)]
    return [weights[i] for i in order]


@pytest.mark.parametrize(("chunk", "scale"), [(1, -3.5), (1, 1e-3), (16, 1.0), (4096, 2.0)])
def test_the_spread_is_what_is_proven(
    monkeypatch: pytest.MonkeyPatch, chunk: int, scale: float
) -> None:
    """Its terms as in the head of the module, in exact arithmetic."""
    monkeypatch.setattr(recompute, "_CHUNK", chunk)
    rng = np.random.default_rng(chunk)
    n, d = 6000, 3
    q, k = (10 * rng.standard_normal(shape).astype("f4").astype("f8") for shape in ((4, d), (n, d)))
    q[1] = 0
    for longest in (0, 1):  # the longest key is on either side
        kept = rng.random(n) < 0.5
        k[np.flatnonzero(kept == longest)[7]] = [1e3, -1e3, 1e3]
        found = rows_of(q, k, scale, kept)
        most = sum(Fraction(x) ** 2 for x in max(k.tolist(), key=lambda row: sum(map(abs, row))))
        for j in range(4):
            square = sum(Fraction(x) ** 2 for x in q[j].tolist()) * most * Fraction(scale) ** 2
            reach = flint.arb(flint.fmpq(square.numerator, square.denominator)).sqrt()
            sums = Fraction(2 * chunk + 512) + Fraction(2 * n, chunk)
            rest = sums * Fraction(U) + Fraction(1, 1 << 40)
            proven = reach * (2 * (d + 8) * U) * (1 + 2.0**-21)
            proven += flint.arb(flint.fmpq(rest.numerator, rest.denominator))
            assert proven <= flint.arb(float(found.spread[j])) <= proven * (1 + 1e-5)


def test_long_sums_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "_CHUNK", 16)
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal(shape) for shape in ((3, 2), (100, 2)))
    kept = np.arange(100) < 45
    found = rows_of(q, k, 1.0, kept)
    scores = np.exp(q @ k.T)
    mass = scores[:, 45:].sum(axis=1) / scores.sum(axis=1)
    assert np.allclose(found.tail_low, mass, rtol=1e-9)
    assert np.allclose(softmax_of(found).sum(axis=1), 1.0, rtol=1e-12)
    order = np.argsort(~kept, kind="stable")
    assert np.allclose(softmax_of(found), (scores / scores.sum(axis=1, keepdims=True))[:, order])


@pytest.mark.parametrize("gap", [600.0, 690.0, 700.0, 745.0, 800.0, 1e5])
def test_masses_that_are_next_to_nothing(gap: float) -> None:
    """Below 2^-1000 an upper end is 2^-1000 and a lower end 0; neither is ever 0 and 0."""
    q, k = np.array([[1.0], [-1.0]]), np.array([[0.0], [-gap], [-gap]])
    found = rows_of(q, k, 1.0, np.array([True, False, False]))
    tiny = math.log(2) - gap < -1000 * math.log(2)
    assert found.tail_high[0] == (2.0**-1000 if tiny else found.tail_high[0])
    assert found.tail_high[0] >= 2.0**-1000
    assert (found.tail_low[0] == 0) == tiny
    assert not found.lose_at_most(np.zeros(2)).any()
    assert found.lose_at_least(np.zeros(2)).all()
    assert found.lose_at_most(np.ones(2)).all()
    # The other row loses nearly everything: what it keeps is as small.
    assert (found.kept_low[1] == 0) == (gap - math.log(2) > 1000 * math.log(2) or gap > 693.9)
    assert not found.lose_at_least(np.ones(2)).any()
    assert not found.refute(np.zeros(2), np.ones(2)).any()
    for bound in (found.tail_high[0], 1.0):
        assert found.lose_at_most(np.array([bound, 1.0]))[0]
    if not tiny:
        assert found.refute(np.zeros(2), np.array([found.tail_low[0] / 2, 1.0]))[0]
        assert found.refute(np.array([found.tail_high[0] * 2, 0.0]), np.ones(2))[0]


def test_ends_are_rounded_outward() -> None:
    """By more than the roundings of what follows the logarithm."""
    odds = np.concatenate([np.linspace(-690, 40, 200), np.random.default_rng(5).normal(0, 5, 200)])
    lower, upper = recompute._ends(odds, odds)
    for x, low, high in zip(odds.tolist(), lower.tolist(), upper.tolist(), strict=True):
        mass = 1 / (1 + (-flint.arb(x)).exp())
        assert flint.arb(low) * (1 + flint.arb(2.0**-49)) < mass
        assert high == 1 or mass * (1 + flint.arb(2.0**-49)) < flint.arb(high)


def test_sides_without_keys_that_are_seen() -> None:
    """Nothing dropped is a mass of exactly 0, nothing kept one of exactly 1."""
    q, k = np.ones((4, 1)), np.array([[1.0], [2.0], [3.0]])
    seen = np.array([0, 1, 2, 3])
    for kept, low, high in (
        ([True, True, True], [0, 0, 0, 0], [0, 0, 0, 0]),
        ([False, False, False], [0, 1, 1, 1], [0, 1, 1, 1]),
        ([True, False, False], [0, 0, 0.7, 0.9], [0, 0, 0.74, 0.92]),
        ([False, True, True], [0, 1, 0.2, 0.05], [0, 1, 0.3, 0.1]),
    ):
        found = rows_of(q, k, 1.0, np.array(kept), seen)
        assert (found.tail_low >= low).all()
        assert (found.tail_high <= high).all()
        assert np.allclose(found.kept_low, [1, *(1 - found.tail_high[1:])], rtol=1e-9)
        assert np.allclose(softmax_of(found).sum(axis=1), [0, 1, 1, 1])
        order = np.concatenate([np.flatnonzero(kept), np.flatnonzero(~np.array(kept))])
        assert (softmax_of(found)[order >= seen[:, None]] == 0).all()
        assert (softmax_of(found)[order < seen[:, None]] > 0).all()


@pytest.mark.parametrize("bad", ["scale", "query", "key", "nan", "many"])
def test_what_overflows_confirms_nothing(bad: str) -> None:
    q, k, scale = np.ones((2, 1)), np.array([[1.0], [2.0], [1.5]]), -1.0
    if bad == "scale":
        scale, k = -1e308, k * 10
    elif bad == "query":
        q = q * np.inf
    elif bad == "key":
        k[2] = np.inf
    elif bad == "nan":
        q = q * np.nan
    else:  # every score is a number, but no two digits of it are certain
        scale = -1e18
    for kept in ([True, True, True], [True, False, False], [False, False, False]):
        found = rows_of(q, k, scale, np.array(kept))
        every = np.array([0.0, 1e-300, 0.3, 0.5, 0.7])
        for bound in every:
            assert not found.lose_at_most(np.full(2, bound)).any()
            assert not found.refute(np.full(2, bound), np.full(2, bound)).any()
        for bound in (1e-300, 0.3, 0.7, 1.0):
            assert not found.lose_at_least(np.full(2, bound)).any()


def test_a_large_radius_is_still_arithmetic() -> None:
    """Up to 100 it widens; the mass, whatever it is, stays inside."""
    k = np.array([[0.0], [1.0]])
    for scale in (1e12, 1e14, 1e16, 5e16):
        found = rows_of(np.ones((1, 1)), k, scale, np.array([False, True]))
        assert found.tail_low[0] == 0
        assert 0 < found.tail_high[0] <= 1
        assert found.lose_at_most(np.array([0.5]))[0] == (found.tail_high[0] <= 0.5)
        assert 2 * 9 * U * scale < found.spread[0] < 2.1 * 9 * U * scale + 1e-11


HALF = 0.5


@pytest.mark.parametrize(
    ("tail", "kept", "bound", "at_most", "at_least"),
    [
        ((0.2, 0.3), (0.7, 0.8), 0.3, True, False),
        ((0.2, 0.3), (0.7, 0.8), 0.299, False, False),
        ((0.2, 0.3), (0.7, 0.8), 0.2, False, True),
        ((0.2, 0.3), (0.7, 0.8), 0.201, False, False),
        # From a half on it is the kept side that decides, and below it the other.
        ((0.0, 1.0), (0.4, 0.4), 0.6, True, True),
        ((0.0, 1.0), (0.5, 0.5), HALF, True, True),
        ((0.0, 1.0), (0.4, 0.4), 0.599, False, True),
        ((0.0, 1.0), (0.4, 0.4), 0.601, True, False),
        ((0.0, 1.0), (0.3, 0.5), 0.6, False, False),
        ((0.0, 1.0), (0.3, 0.4), 0.6, False, True),
        ((0.0, 1.0), (0.4, 0.5), 0.6, True, False),
        ((0.0, 1.0), (0.41, 0.5), 0.6, True, False),
        ((0.0, 1.0), (0.3, 0.39), 0.6, False, True),
        ((0.3, 0.39), (0.0, 1.0), 0.4, True, False),
        ((0.41, 0.5), (0.0, 1.0), 0.4, False, True),
        ((0.4, 0.4), (0.0, 1.0), 0.4, True, True),
        ((0.0, 1.0), (0.6, 0.6), 0.4, False, False),
    ],
)
def test_which_side_decides(
    tail: tuple[float, float],
    kept: tuple[float, float],
    bound: float,
    at_most: bool,
    at_least: bool,
) -> None:
    ends = [np.array([end]) for end in (*tail, *kept)]
    found = recompute.Rows(*ends, (), np.zeros(1))
    at = np.array([bound])
    assert found.lose_at_most(at) == at_most
    assert found.lose_at_least(at) == at_least
    zero, one = np.zeros(1), np.ones(1)
    above = tail[0] > bound if bound < HALF else kept[1] < 1 - bound
    below = tail[1] < bound if bound < HALF else kept[0] > 1 - bound
    assert found.refute(zero, at) == above
    assert found.refute(at, one) == below
    assert found.refute(at, at) == (above or below)


# ------------------------------------------------------------------------------------------- proofs


def proof_of(
    softmax: np.ndarray,
    weights: np.ndarray,
    limits: np.ndarray,
    *,
    forced: np.ndarray | None = None,
    spread: float = 0.0,
    seen: np.ndarray | None = None,
    parts: int = 1,
    block: int = 1,
) -> recompute.Proof:
    rows, n = softmax.shape
    proof = recompute.Proof(np.arange(n), np.zeros(n, bool) if forced is None else forced, block)
    for part in np.array_split(np.arange(rows), parts):
        nothing = np.zeros(len(part))
        # The softmax in two sides, with factors that are not 1.
        sides = tuple(
            recompute.Side(softmax[part][:, some] * 4, np.full(len(part), 0.25))
            for some in (slice(0, n // 2), slice(n // 2, n))
        )
        made = recompute.Rows(nothing, nothing, nothing, nothing, sides, np.full(len(part), spread))
        sees = np.full(rows, n) if seen is None else seen
        proof.add(made, weights[part], limits[part], sees[part])
    return proof


def least_set(softmax: np.ndarray, limits: np.ndarray, forced: np.ndarray) -> int:
    """The size of the smallest set within the limits that has the forced keys, by trying all."""
    n = softmax.shape[1]
    exact = [[Fraction(x) for x in row] for row in softmax.tolist()]
    for size in range(n + 1):
        for kept in combinations(range(n), size):
            if not set(np.flatnonzero(forced)) <= set(kept):
                continue
            lost = [sum(x for i, x in enumerate(row) if i not in kept) for row in exact]
            if all(loss <= Fraction(b) for loss, b in zip(lost, limits.tolist(), strict=True)):
                return size
    raise AssertionError("all keys lose nothing")


def test_proofs_against_all_sets() -> None:
    """No bound is above the smallest set; and what the exact mixture proves is proven."""
    rng = np.random.default_rng(11)
    tight = loose = 0
    for _ in range(150):
        rows, n = int(rng.integers(1, 5)), int(rng.integers(2, 7))
        softmax = rng.dirichlet(np.full(n, 0.4), rows)
        limits = rng.choice([0.0, 1e-6, 0.05, 0.2, 0.6, 0.99, 1.0], rows)
        weights = rng.choice([0.0, 1.0, 0.3, 1e-9], rows)
        forced = rng.random(n) < 0.2
        proof = proof_of(softmax, weights, limits, forced=forced, parts=int(rng.integers(1, 4)))
        smallest = least_set(softmax, limits, forced)
        most = max(bound for bound in range(n + 2) if proof.holds_for(bound))
        assert most <= smallest
        assert all(proof.holds_for(bound) for bound in range(most))
        exact = [Fraction(x) for x in (weights @ softmax)[~forced].tolist()]
        budget = Fraction(float(weights @ limits))
        for bound in range(int(forced.sum()) + 1, n + 1):
            lost = sum(sorted(exact)[: n - (bound - 1)])
            if lost > budget * (1 + Fraction(1, 10**6)) + Fraction(1, 10**300):
                assert proof.holds_for(bound)
                tight += 1
            elif lost < budget * (1 - Fraction(1, 10**6)):
                loose += 1
    assert tight > 30
    assert loose > 30


def test_a_proof_counts_what_rows_need_without_weights() -> None:
    softmax, none = np.full((2, 4), 0.25), np.zeros(2)

    def most(limits: list[float], seen: list[int], forced: int = 0) -> int:
        which = np.arange(4) < forced
        proof = proof_of(softmax, none, np.array(limits), seen=np.array(seen), forced=which)
        return max(bound for bound in range(6) if proof.holds_for(bound))

    assert most([0.5, 0.5], [4, 4]) == 1  # no row may lose everything
    assert most([1.0, 1.0], [4, 4]) == 0
    assert most([1.0, 0.999], [4, 4]) == 1
    assert most([0.5, 0.5], [0, 0]) == 0  # they see nothing
    assert most([0.0, 0.5], [3, 4]) == 3  # may lose nothing of the three that it sees
    assert most([0.5, 0.0], [3, 4]) == 4
    assert most([5e-324, 0.5], [3, 4]) == 1
    assert most([1.0, 1.0], [4, 4], forced=3) == 3
    assert most([0.0, 1.0], [2, 4], forced=3) == 3


def test_a_proof_takes_the_lower_ends() -> None:
    """Four equal keys, half of which may go: with rows known to within a factor, fewer."""
    softmax, weights = np.full((1, 4), 0.25), np.ones(1)
    for spread, limit, bound in (
        (0.0, 0.2499, 4),
        (0.0, 0.25, 3),
        (0.0, 0.2501, 3),
        (1e-3, 0.24974, 4),
        (1e-3, 0.24976, 3),
        (math.log(2), 0.1249, 4),
        (math.log(2), 0.1251, 3),
        (math.log(2), 0.2499, 3),
        (math.log(2), 0.2501, 2),
    ):
        proof = proof_of(softmax, weights, np.array([limit]), spread=spread)
        assert proof.holds_for(bound)
        assert not proof.holds_for(bound + 1)


def test_margins_of_a_proof() -> None:
    """Rounding, sums over many rows and products that underflow are on the safe side."""
    softmax = np.full((1, 4), 0.25)
    ones = np.ones(1)
    for above, holds in ((1.5 * 2.0**-30, False), (2.0**-28, True)):
        proof = proof_of(softmax, ones, np.array([0.25 * (1 - above)]))
        assert proof.holds_for(4) == holds
    # A thousand rows with weights next to nothing: products round up to the least float.
    rows = np.full((1000, 4), 0.25)
    tiny = np.full(1000, 5e-324)
    assert not proof_of(rows, tiny, np.full(1000, 0.26)).holds_for(4)
    assert not proof_of(rows * 0.6 / 0.25, tiny, np.full(1000, 0.45)).holds_for(4)
    # So near to nothing that rows and keys count: 100 rows, added one by one.
    for share, holds in ((2.0**-1071, False), (2.0**-1068, True)):
        least = np.array([[1.0, share]] * 100)
        proof = proof_of(least, np.ones(100), np.full(100, 5e-324), parts=100)
        assert proof.holds_for(2) == holds
    # More rows are summed less exactly.
    many = 1 << 17
    wide = np.full((many, 2), 0.5)
    for above, holds in ((2.0**-32, False), (2.0**-28, True)):
        proof = proof_of(wide, np.ones(many), np.full(many, 0.5 * (1 - above)))
        assert proof.holds_for(2) == holds
    proof = recompute.Proof(np.arange(2), np.zeros(2, bool))
    proof._rows, proof._budget, proof._mixture = 1 << 40, 1.0, np.array([1.0 + 2.0**-12, 2.0])
    assert not proof.holds_for(2)
    proof._mixture = np.array([1.0 + 2.0**-9, 2.0])
    assert proof.holds_for(2)
