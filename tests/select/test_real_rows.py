"""Real attention rows (q.k / sqrt(d) of a BERT-style encoder, n = 512), every dtype and budget.

The rows of `examples/data` run always; with `CERTK_DATA=DIR` all 36864 rows of all heads as well.
transformers' TopPLogitsWarper(1 - eps) is a peer: it drops a prefix of the ascending row whose
float32 cumulative softmax is <= 1 - top_p. Where the sets differ, exact arithmetic is the judge.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import certk_rs as ck
from bulk_oracle import Truth
from cases import Case
from checks import CERTIFIED, certificate_faults, keep_mask, selection_faults
from generators import DTYPES, make_case
from real_rows import Cache, layers, rows_of

F32 = np.dtype(np.float32)


def check_rows(scores: np.ndarray, name: str) -> float:
    """Hold everything that is promised of these rows; return the share proven minimal."""
    proven_rows = []
    case = Case(scores, np.zeros(len(scores)), name=name)
    truth = Truth(case)
    for eps in (0.1, 0.01, 0.001, 1e-6):
        case = replace(case, eps=np.full(len(scores), eps))
        truth.case = case
        k_min = truth.minimal_k()
        plain, proven = (ck.select(scores, eps, prove_minimal=prove) for prove in (False, True))
        for sel in (plain, proven):
            faults = selection_faults(case, sel, truth)
            assert not faults, f"{len(faults)} faults, the first:\n{faults[0]}"
            assert (sel.status == CERTIFIED).all()
            assert (sel.k - k_min <= 1).all()
            keep = keep_mask(case, sel.indptr, sel.indices)
            for independent in (False, True):
                cert = ck.certify(scores, sel, eps=eps, independent=independent)
                assert certificate_faults(case, keep, cert, truth) == []
                assert cert.holds.all()
        assert (proven.k <= plain.k).all()
        proven_rows.append(proven.minimal.mean())
    return float(np.mean(proven_rows))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_cache(small_cache: Cache, dtype: np.dtype) -> None:
    shares = []
    for layer in layers(small_cache):
        scores = rows_of(small_cache, layer, dtype)
        assert scores.shape == (4 * 32, 512)
        shares.append(check_rows(scores, f"layer {layer} {dtype}"))
    assert len(shares) == 6
    assert np.mean(shares) >= 0.999


@pytest.mark.heavy
@pytest.mark.parametrize("layer", range(6))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_heads_and_rows(cache_512: Cache, dtype: np.dtype, layer: int) -> None:
    assert check_rows(rows_of(cache_512, layer, dtype), f"layer {layer} {dtype}") >= 0.999


def test_known_sizes(cache_512: Cache) -> None:
    """Mean k/n per layer, as measured once in float64."""
    known = {
        0.01: (0.7678, 0.3948, 0.4577, 0.5756, 0.6309, 0.8480),
        0.1: (0.5204, 0.1790, 0.2057, 0.2850, 0.2911, 0.5035),
    }
    for eps, means in known.items():
        for layer, mean in enumerate(means):
            sel = ck.select(rows_of(cache_512, layer, F32), eps)
            assert abs(sel.k.mean() / 512 - mean) < 1e-4


@pytest.mark.parametrize(
    ("layer", "known"),
    [
        (0, (0.0182, 0.0808, 0.2003)),
        (1, (0.0343, 0.1659, 0.3707)),
        (2, (0.0929, 0.322, 0.5772)),
        (3, (0.3593, 0.7434, 0.9154)),
    ],
)
def test_long_rows(cache_65536: Cache, layer: int, known: tuple[float, ...]) -> None:
    """n = 65536, 128 windows of real keys side by side; mean k/n as measured once."""
    scores = rows_of(cache_65536, layer, F32)
    case = Case(scores, np.zeros(64), name=f"long layer {layer}")
    truth = Truth(case)
    for eps, mean in zip((0.1, 0.01, 0.001), known, strict=True):
        case = replace(case, eps=np.full(64, eps))
        truth.case = case
        for prove in (False, True):
            sel = ck.select(scores, eps, prove_minimal=prove)
            assert selection_faults(case, sel, truth) == []
        assert sel.minimal.mean() >= 0.999
        assert abs(sel.k.mean() / 65536 - mean) < 1e-4


# ------------------------------------------------------------------------------------------ a peer


def differing(scores: np.ndarray, eps: float) -> int:
    """Return how many rows differ from the warper's, each of which the exact oracle has judged."""
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))
    case = Case(scores, np.full(len(scores), eps), name="nucleus")
    sel = ck.select(scores, eps, prove_minimal=True)
    assert selection_faults(case, sel) == []
    warped = transformers.TopPLogitsWarper(top_p=1.0 - eps)(None, torch.from_numpy(scores))
    theirs, ours = np.asarray(~torch.isneginf(warped).numpy()), sel.to_mask()
    differ = np.flatnonzero((theirs != ours).any(axis=1))
    for row in differ:
        exact = case.exact(int(row))
        assert exact.fits(np.flatnonzero(ours[row]).tolist(), eps)
        kept = np.flatnonzero(theirs[row]).tolist()
        # Theirs is larger than it need be, or too small, or equally large with other ties.
        smaller = len(kept) < sel.k[row]
        assert not (smaller and exact.fits(kept, eps) and sel.minimal[row])
    return len(differ)


def test_the_warper_keeps_the_same_sets_of_ordinary_rows(small_cache: Cache) -> None:
    real = np.concatenate([rows_of(small_cache, layer, F32) for layer in range(6)])
    for eps in (0.1, 0.05, 0.01):
        assert differing(real, eps) <= 0.005 * len(real)
    vocabulary = np.random.default_rng(31).standard_normal((24, 32000)) * 2.5
    differing(vocabulary.astype(np.float32), 0.1)


@pytest.mark.parametrize("seed", range(6))
def test_where_the_warper_differs_the_certificate_is_right(seed: int) -> None:
    """Ties, spikes and budgets on the boundary: the warper's set often breaks its promise."""
    for family in ("tied", "geometric", "two_level", "close", "gaussian"):
        case = make_case(seed, 60, 200, dtype=F32, kind="logits", family=family)
        scores = np.clip(case.scores.astype(np.float64) * case.scale, -80, 80).astype(np.float32)
        for eps in (0.25, 0.1, float(np.clip(case.eps[0], 1e-6, 0.9))):
            differing(scores, eps)
