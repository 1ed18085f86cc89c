"""Rows that f32 leaves open are decided in f64 as exact arithmetic decides them.

Budgets lie so near the tail mass of a best set that f32 cannot tell, and f64 can.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import certk_rs as ck
from oracle import ExactRow

# Relative distances from the tail mass: too near for f32 (4e-5), far enough for f64 (2e-12).
NEAR = (1e-5, -1e-5, 1e-10, -1e-10)
LENGTHS = [(64, 333, 1025), pytest.param((40, 512, 1000, 4096, 9000), marks=pytest.mark.heavy)]


def rows_of(n: int, dtype: str) -> np.ndarray:
    """Rows of several shapes: normal, steep, of few levels, with one large key, flat."""
    rng = np.random.default_rng(n)
    z = rng.standard_normal((5, n))
    z[1] *= 6
    z[2] = np.round(2 * z[2]) / 2
    z[3, n // 3] = 9
    z[4] *= 1e-3
    return z.astype(dtype)


def check(
    scores: np.ndarray, exact: ExactRow, k: int, options: dict[str, Any], near: Any = NEAR
) -> int:
    """Budgets around the tail mass of the best k; how many of them f32 left open."""
    first = options.get("keep_first", 0)
    forced = exact.forced(first)
    best = exact.ranked(forced)
    mass = float(exact.tail_mass(best[:k]).mid())
    given = {key: value for key, value in options.items() if key != "threads"}
    opened = 0
    for off in near:
        eps = mass * (1 + off)
        sel = ck.select(scores, eps, prove_minimal=True, **options)
        least = exact.minimal_k(eps, forced=forced)
        assert sel.k[0] == least, (scores.shape, k, off, options)
        assert sorted(best[:least]) == sel.indices.tolist(), (scores.shape, k, off, options)
        assert sel.minimal[0]
        assert sel.status[0] == ck.Status.CERTIFIED
        bounds = sel.tail_mass_lower[0], sel.tail_mass_upper[0]
        truth = exact.tail_mass(best[:least])
        assert bounds[0] <= truth <= bounds[1] <= eps
        opened += not ck.select(scores, eps, **given).minimal[0]
    return opened


@pytest.mark.parametrize("lengths", LENGTHS, ids=["short", "long"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    "options",
    [{}, {"scale": 0.37}, {"scale": -1.3}, {"keep_first": 3}, {"mask": True}],
    ids=["plain", "scaled", "reversed", "forced", "masked"],
)
def test_near_the_edge(options: dict[str, Any], dtype: str, lengths: tuple[int, ...]) -> None:
    """The same sets as exact arithmetic, all of them proven, whichever way f32 went."""
    opened = 0
    rng = np.random.default_rng(3)
    for n in lengths:
        for row in rows_of(n, dtype):
            more = dict(options)
            if "mask" in more:
                more["mask"] = rng.random((1, n)) < 0.7
            mask = more["mask"][0] if "mask" in more else None
            exact = ExactRow(row, scale=more.get("scale", 1.0), mask=mask)
            seen = len(exact.visible)
            for k in (max(4, seen // 9), seen * 2 // 3):
                opened += check(row[None], exact, k, more)
    # Or this test has nothing to say about the second decision.
    assert opened > len(lengths)


def test_rows_that_threads_share() -> None:
    """Chunk by chunk on one thread or on two: the exact set, and the same bits."""
    n = 270_000
    row = (3 * np.random.default_rng(8).standard_normal(n)).astype(np.float32)
    exact = ExactRow(row)
    assert check(row[None], exact, n // 4, {"threads": 2}, NEAR[::3])
    eps = float(exact.tail_mass(exact.order[: n // 4]).mid()) * (1 + 1e-10)
    one, two = (ck.select(row[None], eps, prove_minimal=True, threads=t) for t in (1, 2))
    assert one.tail_mass_upper.tobytes() == two.tail_mass_upper.tobytes()
    assert one.tail_mass_lower.tobytes() == two.tail_mass_lower.tobytes()
    assert one.indices.tobytes() == two.indices.tobytes()
