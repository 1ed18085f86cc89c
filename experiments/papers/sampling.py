"""Measure the width and the coverage of Monte-Carlo bounds of a tail mass."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np

from certk_rs import montecarlo, select

from .common import (
    Array,
    Settings,
    Table,
    Verdict,
    interval,
    legend,
    lines,
    mean,
    panels,
    table_of,
)

NAME = "sampling"
ABOUT = (
    "The tail mass of a set is estimated from some of the dropped keys; the upper end is wrong "
    "with probability at most delta. The rule from the central limit theorem (CLT) promises "
    "nothing. Neither paper draws: this experiment is ours."
)
DELTA, SIGMA = 0.05, 2.0
CLT, BETTING, IMPORTANCE = "CLT", "betting", "betting, importance"
METHODS = ("hoeffding", "bernstein", BETTING, IMPORTANCE)


def run(settings: Settings) -> dict[str, Any]:
    """Measure each method on normal scores, and two on a tail with one heavy key."""
    n, seeds = (1 << 10, 20) if settings.quick else (1 << 14, 200)
    draws = (64, 256) if settings.quick else (64, 256, 1024)
    scores = _normal(n) * SIGMA
    keep = select(scores, 0.1).row(0).astype(np.int64)
    truth = _tail(scores, keep)
    above = scores + settings.random(66).uniform(0.0, 0.2, n)
    rows = []
    for m in draws:
        for method in (*METHODS, CLT):
            if method == CLT:
                upper = _clt(settings, scores, keep, m, seeds)
            else:
                bounds = above if method == IMPORTANCE else None
                upper = _upper(settings, scores, keep, m, seeds, method.split(",")[0], bounds)
            width, missed = upper / truth - 1, upper < truth
            rows.append(
                {"method": method, "draws": m, "width": mean(width), "width_error": interval(width)}
                | {"missed": mean(missed), "missed_error": interval(missed)}
            )
    # One dropped key weighs as much as the rest of the tail.
    scores = _normal(n) * 0.5
    scores[0] = math.log(np.exp(scores[1:]).sum())
    scores[1] = scores[0] + 3
    keep = np.array([1])
    truth = _tail(scores, keep)
    heavy = {
        CLT: mean(_clt(settings, scores, keep, draws[1], seeds) < truth),
        BETTING: mean(_upper(settings, scores, keep, draws[1], seeds, BETTING) < truth),
    }
    return {"rows": rows, "heavy": heavy, "runs": seeds}


def _normal(n: int) -> Array:
    """Return quantiles of the normal law, in an order of no meaning."""
    inverse = statistics.NormalDist().inv_cdf
    values = np.array([inverse((i + 0.5) / n) for i in range(n)])
    return np.random.default_rng(6).permutation(values)


def _tail(scores: Array, keep: Array) -> float:
    weights = np.exp(scores - scores.max())
    return float(1 - weights[keep].sum() / weights.sum())


def _upper(
    settings: Settings,
    scores: Array,
    keep: Array,
    draws: int,
    seeds: int,
    method: Any,
    bounds: Array | None = None,
) -> Array:
    """Return the upper end of the tail mass for each seed."""
    found = [
        montecarlo.tail_mass(
            scores, keep, delta=DELTA, draws=draws, method=method, upper_bounds=bounds,
            seed=settings.seed * 10**6 + seed,
        ).upper
        for seed in range(seeds)
    ]  # fmt: skip
    return np.array(found, float)


def _clt(settings: Settings, scores: Array, keep: Array, draws: int, seeds: int) -> Array:
    """Return the upper end of the tail mass by the usual rule, for each seed."""
    weights = np.exp(scores - scores.max())
    tail = np.delete(weights, keep)
    upper = []
    for seed in range(seeds):
        some = settings.random(67, draws, seed).choice(tail, draws, replace=False)
        most = len(tail) * montecarlo.clt_interval(some, DELTA, population=len(tail))[1]
        upper.append(most / (most + weights[keep].sum()))
    return np.array(upper, float)


def verdicts(data: dict[str, Any]) -> list[Verdict]:
    """Judge coverage and width."""
    ours = [row for row in data["rows"] if row["method"] != CLT]
    worst = max([data["heavy"][BETTING], *(row["missed"] for row in ours)])
    clt = max([data["heavy"][CLT], *(r["missed"] for r in data["rows"] if r["method"] == CLT)])
    last = {row["method"]: row for row in ours if row["draws"] == ours[-1]["draws"]}
    told = ", ".join(f"{100 * row['width']:.2g} % ({name})" for name, row in last.items())
    # Three standard deviations of a share of so many runs.
    room = 3 * math.sqrt(DELTA * (1 - DELTA) / data["runs"])
    return [
        Verdict(
            f"ours: an upper end is too low in at most {100 * DELTA:g} % of the runs",
            f"in at most {100 * worst:.1f} %",
            worst <= DELTA + room,
        ),
        Verdict(
            "the same by the central limit theorem",
            f"in up to {100 * clt:.0f} % (one heavy key)",
            clt <= DELTA + room,
        ),
        Verdict(
            "ours: betting is tighter than Hoeffding",
            f"above the truth with {ours[-1]['draws']} draws: {told}",
            last[BETTING]["width"] < last["hoeffding"]["width"],
        ),
    ]


def tables(data: dict[str, Any]) -> list[Table]:
    """Return one row per method and number of draws, and the misses with one heavy key."""
    heads = "method | draws | mean excess of the upper end | +- | missed | +-"
    cells = "{method} | {draws} | {width:.3f} | {width_error:.3f} | {missed:.3f}"
    heavy = [{"method": name, "missed": share} for name, share in data["heavy"].items()]
    return [
        table_of("normal scores", heads, cells + " | {missed_error:.3f}", data["rows"]),
        table_of("one heavy key", "method | missed", "{method} | {missed:.3f}", heavy),
    ]


def draw(data: dict[str, Any]) -> Any:
    """Draw the excess of the upper end, and the share of misses."""
    figure, axes = panels(2)
    lines(axes[0], data["rows"], "method", "draws", "width", "excess of the upper end", "xy")
    lines(axes[1], data["rows"], "method", "draws", "missed", "runs that miss")
    axes[1].axhline(DELTA, color="#555", lw=1, ls=":")
    return legend(figure, axes[0])
