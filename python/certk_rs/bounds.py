"""Upper bounds on the tail mass from a few ordered scores, and the identity with the divergence.

From "A Mathematical Theory of Top-k Sparse Attention via Total Variation Distance" (arXiv
2512.07647). A row has scores s_1 .. s_n in natural-log units, in any order; entries at -inf are
masked and not counted in n. The tail mass tau of a kept set is the share of sum_i exp(s_i) that
lies outside of it, and equals the total variation distance between the full and the truncated
softmax.

Every bound is rounded outward: it holds for the real-number softmax of exactly the stored scores.
For two-level rows the gap bounds are equalities, met to within 1e-12. They are diagnostics and
building blocks: on real attention rows the single gap keeps far more keys than the exact test of
`certk_rs.select`, and `smallest_k` shows how many. Results are read-only NumPy arrays with the
batch shape of the arguments, of shape () for a single row, and the same for any number of threads.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _native
from ._arrays import coerce
from ._arrays.rows import budgets
from ._ragged import padded
from .errors import CertkError
from .output import OutputError, output_error

__all__ = [
    "OutputError",
    "Rule",
    "best_cuts",
    "blockwise",
    "bretagnolle_huber",
    "kl_from_tail_mass",
    "multi_gap",
    "output_error",
    "pinsker",
    "required_gap",
    "score_gap",
    "single_gap",
    "smallest_k",
    "tail_mass_from_kl",
]

Rule = Literal["exact", "single_gap", "multi_gap", "threshold"]
Number = TypeVar("Number", np.float64, np.int64)


def kl_from_tail_mass(tail_mass: ArrayLike) -> NDArray[np.float64]:
    """Return the divergence KL(P_hat || P) = -ln(1 - tail_mass) of a truncated softmax, in nats.

    Args:
        tail_mass: Numbers in [0, 1], of any shape.

    Returns:
        float64 of the same shape, rounded up: an upper end stays an upper end. Increasing in the
        argument; exactly 0 at 0 and inf at 1.

    Raises:
        CertkError: A value that is NaN or outside [0, 1].
    """
    values = coerce.floats("tail_mass", tail_mass)
    return _shaped(_native.kl_from_tail_mass(values), values.shape)


def tail_mass_from_kl(kl: ArrayLike) -> NDArray[np.float64]:
    """Return the tail mass 1 - exp(-kl) that belongs to a divergence KL(P_hat || P) of kl nats.

    Args:
        kl: Numbers >= 0, inf included, of any shape.

    Returns:
        float64 of the same shape, rounded up and at most 1: an upper end stays an upper end.
        Increasing in the argument; exactly 0 at 0.

    Raises:
        CertkError: A value that is NaN or negative.
    """
    values = coerce.floats("kl", kl)
    return _shaped(_native.tail_mass_from_kl(values), values.shape)


def pinsker(kl: ArrayLike) -> NDArray[np.float64]:
    """Return what Pinsker's inequality says of a total variation distance: sqrt(kl / 2).

    It holds for any two distributions. Where one is the other cut off, `tail_mass_from_kl` is the
    distance itself, which is what the identity of arXiv 2512.07647 (Theorem 4.3) gains.

    Args:
        kl: Divergences in nats, numbers >= 0, inf included, of any shape.

    Returns:
        float64 of the same shape, rounded up; above kl = 2 it exceeds 1 and says nothing.

    Raises:
        CertkError: A value that is NaN or negative.
    """
    values = coerce.floats("kl", kl)
    return _shaped(_native.pinsker(values), values.shape)


def bretagnolle_huber(kl: ArrayLike) -> NDArray[np.float64]:
    """Return what Bretagnolle and Huber say of a total variation distance: sqrt(1 - exp(-kl)).

    As `pinsker` for any two distributions, and never above 1. `tail_mass_from_kl` is its square:
    what the generic inequality loses is a square root.

    Args:
        kl: Divergences in nats, numbers >= 0, inf included, of any shape.

    Returns:
        float64 of the same shape, rounded up.

    Raises:
        CertkError: A value that is NaN or negative.
    """
    values = coerce.floats("kl", kl)
    return _shaped(_native.bretagnolle_huber(values), values.shape)


def required_gap(n: ArrayLike, k: ArrayLike, eps: ArrayLike) -> NDArray[np.float64]:
    """Return the gap s_(k) - s_(k+1) that certifies a tail mass <= eps for the k best of n scores.

    It is ln[(n - k)(1 - eps) / (k eps)], in nats: the single-gap certificate of arXiv 2512.07647.

    Args:
        n: Unmasked scores of the row, an integer >= 0.
        k: Scores kept, an integer, 0 <= k <= n.
        eps: Budget, 0 <= eps < 1. All three broadcast.

    Returns:
        float64, rounded up. -inf where k = n, otherwise +inf where eps = 0 or k = 0. A value <= 0
        says that k best scores suffice whatever they are; that sign is decided in integers.

    Raises:
        CertkError: An argument out of its range, or shapes that do not broadcast.
    """
    rows, kept, budget = _together(
        n=coerce.integers("n", n), k=coerce.integers("k", k), eps=coerce.floats("eps", eps)
    )
    return _shaped(_native.required_gap(rows, kept, budget), rows.shape)


def score_gap(
    scores: ArrayLike, k: ArrayLike, *, threads: int | None = None
) -> NDArray[np.float64]:
    """Return the gap s_(k) - s_(k+1) of each row, in nats, rounded down.

    Args:
        scores: (..., n) in any order; float16, bfloat16, float32 or float64.
        k: An integer, or one per row in the batch shape; 0 <= k <= unmasked scores of the row.
        threads: How many to use; None for all available.

    Returns:
        float64 in the batch shape (...). +inf where k is the whole row, otherwise -inf where k = 0,
        so that `score_gap(scores, k) >= required_gap(n, k, eps)` always proves the budget.

    Raises:
        CertkError: Bad input; the message names the argument and the place.
    """
    stored, kept, batch = _ranked(scores, k)
    return _shaped(_native.score_gap(stored, kept, threads), batch)


def single_gap(
    scores: ArrayLike, k: ArrayLike, *, threads: int | None = None
) -> NDArray[np.float64]:
    """Bound the tail mass of each row's top k by the two scores at the boundary.

    The bound is (n - k) / (n - k + k exp(gap)): the single gap of arXiv 2512.07647.

    Args:
        scores: (..., n) in any order; float16, bfloat16, float32 or float64.
        k: An integer, or one per row in the batch shape; 0 <= k <= unmasked scores of the row.
        threads: How many to use; None for all available.

    Returns:
        Upper bounds, float64 in the batch shape (...): exactly 0 where k is the whole row,
        otherwise 1 where k = 0. Where the gap is 0, the bound is (n - k) / n rounded up to the next
        float, so comparing it with a budget decides as integers would.

    Raises:
        CertkError: Bad input; the message names the argument and the place.
    """
    stored, kept, batch = _ranked(scores, k)
    return _shaped(_native.single_gap(stored, kept, threads), batch)


def multi_gap(
    scores: ArrayLike,
    k: ArrayLike,
    cuts: ArrayLike | None = None,
    n_cuts: int = 8,
    *,
    threads: int | None = None,
) -> NDArray[np.float64]:
    """Bound the tail mass of each row's top k by the scores at a few ranks.

    Each run of ranks between two cuts counts with its best score in the tail and with its worst in
    the head: the multi-gap of arXiv 2512.07647.

    Args:
        scores: (..., n) in any order; float16, bfloat16, float32 or float64.
        k: An integer, or one per row in the batch shape; 0 <= k <= unmasked scores of the row.
        cuts: Ranks, the same for all rows: strictly increasing, strictly inside (0, n), without k.
            Those above k cut the tail, those below it the head; `[]` is the single gap. None takes
            the best ones.
        n_cuts: How many cuts the best ones may be, tail and head together; unused with `cuts`.
        threads: How many to use; None for all available.

    Returns:
        Upper bounds, float64 in the batch shape (...): exactly 0 where k is the whole row,
        otherwise 1 where k = 0. Any cuts are sound; the best ones minimise the bound exactly, up to
        the rounding of float64, in time proportional to n times n_cuts.

    Raises:
        CertkError: Bad input; the message names the argument and the place.
    """
    stored, kept, batch = _ranked(scores, k)
    ranks = None
    if cuts is not None:
        ranks = coerce.integers("cuts", cuts)
        if ranks.ndim != 1:
            raise CertkError(f"cuts has shape {ranks.shape}; pass one list of ranks for all rows")
    found = _native.multi_gap(stored, kept, ranks, n_cuts, threads)
    return _shaped(found, batch)


def best_cuts(
    scores: ArrayLike, k: ArrayLike, n_cuts: int = 8, *, threads: int | None = None
) -> NDArray[np.int64]:
    """Return the cuts that `multi_gap` takes when it is given none.

    Args:
        scores: (..., n) in any order; float16, bfloat16, float32 or float64.
        k: An integer, or one per row in the batch shape; 0 <= k <= unmasked scores of the row.
        n_cuts: How many cuts, tail and head together.
        threads: How many to use; None for all available.

    Returns:
        (..., most) ranks, int64, ascending within a row and padded with -1, where most <= n_cuts is
        the largest number of cuts of any row. More cuts than these would not help.

    Raises:
        CertkError: Bad input; the message names the argument and the place.
    """
    stored, kept, batch = _ranked(scores, k)
    flat, counts = _native.best_cuts(stored, kept, n_cuts, threads)
    table = padded(flat, counts)
    return _shaped(table, (*batch, table.shape[1]))


def blockwise(
    sizes: ArrayLike,
    upper: ArrayLike,
    lower: ArrayLike,
    kept: ArrayLike,
    *,
    threads: int | None = None,
) -> NDArray[np.float64]:
    """Bound the tail mass of whole blocks of keys, from their sizes and bounds on their scores.

    The dropped weigh at most sum n_b exp(upper_b), the kept at least sum n_b exp(lower_b): the
    blockwise bound of arXiv 2512.07647. No score is needed, only sound bounds.

    Args:
        sizes: Unmasked keys per block, integers from 0 to 2**40; blocks along the last axis.
        upper: No score of the block is above this (natural-log units); +inf if nothing is known.
        lower: No score of the block is below this; -inf if nothing is known.
        kept: Boolean, True for the blocks that are kept. All four broadcast to (..., blocks).
        threads: How many to use; None for all available.

    Returns:
        Upper bounds, float64 of shape (...). Exactly 0 where nothing is dropped, otherwise 1 where
        nothing is kept or nothing is known of what is. Bounds of empty blocks, upper bounds of kept
        ones and lower bounds of dropped ones are not used.

    Raises:
        CertkError: A negative size, a NaN, lower above upper, or shapes that do not broadcast.
    """
    mask, dtype = coerce.borrow("kept", kept)
    if dtype != "bool":
        raise CertkError(f"kept has dtype {dtype}; pass bool, True for the blocks that are kept")
    counts, above, below, chosen = _together(
        sizes=coerce.integers("sizes", sizes),
        upper=coerce.floats("upper", upper),
        lower=coerce.floats("lower", lower),
        kept=mask,
    )
    found = _native.blockwise(counts, above, below, chosen.view(np.uint8), threads)
    return _shaped(found, counts.shape[:-1])


def smallest_k(
    scores: ArrayLike,
    eps: ArrayLike,
    rule: Rule = "exact",
    *,
    n_cuts: int = 8,
    threads: int | None = None,
) -> NDArray[np.int64]:
    """Return the smallest k whose top-k set a rule certifies, to compare rules on the same rows.

    Args:
        scores: (..., n) in any order; float16, bfloat16, float32 or float64.
        eps: Budget of dropped mass, 0 <= eps < 1: a number, or one per row in the batch shape.
        rule: "exact" is the k of `certk_rs.select(..., prove_minimal=True)`; "single_gap" and
            "multi_gap" (with the best cuts) are the smallest k at which that bound is within eps
            (or, for multi_gap and budgets below 1e-300, where weights underflow, a larger one);
            "threshold" counts the maximum and every score less than
            max(0, ln[(n - 1)(1 - eps) / eps]) below it.
        n_cuts: How many cuts multi_gap may use; unused by the other rules.
        threads: How many to use; None for all available.

    Returns:
        int64 in the batch shape (...); 0 for a row without unmasked scores, otherwise at least 1.
        Each is sound: the tail mass of the k best is at most eps in real arithmetic.

    Raises:
        CertkError: Bad input; the message names the argument and the place.
    """
    stored = data, _ = coerce.as_native_floats("scores", scores)
    budget = budgets(eps, data, None)
    if not isinstance(budget, float):
        budget = budget.reshape(-1)
    found = _native.smallest_k(stored, budget, rule, n_cuts, threads)
    return _shaped(found, data.shape[:-1])


def _ranked(
    scores: ArrayLike, k: ArrayLike
) -> tuple[tuple[NDArray[Any], str], NDArray[np.int64], tuple[int, ...]]:
    """Return the scores as `_native` takes them, k, and the batch shape."""
    stored = data, _ = coerce.as_native_floats("scores", scores)
    batch = data.shape[:-1]
    return stored, coerce.per_row_integers("k", k, batch), batch


def _together(**arrays: NDArray[Any]) -> list[Any]:
    """Broadcast to one shape, in fresh memory in C order."""
    try:
        wide = np.broadcast_arrays(*arrays.values())
    except ValueError:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise CertkError(f"shapes do not broadcast: {shapes}; make them agree") from None
    return [np.array(array, order="C", copy=True) for array in wide]


def _shaped(array: NDArray[Number], shape: tuple[int, ...]) -> NDArray[Number]:
    array = array.reshape(shape)
    array.setflags(write=False)
    return array
