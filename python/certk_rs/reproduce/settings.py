"""What all experiments share: their form, their settings, and real rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .._page import Table
from ..cache_format import Cache, widen
from ..errors import CertkError

Progress = Callable[[str, int, int], None]
"""Told (what is being done, done so far, total)."""
Tell = Callable[[float], None]
"""Told which share of an experiment is done."""


# Random subsets of 32, 64 and 128 real keys are the fewest that a growth law is fitted to.
LEAST_KEYS = 128


@dataclass(frozen=True)
class Settings:
    """`data` is a cache file with real queries, keys and values; `seed` that of all draws."""

    data: Path
    brief: bool = False
    seed: int = 0

    def random(self, *key: int) -> np.random.Generator:
        """Random numbers that depend on the seed and the key alone."""
        return np.random.default_rng([self.seed, *key])


class Experiment(Protocol):
    """A module of this package."""

    NAME: str
    TITLE: str
    ABOUT: str
    NEEDS: tuple[str, ...]
    """Modules beyond NumPy and matplotlib without which it cannot run."""

    def run(self, settings: Settings, tell: Tell, /) -> dict[str, Any]:
        """Measure."""

    def plots(self, data: dict[str, Any], /) -> list[str]:
        """Draw."""

    def tables(self, data: dict[str, Any], /) -> Sequence[Table]:
        """List."""


@dataclass(frozen=True)
class Head:
    """Real attention of one head: scores (m, n) in natural-log units, and values (n, d)."""

    layer: int
    head: int
    scores: NDArray[np.float64]
    values: NDArray[np.float64]
    queries: NDArray[np.float64]
    keys: NDArray[np.float64]
    scale: float


def check_data(path: Path) -> None:
    """Raise `CertkError` unless the experiments can use this cache."""
    with Cache(path) as cache:
        if cache.causal_offset is not None:
            raise CertkError(f"{path} is causal: the experiments need queries that see all keys")
        lengths = sorted({layer.n for layer in cache.layers})
        if len(lengths) > 1:
            raise CertkError(
                f"{path} has layers of {lengths[0]} and of {lengths[-1]} keys: the experiments "
                "need as many in each"
            )
        if lengths[0] < LEAST_KEYS:
            raise CertkError(
                f"{path} has {lengths[0]} keys: the experiments need at least {LEAST_KEYS}"
            )
        cache.check_values(lambda _: None)


def real_heads(path: Path, rows: int) -> list[Head]:
    """Every head of a cache that `check_data` accepts, with at most so many of its last queries."""
    heads = []
    with Cache(path) as cache:
        for layer in cache.layers:
            values = widen(cache.read(layer, "value"), layer.dtypes["value"])
            group, scale = layer.heads // layer.kv_heads, cache.scales[layer.index]
            for head, queries, keys in cache.heads(layer):
                some, value = queries[-rows:], values[head // group]
                scores = some @ keys.T * scale
                heads.append(Head(layer.index, head, scores, value, some, keys, scale))
    return heads


def mean(values: Any) -> float:
    """A mean as a plain number."""
    return float(np.mean(values))
