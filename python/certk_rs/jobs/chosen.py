"""What was chosen for a layer, or for some kv heads of it: arrays that travel and are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Chosen:
    """The keep-sets of some groups of one layer, as they are recorded.

    G groups, each a kv head, or one for the layer; `heads` are the query heads of these groups.
    Masses are in the dtype of the output, rounded outward; rows are numbered head * m + query in
    the layer.
    """

    layer: int
    first_head: int
    """The first kv head of these."""
    indices: tuple[NDArray[np.int64], ...]
    """Positions kept in each group, ascending."""
    eps: NDArray[np.float64]
    """Budget of each group, (G,)."""
    upper: NDArray[Any] | None
    """Upper ends of the tail masses, (heads, m), where they were asked for."""
    lower: NDArray[Any] | None
    worst: NDArray[Any]
    """Largest upper end among the promised rows of each query head, (heads,)."""
    over: NDArray[np.int64]
    """Promised rows over their budget, (heads,)."""
    violating: NDArray[np.int64]
    """Queries set aside that may lose more than the budget in any head of the group, (G,)."""
    lower_bounds: NDArray[np.int64]
    """No set of fewer keys (or blocks) does it, (G,)."""
    weight_rows: NDArray[np.int64]
    """Rows with a weight in the proof of the lower bound, ascending, (r,)."""
    weights: NDArray[np.float32]
    """Their weights, > 0, (r,)."""
    held_out: NDArray[np.int64]
    """Positions of the queries set aside, ascending."""
    left_out: NDArray[np.int64]
    """Rows that `coverage` leaves out, ascending."""

    @staticmethod
    def joined(parts: Sequence[Chosen]) -> Chosen:
        """Those of neighbouring groups of one layer, in their order, as one."""
        if len(parts) == 1:
            return parts[0]

        def all_of(name: str) -> Any:
            arrays = [getattr(part, name) for part in parts]
            return None if arrays[0] is None else np.concatenate(arrays)

        joined = {field.name: all_of(field.name) for field in fields(Chosen)[3:]}
        return Chosen(
            parts[0].layer,
            parts[0].first_head,
            tuple(indices for part in parts for indices in part.indices),
            **joined | {"held_out": parts[0].held_out},
        )

    def to_parts(self, stem: str, arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
        """Put the arrays where they are asked for, under names that begin with `stem`."""
        arrays[stem + "indices"] = np.concatenate(self.indices)
        arrays[stem + "sizes"] = np.array([len(indices) for indices in self.indices])
        for field in fields(Chosen)[3:]:
            if (value := getattr(self, field.name)) is not None:
                arrays[stem + field.name] = value
        return {"kind": "chosen", "stem": stem, "layer": self.layer, "first_head": self.first_head}

    @staticmethod
    def of_parts(body: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Chosen:
        """The inverse of `to_parts`."""
        stem = body["stem"]
        sizes = np.cumsum(arrays[stem + "sizes"])[:-1]
        rest = {field.name: arrays.get(stem + field.name) for field in fields(Chosen)[3:]}
        indices = tuple(np.split(arrays[stem + "indices"], sizes))
        return Chosen(int(body["layer"]), int(body["first_head"]), indices, **rest)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Probe:
    """How many keys (or blocks) each group of a layer would keep at several budgets.

    `kept` and `lower_bounds` have shape (budgets, G).
    """

    layer: int
    first_head: int
    kept: NDArray[np.int64]
    lower_bounds: NDArray[np.int64]

    @staticmethod
    def joined(parts: Sequence[Probe]) -> Probe:
        """Those of neighbouring groups of one layer as one."""
        return Probe(
            parts[0].layer,
            parts[0].first_head,
            np.concatenate([part.kept for part in parts], axis=1),
            np.concatenate([part.lower_bounds for part in parts], axis=1),
        )

    def to_parts(self, stem: str, arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
        """Put the arrays where they are asked for, under names that begin with `stem`."""
        arrays[stem + "kept"], arrays[stem + "lower_bounds"] = self.kept, self.lower_bounds
        return {"kind": "probe", "stem": stem, "layer": self.layer, "first_head": self.first_head}

    @staticmethod
    def of_parts(body: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Probe:
        """The inverse of `to_parts`."""
        stem = body["stem"]
        kept, bounds = arrays[stem + "kept"], arrays[stem + "lower_bounds"]
        return Probe(int(body["layer"]), int(body["first_head"]), kept, bounds)


@dataclass(frozen=True, eq=False)
class Demands:
    """How often the visible keys of each group of a layer are needed: `shares` (G, visible)."""

    layer: int
    first_head: int
    shares: NDArray[np.float64]

    @staticmethod
    def joined(parts: Sequence[Demands]) -> Demands:
        """Those of neighbouring groups of one layer as one."""
        shares = np.concatenate([part.shares for part in parts])
        return Demands(parts[0].layer, parts[0].first_head, shares)

    def to_parts(self, stem: str, arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
        """Put the array where it is asked for, under a name that begins with `stem`."""
        arrays[stem + "shares"] = self.shares
        return {"kind": "demands", "stem": stem, "layer": self.layer, "first_head": self.first_head}

    @staticmethod
    def of_parts(body: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Demands:
        """The inverse of `to_parts`."""
        shares = arrays[body["stem"] + "shares"]
        return Demands(int(body["layer"]), int(body["first_head"]), shares)


Answer: TypeAlias = Chosen | Probe | Demands
"""What comes of a unit, for each of its layers."""
