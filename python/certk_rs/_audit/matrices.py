"""Recorded matrices, and the proof that one bounds the sums of squares of vectors.

Of vectors e_i of d entries an output has a matrix R, about the sum of e_i e_i^T, and a number f. It
claims that for every direction q sum (q.e_i)^2 is at most (sqrt(q.R q) + |q| sqrt(f))^2.

That this holds for all q is proven so. Let A have the rows e_i, and let B be any matrix with B^T B
<= R + (1e-12 + 2^-52 additions) tr(R) I, a slack that whoever uses R adds itself. For every
orthogonal U, |A q| <= |U B q| + |(A - U B) q| <= |B q| + |A - U B|_F |q|. So it suffices to find
one U with |A - U B|_F <= sqrt(f). The best is the orthogonal factor of A B^T (the distance is then
that of Bures and Wasserstein), and whoever made R of e_i that were rounded, and f of what that
rounding lost, always passes: rounded and unrounded rows are such an A and U B. A is used as the
triangular factor of its QR decomposition, B as the root of R by its eigenvectors. It also suffices
that A^T A is within 5e-13 tr(R) of R.

Roundings here are of float64, some 1e-15 of |A|; 1e-13 is allowed for. Half of the 1e-12 tr(R) is
for how far B^T B is from R; the other half makes sqrt(q.R q) larger by 2.4e-13 sqrt(tr(R)) |q|,
which is more than these roundings: an honest matrix does not fail by them.

Recorded numbers may be anything, so sums and products here may overflow: what is compared is never
taken for small because it is NaN: `np.maximum` hands NaN on, which Python's `max` does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Wrong = tuple[str, str]
"""The name of a tensor without that of its layer, and what is wrong with it."""

NO_ENTRY = "has an entry that no such tensor has"
_ROUNDING = 1e-13
_NEAR = 5e-13


class Rows:
    """Vectors of d entries, of which a triangular factor and the largest norm are kept."""

    def __init__(self, d: int) -> None:
        self.factor: Floats = np.zeros((0, d))
        self.longest = np.float64(0)

    def add(self, rows: Floats) -> Floats:
        """Add vectors (r, d); return their norms."""
        sizes = norms(rows)
        self.longest = np.maximum(self.longest, sizes.max(initial=0))
        self.factor = np.asarray(np.linalg.qr(np.concatenate([self.factor, rows]), mode="r"))
        return sizes


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix for vectors of every kv head of a layer, and the numbers beside it.

    Attributes:
        name: Its tensor.
        packed: The upper triangle of each kv head, (kv_heads, d (d + 1) / 2).
        beside: The tensor of the numbers.
        bounds: The numbers of each kv head, of which the first is f, all finite and >= 0.
        additions: The place of the number of additions among them.
    """

    name: str
    packed: Floats
    beside: str
    bounds: Floats
    additions: int

    def nonsense(self, d: int) -> Wrong | None:
        """Return what is so of no matrix of any vectors of d entries; None if there is nothing."""
        diagonal = self.packed[:, np.cumsum([0, *range(d, 1, -1)])]
        with np.errstate(over="ignore"):
            traces = diagonal.sum(axis=1)
        finite = np.isfinite(self.packed).all() and np.isfinite(traces).all()
        if not (finite and (diagonal >= 0).all()):
            return self.name, NO_ENTRY
        if not (np.isfinite(self.bounds) & (self.bounds >= 0)).all():
            return self.beside, NO_ENTRY
        additions = self.bounds[:, self.additions]
        if not ((additions < 1e15) & (additions == np.floor(additions))).all():
            return self.beside, "a count of additions is none"
        return None

    def bounds_all(self, head: int, rows: Rows) -> bool:
        """Return True if it bounds these vectors of a kv head, by the proof above."""
        # Where a vector is no number, nor is any sum of squares.
        if not rows.longest < math.inf:
            return False
        factor, matrix = rows.factor, _symmetric(self.packed[head], rows.factor.shape[1])
        lost, additions = float(self.bounds[head, 0]), float(self.bounds[head, self.additions])
        trace = float(np.trace(matrix))
        if float(np.linalg.norm(factor.T @ factor - matrix)) <= _NEAR * trace:
            return True
        values, vectors = np.linalg.eigh(matrix)
        root = np.sqrt(np.maximum(values, 0))[:, None] * vectors.T
        slack = _NEAR + additions * 2.0**-52
        if not float(np.linalg.norm(root.T @ root - matrix)) <= slack * trace:
            return False
        left, _, right = np.linalg.svd(factor @ root.T, full_matrices=False)
        apart = float(np.linalg.norm(factor - (left @ right) @ root))
        size = float(np.linalg.norm(factor) + np.linalg.norm(root))
        return apart + _ROUNDING * size <= math.sqrt(lost) + 2.4e-13 * math.sqrt(trace)


def norms(rows: Floats) -> Floats:
    """Return the Euclidean norm of each row."""
    found: Floats = np.sqrt((rows * rows).sum(axis=1))
    return found


def _symmetric(packed: Floats, d: int) -> Floats:
    whole = np.zeros((d, d))
    whole[np.triu_indices(d)] = packed
    found: Floats = whole + np.triu(whole, 1).T
    return found
