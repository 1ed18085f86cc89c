"""`certk verify`: what prune has written, checked by the auditor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from ..audit import audit
from ..errors import CertkError
from ..jobs.plan import expand
from .audit_report import audit_json, show_audit, verdict
from .options import AsJson, Job, Names, Quiet
from .terminal import print_json, progress_bar


def verify(
    outputs: Annotated[
        list[Path], typer.Argument(metavar="OUT...", help="Outputs, or directories of them.")
    ],
    against: Annotated[
        list[Path] | None,
        typer.Option(metavar="CACHE", help="An input, or a directory of them; may be repeated."),
    ] = None,
    names: Names = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Job:
    """Check what prune has written.

    Without inputs: that every byte is what the certificate says. With --against, also that what the
    certificate says is true: everything is recomputed. Exit code 1 if anything does not hold. An
    output that was pruned with --names needs the same here, if its spelling is not a known one.
    """

    def job() -> int:
        files = _distinct(path for output in outputs for path in expand(output))
        inputs = _distinct(path for cache in against or [] for path in expand(cache))
        if not files and not inputs:
            raise CertkError("there is no .safetensors file to verify: give outputs of certk prune")
        if against and not inputs:
            raise CertkError("--against names no .safetensors file: give the inputs of the outputs")
        with progress_bar(quiet) as progress:
            report = audit(files, inputs, progress, names)
        if as_json:
            print_json({"command": "verify", **audit_json(report)})
        else:
            show_audit(report)
        return verdict(report)

    return job


def _distinct(paths: Iterator[Path]) -> list[Path]:
    return list({path.resolve(): path for path in paths}.values())
