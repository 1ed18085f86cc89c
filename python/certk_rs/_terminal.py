"""What the command line shows: progress on stderr, results on stdout as text or one JSON object.

Only here is anything printed, and everything passes through `plain`: `say` and `complain` take one
line each, tables and bars take cells and labels without markup.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from decimal import ROUND_CEILING, Context
from typing import TYPE_CHECKING, Any

from ._display.plain import plain
from .audit import Audit, OutputAudit
from .jobs.analyze import CacheAnalysis
from .jobs.analyze_page import ADVISED, HEADS, LAYERS, NARROW, cells, layer_cells, layer_heads
from .jobs.plan import Progress
from .jobs.report import LayerReport, bars

if TYPE_CHECKING:
    from rich.text import Text

_SHOWN_FINDINGS = 20


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


def show_layers(reports: Sequence[LayerReport], eps: float) -> None:
    """Show a job as a table and as bars."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("layer", "kept / total", "share", "lower bound", "gap", "worst tail mass"):
        table.add_column(_cell(heading), justify="right")
    for report in reports:
        count = report.count
        cells = (
            str(report.layer),
            f"{count.kept} / {count.total}",
            f"{100 * count.kept / count.total:.1f} %",
            str(count.lower_bound),
            str(count.gap),
            round_up(report.worst_tail_mass),
        )
        table.add_row(*map(_cell, cells))
    console.print(table)
    symbols = "█▒·" if _can_print("█▒·") else "#+."
    say(
        f"{symbols[0]} least possible number (proven)   "
        f"{symbols[1]} kept beyond it   {symbols[2]} dropped"
    )
    for line in bars(reports, max(20, min(console.width, 100) - 28), symbols):
        say(line)
    worst = round_up(max(report.worst_tail_mass for report in reports))
    say(f"No query in the file loses more than {worst} of its attention (eps = {eps:g}).")
    say("Queries that are not in the file are not covered.")


def show_analysis(found: Sequence[CacheAnalysis]) -> None:
    """Show caches as tables, a row per head and a row per layer."""
    for cache in found:
        say(f"{cache.path}: at eps = {cache.eps[cache.main]:g}, shares of the visible keys")
        say("By layer.head:")
        rows = cells(cache)
        if not print_table(HEADS, rows, must=False):
            # What is left out, to fit the terminal, is in --json and --html.
            print_table(HEADS[:NARROW], [row[:NARROW] for row in rows])
        say(LAYERS)
        print_table(layer_heads(cache), layer_cells(cache))
        say(f"Advice: {cache.advice()}.")
    print_text(
        "k/n: the keys that each row needs on its own; rule: by its sigma; 1 gap, 8 cuts: these "
        "bounds on it; one set: what all rows of a head need together."
    )
    print_text(f"Advice, {ADVISED}")
    say("Queries that are not in the file are not covered.")


def print_table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    must: bool = True,
    left: Sequence[int] = (),
) -> bool:
    """Print a table in full width; unless it must be, only if it fits. Tell whether it was.

    Columns are flush right, except those in `left`.
    """
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for i, heading in enumerate(heads):
        table.add_column(_cell(heading), justify="left" if i in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(_cell, row))
    console = Console(highlight=False, soft_wrap=True)
    width = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    if width > console.width and not must:
        return False
    Console(highlight=False, soft_wrap=True, width=max(width, console.width)).print(table)
    return True


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
    return f"{Context(prec=6, rounding=ROUND_CEILING).create_decimal(mass).normalize():g}"


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def show_audit(report: Audit) -> None:
    """One line for everything that does not hold, and one for the verdict on each output."""
    for output in report.outputs:
        for finding in output.findings[:_SHOWN_FINDINGS]:
            say(f"{output.path}: {finding}")
        if output.found > _SHOWN_FINDINGS:
            say(f"{output.path}: ... and {output.found - _SHOWN_FINDINGS} more")
        if not output.holds:
            say(f"{output.path}: DOES NOT HOLD")
            continue
        say(f"{output.path}: {_covered(output)}")
        if output.unchecked:
            say(
                f"{output.path}: is what its certificate says, byte for byte; not known without "
                f"--against: {'; '.join(output.unchecked)}; it says: {_asked_and_kept(output)}"
            )
        else:
            say(
                f"{output.path}: holds: {output.confirmed_rows} tail masses and "
                f"{output.confirmed_lower_bounds} lower bounds recomputed from {output.source}; "
                f"{_asked_and_kept(output)}"
            )
    for path in report.unmatched:
        say(f"{path}: given with --against, but it is the input of no output here")


def _covered(output: OutputAudit) -> str:
    some, all_of_them = len(output.covered), len(output.covered) + len(output.not_covered)
    text = f"covers {some} of the {all_of_them} tensors of its input (names {output.names!r})"
    if not output.not_covered:
        return text
    shown = ", ".join(map(repr, output.not_covered[:3])) + ", ..." * (len(output.not_covered) > 3)
    return f"{text}, not covered: {shown}"


def _asked_and_kept(output: OutputAudit) -> str:
    options = vars(output.options) if output.options is not None else {}
    asked = [f"eps = {output.eps!r}", *(f"{name} = {value}" for name, value in options.items())]
    return (
        f"{', '.join(asked)}: kept {output.kept} of {output.total} keys, {output.rows_over_budget} "
        f"of {output.rows} rows over eps, worst tail mass {round_up(output.worst_tail_mass)}"
    )


def audit_json(report: Audit) -> dict[str, Any]:
    """The same as data."""
    return {
        "holds": report.holds,
        "outputs": [_output_json(output) for output in report.outputs],
        "unmatched_inputs": [str(path) for path in report.unmatched],
    }


def _output_json(output: OutputAudit) -> dict[str, Any]:
    return {
        "output": str(output.path),
        "input": None if output.source is None else str(output.source),
        "holds": output.holds,
        "findings": [{"where": item.where, "what": item.what} for item in output.findings],
        "more_findings": output.more_findings,
        "eps": output.eps,
        "options": None if output.options is None else vars(output.options),
        "names": output.names,
        "covered": list(output.covered),
        "not_covered": list(output.not_covered),
        "kept": output.kept,
        "total": output.total,
        "rows_over_budget": output.rows_over_budget,
        "worst_tail_mass": output.worst_tail_mass,
        "not_checked": list(output.unchecked),
        "tail_masses": output.rows,
        "tail_masses_confirmed": output.confirmed_rows,
        "lower_bounds": output.lower_bounds,
        "lower_bounds_confirmed": output.confirmed_lower_bounds,
    }


def print_json(body: dict[str, Any]) -> None:
    """Print the one object that `--json` promises."""
    # In ASCII without control characters, but for the one that JSON leaves as it is.
    print(json.dumps(body).replace("\x7f", "\\u007f"))


def warn(message: str) -> None:
    """Say on stderr what is not an error."""
    complain(f"warning: {message}")
