"""Attention from codes of keys and values, beside exact rows of some keys or of none.

Values are chosen that show the weights a row used: codes lose nothing of them, and each key adds to
one entry of an output and takes from the next. Half the distance of these weights from the real
ones is then the total variation distance, to roundings. `real_attention` is the reference.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import certk_rs as ck
from levels import each_level
from real_attention import DTYPES, LD, Real, check, real_attention
from score_changes import made_changes

# Weights are whole numbers where they multiply codes of values: parts of the largest of 64.
BLOCK, WHOLE = 64, LD(0.51 / 32639)
# Largest entry of a value whose unit is 1, by the bits of its code.
LARGEST = {8: 127, 4: 112}
STORED = ("float32", "float16", "bfloat16")


class Shown:
    """Values that show the weights of n keys, of which the first `first` set the mean, to 0."""

    def __init__(self, n: int, first: int | None = None, bits: int = 8) -> None:
        self.first = n if first is None else first
        self.unit, self.bits = LARGEST[bits], bits
        own = np.eye(n)
        own[: self.first, : self.first] -= np.roll(np.eye(self.first), 1, axis=1)
        self.values = (self.unit * own).astype(np.float32)

    def over(self, k: np.ndarray) -> np.ndarray:
        """Return the values beside keys."""
        return np.broadcast_to(self.values, (*k.shape[:-1], self.values.shape[-1]))

    def apart(self, out: Any, real: Real) -> np.ndarray:
        """Return the least that the used weights, and that of a sink, are apart from the real."""
        used = np.asarray(out).astype(np.float64).astype(LD) / self.unit
        used[..., : self.first] = np.cumsum(used[..., : self.first], axis=-1)
        off = used - real.weights
        if self.first == 0:
            return self._distance(off)
        # Outputs are the same if all of the first weights are more by one number.
        total = real.weights.sum(axis=-1)
        if (np.abs(np.where(real.seen.any(axis=-1), total, 1) - 1) < 1e-15).all():
            off[..., : self.first] -= (off.sum(axis=-1) / self.first)[..., None]
            return self._distance(off)
        least = np.full(off.shape[:-1], np.inf, LD)
        for at in range(self.first + 1):
            moved = off.copy()
            more = off.sum(axis=-1) / self.first if at == self.first else off[..., at]
            moved[..., : self.first] -= more[..., None]
            least = np.minimum(least, self._distance(moved))
        return least

    def _distance(self, off: np.ndarray) -> np.ndarray:
        return np.asarray(np.abs(off).sum(axis=-1) + np.abs(off.sum(axis=-1))) / 2

    def allowed(self, real: Real, claimed: np.ndarray) -> np.ndarray:
        """Return how far the distance that is shown may be from that of the used weights."""
        n = real.weights.shape[-1]
        padding = [(0, 0)] * claimed.ndim + [(0, -n % BLOCK)]
        blocks = np.pad(real.weights, padding).reshape(*claimed.shape, -1, BLOCK)
        count = np.pad(real.seen, padding).reshape(blocks.shape).sum(axis=-1)
        most = np.minimum(blocks.max(axis=-1) + 2 * claimed[..., None].astype(LD), 1)
        rounded = LD(2.0**-20) * (1 + np.sqrt(LD(n)))
        return np.asarray((WHOLE * count * most).sum(axis=-1) + rounded)

    def check(self, found: ck.AttentionResult, real: Real) -> float:
        """Check all claims of a result; return the largest part of one that is true."""
        check(found, replace(real, out=real.weights @ self.values.astype(LD)), 1.0)
        seeing = real.seen.any(axis=-1)
        claimed, away = found.tail_mass_upper.astype(LD), self.apart(found.out, real)
        allowed = self.allowed(real, found.tail_mass_upper)
        assert (~seeing | (away <= claimed + allowed)).all()
        tight = seeing & (claimed > 20 * allowed)
        return float((away[tight] / claimed[tight]).max(initial=0))


def head_of(array: np.ndarray, head: int) -> np.ndarray:
    return np.asarray(array.reshape(prod(array.shape[:-2]), *array.shape[-2:])[head])


def kept_rows(
    index: ck.KvIndex,
    k: np.ndarray,
    v: np.ndarray,
    tail: int = 0,
    listed: list[Any] | None = None,
) -> Any:
    """Return the rows of keys without a code, of the last keys, and of those that are listed."""
    n, heads = k.shape[-2], len(index.bare)
    positions = []
    for head in range(heads):
        some = [] if listed is None else listed[head]
        wanted = np.union1d(index.bare[head], some).astype(np.int64)
        positions.append(wanted[wanted < n - tail])
    rows = [
        np.concatenate([head_of(x, head)[each] for head, each in enumerate(positions)])
        for x in (k, v)
    ]
    end = (k[..., n - tail :, :], v[..., n - tail :, :]) if tail else None
    return ck.KeptRows(rows[0], rows[1], positions, end)


# ------------------------------------------------------------------------------------ random calls


def made_keys(rng: np.random.Generator, kv: tuple[int, ...], n: int, d: int) -> np.ndarray:
    """Keys of unlike heads: plain, far away, in clusters, some far out, equal, of all sizes."""
    keys = rng.standard_normal((*kv, n, d))
    for head in np.ndindex(*kv):
        kind = int(rng.integers(8))
        if kind == 1:
            keys[head] += rng.choice([5.0, 300.0]) * rng.standard_normal(d)
        elif kind == 2:
            keys[head] = np.repeat(3 * keys[head][: -(-n // 16)], 16, axis=0)[:n]
            keys[head] += 0.05 * rng.standard_normal((n, d))
        elif kind == 3 and n:
            keys[head][rng.integers(n, size=1 + n // 200)] *= rng.choice([30, 3000])
        elif kind == 4:
            keys[head] = keys[head][:1]
        elif kind == 5:
            keys[head][:, rng.integers(d)] *= 20
        elif kind == 6:
            keys[head] *= rng.choice([0.0, 1e-4, 1.0, 9.0], (n, 1))
        elif kind == 7:
            keys[head] *= rng.choice([1e-30, 1e-6, 1e4])
    return keys


def lost_of(keys: np.ndarray) -> np.ndarray:
    """Return about what codes in a byte lose of keys."""
    middle = keys - keys.mean(axis=-2, keepdims=True)
    unit = np.abs(middle).max(axis=-1, keepdims=True) / 127
    unit = np.where(unit == 0, 1, unit)
    return np.asarray(middle - np.rint(middle / unit) * unit)


def made_queries(
    rng: np.random.Generator, keys: np.ndarray, shape: tuple[int, ...], scale: float
) -> np.ndarray:
    """Queries of flat and sharp rows: any, along a key, or along what codes lose most of."""
    d, queries = keys.shape[-1], rng.standard_normal((*shape, keys.shape[-1]))
    if not keys.shape[-2]:
        return queries
    group = shape[-2] // keys.shape[-3]
    lost = lost_of(keys)
    most = np.linalg.eigh(np.swapaxes(lost, -1, -2) @ lost)[1][..., -1]
    # Scores that differ by so many nats, more or less.
    nats = np.array([0.0, 1e-3, 0.1, 0.5, 1.5, 3.0, 8.0, 60.0])
    for row in np.ndindex(*shape):
        head = (*row[:-2], row[-2] // group)
        key = int(rng.integers(keys.shape[-2]))
        along = (
            rng.standard_normal(d),
            keys[head][key] - keys[head].mean(axis=0),
            lost[head][key],
            most[head],
        )[int(rng.integers(4))]
        spread = np.std(keys[head] @ along) * abs(scale)
        queries[row] = along * (rng.choice(nats) / spread if spread > 1e-12 else 0)
    return np.clip(queries, -3e4, 3e4)


def made_values(rng: np.random.Generator, kv: tuple[int, ...], n: int) -> np.ndarray:
    """Values of unlike heads: any, equal, one of them huge, along a line, far from zero."""
    values = rng.standard_normal((*kv, n, int(rng.choice([1, 5, 20, 64]))))
    for head in np.ndindex(*kv):
        kind = int(rng.integers(6))
        if kind == 1:
            values[head] = values[head][:1]
        elif kind == 2 and n:
            values[head][rng.integers(n)] *= 1e4
        elif kind == 3:
            values[head] = rng.choice([-1, 1], (n, 1)) * values[head][:1]
        elif kind == 4:
            values[head] += 100
        elif kind == 5:
            values[head] *= rng.choice([0.0, 1e-3, 1.0, 30.0], (n, 1))
    return values


def made_sight(rng: np.random.Generator, rows: tuple[int, ...], n: int) -> dict[str, Any]:
    """Options of what rows see: few keys, up to some, all; some rows see nothing."""
    sight: dict[str, Any] = {}
    kind = int(rng.integers(8))
    if kind == 0:
        sight["causal"] = True
    elif kind == 1:
        sight["lengths"] = rng.integers(0, n + 1, rows)
    elif kind == 2:
        sight["mask"] = rng.random((*rows[:-1], 1, n)) < rng.choice([0.02, 0.5, 0.9])
    elif kind < 5:
        seen = np.zeros((*rows, n), bool)
        for row in np.ndindex(*rows):
            seen[row][rng.integers(0, n, 3 if n else 0)] = True
        sight["mask"] = seen
        if kind == 4:
            sight["causal"] = True
    return sight


def made_rows(rng: np.random.Generator, index: ck.KvIndex, k: np.ndarray, v: np.ndarray) -> Any:
    """Return kept rows: those that must be, with as many more of each head as happens, and a tail.

    All of a head's, or none of another's, are among them.
    """
    n = k.shape[-2]
    must = any(each.size for each in index.bare)
    if not must and rng.random() < 0.3:
        return None
    tail = int(rng.choice([0, 0, min(1, n), n // 3, n]))
    counts = rng.choice([0, min(n, 1), n // 4, n], len(index.bare))
    listed = [rng.permutation(n)[:count] for count in counts]
    return kept_rows(index, k, v, tail, listed)


def grown(k: np.ndarray, v: np.ndarray, ends: list[int], **how: Any) -> ck.KvIndex:
    """Return an index of keys and values that were appended up to each of some ends."""
    index = ck.KvIndex.build(k[..., : ends[0], :], v[..., : ends[0], :], **how)
    for begin, end in itertools.pairwise(ends):
        index.append(k[..., begin:end, :], v[..., begin:end, :])
    return index


def one_call(rng: np.random.Generator, sizes: tuple[int, ...]) -> tuple[int, float]:
    """Check all claims of two calls; return the number of rows, and the tightest claim."""
    n, d = int(rng.choice(sizes)), int(rng.choice([1, 3, 7, 16, 20, 64, 128, 200]))
    dtype = DTYPES[str(rng.choice(STORED))]
    kv_heads, group = int(rng.choice([1, 2, 3])), int(rng.choice([1, 2, 3]))
    batch = [(), (2,)][int(rng.integers(2))]
    m = int(rng.choice([1, 2, 5, 12]))
    rows, kv = (*batch, kv_heads * group, m), (*batch, kv_heads)
    scale = float(rng.choice([d**-0.5, -0.2, 1.0]))
    k = made_keys(rng, kv, n, d).astype(dtype)
    wide = k.astype(np.float64)
    q = made_queries(rng, wide, rows, scale).astype(np.float32)
    sight = made_sight(rng, rows, n) | made_changes(rng, rows, n)
    options: dict[str, Any] = {**sight, "scale": scale, "threads": int(rng.choice([1, 2]))}
    sinks = None
    if rng.random() < 0.3:
        sinks = rng.choice([-np.inf, -800.0, 0.0, 5.0, 9.0, 40.0], rows[:-1])
        sinks = options["sinks"] = sinks + rng.random(rows[:-1])
    budgets = [0.0, 1e-6, 1e-3, 0.01, 0.05, 0.5]
    eps: Any = rng.choice(budgets, rows) if rng.random() < 0.3 else float(rng.choice(budgets))
    how: dict[str, Any] = {"bits": int(rng.choice([8, 12, 16]))}
    how["value_bits"] = int(rng.choice([8, 4]))
    if rng.random() < 0.5:
        how["rotate"] = bool(rng.random() < 0.5)
    first = n if rng.random() < 0.6 else int(rng.integers(0, n + 1))
    ends = [first, *sorted(rng.integers(first, n + 1, int(rng.integers(3)))), n]
    tight = 0.0
    real = real_attention(q, k, np.zeros((*kv, n, 1)), sight, scale, sinks)
    if 0 < n <= 500:
        values = Shown(n, first, how["value_bits"])
        v = values.over(k)
        index = grown(k, v, ends, **how)
        found = index.attention(q, eps, kept=made_rows(rng, index, k, v), **options)
        tight = values.check(found, real)
    kind = DTYPES[str(rng.choice(STORED))]
    v = made_values(rng, kv, n).astype(kind)
    shared = v if group == 1 else np.repeat(v, group, axis=-3)
    real = replace(real, out=real.weights @ shared.astype(np.float64).astype(LD))
    index = grown(k, v, ends, **how)
    some = q
    if rng.random() < 0.5:
        some = q.astype(np.float16)
        if not (some.astype(np.float32) == q).all():
            some = q.astype(np.float64)
    found = index.attention(some, eps, kept=made_rows(rng, index, k, v), **options)
    check(found, real, 1.0)
    assert np.asarray(found.out).dtype == some.dtype
    assert (found.rung == ck.Rung.CODED).all()
    return 2 * found.k.size, tight


@pytest.mark.parametrize("seed", range(60))
def test_random_calls(seed: int) -> None:
    one_call(np.random.default_rng([7, seed]), (0, 1, 2, 15, 16, 17, 50, 130))


@pytest.mark.parametrize("seed", range(6))
def test_random_calls_over_more_keys(seed: int) -> None:
    one_call(np.random.default_rng([8, seed]), (500, 5000))


@pytest.mark.heavy
def test_fifty_thousand_rows() -> None:
    rows = seed = 0
    tight = 0.0
    while rows < 50_000:
        rng = np.random.default_rng([9, seed])
        more, most = one_call(rng, (15, 16, 17, 50, 130, 300, 500))
        rows, tight, seed = rows + more, max(tight, most), seed + 1
    assert tight > 0.5


# ------------------------------------------------------------------------- claims that are reached


def in_pairs(bits: int, n: int, x: float) -> tuple[np.ndarray, np.ndarray]:
    """Return keys and a query; keys two by two seem equal, and are `x` above and below that.

    An entry of 127 sets the unit to 1. Another is nearly half a step from its code, and a third
    takes back what the low code has of it. A fourth is a low code: without it, much is lost.
    """
    parts = {8: 1, 12: 15, 16: 255}[bits]
    low = {8: 0, 12: 6, 16: 100}[bits]
    at, k = np.arange(n), np.zeros((n, 16), np.float32)
    sign, other = np.where(at % 2, 1, -1), np.where(at % 4 < 2, 1, -1)
    k[:, 0] = 127 * other
    k[:, 1], k[:, 2] = sign * (low + 0.4375) / parts, -sign * low / parts
    k[:, 3] = other * (parts // 4) / parts
    # Whole numbers of the unit of its form in sixteen bits, which the largest entry sets.
    unit = 2.0**-11 if bits == 16 else 2.0**-13
    q = np.zeros(16, np.float32)
    q[1] = q[2] = np.rint(x * parts / 0.4375 / unit) * unit
    q[3], q[5] = 1, 32639 * unit
    return k, q


@pytest.mark.parametrize("bits", [8, 12, 16])
@pytest.mark.parametrize("pairs", [2, 8, 24])
def test_errors_that_all_count(bits: int, pairs: int) -> None:
    """Half of the keys weigh e^x by right and half e^-x, and by their codes all the same."""
    n, values = 4 * pairs, Shown(4 * pairs)
    k = in_pairs(bits, n, 0.0)[0]
    q = np.stack([in_pairs(bits, n, x)[1] for x in (0.01, 0.02)])
    v = values.over(k)
    index = ck.KvIndex.build(k, v, bits=bits, rotate=False)
    assert not index.bare[0].size
    real = real_attention(q, k, np.zeros((n, 1)), {}, 1.0)
    found = index.attention(q, 1e-6, scale=1.0)
    values.check(found, real)
    away = values.apart(found.out, real)
    assert (away > np.array([0.6, 0.7]) * found.tail_mass_upper).all()
    # A value for each sign: outputs are as wrong as weights.
    signs = np.zeros((n, 20), np.float32)
    signs[:, 3] = 127 * np.sign(k[:, 1])
    index = ck.KvIndex.build(k, signs, bits=bits, rotate=False)
    real = real_attention(q, k, signs, {}, 1.0)
    found = index.attention(q, 1e-6, scale=1.0)
    check(found, real, 1.0)
    off = np.abs(np.asarray(found.out).astype(LD) - real.out).max(axis=-1)
    assert (off > 0.5 * found.error_bound).all()
    # With the exact rows nothing is lost but roundings.
    rows = kept_rows(index, k, signs, 0, [np.arange(n)])
    found = index.attention(q, 1e-6, scale=1.0, kept=rows)
    check(found, real, 1.0)
    assert (found.scored == n).all()
    assert (found.tail_mass_upper < 0.003).all()


@pytest.mark.parametrize("bits", [8, 12, 16])
@pytest.mark.parametrize("where", ["none", "one", "listed", "tail", "both"])
def test_heavy_keys_with_rows_and_without(bits: int, where: str) -> None:
    """Two keys have nearly all of the weight; what their codes lose is gone where rows are kept."""
    n, values = 52, Shown(52)
    k, query = in_pairs(bits, n, 0.02)
    heavy = [8, 49]
    # The same but for the sign of what is lost; their opposites weigh least.
    k[heavy, 4], k[[10, 51], 4] = 16, -16
    # Codes lose nothing of the others.
    k[np.setdiff1d(np.arange(n), [*heavy, 10, 51]), 1:4] = 0
    k[[10, 51], 1:3] = 0
    query[4] = 14 / 16
    q, v = query[None], values.over(k)
    index = ck.KvIndex.build(k, v, bits=bits, rotate=False)
    real = real_attention(q, k, np.zeros((n, 1)), {}, 1.0)
    tail, listed = {
        "none": (0, []),
        "one": (0, [8]),
        "listed": (0, heavy),
        "tail": (n - 8, []),
        "both": (3, [2, 8, 40]),
    }[where]
    found = index.attention(q, 1e-6, scale=1.0, kept=kept_rows(index, k, v, tail, [listed]))
    values.check(found, real)
    away, claimed = values.apart(found.out, real)[0], found.tail_mass_upper[0]
    if where == "none":
        assert away > 0.6 * claimed
    elif where == "one":
        # The other one's error is what is left.
        assert away > 0.4 * claimed
    else:
        assert claimed < 0.005
    assert found.scored[0] <= len(listed) + tail


# ------------------------------------------------------------------------------ the same, and files


def digest(found: ck.AttentionResult, out: bool = True) -> bytes:
    fields = [found.tail_mass_upper, found.k, found.scored, found.error_bound]
    fields += [found.log_mass_lower, found.log_mass_upper]
    return b"".join(np.asarray(x).tobytes() for x in [*fields, *([found.out] if out else [])])


def sample(n: int = 300) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
    """Return keys of two heads, some far out, values, queries of all kinds, and what rows see."""
    rng = np.random.default_rng(21)
    k, v = rng.standard_normal((2, 2, n, 40)).astype(np.float32)
    k[1, [3, n - 2]] *= 60
    q = (rng.choice([0.3, 2.0, 5.0], (4, 5, 1)) * rng.standard_normal((4, 5, 40))).astype("f4")
    return k, v, q, {"mask": rng.random((4, 5, n)) < 0.7, "sinks": np.arange(4.0)}


@pytest.mark.parametrize("bits", [8, 12, 16])
def test_same_bits_for_threads_levels_and_copies(bits: int, tmp_path: Path) -> None:
    k, v, q, options = sample()
    n = k.shape[-2]
    answers: set[bytes] = set()
    claims: set[bytes] = set()
    outs = []
    for level in each_level():
        index = grown(k, v, [100, 103, 130, n], bits=bits, value_bits=4 if bits == 12 else 8)
        rows = kept_rows(index, k, v, 40, [np.arange(0, 200, 3), []])
        index.save(tmp_path / level)
        # In one piece, which the first is not.
        others = [ck.KvIndex.load(tmp_path / level, k), pickle.loads(pickle.dumps(index))]
        others += [copy.copy(index), copy.deepcopy(index)]
        of_level = set()
        for each in (index, *others):
            assert each.bits == bits
            assert [x.tolist() for x in each.bare] == [x.tolist() for x in index.bare]
            for threads in (1, 2):
                found = each.attention(q, 0.003, kept=rows, threads=threads, **options)
                of_level.add(digest(found))
                claims.add(digest(found, out=False))
        assert len(of_level) == 1
        answers |= of_level
        outs.append(np.asarray(found.out))
    assert len(claims) == 1
    for out in outs:
        assert np.allclose(out, outs[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", [8, 12, 16])
def test_growth_in_any_parts(bits: int) -> None:
    """However keys were appended, claims hold, and are about as tight."""
    k, v, q, options = sample()
    n = k.shape[-2]
    k[1, [3, n - 2]] /= 60
    real = real_attention(q, k, v, {"mask": options["mask"]}, sinks=options["sinks"])
    claims = []
    for ends in ([n], [64, n], [64, *range(65, n + 1)], [64, 65, 80, 96, 97, 255, 256, n]):
        index = grown(k, v, ends, bits=bits)
        found = index.attention(q, 0.003, kept=kept_rows(index, k, v, 16), **options)
        check(found, real, 1.0)
        claims.append(found.tail_mass_upper)
    for each in claims[2:]:
        assert np.allclose(each, claims[1], rtol=0.05)


def test_long_scans_by_threads() -> None:
    """So many keys that several threads take parts of them."""
    rng, n = np.random.default_rng(22), 20 * 1024
    k, v = rng.standard_normal((2, 1, n, 32)).astype(np.float32)
    q = (rng.choice([0.5, 3.0, 9.0], (1, 9, 1)) * rng.standard_normal((1, 9, 32))).astype("f4")
    real = real_attention(q, k, v, {})
    index = grown(k, v, [9000, 9001, n], bits=16)
    rows = kept_rows(index, k, v, 100, [rng.permutation(n)[:3000]])
    answers = set()
    for threads in (1, 2, 3):
        found = index.attention(q, 0.001, kept=rows, threads=threads)
        check(found, real, 1.0)
        answers.add(digest(found))
    assert len(answers) == 1


def test_a_failed_append_changes_nothing() -> None:
    k, v, *_ = sample()
    for bits in (12, 16):
        index = ck.KvIndex.build(k, v, bits=bits, keep_keys=False)
        before = pickle.dumps(index)
        for some, message in ((20, r"^keys\[1, 19, 39\]"), (3000, r"^keys\[1, 2999, 39\]")):
            more = np.ones((2, some, 40), np.float32)
            more[1, -1, -1] = np.nan
            with pytest.raises(ck.CertkError, match=message):
                index.append(more, np.ones((2, some, 40), np.float32))
            with pytest.raises(ck.CertkError, match=r"^values\[1"):
                index.append(np.ones_like(more), more)
            assert pickle.dumps(index) == before


def test_a_file_that_is_damaged_or_of_other_bits(tmp_path: Path) -> None:
    k, v, *_ = sample(60)
    path = tmp_path / "index"
    for bits in (12, 16):
        index = ck.KvIndex.build(k, v, bits=bits)
        index.save(path)
        data = path.read_bytes()
        assert f"certk-key-index-of-{bits}-bits".encode() in data[:100]
        assert ck.KvIndex.load(path).bits == bits
        for at in [*range(0, 3000, 37), *range(3000, len(data), 1501)]:
            path.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
            with pytest.raises(ck.CertkError):
                ck.KvIndex.load(path)
        for end in range(0, len(data), 2503):
            path.write_bytes(data[:end])
            with pytest.raises(ck.CertkError):
                ck.KvIndex.load(path)
        # The other bits take as long a name.
        other = data.replace(b"of-%d-bits" % bits, b"of-%d-bits" % (28 - bits), 1)
        path.write_bytes(other)
        with pytest.raises(ck.CertkError):
            ck.KvIndex.load(path)


# ----------------------------------------------------------------------------------------- corners


@pytest.mark.parametrize("bits", [8, 12, 16])
def test_all_rows_at_the_end(bits: int) -> None:
    """A tail of all keys is as good as the keys, and no error, whatever is asked for."""
    rng, n = np.random.default_rng(23), 50
    k, v = rng.standard_normal((2, 2, n, 16)).astype(np.float32)
    k[0, 7] *= 100
    q = (3 * rng.standard_normal((2, 3, 16))).astype(np.float32)
    real = real_attention(q, k, v, {})
    index = ck.KvIndex.build(k, v, bits=bits)
    for m in (0, 1, n - 1, n):
        rows = kept_rows(index, k, v, m)
        for eps in (0.0, 1e-6, 0.01, 0.3):
            check(index.attention(q, eps, kept=rows), real, 1.0)
    rows = ck.KeptRows(k[0, :0], v[0, :0], [np.arange(0)] * 2, (k, v))
    assert (index.attention(q, 0.0, kept=rows).tail_mass_upper < 0.002).all()


def test_a_sink_far_above_all_scores() -> None:
    """Nearly all is the sink's, which has no value."""
    rng, n = np.random.default_rng(24), 40
    k, v = rng.standard_normal((2, 1, n, 16)).astype(np.float32)
    q = rng.standard_normal((1, 3, 16)).astype(np.float32)
    for bits, sink in ((8, 60.0), (12, 75.0), (16, 100.0), (16, 1e6), (8, 800.0)):
        index = ck.KvIndex.build(k, v, bits=bits)
        found = index.attention(q, 0.01, sinks=sink)
        check(found, real_attention(q, k, v, {}, sinks=[sink]), 1.0)
        assert (found.tail_mass_upper < 0.01).all()
        assert (found.error_bound < 0.01).all()
        assert np.allclose(found.log_mass_lower, sink, rtol=1e-3)


def test_rows_that_see_nothing_and_no_keys_at_all() -> None:
    rng = np.random.default_rng(25)
    k, v = rng.standard_normal((2, 1, 30, 16)).astype(np.float32)
    q = rng.standard_normal((2, 3, 16)).astype(np.float32)
    for n in (0, 30):
        index = ck.KvIndex.build(k[:, :n], v[:, :n], bits=16)
        sight: dict[str, Any] = {"lengths": np.array([[0, n, 0], [n // 2, 0, 0]])}
        for sinks in (None, [1.5, -np.inf]):
            real = real_attention(q, k[:, :n], v[:, :n], sight, sinks=sinks)
            found = index.attention(q, 0.01, sinks=sinks, **sight)
            check(found, real, 1.0)
            assert (found.tail_mass_upper[found.k == 0] == 0).all()


def test_keys_and_queries_of_any_size() -> None:
    """Where float32 does not hold scores or weights there is an error, and no wrong answer."""
    rng, n, d = np.random.default_rng(26), 40, 16
    plain = rng.standard_normal((n, d))
    v = rng.standard_normal((n, 5)).astype(np.float32)
    answered, refusals = 0, set()
    for size in (0.0, 1e-44, 1e-38, 1e-30, 1e-20, 1e-3, 1e3, 1e15, 1e25, 1e30, 1e37):
        k = (size * plain).astype(np.float32)
        for bits in (8, 12, 16):
            index = ck.KvIndex.build(k, v, bits=bits)
            rows = kept_rows(index, k, v)
            for large in (1e-300, 1e-44, 1e-20, 1.0, 1e20, 1e37, 1e150):
                q = (large * rng.standard_normal((1, d))).astype(np.float64)
                for scale in (1.0, 1.0 / max(size * large, 1e-300)):
                    try:
                        found = index.attention(q, 0.01, kept=rows, scale=scale)
                    except ck.CertkError as error:
                        refusals.add(str(error)[:4])
                        continue
                    answered += 1
                    check(found, real_attention(q, k, v, {}, scale), 1.0)
    assert answered > 100
    assert refusals == {"q[0]"}


@pytest.mark.parametrize("bits", [8, 12, 16])
def test_keys_that_lie_far_out(bits: int) -> None:
    """They have no codes: their rows must be there, and are exact."""
    rng, n = np.random.default_rng(27), 200
    k = rng.standard_normal((2, n, 32)).astype(np.float32)
    k[0, [5, 77, n - 1]] *= 500
    values = Shown(n)
    v = values.over(k)
    index = ck.KvIndex.build(k, v, bits=bits)
    assert index.bare[0].tolist() == [5, 77, n - 1]
    assert index.bare[1].tolist() == []
    q = (0.3 * rng.standard_normal((2, 4, 32))).astype(np.float32)
    real = real_attention(q, k, np.zeros((2, n, 1)), {})
    for tail in (0, 1, 150):
        found = index.attention(q, 0.01, kept=kept_rows(index, k, v, tail))
        values.check(found, real)
        assert (found.tail_mass_upper < 0.01).all()
        assert (found.scored[0] >= 3).all()
    with pytest.raises(ck.CertkError, match=r"^index .*no code.*keep its row"):
        index.attention(q, 0.01)
    without = kept_rows(index, k, v, 1)
    places = [without.positions[0][1:], np.arange(0)]
    less = ck.KeptRows(without.keys[1:], without.values[1:], places, without.tail)
    with pytest.raises(ck.CertkError, match=r"^index .*no code.*keep its row"):
        index.attention(q, 0.01, kept=less)


def test_budgets_are_met_where_rows_suffice() -> None:
    k, v, q, _ = sample()
    n = k.shape[-2]
    real = real_attention(q, k, v, {})
    for bits in (8, 12, 16):
        index = ck.KvIndex.build(k, v, bits=bits)
        rows = kept_rows(index, k, v, n)
        eps = np.linspace(0.004, 0.3, 20).reshape(4, 5)
        found = index.attention(q, eps, kept=rows)
        check(found, real, eps)
        # More bits need fewer rows, and a larger budget does.
        assert (found.scored < n).any()
        loose = index.attention(q, 0.5, kept=rows)
        check(loose, real, 0.5)
        assert (loose.scored <= index.attention(q, 0.004, kept=rows).scored).all()


def test_ordinary_attention_with_a_low_plane() -> None:
    """An index of more bits serves `attention` as well, within its budget."""
    rng, n = np.random.default_rng(28), 2048
    k, v = rng.standard_normal((2, 2, n, 64)).astype(np.float32)
    q = (rng.choice([0.5, 1.0, 3.0], (4, 3, 1)) * rng.standard_normal((4, 3, 64))).astype("f4")
    real = real_attention(q, k, v, {})
    scored = []
    for bits in (8, 12, 16):
        index = ck.KvIndex.build(k, v, bits=bits)
        for eps in (0.002, 0.01, 0.1):
            found = ck.attention(q, k, v, eps, index=index)
            check(found, real, eps)
            assert digest(found) == digest(ck.attention(q, k, v, eps, index=index, threads=1))
        rows = found.rung == ck.Rung.CODED
        assert rows.any()
        scored.append(found.scored[rows].sum())
    assert scored[1] <= scored[0]


def test_tensors() -> None:
    torch = pytest.importorskip("torch")
    k, v, q, options = sample()
    rows = kept_rows(index := ck.KvIndex.build(k, v, bits=16), k, v, 5)
    want = index.attention(q, 0.01, kept=rows, **options)
    tail = tuple(torch.from_numpy(each.copy()) for each in rows.tail)
    kept = ck.KeptRows(
        torch.from_numpy(rows.keys), torch.from_numpy(rows.values), rows.positions, tail
    )
    assert kept.nbytes == rows.nbytes
    found = index.attention(torch.from_numpy(q), 0.01, kept=kept, **options)
    assert isinstance(found.out, torch.Tensor)
    assert (found.out.numpy() == want.out).all()
    narrow = torch.from_numpy(q).to(torch.bfloat16)
    found = index.attention(narrow, 0.01, kept=kept, **options)
    assert found.out.dtype == torch.bfloat16
    mask, sinks = options["mask"], options["sinks"]
    real = real_attention(narrow.float().numpy(), k, v, {"mask": mask}, sinks=sinks)
    check(replace(found, out=found.out.float().numpy()), real, 1.0)


# ---------------------------------------------------------------------------------------- refusals


def refused(call: Any, message: str) -> None:
    with pytest.raises(ck.CertkError, match=message):
        call()


def test_refusals_of_rows() -> None:
    k, v, q, _ = sample(50)
    v = v.astype(np.float16)
    index = ck.KvIndex.build(k, v, bits=16)
    good = kept_rows(index, k, v, 10, [[2, 5, 9], [7]])
    assert [len(each) for each in good.positions] == [3, 2]
    index.attention(q, 0.01, kept=good)
    keys, values, positions, tail = good.keys, good.values, good.positions, good.tail

    def use(**other: Any) -> None:
        index.attention(q, 0.01, kept=replace(good, **other))

    for wrong in ([7, 5, 9], [5, 5, 9], [2, 5, 40], [2, 5, 4_000_000], [2, 5, 2**33], [-1, 2, 5]):
        refused(lambda wrong=wrong: use(positions=[wrong, positions[1]]), "positions")
    others: list[Any] = [[2.0, 3.0, 5.0], [[2, 3, 5]], ["a", "b", "c"], [True, False, True], 7]
    for other in others:
        refused(lambda other=other: use(positions=[other, positions[1]]), "positions")
    strange: list[Any] = [5, None, {0: [], 1: []}]
    for odd in strange:
        refused(lambda odd=odd: use(positions=odd), "^positions")
    refused(lambda: use(positions=[[[1], [1, 2]], []]), r"^positions\[0\]")
    for no_pair in ((k,), (k, v, v), 5, k):
        refused(lambda no_pair=no_pair: use(tail=no_pair), "tail")
    refused(lambda: use(tail=(k, None)), r"^kept\.tail")
    refused(lambda: use(positions=positions[:1]), r"^kept\.keys|starts")
    refused(lambda: use(positions=[*positions, []]), "starts")
    refused(lambda: use(positions=[positions[0][1:], positions[1]]), r"kept\.keys.*positions")
    refused(lambda: use(keys=keys[:-1]), r"^kept\.keys")
    refused(lambda: use(keys=keys[:, :-1]), r"^kept\.keys")
    refused(lambda: use(keys=keys.astype(np.float16)), r"^kept\.keys")
    refused(lambda: use(keys=keys.astype(np.float64)), r"^kept\.keys")
    refused(lambda: use(keys=keys[None]), r"^kept\.keys")
    refused(lambda: use(keys=keys.astype(int)), r"^kept\.keys")
    refused(lambda: use(keys=None), r"^kept\.keys")
    refused(lambda: use(values=values[:-1]), r"^kept\.values")
    refused(lambda: use(values=values[:, :-1]), r"^kept\.values")
    refused(lambda: use(values=values.astype(np.float32)), r"^kept\.values")
    assert tail is not None
    for part, other in itertools.product((0, 1), ("short", "heads", "width", "dtype", "long")):
        some = [*tail]
        each = some[part]
        some[part] = {
            "short": each[:, 1:],
            "heads": each[:1],
            "width": each[..., 1:],
            "dtype": each.astype(np.float32 if part else np.float16),
            "long": np.concatenate([each] * 6, axis=1),
        }[other]
        refused(lambda some=some: use(tail=tuple(some)), r"^kept\.tail")
    # Where none is kept their dtype is not looked at.
    use(keys=keys[:0].astype(np.float16), values=values[:0], positions=[[], []], tail=(k, v))


def test_refusals_of_calls() -> None:
    k, v, q, _ = sample(50)
    index = ck.KvIndex.build(k, v, bits=12)
    rows = kept_rows(index, k, v)
    for bits in (0, 4, 9, 32, True, None, "12", 12.5):
        refused(lambda bits=bits: ck.KvIndex.build(k, v, bits=bits), "^bits is .*8, 12 or 16")
        refused(lambda bits=bits: ck.KeyIndex.build(k, bits=bits), "^bits is .*8, 12 or 16")
    assert ck.KeyIndex.build(k, bits=16).bits == 16

    def call(*changed: Any, **options: Any) -> None:
        index.attention(*(changed or (q, 0.01)), **{"kept": rows, **options})

    nan = q.copy()
    nan[2, 1, 7] = np.nan
    refused(lambda: call(nan, 0.01), r"^q\[2, 1, 7\]")
    nan[2, 1, 7] = np.inf
    refused(lambda: call(nan, 0.01), r"^q\[2, 1, 7\]")
    for some in (q[..., :-1], q[:3], q[0], q[None], q.astype(int), q.astype(object), 3.0):
        refused(lambda some=some: call(some, 0.01), "^q")
    for eps in (-0.1, 1.0, np.nan, [0.1, 0.1], "much", None):
        refused(lambda eps=eps: call(q, eps), "^eps")
    for kept in ((k, v), 3, index, "rows", k):
        refused(lambda kept=kept: call(kept=kept), r"^kept is a .*KeptRows")
    refused(lambda: call(scale=np.inf), "scale")
    refused(lambda: call(scale="x"), "scale")
    refused(lambda: call(mask=np.ones((4, 5, 51), bool)), "^mask")
    refused(lambda: call(mask=np.full((4, 5, 50), 0.5)), "^mask")
    refused(lambda: call(lengths=51), "^lengths")
    refused(lambda: call(lengths=-1), "^lengths")
    refused(lambda: call(lengths=[1, 2]), "^lengths")
    refused(lambda: call(sinks=[1.0, 2.0]), "^sinks")
    refused(lambda: call(sinks=np.nan), "^sinks")
    refused(lambda: call(sinks=np.inf), "^sinks")
    refused(lambda: call(threads=0), "^threads")
    refused(lambda: call(kept=None), "^index")
    values = v.copy()
    values[1, 5, 3] = 1e38
    rows_of_values = ck.KvIndex.build(k, values)
    refused(lambda: rows_of_values.attention(q, 0.01, kept=rows), "^values.*no code")


def test_no_panic_whatever_is_passed() -> None:
    """Thousands of calls with one or two things wrong: an answer, or an error of one line."""
    rng = np.random.default_rng(29)
    k, v, q, _ = sample(20)
    indexes = [ck.KvIndex.build(k, v, bits=bits, keep_keys=False) for bits in (8, 12, 16)]
    flat = ck.KvIndex.build(k[0], v[0], bits=16)
    nothing = ck.KvIndex.build(k[:, :0], v[:, :0], bits=12)
    answered = wrong = 0
    lines = set()
    for _ in range(3000):
        index = [*indexes, flat, nothing][int(rng.integers(5))]
        *axes, n, _ = index.shape
        ours, beside = (k, v) if axes else (k[0], v[0])
        positions: list[Any] = []
        for bare in index.bare:
            more = rng.integers(0, max(n, 1), int(rng.integers(5)))
            positions.append(np.union1d(bare, more[:n]).astype(int))
        rows = [
            np.concatenate([head_of(x, head)[each] for head, each in enumerate(positions)])
            for x in (ours, beside)
        ]
        m = int(rng.integers(n + 1))
        tail: Any = (ours[..., n - m : n, :], beside[..., n - m : n, :])
        if rng.random() < 0.7:
            cut = [each[each < n - m] for each in positions]
            rows = [
                np.concatenate([head_of(x, head)[each] for head, each in enumerate(cut)])
                for x in (ours, beside)
            ]
            positions = cut
        elif rng.random() < 0.8:
            tail = None
        options: dict[str, Any] = {"q": q if axes else q[0], "eps": 0.01}
        for _ in range(int(rng.integers(3))):
            kind, at = int(rng.integers(16)), int(rng.integers(2))
            if kind == 0:
                rows[at] = rows[at][: int(rng.integers(len(rows[at]) + 1))]
            elif kind == 1:
                rows[at] = rows[at].astype(rng.choice(["f2", "f4", "f8", "i4"]))
            elif kind == 2:
                rows[at] = rows[at][..., : int(rng.integers(41))]
            elif kind == 3 and positions:
                some = int(rng.integers(len(positions)))
                positions[some] = rng.integers(-2, 2 * n + 2, int(rng.integers(6)))
            elif kind == 4:
                positions = positions[: int(rng.integers(3))] * int(rng.integers(3))
            elif kind == 5:
                tail = (ours[..., : int(rng.integers(n + 1)), :], beside[..., : n // 2, :])
            elif kind == 6 and tail is not None:
                tail = (tail[0].astype(rng.choice(["f2", "f4", "f8"])), tail[1])
            elif kind == 7 and tail is not None:
                tail = tail[::-1]
            elif kind == 8:
                tail = (k[None], v[None])
            elif kind == 9:
                options["q"] = options["q"] * rng.choice([0.0, np.nan, 1e30, 1e-45, 1e5])
            elif kind == 10:
                options["lengths"] = int(rng.integers(-1, 2 * n + 2))
            elif kind == 11:
                options["mask"] = (
                    rng.random((int(rng.integers(1, 6)), n + int(rng.integers(2)))) < 0.3
                )
            elif kind == 12:
                options["sinks"] = rng.choice([np.nan, np.inf, -np.inf, 1e300, 3.0])
            elif kind == 13:
                options["scale"] = rng.choice([0.0, np.nan, -np.inf, 1e300, 1e-300, -1.0])
            elif kind == 14:
                options["eps"] = rng.choice([0.0, 1.0, -1.0, np.nan, 1e-300])
            else:
                options["q"] = options["q"][..., : int(rng.integers(41))]
        try:
            kept = ck.KeptRows(rows[0], rows[1], positions, tail)
            with np.errstate(all="ignore"):
                found = index.attention(kept=kept, **options)
        except ck.CertkError as error:
            lines.add(str(error).count("\n"))
            wrong += 1
        else:
            assert np.isfinite(found.out).all()
            assert (found.tail_mass_upper <= 1).all()
            answered += 1
    assert min(answered, wrong) > 500
    assert lines == {0}
