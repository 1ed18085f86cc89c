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
from ..cache_format import Cache, Layer, widen
from ..errors import CertkError

Progress = Callable[[str, int, int], None]
"""Told (what is being done, done so far, total)."""
Tell = Callable[[float], None]
"""Told which share of an experiment is done."""
Name = TypeVar("Name", bound=Hashable)

# Prefixes of 32, 64 and 128 real keys are the fewest that a growth law is fitted to.
LEAST_KEYS = 128


@dataclass(frozen=True)
class Settings:
    """`data` is a cache file with real queries, keys and values; `seed` that of all draws.

    `given` says that `data` is somebody's own: what would run a model of its own choice looks at
    these rows instead. `model` is the directory of a model that `data` was captured from, and
    `texts` what it is to read; `source` says in words where real rows are from.
    """

    data: Path
    brief: bool = False
    seed: int = 0
    given: bool = False
    model: Path | None = None
    texts: tuple[str, ...] = ()
    source: str = ""

    def random(self, *key: int) -> np.random.Generator:
        """Random numbers that depend on the seed and the key alone."""
        return np.random.default_rng([self.seed, *key])


class Experiment(Protocol):
    """A module of this package."""

    NAME: str
    TITLE: str
    ABOUT: str
    NEEDS: tuple[str, ...]
    """Modules beyond NumPy and matplotlib without which it cannot run, unless rows are given."""

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
    """Real attention of one head: queries (m, d), keys and values (n, d), and how far a query sees.

    Query i sees the first `visible[i]` keys. Its scores (m, n), in natural-log units, are -inf
    beyond.
    """

    layer: int
    head: int
    scores: NDArray[np.float64]
    values: NDArray[np.float64]
    queries: NDArray[np.float64]
    keys: NDArray[np.float64]
    scale: float
    visible: NDArray[np.int64]


def check_data(path: Path) -> None:
    """Raise `CertkError` unless the experiments can use this cache."""
    with Cache(path) as cache:
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
        for layer in cache.layers:
            most = int(_visible(cache, layer).max())
            if most < LEAST_KEYS:
                raise CertkError(
                    f"{path} is causal, and no query of layer {layer.index} sees more than {most} "
                    f"keys: the experiments need at least {LEAST_KEYS}"
                )
        cache.check_values(lambda _: None)


def _visible(cache: Cache, layer: Layer) -> NDArray[np.int64]:
    """How many keys each query of a layer sees."""
    if cache.causal_offset is None:
        return np.full(layer.m, layer.n)
    return np.clip(np.arange(layer.m) + cache.causal_offset + 1, 0, layer.n)


def chosen(
    cache: Cache,
    layer: Layer,
    rows: int,
    n: int | None = None,
    rng: np.random.Generator | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """At most so many queries of a layer, and how many keys each sees.

    Without `n` the last queries, each with all keys that it sees; with a generator, queries drawn
    at random if each sees all keys. With `n` only the first n keys are looked at, by queries that
    see all of them: the last ones, or in a causal cache the first that do, so that they see few
    keys more, as if the context ended there.
    """
    visible = _visible(cache, layer)
    causal = cache.causal_offset is not None
    # Short contexts have late queries, too.
    able = np.flatnonzero(visible >= (min(LEAST_KEYS, layer.n * 3 // 4) if n is None else n))
    if rng is not None and not causal and n is None:
        some = np.sort(rng.choice(able, min(rows, len(able)), replace=False))
    else:
        some = able[:rows] if causal and n is not None else able[-rows:]
    return some, visible[some] if n is None else np.full(len(some), n)


def prefix_limit(path: Path, rows: int) -> int:
    """The longest prefix of the keys that so many queries of each layer see, or all there are."""
    with Cache(path) as cache:
        return min(int(_visible(cache, layer)[-rows:].min()) for layer in cache.layers)


def real_heads(
    path: Path, rows: int, n: int | None = None, rng: np.random.Generator | None = None
) -> list[Head]:
    """Every head of a cache that `check_data` accepts, with queries as `chosen`."""
    heads = []
    with Cache(path) as cache:
        for layer in cache.layers:
            values = widen(cache.read(layer, "value"), layer.dtypes["value"])
            group, scale = layer.heads // layer.kv_heads, cache.scales[layer.index]
            some, visible = chosen(cache, layer, rows, n, rng)
            for head, queries, keys in cache.heads(layer):
                q, k, v = queries[some], keys[:n], values[head // group][:n]
                scores = q @ k.T * scale
                scores[np.arange(len(k)) >= visible[:, None]] = -np.inf
                heads.append(Head(layer.index, head, scores, v, q, k, scale, visible))
    return heads


def described(settings: Settings, prefixes: bool) -> str:
    """Where the real rows of an experiment are from, and what of them it looks at."""
    with Cache(settings.data) as cache:
        first = cache.layers[0]
        causal = cache.causal_offset is not None
        heads = sorted({layer.heads for layer in cache.layers})
        of = f"{len(cache.layers)} layers, {heads[0]}" + (
            f" to {heads[-1]} heads each" if len(heads) > 1 else " heads each"
        )
    how, warning = "each query sees all keys", ""
    if causal and prefixes:
        how = (
            "causal: a prefix is the first n keys, looked at by the first queries that see them all"
        )
    elif causal:
        how = "causal: each query sees its own prefix, and late queries are looked at"
    elif prefixes:
        how += ", and a prefix is the first n keys, looked at by queries of the end"
        warning = " An encoder that reads n tokens alone would have other rows."
    if prefixes and settings.given and settings.model is None:
        warning += (
            " A file does not say whether its keys are of one context: keys of several windows "
            "side by side are no long context, since no model has read them together, and how k "
            "grows over them says little."
        )
    return (
        f"Real rows are from {settings.source or settings.data.name} ({of}, d = {first.d}, n = "
        f"{first.n}); {how}.{warning}"
    )


def standard_error(values: Any) -> float:
    """Of the mean of independent values; 0 of a single one, which says nothing."""
    spread = np.asarray(values, dtype=np.float64)
    return float(spread.std(ddof=1) / np.sqrt(spread.size)) if spread.size > 1 else 0.0


def bars(axis: Any, x: Any, rows: Sequence[Mapping[str, Any]], what: str, **style: Any) -> None:
    """Plot a number of each row against x, with its interval, the number `what`_error each way."""
    y, spread = [row[what] for row in rows], [row[f"{what}_error"] for row in rows]
    axis.errorbar(x, y, spread, **{"marker": "o", "ms": 3, "capsize": 2, "lw": 1.2} | style)


def require_at_most(what: str, small: Any, large: Any, slack: float = 1e-9) -> None:
    """Raise `CertkError` unless a bound is on the side that it claims, but for rounding.

    `small` and `large` are arrays that broadcast; `slack` is relative, of the larger in size.
    """
    small, large = np.broadcast_arrays(
        np.asarray(small, dtype=np.float64), np.asarray(large, dtype=np.float64)
    )
    room = slack * np.maximum(np.abs(small), np.abs(large))
    # Infinities stand for themselves, and make no room.
    wrong = ~(small <= large + np.where(np.isfinite(room), room, 0.0))
    if wrong.any():
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise CertkError(
            f"{what} is broken in {int(wrong.sum())} of {wrong.size} cases (first: "
            f"{small[place]:.17g} is above {large[place]:.17g}): that is a fault of certk_rs; "
            "please report it"
        )


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
