"""Sequences in pieces: files of raw rows, keys before values, without a sign of their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._files.location import Location
from .._files.safetensors import ITEMSIZE, STORAGE
from ..errors import CertkError
from .source import Foreign, Given, RawFile, by_head


@dataclass(frozen=True)
class Piece:
    """The rows of some tokens: from byte `start` on, those of all layers, first keys, then values.

    With `token_first` a token has the rows of all layers side by side; else a layer has the rows of
    all tokens.
    """

    file: RawFile
    start: int
    tokens: int
    token_first: bool = False


def listed(place: Location, given: Given, ends: tuple[str, ...]) -> list[Location]:
    """Return the files of a sequence in the order of their tokens.

    Args:
        place: A file, or a directory of files.
        given: Options; `order` tells the names within a directory.
        ends: How names of such files end.

    Raises:
        CertkError: The order is not given, or names a file that is not there, or one twice.
    """
    if not place.is_directory():
        if given.order is not None:
            raise CertkError(f"{place}: --order lists files of a directory: give the directory")
        return [place]
    there = {name for name, below in place.children() if not below and name.endswith(ends)}
    if not there:
        raise CertkError(f"{place}: no file here ends in {' or '.join(ends)}: give their directory")
    if given.order is None:
        if len(there) > 1:
            raise CertkError(
                f"{place}: has {len(there)} files, whose names do not tell the order of their "
                "tokens: give --order LIST, a text file with a name a line"
            )
        return [place / name for name in there]
    if not given.order:
        raise CertkError(f"{place}: --order lists no file: give a name a line")
    seen: set[str] = set()
    for name in given.order:
        if name not in there or name in seen:
            why = "twice" if name in seen else "which is not here"
            raise CertkError(f"{place}: --order lists {name!r}, {why}: correct the list")
        seen.add(name)
    return [place / name for name in given.order]


def joined(
    pieces: Sequence[Piece],
    layers: int,
    heads: tuple[int, int],
    dtype: str,
    about: Mapping[str, str],
) -> Foreign:
    """Return the pieces, in their order, as one sequence."""
    kv_heads, d = heads
    n, width, kind = sum(each.tokens for each in pieces), kv_heads * d, STORAGE[dtype]
    row = width * ITEMSIZE[dtype]

    def read(layer: int, role: str) -> NDArray[Any]:
        found, at = np.empty((kv_heads, n, d), kind), 0
        for each in pieces:
            before, step = (role == "value") * layers * each.tokens, row
            if each.token_first:
                before, step = before + layer, row * layers
            else:
                before += layer * each.tokens
            rows = each.file.numbers(each.start + before * row, width, kind, step, each.tokens)
            found[:, at : at + each.tokens] = by_head(rows, kv_heads)
            at += each.tokens
        return found

    return Foreign(dict.fromkeys(range(layers), (dtype, (kv_heads, n, d))), read, about)
