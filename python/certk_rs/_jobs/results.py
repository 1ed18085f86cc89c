"""The results of a prune job: a report for each output, the failures, and all of them together."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING
from typing import Any, TypeAlias

from .._display.numbers import percent, rounded
from .._display.plain import plain
from .._display.shown import Shown
from .._files.location import Location
from .._files.new_file import write_json
from ..errors import CertkError, told
from .held_out import HeldOut
from .inputs import Source
from .request import Request
from .sets import SetRecord, Sums

# An output that saves a smaller share of the bytes of its keys and values is warned of.
LITTLE = 0.1


@dataclass(frozen=True)
class LayerReport:
    """One layer of an output: its kept sets."""

    layer: int
    sets: tuple[SetRecord, ...]

    @property
    def count(self) -> Sums:
        """All kept sets together."""
        return Sums.of(self.sets)

    @property
    def worst_tail_mass(self) -> float:
        """The largest upper end of a promised row."""
        return max(one.worst_tail_mass or 0.0 for one in self.sets)

    @property
    def held_out(self) -> HeldOut:
        """The queries set aside in a trial, of all kept sets together."""
        each = [one.held_out for one in self.sets]
        violations = sum(one.violations or 0 for one in each)
        return HeldOut(sum(one.queries for one in each), violations)


@dataclass(frozen=True)
class FileReport:
    """One finished output.

    `cache_bytes` are those of the input's keys and values, `input_bytes` all of its bytes (queries
    among them), `output_bytes` all of the output's, proof and codes included. `seconds` is the time
    that workers spent on it.
    """

    name: str
    source: str
    target: str
    header_sha256: str
    layers: tuple[LayerReport, ...]
    proof: str
    granularity: str
    block_size: int
    input_bytes: int
    cache_bytes: int
    output_bytes: int
    proof_bytes: int
    seconds: float
    rest: str = "drop"
    rest_bytes: int = 0
    effort: str = "default"
    warnings: tuple[str, ...] = ()
    worst_at_least: float | None = None
    """With a size for a target: no distribution of so many keys has a smaller worst tail mass."""

    @property
    def count(self) -> Sums:
        """All kept sets together."""
        return Sums.of(one for layer in self.layers for one in layer.sets)

    @property
    def saved(self) -> float:
        """Share of the bytes of keys and values that the output saves; negative if it is larger."""
        return 1 - self.output_bytes / self.cache_bytes

    def placed(self, source: str, target: str) -> FileReport:
        """Return the report for other places of input and output, as after a copy of both."""
        places = {f"{self.source}: ": f"{source}: ", f"{self.target}: ": f"{target}: "}
        warnings = []
        for warning in self.warnings:
            old = next((old for old in places if warning.startswith(old)), "")
            warnings.append(places.get(old, "") + warning[len(old) :])
        return replace(self, source=source, target=target, warnings=tuple(warnings))

    def size_warning(self) -> str | None:
        """Return a warning of an output that saves little, else None."""
        if self.saved >= LITTLE:
            return None
        if self.saved < 0:
            smaller = "take a larger eps"
            if self.rest == "codes":
                smaller = "take fewer bits, or keep fewer rows beside the codes (hot)"
            return (
                f"{self.target}: is larger ({self.output_bytes} bytes) than the keys and values it "
                f"stands for ({self.cache_bytes} bytes): keep the input, or {smaller}"
            )
        return (
            f"{self.target}: saves only {100 * self.saved:.1f} % of the bytes of keys and values: "
            "pruning hardly pays here"
        )


# Fields of a report that its JSON has under the same name.
_SAME = (
    *("name", "granularity", "block_size", "proof", "worst_at_least", "input_bytes"),
    *("cache_bytes", "output_bytes", "proof_bytes", "rest", "rest_bytes", "effort", "seconds"),
    "header_sha256",
)
# The same of a set.
_SAME_OF_SET = (
    *("head", "eps", "kept", "total", "lower_bound", "gap", "worst_tail_mass"),
    *("rows", "rows_over_budget", "rows_left_out"),
)


def file_json(report: FileReport) -> dict[str, Any]:
    """Return one output as a JSON object."""
    return {
        "input": report.source,
        "output": report.target,
        **{name: getattr(report, name) for name in _SAME},
        **totals(report.layers),
        "saved": report.saved,
        "warnings": list(report.warnings),
        "layers": [
            {"layer": each.layer, **totals([each]), "sets": [_set_json(one) for one in each.sets]}
            for each in report.layers
        ],
    }


def _set_json(one: SetRecord) -> dict[str, Any]:
    names = ("queries", "violations", "rate", "low", "high")
    return {
        **{name: getattr(one, name) for name in _SAME_OF_SET},
        "held_out": {name: getattr(one.held_out, name) for name in names},
    }


def read_file_report(body: Mapping[str, Any]) -> FileReport:
    """Return the report that `file_json` gave this body; `KeyError` or `TypeError` for others."""
    return FileReport(
        source=body["input"],
        target=body["output"],
        layers=tuple(
            LayerReport(each["layer"], tuple(_read_set(each["layer"], one) for one in each["sets"]))
            for each in body["layers"]
        ),
        warnings=tuple(body["warnings"]),
        **{name: body[name] for name in _SAME},
    )


def _read_set(layer: int, body: Mapping[str, Any]) -> SetRecord:
    held_out = HeldOut(body["held_out"]["queries"], body["held_out"]["violations"])
    same = {name: body[name] for name in _SAME_OF_SET if name != "gap"}
    return SetRecord(layer=layer, bound_eps=None, worst_left_out=None, held_out=held_out, **same)


def totals(layers: Sequence[LayerReport]) -> dict[str, Any]:
    """Return the sums of some layers, as plain values."""
    sums = Sums.of(one for layer in layers for one in layer.sets)
    names = ("kept", "total", "lower_bound", "gap", "worst_tail_mass", "rows", "rows_over_budget")
    return {
        **{name: getattr(sums, name) for name in (*names, "rows_left_out", "held_out_queries")},
        "held_out_violations": sums.held_out_violations_low if sums.held_out_queries else 0,
    }


@dataclass(frozen=True)
class Failure:
    """One input that no output was made of, and why."""

    name: str
    source: str
    message: str
    kind: str
    """Of the exception: CertkError, OSError, MemoryError or another."""


def failure(source: Source, error: BaseException) -> Failure:
    """Return the failure of an input, with a line that names it."""
    message = told(error)
    if isinstance(error, MemoryError):
        message = "not enough memory: give fewer queries or keys in one file, or fewer --jobs"
    elif not isinstance(error, (CertkError, OSError)):
        message = f"unexpected {type(error).__name__}: {message}; please report it"
    if str(source.location) not in message and source.location.name not in message:
        message = f"{source.location}: {message}"
    kind = "OSError" if isinstance(error, OSError) else type(error).__name__
    return Failure(source.name, str(source.location), message, kind)


@dataclass(frozen=True)
class Skipped:
    """One input whose output was there already."""

    name: str
    target: str


FileOutcome: TypeAlias = FileReport | Failure | Skipped


@dataclass(frozen=True)
class JobResult(Shown):
    """The result of a job. `resumed` outputs were finished by an earlier run of it."""

    out: Location
    request: Request
    outputs: tuple[FileReport, ...]
    failures: tuple[Failure, ...]
    skipped: tuple[Skipped, ...]
    resumed: int
    seconds: float
    peak_memory: int
    """Bytes that this process had resident at most; workers elsewhere are not counted."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values, as `certk prune --json` prints them."""
        return {
            "out": str(self.out),
            "request": self.request.to_json(),
            "outputs": [file_json(report) for report in self.outputs],
            "failures": [vars(each) for each in self.failures],
            "skipped": [vars(each) for each in self.skipped],
            "resumed": self.resumed,
            "seconds": self.seconds,
            "peak_memory": self.peak_memory,
        }

    def save(self, path: str | os.PathLike[str], *, replace: bool = False) -> None:
        """Write `to_json` as a file of JSON; written aside, then given its name.

        Raises:
            CertkError: The file is there, and `replace` is not set.
            OSError: It cannot be written.
        """
        write_json(path, self.to_json(), replace=replace)

    def summary(self) -> str:
        """Return a few lines on what was kept, lost and saved, and what failed."""
        every = len(self.outputs) + len(self.failures) + len(self.skipped)
        lines = [
            f"JobResult: {len(self.outputs)} of {every} caches pruned into {plain(str(self.out))}"
        ]
        if self.outputs:
            lines += [f"  {name:<11}{text}" for name, text in self._facts()]
        for name, count in (("skipped", len(self.skipped)), ("failed", len(self.failures))):
            if count:
                lines.append(f"  {name:<11}{count}")
        lines += [plain(f"    {failure.message}") for failure in self.failures[:3]]
        return "\n".join(lines)

    def _facts(self) -> Iterator[tuple[str, str]]:
        sums = Sums.of(one for _, one in self._sets())
        kept, total = sums.kept, sums.total
        share = f"{kept} of {total} keys ({percent(kept, total)})"
        if sums.rows:
            yield "kept", f"{share}; proven minimum >= {sums.lower_bound}, gap <= {sums.gap}"
            worst = rounded(sums.worst_tail_mass or 0.0, ROUND_CEILING)
            yield (
                "tail mass",
                f"at most {worst} in {sums.rows} promised rows, {sums.rows_over_budget} of them "
                "over eps",
            )
        else:
            yield "kept", share
            yield "tail mass", "of no query: there was none to judge"
        if sums.held_out_queries:
            yield (
                "trial",
                f"{sums.held_out_violations_low} of {sums.held_out_queries} queries lost more than "
                "the budget to sets made without them; the sets written are made for all",
            )
        before = sum(report.cache_bytes for report in self.outputs)
        after = sum(report.output_bytes for report in self.outputs)
        saved = f"{100 * (1 - after / before):.1f} % saved"
        yield "bytes", f"{before} of keys and values are {after}, proof included ({saved})"
        if rest := sum(report.rest_bytes for report in self.outputs):
            yield "rest", f"{rest} of these bytes are codes for later queries"

    def __repr__(self) -> str:
        return (
            f"JobResult(out={str(self.out)!r}, {len(self.outputs)} outputs, "
            f"{len(self.failures)} failures, {len(self.skipped)} skipped)"
        )

    def _sets(self) -> Iterator[tuple[FileReport, SetRecord]]:
        for report in self.outputs:
            for layer in report.layers:
                for one in layer.sets:
                    yield report, one

    def _columns(self) -> dict[str, Any]:
        sets = list(self._sets())
        names = ("layer", "head", "eps", "kept", "total", "lower_bound", "gap", "worst_tail_mass")
        return {
            "output": [report.name for report, _ in sets],
            **{name: [getattr(one, name) for _, one in sets] for name in names},
            **{
                f"held_out_{name}": [getattr(one.held_out, name) for _, one in sets]
                for name in ("queries", "violations", "low", "high")
            },
        }
