"""What the command line shows: progress on stderr, results on stdout as text or one JSON object.

Only here is anything printed, and everything passes through `plain`: `say` and `complain` take one
line each, tables and bars take cells and labels without markup.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from decimal import ROUND_CEILING
from typing import TYPE_CHECKING, Any

from .._display.numbers import rounded
from .._display.plain import plain
from ..jobs.plan import Progress

if TYPE_CHECKING:
    from rich.text import Text


def say(line: str) -> None:
    """Print one line of results."""
    print(plain(line))


def complain(line: str) -> None:
    """Print one line on stderr, at once."""
    print(f"certk: {plain(line)}", file=sys.stderr, flush=True)


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
) -> bool:
    """Print a table in full width; unless it must be, only if it fits. Tell whether it was.

    Columns are flush right, except those in `left`. Where they are told to fold they do not exceed
    the terminal.
    """
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for i, heading in enumerate(heads):
        table.add_column(_cell(heading), justify="left" if i in left else "right", no_wrap=not fold)
    for row in rows:
        table.add_row(*map(_cell, row))
    console = Console(highlight=False, soft_wrap=True)
    if fold:
        console.print(table)
        return True
    width = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    if width > console.width and not must:
        return False
    Console(highlight=False, soft_wrap=True, width=max(width, console.width)).print(table)
    return True


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
    """Print the one object that `--json` promises."""
    # In ASCII without control characters, but for the one that JSON leaves as it is.
    print(json.dumps(body).replace("\x7f", "\\u007f"))


def warn(message: str) -> None:
    """Say on stderr what is not an error."""
    complain(f"warning: {message}")


def fail(message: str, code: int) -> int:
    """Say on stderr why the command ends, if anybody is there to hear it; the exit code."""
    with contextlib.suppress(OSError):
        complain(message)
    return code
