"""What came out of a job, per layer: plain data for tables and JSON, and bars for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .plan import Task
from .prune import LayerSets

# More bars than this are one per layer, not one per keep-set.
_MOST_BARS = 36


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
class LayerReport:
    """One layer: the count of each of its keep-sets, and what its rows (queries) lose at worst."""

    layer: int
    sets: tuple[Count, ...]
    worst_tail_mass: float
    rows: int
    rows_over_budget: int

    @property
    def count(self) -> Count:
        """All keep-sets together."""
        return sum(self.sets, NOTHING)


def layer_report(sets: LayerSets, eps: float) -> LayerReport:
    """Sum up one layer; `eps` tells which rows are over budget."""
    counts = [
        Count(len(indices), sets.layer.n, int(bound))
        for indices, bound in zip(sets.indices, sets.lower_bounds, strict=True)
    ]
    return LayerReport(
        sets.layer.index,
        tuple(counts),
        float(sets.upper.max()),
        sets.upper.size,
        int((sets.upper > eps).sum()),
    )


@dataclass(frozen=True)
class TaskReport:
    """One output that is now on the disk, and what its layers hold."""

    task: Task
    layers: tuple[LayerReport, ...]


def report_json(report: TaskReport) -> dict[str, Any]:
    """One output as a JSON object."""
    return {
        "input": str(report.task.source),
        "output": str(report.task.target),
        **_totals(report.layers),
        "layers": [
            {"layer": each.layer, **_totals([each]), "sets": [_counts(one) for one in each.sets]}
            for each in report.layers
        ],
    }


def bars(reports: Sequence[LayerReport], width: int, symbols: str = "█▒·") -> list[str]:
    """Lines of a bar chart: of all keys, those proven necessary, those kept beyond, those dropped.

    One bar per keep-set if these are few, else one per layer. `symbols` are those of the three
    parts.
    """
    if sum(len(report.sets) for report in reports) <= _MOST_BARS:
        rows = [
            (f"layer {report.layer}" if number == 0 else "", f"head {number}", count)
            for report in reports
            for number, count in enumerate(report.sets)
        ]
        if all(len(report.sets) == 1 for report in reports):
            rows = [(layer, "", count) for layer, _, count in rows]
    else:
        rows = [(f"layer {report.layer}", "", report.count) for report in reports]
    first = max(len(layer) for layer, _, _ in rows)
    second = max(len(head) for _, head, _ in rows)
    lines = []
    for layer, head, count in rows:
        needed = count.lower_bound * width // count.total
        kept = max(needed, -(-count.kept * width // count.total))
        bar = symbols[0] * needed + symbols[1] * (kept - needed) + symbols[2] * (width - kept)
        share = f"{100 * count.kept / count.total:5.1f} %"
        lines.append(f"{layer:<{first}} {head:<{second}} {bar} {share}")
    return lines


def _totals(layers: Sequence[LayerReport]) -> dict[str, Any]:
    """Some layers together."""
    return {
        **_counts(sum((layer.count for layer in layers), NOTHING)),
        "worst_tail_mass": max(layer.worst_tail_mass for layer in layers),
        "rows": sum(layer.rows for layer in layers),
        "rows_over_budget": sum(layer.rows_over_budget for layer in layers),
    }


def _counts(count: Count) -> dict[str, int]:
    return {**asdict(count), "gap": count.gap}
