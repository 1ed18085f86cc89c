"""Files damaged in every way that can be thought of, from a seed: the same each time.

A file is a set of contents by name, since a cache may have several parts. What is damaged is bytes,
headers as JSON, certificates inside headers, or the index beside the parts.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

Files = dict[str, bytes]

LONG = 10**4200  # Python reads and writes numbers of up to 4300 digits
NUMBERS: list[Any] = [
    *(-1, 0, 1, 2, 3, 4, 7, 8, 16, 24, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64, 2**70, LONG),
    *(1.0, 2.5, 1e308, -0.0, True, False, None, "16", "", [], {}, [[]], {"a": 1}),
]
SHAPES: list[Any] = [
    *([], [2**70], [2**40, 0], [0, 2**62, 2**62], [2**62, 2**62], [2**32, 2**32], [LONG] * 3),
    *([1] * 33, [1] * 1000, [[1], 2], [16, True], [16, 1.0], [-4, -4], [0], [1, 1, 0, 4]),
    *("16", {"0": 1}, 16, None),
]
DTYPES: list[Any] = [
    *("F64", "F32", "F16", "BF16", "U8", "I8", "BOOL", "I16", "U16", "I4", "f32", "", 4, None),
    *(["F32"], "F" * 10**5, "F8_E4M3", "C64"),
]
NAMES = [
    *("layers.0.key", "layers.00.key", "layers.999999999.key", "layers.0.value", "layers.7.query"),
    *("layers.9999999999.key", "", "__metadata__", "layer.0.key", "past_0_key", "k" * 100_000),
    *("layers.0.key\x00", "\u202e\x1b[31m", "layers.-1.key", "layers.\u0660.key", "\ud800"),
    *("layers.0.indices", "layers.0.indptr", "layers.0.tail_mass_upper", "layers.1.lower_bound"),
]
TEXTS: list[Any] = [
    *("", "nan", "inf", "1e999", "-1", "0", "9" * 5000, "1/sqrt(0)", "1/sqrt(64)", "0.5"),
    "x" * 10**5,
    *("-9223372036854775808", "999999999999999999", "\x00", "\u202e", 3, None, [], {}, True, 1e308),
]
LENGTHS = [0, 1, 7, 8, 2**16, 2**24, 2**24 + 1, 2**25, 10**8, 2**31, 2**32, 2**40, 2**63 - 1]
LENGTHS += [2**63, 2**64 - 1]
PARTS: list[Any] = [
    *("../x.safetensors", "/etc/passwd", "x.safetensors", "part1.safetensors", "a/b.safetensors"),
    *("", ".", "..", ".safetensors", "nul\x00.safetensors", "s3://b/x.safetensors", 3, None, []),
    *("part0.safetensors", "x.safetensors.index.json", "no.safetensors", "\ud800.safetensors"),
]


def bombs() -> list[str]:
    """JSON that is small for what it becomes, deep, wide or long."""
    return [
        *("[" * 10**6, '{"a":' * 10**5, "[" * 900 + "]" * 900, '{"a":' + "9" * 10**6 + "}"),
        *('{"a":[' + "0," * 10**6 + "0]}", '{"a":[' + "[]," * 10**6 + "[]]}"),
        '{"a":[' + "{}," * 10**6 + "{}]}",
        "{" + ",".join(f'"{k}":{{}}' for k in range(10**5)) + "}",
        *('{"a":"' + "\\u0000" * 10**6 + '"}', '{"' + "x" * 10**7 + '":1}'),
        *('{"a":1e' + "9" * 10**6, '{"a":[' + "[]," * (5 * 10**6) + "[]]}"),
        '{"__metadata__":{' + ",".join(f'"{k}":"{k}"' for k in range(10**5)) + "}}",
    ]  # fmt: skip


def split(content: bytes) -> tuple[bytes, bytes]:
    """Header text and data of a safetensors file that is in order."""
    stop = 8 + int.from_bytes(content[:8], "little")
    return content[8:stop], content[stop:]


def join(text: str | bytes, data: bytes) -> bytes:
    """Their inverse, whatever the text is."""
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    return len(raw).to_bytes(8, "little") + raw + data


def damage(files: Files, seed: int) -> Files:
    """One to three wounds to one of the files."""
    rng = random.Random(seed)
    files = dict(files)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        name = rng.choice(sorted(files))
        try:
            change = _of_index if name.endswith(".json") else rng.choice(WOUNDS)
            files[name] = change(files[name], rng)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            # An earlier wound has left nothing to this one.
            files[name] = _bytes(files[name], rng)
    return files


def _bytes(content: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, put in, taken out, doubled or swapped."""
    held = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at, more = rng.randrange(len(held) + 1), rng.randrange(1, 40)
        kind = rng.randrange(6)
        if kind == 0 and at < len(held):
            held[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(held):
            held[at] = rng.randrange(256)
        elif kind == 2:
            held[at:at] = rng.randbytes(more)
        elif kind == 3:
            del held[at : at + more]
        elif kind == 4:
            held[at:at] = held[at : at + more]
        else:
            held[at : at + more] = rng.randbytes(len(held[at : at + more]))
    return bytes(held)


def _ends(content: bytes, rng: random.Random) -> bytes:
    """Cut off, lengthened, emptied, or nothing but noise."""
    kind = rng.randrange(6)
    if kind < 3:
        return content[: rng.randrange(len(content) + 1)]
    if kind == 3:
        return content + rng.randbytes(rng.choice([1, 2, 8, 1000]))
    if kind == 4:
        return rng.randbytes(rng.choice([0, 1, 7, 8, 9, 100, 5000]))
    return content[:8] + rng.randbytes(len(content) - 8)


def _length(content: bytes, rng: random.Random) -> bytes:
    """Another length of the header."""
    length = int.from_bytes(content[:8], "little")
    other = rng.choice([*LENGTHS, length - 1, length + 1, len(content), len(content) - 8])
    return (other % 2**64).to_bytes(8, "little") + content[8:]


def _text(content: bytes, rng: random.Random) -> bytes:
    """Signs of the header's text changed, its length kept right."""
    text, data = split(content)
    held = text.decode()
    for _ in range(rng.choice([1, 1, 3])):
        at = rng.randrange(len(held))
        sign = rng.choice([*'0123456789-.eE[]{}",: NIt\\\x00\u202e', "", "NaN", "1e999", "\ud800"])
        held = held[:at] + sign + held[at + rng.randrange(2) :]
    return join(held, data)


def _entries(content: bytes, rng: random.Random) -> bytes:
    """Change the entries of the header, as JSON."""
    text, data = split(content)
    body = json.loads(text)
    names = [name for name in body if name != "__metadata__"]
    one, other = rng.choice(names), rng.choice(names)
    entry, kind = body[one], rng.randrange(12)
    if kind == 0:
        entry["shape"] = rng.choice(SHAPES)
    elif kind == 1:
        entry["shape"][rng.randrange(len(entry["shape"]))] = rng.choice(NUMBERS)
    elif kind == 2:  # as many entries, otherwise arranged
        rng.shuffle(entry["shape"])
    elif kind == 3:
        entry["data_offsets"] = rng.choice([*SHAPES, [4, 0], [0, 0], [LONG, 0], [0, len(data)]])
    elif kind == 4:
        entry["data_offsets"][rng.randrange(2)] = rng.choice([*NUMBERS, len(data), len(data) + 1])
    elif kind == 5:  # overlapping
        shift = rng.choice([-64, -8, -2, -1, 1, 2, 8, 64])
        entry["data_offsets"] = [offset + shift for offset in entry["data_offsets"]]
    elif kind == 6:
        entry["dtype"] = rng.choice(DTYPES)
    elif kind == 7:
        entry.pop(rng.choice(list(entry)))
    elif kind == 8:
        body[one], body[other] = body[other], body[one]
    elif kind == 9:
        body[rng.choice(NAMES)] = body.pop(one)
    elif kind == 10:
        body[one] = rng.choice([*NUMBERS, *SHAPES])
    else:  # the same name twice, or with another's bytes
        said = json.dumps(rng.choice([one, other, *NAMES]))
        return join(json.dumps(body)[:-1] + f", {said}: {json.dumps(body[one])}}}", data)
    return join(json.dumps(body), data)


def _metadata(content: bytes, rng: random.Random) -> bytes:
    """Change the metadata of the header."""
    text, data = split(content)
    body = json.loads(text)
    said = body.setdefault("__metadata__", {})
    if "certk" in said and rng.random() < 0.8:
        said["certk"] = _certificate(said["certk"], rng)
    elif rng.random() < 0.2:
        body["__metadata__"] = rng.choice([*NUMBERS, *SHAPES])
    else:
        said[rng.choice(["scale", "causal_offset", "certk", "more"])] = rng.choice(TEXTS)
    return join(json.dumps(body), data)


def _certificate(text: str, rng: random.Random) -> str:
    """A certificate with a leaf, a branch or some signs changed."""
    if rng.random() < 0.3:
        at = rng.randrange(len(text))
        return text[:at] + rng.choice('0123456789-.eE[]{}",: NIt') + text[at + 1 :]
    body = json.loads(text)
    place, key = body, rng.choice(list(body))
    while isinstance(place[key], dict) and place[key] and rng.random() < 0.85:
        place = place[key]
        key = rng.choice(list(place))
    if rng.random() < 0.2:
        del place[key]
    else:
        place[key] = copy.deepcopy(rng.choice([*NUMBERS, *SHAPES, *DTYPES, *TEXTS, *NAMES]))
    return json.dumps(body, sort_keys=True, separators=(",", ":"))


def _values(content: bytes, rng: random.Random) -> bytes:
    """NaN, infinities and other numbers among the data."""
    text, data = split(content)
    held = bytearray(data)
    at = rng.randrange(max(1, len(held) - 8)) // 8 * 8
    number = rng.choice(["007c", "00fc", "ff7f", "0000c07f", "000080ff", "ff" * 8, "00" * 8])
    held[at : at + len(number) // 2] = bytes.fromhex(number)
    return join(text, bytes(held))


def _of_index(content: bytes, rng: random.Random) -> bytes:
    """An index JSON, as JSON or as bytes."""
    kind = rng.randrange(10)
    if kind == 0:
        return _bytes(content, rng)
    if kind == 1:
        return _ends(content, rng)
    body = json.loads(content)
    names = list(body["weight_map"])
    one = rng.choice(names)
    if kind < 5:
        body["weight_map"][one] = rng.choice(PARTS)
    elif kind == 5:
        body["weight_map"][rng.choice(NAMES)] = body["weight_map"].pop(one)
    elif kind == 6:
        body[rng.choice(["weight_map", "metadata", "more"])] = rng.choice([*NUMBERS, *SHAPES])
    elif kind == 7:
        body["metadata"] = {rng.choice(["scale", "causal_offset", "x"]): rng.choice(TEXTS)}
    elif kind == 8:
        del body["weight_map"][one]
    else:
        said = f"{json.dumps(one)}: {json.dumps(rng.choice(PARTS))}, "
        text = json.dumps(body).replace('"weight_map": {', '"weight_map": {' + said)
        return text.encode("utf-8", "surrogatepass")
    return json.dumps(body).encode()


WOUNDS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    *(_bytes, _ends, _length, _text, _values, _metadata, _metadata),
    *(_entries, _entries, _entries, _entries),
)
