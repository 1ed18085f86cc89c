"""Keys and values of one sequence in files of another program, and the options that describe them.

What files do not tell is taken from the options, and nothing is guessed. No memory is taken before
the sizes that a file claims are known to fit its length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from .._files.location import Location, locate
from .._files.reader import open_reader, same_state
from .._files.safetensors import Form
from ..errors import CertkError

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True)
class Given:
    """Options of an import; None where they are not given. Counts are 1 or more."""

    layers: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    dtype: str | None = None
    page_layout: str | None = None
    order: tuple[str, ...] | None = None
    """Names of files, in the order of their tokens."""

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value < 1 << 31):
                raise CertkError(f"{name} is {value!r}: give a count of 1 or more")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise CertkError(f"dtype is {self.dtype!r}: give {', '.join(DTYPES)}")

    def check(self, where: object, **found: int | str) -> None:
        """Raise `CertkError` if an option contradicts what a file tells."""
        for name, value in found.items():
            asked = getattr(self, name)
            if asked is not None and asked != value:
                raise CertkError(
                    f"{where}: its {name} is {value}, not {asked}: leave {_flag(name)} out, or "
                    "give another file"
                )

    def need(self, where: object, name: str) -> Any:
        """Return an option that the files do not tell; a `CertkError` if it is not given."""
        value = getattr(self, name)
        if value is None:
            raise CertkError(f"{where}: its files do not tell {name}: give {_flag(name)}")
        return value

    def heads_of(self, where: object, width: int) -> tuple[int, int]:
        """Return kv heads and head dimension of rows of `width` entries, from either option."""
        kv_heads, d = self.kv_heads, self.head_dim
        if kv_heads is None and d is None:
            raise CertkError(
                f"{where}: a row has {width} entries, and its files do not tell of how many heads: "
                "give --kv-heads or --head-dim"
            )
        kv_heads = kv_heads or width // (d or 1)
        d = d or width // kv_heads
        if not width or kv_heads * d != width:
            raise CertkError(
                f"{where}: a row has {width} entries, not kv_heads {kv_heads} times head_dim {d}: "
                "check --kv-heads and --head-dim"
            )
        return kv_heads, d


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class Foreign:
    """Keys and values of a sequence, readable a layer at a time.

    Attributes:
        forms: Dtype and shape (kv_heads, n, d) of both tensors of every layer, by its number.
        read: Returns "key" or "value" of a layer in the storage type, (kv_heads, n, d).
        about: What the source tells of itself, as metadata of a cache file.
    """

    forms: Mapping[int, Form]
    read: Callable[[int, str], NDArray[Any]]
    about: Mapping[str, str] = field(default_factory=dict)


class RawFile:
    """A file of numbers at known places; it is open only while it is read.

    Every read is of the state that the file had at first.
    """

    def __init__(self, place: Location) -> None:
        self.place = locate(place)
        reader = open_reader(self.place)
        self.size, self._identity = reader.size, reader.identity
        reader.close()

    def numbers(
        self, at: int, count: int, kind: str, step: int = 0, times: int = 1
    ) -> NDArray[Any]:
        """Read `count` numbers at byte `at`, and again every `step` bytes: (times, count).

        Args:
            at: The first byte.
            count: The numbers of each run.
            kind: The type, of NumPy.
            step: Bytes from the beginning of one run to that of the next.
            times: The number of runs.
        """
        width = count * np.dtype(kind).itemsize
        end = at + width + step * (times - 1)
        if min(at, count, times - 1) < 0 or end > self.size:
            self.fail(f"has {self.size} bytes, where at least {end} are expected")
        found = np.empty((times, count), kind)
        reader = open_reader(self.place)
        try:
            if not same_state(reader.identity, self._identity):
                raise CertkError(f"{self.place} was changed while it was being read: import again")
            if step == width:
                reader.read_into(at, _bytes(found))
            else:
                for k in range(times):
                    reader.read_into(at + k * step, _bytes(found[k]))
        finally:
            reader.close()
        return found

    def fail(self, what: str, remedy: str = "it is cut off, or of another kind") -> NoReturn:
        """Raise the error for this file."""
        raise CertkError(f"{self.place}: {what}: {remedy}")


def _bytes(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def by_head(rows: NDArray[Any], kv_heads: int) -> NDArray[Any]:
    """Return rows (n, kv_heads * d) as (kv_heads, n, d)."""
    return np.ascontiguousarray(rows.reshape(len(rows), kv_heads, -1).swapaxes(0, 1))
