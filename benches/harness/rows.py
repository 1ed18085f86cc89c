"""The rows that are timed: made-up ones of a named distribution, real ones, and hostile ones.

All makers return (rows, n) float32 scores in natural-log units, contiguous.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
F32 = NDArray[np.float32]
Rng = np.random.Generator
Maker = Callable[[Rng, int, int], F32]

EXAMPLES = Path(__file__).resolve().parents[2] / "python" / "certk_rs" / "_data"


def count(n: int, scores: int, least: int = 1) -> int:
    """Return the number of rows of n that hold about `scores` scores."""
    return max(scores // n, least)


def gaussian(rng: Rng, rows: int, n: int, sigma: float = 3.0) -> F32:
    """Independent normal scores."""
    made: F32 = rng.standard_normal((rows, n), dtype=np.float32)
    made *= np.float32(sigma)
    return made


def laplace(rng: Rng, rows: int, n: int, scale: float = 1.5) -> F32:
    """Exponential tails: above scale 1 the largest few keys carry much of the mass."""
    return rng.laplace(0.0, scale, (rows, n)).astype(np.float32)


def student(rng: Rng, rows: int, n: int, nu: float = 3.0) -> F32:
    """Power-law tails; the largest score is usually alone."""
    return rng.standard_t(nu, (rows, n)).astype(np.float32)


def products(
    rng: Rng, rows: int, n: int, d: int = 32, sigma: float = 3.0, alike: float = 0.0
) -> F32:
    """Queries times keys, both normal, of d dimensions: rows that share their keys.

    `alike` is the part of a query's variance that is a mean of all: the rows' correlation.
    """
    query = rng.standard_normal((rows, d)) * (1 - alike) ** 0.5
    query = sigma * (query + rng.standard_normal(d) * alike**0.5)
    key = rng.standard_normal((n, d))
    scores: F32 = (query @ key.T / np.sqrt(d)).astype(np.float32)
    return scores


def _heads(path: Path) -> list[F32]:
    """q.k / sqrt(d) of every head of a cache file, each (queries, n); float64 rounded once."""
    from safetensors.numpy import load_file

    tensors = load_file(path)
    found: list[F32] = []
    for name in sorted(tensors):
        if name.endswith(".key"):
            key = tensors[name].astype(np.float64)
            query = tensors[name.removesuffix("key") + "query"].astype(np.float64)
            scores = query @ np.swapaxes(key, -1, -2) / np.sqrt(query.shape[-1])
            found.extend(scores.reshape(-1, *scores.shape[-2:]).astype(np.float32))
    return found


def real() -> F32:
    """The 768 real rows of `examples/data`: 24 heads, 32 queries each, n = 512, no mask."""
    return np.concatenate(_heads(EXAMPLES / "minilm_small.safetensors"))


def real_joined(queries: int) -> F32:
    """The same scores, those of `queries` queries of one head put end to end: n = 512 queries.

    No row of a model: the values are real, and so is their mixture of scales, but a model would
    not normalise them together.
    """
    return real().reshape(-1, 512 * queries)


def real_long() -> F32 | None:
    """64 queries against 65536 real keys in four layers, where CERTK_DATA names their folder.

    The keys are those of 128 windows of 512 tokens side by side, the queries of one of them.
    """
    folder = os.environ.get("CERTK_DATA")
    path = Path(folder or "") / "minilm_n65536.safetensors"
    return np.concatenate(_heads(path)) if folder and path.exists() else None


def _shuffled(rng: Rng, rows: int, values: Array) -> F32:
    return rng.permuted(np.tile(values, (rows, 1)), axis=1).astype(np.float32)


def _spike(rng: Rng, rows: int, n: int) -> F32:
    made = gaussian(rng, rows, n, 1.0)
    made[np.arange(rows), rng.integers(0, n, rows)] = 60.0
    return made


def _masked(rng: Rng, rows: int, n: int) -> F32:
    made = gaussian(rng, rows, n)
    hidden = rng.random((rows, n)) < 0.99
    hidden[:, 0] = False  # a row without visible keys is EMPTY and costs nothing
    made[hidden] = -np.inf
    return made


# Masses that a quantile guess, a histogram or a sample is likely to misjudge.
HOSTILE: dict[str, Maker] = {
    "all equal": lambda rng, rows, n: np.full((rows, n), 1.25, dtype=np.float32),
    "two levels, 5 apart": lambda rng, rows, n: np.where(
        rng.random((rows, n)) < 0.5, np.float32(5.0), np.float32(0.0)
    ),
    "one spike": _spike,
    "geometric, half per 8": lambda rng, rows, n: _shuffled(
        rng, rows, np.arange(n) * (-np.log(2.0) / 8.0)
    ),
    "geometric, e^-20 in all": lambda rng, rows, n: _shuffled(
        rng, rows, np.arange(n) * (-20.0 / n)
    ),
    "ascending": lambda rng, rows, n: np.sort(gaussian(rng, rows, n), axis=1),
    "descending": lambda rng, rows, n: np.ascontiguousarray(
        np.sort(gaussian(rng, rows, n), axis=1)[:, ::-1]
    ),
    "99 % masked by -inf": _masked,
    "ties, steps of 1": lambda rng, rows, n: np.round(gaussian(rng, rows, n)),
}
