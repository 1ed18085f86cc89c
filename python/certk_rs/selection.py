"""Certified selection of the smallest kept set per row, and certificates for given sets."""

from __future__ import annotations

from numpy.typing import ArrayLike

from . import _native
from ._arrays.kept import Keep, as_native_kept
from ._arrays.rows import as_native_rows, budgets
from .results import Certificate, Selection


def select(
    scores: ArrayLike,
    eps: ArrayLike,
    *,
    kind: str = "logits",
    scale: float = 1.0,
    mask: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    indptr: ArrayLike | None = None,
    causal_offset: int | None = None,
    min_keep: int = 1,
    max_keep: int | float | None = None,
    keep_first: int = 0,
    keep_last: int = 0,
    block_size: int = 1,
    prove_minimal: bool = False,
    threads: int | None = None,
) -> Selection:
    """Keep, in each row, the fewest keys whose dropped softmax mass is proven to be within eps.

    The proof is about the real-number softmax of exactly the stored scores, times `scale`, plus
    `mask`: all rounding is inside. The answer is the same, bit for bit, for any number of threads
    and any instruction set. Keys rank by score, equal scores by lower index first; -inf is a mask.
    An array that another thread writes during the call gets certificates of no particular row.

    Args:
        scores: (..., n), n the keys of a row, in natural-log units; float16, bfloat16 (torch or
            ml_dtypes), float32, float64; NumPy or torch CPU, read in place where the last axis is
            contiguous; lists become float64. With `indptr` one flat buffer of ragged rows.
        eps: Budget of dropped mass, 0 <= eps < 1: a number, or one per row, in the batch shape.
        kind: "logits"; or "logprobs" or "probs", renormalised by their own sum (a probability of 0
            is a mask, and neither scale nor an additive mask goes with "probs").
        scale: Multiplies the scores; any finite float64, also negative or 0.
        mask: Broadcasts to the shape of scores. Boolean (True = may be kept), or an additive bias
            in natural-log units, in which entries <= finfo.min / 2 of its dtype mask the key.
        lengths: Valid prefix of each row; integers in the batch shape, or one for all.
        indptr: (rows + 1,) integers: row r is scores[indptr[r]:indptr[r + 1]], and its indices are
            relative to that. Goes without mask, lengths and causal_offset.
        causal_offset: Row i of the second-last axis sees positions <= i + causal_offset.
        min_keep: The fewest keys to keep (all visible ones where there are fewer).
        max_keep: The most keys to keep: an int is a count, a float in (0, 1] a fraction of the
            visible keys, rounded down, at least 1. Rows pushed over eps get status OVER_BUDGET.
        keep_first: Visible positions at the start of each row that are always kept.
        keep_last: Visible positions at the end of each row that are always kept.
        block_size: Keep the fewest whole blocks of this many positions, ranked by their mass; the
            last block may be short, and `minimal` then speaks of the number of blocks.
        prove_minimal: Decide rows again in float64 where the fast arithmetic leaves it open
            whether k is minimal.
        threads: The most threads that the call uses, itself included; None for all available
            (RAYON_NUM_THREADS, else what affinity and CPU quotas lend). No more than that are ever
            started, and calls at the same time share them.

    Returns:
        A `Selection`; every row is CERTIFIED, or says that it is OVER_BUDGET or EMPTY.

    Raises:
        CertkError: Bad input; the message names the argument and the place.
    """
    rows, data, starts = as_native_rows(scores, mask, lengths, indptr, kind, scale, causal_offset)
    found = _native.select(
        rows,
        budgets(eps, data, starts),
        min_keep,
        max_keep,
        keep_first,
        keep_last,
        block_size,
        prove_minimal,
        threads,
    )
    return Selection._of(found)


def certify(
    scores: ArrayLike,
    keep: Keep,
    *,
    eps: ArrayLike | None = None,
    kind: str = "logits",
    scale: float = 1.0,
    mask: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    indptr: ArrayLike | None = None,
    causal_offset: int | None = None,
    threads: int | None = None,
    independent: bool = False,
) -> Certificate:
    """Bound the mass that a given kept set drops from each row, with a proof.

    Args:
        scores: As in `select`, and so are all options that are not listed here.
        keep: A boolean mask that broadcasts to the scores (only bool dtype is a mask); a
            `Selection`; integer indices (..., k) padded with -1; a list with one array of indices
            per row, in any order; for one row also a flat list of indices.
        eps: Budget per row to judge the set by; fills `holds` and `minimal`. What float32 leaves
            open is judged again in float64 for `holds`, not for `minimal`.
        kind: See `select`.
        scale: See `select`.
        mask: See `select`. A kept key that is masked adds nothing to the kept mass.
        lengths: See `select`.
        indptr: See `select`.
        causal_offset: See `select`.
        threads: See `select`.
        independent: Use the slow checker, which shares no kernel with the selector.

    Returns:
        A `Certificate`. An empty set has tail mass [1, 1] where the row has visible keys, else 0.

    Raises:
        CertkError: Bad input, also an index that is out of range or listed twice.
    """
    rows, data, starts = as_native_rows(scores, mask, lengths, indptr, kind, scale, causal_offset)
    budget = None if eps is None else budgets(eps, data, starts)
    kept = as_native_kept(keep, data, starts)
    found = _native.certify(rows, budget, kept, independent, threads)
    return Certificate._of(found)
