"""Codes and bounds of dropped keys and values, which prove the loss of each later query.

A keep-set is certified for the queries it was chosen for. A `Guard` holds one byte an entry of
every dropped key, with a bound on what these bytes leave out (docs/search.md), and a ball around
the dropped values. So the mass of the dropped keys has a proven upper end for any query, and so has
the error of its output; and where that is too much, the guard names the keys that must come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _native
from ._arrays import coerce
from ._files.guards import GuardedHead
from .errors import CertkError
from .key_index import KeyIndex
from .sparse_attention import ValueBall

# Codes of so many keys are laid out together.
_GROUP = 16
# bfloat16 of 1: the scale of a place where no key is.
_ONE = 0x3F80


@dataclass(frozen=True, eq=False)
class Judged:
    """Proven losses of queries (heads, m), and the keys to be fetched.

    Of the real-number softmax over the kept and the dropped keys, the dropped ones have a share of
    at most `lost`. Without those in `back` (positions in the text, ascending, for each kv head what
    any of its queries needs), the others have at most `left`, which is within the budget.
    """

    lost: NDArray[np.float64]
    left: NDArray[np.float64]
    back: tuple[NDArray[np.int64], ...]


class Guard:
    """Codes of the dropped keys of one layer, and balls around its dropped values.

    Axes are those of a cache: keys (kv_heads, n, d), values (kv_heads, n, d_v), queries (heads, m,
    d), heads a multiple of kv_heads. It takes d + 4 bytes a dropped key (d in whole fours) and its
    position, beside a matrix (d, d) for each kv head, and remembers no key and no value itself.
    """

    def __init__(
        self,
        index: KeyIndex,
        positions: Sequence[NDArray[np.int64]],
        ball: ValueBall,
        centres: NDArray[np.float64],
        n: int,
    ) -> None:
        """Take over parts; users call `build`."""
        self._index = index
        self._ball = ball
        self._centres = centres
        self.positions = tuple(positions)
        """Of each kv head the positions of the dropped keys, ascending."""
        self.n = n
        """Keys before anything was dropped."""
        self._counts = np.array([len(each) for each in positions], np.int64)

    @classmethod
    def build(
        cls,
        keys: ArrayLike,
        values: ArrayLike,
        kept: Sequence[ArrayLike],
        *,
        threads: int | None = None,
    ) -> Guard:
        """Remember the keys and values that are not kept.

        Args:
            keys: All keys (kv_heads, n, d): float32, float16 or bfloat16, finite.
            values: All values (kv_heads, n, d_v).
            kept: Of each kv head the positions that are kept.
            threads: Number of threads; None for all available.

        Raises:
            CertkError: Bad input; the message names the argument.
        """
        stored_keys, dtype = coerce.as_native_floats("keys", keys)
        stored_values, value_dtype = coerce.as_native_floats("values", values)
        shape = stored_keys.shape
        if len(shape) != 3 or stored_values.ndim != 3 or stored_values.shape[:2] != shape[:2]:
            raise CertkError(
                f"keys have shape {shape}, values {stored_values.shape}: pass (kv_heads, n, d) and "
                "(kv_heads, n, d_v)"
            )
        if len(kept) != shape[0]:
            raise CertkError(f"kept has {len(kept)} entries for {shape[0]} kv heads: pass one each")
        positions = [others(np.asarray(each), shape[1]) for each in kept]
        heads = [
            guard_head(
                (stored_keys[head, dropped], dtype),
                (stored_values[head, dropped], value_dtype),
                threads,
            )
            for head, dropped in enumerate(positions)
        ]
        return cls.of_heads(shape, dtype, heads, positions)

    @classmethod
    def of_heads(
        cls,
        shape: tuple[int, ...],
        dtype: str,
        heads: Sequence[GuardedHead],
        positions: Sequence[NDArray[np.int64]],
    ) -> Guard:
        """Put together what is remembered of each kv head (`guard_head`).

        Args:
            shape: That of all keys, (kv_heads, n, d).
            dtype: Theirs: float32, float16 or bfloat16.
            heads: One per kv head.
            positions: Of each kv head the positions of its dropped keys, ascending.

        Raises:
            CertkError: They cannot be those of any keys and values.
        """
        kv_heads, n, d = shape
        most = max((len(each) for each in positions), default=0)
        padded = [_padded(head.parts, most, d) for head in heads]
        whole = (kv_heads, most, d)
        index = KeyIndex(_native.KeyIndex.of_parts(whole, dtype, padded), None)  # type: ignore[arg-type]
        balls = [head.ball for head in heads]
        centres = np.array([ball[:-1] for ball in balls])
        of_values = _native.ValueBall.of_parts([kv_heads, most, centres.shape[1]], balls)
        ball = object.__new__(ValueBall)
        ball._native, ball._batch = of_values, (kv_heads,)
        return cls(index, positions, ball, centres, n)

    @property
    def kv_heads(self) -> int:
        """Return the number of kv heads."""
        return len(self.positions)

    @property
    def nbytes(self) -> int:
        """Bytes that grow with the dropped keys: codes, scales, radii, and positions."""
        return self._index.nbytes + sum(each.nbytes for each in self.positions)

    def __repr__(self) -> str:
        dropped = int(self._counts.sum())
        return f"Guard({dropped} of {self.n * self.kv_heads} keys dropped, {self.nbytes} bytes)"

    def judge(
        self,
        q: ArrayLike,
        beside: tuple[ArrayLike, ArrayLike],
        eps: ArrayLike,
        *,
        scale: float | None = None,
        there: Sequence[NDArray[np.int64]] | None = None,
        threads: int | None = None,
    ) -> Judged:
        """Prove what queries lose, and name what must come back to lose at most eps.

        Args:
            q: Queries (heads, m, d).
            beside: The two ends of what the kept keys weigh, and all else that the query attends
                to, in nats, (heads, m): `log_mass_lower` and `log_mass_upper` of `attention`.
            eps: Budget, 0 <= eps < 1: a number, or one per query.
            scale: What products are multiplied by; None for the float64 nearest d**-0.5.
            there: Of each kv head, positions that have come back already: they are part of what is
                kept, and of `beside`.
            threads: Number of threads; None for all available.

        Raises:
            CertkError: Bad input; the message names the argument.
        """
        queries, _ = coerce.as_native_floats("q", q)
        batch = queries.shape[:-1]
        if len(batch) != 2 or batch[0] % max(1, self.kv_heads):
            raise CertkError(
                f"q has shape {queries.shape}: pass (heads, m, d), heads a multiple of the "
                f"{self.kv_heads} kv heads"
            )
        size = batch[0] // self.kv_heads
        lengths = np.broadcast_to(np.repeat(self._counts, size)[:, None], batch)
        mask = None
        if there is not None and any(len(each) for each in there):
            of_heads = np.ones((self.kv_heads, len(self._index)), bool)
            for head, here in enumerate(there):
                of_heads[head, np.searchsorted(self.positions[head], here)] = False
            mask = np.repeat(of_heads, size, axis=0)[:, None]
        found = self._index.recall(
            q, beside, eps, scale=scale, lengths=lengths, mask=mask, threads=threads
        )
        rows = batch[1] * size
        back: list[NDArray[np.int64]] = []
        for head, places in enumerate(self.positions):
            first, last = found.indptr[head * rows], found.indptr[(head + 1) * rows]
            # Most steps name nothing: then there is nothing to sort.
            back.append(
                places[np.unique(found.indices[first:last])] if last > first else places[:0]
            )
        return Judged(found.lost_upper, found.tail_mass_upper, tuple(back))

    def moved(self, out: ArrayLike, lost: ArrayLike) -> NDArray[np.float64]:
        """Return a bound of each output's distance from that with the dropped keys, (heads, m).

        With o = (1 - t) o_kept + t o_dropped, and o_dropped in the ball around the dropped values,
        that is t (|out - c| + R), if `out` is o_kept; `attention`'s own bound comes on top.

        Args:
            out: (heads, m, d_v), the attention over the kept keys.
            lost: What `judge` says of the share of the dropped keys, (heads, m).
        """
        mass = np.asarray(lost, np.float64)
        away, radii = self._around(out)
        with _native.DefaultFloats():
            # A sum and a product round.
            reach = (away + radii) * (1 + 2.0**-49)
            moved: NDArray[np.float64] = np.where(mass > 0, mass * reach * (1 + 2.0**-49), 0.0)
        return moved

    def spare(self, out: ArrayLike, error: ArrayLike) -> NDArray[np.float64]:
        """Return the share of dropped keys at which an output moves by at most `error`, below 1.

        It holds for `out` and for what becomes of it where some of the dropped keys come back.

        Args:
            out: (heads, m, d_v), the attention over the kept keys.
            error: Euclidean norms over d_v, (heads, m), or one; 0 where they are negative.
        """
        away, radii = self._around(out)
        with _native.DefaultFloats(), np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            # An average over kept and dropped values is no farther from c than both are.
            reach = (np.maximum(away, radii) + radii) * (1 + 2.0**-48)
            room = np.maximum(np.asarray(error, np.float64), 0.0)
            share = np.where(reach > 0, room / reach, 1.0) * (1 - 2.0**-48)
        return np.minimum(share, 1 - 2.0**-53)

    def _around(self, out: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Distances of outputs from the centres of their balls, and the radii, rounded up."""
        array, dtype = coerce.as_native_floats("out", out)
        wide = coerce.widen(array, dtype)
        size = wide.shape[0] // max(1, self.kv_heads)
        centres, radii = (np.repeat(x, size, axis=0) for x in (self._centres, self._ball.radius))
        with _native.DefaultFloats():
            away = np.sqrt(np.square(wide - centres[:, None]).sum(axis=-1))
            # A sum of d_v squares and a root round, and squares underflow; an audit allows radii as
            # much.
            up = 1 + (wide.shape[-1] + 8) * 2.0**-52
            return away * up + 2.0**-500, radii[:, None] * up


def guard_head(
    keys: tuple[NDArray[Any], str], values: tuple[NDArray[Any], str], threads: int | None
) -> GuardedHead:
    """Remember the dropped keys (count, d) and values (count, d_v) of one kv head.

    Both as stored, bfloat16 as its bits, with the names of their dtypes.
    """
    (rows, dtype), (gone, value_dtype) = keys, values
    index = _native.KeyIndex.build((np.ascontiguousarray(rows), dtype), 8, None, threads)
    ball = _native.ValueBall.build((np.ascontiguousarray(gone), value_dtype), threads)
    [parts], [around] = index.parts(), ball.parts()[1]
    return GuardedHead(len(rows), parts, around)


def others(kept: NDArray[Any], n: int) -> NDArray[np.int64]:
    """Return the positions of n that are not kept."""
    left = np.ones(n, bool)
    if kept.size and (kept.ndim != 1 or kept.dtype.kind not in "iu"):
        raise CertkError(f"kept has shape {kept.shape} and dtype {kept.dtype}: pass positions")
    if kept.size and (int(kept.min()) < 0 or int(kept.max()) >= n):
        raise CertkError(f"kept holds positions outside of 0 to {n - 1}")
    left[kept.astype(np.int64)] = False
    return np.flatnonzero(left)


def _padded(parts: tuple[NDArray[Any], ...], most: int, d: int) -> tuple[NDArray[Any], ...]:
    """Parts of a head of an index with places for more keys, which nobody is shown."""
    codes, scales, radii, *rest = parts
    places = -(-most // _GROUP) * _GROUP
    whole = np.zeros(places * 4 * -(-d // 4), np.uint8)
    whole[: codes.size] = codes
    sizes, reaches = np.full(places, _ONE, np.uint16), np.zeros(places, np.uint16)
    sizes[: scales.size], reaches[: radii.size] = scales, radii
    # Of the last group, what is no key.
    return (whole, np.where(sizes > 0, sizes, _ONE).astype(np.uint16), reaches, *rest)
