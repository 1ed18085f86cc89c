"""keep_set_of_queries where float32 products decide, against ball arithmetic.

The oracle is `exact_rows`: scores are exact, and their exponentials are balls where float64 leaves
a doubt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import certk_rs as ck
from exact_rows import exact_scores, inside
from keepset_calls import native_keep_set
from levels import each_level

F32, F16, BF16 = np.float32, np.float16, ml_dtypes.bfloat16
Vectors = tuple[np.ndarray, np.ndarray, float]

STREAMED = 1e-5
"""Relative width of an interval that only sums in float32 leave: 2^-15 on either side."""
DIFFERENCE = 9e-5
"""That where one side is the difference of two such sums, and hardly less."""


def violations(
    ks: Any, vectors: Vectors, offset: int | None = None
) -> list[tuple[int, float, float]]:
    """Rows whose real tail mass may lie outside the reported interval."""
    queries, keys, scale = vectors
    n = len(keys)
    kept = np.zeros(n, dtype=bool)
    kept[ks.indices] = True
    upper, lower = ks.tail_mass_upper.reshape(-1), ks.tail_mass_lower.reshape(-1)
    scores, unit = exact_scores(queries, keys, scale)
    wrong = []
    for row in range(len(queries)):
        sees = n if offset is None else min(max(row + offset + 1, 0), n)
        if sees == 0 or not kept[:sees].any():
            # Nothing to lose, or everything.
            fine = upper[row] == float(sees > 0) and lower[row] <= upper[row]
        else:
            fine = inside(scores[row, :sees], unit, kept[:sees], lower[row], upper[row])
        if not fine:
            wrong.append((row, lower[row], upper[row]))
    return wrong


def native(vectors: Vectors, eps: Any, **more: Any) -> Any:
    queries, keys, scale = vectors
    return native_keep_set([(queries[None], keys[None], scale)], eps, **{"slack": 0.0, **more})


def dictated(vectors: Vectors, first: int, last: int, eps: Any, offset: int | None = None) -> Any:
    """Return the losses of all rows to a set of the first and the last keys."""
    counted = np.zeros(len(vectors[0]), dtype=bool)
    counted[-1] = True
    return native(
        vectors, eps, counted=counted, keep_first=first, keep_last=last, max_keep=first + last,
        causal_offset=offset,
    )  # fmt: skip


def width(ks: Any) -> np.ndarray:
    """Return the widths of the intervals relative to their upper ends."""
    upper, lower = ks.tail_mass_upper.reshape(-1), ks.tail_mass_lower.reshape(-1)
    return np.asarray((upper - lower) / np.maximum(upper, 1e-300))


def gaussian(rng: np.random.Generator, m: int, n: int, d: int, dtype: Any) -> Vectors:
    """Scores with a standard deviation of 1 to 6."""
    queries, keys = rng.standard_normal((m, d)), rng.standard_normal((n, d))
    scale = float(rng.choice([1, -1]) * rng.uniform(1, 6) / np.sqrt(d))
    return queries.astype(dtype), keys.astype(dtype), scale


def norms_apart(rng: np.random.Generator, m: int, n: int, d: int, dtype: Any) -> Vectors:
    """Keys whose norms differ by a factor of 2^24, most of them tiny."""
    queries, keys, scale = gaussian(rng, m, n, d, F32)
    size = 2.0 ** rng.uniform(-24, 0, (n, 1))
    return queries.astype(dtype), (keys * size).astype(dtype), 4 * scale


def cancelled(rng: np.random.Generator, m: int, n: int, d: int, dtype: Any) -> Vectors:
    """Products whose terms cancel, so that rounding is as large as it gets."""
    half = rng.uniform(0.5, 1, (n, d))
    half[:, 1::2] = -half[:, : d - d % 2 : 2]
    keys = half + rng.standard_normal((n, d)) * 2.0**-9
    queries = 1 + rng.standard_normal((m, d)) * 2.0**-9
    reach = np.sqrt(d) * np.sqrt((keys**2).sum(axis=1).max())
    # A radius of at most a quarter.
    return queries.astype(dtype), keys.astype(dtype), float(0.25 / (d * 2.0**-24 * reach))


def far_apart(rng: np.random.Generator, m: int, n: int, d: int, dtype: Any) -> Vectors:
    """Scores that differ by thousands: most weights are flushed, in whole blocks."""
    queries, keys = np.zeros((m, d)), np.zeros((n, d))
    keys[:, 0] = np.round(rng.uniform(-64, 64, n) * 4) / 4
    keys[:: max(1, n // 7), 0] = 64
    queries[:, 0] = np.round(rng.uniform(-48, 48, m))
    return queries.astype(dtype), keys.astype(dtype), 0.75


def rising(rng: np.random.Generator, m: int, n: int, d: int, dtype: Any) -> Vectors:
    """Each block has larger scores than the one before, or smaller ones: all sums are rescaled."""
    queries, keys = rng.standard_normal((m, d)) / 64, rng.standard_normal((n, d)) / 8
    queries[:, 0] = rng.choice([-1.0, -0.25, -0.01, 0.01, 0.25, 1], m)
    keys[:, 0] = np.arange(n) // 64 * rng.choice([0.5, 4, 30])
    return queries.astype(dtype), keys.astype(dtype), 1.0


def tiny(rng: np.random.Generator, m: int, n: int, d: int, dtype: Any) -> Vectors:
    """Keys of which many are subnormal; the scale brings their scores back."""
    sizes = 2.0 ** rng.uniform(-26, 0, (n, d))
    largest = 2.0**-3 if dtype == F16 else 2.0**-112
    queries, keys = rng.standard_normal((m, d)), rng.standard_normal((n, d)) * sizes
    return queries.astype(dtype), (keys * largest).astype(dtype), float(3 / largest / np.sqrt(d))


def equal(rng: np.random.Generator, m: int, n: int, d: int, dtype: Any) -> Vectors:
    """Ties: few different keys, and queries of zeros."""
    queries, keys, scale = gaussian(rng, m, n, d, dtype)
    keys = keys[rng.integers(0, 3, n) % len(keys)]
    queries[::2] = 0
    return queries, keys, scale


FAMILIES: tuple[Callable[..., Vectors], ...] = (
    gaussian, norms_apart, cancelled, far_apart, rising, tiny, equal,
)  # fmt: skip
SHAPES = (
    (9, 1, 3), (9, 2, 1), (20, 31, 7), (40, 33, 64), (30, 511, 2), (17, 512, 16), (19, 513, 33),
    (33, 1029, 8), (12, 2600, 5), (3, 50, 4096),
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_intervals_of_any_set_hold(family: Callable[..., Vectors], dtype: Any) -> None:
    """Rows that are not counted, so that nobody chose the set for them; causal or not."""
    streamed = 0
    for seed, (m, n, d) in enumerate(SHAPES):
        rng = np.random.default_rng(seed)
        vectors = family(rng, m, n, d, dtype)
        eps = rng.choice([0.3, 1 / 128, 1e-4], m)
        for part in range(2):
            offset = int(rng.integers(-3, n)) if part else None
            first = int(rng.integers(0, n // 2 + 1))
            last = int(rng.integers(1 if first == 0 else 0, n - first + 1))
            ks = dictated(vectors, first, last, eps, offset)
            wrong = violations(ks, vectors, offset)
            assert not wrong, (m, n, d, offset, len(wrong), wrong[0])
            streamed += int((width(ks) > STREAMED).sum())
    assert streamed > 20


@pytest.mark.parametrize("family", [gaussian, norms_apart, cancelled, rising, far_apart])
@pytest.mark.parametrize("eps", [1 / 128, 0.05, 0.3])
def test_intervals_of_found_sets_hold(family: Callable[..., Vectors], eps: float) -> None:
    """Rows that are looked at again: what is kept of them is summed, or what is dropped."""
    again = 0
    for seed, (m, n, d, dtype) in enumerate(
        ((90, 700, 8, F32), (200, 200, 24, BF16), (80, 1100, 3, F16))
    ):
        rng = np.random.default_rng(seed)
        queries, keys, scale = family(rng, m, n, d, dtype)
        # Queries that agree on what matters, and some budgets that are met with room.
        queries = (0.3 * queries.astype(F32) + queries[:1].astype(F32)).astype(dtype)
        vectors = queries, keys, scale
        budgets = np.full(m, eps)
        budgets[:: 3 + seed] = min(4 * eps, 0.9)
        for offset in (None, n - m // 2):
            ks = native(vectors, budgets, causal_offset=offset)
            assert not (wrong := violations(ks, vectors, offset)), (len(wrong), wrong[0])
            assert (ks.tail_mass_upper.reshape(-1) <= budgets).all()
            again += int((width(ks) > DIFFERENCE).sum())
    assert again > 20


@pytest.mark.parametrize(("spread", "few_kept"), [(1.5, False), (6.0, True)])
def test_both_sides_are_looked_at_again(spread: float, few_kept: bool) -> None:
    """The side with fewer keys: both kinds of difference have the widths that they must have."""
    rng = np.random.default_rng(2)
    queries, keys = rng.standard_normal((300, 16)), rng.standard_normal((1500, 16))
    queries = 0.5 * queries + queries[:1]
    vectors = queries.astype(F32), keys.astype(F32), spread / 4
    ks = native(vectors, 0.05)
    assert (len(ks.indices) <= 750) == few_kept
    wide = width(ks)[width(ks) > STREAMED]
    # (2 off + slack) / tail, or slack + off: 512 units on either side each, and the radius.
    assert len(wide) > 200
    assert (np.median(wide) > 1e-3) == few_kept
    assert (wide > DIFFERENCE).all()
    assert not violations(ks, vectors)


def test_lower_ends_where_sums_underflow() -> None:
    """Every block adds half of the least float64, which rounds up to all of it."""
    n = 40 * 512
    keys = np.full((n, 2), [-1000, -50], F32)
    keys[::512] = [-700, 0]
    keys[1::512, 0] = -745.1
    keys[0, 0] = 0
    # The first row asks for the largest of each block, the other loses the rest.
    vectors = np.array([[0, 1], [1, 0]], F32), keys, 1.0
    ks = native(vectors, 0.01, counted=np.array([True, False]))
    assert ks.indices.tolist() == list(range(0, n, 512))
    assert not (wrong := violations(ks, vectors)), wrong
    assert ks.tail_mass_upper[0, 1] < 1e-30


def test_a_scale_so_small_that_radii_underflow() -> None:
    """Products that float64 cannot tell apart are no ties."""
    queries = np.array([[1, 2.0**-60]], F32)
    keys = np.array([[1, 0], [1, 1]], F32)
    vectors = queries, keys, 1e-310
    ks = native(vectors, 0.5, keep_first=1, max_keep=1)
    assert ks.indices.tolist() == [0]
    assert not violations(ks, vectors)
    assert ks.tail_mass_upper[0, 0] > 0.5


@pytest.mark.parametrize("slack", [1e-4, 0.2])
def test_what_a_caller_may_round_is_in_the_interval(slack: float) -> None:
    """Each score may be off by the slack, in products of float32 too."""
    queries, keys = np.ones((1, 1, 1), dtype=F32), np.float32([[[0.0], [-3.0]]])
    ks = native_keep_set([(queries, keys, 1.0)], 0.2, given=np.array([True, False]), slack=slack)
    low, high = (np.exp(-3 + way * 2 * slack) for way in (-1, 1))
    assert ks.tail_mass_lower <= low / (1 + low)
    assert ks.tail_mass_upper >= high / (1 + high)


def test_keys_behind_the_last_that_a_counted_row_sees_are_not_kept() -> None:
    """Blocks end there, also for rows that see more."""
    rng = np.random.default_rng(0)
    vectors = gaussian(rng, 10, 10, 8, F16)
    counted = np.arange(10) < 6
    ks = native(vectors, 0.001, counted=counted, block_size=4, causal_offset=0)
    assert ks.indices.tolist() == [0, 1, 2, 3, 4, 5]
    assert not violations(ks, vectors, offset=0)
    assert (ks.tail_mass_lower[0, 6:] > 0).all()


@pytest.mark.parametrize("m", [17, 100, 300])
def test_many_rows_that_only_float64_decides(m: int) -> None:
    rng = np.random.default_rng(m)
    queries, keys = (rng.standard_normal((rows, 4)).astype(F32) for rows in (m, 60))
    huge = queries * F32(1e25), keys * F32(1e25), 1e-50
    ks = native(huge, 0.1)
    assert not violations(ks, huge)
    same = native((queries, keys, 1.0), 0.1)
    assert abs(len(ks.indices) - len(same.indices)) <= 1
    # Norms of which float32 products say nothing, though scores hardly differ.
    queries[:, 0], keys[:, 0] = 1, 2.0**23
    large = queries, keys, 1.0
    ks = native(large, 0.1)
    assert not violations(ks, large)
    assert (width(ks) < STREAMED).all()
    assert ks.tail_mass_upper.max() > 0.05


def mixed() -> Iterator[tuple[Vectors, dict[str, Any]]]:
    """Rows of several blocks, some of which float32 says nothing of."""
    for seed, (m, n, d) in enumerate(((300, 700, 8), (140, 1300, 33), (500, 100, 3))):
        rng = np.random.default_rng(seed)
        queries, keys, scale = gaussian(rng, m, n, d, F32)
        queries[:: 41 + seed] *= F32(2e6)
        counted = rng.random(m) < 0.8
        yield (queries, keys, scale), {"counted": counted, "causal_offset": n - m // 2}
        yield (queries, keys, scale), {}


def answers(threads: int | None = None) -> str:
    """A digest of all answers."""
    digest = hashlib.sha256()
    for vectors, more in mixed():
        ks = native(vectors, 0.07, threads=threads, **more)
        for part in (ks.indices, ks.tail_mass_upper, ks.tail_mass_lower, ks.weights):
            digest.update(np.ascontiguousarray(part).tobytes())
        digest.update(str(ks.lower_bound).encode())
    return digest.hexdigest()


def test_rows_do_not_depend_on_those_beside_them() -> None:
    """Threads share the rows out; which ones are together must not be seen."""
    want = answers(1)
    for threads in (2, 3, 4, 7):
        assert answers(threads) == want, threads
    for level in each_level():
        assert answers() == want, level


@pytest.mark.parametrize("place", ["queries", "keys"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_refused(place: str, value: float) -> None:
    rng = np.random.default_rng(1)
    queries, keys, scale = gaussian(rng, 40, 700, 8, F32)
    (queries if place == "queries" else keys)[37, 5] = value
    with pytest.raises(ck.CertkError, match=rf"{place}\[37, 5\]|\[0, 37, 5\]"):
        ck.keep_set_of_queries(queries, keys, 0.05, scale=scale)
