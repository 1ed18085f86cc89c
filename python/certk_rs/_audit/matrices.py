"""Recorded matrices, and the proof that one bounds the sums of squares of vectors.

Of vectors e_i of d entries an output has a matrix R, about the sum of e_i e_i^T, and a number f. It
claims that for every direction q sum (q.e_i)^2 is at most (sqrt(q.R q) + |q| sqrt(f))^2.

That this holds for all q is proven so. Let A have the rows e_i. Let F, B and U be matrices and r, b
and o numbers with A^T A <= F^T F + r I, B^T B <= R + b I and |U q| <= (1 + o) |q|. Let s be the
norm of F - U B, and t that of B, both of Frobenius. As |F q| <= |U B q| + s |q|,

    |A q|^2 <= ((1 + o) |B q| + s |q|)^2 + r |q|^2.

Let z >= b. As |B q| is at most t |q|, and at most the root of q.R q + z |q|^2, the right side is at
most (sqrt(q.R q + z |q|^2) + |q| sqrt(f))^2 if

    r + b + (2 o + o^2) t^2 + 2 t max(0, s (1 + o) - sqrt(f)) + s^2 - f <= z.

Whoever uses R adds z = (1e-12 + 2^-52 additions) tr(R), of which a hundredth is left here for the
roundings of this test. It also suffices that A^T A is within z of R.

F is the triangular factor of A, B the root of R by its eigenvectors, and U the orthogonal factor of
F B^T: then s is the distance of Bures and Wasserstein. Whoever made R of e_i that were rounded, and
f of what that rounding lost, has such an A and U B. How well LAPACK finds them does not matter: r,
b, o and s are measured. In the norm of Frobenius a product, of k terms in sums of 32, is off by
(33 + k/32) 2^-53 of that of the absolute values; twice that is taken. For o, U is split in two: the
products of the upper halves are exact, and d 2^-52 covers the others.

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
_U = 2.0**-53
_TERMS = 32


class Rows:
    """Vectors of d entries: their sum of outer products, a triangular factor, the largest norm."""

    def __init__(self, d: int) -> None:
        self.factor: Floats = np.zeros((0, d))
        self.sums: Floats = np.zeros((d, d))
        self.depth = 0.0
        """Roundings that a term of the sums has gone through at most."""
        self.longest = np.float64(0)

    def add(self, rows: Floats) -> Floats:
        """Add vectors (r, d); return their norms."""
        sizes = norms(rows)
        self.longest = np.maximum(self.longest, sizes.max(initial=0))
        self.factor = np.asarray(np.linalg.qr(np.concatenate([self.factor, rows]), mode="r"))
        self.sums += _product(rows.T, rows)
        self.depth = max(self.depth, _depth(len(rows))) + 1
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
        allowed = 0.99 * (1e-12 + additions * 2.0**-52) * float(np.trace(matrix))
        # The sums are off by this share of tr(A^T A).
        summed = 2 * rows.depth * _U * float(np.trace(rows.sums))
        if _size(rows.sums - matrix) + summed <= allowed:
            return True
        values, vectors = np.linalg.eigh(matrix)
        root = np.sqrt(np.maximum(values, 0))[:, None] * vectors.T
        left, _, right = np.linalg.svd(factor @ root.T, full_matrices=False)
        turn = left @ right
        r = _apart(factor.T, factor, rows.sums) + summed
        b, o = _apart(root.T, root, matrix), _skew(turn)
        s, t = _apart(turn, root, factor), _size(root)
        least = math.sqrt(lost) * (1 - 2.0**-50)
        excess = r + b + (2 * o + o * o) * t * t + 2 * t * max(0.0, s * (1 + o) - least)
        excess = excess * (1 + 2.0**-40) + (s - least) * (s + least)
        return b <= allowed and excess <= allowed


def _depth(terms: int) -> float:
    """Return the roundings that a term of `_product` goes through at most."""
    return _TERMS + 1 + terms / _TERMS


def _product(left: Floats, right: Floats) -> Floats:
    """Return a product of matrices, summed up over a few terms at a time."""
    found: Floats = np.zeros((left.shape[0], right.shape[1]))
    for at in range(0, left.shape[1], _TERMS):
        found += left[:, at : at + _TERMS] @ right[at : at + _TERMS]
    return found


def _size(matrix: Floats) -> float:
    """Return the Frobenius norm, rounded up."""
    return float(np.linalg.norm(matrix) * (1 + (matrix.size + 8) * _U))


def _apart(left: Floats, right: Floats, matrix: Floats) -> float:
    """Return an upper bound of how far a matrix is from the real product of two."""
    rounded = 2 * _depth(left.shape[1]) * _U * _size(np.abs(left) @ np.abs(right))
    return _size(_product(left, right) - matrix) + rounded


def _skew(turn: Floats) -> float:
    """Return an upper bound of |U U^T - 1|: the norm of U is at most 1 and that."""
    high = np.round(turn * 2.0**20) / 2.0**20
    low = turn - high
    cross = high @ low.T
    apart = high @ high.T - np.eye(len(turn)) + (cross + cross.T) + low @ low.T
    return _size(apart) + len(turn.T) * 2.0**-52


def norms(rows: Floats) -> Floats:
    """Return the Euclidean norm of each row; no square over- or underflows."""
    _, powers = np.frexp(np.abs(rows).max(axis=1, initial=0))
    scaled = np.ldexp(rows, -powers[:, None])
    found: Floats = np.ldexp(np.sqrt((scaled * scaled).sum(axis=1)), powers)
    return found


def _symmetric(packed: Floats, d: int) -> Floats:
    whole = np.zeros((d, d))
    whole[np.triu_indices(d)] = packed
    found: Floats = whole + np.triu(whole, 1).T
    return found
