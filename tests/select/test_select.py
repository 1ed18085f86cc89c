"""select and certify: shapes, batches, ragged and hidden rows; numbers are in test_soundness.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import certk_rs as ck

RNG = np.random.default_rng(21)
ROWS = (RNG.standard_normal((12, 80)) * 2.0).astype(np.float32)


@pytest.mark.parametrize("shape", [(0, 5), (0, 0), (3, 0), (2, 0, 4), (0,), (2, 3, 0)])
def test_empty_batches_and_empty_rows(shape: tuple[int, ...]) -> None:
    scores = np.zeros(shape, dtype=np.float32)
    sel = ck.select(scores, 0.1)
    batch = shape[:-1]
    assert sel.shape == sel.to_mask().shape == shape
    assert sel.k.shape == sel.tail_mass_upper.shape == batch
    assert sel.indptr.tolist() == [0] * (int(np.prod(batch)) + 1)
    assert sel.indices.size == 0
    assert (sel.status == ck.Status.EMPTY).all()
    assert sel.minimal.all()
    assert sel.to_padded().shape == (*batch, 0)
    cert = ck.certify(scores, np.zeros(shape, dtype=bool), eps=0.1)
    assert cert.k.shape == batch
    assert cert.holds.all()
    assert not cert.tail_mass_upper.any()


def test_batch_axes_are_kept_and_flattened_in_c_order() -> None:
    rng = np.random.default_rng(5)
    scores = rng.standard_normal((2, 3, 4, 50)).astype(np.float32) * 3
    eps = rng.choice([0.1, 0.01], (2, 3, 4))
    sel = ck.select(scores, eps)
    assert sel.k.shape == sel.status.shape == sel.minimal.shape == (2, 3, 4)
    flat = ck.select(scores.reshape(24, 50), eps.reshape(24))
    assert flat.indices.tobytes() == sel.indices.tobytes()
    assert flat.tail_mass_upper.tobytes() == sel.tail_mass_upper.tobytes()
    assert sel.row((1, 2, 3)).tolist() == sel.row(23).tolist()
    # The rows of a causal prompt are on the last axis of the batch.
    square = np.zeros((3, 4, 6), dtype=np.float32)
    for offset, more, seen in (
        (1, {}, [2, 3, 4, 5]), (-2, {}, [0, 0, 1, 2]), (1, {"lengths": 3}, [2, 3, 3, 3]),
    ):  # fmt: skip
        assert ck.select(square, 0.0, causal_offset=offset, **more).k.tolist() == [seen] * 3


def test_ragged_rows_are_the_rows_by_themselves() -> None:
    rng = np.random.default_rng(6)
    sizes = [5, 0, 1, 200, 17, 0]
    rows = [(rng.standard_normal(n) * 3).astype(np.float32) for n in sizes]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    flat = np.concatenate(rows)
    eps = np.array([0.1, 0.1, 0.0, 0.01, 0.2, 0.3])
    sel = ck.select(flat, eps, indptr=starts, min_keep=2)
    assert sel.shape == (6, None)
    mask = sel.to_mask()
    assert mask.shape == flat.shape
    for i, row in enumerate(rows):
        alone = ck.select(row, float(eps[i]), min_keep=2)
        assert alone.row(0).tolist() == sel.row(i).tolist()
        assert alone.tail_mass_upper == sel.tail_mass_upper[i]
        assert alone.status == sel.status[i]
        assert np.flatnonzero(mask[starts[i] : starts[i + 1]]).tolist() == sel.row(i).tolist()
    for keep in (sel, mask, [sel.row(i) for i in range(6)], sel.to_padded()):
        cert = ck.certify(flat, keep, eps=eps, indptr=starts)
        assert cert.holds.all()
        assert np.array_equal(cert.k, sel.k)


def test_hidden_positions_may_hold_anything() -> None:
    """NaN and +inf where nothing may be kept are never looked at."""
    scores = np.array([[0.0, np.nan, 2.0, np.inf]], dtype=np.float32)
    shown = np.array([[True, False, True, False]])
    options: tuple[tuple[dict[str, Any], list[int]], ...] = (
        ({"mask": shown}, [0, 2]),
        ({"mask": np.where(shown, 0.0, [-np.inf, -np.inf, 0.0, np.finfo(float).min])}, [0, 2]),
        ({"lengths": np.array([1])}, [0]),
        ({"causal_offset": 0}, [0]),
    )
    for more, kept in options:
        assert ck.select(scores, 0.0, **more).row(0).tolist() == kept


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_positions_under_a_mask_of_a_long_row(dtype: Any) -> None:
    """Positions of the allowed keys are listed in several calls of 4096 each."""
    rng = np.random.default_rng(3)
    scores, mask = (rng.standard_normal(20_000) * 2).astype(dtype), rng.random(20_000) < 0.8
    hidden = np.where(mask, scores, -np.inf).astype(dtype)
    found, plain = ck.select(scores, 0.05, mask=mask), ck.select(hidden, 0.05)
    assert found.k > 4096
    assert found.indices.tolist() == plain.indices.tolist()


def test_max_keep_in_whole_blocks_keeps_the_best_ones() -> None:
    """Of 15 blocks of 8, 5 fit into 44 keys: the 5 of largest mass."""
    rows = (np.random.default_rng(11).standard_normal((40, 120)) * 2.5).astype(np.float32)
    sel = ck.select(rows, 1e-3, max_keep=44, block_size=8)
    assert (sel.k == 40).all()
    mass = np.exp(rows.astype(np.float64)).reshape(40, 15, 8).sum(axis=2)
    for i in range(40):
        best = np.sort(np.argsort(-mass[i])[:5])
        assert np.unique(sel.row(i) // 8).tolist() == best.tolist()


def test_limits_that_can_just_be_met() -> None:
    keys = np.random.default_rng(0).standard_normal((3, 20)).astype(np.float32)
    none = ck.select(keys[:, :0], 0.1, min_keep=2, max_keep=0.1)
    assert (none.status == ck.Status.EMPTY).all()
    assert (ck.select(keys, 0.999, min_keep=5, max_keep=0.25).k == 5).all()
    assert (ck.select(keys, 0.999, min_keep=5, max_keep=8, block_size=4).k == 8).all()
    assert ck.select(np.zeros(5), -0.0).k == 5


def test_certificates_without_a_budget_and_of_larger_sets() -> None:
    keep = RNG.random(ROWS.shape) < 0.4
    cert = ck.certify(ROWS, keep)
    assert cert.holds is None
    assert cert.minimal is None
    sel = ck.select(ROWS, 0.2, prove_minimal=True)
    assert ck.certify(ROWS, sel, eps=0.2).minimal.all()
    more = sel.to_mask()
    more |= np.arange(80) == np.argmin(np.where(more, np.inf, 0.0), axis=1)[:, None]
    worse = ck.certify(ROWS, more, eps=0.2)
    assert not (worse.minimal & (more.sum(axis=1) > sel.k)).any()


@pytest.mark.parametrize("independent", [False, True])
def test_a_kept_key_that_is_hidden_adds_no_mass(independent: bool) -> None:
    keep = RNG.random(ROWS.shape) < 0.4
    keep[3] = False
    lengths = np.full(12, 40)
    first = keep & (np.arange(80) < 40)
    want, got = (
        ck.certify(ROWS, each, lengths=lengths, independent=independent) for each in (first, keep)
    )
    assert np.array_equal(got.k, want.k)
    assert np.array_equal(got.tail_mass_upper, want.tail_mass_upper)
    assert np.array_equal(got.tail_mass_lower, want.tail_mass_lower)
    every = ck.certify(ROWS, keep | True, mask=keep, eps=0.0, independent=independent)
    assert not every.tail_mass_upper.any()
    assert every.holds.all()
