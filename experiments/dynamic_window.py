"""Dynamic windows of the second paper (arXiv 2404.02690, as a summary tells it), in NumPy.

Each row of an attention matrix keeps its ceil(alpha n^C) largest entries, scaled to sum 1. The
error is the spectral norm of the change over n. Certified counterparts are
`certk_rs.windows.WindowPolicy`, `scale_r` and `effective`, and `certk_rs.certify` for the mass that
a window drops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from papers.common import Array


def scale_r(bound: float, query_weights: Array, key_weights: Array) -> float:
    """Return R = B^2 ||W_Q W_K^T||_F of weights (d, d_head)."""
    return float(bound**2 * np.linalg.norm(query_weights @ key_weights.T))


def size(n: int, alpha: float, exponent: float) -> int:
    """Return the keys of a window, from 1 to n."""
    return min(n, max(1, math.ceil(alpha * math.pow(n, exponent))))


def equal_alpha(lengths: Sequence[int], exponent: float, constant: float) -> float:
    """Return the alpha by which n rows of each length keep as many keys as a constant window."""
    return constant * sum(lengths) / sum(math.pow(n, 1 + exponent) for n in lengths)


def attention(scores: Array) -> Array:
    """Return the softmax of each row of (m, n) scores."""
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def windowed(shares: Array, k: int) -> Array:
    """Return attention with the k largest entries of each row alone, scaled to sum 1."""
    order = np.argsort(-shares, axis=1, kind="stable")[:, :k]
    few = np.zeros_like(shares)
    np.put_along_axis(few, order, np.take_along_axis(shares, order, 1), 1)
    return np.asarray(few / few.sum(axis=1, keepdims=True))


def effective(shares: Array, level: float) -> Array:
    """Return how many entries of each row are at least the level, (m,)."""
    return np.asarray((shares >= level).sum(axis=1))


def error(dense: Array, sparse: Array) -> float:
    """Return (1/n) ||sparse - dense||_2; at most sqrt(2/n) for any rows of probabilities."""
    return float(np.linalg.norm(sparse - dense, 2) / len(dense))
