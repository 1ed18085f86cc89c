"""Files whose headers were damaged or forged: a `CertkError` in one line, or read as they are."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import certk_rs as ck
from certk_rs._files.npy import read_array
from certk_rs._files.safetensors import canonical
from certk_rs._files.tensor_file import SafetensorsFile
from cli_fixtures import answered, raw_file, said
from mutated_files import LONG, damage, split


def body_of(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a file as an object, and its data."""
    text, data = split(content)
    return json.loads(text), data


def one_line(error: ck.CertkError, path: Path) -> None:
    assert str(error).startswith(str(path))
    assert len(str(error)) < 2000


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


def test_damaged_indexes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "index"
    content, index = index_file(path)
    for seed in range(400):
        path.write_bytes(damage({"index": content}, seed)["index"])
        try:
            loaded = ck.KeyIndex.load(path)
        except ck.CertkError as error:
            one_line(error, path)
        else:
            assert same_index(loaded, index)


def test_changed_bytes_of_a_header_of_an_index_are_found(tmp_path: Path) -> None:
    """Also of the shape and the dtype: as many scales serve 110 keys and 109."""
    path = tmp_path / "index"
    content, _ = index_file(path)
    header = 8 + int.from_bytes(content[:8], "little")
    for at in range(0, header, 3):
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
    """Indexes forged with a right hash are refused, or are indexes of that shape."""
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
    start = time.process_time()
    try:
        loaded = ck.KeyIndex.load(path)
    except ck.CertkError as error:
        one_line(error, path)
    else:
        assert list(loaded.shape) == shape
        assert all(0 <= axis - new < 16 for axis, new in zip((2, 112, 8), shape, strict=True))
    assert time.process_time() - start < 5


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
    stated = b'version\\": 2'
    assert content.count(stated) == 1
    path.write_bytes(content.replace(stated, stated[:-1] + b"3"))
    with pytest.raises(ck.CertkError, match="it has format version 3, and 2 is what this reads"):
        ck.KeyIndex.load(path)
    body, data = body_of(content)
    about = json.loads(body["__metadata__"]["certk"])
    for version in (1, 2.0, True, "2", None, LONG, [[2]]):
        changed = json.dumps(about | {"version": version})
        path.write_bytes(raw_file(json.dumps(body | {"__metadata__": {"certk": changed}}), data))
        with pytest.raises(ck.CertkError, match="no index that can be used") as refused:
            ck.KeyIndex.load(path)
        one_line(refused.value, path)


def test_a_product_of_long_numbers_is_never_made(tmp_path: Path) -> None:
    """A shape as long as the header: multiplying it out would take hours."""
    path = tmp_path / "x.safetensors"
    shape = "[" + ",".join(["9" * 4300] * 2000) + "]"
    for text in (shape, f"[{','.join(['9'] * 2_000_000)}]"):
        header = f'{{"a":{{"dtype":"F32","shape":{text},"data_offsets":[0,0]}}}}'
        path.write_bytes(raw_file(header))
        start = time.process_time()
        with pytest.raises(ck.CertkError, match="'a': shape") as refused, SafetensorsFile(path):
            pass
        one_line(refused.value, path)
        assert time.process_time() - start < 5


# ------------------------------------------------------------------------------- .npy and .npz


def npy(header: str, data: bytes = b"", version: int = 1) -> bytes:
    """A file of any header, padded as NumPy pads it."""
    size = 2 if version == 1 else 4
    text = header.encode() + b" " * (-(len(header) + 9 + size) % 64) + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(size, "little") + text + data


def claims(descr: str = "'<f4'", shape: object = (3, 4), fortran: bool = False) -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}"


DATA = np.arange(12, dtype="<f4").tobytes()
BAD_NPY = {
    "more entries than there are": npy(claims(shape=(2**30,)), DATA),
    "in Fortran order": npy(claims(shape=(2**28, 4), fortran=True), DATA),
    "2^62 entries": npy(claims(shape=(2**62,)), DATA),
    "2^62 entries of float16": npy(claims("'<f2'", (2**62,)), DATA),
    "sizes whose product wraps": npy(claims(shape=(2**32, 2**32)), DATA),
    "sizes whose product wraps to 12": npy(claims("'|i1'", (2**62 + 3, 4)), DATA),
    "a size beyond int64": npy(claims(shape=(2**70,)), DATA),
    "a long size": npy(claims(shape=(10**4200, 3)), DATA),
    "rows of nothing": npy(claims(shape=(2**40, 0))),
    "2^62 rows of nothing": npy(claims(shape=(2**31, 2**29, 0))),
    "2^70 rows of nothing": npy(claims(shape=(2**70, 0))),
    "nothing of 2^62": npy(claims(shape=(0, 2**62))),
    "a negative size": npy(claims(shape=(-1,)), DATA),
    "two negative sizes": npy(claims(shape=(-3, -4)), DATA),
    "a truth value": npy(claims(shape=(True, 12)), DATA),
    "a fraction": npy(claims(shape=(3.0, 4)), DATA),
    "a list": npy(claims(shape=[3, 4]), DATA),
    "too many axes": npy(claims(shape=(1,) * 70), DATA),
    "a long shape": npy(claims(shape=(1,) * 5000), DATA),
    "objects": npy(claims("'|O'", (1,)), DATA),
    "objects in a record": npy(claims("[('a', '|O')]", (1,)), DATA),
    "no objects": npy(claims("'|O'", (0,))),
    "items without bytes": npy(claims("'|V0'", (2**62,)), DATA),
    "texts without bytes": npy(claims("'<U0'", (2**40,)), DATA),
    "a wide item": npy(claims(f"('<f4', ({2**40},))", (1,)), DATA),
    "a wide item that is not there": npy(claims(f"('<f4', ({2**40},))", (0,))),
    "another version": npy(claims(), DATA, version=3),
    "no such version": npy(claims(), DATA, version=9),
    "cut off in its data": npy(claims(), DATA)[:-1],
    "cut off in its header": npy(claims())[:40],
    "nothing but magic": b"\x93NUMPY",
    "half of the magic": b"\x93N",
    "no dictionary": npy("[1, 2]", DATA),
    "a deep header": npy("(" * 5000 + ")" * 5000, DATA),
    "code": npy("__import__('os').abort()", DATA),
    "another key": npy(claims()[:-2] + "'x': 1}", DATA),
}  # fmt: skip


def refused_by_select(path: Path, *arguments: object) -> str:
    """The line that `certk select` ends with, soon and without having asked for memory."""
    tracemalloc.start()
    start = time.process_time()
    try:
        code, out, err = said("select", path, "--eps", "0.1", *arguments)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (code, out) == (2, "")
    assert re.fullmatch(r"certk: error: [^\n]{1,1000}\n", err), err
    assert "unexpected" not in err
    assert "not enough memory" not in err
    assert peak < 50_000_000
    assert time.process_time() - start < 10
    return err


@pytest.mark.parametrize("case", BAD_NPY)
def test_scores_whose_header_lies(tmp_path: Path, case: str) -> None:
    path, archived = tmp_path / "scores.npy", tmp_path / "scores.npz"
    path.write_bytes(BAD_NPY[case])
    with zipfile.ZipFile(archived, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", BAD_NPY[case])
    for each in (path, archived):
        assert str(each) in refused_by_select(each)


@pytest.mark.parametrize("option", ["--mask", "--lengths", "--indptr"])
def test_other_arrays_whose_header_lies(tmp_path: Path, option: str) -> None:
    scores, path = tmp_path / "scores.npy", tmp_path / "other.npy"
    np.save(scores, np.zeros(12, np.float32))
    for case in ("more entries than there are", "rows of nothing", "objects"):
        path.write_bytes(BAD_NPY[case])
        assert str(path) in refused_by_select(scores, option, path)


def test_archives_that_lie(tmp_path: Path) -> None:
    path = tmp_path / "scores.npz"

    def refuse(words: str) -> None:
        assert words in refused_by_select(path)

    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("a.npy", npy(claims(), DATA))
    refuse("compressed in a way")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", npy(claims(shape=(2**28,)), DATA))
    content = path.read_bytes()
    at = content.rindex(b"PK\x01\x02") + 24  # what the directory says of its size
    path.write_bytes(content[:at] + (2**30 + 128).to_bytes(4, "little") + content[at + 4 :])
    refuse("claims 1073741952 bytes in a file of")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", b"not an array")
    refuse("cannot be read")
    with zipfile.ZipFile(path, "w") as archive:
        for i in range(30):
            archive.writestr(f"a{i}.npy", b"")
    refuse("holds the arrays a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, ...: name one with")
    with zipfile.ZipFile(path, "w"):
        pass
    refuse("holds the arrays none")


def test_scores_from_no_regular_file(tmp_path: Path) -> None:
    """A pipe would be waited for."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        assert "is not a regular file" in refused_by_select(path)


def test_what_numpy_writes_is_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = tmp_path / "x.npy"
    dtypes = ("f2", "<f4", ">f4", "f8", "?", "i1", "u8", "c16", "S3", "U2", "M8[s]")
    for dtype in (*dtypes, [("a", "f4"), ("b", "i2", 3)]):
        whole = rng.integers(0, 2, (3, 4, 5)).astype("f8")
        array = np.zeros((3, 4, 5), dtype) if isinstance(dtype, list) else whole.astype(dtype)
        for stored in (array, np.asfortranarray(array), array[..., :0], array[:0], array[0, 0, 0]):
            np.save(path, stored)
            assert same_array(read_array(path), stored)
            for save in (np.savez, np.savez_compressed):
                save(tmp_path / "x.npz", stored, b=array)
                assert same_array(read_array(tmp_path / "x.npz", "arr_0"), stored)
                assert same_array(read_array(tmp_path / "x.npz", "b"), array)
    np.savez_compressed(tmp_path / "zeros.npz", np.zeros((300, 4000), np.float32))
    assert same_array(read_array(tmp_path / "zeros.npz"), np.zeros((300, 4000), np.float32))
    path.write_bytes(npy(claims(), DATA, version=2) + b"more")
    assert same_array(read_array(path), np.arange(12, dtype="<f4").reshape(3, 4))


def same_array(one: np.ndarray, other: np.ndarray) -> bool:
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and one.tobytes() == other.tobytes()


def test_scores_without_entries_are_few_rows(tmp_path: Path) -> None:
    for shape, rows in (((3, 0), 3), ((0, 5), 0), ((0, 2**20, 4), 0)):
        np.save(tmp_path / "x.npy", np.zeros(shape, np.float32))
        assert answered("select", tmp_path / "x.npy", "--eps", "0.1")["rows"] == rows
