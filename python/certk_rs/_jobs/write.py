"""Outputs of a prune job: writing one from the kept sets of its layers, and knowing it again."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._files.cache import Cache
from .._files.certificate import Certificate, Options, TensorFacts, read_certificate
from .._files.guards import guard_tensors, guarded_bytes
from .._files.location import Location
from .._files.output import Counts, OutputFile, index_type, output_header, output_tensors
from .._files.safetensors import STORAGE, Form, Header
from .._files.sharded import open_tensors
from .._files.tensor_file import SafetensorsFile
from ..errors import CertkError
from ..guard import guard_head, others
from .choose import as_native
from .encode import bare_keys, encoded
from .inputs import Input
from .sets import LayerRecord

# Raised where a file is no output, or cannot be read.
_UNREADABLE = (CertkError, KeyError, ValueError, OSError)


@dataclass(frozen=True)
class Written:
    """An output that is on the disk."""

    header_sha256: str
    output_bytes: int
    proof_bytes: int
    rest_bytes: int


def assemble(
    given: Input,
    target: Location,
    replaces: bool,
    said: Certificate,
    chosen: tuple[LayerRecord, ...],
) -> Written:
    """Write one output; on any failure nothing is left of it.

    Memory holds about one kv head of one layer. An output that is there and is, byte for byte, what
    would be written is left as it is: a worker may have been lost after it had written it.

    Args:
        given: The input.
        target: The place of the output.
        replaces: Whether a file that is there is replaced.
        said: The certificate, but for the hashes of the output.
        chosen: The sets of every layer.

    Raises:
        CertkError: The input has changed since the sets were chosen, or the output is there.
        OSError: The system refuses to read or to write.
    """
    options = said.options
    with given.read() as cache:
        tensors: dict[str, Form] = {}
        proofs: dict[str, NDArray[Any]] = {}
        bare = []
        for each in chosen:
            bare.append(bare_keys(cache, each.layer, options) if options.rest == "codes" else 0)
            counts = _counts(each, options, bare[-1])
            tensors |= output_tensors(each.layer, options, counts, said.mass_dtype)
            proofs |= _tensors(each, options)
        if not replaces and (there := header_of_output(target, said)) is not None:
            return _written(there)
        # By --recursive, outputs are in directories as their inputs are.
        target.beside("").make_directory()
        with OutputFile(target, tensors, said, replace=replaces) as output:
            for name, array in proofs.items():
                output.write(name, array)
            for each, without in zip(chosen, bare, strict=True):
                _copy(cache, each, options, output)
                if options.rest == "file":
                    _guard(cache, each, output)
                if options.rest == "codes":
                    for name, array in encoded(cache, each.layer, options, without):
                        output.write(name, array)
            cache.file.check_unchanged(given.identity)
            output.commit()
            return _written(output.header())


def _written(header: Header) -> Written:
    return Written(hashlib.sha256(header.raw).hexdigest(), **byte_counts(header))


def byte_counts(header: Header) -> dict[str, int]:
    """Return the bytes of an output, of its proof (with indices), and of its guard or codes."""
    size = len(header.raw) + max((entry.stop for entry in header.entries.values()), default=0)
    counts = {"output_bytes": size, "proof_bytes": 0, "rest_bytes": 0}
    for name, entry in header.entries.items():
        role = name.rpartition(".")[2]
        if role not in ("key", "value"):
            of_rest = role.startswith(("guard_", "key_", "value_"))
            of = "rest_bytes" if of_rest else "proof_bytes"
            counts[of] += entry.stop - entry.start
    return counts


def _counts(chosen: LayerRecord, options: Options, bare: int) -> Counts:
    size, layer = options.block_size, chosen.layer
    return Counts(
        kept=chosen.sizes.tolist(),
        blocks=[len(np.unique(each // size)) for each in chosen.groups] if size > 1 else (),
        weighted=len(chosen.weight_rows),
        left_out=len(chosen.left_out),
        codes=sum(guarded_bytes(len(gone), layer.d) for gone in _dropped(chosen)),
        bare=bare,
    )


def _tensors(chosen: LayerRecord, options: Options) -> dict[str, NDArray[Any]]:
    """Return the tensors of one layer by name, but for the kept rows; docs/files.md has them."""
    layer, by_head = chosen.layer, options.granularity == "head"
    tensors: dict[str, Any] = {"indices": chosen.indices}
    if by_head:
        tensors["indptr"] = np.cumsum([0, *chosen.sizes], dtype=np.int64)
    if options.block_size > 1:
        blocks = [np.unique(each // options.block_size) for each in chosen.groups]
        tensors["blocks"] = np.concatenate(blocks)
        if by_head:
            tensors["block_indptr"] = np.cumsum([0, *map(len, blocks)], dtype=np.int64)
    for name in tensors.keys() & {"indices", "blocks"}:
        tensors[name] = tensors[name].astype(index_type(layer))
    if options.coverage < 1:
        tensors["left_out"] = chosen.left_out
    if options.proof != "none":
        tensors["lower_bound"] = chosen.lower_bounds
        tensors["lower_bound_rows"] = chosen.weight_rows
        tensors["lower_bound_weights"] = chosen.weights
    if options.proof == "full":
        tensors |= {"tail_mass_upper": chosen.upper, "tail_mass_lower": chosen.lower}
    elif options.proof == "compact":
        tensors["worst_tail_mass"] = chosen.worst
    return {f"layers.{layer.index}.{name}": array for name, array in tensors.items()}


def _copy(cache: Cache, chosen: LayerRecord, options: Options, output: OutputFile) -> None:
    """Write the kept rows of one layer, a kv head at a time."""
    layer, groups = chosen.layer, chosen.groups
    for role in ("key", "value"):
        shape: tuple[int, ...] = (sum(map(len, groups)), layer.d)
        if options.granularity != "head":
            shape = (layer.kv_heads, len(groups[0]), layer.d)
        rows = np.empty(shape, STORAGE[layer.dtypes[role]])
        start = 0
        for head, stored in enumerate(cache.by_head(layer, role)):
            if options.granularity == "head":
                # Indices are in range; "raise" would have it fill a copy of `out` first.
                np.take(stored, groups[head], 0, rows[start : start + len(groups[head])], "clip")
                start += len(groups[head])
            else:
                np.take(stored, groups[0], 0, rows[head], "clip")
        output.write(f"layers.{layer.index}.{role}", rows)


def _dropped(chosen: LayerRecord) -> list[NDArray[np.int64]]:
    """Return the positions of each kv head that are not kept, seen or not."""
    groups = [others(indices, chosen.layer.n) for indices in chosen.groups]
    kv_heads = chosen.layer.kv_heads
    return groups if len(groups) == kv_heads else groups * kv_heads


def _guard(cache: Cache, chosen: LayerRecord, output: OutputFile) -> None:
    """Write the guard of the dropped rows of one layer, a kv head at a time."""
    layer = chosen.layer
    keys, values = (cache.by_head(layer, role) for role in ("key", "value"))
    dtypes = layer.dtypes["key"], layer.dtypes["value"]
    heads = [
        guard_head(as_native(key[gone], dtypes[0]), as_native(value[gone], dtypes[1]), 1)
        for key, value, gone in zip(keys, values, _dropped(chosen), strict=True)
    ]
    for name, array in guard_tensors(heads, layer.d).items():
        output.write(f"layers.{layer.index}.{name}", array)


@contextlib.contextmanager
def _opened(target: Location) -> Iterator[tuple[SafetensorsFile, Certificate]]:
    """Open an output; an exception of `_UNREADABLE` if it is none."""
    with SafetensorsFile(target) as file:
        certificate, complaint = read_certificate(file.header.metadata.get("certk", ""))
        if complaint is not None:
            raise CertkError(complaint)
        yield file, certificate


def _holds(file: SafetensorsFile, facts: Mapping[str, TensorFacts]) -> bool:
    return all(file.sha256(name) == fact.sha256 for name, fact in facts.items())


def is_whole(target: Location, header_sha256: str) -> bool:
    """Return whether the file has that header, and in it the hashes of all that follows."""
    with contextlib.suppress(*_UNREADABLE), _opened(target) as (file, said):
        found = hashlib.sha256(file.header.raw).hexdigest()
        return found == header_sha256 and _holds(file, said.outputs)
    return False


def is_of_bytes(target: Location, source: Location) -> bool:
    """Return whether all tensors of the input are those of the output; reads all of them."""
    unreadable = contextlib.suppress(*_UNREADABLE)
    with unreadable, _opened(target) as (_, said), open_tensors(source) as file:
        return _holds(file, said.inputs)
    return False


def is_of_input(target: Location, header_sha256s: tuple[str, ...]) -> bool:
    """Return whether it is an output of an input with these headers, as a killed job leaves it."""
    with contextlib.suppress(*_UNREADABLE), _opened(target) as (_, said):
        return tuple(said.input_headers) == tuple(header_sha256s)
    return False


def header_of_output(target: Location, certificate: Certificate) -> Header | None:
    """Return the header of a whole output with this certificate, but for its `outputs`.

    Equal certificates mean equal bytes: of equal inputs, by their hashes, the same version makes
    the same. None if there is no such file.
    """
    with contextlib.suppress(*_UNREADABLE), _opened(target) as (file, said):
        same = replace(said, outputs={}).to_json() == replace(certificate, outputs={}).to_json()
        if same and file.header == output_header(said) and _holds(file, said.outputs):
            return file.header
    return None
