"""All that the command line shows: results on stdout, as text or one JSON object, and the rest.

Nothing is printed elsewhere, and everything passes through `plain`: `say` and `complain` take one
line each, tables and bars take cells and labels without markup.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from decimal import ROUND_CEILING
from typing import TYPE_CHECKING

from .._display.numbers import rounded
from .._display.plain import plain
from .answer import Answer, Kind

if TYPE_CHECKING:
    from .._jobs.engine import Progress

_answer = Answer()
begin_answer, print_json = _answer.begin, _answer.hold


def say(line: str) -> None:
    """Print one line of results, at once, so that who reads a pipe has it when it is known."""
    print(plain(line), flush=True)


def complain(line: str) -> None:
    """Print one line on stderr, at once."""
    print(f"certk: {plain(line)}", file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """Print a warning on stderr."""
    complain(f"warning: {message}")


def show_help(text: str) -> None:
    """Print help that nobody asked for: on stderr, since it is no result."""
    for line in text.splitlines():
        print(plain(line), file=sys.stderr)


def print_text(text: str) -> None:
    """Print a paragraph in lines that fit the terminal, none of them longer than 100."""
    for line in textwrap.wrap(text, min(100, max(40, terminal_width()))):
        say(line)


def terminal_width() -> int:
    """Return the columns of the terminal, 80 where there is none."""
    return shutil.get_terminal_size().columns


def can_print(text: str) -> bool:
    """Tell whether stdout has these characters."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def print_table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: Sequence[int] = (),
    drop: Sequence[int] | None = None,
    elsewhere: str = "--json",
) -> None:
    """Print the columns of a table that the terminal has room for, and name those that it has not.

    Args:
        heads: The heading of each column.
        rows: Cells, as many in each row.
        left: Columns that are flush left; the others are flush right.
        drop: Columns that may be left out, in the order in which they go; default: all but the
            first, from the right.
        elsewhere: Options that show them all the same.
    """
    from rich.cells import cell_len

    lines = [[plain(cell) for cell in row] for row in (heads, *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    shown = list(range(len(heads)))
    going = list(shown[:0:-1] if drop is None else drop)
    while (width := 1 + sum(widths[i] + 3 for i in shown)) > _room() and going:
        shown.remove(going.pop(0))
    say("")
    for at, line in enumerate(lines):
        cells = [(line[i], " " * (widths[i] - cell_len(line[i])), i in left) for i in shown]
        padded = (cell + pad if flush_left else pad + cell for cell, pad, flush_left in cells)
        say(f"  {'   '.join(padded)}".rstrip())
        if at == 0:
            say(f" {('─' if can_print('─') else '-') * (width - 2)}")
    say("")
    if len(shown) < len(heads):
        out = ", ".join(head for i, head in enumerate(heads) if i not in shown)
        print_text(f"Left out, for want of room: {out} (see {elsewhere}, or a wider terminal).")


def _room() -> int:
    """Return the columns for a table: those of the terminal, no end of them in a file or a pipe."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return terminal_width()
    return sys.maxsize


def round_up(mass: float) -> str:
    """Return six digits, rounded up, so that a bound that is shown is still a bound."""
    return rounded(mass, ROUND_CEILING)


@contextlib.contextmanager
def progress_bar(quiet: bool) -> Iterator[Progress | None]:
    """Show a progress bar on stderr; None where it would not be seen."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TextColumn

    label_column = TextColumn("{task.description}", markup=False)
    columns = (label_column, *Bar.get_default_columns()[1:])
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def tell(label: str, done: int, total: int) -> None:
            bar.update(task, description=plain(label), completed=done, total=total)

        yield tell


def print_answer(code: int) -> None:
    """Print the object, if one was promised, with the error in it if the exit code is not 0."""
    text = _answer.take(code)
    if text is not None:
        print(text)


def fail(message: str, code: int, kind: Kind = "does-not-hold") -> int:
    """Say on stderr why the command ends, if anybody is there to hear it; return the exit code.

    With `--json` the object on stdout says so, too.
    """
    _answer.failed(message, kind)
    with contextlib.suppress(OSError):
        complain(message)
    return code
