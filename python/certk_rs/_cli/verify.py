"""`certk verify`: what prune has written, checked by the auditor."""

from __future__ import annotations

from pathlib import Path

from ..errors import CertkError
from .options import Argument, Option
from .terminal import print_json, progress_bar

OPTIONS = {
    "outputs": Argument(metavar="OUT...", help="Outputs, or directories of them."),
    "against": Option(metavar="CACHE", help="An input, or a directory of them; may be repeated."),
    "threads": Option("--jobs", metavar="N", min=1, help="Threads; default: one a processor."),
    "sample": Option(
        metavar="F|N",
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
    sample: str | None = None,
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
    from ..audit import audit, audit_json
    from .audit_report import show_output, show_rest, verdict

    looked_at = _read_sample(sample)
    files, inputs = _files(outputs, recursive), _files(against or [], recursive)
    if not files and not inputs:
        raise CertkError("there is no .safetensors file to verify: give outputs of certk prune")
    if against and not inputs:
        raise CertkError("--against names no .safetensors file: give the inputs of the outputs")
    if looked_at is not None and not inputs:
        raise CertkError("--sample chooses rows to recompute: give --against, which has them")
    with progress_bar(quiet) as progress:
        report = audit(
            files,
            inputs,
            progress,
            names,
            threads=threads,
            sample=looked_at,
            fail_fast=fail_fast,
            each=None if as_json else show_output,
            layout=layout,
        )
    if as_json:
        print_json(audit_json(report))
    else:
        show_rest(report)
    return verdict(report)


def _read_sample(text: str | None) -> int | float | None:
    """Read a number of rows (an integer), or a share of them."""
    if text is None:
        return None
    try:
        sample = int(text) if text.strip().isdecimal() else float(text)
    except ValueError:
        sample = 0.0
    if not (sample >= 1 if isinstance(sample, int) else 0 < sample <= 1):
        raise CertkError(f"--sample {text!r}: give a whole number of rows or a share in (0, 1]")
    return sample


def _files(given: list[str], recursive: bool) -> list[Path]:
    """Return each file once; outputs of several jobs, and inputs, may have the same names."""
    from ..jobs.inputs import expand

    if not given:
        return []
    paths = [each.location.path for each in expand(given, recursive, same_names=True)]
    return list({path.resolve(): path for path in paths}.values())
