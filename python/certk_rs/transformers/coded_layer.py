"""A cache layer of codes: keys and values in planes of bytes, and exact rows of some positions.

Attention asks for tensors of all keys and values. It gets stand-ins of their shape without memory,
which carry the layer; certified attention then attends from the codes. Of any other attention the
outputs are NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import CertkError
from ..kept_rows import KeptRows
from ..kv_index import KvIndex
from ..results import AttentionResult
from ..sparse_attention import attention as attention_of
from .guarded import OnBreach, Rows
from .masked_layer import Watch
from .masks import Visibility
from .settings import Budget
from .taken_layer import StandIns, TakenLayer


@dataclass(frozen=True)
class Beyond:
    """Answer of a layer to calls of which codes prove less than asked: `rows` are read in full."""

    layer: int = 0
    on_breach: OnBreach = "report"
    rows: Rows | None = None

    def __post_init__(self) -> None:
        if self.on_breach not in ("report", "raise", "recall"):
            raise CertkError(f"on_breach is {self.on_breach!r}; pass 'report', 'raise' or 'recall'")
        if self.rows is not None and not callable(getattr(self.rows, "fetch", None)):
            raise CertkError(
                f"source is a {type(self.rows).__name__}; pass the path of a cache file"
            )
        if self.on_breach == "recall" and self.rows is None:
            raise CertkError(
                'on_breach is "recall", but nothing says where the exact rows are: pass source='
            )


class CodedLayer(TakenLayer):
    """Codes of keys and values (batch, kv_heads, n, d), and exact rows of some positions."""

    def __init__(
        self,
        index: KvIndex,
        rows: list[torch.Tensor],
        positions: list[NDArray[np.int64]],
        watch: Watch,
        beyond: Beyond,
        threads: int | None,
    ) -> None:
        """Take over codes, and exact keys and values (rows, d) at positions of each kv head."""
        super().__init__()
        self._threads = threads
        self._watch = watch
        self._beyond = beyond
        self.index = index
        batch = index.shape[:2]
        self._tail = [each.new_empty((*batch, 0, each.shape[-1])) for each in rows]
        """Exact keys and values of what was appended, where a source has the others."""
        self._keep(rows, positions)
        self.dtype, self.device, self.is_initialized = rows[0].dtype, rows[0].device, True
        self._stand_ins = StandIns(*rows)
        self._least = len(self.index)
        self.recalled = 0
        """Exact keys that were read for calls of which codes proved too little."""
        self._show()

    @classmethod
    def encode(
        cls,
        keys: torch.Tensor,
        values: torch.Tensor,
        kept: list[NDArray[np.int64]],
        watch: Watch,
        beyond: Beyond,
        *,
        key_bits: int | None,
        value_bits: int,
        threads: int | None,
    ) -> CodedLayer:
        """Encode keys and values, and copy the rows at `kept` of each (batch row, kv head).

        Rows of keys that have no code are kept besides.

        Raises:
            CertkError: Keys or values that have no codes.
        """
        if key_bits is None:
            key_bits = 16 if keys.dtype == torch.float32 else 12
        index = KvIndex.build(
            keys, values, keep_keys=False, bits=key_bits, value_bits=value_bits, threads=threads
        )
        positions = [np.union1d(*pair) for pair in zip(kept, index.bare, strict=True)]
        rows = [torch.cat(_picked(each, positions)) for each in (keys, values)]
        return cls(index, rows, positions, watch, beyond, threads)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, of what is known of them, and of exact rows."""
        return self.index.nbytes + self._kept.nbytes

    @property
    def exact(self) -> int:
        """Count of all keys whose rows are exact."""
        appended: int = self._tail[0].shape[0] * self._tail[0].shape[1] * self._tail[0].shape[2]
        return sum(self.kept_counts) + appended

    @property
    def source(self) -> Rows | None:
        """Rows that are read where codes prove too little."""
        return self._beyond.rows

    @property
    def kept_counts(self) -> list[int]:
        """Counts of exact rows of each kv head, batch rows one behind the other."""
        return list(map(len, self._positions))

    def _keep(self, rows: list[torch.Tensor], positions: list[NDArray[np.int64]]) -> None:
        """Keep these exact keys and values, and those of the tail, and no others."""
        self._rows, self._positions = rows, positions
        self._kept = KeptRows(rows[0], rows[1], positions)
        self._keep_tail(self._tail)

    def _keep_tail(self, tail: list[torch.Tensor]) -> None:
        """Keep exact keys and values (batch, kv_heads, m, d) of the last m positions."""
        self._tail = tail
        if tail[0].shape[2]:
            self._kept = self._kept.with_tail((tail[0], tail[1]))
        elif self._kept.tail is not None:
            self._kept = KeptRows(self._rows[0], self._rows[1], self._positions)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append codes; what comes back stands for all keys and values, and carries this layer.

        Raises:
            CertkError: Keys or values of other sizes or dtypes than those before, or without codes.
        """
        n, watch = len(self.index), self._watch
        # The first layer of a call is one that has answered already.
        if any(layer is self for layer, _ in watch.grown):
            watch.grown.clear()
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
        states = [key_states.detach(), value_states.detach()]
        if self._beyond.on_breach == "recall":
            # No source has them.
            both = zip(self._tail, states, strict=True)
            self._keep_tail([torch.cat(pair, dim=2) for pair in both])
        elif any(map(len, new := [each[each >= n] for each in self.index.bare])):
            picked = [_picked(each, [at - n for at in new]) for each in states]
            pairs = [zip(*both, strict=True) for both in zip(self._heads(), picked, strict=True)]
            rows = [torch.cat([part for pair in each for part in pair]) for each in pairs]
            old = zip(self._positions, new, strict=True)
            self._keep(rows, [np.concatenate(pair) for pair in old])
        self._show()
        watch.unused = n
        watch.grown.append((self, n))
        return self.keys, self.values

    def attend(
        self,
        query: torch.Tensor,
        budget: Budget,
        rows: Visibility,
        *,
        scale: float | None,
        sinks: torch.Tensor | None,
        threads: int | None,
        **changes: Any,
    ) -> AttentionResult:
        """Answer a call: queries (batch, heads, m, d) of which each sees some keys."""
        self._watch.unused = None
        how = {"scale": scale, "sinks": sinks, "threads": threads, **changes, **rows.arguments()}
        eps = 0.0 if budget.eps is None else budget.eps
        recalls = self._beyond.on_breach == "recall"
        try:
            result = self.index.attention(query, eps, kept=self._kept, **how)
            over = _over(result, budget)
            if not over.any():
                return result
        except CertkError:
            # Scores by codes may overflow where exact ones do not.
            if not recalls:
                raise
        if recalls:
            return self._recalled(query, budget, how)
        # An output has no bound in its result that says what was asked of it.
        if self._beyond.on_breach == "raise" or budget.out_tol is not None:
            for layer, n in self._watch.grown:
                layer.crop(n - len(layer.index))
            self._watch.grown.clear()
            self._refuse(result, budget, over)
        return result

    def _recalled(
        self, query: torch.Tensor, budget: Budget, how: dict[str, Any]
    ) -> AttentionResult:
        """Answer a call from exact rows of all positions."""
        source, (batch, kv_heads, *_) = self._beyond.rows, self.index.shape
        assert source is not None
        every = np.arange(self._least)
        heads = [source.fetch(self._beyond.layer, head, every) for head in range(kv_heads)]
        self.recalled += len(every) * kv_heads
        stacked = [
            torch.stack(parts).expand(batch, -1, -1, -1) for parts in zip(*heads, strict=True)
        ]
        keys, values = (torch.cat(pair, dim=2) for pair in zip(stacked, self._tail, strict=True))
        return attention_of(query, keys, values, budget.eps, out_tol=budget.out_tol, **how)

    def _refuse(self, result: AttentionResult, budget: Budget, over: NDArray[np.bool_]) -> NoReturn:
        place = tuple(np.argwhere(over)[0])
        where = f"layer {self._beyond.layer}, head {place[1]}"
        remedy = "pass on_breach='recall', or encode in more bits"
        if budget.out_tol is not None:
            raise CertkError(
                f"{where}: an output from codes may be off by {result.error_bound[place]:.6g}, "
                f"more than out_tol = {budget.out_tol:g}: pass a budget eps or a larger out_tol; "
                f"or {remedy}"
            )
        raise CertkError(
            f"{where}: codes prove {result.tail_mass_upper[place]:.6g}, more than eps = "
            f"{budget.eps:g}: {remedy}"
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
        self._keep_tail([each[:, :, : n - self._least] for each in self._tail])
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
        self._tail = [each[entries] for each in self._tail]
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


def _over(result: AttentionResult, budget: Budget) -> NDArray[np.bool_]:
    """Mark the rows of which less is proven than the budget asks for."""
    if budget.out_tol is not None:
        return np.asarray(~(result.error_bound <= budget.out_tol))
    return np.asarray(~(result.tail_mass_upper <= (budget.eps or 0.0)))


def _picked(rows: torch.Tensor, positions: Sequence[NDArray[np.int64]]) -> list[torch.Tensor]:
    """Copy rows (batch, kv_heads, n, d) at the positions of each head."""
    pairs = zip(rows.detach().flatten(0, 1), positions, strict=True)
    return [head[torch.from_numpy(at)] for head, at in pairs]
