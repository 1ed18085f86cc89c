"""Options of attention together: what is said of each row against long double.

Random calls combine heads that share keys, unlike heads, masks, causal limits, lengths, sinks,
soft caps, biases, budgets per row, dtypes, indexes that were appended to, and balls. The cases
behind them are those in which one number stands for another only if nothing else is asked for: rows
of four different lengths in a panel, thinned rows of large scores, heads of which one is a hundred
times another.
`real_attention` is the reference.
"""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest

import certk_rs as ck
from real_attention import CLOSE, DTYPES, LD, Real, check, real_attention
from score_changes import made_changes


def revealed(q: Any, k: Any, eps: Any, **options: Any) -> tuple[ck.AttentionResult, np.ndarray]:
    """An answer with values that tell which keys were kept: of each key an axis of its own."""
    options.pop("ball", None)
    n = k.shape[-2]
    v = np.broadcast_to(np.eye(n, dtype=np.float32), (*k.shape[:-2], n, n))
    wide = q.astype(np.float64) if q.dtype.itemsize < 4 else q
    found = ck.attention(wide, k, v, eps, **options)
    return found, np.asarray(found.out) > 0


def check_kept(found: ck.AttentionResult, kept: np.ndarray, real: Real, eps: Any) -> None:
    """Check all that is reported of a row whose kept keys are known."""
    assert not (kept & ~real.seen).any()
    assert (kept.sum(axis=-1) <= found.k).all()
    tail = np.where(kept, 0, real.weights).sum(axis=-1)
    # Weights of which float32 knows nothing do not show.
    assert (tail <= found.tail_mass_upper.astype(LD) * (1 + CLOSE) + LD(1e-30)).all()
    assert (found.tail_mass_upper <= eps).all()
    some = np.isfinite(real.log_mass)
    mass = np.log1p(-np.where(some, tail, 0)) + np.where(some, real.log_mass, 0)
    close = CLOSE * (1 + np.abs(mass))
    assert (~some | (found.log_mass_lower.astype(LD) <= mass + close)).all()
    assert (~some | (mass - close <= found.log_mass_upper.astype(LD))).all()
    away = np.sqrt(np.square(found.out.astype(LD) - real.weights).sum(axis=-1))
    assert (away <= found.error_bound.astype(LD) + CLOSE).all()


# ------------------------------------------------------------------------------ random calls

# The relative rounding of an output of each dtype.
UNIT = {"float32": 2.0**-24, "float64": 2.0**-53, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def made_keys(rng: np.random.Generator, kv: tuple[int, ...], n: int, d: int) -> np.ndarray:
    """Keys of unlike heads: plain, in clusters, far from zero, some without a code."""
    keys = rng.standard_normal((*kv, n, d))
    for at, head in enumerate(np.ndindex(*kv)):
        kind = int(rng.integers(5))
        if kind == 1:
            keys[head] = np.repeat(3 * keys[head][: -(-n // 16)], 16, axis=0)[:n]
            keys[head] += 0.05 * rng.standard_normal((n, d))
        elif kind == 2:
            keys[head] += 4 * rng.standard_normal(d)
        elif kind == 3:
            keys[head][rng.integers(n, size=1 + n // 200)] *= 30
        keys[head] *= [1.0, 0.3, 2.0][at % 3]
    return keys


def one_call(rng: np.random.Generator, name: str, n: int) -> None:
    dtype = DTYPES[name]
    d = int(rng.choice([1, 2, 3, 15, 16, 17, 40, 64, 128, 256]))
    d_v = int(rng.choice([1, 5, 16, 20, 33]))
    kv_heads, group = int(rng.choice([1, 2, 3])), int(rng.choice([1, 2, 3]))
    m = int(rng.choice([1, 2, 4, 5, 9, 17, 40]))
    heads = kv_heads * group
    batch = [(), (2,)][int(rng.integers(2))] if n < 1000 else ()
    rows = (*batch, heads, m)
    keys = made_keys(rng, (*batch, kv_heads), n, d)
    # Some rows look at few keys, others at all.
    sharp = rng.choice([0.3, 2.0, 8.0], (*rows, 1))
    queries = sharp * rng.standard_normal((*rows, d))
    values = rng.standard_normal((*batch, kv_heads, n, d_v))
    values *= rng.choice([0.01, 1.0, 50.0], (*batch, kv_heads, 1, 1))
    values += rng.choice([0.0, 30.0], (*batch, kv_heads, 1, 1))
    half = int(rng.integers(n + 1))
    # What is appended to a ball may lie elsewhere, and of one head alone.
    values[..., half:, :] *= rng.choice([1.0, 9.0], (*batch, kv_heads, 1, 1))
    q, k, v = queries.astype(dtype), keys.astype(dtype), values.astype(dtype)
    sight: dict[str, Any] = {"causal": bool(rng.random() < 0.5)}
    if rng.random() < 0.5:
        sight["lengths"] = rng.integers(0, n + 1, rows)
    if rng.random() < 0.4:
        # Of every row, of every head, or one for all.
        shape = [(*rows, n), (*rows[:-1], 1, n), (n,)][int(rng.integers(3))]
        sight["mask"] = rng.random(shape) < rng.choice([0.3, 0.9])
    sight |= made_changes(rng, rows, n)
    eps: Any = float(rng.choice([0.0, 0.02, 0.3]))
    if rng.random() < 0.6:
        eps = rng.choice([0.0, 0.01, 0.1, 0.6], rows)
    scale = float(rng.choice([-0.2, 0.5])) if rng.random() < 0.3 else None
    options: dict[str, Any] = {**sight, "scale": scale}
    sinks = None
    if rng.random() < 0.4:
        sinks = rng.choice([-np.inf, -800.0, 0.0, 3.0, 15.0, 40.0, 900.0], rows[:-1]) + rng.random(
            rows[:-1]
        )
        options["sinks"] = sinks
    real = real_attention(q, k, v, sight, scale, sinks)
    if rng.random() < 0.5:
        ball = ck.ValueBall(v[..., :half, :])
        ball.append(v[..., half:, :])
        options["ball"] = ball
    indexes: list[Any] = [None]
    if name != "float64":
        index = ck.KeyIndex.build(k[..., :half, :])
        index.append(k[..., half:, :])
        indexes.append(index)
    size = np.sqrt(np.square(v.astype(np.float64)).sum(axis=-1).max())
    reach = np.sqrt(
        np.square(q.astype(np.float64)).sum(axis=-1).max()
        * np.square(k.astype(np.float64)).sum(axis=-1).max()
    ) * abs(d**-0.5 if scale is None else scale)
    # With all kept the bound is rounding: of the output, of sums, and of scores summed in float32.
    unit = 2.0**-53 if name == "float64" else 2.0**-24
    rounding = UNIT[name] + unit * (
        200 + (2 * d + 8) * reach if name == "float64" else 800 + 45 * reach
    )
    # Of caps, whose error in float64 is many units, and of biases.
    rounding += unit * (600 if name == "float64" else 40) * sight.get("soft_cap", 0.0)
    if "bias" in sight:
        finite = np.nan_to_num(sight["bias"].astype(np.float64), neginf=0.0)
        rounding += 3 * unit * (np.abs(finite).max(initial=0.0) + reach)
    for index in indexes:
        every = ck.attention(q, k, v, 0.0, index=index, **options)
        check(every, real, 0.0)
        assert (every.k == real.seen.sum(axis=-1)).all()
        assert (every.tail_mass_upper == 0).all()
        assert (every.error_bound <= (4 * rounding + 2e-12) * size).all()
        for slow in (False, True):
            found = ck.attention(q, k, v, eps, index=index, even_if_slower=slow, **options)
            check(found, real, eps)
            if n < 1000:
                kept = revealed(q, k, eps, index=index, even_if_slower=slow, **options)
                check_kept(*kept, real, eps)
        if np.isfinite(values).all() and rng.random() < 0.3:
            spread = np.abs(v.astype(np.float64)).max() * d_v**0.5
            within = spread * rng.choice([0.02, 0.2, 2.0], rows) + 1e-9
            found = ck.attention(q, k, v, out_tol=within, index=index, **options)
            assert (found.error_bound <= within).all()
            check(found, real, 1.0)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("seed", range(14))
def test_random_calls(name: str, seed: int) -> None:
    rng = np.random.default_rng([seed, list(DTYPES).index(name)])
    one_call(rng, name, int(rng.choice([1, 40, 130, 600])))


@pytest.mark.parametrize("seed", range(3))
def test_random_calls_over_many_keys(seed: int) -> None:
    rng = np.random.default_rng([77, seed])
    one_call(rng, ["float32", "bfloat16", "float16"][seed], 2500)


@pytest.mark.heavy
def test_many_random_calls() -> None:
    for seed in range(1500):
        rng = np.random.default_rng([78, seed])
        name = list(DTYPES)[int(rng.integers(4))]
        one_call(rng, name, int(rng.choice([1, 17, 40, 130, 600, 1500, 2500])))


# --------------------------------------------------------------------- large scores, in float32


def steep(
    rng: np.random.Generator, m: int, n: int, d: int, size: float
) -> tuple[np.ndarray, np.ndarray]:
    """Queries and keys in float32 of which six share all mass, at scores of about `size`.

    All others are hundreds of nats below, so what is kept weighs what all of them do.
    """
    base = rng.standard_normal(d)
    base /= np.linalg.norm(base)
    keys = rng.standard_normal((n, d)) / d**0.5
    keys -= np.outer(keys @ base, base)
    # The first keys are always looked at, so that the row is known to be steep.
    heavy = np.append(rng.choice(np.arange(16, n), 5, replace=False), 3)
    keys[heavy] = base + rng.standard_normal((6, d)) / (8 * size)
    queries = rng.standard_normal((m, d)) / 50
    queries += np.outer(1 - queries @ base, base)
    return (size * queries).astype(np.float32), keys.astype(np.float32)


@pytest.mark.parametrize("size", [370.0, 700.0, 1200.0])
@pytest.mark.parametrize(("m", "indexed"), [(32, True), (32, False), (64, False), (4, True)])
def test_what_rows_of_large_scores_weigh(size: float, m: int, indexed: bool) -> None:
    """Thinned rows, and rows that keep everything: the rounding of scores in float32 is in it."""
    rng, n, d, eps = np.random.default_rng([int(size), m]), 3000, 32, 0.05
    q, k = steep(rng, m, n, d, size)
    v = rng.standard_normal((n, 4)).astype(np.float32)
    # The heavy ones' values are as far from each other as values are, so that their weights matter.
    heavy = np.argsort(k.astype(np.float64) @ q[0])[-6:]
    v[heavy] = np.where(np.arange(6) % 2, 10, -10)[:, None]
    real = real_attention(q, k, v, {}, 1.0)
    # Whoever loses one of the six loses more than the budget.
    ranked = np.sort(real.weights, axis=-1)
    assert (ranked[:, -6] > eps).all()
    assert (ranked[:, :-6].sum(axis=-1) < 1e-80).all()
    index = ck.KeyIndex.build(k) if indexed else None
    for budget, slow in ((eps, False), (eps, indexed), (0.0, False)):
        found = ck.attention(q, k, v, budget, index=index, scale=1.0, even_if_slower=slow)
        check(found, real, budget)
        assert (found.log_mass_lower.astype(LD) <= real.log_mass).all()
        assert (real.log_mass <= found.log_mass_upper.astype(LD)).all()
        if slow:
            assert (found.k < n / 10).sum() > m / 2
        if not budget:
            assert (found.k == n).all()


@pytest.mark.parametrize("m", [2, 4, 8, 13])
def test_what_a_few_rows_weigh_that_keep_everything(m: int) -> None:
    """An index says that little can be dropped; then scores are in float32, and so is their sum."""
    rng, n, d = np.random.default_rng(m), 900, 64
    base = rng.standard_normal(d)
    for size in (1.0, 30.0, 100.0):
        # Scores of that size, which differ by little.
        k = (base + rng.standard_normal((n, d)) / 50).astype(np.float32)
        q = (base / (base @ base) * size + rng.standard_normal((m, d)) / 50).astype(np.float32)
        v = rng.standard_normal((n, 6)).astype(np.float32)
        real = real_attention(q, k, v, {}, 1.0)
        found = ck.attention(q, k, v, 0.02, index=ck.KeyIndex.build(k), scale=1.0)
        assert (found.k == n).all()
        check(found, real, 0.02)
        assert (found.log_mass_lower.astype(LD) <= real.log_mass).all()
        assert (real.log_mass <= found.log_mass_upper.astype(LD)).all()


# ------------------------------------------------------------------------ rows of unlike lengths


@pytest.mark.parametrize("rows", list(permutations((600, 900, 1500, 2100))))
def test_a_panel_of_four_rows_that_see_different_numbers_of_keys(rows: tuple[int, ...]) -> None:
    """Each row's heavy keys are the last that it sees, some beside the first ones."""
    rng, n, d = np.random.default_rng(rows), 2100, 32
    k = rng.standard_normal((n, d))
    q = np.empty((len(rows), d))
    for row, end in enumerate(rows):
        q[row] = 3 * rng.standard_normal(d)
        k[end - 9 : end - 1] += 2.5 * q[row] / np.linalg.norm(q[row])
        k[end % 7] += 2.5 * q[row] / np.linalg.norm(q[row])
    q, k = q.astype(np.float32), k.astype(np.float32)
    index = ck.KeyIndex.build(k)
    # As one head's rows, as four heads that share keys, and four at a time of eight.
    for shape in ((4,), (4, 1), (2, 2), (8,)):
        some = np.concatenate([q, q[::-1]])[: np.prod(shape)].reshape(*shape, d)
        lengths = np.concatenate([rows, rows[::-1]])[: np.prod(shape)].reshape(shape)
        keys, own = (k, index) if len(shape) == 1 else (k[None], None)
        own = ck.KeyIndex.build(keys) if own is None else own
        v = np.zeros((*keys.shape[:-1], 1), np.float32)
        real = real_attention(some, keys, v, {"lengths": lengths})
        found, kept = revealed(some, keys, 0.03, index=own, lengths=lengths)
        check_kept(found, kept, real, 0.03)
        assert (found.rung == 1).all()


@pytest.mark.parametrize("m", [16, 20, 33])
@pytest.mark.parametrize("sight", ["causal", "lengths", "both"])
def test_many_thinned_rows_that_see_different_numbers_of_keys(m: int, sight: str) -> None:
    rng, n, d = np.random.default_rng(m), 1100, 32
    k = rng.standard_normal((2, n, d))
    k[:, rng.integers(n, size=7)] *= 12
    q = 4 * rng.standard_normal((4, m, d))
    lengths = rng.integers(520, n + 1, (4, m))
    for head, row in np.ndindex(4, m):
        # What weighs most is the last that it sees.
        k[head // 2, lengths[head, row] - 1] += q[head, row] / 4
    q, k = q.astype(np.float32), k.astype(np.float32)
    how: dict[str, Any] = {}
    if sight != "lengths":
        how["causal"] = True
    if sight != "causal":
        how["lengths"] = lengths
    real = real_attention(q, k, np.zeros((2, n, 1)), how)
    eps = rng.choice([0.02, 0.1, 0.3], (4, m))
    index = ck.KeyIndex.build(k[:, : n // 2])
    index.append(k[:, n // 2 :])
    found, kept = revealed(q, k, eps, index=index, even_if_slower=True, **how)
    check_kept(found, kept, real, eps)
    assert (found.rung == 1).mean() > 0.9


@pytest.mark.parametrize("m", [1, 3, 20])
@pytest.mark.parametrize("indexed", [False, True])
def test_a_row_that_sees_no_key_weighs_what_its_sink_weighs(m: int, indexed: bool) -> None:
    rng = np.random.default_rng(m)
    q, k, v = (rng.standard_normal((2, n, 8), dtype=np.float32) for n in (m, 30, 30))
    index = ck.KeyIndex.build(k) if indexed else None
    for blind in ({"lengths": 0}, {"mask": np.zeros(30, bool)}):
        for sinks in ([0.7, -np.inf], [-700.0, 1e6]):
            found = ck.attention(q, k, v, 0.1, sinks=sinks, index=index, **blind)
            assert not found.out.any()
            assert not found.error_bound.any()
            at = np.broadcast_to(np.array(sinks)[:, None], (2, m))
            assert (found.log_mass_lower <= at).all()
            assert (at <= found.log_mass_upper).all()
            some = np.isfinite(at)
            assert (found.log_mass_upper[~some] == -np.inf).all()
            width = found.log_mass_upper[some] - found.log_mass_lower[some]
            assert (width <= 1e-12 * np.abs(at[some])).all()


@pytest.mark.parametrize("indexed", [False, True])
def test_each_row_has_its_own_budget_on_the_output(indexed: bool) -> None:
    """Rows that float32 cannot answer well enough, beside rows for which anything will do."""
    rng, n, d, m = np.random.default_rng(4), 700, 32, 20
    q = (12 * rng.standard_normal((2, m, d))).astype(np.float32)
    k, v = rng.standard_normal((2, 1, n, d)).astype(np.float32)
    real = real_attention(q, k, v, {})
    close = np.float64(np.abs(v).max()) * 2e-5
    within = np.where(np.arange(m) % 4 == 0, 1e3, close) * np.ones((2, 1))
    index = ck.KeyIndex.build(k) if indexed else None
    plain = ck.attention(q, k, v, 0.0, index=index)
    assert (plain.error_bound > within).any(), "every row is within its budget at once"
    found = ck.attention(q, k, v, out_tol=within, index=index)
    assert (found.error_bound <= within).all()
    check(found, real, 1.0)


@pytest.mark.parametrize("m", [1, 3, 20])
def test_masked_rows_of_large_scores(m: int) -> None:
    """Scores of 1e9 in float64, known to within 1e-6; nothing else moves the output."""
    rng, n, d = np.random.default_rng(m), 12, 20
    base = rng.standard_normal(d) + 5
    k = base * 3e4 / d + 1e-6 * rng.standard_normal((n, d))
    q = 3e4 * (rng.standard_normal((m, d)) + 7)
    v = np.where(np.arange(n) % 2, 1.0, -1.0)[:, None]
    mask = rng.random((m, n)) < 0.7
    # Both values are seen.
    mask[:, :2] = True
    found = ck.attention(q, k, v, 0.0, scale=1.0, mask=mask)
    check(found, real_attention(q, k, v, {"mask": mask}, 1.0), 0.0)
    assert (found.error_bound > 1e-9).all()


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("at", [0, 62, 63])
def test_the_largest_keys_of_blocks(m: int, at: int) -> None:
    """Two keys of scores of 1e9 share all mass, each anywhere in a block of 64."""
    rng, n, d = np.random.default_rng([m, at]), 128, 20
    base = rng.standard_normal(d) + 5
    k = 1e-3 * rng.standard_normal((n, d))
    k[at::64] = base * 3e4 / d + 1e-6 * rng.standard_normal((2, d))
    q = 3e4 * (rng.standard_normal((m, d)) + 7)
    v = np.where(np.arange(n) < 64, 1.0, -1.0)[:, None]
    for lengths in (n, n - 63 + at):
        found = ck.attention(q, k, v, 0.0, scale=1.0, lengths=lengths)
        check(found, real_attention(q, k, v, {"lengths": lengths}, 1.0), 0.0)


@pytest.mark.parametrize("m", [1, 3, 20])
@pytest.mark.parametrize("size", [1e-46, 1e39])
def test_queries_that_float32_does_not_hold(m: int, size: float) -> None:
    """Keys of float32, and products that do: rounded queries would be nothing, or infinite."""
    rng, n, d = np.random.default_rng(m), 600, 24
    wide = rng.standard_normal((m, d))
    k = (rng.standard_normal((n, d)) * (1e34 if size < 1 else 1e-34)).astype(np.float32)
    scale = 1.0 / (size * (1e34 if size < 1 else 1e-34))
    v = rng.standard_normal((n, 6)).astype(np.float32)
    real = real_attention(size * wide, k, v, {}, scale)
    for index in (None, ck.KeyIndex.build(k), ck.KvIndex.build(k, v)):
        for eps in (0.0, 0.05, 0.5):
            found = ck.attention(size * wide, k, v, eps, scale=scale, index=index)
            check(found, real, eps)


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_threads_share_a_few_rows(name: str) -> None:
    """Threads score portions of 4096 keys, of which sizes and sights are not the same."""
    rng, n, d, m = np.random.default_rng(8), 10_000, 64, 5
    k = rng.standard_normal((n, d))
    k[:3000] *= 8
    k[9000:] *= 2
    q = 0.2 * rng.standard_normal((m, d))
    v = np.cumsum(rng.standard_normal((n, 6)), axis=0)
    q, k, v = (x.astype(DTYPES[name]) for x in (q, k, v))
    mask = rng.random((m, n)) < np.linspace(0.5, 1, n)
    lengths = np.array([n, 4096, 4097, 9500, 8000])
    some: list[dict[str, Any]] = [{}, {"lengths": lengths}, {"mask": mask}]
    for eps in (0.0, 0.05):
        for sight in some:
            real, answers = real_attention(q, k, v, sight), set()
            for threads in (1, 2, 3):
                found = ck.attention(q, k, v, eps, threads=threads, **sight)
                check(found, real, eps)
                fields = (found.out, found.error_bound, found.tail_mass_upper, found.k)
                answers.add(b"".join(x.tobytes() for x in fields))
            assert len(answers) == 1
