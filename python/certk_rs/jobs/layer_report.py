"""What is known of one layer of an output, in numbers that a table shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..cache_format import Layer
from .chosen import Chosen
from .holdout import HeldOut


@dataclass(frozen=True)
class Count:
    """Keys kept of all, and how many of them any keep-set within the budget needs."""

    kept: int
    total: int
    lower_bound: int

    @property
    def gap(self) -> int:
        """How many keys at most could be saved."""
        return self.kept - self.lower_bound

    def __add__(self, other: Count) -> Count:
        return Count(
            self.kept + other.kept,
            self.total + other.total,
            self.lower_bound + other.lower_bound,
        )


NOTHING = Count(0, 0, 0)


@dataclass(frozen=True)
class SetReport:
    """One keep-set: the kv head that it is of, or -1 for a whole layer.

    `held_out` is of another set of this group, which was made without some of the queries and then
    tried on these; this one was made for all.
    """

    head: int
    eps: float
    count: Count
    worst_tail_mass: float
    held_out: HeldOut


@dataclass(frozen=True)
class LayerReport:
    """One layer: its keep-sets, and what its promised rows (queries) lose at worst.

    `rows` are those promised; `left_out` those that coverage has left out of the promise.
    """

    layer: int
    sets: tuple[SetReport, ...]
    rows: int
    rows_over_budget: int
    left_out: int

    @property
    def count(self) -> Count:
        """All keep-sets together."""
        return sum((each.count for each in self.sets), NOTHING)

    @property
    def worst_tail_mass(self) -> float:
        """The largest upper end of a promised row."""
        return max(each.worst_tail_mass for each in self.sets)

    @property
    def held_out(self) -> HeldOut:
        """The queries set aside in a trial, of all keep-sets together."""
        every = [each.held_out for each in self.sets]
        return HeldOut(sum(one.queries for one in every), sum(one.violations for one in every))


def fewest_keys(blocks: int, block_size: int, visible: int) -> int:
    """The fewest keys that so many blocks hold: all are full but the last one of all."""
    return 0 if blocks <= 0 else (blocks - 1) * block_size + (visible - 1) % block_size + 1


def layer_report(
    layer: Layer,
    chosen: Chosen,
    tried: Chosen | None,
    granularity: str,
    block_size: int,
    visible: int,
    own_bounds: bool,
) -> LayerReport:
    """Sum up what was chosen for one layer, of which some query sees `visible` keys.

    `tried` are the sets of the same groups that were made without some queries, to be tried on
    these. Unless the lower bounds are those of the sets' own budgets, 0 stands for them.
    """
    by_head = granularity == "head"
    size = layer.heads // len(chosen.indices)
    sets = []
    for group, indices in enumerate(chosen.indices):
        heads = slice(group * size, (group + 1) * size)
        bound = int(chosen.lower_bounds[group]) if own_bounds else 0
        least = fewest_keys(bound, block_size, visible)
        held_out = HeldOut(0, 0)
        if tried is not None:
            held_out = HeldOut(len(tried.held_out), int(tried.violating[group]))
        sets.append(
            SetReport(
                group if by_head else -1,
                float(chosen.eps[group]),
                Count(len(indices), layer.n, least),
                float(chosen.worst[heads].max()),
                held_out,
            )
        )
    promised = layer.heads * layer.m - len(chosen.left_out)
    over = int(chosen.over.sum())
    return LayerReport(layer.index, tuple(sets), promised, over, len(chosen.left_out))


def set_json(report: SetReport) -> dict[str, Any]:
    """One keep-set as a JSON object."""
    held_out = report.held_out
    return {
        "head": report.head,
        "eps": report.eps,
        **asdict(report.count),
        "gap": report.count.gap,
        "worst_tail_mass": report.worst_tail_mass,
        "held_out": {
            "queries": held_out.queries,
            "violations": held_out.violations,
            "rate": held_out.rate,
            "low": held_out.low,
            "high": held_out.high,
        },
    }


def read_set(body: Mapping[str, Any]) -> SetReport:
    """The inverse of `set_json`."""
    held_out = HeldOut(body["held_out"]["queries"], body["held_out"]["violations"])
    count = Count(body["kept"], body["total"], body["lower_bound"])
    return SetReport(body["head"], body["eps"], count, body["worst_tail_mass"], held_out)
