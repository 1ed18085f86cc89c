"""What `certk prune` writes: the tensors of an output, its header, and the file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .atomic import NewFile
from .certificate import Certificate, TensorFacts
from .layers import Layer
from .safetensors import STORAGE, Form, Header, canonical


def output_tensors(layer: Layer, granularity: str, kept: Sequence[int]) -> dict[str, Form]:
    """Names, dtypes and shapes of one layer of an output that keeps `kept[g]` keys in group g."""
    stem, rows = f"layers.{layer.index}.", (layer.heads, layer.m)
    total = sum(kept)
    by_head = granularity == "head"
    pruned = (total, layer.d) if by_head else (layer.kv_heads, total, layer.d)
    tensors: dict[str, Form] = {
        stem + "indices": ("I32" if layer.n < 1 << 31 else "I64", (total,)),
        stem + "key": (layer.dtypes["key"], pruned),
        stem + "value": (layer.dtypes["value"], pruned),
        stem + "tail_mass_upper": ("F64", rows),
        stem + "tail_mass_lower": ("F64", rows),
        stem + "lower_bound": ("I64", (layer.kv_heads if by_head else 1,)),
        stem + "lower_bound_weights": ("F64", rows),
    }
    if by_head:
        tensors[stem + "indptr"] = ("I64", (layer.kv_heads + 1,))
    return tensors


def output_header(certificate: Certificate) -> Header:
    """The one header that goes with a certificate: its outputs, and itself as the only metadata."""
    tensors = {name: (facts.dtype, facts.shape) for name, facts in certificate.outputs.items()}
    return canonical(tensors, {"certk": certificate.to_json()})


class OutputFile(NewFile):
    """One output in the making, written tensor by tensor in any order.

    The length of the header is known before the hashes are, so the data can go to its place at once
    and no more than one tensor need be in memory.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Form], certificate: Certificate) -> None:
        super().__init__(path)
        self._certificate = certificate
        self._facts = {
            name: TensorFacts(dtype, shape, "0" * 64) for name, (dtype, shape) in tensors.items()
        }
        self._missing = set(tensors)
        self._header = self._make_header()

    def _make_header(self) -> Header:
        return output_header(replace(self._certificate, outputs=self._facts))

    def write(self, name: str, array: NDArray[Any]) -> None:
        """Write one tensor; `array` in the storage type of its dtype, C order."""
        facts = self._facts[name]
        array = np.ascontiguousarray(array, STORAGE[facts.dtype])
        if array.shape != facts.shape:
            raise AssertionError(f"{name}: {array.shape} is not the planned {facts.shape}")
        data = array.reshape(-1).view(np.uint8).data
        self._facts[name] = replace(facts, sha256=hashlib.sha256(data).hexdigest())
        entry = self._header.entries[name]
        self.write_at(len(self._header.raw) + entry.start, data)
        self._missing.remove(name)

    def commit(self) -> None:
        """Write the header, and give the file its name."""
        if self._missing:
            raise AssertionError(f"never written: {sorted(self._missing)}")
        self.write_at(0, self._make_header().raw)
        super().commit()
