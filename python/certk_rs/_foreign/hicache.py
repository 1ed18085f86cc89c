"""Pages of SGLang's HiCache, as its file backend stores them.

A page is `hash_model_rank_ranks.bin`, raw numbers in the layout of the host's memory
(`--hicache-mem-layout`), which files do not tell.
"""

from __future__ import annotations

import re

from .._files.location import Location
from .._files.safetensors import ITEMSIZE
from ..errors import CertkError
from .pieces import Piece, joined, listed
from .source import DTYPES, Foreign, Given, RawFile

_NAME = re.compile(r"(?P<hash>[0-9a-f]{64})_(?P<model>.*)_(?P<rank>[0-9]+)_(?P<ranks>[0-9]+)\.bin")
# Whether a token has the rows of all layers side by side: (2, tokens, layers, heads, d), or not.
LAYOUTS = {"layer_first": False, "page_first": True, "page_first_direct": False}


def read(place: Location, given: Given) -> Foreign:
    """Return the sequence in one page, or in the pages of a directory that the order lists."""
    layout = given.need(place, "page_layout")
    if layout not in LAYOUTS:
        raise CertkError(f"page_layout is {layout!r}: give {', '.join(LAYOUTS)}")
    names = ("layers", "kv_heads", "head_dim", "dtype")
    layers, kv_heads, d, dtype = (given.need(place, name) for name in names)
    token = 2 * layers * kv_heads * d * ITEMSIZE[DTYPES[dtype]]
    pieces: list[Piece] = []
    models = set()
    for each in listed(place, given, (".bin",)):
        models.add(_model(each))
        file = RawFile(each)
        tokens, left = divmod(file.size, token)
        if left or not tokens or (pieces and tokens != pieces[0].tokens):
            page = f"{pieces[0].tokens} tokens of {token} bytes" if pieces else f"{token} a token"
            file.fail(
                f"has {file.size} bytes, where {page} = 2 * {layers} layers * {kv_heads} heads * "
                f"{d} entries of {dtype} are expected",
                "check --layers, --kv-heads, --head-dim and --dtype",
            )
        pieces.append(Piece(file, 0, tokens, LAYOUTS[layout]))
    if len(models) > 1:
        raise CertkError(f"{place}: pages are of {len(models)} models: correct --order")
    about = {"source": "hicache", "model": models.pop(), "pages": str(len(pieces))}
    return joined(pieces, layers, (kv_heads, d), DTYPES[dtype], about)


def _model(place: Location) -> str:
    """Return the model in the name of a page; a `CertkError` if it is not a whole one."""
    name = _NAME.fullmatch(place.name)
    if name is None:
        raise CertkError(
            f"{place}: its name is not hash_model_rank_ranks.bin of a page of keys and values: "
            "give such files as they were named"
        )
    # Ranks of a pipeline or of contexts have more numbers, which do not fit here.
    if (int(name["rank"]), int(name["ranks"])) != (0, 1):
        raise CertkError(f"{place}: has a part of the heads or layers: store it with one rank")
    return name["model"]
