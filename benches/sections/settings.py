"""Settings of all sections: sizes, the budget, and the entry of `select` in a contest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import certk_rs as ck
from harness import peers
from harness.clock import Bind, Entrant, Times, Work, contest
from harness.levels import SECOND, agree
from harness.rows import Array
from harness.verify import check_selection

EPS = 0.01
SLOW = 1 << 18  # scores for peers of 50 ns per score and more
MIDDLING = 1 << 20  # scores for peers of about 10 ns per score
FLAT, PEAKED = 1.0, 5.0  # sigmas of Gaussian rows that keep nearly all and next to nothing
REST = 0.01  # seconds in which a pool's idle threads stop spinning


@dataclass(frozen=True)
class Settings:
    """`repeat` readings of batches of about `scores` scores; quick runs stop at short rows."""

    wanted: frozenset[str]
    repeat: int = 21
    scores: int = 1 << 21
    longest: int = 1 << 24

    def wants(self, *names: str) -> bool:
        """Return True if any of these sections was asked for."""
        return not self.wanted.isdisjoint(names)

    def lengths(self, *lengths: int) -> list[int]:
        """Those of the lengths that are not too long."""
        return [n for n in lengths if n <= self.longest]

    def contest(self, entrants: Iterable[Entrant], *, threads: int = 1) -> Times:
        """`clock.contest`, with torch on `threads` threads; ours at the second level, too."""
        everybody = list(entrants)
        for entrant in list(everybody):
            theirs = entrant.bind.__module__.startswith("harness.")
            if SECOND and not theirs and entrant.level is None:
                agree(entrant.name, entrant.bind(entrant.rows[: entrant.take]))
                everybody.append(entrant.at(SECOND))
        with peers.torch_threads(threads):
            return contest(everybody, self.repeat, rest=REST if threads > 1 else 0.0)


def ours(threads: int = 1, **options: Any) -> Bind:
    """`select` at EPS on a number of threads, with any of its options."""

    def bind(rows: Array) -> Work:
        return lambda: ck.select(rows, EPS, threads=threads, **options)

    return bind


def checked(scores: Array) -> ck.Selection:
    """The selection of (rows, n) scores, after the oracle has agreed."""
    sel = ck.select(scores, EPS, threads=1)
    check_selection(scores, sel, EPS)
    return sel


def share(sel: ck.Selection, n: int) -> float:
    """Mean k / n."""
    return float(sel.k.mean()) / n
