"""The Gaussian rule against mpmath, the mean k against brute force, fits against SciPy."""

from __future__ import annotations

import math
import pickle
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

import certk_rs as ck
from certk_rs import gaussian

mpmath.mp.dps = 60


def exact_survival(x: mpmath.mpf) -> mpmath.mpf:
    return mpmath.erfc(x / mpmath.sqrt(2)) / 2


def exact_quantile(p: float) -> mpmath.mpf:
    """Phi^-1 by Newton steps on the logarithm, from SciPy's value."""
    p = mpmath.mpf(p)
    sign, tail = (-1, p) if p < 0.5 else (1, 1 - p)
    if tail == mpmath.mpf(1) / 2:
        return mpmath.mpf(0)
    x = mpmath.mpf(float(stats.norm.isf(float(tail))))
    for _ in range(6):
        survival = exact_survival(x)
        density = mpmath.exp(-x * x / 2) / mpmath.sqrt(2 * mpmath.pi)
        x += mpmath.log(survival / tail) * survival / density
    assert abs(exact_survival(x) / tail - 1) < mpmath.mpf(10) ** -45
    return sign * x


def off(got: float, want: mpmath.mpf) -> float:
    return float(abs(mpmath.mpf(float(got)) / want - 1))


# Budgets in both tails: 1 - 2^-53 is the largest float64 below 1.
LEVELS = [
    *(10.0**-e for e in range(1, 301, 7)),
    *(1 - 2.0**-e for e in range(2, 54, 3)),
    *(0.5 + s * d for s in (-1, 1) for d in (0.4251, 0.425, 0.4249, 0.3, 0.075, 1e-3, 1e-12)),
]


def test_the_normal_law_in_both_tails() -> None:
    # At sigma = 0 the threshold is the quantile itself.
    assert max(off(gaussian.threshold(0.0, p), exact_quantile(p)) for p in LEVELS) < 1e-13
    assert gaussian.threshold(0.0, 0.5) == 0.0
    # At eps = 1/2 the quantile is 0, and keep_fraction is the survival function itself.
    for x in np.concatenate([np.linspace(1e-9, 37, 100), [1e-300, 0.1, 5.6568, 37.0]]):
        limit = 1e-13 if x <= 8 else 1e-12
        assert off(gaussian.keep_fraction(x, 0.5), exact_survival(mpmath.mpf(x))) < limit


def test_the_rule_at_any_threshold() -> None:
    """The promise of the documentation: 1e-13 up to a threshold of 8, 1e-12 up to 37."""
    rng = np.random.default_rng(5)
    for c in np.concatenate([np.linspace(-8, 8, 60), np.linspace(8, 37, 40)]):
        eps = 10.0 ** -rng.uniform(0.01, 100)
        quantile = exact_quantile(eps)
        if (sigma := float(c) - float(quantile)) <= 0:
            continue
        exact = mpmath.mpf(sigma) + quantile
        want = exact_survival(exact)
        assert abs(float(gaussian.threshold(sigma, eps)) - float(exact)) < 1e-13
        assert off(gaussian.keep_fraction(sigma, eps), want) < (1e-13 if c <= 8 else 1e-12)
        # The same formula is its own inverse.
        share = float(want)
        if share < 1:
            want = exact_survival(mpmath.mpf(sigma) + exact_quantile(share))
            assert off(gaussian.tail_mass(sigma, share), want) < 1e-12


def test_the_paper_s_values() -> None:
    got = gaussian.keep_fraction(np.array([1, 2, 2.5, 3, 3.5, 4, 5]), [[1e-2], [1e-3]])
    assert got.shape == (2, 7)
    assert not got.flags.writeable
    want = [
        [0.908, 0.628, 0.431, 0.250, 0.120, 0.047, 0.004],
        [0.982, 0.862, 0.722, 0.536, 0.341, 0.181, 0.028],
    ]
    assert (np.abs(got - want) <= 5.01e-4).all()


def test_degenerate_rules_are_exact() -> None:
    assert gaussian.keep_fraction(0, 0.25) == 0.75
    assert gaussian.tail_mass(0.0, 0.75) == 0.25
    assert gaussian.tail_mass(3.0, [0.0, 1.0]).tolist() == [1.0, 0.0]
    assert gaussian.keep_fraction(np.zeros((0, 2)), 0.1).shape == (0, 2)
    assert gaussian.keep_fraction(1e300, 0.1) == 0.0
    assert gaussian.keep_fraction(torch.tensor(1.5), 0.1) == gaussian.keep_fraction(1.5, 0.1)


# ---------------------------------------------------------------------------------------- plan


def brute_force(n: int, sigma: float, eps: float, rows: int) -> tuple[float, float]:
    """Return the mean minimal k of sorted rows and its standard error."""
    scores = np.sort(sigma * np.random.default_rng(0).standard_normal((rows, n)), axis=1)
    weights = np.exp(scores - scores[:, -1:])
    tails = np.cumsum(weights, axis=1)
    k = np.maximum(n - (tails <= eps * tails[:, -1:]).sum(axis=1), 1)
    return float(k.mean()), float(k.std(ddof=1) / math.sqrt(rows))


@pytest.mark.parametrize(
    ("n", "sigma", "eps", "rows"),
    [
        (2, 1.0, 0.1, 40000),
        (17, 2.0, 0.05, 20000),
        (128, 2.5, 0.01, 8000),
        (128, 5.0, 0.01, 8000),
        (1024, 3.0, 1e-3, 2000),
        (1025, 6.0, 0.01, 4000),
        (5000, 0.5, 0.3, 500),
        (20000, 4.0, 0.01, 500),
        (20000, 9.0, 0.1, 1500),
    ],
)
def test_the_mean_k_against_brute_force(n: int, sigma: float, eps: float, rows: int) -> None:
    found = gaussian.plan(n, sigma, eps)
    mean, error = brute_force(n, sigma, eps, rows)
    # One part in a thousand is what grouping order statistics may cost.
    allowed = 4.5 * math.hypot(error, found.k_standard_error) + 1e-3 * mean * (n > 1024)
    assert abs(found.k - mean) <= allowed, (found.k, mean, allowed)
    assert found.k_standard_error < 0.04 * found.k


@pytest.mark.parametrize(
    ("n", "sigma", "share", "within"),
    [(128, 2.5, 0.474, 1.5e-3), (128, 4.0, 0.164, 1.5e-3),
     (65536, 2.5, 0.4325, 1.5e-3), (65536, 4.0, 0.0599, 2e-3)],
)  # fmt: skip
def test_the_theory_s_simulated_values(n: int, sigma: float, share: float, within: float) -> None:
    found = gaussian.plan(n, sigma, 0.01)
    assert abs(found.scored_ratio - share) < within + 3 * found.k_standard_error / n


# The last from 705 sorted rows, 2347 +- 47: one row's k has a standard deviation of 1260 there.
@pytest.mark.parametrize(("bits", "want"), [(8, 53), (12, 216), (16, 768), (20, 2347)])
def test_freezing(bits: int, want: float) -> None:
    n = 2**bits
    edge = math.sqrt(2 * math.log(n))
    found = gaussian.plan(n, 1.06 * edge, 0.01)
    assert found.frozen
    assert found.freezing_sigma == pytest.approx(edge, rel=1e-15)
    assert abs(found.k - want) < 0.06 * want + 3 * found.k_standard_error
    assert 5 < gaussian.plan(n, 2.12 * edge, 0.01).k < 21
    assert not gaussian.plan(n, 0.99 * edge, 0.01).frozen


def test_long_rows_follow_the_rule() -> None:
    for n in (10**7, 10**12, 2**53):
        found = gaussian.plan(n, 2.0, 0.01)
        assert abs(found.k / found.asymptotic_k - 1) < 1e-3 + 5 * found.k_standard_error / found.k


def test_a_plan_depends_on_its_arguments_alone() -> None:
    one = gaussian.plan(3000, 3.0, 0.05, seed=3, threads=1)
    assert one == gaussian.plan(3000, 3.0, 0.05, seed=3, threads=2)
    assert one.k != gaussian.plan(3000, 3.0, 0.05, seed=4).k
    assert pickle.loads(pickle.dumps(one)) == one


@pytest.mark.parametrize(
    ("n", "sigma", "eps", "k"),
    [(1, 5.0, 0.9, 1), (4, 0.0, 0.25, 3), (4, 0, 0.2499, 4), (9, 0, 0.99, 1), (10, 0, 0.1, 9)],
)
def test_plans_without_randomness_are_exact(n: int, sigma: float, eps: float, k: int) -> None:
    found = gaussian.plan(n, sigma, eps)
    assert (found.k, found.k_standard_error, found.rows) == (ck.select([0.0] * n, eps).k, 0.0, 0)
    assert found.k == k


@pytest.mark.parametrize(
    ("n", "sigma", "advice", "why"),
    [(4096, 0.5, "leave dense", "costs more"), (4096, 2.0, "prune a little", "if the scores"),
     (4096, 3.0, "prune", "if the scores"), (128, 5.0, "prune", "freeze")],
)  # fmt: skip
def test_advice(n: int, sigma: float, advice: str, why: str) -> None:
    found = gaussian.plan(n, sigma, 0.01)
    assert (found.advice, found.worthwhile) == (advice, advice != "leave dense")
    assert why in found.reason
    assert found.speedup == pytest.approx(1 / found.scored_ratio)


# ----------------------------------------------------------------------------------------- fit

FIELDS = ("mean", "sigma", "ks_distance", "skewness", "excess_kurtosis")


def check(fit: gaussian.GaussianFit, i: Any, x: np.ndarray) -> None:
    x = np.asarray(x, np.float64)
    mean, sigma = x.mean(), x.std()
    distance = stats.kstest(x, "norm", args=(mean, sigma)).statistic
    want = (mean, sigma, distance, stats.skew(x), stats.kurtosis(x))
    found = [float(getattr(fit, name)[i]) for name in FIELDS]
    assert found == pytest.approx(want, rel=1e-11, abs=1e-12)
    assert fit.n[i] == len(x)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_fits_against_numpy_and_scipy(dtype: str) -> None:
    rng = np.random.default_rng(1)
    stored = torch.tensor(rng.gamma(2.0, size=(2, 3, 301)) * 3 - 5).to(getattr(torch, dtype))
    fit = gaussian.fit(stored, eps=0.1, scale=-0.7)
    for i in np.ndindex(2, 3):
        check(fit, i, -0.7 * stored.double().numpy()[i])
        assert fit.predicted[i] == gaussian.keep_fraction(fit.sigma[i], 0.1)
    assert (fit.actual == ck.select(stored, 0.1, scale=-0.7).k / 301).all()


def test_fits_see_row_options() -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((4, 50)).astype(np.float32)
    mask = (rng.random((4, 50)) < 0.7) | (np.arange(50) == 0)
    lengths = np.array([50, 20, 1, 0])
    fit = gaussian.fit(x, eps=[0.1, 0.2, 0.3, 0.0], mask=mask, lengths=lengths)
    for i in range(2):
        check(fit, i, x[i, mask[i] & (np.arange(50) < lengths[i])])
    assert fit.n.tolist()[2:] == [1, 0]
    assert (fit.sigma[2], fit.ks_distance[2], fit.mean[2]) == (0.0, 0.0, x[2, 0])
    assert (fit.predicted[2], fit.actual[2]) == (0.7, 1.0)
    alone = [getattr(fit, name)[3] for name in (*FIELDS, "predicted", "actual")]
    assert np.isnan(alone).all()
    causal = gaussian.fit(x, causal_offset=2)
    check(causal, 1, x[1, :4])
    bias = rng.standard_normal((4, 50))
    check(gaussian.fit(x, mask=bias, scale=2.0), 0, 2.0 * x[0].astype(float) + bias[0])
    ragged = gaussian.fit(x.reshape(-1), indptr=[0, 10, 10, 200], eps=0.1)
    assert ragged.n.tolist() == [10, 0, 190]
    check(ragged, 2, x.reshape(-1)[10:])
    check(gaussian.fit(np.exp(x[0].astype(float)), kind="probs", eps=0.05), (), x[0])


def test_rows_of_several_portions() -> None:
    """More scores than are read at once, and more rows."""
    rng = np.random.default_rng(6)
    long = rng.standard_normal((3, 600_000)).astype(np.float32)
    assert gaussian.fit(long).sigma == pytest.approx(long.astype(float).std(1), rel=1e-12)
    many = rng.standard_normal((70_000, 3))
    fit = gaussian.fit(many)
    assert fit.mean == pytest.approx(many.mean(1), rel=1e-9, abs=1e-12)
    assert (fit.n == 3).all()


def test_extreme_rows() -> None:
    equal = gaussian.fit([[7.0] * 5, [-3.4e38] * 5], eps=0.25)
    assert equal.sigma.tolist() == [0.0, 0.0]
    assert equal.predicted.tolist() == [0.75, 0.75]
    assert equal.mean.tolist() == [7.0, -3.4e38]
    assert np.isnan(equal.skewness).all()
    two = gaussian.fit([-1e308, 1e308, -math.inf], scale=-1e-308, eps=0.25)
    assert (int(two.n), float(two.sigma)) == (2, pytest.approx(1.0, rel=1e-12))
    assert float(two.excess_kurtosis) == pytest.approx(-2.0, abs=1e-13)
    shifted = gaussian.fit(np.arange(1000) + 1e9)
    assert float(shifted.sigma) == pytest.approx(math.sqrt((1000**2 - 1) / 12), rel=1e-12)


def test_normal_rows_fit_well_and_others_do_not() -> None:
    rng = np.random.default_rng(4)
    normal = gaussian.fit(rng.standard_normal((3, 20000)) * 2.5, eps=0.01)
    assert (normal.ks_distance < 0.01).all()
    assert (np.abs(normal.predicted - normal.actual) < 0.04).all()
    assert (gaussian.fit(rng.exponential(size=(3, 20000))).ks_distance > 0.1).all()


def test_a_fit_is_frozen_and_picklable() -> None:
    fit = gaussian.fit(np.arange(12.0).reshape(3, 4), eps=0.1)
    again = pickle.loads(pickle.dumps(fit))
    assert (again.sigma == fit.sigma).all()
    assert not any(each.sigma.flags.writeable or each.n.flags.writeable for each in (fit, again))
    with pytest.raises(AttributeError):
        fit.sigma = fit.mean  # type: ignore[misc]
