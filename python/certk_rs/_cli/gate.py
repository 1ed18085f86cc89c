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

    tell = _Told(as_json)
    with progress_bar(quiet) as progress:
        found = gate_files(
            inputs,
            tv=tv,
            error=error,
            keys=keys,
            unproven=unproven,
            on_file=tell,
            progress=progress,
        )
    if as_json:
        print_json(found.to_json())
    elif found.passes:
        say(str(found.files[0]) if len(found.files) == 1 else found.summary())
    return _verdict(found)


class _Told:
    """Prints a line for each file that does not pass, as soon as it is known."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def __call__(self, file: GatedFile) -> None:
        if not self._as_json and not file.passes:
            say(str(file))


def _verdict(found: Gate) -> int:
    """Say on stderr that something does not pass; return the exit code."""
    if found.passes:
        return 0
    bad, count = found.failed, len(found.files)
    lost = all(each.error is not None for each in bad)
    first = next((each for each in bad if each.error is None), bad[0])
    text = f"{len(bad)} of {count} files fail (first: {first.path}: {first.reason})"
    return fail(f"error: {text}", 2, "io") if lost else fail(f"failed: {text}", 1)
