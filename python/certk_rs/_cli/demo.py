"""`certk demo`: a small real cache, pruned and verified."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..errors import CertkError
from .options import Option
from .terminal import (
    can_print,
    print_json,
    print_table,
    progress_bar,
    round_up,
    say,
    terminal_width,
)

if TYPE_CHECKING:
    from .._jobs.later import Later
    from .._jobs.results import LayerReport
    from .._jobs.sets import SetRecord, Sums

_EXAMPLE = Path("_data") / "minilm_small.safetensors"
# More bars than this are one per layer, not one per kept set.
_MOST_BARS = 36
OPTIONS = {
    "data": Option(metavar="FILE", help="A cache file; default: the example."),
    "out": Option("-o", "--out", metavar="DIR", help="Keep the output here; default: remove it."),
    "eps": Option(metavar="EPS", help="Tail mass that a row may lose, 0 <= eps < 1."),
    "granularity": Option(help="One keep-set per kv head, or per layer."),
}


def demo(
    data: Path | None = None,
    out: Path | None = None,
    eps: float = 0.05,
    granularity: Literal["head", "layer"] = "head",
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """Prune a small real cache, verify it, and show each layer."""
    from .._files.cache import Cache
    from .._files.location import locate
    from .._jobs.later import later_in_all
    from .._jobs.prune import prune
    from .._jobs.results import file_json
    from ..audit import audit, audit_json
    from .verify import show_output, show_rest, verdict

    cache = example() if data is None else data
    with contextlib.ExitStack() as stack:
        folder = out
        if folder is None:
            temporary = tempfile.TemporaryDirectory(prefix="certk-demo-")
            folder = Path(stack.enter_context(temporary))
        with progress_bar(quiet) as progress:
            job = prune(cache, folder, eps, granularity=granularity, progress=progress)
            if job.failures:
                raise CertkError(job.failures[0].message)
            [result] = job.outputs
            report = audit([Path(result.target)], [cache], progress)
        with Cache(locate(cache)) as opened:
            later = next(iter(later_in_all(opened, (eps,), None)), None)
    if as_json:
        told = None if later is None else vars(later)
        body = {"eps": eps, **file_json(result), "verify": audit_json(report), "later": told}
        print_json(body)
        return verdict(report)
    say(f"certk prune {cache} -o {folder} --eps {eps:g} --granularity {granularity}")
    if out is None:
        say("(a temporary folder, removed at the end; keep the output with -o DIR)")
    _show(result.layers, eps)
    say("")
    say(f"certk verify {result.target} --against {cache}")
    for output in report.outputs:
        show_output(output)
    show_rest(report)
    if later is not None:
        _show_later(later)
    return verdict(report)


def _show_later(later: Later) -> None:
    """Show what queries lose that a set was not made for, to the set and to codes."""
    moved = later.moved_by_codes
    say("")
    say(
        f"Later queries: sets made for {'some of ' if later.sampled else ''}the earlier half of "
        f"the queries, judged by the later half "
        f"({later.rows} rows), and codes of all keys and values instead (--rest codes):"
    )
    heads = ("in memory", "bytes", "rows over eps", "worst loss", "outputs move by up to")
    rows = [
        (
            "kept rows",
            f"{100 * later.kept_bytes / later.cache_bytes:.1f} %",
            f"{100 * later.over / later.rows:.1f} %",
            f"{round_up(later.lost)} (true)",
            f"{100 * later.moved:.1f} %",
        ),
        (
            f"codes, {later.key_bits} and 8 bits",
            f"{100 * later.code_bytes / later.cache_bytes:.1f} %",
            f"{100 * later.unproven / later.rows:.1f} %",
            f"{round_up(later.proven)} (proven)",
            "unknown" if moved is None else f"{100 * moved:.1f} %",
        ),
    ]
    print_table(heads, rows)
    say("Matrices of bounds weigh in short heads: of long float32 heads codes take a third.")


def _show(reports: Sequence[LayerReport], eps: float) -> None:
    """Show a job as a table and as bars."""
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
    print_table(heads, rows)
    symbols = "█▒·" if can_print("█▒·") else "#+."
    say(
        f"{symbols[0]} least possible number (proven)   "
        f"{symbols[1]} kept beyond it   {symbols[2]} dropped"
    )
    for line in bars(reports, max(20, min(terminal_width(), 100) - 28), symbols):
        say(line)
    worst = round_up(max(report.worst_tail_mass for report in reports))
    say(f"No query in the file loses more than {worst} of its attention (eps = {eps:g}).")
    say("Queries that are not in the file are not covered.")


def bars(reports: Sequence[LayerReport], width: int, symbols: str = "█▒·") -> list[str]:
    """Return lines of a bar chart: of all keys, those proven necessary, kept beyond, and dropped.

    One bar per kept set if these are few, else one per layer. `symbols` are those of the parts.
    """
    rows: list[tuple[str, str, SetRecord | Sums]]
    if sum(len(report.sets) for report in reports) <= _MOST_BARS:
        rows = [
            (f"layer {report.layer}" if number == 0 else "", f"head {number}", one)
            for report in reports
            for number, one in enumerate(report.sets)
        ]
        if all(len(report.sets) == 1 for report in reports):
            rows = [(layer, "", one) for layer, _, one in rows]
    else:
        rows = [(f"layer {report.layer}", "", report.count) for report in reports]
    first = max(len(layer) for layer, _, _ in rows)
    second = max(len(head) for _, head, _ in rows)
    lines = []
    for layer, head, count in rows:
        needed = (count.lower_bound or 0) * width // count.total
        kept = max(needed, -(-count.kept * width // count.total))
        bar = symbols[0] * needed + symbols[1] * (kept - needed) + symbols[2] * (width - kept)
        share = f"{100 * count.kept / count.total:5.1f} %"
        lines.append(f"{layer:<{first}} {head:<{second}} {bar} {share}")
    return lines


def example() -> Path:
    """Return the example, as a path from here where it lies below."""
    here, found = Path.cwd(), Path(__file__).resolve().parents[1] / _EXAMPLE
    if not found.is_file():
        raise CertkError(
            f"{found} is missing from this installation: install certk-rs anew, or give a cache of "
            "your own with --data FILE"
        )
    return found.relative_to(here) if found.is_relative_to(here) else found
