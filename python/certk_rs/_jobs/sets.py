"""The records of a prune job: the kept sets of a layer, one kept set in numbers, and sums of them.

A `LayerRecord` has the arrays of one layer. It is made where sets are chosen, travels between
workers, is written to an output, and is read back from it. A `SetRecord` has the numbers of one
kept set, just found or read from an output, and `Sums` adds up any number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from .._files.certificate import Options
from .._files.layers import Layer
from .held_out import HeldOut

PROMISED, HELD_OUT, LEFT_OUT = 0, 1, 2
KINDS = ("promised", "held_out", "left_out")
"""Kinds of rows. A row that is both held out and left out counts as held out."""


@dataclass(frozen=True, eq=False)
class LayerRecord:
    """The kept sets of G groups of one layer, as they are recorded.

    A group is a kv head, or the whole layer. `heads` below are the query heads of these groups.
    Masses have the dtype of the output and are rounded outward. Rows are numbered head * m + query
    in the layer. What is not known is None.
    """

    layer: Layer
    first_head: int
    """The first kv head of these."""
    sizes: NDArray[np.int64]
    """Keys kept in each group, (G,)."""
    eps: NDArray[np.float64]
    """Budget of each group, (G,)."""
    lower_bounds: NDArray[np.int64] | None
    """Every set within the budget has at least so many keys (or blocks), (G,)."""
    violations: NDArray[np.int64] | None
    """Queries held out that may lose more than the budget, at least and at most, (G, 2)."""
    upper: NDArray[Any] | None
    """Upper ends of the tail masses, (heads, m)."""
    lower: NDArray[Any] | None
    """Lower ends of the tail masses, (heads, m)."""
    worst: NDArray[Any] | None
    """Largest upper end among the promised rows of each query head, (heads,)."""
    over: NDArray[np.int64] | None
    """Promised rows over their budget, (heads,); -1 where the output does not tell."""
    weight_rows: NDArray[np.int64]
    """Rows with a weight in the proof of the lower bound, ascending, (r,)."""
    weights: NDArray[np.float32]
    """Their weights, > 0, (r,)."""
    left_out: NDArray[np.int64]
    """Rows that `coverage` leaves out, ascending."""
    held_out: NDArray[np.int64]
    """Positions of the queries set aside, ascending."""
    indices: NDArray[np.int64] | None = None
    """Positions kept, ascending in each group, one group after the other."""

    @property
    def groups(self) -> list[NDArray[np.int64]]:
        """The positions kept in each group."""
        assert self.indices is not None
        return np.split(self.indices, np.cumsum(self.sizes)[:-1])

    @property
    def heads_of_set(self) -> int:
        """The number of query heads that share a set."""
        return self.layer.heads // len(self.sizes)

    def kinds(self) -> NDArray[np.uint8]:
        """Return the kind of each row of a whole layer, (heads, m), as a number of `KINDS`."""
        kinds = np.zeros((self.layer.heads, self.layer.m), np.uint8)
        kinds.reshape(-1)[self.left_out] = LEFT_OUT
        kinds[:, self.held_out] = HELD_OUT
        return kinds


@dataclass(frozen=True, eq=False)
class Probe:
    """Sizes of the sets of G groups of a layer at several budgets, (G, budgets) each."""

    layer: Layer
    first_head: int
    kept: NDArray[np.int64]
    lower_bounds: NDArray[np.int64]
    """Keys that are proven necessary."""


@dataclass(frozen=True, eq=False)
class Demands:
    """Demands of G groups of a layer for its visible keys."""

    layer: Layer
    first_head: int
    shares: NDArray[np.float64]
    """By key, (G, visible)."""


Answer: TypeAlias = LayerRecord | Probe | Demands
"""The answer of a unit for one of its layers. Arrays have groups, heads or rows first."""

_Part = TypeVar("_Part", bound=Answer)


def joined(parts: Sequence[_Part]) -> _Part:
    """Join the answers for neighbouring groups of one layer, in their order."""
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name, value in vars(parts[0]).items()
        if isinstance(value, np.ndarray) and name != "held_out"  # the same in all
    }
    return replace(parts[0], **arrays) if len(parts) > 1 else parts[0]


@dataclass(frozen=True)
class SetRecord:
    """One kept set in numbers: `head` is its kv head, or -1 for a whole layer.

    What an output does not tell is None. `worst_tail_mass` is the largest upper end of a promised
    row, and `rows` counts the promised ones. `bound_eps` is the budget of the lower bound where it
    is not `eps`. `held_out` is of the queries that the file says were held out, or of another set
    of this group, which was made without some queries and tried on these.
    """

    layer: int
    head: int
    eps: float
    bound_eps: float | None
    kept: int
    total: int
    lower_bound: int | None
    worst_tail_mass: float | None
    rows: int
    rows_over_budget: int | None
    rows_left_out: int
    worst_left_out: float | None
    held_out: HeldOut

    @property
    def gap(self) -> int | None:
        """The most keys that could be saved; None where the bound is of another budget."""
        if self.lower_bound is None or self.bound_eps is not None:
            return None
        return self.kept - self.lower_bound


def fewest_keys(blocks: int, block_size: int, visible: int) -> int:
    """Return the fewest keys that so many blocks hold: all are full but the last of all."""
    return 0 if blocks <= 0 else (blocks - 1) * block_size + (visible - 1) % block_size + 1


def set_records(
    record: LayerRecord,
    options: Options,
    causal_offset: int | None,
    bound_eps: Sequence[float] | None = None,
    held_out: Sequence[HeldOut] | None = None,
) -> list[SetRecord]:
    """Return the sets of a whole layer in numbers.

    Args:
        record: The layer.
        options: Those of the output.
        causal_offset: Query i sees the keys <= i + offset; None: all.
        bound_eps: The budgets of the lower bounds, where they are not those of the sets.
        held_out: What a trial has found of each group; None: what the record says.
    """
    kinds, size, bounds = record.kinds(), record.heads_of_set, record.lower_bounds
    visible = record.layer.visible(causal_offset)
    found = []
    for group, kept in enumerate(record.sizes.tolist()):
        heads = slice(group * size, (group + 1) * size)
        kind = kinds[heads]
        over = None if record.over is None else record.over[heads]
        out = None if record.upper is None else record.upper[heads][kind == LEFT_OUT]
        least = None
        if bounds is not None:
            least = fewest_keys(int(bounds[group]), options.block_size, visible)
        found.append(
            SetRecord(
                layer=record.layer.index,
                head=group if options.granularity == "head" else -1,
                eps=float(record.eps[group]),
                bound_eps=None if bound_eps is None else bound_eps[group],
                kept=kept,
                total=record.layer.n,
                lower_bound=least,
                worst_tail_mass=None if record.worst is None else float(record.worst[heads].max()),
                rows=int(np.count_nonzero(kind == PROMISED)),
                rows_over_budget=None if over is None or (over < 0).any() else int(over.sum()),
                rows_left_out=int(np.count_nonzero(kind == LEFT_OUT)),
                worst_left_out=None if out is None or not out.size else float(out.max()),
                held_out=_held_out(record, group) if held_out is None else held_out[group],
            )
        )
    return found


def _held_out(record: LayerRecord, group: int) -> HeldOut:
    queries = len(record.held_out)
    if not queries or record.violations is None:
        return HeldOut(queries, None if queries else 0)
    least, most = record.violations[group].tolist()
    return HeldOut(queries, least, most)


@dataclass
class Sums:
    """Kept sets added up. What one of them does not tell, the sum does not tell: it is None.

    `held_out_high` is the upper end of the interval of Clopper and Pearson of the set where it is
    largest, and `worst_output` the output of the set that loses most. The fields are those of
    `certk report --json`.
    """

    sets: int = 0
    kept: int = 0
    total: int = 0
    kept_share: float | None = None
    least_kept_share: float | None = None
    most_kept_share: float | None = None
    lower_bound: int | None = 0
    gap: int | None = 0
    worst_tail_mass: float | None = None
    worst_output: str | None = None
    worst_over_eps: float | None = None
    eps_low: float | None = None
    eps_high: float | None = None
    rows: int = 0
    rows_over_budget: int | None = 0
    rows_left_out: int = 0
    worst_left_out: float | None = None
    held_out_queries: int = 0
    held_out_violations_low: int | None = None
    held_out_violations_high: int | None = None
    held_out_high: float | None = None

    @staticmethod
    def of(sets: Iterable[SetRecord]) -> Sums:
        """Return the sums of some sets."""
        sums = Sums()
        for one in sets:
            sums.add(one)
        return sums

    def add(self, one: SetRecord, output: str = "") -> None:
        """Count one more set, of that output."""
        share = one.kept / one.total
        self._take_worst(one.worst_tail_mass, one.eps, output)
        self.sets += 1
        self.kept += one.kept
        self.total += one.total
        self.kept_share = self.kept / self.total
        self.least_kept_share = _known(min, self.least_kept_share, share)
        self.most_kept_share = _known(max, self.most_kept_share, share)
        self.lower_bound = _plus(self.lower_bound, one.lower_bound)
        self.gap = _plus(self.gap, one.gap)
        self.eps_low = _known(min, self.eps_low, one.eps)
        self.eps_high = _known(max, self.eps_high, one.eps)
        self.rows += one.rows
        self.rows_over_budget = _plus(self.rows_over_budget, one.rows_over_budget)
        self.rows_left_out += one.rows_left_out
        self.worst_left_out = _known(max, self.worst_left_out, one.worst_left_out)
        if one.held_out.queries:
            self._take_held_out(one.held_out)

    def _take_worst(self, worst: float | None, eps: float, output: str) -> None:
        over = None if worst is None or eps == 0 else worst / eps
        before, before_over = self.worst_tail_mass, self.worst_over_eps
        if worst is None or (self.sets and before is None):
            self.worst_tail_mass = self.worst_output = None
        elif before is None or worst > before:
            self.worst_tail_mass, self.worst_output = worst, output
        known = over is not None and (before_over is not None or not self.sets)
        self.worst_over_eps = _known(max, before_over, over) if known else None

    def _take_held_out(self, found: HeldOut) -> None:
        first = not self.held_out_queries
        low, high = self.held_out_violations_low, self.held_out_violations_high
        self.held_out_queries += found.queries
        self.held_out_violations_low = _plus(0 if first else low, found.violations)
        self.held_out_violations_high = _plus(0 if first else high, found.most)
        unknown = self.held_out_violations_high is None
        self.held_out_high = None if unknown else _known(max, self.held_out_high, found.high)


def _plus(sum_: int | None, more: int | None) -> int | None:
    return None if sum_ is None or more is None else sum_ + more


def _known(
    choose: Callable[[float, float], float], one: float | None, other: float | None
) -> float | None:
    return other if one is None else one if other is None else choose(one, other)
