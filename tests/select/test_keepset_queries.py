"""keep_set_of_queries: what `keep_set` says of the scores, without these.

Queries and keys have few bits, so that float64 holds every product, and the oracle of rows of
scores judges; the audit's own arithmetic does, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import certk_rs as ck
from cases import Case
from certk_rs._audit.recompute import Keys, recompute
from keepset_calls import judge, native_keep_set, shares, smallest


def vectors(rng: np.random.Generator, shape: tuple[int, ...], size: float = 1.0) -> np.ndarray:
    """Float16 numbers that are multiples of 1/64."""
    return np.asarray(np.round(rng.standard_normal(shape) * size * 64) / 64).astype(np.float16)


def scores_of(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """(heads * m, n) products, exact in float64."""
    heads, kv_heads = len(queries), len(keys)
    shared = np.repeat(keys.astype(np.float64), heads // kv_heads, axis=0)
    return np.einsum("hmd,hnd->hmn", queries.astype(np.float64), shared).reshape(
        heads * queries.shape[1], keys.shape[1]
    )


def mask_of(heads: int, m: int, n: int, offset: int | None) -> np.ndarray:
    seen = np.arange(n) <= np.arange(m)[:, None] + (n if offset is None else offset)
    return np.tile(seen, (heads, 1))


def of_queries(
    ks: Any, queries: np.ndarray, keys: np.ndarray, eps: Any, scale: float,
    offset: int | None = None, **more: Any,
) -> np.ndarray:  # fmt: skip
    """Check all that must hold of any answer; return the softmax of all rows."""
    heads, m, _ = queries.shape
    mask = mask_of(heads, m, keys.shape[1], offset)
    budgets = np.broadcast_to(eps, heads * m)
    case = Case(scores_of(queries, keys), budgets, scale=scale, mask=mask, name="queries", **more)
    return shares(judge(case, ks))


def never(kept: np.ndarray) -> bool:
    """Refuse sets that meet a budget to 1e-13: of these products none does exactly."""
    return False


@pytest.mark.parametrize("seed", range(60))
def test_small_cases_against_all_subsets(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kv_heads, group, m = (int(rng.integers(1, 3)) for _ in range(3))
    n, d = int(rng.integers(2, 10)), int(rng.integers(1, 40))
    queries = vectors(rng, (kv_heads * group, m, d))
    keys = vectors(rng, (kv_heads, n, d))
    eps = rng.choice([0.3, 0.1, 0.02, 0.0] if seed % 5 == 0 else [0.3, 0.1], (len(queries), m))
    offset = int(rng.integers(-1, n)) if seed % 3 == 0 else None
    first, last = (int(rng.integers(0, 3)) for _ in range(2))
    scale = float(rng.choice([1.0, 0.5, 0.3, -0.7]))
    ks = ck.keep_set_of_queries(
        queries, keys, eps, scale=scale, causal_offset=offset, keep_first=first, keep_last=last
    )
    assert ks.tail_mass_upper.shape == eps.shape
    forced = {"keep_first": first, "keep_last": last}
    share = of_queries(ks, queries, keys, eps.reshape(-1), scale, offset, **forced)
    seen = np.flatnonzero(share.sum(axis=0) > 0)
    if len(seen) == 0:
        assert ks.status == ck.Status.EMPTY
        return
    assert ks.status == ck.Status.CERTIFIED
    assert (ks.tail_mass_upper <= eps).all()
    must = np.zeros(n, dtype=bool)
    must[seen[:first]] = True
    must[seen[max(0, len(seen) - last) :]] = True
    best = smallest(share, eps.reshape(-1), must, never)
    assert ks.lower_bound <= best <= ks.k
    assert ks.k <= best + 1


@pytest.mark.parametrize("seed", range(40))
def test_blocks_against_all_sets_of_blocks(seed: int) -> None:
    """As few whole blocks as possible; the bound in keys belongs to a number of blocks."""
    rng = np.random.default_rng(seed)
    n, size = int(rng.integers(3, 30)), int(rng.integers(2, 6))
    queries, keys = vectors(rng, (2, 3, 24)), vectors(rng, (1, n, 24))
    offset = n - 4 if seed % 2 else None
    first, last = (int(rng.integers(0, 2)) for _ in range(2))
    ks = ck.keep_set_of_queries(
        queries, keys, 0.1, block_size=size, causal_offset=offset, keep_first=first,
        keep_last=last, scale=0.6,
    )  # fmt: skip
    share = of_queries(ks, queries, keys, 0.1, 0.6, offset)
    seen = int((share.sum(axis=0) > 0).sum())
    blocks = np.add.reduceat(share, np.arange(0, n, size), axis=1)
    must = np.zeros(blocks.shape[1], dtype=bool)
    must[: -(-first // size)] = True
    if last:
        must[(seen - last) // size : -(-seen // size)] = True
    chosen = np.unique(ks.indices // size)
    whole = [i for i in range(seen) if i // size in chosen]
    assert ks.indices.tolist() == whole
    assert np.isin(np.flatnonzero(must), chosen).all()
    best = smallest(blocks, np.full(6, 0.1), must, never)
    least = -(-ks.lower_bound // size)
    assert least <= best <= len(chosen)
    assert len(chosen) <= best + 1
    assert ks.lower_bound == max(0, least * size - (-seen) % size)


@pytest.mark.parametrize(("n", "size", "last"), [(9, 4, 2), (10, 3, 2), (10, 4, 3), (12, 4, 5)])
def test_the_last_positions_may_lie_in_several_blocks(n: int, size: int, last: int) -> None:
    """The last block is short, and the budget needs none but the first."""
    queries, keys = np.ones((1, 1, 4), dtype=np.float32), np.zeros((1, n, 4), dtype=np.float32)
    keys[0, 0] = 50
    ks = ck.keep_set_of_queries(queries, keys, 0.01, block_size=size, keep_last=last)
    forced = range((n - last) // size * size, n)
    assert ks.indices.tolist() == sorted({*range(size), *forced})


def window(rng: np.random.Generator, heads: int, m: int, n: int, d: int) -> tuple[Any, Any]:
    """Queries of one window: shared directions of falling strength."""
    strength = 2.0 / np.sqrt(1.0 + np.arange(d) / 4)
    keys = rng.standard_normal((1, n, d)) * strength
    queries = (rng.standard_normal((1, 1, d)) + rng.standard_normal((heads, m, d)) * 0.7) * strength
    return tuple((np.round(x * 32) / 32).astype(np.float16) for x in (queries, keys))


@pytest.mark.parametrize(("heads", "m", "n"), [(2, 40, 900), (4, 300, 700), (1, 5000, 400)])
def test_the_same_as_from_scores(heads: int, m: int, n: int) -> None:
    """Few rows and many, where only some are weighed: within a few keys of the bound."""
    rng = np.random.default_rng(m)
    queries, keys = window(rng, heads, m, n, 32)
    ks = ck.keep_set_of_queries(queries, keys, 0.05, scale=0.3)
    of_queries(ks, queries, keys, 0.05, 0.3)
    scores = scores_of(queries, keys)
    other = ck.keep_set(scores, 0.05, scale=0.3)
    assert ks.status == ck.Status.CERTIFIED
    assert ks.lower_bound <= other.k
    assert other.lower_bound <= ks.k
    assert ks.k <= 1.01 * ks.lower_bound + 4
    assert proves(ks, scores * 0.3, 0.05)


def proves(ks: Any, scores: np.ndarray, eps: float) -> bool:
    """Return True if the reported weights alone prove the lower bound."""
    weights = ks.weights.reshape(-1)
    say = np.flatnonzero(weights)
    share = np.exp(scores[say] - scores[say].max(axis=1, keepdims=True))
    share /= share.sum(axis=1, keepdims=True)
    mixed = np.sort(weights[say] @ share)
    lost = mixed[: scores.shape[1] - (ks.lower_bound - 1)].sum()
    return bool(lost > weights.sum() * eps * (1 + 1e-9))


def test_an_audit_confirms_every_interval() -> None:
    """Masses in float64 by other arithmetic lie inside the intervals, also where f32 decided."""
    rng = np.random.default_rng(3)
    queries, keys = window(rng, 2, 200, 600, 32)
    eps = np.full(400, 0.03)
    eps[::7] = 0.3
    ks = native_keep_set([(queries, keys, 0.4)], eps.reshape(2, 200))
    kept = np.zeros(600, dtype=bool)
    kept[ks.indices] = True
    wide = keys[0].astype(np.float64)
    parts = [Keys(wide[side], np.flatnonzero(side)) for side in (kept, ~kept)]
    q = queries.reshape(400, 32).astype(np.float64)
    rows = recompute(q, parts[0], parts[1], 0.4, np.full(400, 600))
    upper, lower = ks.tail_mass_upper.reshape(-1), ks.tail_mass_lower.reshape(-1)
    assert rows.lose_at_most(eps).all()
    assert not rows.refute(lower, upper).any()
    # Rows far from their budgets have wide intervals: those of float32.
    assert (upper / lower).max() > 1 + 1e-6
    of_queries(ks, queries, keys, eps, 0.4)


def test_rows_that_are_not_counted_change_nothing() -> None:
    rng = np.random.default_rng(4)
    queries, keys = window(rng, 2, 60, 300, 16)
    counted = rng.random(120) < 0.6
    counted[:3] = [True, False, True]
    ks = native_keep_set([(queries, keys, 0.5)], 0.05, counted=counted)
    of_queries(ks, queries, keys, 0.05, 0.5)
    weights, upper = ks.weights.reshape(-1), ks.tail_mass_upper.reshape(-1)
    assert not weights[~counted].any()
    assert (upper[counted] <= 0.05).all()
    assert (upper[~counted] > 0.05).any()
    assert ks.status == ck.Status.CERTIFIED
    alone = queries.reshape(1, 120, 16)[:, counted]
    few = native_keep_set([(alone, keys, 0.5)], 0.05)
    assert few.indices.tolist() == ks.indices.tolist()
    assert few.lower_bound == ks.lower_bound
    assert few.weights.reshape(-1).tolist() == weights[counted].tolist()
    nobody = native_keep_set([(queries, keys, 0.5)], 0.05, counted=np.zeros(120, dtype=bool))
    assert nobody.status == ck.Status.EMPTY
    assert (nobody.tail_mass_upper == 1.0).all()


def test_blocks_of_several_layers_share_one_set() -> None:
    """Heads, d, scales and dtypes of their own; rows in order."""
    rng = np.random.default_rng(5)
    first, second = window(rng, 2, 30, 200, 16), window(rng, 4, 10, 200, 40)
    ks = native_keep_set([(*first, 0.5), (*second, 0.3)], 0.05)
    assert ks.tail_mass_upper.shape == (100,)
    kept = np.zeros(200, dtype=bool)
    kept[ks.indices] = True
    scores = np.concatenate([scores_of(*first) * 0.5, scores_of(*second) * 0.3])
    lost = np.exp(scores)[:, ~kept].sum(axis=1) / np.exp(scores).sum(axis=1)
    assert (lost <= ks.tail_mass_upper).all()
    assert (lost >= ks.tail_mass_lower).all()
    assert (ks.tail_mass_upper <= 0.05).all()
    assert ks.lower_bound >= 0.97 * len(ks.indices) - 2


@pytest.mark.parametrize("m", [20, 900])
def test_max_keep_makes_the_worst_ratio_small(m: int) -> None:
    """Of all rows, also where only some are weighed."""
    rng = np.random.default_rng(m)
    queries, keys = window(rng, 1, m, 300, 16)
    free = ck.keep_set_of_queries(queries, keys, 0.02, scale=0.5)
    most = int(free.k * 0.9)
    ks = ck.keep_set_of_queries(queries, keys, 0.02, scale=0.5, max_keep=most)
    of_queries(ks, queries, keys, 0.02, 0.5)
    assert ks.status == ck.Status.OVER_BUDGET
    assert ks.k == most
    worst = float(ks.tail_mass_upper.max())
    # No set of as many keys loses much less: that would take more keys than there may be.
    better = ck.keep_set_of_queries(queries, keys, worst * 0.9, scale=0.5)
    assert better.k > most
    blocks = ck.keep_set_of_queries(queries, keys, 0.02, scale=0.5, max_keep=most, block_size=8)
    assert blocks.k <= most


def test_numbers_that_float32_products_cannot_hold() -> None:
    """Norms of 1e25 and entries that underflow: float64 decides, or says that nothing can."""
    rng = np.random.default_rng(8)
    queries = (rng.standard_normal((3, 4)) * 1e25).astype(np.float32)
    keys = (rng.standard_normal((50, 4)) * 1e25).astype(np.float32)
    ks = ck.keep_set_of_queries(queries, keys, 0.1, scale=1e-50)
    same = ck.keep_set(queries.astype(np.float64) @ keys.T.astype(np.float64), 0.1, scale=1e-50)
    assert abs(ks.k - same.k) <= 1
    small = ck.keep_set_of_queries(queries * np.float32(1e-60), keys, 0.1)
    assert 45 == small.lower_bound <= small.k <= 46
    with pytest.raises(ck.CertkError, match="scores are so large"):
        ck.keep_set_of_queries(queries, keys, 0.1)


def test_nothing_to_keep() -> None:
    none = ck.keep_set_of_queries(np.zeros((0, 4), np.float32), np.zeros((5, 4), np.float32), 0.1)
    assert none.status == ck.Status.EMPTY
    blind = ck.keep_set_of_queries(
        np.zeros((3, 4), np.float32), np.zeros((5, 4), np.float32), 0.1, causal_offset=-9
    )
    assert blind.status == ck.Status.EMPTY
    assert blind.k == blind.lower_bound == 0


@pytest.mark.parametrize("seed", range(24))
def test_keys_that_are_given_are_certified(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kv_heads, n, d = int(rng.integers(1, 3)), int(rng.integers(2, 200)), int(rng.integers(1, 40))
    queries, keys = vectors(rng, (2 * kv_heads, 5, d)), vectors(rng, (kv_heads, n, d))
    given = rng.random(n) < rng.choice([0.0, 0.1, 0.7, 1.0])
    offset = int(rng.integers(0, n)) if seed % 3 == 0 else None
    counted = rng.random(10 * kv_heads) < 0.7 if seed % 4 == 0 else None
    scale, eps = 0.4, float(rng.choice([0.0, 0.05, 0.5]))
    more = {"causal_offset": offset, "counted": counted, "slack": 0.0}
    ks = native_keep_set([(queries, keys, scale)], eps, given=given, **more)
    seen = n if offset is None else min(n, offset + 5)
    if counted is None:
        assert ks.indices.tolist() == np.flatnonzero(given[:seen]).tolist()
    of_queries(ks, queries, keys, eps, scale, offset)
    rows = slice(None) if counted is None else counted
    over = (ks.tail_mass_upper.reshape(-1)[rows] > eps).any()
    if len(ks.indices) or over:
        assert ks.status == (ck.Status.OVER_BUDGET if over else ck.Status.CERTIFIED)
    assert ks.lower_bound == 0
    assert not ks.weights.any()
    # As it is told of a set that was chosen.
    chosen = native_keep_set([(queries, keys, scale)], eps, **more)
    again = np.zeros(n, bool)
    again[chosen.indices] = True
    twice = native_keep_set([(queries, keys, scale)], eps, given=again, **more)
    assert np.array_equal(twice.indices, chosen.indices)
    assert (np.abs(twice.tail_mass_upper - chosen.tail_mass_upper) <= 1e-4).all()


def test_given_keys_are_not_chosen() -> None:
    rng = np.random.default_rng(0)
    block = (vectors(rng, (1, 2, 4)), vectors(rng, (1, 6, 4)), 1.0)
    with pytest.raises(ck.CertkError, match="given has 5 entries but 6 are needed"):
        native_keep_set([block], 0.1, given=np.ones(5, bool))
    for name, value in (("max_keep", 2), ("keep_first", 1), ("keep_last", 1), ("block_size", 2)):
        with pytest.raises(ck.CertkError, match=f"given cannot be combined with {name}"):
            native_keep_set([block], 0.1, given=np.ones(6, bool), **{name: value})
