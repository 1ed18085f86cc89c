"""The plots of the report of a prune job, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._display.page import WIDTH, panels, svg
from .._display.plots import heat_map

Row = Mapping[str, Any]
_COLOURS = {"promised": "#3b6fb6", "held_out": "#e8a33d", "left_out": "#b5473c"}


def kept_maps(sets: Sequence[Row]) -> list[str]:
    """Kept share, gap and worst tail mass over budget by layer and kv head."""
    series: list[tuple[str, float | None, dict[tuple[int, int], float]]] = [
        ("keys kept, mean share", 1.0, _grid(sets, lambda one: one["kept_share"])),
        ("gap over kept", None, _grid(sets, _gap)),
        ("worst tail mass over eps", None, _grid(sets, lambda one: one["worst_over_eps"])),
    ]
    # What is within its budget everywhere is all of one colour, and so are sets without a gap.
    beyond = any(number > 1 for number in series[2][2].values())
    gaps = any(number > 0 for number in series[1][2].values())
    shown = [each for each, tells in zip(series, (True, gaps, beyond), strict=True) if tells]
    layers = len({one["layer"] for one in sets})
    heads = len({one["head"] for one in sets})
    drawings = []
    for title, top, grid in shown:
        size = (min(WIDTH, 2.4 + 0.14 * heads), min(9.0, 0.26 * layers + 1.7))
        figure, axis = panels(figsize=size)
        heat_map(axis, grid, title, top)
        drawings.append(svg(figure))
    return drawings


def _gap(one: Row) -> float | None:
    return None if one["gap"] is None else one["gap"] / max(one["kept"], 1)


def _grid(sets: Sequence[Row], value: Any) -> dict[tuple[int, int], float]:
    found = {(one["layer"], one["head"]): value(one) for one in sets}
    return {place: number for place, number in found.items() if number is not None}


def saved_by_output(outputs: Sequence[Row]) -> str:
    """Plot the savings of outputs in rising order."""
    saved = np.sort([100 * each["saved"] for each in outputs])
    figure, axis = panels(figsize=(WIDTH, 2.8))
    place = np.arange(1, len(saved) + 1)
    axis.fill_between(place, 0, saved, step="mid", color=_COLOURS["promised"], alpha=0.25)
    axis.step(place, saved, where="mid", color=_COLOURS["promised"])
    if len(saved) <= 40:
        axis.plot(place, saved, "o", ms=4, color=_COLOURS["promised"])
    axis.axhline(0, color="#888", lw=0.8)
    axis.set(
        title="saved by each output", xlabel="outputs, in rising order",
        ylabel="per cent of the bytes", ylim=(min(0, saved[0] * 1.1), max(100, saved[-1])),
    )  # fmt: skip
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    return svg(figure)


def spread_plot(spread: Mapping[str, Any]) -> str:
    """Plot a histogram of rows by tail mass over budget, in groups of the promise.

    Bins beyond the budget are of unequal width, and drawn twice as wide as those within.
    """
    edges = spread["edges"]
    within = edges.index(1.0)
    widths = np.array([1.0] * within + [2.0] * (len(edges) - 1 - within))
    used = [kind for kind in _COLOURS if any(spread[kind])]
    if not any(any(spread[kind][within:]) for kind in used):
        widths = widths[:within]
    place = np.concatenate([[0.0], np.cumsum(widths)])
    figure, axis = panels(figsize=(WIDTH, 3.0))
    floor = np.zeros(len(widths))
    for kind in used:
        counts = np.array(spread[kind][: len(widths)], float)
        label = kind.replace("_", " ")
        axis.bar(place[:-1], counts, 0.94 * widths, floor, align="edge",
                 color=_COLOURS[kind], label=label)  # fmt: skip
        floor += counts
    ticks = [i for i in range(len(place)) if (i >= within and i % 2 == within % 2) or i % 8 == 0]
    names = ["more" if edges[i] is None else f"{edges[i]:g}" for i in ticks]
    axis.set_xticks(place[ticks], names, fontsize=9)
    axis.axvline(place[within], color="#222", lw=1, ls="--")
    axis.set(
        title="rows by what they lose (dashed: the budget)",
        xlabel="upper end of the tail mass over eps", ylabel="rows", xlim=(0, place[-1] + 0.3),
        ylim=(0, 1.06 * max(floor.max(), 1)),
    )  # fmt: skip
    if len(used) > 1:
        axis.legend(frameon=False, fontsize=9)
    return svg(figure)


def lost_by_layer(layers: Sequence[Row]) -> str:
    """Plot the worst tail mass of each layer beside its budgets."""
    shown = [each for each in layers if each["worst_tail_mass"] is not None]
    figure, axis = panels(figsize=(WIDTH, 2.8))
    place = np.arange(len(shown))
    worst = [each["worst_tail_mass"] for each in shown]
    axis.bar(place, worst, 0.7, color=_COLOURS["promised"], label="worst promised row")
    low = [each["eps_low"] for each in shown]
    same = all(each["eps_low"] == each["eps_high"] for each in shown)
    label = "budget" if same else "least budget of an output"
    axis.hlines(low, place - 0.45, place + 0.45, color="#222", lw=1.5, label=label)
    step = -(-len(shown) // 12)
    axis.set_xticks(place[::step], [str(each["layer"]) for each in shown[::step]])
    axis.set(
        title="worst tail mass of a promised row", xlabel="layer", ylabel="tail mass",
        ylim=(0, 1.28 * max(*worst, *low, 1e-300)),
    )  # fmt: skip
    axis.legend(frameon=False, fontsize=8, ncols=2, loc="upper right")
    return svg(figure)
