"""Run the first paper's searches over balls around cells, for any partition of the keys.

The paper bounds the scores of a cell by its ball, U = q.c + |q| r. Its searches are run here as it
states them, in plain NumPy. They are judged by the number of keys that they score.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .common import Array, require_at_most

# Keys from which centres are found; all keys are then assigned to them.
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

    def upper(self, queries: Array, scale: float) -> Array:
        """Return upper bounds (queries, cells) of the scores scale q.k of each cell's keys."""
        norms = np.linalg.norm(queries, axis=1)
        return np.asarray(
            scale * (queries @ self.centres.T) + abs(scale) * norms[:, None] * self.radii
        )


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


def scored(scores: Array, upper: Array, cells: Balls, eps: float, gap: bool = False) -> Array:
    """Return the number of keys scored for each row, (queries,).

    Cells are opened by decreasing bound. MC-Search ends when the largest possible mass of all
    closed cells is within eps. Delta_k-Search (`gap`) ends when a gap behind the k best known keys,
    for any k, proves it.

    Raises:
        SystemExit: A bound is below a score of its cell.
    """
    n = scores.shape[1]
    inside = scores[:, cells.order]
    require_at_most("the bound of a cell", np.maximum.reduceat(inside, cells.starts, axis=1), upper)
    turn = np.argsort(-upper, axis=1, kind="stable")
    bound = np.take_along_axis(upper, turn, 1)
    sizes = cells.sizes[turn]
    if gap:
        opened = _opened_by_gap(inside, bound, turn, sizes, cells, eps, n)
    else:
        shift = scores.max(axis=1, keepdims=True)
        known = np.add.reduceat(np.exp(inside - shift), cells.starts, axis=1)
        known = np.cumsum(np.take_along_axis(known, turn, 1), axis=1)
        with np.errstate(over="ignore"):
            may = sizes * np.exp(bound - shift)
        # Closed after the first j + 1 cells: a sum of terms, never a difference of sums.
        left = np.zeros_like(may)
        left[:, :-1] = np.cumsum(may[:, :0:-1], axis=1)[:, ::-1]
        opened = 1 + (left <= eps / (1 - eps) * known).argmax(axis=1)
    return np.take_along_axis(np.cumsum(sizes, axis=1), opened[:, None] - 1, 1)[:, 0]


def _opened_by_gap(
    inside: Array, bound: Array, turn: Array, sizes: Array, cells: Balls, eps: float, n: int
) -> Array:
    """Return the number of cells that Delta_k-Search opens in each row."""
    rows = len(inside)
    k = np.arange(1, n + 1)
    with np.errstate(divide="ignore"):
        need = np.log((n - k) * (1 - eps) / (k * eps)) if eps > 0 else np.full(n, math.inf)
    need[-1] = -math.inf
    place = np.empty_like(turn)
    np.put_along_axis(place, turn, np.broadcast_to(np.arange(turn.shape[1]), turn.shape), 1)
    # The turn in which each key is scored.
    when = np.repeat(place, cells.sizes, axis=1)
    opened = np.zeros(rows, np.int64)
    for j in range(1, turn.shape[1] + 1):
        todo = np.flatnonzero(opened == 0)
        known = np.where(when[todo] < j, inside[todo], -math.inf)
        best = -np.sort(-known, axis=1)
        after = np.full((len(todo), 1), -math.inf)
        following = np.concatenate([best[:, 1:], after], axis=1)
        if j < turn.shape[1]:
            following = np.maximum(following, bound[todo, j : j + 1])
        count = np.cumsum(sizes[todo], axis=1)[:, j - 1 : j]
        with np.errstate(invalid="ignore"):
            proven = (best - following >= need) & (k <= count)
        proven[:, -1] = count[:, 0] == n
        opened[todo[proven.any(axis=1)]] = j
        if (opened > 0).all():
            break
    return opened
