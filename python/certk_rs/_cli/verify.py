"""`certk verify`: what prune has written, checked by the auditor."""

from __future__ import annotations

from .options import Argument, Option, read_share
from .terminal import print_json, progress_bar

OPTIONS = {
    "outputs": Argument(metavar="OUT...", help="Outputs, or directories of them."),
    "against": Option(metavar="CACHE", help="An input, or a directory of them; may be repeated."),
    "threads": Option("--jobs", metavar="N", min=1, help="Threads; default: one a processor."),
    "sample": Option(
        metavar="F|N",
        parser=read_share,
        help="Recompute only a share F of the rows of every output, or N of them, for a quick "
        "look. It can find what does not hold and confirms nothing (exit code 3).",
    ),
    "fail_fast": Option("--fail-fast", help="Stop at the first output that does not hold."),
}


def verify(
    outputs: list[str],
    against: list[str] | None = None,
    names: str | None = None,
    layout: str | None = None,
    recursive: bool = False,
    threads: int | None = None,
    sample: int | float | None = None,
    fail_fast: bool = False,
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """Check what prune has written.

    Without inputs: that every byte is what the certificate says. With --against, also that what the
    certificate says is true: everything is recomputed. Exit code 1 if anything does not hold. An
    output that was pruned with --names needs the same here, if its spelling is not a known one,
    and one that was pruned with --layout, if its shapes fit both orders of axes.
    """
    from ..verifying import verify as verify_outputs
    from .audit_report import show_output, show_rest, verdict

    with progress_bar(quiet) as progress:
        report = verify_outputs(
            outputs,
            against,
            names=names,
            layout=layout,
            recursive=recursive,
            threads=threads,
            sample=sample,
            fail_fast=fail_fast,
            on_output=None if as_json else show_output,
            progress=progress,
        )
    if as_json:
        print_json(report.to_json())
    else:
        show_rest(report)
    return verdict(report)
