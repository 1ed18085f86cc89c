"""Experiment 6: Monte-Carlo bounds of a tail mass, their width and their coverage."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import montecarlo, selection
from .._page import Table, pyplot, svg
from .settings import Settings, Tell, mean

NAME = "sampling"
TITLE = "Monte-Carlo tails: width against draws, and coverage"
ABOUT = (
    "The tail mass of a set is estimated from some of the dropped keys, with an upper end that is "
    "wrong with probability at most delta. The rule from the central limit theorem stands beside "
    "it: it is an approximation and promises nothing."
)
BETTING: montecarlo.Method = "betting"
METHODS: dict[str, montecarlo.Method] = {
    "hoeffding": "hoeffding",
    "bernstein": "bernstein",
    "betting": BETTING,
}
DELTA = 0.05
SIGMA = 2.0
CLT = "CLT (no guarantee)"
IMPORTANCE = "betting, importance"


def run(settings: Settings, tell: Tell) -> dict[str, Any]:
    """Width and coverage of each method."""
    n = 4096 if settings.brief else 1 << 15
    seeds = 50 if settings.brief else 400
    draws = (64, 256, 1024) if settings.brief else (64, 128, 256, 512, 1024, 2048, 4096)
    scores = settings.random(6).standard_normal(n) * SIGMA
    keep = selection.select(scores, 0.1).row(0).astype(np.int64)
    truth = _tail(scores, keep)
    above = scores + settings.random(66).uniform(0.0, 0.2, n)
    rows = []
    for i, m in enumerate(draws):
        for name, method in {**METHODS, IMPORTANCE: BETTING}.items():
            few = min(seeds, 20) if m != 256 else seeds
            upper = []
            for seed in range(few):
                bounds = above if name == IMPORTANCE else None
                found = montecarlo.tail_mass(
                    scores,
                    keep,
                    delta=DELTA,
                    draws=m,
                    method=method,
                    seed=seed,
                    upper_bounds=bounds,
                )
                upper.append(float(found.upper))
            rows.append(_row(name, m, np.array(upper), truth))
        normal = [_clt(scores, keep, m, settings.random(67, m, seed)) for seed in range(seeds)]
        rows.append(_row(CLT, m, np.array(normal), truth))
        tell((i + 1) / len(draws))
    spike = _spike(settings, n, seeds)
    at = {row["method"]: row for row in rows if row["draws"] == draws[-1]}
    seen = (
        f"With {draws[-1]} draws the upper end lies "
        + ", ".join(f"{100 * at[m]['width']:.0f} % ({m})" for m in (*METHODS, IMPORTANCE))
        + " above the truth. On a tail with one heavy key the CLT rule misses in "
        f"{100 * spike['clt']:.0f} % of the runs instead of {100 * DELTA:.0f} %, betting in "
        f"{100 * spike['betting']:.0f} %."
    )
    return {"seen": seen, "n": n, "truth": truth, "rows": rows, "spike": spike}


def _row(method: str, draws: int, upper: NDArray[np.float64], truth: float) -> dict[str, Any]:
    return {
        "method": method,
        "draws": draws,
        "width": mean(upper / truth - 1),
        "missed": mean(upper < truth),
        "runs": len(upper),
    }


def _tail(scores: NDArray[np.float64], keep: NDArray[np.int64]) -> float:
    weights = np.exp(scores - scores.max())
    return float(1 - weights[keep].sum() / weights.sum())


def _clt(
    scores: NDArray[np.float64], keep: NDArray[np.int64], draws: int, rng: np.random.Generator
) -> float:
    """The usual rule: mean and standard deviation of the draws, a normal quantile."""
    weights = np.exp(scores - scores.max())
    tail = np.delete(weights, keep)
    some = rng.choice(tail, draws, replace=False)
    half = NormalDist().inv_cdf(1 - DELTA) * some.std(ddof=1) / math.sqrt(draws)
    sum_upper = len(tail) * (some.mean() + half)
    return float(sum_upper / (sum_upper + weights[keep].sum()))


def _spike(settings: Settings, n: int, seeds: int) -> dict[str, float]:
    """How often each is wrong where one dropped key weighs as much as the rest of the tail."""
    scores = settings.random(68).standard_normal(n) * 0.5
    scores[0] = math.log(np.exp(scores[1:]).sum())
    scores[1] = scores[0] + 3
    keep = np.array([1])
    truth = _tail(scores, keep)
    clt = [_clt(scores, keep, 256, settings.random(69, seed)) < truth for seed in range(seeds)]
    betting = [
        float(montecarlo.tail_mass(scores, keep, delta=DELTA, draws=256, seed=seed).upper) < truth
        for seed in range(seeds)
    ]
    return {"clt": mean(clt), "betting": mean(betting)}


def plots(data: dict[str, Any]) -> list[str]:
    """Width against draws; misses."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    methods = list(dict.fromkeys(row["method"] for row in data["rows"]))
    for method in methods:
        rows = [row for row in data["rows"] if row["method"] == method]
        style = "--" if method == CLT else "o-"
        left.plot([r["draws"] for r in rows], [r["width"] for r in rows], style, ms=3, label=method)
    left.set(
        xscale="log", yscale="log", xlabel="draws", ylabel="(upper end - truth) / truth",
        title=f"n = {data['n']}, sigma = {SIGMA:g}, delta = {DELTA:g}",
    )  # fmt: skip
    left.legend(frameon=False, fontsize=8)
    at = [row for row in data["rows"] if row["draws"] == 256]
    names = [row["method"] for row in at] + ["CLT, one heavy key", "betting, one heavy key"]
    missed = [row["missed"] for row in at] + [data["spike"]["clt"], data["spike"]["betting"]]
    right.barh(names, missed)
    right.axvline(DELTA, color="#c00", lw=1)
    right.set(title="share of runs whose upper end is too low, 256 draws", xlim=(0, 1))
    return [svg(figure)]


def tables(data: dict[str, Any]) -> list[Table]:
    """All of it."""
    rows = [
        (r["method"], str(r["draws"]), f"{r['width']:.3f}", f"{r['missed']:.3f}", str(r["runs"]))
        for r in data["rows"]
    ]
    return [Table(("method", "draws", "width", "missed", "runs"), rows)]
