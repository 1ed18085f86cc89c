"""The ways to say which keys are kept: each gives the same certificate, and others are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import certk_rs as ck

RNG = np.random.default_rng(20)
SHAPE = (3, 4, 33)
SCORES = (3 * RNG.standard_normal(SHAPE)).astype(np.float32)
EPS = 0.05


def certificates(keep: Any, **options: Any) -> ck.Certificate:
    return ck.certify(SCORES, keep, eps=EPS, **options)


def test_a_kept_set_may_be_said_in_every_way() -> None:
    selection = ck.select(SCORES, EPS)
    expected = certificates(selection.to_mask())
    lists = [np.random.default_rng(i).permutation(selection.row(i)) for i in range(12)]
    padded = selection.to_padded()
    forms = {
        "Selection": selection,
        "padded": padded,
        "padded anywhere": padded[..., ::-1],
        "padded int64": padded.astype(np.int64),
        "padded tensor": torch.from_numpy(np.array(padded)),
        "mask tensor": torch.from_numpy(selection.to_mask()),
        "mask lists": selection.to_mask().tolist(),
        "list of arrays": lists,
        "list of lists": [row.tolist() for row in lists],
        "tuple of tensors": tuple(torch.from_numpy(row) for row in lists),
    }
    for name, keep in forms.items():
        got = certificates(keep)
        for field in ("k", "tail_mass_upper", "tail_mass_lower", "holds", "minimal"):
            np.testing.assert_array_equal(
                getattr(got, field), getattr(expected, field), err_msg=f"{name}: {field}"
            )
    assert expected.holds is not None
    assert expected.holds.all()
    assert expected.k.shape == SHAPE[:-1]
    assert ck.certify(SCORES, selection).holds is None


def test_one_row_takes_a_flat_list() -> None:
    row = SCORES[0, 0]
    expected = ck.certify(row, [[4, 2]])
    for keep in (
        [4, 2],
        (2, 4),
        np.array([2, 4, -1]),
        [np.int8(4), 2],
        [np.array([2, 4])],
        torch.tensor([4, 2]),
    ):
        assert ck.certify(row, keep).tail_mass_upper == expected.tail_mass_upper
        assert ck.certify(row[None], keep).tail_mass_upper == expected.tail_mass_upper
    for keep in ([], [[]], np.zeros(33, dtype=bool), np.array([-1, -1]), np.zeros(0, dtype=int)):
        assert ck.certify(row, keep).tail_mass_lower == 1.0
        assert ck.certify(row, keep).k.shape == ()


def test_a_mask_broadcasts() -> None:
    keep = ck.keep_set(SCORES[0], EPS)
    cert = ck.certify(SCORES[0], keep.to_mask(), eps=EPS)
    assert cert.holds is not None
    assert cert.holds.all()
    assert (cert.k == keep.k).all()


def test_ragged_kept_sets() -> None:
    flat, indptr = SCORES.reshape(-1)[:60], [0, 10, 10, 60]
    selection = ck.select(flat, EPS, indptr=indptr)
    expected = ck.certify(flat, selection, indptr=indptr)
    assert selection.to_mask().shape == (60,)
    for keep in (selection.to_mask(), [selection.row(i) for i in range(3)], selection.to_padded()):
        got = ck.certify(flat, keep, indptr=indptr)
        np.testing.assert_array_equal(got.tail_mass_upper, expected.tail_mass_upper)
    with pytest.raises(
        ck.CertkError, match="keep is a Selection of ragged rows with another indptr"
    ):
        ck.certify(flat, selection, indptr=[0, 10, 20, 60])
    with pytest.raises(ck.CertkError, match="keep is a Selection of shape"):
        ck.certify(flat[None], selection)


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (np.ones(SHAPE), "keep has dtype float64; pass integers"),
        (np.ones(SHAPE, dtype=np.uint8), r"keep has shape \(3, 4, 33\)|twice|listed"),
        (np.ones(32, dtype=bool), "keep has shape"),
        (
            np.zeros((12, 2), dtype=int),
            r"keep has shape \(12, 2\); pass indices of shape \(3, 4, k\)",
        ),
        ([1, 2, 3], "keep lists 3 entries, but the scores have 12 rows"),
        ([], "keep lists 0 entries"),
        ([[0]] * 11, "keep lists 11 entries"),
        ([0] * 12, r"keep\[0\] has shape \(\)"),
        ([[[0]]] * 12, r"keep\[0\] has shape \(1, 1\)"),
        ([[0.5]] * 12, r"keep\[0\] has dtype float64"),
        ([[0]] * 11 + [[33]], r"keep.*\[2, 3\]|33"),
        ([[0]] * 11 + [[-1]], "-1"),
        ([[0]] * 11 + [[5, 5]], "twice|5"),
        (None, "keep is a NoneType"),
        ("all", "keep is a str"),
        (5, "keep has shape|keep"),
    ],
)
def test_other_kept_sets_are_refused(keep: Any, message: str) -> None:
    with pytest.raises(ck.CertkError, match=message):
        certificates(keep)


def test_a_selection_of_other_scores_is_refused() -> None:
    with pytest.raises(ck.CertkError, match=r"keep is a Selection of shape \(3, 4, 5\)"):
        certificates(ck.select(SCORES[..., :5], EPS))
