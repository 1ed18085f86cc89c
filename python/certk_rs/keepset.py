"""One kept set for many rows (queries), with a proven lower bound on its size."""

from __future__ import annotations

from numpy.typing import ArrayLike

from . import _native
from ._arrays import coerce
from ._arrays.rows import as_native_rows, budgets
from .errors import CertkError
from .results import KeepSet, Status


def keep_set(
    scores: ArrayLike,
    eps: ArrayLike,
    *,
    kind: str = "logits",
    scale: float = 1.0,
    mask: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    indptr: ArrayLike | None = None,
    causal_offset: int | None = None,
    max_keep: int | float | None = None,
    keep_first: int = 0,
    keep_last: int = 0,
    threads: int | None = None,
) -> KeepSet:
    """Find a small set of keys that is within every row's budget at once, and bound the smallest.

    The promise covers the listed rows only, and says nothing about queries that were not given.

    Args:
        scores: (rows, n) or (..., n): one row per query, n the keys they share; dtypes and all
            row options as in `certk_rs.select`.
        eps: Budget of dropped mass, 0 <= eps < 1: a number, or one per row, in the batch shape.
        kind: See `select`.
        scale: See `select`.
        mask: See `select`.
        lengths: See `select`.
        indptr: Not possible: ragged rows share no keys.
        causal_offset: See `select`.
        max_keep: The most keys to keep, a count or a fraction as in `select`; where it bites, the
            worst ratio of tail mass to budget is made small, and status is OVER_BUDGET.
        keep_first: Positions at the start that are always kept.
        keep_last: Positions at the end that are always kept.
        threads: See `select`.

    Returns:
        A `KeepSet` with a certificate per row. Its `lower_bound` refers to sets under the same
        constraints; over budget, to sets that reach max(eps, tail_mass_upper) in every row.

    Raises:
        CertkError: Bad input; the message names the argument and the place.
    """
    if indptr is not None:
        raise CertkError("indptr is given, but one set needs rows over the same keys; leave it out")
    return keep_set_of_inexact(
        scores,
        eps,
        radius=None,
        kind=kind,
        scale=scale,
        mask=mask,
        lengths=lengths,
        causal_offset=causal_offset,
        max_keep=max_keep,
        keep_first=keep_first,
        keep_last=keep_last,
        threads=threads,
    )


def keep_set_of_inexact(
    scores: ArrayLike,
    eps: ArrayLike,
    *,
    radius: ArrayLike | None,
    kind: str = "logits",
    scale: float = 1.0,
    mask: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    causal_offset: int | None = None,
    max_keep: int | float | None = None,
    keep_first: int = 0,
    keep_last: int = 0,
    threads: int | None = None,
) -> KeepSet:
    """Do as `keep_set` for scores that were computed with rounding; used by the jobs.

    `radius` says how far a stored score may be from the real one, in natural-log units after scale:
    a number, or one per row, in the batch shape. The certificates hold for the real scores. The
    other arguments, the result and the errors are those of `keep_set`.
    """
    rows, data, _ = as_native_rows(scores, mask, lengths, None, kind, scale, causal_offset)
    batch = data.shape[:-1]
    spread = None if radius is None else coerce.per_row_floats("radius", radius, batch)
    found = _native.keep_set(
        rows,
        budgets(eps, data, None),
        None if spread is None else spread.reshape(-1),
        max_keep,
        keep_first,
        keep_last,
        threads,
    )
    return KeepSet._of(found, status=Status(found.status))
