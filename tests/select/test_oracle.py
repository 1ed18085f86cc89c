"""The oracle against closed forms and against itself: it may not be wrong where it is used."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from flint import arb

from bulk_oracle import Truth
from generators import BFLOAT16, make_case
from oracle import ExactRow, Precision, outward


def test_two_levels_agree_with_the_closed_form() -> None:
    """k = 3 of 10 at a gap of exactly 7: tau = (n - k) / (n - k + k e^7)."""
    row = ExactRow(np.array([0.0] * 4 + [7.0] * 3 + [0.0] * 3, dtype=np.float32))
    assert row.ranked()[:3] == [4, 5, 6]
    with Precision(128):
        expected = arb(7) / (arb(7) + arb(3) * arb(7).exp())
    assert row.tail_mass([4, 5, 6]).overlaps(expected)
    low, high = outward(expected)
    assert high == math.nextafter(low, 1.0)
    assert row.minimal_k(high) == 3
    assert row.minimal_k(low) == 4


def test_ties_are_decided_in_integers() -> None:
    """Four equal scores: 3 of 4 leave exactly 1/4; the float64 step below needs all four."""
    row = ExactRow(np.full(4, -3.7, dtype=np.float64), scale=0.1)
    assert row.minimal_k(0.25) == 3
    assert row.minimal_k(math.nextafter(0.25, 0.0)) == 4
    assert row.minimal_set(0.5) == [0, 1]


def test_what_no_precision_shows_is_found_by_cancelling() -> None:
    """(0, 0, -1e38) at 1/2: one zero leaves a little more than half."""
    row = ExactRow(np.array([0.0, 0.0, -1e38], dtype=np.float32))
    assert row.minimal_k(0.5) == 2
    assert not row.fits([0], 0.5)


def test_probs_are_exact_fractions() -> None:
    """Weights are taken as stored, zeros are masked, sums are exact."""
    row = ExactRow(np.array([3e38, 0.0, 3e38, 1.5e38], dtype=np.float32), kind="probs")
    assert row.visible.tolist() == [0, 2, 3]
    assert row.exact_tail([0]) == 1 - Fraction(float(np.float32(3e38))) / (
        2 * Fraction(float(np.float32(3e38))) + Fraction(float(np.float32(1.5e38)))
    )


def test_additive_masks_and_scale_are_exact() -> None:
    """Scale * s + mask as real numbers: a tie that no float arithmetic sees, and its break."""
    scores = np.array([1e5, 0.0], dtype=np.float64)
    product = Fraction(0.1) * 100000
    assert product != 10000
    row = ExactRow(scores, scale=0.1, mask=np.array([0.0, 10000.0]))
    assert row.ranked() == [0, 1]
    row = ExactRow(scores, scale=-0.1, mask=np.array([0.0, -10000.0]))
    assert row.ranked() == [1, 0]


def test_blocks_of_equal_mass_rank_by_position() -> None:
    """Equal multisets tie exactly; the lower block wins."""
    row = ExactRow(np.array([1.0, 2.0, 2.0, 1.0, 0.0, 3.0, 3.0, 0.0]))
    assert row.minimal_blocks(0.6, 2) == [4, 5, 6, 7]
    assert row.minimal_blocks(0.99, 2) == [4, 5]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, BFLOAT16])
def test_finfo_min_masks_and_values_above_them_do_not(dtype: np.dtype) -> None:
    """At most half the lowest finite value hides a key; anything larger is a bias."""
    import ml_dtypes

    lowest = float(ml_dtypes.finfo(dtype).min)
    mask = np.array([lowest, lowest / 2, lowest / 4, 0.0]).astype(dtype)
    assert ExactRow(np.zeros(4), mask=mask).visible.tolist() == [2, 3]


@pytest.mark.parametrize("seed", range(40))
def test_bulk_and_exact_oracles_agree(seed: int) -> None:
    """Minimal k and tail mass, on rows of every family and option, budgets on the boundary."""
    case = make_case(seed, 30, (1, 2, 3, 17, 40)[seed % 5], options=bool(seed % 2))
    truth = Truth(case)
    k_min = truth.minimal_k()
    rng = np.random.default_rng(seed)
    keep = truth.visible & (rng.random(truth.visible.shape) < 0.5)
    tau = truth.tail_mass(keep)
    for row in range(case.rows):
        exact = case.exact(row)
        forced = np.flatnonzero(truth.forced[row]).tolist()
        assert exact.visible.tolist() == np.flatnonzero(truth.visible[row]).tolist()
        k = exact.minimal_k(float(case.eps[row]), forced=forced, min_keep=case.min_keep)
        assert k == k_min[row], case.describe(row)
        low, high = outward(exact.tail_mass(np.flatnonzero(keep[row]).tolist()))
        margin = float(truth.slack[row]) * 2
        assert low * (1 - margin) <= float(tau[row]) <= high * (1 + margin) + 1e-300
        if case.bias() is None:
            order = exact.ranked(forced)
            assert truth.order[row, : len(order)].tolist() == order
