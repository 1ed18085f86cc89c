"""Partitions of keys into cells, and balls around the cells that bound scores.

A score q.k of a key within r of the centre c of its cell is at most q.c + |q| r. MC-Search and
Delta_k-Search of the first paper (arXiv 2512.07647) open cells by such bounds; which partition the
paper takes is not known to us.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from papers.common import Array

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
