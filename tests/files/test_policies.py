"""Promises of prune jobs: every output is held against two verifiers, and against NumPy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from certk_rs import CertkError, keep_set_of_queries, prune
from certk_rs._files.certificate import read_certificate
from certk_rs._files.tensor_file import SafetensorsFile
from certk_rs._jobs.held_out import HeldOut, held_out_queries
from certk_rs._jobs.request import Budgets, Request, read_budgets
from certk_rs._jobs.results import FileReport
from certk_rs.audit import audit
from cli_fixtures import cache_tensors, read_output, safetensors_bytes, tensor, write_cache
from second_verifier import second_verdict

SHAPE = {"layers": 2, "kv_heads": 2, "heads": 4, "m": 12, "n": 96, "d": 8}
LAYERS = (0, 1)


@dataclass(frozen=True)
class Pruned:
    """A cache of two layers as float64, its output, and the report of the job."""

    given: dict[str, np.ndarray]
    output: dict[str, np.ndarray]
    report: FileReport
    offset: int | None

    def sets(self, layer: int) -> list[np.ndarray]:
        """Return the kept positions of each kv head, or of all together."""
        indices = self.output[f"layers.{layer}.indices"]
        ends = self.output.get(f"layers.{layer}.indptr", np.array([0, len(indices)]))
        return [indices[first:last] for first, last in pairwise(ends)]

    def weights(self, layer: int) -> np.ndarray:
        """Return the softmax (heads, m, n) by NumPy; rows that see nothing are zero."""
        query, key = (self.given[f"layers.{layer}.{role}"] for role in ("query", "key"))
        query, key = (each.reshape(each.shape[-3:]) for each in (query, key))
        key = np.repeat(key, len(query) // len(key), axis=0)
        scores = np.einsum("hmd,hnd->hmn", query, key) / np.sqrt(key.shape[-1])
        if self.offset is not None:
            m, n = scores.shape[1:]
            scores[:, np.arange(n) > np.arange(m)[:, None] + self.offset] = -np.inf
        weights = np.exp(scores - np.maximum(scores.max(axis=-1, keepdims=True), -1e300))
        return np.asarray(weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300))

    def lost(self, layer: int) -> np.ndarray:
        """Return the dropped mass (heads, m) of every row, by NumPy."""
        weights, sets = self.weights(layer), self.sets(layer)
        of_head = [sets[head * len(sets) // len(weights)] for head in range(len(weights))]
        return np.array([
            np.delete(rows, kept, axis=1).sum(axis=1)
            for rows, kept in zip(weights, of_head, strict=True)
        ])  # fmt: skip

    def promised(self, layer: int) -> np.ndarray:
        """Return the rows (heads, m) that coverage does not leave out."""
        left_in = np.ones(self.given[f"layers.{layer}.query"].shape[-3:-1], bool)
        left_in.reshape(-1)[self.output.get(f"layers.{layer}.left_out", [])] = False
        return left_in


def pruned(tmp_path: Path, cache: dict[str, Any] | None = None, **options: Any) -> Pruned:
    """Write a cache, prune it, and hold the output against both verifiers and the options."""
    source, shape = tmp_path / "x.safetensors", SHAPE | (cache or {})
    source.parent.mkdir(exist_ok=True)
    given = write_cache(source, **shape)
    options = {"proof": "full", "fail_fast": True} | options
    [report] = prune(source, tmp_path / "out", **options).outputs
    target = Path(report.target)
    [found] = audit([target], [source]).outputs
    assert found.holds, (options, list(map(str, found.findings)))
    assert found.unchecked == ()
    assert found.confirmed_rows == found.rows > 0
    assert found.confirmed_lower_bounds == found.lower_bounds
    assert found.lower_bounds > 0 or report.proof == "none"
    code, said = second_verdict(target, source)
    assert code == 0, (options, said)
    metadata = shape.get("metadata") or {}
    offset = int(metadata["causal_offset"]) if "causal_offset" in metadata else None
    result = Pruned(given, read_output(target), report, offset)
    check_sets(result, read_output(source), options)
    if "scale" not in metadata:
        check_masses(result, options)
    return result


def check_sets(found: Pruned, stored: dict[str, np.ndarray], options: dict[str, Any]) -> None:
    """Hold the sets against what was asked of them, and the rows against those of the cache."""
    for i in (0, len(found.report.layers) - 1):
        rows = {role: stored[f"layers.{i}.{role}"] for role in ("key", "value")}
        rows = {role: each.reshape(each.shape[-3:]) for role, each in rows.items()}
        n, m = rows["key"].shape[1], found.given[f"layers.{i}.query"].shape[-2]
        seen = n if found.offset is None else min(max(m + found.offset, 0), n)
        first, last = options.get("keep_first", 0), options.get("keep_last", 0)
        forced = {*range(min(first, seen)), *range(max(0, seen - last), seen)}
        size, most = options.get("block_size", 1), options.get("max_keep", n)
        limit = max(1, math.floor(most * seen)) if isinstance(most, float) else most
        sets = found.sets(i)
        for kept in sets:
            assert (np.diff(kept) > 0).all()
            assert set(kept.tolist()) <= set(range(seen))
            assert forced <= set(kept.tolist())
            assert len(kept) <= limit
            whole = [j for j in range(seen) if j // size in set((kept // size).tolist())]
            assert kept.tolist() == whole
            assert len(kept) > 0 or seen == 0
        for role, given in rows.items():
            by_set = [given[h][kept] for h, kept in enumerate(sets)]
            expected = given[:, sets[0]] if len(sets) < len(given) else np.concatenate(by_set)
            same = found.output[f"layers.{i}.{role}"]
            assert same.dtype == expected.dtype
            np.testing.assert_array_equal(same.reshape(expected.shape), expected)


def check_masses(found: Pruned, options: dict[str, Any]) -> None:
    """Hold the recorded masses against those of NumPy, and those against the budget."""
    for i in (0, len(found.report.layers) - 1):
        lost, eps = found.lost(i), options.get("eps")
        if not {"max_keep", "hot", "size"} & set(options) and isinstance(eps, float):
            assert (lost[found.promised(i)] <= eps + 1e-12).all()
        if f"layers.{i}.tail_mass_upper" in found.output:
            upper = found.output[f"layers.{i}.tail_mass_upper"]
            np.testing.assert_allclose(upper, lost, rtol=1e-3, atol=1e-4)
            if found.offset is not None:  # a query that sees nothing loses nothing
                assert (upper[:, : max(0, -found.offset)] == 0).all()


SMALL = {"m": 3, "n": 24, "d": 4}
SETS = ("head", "layer")
CONFIRMED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(
        (SMALL, {"eps": eps, "granularity": granularity})
        for eps in (0.0, 1e-300, 1e-80, 1e-6, 0.01, 0.5, 0.99, 1 - 1e-12)
        for granularity in SETS
    ),
    *(
        (SMALL | {"spread": spread, "metadata": {"scale": scale}}, {})
        for spread, scale in (
            *((1e-4, "0.5"), (0.3, "-0.5"), (3.0, "0"), (30.0, "1e-30"), (250.0, "1000")),
            *((1e-4, "1000"), (250.0, "0.5"), (30.0, "-0.5"), (3.0, "1e-30"), (0.3, "1000")),
        )
    ),
    (SMALL | {"spread": 1e37, "dtype": "F32", "metadata": {"scale": "1e-74"}}, {}),
    (SMALL | {"spread": 1e-44, "dtype": "F32"}, {}),
    *(
        (SMALL | {"m": 6, "metadata": {"causal_offset": offset}}, {"granularity": granularity})
        for offset in ("-100", "-2", "0", "5", "21", "100", str(10**17))
        for granularity in SETS
    ),
    *(
        (SMALL | cache, {"eps": 0.9, "granularity": granularity, "keep_first": 2, "keep_last": 3})
        for cache in ({}, {"metadata": {"causal_offset": "10"}})
        for granularity in SETS
    ),
    *((SMALL, {"eps": 1e-9, "max_keep": most}) for most in (5, 0.25, 1, 0.001, 1000)),
    *(({"dtype": dtype, "heads": 6}, {"granularity": each})
      for dtype in ("F16", "BF16", "F32") for each in SETS),
    *(({"batch": False}, {"block_size": size, "granularity": each})
      for size in (2, 7, 16, 200) for each in SETS),
    *(({}, {"eps": 0.05, "proof": proof} | options)
      for proof in ("full", "compact", "none")
      for options in ({}, {"max_keep": 20}, {"coverage": 0.8})),
    # Coverage leaves out rows that see more keys; the last key is that of all rows.
    *(({"m": 20, "n": 60, "metadata": {"causal_offset": "30"}, "seed": seed},
       {"eps": 0.05, "coverage": 0.6} | limit)
      for limit in ({}, {"keep_last": 5}, {"max_keep": 0.4, "keep_first": 2})
      for seed in range(3)),
]  # fmt: skip


@pytest.mark.parametrize(("cache", "options"), CONFIRMED, ids=str)
def test_outputs_are_confirmed(
    tmp_path: Path, cache: dict[str, Any], options: dict[str, Any]
) -> None:
    found = pruned(tmp_path, cache, **{"eps": 0.1} | options)
    if options.get("eps") == 1e-9:
        assert (found.report.count.rows_over_budget > 0) == (options["max_keep"] != 1000)
    if options.get("proof"):
        assert found.report.proof == options["proof"]


def one_job(seed: int, folder: Path) -> None:
    """Prune a random cache by random options."""
    rng = np.random.default_rng([3, seed])
    m, n = int(rng.choice([1, 4, 9, 20])), int(rng.choice([5, 24, 47]))
    kv_heads, group = int(rng.integers(1, 3)), int(rng.integers(1, 4))
    offset = int(rng.integers(max(-m + 1, -3), n)) if rng.random() < 0.6 else None
    cache = {
        "metadata": None if offset is None else {"causal_offset": str(offset)},
        **{"kv_heads": kv_heads, "heads": kv_heads * group, "m": m, "n": n, "seed": seed, "d": 4},
        "dtype": str(rng.choice(["F16", "F32", "BF16"])),
        "spread": float(rng.choice([0.5, 2.0, 4.0])),
    }
    options: dict[str, Any] = {
        "granularity": str(rng.choice(["head", "layer", "token"])),
        "block_size": int(rng.choice([1, 3, 8])),
        "holdout": float(rng.choice([0.0, 0.3])) if m > 1 else 0.0,
        "proof": str(rng.choice(["auto", "full"])),
        "unit": str(rng.choice(["auto", "head"])),
        "effort": str(rng.choice(["fast", "default", "thorough"])),
    }
    if rng.random() < 0.4:
        options["coverage"] = float(rng.choice([0.5, 0.8]))
    if rng.random() < 0.4:
        options |= {"keep_first": int(rng.integers(3)), "keep_last": int(rng.integers(5))}
    if rng.random() < 0.2 and options["block_size"] == 1 and "keep_last" not in options:
        options["max_keep"] = [3, 0.5][int(rng.integers(2))]
    if rng.random() < 0.6:
        options["rest"] = str(rng.choice(["file", "codes"]))
    if options.get("rest") == "codes":
        options |= {"key_bits": int(rng.choice([8, 12, 16])), "value_bits": int(rng.choice([8, 4]))}
    eps = str(rng.choice(["0.2", "0.02", "0=0,*=0.3", "0=0.3,*=1e-9"]))
    pruned(folder, cache, eps=eps, **options)


@pytest.mark.parametrize("seed", range(40))
def test_options_together_are_confirmed(seed: int, tmp_path: Path) -> None:
    """Causal rows see unlike numbers of keys, and blocks end behind the last key of all rows."""
    one_job(seed, tmp_path)


@pytest.mark.heavy
def test_options_of_many_jobs_are_confirmed(tmp_path: Path) -> None:
    for seed in range(1000, 2500):
        one_job(seed, tmp_path / str(seed))


@pytest.mark.parametrize("block_size", [2, 3, 8])
@pytest.mark.parametrize("offset", [None, 7, 13])
def test_forced_ends_force_the_blocks_that_they_are_in(block_size: int, offset: Any) -> None:
    """Also where the last block has fewer keys than are forced."""
    rng = np.random.default_rng(block_size)
    for n in (20, 23, 25):
        keys, queries = rng.standard_normal((n, 8)), rng.standard_normal((4, 8))
        seen = n if offset is None else min(n, 4 + offset)
        for first, last in ((1, 0), (0, 2), (3, 4), (2, 9)):
            found = keep_set_of_queries(
                queries.astype(np.float32), keys.astype(np.float32), 0.7, causal_offset=offset,
                block_size=block_size, keep_first=first, keep_last=last,
            )  # fmt: skip
            forced = {*range(first), *range(seen - last, seen)}
            assert forced <= set(found.indices.tolist())


def test_budgets_by_layer(tmp_path: Path) -> None:
    found = pruned(tmp_path, eps={"0": 0.01, "*": 0.2})
    assert found.lost(0).max() <= 0.01 < found.lost(1).max() <= 0.2
    with SafetensorsFile(found.report.target) as file:
        certificate, _ = read_certificate(file.header.metadata["certk"])
    assert certificate.eps == {0: (0.01, 0.01), 1: (0.2, 0.2)}


@pytest.mark.parametrize("size", [0.25, 0.6, 100])
@pytest.mark.parametrize("granularity", ["head", "layer", "token"])
def test_a_size_is_kept_and_the_worst_mass_is_nearly_least(
    tmp_path: Path, size: float, granularity: str
) -> None:
    found = pruned(tmp_path, size=size, granularity=granularity)
    report, groups = found.report, {"head": 4, "layer": 2, "token": 1}[granularity]
    most = size if isinstance(size, int) else int(size * groups * 96)
    # By token there is one set, which every layer has.
    layers = report.layers[:1] if granularity == "token" else report.layers
    assert sum(one.kept for layer in layers for one in layer.sets) <= most
    worst = max(found.lost(i).max() for i in LAYERS)
    # 1e-12: the error of NumPy's sums.
    assert worst <= max(layer.worst_tail_mass for layer in report.layers) + 1e-12
    assert report.worst_at_least is not None
    assert report.worst_at_least <= worst + 1e-12


def least_losses(weights: np.ndarray) -> list[float]:
    """Return by k the least worst loss of rows (rows, n) under any set of k keys."""
    n = weights.shape[1]
    return [
        min((1 - weights[:, list(kept)].sum(axis=1)).max() for kept in combinations(range(n), k))
        for k in range(n + 1)
    ]


def test_lower_bounds_hold_against_every_smaller_set(tmp_path: Path) -> None:
    """Ten keys are few enough to try all sets."""
    found = pruned(tmp_path, {"n": 10, "layers": 1, "m": 5}, eps=0.1)
    for head, weights in enumerate(found.weights(0).reshape(2, 10, 10)):
        smallest = next(k for k, loss in enumerate(least_losses(weights)) if loss <= 0.1)
        bound = found.output["layers.0.lower_bound"][head]
        assert bound <= smallest <= len(found.sets(0)[head])


def test_no_other_distribution_of_a_size_does_better_than_is_said(tmp_path: Path) -> None:
    """Two kv heads of ten keys: all pairs of sets of the given size are tried."""
    found = pruned(tmp_path, {"layers": 1, "heads": 2, "m": 3, "n": 10}, size=9)
    best = [least_losses(weights) for weights in found.weights(0)]
    least = min(max(best[0][k], best[1][9 - k]) for k in range(10))
    worst = max(layer.worst_tail_mass for layer in found.report.layers)
    assert found.report.worst_at_least is not None
    assert found.report.worst_at_least <= least <= worst <= 1.2 * least


def test_a_number_of_bytes_is_kept(tmp_path: Path) -> None:
    report = pruned(tmp_path, {"n": 2000, "d": 32}, size_bytes=300_000).report
    assert Path(report.target).stat().st_size == report.output_bytes
    assert 200_000 < report.output_bytes <= 300_000


@pytest.mark.parametrize("out_tol", [0.01, 0.3, 5.0])
def test_an_output_moves_by_no_more_than_is_asked(tmp_path: Path, out_tol: float) -> None:
    found = pruned(tmp_path, out_tol=out_tol)
    for layer in LAYERS:
        weights, value = found.weights(layer), found.given[f"layers.{layer}.value"][0]
        for head, rows in enumerate(weights):
            kept = found.sets(layer)[head // 2]
            some = rows[:, kept] / rows[:, kept].sum(axis=1, keepdims=True)
            moved = rows @ value[head // 2] - some @ value[head // 2][kept]
            assert np.linalg.norm(moved, axis=1).max() <= out_tol


@pytest.mark.parametrize("coverage", [0.5, 0.9])
def test_coverage_leaves_out_so_many_rows_and_keeps_fewer_keys(
    tmp_path: Path, coverage: float
) -> None:
    everybody = pruned(tmp_path / "all", eps=0.05).report
    found = pruned(tmp_path, eps=0.05, coverage=coverage)
    for layer in LAYERS:
        left_out = found.output[f"layers.{layer}.left_out"]
        assert (np.bincount(left_out // 24, minlength=2) <= (1 - coverage) * 24).all()
        assert found.report.layers[layer].count.rows_left_out == len(left_out)
    assert found.report.count.kept < everybody.count.kept


@pytest.mark.parametrize("unit", ["layer", "head"])
@pytest.mark.parametrize("granularity", SETS)
def test_a_trial_tells_of_queries_that_its_sets_were_made_without(
    tmp_path: Path, granularity: str, unit: str
) -> None:
    """The same sets are made here of a cache without these queries, and judged by NumPy."""
    options = {"eps": 0.05, "granularity": granularity}
    tried = pruned(tmp_path, {"m": 40}, holdout=0.25, unit=unit, **options)
    aside = held_out_queries(40, 0.25)
    assert len(aside) == 10
    fewer = tmp_path / "fewer" / "x.safetensors"
    fewer.parent.mkdir()
    fewer.write_bytes(safetensors_bytes({
        name: tensor(np.delete(tried.given[name], aside, axis=2), "F16")
        if "query" in name else stored
        for name, stored in cache_tensors(**(SHAPE | {"m": 40})).items()
    }, None))  # fmt: skip
    [without] = prune(fewer, tmp_path / "fewer" / "out", **options).outputs
    other = Pruned(tried.given, read_output(Path(without.target)), without, None)
    size = 2 if granularity == "head" else 4
    for layer in LAYERS:
        assert tried.report.layers[layer].count.rows == 4 * 40
        for group, one in enumerate(tried.report.layers[layer].sets):
            heads = slice(size * group, size * group + size)
            over = (other.lost(layer)[heads][:, aside] > 0.05).any(axis=0)
            assert (one.held_out.queries, one.held_out.violations) == (10, over.sum())
            assert one.held_out.low <= over.mean() <= one.held_out.high
    assert sum(layer.held_out.violations for layer in tried.report.layers) > 0


@pytest.mark.parametrize("m", [12, 255, 256, 300])
def test_every_listed_query_is_within_the_budget_unless_something_else_is_asked_for(
    tmp_path: Path, m: int
) -> None:
    for layer in pruned(tmp_path, {"m": m}, eps=0.05).report.layers:
        assert layer.count.rows == 4 * m
        assert layer.held_out == HeldOut(0, 0)


@pytest.mark.parametrize("options", [
    {"eps": 0.05}, {"size": 0.5}, {"size_bytes": 32000}, {"out_tol": 0.3},
    {"eps": 0.05, "coverage": 0.8}, {"eps": 0.05, "granularity": "token"},
    {"eps": 0.05, "max_keep": 0.3, "keep_last": 4}, {"eps": 0.05, "hot": 0.3, "rest": "file"},
])  # fmt: skip
@pytest.mark.parametrize("offset", [None, "30"])
def test_a_trial_changes_no_byte_of_an_output(
    tmp_path: Path, options: dict[str, Any], offset: str | None
) -> None:
    cache = {"m": 20, "n": 60, "metadata": None if offset is None else {"causal_offset": offset}}
    reports = [
        pruned(tmp_path / str(holdout), cache, holdout=holdout, **options).report
        for holdout in (0.0, 0.3)
    ]
    plain, tried = (Path(report.target).read_bytes() for report in reports)
    assert tried == plain
    assert all(one.held_out.queries == 6 for layer in reports[1].layers for one in layer.sets)


def test_a_file_with_one_query_has_none_for_a_trial(tmp_path: Path) -> None:
    for m, count in ((1, 0), (2, 1), (3, 1)):
        report = pruned(tmp_path / str(m), {"m": m}, eps=0.05, holdout=0.05).report
        assert report.layers[0].sets[0].held_out.queries == count
        told = any("fewer than two queries" in each for each in report.warnings)
        assert told == (count == 0)


def test_queries_are_set_aside_at_random_and_always_the_same() -> None:
    found = held_out_queries(1000, 0.125, 200)
    assert np.array_equal(found, held_out_queries(1000, 0.125, 200))
    assert len(found) == 100
    assert len(np.unique(found)) == 100
    assert found.min() >= 200
    assert abs(found.mean() - 600) < 100
    assert len(held_out_queries(1000, 0.0)) == 0
    assert len(held_out_queries(9, 0.001)) == 1
    assert len(held_out_queries(1, 0.9)) == 0
    assert len(held_out_queries(2, 0.9)) == 1


def test_a_proof_is_small_beside_the_cache_unless_it_is_asked_for(tmp_path: Path) -> None:
    many = {"m": 500, "n": 40, "d": 4}
    report = pruned(tmp_path / "a", many, eps=0.1, proof="auto").report
    assert report.proof == "compact"
    few = {"m": 2, "n": 500, "d": 32}
    assert pruned(tmp_path / "b", few, eps=0.1, proof="auto").report.proof == "full"


@pytest.mark.parametrize("unit", ["layer", "head"])
@pytest.mark.parametrize("granularity", ["head", "layer", "token"])
def test_either_layout_gives_the_same_sets_and_rows(
    tmp_path: Path, granularity: str, unit: str
) -> None:
    given = cache_tensors(kv_heads=3, heads=6, m=7, n=40, d=4, batch=False)
    turned = {}
    for name, (dtype, shape, data) in given.items():
        array = np.frombuffer(data, "<u2").reshape(shape).swapaxes(0, 1)
        turned[name] = (dtype, array.shape, array.tobytes())
    outputs = []
    for layout, tensors in (("hnd", given), ("nhd", turned)):
        source = tmp_path / f"{layout}.safetensors"
        source.write_bytes(safetensors_bytes(tensors, None))
        options = {"granularity": granularity, "unit": unit, "layout": layout, "proof": "full"}
        [report] = prune(source, tmp_path / "out", 0.1, **options).outputs
        assert audit([Path(report.target)], [source]).holds
        outputs.append(read_output(Path(report.target)))
    assert outputs[0].keys() == outputs[1].keys()
    for name, array in outputs[0].items():
        np.testing.assert_array_equal(array, outputs[1][name])


def test_layers_of_different_lengths_have_no_set_of_tokens(tmp_path: Path) -> None:
    shape = {"kv_heads": 2, "heads": 4, "m": 3, "d": 4}
    tensors = cache_tensors(layers=1, n=24, **shape)
    more = cache_tensors(layers=2, n=30, **shape)
    tensors |= {name: each for name, each in more.items() if name.startswith("layers.1")}
    (tmp_path / "x.safetensors").write_bytes(safetensors_bytes(tensors, None))
    with pytest.raises(CertkError, match="its layers differ"):
        prune(
            tmp_path / "x.safetensors",
            tmp_path / "out",
            0.1,
            granularity="token",
            fail_fast=True,
        )


@pytest.mark.parametrize("granularity", ["head", "layer", "token"])
def test_outputs_that_hardly_save_are_warned_of(tmp_path: Path, granularity: str) -> None:
    report = pruned(tmp_path, eps=1e-6, granularity=granularity).report
    assert any("saves only" in text or "is larger" in text for text in report.warnings)


RULES: list[tuple[Any, dict[int, float]]] = [
    (0.1, {0: 0.1, 7: 0.1}),
    ("0.1", {0: 0.1}),
    ("0-3=0.01,4-=0.05", {0: 0.01, 3: 0.01, 4: 0.05, 99: 0.05}),
    ("2=0,*=0.5", {2: 0.0, 3: 0.5}),
    ({"1": 0.25, "default": 0.1}, {1: 0.25, 0: 0.1}),
]


@pytest.mark.parametrize(("given", "wanted"), RULES)
def test_rules_for_budgets(given: Any, wanted: dict[int, float]) -> None:
    budgets = read_budgets(given)
    assert {layer: budgets.of(layer) for layer in wanted} == wanted
    # What a manifest holds reads the same.
    assert read_budgets(str(budgets)) == budgets


def test_rules_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rule.json"
    path.write_text('{"0": 0.5, "*": 0.25}')
    assert read_budgets(str(path)) == Budgets(0.25, ((0, 0, 0.5),))
    path.write_text("[1]")
    with pytest.raises(CertkError, match="holds no object"):
        read_budgets(str(path))
    path.write_text("{")
    with pytest.raises(CertkError, match="is not JSON"):
        read_budgets(str(path))


@pytest.mark.parametrize("given", ["x", "a=0.1", "0-3", "0=x", "1=2", "=0.1", "-3=0.1", {"0": "x"}])
def test_rules_that_are_none(given: Any) -> None:
    with pytest.raises(CertkError, match="eps"):
        read_budgets(given).of(0)


HOT: dict[str, Any] = {"eps": 0.05, "rest": "file", "hot": 0.3}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "the target is nothing"),
    ({"eps": 1.0}, "eps is 1.0"),
    ({"eps": math.nan}, "eps is nan"),
    ({"eps": -0.1}, "eps is -0.1"),
    ({"eps": 1e-310}, "eps is 1e-310"),
    ({"eps": "0=0.1"}, "no budget for layer 1"),
    ({"eps": {(0, 3): 0.1}}, "are no layers"),
    ({"eps": 0.1, "size": 5}, "the target is eps and size"),
    ({"size": 0}, "size is 0"),
    ({"size": 1.5}, "size is 1.5"),
    ({"size": True}, "size is True"),
    ({"size": 5, "max_keep": 3}, "both limit the keys"),
    ({"size": 5, "coverage": 0.5}, "coverage goes with a budget"),
    ({"out_tol": 0.0}, "out_tol is 0.0"),
    ({"out_tol": math.nan}, "out_tol is nan"),
    ({"out_tol": "x"}, "out_tol is 'x'"),
    ({"out_tol": 1.0, "granularity": "token"}, "out_tol is of one layer"),
    ({"eps": 0.1, "max_keep": 0}, "max_keep is 0"),
    ({"eps": 0.1, "max_keep": 1.5}, "max_keep is 1.5"),
    ({"eps": 0.1, "max_keep": math.nan}, "max_keep is nan"),
    ({"eps": 0.1, "keep_first": -1}, "keep_first is -1"),
    ({"eps": 0.1, "keep_first": 3, "keep_last": 3, "max_keep": 5}, "layer 0: .*force 6 of 24 keys"),
    ({"eps": 0.1, "keep_first": 4, "max_keep": 0.1}, "force 4 of 24 keys, max_keep allows 2"),
    ({"eps": 0.1, "granularity": "row"}, "granularity is 'row'"),
    ({"eps": 0.1, "coverage": 0.0}, "coverage is 0.0"),
    ({"eps": 0.1, "coverage": "x"}, "coverage is 'x'"),
    ({"eps": 0.1, "holdout": 1.0}, "holdout is 1.0"),
    ({"eps": 0.1, "holdout": "x"}, "holdout is 'x'"),
    ({"eps": 0.1, "holdout": None}, "holdout is None: give a number"),
    ({"eps": 0.1, "block_size": 0}, "block_size is 0"),
    ({"eps": 0.1, "proof": "half"}, "proof is 'half'"),
    ({"eps": 0.1, "effort": "most"}, "effort is 'most'"),
    ({"eps": 0.1, "layout": "dhn"}, "layout is 'dhn'"),
    ({"size_bytes": 10}, "do not even hold"),
    ({"eps": 0.1, "unit": "row"}, "unit is 'row'"),
    ({"eps": 0.1, "existing": "keep"}, "existing is 'keep'"),
    ({"eps": 0.1, "engine": "slurm"}, "engine is 'slurm'"),
    ({"eps": 0.1, "address": "auto"}, "address is that of a Ray cluster"),
    ({"eps": 0.1, "jobs": 0}, "jobs is 0"),
    ({"eps": 0.1, "jobs": "2"}, "jobs is '2'"),
    ({"eps": 0.1, "threads": -1}, "threads is -1"),
    ({"eps": 0.1, "threads": 0}, "threads is 0"),
    ({"eps": 0.1, "threads": "2"}, "threads is '2'"),
    *(({"eps": 0.1, "rest": rest}, "rest is .*: give drop, codes or file")
      for rest in ("cell", "", None, 1)),
    *(({"eps": 0.1, "rest": rest, "key_bits": 8}, "bits are those of codes")
      for rest in ("drop", "file")),
    *(({"eps": 0.1, "rest": "codes", "key_bits": bits}, "key_bits is .*: give one of")
      for bits in (4, 12.0, "12", True)),
    ({"eps": 0.1, "rest": "codes", "value_bits": 16}, "value_bits is 16: give one of"),
    (HOT | {"eps": None, "size": 0.3}, "hot goes with eps"),
    (HOT | {"eps": 0.0}, "hot needs eps above 0"),
    (HOT | {"eps": "0=0,*=0.1"}, "hot needs eps above 0"),
    (HOT | {"rest": "drop"}, "give rest codes or file"),
    (HOT | {"max_keep": 3}, "hot and max_keep exclude each other"),
    (HOT | {"coverage": 0.9}, "hot and coverage exclude each other"),
    (HOT | {"block_size": 2}, "hot and block_size exclude each other"),
    (HOT | {"granularity": "token"}, "hot keys are chosen by head or layer"),
    (HOT | {"hot": 0.0}, "hot is 0.0"),
    (HOT | {"hot": 0}, "hot is 0"),
    (HOT | {"hot": "x"}, "hot is 'x'"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_requests_that_are_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    write_cache(tmp_path / "x.safetensors")
    with pytest.raises(CertkError, match=words):
        prune(tmp_path / "x.safetensors", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_equal_requests_are_equal_in_a_manifest() -> None:
    same = {"max_keep": 0.5, "coverage": 0.9, "holdout": 0.1}
    request = Request(eps=read_budgets("0=0.1,*=0.2"), **same)
    assert request.to_json() == Request.of(eps={"0": 0.1, "*": 0.2}, **same).to_json()
    assert Request.of(out_tol=1) == Request(out_tol=1.0)
