"""Layers whose rows lie elsewhere than in plain tensors, as beams and batches take them apart."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer


class TakenLayer(DynamicLayer):  # type: ignore[misc]
    """A layer that gives entries of the batch the rows of others by `_taken`."""

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Give each entry of the batch the rows of another one."""
        if not self._taken(beam_idx):
            super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each entry of the batch."""
        if self.keys is None or not self._taken(
            torch.arange(len(self.keys)).repeat_interleave(repeats)
        ):
            super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some entries of the batch."""
        if self.keys is None or not self._taken(torch.arange(len(self.keys))[indices]):
            super().batch_select_indices(indices)

    def _taken(self, entries: torch.Tensor) -> bool:
        """Take those entries of the batch; False if `keys` and `values` are plain tensors."""
        raise NotImplementedError


class StandIns:
    """Tensors without memory in place of keys and values; attention to them gives NaN."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take some keys (..., d) and values (..., d_v) for their dtypes and sizes."""
        self._rows = [
            each.new_full((1, 1, 1, each.shape[-1]), torch.nan) for each in (keys, values)
        ]

    def of(self, *shape: int) -> tuple[Any, Any]:
        """Return keys and values of a shape (batch, kv_heads, n)."""
        keys, values = (row.expand(*shape, -1) for row in self._rows)
        return keys, values
