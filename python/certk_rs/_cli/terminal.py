"""What the command line shows: progress on stderr, results on stdout as text or one JSON object.

Only here is anything printed, and everything passes through `plain`: `say` and `complain` take one
line each, tables and bars take cells and labels without markup.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from decimal import ROUND_CEILING
from typing import TYPE_CHECKING, Any

from .._display.numbers import rounded
from .._display.plain import plain
from .._jobs.progress import Progress
from .answer import Answer, Kind

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_answer = Answer()


def say(line: str) -> None:
    """Print one line of results, at once, so that who reads a pipe has it when it is known."""
    print(plain(line), flush=True)


def complain(line: str) -> None:
    """Print one line on stderr, at once."""
    print(f"certk: {plain(line)}", file=sys.stderr, flush=True)


def show_help(text: str) -> None:
    """Print help that nobody asked for: on stderr, since it is no result."""
    for line in text.splitlines():
        print(plain(line), file=sys.stderr)


@contextlib.contextmanager
def progress_bar(quiet: bool) -> Iterator[Progress | None]:
    """A progress bar on stderr, None where it would not be seen."""
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


def print_table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    must: bool = True,
    left: Sequence[int] = (),
    fold: bool = False,
    drop: Sequence[int] | None = None,
    elsewhere: str = "--json",
) -> None:
    """Print a table in full width; unless it must be whole, only what the terminal has room for.

    Args:
        heads: The heading of each column.
        rows: Cells, as many in each row.
        must: Whether every column is printed, however wide that is.
        left: Columns that are flush left; the others are flush right.
        fold: Whether cells are folded instead, so that no line exceeds the terminal.
        drop: Columns that may be left out, in the order in which they go; default: all but the
            first, from the right. A line below the table names those that did.
        elsewhere: Options by which they are had all the same.
    """
    console = _console()
    if fold:
        table = _table(heads, rows, left, fold=True)
        console.print(table)
        return
    room = 0 if must else _room()
    shown = list(range(len(heads)))
    going = list(range(len(heads) - 1, 0, -1)) if drop is None else list(drop)
    while True:
        table = _table(
            [heads[i] for i in shown],
            [[row[i] for i in shown] for row in rows],
            [shown.index(i) for i in left if i in shown],
        )
        width = _width(table)
        if must or width <= room or not going:
            break
        shown.remove(going.pop(0))
    _console(max(width, console.width)).print(table)
    if len(shown) < len(heads):
        out = ", ".join(head for i, head in enumerate(heads) if i not in shown)
        print_text(f"Left out, for want of room: {out} (see {elsewhere}, or a wider terminal).")


def _console(width: int | None = None) -> Console:
    from rich.console import Console

    class _Stdout(Console):
        def on_broken_pipe(self) -> None:
            # Rich would end the process with 1, which says that something does not hold.
            raise BrokenPipeError

    return _Stdout(highlight=False, soft_wrap=True, width=width)


def _table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int], fold: bool = False
) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for i, heading in enumerate(heads):
        table.add_column(_cell(heading), justify="left" if i in left else "right", no_wrap=not fold)
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def _width(table: Table) -> int:
    from rich.console import Console
    from rich.measure import Measurement

    console = Console()
    return Measurement.get(console, console.options.update(max_width=10_000), table).maximum


def _room() -> int:
    """Columns that a table has: those of the terminal, and no end of them in a file or a pipe."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return terminal_width()
    return 10_000


def terminal_width() -> int:
    """Columns of the terminal, or what stands for them where there is none."""
    from rich.console import Console

    return Console().width


def print_text(text: str) -> None:
    """Print a paragraph in lines that fit the terminal, none of them longer than 100."""
    import shutil
    import textwrap

    for line in textwrap.wrap(text, min(100, max(40, shutil.get_terminal_size().columns))):
        say(line)


def _cell(text: str) -> Text:
    from rich.text import Text

    return Text(plain(text))


def round_up(mass: float) -> str:
    """Six digits, rounded up: what is shown is still a bound."""
    return rounded(mass, ROUND_CEILING)


def print_json(body: dict[str, Any]) -> None:
    """Print the one object that `--json` promises, with its schema, when the command ends.

    What the command ends with is then known and part of it. A number that is not finite becomes
    null: JSON has none.
    """
    _answer.hold(body)


def begin_answer(as_json: bool, command: str | None) -> None:
    """Forget the last command; `as_json` says whether this one promised an object."""
    _answer.begin(as_json, command)


def print_answer(code: int) -> None:
    """Print the object, if one was promised, with the error in it if the exit code is not 0."""
    text = _answer.take(code)
    if text is not None:
        print(text)


def warn(message: str) -> None:
    """Say on stderr what is not an error."""
    complain(f"warning: {message}")


def fail(message: str, code: int, kind: Kind = "does-not-hold") -> int:
    """Say on stderr why the command ends, if anybody is there to hear it; the exit code.

    With `--json` the object on stdout says so, too.
    """
    _answer.failed(message, kind)
    with contextlib.suppress(OSError):
        complain(message)
    return code
