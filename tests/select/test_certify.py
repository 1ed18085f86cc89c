"""certify: what is judged, what hidden keys add, and both checkers; forms are in test_inputs.py."""

from __future__ import annotations

import numpy as np

import certk_rs as ck

RNG = np.random.default_rng(21)
ROWS = (RNG.standard_normal((12, 80)) * 2.0).astype(np.float32)
KEEP = RNG.random(ROWS.shape) < 0.4
KEEP[3] = False


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
