"""The rows of many outputs that lose most, and how what rows lose is spread over their budgets."""

from __future__ import annotations

import heapq
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .output_facts import KINDS, PROMISED, LayerFacts

MOST = 12
"""So many rows of each kind are named."""

EDGES = (*(k / 20 for k in range(21)), 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, math.inf)
"""Bins of tail mass over budget: each holds what is above its lower edge, and its upper edge."""


class WorstRows:
    """Keeps the rows with the largest upper ends, by what they are to the promise.

    Of a compact proof there is one entry per query head, without a query, and none of the other
    kinds. Equal ones rank as they came.
    """

    def __init__(self) -> None:
        self._heaps: list[list[tuple[float, int, dict[str, Any]]]] = [[] for _ in KINDS]
        self._count = 0

    def add(self, facts: LayerFacts, kinds: NDArray[np.uint8], output: str) -> None:
        """Look at all rows of a layer."""
        if facts.upper is not None:
            flat = facts.upper.reshape(-1)
            for kind in range(len(KINDS)):
                (rows,) = np.nonzero(kinds.reshape(-1) == kind)
                for row in rows[_top(flat[rows], self._floor(kind))].tolist():
                    head, query = divmod(row, facts.layer.m)
                    lower = None if facts.lower is None else float(facts.lower[head, query])
                    self._push(kind, facts, output, head, query, float(flat[row]), lower)
        elif facts.worst is not None:
            for head in _top(facts.worst, self._floor(PROMISED)).tolist():
                worst = float(facts.worst[head])
                self._push(PROMISED, facts, output, head, None, worst, None)

    def _floor(self, kind: int) -> float:
        heap = self._heaps[kind]
        return heap[0][0] if len(heap) == MOST else -1.0

    def _push(
        self,
        kind: int,
        facts: LayerFacts,
        output: str,
        head: int,
        query: int | None,
        upper: float,
        lower: float | None,
    ) -> None:
        row = {
            "output": output,
            "layer": facts.layer.index,
            "head": head,
            "query": query,
            "tail_mass_lower": lower,
            "tail_mass_upper": upper,
            "eps": facts.eps[head // facts.heads_of_set],
        }
        self._count += 1
        item = (upper, -self._count, row)
        heap = self._heaps[kind]
        if len(heap) < MOST:
            heapq.heappush(heap, item)
        else:
            heapq.heappushpop(heap, item)

    def to_json(self) -> dict[str, list[dict[str, Any]]]:
        """The worst first."""
        ordered = [sorted(heap, key=lambda item: item[:2], reverse=True) for heap in self._heaps]
        return {
            kind: [row for _, _, row in rows] for kind, rows in zip(KINDS, ordered, strict=True)
        }


def _top(masses: NDArray[Any], floor: float) -> NDArray[np.intp]:
    """Where the largest are, those above a floor, in their order."""
    (above,) = np.nonzero(masses > floor)
    if len(above) > MOST:
        # The first of equal ones.
        order = np.argsort(-masses[above], kind="stable")[:MOST]
        above = np.sort(above[order])
    return above


class Spread:
    """Counts rows by their upper end over their budget; outputs with a full proof only."""

    def __init__(self) -> None:
        self._counts = np.zeros((len(KINDS), len(EDGES) - 1), np.int64)

    def add(self, facts: LayerFacts, kinds: NDArray[np.uint8]) -> None:
        """Count the rows of a layer."""
        if facts.upper is None:
            return
        for head in range(facts.layer.heads):
            eps = facts.eps[head // facts.heads_of_set]
            place = np.digitize(_over(facts.upper[head], eps), EDGES[1:-1], right=True)
            for kind in range(len(KINDS)):
                found = np.bincount(place[kinds[head] == kind], minlength=len(EDGES) - 1)
                self._counts[kind] += found

    def to_json(self) -> dict[str, Any]:
        """Lower and upper edges (null: no end) with the counts of each kind."""
        edges = [None if math.isinf(edge) else edge for edge in EDGES]
        counts = {kind: row.tolist() for kind, row in zip(KINDS, self._counts, strict=True)}
        return {"rows": int(self._counts.sum()), "edges": edges, **counts}


def _over(upper: NDArray[Any], eps: float) -> NDArray[np.float64]:
    masses = upper.astype(np.float64)
    if eps == 0:
        return np.where(masses > 0, np.inf, 0.0)
    over = masses / eps
    # A quotient may be rounded to 1 from above, and what is above the budget is.
    return np.where((masses > eps) & (over <= 1), np.nextafter(1.0, 2.0), over)
