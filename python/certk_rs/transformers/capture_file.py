"""Writing what attention sees to a cache file, one layer at a time, while the model runs.

Shapes are not known before the last layer has run, and the header of a safetensors file comes
first. So room for it is left at the beginning (a header may end in spaces), and memory holds the
tensors of one layer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from .. import _native
from .._files.atomic import NewFile
from .._files.safetensors import Entry, written
from ..errors import CertkError
from .masks import Visibility

_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
# Bytes of one entry of the header, with the longest numbers there may be.
_ENTRY = 192


@dataclass(frozen=True, eq=False)
class Attended:
    """One attention call of a model that runs densely over one sequence."""

    layer: int
    module: nn.Module
    query: torch.Tensor
    """(1, heads, m, d), after rotary positions; key and value (1, kv_heads, n, d)."""
    key: torch.Tensor
    value: torch.Tensor
    scale: float | None
    offset: int | None
    """Query i sees the keys <= i + offset, or all of them if that is None."""


class Observation:
    """The attention calls of one forward pass, numbered by layer and handed on as they come."""

    def __init__(self, hear: Callable[[Attended], None]) -> None:
        self.layers: set[int] = set()
        self._hear = hear

    def add(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: Visibility,
        scale: float | None,
    ) -> None:
        """Hand on one call, as the layer that the module names, or as the next.

        Raises:
            CertkError: A layer that attends twice, several sequences, or rows that see other keys
                than all or all earlier ones.
        """
        own = getattr(module, "layer_idx", None)
        layer = own if isinstance(own, int) else len(self.layers)
        if layer in self.layers:
            raise CertkError(
                f"layer {layer} attends twice: one attention per layer and one forward pass are "
                "read; pass the encoder or the decoder alone"
            )
        if query.shape[0] != 1:
            raise CertkError(f"layer {layer}: a batch of {query.shape[0]}; pass one sequence")
        self.layers.add(layer)
        offset = causal_offset_of(layer, rows)
        self._hear(Attended(layer, module, query, key, value, scale, offset))


WRITING: ContextVar[Observation | None] = ContextVar("certk_writing", default=None)


class CacheWriter(NewFile):
    """A cache file in the making; context manager, leaves nothing behind without `commit`."""

    def __init__(
        self, path: str | os.PathLike[str], most_layers: int, queries: int | None = None
    ) -> None:
        """Prepare to write `path`, which must not exist.

        Args:
            path: The file.
            most_layers: How many layers there may be.
            queries: How many of the last queries of each layer to write; None for all.
        """
        super().__init__(Path(path))
        self._room = 256 + _ENTRY * 3 * most_layers
        self._queries = queries
        self._entries: list[Entry] = []
        self._stop = 0
        self._about: tuple[str | None, int | None] | None = None

    def write(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        offset: int | None,
    ) -> None:
        """Write queries (1, heads, m, d), keys and values (1, kv_heads, n, d) of one layer.

        Query i sees the keys <= i + `offset`, or all of them if that is None.

        Raises:
            CertkError: Something that the format cannot say; it names the layer.
        """
        if key.shape != value.shape:
            raise CertkError(
                f"layer {layer}: keys {tuple(key.shape)} and values {tuple(value.shape)} differ in "
                "shape; a cache file holds those of one shape"
            )
        m, d = query.shape[2:]
        if self._queries is not None and self._queries < m:
            query = query[:, :, m - self._queries :]
            offset = None if offset is None else offset + m - self._queries
        told = None if scale is None or scale == _native.nearest_rsqrt(d) else repr(scale)
        if self._about is None:
            self._about = (told, offset)
        elif self._about != (told, offset):
            raise CertkError(
                f"layer {layer} has (scale, causal offset) {(told, offset)}, the layers before "
                f"{self._about}: a cache file has one for all"
            )
        for role, tensor in (("key", key), ("value", value), ("query", query)):
            self._put(f"layers.{layer}.{role}", tensor)

    def commit(self) -> None:
        """Write the header, and give the file its name."""
        assert self._about is not None
        scale, offset = self._about
        about = {} if scale is None else {"scale": scale}
        if offset is not None:
            about["causal_offset"] = str(offset)
        header = written(self._entries, about, self._room)
        if len(header) > 8 + self._room:
            raise CertkError(
                f"the header needs {len(header) - 8} bytes and {self._room} were left for it: the "
                "model has attended more often than it has modules"
            )
        self.write_at(0, header)
        super().commit()

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        dtype = _DTYPES.get(tensor.dtype)
        if dtype is None:
            raise CertkError(
                f"{name} has dtype {tensor.dtype}; a cache file holds float32, float16 or "
                "bfloat16: convert the model"
            )
        bits = tensor.detach().contiguous().view(torch.uint8).numpy()
        data = np.ascontiguousarray(bits).reshape(-1).data
        start, self._stop = self._stop, self._stop + len(data)
        self._entries.append(Entry(name, dtype, tuple(tensor.shape), start, self._stop))
        self.write_at(8 + self._room + start, data)


def causal_offset_of(layer: int, rows: Visibility) -> int | None:
    """Return the causal offset of rows; None if they see all keys."""
    said = rows.arguments()
    if not said:
        return None
    if said == {"causal": True}:
        return rows.shape[3] - rows.shape[2]
    raise CertkError(
        f"layer {layer} sees less than all keys or all earlier ones (padding, or a sliding window "
        "shorter than the text): a cache file cannot say that; leave padding out, or shorten the "
        "text"
    )
