"""The bounds of the paper: sound in exact arithmetic, equalities where theory says so.

Tail masses come from `Truth` (long double with an error bound) and, row by row, from Arb balls;
the identities and required gaps from mpmath. None of them shares code with the library.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, pairwise
from typing import Any

import ml_dtypes
import mpmath
import numpy as np
import pytest
import torch
from flint import arb
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import certk_rs as ck
from bulk_oracle import Truth
from cases import Case
from generators import DTYPES, FAMILIES, store
from oracle import ExactRow, Precision
from real_rows import Cache, layers, rows_of

bounds = ck.bounds
LD = np.longdouble
RULES = ("single_gap", "multi_gap", "threshold")
CLOSE = LD(2.0) ** -60


# ------------------------------------------------------------------------------- the identities


def close(got: float, want: Any, tolerance: float = 1e-12) -> bool:
    """Within a relative 1e-12, and not below."""
    return bool(want <= mpmath.mpf(float(got)) <= want * (1 + mpmath.mpf(tolerance)))


def masses() -> np.ndarray:
    """Tail masses over the whole range, next to both ends and to the seams of the formulas."""
    rng = np.random.default_rng(1)
    seams = np.array([2.0**-100, 0.25, 0.2928932188134524, 0.5, 0.75, 0.99])
    around = seams * (1 + np.arange(-3, 4)[:, None] * 2.0**-52)
    ends = np.concatenate([10.0 ** -np.arange(0.5, 323, 1.7), 1 - 2.0 ** -np.arange(1.0, 54)])
    return np.sort(np.concatenate([rng.random(400), around.ravel(), ends]))


def test_divergence_of_a_tail_mass() -> None:
    tau = masses()
    got = bounds.kl_from_tail_mass(tau)
    with mpmath.workdps(400):
        for t, kl in zip(tau, got, strict=True):
            # A subnormal has no 1e-12: there the next float is the bound.
            want = -mpmath.log(1 - mpmath.mpf(float(t)))
            assert close(kl, want) or float(kl) == np.nextafter(t, 1), t
    assert (np.diff(got) >= 0).all()


def test_tail_mass_of_a_divergence() -> None:
    tau = masses()
    kl = np.sort(np.concatenate([tau, tau * 40, np.linspace(30, 40, 200)]))
    got = bounds.tail_mass_from_kl(kl)
    with mpmath.workdps(400):
        for x, t in zip(kl, got, strict=True):
            assert close(t, 1 - mpmath.exp(-mpmath.mpf(float(x)))), x
    assert (np.diff(got) >= 0).all()
    assert got.max() == 1.0


def test_generic_inequalities() -> None:
    """Each is its formula, rounded up, and never below the distance."""
    tau = masses()
    kl = np.sort(np.concatenate([tau, tau * 40, [5e-324, 2.5e-323, 1e-310, np.inf]]))
    forms = {
        bounds.pinsker: lambda x: mpmath.sqrt(x / 2),
        bounds.bretagnolle_huber: lambda x: mpmath.sqrt(1 - mpmath.exp(-x)),
    }
    exact = bounds.tail_mass_from_kl(kl)
    for bound, form in forms.items():
        got = bound(kl)
        with mpmath.workdps(400):
            for x, t in zip(kl[:-1], got[:-1], strict=True):
                want = form(mpmath.mpf(float(x)))
                # Below the normal numbers a divergence has few digits to round.
                loss = 3 * 2**-52 if x > 1e-300 else 0.5
                assert want <= float(t) <= want * (1 + loss), (bound.__name__, x)
        assert (got >= exact).all()
        assert (np.diff(got) >= 0).all()
    assert bounds.bretagnolle_huber(kl).max() == 1.0


def test_the_identities_hold_on_softmax_rows() -> None:
    """TV, KL and tau of the same truncated row, from their definitions."""
    rng = np.random.default_rng(2)
    for n in (2, 5, 40):
        with mpmath.workdps(50):
            p = [mpmath.exp(mpmath.mpf(float(s))) for s in rng.standard_normal(n)]
            p = [x / mpmath.fsum(p) for x in p]
            kept = rng.permutation(n)[: max(1, n // 3)].tolist()
            head = mpmath.fsum(p[i] for i in kept)
            q = [p[i] / head if i in kept else mpmath.mpf(0) for i in range(n)]
            tv = mpmath.fsum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
            kl = mpmath.fsum(q[i] * mpmath.log(q[i] / p[i]) for i in kept)
            assert abs(float(bounds.tail_mass_from_kl(float(kl))) / tv - 1) < 1e-12
            assert abs(float(bounds.kl_from_tail_mass(float(tv))) / kl - 1) < 1e-12


@given(st.floats(0.0, 1.0, allow_subnormal=True), st.integers(1, 4))
@settings(max_examples=300, deadline=None)
def test_identities_are_monotone_float_by_float(x: float, steps: int) -> None:
    line = [x]
    for _ in range(steps):
        line.append(float(np.nextafter(line[-1], 1.0)))
    assert (np.diff(bounds.tail_mass_from_kl(line)) >= 0).all()
    kl = bounds.kl_from_tail_mass(line)
    assert (kl[1:] >= kl[:-1]).all()
    assert (bounds.tail_mass_from_kl(kl) >= line).all(), "there and back is never below"
    assert (bounds.tail_mass_from_kl(np.array(line) * 38) <= 1.0).all()


def test_ends_and_shapes_of_the_identities() -> None:
    assert bounds.kl_from_tail_mass([0.0, 1.0]).tolist() == [0.0, np.inf]
    assert bounds.tail_mass_from_kl([[0.0], [np.inf]]).tolist() == [[0.0], [1.0]]
    assert bounds.kl_from_tail_mass(0.25).shape == ()
    assert bounds.kl_from_tail_mass(np.zeros((2, 0))).shape == (2, 0)
    assert not bounds.kl_from_tail_mass([0.5]).flags.writeable
    assert bounds.kl_from_tail_mass(torch.tensor([0.5], dtype=torch.bfloat16)) > 0.69


# --------------------------------------------------------------------------------- required gap


def test_required_gap_against_mpmath() -> None:
    rng = np.random.default_rng(3)
    n = rng.integers(2, 2 ** rng.integers(2, 40, 600))
    k = np.minimum(rng.integers(1, n), n - 1)
    eps = np.where(rng.random(600) < 0.5, 10.0 ** rng.uniform(-320, 0, 600), rng.random(600))
    # Also budgets next to the share that is lost without a gap.
    eps = np.where(
        rng.random(600) < 0.3, ((n - k) / n) * (1 + rng.integers(-3, 4, 600) * 2.0**-53), eps
    )
    eps = np.clip(eps, 5e-324, 1 - 2.0**-53)
    got = bounds.required_gap(n, k, eps)
    with mpmath.workdps(60):
        for i in range(600):
            a, b, e = int(n[i]), int(k[i]), mpmath.mpf(float(eps[i]))
            want = mpmath.log((a - b) * (1 - e) / (b * e))
            assert want <= float(got[i]) <= want + mpmath.mpf(1e-12), (a, b, float(eps[i]))
            share = Fraction(a - b, a)
            assert (got[i] <= 0) == (share <= Fraction(float(eps[i])))


def test_required_gap_at_the_ends() -> None:
    got = bounds.required_gap(
        [5, 5, 5, 0, 1, 4, 4], [5, 4, 0, 0, 1, 3, 3], [0, 0, 0.5, 0, 0.9, 0.25, 0.3]
    )
    assert got[:6].tolist() == [-np.inf, np.inf, np.inf, -np.inf, -np.inf, 0.0]
    assert got[6] < 0
    assert bounds.required_gap(100, np.arange(101)[:, None], [0.1, 0.2]).shape == (101, 2)
    falling = bounds.required_gap(1000, np.arange(1, 1000), 0.01)
    assert (np.diff(falling) < 0).all()


@pytest.mark.parametrize("eps", [0.3, 0.1, 0.01, 1e-9])
def test_a_gap_that_suffices_proves_the_budget(eps: float) -> None:
    rng = np.random.default_rng(4)
    for n in (2, 7, 90):
        scores = two_levels(rng, 200, n)
        k = rng.integers(1, n, 200)
        truth = Truth(Case(scores, np.full(200, eps)))
        tau = tail_of_top(truth, k)
        enough = bounds.score_gap(scores, k) >= bounds.required_gap(n, k, eps)
        assert (tau[enough] <= eps * (1 + CLOSE)).all()
        # For two levels with the cut between them it is necessary too.
        between = np.sort(scores, axis=1)[np.arange(200), n - k] > scores.min(axis=1)
        between &= (scores == scores.max(axis=1, keepdims=True)).sum(axis=1) == k
        assert (tau[between & ~enough] > eps * (1 - 1e-12)).all()


def test_gaps_where_a_run_of_equal_scores_ends_at_k() -> None:
    """Long rows are partitioned, not sorted: the next score must be the best of the rest."""
    runs, size = 100, 410
    levels = np.repeat(np.arange(runs, dtype=np.float64), size)
    scores = np.random.default_rng(6).permutation(levels)
    for k in range(size, runs * size, size):
        assert bounds.score_gap(scores, k) == 1.0


# ------------------------------------------------------------------------- bounds against truth


def two_levels(rng: np.random.Generator, rows: int, n: int) -> np.ndarray:
    """Rows with two values in random places, gaps up to 40."""
    up = rng.random((rows, n)) < rng.random((rows, 1))
    return np.where(up, rng.uniform(0, 40, (rows, 1)), 0.0) + rng.uniform(-9, 9, (rows, 1))


def tail_of_top(truth: Truth, k: np.ndarray) -> np.ndarray:
    """(rows,) true tail mass of the top k, long double, relative error `truth.slack`."""
    head, tail = truth.ladder
    rows = np.arange(truth.case.rows)
    total = head[rows, k] + tail[rows, k]
    return tail[rows, k] / np.where(total > 0, total, LD(1))


def exact_top(scores: np.ndarray, k: int) -> arb:
    """The tail mass of a row's top k as an Arb ball."""
    row = ExactRow(scores)
    return row.tail_mass(row.order[:k], prec=256)


def check_rows(scores: np.ndarray, rng: np.random.Generator, name: str) -> int:
    """Every bound at random k, random cuts and random blocks, against the truth; rows checked."""
    rows, n = scores.shape
    case = Case(scores, np.full(rows, 0.1), name=name)
    truth = Truth(case)
    count = truth.count
    k = (rng.random(rows) * (count + 1)).astype(np.int64)
    tau = tail_of_top(truth, k)
    found = {
        "single": bounds.single_gap(scores, k),
        "multi 8": bounds.multi_gap(scores, k),
        "multi 2": bounds.multi_gap(scores, k, n_cuts=2),
    }
    if (count == n).all() and n > 1:
        cuts = np.flatnonzero(rng.random(n - 1) < rng.choice([0.05, 0.3, 1.0])) + 1
        cuts = np.setdiff1d(cuts, k)
        found["multi at cuts"] = bounds.multi_gap(scores, k, cuts)
    low = tau * (1 - truth.slack)
    for which, bound in found.items():
        wrong = np.flatnonzero((bound < low - TINY) | (bound > 1) | ((bound == 0) & (k < count)))
        for row in wrong:
            # The margin of long double is not a verdict: ask Arb.
            with Precision(256):
                assert arb(float(bound[row])) >= exact_top(scores[row], int(k[row])), (
                    f"{which}: {case.describe(row)} k={k[row]}"
                )
        assert (bound[k == count] == 0).all(), which
        assert (bound[(k == 0) & (count > 0)] == 1).all(), which
    # Weights that underflow have one bound for all, with which more cuts need not be better.
    assert (found["multi 8"] <= found["multi 2"] * (1 + 1e-12) + 1e-300).all()
    assert (found["multi 2"] <= found["single"]).all()
    check_blocks(truth, rng)
    check_smallest(truth, rng)
    return rows


TINY = np.finfo(LD).smallest_normal * LD(2.0) ** 60


def check_blocks(truth: Truth, rng: np.random.Generator) -> None:
    """Blocks of the stored order, bounds attained or loose, some blocks of masked keys."""
    scores = truth.key
    rows, n = scores.shape
    block = rng.integers(0, rng.integers(1, 6), n)
    sizes, upper, lower, kept, keep = [], [], [], [], np.zeros((rows, n), dtype=bool)
    for b in range(6):
        inside = truth.visible & (block == b)
        sizes.append(inside.sum(axis=1))
        loose = rng.exponential(1.0, rows) * (rng.random() < 0.5)
        upper.append(np.max(np.where(inside, scores, -np.inf), axis=1, initial=-np.inf) + loose)
        lower.append(np.min(np.where(inside, scores, np.inf), axis=1, initial=np.inf) - loose)
        kept.append(rng.random(rows) < 0.5)
        keep |= (block == b) & kept[-1][:, None]
    parts = [np.stack(p, axis=1) for p in (sizes, upper, lower, kept)]
    with np.errstate(invalid="ignore"):
        bound = bounds.blockwise(*parts)
    tau = truth.tail_mass(keep & truth.visible)
    assert (bound >= tau * (1 - truth.slack) - TINY).all()
    assert (bound[~(truth.visible & ~keep).any(axis=1)] == 0).all()


def check_smallest(truth: Truth, rng: np.random.Generator) -> None:
    """No rule certifies a k below the true minimum, and single and multi-gap certify their own."""
    scores, rows = truth.case.scores, truth.case.rows
    eps = rng.choice([0.3, 0.25, 0.1, 0.01, 1e-6, 0.0], rows)
    least = truth.minimal_k(eps)
    ks = {rule: bounds.smallest_k(scores, eps, rule) for rule in (*RULES, "exact")}
    for rule, k in ks.items():
        assert (k >= least).all(), (rule, truth.case.name)
        assert (k <= truth.count).all()
    assert (ks["exact"] <= least + 1).all()
    for rule, bound in (("single_gap", bounds.single_gap), ("multi_gap", bounds.multi_gap)):
        k = ks[rule]
        assert (bound(scores, k) <= eps).all()
        before = np.maximum(k - 1, 0)
        assert ((bound(scores, before) > eps) | (k <= 1)).all()
    assert (ks["multi_gap"] <= ks["single_gap"]).all()


def random_rows(seed: int, rows: int, n: int) -> tuple[np.ndarray, str]:
    rng = np.random.default_rng([5, seed])
    names = list(FAMILIES)
    parts = np.array_split(np.arange(rows), min(rows, len(names)))
    effective = np.concatenate([FAMILIES[names[i]](rng, len(p), n) for i, p in enumerate(parts)])
    dtype = DTYPES[seed % len(DTYPES)]
    return store(effective, dtype, "logits", 1.0), f"random_rows({seed}, {rows}, {n}) {dtype}"


LENGTHS = (1, 2, 3, 4, 5, 8, 16, 17, 33, 64, 100, 257)


@pytest.mark.parametrize("seed", range(24))
def test_random_rows(seed: int) -> None:
    """Some thirty thousand rows of all families and dtypes in the default run."""
    n = LENGTHS[seed // 2 % len(LENGTHS)]
    scores, name = random_rows(seed, 1200, n)
    assert check_rows(scores, np.random.default_rng(seed), name) == 1200


@pytest.mark.heavy
@pytest.mark.parametrize("part", range(20))
def test_a_million_random_rows(part: int) -> None:
    seen = 0
    for seed in range(40):
        n = int(np.random.default_rng([6, part, seed]).choice([*LENGTHS, 40, 70]))
        scores, name = random_rows(1000 + 40 * part + seed, 1260, n)
        seen += check_rows(scores, np.random.default_rng([7, part, seed]), name)
    assert seen >= 50_000


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_real_rows(small_cache: Cache, dtype: np.dtype) -> None:
    rng = np.random.default_rng(8)
    for layer in layers(small_cache):
        check_rows(rows_of(small_cache, layer, dtype), rng, f"layer {layer} {dtype}")


@pytest.mark.heavy
def test_all_real_rows(cache_512: Cache) -> None:
    rng = np.random.default_rng(9)
    for layer in layers(cache_512):
        scores = rows_of(cache_512, layer, np.dtype(np.float32))
        for part in np.array_split(scores, 6):
            check_rows(part, rng, f"layer {layer}")


def test_real_rows_show_how_loose_a_single_gap_is(small_cache: Cache) -> None:
    """At eps = 0.1 and n = 512: nine tenths of the keys where three tenths suffice."""
    scores = np.concatenate(
        [rows_of(small_cache, layer, np.dtype(np.float32)) for layer in layers(small_cache)]
    )
    share = {r: bounds.smallest_k(scores, 0.1, r).mean() / 512 for r in (*RULES, "exact")}
    print(share)
    assert share["exact"] < share["multi_gap"] < 1.35 * share["exact"]
    assert share["single_gap"] > 2 * share["exact"]
    assert share["threshold"] > share["exact"]


# ----------------------------------------------------------------------------------- equalities


def met(tau: arb, *found: Any) -> None:
    """Assert that bounds are the tail mass, to within 1e-12 from above."""
    with Precision(256):
        for bound in found:
            assert tau <= arb(float(bound)) <= tau * (1 + arb(10) ** -12)


@pytest.mark.parametrize("n", [2, 3, 10, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_level_rows_are_met(n: int, dtype: np.dtype) -> None:
    """Cut between the levels, the gap bounds are the tail mass, to within 1e-12 from above."""
    rng = np.random.default_rng(n)
    for _ in range(40):
        k = int(rng.integers(1, n))
        row = np.zeros(n)
        row[rng.permutation(n)[:k]] = rng.uniform(0.01, 60) ** rng.choice([1.0, 0.3])
        row = (row + rng.uniform(-5, 5)).astype(dtype)
        if len(set(row.astype(np.float64))) < 2:
            continue
        met(exact_top(row, k), bounds.single_gap(row, k), bounds.multi_gap(row, k))


def test_one_cut_per_key_is_exact() -> None:
    rng = np.random.default_rng(10)
    for n in (2, 5, 40):
        row = rng.standard_normal(n) * 4
        for k in range(1, n):
            cuts = [c for c in range(1, n) if c != k]
            every = bounds.multi_gap(row, k, cuts), bounds.multi_gap(row, k, n_cuts=n)
            met(exact_top(row, k), *every)


def test_no_cuts_are_the_single_gap() -> None:
    scores = np.random.default_rng(11).standard_normal((30, 50)).astype(np.float32) * 3
    single = bounds.single_gap(scores, 7).tobytes()
    assert bounds.multi_gap(scores, 7, []).tobytes() == single
    assert bounds.multi_gap(scores, 7, n_cuts=0).tobytes() == single


@pytest.mark.parametrize("n_cuts", [1, 2, 3])
def test_the_best_cuts_are_the_best(n_cuts: int) -> None:
    """Against every choice of as many cuts."""
    rng = np.random.default_rng(12)
    for trial in range(25):
        n = int(rng.integers(4, 11))
        row = rng.standard_normal(n) * rng.choice([0.5, 3.0, 30.0])
        if trial % 3 == 0:
            row = np.round(row)
        k = int(rng.integers(1, n))
        free = [c for c in range(1, n) if c != k]
        best = min(
            float(bounds.multi_gap(row, k, list(cuts)))
            for m in range(n_cuts + 1)
            for cuts in combinations(free, m)
        )
        got = float(bounds.multi_gap(row, k, n_cuts=n_cuts))
        assert got <= best * (1 + 1e-12)
        cuts = bounds.best_cuts(row, k, n_cuts)
        assert len(cuts) <= n_cuts
        assert got == float(bounds.multi_gap(row, k, cuts))


def test_best_cuts_of_a_batch_are_padded() -> None:
    scores = np.zeros((2, 2, 9))
    scores[0, 1] = np.arange(9.0)
    cuts = bounds.best_cuts(scores, [[3, 4], [0, 9]], 4)
    assert cuts.shape == (2, 2, 4)
    assert (cuts[0, 0] == -1).all(), "equal scores need no cut"
    assert all(a < b for a, b in pairwise(cuts[0, 1].tolist()))
    assert (cuts[1] == -1).all()


def test_blocks_of_single_keys_are_exact() -> None:
    rng = np.random.default_rng(13)
    row = rng.standard_normal(30) * 5
    kept = rng.random(30) < 0.4
    tau = ExactRow(row).tail_mass(np.flatnonzero(kept).tolist(), prec=256)
    met(tau, bounds.blockwise(np.ones(30, dtype=int), row, row, kept))


# ------------------------------------------------------------------------- ties and degeneration


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 10, 49, 1000])
def test_equal_rows_are_decided_by_integers(n: int) -> None:
    """The bound is the least float not below (n - k) / n, whatever the score."""
    scores = np.repeat(np.array([[0.1], [-3e38], [1e-45]], dtype=np.float32), n, axis=1)
    for k in range(0, n + 1, 1 + n // 60):
        share = Fraction(n - k, n)
        for bound in (bounds.single_gap(scores, k), bounds.multi_gap(scores, k)):
            assert (bound == bound[0]).all()
            got = Fraction(float(bound[0]))
            assert got >= share
            assert share == 0 or Fraction(float(np.nextafter(bound[0], 0))) < share
        for eps in {float(share), np.nextafter(float(share), 0), np.nextafter(float(share), 1)}:
            if not 0 <= eps < 1:
                continue
            least = next(j for j in range(1, n + 1) if Fraction(n - j, n) <= Fraction(float(eps)))
            for rule in ("exact", "single_gap", "multi_gap"):
                assert (bounds.smallest_k(scores, eps, rule) == least).all()


def test_one_score_and_none() -> None:
    for rule in ("exact", *RULES):
        assert bounds.smallest_k([3.0], 0.0, rule) == 1
        assert bounds.smallest_k([-np.inf, -np.inf], 0.1, rule) == 0
        assert bounds.smallest_k(np.zeros((2, 0, 4)), 0.1, rule).shape == (2, 0)
    for bound in (bounds.single_gap, bounds.multi_gap):
        assert bound([3.0], 1) == 0.0
        assert bound([3.0], 0) == 1.0
        assert bound([-np.inf], 0) == 0.0
    assert bounds.score_gap([3.0], 1) == np.inf
    assert bounds.score_gap([3.0], 0) == -np.inf
    assert bounds.score_gap([-np.inf], 0) == np.inf


def test_masked_entries_do_not_count() -> None:
    rng = np.random.default_rng(14)
    scores = rng.standard_normal((6, 12)).astype(np.float32)
    spread = np.full((6, 40), -np.inf, dtype=np.float32)
    at = np.sort(rng.permuted(np.tile(np.arange(40), (6, 1)), axis=1)[:, :12], axis=1)
    np.put_along_axis(spread, at, scores, axis=1)
    for name in ("score_gap", "single_gap", "multi_gap", "best_cuts"):
        function = getattr(bounds, name)
        assert function(spread, 5).tobytes() == function(scores, 5).tobytes()
    for rule in ("exact", *RULES):
        masked = bounds.smallest_k(spread, 0.05, rule)
        assert masked.tolist() == bounds.smallest_k(scores, 0.05, rule).tolist()


@pytest.mark.parametrize("gap", [709.0, 1e4, 1e30, 3e38])
def test_weights_beyond_the_smallest_float(gap: float) -> None:
    row = np.array([0.0, -gap, 0.0, -gap])
    for bound in (bounds.single_gap(row, 2), bounds.multi_gap(row, 2)):
        assert 0 < bound < 1e-300
    assert bounds.single_gap(row, 1) >= 0.5
    assert bounds.score_gap(np.clip(row, -1e38, 0.0) * 1e270, 2) > 0
    assert bounds.smallest_k(row, 1e-200, "single_gap") == 2
    assert bounds.smallest_k(row, 1e-200, "threshold") == 2
    assert bounds.smallest_k(row, 0.0, "threshold") == 4


def test_threshold_counts_what_is_near_the_maximum() -> None:
    rng = np.random.default_rng(15)
    scores = rng.standard_normal((50, 200)) * 3
    for eps in (0.3, 0.01):
        needed = float(bounds.required_gap(200, 1, eps))
        near = (scores > scores.max(axis=1, keepdims=True) - needed).sum(axis=1)
        assert bounds.smallest_k(scores, eps, "threshold").tolist() == near.tolist()
    # A budget that any one score satisfies.
    assert bounds.smallest_k([0.0, 0.0], 0.6, "threshold") == 1


def test_exact_is_what_select_finds() -> None:
    scores = np.random.default_rng(16).standard_normal((3, 40, 300)).astype(np.float32) * 2
    eps = np.random.default_rng(17).uniform(0, 0.5, (3, 40))
    want = ck.select(scores, eps, prove_minimal=True).k
    assert bounds.smallest_k(scores, eps).tolist() == want.tolist()


# ----------------------------------------------------------------------------- shapes and threads


def test_batches_orders_and_dtypes() -> None:
    rng = np.random.default_rng(18)
    scores = (rng.standard_normal((2, 3, 60)) * 3).astype(np.float16)
    k = rng.integers(0, 61, (2, 3))
    for function in (bounds.score_gap, bounds.single_gap, bounds.multi_gap):
        whole = function(scores, k)
        assert whole.shape == (2, 3)
        assert whole.dtype == np.float64
        assert not whole.flags.writeable
        rows = [function(scores[i, j], int(k[i, j])).item() for i in range(2) for j in range(3)]
        assert whole.ravel().tolist() == rows
        assert function(scores[..., ::-1], k).tobytes() == whole.tobytes()
        assert function(np.sort(scores, axis=-1), k).tobytes() == whole.tobytes()
        assert function(torch.from_numpy(scores), k).tobytes() == whole.tobytes()
        assert function(scores.astype(np.float64), k).tobytes() == whole.tobytes()
        short = scores.astype(ml_dtypes.bfloat16)
        assert function(short, k).tobytes() == function(short.astype(np.float32), k).tobytes()
    assert bounds.single_gap(scores[0, 0].tolist(), 4).shape == ()


def test_blocks_broadcast() -> None:
    upper = np.zeros((4, 3))
    got = bounds.blockwise([1, 1, 2], upper, -1.0, [[True, True, False]])
    assert got.shape == (4,)
    tail = 2 / (2 + 2 * np.exp(-1))
    assert np.allclose(got, tail, rtol=1e-13)
    assert bounds.blockwise([3], [np.inf], [-np.inf], [False]) == 1.0
    assert bounds.blockwise([3, 1], [np.inf, 0.0], [0.0, 0.0], [True, False]) == 0.25
    assert bounds.blockwise([3, 1], [0.0, 0.0], [-np.inf, 0.0], [True, False]) == 1.0
    assert bounds.blockwise([0, 4], [np.nan, 1.0], [np.nan, 1.0], [False, True]) == 0.0


# ------------------------------------------------------------------------------------ properties

LOGITS = arrays(
    np.float64,
    st.integers(1, 12),
    elements=st.one_of(
        st.floats(-30, 30),
        st.sampled_from([0.0, -0.0, 1.0, -np.inf, 1e4, -1e4, 1e-300]),
        st.floats(-1e308, 1e308),
    ),
)


@given(LOGITS, st.data())
@settings(max_examples=400, deadline=None)
def test_every_bound_holds(row: np.ndarray, data: st.DataObject) -> None:
    n = int(np.isfinite(row).sum())
    k = data.draw(st.integers(0, n))
    cuts = [c for c in data.draw(st.sets(st.integers(1, 11))) if c < n and c != k]
    row_bounds = [
        bounds.single_gap(row, k),
        bounds.multi_gap(row, k, sorted(cuts)),
        bounds.multi_gap(row, k, n_cuts=data.draw(st.integers(0, 4))),
    ]
    exact = ExactRow(row)
    for bound in row_bounds:
        # tau <= bound, decided in exact arithmetic whatever precision that takes.
        assert exact.fits(exact.order[:k], float(bound))


@given(LOGITS, st.sampled_from([0.0, 1e-80, 1e-6, 0.1, 0.25, 0.5, 0.9, 1 - 1e-12]))
@settings(max_examples=300, deadline=None)
def test_every_rule_is_sound(row: np.ndarray, eps: float) -> None:
    exact = ExactRow(row)
    for rule in ("exact", *RULES):
        k = int(bounds.smallest_k(row, eps, rule))
        assert exact.fits(exact.order[:k], eps)
        assert k >= 1 or not len(exact.order)


# ----------------------------------------------------------------------------------- bad arguments
