"""The tensors of codes: keys and values of a layer in planes of bytes, and what these leave out.

An index of the library is a file (docs/files.md). Its parts, those of all kv heads in one array,
are tensors of an output, without what follows from the others; docs/files.md describes each.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .layers import Layer
from .safetensors import ITEMSIZE, NAMES, STORAGE, Form, canonical

ROLES = ("key", "value")
_GROUP = 16
_STEP = 4
# The numbers of an index in the order of `key_bounds`. That of values ends before the last, the
# largest loss that gets a code: every value gets one.
_BOUNDS = (0, 1, 2, 3, 5, 6, 4)
_TYPES = STORAGE | {"U32": "<u4", "U64": "<u8"}
# Format of an index file by role and bits, and its version.
_FORMATS = {
    ("key", 8): "certk-key-index",
    ("key", 12): "certk-key-index-of-12-bits",
    ("key", 16): "certk-key-index-of-16-bits",
    ("value", 8): "certk-value-index",
    ("value", 4): "certk-value-index-of-4-bits",
}
_VERSION = 2


def code_forms(layer: Layer, bits: Mapping[str, int], bare: int) -> dict[str, Form]:
    """Return dtype and shape of each tensor of a layer's codes.

    Args:
        layer: The layer.
        bits: Bits of an entry of a "key" and of a "value".
        bare: Keys of all kv heads without a code, whose rows are there.
    """
    heads, n, d = layer.kv_heads, layer.n, layer.d
    groups, width = -(-n // _GROUP), -(-d // _GROUP) * _GROUP
    block = {"key": -(-d // _STEP) * _STEP * _GROUP, "value": width * 2 * bits["value"]}
    triangle: Form = ("F64", (heads, d * (d + 1) // 2))
    forms: dict[str, Form] = {}
    for role in ROLES:
        of_role: dict[str, Form] = {
            "codes": ("U8", (heads, groups, block[role])),
            "scales": ("BF16", (heads, n)),
            "radii": ("BF16", (heads, n)),
            "mean": ("F32", (heads, d)),
            "gram": triangle,
            "bounds": ("F64", (heads, 7 if role == "key" else 6)),
        }
        if role == "value":
            of_role |= {"spread": triangle, "spread_bounds": ("F64", (heads, 2))}
        elif bits["key"] > 8:
            low = ("U8", (heads, n, width * (bits["key"] - 8) // 8))
            of_role |= {"low": low, "low_gram": triangle, "low_bounds": ("F64", (heads, 3))}
        of_role["bare"] = (layer.dtypes[role], (bare, d))
        forms |= {f"{role}_{name}": form for name, form in of_role.items()}
    return forms


def code_tensors(role: str, indexes: Iterable[bytes], layer: Layer) -> dict[str, NDArray[Any]]:
    """Return the tensors of `code_forms` for a role, but for rows.

    Args:
        role: "key" or "value".
        indexes: Of each kv head the index, as a file.
        layer: The layer.
    """
    d = layer.d
    upper = np.triu_indices(d)
    every: dict[str, list[NDArray[Any]]] = {}
    for index in indexes:
        parts = _parts(index)
        width = len(parts["mean"])
        numbers = list(_BOUNDS if role == "key" else _BOUNDS[:-1])
        of_head = {
            "codes": parts["codes"].reshape(-(-layer.n // _GROUP), -1),
            "scales": parts["scales"][: layer.n],
            "radii": parts["radii"][: layer.n],
            "mean": parts["mean"][:d],
            "bounds": parts["numbers"][numbers],
        }
        for name in ("gram", "spread", "low_gram"):
            if name in parts:
                of_head[name] = parts[name].reshape(width, width)[upper]
        if "spread" in parts:
            of_head["spread_bounds"] = parts["spread_numbers"]
        if "low" in parts:
            places = len(parts["scales"])
            low = parts["low"].reshape(places, -1)[: layer.n].copy()
            # Where no key of many has a code, an index has zeros instead.
            low[of_head["scales"] == 0] = 0x80 if low.shape[1] == width else 0x88
            of_head["low"] = low
            of_head["low_bounds"] = parts["low_numbers"]
        for name, array in of_head.items():
            every.setdefault(f"{role}_{name}", []).append(array)
    return {name: np.stack(arrays) for name, arrays in every.items()}


def index_file(
    role: str, bits: int, tensors: Mapping[str, NDArray[Any]], layer: Layer
) -> NDArray[np.uint8]:
    """Return the index (1, kv_heads, n, d) as a file that tensors of `code_tensors` are of.

    It does not know its keys, so that it cannot be checked against any.
    """
    n, d = layer.n, layer.d
    places, width = -(-n // _GROUP) * _GROUP, -(-d // _GROUP) * _GROUP
    upper = np.triu_indices(d)
    parts: dict[str, tuple[str, NDArray[Any]]] = {}

    def square(packed: NDArray[Any]) -> NDArray[Any]:
        whole = np.zeros((width, width))
        whole[upper] = packed
        return whole.reshape(-1)

    for head in range(layer.kv_heads):
        given = {
            name.removeprefix(f"{role}_"): array[head]
            for name, array in tensors.items()
            if name.startswith(f"{role}_") and name != f"{role}_bare"
        }
        numbers = np.full(7, np.inf)
        numbers[list(_BOUNDS[: len(given["bounds"])])] = given["bounds"]
        of_head = {
            "bare": ("U32", np.flatnonzero(given["scales"] == 0)),
            "codes": ("U8", given["codes"].reshape(-1)),
            "fingerprint": ("U64", np.zeros(2)),
            "gram": ("F64", square(given["gram"])),
            "mean": ("F32", _padded(given["mean"], width)),
            "numbers": ("F64", numbers),
            "radii": ("BF16", _padded(given["radii"], places)),
            "scales": ("BF16", _padded(given["scales"], places)),
        }
        if "spread" in given:
            of_head["spread"] = "F64", square(given["spread"])
            of_head["spread_numbers"] = "F64", given["spread_bounds"]
        if "low" in given:
            of_head["low"] = "U8", _padded(given["low"], places).reshape(-1)
            of_head["low_gram"] = "F64", square(given["low_gram"])
            of_head["low_numbers"] = "F64", given["low_bounds"]
        parts |= {f"{head}.{name}": part for name, part in of_head.items()}
    forms: dict[str, Form] = {name: (dtype, array.shape) for name, (dtype, array) in parts.items()}
    about = {
        "format": _FORMATS[role, bits],
        "version": _VERSION,
        "shape": [1, layer.kv_heads, n, d],
        "dtype": NAMES[layer.dtypes[role]],
        "sha256": "0" * 64,
    }
    unsigned = canonical(forms, {"certk": json.dumps(about)})
    data = [
        np.ascontiguousarray(parts[name][1], _TYPES[parts[name][0]]).view(np.uint8)
        for name in unsigned.entries
    ]
    digest = hashlib.sha256(unsigned.raw)
    for array in data:
        digest.update(array.data)
    about["sha256"] = digest.hexdigest()
    signed = canonical(forms, {"certk": json.dumps(about)})
    return np.concatenate([np.frombuffer(signed.raw, np.uint8), *data])


def code_bytes(layer: Layer, bits: Mapping[str, int]) -> int:
    """Return the bytes of a layer's codes if every key has one."""
    forms = code_forms(layer, bits, 0).values()
    return sum(ITEMSIZE[dtype] * int(np.prod(shape)) for dtype, shape in forms)


def _parts(index: bytes) -> dict[str, NDArray[Any]]:
    """Return the parts of an index of one head, by name."""
    start = 8 + int.from_bytes(index[:8], "little")
    parts = {}
    for name, entry in json.loads(index[8:start]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            dtype = np.dtype(_TYPES[entry["dtype"]])
            count = (end - begin) // dtype.itemsize
            array = np.frombuffer(index, dtype, count, start + begin)
            parts[name.removeprefix("0.")] = array
    return parts


def _padded(array: NDArray[Any], length: int) -> NDArray[Any]:
    whole = np.zeros((length, *array.shape[1:]), array.dtype)
    whole[: len(array)] = array
    return whole
