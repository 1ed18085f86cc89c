"""Folders of vLLM's ExampleConnector (before 2026 SharedStorageConnector): a file a layer.

A file `model.layers.0.self_attn.attn.safetensors` has one tensor, `kv_cache`, with rows in the
order of the tokens. Backends store (tokens, kv_heads, 2 * head_dim), or in earlier versions
(2, tokens, kv_heads * head_dim) or (tokens, 2, kv_heads, head_dim). The backend of CPUs stores keys
in an order of its own, which nothing in a file tells.
"""

from __future__ import annotations

import re
from typing import Any

from numpy.typing import NDArray

from .._files.layers import DTYPES
from .._files.location import Location
from .._files.reader import Identity
from .._files.safetensors import Form
from .._files.tensor_file import SafetensorsFile
from ..errors import CertkError
from .source import Foreign, Given, by_head

_NUMBER = re.compile(r"(?<![^.])[0-9]{1,9}(?![^.])")


def read(place: Location, given: Given) -> Foreign:
    """Return the sequence of a folder, which is that of one prompt."""
    held = place.children() if place.is_directory() else None
    names = [name for name, below in held or () if not below and name.endswith(".safetensors")]
    if not names:
        raise CertkError(
            f"{place}: has no .safetensors file of a layer: give one of the folders in "
            "shared_storage_path, each of which is of a prompt"
        )
    files: dict[int, Location] = {}
    for name in names:
        numbers = _NUMBER.findall(name.removesuffix(".safetensors"))
        if len(numbers) != 1 or int(numbers[0]) in files:
            raise CertkError(
                f"{place}: {name!r} does not name one layer by a number of its own: remove what is "
                "not a layer"
            )
        files[int(numbers[0])] = place / name
    given.check(place, layers=len(files))
    forms: dict[int, Form] = {}
    order: dict[int, str] = {}
    states: dict[int, Identity] = {}
    for layer in sorted(files):
        with SafetensorsFile(files[layer]) as file:
            forms[layer], order[layer] = _form(file, given)
            states[layer] = file.identity
    lengths = {form[1][1] for form in forms.values()}
    if len(lengths) > 1:
        raise CertkError(
            f"{place}: layers have {min(lengths)} to {max(lengths)} tokens: give one prompt"
        )

    def read_layer(layer: int, role: str) -> NDArray[Any]:
        with SafetensorsFile(files[layer]) as file:
            file.check_unchanged(states[layer])
            rows, which = file.read("kv_cache"), int(role == "value")
        kv_heads, n, d = forms[layer][1]
        if order[layer] == "half":
            rows = rows[..., which * d : (which + 1) * d]
        else:
            rows = rows[which] if order[layer] == "first" else rows[:, which]
        return by_head(rows.reshape(n, -1), kv_heads)

    return Foreign(forms, read_layer, {"source": "vllm", "prompt": place.name})


def _form(file: SafetensorsFile, given: Given) -> tuple[Form, str]:
    """Return the form of the keys of a layer, and where they are beside the values."""
    entry = file.header.entries.get("kv_cache")
    if entry is None or len(file.header.entries) != 1:
        raise CertkError(f"{file.path}: is not one tensor kv_cache: it is not of this connector")
    if entry.dtype not in DTYPES:
        raise CertkError(f"{file.path}: kv_cache is {entry.dtype}: store {', '.join(DTYPES)}")
    shape, where = entry.shape, f"{file.path}: kv_cache {list(entry.shape)}"
    if len(shape) == 4 and shape[1] == 2:
        n, _, kv_heads, d = shape
        given.check(file.path, kv_heads=kv_heads, head_dim=d)
        return (entry.dtype, (kv_heads, n, d)), "second"
    if len(shape) != 3:
        raise CertkError(f"{where} has no place for keys and values: MLA is not taken")
    kv_heads, d = (given.need(file.path, name) for name in ("kv_heads", "head_dim"))
    fits = {
        "half": (shape[0], shape[1:] == (kv_heads, 2 * d)),
        "first": (shape[1], shape[::2] == (2, kv_heads * d)),
    }
    found = [(n, order) for order, (n, fit) in fits.items() if fit]
    if len(found) != 1:
        raise CertkError(
            f"{where} is {'both' if found else 'neither'} (tokens, {kv_heads}, 2 * {d}) "
            f"{'and' if found else 'nor'} (2, tokens, {kv_heads} * {d}): check --kv-heads and "
            "--head-dim"
        )
    [(n, order)] = found
    return (entry.dtype, (kv_heads, n, d)), order
