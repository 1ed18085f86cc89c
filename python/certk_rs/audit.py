"""The audit of finished outputs, which shares no code with the selector.

Files are read with `_files`. The arithmetic is NumPy's float64, with its own error bounds.
Without the inputs, the audit tells whether an output is, byte for byte, what its certificate says.
With them, it also tells whether the certificate is true.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

from ._audit.files import OutputJob, Progress, Sample
from ._audit.report import (
    MOST_FINDINGS,
    WITHOUT_INPUT,
    Audit,
    Finding,
    OutputAudit,
    Sampled,
    audit_json,
    recomputed,
)
from ._audit.sources import Source, Sources
from ._audit.workers import Workers
from ._files.names import Names
from ._files.transposed import LAYOUTS
from .errors import CertkError

__all__ = [
    "MOST_FINDINGS",
    "WITHOUT_INPUT",
    "Audit",
    "Finding",
    "OutputAudit",
    "Progress",
    "Sampled",
    "audit",
    "audit_json",
    "recomputed",
]


def audit(
    outputs: Iterable[Path],
    against: Iterable[Path] = (),
    progress: Progress | None = None,
    names: str | None = None,
    *,
    threads: int | None = None,
    sample: Sample | None = None,
    fail_fast: bool = False,
    each: Callable[[OutputAudit], None] | None = None,
    layout: str | None = None,
) -> Audit:
    """Check outputs, and what they say against their inputs if these are given.

    Memory is, for every thread, about that of one kv head of one layer and of a block of scores.
    The answer does not depend on the number of threads.

    Args:
        outputs: Files. One that is not exactly what a prune job wrote is a finding, no exception;
            so is one whose judgement ends with an unexpected error. If the system refuses a file,
            `error` of the output says so. The others are judged in any case.
        against: Inputs, matched to outputs by the recorded hashes.
        progress: Told (what is being done, done, total).
        names: The pattern of the inputs' tensor names, None for the one that is found in them. An
            output that goes by others has its layers or roles from elsewhere: a finding.
        threads: How many, None for as many as there are processors.
        sample: Recompute only so many rows of every output (an int), or such a share of them (a
            float), drawn by what its certificate says. That can find that an output does not hold,
            and never confirms that it does; lower bounds are not looked at.
        fail_fast: Stop behind the first output that does not hold.
        each: Told about every output when it is done, in their order.
        layout: The order of axes in the inputs, "hnd" or "nhd"; None for the one that their shapes
            fit, which is "hnd" where both do. An output that takes them otherwise, or shapes that
            look like either, are a finding.

    Raises:
        CertkError: An input cannot be read as safetensors, or an argument is none.
        OSError: An input is missing, or the system refuses it.
    """
    tell = progress or (lambda _label, _done, _total: None)
    paths, inputs = list(outputs), list(against)
    expected = None if names is None else Names(names)
    if layout not in (None, *LAYOUTS):
        raise CertkError(f"layout is {layout!r}: give hnd, (heads, rows, d), or nhd")
    _check_sample(sample)
    results: list[OutputAudit] = []
    with Workers(threads) as workers:
        opened = []
        for number, path in enumerate(inputs):
            opened.append(Source(path, workers))
            tell(f"reading {path.name}", number, len(inputs))
        sources = Sources(opened)
        for path in paths:
            job = OutputJob(path, sources, expected, layout, sample, workers)
            with closing(job.run()) as run:
                for told in run:
                    tell(*told)
            results.append(job.result)
            if each is not None:
                each(job.result)
            if fail_fast and job.result.findings:
                return Audit(tuple(results), (), tuple(paths[len(results) :]))
        return Audit(tuple(results), sources.unmatched())


def _check_sample(sample: Sample | None) -> None:
    if isinstance(sample, float) and not 0 < sample <= 1:
        raise CertkError(f"sample is {sample}: give a share in (0, 1], or a whole number of rows")
    if isinstance(sample, int) and sample < 1:
        raise CertkError(f"sample is {sample}: give at least one row")
