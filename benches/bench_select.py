"""Selection against every peer: `python benches/bench_select.py`, explained in benches/README.md.

Everything is a ratio of medians, ours and a peer's, taken in turn in one process. Each result is
checked once before it is timed. Exit code 1 when a check fails; a missed target is only marked.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from types import ModuleType

from harness import levels, machine, table
from harness.clock import LEAST_REPEAT
from harness.report import Entry, as_json, machine_text, section_text, summary
from harness.verify import CheckFailedError
from sections import given, growth, long_rows, shapes, short_rows, threads
from sections import levels as levels_section
from sections.settings import Settings

HERE = Path(__file__).resolve().parent
FIGURE = HERE.parent / "docs" / "figures" / "growth.png"
MODULES: tuple[ModuleType, ...] = (
    long_rows, short_rows, threads, levels_section, growth, shapes, given,
)  # fmt: skip
ORDER = ("S1", "S2", "S3", "S4", "S5", "S6", "S7", "S8", "P", "G1", "G2", "A", "M", "C", "K")
TITLES: dict[str, str] = {name: title for part in MODULES for name, title in part.SECTIONS.items()}
QUICK = {"repeat": LEAST_REPEAT, "scores": 1 << 18, "longest": 1 << 17}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    listed = "; ".join(f"{name}: {TITLES[name]}" for name in ORDER)
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"leave out for all ({listed})"
    )
    parser.add_argument("--quick", action="store_true", help="small batches, n up to 131072")
    parser.add_argument(
        "--repeat", type=int, default=Settings.repeat, help="readings of each, at least 7"
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of the table")
    parser.add_argument("--plot", action="store_true", help=f"draw {FIGURE.name} from section G2")
    parser.add_argument(
        "--save",
        action=argparse.BooleanOptionalAction,
        help="write benches/results/DATE-CPU.md; the default for all sections, not quick",
    )
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.sections) - set(ORDER))
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(ORDER)}")
    return options


def settings_of(options: argparse.Namespace) -> Settings:
    """Return the sections to measure; a plot needs its section."""
    wanted = frozenset(options.sections or ORDER) | (frozenset({"G2"}) if options.plot else set())
    if options.quick:
        return Settings(wanted, **QUICK)
    return Settings(wanted, repeat=max(options.repeat, LEAST_REPEAT))


def measure(settings: Settings) -> tuple[list[Entry], list[str]]:
    """Entries of all wanted sections, and the checks that failed; progress on stderr."""
    entries: list[Entry] = []
    failures: list[str] = []
    for part in MODULES:
        if not settings.wants(*part.SECTIONS):
            continue
        start = time.perf_counter()
        try:
            for entry in part.run(settings):
                entries.append(entry)
        except CheckFailedError as error:
            failures.append(f"CHECK FAILED in {', '.join(part.SECTIONS)}: {error}")
        names = ", ".join(name for name in part.SECTIONS if settings.wants(name))
        print(f"{names}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return entries, failures


def whole_table(where: dict[str, str], entries: list[Entry], failures: list[str]) -> str:
    """The whole report as plain text."""
    present = [name for name in ORDER if any(entry.section == name for entry in entries)]
    parts = [machine_text(where)]
    parts.append(
        "Times in ns per score (medians), eps 0.01; ratio = ours / peer; quartiles of the ratio\n"
        "within a repetition; kept = mean k / n; peer's = rows on which the peer was timed;\n"
        f"lower = the ratio with certk_rs at {levels.SECOND}, in the same repetitions."
    )
    parts += [section_text(name, TITLES[name], entries) for name in present]
    parts += failures
    parts.append(summary(entries))
    return "\n\n".join(parts)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, save; 1 when a check failed."""
    options = parse(arguments)
    settings = settings_of(options)
    where = machine.describe()
    start = time.perf_counter()
    entries, failures = measure(settings)
    where["load average at the end"] = machine.load()
    where["took"] = f"{time.perf_counter() - start:.0f} s"
    text = whole_table(where, entries, failures)
    lines = [as_json(entry) for entry in entries]
    data = json.dumps({"machine": where, "entries": lines, "failures": failures}, indent=1)
    print(data if options.json else text)
    if options.save or (
        options.save is None and settings.wanted >= set(ORDER) and not options.quick
    ):
        print(f"wrote {table.save(text).relative_to(HERE.parent)}", file=sys.stderr)
    if options.plot and not failures:
        from sections.growth_plot import draw

        draw(entries, FIGURE, machine.cpu())
        print(f"wrote {FIGURE.relative_to(HERE.parent)}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
