"""Draw the outcomes of experiments/decoder.py and experiments/held_out.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

# Text stays text, and the same data gives the same bytes.
mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "certk", "font.size": 10})

STYLES: dict[str, dict[str, Any]] = {
    "certified": {"color": "#084594", "lw": 2.6},
    "certified, --keep-last 0": {"color": "#084594", "ls": "--"},
    "guard, report": {"color": "#08519c", "ls": ":"},
    "guard, recall": {"color": "#6baed6", "lw": 2.6},
    "SnapKV": {"color": "#d94801"},
    "ExpectedAttention": {"color": "#238b45"},
    "Knorm": {"color": "#8c6bb1"},
    "StreamingLLM": {"color": "#b8860b"},
    "Random": {"color": "#888888"},
}
DIVERGENCE = "divergence from the whole cache (nats per byte)"
Lines = dict[str, list[tuple[float, float]]]


def decoder(found: dict[str, Any], path: Path) -> None:
    """Draw the results of `decoder.measure`; the format is that of the path's suffix."""
    panels: dict[str, tuple[str, Lines]] = {}
    for what, label in (("perplexity", "perplexity per byte"), ("divergence", DIVERGENCE)):
        lines: Lines = {}
        for row in found["rows"]:
            for name, cost in row["costs"].items():
                lines.setdefault(name, []).append((row["kept"], cost[what]))
        panels[label] = ("share of the keys kept", lines)
    figure, axes = _drawn(panels)
    axes[0].axhline(found["dense"], color="#555", lw=1, ls=(0, (5, 4)))
    axes[1].set_yscale("log")
    _save(figure, path)


def held_out(found: dict[str, Any], path: Path) -> None:
    """Draw the results of `held_out.measure`; the format is that of the path's suffix."""
    right, divergence, over = ({}, {}, {})  # type: tuple[Lines, Lines, Lines]
    for name, eps in dict.fromkeys((row["method"], row["eps"]) for row in found["rows"]):
        rows = [r for r in found["rows"] if (r["method"], r["eps"]) == (name, eps)]
        held = _mean(rows, "held")
        far = [row for row in rows if row["kind"] in ("pairs", "copies")]
        right.setdefault(name, []).append((held, _mean(far, "right")))
        divergence.setdefault(name, []).append((held, _mean(rows, "divergence")))
        steps = max(1, sum(row["steps"] for row in rows))
        over.setdefault(name, []).append((eps, sum(row["over"] for row in rows) / steps))
    share = "share of the bytes held, guard included"
    figure, axes = _drawn(
        {
            "right answers that stand far before": (share, right),
            DIVERGENCE: (share, divergence),
            "(step, layer, head) that truly lose more than eps": ("eps", over),
        }
    )
    dense = [found["dense"][kind] for kind in ("pairs", "copies")]
    axes[0].axhline(_mean(dense, "right"), color="#555", lw=1, ls=(0, (5, 4)))
    axes[1].set_yscale("log")
    _save(figure, path)


def _mean(rows: list[dict[str, Any]], what: str) -> float:
    return sum(row[what] for row in rows) / len(rows)


def _drawn(panels: dict[str, tuple[str, Lines]]) -> tuple[Any, Any]:
    """Return a figure with a panel for each label of the y-axis, and its axes."""
    figure, axes = plt.subplots(1, len(panels), figsize=(4.8 * len(panels), 4.8))
    figure.set_layout_engine("constrained")
    for axis, (label, (along, lines)) in zip(axes, panels.items(), strict=True):
        for name, points in lines.items():
            style = {"lw": 1.4, "marker": "o", "ms": 3.5} | STYLES.get(name, {})
            axis.plot(*zip(*sorted(points), strict=True), label=name, **style)
        axis.set(xscale="log", xlabel=along, ylabel=label)
        axis.spines[["top", "right"]].set_visible(False)
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, frameon=False, fontsize=9.5, loc="outside lower center", ncols=4)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=130)
    plt.close(figure)
