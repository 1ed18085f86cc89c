"""A million later queries, and what a guard says of each, against the truth (`later_cases`)."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import numpy as np
import pytest
from flint import ctx

from certk_rs._files.guards import guard_tensors, guarded_heads
from certk_rs.guard import Guard, guard_head
from later_cases import Case, Truth, cases

QUERIES, OF_THEM = 1_000_000, 240_000
"""In all, and in `make test`."""


def guard_of(case: Case, at: int) -> Guard:
    """As it was built, as it comes out of a pickle, and as a file holds it."""
    guard = Guard.build(case.keys[None], case.values[None], [case.kept])
    if at % 3 == 1:
        guard = pickle.loads(pickle.dumps(guard))
    if at % 3 == 2:
        [gone], name = guard.positions, str(case.keys.dtype)
        rows = [
            (x[gone] if name == "float32" else x[gone].view(np.uint16), name)
            for x in (case.keys, case.values)
            if name != "float16"
        ] or [(x[gone], name) for x in (case.keys, case.values)]
        d = case.keys.shape[1]
        heads = guarded_heads(guard_tensors([guard_head(*rows, 1)], d), [len(gone)], d)
        guard = Guard.of_heads((1, *case.keys.shape), name, heads, [gone])
    return guard


@pytest.fixture(autouse=True)
def _precise() -> Iterator[None]:
    old, ctx.prec = ctx.prec, 300
    yield
    ctx.prec = old


@pytest.mark.parametrize("queries", [OF_THEM, pytest.param(QUERIES, marks=pytest.mark.heavy)])
def test_a_million_later_queries(queries: int) -> None:
    rng = np.random.default_rng(20)
    tried = breaches = recalled = tight = 0
    for at, case in enumerate(cases(queries)):
        n, guard, truth = len(case.keys), guard_of(case, at), Truth(case.queries, case.keys)
        # Some keys have come back, and count as kept; some of these went again.
        [gone] = guard.positions
        there = np.sort(rng.choice(gone, int(rng.integers(len(gone))), replace=False))
        there = there if at % 2 else there[:0]
        left = np.setdiff1d(gone, there)
        out = np.zeros(n, bool)
        out[left] = True
        here = truth.log_mass(~out)
        eps = rng.choice([0.001, 0.05, 0.3], len(case.queries))
        q, beside = case.queries[None], (here[0][None], here[1][None])
        judged = guard.judge(q, beside, eps[None], there=[there])
        assert not truth.exceeds(out, judged.lost[0]), case.name
        # What each query would have fetched, for itself.
        mask = np.ones(len(guard._index), bool)
        mask[np.searchsorted(gone, there)] = False
        found = guard._index.recall(q, beside, eps[None], mask=mask[None, None])
        assert (found.tail_mass_upper <= eps).all(), case.name
        back = np.zeros(truth.weights.shape, bool)
        rows = np.repeat(np.arange(len(case.queries)), np.diff(found.indptr))
        back[rows, gone[found.indices]] = True
        assert not (back & ~out).any()
        assert not truth.exceeds(out & ~back, found.tail_mass_upper[0]), case.name
        assert np.array_equal(judged.back[0], np.flatnonzero(back.any(0)))
        # How far the output moves.
        values = case.values.astype(np.float64)
        kept = (truth.weights * ~out) @ values
        with np.errstate(invalid="ignore", divide="ignore"):
            kept /= (truth.weights * ~out).sum(1, keepdims=True)
        known = np.isfinite(kept).all(1)
        every = truth.weights @ values / truth.weights.sum(1, keepdims=True)
        moved = guard.moved(np.where(known[:, None], kept, 0)[None], judged.lost)[0]
        off = np.sqrt(np.square(every - kept).sum(1))
        assert (off <= moved * (1 + 1e-9) + 1e-9 * np.abs(values).max())[known].all(), case.name
        share = truth.share(out)
        tried += len(share)
        breaches += int((share > eps).sum())
        recalled += len(rows)
        tight += int((judged.lost[0] <= 1.3 * share + 1e-3).sum())
    assert tried == queries
    assert breaches > queries / 10
    assert recalled > breaches
    assert tight > 0.6 * queries
