"""One plane of codes, of keys or of values: what is said of it, and whether it is true of vectors.

A vector k is moved by the mean and turned to y = H D (k - mean), in float32 and in the order of
docs/files.md. Its code is off by e = y - scale (byte - 128), rounded to float32. Said are a radius
for each e, bounds for all e and y, and a matrix that bounds all e together. Nothing here is shared
with the encoder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._files.values import widen
from ..errors import CertkError
from .layouts import BIAS, Bytes
from .matrices import NO_ENTRY, Floats, Matrix, Rows, Wrong, norms

Bits = NDArray[np.uint16]
"""Numbers of bfloat16."""
Singles = NDArray[np.float32]

# Places among the bounds.
_REACH, _NORM, ADDITIONS, _LARGEST, _BLOCK = range(1, 6)
_MOST = float(np.finfo(np.float32).max)
_INFINITE = 0x7F80  # as bfloat16; greater numbers are NaN, or negative


@dataclass(frozen=True, eq=False)
class Plane:
    """Statements about one plane of codes of a layer, without the codes.

    Attributes:
        stem: The beginning of the names of its tensors.
        of: What a vector is: "key", or "value".
        scales: The factor of each vector's code; 0 if it has none.
        radii: At least the norm of each e.
        mean: What is taken from every vector of a kv head, (kv_heads, d).
        matrix: What bounds all e of a kv head together, with all its bounds beside.
    """

    stem: str
    of: str
    scales: Bits
    radii: Bits
    mean: Singles
    matrix: Matrix

    def nonsense(self, turns: tuple[int, ...]) -> Wrong | None:
        """Return a tensor that no codes have, and why; None if there is none.

        Args:
            turns: The blocks that vectors may be turned by.
        """
        d, radii, bounds = self.mean.shape[1], widen(self.radii, "BF16"), self.matrix.bounds
        # As bits: readers tell a key without a code by zero bits, so that -0 is none.
        if not (self.scales < _INFINITE).all():
            return f"{self.stem}scales", NO_ENTRY
        if not ((radii >= 0).all() and np.isfinite(radii[self.scales > 0]).all()):
            return f"{self.stem}radii", NO_ENTRY
        if not np.isfinite(self.mean).all():
            return f"{self.stem}mean", NO_ENTRY
        if (wrong := self.matrix.nonsense(d)) is not None:
            return wrong
        if not (bounds[:, _LARGEST] <= _MOST).all():
            return f"{self.stem}bounds", "the largest entry is no float32 number"
        if not np.isin(bounds[:, _BLOCK], turns).all():
            said = " or by ".join(map(str, turns))
            return f"{self.stem}bounds", f"{self.of}s of {d} entries are turned by {said}"
        return None


class Taken(NamedTuple):
    """Some vectors: which have a code, and of those the scale, what it stands for, and e."""

    coded: NDArray[np.bool_]
    scales: Floats
    decoded: Floats
    errors: Singles


def _flushes() -> bool:
    """Return True if subnormal numbers are read or written as zero."""
    least = np.array([1], np.uint32).view(np.float32)
    half = np.full(1, 2.0**-126, np.float32) * np.float32(0.5)
    return not bool((least > 0).all() and (half > 0).all())


class PlaneJudge:
    """The judge of the plane of one kv head, which takes its vectors some at a time.

    Args:
        plane: Statements without `nonsense`.
        head: The kv head.
        places: The place of its scales and radii among those of the layer.
        wrong: Where findings go, by the tensor.
    """

    def __init__(self, plane: Plane, head: int, places: int | slice, wrong: dict[str, str]) -> None:
        if _flushes():
            raise CertkError(
                "this thread takes subnormal numbers for zero, and codes cannot be judged so: call "
                "torch.set_flush_denormal(False), or verify in another process"
            )
        self._plane, self._head, self._wrong = plane, head, wrong
        self._scales, self._radii = plane.scales[places], plane.radii[places]
        self._rows = Rows(plane.mean.shape[1])
        self._norm = self._largest = np.float64(0)
        self._at = 0

    def take(self, vectors: Singles, codes: Bytes) -> Taken:
        """Judge the next vectors (r, d) by their codes, of d entries or more."""
        plane, part = self._plane, slice(self._at, self._at + len(vectors))
        self._at, d = part.stop, vectors.shape[1]
        coded = self._scales[part] > 0
        scales, radii = (widen(bits[part][coded], "BF16") for bits in (self._scales, self._radii))
        if not is_empty(codes, coded, d):
            what = f"bytes of no {plane.of}, of no entry, or without a scale, are not 128"
            self._wrong[f"{plane.stem}codes"] = what
        self._largest = np.maximum(self._largest, np.abs(vectors).max(initial=0))
        block = int(plane.matrix.bounds[self._head, _BLOCK])
        moved = _moved(vectors[coded], plane.mean[self._head], block).astype(np.float64)
        decoded = scales[:, None] * (codes[coded, :d].astype(np.float64) - BIAS)
        errors = (moved - decoded).astype(np.float32)
        if not (self._rows.add(errors.astype(np.float64)) <= radii).all():
            what = f"a code is farther from its {plane.of} than its radius says"
            self._wrong[f"{plane.stem}radii"] = what
        self._norm = np.maximum(self._norm, norms(moved).max(initial=0))
        return Taken(coded, scales, decoded, errors)

    def end(self, codes: Bytes) -> None:
        """Judge the codes behind the last vector, and what is said of all vectors."""
        plane, bounds = self._plane, self._plane.matrix.bounds[self._head]
        assert self._at == len(self._scales)
        if (codes != BIAS).any():
            what = f"bytes of no {plane.of}, of no entry, or without a scale, are not 128"
            self._wrong[f"{plane.stem}codes"] = what
        if not (
            self._rows.longest <= bounds[_REACH]
            and self._norm <= bounds[_NORM]
            and self._largest <= bounds[_LARGEST]
        ):
            what = f"a code's error, a moved {plane.of} or an entry is larger than it says"
            self._wrong[f"{plane.stem}bounds"] = what
        if not plane.matrix.bounds_all(self._head, self._rows):
            self._wrong[plane.matrix.name] = "it does not bound what all codes leave out"


def is_empty(codes: Bytes, coded: NDArray[np.bool_], d: int) -> bool:
    """Return True if rows without a code, and entries from d on, stand for 0."""
    return bool((codes[~coded] == BIAS).all() and (codes[:, d:] == BIAS).all())


def turning(d: int) -> int:
    """Return the block of a rotation: the largest power of two that divides d."""
    return d & -d


def _moved(vectors: Singles, mean: Singles, block: int) -> Singles:
    """Center vectors and rotate them by blocks, each step rounded to float32."""
    moved = vectors - mean
    if block > 1:
        moved, count, half = moved * _signs(vectors.shape[1]), len(vectors), 1
        while half < block:
            pairs = moved.reshape(count, vectors.shape[1] // (2 * half), 2, half)
            low, high = pairs[:, :, 0], pairs[:, :, 1]
            moved = np.stack([low + high, low - high], axis=2)
            half *= 2
    found: Singles = moved.reshape(vectors.shape)
    return found


def _signs(d: int) -> Singles:
    """Return -1 or 1 for each entry, as docs/files.md states them."""
    whole = (1 << 64) - 1
    signs = []
    for j in range(d):
        bits = (j + 1) * 0x9E3779B97F4A7C15 & whole
        bits = (bits ^ (bits >> 29)) * 0xBF58476D1CE4E5B9 & whole
        signs.append(-1.0 if bits >> 63 else 1.0)
    return np.array(signs, np.float32)
