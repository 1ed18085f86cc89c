"""`KeyIndex` against exact arithmetic: traps, growth, files, memory, refusals.

Random searches of every kind are in test_search_soundness.py, of many heads in
test_search_combinations.py. The oracle is `exact_rows`.

Traps that are tests by name, here unless another file is given:

- outliers lost to a comparison: `test_outliers_are_scored_and_never_dropped`
- flat by a sample, but for a spike: `test_a_spike_among_equal_keys_is_found`
- a gap that forgets what was scored: `test_a_gap_is_one_between_the_kept_and_all_others`
- the true top k taken for a mass: `test_a_proven_top_k_says_nothing_of_masses`
- a remainder outside the lanes: `test_remainders_of_odd_dimensions_are_in_the_bounds`
- -inf or NaN of finite vectors taken for a mask: `test_scores_that_overflow_are_not_masks` in
  test_search_soundness.py, `test_scores_that_overflow_are_errors` in test_attention.py
- 16-bit queries that overflow 32 bits: `test_long_queries_of_one_sign_do_not_overflow`
- the residual of a quantised query: `test_what_a_quantised_query_leaves_out_is_in_the_bounds`
- radii and sums rounded down: `test_losses_of_codes_are_within_their_radii_and_their_sums`
- centring on one side: `off_centre` in test_search_soundness.py
- squares of weights that underflow: `test_squares_of_weights_below_float32_are_in_the_bounds`
- norms of queries that underflow: `test_queries_whose_squares_are_not_normal` in
  test_search_soundness.py
- exp(x) - 1 - x of a small x: `growth_is_above_its_series` in src/keys/gram.rs
- roundings of a long sum: `a_long_sum_is_bounded_with_its_roundings` in src/keys/gram.rs
- a key outside the Gram matrix:
  `test_appended_keys_are_in_the_certificate_before_they_can_go_unscored`
- a lock that is held while a search waits: `test_no_thread_waits_for_another_forever`
- equal scores that rounding orders:
  `test_equal_scores_rank_by_position_even_where_rounding_hides_it`
"""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from time import process_time
from typing import Any, get_args

import numpy as np
import pytest
from flint import arb, fmpq

import certk_rs as ck
from certk_rs import _native, key_index
from exact_rows import below_top, best, exact_scores
from oracle import Precision
from real_rows import Cache

RULES = get_args(key_index.Rule)
COVERS = get_args(key_index.Over)
EPS = 0.05

Array = np.ndarray


class Row:
    """One query over keys in exact arithmetic."""

    def __init__(self, q: Array, keys: Array, scale: float) -> None:
        """Scores of all keys; weights relative to the largest, at 300 bits."""
        scores, unit = exact_scores(q[None], keys, scale)
        self.order = best(scores[0], unit)
        with Precision(300):
            step = arb(fmpq(unit.numerator, unit.denominator))
            self.weights = [(step * gap).exp() for gap in below_top(scores[0], unit).tolist()]
            self.total = sum(self.weights, arb(0))

    def tail(self, kept: Array) -> arb:
        """Exact mass of what is not kept."""
        inside = set(kept.tolist())
        with Precision(300):
            tail = (w for i, w in enumerate(self.weights) if i not in inside)
            return sum(tail, arb(0)) / self.total

    def top(self, k: int) -> list[int]:
        """The true k best, equal scores by position, ascending."""
        return sorted(self.order[:k])


def ask(index: ck.KeyIndex, q: Array, rule: str, over: str, **options: Any) -> ck.SearchResult:
    """Search with k for the one rule that needs it."""
    k = max(1, index.shape[-2] // 4) if rule == "top_k" else None
    return index.search(q, EPS, rule=rule, over=over, k=k, **options)  # type: ignore[arg-type]


def check_interval(row: Row, found: Any, what: str, kept: Array | None = None) -> float:
    """The reported interval holds in exact arithmetic; return its upper end."""
    tail = row.tail(found.row(()) if kept is None else kept)
    lower, upper = float(found.tail_mass_lower), float(found.tail_mass_upper)
    with Precision(300):
        assert not tail > upper, f"{what}: real {tail} above {upper}"
        assert not tail < lower, f"{what}: real {tail} below {lower}"
    return upper


def test_a_gap_is_one_between_the_kept_and_all_others() -> None:
    # Trap: a gap to the open keys alone, forgetting the scored ones outside S (E \ S inside U).
    rng = np.random.default_rng(11)
    wrong = 0
    for trial in range(300):
        n, d = int(rng.integers(2, 60)), int(rng.integers(1, 9))
        keys = (rng.standard_normal((n, d)) * rng.uniform(0.1, 4)).astype(np.float32)
        lift = rng.integers(0, n)
        keys[:lift] *= 8.0
        q = (rng.standard_normal(d) * 3).astype(np.float32)
        found = ck.KeyIndex.build(keys).search(q, 0.1, rule="gap", over=COVERS[trial % 3])
        kept = found.row(())
        scores = keys.astype(np.float64) @ q.astype(np.float64) * d**-0.5
        weights = np.exp(scores - scores.max())
        tail = weights.sum() - weights[kept].sum()
        wrong += bool(tail / weights.sum() > 0.1 + 1e-9)
        if kept.size < n:
            k = kept.size
            outside = np.delete(scores, kept)
            gap = scores[kept].min() - outside.max()
            need = np.log((n - k) * 0.9 / (k * 0.1))
            assert gap >= need - 1e-9
    assert wrong == 0


def test_the_gap_rule_stops_at_the_first_rank_that_proves_the_budget() -> None:
    rng = np.random.default_rng(3)
    for _ in range(40):
        scores = np.sort(rng.standard_normal(80) * 6)[::-1]
        keys = np.zeros((80, 4), np.float32)
        keys[:, 0] = scores
        at = rng.permutation(80)
        found = ck.KeyIndex.build(keys[at]).search(
            np.array([1.0, 0, 0, 0], np.float32), 0.2, rule="gap", scale=1.0
        )
        exact = np.sort(keys[:, 0].astype(np.float64))[::-1]
        k = np.arange(1, 80)
        enough = exact[:-1] - exact[1:] >= np.log((80 - k) * 0.8 / (k * 0.2))
        first = int(k[enough][0]) if enough.any() else 80
        assert found.k == first


def test_outliers_are_scored_and_never_dropped() -> None:
    # Trap: keys without a code score -inf by codes, and `h < inf` comparisons lose them.
    rng = np.random.default_rng(2)
    keys = (rng.standard_normal((600, 32)) * 0.05).astype(np.float32)
    keys[[3, 299, 599]] = rng.standard_normal((3, 32)).astype(np.float32) * 30
    index = ck.KeyIndex.build(keys)
    for at in (3, 299, 599):
        q = keys[at] / 40
        row = Row(q, keys, 32**-0.5)
        for rule in RULES:
            for over in COVERS:
                found = ask(index, q, rule, over)
                assert at in found.row(())
                check_interval(row, found, rule)
    estimate = index.montecarlo(keys[3] / 40, [3], 1e-6, 1)
    assert estimate.lower <= float(Row(keys[3] / 40, keys, 32**-0.5).tail(np.array([3])).mid())


def test_long_queries_of_one_sign_do_not_overflow() -> None:
    # Trap: 16-bit queries times 8-bit codes overflow 32 bits above d = 512.
    for d in (512, 513, 1024, 4096):
        rng = np.random.default_rng(d)
        keys = np.ones((40, d), np.float32)
        keys[1::2] = -1.0
        keys *= rng.uniform(0.5, 1.0, (40, 1)).astype(np.float32)
        q = np.ones(d, np.float32)
        found = ck.KeyIndex.build(keys, rotate=False).search(q, 0.01, scale=8 / d)
        scores = keys.astype(np.float64).sum(1) * 8 / d
        weights = np.exp(scores - scores.max())
        tail = 1 - weights[found.row(())].sum() / weights.sum()
        assert float(found.tail_mass_lower) - 1e-12 <= tail <= found.tail_mass_upper <= 0.01
        best = ck.KeyIndex.build(keys).search(q, None, rule="top_k", k=5, scale=8 / d)
        assert set(best.row(()).tolist()) == set(np.argsort(-scores, kind="stable")[:5].tolist())


def test_remainders_of_odd_dimensions_are_in_the_bounds() -> None:
    # Trap: a scalar remainder loop has another error bound than the lanes.
    rng = np.random.default_rng(4)
    for d in (15, 16, 17, 31, 33, 47, 63, 65):
        base = rng.standard_normal(d)
        keys = np.tile(base, (24, 1)).astype(np.float32)
        # Scores that differ by less than a rounding of their sums.
        keys[:, -1] = np.float32(1e-3) * (1 + np.arange(24) * np.float32(2**-23))
        q = np.full(d, 1e6)
        q[-1] = 1e-6
        found = ck.KeyIndex.build(keys).search(q, None, rule="top_k", k=7)
        assert found.row(()).tolist() == Row(q, keys, d**-0.5).top(7)
        assert found.status == ck.Status.CERTIFIED


def test_appended_keys_are_in_the_certificate_before_they_can_go_unscored() -> None:
    # Trap: the Gram matrix must hold every key that can go unscored.
    rng = np.random.default_rng(6)
    small = (rng.standard_normal((64, 16)) * 0.02).astype(np.float32)
    index = ck.KeyIndex.build(small)
    keys = small
    for step in range(90):
        size = [1, 1, 7, 16, 33][step % 5]
        more = (rng.standard_normal((size, 16)) * rng.uniform(0.01, 2.0)).astype(np.float32)
        index.append(more)
        keys = np.concatenate([keys, more])
        if step % 15 == 14:
            q = rng.standard_normal(16).astype(np.float32) * 2
            row = Row(q, keys, 0.25)
            for rule in RULES:
                found = ask(index, q, rule, "codes")
                upper = check_interval(row, found, rule)
                assert upper <= EPS or rule == "top_k"
    assert index.shape == keys.shape
    index.check(keys)


def test_a_spike_among_equal_keys_is_found() -> None:
    # Trap: a sample of the keys says that the row is flat, and everything is scored.
    rng = np.random.default_rng(11)
    keys = (rng.standard_normal((20000, 16)) * 0.01).astype(np.float32)
    q = rng.standard_normal(16).astype(np.float32)
    for at in (0, 7777, 19999):
        spiked = keys.copy()
        spiked[at] = q * np.float32(20 / float(q @ q))
        found = ck.KeyIndex.build(spiked).search(q, 0.01, scale=1.0)
        assert found.row(()).tolist() == [at]
        assert found.scored < 300
        assert found.rung != ck.Rung.DENSE
        few = spiked[[*range(0, at, 500), at, *range(at + 1, 20000, 500)]]
        place = len(range(0, at, 500))
        found = ck.KeyIndex.build(few).search(q, 0.01, scale=1.0)
        check_interval(Row(q, few, 1.0), found, "spike", np.array([place]))


@pytest.mark.parametrize("over", COVERS)
def test_a_proven_top_k_says_nothing_of_masses(over: Any) -> None:
    # Trap: the true top k may carry next to nothing.
    rng = np.random.default_rng(12)
    keys = (rng.standard_normal((200, 8)) * 0.05).astype(np.float32)
    index = ck.KeyIndex.build(keys)
    q = rng.standard_normal(8).astype(np.float32)
    row = Row(q, keys, 1.0)
    for eps, status in ((None, ck.Status.CERTIFIED), (0.5, ck.Status.OVER_BUDGET)):
        found = index.search(q, eps, rule="top_k", k=5, over=over, scale=1.0)
        assert found.row(()).tolist() == row.top(5)
        assert found.status == status
        upper = check_interval(row, found, over)
        assert upper > 0.9


def test_what_a_quantised_query_leaves_out_is_in_the_bounds() -> None:
    # Trap: beside a huge entry the others vanish from a 16-bit query, and with them all scores.
    rng = np.random.default_rng(14)
    keys = rng.standard_normal((300, 12)).astype(np.float32)
    keys[:, 3] = 0.0
    for size in (1e3, 1e5, 1e7):
        q = rng.standard_normal(12)
        q[3] = size
        for rotate in (True, False):
            index = ck.KeyIndex.build(keys, rotate=rotate)
            row = Row(q, keys, 1.0)
            for rule in RULES:
                for over in ("codes", "both"):
                    found = ask(index, q, rule, over, scale=1.0)
                    check_interval(row, found, f"{rule} {over} {size}")
                    if rule == "top_k":
                        assert found.row(()).tolist() == row.top(75)


def decoded(index: ck.KeyIndex) -> tuple[Array, tuple[Array, ...]]:
    """Return the vectors that an index of (n, d) stores, not rotated, and its parts."""
    n, d = index.shape
    parts = tuple(np.asarray(part) for part in index._index.parts()[0])
    steps = -(-d // 4)
    # A line of four dimensions of sixteen keys, line by line.
    lines = parts[0].reshape(-1, steps, 16, 4).transpose(0, 2, 1, 3).reshape(-1, 4 * steps)
    scales = (parts[1].astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return (lines[:n, :d].astype(np.float64) - 128) * scales[:n, None], parts


@pytest.mark.parametrize("d", [1, 7, 16, 33, 64])
def test_losses_of_codes_are_within_their_radii_and_their_sums(d: int) -> None:
    # Trap: radii, and the sum of outer products, must be rounded up where they are stored.
    rng = np.random.default_rng(d)
    keys = rng.standard_normal((700, d)) * 10.0 ** rng.uniform(-2, 1, (700, 1))
    keys = keys.astype(np.float32)
    index = ck.KeyIndex.build(keys, rotate=False)
    codes, (_, _, radii, bare, mean, gram, numbers, _) = decoded(index)
    coded = np.setdiff1d(np.arange(700), bare)
    losses = ((keys - mean[:d]).astype(np.float64) - codes)[coded]
    norms = np.sqrt((losses.astype(np.longdouble) ** 2).sum(1))
    stored = (radii.astype(np.uint32) << 16).view(np.float32)[coded]
    assert (stored >= norms).all()
    assert (stored <= norms * 1.01 + 1e-18).all()
    assert numbers[1] >= norms.max()
    width = -(-d // 16) * 16
    upper = np.triu(gram.reshape(width, width))[:d, :d]
    whole = upper + np.triu(upper, 1).T
    rounded = (numbers[3] + 2 * width) * 2.0**-52 * np.trace(whole)
    for y in [*rng.standard_normal((50, d)), *np.linalg.svd(losses)[2][:3]]:
        form, length = float(y @ whole @ y), float(np.linalg.norm(y))
        bound = np.sqrt(form + rounded * length**2) + length * np.sqrt(numbers[0])
        real = np.sqrt(((losses @ y) ** 2).sum())
        assert bound >= real * (1 - 1e-12)
        assert bound <= real * 1.5 + 1e-6 * length * norms.max()


def test_squares_of_weights_below_float32_are_in_the_bounds() -> None:
    # Trap: 60 nats below the top, squares of weights are nothing in float32, but their root counts.
    rng = np.random.default_rng(15)
    near, far = rng.standard_normal((2, 16))
    far[0] = near[0] + 4.0
    keys = np.concatenate([np.tile(near, (4000, 1)), np.tile(far, (300, 1))])
    keys[:, 0] += rng.standard_normal(4300) * 1e-3
    keys = keys.astype(np.float32)
    index = ck.KeyIndex.build(keys, rotate=False)
    codes, (_, _, _, bare, mean, _, _, _) = decoded(index)
    assert len(bare) < 300
    low = np.arange(4000)
    losses = (keys - mean[:16]).astype(np.float64) - codes
    # What codes lose is all for the many that are far below the top.
    loss, code = losses[low].mean(0), codes[low].mean(0)
    loss[0] = code[0] = 0.0
    q = loss - code * (loss @ code) / (code @ code)
    q *= 1.5 / (q @ loss)
    q[0] = (60 - q @ (far - near)) / 4
    scores = keys.astype(np.longdouble) @ q.astype(np.longdouble)
    weights = np.exp(scores - scores.max())
    by_codes = np.exp(scores - losses @ q - scores.max())
    share = float(weights[low].sum() / weights.sum())
    # Codes alone would promise much less than there is.
    assert by_codes[low].sum() < 0.8 * weights[low].sum()
    assert 1e-40 < share < 1e-18
    found = index.search(q, 50 * share, scale=1.0)
    kept = found.row(())
    assert not np.isin(kept, low).any()
    dropped = np.ones(4300, bool)
    dropped[kept] = False
    tail = weights[dropped].sum() / weights.sum()
    assert found.tail_mass_lower <= tail <= found.tail_mass_upper <= 50 * share


def test_equal_scores_rank_by_position_even_where_rounding_hides_it() -> None:
    keys = np.zeros((300, 8), np.float32)
    keys[::3, 0] = 1.0
    found = ck.KeyIndex.build(keys).search(np.eye(8, dtype=np.float32)[0], None, rule="top_k", k=30)
    assert found.row(()).tolist() == list(range(0, 90, 3))
    assert found.eps == 1.0
    assert found.status == ck.Status.CERTIFIED
    for scale in (-1.0, 0.0):
        found = ck.KeyIndex.build(keys).search(
            np.eye(8, dtype=np.float32)[0], None, rule="top_k", k=5, scale=scale
        )
        want = [1, 2, 4, 5, 7] if scale < 0 else [0, 1, 2, 3, 4]
        assert found.row(()).tolist() == want


def test_a_search_that_is_cut_short_says_what_is_proven() -> None:
    rng = np.random.default_rng(9)
    keys = rng.standard_normal((500, 16)).astype(np.float32)
    q = (rng.standard_normal(16) * 3).astype(np.float32)
    row = Row(q, keys, 0.25)
    index = ck.KeyIndex.build(keys)
    for rule in RULES:
        for over in COVERS:
            uppers = []
            for most in (0, 16, 64, 500):
                found = ask(index, q, rule, over, max_scored=most)
                assert found.scored <= most
                upper = check_interval(row, found, f"{rule} {over} {most}")
                uppers.append(upper)
                proven = found.status == ck.Status.CERTIFIED
                assert proven == (upper <= EPS and (rule != "top_k" or proven))
            if rule != "top_k":
                assert uppers[-1] <= EPS < uppers[0]


@pytest.mark.parametrize("over", ["codes", "both"])
@pytest.mark.parametrize(("rule", "k"), [("mass", None), ("gap", None), ("top_k", 3)])
def test_keys_without_codes_are_scored_up_to_the_limit_only(
    rule: Any, k: int | None, over: Any
) -> None:
    """Nothing is proven if the limit leaves a key without a bound."""
    rng = np.random.default_rng(4)
    keys = rng.standard_normal((400, 8)).astype(np.float32)
    keys[::80] *= 300
    index = ck.KeyIndex.build(keys)
    for q in rng.standard_normal((4, 8)).astype(np.float32) * np.float32(0.01):
        row = Row(q, keys, 1.0)
        for most in (0, 1, 4):
            found = index.search(q, 0.3, rule=rule, k=k, over=over, scale=1.0, max_scored=most)
            assert found.scored <= most
            check_interval(row, found, f"{rule} {over} {most}")
            assert found.status == ck.Status.OVER_BUDGET


def test_nothing_is_scored_where_nothing_is_dropped() -> None:
    keys = np.random.default_rng(1).standard_normal((50, 8)).astype(np.float32)
    index = ck.KeyIndex.build(keys)
    for rule, k in (("mass", None), ("gap", None), ("top_k", 50)):
        found = index.search(keys[0], 0.0, rule=rule, k=k)  # type: ignore[arg-type]
        assert found.k == 50
        assert found.scored == 0
        assert found.tail_mass_upper == 0.0
    many = index.search(keys[0], None, rule="top_k", k=99)
    assert many.k == 50


def test_results_are_selections(tmp_path: Path) -> None:
    keys = np.random.default_rng(1).standard_normal((90, 8)).astype(np.float32)
    found = ck.KeyIndex.build(keys).search(keys[:4] * 4, 0.1)
    assert isinstance(found, ck.Selection)
    assert "scored" in repr(found)
    assert "rungs" in found.summary()
    again = pickle.loads(pickle.dumps(found))
    assert type(again) is ck.SearchResult
    assert np.array_equal(again.scored, found.scored)
    assert np.array_equal(again.rung, found.rung)
    assert not found.scored.flags.writeable
    found.save(tmp_path / "found.npz")
    loaded = ck.SearchResult.load(tmp_path / "found.npz")
    assert type(loaded) is ck.SearchResult
    assert np.array_equal(loaded.scored, found.scored)
    assert type(ck.Selection.load(tmp_path / "found.npz")) is ck.Selection
    ck.select(keys.astype(np.float64), 0.1).save(tmp_path / "plain.npz")
    with pytest.raises(ck.CertkError, match="other fields"):
        ck.SearchResult.load(tmp_path / "plain.npz")
    cert = ck.certify(keys[:4].astype(np.float64) * 4 @ keys.T.astype(float) / 8**0.5, found)
    assert (cert.tail_mass_lower <= found.tail_mass_upper + 1e-12).all()


def test_memory_is_below_d_plus_8_bytes_a_key() -> None:
    """Beside the matrix of what codes lose, and a few vectors, in whole groups of sixteen."""
    for d in (1, 5, 32, 128):
        keys = np.random.default_rng(d).standard_normal((4096, d)).astype(np.float32)
        width = -(-d // 16) * 16
        assert ck.KeyIndex.build(keys).nbytes <= (d + 8) * 4096 + 8 * width * (width + 4)


def test_draws_bound_what_a_kept_set_loses() -> None:
    rng = np.random.default_rng(30)
    keys = rng.standard_normal((2000, 32)).astype(np.float32)
    q = (rng.standard_normal((6, 32)) * 2.5).astype(np.float32)
    index = ck.KeyIndex.build(keys, keep_keys=False)
    scores = q.astype(np.float64) @ keys.T.astype(np.float64) * 32**-0.5
    weights = np.exp(scores - scores.max(1, keepdims=True))
    kept = np.sort(np.argsort(-scores, axis=1)[:, :60], axis=1)
    mask = np.zeros(scores.shape, bool)
    np.put_along_axis(mask, kept, True, axis=1)
    real = 1 - (weights * mask).sum(1) / weights.sum(1)
    estimate = index.montecarlo(q, kept, 0.01, 7, keys=keys, draws=512)
    assert isinstance(estimate, ck.montecarlo.TailEstimate)
    assert (estimate.lower <= real).all()
    assert (real <= estimate.upper).all()
    assert (estimate.upper - estimate.lower < 0.1 * real).all()
    same = index.montecarlo(q, mask, 0.01, 7, keys=keys, draws=512)
    assert np.array_equal(same.upper, estimate.upper)
    other = index.montecarlo(q, mask, 0.01, 8, keys=keys, draws=512)
    assert not np.array_equal(other.upper, estimate.upper)
    shared = index.montecarlo(q, mask, 0.06, 7, keys=keys, draws=512, family="all")
    assert np.allclose(shared.upper, estimate.upper, rtol=1e-9)
    assert shared.family == "all"
    # Failures over many seeds stay below delta; ten standard deviations above it would not.
    misses = sum(
        int(index.montecarlo(q[0], [kept[0]], 0.2, seed, keys=keys, draws=24).upper < real[0])
        for seed in range(300)
    )
    assert misses <= 300 * 0.2
    with pytest.raises(ck.CertkError, match="keys are needed"):
        index.montecarlo(q, mask, 0.01, 7)
    with pytest.raises(ck.CertkError, match=re.escape("row [2]")):
        index.montecarlo(q, [[0], [1], [2000], [0], [0], [0]], 0.01, 7, keys=keys)


def test_draws_where_codes_say_nothing() -> None:
    """Codes of subnormal keys bound nothing: such keys are scored, all of them if need be."""
    rng = np.random.default_rng(31)
    keys = (rng.standard_normal((50, 8)) * 1e-41).astype(np.float32)
    index = ck.KeyIndex.build(keys)
    q = rng.standard_normal((3, 8)) * 1e41
    scores = q.astype(np.longdouble) @ keys.T.astype(np.longdouble)
    weights = np.exp(scores)
    real = 1 - weights[:, :5].sum(1) / weights.sum(1)
    found = index.montecarlo(q, [[0, 1, 2, 3, 4]] * 3, 0.01, 7, scale=1.0)
    assert (found.lower <= real).all()
    assert (real <= found.upper).all()
    assert (found.upper - found.lower < 0.2).all()
    # Scores without digits for their differences are the query's matter: no bound was passed.
    with pytest.raises(ck.CertkError, match=r"^q\[0\] is .*f64 cannot tell scores apart"):
        index.montecarlo(q, [[0]] * 3, 0.01, 7, scale=1e12)


def test_keys_are_kept_and_grow_by_doubling() -> None:
    rng = np.random.default_rng(14)
    keys = rng.standard_normal((2, 300, 8)).astype(np.float32)
    index = ck.KeyIndex.build(keys[:, :10])
    buffers = set()
    for at in range(10, 300):
        index.append(keys[:, at : at + 1])
        buffers.add(id(index._buffer))
    assert len(buffers) <= 8
    index.check()
    index.check(keys)
    whole = ck.KeyIndex.build(keys)
    q = rng.standard_normal((2, 4, 8)).astype(np.float32) * 3
    grown, at_once = index.search(q, 0.01), whole.search(q, 0.01)
    assert (grown.tail_mass_upper <= 0.01).all()
    assert (at_once.tail_mass_upper <= 0.01).all()
    top = [x.search(q, None, rule="top_k", k=9).indices for x in (index, whole)]
    assert np.array_equal(*top)


@pytest.mark.parametrize("heads", [(), (3,)])
@pytest.mark.parametrize("n", [0, 16, 39])
def test_a_failed_append_leaves_no_trace(heads: tuple[int, ...], n: int) -> None:
    """Not of a head before the bad one, and not behind the last key, in a group that has begun."""
    keys = np.random.default_rng(4).standard_normal((*heads, 60, 8)).astype(np.float32)
    index = ck.KeyIndex.build(keys[..., :n, :])
    before = [array.tobytes() for array in index.arrays()]
    for value, (size, place) in product((np.nan, np.inf, -np.inf), ((1, 0), (7, 6), (21, 20))):
        bad = keys[..., :size, :].copy()
        where = (*(heads and (2,)), place, 7)
        bad[where] = value
        with pytest.raises(ck.CertkError, match=re.escape(f"keys{[*where]} is not finite")):
            index.append(bad)
        assert [array.tobytes() for array in index.arrays()] == before
        assert len(index) == n
    with pytest.raises(ck.CertkError, match="float16"):
        index.append(keys.astype(np.float16))
    index.append(keys[..., n:, :])
    index.check(keys)
    found = index.search(keys[..., :1, :], 0.1)
    again = pickle.loads(pickle.dumps(index)).search(keys[..., :1, :], 0.1)
    assert (found.status == ck.Status.CERTIFIED).all()
    assert np.array_equal(found.tail_mass_upper, again.tail_mass_upper)


_REFUSED = """
import resource
import numpy as np
import certk_rs as ck

keys = np.random.default_rng(1).standard_normal((2, 39, 64)).astype(np.float32)
index = ck.KeyIndex.build(keys, keep_keys=False)
before = [array.tobytes() for array in index.arrays()]
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
# One key again and again: it takes no memory, its codes do.
many = np.broadcast_to(keys[:, :1], (2, 1 << 26, 64))
try:
    index.append(many, threads=1)
except ck.CertkError as error:
    assert "keys takes" in str(error) and "more than there is" in str(error), error
else:
    raise AssertionError("there was memory")
assert [array.tobytes() for array in index.arrays()] == before
index.append(keys)
index.check(np.concatenate([keys, keys], axis=1))
"""


def test_an_append_that_the_system_refuses_changes_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", _REFUSED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_append_without_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = np.random.default_rng(1).standard_normal((60, 8)).astype(np.float32)
    index = ck.KeyIndex.build(keys)

    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "empty", full)
    with pytest.raises(MemoryError):
        index.append(keys)
    monkeypatch.undo()
    assert len(index) == 60
    assert index.search(keys[0], 0.1).status == ck.Status.CERTIFIED
    index.append(keys)
    index.check(np.concatenate([keys, keys]))


def test_appends_from_several_threads_keep_keys_and_codes_together() -> None:
    rng = np.random.default_rng(2)
    keys = rng.standard_normal((50, 8)).astype(np.float32)
    index = ck.KeyIndex.build(keys)
    more = rng.standard_normal((4, 100, 3, 8)).astype(np.float32)

    def append(parts: Array) -> None:
        for part in parts:
            index.append(part)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(append, more))
    assert len(index) == 50 + 4 * 300
    index.check()


def test_an_index_that_grows_while_it_is_searched_tells_the_truth() -> None:
    rng = np.random.default_rng(3)
    keys = rng.standard_normal((1500, 8)).astype(np.float32)
    index = ck.KeyIndex.build(keys[:500])
    q = rng.standard_normal(8).astype(np.float32) * 4
    weights = np.exp(keys.astype(np.longdouble) @ q.astype(np.longdouble))

    def grow() -> None:
        for at in range(500, 1500, 10):
            index.append(keys[at : at + 10])

    answered = 0
    with ThreadPoolExecutor(1) as pool:
        growing = pool.submit(grow)
        while not growing.done() or answered == 0:
            try:
                found = index.search(q, 0.05, scale=1.0, threads=1)
            except ck.CertkError as error:
                assert "the index was built of keys of shape" in str(error)  # noqa: PT017
                continue
            n = found.shape[-1]
            dropped = np.ones(n, bool)
            dropped[found.row(())] = False
            tail = weights[:n][dropped].sum() / weights[:n].sum()
            assert found.tail_mass_lower * (1 - 1e-15) <= tail
            assert tail <= found.tail_mass_upper * (1 + 1e-15) <= 0.05 * (1 + 1e-14)
            answered += 1
    growing.result()
    index.check(keys)


def test_appending_takes_no_longer_for_a_longer_index() -> None:
    def least(n: int) -> float:
        keys = np.zeros((2, n, 16), np.float32)
        keys[..., ::7, :] = 1.0
        index = ck.KeyIndex.build(keys, keep_keys=False)
        times = []
        for _ in range(30):
            start = process_time()
            index.append(keys[:, :1], threads=1)
            times.append(process_time() - start)
        return min(times)

    assert least(500_000) < 20 * least(1000)


def test_heads_that_are_none_have_keys_all_the_same() -> None:
    index = ck.KeyIndex.build(np.empty((0, 5, 8), np.float32))
    assert index.shape == (0, 5, 8)
    assert index.search(np.empty((0, 3, 8), np.float32), 0.1).shape == (0, 3, 5)
    index.append(np.empty((0, 2, 8), np.float32))
    assert len(index) == 7
    index.check()


# Searches of several portions, appends and looks at the length, all at once.
THREE = """
import threading, time
import numpy as np
import certk_rs as ck

keys = np.random.default_rng(0).standard_normal((4000, 64)).astype(np.float32)
index, end = ck.KeyIndex.build(keys, keep_keys=False), time.monotonic() + 4

def repeat(work):
    while time.monotonic() < end:
        work()

def search():
    try:
        index.search(keys[:600], 1e-9, threads=1)
    except ck.CertkError as error:
        assert "keys" in str(error)

def append():
    index.append(keys[:1], threads=1)
    time.sleep(0.0005)

works = (search, append, lambda: len(index), lambda: index.dtype)
threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_no_thread_waits_for_another_forever() -> None:
    # Trap: a search waits for the interpreter, an append for the search, the interpreter for that.
    subprocess.run([sys.executable, "-c", THREE], check=True, timeout=60)


def test_copies_and_pickles_grow_apart() -> None:
    rng = np.random.default_rng(4)
    keys = rng.standard_normal((2, 60, 8)).astype(np.float32)
    q = rng.standard_normal((4, 3, 8)).astype(np.float32)
    for keep in (True, False):
        index = ck.KeyIndex.build(keys, keep_keys=keep)
        for other in (copy.copy(index), copy.deepcopy(index), pickle.loads(pickle.dumps(index))):
            other.append(keys[:, :5])
            assert (len(index), len(other)) == (60, 65)
            grown = np.concatenate([keys, keys[:, :5]], axis=1)
            other.check(grown)
            index.check(keys)
            lent = None if keep else keys
            one = index.search(q, 0.1, keys=lent)
            again = pickle.loads(pickle.dumps(index)).search(q, 0.1, keys=lent)
            assert np.array_equal(one.indices, again.indices)
            assert np.array_equal(one.tail_mass_upper, again.tail_mass_upper)


def test_rust_writes_the_same_bytes(tmp_path: Path) -> None:
    """`tests/index_files.rs` reads and writes this file, too."""
    steps = np.arange(2 * 40 * 8)
    keys = ((steps * steps % 23) / 8).astype(np.float32).reshape(2, 40, 8)
    keys[1, 5] *= 1000
    path = tmp_path / "keys.index"
    ck.KeyIndex.build(keys).save(path)
    stored = Path(__file__).parents[1] / "vectors" / "index.safetensors"
    assert path.read_bytes() == stored.read_bytes()
    ck.KeyIndex.load(stored, keys)


def test_saved_indexes_answer_alike(tmp_path: Path) -> None:
    rng = np.random.default_rng(17)
    path = tmp_path / "index.safetensors"
    for dtype in ("float32", "float16"):
        keys = rng.standard_normal((2, 3, 130, 20)).astype(dtype)
        index = ck.KeyIndex.build(keys)
        index.append(keys[:, :, :7])
        grown = np.concatenate([keys, keys[:, :, :7]], axis=2)
        index.save(path)
        loaded = ck.KeyIndex.load(path, keys=grown)
        bare = ck.KeyIndex.load(path)
        assert loaded.shape == bare.shape == grown.shape
        assert bare.dtype == dtype
        q = rng.standard_normal((2, 3, 2, 20)).astype(np.float32) * 3
        for rule in RULES:
            want = ask(index, q, rule, "codes")
            for found in (ask(loaded, q, rule, "codes"), ask(bare, q, rule, "codes", keys=grown)):
                assert np.array_equal(found.indices, want.indices)
                assert found.tail_mass_upper.tobytes() == want.tail_mass_upper.tobytes()
        more = rng.standard_normal((2, 3, 5, 20)).astype(dtype)
        loaded.append(more)
        index.append(more)
        assert np.array_equal(ask(loaded, q, "mass", "codes").indices,
                              ask(index, q, "mass", "codes").indices)  # fmt: skip
        loaded.check()
    assert list(tmp_path.iterdir()) == [path]


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    keys = np.random.default_rng(18).standard_normal((100, 16)).astype(np.float32)
    path, other = tmp_path / "index.safetensors", tmp_path / "other.safetensors"
    ck.KeyIndex.build(keys).save(path)
    whole = path.read_bytes()
    for size in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        other.write_bytes(whole[:size])
        with pytest.raises(ck.CertkError, match=r"other\.safetensors"):
            ck.KeyIndex.load(other)
    rng = np.random.default_rng(1)
    for at in rng.integers(0, len(whole), 120).tolist():
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(rng.integers(0, 8))
        other.write_bytes(bytes(damaged))
        try:
            loaded = ck.KeyIndex.load(other)
        except ck.CertkError:
            continue
        # Only what means nothing may change: a padding space of the header, the order of JSON.
        assert loaded.shape == (100, 16)
        assert at < len(whole) - 4000
        assert (
            loaded._index.parts()[0][0].tobytes()
            == ck.KeyIndex.load(path)._index.parts()[0][0].tobytes()
        )
    from safetensors.numpy import save_file

    save_file({"a": keys}, other)
    with pytest.raises(ck.CertkError, match="do not say that it is one"):
        ck.KeyIndex.load(other)


def test_parts_that_no_index_has_are_refused() -> None:
    keys = np.random.default_rng(18).standard_normal((100, 16)).astype(np.float32)
    index = ck.KeyIndex.build(keys)._index
    (good,) = index.parts()

    def load(at: int, change: Any, shape: tuple[int, ...] = (100, 16)) -> None:
        parts = [part.copy() for part in good]
        parts[at] = change(parts[at])
        _native.KeyIndex.of_parts(shape, "float32", [tuple(parts)])  # type: ignore[list-item]

    def put(position: int, value: float) -> Any:
        def change(part: Array) -> Array:
            part[position] = value
            return part

        return change

    load(0, lambda part: part)
    changes: list[tuple[int, Any]] = [
        *((at, lambda part: part[:-1]) for at in (0, 1, 2, 4, 5)),
        (1, put(3, 0x7F80)),  # an infinite scale
        (1, put(3, 0)),  # no scale, but not listed as a key without a code
        (2, put(3, 0xBF80)),  # a negative radius
        (2, put(3, 0x7FC0)),  # NaN
        (3, lambda _: np.array([100], np.uint32)),
        (3, lambda _: np.array([5, 5], np.uint32)),
        (4, put(0, np.nan)),
        (5, put(0, np.nan)),
        (5, put(0, -1.0)),
        *((6, put(at, value)) for at in range(4) for value in (-1.0, np.nan, np.inf)),
        (6, put(3, 0.5)),
        (6, put(4, np.nan)),
        (6, put(5, np.inf)),
        (6, put(6, 4.0)),
    ]
    for at, change in changes:
        with pytest.raises(ck.CertkError):
            load(at, change)
    for shape in ((101, 17), (100, 0), (2, 100, 16), (16,)):
        with pytest.raises(ck.CertkError, match=r"shape|codes"):
            load(0, lambda part: part, shape)


def test_other_keys_are_caught(tmp_path: Path) -> None:
    rng = np.random.default_rng(19)
    keys = rng.standard_normal((2, 300, 16)).astype(np.float32)
    path = tmp_path / "index.safetensors"
    index = ck.KeyIndex.build(keys)
    index.save(path)
    index.check()
    changed = keys.copy()
    changed[1, 299, 15] = np.nextafter(changed[1, 299, 15], np.float32(9))
    for other in (changed, keys[:, ::-1].copy(), -keys):
        with pytest.raises(ck.CertkError, match=r"keys\[[01]\] changed since they were indexed"):
            index.check(other)
        with pytest.raises(ck.CertkError, match="pass those that it was built of"):
            ck.KeyIndex.load(path, keys=other)
    with pytest.raises(ck.CertkError, match="shape"):
        ck.KeyIndex.load(path, keys=keys[:, :299])
    with pytest.raises(ck.CertkError, match="shape"):
        index.search(keys[:, :1], 0.1, keys=keys[..., :15])
    with pytest.raises(ck.CertkError, match="are float16, but were float32"):
        index.search(keys[:, :1], 0.1, keys=keys.astype(np.float16))
    # Written to while they are kept.
    keys[0, 7, 3] += 1.0
    with pytest.raises(ck.CertkError, match=re.escape("keys[0] changed")):
        index.check()
    with pytest.raises(ck.CertkError, match="does not keep them"):
        ck.KeyIndex.load(path).check()


def test_bad_input_is_named() -> None:
    keys = np.random.default_rng(1).standard_normal((60, 8)).astype(np.float32)
    q = keys[0]
    index = ck.KeyIndex.build(keys)

    def refuses(message: str, work: Any) -> None:
        with pytest.raises(ck.CertkError, match=message):
            work()

    for value, place in ((np.nan, 5), (np.inf, 0), (-np.inf, 59)):
        bad = keys.copy()
        bad[place, 3] = value
        refuses(rf"keys\[{place}, 3\] is not finite", lambda bad=bad: ck.KeyIndex.build(bad))
    refuses("float64", lambda: ck.KeyIndex.build(keys.astype(np.float64)))
    refuses("at least one entry", lambda: ck.KeyIndex.build(keys[:, :0]))
    refuses("keys", lambda: ck.KeyIndex.build(keys[0]))
    for bits in (4, 6, True, "8"):
        refuses("bits is", lambda bits=bits: ck.KeyIndex.build(keys, bits=bits))
    refuses("8 entries", lambda: index.search(keys[:, :7], 0.1))
    heads = ck.KeyIndex.build(np.stack([keys] * 3))
    refuses("multiple", lambda: heads.search(np.stack([keys] * 5), 0.1))
    refuses("eps is 1", lambda: index.search(q, 1.0))
    refuses("eps is None", lambda: index.search(q, None))
    refuses(r"eps\[1\] is NaN", lambda: index.search(keys[:2], [0.1, np.nan]))
    refuses("scale is NaN", lambda: index.search(q, 0.1, scale=np.nan))
    refuses("rule is 'best'", lambda: index.search(q, 0.1, rule="best"))  # type: ignore[arg-type]
    refuses("over is 3", lambda: index.search(q, 0.1, over=3))  # type: ignore[arg-type]
    refuses("without k", lambda: index.search(q, 0.1, rule="top_k"))
    refuses("k is 0", lambda: index.search(q, 0.1, rule="top_k", k=0))
    refuses("finds k itself", lambda: index.search(q, 0.1, k=3))
    refuses("rotate is 1; pass True or False", lambda: ck.KeyIndex.build(keys, rotate=1))  # type: ignore[arg-type]
    refuses("max_scored is -1", lambda: index.search(q, 0.1, max_scored=-1))
    wrong = keys[:2].copy()
    wrong[1, 4] = np.nan
    refuses(r"q\[1, 4\] is not finite", lambda: index.search(wrong, 0.1))
    huge = q.astype(np.float64) * 1e30
    refuses("tell scores apart", lambda: index.search(huge, 0.1, rule="gap"))
    assert index.search(huge, 0.1).k == 60
    lone = ck.KeyIndex.build(keys, keep_keys=False)
    for options in ({"rule": "gap"}, {"rule": "top_k", "k": 3}, {"over": "cells"}):
        refuses("keys are needed", lambda options=options: lone.search(q, 0.1, **options))


def minimal_k(scores: Array, eps: float) -> Array:
    """Fewest keys per row, float64."""
    weights = -np.sort(-np.exp(scores - scores.max(-1, keepdims=True)), axis=-1)
    kept = np.cumsum(weights, axis=-1) / weights.sum(-1, keepdims=True)
    return (kept < 1 - eps).sum(-1) + 1


def true_in_float64(found: ck.SearchResult, scores: Array) -> None:
    """Every row's interval holds the tail mass computed in float64."""
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mask = found.to_mask()
    tail = np.where(mask, 0.0, weights).sum(-1) / weights.sum(-1)
    assert (tail <= found.tail_mass_upper * (1 + 1e-9)).all()
    assert (tail >= found.tail_mass_lower * (1 - 1e-9) - 1e-15).all()


def test_real_rows(small_cache: Cache) -> None:
    layers = sum(name.endswith(".key") for name in small_cache)
    for layer in range(layers):
        keys, q = (small_cache[f"layers.{layer}.{name}"][0] for name in ("key", "query"))
        index = ck.KeyIndex.build(keys)
        scores = q.astype(np.float64) @ np.swapaxes(keys, 1, 2).astype(np.float64)
        scores *= keys.shape[-1] ** -0.5
        for eps in (0.1, 0.01):
            least = minimal_k(scores, eps)
            for over in COVERS:
                found = index.search(q, eps, over=over)
                true_in_float64(found, scores)
                assert (found.tail_mass_upper <= eps).all()
                assert (found.k >= least).all()
        top = index.search(q, None, rule="top_k", k=20)
        order = np.sort(np.argsort(-scores, axis=-1, kind="stable")[..., :20], axis=-1)
        assert np.array_equal(top.to_padded(), order)
        assert (top.status == ck.Status.CERTIFIED).all()


def test_few_keys_are_scored_where_few_matter(cache_65536: Cache) -> None:
    eps, codes, cells = 0.01, [], []
    for layer in range(4):
        keys, q = (cache_65536[f"layers.{layer}.{name}"][0, 0] for name in ("key", "query"))
        index = ck.KeyIndex.build(keys)
        scores = q.astype(np.float64) @ keys.T.astype(np.float64) * keys.shape[-1] ** -0.5
        least = minimal_k(scores, eps)
        found = index.search(q, eps)
        true_in_float64(found, scores)
        thin = found.rung == ck.Rung.RESCORED
        codes.append((found.scored / least)[thin])
        cells.append((index.search(q[:8], eps, over="cells").scored / least[:8])[thin[:8]])
        top = index.search(q[:8], None, rule="top_k", k=100)
        order = np.sort(np.argsort(-scores[:8], axis=-1, kind="stable")[:, :100], axis=-1)
        assert np.array_equal(top.to_padded(), order)
        assert (top.scored < 300).all()
    ratio, beside = np.concatenate(codes), np.concatenate(cells)
    assert ratio.mean() <= 1.06
    assert ratio.max() <= 1.1
    assert beside.mean() > 2
