"""A float64 oracle for what is about to be timed. It shares no code with the library.

Nothing is sorted, since the optimum can be recognised: a set is the best of its size if no dropped
key ranks above a kept one, and it is the smallest that fits if without its worst key it does not.
Masses are direct sums of float64 exponentials. Their relative error is below 2**-42 for rows of
up to 2**24 scores (argument 2**-43 where the weight is above 1e-300, exp a few 2**-53, pairwise
sums 2**-48), so MARGIN covers it sixteen times; verdicts inside the margin go to the library.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

import certk_rs as ck

from .rows import Array

MARGIN = 2.0**-38
# The share of eps by which a row that is not flagged `minimal` may overshoot the least k.
OPEN = 2.0**-13
CERTIFIED = 0
CHUNK = 1 << 22  # scores widened at a time

Mask = NDArray[np.bool_]


class CheckFailedError(Exception):
    """A result that was to be timed is wrong."""


def _parts(scores: Array) -> list[slice]:
    """Slices of whole rows that widen to at most CHUNK scores."""
    step = max(CHUNK // scores.shape[1], 1)
    return [slice(at, at + step) for at in range(0, scores.shape[0], step)]


def _masses(scores: Array, keep: Mask) -> tuple[Array, Array, Array]:
    """(rows,) weight kept, weight dropped and the least kept weight; hidden keys weigh 0."""
    weight = np.exp(scores - scores.max(axis=1, keepdims=True))
    head = np.where(keep, weight, 0.0).sum(axis=1)
    tail = np.where(keep, 0.0, weight).sum(axis=1)
    return head, tail, np.where(keep, weight, np.inf).min(axis=1)


def _outside(tail: Array, lower: Array, upper: Array) -> Mask:
    """(rows,) whether a tail mass is certainly not in [lower, upper]."""
    low, high = tail * (1 - MARGIN) - 1e-300, tail * (1 + MARGIN) + 1e-300
    return np.asarray((lower > high) | (upper < low))


def _rank_faults(scores: Array, keep: Mask) -> Mask:
    """(rows,) whether a dropped key ranks above a kept one; equal scores: lower index first."""
    least = np.where(keep, scores, np.inf).min(axis=1, keepdims=True)
    dropped = ~keep & (scores > -np.inf)
    tied = scores == least
    places = np.arange(scores.shape[1])
    first_dropped = np.where(tied & dropped, places, places.size).min(axis=1)
    last_kept = np.where(tied & keep, places, -1).max(axis=1)
    return np.asarray((dropped & (scores > least)).any(axis=1) | (first_dropped < last_kept))


def _fail(what: str, bad: ArrayLike, offset: int = 0) -> None:
    """Raise for the first row that is bad; `bad` (rows,) bool."""
    if np.any(bad):
        raise CheckFailedError(f"row {offset + int(np.argmax(bad))}: {what}")


def kept_mask(sel: ck.Selection, rows: slice, n: int) -> Mask:
    """(rows, n) bool of some rows of a selection; raises where an index is listed twice."""
    start, stop, _ = rows.indices(len(sel.indptr) - 1)
    bounds = sel.indptr[start : stop + 1]
    keep = np.zeros((stop - start, n), dtype=np.bool_)
    owner = np.repeat(np.arange(stop - start), np.diff(bounds))
    keep[owner, sel.indices[bounds[0] : bounds[-1]]] = True
    _fail("an index is listed twice", keep.sum(axis=1) != sel.k.reshape(-1)[rows], start)
    return keep


def check_selection(scores: Array, sel: ck.Selection, eps: float) -> None:
    """Raise `CheckFailedError` unless every row is certified, right and as small as promised.

    `scores` (rows, n) of any float dtype, hidden keys -inf.
    """
    for part in _parts(scores):
        row = scores[part].astype(np.float64)
        keep = kept_mask(sel, part, row.shape[1])
        k, minimal = (array.reshape(-1)[part] for array in (sel.k, sel.minimal))
        lower = sel.tail_mass_lower.reshape(-1)[part]
        upper = sel.tail_mass_upper.reshape(-1)[part]
        _fail("a hidden key is kept", (keep & np.isneginf(row)).any(axis=1), part.start)
        _fail("nothing is kept", k < 1, part.start)
        _fail("not CERTIFIED", sel.status.reshape(-1)[part] != CERTIFIED, part.start)
        _fail("the certificate exceeds eps", ~(upper <= eps), part.start)
        _fail("not the top k", _rank_faults(row, keep), part.start)
        head, tail, worst = _masses(row, keep)
        total = head + tail
        _fail("the tail mass is outside", _outside(tail / total, lower, upper), part.start)
        fewer = (tail + worst) / total
        needless = (k > 1) & (fewer <= np.where(minimal, eps, eps * (1 - OPEN)) * (1 - MARGIN))
        _fail("fewer keys would do", needless, part.start)


def check_certificate(scores: Array, sel: ck.Selection, cert: ck.Certificate) -> None:
    """Raise unless each interval holds the tail mass of what the selection keeps."""
    for part in _parts(scores):
        row = scores[part].astype(np.float64)
        head, tail, _ = _masses(row, kept_mask(sel, part, row.shape[1]))
        lower = cert.tail_mass_lower.reshape(-1)[part]
        upper = cert.tail_mass_upper.reshape(-1)[part]
        _fail("the tail mass is outside", _outside(tail / (head + tail), lower, upper), part.start)


def check_keep_set(scores: Array, found: ck.KeepSet, eps: float) -> None:
    """Raise unless every row is within eps, its interval is right and the bound is no lie."""
    one = np.zeros(scores.shape[1], dtype=np.bool_)
    one[found.indices] = True
    lower, upper = found.tail_mass_lower.reshape(-1), found.tail_mass_upper.reshape(-1)
    for part in _parts(scores):
        row = scores[part].astype(np.float64)
        head, tail, _ = _masses(row, np.broadcast_to(one, row.shape))
        outside = _outside(tail / (head + tail), lower[part], upper[part])
        _fail("the tail mass is outside", outside, part.start)
    _fail("the certificate exceeds eps", ~(upper <= eps))
    if not found.lower_bound <= found.k == int(one.sum()):
        raise CheckFailedError(f"{found.k} keys against a lower bound of {found.lower_bound}")
