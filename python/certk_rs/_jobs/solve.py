"""One kept set for the rows of some queries and keys, read from where they are stored.

Beside `solve` there are the steps to the set of a group: leaving rows out for `coverage`, counting
how often keys are needed for hot sets, and measuring how far apart values are for `out_tol`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _native
from .._files.cache import Cache
from .._files.layers import Layer
from .._files.safetensors import NAMES
from .._files.values import widen
from ..hot_keys import Demand, Rows
from ..results import Status

# The radius of a row is so many roundings beyond 3 d, and this slack (see `choose`).
ROUNDINGS = 16
SLACK = 2.0**-31
# Each round leaves out a part of what may be left out, since others bind once the first are gone.
_ROUNDS = 6
# Scores that are held at a time where demands are counted, and values where they are compared.
_SCORES = 1 << 22
_VALUES = 1 << 14


@dataclass(frozen=True, eq=False)
class Block:
    """Query heads (heads, m, d) and the kv heads (kv_heads, n, d) they share, as stored."""

    query: NDArray[Any]
    query_dtype: str
    key: NDArray[Any]
    key_dtype: str
    scale: float

    @property
    def rows(self) -> int:
        """The number of rows: one per query head and query."""
        return int(self.query.shape[0] * self.query.shape[1])


@dataclass(frozen=True)
class Limits:
    """The options of a kept set that do not depend on the group."""

    max_keep: int | float | None = None
    keep_first: int = 0
    keep_last: int = 0
    block_size: int = 1


@dataclass(frozen=True, eq=False)
class Solution:
    """A kept set: `upper`, `lower` and `weights` have an entry per row, blocks in their order.

    `lower_bound` counts keys, or blocks where `block_size` is above 1.
    """

    indices: NDArray[np.int64]
    over: bool
    upper: NDArray[np.float64]
    lower: NDArray[np.float64]
    lower_bound: int
    weights: NDArray[np.float64]


def solve(
    blocks: list[Block],
    eps: float | NDArray[np.float64],
    counted: NDArray[np.bool_] | None,
    causal_offset: int | None,
    limits: Limits,
    threads: int | None,
    given: NDArray[np.bool_] | None = None,
) -> Solution:
    """Return the kept set of all rows of some blocks, which share the positions of their keys.

    Args:
        blocks: In the order of the rows.
        eps: Budget, one for all or one per row.
        counted: The rows (rows,) that the set must serve; the others are only certified.
        causal_offset: Query i sees the keys <= i + offset; None: all.
        limits: Constraints of the set.
        threads: The most threads, None for all.
        given: The keys (n,) that are kept, where that is decided already; the set is then only
            certified, and `limits` are none.
    """
    found = _native.keep_set_of_queries(
        [
            (
                as_native(block.query, block.query_dtype),
                as_native(block.key, block.key_dtype),
                block.scale,
            )
            for block in blocks
        ],
        eps,
        counted,
        given,
        SLACK,
        ROUNDINGS,
        causal_offset,
        limits.max_keep,
        limits.keep_first,
        limits.keep_last,
        limits.block_size,
        threads,
    )
    return Solution(
        found.indices,
        found.status == Status.OVER_BUDGET,
        found.tail_mass_upper.reshape(-1),
        found.tail_mass_lower.reshape(-1),
        # Blocks: of so many keys, so many at least.
        -(-found.lower_bound // limits.block_size),
        found.weights.reshape(-1),
    )


def as_native(stored: NDArray[Any], dtype: str) -> tuple[NDArray[Any], str]:
    """Return a stored tensor and the name of its dtype, as `_native` takes them."""
    return stored.view(np.uint16) if stored.itemsize == 2 else stored, NAMES[dtype]


def leave_out(
    find: Callable[[float, NDArray[np.bool_], Limits], Solution],
    eps: float,
    counted: NDArray[np.bool_],
    fixed: NDArray[np.bool_],
    coverage: float,
    limits: Limits,
    solution: Solution,
) -> tuple[Solution, NDArray[np.bool_]]:
    """Return a set that serves at least a share `coverage` of the counted rows, and those rows.

    The rows that weigh most in the proof of the lower bound cost most: some of them are left out,
    the set is sought again, and so on. In the end every row that the set happens to serve counts as
    served. Which rows to leave out is a heuristic; what is proven is proven for the rows served.

    Args:
        find: Finds a set for some rows.
        eps: The budget.
        counted: The rows in question, (rows,).
        fixed: Rows that stay in any case, (rows,).
        coverage: Share of them that must be served, in (0, 1).
        limits: Constraints of the set.
        solution: The set that serves them all.
    """
    rows = counted.copy()
    most = math.floor((1 - coverage) * np.count_nonzero(counted))
    for round_ in range(_ROUNDS):
        out = np.count_nonzero(counted & ~rows)
        take = math.ceil((most - out) / (_ROUNDS - round_))
        binding = np.flatnonzero(rows & ~fixed & (solution.weights > 0))
        if take <= 0 or not len(binding):
            break
        heaviest = np.argsort(-solution.weights[binding], kind="stable")[:take]
        rows[binding[heaviest]] = False
        solution = find(eps, rows, limits)
    served = counted & (solution.upper <= eps)
    if np.array_equal(served, rows) or not (served | ~rows).all():
        return solution, rows
    # For these rows the same set does, and more rows may prove a better bound.
    again = find(eps, served, limits)
    return (again, served) if len(again.indices) <= len(solution.indices) else (solution, rows)


def demanded(
    block: Block,
    queries: NDArray[np.int64],
    visible: int,
    causal_offset: int | None,
    limits: Limits,
    eps: float,
    threads: int | None,
) -> NDArray[np.float64]:
    """Return the demand for the first `visible` keys (see `Demand`), infinite for those that stay.

    Those are the forced ones, and of every group the key that is needed most. The same on any
    machine and for any number of threads, since products and selections are.

    Args:
        block: The query heads of one group, and the kv heads that they share.
        queries: Positions of the queries that are counted, ascending.
        visible: The number of keys that any query sees.
        causal_offset: Query i sees the keys <= i + offset; None: all.
        limits: Tells the forced positions.
        eps: Tail mass that a query may lose, 0 < eps < 1.
        threads: The most threads, None for all.
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


def value_spread(cache: Cache, layer: Layer, first: int, end: int) -> float:
    """Return the largest diameter of the values of some kv heads, over visible keys, rounded up.

    The output over the kept keys is a mean of kept values, that over all keys a mean of all values.
    They differ by the dropped mass times the difference of two such means, hence by no more than
    the mass times the largest distance between two values (arXiv 2512.07647, Proposition 5.3), for
    which twice the radius of a ball around all values stands.

    Args:
        cache: The input, open.
        layer: The layer of the values.
        first: The first kv head.
        end: The one after the last.

    Returns:
        Twice the radius of the ball around the mean that holds all values of a kv head, for the
        head where it is largest; in the unit of the values.
    """
    visible = layer.visible(cache.causal_offset)
    widest = 0.0
    for head in range(first, end):
        stored = cache.read(layer, "value", slice(head, head + 1))[0][:visible]
        parts = [slice(at, at + _VALUES) for at in range(0, visible, _VALUES)]
        if not parts:
            continue
        dtype = layer.dtypes["value"]
        centre = sum(widen(stored[part], dtype).sum(axis=0) for part in parts) / visible
        for part in parts:
            off = widen(stored[part], dtype) - centre
            # The squares of d <= 2^20 differences, each off by two roundings of numbers that were
            # rounded once: far below 2^-30 of the whole, since the centre may be any point.
            longest = float(np.sqrt(np.einsum("ij,ij->i", off, off).max()))
            widest = max(widest, longest)
    return 2 * widest * (1 + 2.0**-30)
