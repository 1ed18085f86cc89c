"""A cache layer that holds all its keys, of which each kv head shows only some to attention.

Heads that keep different numbers of keys cannot be told apart by the mask that a model makes, which
is one for all heads. So the keys that such a layer hands out carry what is dropped, and attention
that knows of it (`masking`, and certified attention) takes it into its mask. The weights of dropped
keys are then 0 exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicLayer

from ..errors import CertkError


class Watch:
    """Sees, for all layers of a cache, that nobody attends to what is dropped."""

    def __init__(self) -> None:
        self.unused: int | None = None
        """The layer, or length, that nobody has attended to in the right way yet."""
        self.grown: list[tuple[Any, int]] = []
        """Layers that the call has appended to, and their lengths before."""


class MaskedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys (batch, kv_heads, n, d) and what follows them; length and positions as ever."""

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        dropped: torch.Tensor,
        index: int,
        watch: Watch,
    ) -> None:
        """Take over keys and values; `dropped` (batch, kv_heads, n) is True for dropped keys."""
        super().__init__()
        self.keys, self.values = keys, values
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self._dropped = dropped
        self._index = index
        self._watch = watch
        self._known = keys

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append, which is kept; the keys that come back carry what is dropped."""
        # Rows may be cut off at the end by slicing; other keys have other places.
        n = self._dropped.shape[-1]
        if self.keys.data_ptr() != self._known.data_ptr() or self.keys.shape[-2] < n:
            raise CertkError(
                f"layer {self._index}: the keys were replaced, so that it is no longer known which "
                "are dropped; do not use another press on this cache"
            )
        if self._watch.unused is not None:
            unused, self._watch.unused = self._watch.unused, None
            raise CertkError(
                f"the dropped keys of layer {unused} were attended to: the model's attention "
                "implementation has been changed since the prompt; change it back"
            )
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self._known = keys
        self._watch.unused = self._index
        keys.certk_dropped = self
        return keys, values

    def hide(self, query: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return a model's mask (batch, heads, m, n), with dropped keys hidden, too."""
        self._watch.unused = None
        batch, kv_heads, total = self.keys.shape[:3]
        heads, m = query.shape[1:3]
        visible = torch.ones(batch, kv_heads, 1, total, dtype=torch.bool)
        visible[:, :, 0, : self._dropped.shape[-1]] = ~self._dropped
        visible = visible.repeat_interleave(heads // kv_heads, 1).expand(-1, -1, m, -1)
        if mask is None:
            return visible & torch.ones(m, total, dtype=torch.bool).tril(total - m)
        if mask.ndim != 4:
            raise CertkError(
                f"layer {self._index}: a mask of shape {tuple(mask.shape)} has no room for what "
                "each head drops; use attn_implementation='sdpa'"
            )
        if mask.dtype is torch.bool:
            return mask & visible
        return mask.masked_fill(~visible, torch.finfo(mask.dtype).min)

    def crop(self, max_length: int) -> None:
        """Cut off tokens at the end."""
        super().crop(max_length)
        self._dropped = self._dropped[..., : self.keys.shape[-2]]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        super().batch_repeat_interleave(repeats)
        self._of(self._dropped.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some sequences."""
        super().batch_select_indices(indices)
        self._of(self._dropped[indices])

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Put sequences in another order."""
        super().reorder_cache(beam_idx)
        self._of(self._dropped.index_select(0, beam_idx))

    def reset(self) -> None:
        """Refuse: what is dropped belongs to these keys."""
        raise CertkError("a cache with dropped keys cannot be reset; make a new one")

    def _of(self, dropped: torch.Tensor) -> None:
        self._dropped, self._known = dropped, self.keys


def hidden(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the mask of a call that also hides the keys which its cache has dropped."""
    layer = getattr(key, "certk_dropped", None)
    return layer.hide(query, mask) if isinstance(layer, MaskedLayer) else mask


def masking(attention: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an attention function of transformers so that it hides dropped keys."""

    def masked(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        mask = hidden(query, key, attention_mask)
        return attention(module, query, key, value, mask, *args, **kwargs)

    masked.certk_masks = True  # type: ignore[attr-defined]
    return masked
