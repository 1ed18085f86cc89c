"""Keys and values of which each head has another number, end to end, with room to grow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ..ragged_rows import RaggedRows

# Rows that each head gets room for, at least, when there is none left.
_ROOM = 16


class RaggedKv:
    """Keys (k, d) and values (k, d_v) of heads (batch, kv_heads), k of each its own."""

    def __init__(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Copy the rows of each kv head of one sequence."""
        self._flat = torch.cat(list(keys)), torch.cat(list(values))
        self._room = self.counts = np.array([[len(rows) for rows in keys]], np.int64)
        """Counts of the rows of each head, (batch, kv_heads)."""
        self._appended = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, and of the room behind them."""
        return sum(each.nbytes for each in self._flat)

    @property
    def _starts(self) -> NDArray[np.int64]:
        ends = np.cumsum(self._room.ravel()).reshape(self._room.shape)
        return ends - self._room

    def rows(self) -> tuple[RaggedRows, RaggedRows]:
        """Return keys and values as `certk_rs.attention` takes them."""
        keys, values = (RaggedRows(flat, self._starts, self.counts) for flat in self._flat)
        return keys, values

    def heads(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the keys and the values of each head, batch rows one behind the other."""
        ends = zip(self._starts.ravel().tolist(), self.counts.ravel().tolist(), strict=True)
        places = [slice(start, start + count) for start, count in ends]
        keys, values = ([flat[place] for place in places] for flat in self._flat)
        return keys, values

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put rows (batch, kv_heads, m, d) behind those of each head."""
        m = keys.shape[2]
        if (self.counts + m > self._room).any():
            # Room for as many as have come already: each row is copied a few times.
            self._lay_out(range(len(self.counts)), max(_ROOM, m, self._appended))
        at = torch.from_numpy(((self._starts + self.counts)[..., None] + np.arange(m)).ravel())
        for flat, new in zip(self._flat, (keys, values), strict=True):
            flat[at] = new.detach().flatten(0, 2)
        self.counts = self.counts + m
        self._appended += m

    def crop(self, m: int) -> None:
        """Take the last m rows of each head away."""
        self.counts = self.counts - m

    def take(self, entries: Sequence[int]) -> None:
        """Give each entry of the batch the rows of another one."""
        self._lay_out(entries, 0)

    def _lay_out(self, entries: Sequence[int], more: int) -> None:
        """Copy some entries of the batch, with room for more rows of each head."""
        kv_heads = self.counts.shape[1]
        chosen = [entry * kv_heads + head for entry in entries for head in range(kv_heads)]
        made = []
        for of_heads in self.heads():
            # Of what is made in inference mode nothing can be written later.
            with torch.inference_mode(False):
                room = of_heads[0].new_empty((more, of_heads[0].shape[1]))
                parts = [part for head in chosen for part in (of_heads[head], room)]
                made.append(torch.cat(parts))
        self._flat = made[0], made[1]
        self.counts = self.counts[list(entries)]
        self._room = self.counts + more
