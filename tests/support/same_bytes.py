"""Comparison of results, byte by byte."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


def fields(*results: Any) -> list[bytes]:
    """The bytes of every array in the results."""
    return [
        np.asarray(getattr(result, field.name)).tobytes()
        for result in results
        for field in dataclasses.fields(result)
        if field.name != "shape" and getattr(result, field.name) is not None
    ]


def same(one: Any, two: Any) -> bool:
    """Return True if two Selections hold the same bytes."""
    names = ("k", "indptr", "indices", "tail_mass_upper", "tail_mass_lower", "minimal", "status")
    return all(getattr(one, n).tobytes() == getattr(two, n).tobytes() for n in names)
