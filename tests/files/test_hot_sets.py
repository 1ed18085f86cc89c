"""`certk prune --hot`: the keys needed most often stay, and a guard answers for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import certk_rs as ck
from certk_rs.audit import audit
from certk_rs.hot_keys import hottest
from cli_fixtures import answered, certk, read_output, said, write_cache
from repository import EXAMPLE
from second_verifier import second_verdict

EPS = 0.05
HOT: dict[str, Any] = {"eps": EPS, "rest": "file", "hot": 0.3}


def spread_cache(folder: Path, name: str = "x", seed: int = 0) -> Path:
    """Write a cache whose keys are not needed alike."""
    path = folder / f"{name}.safetensors"
    write_cache(path, m=40, n=60, spread=1.5, seed=seed)
    return path


def shares_needed(tensors: dict[str, np.ndarray], offset: int | None, eps: float) -> np.ndarray:
    """By (layer, kv head), how often each key is in a query's own smallest set of any head."""
    found = []
    for i in range(2):
        query, key = (tensors[f"layers.{i}.{role}"][0] for role in ("query", "key"))
        size, (m, n) = len(query) // len(key), (query.shape[1], key.shape[1])
        for kv_head in range(len(key)):
            counts, seen = np.zeros((2, n)), np.zeros(n)
            for row in range(m):
                length = n if offset is None else min(row + offset + 1, n)
                seen[:length] += 1
                for at, budget in enumerate((eps, eps / 8)):
                    union: set[int] = set()
                    for head in range(kv_head * size, (kv_head + 1) * size):
                        scores = key[kv_head, :length] @ query[head, row] / key.shape[2] ** 0.5
                        weights = np.exp(scores - scores.max())
                        order = np.argsort(-weights)
                        sums = np.cumsum(weights[order]) / weights.sum()
                        union |= set(order[: int((sums < 1 - budget).sum()) + 1].tolist())
                    counts[at, list(union)] += 1
            found.append((counts[0] + counts[1] / (m + 1)) / np.maximum(seen, m / 8))
    return np.array(found)


def in_order(shares: Sequence[np.ndarray], most: int) -> list[np.ndarray]:
    """The first by falling share; of equal ones heads take turns, each with its earliest."""
    found = [
        (-share, int((each[:position] == share).sum()), head, position)
        for head, each in enumerate(shares)
        for position, share in enumerate(each)
    ]
    kept = [np.zeros(len(each), bool) for each in shares]
    for _, _, head, position in sorted(found)[:most]:
        kept[head][position] = True
    return kept


def test_no_more_rows_than_must_be_kept(tmp_path: Path) -> None:
    forced: dict[str, Any] = {"keep_first": 2, "keep_last": 3}
    [report] = ck.prune(EXAMPLE, tmp_path / "out", 0.05, hot=0, rest="codes", **forced).outputs
    assert 24 * 5 <= report.count.kept < 24 * 6
    least = f"give a size of {report.count.kept} or more"
    [failure] = ck.prune(EXAMPLE, tmp_path / "few", 0.05, hot=30, rest="codes", **forced).failures
    assert least in failure.message
    blind = tmp_path / "blind.safetensors"
    write_cache(blind, m=5, metadata={"causal_offset": "-5"})
    for at, options in enumerate(({"hot": 0}, {"hot": 0.5}, {"size": 0.5})):
        eps, out = 0.05 if "hot" in options else None, tmp_path / f"blind{at}"
        [report] = ck.prune(blind, out, eps, rest="codes", **options).outputs
        assert report.count.kept == 0
        assert ck.verify(out, against=blind).holds


def test_a_size_with_codes_keeps_what_is_needed_most(tmp_path: Path) -> None:
    hot = ck.prune(EXAMPLE, tmp_path / "hot", 0.05, hot=0.2, rest="codes")
    sized = ck.prune(EXAMPLE, tmp_path / "sized", size=0.2, rest="codes")
    one, two = (Path(each.outputs[0].target).read_bytes() for each in (hot, sized))
    assert one == two
    # Of blocks the worst row decides, as without codes.
    [blocks] = ck.prune(EXAMPLE, tmp_path / "blocks", size=0.5, rest="codes", block_size=4).outputs
    assert blocks.worst_at_least is not None
    most = int(1.2 * blocks.cache_bytes)
    [small] = ck.prune(EXAMPLE, tmp_path / "bytes", size_bytes=most, rest="codes").outputs
    assert 0.9 * most < small.output_bytes <= most
    assert ck.verify(tmp_path / "bytes", against=EXAMPLE).holds
    assert "keep fewer rows beside the codes" in small.warnings[0]


def test_the_hottest_of_all_heads() -> None:
    rng = np.random.default_rng(4)
    demands = [rng.integers(0, 6, 50 - 10 * head) / 5.0 for head in range(3)]
    demands[1][[7, 9]] = np.inf
    demands[2][:] = 1.0
    total = sum(map(len, demands))
    for most in range(total + 10):
        edges = hottest(demands, most)
        # Those that must stay do, whatever was asked for.
        expected = in_order(demands, max(2, most))
        for edge, demand, kept in zip(edges, demands, expected, strict=True):
            assert np.array_equal(edge.stays(demand), kept)
    alike = [np.ones(4), np.ones(1), np.ones(9)]
    assert [edge.first for edge in hottest(alike, 8)] == [4, 1, 3]
    assert not any(edge.stays(np.ones(9)).any() for edge in hottest(alike, 0))


@pytest.mark.parametrize("hot", [0.05, 0.2, 300, 2000])
def test_the_share_that_was_asked_for_stays_also_where_keys_are_needed_alike(
    tmp_path: Path, hot: float | int
) -> None:
    """At so small a budget nearly every query of the shipped cache needs most keys."""
    [report] = ck.prune(EXAMPLE, tmp_path / "out", 0.01, hot=hot, rest="file").outputs
    total = report.count.total
    assert total == 12288
    assert report.count.kept == (hot if isinstance(hot, int) else int(hot * total))


@pytest.mark.parametrize("offset", [None, 20])
def test_those_stay_that_are_needed_most_often(tmp_path: Path, offset: int | None) -> None:
    source = tmp_path / "x.safetensors"
    metadata = None if offset is None else {"causal_offset": str(offset)}
    tensors = write_cache(source, metadata=metadata, m=16, n=36, spread=1.5, dtype="F32")
    [report] = ck.prune(source, tmp_path / "out", **HOT).outputs
    shares = shares_needed(tensors, offset, EPS)
    output = read_output(Path(report.target))
    kept = np.zeros(shares.shape, bool)
    for i in range(2):
        ends = output[f"layers.{i}.indptr"]
        for head in range(2):
            kept[2 * i + head, output[f"layers.{i}.indices"][ends[head] : ends[head + 1]]] = True
    most = int(0.3 * 4 * 36)
    shares[np.arange(4), shares.argmax(1)] = np.inf
    assert kept.sum() == most
    assert np.array_equal(kept, in_order(shares, most))
    assert len(set(kept.sum(1))) > 1
    found = audit([Path(report.target)], [source])
    assert found.holds, list(map(str, found.outputs[0].findings))
    assert second_verdict(Path(report.target), source)[0] == 0


def test_forced_keys_and_queries_of_a_trial(tmp_path: Path) -> None:
    source = spread_cache(tmp_path)
    options = HOT | {"holdout": 0.25, "keep_first": 2, "keep_last": 3}
    [report] = ck.prune(source, tmp_path / "out", **options).outputs
    output = read_output(Path(report.target))
    for i in range(2):
        for part in np.split(output[f"layers.{i}.indices"], output[f"layers.{i}.indptr"][1:-1]):
            assert {0, 1, 57, 58, 59} <= set(part.tolist())
        assert report.layers[i].held_out.queries == 20
        assert report.layers[i].count.rows == 4 * 40
    assert audit([Path(report.target)], [source]).holds
    [failure] = ck.prune(source, tmp_path / "few", **options | {"hot": 12}).failures
    assert "12 keys are too few for what must be kept" in failure.message


def test_on_the_command_line(tmp_path: Path) -> None:
    source = spread_cache(tmp_path)
    arguments = ["prune", source, "--eps", EPS, "--hot", "0.3", "--rest", "file"]
    found = said(*arguments, "-o", tmp_path / "out")
    assert found.code == 0
    assert "rows over eps" in found.out
    # They are meant to be over eps: that is no warning.
    assert "max-keep" not in found.err
    assert certk(*arguments, "-o", tmp_path / "strict", "--strict") == 1
    assert certk("verify", tmp_path / "out", "--against", source) == 0
    body = answered("report", tmp_path / "out")
    [asked] = body["options"]
    assert (asked["hot"], asked["size"]) == (True, 72)
    [output] = body["outputs"]
    assert output["worst_at_least"] is None
    assert certk(*arguments, "-o", tmp_path / "dry", "--dry-run") == 0


def test_it_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    """Parts of the first pass are not taken for those of the second."""
    sources = [spread_cache(tmp_path, name, seed=at) for at, name in enumerate("ab")]
    ck.prune(sources, tmp_path / "whole", **HOT)

    def stop(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ck.prune(sources, tmp_path / "out", **HOT, on_file=stop, jobs=1)
    ck.prune(sources, tmp_path / "out", **HOT, resume=True)
    for source in sources:
        whole = (tmp_path / "whole" / source.name).read_bytes()
        assert (tmp_path / "out" / source.name).read_bytes() == whole
