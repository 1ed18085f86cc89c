"""The layers of an input: which tensors are whose, how they fit together, what is said of them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ..errors import CertkError
from .names import DEFAULT_NAMES, ROLES, Names
from .safetensors import Form

MAX_D = 1 << 20
MAX_N = (1 << 32) - 1
DTYPES = ("F32", "F16", "BF16")

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


def layout(where: str, tensors: Mapping[str, Form], names: Names) -> tuple[Layer, ...]:
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


def _nothing_found(where: str, tensors: Sequence[str], pattern: str) -> str:
    shown = ", ".join(map(repr, tensors[:3])) + (", ..." if len(tensors) > 3 else "")
    return (
        f"{where}: no tensor is named like {pattern} (it holds {shown or 'no tensors'}): "
        f"give the names it uses, for example --names {DEFAULT_NAMES!r}"
    )


def _layer(
    where: str, index: int, found: Mapping[str, str], tensors: Mapping[str, Form], names: Names
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
        if dtype not in DTYPES:
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
