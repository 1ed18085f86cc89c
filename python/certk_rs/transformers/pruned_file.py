"""Outputs of `certk prune` as caches: tensors, budgets and guards of their layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .._files.guards import guard_forms, guarded_heads
from .._files.layers import Layer
from .._files.output import OutputReader
from .._files.safetensors import NAMES
from ..errors import CertkError
from ..guard import Guard, others
from .stored import tensor


@dataclass(frozen=True, eq=False)
class KeptRows:
    """The rows of one layer: of each kv head keys and values (kept, d), and recorded masses."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    masses: NDArray[Any] | None


class PrunedFile(OutputReader):
    """An open output, each tensor of which has the SHA-256 that the certificate states."""

    def rows(self, layer: Layer) -> KeptRows:
        """Read the kept rows of a layer."""
        both = [tensor(self.tensor(layer, role), layer.dtypes[role]) for role in ("key", "value")]
        masses = {"full": "tail_mass_upper", "compact": "worst_tail_mass"}
        name = masses.get(self.certificate.options.proof)
        upper = None if name is None else self.tensor(layer, name)
        if not self.by_head:
            return KeptRows(list(both[0]), list(both[1]), upper)
        kept = np.diff(self.ends(layer)).tolist()
        keys, values = (list(torch.split(flat, kept)) for flat in both)
        return KeptRows(keys, values, upper)

    def budgets(self, layer: Layer) -> tuple[float, ...]:
        """Return the budget of each kv head of a layer."""
        groups = self.certificate.eps[layer.index]
        if not all(0 <= eps < 1 for eps in groups):
            raise self.wrong(f"layer {layer.index} has a budget that is none")
        return groups * (layer.kv_heads // len(groups))

    @property
    def largest_eps(self) -> float:
        """The largest budget of all layers."""
        return max(max(self.budgets(layer)) for layer in self.layers)

    def guard(self, layer: Layer) -> Guard:
        """Read the guard of the dropped rows of a layer."""
        groups = self.sets(layer)
        gone = [others(kept, layer.n) for kept in groups] * (layer.kv_heads // len(groups))
        tensors = {name: self.tensor(layer, name) for name in guard_forms(layer, 0, 0)}
        try:
            heads = guarded_heads(tensors, [len(each) for each in gone], layer.d)
        except ValueError as error:
            raise self.wrong(f"layer {layer.index}: {error}") from None
        shape = (layer.kv_heads, layer.n, layer.d)
        try:
            return Guard.of_heads(shape, NAMES[layer.dtypes["key"]], heads, gone)
        except CertkError as error:
            raise self.wrong(f"the guard of layer {layer.index} is none: {error}") from None
