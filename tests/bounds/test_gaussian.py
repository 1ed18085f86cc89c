"""The Gaussian rule against mpmath, the mean k against brute force, fits against NumPy."""

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
from repository import EXAMPLE

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
    1e-300,
    *(1 - 2.0**-e for e in range(2, 54, 3)),
    *(0.5 + s * d for s in (-1, 1) for d in (0.4251, 0.425, 0.4249, 0.3, 0.075, 1e-3, 1e-12)),
    math.exp(-25.0),
    1 - math.exp(-25.0),
]


def test_the_quantile_in_both_tails() -> None:
    # At sigma = 0 the threshold is the quantile itself.
    worst = max(off(float(gaussian.threshold(0.0, p)), exact_quantile(p)) for p in LEVELS)
    assert worst < 1e-13
    assert gaussian.threshold(0.0, 0.5) == 0.0


def test_the_survival_function_in_both_tails() -> None:
    # At eps = 1/2 the quantile is 0, and keep_fraction is the survival function itself.
    for x in np.concatenate([np.linspace(1e-9, 37, 500), [1e-300, 0.1, 5.6568, 37.0]]):
        assert off(float(gaussian.keep_fraction(x, 0.5)), exact_survival(mpmath.mpf(x))) < 1e-13
    # And towards 1: the distance from 1 is that of the other tail.
    for eps in (1e-3, 1e-12, 1e-16, 1e-30):
        for sigma in (1e-3, 0.5, 1.0):
            want = exact_survival(mpmath.mpf(sigma) + exact_quantile(eps))
            assert off(float(gaussian.keep_fraction(sigma, eps)), want) < 1e-13


@pytest.mark.parametrize("eps", [0.3, 1e-2, 1e-6, 1e-30])
def test_the_rule_against_mpmath(eps: float) -> None:
    for sigma in (0.01, 1.0, 2.5, 4.0, 7.0, 20.0):
        c = mpmath.mpf(sigma) + exact_quantile(eps)
        assert abs(float(gaussian.threshold(sigma, eps)) - float(c)) < 1e-13
        assert off(float(gaussian.keep_fraction(sigma, eps)), exact_survival(c)) < 1e-13
        # The mass below c of the tilted law N(sigma, 1), from the share kept.
        share = min(float(exact_survival(c)), 1 - 2.0**-53)
        kept_above = -exact_quantile(share)
        want = exact_survival(mpmath.mpf(sigma) - kept_above)
        assert off(float(gaussian.tail_mass(sigma, share)), want) < 1e-12


def test_the_rule_at_any_threshold() -> None:
    """The promise of the documentation: 1e-13 up to a threshold of 8, 1e-12 up to 37."""
    rng = np.random.default_rng(5)
    for c in np.concatenate([np.linspace(-8, 8, 60), np.linspace(8, 37, 40)]):
        eps = 10.0 ** -rng.uniform(0.01, 100)
        quantile = exact_quantile(eps)
        if (sigma := float(c) - float(quantile)) > 0:
            want = exact_survival(mpmath.mpf(sigma) + quantile)
            limit = 1e-13 if c <= 8 else 1e-12
            assert off(float(gaussian.keep_fraction(sigma, eps)), want) < limit


def test_the_paper_s_values() -> None:
    sigma = np.array([1, 2, 2.5, 3, 3.5, 4, 5])
    got = gaussian.keep_fraction(sigma, [[1e-2], [1e-3]])
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


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gaussian.keep_fraction(-1.0, 0.1), "sigma is -1"),
        (lambda: gaussian.keep_fraction([1.0, math.nan], 0.1), r"sigma\[1\] is NaN"),
        (lambda: gaussian.keep_fraction(math.inf, 0.1), "sigma is inf"),
        (lambda: gaussian.threshold(1.0, 0.0), "eps is 0"),
        (lambda: gaussian.threshold([[1.0], [2.0]], [0.5, 1.0]), r"eps\[0, 1\] is 1"),
        (lambda: gaussian.tail_mass(1.0, 1.5), "fraction is 1.5"),
        (lambda: gaussian.keep_fraction([1.0, 2.0], [0.1, 0.2, 0.3]), "eps has shape"),
        (lambda: gaussian.keep_fraction("x", 0.1), "sigma is a str"),
        (lambda: gaussian.keep_fraction(True, 0.1), "sigma"),
        (lambda: gaussian.plan(0, 1.0, 0.1), "n is 0"),
        (lambda: gaussian.plan(2**60, 1.0, 0.1), "n is"),
        (lambda: gaussian.plan(10.5, 1.0, 0.1), "n is 10.5"),
        (lambda: gaussian.plan(10, math.nan, 0.1), "sigma is NaN"),
        (lambda: gaussian.plan(10, -1, 0.1), "sigma is -1"),
        (lambda: gaussian.plan(10, 1.0, 1.0), "eps is 1"),
        (lambda: gaussian.plan(10, 1.0, 0.0), "eps is 0"),
        (lambda: gaussian.plan(10, 1.0, 0.1, seed=-1), "seed is -1"),
        (lambda: gaussian.plan(10, 1.0, 0.1, threads=0), "threads is 0"),
        (lambda: gaussian.fit([[1.0, math.nan]]), r"scores\[0, 1\] is NaN"),
        (lambda: gaussian.fit([1.0, 2.0], eps=1.0), "eps is 1"),
        (lambda: gaussian.fit([1.0, 2.0], eps=[0.1, 0.2]), "eps has shape"),
        (lambda: gaussian.fit([1.0, 2.0], lengths=3), "lengths"),
        (lambda: gaussian.fit([1.0, 2.0], scale=math.inf), "scale is inf"),
    ],
)
def test_bad_arguments(call: Any, words: str) -> None:
    with pytest.raises(ck.CertkError, match=words):
        call()


# ---------------------------------------------------------------------------------------- plan


def brute_force(n: int, sigma: float, eps: float, rows: int, seed: int) -> tuple[float, float]:
    """Mean minimal k and its standard error: NumPy's normal numbers, sorted and summed."""
    rng = np.random.default_rng(seed)
    k = []
    for _ in range(rows):
        x = np.sort(sigma * rng.standard_normal(n))
        tail = np.cumsum(np.exp(x - x[-1]))
        k.append(n - np.searchsorted(tail, eps * tail[-1], side="right"))
    return float(np.mean(k)), float(np.std(k, ddof=1) / math.sqrt(rows))


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
    mean, error = brute_force(n, sigma, eps, rows, seed=n)
    # One part in a thousand is what grouping order statistics may cost.
    allowed = 4.5 * math.hypot(error, found.k_standard_error) + 1e-3 * mean * (n > 1024)
    assert abs(found.k - mean) <= allowed, (found.k, mean, allowed)
    assert found.k_standard_error < 0.02 * found.k


def test_the_theory_s_simulated_values() -> None:
    for n, sigma, want, within in [
        (128, 2.5, 0.474, 1.5e-3),
        (128, 4.0, 0.164, 1.5e-3),
        (65536, 2.5, 0.4325, 1.5e-3),
        (65536, 4.0, 0.0599, 2e-3),
    ]:
        found = gaussian.plan(n, sigma, 0.01)
        assert abs(found.scored_ratio - want) < within + 3 * found.k_standard_error / n
    # Frozen: at 128 keys the rule is too low by the factors of the theory.
    for sigma, factor in ((4.0, 3.5), (5.0, 24.0)):
        found = gaussian.plan(128, sigma, 0.01)
        assert abs(found.k / found.asymptotic_k / factor - 1) < 0.1


# The last from 705 sorted rows, 2347 +- 47: one row's k has a standard deviation of 1260 there.
@pytest.mark.parametrize(("bits", "want"), [(8, 53), (12, 216), (16, 768), (20, 2347)])
def test_freezing(bits: int, want: float) -> None:
    n = 2**bits
    edge = math.sqrt(2 * math.log(n))
    found = gaussian.plan(n, 1.06 * edge, 0.01)
    assert found.frozen
    assert found.freezing_sigma == pytest.approx(edge, rel=1e-15)
    assert abs(found.k / want - 1) < 0.06
    assert 5 < gaussian.plan(n, 2.12 * edge, 0.01).k < 21
    assert not gaussian.plan(n, 0.99 * edge, 0.01).frozen


def test_long_rows_follow_the_rule() -> None:
    for n in (10**7, 10**12):
        found = gaussian.plan(n, 2.0, 0.01)
        assert abs(found.k / found.asymptotic_k - 1) < 1e-3 + 5 * found.k_standard_error / found.k


def test_a_plan_depends_on_its_arguments_alone() -> None:
    one = gaussian.plan(3000, 3.0, 0.05, seed=3, threads=1)
    assert one == gaussian.plan(3000, 3.0, 0.05, seed=3, threads=2)
    assert one.k != gaussian.plan(3000, 3.0, 0.05, seed=4).k
    assert pickle.loads(pickle.dumps(one)) == one


def test_plans_without_randomness_are_exact() -> None:
    for n, sigma, eps, k in [
        (1, 5.0, 0.9, 1),
        (4, 0.0, 0.25, 3),
        (4, 0, 0.2499, 4),
        (9, 0, 0.99, 1),
    ]:
        found = gaussian.plan(n, sigma, eps)
        assert (found.k, found.k_standard_error, found.rows) == (k, 0.0, 0)
        assert k == ck.select([0.0] * n, eps).k


def test_advice() -> None:
    dense = gaussian.plan(4096, 0.5, 0.01)
    assert (dense.advice, dense.worthwhile) == ("leave dense", False)
    assert "costs more" in dense.reason
    little = gaussian.plan(4096, 2.0, 0.01)
    assert (little.advice, little.worthwhile) == ("prune a little", True)
    much = gaussian.plan(4096, 3.0, 0.01)
    assert much.advice == "prune"
    assert much.speedup == pytest.approx(1 / much.scored_ratio)
    assert "freeze" in gaussian.plan(128, 5.0, 0.01).reason


# ----------------------------------------------------------------------------------------- fit


def expected_fit(x: np.ndarray) -> tuple[float, ...]:
    mean, sigma = x.mean(), x.std()
    return (
        mean,
        sigma,
        stats.kstest(x, "norm", args=(mean, sigma)).statistic,
        stats.skew(x),
        stats.kurtosis(x),
    )


def fields(fit: Any, i: Any) -> tuple[float, ...]:
    found = (fit.mean, fit.sigma, fit.ks_distance, fit.skewness, fit.excess_kurtosis)
    return tuple(float(field[i]) for field in found)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_fits_against_numpy_and_scipy(dtype: str) -> None:
    rng = np.random.default_rng(1)
    stored = torch.tensor(rng.gamma(2.0, size=(2, 3, 301)) * 3 - 5).to(getattr(torch, dtype))
    fit = gaussian.fit(stored, eps=0.1, scale=-0.7)
    x = -0.7 * stored.double().numpy()
    assert fit.mean.shape == (2, 3)
    for i in np.ndindex(2, 3):
        assert fields(fit, i) == pytest.approx(expected_fit(x[i]), rel=1e-11, abs=1e-12)
        assert fit.predicted[i] == gaussian.keep_fraction(fit.sigma[i], 0.1)
    assert (fit.n == 301).all()
    assert (fit.actual == ck.select(stored, 0.1, scale=-0.7).k / 301).all()


def test_fits_see_masks_lengths_and_causality() -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((4, 50)).astype(np.float32)
    mask = rng.random((4, 50)) < 0.7
    lengths = np.array([50, 20, 1, 0])
    fit = gaussian.fit(
        x, eps=[0.1, 0.2, 0.3, 0.0], mask=mask | (np.arange(50) == 0), lengths=lengths
    )
    for i in range(2):
        seen = (mask[i] | (np.arange(50) == 0)) & (np.arange(50) < lengths[i])
        assert fields(fit, i) == pytest.approx(expected_fit(x[i, seen].astype(float)), rel=1e-11)
        assert fit.n[i] == seen.sum()
    assert fit.n.tolist()[2:] == [1, 0]
    assert (fit.sigma[2], fit.ks_distance[2], fit.mean[2]) == (0.0, 0.0, x[2, 0])
    assert (fit.predicted[2], fit.actual[2]) == (0.7, 1.0)
    assert all(math.isnan(value) for value in (*fields(fit, 3), fit.predicted[3], fit.actual[3]))
    causal = gaussian.fit(x, causal_offset=2)
    assert causal.n.tolist() == [3, 4, 5, 6]
    assert causal.sigma[1] == pytest.approx(x[1, :4].astype(float).std(), rel=1e-12)
    bias = rng.standard_normal((4, 50))
    additive = gaussian.fit(x, mask=bias, scale=2.0)
    assert additive.sigma[0] == pytest.approx((2.0 * x[0].astype(float) + bias[0]).std(), rel=1e-12)
    assert additive.mean[0] == pytest.approx((2.0 * x[0].astype(float) + bias[0]).mean(), rel=1e-12)
    ragged = gaussian.fit(x.reshape(-1), indptr=[0, 10, 10, 200], eps=0.1)
    assert ragged.n.tolist() == [10, 0, 190]
    assert ragged.sigma[2] == pytest.approx(x.reshape(-1)[10:].astype(float).std(), rel=1e-12)


def test_fits_of_probabilities_take_logarithms() -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal(100)
    fit = gaussian.fit(np.exp(x), kind="probs", eps=0.05)
    assert float(fit.sigma) == pytest.approx(x.std(), rel=1e-12)
    assert float(fit.mean) == pytest.approx(x.mean(), abs=1e-12)


def test_extreme_rows() -> None:
    equal = gaussian.fit([[7.0] * 5, [-3.4e38] * 5], eps=0.25)
    assert equal.sigma.tolist() == [0.0, 0.0]
    assert equal.predicted.tolist() == [0.75, 0.75]
    assert equal.mean.tolist() == [7.0, -3.4e38]
    assert np.isnan(equal.skewness).all()
    huge = gaussian.fit([-1.5e308, 1.5e308, 0.0], scale=1e-308)
    assert float(huge.sigma) == pytest.approx(1.5 * math.sqrt(2 / 3), rel=1e-12)
    shifted = gaussian.fit(np.arange(1000) + 1e9)
    assert float(shifted.sigma) == pytest.approx(math.sqrt((1000**2 - 1) / 12), rel=1e-12)


def test_normal_rows_fit_well_and_others_do_not() -> None:
    rng = np.random.default_rng(4)
    normal = gaussian.fit(rng.standard_normal((3, 20000)) * 2.5, eps=0.01)
    assert (normal.ks_distance < 0.01).all()
    assert normal.predicted is not None
    assert normal.actual is not None
    assert (np.abs(normal.predicted - normal.actual) < 0.04).all()
    assert (gaussian.fit(rng.exponential(size=(3, 20000))).ks_distance > 0.1).all()


def test_a_fit_is_frozen_and_picklable() -> None:
    fit = gaussian.fit(np.arange(12.0).reshape(3, 4), eps=0.1)
    assert not fit.sigma.flags.writeable
    again = pickle.loads(pickle.dumps(fit))
    assert (again.sigma == fit.sigma).all()
    assert not again.actual.flags.writeable
    with pytest.raises(AttributeError):
        fit.sigma = fit.mean  # type: ignore[misc]


def test_real_rows_follow_the_rule_roughly() -> None:
    from safetensors.numpy import load_file

    stored = load_file(EXAMPLE)
    gaps = []
    for layer in sorted(name for name in stored if name.endswith(".query")):
        q = stored[layer].astype(np.float64).reshape(-1, *stored[layer].shape[-2:])
        key = stored[layer.replace(".query", ".key")].astype(np.float64)
        key = key.reshape(-1, *key.shape[-2:])
        scores = q @ np.repeat(key, len(q) // len(key), 0).swapaxes(1, 2) / math.sqrt(q.shape[-1])
        fit = gaussian.fit(scores, eps=0.1)
        gaps.append(abs(float(fit.predicted.mean() - fit.actual.mean())))
    # Real scores are not normal: within a few per cent, but no closer.
    assert max(gaps) < 0.08
    assert np.mean(gaps) < 0.03
