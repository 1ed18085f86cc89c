"""Queries that are set aside to see how a kept set does with queries that it was not chosen for.

They are drawn at random, once for all heads of a layer, so that the share of them that loses more
than its budget speaks, with the bounds of Clopper and Pearson, for queries drawn like those of the
file. It does not for later ones of another kind. The sets that are tried so are not written: those
of an output are made afterwards for all queries of the file, as one refits after cross-validation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .clopper_pearson import clopper_pearson

CONFIDENCE = 0.95
_SEED = 0x686F6C646F7574


def held_out_queries(
    m: int, share: float, first_seeing: int = 0, causal: bool = False
) -> NDArray[np.int64]:
    """Ascending positions of the queries that are set aside: one or more, if one stays beside them.

    Args:
        m: How many queries there are.
        share: Of those that see a key, in [0, 1); with 0 there are none.
        first_seeing: The first query that sees a key.
        causal: Whether later queries see more keys. Then the last one stays: which positions are
            visible at all, and so which are the last ones, goes by what it sees.
    """
    seeing = m - first_seeing
    count = min(max(1, round(share * seeing)), seeing - 1) if share else 0
    eligible = seeing - 1 if causal else seeing
    if count <= 0:
        return np.empty(0, np.int64)
    # The same for every file and layer of this length: what is random is the query at a place.
    draw = np.random.Generator(np.random.PCG64([_SEED, m, first_seeing]))
    return first_seeing + np.sort(draw.permutation(eligible)[:count]).astype(np.int64)


@dataclass(frozen=True)
class HeldOut:
    """How a keep-set did with queries that it was not chosen for.

    A query counts as a violation if it may lose more than the budget in any query head that shares
    the set. `low` and `high` are the ends of the 95 % interval of Clopper and Pearson.
    """

    queries: int
    violations: int

    @property
    def rate(self) -> float:
        """Share of the queries set aside that are violations; 0 where there are none."""
        return self.violations / self.queries if self.queries else 0.0

    @property
    def low(self) -> float:
        """Lower end of the interval for the probability of a violation."""
        return clopper_pearson(self.violations, self.queries, CONFIDENCE)[0]

    @property
    def high(self) -> float:
        """Upper end of the interval for the probability of a violation."""
        return clopper_pearson(self.violations, self.queries, CONFIDENCE)[1]
