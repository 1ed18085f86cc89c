"""Experiment 8: how many keys a certified search scores, over cells and over codes, on real keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import bounds, selection
from .._page import Table, legend_below, plain_ticks, pyplot, svg
from ..key_index import KeyIndex, Over, Rule
from ..results import SearchResult
from .settings import Head, Settings, Tell, lengths_up_to, mean, medians, real_heads

NAME = "key-search"
TITLE = "Search over keys: how many are scored, over cells and over codes"
ABOUT = (
    "A search knows bounds of the scores and computes few of them. The first paper's searches, "
    "Delta_k-Search and MC-Search, run over cells (balls and boxes around 16 consecutive keys), "
    "over the codes of an index (one byte an entry), and over both. Beside them: k, the fewest "
    "keys whose dropped mass is within eps when every score is known, and the keys that the gap "
    "rule then keeps. The keys are the first n of each head; each search has one query."
)
NEEDS: tuple[str, ...] = ()
EPS = (0.1, 0.01)
RULES: dict[Rule, str] = {"mass": "MC-Search", "gap": "Delta_k-Search", "top_k": "true top k"}
OVERS: tuple[Over, ...] = ("cells", "codes", "both")
# The judge sums in float64; what it rounds is far below this share, and a lost key far above.
JUDGE = 1e-12

Array = NDArray[Any]


def run(settings: Settings, tell: Tell) -> dict[str, Any]:
    """Each search on each row, at each length."""
    heads = real_heads(settings.data, 4 if settings.brief else 8)
    lengths = lengths_up_to(heads[0].keys.shape[0], settings.brief)
    rows: list[dict[str, Any]] = []
    times: list[dict[str, Any]] = []
    for i, n in enumerate(lengths):
        parts = [_head(head, n, 1 if settings.brief else 3) for head in heads]
        for eps in EPS:
            for rule in RULES:
                for over in OVERS:
                    found = [row for part, _ in parts for row in part[eps, rule, over]]
                    rows.append({"n": n, "eps": eps, "rule": rule, "over": over} | _sum_up(found))
                    ours = sum(spent[eps][rule, over] for _, spent in parts)
                    dense = sum(spent[eps]["all"] for _, spent in parts)
                    times.append(
                        {"n": n, "eps": eps, "rule": rule, "over": over, "ratio": ours / dense}
                    )
        tell((i + 1) / len(lengths))
    return {"seen": _seen(rows), "rows": rows, "timing": {"seen": _fast(times), "rows": times}}


def _head(
    head: Head, n: int, repeat: int
) -> tuple[dict[Any, list[dict[str, float]]], dict[float, dict[Any, float]]]:
    """Every search over the first keys of a head: a row per query, and median seconds in all."""
    # What a cache stores is exact in float32.
    keys, queries = head.keys[:n].astype(np.float32), head.queries.astype(np.float32)
    index = KeyIndex.build(keys, threads=1)
    scores = head.scores[:, :n]
    rows: dict[Any, list[dict[str, float]]] = {}
    spent: dict[float, dict[Any, float]] = {}
    for eps in EPS:
        best = selection.select(scores, eps, prove_minimal=True).k
        gap = bounds.smallest_k(scores, eps, rule="single_gap")
        works: dict[Any, Callable[[], object]] = {}
        for rule in RULES:
            for over in OVERS:

                def search(rule: Rule = rule, over: Over = over, eps: float = eps) -> Any:
                    return [
                        index.search(
                            query, eps, scale=head.scale, rule=rule, over=over, threads=1,
                            k=int(k) if rule == "top_k" else None,
                        )
                        for query, k in zip(queries, best, strict=True)
                    ]  # fmt: skip

                works[rule, over] = search
                rows[eps, rule, over] = [
                    {
                        "k": float(k),
                        "gap": float(gap_k) / k,
                        "kept": float(found.k) / k,
                        "scored": float(found.scored) / k,
                        "wrong": _wrong(row, found, rule, eps),
                    }
                    for row, k, gap_k, found in zip(scores, best, gap, search(), strict=True)
                ]

        def dense(eps: float = eps) -> None:
            for query in queries:
                selection.select(keys @ query, eps, scale=head.scale, threads=1)

        spent[eps] = medians({**works, "all": dense}, repeat)
    return rows, spent


def _wrong(scores: Array, found: SearchResult, rule: Rule, eps: float) -> bool:
    """Whether a set is not what its rule promises, by all scores of the row in float64."""
    kept = np.zeros(len(scores), bool)
    kept[found.row(())] = True
    if rule == "top_k":
        return bool(scores[kept].min() < scores[~kept].max(initial=-np.inf) - JUDGE)
    weights = np.exp(scores - scores.max())
    return bool(weights[~kept].sum() > eps * (1 + JUDGE) * weights.sum())


def _sum_up(found: list[dict[str, float]]) -> dict[str, float]:
    return {
        "k": mean([row["k"] for row in found]),
        "gap": mean([row["gap"] for row in found]),
        "kept": mean([row["kept"] for row in found]),
        "scored": mean([row["scored"] for row in found]),
        "worst": max(row["scored"] for row in found),
        "wrong": sum(row["wrong"] for row in found),
        "searches": len(found),
    }


def _seen(rows: list[dict[str, Any]]) -> str:
    n, eps = rows[-1]["n"], EPS[-1]
    at = {(r["rule"], r["over"]): r for r in rows if r["n"] == n and r["eps"] == eps}
    codes, cells = at["mass", "codes"], at["mass", "cells"]
    wrong, searches = sum(r["wrong"] for r in rows), sum(r["searches"] for r in rows)
    return (
        f"At n = {n} and eps = {eps:g} rows need k = {codes['k']:.1f} keys in the mean. Over codes "
        f"MC-Search scores {codes['scored']:.3f} k (worst row {codes['worst']:.3f}) and over cells "
        f"{cells['scored']:.2f} k; Delta_k-Search scores {at['gap', 'codes']['scored']:.2f} k over "
        f"codes and {at['gap', 'cells']['scored']:.2f} k over cells, since its rule keeps "
        f"{codes['gap']:.2f} k even when every score is known; to prove the true top k takes "
        f"{at['top_k', 'codes']['scored']:.3f} k over codes, {at['top_k', 'cells']['scored']:.2f} "
        f"k over cells. Of {searches} sets found, {wrong} break their promise by the scores in "
        "float64."
    )


def _fast(times: list[dict[str, Any]]) -> str:
    n, eps = times[-1]["n"], EPS[-1]
    at = {
        (r["rule"], r["over"]): f"{r['ratio']:.2f}"
        for r in times
        if r["n"] == n and r["eps"] == eps
    }
    return (
        "In time, against scoring every key with NumPy and selecting, MC-Search there takes "
        f"{at['mass', 'codes']} over codes and {at['mass', 'cells']} over cells, Delta_k-Search "
        f"{at['gap', 'codes']} and {at['gap', 'cells']}, the top k {at['top_k', 'codes']} and "
        f"{at['top_k', 'cells']} (medians of interleaved repetitions, indices built beforehand; "
        "machines differ, and so do these ratios)."
    )


COLOURS: dict[Rule, str] = {"mass": "#1b9e77", "gap": "#d95f02", "top_k": "#7570b3"}
STYLES: dict[Over, str] = {"cells": "s--", "codes": "o-", "both": "x:"}


def plots(data: dict[str, Any]) -> list[str]:
    """Keys scored per key needed, against n."""
    plt = pyplot()
    lengths = sorted({row["n"] for row in data["rows"]})
    figure, axes = plt.subplots(1, len(EPS), figsize=(9.5, 4.8), sharey=True, layout="constrained")
    for eps, axis in zip(EPS, axes, strict=True):
        at = [row for row in data["rows"] if row["eps"] == eps]
        for rule, name in RULES.items():
            for over in OVERS:
                some = [r["scored"] for r in at if r["rule"] == rule and r["over"] == over]
                axis.plot(
                    lengths, some, STYLES[over], ms=5 if over == "both" else 3.5, lw=1.3,
                    color=COLOURS[rule], label=f"{name} over {over}",
                )  # fmt: skip
        one = [r for r in at if r["rule"] == "mass" and r["over"] == "codes"]
        axis.plot(lengths, [r["gap"] for r in one], color="#999", lw=3, zorder=0,
                  label="kept by the gap rule, all scores known")  # fmt: skip
        axis.axhline(1, color="black", lw=0.8, label="k, the fewest keys that will do")
        axis.set(title=f"eps = {eps:g}", xlabel="n", xscale="log", yscale="log")
        plain_ticks(axis.xaxis, lengths[:: -(-len(lengths) // 5)])
    most = max(max(row["scored"], row["gap"]) for row in data["rows"])
    ticks = [tick for tick in (1, 1.5, 2, 3, 5, 10, 20, 50, 100, 200, 500) if tick < 1.3 * most]
    axes[0].set_ylabel("mean of keys scored / k")
    plain_ticks(axes[0].yaxis, ticks)
    legend_below(figure, *axes[0].get_legend_handles_labels(), ncols=3)
    return [svg(figure)]


def tables(data: dict[str, Any]) -> list[Table]:
    """A row per length, budget, rule and kind of bounds."""
    heads = (
        "search", "over", "n", "eps", "mean k", "gap rule / k", "kept / k", "scored / k", "worst",
        "broken", "time / dense",
    )  # fmt: skip
    rows = [
        (
            RULES[r["rule"]], r["over"], str(r["n"]), f"{r['eps']:g}", f"{r['k']:.1f}",
            f"{r['gap']:.2f}", f"{r['kept']:.3f}", f"{r['scored']:.3f}", f"{r['worst']:.3f}",
            f"{r['wrong']} of {r['searches']}", f"{t['ratio']:.2f}",
        )
        for r, t in zip(data["rows"], data["timing"]["rows"], strict=True)
    ]  # fmt: skip
    return [Table(heads, rows)]
