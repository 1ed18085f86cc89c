"""The files: what is read, what is refused and in which words, and how an output is written."""

from __future__ import annotations

import json
import math
import os
import struct
from decimal import Decimal, localcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from certk_rs import CertkError
from certk_rs._files.cache import Cache
from certk_rs._files.certificate import Certificate, Options, TensorFacts, read_certificate
from certk_rs._files.layers import nearest_rsqrt
from certk_rs._files.names import KNOWN_NAMES, Names, infer
from certk_rs._files.output import output_header
from certk_rs._files.tensor_file import SafetensorsFile
from certk_rs._files.values import widen
from cli_fixtures import cache_tensors, raw_file, safetensors_bytes, tensor, write_cache

ENTRY = '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


def test_reads_what_the_reference_implementation_writes(tmp_path: Path) -> None:
    numpy_io = pytest.importorskip("safetensors.numpy")
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(5, dtype=np.float16),
        "empty": np.zeros((0, 3), np.int64),
    }
    numpy_io.save_file(arrays, tmp_path / "x.safetensors", metadata={"k": "v"})
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        assert file.header.metadata == {"k": "v"}
        for name, array in arrays.items():
            np.testing.assert_array_equal(file.read(name), array)


def test_the_reference_implementation_reads_what_is_written(tmp_path: Path) -> None:
    safe_open = pytest.importorskip("safetensors").safe_open
    facts = {
        "z": TensorFacts("F64", (2,), "0" * 64),
        "a": TensorFacts("BF16", (3, 1), "0" * 64),
        "m": TensorFacts("I32", (1,), "0" * 64),
    }
    header = output_header(CERTIFICATE_OF(outputs=facts))
    assert list(header.entries) == ["z", "m", "a"]
    assert len(header.raw) % 8 == 0
    path = tmp_path / "x.safetensors"
    path.write_bytes(header.raw + bytes(16 + 4 + 6))
    with safe_open(path, "numpy") as file:
        assert set(file.keys()) == set(facts)
        assert list(file.metadata()) == ["certk"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "0 bytes, too few"),
        (b"\x01\x02\x03", "3 bytes, too few"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "header length"),
        (raw_file("{}")[:-1], "header length"),
        (raw_file("[]"), "does not begin with '{'"),
        (raw_file(" {}"), "does not begin with '{'"),
        (raw_file("{"), "not valid JSON"),
        (raw_file(b"{\xff}"), "not valid JSON"),
        (raw_file('{"a":NaN}'), "NaN is not JSON"),
        (raw_file('{"a":' + "[" * 100_000), "not valid JSON"),
        (raw_file('{"__metadata__":{"x":1}}'), "must map strings to strings"),
        (raw_file("{" + ENTRY + "," + ENTRY + "}", bytes(4)), "key 'a' twice"),
        (raw_file('{"a":3}'), "exactly dtype, shape and data_offsets"),
        (raw_file("{" + ENTRY.replace("F32", "F99") + "}", bytes(4)), "unknown dtype 'F99'"),
        (raw_file("{" + ENTRY.replace("[1]", "[1.0]") + "}", bytes(4)), "not a list of sizes"),
        (raw_file("{" + ENTRY.replace("[1]", "[true]") + "}", bytes(4)), "not a list of sizes"),
        (raw_file("{" + ENTRY.replace("[1]", "[-1]") + "}", bytes(4)), "not a list of sizes"),
        (raw_file("{" + ENTRY.replace("[0,4]", "[4,0]") + "}", bytes(4)), r"not \[begin, end\]"),
        (raw_file("{" + ENTRY.replace("[1]", "[2]") + "}", bytes(4)), "needs 8 bytes"),
        (raw_file("{" + ENTRY.replace("[0,4]", "[4,8]") + "}", bytes(8)), "leaves a hole"),
        (
            raw_file("{" + ENTRY + "," + ENTRY.replace('"a"', '"b"') + "}", bytes(4)),
            "'b' overlaps another",
        ),
        (raw_file("{" + ENTRY + "}", bytes(3)), "need 4 bytes of data, the file has 3"),
        (raw_file("{" + ENTRY + "}", bytes(5)), "need 4 bytes of data, the file has 5"),
        (b"PK\x03\x04" + bytes(60), "header length"),
        (b"\x80\x04\x95" + bytes(60), "header length"),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(CertkError, match=words) as refused:
        SafetensorsFile(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = safetensors_bytes(cache_tensors(layers=1, n=3), {"scale": "0.5"})
    path = tmp_path / "cut.safetensors"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CertkError, match="cut off"):
            SafetensorsFile(path)


def test_a_directory_or_device_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(CertkError, match="not a regular file"):
        SafetensorsFile(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CertkError, match="not a regular file"):
        SafetensorsFile(tmp_path / "pipe")


def test_a_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_cache(path)
    with Cache(path) as cache:
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(CertkError, match="ends early"):
            cache.check_values()
        with pytest.raises(CertkError, match="was changed"):
            cache.file.check_unchanged(cache.file.identity)


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("batch", [True, False])
def test_reads_a_cache(tmp_path: Path, dtype: str, batch: bool) -> None:
    values = write_cache(tmp_path / "x.safetensors", dtype=dtype, batch=batch)
    with Cache(tmp_path / "x.safetensors") as cache:
        assert [layer.index for layer in cache.layers] == [0, 1]
        layer = cache.layers[1]
        assert (layer.kv_heads, layer.heads, layer.m, layer.n, layer.d) == (2, 4, 3, 24, 4)
        assert cache.scales == {0: 0.5, 1: 0.5}
        assert cache.causal_offset is None
        for role in ("key", "value", "query"):
            stored = widen(cache.read(layer, role), dtype)
            np.testing.assert_array_equal(stored, values[f"layers.1.{role}"].reshape(stored.shape))


@pytest.mark.parametrize(("kv_heads", "heads"), [(2, 6), (3, 3), (1, 4)])
def test_each_head_comes_with_the_keys_of_its_group(
    tmp_path: Path, kv_heads: int, heads: int
) -> None:
    values = write_cache(tmp_path / "x.safetensors", dtype="BF16", kv_heads=kv_heads, heads=heads)
    with Cache(tmp_path / "x.safetensors") as cache:
        found = list(cache.heads(cache.layers[1]))
    assert [head for head, _, _ in found] == list(range(heads))
    for head, queries, keys in found:
        group = head * kv_heads // heads
        np.testing.assert_array_equal(queries, values["layers.1.query"][0, head])
        np.testing.assert_array_equal(keys, values["layers.1.key"][0, group])
    # Widened once for each group, not once for each query head.
    assert len({id(keys) for _, _, keys in found}) == kv_heads


def test_every_bfloat16_and_float16_widens_exactly() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    bits = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):  # of signalling NaNs
        brains = bits.view(ml_dtypes.bfloat16).astype(np.float64)
    for stored, dtype, expected in (
        (bits, "BF16", brains),
        (bits.view(np.float16), "F16", np.array(struct.unpack("<65536e", bits.tobytes()))),
    ):
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(widen(stored[finite], dtype), expected[finite])


@pytest.mark.parametrize("pattern", KNOWN_NAMES)
def test_known_spellings_are_found_and_inferred(tmp_path: Path, pattern: str) -> None:
    stem, words = pattern[: pattern.rindex("{")], pattern[pattern.rindex("{") + 1 : -1].split("|")
    own = dict(zip(("key", "value", "query"), words, strict=True))
    tensors = {}
    for name, stored in cache_tensors().items():
        _, i, role = name.split(".")
        tensors[stem.replace("{i}", i) + own[role]] = stored
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes(tensors, None))
    with Cache(path) as cache:
        assert cache.names.pattern == pattern
        assert len(cache.layers) == 2
        assert cache.others == ()
    found = infer(list(tensors))
    assert found is not None
    for name in tensors:
        assert Names(found).match(name) == Names(pattern).match(name)


def test_other_spellings_by_pattern(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_cache(path, names="model.{i:02}.attn({role})")
    with pytest.raises(CertkError, match=r"model\.00\.attn\(key\).*--names"):
        Cache(path)
    with Cache(path, "model.{i}.attn({key|value|query})") as cache:
        assert [layer.index for layer in cache.layers] == [0, 1]


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "layers.{i}.key",
        "{key|value|query}",
        "{i}.{i}.{key|value|query}",
        "{i}.{key|value}",
        "{i}.{key|key|query}",
        "{i}.{key||query}",
        "{i}.{key|value|query}.{x|y|z}",
        "{i}.{key|value|query}}",
        "{j}.{key|value|query}",
    ],
)
def test_bad_patterns(pattern: str) -> None:
    with pytest.raises(CertkError, match="--names"):
        Names(pattern)


def without(name: str) -> dict[str, Any]:
    return {k: v for k, v in cache_tensors().items() if k != name}


def replaced(name: str, shape: tuple[int, ...], dtype: str = "F16") -> dict[str, Any]:
    return cache_tensors() | {name: tensor(np.ones(shape), dtype)}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, "no tensor is named like"),
        ({"x": tensor(np.ones(1), "F32")}, "no tensor is named like.*'x'"),
        (without("layers.1.key"), "layer 1 has no key tensor"),
        (without("layers.1.value"), "layer 1 has no value tensor"),
        (without("layers.0.query"), "layer 0 has no query tensor.*no queries"),
        (replaced("layers.0.query", (1, 3, 3, 4)), "'layers.0.query'.*3 heads, not a multiple of"),
        (replaced("layers.0.query", (1, 1, 3, 4)), "'layers.0.query'.*1 heads, not a multiple of"),
        (replaced("layers.0.query", (1, 4, 3, 5)), "'layers.0.query'.*must have the d of the key"),
        (replaced("layers.0.query", (1, 4, 0, 4)), "'layers.0.query'.*is empty"),
        (replaced("layers.0.key", (1, 2, 25, 4)), "'layers.0.value'.*kv heads, n and d of the key"),
        (replaced("layers.0.key", (1, 2, 0, 4)), "'layers.0.key'.*is empty"),
        (replaced("layers.0.value", (1, 2, 24, 5)), "'layers.0.value'.*n and d of the key"),
        (replaced("layers.0.key", (2, 2, 24, 4)), "'layers.0.key'.*one sequence a file"),
        (replaced("layers.0.key", (24, 4)), "'layers.0.key'.*must have shape"),
        (
            replaced("layers.0.key", (1, 2, 24, 4), "F64"),
            "'layers.0.key'.*must be F32, F16 or BF16",
        ),
        (
            replaced("layers.0.key", (1, 2, 24, 4), "I32"),
            "'layers.0.key'.*must be F32, F16 or BF16",
        ),
        (cache_tensors() | {"layers.00.key": tensor(np.ones(1), "F16")}, "both are the key of lay"),
        (
            cache_tensors() | cache_tensors(names="layer_{i}_{role}"),
            "fit .* and .*: say which with --names",
        ),
    ],
)
def test_caches_that_are_refused(tmp_path: Path, tensors: dict[str, Any], words: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(safetensors_bytes(tensors, None))
    with pytest.raises(CertkError, match=words) as refused:
        Cache(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("role", ["key", "value", "query"])
def test_values_that_are_not_finite_are_named(
    tmp_path: Path, value: float, dtype: str, role: str
) -> None:
    array = np.ones((1, 4, 3, 4) if role == "query" else (1, 2, 24, 4))
    array[0, 1, 2, 3] = value
    tensors = cache_tensors(dtype=dtype) | {f"layers.1.{role}": tensor(array, dtype)}
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes(tensors, None))
    with (
        Cache(path) as cache,
        pytest.raises(CertkError, match=rf"'layers.1.{role}' is -?(nan|inf) at \[0, 1, 2, 3\]"),
    ):
        cache.check_values()


def test_a_value_far_behind_is_named_by_its_place(tmp_path: Path) -> None:
    # It is read 16 MiB at a time, and each of these is checked in parts.
    array = np.ones((1, 4, 300_000, 4))
    array[0, 3, 290_000, 1] = math.nan
    tensors = cache_tensors() | {"layers.1.query": tensor(array, "F32")}
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes(tensors, None))
    with Cache(path) as cache, pytest.raises(CertkError, match=r"at \[0, 3, 290000, 1\]"):
        cache.check_values()


@pytest.mark.filterwarnings("error")
def test_a_signalling_nan_is_named_without_a_warning(tmp_path: Path) -> None:
    dtype, shape, data = cache_tensors(dtype="BF16")["layers.0.key"]
    tensors = cache_tensors(dtype="BF16")
    tensors["layers.0.key"] = (dtype, shape, b"\x81\x7f" + data[2:])
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes(tensors, None))
    with Cache(path) as cache, pytest.raises(CertkError, match=r"is nan at \[0, 0, 0, 0\]"):
        cache.check_values()


@pytest.mark.parametrize(
    ("text", "scale"),
    [
        ("0.125", 0.125),
        ("-3e-2", -0.03),
        ("0", 0.0),
        ("1/sqrt(32)", nearest_rsqrt(32)),
        (".5", 0.5),
    ],
)
def test_scale_of_the_metadata(tmp_path: Path, text: str, scale: float) -> None:
    write_cache(tmp_path / "x.safetensors", metadata={"scale": text, "causal_offset": "-2"})
    with Cache(tmp_path / "x.safetensors") as cache:
        assert cache.scales == {0: scale, 1: scale}
        assert cache.causal_offset == -2


@pytest.mark.parametrize(
    "metadata",
    [
        {"scale": "nan"},
        {"scale": "1e999"},
        {"scale": ""},
        {"scale": "0x1p3"},
        {"scale": "1_0"},
        {"scale": "1/sqrt(0)"},
        {"scale": "½"},
        {"causal_offset": "1.0"},
        {"causal_offset": ""},
        {"causal_offset": "9" * 40},
    ],
)
def test_bad_metadata(tmp_path: Path, metadata: dict[str, str]) -> None:
    write_cache(tmp_path / "x.safetensors", metadata=metadata)
    with pytest.raises(CertkError, match=next(iter(metadata))):
        Cache(tmp_path / "x.safetensors")


def test_default_scale_is_the_nearest_float64() -> None:
    with localcontext() as context:
        context.prec = 60
        for d in [*range(1, 2050), 4095, 1 << 20]:
            exact = 1 / Decimal(d).sqrt()
            scale = nearest_rsqrt(d)
            for other in (math.nextafter(scale, 0), math.nextafter(scale, 2)):
                assert abs(Decimal(scale) - exact) <= abs(Decimal(other) - exact)


def CERTIFICATE_OF(**fields: Any) -> Certificate:  # noqa: N802
    given: dict[str, Any] = {
        "library": "0",
        "eps": {0: (0.1, 0.25), 10: (0.5,)},
        "bound_eps": None,
        "options": Options(max_keep=0.25),
        "names": "layers.{i}.{key|value|query}",
        "causal_offset": None,
        "scales": {0: 0.5, 10: 0.1, 2: 1e-300},
        "input_headers": ("1" * 64, "2" * 64),
        "inputs": {"é": TensorFacts("F16", (1, 2), "a" * 64)},
        "outputs": {},
    }
    return Certificate(**(given | fields))


def test_certificate_is_canonical_json_with_its_own_hash() -> None:
    import hashlib

    certificate = CERTIFICATE_OF()
    text = certificate.to_json()
    assert read_certificate(text) == (certificate, None)
    body = json.loads(text)
    assert text == json.dumps(body, sort_keys=True, separators=(",", ":"))
    said, body["sha256"] = body["sha256"], ""
    empty = json.dumps(body, sort_keys=True, separators=(",", ":"))
    assert said == hashlib.sha256(empty.encode()).hexdigest()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[0.1,", "[0.2,", "its SHA-256 is not"),
        ("[0.1,", "[0.10,", "canonical"),
        ("[0.1,", "[ 0.1,", "canonical"),
        ("[0.5]", '"5"', "canonical"),
        ("[0.5]", "[true]", "canonical"),
        ('"library":"0"', '"library":0', "canonical"),
        ('"format":2', '"format":2,"more":1', "canonical"),
        ('"format":2', '"format":2.0', "canonical"),
        ('"coverage":1.0,', "", "canonical"),
    ],
)
def test_certificate_with_a_complaint(old: str, new: str, words: str) -> None:
    _, complaint = read_certificate(CERTIFICATE_OF().to_json().replace(old, new))
    assert complaint is not None
    assert words in complaint


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"format":2', '"format":1'),
        ('"format":2', '"format":3'),
        ('"bound_eps":null,', ""),
        ('"bound_eps":null', '"bound_eps":0.1'),
        ('"bound_eps":null', '"bound_eps":{"x":[0.1]}'),
        ("[0.1,", '["x",'),
        ("[0.1,", "[1e999,"),
        ("[0.1,", "[NaN,"),
        ("[0.5]", "0.5"),
        ("[0.5]", "null"),
        ('"input_headers":[', '"input_headers":[1,'),
        ('"input_headers":["' + "1" * 64, '"input_headers":["' + "1" * 63),
        ('"layout":"hnd"', '"layout":"ndh"'),
        ('"proof":"full"', '"proof":"auto"'),
        ('"block_size":1', '"block_size":0'),
        ('"block_size":1', '"block_size":true'),
        ('"block_size":1', f'"block_size":{1 << 32}'),
        ('"coverage":1.0', '"coverage":1'),
        ('"coverage":1.0', '"coverage":0.0'),
        ('"holdout":0.0', '"holdout":1.0'),
        ('"holdout":0.0', '"holdout":0'),
        ('"out_tol":null', '"out_tol":-1.0'),
        ('"out_tol":null', '"out_tol":1'),
        ('"size":null', '"size":-1'),
        ('"size":null', '"size":1.0'),
        ('"granularity":"head"', '"granularity":"row"'),
        ('"keep_first":0', '"keep_first":-1'),
        ('"max_keep":0.25', '"max_keep":1.5'),
        ('"max_keep":0.25', '"max_keep":true'),
        ('"dtype":"F16"', '"dtype":"F17"'),
        ("a" * 64, "A" * 64),
        ('"shape":[1,2]', '"shape":[1,-2]'),
        ('"shape":[1,2]', '"shape":null'),
        ('"scales":{', '"scales":[],"x":{'),
        ("{", "["),
        ("{", ""),
    ],
)
def test_certificate_that_cannot_be_read(old: str, new: str) -> None:
    text = CERTIFICATE_OF().to_json()
    assert old in text
    with pytest.raises(ValueError, match=r"\w"):
        read_certificate(text.replace(old, new, 1))
