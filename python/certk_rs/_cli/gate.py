"""`certk gate`: outputs and records of runs, passed or failed by thresholds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .options import Argument, Option, read_share
from .terminal import fail, print_json, progress_bar, say

if TYPE_CHECKING:
    from .._jobs.gate import Gate, GatedFile

OPTIONS = {
    "inputs": Argument(
        metavar="FILE",
        help="Outputs of prune, directories of them with all below, or files of Recorder.to_jsonl.",
    ),
    "tv": Option(
        metavar="X",
        help="The largest tail mass (total variation distance) of a promised row or a call.",
    ),
    "error": Option(
        metavar="X",
        help="The largest error of an attention output: --out-tol of prune, or error_bound.",
    ),
    "keys": Option(metavar="F", parser=read_share, help="The largest share of keys kept."),
    "unproven": Option(
        metavar="F",
        parser=read_share,
        help="The largest share of rows (in a record: calls) over budget, or without a promise; "
        "default: 0.",
    ),
}


def gate(
    inputs: list[str],
    tv: float | None = None,
    error: float | None = None,
    keys: int | float | None = None,
    unproven: int | float | None = None,
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """Pass or fail outputs of prune, and records of runs.

    Give at least one threshold. Exit code 0 if every file passes. Exit code 1 if a threshold is
    broken, a number that one asks for is not recorded, or a file is damaged or of another kind.
    Outputs are compared with their own hashes, and records have none. Nothing is recomputed: certk
    verify --against does that.
    """
    from .._jobs.gate import gate as gate_files

    with progress_bar(quiet) as progress:
        show = None if as_json else _show
        limits = {"tv": tv, "error": error, "keys": keys, "unproven": unproven}
        found = gate_files(inputs, **limits, on_file=show, progress=progress)
    if as_json:
        print_json(found.to_json())
    elif found.passes:
        say(str(found.files[0]) if len(found.files) == 1 else found.summary())
    return _verdict(found)


def _show(file: GatedFile) -> None:
    """Print a line for a file that does not pass, as soon as it is known."""
    if not file.passes:
        say(str(file))


def _verdict(found: Gate) -> int:
    """Say on stderr that something does not pass; return the exit code."""
    if found.passes:
        return 0
    broken = [each for each in found.failed if each.error is None]
    first = (broken or found.failed)[0]
    count = f"{len(found.failed)} of {len(found.files)} files fail"
    text = f"{count} (first: {first.path}: {first.reason})"
    return fail(f"failed: {text}", 1) if broken else fail(f"error: {text}", 2, "io")
