"""The text of `certk analyze`: whether to prune, one table, and with -v the rest."""

from __future__ import annotations

from .._jobs.analyze import Analysis, Analyzed, CacheAnalysis
from .._jobs.analyze_page import (
    ADVISED,
    NOT_COVERED,
    by_head,
    by_layer,
    said_of,
    said_of_all,
    said_of_heads,
    said_of_later,
    said_of_layers,
    said_of_together,
    together,
)
from .._jobs.results import Failure
from .terminal import complain, print_table, print_text, say

_ELSEWHERE = "--json, --html"


class Shown:
    """Prints what was found: of several files each as soon as it is known, and all at the end."""

    def __init__(self, as_json: bool, verbose: bool, several: bool) -> None:
        self._as_json, self._verbose, self._several = as_json, verbose, several

    def tell(self, outcome: Analyzed) -> None:
        """Print the line of one file of several."""
        if isinstance(outcome, Failure):
            complain(f"error: {outcome.message}")
        elif self._several and not self._as_json:
            say(said_of(outcome))

    def all(self, found: Analysis) -> None:
        """Print the table of the one file, or of all together; if asked for, those of each."""
        if self._several:
            say(said_of_all(found))
            _show_together(found, by_head=False)
        else:
            for cache in found.caches:
                say(said_of(cache))
                _show_later(cache)
                _show_layers(cache)
        if self._verbose:
            if self._several:
                _show_together(found, by_head=True)
            for cache in found.caches:
                if self._several:
                    say(said_of(cache))
                    _show_later(cache)
                    _show_layers(cache)
                _show_more(cache)
            print_text(f"Advice, {ADVISED}")
        print_text(NOT_COVERED + ("" if self._verbose else " More: -v, or --html FILE."))


def _show_together(found: Analysis, by_head: bool) -> None:
    """Show what every layer, or every head, needs in all files."""
    if found.aggregate().all is None:
        return
    say(f"All files, by {'layer.head' if by_head else 'layer'}:")
    heads, rows = together(found.aggregate(), by_head)
    # First the file and the advice, which may be long, then all but the worst.
    going = ("advice", "in", "10 %", "50 %", "90 %", "k/n")
    drop = [heads.index(name) for name in going if name in heads]
    print_table(heads, rows, drop=drop, elsewhere=_ELSEWHERE)
    if not by_head:
        print_text(said_of_together(found))


def _show_later(cache: CacheAnalysis) -> None:
    for sentence in said_of_later(cache):
        print_text(sentence)


def _show_layers(cache: CacheAnalysis) -> None:
    heads, rows = by_layer(cache)
    print_table(heads, rows, elsewhere=_ELSEWHERE)
    print_text(said_of_layers(cache))


def _show_more(cache: CacheAnalysis) -> None:
    """Show each head."""
    say("By layer.head:")
    heads, rows = by_head(cache)
    going = ("1/sum P^2", "effective", "8 cuts", "1 gap", "rule", "at least")
    drop = [heads.index(name) for name in going if name in heads]
    print_table(heads, rows, drop=drop, elsewhere=_ELSEWHERE)
    print_text(said_of_heads(cache))
