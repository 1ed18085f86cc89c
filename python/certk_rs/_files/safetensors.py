"""The safetensors container: read strictly, written canonically.

A file is eight bytes of little-endian header length, a JSON header, and the tensors' bytes without
holes. This reader is stricter than others: duplicate keys and non-finite numbers are errors.

There is one canonical form for given contents: tensors ordered by falling item size and then by
name (so every tensor is aligned), compact JSON with `__metadata__` first, padded with spaces to a
multiple of eight.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

from ..errors import CertkError, one_line
from .location import Location
from .reader import Reader

ITEMSIZE = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

# NumPy types of tensors in memory; BF16 stays in its 16 bits.
STORAGE = {
    **{"F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8"},
    **{"I32": "<i4", "I64": "<i8", "U8": "<u1"},
}
# The core's names for dtypes of keys and values.
NAMES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}

# Enough for some hundred thousand tensors. The reference implementation allows six times as much,
# but JSON can take twenty times its text in memory.
MAX_HEADER = 1 << 24
_MAX_AXES = 32  # of NumPy 1
_MAX_BYTES = 2**63 - 1
# Formats that are not safetensors, by their first bytes, with remedies.
_SAVE = "load it and write its tensors with safetensors.torch.save_file"
_SAVE_NUMPY = "load it with numpy and write its arrays with safetensors.numpy.save_file"
_UNPACK = "unpack it first"
_KINDS: tuple[tuple[bytes, str], ...] = (
    # The long integer that torch.save wrote first before it wrote zip archives.
    (rb"\x80.\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19\.", f"what older torch.save writes (.pt): {_SAVE}"),
    (rb"PK\x03\x04.{26}[^\0]{1,200}?/(data\.pkl|byteorder|\.format_version|version)",
     f"what torch.save writes (.pt, .pth, .bin): {_SAVE}"),
    (rb"PK\x03\x04.{26}[^\0]{0,200}?\.npy", f"a .npz file of NumPy: {_SAVE_NUMPY}"),
    (rb"PK\x03\x04", f"a zip archive: {_UNPACK}, or if torch.save wrote it, {_SAVE}"),
    (rb"\x93NUMPY", f"a .npy file of NumPy: {_SAVE_NUMPY}"),
    (rb"GGUF", "a GGUF file of a model's weights: give a saved KV cache as safetensors"),
    (rb"\x80[\x02-\x05]", f"a pickle, as of older torch.save: {_SAVE}, if you trust it"),
    (rb"\x1f\x8b", f"compressed by gzip: {_UNPACK}"),
    (rb"\x28\xb5\x2f\xfd", f"compressed by zstd: {_UNPACK}"),
    (rb"BZh[1-9]", f"compressed by bzip2: {_UNPACK}"),
    (rb"\xfd7zXZ\0", f"compressed by xz: {_UNPACK}"),
    (rb".{257}ustar", f"a tar archive: {_UNPACK}"),
    (rb"\x89HDF\r\n", "an HDF5 file: write its arrays with safetensors.numpy.save_file"),
    (rb"PAR1", "a Parquet file: write its columns with safetensors.numpy.save_file"),
    (rb"version https://git-lfs", "a pointer of Git LFS: fetch the file with git lfs pull"),
    (rb"\s*<[!?a-zA-Z]", "HTML or XML, as servers answer when a file is not there: fetch it again"),
    (rb"\s*[{\[][\s\"{\[}\]\d]",
     "JSON text: give a .safetensors file, or an index of shards that ends in .index.json"),
)  # fmt: skip
# A value of a header can be as long as the header, and is quoted in one line.
_QUOTE = reprlib.Repr()
_QUOTE.maxstring = _QUOTE.maxother = 200


@dataclass(frozen=True)
class Entry:
    """One tensor of the header: its bytes are `start:stop`, counted from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


Form = tuple[str, tuple[int, ...]]
"""Dtype and shape of a tensor."""


@dataclass(frozen=True)
class Header:
    """A checked header; `raw` is all that precedes the data, length prefix and padding included."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    raw: bytes

    @cached_property
    def forms(self) -> dict[str, Form]:
        """Dtype and shape of every tensor, by name."""
        return {name: (entry.dtype, entry.shape) for name, entry in self.entries.items()}


def canonical(tensors: Mapping[str, Form], metadata: Mapping[str, str]) -> Header:
    """Return the canonical header for tensors given as name -> (dtype, shape)."""
    entries: dict[str, Entry] = {}
    stop = 0
    for name in sorted(tensors, key=lambda name: (-ITEMSIZE[tensors[name][0]], name)):
        dtype, shape = tensors[name]
        start, stop = stop, stop + math.prod(shape) * ITEMSIZE[dtype]
        entries[name] = Entry(name, dtype, shape, start, stop)
    raw = written(entries.values(), metadata)
    if len(raw) - 8 > MAX_HEADER:
        raise CertkError(
            f"a header of {len(raw) - 8} bytes for {len(entries)} tensors is longer than the "
            f"{MAX_HEADER} that are read: store them in several files"
        )
    return Header(entries, dict(metadata), raw)


def written(entries: Iterable[Entry], metadata: Mapping[str, str], room: int = 0) -> bytes:
    """Return a header as bytes: its length, its text, and spaces up to a multiple of eight.

    Args:
        entries: The tensors, in the order of the file.
        metadata: The metadata.
        room: The least number of bytes behind the length, a multiple of 8.
    """
    body: dict[str, Any] = {"__metadata__": dict(metadata)}
    for entry in entries:
        offsets = [entry.start, entry.stop]
        body[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
    text = json.dumps(body, separators=(",", ":")).encode()
    text += b" " * max(-len(text) % 8, room - len(text))
    return len(text).to_bytes(8, "little") + text


def byte_size(itemsize: int, shape: Iterable[int]) -> int | None:
    """Return the bytes of a tensor of sizes >= 0; None where no array may have that shape."""
    most, empty = itemsize, False
    for axis in shape:
        most *= axis or 1
        empty = empty or axis == 0
        # Within the loop, since a product of many long numbers would take hours.
        if most > _MAX_BYTES:
            return None
    return 0 if empty else most


def quote(value: object) -> str:
    """Return a value of a header as one short line."""
    return _QUOTE.repr(value)


def parse_json(text: str) -> Any:
    """Parse JSON; duplicate keys, NaN and infinities are a `ValueError`."""
    with _without_collector(len(text) > 1 << 20):
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_not_json)


@contextlib.contextmanager
def _without_collector(wanted: bool) -> Iterator[None]:
    """Pause garbage collection: millions of new values hold none, and each scan takes longer."""
    if not wanted or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def read_header(path: Location, reader: Reader) -> Header:
    """Read a header and check it as a whole; a `CertkError` names the file, the tensor, the remedy.

    Every entry must fit its dtype, its shape and the length of the file.
    """
    size = reader.size
    if size < 8:
        raise CertkError(
            f"{path} has {size} bytes, too few for a safetensors file: it is cut off or not one"
        )
    prefix = bytearray(8)
    reader.read_into(0, memoryview(prefix))
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER or 8 + length > size:
        raise CertkError(
            f"{path}: header length {length} does not fit (file of {size} bytes, "
            f"limit {MAX_HEADER}): {_kind(reader, 'the file is cut off or not safetensors')}"
        )
    text = bytearray(length)
    reader.read_into(8, memoryview(text))
    try:
        if text[:1] != b"{":
            raise ValueError("it does not begin with '{'")
        body = parse_json(text.decode())
        metadata = _metadata(body.pop("__metadata__", {}))
    except (ValueError, RecursionError) as error:
        raise CertkError(
            f"{path}: the header is not valid JSON for safetensors ({one_line(error)}): "
            f"{_kind(reader, 'the file is damaged or not safetensors')}"
        ) from None
    entries = [_entry(path, name, value) for name, value in body.items()]
    _check_contiguous(path, entries, size - 8 - length)
    return Header({entry.name: entry for entry in entries}, metadata, bytes(prefix + text))


def _kind(reader: Reader, otherwise: str) -> str:
    """Name the format of a file that is not safetensors, if it is known."""
    beginning = bytearray(min(reader.size, 512))
    reader.read_into(0, memoryview(beginning))
    found = (said for sign, said in _KINDS if re.match(sign, beginning, re.DOTALL))
    kind = next(found, None)
    return f"it is {kind}" if kind else otherwise


def _metadata(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise ValueError("__metadata__ must map strings to strings")
    return value


def _entry(path: Location, name: str, value: Any) -> Entry:
    def wrong(what: str) -> NoReturn:
        raise CertkError(
            f"{path}: tensor {quote(name)}: {what}: the file is damaged; write it again"
        )

    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        wrong("its entry must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        wrong(f"unknown dtype {quote(dtype)}")
    if not are_sizes(shape):
        wrong(f"shape {quote(shape)} is not a list of sizes, {_MAX_AXES} at most")
    need = byte_size(ITEMSIZE[dtype], shape)
    if need is None:
        wrong(f"shape {quote(shape)} has more entries than any memory holds")
    if not are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        wrong(f"data_offsets {quote(offsets)} are not [begin, end]")
    if offsets[1] - offsets[0] != need:
        span = quote(offsets[1] - offsets[0])
        wrong(f"{dtype} {quote(shape)} needs {need} bytes, data_offsets span {span}")
    return Entry(name, dtype, tuple(shape), offsets[0], offsets[1])


def are_sizes(value: Any) -> bool:
    """Return True for a short list of integers from 0 to below 2^63."""
    return (
        isinstance(value, list)
        and len(value) <= _MAX_AXES
        and all(type(item) is int and 0 <= item <= _MAX_BYTES for item in value)
    )


def _check_contiguous(path: Location, entries: Iterable[Entry], size: int) -> None:
    position = 0
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
        if entry.start != position:
            kind = "overlaps another" if entry.start < position else "leaves a hole before it"
            raise CertkError(
                f"{path}: tensor {quote(entry.name)} {kind}: the file is damaged; write it again"
            )
        position = entry.stop
    if position != size:
        raise CertkError(
            f"{path}: its tensors need {position} bytes of data, the file has {size}: "
            "it is cut off or has foreign bytes at its end"
        )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {quote(key)} twice")
        result[key] = value
    return result


def _not_json(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")
