"""Keys, values and later queries that are made to hurt, and what is true of them.

The truth is computed in float64 with a bound on its own rounding; a comparison that lies within it
is made again in long double, and one that lies within that with Arb.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
from flint import arb, fmpq

from certk_rs.guard import others
from real_rows import read_cache
from repository import EXAMPLE

Rng = np.random.Generator
DTYPES: tuple[Any, ...] = (np.float32, np.float16, ml_dtypes.bfloat16)
OF_A_SET = 4_000


@dataclass
class Case:
    """Keys of one kv head, which of them are kept, values, and queries, all as they are stored."""

    name: str
    keys: np.ndarray
    values: np.ndarray
    kept: np.ndarray
    queries: np.ndarray


def made_keys(rng: Rng, kind: int, n: int, d: int) -> np.ndarray:
    keys = rng.standard_normal((n, d))
    if kind == 1:
        keys = keys + 15 * rng.standard_normal(d)
    elif kind == 2:
        keys[rng.integers(n, size=3)] *= 80
    elif kind == 3:
        keys[:, 0] *= 40
    elif kind == 4:
        keys = keys[rng.integers(min(n, 5), size=n)] + 1e-3 * keys
    elif kind == 5:
        keys *= 10.0 ** rng.integers(-6, 4)
    elif kind == 6:
        keys = np.round(keys)
    return np.asarray(keys)


def made_queries(rng: Rng, keys: np.ndarray, gone: np.ndarray, count: int) -> np.ndarray:
    """Random ones and ones that look for what a code may have missed, of all sizes."""
    d, size = keys.shape[1], max(1e-30, float(np.sqrt(np.square(keys).sum(1).mean())))
    found = rng.standard_normal((count, d))
    one, two = keys[rng.choice(gone, (2, count))]
    kind = rng.integers(6, size=count)
    found[kind == 1] = one[kind == 1]
    found[kind == 2] = (one - keys.mean(0))[kind == 2]
    found[kind == 3] = (one - two)[kind == 3]
    found[kind == 4] = -(keys[gone].mean(0) + 0.1 * found * size)[kind == 4]
    found[kind == 5] = np.eye(d)[rng.integers(d, size=count)][kind == 5]
    length = np.sqrt(np.square(found).sum(1, keepdims=True))
    # In nats, a score of a typical key then is of this size.
    reach = rng.choice([0.0, 0.1, 1.0, 4.0, 12.0, 40.0, 300.0], (count, 1)) * d**0.5
    return np.asarray(found / np.maximum(length, 1e-300) * reach / size)


def cases(queries: int) -> Iterator[Case]:
    rng = np.random.default_rng(19)
    cache = read_cache(EXAMPLE)
    real = [(i, head) for i in range(6) for head in range(4)]
    for at in range(queries // OF_A_SET):
        dtype = DTYPES[at % 3]
        if at % 10 == 9:
            i, head = real[at // 10 % len(real)]
            keys, values, queries = (
                cache[f"layers.{i}.{role}"][0, head] for role in ("key", "value", "query")
            )
            m = len(queries) // 2
            weights = np.exp(queries[:m] @ keys.T * 32**-0.5)
            often = (weights / weights.sum(1, keepdims=True)).max(0)
            kept = np.sort(np.argsort(-often)[: int(rng.integers(16, 300))])
            # The other half of the text, as it is and as a sharper head would ask.
            sharp = rng.choice([1.0, 1.0, 2.0, 5.0], (OF_A_SET, 1))
            queries = queries[m + rng.integers(m, size=OF_A_SET)] * sharp
            name = f"real {i}.{head}"
        else:
            n, d, kind = int(rng.integers(2, 120)), int(rng.choice([1, 4, 16, 20, 64])), at % 7
            keys, values = made_keys(rng, kind, n, d), rng.standard_normal((n, 3))
            kept = np.flatnonzero(rng.random(n) < rng.choice([0.0, 0.3, 0.7]))
            kept = kept[: n - 1]
            queries = made_queries(rng, keys.astype(dtype).astype(float), others(kept, n), OF_A_SET)
            name = f"{at}: {n} keys of {d}, kind {kind}"
        with np.errstate(over="ignore"):
            stored = keys.astype(dtype), values.astype(dtype), queries.astype(dtype)
        fine = np.isfinite(stored[2].astype(float)).all(1)
        stored[2][~fine] = 0
        yield Case(name, stored[0], stored[1], kept, stored[2])


class Truth:
    """Shares of keys, each with a bound on how far its floats may be off, relatively."""

    def __init__(self, queries: np.ndarray, keys: np.ndarray, kind: Any = np.float64) -> None:
        self.q, self.k, self.kind = queries, keys, kind
        q, k = (x.astype(np.float64).astype(kind) for x in (queries, keys))
        (n, d), unit = k.shape, float(np.finfo(kind).eps)
        self.scale = d**-0.5
        scores = q @ k.T * kind(self.scale)
        top = scores.max(1, keepdims=True)
        self.weights = np.exp(scores - top)
        self.top = top[:, 0]
        # A product of a pair rounds, relatively to the sum of absolute values, as does its
        # distance from the top; twice, since a share is a quotient.
        reach = np.abs(queries.astype(float)) @ np.abs(keys.astype(float)).T * self.scale
        rounding = (2 * d + 8) * reach.max(1) + np.asarray(top[:, 0] - scores.min(1), float)
        self.slack = unit * (2 * rounding + 2 * n + 16)

    def log_mass(self, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ends of what some keys weigh."""
        with np.errstate(divide="ignore"):
            log = np.log(self.weights[:, which].sum(1)) + self.top
        wide = self.slack + 2.0**-40 + np.abs(np.where(np.isfinite(log), log, 0)) * 2.0**-48
        return log - wide, log + wide

    def share(self, gone: np.ndarray) -> np.ndarray:
        """That of the keys (n,) or (rows, n) in the whole softmax."""
        return np.asarray((self.weights * gone).sum(1) / self.weights.sum(1))

    def exceeds(self, gone: np.ndarray, upper: np.ndarray) -> list[int]:
        """Rows where the share of these keys is more than `upper`, in real numbers."""
        share = self.share(gone)
        gone = np.broadcast_to(gone, self.weights.shape)
        # Where no key is gone the share is 0, and none is above 1.
        open_ = (share * (1 + self.slack) + 1e-300 > upper) & gone.any(axis=1) & (upper < 1)
        open_ = np.flatnonzero(open_)
        if self.kind is np.float64:
            again = Truth(self.q[open_], self.k, np.longdouble)
            return open_[again.exceeds(gone[open_], upper[open_])].tolist()
        return [int(row) for row in open_ if self._exactly(row, gone[row], upper[row])]

    def _exactly(self, row: int, gone: np.ndarray, upper: float) -> bool:
        q, k = (x.astype(np.float64).tolist() for x in (self.q[row], self.k))
        products = [sum(map(Fraction.__mul__, map(Fraction, q), map(Fraction, x))) for x in k]
        top = max(products)
        weights = [
            arb(fmpq(x.numerator, x.denominator)).exp()
            for x in ((product - top) * Fraction(self.scale) for product in products)
        ]
        zero = arb(0)
        tail = sum((w for w, out in zip(weights, gone, strict=True) if out), zero)
        return bool(tail > arb(float(upper)) * sum(weights, zero))
