"""Experiment 6: Monte-Carlo bounds of a tail mass, their width and their coverage."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import montecarlo, selection
from .._display.page import Table, legend_beside, panels, plain_ticks, svg, table_of
from .settings import Settings, Tell, mean, standard_error

NAME = "sampling"
TITLE = "Monte-Carlo tails: width against draws, and coverage"
ABOUT = (
    "The tail mass of a set is estimated from some of the dropped keys, with an upper end that is "
    "wrong with probability at most delta. The rule from the central limit theorem stands beside "
    "it: it is an approximation and promises nothing. arXiv 2512.07647 does not draw: its "
    "MC-Search is deterministic, and this experiment is ours. The scores are normal ones, the same "
    "for every seed, which is that of the draws; intervals are two standard errors over runs, and "
    "a method that misses in none of them has none."
)
NEEDS: tuple[str, ...] = ()
BETTING: montecarlo.Method = "betting"
METHODS: dict[str, montecarlo.Method] = {
    "hoeffding": "hoeffding",
    "bernstein": "bernstein",
    "betting": BETTING,
}
DELTA = 0.05
SIGMA = 2.0
# Draws at which misses are counted, which takes more runs than a mean.
AT = 256
CLT = "CLT (no guarantee)"
IMPORTANCE = "betting, importance"


def run(settings: Settings, tell: Tell) -> dict[str, Any]:
    """Width and coverage of each method."""
    n = 4096 if settings.brief else 1 << 15
    seeds = 50 if settings.brief else 400
    draws = (64, 256, 1024) if settings.brief else (64, 128, 256, 512, 1024, 2048, 4096)
    scores = _normal(n) * SIGMA
    keep = selection.select(scores, 0.1).row(0).astype(np.int64)
    truth = _tail(scores, keep)
    above = scores + np.random.default_rng(66).uniform(0.0, 0.2, n)
    rows = []
    for i, m in enumerate(draws):
        for name, method in {**METHODS, IMPORTANCE: BETTING}.items():
            few = seeds if m == AT else seeds // 4
            bounds = above if name == IMPORTANCE else None
            upper = _upper(settings, scores, keep, m, few, method=method, upper_bounds=bounds)
            rows.append(_row(name, m, upper, truth))
        normal = [_clt(scores, keep, m, settings.random(67, m, seed)) for seed in range(seeds)]
        rows.append(_row(CLT, m, np.array(normal), truth))
        tell((i + 1) / len(draws))
    spike = _spike(settings, n, seeds)
    at = {row["method"]: row for row in rows if row["draws"] == draws[-1]}
    seen = (
        f"With {draws[-1]} draws the upper end lies "
        + ", ".join(f"{100 * at[m]['width']:.2g} % ({m})" for m in (*METHODS, IMPORTANCE))
        + " above the truth. On a tail with one heavy key the CLT rule misses in "
        f"{100 * spike['clt']:.0f} % of the runs instead of {100 * DELTA:.0f} %, betting in "
        f"{100 * spike['betting']:.0f} %."
    )
    return {"seen": seen, "n": n, "misses": seeds, "truth": truth, "rows": rows, "spike": spike}


def _normal(n: int) -> NDArray[np.float64]:
    """Quantiles of the normal law, in an order of no meaning."""
    inverse = statistics.NormalDist().inv_cdf
    values = np.array([inverse((i + 0.5) / n) for i in range(n)])
    return np.random.default_rng(6).permutation(values)


def _row(method: str, draws: int, upper: NDArray[np.float64], truth: float) -> dict[str, Any]:
    return {
        "method": method,
        "draws": draws,
        "width": mean(upper / truth - 1),
        "width_error": 2 * standard_error(upper / truth),
        "missed": mean(upper < truth),
        "runs": len(upper),
    }


def _tail(scores: NDArray[np.float64], keep: NDArray[np.int64]) -> float:
    weights = np.exp(scores - scores.max())
    return float(1 - weights[keep].sum() / weights.sum())


def _upper(
    settings: Settings,
    scores: NDArray[np.float64],
    keep: NDArray[np.int64],
    draws: int,
    seeds: int,
    **how: Any,
) -> NDArray[np.float64]:
    """The upper end of the tail mass for each seed."""
    runs = (
        montecarlo.tail_mass(scores, keep, delta=DELTA, draws=draws, seed=seed, **how)
        for seed in range(settings.seed * 10**6, settings.seed * 10**6 + seeds)
    )
    return np.array([float(found.upper) for found in runs])


def _clt(
    scores: NDArray[np.float64], keep: NDArray[np.int64], draws: int, rng: np.random.Generator
) -> float:
    """The upper end of the tail mass by the usual rule."""
    weights = np.exp(scores - scores.max())
    tail = np.delete(weights, keep)
    some = rng.choice(tail, draws, replace=False)
    _, most = montecarlo.clt_interval(some, DELTA, population=len(tail))
    sum_upper = len(tail) * most
    return float(sum_upper / (sum_upper + weights[keep].sum()))


def _spike(settings: Settings, n: int, seeds: int) -> dict[str, float]:
    """How often each is wrong where one dropped key weighs as much as the rest of the tail."""
    scores = _normal(n) * 0.5
    scores[0] = math.log(np.exp(scores[1:]).sum())
    scores[1] = scores[0] + 3
    keep = np.array([1])
    truth = _tail(scores, keep)
    clt = [_clt(scores, keep, 256, settings.random(69, seed)) < truth for seed in range(seeds)]
    return {"clt": mean(clt), "betting": mean(_upper(settings, scores, keep, 256, seeds) < truth)}


def plots(data: dict[str, Any]) -> list[str]:
    """Width against draws; misses."""
    methods = list(dict.fromkeys(row["method"] for row in data["rows"]))
    colours = {method: f"C{i}" for i, method in enumerate(methods)}
    figure, axis = panels(figsize=(7.5, 3.8))
    for method in methods:
        rows = [row for row in data["rows"] if row["method"] == method]
        style = "--" if method == CLT else "o-"
        draws, width = [r["draws"] for r in rows], [100 * r["width"] for r in rows]
        spread = [100 * r["width_error"] for r in rows]
        axis.errorbar(
            draws, width, spread, fmt=style, ms=3, capsize=2, label=method, color=colours[method]
        )
    axis.set(
        xscale="log", yscale="log", xlabel=f"draws, of {data['n']} keys",
        ylabel="mean excess of the upper end (%)",
        title=f"how far above the truth, sigma = {SIGMA:g}, delta = {DELTA:g}",
    )  # fmt: skip
    plain_ticks(axis.xaxis, draws)
    plain_ticks(axis.yaxis, (0.1, 1, 10, 100))
    legend_beside(axis)
    drawn = [svg(figure)]
    figure, (left, right) = panels(1, 2, figsize=(8.5, 3))
    at = {row["method"]: row["missed"] for row in data["rows"] if row["draws"] == AT}
    spike = {CLT: data["spike"]["clt"], BETTING: data["spike"]["betting"]}
    for axis, missed, title in ((left, at, "normal scores"), (right, spike, "one heavy key")):
        labels = [f"{method}: {100 * share:.2g} %" for method, share in missed.items()]
        shares = [100 * share for share in missed.values()]
        # Two standard errors of a share of so many runs.
        spread = [200 * math.sqrt(p * (1 - p) / data["misses"]) for p in missed.values()]
        axis.barh(labels, shares, xerr=spread, color=[colours[method] for method in missed])
        axis.axvline(100 * DELTA, color="#555", lw=1, ls=":")
        axis.set(title=title, xlabel="runs that miss (%)", xlim=(0, 100))
        axis.invert_yaxis()
    figure.suptitle(
        f"how often the upper end is too low, {AT} draws (dotted: delta = {DELTA:g})", fontsize=11
    )
    drawn.append(svg(figure))
    return drawn


def tables(data: dict[str, Any]) -> list[Table]:
    """All of it."""
    heads = "method | draws | width | missed | runs"
    cells = "{method} | {draws} | {width:.3f} | {missed:.3f} | {runs}"
    return [table_of(heads, cells, data["rows"])]
