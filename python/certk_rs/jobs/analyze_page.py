"""The analysis of caches as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .. import __version__, gaussian
from .._page import Section, Table, page, pyplot, svg
from .analyze import CacheAnalysis

HEADS = (
    "head", "sigma", "k/n", "rule", "1 gap", "8 cuts", "one set", "advice", "at least", "effective",
    "1/sum P^2",
)  # fmt: skip
# What a terminal has room for.
NARROW = 8


def cells(found: CacheAnalysis) -> list[list[str]]:
    """The table of one cache at its main budget, a row per head."""
    return [
        [
            f"{head.layer}.{head.head}",
            f"{head.sigma:.2f}",
            f"{head.kept[found.main]:.3f}",
            f"{head.predicted[found.main]:.3f}",
            f"{head.single_gap:.3f}",
            f"{head.multi_gap:.3f}",
            f"{head.shared:.3f}",
            head.advice,
            f"{head.shared_bound:.3f}",
            f"{head.effective:.1f}",
            f"{head.participation:.1f}",
        ]
        for head in found.heads
    ]


def analysis_page(found: Sequence[CacheAnalysis]) -> str:
    """The page; needs matplotlib."""
    sections = [_section(cache, f"cache-{i}") for i, cache in enumerate(found)]
    lead = (
        "How many keys the rows of a cache need, by layer and head. k/n is the share of its "
        "visible keys that a row must keep so that what it drops weighs no more than the budget; "
        "one set is the share that all looked-at rows of a head need together."
    )
    return page("certk analyze", lead, sections, f"certk_rs {__version__}")


def _section(found: CacheAnalysis, anchor: str) -> Section:
    advice = [head.advice for head in found.heads]
    counts = ", ".join(f"{advice.count(word)} {word}" for word in dict.fromkeys(sorted(advice)))
    text = [
        f"{len(found.heads)} query heads, budgets {', '.join(f'{e:g}' for e in found.eps)}; the "
        f"table, the gaps and the advice are at {found.eps[found.main]:g}. Advice: {counts}."
    ]
    plots = [_map(found), _rule(found), _rules(found)]
    return Section(found.path.name, text, plots, [Table(HEADS, cells(found))], anchor)


def _map(found: CacheAnalysis) -> str:
    """k/n by layer and head, a panel per budget."""
    plt = pyplot()
    layers = sorted({head.layer for head in found.heads})
    most = max(head.head for head in found.heads) + 1
    figure, axes = plt.subplots(
        1, len(found.eps), figsize=(3.2 * len(found.eps) + 1, 0.28 * len(layers) + 1.8),
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for i, (budget, axis) in enumerate(zip(found.eps, axes[0], strict=True)):
        grid = np.full((len(layers), most), np.nan)
        for head in found.heads:
            grid[layers.index(head.layer), head.head] = head.kept[i]
        image = axis.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axis.set(title=f"k/n at eps = {budget:g}", xlabel="head", ylabel="layer")
        axis.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    figure.colorbar(image, ax=axes[0].tolist())
    return svg(figure)


def _rule(found: CacheAnalysis) -> str:
    """k/n against sigma, with the Gaussian rule."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(6.5, 3.8))
    widest = max(head.sigma for head in found.heads)
    sigma = np.linspace(0, 1.1 * widest + 0.1, 200)
    for i, budget in enumerate(found.eps):
        [line] = axis.plot(sigma, gaussian.keep_fraction(sigma, budget), label=f"eps = {budget:g}")
        axis.scatter(
            [head.sigma for head in found.heads],
            [head.kept[i] for head in found.heads],
            s=12, color=line.get_color(), alpha=0.7,
        )  # fmt: skip
    axis.set(
        title="points: heads; lines: the Gaussian rule", xlabel="sigma of the scores (nats)",
        ylabel="k/n", ylim=(0, 1.02),
    )  # fmt: skip
    axis.legend(frameon=False)
    return svg(figure)


def _rules(found: CacheAnalysis) -> str:
    """Exact selection, bounds and shared sets, layer by layer."""
    plt = pyplot()
    layers = sorted({head.layer for head in found.heads})
    series = {
        "exact": [head.kept[found.main] for head in found.heads],
        "multi-gap": [head.multi_gap for head in found.heads],
        "single gap": [head.single_gap for head in found.heads],
        "one set per head": [head.shared for head in found.heads],
    }
    figure, axis = plt.subplots(figsize=(6.5, 3.8))
    width = 0.8 / len(series)
    for i, (name, values) in enumerate(series.items()):
        means = [
            float(np.mean([v for v, h in zip(values, found.heads, strict=True) if h.layer == x]))
            for x in layers
        ]
        axis.bar(np.arange(len(layers)) + (i - 1.5) * width, means, width, label=name)
    axis.set_xticks(range(len(layers)), [str(layer) for layer in layers])
    axis.set(
        title=f"keys that each rule keeps, eps = {found.eps[found.main]:g}", xlabel="layer",
        ylabel="mean k/n", ylim=(0, 1.02),
    )  # fmt: skip
    axis.legend(frameon=False, ncols=2)
    return svg(figure)
