"""Empty batches, empty rows, one key, all keys, zeros of both signs, shapes, strides, dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import certk_rs as ck
from cases import Case
from checks import selection_faults
from generators import DTYPES
from same_bytes import same


@pytest.mark.parametrize("shape", [(0, 5), (0, 0), (3, 0), (2, 0, 4), (0,), (2, 3, 0)])
def test_empty_batches_and_empty_rows(shape: tuple[int, ...]) -> None:
    scores = np.zeros(shape, dtype=np.float32)
    sel = ck.select(scores, 0.1)
    batch = shape[:-1]
    rows = int(np.prod(batch))
    assert sel.shape == shape
    assert sel.k.shape == batch
    assert sel.tail_mass_upper.shape == batch
    assert sel.indptr.tolist() == [0] * (rows + 1)
    assert sel.indices.size == 0
    assert (sel.status == ck.Status.EMPTY).all()
    assert sel.minimal.all()
    assert sel.to_mask().shape == shape
    assert sel.to_padded().shape == (*batch, 0)
    cert = ck.certify(scores, np.zeros(shape, dtype=bool), eps=0.1)
    assert cert.k.shape == batch
    assert cert.holds is not None
    assert cert.holds.all()
    assert not cert.tail_mass_upper.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [0.0, 1e-80, 0.5, 1 - 2.0**-53])
def test_one_key_is_kept(dtype: np.dtype, eps: float) -> None:
    for kind, value in (("logits", -7.0), ("probs", 2.0**-10), ("logprobs", 0.0)):
        sel = ck.select(np.full((2, 1), value).astype(dtype), eps, kind=kind)
        assert sel.k.tolist() == [1, 1]
        assert sel.indices.tolist() == [0, 0]
        assert sel.tail_mass_upper.tolist() == [0.0, 0.0]
        assert sel.minimal.all()


@pytest.mark.parametrize("hide", ["-inf", "mask", "bias", "lengths", "causal", "probs"])
def test_fully_masked_rows_are_empty_and_their_neighbours_are_not(hide: str) -> None:
    scores = np.tile(np.array([1.0, 0.0, 2.0], dtype=np.float32), (2, 1))
    options: dict[str, Any] = {}
    if hide == "-inf":
        scores[0] = -np.inf
    elif hide == "mask":
        options["mask"] = np.array([[False], [True]])
    elif hide == "bias":
        options["mask"] = np.array([[-np.inf], [0.0]])
    elif hide == "lengths":
        options["lengths"] = np.array([0, 3])
    elif hide == "causal":
        options["causal_offset"] = -1
    else:
        scores[0] = [0.0, -0.0, 0.0]
        options["kind"] = "probs"
    sel = ck.select(scores, 0.0, **options)
    assert sel.status.tolist() == [ck.Status.EMPTY, ck.Status.CERTIFIED]
    assert sel.k[0] == 0
    assert sel.minimal[0]
    assert sel.tail_mass_upper[0] == sel.tail_mass_lower[0] == 0.0
    assert sel.row(0).size == 0
    cert = ck.certify(scores, sel, eps=0.0, **options)
    assert cert.holds is not None
    assert cert.holds.all()
    assert cert.k[0] == 0
    assert cert.tail_mass_upper[0] == cert.tail_mass_lower[0] == 0.0
    cert = ck.certify(scores, np.zeros((2, 3), dtype=bool), eps=0.5, **options)
    assert cert.tail_mass_upper.tolist() == [0.0, 1.0]
    assert cert.tail_mass_lower.tolist() == [0.0, 1.0]
    assert cert.holds is not None
    assert cert.holds.tolist() == [True, False]


def test_eps_0_keeps_everything_finite() -> None:
    scores = np.array([0.0, -np.inf, -1e4, 3.0], dtype=np.float32)
    sel = ck.select(scores, 0.0)
    assert sel.k.shape == ()
    assert sel.row(0).tolist() == [0, 2, 3]
    assert sel.tail_mass_upper == 0.0
    assert sel.minimal


def test_k_equal_n_has_mass_exactly_0() -> None:
    scores = np.linspace(0.0, 1.0, 50, dtype=np.float32)
    sel = ck.select(scores, 1e-9)
    assert sel.k == 50
    assert sel.tail_mass_upper == sel.tail_mass_lower == 0.0
    assert sel.minimal
    cert = ck.certify(scores, np.ones(50, dtype=bool), eps=0.0)
    assert cert.holds
    assert cert.tail_mass_upper == 0.0


def test_minus_zero_equals_zero() -> None:
    scores = np.array([-0.0, 0.0, -0.0, 0.0], dtype=np.float32)
    for dtype in DTYPES:
        for scale in (1.0, -1.0):
            sel = ck.select(scores.astype(dtype), 0.5, scale=scale, prove_minimal=True)
            assert sel.row(0).tolist() == [0, 1]
    sel = ck.select(np.array([-0.0, 0.5, 0.0, 0.25]), 0.0, kind="probs")
    assert sel.row(0).tolist() == [1, 3]


def test_subnormals_rank_by_value_and_never_vanish() -> None:
    tiny = np.float32(1e-45)
    sel = ck.select(np.array([0.0, -tiny, tiny, 0.0], dtype=np.float32), 0.7)
    assert 2 in sel.row(0).tolist()
    assert 1 not in sel.row(0).tolist()
    sel = ck.select(np.array([tiny, 0.0, tiny], dtype=np.float32), 0.4, kind="probs")
    assert sel.row(0).tolist() == [0, 2]
    assert sel.status == ck.Status.CERTIFIED


def test_all_equal_long_rows() -> None:
    for n in (100, 4096, 70000):
        case = Case(np.full((2, n), 3.5, dtype=np.float32), np.array([0.1, 0.5]), name="equal")
        sel = ck.select(case.scores, case.eps, prove_minimal=True)
        assert selection_faults(case, sel) == []
        assert sel.minimal.all()


def test_batch_axes_are_kept_and_flattened_in_c_order() -> None:
    rng = np.random.default_rng(5)
    scores = rng.standard_normal((2, 3, 4, 50)).astype(np.float32) * 3
    eps = rng.choice([0.1, 0.01], (2, 3, 4))
    sel = ck.select(scores, eps)
    assert sel.k.shape == sel.status.shape == sel.minimal.shape == (2, 3, 4)
    assert same(sel, ck.select(scores.reshape(24, 50), eps.reshape(24)))
    assert sel.row((1, 2, 3)).tolist() == sel.row(23).tolist()
    assert sel.to_mask().shape == scores.shape
    assert np.array_equal(sel.to_mask().sum(axis=-1), sel.k)


def test_ragged_rows_are_the_rows_by_themselves() -> None:
    rng = np.random.default_rng(6)
    sizes = [5, 0, 1, 200, 17, 0]
    rows = [(rng.standard_normal(n) * 3).astype(np.float32) for n in sizes]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    flat = np.concatenate(rows)
    eps = np.array([0.1, 0.1, 0.0, 0.01, 0.2, 0.3])
    sel = ck.select(flat, eps, indptr=starts, min_keep=2)
    assert sel.shape == (6, None)
    assert sel.k.shape == (6,)
    mask = sel.to_mask()
    assert mask.shape == flat.shape
    for i, row in enumerate(rows):
        alone = ck.select(row, float(eps[i]), min_keep=2)
        assert alone.row(0).tolist() == sel.row(i).tolist()
        assert alone.tail_mass_upper == sel.tail_mass_upper[i]
        assert alone.status == sel.status[i]
        kept = np.flatnonzero(mask[starts[i] : starts[i + 1]])
        assert kept.tolist() == sel.row(i).tolist()
    for keep in (sel, mask, [sel.row(i) for i in range(6)], sel.to_padded()):
        cert = ck.certify(flat, keep, eps=eps, indptr=starts)
        assert cert.holds is not None
        assert cert.holds.all()
        assert np.array_equal(cert.k, sel.k)


def test_hidden_positions_may_hold_anything() -> None:
    """NaN and +inf where nothing may be kept are never looked at."""
    scores = np.array([[0.0, np.nan, 2.0, np.inf]], dtype=np.float32)
    want = [[0, 2]]
    for options in (
        {"mask": np.array([[True, False, True, False]])},
        {"mask": np.array([[0.0, -np.inf, 0.0, np.finfo(np.float64).min]])},
    ):
        sel = ck.select(scores, 0.0, **options)
        assert [sel.row(0).tolist()] == want
    sel = ck.select(scores, 0.0, lengths=np.array([1]))
    assert sel.row(0).tolist() == [0]
    sel = ck.select(scores, 0.0, causal_offset=0)
    assert sel.row(0).tolist() == [0]


# Of each level of equal scores the share eps is dropped, so the tail mass is eps exactly: rows,
# budget, options, and the fewest keys that do.
TIES_OF_LEVELS: list[tuple[list[float], float, dict[str, int], int]] = [
    ([0, -1, 0, -1], 0.5, {"block_size": 2}, 2),
    ([0, 0, -1, -1], 0.5, {"keep_last": 1}, 2),
    ([0, 0, -1, -1], 0.5, {"keep_first": 1, "keep_last": 1}, 2),
    ([0, -1, -1, 0], 0.5, {"keep_first": 2}, 2),
    ([3, -2, 3, -2, 3, -2, 3, -2], 0.25, {"block_size": 2}, 6),
    ([3, -2, 3, -2, 3, -2, 3, -2], 0.5, {"block_size": 2}, 4),
    ([1, -1, 2, 1, -1, 2, 1, -1, 2, 1, -1, 2], 0.75, {"block_size": 3}, 3),
    ([-np.inf, 0, -1, 0, -1, -np.inf], 0.5, {"keep_last": 1, "keep_first": 1}, 2),
]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize(("scores", "eps", "options", "fewest"), TIES_OF_LEVELS)
def test_budgets_that_are_met_exactly(
    scores: list[float], eps: float, options: dict[str, int], fewest: int, dtype: str
) -> None:
    row = np.array(scores, dtype=dtype)
    for prove in (False, True):
        found = ck.select(row, eps, prove_minimal=prove, **options)
        assert found.k == fewest
        assert found.minimal.all()
        assert found.status == ck.Status.CERTIFIED
        assert found.tail_mass_lower <= eps
        assert found.tail_mass_upper == eps
        # Less than that is not allowed.
        less = ck.select(row, np.nextafter(eps, 0), prove_minimal=prove, **options)
        assert less.k > fewest
    for independent in (False, True):
        judged = ck.certify(row, [found.indices], eps=eps, independent=independent)
        assert judged.holds.all()
        assert judged.tail_mass_upper == eps
        judged = ck.certify(row, [found.indices], eps=np.nextafter(eps, 0), independent=independent)
        assert not judged.holds.any()


def test_ties_that_other_options_forbid() -> None:
    row = np.array([0.0, 0, -1, -1, 0, 0, -1, -1])
    for eps, dropped in ((0.5, 4), (0.0, 0)):
        found = ck.select(row, eps, keep_last=1, max_keep=3)
        assert found.k == 3
        assert found.status == ck.Status.OVER_BUDGET
        found = ck.select(row, eps, keep_last=1, min_keep=5)
        assert found.k == max(5, 8 - dropped)


def test_levels_that_do_not_tie() -> None:
    """As many keys are dropped as eps says, but not of each level; or levels only seem equal."""
    row = np.array([0.0, 0, -1e-9, -1e-9])
    assert ck.certify(row, [[0, 2]], eps=0.5).holds.all()
    assert not ck.certify(row, [[2, 3]], eps=0.5).holds.any()
    row = np.array([0, -1, 0, np.nextafter(-1, 0)])
    judged = ck.certify(row, [[0, 1]], eps=0.5)
    assert not judged.holds.any()
    assert judged.tail_mass_upper > 0.5
