"""`certk analyze`: the keys that each head of a cache needs."""

from __future__ import annotations

from pathlib import Path

from ..errors import CertkError
from .options import Option, need_new
from .score_scale import analyze_model
from .terminal import print_json, progress_bar, say

OPTIONS = {
    "eps": Option(
        metavar="EPS", help="A budget; may be repeated (the middle one is the main one)."
    ),
    "html": Option(metavar="FILE", help="Write one self-contained page with plots."),
    "model": Option(metavar="DIR", help="Instead of caches: the weights of a saved model."),
    "text": Option(metavar="FILE", help="The text that the model reads; default: a few lines."),
    "max_tokens": Option(metavar="N", min=1, help="Cut that text after N tokens."),
    "verbose": Option("--verbose", "-v", help="Print more tables."),
}


def analyze(
    caches: list[str] | None = None,
    eps: list[float] | None = None,
    html: Path | None = None,
    model: Path | None = None,
    text: Path | None = None,
    max_tokens: int | None = None,
    names: str | None = None,
    layout: str | None = None,
    recursive: bool = False,
    fail_fast: bool = False,
    threads: int | None = None,
    as_json: bool = False,
    quiet: bool = False,
    verbose: bool = False,
) -> int:
    """Tell whether pruning caches is worth it, and what heads need.

    A sentence says it, a table has what every layer needs; with -v also what every head does.
    Of several files each is told of as it is done, and then all together. One bad
    file does not stop the others.

    With --model: how widely each head's scores spread, beside R of its weights.
    """
    from .._display.page import pyplot
    from .._files.new_file import write_text
    from .._jobs.analyze import EPS, analyze_sources
    from .._jobs.analyze_page import analysis_page
    from .._jobs.inputs import expand
    from .analyze_report import Shown

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
    sources = expand(caches, recursive, same_names=True)
    shown = Shown(as_json, verbose, len(sources) > 1)
    with progress_bar(quiet) as progress:
        found = analyze_sources(
            sources, eps or EPS, names, layout, fail_fast, threads, shown.tell, progress
        )
    if html is not None:
        write_text(html, analysis_page(found))
    if as_json:
        print_json(found.to_json())
    else:
        shown.all(found)
        if html is not None:
            say(f"written to {html}")
    return 1 if found.failures else 0
