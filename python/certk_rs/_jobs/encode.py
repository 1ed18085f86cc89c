"""Codes of the keys and values of a layer, as tensors of an output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _native
from .._files.cache import Cache
from .._files.certificate import Options
from .._files.codes import ROLES, code_tensors
from .._files.layers import Layer
from ..errors import CertkError
from ..key_index import written
from .choose import as_native


def bare_keys(cache: Cache, layer: Layer, options: Options) -> int:
    """Return the number of keys of a layer that get no code."""
    heads = (_of_keys(rows, layer, options) for rows in cache.by_head(layer, "key"))
    return sum(len(index.uncoded()[0]) for index in heads)


def encoded(
    cache: Cache, layer: Layer, options: Options, count: int
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield name and array of the tensors of `code_forms` for a layer with so many `bare_keys`.

    Memory holds its codes, and keys and values of one kv head.
    """
    files: dict[str, list[bytes]] = {role: [] for role in ROLES}
    bare: dict[str, list[NDArray[Any]]] = {role: [] for role in ROLES}
    keys, values = (cache.by_head(layer, role) for role in ROLES)
    for key, value in zip(keys, values, strict=True):
        index = _of_keys(key, layer, options)
        native = as_native(np.ascontiguousarray(value), layer.dtypes["value"])
        of_values = _native.ValueIndex.build(native, options.bits["value"], 1)
        files["key"].append(written(index).tobytes())
        files["value"].append(written(of_values).tobytes())
        [without] = index.uncoded()
        bare["key"].append(key[without])
        bare["value"].append(value[without])
    if sum(map(len, bare["key"])) != count:
        raise cache.file.changed()
    for role in ROLES:
        tensors = code_tensors(role, files.pop(role), layer)
        if role == "value" and not tensors["value_scales"].all():
            raise CertkError(
                f"layer {layer.index}: a value is beyond what codes can stand for: take rest "
                "file, or drop"
            )
        tensors[f"{role}_bare"] = np.concatenate(bare[role])
        for name, array in tensors.items():
            yield f"layers.{layer.index}.{name}", array


def _of_keys(rows: NDArray[Any], layer: Layer, options: Options) -> _native.KeyIndex:
    native = as_native(np.ascontiguousarray(rows), layer.dtypes["key"])
    return _native.KeyIndex.build(native, options.bits["key"], None, 1)
