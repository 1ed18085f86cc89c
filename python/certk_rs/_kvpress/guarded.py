"""Guards in caches that a press has made smaller: what later queries lose is proven."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import DynamicLayer

from ..guard import Guard
from ..transformers.caches import RowsOfCache
from ..transformers.guarded import GuardedLayer, Losses, Manner


class WatchedLayer(DynamicLayer):  # type: ignore[misc]
    """A layer as any other, (1, kv_heads, n, d), whose guard certified attention asks.

    Unlike that of a `PrunedCache` it has one length, that of what it holds, as presses leave it:
    positions are for whoever runs the model to give.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, guarded: GuardedLayer) -> None:
        """Take over what is kept."""
        super().__init__()
        self.keys, self.values = keys, values
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.guarded = guarded
        # Every slot is filled.
        self.slots = np.zeros(keys.shape[1], np.int64)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append; the keys that come back carry their guard."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        keys.certk_first = self
        return keys, values

    def used(self) -> None:
        """Nothing is to be left out."""


def watched(
    layers: Sequence[Any], kept: Sequence[Sequence[NDArray[np.int64]]], manner: Manner
) -> tuple[list[WatchedLayer], Losses]:
    """Layers of the kept rows of whole ones, each with a guard of the others.

    Args:
        layers: One sequence each: keys and values (1, kv_heads, n, d).
        kept: Of each layer and kv head the positions that are kept, equally many, ascending.
        manner: What is done about losses; what is fetched comes from the whole layers' tensors.
    """
    whole = [(layer.keys[0].detach(), layer.values[0].detach()) for layer in layers]
    losses = Losses(manner, RowsOfCache(whole) if manner.on_breach == "recall" else None)
    found = []
    for index, ((keys, values), sets) in enumerate(zip(whole, kept, strict=True)):
        guard = Guard.build(keys, values, sets)
        at = [torch.from_numpy(each) for each in sets]
        here = [
            torch.stack([x[g, rows] for g, rows in enumerate(at)])[None] for x in (keys, values)
        ]
        found.append(WatchedLayer(here[0], here[1], GuardedLayer(index, guard, losses)))
    return found, losses
