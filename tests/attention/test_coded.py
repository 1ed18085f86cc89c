"""Weights from codes, seen from outside: what a row claims is held against the real attention.

Values that are axes show the weights that a row used: each of 128 classes of keys has an axis.
Their mean and the unit of their codes are 1/128, so codes lose nothing of them, and an output is
the sum of the used weights of each class, to rounding. Half the sum of its distances from the real
shares of the classes is at most the total variation distance, and equal to it where a row sees one
key of each class. Other values show the output's error. `real_attention`, and in one case Arb, are
the references.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flint import arb

import certk_rs as ck
from levels import each_level
from real_attention import DTYPES, LD, Real, check, real_attention
from real_rows import Cache, layers
from score_changes import made_changes

AXES = 128
# An output of axes is in float32: the mean 1/128 and sums of weights times 127/128 or -1/128, with
# some tens of roundings. Their sizes add up to 3, of which a distance takes half. The share of a
# sink is one more sum: 3 * 32 * 2^-24.
SHOWN = LD(2.0**-17)
# Weights are whole numbers when they multiply codes of values, each off by .51 of the 32639th part
# of the largest of 64. What that moves an output by is in its error, not in the distance.
BLOCK, WHOLE = 64, LD(0.51 / 32639)
BUDGETS = (1e-300, 1e-12, 1e-6, 1e-4, 1e-3, 0.01, 0.05, 0.3, 0.999)
USUAL = BUDGETS[4:]


def classes(n: int) -> np.ndarray:
    """Return the class of each key, of as many keys each; also of every part that a mean is of.

    Of more than 1024 values a sample of 1024 at equal distances is averaged.
    """
    return np.asarray(np.arange(n) // max(1, n // 1024) % AXES)


def axes(shape: tuple[int, ...]) -> np.ndarray:
    """Return values that show weights, for keys of that shape."""
    own = np.eye(AXES, dtype=np.float32)[classes(shape[-2])]
    return np.broadcast_to(own, (*shape[:-1], AXES))


def coded(found: ck.AttentionResult) -> np.ndarray:
    return np.asarray(found.rung == ck.Rung.CODED)


def shares_of(weights: np.ndarray) -> np.ndarray:
    """Return the sums of the weights of each class of keys."""
    n = weights.shape[-1]
    runs = weights.reshape(*weights.shape[:-1], -1, AXES, max(1, n // 1024))
    return np.asarray(runs.sum(axis=(-1, -3)))


def distances(out: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Half the distance of what was shown from the real shares, that of a sink among them."""
    off = out.astype(LD) - shares
    return np.asarray(np.abs(off).sum(axis=-1) + np.abs(off.sum(axis=-1))) / 2


def check_shown(found: ck.AttentionResult, real: Real, eps: Any) -> float:
    """Check a result with axes as values; return the largest part of a claim that is true."""
    shares = shares_of(real.weights)
    check(found, replace(real, out=shares), eps)
    rows, claimed = coded(found), found.tail_mass_upper.astype(LD)
    away = distances(np.asarray(found.out), shares)
    # A block's largest used weight is at most the largest real one and how far its weights are off.
    # A weight off by x moves an output of axes by 2 x, of which a distance takes half.
    blocks = real.weights.reshape(*claimed.shape, -1, BLOCK).max(axis=-1).sum(axis=-1)
    allowed = SHOWN + BLOCK * WHOLE * (blocks + 2 * claimed)
    assert (~rows | (away <= claimed + allowed)).all()
    tight = rows & (claimed > 20 * allowed)
    return float((away[tight] / claimed[tight]).max(initial=0))


def built(k: np.ndarray, v: np.ndarray, halves: bool = False, **options: Any) -> Any:
    """Return an index of keys and values, all at once or in two halves."""
    half = k.shape[-2] // 2 if halves else k.shape[-2]
    index = ck.KvIndex.build(k[..., :half, :], v[..., :half, :], **options)
    if halves:
        index.append(k[..., half:, :], v[..., half:, :])
    return index


# ------------------------------------------------------------------------- claims that are reached


def two_sided(n: int, d: int, size: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Return keys that codes take for equal, and the signs of what codes lose of them.

    Unturned, an entry of 127 sets the unit to 1. Another is .45 or -.45, of which nothing is left.
    """
    # The same of all keys of a class, and as many of both in every part that a mean is of.
    signs = np.where(classes(n) % 4 < 2, 1.0, -1.0)
    k = np.zeros((n, d))
    k[:, 0] = 127 * np.where(classes(n) % 2, 1, -1)
    k[:, 1] = 0.45 * signs
    return (size * k).astype(np.float32), signs


@pytest.mark.parametrize(("n", "d"), [(512, 64), (1024, 2), (4096, 16), (4096, 64)])
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_equal_weights_whose_errors_all_count(n: int, d: int, part: float) -> None:
    """Half of the keys weigh e^x by right and half e^-x: claims are then nearly the truth.

    The values are the signs of the errors, so that the output is as wrong as weights are.
    """
    k, signs = two_sided(n, d)
    for eps in (1e-3, 0.01, 0.02):
        q = np.zeros((2, d), np.float32)
        q[:, 1] = 2 * part * eps / 0.45
        real = real_attention(q, k, np.zeros((n, 1)), {}, 1.0)
        v = axes(k.shape)
        found = ck.attention(q, k, v, eps, index=built(k, v, rotate=False), scale=1.0)
        tight = check_shown(found, real, eps)
        assert coded(found).all()
        # Smaller claims are lost in roundings.
        small = part * eps < 0.002
        assert tight > 0.9 or small
        v = np.zeros((n, 20), np.float32)
        v[:, 3] = signs
        real = real_attention(q, k, v, {}, 1.0)
        found = ck.attention(q, k, v, eps, index=built(k, v, rotate=False), scale=1.0)
        check(found, real, eps)
        away = np.abs(found.out.astype(LD) - real.out).max(axis=-1)
        assert coded(found).all()
        assert small or (away > 0.8 * found.error_bound).all()


@pytest.mark.parametrize("heavy", [1.0, 3.0, 6.0, 9.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_one_heavy_key_whose_code_is_off(heavy: float, sign: float) -> None:
    n, d = 4096, 16
    k, _ = two_sided(n, d)
    # By its code this key is `heavy` nats above all others.
    k[5, 2], k[5, 1] = 8, 0.45 * sign
    for eps in (0.003, 0.03, 0.3):
        for part in (0.3, 1, 3, 10):
            q = np.zeros((1, d), np.float32)
            q[0, 1], q[0, 2] = part * eps / 0.45, heavy / 8
            real = real_attention(q, k, np.zeros((n, 1)), {}, 1.0)
            v = axes(k.shape)
            found = ck.attention(q, k, v, eps, index=built(k, v, rotate=False), scale=1.0)
            check_shown(found, real, eps)


def test_light_keys_that_are_scored_exactly_and_whose_values_lose() -> None:
    """Their values come from codes, and lose the same; little is in the weights of all others."""
    n, d = 4096, 16
    k, _ = two_sided(n, d)
    v = np.zeros((n, 3), np.float32)
    v[:, 0] = 127 * np.where(classes(n) % 2, 1, -1)
    heavy, light = np.arange(n) // 4 % 8 == 0, np.arange(n) // 4 % 8 == 4
    some = np.arange(n) < 1600
    for keys, sign in ((heavy & some, 1), (light & some, -1)):
        k[keys, 2], v[keys, 1] = 64 * sign, 0.45 * sign
    assert 100 < (heavy & some).sum() < 300
    q = np.zeros((1, d), np.float32)
    q[0, 1], q[0, 2] = 0.1 / 0.45, 8.0 / 64
    found = ck.attention(q, k, v, 0.005, index=built(k, v, rotate=False), scale=1.0)
    real = real_attention(q, k, v, {}, 1.0)
    check(found, real, 0.005)
    assert coded(found).all()
    assert (found.scored == (heavy & some).sum()).all()
    # What is lost of values is most of the error.
    away = np.abs(found.out.astype(LD) - real.out).max(axis=-1)
    assert (away > 0.5 * found.error_bound).all()


def test_weights_of_values_that_round_by_most() -> None:
    """Small weights beside a large one of their block: halves of its number round up or to zero.

    Those that round up have values of one, the others of minus one.
    """
    n, d = 16384, 16
    k, _ = two_sided(n, d)
    k[:, 1] = 0
    at = np.arange(n)
    sign = np.where(at // 16 % 2, 1, -1)
    k[:, 3] = sign
    k[at % 256 == 0, 2], k[at % 256 == 128, 2] = 100, -100
    v = np.tile(sign[:, None], (1, 16)).astype(np.float32)
    q = np.zeros((1, d), np.float32)
    # The number of a weight is a half at most, or at least.
    q[0, 2], q[0, 3] = np.log(2 * 32639) / 100, 0.02
    # Large weights have equal signs.
    q[0, 2] -= 0.02 * sign[0] / 100
    real = real_attention(q, k, v, {}, 1.0)
    found = ck.attention(q, k, v, 0.001, index=built(k, v, rotate=False), scale=1.0)
    check(found, real, 0.001)
    assert coded(found).all()
    away = np.sqrt(np.square(found.out.astype(LD) - real.out).sum(axis=-1))
    assert (away > 0.7 * found.error_bound).all()


@pytest.mark.parametrize("part", [0.0, 0.2, 0.49, 0.51, 0.9])
def test_queries_that_sixteen_bits_do_not_hold(part: float) -> None:
    """Keys have exact codes; all of a query but one entry, which they lack, is a part of a unit."""
    n, d = 1024, 16
    k = np.zeros((n, d), np.float32)
    k[:, 1:] = 127 * np.where(classes(n) % 4 < 2, 1, -1)[:, None]
    q = np.full((1, d), part / 32639, np.float32)
    q[0, 0] = 1
    real, v = real_attention(q, k, np.zeros((n, 1)), {}, 1.0), axes(k.shape)
    found = ck.attention(q, k, v, 0.3, index=built(k, v, rotate=False), scale=1.0)
    tight = check_shown(found, real, 0.3)
    assert coded(found).all()
    assert tight > 0.4 or part in (0, 0.9)


def test_exact_scores_that_float32_rounds() -> None:
    """Keys far from zero, of which the heavy ones have codes that are far off; the others, none.

    Scores of 65536 have units of 1/128, and heavy ones differ by parts of it.
    """
    n, d = 4096, 16
    rng, k, of = np.random.default_rng(19), two_sided(n, d)[0], classes(n)
    k[:, 2] = np.choose(of % 4, (64, 0, -64, 0))
    some = rng.integers(1, 101, AXES // 2)
    k[:, 3], k[:, 4] = np.append(some, -some[::-1])[of], 2**14
    q = np.zeros((1, d), np.float32)
    # Whole numbers of the unit of its form in sixteen bits.
    q[0, 1:5] = np.array([32639, 1024, 1, 2**14]) / 2**12
    real, v = real_attention(q, k, np.zeros((n, 1)), {}, 1.0), axes(k.shape)
    found = ck.attention(q, k, v, 0.9, index=built(k, v, rotate=False), scale=1.0)
    check_shown(found, real, 0.9)
    assert coded(found).all()
    assert (found.scored == n / 4).all()
    # It is more than all else that a claim is made of.
    assert (distances(found.out, shares_of(real.weights)) > 7e-4).all()


def test_distances_in_balls() -> None:
    """The distance of rows that see 128 keys, in Arb, whose roundings are in its answers."""
    rng, n = np.random.default_rng(3), 1024
    for d in (2, 20, 64):
        for k in (two_sided(n, d)[0], rng.standard_normal((n, d)).astype(np.float32)):
            v, index = axes(k.shape), built(k, axes(k.shape), rotate=False)
            mask = np.arange(n) // AXES == rng.permutation(n // AXES)[0]
            keys = k[mask]
            q = rng.choice([1e-3, 0.03], (3, 1)) * rng.standard_normal((3, d))
            q = q.astype(np.float32)
            found = ck.attention(q, k, v, 0.03, index=index, scale=1.0, mask=mask)
            assert coded(found).any()
            for row in np.flatnonzero(coded(found)):
                products = [
                    [arb(float(a)) * arb(float(b)) for a, b in zip(q[row], key, strict=True)]
                    for key in keys
                ]
                weights = [sum(each, arb(0)).exp() for each in products]
                total = sum(weights, arb(0))
                real = [weight / total for weight in weights]
                shown = zip(real, found.out[row], strict=True)
                apart = sum((abs(each - arb(float(own))) for each, own in shown), arb(0)) / 2
                # Two blocks, of which a weight is 1 at most and mostly 1/128.
                moved = 2 * BLOCK * WHOLE * float(max(each.abs_upper() for each in real))
                allowed = SHOWN + moved + 2 * BLOCK * WHOLE * found.tail_mass_upper[row]
                assert apart <= arb(float(found.tail_mass_upper[row] + allowed))


# ------------------------------------------------------------------------------------ random calls


def made_keys(rng: np.random.Generator, kv: tuple[int, ...], n: int, d: int) -> np.ndarray:
    """Keys of unlike heads: plain, far from zero, in clusters, some without a code, two-sided."""
    keys = rng.standard_normal((*kv, n, d))
    for head in np.ndindex(*kv):
        kind = int(rng.integers(7))
        if kind == 1:
            keys[head] += rng.choice([5.0, 300.0]) * rng.standard_normal(d)
        elif kind == 2:
            keys[head] = np.repeat(3 * keys[head][: -(-n // 16)], 16, axis=0)[:n]
            keys[head] += 0.05 * rng.standard_normal((n, d))
        elif kind == 3:
            keys[head][rng.integers(n, size=1 + n // 200)] *= 30
        elif kind == 4 and d > 1:
            keys[head] = two_sided(n, d, 0.01)[0]
        elif kind == 5:
            keys[head][:, rng.integers(d)] *= 20
        elif kind == 6:
            keys[head] *= rng.choice([0.0, 1e-4, 1.0, 9.0], (n, 1))
    return keys


def made_queries(
    rng: np.random.Generator, keys: np.ndarray, shape: tuple[int, ...], scale: float
) -> np.ndarray:
    """Queries of flat and sharp rows: around zero, any, of one key, along what codes may lose."""
    group = shape[-2] // keys.shape[-3]
    d = keys.shape[-1]
    queries = rng.standard_normal((*shape, d))
    # Scores that differ by so many nats, more or less: in all rows alike, or not.
    nats = np.array([0.0, 1e-3, 0.1, 0.5, 1.5, 3.0, 8.0, 60.0])
    wide = rng.choice(nats, shape if rng.random() < 0.3 else ()) + np.zeros(shape)
    middle = keys - keys.mean(axis=-2, keepdims=True)
    unit = np.abs(middle).max(axis=-1, keepdims=True) / 127
    unit = np.where(unit == 0, 1, unit)
    lost = middle - np.rint(middle / unit) * unit
    for row in np.ndindex(*shape):
        head = (*row[:-2], row[-2] // group)
        key = rng.integers(keys.shape[-2])
        kind = int(rng.integers(5))
        along = (queries[row], middle[head][key], lost[head][key])[(0, 0, 0, 1, 2)[kind]]
        spread = np.std(keys[head] @ along) * abs(scale)
        queries[row] = along * (wide[row] / spread if spread > 1e-12 else 0)
    return np.clip(queries, -3e4, 3e4)  # finite in any type


def made_values(rng: np.random.Generator, kv: tuple[int, ...], n: int) -> np.ndarray:
    """Values of unlike heads: any, equal, one of them huge, along a line, far from zero."""
    values = rng.standard_normal((*kv, n, int(rng.choice([1, 20, 64, 128]))))
    for head in np.ndindex(*kv):
        kind = int(rng.integers(6))
        if kind == 1:
            values[head] = values[head][:1]
        elif kind == 2:
            values[head][rng.integers(n)] *= 1e4
        elif kind == 3:
            values[head] = rng.choice([-1, 1], (n, 1)) * values[head][:1]
        elif kind == 4:
            values[head] += 100
        elif kind == 5:
            values[head] *= rng.choice([0.0, 1e-3, 1.0, 30.0], (n, 1))
    return values


def made_sight(rng: np.random.Generator, rows: tuple[int, ...], n: int) -> dict[str, Any]:
    """Options of what rows see, half of the time one key of each class."""
    sight: dict[str, Any] = {}
    kind = int(rng.integers(8))
    if kind == 0:
        sight["causal"] = True
    elif kind == 1:
        sight["lengths"] = rng.integers(rng.choice([0, n // 2]), n + 1, rows)
    elif kind == 2:
        sight["mask"] = rng.random((*rows[:-1], 1, n)) < rng.choice([0.02, 0.5, 0.9])
    elif kind < 6:
        # Then all of the distance shows.
        seen = np.zeros((*rows, n), bool)
        order = np.argsort(classes(n), kind="stable").reshape(AXES, -1)
        chosen = order[np.arange(AXES), rng.integers(0, n // AXES, (*rows, AXES))]
        np.put_along_axis(seen, chosen, True, axis=-1)
        sight["mask"] = seen
    return sight


def one_call(rng: np.random.Generator, n: int, full: bool = False) -> tuple[int, int, float]:
    """Check all claims of a call; return its rows, the coded ones, and the tightest claim."""
    dtype = DTYPES[str(rng.choice(["float32", "float16", "bfloat16"]))]
    d = int(rng.choice([2, 20, 64, 128]))
    kv_heads, group = int(rng.choice([1, 2, 4])), int(rng.choice([1, 2, 4, 7]))
    m = 15 // group if full else int(rng.integers(1, 15 // group + 1))
    batch = [(), (2,)][int(rng.integers(2))]
    rows, kv = (*batch, kv_heads * group, m), (*batch, kv_heads)
    scale = float(rng.choice([d**-0.5, -0.2, 1.0]))
    keys = made_keys(rng, kv, n, d)
    # Queries of f32 as the output must be in it; they hold any number of the two shorter types.
    q = made_queries(rng, keys, rows, scale).astype(dtype).astype(np.float32)
    k = keys.astype(dtype)
    sight = made_sight(rng, rows, n) | made_changes(rng, rows, n)
    options: dict[str, Any] = {**sight, "scale": scale}
    sinks = None
    if rng.random() < 0.4:
        sinks = rng.choice([-np.inf, -800.0, 0.0, 5.0, 9.0, 40.0, 900.0], rows[:-1])
        sinks = options["sinks"] = sinks + rng.random(rows[:-1])
    some = USUAL if rng.random() < 0.8 else BUDGETS
    eps: Any = rng.choice(some, rows) if rng.random() < 0.3 else float(rng.choice(some))
    how: dict[str, Any] = {"halves": bool(rng.random() < 0.3)}
    if rng.random() < 0.5:
        how["rotate"] = bool(rng.random() < 0.5)
    real = real_attention(q, k, np.zeros((*kv, n, 1)), sight, scale, sinks)
    v = axes(k.shape)
    found = ck.attention(q, k, v, eps, index=built(k, v, **how), **options)
    tight, count = check_shown(found, real, eps), int(coded(found).sum())
    kind = DTYPES[str(rng.choice(["float32", "float16", "bfloat16"]))]
    v = made_values(rng, kv, n).astype(kind)
    shared = v if group == 1 else np.repeat(v, group, axis=-3)
    real = replace(real, out=real.weights @ shared.astype(np.float64).astype(LD))
    if rng.random() < 0.5:
        # The output in another type: its rounding is in the bound.
        narrow = q.astype(dtype)
        assert (narrow.astype(np.float32) == q).all()
        q = narrow
    how["value_bits"] = int(rng.choice([8, 4]))
    found = ck.attention(q, k, v, eps, index=built(k, v, **how), **options)
    check(found, real, eps)
    return found.k.size, count, tight


@pytest.mark.parametrize("seed", range(24))
def test_random_calls(seed: int) -> None:
    rng = np.random.default_rng([5, seed])
    one_call(rng, int(rng.choice([256, 512, 1024, 2048])))


@pytest.mark.heavy
def test_three_hundred_thousand_rows() -> None:
    rows = seen = seed = 0
    tight = 0.0
    while rows < 300_000:
        rng = np.random.default_rng([6, seed])
        asked, shown, most = one_call(rng, int(rng.choice([512] * 8 + [1024, 2048])), full=True)
        rows, seen, tight, seed = rows + asked, seen + shown, max(tight, most), seed + 1
    assert seen > rows / 10
    assert tight > 0.5


# ----------------------------------------------------------------------------------------- corners


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("offset", [0.0, 30.0, 1000.0])
def test_keys_far_from_zero_and_budgets_of_any_size(dtype: str, offset: float) -> None:
    rng, n, d = np.random.default_rng(11), 4096, 64
    k = (offset + rng.standard_normal((n, d))).astype(DTYPES[dtype])
    q = rng.choice([0.0, 1e-6, 1.0, 4.0, 1e3], (9, 1)) * rng.standard_normal((9, d))
    q = q.astype(np.float32)
    v = axes(k.shape)
    index, real = built(k, v), real_attention(q, k, np.zeros((n, 1)), {})
    for eps in (*BUDGETS, np.array(BUDGETS), np.array(BUDGETS)[::-1].copy()):
        check_shown(ck.attention(q, k, v, eps, index=index), real, eps)


def test_codes_are_used_where_they_do() -> None:
    """Rows that truncation could not help: flat ones, whose weights all come from codes."""
    rng, n, d = np.random.default_rng(12), 8192, 64
    k, v = rng.standard_normal((2, 2, n, d)).astype(np.float32)
    q = (0.5 * rng.standard_normal((4, 3, d))).astype(np.float32)
    real = real_attention(q, k, v, {})
    index = ck.KvIndex.build(k, v)
    found = ck.attention(q, k, v, 0.01, index=index)
    check(found, real, 0.01)
    assert coded(found).all()
    assert (found.k == n).all()
    assert (found.scored < n / 20).all()
    assert (found.error_bound < 0.1).all()
    # Each of these is asked for in a way that codes of values have no part in.
    for budget, beside in ((0.01, ck.KeyIndex.build(k)), (0.0, index), (0.01, None)):
        assert not coded(ck.attention(q, k, v, budget, index=beside)).any()
    # By codes or not, a budget on the output is kept, and so is that of many rows.
    found = ck.attention(q, k, v, out_tol=0.05, index=index)
    assert (found.error_bound <= 0.05).all()
    check(found, real, 1.0)
    many = np.repeat(q, 30, axis=1)
    found = ck.attention(many, k, v, 0.01, index=index)
    check(found, real_attention(many, k, v, {}), 0.01)


def test_values_in_four_bits_lose_what_is_said() -> None:
    """Nearly all of an error that all values share, and of one of random values less than that."""
    rng, n, d = np.random.default_rng(16), 4096, 32
    k = rng.standard_normal((n, d)).astype(np.float32)
    q = (1e-3 * rng.standard_normal((3, d))).astype(np.float32)
    # Of the mean, and of an entry of 112 whose unit is 16, codes leave 7.7 of each value.
    v = np.zeros((n, 20), np.float32)
    v[:, 0] = 112 * np.where(classes(n) % 2, 1, -1)
    v[:, 1] = 7.7 * np.where(classes(n) % 4 < 2, 1, -1)
    mask = classes(n) % 4 < 2
    for values, most, least in ((v, 7.8, 0.95), (rng.standard_normal((n, 20)), 0.25, 0.0)):
        values = values.astype(np.float32)
        real = real_attention(q, k, values, {"mask": mask})
        halves = ck.attention(q, k, values, 0.01, index=built(k, values, value_bits=4), mask=mask)
        whole = ck.attention(q, k, values, 0.01, index=built(k, values), mask=mask)
        for found in (halves, whole):
            check(found, real, 0.01)
            assert coded(found).all()
        assert (halves.tail_mass_upper == whole.tail_mass_upper).all()
        assert (whole.error_bound < halves.error_bound).all()
        away = np.sqrt(((halves.out.astype(LD) - real.out) ** 2).sum(axis=-1))
        assert (halves.error_bound < most).all()
        assert (away > least * halves.error_bound).all()


def test_exact_weights_only_drop_keys() -> None:
    """The loss is the mass of what was dropped: nothing, or nearly all that is claimed."""
    rng, n, d = np.random.default_rng(17), 2048, 64
    k = rng.standard_normal((2, n, d)).astype(np.float32)
    v, index = axes(k.shape), ck.KvIndex.build(k, axes(k.shape))
    for m, sigma in ((1, 0.5), (3, 4.0), (40, 0.5)):
        q = (sigma * rng.standard_normal((2, m, d))).astype(np.float32)
        found = ck.attention(q, k, v, 0.01, index=index, weights="exact")
        assert not coded(found).any()
        dropped = found.k < n
        assert (found.tail_mass_upper[~dropped] < 1e-6).all()
        assert (found.tail_mass_upper[dropped] > 0.003).all()
        codes = ck.attention(q, k, v, 0.01, index=index)
        assert (codes.tail_mass_upper > 1e-6).all()
        for each in (found, codes):
            real = real_attention(q, k, v, {})
            check(each, real, 0.01)
    with pytest.raises(ck.CertkError, match=r'^weights is .half.; pass "codes" or "exact"'):
        ck.attention(q, k, v, 0.01, weights="half")  # type: ignore[arg-type]


def test_rows_see_up_to_their_ends() -> None:
    """The last keys that a row sees have much of its mass, and the next ones would have more."""
    rng, n, d = np.random.default_rng(16), 2048, 32
    k = rng.standard_normal((n, d))
    lengths = np.array([1999, 1700, 1001, 1343, 2047, 1520, 1633, 777, 1899])
    # Queries that do not know of each other's keys.
    q = np.linalg.qr(rng.standard_normal((d, d)))[0][: len(lengths)]
    for query, end in zip(q, lengths, strict=True):
        around = slice(end - 4, end + 4)
        k[around] += (np.log(n * 0.03) - k[around] @ query)[:, None] * query
    q, k = q.astype(np.float32), k.astype(np.float32)
    v = axes(k.shape)
    for shape in ((9,), (3, 3)):
        some, ends = q.reshape(*shape, d), lengths.reshape(shape)
        keys, values = (k, v) if len(shape) == 1 else (k[None], v[None])
        real = real_attention(some, keys, np.zeros((*keys.shape[:-1], 1)), {"lengths": ends}, 1.0)
        at = np.take_along_axis(real.weights, ends[..., None] - 1, -1)
        assert (at > 0.005).all()
        for halves in (False, True):
            index = built(keys, values, halves)
            found = ck.attention(some, keys, values, 0.01, index=index, scale=1.0, lengths=ends)
            check_shown(found, real, 0.01)
            assert coded(found).all()
    # Alone, a row's scores end in its own last group.
    for query, end in zip(q, lengths, strict=True):
        sight = {"lengths": end}
        real = real_attention(query[None], k, np.zeros((n, 1)), sight, 1.0)
        found = ck.attention(query[None], k, v, 0.01, index=built(k, v), scale=1.0, lengths=end)
        check_shown(found, real, 0.01)
        assert coded(found).all()


def test_values_without_a_code() -> None:
    """The largest float32 numbers have none: then all values are read."""
    rng, n, d = np.random.default_rng(17), 2048, 32
    k, v = rng.standard_normal((2, n, d)).astype(np.float32)
    v[77, 3] = 1e35
    q = (0.5 * rng.standard_normal((3, d))).astype(np.float32)
    found = ck.attention(q, k, v, 0.01, index=built(k, v))
    check(found, real_attention(q, k, v, {}), 0.01)
    assert not coded(found).any()


def test_threads_share_long_scans() -> None:
    """Of so many keys and products that several threads take parts of them, and of the values."""
    rng, n, d = np.random.default_rng(18), 20 * 1024, 64
    k = rng.standard_normal((n, d)).astype(np.float32)
    # One head, which all threads share.
    q = (np.array([[0.3], [1.0], [1.5]]) * rng.standard_normal((3, d))).astype(np.float32)
    # Any part has values of its own.
    v = np.cumsum(rng.standard_normal((n, 20)), axis=0).astype(np.float32)
    lengths = np.array([n - 777, n, 9000])
    real = real_attention(q, k, v, {"lengths": lengths})
    shown = real_attention(q, k, np.zeros((n, 1)), {})
    for halves in (False, True):
        index, known = built(k, v, halves), built(k, axes(k.shape), halves)
        answers = set()
        for threads in (1, 2, 3):
            found = ck.attention(q, k, v, 0.02, index=index, lengths=lengths, threads=threads)
            check(found, real, 0.02)
            both = ck.attention(q, k, axes(k.shape), 0.02, index=known, threads=threads)
            check_shown(both, shown, 0.02)
            assert coded(found).all()
            assert coded(both).all()
            fields = (x for each in (found, both) for x in (each.out, each.error_bound))
            answers.add(b"".join(x.tobytes() for x in fields))
        assert len(answers) == 1


def test_equal_values_are_known_however_weights_are_off() -> None:
    rng, n, d = np.random.default_rng(13), 4096, 32
    k = rng.standard_normal((n, d)).astype(np.float32)
    q = rng.standard_normal((3, d)).astype(np.float32)
    v = np.full((n, 40), np.float32(1.7789679))
    found = ck.attention(q, k, v, 0.05, index=built(k, v))
    check(found, real_attention(q, k, v, {}), 0.05)
    assert (found.error_bound <= 1e-3).all()


def test_a_sink_takes_its_share() -> None:
    """A sink has no value, and values are far from zero: whoever forgets it is off by its share."""
    rng, n, d = np.random.default_rng(14), 4096, 32
    k = rng.standard_normal((4, n, d)).astype(np.float32)
    v = (50 + rng.standard_normal((4, n, 20))).astype(np.float32)
    q = rng.standard_normal((4, 2, d)).astype(np.float32)
    sinks = np.log(n) + np.array([-np.inf, -2.0, 1.0, 30.0])
    for values in (v, axes(k.shape)):
        real = real_attention(q, k, values, {}, sinks=sinks)
        found = ck.attention(q, k, values, 0.01, index=built(k, values), sinks=sinks)
        check(found, real, 0.01)
    check_shown(found, real, 0.01)


def test_same_bits_for_all_threads_and_levels() -> None:
    rng, n = np.random.default_rng(15), 3000
    k, v = rng.standard_normal((2, 2, n, 40)).astype(np.float32)
    q = (rng.choice([0.3, 2.0], (4, 3, 1)) * rng.standard_normal((4, 3, 40))).astype(np.float32)
    mask = rng.random((4, 3, n)) < 0.7
    options: list[dict[str, Any]] = [{}, {"mask": mask}, {"causal": True, "sinks": 2.0}]
    answers: dict[int, set[bytes]] = {}
    for _ in each_level():
        for threads in (1, 2):
            for at, more in enumerate(options):
                bits = 4 if "mask" in more else 8
                index = ck.KvIndex.build(k[:, :2000], v[:, :2000], threads=threads, value_bits=bits)
                index.append(k[:, 2000:], v[:, 2000:])
                r = ck.attention(q, k, v, 0.01, index=index, threads=threads, **more)
                assert coded(r).any()
                fields = (r.tail_mass_upper, r.k, r.scored, r.rung, r.error_bound, r.out)
                answers.setdefault(at, set()).add(b"".join(each.tobytes() for each in fields))
    assert all(len(each) == 1 for each in answers.values())


# --------------------------------------------------------------------------------------- real rows


def check_real(cache: Cache, eps: float, m: int) -> tuple[np.ndarray, np.ndarray]:
    """Check the last rows of each head; return the shares of keys scored, and whether by codes."""
    scored, by_codes = [], []
    for layer in layers(cache):
        q, k, v = (cache[f"layers.{layer}.{x}"] for x in ("query", "key", "value"))
        q, k, v = (x.reshape(-1, *x.shape[-2:]) for x in (q[..., -m:, :], k, v))
        found = ck.attention(q, k, v, eps, index=built(k, v))
        check(found, real_attention(q, k, v, {}), eps)
        scored.append(found.scored / k.shape[-2])
        by_codes.append(coded(found))
        shown = axes(k.shape)
        real = real_attention(q, k, np.zeros((*k.shape[:-1], 1)), {})
        check_shown(ck.attention(q, k, shown, eps, index=built(k, shown)), real, eps)
    return np.concatenate(scored), np.concatenate(by_codes)


def test_real_rows(small_cache: Cache) -> None:
    # Rows that share a head are scored exactly wherever one of them is.
    scored, by_codes = check_real(small_cache, 0.01, 1)
    assert by_codes.any()
    assert np.median(scored[by_codes]) <= 0.05
    check_real(small_cache, 0.1, 8)


@pytest.mark.heavy
def test_real_rows_over_many_keys(cache_65536: Cache) -> None:
    scored, by_codes = check_real(cache_65536, 0.01, 1)
    assert by_codes.any()
    assert np.median(scored[by_codes]) <= 0.05
    check_real(cache_65536, 0.01, 8)
