"""Saved key indices: a safetensors file in the canonical form, with its own SHA-256."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CertkError
from .atomic import NewFile
from .safetensors import (
    Form,
    Header,
    are_sizes,
    byte_size,
    canonical,
    parse_json,
    quote,
)
from .tensor_file import SafetensorsFile

_FORMAT = "certk-key-index"
_VERSION = 2
_NO_SHA256 = "0" * 64
# Of each head, in the order of `_native.KeyIndex.parts`: its name, dtypes in the file and here.
PARTS = (
    ("codes", "U8", "<u1"),
    ("scales", "BF16", "<u2"),
    ("radii", "BF16", "<u2"),
    ("bare", "U32", "<u4"),
    ("mean", "F32", "<f4"),
    ("gram", "F64", "<f8"),
    ("numbers", "F64", "<f8"),
    ("fingerprint", "U64", "<u8"),
)

Shape = tuple[int, ...]
Head = tuple[NDArray[Any], ...]


def write_index(path: Path, shape: Shape, dtype: str, heads: Iterable[Sequence[object]]) -> None:
    """Write the parts of every head, over what was there."""
    tensors: dict[str, NDArray[Any]] = {}
    dtypes: dict[str, Form] = {}
    for head, parts in enumerate(heads):
        for (name, stored, here), part in zip(PARTS, parts, strict=True):
            array = np.asarray(part).astype(here, copy=False)
            tensors[f"{head}.{name}"] = array
            dtypes[f"{head}.{name}"] = (stored, array.shape)
    unsigned = _header(dtypes, shape, dtype, _NO_SHA256)
    digest = hashlib.sha256(unsigned.raw)
    for name in unsigned.entries:
        digest.update(_bytes(tensors[name]))
    header = _header(dtypes, shape, dtype, digest.hexdigest())
    with NewFile(path, replace=True) as file:
        file.write_at(0, header.raw)
        for name, entry in header.entries.items():
            file.write_at(len(header.raw) + entry.start, _bytes(tensors[name]))
        file.commit()


def read_index(path: Path) -> tuple[Shape, str, list[Head]]:
    """Read what `write_index` wrote: shape and dtype of the keys, and the parts of every head.

    Raises:
        CertkError: The file is cut off, damaged or no index.
        OSError: The file cannot be read.
    """
    with SafetensorsFile(path) as file:
        shape, dtype, sha256 = _about(file)
        entries = file.header.entries
        forms = file.header.forms
        if file.header.raw != _header(forms, shape, dtype, sha256).raw:
            raise _damaged(path, "its header is not one that save writes")
        digest = hashlib.sha256(_header(forms, shape, dtype, _NO_SHA256).raw)
        read: dict[str, NDArray[Any]] = {}
        for name in entries:
            read[name] = file.raw(name)
            digest.update(read[name].data)
        if digest.hexdigest() != sha256:
            raise _damaged(path, "it does not have the SHA-256 that it states")
        heads = []
        for head in range(prod(shape[:-2])):
            parts: list[NDArray[Any]] = []
            for name, stored, here in PARTS:
                part = entries.get(f"{head}.{name}")
                if part is None or part.dtype != stored or len(part.shape) != 1:
                    raise _damaged(path, f"tensor {head}.{name} is missing or another")
                parts.append(read.pop(part.name).view(here))
            heads.append(tuple(parts))
        if read:
            raise _damaged(path, f"tensor {quote(min(read))} is not part of an index")
    return shape, dtype, heads


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).data


def _header(tensors: Mapping[str, Form], shape: Shape, dtype: str, sha256: str) -> Header:
    """Return the header of an index; `sha256` is that of the file with 64 zeros in its place."""
    about = {"format": _FORMAT, "version": _VERSION, "shape": shape, "dtype": dtype}
    return canonical(tensors, {"certk": json.dumps(about | {"sha256": sha256})})


def _damaged(path: object, problem: str) -> CertkError:
    return CertkError(
        f"{path} is no index that can be used: {problem}; build the index again and save it"
    )


def _about(file: SafetensorsFile) -> tuple[Shape, str, str]:
    """Return the shape and dtype of the keys, and the SHA-256 that the file states."""
    text = file.header.metadata.get("certk", "")
    try:
        about = parse_json(text)
        if not isinstance(about, dict) or about.get("format") != _FORMAT:
            raise ValueError
    except (ValueError, RecursionError):
        raise _damaged(file.path, "its metadata do not say that it is one") from None
    version = about.get("version")
    if type(version) is not int or version != _VERSION:
        raise _damaged(
            file.path, f"it has format version {quote(version)}, and {_VERSION} is what this reads"
        )
    shape: Any = about.get("shape")
    dtype, sha256 = about.get("dtype"), about.get("sha256")
    if (
        not are_sizes(shape)
        or len(shape) < 2
        or byte_size(4, shape) is None
        or dtype not in ("float32", "float16", "bfloat16")
        or not isinstance(sha256, str)
    ):
        raise _damaged(file.path, "its metadata are incomplete or of no keys")
    return tuple(shape), dtype, sha256
