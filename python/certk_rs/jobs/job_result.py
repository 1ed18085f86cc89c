"""What became of a prune job, for whoever asked for it in Python."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import ROUND_CEILING
from typing import Any, TypeAlias

from .._display.numbers import percent, rounded
from .._display.plain import plain
from .._display.shown import Shown
from .._files.location import Location
from .._files.new_file import write_json
from .file_report import FileReport, file_json
from .layer_report import SetReport
from .request import Request


@dataclass(frozen=True)
class Failure:
    """One input that no output was made of, and why."""

    name: str
    source: str
    message: str
    kind: str
    """Of the exception: CertkError, OSError, MemoryError or what it was."""


@dataclass(frozen=True)
class Skipped:
    """One input whose output was there already."""

    name: str
    target: str


FileOutcome: TypeAlias = FileReport | Failure | Skipped


@dataclass(frozen=True)
class JobResult(Shown):
    """What became of a job. `resumed` outputs were finished by an earlier run of it."""

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
        """Plain values: what `certk prune --json` prints."""
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
        layers = [layer for report in self.outputs for layer in report.layers]
        kept = sum(layer.count.kept for layer in layers)
        total = sum(layer.count.total for layer in layers)
        least = sum(layer.count.lower_bound for layer in layers)
        yield (
            "kept",
            f"{kept} of {total} keys ({percent(kept, total)}); proven minimum >= {least}, "
            f"gap <= {kept - least}",
        )
        rows, over = (sum(getattr(layer, n) for layer in layers) for n in _ROWS)
        worst = rounded(max(layer.worst_tail_mass for layer in layers), ROUND_CEILING)
        yield "tail mass", f"at most {worst} in {rows} promised rows, {over} of them over eps"
        queries = sum(layer.held_out.queries for layer in layers)
        if queries:
            lost = sum(layer.held_out.violations for layer in layers)
            yield (
                "trial",
                f"{lost} of {queries} queries lost more than the budget to sets made without them; "
                "the sets written are made for all",
            )
        before = sum(report.cache_bytes for report in self.outputs)
        after = sum(report.output_bytes for report in self.outputs)
        saved = f"{100 * (1 - after / before):.1f} % saved"
        yield "bytes", f"{before} of keys and values are {after}, proof included ({saved})"
        if guard := sum(report.guard_bytes for report in self.outputs):
            yield "guard", f"{guard} of these bytes are what is remembered of dropped keys"

    def __repr__(self) -> str:
        return (
            f"JobResult(out={str(self.out)!r}, {len(self.outputs)} outputs, "
            f"{len(self.failures)} failures, {len(self.skipped)} skipped)"
        )

    def _sets(self) -> Iterator[tuple[FileReport, int, SetReport]]:
        for report in self.outputs:
            for layer in report.layers:
                for one in layer.sets:
                    yield report, layer.layer, one

    def _columns(self) -> dict[str, Any]:
        sets = list(self._sets())
        return {
            "output": [report.name for report, _, _ in sets],
            "layer": [layer for _, layer, _ in sets],
            "head": [one.head for _, _, one in sets],
            "eps": [one.eps for _, _, one in sets],
            "kept": [one.count.kept for _, _, one in sets],
            "total": [one.count.total for _, _, one in sets],
            "lower_bound": [one.count.lower_bound for _, _, one in sets],
            "gap": [one.count.gap for _, _, one in sets],
            "worst_tail_mass": [one.worst_tail_mass for _, _, one in sets],
            "held_out_queries": [one.held_out.queries for _, _, one in sets],
            "held_out_violations": [one.held_out.violations for _, _, one in sets],
            "held_out_low": [one.held_out.low for _, _, one in sets],
            "held_out_high": [one.held_out.high for _, _, one in sets],
        }


_ROWS = ("rows", "rows_over_budget")
