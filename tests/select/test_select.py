"""The options of select, one promise each; soundness of the numbers is test_soundness.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import certk_rs as ck
from bulk_oracle import Truth
from cases import Case
from checks import selection_faults
from generators import make_case
from same_bytes import same

RNG = np.random.default_rng(11)
ROWS = (RNG.standard_normal((40, 120)) * 2.5).astype(np.float32)


def check(case: Case, **more: Any) -> Any:
    """Select with the case's options; no faults."""
    sel = ck.select(case.scores, case.eps, **case.select_options(), **more)
    assert selection_faults(case, sel) == []
    return sel


def budgets(eps: float) -> np.ndarray:
    """The same budget for every row of ROWS."""
    return np.full(len(ROWS), eps)


def test_min_keep_counts_visible_keys() -> None:
    sel = check(Case(ROWS, budgets(0.9), min_keep=50))
    assert (sel.k >= 50).all()
    sel = check(Case(ROWS, budgets(0.9), min_keep=50, lengths=np.arange(40)))
    assert np.array_equal(sel.k, np.arange(40))


def test_max_keep_as_a_count_reports_what_is_lost() -> None:
    sel = check(Case(ROWS, budgets(0.01), max_keep=10))
    assert (sel.status == ck.Status.OVER_BUDGET).all()
    assert (sel.k == 10).all()
    assert (sel.tail_mass_lower > 0.01).all()


@pytest.mark.parametrize("fraction", [0.25, 0.5, 1.0, 0.001])
def test_max_keep_as_a_fraction_of_the_visible_keys(fraction: float) -> None:
    case = Case(ROWS, budgets(1e-4), max_keep=fraction, lengths=np.arange(1, 41) * 3)
    sel = check(case)
    most = np.maximum(np.floor(fraction * np.arange(1, 41) * 3), 1)
    assert (sel.k <= most).all()
    assert (sel.k == most)[sel.status == ck.Status.OVER_BUDGET].all()


def test_max_keep_in_whole_blocks_keeps_the_best_ones() -> None:
    """Of 15 blocks of 8, 5 fit into 44 keys: the 5 of largest mass."""
    case = Case(ROWS, budgets(1e-3), max_keep=44, block_size=8)
    sel = check(case)
    assert (sel.k == 40).all()
    mass = np.exp(ROWS.astype(np.float64)).reshape(40, 15, 8).sum(axis=2)
    for i in range(40):
        best = np.sort(np.argsort(-mass[i])[:5])
        assert np.unique(sel.row(i) // 8).tolist() == best.tolist()
    with pytest.raises(ck.CertkError, match="block_size"):
        ck.select(ROWS, 0.01, max_keep=7, block_size=8)


def test_forced_keys_count_visible_positions_only() -> None:
    hidden = RNG.random(ROWS.shape) < 0.4
    scores = np.where(hidden, -np.inf, ROWS).astype(np.float32)
    case = Case(scores, budgets(0.3), keep_first=3, keep_last=2, lengths=np.full(40, 100))
    sel = check(case)
    for i in range(40):
        seen = np.flatnonzero(~hidden[i, :100])
        assert set(seen[:3]) | set(seen[-2:]) <= set(sel.row(i).tolist())


def test_forced_keys_beyond_the_row_keep_the_row() -> None:
    sel = check(Case(ROWS, budgets(0.3), keep_first=200))
    assert (sel.k == 120).all()
    sel = check(Case(ROWS, budgets(0.3), keep_first=70, keep_last=70))
    assert (sel.k == 120).all()
    assert sel.minimal.all()


def test_causal_rows_see_their_prefix() -> None:
    scores = np.zeros((3, 4, 6), dtype=np.float32)
    sel = ck.select(scores, 0.0, causal_offset=1)
    assert sel.k.tolist() == [[2, 3, 4, 5]] * 3
    sel = ck.select(scores, 0.0, causal_offset=-2)
    assert sel.k.tolist() == [[0, 0, 1, 2]] * 3
    sel = ck.select(scores, 0.0, causal_offset=1, lengths=np.full((3, 4), 3))
    assert sel.k.tolist() == [[2, 3, 3, 3]] * 3


@pytest.mark.parametrize("kind", ["logits", "logprobs", "probs"])
def test_kinds_agree_on_the_same_distribution(kind: str) -> None:
    """Softmax and log-softmax of the row select what the row selects, on ordinary rows."""
    wide = ROWS.astype(np.float64)
    logprobs = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    stored = {"logits": wide, "logprobs": logprobs, "probs": np.exp(logprobs)}[kind]
    want, got = ck.select(wide, 0.05), ck.select(stored, 0.05, kind=kind)
    assert np.array_equal(want.k, got.k)
    assert np.array_equal(want.indices, got.indices)


def test_stored_probs_are_renormalised_by_their_own_sum() -> None:
    weights = np.exp(ROWS)
    assert same(ck.select(weights, 0.1, kind="probs"), ck.select(weights * 4, 0.1, kind="probs"))


def test_scale_multiplies_exactly() -> None:
    """A power of two moves between scores and scale without a trace in the kept sets."""
    one, two = ck.select(ROWS, 0.03), ck.select(ROWS * 8, 0.03, scale=0.125)
    assert np.array_equal(one.indices, two.indices)
    assert np.array_equal(one.k, two.k)
    check(Case(ROWS, budgets(0.03), scale=-0.3))


@pytest.mark.parametrize("seed", range(20))
def test_prove_minimal_decides_nearly_everything(seed: int) -> None:
    """Ordinary rows with a budget that is no boundary: every row is proven."""
    case = make_case(seed, 200, 97, dtype=np.dtype(np.float32), kind="logits", family="gaussian")
    case = replace(case, eps=np.full(200, 0.01), scale=1.0, scores=case.scores * case.scale)
    case = replace(case, scores=np.clip(case.scores, -50, 50))
    sel = check(case, prove_minimal=True)
    assert sel.minimal.mean() >= 0.999


def test_minimal_without_proof_is_usual() -> None:
    sel = check(Case(ROWS, budgets(0.01)))
    assert sel.minimal.mean() > 0.9


def test_the_interval_is_tight_enough_to_be_useful() -> None:
    """Relative width below 2**-12 where the tail is not near underflow."""
    for seed in range(12):
        case = make_case(seed, 60, 300, options=False)
        sel = check(case)
        tau = Truth(case).tail_mass(sel.to_mask()).astype(np.float64)
        plain = (tau > 1e-25) & (sel.status == ck.Status.CERTIFIED)
        assert (sel.tail_mass_upper <= tau * (1 + 2.0**-12))[plain].all()
        assert (sel.tail_mass_lower >= tau * (1 - 2.0**-12))[plain].all()
