"""keep_set: feasible for every row, and its lower bound below every feasible set.

Small cases go against all subsets, larger ones against the linear relaxation (HiGHS), and the
size at n = 65536 against the promise of 2 %.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from scipy.optimize import linprog

import certk_rs as ck
from bulk_oracle import Truth
from cases import Case
from checks import limit
from generators import make_case
from keepset_calls import forced, judge, shares, smallest
from real_rows import Cache, rows_of


def solve(case: Case, **more: Any) -> Any:
    """Return keep_set with the case's options; everything must hold that holds of any answer."""
    options = case.row_options()
    for name in ("max_keep", "keep_first", "keep_last"):
        if getattr(case, name):
            options[name] = getattr(case, name)
    ks = ck.keep_set(case.scores, case.eps, **options, **more)
    truth = judge(case, ks)
    assert ks.k == len(ks.indices)
    assert ks.optimality_gap == ks.k - ks.lower_bound
    if not truth.visible.any():
        assert ks.status == ck.Status.EMPTY
        assert ks.k == 0
    elif (ks.tail_mass_upper <= case.eps).all():
        assert ks.status == ck.Status.CERTIFIED
    else:
        assert ks.status == ck.Status.OVER_BUDGET
        assert case.max_keep is not None
        most = int(limit(case, np.array([truth.visible.any(axis=0).sum()]))[0])
        assert ks.k == most
    assert proven(case, truth, ks), "the weights do not prove the lower bound"
    return ks


def proven(case: Case, truth: Truth, ks: Any) -> bool:
    """Return True if the mixture with the reported weights proves the lower bound, rounding aside.

    A feasible set leaves at most sum_j y_j eps_j of c = sum_j y_j P_j, so it is larger than any
    number of the best keys that leaves more. Needed without weights: the forced keys, every key
    of a row whose budget is 0, and one key if any row sees one.
    """
    budget = np.maximum(case.eps, ks.tail_mass_upper)
    must = forced(case, truth) | (truth.visible & (budget == 0.0)[:, None]).any(axis=0)
    if ks.lower_bound <= max(int(must.sum()), int(truth.visible.any())):
        return True
    weights = ks.weights.astype(np.longdouble)
    mixed = weights @ shares(truth)
    order = np.lexsort((-mixed, ~must))
    left = np.concatenate([np.cumsum(mixed[order][::-1])[::-1], [0]])[ks.lower_bound - 1]
    return bool(left * (1 - 1e-9) > np.sum(weights * budget) * (1 + 1e-9))


def least(case: Case, eps: np.ndarray) -> int:
    """Return the size of the smallest feasible set, in exact arithmetic where that decides."""
    truth = Truth(case)

    def fits(kept: np.ndarray) -> bool:
        chosen = np.flatnonzero(kept)
        rows = ((case.exact(i), float(eps[i])) for i in range(case.rows))
        return all(row.fits([j for j in chosen.tolist() if j in row.value], e) for row, e in rows)

    # A budget of 0 allows no loss, be it so small that it underflows.
    share = np.maximum(shares(truth), np.where(truth.visible, np.finfo(np.longdouble).tiny, 0))
    return smallest(share, eps, forced(case, truth), fits)


def part_heavy(seeds: int, some: int) -> list[Any]:
    """Return all seeds, of which the first few run always."""
    heavy = (pytest.param(seed, marks=pytest.mark.heavy) for seed in range(some, seeds))
    return [*range(some), *heavy]


def small_case(seed: int) -> Case:
    """2 to 10 keys, 1 to 6 rows, all kinds and options of the generators but odd budgets."""
    rng = np.random.default_rng(seed)
    n, rows = int(rng.integers(1, 11)), int(rng.integers(1, 7))
    case = make_case(seed, rows, n, options=bool(seed % 2))
    eps = case.eps if seed % 4 < 2 else np.full(rows, rng.choice([0.3, 0.1, 0.01]))
    return Case(
        case.scores, eps, case.kind, case.scale, case.mask, case.lengths, case.causal_offset,
        keep_first=case.keep_first if n > 3 else 0, name=case.name,
    )  # fmt: skip


@pytest.mark.parametrize("seed", part_heavy(240, 80))
def test_against_all_subsets(seed: int) -> None:
    """lower_bound <= optimum <= k, and the optimum is nearly always reached."""
    case = small_case(seed)
    ks = solve(case)
    if ks.status == ck.Status.CERTIFIED:
        best = least(case, case.eps)
        assert ks.lower_bound <= best <= ks.k


def test_the_optimum_is_usually_reached() -> None:
    """On small rows the set is the smallest one in most cases, and never far from it."""
    over = []
    for seed in range(24):
        rng = np.random.default_rng(seed)
        scores = (rng.standard_normal((4, 9)) * 2).astype(np.float32)
        case = Case(scores, np.full(4, 0.1), name="optimum")
        over.append(solve(case).k - least(case, case.eps))
    assert np.mean(over) <= 0.25
    assert max(over) <= 1


@pytest.mark.parametrize("seed", part_heavy(60, 24))
def test_max_keep_minimises_the_worst_ratio(seed: int) -> None:
    """Over budget: max_keep keys, a worst tau / eps near the best, a bound for what was reached."""
    rng = np.random.default_rng(seed)
    n, rows = 9, 4
    scores = (rng.standard_normal((rows, n)) * 1.5).astype(np.float32)
    eps = rng.choice([0.02, 0.05], rows)
    most = int(rng.integers(1, 6))
    ks = solve(Case(scores, eps, max_keep=most, name="max_keep"))
    weights = np.exp(scores.astype(np.float64))
    weights /= weights.sum(axis=1, keepdims=True)
    ratios = [
        ((1 - weights[:, list(kept)].sum(axis=1)) / eps).max()
        for kept in combinations(range(n), most)
    ]
    if ks.status == ck.Status.OVER_BUDGET:
        assert ks.k == most
        reached = float((ks.tail_mass_upper / eps).max())
        assert reached <= 1.5 * min(ratios) + 1e-9
        best = least(Case(scores, eps), np.maximum(eps, ks.tail_mass_upper))
        assert ks.lower_bound <= best
    else:
        assert min(ratios) <= 1.0


def relaxed(case: Case, eps: np.ndarray) -> float:
    """The optimum of the linear relaxation: least sum of x in [0, 1], kept masses >= 1 - eps."""
    truth = Truth(case)
    weights = truth.weight.astype(np.float64)
    weights /= weights.sum(axis=1, keepdims=True)
    lowest = forced(case, truth).astype(float)
    answer = linprog(
        np.ones(case.n), A_ub=-weights, b_ub=-(1.0 - eps),
        bounds=np.stack([lowest, np.ones(case.n)], axis=1), method="highs",
    )  # fmt: skip
    assert answer.status == 0
    return float(answer.fun)


@pytest.mark.parametrize("seed", range(24))
def test_against_the_linear_relaxation(seed: int) -> None:
    """The bound is never above the relaxation rounded up, and close to it."""
    rng = np.random.default_rng(seed)
    n, rows = int(rng.choice([60, 300, 900])), int(rng.choice([2, 8, 32]))
    keys = rng.standard_normal((n, 6))
    scores = rng.standard_normal((rows, 6)) @ keys.T * rng.uniform(0.3, 1.5)
    scores = (scores + rng.standard_normal((rows, n)) * 0.2).astype(np.float32)
    eps = np.full(rows, rng.choice([0.2, 0.1, 0.01]))
    if seed % 3 == 0:
        eps = rng.choice([0.05, 0.1, 0.3], rows)
    case = Case(scores, eps, keep_first=4 * (seed % 2), name=f"relaxation {seed}")
    ks = solve(case)
    best = relaxed(case, eps)
    assert ks.lower_bound <= math.ceil(best - 1e-6)
    assert ks.lower_bound >= best * 0.97 - 2
    assert ks.k <= best * 1.03 + 2 + rows / 4


def low_rank_rows(rng: np.random.Generator, rows: int, n: int, sigma: float) -> np.ndarray:
    """Queries of one window against many keys: 24 shared directions of falling strength."""
    strength = 1.0 / np.sqrt(1.0 + np.arange(24))
    keys = rng.standard_normal((n, 24))
    queries = rng.standard_normal((1, 24)) * 0.8 + rng.standard_normal((rows, 24)) * 0.6
    scores = (queries * strength) @ keys.T
    return np.asarray(scores * sigma / scores.std(), dtype=np.float32)


@pytest.mark.parametrize("layer", range(6))
def test_real_rows_come_near_the_bound(small_cache: Cache, layer: int) -> None:
    """n = 512, the 32 queries of one head: within a few keys of the bound, LP in between."""
    rows = rows_of(small_cache, layer, np.dtype(np.float32)).reshape(4, 32, 512)
    for head in range(4):
        case = Case(rows[head], np.full(32, 0.1), name=f"layer {layer} head {head}")
        ks = solve(case)
        assert ks.status == ck.Status.CERTIFIED
        assert ks.lower_bound <= math.ceil(relaxed(case, case.eps) - 1e-6)
        assert ks.optimality_gap <= 10


def test_one_row_is_a_selection() -> None:
    """For a single row both bounds meet at the minimal k."""
    rng = np.random.default_rng(5)
    for _ in range(20):
        scores = (rng.standard_normal((1, 300)) * 3).astype(np.float32)
        case = Case(scores, np.array([0.05]), name="one row")
        ks, sel = solve(case), ck.select(scores, 0.05, prove_minimal=True)
        assert sel.k[0] <= ks.k <= sel.k[0] + 1
        assert sel.k[0] - 1 <= ks.lower_bound <= sel.k[0]


def test_batch_axes_are_rows() -> None:
    scores = np.random.default_rng(2).standard_normal((2, 3, 40)).astype(np.float32)
    one, two = ck.keep_set(scores, 0.1), ck.keep_set(scores.reshape(6, 40), 0.1)
    assert one.indices.tolist() == two.indices.tolist()
    assert one.lower_bound == two.lower_bound
    assert one.tail_mass_upper.shape == (2, 3)
    assert one.tail_mass_upper.tobytes() == two.tail_mass_upper.tobytes()
    assert "listed" in one.summary()
    assert "KeepSet" in repr(one)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_nothing_to_keep(shape: tuple[int, int]) -> None:
    ks = ck.keep_set(np.zeros(shape, dtype=np.float32), 0.1)
    assert ks.status == ck.Status.EMPTY
    assert ks.k == ks.lower_bound == 0
    assert ks.tail_mass_upper.shape == shape[:1]


def test_empty_rows_ask_for_nothing() -> None:
    scores = np.array([[0.0, 3.0, 1.0], [-np.inf] * 3], dtype=np.float32)
    ks = solve(Case(scores, np.array([0.5, 0.0]), name="empty row"))
    assert ks.indices.tolist() == [1]
    assert ks.tail_mass_upper[1] == 0.0
    ks = solve(Case(scores[1:], np.array([0.0]), name="all empty"))
    assert ks.status == ck.Status.EMPTY


def test_eps_0_keeps_every_key_that_any_row_sees() -> None:
    scores = np.zeros((2, 6), dtype=np.float32)
    mask = np.array([[1, 1, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0]], dtype=bool)
    ks = solve(Case(scores, np.zeros(2), mask=mask, name="eps 0"))
    assert ks.indices.tolist() == [0, 1, 2]
    assert ks.lower_bound == 3


@pytest.mark.parametrize(
    ("kind", "scores"),
    [("probs", [1.0, 1e-50]), ("logits", [0.0, -115.0]), ("logits", [0.0, -95.0])],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_needed_key_may_be_too_light_for_the_mixture(
    kind: str, scores: list[float], dtype: Any
) -> None:
    """A key whose weight underflows beside the top one, and a budget below that weight."""
    with np.errstate(under="ignore"):
        stored = np.array([scores]).astype(dtype)
    for eps in (1e-72, 1e-51, 9e-51):
        case = Case(stored, np.array([eps]), kind=kind, name="light")
        assert solve(case).status == ck.Status.CERTIFIED


@pytest.mark.parametrize("eps", [5e-324, 1e-310, 1e-100, 0.0])
def test_one_tiny_budget_does_not_spoil_the_bound(eps: float) -> None:
    scores = np.random.default_rng(0).standard_normal((3, 20)).astype(np.float32)
    ks = solve(Case(scores, np.array([eps, eps, 0.1]), name="tiny budget"))
    assert ks.k == ks.lower_bound == 20


@pytest.mark.parametrize("radius", [1e-6, 1e-3, 0.1, 1.0])
def test_inexact_scores_are_covered_by_their_radius(radius: float) -> None:
    """The certificate holds for every row within the radius, the worst one included."""
    from certk_rs.keepset import keep_set_of_inexact

    rng = np.random.default_rng(17)
    scores = rng.standard_normal((6, 200)) * 2
    ks = keep_set_of_inexact(scores, 0.1, radius=radius)
    kept = ks.to_mask()
    exact_ks = ck.keep_set(scores, 0.1)
    assert ks.k >= exact_ks.lower_bound
    worst = scores + np.where(kept, -radius, radius) * (1 - 1e-12)
    best = scores - np.where(kept, -radius, radius) * (1 - 1e-12)
    for rows, side in ((worst, "upper"), (best, "lower"), (scores, "both")):
        case = Case(rows, np.full(6, 0.1), name=f"radius {radius} {side}")
        keep = np.broadcast_to(kept, rows.shape)
        bad = Truth(case).violations(keep, ks.tail_mass_lower, ks.tail_mass_upper)
        assert not bad, bad[0][1]
    # No row within the radius may have a feasible set below the bound.
    assert ks.lower_bound <= ck.keep_set(best, 0.1).k
    assert ks.lower_bound <= ck.keep_set(worst, 0.1).k


# -------------------------------------------------------------------- the search, at its edges


def test_long_rows_against_the_linear_relaxation() -> None:
    """Rows that begin with a sample: the bound is the relaxation's, and the set is next to it."""
    for seed, sigma in ((0, 2.0), (1, 4.0)):
        scores = low_rank_rows(np.random.default_rng(seed), 5, 40000, sigma)
        case = Case(scores, np.full(5, 0.1), keep_first=3 * seed, name=f"long rows {seed}")
        ks, best = solve(case), relaxed(case, case.eps)
        assert math.ceil(best * 0.999) - 2 <= ks.lower_bound <= math.ceil(best - 1e-6)
        assert ks.k <= best * 1.001 + 5


def test_real_long_rows_reach_the_bound(cache_65536: Cache) -> None:
    """Sixty-four real queries against 65536 real keys: within .5 % of the bound, or .1 %."""
    for layer in range(4):
        scores = rows_of(cache_65536, layer, np.dtype(np.float32))
        for effort, most in (("default", 0.005), ("thorough", 0.001)):
            ks = ck.keep_set(scores, 0.1, effort=effort)
            assert ks.optimality_gap <= most * ks.lower_bound, f"layer {layer}, {effort}"


@cache
def edge_cases() -> list[Case]:
    """Small and sampled programs with ties, masks, forced keys and wide ranges."""
    rng = np.random.default_rng(3)
    low_rank = low_rank_rows(rng, 7, 33000, 3.0)
    identical = np.repeat(rng.standard_normal((1, 700)) * 2, 40, axis=0).astype(np.float32)
    one_keeps_all = rng.standard_normal((6, 500)).astype(np.float32)
    wide = (rng.standard_normal((8, 900)) * 40).astype(np.float32)
    masked = low_rank.copy()
    masked[rng.random(masked.shape) < 0.3] = -np.inf
    masked[2] = -np.inf
    budgets = np.full(6, 0.1)
    return [
        Case(low_rank, np.full(7, 0.05), keep_first=4, keep_last=60, name="sampled"),
        Case(masked, np.full(7, 0.05), name="sampled and masked"),
        Case(identical, np.full(40, 0.1), name="identical rows"),
        Case(np.zeros((9, 70000), dtype=np.float32), np.full(9, 0.25), name="equal scores"),
        Case(one_keeps_all, np.r_[1e-30, budgets[1:]], name="one row keeps all"),
        Case(one_keeps_all, np.r_[0.0, budgets[1:]], name="one row without a budget"),
        Case(wide, np.full(8, 1e-6), name="wide range"),
        Case(wide.astype(np.float64) * 5, np.full(8, 1e-200), name="tiny budgets in f64"),
        Case(wide, np.geomspace(1e-12, 0.9, 8), name="budgets of all sizes"),
        Case(low_rank_rows(rng, 1000, 512, 3.0), np.full(1000, 0.1), name="many rows"),
        Case(low_rank[:1], np.array([0.01]), name="one long row"),
        Case(low_rank[:, :1], np.full(7, 0.5), name="one key"),
        Case(low_rank[:, :4000], np.full(7, 0.05), max_keep=300, name="not enough"),
    ]


@pytest.mark.parametrize("number", range(13))
def test_edges_of_the_search(number: int) -> None:
    case = edge_cases()[number]
    ks = solve(case)
    if case.name == "equal scores":
        assert ks.k - ks.lower_bound <= 2 + 70000 // 10000
        assert abs(ks.k - 52500) <= 5
    elif case.name == "identical rows":
        # The margin of a selection costs a key at the most.
        alone = ck.select(case.scores[:1], 0.1, prove_minimal=True)
        assert alone.k[0] - 1 <= ks.lower_bound <= alone.k[0] <= ks.k <= alone.k[0] + 1
    elif case.name.startswith("one row "):
        assert ks.k == ks.lower_bound == 500
    elif case.name == "tiny budgets in f64":
        # Weights below 2^-126 of a row's largest are as good as any: nothing can be dropped.
        assert ks.k == 900
    elif case.max_keep is None:
        assert ks.k <= ks.lower_bound * 1.03 + 4


# ------------------------------ more rows than have a say: some are weighed, all are certified

# More rows than the core weighs at once.
MANY = 2048


def often(few: Case, seed: int) -> Case:
    """The rows of a case many times over, but for the last, which stands somewhere once."""
    rng = np.random.default_rng(seed)
    which = rng.permutation(np.arange(MANY + 77) % max(1, few.rows - 1))
    which[rng.integers(len(which))] = few.rows - 1

    def taken(array: np.ndarray | None) -> np.ndarray | None:
        return None if array is None else array[which]

    return replace(
        few, scores=few.scores[which], eps=few.eps[which], mask=taken(few.mask),
        lengths=taken(few.lengths),
    )  # fmt: skip


@pytest.mark.parametrize("seed", part_heavy(80, 24))
def test_many_rows_against_all_subsets(seed: int) -> None:
    """Rows that are repeated change nothing: the optimum is that of the few."""
    few = replace(small_case(seed), causal_offset=None)
    ks = solve(often(few, seed))
    if ks.status == ck.Status.CERTIFIED:
        best = least(few, few.eps)
        assert ks.lower_bound <= best <= ks.k


@pytest.mark.parametrize("seed", range(12))
def test_a_limit_on_the_size_of_many_rows(seed: int) -> None:
    """A binding `max_keep` minimises the worst row; another changes nothing."""
    few = replace(small_case(seed), causal_offset=None)
    case = often(few, seed)
    free = solve(case)
    if free.k > 1:
        solve(replace(case, max_keep=max(1, int(free.k) - 1), keep_first=0))
    if free.k:
        ks = solve(replace(case, max_keep=int(free.k)))
        assert ks.indices.tolist() == free.indices.tolist()


@pytest.mark.parametrize("sigma", [pytest.param(2.0, marks=pytest.mark.heavy), 4.0])
def test_queries_of_one_window_come_near_the_bound(sigma: float) -> None:
    """Few rows have a say, and the set is within a few keys of the bound for all."""
    rng = np.random.default_rng(5)
    scores = low_rank_rows(rng, 6000, 2048, sigma)
    case = Case(scores, np.full(6000, 0.05), name=f"6000 rows, sigma={sigma}")
    ks = solve(case)
    assert ks.status == ck.Status.CERTIFIED
    assert ks.k <= 1.005 * ks.lower_bound + 2
    assert np.count_nonzero(ks.weights) < 600
    for threads in (1, 3):
        again = ck.keep_set(scores, 0.05, threads=threads)
        assert again.indices.tobytes() == ks.indices.tobytes()
        assert again.weights.tobytes() == ks.weights.tobytes()


def test_a_causal_prompt() -> None:
    """Late queries see more; the first see next to nothing, and some of them nothing."""
    rng = np.random.default_rng(6)
    n = 2500
    scores = (low_rank_rows(rng, n, n, 3.0)).astype(np.float16)
    ks = solve(Case(scores, np.full(n, 0.1), causal_offset=-3, name="causal"))
    assert ks.status == ck.Status.CERTIFIED


def test_rows_that_may_lose_nothing_wherever_they_are() -> None:
    rng = np.random.default_rng(7)
    scores = rng.standard_normal((3000, 40))
    scores[1234, 7:] = -np.inf
    eps = np.full(3000, 0.2)
    eps[1234] = 0.0
    ks = solve(Case(scores, eps, name="one row keeps all it sees"))
    assert ks.status == ck.Status.CERTIFIED
    assert set(range(7)) <= set(ks.indices.tolist())


@pytest.mark.parametrize("n", [16, 20, 64, 100, 4096])
@pytest.mark.parametrize("eps", [4e-153, 1e-200, 1e-300])
def test_tiny_budgets_with_a_size(n: int, eps: float) -> None:
    """No column that does not compete is dropped, however little budgets are: forced keys stay."""
    scores = np.random.default_rng(n).standard_normal((3, n)).astype(np.float32)
    for first, last in [(0, 0), (1, 1)]:
        found = ck.keep_set(scores, eps, max_keep=2, keep_first=first, keep_last=last)
        assert found.k == 2 == len(np.unique(found.indices))
        assert found.indices.min() >= 0
        assert found.indices.max() < n
        if first:
            assert found.indices.tolist() == [0, n - 1]
        keys = np.eye(n, dtype=np.float32)
        found = ck.keep_set_of_queries(
            scores, keys, eps, scale=1.0, max_keep=2, keep_first=first, keep_last=last
        )
        assert found.k == 2
        assert not first or found.indices.tolist() == [0, n - 1]


@pytest.mark.parametrize(
    ("rows", "sigma", "most"),
    [(64, 4.0, 0.005), (128, 4.0, 0.005), (200, 2.0, 0.005), (256, 5.0, 0.01), (384, 4.0, 0.01)],
)
def test_independent_rows_come_near_the_bound(rows: int, sigma: float, most: float) -> None:
    """Each row has keys of its own: walks in one order end with a few rows over their budgets."""
    rng = np.random.default_rng(rows)
    scores = (sigma * rng.standard_normal((rows, 32768))).astype(np.float32)
    found = ck.keep_set(scores, 0.05)
    assert found.optimality_gap <= most * found.lower_bound
    assert (found.tail_mass_upper <= 0.05).all()


@pytest.mark.parametrize("shape", [(48, 700), (96, 12000)])
def test_effort_buys_smaller_sets(shape: tuple[int, int]) -> None:
    scores = (4 * np.random.default_rng(1).standard_normal(shape)).astype(np.float32)
    fast, default, thorough = (
        ck.keep_set(scores, 0.05, effort=effort) for effort in ("fast", "default", "thorough")
    )
    assert thorough.k <= default.k <= fast.k
    assert fast.k > thorough.k, "these rows are to tell the efforts apart"
    best = max(found.lower_bound for found in (fast, default, thorough))
    for found in (fast, default, thorough):
        assert found.lower_bound <= best <= found.k
        assert (found.tail_mass_upper <= 0.05).all()
    again = ck.keep_set(scores, 0.05, effort="thorough", threads=1)
    assert np.array_equal(again.indices, thorough.indices)


@pytest.mark.parametrize("effort", ["", "Fast", "most", None, 1])
def test_efforts_that_there_are_not(effort: object) -> None:
    with pytest.raises(ck.CertkError, match=r'effort is .*; pass "fast", "default" or "thorough"'):
        ck.keep_set([[1.0, 2.0]], 0.1, effort=effort)  # type: ignore[arg-type]
