"""The searches over balls that `certk reproduce` runs, beside the same written out key by key."""

from __future__ import annotations

import math

import numpy as np
import pytest

from certk_rs.errors import CertkError
from certk_rs.reproduce import balls


def slow(
    q: np.ndarray, keys: np.ndarray, cells: list[list[int]], scale: float, eps: float, gap: bool
) -> int:
    """Keys scored, by Python's own sums, cell after cell."""
    s = [scale * math.fsum(a * b for a, b in zip(q, key, strict=True)) for key in keys]
    n, bounds = len(keys), []
    for cell in cells:
        centre = [math.fsum(keys[i][j] for i in cell) / len(cell) for j in range(len(q))]
        radius = max(math.dist(keys[i], centre) for i in cell)
        product = math.fsum(a * b for a, b in zip(q, centre, strict=True))
        bounds.append(scale * product + abs(scale) * math.hypot(*q) * radius * (1 + 1e-9))
    order = sorted(range(len(cells)), key=lambda c: -bounds[c])
    for j in range(1, len(cells) + 1):
        known = sorted((s[i] for c in order[:j] for i in cells[c]), reverse=True)
        open_cells = order[j:]
        if gap:
            above = max((bounds[c] for c in open_cells), default=-math.inf)
            for k in range(1, len(known) + 1):
                if k == n:
                    return n
                following = max([above, *known[k : k + 1]])
                if known[k - 1] - following >= math.log((n - k) * (1 - eps) / (k * eps)):
                    return len(known)
        else:
            may = math.fsum(len(cells[c]) * math.exp(bounds[c]) for c in open_cells)
            if may <= eps / (1 - eps) * math.fsum(math.exp(x) for x in known):
                return len(known)
    raise AssertionError("all cells open prove everything")


@pytest.mark.parametrize("gap", [False, True])
@pytest.mark.parametrize("sharp", [0.3, 3.0, 12.0])
@pytest.mark.parametrize("kind", ["consecutive", "clustered"])
def test_keys_scored_over_balls(kind: str, sharp: float, gap: bool) -> None:
    rng = np.random.default_rng([int(10 * sharp), gap])
    keys = rng.standard_normal((67, 5)) + 3 * rng.standard_normal((4, 5))[rng.integers(4, size=67)]
    queries, scale = sharp * rng.standard_normal((6, 5)), 0.4
    labels = balls.consecutive(67, 8) if kind == "consecutive" else balls.clustered(keys, 8, rng)
    cells = balls.balls(keys, labels)
    found = balls.scored(
        scale * queries @ keys.T, cells.upper(queries, scale), cells, 0.05, gap=gap
    )
    members = [np.flatnonzero(labels == c).tolist() for c in np.unique(labels)]
    assert sorted(i for cell in members for i in cell) == list(range(67))
    assert found.tolist() == [slow(q, keys, members, scale, 0.05, gap) for q in queries]
    if kind == "clustered":
        assert len(members) > 1
        assert max(map(len, members)) < 67


def test_a_bound_below_a_score_of_its_cell_is_found() -> None:
    rng = np.random.default_rng(0)
    keys, queries = rng.standard_normal((64, 4)), rng.standard_normal((2, 4))
    cells = balls.balls(keys, balls.consecutive(64, 16))
    upper = cells.upper(queries, 1.0)
    upper[1, 2] -= 5.0
    with pytest.raises(CertkError, match="the bound of a cell is broken in 1 of 8"):
        balls.scored(queries @ keys.T, upper, cells, 0.1)
