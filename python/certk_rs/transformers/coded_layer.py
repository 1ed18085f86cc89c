"""A cache layer of codes: keys and values in planes of bytes, and exact rows of some positions.

Attention asks for tensors of all keys and values. It gets stand-ins of their shape without memory,
which carry the layer; certified attention then attends from the codes. Of any other attention the
outputs are NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import CertkError
from ..kept_rows import KeptRows
from ..kv_index import KvIndex
from ..results import AttentionResult
from .masked_layer import Watch
from .masks import Visibility
from .taken_layer import StandIns, TakenLayer


class CodedLayer(TakenLayer):
    """Codes of keys and values (batch, kv_heads, n, d), and exact rows of some positions."""

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        kept: list[NDArray[np.int64]],
        watch: Watch,
        *,
        key_bits: int,
        value_bits: int,
        threads: int | None,
    ) -> None:
        """Encode keys and values, and copy the rows at `kept` of each (batch row, kv head).

        Rows of keys that have no code are kept besides.

        Raises:
            CertkError: Keys or values that have no codes.
        """
        super().__init__()
        self._threads = threads
        self._watch = watch
        self.index = KvIndex.build(
            keys, values, keep_keys=False, bits=key_bits, value_bits=value_bits, threads=threads
        )
        positions = [np.union1d(*pair) for pair in zip(kept, self.index.bare, strict=True)]
        self._keep([torch.cat(_picked(each, positions)) for each in (keys, values)], positions)
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self._stand_ins = StandIns(keys, values)
        self._least = len(self.index)
        self._show()

    @property
    def nbytes(self) -> int:
        """Bytes of codes, of what is known of them, and of exact rows."""
        return self.index.nbytes + self._kept.nbytes

    @property
    def kept_counts(self) -> list[int]:
        """Counts of exact rows of each kv head, batch rows one behind the other."""
        return list(map(len, self._positions))

    def _keep(self, rows: list[torch.Tensor], positions: list[NDArray[np.int64]]) -> None:
        """Keep these exact keys and values, and no others."""
        self._rows, self._positions = rows, positions
        self._kept = KeptRows(rows[0], rows[1], positions)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append codes; what comes back stands for all keys and values, and carries this layer.

        Raises:
            CertkError: Keys or values of other sizes or dtypes than those before, or without codes.
        """
        n, watch = len(self.index), self._watch
        if watch.unused is not None:
            watch.unused = None
            raise CertkError(
                "a cache of codes was attended to by another implementation, which finds no keys in"
                " it: switch the model over by certk_rs.transformers.use, and make a new cache"
            )
        if key_states.shape[0] != self.index.shape[0]:
            raise CertkError(
                f"keys of {key_states.shape[0]} sequences go behind a cache of "
                f"{self.index.shape[0]}: for beams or several answers call "
                "cache.batch_repeat_interleave first"
            )
        self.index.append(key_states.detach(), value_states.detach(), threads=self._threads)
        new = [each[each >= n] for each in self.index.bare]
        if any(map(len, new)):
            states = (key_states, value_states)
            picked = [_picked(each, [at - n for at in new]) for each in states]
            pairs = [zip(*both, strict=True) for both in zip(self._heads(), picked, strict=True)]
            rows = [torch.cat([part for pair in each for part in pair]) for each in pairs]
            old = zip(self._positions, new, strict=True)
            self._keep(rows, [np.concatenate(pair) for pair in old])
        self._show()
        watch.unused = n
        return self.keys, self.values

    def attend(
        self,
        query: torch.Tensor,
        eps: float,
        rows: Visibility,
        *,
        scale: float | None,
        sinks: torch.Tensor | None,
        threads: int | None,
    ) -> AttentionResult:
        """Answer a call: queries (batch, heads, m, d) of which each sees some keys."""
        self._watch.unused = None
        return self.index.attention(
            query,
            eps,
            kept=self._kept,
            scale=scale,
            sinks=sinks,
            threads=threads,
            **rows.arguments(),
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove appended tokens, given as a negative number."""
        n = len(self.index) + tokens_to_remove
        if tokens_to_remove > 0 or n < self._least:
            raise CertkError(
                f"crop({tokens_to_remove}): only the {len(self.index) - self._least} tokens that "
                "were appended to a cache of codes can be removed; give their number, negative"
            )
        self.index.crop(n)
        stay = torch.from_numpy(np.concatenate(self._positions) < n)
        rows = [rows[stay] for rows in self._rows]
        self._keep(rows, [each[each < n] for each in self._positions])
        self._show()

    def reset(self) -> None:
        """Refuse: codes without their keys cannot be made again."""
        raise CertkError("a cache of codes cannot be reset; make another")

    def _taken(self, entries: torch.Tensor) -> bool:
        kv_heads, chosen = self.index.shape[1], entries.tolist()
        self.index = self.index.take(chosen)
        heads = [entry * kv_heads + head for entry in chosen for head in range(kv_heads)]
        rows = [torch.cat([part[head] for head in heads]) for part in self._heads()]
        self._keep(rows, [self._positions[head] for head in heads])
        self._show()
        return True

    def _heads(self) -> list[tuple[torch.Tensor, ...]]:
        """Return the exact keys, and the exact values, of each kv head."""
        return [torch.split(rows, self.kept_counts) for rows in self._rows]

    def __getstate__(self) -> dict[str, Any]:
        # Pickled, a stand-in would take the memory of what it stands for.
        return {**self.__dict__, "keys": None, "values": None, "_kept": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._keep(self._rows, self._positions)
        self._show()

    def _show(self) -> None:
        """Make stand-ins for the keys and values that there are codes of."""
        self.keys, self.values = self._stand_ins.of(*self.index.shape[:-1])
        self.keys.certk_coded = self


def _picked(rows: torch.Tensor, positions: Sequence[NDArray[np.int64]]) -> list[torch.Tensor]:
    """Copy rows (batch, kv_heads, n, d) at the positions of each head."""
    pairs = zip(rows.detach().flatten(0, 1), positions, strict=True)
    return [head[torch.from_numpy(at)] for head, at in pairs]
