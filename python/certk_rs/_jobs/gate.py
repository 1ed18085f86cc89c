"""Thresholds for what outputs and records of runs have proven: `certk gate` as a function."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING
from numbers import Integral, Real
from os.path import realpath
from pathlib import Path
from typing import Any

from .._display.numbers import rounded
from .._display.plain import plain
from .._display.shown import Shown
from .._files.location import Location
from .._files.new_file import write_json
from .._files.reader import read_bytes
from .._files.safetensors import parse_json
from ..audit import OutputAudit, Progress, audit
from ..errors import CertkError, one_line, told
from .folder import find_outputs

Place = str | os.PathLike[str]
Numbers = Mapping[str, float | str]
"""The number for each threshold, or the reason why there is none and the remedy."""

LABELS = {
    "tv": "tail mass",
    "error": "output error",
    "keys": "share of keys",
    "unproven": "unproven share",
}
_SHARES = ("keys", "unproven")
_MOST_BYTES = 1 << 30
_NO_MASSES = "is not recorded: prune with --proof full, or compact"


@dataclass(frozen=True)
class Check:
    """One number of a file beside its threshold: "tv", "error", "keys" or "unproven".

    Without a number `value` is None, and `missing` has the reason and the remedy.
    """

    name: str
    limit: float
    value: float | None
    missing: str | None = None

    @property
    def passes(self) -> bool:
        """True if the number is there, and at most the limit."""
        return self.value is not None and self.value <= self.limit

    def __str__(self) -> str:
        name, limit = LABELS[self.name], repr(self.limit).removesuffix(".0")
        if self.value is None:
            return f"{name} {self.missing}"
        shown = min(rounded(self.value, ROUND_CEILING), repr(self.value), key=len)
        if (float(shown) <= self.limit) != self.passes:  # the digits left out decide
            shown = repr(self.value)
        return f"{name} {shown} {'<=' if self.passes else '>'} {limit}"


@dataclass(frozen=True)
class GatedFile:
    """The verdict on one file.

    `kind` is "output" of a prune job, "record" of a run, or "missing": an input without an output.
    There are no `checks` where a `complaint` says why the file does not hold, or an `error` of the
    system why it could not be judged.
    """

    path: str
    kind: str
    checks: tuple[Check, ...] = ()
    complaint: str | None = None
    error: str | None = None

    @property
    def passes(self) -> bool:
        """True if the file holds, and every check passes."""
        # Without a number that can be trusted there are no checks.
        return bool(self.checks) and all(check.passes for check in self.checks)

    @property
    def reason(self) -> str:
        """The checks that decide: those that fail, or all if none does."""
        if self.error is not None:
            return f"could not be judged: {self.error}"
        if self.complaint is not None:
            return f"does not hold: {self.complaint}"
        decide = [each for each in self.checks if not each.passes] or self.checks
        return "; ".join(map(str, decide))

    def __str__(self) -> str:
        return f"{'pass' if self.passes else 'FAIL'} {self.path}: {self.reason}"


@dataclass(frozen=True)
class Gate(Shown):
    """The verdict of `gate` on each file, and the thresholds by name, `unproven` among them."""

    files: tuple[GatedFile, ...]
    thresholds: Mapping[str, float]

    @property
    def passes(self) -> bool:
        """True if all files pass."""
        return not self.failed

    @property
    def failed(self) -> tuple[GatedFile, ...]:
        """The files that do not pass."""
        return tuple(each for each in self.files if not each.passes)

    def to_json(self) -> dict[str, Any]:
        """Plain values: what `certk gate --json` prints."""
        files: list[dict[str, Any]] = []
        for each in self.files:
            checks = [{**vars(check), "passes": check.passes} for check in each.checks]
            files.append({**vars(each), "passes": each.passes, "checks": checks})
        return {"passes": self.passes, "thresholds": dict(self.thresholds), "files": files}

    def save(self, path: Place, *, replace: bool = False) -> None:
        """Write `to_json` as a file of JSON; written aside, then given its name.

        Raises:
            CertkError: The file is there, and `replace` is not set.
            OSError: It cannot be written.
        """
        write_json(path, self.to_json(), replace=replace)

    def summary(self) -> str:
        """Return a few lines: the verdict, the numbers that decide, and the first failures."""
        count, bad = len(self.files), self.failed
        head = f"{count - len(bad)} of {count} files pass"
        if bad:
            return "\n".join([head, *(plain(f"  {each}") for each in bad[:3])])
        every = zip(*(each.checks for each in self.files), strict=True)
        worst = (max(checks, key=lambda check: check.value or 0.0) for checks in every)
        return f"{head}: {'; '.join(map(str, worst))}"

    def __repr__(self) -> str:
        return f"Gate(passes={self.passes}, {len(self.files)} files, {len(self.failed)} fail)"

    def _columns(self) -> dict[str, Any]:
        columns: dict[str, Any] = {
            name: [getattr(each, name) for each in self.files]
            for name in ("path", "kind", "passes", "reason")
        }
        values = [{check.name: check.value for check in each.checks} for each in self.files]
        return columns | {name: [each.get(name) for each in values] for name in self.thresholds}


def gate(
    inputs: Place | Iterable[Place],
    *,
    tv: float | None = None,
    error: float | None = None,
    keys: float | None = None,
    unproven: float | None = None,
    on_file: Callable[[GatedFile], None] | None = None,
    progress: Progress | None = None,
) -> Gate:
    """Pass or fail outputs of prune jobs, and records of runs, by what they have proven.

    Outputs must be, byte for byte, what their certificates say, and numbers are those of the
    certificates: `verify` with the inputs recomputes them. A record is what `Recorder.to_jsonl`
    has written; it has no hashes. A file without the number that a threshold asks for fails.

    Args:
        inputs: Outputs, directories of them with all below, records, or glob patterns. An input of
            a job in a directory that has no output there fails.
        tv: The largest tail mass, a total variation distance, that a promised row or a call may
            have, by its proven upper end.
        error: The largest error of a row's attention output: `out_tol` of outputs, `error_bound`
            of records.
        keys: The largest share of keys kept, as a fraction with a point.
        unproven: The largest share of rows (of a record: calls) that may be over budget, or that
            no budget is promised for. None: 0.
        on_file: Told of every file when it is judged, in their order.
        progress: Told (what is being done, done, total).

    Returns:
        A `Gate`: `passes` is the answer, `files` has the numbers of each.

    Raises:
        CertkError: There is no file, no threshold, or one that is none.
        OSError: A directory cannot be read.
    """
    limits = _limits({"tv": tv, "error": error, "keys": keys, "unproven": unproven})
    given = [inputs] if isinstance(inputs, (str, os.PathLike)) else inputs
    if not isinstance(given, Iterable):
        raise CertkError(f"inputs is a path or a list of paths, not {type(inputs).__name__}")
    files = []
    for each in _judged([os.fspath(place) for place in given], limits, progress):
        files.append(each)
        if on_file is not None:
            on_file(each)
    if not files:
        raise CertkError("inputs hold no file to judge: give outputs of certk prune, or records")
    return Gate(tuple(files), limits)


def _limits(given: Mapping[str, object]) -> dict[str, float]:
    limits = {}
    for name, value in given.items():
        if value is None:
            continue
        most, text = (math.inf, "of 0 or more") if name == "error" else (1, "from 0 to 1")
        known = isinstance(value, Real) and not isinstance(value, bool)
        # Whole numbers are counts elsewhere: 1 would be one key.
        if name in _SHARES and isinstance(value, Integral) and value != 0:
            known, text = False, "with a point, such as 0.5 or 1.0"
        number = float(value) if known and isinstance(value, Real) else math.nan
        if not (0 <= number <= most and number < math.inf):
            raise CertkError(f"{name} is {value!r}: give a number {text}")
        limits[name] = abs(number)  # -0.0, too
    if not limits:
        raise CertkError("no threshold: give at least one of tv, error, keys and unproven")
    return limits if "unproven" in limits else limits | {"unproven": 0.0}


def _judged(
    places: list[str], limits: Mapping[str, float], progress: Progress | None
) -> Iterator[GatedFile]:
    """Judge every file once, and the inputs of whole jobs that have no output."""
    every = find_outputs(places)
    # A URL is refused before anything is judged.
    files = {realpath(source.location.path) for found in every for source in found.sources}
    for found in every:
        for source in found.sources:
            if (path := realpath(source.location.path)) in files:
                files.remove(path)
                yield _judge(source.location, limits, progress)
        # Notes say that it is not known which outputs there should be.
        for note in found.record.notes if found.whole else ():
            yield GatedFile(str(found.record.out), "missing", complaint=note)
        there = {source.name for source in found.sources}
        for name in found.record.inputs if found.whole else ():
            if name not in there:
                failure = found.record.failure(name)
                why = "the job has not made it" if failure is None else failure["message"]
                text = f"there is no such output ({why}): prune again with --resume"
                yield GatedFile(str(found.record.out / name), "missing", complaint=text)


def _judge(place: Location, limits: Mapping[str, float], progress: Progress | None) -> GatedFile:
    path, kind = str(place), "output"
    try:
        if _is_record(place.path):
            kind, numbers = "record", _of_record(read_bytes(place, _MOST_BYTES))
        else:
            [found] = audit([place.path], progress=progress).outputs
            if found.error is not None:
                return GatedFile(path, kind, error=found.error)
            if found.findings:
                more = f" (and {found.found - 1} more)" if found.found > 1 else ""
                return GatedFile(path, kind, complaint=f"{found.findings[0]}{more}")
            numbers = _of_output(found)
    except CertkError as error:
        return GatedFile(path, kind, complaint=one_line(error).removeprefix(f"{path}: "))
    except OSError as error:
        return GatedFile(path, kind, error=told(error).removeprefix(f"{path}: "))
    checks = []
    for name, limit in limits.items():
        number = numbers[name]
        value, missing = (None, number) if isinstance(number, str) else (number, None)
        checks.append(Check(name, limit, value, missing))
    return GatedFile(path, kind, tuple(checks))


def _is_record(path: Path) -> bool:
    """Tell lines of JSON by their first byte: the length that outputs begin with has another."""
    first = b""
    if path.is_file():  # opening a pipe would wait
        with path.open("rb") as file:
            first = file.read(1)
    return first == b"{" or (not first and path.suffix == ".jsonl")


def _of_output(found: OutputAudit) -> Numbers:
    """Return the numbers of a certificate that agrees with its file."""
    assert found.options is not None
    over, out_tol = found.rows_over_budget, found.options.out_tol
    # Without a promise. Only a full proof counts them among its rows.
    beside = found.left_out + found.held_out
    rows = found.rows + (0 if found.options.proof == "full" else beside)
    if not rows:
        nothing = "is not proven of any query: the input has none"
        return {
            "tv": nothing,
            "error": nothing,
            "keys": found.kept / found.total,
            "unproven": nothing,
        }
    unproven: float | str = _NO_MASSES if over is None else (over + beside) / rows
    if over is None and found.worst_tail_mass is not None:
        unproven = "is not recorded, but rows are over budget: prune with --proof full"
    error: float | str = "is not recorded: prune with --out-tol"
    if out_tol is not None:
        # A row over its budget may be off by more.
        error = out_tol if over == 0 else "is not proven: prune with a proof, without --max-keep"
    return {
        "tv": _NO_MASSES if found.worst_tail_mass is None else found.worst_tail_mass,
        "error": error,
        "keys": found.kept / found.total,
        "unproven": unproven,
    }


def _of_record(content: bytes) -> Numbers:
    """Return the numbers of lines of JSON; a `CertkError` names the line that is none."""
    # Escapes of bytes that are no text are no JSON either.
    lines = content.decode("utf-8", "backslashreplace").removesuffix("\n").split("\n")
    calls = [_call(line, number) for number, line in enumerate(lines, 1) if content]
    if not calls:
        raise CertkError(
            "no certified attention ran: switch the model over by certk_rs.transformers.use, and "
            "run it inside the Recorder"
        )
    errors = [each["error_bound"] for each in calls if "error_bound" in each]
    rows = sum(each["rows"] for each in calls)
    kept = math.fsum(each["rows"] * each["kept"] for each in calls if each["rows"])
    error: float | str = "is not recorded in every call: use Recorder(error_bounds=True)"
    if len(errors) == len(calls):
        error = "is not proven to be finite: give a smaller eps" if None in errors else max(errors)
    return {
        "tv": max(each["tail_mass_upper"] for each in calls),
        "error": error,
        "keys": kept / rows if rows else "is not there, for no row sees a key",
        "unproven": sum(not _is_proven(each) for each in calls) / len(calls),
    }


def _is_proven(call: Mapping[str, Any]) -> bool:
    number = call["tail_mass_upper" if call["kind"] == "eps" else "error_bound"]
    return call["holds"] is True and number is not None and number <= call["budget"]


def _call(line: str, number: int) -> dict[str, Any]:
    """Return one record, checked as far as its numbers are used."""
    call = None
    with contextlib.suppress(ValueError, RecursionError):
        call = parse_json(line)
    said = call if isinstance(call, dict) else {}
    rows, kind, bound = (said.get(name) for name in ("rows", "kind", "error_bound"))
    fits = {
        "rows": type(rows) is int and rows >= 0,
        "kind": kind == "eps" or (kind == "out_tol" and "error_bound" in said),
        "holds": type(said.get("holds")) is bool,
        "budget": _is_number(said.get("budget")),
        "tail_mass_upper": _is_number(said.get("tail_mass_upper")),
        "kept": rows == 0 or (_is_number(said.get("kept")) and said["kept"] <= 1),
        "error_bound": bound is None or _is_number(bound),
    }
    wrong = next((name for name, fit in fits.items() if not fit), None)
    if wrong is None:
        return said
    what = f"its {wrong} is {said.get(wrong)!r}" if said else "it is no object of JSON"
    raise CertkError(
        f"line {number} is not what Recorder.to_jsonl writes ({what}): give its file, or an output "
        "of certk prune"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and value is not True and 0 <= value < math.inf
