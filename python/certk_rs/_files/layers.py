"""The layers of an input: their tensors, their shapes, the metadata, and warnings."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ..errors import CertkError
from .names import DEFAULT_NAMES, ROLES, Names, infer
from .safetensors import Form, quote
from .transposed import HEAD_MAJOR, LAYOUTS, head_major, misfit, transposition, with_remedy

MAX_D = 1 << 20
DTYPES = ("F32", "F16", "BF16")

_DECIMAL = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_RSQRT = re.compile(r"1/sqrt\(([1-9][0-9]{0,8})\)")
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_FUSED = re.compile(r"(?i)(?:^|[^a-z])(?:qkv|kvq|kv|qk)(?:[^a-z]|$)")


@dataclass(frozen=True)
class Layer:
    """One layer of an input: the names and dtypes of its tensors by role, and its sizes.

    `layout` is how the tensors are stored: "hnd", (heads, rows, d), or "nhd", (rows, heads, d).
    Without queries m is 0, and heads are the kv heads.
    """

    index: int
    names: Mapping[str, str]
    dtypes: Mapping[str, str]
    kv_heads: int
    heads: int
    m: int
    n: int
    d: int
    layout: str = HEAD_MAJOR

    def visible(self, causal_offset: int | None) -> int:
        """Return how many keys, always the first, at least one query sees."""
        return self.n if causal_offset is None else min(max(self.m + causal_offset, 0), self.n)

    def blind(self, causal_offset: int | None) -> int:
        """Return how many queries, always the first, see no key."""
        return 0 if causal_offset is None else min(max(-causal_offset, 0), self.m)


def layout(
    where: str,
    tensors: Mapping[str, Form],
    names: Names,
    layout: str | None = HEAD_MAJOR,
    queries: str = "file",
) -> tuple[Layer, ...]:
    """Return the layers among `tensors` (name -> dtype, shape), by rising number.

    Args:
        where: The beginning of error messages.
        tensors: All tensors of a file.
        names: The pattern of their names.
        layout: The order of axes of all; None: (heads, rows, d), and shapes that look transposed
            are an error.
        queries: "file", that each layer has them, "none", that no layer has any, or "any" of both.

    Raises:
        CertkError: A tensor is missing, queries are there or not there against `queries`, a dtype
            or shape does not fit, or query heads are not a multiple of the kv heads.
    """
    if layout not in (None, *LAYOUTS):
        raise CertkError(f"layout is {layout!r}: give hnd, (heads, rows, d), or nhd")
    found: dict[int, dict[str, str]] = {}
    for name in tensors:
        if (match := names.match(name)) is not None:
            index, role = match
            other = found.setdefault(index, {}).setdefault(role, name)
            if other != name:
                raise CertkError(
                    f"{where}: {quote(other)} and {quote(name)} both are the {role} of layer "
                    f"{index}: remove or rename one"
                )
    if not found:
        raise CertkError(_nothing_found(where, list(tensors), names.pattern))
    asked = next((each["query"] for each in found.values() if "query" in each), None)
    if queries == "none" and asked is not None:
        raise CertkError(f"{where}: tensor {quote(asked)} has queries: leave --queries none out")
    roles = ROLES[:2] if queries != "file" and asked is None else ROLES
    return tuple(
        _layer(where, index, found[index], tensors, names, layout, roles) for index in sorted(found)
    )


def read_metadata(
    where: str, metadata: Mapping[str, str], layers: Sequence[Layer]
) -> tuple[dict[int, float], int | None]:
    """Return the scale of every layer and the causal offset (None: no mask) of an input."""
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
                f"{where}: metadata scale {quote(text)} is not a finite decimal number or "
                "1/sqrt(N): write it as repr(float), or leave it out for d^-1/2"
            )
        scales = dict.fromkeys(scales, scale)
    offset = metadata.get("causal_offset")
    if offset is not None and not _INTEGER.fullmatch(offset):
        raise CertkError(
            f"{where}: metadata causal_offset {quote(offset)} is not an integer: write for example "
            "str(n - m), or leave it out if every query sees every key"
        )
    if offset is not None and layers and not any(layer.m for layer in layers):
        raise CertkError(
            f"{where}: metadata causal_offset is of queries, and there are none: remove it"
        )
    return scales, None if offset is None else int(offset)


def nearest_rsqrt(d: int) -> float:
    """Return the float64 nearest d^-1/2; a power or quotient of floats may be its neighbour."""
    guess = 1.0 / math.sqrt(d)
    for x in (math.nextafter(guess, 0.0), guess, math.nextafter(guess, 1.0)):
        # x is nearest if d^-1/2 lies between the midpoints to its neighbours.
        low, high = ((Fraction(x) + Fraction(math.nextafter(x, to))) / 2 for to in (0.0, 2.0))
        if d * low * low <= 1 <= d * high * high:
            return x
    raise AssertionError(f"unreachable: 1/sqrt({d}) is off by more than two units")


def _nothing_found(where: str, tensors: Sequence[str], pattern: str) -> str:
    shown = ", ".join(map(quote, tensors[:3])) + (", ..." if len(tensors) > 3 else "")
    return (
        f"{where}: no tensor is named like {pattern} (it holds {shown or 'no tensors'}): "
        f"{_names_remedy(tensors, pattern)}"
    )


def _names_remedy(tensors: Sequence[str], pattern: str) -> str:
    """Suggest a pattern of names, one that matches if there is one."""
    found = infer(tensors)
    if found is not None and found != pattern:
        return f"its names would be matched by --names {found!r}"
    fused = next((name for name in tensors if _FUSED.search(name)), None)
    if fused is not None:
        return f"{quote(fused)} looks like several in one: store key, value and query by themselves"
    return f"give the names it uses, for example --names {DEFAULT_NAMES!r}"


def _layer(
    where: str,
    index: int,
    found: Mapping[str, str],
    tensors: Mapping[str, Form],
    names: Names,
    layout: str | None,
    roles: Sequence[str],
) -> Layer:
    for role in roles:
        if role not in found:
            kind = {
                "query": "no queries to certify for: capture them with the keys, or prune with "
                "--queries none --rest codes"
            }
            other = infer(tensors)
            remedy = kind.get(role, "a layer needs key, value and query")
            if other not in (None, names.pattern) and _is_whole(other, tensors, index):
                remedy = f"its names would be matched by --names {other!r}"
            raise CertkError(
                f"{where}: layer {index} has no {role} tensor (names like {names.pattern}): "
                + remedy
            )
    stored = {role: tensors[found[role]] for role in roles}
    for role in roles:
        _check_form(where, found[role], *stored[role])
    shapes = {role: shape[-3:] for role, (_, shape) in stored.items()}
    order = layout or HEAD_MAJOR
    if "query" not in shapes:
        kv_heads, _, d = head_major(shapes["key"], order)
        shapes["query"] = head_major((kv_heads, 0, d), order)
        stored["query"] = (stored["key"][0], shapes["query"])
    complaint = misfit(shapes, order)
    if complaint is not None:
        complaint = with_remedy(complaint, shapes, order)
    elif layout is None:
        complaint = transposition(shapes)
    if complaint is not None:
        role, what = complaint
        dtype, shape = stored[role]
        raise CertkError(f"{where}: tensor {quote(found[role])} ({dtype} {list(shape)}) {what}")
    (kv_heads, n, d), (heads, m, _) = (head_major(shapes[role], order) for role in ("key", "query"))
    dtypes = {role: dtype for role, (dtype, _) in stored.items()}
    return Layer(index, dict(found), dtypes, kv_heads, heads, m, n, d, order)


def _is_whole(pattern: str | None, tensors: Mapping[str, Form], index: int) -> bool:
    """Return True if a pattern finds all three tensors of a layer."""
    matches = map(Names(pattern or DEFAULT_NAMES).match, tensors)
    return {match[1] for match in matches if match and match[0] == index} == set(ROLES)


def _check_form(where: str, name: str, dtype: str, shape: tuple[int, ...]) -> None:
    def wrong(what: str) -> CertkError:
        return CertkError(f"{where}: tensor {quote(name)} ({dtype} {list(shape)}) {what}")

    if dtype not in DTYPES:
        raise wrong("must be F32, F16 or BF16: convert it")
    if len(shape) not in (3, 4) or (len(shape) == 4 and shape[0] != 1):
        raise wrong("must have shape (1, heads, rows, d) or (heads, rows, d): one sequence a file")
    if 0 in shape:
        raise wrong("is empty: every axis must have an entry")
    if shape[-1] > MAX_D:
        raise wrong(f"has vectors longer than {MAX_D}, beyond what the error bounds cover")


def remarks(
    layers: Sequence[Layer], causal_offset: int | None, others: Sequence[str], pattern: str
) -> list[str]:
    """List tensors left out, queries without keys, unseen keys, and more kv heads than keys."""
    found = []
    if others:
        shown = ", ".join(map(quote, others[:3])) + ", ..." * (len(others) > 3)
        found.append(
            f"{len(others)} tensors that are not named like {pattern} are left out: {shown}"
        )
    said: dict[str, list[int]] = {}
    for layer in layers:
        for remark in _of_layer(layer, causal_offset):
            said.setdefault(remark, []).append(layer.index)
    return found + [f"{in_layers(where)}: {remark}" for remark, where in said.items()]


def in_layers(layers: Sequence[int]) -> str:
    """Format rising numbers of layers in a few words: "layers 0-3, 7"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], layer]
        else:
            runs.append([layer])
    shown = ", ".join("-".join(map(str, run)) for run in runs[:8]) + ", ..." * (len(runs) > 8)
    return f"layer{'s' * (len(layers) > 1)} {shown}"


def _of_layer(layer: Layer, causal_offset: int | None) -> list[str]:
    found = []
    blind, unseen = layer.blind(causal_offset), layer.n - layer.visible(causal_offset)
    if blind:
        found.append(
            f"causal_offset {causal_offset} leaves {blind} of {layer.m} queries without any key"
        )
    if unseen:
        found.append(
            f"causal_offset {causal_offset} hides the last {unseen} of {layer.n} keys from every "
            f"query, so none of them is kept; if the queries end with the keys, it is n - m = "
            f"{layer.n - layer.m}"
        )
    if layer.kv_heads > layer.n:
        found.append(
            f"there are more kv heads ({layer.kv_heads}) than keys ({layer.n}), read as "
            f"{layer.layout}: make sure that they are not transposed"
        )
    return found
