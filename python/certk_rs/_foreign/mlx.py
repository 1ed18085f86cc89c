"""Prompt caches of mlx-lm, as `save_prompt_cache` writes them, read and written.

A safetensors file with `{layer}.0` for keys and `{layer}.1` for values, (1, kv_heads, room, d). The
classes of the layers are in the metadata. From mlx-lm 0.32 on there is room behind the tokens, and
`{layer}.2` counts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._files.cache import Cache
from .._files.layers import DTYPES
from .._files.location import Location
from .._files.new_file import new_file
from .._files.safetensors import Form, canonical
from .._files.tensor_file import SafetensorsFile
from ..errors import CertkError
from .source import Foreign, Given

_TAKEN = ("KVCache", "ConcatenateKVCache")
_ROLES = ("key", "value")
_MOST_LAYERS = 1 << 16


def read(place: Location, given: Given) -> Foreign:
    """Return the sequence of a prompt cache."""
    with SafetensorsFile(place) as file:
        about, identity = file.header.metadata, file.identity
        # Files of earlier versions have their own metadata second, and the classes last.
        old = about.get("2.0", "") != ""
        classes = _listed(about, "2." if old else "1.")
        if not classes:
            raise CertkError(
                f"{place}: its metadata names no classes of layers: it is not what "
                "mlx_lm's save_prompt_cache writes"
            )
        for layer, name in enumerate(classes):
            if name not in _TAKEN:
                raise CertkError(
                    f"{place}: layer {layer} is a {name}, and {' or '.join(_TAKEN)} is taken: save "
                    "the cache without quantisation and without --max-kv-size"
                )
        forms = {layer: _form(file, layer) for layer in range(len(classes))}
    for kv_heads, _, d in (shape for _, shape in forms.values()):
        given.check(place, layers=len(classes), kv_heads=kv_heads, head_dim=d)

    def read_layer(layer: int, role: str) -> NDArray[Any]:
        with SafetensorsFile(place) as file:
            file.check_unchanged(identity)
            rows = slice(0, forms[layer][1][1])
            return file.read_heads(f"{layer}.{int(role == 'value')}", rows=rows)

    own = "1." if old else "0."
    said = {f"mlx.{key.removeprefix(own)}": v for key, v in about.items() if key.startswith(own)}
    return Foreign(forms, read_layer, {"source": "mlx", **said})


def _listed(about: Mapping[str, str], stem: str) -> list[str]:
    found: list[str] = []
    while (name := about.get(f"{stem}{len(found)}")) is not None and len(found) < _MOST_LAYERS:
        found.append(name)
    return found


def _form(file: SafetensorsFile, layer: int) -> Form:
    """Return dtype and shape of the tokens of a layer."""
    entries = file.header.entries
    pair = [entries.get(f"{layer}.{k}") for k in range(2)]
    key, value = pair
    if key is None or value is None:
        raise CertkError(f"{file.path}: layer {layer} has no keys: save a cache that holds tokens")
    if (key.dtype, key.shape) != (value.dtype, value.shape) or key.dtype not in DTYPES:
        raise CertkError(
            f"{file.path}: layer {layer}: keys {key.dtype} {list(key.shape)} and values "
            f"{value.dtype} {list(value.shape)}: they must be alike, in {', '.join(DTYPES)}"
        )
    if len(key.shape) != 4 or key.shape[0] != 1 or 0 in key.shape:
        raise CertkError(
            f"{file.path}: layer {layer}: keys {list(key.shape)} are not (1, kv_heads, tokens, d): "
            "save one sequence a file"
        )
    _, kv_heads, n, d = key.shape
    count = entries.get(f"{layer}.2")
    if count is not None:
        if count.dtype not in ("I32", "I64") or count.shape not in ((), (1,)):
            raise CertkError(f"{file.path}: {layer}.2 is not a count of tokens: save it again")
        tokens = int(file.read(count.name).reshape(()))
        if not 1 <= tokens <= n:
            raise CertkError(
                f"{file.path}: layer {layer} has {tokens} tokens in room for {n}: the file is "
                "damaged; save it again"
            )
        n = tokens
    return key.dtype, (kv_heads, n, d)


def write(cache: Cache, out: Location) -> None:
    """Write all keys and values of a cache as a prompt cache; memory holds one tensor.

    Raises:
        CertkError: Layers are missing or differ in their keys, or the output is there.
    """
    layers = cache.layers
    if [layer.index for layer in layers] != list(range(len(layers))):
        raise CertkError(
            f"{cache.path}: its layers are not 0 to {len(layers) - 1}: give a whole cache"
        )
    lengths = sorted({layer.n for layer in layers})
    if len(lengths) > 1:
        raise CertkError(
            f"{cache.path}: layers have {lengths[0]} to {lengths[-1]} keys: mlx-lm has one length"
        )
    tensors: dict[str, Form] = {}
    about = {"0.source": "certk", "2.0": ""}
    for layer in layers:
        shape = (1, layer.kv_heads, layer.n, layer.d)
        i = layer.index
        tensors |= {f"{i}.{k}": (layer.dtypes[role], shape) for k, role in enumerate(_ROLES)}
        tensors[f"{i}.2"] = ("I32", ())
        # The third is a number and no array, which the file has to say.
        about |= {f"1.{i}": "KVCache", f"2.{i + 1}.0": f"{i}.2", f"2.{i + 1}.1": "scalar"}
    header = canonical(tensors, about)
    with new_file(out) as file:
        file.write_at(0, header.raw)

        def put(name: str, array: NDArray[Any]) -> None:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            file.write_at(len(header.raw) + header.entries[name].start, data)

        for layer in layers:
            for k, role in enumerate(_ROLES):
                put(f"{layer.index}.{k}", cache.read(layer, role))
            put(f"{layer.index}.2", np.array([layer.n], "<i4"))
        cache.file.check_unchanged(cache.file.identity)
        file.commit()
