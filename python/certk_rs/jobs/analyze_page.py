"""The analysis of caches as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .. import __version__, gaussian
from .._display.page import Section, Table, legend_beside, page, panels, plain_ticks, svg
from .analyze import PER_QUERY, PRUNE, PRUNE_A_LITTLE, CacheAnalysis

HEADS = (
    "head", "sigma", "k/n", "rule", "1 gap", "8 cuts", "one set", "advice", "at least",
    "effective", "1/sum P^2",
)  # fmt: skip
LAYERS = "By layer: mean k/n (how far the Gaussian rule is off in the mean)"
ADVISED = (
    f"prune: one set of at most {PRUNE:g} of the keys serves all queries of the head; prune a "
    f"little: of at most {PRUNE_A_LITTLE:g}; per query: no such set, but a query on its own needs "
    f"at most {PER_QUERY:g}, so select anew for each; leave dense: neither."
)
# What a terminal of 80 columns has room for.
NARROW = 8


def cells(found: CacheAnalysis) -> list[list[str]]:
    """The table of one cache at its main budget, a row per head."""
    return [
        [
            f"{head.layer}.{head.head}",
            f"{head.sigma:.2f}" if head.sigma < 1000 else f"{head.sigma:.3g}",
            f"{head.kept[found.main]:.3f}",
            f"{head.predicted[found.main]:.3f}",
            f"{head.single_gap:.3f}",
            f"{head.multi_gap:.3f}",
            f"{head.shared:.3f}",
            head.advice,
            f"{head.shared_lower_bound:.3f}",
            f"{head.effective_entries:.1f}",
            f"{head.participation:.1f}",
        ]
        for head in found.heads
    ]


def layer_heads(found: CacheAnalysis) -> list[str]:
    """What `layer_cells` has in its columns."""
    return ["layer", "heads", *(f"eps = {budget:g}" for budget in found.eps), "one set"]


def layer_cells(found: CacheAnalysis) -> list[list[str]]:
    """A row per layer and one for all: k/n (how far off the rule is) by budget, and one set."""
    return [
        [
            name,
            str(means.heads),
            *(f"{k:.3f} ({off:.3f})" for k, off in zip(means.kept, means.rule_error, strict=True)),
            f"{means.shared:.3f}",
        ]
        for name, means in [
            *((str(layer), means) for layer, means in found.layers().items()),
            ("all", found.all()),
        ]
    ]


def analysis_page(found: Sequence[CacheAnalysis]) -> str:
    """The page; needs matplotlib."""
    sections = [_section(cache, f"cache-{i}") for i, cache in enumerate(found)]
    lead = (
        "How many keys the rows of a cache need, by layer and head. k/n is the share of its "
        "visible keys that a row must keep so that what it drops weighs no more than the budget; "
        "one set is the share that all looked-at rows of a head need together. Queries that are "
        "not in the file are not covered."
    )
    return page("certk analyze", lead, sections, f"certk_rs {__version__}")


def _section(found: CacheAnalysis, anchor: str) -> Section:
    main, heads = found.main, found.heads
    least, most = (f(heads, key=lambda head: head.kept[main]) for f in (min, max))
    worst = max(heads, key=lambda head: abs(head.kept[main] - head.predicted[main]))
    text = [
        f"{len(heads)} query heads, budgets {', '.join(f'{e:g}' for e in found.eps)}; the gaps, "
        f"one set and the advice are at {found.eps[main]:g}. Advice: {found.advice()}. {ADVISED}",
        f"At {found.eps[main]:g} rows need {found.all().kept[main]:.3f} of their keys in the mean, "
        f"from {least.kept[main]:.3f} (head {least.layer}.{least.head}) to {most.kept[main]:.3f} "
        f"(head {most.layer}.{most.head}). The Gaussian rule is off by "
        f"{found.all().rule_error[main]:.3f} in the mean; it is worst for head {worst.layer}."
        f"{worst.head}, where it says {worst.predicted[main]:.3f} and rows need "
        f"{worst.kept[main]:.3f}. One set per head takes {found.all().shared:.3f} in the mean.",
    ]
    plots = [_map(found), _rule(found), _rules(found)]
    tables = [
        Table(layer_heads(found), layer_cells(found), LAYERS),
        Table(HEADS, cells(found), f"By layer.head, at eps = {found.eps[main]:g}"),
    ]
    return Section(found.path.name, text, plots, tables, anchor)


def _map(found: CacheAnalysis) -> str:
    """k/n by layer and head, a panel per budget."""
    layers = sorted({head.layer for head in found.heads})
    most = max(head.head for head in found.heads) + 1
    figure, axes = panels(
        1, len(found.eps), figsize=(3 * len(found.eps) + 1, 0.28 * len(layers) + 1.8),
        squeeze=False, sharey=True,
    )  # fmt: skip
    for i, (budget, axis) in enumerate(zip(found.eps, axes[0], strict=True)):
        grid = np.full((len(layers), most), np.nan)
        for head in found.heads:
            grid[layers.index(head.layer), head.head] = head.kept[i]
        image = axis.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axis.set(title=f"eps = {budget:g}", xlabel="head")
        axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes[0][0].set_ylabel("layer")
    step = -(-len(layers) // 32)
    axes[0][0].set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    figure.colorbar(image, ax=axes[0].tolist(), label="mean k/n")
    figure.suptitle("keys that a row of each head needs", fontsize=11)
    return svg(figure)


def _rule(found: CacheAnalysis) -> str:
    """k/n against sigma, with the Gaussian rule."""
    figure, axis = panels(figsize=(7.5, 3.8))
    widest = max(head.sigma for head in found.heads)
    sigma = np.linspace(0, (1.1 * widest + 0.1) ** 0.5, 200) ** 2
    for i, budget in enumerate(found.eps):
        [line] = axis.plot(sigma, gaussian.keep_fraction(sigma, budget), label=f"eps = {budget:g}")
        axis.scatter(
            [head.sigma for head in found.heads],
            [head.kept[i] for head in found.heads],
            s=12, color=line.get_color(), alpha=0.7,
        )  # fmt: skip
    axis.set(
        title="keys that the Gaussian rule predicts (lines), and heads need (points)",
        xlabel="standard deviation of a row's scores (natural-log units), square-root scale",
        ylabel="mean k/n", ylim=(0, 1.02),
    )  # fmt: skip
    # A few heads of large sigma would squeeze all others into a corner.
    axis.set_xscale("function", functions=(lambda x: np.sqrt(np.maximum(x, 0)), np.square))
    axis.set_xlim(0, sigma[-1])
    marks = [d * 10.0**e for e in range(-1, 4) for d in (1, 2, 5)]
    shown = [x for x in marks if x <= sigma[-1] and x >= sigma[-1] / 30]
    plain_ticks(axis.xaxis, [0, *shown])
    legend_beside(axis)
    return svg(figure)


def _rules(found: CacheAnalysis) -> str:
    """Exact selection, bounds and shared sets, layer by layer."""
    layers = sorted({head.layer for head in found.heads})
    series = {
        "each row on its own": [head.kept[found.main] for head in found.heads],
        "8 cuts (bound)": [head.multi_gap for head in found.heads],
        "1 gap (bound)": [head.single_gap for head in found.heads],
        "one set per head": [head.shared for head in found.heads],
    }
    figure, axis = panels(figsize=(max(7.5, 0.3 * len(layers)), 3.8))
    width = 0.8 / len(series)
    for i, (name, values) in enumerate(series.items()):
        means = [
            float(np.mean([v for v, h in zip(values, found.heads, strict=True) if h.layer == x]))
            for x in layers
        ]
        axis.bar(np.arange(len(layers)) + (i - 1.5) * width, means, width, label=name)
    axis.set_xticks(range(len(layers)), [str(layer) for layer in layers])
    axis.set(
        title=f"keys that each way keeps, eps = {found.eps[found.main]:g}", xlabel="layer",
        ylabel="mean share of the visible keys", ylim=(0, 1.02),
    )  # fmt: skip
    legend_beside(axis)
    return svg(figure)
