"""Hot keys: which stay, and what later queries miss of the others, counted anew in float64."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import certk_rs as ck
from certk_rs.hot_keys import Demand, Rows, hottest, missing
from certk_rs.jobs.hot_curve import SHARES
from cli_fixtures import certk, write_cache

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
@pytest.mark.parametrize("heads", [1, 3])
def test_what_is_missed(heads: int, causal: bool) -> None:
    rng = np.random.default_rng(heads)
    for eps in (0.3, 0.02):
        group = rows_of(rng, heads, 20, 60, causal)
        for share in (0.0, 0.3, 0.9, 1.0):
            stays = rng.random(60) < share
            found = missing(group, stays, eps, None)
            for row, count in enumerate(found):
                union: set[int] = set()
                for each in group:
                    weights = weights_of(each.scores[row], each.lengths[row])
                    union |= set(fewest(weights, eps, stays))
                assert count == len(union)
    assert missing(group, np.ones(60, bool), eps, None).sum() == 0


def test_scores_of_any_size() -> None:
    """Where nothing that stays weighs anything, and where nothing else does."""
    scores = np.array([[0.0, 5000.0, 4999.0, -5000.0]])
    rows = [Rows(scores, np.array([4]))]
    stays = np.array([True, False, False, True])
    assert missing(rows, stays, 0.1, None).tolist() == [2]
    assert missing(rows, ~stays, 0.1, None).tolist() == [0]
    assert missing([Rows(scores, np.array([1]))], ~stays, 0.1, None).tolist() == [1]


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


def test_heads_that_need_more_keep_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cache whose two heads look at 3 and at some 40 of 64 keys; the curve tells them apart."""
    rng = np.random.default_rng(5)
    keys = rng.standard_normal((1, 2, 64, 8)).astype(np.float32)
    queries = rng.standard_normal((1, 2, 32, 8)).astype(np.float32)
    queries[:, 0] *= 12
    save_file(
        {
            f"layers.0.{name}": array
            for name, array in (("key", keys), ("value", keys), ("query", queries))
        },
        tmp_path / "cache.safetensors",
    )
    assert certk("analyze", tmp_path / "cache.safetensors", "--eps", 0.1, "--json") == 0
    [cache] = json.loads(capsys.readouterr().out)["caches"]
    curve = cache["hot"]
    assert [point["asked"] for point in curve] == list(SHARES)
    missed = [point["missed"] for point in curve]
    assert missed == sorted(missed, reverse=True)
    for point in curve:
        assert point["stays"] == int(point["asked"] * 128) / 128
        assert point["missed"] <= point["worst"]
        assert 0 <= point["never"] <= 1
    # By hand: which keys stay in both heads, and what the later queries then miss.
    scores = (queries[0].astype(np.float64) @ keys[0].astype(np.float64).swapaxes(1, 2)) / 8**0.5
    counts, late = [], []
    for head in range(2):
        sets = [fewest(weights_of(row, 64), 0.1, np.zeros(64, bool)) for row in scores[head, :16]]
        more = [
            fewest(weights_of(row, 64), 0.1 / 8, np.zeros(64, bool)) for row in scores[head, :16]
        ]
        one, two = (np.bincount(np.concatenate(each), minlength=64) for each in (sets, more))
        counts.append(one + two / 17)
    order = sorted(
        (-count, int((counts[head][:position] == count).sum()), head, position)
        for head in range(2)
        for position, count in enumerate(counts[head])
    )
    for head in range(2):
        stays = np.zeros(64, bool)
        stays[[position for _, _, which, position in order[:25] if which == head]] = True
        late += [len(fewest(weights_of(row, 64), 0.1, stays)) / 64 for row in scores[head, 16:]]
    assert curve[2]["missed"] == pytest.approx(np.mean(late), rel=1e-12)
    assert curve[2]["never"] == np.mean(np.array(late) == 0)


def test_few_queries_make_no_curve(tmp_path: Path) -> None:
    write_cache(tmp_path / "few.safetensors", m=7)
    [cache] = ck.analyze(tmp_path / "few.safetensors").caches
    assert cache.hot == ()
