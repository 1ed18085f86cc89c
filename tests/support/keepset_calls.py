"""Sets for many rows: the native search, and the checks that any answer must pass."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np

from bulk_oracle import Truth
from cases import Case
from certk_rs import _native

Block = tuple[np.ndarray, np.ndarray, float]


def native_keep_set(blocks: list[Block], eps: Any, **more: Any) -> Any:
    """Search, with queries (heads, m, d), keys (kv heads, n, d) and a scale per block."""
    options = {
        "counted": None, "given": None, "slack": 2.0**-31, "roundings": 16, "causal_offset": None,
        "max_keep": None, "keep_first": 0, "keep_last": 0, "block_size": 1,
        "effort": "default", "threads": None, **more,
    }  # fmt: skip

    def stored(array: np.ndarray) -> tuple[np.ndarray, str]:
        name = array.dtype.name
        return (array if name == "float32" else array.view(np.uint16), name)

    given = [(stored(q), stored(k), scale) for q, k, scale in blocks]
    return _native.keep_set_of_queries(given, eps, *options.values())


def judge(case: Case, ks: Any) -> Truth:
    """Check an answer against the exact masses of all rows; return these."""
    truth = Truth(case)
    kept = np.zeros(case.n, dtype=bool)
    kept[ks.indices] = True
    upper, lower = ks.tail_mass_upper.reshape(-1), ks.tail_mass_lower.reshape(-1)
    bad = truth.violations(truth.visible & kept, lower, upper)
    assert not bad, f"{bad[0][1]}: {case.describe(bad[0][0])}"
    assert (np.diff(ks.indices) > 0).all()
    assert 0 <= ks.lower_bound <= len(ks.indices)
    assert not (forced(case, truth) & ~kept).any()
    assert not (kept & ~truth.visible.any(axis=0)).any(), "a key that no row can see is kept"
    weights = ks.weights.reshape(-1)
    assert np.isfinite(weights).all()
    assert (weights >= 0).all()
    assert (weights == weights.astype(np.float32)).all()
    return truth


def forced(case: Case, truth: Truth) -> np.ndarray:
    """Return keep_first and keep_last as flags (n,), counted over what any row sees."""
    seen = np.flatnonzero(truth.visible.any(axis=0))
    must = np.zeros(case.n, dtype=bool)
    must[seen[: case.keep_first]] = True
    must[seen[max(0, len(seen) - case.keep_last) :]] = True
    return must


def shares(truth: Truth) -> np.ndarray:
    """Return the softmax of each row (rows, n) in long double."""
    return np.asarray(truth.weight / np.maximum(truth.weight.sum(axis=1, keepdims=True), 1))


def smallest(
    share: np.ndarray, eps: np.ndarray, must: np.ndarray, fits: Callable[[np.ndarray], bool]
) -> int:
    """Return the size of the smallest set that loses at most eps of each row, by trying all.

    Args:
        share: Softmax of each row, or sums of it over blocks (rows, n).
        eps: Budgets (rows,).
        must: Columns that each set has (n,).
        fits: Decides a set (n,) of which long double leaves open whether it fits.
    """
    free = np.flatnonzero(~must & (share.sum(axis=0) > 0))
    sets = np.zeros((1 << len(free), share.shape[1]), dtype=bool)
    sets[:, must] = True
    sets[:, free] = np.array(list(product((False, True), repeat=len(free)))).reshape(len(sets), -1)
    sets = sets[np.argsort(sets.sum(axis=1), kind="stable")]
    lost = (~sets) @ share.T
    sure = (lost * (1 + 1e-13) <= eps).all(axis=1)
    maybe = (lost * (1 - 1e-13) <= eps).all(axis=1)
    return next(
        int(kept.sum()) for kept, yes, open in zip(sets, sure, maybe, strict=True)
        if yes or (open and fits(kept))
    )  # fmt: skip
