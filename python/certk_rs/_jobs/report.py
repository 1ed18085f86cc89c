"""The report of prune jobs, from their outputs: one object that pages and programs read alike.

One output is open at a time, one layer of it in memory. What an output does not hold, because its
proof is compact or none, is taken from the record of the job if there is one, and named as such.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .. import __version__
from .._display.plain import plain
from .._files.location import Location
from ..cache_format import Options, SafetensorsFile
from ..errors import CertkError
from .engine import Progress
from .folder import Found, JobRecord, find_outputs, inputs_of
from .held_out import CONFIDENCE, HeldOut
from .outputs import ReportedOutput, Spread, WorstRows
from .results import FileReport
from .sets import LayerRecord, SetRecord, Sums

UNKNOWN = {
    "full": (
        "without the input, whether masses and bounds are true: certk verify --against tells",
    ),
    "compact": (
        "what single rows lose: only the worst promised row of each query head is in the file",
        "lower ends of tail masses, and what rows that are left out lose",
        "without the input, whether masses and bounds are true: certk verify --against tells",
    ),
    "none": (
        "what any row loses, and how few keys would do: neither masses nor bounds are in the file",
        "without the input, whether the rows are within eps: certk verify --against tells",
    ),
}
"""Statements about outputs that a level of proof leaves open."""


class RowSink(Protocol):
    """A taker of every row, or every set, as it is read."""

    def take(
        self, output: str, record: LayerRecord, kinds: NDArray[np.uint8], sets: Sequence[SetRecord]
    ) -> None:
        """Take a layer."""


@dataclass
class _Sums:
    """The sums of all outputs."""

    all: Sums = field(default_factory=Sums)
    of_layer: dict[int, Sums] = field(default_factory=dict)
    of_set: dict[tuple[int, int], Sums] = field(default_factory=dict)
    spread: Spread = field(default_factory=Spread)
    worst: WorstRows = field(default_factory=WorstRows)

    def add(self, found: SetRecord, output: str) -> None:
        self.all.add(found, output)
        self.of_layer.setdefault(found.layer, Sums()).add(found, output)
        self.of_set.setdefault((found.layer, found.head), Sums()).add(found, output)


def job_report(
    outs: Sequence[str],
    sinks: Iterable[RowSink] = (),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Read all outputs, once; hand every layer to the sinks.

    Args:
        outs: Output directories of jobs, patterns, or outputs.
        sinks: Told of every layer of every output that can be read.
        progress: Told of every output.

    Returns:
        An object of plain values; docs/report.md says what is in it. Numbers are exact: who shows
        a bound rounds it to its safe side.

    Raises:
        CertkError: There is no output, and no record of a job.
        OSError: A directory cannot be read.
    """
    every = find_outputs(outs)
    total = sum(len(found.sources) for found in every)
    sums, sinks = _Sums(), list(sinks)
    outputs: list[dict[str, Any]] = []
    unreadable: list[dict[str, str]] = []
    failures: list[dict[str, str]] = []
    missing: list[str] = []
    alone = len(every) == 1
    for found in every:
        names = set()
        for source in found.sources:
            names.add(source.name)
            shown = plain(source.name if alone else str(source.location))
            if progress is not None:
                progress(f"reading {shown}", len(outputs) + len(unreadable), total)
            try:
                outputs.append(_output(found, source, shown, sums, sinks))
            except (CertkError, OSError) as error:
                unreadable.append({"output": shown, "message": _said(error)})
        if found.whole:
            _without_output(found.record, names, failures, missing)
    return {
        "out": [plain(str(out)) for out in outs],
        "library": __version__,
        "jobs": [
            _job(folder.out, manifest) for found in every for folder, manifest in found.record.jobs
        ],
        "options": _options(outputs),
        "totals": _totals(outputs, sums.all),
        "confidence": CONFIDENCE,
        "outputs": outputs,
        "failures": failures,
        "missing": missing,
        "unreadable": unreadable,
        "layers": [{"layer": i, **each.to_json()} for i, each in sorted(sums.of_layer.items())],
        "sets": [
            {"layer": layer, "head": head, **each.to_json()}
            for (layer, head), each in sorted(sums.of_set.items())
        ],
        "tail_masses": sums.spread.to_json(),
        "worst_rows": sums.worst.to_json(),
        "unknown": {
            proof: list(UNKNOWN[proof]) for proof in sorted({each["proof"] for each in outputs})
        },
        "notes": [plain(note) for found in every for note in found.record.notes],
    }


def _output(
    found: Found, source: Any, shown: str, sums: _Sums, sinks: Sequence[RowSink]
) -> dict[str, Any]:
    """Read one output; nothing is added up before all of it could be read."""
    own, layers = Sums(), 0
    sets: list[SetRecord] = []
    borrowed: set[str] = set()
    with SafetensorsFile(source.location) as file:
        output = ReportedOutput(file)
        output.check()
        said = output.certificate
        report = found.record.report(source.name, output.header_sha256)
        recorded = _recorded(report)
        for record in output.read():
            layers += 1
            kinds = record.kinds()
            of_layer = [_filled(one, recorded, borrowed) for one in output.numbers(record)]
            sets += of_layer
            sums.spread.add(record, kinds)
            sums.worst.add(record, kinds, shown)
            for sink in sinks:
                sink.take(shown, record, kinds, of_layer)
        for one in sets:
            own.add(one, shown)
            sums.add(one, shown)
        options = said.options
        numbers = own.to_json()
        del numbers["worst_output"]
        return {
            "output": shown,
            "input": None if report is None else plain(report.source),
            "header_sha256": output.header_sha256,
            "input_headers": list(said.input_headers),
            "library": plain(said.library),
            "names": plain(said.names),
            "causal_offset": said.causal_offset,
            **vars(options),
            "layers": layers,
            **numbers,
            "worst_at_least": _worst_at_least(sets, options, report, borrowed),
            "input_bytes": output.input_bytes,
            "cache_bytes": output.cache_bytes,
            "output_bytes": output.output_bytes,
            "proof_bytes": output.proof_bytes,
            "guard_bytes": output.guard_bytes,
            "saved": 1 - output.output_bytes / output.cache_bytes,
            "seconds": None if report is None else report.seconds,
            "warnings": [] if report is None else [plain(each) for each in report.warnings],
            "from_record": sorted(borrowed),
        }


def _worst_at_least(
    sets: Sequence[SetRecord], options: Options, report: FileReport | None, borrowed: set[str]
) -> float | None:
    """Return a mass that every choice of so many keys loses; None where nothing proves one."""
    if options.size is None or options.hot:
        return None
    if options.proof == "none":  # without bounds in the file: what the job has told
        if report is not None and report.worst_at_least is not None:
            borrowed.add("worst_at_least")
        return None if report is None else report.worst_at_least
    told = [one.bound_eps for one in sets if one.bound_eps is not None]
    # By token every layer says the same one set.
    each = [one for one in sets if options.granularity != "token" or one.layer == sets[0].layer]
    needed = sum(one.lower_bound or 0 for one in each)
    return min(told, default=None) if needed > options.size else 0.0


def _recorded(report: FileReport | None) -> dict[tuple[int, int], SetRecord]:
    if report is None:
        return {}
    return {(each.layer, one.head): one for each in report.layers for one in each.sets}


def _filled(
    found: SetRecord, recorded: dict[tuple[int, int], SetRecord], borrowed: set[str]
) -> SetRecord:
    """Return the set with what the file does not tell, but the record of the job does."""
    noted = recorded.get((found.layer, found.head))
    if noted is None:
        return found
    changes: dict[str, Any] = {}
    if found.lower_bound is None:
        changes["lower_bound"] = noted.lower_bound
    if found.worst_tail_mass is None:
        changes["worst_tail_mass"] = noted.worst_tail_mass
    within = noted.worst_tail_mass is not None and noted.worst_tail_mass <= found.eps
    if found.rows_over_budget is None and within:
        changes["rows_over_budget"] = 0
    borrowed.update(changes)
    known, said = noted.held_out, found.held_out
    if known.queries and not said.queries:
        borrowed.update(("held_out_queries", "held_out_violations"))
        changes["held_out"] = known
    if known.queries == said.queries > 0 and known.violations is not None:
        low = 0 if said.violations is None else said.violations
        high = known.queries if said.most is None else said.most
        if low < high and low <= known.violations <= high:
            borrowed.add("held_out_violations")
            changes["held_out"] = HeldOut(known.queries, known.violations)
    return replace(found, **changes)


def _without_output(
    record: JobRecord, names: set[str], failures: list[dict[str, str]], missing: list[str]
) -> None:
    """Add the inputs of the job that have no output, and why."""
    for name in record.inputs:
        failure = record.failure(name)
        if failure is not None:
            failures.append({key: plain(value) for key, value in failure.items()})
        elif name not in names:
            missing.append(plain(name))


def _job(out: Location, manifest: dict[str, Any]) -> dict[str, Any]:
    request = manifest.get("request")
    return {
        "out": plain(str(out)),
        "state": plain(str(manifest.get("state"))),
        "library": plain(str(manifest.get("library"))),
        "inputs": len(inputs_of(manifest)),
        "request": _plain_values(request) if isinstance(request, dict) else {},
        "seconds": _number(manifest.get("seconds")),
        "peak_memory": _number(manifest.get("peak_memory")),
    }


def _plain_values(body: dict[str, Any]) -> dict[str, Any]:
    simple = (bool, int, float, type(None))
    return {
        plain(str(key)): value if isinstance(value, simple) else plain(str(value))
        for key, value in body.items()
    }


def _number(value: object) -> float | int | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


_OPTIONS = (
    *("granularity", "max_keep", "keep_first", "keep_last", "layout", "block_size", "coverage"),
    *("holdout", "proof", "guard", "out_tol", "size", "hot", "eps_low", "eps_high"),
)


def _options(outputs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the options that occur in certificates, and how many outputs have them."""
    counts: dict[tuple[Any, ...], int] = {}
    for each in outputs:
        key = tuple(each[name] for name in _OPTIONS)
        counts[key] = counts.get(key, 0) + 1
    return [
        {"outputs": count, **dict(zip(_OPTIONS, key, strict=True))} for key, count in counts.items()
    ]


def _totals(outputs: Sequence[dict[str, Any]], sums: Sums) -> dict[str, Any]:
    before = sum(each["cache_bytes"] for each in outputs)
    after = sum(each["output_bytes"] for each in outputs)
    seconds = [each["seconds"] for each in outputs]
    return {
        "outputs": len(outputs),
        **sums.to_json(),
        "input_bytes": sum(each["input_bytes"] for each in outputs),
        "cache_bytes": before,
        "output_bytes": after,
        "proof_bytes": sum(each["proof_bytes"] for each in outputs),
        "guard_bytes": sum(each["guard_bytes"] for each in outputs),
        "saved": 1 - after / before if before else None,
        "seconds": sum(seconds) if seconds and None not in seconds else None,
    }


def _said(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return plain(f"{error.filename}: {error.strerror}" if error.filename else error.strerror)
    return plain(str(error))
