"""A line of the table, and the table: plain text of WIDTH columns at most."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from .clock import Times

WIDTH = 120


@dataclass(frozen=True)
class Line:
    """One comparison: `ours` and `peer` in ns per score, `ratio` of the two and its target.

    `low` and `high` are quartiles of the ratio within a repetition. `peer_rows` says on how many
    of the rows the peer was timed. `kept` is the mean k / n. `lower` is the ratio at the second
    level of `harness/levels.py`. None: does not apply.
    """

    section: str
    label: str
    ratio: float
    target: float | None = None
    n: int | None = None
    rows: int | None = None
    peer_rows: int | None = None
    kept: float | None = None
    ours: float | None = None
    peer: float | None = None
    low: float | None = None
    high: float | None = None
    lower: float | None = None

    @property
    def mark(self) -> str:
        """Return a mark if the target is met; empty if there is none."""
        if self.target is None:
            return ""
        return "ok" if self.ratio <= self.target else "MISS"


@dataclass(frozen=True)
class Note:
    """Something to know about a section: what was left out, and why."""

    section: str
    text: str


Entry = Line | Note


def compare(
    section: str,
    label: str,
    times: Times,
    ours: str,
    peer: str,
    *,
    target: float | None = None,
    n: int | None = None,
    rows: int | None = None,
    peer_rows: int | None = None,
    kept: float | None = None,
) -> Line:
    """The line for two entrants of a contest."""
    ratio, low, high = times.ratio(ours, peer)
    return Line(
        section, label, ratio, target, n, rows, peer_rows, kept,
        times.median(ours), times.median(peer), low, high, times.lower(ours, peer),
    )  # fmt: skip


def mean(section: str, label: str, lines: Iterable[Line], target: float) -> Line:
    """The arithmetic mean of the ratios of some lines, with a target of its own."""
    ratios = [line.ratio for line in lines]
    return Line(section, label, sum(ratios) / len(ratios), target)


def digits(value: float | None, many: int = 3) -> str:
    """That many significant digits without an exponent."""
    if value is None or math.isnan(value):
        return ""
    if value <= 0:
        return f"{value:.3f}"
    return f"{value:.{max(0, many - 1 - math.floor(math.log10(value)))}f}"


_COLUMNS = "{:<34}{:>9}{:>6}{:>7}{:>6}{:>8}{:>8}{:>8}{:>14}{:>8}{:>12}"
HEADER = _COLUMNS.format(
    "", "n", "rows", "peer's", "kept", "ours", "peer", "ratio", "quartiles", "lower", "target"
)


def row_text(line: Line) -> str:
    """One line of the table."""
    spread = f"{digits(line.low, 2)}-{digits(line.high, 2)}" if line.low is not None else ""
    target = "" if line.target is None else f"<={line.target:g} {line.mark:<4}"
    return _COLUMNS.format(
        line.label,
        "" if line.n is None else line.n,
        "" if line.rows is None else line.rows,
        "" if line.peer_rows is None else line.peer_rows,
        "" if line.kept is None else f"{line.kept:.2f}",
        digits(line.ours),
        digits(line.peer),
        digits(line.ratio),
        spread,
        digits(line.lower),
        target,
    ).rstrip()


def section_text(name: str, title: str, entries: Iterable[Entry]) -> str:
    """A section: title, header, lines, notes."""
    own = [entry for entry in entries if entry.section == name]
    lines = [entry for entry in own if isinstance(entry, Line)]
    notes = [entry for entry in own if isinstance(entry, Note)]
    text = wrap(f"{name}  {title}", WIDTH, subsequent_indent="    ")
    text += [HEADER] if lines else []
    text += [row_text(line) for line in lines]
    timed = sorted((line for line in lines if line.ours is not None), key=lambda line: line.ratio)
    if len(timed) > 1:
        ends = [f"{digits(one.ratio)} ({one.label}, n = {one.n})" for one in (timed[0], timed[-1])]
        text += wrap(f"best {ends[0]}; worst {ends[1]}", WIDTH)
    for note in notes:
        text += wrap(note.text, WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(text)


def summary(entries: Iterable[Entry]) -> str:
    """Return the number of targets met, and the sections that miss one."""
    judged = [entry for entry in entries if isinstance(entry, Line) and entry.mark]
    missed = [line for line in judged if line.mark != "ok"]
    text = f"{len(judged) - len(missed)} of {len(judged)} targets met"
    if missed:
        counts = {line.section: 0 for line in missed}
        for line in missed:
            counts[line.section] += 1
        text += "; missed: " + ", ".join(f"{name} ({many})" for name, many in counts.items())
    return text


def machine_text(machine: Mapping[str, str]) -> str:
    """The description of the machine, a line each."""
    text: list[str] = []
    for name, value in machine.items():
        text += wrap(f"{name}: {value}", WIDTH, subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join(text)


def as_json(entry: Entry) -> dict[str, Any]:
    """An entry as plain data."""
    data = {key: value for key, value in vars(entry).items() if value is not None}
    if isinstance(entry, Line) and entry.mark:
        data["met"] = entry.mark == "ok"
    return data
