"""A bench that prints lines of ratios, and keeps them in a dated file if asked to."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path

from . import machine

RESULTS = Path(__file__).resolve().parents[1] / "results"

Tell = Callable[[str], None]


def run(
    doc: str | None,
    sections: Mapping[str, str],
    name: str,
    repeat: int,
    body: Callable[[set[str], int, Tell], bool],
) -> int:
    """Parse the command line, describe the machine, let `body` measure, and save.

    Args:
        doc: Of the bench; its first line describes the command.
        sections: Names of the sections and what they are.
        name: The table is saved as `results/DATE-CPU-name.md`.
        repeat: How many readings unless the command line says otherwise.
        body: Measures the sections wanted, with so many readings, and tells lines; returns whether
            all checks held.

    Returns:
        The exit code: 1 if a check failed.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    listed = "; ".join(f"{section}: {title}" for section, title in sections.items())
    parser.add_argument("sections", nargs="*", help=f"leave out for all ({listed})")
    parser.add_argument("--save", action="store_true", help="also write it to benches/results")
    parser.add_argument("--repeat", type=int, default=repeat, help="readings of each, at least 7")
    options = parser.parse_args()
    unknown = set(options.sections) - set(sections)
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}")
    lines: list[str] = []

    def tell(text: str) -> None:
        lines.append(text)
        print(text, flush=True)

    for key, value in machine.describe().items():
        tell(f"{key}: {value}")
    sound = body(set(options.sections or sections), options.repeat, tell)
    tell(f"\nload average at the end: {machine.load()}")
    if options.save:
        date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
        saved = RESULTS / f"{date}-{machine.cpu_slug()}-{name}.md"
        saved.write_text("```\n" + "\n".join(lines) + "\n```\n")
    return int(not sound)
