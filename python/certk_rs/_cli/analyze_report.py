"""What `certk analyze` prints of what it found."""

from __future__ import annotations

from typing import Any

from ..jobs.analysis import Analysis
from ..jobs.analyze import Analyzed
from ..jobs.analyze_cache import CacheAnalysis
from ..jobs.analyze_page import (
    ADVISED,
    HEADS,
    LAYERS,
    NARROW,
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
from ..jobs.prune import Failure
from .terminal import complain, print_table, print_text, say


class Shown:
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


def as_object(found: Analysis) -> dict[str, Any]:
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
