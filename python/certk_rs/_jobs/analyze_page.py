"""The analysis of caches as one self-contained HTML page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from .. import __version__, gaussian
from .._display.page import (
    WIDTH,
    Fold,
    Section,
    Table,
    legend_below,
    page,
    panels,
    plain_ticks,
    svg,
)
from .._display.plots import heat_map
from .._display.tables import tidy
from .analyze import (
    PAYS,
    PER_QUERY,
    PRUNE,
    PRUNE_A_LITTLE,
    QUANTILES,
    Aggregate,
    Analysis,
    CacheAnalysis,
    HeadAnalysis,
    Together,
)

NOT_COVERED = "Queries that are not in the file are not covered."
ADVISED = (
    f"prune: one set of at most {PRUNE:g} of the keys serves all queries of the head; prune a "
    f"little: of at most {PRUNE_A_LITTLE:g}; per query: no such set, but a query on its own needs "
    f"at most {PER_QUERY:g}, so select anew for each; leave dense: neither."
)
# Files that get a section of their own in a page.
SECTIONS = 24


# The columns of the table of heads, of a head and the position of the main budget.
_CELLS: dict[str, Callable[[HeadAnalysis, int], str]] = {
    "head": lambda head, _: f"{head.layer}.{head.head}",
    "sigma": lambda head, _: f"{head.sigma:.2f}" if head.sigma < 1000 else f"{head.sigma:.3g}",
    "k/n": lambda head, main: f"{head.kept[main]:.3f}",
    "rule": lambda head, main: f"{head.predicted[main]:.3f}",
    "1 gap": lambda head, _: f"{head.single_gap:.3f}",
    "8 cuts": lambda head, _: f"{head.multi_gap:.3f}",
    "one set": lambda head, _: f"{head.shared:.3f}",
    "advice": lambda head, _: head.advice,
    "at least": lambda head, _: f"{head.shared_lower_bound:.3f}",
    "effective": lambda head, _: f"{head.effective_entries:.1f}",
    "1/sum P^2": lambda head, _: f"{head.participation:.1f}",
}


def by_head(found: CacheAnalysis) -> tuple[list[str], list[list[str]]]:
    """Return the table of one cache at its main budget: column heads, and a row per head."""
    rows = [[cell(head, found.main) for cell in _CELLS.values()] for head in found.heads]
    return tidy([*_CELLS], rows)


def by_layer(found: CacheAnalysis) -> tuple[list[str], list[list[str]]]:
    """Return the table that is always shown: heads and rows, one per layer and one for all."""
    heads = ["layer", *(f"eps = {budget:g}" for budget in found.eps), "one set", "at least", "pays"]
    rows = [
        [
            name,
            *(f"{k:.3f}" for k in means.kept),
            f"{means.shared:.3f}",
            f"{np.mean([head.shared_lower_bound for head in own]):.3f}",
            f"{sum(head.advice in PAYS for head in own)} of {len(own)}",
        ]
        for name, means, own in [
            *((str(i), means, found.of_layer(i)) for i, means in found.layers().items()),
            ("all", found.all(), found.heads),
        ]
    ]
    return tidy(heads, rows if len(rows) > 2 else rows[:1])


def said_of_layers(found: CacheAnalysis) -> str:
    """Explain the columns of that table."""
    eps = f"{found.eps[found.main]:g}"
    return (
        "Shares of the visible keys, means over heads. eps = ...: what a query needs on its own; "
        f"one set: what all queries of a head need together at eps = {eps}, and at least so much "
        f"by proof; pays: heads in which that is at most {PRUNE_A_LITTLE:g} of the keys."
    )


def said_of_heads(found: CacheAnalysis) -> str:
    """Explain the columns of the table of heads."""
    return (
        f"At eps = {found.eps[found.main]:g}. sigma: standard deviation of a row's scores; k/n: "
        "the share of the keys that a query needs on its own; rule: what the Gaussian rule says "
        "of it by sigma; 1 gap, 8 cuts: what these bounds prove to be enough; one set: what all "
        "queries need together, and at least so much by proof; effective: keys that weigh at "
        "least eps each; 1/sum P^2: how many share the weight."
    )


def verdict(
    advice: Mapping[str, int], eps: float, kept: float, shared: float, causes: str = ""
) -> str:
    """Return the advice to prune or not, in a sentence.

    Args:
        advice: How many heads are given which.
        eps: The budget.
        kept: The share of its keys that a query needs on its own, in the mean.
        shared: The share that one set per head takes, in the mean.
        causes: Where the shares are from, in brackets or empty.
    """
    heads, alone = sum(advice.values()), advice.get("per query", 0)
    pays = sum(advice.get(word, 0) for word in PAYS)
    one, own = f"{100 * shared:.0f} % of the keys{causes}", f"{100 * kept:.0f} %"
    if pays:
        verb = "pays" if 2 * pays > heads else "pays in few heads"
        return (
            f"pruning {verb} at eps = {eps:g}: in {pays} of {heads} heads; one set per head keeps "
            f"{one}, a query on its own needs {own}."
        )
    if alone:
        return (
            f"do not prune at eps = {eps:g}, select keys anew for each query: one set per head "
            f"would keep {one}, a query on its own needs {own} (few in {alone} of {heads} heads)."
        )
    return (
        f"leave it dense at eps = {eps:g}: one set per head would keep {one}, and a query on its "
        f"own needs {own}."
    )


def verdict_on(found: CacheAnalysis) -> str:
    """Return that of one file."""
    every, counts = found.all(), Counter(head.advice for head in found.heads)
    return verdict(counts, found.eps[found.main], every.kept[found.main], every.shared)


def together(found: Aggregate, by_head: bool) -> tuple[list[str], list[list[str]]]:
    """Return the table of all files: a row per layer and head, or one per layer and one for all."""
    quantiles = [f"{100 * q:g} %" for q in QUANTILES]
    kind = "head" if by_head else "layer"
    heads = [kind, "files", "k/n", "one set", *quantiles, "worst", "in", "advice"]
    every = [*found.layers, *([] if found.all is None else [found.all])]
    rows = [
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
        for each in (found.heads if by_head else every)
    ]
    return tidy(heads, rows)


def _called(each: Together) -> str:
    if each.layer is None:
        return "all"
    return str(each.layer) if each.head is None else f"{each.layer}.{each.head}"


def said_of(found: CacheAnalysis) -> str:
    """One file in a line."""
    return f"{found.path}: {verdict_on(found)}"


def said_of_later(found: CacheAnalysis) -> list[str]:
    """Return a sentence for each budget of later queries."""
    return [
        f"Later half of the queries, eps = {each.eps:g}: sets of "
        f"{'some of ' if each.sampled else ''}the earlier half "
        f"({100 * each.kept_bytes / each.cache_bytes:.0f} % of the bytes) lose up to "
        f"{each.lost:.3g}, more than eps in {100 * each.over / each.rows:.0f} % of rows; codes "
        f"({100 * each.code_bytes / each.cache_bytes:.0f} %) at most {each.proven:.3g}, proven."
        for each in found.later
    ]


def said_of_all(found: Analysis) -> str:
    """All files in a line."""
    every = len(found.caches) + len(found.failures)
    said = f"{len(found.caches)} of {every} files"
    if (together := found.aggregate().all) is None:
        return f"{said} could be analyzed."
    kept, shared = together.kept[found.main], together.shared
    worst = f" (worst {100 * shared.worst:.0f} %, in {shared.worst_in})"
    eps = found.eps[found.main]
    return f"{said}: {verdict(dict(together.advice), eps, kept.mean, shared.mean, worst)}"


def said_of_together(found: Analysis) -> str:
    """Explain the columns of the tables of all files."""
    return (
        f"At eps = {found.eps[found.main]:g}, shares of the visible keys. k/n: what a query needs "
        "on its own, in the mean; one set: what all queries of a head need together: the mean, "
        "quantiles and the worst over files (of a layer: over its heads in all files), and the "
        "file that this is in; advice: for how many heads."
    )


def analysis_page(found: Analysis) -> str:
    """Return the page; needs matplotlib. Of many files those that need most have own sections."""
    shown: Sequence[int] = range(len(found.caches))
    sections = []
    if len(shown) > 1 or found.failures:
        shown = _shown(found)
        sections.append(_together(found, len(shown)))
    sections += [_section(found.caches[i], f"cache-{i}") for i in shown]
    return page("certk analyze", "", sections, f"{NOT_COVERED} certk_rs {__version__}")


def _shown(found: Analysis) -> Sequence[int]:
    """Return the files with sections: all, or those of which one set takes most, in their order."""
    shared = np.array([cache.all().shared for cache in found.caches])
    if len(shared) <= SECTIONS:
        return range(len(shared))
    most: list[int] = np.sort(np.argsort(-shared, kind="stable")[:SECTIONS]).tolist()
    return most


def _together(found: Analysis, sections: int) -> Section:
    """All files together, those that failed, and a row for each of the others."""
    every = found.aggregate()
    text = [said_of_all(found)]
    if sections < len(found.caches):
        text.append(
            f"The {sections} files of which one set takes most have sections of their own below; "
            "--json has all."
        )
    rows = [
        [name.path, str(means.heads), f"{means.kept[found.main]:.3f}", f"{means.shared:.3f}", said]
        for name, means, said in ((each, each.all(), each.advice()) for each in found.caches)
    ]
    tables = [Table(*together(every, by_head=False), note=said_of_together(found))]
    if found.failures:
        bad = [[each.source, each.message] for each in found.failures]
        tables.append(Table(["file", "what is wrong"], bad, "Files that could not be analyzed"))
    plots = _together_maps(every) if every.heads else []
    of_heads = Table(*together(every, by_head=True))
    of_files = Table(["file", "heads", "k/n", "one set", "advice"], rows)
    folds = [
        Fold("Each head", [], (), [of_heads]),
        Fold("Each file", [f"Advice, {ADVISED}"], (), [of_files]),
    ]
    return Section("All files", text, plots, tables, "all-files", folds)


def _together_maps(found: Aggregate) -> list[str]:
    """Draw the share of one set by layer and head: the mean over files, and the worst."""
    eps = f"eps = {found.eps[found.main]:g}"
    means = {(each.layer or 0, each.head or 0): each.shared.mean for each in found.heads}
    worst = {(each.layer or 0, each.head or 0): each.shared.worst for each in found.heads}
    return [
        _map(means, f"one set, mean over files, {eps}"),
        *([_map(worst, f"one set, worst file, {eps}")] if worst != means else []),
    ]


def _section(found: CacheAnalysis, anchor: str) -> Section:
    main, heads = found.main, found.heads
    eps = found.eps[main]
    shared = {(head.layer, head.head): head.shared for head in heads}
    said = verdict_on(found)
    table = Table(*by_layer(found), note=said_of_layers(found))
    folds = [_of_heads(found), _of_rules(found)]
    return Section(
        found.name,
        [f"{said[0].upper()}{said[1:]}", *said_of_later(found)],
        [_map(shared, f"keys that one set keeps, eps = {eps:g}")],
        [table],
        anchor,
        folds,
    )


def _of_heads(found: CacheAnalysis) -> Fold:
    """Return the needs of each head: a map per budget, and all figures."""
    plots = [
        _map(
            {(head.layer, head.head): head.kept[i] for head in found.heads},
            f"keys that a query needs, eps = {budget:g}",
        )
        for i, budget in enumerate(found.eps)
    ]
    note = f"{said_of_heads(found)} Advice, {ADVISED}"
    return Fold("Each head", [], plots, [Table(*by_head(found), note=note)])


def _of_rules(found: CacheAnalysis) -> Fold:
    """Compare rules and bounds that know less than all scores."""
    main = found.main
    worst = max(found.heads, key=lambda head: abs(head.kept[main] - head.predicted[main]))
    text = (
        f"At eps = {found.eps[main]:g} the Gaussian rule, which knows sigma alone, is off by "
        f"{found.all().rule_error[main]:.3f} in the mean; it is worst for head {worst.layer}."
        f"{worst.head}, where it says {worst.predicted[main]:.3f} and a query needs "
        f"{worst.kept[main]:.3f}. The bounds know one gap between scores, or sums between 8 cuts. "
        "The scale of sigma is that of its square root."
    )
    return Fold("Rules and bounds", [text], [_rule(found), _rules(found)])


def _map(grid: Mapping[tuple[int, int], float], title: str) -> str:
    """Shares of keys by layer and head."""
    layers = len({layer for layer, _ in grid})
    figure, axis = panels(figsize=(WIDTH, min(9.0, 0.26 * layers + 1.4)))
    heat_map(axis, grid, title, 1.0)
    axis.set_xlabel("query head")
    return svg(figure)


def _rule(found: CacheAnalysis) -> str:
    """k/n against sigma, with the Gaussian rule."""
    figure, axis = panels(figsize=(WIDTH, 3.4))
    widest = max(head.sigma for head in found.heads)
    sigma = np.linspace(0, (1.1 * widest + 0.1) ** 0.5, 200) ** 2
    for i, budget in enumerate(found.eps):
        [line] = axis.plot(sigma, gaussian.keep_fraction(sigma, budget), label=f"eps = {budget:g}")
        axis.scatter(
            [head.sigma for head in found.heads],
            [head.kept[i] for head in found.heads],
            s=12, color=line.get_color(), alpha=0.7,
        )  # fmt: skip
    axis.set(xlabel="standard deviation of a row's scores", ylabel="mean k/n", ylim=(0, 1.02))
    axis.set_title("keys by the rule (lines), and needed (points)", fontsize=10)
    # A few heads of large sigma would squeeze all others into a corner.
    axis.set_xscale("function", functions=(lambda x: np.sqrt(np.maximum(x, 0)), np.square))
    axis.set_xlim(0, sigma[-1])
    marks = [d * 10.0**e for e in range(-1, 4) for d in (1, 2, 5)]
    shown = [x for x in marks if x <= sigma[-1] and x >= sigma[-1] / 30]
    plain_ticks(axis.xaxis, [0, *shown])
    legend_below(figure, ncols=3)
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
    figure, axis = panels(figsize=(WIDTH, 3.4))
    step = -(-len(layers) // 10)  # labels of two digits need room
    width = 0.8 / len(series)
    for i, (name, values) in enumerate(series.items()):
        means = [
            float(np.mean([v for v, h in zip(values, found.heads, strict=True) if h.layer == x]))
            for x in layers
        ]
        axis.bar(np.arange(len(layers)) + (i - 1.5) * width, means, width, label=name)
    axis.set_xticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    axis.set(xlabel="layer", ylabel="mean share of the keys", ylim=(0, 1.02))
    axis.set_title(f"keys that each way keeps, eps = {found.eps[found.main]:g}", fontsize=10)
    legend_below(figure, ncols=2)
    return svg(figure)
