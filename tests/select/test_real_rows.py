"""Real attention rows (q.k / sqrt(d) of a BERT-style encoder, n = 512), every dtype and budget.

The rows of `examples/data` run always; with `CERTK_DATA=DIR` all 36864 rows of all heads as well.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import certk_rs as ck
from bulk_oracle import Truth
from cases import Case
from checks import CERTIFIED, certificate_faults, keep_mask, selection_faults
from generators import DTYPES
from real_rows import Cache, layers, rows_of

BUDGETS = (0.1, 0.01, 0.001, 1e-6)


def check_rows(scores: np.ndarray, name: str) -> tuple[int, int]:
    """Everything point 1 of the promise asks of these rows; (rows, rows proven minimal)."""
    seen = proven_rows = 0
    case = Case(scores, np.zeros(len(scores)), name=name)
    truth = Truth(case)
    for eps in BUDGETS:
        case = replace(case, eps=np.full(len(scores), eps))
        truth.case = case
        k_min = truth.minimal_k()
        plain = ck.select(scores, eps)
        proven = ck.select(scores, eps, prove_minimal=True)
        for sel in (plain, proven):
            faults = selection_faults(case, sel, truth)
            assert not faults, f"{len(faults)} faults, the first:\n{faults[0]}"
            assert (sel.status == CERTIFIED).all()
            assert (sel.tail_mass_upper <= eps).all()
            assert (sel.k - k_min <= 1).all()
            keep = keep_mask(case, sel.indptr, sel.indices)
            for independent in (False, True):
                cert = ck.certify(scores, sel, eps=eps, independent=independent)
                assert certificate_faults(case, keep, cert, truth) == []
                assert cert.holds is not None
                assert cert.holds.all()
        assert (proven.k <= plain.k).all()
        seen += len(scores)
        proven_rows += int(proven.minimal.sum())
    return seen, proven_rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_cache(small_cache: Cache, dtype: np.dtype) -> None:
    counts = [
        check_rows(rows_of(small_cache, layer, dtype), f"layer {layer} {dtype}")
        for layer in layers(small_cache)
    ]
    seen, proven = (sum(part) for part in zip(*counts, strict=True))
    print(f"{seen} real rows in {dtype}, {proven} proven minimal")
    assert seen == 6 * 4 * 32 * len(BUDGETS)
    assert proven >= 0.999 * seen


@pytest.mark.heavy
@pytest.mark.parametrize("layer", range(6))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_heads_and_rows(cache_512: Cache, dtype: np.dtype, layer: int) -> None:
    seen, proven = check_rows(rows_of(cache_512, layer, dtype), f"layer {layer} {dtype}")
    print(f"{seen} real rows, {proven} proven minimal")
    assert proven >= 0.999 * seen


def test_known_sizes(cache_512: Cache) -> None:
    """Mean k/n per layer, as measured once in float64."""
    known = {
        0.01: (0.7678, 0.3948, 0.4577, 0.5756, 0.6309, 0.8480),
        0.1: (0.5204, 0.1790, 0.2057, 0.2850, 0.2911, 0.5035),
    }
    for eps, means in known.items():
        for layer, mean in enumerate(means):
            sel = ck.select(rows_of(cache_512, layer, np.dtype(np.float32)), eps)
            assert abs(sel.k.mean() / 512 - mean) < 1e-4


@pytest.mark.parametrize("layer", range(4))
def test_long_rows(cache_65536: Cache, layer: int) -> None:
    """n = 65536, 128 windows of real keys side by side; mean k/n as measured once."""
    known = (  # at eps = .1, .01, .001
        (0.0182, 0.0808, 0.2003),
        (0.0343, 0.1659, 0.3707),
        (0.0929, 0.322, 0.5772),
        (0.3593, 0.7434, 0.9154),
    )
    scores = rows_of(cache_65536, layer, np.dtype(np.float32))
    case = Case(scores, np.zeros(64), name=f"long layer {layer}")
    truth = Truth(case)
    for eps, mean in zip((0.1, 0.01, 0.001), known[layer], strict=True):
        case = replace(case, eps=np.full(64, eps))
        truth.case = case
        for prove in (False, True):
            sel = ck.select(scores, eps, prove_minimal=prove)
            assert selection_faults(case, sel, truth) == []
        assert sel.minimal.mean() >= 0.999
        assert abs(sel.k.mean() / 65536 - mean) < 1e-4
