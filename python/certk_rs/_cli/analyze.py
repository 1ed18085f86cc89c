"""`certk analyze`: how many keys each head of a cache needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import CertkError
from .options import (
    AT_LEAST_ONE,
    NUMBER,
    AsJson,
    Job,
    Layout,
    Names,
    OptionalInputs,
    Quiet,
    Recursive,
    Threads,
    Verbose,
    need_new,
)
from .prune_options import FailFast
from .score_scale import analyze_model
from .terminal import print_json, progress_bar, say

if TYPE_CHECKING:
    from .._jobs.inputs import Source


def analyze(
    caches: OptionalInputs = None,
    eps: Annotated[
        list[float] | None,
        typer.Option(
            parser=NUMBER,
            metavar="EPS",
            help="A budget; may be repeated (the middle one is the main one).",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one self-contained page with plots.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model", metavar="DIR", help="Instead of caches: the weights of a saved model."
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="What the model reads; default: a few lines."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(parser=AT_LEAST_ONE, metavar="N", help="Cut that text after N tokens."),
    ] = None,
    names: Names = None,
    layout: Layout = None,
    recursive: Recursive = False,
    fail_fast: FailFast = False,
    threads: Threads = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> Job:
    """Tell whether pruning caches is worth it, and what heads need.

    A sentence says it, a table has what every layer needs; with -v also what every head does. Of
    several files each is told of as it is done, and then all together. One bad file does not stop
    the others.


    With --model: how widely each head's scores spread, beside R of its weights.
    """

    def job() -> int:
        from .._display.page import pyplot
        from .._files.atomic import write_text
        from .._jobs.analyze import EPS, analyze_sources
        from .._jobs.analyze_page import analysis_page
        from .._jobs.inputs import expand
        from .analyze_report import Shown, as_object

        if model is not None:
            given = {"CACHE": caches, "--eps": eps, "--html": html, "--names": names}
            if other := [name for name, value in given.items() if value]:
                raise CertkError(f"--model does not go with {other[0]}: leave one of them out")
            return analyze_model(model, text, max_tokens, as_json)
        if text is not None or max_tokens is not None:
            raise CertkError("--text and --max-tokens are what --model reads: give --model DIR")
        if not caches:
            raise CertkError("no input: give at least one CACHE file, or --model DIR")
        if html is not None:
            need_new(html)
            pyplot()
        shown = Shown(as_json, verbose > 0)

        def find() -> list[Source]:
            sources = expand(caches, recursive, same_names=True)
            shown.several = len(sources) > 1
            return sources

        with progress_bar(quiet) as progress:
            found = analyze_sources(
                find, eps or EPS, names=names, layout=None if layout is None else layout.value,
                fail_fast=fail_fast, threads=threads, on_file=shown.tell, progress=progress,
            )  # fmt: skip
        if html is not None:
            write_text(html, analysis_page(found))
        if as_json:
            print_json(as_object(found))
        else:
            shown.all(found)
            if html is not None:
                say(f"written to {html}")
        return 1 if found.failures else 0

    return job
