#!/usr/bin/env python3
"""Count lines of code and words of prose, beside the most that each part may have.

Code, comments and blank lines count alike. The exit code is 1 where a part is above its limit.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = {
    ("src", "crates"): 34_000,
    ("python/certk_rs",): 22_000,
    ("tests",): 32_000,
    ("examples", "experiments", "benches", "fuzz"): 12_000,
}
PROSE = {("docs", "README.md", "CONTRIBUTING.md"): 27_000}


def tracked(parts: tuple[str, ...], *endings: str) -> list[Path]:
    """Return the files below these parts that git knows and that have one of these endings."""
    named = subprocess.check_output(["git", "ls-files", "-z", "--", *parts], cwd=ROOT, text=True)
    files = [ROOT / name for name in named.split("\0") if name.endswith(endings)]
    return [file for file in files if file.is_file()]


def counted() -> list[tuple[str, str, int, int]]:
    """Return of each part its name, the unit, what it has and what it may have."""
    rows = []
    for parts, most in CODE.items():
        files = tracked(parts, ".rs", ".py", ".pyi")
        lines = sum(file.read_text().count("\n") for file in files)
        rows.append((" + ".join(parts), "lines", lines, most))
    for parts, most in PROSE.items():
        words = sum(len(file.read_text().split()) for file in tracked(parts, ".md"))
        rows.append((" + ".join(parts), "words", words, most))
    return rows


def main() -> int:
    """Print the table."""
    rows = counted()
    for name, unit, count, most in rows:
        print(f"{name:44} {count:7} {unit} of {most}{'  TOO MANY' * (count > most)}")
    return int(any(count > most for *_, count, most in rows))


if __name__ == "__main__":
    sys.exit(main())
