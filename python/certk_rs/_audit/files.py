"""The audit of one output: its bytes, what it says of its input, and every layer of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..cache_format import (
    Certificate,
    Names,
    SafetensorsFile,
    TensorFacts,
    detect,
    layout,
    output_header,
    read_certificate,
    read_metadata,
)
from ..errors import CertkError
from .layer import Sets, check_sense, check_truth, read_sets, tensors_of
from .report import OutputAudit

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Source:
    """A file to check against: every tensor of it, hashed."""

    path: Path
    header_sha256: str
    tensors: Mapping[str, TensorFacts]
    identity: tuple[int, ...]


def read_source(path: Path) -> Source:
    with SafetensorsFile(path) as file:
        tensors = {
            name: TensorFacts(entry.dtype, entry.shape, file.sha256(name))
            for name, entry in file.header.entries.items()
        }
        return Source(path, file.header_sha256(), tensors, file.identity)


def audit_output(
    file: SafetensorsFile,
    sources: Sequence[Source],
    expected: Names | None,
    result: OutputAudit,
    matched: set[Path],
    tell: Progress,
) -> None:
    certificate = _certificate(file, result)
    if certificate is None:
        return
    _check_bytes(file, certificate, result)
    try:
        tensors = {name: (facts.dtype, facts.shape) for name, facts in certificate.inputs.items()}
        layers = layout("inputs", tensors, Names(certificate.names))
    except CertkError as error:
        result.add("metadata certk", f"cannot be of a prune job: {error}")
        return
    if not 0 <= certificate.eps < 1:
        result.add("metadata certk", f"its eps is {certificate.eps!r}")
        return
    if set(certificate.scales) != {layer.index for layer in layers}:
        result.add("metadata certk", "its scales are not one for each layer")
        return
    _check_names(certificate, expected, result)
    result.eps, result.options = certificate.eps, certificate.options
    source = _match(certificate, sources, result)
    matched.update(s.path for s in sources if s.tensors == certificate.inputs)
    wanted: set[str] = set()
    complete = []
    for number, layer in enumerate(layers):
        tell(f"checking {result.path.name}", number, len(layers))
        wanted.update(tensors_of(file, layer, certificate))
        sets = read_sets(file, layer, certificate, result.add)
        if sets is not None:
            result.rows += sets.upper.size
            result.lower_bounds += sets.lower_bound.size
            if check_sense(sets, certificate, result.add):
                complete.append(sets)
                result.kept += sets.kept
                result.total += sets.total
                result.rows_over_budget += int((sets.upper > certificate.eps).sum())
                result.worst_tail_mass = max(result.worst_tail_mass, float(sets.upper.max()))
    for name in sorted(set(file.header.entries) - wanted):
        result.add(name, "no output has such a tensor")
    if source is not None:
        _check_against(source, file, complete, certificate, result, tell)
    file.check_unchanged(file.identity)


def _certificate(file: SafetensorsFile, result: OutputAudit) -> Certificate | None:
    metadata = file.header.metadata
    if "certk" not in metadata:
        result.add("metadata", "there is no certificate (key certk): not an output of certk prune")
        return None
    for key in sorted(set(metadata) - {"certk"}):
        result.add("metadata", f"foreign key {key!r}")
    try:
        certificate, complaint = read_certificate(metadata["certk"])
    except ValueError as error:
        result.add("metadata certk", f"cannot be read: {' '.join(str(error).split())}")
        return None
    if complaint is not None:
        result.add("metadata certk", complaint)
    return certificate


def _check_bytes(file: SafetensorsFile, certificate: Certificate, result: OutputAudit) -> None:
    """The file is what the writer makes of this certificate and of tensors with these hashes."""
    before = result.found
    entries, said = file.header.entries, certificate.outputs
    for name in sorted(entries.keys() | said.keys()):
        if name not in entries:
            result.add(name, "the certificate lists it, the file has no such tensor")
        elif name not in said:
            result.add(name, "the file has it, the certificate does not list it")
        elif (entries[name].dtype, entries[name].shape) != (said[name].dtype, said[name].shape):
            result.add(
                name,
                f"is {entries[name].dtype} {list(entries[name].shape)}, the certificate says "
                f"{said[name].dtype} {list(said[name].shape)}",
            )
        elif file.sha256(name) != said[name].sha256:
            result.add(name, "its bytes were changed: their SHA-256 is not that in the certificate")
    if result.found > before:
        return
    raw, canonical = file.header.raw, output_header(certificate).raw
    if raw != canonical:
        pairs = enumerate(zip(raw, canonical, strict=False))
        place = next((i for i, (a, b) in pairs if a != b), min(len(raw), len(canonical)))
        result.add("header", f"is not in canonical form from byte {place} on")


def _check_names(certificate: Certificate, expected: Names | None, result: OutputAudit) -> None:
    """Layers and roles are those of the input's own names, not what the output takes for them."""
    said, inputs = Names(certificate.names), sorted(certificate.inputs)
    result.names = certificate.names
    result.covered = tuple(name for name in inputs if said.match(name) is not None)
    result.not_covered = tuple(name for name in inputs if said.match(name) is None)
    where, remedy = "metadata certk", f"give --names {certificate.names!r} if they are"
    if expected is None:
        try:
            expected = detect("its input", inputs)
        except CertkError as error:
            result.add(where, str(error))
            return
    else:
        remedy = f"--names {expected.pattern!r} says so"
    for name in inputs:
        meant, taken = expected.match(name), said.match(name)
        if meant != taken:
            result.add(
                where,
                f"its names {certificate.names!r} are not those of its input: by them {name!r} is "
                f"{_part(taken)}, by those of the input {_part(meant)}; {remedy}",
            )
            return


def _part(match: tuple[int, str] | None) -> str:
    return "no part of the cache" if match is None else f"the {match[1]} of layer {match[0]}"


def _match(
    certificate: Certificate, sources: Sequence[Source], result: OutputAudit
) -> Source | None:
    """The input with the recorded hashes; if there is none, what differs in the nearest one."""
    if not sources:
        return None
    said = certificate.inputs.items()

    def alike(source: Source) -> tuple[int, bool]:
        same = sum(source.tensors.get(name) == facts for name, facts in said)
        return same, source.header_sha256 == certificate.input_header_sha256

    best = max(sources, key=alike)
    same, same_header = alike(best)
    if best.tensors == certificate.inputs:
        result.source = best.path
        if not same_header:
            result.add(
                "input header",
                f"the header of {best.path} is not the one that was pruned: its names, order or "
                "metadata were changed",
            )
        return best
    if not same:
        result.add("inputs", "none of the files given with --against is its input")
    for name, facts in said:
        if same and best.tensors.get(name) != facts:
            how = "was changed" if name in best.tensors else "is missing"
            result.add(f"input {name}", f"{how} in {best.path}: it is not what was pruned")
    for name in sorted(set(best.tensors) - set(certificate.inputs)):
        if same:
            result.add(
                f"input {name}", f"was not in the input that was pruned, but is in {best.path}"
            )
    return None


def _check_against(
    source: Source,
    file: SafetensorsFile,
    layers: Sequence[Sets],
    certificate: Certificate,
    result: OutputAudit,
    tell: Progress,
) -> None:
    with SafetensorsFile(source.path) as given:
        given.check_unchanged(source.identity)
        said = read_metadata(str(source.path), given.header.metadata, [s.layer for s in layers])
        scales = {sets.layer.index: certificate.scales[sets.layer.index] for sets in layers}
        if said != (scales, certificate.causal_offset):
            result.add("metadata certk", f"scale or causal_offset is not that of {source.path}")
            return
        for number, sets in enumerate(layers):
            tell(f"recomputing {result.path.name}", number, len(layers))
            rows, bounds = check_truth(sets, given, file, certificate, result.add)
            result.confirmed_rows += rows
            result.confirmed_lower_bounds += bounds
        given.check_unchanged(source.identity)
        result.unchecked = ()
