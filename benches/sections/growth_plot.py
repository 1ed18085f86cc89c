"""Draws the growth of the time per score with the length of the row. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from harness.report import Entry, Line

from . import growth

STYLE = {
    growth.OURS: ("#c0392b", 2.4),
    growth.HALF: ("#e08e45", 1.6),
    growth.DOUBLE: ("#8e3b63", 1.6),
    growth.SOFTMAX: ("#1f5f99", 1.6),
    growth.PARTITION: ("#4f7f52", 1.6),
    growth.TOP_P: ("#555555", 1.6),
}
LABELS = {
    growth.OURS: "certk_rs.select, float32",
    growth.HALF: "select, float16",
    growth.DOUBLE: "select, float64",
    growth.SOFTMAX: "torch.softmax(out=)",
    growth.PARTITION: "numpy.argpartition, told k",
    growth.TOP_P: "torch softmax + sort + cumsum",
}
APART = 0.045  # least distance of two labels, as a share of the height


def curves(entries: Iterable[Entry]) -> dict[str, list[tuple[int, float]]]:
    """(n, ns per score) of every series in section G2, by ascending n."""
    found: dict[str, dict[int, float]] = {name: {} for name in STYLE}
    for entry in entries:
        if isinstance(entry, Line) and entry.section == "G2" and entry.n is not None:
            if entry.ours is not None:
                found[growth.OURS][entry.n] = entry.ours
            if entry.peer is not None and entry.label in found:
                found[entry.label][entry.n] = entry.peer
    return {name: sorted(points.items()) for name, points in found.items() if points}


def spread(places: Sequence[float], apart: float) -> list[float]:
    """The places moved as little as need be so that neighbours are `apart`; order is kept."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    groups: list[list[int]] = [[i] for i in order]

    def centre(group: list[int]) -> float:
        return sum(places[i] for i in group) / len(group)

    at = 0
    while at + 1 < len(groups):
        one, two = groups[at], groups[at + 1]
        gap = centre(two) - centre(one)
        if gap < apart * (len(one) + len(two)) / 2:
            groups[at : at + 2] = [one + two]
            at = max(at - 1, 0)
        else:
            at += 1
    moved = list(places)
    for group in groups:
        for rank, i in enumerate(group):
            moved[i] = centre(group) + apart * (rank - (len(group) - 1) / 2)
    return moved


def length_name(n: int) -> str:
    """A power of two as it is said: 512, 4K, 16M."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if n >= unit:
            return f"{n // unit}{name}"
    return str(n)


def draw(entries: Iterable[Entry], target: Path, cpu: str) -> None:
    """Write the figure; each curve is named at its right end, inside or beside the axes."""
    import math

    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    series = curves(entries)
    lengths = sorted({n for points in series.values() for n, _ in points})
    figure, axes = plt.subplots(figsize=(9.5, 5.4))
    for name, points in series.items():
        colour, width = STYLE[name]
        x, y = zip(*points, strict=True)
        axes.plot(x, y, color=colour, linewidth=width, marker="o", markersize=width + 1.2)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(lengths[0] * 0.8, lengths[-1] * 1.1)
    axes.set_xticks(lengths, [length_name(n) for n in lengths])
    axes.minorticks_off()
    low, high = (math.log10(limit) for limit in axes.get_ylim())
    ticks = [10**p * m for p in range(-3, 4) for m in (1, 2, 5)]
    ticks = [tick for tick in ticks if low <= math.log10(tick) <= high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("keys in a row")
    axes.set_title(
        "Time per score in ns, one thread, Gaussian rows of sigma 3, eps 0.01\n" + cpu,
        loc="left",
        fontsize=10.5,
    )
    whole = [name for name, points in series.items() if points[-1][0] == lengths[-1]]
    ends = [(math.log10(series[name][-1][1]) - low) / (high - low) for name in whole]
    places = dict(zip(whole, spread(ends, APART), strict=True))
    for name, points in series.items():
        beside = name in places
        axes.annotate(
            LABELS[name],
            (1.0, places[name]) if beside else points[-1],
            xycoords="axes fraction" if beside else "data",
            xytext=(6, 0),
            textcoords="offset points",
            color=STYLE[name][0],
            va="center",
            fontsize=9.5,
            fontweight="bold" if name == growth.OURS else "normal",
            annotation_clip=False,
        )
    figure.savefig(target, dpi=130, bbox_inches="tight")
    plt.close(figure)
