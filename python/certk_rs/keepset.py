"""One kept set for many rows (queries), with a proven lower bound on its size."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from . import _native
from ._arrays import coerce
from ._arrays.rows import as_native_rows, budgets
from .errors import CertkError
from .paged_rows import RowsLike, native_rows
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
    effort: str = "default",
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
        effort: How far the search goes: "default", to a set within 0.5 % of the lower bound, or
            until the bound of many keys hardly grows (a small set is searched to the end); "fast",
            to the first within 2 %; "thorough", until nothing improves, several times as long.
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
        effort=effort,
        threads=threads,
    )


def keep_set_of_queries(
    queries: ArrayLike,
    keys: RowsLike,
    eps: ArrayLike,
    *,
    scale: float | None = None,
    causal_offset: int | None = None,
    max_keep: int | float | None = None,
    keep_first: int = 0,
    keep_last: int = 0,
    block_size: int = 1,
    effort: str = "default",
    threads: int | None = None,
) -> KeepSet:
    """Do as `keep_set` for scores scale * q.k that are never held all at once.

    The certificates hold for the real-number products of the stored vectors. Memory is needed for
    the vectors, a few numbers per query and per key, and the rows that set a limit, so that a
    million queries are a matter of passes. Rows far from their budgets are certified by products in
    float32, whose rounding is inside the proof (their intervals are wider for it), the others in
    float64. Results depend neither on `threads` nor on the instruction set.

    Args:
        queries: (m, d) or (heads, m, d): float32, float16 or bfloat16, all finite.
        keys: (n, d) or (kv_heads, n, d), likewise; `heads` is a multiple of `kv_heads`, and
            neighbouring query heads share one. Keys of all heads share their positions: one set
            serves all heads.
        eps: Budget of dropped mass, 0 <= eps < 1: a number, or one per query, (m,) or (heads, m).
        scale: Of a product, its score; None: the float64 nearest d^-1/2.
        causal_offset: Query i of any head sees the keys <= i + causal_offset; None: all.
        max_keep: The most keys to keep; see `keep_set`. A fraction is one of the keys that any
            query sees. Rounded down to whole blocks.
        keep_first: Positions at the start that are always kept, with their blocks.
        keep_last: The same at the end, counted over the positions that any query sees.
        block_size: Keys are kept in whole blocks of so many neighbours, starting at position 0;
            the last one may be shorter, and of each what some query sees is kept. The number of
            blocks is made small.
        effort: See `keep_set`.
        threads: See `select`.

    Returns:
        A `KeepSet` of shape (m, n) or (heads, m, n). With blocks, its `lower_bound` is the number
        of keys in the smallest sets of b blocks, where no set of fewer than b will do.

    Raises:
        CertkError: Bad input; the message names the argument and the place.
    """
    stored = array, _ = coerce.as_native_floats("queries", queries)
    stored_keys, of_keys = native_rows("keys", keys)
    for name, shape in (("queries", array.shape), ("keys", of_keys)):
        if len(shape) not in (2, 3) or shape[-1] == 0:
            raise CertkError(
                f"{name} has shape {shape}; pass (count, d) or (heads, count, d), d >= 1"
            )
    found = _native.keep_set_of_queries(
        [(stored, stored_keys, _scale(scale, array.shape[-1]))],
        budgets(eps, array, None),
        None,
        None,
        0.0,
        16,
        causal_offset,
        max_keep,
        keep_first,
        keep_last,
        block_size,
        effort,
        threads,
    )
    return KeepSet._of(found, status=Status(found.status))


def _scale(scale: float | None, d: int) -> float:
    if scale is None:
        return _native.nearest_rsqrt(d)
    number = coerce.floats("scale", scale)
    if number.shape != () or not np.isfinite(number):
        raise CertkError(f"scale is {scale!r}; pass one finite number, or None for d^-1/2")
    return float(number)


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
    effort: str = "default",
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
        effort,
        threads,
    )
    return KeepSet._of(found, status=Status(found.status))
