"""What all experiments share: their form, their settings, real rows, and a clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from .._display.page import Table
from ..cache_format import Cache, widen
from ..errors import CertkError

Progress = Callable[[str, int, int], None]
"""Told (what is being done, done so far, total)."""
Tell = Callable[[float], None]
"""Told which share of an experiment is done."""
Name = TypeVar("Name", bound=Hashable)

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
        """Measure.

        The same settings give the same data, except what is under "timing": a dictionary whose own
        "seen" has the sentences on it.
        """

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


def lengths_up_to(n: int, brief: bool) -> list[int]:
    """Lengths at which prefixes of n real keys are looked at; a brief run leaves out most."""
    if brief:
        return sorted({min(n, length) for length in (128, 512, 2048)})
    # Few of the long ones, which take longest.
    return sorted({n, *(1 << b for b in range(7, n.bit_length(), 1 if n <= 2048 else 3))})


def medians(works: Mapping[Name, Callable[[], object]], repeat: int) -> dict[Name, float]:
    """Median seconds of each work over repetitions in which all take turns; warm them up before.

    What slows a machine down for a while so slows all of them; only their ratios mean anything.
    """
    times: dict[Name, list[float]] = {name: [] for name in works}
    for _ in range(repeat):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(spent) for name, spent in times.items()}


def mean(values: Any) -> float:
    """A mean as a plain number."""
    return float(np.mean(values))
