"""The plot that the pages of jobs and of analyses share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def heat_map(
    axes: Any, grid: Mapping[tuple[int, int], float], title: str, top: float | None = None
) -> Any:
    """Draw numbers by layer and head, with a bar of colours; head -1 is a whole layer."""
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
