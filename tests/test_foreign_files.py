"""Files whose headers were damaged or forged: a `CertkError` in one line, or read as they are."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import certk_rs as ck
from certk_rs._safetensors import SafetensorsFile, byte_size, canonical
from cli_fixtures import raw_file, safetensors_bytes, tensor

LONG = 10**4200  # Python reads and writes numbers of up to 4300 digits
SIZES = [
    -1, 2**31, 2**62, 2**63 - 1, 2**63, 2**64, 2**70, LONG, 0, 1, 3, True, False, 1.0, 2.5, 1e308,
    "16", "", None, [], [1], [[[]]], {}, {"a": 1},
]  # fmt: skip
SHAPES = [
    [2**70], [2**40, 0], [0, 2**62, 2**62], [2**62, 2**62], [2**32, 2**32], [LONG] * 3, [1] * 33,
    [1] * 1000, [[1], 2], [16, True], [16, 1.0], [-4, -4], "16", {"0": 1}, 16, None, [],
]  # fmt: skip
DTYPES = ["F64", "F32", "BF16", "U8", "I4", "f32", "", 4, None, ["F32"], "F" * 10**5]


def body_of(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a file as an object, and its data."""
    stop = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:stop]), content[stop:]


def mutations(body: dict[str, Any], rng: random.Random, count: int) -> Iterator[str]:
    """Headers with one to three places changed, as text."""
    names = [name for name in body if name != "__metadata__"]
    for _ in range(count):
        changed = copy.deepcopy(body)
        text = None
        for _ in range(rng.randint(1, 3)):
            name = rng.choice(names)
            entry = changed.get(name)
            kind = rng.randrange(9)
            if not isinstance(entry, dict) or kind == 0:
                changed[name] = rng.choice([*SIZES, *SHAPES])
            elif kind == 1:
                entry["shape"] = rng.choice(SHAPES)
            elif kind == 2 and isinstance(entry.get("shape"), list) and entry["shape"]:
                entry["shape"][rng.randrange(len(entry["shape"]))] = rng.choice(SIZES)
            elif kind == 3 and isinstance(entry.get("data_offsets"), list):
                entry["data_offsets"][rng.randrange(2)] = rng.choice(SIZES)
            elif kind == 4:
                entry["data_offsets"] = rng.choice([*SHAPES, [4, 0], [0, 0], [0, LONG], [LONG, 0]])
            elif kind == 5:
                entry["dtype"] = rng.choice(DTYPES)
            elif kind == 6:
                entry.pop(rng.choice(list(entry)), None)
            elif kind == 7:
                changed["__metadata__"] = rng.choice([*SIZES, *SHAPES, {"a": 1}, {"certk": None}])
            else:
                other = rng.choice(names)
                changed[name], changed[other] = changed.get(other), changed.get(name)
        text = json.dumps(changed)
        kind = rng.randrange(8)
        if kind == 0:  # a name twice
            name = json.dumps(rng.choice(names))
            text = text[:-1] + f", {name}: " + json.dumps(body[json.loads(name)]) + "}"
        elif kind == 1:
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice('0123456789-.eE[]{}",: NIt\\\x00\u202e') + text[at + 1 :]
        elif kind == 2:
            text = text.replace("]", rng.choice(["", "]]", ",NaN]", ",1e999]", ",Infinity]"]), 1)
        yield text


def one_line(error: ck.CertkError, path: Path) -> None:
    assert str(error).startswith(str(path))
    assert len(str(error)) < 2000


def test_mutated_headers_are_refused_or_read_as_they_are(tmp_path: Path) -> None:
    arrays = {
        "a": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
        "b": np.arange(6, dtype=np.float64).reshape(6, 1),
        "empty": np.zeros((0, 5), np.float32),
        "c": np.arange(4, dtype=np.float16),
    }
    dtypes = {"a": "F32", "b": "F64", "empty": "F32", "c": "F16"}
    tensors = {name: tensor(array, dtypes[name]) for name, array in arrays.items()}
    body, data = body_of(safetensors_bytes(tensors, {"k": "v"}))
    path, rng, read = tmp_path / "x.safetensors", random.Random(5), 0
    for text in mutations(body, rng, 2500):
        path.write_bytes(raw_file(text, data))
        try:
            with SafetensorsFile(path) as file:
                for name, entry in file.header.entries.items():
                    raw = b"".join(chunk.tobytes() for chunk in file.chunks(name))
                    assert raw == data[entry.start : entry.stop]
                    assert len(raw) == byte_size(entry.dtype, entry.shape)
                    if entry.dtype in ("F32", "F64", "F16"):
                        assert file.read(name).shape == entry.shape
                assert sum(e.stop - e.start for e in file.header.entries.values()) == len(data)
            read += 1
        except ck.CertkError as error:
            one_line(error, path)
    assert 0 < read < 500


def index_file(path: Path) -> tuple[bytes, ck.KeyIndex]:
    keys = np.random.default_rng(2).standard_normal((2, 110, 6)).astype(np.float32)
    index = ck.KeyIndex.build(keys)
    index.save(path)
    return path.read_bytes(), index


def same_index(one: ck.KeyIndex, other: ck.KeyIndex) -> bool:
    parts = [
        [np.asarray(part).tobytes() for head in index._index.parts() for part in head]
        for index in (one, other)
    ]
    return one.shape == other.shape and one.dtype == other.dtype and parts[0] == parts[1]


def test_mutated_indexes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "index"
    content, index = index_file(path)
    body, data = body_of(content)
    about, rng = json.loads(body["__metadata__"]["certk"]), random.Random(6)

    texts = list(mutations(body, rng, 800))
    for _ in range(1200):
        changed = copy.deepcopy(about)
        for _ in range(rng.randint(1, 2)):
            key = rng.choice(list(changed))
            if key == "shape" and changed[key] == about[key] and rng.random() < 0.7:
                changed[key][rng.randrange(3)] = rng.choice([*SIZES, 109, 111, 112, 5, 7, 8])
            else:
                changed[key] = rng.choice([*SIZES, *SHAPES, "float16", "float64", "0" * 64])
        if rng.random() < 0.1:
            changed["more"] = 1
        texts.append(json.dumps(body | {"__metadata__": {"certk": json.dumps(changed)}}))
    for text in texts:
        path.write_bytes(raw_file(text, data))
        try:
            loaded = ck.KeyIndex.load(path)
        except ck.CertkError as error:
            one_line(error, path)
        else:
            assert same_index(loaded, index)


def test_every_changed_byte_of_a_header_of_an_index_is_found(tmp_path: Path) -> None:
    """Also of the shape and the dtype: as many scales serve 110 keys and 109."""
    path = tmp_path / "index"
    content, _ = index_file(path)
    header = 8 + int.from_bytes(content[:8], "little")
    for at in range(header):
        path.write_bytes(content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :])
        with pytest.raises(ck.CertkError):
            ck.KeyIndex.load(path)
    shorter = content.replace(b"[2, 110, 6]", b"[2, 109, 6]")
    assert shorter != content
    path.write_bytes(shorter)
    with pytest.raises(ck.CertkError, match="SHA-256"):
        ck.KeyIndex.load(path)


@pytest.mark.parametrize(
    "shape",
    [
        [2**70, 6], [2, 2**70, 6], [2, 110, 2**70], [2**63, 110, 6], [2**64, 110, 6], [LONG] * 40,
        [2**40, 110, 6], [2, 2**60, 6], [2, 110, 2**60], [0, 2**62, 2**62], [0, 2**62, 0],
        [2**62, 0, 0], [2, 110, 0], [2, 0, 6], [1] * 1000, [2, 126, 6], [2, 112, 8], [2, 97, 5],
    ],
)  # fmt: skip
def test_forged_shapes_whose_hash_is_right(tmp_path: Path, shape: list[int]) -> None:
    """What a forger writes who knows how: refused, or an index of what it says."""
    path = tmp_path / "index"
    content, _ = index_file(path)
    body, data = body_of(content)
    tensors = {
        name: (entry["dtype"], tuple(entry["shape"]))
        for name, entry in body.items()
        if name != "__metadata__"
    }

    def header(sha256: str) -> bytes:
        about = json.loads(body["__metadata__"]["certk"]) | {"shape": shape, "sha256": sha256}
        return canonical(tensors, {"certk": json.dumps(about)}).raw

    digest = hashlib.sha256(header("0" * 64) + data).hexdigest()
    path.write_bytes(header(digest) + data)
    start = time.monotonic()
    try:
        loaded = ck.KeyIndex.load(path)
    except ck.CertkError as error:
        one_line(error, path)
    else:
        assert list(loaded.shape) == shape
        assert all(0 <= axis - new < 16 for axis, new in zip((2, 112, 8), shape, strict=True))
    assert time.monotonic() - start < 5


def test_forged_without_heads(tmp_path: Path) -> None:
    """No tensors to contradict the shape."""
    path = tmp_path / "index"
    for shape in ([0, 2**70, 2**70], [0, 2**62, 2**62], [0, 2**40, 16], [0, 5, 4], [0, 0, 0]):

        def header(sha256: str, shape: list[int] = shape) -> bytes:
            about = {"format": "certk-key-index", "version": 2, "shape": shape}
            about |= {"dtype": "float32", "sha256": sha256}
            return canonical({}, {"certk": json.dumps(about)}).raw

        path.write_bytes(header(hashlib.sha256(header("0" * 64)).hexdigest()))
        try:
            loaded = ck.KeyIndex.load(path)
        except ck.CertkError as error:
            one_line(error, path)
        else:
            assert list(loaded.shape) == shape


def test_the_version_is_a_whole_number(tmp_path: Path) -> None:
    path = tmp_path / "index"
    content, _ = index_file(path)
    body, data = body_of(content)
    about = json.loads(body["__metadata__"]["certk"])
    for version in (1, 2.0, True, "2", None, LONG, [[2]]):
        changed = json.dumps(about | {"version": version})
        path.write_bytes(raw_file(json.dumps(body | {"__metadata__": {"certk": changed}}), data))
        with pytest.raises(ck.CertkError, match="has format version") as refused:
            ck.KeyIndex.load(path)
        one_line(refused.value, path)


def test_a_product_of_long_numbers_is_never_made(tmp_path: Path) -> None:
    """A shape as long as the header: multiplying it out would take hours."""
    path = tmp_path / "x.safetensors"
    shape = "[" + ",".join(["9" * 4300] * 2000) + "]"
    for text in (shape, f"[{','.join(['9'] * 2_000_000)}]"):
        header = f'{{"a":{{"dtype":"F32","shape":{text},"data_offsets":[0,0]}}}}'
        path.write_bytes(raw_file(header))
        start = time.monotonic()
        with pytest.raises(ck.CertkError, match="'a': shape") as refused, SafetensorsFile(path):
            pass
        one_line(refused.value, path)
        assert time.monotonic() - start < 5
    with pytest.raises(ck.CertkError, match="there is no F32"):
        canonical({"a": ("F32", (LONG,) * 3)}, {})
