"""Masses by codes alone, and the keys that a row must have back, against Arb.

The oracle shares no code with the library: scores are integers times one power of two, and sums of
their exponentials are Arb balls.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flint import arb, ctx, fmpq

import certk_rs as ck
from exact_rows import exact_scores
from levels import each_level

Rng = np.random.Generator
Array = np.ndarray
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)


def real_scores(queries: Array, keys: Array, scale: float) -> Array:
    """Real scores (m, n) as rationals."""
    scores, unit = exact_scores(queries, keys, scale)
    return scores * unit


def ball(number: Fraction | int) -> arb:
    number = Fraction(number)
    return arb(fmpq(number.numerator, number.denominator))


def mass(scores: Any, top: Fraction) -> arb:
    """Sum of e^(score - top)."""
    return sum(((ball(score) - ball(top)).exp() for score in scores), arb(0))


def holds(lower: float, real: arb, upper: float) -> bool:
    """Return False if the interval provably leaves the number out."""
    return not (arb(lower) > real) and not (arb(upper) < real)


@pytest.fixture(autouse=True)
def _precise() -> Iterator[None]:
    old, ctx.prec = ctx.prec, 400
    yield
    ctx.prec = old


@dataclass
class Case:
    keys: Array
    queries: Array
    scale: float
    index: ck.KeyIndex


def cases(rng: Rng, count: int) -> Iterator[Case]:
    """Keys of all kinds: of a few sizes, turned or not, grown, saved, with keys without a code."""
    for at in range(count):
        dim = int(rng.choice([1, 3, 16, 20, 32]))
        n, dtype = int(rng.integers(1, 80)), DTYPES[at % 3]
        keys = rng.standard_normal((n, dim)) * rng.choice([1e-3, 1.0, 8.0])
        if at % 4 == 1:
            keys += 20 * rng.standard_normal(dim)
        if at % 4 == 2:
            keys[:: max(1, n // 2)] *= 200.0
        if at % 5 == 3:
            keys[:, 0] *= 50
        keys = keys.astype(dtype)
        queries = (rng.standard_normal((3, dim)) * rng.choice([0.0, 0.3, 4.0])).astype(dtype)
        scale = float(rng.choice([dim**-0.5, 1.0, -0.7]))
        some = max(1, n // 2) if at % 3 else n
        index = ck.KeyIndex.build(keys[:some], rotate=[None, True, False][at % 3])
        if some < n:
            index.append(keys[some:])
        if at % 7 == 0:
            index = pickle.loads(pickle.dumps(index))
        yield Case(keys, queries, scale, index)


def test_mass_by_codes_holds() -> None:
    tight, rng = 0, np.random.default_rng(1)
    for case in cases(rng, 150):
        n = len(case.keys)
        lengths = rng.integers(0, n + 1, len(case.queries))
        mask = rng.random((len(case.queries), n)) < 0.8
        scores = real_scores(case.queries, case.keys, case.scale)
        said = case.index.log_mass(case.queries, scale=case.scale, lengths=lengths, mask=mask)
        for row, (low, high) in enumerate(zip(*said, strict=True)):
            seen = [s for i, s in enumerate(scores[row]) if mask[row, i] and i < lengths[row]]
            if not seen:
                assert low == high == -np.inf
                continue
            top = max(seen)
            assert holds(low, mass(seen, top).log() + ball(top), high)
            tight += high - low < 0.2
    assert tight > 100


@pytest.mark.parametrize("m", [1, 3, 20])
def test_attention_says_what_its_keys_weigh(m: int) -> None:
    rng = np.random.default_rng(m)
    for at in range(12):
        n, dim = int(rng.integers(1, 60)), int(rng.choice([4, 16, 33]))
        dtype = DTYPES[at % 3] if at % 4 else np.float64
        keys = (3 * rng.standard_normal((n, dim))).astype(dtype)
        queries = rng.standard_normal((m, dim)).astype(dtype)
        values = rng.standard_normal((n, 5)).astype(dtype)
        index = ck.KeyIndex.build(keys) if dtype is not np.float64 and at % 2 else None
        sinks = np.array(rng.normal()) if at % 3 == 0 else None
        eps = float(rng.choice([0.0, 0.05, 0.4]))
        options: Any = {"even_if_slower": True, "sinks": sinks, "scale": 0.5}
        found = ck.attention(queries, keys, values, eps, index=index, **options)
        scores = real_scores(queries, keys, 0.5)
        for row in range(m):
            # Which keys were kept is not said, but the whole is what they and the tail weigh.
            top = max(scores[row])
            whole = mass(scores[row], top) + (
                0 if sinks is None else (arb(float(sinks)) - ball(top)).exp()
            )
            whole = whole.log() + ball(top)
            low, high = found.log_mass_lower[row], found.log_mass_upper[row]
            if found.k[row] == n:
                assert holds(low, whole, high)
                assert high - low < 2e-3
            upper = arb(float(found.tail_mass_upper[row]))
            assert not (whole + (1 - upper).log() > arb(high))
            assert not (arb(low) > whole)


def test_recall_proves_the_rest() -> None:
    rng, named, fewest = np.random.default_rng(5), 0, 0
    for case in cases(rng, 150):
        n, rows = len(case.keys), len(case.queries)
        kept = (rng.standard_normal((int(rng.integers(0, 9)), case.keys.shape[1])) * 3).astype(
            case.keys.dtype
        )
        eps = rng.choice([0.0, 0.01, 0.1, 0.5], rows)
        seen = rng.random((rows, n)) < 0.9
        here = real_scores(case.queries, kept, case.scale)
        there = real_scores(case.queries, case.keys, case.scale)
        beside = np.full((2, rows), -np.inf)
        for row in range(rows):
            if len(kept):
                top = max(here[row])
                real = mass(here[row], top).log() + ball(top)
                off = rng.choice([1e-12, 0.01])
                beside[:, row] = float(real.mid()) - off - 1e-9, float(real.mid()) + off + 1e-9
        found = case.index.recall(
            case.queries, (beside[0], beside[1]), eps, scale=case.scale, mask=seen
        )
        assert (found.tail_mass_upper <= eps).all()
        for row in range(rows):
            back = found.row(row)
            assert (np.diff(back) > 0).all()
            assert seen[row, back].all()
            left = np.setdiff1d(np.flatnonzero(seen[row]), back)
            every = [*here[row], *there[row][seen[row]]]
            if not every:
                continue
            top = max(every)
            tail = mass(there[row][left], top) / mass(every, top)
            assert holds(found.tail_mass_lower[row], tail, found.tail_mass_upper[row])
            lost = mass(there[row][seen[row]], top) / mass(every, top)
            assert holds(0.0, lost, found.lost_upper[row])
            assert (len(back) == 0) == (found.lost_upper[row] <= eps[row])
            if left.size == 0:
                assert found.tail_mass_upper[row] == 0.0
            named += len(back)
            weights = sorted((float(mass([s], top)) for s in there[row][seen[row]]), reverse=True)
            budget = float(eps[row]) * float(mass(every, top))
            rest = np.cumsum(weights[::-1])[::-1]
            fewest += int(np.count_nonzero(rest > budget))
    assert named <= 1.3 * fewest


def test_answers_do_not_depend_on_level_or_threads() -> None:
    rng = np.random.default_rng(3)
    keys = rng.standard_normal((2, 700, 40), dtype=np.float32)
    q = 4 * rng.standard_normal((4, 5, 40), dtype=np.float32)
    index = ck.KeyIndex.build(keys)
    beside = np.full((4, 5), 3.0)
    answers = []
    for _ in each_level():
        for threads in (1, 3):
            found = index.recall(q, (beside, beside), 0.02, threads=threads)
            parts = found.indptr, found.indices, found.tail_mass_upper, found.tail_mass_lower
            ends = index.log_mass(q, threads=threads)
            answers.append(b"".join(part.tobytes() for part in (*parts, *ends)))
    assert len(answers) > 2
    assert len(set(answers)) == 1


def test_extremes() -> None:
    keys = np.ones((5, 8), np.float32)
    index = ck.KeyIndex.build(keys)
    low, high = index.log_mass(np.full(8, 1e30, np.float32))
    assert low == -np.inf or low < 8e30 * 8**-0.5 < high
    for end in (-1e9, -720.0, 0.0, 720.0, 1e9, np.inf, -np.inf):
        found = index.recall(np.ones(8, np.float32), (end, end), 0.1)
        assert found.tail_mass_upper <= 0.1
        assert (len(found.indices) == 0) == (end > 7)
    unknown = index.recall(np.ones(8, np.float32), (-np.inf, np.inf), 0.1)
    assert len(unknown.indices) == 5
    assert ck.KeyIndex.build(keys[:0]).recall(np.ones(8, np.float32), (0.0, 0.0), 0.1).k == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beside": (1.0, 0.0)}, "beside is no interval"),
        ({"beside": (np.nan, 0.0)}, "beside is no interval"),
        ({"beside": (np.array([0.0, 2.0]), 1.0)}, "beside is no interval"),
        ({"beside": (np.zeros(3), 0.0)}, "beside has shape"),
        ({"eps": 1.0}, "eps"),
        ({"lengths": 9}, "lengths"),
        ({"mask": np.ones((2, 5), np.float32)}, "mask has dtype"),
        ({"mask": np.ones((3, 5), bool)}, "mask"),
        ({"scale": np.inf}, "scale"),
        ({"threads": 0}, "threads"),
        ({"q": np.ones((2, 7), np.float32)}, "q"),
        ({"q": np.full((2, 8), np.nan, np.float32)}, "q"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    index = ck.KeyIndex.build(np.ones((5, 8), np.float32))
    given: dict[str, Any] = {"q": np.ones((2, 8), np.float32), "beside": (0.0, 0.0), "eps": 0.1}
    given |= options
    q, beside, eps = (given.pop(name) for name in ("q", "beside", "eps"))
    with pytest.raises(ck.CertkError, match=message):
        index.recall(q, beside, eps, **given)


def test_balls_are_pickled_and_copied() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((2, 3, 50, 7), dtype=np.float32)
    ball = ck.ValueBall(values)
    again = pickle.loads(pickle.dumps(ball))
    assert repr(again) == repr(ball)
    assert (again.radius == ball.radius).all()
    other = copy.copy(ball)
    other.append(100 * values[..., :1, :])
    assert (len(other), len(ball)) == (51, 50)
    assert (other.radius > ball.radius).all()
    q, k = rng.standard_normal((2, 3, 4, 7), dtype=np.float32), values
    bounds = [ck.attention(q, k, values, 0.1, ball=b).error_bound for b in (ball, again)]
    assert (bounds[0] == bounds[1]).all()
