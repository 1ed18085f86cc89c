"""Short rows are decided in batches by passes of their own; the general search must agree.

Options that force nothing (`max_keep` of all keys) send the same rows to the general search.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import certk_rs as ck
from generators import DTYPES

LENGTHS = (33, 64, 100, 255, 257, 512, 1023, 1024, 1025, 2047, 2049, 4095, 4096, 4097)
Rows = NDArray[Any]


def families(n: int, rng: np.random.Generator) -> dict[str, Rows]:
    """Rows that the guesses of the batch path hit, and such that they miss."""
    normal = rng.standard_normal((6, n))
    return {
        "flat": 0.01 * normal,
        "sigma 1": normal,
        "sigma 3": 3 * normal,
        "sigma 8": 8 * normal,
        "heavy": np.clip(rng.standard_cauchy((6, n)), -3e4, 3e4),
        "crowded": -np.exp(rng.uniform(-40, 6, (6, n))),
        "two levels": np.where(normal > 0, 0.0, -5.0),
        "ties": np.round(2 * normal),
        "equal": np.zeros((6, n)),
        "spike": np.where(np.arange(n) == n // 3, 20.0, 0.01 * normal),
        "decay": rng.permuted(np.tile(-0.5 * np.arange(n), (6, 1)), axis=1),
        "holes": np.where(rng.random((6, n)) < 0.3, -np.inf, 2 * normal),
        "last hole": np.where(np.arange(n) == n - 1, -np.inf, normal),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", LENGTHS)
def test_the_general_search_agrees(n: int, dtype: np.dtype[Any]) -> None:
    rng = np.random.default_rng(n)
    for name, rows in families(n, rng).items():
        scores = rows.astype(dtype)
        for eps in (0.3, 0.01, 1e-6):
            batch = ck.select(scores, eps, threads=1)
            general = ck.select(scores, eps, threads=1, max_keep=n)
            for i in range(len(rows)):
                where = f"{name} {eps} {i}"
                assert batch.tail_mass_lower[i] <= general.tail_mass_upper[i] * (1 + 1e-3), where
                assert general.tail_mass_lower[i] <= batch.tail_mass_upper[i] * (1 + 1e-3), where
                # Both have proven it: then it is the one set that everybody must find.
                if batch.minimal[i] and general.minimal[i]:
                    assert np.array_equal(batch.row(i), general.row(i)), where
                assert abs(int(batch.k[i]) - int(general.k[i])) <= 1 + 1e-3 * n, where


@pytest.mark.parametrize("n", [40, 129, 700, 1500, 4096])
def test_a_row_alone_is_the_row_in_a_batch(n: int) -> None:
    rng = np.random.default_rng(n)
    rows = np.concatenate([r[:2] for r in families(n, rng).values()]).astype(np.float32)
    eps = rng.choice([0.1, 0.01, 1e-4], len(rows))
    together = ck.select(rows, eps, threads=1)
    for i, row in enumerate(rows):
        alone = ck.select(row, eps[i], threads=1)
        assert np.array_equal(alone.row(()), together.row(i))
        assert alone.tail_mass_upper == together.tail_mass_upper[i]
        assert alone.tail_mass_lower == together.tail_mass_lower[i]
        assert alone.minimal == together.minimal[i]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [50, 300, 1030, 4096, 9000])
def test_a_mask_is_the_row_without_what_it_hides(n: int, dtype: np.dtype[Any]) -> None:
    rng = np.random.default_rng(n)
    scores = (3 * rng.standard_normal((7, n))).astype(dtype)
    scores[0, 5] = np.nan
    for share in (0.01, 0.5, 0.99):
        mask = rng.random((7, n)) < share
        mask[:, 7] = True
        mask[:, 5] = False
        bias = np.where(mask, 0.0, -np.inf).astype(np.float32)
        lowest = np.where(mask, -0.0, np.finfo(np.float16).min).astype(np.float16)
        masked = ck.select(scores, 0.01, mask=mask)
        for other in (bias, lowest):
            same = ck.select(scores, 0.01, mask=other)
            assert np.array_equal(same.indices, masked.indices)
            assert np.array_equal(same.tail_mass_upper, masked.tail_mass_upper)
        for i in range(7):
            alone = ck.select(scores[i][mask[i]], 0.01)
            positions = np.flatnonzero(mask[i])[alone.row(())]
            if alone.minimal and masked.minimal[i]:
                assert np.array_equal(positions, masked.row(i))
            assert abs(int(alone.k) - int(masked.k[i])) <= 1


def test_a_bias_that_is_one_is_no_mask() -> None:
    scores = np.zeros((2, 200), dtype=np.float32)
    bias = np.zeros((2, 200), dtype=np.float16)
    bias[1, 3] = 5.0
    sel = ck.select(scores, 0.1, mask=bias)
    assert sel.k[0] == 180
    assert 3 in sel.row(1)
    assert sel.tail_mass_upper[1] <= 0.1
