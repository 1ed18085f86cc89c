"""One sweep over a case: everything that can be asked of it, held against the oracle.

select, select with prove_minimal, certify of both selections, certify of sets of other kinds, each
with the kernels and with the independent checker.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import certk_rs as ck
from bulk_oracle import Truth
from cases import Case
from checks import CERTIFIED, certificate_faults, keep_mask, selection_faults


def other_sets(case: Case, truth: Truth, seed: int) -> np.ndarray:
    """(rows, n) kept sets that no selector makes: random, the worst keys only, none, all."""
    rng = np.random.default_rng(seed)
    keep = truth.visible & (rng.random(truth.visible.shape) < rng.random((case.rows, 1)))
    worst = np.zeros_like(keep)
    np.put_along_axis(worst, truth.order[:, case.n // 2 :], True, axis=1)
    keep[1::4] = (worst & truth.visible)[1::4]
    keep[2::16] = False
    keep[6::16] = truth.visible[6::16]
    return keep


def sweep_faults(case: Case, seed: int = 0) -> list[str]:
    """All faults of one sweep over a case."""
    truth = Truth(case)
    faults: list[str] = []

    def select(**more: Any) -> Any:
        return ck.select(case.scores, case.eps, **case.select_options(), **more)

    def certify(keep: Any, independent: bool) -> Any:
        options = case.row_options()
        return ck.certify(case.scores, keep, eps=case.eps, independent=independent, **options)

    plain, proven = select(), select(prove_minimal=True)
    faults += selection_faults(case, plain, truth)
    faults += [f"prove_minimal: {f}" for f in selection_faults(case, proven, truth)]
    if faults:
        return faults
    for bad, text in (
        (proven.k > plain.k, "prove_minimal raised k"),
        (plain.minimal & ~proven.minimal, "prove_minimal lost a proof"),
        ((plain.status == CERTIFIED) & (proven.status != CERTIFIED), "prove_minimal lost a row"),
    ):
        faults += [f"{text}: {case.describe(int(row))}" for row in np.flatnonzero(bad)]
    for sel in (plain, proven):
        keep = keep_mask(case, sel.indptr, sel.indices)
        for independent in (False, True):
            cert = certify(sel, independent)
            faults += [
                f"certify(select, {independent=}): {fault}"
                for fault in certificate_faults(case, keep, cert, truth)
            ]
            lost = (sel.status == CERTIFIED) & ~cert.holds
            faults += [
                f"certified, but does not hold ({independent=}): {cert.tail_mass_upper[row]!r} "
                f"against {sel.tail_mass_upper[row]!r}: {case.describe(int(row))}"
                for row in np.flatnonzero(lost)
            ]
    keep = other_sets(case, truth, seed)
    for independent in (False, True):
        cert = certify(keep, independent)
        faults += [
            f"certify(mask, {independent=}): {fault}"
            for fault in certificate_faults(case, keep, cert, truth)
        ]
    return faults
