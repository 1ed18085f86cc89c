"""Prune jobs with more than one budget: each keeps its promise."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from certk_rs import CertkError, prune
from certk_rs._files.certificate import read_certificate
from certk_rs._files.tensor_file import SafetensorsFile
from certk_rs._jobs.held_out import HeldOut, held_out_queries
from certk_rs._jobs.request import Budgets, Request, read_budgets
from certk_rs._jobs.results import FileReport
from certk_rs.audit import audit
from cli_fixtures import cache_tensors, read_output, safetensors_bytes, tensor, write_cache

SHAPE = {"layers": 2, "kv_heads": 2, "heads": 4, "m": 12, "n": 96, "d": 8}


def pruned(tmp_path: Path, cache: dict[str, Any] | None = None, **options: Any) -> FileReport:
    """Write a cache, prune it, hold it against the audit."""
    source = tmp_path / "x.safetensors"
    write_cache(source, **(SHAPE | (cache or {})))
    options = {"proof": "full"} | options
    [report] = prune(source, tmp_path / "out", **options).outputs
    found = audit([Path(report.target)], [source])
    [output] = found.outputs
    assert found.holds, list(map(str, output.findings))
    assert output.unchecked == ()
    return report


def read_cache(tmp_path: Path) -> dict[str, np.ndarray]:
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        return {name: file.read(name).astype(float) for name in file.header.entries}


def softmax(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Return the weights (m, n) of one head, by NumPy."""
    scores = query @ key.T / np.sqrt(key.shape[-1])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def masses(tmp_path: Path, report: FileReport) -> list[np.ndarray]:
    """Return the loss of every row (heads, m) of every layer, by NumPy from the inputs."""
    given = read_cache(tmp_path)
    output = read_output(Path(report.target))
    found = []
    for layer in range(len(report.layers)):
        query = given[f"layers.{layer}.query"][0]
        key = given[f"layers.{layer}.key"][0]
        group = len(query) // len(key)
        indptr = output.get(f"layers.{layer}.indptr")
        indices = output[f"layers.{layer}.indices"]
        lost = np.empty(query.shape[:2])
        for head in range(len(query)):
            kept = indices
            if indptr is not None:
                kept = indices[indptr[head // group] : indptr[head // group + 1]]
            weights = softmax(query[head], key[head // group])
            lost[head] = 1 - weights[:, kept].sum(axis=1)
        found.append(lost)
    return found


def certificate_of(report: FileReport) -> Any:
    with SafetensorsFile(Path(report.target)) as file:
        return read_certificate(file.header.metadata["certk"])[0]


def test_budgets_by_layer(tmp_path: Path) -> None:
    report = pruned(tmp_path, eps={"0": 0.01, "*": 0.2})
    first, second = masses(tmp_path, report)
    assert first.max() <= 0.01 < second.max() <= 0.2
    assert certificate_of(report).eps == {0: (0.01, 0.01), 1: (0.2, 0.2)}


@pytest.mark.parametrize("size", [0.25, 0.6, 100])
@pytest.mark.parametrize("granularity", ["head", "layer", "token"])
def test_a_size_is_kept_and_the_worst_mass_is_nearly_least(
    tmp_path: Path, size: float, granularity: str
) -> None:
    report = pruned(tmp_path, size=size, granularity=granularity)
    groups = {"head": 4, "layer": 2, "token": 1}[granularity]
    most = size if isinstance(size, int) else int(size * groups * 96)
    # By token there is one set, which every layer has.
    layers = report.layers[:1] if granularity == "token" else report.layers
    sizes = [one.kept for layer in layers for one in layer.sets]
    assert sum(sizes) <= most
    worst = max(lost.max() for lost in masses(tmp_path, report))
    # 1e-12: what NumPy's sums are off by.
    assert worst <= max(layer.worst_tail_mass for layer in report.layers) + 1e-12
    assert report.worst_at_least is not None
    assert report.worst_at_least <= worst + 1e-12


def test_no_other_distribution_of_a_size_does_better_than_is_said(tmp_path: Path) -> None:
    """Two kv heads of ten keys: all pairs of sets of the given size are tried."""
    from itertools import combinations

    shape = {"layers": 1, "kv_heads": 2, "heads": 2, "m": 3, "n": 10}
    report = pruned(tmp_path, shape, size=9)
    given = read_cache(tmp_path)
    best = []
    for head in range(2):
        query, key = (given[f"layers.0.{role}"][0, head] for role in ("query", "key"))
        weights = softmax(query, key)
        best.append(
            [
                min(
                    (1 - weights[:, list(kept)].sum(axis=1)).max()
                    for kept in combinations(range(10), k)
                )
                for k in range(11)
            ]
        )
    least = min(max(best[0][k], best[1][9 - k]) for k in range(10))
    worst = max(layer.worst_tail_mass for layer in report.layers)
    assert report.worst_at_least is not None
    assert report.worst_at_least <= least <= worst
    assert worst <= 1.2 * least


def test_a_number_of_bytes_is_kept(tmp_path: Path) -> None:
    shape = {"n": 2000, "d": 32}
    report = pruned(tmp_path, shape, size_bytes=300_000)
    assert Path(report.target).stat().st_size == report.output_bytes
    assert 200_000 < report.output_bytes <= 300_000


@pytest.mark.parametrize("out_tol", [0.01, 0.3, 5.0])
def test_an_output_moves_by_no_more_than_is_asked(tmp_path: Path, out_tol: float) -> None:
    report = pruned(tmp_path, out_tol=out_tol)
    given = read_cache(tmp_path)
    output = read_output(Path(report.target))
    for layer in range(2):
        indptr, indices = output[f"layers.{layer}.indptr"], output[f"layers.{layer}.indices"]
        for head in range(4):
            kept = indices[indptr[head // 2] : indptr[head // 2 + 1]]
            query = given[f"layers.{layer}.query"][0, head]
            key, value = (
                given[f"layers.{layer}.{role}"][0, head // 2] for role in ("key", "value")
            )
            full, some = softmax(query, key), softmax(query, key[kept])
            moved = np.linalg.norm(full @ value - some @ value[kept], axis=1)
            assert moved.max() <= out_tol


@pytest.mark.parametrize("coverage", [0.5, 0.9])
def test_coverage_leaves_out_so_many_rows_and_keeps_fewer_keys(
    tmp_path: Path, coverage: float
) -> None:
    everybody = pruned(tmp_path / "all", eps=0.05)
    report = pruned(tmp_path, eps=0.05, coverage=coverage)
    output = read_output(Path(report.target))
    lost = masses(tmp_path, report)
    for layer in range(2):
        left_out = output[f"layers.{layer}.left_out"]
        promised = np.ones(4 * 12, bool)
        promised[left_out] = False
        assert (lost[layer].reshape(-1)[promised] <= 0.05).all()
        by_group = np.bincount(left_out // 24, minlength=2)
        assert (by_group <= (1 - coverage) * 24).all()
        assert report.layers[layer].count.rows_left_out == len(left_out)
    assert report.count.kept < everybody.count.kept


@pytest.mark.parametrize("unit", ["layer", "head"])
@pytest.mark.parametrize("granularity", ["head", "layer"])
def test_a_trial_tells_of_queries_that_its_sets_were_made_without(
    tmp_path: Path, granularity: str, unit: str
) -> None:
    """The same sets are made here of a cache without these queries, and judged by NumPy."""
    options = {"eps": 0.05, "granularity": granularity}
    report = pruned(tmp_path, {"m": 40}, holdout=0.25, unit=unit, **options)
    plain = pruned(tmp_path / "plain", {"m": 40}, **options)
    aside = held_out_queries(40, 0.25)
    assert len(aside) == 10
    tensors = cache_tensors(**(SHAPE | {"m": 40}))
    fewer = tmp_path / "fewer" / "x.safetensors"
    fewer.parent.mkdir()
    fewer.write_bytes(safetensors_bytes({
        name: tensor(np.delete(read_cache(tmp_path)[name], aside, axis=2), "F16")
        if "query" in name else stored
        for name, stored in tensors.items()
    }, None))  # fmt: skip
    [without] = prune(fewer, tmp_path / "fewer" / "out", **options).outputs
    lost = masses(tmp_path, without)
    size = 2 if granularity == "head" else 4
    for layer in range(2):
        assert report.layers[layer].count.rows == 4 * 40
        for group, one in enumerate(report.layers[layer].sets):
            heads = slice(size * group, size * group + size)
            over = (lost[layer][heads][:, aside] > 0.05).any(axis=0)
            assert (one.held_out.queries, one.held_out.violations) == (10, over.sum())
            assert one.held_out.low <= over.mean() <= one.held_out.high
    assert sum(layer.held_out.violations for layer in report.layers) > 0
    # What is written is made for all queries, as if no trial had been asked for.
    assert Path(report.target).read_bytes() == Path(plain.target).read_bytes()
    assert all((each <= 0.05).all() for each in masses(tmp_path, report))


@pytest.mark.parametrize("m", [12, 255, 256, 300])
def test_every_listed_query_is_within_the_budget_unless_something_else_is_asked_for(
    tmp_path: Path, m: int
) -> None:
    report = pruned(tmp_path, {"m": m}, eps=0.05)
    assert all((each <= 0.05).all() for each in masses(tmp_path, report))
    for layer in report.layers:
        assert layer.count.rows == 4 * m
        assert layer.held_out == HeldOut(0, 0)
    assert certificate_of(report).options.holdout == 0


@pytest.mark.parametrize("options", [
    {"size": 0.5}, {"size_bytes": 32000}, {"out_tol": 0.3}, {"eps": 0.05, "coverage": 0.8},
    {"eps": 0.05, "granularity": "token"}, {"eps": 0.05, "max_keep": 0.3, "keep_last": 4},
    {"eps": 0.05, "hot": 0.3, "guard": "codes"},
])  # fmt: skip
@pytest.mark.parametrize("offset", [None, "30"])
def test_a_trial_changes_no_byte_of_an_output(
    tmp_path: Path, options: dict[str, Any], offset: str | None
) -> None:
    cache = {"m": 20, "n": 60, "metadata": None if offset is None else {"causal_offset": offset}}
    tried = pruned(tmp_path / "tried", cache, holdout=0.3, **options)
    plain = pruned(tmp_path / "plain", cache, **options)
    assert Path(tried.target).read_bytes() == Path(plain.target).read_bytes()
    assert all(one.held_out.queries == 6 for layer in tried.layers for one in layer.sets)


def test_a_file_with_one_query_has_none_for_a_trial(tmp_path: Path) -> None:
    for m, count in ((1, 0), (2, 1), (3, 1)):
        report = pruned(tmp_path / str(m), {"m": m}, eps=0.05, holdout=0.05)
        assert report.layers[0].sets[0].held_out.queries == count
        told = any("fewer than two queries" in each for each in report.warnings)
        assert told == (count == 0)


@pytest.mark.parametrize("options", [{}, {"coverage": 0.6}])
@pytest.mark.parametrize("limit", [{}, {"keep_last": 5}, {"max_keep": 0.4, "keep_first": 2}])
def test_what_is_visible_goes_by_all_queries(
    tmp_path: Path, options: dict[str, Any], limit: dict[str, Any]
) -> None:
    """Also by those that coverage leaves out: the audit counts from the same last key."""
    cache = {"m": 20, "n": 60, "metadata": {"causal_offset": "30"}}
    for seed in range(4):
        pruned(tmp_path / str(seed), cache | {"seed": seed}, eps=0.05, **options, **limit)


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


@pytest.mark.parametrize("block_size", [2, 7, 16, 200])
@pytest.mark.parametrize("granularity", ["head", "layer"])
def test_whole_blocks_are_kept(tmp_path: Path, block_size: int, granularity: str) -> None:
    report = pruned(tmp_path, eps=0.1, block_size=block_size, granularity=granularity)
    assert all((lost <= 0.1).all() for lost in masses(tmp_path, report))
    output = read_output(Path(report.target))
    for layer in range(2):
        indices = output[f"layers.{layer}.indices"]
        blocks = output[f"layers.{layer}.blocks"]
        starts = output.get(f"layers.{layer}.block_indptr", np.array([0, len(blocks)]))
        of_keys = output.get(f"layers.{layer}.indptr", np.array([0, len(indices)]))
        for group in range(len(starts) - 1):
            mine = blocks[starts[group] : starts[group + 1]]
            want = [
                i for block in mine for i in range(block * block_size, (block + 1) * block_size)
            ]
            have = indices[of_keys[group] : of_keys[group + 1]]
            assert have.tolist() == [i for i in want if i < 96]


@pytest.mark.parametrize("proof", ["full", "compact", "none"])
@pytest.mark.parametrize("options", [{}, {"max_keep": 20}, {"coverage": 0.8}])
def test_every_proof_is_confirmed(tmp_path: Path, proof: str, options: dict[str, Any]) -> None:
    report = pruned(tmp_path, eps=0.05, proof=proof, **options)
    assert report.proof == proof


def test_a_proof_is_small_beside_the_cache_unless_it_is_asked_for(tmp_path: Path) -> None:
    many = {"m": 500, "n": 40, "d": 4}
    report = pruned(tmp_path / "a", many, eps=0.1, proof="auto")
    assert report.proof == "compact"
    few = {"m": 2, "n": 500, "d": 32}
    assert pruned(tmp_path / "b", few, eps=0.1, proof="auto").proof == "full"


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
    report = pruned(tmp_path, eps=1e-6, granularity=granularity)
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
    (
        {"eps": 0.1, "keep_first": 3, "keep_last": 3, "max_keep": 5},
        "layer 0: .* force 6 of 24 keys",
    ),
    ({"eps": 0.1, "keep_first": 4, "max_keep": 0.1}, "force 4 of 24 keys, max_keep allows 2"),
    ({"eps": 0.1, "granularity": "row"}, "granularity is 'row'"),
    ({"eps": 0.1, "coverage": 0.0}, "coverage is 0.0"),
    ({"eps": 0.1, "coverage": "x"}, "coverage is 'x'"),
    ({"eps": 0.1, "holdout": 1.0}, "holdout is 1.0"),
    ({"eps": 0.1, "holdout": "x"}, "holdout is 'x'"),
    ({"eps": 0.1, "holdout": None}, "holdout is None: give a number"),
    ({"eps": 0.1, "block_size": 0}, "block_size is 0"),
    ({"eps": 0.1, "proof": "half"}, "proof is 'half'"),
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
]


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
