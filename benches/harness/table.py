"""The command line of a bench that prints lines of text, and the dated file that keeps them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

from . import levels, machine
from .clock import LEAST_REPEAT, Times
from .report import machine_text
from .verify import CheckFailedError

RESULTS = Path(__file__).resolve().parents[1] / "results"

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """One run of a bench: the sections wanted, readings of each work, and where lines go."""

    wanted: frozenset[str]
    repeat: int
    quick: bool
    tell: Callable[[str], None]

    def pick(self, full: T, quick: T) -> T:
        """Return the first, or the second in a quick run."""
        return quick if self.quick else full


def ratio_line(
    label: str, times: Times, ours: str, peer: str, target: float | None, rest: str = ""
) -> str:
    """Return a line with the ratio of two medians, its quartiles, the target and a verdict."""
    ratio, low, high = times.ratio(ours, peer)
    goal = "" if target is None else f"<={target:.2f} {'ok' if ratio <= target else 'MISS'}"
    spread, lower = f"{low:.2f}-{high:.2f}", times.lower(ours, peer)
    lowered = "" if lower is None else f"{lower:.3f}"
    line = f"{label:56} {peer:12} {ratio:6.3f} {spread:>11} {lowered:>6} {goal:11} {rest}"
    return line.rstrip()


HEADER = (
    "\nRatios of medians, ours / peer's, and quartiles of the ratio within a repetition; lower: "
    f"the ratio at {levels.SECOND}\n\n"
    f"{'':56} {'peer':12} {'ratio':>6} {'quartiles':>11} {'lower':>6} target"
)


def save(text: str, name: str = "") -> Path:
    """Write a table to results/DATE-CPU-NAME.md and return its path."""
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    path = RESULTS / f"{'-'.join(filter(None, (date, machine.cpu_slug(), name)))}.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"```\n{text}\n```\n")
    return path


def run(
    doc: str | None,
    sections: Mapping[str, str],
    name: str,
    repeat: int,
    body: Callable[[Run], None],
    arguments: list[str] | None = None,
) -> int:
    """Parse the command line, describe the machine, let `body` measure, and save.

    Args:
        doc: Of the bench; its first line describes the command.
        sections: Names of the sections and their titles.
        name: The table is saved as `results/DATE-CPU-name.md`.
        repeat: Readings of each work unless the command line says otherwise.
        body: Measures and tells lines; raises `CheckFailedError` at a wrong result.
        arguments: The command line; that of the process if None.

    Returns:
        The exit code: 1 if a check failed.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    listed = "; ".join(f"{section}: {title}" for section, title in sections.items())
    parser.add_argument("sections", nargs="*", help=f"leave out for all ({listed})")
    parser.add_argument("--quick", action="store_true", help="small sizes, few readings")
    parser.add_argument("--save", action="store_true", help="also write it to benches/results")
    parser.add_argument("--repeat", type=int, default=repeat, help="readings of each work")
    options = parser.parse_args(arguments)
    unknown = set(options.sections) - set(sections)
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}")
    lines: list[str] = []

    def tell(text: str) -> None:
        lines.append(text)
        print(text, flush=True)

    tell(f"{machine_text(machine.describe())}\n")
    wanted = frozenset(options.sections or sections)
    readings = min(options.repeat, LEAST_REPEAT) if options.quick else options.repeat
    failed = False
    try:
        body(Run(wanted, readings, options.quick, tell))
    except CheckFailedError as error:
        failed = True
        tell(f"CHECK FAILED: {error}")
    tell(f"\nload average at the end: {machine.load()}")
    if options.save:
        save("\n".join(lines), name)
    return int(failed)
