"""The reader of outputs: a certificate in order, and tensors with the hashes that it states."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CertkError
from .certificate import read_certificate
from .layers import Layer, layout
from .names import Names
from .output import counts_in, output_tensors
from .safetensors import Form, quote
from .tensor_file import SafetensorsFile


class OutputReader:
    """An open output of `certk prune`, checked as far as that is possible without reading tensors.

    Whether it is true of an input, `certk verify` tells.

    Attributes:
        file: The open file.
        certificate: Its certificate.
        layers: The layers of its input, by rising number.

    Raises:
        CertkError: It is no output, or contradicts itself.
    """

    def __init__(self, file: SafetensorsFile) -> None:
        self.file = file
        text = file.header.metadata.get("certk")
        if text is None:
            raise self.wrong("it has no certificate: it is not an output of certk prune")
        try:
            self.certificate, complaint = read_certificate(text)
        except ValueError as error:
            raise self.wrong(f"its certificate cannot be read: {error}") from None
        if complaint is not None:
            raise self.wrong(f"its certificate does not hold: {complaint}")
        said, held = self.certificate, file.header.forms
        self.names = Names(said.names)
        self.layers = layout(str(file.path), said.input_forms, self.names, said.options.layout)
        self.by_head = said.options.granularity == "head"
        planned: dict[str, Form] = {}
        for layer in self.layers:
            counts = counts_in(held, layer)
            planned |= output_tensors(layer, said.options, counts, said.mass_dtype)
            groups = layer.kv_heads if self.by_head else 1
            for budgets in (said.eps, said.bound_eps):
                if budgets is not None and len(budgets.get(layer.index, ())) != groups:
                    raise self.wrong(f"layer {layer.index} has not one budget for each set")
        for name in sorted(planned.keys() | held.keys() | said.outputs.keys()):
            if not planned.get(name) == held.get(name) == said.output_forms.get(name):
                raise self.wrong(
                    f"tensor {quote(name)} is not the one that was certified: it is missing, or of "
                    "another dtype or shape"
                )

    def tensor(self, layer: Layer, name: str) -> NDArray[Any]:
        """Read a tensor of a layer; a `CertkError` if it has not the hash of the certificate."""
        full = f"layers.{layer.index}.{name}"
        array = self.file.read(full)
        if hashlib.sha256(array.data).hexdigest() != self.certificate.outputs[full].sha256:
            raise self.wrong(
                f"tensor {quote(full)} is not the one that was certified: it has not the hash that "
                "the certificate states"
            )
        return array

    def optional(self, layer: Layer, name: str) -> NDArray[Any] | None:
        """Read a tensor as `tensor` does; None if there is none of this name."""
        there = f"layers.{layer.index}.{name}" in self.file.header.entries
        return self.tensor(layer, name) if there else None

    def ends(self, layer: Layer) -> list[int]:
        """Return the ends of the groups among the kept positions of a layer, beginning with 0."""
        total = self.file.header.entries[f"layers.{layer.index}.indices"].shape[0]
        # As Python integers, whose differences do not wrap.
        ends = self.tensor(layer, "indptr").tolist() if self.by_head else [0, total]
        if not rises(ends, total):
            raise self.wrong(
                f"tensor layers.{layer.index}.indptr does not rise from 0 to the {total} kept"
            )
        return ends

    def sets(self, layer: Layer) -> list[NDArray[np.int64]]:
        """Return the kept positions of each group of a layer, ascending."""
        every = self.tensor(layer, "indices").astype(np.int64)
        groups = np.split(every, self.ends(layer)[1:-1])
        for kept in groups:
            inside = not len(kept) or (kept[0] >= 0 and kept[-1] < layer.n)
            if not inside or (kept[1:] <= kept[:-1]).any():
                raise self.wrong(
                    f"tensor layers.{layer.index}.indices does not ascend from 0 to {layer.n - 1} "
                    "in each set"
                )
        return groups

    def wrong(self, what: str) -> CertkError:
        """Return the error for this output."""
        return CertkError(f"{self.file.path}: {what}: see what certk verify says of it")


def rises(ends: list[int], total: int) -> bool:
    """Return True if ends of groups rise from 0 to `total`."""
    return [*ends[:1], *ends[-1:]] == [0, total] and all(a <= b for a, b in pairwise(ends))
