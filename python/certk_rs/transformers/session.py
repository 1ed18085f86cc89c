"""Caches on disk: keys, values, codes and balls in one safetensors file.

Rows come first, those of each layer and head in whole pages, in the form of `paired_rows`, so that
they can be mapped as they are. The parts of an index lie behind them, stacked over the heads, with
codes of the values as a `KvIndex` writes them, and then the balls. What is not rows has a SHA-256
in the header; so has each layer's rows.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .. import _native
from .._files.atomic import NewFile
from .._files.safetensors import (
    ITEMSIZE,
    Entry,
    are_sizes,
    parse_json,
    quote,
    written,
)
from .._files.scratch import open_to_map
from .._files.tensor_file import SafetensorsFile
from ..errors import CertkError
from ..key_index import PARTS, KeyIndex
from ..kv_index import KvIndex, _values_of_file
from ..sparse_attention import ValueBall, ball_of_parts
from .indexed_layer import IndexedLayer
from .layers_of_config import How
from .paired_rows import PAGE, STRETCH, Form, PairedRows, Piece, bytes_of

_FORMAT = "certk-session"
_VERSION = 1
# Systems with larger pages read what others map.
_ALIGNED = 1 << 14
_NO_SHA256 = "0" * 64
_NAMES = {
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
# What the parts of an index and balls are stored as, and are here.
_HERE = {stored: here for _, stored, here in PARTS}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class _Layer:
    """The header's entry of a layer."""

    keys: int
    form: Form
    room: int
    """Rows of each head in the file; those behind the keys are zeros."""
    built: int
    """Of how many keys the index was built; 0 without one."""
    ball: bool
    sha256: str = _NO_SHA256

    def said(self) -> dict[str, Any]:
        return {
            "keys": self.keys,
            "d": self.form.key,
            "d_v": self.form.value,
            "built": self.built,
            "ball": self.ball,
            "sha256": self.sha256,
        }


def write_session(path: Path, layers: list[IndexedLayer]) -> None:
    """Write a cache over what was there, whole or not at all."""
    for layer in layers:
        layer.check()
    about: list[_Layer | None] = []
    parts: dict[str, NDArray[Any]] = {}
    dtypes: dict[str, str] = {}
    for at, layer in enumerate(layers):
        about.append(_about(layer))
        if layer.index is not None:
            for (name, dtype, _), array in zip(PARTS, layer.index.arrays(), strict=True):
                parts[f"{at}.index.{name}"], dtypes[f"{at}.index.{name}"] = _rows(array), dtype
        if isinstance(layer.index, KvIndex):
            parts[f"{at}.values"], dtypes[f"{at}.values"] = layer.index._file_of_values(), "U8"
        if layer.ball is not None:
            _, heads = layer.ball._native.parts()
            parts[f"{at}.ball"], dtypes[f"{at}.ball"] = np.stack(heads), "F64"
    with NewFile(path, replace=True) as file:
        raw, entries = _header(about, parts, dtypes, _NO_SHA256)
        for at, (layer, told) in enumerate(zip(layers, about, strict=True)):
            if told is not None:
                digest, start = hashlib.sha256(), len(raw) + entries[f"{at}.rows"].start
                for piece in _pieces_of(layer, told):
                    file.write_at(start, piece)
                    digest.update(piece)
                    start += len(piece)
                about[at] = replace(told, sha256=digest.hexdigest())
                layer.let_go()
        unsigned, _ = _header(about, parts, dtypes, _NO_SHA256)
        signed = hashlib.sha256(unsigned)
        for name, array in parts.items():
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            file.write_at(len(raw) + entries[name].start, data)
            signed.update(data)
        header, _ = _header(about, parts, dtypes, signed.hexdigest())
        assert len(header) == len(raw)
        file.write_at(0, header)
        file.commit()


def read_session(path: Path, how: How, check: bool) -> list[IndexedLayer]:
    """Read what `write_session` wrote; with a directory rows are mapped where they are.

    Raises:
        CertkError: The file is cut off, damaged or another.
        OSError: The file cannot be read.
    """
    reserve, _, directory, _ = how
    with SafetensorsFile(path) as file:
        about, sha256 = _told(file)
        parts: dict[str, NDArray[Any]] = {}
        dtypes: dict[str, str] = {}
        for name, entry in file.header.entries.items():
            if not name.endswith(".rows"):
                if entry.dtype not in _HERE:
                    raise _damaged(file, f"tensor {quote(name)} is not part of a session")
                raw = file.raw(name).view(_HERE[entry.dtype])
                parts[name], dtypes[name] = raw.reshape(entry.shape), entry.dtype
        unsigned, _ = _header(about, parts, dtypes, _NO_SHA256)
        signed, _ = _header(about, parts, dtypes, sha256)
        digest = hashlib.sha256(unsigned)
        for array in parts.values():
            digest.update(array.reshape(-1).view(np.uint8).data)
        if file.header.raw != signed or digest.hexdigest() != sha256:
            raise _damaged(file, "it does not have the SHA-256 that it states")
        mapped = None
        if directory is not None:
            mapped = open_to_map(path)
            if mapped.identity != file.identity:
                raise _damaged(file, "it was replaced while it was read")
        layers = []
        for at, told in enumerate(about):
            layer = IndexedLayer(*how)
            layers.append(layer)
            if told is None:
                continue
            entry = file.header.entries[f"{at}.rows"]
            if check:
                _check(file, entry, told.sha256, at)
            index = _index(file, at, told, parts)
            ball = _ball(file, at, told, parts)
            form, step = told.form, told.room * told.form.row
            offset = len(file.header.raw) + entry.start
            if directory is not None and mapped is not None and step % PAGE == offset % PAGE == 0:
                rows = PairedRows(directory, reserve, form, [Piece(mapped, offset, step, step)])
                layer.restore(rows.shown(told.keys), index, ball, told.built, rows)
            elif directory is not None:
                rows = PairedRows(directory, max(reserve, told.keys), form)
                for start, keys, values in _stretches(file, entry, told):
                    rows.append(start, keys, values)
                layer.restore(rows.shown(told.keys), index, ball, told.built, rows)
            else:
                shape = (form.batch, form.heads, told.keys)
                both = tuple(
                    torch.empty((*shape, d), dtype=form.dtype) for d in (form.key, form.value)
                )
                for start, *some in _stretches(file, entry, told):
                    for whole, part in zip(both, some, strict=True):
                        whole[:, :, start : start + part.shape[2]] = part
                layer.restore((both[0], both[1]), index, ball, told.built, None)
        if file.current_identity() != file.identity:
            raise _damaged(file, "it was written to while it was read")
        return layers


def _about(layer: IndexedLayer) -> _Layer | None:
    if layer.keys is None or layer.keys.ndim != 4:
        return None
    form = Form.of(layer.keys, layer.values)
    n = layer.keys.shape[2]
    whole = _ALIGNED // math.gcd(form.row, _ALIGNED)
    room = -(-n // whole) * whole
    return _Layer(n, form, room, 0 if layer.index is None else layer.built, layer.ball is not None)


def _header(
    layers: list[_Layer | None],
    parts: Mapping[str, NDArray[Any]],
    dtypes: Mapping[str, str],
    sha256: str,
) -> tuple[bytes, dict[str, Entry]]:
    """Make the header of a session; the SHA-256 is that of all but rows, with 64 zeros for it."""
    entries: dict[str, Entry] = {}
    stop = 0

    def add(name: str, dtype: str, shape: tuple[int, ...]) -> None:
        nonlocal stop
        start, stop = stop, stop + math.prod(shape) * ITEMSIZE[dtype]
        entries[name] = Entry(name, dtype, shape, start, stop)

    for at, layer in enumerate(layers):
        if layer is not None:
            form = layer.form
            shape = (form.batch, form.heads, layer.room, form.key + form.value)
            add(f"{at}.rows", _NAMES[form.dtype], shape)
    for name, array in parts.items():
        add(name, dtypes[name], array.shape)
    about = {
        "format": _FORMAT,
        "version": _VERSION,
        "layers": [None if layer is None else layer.said() for layer in layers],
        "sha256": sha256,
    }
    metadata = {"certk": json.dumps(about)}
    length = len(written(entries.values(), metadata))
    return written(entries.values(), metadata, -(-length // _ALIGNED) * _ALIGNED - 8), entries


def _rows(array: NDArray[Any]) -> NDArray[Any]:
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def _pieces_of(layer: IndexedLayer, told: _Layer) -> Iterator[memoryview]:
    """Yield the bytes of the rows, a stretch at a time."""
    form = told.form
    stretch = max(1, STRETCH // max(1, form.row))
    for batch, head in np.ndindex(form.batch, form.heads):
        keys, values = (rows[batch, head][None, None] for rows in (layer.keys, layer.values))
        for start in range(0, told.keys, stretch):
            part = slice(start, start + stretch)
            pairs = torch.cat((keys[:, :, part], values[:, :, part]), -1).detach()
            yield bytes_of(pairs)[0].data
        if behind := (told.room - told.keys) * form.row:
            yield memoryview(bytes(behind))


def _stretches(
    file: SafetensorsFile, entry: Entry, told: _Layer
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield positions, and the keys and values there."""
    form = told.form
    stretch = max(1, STRETCH // max(1, form.row * form.streams))
    for start in range(0, told.keys, stretch):
        count = min(stretch, told.keys - start)
        data = bytearray(form.streams * count * form.row)
        for head in range(form.streams):
            here = memoryview(data)[head * count * form.row :][: count * form.row]
            file.read_into(entry.name, here, (head * told.room + start) * form.row)
        if not data:
            continue
        pairs = torch.frombuffer(data, dtype=form.dtype)
        pairs = pairs.reshape(form.batch, form.heads, count, form.key + form.value)
        yield start, pairs[..., : form.key], pairs[..., form.key :]


def _check(file: SafetensorsFile, entry: Entry, sha256: str, layer: int) -> None:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(STRETCH))
    size = entry.stop - entry.start
    for start in range(0, size, STRETCH):
        here = buffer[: min(STRETCH, size - start)]
        file.read_into(entry.name, here, start)
        digest.update(here)
    if digest.hexdigest() != sha256:
        raise _damaged(file, f"the keys and values of layer {layer} have another SHA-256")


def _index(
    file: SafetensorsFile, at: int, told: _Layer, parts: Mapping[str, NDArray[Any]]
) -> KeyIndex | None:
    if not told.built:
        return None
    form, heads = told.form, []
    arrays = [parts[f"{at}.index.{name}"] for name, _, _ in PARTS]
    for head in range(form.streams):
        of_head: list[NDArray[Any]] = []
        for (name, _, here), array in zip(PARTS, arrays, strict=True):
            part = np.ascontiguousarray(array[head]).view(here)
            of_head.append(part[part != 0xFFFFFFFF] if name == "bare" else part)
        heads.append(tuple(of_head))
    shape = [form.batch, form.heads, told.keys, form.key]
    kind = str(form.dtype).removeprefix("torch.")
    try:
        index = _native.KeyIndex.of_parts(shape, kind, heads)  # type: ignore[arg-type]
        if (values := parts.get(f"{at}.values")) is None:
            return KeyIndex(index, None)
        return KvIndex._of(index, None, _values_of_file(values))
    except CertkError as error:
        raise CertkError(f"{file.path}: the index of layer {at}: {error}") from None


def _ball(
    file: SafetensorsFile, at: int, told: _Layer, parts: Mapping[str, NDArray[Any]]
) -> ValueBall | None:
    if not told.ball:
        return None
    form = told.form
    shape = [form.batch, form.heads, told.keys, form.value]
    try:
        return ball_of_parts(shape, list(parts[f"{at}.ball"]), (form.batch, form.heads))
    except CertkError as error:
        raise CertkError(f"{file.path}: the ball of layer {at}: {error}") from None


def _damaged(file: SafetensorsFile, problem: str) -> CertkError:
    return CertkError(
        f"{file.path} is no session that can be used: {problem}; save the cache again"
    )


def _told(file: SafetensorsFile) -> tuple[list[_Layer | None], str]:
    """Read the header's entries of the layers, and the SHA-256 that it states."""
    try:
        about = parse_json(file.header.metadata.get("certk", ""))
        if not isinstance(about, dict) or about.get("format") != _FORMAT:
            raise ValueError
    except (ValueError, RecursionError):
        raise _damaged(file, "its metadata do not say that it is one") from None
    if (version := about.get("version")) != _VERSION or type(version) is not int:
        raise _damaged(
            file, f"it has format version {quote(version)}, and {_VERSION} is what this reads"
        )
    sha256, said = about.get("sha256"), about.get("layers")
    if not isinstance(sha256, str) or not isinstance(said, list):
        raise _damaged(file, "its metadata are incomplete")
    layers: list[_Layer | None] = []
    for at, layer in enumerate(said):
        layers.append(None if layer is None else _layer(file, at, layer))
    wanted = {f"{at}.rows" for at, layer in enumerate(layers) if layer is not None}
    if {name for name in file.header.entries if name.endswith(".rows")} != wanted:
        raise _damaged(file, "it has other layers than it says")
    return layers, sha256


def _layer(file: SafetensorsFile, at: int, said: Any) -> _Layer:
    entry = file.header.entries.get(f"{at}.rows")
    names = ("keys", "d", "d_v", "built")
    good = isinstance(said, dict) and set(said) == {*names, "ball", "sha256"}
    good = good and are_sizes([said[name] for name in names]) and type(said["ball"]) is bool
    if not good or entry is None or not isinstance(said["sha256"], str) or len(entry.shape) != 4:
        raise _damaged(file, f"what it says of layer {at} is incomplete")
    n, d, d_v, built = (said[name] for name in names)
    batch, heads, room, width = entry.shape
    needed = [f"{at}.index.{name}" for name, _, _ in PARTS] if built else []
    needed += [f"{at}.ball"] if said["ball"] else []
    tensors = [file.header.entries.get(name) for name in needed]
    stacked = all(
        tensor and len(tensor.shape) == 2 and tensor.shape[0] == batch * heads for tensor in tensors
    )
    if entry.dtype not in _DTYPES or d + d_v != width or not n <= room or not stacked:
        raise _damaged(file, f"what it says of layer {at} does not fit its tensors")
    form = Form(_DTYPES[entry.dtype], batch, heads, d, d_v)
    return _Layer(n, form, room, built, said["ball"], said["sha256"])
