"""Experiment 3: how many keys each bound proves to be enough, on the same real rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import bounds, selection
from .._display.page import Table, legend_below, panels, pyplot, svg
from .settings import (
    Head,
    Settings,
    Tell,
    bars,
    described,
    mean,
    real_heads,
    require_at_most,
    standard_error,
)

NAME = "gap-rules"
TITLE = "Single gap, multi-gap, blocks, exact: k/n on real rows"
ABOUT = (
    "Each rule keeps the top k for the smallest k that it can prove to be enough. The single gap "
    "reads two scores, the multi-gap one more per cut, the blockwise rule the largest and smallest "
    "score of each block of 16 keys in order of position (blocks of 16 consecutive keys are ours); "
    "exact sums the weights. Intervals are two standard errors over the heads of a layer."
)
NEEDS: tuple[str, ...] = ()
EPS = (0.1, 0.01)
CUTS = (2, 4, 8, 16)
BLOCK = 16
BLOCKS = f"blocks of {BLOCK}"


def run(settings: Settings, tell: Tell) -> dict[str, Any]:
    """Each rule on each row."""
    heads = real_heads(settings.data, 4 if settings.brief else 16)
    rows: list[dict[str, Any]] = []
    for i, head in enumerate(heads):
        for eps in EPS:
            enough = {"exact": selection.select(head.scores, eps).k}
            enough["single gap"] = bounds.smallest_k(head.scores, eps, rule="single_gap")
            for cuts in CUTS:
                enough[f"multi-gap, {cuts} cuts"] = bounds.smallest_k(
                    head.scores, eps, rule="multi_gap", n_cuts=cuts
                )
            lost = {rule: _lost(head, k) for rule, k in enough.items()}
            # Whole blocks are not the best keys, and lose what they lose.
            given = zip(head.scores, head.visible, strict=True)
            by_blocks = [_blocks(row[:n], eps) for row, n in given]
            enough[BLOCKS], lost[BLOCKS] = map(np.array, zip(*by_blocks, strict=True))
            for rule, mass in lost.items():
                require_at_most(f"the budget of the rule {rule!r}", mass, eps)
            kept = {rule: mean(k / head.visible) for rule, k in enough.items()}
            rows.append({"layer": head.layer, "head": head.head, "eps": eps, "kept": kept})
        tell((i + 1) / len(heads))
    at = [row["kept"] for row in rows if row["eps"] == EPS[0]]
    means = {rule: mean([kept[rule] for kept in at]) for rule in at[0]}
    # Rows of equal scores need what every rule keeps: nothing is in vain then, nor saved.
    vain = (means["single gap"] - means["exact"]) or 1.0
    saved = {n: (means["single gap"] - means[f"multi-gap, {n} cuts"]) / vain for n in CUTS}
    most = f"multi-gap, {CUTS[-1]} cuts"
    seen = (
        f"At eps = {EPS[0]:g} rows need {means['exact']:.3f} of the keys; the single gap keeps "
        f"{means['single gap']:.3f}, {CUTS[-1]} cuts {means[most]:.3f} and blocks "
        f"{means[BLOCKS]:.3f}. Of the keys that the single gap keeps in vain, "
        f"{', '.join(f'{n} cuts save {100 * share:.0f} %' for n, share in saved.items())}."
    )
    return {"seen": seen, "about": described(settings, prefixes=False), "rows": rows}


def _lost(head: Head, k: NDArray[Any]) -> NDArray[np.float64]:
    """The mass that the best k keys of each row leave, by sums in float64."""
    weights = -np.sort(-np.exp(head.scores - head.scores.max(axis=1, keepdims=True)), axis=1)
    # Small terms first.
    left = np.cumsum(weights[:, ::-1], axis=1)[:, ::-1]
    left = np.concatenate([left, np.zeros((len(left), 1))], axis=1)
    return np.asarray(np.take_along_axis(left, k[:, None], 1)[:, 0] / left[:, 0])


def _blocks(row: NDArray[np.float64], eps: float) -> tuple[int, float]:
    """Keys of the fewest whole blocks, those of largest upper bound, that block bounds prove.

    With the mass that they lose.

    The last block is short where n is no multiple of BLOCK: a key that is in no block would weigh
    nothing.
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
    lost = mass[order[high:]].sum() / mass.sum()
    return int(sizes[order[:high]].sum()), float(lost)


def plots(data: dict[str, Any]) -> list[str]:
    """Mean k/n per layer and rule."""
    rules = list(data["rows"][0]["kept"])
    layers = sorted({row["layer"] for row in data["rows"]})
    figure, axes = panels(1, len(EPS), figsize=(9.5, 4.2), sharey=True)
    cuts = [rule for rule in rules if rule.startswith("multi-gap")]
    shades = pyplot().get_cmap("Blues")(np.linspace(0.35, 0.9, len(cuts)))
    colours = {rule: "#d95f02" if rule == "single gap" else "#1b9e77" for rule in rules}
    colours |= {"exact": "black", **dict(zip(cuts, shades, strict=True))}
    for eps, axis in zip(EPS, axes, strict=True):
        for rule in rules:
            rows = []
            for x in layers:
                kept = [
                    r["kept"][rule] for r in data["rows"] if r["layer"] == x and r["eps"] == eps
                ]
                rows.append({"kept": mean(kept), "kept_error": 2 * standard_error(kept)})
            bars(axis, layers, rows, "kept", label=rule, color=colours[rule])
        axis.set(title=f"eps = {eps:g}", xlabel="layer", ylim=(0, 1.02))
    axes[0].set_ylabel("mean k/n over heads and queries")
    legend_below(figure, *axes[0].get_legend_handles_labels(), ncols=4)
    return [svg(figure)]


def tables(data: dict[str, Any]) -> list[Table]:
    """A row per head and budget."""
    rules = list(data["rows"][0]["kept"])
    rows = [
        (
            f"{r['layer']} {r['head']}",
            f"{r['eps']:g}",
            *(f"{r['kept'][rule]:.3f}" for rule in rules),
        )
        for r in data["rows"]
    ]
    return [Table(("layer head", "eps", *rules), rows)]
