"""Inputs of jobs: a cache whose names, shapes and metadata are checked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CertkError
from . import layers
from .certificate import TensorFacts
from .layers import Layer
from .location import Place
from .names import Names, detect
from .safetensors import ITEMSIZE, STORAGE, quote
from .sharded import open_tensors
from .transposed import ROW_MAJOR
from .values import FiniteCheck, widen

_PART = 1 << 20


class Cache:
    """An open input; names, shapes and metadata are checked, values are not.

    Args:
        path: A safetensors file or the index JSON of a sharded one, a path or a URL.
        pattern: Of the tensor names; None for the known spelling that occurs.
        layout: "hnd", "nhd", or None: (heads, rows, d), and what looks otherwise is an error.
        queries: "file" wants them, "none" wants none, "any" takes both.
    """

    def __init__(
        self,
        path: Place,
        pattern: str | None = None,
        layout: str | None = None,
        queries: str = "file",
    ) -> None:
        self.file = open_tensors(path)
        self.path = self.file.path
        where = str(path)
        try:
            entries = self.file.header.entries
            self.names = Names(pattern) if pattern is not None else detect(where, entries)
            self.layers = layers.layout(where, self.file.header.forms, self.names, layout, queries)
            self.scales, self.causal_offset = layers.read_metadata(
                where, self.file.header.metadata, self.layers
            )
        except BaseException:
            self.file.close()
            raise
        self.others = tuple(name for name in entries if self.names.match(name) is None)
        self._checks: dict[str, _TensorCheck] = {}

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    @property
    def warnings(self) -> list[str]:
        """Remarks on an input that can be pruned all the same, a line each."""
        said = layers.remarks(self.layers, self.causal_offset, self.others, self.names.pattern)
        return [f"{self.path}: {remark}" for remark in said]

    def read(
        self,
        layer: Layer,
        role: str,
        heads: slice = slice(None),
        *,
        rows: slice = slice(None),
        buffer: NDArray[np.uint8] | None = None,
    ) -> NDArray[Any]:
        """Read some rows of some heads as stored: (heads, m, d), or (kv_heads, n, d).

        The order of axes does not depend on the layout; `buffer` as in `file.read_heads`.
        """
        return self.file.read_heads(
            layer.names[role], heads, rows, layout=layer.layout, buffer=buffer
        )

    def by_head(self, layer: Layer, role: str) -> Iterator[NDArray[Any]]:
        """Yield each head as stored, (m, d) or (n, d); the next head may reuse its memory.

        From layout "hnd", memory holds one head. From "nhd", all are read at once, since reading
        one head alone would mean reading all.
        """
        if layer.layout == ROW_MAJOR:
            yield from self.read(layer, role)
            return
        buffer = self.room(layer, role)
        for head in range(layer.heads if role == "query" else layer.kv_heads):
            yield self.read(layer, role, slice(head, head + 1), buffer=buffer)[0]

    def room(self, layer: Layer, role: str, heads: int = 1) -> NDArray[np.uint8]:
        """Allocate a `buffer` for so many heads."""
        rows = layer.m if role == "query" else layer.n
        return np.empty(heads * rows * layer.d * ITEMSIZE[layer.dtypes[role]], np.uint8)

    def heads(self, layer: Layer) -> Iterator[tuple[int, NDArray[np.float64], NDArray[np.float64]]]:
        """Yield each query head with its queries (m, d) and its keys (n, d) as float64, exactly.

        Query heads that share a kv head get the same array of keys.
        """
        query, key = self.read(layer, "query"), self.read(layer, "key")
        group = layer.heads // layer.kv_heads
        for kv_head in range(layer.kv_heads):
            keys = widen(key[kv_head], layer.dtypes["key"])
            for head in range(kv_head * group, (kv_head + 1) * group):
                yield head, widen(query[head], layer.dtypes["query"]), keys

    def check_values(self) -> dict[str, TensorFacts]:
        """Hash every tensor; NaN and infinities in a tensor of the cache are a `CertkError`."""
        return {name: self.check_tensor(name) for name in self.file.header.entries}

    def check_while_reading(self, names: Iterable[str]) -> None:
        """Check these tensors as `check_tensor` does as far as they are read in order.

        `check_tensor` then reads only the rest.
        """
        self._checks |= {name: _TensorCheck(self, name) for name in names}
        self.file.on_read = self._add

    def _add(self, name: str, start: int, data: memoryview) -> None:
        check = self._checks.get(name)
        if check is not None and check.position == start:
            check.add(np.frombuffer(data, np.uint8))

    def check_tensor(self, name: str) -> TensorFacts:
        """Hash one tensor, as `check_values` does."""
        if name not in self._checks:
            self.check_while_reading([name])
        for _ in self.file.chunks(name, start=self._checks[name].position):
            pass
        return self._checks.pop(name).facts()


class _TensorCheck:
    """Hash of a tensor so far; NaN and infinities in a tensor of the cache are an error."""

    def __init__(self, cache: Cache, name: str) -> None:
        self._path, self._name = cache.path, name
        self._entry = entry = cache.file.header.entries[name]
        self._digest, self.position = hashlib.sha256(), 0
        self._finite = FiniteCheck(entry.dtype) if cache.names.match(name) is not None else None

    def add(self, data: NDArray[np.uint8]) -> None:
        """Take the bytes that follow."""
        # In parts that stay in the cache of a core for both.
        for start in range(0, len(data), _PART):
            part = data[start : start + _PART]
            self._digest.update(part.data)
            if self._finite is not None and (bad := self._finite.first_bad(part)) is not None:
                raise self._not_finite(part, bad)
            self.position += len(part)

    def facts(self) -> TensorFacts:
        """Return the facts of the whole tensor."""
        return TensorFacts(self._entry.dtype, self._entry.shape, self._digest.hexdigest())

    def _not_finite(self, part: NDArray[np.uint8], bad: int) -> CertkError:
        entry = self._entry
        stored = part.view(STORAGE[entry.dtype])
        with np.errstate(invalid="ignore"):  # a signalling NaN
            value = widen(stored[bad : bad + 1], entry.dtype)[0]
        index = np.unravel_index(bad + self.position // stored.itemsize, entry.shape)
        place = ", ".join(str(int(axis)) for axis in index)
        return CertkError(
            f"{self._path}: tensor {quote(self._name)} is {value} at [{place}]: a cache must be "
            "finite"
        )
