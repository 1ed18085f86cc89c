"""States of llama.cpp: session files (ggsn, version 10) and those of a sequence (ggsq, version 3).

The tokens come first, then the cells of the KV cache with their positions, all keys, a row a cell,
and all values; without flash attention these are transposed. Quantised keys and values are refused:
llama.cpp rotates them before it quantises them, and a file does not tell whether it did. Entries of
rows are in the order of the GGUF model, which differs from that of transformers for some.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._files.location import Location
from .._files.safetensors import ITEMSIZE, STORAGE, Form
from ..errors import CertkError
from .source import Foreign, Given, RawFile, by_head

_KINDS = {0x6767736E: ("session", 10), 0x67677371: ("sequence", 3)}
_TYPES = {0: "F32", 1: "F16", 30: "BF16"}
_QUANTISED = {2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 20: "iq4_nl"}
# Limits of llama.cpp itself: more would be a damaged file, read to no end.
_MOST_STREAMS, _MOST_LAYERS, _MOST_NAME = 256, 512, 256
_ONE = "save one sequence of text (llama_state_seq_save_file)"


class _State:
    """A state, read from its beginning on; `at` is the next byte."""

    def __init__(self, file: RawFile) -> None:
        self.file, self.at = file, 0

    def skip(self, size: int) -> int:
        """Step over some bytes, which the file must have; return where they begin."""
        begin, self.at = self.at, self.at + size
        if self.at > self.file.size:
            self.file.fail(f"ends at byte {self.file.size}, in the middle of its state")
        return begin

    def numbers(self, count: int, kind: str) -> NDArray[Any]:
        size = count * np.dtype(kind).itemsize
        found: NDArray[Any] = self.file.numbers(self.skip(size), count, kind)[0]
        return found

    def u32(self) -> int:
        return int(self.numbers(1, "<u4")[0])


def read(place: Location, given: Given) -> Foreign:
    """Return the one sequence of a state."""
    state = _State(RawFile(place))
    file = state.file
    kind, version = _KINDS.get(state.u32(), ("", 0))
    if not kind:
        file.fail("is not a session or a state of a sequence of llama.cpp", "give such a file")
    if (found := state.u32()) != version:
        file.fail(f"is a {kind} of version {found}, and {version} is read", "save it anew")
    about = {"source": "llama.cpp", "kind": kind}
    about["tokens"] = str(len(state.numbers(state.u32(), "<i4")))
    if kind == "session":
        if (length := state.u32()) > _MOST_NAME:
            file.fail(f"names its model in {length} bytes")
        about["model"] = state.numbers(length, "u1").tobytes().decode("ascii", "replace")
    positions, after = _cells(state)
    about["first_position"] = str(int(positions.min()))
    forms, places, transposed = _rows(state, len(positions), given)
    if any(state.u32() for _ in range(after)):
        file.fail("has several streams with cells", _ONE)
    if state.at != file.size:
        file.fail(
            f"has {file.size - state.at} bytes behind its cells",
            "more than one cache, as of sliding windows (save with --swa-full) or states, is not "
            "taken",
        )
    order = np.argsort(positions)

    def read_layer(layer: int, role: str) -> NDArray[Any]:
        dtype, (kv_heads, n, d) = forms[layer]
        rows = file.numbers(places[layer, role], n * d * kv_heads, STORAGE[dtype])
        across = transposed and role == "value"
        return by_head((rows.reshape(-1, n).T if across else rows.reshape(n, -1))[order], kv_heads)

    return Foreign(forms, read_layer, about)


def _cells(state: _State) -> tuple[NDArray[np.int64], int]:
    """Return positions of the cells of the first stream that has any, and the streams after it."""
    file, after = state.file, state.u32()
    if not 1 <= after <= _MOST_STREAMS:
        file.fail(f"has {after} streams")
    count = 0
    while after and not count:
        count, after = state.u32(), after - 1
    if not count:
        file.fail("has no cell with keys", "save it after the prompt")
    cells = state.numbers(3 * count, "<i4").reshape(count, 3)
    if (cells[:, 1] != 1).any() or (cells[:, 2] != cells[0, 2]).any():
        file.fail(
            "has cells of no or of several sequences, or with positions in two dimensions",
            _ONE,
        )
    positions = cells[:, 0].astype(np.int64)
    if positions.min() < 0 or (np.diff(np.sort(positions)) != 1).any():
        file.fail("has cells whose positions are not consecutive", "save it before a shift")
    return positions, after


def _rows(
    state: _State, cells: int, given: Given
) -> tuple[dict[int, Form], dict[tuple[int, str], int], bool]:
    """Return the form of every layer, where its rows begin, and whether values are transposed."""
    file, transposed, layers = state.file, state.u32(), state.u32()
    if transposed > 1 or not 1 <= layers <= _MOST_LAYERS:
        file.fail(f"has {layers} layers, transposed {transposed}")
    given.check(file.place, layers=layers)
    forms: dict[int, Form] = {}
    places: dict[tuple[int, str], int] = {}
    for role in ("key", "value"):
        for layer in range(layers):
            number = state.u32()
            dtype = _TYPES.get(number)
            if dtype is None:
                name = _QUANTISED.get(number, f"of type {number}")
                file.fail(f"layer {layer} has {role}s {name}", "save it with -ctk f16 -ctv f16")
            if role == "value" and transposed:
                size, width = state.u32(), state.u32()
                row = size * width if size == ITEMSIZE[dtype] else 1
            else:
                row = int(state.numbers(1, "<u8")[0])
            width, left = divmod(row, ITEMSIZE[dtype])
            if left:
                file.fail(f"layer {layer} has rows of {row} bytes of {dtype}")
            places[layer, role] = state.skip(row * cells)
            kv_heads, d = given.heads_of(f"{file.place}: layer {layer}", width)
            form = (dtype, (kv_heads, cells, d))
            if forms.setdefault(layer, form) != form:
                raise CertkError(
                    f"{file.place}: layer {layer} has keys {forms[layer]} and values {form}: a "
                    "cache file holds those of one shape and dtype"
                )
    return forms, places, bool(transposed)
