"""A second verifier of outputs of `certk prune`, made from docs/files.md; it needs only NumPy.

    python verify_one_file.py OUT.safetensors INPUT.safetensors [hnd|nhd]

The last argument is the order of axes of the input, needed where its shapes do not tell. Exit code
0: everything holds; 1: something does not, and one line names the first such thing; 2: a file is
missing or the input cannot be read. It is small rather than fast: both files are in memory as a
whole. Inputs are single files.

Error bounds: with u = 2^-53, R = |scale| |q| max|k| and s = scale q.k in float64, s is off
by at most r = (d + 8) u R, d <= 2^20. T and K, the sums of exp(s - largest) over dropped and kept
keys, add no more than (n + 64) u each in any order, exp and log within 16 units in the last place
included. So x = ln(T / K) is within e = 4 (r + (n + 64) u) + 2^-44 of the real ln(tail / kept), and
a tail mass is proven to be <= b if x + e <= logit(b), and >= b if x - e >= logit(b), where logit(b)
= ln b - ln(1 - b) is moved by 2^-48 |logit(b)| + 2^-48 to the safe side.
"""

from __future__ import annotations

import decimal
import hashlib
import json
import math
import re
import sys
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np

SIZE = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2,
        "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
        "C64": 8}  # fmt: skip
STORED = {"F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8", "I32": "<i4", "I64": "<i8",
          "U8": "u1"}  # fmt: skip
WORDS = ("key|value|query", "keys|values|queries", "k|v|q", "key_states|value_states|query_states")
KNOWN = [stem + "{" + words + "}" for words in WORDS
         for stem in ("layers.{i}.", "layer.{i}.", "layers_{i}_", "layer_{i}_")]  # fmt: skip
FIELDS = {"format", "library", "eps", "bound_eps", "options", "causal_offset", "scales",
          "input_headers", "inputs", "outputs", "sha256"}  # fmt: skip
OPTIONS = {"granularity", "names", "layout", "max_keep", "keep_first", "keep_last", "block_size",
           "coverage", "holdout", "proof", "out_tol", "size", "hot"}  # fmt: skip
OF_FORMAT = {2: {"guard"}, 3: {"key_bits", "value_bits"}}  # the other options of a format
U = 2.0**-53


class Wrong(Exception):  # noqa: N818
    """Something does not hold."""


def need(condition: object, what: str) -> None:
    """Raise `Wrong` unless a condition holds."""
    if not condition:
        raise Wrong(what)


def unique(pairs: list) -> dict:
    """Make a JSON object; refuse a key that stands twice."""
    need(len({key for key, _ in pairs}) == len(pairs), "a key stands twice in JSON")
    return dict(pairs)


def no_constant(text: str) -> None:
    """Refuse NaN and infinities."""
    raise Wrong(f"{text} is not JSON")


def parse(text: str) -> dict:
    """Parse a JSON object strictly."""
    body = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
    need(isinstance(body, dict), "no JSON object")
    return body


class File:
    """A safetensors file in memory, every entry of its header checked."""

    def __init__(self, path: Path) -> None:
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        need(8 < start <= min(len(content), 100_000_008), "the length of the header does not fit")
        self.head, self.data = content[:start], memoryview(content)[start:]
        need(self.head[8:9] == b"{", "no safetensors header")
        self.entries = parse(self.head[8:].decode())
        self.metadata = self.entries.pop("__metadata__", {})
        texts = isinstance(self.metadata, dict) and all(map(is_text, self.metadata.values()))
        need(texts, "metadata are not texts")
        end = 0
        for entry in sorted(self.entries.values(), key=lambda e: e["data_offsets"]):
            need(set(entry) == {"dtype", "shape", "data_offsets"}, "an entry has other fields")
            numbers = [*entry["shape"], *entry["data_offsets"]]
            need(all(type(x) is int and 0 <= x < 2**63 for x in numbers), "sizes are no sizes")
            need(
                entry["data_offsets"][0] == end and len(entry["shape"]) <= 32, "a hole, an overlap"
            )
            begin, end = entry["data_offsets"]
            size = SIZE[entry["dtype"]] * math.prod(entry["shape"])
            need(end - begin == size, "a shape does not fit its bytes")
        need(end == len(self.data), "the data are shorter or longer than the header says")

    def facts(self) -> dict:
        """Return the facts that a certificate states of every tensor."""
        return {name: {"dtype": e["dtype"], "shape": e["shape"],
                       "sha256": hashlib.sha256(self.data[slice(*e["data_offsets"])]).hexdigest()}
                for name, e in self.entries.items()}  # fmt: skip

    def read(self, name: str) -> np.ndarray:
        """Return a tensor as stored (BF16 as its bits)."""
        entry = self.entries[name]
        raw = np.frombuffer(self.data[slice(*entry["data_offsets"])], np.uint8)
        return raw.view(STORED[entry["dtype"]]).reshape(entry["shape"])

    def wide(self, name: str) -> np.ndarray:
        """Return a tensor as float64."""
        raw = self.read(name)
        if self.entries[name]["dtype"] == "BF16":
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float64)


def is_text(value: object) -> bool:
    """Return True for a string."""
    return isinstance(value, str)


def dump(body: object) -> str:
    """Write canonical JSON."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)


def read_certificate(out: File) -> dict:
    """Return the certificate; refuse a text or a header that is not canonical."""
    need(set(out.metadata) == {"certk"}, "the metadata are not one entry certk")
    body = parse(out.metadata["certk"])
    version = body.get("format")
    need(type(version) is int and version in OF_FORMAT, "no certificate of format 2 or 3")
    options = OPTIONS | OF_FORMAT[version]
    need(set(body) == FIELDS and set(body["options"]) == options, "other fields than the format's")
    need(is_text(body["library"]), "the library is no text")
    need(dump(body) == out.metadata["certk"], "the certificate is not in canonical form")
    sealed = hashlib.sha256(dump(body | {"sha256": ""}).encode()).hexdigest()
    need(body["sha256"] == sealed, "the certificate has another SHA-256 than it says")
    need(dump(body["outputs"]) == dump(out.facts()), "a tensor is not the one that was certified")
    order = sorted(out.entries, key=lambda n: (-SIZE[out.entries[n]["dtype"]], n))
    entries, at = {}, 0
    for name in order:
        dtype, shape = out.entries[name]["dtype"], out.entries[name]["shape"]
        span = [at, at := at + SIZE[dtype] * math.prod(shape)]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": span}
    text = json.dumps({"__metadata__": {"certk": out.metadata["certk"]}} | entries,
                      separators=(",", ":")).encode()  # fmt: skip
    text += b" " * (-len(text) % 8)
    need(out.head == len(text).to_bytes(8, "little") + text, "the header is not in canonical form")
    return body


def check_options(o: dict) -> None:
    """Refuse options that nobody can have asked for."""
    counts = (o["keep_first"], o["keep_last"], o["block_size"])
    cap, tol = o["max_keep"], o["out_tol"]
    need(o["granularity"] in ("head", "layer", "token"), "granularity")
    need(o["layout"] in ("hnd", "nhd") and o["proof"] in ("full", "compact", "none"), "options")
    need(all(type(x) is int and x >= 0 for x in counts) and 0 < counts[2] < 2**32, "counts")
    whole = type(cap) is int and cap >= 1
    need(cap is None or whole or (type(cap) is float and 0 < cap <= 1), "max_keep")
    need(type(o["coverage"]) is type(o["holdout"]) is float, "coverage or holdout is no fraction")
    need(0 < o["coverage"] <= 1 and 0 <= o["holdout"] < 1, "coverage or holdout is no fraction")
    need(tol is None or (type(tol) is float and 0 <= tol < math.inf), "out_tol")
    need(o["size"] is None or (type(o["size"]) is int and o["size"] >= 0), "size")
    need(o.get("guard", "none") in ("none", "codes"), "guard")
    bits = o.get("key_bits", 8), o.get("value_bits", 8)
    need(all(type(x) is int for x in bits), "key_bits or value_bits")
    need(bits[0] in (8, 12, 16) and bits[1] in (8, 4), "key_bits or value_bits")
    need(type(o["hot"]) is bool, "hot")
    if o["hot"]:
        need(o["size"] is not None and cap is None and o.get("guard") != "none", "hot")
        need(o["coverage"] == 1 and counts[2] == 1 and o["granularity"] != "token", "hot")


def matcher(pattern: str) -> Callable:
    """Return layer and role of a tensor name by a pattern with one {i} and one {a|b|c}."""
    pieces = re.split(r"(\{[^{}]*\})", pattern)
    words = [piece[1:-1].split("|") for piece in pieces[1::2] if piece != "{i}"]
    need(len(pieces) == 5 and pieces.count("{i}") == 1, "names are no pattern")
    need(len(words[0]) == 3 and len({*words[0], ""}) == 4, "names are no pattern")
    need(not any(c in "{}" for piece in pieces[::2] for c in piece), "names are no pattern")
    roles = dict(zip(words[0], ("key", "value", "query"), strict=True))
    choice = "(?P<role>" + "|".join(map(re.escape, words[0])) + ")"
    fields = ["(?P<i>[0-9]{1,9})" if piece == "{i}" else choice for piece in pieces[1::2]]
    regex = re.compile(re.escape(pieces[0]) + fields[0] + re.escape(pieces[2]) + fields[1]
                       + re.escape(pieces[4]))  # fmt: skip

    def match(name: str) -> tuple[int, str] | None:
        found = regex.fullmatch(name)
        return None if found is None else (int(found["i"]), roles[found["role"]])

    return match


class Layer:
    """One layer of the input, and the statements of the output about it."""

    def __init__(self, i: int, names: dict, given: File, out: File, o: dict) -> None:
        self.i, self.names, self.given, self.out, self.o = i, names, given, out, o
        shapes = {}
        for role, name in names.items():
            shape = given.entries[name]["shape"]
            need(given.entries[name]["dtype"] in ("F32", "F16", "BF16"), "no dtype of a cache")
            need(len(shape) == 3 or (len(shape) == 4 and shape[0] == 1), "no shape of a cache")
            shapes[role] = shape[-3:] if o["layout"] == "hnd" else [shape[-2], shape[-3], shape[-1]]
        self.kv_heads, self.n, self.d = shapes["key"]
        self.heads, self.m, d = shapes.get("query", [self.kv_heads, 0, self.d])
        need(shapes["value"] == shapes["key"] and d == self.d and (self.m or len(names) == 2), "m")
        need(self.heads > 0, "no shapes of a cache")
        need(0 not in shapes["key"] and self.heads % self.kv_heads == 0, "no shapes of a cache")
        need(self.n < 2**32 and self.d <= 2**20, "sizes beyond what is covered")
        for name in names.values():
            need(np.isfinite(given.wide(name)).all(), f"{name}: a number is not finite")
        self.groups = self.kv_heads if o["granularity"] == "head" else 1

    def given_rows(self, role: str, wide: bool) -> np.ndarray:
        """Return a tensor of the input, (heads, rows, d)."""
        name = self.names[role]
        array = self.given.wide(name) if wide else self.given.read(name)
        array = array.reshape(array.shape[-3:])
        return array if self.o["layout"] == "hnd" else array.swapaxes(0, 1)

    def said(self, name: str) -> np.ndarray:
        """Return a tensor of the output."""
        return self.out.read(f"layers.{self.i}.{name}")

    def names_and_forms(self, masses: str) -> dict:
        """Return dtype and shape of every tensor that the output must have of this layer."""
        self.masses = masses
        o, by_head, rows = self.o, self.groups > 1 or self.o["granularity"] == "head", {}

        def length(name: str) -> int:
            shape = self.out.entries.get(f"layers.{self.i}.{name}", {"shape": [0]})["shape"]
            return math.prod(shape)

        index, total = "I32" if self.n < 2**31 else "I64", length("indices")
        kept = [total, self.d] if by_head else [self.kv_heads, total, self.d]
        rows = {role: (self.given.entries[self.names[role]]["dtype"], kept)
                for role in ("key", "value")}  # fmt: skip
        rows["indices"] = index, [total]
        if by_head:
            rows["indptr"] = "I64", [self.kv_heads + 1]
        if o["block_size"] > 1:
            rows["blocks"] = index, [length("blocks")]
            if by_head:
                rows["block_indptr"] = "I64", [self.kv_heads + 1]
        if o["holdout"] > 0:
            rows["held_out"] = "I64", [length("held_out")]
        if o["coverage"] < 1:
            rows["left_out"] = "I64", [length("left_out")]
        if o["proof"] == "full":
            for end in ("upper", "lower"):
                rows[f"tail_mass_{end}"] = masses, [self.heads, self.m]
        if o["proof"] == "compact":
            rows["worst_tail_mass"] = masses, [self.heads]
            if o["holdout"] > 0:
                rows["violations"] = "I64", [self.heads]
        if o["proof"] != "none":
            rows["lower_bound"] = "I64", [self.groups]
            rows["lower_bound_rows"] = "I64", [length("lower_bound_rows")]
            rows["lower_bound_weights"] = "F32", [length("lower_bound_rows")]
        if o.get("guard") == "codes":
            dropped = self.kv_heads * self.n - total * (1 if by_head else self.kv_heads)
            rows |= self.guard_forms(dropped, length("guard_codes"))
        if "key_bits" in o:
            dtypes = {role: rows[role][0] for role in ("key", "value")}
            rows |= self.code_forms(length("key_bare") // self.d, dtypes)
        return {f"layers.{self.i}.{name}": form for name, form in rows.items()}

    def guard_forms(self, dropped: int, size: int) -> dict:
        """Return dtype and shape of the tensors of a guard."""
        g, d = self.kv_heads, self.d
        forms = {"codes": ("U8", [size]), "mean": ("F32", [g, d]), "bounds": ("F64", [g, 6]),
                 "scales": ("BF16", [dropped]), "radii": ("BF16", [dropped]),
                 "gram": ("F64", [g, d * (d + 1) // 2]), "ball": ("F64", [g, d + 1])}  # fmt: skip
        return {f"guard_{name}": form for name, form in forms.items()}

    def code_forms(self, bare: int, dtypes: dict) -> dict:
        """Return dtype and shape of the tensors of codes."""
        g, n, d, low = self.kv_heads, self.n, self.d, self.o["key_bits"] - 8
        blocks, width, matrix = -(-n // 16), -(-d // 16) * 16, ("F64", [g, d * (d + 1) // 2])
        forms = {"key_codes": ("U8", [g, blocks, -(-d // 4) * 64]),
                 "value_codes": ("U8", [g, blocks, 2 * self.o["value_bits"] * width]),
                 "key_bounds": ("F64", [g, 7]), "value_bounds": ("F64", [g, 6]),
                 "value_spread": matrix, "value_spread_bounds": ("F64", [g, 2])}  # fmt: skip
        for role in ("key", "value"):
            forms[f"{role}_scales"] = forms[f"{role}_radii"] = "BF16", [g, n]
            forms[f"{role}_mean"], forms[f"{role}_gram"] = ("F32", [g, d]), matrix
            forms[f"{role}_bare"] = dtypes[role], [bare, d]
        if low:
            forms["key_low"] = "U8", [g, n, width * low // 8]
            forms["key_low_bounds"], forms["key_low_gram"] = ("F64", [g, 3]), matrix
        return forms

    def sets(self, name: str, starts: str) -> list[np.ndarray]:
        """Return positions or blocks of every group."""
        every = self.said(name).astype(np.int64)
        if self.o["granularity"] != "head":
            return [every]
        ends = self.said(starts).tolist()
        need(ends == sorted(ends) and [ends[0], ends[-1]] == [0, len(every)], f"{starts} is none")
        return [every[a:b] for a, b in pairwise(ends)]

    def read(self, visible: int) -> None:
        """Read promises, masses and weights of rows."""
        o, m = self.o, self.m
        self.visible = visible
        self.held = self.said("held_out") if o["holdout"] > 0 else np.empty(0, np.int64)
        left = self.said("left_out") if o["coverage"] < 1 else np.empty(0, np.int64)
        ascending(self.held, m, "held_out")
        ascending(left, self.heads * m, "left_out")
        most = math.ceil(Fraction(repr(o["holdout"])) * m)
        need(
            len(self.held) <= max(0, min(most, m - 1)),
            "more queries are held out than holdout allows",
        )
        self.left = np.zeros((self.heads, m), bool)
        self.left.reshape(-1)[left] = True
        need(not self.left[:, self.held].any(), "a row is held out and left out")
        self.promised = ~self.left
        self.promised[:, self.held] = False
        self.weights = np.zeros((self.heads, m))
        if o["proof"] != "none":
            rows, weights = self.said("lower_bound_rows"), self.said("lower_bound_weights")
            ascending(rows, self.heads * m, "lower_bound_rows")
            need((np.isfinite(weights) & (weights > 0)).all(), "weights are not finite and > 0")
            self.weights.reshape(-1)[rows] = weights
            need(not self.weights[~self.promised].any(), "a row without a promise has a weight")
        self.kept = self.sets("indices", "indptr")
        self.blocks = self.sets("blocks", "block_indptr") if o["block_size"] > 1 else self.kept

    def log_odds(self, head: int, kept: np.ndarray, scale: float, seen: np.ndarray) -> tuple:
        """Return x, e and the lowered softmax over visible keys of every query of a head."""
        q = self.given_rows("query", wide=True)[head]
        k = self.given_rows("key", wide=True)[head * self.kv_heads // self.heads][: self.visible]
        far = np.sqrt((k * k).sum(axis=1).max(initial=0)) * np.sqrt((q * q).sum(axis=1))
        r = (self.d + 8) * U * abs(scale) * far * (1 + 2.0**-20)
        e = 4 * (r + (self.visible + 64) * U) + 2.0**-44
        e = np.where(r <= 100, e, np.nan)  # beyond, nothing is known, and NaN confirms nothing
        s = np.where(np.arange(self.visible) < seen[:, None], scale * (q @ k.T), -np.inf)
        is_kept = np.isin(np.arange(self.visible), kept)
        sides = [np.where(side, s, -np.inf) for side in (~is_kept, is_kept)]
        tops = [side.max(axis=1, initial=-np.inf) for side in sides]
        tops = [np.where(np.isfinite(top), top, 0.0) for top in tops]
        sums = [
            np.exp(side - top[:, None]).sum(axis=1) for side, top in zip(sides, tops, strict=True)
        ]
        some = [(side > -np.inf).any(axis=1) for side in sides]
        x = (tops[0] - tops[1]) + np.log(sums[0]) - np.log(sums[1])
        x = np.where(some[0], np.where(some[1], x, np.inf), -np.inf)
        top = np.maximum(
            *[np.where(any_, top, -np.inf) for any_, top in zip(some, tops, strict=True)]
        )
        weights = np.exp(s - np.where(np.isfinite(top), top, 0.0)[:, None])
        total = np.maximum(weights.sum(axis=1), 2.0**-1000)
        return x, e, weights * (np.exp(-e) / total)[:, None]


def ascending(numbers: np.ndarray, end: int, what: str) -> None:
    """Refuse numbers that do not rise from 0 to below `end`."""
    values = numbers.tolist()
    fine = all(a < b for a, b in pairwise(values))
    need(fine and (not values or (values[0] >= 0 and values[-1] < end)), f"{what}: not ascending")


def logit(b: np.ndarray, side: int) -> np.ndarray:
    """Return ln(b / (1 - b)), moved down (side -1) or up (side 1)."""
    x = np.log(b) - np.log1p(-b)
    return np.where(np.isfinite(x), x + side * 2.0**-48 * (np.abs(x) + 1), x)


def fits(layers: list[list[list]], layout: str) -> bool:
    """Return True if shapes of keys, values and queries fit this order of axes."""
    heads, rows = (0, 1) if layout == "hnd" else (1, 0)
    return all(
        k == v and k[2] == q[2] and q[heads] % k[heads] == 0 and k[rows] < 2**32
        for k, v, q in layers
    )


def layout_of(layers: list[list[list]]) -> str:
    """Find the order of axes in the input by the shapes of all layers."""
    if not fits(layers, "hnd"):
        return "nhd"
    for k, _, q in layers:
        swapped = [[k, k, [q[1], q[0], q[2]]]]
        doubt = q[0] == k[1] != q[1] and (fits([[k, k, q]], "nhd") or fits(swapped, "hnd"))
        need(k[0] <= k[1] and not doubt, "shapes look like either layout: say which it is")
    return "hnd"


def find_layers(body: dict, given: File, out: File, layout: str | None) -> list[Layer]:
    """Find the layers of the input; their names must be known, and those of the output."""
    names, matchers = sorted(given.entries), [matcher(pattern) for pattern in KNOWN]
    known = [m for m in matchers if any((m(n) or (0, ""))[1] == "key" for n in names)]
    need(len(known) <= 1, "two spellings of names in the input")
    match, said = (known or matchers)[0], matcher(body["options"]["names"])
    need([match(n) for n in names] == [said(n) for n in names], "names are not those of the input")
    found: dict[int, dict] = {}
    for name in names:
        if said(name) is not None:
            index, role = said(name)
            need(role not in found.setdefault(index, {}), "two tensors for one role")
            found[index][role] = name
    need(found, "the input has no layers")
    wanted = {"key", "value", "query"}
    if "key_bits" in body["options"] and not any("query" in roles for roles in found.values()):
        wanted = {"key", "value"}  # of no query is anything promised
        need("causal_offset" not in given.metadata, "an offset of queries that are not there")
    for index, roles in found.items():
        need(set(roles) == wanted, f"layer {index} has not its tensors")
    shapes = [
        [given.entries[roles.get(role, roles["key"])]["shape"][-3:]
         for role in ("key", "value", "query")]
        for roles in found.values()
    ]  # fmt: skip
    need(all(len(shape) == 3 and 0 not in shape for each in shapes for shape in each), "shapes")
    layout = layout or layout_of(shapes)
    need(body["options"]["layout"] == layout, f"the input is stored as {layout}")
    return [Layer(i, found[i], given, out, body["options"]) for i in sorted(found)]


def metadata_of(given: File, layers: list[Layer]) -> tuple[dict, int | None]:
    """Return the scales and the causal offset of the input."""
    decimal.getcontext().prec = 60
    text, offset = given.metadata.get("scale"), given.metadata.get("causal_offset")
    decimals = r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?"
    need(offset is None or re.fullmatch("[+-]?[0-9]{1,18}", offset), "causal_offset is no integer")

    def scale(d: int) -> float:
        if text is not None and re.fullmatch(decimals, text):
            return float(text)
        root = re.fullmatch(r"1/sqrt\(([1-9][0-9]{0,8})\)", text or f"1/sqrt({d})")
        need(root, "scale is neither a number nor 1/sqrt(N)")
        return float(1 / decimal.Decimal(int(root[1])).sqrt())

    scales = {str(layer.i): scale(layer.d) for layer in layers}
    return scales, None if offset is None else int(offset)


def check_group(body: dict, group: int, layers: list[Layer], eps: float, bound_eps: float) -> None:
    """Check one set, of some heads of one layer or, by token, of all heads of all layers."""
    o, visible, first = body["options"], layers[0].visible, layers[0]
    kept, size = first.kept[group], o["block_size"]
    ascending(kept, visible, "indices")
    units = -(-visible // size)
    for begin, end in ((0, o["keep_first"]), (visible - min(o["keep_last"], visible), visible)):
        need(set(range(begin, min(end, visible))) <= set(kept.tolist()), "a forced key is missing")
    blocks = np.unique(kept // size)
    need(np.array_equal(blocks, first.blocks[group]), "blocks are not those of the positions")
    need(len(kept) == np.minimum(size, visible - blocks * size).sum(), "a block is kept in part")
    cap = o["max_keep"]
    cap = max(1, math.floor(cap * visible)) if isinstance(cap, float) else cap
    need(cap is None or len(kept) <= cap, "more keys are kept than max_keep allows")
    excused = o["hot"] or (cap is not None and cap < visible and len(kept) + size > cap)
    last = np.arange(visible - min(o["keep_last"], visible), visible) // size
    first_units = -(-min(o["keep_first"], visible) // size)
    free = (np.arange(units) >= first_units) & ~np.isin(np.arange(units), last)
    mixture, budget, least, rows, left = np.zeros(units), 0.0, int((~free).sum()), 0, 0
    heaviest = max(layer.weights.max(initial=0) for layer in layers) or 1.0
    for layer in layers:
        per = layer.heads // layer.groups if layer.m else 0
        for head in range(group * per, (group + 1) * per):
            rows += layer.m - len(layer.held)
            left += int(layer.left[head].sum())
            seen = np.full(layer.m, visible)
            if body["causal_offset"] is not None:
                seen = [min(max(i + body["causal_offset"] + 1, 0), visible) for i in range(layer.m)]
                seen = np.array(seen, np.int64)
            x, e, soft = layer.log_odds(head, kept, body["scales"][str(layer.i)], seen)
            said = check_head(layer, head, x, e, eps, excused)
            limits = np.maximum(eps, said) if bound_eps is None else np.full(layer.m, bound_eps)
            limits = np.where(layer.promised[head], limits, 1.0)
            weights = layer.weights[head] / heaviest
            mixture += np.add.reduceat(weights @ soft, range(0, visible, size)) if visible else 0.0
            budget += float(weights @ limits)
            needs = np.where(limits == 0, -(-seen // size), np.minimum(seen, limits < 1))
            least = max(least, int(needs.max()))
    most = math.floor((1 - Fraction(repr(o["coverage"]))) * rows)
    need(left <= most, "more rows are left out than coverage allows")
    if o["proof"] != "none":
        bound, limit = int(first.said("lower_bound")[group]), len(first.blocks[group])
        limit = units if bound_eps is not None and bound_eps < eps else limit
        need(0 <= bound <= limit, "a lower bound is above what is kept")
        lost = math.fsum(np.sort(mixture[free])[: max(units - bound + 1, 0)])
        proven = lost * (1 - 2.0**-28) > budget * (1 + 2.0**-28) + 2.0**-1000
        need(bound <= least or proven, f"layer {first.i}, group {group}: {bound} is not proven")


def check_head(layer: Layer, head: int, x, e, eps: float, excused: bool) -> np.ndarray:
    """Check the rows of one head; return the most that they lose (m,)."""
    o, where, mine = layer.o, f"layer {layer.i}, head {head}", layer.promised[head]
    within = x + e <= logit(np.array(eps), -1)
    if o["proof"] == "none":
        need(excused or within[mine].all(), f"{where}: a row is not proven to be within eps")
        return np.zeros(layer.m)
    if o["proof"] == "full":
        upper = layer.said("tail_mass_upper")[head].astype(np.float64)
        lower = layer.said("tail_mass_lower")[head].astype(np.float64)
        need(((lower >= 0) & (lower <= upper) & (upper <= 1)).all(), f"{where}: no interval")
        recorded(layer, lower, upper)
        true = (x + e <= logit(upper, -1)) & (x - e >= logit(lower, 1))
        need(true.all(), f"{where}: tail masses are not confirmed")
    else:
        worst = float(layer.said("worst_tail_mass")[head])
        need(0 <= worst <= 1, f"{where}: no mass")
        recorded(layer, np.array([worst]))
        upper = np.full(layer.m, worst)
        need((x + e <= logit(upper, -1))[mine].all(), f"{where}: worst mass is not confirmed")
        mine = np.ones(layer.m, bool)
        if o["holdout"] > 0:
            above = (x - e > logit(np.array(eps), 1))[layer.held].sum()
            may = (~(x + e <= logit(np.array(eps * (1 - 2.0**-20)), -1)))[layer.held].sum()
            need(above <= layer.said("violations")[head] <= may, f"{where}: violations")
    need(excused or (upper[mine] <= eps).all(), f"{where}: over eps, and no max_keep excuses it")
    return upper


def recorded(layer: Layer, *masses: np.ndarray) -> None:
    """Refuse masses that are not 0 and below the least that is recorded."""
    least = 2.0**-126 if layer.masses == "F32" else 2.0**-1000
    need(all(((each == 0) | (each >= least)).all() for each in masses), "a mass is too small")


def check_radius(layer: Layer, group: int, eps: float) -> None:
    """Check that eps times the diameter of a ball around the values is within out_tol."""
    per = layer.kv_heads // layer.groups
    for values in layer.given_rows("value", wide=True)[group * per : (group + 1) * per]:
        values = values[: layer.visible]
        if len(values):
            centre = np.clip(values.mean(axis=0), values.min(axis=0), values.max(axis=0))
            radius = np.sqrt(((values - centre) ** 2).sum(axis=1)).max() * (1 + 2.0**-30)
            need(eps * 2 * radius <= layer.o["out_tol"] * (1 + 2.0**-20), "out_tol is not kept")


def check_guard(layer: Layer) -> None:
    """Check that the guard bounds the dropped rows; see docs/files.md."""
    i, d, out = f"layers.{layer.i}.guard_", layer.d, layer.out
    codes, scales, radii = out.read(i + "codes"), out.wide(i + "scales"), out.wide(i + "radii")
    keys, values = layer.given_rows("key", wide=True), layer.given_rows("value", wide=True)
    at = code = 0
    for head in range(layer.kv_heads):
        gone = np.delete(np.arange(layer.n), layer.kept[head if layer.groups > 1 else 0])
        mine = slice(at, at := at + len(gone))
        lines = codes[code : (code := code + -(-len(gone) // 16) * -(-d // 4) * 64)]
        need(at <= len(scales) and code <= len(codes), "a guard of other keys")
        bounds = layer.said("guard_bounds")[head]
        _, e = left_out(keys[head, gone], by_fours(lines, d), scales[mine], radii[mine],
                        layer.said("guard_mean")[head], bounds)  # fmt: skip
        check_matrix(layer.said("guard_gram")[head], e, bounds[0], bounds[3])
        check_ball(layer.said("guard_ball")[head], values[head, gone])
    need(at == len(scales) and code == len(codes), "a guard of other keys")


def check_ball(ball: np.ndarray, values: np.ndarray) -> None:
    """Check that a ball holds dropped values."""
    need(np.isfinite(ball).all() and ball[-1] >= 0, "a ball is none")
    away = norms(values - ball[:-1]).max(initial=0)
    most = ball[-1] * (1 + (len(ball) + 7) * U)
    need(away <= most, "a dropped value is outside of the ball")


def check_codes(layer: Layer) -> None:
    """Check that codes are off by no more than is said, and that keys without one are there."""
    for head in range(layer.kv_heads):
        e, _ = check_codes_of(layer, "key", head, by_fours(layer.said("key_codes")[head], layer.d))
        if layer.o["key_bits"] > 8:
            check_low(layer, head, e)
        values = by_values(layer.said("value_codes")[head], layer.o["value_bits"])
        _, spread = check_codes_of(layer, "value", head, values)
        f, additions = layer.said("value_spread_bounds")[head]
        check_matrix(layer.said("value_spread")[head], spread, f, additions)
    bare = wide(layer, "key_scales") == 0
    for role in ("key", "value"):
        rows = layer.given_rows(role, wide=False)[bare]
        need(same_bits(rows, layer.said(f"{role}_bare")), "a row without a code is no copy")


def check_codes_of(layer: Layer, role: str, head: int, entries: np.ndarray) -> tuple:
    """Check codes of the keys or values of a head; return what they leave out, and stand for."""
    scales, radii = wide(layer, f"{role}_scales")[head], wide(layer, f"{role}_radii")[head]
    mean, bounds = layer.said(f"{role}_mean")[head], layer.said(f"{role}_bounds")[head]
    if role == "key":
        need(bounds[6] > 0, "no key can be appended")
    else:
        need((scales > 0).all() and bounds[5] == 1, "a value has no code, or is turned")
    rows = layer.given_rows(role, wide=True)[head]
    stand_for, e = left_out(rows, entries, scales, radii, mean, bounds[:6])
    check_matrix(layer.said(f"{role}_gram")[head], e, bounds[0], bounds[3])
    return e, stand_for


def check_low(layer: Layer, head: int, e: np.ndarray) -> None:
    """Check that the low plane leaves of e no more than is said."""
    scales, low = wide(layer, "key_scales")[head], layer.said("key_low")[head]
    bits = layer.o["key_bits"] - 8
    low = (halves(low, axis=1) if bits == 4 else low) - 2.0 ** (bits - 1)
    need((np.abs(low) < 2 ** (bits - 1)).all(), "a low code is out of its range")
    none = ~has_code(low.shape, scales, layer.d)
    need((low[none] == 0).all(), "low codes of no entry, or of a key without a code")
    step = (scales / (2**bits - 1)).astype(np.float32).astype(np.float64)
    e = single(e - (step[:, None] * low[:, : layer.d])[scales > 0])
    f, most, additions = layer.said("key_low_bounds")[head]
    need((norms(e) <= most).all() and 0 <= most < math.inf, "a low code is farther off")
    check_matrix(layer.said("key_low_gram")[head], e, f, additions)


def wide(layer: Layer, name: str) -> np.ndarray:
    """Return a tensor of the output as float64."""
    return layer.out.wide(f"layers.{layer.i}.{name}")


def by_fours(lines: np.ndarray, d: int) -> np.ndarray:
    """Return the bytes of keys, a row for each place in a block of 16."""
    steps = -(-d // 4)
    return lines.reshape(-1, steps, 16, 4).swapaxes(1, 2).reshape(-1, 4 * steps)


def by_values(lines: np.ndarray, bits: int) -> np.ndarray:
    """Return the bytes of values, a row for each place in a block of 16."""
    if bits == 4:
        lines = halves(lines.reshape(len(lines), 2, -1), axis=1) * 16
    return lines.reshape(len(lines), 4, -1, 4).swapaxes(2, 3).reshape(16 * len(lines), -1)


def halves(codes: np.ndarray, axis: int) -> np.ndarray:
    """Return the low halves of bytes, then the high ones."""
    return np.concatenate([codes & 15, codes >> 4], axis=axis)


def has_code(shape: tuple, scales: np.ndarray, d: int) -> np.ndarray:
    """Return where codes of this shape are of an entry of a row that has a code."""
    has = np.zeros(shape, bool)
    has[: len(scales), :d] = scales[:, None] > 0
    return has


def single(x: np.ndarray) -> np.ndarray:
    """Return float64 numbers rounded to float32."""
    return x.astype(np.float32).astype(np.float64)


def norms(rows: np.ndarray) -> np.ndarray:
    """Return the Euclidean norm of every row."""
    return np.sqrt((rows * rows).sum(axis=1))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Return True for arrays of the same shape and bits."""
    bits = f"<u{b.itemsize}"
    return np.array_equal(np.ascontiguousarray(a).view(bits), b.view(bits))


def left_out(
    rows: np.ndarray,
    entries: np.ndarray,
    scales: np.ndarray,
    radii: np.ndarray,
    mean: np.ndarray,
    bounds: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Check codes against rows of a head; return what those that are there stand for, and e."""
    d, has = rows.shape[1], scales > 0
    finite = all(np.isfinite(each).all() for each in (scales, radii[has], mean, bounds))
    need(finite, "numbers of codes are not finite")
    need(not np.signbit(scales).any() and (radii >= 0).all() and (bounds >= 0).all(), "signs")
    need(bounds[4] < 2.0**128, "bounds")
    need(bounds[5] in (1, d & -d), "keys are turned by another power of two")
    none = ~has_code(entries.shape, scales, d)
    need((entries[none] == 128).all(), "bytes of no entry, or of a row without a scale")
    y = rows.astype(np.float32) - mean
    y = (turned(y, int(bounds[5])) if bounds[5] > 1 else y)[has].astype(np.float64)
    stand_for = (scales[:, None] * (entries[: len(rows), :d] - 128.0))[has]
    e = single(y - stand_for)
    size = norms(e)
    need((size <= radii[has]).all() and (size <= bounds[1]).all(), "a code is farther off")
    need((norms(y) <= bounds[2]).all(), "a moved row is longer")
    need(np.abs(rows).max(initial=0) <= bounds[4], "an entry of a row is larger")
    return stand_for, e


def turned(y: np.ndarray, block: int) -> np.ndarray:
    """Change signs and rotate blocks of rows by Hadamard's matrix, in float32."""
    for j in range(y.shape[1]):
        x = (j + 1) * 0x9E3779B97F4A7C15 % 2**64
        if (x ^ x >> 29) * 0xBF58476D1CE4E5B9 % 2**64 >= 2**63:
            y[:, j] = -y[:, j]
    half = 1
    while half < block:
        for begin in range(0, y.shape[1], 2 * half):
            a, b = y[:, begin : begin + half].copy(), y[:, begin + half : begin + 2 * half].copy()
            y[:, begin : begin + half], y[:, begin + half : begin + 2 * half] = a + b, a - b
        half *= 2
    return y


def check_matrix(packed: np.ndarray, e: np.ndarray, f: float, additions: float) -> None:
    """Check that the triangle of a matrix bounds vectors, with a factor f."""
    need(np.isfinite([*packed, f]).all() and f >= 0, "numbers of a matrix are not finite")
    need(0 <= additions < 1e15 and additions % 1 == 0, "additions")
    matrix = np.zeros((e.shape[1], e.shape[1]))
    matrix[np.triu_indices(len(matrix))] = packed
    matrix += np.triu(matrix, 1).T
    need((np.diag(matrix) >= 0).all(), "a square is negative")
    need(np.isfinite(np.trace(matrix)), "a matrix is too large")
    need(is_bounded(e, matrix, f, additions), "codes leave out more than is said")


def is_bounded(e: np.ndarray, matrix: np.ndarray, f: float, additions: float) -> bool:
    """Prove |e q| <= sqrt(q R q) + sqrt(f) |q| for all q: by a U with |e - U root(R)| small."""
    trace = np.trace(matrix)
    if np.linalg.norm(e.T @ e - matrix) <= 5e-13 * trace:
        return True
    lengths, axes = np.linalg.eigh(matrix)
    root = (axes * np.sqrt(np.maximum(lengths, 0))).T
    if np.linalg.norm(root.T @ root - matrix) > (5e-13 + additions * 2.0**-52) * trace:
        return False
    small = np.linalg.qr(e, mode="r")
    a, _, b = np.linalg.svd(small @ root.T, full_matrices=False)
    apart = np.linalg.norm(small - a @ b @ root)
    apart += 1e-13 * (np.linalg.norm(small) + np.linalg.norm(root))
    return bool(apart <= np.sqrt(f) + 2.4e-13 * np.sqrt(trace))


def check(out: File, given: File, layout: str | None) -> int:
    """Raise `Wrong` for the first thing that does not hold; return the number of rows."""
    body = read_certificate(out)
    o = body["options"]
    check_options(o)
    need(dump(body["inputs"]) == dump(given.facts()), "this is not the input that was pruned")
    headers = [hashlib.sha256(given.head).hexdigest()]
    need(body["input_headers"] == headers, "the header of the input was changed")
    layers = find_layers(body, given, out, layout)
    scales, offset = metadata_of(given, layers)
    said = dump([body["scales"], body["causal_offset"]])
    need(said == dump([scales, offset]), "scale or causal_offset is not that of the input")
    token, budgets = o["granularity"] == "token", {"eps": body["eps"]}
    if body["bound_eps"] is not None:
        budgets["bound_eps"] = body["bound_eps"]
    for name, each in budgets.items():
        every = [x for groups in each.values() for x in groups]
        need(
            {i: len(groups) for i, groups in each.items()}
            == {str(layer.i): layer.groups for layer in layers},
            f"{name}: not one a group",
        )
        need(all(type(x) is float and 0 <= x < 1 for x in every), f"{name}: no budgets")
        one = token or (name == "bound_eps" and o["size"] is not None)
        need(not one or len(set(every)) == 1, f"{name}: not the same everywhere")
    sized = o["size"] is not None and o["proof"] != "none" and not o["hot"]
    need(not sized or body["bound_eps"] is not None, "a size needs bound_eps")
    tiny = any(0 < x < 2.0**-100 for groups in body["eps"].values() for x in groups)
    forms: dict = {}
    for layer in layers:
        forms |= layer.names_and_forms("F64" if tiny else "F32")
    held = {name: (e["dtype"], e["shape"]) for name, e in out.entries.items()}
    need(held == forms, "tensors are missing, or others than they must be")
    seen = [layer.n if offset is None else min(max(layer.m + offset, 0), layer.n)
            for layer in layers]  # fmt: skip
    need(not token or len({layer.n for layer in layers}) == 1, "layers of different lengths")
    for layer, visible in zip(layers, [max(seen)] * len(layers) if token else seen, strict=True):
        layer.read(visible)
    if token:
        for name in ("indices", "blocks", "lower_bound"):
            sets = [held.get(f"layers.{layer.i}.{name}") and layer.said(name) for layer in layers]
            need(all(np.array_equal(sets[0], each) for each in sets), f"{name}: not the same")
    together = layers[:1] if token else layers
    total = sum(len(kept) for layer in together for kept in layer.kept)
    need(o["size"] is None or total <= o["size"], "more keys are kept than size allows")
    if sized:
        bounds = [(layer.visible, int(b)) for layer in together for b in layer.said("lower_bound")]
        size = o["block_size"]
        fewest = sum((b - 1) * size + (v - 1) % size + 1 for v, b in bounds if b > 0)
        w = max(x for groups in body["bound_eps"].values() for x in groups)
        need(w == 0 or fewest > o["size"], f"the bounds do not prove that none loses {w} or less")
    for layer in layers:
        for group, kept in enumerate(layer.kept):
            ascending(kept, layer.visible, "indices")
            rows = slice(None) if layer.groups == 1 else group
            for role in ("key", "value"):
                given_rows, copies = layer.given_rows(role, wide=False), layer.said(role)
                if o["granularity"] == "head":
                    begin = sum(map(len, layer.kept[:group]))
                    rows, copies = group, copies[begin : begin + len(kept)]
                need(same_bits(given_rows[rows][..., kept, :], copies), "a row is no copy")
            if o["out_tol"] is not None:
                check_radius(layer, group, body["eps"][str(layer.i)][group])
    for layer in layers:
        if o.get("guard") == "codes":
            check_guard(layer)
        if "key_bits" in o:
            check_codes(layer)
    for layer in together:
        for group in range(layer.groups):
            eps = body["eps"][str(layer.i)][group]
            bound = body["bound_eps"] and body["bound_eps"][str(layer.i)][group]
            check_group(body, group, layers if token else [layer], eps, bound)
    return sum(layer.heads * layer.m for layer in layers)


def main(arguments: list[str]) -> int:
    """Verify one output; return the exit code."""
    if len(arguments) not in (2, 3) or arguments[2:] not in ([], ["hnd"], ["nhd"]):
        print(__doc__.split("\n\n")[1].strip(), file=sys.stderr)
        return 2
    try:
        given = File(Path(arguments[1]))
        Path(arguments[0]).open("rb").close()
    except Exception as error:  # whatever it is, there is no input
        print(f"error: {arguments}: {error}", file=sys.stderr)
        return 2
    try:
        with np.errstate(all="ignore"):
            rows = check(File(Path(arguments[0])), given, *arguments[2:] or [None])
    except Exception as error:  # nonsense of any kind is not an output that holds
        print(f"{arguments[0]}: DOES NOT HOLD: {type(error).__name__}: {error}")
        return 1
    print(f"{arguments[0]}: holds: {rows} rows recomputed from {arguments[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
