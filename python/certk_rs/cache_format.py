"""Cache files: the one place that knows the names, shapes and metadata of inputs and outputs.

**Input.** A safetensors file with, for every layer i, `layers.{i}.key` and `layers.{i}.value` of
shape (1, kv_heads, n, d) or (kv_heads, n, d) and `layers.{i}.query` of shape (1, heads, m, d) or
(heads, m, d), heads a multiple of kv_heads (query heads h*group .. (h+1)*group - 1 share kv head
h), in F32, F16 or BF16. Other spellings are found by themselves (`KNOWN_NAMES`) or told by a
pattern such as `model.{i}.attn.{key|value|query}`: exactly one `{i}` (the layer number) and exactly
one `{a|b|c}`, the three words for key, value and query in this order. Optional metadata: `scale`, a
decimal string or `1/sqrt(N)` (default: the float64 nearest d^-1/2), and `causal_offset`, an integer
(query i sees the keys <= i + offset; default: every query sees every key).

**Output.** One safetensors file in the canonical form of `_safetensors`, self-contained:

    layers.{i}.indices              kept positions of the input, ascending, I32 (I64 if n >= 2^31):
                                    (total,), one kv head after the other, or (kept,) by layer
    layers.{i}.indptr               (kv_heads + 1,) I64, by head only
    layers.{i}.key, .value          (total, d), or (kv_heads, kept, d) by layer: the kept rows
    layers.{i}.tail_mass_upper      (heads, m) F64, and .tail_mass_lower
    layers.{i}.lower_bound          (kv_heads,), or (1,) by layer, I64: no smaller set will do
    layers.{i}.lower_bound_weights  (heads, m) F64: the mixture of the rows that proves it

and one metadata entry `certk`: the `Certificate` as canonical JSON (sorted keys, no spaces,
shortest floats).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._atomic import NewFile
from ._certificate import Certificate, Options, TensorFacts, read_certificate
from ._safetensors import STORAGE, Header, SafetensorsFile, canonical
from .errors import CertkError

__all__ = [
    "Cache",
    "Certificate",
    "Layer",
    "Names",
    "Options",
    "OutputFile",
    "SafetensorsFile",
    "TensorFacts",
    "detect",
    "layout",
    "nearest_rsqrt",
    "output_header",
    "output_tensors",
    "read_certificate",
    "read_metadata",
    "widen",
]

ROLES = ("key", "value", "query")
MAX_D = 1 << 20
MAX_N = (1 << 32) - 1
DEFAULT_NAMES = "layers.{i}.{key|value|query}"
KNOWN_NAMES = tuple(
    stem + words
    for words in (
        "{key|value|query}",
        "{keys|values|queries}",
        "{k|v|q}",
        "{key_states|value_states|query_states}",
    )
    for stem in ("layers.{i}.", "layer.{i}.", "layers_{i}_", "layer_{i}_")
)

# Exponent bits: all ones mean infinity or NaN.
_EXPONENT = {"F32": ("<u4", 0x7F80_0000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
_DECIMAL = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_RSQRT = re.compile(r"1/sqrt\(([1-9][0-9]{0,8})\)")
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


@dataclass(frozen=True)
class Layer:
    """One layer of an input: the names and dtypes of its tensors by role, and its sizes."""

    index: int
    names: Mapping[str, str]
    dtypes: Mapping[str, str]
    kv_heads: int
    heads: int
    m: int
    n: int
    d: int

    def visible(self, causal_offset: int | None) -> int:
        """How many keys at least one query sees (always the first so many)."""
        return self.n if causal_offset is None else min(max(self.m + causal_offset, 0), self.n)


class Names:
    """A pattern of tensor names, compiled. Raises `CertkError` if the pattern is not one."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        pieces = re.split(r"(\{[^{}]*\})", pattern)
        fields = pieces[1::2]
        words = [field[1:-1].split("|") for field in fields if field != "{i}"]
        if (
            len(fields) != 2
            or fields.count("{i}") != 1
            or len(words[0]) != 3
            or len({*words[0], ""}) != 4
            or any(brace in text for text in pieces[::2] for brace in "{}")
        ):
            raise CertkError(
                f"--names {pattern!r}: give one {{i}} for the layer number and one "
                f"{{key|value|query}} with the three words used, for example {DEFAULT_NAMES!r}"
            )
        self._roles = dict(zip(words[0], ROLES, strict=True))
        choice = "(?P<role>" + "|".join(map(re.escape, words[0])) + ")"
        self._regex = re.compile(
            "".join(
                re.escape(piece) if not k % 2 else "(?P<i>[0-9]{1,9})" if piece == "{i}" else choice
                for k, piece in enumerate(pieces)
            )
        )

    def match(self, name: str) -> tuple[int, str] | None:
        """(layer number, role) of a tensor name, None if it is not part of the cache."""
        found = self._regex.fullmatch(name)
        return (int(found["i"]), self._roles[found["role"]]) if found else None


class Cache:
    """An input file, opened; names, shapes and metadata have been checked, the values not yet."""

    def __init__(self, path: Path, pattern: str | None = None) -> None:
        self.path = path
        self.file = SafetensorsFile(path)
        try:
            entries = self.file.header.entries
            self.names = Names(pattern) if pattern is not None else detect(str(path), entries)
            tensors = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
            self.layers = layout(str(path), tensors, self.names)
            self.scales, self.causal_offset = read_metadata(
                str(path), self.file.header.metadata, self.layers
            )
        except BaseException:
            self.file.close()
            raise
        self.others = tuple(name for name in entries if self.names.match(name) is None)

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def read(self, layer: Layer, role: str) -> NDArray[Any]:
        """The stored tensor without its batch axis: (heads, m, d) or (kv_heads, n, d)."""
        raw = self.file.read(layer.names[role])
        return raw.reshape(raw.shape[-3:])

    def heads(self, layer: Layer) -> Iterator[tuple[int, NDArray[np.float64], NDArray[np.float64]]]:
        """Each query head in turn, with its queries (m, d) and its keys (n, d), widened exactly.

        Query heads that share a kv head are given the same array of keys.
        """
        query, key = self.read(layer, "query"), self.read(layer, "key")
        group = layer.heads // layer.kv_heads
        for kv_head in range(layer.kv_heads):
            keys = widen(key[kv_head], layer.dtypes["key"])
            for head in range(kv_head * group, (kv_head + 1) * group):
                yield head, widen(query[head], layer.dtypes["query"]), keys

    def check_values(self, progress: Callable[[int], None]) -> dict[str, TensorFacts]:
        """Read everything once: the hash of every tensor; NaN and infinities are a `CertkError`.

        `progress` is told the number of bytes after every piece.
        """
        facts = {}
        for name, entry in self.file.header.entries.items():
            digest, position = hashlib.sha256(), 0
            for chunk in self.file.chunks(name):
                digest.update(chunk.data)
                if self.names.match(name) is not None:
                    self._check_finite(name, chunk, position)
                position += len(chunk)
                progress(len(chunk))
            facts[name] = TensorFacts(entry.dtype, entry.shape, digest.hexdigest())
        return facts

    def _check_finite(self, name: str, chunk: NDArray[np.uint8], position: int) -> None:
        entry = self.file.header.entries[name]
        unsigned, ones = _EXPONENT[entry.dtype]
        bits = chunk.view(unsigned)
        bad = np.flatnonzero((bits & ones) == ones)
        if len(bad):
            first = int(bad[0])
            with np.errstate(invalid="ignore"):  # the NaN may be a signalling one
                value = widen(chunk.view(STORAGE[entry.dtype])[first : first + 1], entry.dtype)[0]
            index = np.unravel_index(first + position // bits.itemsize, entry.shape)
            place = ", ".join(str(int(axis)) for axis in index)
            raise CertkError(
                f"{self.path}: tensor {name!r} is {value} at [{place}]: a cache must be finite"
            )


def layout(
    where: str, tensors: Mapping[str, tuple[str, tuple[int, ...]]], names: Names
) -> tuple[Layer, ...]:
    """The layers among `tensors` (name -> dtype, shape), by rising number.

    Raises `CertkError` (beginning with `where`) for a missing tensor, a layer without queries, a
    dtype or shape that does not fit, query heads that are not a multiple of the kv heads.
    """
    found: dict[int, dict[str, str]] = {}
    for name in tensors:
        if (match := names.match(name)) is not None:
            index, role = match
            other = found.setdefault(index, {}).setdefault(role, name)
            if other != name:
                raise CertkError(
                    f"{where}: {other!r} and {name!r} both are the {role} of layer {index}: "
                    "remove or rename one"
                )
    if not found:
        raise CertkError(_nothing_found(where, list(tensors), names.pattern))
    return tuple(_layer(where, index, found[index], tensors, names) for index in sorted(found))


def read_metadata(
    where: str, metadata: Mapping[str, str], layers: Sequence[Layer]
) -> tuple[dict[int, float], int | None]:
    """The scale of every layer and the causal offset (None: no causal mask) of an input."""
    text = metadata.get("scale")
    scales = {layer.index: nearest_rsqrt(layer.d) for layer in layers}
    if text is not None:
        scale = math.nan
        if _DECIMAL.fullmatch(text):
            scale = float(text)
        elif rsqrt := _RSQRT.fullmatch(text):
            scale = nearest_rsqrt(int(rsqrt[1]))
        if not math.isfinite(scale):
            raise CertkError(
                f"{where}: metadata scale {text!r} is not a finite decimal number or 1/sqrt(N): "
                "write it as repr(float), or leave it out for d^-1/2"
            )
        scales = dict.fromkeys(scales, scale)
    offset = metadata.get("causal_offset")
    if offset is not None and not _INTEGER.fullmatch(offset):
        raise CertkError(
            f"{where}: metadata causal_offset {offset!r} is not an integer: write for example "
            "str(n - m), or leave it out if every query sees every key"
        )
    return scales, None if offset is None else int(offset)


def nearest_rsqrt(d: int) -> float:
    """The float64 nearest d^-1/2 (a power or a quotient of floats may miss it by one)."""
    guess = 1.0 / math.sqrt(d)
    for x in (math.nextafter(guess, 0.0), guess, math.nextafter(guess, 1.0)):
        # x is nearest if d^-1/2 lies between the midpoints to its neighbours.
        low, high = ((Fraction(x) + Fraction(math.nextafter(x, to))) / 2 for to in (0.0, 2.0))
        if d * low * low <= 1 <= d * high * high:
            return x
    raise AssertionError(f"unreachable: 1/sqrt({d}) is off by more than two units")


def widen(raw: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    """Stored F32, F16 or BF16 (its 16 bits) as float64, exactly.

    Also where the processor was told to take subnormal numbers for zero (torch.set_flush_denormal):
    those are made of integers.
    """
    if dtype == "F16":
        return raw.astype(np.float64)
    bits = raw.astype(np.uint32) << 16 if dtype == "BF16" else raw.view(np.uint32)
    wide = bits.view(np.float32).astype(np.float64)
    size = bits & np.uint32(0x7FFFFFFF)
    small = (size > 0) & (size < 1 << 23)
    if small.any():
        signs = np.where(bits[small] >> 31 == 1, -(2.0**-149), 2.0**-149)
        wide[small] = signs * size[small]
    return wide


def output_tensors(
    layer: Layer, granularity: str, kept: Sequence[int]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names, dtypes and shapes of one layer of an output that keeps `kept[g]` keys in group g."""
    stem, rows = f"layers.{layer.index}.", (layer.heads, layer.m)
    total = sum(kept)
    by_head = granularity == "head"
    pruned = (total, layer.d) if by_head else (layer.kv_heads, total, layer.d)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        stem + "indices": ("I32" if layer.n < 1 << 31 else "I64", (total,)),
        stem + "key": (layer.dtypes["key"], pruned),
        stem + "value": (layer.dtypes["value"], pruned),
        stem + "tail_mass_upper": ("F64", rows),
        stem + "tail_mass_lower": ("F64", rows),
        stem + "lower_bound": ("I64", (layer.kv_heads if by_head else 1,)),
        stem + "lower_bound_weights": ("F64", rows),
    }
    if by_head:
        tensors[stem + "indptr"] = ("I64", (layer.kv_heads + 1,))
    return tensors


def output_header(certificate: Certificate) -> Header:
    """The one header that goes with a certificate: its outputs, and itself as the only metadata."""
    tensors = {name: (facts.dtype, facts.shape) for name, facts in certificate.outputs.items()}
    return canonical(tensors, {"certk": certificate.to_json()})


class OutputFile:
    """Writes one output, tensor by tensor in any order; context manager, see `NewFile`.

    The length of the header is known before the hashes are, so the data can go to its place at once
    and no more than one tensor need be in memory.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
        certificate: Certificate,
    ) -> None:
        self._file = NewFile(path)
        self._certificate = certificate
        self._facts = {
            name: TensorFacts(dtype, shape, "0" * 64) for name, (dtype, shape) in tensors.items()
        }
        self._missing = set(tensors)
        self._header = self._make_header()

    def _make_header(self) -> Header:
        return output_header(replace(self._certificate, outputs=self._facts))

    def __enter__(self) -> OutputFile:
        self._file.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self._file.__exit__(*args)

    def write(self, name: str, array: NDArray[Any]) -> None:
        """Write one tensor; `array` in the storage type of its dtype, C order."""
        facts = self._facts[name]
        array = np.ascontiguousarray(array, STORAGE[facts.dtype])
        if array.shape != facts.shape:
            raise AssertionError(f"{name}: {array.shape} is not the planned {facts.shape}")
        data = array.reshape(-1).view(np.uint8).data
        self._facts[name] = replace(facts, sha256=hashlib.sha256(data).hexdigest())
        entry = self._header.entries[name]
        self._file.write_at(len(self._header.raw) + entry.start, data)
        self._missing.remove(name)

    def commit(self) -> None:
        """Write the header, and give the file its name."""
        if self._missing:
            raise AssertionError(f"never written: {sorted(self._missing)}")
        self._file.write_at(0, self._make_header().raw)
        self._file.commit()


def detect(where: str, tensors: Iterable[str]) -> Names:
    """The one known spelling that occurs among the tensor names, the default if none does.

    Raises `CertkError` (beginning with `where`) if several do.
    """
    held = list(tensors)
    candidates = [
        names
        for names in map(Names, KNOWN_NAMES)
        if any((match := names.match(name)) and match[1] == "key" for name in held)
    ]
    if len(candidates) > 1:
        both = " and ".join(names.pattern for names in candidates)
        raise CertkError(f"{where}: its tensors fit {both}: say which with --names")
    return candidates[0] if candidates else Names(DEFAULT_NAMES)


def _nothing_found(where: str, tensors: Sequence[str], pattern: str) -> str:
    shown = ", ".join(map(repr, tensors[:3])) + (", ..." if len(tensors) > 3 else "")
    return (
        f"{where}: no tensor is named like {pattern} (it holds {shown or 'no tensors'}): "
        f"give the names it uses, for example --names {DEFAULT_NAMES!r}"
    )


def _layer(
    where: str,
    index: int,
    found: Mapping[str, str],
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    names: Names,
) -> Layer:
    def wrong(role: str, what: str) -> CertkError:
        dtype, shape = tensors[found[role]]
        return CertkError(f"{where}: tensor {found[role]!r} ({dtype} {list(shape)}) {what}")

    for role in ROLES:
        if role not in found:
            kind = {"query": "no queries to certify for: capture them with the keys"}
            raise CertkError(
                f"{where}: layer {index} has no {role} tensor (names like {names.pattern}): "
                + kind.get(role, "a layer needs key, value and query")
            )
    sizes = {}
    for role in ROLES:
        dtype, shape = tensors[found[role]]
        if dtype not in _EXPONENT:
            raise wrong(role, "must be F32, F16 or BF16: convert it")
        if len(shape) not in (3, 4) or (len(shape) == 4 and shape[0] != 1):
            raise wrong(
                role, "must have shape (1, heads, rows, d) or (heads, rows, d): one sequence a file"
            )
        if 0 in shape:
            raise wrong(role, "is empty: every axis must have an entry")
        sizes[role] = shape[-3:]
    (kv_heads, n, d), (heads, m, _) = sizes["key"], sizes["query"]
    if sizes["value"] != sizes["key"]:
        raise wrong("value", f"must have the kv heads, n and d of the key: {kv_heads}, {n}, {d}")
    if sizes["query"][2] != d:
        raise wrong("query", f"must have the d of the key, which is {d}")
    if heads % kv_heads:
        raise wrong(
            "query", f"has {heads} heads, not a multiple of the {kv_heads} kv heads of the key"
        )
    if d > MAX_D:
        raise wrong("key", f"has vectors longer than {MAX_D}, beyond what the error bounds cover")
    if n > MAX_N:
        raise wrong("key", f"has more than {MAX_N} keys, the most that are counted")
    dtypes = {role: tensors[found[role]][0] for role in ROLES}
    return Layer(index, dict(found), dtypes, kv_heads, heads, m, n, d)
