"""Count the keys that each bound of the first paper proves to be enough, on the same real rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from certk_rs import bounds, select

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
    real_heads,
    require_at_most,
    table_of,
)

NAME = "gap-rules"
ABOUT = (
    "Each rule keeps the top k for the smallest k that it can prove to be enough. The single gap "
    "reads two scores, the multi-gap one more per cut, the blockwise rule the largest and smallest "
    "score of each block of 16 consecutive keys; exact sums the weights."
)
EPS = (0.1, 0.01)
CUTS = (2, 4, 8, 16)
BLOCK = 16
BLOCKS = f"blocks of {BLOCK}"


def run(settings: Settings) -> dict[str, Any]:
    """Apply each rule to each row."""
    heads = real_heads(2 if settings.quick else 16)
    found: dict[tuple[float, str, int], list[float]] = {}
    for head in heads:
        scores = head.scores
        for eps in EPS:
            enough = {"exact": select(scores, eps).k}
            enough["single gap"] = bounds.smallest_k(scores, eps, rule="single_gap")
            for cuts in CUTS:
                enough[f"{cuts} cuts"] = bounds.smallest_k(
                    scores, eps, rule="multi_gap", n_cuts=cuts
                )
            lost = {rule: _lost(scores, k) for rule, k in enough.items()}
            # Whole blocks are not the best keys, and lose another mass.
            by_blocks = [blocks(row, eps) for row in scores]
            enough[BLOCKS], lost[BLOCKS] = map(np.array, zip(*by_blocks, strict=True))
            for rule, mass in lost.items():
                require_at_most(f"the budget of the rule {rule!r}", mass, eps)
                share = mean(enough[rule] / scores.shape[1])
                found.setdefault((eps, rule, head.layer), []).append(share)
    rows = [
        {"eps": eps, "rule": rule, "layer": layer, "k/n": mean(x), "k/n_error": interval(x)}
        for (eps, rule, layer), x in found.items()
    ]
    return {"rows": rows}


def _lost(scores: Array, k: Array) -> Array:
    """Return the mass that the best k keys of each row leave, by sums in float64."""
    weights = np.sort(np.exp(scores - scores.max(axis=1, keepdims=True)), axis=1)
    # Small terms first.
    left = np.pad(np.cumsum(weights, axis=1), ((0, 0), (1, 0)))
    return np.asarray(
        np.take_along_axis(left, weights.shape[1] - k[:, None], 1)[:, 0] / left[:, -1]
    )


def blocks(row: Array, eps: float) -> tuple[int, float]:
    """Return the keys of the fewest whole blocks that block bounds prove, and the mass lost.

    Blocks are taken by decreasing upper bound. The last one is short where n is no multiple of
    BLOCK.
    """
    starts = np.arange(0, len(row), BLOCK)
    sizes = np.diff(np.append(starts, len(row)))
    upper, lower = np.maximum.reduceat(row, starts), np.minimum.reduceat(row, starts)
    order = np.argsort(-upper, kind="stable")
    low, high = 0, len(sizes)
    while low + 1 < high:
        middle = (low + high) // 2
        kept = np.zeros(len(sizes), bool)
        kept[order[:middle]] = True
        if float(bounds.blockwise(sizes, upper, lower, kept)) <= eps:
            high = middle
        else:
            low = middle
    mass = np.add.reduceat(np.exp(row - row.max()), starts)
    return int(sizes[order[:high]].sum()), float(mass[order[high:]].sum() / mass.sum())


def verdicts(data: dict[str, Any]) -> list[Verdict]:
    """Judge the rules at the larger budget."""
    at: dict[str, list[float]] = {}
    for row in data["rows"]:
        if row["eps"] == EPS[0]:
            at.setdefault(row["rule"], []).append(row["k/n"])
    means = {rule: mean(shares) for rule, shares in at.items()}
    exact, single = means["exact"], means["single gap"]
    # Rows of equal scores need all that every rule keeps.
    saved = [(single - means[f"{n} cuts"]) / ((single - exact) or 1.0) for n in CUTS]
    told = ", ".join(f"{n} cuts {100 * x:.0f} %" for n, x in zip(CUTS, saved, strict=True))
    return [
        Verdict(
            "A: the gap of two scores proves k keys to be enough",
            f"at eps = {EPS[0]:g} it keeps {single:.3f} of the keys, of which {exact:.3f} "
            "are needed; no set breaks its budget",
            exact <= single < 1,
        ),
        Verdict(
            "A: more cuts save keys",
            f"of the keys kept in vain {told}; blocks keep {means[BLOCKS]:.3f}",
            saved[0] > 0 and saved == sorted(saved) and saved[-1] <= 1,
        ),
    ]


def tables(data: dict[str, Any]) -> list[Table]:
    """Return one row per rule, layer and budget."""
    heads, cells = "eps | rule | layer | k/n | +-", "{eps:g} | {rule} | {layer} | {k/n:.3f}"
    return [table_of("mean k/n", heads, cells + " | {k/n_error:.3f}", data["rows"])]


def draw(data: dict[str, Any]) -> Any:
    """Draw mean k/n per layer and rule."""
    figure, axes = panels(len(EPS), sharey=True)
    for eps, axis in zip(EPS, axes, strict=True):
        rows = [row for row in data["rows"] if row["eps"] == eps]
        lines(axis, rows, "rule", "layer", "k/n", f"eps = {eps:g}", "")
    return legend(figure, axes[0])
