"""Needs of the same head in many caches: mean, quantiles, and the file where they are largest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .analyze_cache import ADVICE, CacheAnalysis, counted

QUANTILES = (0.1, 0.5, 0.9)


@dataclass(frozen=True)
class Spread:
    """The spread of a number over files (of a layer: over its heads in all files)."""

    mean: float
    quantiles: tuple[float, ...]
    """At `QUANTILES`, with linear interpolation between neighbours."""
    worst: float
    """The largest."""
    worst_in: str
    """The file that it is in, the first of them: its name, or its path where others have that."""


@dataclass(frozen=True)
class Together:
    """One head of one layer (head None: all of the layer; layer None: everything), in all files."""

    layer: int | None
    head: int | None
    files: int
    sigma: Spread
    """Standard deviation of the scores of a row."""
    kept: tuple[Spread, ...]
    """Share of the keys that a row needs on its own, by budget."""
    shared: Spread
    """Share that one set for all rows takes, at the main budget."""
    advice: tuple[tuple[str, int], ...]
    """Advice that is given, and to how many heads."""

    def advised(self) -> str:
        """Return the advice in words."""
        return counted(dict(self.advice), ADVICE)


@dataclass(frozen=True)
class Aggregate:
    """All files together. `main` is the position in `eps` of the main budget."""

    eps: tuple[float, ...]
    main: int
    files: int
    heads: tuple[Together, ...]
    layers: tuple[Together, ...]
    all: Together | None
    """None if there is no file."""


class Numbers:
    """The few numbers of each head of each file that an aggregate is made of, as flat arrays.

    About a hundred bytes a head: details of a thousand files need not be in memory for it.
    """

    def __init__(self) -> None:
        self._files: list[tuple[str, str]] = []
        self._places: list[NDArray[np.int64]] = []
        self._values: list[NDArray[np.float64]] = []
        self._advice: list[NDArray[np.int64]] = []

    def add(self, found: CacheAnalysis) -> None:
        """Take those of one file."""
        file = len(self._files)
        self._files.append((found.name, found.path))
        heads = found.heads
        self._places.append(np.array([[h.layer, h.head, file] for h in heads], np.int64))
        self._values.append(np.array([[h.sigma, h.shared, *h.kept] for h in heads]))
        self._advice.append(np.array([ADVICE.index(h.advice) for h in heads], np.int64))

    def aggregate(self, eps: tuple[float, ...], main: int) -> Aggregate:
        """Return the aggregate of all files."""
        if not self._files:
            return Aggregate(eps, main, 0, (), (), None)
        places = np.concatenate(self._places)
        times = Counter(name for name, _ in self._files)
        names = [name if times[name] == 1 else path for name, path in self._files]
        table = _Table(names, places, np.concatenate(self._values))
        table.advice = np.concatenate(self._advice)
        return Aggregate(
            eps,
            main,
            len(names),
            tuple(table.groups(2)),
            tuple(table.groups(1)),
            next(table.groups(0)),
        )


class _Table:
    """A row per head and file, and groups of them."""

    advice: NDArray[np.int64]

    def __init__(
        self, names: Sequence[str], places: NDArray[np.int64], values: NDArray[np.float64]
    ) -> None:
        self._names, self._places, self._values = names, places, values

    def groups(self, axes: int) -> Iterator[Together]:
        """Group by layer and head (axes 2), by layer (1), or not at all (0)."""
        keys = self._places[:, :axes]
        order = np.lexsort(keys.T[::-1]) if axes else np.arange(len(keys))
        ordered = keys[order]
        starts = np.flatnonzero(np.r_[True, (ordered[1:] != ordered[:-1]).any(axis=1)])
        for rows in np.split(order, starts[1:]):
            rows = np.sort(rows)
            layer, head = [*map(int, self._places[rows[0], :axes]), None, None][:2]
            sigma, shared, *kept = (self._spread(rows, i) for i in range(self._values.shape[1]))
            given = Counter(self.advice[rows].tolist())
            yield Together(
                layer,
                head,
                len(np.unique(self._places[rows, 2])),
                sigma,
                tuple(kept),
                shared,
                tuple((word, given[i]) for i, word in enumerate(ADVICE) if given[i]),
            )

    def _spread(self, rows: NDArray[np.int64], column: int) -> Spread:
        values = self._values[rows, column]
        worst = int(values.argmax())
        return Spread(
            float(values.mean()),
            tuple(np.quantile(values, QUANTILES).tolist()),
            float(values[worst]),
            self._names[self._places[rows[worst], 2]],
        )


def aggregate_json(found: Aggregate) -> dict[str, Any]:
    """Return the aggregate as a JSON object."""
    return {
        "files": found.files,
        "eps": list(found.eps),
        "main_eps": found.eps[found.main],
        "quantiles": list(QUANTILES),
        "all": None if found.all is None else _json(found.all),
        "layers": [_json(each) for each in found.layers],
        "heads": [_json(each) for each in found.heads],
    }


def _json(each: Together) -> dict[str, Any]:
    return {
        "layer": each.layer,
        "head": each.head,
        "files": each.files,
        "sigma": vars(each.sigma),
        "kept": [vars(spread) for spread in each.kept],
        "shared": vars(each.shared),
        "advice": dict(each.advice),
    }
