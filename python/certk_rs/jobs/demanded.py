"""How often the keys of a group are needed by the queries of an input, as they are stored."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..hot_keys import Demand, Rows
from .solve import Block, Limits, as_native

# Scores that are held at a time.
_SCORES = 1 << 22


def demanded(
    block: Block,
    queries: NDArray[np.int64],
    visible: int,
    causal_offset: int | None,
    limits: Limits,
    eps: float,
    threads: int | None,
) -> NDArray[np.float64]:
    """The demand for the first `visible` keys (see `Demand`), infinite for those that must stay.

    These are the forced ones, and of every group the key that is needed most. The same on any
    machine and for any number of threads, since products and selections are.

    Args:
        block: The query heads of one group, and the kv heads that they share.
        queries: Positions of the queries that are counted, ascending.
        visible: How many keys any query sees.
        causal_offset: Query i sees the keys <= i + offset; None: all.
        limits: Which positions are forced.
        eps: What a query may lose, 0 < eps < 1.
        threads: How many threads.
    """
    n, heads = block.key.shape[1], block.query.shape[0]
    demand = Demand(visible, eps, threads)
    keys = as_native(block.key, block.key_dtype)
    step = max(1, _SCORES // max(1, heads * n))
    for start in range(0, len(queries), step):
        some = queries[start : start + step]
        lengths = np.full(len(some), visible, np.int64)
        if causal_offset is not None:
            lengths = np.clip(some + causal_offset + 1, 0, visible)
        scores = np.empty((heads, len(some), n))
        asked = np.ascontiguousarray(block.query[:, some])
        _native.products(as_native(asked, block.query_dtype), keys, None, scores, threads)
        scores *= block.scale
        demand.add(Rows(each[:, :visible], lengths) for each in scores)
    shares = demand.shares()
    if visible:
        shares[shares.argmax()] = np.inf
        shares[: limits.keep_first] = np.inf
        shares[max(0, visible - limits.keep_last) :] = np.inf
    return shares
