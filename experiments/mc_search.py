"""MC-Search of the first paper (arXiv 2512.07647), over any partition of the keys into cells.

The scores of a cell are bounded by a ball around its keys: U = q.c + |q| r. Cells are scored by
falling bound until the largest mass that all others can have is within the budget. This is plain
float64 without outward rounding: it counts the keys that the paper's algorithm scores. Certified
searches are those of `certk_rs.KeyIndex`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from papers.common import Array, Head, require_at_most

# Keys from which centres of clusters are found; all keys are then assigned to them.
SAMPLE = 4096
STEPS = 12


@dataclass(frozen=True)
class Balls:
    """Cells of keys: key `order[i]` is in the cell whose `starts` is the last one at most i."""

    order: Array
    starts: Array
    sizes: Array
    centres: Array
    radii: Array

    def upper(self, query: Array, scale: float) -> Array:
        """Return upper bounds (cells,) of the scores scale q.k of each cell's keys."""
        reach = abs(scale) * np.linalg.norm(query) * self.radii
        return np.asarray(scale * (self.centres @ query) + reach)

    def keys(self, cells: Array) -> Array:
        """Return the keys of these cells, cell after cell."""
        spans = zip(self.starts[cells], self.sizes[cells], strict=True)
        return np.concatenate([self.order[start : start + size] for start, size in spans])

    def largest(self, scores: Array) -> Array:
        """Return the largest score of each cell, (cells,), of scores (n,)."""
        return np.asarray(np.maximum.reduceat(scores[self.order], self.starts))


@dataclass(frozen=True)
class Found:
    """Positions of the keys scored, in the order in which cells were opened, and of those kept."""

    scored: Array
    kept: Array


Search = Callable[[Array, Array, Balls, float], Found]


def consecutive(n: int, size: int) -> Array:
    """Return the cell of each key if cells are runs of so many keys."""
    return np.arange(n) // size


def clustered(keys: Array, size: int, rng: np.random.Generator) -> Array:
    """Return the cell of each key if cells are clusters (k-means) of so many keys in the mean."""
    n = len(keys)
    count = -(-n // size)
    some = keys[rng.choice(n, min(n, max(SAMPLE, count)), replace=False)]
    centres = some[rng.choice(len(some), count, replace=False)]
    for _ in range(STEPS):
        nearest = _nearest(some, centres)
        members = np.bincount(nearest, minlength=count)
        sums = np.zeros_like(centres)
        np.add.at(sums, nearest, some)
        # A centre without members stays.
        centres = np.where(members[:, None] > 0, sums / np.maximum(members, 1)[:, None], centres)
    return _nearest(keys, centres)


def _nearest(keys: Array, centres: Array) -> Array:
    half = 0.5 * np.square(centres).sum(axis=1)
    parts = [
        (keys[at : at + SAMPLE] @ centres.T - half).argmax(axis=1)
        for at in range(0, len(keys), SAMPLE)
    ]
    return np.concatenate(parts)


def balls(keys: Array, cells: Array) -> Balls:
    """Return balls around the means of cells; cells without keys are left out."""
    order = np.argsort(cells, kind="stable")
    _, starts, sizes = np.unique(cells[order], return_index=True, return_counts=True)
    centres = np.add.reduceat(keys[order], starts, axis=0) / sizes[:, None]
    far = np.linalg.norm(keys[order] - np.repeat(centres, sizes, axis=0), axis=1)
    # Rounding of norms and products is far below this.
    radii = np.maximum.reduceat(far, starts) * (1 + 1e-9)
    return Balls(order, starts, sizes, centres, radii)


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
