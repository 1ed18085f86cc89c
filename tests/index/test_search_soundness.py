"""Certificates of a search over codes, against exact arithmetic.

For every row the real tail mass of the kept set, the real-number softmax of `scale * q.k` over
exactly the stored numbers, must lie in `[lower, upper]`; `exact_rows` is the oracle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import certk_rs as ck
from exact_rows import best, exact_scores, inside

Rng = np.random.Generator
Array = np.ndarray

# --------------------------------------------------------------------------------- the cases


@dataclass
class Case:
    """An index in pieces, queries that are asked of it, and how."""

    name: str
    keys: Array
    queries: Array
    scale: float
    rotate: bool | None
    pieces: list[int]
    eps: Array
    keys_dtype: str = "float32"
    queries_dtype: str = "float32"
    rule: str = "mass"
    k: int | None = None
    max_scored: int | None = None


def gaussian(rng: Rng, n: int, d: int) -> Array:
    """Nothing special."""
    return rng.normal(size=(n, d))


def heavy(rng: Rng, n: int, d: int) -> Array:
    """Entries of any size."""
    return rng.standard_t(1.2, size=(n, d))


def many_norms(rng: Rng, n: int, d: int) -> Array:
    """Norms from 1e-3 to 1e3."""
    return rng.normal(size=(n, d)) * 10.0 ** rng.uniform(-3, 3, size=(n, 1))


def identical(rng: Rng, n: int, d: int) -> Array:
    """One key, many times."""
    return np.repeat(rng.normal(size=(1, d)), n, axis=0)


def few_distinct(rng: Rng, n: int, d: int) -> Array:
    """Duplicates."""
    return rng.normal(size=(3, d))[rng.integers(0, 3, size=n)]


def huge_coordinate(rng: Rng, n: int, d: int) -> Array:
    """One coordinate that is huge in all keys, or in one."""
    keys = rng.normal(size=(n, d))
    rows = slice(None) if rng.random() < 0.5 else rng.integers(0, n)
    keys[rows, rng.integers(0, d)] += 10.0 ** rng.uniform(1, 6) * rng.choice([-1, 1])
    return keys


def off_centre(rng: Rng, n: int, d: int) -> Array:
    """A mean that dwarfs what keys differ by."""
    return 10.0 ** rng.uniform(0, 6) * rng.normal(size=(1, d)) + rng.normal(size=(n, d))


def zeros(rng: Rng, n: int, d: int) -> Array:
    """Zero keys, and a few others."""
    return rng.normal(size=(n, d)) * (rng.random((n, 1)) < 0.3)


def outliers(rng: Rng, n: int, d: int) -> Array:
    """Keys that stay without a code, some of which dominate."""
    size = 10.0 ** rng.uniform(1, 4)
    return rng.normal(size=(n, d)) * np.where(rng.random((n, 1)) < 2 / n, size, 1.0)


def edges(rng: Rng, n: int, d: int) -> Array:
    """Entries halfway between codes, as far as that can be arranged, and the largest code."""
    keys = (rng.integers(-127, 127, size=(n, d)) + 0.5) * 2.0**-4
    keys[:, 0] = rng.choice([-127.0, 127.0, 127.5], size=n) * 2.0**-4
    return keys - (keys.mean(0) if rng.random() < 0.5 else 0)


def subnormal(rng: Rng, n: int, d: int) -> Array:
    """Keys of f32 numbers that are not normal, or hardly."""
    return rng.normal(size=(n, d)) * 10.0 ** rng.uniform(-44, -36, size=(n, 1))


def near_the_end(rng: Rng, n: int, d: int) -> Array:
    """Keys up to the largest f32 number, beside others."""
    keys = rng.normal(size=(n, d)) * 10.0 ** rng.uniform(15, 37, size=(n, 1))
    keys.flat[rng.integers(0, keys.size)] = 3.4e38
    return np.clip(keys, -3.4e38, 3.4e38)


def two_levels(rng: Rng, n: int, d: int) -> Array:
    """One direction carries all differences."""
    keys = np.zeros((n, d)) + rng.normal(size=(1, d))
    keys[:, -1] += rng.choice([-1.0, 1.0], size=n)
    return keys


def lifted(rng: Rng, n: int, d: int) -> Array:
    """Scores far apart, where a gap to the open keys alone forgets what was scored."""
    keys = rng.normal(size=(n, d)) * rng.uniform(0.1, 4)
    keys[: rng.integers(0, n)] *= 8.0
    return keys


KINDS: list[Callable[[Rng, int, int], Array]] = [
    gaussian,
    heavy,
    many_norms,
    identical,
    few_distinct,
    huge_coordinate,
    off_centre,
    zeros,
    outliers,
    edges,
    subnormal,
    near_the_end,
    two_levels,
    lifted,
]
RULES = ["mass", "gap", "top_k"]
EPS = [0.0, 1e-300, 1e-80, 1e-12, 1e-6, 1e-3, 0.01, 0.1, 0.3, 0.5, 0.9, 1 - 1e-12]
HALF_MAX = 65504.0
MOST = 3.4e38


def stored(values: Array, dtype: str) -> Array:
    """An array in the dtype, its entries cut to what that holds."""
    most = {"float16": HALF_MAX, "bfloat16": MOST / 2, "float32": MOST}.get(dtype, np.inf)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return np.clip(values, -most, most).astype(kind)


def make(rng: Rng, kind: Callable[[Rng, int, int], Array], *, most: int = 90) -> Case:
    """A case at random."""
    d = int(rng.choice([1, 2, 3, 4, 5, 8, 13, 16, 17, 20, 32, 64, rng.integers(1, most)]))
    n = int(rng.choice([1, 2, 3, 7, 15, 16, 17, 33, 50, rng.integers(1, max(2, 3000 // d))]))
    m = int(rng.integers(1, 7))
    keys = kind(rng, n, d)
    queries = rng.normal(size=(m, d)) * 10.0 ** rng.choice([-3, 0, 0, 0, 3])
    if rng.random() < 0.2:
        queries = keys[rng.integers(0, n, size=m)].copy()
    if rng.random() < 0.1:
        queries[0] = 0.0
    if rng.random() < 0.1:
        queries[:, rng.integers(0, d)] *= 1e4
    if rng.random() < 0.1:
        queries[rng.random(queries.shape) < 0.5] = 0.0
    keys_dtype = str(rng.choice(["float32"] * 4 + ["float16", "bfloat16"]))
    queries_dtype = str(rng.choice(["float32", "float32", "float64", "float16"]))
    exact = stored(queries, queries_dtype).astype(np.float64)
    seen = stored(keys, keys_dtype).astype(np.float64)
    spread = float((exact @ (seen - seen.mean(0)).T).std())
    scale = float(rng.choice([0.1, 1.0, 3.0, 10.0, 50.0])) / (spread if spread > 0 else 1.0)
    if rng.random() < 0.15:
        scale = float(rng.choice([0.0, 1e-300, 1e-40, 1e-30, 1.0, 1e6, 1e30, 1e300]))
    if queries_dtype == "float64" and rng.random() < 0.3 and 0 < abs(scale) < 1e50:
        power = float(10.0 ** rng.uniform(-200, 200))
        queries, scale = queries * power, scale / power
    if rng.random() < 0.3:
        scale = -scale
    scale = float(np.clip(scale, -1e300, 1e300))
    pieces = [n]
    if rng.random() < 0.3:
        cuts = np.sort(rng.integers(0, n + 1, size=int(rng.integers(1, 5))))
        pieces = np.diff([0, *cuts.tolist(), n]).tolist()
    return Case(
        name=kind.__name__,
        keys=keys,
        queries=queries,
        scale=scale,
        rotate=[None, True, False][int(rng.integers(0, 3))],
        pieces=pieces,
        eps=rng.choice(EPS, size=m),
        keys_dtype=keys_dtype,
        queries_dtype=queries_dtype,
    )


def search(case: Case, threads: int = 1, *, lend: bool = True) -> ck.SearchResult:
    """The library's answer, of an index that was built in pieces."""
    keys, queries = stored(case.keys, case.keys_dtype), stored(case.queries, case.queries_dtype)
    at = case.pieces[0]
    index = ck.KeyIndex.build(keys[:at], rotate=case.rotate, keep_keys=False, threads=threads)
    for count in case.pieces[1:]:
        index.append(keys[at : at + count], threads=threads)
        at += count
    return index.search(
        queries, case.eps, keys=keys if lend else None, scale=case.scale, rule=case.rule, k=case.k,
        max_scored=case.max_scored, threads=threads,
    )  # fmt: skip


def check(case: Case, found: ck.SearchResult) -> None:
    """Every row of an answer against the oracle."""
    upper, lower, scored, rung = (
        found.tail_mass_upper, found.tail_mass_lower, found.scored, found.rung
    )  # fmt: skip
    keys, queries = stored(case.keys, case.keys_dtype), stored(case.queries, case.queries_dtype)
    scores, unit = exact_scores(queries, keys, case.scale)
    for row in range(len(queries)):
        listed = found.row(row)
        what = (
            f"{case.name} row {row}: [{lower[row]}, {upper[row]}] with {len(listed)} kept"
            f" of {len(keys)}, d = {keys.shape[1]}, rung {rung[row]}, {case}"
        )
        assert found.k[row] == len(listed)
        assert (np.diff(listed) > 0).all()
        kept = np.zeros(len(keys), bool)
        kept[listed] = True
        assert inside(scores[row], unit, kept, lower[row], upper[row]), what
        certified, limit = found.status[row] == ck.Status.CERTIFIED, case.max_scored
        assert scored[row] <= (len(keys) if limit is None else limit), what
        if rung[row] == ck.Rung.DENSE and limit is None and not kept.all():
            assert scored[row] == len(keys), what
        if certified:
            assert upper[row] <= case.eps[row], what
        if case.rule != "top_k":
            assert certified or limit is not None, what
            assert certified == (upper[row] <= case.eps[row]), what
            if found.minimal[row] and certified and len(listed) > 1 and case.eps[row] > 0:
                fewer = np.zeros(len(keys), bool)
                fewer[best(scores[row], unit)[: len(listed) - 1]] = True
                more = float(np.nextafter(case.eps[row], 1.0))
                assert inside(scores[row], unit, fewer, more, 1.0), what
        elif certified or limit is None:
            assert listed.tolist() == sorted(best(scores[row], unit)[: case.k]), what


def one(
    keys: Array,
    query: Array,
    scale: float,
    eps: float,
    *,
    rotate: bool | None = None,
    pieces: list[int] | None = None,
    queries_dtype: str = "float64",
) -> Case:
    """A case of one query."""
    budgets = np.array([eps])
    pieces = pieces or [len(keys)]
    case = Case("one", keys, np.atleast_2d(query), scale, rotate, pieces, budgets)
    case.queries_dtype = queries_dtype
    return case


# --------------------------------------------------------------------------------- the tests


def any_search(rng: Rng, case: Case) -> Case:
    """The same keys and queries, searched by some rule, perhaps cut short."""
    n, rule = len(case.keys), str(rng.choice(RULES))
    return replace(
        case,
        rule=rule,
        k=int(rng.integers(1, n + 2)) if rule == "top_k" else None,
        max_scored=int(rng.integers(0, n + 3)) if rng.random() < 0.4 else None,
    )


def answer(case: Case) -> ck.SearchResult | None:
    """The answer; none if products are too large for any but a search by mass."""
    try:
        return search(case)
    except ck.CertkError as error:
        if "tell scores apart" not in str(error):
            raise
        return None


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_random_rows(kind: Callable[[Rng, int, int], Array]) -> None:
    """All kinds of keys, queries, scales, budgets, dtypes and ways to build; then every rule.

    Also where `max_scored` ends a search.
    """
    rng = np.random.default_rng(KINDS.index(kind))
    answered = 0
    for _ in range(60):
        case = make(rng, kind)
        check(case, search(case))
        case = any_search(rng, case)
        found = answer(case)
        if found is not None:
            answered += 1
            check(case, found)
    assert answered > 20


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_many_random_rows(kind: Callable[[Rng, int, int], Array]) -> None:
    """The same, many more, and with more dimensions."""
    rng = np.random.default_rng(1000 + KINDS.index(kind))
    for _ in range(4000):
        case = make(rng, kind, most=600)
        check(case, search(case))
        case = any_search(rng, make(rng, kind, most=300))
        found = answer(case)
        if found is not None:
            check(case, found)


def traps() -> Iterator[Case]:
    """Yield rows that were made to expose one mistake each."""
    rng = np.random.default_rng(2)
    # Keys without a code score -inf by codes, and `h < inf` comparisons lose them.
    keys = rng.normal(size=(600, 32)) * 0.05
    keys[[3, 299, 599]] = rng.normal(size=(3, 32)) * 30
    for at in (3, 299, 599):
        yield one(keys, keys[at] / 40, 32**-0.5, 0.05)
    # A scalar remainder loop has another error bound than the lanes. Scores differ by less than a
    # rounding of their sums.
    for d in (15, 16, 17, 31, 33, 47, 63, 65):
        keys = np.tile(rng.normal(size=d), (24, 1))
        keys[:, -1] = 1e-3 * (1 + np.arange(24) * 2.0**-23)
        yield one(keys, np.append(np.full(d - 1, 1e6), 1e-6), d**-0.5, 0.05)
    # Beside a huge entry the others vanish from a 16-bit query, and with them all scores.
    keys = rng.normal(size=(300, 12))
    keys[:, 3] = 0.0
    for size, rotate in product((1e3, 1e5, 1e7), (True, False)):
        query = rng.normal(size=12)
        query[3] = size
        yield one(keys, query, 1.0, 0.05, rotate=rotate)
    # The Gram matrix must hold every key that can go unscored, also an appended one.
    pieces = [64, *(size for _ in range(18) for size in (1, 1, 7, 16, 33))]
    parts = [rng.normal(size=(size, 16)) * rng.uniform(0.01, 2.0) for size in pieces]
    parts[0] *= 0.01
    for steps in range(16, len(parts) + 1, 15):
        keys = np.concatenate(parts[:steps])
        yield one(keys, rng.normal(size=16) * 2, 0.25, 0.05, pieces=pieces[:steps])


@pytest.mark.parametrize("rule", RULES)
def test_rows_made_to_expose_a_mistake(rule: str) -> None:
    for case in traps():
        k = len(case.keys) // 4 if rule == "top_k" else None
        for most in (None, 16):
            asked = replace(case, rule=rule, k=k, max_scored=most)
            check(asked, search(asked))


def test_a_proven_top_k_says_nothing_of_masses() -> None:
    """The true top k may carry next to nothing."""
    rng = np.random.default_rng(12)
    case = one(rng.normal(size=(200, 8)) * 0.05, rng.normal(size=8), 1.0, 0.5)
    asked = replace(case, rule="top_k", k=5)
    found = search(asked)
    check(asked, found)
    assert found.tail_mass_upper[0] > 0.9
    assert found.status[0] == ck.Status.OVER_BUDGET
    index = ck.KeyIndex.build(stored(case.keys, "float32"))
    assert (
        index.search(case.queries, None, rule="top_k", k=5, scale=1.0).status[0]
        == ck.Status.CERTIFIED
    )


@pytest.mark.parametrize(("rule", "k"), [("mass", None), ("gap", None), ("top_k", 3)])
def test_keys_without_codes_are_scored_up_to_the_limit_only(rule: str, k: int | None) -> None:
    """Nothing is proven if the limit leaves a key without a bound."""
    rng = np.random.default_rng(4)
    keys = rng.normal(size=(400, 8))
    keys[::80] *= 300
    for most in (0, 1, 4):
        case = replace(one(keys, rng.normal(size=8) * 0.01, 1.0, 0.3), rule=rule, k=k)
        found = search(replace(case, max_scored=most))
        check(replace(case, max_scored=most), found)
        assert found.status[0] == ck.Status.OVER_BUDGET


def test_the_oracle_refuses() -> None:
    """A bound that is off in the twelfth place is found out."""
    scores, unit = exact_scores(np.array([[1.0]]), np.array([[0.0], [-1.0]]), 1.0)
    kept = np.array([True, False])
    mass = 1 / (1 + math.e)
    assert inside(scores[0], unit, kept, mass * (1 - 1e-15), mass * (1 + 1e-15))
    assert not inside(scores[0], unit, kept, 0.0, mass * (1 - 1e-12))
    assert not inside(scores[0], unit, kept, mass * (1 + 1e-12), 1.0)


@pytest.mark.parametrize("d", [600, 2000])
def test_offset_of_many_dimensions(d: int) -> None:
    """A product with the mean that loses a little in every term must not shift exact scores."""
    for power in range(39, 43):
        # Small terms vanish beside the big one where a sum starts with it.
        query = np.full(d, 0.49 * 2.0 ** (power - 52))
        query[[0, -1]] = 2.0**power
        keys = np.ones((16, d))
        keys[:, -1] = 127 * 2.0 ** (-power - 7) * np.where(np.arange(16) % 2, 1, -1)
        case = one(keys, query, 1.0, 0.2, rotate=False)
        check(case, search(case))


@pytest.mark.parametrize("power", [-290, -250, -200, -170, -160, 150, 160, 200, 250])
def test_queries_whose_squares_are_not_normal(power: int) -> None:
    """Squares of entries that underflow or overflow must not make any bound vanish."""
    rng = np.random.default_rng(3)
    keys, query = rng.normal(size=(200, 16)), rng.normal(size=16)
    for eps in (0.3, 0.1, 0.01):
        case = one(keys, query * 10.0**power, 3 * 10.0**-power, eps)
        for rule in ("mass", "gap"):
            asked = replace(case, rule=rule, max_scored=150)
            check(asked, search(asked))
        asked = replace(case, rule="top_k", k=20)
        check(asked, search(asked))


@pytest.mark.parametrize("scale", [1.0, 1e100, 1e300, -1e300])
def test_products_that_underflow_one_by_one_are_ranked_by_what_they_are(scale: float) -> None:
    """4096 products of just less than half the smallest number are more than one of a thousand."""
    keys = np.full((2, 4096), 0.49 * 2.0**-74)
    keys[1] = 0
    keys[1, 0] = 1200 * 2.0**-74
    case = replace(one(keys, np.full(4096, 2.0**-1000), scale, 0.1), rule="top_k", k=1)
    check(case, search(case))


@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_scores_that_overflow_are_not_masks(eps: float) -> None:
    """Codes whose scores are all -inf in f32 are keys nevertheless."""
    rng = np.random.default_rng(4)
    keys = -np.abs(rng.normal(size=(20, 4))) * 1e18
    case = one(keys, np.full(4, 1e25), 1.0, eps, rotate=False, pieces=[0, 20])
    check(case, search(case))


@pytest.mark.parametrize("scale", [1e12, 1e16, 1e20, -1e30, 1e300])
def test_scores_beyond_f64_keep_everything(scale: float) -> None:
    """All keys are kept if products in f64 decide nothing; no error of a radius is raised."""
    rng = np.random.default_rng(5)
    case = one(rng.normal(size=(30, 8)), rng.normal(size=8) * 1e3, scale, 0.1)
    check(case, search(case))


def test_factors_that_are_not_normal() -> None:
    """A scale so small that the factor of codes is no normal f32 number."""
    rng = np.random.default_rng(6)
    for power in range(-44, -24):
        keys = rng.normal(size=(40, 8)) * 1e18
        case = one(keys, rng.normal(size=8), 10.0**power * 1e-18, 0.1)
        check(case, search(case))
        case = one(keys, rng.normal(size=8) * 1e-3, 10.0**power, 0.45)
        check(case, search(case))


def codes_alone(case: Case) -> ck.SearchResult | None:
    """The answer without keys; none if it asks for them."""
    try:
        return search(case, lend=False)
    except ck.CertkError as error:
        if "keys" not in str(error):
            raise
        return None


def test_codes_alone_tell_the_truth() -> None:
    """Without keys to score, codes answer or say that they cannot."""
    rng = np.random.default_rng(7)
    answered = 0
    for kind in (gaussian, few_distinct, off_centre, two_levels, edges):
        for _ in range(40):
            case = make(rng, kind)
            found = codes_alone(case)
            if found is None:
                continue
            answered += 1
            assert not found.scored.any()
            check(case, found)
    assert answered > 20


def test_appended_key_by_key() -> None:
    """Many small additions to the sums of a long index."""
    rng = np.random.default_rng(8)
    keys = rng.normal(size=(400, 12)) * 10.0 ** rng.uniform(-2, 1, size=(400, 1))
    for eps in (0.3, 0.01):
        case = one(keys, rng.normal(size=12), 1.0, eps, pieces=[50] + [1] * 350)
        check(case, search(case))


def test_rows_do_not_know_each_other() -> None:
    """Rows that share a scan answer as each alone."""
    rng = np.random.default_rng(10)
    for kind in KINDS:
        case = make(rng, kind)
        together = search(case)
        for row in range(len(case.queries)):
            at = slice(row, row + 1)
            alone = search(replace(case, queries=case.queries[at], eps=case.eps[at]))
            assert np.array_equal(alone.row(0), together.row(row))
            assert alone.tail_mass_upper[0] == together.tail_mass_upper[row]
            assert alone.tail_mass_lower[0] == together.tail_mass_lower[row]


@pytest.mark.parametrize(
    "how",
    [
        {"rule": "mass", "max_scored": 100},
        {"rule": "mass", "max_scored": 300},
        {"rule": "top_k", "k": 1},
        {"rule": "gap"},
    ],
)
@pytest.mark.parametrize("reach", [60.0, 300.0, 700.0])
def test_keys_far_below_by_code_that_codes_say_little_of(how: dict[str, Any], reach: float) -> None:
    """One best key lies 708 nats above all others by code, whose rests may be worth as much."""
    n, d = 402, 2
    t, top = 1 / 128, 708.3
    r = np.float32(0.45 * t)
    q = np.array([[[0, np.float32(reach / r * np.sqrt(2.0))]]], np.float32)
    k = np.zeros((1, n, d), np.float32)
    k[0, 2:, 0] = np.tile([1, 1, -1, -1], n // 4)[: n - 2] * 127 / 128
    k[0, 2:, 1] = np.tile([r, -r, r, -r], n // 4)[: n - 2]
    k[0, 0, 1] = top / q[0, 0, 1] * np.sqrt(2.0)
    k[0, 1, 1] = -k[0, 0, 1]
    found = ck.KeyIndex.build(k).search(q, 1e-3, **how)
    scores = k[0].astype(np.longdouble) @ q[0, 0].astype(np.longdouble) / np.sqrt(np.longdouble(2))
    weights = np.exp(scores - scores.max())
    kept = np.zeros(n, bool)
    kept[np.asarray(found.indices)] = True
    lost = weights[~kept].sum() / weights.sum()
    assert lost <= found.tail_mass_upper.astype(np.longdouble)[0, 0] * (1 + np.longdouble(1e-15))
    assert found.tail_mass_lower.astype(np.longdouble)[0, 0] <= lost * (1 + np.longdouble(1e-15))
