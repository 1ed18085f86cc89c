"""`certk analyze`: how many keys each head of a cache needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from .._display.page import pyplot
from .._files.atomic import write_text
from ..errors import CertkError
from ..jobs.analyze import CacheAnalysis, analysis_json
from ..jobs.analyze import analyze as analyze_caches
from ..jobs.analyze_page import (
    ADVISED,
    HEADS,
    LAYERS,
    NARROW,
    analysis_page,
    cells,
    layer_cells,
    layer_heads,
)
from ..jobs.effective_watch import shown_lengths, watch_cells, watch_heads
from ..jobs.prefixes import STANDS_FOR
from .options import AsJson, Job, Names, OptionalCaches, Quiet, Threads, need_new
from .score_scale import analyze_model
from .terminal import print_json, print_table, print_text, progress_bar, say


def analyze(
    caches: OptionalCaches = None,
    eps: Annotated[
        list[float] | None,
        typer.Option(help="A budget; may be repeated (the middle one is the main one)."),
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
        int | None, typer.Option(min=1, metavar="N", help="Cut that text after N tokens.")
    ] = None,
    names: Names = None,
    threads: Threads = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Job:
    """Tell how many keys each head of a cache needs, and whether pruning it is worth it.

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
        with progress_bar(quiet) as progress:
            found = analyze_caches(caches, eps or [0.1, 0.01, 0.001], names, progress, threads)
        if html is not None:
            write_text(html, analysis_page(found))
        if as_json:
            print_json({"command": "analyze", "caches": [analysis_json(cache) for cache in found]})
        else:
            _show(found)
            if html is not None:
                say(f"written to {html}")
        return 0

    return job


def _show(found: Sequence[CacheAnalysis]) -> None:
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
        _show_lengths(cache)
        say(f"Advice: {cache.advice()}.")
    print_text(
        "k/n: the keys that each row needs on its own; rule: by its sigma; 1 gap, 8 cuts: these "
        "bounds on it; one set: what all rows of a head need together."
    )
    print_text(f"Advice, {ADVISED}")
    say("Queries that are not in the file are not covered.")


def _show_lengths(cache: CacheAnalysis) -> None:
    """How effective entries go with the length of a row, and what that asks for."""
    watches = [(head.layer, head.watch) for head in cache.heads]
    lengths = shown_lengths([one for _, one in watches])
    eps = cache.eps[cache.main]
    say(f"By length: keys that weigh at least {eps:g}, and how the others grow and weigh")
    print_table(watch_heads(lengths), watch_cells(watches, lengths))
    normal = max(one.smallest_normal for _, one in watches)
    print_text(
        f"k, 1/sum P^2: the power of n that they grow by; weight: exp(-sigma^2/2)/n, a typical "
        f"one at the longest n; small: the share of keys below {normal:.2g}, the smallest normal "
        "number of the cache's dtype; mass: what these weigh in the worst row."
    )
    say(f"With the length of a row: {cache.growth()}.")
    names = [f"{head.layer}.{head.head}" for head in cache.heads if head.watch.more_precision]
    if names:
        print_text(
            f"More precision is due where weights are stored in this dtype: those too small for "
            f"it weigh more than {eps:g} in {len(names)} heads ({', '.join(names[:8])}"
            f"{', ...' if len(names) > 8 else ''})."
        )
    if not cache.causal:
        print_text(STANDS_FOR)
