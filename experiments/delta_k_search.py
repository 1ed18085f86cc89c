"""Delta_k-Search of the first paper (arXiv 2512.07647), over any partition of the keys into cells.

Cells are scored by falling bound, as in MC-Search. The k best known keys may stay as soon as the
gap behind them, to the largest score that any other key may have, is at least
ln[(n - k)(1 - eps) / (k eps)]. This is plain float64 without outward rounding: it counts the keys
that the paper's algorithm scores. Certified searches are those of `certk_rs.KeyIndex`.
"""

from __future__ import annotations

import numpy as np
from cells import Balls
from mc_search import Found
from papers.common import Array, require_at_most


def gaps_needed(n: int, eps: float) -> Array:
    """Return the gap that proves eps behind the k best of n keys, for k = 1 .. n; (n,), nats."""
    k = np.arange(1, n + 1)
    if eps == 0:
        needed = np.full(n, np.inf)
    else:
        with np.errstate(divide="ignore"):
            needed = np.log((n - k) * (1 - eps) / (k * eps))
    # Nothing is dropped.
    needed[-1] = -np.inf
    return needed


def delta_k_search(scores: Array, upper: Array, cells: Balls, eps: float) -> Found:
    """Search a row of scores (n,), of which those of opened cells alone are used.

    Args:
        scores: Scores in natural-log units, (n,).
        upper: A bound for each cell, as `Balls.upper` gives it.
        cells: The partition of the keys.
        eps: Budget of dropped softmax mass, 0 <= eps < 1.

    Raises:
        SystemExit: A bound is below a score of its cell.
    """
    require_at_most("the bound of a cell", cells.largest(scores), upper)
    needed = gaps_needed(len(scores), eps)
    turn = np.argsort(-upper, kind="stable")
    order = cells.keys(turn)
    for opened, count in enumerate(np.cumsum(cells.sizes[turn]).tolist(), start=1):
        best = order[:count][np.argsort(-scores[order[:count]], kind="stable")]
        closed = upper[turn[opened]] if opened < len(turn) else -np.inf
        # The largest score of all others: of those that were scored, too.
        others = np.maximum(np.append(scores[best[1:]], -np.inf), closed)
        proven = scores[best] - others >= needed[:count]
        if proven.any():
            return Found(order[:count], best[: 1 + int(proven.argmax())])
    raise AssertionError("nothing is needed behind all keys")
