"""Compare k/n with the Gaussian rule k/n = Q(sigma + q), and with the expected k at finite n."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from certk_rs import gaussian, select, windows

from .common import Rows, Settings, Table, Verdict, interval, legend, lines, mean, panels, table_of

NAME = "gaussian-rule"
ABOUT = (
    "Scores are independent normal numbers of standard deviation sigma. q is the eps-quantile of "
    "the standard normal law. The finite-n correction is the expected k at this n. The second "
    "paper bounds weights by R, here sigma; its constants are not known to us, and those of "
    "`windows.predict` are ours."
)
EPS = (1e-1, 1e-2, 1e-3)
# Far below and beyond sigma = sqrt(2 ln n), where rows freeze onto few keys.
TAME, CLOSE, EXACT = 0.7, 0.05, 0.01
# Probability that the bound on the largest weight of a row may fail.
DELTA = 0.05


def run(settings: Settings) -> dict[str, Any]:
    """Simulate each n and sigma, and ask the rule."""
    lengths = (128,) if settings.quick else (128, 1024, 8192)
    sigmas = np.arange(0.5, 6.01, 5.0 if settings.quick else 1.0)
    draws = 1 << (12 if settings.quick else 19)
    rows, largest = [], []
    for n in lengths:
        for j, sigma in enumerate(sigmas):
            scores = settings.random(1, n, j).standard_normal((max(8, draws // n), n)) * sigma
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            bound = windows.predict(n, float(sigma), DELTA, 0.01).largest_weight
            beyond = mean(1 / weights.sum(axis=1) > bound)
            largest.append({"n": n, "sigma": float(sigma), "bound": bound, "beyond": beyond})
            for eps in EPS:
                share = select(scores, eps).k / n
                rows.append(
                    {
                        **{"n": n, "sigma": float(sigma), "eps": eps},
                        **{"simulated": mean(share), "simulated_error": interval(share)},
                        "rule": float(gaussian.keep_fraction(sigma, eps)),
                        "finite": float(gaussian.plan(n, float(sigma), eps).k) / n,
                    }
                )
    return {"rows": rows, "largest": largest}


def verdicts(data: dict[str, Any]) -> list[Verdict]:
    """Judge the rule below and beyond the freezing point, and the correction."""
    rows: Rows = data["rows"]
    edge = [r["sigma"] / math.sqrt(2 * math.log(r["n"])) for r in rows]
    tame = [r for r, at in zip(rows, edge, strict=True) if at < TAME]
    frozen = [r for r, at in zip(rows, edge, strict=True) if at > 1]
    worst = max(abs(r["simulated"] - r["rule"]) for r in tame)
    off = max(r["simulated"] / max(r["rule"], 1e-300) for r in frozen)
    fixed = max(abs(r["simulated"] - r["finite"]) - r["simulated_error"] for r in rows)
    found: Rows = data["largest"]
    over = max(row["beyond"] for row in found)
    return [
        Verdict(
            "A: Gaussian scores keep k/n = Q(sigma + q)",
            f"within {worst:.3f} while sigma < {TAME:g} sqrt(2 ln n)",
            worst <= CLOSE,
        ),
        Verdict(
            "the same for sigma > sqrt(2 ln n)",
            f"up to {off:.2g} times too few keys",
            off <= 1 + CLOSE,
        ),
        Verdict(
            "ours: the expected k at finite n",
            f"at most {max(0.0, fixed):.4f} n outside the interval of any simulation",
            fixed <= EXACT,
        ),
        Verdict(
            "B: R, n and delta bound the largest weight of a row (constants are ours)",
            f"beyond the bound for delta = {DELTA:g} in at most {over:.2g} of the rows; the bound "
            f"is below 1 at {sum(row['bound'] < 1 for row in found)} of {len(found)} n and sigma",
            over <= DELTA,
        ),
    ]


def tables(data: dict[str, Any]) -> list[Table]:
    """Return one row per n, sigma and eps, and one per n and sigma."""
    heads = "n | sigma | eps | simulated k/n | +- | rule | finite n"
    cells = "{n} | {sigma:g} | {eps:g} | {simulated:.5f} | {simulated_error:.1g} | {rule:.5f}"
    bounds = "n | sigma | bound on the largest weight | share of rows beyond"
    return [
        table_of("mean k/n", heads, cells + " | {finite:.5f}", data["rows"]),
        table_of(
            "largest weight of a row",
            bounds,
            "{n} | {sigma:g} | {bound:.4g} | {beyond:.4f}",
            data["largest"],
        ),
    ]


def draw(data: dict[str, Any]) -> Any:
    """Draw a panel per n: simulated points, the rule dotted, and the correction dashed."""
    lengths = sorted({row["n"] for row in data["rows"]})
    figure, axes = panels(len(lengths), sharey=True, squeeze=False)
    for n, axis in zip(lengths, axes[0], strict=True):
        rows = [row | {"k/n": row["simulated"]} for row in data["rows"] if row["n"] == n]
        lines(axis, rows, "eps", "sigma", "k/n", f"n = {n}", "y", ls="")
        for what, style in (("rule", ":"), ("finite", "--")):
            axis.set_prop_cycle(None)
            for eps in EPS:
                some = [row for row in rows if row["eps"] == eps]
                axis.plot([r["sigma"] for r in some], [r[what] for r in some], style, lw=1)
        axis.set_ylim(1e-5, 1.5)
    return legend(figure, axes[0, 0])
