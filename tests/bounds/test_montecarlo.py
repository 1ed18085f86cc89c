"""Monte-Carlo tail masses: the failure probability is a promise, so small cases are enumerated.

For populations of up to 12 items every sample is handed to the library's bounds (in every order
where order matters), and the fraction of them that miss the true mean, an exact rational, must not
exceed delta. The formulas are computed again with mpmath.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations, permutations, product
from typing import Any, get_args

import numpy as np
import pytest
from mpmath import mp, mpf

import certk_rs as ck
from certk_rs import _native, montecarlo
from same_bytes import same

METHODS = get_args(montecarlo.Method)
WEIGHTS: dict[str, Callable[[int], list[float]]] = {
    "constant": lambda n: [0.625] * n,
    "ones": lambda n: [1.0] * n,
    "spike": lambda n: [1.0] + [0.0] * (n - 1),
    "hole": lambda n: [0.0] + [1.0] * (n - 1),
    "two-level": lambda n: [1.0] * (n // 2) + [0.125] * (n - n // 2),
    "zero-one": lambda n: [1.0] * (n // 3) + [0.0] * (n - n // 3),
    "geometric": lambda n: [0.5**i for i in range(n)],
}
DELTAS = (0.9, 0.5, 0.2, 0.05, 0.01)


def bounds(values: Any, population: int | None, delta: float, method: str) -> Any:
    array = np.ascontiguousarray(values, dtype=np.float64)
    return _native.mean_bounds(array, population, delta, method, array.shape[1])


def missed(ends: Any, mean: Fraction) -> tuple[int, int]:
    """Count the lower and upper ends on the wrong side of the exact mean."""
    (low, lows), (high, highs) = (np.unique(end, return_counts=True) for end in ends)
    wrong_low = sum(int(n) for v, n in zip(low, lows, strict=True) if Fraction(v) > mean)
    return wrong_low, sum(int(n) for v, n in zip(high, highs, strict=True) if Fraction(v) < mean)


@pytest.mark.parametrize("method", METHODS)
def test_a_mean_next_to_one_is_not_rounded_up(method: str) -> None:
    """Of a population that was drawn whole the mean is known, but no float64 holds it."""
    values = [1 - 2.0**-53, 1 - 2.0**-53, 1 - 2.0**-52]
    mean = sum(map(Fraction, values)) / 3
    assert missed(bounds([values], 3, 0.5, method), mean) == (0, 0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("values", [[1, 0], [1, 1, 0], [1, 1, 1, 0, 0, 0, 0], [3, 0, 0, 0]])
def test_a_mean_that_no_float64_holds_is_rounded_outward(values: list[int], method: str) -> None:
    """Of a population that was drawn whole, in units of the smallest float64."""
    least = 2.0**-1074
    mean = Fraction(sum(values), len(values)) * Fraction(least)
    samples = [[value * least for value in values]]
    assert missed(bounds(samples, len(values), 0.5, method), mean) == (0, 0)


def check_coverage(samples: np.ndarray, population: int | None, mean: Fraction) -> int:
    """Every method and delta; returns how many ends missed in all."""
    misses = 0
    for method in METHODS:
        for delta in DELTAS:
            counts = missed(bounds(samples, population, delta, method), mean)
            for count in counts:
                assert Fraction(count, len(samples)) <= Fraction(delta), (method, delta)
            misses += sum(counts)
    return misses


def ordered(weights: list[float], m: int) -> np.ndarray:
    return np.array(list(permutations(weights, m)))


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 1), (3, 2), (5, 5), (7, 4), (7, 6), (12, 3)])
def test_every_ordered_sample_without_replacement(name: str, n: int, m: int) -> None:
    weights = WEIGHTS[name](n)
    mean = sum(map(Fraction, weights), Fraction(0)) / n
    check_coverage(ordered(weights, m), n, mean)


@pytest.mark.parametrize("name", ["two-level", "zero-one", "spike", "hole"])
@pytest.mark.parametrize("m", [4, 6, 8])
def test_every_order_of_twelve_items_of_two_kinds(name: str, m: int) -> None:
    """Items of one kind are alike, so patterns are enumerated, each with its exact probability."""
    n = 12
    weights = WEIGHTS[name](n)
    high, low = max(weights), min(weights)
    many = weights.count(high)
    mean = sum(map(Fraction, weights), Fraction(0)) / n
    patterns, chances = [], []
    for positions in (c for k in range(m + 1) for c in combinations(range(m), k)):
        k = len(positions)
        if k > many or m - k > n - many:
            continue
        patterns.append([high if i in positions else low for i in range(m)])
        chances.append(Fraction(math.perm(many, k) * math.perm(n - many, m - k), math.perm(n, m)))
    assert sum(chances) == 1
    for method in METHODS:
        for delta in DELTAS:
            lower, upper = bounds(patterns, n, delta, method)
            for wrong in (
                [Fraction(v) > mean for v in lower],
                [Fraction(v) < mean for v in upper],
            ):
                failure = sum((c for c, bad in zip(chances, wrong, strict=True) if bad), Fraction())
                assert failure <= Fraction(delta), (method, delta)


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize(("n", "m"), [(2, 10), (3, 7), (4, 5), (12, 3)])
def test_every_sample_with_replacement(name: str, n: int, m: int) -> None:
    weights = WEIGHTS[name](n)
    mean = sum(map(Fraction, weights), Fraction(0)) / n
    check_coverage(np.array(list(product(weights, repeat=m))), None, mean)


def test_the_enumeration_can_fail() -> None:
    """Large deltas do miss, so that a bound that is too bold would be seen."""
    weights = WEIGHTS["zero-one"](7)
    mean = Fraction(2, 7)
    assert check_coverage(ordered(weights, 6), 7, mean) > 0
    samples = np.array(list(product([0.0, 1.0], repeat=10)))
    for method in ("betting", "hoeffding"):
        lower, upper = bounds(samples, None, 0.5, method)
        wrong = max(np.mean(lower > 0.5), np.mean(upper < 0.5))
        assert wrong > 0.05, method


@pytest.mark.parametrize("population", [None, 9])
def test_betting_holds_at_all_looks_together(population: int | None) -> None:
    """A sequence fails if any of its prefixes does; the interval only ever shrinks."""
    values, delta, m = [0.0, 0.0, 0.125, 0.25, 0.5, 0.5, 1.0, 1.0, 1.0], 0.3, 5
    mean = sum(map(Fraction, values), Fraction(0)) / 9
    samples = ordered(values, m) if population else np.array(list(product(values[::2], repeat=m)))
    if not population:
        mean = sum(map(Fraction, values[::2]), Fraction(0)) / 5
    failed = np.zeros(len(samples), dtype=bool)
    last = np.ones(len(samples))
    for t in range(1, m + 1):
        _, upper = _native.mean_bounds(
            np.ascontiguousarray(samples[:, :t]), population, delta, "betting", m
        )
        assert (upper <= last + 1e-9).all()
        last = upper
        failed |= np.array([Fraction(v) < mean for v in upper])
    assert Fraction(int(failed.sum()), len(samples)) <= Fraction(delta)


# ------------------------------------------------------------------------- the formulas again


def shrinking(m: int, population: int | None) -> mpf:
    if population is None:
        return mpf(1)
    return min(1 - mpf(m - 1) / population, (1 - mpf(m) / population) * (1 + mpf(1) / m))


def above(
    x: mpf, values: list[float], population: int | None, delta: float, method: str
) -> bool:  # fmt: skip
    """Return True if the upper bound of the papers, in 50 digits, is at most x."""
    draws, m, d = [mpf(v) for v in values], len(values), mpf(delta)
    mean = sum(draws) / m
    rho = shrinking(m, population)
    variance = sum((v - mean) ** 2 for v in draws) / m
    if x >= 1:
        return True
    if method == "hoeffding":
        return bool(x >= mean + mp.sqrt(rho * mp.log(1 / d) / (2 * m)))
    if method == "bernstein" and population:
        kappa, log = mpf(7) / 3 + 3 / mp.sqrt(2), mp.log(5 / d)
        return bool(x >= mean + mp.sqrt(variance * 2 * rho * log / m) + kappa * log / m)
    if method == "bernstein":
        log, unbiased = mp.log(2 / d), variance * m / (m - 1)
        return bool(x >= mean + mp.sqrt(2 * unbiased * log / m) + 7 * log / (3 * (m - 1)))
    # The capital of betting grows with the mean that it bets against.
    capital = mpf(1)
    total, squares = mpf(0), mpf(1) / 4
    for t, value in enumerate(draws):
        expected = (population * x - total) / (population - t) if population else x
        if expected > 1 or capital >= 1 / d:
            return True
        if expected < 0:
            return False
        bet = mp.sqrt(2 * mp.log(1 / d) / (m * squares / (t + 1)))
        if expected < 1:
            bet = min(bet, mpf(3) / 4 / (1 - expected))
        capital *= 1 + bet * (expected - value)
        total += value
        squares += (value - (mpf(1) / 2 + total) / (t + 2)) ** 2
    return bool(capital >= 1 / d)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("population", [None, 60, 1000, 10**9])
@pytest.mark.parametrize("delta", [0.5, 0.05, 1e-6, 1e-300])
def test_the_formulas_in_fifty_digits(method: str, population: int | None, delta: float) -> None:
    rng = np.random.default_rng(7)
    known = population, delta, method
    exact, close = 1 + mpf(10) ** -17, 1 + mpf(10) ** -8
    for draw in (
        rng.random(50),
        rng.random(50) ** 8,
        np.full(50, 0.9),
        0.9 + 0.05 * rng.random(50),
        (rng.random(50) < 0.1) * 1.0,
        2.0 ** -rng.integers(0, 40, 50),
    ):
        lower, upper = (mpf(float(v[0])) for v in bounds([draw], *known))
        with mp.workdps(50):
            total = mp.fsum(map(mpf, draw.tolist()))
            ceiling = mpf(1) if population is None else (total + population - 50) / population
            floor = mpf(0) if population is None else total / population
            values, complements = draw.tolist(), [float(1 - v) for v in draw]
            assert upper * exact >= ceiling or above(upper * exact, values, *known)
            least = (upper - mpf(10) ** -12) / close
            assert least <= ceiling
            assert not above(least, values, *known)
            assert lower <= floor * exact or above(1 - lower / exact, complements, *known)
            most = (lower + mpf(10) ** -8) * close
            assert most >= floor
            assert most >= 1 or not above(1 - most, complements, *known)


def test_a_population_that_was_drawn_whole_is_known() -> None:
    values = np.random.default_rng(0).random((1, 12))
    mean = sum(map(Fraction, values[0].tolist()), Fraction(0)) / 12
    for method in METHODS:
        lower, upper = (float(v[0]) for v in bounds(values, 12, 1e-9, method))
        assert Fraction(lower) <= mean <= Fraction(upper)
        assert upper - lower < 1e-13


# ------------------------------------------------------------------------------- rows of scores


def estimate(scores: Any, keep: Any, **more: Any) -> Any:
    """Return the estimate with delta = .1 and seed 0, unless others are given."""
    return montecarlo.tail_mass(scores, keep, **{"delta": 0.1, "seed": 0, **more})


def holds(found: Any, truth: Any) -> bool:
    """Return True if the interval of a single row holds the truth."""
    kind = Fraction if isinstance(truth, Fraction) else mpf
    return bool(kind(float(found.lower)) <= truth <= kind(float(found.upper)))


def exact_tail(scores: np.ndarray, kept: np.ndarray, scale: float = 1.0) -> mpf:
    """Return the tail mass in 40 digits; -inf is masked."""
    with mp.workdps(40):
        weights = [mp.exp(mpf(float(s)) * mpf(scale)) if s > -np.inf else mpf(0) for s in scores]
        return mp.fsum(w for w, k in zip(weights, kept, strict=True) if not k) / mp.fsum(weights)


def row(n: int, dtype: str = "float32", seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    scores = (2 * rng.standard_normal(n)).astype(dtype)
    kept = np.zeros(n, dtype=bool)
    kept[np.argsort(-scores.astype(np.float64))[: n // 4]] = True
    return scores, kept


def misses_allowed(trials: int, delta: float) -> int:
    """Return so many misses that more have a probability below 1e-9, each having delta."""
    tail, count = 1.0, 0
    while tail > 1e-9:
        tail -= math.comb(trials, count) * delta**count * (1 - delta) ** (trials - count)
        count += 1
    return count


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("importance", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_intervals_hold_the_truth(method: Any, importance: bool, dtype: str) -> None:
    trials = 200
    scores, kept = row(300, dtype)
    scale = -0.7 if dtype == "float64" else 1.0
    truth = exact_tail(scores, kept, scale)
    noise = np.random.default_rng(1).random(300) * 0.5
    upper = scores.astype(np.float64) * scale + noise if importance else None
    low = high = 0
    for seed in range(trials):
        found = estimate(
            scores, kept, draws=60, method=method, seed=seed, upper_bounds=upper, scale=scale
        )
        low += mpf(float(found.lower)) > truth
        high += mpf(float(found.upper)) < truth
        assert found.lower <= found.point <= found.upper
    assert max(low, high) <= misses_allowed(trials, 0.1)


@pytest.mark.parametrize("method", METHODS)
def test_drawing_the_whole_tail_is_exact(method: Any) -> None:
    for seed, dtype in enumerate(["float16", "float32", "float64"]):
        scores, kept = row(97, dtype, seed)
        found = estimate(
            scores, kept, delta=1e-9, draws=int((~kept).sum()), method=method, seed=seed
        )
        assert holds(found, exact_tail(scores, kept))
        assert found.upper - found.lower <= 1e-9 * found.upper
    weights = np.array([0.5, 0.25, 0.125, 0.0625, 0.03125, 0.0])
    found = estimate(weights, [0, 1], draws=3, kind="probs", method=method)
    assert holds(found, Fraction(7, 31))
    assert found.upper - found.lower < 1e-9


@pytest.mark.parametrize(
    ("scores", "keep", "mass", "more"),
    [
        ([0.0], [0], 0.0, {}), ([0.0, 1.0], [0, 1], 0.0, {}), ([0.0, -np.inf], [0], 0.0, {}),
        ([0.0], np.array([False]), 1.0, {}), ([-np.inf, -np.inf], [0], 0.0, {}),
        ([0.0, 1.0], [0, 1], 0.0, {"upper_bounds": [0.0, 1.0]}),
        ([0.0, 1.0], [0], 0.0, {"upper_bounds": [0.0, -np.inf], "mask": [True, False]}),
    ],
)  # fmt: skip
def test_degenerate_rows_are_exact(scores: Any, keep: Any, mass: float, more: Any) -> None:
    found = estimate(scores, keep, draws=1, **more)
    assert (found.lower, found.upper) == (mass, mass)


def test_equal_scores_are_decided_by_counts() -> None:
    drawn, bounded = (
        estimate([0.0] * 8, [0, 1], draws=1, upper_bounds=upper) for upper in (None, [0.0] * 8)
    )
    assert holds(drawn, Fraction(3, 4))
    assert holds(bounded, Fraction(3, 4))
    assert drawn.upper - drawn.lower < 1e-11


def test_far_scores_do_not_overflow() -> None:
    for scores in ([3e38, -3e38, 0.0], [0.0, -720.0, -1e30]):
        data = np.array(scores, dtype=np.float32)
        found = estimate(data, [0], draws=1)
        assert 0.0 <= found.lower <= found.upper < 1e-300
        assert estimate(data, [2], draws=2).upper == 1.0
    low = np.array([0.0, -1e30, -5.0])
    found = estimate(low, [0], delta=0.01, draws=64, upper_bounds=low)
    assert found.lower <= math.exp(-5) / (1 + math.exp(-5)) <= found.upper
    with pytest.raises(ck.CertkError, match="upper_bounds"):
        estimate(low + 1e13, [0], draws=9, upper_bounds=low + 1e13)


def test_draws_are_in_proportion_to_the_bounds() -> None:
    """Point estimates of one draw name the key that was drawn, by how far it is below its bound."""
    upper = np.log(np.array([8.0, 4.0, 2.0, 1.0, 0.5, 100.0]))
    scores = upper - np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.0])
    counts = np.zeros(5, np.int64)
    for seed in range(4000):
        found = estimate(scores, [5], delta=0.5, draws=1, seed=seed, upper_bounds=upper, threads=1)
        share = 100 / 15.5 * float(found.point) / (1 - float(found.point))
        counts[round(-10 * math.log(share)) - 1] += 1
    expected = 4000 * np.array([8, 4, 2, 1, 0.5]) / 15.5
    assert (np.abs(counts - expected) < 6 * np.sqrt(expected)).all()
    found = estimate(scores, [5], delta=1e-6, draws=40_000, seed=3, upper_bounds=upper)
    tail = float(np.exp(scores[:5]).sum())
    assert found.lower <= tail / (100 + tail) <= found.upper
    assert found.upper - found.lower < 0.002


def test_uniform_draws_are_uniform_and_do_not_come_back() -> None:
    """Point estimates of one draw name the key that was drawn."""
    weights = np.array([64.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    points = np.array([
        estimate(weights, [0], delta=0.5, draws=1, seed=seed, kind="probs", threads=1).point
        for seed in range(3000)
    ])  # fmt: skip
    _, counts = np.unique(np.round(points / (1 - points) * 64 / 5, 6), return_counts=True)
    assert len(counts) <= 5
    assert np.abs(counts - 600).max() < 6 * math.sqrt(600)


@pytest.mark.parametrize("importance", [False, True])
def test_the_same_draws_for_any_number_of_threads_and_rows(importance: bool) -> None:
    rng = np.random.default_rng(5)
    scores = rng.standard_normal((3, 40, 700)).astype(np.float32)
    kept = rng.random(scores.shape) < 0.2
    upper = scores + 0.25 if importance else None
    options: dict[str, Any] = {"delta": 1e-3, "draws": 100, "seed": 9}
    found = [estimate(scores, kept, upper_bounds=upper, threads=t, **options) for t in (1, 2, 5)]
    assert same(found[0], found[1])
    assert same(found[0], found[2])
    some = None if upper is None else upper[0, :7]
    alone = estimate(scores[0, :7], kept[0, :7], upper_bounds=some, **options)
    assert np.array_equal(found[0].upper[0, :7], alone.upper)
    truth = ck.certify(scores, kept)
    assert (found[0].lower <= truth.tail_mass_upper).all()
    assert (found[0].upper >= truth.tail_mass_lower).all()


def test_row_options_are_those_of_certify() -> None:
    rng = np.random.default_rng(11)
    scores = rng.standard_normal((3, 50))
    keep = rng.random((3, 50)) < 0.5
    options: dict[str, Any] = {
        "scale": 0.5, "lengths": [50, 40, 30], "mask": rng.random((3, 50)) < 0.9,
    }  # fmt: skip
    truth = ck.certify(scores, keep, **options)
    for upper in (None, scores * 0.5 + 0.01):
        found = estimate(scores, keep, delta=1e-9, draws=10, upper_bounds=upper, **options)
        assert (found.lower <= truth.tail_mass_upper).all()
        assert (found.upper >= truth.tail_mass_lower).all()
    flat, indptr = scores.reshape(-1), [0, 20, 20, 150]
    kept = [[0], [], [1, 2]]
    found = estimate(flat, kept, delta=1e-3, draws=5, indptr=indptr, upper_bounds=flat + 0.25)
    assert found.upper.shape == (3,)
    assert found.upper[1] == 0.0
    assert (found.upper >= ck.certify(flat, kept, indptr=indptr).tail_mass_lower).all()


def test_the_family_shares_delta_out() -> None:
    scores = np.random.default_rng(2).standard_normal((8, 400))
    keep = np.arange(400) < np.full((8, 1), 100)
    each = estimate(scores, keep, delta=0.01 / 8, draws=80, seed=4)
    found = estimate(scores, keep, delta=0.01, draws=80, seed=4, family="all")
    np.testing.assert_allclose(each.upper, found.upper, rtol=1e-8)
    assert (found.delta, found.family, found.seed, found.method) == (0.01, "all", 4, "betting")


def test_drawing_stops_once_the_budget_is_decided() -> None:
    scores, kept = row(20_000)
    truth = float(exact_tail(scores, kept))
    options: dict[str, Any] = {"delta": 1e-3, "upper_bounds": scores + np.float32(0.125)}
    assert estimate(scores, kept, draws=16_384, **options).draws == 16_384
    for eps, certified in ((truth * 1.3, True), (truth * 0.7, False)):
        found = estimate(scores, kept, draws=16_384, eps=eps, **options)
        assert found.draws < 16_384
        assert (found.upper <= eps) == certified
        assert (found.lower > eps) != certified


def test_a_confidence_sequence() -> None:
    values = np.random.default_rng(3).random(500).astype(np.float32)
    sequence = montecarlo.Confidence(0.01, horizon=500)
    assert sequence.interval() == (0.0, 1.0)
    widths = []
    for part in np.split(values, 10):
        low, high = sequence.feed(part).interval()
        assert low <= 0.5 <= high
        widths.append(high - low)
    assert sequence.draws == 500
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < 0.2
    finite = montecarlo.Confidence(0.01, population=3).feed([0.0, 1.0])
    assert finite.draws == 2
    for bad, name in (([0.5, 0.5], "population"), ([1.5], "values")):
        with pytest.raises(ck.CertkError, match=name):
            finite.feed(bad)
    assert finite.feed([0.5]).interval() == pytest.approx((0.5, 0.5))


def test_the_clt_is_no_bound() -> None:
    """One spike among many: the normal interval misses nearly always, ours never does."""
    values = np.zeros(50)
    assert montecarlo.clt_interval(values, 0.01) == (0.0, 0.0)
    _, upper = bounds([values], None, 0.01, "betting")
    assert upper[0] > 0.02
    values = np.arange(100) / 100
    low, high = montecarlo.clt_interval(values, 0.025)
    assert high - low == pytest.approx(2 * 1.95996 * np.std(values, ddof=1) / 10, 1e-4)
    assert "NO GUARANTEE" in (montecarlo.clt_interval.__doc__ or "")


def test_a_delta_whose_inverse_is_no_float() -> None:
    """Capital beyond all floats is no proof of 1/delta."""
    for delta in (5e-324, 1e-310, 3e-308):
        draw = [0.0] * 600
        _, (upper,) = bounds([draw], None, delta, "betting")
        with mp.workdps(50):
            known = draw, None, delta, "betting"
            assert above(mpf(float(upper)) * (1 + mpf(10) ** -17), *known)
            assert not above(mpf(float(upper)) / (1 + mpf(10) ** -8), *known)


def test_lower_ends_among_subnormal_numbers() -> None:
    """Quotients that small round by any share; a lower end must not rise with them."""
    rng = np.random.default_rng(0)
    for small in (*(rng.random(20) * 1e-17), 3e-13, 1e20):
        weights = np.array([1e300] + [small] * 300)
        found = estimate(weights, [0], delta=0.5, draws=300, kind="probs")
        tail = 300 * Fraction(small)
        assert holds(found, tail / (tail + Fraction(1e300)))
    assert found.lower > 0.0


def test_of_bounds_alone_it_is_not_known_that_a_row_has_a_key() -> None:
    """An empty row has tail mass 0, so 1 is promised only once a key has been drawn."""
    nothing = np.zeros(3, dtype=bool)
    empty = estimate([-np.inf] * 3, nothing, draws=8, upper_bounds=[0.0] * 3)
    assert (empty.lower, empty.upper) == (0.0, 1.0)
    assert ck.certify(np.full(3, -np.inf), nothing).tail_mass_upper == 0.0
    full = estimate([0.0, -0.5, -0.25], nothing, draws=8, upper_bounds=[0.0] * 3)
    assert (full.lower, full.upper, full.point) == (1.0, 1.0, 1.0)
    # Bounds that say nothing leave everything open.
    found = estimate([0.0, 0.0, 0.0], [0], draws=9, upper_bounds=[2000.0] * 3)
    assert (found.lower, found.upper) == (0.0, 1.0)
    assert 0.0 <= found.point <= 1.0


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 15, 16, 255, 256, 257, 513, 1000])
def test_bounds_of_any_type_and_length(dtype: type, n: int) -> None:
    """Kept keys anywhere, and anything in the bounds there."""
    rng = np.random.default_rng(n)
    upper = (rng.standard_normal(n) * 2).astype(dtype)
    upper[rng.random(n) < 0.1] = -np.inf
    scores = upper.astype(np.float64) - rng.random(n) * 0.3
    kept = rng.random(n) < 0.2
    kept[0] = True
    scores[0] = 0.0
    upper[kept] = rng.choice([np.nan, np.inf, -np.inf, 1.0], int(kept.sum()))
    found = estimate(scores, kept, delta=1e-9, draws=4000, seed=1, upper_bounds=upper)
    assert holds(found, exact_tail(scores, kept))
    assert found.upper - found.lower <= 0.1


def test_a_million_keys_to_ten_per_cent() -> None:
    """Bounds within .2 nats, d = 128, delta = 1e-6: the width is below a tenth of the tail."""
    n, d = 1_000_000, 128
    rng = np.random.default_rng(0)
    query = rng.standard_normal(d).astype(np.float32)
    keys = rng.standard_normal((n, d), dtype=np.float32) / np.float32(math.sqrt(d))
    scores = keys @ query * 2
    upper = scores + np.float32(0.2) * rng.random(n, dtype=np.float32) + np.float32(1e-3)
    keep = np.argpartition(-scores, 2000)[:2000]
    found = estimate(scores, keep, delta=1e-6, draws=1024, seed=1, upper_bounds=upper)
    truth = ck.certify(scores, keep)
    # The odds are the tail relative to the kept mass.
    low, high, real = (v / (1 - v) for v in (found.lower, found.upper, truth.tail_mass_upper))
    assert low <= real * (1 + 1e-5)
    assert high >= real * (1 - 1e-5)
    assert high - low <= 0.1 * real
