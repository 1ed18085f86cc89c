"""Keys and values of a layer in mapped files, side by side.

In a file the key and the value of a position lie together, and the positions of a head lie behind
each other: needed keys are often neighbours, and one page then holds several of them. (Positions
in front, all heads of one beside each other, would be simpler to append to; of real keys it read
1.2 to 1.3 times the pages.) A head grows by pieces, each as large as a part of all before; wherever
they are in files, they are mapped to consecutive addresses.

Pieces may be of a file that others read, too: of a saved session, or of the cache that this is a
copy of. What is shared is never written to: whoever goes on behind it, in the middle of a page,
takes that page's bytes along. A user can write to the tensors that are shown all the same, and
would write to the file; torch counts that, and such rows are refused from then on.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .. import _native
from .._files.scratch import MappableFile, ScratchFile
from ..errors import CertkError

PAGE = mmap.ALLOCATIONGRANULARITY
# Rows are put side by side in memory this many bytes at a time.
STRETCH = 1 << 22
# As NumPy takes them: bfloat16 by its bits.
STORED = {
    torch.float16: np.float16,
    torch.bfloat16: np.int16,
    torch.float32: np.float32,
    torch.float64: np.float64,
}


@dataclass(frozen=True)
class Form:
    """The dtype and the sizes of a layer's rows."""

    dtype: torch.dtype
    batch: int
    heads: int
    key: int
    value: int

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> Form:
        """Return the form of keys (batch, heads, n, d) and their values.

        Raises:
            CertkError: They cannot be kept side by side in a file.
        """
        if keys.dtype != values.dtype or keys.dtype not in STORED:
            raise CertkError(
                f"keys are {keys.dtype} and values {values.dtype}: files hold them side by side, "
                "both float32, float16, bfloat16 or float64; leave out offload, and do not save"
            )
        if keys.device.type != "cpu":
            raise CertkError(f"keys are on {keys.device}: files are mapped for models on the CPU")
        batch, heads, _, d = keys.shape
        return cls(keys.dtype, batch, heads, d, values.shape[-1])

    @property
    def row(self) -> int:
        """Bytes of a key and a value."""
        return (self.key + self.value) * np.dtype(STORED[self.dtype]).itemsize

    @property
    def streams(self) -> int:
        """The number of heads that have rows."""
        return self.batch * self.heads


@dataclass(frozen=True)
class Piece:
    """A part of a file: of every head consecutive rows, in whole pages."""

    file: MappableFile
    offset: int
    """Of the first head's part."""
    step: int
    """From one head's part to the next one's."""
    size: int
    """Of one head's part."""


class _Copies:
    """Rows that share files, and whether somebody has written to what one of them shows."""

    def __init__(self) -> None:
        self.rows: weakref.WeakSet[PairedRows] = weakref.WeakSet()
        self.written = False


class PairedRows:
    """Rows of one layer; positions are appended, and seen as keys and values."""

    def __init__(
        self,
        directory: Path,
        reserve: int,
        form: Form,
        shared: Sequence[Piece] = (),
        copies: _Copies | None = None,
    ) -> None:
        """Begin with what is shared, or with nothing.

        Args:
            directory: Where files of its own are made.
            reserve: For how many positions room is made at first.
            form: What the rows are.
            shared: Pieces that are not written to.
            copies: Those that share them in this process.
        """
        self.form = form
        self._directory = directory
        self._reserve = reserve
        self._pieces = tuple(shared)
        self._own: ScratchFile | None = None
        # Of every head, the bytes in front of this one are shared.
        self._own_from = self._room
        self._map = self._mapped(self._pieces)
        self._flat = self._tensor()
        self._copies = _Copies() if copies is None else copies
        self._copies.rows.add(self)

    def __del__(self) -> None:
        """Leave word for the copies."""
        if hasattr(self, "_copies"):
            self._copies.written |= self._shown_was_written()

    @property
    def own_bytes(self) -> int:
        """Bytes of the file that is this one's own."""
        return 0 if self._own is None else self._own.size

    @property
    def _room(self) -> int:
        return sum(piece.size for piece in self._pieces)

    @property
    def intact(self) -> bool:
        """True if nobody has written to the tensors that this or a copy of it shows."""
        copies = self._copies
        return not (copies.written or any(rows._shown_was_written() for rows in copies.rows))

    def check(self) -> None:
        """Raise `CertkError` if the rows may no longer be those that were put here."""
        if not self.intact:
            raise CertkError(
                "keys or values that are in files were written to in place, in this cache or in a "
                "copy of it, and its index is of the old ones: give a layer other tensors instead "
                "(layer.keys = ...), or begin with a new cache"
            )
        for piece in self._pieces:
            piece.file.check_unchanged()

    def append(self, had: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put rows (batch, heads, m, d) behind the first `had`; what was there is forgotten.

        Raises:
            CertkError: Another form; or the process is a fork of the one that made this.
            OSError: No room on the disk. Nothing has changed then.
        """
        if Form.of(keys, values) != self.form:
            raise CertkError(
                f"keys {tuple(keys.shape)} and values {tuple(values.shape)} of {keys.dtype} do not "
                f"go behind {self.form}: begin with a new cache"
            )
        need, row = had + keys.shape[2], self.form.row
        if not self.form.streams or not row:
            return
        self._make_room(had * row, need * row)
        stretch = max(1, STRETCH // (row * self.form.streams))
        for start in range(had, need, stretch):
            part = slice(start - had, min(need, start + stretch) - had)
            pairs = torch.cat((keys[:, :, part], values[:, :, part]), -1).detach()
            for head, rows in enumerate(bytes_of(pairs)):
                self._write(head, start * row, rows.data)
        if keys.shape[2] * row >= PAGE:
            self._write_out(had * row, need * row)

    def shown(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first n keys (batch, heads, n, d) and values, where they are."""
        form = self.form

        def view(size: int, at: int) -> torch.Tensor:
            shape = (form.batch, form.heads, n, size)
            if self._flat is None or not math.prod(shape):
                return torch.empty(shape, dtype=form.dtype)
            room = self._room // self._flat.itemsize
            strides = (form.heads * room, room, form.key + form.value, 1)
            tensor: Any = self._flat.as_strided(shape, strides, at)
            # Attention asks for the pages that it will read.
            tensor.certk_mapped = True
            return tensor  # type: ignore[no-any-return]

        return view(form.key, 0), view(form.value, form.key)

    def begin_with(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Return True if these are the first keys and values, as when the others were cropped."""
        if self._map is None or keys.ndim != 4 or not keys.numel() or not values.numel():
            return False
        n = keys.shape[2]
        if values.shape[2:3] != keys.shape[2:3] or n * self.form.row > self._room:
            return False
        for mine, theirs in zip(self.shown(n), (keys, values), strict=True):
            if (mine.shape, mine.dtype, mine.data_ptr()) != (
                *(theirs.shape, theirs.dtype, theirs.data_ptr()),
            ) or mine.stride() != theirs.stride():
                return False
        return True

    def fork(self, n: int) -> PairedRows:
        """Copy the first n rows, which are then shared, and of which each goes on alone."""
        size = n * self.form.row
        self._own_from = max(self._own_from, size)
        shared = _cut(self._pieces, _whole_pages(size))
        return PairedRows(self._directory, self._reserve, self.form, shared, self._copies)

    def take(self, n: int, rows: torch.Tensor) -> PairedRows:
        """Copy the first n positions of some entries of the batch to files of their own."""
        form = replace(self.form, batch=len(rows))
        taken = PairedRows(self._directory, max(self._reserve, n), form)
        keys, values = self.shown(n)
        stretch = max(1, STRETCH // max(1, form.row * form.streams))
        for start in range(0, n, stretch):
            part = slice(start, start + stretch)
            taken.append(start, keys[:, :, part][rows], values[:, :, part][rows])
            self.let_go()
        taken.let_go()
        return taken

    def let_go(self) -> None:
        """Let pages that were read or written no longer count as memory of the process."""
        if self._map is not None:
            self._map.let_go()

    def _make_room(self, at: int, end: int) -> None:
        """Make room for each head's bytes from `at` up to `end`, none of them shared."""
        pieces, own_from = self._pieces, self._own_from
        # The bytes of a shared page in front of what will be written.
        kept, begun = at, None
        if at < own_from:
            kept = own_from = at - at % PAGE
            pieces = _cut(pieces, kept)
            begun = self._bytes(kept, at)
        room = sum(piece.size for piece in pieces)
        if end > room:
            more = max(self._reserve * self.form.row, room // 2, end - room)
            more = _whole_pages(more)
            if self._own is None:
                self._own = ScratchFile(self._directory)
            offset = self._own.grow(self.form.streams * more)
            pieces = (*pieces, Piece(self._own, offset, more, more))
        if pieces != self._pieces:
            mapped = self._mapped(pieces)
            self._copies.written |= self._shown_was_written()
            self._map, self._pieces = mapped, pieces
            self._flat = self._tensor()
        self._own_from = own_from
        if begun is not None and kept < at:
            for head, rows in enumerate(begun):
                self._write(head, kept, rows.data)

    def _bytes(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Copy bytes of every head."""
        heads = self.form.streams
        if self._map is None or start == stop:
            return np.empty((heads, 0), np.uint8)
        memory: Any = np.asarray(self._map)
        return memory.reshape(heads, self._room)[:, start:stop].copy()  # type: ignore[no-any-return]

    def _write(self, head: int, at: int, data: memoryview) -> None:
        for piece, start in self._own_pieces():
            if at < start + piece.size and len(data):
                count = min(len(data), start + piece.size - at)
                assert isinstance(piece.file, ScratchFile)
                offset = piece.offset + head * piece.step + at - start
                piece.file.write_at(offset, data[:count])
                at, data = at + count, data[count:]

    def _write_out(self, at: int, end: int) -> None:
        for piece, start in self._own_pieces():
            first, last = max(at, start) - start, min(end, start + piece.size) - start
            if first < last and isinstance(piece.file, ScratchFile):
                for head in range(self.form.streams):
                    piece.file.write_out(piece.offset + head * piece.step + first, last - first)

    def _own_pieces(self) -> list[tuple[Piece, int]]:
        """Pieces that may be written to from some byte on, and where of a head they are."""
        starts = [sum(piece.size for piece in self._pieces[:i]) for i in range(len(self._pieces))]
        return [
            (piece, start)
            for piece, start in zip(self._pieces, starts, strict=True)
            if start + piece.size > self._own_from
        ]

    def _tensor(self) -> torch.Tensor | None:
        """View all that is mapped as numbers; what is shown are views, whose writes count."""
        if self._map is None:
            return None
        numbers = np.asarray(self._map).view(STORED[self.form.dtype])
        with torch.inference_mode(False):
            return torch.from_numpy(numbers).view(self.form.dtype)

    def _shown_was_written(self) -> bool:
        return self._flat is not None and self._flat._version > 0

    def _mapped(self, pieces: Sequence[Piece]) -> _native.MappedPieces | None:
        room, heads = sum(piece.size for piece in pieces), self.form.streams
        if not room * heads:
            return None
        mapped, at = [], 0
        for piece in pieces:
            file = piece.file
            file.need(piece.offset + (heads - 1) * piece.step + piece.size)
            for head in range(heads):
                offset = piece.offset + head * piece.step
                place = (head * room + at, piece.size, file.descriptor, offset, file.writable)
                mapped.append(place)
            at += piece.size
        return _native.MappedPieces(heads * room, mapped)


def bytes_of(pairs: torch.Tensor) -> NDArray[np.uint8]:
    """Return the bytes (heads, ...) of rows (batch, heads, m, d), head by head."""
    pairs = pairs.contiguous()
    bits = pairs.view(torch.int16) if pairs.dtype is torch.bfloat16 else pairs
    array: NDArray[Any] = bits.numpy()
    return array.reshape(math.prod(pairs.shape[:2]), -1).view(np.uint8)


def _whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _cut(pieces: Sequence[Piece], size: int) -> tuple[Piece, ...]:
    """Pieces up to a byte of each head."""
    left: list[Piece] = []
    for piece in pieces:
        if size > 0:
            left.append(replace(piece, size=min(piece.size, size)))
            size -= piece.size
    return tuple(left)
