"""An output from what was chosen for its layers: the kept rows are copied, byte for byte."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import __version__
from .._files.guards import code_bytes, guard_tensors
from .._files.location import Location
from .._files.tensor_file import Header
from ..cache_format import (
    STORAGE,
    Budgets,
    Cache,
    Certificate,
    Counts,
    Form,
    Layer,
    Options,
    OutputFile,
    TensorFacts,
    output_tensors,
)
from ..guard import guard_head, others
from .chosen import Chosen
from .finished import header_of_output
from .record import chosen_tensors
from .solve import as_native


@dataclass(frozen=True)
class Order:
    """What to write, and where. Plain values: an engine may do it anywhere.

    `facts` are those of every tensor of the input, `identity` that of the input they were found in.
    """

    source: Location
    names: str | None
    layout: str | None
    identity: tuple[Any, ...]
    target: Location
    replace: bool
    options: Options
    eps: Budgets
    bound_eps: Budgets | None
    masses: str
    facts: Mapping[str, TensorFacts]


@dataclass(frozen=True)
class Written:
    """What is now on the disk."""

    header_sha256: str
    output_bytes: int
    proof_bytes: int
    guard_bytes: int


def assemble(order: Order, chosen: tuple[Chosen, ...]) -> Written:
    """Write one output; on any failure nothing is left of it.

    Memory holds about one kv head of one layer. An output that is there and is, byte for byte, what
    would be written is left as it is: a worker may have been lost after it had written it.

    Raises:
        CertkError: The input has changed since the sets were chosen, or the output is there.
        OSError: The system refuses to read or to write.
    """
    with Cache(order.source, order.names, order.layout) as cache:
        cache.file.check_unchanged(order.identity)
        tensors: dict[str, Form] = {}
        proofs: dict[str, NDArray[Any]] = {}
        of_layer = {layer.index: layer for layer in cache.layers}
        for each in chosen:
            layer = of_layer[each.layer]
            counts = _counts(each, layer, order)
            tensors |= output_tensors(layer, order.options, counts, order.masses)
            proofs |= chosen_tensors(layer, each, order.options)
        certificate = Certificate(
            library=__version__,
            eps=order.eps,
            bound_eps=order.bound_eps,
            options=order.options,
            names=cache.names.pattern,
            causal_offset=cache.causal_offset,
            scales=cache.scales,
            input_headers=tuple(cache.file.header_sha256s()),
            inputs=order.facts,
            outputs={},
        )
        if not order.replace:
            there = header_of_output(order.target, certificate)
            if there is not None:
                return _written(there, proofs)
        # By --recursive, outputs are in directories as their inputs are.
        order.target.beside("").make_directory()
        with OutputFile(order.target, tensors, certificate, replace=order.replace) as output:
            for name, array in proofs.items():
                output.write(name, array)
            for each in chosen:
                _copy(cache, of_layer[each.layer], each, order.options, output)
                if order.options.guard != "none":
                    _guard(cache, of_layer[each.layer], each, output)
            cache.file.check_unchanged(order.identity)
            output.commit()
            header = output.header()
        return _written(header, proofs)


def _written(header: Header, proofs: Mapping[str, NDArray[Any]]) -> Written:
    entries = header.entries
    size = len(header.raw) + max((entry.stop for entry in entries.values()), default=0)
    proof = sum(array.nbytes for array in proofs.values())
    rest = [entry for name, entry in entries.items() if name.rpartition(".")[2].startswith("guard")]
    guard = sum(entry.stop - entry.start for entry in rest)
    return Written(hashlib.sha256(header.raw).hexdigest(), size, proof, guard)


def _counts(chosen: Chosen, layer: Layer, order: Order) -> Counts:
    size = order.options.block_size
    return Counts(
        kept=[len(indices) for indices in chosen.indices],
        blocks=[len(np.unique(i // size)) for i in chosen.indices] if size > 1 else (),
        weighted=len(chosen.weight_rows),
        left_out=len(chosen.left_out),
        codes=sum(code_bytes(len(gone), layer.d) for gone in _dropped(layer, chosen)),
    )


def _copy(cache: Cache, layer: Layer, chosen: Chosen, options: Options, output: OutputFile) -> None:
    """Write the kept rows of one layer, a kv head at a time."""
    for role in ("key", "value"):
        shape: tuple[int, ...] = (sum(map(len, chosen.indices)), layer.d)
        if options.granularity != "head":
            shape = (layer.kv_heads, len(chosen.indices[0]), layer.d)
        rows = np.empty(shape, STORAGE[layer.dtypes[role]])
        start = 0
        for head, stored in enumerate(cache.by_head(layer, role)):
            if options.granularity == "head":
                indices = chosen.indices[head]
                # Indices are in range; "raise" would have it fill a copy of `out` first.
                np.take(stored, indices, 0, rows[start : start + len(indices)], "clip")
                start += len(indices)
            else:
                np.take(stored, chosen.indices[0], 0, rows[head], "clip")
        output.write(f"layers.{layer.index}.{role}", rows)


def _dropped(layer: Layer, chosen: Chosen) -> list[NDArray[np.int64]]:
    """The positions of each kv head that are not kept, seen or not."""
    groups = [others(indices, layer.n) for indices in chosen.indices]
    return groups if len(groups) == layer.kv_heads else groups * layer.kv_heads


def _guard(cache: Cache, layer: Layer, chosen: Chosen, output: OutputFile) -> None:
    """Write what is remembered of the dropped rows of one layer, a kv head at a time."""
    keys, values = (cache.by_head(layer, role) for role in ("key", "value"))
    dtypes = layer.dtypes["key"], layer.dtypes["value"]
    heads = [
        guard_head(as_native(key[gone], dtypes[0]), as_native(value[gone], dtypes[1]), 1)
        for key, value, gone in zip(keys, values, _dropped(layer, chosen), strict=True)
    ]
    for name, array in guard_tensors(heads, layer.d).items():
        output.write(f"layers.{layer.index}.{name}", array)
