"""Rows that are hard on a selector: distributions, lengths, scales, budgets, and their mixtures.

A family makes *effective* scores (rows, n) in natural-log units as float64; `store` turns them
into what a caller would hold (any dtype, divided by the scale, or exponentiated for probs).
Budgets include ones put on the true tail mass of a top-k set and one float64 step to each side,
so that the decision hangs on the last bit.  Everything follows from the seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from bulk_oracle import Truth
from cases import Case

Rng = np.random.Generator
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = (np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16), BFLOAT16)

# Both sides of: 1-3 keys; the 16 virtual lanes and 2 and 4 registers of them; 256-element sum
# blocks and their doubles; the sizes at which a short-row or sampling path may end; 65536-element
# chunks and two of them; four chunks, from which on a single row is shared out over threads.
SHORT_LENGTHS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
MEDIUM_LENGTHS = (255, 256, 257, 511, 512, 513, 1023, 1024, 1025)
LONG_LENGTHS = (2047, 2048, 2049, 3071, 3072, 3073, 4095, 4096, 4097)
CHUNK_LENGTHS = (65535, 65536, 65537, 131071, 131072, 131073)
SHARED_LENGTHS = (262143, 262144, 262145)


def column(rng: Rng, rows: int, low: float, high: float) -> np.ndarray:
    """One uniform number per row, shape (rows, 1)."""
    return rng.uniform(low, high, (rows, 1))


def gaussian(rng: Rng, rows: int, n: int) -> np.ndarray:
    """Independent normal scores, one sigma in 0.1..8 per row."""
    return rng.standard_normal((rows, n)) * column(rng, rows, 0.1, 8.0)


def shifted(rng: Rng, rows: int, n: int) -> np.ndarray:
    """Normal scores far from zero, where scale * s and (s - c) lose different bits."""
    return gaussian(rng, rows, n) + column(rng, rows, -1e4, 1e4)


def heavy(rng: Rng, rows: int, n: int) -> np.ndarray:
    """Student t with 1.5 degrees of freedom."""
    return rng.standard_t(1.5, (rows, n)) * column(rng, rows, 0.1, 3.0)


def equal(rng: Rng, rows: int, n: int) -> np.ndarray:
    """All scores equal."""
    return np.broadcast_to(column(rng, rows, -50.0, 50.0), (rows, n)).copy()


def two_level(rng: Rng, rows: int, n: int) -> np.ndarray:
    """Two values in random places, with gaps from 0 to 120."""
    up = rng.random((rows, n)) < rng.random((rows, 1))
    return np.where(up, column(rng, rows, 0.0, 120.0) * rng.random((rows, 1)) ** 3, 0.0)


def spike(rng: Rng, rows: int, n: int) -> np.ndarray:
    """Flat noise and one spike in a random place."""
    scores = rng.standard_normal((rows, n)) * 0.1
    scores[np.arange(rows), rng.integers(0, n, rows)] += rng.uniform(0.0, 120.0, rows)
    return scores


def wide(rng: Rng, rows: int, n: int) -> np.ndarray:
    """Scores to +-1e4: nearly all weights underflow."""
    return rng.uniform(-1e4, 1e4, (rows, n)) * rng.random((rows, 1)) ** 4


def ramp(rng: Rng, rows: int, n: int) -> np.ndarray:
    """A sorted ramp over more than 104 units, ascending or descending."""
    line = np.linspace(0.0, 1.0, n) * column(rng, rows, -320.0, 320.0)
    return line + rng.standard_normal((rows, n)) * 1e-3


def geometric(rng: Rng, rows: int, n: int) -> np.ndarray:
    """Weights that halve (or decay more slowly) from one key to the next, shuffled."""
    rate = np.log(2.0) * 2.0 ** -rng.integers(0, 6, (rows, 1))
    return rng.permuted(-np.arange(n) * rate, axis=1)


def tied(rng: Rng, rows: int, n: int) -> np.ndarray:
    """Few distinct values, so that nearly every boundary is a tie."""
    step = 2.0 ** rng.integers(-3, 2, (rows, 1))
    return np.round(gaussian(rng, rows, n) / step) * step


def close(rng: Rng, rows: int, n: int) -> np.ndarray:
    """Values a few float32 steps apart: ordered, but with equal weights for most purposes."""
    return column(rng, rows, -8.0, 8.0) + rng.integers(-4, 5, (rows, n)) * 2.0**-22


def masked(rng: Rng, rows: int, n: int) -> np.ndarray:
    """Normal scores with -inf in between; some rows wholly masked."""
    scores = gaussian(rng, rows, n)
    scores[rng.random((rows, n)) < rng.random((rows, 1)) * 1.1] = -np.inf
    return scores


def zeros(rng: Rng, rows: int, n: int) -> np.ndarray:
    """Zeros of both signs and subnormals of every dtype, all ties or nearly."""
    tiny = rng.choice([0.0, 5e-324, 1e-310, 1e-45, 1e-40, 6e-8], (rows, n))
    return np.where(rng.random((rows, n)) < 0.5, -tiny, tiny)


def huge(rng: Rng, rows: int, n: int) -> np.ndarray:
    """Scores to +-1e38 (clipped to the dtype when stored)."""
    return rng.uniform(-1.0, 1.0, (rows, n)) * 10.0 ** column(rng, rows, 4.0, 38.6)


def low_rank(rng: Rng, rows: int, n: int) -> np.ndarray:
    """Return scores like attention's: queries and keys of 8 shared directions, plus noise."""
    keys = rng.standard_normal((n, 8)) * np.geomspace(2.0, 0.2, 8)
    return rng.standard_normal((rows, 8)) @ keys.T + rng.standard_normal((rows, n)) * 0.2


FAMILIES: dict[str, Callable[[Rng, int, int], np.ndarray]] = {
    make.__name__: make
    for make in (
        gaussian, shifted, heavy, equal, two_level, spike, wide, ramp,
        geometric, tied, close, masked, zeros, huge, low_rank,
    )
}  # fmt: skip


def store(effective: np.ndarray, dtype: np.dtype, kind: str, scale: float) -> np.ndarray:
    """Return the rows of a caller: divided by the scale or exponentiated, clipped, in `dtype`."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore", divide="ignore"):
        if kind == "probs":
            top = np.max(effective, axis=1, keepdims=True, initial=-1e300)
            stored = np.exp(np.maximum(effective - top, -800.0)) * abs(scale)
        elif scale not in (0.0, 1.0):
            stored = effective / scale
            stored[np.isnan(stored)] = -np.inf
        else:
            stored = effective
        highest = float(ml_dtypes.finfo(dtype).max)
        stored = np.where(np.isneginf(effective), stored, np.clip(stored, -highest, highest))
        if kind == "probs":
            stored = np.where(np.isneginf(effective), 0.0, stored)
        else:
            # -inf is a mask for every scale, so dividing by a negative one must not flip it.
            stored = np.where(np.isneginf(effective), -np.inf, stored)
        return np.ascontiguousarray(stored.astype(dtype))


def random_scale(rng: Rng) -> float:
    """1, a usual d**-1/2, 0, or anything of both signs from 1e-38 to 1e3."""
    usual = (1.0, 1.0, 64.0**-0.5, 32.0**-0.5, 0.1, -1.0, 0.0)
    if rng.random() < 0.6:
        return float(rng.choice(usual))
    return float(rng.choice([-1.0, 1.0]) * 10.0 ** rng.uniform(-38.0, 3.0))


def random_eps(rng: Rng, rows: int) -> np.ndarray:
    """Budgets from 0 and 1e-80 to 1 - 1e-12, the usual ones more often."""
    usual = rng.choice([0.1, 0.01, 0.001, 1e-6, 0.5, 0.25], rows)
    small = 10.0 ** rng.uniform(-80.0, -1.0, rows)
    large = 1.0 - 10.0 ** rng.uniform(-12.0, -0.1, rows)
    pick = rng.integers(0, 10, rows)
    eps = np.select([pick < 5, pick < 7, pick < 9], [usual, small, large], 0.0)
    return np.ascontiguousarray(eps)


def boundary_eps(rng: Rng, case: Case) -> np.ndarray:
    """Budgets at the true tail mass of a random top-k set, or one or a few steps to either side."""
    truth = Truth(case)
    head, tail = truth.ladder
    k = np.minimum(rng.integers(0, case.n + 1, case.rows), np.maximum(truth.count, 1))
    rows = np.arange(case.rows)
    total = head[rows, k] + tail[rows, k]
    tau = (tail[rows, k] / np.where(total > 0, total, 1)).astype(np.float64)
    steps = rng.integers(-2, 3, case.rows)
    # Also just outside and inside the slack that float32 rows are allowed.
    factor = 1.0 + rng.choice([0.0, 0.0, 2.0**-14, 2.0**-13, 2.0**-17, -(2.0**-20)], case.rows)
    eps = tau * factor + steps * np.spacing(tau)
    return np.clip(eps, 0.0, 1.0 - 2.0**-53)


def make_case(
    seed: int,
    rows: int,
    n: int,
    *,
    dtype: np.dtype | None = None,
    kind: str | None = None,
    family: str | None = None,
    options: bool = False,
) -> Case:
    """A random case of one length; rows of several families unless `family` is given.

    With `options` also masks, lengths, causality, forced keys, min_keep and max_keep.
    """
    rng = np.random.default_rng([seed, rows, n])
    dtype = dtype or rng.choice(np.array(DTYPES, dtype=object), p=[0.55, 0.15, 0.15, 0.15])
    kind = kind or str(rng.choice(["logits", "logprobs", "probs"], p=[0.7, 0.1, 0.2]))
    names = [family] if family else list(FAMILIES)
    effective = np.empty((rows, n))
    for part in np.array_split(np.arange(rows), min(rows, 60)):
        effective[part] = FAMILIES[str(rng.choice(names))](rng, len(part), n)
    scale = random_scale(rng)
    stored = store(effective, dtype, kind, scale)
    case = Case(
        stored,
        random_eps(rng, rows),
        kind=kind,
        scale=1.0 if kind == "probs" else scale,
        name=f"make_case({seed}, {rows}, {n}, dtype={dtype}, {kind=}, {family=}, {options=})",
    )
    if options:
        case = with_options(rng, case)
    on_edge = rng.random(rows) < 0.3
    eps = np.where(on_edge, boundary_eps(rng, case), case.eps)
    return replace(case, eps=eps)


def with_options(rng: Rng, case: Case) -> Case:
    """The same rows with a random handful of the row options and constraints."""
    rows, n = case.scores.shape
    changes: dict[str, Any] = {}
    mask = rng.integers(0, 4)
    if mask == 1:
        changes["mask"] = rng.random((rows, n)) < rng.random((rows, 1)) * 1.2
    elif mask == 2 and case.kind != "probs":
        bias_dtype = rng.choice(np.array(DTYPES, dtype=object))
        changes["mask"] = additive_mask(rng, rows, n, bias_dtype)
        # |scale s| + |mask| above 2**26 may be refused (numerics.md); stay below.
        limit = 2.0**25 / abs(case.scale) if case.scale else np.inf
        stored = np.clip(case.scores.astype(np.float64), -limit, limit)
        stored = np.where(np.isneginf(case.scores.astype(np.float64)), -np.inf, stored)
        changes["scores"] = stored.astype(case.scores.dtype)
    if rng.random() < 0.3:
        changes["lengths"] = rng.integers(0, n + 1, rows)
    elif rng.random() < 0.2:
        changes["causal_offset"] = int(rng.integers(-2, n + 1))
    if rng.random() < 0.3:
        changes["keep_first"] = int(rng.integers(0, min(n, 8) + 1))
    if rng.random() < 0.3:
        changes["keep_last"] = int(rng.integers(0, min(n, 8) + 1))
    if rng.random() < 0.3:
        changes["min_keep"] = int(rng.integers(1, n + 1))
    elif rng.random() < 0.3:
        forced = changes.get("keep_first", 0) + changes.get("keep_last", 0)
        changes["max_keep"] = int(rng.integers(max(forced, 1), max(forced, n) + 1))
    return replace(case, **changes)


def additive_mask(rng: Rng, rows: int, n: int, dtype: np.dtype) -> np.ndarray:
    """A bias with real values, and with the two usual ways to write "masked"."""
    bias = rng.standard_normal((rows, n)) * column(rng, rows, 0.0, 4.0)
    lowest = float(ml_dtypes.finfo(dtype).min)
    kind = rng.integers(0, 8, (rows, n))
    bias = np.where(kind == 0, lowest, np.where(kind == 1, -np.inf, bias))
    with np.errstate(over="ignore"):
        return bias.astype(dtype)
