"""Checks of a Selection and of a Certificate, row by row, as lists of faults."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from bulk_oracle import LD, Truth
from cases import Case
from oracle import ExactRow

CERTIFIED, OVER_BUDGET, EMPTY = 0, 1, 2

# k <= k_min(eps (1 - factor) - n flush) where minimality is not proven (numerics.md).
LOGITS_SLACK = (2.0**-13, 2.0**-124)
PROBS_SLACK = (2.0**-28, 0.0)
SWAP = 2.0**-50  # additive masks: real scores closer than this (relative) may trade places


def keep_mask(case: Case, indptr: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """(rows, n) bool from CSR."""
    keep = np.zeros((case.rows, case.n), dtype=bool)
    keep[np.repeat(np.arange(case.rows), np.diff(indptr)), indices] = True
    return keep


def limit(case: Case, count: np.ndarray) -> np.ndarray:
    """(rows,) the most keys that max_keep allows."""
    if case.max_keep is None:
        return count
    if isinstance(case.max_keep, float):
        return np.maximum(np.floor(case.max_keep * count).astype(np.int64), 1)
    return np.minimum(case.max_keep, count)


def structure_faults(case: Case, sel: Any) -> list[str]:
    """Types, shapes, order of the arrays; everything after this may rely on them."""
    faults = []
    wanted = {
        "k": np.int64, "indptr": np.int64, "indices": np.int32, "tail_mass_upper": np.float64,
        "tail_mass_lower": np.float64, "minimal": np.bool_, "status": np.uint8,
    }  # fmt: skip
    for name, dtype in wanted.items():
        array = getattr(sel, name)
        if not isinstance(array, np.ndarray) or array.dtype != dtype:
            faults.append(f"{name} is {type(array).__name__} {getattr(array, 'dtype', '')}")
        elif array.flags.writeable:
            faults.append(f"{name} is writeable")
        elif name not in ("indptr", "indices") and array.shape != (case.rows,):
            faults.append(f"{name} has shape {array.shape}")
    if faults:
        return faults
    if sel.indptr.shape != (case.rows + 1,) or sel.indptr[0] != 0:
        faults.append(f"indptr {sel.indptr.shape} starts at {sel.indptr[:1]}")
    elif not np.array_equal(np.diff(sel.indptr), sel.k) or sel.indptr[-1] != len(sel.indices):
        faults.append("k, indptr and indices do not agree")
    elif len(sel.indices):
        steps = np.diff(sel.indices.astype(np.int64))
        starts = sel.indptr[1:-1]
        inside = np.ones(len(steps), dtype=bool)
        inside[starts[(starts > 0) & (starts < len(sel.indices))] - 1] = False
        if not (steps[inside] > 0).all():
            faults.append("indices do not ascend within a row")
        if sel.indices.min() < 0 or sel.indices.max() >= case.n:
            faults.append("indices out of range")
    return faults


def selection_faults(
    case: Case, sel: Any, truth: Truth | None = None, *, slack: tuple[float, float] | None = None
) -> list[str]:
    """All that is wrong with a Selection of this case; an empty list is the promise kept."""
    faults = structure_faults(case, sel)
    if faults:
        return [f"{fault} in {case.name}" for fault in faults]
    truth = truth or Truth(case)
    keep = keep_mask(case, sel.indptr, sel.indices)
    found: list[tuple[int, str]] = []

    def note(bad: np.ndarray, text: str) -> None:
        found.extend((int(row), text) for row in np.flatnonzero(bad))

    upper, lower, k, count = sel.tail_mass_upper, sel.tail_mass_lower, sel.k, truth.count
    note((keep & ~truth.visible).any(axis=1), "a hidden position is kept")
    found += truth.violations(keep, lower, upper)
    note(~((lower >= 0) & (lower <= upper) & (upper <= 1)), "interval not inside [0, 1]")

    empty, certified = sel.status == EMPTY, sel.status == CERTIFIED
    over = sel.status == OVER_BUDGET
    note(empty != (count == 0), "EMPTY does not mean: no visible key")
    note(empty & ((k != 0) | (upper != 0) | (lower != 0) | ~sel.minimal), "EMPTY row's numbers")
    note(certified & ~(upper <= case.eps), "CERTIFIED with upper > eps")
    note(over & ~(upper > case.eps), "OVER_BUDGET with upper <= eps")
    note(~(empty | certified | over), "unknown status")
    most = limit(case, count)
    note(over & (k >= count), "OVER_BUDGET although max_keep does not bite")
    note((k > most) & ~empty, "more than max_keep keys")

    note((truth.forced & ~keep).any(axis=1), "a forced key is missing")
    if case.block_size == 1:
        found += rank_faults(case, truth, keep)
        k_min = truth.minimal_k()
        note(certified & (k < k_min), "k below the exact minimum")
        note(certified & sel.minimal & (k != k_min), "minimal, but not the exact minimum")
        factor, flush = slack or (PROBS_SLACK if case.kind == "probs" else LOGITS_SLACK)
        loosest = truth.loosest_k(factor, flush)
        note(certified & (k > loosest), "k above what the slack allows")
        note(over & (k != most), "OVER_BUDGET with fewer keys than max_keep allows")
        note(over & (loosest <= most), "OVER_BUDGET although a set of max_keep keys fits")
    else:
        found += block_faults(case, truth, keep, sel)
    return [
        f"{text}: k={k[row]}, upper={float(upper[row])!r}, lower={float(lower[row])!r}, "
        f"minimal={sel.minimal[row]}, status={sel.status[row]}, {case.describe(row)}"
        for row, text in found
    ]


def rank_faults(case: Case, truth: Truth, keep: np.ndarray) -> list[tuple[int, str]]:
    """Rows whose kept set is not: the forced keys and the best of the others."""
    k = keep.sum(axis=1)
    top = np.zeros_like(keep)
    first = np.arange(case.n)[None, :] < k[:, None]
    np.put_along_axis(top, truth.order, first, axis=1)
    wrong = (top != keep).any(axis=1)
    found = []
    for row in np.flatnonzero(wrong):
        if case.bias() is not None and _swaps_are_close(truth, keep[row], int(row)):
            continue
        missing, extra = (
            np.flatnonzero(top[row] & ~keep[row]),
            np.flatnonzero(keep[row] & ~top[row]),
        )
        text = f"not the top set, lacks {missing[:8].tolist()}, has {extra[:8].tolist()}"
        found.append((int(row), text))
    return found


def _swaps_are_close(truth: Truth, keep: np.ndarray, row: int) -> bool:
    """Return True if every kept key is as good as every dropped one up to SWAP of its terms."""
    free = truth.visible[row] & ~truth.forced[row]
    case, key = truth.case, truth.key[row]
    bias = case.bias()
    assert bias is not None
    stored = np.where(free, case.scores[row].astype(np.float64), 0.0).astype(LD)
    size = np.abs(stored * LD(case.scale)) + np.abs(np.where(free, bias[row], 0.0))
    kept, dropped = free & keep, free & ~keep
    if not kept.any() or not dropped.any():
        return True
    worst_kept = np.min((key + SWAP * size)[kept])
    best_dropped = np.max((key - SWAP * size)[dropped])
    return bool(worst_kept >= best_dropped)


def block_faults(case: Case, truth: Truth, keep: np.ndarray, sel: Any) -> list[tuple[int, str]]:
    """Whole blocks only, as few as the exact oracle needs (or the slack, where not proven)."""
    found = []
    block = np.arange(case.n) // case.block_size
    for row in range(case.rows):
        blocks = set(block[keep[row]].tolist())
        whole = truth.visible[row] & np.isin(block, list(blocks))
        if (whole != keep[row]).any():
            found.append((row, "a block is kept in part"))
        if sel.status[row] != CERTIFIED:
            continue
        forced = np.flatnonzero(truth.forced[row]).tolist()
        exact = case.exact(row)

        def fewest(eps: Fraction, exact: ExactRow = exact, forced: list[int] = forced) -> int:
            kept = exact.minimal_blocks(eps, case.block_size, forced=forced, min_keep=case.min_keep)
            return len({i // case.block_size for i in kept})

        eps = Fraction(float(case.eps[row]))
        least = fewest(eps)
        factor, flush = PROBS_SLACK if case.kind == "probs" else LOGITS_SLACK
        most = fewest(max(eps * (1 - Fraction(factor)) - case.n * Fraction(flush), Fraction(0)))
        if not least <= len(blocks) <= most:
            found.append((row, f"{len(blocks)} blocks, the exact minimum is {least}"))
        if sel.minimal[row] and len(blocks) != least:
            found.append((row, f"minimal with {len(blocks)} blocks, exact minimum {least}"))
    return found


def certificate_faults(
    case: Case, keep: np.ndarray, cert: Any, truth: Truth | None = None, *, with_eps: bool = True
) -> list[str]:
    """All that is wrong with a Certificate of the kept sets `keep` (rows, n)."""
    truth = truth or Truth(case)
    found: list[tuple[int, str]] = []

    def note(bad: np.ndarray, text: str) -> None:
        found.extend((int(row), text) for row in np.flatnonzero(bad))

    upper, lower = cert.tail_mass_upper, cert.tail_mass_lower
    found += truth.violations(keep, lower, upper)
    note(~((lower >= 0) & (lower <= upper) & (upper <= 1)), "interval not inside [0, 1]")
    empty = truth.count == 0
    note(empty & ((upper != 0) | (lower != 0) | (cert.k != 0)), "EMPTY row's numbers")
    unkept = ~empty & ~keep.any(axis=1)
    note(unkept & ((upper != 1) | (lower != 1)), "an empty kept set must have mass [1, 1]")
    note(cert.k != keep.sum(axis=1), "k is not the size of the kept set")
    if with_eps:
        note(cert.holds != (upper <= case.eps), "holds is not: upper <= eps")
        if cert.minimal is not None:
            k_min = _unconstrained(case, truth).minimal_k()
            note(cert.minimal & cert.holds & (cert.k != k_min), "minimal, but smaller sets fit")
    return [
        f"{text}: k={cert.k[row]}, upper={float(upper[row])!r}, lower={float(lower[row])!r}, "
        f"{case.describe(row)}"
        for row, text in found
    ]


def _unconstrained(case: Case, truth: Truth) -> Truth:
    """The truth about the same rows without forced keys and other wishes; certify knows none."""
    plain = replace(case, min_keep=1, max_keep=None, keep_first=0, keep_last=0, block_size=1)
    wishes = case.min_keep != 1 or case.keep_first or case.keep_last or case.block_size != 1
    return Truth(plain) if wishes else truth
