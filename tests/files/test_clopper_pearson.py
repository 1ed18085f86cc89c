"""The bounds of Clopper and Pearson against SciPy's beta distribution and exact binomials."""

from __future__ import annotations

from fractions import Fraction
from math import comb

import numpy as np
import pytest
from mpmath import mp, mpf
from scipy.stats import beta

from certk_rs import CertkError
from certk_rs._jobs.held_out import clopper_pearson


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.999])
def test_the_ends_are_quantiles_of_beta(confidence: float) -> None:
    side = (1 - confidence) / 2
    for trials in (1, 2, 8, 31, 100, 1000, 100_000):
        for hits in sorted({0, 1, trials // 3, trials // 2, trials - 1, trials}):
            low, high = clopper_pearson(hits, trials, confidence)
            below = beta.ppf(side, hits, trials - hits + 1) if hits else 0.0
            above = beta.ppf(1 - side, hits + 1, trials - hits) if hits < trials else 1.0
            # SciPy's own quantiles are good to some 1e-12.
            assert low <= below * (1 + 1e-11)
            assert high >= above * (1 - 1e-11)
            np.testing.assert_allclose([low, high], [below, above], rtol=3e-9)


def test_the_ends_are_on_the_safe_side_of_exact_binomials() -> None:
    side = Fraction(1, 40)
    for trials in (1, 5, 17, 40):
        for hits in range(trials + 1):
            low, high = map(Fraction, clopper_pearson(hits, trials))

            def at_most(count: int, p: Fraction, trials: int = trials) -> Fraction:
                terms = (comb(trials, i) * p**i * (1 - p) ** (trials - i) for i in range(count + 1))
                return sum(terms, Fraction(0))

            if hits:
                assert 1 - at_most(hits - 1, low) <= side
            if hits < trials:
                assert at_most(hits, high) <= side


@pytest.mark.parametrize("trials", [10**6, 10**7, 10**9])
@pytest.mark.parametrize("hits", [1, 2, 8])
def test_the_ends_are_on_the_safe_side_for_very_many_trials(hits: int, trials: int) -> None:
    low, high = clopper_pearson(hits, trials)
    with mp.workdps(50):

        def at_most(count: int, p: mpf) -> mpf:
            return mp.fsum(
                mp.binomial(trials, i) * p**i * (1 - p) ** (trials - i) for i in range(count + 1)
            )

        assert 1 - at_most(hits - 1, mpf(low)) <= mpf(1) / 40
        assert at_most(hits, mpf(high)) <= mpf(1) / 40


def test_nothing_is_known_from_nothing() -> None:
    assert clopper_pearson(0, 0) == (0.0, 1.0)


def test_an_interval_covers_as_often_as_it_says() -> None:
    rng = np.random.default_rng(4)
    for p in (0.01, 0.2, 0.7):
        ends = [clopper_pearson(hits, 50, 0.9) for hits in range(51)]
        hits = rng.binomial(50, p, 20_000)
        covered = np.array([low <= p <= high for low, high in ends])[hits].mean()
        assert covered >= 0.9 - 0.01


@pytest.mark.parametrize("arguments", [(3, 2), (-1, 2), (1, 2, 0.0), (1, 2, 1.0)])
def test_what_cannot_be_is_refused(arguments: tuple[float, ...]) -> None:
    with pytest.raises(CertkError, match=r"hits is|confidence is"):
        clopper_pearson(*arguments)
