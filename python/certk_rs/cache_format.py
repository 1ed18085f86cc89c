"""Cache files: the one place that knows the names, shapes and metadata of inputs and outputs.

**Input.** A safetensors file with, for every layer i, `layers.{i}.key` and `layers.{i}.value` of
shape (1, kv_heads, n, d) or (kv_heads, n, d) and `layers.{i}.query` of shape (1, heads, m, d) or
(heads, m, d), heads a multiple of kv_heads (query heads h*group .. (h+1)*group - 1 share kv head
h), in F32, F16 or BF16. Other spellings are found by themselves (`KNOWN_NAMES`) or told by a
pattern such as `model.{i}.attn.{key|value|query}`: exactly one `{i}` (the layer number) and exactly
one `{a|b|c}`, the three words for key, value and query in this order. Optional metadata: `scale`, a
decimal string or `1/sqrt(N)` (default: the float64 nearest d^-1/2), and `causal_offset`, an integer
(query i sees the keys <= i + offset; default: every query sees every key).

**Output.** One safetensors file in the canonical form of `_files.safetensors`, self-contained:

    layers.{i}.indices              kept positions of the input, ascending, I32 (I64 if n >= 2^31):
                                    (total,), one kv head after the other, or (kept,) by layer
    layers.{i}.indptr               (kv_heads + 1,) I64, by head only
    layers.{i}.key, .value          (total, d), or (kv_heads, kept, d) by layer: the kept rows
    layers.{i}.tail_mass_upper      (heads, m) F64, and .tail_mass_lower
    layers.{i}.lower_bound          (kv_heads,), or (1,) by layer, I64: no smaller set will do
    layers.{i}.lower_bound_weights  (heads, m) F64: the mixture of the rows that proves it

and one metadata entry `certk`: the `Certificate` as canonical JSON (sorted keys, no spaces,
shortest floats).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._files.certificate import Certificate, Options, TensorFacts, read_certificate
from ._files.layers import Layer, layout, nearest_rsqrt, read_metadata
from ._files.names import DEFAULT_NAMES, KNOWN_NAMES, Names, detect
from ._files.output import OutputFile, output_header, output_tensors
from ._files.safetensors import STORAGE, Form, SafetensorsFile
from ._files.values import not_finite, widen
from .errors import CertkError

__all__ = [
    "DEFAULT_NAMES",
    "KNOWN_NAMES",
    "Cache",
    "Certificate",
    "Form",
    "Layer",
    "Names",
    "Options",
    "OutputFile",
    "SafetensorsFile",
    "TensorFacts",
    "detect",
    "layout",
    "nearest_rsqrt",
    "output_header",
    "output_tensors",
    "read_certificate",
    "read_metadata",
    "widen",
]


class Cache:
    """An input file, opened; names, shapes and metadata have been checked, the values not yet."""

    def __init__(self, path: Path, pattern: str | None = None) -> None:
        self.path = path
        self.file = SafetensorsFile(path)
        try:
            entries = self.file.header.entries
            self.names = Names(pattern) if pattern is not None else detect(str(path), entries)
            tensors = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
            self.layers = layout(str(path), tensors, self.names)
            self.scales, self.causal_offset = read_metadata(
                str(path), self.file.header.metadata, self.layers
            )
        except BaseException:
            self.file.close()
            raise
        self.others = tuple(name for name in entries if self.names.match(name) is None)

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def read(self, layer: Layer, role: str) -> NDArray[Any]:
        """The stored tensor without its batch axis: (heads, m, d) or (kv_heads, n, d)."""
        raw = self.file.read(layer.names[role])
        return raw.reshape(raw.shape[-3:])

    def heads(self, layer: Layer) -> Iterator[tuple[int, NDArray[np.float64], NDArray[np.float64]]]:
        """Each query head in turn, with its queries (m, d) and its keys (n, d), widened exactly.

        Query heads that share a kv head are given the same array of keys.
        """
        query, key = self.read(layer, "query"), self.read(layer, "key")
        group = layer.heads // layer.kv_heads
        for kv_head in range(layer.kv_heads):
            keys = widen(key[kv_head], layer.dtypes["key"])
            for head in range(kv_head * group, (kv_head + 1) * group):
                yield head, widen(query[head], layer.dtypes["query"]), keys

    def check_values(self, progress: Callable[[int], None]) -> dict[str, TensorFacts]:
        """Read everything once: the hash of every tensor; NaN and infinities are a `CertkError`.

        `progress` is told the number of bytes after every piece.
        """
        facts = {}
        for name, entry in self.file.header.entries.items():
            digest, position = hashlib.sha256(), 0
            for chunk in self.file.chunks(name):
                digest.update(chunk.data)
                if self.names.match(name) is not None:
                    self._check_finite(name, chunk, position)
                position += len(chunk)
                progress(len(chunk))
            facts[name] = TensorFacts(entry.dtype, entry.shape, digest.hexdigest())
        return facts

    def _check_finite(self, name: str, chunk: NDArray[np.uint8], position: int) -> None:
        entry = self.file.header.entries[name]
        stored = chunk.view(STORAGE[entry.dtype])
        bad = not_finite(stored, entry.dtype)
        if len(bad):
            first = int(bad[0])
            with np.errstate(invalid="ignore"):  # the NaN may be a signalling one
                value = widen(stored[first : first + 1], entry.dtype)[0]
            index = np.unravel_index(first + position // stored.itemsize, entry.shape)
            place = ", ".join(str(int(axis)) for axis in index)
            raise CertkError(
                f"{self.path}: tensor {name!r} is {value} at [{place}]: a cache must be finite"
            )
