"""transformers' TopPLogitsWarper(1 - eps) against select, and exact arithmetic as the judge.

The warper drops a prefix of the ascending row whose float32 cumulative softmax is <= 1 - top_p.
On ordinary rows both keep the same set; near a boundary its rounding decides, and where the sets
differ, the certificate must be the one that exact arithmetic confirms.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import certk_rs as ck
from cases import Case
from checks import selection_faults
from generators import make_case
from real_rows import Cache, rows_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def warped(scores: np.ndarray, eps: float) -> np.ndarray:
    """(rows, n) bool: what the warper keeps."""
    warper = transformers.TopPLogitsWarper(top_p=1.0 - eps)
    out: Any = warper(None, torch.from_numpy(scores))
    return np.asarray(~torch.isneginf(out).numpy())


def compare(scores: np.ndarray, eps: float) -> tuple[int, int]:
    """Rows, and rows that differ; each differing row is judged by the exact oracle."""
    case = Case(scores, np.full(len(scores), eps), name="nucleus")
    sel = ck.select(scores, eps, prove_minimal=True)
    assert selection_faults(case, sel) == []
    theirs, ours = warped(scores, eps), sel.to_mask()
    differ = np.flatnonzero((theirs != ours).any(axis=1))
    for row in differ:
        exact = case.exact(int(row))
        assert exact.fits(np.flatnonzero(ours[row]).tolist(), eps)
        kept = np.flatnonzero(theirs[row]).tolist()
        smaller = len(kept) < sel.k[row]
        # Theirs is larger than it need be, or too small, or equally large with other ties.
        assert not (smaller and exact.fits(kept, eps) and sel.minimal[row])
    return len(scores), len(differ)


def test_real_rows_keep_the_same_set(small_cache: Cache) -> None:
    seen = differ = 0
    for eps in (0.1, 0.05, 0.01):
        for layer in range(6):
            rows, other = compare(rows_of(small_cache, layer, np.dtype(np.float32)), eps)
            seen, differ = seen + rows, differ + other
    print(f"{differ} of {seen} rows differ from the warper")
    assert differ <= 0.005 * seen


def test_vocabulary_sized_rows() -> None:
    rng = np.random.default_rng(31)
    scores = (rng.standard_normal((24, 32000)) * 2.5).astype(np.float32)
    rows, differ = compare(scores, 0.1)
    print(f"{differ} of {rows} rows of 32000 differ from the warper")


@pytest.mark.parametrize("seed", range(6))
def test_where_they_differ_the_certificate_is_right(seed: int) -> None:
    """Ties, spikes and budgets on the boundary: the warper's set often breaks its promise."""
    for family in ("tied", "geometric", "two_level", "close", "gaussian"):
        case = make_case(seed, 60, 200, dtype=np.dtype(np.float32), kind="logits", family=family)
        scores = np.clip(case.scores.astype(np.float64) * case.scale, -80, 80).astype(np.float32)
        for eps in (0.25, 0.1, float(np.clip(case.eps[0], 1e-6, 0.9))):
            compare(scores, eps)
