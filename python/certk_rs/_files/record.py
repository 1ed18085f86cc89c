"""What is recorded of one layer beside the rows that are kept: sets, masses, bounds and proofs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .certificate import Options
from .layers import Layer
from .masses import lower_ends, stored_weights, upper_ends


def _none() -> NDArray[np.int64]:
    return np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class LayerRecord:
    """The keep-sets of one layer, and what is proven of them.

    Groups are those of a layer: its kv heads by head, else the layer itself; by token every layer
    has the same one set and the same bound.

    Attributes:
        layer: The layer.
        visible: How many keys, always the first, are candidates: those that some query of the
            group sees.
        indices: Of each group the kept positions, ascending; of blocks all visible positions.
        upper: Upper ends of the tail masses of all rows, (heads, m).
        lower: Their lower ends, (heads, m).
        lower_bound: Of each group, how many keys (blocks where block_size > 1) every set that
            keeps the promise has at least.
        weights: Those of the rows that prove it, (heads, m), 0 for rows without a promise. They
            must be F32 numbers from 2^-126 on (`storable_weights`); only their ratios count, by
            token those among all layers.
        held_out: Ascending positions of queries that nothing is promised for, in any head.
        left_out: Ascending numbers head * m + query of rows that coverage leaves out.
    """

    layer: Layer
    visible: int
    indices: tuple[NDArray[np.int64], ...]
    upper: NDArray[np.float64]
    lower: NDArray[np.float64]
    lower_bound: NDArray[np.int64]
    weights: NDArray[np.float64]
    held_out: NDArray[np.int64] = field(default_factory=_none)
    left_out: NDArray[np.int64] = field(default_factory=_none)

    def promised(self) -> NDArray[np.bool_]:
        """Which rows the promise is for, (heads, m)."""
        promised = np.ones((self.layer.heads, self.layer.m), bool)
        promised[:, self.held_out] = False
        promised.reshape(-1)[self.left_out] = False
        return promised

    def as_stored(self, masses: str) -> LayerRecord:
        """The same with its masses as a file of masses of that dtype has them."""
        upper, lower = upper_ends(self.upper, masses), lower_ends(self.lower, masses)
        return replace(self, upper=upper.astype(np.float64), lower=lower.astype(np.float64))


def record_tensors(
    record: LayerRecord, options: Options, eps: Sequence[float], masses: str
) -> dict[str, NDArray[Any]]:
    """The tensors of one layer by name, all but its keys and values.

    Args:
        record: What is known of the layer. Masses are rounded outward here.
        options: What was asked; `proof` says which of the tensors there are.
        eps: The budgets of the layer's groups.
        masses: What `mass_dtype` says for the whole file.
    """
    layer = record.layer
    sets: dict[str, NDArray[Any]] = _sets("indices", "indptr", record.indices, options)
    sets["indices"] = sets["indices"].astype(index_type(layer))
    if options.block_size > 1:
        blocks = [np.unique(indices // options.block_size) for indices in record.indices]
        sets |= _sets("blocks", "block_indptr", blocks, options)
        sets["blocks"] = sets["blocks"].astype(index_type(layer))
    if options.holdout > 0:
        sets["held_out"] = record.held_out
    if options.coverage < 1:
        sets["left_out"] = record.left_out
    if options.proof != "none":
        sets |= _proof(record)
    upper = upper_ends(record.upper, masses)
    if options.proof == "full":
        sets |= {"tail_mass_upper": upper, "tail_mass_lower": lower_ends(record.lower, masses)}
    elif options.proof == "compact":
        sets["worst_tail_mass"] = np.where(record.promised(), upper, 0).max(axis=1)
        if options.holdout > 0:
            of_head = np.repeat(np.asarray(eps, float), layer.heads // len(eps))
            over = upper[:, record.held_out] > of_head[:, None]
            sets["violations"] = over.sum(axis=1, dtype=np.int64)
    return {f"layers.{layer.index}.{name}": array for name, array in sets.items()}


def most_left_out(coverage: float, rows: int) -> int:
    """How many of `rows` rows may be left out: floor((1 - coverage) * rows).

    `coverage` is the decimal number that the certificate shows, so that .9 of 10 rows leaves one
    out, though the float is more than 9/10.
    """
    return math.floor((1 - Fraction(repr(coverage))) * rows)


def most_held_out(holdout: float, m: int) -> int:
    """How many of `m` queries may be set aside: ceil(holdout * m), but not all.

    `holdout` is the decimal number that the certificate shows.
    """
    return min(math.ceil(Fraction(repr(holdout)) * m), m - 1)


def index_type(layer: Layer) -> type[np.signedinteger]:
    """The type of positions: 32 bits where they suffice."""
    return np.int32 if layer.n < 1 << 31 else np.int64


def _sets(
    name: str, starts: str, groups: Sequence[NDArray[np.int64]], options: Options
) -> dict[str, NDArray[Any]]:
    found: dict[str, NDArray[Any]] = {name: np.concatenate(groups)}
    if options.granularity == "head":
        found[starts] = np.cumsum([0, *map(len, groups)], dtype=np.int64)
    return found


def _proof(record: LayerRecord) -> dict[str, NDArray[Any]]:
    weights = stored_weights(record.weights).reshape(-1)
    rows = np.flatnonzero(weights)
    return {
        "lower_bound": record.lower_bound,
        "lower_bound_rows": rows.astype(np.int64),
        "lower_bound_weights": weights[rows],
    }
