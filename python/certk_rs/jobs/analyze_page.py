"""The analysis of caches as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .. import __version__, gaussian
from .._display.page import Section, Table, legend_beside, page, panels, plain_ticks, svg
from .aggregate import QUANTILES, Aggregate, Together
from .analysis import Analysis
from .analyze_cache import PER_QUERY, PRUNE, PRUNE_A_LITTLE, CacheAnalysis
from .effective_watch import Watch, shown_lengths, watch_cells, watch_heads
from .prefixes import STANDS_FOR

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
# Files that get a section of their own in a page.
SECTIONS = 24
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


def together_heads(by_head: bool) -> list[str]:
    """What `together_cells` has in its columns."""
    quantiles = [f"{100 * q:g} %" for q in QUANTILES]
    kind = "head" if by_head else "layer"
    return [kind, "files", "k/n", "one set", *quantiles, "worst", "in", "advice"]


def together_cells(found: Aggregate, by_head: bool) -> list[list[str]]:
    """A row per layer and head, or one per layer and one for all: over all files."""
    every = [*found.layers, *([] if found.all is None else [found.all])]
    rows = found.heads if by_head else every
    return [
        [
            _called(each),
            str(each.files),
            f"{each.kept[found.main].mean:.3f}",
            f"{each.shared.mean:.3f}",
            *(f"{quantile:.3f}" for quantile in each.shared.quantiles),
            f"{each.shared.worst:.3f}",
            each.shared.worst_in,
            each.advised(),
        ]
        for each in rows
    ]


def _called(each: Together) -> str:
    if each.layer is None:
        return "all"
    return str(each.layer) if each.head is None else f"{each.layer}.{each.head}"


def hot_heads() -> list[str]:
    """What `hot_cells` has in its columns."""
    return ["stays", "missed", "10 % miss", "miss nothing"]


def hot_cells(found: CacheAnalysis) -> list[list[str]]:
    """A row per share of the keys that stay."""
    return [
        [f"{each.stays:.3f}", f"{each.missed:.4f}", f"{each.worst:.4f}", f"{each.never:.3f}"]
        for each in found.hot
    ]


def said_of_hot(found: CacheAnalysis) -> str:
    """What the curve of hot keys is about."""
    return (
        f"With a guard and recall: the keys that the earlier half of the queries needs most often "
        f"stay (more in heads that need more), at eps = {found.eps[found.main]:g} the later half "
        "misses so many of the others, as a share of a kv head's keys: in the mean, and what a "
        "tenth of the queries exceed."
    )


def watches_of(found: CacheAnalysis) -> list[tuple[int, Watch]]:
    """The layer of each head, and what was seen of it by length."""
    return [(head.layer, head.watch) for head in found.heads]


def said_of_lengths(found: CacheAnalysis) -> list[str]:
    """What the table by length has in its columns, and what follows from it, a paragraph each."""
    eps, watches = found.eps[found.main], watches_of(found)
    normal = max(one.smallest_normal for _, one in watches)
    said = [
        "k, 1/sum P^2: the power of n that they grow by; weight: exp(-sigma^2/2)/n, a typical "
        f"one at the longest n; small: the share of keys below {normal:.2g}, the smallest normal "
        "number of the cache's dtype; mass: what these weigh in the worst row.",
        f"With the length of a row: {found.growth()}.",
    ]
    names = [f"{head.layer}.{head.head}" for head in found.heads if head.watch.more_precision]
    if names:
        said.append(
            f"More precision is due where weights are stored in this dtype: those too small for "
            f"it weigh more than {eps:g} in {len(names)} heads ({', '.join(names[:8])}"
            f"{', ...' if len(names) > 8 else ''})."
        )
    return said if found.causal else [*said, STANDS_FOR]


def said_of(found: CacheAnalysis) -> str:
    """One file in a line."""
    every = found.all()
    return (
        f"{found.path}: at eps = {found.eps[found.main]:g} rows of {every.heads} heads need "
        f"{every.kept[found.main]:.3f} of their keys, one set per head {every.shared:.3f}; "
        f"advice: {found.advice()}"
    )


def said_of_all(found: Analysis) -> str:
    """All files in a line."""
    every = len(found.caches) + len(found.failures)
    said = f"{len(found.caches)} of {every} files analyzed"
    if (together := found.aggregate().all) is not None:
        kept, shared = together.kept[found.main], together.shared
        said += (
            f"; at eps = {found.eps[found.main]:g} rows need {kept.mean:.3f} of their keys in the "
            f"mean, one set per head {shared.mean:.3f} (worst {shared.worst:.3f}, in "
            f"{shared.worst_in}); advice: {together.advised()}"
        )
    return f"{said}."


def analysis_page(found: Analysis) -> str:
    """The page; needs matplotlib. Of many files those that need most have sections of their own."""
    shown: Sequence[int] = range(len(found.caches))
    sections = []
    if len(shown) > 1 or found.failures:
        shown = _shown(found)
        sections.append(_together(found, len(shown)))
    sections += [_section(found.caches[i], f"cache-{i}") for i in shown]
    lead = (
        "How many keys the rows of a cache need, by layer and head. k/n is the share of its "
        "visible keys that a row must keep so that what it drops weighs no more than the budget; "
        "one set is the share that all looked-at rows of a head need together. Queries that are "
        "not in the file are not covered."
    )
    return page("certk analyze", lead, sections, f"certk_rs {__version__}")


def _shown(found: Analysis) -> Sequence[int]:
    """The files that get sections: all, or those of which one set takes most, in their order."""
    shared = np.array([cache.all().shared for cache in found.caches])
    if len(shared) <= SECTIONS:
        return range(len(shared))
    most: list[int] = np.sort(np.argsort(-shared, kind="stable")[:SECTIONS]).tolist()
    return most


def _together(found: Analysis, sections: int) -> Section:
    """All files together, those that failed, and a row for each of the others."""
    every = found.aggregate()
    text = [
        said_of_all(found),
        f"Budgets {', '.join(f'{e:g}' for e in found.eps)}; one set and the advice are at "
        f"{found.eps[found.main]:g}. Means, quantiles and the worst are over files, in the rows of "
        "layers over their heads in all files.",
    ]
    if sections < len(found.caches):
        text.append(
            f"The {sections} files of which one set takes most have sections of their own below; "
            "--json has all."
        )
    rows = [
        [name.path, str(means.heads), f"{means.kept[found.main]:.3f}", f"{means.shared:.3f}", said]
        for name, means, said in ((each, each.all(), each.advice()) for each in found.caches)
    ]
    tables = [
        Table(together_heads(False), together_cells(every, False), "All files, by layer"),
        Table(together_heads(True), together_cells(every, True), "All files, by layer.head"),
        Table(["file", "heads", "k/n", "one set", "advice"], rows, "By file"),
    ]
    if found.failures:
        bad = [[each.source, each.message] for each in found.failures]
        tables.append(Table(["file", "what is wrong"], bad, "Files that could not be analyzed"))
    plots = [_together_map(every)] if every.heads else []
    return Section("All files", text, plots, tables, "all-files")


def _together_map(found: Aggregate) -> str:
    """What one set takes by layer and head: in the mean over files, and in the worst."""
    layers = [each.layer for each in found.layers]
    most = max(each.head or 0 for each in found.heads) + 1
    figure, axes = panels(1, 2, figsize=(8, 0.28 * len(layers) + 1.8), squeeze=False, sharey=True)
    for axis, title in zip(axes[0], ("mean over files", "worst file"), strict=True):
        grid = np.full((len(layers), most), np.nan)
        for each in found.heads:
            value = each.shared.mean if title.startswith("mean") else each.shared.worst
            grid[layers.index(each.layer), each.head or 0] = value
        image = axis.imshow(grid, vmin=0, vmax=1, aspect="auto", cmap="viridis")
        axis.set(title=title, xlabel="head")
        axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes[0][0].set_ylabel("layer")
    step = -(-len(layers) // 32)
    axes[0][0].set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    figure.colorbar(image, ax=axes[0].tolist(), label="one set / n")
    figure.suptitle(f"share of the keys in one set, eps = {found.eps[found.main]:g}", fontsize=11)
    return svg(figure)


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
    plots = [_map(found), _rule(found), _rules(found), _lengths(found)]
    if found.hot:
        plots.append(_hot(found))
        text.append("Hot keys: " + said_of_hot(found))
    watches = watches_of(found)
    lengths = shown_lengths([one for _, one in watches])
    text += ["By length: " + " ".join(said_of_lengths(found))]
    tables = [
        Table(layer_heads(found), layer_cells(found), LAYERS),
        Table(HEADS, cells(found), f"By layer.head, at eps = {found.eps[main]:g}"),
        Table(
            watch_heads(lengths),
            watch_cells(watches, lengths),
            f"By length: keys that weigh at least {found.eps[main]:g}, and how the others grow and "
            "weigh",
        ),
    ]
    if found.hot:
        tables.append(Table(hot_heads(), hot_cells(found), "Hot keys, and what is missed"))
    return Section(found.name, text, plots, tables, anchor)


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
    step = 1 if len(layers) <= 16 else 2  # labels of two digits need room
    width = 0.8 / len(series)
    for i, (name, values) in enumerate(series.items()):
        means = [
            float(np.mean([v for v, h in zip(values, found.heads, strict=True) if h.layer == x]))
            for x in layers
        ]
        axis.bar(np.arange(len(layers)) + (i - 1.5) * width, means, width, label=name)
    axis.set_xticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    axis.set(
        title=f"keys that each way keeps, eps = {found.eps[found.main]:g}", xlabel="layer",
        ylabel="mean share of the visible keys", ylim=(0, 1.02),
    )  # fmt: skip
    legend_beside(axis)
    return svg(figure)


def _lengths(found: CacheAnalysis) -> str:
    """Keys needed against the length of a row, a line per layer."""
    figure, axis = panels(figsize=(7.5, 3.8))
    longest = [2.0, 2.0]
    for layer in found.layers():
        own = [each for number, one in watches_of(found) if number == layer for each in one.lengths]
        sizes = sorted({each.n for each in own})
        needed = [float(np.mean([each.k for each in own if each.n == n])) for n in sizes]
        axis.plot(sizes, needed, marker="o", markersize=3, label=f"layer {layer}")
        longest = [min(longest[0], *sizes), max(longest[1], *sizes)] if sizes else longest
    axis.plot(longest, longest, color="#999", linestyle=":", label="all keys")
    axis.set(
        title=f"keys that a row needs as it grows, eps = {found.eps[found.main]:g}",
        xlabel="keys before the row, n", ylabel="mean k",
    )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    if len(found.layers()) <= 16:
        legend_beside(axis)
    return svg(figure)


def _hot(found: CacheAnalysis) -> str:
    """What later queries miss, against the share of the keys that stays."""
    figure, axis = panels(figsize=(7.5, 3.8))
    stays = [each.stays for each in found.hot]
    axis.plot(stays, [each.missed for each in found.hot], marker="o", label="mean")
    axis.plot(
        stays, [each.worst for each in found.hot], marker="o", linestyle=":", label="10 % miss more"
    )
    axis.axhline(
        found.all().kept[found.main], color="#999", linestyle="--", label="a query's own set"
    )
    axis.set(
        title=f"keys that later queries miss, eps = {found.eps[found.main]:g}",
        xlabel="share of the keys that stays", ylabel="share missed", xlim=(0, None),
        ylim=(0, None),
    )  # fmt: skip
    legend_beside(axis)
    return svg(figure)
