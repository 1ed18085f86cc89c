"""An output of `certk prune` as it is read for a cache: every tensor as the certificate has it."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .._files.guards import guard_forms, guarded_heads
from ..cache_format import (
    NAMES,
    Form,
    Layer,
    Names,
    SafetensorsFile,
    counts_in,
    layout,
    output_tensors,
    read_certificate,
)
from ..errors import CertkError
from ..guard import Guard, others
from .stored import tensor


@dataclass(frozen=True, eq=False)
class KeptRows:
    """The rows of one layer: of each kv head keys and values (kept, d), and recorded masses."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    masses: NDArray[Any] | None


class PrunedFile:
    """An open output with the text of its certificate.

    Everything that is handed out has the SHA-256 that the certificate says; whether that is true of
    an input, `certk verify` tells.
    """

    def __init__(self, file: SafetensorsFile, text: str) -> None:
        """Raise `CertkError` if the certificate cannot be read, or the tensors are not its own."""
        self._file = file
        try:
            self.certificate, problem = read_certificate(text)
        except (ValueError, RecursionError) as error:
            raise CertkError(f"{file.path}: its certificate cannot be read: {error}") from None
        if problem is not None:
            raise CertkError(f"{file.path}: its certificate does not hold: {problem}")
        said = self.certificate
        inputs = {name: (facts.dtype, facts.shape) for name, facts in said.inputs.items()}
        self.layers = layout(str(file.path), inputs, Names(said.names), said.options.layout)
        for layer in self.layers:
            counts = counts_in(self._held, layer)
            for name, form in output_tensors(layer, said.options, counts, said.mass_dtype).items():
                if self._held.get(name) != form:
                    raise CertkError(
                        f"{file.path}: tensor {name!r} is not the one that was certified: it is "
                        "missing, or of another dtype or shape"
                    )

    @cached_property
    def _held(self) -> dict[str, Form]:
        entries = self._file.header.entries
        return {name: (entry.dtype, entry.shape) for name, entry in entries.items()}

    def _read(self, layer: Layer, role: str) -> NDArray[Any]:
        name = f"layers.{layer.index}.{role}"
        facts, array = self.certificate.outputs.get(name), self._file.read(name)
        if facts is None or facts.sha256 != hashlib.sha256(array.data).hexdigest():
            raise CertkError(
                f"{self._file.path}: tensor {name!r} is not the one that was certified"
            )
        return array

    def rows(self, layer: Layer) -> KeptRows:
        """Read the kept rows of a layer."""
        options = self.certificate.options
        both = [tensor(self._read(layer, role), layer.dtypes[role]) for role in ("key", "value")]
        masses = {"full": "tail_mass_upper", "compact": "worst_tail_mass"}.get(options.proof)
        upper = None if masses is None else self._read(layer, masses)
        if options.granularity != "head":
            return KeptRows(list(both[0]), list(both[1]), upper)
        kept = np.diff(self._starts(layer)).tolist()
        keys, values = (list(torch.split(flat, kept)) for flat in both)
        return KeptRows(keys, values, upper)

    def budgets(self, layer: Layer) -> tuple[float, ...]:
        """Return the budget of each kv head of a layer."""
        groups = self.certificate.eps.get(layer.index, ())
        if len(groups) not in (1, layer.kv_heads) or not all(0 <= eps < 1 for eps in groups):
            raise CertkError(f"{self._file.path}: layer {layer.index} has no budget for each set")
        return groups * (layer.kv_heads // len(groups))

    @property
    def largest_eps(self) -> float:
        """The largest budget of all layers."""
        return max(max(self.budgets(layer)) for layer in self.layers)

    def guard(self, layer: Layer) -> Guard:
        """Read the guard of the dropped rows of a layer."""
        every = self._read(layer, "indices").astype(np.int64)
        groups = [every] * layer.kv_heads
        if self.certificate.options.granularity == "head":
            groups = np.split(every, self._starts(layer)[1:-1])
        for kept in groups:
            inside = not len(kept) or (kept[0] >= 0 and kept[-1] < layer.n)
            if not inside or (np.diff(kept) <= 0).any():
                raise CertkError(
                    f"{self._file.path}: tensor layers.{layer.index}.indices does not ascend from "
                    f"0 to {layer.n - 1} in each set"
                )
        gone = [others(kept, layer.n) for kept in groups]
        names = guard_forms(layer, 0, 0)
        tensors = {name: self._read(layer, name) for name in names}
        try:
            heads = guarded_heads(tensors, [len(each) for each in gone], layer.d)
        except ValueError as error:
            raise CertkError(f"{self._file.path}: layer {layer.index}: {error}") from None
        shape = (layer.kv_heads, layer.n, layer.d)
        try:
            return Guard.of_heads(shape, NAMES[layer.dtypes["key"]], heads, gone)
        except CertkError as error:
            where = f"{self._file.path}: the guard of layer {layer.index} is none"
            raise CertkError(f"{where}: {error}") from None

    def _starts(self, layer: Layer) -> list[int]:
        starts: list[int] = self._read(layer, "indptr").tolist()  # as integers that do not wrap
        total = self._file.header.entries[f"layers.{layer.index}.indices"].shape[0]
        falls = any(a > b for a, b in itertools.pairwise(starts))
        if [*starts[:1], *starts[-1:]] != [0, total] or falls:
            raise CertkError(
                f"{self._file.path}: tensor layers.{layer.index}.indptr does not rise from 0 to "
                f"the {total} kept"
            )
        return starts
