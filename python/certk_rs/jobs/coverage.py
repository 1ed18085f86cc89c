"""Which rows a keep-set need not serve, where only a fraction of them must be."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .solve import Limits, Solution

Find = Callable[[float, NDArray[np.bool_], Limits], Solution]
# Each round leaves out a part of what may be left out, since others bind once the first are gone.
_ROUNDS = 6


def leave_out(
    find: Find,
    eps: float,
    counted: NDArray[np.bool_],
    fixed: NDArray[np.bool_],
    coverage: float,
    limits: Limits,
    solution: Solution,
) -> tuple[Solution, NDArray[np.bool_]]:
    """A keep-set that serves at least a share `coverage` of the counted rows, and which those are.

    The rows that weigh most in the proof of the lower bound cost most: some of them are left out,
    the set is sought again, and so on. In the end every row that the set happens to serve counts as
    served. Which rows to leave out is a heuristic; what is proven is proven for the rows served.

    Args:
        find: Finds a set for some rows.
        eps: The budget.
        counted: The rows in question, (rows,).
        fixed: Rows that stay in any case, (rows,).
        coverage: Share of them that must be served, in (0, 1).
        limits: What constrains the set.
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
