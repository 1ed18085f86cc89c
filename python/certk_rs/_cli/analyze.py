"""`certk analyze`: how many keys each head of a cache needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .._display.page import pyplot
from .._files.atomic import write_text
from ..errors import CertkError
from ..jobs.analysis import Analysis
from ..jobs.analyze import EPS, Analyzed, analyze_sources
from ..jobs.analyze_cache import CacheAnalysis
from ..jobs.analyze_page import (
    ADVISED,
    HEADS,
    LAYERS,
    NARROW,
    analysis_page,
    cells,
    hot_cells,
    hot_heads,
    layer_cells,
    layer_heads,
    said_of,
    said_of_all,
    said_of_hot,
    said_of_lengths,
    together_cells,
    together_heads,
    watches_of,
)
from ..jobs.effective_watch import shown_lengths, watch_cells, watch_heads
from ..jobs.inputs import Source, expand
from ..jobs.prune import Failure
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
    need_new,
)
from .prune_options import FailFast
from .score_scale import analyze_model
from .terminal import complain, print_json, print_table, print_text, progress_bar, say


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
) -> Job:
    """Tell how many keys each head of a cache needs, and whether pruning it is worth it.

    Of several files each is told of as it is done; then comes what every layer and head needs in
    all of them, and then the tables of each. One bad file does not stop the others.

    With --model: how widely each head's scores spread, beside R of its weights.
    """

    def job() -> int:
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
        shown = _Shown(as_json)

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
            print_json(_json(found))
        else:
            shown.all(found)
            if html is not None:
                say(f"written to {html}")
        return 1 if found.failures else 0

    return job


class _Shown:
    """Says what was found: of several files each as soon as it is known, and all at the end."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self.several = False

    def tell(self, outcome: Analyzed) -> None:
        """Print the line of one file of several."""
        if isinstance(outcome, Failure):
            complain(f"error: {outcome.message}")
        elif self.several and not self._as_json:
            say(said_of(outcome))

    def all(self, found: Analysis) -> None:
        """Print the tables: of all files together, and then of each."""
        if self.several:
            _show_together(found)
        for cache in found.caches:
            _show(cache)
        if found.caches:
            print_text(
                "k/n: the keys that each row needs on its own; rule: by its sigma; 1 gap, 8 cuts: "
                "these bounds on it; one set: what all rows of a head need together."
            )
            print_text(f"Advice, {ADVISED}")
            say("Queries that are not in the file are not covered.")


def _json(found: Analysis) -> dict[str, Any]:
    return {"command": "analyze", **found.to_json()}


def _show_together(found: Analysis) -> None:
    """Show what every layer and every head needs in all files."""
    say(said_of_all(found))
    every = found.aggregate()
    for by_head in (False, True):
        what = "layer.head" if by_head else "layer"
        say(f"All files, by {what}: shares of the visible keys; mean, quantiles and worst file")
        heads = together_heads(by_head)
        # First the file and the advice, which may be long, then all but the worst.
        drop = [heads.index(name) for name in ("advice", "in", "10 %", "50 %", "90 %", "k/n")]
        rows = together_cells(every, by_head)
        print_table(heads, rows, must=False, drop=drop, elsewhere="--json, --html")


def _show(cache: CacheAnalysis) -> None:
    """Show one cache as tables, a row per head and a row per layer."""
    say(f"{cache.path}: at eps = {cache.eps[cache.main]:g}, shares of the visible keys")
    say("By layer.head:")
    beyond = range(len(HEADS) - 1, NARROW - 1, -1)
    print_table(HEADS, cells(cache), must=False, drop=beyond, elsewhere="--json, --html")
    say(LAYERS)
    print_table(layer_heads(cache), layer_cells(cache))
    _show_lengths(cache)
    if cache.hot:
        print_text(said_of_hot(cache))
        print_table(hot_heads(), hot_cells(cache))
    say(f"Advice: {cache.advice()}.")


def _show_lengths(cache: CacheAnalysis) -> None:
    """How effective entries go with the length of a row, and what that asks for."""
    watches = watches_of(cache)
    lengths = shown_lengths([one for _, one in watches])
    eps = cache.eps[cache.main]
    say(f"By length: keys that weigh at least {eps:g}, and how the others grow and weigh")
    print_table(watch_heads(lengths), watch_cells(watches, lengths))
    for paragraph in said_of_lengths(cache):
        print_text(paragraph)
