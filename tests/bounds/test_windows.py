"""Windows against exact arithmetic, fits against SciPy, effective entries against Arb balls."""

from __future__ import annotations

import math
import pickle
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flint import arb, ctx
from scipy import stats

import certk_rs as ck
from certk_rs import windows
from certk_rs.windows import WindowPolicy

# ------------------------------------------------------------------------------------- policies


def ceil_of_power(alpha: Fraction, exponent: Fraction, n: int) -> int:
    """ceil(alpha n^C) for rational numbers, by integers alone."""
    p, q = exponent.numerator, exponent.denominator
    low, high = 0, n * math.ceil(alpha) + 1
    while low < high:  # the smallest k with (k / alpha)^q >= n^p
        k = (low + high) // 2
        if (Fraction(k) / alpha) ** q >= n**p:
            high = k
        else:
            low = k + 1
    return min(max(low, 1), n)


@pytest.mark.parametrize("alpha", ["1", "2", "1/2", "1/10", "3/10", "7"])
@pytest.mark.parametrize("exponent", ["1/2", "1/3", "2/3", "7/10", "9/10", "1/4"])
def test_sizes_are_those_of_the_decimal_numbers(alpha: str, exponent: str) -> None:
    a, c = Fraction(alpha), Fraction(exponent)
    n = [1, 2, 3, 10, *(r**c.denominator + d for r in (2, 3, 4) for d in (-1, 0, 1)), 10**6, 65536]
    sizes = WindowPolicy(float(a), float(c)).size(n)
    assert sizes.tolist() == [ceil_of_power(a, c, i) for i in n]


def test_sizes_at_the_ends() -> None:
    policy = WindowPolicy(1, 0.5)
    assert policy.size(65536) == 256
    assert policy.size(65537) == 257
    assert policy.size([[1, 4], [5, 9]]).tolist() == [[1, 2], [3, 3]]
    assert WindowPolicy(1e-9, 0.5).size(10**9) == 1
    assert WindowPolicy(1e300, 0.9).size(7) == 7
    assert policy.size(2**62) == 2**31
    assert policy.size([]).shape == (0,)


POLICY = WindowPolicy(1.0, 0.5)


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        (WindowPolicy, (0.0, 0.5), "alpha is 0; pass a finite factor > 0"),
        (WindowPolicy, (math.nan, 0.5), "alpha is NaN"),
        (WindowPolicy, (1.0, 0.0), "C is 0"),
        (WindowPolicy, (1.0, 1.0), "C is 1; pass an exponent strictly between 0 and 1"),
        (WindowPolicy, (1.0, "x"), "C is 'x'; pass a number"),
        (POLICY.size, (0,), "n is 0"),
        (POLICY.size, ([3, -2],), r"n\[1\] is -2; pass a number of keys of at least 1"),
        (POLICY.size, (2.5,), "n has dtype float64"),
        (windows.fit, ([1, 2, 3], [1, 2]), "k has 2 entries but 3"),
        (windows.fit, ([1, 2], [1, 2]), "three pairs"),
        (windows.fit, ([5, 5, 5], [1, 2, 3]), "n is 3 values, 1 of them distinct"),
        (windows.fit, ([1, 0, 3], [1, 2, 3]), r"n\[1\] is 0"),
        (windows.fit, ([1, 2, 3], [1, 2, 0]), r"k\[2\] is 0"),
        (windows.fit, ([1, 2, 3], [1, math.nan, 2]), r"k\[1\] is NaN"),
        (windows.fit, ([[1, 2, 3]], [1, 2, 3]), "n has shape"),
        (partial(windows.fit, level=1.0), ([1, 2, 3], [1, 2, 3]), "level is 1"),
        (windows.effective, ([1.0], 0.0), "eps is 0"),
        (windows.effective, ([1.0], 1.0), "eps is 1"),
        (windows.effective, ([1.0], math.nan), "eps is NaN"),
        (windows.effective, ([[1.0, math.inf]], 0.1), r"scores\[0, 1\] is \+inf"),
        (windows.participation, ([math.nan],), r"scores\[0\] is NaN"),
        (windows.scale_r, (-1.0, np.eye(2), np.eye(2)), "B is -1"),
        (windows.scale_r, (math.nan, np.eye(2), np.eye(2)), "B is NaN"),
        (windows.scale_r, (1.0, np.eye(2), np.eye(3)), "w_k has shape"),
        (windows.scale_r, (1.0, np.ones(2), np.eye(2)), "w_q has shape"),
        (windows.scale_r, (1.0, [[1.0, math.nan]], [[1.0, 2.0]]), r"w_q\[0, 1\] is NaN"),
        (windows.predict, (0, 1.0, 0.1, 0.1), "n is 0"),
        (windows.predict, (5, -1.0, 0.1, 0.1), "R is -1"),
        (windows.predict, (5, math.inf, 0.1, 0.1), "R is inf"),
        (windows.predict, (5, 1.0, 0.0, 0.1), "delta is 0"),
        (windows.predict, (5, 1.0, 0.1, 1.0), "eps is 1"),
        (windows.predict, (5, 1.0, math.nan, 0.1), "delta is NaN"),
    ],
)
def test_bad_arguments(function: Any, arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ck.CertkError, match=words):
        function(*arguments)


# ----------------------------------------------------------------------------------------- fits


@pytest.mark.parametrize("points", [3, 4, 5, 12, 201, 5000])
@pytest.mark.parametrize("level", [1e-9, 0.5, 0.95, 0.999999])
def test_fits_against_scipy(points: int, level: float) -> None:
    rng = np.random.default_rng(points)
    n = np.exp(rng.uniform(3, 12, points))
    k = 2.5 * n**0.6 * np.exp(0.2 * rng.standard_normal(points))
    fit = windows.fit(n, k, level=level)
    line = stats.linregress(np.log(n), np.log(k))
    t = stats.t.ppf(0.5 + level / 2, points - 2)
    assert fit.C - line.slope == pytest.approx(0.0, abs=1e-10)
    assert math.log(fit.alpha) == pytest.approx(line.intercept, rel=1e-9, abs=1e-10)
    want = (line.slope - t * line.stderr, line.slope + t * line.stderr)
    assert fit.C_interval == pytest.approx(want, rel=1e-8)
    error = t * line.intercept_stderr
    with np.errstate(over="ignore"):
        want = np.exp([line.intercept - error, line.intercept + error])
    assert np.array(fit.alpha_interval) == pytest.approx(want, rel=1e-8)
    assert (fit.points, fit.level) == (points, level)


def test_a_perfect_law_and_its_policy() -> None:
    n = 4 ** np.arange(3, 10)
    fit = windows.fit(n, 2 * np.sqrt(n))
    assert (fit.alpha, fit.C) == pytest.approx((2.0, 0.5), rel=1e-12)
    assert fit.residual < 1e-13
    assert fit.C_interval == pytest.approx((0.5, 0.5), rel=1e-12)
    assert fit.policy().C == fit.C
    with pytest.raises(ck.CertkError, match="C is"):
        windows.fit(n, n**1.5).policy()


# ---------------------------------------------------------------------------- effective entries


def exact_effective(x: np.ndarray, eps: float, scale: float = 1.0) -> int:
    """Entries with P_i >= eps, with Arb balls of rising precision; equal rows by fractions."""
    exact = [Fraction(float(v)) * Fraction(scale) for v in x if v > -np.inf]
    if len(set(exact)) <= 1:
        return len(exact) if exact and Fraction(eps) * len(exact) <= 1 else 0
    for bits in (128, 512, 2048, 8192):
        old, ctx.prec = ctx.prec, bits
        try:
            balls = [arb(f.numerator) / arb(f.denominator) for f in exact]
            top = max(range(len(exact)), key=exact.__getitem__)
            weights = [(b - balls[top]).exp() for b in balls]
            line = (
                arb(Fraction(eps).numerator) / arb(Fraction(eps).denominator) * sum(weights, arb(0))
            )
            if all(w > line or w < line for w in weights):
                return sum(bool(w > line) for w in weights)
        finally:
            ctx.prec = old
    raise AssertionError("undecided")


def check(x: Any, eps: float, scale: float = 1.0) -> int:
    found = windows.effective(x, eps, scale=scale)
    want = exact_effective(np.asarray(x, dtype=np.float64), eps, scale)
    assert (int(found.count), int(found.count_upper)) == (want, want)
    return want


def test_random_rows_against_arb() -> None:
    rng = np.random.default_rng(5)
    for trial in range(300):
        n = int(rng.integers(1, 40))
        x = rng.standard_normal(n) * 10 ** rng.uniform(-2, 3)
        if trial % 3 == 0:
            x = np.round(x)
        eps = float(10 ** rng.uniform(-5, 0))
        check(x, min(eps, 0.999), scale=float(rng.choice([1.0, -0.3, 1e-3, 0.0])))


@pytest.mark.parametrize(
    ("x", "eps"),
    [
        ([0.0] * 4, 0.25),
        ([0.0] * 4, math.nextafter(0.25, 1)),
        ([0.0] * 10, 0.1),
        ([0.0] * 3, 1 / 3),
        ([0.0, 0.0, -1000.0], 0.5),
        ([0.0, 0.0, -1000.0], math.nextafter(0.5, 0)),
        ([0.0, 0.0, -650.0, -601.0, -599.0], 0.5),
        ([1e-300, 0.0], 0.5),
        ([2.0**-100, 0.0], 0.5),
        ([2.0**-40, 0.0, -(2.0**-40)], 1 / 3),
        ([math.log(3), 0.0], 0.75),
        ([math.nextafter(math.log(3), 0), 0.0], 0.75),
        ([math.log(3), math.log(2), 0.0], 0.5),
        ([math.log(3), math.log(2), 0.0], 1 / 3),
        ([math.log(3), math.log(2), 0.0], 1 / 6),
        ([-1e308, 1e308], 0.5),
        ([-800.0, 0.0, -709.0], 1e-308),
        ([5.0], 0.999),
        ([100.0, 100.0 - math.log(7)], 0.125),
    ],
)
def test_thresholds_that_are_hit_or_nearly(x: list[float], eps: float) -> None:
    check(x, eps)


def test_thresholds_made_to_be_nearly_hit() -> None:
    # eps is the float64 nearest to a probability of the row: f64 alone cannot tell the side.
    rng = np.random.default_rng(6)
    for _ in range(100):
        x = rng.standard_normal(int(rng.integers(2, 30))) * 3
        p = np.exp(x - x.max())
        p /= p.sum()
        check(x, float(p[rng.integers(0, x.size)]))


def test_probabilities_are_counted_exactly() -> None:
    rng = np.random.default_rng(7)
    for _ in range(100):
        w = rng.integers(0, 6, 12).astype(np.float32)
        if not w.any():
            continue
        total = sum(map(Fraction, w.tolist()))
        eps = float(rng.choice([0.25, 0.1, 0.125, float(Fraction(float(w.max())) / total)]))
        if eps >= 1:
            continue
        found = windows.effective(w, eps, kind="probs")
        assert int(found.count) == sum(
            v > 0 and Fraction(v) >= Fraction(eps) * total for v in w.tolist()
        )
        assert int(found.n) == (w > 0).sum()


def test_batches_masks_and_empty_rows() -> None:
    x = np.zeros((2, 3, 8), dtype=np.float16)
    x[0, 0, 3] = 10
    lengths = np.array([[8, 4, 0], [1, 8, 8]])
    found = windows.effective(x, 0.125, lengths=lengths)
    assert found.count.tolist() == [[1, 4, 0], [1, 8, 8]]
    assert found.n.tolist() == lengths.tolist()
    assert found.ineffective_fraction.tolist() == [[7 / 8, 0, 0], [0, 0, 0]]
    again = pickle.loads(pickle.dumps(found))
    assert again.ineffective_fraction.tolist() == found.ineffective_fraction.tolist()
    assert not again.count.flags.writeable
    assert found.count.dtype == np.int64
    mask = np.arange(8) < 5
    # The float64 nearest to 1/5 is a little more than 1/5.
    assert (windows.effective(x, 0.2, mask=mask).count[0, 1:] == 0).all()
    assert (windows.effective(x, np.nextafter(0.2, 0), mask=mask).count[0, 1:] == 5).all()
    bfloat = torch.tensor(x).to(torch.bfloat16)
    assert (windows.effective(bfloat, 0.125).count == windows.effective(x, 0.125).count).all()
    # Large additive masks blur the scores: the answer says so rather than guess.
    blurred = windows.effective([0.0, 0.0], 0.5, mask=[1e9, 1e9 + 1e-9])
    assert (int(blurred.count), int(blurred.count_upper)) == (0, 2)


# -------------------------------------------------------------------------------- participation


def test_participation_against_arb() -> None:
    rng = np.random.default_rng(9)
    ctx.prec = 200
    for spread in (0.01, 1.0, 5.0, 50.0, 1e4):
        x = rng.standard_normal(257) * spread
        exact = [arb(float(v)) - arb(float(x.max())) for v in x]
        w = [e.exp() for e in exact]
        want = float(sum(w, arb(0)) ** 2 / sum((v * v for v in w), arb(0)))
        assert float(windows.participation(x)) == pytest.approx(want, rel=4e-12)
        assert float(windows.participation(2 * x, scale=0.5)) == pytest.approx(want, rel=4e-12)


def test_participation_at_the_ends() -> None:
    rows = np.zeros((3, 7), dtype=np.float32)
    rows[1, 2] = 1e30
    rows[2] = -np.inf
    ratio = windows.participation(rows)
    assert ratio.tolist() == [7.0, 1.0, 0.0]
    assert not ratio.flags.writeable
    assert windows.participation([0.5, 0.25, 0.25], kind="probs") == 1 / 0.375
    assert windows.participation([-1.7e308, 1.7e308]) == 1.0


# --------------------------------------------------------------------------- scales and exponents


def test_scale_r() -> None:
    rng = np.random.default_rng(10)
    w_q, w_k = rng.standard_normal((2, 600, 16)), rng.standard_normal((600, 16))
    r = windows.scale_r(0.7, w_q, w_k)
    assert r.shape == (2,)
    assert r == pytest.approx(0.49 * np.linalg.norm(w_q @ w_k.T, axis=(1, 2)), rel=1e-13)
    assert windows.scale_r(1.0, 1e200 * np.eye(3), 1e-200 * np.eye(3)) == pytest.approx(
        math.sqrt(3)
    )
    assert windows.scale_r(0.0, w_q, w_k).tolist() == [0.0, 0.0]
    assert windows.scale_r(2, torch.eye(4, dtype=torch.bfloat16), np.eye(4)) == 8.0
    # What it stands for: the standard deviation of a score of independent entries.
    w_q, w_k = rng.standard_normal((2, 20, 5))
    x, y = 0.7 * rng.choice([-1.0, 1.0], (2, 200_000, 20))
    scores = ((x @ w_q) * (y @ w_k)).sum(1)
    assert scores.std() == pytest.approx(float(windows.scale_r(0.7, w_q, w_k)), rel=0.02)


@pytest.mark.parametrize(
    ("n", "scale", "eps"),
    [(1, 2.0, 0.5), (2, 0.1, 0.4), (50, 0.5, 0.03), (50, 3.0, 0.2), (400, 1.0, 0.004),
     (400, 2.5, 0.01), (3000, 1.5, 0.001), (3000, 6.0, 0.05)],
)  # fmt: skip
def test_predicted_sparsity_holds_as_often_as_it_says(n: int, scale: float, eps: float) -> None:
    delta, rows = 0.05, 4000
    found = windows.predict(n, scale, delta, eps)
    scores = np.random.default_rng(n).standard_normal((rows, n)) * scale + 3.0
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    counts = (weights >= eps).sum(axis=1)
    # Three standard errors of a share of so many rows.
    most = delta + 3 * math.sqrt(delta * (1 - delta) / rows)
    assert (weights.max(axis=1) > found.largest_weight).mean() <= most
    assert (counts > found.effective_upper).mean() <= most
    if n >= 400 and scale < 2:
        assert found.effective_expected == pytest.approx(counts.mean(), rel=0.2)
    # It says something: not far above what is seen.
    if n >= 400 and scale < 3:
        assert found.effective_upper <= 1.6 * np.quantile(counts, 0.999) + 20


def test_predicted_sparsity_against_scipy() -> None:
    """From the three statements, with SciPy's laws; the first of them at one cut."""
    for n, scale, delta, eps in ((1000, 1.0, 0.01, 0.002), (10**6, 2.0, 0.1, 1e-5)):
        found = windows.predict(n, scale, delta, eps)
        cut, half = 2 * scale, delta / 2
        growth = math.exp(scale**2 / 2)
        mean = growth * stats.norm.cdf(cut - scale)
        square = growth**4 * stats.norm.cdf(cut - 2 * scale)
        least = mean - math.sqrt(2 * math.log(1 / half) * square / n)
        least = max(least, math.exp(-stats.norm.isf(half) * scale / math.sqrt(n)))
        largest = math.exp(stats.norm.isf(half / n) * scale) / n / least
        assert 0.8 * largest <= found.largest_weight <= largest * (1 + 1e-9)
        p = stats.norm.sf(math.log(n * eps * least) / scale)
        exact = int(stats.binom.isf(half, n, p))
        assert 0.8 * exact <= found.effective_upper <= 1.1 * exact + 20
        expected = n * stats.norm.sf((math.log(n * eps) + scale**2 / 2) / scale)
        assert found.effective_expected == pytest.approx(expected, rel=1e-9)


def test_predicted_sparsity_at_the_ends() -> None:
    equal = windows.predict(100, 0.0, 0.1, 0.01)
    assert (equal.effective_upper, equal.effective_expected) == (100, 100.0)
    assert windows.predict(100, 0.0, 0.1, 0.011).effective_upper == 0
    assert windows.predict(1, 5.0, 0.1, 0.9).largest_weight == 1.0
    assert windows.predict(2**53, 1.0, 1e-9, 1e-3).effective_upper == 0


def test_equal_scores_have_weights_of_exactly_one_nth() -> None:
    """No entry exceeds `largest_weight`, also where 1/n is rounded down."""
    for n in range(1, 2000):
        largest = Fraction(windows.predict(n, 0.0, 0.5, 0.5).largest_weight)
        assert Fraction(1, n) <= largest <= Fraction(1, n) * (1 + Fraction(1, 2**52))
