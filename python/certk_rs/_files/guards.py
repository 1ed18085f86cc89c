"""The tensors of a guard: bounds on the dropped keys and values of a layer.

A guard has, for every kv head, codes of the dropped keys with bounds on their errors, and a ball
around the dropped values; docs/files.md describes each tensor. This module lays them out, one kv
head behind the other, and splits them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .layers import Layer
from .safetensors import Form

# Codes are stored in groups of 16 keys, four entries of each in a line.
_GROUP = 16
_STEP = 4
# The numbers of a saved index that `bounds` has, in order. The missing one, the largest loss that
# gets a code, is not used in a guard.
_BOUNDS = (0, 1, 2, 3, 5, 6)


@dataclass(frozen=True, eq=False)
class GuardedHead:
    """The guard of the `count` dropped keys and values of one kv head.

    Attributes:
        count: The number of dropped keys.
        parts: The parts of a saved index of these keys (`_native.KeyIndex.parts`).
        ball: The centre and the radius of a ball around the values, (d + 1,).
    """

    count: int
    parts: tuple[NDArray[Any], ...]
    ball: NDArray[np.float64]


def guard_forms(layer: Layer, dropped: int, codes: int) -> dict[str, Form]:
    """Return dtype and shape of each tensor of a layer's guard.

    Args:
        layer: The layer.
        dropped: Dropped keys of all kv heads.
        codes: Bytes of all codes.
    """
    heads, d = layer.kv_heads, layer.d
    return {
        "guard_codes": ("U8", (codes,)),
        "guard_scales": ("BF16", (dropped,)),
        "guard_radii": ("BF16", (dropped,)),
        "guard_mean": ("F32", (heads, d)),
        "guard_gram": ("F64", (heads, d * (d + 1) // 2)),
        "guard_bounds": ("F64", (heads, len(_BOUNDS))),
        "guard_ball": ("F64", (heads, d + 1)),
    }


def guarded_bytes(count: int, d: int) -> int:
    """Return the bytes of the codes of `count` keys of d entries."""
    return -(-count // _GROUP) * _GROUP * -(-d // _STEP) * _STEP


def guard_tensors(heads: Sequence[GuardedHead], d: int) -> dict[str, NDArray[Any]]:
    """Lay out the tensors of `guard_forms`, by name."""
    upper = np.triu_indices(d)
    every: dict[str, list[NDArray[Any]]] = {}
    for head in heads:
        codes, scales, radii, _, mean, gram, numbers, _ = head.parts
        width = len(mean)
        of_head = {
            "codes": codes,
            "scales": scales[: head.count],
            "radii": radii[: head.count],
            "mean": mean[:d],
            "gram": gram.reshape(width, width)[upper],
            "bounds": numbers[list(_BOUNDS)],
            "ball": head.ball,
        }
        for name, array in of_head.items():
            every.setdefault(name, []).append(array)
    flat = {name: np.concatenate(every[name]) for name in ("codes", "scales", "radii")}
    whole = {name: np.stack(every[name]) for name in ("mean", "gram", "bounds", "ball")}
    return {f"guard_{name}": array for name, array in (flat | whole).items()}


def guarded_heads(
    tensors: dict[str, NDArray[Any]], counts: Sequence[int], d: int
) -> list[GuardedHead]:
    """Split the tensors of `guard_tensors` by kv heads that have dropped so many keys each.

    Raises:
        ValueError: The tensors are not laid out for these.
    """

    def split(name: str, lengths: Sequence[int]) -> list[NDArray[Any]]:
        array = tensors[f"guard_{name}"]
        if len(array) != sum(lengths):
            raise ValueError(f"guard_{name} has {len(array)} entries, not {sum(lengths)}")
        return np.split(array, np.cumsum(lengths)[:-1])

    codes = split("codes", [guarded_bytes(count, d) for count in counts])
    scales, radii = split("scales", counts), split("radii", counts)
    width = -(-d // _GROUP) * _GROUP
    upper = np.triu_indices(d)
    heads = []
    for head, count in enumerate(counts):
        places = -(-count // _GROUP) * _GROUP
        gram, mean = np.zeros((width, width)), np.zeros(width, np.float32)
        gram[upper] = tensors["guard_gram"][head]
        mean[:d] = tensors["guard_mean"][head]
        numbers = np.ones(len(_BOUNDS) + 1)
        numbers[list(_BOUNDS)] = tensors["guard_bounds"][head]
        parts = (
            codes[head],
            _padded(scales[head], places),
            _padded(radii[head], places),
            np.flatnonzero(scales[head] == 0).astype(np.uint32),  # those without a code
            mean,
            gram.reshape(-1),
            numbers,
            np.zeros(2, np.uint64),
        )
        heads.append(GuardedHead(count, parts, tensors["guard_ball"][head]))
    return heads


def _padded(bits: NDArray[np.uint16], places: int) -> NDArray[np.uint16]:
    padded = np.zeros(places, np.uint16)
    padded[: len(bits)] = bits
    return padded
