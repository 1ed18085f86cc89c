"""A layer of keys and values with an index of them and a ball around the values."""

from __future__ import annotations

import copy
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..errors import CertkError
from ..key_index import KeyIndex
from ..kv_index import KvIndex
from ..sparse_attention import ValueBall, Weights
from .paired_rows import Form, PairedRows
from .settings import FEWEST_INDEXED, INDEXED
from .taken_layer import TakenLayer

# What a layer without keys and values has of them.
_EMPTY: dict[str, Any] = {
    "keys": None, "values": None, "_buffers": None, "_rows": None, "_shown": (None, None),
    "_index": None, "_ball": None,
}  # fmt: skip


class Buffers:
    """Keys and values (batch, kv_heads, n, d) in memory that is set aside ahead."""

    def __init__(self, reserve: int) -> None:
        self._reserve = reserve
        self._room: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in all, used or not."""
        return 0 if self._room is None else sum(each.nbytes for each in self._room)

    def append(
        self, held: tuple[Any, Any], had: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put rows behind `held`, of which there are `had`, and return all."""
        need = had + keys.shape[-2]
        room = self._make_room(held, (keys, values), had, need)
        for buffer, new in zip(room, (keys, values), strict=True):
            buffer[:, :, had:need] = new
        return room[0][:, :, :need], room[1][:, :, :need]

    def _make_room(
        self,
        held: tuple[Any, Any],
        new: tuple[torch.Tensor, torch.Tensor],
        had: int,
        need: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._room is not None and need <= self._room[0].shape[2]:
            return self._room
        room = max(self._reserve, 2 * had, need)
        grown = []
        for old, like in zip(held, new, strict=True):
            # Of what is made in inference mode torch does not count the writes.
            with torch.inference_mode(False):
                shape = (*like.shape[:2], room, like.shape[3])
                buffer = torch.empty(shape, dtype=like.dtype, device=like.device)
            if had:
                buffer[:, :, :had] = old
            grown.append(buffer)
        self._room = (grown[0], grown[1])
        return self._room


class IndexedLayer(TakenLayer):
    """Keys and values, in memory or in files of a directory, their index and a ball."""

    def __init__(
        self, reserve: int, threads: int | None, directory: Path | None, weights: Weights
    ) -> None:
        super().__init__()
        self.keys: Any = None
        self.values: Any = None
        self._reserve = reserve
        self._threads = threads
        self._directory = directory
        self._weights = weights
        self._buffers: Buffers | None = None
        self._rows: PairedRows | None = None
        self._shown: tuple[Any, Any] = (None, None)
        self._writes = (0, 0)
        self._index: KeyIndex | None = None
        self._built = 0
        self._ball: ValueBall | None = None

    @property
    def index_bytes(self) -> int:
        """Bytes of the index."""
        return 0 if self._index is None else self._index.nbytes

    @property
    def held_bytes(self) -> int:
        """Bytes of keys and values in memory, with what is set aside ahead; none in files."""
        if self._rows is not None:
            return 0
        if self._buffers is not None and self._is_current():
            return self._buffers.nbytes
        return sum(each.nbytes for each in (self.keys, self.values) if each is not None)

    @property
    def index(self) -> KeyIndex | None:
        """The index of the keys, a `KvIndex` with codes of the values, if it is one of these."""
        return self._index if self._is_current() else None

    @property
    def ball(self) -> ValueBall | None:
        """The ball around the values, if it is one of these."""
        return self._ball if self._is_current() else None

    @property
    def built(self) -> int:
        """Of how many keys the index was built; others were appended."""
        return self._built

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the file that is this layer's own."""
        return 0 if self._rows is None else self._rows.own_bytes

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is made ahead: the first keys say how large they are."""

    # Between the graphs of a compiled model, as certified attention.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append; the keys that come back carry their index, the values their ball.

        Raises:
            CertkError: Keys or values of other sizes or dtypes than those before; or keys and
                values in files that somebody has written to.
        """
        had = 0 if self.keys is None else self.keys.shape[-2]
        if self.keys is not None:
            _need_alike((self.keys, self.values), (key_states, value_states))
        if not self._is_current():
            # Beams were reordered, tokens cropped or written over, or the like: another index.
            self._buffers, self._index, self._ball = None, None, None
            if not self._in_files():
                self._rows = None
        self.check()
        if self._directory is None:
            if self._buffers is None:
                self._buffers = Buffers(self._reserve)
            held = (self.keys, self.values)
            shown = self._buffers.append(held, had, key_states, value_states)
        else:
            shown = self._write(self._directory, had, key_states, value_states)
        self._show(shown)
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        try:
            self._extend(key_states, value_states, had + key_states.shape[-2])
        except BaseException:
            # What lacks the last keys or values is of no use.
            self._index, self._ball = None, None
            raise
        if self._index is not None:
            self.keys.certk_index, self.keys.certk_writes = self._index, self._writes[0]
            self.values.certk_index, self.values.certk_writes = self._index, self._writes[1]
            self.values.certk_ball = self._ball
        return self.keys, self.values

    def check(self) -> None:
        """Raise `CertkError` if keys and values are in files that somebody has written to."""
        if self._rows is not None:
            self._rows.check()

    def let_go(self) -> None:
        """Let pages of files that were read no longer count as memory of the process."""
        if self._rows is not None:
            self._rows.let_go()

    def restore(
        self,
        shown: tuple[torch.Tensor, torch.Tensor],
        index: KeyIndex | None,
        ball: ValueBall | None,
        built: int,
        rows: PairedRows | None,
    ) -> None:
        """Go on from keys and values with an index and a ball of theirs, mapped or not.

        An index that lacks codes of the values which are wanted is built by the next step.
        """
        self.dtype, self.device = shown[0].dtype, shown[0].device
        self.is_initialized = True
        self._rows, self._ball, self._built = rows, ball, built
        if self._weights == "exact":
            self._index = of_keys(index)
        elif isinstance(index, KvIndex):
            self._index = index
        self._show(shown)

    def reset(self) -> None:
        """Forget all keys."""
        self.keys = self.values = None
        self.is_initialized = False

    def __deepcopy__(self, memo: Any) -> IndexedLayer:
        copied = self.__class__.__new__(self.__class__)
        others = {name: of for name, of in vars(self).items() if name not in _EMPTY}
        copied.__dict__.update(_EMPTY | copy.deepcopy(others, memo))
        if self.keys is None:
            return copied
        current = self._is_current()
        if self._rows is not None and self._in_files():
            # Both go on in files of their own, behind what they share.
            n = self.keys.shape[2]
            copied._rows = self._rows.fork(n)
            copied._show(copied._rows.shown(n))
        else:
            copied._show((self.keys.clone(), self.values.clone()))
        if current:
            copied._built = self._built
            copied._index, copied._ball = copy.copy(self._index), copy.copy(self._ball)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        if self._directory is not None:
            raise CertkError(
                "the keys and values of this cache are in files, and pickling would hold them in "
                "memory: write it by save(path)"
            )
        state = {**self.__dict__, "_buffers": None, "_shown": (None, None)}
        if not self._is_current():
            state |= {"_index": None, "_ball": None}
        if self.keys is not None:
            # Without what was set aside ahead.
            state |= {"keys": self.keys.clone(), "values": self.values.clone()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.keys is not None:
            self._show((self.keys, self.values))

    def _is_current(self) -> bool:
        """Return True if the index and the ball are of these keys and values, as they are."""
        same = self.keys is self._shown[0] and self.values is self._shown[1]
        same = same and self._writes == _writes(self._shown)
        return same and (self._rows is None or self._rows.intact)

    def _in_files(self) -> bool:
        """Return True if the keys and values are those of the files, or the first of them."""
        if self._rows is None or self.keys is None or self.values is None:
            return False
        return self._rows.begin_with(self.keys, self.values)

    def _show(self, shown: tuple[torch.Tensor, torch.Tensor]) -> None:
        with torch.inference_mode(False):
            keys, values = (each.clone() if each.is_inference() else each for each in shown)
        self.keys, self.values = self._shown = keys, values
        self._writes = _writes(self._shown)

    def _write(
        self, directory: Path, had: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._rows is None:
            rows = PairedRows(directory, self._reserve, Form.of(keys, values))
            if had:
                rows.append(0, self.keys, self.values)
            self._rows = rows
        self._rows.append(had, keys, values)
        return self._rows.shown(had + keys.shape[2])

    def _taken(self, rows: torch.Tensor) -> bool:
        """Write those entries of the batch, a stretch at a time, to files of their own."""
        if self._rows is None or not self._in_files():
            return False
        if not torch.equal(rows.cpu(), torch.arange(len(self.keys))):
            n = self.keys.shape[2]
            self._rows = self._rows.take(n, rows.cpu())
            self.keys, self.values = self._rows.shown(n)
        return True

    def _extend(self, key_states: torch.Tensor, value_states: torch.Tensor, n: int) -> None:
        """Bring the index up to n keys.

        One that has grown much is built anew: it would score more keys than it must.
        """
        if n < FEWEST_INDEXED or self.keys.dtype not in INDEXED or not math.prod(self.keys.shape):
            return
        if self._index is None or n >= 2 * self._built:
            # One at a time in memory.
            self._index = None
            self._index = self._build()
            self._built = n
        else:
            self._append(key_states, value_states)
        if self._ball is None:
            self._ball = ValueBall(self.values, threads=self._threads)
        else:
            self._ball.append(value_states)

    def _build(self) -> KeyIndex:
        if self._weights == "codes":
            # Values may have no codes: of float64, or not finite.
            with suppress(CertkError):
                return KvIndex.build(self.keys, self.values, keep_keys=False, threads=self._threads)
        return KeyIndex.build(self.keys, keep_keys=False, threads=self._threads)

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if isinstance(self._index, KvIndex):
            with suppress(CertkError):
                self._index.append(keys, values, threads=self._threads)
                return
            # It is as it was before these values.
            self._index = of_keys(self._index)
        assert self._index is not None
        self._index.append(keys, threads=self._threads)


def of_keys(index: KeyIndex | None) -> KeyIndex | None:
    """Return an index without its codes of values, if it has any."""
    return KeyIndex(index._index, None) if isinstance(index, KvIndex) else index


def known_of(keys: torch.Tensor, values: torch.Tensor) -> tuple[KeyIndex | None, ValueBall | None]:
    """Return the index and the ball that keys and values from a cache carry, if still theirs.

    None of what was written to since.
    """
    index, ball = getattr(keys, "certk_index", None), getattr(values, "certk_ball", None)
    now = _writes((keys, values))
    if getattr(keys, "certk_writes", None) != now[0]:
        index = None
    if getattr(values, "certk_writes", None) != now[1]:
        return of_keys(index), None
    return index if getattr(values, "certk_index", None) is index else of_keys(index), ball


def _writes(pair: tuple[Any, Any]) -> tuple[int, int]:
    """Return counts of the writes to keys and values and all their views, as torch counts.

    -1 where torch does not count, as of what was made in inference mode.
    """
    keys, values = (-1 if x is None or x.is_inference() else x._version for x in pair)
    return keys, values


def _need_alike(held: tuple[Any, Any], new: tuple[torch.Tensor, torch.Tensor]) -> None:
    for name, old, more in zip(("keys", "values"), held, new, strict=True):
        here, there = ((*x.shape[:2], *x.shape[3:], x.dtype) for x in (old, more))
        if old.ndim != 4 or here != there:
            raise CertkError(
                f"{name} {tuple(more.shape)} of {more.dtype} do not go behind those of this cache, "
                f"{tuple(old.shape)} of {old.dtype}: for beams or several answers call "
                "cache.batch_repeat_interleave first, else begin with a new cache"
            )
