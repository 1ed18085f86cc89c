"""`certk demo`: a small real cache, pruned and verified."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .example import example
from .options import AsJson, CacheFile, Eps, Granularity, Job, OneSetPer, Quiet
from .terminal import print_json, print_table, progress_bar, round_up, say, terminal_width

if TYPE_CHECKING:
    from .._jobs.results import LayerReport


def demo(
    data: CacheFile = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="DIR", help="Keep the output here; default: remove it."
        ),
    ] = None,
    eps: Eps = 0.05,
    granularity: OneSetPer = Granularity.head,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Job:
    """Prune a small real cache, verify it, and show each layer."""

    def job() -> int:
        from .._jobs.prune import prune
        from .._jobs.results import file_json
        from ..audit import audit, audit_json
        from .audit_report import show_audit, verdict

        cache = example() if data is None else data
        with contextlib.ExitStack() as stack:
            folder = out
            if folder is None:
                temporary = tempfile.TemporaryDirectory(prefix="certk-demo-")
                folder = Path(stack.enter_context(temporary))
            with progress_bar(quiet) as progress:
                job = prune(cache, folder, eps, granularity=granularity.value, progress=progress)
                [result] = job.outputs
                report = audit([Path(result.target)], [cache], progress)
        if as_json:
            pruned = file_json(result)
            print_json({"command": "demo", "eps": eps, **pruned, "verify": audit_json(report)})
            return verdict(report)
        say(f"certk prune {cache} -o {folder} --eps {eps:g} --granularity {granularity.value}")
        if out is None:
            say("(a temporary folder, removed at the end; keep the output with -o DIR)")
        _show(result.layers, eps)
        say("")
        say(f"certk verify {result.target} --against {cache}")
        show_audit(report)
        return verdict(report)

    return job


def _show(reports: Sequence[LayerReport], eps: float) -> None:
    """Show a job as a table and as bars."""
    from .._jobs.results import bars

    heads = ("layer", "kept / total", "share", "lower bound", "gap", "worst tail mass")
    rows = [
        (
            str(report.layer),
            f"{report.count.kept} / {report.count.total}",
            f"{100 * report.count.kept / report.count.total:.1f} %",
            str(report.count.lower_bound),
            str(report.count.gap),
            round_up(report.worst_tail_mass),
        )
        for report in reports
    ]
    print_table(heads, rows, fold=True)
    symbols = "█▒·" if _can_print("█▒·") else "#+."
    say(
        f"{symbols[0]} least possible number (proven)   "
        f"{symbols[1]} kept beyond it   {symbols[2]} dropped"
    )
    for line in bars(reports, max(20, min(terminal_width(), 100) - 28), symbols):
        say(line)
    worst = round_up(max(report.worst_tail_mass for report in reports))
    say(f"No query in the file loses more than {worst} of its attention (eps = {eps:g}).")
    say("Queries that are not in the file are not covered.")


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
