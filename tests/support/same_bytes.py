"""Comparison of results, byte by byte."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


def bits(answer: Any) -> Any:
    """Return an answer with bytes in place of its numbers, to be compared with another."""
    if isinstance(answer, type):
        return answer
    if dataclasses.is_dataclass(answer):
        return [bits(getattr(answer, field.name)) for field in dataclasses.fields(answer)]
    if isinstance(answer, tuple | list):
        return [bits(part) for part in answer]
    if hasattr(answer, "untyped_storage"):  # a tensor, of bfloat16 too
        return [answer.dtype, *answer.shape, bytes(answer.detach().clone().untyped_storage())]
    if isinstance(answer, np.ndarray | np.generic | float):
        array = np.asarray(answer)
        return [array.dtype, *array.shape, array.tobytes()]
    return answer


def same(one: Any, two: Any) -> bool:
    """Return True if two results hold the same bytes in every field."""
    return bool(bits(one) == bits(two))


def fields(*results: Any) -> list[bytes]:
    """Return the bytes of results, to be joined or hashed."""
    return [repr(bits(result)).encode() for result in results]
