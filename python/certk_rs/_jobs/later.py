"""Losses of later queries: to a set that was made for earlier ones, and from codes alone.

The queries of a cache are halved. A set of each kv head is made for the first half. The second half
is then judged over that set, and over codes of all keys and values without any exact row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from .._files.cache import Cache
from .._files.codes import ROLES, code_bytes
from .._files.layers import Layer
from .._files.safetensors import ITEMSIZE
from .._files.values import widen
from ..errors import CertkError
from ..keepset import keep_set
from ..kept_rows import KeptRows
from ..kv_index import KvIndex
from ..selection import certify

Floats = NDArray[np.float64]

# Budgets from here on are proven by keys in 12 bits for nearly every query; smaller ones need 16.
_COARSE = 0.05
_VALUE_BITS = 8
# Scores of a half of a head's queries that are looked at: of the earlier, and of the later one.
_SCORES = (1 << 22, 1 << 21)


@dataclass(frozen=True)
class Later:
    """Losses of the later queries of some kv heads; a row is a query of a query head."""

    eps: float
    key_bits: int
    rows: int
    cache_bytes: int
    """Bytes of keys and values."""
    kept_bytes: int
    """Bytes of those that the sets keep."""
    code_bytes: int
    """Bytes of codes of all, values in 8 bits."""
    over: int
    """Rows that lose more than eps to the sets."""
    lost: float
    """The largest tail mass of a row that the sets drop."""
    moved: float
    """The largest distance that this moves an output by, as a share of its length."""
    proven: float
    """The largest total variation distance that codes prove."""
    unproven: int
    """Rows of which codes prove more than eps."""
    moved_by_codes: float | None
    """As `moved`, of outputs from codes; None where these hold no scores."""
    sampled: bool = False
    """Whether sets are for some of the earlier queries, evenly spaced: those for all are larger."""

    def joined(self, other: Later) -> Later:
        """Return the same of all heads of both."""
        sums = ("rows", "cache_bytes", "kept_bytes", "code_bytes", "over", "unproven")
        most = ("lost", "moved", "proven")
        moved = (self.moved_by_codes, other.moved_by_codes)
        return Later(
            self.eps,
            self.key_bits,
            **{name: getattr(self, name) + getattr(other, name) for name in sums},
            **{name: max(getattr(self, name), getattr(other, name)) for name in most},
            sampled=self.sampled or other.sampled,
            moved_by_codes=None if None in moved else max(filter(None, moved), default=0.0),
        )


def later_in_all(cache: Cache, budgets: Sequence[float], threads: int | None) -> tuple[Later, ...]:
    """Return the losses of all layers together, by budget; () if no two queries see a key."""
    found = [each for layer in cache.layers for each in later(cache, layer, budgets, threads)]
    return tuple(reduce(Later.joined, each) for each in zip(*found, strict=True))


def later(
    cache: Cache, layer: Layer, budgets: Sequence[float], threads: int | None
) -> Iterator[list[Later]]:
    """Yield the losses of each kv head of a layer by budget, if two queries or more see a key."""
    seeing = np.arange(layer.blind(cache.causal_offset), layer.m)
    every = np.array_split(seeing, 2)
    halves = [
        spread(half, max(1, most // layer.n)) for half, most in zip(every, _SCORES, strict=True)
    ]
    if not len(halves[1]):
        return
    # Sets for some queries are smaller than for all; what some lose is what all do.
    sampled = len(halves[0]) < len(every[0])
    query, *pair = (cache.read(layer, role) for role in ("query", *ROLES))
    group = layer.heads // layer.kv_heads
    for head in range(layer.kv_heads):
        rows = widen(query[head * group : (head + 1) * group], layer.dtypes["query"])
        key, value = (
            widen(stored[head], layer.dtypes[role])
            for role, stored in zip(ROLES, pair, strict=True)
        )
        earlier, after = (_Rows.of(cache, layer, rows, half, key) for half in halves)
        flat, seen = earlier.scores.reshape(-1, layer.n), earlier.lengths.ravel()
        scale, found = cache.scales[layer.index], []
        for eps in budgets:
            kept = np.zeros(layer.n, np.bool_)
            kept[keep_set(flat, eps, lengths=seen, threads=threads).indices] = True
            one = _judged(layer, after, key, value, kept, eps, scale, threads)
            found.append(replace(one, sampled=sampled))
        yield found


@dataclass(frozen=True, eq=False)
class _Rows:
    """Queries (group, rows, d) of a kv head, scores (group, rows, n), counts of visible keys."""

    queries: Floats
    scores: Floats
    lengths: NDArray[np.int64]

    @classmethod
    def of(
        cls, cache: Cache, layer: Layer, queries: Floats, half: NDArray[np.int64], key: Floats
    ) -> _Rows:
        own, seen = queries[:, half], lengths(cache, layer, half)
        scores = (own @ key.T) * cache.scales[layer.index]
        return cls(own, scores, np.broadcast_to(seen, scores.shape[:2]))

    def outputs(self, value: Floats, some: NDArray[np.bool_]) -> Floats:
        """Return the attention over some keys, (group, rows, d)."""
        seen = (np.arange(len(value)) < self.lengths[..., None]) & some
        scores = np.where(seen, self.scores, -np.inf)
        top = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - np.where(np.isfinite(top), top, 0.0))
        total = np.maximum(weights.sum(axis=-1, keepdims=True), np.finfo(float).tiny)
        found: Floats = (weights / total) @ value
        return found


def _judged(
    layer: Layer,
    rows: _Rows,
    key: Floats,
    value: Floats,
    kept: NDArray[np.bool_],
    eps: float,
    scale: float,
    threads: int | None,
) -> Later:
    lost = certify(rows.scores, kept, lengths=rows.lengths, threads=threads).tail_mass_upper
    exact = rows.outputs(value, np.ones_like(kept))
    bits = {"key": 12 if eps >= _COARSE else 16, "value": _VALUE_BITS}
    # Float32 holds what was stored.
    keys, values = (each[None].astype(np.float32) for each in (key, value))
    proven, moved, bare = np.ones(lost.shape), None, 0
    # Codes whose scores overflow answer nothing.
    with contextlib.suppress(CertkError):
        index = KvIndex.build(
            keys,
            values,
            keep_keys=False,
            bits=bits["key"],
            value_bits=bits["value"],
            threads=threads,
        )
        [without] = index.bare
        coded = index.attention(
            rows.queries,
            eps,
            kept=KeptRows(keys[0, without], values[0, without], [without]),
            scale=scale,
            lengths=rows.lengths,
            threads=threads,
        )
        proven, moved, bare = coded.tail_mass_upper, _moved(exact, coded.out), len(without)
    of_row = layer.d * sum(ITEMSIZE[layer.dtypes[role]] for role in ROLES)
    return Later(
        eps,
        bits["key"],
        rows=lost.size,
        cache_bytes=layer.n * of_row,
        kept_bytes=int(kept.sum()) * of_row,
        code_bytes=code_bytes(layer, bits) // layer.kv_heads + bare * of_row,
        over=int((lost > eps).sum()),
        lost=float(lost.max()),
        moved=_moved(exact, rows.outputs(value, kept)),
        unproven=int((proven > eps).sum()),
        proven=float(proven.max()),
        moved_by_codes=moved,
    )


def _moved(exact: Floats, found: Floats) -> float:
    """Return the largest distance of an output from the exact one, as a share of its length."""
    away = np.linalg.norm(found - exact, axis=-1)
    length = np.linalg.norm(exact, axis=-1)
    return float(np.divide(away, length, out=np.zeros_like(away), where=length > 0).max())


def lengths(cache: Cache, layer: Layer, queries: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many keys queries of a layer see."""
    if cache.causal_offset is None:
        return np.full(len(queries), layer.n)
    return np.clip(queries + cache.causal_offset + 1, 0, layer.n)


def spread(queries: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Return at most so many of the queries, evenly spaced."""
    places = np.linspace(0, len(queries) - 1, min(len(queries), most))
    return queries[np.unique(places.round().astype(np.int64))]
