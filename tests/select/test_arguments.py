"""Arguments beside the scores: permitted forms, and refusals by name."""

from __future__ import annotations

import decimal
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import certk_rs as ck

RNG = np.random.default_rng(20)
SHAPE = (3, 4, 33)
SCORES = (3 * RNG.standard_normal(SHAPE)).astype(np.float32)
EPS = 0.05
FIELDS = ("k", "indptr", "indices", "tail_mass_upper", "tail_mass_lower", "minimal", "status")


def same(a: ck.Selection, b: ck.Selection) -> None:
    assert a.shape == b.shape
    for field in FIELDS:
        np.testing.assert_array_equal(getattr(a, field), getattr(b, field), strict=True)


def test_masks_broadcast_from_any_layout() -> None:
    full = RNG.random(SHAPE) < 0.7
    expected = ck.select(SCORES, EPS, mask=full)
    same(ck.select(SCORES, EPS, mask=torch.from_numpy(full)), expected)
    same(ck.select(SCORES, EPS, mask=full.tolist()), expected)
    same(ck.select(SCORES, EPS, mask=np.asfortranarray(full)), expected)
    additive = ck.select(SCORES, EPS, mask=np.where(full, 0.0, -np.inf))
    np.testing.assert_array_equal(additive.indices, expected.indices)
    for part in (full[0, 0], full[:1], full[:, :1], full[..., :1], full[0, :, :1], np.array(True)):
        same(
            ck.select(SCORES, EPS, mask=part),
            ck.select(SCORES, EPS, mask=np.broadcast_to(part, SHAPE).copy()),
        )


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_additive_masks_of_every_dtype(dtype: Any) -> None:
    bias = np.where(RNG.random(SHAPE[-1]) < 0.7, 0.5, -np.inf).astype(dtype)
    wide = ck.select(SCORES, EPS, mask=bias.astype(np.float64))
    same(ck.select(SCORES, EPS, mask=bias), wide)
    if dtype is ml_dtypes.bfloat16:
        tensor = torch.from_numpy(bias.astype(np.float32)).bfloat16()
        same(ck.select(SCORES, EPS, mask=tensor), wide)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.ones(33, dtype=np.int64), "mask has dtype int64; pass bool"),
        ([1, 0] * 16 + [1], "mask has dtype int64; pass bool"),
        (np.ones(32, dtype=bool), r"mask has shape \(32,\).*\(3, 4, 33\)"),
        (np.ones((2, *SHAPE), dtype=bool), "mask has shape"),
        ("causal", "mask is a str"),
    ],
)
def test_other_masks_are_refused(mask: Any, message: str) -> None:
    with pytest.raises(ck.CertkError, match=message):
        ck.select(SCORES, EPS, mask=mask)


def test_eps_may_be_any_number_or_one_per_row() -> None:
    expected = ck.select(SCORES, 0.25)
    batch = SHAPE[:-1]
    for eps in (
        np.float32(0.25),
        np.float64(0.25),
        np.array(0.25),
        torch.tensor(0.25),
        np.full(batch, 0.25),
    ):
        same(ck.select(SCORES, eps), expected)
    same(ck.select(SCORES, np.full(batch, 0.25).tolist()), expected)
    same(ck.select(SCORES, torch.full(batch, 0.25, dtype=torch.bfloat16)), expected)
    same(ck.select(SCORES, 0), ck.select(SCORES, 0.0))
    rows = np.linspace(0.01, 0.5, 12).reshape(batch)
    mixed = ck.select(SCORES, rows)
    np.testing.assert_array_equal(mixed.eps, rows)
    assert not np.shares_memory(mixed.eps, rows)
    for i in np.ndindex(batch):
        np.testing.assert_array_equal(mixed.row(i), ck.select(SCORES[i], rows[i]).row(0))


@pytest.mark.parametrize(
    "eps",
    [
        True,
        "0.1",
        None,
        1j,
        [0.1, 0.2],
        np.full((4, 3), 0.1),
        np.full(12, 0.1),
        np.array([True]),
        {},
    ],
    ids=repr,
)
def test_other_eps_are_refused(eps: Any) -> None:
    with pytest.raises(ck.CertkError, match=r"^eps"):
        ck.select(SCORES, eps)


def test_lengths_may_be_integers_of_any_kind() -> None:
    lengths = RNG.integers(1, 33, SHAPE[:-1])
    expected = ck.select(SCORES, EPS, lengths=lengths)
    for dtype in (np.int8, np.uint8, np.int32, np.uint64, ">i4"):
        same(ck.select(SCORES, EPS, lengths=lengths.astype(dtype)), expected)
    same(ck.select(SCORES, EPS, lengths=lengths.tolist()), expected)
    same(ck.select(SCORES, EPS, lengths=torch.from_numpy(lengths).int()), expected)
    one_for_all = ck.select(SCORES, EPS, lengths=5)
    same(one_for_all, ck.select(SCORES, EPS, lengths=np.full(SHAPE[:-1], 5)))
    np.testing.assert_array_equal(one_for_all.indices, ck.select(SCORES[..., :5], EPS).indices)


@pytest.mark.parametrize(
    "lengths",
    [
        5.0,
        True,
        "5",
        [1, 2],
        np.full(12, 5),
        np.full(SHAPE[:-1], 5.0),
        np.array(2**63, dtype=np.uint64),
    ],
    ids=repr,
)
def test_other_lengths_are_refused(lengths: Any) -> None:
    with pytest.raises(ck.CertkError, match=r"^lengths"):
        ck.select(SCORES, EPS, lengths=lengths)


@pytest.mark.parametrize("name", ["min_keep", "keep_first", "keep_last", "block_size", "threads"])
def test_counts_may_be_any_integer_and_nothing_else(name: str) -> None:
    same(ck.select(SCORES, EPS, **{name: np.int8(2)}), ck.select(SCORES, EPS, **{name: 2}))
    for wrong in (2.0, True, np.True_, "2", [2], -1, 2**63, np.array([1, 2])):
        with pytest.raises(ck.CertkError, match=f"^{name} is"):
            ck.select(SCORES, EPS, **{name: wrong})


def test_max_keep_is_a_count_or_a_fraction() -> None:
    row = SCORES[0]
    same(ck.select(row, 0.0, max_keep=np.int64(8)), ck.select(row, 0.0, max_keep=8))
    same(ck.select(row, 0.0, max_keep=np.float32(0.25)), ck.select(row, 0.0, max_keep=8))
    same(ck.select(row, 0.0, max_keep=1.0), ck.select(row, 0.0))
    assert ck.select(row, 0.0, max_keep=1).k.max() == 1
    assert ck.keep_set(row, 0.5, max_keep=0.25).k <= 8
    for wrong in (0, -1, 0.0, -0.5, 1.5, float("nan"), float("inf"), True, "all", [1]):
        for function in (ck.select, ck.keep_set):
            with pytest.raises(ck.CertkError, match=r"^max_keep is"):
                function(row, 0.5, max_keep=wrong)


def test_scale_is_a_float64() -> None:
    expected = ck.select(SCORES, EPS, scale=0.5)
    for scale in (np.float32(0.5), np.float64(0.5)):
        same(ck.select(SCORES, EPS, scale=scale), expected)
    same(ck.select(SCORES, EPS, scale=2), ck.select(SCORES, EPS, scale=2.0))
    for wrong in (
        True,
        "1",
        None,
        1j,
        2**60 + 1,
        10**400,
        decimal.Decimal("0.1"),
        torch.tensor(1.0),
    ):
        with pytest.raises(ck.CertkError, match=r"^scale is"):
            ck.select(SCORES, EPS, scale=wrong)


def test_flags_and_kind_are_what_they_say() -> None:
    same(ck.select(SCORES, EPS, prove_minimal=np.True_), ck.select(SCORES, EPS, prove_minimal=True))
    for wrong in (1, "yes", None):
        with pytest.raises(ck.CertkError, match=r"^prove_minimal is"):
            ck.select(SCORES, EPS, prove_minimal=wrong)
        with pytest.raises(ck.CertkError, match=r"^independent is"):
            ck.certify(SCORES, [[0]] * 12, independent=wrong)
    for kind in ("softmax", "", None, 0, ["logits"]):
        with pytest.raises(ck.CertkError, match=r"^kind"):
            ck.select(SCORES, EPS, kind=kind)


def test_causal_offset_may_be_negative() -> None:
    square = SCORES[0, :, :4]
    same(ck.select(square, EPS, causal_offset=np.int32(0)), ck.select(square, EPS, causal_offset=0))
    assert ck.select(square, EPS, causal_offset=-1).status[0] == ck.Status.EMPTY
    for wrong in (0.0, True, "0"):
        with pytest.raises(ck.CertkError, match=r"^causal_offset is"):
            ck.select(square, EPS, causal_offset=wrong)


def test_indptr_may_be_integers_of_any_kind() -> None:
    flat, indptr = SCORES.reshape(-1)[:60], [0, 10, 10, 60]
    expected = ck.select(flat, EPS, indptr=indptr)
    assert expected.shape == (3, None)
    for form in (
        np.array(indptr, dtype=np.int32),
        torch.tensor(indptr),
        np.array(indptr, dtype=np.uint64),
    ):
        same(ck.select(flat, EPS, indptr=form), expected)
    for wrong in (5, [[0, 60]], [], [0.0, 60.0], "0", [True, False]):
        with pytest.raises(ck.CertkError, match=r"^indptr"):
            ck.select(flat, EPS, indptr=wrong)
    with pytest.raises(ck.CertkError, match=r"^indptr is given"):
        ck.keep_set(flat, EPS, indptr=indptr)
    with pytest.raises(ck.CertkError, match=r"^indptr is given, but scores has shape \(2, 30\)"):
        ck.select(flat.reshape(2, 30), EPS, indptr=[0, 60])
