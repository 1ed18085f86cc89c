"""Experiment 1: k/n against sigma, simulated and by the Gaussian rule."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import gaussian, selection
from .._display.page import Table, legend_below, panels, pyplot, svg, table_of
from .settings import Settings, Tell, mean

NAME = "gaussian-rule"
TITLE = "k/n against sigma: simulation, rule, finite n"
ABOUT = (
    "Scores are independent normal numbers of standard deviation sigma. The rule of the first "
    "paper says k/n = Q(sigma + q), q the eps-quantile of the standard normal law; the correction "
    "is the expected k at this n. Intervals are two standard errors over simulated rows."
)
NEEDS: tuple[str, ...] = ()
EPS = (1e-1, 1e-2, 1e-3, 1e-4)


def run(settings: Settings, tell: Tell) -> dict[str, Any]:
    """Simulate each n and sigma, and ask the rule."""
    lengths = (128, 1024) if settings.brief else (128, 512, 4096, 65536)
    # Nearly all of the time goes into the expected k at finite n.
    sigmas = np.arange(0.5, 6.01, 2.5 if settings.brief else 1.0)
    rows = []
    for i, n in enumerate(lengths):
        count = max(8, (1 << (18 if settings.brief else 21)) // n)
        for j, sigma in enumerate(sigmas):
            scores = settings.random(1, n, j).standard_normal((count, n)) * sigma
            for eps in EPS:
                k = selection.select(scores, eps).k
                rows.append(
                    {
                        "n": n,
                        "sigma": float(sigma),
                        "eps": eps,
                        "simulated": mean(k) / n,
                        "error": float(np.std(k)) / n / math.sqrt(count),
                        "rule": float(gaussian.keep_fraction(sigma, eps)),
                        "finite": float(gaussian.plan(n, float(sigma), eps).k) / n,
                    }
                )
            tell((i + (j + 1) / len(sigmas)) / len(lengths))
    tame = [r for r in rows if r["sigma"] < 0.7 * math.sqrt(2 * math.log(r["n"]))]
    frozen = [r for r in rows if r["sigma"] > math.sqrt(2 * math.log(r["n"]))]
    worst = max(abs(r["simulated"] - r["rule"]) for r in tame)
    off = max((r["simulated"] / max(r["rule"], 1e-300) for r in frozen), default=1.0)
    fixed = max(abs(r["simulated"] - r["finite"]) for r in rows)
    seen = (
        f"Well below sigma = sqrt(2 ln n) the rule is within {worst:.3f} of the simulated k/n; "
        f"past it rows freeze onto few keys, and the rule asks for up to {off:.3g} times too few. "
        f"The finite-n correction is within {fixed:.4f} everywhere."
    )
    return {"seen": seen, "rows": rows}


def plots(data: dict[str, Any]) -> list[str]:
    """A panel per n."""
    lengths = sorted({row["n"] for row in data["rows"]})
    figure, axes = panels(
        1, len(lengths), figsize=(2.4 * len(lengths) + 0.4, 3.8), sharey=True, squeeze=False,
    )  # fmt: skip
    colours: dict[str, str] = {}
    for n, axis in zip(lengths, axes[0], strict=True):
        for eps in EPS:
            rows = [row for row in data["rows"] if row["n"] == n and row["eps"] == eps]
            sigma = [row["sigma"] for row in rows]
            [line] = axis.plot(sigma, [row["rule"] for row in rows], lw=1)
            colour = line.get_color()
            axis.plot(sigma, [row["finite"] for row in rows], "--", lw=1, color=colour)
            spread = [2 * row["error"] for row in rows]
            simulated = [row["simulated"] for row in rows]
            axis.errorbar(sigma, simulated, spread, fmt=".", color=colour, capsize=2, lw=1)
            colours[f"eps = {eps:g}"] = colour
        axis.axvline(math.sqrt(2 * math.log(n)), color="#999", lw=0.8)
        axis.set(title=f"n = {n}", xlabel="sigma (nats)", yscale="log", ylim=(1e-5, 1.5))
        axis.set_xticks(range(0, 7, 2))
    axes[0][0].set_ylabel("mean k/n")
    line = pyplot().Line2D
    key = {
        "rule": line([], [], color="black", lw=1),
        "expected at this n": line([], [], color="black", lw=1, ls="--"),
        "simulated": line([], [], color="black", marker=".", ls=""),
        "sigma = sqrt(2 ln n)": line([], [], color="#999", lw=0.8),
    } | {label: line([], [], color=colour, lw=3) for label, colour in colours.items()}
    legend_below(figure, list(key.values()), list(key), ncols=4)
    return [svg(figure)]


def tables(data: dict[str, Any]) -> list[Table]:
    """All of it."""
    heads = "n | sigma | eps | simulated k/n | standard error | rule | finite n"
    cells = "{n} | {sigma:g} | {eps:g} | {simulated:.5f} | {error:.1g} | {rule:.5f} | {finite:.5f}"
    return [table_of(heads, cells, data["rows"])]
