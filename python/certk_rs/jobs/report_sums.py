"""Sums over many keep-sets, of which some do not tell everything."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from .clopper_pearson import clopper_pearson
from .holdout import CONFIDENCE
from .output_facts import SetFacts


@dataclass
class SetSums:
    """Keep-sets added up. What one of them does not tell, the sum does not tell: it is None.

    `high` is the upper end of the interval of Clopper and Pearson of the set where it is largest,
    and `worst_output` the output of the set that loses most.
    """

    sets: int = 0
    kept: int = 0
    total: int = 0
    least_share: float = 1.0
    most_share: float = 0.0
    lower_bound: int | None = 0
    gap: int | None = 0
    worst_tail_mass: float | None = 0.0
    worst_output: str | None = None
    worst_over_eps: float | None = 0.0
    eps_low: float = 1.0
    eps_high: float = 0.0
    rows: int = 0
    rows_over_budget: int | None = 0
    rows_left_out: int = 0
    worst_left_out: float | None = None
    held_out_queries: int = 0
    violations_low: int | None = 0
    violations_high: int | None = 0
    high: float | None = None

    def add(self, found: SetFacts, output: str) -> None:
        """Count one more set, of that output."""
        share = found.kept / found.total
        self.sets += 1
        self.kept += found.kept
        self.total += found.total
        self.least_share = min(self.least_share, share)
        self.most_share = max(self.most_share, share)
        self.lower_bound = _plus(self.lower_bound, found.lower_bound)
        self.gap = _plus(self.gap, found.gap)
        self._take_worst(found.worst_tail_mass, found.eps, output)
        self.eps_low, self.eps_high = min(self.eps_low, found.eps), max(self.eps_high, found.eps)
        self.rows += found.rows
        self.rows_over_budget = _plus(self.rows_over_budget, found.rows_over_budget)
        self.rows_left_out += found.rows_left_out
        self.worst_left_out = _larger(self.worst_left_out, found.worst_left_out)
        if found.held_out_queries:
            self.held_out_queries += found.held_out_queries
            low, high = found.violations or (None, None)
            self.violations_low = _plus(self.violations_low, low)
            self.violations_high = _plus(self.violations_high, high)
            if high is not None:
                self.high = _larger(self.high, probable(high, found.held_out_queries)[1])

    def _take_worst(self, worst: float | None, eps: float, output: str) -> None:
        if worst is None or self.worst_tail_mass is None:
            self.worst_tail_mass = self.worst_output = self.worst_over_eps = None
            return
        over = None if eps == 0 else worst / eps
        if over is None or self.worst_over_eps is None:
            self.worst_over_eps = None
        else:
            self.worst_over_eps = max(self.worst_over_eps, over)
        if self.worst_output is None or worst > self.worst_tail_mass:
            self.worst_tail_mass, self.worst_output = worst, output

    def to_json(self) -> dict[str, Any]:
        """As named numbers."""
        held_out = self.held_out_queries > 0
        return {
            "sets": self.sets,
            "kept": self.kept,
            "total": self.total,
            "kept_share": self.kept / self.total if self.total else None,
            "least_kept_share": self.least_share if self.sets else None,
            "most_kept_share": self.most_share if self.sets else None,
            "lower_bound": self.lower_bound,
            "gap": self.gap,
            "worst_tail_mass": self.worst_tail_mass if self.sets else None,
            "worst_output": self.worst_output,
            "worst_over_eps": self.worst_over_eps if self.sets else None,
            "eps_low": self.eps_low if self.sets else None,
            "eps_high": self.eps_high if self.sets else None,
            "rows": self.rows,
            "rows_over_budget": self.rows_over_budget,
            "rows_left_out": self.rows_left_out,
            "worst_left_out": self.worst_left_out,
            "held_out_queries": self.held_out_queries,
            "held_out_violations_low": self.violations_low if held_out else None,
            "held_out_violations_high": self.violations_high if held_out else None,
            "held_out_high": self.high if held_out and self.violations_high is not None else None,
        }


@cache
def probable(violations: int, queries: int) -> tuple[float, float]:
    """Ends of the interval of Clopper and Pearson for the probability of a violation."""
    return clopper_pearson(violations, queries, CONFIDENCE)


def _plus(sum_: int | None, more: int | None) -> int | None:
    return None if sum_ is None or more is None else sum_ + more


def _larger(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else max(one, other)
