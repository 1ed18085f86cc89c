"""Dropped keys and values where they were captured: single rows of a cache file, by position."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .._files.cache import Cache as CacheFile
from .._files.certificate import TensorFacts
from .._files.layers import Layer
from ..errors import CertkError
from .stored import tensor


class RowsOfFile:
    """A cache file (docs/files.md) that rows are read from; see `Rows`.

    Nothing of it is held in memory, and nothing is mapped: a file that was changed or cut off
    meanwhile is a `CertkError`. Copies and pickles open it again, and need it as it was.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        names: str | None = None,
        layout: str | None = None,
        identity: Any = None,
    ) -> None:
        """Open it, and see that it is the one with that `identity` if one is given."""
        self._path = Path(path).resolve()
        self._how = names, layout
        self._file = CacheFile(self._path, names, layout, "any")
        self._layers = {layer.index: layer for layer in self._file.layers}
        self.identity = self._file.file.identity if identity is None else identity
        self._file.file.check_unchanged(self.identity)

    def __reduce__(self) -> tuple[Any, ...]:
        """Reopen the file in each process, and for each copy."""
        return _opened, (self._path, *self._how, self.identity)

    def check(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Raise `CertkError` unless these are the layer's keys and values (kv_heads, n, d)."""
        stored = self._layer(layer)
        for role, given in (("key", keys), ("value", values)):
            for head in range(given.shape[0]):
                same = given.shape == (stored.kv_heads, stored.n, stored.d) and torch.equal(
                    tensor(
                        self._file.read(stored, role, slice(head, head + 1))[0],
                        stored.dtypes[role],
                    ),
                    given[head],
                )
                if not same:
                    raise CertkError(
                        f"{self._path}: layer {layer} does not hold the {role}s of the cache: pass "
                        "as source the file that it was read from, or that to_cache wrote of it"
                    )

    def check_hashes(self, inputs: Mapping[str, TensorFacts]) -> None:
        """Raise `CertkError` unless its tensors are those of a certificate, by their SHA-256."""
        for name, facts in inputs.items():
            entry = self._file.file.header.entries.get(name)
            same = entry is not None and (entry.dtype, entry.shape) == (facts.dtype, facts.shape)
            if not same or self._file.file.sha256(name) != facts.sha256:
                raise CertkError(
                    f"{self._path}: tensor {name!r} is not the one that was pruned: pass as source "
                    "the input that the output was made of"
                )

    def fetch(
        self, layer: int, head: int, positions: NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Rows`."""
        stored = self._layer(layer)
        self._file.file.check_unchanged(self.identity)
        found = []
        for role in ("key", "value"):
            runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
            parts = [
                self._file.read(
                    stored,
                    role,
                    slice(head, head + 1),
                    rows=slice(int(run[0]), int(run[-1]) + 1),
                )[0]
                for run in runs
                if len(run)
            ]
            found.append(tensor(np.concatenate(parts), stored.dtypes[role]))
        return found[0], found[1]

    def _layer(self, layer: int) -> Layer:
        if layer not in self._layers:
            raise CertkError(f"{self._path} has no layer {layer}: pass the file of this cache")
        return self._layers[layer]


def _opened(path: Path, names: str | None, layout: str | None, identity: Any) -> RowsOfFile:
    return RowsOfFile(path, names=names, layout=layout, identity=identity)
