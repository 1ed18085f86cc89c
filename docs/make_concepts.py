"""Draws the figures of docs/concepts.md from the example cache: `python docs/make_concepts.py`.

Needs matplotlib (the extra `plot`). The same data gives the same files, byte for byte, under one
version of matplotlib.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")

import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

import certk_rs as ck
from certk_rs.guard import Guard

HERE = Path(__file__).resolve().parent
CACHE = HERE.parent / "python" / "certk_rs" / "_data" / "minilm_small.safetensors"
LIGHT, MIDDLE, DARK, RED, GREY = "#9ecae1", "#4292c6", "#084594", "#cb181d", "#636363"
EPS = 0.05
LAYER, HEAD = 2, 0

Array = NDArray[Any]


def main() -> None:
    """Draw all of them."""
    mpl.rcParams.update({"svg.hashsalt": "certk", "font.size": 9, "axes.titlesize": 10})
    tensors = load_file(CACHE)
    query, key, value = (tensors[f"layers.{LAYER}.{role}"][0] for role in ("query", "key", "value"))
    scores = query.astype(float) @ key.astype(float).transpose(0, 2, 1) / np.sqrt(query.shape[-1])
    _save("mass", _mass, scores[HEAD, 0], query[HEAD, :1], key[HEAD])
    _save("sets", _sets, scores[HEAD])
    _save("guard", _guard, scores, query, key, value)


def _mass(axes: tuple[Any, Any], row: Array, query: Array, key: Array) -> None:
    """Left: what a row's keys weigh. Right: intervals that shrink as more keys are scored."""
    left, right = axes
    n, k = row.size, int(ck.select(row, EPS).k)
    weights = np.sort(np.exp(row - row.max()))[::-1]
    tail = 1 - np.cumsum(weights) / weights.sum()
    ranks = np.arange(1, n + 1)
    left.axvspan(0, k, color=LIGHT, linewidth=0, label=f"kept: {k} of {n} keys")
    left.plot(ranks, tail, color=DARK, label="mass of all worse keys")
    left.axhline(EPS, color=RED, linewidth=1, label=f"eps = {EPS:g}")
    left.set(xlabel="keys, best first", ylabel="tail mass", xlim=(0, n), ylim=(0, 1))
    left.set_title("one row: few keys carry the mass")
    left.legend(loc="upper right", frameon=False)

    index = ck.KeyIndex.build(key)
    found = [index.search(query, EPS, max_scored=most) for most in (8, 16, 24, 32, 40, 48, 56, 64)]
    scored = np.array([each.scored[0] for each in found])
    lower, upper = (
        np.array([getattr(each, name)[0] for each in found])
        for name in ("tail_mass_lower", "tail_mass_upper")
    )
    holds = upper <= EPS
    for these, colour, label in ((~holds, MIDDLE, "OVER_BUDGET"), (holds, DARK, "CERTIFIED")):
        right.vlines(scored[these], lower[these], upper[these], color=colour, linewidth=1.5)
        for ends in (lower, upper):
            right.plot(scored[these], ends[these], "_", color=colour, markersize=9)
        right.plot([], [], "|", color=colour, markersize=9, markeredgewidth=1.5, label=label)
    right.axhline(EPS, color=RED, linewidth=1, label=f"eps = {EPS:g}")
    right.set(xlabel="keys that were scored", ylabel="tail mass", yscale="log", ylim=(0.04, 0.4))
    right.set_yticks([0.05, 0.1, 0.2, 0.4], ["0.05", "0.1", "0.2", "0.4"])
    right.minorticks_off()
    right.set_title("the same row by codes of its keys: proven intervals")
    right.legend(loc="upper right", frameon=False)


def _sets(axes: tuple[Any, Any], rows: Array) -> None:
    """Left: sets for more and more rows. Right: what each row loses of the set for all."""
    left, right = axes
    counts = (1, 2, 4, 8, 16, 32)
    own = ck.select(rows, EPS)
    sets = [ck.keep_set(rows[:count], EPS) for count in counts]
    union = [
        np.unique(np.concatenate([own.row(row) for row in range(count)])).size for count in counts
    ]
    left.plot(counts, union, color=GREY, marker="o", label="all keys that some row keeps")
    left.plot(counts, [each.k for each in sets], color=DARK, marker="o", label="one set (keep_set)")
    bounds = [each.lower_bound for each in sets]
    left.plot(counts, bounds, color=RED, linestyle="--", label="proven: no smaller set can do")
    left.plot(
        counts,
        [own.k[:count].mean() for count in counts],
        color=LIGHT,
        marker="o",
        label="a row on its own, mean",
    )
    left.set(xlabel="rows that share the set", ylabel="keys", xscale="log", ylim=(0, 260))
    left.set_xticks(counts, [str(count) for count in counts])
    left.minorticks_off()
    left.set_title(f"one set for many rows, n = {rows.shape[1]}, eps = {EPS:g}")
    left.legend(loc="upper left", frameon=False)

    lost = np.sort(sets[-1].tail_mass_upper)[::-1]
    right.bar(np.arange(lost.size), lost, color=LIGHT)
    right.axhline(EPS, color=RED, linewidth=1, label=f"eps = {EPS:g}")
    right.set(xlabel="row (sorted)", ylabel="tail mass", xlim=(-1, lost.size), ylim=(0, 0.06))
    right.set_title(f"what each of {lost.size} rows loses of it: a few set the limit")
    right.legend(loc="upper right", frameon=False)


def _guard(axes: tuple[Any, Any], scores: Array, query: Array, key: Array, value: Array) -> None:
    """Later queries of sets that were chosen for the first half: lost, proven, and after recall."""
    left, right = axes
    half = scores.shape[1] // 2
    kept = [ck.keep_set(each[:half], EPS).indices for each in scores]
    dropped = np.ones((len(kept), 1, scores.shape[-1]), bool)
    for head, indices in enumerate(kept):
        dropped[head, 0, indices] = False
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    share = (weights * dropped).sum(-1) / weights.sum(-1)
    for chosen, label, colour in (
        (slice(None, half), "queries the sets were chosen for", LIGHT),
        (slice(half, None), "later queries", DARK),
    ):
        masses = np.sort(share[:, chosen].reshape(-1))[::-1]
        left.plot(np.arange(1, masses.size + 1), masses, color=colour, label=label)
    left.axhline(EPS, color=RED, linewidth=1, label=f"eps = {EPS:g}")
    left.set(xlabel="query (sorted)", ylabel="tail mass", xlim=(1, share[:, half:].size))
    left.set_ylim(bottom=0)
    left.set_title("a certificate covers the queries it lists")
    left.legend(loc="upper right", frameon=False)

    guard = Guard.build(key, value, kept)
    own = [
        ck.attention(query[head, half:], key[head, kept[head]], value[head, kept[head]], 0.0)
        for head in range(len(kept))
    ]
    judged = guard.judge(
        query[:, half:],
        (
            np.stack([each.log_mass_lower for each in own]),
            np.stack([each.log_mass_upper for each in own]),
        ),
        EPS,
    )
    true = share[:, half:].reshape(-1)
    most = 1.1 * max(true.max(), judged.lost.max())
    right.plot((0, most), (0, most), color=GREY, linewidth=0.5)
    for masses, colour, label in (
        (judged.lost, DARK, "proven by the guard"),
        (judged.left, LIGHT, "proven, after recall"),
    ):
        right.plot(true, masses.reshape(-1), "o", color=colour, markersize=4, label=label)
    right.axhline(EPS, color=RED, linewidth=1, label=f"eps = {EPS:g}")
    right.set(xlabel="what a later query really loses", ylabel="tail mass", xlim=(0, most))
    right.set_ylim(0, most)
    right.set_title("a guard knows it, and says what to fetch back")
    right.legend(loc="upper left", frameon=False)


def _save(name: str, draw: Any, *given: Array) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8))
    draw(axes, *given)
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    target = HERE / "figures" / f"concepts_{name}.svg"
    figure.savefig(target, metadata={"Date": None, "Creator": None}, facecolor="white")
    plt.close(figure)
    print(f"wrote {target.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
