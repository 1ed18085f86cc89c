"""One keep-set for the rows of some queries and keys, read from where they are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..cache_format import NAMES
from ..results import Status

# The radius of a row is so many roundings beyond 3 d, and this slack (see `choose`).
ROUNDINGS = 16
SLACK = 2.0**-31


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
        """How many rows it has: one per query head and query."""
        return int(self.query.shape[0] * self.query.shape[1])


@dataclass(frozen=True)
class Limits:
    """The options of a keep-set that do not depend on the group."""

    max_keep: int | float | None = None
    keep_first: int = 0
    keep_last: int = 0
    block_size: int = 1


@dataclass(frozen=True, eq=False)
class Solution:
    """A keep-set: `upper`, `lower` and `weights` have an entry per row, blocks in their order.

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
    """The keep-set of all rows of some blocks, which share the positions of their keys.

    Args:
        blocks: In the order of the rows.
        eps: Budget, one for all or one per row.
        counted: The rows (rows,) that the set must serve; the others are only certified.
        causal_offset: Query i sees the keys <= i + offset; None: all.
        limits: What constrains the set.
        threads: How many threads, None for all.
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
    """A stored tensor and its dtype, as `_native` takes them."""
    return stored.view(np.uint16) if stored.itemsize == 2 else stored, NAMES[dtype]
