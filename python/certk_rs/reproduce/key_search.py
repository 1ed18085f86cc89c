"""Experiment 8: how many keys a certified search scores, over cells and over codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import bounds, selection
from .._display.page import Table, legend_below, panels, plain_ticks, svg, table_of
from ..key_index import KeyIndex, Over, Rule
from ..results import Rung, SearchResult
from .balls import balls, clustered, consecutive, scored
from .settings import (
    Head,
    Settings,
    Tell,
    bars,
    described,
    lengths_up_to,
    mean,
    medians,
    prefix_limit,
    real_heads,
    standard_error,
)

NAME = "key-search"
TITLE = "Search over keys: how many are scored, over cells and over codes"
ABOUT = (
    "A search knows bounds of the scores and computes few of them. The first paper's searches, "
    "Delta_k-Search and MC-Search, run over cells (balls and boxes around 16 consecutive keys; "
    "boxes, and cells of consecutive keys, are ours), "
    "over the codes of an index (one byte an entry), and over both. Beside them: k, the fewest "
    "keys whose dropped mass is within eps when every score is known, and the keys that the gap "
    "rule then keeps. The keys are the first n of each head; each search has one query. Cells get "
    "their best case, too: balls alone, as the paper bounds them, around runs and around clusters "
    "of keys (k-means on a sample), of 8 to 64 keys; a cell costs one product more, with its "
    "centre, which is not counted. Intervals are two standard errors, over "
    "rows for keys scored / k and over heads for n / scored; times are medians and have none."
)
NEEDS: tuple[str, ...] = ()
EPS = (0.1, 0.01)
RULES: dict[Rule, str] = {"mass": "MC-Search", "gap": "Delta_k-Search", "top_k": "true top k"}
OVERS: tuple[Over, ...] = ("cells", "codes", "both")
# What the judge may round; a share of a mass, and a difference of scores.
JUDGE = 1e-12

# Keys to a cell, in the mean, where the partition is varied; longer contexts take k-means too long.
SIZES = (8, 16, 32, 64)
RUNS, CLUSTERS = "runs of keys", "clusters (k-means)"
PARTITIONS = (RUNS, CLUSTERS)
MOST_PARTED = 4096

ALL = "all keys scored"
UNIT = "MC-Search over codes"

Array = NDArray[Any]


def _name(rule: Rule, over: Over) -> str:
    return f"{RULES[rule]} over {over}"


def run(settings: Settings, tell: Tell) -> dict[str, Any]:
    """Each search on each row, at each length."""
    count = 4 if settings.brief else 8
    lengths = lengths_up_to(prefix_limit(settings.data, count), settings.brief)
    rows: list[dict[str, Any]] = []
    times: list[dict[str, Any]] = []
    cells: list[dict[str, Any]] = []
    for i, n in enumerate(lengths):
        heads = real_heads(settings.data, count, n)
        parts = [_head(head, 1 if settings.brief else 3) for head in heads]
        for eps in EPS:
            for rule in RULES:
                for over in OVERS:
                    found = [row for part, _ in parts for row in part[eps, rule, over]]
                    rows.append({"n": n, "eps": eps, "rule": rule, "over": over} | _sum_up(found))
            spent = {name: sum(part[eps][name] for _, part in parts) for name in parts[0][1][eps]}
            ratios = {name: seconds / spent[UNIT] for name, seconds in spent.items()}
            times.append({"n": n, "eps": eps, "ratios": ratios})
        if n <= MOST_PARTED:
            cells += _parted(settings, heads)
        tell((i + 1) / len(lengths))
    return {
        "seen": _seen(rows),
        "notes": [_seen_cells(cells)],
        "about": described(settings, prefixes=True),
        "rows": rows,
        "cells": cells,
        "timing": {"seen": _fast(times), "rows": times},
    }


def _head(
    head: Head, repeat: int
) -> tuple[dict[Any, list[dict[str, float]]], dict[float, dict[str, float]]]:
    """Every search over the keys of a head: a row per query, and median seconds of all."""
    # What a cache stores is exact in float32.
    keys, queries = head.keys.astype(np.float32), head.queries.astype(np.float32)
    index = KeyIndex.build(keys, threads=1)
    scores = head.scores
    rows: dict[Any, list[dict[str, float]]] = {}
    spent: dict[float, dict[str, float]] = {}
    for eps in EPS:
        best = selection.select(scores, eps, prove_minimal=True).k
        gap = bounds.smallest_k(scores, eps, rule="single_gap")
        works: dict[str, Callable[[], object]] = {}
        for rule in RULES:
            for over in OVERS:

                def search(
                    rule: Rule = rule, over: Over = over, eps: float = eps, best: Array = best
                ) -> list[SearchResult]:
                    return [
                        index.search(
                            query, eps, scale=head.scale, rule=rule, over=over, threads=1,
                            k=int(k) if rule == "top_k" else None,
                        )
                        for query, k in zip(queries, best, strict=True)
                    ]  # fmt: skip

                works[_name(rule, over)] = search
                rows[eps, rule, over] = [
                    {
                        "k": float(k),
                        "gap": float(gap_k) / k,
                        "kept": float(found.k) / k,
                        "scored": float(found.scored) / k,
                        "fewer": float(found.scored) / len(row),
                        "fewest": float(k) / len(row),
                        "full": bool(found.rung == Rung.DENSE),
                        "wrong": _wrong(row, found, rule, eps, int(k)),
                    }
                    for row, k, gap_k, found in zip(scores, best, gap, search(), strict=True)
                ]

        def dense(eps: float = eps) -> None:
            for query in queries:
                # Not a product by BLAS, whose threads make it now fast, now slow.
                selection.select(
                    np.einsum("nd,d->n", keys, query), eps, scale=head.scale, threads=1
                )

        dense()
        spent[eps] = medians({**works, ALL: dense}, repeat)
    return rows, spent


def _parted(settings: Settings, heads: list[Head]) -> list[dict[str, Any]]:
    """MC-Search over balls around runs and around clusters of keys, for cells of several sizes."""
    rows = []
    n = len(heads[0].keys)
    for size in SIZES:
        for partition in PARTITIONS:
            found: dict[float, list[float]] = {eps: [] for eps in EPS}
            count = []
            for i, head in enumerate(heads):
                if partition == CLUSTERS:
                    of = clustered(head.keys, size, settings.random(8, n, size, i))
                else:
                    of = consecutive(n, size)
                cells = balls(head.keys, of)
                count.append(len(cells.sizes))
                upper = cells.upper(head.queries, head.scale)
                for eps in EPS:
                    found[eps].append(mean(scored(head.scores, upper, cells, eps)) / n)
            for eps, shares in found.items():
                share, error = mean(shares), standard_error(shares)
                rows.append(
                    {
                        **{"n": n, "eps": eps, "size": size, "partition": partition},
                        **{"cells": mean(count), "fewer": 1 / share},
                        # Of a quotient, to first order.
                        "fewer_error": 2 * error / share**2,
                    }
                )
    return rows


def _seen_cells(cells: list[dict[str, Any]]) -> str:
    n, eps = max(row["n"] for row in cells), EPS[-1]
    parts = []
    for partition in PARTITIONS:
        at = [r for r in cells if (r["n"], r["eps"], r["partition"]) == (n, eps, partition)]
        shown = ", ".join(f"{row['fewer']:.2f} ({row['size']})" for row in at)
        parts.append(f"{shown} for {partition}")
    return (
        f"Over balls alone, as in the paper, n / scored of MC-Search at n = {n} and eps = {eps:g} "
        f"is, by keys to a cell, {'; '.join(parts)}."
    )


def _wrong(scores: Array, found: SearchResult, rule: Rule, eps: float, k: int) -> bool:
    """Whether a set is not what its rule promises, by all scores of the row in float64."""
    kept = np.zeros(len(scores), bool)
    kept[found.row(())] = True
    if rule == "top_k":
        if kept.sum() != k:
            return True
        return bool(scores[kept].min() < scores[~kept].max(initial=-np.inf) - JUDGE)
    weights = np.exp(scores - scores.max())
    return bool(weights[~kept].sum() > eps * (1 + JUDGE) * weights.sum())


def _sum_up(found: list[dict[str, float]]) -> dict[str, Any]:
    part = [row["scored"] for row in found if not row["full"]]
    return {
        **{what: mean([row[what] for row in found]) for what in ("k", "gap", "kept", "scored")},
        # Of the mean share that is scored: as many times fewer keys are scored in all.
        "fewer": 1 / mean([row["fewer"] for row in found]),
        "fewest": 1 / mean([row["fewest"] for row in found]),
        "scored_error": 2 * standard_error([row["scored"] for row in found]),
        "worst": max(row["scored"] for row in found),
        "full": sum(row["full"] for row in found),
        "in_part": mean(part) if part else None,
        "worst_in_part": max(part) if part else None,
        "wrong": sum(row["wrong"] for row in found),
        "searches": len(found),
    }


def _seen(rows: list[dict[str, Any]]) -> str:
    n, eps = rows[-1]["n"], EPS[-1]
    at = {(r["rule"], r["over"]): r for r in rows if r["n"] == n and r["eps"] == eps}
    codes, cells = at["mass", "codes"], at["mass", "cells"]
    wrong, searches = sum(r["wrong"] for r in rows), sum(r["searches"] for r in rows)
    others = (
        ""
        if codes["in_part"] is None
        else f", the others {codes['in_part']:.3f} k (at worst {codes['worst_in_part']:.3f})"
    )
    return (
        f"At n = {n} and eps = {eps:g} rows need k = {codes['k']:.1f} keys in the mean. Over codes "
        f"MC-Search scores {codes['scored']:.3f} k in the mean (at worst {codes['worst']:.3f}): "
        f"{codes['full']} of {codes['searches']} rows are scored in full{others}; over cells it "
        f"scores {cells['scored']:.2f} k. Delta_k-Search scores {at['gap', 'codes']['scored']:.2f} "
        f"k over codes and {at['gap', 'cells']['scored']:.2f} k over cells, since its rule keeps "
        f"{codes['gap']:.2f} k even when every score is known. To prove the true top k takes "
        f"{at['top_k', 'codes']['scored']:.3f} k over codes, {at['top_k', 'cells']['scored']:.2f} "
        f"k over cells. In times fewer keys than n, as the paper counts, MC-Search scores n / "
        f"{codes['fewer']:.2f} over codes and n / {cells['fewer']:.2f} over cells, Delta_k-Search "
        f"n / {at['gap', 'codes']['fewer']:.2f} and n / {at['gap', 'cells']['fewer']:.2f}; the "
        f"paper reports 2 to 4 for its model. Of {searches} sets found, {wrong} break their "
        "promise by the scores in float64."
    )


def _fast(times: list[dict[str, Any]]) -> str:
    at = {name: f"{ratio:.2f}" for name, ratio in times[-1]["ratios"].items()}
    return (
        "There, in units of the time of MC-Search over codes, MC-Search takes "
        f"{at[_name('mass', 'cells')]} over cells, Delta_k-Search {at[_name('gap', 'codes')]} over "
        f"codes and {at[_name('gap', 'cells')]} over cells, the true top k "
        f"{at[_name('top_k', 'codes')]} and {at[_name('top_k', 'cells')]}; to score every key in "
        f"float32 by numpy.einsum and select, which proves nothing about products, takes {at[ALL]} "
        "(medians of interleaved repetitions, one thread, indices built beforehand; machines "
        "differ, and so do these ratios)."
    )


STYLES: dict[Rule, dict[str, Any]] = {
    "mass": {"color": "#1b9e77", "marker": "o", "ms": 5, "lw": 2},
    "gap": {"color": "#d95f02", "marker": "s", "ms": 3.5, "ls": "--"},
    "top_k": {"color": "#7570b3", "marker": "x", "ms": 5, "ls": ":"},
}


def plots(data: dict[str, Any]) -> list[str]:
    """Keys scored per key needed, against n."""
    lengths = sorted({row["n"] for row in data["rows"]})
    figure, axes = panels(len(EPS), len(OVERS), figsize=(9.5, 6.2), sharex=True, sharey=True)
    for i, eps in enumerate(EPS):
        for j, over in enumerate(OVERS):
            axis = axes[i, j]
            at = [row for row in data["rows"] if row["eps"] == eps and row["over"] == over]
            gap = [row for row in at if row["rule"] == "gap"]
            axis.plot(
                lengths,
                [row["gap"] for row in gap],
                color="#bbb",
                lw=5,
                label="kept by the gap rule, all known",
            )
            axis.axhline(1, color="black", lw=0.8, label="k, the fewest keys that will do")
            for rule, name in RULES.items():
                of = [row for row in at if row["rule"] == rule]
                bars(axis, lengths, of, "scored", **STYLES[rule], label=name)
            axis.set(xscale="log", yscale="log", title=f"over {over}, eps = {eps:g}")
        axes[i, 0].set_ylabel("mean of keys scored / k")
    for axis in axes[-1]:
        axis.set_xlabel("n")
        plain_ticks(axis.xaxis, lengths[:: -(-len(lengths) // 4)])
    figure.get_layout_engine().set(wspace=0.06)
    most = max(max(row["scored"], row["gap"]) for row in data["rows"])
    ticks = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    plain_ticks(axes[0, 0].yaxis, [tick for tick in ticks if tick < 1.3 * most])
    legend_below(figure, *axes[0, 0].get_legend_handles_labels(), ncols=3)
    drawn = [svg(figure)]
    n = max(row["n"] for row in data["cells"])
    figure, axes = panels(1, len(EPS), figsize=(9.5, 4), sharey=True)
    for axis, eps in zip(axes, EPS, strict=True):
        for partition in PARTITIONS:
            at = [r for r in data["cells"] if (r["n"], r["eps"]) == (n, eps)]
            at = [row for row in at if row["partition"] == partition]
            bars(axis, SIZES, at, "fewer", label=f"balls, {partition}")
        known = {(r["rule"], r["over"]): r for r in data["rows"] if (r["n"], r["eps"]) == (n, eps)}
        for over, colour in (("cells", "#d95f02"), ("codes", "#1b9e77")):
            label = "balls and boxes, runs of 16" if over == "cells" else "codes"
            axis.axhline(known["mass", over]["fewer"], color=colour, ls="--", lw=1, label=label)
        axis.axhline(known["mass", "codes"]["fewest"], color="black", lw=0.8, label="n / k")
        axis.set(title=f"n = {n}, eps = {eps:g}", xlabel="keys to a cell", xscale="log")
        plain_ticks(axis.xaxis, SIZES)
    axes[0].set(ylabel="n / keys scored by MC-Search", ylim=(0, None))
    legend_below(figure, *axes[0].get_legend_handles_labels(), ncols=3)
    drawn.append(svg(figure))
    return drawn


def tables(data: dict[str, Any]) -> list[Table]:
    """A row per length, budget, rule and kind of bounds; and times."""
    found = table_of(
        "search | over | n | eps | mean k | gap rule / k | kept / k | scored / k | +- | "
        "n / scored | worst | in full | broken",
        "{search} | {over} | {n} | {eps:g} | {k:.1f} | {gap:.2f} | {kept:.3f} | {scored:.3f} | "
        "{scored_error:.3f} | {fewer:.2f} | {worst:.3f} | {full} of {searches} | {wrong}",
        [{"search": RULES[row["rule"]], **row} for row in data["rows"]],
        "keys scored",
    )
    times = data["timing"]["rows"]
    names = list(times[0]["ratios"])
    spent = [
        (str(t["n"]), f"{t['eps']:g}", *(f"{t['ratios'][name]:.2f}" for name in names))
        for t in times
    ]
    parted = table_of(
        "n | eps | partition | keys to a cell | cells | n / scored | +-",
        "{n} | {eps:g} | {partition} | {size} | {cells:.1f} | {fewer:.2f} | {fewer_error:.2f}",
        data["cells"],
        "MC-Search over balls alone",
    )
    return [found, parted, Table(("n", "eps", *names), spent, f"time / that of {UNIT}")]
