"""Re-checks finished outputs from their files alone, sharing no code with the selector.

Files are read with `cache_format`; the arithmetic is NumPy's float64, done in its own way and with
its own error bounds. Without the inputs it can tell whether an output is, byte for byte, what its
certificate says; with them also whether what the certificate says is true.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ._audit_layer import Sets, check_sense, check_truth, read_sets, tensors_of
from .cache_format import (
    Certificate,
    Names,
    Options,
    SafetensorsFile,
    TensorFacts,
    detect,
    layout,
    output_header,
    read_certificate,
    read_metadata,
)
from .errors import CertkError

Progress = Callable[[str, int, int], None]

# Findings beyond these are only counted, or an output of nonsense would fill the memory with them.
MOST_FINDINGS = 10_000

WITHOUT_INPUT = (
    "whether the kept rows are those of the input",
    "whether the tail masses are true",
    "whether the lower bounds are true",
)


@dataclass(frozen=True)
class Finding:
    """One thing that does not hold, and where: a tensor or a part of the file, with the place.

    Both may hold foreign text, such as names of tensors, as it stands in the file.
    """

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass
class OutputAudit:
    """What is known of one output. Every row is one query of one query head.

    `eps`, `options` and `names` are what it says was asked for (None if it cannot be read), and
    `covered` the tensors of its input that these names take for the cache. `kept` of `total` keys,
    `rows_over_budget` and `worst_tail_mass` (the largest upper end) are of the layers that make
    sense; without an input they are what it says, with it and without a finding they are true.
    `more_findings` are counted only.
    """

    path: Path
    source: Path | None = None
    findings: list[Finding] = field(default_factory=list)
    more_findings: int = 0
    eps: float | None = None
    options: Options | None = None
    names: str | None = None
    covered: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()
    kept: int = 0
    total: int = 0
    rows_over_budget: int = 0
    worst_tail_mass: float = 0.0
    rows: int = 0
    confirmed_rows: int = 0
    lower_bounds: int = 0
    confirmed_lower_bounds: int = 0
    unchecked: tuple[str, ...] = WITHOUT_INPUT

    @property
    def holds(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    @property
    def found(self) -> int:
        """How many things do not hold."""
        return len(self.findings) + self.more_findings

    def add(self, where: str, what: str) -> None:
        """Note something that does not hold."""
        if len(self.findings) < MOST_FINDINGS:
            self.findings.append(Finding(where, what))
        else:
            self.more_findings += 1


@dataclass(frozen=True)
class Source:
    """A file to check against: every tensor of it, hashed."""

    path: Path
    header_sha256: str
    tensors: Mapping[str, TensorFacts]
    identity: tuple[int, ...]


@dataclass(frozen=True)
class Audit:
    """The whole answer. `unmatched` are inputs that belong to none of the outputs."""

    outputs: tuple[OutputAudit, ...]
    unmatched: tuple[Path, ...]

    @property
    def holds(self) -> bool:
        """Whether everything that could be checked holds."""
        return not self.unmatched and all(output.holds for output in self.outputs)


def audit(
    outputs: Iterable[Path],
    against: Iterable[Path] = (),
    progress: Progress | None = None,
    names: str | None = None,
) -> Audit:
    """Check outputs, and what they say against their inputs if these are given.

    Args:
        outputs: Files; one that is not exactly what a prune job wrote is a finding, no exception.
        against: Inputs, matched to outputs by the recorded hashes.
        progress: Told (what is being done, done, total).
        names: The pattern of the inputs' tensor names, None for the one that is found in them. An
            output that goes by others has its layers or roles from elsewhere: a finding.

    Raises:
        CertkError: An input cannot be read as safetensors, or `names` is no pattern.
        OSError: A file is missing, or the system refuses it.
    """
    tell = progress or (lambda _label, _done, _total: None)
    paths, inputs = list(outputs), list(against)
    expected = None if names is None else Names(names)
    sources = []
    for number, path in enumerate(inputs):
        tell(f"hashing {path.name}", number, len(inputs))
        sources.append(_read_source(path))
    results = []
    matched: set[Path] = set()
    for path in paths:
        result = OutputAudit(path)
        results.append(result)
        try:
            with SafetensorsFile(path) as file:
                _audit_output(file, sources, expected, result, matched, tell)
        except CertkError as error:
            result.add("file", str(error).removeprefix(str(path)).lstrip(": "))
    unmatched = tuple(source.path for source in sources if source.path not in matched)
    return Audit(tuple(results), unmatched)


def _read_source(path: Path) -> Source:
    with SafetensorsFile(path) as file:
        tensors = {
            name: TensorFacts(entry.dtype, entry.shape, file.sha256(name))
            for name, entry in file.header.entries.items()
        }
        return Source(path, file.header_sha256(), tensors, file.identity)


def _audit_output(
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
