"""Chunks of LMCache, as its local disk (.pt) and its file system connector (.data) store them.

A chunk is [2, layers, tokens, kv_heads * head_dim], the format KV_2LTD of versions 0.3 to 0.5. Its
name is `model@world_size@worker@hash@dtype`, with tags behind it. A .data file may begin with seven
int32: the bytes that follow, the number of the format, that of the dtype, and the shape.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from .._files.location import Location
from .._files.safetensors import ITEMSIZE
from ..errors import CertkError
from .pieces import Piece, joined, listed
from .source import DTYPES, Foreign, Given, RawFile

_NAME = re.compile(
    r"(?P<model>[^@]+)@(?P<ranks>[0-9]{1,9})@(?P<rank>[0-9]{1,9})@(?P<hash>-?[0-9a-f]+)"
    r"@(?P<dtype>[a-z0-9_]+)(?P<more>(@[^@]*)*)\.(pt|data)"
)
_NAMED = {"float": "float32", "half": "float16", "bfloat16": "bfloat16"}
_NUMBERED = {1: "float16", 2: "float16", 3: "bfloat16", 4: "float32"}
_KV_2LTD, _HEAD = 1, 28


@dataclass(frozen=True)
class _Chunk:
    file: RawFile
    model: str
    dtype: str
    shape: tuple[int, ...] | None


def read(place: Location, given: Given) -> Foreign:
    """Return the sequence in one chunk, or in the chunks of a directory that the order lists."""
    chunks = [_chunk(each, given) for each in listed(place, given, (".pt", ".data"))]
    first = chunks[0]
    if first.shape is not None:
        _, layers, _, width = first.shape
    else:
        names = ("layers", "kv_heads", "head_dim")
        layers, kv_heads, d = (given.need(first.file.place, name) for name in names)
        width = kv_heads * d
    heads = given.heads_of(first.file.place, width)
    given.check(first.file.place, layers=layers)
    pieces = []
    for each in chunks:
        if (each.model, each.dtype) != (first.model, first.dtype):
            each.file.fail("is of another model or dtype than the first chunk", "correct --order")
        if each.shape is not None and (each.shape[1], each.shape[3]) != (layers, width):
            each.file.fail(f"has shape {list(each.shape)}, another than the first chunk")
        start = _HEAD if each.shape is not None else 0
        token = 2 * layers * width * ITEMSIZE[DTYPES[each.dtype]]
        tokens, left = divmod(each.file.size - start, token)
        if left or not tokens:
            each.file.fail(
                f"has {each.file.size - start} bytes of rows, not a multiple of {token} = 2 * "
                f"{layers} layers * {width} entries of {each.dtype}",
                "check --layers, --kv-heads and --head-dim",
            )
        pieces.append(Piece(each.file, start, tokens))
    about = {"source": "lmcache", "model": first.model, "chunks": str(len(chunks))}
    return joined(pieces, layers, heads, DTYPES[first.dtype], about)


def _chunk(place: Location, given: Given) -> _Chunk:
    name = _NAME.fullmatch(place.name)
    if name is None:
        raise CertkError(
            f"{place}: its name is not model@world_size@worker@hash@dtype of LMCache: give the "
            "files as they were named"
        )
    # Tags have a % in them; the number of a layer has none.
    more = [tag for tag in name["more"].split("@") if tag]
    if any("%" not in tag for tag in more):
        raise CertkError(f"{place}: is a layer of a chunk: store chunks without use_layerwise")
    if int(name["ranks"]) != 1:
        raise CertkError(
            f"{place}: has the heads of one of {name['ranks']} workers: store it with one worker"
        )
    dtype = _NAMED.get(name["dtype"])
    if dtype is None:
        raise CertkError(f"{place}: dtype {name['dtype']} is not taken: store {', '.join(_NAMED)}")
    given.check(place, dtype=dtype)
    file = RawFile(place)
    return _Chunk(file, name["model"], dtype, _shape(file, dtype))


def _shape(file: RawFile, dtype: str) -> tuple[int, ...] | None:
    """Return the shape in the head of a chunk; None if there is no head."""
    if not file.place.name.endswith(".data") or file.size < _HEAD:
        return None
    length, form, number, *shape = file.numbers(0, 7, "<i4")[0].tolist()
    if _NUMBERED.get(number) != dtype:
        return None
    fits = shape[0] == 2 and min(shape) > 0
    fits = fits and math.prod(shape) * ITEMSIZE[DTYPES[dtype]] == length
    whole = length == file.size - _HEAD
    # Neither is true of the first numbers of a key.
    if not (fits or whole):
        return None
    if form != _KV_2LTD or not fits:
        file.fail(f"has the head of format {form}, shape {shape}", "format 1, KV_2LTD, is taken")
    if not whole:
        file.fail(f"has {file.size - _HEAD} bytes of rows, and its head says {length}")
    return tuple(shape)
