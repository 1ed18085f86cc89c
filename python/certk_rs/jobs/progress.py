"""How a job tells how far it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[str, int, int], None]
"""Told (what is being done, done so far, total); totals are bytes or steps, and may grow."""


def counting(progress: Progress | None, total: int) -> Callable[[str, int], None]:
    """What is called with every piece that is done: its label, and how much of the total it is."""
    done = 0

    def tell(label: str, count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(label, done, total)

    return tell
