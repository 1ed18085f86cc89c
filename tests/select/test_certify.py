"""certify: every form of a kept set means the same, and given sets get true intervals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import certk_rs as ck
from cases import Case
from checks import certificate_faults

RNG = np.random.default_rng(21)
ROWS = (RNG.standard_normal((12, 80)) * 2.0).astype(np.float32)
KEEP = RNG.random(ROWS.shape) < 0.4
KEEP[3] = False
CASE = Case(ROWS, np.full(12, 0.2), name="certify")


def bytes_of(cert: Any) -> list[bytes]:
    """All numbers of a Certificate."""
    names = ("k", "tail_mass_upper", "tail_mass_lower", "holds", "minimal")
    return [b"" if getattr(cert, n) is None else getattr(cert, n).tobytes() for n in names]


def indices(row: int) -> np.ndarray:
    """Kept positions of one row."""
    return np.flatnonzero(KEEP[row])


@pytest.mark.parametrize("independent", [False, True])
def test_every_form_of_a_kept_set_gives_the_same_bytes(independent: bool) -> None:
    want = bytes_of(ck.certify(ROWS, KEEP, eps=0.2, independent=independent))
    padded = np.full((12, 70), -1)
    shuffled = []
    for i in range(12):
        kept = RNG.permutation(indices(i))
        places = np.sort(RNG.choice(70, len(kept), replace=False))
        padded[i, places] = kept
        shuffled.append(kept)
    forms = {
        "list of arrays": shuffled,
        "list of lists": [kept.tolist() for kept in shuffled],
        "tuple": tuple(shuffled),
        "padded int64": padded,
        "padded int16": padded.astype(np.int16),
        "nested list of bools": KEEP.tolist(),
        "strided mask": np.repeat(KEEP, 2, axis=1)[:, ::2],
    }
    for name, keep in forms.items():
        got = ck.certify(ROWS, keep, eps=0.2, independent=independent)
        assert bytes_of(got) == want, name
    cert = ck.certify(ROWS, KEEP, eps=0.2, independent=independent)
    assert certificate_faults(CASE, KEEP, cert) == []
    assert cert.tail_mass_upper[3] == cert.tail_mass_lower[3] == 1.0


def test_a_selection_is_a_kept_set() -> None:
    sel = ck.select(ROWS, 0.2)
    want = bytes_of(ck.certify(ROWS, sel.to_mask(), eps=0.2))
    assert bytes_of(ck.certify(ROWS, sel, eps=0.2)) == want
    assert bytes_of(ck.certify(ROWS, sel.to_padded(), eps=0.2)) == want


def test_one_row_takes_a_flat_list() -> None:
    row = ROWS[0]
    want = bytes_of(ck.certify(row, KEEP[0], eps=0.2))
    for keep in (indices(0).tolist(), indices(0), [indices(0)], indices(0).astype(np.uint8)):
        assert bytes_of(ck.certify(row, keep, eps=0.2)) == want
    cert = ck.certify(row, [], eps=0.2)
    assert cert.tail_mass_upper == 1.0
    assert not cert.holds


def test_masks_broadcast_over_rows() -> None:
    one = RNG.random(80) < 0.5
    want = bytes_of(ck.certify(ROWS, np.tile(one, (12, 1))))
    assert bytes_of(ck.certify(ROWS, one)) == want


def test_without_eps_nothing_is_judged() -> None:
    cert = ck.certify(ROWS, KEEP)
    assert cert.holds is None
    assert cert.minimal is None
    assert "Certificate" in repr(cert)
    assert cert.summary()


def test_minimal_says_that_no_smaller_set_fits() -> None:
    sel = ck.select(ROWS, 0.2, prove_minimal=True)
    cert = ck.certify(ROWS, sel, eps=0.2)
    assert cert.holds is not None
    assert cert.minimal is not None
    assert cert.holds.all()
    more = sel.to_mask()
    more |= np.arange(80) == np.argmin(np.where(more, np.inf, 0.0), axis=1)[:, None]
    worse = ck.certify(ROWS, more, eps=0.2)
    assert worse.minimal is not None
    assert not (worse.minimal & (more.sum(axis=1) > sel.k)).any()


def test_a_kept_key_that_is_hidden_adds_no_mass() -> None:
    """Kept positions that a mask, a length or -inf hides change nothing."""
    everything = np.ones(ROWS.shape, dtype=bool)
    lengths = np.full(12, 40)
    for independent in (False, True):
        want = ck.certify(
            ROWS, KEEP & (np.arange(80) < 40), lengths=lengths, independent=independent
        )
        got = ck.certify(ROWS, KEEP, lengths=lengths, independent=independent)
        assert np.array_equal(got.tail_mass_upper, want.tail_mass_upper)
        assert np.array_equal(got.tail_mass_lower, want.tail_mass_lower)
        got = ck.certify(ROWS, everything, mask=KEEP, eps=0.0, independent=independent)
        assert not got.tail_mass_upper.any()
        assert got.holds is not None
        assert got.holds.all()


def test_the_two_checkers_overlap() -> None:
    """Two true intervals of one number cannot be disjoint."""
    fast, slow = ck.certify(ROWS, KEEP), ck.certify(ROWS, KEEP, independent=True)
    assert (fast.tail_mass_lower <= slow.tail_mass_upper).all()
    assert (slow.tail_mass_lower <= fast.tail_mass_upper).all()
