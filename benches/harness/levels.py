"""Instruction levels of certk_rs: every table has ratios at the best one here and at a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

import certk_rs as ck
from certk_rs import _native

from .verify import CheckFailedError

BEST = ck.simd_level()
# The level that is measured beside the best; amx changes products of bfloat16 alone.
SECOND = {"amx": "avx2", "avx512": "avx2", "avx2": "portable", "neon": "portable"}.get(BEST)


@contextmanager
def level(name: str | None) -> Iterator[None]:
    """The process at a forced level; automatic choice afterwards."""
    _native.set_simd_level(name)
    try:
        yield
    finally:
        _native.set_simd_level(None)


def runs_here(name: str) -> bool:
    """Return True if this CPU and this build have the level."""
    try:
        with level(name):
            return True
    except ck.CertkError:
        return False


def named(name: str, at: str | None = SECOND) -> str:
    """Name an entrant at a level."""
    return f"{name} at {at}"


def beside(works: Mapping[str, Callable[[], Any]], *ours: str) -> dict[str, Callable[[], Any]]:
    """Return works, and those that are ours once more, at the second level."""

    def lower(work: Callable[[], Any]) -> Any:
        with level(SECOND):
            return work()

    found = dict(works)
    for name in ours if SECOND else ():
        found[named(name)] = lambda work=works[name]: lower(work)  # type: ignore[misc]
    return found


def agree(name: str, work: Callable[[], object]) -> None:
    """Raise unless a work proves the same at both levels."""

    def proven(at: str | None) -> NDArray[Any]:
        with level(at):
            result = work()
        return np.asarray(getattr(result, "tail_mass_upper", result))

    if not np.array_equal(proven(None), proven(SECOND)):
        raise CheckFailedError(f"{name} differs between {BEST} and {SECOND}")
