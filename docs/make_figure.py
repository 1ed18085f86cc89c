"""Draws docs/figures/example.png from the example cache: `python docs/make_figure.py`.

Left: how many keys each attention row needs, selected with a certificate, at three budgets.
Right: one kept set for all queries of a head, beside the least size that any such set can have.
Needs matplotlib (the extra `plot`).
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from safetensors.numpy import load_file

import certk_rs as ck

HERE = Path(__file__).resolve().parent
CACHE = HERE.parent / "python" / "certk_rs" / "_data" / "minilm_small.safetensors"


def main() -> None:
    """Draw both panels."""
    tensors = load_file(CACHE)
    layers = sorted({int(name.split(".")[1]) for name in tensors})
    heads = []
    for layer in layers:
        query = tensors[f"layers.{layer}.query"][0].astype(np.float64)
        key = tensors[f"layers.{layer}.key"][0].astype(np.float64)
        heads.extend(query @ key.transpose(0, 2, 1) / np.sqrt(query.shape[-1]))
    scores = np.stack(heads)
    n = scores.shape[-1]

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), width_ratios=(1, 1.25))
    for eps, colour in ((0.1, "#9ecae1"), (0.01, "#4292c6"), (0.001, "#084594")):
        selection = ck.select(scores, eps)
        share = np.sort(selection.k.reshape(-1)) / n
        rows = np.arange(1, share.size + 1) / share.size
        left.plot(share, rows, color=colour, label=f"eps = {eps:g}")
    left.set(xlabel="keys kept / n", ylabel="share of the rows", xlim=(0, 1), ylim=(0, 1))
    left.set_title(f"certified selection, {share.size} real rows, n = {n}", fontsize=10)
    left.legend(fontsize=8, loc="lower right")

    sets = [ck.keep_set(rows, 0.1) for rows in scores]
    order = np.argsort([s.k for s in sets])
    size = np.array([sets[i].k for i in order])
    bound = np.array([sets[i].lower_bound for i in order])
    at = np.arange(len(sets))
    right.bar(at, size, color="#9ecae1", label="kept, certified for every query")
    right.step(
        np.append(at, len(sets)) - 0.5,
        np.append(bound, bound[-1]),
        where="post",
        color="#cb181d",
        label="proven: no smaller set can do",
    )
    gap = (size - bound).sum() / bound.sum()
    right.set(xlabel="head (sorted)", ylabel="keys", ylim=(0, n), xlim=(-0.5, len(sets) - 0.5))
    right.set_title(
        f"one set for {scores.shape[1]} queries, eps = 0.1: {gap:.1%} above the bound", fontsize=10
    )
    right.legend(fontsize=8, loc="upper left")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    target = HERE / "figures" / "example.png"
    figure.savefig(target, dpi=130)
    print(f"wrote {target.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
