"""The audit's own judgement of guards: whether codes, bounds and balls are true of dropped rows.

Nothing here is shared with the encoder, and nothing of the package is imported.

A guard says of the dropped keys k_i (count, d) of a kv head: moved by the mean and turned, each is
the vector y_i = H (k_i - mean), in float32 and in the order of docs/files.md, and its code is off
by e_i = y_i - scale_i (byte_i - 128), rounded to float32. What is to be bounded for every direction
q is sum (q.e_i)^2, by (sqrt(q.R q) + |q| sqrt(f))^2 with R the recorded matrix and f = bounds[0].

That this holds for all q is proven so. Let A have the rows e_i, and let B be any matrix with B^T B
<= R + (1e-12 + 2^-52 bounds[3]) tr(R) I, a slack that whoever uses R adds itself. For every
orthogonal U, |A q| <= |U B q| + |(A - U B) q| <= |B q| + |A - U B|_F |q|. So it suffices to find
one U with |A - U B|_F <= sqrt(f). The best is the orthogonal factor of A B^T (the distance is then
that of Bures and Wasserstein), and whoever made R of e_i that were rounded, and f of what that
rounding lost, always passes: rounded and unrounded rows are such an A and U B. A is used as the
triangular factor of its QR decomposition, B as the root of R by its eigenvectors. It also suffices
that A^T A is within 5e-13 tr(R) of R.

Roundings here are of float64, some 1e-15 of |A|; 1e-13 is allowed for. Half of the 1e-12 tr(R) is
for how far B^T B is from R; the other half makes sqrt(q.R q) larger by 2.4e-13 sqrt(tr(R)) |q|,
which is more than these roundings: an honest guard does not fail by them.

Recorded numbers may be anything, so sums and products here may overflow: what is compared is never
taken for small because it is NaN: `np.maximum` hands NaN on, which Python's `max` does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

GROUP, STEP, BIAS = 16, 4, 128
_ROUNDING = 1e-13
_NEAR = 5e-13
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class GuardClaims:
    """The guard of one layer, without its codes.

    `starts` and `code_starts` are where the scales and the codes of each kv head begin. `scales`
    and `radii` are widened bfloat16 numbers.
    """

    starts: list[int]
    code_starts: list[int]
    scales: Floats
    radii: Floats
    mean: NDArray[np.float32]
    gram: Floats
    bounds: Floats
    ball: Floats


def code_bytes(count: int, d: int) -> int:
    """Return the bytes of the codes of so many keys."""
    return -(-count // GROUP) * GROUP * -(-d // STEP) * STEP


def turning(d: int) -> int:
    """Return the block of a rotation: the largest power of two that divides d."""
    return d & -d


def nonsense(claims: GuardClaims, d: int) -> tuple[str, str] | None:
    """Return a tensor that no guard of any rows has, and why; None if there is none."""
    coded = claims.scales > 0
    bounds, ball = claims.bounds, claims.ball
    diagonal = claims.gram[:, np.cumsum([0, *range(d, 1, -1)])]
    with np.errstate(over="ignore"):
        traces = diagonal.sum(axis=1)
    checks = (
        ("guard_scales", (np.isfinite(claims.scales) & (claims.scales >= 0)).all()),
        ("guard_radii", (claims.radii >= 0).all() and np.isfinite(claims.radii[coded]).all()),
        ("guard_mean", np.isfinite(claims.mean).all()),
        ("guard_gram", np.isfinite(claims.gram).all() and (diagonal >= 0).all()),
        ("guard_gram", np.isfinite(traces).all()),
        ("guard_bounds", (np.isfinite(bounds) & (bounds >= 0)).all()),
        ("guard_ball", np.isfinite(ball).all() and (ball[:, -1] >= 0).all()),
    )
    for name, fine in checks:
        if not fine:
            return name, "has an entry that no guard has"
    additions, largest, block = bounds[:, 3], bounds[:, 4], bounds[:, 5]
    if not ((additions < 1e15) & (additions == np.floor(additions))).all():
        return "guard_bounds", "a count of additions is none"
    if not (largest <= _LARGEST).all():
        return "guard_bounds", "the largest entry is no float32 number"
    if not ((block == 1) | (block == turning(d))).all():
        return "guard_bounds", f"keys of {d} entries are turned by 1 or by {turning(d)}"
    return None


def untruths(
    claims: GuardClaims,
    head: int,
    codes: NDArray[np.uint8],
    rows: Iterable[tuple[NDArray[np.float32], Floats]],
) -> list[tuple[str, str]]:
    """Return the tensors of the guard of one kv head that do not bound its rows, and why.

    Args:
        claims: A guard without `nonsense`.
        head: The kv head.
        codes: Its part of the codes.
        rows: Dropped keys (r, d), widened to float32, and values (r, d), some at a time.
    """
    first, end = claims.starts[head], claims.starts[head + 1]
    count, d = end - first, claims.mean.shape[1]
    scales, radii = claims.scales[first:end], claims.radii[first:end]
    said = _Said(*(float(bound) for bound in claims.bounds[head]))
    bytes_of = _of_lines(codes, d)
    coded, wrong = scales > 0, dict[str, str]()
    outside = np.ones(len(bytes_of), bool)
    outside[:count] = ~coded
    if (bytes_of[outside] != BIAS).any():
        wrong["guard_codes"] = "bytes of no key, or of one without a scale, are not 128"
    factor, at = np.zeros((0, d)), 0
    centre, radius = claims.ball[head, :-1], float(claims.ball[head, -1])
    longest = norm = reach = away = np.float64(0)
    for keys, values in rows:
        part = slice(at, at + len(keys))
        at += len(keys)
        use = coded[part]
        longest = np.maximum(longest, np.abs(keys).max(initial=0))
        moved = _moved(keys[use], claims.mean[head], int(said.block)).astype(np.float64)
        numbers = bytes_of[part][use].astype(np.float64) - BIAS
        left = (moved - scales[part][use][:, None] * numbers).astype(np.float32)
        errors = left.astype(np.float64)
        sizes = _norms(errors)
        if not (sizes <= radii[part][use]).all():
            wrong["guard_radii"] = "a code is farther from its key than its radius says"
        reach = np.maximum(reach, sizes.max(initial=0))
        norm = np.maximum(norm, _norms(moved).max(initial=0))
        factor = np.asarray(np.linalg.qr(np.concatenate([factor, errors]), mode="r"))
        away = np.maximum(away, _norms(values - centre).max(initial=0))
    assert at == count
    if not (reach <= said.reach and norm <= said.norm and longest <= said.largest):
        wrong["guard_bounds"] = "a code's error, a moved key or an entry is larger than it says"
    # Where an error of a code is no number, nor is any sum of their squares.
    if not (reach < math.inf and _is_bounded(factor, _symmetric(claims.gram[head], d), said)):
        wrong["guard_gram"] = "it does not bound what all codes leave out"
    # Users of the ball add as much again for the roundings of distances.
    if not away <= radius * (1 + (d + 8) * 2.0**-53):
        wrong["guard_ball"] = "a dropped value lies outside of it"
    return [(name, f"kv head {head}: {what}") for name, what in wrong.items()]


@dataclass(frozen=True)
class _Said:
    """The recorded bounds, in their order."""

    lost: float
    reach: float
    norm: float
    additions: float
    largest: float
    block: float


def _norms(rows: Floats) -> Floats:
    found: Floats = np.sqrt((rows * rows).sum(axis=1))
    return found


def _of_lines(codes: NDArray[np.uint8], d: int) -> NDArray[np.uint8]:
    """Return the lines of a kv head as bytes (keys in whole groups, d)."""
    steps = -(-d // STEP)
    lines = codes.reshape(-1, steps, GROUP, STEP).swapaxes(1, 2)
    return lines.reshape(-1, steps * STEP)[:, :d]


def _moved(keys: NDArray[np.float32], mean: NDArray[np.float32], block: int) -> NDArray[np.float32]:
    """Center keys and rotate them by blocks, each step rounded to float32."""
    moved = keys - mean
    if block > 1:
        moved, count, half = moved * _signs(keys.shape[1]), len(keys), 1
        while half < block:
            pairs = moved.reshape(count, keys.shape[1] // (2 * half), 2, half)
            low, high = pairs[:, :, 0], pairs[:, :, 1]
            moved = np.stack([low + high, low - high], axis=2)
            half *= 2
    found: NDArray[np.float32] = moved.reshape(keys.shape)
    return found


def _signs(d: int) -> NDArray[np.float32]:
    """Return -1 or 1 for each entry, as docs/files.md states them."""
    whole = (1 << 64) - 1
    signs = []
    for j in range(d):
        bits = (j + 1) * 0x9E3779B97F4A7C15 & whole
        bits = (bits ^ (bits >> 29)) * 0xBF58476D1CE4E5B9 & whole
        signs.append(-1.0 if bits >> 63 else 1.0)
    return np.array(signs, np.float32)


def _symmetric(packed: Floats, d: int) -> Floats:
    whole = np.zeros((d, d))
    whole[np.triu_indices(d)] = packed
    found: Floats = whole + np.triu(whole, 1).T
    return found


def _is_bounded(factor: Floats, matrix: Floats, said: _Said) -> bool:
    """Return True if the rows with this QR factor are bounded, by the proof above."""
    trace = float(np.trace(matrix))
    if float(np.linalg.norm(factor.T @ factor - matrix)) <= _NEAR * trace:
        return True
    values, vectors = np.linalg.eigh(matrix)
    root = np.sqrt(np.maximum(values, 0))[:, None] * vectors.T
    slack = _NEAR + said.additions * 2.0**-52
    if not float(np.linalg.norm(root.T @ root - matrix)) <= slack * trace:
        return False
    left, _, right = np.linalg.svd(factor @ root.T, full_matrices=False)
    apart = float(np.linalg.norm(factor - (left @ right) @ root))
    size = float(np.linalg.norm(factor) + np.linalg.norm(root))
    return apart + _ROUNDING * size <= math.sqrt(said.lost) + 2.4e-13 * math.sqrt(trace)
