"""Hot keys: those that queries need most often, while the others are elsewhere until asked for.

With a guard that knows what each query loses, and a place to fetch dropped keys from, the keys that
stay need not serve every query. They are then best chosen so that few keys are fetched. A query
needs the keys of its own smallest set within eps; each of them that has not stayed is fetched,
unless others that have stayed weigh so much that it need not be. So what is fetched in the mean is
at most the sum, over keys that have not stayed, of how often they are needed, and that sum is least
where those stay that are needed most often, in whatever head they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .selection import select

# Of so large a share of all queries at least a key counts as seen: of few not much is known.
_SEEN = 0.125
# How many times smaller the budget is by which keys are told apart.
_MORE = 8


@dataclass(frozen=True, eq=False)
class Rows:
    """Scores (rows, n) of one query head, each row with its first `lengths` (rows,) keys."""

    scores: NDArray[np.float64]
    lengths: NDArray[np.int64]


class Demand:
    """The demand for the keys of a kv head by some queries of the heads that share it."""

    def __init__(self, n: int, eps: float, threads: int | None) -> None:
        """Begin with no query.

        Args:
            n: How many keys there are.
            eps: What a query may lose, 0 < eps < 1.
            threads: How many threads; the result does not depend on it.
        """
        self._budgets = (eps, eps / _MORE)
        self._threads = threads
        self._needed = np.zeros((2, n), np.int64)
        self._lengths: list[NDArray[np.int64]] = []

    def add(self, heads: Iterable[Rows]) -> None:
        """Count some queries, as every head that shares the keys has them."""
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

        At least an eighth of all queries count as seeing it. Keys that are needed equally often are
        told apart by how often they would be with a smaller budget, which counts for less than one
        query. All this is counted, so that it is the same on any machine.
        """
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
    """Return the edge of each kv head, so that of all these heads together `most` keys stay.

    Of keys that are demanded alike, where not all of them may stay, heads keep one in turn, each
    its earliest.

    Args:
        demands: One per kv head, infinite for keys that must stay: these do, also if there are
            more than `most`.
        most: How many keys stay; all, if there are no more.
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
    """Return how many each gives, one in turn, until there are `count` in all."""
    given = np.zeros_like(there)
    while count:
        able = np.flatnonzero(there > given)[:count]
        rounds = min(count // len(able), int((there - given)[able].min()))
        given[able] += rounds
        count -= rounds * len(able)
    return given
