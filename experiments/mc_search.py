"""MC-Search of the first paper (arXiv 2512.07647, as notes on it quote Algorithm 2), in NumPy.

Cells of keys are scored by falling bound until the largest mass that all others can have is within
the budget. This is plain float64 without outward rounding: it counts the keys that the paper's
algorithm scores. Certified searches are those of `certk_rs.KeyIndex`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from cells import Balls
from papers.common import Array, Head, require_at_most


@dataclass(frozen=True)
class Found:
    """Positions of the keys scored, in the order in which cells were opened, and of those kept."""

    scored: Array
    kept: Array


Search = Callable[[Array, Array, Balls, float], Found]


def mc_search(scores: Array, upper: Array, cells: Balls, eps: float) -> Found:
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
    turn, top = np.argsort(-upper, kind="stable"), upper.max()
    weights, odds = np.exp(scores - top), eps / (1 - eps)
    of_cells = np.add.reduceat(weights[cells.order], cells.starts)
    known = np.cumsum(of_cells[turn])
    # The mass that is closed behind each cell: a sum of terms, never a difference of sums.
    may = (cells.sizes * np.exp(upper - top))[turn]
    closed = np.append(np.cumsum(may[:0:-1])[::-1], 0.0)
    last = int((closed <= odds * known).argmax())
    scored = cells.keys(turn[: last + 1])
    # The fewest best of them: the others count among what is dropped.
    best = scored[np.argsort(-scores[scored], kind="stable")]
    head = np.cumsum(weights[best])
    dropped = closed[last] + np.append(np.cumsum(weights[best][:0:-1])[::-1], 0.0)
    return Found(scored, best[: 1 + int((dropped <= odds * head).argmax())])


def counted(search: Search, head: Head, cells: Balls, eps: float) -> Array:
    """Return the number of keys that a search scores for each query of a head, (queries,)."""
    uppers = (cells.upper(query, head.scale) for query in head.queries)
    found = (search(*row, cells, eps) for row in zip(head.scores, uppers, strict=True))
    return np.array([len(each.scored) for each in found])
