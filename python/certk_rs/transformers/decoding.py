"""A cache for long decoding: memory set aside ahead, and an index of the keys kept beside them.

Each step appends its key's code to the layer's `certk_rs.KeyIndex`, so that certified attention
scores few keys and builds nothing anew.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from ..errors import CertkError
from ..key_index import KeyIndex
from ..sparse_attention import ValueBall

# With fewer keys than this an index does not pay.
_FEWEST = 256
_INDEXED = (torch.float32, torch.float16, torch.bfloat16)


class CertkCache(Cache):  # type: ignore[misc]
    """A cache that grows like a `DynamicCache`, with an index of each layer's keys.

    Its keys carry their index to certified attention, which then scores few of them in decoding
    (prefill is answered without). Any other attention implementation reads it as a plain cache. For
    models of full attention; sliding windows have short caches of their own.
    """

    def __init__(self, reserve: int = 1024, *, threads: int | None = None) -> None:
        """Make an empty cache.

        Args:
            reserve: For how many tokens memory is set aside at first; it doubles when full.
            threads: Number of threads that build and extend an index; None for all available.

        Raises:
            CertkError: A reserve below 1.
        """
        if type(reserve) is not int or reserve < 1:
            raise CertkError(f"reserve is {reserve!r}; pass a whole number >= 1")
        super().__init__(layer_class_to_replicate=lambda: _IndexedLayer(reserve, threads))

    @property
    def index_bytes(self) -> int:
        """Bytes of all indices."""
        return sum(layer.index_bytes for layer in self.layers)


class _IndexedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values in buffers (batch, kv_heads, room, d), the index of the keys, and a ball."""

    def __init__(self, reserve: int, threads: int | None) -> None:
        super().__init__()
        self.keys: Any = None
        self.values: Any = None
        self._reserve = reserve
        self._threads = threads
        self._room: tuple[torch.Tensor, torch.Tensor] | None = None
        self._shown: tuple[Any, Any] = (None, None)
        self._index: KeyIndex | None = None
        self._built = 0
        self._ball: ValueBall | None = None

    @property
    def index_bytes(self) -> int:
        return 0 if self._index is None else self._index.nbytes

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append; the keys that come back carry their index."""
        had = 0 if self.keys is None else self.keys.shape[-2]
        if self.keys is not self._shown[0] or self.values is not self._shown[1]:
            # Beams were reordered, tokens cropped, or the like: other keys, so another index.
            self._room, self._index, self._ball = None, None, None
        need = had + key_states.shape[-2]
        keys, values = self._make_room(key_states, value_states, had, need)
        keys[:, :, had:need] = key_states
        values[:, :, had:need] = value_states
        self.keys, self.values = keys[:, :, :need], values[:, :, :need]
        self._shown = (self.keys, self.values)
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        self._extend(key_states, value_states, need)
        if self._index is not None:
            shown: Any = self.keys
            shown.certk_index, shown.certk_ball = self._index, self._ball
        return self.keys, self.values

    def reset(self) -> None:
        """Forget all keys."""
        self.keys = self.values = None
        self.is_initialized = False

    def __deepcopy__(self, _memo: Any) -> _IndexedLayer:
        copied = _IndexedLayer(self._reserve, self._threads)
        if self.keys is not None:
            # The copy's next step makes it an index of its own.
            copied.keys, copied.values = self.keys.clone(), self.values.clone()
            copied.dtype, copied.device, copied.is_initialized = self.dtype, self.device, True
        return copied

    def _make_room(
        self, key_states: torch.Tensor, value_states: torch.Tensor, had: int, need: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # What was made in inference mode cannot be written to outside of it.
        closed = self._room is not None and self._room[0].is_inference()
        closed = closed and not torch.is_inference_mode_enabled()
        if self._room is not None and need <= self._room[0].shape[2] and not closed:
            return self._room
        room = max(self._reserve, 2 * had, need)
        grown = []
        for held, new in ((self.keys, key_states), (self.values, value_states)):
            buffer = new.new_empty((*new.shape[:2], room, new.shape[3]))
            if had:
                buffer[:, :, :had] = held
            grown.append(buffer)
        self._room = (grown[0], grown[1])
        return self._room

    def _extend(self, key_states: torch.Tensor, value_states: torch.Tensor, n: int) -> None:
        """Bring the index up to n keys.

        One that has grown much is built anew: it would score more keys than it must.
        """
        if n < _FEWEST or self.keys.dtype not in _INDEXED or not math.prod(self.keys.shape):
            return
        if self._index is None or n >= 2 * self._built:
            self._index = KeyIndex.build(self.keys, keep_keys=False, threads=self._threads)
            self._built = n
        else:
            self._index.append(key_states, threads=self._threads)
        if self._ball is None:
            self._ball = ValueBall(self.values, threads=self._threads)
        else:
            self._ball.append(value_states)
