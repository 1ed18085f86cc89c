"""Tensors of a safetensors file behind its checked header.

Tensors are read, not mapped: a file that shrinks meanwhile is an error and not a crash, and memory
holds only what was asked for. Many reads can share the caller's memory (`buffer`), since allocating
fresh memory takes about as long as filling it. Raw bytes are handed out, so BF16, which NumPy does
not know, passes unharmed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import CertkError
from .location import Place, locate
from .reader import Identity, open_reader, same_state
from .safetensors import STORAGE, read_header
from .transposed import HEAD_MAJOR, ROW_MAJOR

_CHUNK = 1 << 24
_ALL = slice(None)

_File = TypeVar("_File", bound="SafetensorsFile")


class SafetensorsFile:
    """An open safetensors file whose header has been checked as a whole; several threads may read.

    Raises `CertkError` where it is malformed, or was cut off meanwhile; `OSError` (with `filename`)
    where the system or a server refuses it.

    Attributes:
        path: The location, spelled as the user gave it.
        header: The checked header.
        identity: The identity of these bytes (see `reader`).
        size: The bytes of all files, headers included.
        on_read: If not None, it is called with the name, the first byte and the bytes of every read
            of a tensor.
    """

    on_read: Callable[[str, int, memoryview], None] | None = None

    def __init__(self, path: Place) -> None:
        self.path = locate(path)
        self._reader = open_reader(self.path)
        try:
            self.identity: Identity = self._reader.identity
            self.size = self._reader.size
            self.header = read_header(self.path, self._reader)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close everything; closing twice is harmless."""
        self._reader.close()

    def current_identity(self) -> Identity:
        """Return the present identity of the files."""
        return self._reader.current_identity()

    def read_into(self, name: str, buffer: memoryview, start: int = 0) -> None:
        """Fill all of `buffer` (bytes) with those of a tensor from byte `start` on."""
        entry = self.header.entries[name]
        if start < 0 or start + len(buffer) > entry.stop - entry.start:
            raise AssertionError(f"{name}: bytes {start}:{start + len(buffer)} are not all its own")
        self._fill(name, buffer, start)
        if self.on_read is not None:
            self.on_read(name, start, buffer)

    def _fill(self, name: str, buffer: memoryview, start: int) -> None:
        entry = self.header.entries[name]
        self._reader.read_into(len(self.header.raw) + entry.start + start, buffer)

    def header_sha256s(self) -> list[str]:
        """Return SHA-256 of all that precedes the data of each file, hexadecimal.

        For shards: first that of the index JSON, then those of the parts, by name.
        """
        return [hashlib.sha256(self.header.raw).hexdigest()]

    def header_sha256(self) -> str:
        """Return one hash for `header_sha256s`: the only one, or that of its lines of text."""
        each = self.header_sha256s()
        return each[0] if len(each) == 1 else hashlib.sha256("\n".join(each).encode()).hexdigest()

    def __enter__(self: _File) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_unchanged(self, identity: Identity) -> None:
        """Raise `CertkError` unless these are still the bytes that had `identity`."""
        if not (same_state(self.identity, identity) and self.current_identity() == self.identity):
            raise self.changed()

    def changed(self) -> CertkError:
        """Return the error for files that were changed meanwhile."""
        return CertkError(f"{self.path} was changed while it was being used: run the command again")

    def chunks(
        self, name: str, most: int = _CHUNK, *, start: int = 0
    ) -> Iterator[NDArray[np.uint8]]:
        """Yield the raw bytes of a tensor from byte `start` on, `most` at a time.

        Each piece reuses the memory.
        """
        entry = self.header.entries[name]
        count = entry.stop - entry.start
        memory = np.empty(min(most, count - start), np.uint8)
        for at in range(start, count, most):
            piece = memory[: min(most, count - at)]
            self.read_into(name, piece.data, at)
            yield piece

    def raw(self, name: str) -> NDArray[np.uint8]:
        """Read the raw bytes of a tensor."""
        entry = self.header.entries[name]
        data = np.empty(entry.stop - entry.start, np.uint8)
        self.read_into(name, data.data)
        return data

    def read(self, name: str) -> NDArray[Any]:
        """Read a tensor in its own shape and storage type (uint16 for BF16)."""
        entry = self.header.entries[name]
        return self.raw(name).view(STORAGE[entry.dtype]).reshape(entry.shape)

    def read_heads(
        self,
        name: str,
        heads: slice = _ALL,
        rows: slice = _ALL,
        *,
        layout: str = HEAD_MAJOR,
        buffer: NDArray[np.uint8] | None = None,
    ) -> NDArray[Any]:
        """Read some rows of some heads as (heads, rows, d), in the storage type.

        Args:
            name: A tensor of three axes, or of four of which the first has one entry.
            heads: The heads, without a step.
            rows: The rows, without a step.
            layout: Its order of axes. From "nhd", all heads of the rows are read, 16 MiB at a time.
            buffer: Bytes to fill, at least as many as the result has; the result is a view of them.
                None: fresh memory.
        """
        entry = self.header.entries[name]
        kind = np.dtype(STORAGE[entry.dtype])
        outer, inner, d = entry.shape[-3:]
        count, n = (outer, inner) if layout == HEAD_MAJOR else (inner, outer)
        first, last, _ = heads.indices(count)
        begin, end, _ = rows.indices(n)
        shape = (max(last - first, 0), max(end - begin, 0), d)
        size = math.prod(shape) * kind.itemsize
        if buffer is None:
            buffer = np.empty(size, np.uint8)
        out: NDArray[Any] = buffer[:size].view(kind).reshape(shape)
        if not size:
            return out
        row = d * kind.itemsize
        if layout == ROW_MAJOR:
            self._gather(name, out, first, begin, count)
        elif shape[1] == n:
            self.read_into(name, buffer[:size].data, first * n * row)
        else:
            each = shape[1] * row
            for k in range(shape[0]):
                piece = buffer[k * each : (k + 1) * each]
                self.read_into(name, piece.data, ((first + k) * n + begin) * row)
        return out

    def _gather(self, name: str, out: NDArray[Any], first: int, begin: int, count: int) -> None:
        """Fill `out` (heads, rows, d) from a tensor of (rows, `count` heads, d)."""
        heads, rows, d = out.shape
        width = count * d * out.itemsize
        most = max(1, min(rows, _CHUNK // width))
        memory = np.empty(most * width, np.uint8)
        for done in range(0, rows, most):
            some = min(most, rows - done)
            piece = memory[: some * width]
            self.read_into(name, piece.data, (begin + done) * width)
            block = piece.view(out.dtype).reshape(some, count, d)[:, first : first + heads]
            out[:, done : done + some] = block.swapaxes(0, 1)

    def sha256(self, name: str) -> str:
        """Return SHA-256 of the raw bytes of a tensor, hexadecimal."""
        digest = hashlib.sha256()
        for chunk in self.chunks(name):
            digest.update(chunk.data)
        return digest.hexdigest()
