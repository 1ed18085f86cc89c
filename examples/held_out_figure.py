"""The figure of examples/held_out.py: what later queries lose, against bytes and against eps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from decoder_figure import COLOURS
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

LABELS = {
    "right": "right answers that stand far before",
    "divergence": "divergence from what all keys say (nats per byte)",
    "over": "(step, layer, head) that lose more than eps, in truth",
}
STYLES = {
    "certified": {"color": "#6baed6", "lw": 1.6, "linestyle": "--"},
    "guard, report": {"color": "#08519c", "lw": 1.6, "linestyle": ":"},
    "guard, recall": {"color": "#084594", "lw": 2.6, "zorder": 4},
}
EPS = (0.02, 0.05, 0.1, 0.2, 0.5)
# Tasks whose answers all stand far before.
FAR = ("pairs", "copies")


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw what `held_out.measure` has found; the format is that of the path's suffix."""
    lines = _lines(found)
    figure, panels = plt.subplots(1, 3, figsize=(13, 4.8), layout="constrained")
    for axis, what in zip(panels, LABELS, strict=True):
        for name, rows in lines.items():
            style = {"color": COLOURS.get(name), "lw": 1.3} | STYLES.get(name, {})
            along = "eps" if what == "over" else "held"
            rows = sorted(rows, key=lambda row: row[along])
            axis.plot(
                [row[along] for row in rows], [row[what] for row in rows], marker="o",
                label=name, ms=3.5, **style,
            )  # fmt: skip
        axis.set(xscale="log", ylabel=LABELS[what])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.grid(axis="y", color="#e4e4e4", lw=0.7)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in panels[:2]:
        axis.set_xlabel("bytes held, guard included")
        axis.xaxis.set_major_locator(FixedLocator((0.02, 0.05, 0.1, 0.2, 0.5, 1)))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    panels[2].set_xlabel("eps")
    panels[2].xaxis.set_major_locator(FixedLocator(EPS))
    panels[2].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for axis in (panels[0], panels[2]):
        axis.set_ylim(-0.03, 1.03)
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    panels[1].set_yscale("log")
    panels[0].axhline(
        _right(found["dense"][kind] for kind in FAR),
        color="#555", lw=1, ls=(0, (5, 4)),
        label="whole cache",
    )  # fmt: skip
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=9.5, loc="outside lower center", ncols=4)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=130)
    plt.close(figure)


def _lines(found: dict[str, Any]) -> dict[str, list[dict[str, float]]]:
    """For each way of pruning a point for each eps, over all kinds of texts."""
    points: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for row in found["rows"]:
        points.setdefault((row["method"], row["eps"]), []).append(row)
    lines: dict[str, list[dict[str, float]]] = {}
    for (name, eps), rows in points.items():
        lines.setdefault(name, []).append(
            {
                "eps": eps,
                "held": sum(row["held"] for row in rows) / len(rows),
                "right": _right(row for row in rows if row["kind"] in FAR),
                "divergence": sum(row["divergence"] for row in rows) / len(rows),
                "over": sum(r["over"] for r in rows) / max(1, sum(r["steps"] for r in rows)),
            }
        )
    return lines


def _right(rows: Any) -> float:
    each = [row["right"] for row in rows]
    return float(sum(each) / len(each))
