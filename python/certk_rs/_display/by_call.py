"""The plot of a recorder: what is proven of each layer, call by call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CertkError
from .page import matplotlib

_PANELS = (
    ("tail_mass_upper", "eps", "Total variation by layer", "tail mass, upper bound"),
    ("error_bound", "out_tol", "Output error by layer", "Euclidean distance, upper bound"),
)
_DECADES = 16


def new_axes(shown: bool) -> Any:
    """Make two axes; if `shown`, notebooks and `pyplot.show` know of their figure."""
    matplotlib()
    if shown:
        from matplotlib.pyplot import figure
    else:
        from matplotlib.figure import Figure as figure  # noqa: N813
    return figure(figsize=(10, 4), layout="constrained").subplots(1, 2)


def draw(columns: Mapping[str, NDArray[Any]], given: Any) -> Any:
    """Draw a recorder's columns into two axes, and return these as an array."""
    axes = np.ravel(given)
    if axes.size != 2:
        raise CertkError(f"axes: {axes.size} given; pass two, for tail masses and for errors")
    mpl, layers = matplotlib(), np.unique(columns["layer"])
    # The lightest colours cannot be told from paper.
    colors = mpl.colormaps["viridis"](np.linspace(0, 0.9, layers.size))
    # A number between two that are off the axis is a point, and of many points each is a pixel.
    point = "." if columns["call"].max(initial=0) < 64 else ","
    for panel, (name, kind, title, label) in zip(axes, _PANELS, strict=True):
        values = np.where(columns["rows"] > 0, columns[name], math.nan)
        budgets = np.where(columns["kind"] == kind, columns["budget"], math.nan)
        low, high, notes = _ends(np.concatenate([values, budgets]))
        drawn = set[bytes]()
        for layer, color in zip(layers, colors, strict=True):
            own = columns["layer"] == layer
            call, known, budget = (each[own] for each in (columns["call"], values, budgets))
            inside = (known >= low) & (known <= high)
            style = {"color": color, "linewidth": 1, "markersize": 4}
            line = np.where(inside, known, math.nan)
            panel.plot(call, line, marker=point, label=f"layer {layer}", **style)
            off = ~inside & ~np.isnan(known)
            panel.plot(call[off], known[off].clip(low, high), "x", label=f"_off {layer}", **style)
            if budget.tobytes() not in drawn and not np.isnan(budget).all():
                drawn.add(budget.tobytes())
                style = {"color": "tab:red", "linewidth": 1, "marker": "_", "label": "budget"}
                panel.plot(call, budget.clip(low, high), **style)
        missing = " (not computed)" if np.isnan(values).all() else ""
        panel.set_title(title + missing + (f" (red: {kind})" if drawn else ""))
        panel.set(xlabel="call", ylabel="\n".join([label, *notes]), yscale="log")
        panel.xaxis.set_major_locator(mpl.ticker.MaxNLocator(integer=True, min_n_ticks=1))
    if layers.size:
        scale = mpl.cm.ScalarMappable(
            mpl.colors.Normalize(-0.5, layers.size - 0.5), mpl.colors.ListedColormap(colors)
        )
        bar = axes[0].figure.colorbar(scale, ax=list(axes), label="layer")
        some = slice(None, None, -(-layers.size // 12))
        bar.set_ticks(np.arange(layers.size)[some], labels=layers[some].astype(str))
        bar.minorticks_off()
    return axes


def _ends(values: NDArray[np.float64]) -> tuple[float, float, list[str]]:
    """Return the powers of ten where 0 and inf are drawn, and a remark on each that is needed."""
    known = values[(values > 0) & (values < math.inf)].clip(1e-300, 1e300)
    least, most = (known.min(), known.max()) if known.size else (1e-15, 0.1)
    top = math.floor(math.log10(most)) + 1
    # Few numbers that are far below all others would take the whole axis.
    bottom = max(math.ceil(math.log10(least)) - 1, top - _DECADES)
    low, high = float(f"1e{bottom}"), float(f"1e{top}")
    under, over, notes = values[values < low], values[values > high], []
    if under.size:
        notes.append(f"({'less' if under.any() else '0'} is drawn at $10^{{{bottom}}}$)")
    if over.size:
        notes.append(f"({'more' if np.isfinite(over).any() else 'inf'} is drawn at $10^{{{top}}}$)")
    return low, high, notes
