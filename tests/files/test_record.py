"""What is recorded of a layer: masses rounded outward, weights in F32, shapes, sizes."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from certk_rs._files.masses import lower_ends, stored_weights, upper_ends
from certk_rs.cache_format import (
    Counts,
    Layer,
    LayerRecord,
    Options,
    counts_of,
    mass_dtype,
    most_held_out,
    most_left_out,
    output_tensors,
    proof_bytes,
    record_tensors,
    storable_budget,
    storable_weights,
)
from fresh_process import run_python

ROLES = ("key", "value", "query")
LAYER = Layer(3, {r: f"layers.3.{r}" for r in ROLES}, dict.fromkeys(ROLES, "F16"), 2, 4, 5, 40, 8)

NASTY = [
    *(0.0, 1.0, 0.1, 0.05, 0.5, 1e-3, 1 / 3, 2.0**-24, math.nextafter(1.0, 0.0)),
    *(2.0**-126, math.nextafter(2.0**-126, 0.0), math.nextafter(2.0**-126, 1.0), 2.0**-149),
    *(2.0**-150, 1e-300, 2.0**-1000, math.nextafter(2.0**-1000, 0.0), 2.0**-1022, 5e-324),
    *(math.nextafter(0.1, 1.0), float(np.float32(0.1)), math.nextafter(float(np.float32(0.1)), 0)),
]


@pytest.mark.parametrize("dtype", ["F32", "F64"])
def test_masses_are_rounded_outward_to_the_next_number(dtype: str) -> None:
    least = Fraction(2) ** (-126 if dtype == "F32" else -1000)
    kind = np.float32 if dtype == "F32" else np.float64
    given = np.concatenate([NASTY, np.random.default_rng(0).random(500) ** 9])
    upper, lower = upper_ends(given, dtype), lower_ends(given, dtype)
    assert upper.dtype == lower.dtype == kind
    for mass, up, down in zip(given.tolist(), upper, lower, strict=True):
        low, exact, high = (Fraction(float(x)) for x in (down, mass, up))
        assert low <= exact <= high
        assert (high == 0) == (exact == 0)
        assert high == 0 or high >= least
        assert low == 0 or low >= least
        if exact >= least:
            assert high == exact or Fraction(float(np.nextafter(up, kind(0)))) < exact
            assert low == exact or Fraction(float(np.nextafter(down, kind(2)))) > exact
        else:
            assert low == 0
            assert high == (least if exact else 0)
    for again, ends in ((upper, upper_ends), (lower, lower_ends)):
        np.testing.assert_array_equal(ends(again.astype(np.float64), dtype), again)


def test_masses_are_the_same_where_the_host_flushes_subnormal_numbers() -> None:
    pytest.importorskip("torch")
    script = f"""
import numpy as np, torch
from certk_rs._files.masses import lower_ends, storable_weights, upper_ends
given = np.array({NASTY!r})
def made():
    ends = [f(given, d).tobytes() for f in (upper_ends, lower_ends) for d in ("F32", "F64")]
    return [*ends, storable_weights(given).tobytes()]
before = made()
assert torch.set_flush_denormal(True)
assert made() == before
print("same")
    """
    ran = run_python(script)
    assert ran.stdout.strip() == "same", ran.stderr


def test_the_dtype_of_masses_and_the_budget_within_it() -> None:
    assert mass_dtype({0: (0.1, 0.0), 1: (2.0**-100,)}) == "F32"
    assert mass_dtype({0: (0.1, 0.0), 1: (math.nextafter(2.0**-100, 0),)}) == "F64"
    for eps in (0.05, 0.1, 0.25, 1 / 3, 1 - 1e-12, 2.0**-100, 0.0):
        budget = storable_budget(eps, "F32")
        assert budget <= eps
        assert float(np.float32(budget)) == budget
        assert eps in (0.0, budget) or float(np.nextafter(np.float32(budget), 1)) > eps
    assert storable_budget(1e-80, "F64") == 1e-80


def test_weights_keep_their_ratios() -> None:
    exact = np.array([[3.0, 0.0, 2.0**-20], [1.5, 7.0, 2.0**-140]])
    stored = storable_weights(exact)
    np.testing.assert_array_equal(stored_weights(stored).astype(np.float64), stored)
    np.testing.assert_array_equal(storable_weights(exact[:1], exact.max()), stored[:1])
    np.testing.assert_array_equal(stored * 8, [[3.0, 0.0, 2.0**-20], [1.5, 7.0, 0.0]])
    for factor in (2.0**-1000, 2.0**900):
        np.testing.assert_array_equal(storable_weights(exact * factor), stored)
    rough = np.random.default_rng(0).random(1000) * 1e-30
    kept = storable_weights(rough)
    ratios = kept / rough
    assert ratios.max() / ratios.min() <= (1 + 2.0**-24) / (1 - 2.0**-24)
    assert storable_weights(np.zeros(3)).tolist() == [0, 0, 0]


@pytest.mark.parametrize(("coverage", "rows", "most"), [
    (0.9, 10, 1), (0.9, 9, 0), (0.95, 100, 5), (0.95, 99, 4), (1.0, 50, 0), (1e-300, 7, 6),
    (0.1, 10, 9),
])  # fmt: skip
def test_how_many_rows_coverage_leaves_out(coverage: float, rows: int, most: int) -> None:
    assert most_left_out(coverage, rows) == most


@pytest.mark.parametrize(
    ("holdout", "m", "most"),
    [(0.1, 10, 1), (0.1, 11, 2), (0.25, 64, 16), (0.9, 1, 0), (0.99, 3, 2)],
)
def test_how_many_queries_are_set_aside(holdout: float, m: int, most: int) -> None:
    assert most_held_out(holdout, m) == most


def record(granularity: str = "head", **fields: Any) -> LayerRecord:
    rng = np.random.default_rng(1)
    groups = 2 if granularity == "head" else 1
    upper = rng.random((4, 5))
    weights = np.where(rng.random((4, 5)) < 0.5, 0.0, rng.random((4, 5)))
    return LayerRecord(
        LAYER,
        40,
        tuple(np.flatnonzero(rng.random(40) < 0.3) for _ in range(groups)),
        upper,
        upper / 2,
        np.arange(groups),
        weights,
        **fields,
    )


OPTIONS = [
    Options(granularity, proof=proof, block_size=block, coverage=coverage, holdout=holdout)
    for granularity in ("head", "layer", "token")
    for proof in ("full", "compact", "none")
    for block, coverage, holdout in ((1, 1.0, 0.0), (16, 1.0, 0.4), (1, 0.7, 0.0), (3, 0.7, 0.4))
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("masses", ["F32", "F64"])
def test_tensors_have_the_shapes_that_were_planned(options: Options, masses: str) -> None:
    aside = np.array([1, 4]) if options.holdout else np.empty(0, np.int64)
    out = np.array([0, 7]) if options.coverage < 1 else np.empty(0, np.int64)
    made = record(options.granularity, held_out=aside, left_out=out)
    eps = [0.5] * len(made.indices)
    tensors = record_tensors(made, options, eps, masses)
    planned = output_tensors(LAYER, options, counts_of(made, options), masses)
    kinds = {"<i4": "I32", "<i8": "I64", "<f4": "F32", "<f8": "F64"}
    forms = {name: (kinds[array.dtype.str], array.shape) for name, array in tensors.items()}
    assert forms == {
        name: form for name, form in planned.items() if name.rpartition(".")[2] not in ROLES
    }
    blocks = tensors.get("layers.3.blocks")
    if blocks is not None:
        ends = tensors.get("layers.3.block_indptr", np.array([0, len(blocks)]))
        for group, kept in enumerate(made.indices):
            ids = blocks[ends[group] : ends[group + 1]]
            assert ids.tolist() == sorted({int(i) // options.block_size for i in kept})
    said = {name.rpartition(".")[2]: array for name, array in tensors.items()}
    if options.proof != "none":
        rows, weights = said["lower_bound_rows"], said["lower_bound_weights"]
        dense = made.weights.reshape(-1)
        assert rows.tolist() == np.flatnonzero(dense).tolist()
        assert np.allclose(weights / weights.max(), dense[rows] / dense.max())
    if options.proof == "compact":
        promised = np.ones((4, 5), bool)
        promised[:, aside] = False
        promised.reshape(-1)[out] = False
        for head in range(4):
            worst = max(made.upper[head][promised[head]], default=0.0)
            assert worst <= said["worst_tail_mass"][head] <= worst * (1 + 2.0**-23)
        if options.holdout:
            over = (made.upper[:, aside] > 0.5).sum(axis=1)
            assert said["violations"].tolist() == over.tolist()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_sizes_of_proofs(options: Options) -> None:
    from dataclasses import replace

    sizes = proof_bytes([LAYER, LAYER], options, "F32")
    for proof, size in sizes.items():
        some = replace(options, proof=proof)
        made = record_tensors(record(options.granularity), some, [0.5], "F32")
        counted = ("tail_mass_upper", "tail_mass_lower", "worst_tail_mass", "violations")
        total = sum(
            array.nbytes
            for name, array in made.items()
            if name.rpartition(".")[2] in (*counted, "lower_bound")
        )
        assert size == 2 * total
    assert sizes["none"] == 0 < sizes["compact"] < sizes["full"]


def test_shapes_of_wide_positions() -> None:
    from dataclasses import replace

    far = replace(LAYER, n=1 << 31)
    forms = output_tensors(far, Options(block_size=2), Counts([3, 4], [1, 2]), "F32")
    assert forms["layers.3.indices"] == ("I64", (7,))
    assert forms["layers.3.blocks"] == ("I64", (3,))
    assert json.dumps(forms)  # plain numbers
