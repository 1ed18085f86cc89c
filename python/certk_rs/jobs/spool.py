"""Results of many files: a sequence that keeps a few of them in memory and the others on the disk.

The disk is a temporary file without a name of its own, which goes when the sequence does.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar, overload

_IN_MEMORY = 1 << 25

_Item = TypeVar("_Item")


class Spool(Sequence[_Item], Generic[_Item]):
    """A sequence of values that can be pickled; each is read anew when it is asked for."""

    def __init__(self, items: Iterable[_Item] = ()) -> None:
        self._starts: list[int] = []
        self._file: Any = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115
        for item in items:
            self.append(item)

    def append(self, item: _Item) -> None:
        """Add an item at the end."""
        self._starts.append(self._file.seek(0, 2))
        pickle.dump(item, self._file)

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, place: int) -> _Item: ...

    @overload
    def __getitem__(self, place: slice) -> list[_Item]: ...

    def __getitem__(self, place: int | slice) -> _Item | list[_Item]:
        if isinstance(place, slice):
            return [self[i] for i in range(len(self))[place]]
        self._file.seek(self._starts[place])
        item: _Item = pickle.load(self._file)  # nobody else can write there
        return item

    def __reduce__(self) -> tuple[type[Spool[_Item]], tuple[list[_Item]]]:
        return Spool, (list(self),)
