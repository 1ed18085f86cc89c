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
   the two sums. The real sum is at least e^-r > 1/3, so what underflows costs less than 2^-960. Let
   P' and Q' be the computed weights of both caches over their exact sums. By the triangle
   inequality TV(P, Q) is within (r_P + r_Q)/2 + 33 u + 2^-959 of TV(P', Q').
4. **Sums** are made over 1024 keys each, in any order, and then over these parts. No term goes
   through more than a = min(n, 1024) + n/1024 + 1 roundings. Shares have a relative error of at
   most gamma_(a + 1), and so has the sum of their differences. So the computed half of it is within
   2 (a + 2) u (1 + 2^-29) of TV(P', Q'). With 3, the interval has a half-width of (r_P + r_Q)/2 +
   2 e, e = (a + 64) u. What is left over covers the rounding of its ends.
5. **Output.** Let V be the longest value that the row sees in one cache, or more. Outputs of P and
   P' differ by at most 2 TV(P, P') V <= (r + 33 u + 2^-959) V. The computed output has a relative
   error of gamma_(2a + 1) in each term, which are together at most V long. So it is within
   (r + 2 e) V of the real one. The distance of the real outputs is at most that of the computed
   ones, and both of these. Norms and sums of at most 2^20 entries are off by less than a relative
   2^-30, and by 2^-490 where squares underflow.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _native
from ._arrays import coerce
from ._arrays.attended import sight_of
from .errors import CertkError
from .results import Comparison
from .sparse_attention import attention

Floats = NDArray[np.float64]
Stored = tuple[NDArray[Any], str]

_U = 2.0**-53
_CHUNK = 1024  # keys that are summed in any order
_SCORES = 1 << 20  # scores of a cache that are held at a time
_MOST_RADIUS = 1.0


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
    stored numbers of both, with all rounding inside. They take float64 scores of all keys, about a
    million of which are in memory at a time.

    Args:
        q: Queries (..., heads, m, d), or (m, d). float16, bfloat16 (torch or ml_dtypes) or float32,
            as all arrays here, which may differ in dtype; NumPy or torch CPU.
        original: A pair (k, v): keys (..., kv_heads, n, d) and values (..., kv_heads, n, d_v), or
            (n, d) and (n, d_v). heads is a multiple of kv_heads.
        other: Keys and values of the same shapes.
        scale: Multiplies q.k; None for the float64 nearest d**-0.5.
        causal: Query i of m sees keys up to i + n - m.
        lengths: How many keys a row sees, from the first, as in `certk_rs.attention`.
        mask: The keys that a row sees, as in `certk_rs.attention`.
        threads: Number of threads; None for all available. Results do not depend on it.

    Returns:
        A `Comparison`. A row that sees no key has 0 everywhere. Where scores are so large that
        float64 tells nothing, the interval is [0, 1] and the error inf. Last bits may differ
        between machines, as those of NumPy's exp and sums do.

    Raises:
        CertkError: Bad input, also a number that is not finite at a key that some row of its kv
            head sees; the message names the argument and the place.
    """
    queries = _narrow("q", q)
    pairs = _pairs(original, other)
    # It refuses what does not fit, and no row reads a key.
    attention(q, *original, 0, scale=scale, causal=causal, lengths=0, threads=threads)
    (*kv_batch, n, d), batch = pairs[0][0][0].shape, queries[0].shape[:-1]
    group = batch[-2] // max(1, kv_batch[-1]) if kv_batch else 1
    factor = _native.nearest_rsqrt(d) if scale is None else float(scale)
    seen_of = (causal, lengths, mask, None, None, None)
    _, counts, allowed, *_ = sight_of(batch, n, seen_of, (None, None), None)
    limits = _limits(batch, n, causal, counts)
    lower, upper, error = (np.zeros(batch) for _ in range(3))
    with np.errstate(all="ignore"), _native.DefaultFloats():
        for kv in np.ndindex(*kv_batch):
            heads = [(*kv[:-1], *(last * group + i for last in kv[-1:])) for i in range(group)]
            found = np.zeros(n, np.bool_)
            for head, row in product(heads, range(batch[-1])):
                limit = limits[head][row]
                found[:limit] |= allowed is None or allowed[head][row, :limit]
            places = np.flatnonzero(found)
            one = _Side("original", pairs[0], kv, places)
            two = _Side("other", pairs[1], kv, places)
            step = max(1, _SCORES // max(1, len(places)))
            starts = range(0, batch[-1] if len(places) else 0, step)
            for head, start in product(heads, starts):
                rows = slice(start, start + step)
                seen = places < limits[head][rows, None]
                if allowed is not None:
                    seen &= allowed[head][rows][:, places]
                call = (queries[0][head][rows], queries[1]), seen, factor, threads
                ends = _apart(one.attend(*call), two.attend(*call))
                for to, each in zip((lower, upper, error), ends, strict=True):
                    to[head][rows] = np.where(seen.any(axis=1), each, 0.0)
    return Comparison(lower, upper, error)


class _Side:
    """The keys (j, d) and values, transposed, of one kv head at the places that some row sees."""

    def __init__(
        self, name: str, pair: tuple[Stored, Stored], kv: tuple[int, ...], places: NDArray[np.int64]
    ) -> None:
        (k, k_dtype), (v, v_dtype) = pair
        self._keys = k[kv][places], k_dtype
        _longest(f"{name}[0]", self._keys, kv, places)
        values = v[kv][places], v_dtype
        self._longest = _longest(f"{name}[1]", values, kv, places)
        self._values = np.ascontiguousarray(values[0].T), v_dtype

    def attend(
        self, q: Stored, seen: NDArray[np.bool_], scale: float, threads: int | None
    ) -> tuple[Floats, Floats, Floats, Floats]:
        """Return the softmax (b, j) and the output (b, d_v) of queries (b, d) that see some keys.

        Behind them are the errors of both, (b,). That of a distance is half of the first; where it
        is inf nothing is known.
        """
        weights, reach = _products(q, self._keys, threads)
        radius = (q[0].shape[1] + 8) * _U * (1 + 2.0**-20) * (abs(scale) * reach) + 2.0**-1000
        weights *= scale
        weights[~seen] = -np.inf
        shift = weights.max(axis=1)
        weights -= np.where(np.isneginf(shift), 0.0, shift)[:, None]
        np.exp(weights, out=weights)
        out, total = np.zeros((len(weights), len(self._values[0]))), _sums(weights)[:, None]
        for part in _parts(weights):
            some = (weights[:, part], "float64"), (self._values[0][:, part], self._values[1])
            out += _products(*some, threads)[0]
        total[total == 0] = 1.0
        weights /= total
        j = seen.shape[1]
        sums = (min(j, _CHUNK) + j / _CHUNK + 65) * _U
        off = np.where(radius <= _MOST_RADIUS, radius + 2 * sums, np.inf)
        return weights, out / total, off, off * self._longest


def _apart(one: tuple[Floats, ...], two: tuple[Floats, ...]) -> tuple[Floats, Floats, Floats]:
    """Return both ends of the total variation distance, and the bound on the error, (b,) each."""
    (p, out, *off), (p_other, out_other, *off_other) = one, two
    distance, half = _sums(np.abs(p - p_other)) / 2, (off[0] + off_other[0]) / 2
    error = (_norms(out - out_other) + off[1] + off_other[1]) * (1 + 2.0**-30) + 2.0**-490
    known = np.isfinite(half)
    return (
        np.where(known, np.clip(distance - half, 0.0, 1.0), 0.0),
        np.where(known, np.minimum(distance + half, 1.0), 1.0),
        np.where(known, error, np.inf),
    )


def _products(q: Stored, k: Stored, threads: int | None) -> tuple[Floats, Floats]:
    """Return the products (b, j) of q (b, d) and k (j, d), and the largest |q| |k| (b,) or more.

    Threads of a BLAS would wait for each other where processors are busy.
    """
    out = np.empty((1, len(q[0]), len(k[0])))
    reach = _native.products((q[0][None], q[1]), (k[0][None], k[1]), None, out, threads)
    return out[0], reach


def _parts(array: Floats) -> list[slice]:
    return [slice(at, at + _CHUNK) for at in range(0, array.shape[1], _CHUNK)]


def _sums(array: Floats) -> Floats:
    """Return sums of rows, one part after the other."""
    sums: Floats = np.sum([array[:, part].sum(axis=1) for part in _parts(array)], axis=0)
    return sums


def _norms(vectors: Floats) -> Floats:
    """Return norms of the rows, rounded up where no square underflows."""
    norms: Floats = np.sqrt(np.sum(np.square(vectors), axis=1)) * (1 + 2.0**-30)
    return norms


def _limits(
    batch: tuple[int, ...], n: int, causal: bool, counts: NDArray[np.int64] | None
) -> NDArray[np.int64]:
    """Return how many keys each row may see, from the first."""
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


def _narrow(name: str, value: object) -> Stored:
    """Take an array of vectors whose products are exact in float64."""
    array, dtype = coerce.as_native_floats(name, value)
    if dtype == "float64":
        raise CertkError(f"{name} has dtype float64; convert it to float16, bfloat16 or float32")
    if array.ndim < 2:
        raise CertkError(f"{name} has shape {array.shape}; pass vectors: (..., n, d)")
    return array, dtype


def _pairs(original: object, other: object) -> list[tuple[Stored, Stored]]:
    found = []
    for name, pair in (("original", original), ("other", other)):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise CertkError(f"{name} is a {type(pair).__name__}; pass a pair: keys and values")
        found.append((_narrow(f"{name}[0]", pair[0]), _narrow(f"{name}[1]", pair[1])))
    for at in range(2):
        shape, like = found[1][at][0].shape, found[0][at][0].shape
        if shape != like:
            raise CertkError(f"other[{at}] has shape {shape}; pass that of original[{at}], {like}")
    return found


def _longest(name: str, stored: Stored, head: tuple[int, ...], places: NDArray[np.int64]) -> float:
    """Return the length of the longest vector of a head, or more.

    Raises `CertkError` unless all are finite. `places` are where they come from.
    """
    array, dtype = stored
    longest = 0.0
    for start in range(0, len(array), _CHUNK):
        some = array[start : start + _CHUNK]
        vectors = coerce.widen(some.view(np.float16) if dtype == "float16" else some, dtype)
        wrong = np.argwhere(~np.isfinite(vectors))
        if wrong.size:
            place = [*head, int(places[start + wrong[0, 0]]), int(wrong[0, 1])]
            raise CertkError(f"{name}{place} is not finite; repair the input")
        longest = max(longest, float(_norms(vectors).max()))
    return longest
