"""Certificates from ordered scores of the first paper (arXiv 2512.07647), in NumPy.

The single gap is its Theorem 4.5, blocks are its equation 4.4 and multi-gap is named in its
abstract; numbers are those of notes that quote it. This is plain float64 without outward rounding.
Certified bounds are `certk_rs.bounds.single_gap`, `multi_gap`, `blockwise` and `smallest_k`.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from papers.common import Array


def share(dropped: float, kept: float) -> float:
    """Return the tail mass of weights of which so much is dropped and so much kept."""
    return dropped / (dropped + kept) if dropped else 0.0


def single_gap(scores: Array, k: int) -> float:
    """Bound the tail mass of the top k of a row (n,) by the two scores at the boundary."""
    ranked, n = -np.sort(-scores), len(scores)
    if k == n:
        return 0.0
    return share(n - k, k * np.exp(ranked[k - 1] - ranked[k]))


def multi_gap(scores: Array, k: int, cuts: list[int]) -> float:
    """Bound the tail mass of the top k by the scores at k and at other ranks, 0 < rank < n.

    A run of the tail weighs at most its size times its first weight, and a run of the head at least
    its size times its last one.
    """
    weights = np.exp(-np.sort(-scores) - scores.max())
    ends = [0, *sorted({k, *cuts}), len(scores)]
    runs = [(a, b) for a, b in pairwise(ends) if a < b]
    dropped = sum((b - a) * weights[a] for a, b in runs if a >= k)
    return share(float(dropped), float(sum((b - a) * weights[b - 1] for a, b in runs if b <= k)))


def blockwise(sizes: Array, upper: Array, lower: Array, kept: Array) -> float:
    """Bound the tail mass of whole blocks by bounds of their scores, all (blocks,)."""
    top = upper.max()
    dropped = sizes * np.exp(upper - top) * ~kept
    return share(float(dropped.sum()), float((sizes * np.exp(lower - top) * kept).sum()))


def smallest_k(scores: Array, eps: float) -> int:
    """Return the smallest k for which the single gap proves at most eps to be dropped."""
    return next(k for k in range(1, len(scores) + 1) if single_gap(scores, k) <= eps)
