"""Two caches of the same shapes, and what attention over one loses beside attention over the other.

Everything is computed in float64 and proven for real arithmetic on the stored numbers. Let u =
2^-53, d <= 2^20 the entries of a key, n <= 2^32 the keys that a row sees, x_i = scale * q.k_i its
real scores in one cache, R = |scale| |q| max |k_i|, and P the softmax of x.

1. **Scores.** F16, BF16 and F32 widen to float64 exactly, and products of two of them neither
   overflow nor underflow there. So a computed dot product is off by at most gamma_d |q||k_i|, its
   product with the scale by u R and 2^-1074 more, and the difference from the largest computed
   score c by 2 u R. Exponents are within r = (d + 8) u (1 + 2^-20) R + 2^-1000 of x_i - c. The
   rest of d + 8 covers the rounding of r. A row with r > 1 gets [0, 1] and inf.
2. **Weights.** NumPy's exp is taken to be within 16 units in the last place, as the auditor takes
   it (`_audit.recompute`). So a computed weight is e^(x_i - c) times e^(+-(r + 33 u)). Where it, or
   the real one, is below 2^-1022 they differ by less than 2^-1021.
3. **Distance.** Let every weight change by a factor within e^(+-s). The largest gain of a set is
   the total variation distance. Its odds grow by at most e^(2s), so a share p gains at most
   p e^(2s) / (1 - p + p e^(2s)) - p. That is largest at p = 1/(1 + e^s), where it is tanh(s/2) <=
   s/2. If weights change by amounts that add up to A, the distance is at most A over the larger of
   the two sums. The real sum is at least e^-r >= 1/3, so what underflows costs less than 2^-960.
4. Let P' and Q' be the computed weights of both caches over their real sums. By the triangle
   inequality TV(P, Q) is within (r_P + r_Q)/2 + 33 u + 2^-959 of TV(P', Q').
5. **Sums** are products of matrices with 1024 keys each, which are added up in turn. In any order
   no term goes through more than a = min(n, 1024) + n/1024 + 1 roundings. Shares have a relative
   error of at most gamma_(a + 1), and so has the sum of their differences. So the computed half of
   it is within 2 (a + 2) u (1 + 2^-29) of TV(P', Q'). With 4, the interval has a half-width of
   (r_P + r_Q)/2 + 2 e, e = (a + 64) u. What is left over covers the rounding of its ends.
6. **Output.** Let V be the longest value that the row sees in one cache, or more. Outputs of P and
   P' differ by at most 2 TV(P, P') V <= (r + 33 u + 2^-959) V. The computed output has a relative
   error of gamma_(2a + 1) in each term, which are together at most V long. So it is within
   (r + 2 e) V of the real one. The distance of the real outputs is at most that of the computed
   ones, and both of these. Norms and sums of at most 2^20 entries are off by less than a relative
   2^-30, and by 2^-490 where squares underflow.
"""

from __future__ import annotations

from math import isfinite
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _native
from ._arrays import coerce
from ._arrays.attended import sight_of
from .errors import CertkError
from .results import Comparison

Floats = NDArray[np.float64]
Stored = tuple[NDArray[Any], str]

_U = 2.0**-53
_CHUNK = 1024  # keys that are summed in any order
_SCORES = 1 << 20  # scores of a cache that are held at a time
_MOST_RADIUS = 1.0
_NARROW = ("float16", "bfloat16", "float32")


def compare(
    q: ArrayLike,
    original: tuple[ArrayLike, ArrayLike],
    other: tuple[ArrayLike, ArrayLike],
    *,
    scale: float | None = None,
    causal: bool = False,
    lengths: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    threads: int | None = None,
) -> Comparison:
    """Bound what attention changes if another cache takes the place of the original one.

    The other cache may come from any method: pass the numbers that its codes stand for, as they
    are multiplied with queries. The bounds hold for the real-number attention over exactly the
    stored numbers of both, with all rounding inside. They take float64 scores of all keys, in
    memory for about a million scores at a time.

    Args:
        q: Queries (..., heads, m, d), or (m, d). float16, bfloat16 (torch or ml_dtypes) or float32,
            as all arrays here, which may differ in dtype; NumPy or torch CPU.
        original: Keys (..., kv_heads, n, d) and values (..., kv_heads, n, d_v), or (n, d) and
            (n, d_v). heads is a multiple of kv_heads, as in `certk_rs.attention`.
        other: Keys and values of the same shapes.
        scale: Multiplies q.k; None for the float64 nearest d**-0.5.
        causal: Query i of m sees keys up to i + n - m.
        lengths: How many keys a row sees, from the first; integers of shape q.shape[:-1], or one
            for all.
        mask: Boolean (True = seen), broadcasts to q.shape[:-1] + (n,). An additive mask is taken if
            it holds only 0 and entries <= finfo.min / 2.
        threads: Number of threads for scores; None for all available. NumPy has its own.

    Returns:
        A `Comparison`. A row that sees no key has 0 everywhere. Where scores are so large that
        float64 tells nothing, the interval is [0, 1] and the error inf. Last bits may differ
        between machines, as those of NumPy do.

    Raises:
        CertkError: Bad input, also a number that is not finite at a key that some row of its kv
            head sees; the message names the argument and the place.
    """
    queries = _narrow("q", q)
    pairs = _pair("original", original), _pair("other", other)
    batch, n, group = _sizes(queries[0].shape, pairs)
    factor = _scale(scale, queries[0].shape[-1])
    seen_of = (causal, lengths, mask, None)
    _, counts, allowed, *_ = sight_of(batch, n, seen_of, (None, None), None)
    limits = _limits(batch, n, causal, counts)
    lower, upper, error = (np.zeros(batch) for _ in range(3))
    with np.errstate(all="ignore"), _native.DefaultFloats():
        for head in np.ndindex(batch[:-1]):
            asked = queries[0][head], queries[1]
            _need_finite("q", _wide(asked), head)
            places = _seen_by_any(n, limits[head], None if allowed is None else allowed[head])
            kv = (*head[:-1], head[-1] // group) if head else ()
            one = _Side("original", pairs[0], kv, places)
            two = _Side("other", pairs[1], kv, places)
            step = max(1, _SCORES // max(1, len(places)))
            for start in range(0, batch[-1] if len(places) else 0, step):
                rows = slice(start, start + step)
                seen = places < limits[head][rows, None]
                if allowed is not None:
                    seen &= allowed[head][rows][:, places]
                call = (asked[0][rows], asked[1]), seen, factor, threads
                found = _apart(one.attend(*call), two.attend(*call))
                for to, each in zip((lower, upper, error), found, strict=True):
                    to[head][rows] = np.where(seen.any(axis=1), each, 0.0)
    return Comparison(lower, upper, error)


class _Rows(NamedTuple):
    """Softmax (b, j) and output (b, d_v) of some rows, and the errors of both (b,).

    `off` is twice that of a distance; where it is inf nothing is known.
    """

    shares: Floats
    out: Floats
    off: Floats
    out_off: Floats


class _Side:
    """The keys and values of one kv head, at the places that some row sees."""

    def __init__(
        self, name: str, pair: tuple[Stored, Stored], kv: tuple[int, ...], places: NDArray[np.int64]
    ) -> None:
        taken = [(np.ascontiguousarray(array[kv][places]), dtype) for array, dtype in pair]
        for at, some in enumerate(taken):
            _need_finite(f"{name}[{at}]", _wide(some), kv, places)
        self._keys, values = taken[0], _wide(taken[1])
        self._longest = float(_norms(values).max(initial=0.0))
        # The column of ones sums the weights.
        self._values = np.concatenate([values, np.ones((len(values), 1))], axis=1)

    def attend(
        self, q: Stored, seen: NDArray[np.bool_], scale: float, threads: int | None
    ) -> _Rows:
        """Return what queries (b, d) get that see some of the keys (b, j)."""
        (b, j), d = seen.shape, q[0].shape[1]
        scores = np.empty((1, b, j))
        keys = self._keys[0][None], self._keys[1]
        reach = _native.products((q[0][None], q[1]), keys, None, scores, threads)
        radius = (d + 8) * _U * (1 + 2.0**-20) * (abs(scale) * reach) + 2.0**-1000
        weights = scores[0]
        weights *= scale
        weights[~seen] = -np.inf
        shift = weights.max(axis=1)
        weights -= np.where(np.isneginf(shift), 0.0, shift)[:, None]
        np.exp(weights, out=weights)
        mixed = _mixed(weights, self._values)
        total = np.where(mixed[:, -1:] == 0, 1.0, mixed[:, -1:])
        weights /= total
        sums = (min(j, _CHUNK) + j / _CHUNK + 65) * _U
        off = np.where(radius <= _MOST_RADIUS, radius + 2 * sums, np.inf)
        return _Rows(weights, mixed[:, :-1] / total, off, off * self._longest)


def _apart(one: _Rows, two: _Rows) -> tuple[Floats, Floats, Floats]:
    """Return both ends of the total variation distance, and the bound on the error, (b,) each."""
    off = (one.off + two.off) / 2
    known = np.isfinite(off)
    gaps = np.abs(one.shares - two.shares)
    distance = _mixed(gaps, np.ones((gaps.shape[1], 1)))[:, 0] / 2
    error = _norms(one.out - two.out) + one.out_off + two.out_off
    return (
        np.where(known, np.clip(distance - off, 0.0, 1.0), 0.0),
        np.where(known, np.minimum(distance + off, 1.0), 1.0),
        np.where(known, error * (1 + 2.0**-30) + 2.0**-490, np.inf),
    )


def _mixed(weights: Floats, vectors: Floats) -> Floats:
    """Return weights (b, j) @ vectors (j, e), a chunk of keys after the other."""
    total = np.zeros((len(weights), vectors.shape[1]))
    for start in range(0, len(vectors), _CHUNK):
        part = slice(start, start + _CHUNK)
        total += weights[:, part] @ vectors[part]
    return total


def _norms(vectors: Floats) -> Floats:
    """Return norms of the rows, rounded up where no square underflows."""
    norms: Floats = np.sqrt(np.sum(np.square(vectors), axis=1)) * (1 + 2.0**-30)
    return norms


def _limits(
    batch: tuple[int, ...], n: int, causal: bool, counts: NDArray[np.int64] | None
) -> NDArray[np.int64]:
    """Return how many keys each row may see, from the first."""
    if not isinstance(causal, bool):
        raise CertkError(f"causal is {causal!r}; pass True or False")
    limits = np.full(batch, n, np.int64)
    if counts is not None:
        wrong = counts[(counts < 0) | (counts > n)]
        if wrong.size:
            raise CertkError(f"lengths has {wrong[0]}; it must lie between 0 and n = {n}")
        limits[...] = counts[0] if counts.size == 1 else counts.reshape(batch)
    if causal:
        latest = np.arange(batch[-1]) + (n - batch[-1] + 1)
        limits = np.minimum(limits, np.clip(latest, 0, n))
    return limits


def _seen_by_any(
    n: int, limits: NDArray[np.int64], allowed: NDArray[np.bool_] | None
) -> NDArray[np.int64]:
    """Return the keys that some row of a query head sees, ascending."""
    if allowed is None:
        return np.arange(limits.max(initial=0))
    found = np.zeros(n, np.bool_)
    for limit, row in zip(limits, allowed, strict=True):
        found[:limit] |= row[:limit]
    return np.flatnonzero(found)


def _narrow(name: str, value: object) -> Stored:
    """Take an array of vectors whose products are exact in float64."""
    array, dtype = coerce.as_native_floats(name, value)
    if dtype not in _NARROW:
        raise CertkError(f"{name} has dtype {dtype}; convert it to float16, bfloat16 or float32")
    if array.ndim < 2 or array.shape[-1] == 0:
        raise CertkError(
            f"{name} has shape {array.shape}; pass vectors of at least one entry: (..., n, d)"
        )
    return array, dtype


def _pair(name: str, pair: object) -> tuple[Stored, Stored]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise CertkError(f"{name} is a {type(pair).__name__}; pass a pair: keys and values")
    return _narrow(f"{name}[0]", pair[0]), _narrow(f"{name}[1]", pair[1])


def _sizes(
    q: tuple[int, ...], pairs: tuple[tuple[Stored, Stored], ...]
) -> tuple[tuple[int, ...], int, int]:
    """Return q.shape[:-1], the keys, and the query heads of a kv head."""
    (first, second), (k, v) = ([array.shape for array, _ in pair] for pair in pairs)
    for at, (own, like) in enumerate(((k, first), (v, second))):
        if own != like:
            raise CertkError(f"other[{at}] has shape {own}; original[{at}] has {like}: pass equal")
    if first[:-1] != second[:-1]:
        raise CertkError(f"original[1] has shape {second}; pass a value for each key of {first}")
    fits = len(q) == len(first) and q[:-3] == first[:-3] and q[-1] == first[-1]
    heads, kv_heads = (q[-3], first[-3]) if fits and len(q) > 2 else (1, 1)
    if not fits or kv_heads == 0 or heads % kv_heads:
        raise CertkError(
            f"q has shape {q}, keys {first}; pass (..., heads, m, d) and (..., kv_heads, n, d), "
            "heads a multiple of kv_heads"
        )
    return q[:-1], first[-2], heads // kv_heads


def _scale(scale: object, d: int) -> float:
    if scale is None:
        return _native.nearest_rsqrt(d)
    value = coerce.floats("scale", scale)
    if value.shape != () or not isfinite(value):
        raise CertkError(f"scale is {scale!r}; it must be a finite number")
    return float(value)


def _need_finite(
    name: str,
    vectors: Floats,
    head: tuple[int, ...],
    places: NDArray[np.int64] | None = None,
) -> None:
    """Raise `CertkError` unless all is finite; `places` are those of the vectors of one head."""
    finite = np.isfinite(vectors)
    if not finite.all():
        at, entry = np.argwhere(~finite)[0]
        place = [*head, int(at if places is None else places[at]), int(entry)]
        raise CertkError(f"{name}{place} is not finite; repair the input")


def _wide(stored: Stored) -> Floats:
    array, dtype = stored
    return coerce.widen(array.view(np.float16) if dtype == "float16" else array, dtype)
