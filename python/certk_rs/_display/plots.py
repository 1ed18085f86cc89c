"""Plots that results and pages share. Axes are the caller's, or new ones; nothing is shown here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CertkError, pip_install

BLUE, ORANGE, RED, GREY = "#3b6fb6", "#e8a33d", "#b5473c", "#888888"
# Beyond so many rows, intervals are too thin to be seen, and take long to draw.
_FEW = 400
_LINE = 0.9


def axes_or_new(axes: Any) -> Any:
    """The axes given, or those of a new figure.

    In the backend that is in use: a notebook shows it, a script asks for `axes.figure`.
    """
    if axes is not None:
        return axes
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise CertkError(
            f"plots need matplotlib, which is not installed: {pip_install('plot')}"
        ) from None
    return plt.subplots(layout="constrained")[1]


def heat_map(
    axes: Any, grid: Mapping[tuple[int, int], float], title: str, top: float | None = None
) -> Any:
    """Numbers by layer and head, with a bar of colours; head -1 is a whole layer."""
    if not grid:
        axes.set_title(f"{title}: nothing is known")
        return axes
    layers = sorted({layer for layer, _ in grid})
    heads = sorted({head for _, head in grid})
    picture = np.full((len(layers), len(heads)), np.nan)
    for (layer, head), number in grid.items():
        picture[layers.index(layer), heads.index(head)] = number
    most = top if top is not None else max(float(np.nanmax(picture)), 1e-300)
    image = axes.imshow(picture, vmin=0, vmax=most, cmap="viridis", aspect="auto")
    axes.set_title(title, fontsize=10)
    axes.set(xlabel="kv head", ylabel="layer")
    if heads == [-1]:
        axes.set(xlabel="")
        axes.set_xticks([0], ["whole layer"])
    else:
        every = -(-len(heads) // 8)
        axes.set_xticks(range(0, len(heads), every), [str(head) for head in heads[::every]])
    every = -(-len(layers) // 24)
    axes.set_yticks(range(0, len(layers), every), [str(layer) for layer in layers[::every]])
    axes.figure.colorbar(image, ax=axes)
    return axes


def kept_and_lost(
    axes: Any,
    k: NDArray[np.integer[Any]],
    lower: NDArray[np.float64] | None,
    upper: NDArray[np.float64],
    eps: float | None,
) -> Any:
    """A point per row: keys kept and upper end of the tail mass; intervals where rows are few."""
    kept, top = k.reshape(-1), upper.reshape(-1)
    if lower is not None and kept.size <= _FEW:
        axes.vlines(kept, lower.reshape(-1), top, color=BLUE, lw=_LINE, alpha=0.5)
    axes.plot(kept, top, ".", ms=5, color=BLUE, alpha=0.6, label="a row (upper end)")
    _budget(axes, eps)
    axes.set(xlabel="keys kept", ylabel="tail mass", title="what rows keep and lose")
    axes.xaxis.get_major_locator().set_params(integer=True)
    return _from_zero(axes, top, eps)


def lost_in_order(
    axes: Any,
    lower: NDArray[np.float64],
    upper: NDArray[np.float64],
    weights: NDArray[np.float64],
    eps: float | None,
) -> Any:
    """Tail masses of rows in rising order; those with a say in the lower bound are marked."""
    order = np.argsort(upper.reshape(-1), kind="stable")
    top, place = upper.reshape(-1)[order], np.arange(order.size)
    axes.fill_between(place, lower.reshape(-1)[order], top, step="mid", color=BLUE, alpha=0.25)
    axes.plot(place, top, drawstyle="steps-mid", color=BLUE, label="upper end")
    (heavy,) = np.nonzero(weights.reshape(-1)[order] > 0)
    if heavy.size:
        axes.plot(heavy, top[heavy], ".", color=RED, label="has a weight in the lower bound")
    _budget(axes, eps)
    axes.set(xlabel="rows, in rising order", ylabel="tail mass", title="what rows lose")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize=9)
    return _from_zero(axes, top, eps)


def shares(axes: Any, names: list[str], kept: list[float], good: list[bool], title: str) -> Any:
    """A bar for each name, up to 100 %; those that are not good are red."""
    place = np.arange(len(names))
    colours = [BLUE if each else RED for each in good]
    axes.bar(place, [100 * each for each in kept], 0.8, color=colours)
    if len(names) <= 12:
        turned = {"rotation": 30, "ha": "right"} if len(names) > 2 else {}
        axes.set_xticks(place, [_short(name) for name in names], fontsize=9, **turned)
    axes.set(ylabel="per cent of the keys kept", title=title, ylim=(0, 100))
    return axes


def _short(name: str) -> str:
    name = name.replace("\\", "/").rpartition("/")[2].replace("$", r"\$")
    return name if len(name) <= 24 else f"{name[:11]}…{name[-12:]}"


def _budget(axes: Any, eps: float | None) -> None:
    if eps is not None:
        axes.axhline(eps, color="#222222", lw=1, ls="--", label="eps")
        axes.legend(frameon=False, fontsize=9, loc="lower right")


def _from_zero(axes: Any, masses: NDArray[np.float64], eps: float | None) -> Any:
    """Masses from 0, with room above the largest and above the budget."""
    axes.set_ylim(0, 1.1 * max(float(masses.max(initial=0.0)), eps or 0.0, 1e-300))
    return axes
