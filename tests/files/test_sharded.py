"""Caches in several files with an index: read as one, and refused where the files disagree."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from certk_rs import CertkError, prune, verify
from certk_rs._files.cache import Cache
from certk_rs._files.sharded import MAX_INDEX, open_tensors, parts_of
from certk_rs.audit import audit
from cli_fixtures import as_float64, cache_tensors, safetensors_bytes, tensor

PARTS = ["x-00001-of-00003.safetensors", "x-00002-of-00003.safetensors", "z.safetensors"]
INDEX = "x.safetensors.index.json"


def write(
    folder: Path,
    metadata: dict[str, Any] | None = None,
    of_parts: tuple[dict[str, str] | None, ...] = (None, {}, {"format": "pt"}),
    layers: int = 4,
) -> dict[str, Any]:
    """A cache whose tensors are dealt out to the parts in turn; its tensors."""
    tensors = cache_tensors(layers=layers)
    weight_map = {name: PARTS[k % 3] for k, name in enumerate(tensors)}
    for part, said in zip(PARTS, of_parts, strict=True):
        own = {name: held for name, held in tensors.items() if weight_map[name] == part}
        (folder / part).write_bytes(safetensors_bytes(own, said))
    body = {"metadata": {"total_size": 99} | (metadata or {}), "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(body))
    return tensors


def test_shards_are_one_cache(tmp_path: Path) -> None:
    tensors = write(tmp_path, {"scale": "0.5"})
    whole = tmp_path / "whole.safetensors"
    whole.write_bytes(safetensors_bytes(tensors, {"scale": "0.5"}))
    with Cache(tmp_path / INDEX) as cache, Cache(whole) as single:
        assert (cache.layers, cache.scales) == (single.layers, single.scales)
        assert cache.check_values() == single.check_values()
        for layer in cache.layers:
            for role, name in layer.names.items():
                expected = as_float64(tensors[name])[0]
                np.testing.assert_array_equal(cache.read(layer, role), expected)
                np.testing.assert_array_equal(cache.read(layer, role, slice(1, 2)), expected[1:2])
        assert cache.file.size == sum((tmp_path / p).stat().st_size for p in [INDEX, *PARTS])
        headers = []
        for part in PARTS:
            content = (tmp_path / part).read_bytes()
            headers.append(content[: 8 + int.from_bytes(content[:8], "little")])
        assert cache.file.header_sha256s() == [
            hashlib.sha256(each).hexdigest() for each in [(tmp_path / INDEX).read_bytes(), *headers]
        ]
        assert single.file.header_sha256s() == [single.file.header_sha256()]
        assert parts_of(cache.path) == set(PARTS)
    assert cache.file.identity != single.file.identity


def test_an_output_of_shards_is_verified_against_them(tmp_path: Path) -> None:
    tensors = write(tmp_path, {"scale": "0.5"})
    job = prune(tmp_path, tmp_path / "out", 0.1, proof="full")
    for against in (tmp_path, tmp_path / INDEX):
        verdict = verify(tmp_path / "out", against)
        assert verdict.holds, verdict.summary()
        [output] = verdict.outputs
        assert output.confirmed_rows == output.rows > 0
        assert output.confirmed_lower_bounds == output.lower_bounds > 0
        assert output.source == tmp_path / INDEX
    assert job.outputs[0].name == "x.safetensors"

    key = tensors["layers.1.key"][2]
    part = next(tmp_path / each for each in PARTS if key in (tmp_path / each).read_bytes())
    part.write_bytes(part.read_bytes().replace(key, bytes([key[0] ^ 1]) + key[1:]))
    changed = verify(tmp_path / "out", tmp_path / INDEX)
    assert not changed.holds
    assert "input layers.1.key" in str(changed.outputs[0].findings[0])


@pytest.mark.parametrize("changed", [INDEX, *PARTS])
def test_a_change_of_any_file_is_noticed(tmp_path: Path, changed: str) -> None:
    write(tmp_path)
    with Cache(tmp_path / INDEX) as cache:
        cache.file.check_unchanged(cache.file.identity)
        with (tmp_path / changed).open("ab") as file:
            file.write(b" ")
        with pytest.raises(CertkError, match="was changed while"):
            cache.file.check_unchanged(cache.file.identity)


def test_an_index_that_was_replaced_is_noticed(tmp_path: Path) -> None:
    write(tmp_path)
    with Cache(tmp_path / INDEX) as cache:
        content = (tmp_path / INDEX).read_bytes()
        (tmp_path / "new").write_bytes(content)
        (tmp_path / "new").replace(tmp_path / INDEX)
        with pytest.raises(CertkError, match="was changed while"):
            cache.file.check_unchanged(cache.file.identity)


def test_parts_may_be_links_to_where_the_bytes_are(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    write(tmp_path / "blobs")
    for k, name in enumerate([INDEX, *PARTS]):
        (tmp_path / "blobs" / name).rename(tmp_path / "blobs" / str(k))
        (tmp_path / "snapshot" / name).symlink_to(f"../blobs/{k}")
    with Cache(tmp_path / "snapshot" / INDEX) as cache:
        assert len(cache.layers) == 4


@pytest.mark.parametrize(
    ("of_index", "of_parts", "offset"),
    [
        ({"causal_offset": "5"}, (None, None, None), 5),
        ({}, ({"causal_offset": "6"}, {"causal_offset": "6"}, {"other": "x"}), 6),
        ({"causal_offset": "7"}, ({"causal_offset": "7"}, None, {"format": "np"}), 7),
        ({"format": 3}, ({"format": "a"}, {"format": "b"}, None), None),
    ],
)
def test_metadata_come_from_wherever_they_are(
    tmp_path: Path, of_index: dict[str, Any], of_parts: Any, offset: int | None
) -> None:
    write(tmp_path, of_index, of_parts)
    with Cache(tmp_path / INDEX) as cache:
        assert cache.causal_offset == offset


@pytest.mark.parametrize(
    ("of_index", "of_parts", "words"),
    [
        ({"scale": 0.5}, (None, None, None), "metadata scale is 0.5, and must be a string"),
        ({"causal_offset": 3}, (None, None, None), "causal_offset is 3, and must be a string"),
        ({"scale": "1"}, (None, {"scale": "1.0"}, None), "'scale' is '1.0', but '1' in"),
        ({}, ({"scale": "1"}, {"scale": "2"}, None), "'scale' is '2', but '1' in .*00001-of"),
    ],
)
def test_metadata_that_disagree_are_refused(
    tmp_path: Path, of_index: dict[str, Any], of_parts: Any, words: str
) -> None:
    write(tmp_path, of_index, of_parts)
    with pytest.raises(CertkError, match=words):
        Cache(tmp_path / INDEX)


# What is not the name of a part, or leads to another directory.
ELSEWHERE = [
    *("../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..\\x.safetensors"),
    *("C:x.safetensors", "s3://b/x.safetensors", ".safetensors", "x\0.safetensors", "x.bin"),
    *("\ud800.safetensors", "..", "", 3, None, [PARTS[0]]),
]


def of_map(name: str, part: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["weight_map"].update({name: part})


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        *(
            (of_map("layers.0.key", name), "not the name of a .safetensors file")
            for name in ELSEWHERE
        ),
        (of_map("layers.0.key", PARTS[1]), "is in this part, but .* says it is in 'x-00002"),
        (of_map("new", PARTS[1]), "'new' is not in 'x-00002.*where the index says"),
        (
            lambda body: body["weight_map"].pop("layers.0.key"),
            "'layers.0.key' is in this part, but",
        ),
        (lambda body: body.update(weight_map={}), "weight_map is empty"),
        (lambda body: body.update(weight_map=[]), "JSON object with a weight_map"),
        (lambda body: body.pop("weight_map"), "JSON object with a weight_map"),
        (lambda body: body.update(metadata="x"), "metadata is not an object"),
        (lambda body: body.update(metadata=None), "metadata is not an object"),
    ],
)
def test_an_index_that_is_not_right_is_refused(
    tmp_path: Path, edit: Callable[[dict[str, Any]], None], words: str
) -> None:
    write(tmp_path)
    body = json.loads((tmp_path / INDEX).read_text())
    edit(body)
    (tmp_path / INDEX).write_text(json.dumps(body))
    with pytest.raises(CertkError, match=words) as refused:
        Cache(tmp_path / INDEX)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "3", "null", "{", '{"weight_map": NaN}', "[" * 100_000, "\ufeff{}"),
        '{"weight_map": {"a": "x.safetensors", "a": "x.safetensors"}}',
        '{"weight_map": {"a": ' + "9" * 5000 + "}}",
        '{"weight_map":' * 20_000,
        "\udcff",
    ],
)
def test_what_is_no_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CertkError, match=INDEX) as refused:
        Cache(tmp_path / INDEX)
    assert len(str(refused.value)) < 1000


def test_a_tensor_in_two_parts_and_a_missing_part_are_refused(tmp_path: Path) -> None:
    tensors = write(tmp_path)
    content = {"layers.0.key": tensors["layers.0.key"], "extra": tensor(np.ones(1), "F32")}
    (tmp_path / PARTS[2]).write_bytes(safetensors_bytes(content, None))
    with pytest.raises(CertkError, match=r"'layers.0.key' is in this part, but"):
        Cache(tmp_path / INDEX)
    (tmp_path / PARTS[2]).unlink()
    with pytest.raises(FileNotFoundError) as missing:
        Cache(tmp_path / INDEX)
    assert missing.value.filename == str(tmp_path / PARTS[2])


def test_an_index_of_any_length_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / INDEX).open("wb") as file:
        file.truncate(MAX_INDEX + 1)
    with pytest.raises(CertkError, match=f"{MAX_INDEX} are the most"):
        Cache(tmp_path / INDEX)


def test_all_parts_are_closed(tmp_path: Path) -> None:
    def opened() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    write(tmp_path)
    before = opened()
    file = open_tensors(tmp_path / INDEX)
    assert opened() == before + 3
    file.close()
    file.close()
    assert opened() == before
    body = json.loads((tmp_path / INDEX).read_text())
    broken = copy.deepcopy(body)
    broken["weight_map"]["new"] = PARTS[0]
    (tmp_path / INDEX).write_text(json.dumps(broken))
    with pytest.raises(CertkError):
        open_tensors(tmp_path / INDEX)
    assert opened() == before


@pytest.mark.parametrize("changed", [INDEX, *PARTS])
def test_an_index_or_part_that_was_changed_is_not_what_was_pruned(
    tmp_path: Path, changed: str
) -> None:
    (tmp_path / "in").mkdir()
    write(tmp_path / "in")
    prune(tmp_path / "in" / INDEX, tmp_path / "out", 0.1)
    content = bytearray((tmp_path / "in" / changed).read_bytes())
    if changed == INDEX:
        content += b" "
    else:
        content[-1] ^= 1
    (tmp_path / "in" / changed).write_bytes(content)
    [output] = audit([tmp_path / "out" / "x.safetensors"], [tmp_path / "in" / INDEX]).outputs
    assert not output.holds
    assert str(tmp_path / "in" / INDEX) in str(output.findings[0])
