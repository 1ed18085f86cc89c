"""How many keys a later query misses, against how many stay: what a hot set and recall would do.

The earlier half of the looked-at queries chooses the keys that stay (see `hot_keys.py`), the later
half tells what it misses. Keys that the last of the earlier queries does not see are taken to have
come since, and stay. So the curve is about queries that nobody has asked yet, of this same text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..cache_format import Cache, Layer
from ..hot_keys import Demand, Rows, hottest, missing

# Shares of the keys that stay.
SHARES = (0.05, 0.1, 0.2, 0.4, 0.6)
# With fewer queries there is no curve.
FEWEST = 8


@dataclass(frozen=True)
class HotPoint:
    """What a later query misses where some keys stay. Shares are of the keys of a kv head."""

    asked: float
    """The share of all keys that may stay."""
    stays: float
    """The share that does: as many keys as may, heads that are needed more keeping more of it."""
    missed: float
    """What a later query misses in a kv head: the mean over queries and kv heads."""
    worst: float
    """The same, where a tenth of the queries of all kv heads miss more."""
    never: float
    """The share of queries, of all kv heads, that miss nothing."""


def hot_curve(
    cache: Cache,
    rows_of: Callable[[Layer], Iterator[tuple[int, NDArray[np.float64], NDArray[np.int64]]]],
    eps: float,
    threads: int | None,
) -> tuple[HotPoint, ...]:
    """The curve of one file; empty if a layer has too few queries.

    Args:
        cache: The input, open; it is read twice.
        rows_of: Gives each query head of a layer with the scores (rows, n) of some of its queries,
            and how many keys those see, (rows,).
        eps: What a query may lose.
        threads: How many threads; nothing depends on it.
    """
    demands, seen = [], []
    for layer in cache.layers:
        for group in _groups(layer, rows_of):
            known = len(group[0].lengths) // 2
            if len(group[0].lengths) < FEWEST:
                return ()
            there = int(group[0].lengths[:known].max())
            early = [Rows(each.scores[:known, :there], each.lengths[:known]) for each in group]
            demand = Demand(there, eps, threads)
            demand.add(early)
            demands.append(demand.shares())
            seen.append(there)
    every = sum(seen)
    of_share = [hottest(demands, max(1, int(share * every))) for share in SHARES]
    missed: list[list[NDArray[np.float64]]] = [[] for _ in SHARES]
    stay = [0] * len(SHARES)
    heads = iter(zip(demands, seen, strict=True))
    edges = zip(*of_share, strict=True)
    for layer in cache.layers:
        for group in _groups(layer, rows_of):
            demanded, there = next(heads)
            known = len(group[0].lengths) // 2
            late = [Rows(each.scores[known:], each.lengths[known:]) for each in group]
            for at, edge in enumerate(next(edges)):
                stays = np.ones(layer.n, bool)
                stays[:there] = edge.stays(demanded)
                stay[at] += int(stays[:there].sum())
                missed[at].append(missing(late, stays, eps, threads) / there)
    points = []
    for share, count, each in zip(SHARES, stay, missed, strict=True):
        of_all = np.concatenate(each)
        points.append(
            HotPoint(
                share,
                count / every,
                float(of_all.mean()),
                float(np.quantile(of_all, 0.9)),
                float((of_all == 0).mean()),
            )
        )
    return tuple(points)


def _groups(
    layer: Layer,
    rows_of: Callable[[Layer], Iterator[tuple[int, NDArray[np.float64], NDArray[np.int64]]]],
) -> Iterator[list[Rows]]:
    """The query heads of each kv head of a layer."""
    size, group = layer.heads // layer.kv_heads, list[Rows]()
    for _, scores, lengths in rows_of(layer):
        group.append(Rows(scores, lengths))
        if len(group) == size:
            yield group
            group = []
