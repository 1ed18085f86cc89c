"""Attention against an extended-precision reference: bounds hold, budgets are kept, errors name.

`real_attention` is the reference, with one case in 60 digits. Random calls with all options are in
test_combinations.py.
"""

from __future__ import annotations

import pickle
from typing import Any

import mpmath
import numpy as np
import pytest
from flint import arb

import certk_rs as ck
from levels import each_level
from real_attention import DTYPES, LD, check, real_attention
from real_rows import Cache


def length(vectors: np.ndarray) -> np.ndarray:
    return np.sqrt((vectors.astype(LD) ** 2).sum(axis=-1))


def made(
    rng: np.random.Generator, dtype: str, shape: tuple[int, ...], n: int, d: int, d_v: int,
    kv_heads: int, sigma: float = 3.0,
) -> list[np.ndarray]:  # fmt: skip
    *batch, _, _ = shape
    kv = (*batch[:-1], kv_heads) if batch else ()
    q = sigma * rng.standard_normal((*shape[:-1], d))
    k = rng.standard_normal((*kv, n, d))
    v = rng.standard_normal((*kv, n, d_v)) * rng.choice([1.0, 30.0])
    return [x.astype(DTYPES[dtype]) for x in (q, k, v)]


def test_plain_attention_is_exact_to_rounding() -> None:
    rng = np.random.default_rng(5)
    q, k, v = made(rng, "float32", (2, 4, 6, 64), 300, 64, 48, 2)
    exact = real_attention(q, k, v, {"causal": True}).out
    result = ck.attention(q, k, v, 0, causal=True)
    assert np.abs(result.out - exact).max() <= 4e-7 * np.abs(v).max()
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    result = ck.attention(q, k, v, 0, causal=True)
    assert np.abs(result.out - exact).max() <= 1e-14 * np.abs(v).max()


def test_sixty_digits() -> None:
    rng = np.random.default_rng(6)
    q, k, v = (
        rng.standard_normal((1, 3)),
        rng.standard_normal((5, 3)),
        rng.standard_normal((5, 2)),
    )
    result = ck.attention(q, k, v, 0.3)
    with mpmath.workdps(60):
        scale = mpmath.mpf(float(3) ** -0.5)
        scores = [mpmath.fdot(map(mpmath.mpf, row), map(mpmath.mpf, q[0])) * scale for row in k]
        weights = [mpmath.exp(score) for score in scores]
        total = mpmath.fsum(weights)
        average = [
            mpmath.fsum(w * mpmath.mpf(x) for w, x in zip(weights, v[:, j], strict=True)) / total
            for j in range(2)
        ]
        away = mpmath.norm([mpmath.mpf(o) - a for o, a in zip(result.out[0], average, strict=True)])
        assert away <= mpmath.mpf(result.error_bound[0])
        best = sorted(weights, reverse=True)[: int(result.k[0])]
        assert 1 - mpmath.fsum(best) / total <= mpmath.mpf(result.tail_mass_upper[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 6e4])
def test_what_is_masked_may_hold_anything(dtype: str, bad: float) -> None:
    rng = np.random.default_rng(7)
    n = 150
    q, k, v = (rng.standard_normal(s) for s in ((2, 3, 20), (2, n, 20), (2, n, 7)))
    hidden = np.zeros(n, dtype=bool)
    hidden[[0, 5, 64, 149]] = True
    k[:, hidden], v[:, hidden] = bad, bad
    q, k, v = (x.astype(DTYPES[dtype]) for x in (q, k, v))
    for eps in (0.0, 0.1):
        found = ck.attention(q, k, v, eps, mask=~hidden)
        check(found, real_attention(q, k, v, {"mask": ~hidden}), eps)
        for low in (-np.inf, 0.5 * np.finfo(np.float32).min):
            additive = np.where(hidden, low, 0.0).astype(np.float32)
            again = ck.attention(q, k, v, eps, mask=additive)
            assert again.out.tobytes() == found.out.tobytes()
        sight: dict[str, Any] = {"lengths": 5, "mask": ~hidden}
        check(ck.attention(q, k, v, eps, **sight), real_attention(q, k, v, sight), eps)


def test_each_row_has_its_own_ball_where_a_head_has_none() -> None:
    rng = np.random.default_rng(8)
    q, k, v = (rng.standard_normal(s) for s in ((4, 8), (40, 8), (40, 3)))
    q *= 4
    v[39] = np.nan
    lengths = np.array([39, 0, 39, 40])
    k[39] = -1e3 * q[3]  # row 3 sees it, and drops it
    result = ck.attention(q, k, v, 0.1, lengths=lengths)
    assert np.isfinite(result.error_bound).tolist() == [True, True, True, False]
    with pytest.raises(ck.CertkError, match=r"v\[39, 0\] is not finite"):
        ck.attention(q, k, v, 0.0, lengths=lengths)
    with pytest.raises(ck.CertkError, match=r"v\[39, 0\] is not finite"):
        ck.attention(q, k, v, out_tol=0.1)


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((3, 8), (0, 8), (0, 4)),
        ((0, 8), (5, 8), (5, 4)),
        ((2, 0, 3, 8), (2, 0, 5, 8), (2, 0, 5, 4)),
        ((0, 2, 3, 8), (0, 1, 5, 8), (0, 1, 5, 4)),
    ],
)
@pytest.mark.parametrize("budget", [{"eps": 0.1}, {"eps": 0}, {"out_tol": 0.1}])
def test_nothing_to_do(q: Any, k: Any, v: Any, budget: dict[str, float]) -> None:
    result = ck.attention(np.ones(q), np.ones(k), np.ones(v), mask=np.ones(k[-2], bool), **budget)
    assert result.out.shape == (*q[:-1], v[-1])
    assert not result.out.any()
    for field in ("tail_mass_upper", "error_bound", "k", "scored", "rung"):
        assert getattr(result, field).shape == q[:-1]
    assert not result.error_bound.any()
    assert "AttentionResult" in repr(result)


def test_more_queries_than_keys_see_nothing_at_first() -> None:
    rng = np.random.default_rng(9)
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((7, 4), (3, 4), (3, 2)))
    result = ck.attention(q, k, v, 0.0, causal=True)
    assert result.k.tolist() == [0, 0, 0, 0, 1, 2, 3]
    assert not result.out[:4].any()
    assert np.array_equal(result.out[4], v[0])


def test_strides_and_broadcasts() -> None:
    rng = np.random.default_rng(10)
    big = rng.standard_normal((3, 50, 2, 24)).astype(np.float32)
    k, v = big[:, :, 0].copy(), big[:, :, 1].copy()
    q = rng.standard_normal((6, 4, 24)).astype(np.float32)
    plain = ck.attention(q, k, v, 0.05)
    strided = ck.attention(
        np.asfortranarray(q), big[:, :, 0], big.transpose(0, 2, 1, 3)[:, 1], 0.05
    )
    assert np.array_equal(plain.out, strided.out)
    assert np.array_equal(plain.error_bound, strided.error_bound)
    one = np.broadcast_to(k[:1], k.shape), np.broadcast_to(v[:1], v.shape)
    repeated = np.repeat(k[:1], 3, 0), np.repeat(v[:1], 3, 0)
    assert np.array_equal(ck.attention(q, *one, 0.05).out, ck.attention(q, *repeated, 0.05).out)
    reverse = ck.attention(q, k[:, ::-1], v[:, ::-1], 0.0)
    assert np.allclose(reverse.out, ck.attention(q, k, v, 0.0).out, atol=1e-5)


def test_same_bits_for_all_threads_and_levels() -> None:
    rng = np.random.default_rng(11)
    q, k, v = (
        rng.standard_normal(s).astype(np.float32) * f
        for s, f in (((4, 9, 40), 3), ((2, 3000, 40), 1), ((2, 3000, 33), 1))
    )
    index = ck.KeyIndex.build(k)
    mask = rng.random((4, 9, 3000)) < 0.5
    mask[..., :640] = False
    options = ({"eps": 0.02}, {"eps": 0.0}, {"out_tol": 0.05}, {"eps": 0.0, "mask": mask})
    answers = []
    for level in each_level():
        for threads in (1, 2, 3):
            for lent in (None, index):
                for option in options:
                    r = ck.attention(q, k, v, index=lent, threads=threads, causal=True, **option)
                    fields = [r.tail_mass_upper, r.k, r.scored, r.rung]
                    # Many rows together have other last bits there.
                    fields += [] if level == "amx" else [r.out, r.error_bound]
                    answers.append([field.tobytes() for field in fields])
    assert len(answers) >= 24
    for at, answer in enumerate(answers):
        assert answer == answers[at % 8][: len(answer)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_together_have_the_same_certificates_at_all_levels(dtype: str) -> None:
    """Weights and values of eight bits, where the budget allows them, and all bits elsewhere."""
    rng = np.random.default_rng(14)
    q, k, v = made(rng, dtype, (4, 70, 33), 700, 33, 41, 2)
    q[1] *= np.asarray(4, q.dtype)
    eps = rng.choice([0.0, 1e-4, 0.01, 0.3], (4, 70))
    sinks = np.array([0.3, -np.inf, 5.0, -800.0])
    sight: dict[str, Any] = {"causal": True}
    real = real_attention(q, k, v, sight, None, sinks)
    answers, outputs = set(), set()
    for level in each_level():
        for threads in (1, 3):
            r = ck.attention(q, k, v, eps, sinks=sinks, threads=threads, **sight)
            check(r, real, eps)
            fields = (r.tail_mass_upper, r.k, r.scored, r.rung)
            answers.add(b"".join(field.tobytes() for field in fields))
            outputs.add((level == "amx", np.asarray(r.out).tobytes()))
    assert len(answers) == 1
    assert len(outputs) <= 2
    assert (r.k == real.seen.sum(axis=-1)).all()
    assert (r.tail_mass_upper[eps <= 1e-4] == 0).all()
    short = r.tail_mass_upper[eps == 0.3]
    assert ((short > 1e-3) & (short < 0.02)).mean() > 0.9


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_tol_random(dtype: str) -> None:
    rng = np.random.default_rng(12)
    q, k, v = made(rng, dtype, (4, 5, 32), 900, 32, 24, 2)
    exact = real_attention(q, k, v, {"causal": True}).out
    spread = float(length(v).max())
    fewest = []
    for part in (1e-1, 3e-2, 1e2):
        tolerance = np.full((4, 5), part * spread) * rng.uniform(0.9, 1.1, (4, 5))
        result = ck.attention(q, k, v, out_tol=tolerance, causal=True, even_if_slower=True)
        assert (result.error_bound <= tolerance).all()
        assert (length(result.out.astype(LD) - exact) <= result.error_bound).all()
        fewest.append(result.k.sum())
    assert fewest[2] < fewest[0] < fewest[1]
    with pytest.raises(ck.CertkError, match=r"out_tol\[0, 0\] is .*raise out_tol"):
        ck.attention(q, k, v, out_tol=1e-17)


def test_real_rows(small_cache: Cache) -> None:
    names = sorted(name for name in small_cache if name.endswith(".query"))
    for name in names:
        q, k, v = (small_cache[name.replace("query", x)] for x in ("query", "key", "value"))
        q, k, v = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v))
        real = real_attention(q, k, v, {})
        index = ck.KeyIndex.build(k)
        for lent in (None, index):
            for eps in (0.0, 0.01, 0.3):
                check(ck.attention(q, k, v, eps, index=lent), real, eps)
            result = ck.attention(q, k, v, out_tol=0.1, index=lent)
            assert (result.error_bound <= 0.1).all()
            check(result, real, 1.0)


def test_ball() -> None:
    rng = np.random.default_rng(13)
    q, k, v = (
        rng.standard_normal(s).astype(np.float32) for s in ((4, 2, 16), (2, 90, 16), (2, 90, 5))
    )
    real = real_attention(q, k, v, {})
    ball = ck.ValueBall(v[:, :60])
    assert len(ball) == 60
    with pytest.raises(ck.CertkError, match=r"^v has shape .*append"):
        ck.attention(q, k, v, 0.2, ball=ball)
    ball.append(v[:, 60:])
    for budget in ({"eps": 0.2}, {"out_tol": 0.5}):
        result = ck.attention(q, k, v, ball=ball, **budget)
        check(result, real, 1.0)
    whole = ck.ValueBall(v)
    assert whole.radius.shape == (2,)
    assert (np.abs(whole.radius / ball.radius - 1) < 0.5).all()
    mine, plain = ck.attention(q, k, v, 0.2, ball=whole), ck.attention(q, k, v, 0.2)
    assert np.array_equal(mine.error_bound, plain.error_bound)
    spoilt = v.copy()
    spoilt[1, 3, 2] = np.nan
    assert np.isfinite(ck.ValueBall(spoilt).radius).tolist() == [True, False]
    for bad in (3, np.ones(3), np.ones((2, 3, 0)), v.astype(int)):
        with pytest.raises(ck.CertkError, match=r"^v "):
            ck.ValueBall(bad)
    with pytest.raises(ck.CertkError, match=r"^v has shape"):
        ball.append(v[:1])


def test_the_bound_is_of_the_values_when_it_is_read() -> None:
    rng = np.random.default_rng(14)
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((2, 16), (90, 16), (90, 5)))
    first, second = ck.attention(q, k, v, 0.3), ck.attention(q, k, v, 0.3)
    known = first.error_bound.copy()
    v *= 1000
    assert np.array_equal(first.error_bound, known)
    assert (second.error_bound > 100 * known).all()
    again = pickle.loads(pickle.dumps(first))
    assert np.array_equal(again.error_bound, known)
    assert np.array_equal(again.out, first.out)
    for field in ("out", "error_bound", "tail_mass_upper", "k", "scored", "rung"):
        assert not getattr(first, field).flags.writeable


def test_kinds_of_arrays() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(15)
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((2, 16), (90, 16), (90, 5)))
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    for dtype in DTYPES:
        some = [tensor.to(getattr(torch, dtype)) for tensor in tensors]
        kind = ck.attention(*some, 0.1).out
        assert kind.dtype == some[0].dtype
        wide = [tensor.double().numpy().astype(DTYPES[dtype]) for tensor in some]
        assert (kind.double().numpy() == ck.attention(*wide, 0.1).out.astype(np.float64)).all()
    result = ck.attention(*tensors, 0.1)
    assert isinstance(result.out, torch.Tensor)
    assert np.array_equal(result.out.numpy(), ck.attention(q, k, v, 0.1).out)
    known = ck.attention(*tensors, 0.1).error_bound
    result.out.zero_()
    assert np.array_equal(result.error_bound, known)
    mixed = ck.attention(q.astype(np.float16), tensors[1], v.tolist(), 0.1)
    assert mixed.out.dtype == np.float16
    ml_dtypes = pytest.importorskip("ml_dtypes")
    small = [x.astype(ml_dtypes.bfloat16) for x in (q, k, v)]
    assert ck.attention(*small, 0.1).out.dtype == ml_dtypes.bfloat16


Q, K, V = (2, 4, 3, 8), (2, 2, 10, 8), (2, 2, 10, 5)


@pytest.mark.parametrize("shape", [(2, 2, 9, 8), (2, 2, 10, 4), (2, 1, 10, 8), (10, 8)])
def test_an_index_of_other_keys(shape: tuple[int, ...]) -> None:
    index = ck.KeyIndex.build(np.ones(shape, np.float32))
    q, k, v = (np.ones(s, np.float32) for s in (Q, K, V))
    with pytest.raises(ck.CertkError, match=r"^k has shape .*the index was built of"):
        ck.attention(q, k, v, 0.1, index=index)


def test_an_index_of_the_same_keys_in_another_dtype() -> None:
    """Keys that were rounded since they were indexed are other keys."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(19)
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in (Q, K, V))
    for one, other in (
        (k, k.astype(np.float16)),
        (k.astype(np.float16), k),
        (k, torch.from_numpy(k).bfloat16()),
    ):
        with pytest.raises(ck.CertkError, match=r"^k are .* when they were indexed"):
            ck.attention(q, other, v, 0.1, index=ck.KeyIndex.build(one))


def test_no_index_for_float64() -> None:
    index = ck.KeyIndex.build(np.ones(K, np.float32))
    with pytest.raises(ck.CertkError, match=r"^k has shape .*float64 cannot be indexed"):
        ck.attention(np.ones(Q), np.ones(K), np.ones(V), 0.1, index=index)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_ends_of_the_range(dtype: str) -> None:
    """Values that their own precision cannot add, and those next to nothing."""
    rng = np.random.default_rng(16)
    q, k = (rng.standard_normal(s).astype(dtype) for s in ((3, 8), (100, 8)))
    top = np.finfo(dtype).max
    for v in (np.full((100, 4), top), np.full((100, 4), -top), np.full((100, 4), top * 1e-37)):
        for eps in (0.0, 0.3):
            result = ck.attention(q, k, (v * 0.99).astype(dtype), eps)
            assert np.allclose(result.out, v[0] * 0.99, rtol=1e-5)
    tiny = np.finfo(dtype).smallest_subnormal * rng.integers(-9, 9, (100, 4))
    tiny = tiny.astype(dtype)
    check(ck.attention(q, k, tiny, 0.1), real_attention(q, k, tiny, {}), 0.1)


def test_scores_beyond_all_precision() -> None:
    """All keys are kept if float64 cannot tell scores apart; the bound still holds."""
    rng = np.random.default_rng(17)
    q, k, v = (rng.standard_normal(s) for s in ((3, 8), (100, 8), (100, 4)))
    result = ck.attention(q * 1e12, k * 1e12, v, 0.1)
    assert (result.k == 100).all()
    assert (result.error_bound >= 0.1).all()
    assert np.isfinite(result.error_bound).all()


@pytest.mark.parametrize("m", [3, 16, 40])
def test_what_only_other_sequences_see_may_hold_anything(m: int) -> None:
    """Sequences of a batch end at different keys, and what lies behind the end is not read."""
    rng = np.random.default_rng(18)
    shapes = ((2, 4, m, 8), (2, 2, 300, 8), (2, 2, 300, 5))
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in shapes)
    lengths = np.broadcast_to(np.array([130, 300])[:, None, None], (2, 4, m))
    real = real_attention(q, k, v, {"lengths": lengths})
    k[0, :, 130:], v[0, :, 130:] = np.nan, np.inf
    for eps in (0.0, 0.1):
        result = ck.attention(q, k, v, eps, lengths=lengths)
        check(result, real, eps)
        assert np.isfinite(result.error_bound).all()


@pytest.mark.parametrize("m", [1, 3, 40])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_scores_that_overflow_are_errors(m: int, sign: float) -> None:
    """A product of finite vectors that is -inf, inf or NaN is no mask."""
    q, k, v = np.full((m, 2), 1e200), np.ones((5, 2)), np.ones((5, 3))
    k[3] = sign * 1e200
    message = r"^a score of k\[3\] is .*q\.k times scale overflows float64"
    for budget in ({"eps": 0.1}, {"eps": 0.0}, {"out_tol": 0.1}):
        with pytest.raises(ck.CertkError, match=message):
            ck.attention(q, k, v, **budget)
    k[3, 1] = -k[3, 0]
    with pytest.raises(ck.CertkError, match=message):
        ck.attention(q, k, v, 0.1)


@pytest.mark.parametrize("masked", [False, True])
def test_keys_are_dropped_even_if_that_is_slower(masked: bool) -> None:
    """Many rows, each of which needs most of its keys."""
    rng = np.random.default_rng(19)
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((40, 16), (300, 16), (300, 8)))
    mask = rng.random((40, 300)) < 0.9 if masked else None
    real = real_attention(q, k, v, {"mask": mask})
    for index in (None, ck.KeyIndex.build(k)):
        plain = ck.attention(q, k, v, 0.05, mask=mask, index=index)
        slow = ck.attention(q, k, v, 0.05, mask=mask, index=index, even_if_slower=True)
        check(slow, real, 0.05)
        assert (plain.k == real.seen.sum(axis=-1)).all()
        assert (slow.k < real.seen.sum(axis=-1)).all()
        assert (slow.tail_mass_upper > 0).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("indexed", [False, True])
def test_a_sink_that_outweighs_its_row_leaves_something_lost(dtype: str, indexed: bool) -> None:
    """The upper end is 0 only where nothing was dropped, and never below the least possible loss.

    What is dropped is not told, but keys that score less weigh less: k kept keys lose no less than
    all others but the k best. In exact arithmetic (Arb).
    """
    rng = np.random.default_rng(5)
    query = np.ones((1, 1), DTYPES[dtype])
    dropped = 0
    for sink in (-1e300, -800.0, 0.0, 100.0, 400.0, 700.0, 1e4, 1e10):
        for depth in (1.0, 100.0, 600.0, 1e4):
            scores = np.concatenate([[0.0], -depth * (1 + rng.random(30) / 8)])
            lent = scores[:, None].astype(DTYPES[dtype])
            index = ck.KeyIndex.build(lent) if indexed else None
            found = ck.attention(
                query, lent, lent, 0.3, scale=1.0, sinks=sink, index=index, even_if_slower=True
            )
            k, upper = int(found.k[0]), float(found.tail_mass_upper[0])
            assert (upper > 0.0) == (k < 31)
            assert upper <= 0.3
            dropped += k < 31
            ranked = sorted(lent[:, 0].astype(np.float64).tolist(), reverse=True)
            weights = [arb(score).exp() for score in ranked]
            lost = sum(weights[k:], arb(0)) / (sum(weights, arb(0)) + arb(sink).exp())
            assert arb(upper) >= lost
    assert dropped >= 20


def test_a_sink_shrinks_the_output_and_the_tail_by_its_share() -> None:
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal(shape) for shape in ((1, 3, 16), (1, 500, 16), (1, 500, 8)))
    scores = q[0] @ k[0].T / 4
    # The sink is the heavier by a factor of three.
    sink = np.log(3 * np.exp(scores).sum(-1).mean())
    share = 1 / (1 + np.exp(sink) / np.exp(scores).sum(-1))
    bare, sunk = ck.attention(q, k, v, 0.2), ck.attention(q, k, v, 0.2, sinks=sink)
    assert (bare.k == sunk.k).all()
    assert np.allclose(sunk.tail_mass_upper, bare.tail_mass_upper * share, rtol=1e-2)
    assert (sunk.tail_mass_upper >= bare.tail_mass_upper * share).all()
    none = ck.attention(q, k, v, 0.2, sinks=[-np.inf])
    assert np.array_equal(none.out, bare.out)
    assert np.array_equal(none.tail_mass_upper, bare.tail_mass_upper)
    # A budget on the output.
    exact = real_attention(q, k, v, {}, sinks=np.full(1, sink)).out
    close = ck.attention(q, k, v, out_tol=0.01, sinks=sink)
    assert (length(close.out - exact) <= 0.01).all()
    assert (close.error_bound <= 0.01).all()


def test_sums_of_weights_in_f32_are_paid_for_where_values_are_far_from_zero() -> None:
    """Sixteen heavy keys, 240 that f32 loses when it adds them, and equal values: an error of the
    sum of weights moves the output by its length, however small the ball of the values is. With
    numbers in eight bits the values themselves do."""
    n, d, m = 16_384, 16, 64
    value = np.float32(1 + 0.99 / 256)
    rng = np.random.default_rng(0)
    worst = 0.0
    for far, size, eps in ((-14, 50, 0.5), (-10, 200, 1e-4), (-9, 1e4, 1e-4)):
        k = np.zeros((n, d), np.float32)
        q = np.zeros((m, d), np.float32)
        q[:, 0] = 1
        k[16:256, 0] = -16.65
        k[256:, 0] = far + rng.uniform(-0.5, 0.5, n - 256)
        k[256:, 1:] = rng.standard_normal((n - 256, d - 1)) / 2
        k[16:256, 1:] = rng.choice([-1, 1], (240, d - 1)) * size  # left without a code
        v = np.full((n, d), value, np.float32)
        index = ck.KeyIndex.build(k, rotate=False)
        found = ck.attention(q.astype(np.float64), k, v, eps, index=index, scale=1.0)
        off = np.linalg.norm(found.out - float(value), axis=1)
        assert (off <= found.error_bound).all()
        worst = max(worst, float((off / found.error_bound).max()))
        if found.tail_mass_upper.any() and ck.simd_level() == "amx":
            assert worst > 0.9


@pytest.mark.parametrize("offset", [1e2, 1e4, 1e6, 1e8])
def test_an_index_does_not_make_flat_rows_vague(offset: float) -> None:
    """Keys far from zero, whose scores float32 does not tell apart."""
    rng = np.random.default_rng(3)
    k = (offset + rng.normal(size=(3000, 64))).astype(np.float32)
    v = rng.normal(size=(3000, 64)).astype(np.float32)
    q = rng.normal(size=(4, 64)).astype(np.float32)
    plain = ck.attention(q, k, v, 1e-3)
    found = ck.attention(q, k, v, 1e-3, index=ck.KeyIndex.build(k))
    assert (found.error_bound <= 2 * plain.error_bound + 1e-2).all()


@pytest.mark.parametrize("rows", [1, 4, 64])
def test_what_is_flushed_far_below_a_key_without_a_code(rows: int) -> None:
    """Keys without a code are sampled with a made-up score; far below that, weights are flushed.

    Relative to the largest score of the list, 32 nats below, it weighs more than a float's least.
    """
    n, dim, listed = 60_015, 16, 15
    keys = np.zeros((n, dim), np.float32)
    # Codes of these are exact, so that nothing but the flush is left to charge.
    keys[:2, 0], keys[2:listed, 0], keys[listed:, 0] = 31.75 * 6.5, -31.75, -95.25
    beside = np.float32(1.625) * (40 + np.linspace(0.3, 0.7, dim - 1)).astype(np.float32)
    keys[0, 1:], keys[1, 1:] = beside, -beside
    index = ck.KeyIndex.build(keys[:listed], rotate=False)
    index.append(keys[listed:])
    queries = np.zeros((rows, dim), np.float32)
    queries[:, 0] = 1
    scores = keys[:, 0].astype(LD)
    weights = np.exp(scores - scores.max())
    for eps in (1e-104, 1e-120):
        found = ck.attention(queries, keys, keys, eps, index=index, scale=1.0)
        searched = index.search(queries, eps, keys=keys, scale=1.0)
        for result in (found, searched):
            for k, upper in zip(np.ravel(result.k), np.ravel(result.tail_mass_upper), strict=True):
                # The heaviest are kept: here sets of so many keys lose what is behind them.
                assert upper >= weights[k:].sum() / weights.sum()
                assert upper <= eps


def test_tiny_budgets_with_an_index() -> None:
    """Below 2e-18 what may have been flushed decides alone, and no edge of a list helps."""
    rng = np.random.default_rng(8)
    for n, dim in [(600, 16), (5000, 64), (20_000, 64)]:
        keys = rng.standard_normal((n, dim)).astype(np.float32)
        index = ck.KeyIndex.build(keys)
        for rows in (1, 4, 40):
            queries = (8 * rng.standard_normal((rows, dim))).astype(np.float32)
            scores = queries.astype(LD) @ keys.T.astype(LD) / np.sqrt(LD(dim))
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            least = np.cumsum(np.sort(weights, axis=-1), axis=-1)
            least = np.concatenate([np.zeros((rows, 1), LD), least], axis=-1)
            for eps in (1e-12, 2e-18, 1e-19, 1e-21, 1e-25, 1e-37, 1e-100, 1e-300):
                found = ck.attention(queries, keys, keys, eps, index=index, even_if_slower=True)
                # No set of so many keys loses less.
                lost = np.take_along_axis(least, n - found.k[:, None], axis=-1)[:, 0]
                assert (found.tail_mass_upper <= eps).all()
                assert (found.tail_mass_upper >= lost * (1 - LD(1e-6))).all()


@pytest.mark.parametrize("sink", [600.0, 709.0, 720.0, 5000.0, 1e9])
def test_the_mass_beside_a_sink_far_above(sink: float) -> None:
    """`log_mass` includes the sink, and is known also where its weight overflows."""
    rng = np.random.default_rng(9)
    q, k, v = (rng.standard_normal((1, n, 16)).astype(np.float32) for n in (20, 700, 700))
    index = ck.KeyIndex.build(k)
    cases = ((q[:, :1], index, 0.1), (q[:, :1], None, 0.1), (q, index, 1e-4), (q, None, 0.1))
    for rows, beside, eps in cases:
        found = ck.attention(rows, k, v, eps, index=beside, sinks=np.array([sink]))
        # ln(e^sink + what keys weigh) exceeds the sink by less than it can say.
        assert (found.log_mass_lower <= sink).all()
        assert (found.log_mass_upper >= sink).all()
        width = found.log_mass_upper - found.log_mass_lower
        # Scores in f32 are known to 1e-4 nats, and a sink of 1e9 to 1e-6; short weights to 1/256.
        assert (width <= (1e-2 if beside is None and rows is q else 2e-4)).all()
        assert np.abs(found.out).max() <= 1e-200
