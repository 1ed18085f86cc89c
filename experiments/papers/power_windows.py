"""Measure windows of n^C keys: the growth of k on Gaussian and real keys, and the mass dropped."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from certk_rs import select, windows

from .common import (
    Rows,
    Settings,
    Table,
    Verdict,
    legend,
    lines,
    mean,
    panels,
    real_heads,
    summed,
    table_of,
)

NAME = "power-windows"
ABOUT = (
    "Queries and keys are Gaussian vectors, so scores are about normal with standard deviation R; "
    "this setting is ours. R is fixed, or grows like sqrt(ln n). Beside them stand prefixes of a "
    "real context."
)
EPS, D, DRAWS = 0.01, 64, 8
REAL = "real keys"


def _root(factor: float) -> Callable[[int], float]:
    return lambda n: factor * math.sqrt(2 * math.log(n))


# Standard deviation of the scores as a function of n.
SCALES: dict[str, Callable[[int], float]] = {
    "R = 2": lambda n: 2.0,
    "R = 0.8 sqrt(2 ln n)": _root(0.8),
    "R = 1.5 sqrt(2 ln n)": _root(1.5),
}
# Windows on scores of R = 0.8 sqrt(2 ln n).
WINDOWS: dict[str, Callable[[int], float]] = {
    "k = ln ln n": lambda n: math.log(math.log(n)),
    "k = 4 ln n": lambda n: 4 * math.log(n),
    "k = n^0.5": lambda n: n**0.5,
    "k = n^0.7": lambda n: n**0.7,
}


def run(settings: Settings) -> dict[str, Any]:
    """Draw keys at each n, and fit the growth of k."""
    grown: Rows = []
    lost: Rows = []
    for n in [1 << b for b in range(7, 10 if settings.quick else 15)]:
        drawn = [_drawn(settings, n, draw) for draw in range(DRAWS)]
        for name in drawn[0]:
            row = {"name": name, "n": n} | summed([each[name] for each in drawn])
            (grown if name in SCALES else lost).append(row)
    lengths = (32, 64, 128) if settings.quick else (64, 128, 256, 512)
    for n in lengths:
        heads = real_heads(8, n)
        found = [{"k": mean(select(head.scores, EPS).k)} for head in heads]
        grown.append({"name": REAL, "n": n} | summed(found))
    fits = []
    for name in (*SCALES, REAL):
        rows = [row for row in grown if row["name"] == name]
        fit = windows.fit([row["n"] for row in rows], [row["k"] for row in rows])
        ends = {"low": float(fit.C_interval[0]), "high": float(fit.C_interval[1])}
        fits.append({"name": name, "alpha": float(fit.alpha), "C": float(fit.C)} | ends)
    return {"grown": grown, "lost": lost, "fits": fits}


def _drawn(settings: Settings, n: int, draw: int) -> dict[str, dict[str, float]]:
    """Return means over the rows of one draw of keys, for each scale and each window."""
    rng = settings.random(5, n, draw)
    queries = rng.standard_normal((max(16, min(512, (1 << 19) // n)) // DRAWS, D))
    unit = queries @ rng.standard_normal((n, D)).T / math.sqrt(D)
    found: dict[str, dict[str, float]] = {}
    for name, scale in SCALES.items():
        scores = unit * scale(n)
        participation = mean(windows.participation(scores))
        found[name] = {"k": mean(select(scores, EPS).k), "participation": participation}
    scores = unit * SCALES["R = 0.8 sqrt(2 ln n)"](n)
    weights = -np.sort(-np.exp(scores - scores.max(axis=1, keepdims=True)), axis=1)
    for name, size in WINDOWS.items():
        k = max(1, math.ceil(size(n)))
        found[name] = {"tail": mean(weights[:, k:].sum(1) / weights.sum(1))}
    return found


def verdicts(data: dict[str, Any]) -> list[Verdict]:
    """Judge the growth of k, the frozen rows, and the windows."""
    fit = {row["name"]: row for row in data["fits"]}
    frozen = [r["participation"] for r in data["grown"] if r["name"] == "R = 1.5 sqrt(2 ln n)"]
    lost = {name: [r["tail"] for r in data["lost"] if r["name"] == name] for name in WINDOWS}
    few, many = lost["k = ln ln n"], lost["k = n^0.7"]
    real = fit[REAL]
    return [
        Verdict(
            "ours: at fixed R the keys needed are a fixed share of n",
            f"k grows like n^{fit['R = 2']['C']:.2f}; at R = 0.8 sqrt(2 ln n) like "
            f"n^{fit['R = 0.8 sqrt(2 ln n)']['C']:.2f}, on prefixes of a real context like "
            f"n^{real['C']:.2f} ({real['low']:.2f} to {real['high']:.2f})",
            fit["R = 2"]["C"] > 0.9 > fit["R = 1.5 sqrt(2 ln n)"]["C"],
        ),
        Verdict(
            "B: few keys carry the mass where R is a large multiple of sqrt(ln n)",
            f"at 1.5 sqrt(2 ln n), 1 / sum P^2 stays between {min(frozen):.1f} and "
            f"{max(frozen):.1f} keys at all n",
            max(frozen) <= 2 * min(frozen),
        ),
        Verdict(
            "B: windows of o(log n) keys fail, windows of n^C do not",
            f"from the least n to the greatest, ln ln n keys drop {few[0]:.2f} and {few[-1]:.2f} "
            f"of the mass, n^0.7 keys {many[0]:.3f} and {many[-1]:.3f}",
            few[-1] > 0.25 and many[-1] < min(many[0], few[-1]),
        ),
    ]


def tables(data: dict[str, Any]) -> list[Table]:
    """Return the fits, the growth and the dropped mass."""
    grown = [{"participation": math.nan} | row for row in data["grown"]]
    return [
        table_of(
            "k = alpha n^C",
            "keys | alpha | C | 95 % interval",
            "{name} | {alpha:.3f} | {C:.3f} | {low:.3f} to {high:.3f}",
            data["fits"],
        ),
        table_of(
            f"keys needed at eps = {EPS:g}",
            "keys | n | mean k | +- | 1 / sum P^2",
            "{name} | {n} | {k:.1f} | {k_error:.1f} | {participation:.2f}",
            grown,
        ),
        table_of(
            "mass that windows drop, R = 0.8 sqrt(2 ln n)",
            "window | n | dropped mass | +-",
            "{name} | {n} | {tail:.4f} | {tail_error:.4f}",
            data["lost"],
        ),
    ]


def draw(data: dict[str, Any]) -> Any:
    """Draw keys needed, and the dropped mass, against n."""
    figure, axes = panels(2)
    lines(axes[0], data["grown"], "name", "n", "k", f"keys needed at eps = {EPS:g}", "xy")
    lines(axes[1], data["lost"], "name", "n", "tail", "dropped mass, R = 0.8 sqrt(2 ln n)", "xy")
    axes[1].legend(frameon=False)
    return legend(figure, axes[0])
