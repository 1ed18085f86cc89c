"""Hot keys: which stay, counted anew in float64."""

from __future__ import annotations

import numpy as np
import pytest

from certk_rs.hot_keys import Demand, Rows, hottest

Rng = np.random.Generator


def weights_of(row: np.ndarray, length: int) -> np.ndarray:
    weights = np.exp(row[:length] - row[:length].max())
    return weights / weights.sum()


def fewest(weights: np.ndarray, eps: float, stays: np.ndarray) -> list[int]:
    """The heaviest keys that have not stayed, one by one until the rest is within eps."""
    gone = np.flatnonzero(~stays[: len(weights)])
    order = gone[np.argsort(-weights[gone], kind="stable")]
    left = weights[order].sum() - np.concatenate([[0], np.cumsum(weights[order])])
    return list(order[: int((left > eps).sum())])


def rows_of(rng: Rng, heads: int, m: int, n: int, causal: bool) -> list[Rows]:
    lengths = np.arange(n - m, n) + 1 if causal else np.full(m, n)
    return [Rows(3 * rng.standard_normal((m, n)), lengths) for _ in range(heads)]


@pytest.mark.parametrize("causal", [False, True])
def test_demand_is_how_often_a_key_is_needed(causal: bool) -> None:
    rng = np.random.default_rng(3)
    group = rows_of(rng, 2, 24, 40, causal)
    demand = Demand(40, 0.1, None)
    for part in (slice(0, 10), slice(10, 24)):
        demand.add([Rows(each.scores[part], each.lengths[part]) for each in group])
    found = demand.shares()
    for key in range(40):
        needed = sees = 0
        for row in range(24):
            sets = [
                fewest(weights_of(each.scores[row], each.lengths[row]), 0.1, np.zeros(40, bool))
                for each in group
            ]
            needed += any(key in one for one in sets)
            sees += key < group[0].lengths[row]
        of_all = max(sees, 3)
        assert needed / of_all <= found[key] < (needed + 1) / of_all


def test_the_hottest_of_all_heads() -> None:
    rng = np.random.default_rng(4)
    demands = [rng.integers(0, 6, 50 - 10 * head) / 5.0 for head in range(3)]
    demands[1][[7, 9]] = np.inf
    demands[2][:] = 1.0
    total = sum(map(len, demands))
    # By falling demand; of equal ones heads take turns, each with its earliest.
    order = sorted(
        (-share, int((each[:position] == share).sum()), head, position)
        for head, each in enumerate(demands)
        for position, share in enumerate(each)
    )
    for most in range(total + 10):
        edges = hottest(demands, most)
        stay = [edge.stays(each) for edge, each in zip(edges, demands, strict=True)]
        # What must stay does, whatever was asked for.
        expected = [np.zeros(len(each), bool) for each in demands]
        for _, _, head, position in order[: max(2, most)]:
            expected[head][position] = True
        for one, other in zip(stay, expected, strict=True):
            assert np.array_equal(one, other)
    alike = [np.ones(4), np.ones(1), np.ones(9)]
    assert [edge.first for edge in hottest(alike, 8)] == [4, 1, 3]
    assert not any(edge.stays(np.ones(9)).any() for edge in hottest(alike, 0))
