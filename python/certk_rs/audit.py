"""Re-checks finished outputs from their files alone, sharing no code with the selector.

Files are read with `cache_format`; the arithmetic is NumPy's float64, done in its own way and with
its own error bounds. Without the inputs it can tell whether an output is, byte for byte, what its
certificate says; with them also whether what the certificate says is true.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ._audit.files import Progress, audit_output, read_source
from ._audit.report import MOST_FINDINGS, WITHOUT_INPUT, Audit, Finding, OutputAudit
from .cache_format import Names, SafetensorsFile
from .errors import CertkError

__all__ = ["MOST_FINDINGS", "WITHOUT_INPUT", "Audit", "Finding", "OutputAudit", "Progress", "audit"]


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
        sources.append(read_source(path))
    results = []
    matched: set[Path] = set()
    for path in paths:
        result = OutputAudit(path)
        results.append(result)
        try:
            with SafetensorsFile(path) as file:
                audit_output(file, sources, expected, result, matched, tell)
        except CertkError as error:
            result.add("file", str(error).removeprefix(str(path)).lstrip(": "))
    unmatched = tuple(source.path for source in sources if source.path not in matched)
    return Audit(tuple(results), unmatched)
