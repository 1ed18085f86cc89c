"""Outputs of `certk prune`: their tensors and header, the file that is written, and the reader."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CertkError
from .certificate import PROOFS, Certificate, Options, TensorFacts, read_certificate
from .codes import code_bytes, code_forms
from .guards import guard_forms, guarded_bytes
from .layers import Layer, layout
from .location import Location
from .names import Names
from .new_file import new_file
from .safetensors import ITEMSIZE, STORAGE, Form, Header, canonical, quote
from .tensor_file import SafetensorsFile

_INDICES = {np.int32: "I32", np.int64: "I64"}
_OF_PROOFS = {
    *{"tail_mass_upper", "tail_mass_lower", "worst_tail_mass", "violations"},
    *{"lower_bound", "lower_bound_rows", "lower_bound_weights"},
}


@dataclass(frozen=True)
class Counts:
    """The sizes of one layer of an output, which determine its shapes.

    Attributes:
        kept: Kept positions of every group.
        blocks: Kept blocks of every group; empty where block_size is 1.
        weighted: Rows with a weight in the lower bounds.
        held_out: Queries that are held out.
        left_out: Rows that coverage leaves out.
        codes: Bytes of a guard's codes.
        bare: Keys without a code, where there are codes of all.
    """

    kept: Sequence[int]
    blocks: Sequence[int] = ()
    weighted: int = 0
    held_out: int = 0
    left_out: int = 0
    codes: int = 0
    bare: int = 0


def counts_in(tensors: Mapping[str, Form], layer: Layer) -> Counts:
    """Return the counts that the tensors of a file claim."""

    def shape(name: str) -> tuple[int, ...]:
        _, shape = tensors.get(f"layers.{layer.index}.{name}", ("", (0,)))
        return shape

    def length(name: str) -> int:
        return prod(shape(name))

    return Counts(
        kept=[length("indices")],
        blocks=[length("blocks")],
        weighted=length("lower_bound_rows"),
        held_out=length("held_out"),
        left_out=length("left_out"),
        codes=length("guard_codes"),
        bare=next(iter(shape("key_bare")), 0),
    )


def output_tensors(layer: Layer, options: Options, counts: Counts, masses: str) -> dict[str, Form]:
    """Return names, dtypes and shapes of the tensors of one layer of an output.

    Args:
        layer: The layer of the input.
        options: The options of the job.
        counts: The sizes of the layer.
        masses: The dtype of masses, see `mass_dtype`.
    """
    rows, total = (layer.heads, layer.m), sum(counts.kept)
    by_head, index = options.granularity == "head", _INDICES[index_type(layer)]
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
    if options.rest == "file":
        dropped = layer.n * layer.kv_heads - total * (1 if by_head else layer.kv_heads)
        tensors |= guard_forms(layer, dropped, counts.codes)
    if options.rest == "codes":
        tensors |= code_forms(layer, options.bits, counts.bare)
    return {f"layers.{layer.index}.{name}": form for name, form in tensors.items()}


def proof_bytes(layers: Iterable[Layer], options: Options, masses: str) -> dict[str, int]:
    """Return the bytes of each level of `proof`, by its name.

    Masses, violations and bounds are counted. The 12 bytes of every row with a weight in a lower
    bound are not: "full" and "compact" both have them, and their number is known only afterwards.
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


def rest_bytes(layers: Iterable[Layer], options: Options, kept: float) -> int:
    """Estimate the bytes of a guard or of codes if a share `kept` of all keys is kept."""
    if options.rest == "drop":
        return 0
    found = 0
    for layer in layers:
        if options.rest == "codes":
            found += code_bytes(layer, options.bits)
            continue
        dropped = round(layer.n * (1 - kept))
        forms = guard_forms(layer, dropped * layer.kv_heads, 0)
        found += layer.kv_heads * guarded_bytes(dropped, layer.d)
        found += sum(ITEMSIZE[dtype] * prod(shape) for dtype, shape in forms.values())
    return found


def index_type(layer: Layer) -> type[np.signedinteger]:
    """Return the type of positions: 32 bits where they suffice."""
    return np.int32 if layer.n < 1 << 31 else np.int64


def output_header(certificate: Certificate) -> Header:
    """Return the canonical header: the certificate's outputs, and itself as the only metadata."""
    return canonical(certificate.output_forms, {"certk": certificate.to_json()})


class OutputFile:
    """An output being written, tensor by tensor in any order.

    The length of the header does not depend on the hashes, so data go to their place at once and
    memory holds one tensor. A context manager: leaving it without `commit` leaves nothing.

    Args:
        path: Where it will be.
        tensors: All of its tensors, name -> (dtype, shape).
        certificate: Its certificate; `outputs` are filled in here.
        replace: Whether to replace an existing file.
    """

    def __init__(
        self,
        path: Location,
        tensors: Mapping[str, Form],
        certificate: Certificate,
        *,
        replace: bool = False,
    ) -> None:
        self._file = new_file(path, replace=replace)
        self._certificate = certificate
        self._facts = {
            name: TensorFacts(dtype, shape, "0" * 64) for name, (dtype, shape) in tensors.items()
        }
        self._missing = set(tensors)
        self._header = self.header()

    def __enter__(self) -> OutputFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def header(self) -> Header:
        """Return the header for the tensors written so far."""
        return output_header(replace(self._certificate, outputs=self._facts))

    def write(self, name: str, array: NDArray[Any]) -> None:
        """Write one tensor; `array` in the storage type of its dtype, C order."""
        facts = self._facts[name]
        array = np.ascontiguousarray(array, STORAGE[facts.dtype])
        if array.shape != facts.shape:
            raise AssertionError(f"{name}: {array.shape} is not the planned {facts.shape}")
        data = array.reshape(-1).view(np.uint8).data
        digest = hashlib.sha256(data).hexdigest()
        self._facts[name] = replace(facts, sha256=digest)
        entry = self._header.entries[name]
        self._file.write_at(len(self._header.raw) + entry.start, data)
        self._missing.remove(name)

    def commit(self) -> None:
        """Write the header, and give the file its name."""
        if self._missing:
            raise AssertionError(f"never written: {sorted(self._missing)}")
        self._file.write_at(0, self.header().raw)
        self._file.commit()


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
        self.layers = layout(
            str(file.path), said.input_forms, self.names, said.options.layout, said.queries
        )
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
