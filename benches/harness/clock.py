"""Times several works side by side: alternating, at random alignment, medians of repetitions."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from .levels import level, named
from .rows import Array, Rng

Work = Callable[[], object]
Bind = Callable[[Array], Work]

PAGE = 4096
SHORTEST = 1e-3  # seconds; shorter works are called several times per reading
LEAST_REPEAT = 7


@dataclass(frozen=True, eq=False)
class Entrant:
    """One work: what it reads, and how many scores a run is charged for.

    `bind` takes the array at its place in memory, outside the time that counts. Entrants with
    the same `rows` object read the same memory. `take` is how many of the rows this one gets.
    `level` is an instruction level of certk_rs that is forced meanwhile.
    """

    name: str
    rows: Array
    bind: Bind
    take: int
    scores: float
    level: str | None = None

    @staticmethod
    def of(name: str, rows: Array, bind: Bind, most: int | None = None) -> Entrant:
        """An entrant for (rows, n) scores that gets at most `most` scores, in whole rows."""
        total, n = rows.shape
        take = total if most is None else min(total, max(most // n, 1))
        return Entrant(name, rows, bind, take, take * n)

    def at(self, name: str) -> Entrant:
        """The same at a level."""
        return replace(self, name=named(self.name, name), level=name)


class Arena:
    """Memory that has been touched, in which an array is put at a random place of a page."""

    def __init__(self, nbytes: int) -> None:
        """Room for `nbytes` at any offset below a page."""
        self._bytes = np.ones(nbytes + PAGE, dtype=np.uint8)

    def view(self, rng: Rng, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """Uninitialised array, aligned to its item size and to nothing else."""
        size = int(np.prod(shape)) * dtype.itemsize
        start = -self._bytes.ctypes.data % dtype.itemsize
        start += int(rng.integers(0, PAGE // dtype.itemsize)) * dtype.itemsize
        start = min(start, self._bytes.size - size)
        return self._bytes[start : start + size].view(dtype).reshape(shape)

    def put(self, rng: Rng, array: Array) -> Array:
        """A copy of the array somewhere in here; the copy before it is gone."""
        placed = self.view(rng, array.shape, array.dtype)
        placed[...] = array
        return placed


def seconds(work: Work, calls: int) -> float:
    """Seconds of one call, the mean of `calls` in a row."""
    start = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - start) / calls


class Times:
    """Readings of each entrant, one per repetition: ns per score, or ms of a whole work."""

    def __init__(self, readings: dict[str, list[float]]) -> None:
        """Readings of the same repetition stand at the same place of every list."""
        self.readings = readings

    def median(self, name: str) -> float:
        """Return the median reading."""
        return statistics.median(self.readings[name])

    def ratio(self, ours: str, peer: str) -> tuple[float, float, float]:
        """Ratio of the medians, and the quartiles of the ratios within a repetition."""
        pairs = zip(self.readings[ours], self.readings[peer], strict=True)
        low, _, high = statistics.quantiles((one / other for one, other in pairs), n=4)
        return self.median(ours) / self.median(peer), low, high

    def lower(self, ours: str, peer: str) -> float | None:
        """Ratio of the medians at the second level, where ours was measured there, too."""
        if named(ours) not in self.readings:
            return None
        other = named(peer) if named(peer) in self.readings else peer
        return self.median(named(ours)) / self.median(other)


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage meanwhile."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def in_turn(works: Mapping[str, Work], repeat: int) -> Times:
    """Time all works once per repetition, in an order drawn anew; the first one warms up."""
    rng = np.random.default_rng(0)
    names = list(works)
    readings: dict[str, list[float]] = {name: [] for name in names}
    with uncollected():
        for repetition in range(-1, max(repeat, LEAST_REPEAT)):
            for at in rng.permutation(len(names)):
                spent = seconds(works[names[at]], 1) * 1e3
                if repetition >= 0:
                    readings[names[at]].append(spent)
    return Times(readings)


def contest(entrants: Sequence[Entrant], repeat: int, *, rest: float = 0.0, seed: int = 0) -> Times:
    """Time all entrants once per repetition, in an order drawn anew each time.

    A repetition before the first warms up and finds how often short works must be called. `rest`
    seconds pass before each reading, for worker threads that spin a while when their work is done.
    """
    rng = np.random.default_rng(seed)
    arenas = {id(entrant.rows): Arena(entrant.rows.nbytes) for entrant in entrants}
    calls: dict[str, int] = {}
    readings: dict[str, list[float]] = {entrant.name: [] for entrant in entrants}
    if len(readings) != len(entrants):
        raise ValueError("two entrants of one name")
    with uncollected():
        for repetition in range(-1, max(repeat, LEAST_REPEAT)):
            placed = {id(e.rows): e.rows for e in entrants}
            placed = {key: arenas[key].put(rng, rows) for key, rows in placed.items()}
            for at in rng.permutation(len(entrants)):
                entrant = entrants[at]
                work = entrant.bind(placed[id(entrant.rows)][: entrant.take])
                if rest:
                    time.sleep(rest)
                with level(entrant.level):
                    if repetition < 0:
                        once = min(seconds(work, 1), seconds(work, 1))
                        calls[entrant.name] = int(min(max(SHORTEST / once, 1), 10_000))
                    else:
                        spent = seconds(work, calls[entrant.name])
                        readings[entrant.name].append(spent / entrant.scores * 1e9)
    return Times(readings)
