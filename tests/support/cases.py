"""A case: one batch of rows with every option of a call, as the tests pass it around."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from oracle import ExactRow, additive_masked, widen


@dataclass(frozen=True, eq=False)
class Case:
    """Rows and options of one call.

    `scores` (rows, n) of any supported dtype; `eps` (rows,) float64; `mask` None or (rows, n),
    bool or float; `lengths` None or (rows,) int64.  With `causal_offset` the rows are the
    second-last axis, so row i sees positions <= i + causal_offset.
    """

    scores: np.ndarray
    eps: np.ndarray
    kind: str = "logits"
    scale: float = 1.0
    mask: np.ndarray | None = None
    lengths: np.ndarray | None = None
    causal_offset: int | None = None
    min_keep: int = 1
    max_keep: int | float | None = None
    keep_first: int = 0
    keep_last: int = 0
    block_size: int = 1
    name: str = field(default="", compare=False)

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return int(self.scores.shape[0])

    @property
    def n(self) -> int:
        """Positions per row."""
        return int(self.scores.shape[1])

    def row_options(self) -> dict[str, Any]:
        """Keyword arguments that select, certify and keep_set share; defaults left out."""
        options: dict[str, Any] = {}
        if self.kind != "logits":
            options["kind"] = self.kind
        if self.scale != 1.0:
            options["scale"] = self.scale
        for name in ("mask", "lengths", "causal_offset"):
            if getattr(self, name) is not None:
                options[name] = getattr(self, name)
        return options

    def select_options(self) -> dict[str, Any]:
        """Keyword arguments of `select`; defaults left out."""
        options = {
            "min_keep": (self.min_keep, 1),
            "max_keep": (self.max_keep, None),
            "keep_first": (self.keep_first, 0),
            "keep_last": (self.keep_last, 0),
            "block_size": (self.block_size, 1),
        }
        return self.row_options() | {k: v for k, (v, default) in options.items() if v != default}

    def prefix(self) -> np.ndarray:
        """(rows,) number of leading positions that lengths and causality leave."""
        seen = np.full(self.rows, self.n, dtype=np.int64)
        if self.lengths is not None:
            seen = np.minimum(seen, self.lengths)
        if self.causal_offset is not None:
            seen = np.minimum(seen, np.arange(self.rows) + self.causal_offset + 1)
        return np.clip(seen, 0, self.n)

    def visible(self) -> np.ndarray:
        """(rows, n) bool: positions that exist for the promise."""
        stored = widen(self.scores)
        shown = ~np.isneginf(stored) & (np.arange(self.n) < self.prefix()[:, None])
        if self.kind == "probs":
            shown &= stored != 0.0
        if self.mask is not None and self.mask.dtype == np.bool_:
            shown &= self.mask
        elif self.mask is not None:
            shown &= ~additive_masked(self.mask)
        return shown

    def bias(self) -> np.ndarray | None:
        """(rows, n) float64 additive mask, or None."""
        if self.mask is None or self.mask.dtype == np.bool_:
            return None
        return widen(self.mask)

    def exact(self, row: int) -> ExactRow:
        """Row `row` for the exact oracle."""
        return ExactRow(
            self.scores[row],
            kind=self.kind,
            scale=self.scale,
            mask=None if self.mask is None else self.mask[row],
            prefix=int(self.prefix()[row]),
        )

    def forced(self, visible: np.ndarray) -> np.ndarray:
        """(rows, n) bool: positions that keep_first and keep_last force, whole blocks counted."""
        rank = np.cumsum(visible, axis=1)
        total = rank[:, -1:] if self.n else rank.sum(axis=1, keepdims=True)
        must = visible & ((rank <= self.keep_first) | (rank > total - self.keep_last))
        if self.block_size > 1 and must.any():
            block = np.arange(self.n) // self.block_size
            for row in np.flatnonzero(must.any(axis=1)):
                must[row] = visible[row] & np.isin(block, block[must[row]])
        return must

    def part(self, rows: slice | np.ndarray) -> Case:
        """Some of the rows as a case of their own (not with a causal offset)."""
        if self.causal_offset is not None:
            raise ValueError("rows of a causal case have no meaning alone")
        return replace(
            self,
            scores=self.scores[rows],
            eps=self.eps[rows],
            mask=None if self.mask is None else self.mask[rows],
            lengths=None if self.lengths is None else self.lengths[rows],
        )

    def describe(self, row: int) -> str:
        """Everything that reproduces one row, for a failure message (short rows in full)."""
        bits = {2: np.uint16, 4: np.uint32, 8: np.uint64}[self.scores.dtype.itemsize]
        shown = slice(0, 32)
        stored = np.ascontiguousarray(self.scores[row, shown])
        text = (
            f"{self.name}: row {row} of {self.rows}, n={self.n}, dtype={self.scores.dtype.name}, "
            f"eps={float(self.eps[row])!r}, options={self.select_options().keys()}, "
            f"kind={self.kind}, scale={self.scale!r}, prefix={self.prefix()[row]}, "
            f"min_keep={self.min_keep}, max_keep={self.max_keep}, first={self.keep_first}, "
            f"last={self.keep_last}, block={self.block_size}\n"
            f"  scores[:32]={stored.astype(np.float64).tolist()}\n"
            f"  bits={[hex(v) for v in stored.view(bits).tolist()]}"
        )
        if self.mask is not None:
            text += f"\n  mask[:32]={self.mask[row, shown].tolist()}"
        return text
