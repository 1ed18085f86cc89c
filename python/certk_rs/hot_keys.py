"""Hot keys: the keys that queries need most often stay, and a guard fetches others on demand.

A query needs the keys of its own smallest set within eps. Those of them that have not stayed are
fetched, unless the keys that stay suffice. So the mean number of fetched keys is at most the sum of
the demands for keys that have not stayed. That sum is least if the keys in highest demand stay, in
any head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .selection import select

# A key counts as seen by at least this share of all queries: few queries tell little about it.
_SEEN = 0.125
# Ties are broken by the demand under a budget so many times smaller.
_MORE = 8


@dataclass(frozen=True, eq=False)
class Rows:
    """Scores (rows, n) of one query head, each row with its first `lengths` (rows,) keys."""

    scores: NDArray[np.float64]
    lengths: NDArray[np.int64]


class Demand:
    """The demand for the keys of a kv head by some queries of the heads that share it."""

    def __init__(self, n: int, eps: float, threads: int | None) -> None:
        """Begin without queries: n keys, a budget 0 < eps < 1, and a number of threads."""
        self._budgets = (eps, eps / _MORE)
        self._threads = threads
        self._needed = np.zeros((2, n), np.int64)
        self._lengths: list[NDArray[np.int64]] = []

    def add(self, heads: Iterable[Rows]) -> None:
        """Count the same queries in every head that shares the keys."""
        needed: list[NDArray[np.bool_] | None] = [None, None]
        lengths = np.empty(0, np.int64)
        for rows in heads:
            lengths = rows.lengths
            for at, eps in enumerate(self._budgets):
                mask = select(rows.scores, eps, lengths=lengths, threads=self._threads).to_mask()
                before = needed[at]
                needed[at] = mask if before is None else before | mask
        for at, found in enumerate(needed):
            if found is not None:
                self._needed[at] += found.sum(axis=0)
        self._lengths.append(lengths)

    def shares(self) -> NDArray[np.float64]:
        """Return the share of queries that need a key, of those that see it, (n,), in [0, 2].

        At least an eighth of all queries count as seeing it. Ties are broken by the demand under a
        smaller budget, which counts for less than one query. These are counts, equal on any
        machine.
        """
        if not self._lengths:
            # No query sees a key.
            return np.zeros(self._needed.shape[1])
        lengths = np.sort(np.concatenate(self._lengths))
        first, second = self._needed
        seen = len(lengths) - np.searchsorted(lengths, np.arange(len(first)), "right")
        of_all = np.maximum(seen, _SEEN * len(lengths))
        shares: NDArray[np.float64] = (first + second / (len(lengths) + 1)) / of_all
        return shares


@dataclass(frozen=True)
class Edge:
    """A rule for the keys of a kv head that stay: those above a demand, and the first few at it."""

    demand: float
    first: int

    def stays(self, demands: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return which keys stay, (n,), of a head with these demands."""
        stay: NDArray[np.bool_] = demands > self.demand
        stay[np.flatnonzero(demands == self.demand)[: self.first]] = True
        return stay


def hottest(demands: Sequence[NDArray[np.float64]], most: int) -> list[Edge]:
    """Return the edge of each kv head, so that `most` keys stay in all heads together.

    Among keys in equal demand, heads keep one in turn, each its earliest.

    Args:
        demands: One array per kv head, infinite for keys that must stay, even if these are more
            than `most`.
        most: The number of keys that stay.
    """
    every = np.concatenate(list(demands))
    count = min(max(most, int(np.isinf(every).sum())), len(every))
    if count < 1:
        return [Edge(np.inf, 0)] * len(demands)
    edge = float(np.partition(every, len(every) - count)[len(every) - count])
    alike = np.array([np.count_nonzero(each == edge) for each in demands])
    first = _in_turn(alike, count - int(np.count_nonzero(every > edge)))
    return [Edge(edge, int(each)) for each in first]


def _in_turn(there: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return how many of its keys each head gives, one in turn, `count` in all."""
    given = np.zeros_like(there)
    while count:
        able = np.flatnonzero(there > given)[:count]
        rounds = min(count // len(able), int((there - given)[able].min()))
        given[able] += rounds
        count -= rounds * len(able)
    return given
