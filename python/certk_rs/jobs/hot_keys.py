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

from .. import selection

# Of so large a share of all queries at least a key counts as seen: of few not much is known.
_SEEN = 0.125
# Below the heaviest score, in nats: what weighs so little weighs nothing.
_NOTHING = 700.0


@dataclass(frozen=True, eq=False)
class Rows:
    """Scores (rows, n) of one query head, each row with its first `lengths` (rows,) keys."""

    scores: NDArray[np.float64]
    lengths: NDArray[np.int64]


def demand(heads: Iterable[Rows], eps: float, threads: int | None) -> NDArray[np.float64]:
    """How often each key is needed by the queries of the heads that share it, (n,), in [0, 2).

    It is the share of the queries that see a key (and of an eighth of all at least) which need it
    in any of these heads. What it weighs in the mean, divided likewise, is added to tell keys
    apart that are needed equally often; it counts for less than one query.

    Args:
        heads: The query heads of one kv head, of the same queries.
        eps: What a query may lose, 0 < eps < 1.
        threads: How many threads; the result does not depend on it.
    """
    needed: NDArray[np.bool_] | None = None
    weight: NDArray[np.float64] | None = None
    count, lengths = 0, np.empty(0, np.int64)
    for rows in heads:
        found = selection.select(rows.scores, eps, lengths=rows.lengths, threads=threads)
        mask = found.to_mask()
        needed = mask if needed is None else needed | mask
        mass = _mass(rows).mean(axis=0)
        weight = mass if weight is None else weight + mass
        lengths, count = rows.lengths, count + 1
    assert needed is not None
    assert weight is not None
    seen = len(lengths) - np.searchsorted(np.sort(lengths), np.arange(needed.shape[1]), "right")
    of_all = np.maximum(seen, _SEEN * len(lengths))
    return (needed.sum(axis=0) + weight / count) / of_all  # type: ignore[no-any-return]


def hottest(demands: Sequence[NDArray[np.float64]], most: int) -> float:
    """The demand from which keys stay, so that of all these heads together at most `most` do.

    Args:
        demands: One per kv head, infinite for keys that must stay.
        most: At least as many as must.
    """
    every = np.concatenate(list(demands))
    if most >= len(every):
        return 0.0
    least = len(every) - most
    edge = np.partition(every, [least - 1, least])
    # Keys that are demanded alike go together.
    return float(edge[least] if edge[least - 1] < edge[least] else np.nextafter(edge[least], 9.0))


def missing(
    heads: Iterable[Rows], stays: NDArray[np.bool_], eps: float, threads: int | None
) -> NDArray[np.int64]:
    """How many keys each query misses, (rows,): the fewest that bring it within eps, in each head.

    A key that several heads miss is counted once.

    Args:
        heads: The query heads of one kv head, of the same queries.
        stays: Keys that stay, (n,).
        eps: What a query may lose, 0 < eps < 1.
        threads: How many threads; the result does not depend on it.
    """
    gone = np.flatnonzero(~stays)
    fetched: NDArray[np.bool_] | None = None
    for rows in heads:
        lengths = np.searchsorted(gone, rows.lengths)
        beside = np.where(stays & _visible(rows), rows.scores, -np.inf)
        top = np.where(_visible(rows), rows.scores, -np.inf).max(axis=1)
        with np.errstate(divide="ignore"):
            kept = top + np.log(np.exp(beside - top[:, None]).sum(axis=1))
        # What stays is one key more, which no row is without.
        kept = np.maximum(kept, top - _NOTHING)
        scores = np.concatenate([kept[:, None], rows.scores[:, gone]], axis=1)
        found = selection.select(scores, eps, lengths=lengths + 1, keep_first=1, threads=threads)
        mask = found.to_mask()[:, 1:]
        fetched = mask if fetched is None else fetched | mask
    assert fetched is not None
    counts: NDArray[np.int64] = fetched.sum(axis=1)
    return counts


def _visible(rows: Rows) -> NDArray[np.bool_]:
    return np.arange(rows.scores.shape[1]) < rows.lengths[:, None]


def _mass(rows: Rows) -> NDArray[np.float64]:
    scores = np.where(_visible(rows), rows.scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)  # type: ignore[no-any-return]
