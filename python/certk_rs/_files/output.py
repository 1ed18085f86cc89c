"""What `certk prune` writes: the tensors of an output, its header, and the file."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .certificate import PROOFS, Certificate, Options, TensorFacts
from .guards import code_bytes, guard_forms
from .layers import Layer
from .location import Location, locate
from .masses import stored_weights
from .new_file import new_file
from .record import LayerRecord
from .safetensors import ITEMSIZE, STORAGE, Form, Header, canonical

_OF_PROOFS = {
    *{"tail_mass_upper", "tail_mass_lower", "worst_tail_mass", "violations"},
    *{"lower_bound", "lower_bound_rows", "lower_bound_weights"},
}


@dataclass(frozen=True)
class Counts:
    """How much one layer of an output holds, which its shapes follow from.

    `kept` and `blocks` of every group (no blocks where block_size is 1), `weighted` rows with a
    weight in the lower bounds, `held_out` queries and `left_out` rows, `codes` bytes of a guard's
    codes.
    """

    kept: Sequence[int]
    blocks: Sequence[int] = ()
    weighted: int = 0
    held_out: int = 0
    left_out: int = 0
    codes: int = 0


def counts_of(record: LayerRecord, options: Options) -> Counts:
    """The counts of a layer as it will be written."""
    size = options.block_size
    return Counts(
        kept=[len(indices) for indices in record.indices],
        blocks=[len(np.unique(i // size)) for i in record.indices] if size > 1 else (),
        weighted=int(np.count_nonzero(stored_weights(record.weights))),
        held_out=len(record.held_out),
        left_out=len(record.left_out),
    )


def counts_in(tensors: Mapping[str, Form], layer: Layer) -> Counts:
    """The counts that the tensors of a file claim, for shapes to be held against each other."""

    def length(name: str) -> int:
        _, shape = tensors.get(f"layers.{layer.index}.{name}", ("", (0,)))
        return prod(shape)

    return Counts(
        kept=[length("indices")],
        blocks=[length("blocks")],
        weighted=length("lower_bound_rows"),
        held_out=length("held_out"),
        left_out=length("left_out"),
        codes=length("guard_codes"),
    )


def output_tensors(layer: Layer, options: Options, counts: Counts, masses: str) -> dict[str, Form]:
    """Names, dtypes and shapes of one layer of an output.

    Args:
        layer: The layer of the input.
        options: What was asked.
        counts: How much it holds.
        masses: What `mass_dtype` says for the whole file.
    """
    rows, total = (layer.heads, layer.m), sum(counts.kept)
    by_head, index = options.granularity == "head", "I32" if layer.n < 1 << 31 else "I64"
    pruned = (total, layer.d) if by_head else (layer.kv_heads, total, layer.d)
    starts: Form = ("I64", (layer.kv_heads + 1,))
    tensors: dict[str, Form] = {
        "indices": (index, (total,)),
        "key": (layer.dtypes["key"], pruned),
        "value": (layer.dtypes["value"], pruned),
    }
    if by_head:
        tensors["indptr"] = starts
    if options.block_size > 1:
        tensors["blocks"] = (index, (sum(counts.blocks),))
        if by_head:
            tensors["block_indptr"] = starts
    if options.holdout > 0:
        tensors["held_out"] = ("I64", (counts.held_out,))
    if options.coverage < 1:
        tensors["left_out"] = ("I64", (counts.left_out,))
    if options.proof == "full":
        tensors |= {"tail_mass_upper": (masses, rows), "tail_mass_lower": (masses, rows)}
    if options.proof == "compact":
        tensors["worst_tail_mass"] = (masses, (layer.heads,))
        if options.holdout > 0:
            tensors["violations"] = ("I64", (layer.heads,))
    if options.proof != "none":
        tensors["lower_bound"] = ("I64", (layer.kv_heads if by_head else 1,))
        tensors["lower_bound_rows"] = ("I64", (counts.weighted,))
        tensors["lower_bound_weights"] = ("F32", (counts.weighted,))
    if options.guard != "none":
        dropped = layer.n * layer.kv_heads - total * (1 if by_head else layer.kv_heads)
        tensors |= guard_forms(layer, dropped, counts.codes)
    return {f"layers.{layer.index}.{name}": form for name, form in tensors.items()}


def proof_bytes(layers: Iterable[Layer], options: Options, masses: str) -> dict[str, int]:
    """How many bytes each `proof` takes, by its name: full, compact, none.

    Counted are masses, violations and bounds. Not counted is what is the same in "full" and in
    "compact" and known only afterwards: 12 bytes for every row with a weight in a lower bound.
    """
    found = {}
    for proof in PROOFS:
        some = replace(options, proof=proof)
        forms = [output_tensors(layer, some, Counts(()), masses) for layer in layers]
        said = [
            (dtype, shape)
            for tensors in forms
            for name, (dtype, shape) in tensors.items()
            if name.rpartition(".")[2] in _OF_PROOFS
        ]
        found[proof] = sum(ITEMSIZE[dtype] * prod(shape) for dtype, shape in said)
    return found


def guard_bytes(layers: Iterable[Layer], kept: float) -> int:
    """About how many bytes a guard of codes takes if a share `kept` of all keys is kept."""
    found = 0
    for layer in layers:
        dropped = round(layer.n * (1 - kept))
        forms = guard_forms(layer, dropped * layer.kv_heads, 0)
        found += layer.kv_heads * code_bytes(dropped, layer.d)
        found += sum(ITEMSIZE[dtype] * prod(shape) for dtype, shape in forms.values())
    return found


def output_header(certificate: Certificate) -> Header:
    """The one header that goes with a certificate: its outputs, and itself as the only metadata."""
    tensors = {name: (facts.dtype, facts.shape) for name, facts in certificate.outputs.items()}
    return canonical(tensors, {"certk": certificate.to_json()})


class OutputFile:
    """One output in the making, written tensor by tensor in any order.

    The length of the header is known before the hashes are, so the data can go to its place at once
    and no more than one tensor need be in memory. A context manager: leaving it without `commit`
    leaves nothing.

    Args:
        path: Where it will be, a local path or a location.
        tensors: All of its tensors, name -> (dtype, shape).
        certificate: What it will say of itself; its `outputs` are filled in here.
        replace: Whether it takes the place of a file that is there.
    """

    def __init__(
        self,
        path: Path | Location,
        tensors: Mapping[str, Form],
        certificate: Certificate,
        *,
        replace: bool = False,
    ) -> None:
        self._file = new_file(locate(path), replace=replace)
        self._certificate = certificate
        self._facts = {
            name: TensorFacts(dtype, shape, "0" * 64) for name, (dtype, shape) in tensors.items()
        }
        self._missing = set(tensors)
        self._header = self.header()

    def __enter__(self) -> OutputFile:
        self._file.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.__exit__(kind, error, trace)

    def header(self) -> Header:
        """The header that goes with what has been written so far."""
        return output_header(dataclasses.replace(self._certificate, outputs=self._facts))

    def write(self, name: str, array: NDArray[Any]) -> None:
        """Write one tensor; `array` in the storage type of its dtype, C order."""
        facts = self._facts[name]
        array = np.ascontiguousarray(array, STORAGE[facts.dtype])
        if array.shape != facts.shape:
            raise AssertionError(f"{name}: {array.shape} is not the planned {facts.shape}")
        data = array.reshape(-1).view(np.uint8).data
        digest = hashlib.sha256(data).hexdigest()
        self._facts[name] = dataclasses.replace(facts, sha256=digest)
        entry = self._header.entries[name]
        self._file.write_at(len(self._header.raw) + entry.start, data)
        self._missing.remove(name)

    def commit(self) -> None:
        """Write the header, and give the file its name."""
        if self._missing:
            raise AssertionError(f"never written: {sorted(self._missing)}")
        self._file.write_at(0, self.header().raw)
        self._file.commit()
