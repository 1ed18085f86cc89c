"""Parts that the experiments share: settings, real rows, verdicts, tables, plots and a clock.

Units of scores are natural logarithms, and intervals are two standard errors.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Array = NDArray[Any]
Rows = list[dict[str, Any]]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "python" / "certk_rs" / "_data" / "minilm_small.safetensors"
SOURCE = "the example cache (all-MiniLM-L6-v2, 512 tokens of a licence)"


@dataclass(frozen=True)
class Settings:
    """Sizes and seeds of a run; `model` is the directory of an encoder for the BERT table."""

    quick: bool = False
    seed: int = 0
    model: Path | None = None

    def random(self, *key: int) -> np.random.Generator:
        """Return random numbers that depend on the seed and the key alone."""
        return np.random.default_rng([self.seed, *key])


@dataclass(frozen=True)
class Verdict:
    """One claim, the outcome in figures, and whether the claim holds by them."""

    claim: str
    outcome: str
    holds: bool


@dataclass(frozen=True)
class Table:
    """Column heads and rows of cells."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """Return the table as Markdown."""
        lines = [self.heads, ["---"] * len(self.heads), *self.rows]
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"{self.caption}\n\n{body}\n"


class Experiment(Protocol):
    """A module of this package."""

    NAME: str
    ABOUT: str

    def run(self, settings: Settings, /) -> dict[str, Any]:
        """Measure; the same settings give the same data, but for times under "timing"."""

    def verdicts(self, data: dict[str, Any], /) -> list[Verdict]:
        """Judge the claims by the data of a run."""

    def tables(self, data: dict[str, Any], /) -> list[Table]:
        """Return the data as tables."""

    def draw(self, data: dict[str, Any], /) -> Any:
        """Return a figure of matplotlib."""


def table_of(caption: str, heads: str, cells: str, rows: Iterable[Mapping[str, Any]]) -> Table:
    """Return a table of named numbers; heads and formats of cells stand between " | "."""
    forms = cells.split(" | ")
    shown = [[form.format_map(row) for form in forms] for row in rows]
    return Table(caption, heads.split(" | "), shown)


def lines(
    axis: Any, rows: Rows, by: str, x: str, y: str, title: str = "", log: str = "x", **style: Any
) -> None:
    """Plot y against x, a line for each value of `by`, with intervals where rows have `y`_error."""
    for name in dict.fromkeys(row[by] for row in rows):
        some = [row for row in rows if row[by] == name]
        spread = [row.get(f"{y}_error", 0.0) for row in some]
        axis.errorbar(
            [row[x] for row in some], [row[y] for row in some], spread, label=str(name),
            **{"marker": "o", "ms": 3, "capsize": 2, "lw": 1.2} | style,
        )  # fmt: skip
    axis.set(title=title, xlabel=x, ylabel=y)
    if "x" in log:
        axis.set_xscale("log")
    if "y" in log:
        axis.set_yscale("log")


def panels(count: int, **options: Any) -> Any:
    """Return a figure and a row of so many axes."""
    plt.rcParams.update({"font.size": 9, "axes.titlesize": 9})
    size = (4.4 * count, 3.4)
    return plt.subplots(1, count, figsize=size, layout="constrained", **options)


def legend(figure: Any, axis: Any) -> Any:
    """Put the legend of an axis below the whole figure, and return the figure."""
    handles = axis.get_legend_handles_labels()
    figure.legend(*handles, frameon=False, fontsize=8, loc="outside lower center", ncols=4)
    return figure


@dataclass(frozen=True)
class Head:
    """Real attention of one head.

    Queries are (m, d), keys and values (n, d), and scores (m, n), all in float64.
    """

    layer: int
    head: int
    queries: Array
    keys: Array
    values: Array
    scale: float

    @property
    def scores(self) -> Array:
        """Scores in natural-log units, (m, n)."""
        return np.asarray(self.queries @ self.keys.T * self.scale)


def heads_of(path: Path, rows: int, n: int | None = None) -> list[Head]:
    """Return every head of a cache of an encoder: its first n keys and its last queries.

    Raises:
        SystemExit: The cache has heads that share keys, as decoders do.
    """
    tensors = load_file(path)
    found = []
    for layer in range(sum(name.endswith(".key") for name in tensors)):
        query, key, value = (
            _plain(tensors[f"layers.{layer}.{role}"]) for role in ("query", "key", "value")
        )
        if len(query) != len(key):
            raise SystemExit(f"{path}: layer {layer} shares keys among heads: give an encoder")
        parts = zip(query, key, value, strict=True)
        scale = query.shape[-1] ** -0.5
        found += [
            Head(layer, head, q[-rows:], k[:n], v[:n], scale)
            for head, (q, k, v) in enumerate(parts)
        ]
    return found


def _plain(tensor: Array) -> Array:
    """Return (heads, n, d) in float64, of a tensor with or without an axis for one sequence."""
    return np.asarray(tensor, np.float64).reshape(tensor.shape[-3:])


@cache
def real_heads(rows: int, n: int | None = None) -> tuple[Head, ...]:
    """Return the heads of the example cache."""
    return tuple(heads_of(EXAMPLE, rows, n))


def mean(values: Any) -> float:
    """Return a mean as a plain number."""
    return float(np.mean(values))


def interval(values: Any) -> float:
    """Return two standard errors of the mean of independent values; 0 of a single one."""
    spread = np.asarray(values, dtype=np.float64)
    return float(2 * spread.std(ddof=1) / np.sqrt(spread.size)) if spread.size > 1 else 0.0


def summed(found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the means of named numbers over repetitions, each with its interval `name_error`."""
    means = {}
    for name in found[0]:
        values = [each[name] for each in found]
        means[name], means[f"{name}_error"] = mean(values), interval(values)
    return means


def require_at_most(what: str, small: Any, large: Any, slack: float = 1e-9) -> None:
    """End the run unless a bound is on the side that it claims, but for rounding.

    Args:
        what: Name of the bound, for the message.
        small: Numbers that must not be above `large`; both broadcast.
        large: The bound.
        slack: Room for rounding, relative to the larger in size.

    Raises:
        SystemExit: The bound is broken, which is a fault of certk_rs.
    """
    small, large = np.broadcast_arrays(np.asarray(small, float), np.asarray(large, float))
    room = slack * np.maximum(np.abs(small), np.abs(large))
    # Infinities stand for themselves, and make no room.
    wrong = ~(small <= large + np.where(np.isfinite(room), room, 0.0))
    if wrong.any():
        place = tuple(np.argwhere(wrong)[0])
        raise SystemExit(
            f"{what} is broken in {wrong.sum()} of {wrong.size} cases (first: {small[place]:.17g} "
            f"is above {large[place]:.17g}): that is a fault of certk_rs; please report it"
        )


def medians(works: Mapping[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """Return median seconds of each work over repetitions in which all take turns.

    Seconds are those that this thread computes, so that other programs do not count. Only ratios
    mean anything.
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeat):
        for name, work in works.items():
            start = time.thread_time()
            work()
            times[name].append(time.thread_time() - start)
    return {name: statistics.median(spent) for name, spent in times.items()}
