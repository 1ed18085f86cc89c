"""Rows of several lengths out of one cache: what a query sees of the first n keys.

The longest length is halved again and again, down to a shortest one. In a causal cache every query
sees its own prefix, so that a length n stands for the queries that see more than n/2 and at most n
keys, each with all it sees: these are rows that the model computed. In a cache where every query
sees every key there is one length only; its first n keys, under the same queries, stand for a
shorter context that the model has never seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..cache_format import Cache, Layer

# Scores of a head that are looked at at one length, and at least so many queries.
SCORES = 1 << 22
QUERIES = 16
SHORTEST = 16
STANDS_FOR = (
    "Every query sees every key in this cache: its first n keys stand for a shorter context, which "
    "the model has not seen."
)


@dataclass(frozen=True, eq=False)
class Prefix:
    """Some rows of one query head; a row is a query over the first keys, all that it sees."""

    n: int
    """What no row exceeds: the longest length of the layer, halved some times."""
    queries: NDArray[np.int64]
    """Positions of the queries in the cache, (rows,)."""
    lengths: NDArray[np.int64]
    """Keys that each sees, (rows,), from n/2 (exclusive) to n; all n unless the cache is causal."""


def halved(longest: int, shortest: int = SHORTEST) -> list[int]:
    """The longest length, halved (rounded down) while it is no shorter than the shortest; rising.

    Powers of two if the longest is one.
    """
    lengths = []
    while longest >= max(1, shortest):
        lengths.append(longest)
        longest //= 2
    return lengths[::-1]


def some_of(lengths: Sequence[int], most: int) -> list[int]:
    """Lengths that a table has room for: the shortest, the longest, and evenly between them."""
    return sorted({lengths[i * (len(lengths) - 1) // (most - 1)] for i in range(most)})


def prefixes(
    layer: Layer, causal_offset: int | None, shortest: int = SHORTEST, scores: int = SCORES
) -> list[Prefix]:
    """The lengths of a layer that have queries, rising, with the queries of each.

    Args:
        layer: The layer.
        causal_offset: Query i sees the keys <= i + offset; None: all.
        shortest: The least length, >= 1.
        scores: How many scores of a head are looked at at each length, beyond `QUERIES` queries;
            of more queries some are taken, evenly spaced.
    """
    every = np.arange(layer.m)
    seen = np.full(layer.m, layer.n)
    if causal_offset is not None:
        seen = np.clip(every + causal_offset + 1, 0, layer.n)
    found = []
    for n in halved(int(seen.max()), shortest):
        queries = every if causal_offset is None else every[(seen > n // 2) & (seen <= n)]
        most = max(QUERIES, scores // n)
        if len(queries) > most:
            queries = queries[np.linspace(0, len(queries) - 1, most).round().astype(np.int64)]
        if len(queries):
            found.append(Prefix(n, queries, np.minimum(seen[queries], n)))
    return found


def rows_of_heads(
    cache: Cache, layer: Layer
) -> Iterator[tuple[int, NDArray[np.float64], NDArray[np.float64]]]:
    """Each query head with its queries (m, d), already times the scale, and its keys (n, d)."""
    scale = cache.scales[layer.index]
    for head, queries, keys in cache.heads(layer):
        yield head, queries * scale, keys


def scores_of(
    prefix: Prefix, queries: NDArray[np.float64], keys: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Scores (rows, n) of a prefix; -inf beyond what a row sees."""
    scores = queries[prefix.queries] @ keys[: prefix.n].T
    scores[np.arange(prefix.n) >= prefix.lengths[:, None]] = -np.inf
    return scores
