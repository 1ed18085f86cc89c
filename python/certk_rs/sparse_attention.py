"""Certified sparse attention: few keys are scored and averaged; what the others carry is proven."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _native
from ._arrays import coerce
from ._arrays.attended import like, sight_of
from .errors import CertkError
from .key_index import IndexArrays, KeyIndex
from .kv_index import KvIndex
from .paged_rows import PagedRows, RowsLike, native_rows
from .ragged_rows import RaggedRows
from .results import AttentionResult

_Shape = tuple[int, ...]

Weights = Literal["codes", "exact"]
"""Sources of weights: codes and short floats as well, or exact scores alone."""


_KINDS = (RaggedRows, PagedRows)


class ValueBall:
    """A ball around the values of each head, for callers who attend to the same values repeatedly.

    With `ball=` the `error_bound` of `attention` reads no values. A decoding loop keeps one beside
    its cache and appends each new value as it comes, in time proportional to what is new. The ball
    is apart from the key index because values change, move and are masked independently of keys.

    It speaks of the values as they were when they were added; a bound from a ball holds if the
    values passed to `attention` are those.
    """

    def __init__(self, values: ArrayLike, *, threads: int | None = None) -> None:
        """Read all values.

        Args:
            values: (..., kv_heads, n, d_v) as in `attention`; float16, bfloat16, float32, float64.
            threads: Number of threads; None for all available.

        Raises:
            CertkError: Bad input; the message names the argument.
        """
        stored = array, _ = coerce.as_native_floats("v", values)
        self._native = _native.ValueBall.build(stored, threads)
        self._batch = array.shape[:-2]

    def append(self, values: ArrayLike) -> None:
        """Add values (..., kv_heads, m, d_v) behind the others; the leading axes must be the same.

        Raises:
            CertkError: Another shape.
        """
        self._native.append(coerce.as_native_floats("v", values))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy the ball: it and its copy then grow independently."""
        return ball_of_parts, (*self._native.parts(), self._batch)

    @property
    def radius(self) -> NDArray[np.float64]:
        """Radius of each head's ball, (..., kv_heads); inf where a value is not finite."""
        return self._native.radii().reshape(self._batch)

    def __len__(self) -> int:
        """Values per head."""
        return self._native.len

    def __repr__(self) -> str:
        return f"ValueBall({len(self)} values, batch shape {self._batch})"


def attention(
    q: ArrayLike,
    k: RowsLike | RaggedRows,
    v: RowsLike | RaggedRows,
    eps: ArrayLike | None = None,
    *,
    index: KeyIndex | IndexArrays | None = None,
    scale: float | None = None,
    causal: bool = False,
    lengths: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    out_tol: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    soft_cap: float | None = None,
    bias: ArrayLike | None = None,
    ball: ValueBall | None = None,
    even_if_slower: bool = False,
    weights: Weights = "codes",
    threads: int | None = None,
) -> AttentionResult:
    """Softmax attention that drops what it can prove to be small, and says what was lost.

    The proof is about the real-number attention over exactly the stored q, k and v: all rounding is
    inside. Results are the same, bit for bit, for any number of threads and any instruction set,
    but for the last bits of `out`, `log_mass` and `error_bound` on CPUs with AMX.
    Keys and values that no row sees may hold anything, also NaN. Arrays must not be written during
    the call.

    Args:
        q: Queries (..., heads, m, d), or (m, d). float16, bfloat16 (torch or ml_dtypes), float32,
            float64; NumPy or torch CPU; lists become float64. q, k and v may differ in dtype.
        k: Keys (..., kv_heads, n, d), or (n, d), not repeated: heads is a multiple of kv_heads, and
            query heads h * heads / kv_heads and on share the keys of kv head h.
        v: Values (..., kv_heads, n, d_v), or (n, d_v). Where heads have different numbers of keys,
            pass k and v as `RaggedRows`; a mask then has an entry for each key of the longest.
            Where they lie in pages, pass `PagedRows`.
        eps: Budget of dropped softmax mass, 0 <= eps < 1: a number, or one per row, of shape
            q.shape[:-1]. 0 is plain attention. Exactly one of eps and out_tol is given.
        index: A `KeyIndex` of exactly these keys, or its `IndexArrays`; most keys are then judged
            by their codes. A `KvIndex` of exactly these keys and values also lets weights and
            values come from codes (`Rung.CODED`). An index of others gives certificates of no
            particular row. Not for float64 keys.
        scale: Multiplies q.k; None for the float64 nearest d**-0.5.
        causal: Query i of m sees keys up to i + n - m.
        lengths: How many keys a row sees, from the first; integers of shape q.shape[:-1], or one
            for all.
        mask: Boolean (True = seen), broadcasts to q.shape[:-1] + (n,). An additive mask is taken if
            it holds only 0 and entries <= finfo.min / 2.
        out_tol: Budget on the output's error instead of eps, in the units of v (Euclidean norm over
            d_v), finite, >= 0: a number, or one per row. `error_bound` is then at most that.
        sinks: Scores that join the softmax without a value, as the attention sinks of gpt-oss do: a
            number per query head, broadcasts to q.shape[:-2]; -inf for none. Tail masses are then
            shares of the whole softmax, that of the sink included.
        soft_cap: Soft cap c of scores, from 1e-30 to 1e30, as in Gemma 2: a score x becomes
            c tanh(x / c).
        bias: Numbers to add to the scores, after the cap, as in T5 and ALiBi; -inf hides a key.
            Floats as q, broadcast to q.shape[:-1] + (n,). With a bias or a cap, a `KeyIndex` is of
            no use, and a `KvIndex` is.
        ball: A `ValueBall` around exactly these values, so that the error bound reads none.
        even_if_slower: Drop what may be dropped also where computing everything is faster, to see
            how many keys a row needs.
        weights: "exact" for truncation alone, as in arXiv 2512.07647: keys are dropped, and the
            weights of the others come from exact scores. "codes" lets weights come from codes, and
            of many rows be rounded to bf16, as far as eps allows.
        threads: Number of threads; None for all available (RAYON_NUM_THREADS and CPU quotas count).

    Returns:
        An `AttentionResult`; `out` has the dtype and the kind (NumPy or torch) of q. A row that
        sees no key gives zeros.

    Raises:
        CertkError: Bad input, or an out_tol below what rounding leaves; the message names the
            argument and the place.
    """
    stored = queries, dtype = coerce.as_native_floats("q", q)
    batch = queries.shape[:-1]
    if (eps is None) == (out_tol is None):
        given = "neither" if eps is None else "both"
        raise CertkError(
            f"eps and out_tol: {given} given; pass eps, a budget on the dropped mass, or out_tol, "
            "one on the output's error"
        )
    if ball is not None and not isinstance(ball, ValueBall):
        raise CertkError(f"ball is a {type(ball).__name__}; pass a certk_rs.ValueBall of v")
    if index is not None and not isinstance(index, KeyIndex | IndexArrays):
        raise CertkError(f"index is a {type(index).__name__}; pass a certk_rs.KeyIndex of k")
    need_weights(weights)
    seen = (causal, lengths, mask, sinks, soft_cap, bias)
    of_values = (
        None if ball is None else ball._native,
        index._values if isinstance(index, KvIndex | IndexArrays) else None,
    )
    loss = (_budget("eps", eps, batch), _budget("out_tol", out_tol, batch))
    how = (scale, even_if_slower, weights == "exact")
    if type(k) is not type(v) and (isinstance(k, _KINDS) or isinstance(v, _KINDS)):
        raise CertkError(
            f"k is a {type(k).__name__}, v a {type(v).__name__}; pass two of a kind, with the same "
            "heads"
        )
    if isinstance(k, RaggedRows) or isinstance(v, RaggedRows) or _of_several(k):
        if index is not None or ball is not None:
            raise CertkError("index and ball go with one sequence whose heads have equal lengths")
        stored_keys, heads, longest, _ = _uneven("k", k)
        stored_values, others, _, d_v = _uneven("v", v)
        if heads != others:
            raise CertkError("k and v have other starts or counts; pass values beside their keys")
        sight = sight_of(batch, longest, seen, of_values, threads)
        found = _native.attention_of_ragged(
            stored, stored_keys, stored_values, heads, loss, (*how, False), sight
        )
    else:
        stored_keys, shape = native_rows("k", k)
        stored_values, value_shape = native_rows("v", v)
        if isinstance(k, PagedRows) and isinstance(index, IndexArrays):
            raise CertkError("index is an IndexArrays; with PagedRows pass a KeyIndex or a KvIndex")
        n, d_v = shape[-2] if len(shape) > 1 else None, value_shape[-1]
        # Without an index all keys are read, one after the other.
        mapped = index is not None and (coerce.is_mapped(k) or coerce.is_mapped(v))
        found = _native.attention(
            stored,
            stored_keys,
            stored_values,
            None if index is None else index._index,
            loss,
            (*how, mapped),
            sight_of(batch, n, seen, of_values, threads),
        )
    out = like(q, found.out.reshape(*batch, d_v), dtype)
    return AttentionResult._of(found, out=out)


def _of_several(rows: object) -> bool:
    return isinstance(rows, PagedRows) and not rows.is_of_one


def _uneven(name: str, rows: Any) -> tuple[Any, tuple[list[int], list[int], list[int]], int, int]:
    """Return rows of heads of different numbers, the heads, the longest, and the entries of a row.

    Pages tell their heads themselves.
    """
    if isinstance(rows, PagedRows):
        stored, shape = rows._parts(name)
        return stored, ([], [], stored[3]), shape[-2], shape[-1]
    stored, heads = rows._parts(name)
    return stored, heads, max(heads[2], default=0), stored[0].shape[-1]


def need_weights(weights: str) -> None:
    """Raise `CertkError` if there is no such choice of weights."""
    if weights not in ("codes", "exact"):
        raise CertkError(f'weights is {weights!r}; pass "codes" or "exact"')


def ball_of_parts(shape: list[int], heads: list[NDArray[np.float64]], batch: _Shape) -> ValueBall:
    """Restore a pickled or saved ball."""
    ball = object.__new__(ValueBall)
    ball._native, ball._batch = _native.ValueBall.of_parts(shape, heads), batch
    return ball


def _budget(name: str, value: ArrayLike | None, batch: _Shape) -> NDArray[np.float64] | None:
    return None if value is None else coerce.per_row_floats(name, value, batch)
