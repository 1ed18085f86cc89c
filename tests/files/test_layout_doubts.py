"""Caches that are stored in another order, under other names or in another container than meant.

What can be read is read as its owner says; what looks otherwise is told, with the remedy.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import pickle
import re
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from certk_rs import CertkError
from certk_rs._files.cache import Cache
from certk_rs._files.names import infer
from cli_fixtures import as_float64, cache_tensors, safetensors_bytes, tensor

Shapes = dict[str, tuple[int, ...]]


def shapes_of(kv_heads: int, heads: int, m: int, n: int, d: int = 4) -> Shapes:
    return {"key": (kv_heads, n, d), "value": (kv_heads, n, d), "query": (heads, m, d)}


def swapped(shapes: Shapes, *roles: str) -> Shapes:
    """Heads and rows exchanged, in all tensors if none is named."""
    return {
        role: (b, a, d) if role in roles or not roles else (a, b, d)
        for role, (a, b, d) in shapes.items()
    }


def write(path: Path, shapes: Shapes, batch: bool = False) -> Path:
    rng = np.random.default_rng(0)
    tensors = {
        f"layers.0.{role}": tensor(rng.standard_normal((1, *shape) if batch else shape), "F16")
        for role, shape in shapes.items()
    }
    path.write_bytes(safetensors_bytes(tensors, None))
    return path


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
def test_nhd_is_read_head_by_head(tmp_path: Path, batch: bool, dtype: str) -> None:
    """Against the same cache stored the usual way, whole and in all its parts."""
    usual = cache_tensors(n=24, m=3, heads=4, kv_heads=2, dtype=dtype, batch=batch)
    turned = {}
    for name, (kind, shape, data) in usual.items():
        array = np.frombuffer(data, "<u4" if kind == "F32" else "<u2").reshape(shape)
        other = array.swapaxes(-3, -2)
        turned[name] = (kind, other.shape, other.tobytes())
    (tmp_path / "hnd.safetensors").write_bytes(safetensors_bytes(usual, None))
    (tmp_path / "nhd.safetensors").write_bytes(safetensors_bytes(turned, None))
    buffer = np.empty(24 * 4 * 4 * 4, np.uint8)
    with (
        Cache(tmp_path / "hnd.safetensors") as hnd,
        Cache(tmp_path / "nhd.safetensors", layout="nhd") as nhd,
    ):
        for ours, theirs in zip(hnd.layers, nhd.layers, strict=True):
            assert (theirs.kv_heads, theirs.heads, theirs.m, theirs.n) == (2, 4, 3, 24)
            assert (ours.layout, theirs.layout) == ("hnd", "nhd")
            for role, heads, rows in itertools.product(
                ("key", "value", "query"),
                (slice(None), slice(0, 1), slice(1, 2), slice(1, 1), slice(-1, None)),
                (slice(None), slice(1, 3), slice(0, 0)),
            ):
                whole = hnd.read(ours, role)
                for cache, layer in ((hnd, ours), (nhd, theirs)):
                    for into in (None, buffer):
                        found = cache.read(layer, role, heads, rows=rows, buffer=into)
                        assert found.tobytes() == whole[heads, rows].tobytes()
                        assert found.shape == whole[heads, rows].shape
                        assert into is None or not found.size or np.shares_memory(found, into)
        values = as_float64(usual["layers.1.query"]).reshape(4, 3, 4)
        for head, queries, _ in nhd.heads(nhd.layers[1]):
            np.testing.assert_array_equal(queries, values[head])


def test_nhd_is_read_in_blocks_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from certk_rs._files import tensor_file

    path = write(tmp_path / "x.safetensors", swapped(shapes_of(2, 4, 3, 25)))
    with Cache(path, layout="nhd") as cache:
        whole = cache.read(cache.layers[0], "key")
        for chunk in (1, 17, 33, 50, 100):
            monkeypatch.setattr(tensor_file, "_CHUNK", chunk)
            np.testing.assert_array_equal(cache.read(cache.layers[0], "key"), whole)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        # All of (rows, heads, d).
        (swapped(shapes_of(2, 4, 3, 24)), "query.*3 heads, not a multiple.*--layout nhd"),
        (swapped(shapes_of(2, 4, 24, 24)), "more kv heads.*than keys.*--layout nhd"),
        (swapped(shapes_of(8, 32, 64, 128)), "query.*64 heads, not a mul.*--layout nhd"),
        (swapped(shapes_of(8, 32, 128, 128)), r"more kv heads \(128\) than keys \(8\).*nhd"),
        (swapped(shapes_of(1, 8, 1, 2)), "query.*1 heads, not a multiple.*--layout nhd"),
        # Eight tokens of eight kv heads: nothing but the queries tells.
        (swapped(shapes_of(8, 32, 8, 8)), r"as many heads as there are keys \(8\).*--layout nhd"),
        # One tensor of three.
        (swapped(shapes_of(2, 4, 3, 24), "query"), "query.*it alone looks transposed"),
        (swapped(shapes_of(2, 4, 3, 24), "value"), "value.*one of the two is transposed"),
        (swapped(shapes_of(2, 4, 3, 24), "key"), "value.*one of the two is transposed"),
        (
            swapped(shapes_of(2, 4, 24, 24), "query"),
            "query.*as many heads as there are keys.*it alone",
        ),
        ({**shapes_of(2, 4, 3, 24), "key": (2, 4, 24)}, "value.*vectors as columns"),
    ],
)
@pytest.mark.parametrize("batch", [False, True])
def test_what_looks_transposed_is_told(
    tmp_path: Path, shapes: Shapes, words: str, batch: bool
) -> None:
    path = write(tmp_path / "x.safetensors", shapes, batch)
    with pytest.raises(CertkError, match=words) as refused:
        Cache(path)
    assert str(path) in str(refused.value)
    if "--layout nhd" in words:
        with Cache(path, layout="nhd") as cache:
            assert cache.layers[0].layout == "nhd"


ORDINARY = [
    *((8, 32, 1, 9), (8, 32, 1, 32), (8, 8, 8, 8), (1, 1, 1, 1), (2, 4, 4, 4), (32, 32, 5, 40)),
    (8, 32, 32, 32),  # a prompt as long as there are heads
    (8, 64, 64, 4096),
]
DOUBTFUL = [(8, 32, 2, 3), (24, 24, 2, 2), (8, 32, 16, 32), (3, 3, 1, 1), (4, 4, 64, 4)]


@pytest.mark.parametrize("sizes", ORDINARY + DOUBTFUL)
def test_shapes_are_read_as_they_are_unless_they_are_doubtful(
    tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    path = write(tmp_path / "x.safetensors", shapes_of(*sizes))
    if sizes in DOUBTFUL:
        with pytest.raises(CertkError, match="--layout hnd if"):
            Cache(path)
    with Cache(path, layout="hnd" if sizes in DOUBTFUL else None) as cache:
        layer = cache.layers[0]
        assert (layer.kv_heads, layer.heads, layer.m, layer.n) == sizes
        assert len(cache.warnings) == (sizes[0] > sizes[3])


def test_a_wrong_layout_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", shapes_of(2, 4, 3, 24))
    with pytest.raises(CertkError, match=r"all shapes fit as \(heads, rows, d\).*--layout hnd"):
        Cache(path, layout="nhd")
    with pytest.raises(CertkError, match="layout is 'dnh'"):
        Cache(path, layout="dnh")
    with pytest.raises(CertkError, match=r"the 2 kv heads of the key$"):
        Cache(write(tmp_path / "y.safetensors", shapes_of(2, 3, 5, 24)))


SPELLINGS = {
    "past_{i}_{key|value|query}": "past_{i}_{r}",
    "model.layers.{i}.self_attn.{k|v|q}": "model.layers.{i}.self_attn.{k}",
    "model.layers.{i}.self_attn.{k|v|q}_cache": "model.layers.{i}.self_attn.{k}_cache",
    "model.layers.{i}.self_attn.{k|v|q}_proj": "model.layers.{i}.self_attn.{k}_proj",
    "past_key_values.{i}.{key|value|query}": "past_key_values.{i}.{r}",
    "{key|value|query}_cache.{i}": "{r}_cache.{i}",
    "{k|v|q}{i}": "{k}{i}",
    "{K|V|Q}_{i}": "{K}_{i}",
    "L{i}/{key|value|query}": "L{i:02}/{r}",
    "layer{i}{Key|Value|Query}": "layer{i}{R}",
    "past{Key|Value|Query}{i}": "past{R}{i}",
    "kv.{i}.{keys|values|queries}": "kv.{i}.{s}",
    "h.{i}.attn.0.{key|value|query}": "h.{i}.attn.0.{r}",
    "h.0.attn.{i}.{key|value|query}_states.2": "h.0.attn.{i}.{r}_states.2",
    "model.{i}.attn({key|value|query})": "model.{i}.attn({r})",
    "{i}/{key|value|query}": "{i}/{r}",
    "transformer.h.{i}.attention.{key|value|query}_layer.x": (
        "transformer.h.{i}.attention.{r}_layer.x"
    ),
    "blocks.{i}.KEY_VALUE.{KEY|VALUE|QUERY}": "blocks.{i}.KEY_VALUE.{U}",
    "é {i} [{key|value|query}]": "é {i} [{r}]",
}


def renamed(spelling: str, layers: int = 3) -> dict[str, Any]:
    words = {"key": "keys", "value": "values", "query": "queries"}
    tensors = {}
    for name, stored in cache_tensors(layers=layers).items():
        _, i, role = name.split(".")
        forms = {"r": role, "R": role.capitalize(), "U": role.upper(), "s": words[role]}
        letters = {"k": role[0], "K": role[0].upper()}
        tensors[spelling.format(i=int(i), **forms, **letters)] = stored
    return tensors


@pytest.mark.parametrize("pattern", SPELLINGS)
@pytest.mark.parametrize("layers", [1, 3, 12])
def test_the_pattern_that_would_match_is_told(tmp_path: Path, pattern: str, layers: int) -> None:
    others = {"lm_head.weight": tensor(np.ones(3), "F32"), "rope.2": tensor(np.ones(2), "F32")}
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes(others | renamed(SPELLINGS[pattern], layers), None))
    with pytest.raises(CertkError, match="--names") as refused:
        Cache(path)
    told = str(refused.value).partition("--names ")[2].strip("'")
    # Of one layer any number may be that of the layer.
    assert told == pattern or (layers == 1 and pattern.count(".") > 2)
    with Cache(path, told) as cache:
        assert len(cache.layers) == layers
        assert set(cache.others) == set(others)
    with pytest.raises(CertkError, match=re.escape(f"--names {told!r}")):
        Cache(path, "nothing.{i}.{a|b|c}")


def test_queries_may_be_missing_or_of_another_kind() -> None:
    assert infer([f"past_{i}_{word}" for i in range(3) for word in ("key", "value")]) == (
        "past_{i}_{key|value|query}"
    )
    for words in ("k_cache|v_cache|q", "key|value|q", "keys|values|query"):
        mixed = [f"layers.{i}.{word}" for i in range(3) for word in words.split("|")]
        assert infer(mixed) == f"layers.{{i}}.{{{words}}}"
    for nothing in ([], ["key", "value", "query"], ["a.0.x", "a.1.x"], ["{0}.k", "{0}.v"]):
        assert infer(nothing) is None


def test_names_of_any_kind_take_no_time() -> None:
    for names in (
        ["k1v2q3" * 40 + f"{i}k" for i in range(3000)],
        ["k_" * 2000 + str(i) for i in range(100)],
        ["1k" * 90 + str(i) for i in range(50)],
        [f"{'kvq'[i % 3]}.{i}.{'k.' * (i % 60)}" for i in range(5000)],
    ):
        infer(names)


def test_fused_tensors_and_missing_queries_are_told(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes({"h.0.qkv": tensor(np.ones((2, 3, 4)), "F16")}, None))
    with pytest.raises(CertkError, match=r"'h.0.qkv' looks like several in one"):
        Cache(path)
    two = {name: held for name, held in renamed("past_{i}_{r}").items() if "query" not in name}
    path.write_bytes(safetensors_bytes(two, None))
    with pytest.raises(CertkError, match=re.escape("--names 'past_{i}_{key|value|query}'")):
        Cache(path)
    with pytest.raises(CertkError, match=r"has no query tensor.*no queries to certify for"):
        Cache(path, "past_{i}_{key|value|query}")
    path.write_bytes(safetensors_bytes(renamed("past_{i}_{r}"), None))
    matched = "matched by --names 'past_{i}_{key|value|query}'"
    with pytest.raises(CertkError, match=re.escape(matched)):
        Cache(path, "past_{i}_{key|value|q}")


def torch_file(legacy: bool) -> bytes:
    torch = pytest.importorskip("torch")
    stream = io.BytesIO()
    torch.save({"k": torch.ones(3)}, stream, _use_new_zipfile_serialization=not legacy)
    return stream.getvalue()


def numpy_file(save: Callable[..., None]) -> bytes:
    stream = io.BytesIO()
    save(stream, np.ones(3))
    return stream.getvalue()


def archive(kind: str) -> bytes:
    stream = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(stream, "w") as file:
            file.writestr("notes.txt", "x")
    else:
        with tarfile.open(fileobj=stream, mode="w") as tar:
            tar.addfile(tarfile.TarInfo("notes.txt"))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch_file(False), r"torch.save writes \(.pt.*safetensors.torch.save_file"),
        (lambda: torch_file(True), r"older torch.save writes \(.pt.*safetensors.torch.save_file"),
        (lambda: numpy_file(np.savez), r"a .npz file of NumPy.*safetensors.numpy.save_file"),
        (lambda: numpy_file(np.savez_compressed), r"a .npz file of NumPy"),
        (lambda: numpy_file(np.save), r"a .npy file of NumPy.*safetensors.numpy.save_file"),
        (lambda: b"GGUF" + bytes(100), "a GGUF file"),
        (lambda: pickle.dumps({"a": 1}), "a pickle"),
        (lambda: pickle.dumps({"a": 1}, 2), "a pickle"),
        (lambda: gzip.compress(bytes(1000)), "compressed by gzip: unpack"),
        (lambda: archive("zip"), "a zip archive"),
        (lambda: archive("tar"), "a tar archive"),
        (lambda: b"<!DOCTYPE html><html>", "HTML"),
        (lambda: b"\n  <html>not found", "HTML"),
        (lambda: json.dumps({"a": 1}).encode(), "JSON text"),
        (lambda: b'[{"a": 1}, 2]', "JSON text"),
        (lambda: b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS"),
        (lambda: b"\x89HDF\r\n\x1a\n" + bytes(99), "HDF5"),
        (lambda: np.random.default_rng(0).bytes(99), "cut off or not safetensors"),
    ],
)
def test_other_containers_are_called_what_they_are(
    tmp_path: Path, make: Callable[[], bytes], words: str
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(make())
    with pytest.raises(CertkError, match=words) as refused:
        Cache(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("offset", "words"),
    [
        ("-1", ["leaves 1 of 3 queries without any key", "hides the last 22 of 24 keys"]),
        ("-9", ["leaves 3 of 3 queries without any key", "hides the last 24 of 24 keys"]),
        ("0", ["hides the last 21 of 24 keys.*it is n - m = 21"]),
        ("20", ["hides the last 1 of 24 keys"]),
        ("21", []),
        ("999999", []),
        (None, []),
    ],
)
def test_queries_without_keys_are_warned_of(
    tmp_path: Path, offset: str | None, words: list[str]
) -> None:
    metadata = {} if offset is None else {"causal_offset": offset}
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes(cache_tensors(layers=3), metadata))
    with Cache(path) as cache:
        said = cache.warnings
    assert len(said) == len(words)
    for line, expected in zip(said, words, strict=True):
        assert re.search(expected, line)
        assert line.startswith(f"{path}: layers 0-2: ")


def test_tensors_left_out_are_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    extra = {f"extra{i}": tensor(np.ones(1), "F32") for i in range(5)}
    path.write_bytes(safetensors_bytes(cache_tensors() | extra, None))
    with Cache(path) as cache:
        [said] = cache.warnings
    assert "5 tensors that are not named like layers.{i}" in said
    assert said.endswith("'extra0', 'extra1', 'extra2', ...")
