"""The audit of finished outputs, which shares no code with the selector.

Files are read with `cache_format`. The arithmetic is NumPy's float64, with its own error bounds.
Without the inputs, the audit tells whether an output is, byte for byte, what its certificate says.
With them, it also tells whether the certificate is true.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from ._audit.files import OutputJob, Progress, Result, Sample
from ._audit.in_order import Work, Workers
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
from .cache_format import LAYOUTS, Names
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
        opening = [Work(partial(Source, path, workers.pause), small=True) for path in inputs]
        sources = Sources([])
        opened = []
        for number, source in enumerate(workers.in_order(opening, workers.count)):
            tell(f"reading {source.path.name}", number, len(inputs))
            opened.append(source)
        sources = Sources(opened)
        jobs = [OutputJob(path, sources, expected, layout, sample, workers.pause) for path in paths]
        for result in _results(jobs, workers, tell):
            results.append(result)
            if each is not None:
                each(result)
            if fail_fast and result.findings:
                return Audit(tuple(results), (), tuple(paths[len(results) :]))
        return Audit(tuple(results), sources.unmatched())


def _results(jobs: list[OutputJob], workers: Workers, tell: Progress) -> Iterator[OutputAudit]:
    """Yield the answers in the order of the outputs; the work of the next begins meanwhile."""
    under_way: list[tuple[OutputJob, str, int, int]] = []

    def work() -> Iterator[Work[Result]]:
        begun = workers.in_order((Work(job.begin, job.small) for job in jobs), workers.count)
        for job in begun:
            for label, pieces in job.work.items():
                for number, piece in enumerate(pieces):
                    under_way.append((job, f"{label} {job.result.path.name}", number, len(pieces)))
                    yield Work(piece, job.small)
            under_way.append((job, "", 0, 0))
            yield Work(_nothing, small=True)

    try:
        for result in workers.in_order(work(), 2 * workers.count):
            job, label, number, total = under_way.pop(0)
            if number < total:
                tell(label, number, total)
                job.take(result)
            else:
                yield job.end()
    finally:
        for job in jobs:
            job.close()


def _nothing() -> CertkError:
    """Mark the end of the work of an output; the result is not used."""
    return CertkError("")


def _check_sample(sample: Sample | None) -> None:
    if isinstance(sample, float) and not 0 < sample <= 1:
        raise CertkError(f"sample is {sample}: give a share in (0, 1], or a whole number of rows")
    if isinstance(sample, int) and sample < 1:
        raise CertkError(f"sample is {sample}: give at least one row")
