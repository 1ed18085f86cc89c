"""Recorded numbers of a layer: masses rounded outward, weights in F32, shapes, sizes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from certk_rs._files.certificate import Options
from certk_rs._files.layers import Layer
from certk_rs._files.masses import (
    lower_ends,
    mass_dtype,
    storable_budget,
    storable_weights,
    stored_weights,
    upper_ends,
)
from certk_rs._files.output import Counts, output_tensors, proof_bytes
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


OPTIONS = [
    Options(granularity, proof=proof, block_size=block, coverage=coverage, holdout=holdout)
    for granularity in ("head", "layer", "token")
    for proof in ("full", "compact", "none")
    for block, coverage, holdout in ((1, 1.0, 0.0), (16, 1.0, 0.4), (1, 0.7, 0.0), (3, 0.7, 0.4))
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_sizes_of_proofs(options: Options) -> None:
    """Of two layers with four heads and five queries: masses, violations and bounds."""
    bounds = 8 * (2 if options.granularity == "head" else 1)
    violations = 4 * 8 if options.holdout else 0
    sizes = {"full": 2 * 20 * 4 + bounds, "compact": 4 * 4 + violations + bounds, "none": 0}
    found = proof_bytes([LAYER, LAYER], options, "F32")
    assert found == {proof: 2 * size for proof, size in sizes.items()}


def test_shapes_of_wide_positions() -> None:
    far = replace(LAYER, n=1 << 31)
    forms = output_tensors(far, Options(block_size=2), Counts([3, 4], [1, 2]), "F32")
    assert forms["layers.3.indices"] == ("I64", (7,))
    assert forms["layers.3.blocks"] == ("I64", (3,))
    assert json.dumps(forms)  # plain numbers
