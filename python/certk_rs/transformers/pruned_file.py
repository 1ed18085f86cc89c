"""Outputs of `certk prune` as caches: tensors, budgets, guards and codes of their layers."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .. import _native
from .._files.codes import ROLES, code_forms, index_file
from .._files.guards import guard_forms, guarded_heads
from .._files.layers import Layer
from .._files.output import OutputReader
from .._files.safetensors import NAMES
from ..errors import CertkError
from ..guard import Guard, others
from ..kv_index import KvIndex
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

    def codes(self, layer: Layer) -> tuple[KvIndex, list[torch.Tensor], list[NDArray[np.int64]]]:
        """Read the codes of a layer (1, kv_heads, n, d), and exact keys and values of some rows.

        Exact are the kept rows, and those of keys without a code: (rows, d), at the positions of
        each kv head.
        """
        bits = self.certificate.options.bits
        forms = code_forms(layer, bits, 0)
        tensors = {name: self.tensor(layer, name) for name in forms}
        try:
            files = [BytesIO(index_file(of, bits[of], tensors, layer).data) for of in ROLES]
            keys = _native.KeyIndex.read_from(files[0])
            index = KvIndex._of(keys, None, _native.ValueIndex.read_from(files[1]))
        except CertkError as error:
            raise self.wrong(f"the codes of layer {layer.index} are none: {error}") from None
        groups = self.sets(layer)
        groups *= layer.kv_heads // len(groups)
        kept = self.rows(layer)
        bare = [np.flatnonzero(scales == 0) for scales in tensors["key_scales"]]
        counts = [len(each) for each in bare]
        if len(tensors["key_bare"]) != sum(counts):
            raise self.wrong(f"layer {layer.index} has not the rows of its keys without a code")
        places = [np.concatenate(pair) for pair in zip(groups, bare, strict=True)]
        chosen = [np.unique(each, return_index=True) for each in places]
        rows = []
        for role, stored in (("key", kept.keys), ("value", kept.values)):
            without = torch.split(tensor(tensors[f"{role}_bare"], layer.dtypes[role]), counts)
            pairs = zip(stored, without, chosen, strict=True)
            rows.append(
                torch.cat([torch.cat([a, b])[torch.from_numpy(at)] for a, b, (_, at) in pairs])
            )
        return index, rows, [positions for positions, _ in chosen]

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
