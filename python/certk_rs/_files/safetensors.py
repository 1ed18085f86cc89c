"""The safetensors container: read strictly, written canonically.

Eight bytes little-endian header length, a JSON header, then the tensors' bytes without holes. The
reader here accepts less than others do: every entry is checked against its dtype, its shape and the
length of the file before a single tensor is read, duplicate keys and non-finite numbers are errors,
and raw bytes are handed out, so that BF16 (which NumPy does not know) passes unharmed. Tensors are
read, not mapped: a file that shrinks meanwhile is then an error and not a crash, and memory holds
what was asked for only.

The canonical form, of which there is exactly one for given contents: tensors ordered by falling
item size and then by name (every tensor is aligned to its item), compact JSON with `__metadata__`
first, padded with spaces to a multiple of eight.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import reprlib
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ..errors import CertkError, one_line
from .atomic import names_the_file

ITEMSIZE = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

# What a tensor is in memory; BF16 stays in its 16 bits.
STORAGE = {"F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8", "I32": "<i4", "I64": "<i8"}

MAX_HEADER = 100_000_000  # the limit of the reference implementation
_MAX_AXES = 32  # of NumPy 1
_MAX_BYTES = 2**63 - 1
_CHUNK = 1 << 24
# What a header holds may be as long as the header, and is quoted in one line.
_QUOTE = reprlib.Repr()
_QUOTE.maxstring = _QUOTE.maxother = 200

Form = tuple[str, tuple[int, ...]]
"""Dtype and shape of a tensor."""


@dataclass(frozen=True)
class Entry:
    """One tensor of the header: its bytes are `start:stop`, counted from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """A checked header. `raw` is all that precedes the data, length prefix and padding included."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    raw: bytes


class SafetensorsFile:
    """An open safetensors file whose header has been checked as a whole.

    Raises `CertkError` (naming the file, the tensor and the remedy) if it is malformed, `OSError`
    if the system refuses it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not stat.S_ISREG(path.stat().st_mode):
            raise CertkError(f"{path} is not a regular file: give a .safetensors file")
        self._file = path.open("rb", buffering=0)
        try:
            self.identity = self._identity()
            self.header = _read_header(path, self._file, os.fstat(self._file.fileno()).st_size)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        self._file.close()

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_unchanged(self, identity: tuple[int, ...]) -> None:
        """Raise `CertkError` unless this is still the file that had `identity`."""
        if self.identity != identity or self._identity() != identity:
            raise CertkError(
                f"{self.path} was changed while it was being used: run the command again"
            )

    def chunks(self, name: str) -> Iterator[NDArray[np.uint8]]:
        """The raw bytes of a tensor, 16 MiB at a time."""
        entry = self.header.entries[name]
        for start in range(entry.start, entry.stop, _CHUNK):
            yield self._bytes(start, min(_CHUNK, entry.stop - start))

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The raw bytes of a tensor."""
        entry = self.header.entries[name]
        return self._bytes(entry.start, entry.stop - entry.start)

    def read(self, name: str) -> NDArray[Any]:
        """The tensor in its own shape and storage type (uint16 for BF16)."""
        entry = self.header.entries[name]
        return self.raw(name).view(STORAGE[entry.dtype]).reshape(entry.shape)

    def sha256(self, name: str) -> str:
        """SHA-256 of the raw bytes of a tensor, hexadecimal."""
        digest = hashlib.sha256()
        for chunk in self.chunks(name):
            digest.update(chunk.data)
        return digest.hexdigest()

    def header_sha256(self) -> str:
        """SHA-256 of all that precedes the data, hexadecimal."""
        return hashlib.sha256(self.header.raw).hexdigest()

    def _bytes(self, start: int, count: int) -> NDArray[np.uint8]:
        data = np.empty(count, np.uint8)
        _fill(self.path, self._file, data.data, len(self.header.raw) + start)
        return data

    def _identity(self) -> tuple[int, ...]:
        status = os.fstat(self._file.fileno())
        return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def canonical(tensors: Mapping[str, Form], metadata: Mapping[str, str]) -> Header:
    """The one header this package writes for tensors given as name -> (dtype, shape)."""
    entries: dict[str, Entry] = {}
    stop = 0
    for name in sorted(tensors, key=lambda name: (-ITEMSIZE[tensors[name][0]], name)):
        dtype, shape = tensors[name]
        start, stop = stop, stop + math.prod(shape) * ITEMSIZE[dtype]
        entries[name] = Entry(name, dtype, shape, start, stop)
    return Header(entries, dict(metadata), written(entries.values(), metadata))


def written(entries: Iterable[Entry], metadata: Mapping[str, str], room: int = 0) -> bytes:
    """A header as it precedes the data: its length, its text, and spaces up to whole eights.

    With `room`, a multiple of 8, there are at least so many bytes behind the length.
    """
    body: dict[str, Any] = {"__metadata__": dict(metadata)}
    for entry in entries:
        offsets = [entry.start, entry.stop]
        body[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
    text = json.dumps(body, separators=(",", ":")).encode()
    text += b" " * max(-len(text) % 8, room - len(text))
    return len(text).to_bytes(8, "little") + text


def byte_size(itemsize: int, shape: Iterable[int]) -> int | None:
    """Bytes of a tensor of sizes >= 0; None where no array may have that shape, empty or not."""
    most, empty = itemsize, False
    for axis in shape:
        most *= axis or 1
        empty = empty or axis == 0
        # Here and not at the end: a product of many long numbers takes for ever.
        if most > _MAX_BYTES:
            return None
    return 0 if empty else most


def quote(value: object) -> str:
    """A value of a header as one short line."""
    return _QUOTE.repr(value)


def parse_json(text: str) -> Any:
    """JSON with duplicate keys, NaN and infinities refused (`ValueError`)."""
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_not_json)


def _fill(path: Path, file: FileIO, buffer: memoryview, offset: int) -> None:
    with names_the_file(path):
        file.seek(offset)
        done = 0
        while done < len(buffer):
            # In pieces, so that Ctrl-C is heard in time.
            count = file.readinto(buffer[done : done + _CHUNK])
            if not count:
                raise CertkError(f"{path} ends early: it was cut off while it was being read")
            done += count


def _read_header(path: Path, file: FileIO, size: int) -> Header:
    if size < 8:
        raise CertkError(
            f"{path} has {size} bytes, too few for a safetensors file: it is cut off or not one"
        )
    prefix = bytearray(8)
    _fill(path, file, memoryview(prefix), 0)
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER or 8 + length > size:
        raise CertkError(
            f"{path}: header length {length} does not fit (file of {size} bytes, "
            f"limit {MAX_HEADER}): the file is cut off or not safetensors"
        )
    text = bytearray(length)
    _fill(path, file, memoryview(text), 8)
    try:
        if text[:1] != b"{":
            raise ValueError("it does not begin with '{'")
        body = parse_json(text.decode())
        metadata = _metadata(body.pop("__metadata__", {}))
    except (ValueError, RecursionError) as error:
        raise CertkError(
            f"{path}: the header is not valid JSON for safetensors ({one_line(error)}): "
            "the file is damaged or not safetensors"
        ) from None
    entries = [_entry(path, name, value) for name, value in body.items()]
    _check_contiguous(path, entries, size - 8 - length)
    return Header({entry.name: entry for entry in entries}, metadata, bytes(prefix + text))


def _metadata(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise ValueError("__metadata__ must map strings to strings")
    return value


def _entry(path: Path, name: str, value: Any) -> Entry:
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
    """Whether this is a list of integers that can be sizes: from 0 to below 2^63, and not many."""
    return (
        isinstance(value, list)
        and len(value) <= _MAX_AXES
        and all(type(item) is int and 0 <= item <= _MAX_BYTES for item in value)
    )


def _check_contiguous(path: Path, entries: Iterable[Entry], size: int) -> None:
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
