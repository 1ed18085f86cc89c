"""Caches in S3: a real server on loopback is read by byte range, listed, and written to.

The server counts, so that "nothing is downloaded whole" is a figure.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from certk_rs import CertkError
from certk_rs._files.cache import Cache
from certk_rs._files.location import Location, locate
from certk_rs._files.new_file import new_file
from certk_rs._files.reader import open_reader, read_bytes
from certk_rs._jobs.inputs import expand
from cli_fixtures import answered, cache_tensors, safetensors_bytes, said
from repository import ROOT
from s3_server import Server

s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

SHAPE = {"layers": 2, "kv_heads": 4, "heads": 8, "m": 8, "n": 4096, "d": 64}


def put(text: str, content: bytes = b"") -> Location:
    with new_file(locate(text)) as file:
        file.write_at(0, content)
        file.commit()
    return locate(text)


@pytest.fixture
def stored(server: Server) -> bytes:
    """A cache of some megabytes at s3://caches/dir/x.safetensors; its bytes."""
    content = safetensors_bytes(cache_tensors(**SHAPE), {"scale": "0.1"})
    put("s3://caches/dir/x.safetensors", content)
    server.forget()
    return content


def test_a_header_is_read_without_the_data(server: Server, stored: bytes) -> None:
    [found] = answered("inspect", "s3://caches/dir/x.safetensors")["files"]
    assert found["bytes"] == len(stored)
    assert found["cache"]["layers"][1]["keys"] == 4096
    assert len(stored) > 8_000_000
    assert server.sent < 200_000


def test_a_cache_is_read_by_ranges(server: Server, stored: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(stored)
    with (
        Cache(tmp_path / "x.safetensors") as local,
        Cache("s3://caches/dir/x.safetensors") as cache,
    ):
        layer = cache.layers[1]
        server.forget()
        head = cache.read(layer, "key", slice(2, 3))
        np.testing.assert_array_equal(head, local.read(layer, "key", slice(2, 3)))
        assert head.nbytes <= server.sent <= head.nbytes + 10_000
        server.forget()
        rows = cache.read(layer, "value", slice(1, 3), rows=slice(10, 20))
        np.testing.assert_array_equal(rows, local.read(layer, "value", slice(1, 3))[:, 10:20])
        assert server.sent <= rows.nbytes + 10_000
        server.forget()
        assert cache.check_values() == local.check_values()
        # Each byte once (and what is not the body of an answer to GET).
        assert server.sent <= 1.02 * len(stored)
        cache.file.check_unchanged(cache.file.identity)
        assert cache.file.identity[:3] == ("s3", "caches/dir/x.safetensors", len(stored))
        locate("s3://caches/dir/x.safetensors").remove()
        put("s3://caches/dir/x.safetensors", stored[:-1] + b"\0")
        with pytest.raises(CertkError, match="was changed while"):
            cache.file.check_unchanged(cache.file.identity)


def test_of_two_writers_of_one_object_one_wins(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    from certk_rs._files import new_file as module

    with new_file(locate("s3://caches/x")) as slow:
        slow.write_at(0, b"slow")
        put("s3://caches/x", b"fast")
        # Even where neither has seen the other's: the server is asked not to replace.
        monkeypatch.setattr(module._Upload, "_refuse_existing", lambda _: None)
        with pytest.raises(CertkError, match="exists already"):
            slow.commit()
    assert read_bytes(locate("s3://caches/x"), 9) == b"fast"


def test_an_upload_that_fails_leaves_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    server.refuse = lambda method, _path: "403 Forbidden" if method == "PUT" else None
    with pytest.raises(OSError, match="Access Key") as refused:
        put("s3://caches/x", b"content")
    assert refused.value.filename == "s3://caches/x"
    server.refuse = lambda _method, _path: None
    assert not locate("s3://caches/x").exists()


def test_prefixes_are_directories(server: Server) -> None:
    names = ["a.safetensors", "c.txt", "sub/b.safetensors", "sub/deep/c.safetensors"]
    for name in [*names, "sub/.hidden.safetensors", "sub/[1].safetensors"]:
        put(f"s3://caches/dir/{name}")
    # What consoles make of a directory.
    s3fs.S3FileSystem().pipe_file("caches/dir/sub/", b"")
    assert locate("s3://caches/dir").is_directory()
    assert not locate("s3://caches/di").exists()
    below = ["a.safetensors", "sub/[1].safetensors", "sub/b.safetensors", "sub/deep/c.safetensors"]
    for given, found in {
        ("s3://caches/dir",): below[:1],
        ("s3://caches/dir/", "-r"): below,
        ("s3://caches/dir/**/c.*",): ["c.txt", "sub/deep/c.safetensors"],
        ("s3://caches/dir/sub/[1].safetensors",): ["[1].safetensors"],
        ("S3://caches/dir/a.safetensors", "s3://caches/dir"): below[:1],
    }.items():
        texts = [text for text in given if text != "-r"]
        assert [each.name for each in expand(texts, recursive="-r" in given)] == found


def test_new_objects_are_seen(server: Server) -> None:
    """Listings are not taken from what was listed before, by whomever."""
    put("s3://caches/dir/a.safetensors")
    assert len(expand(["s3://caches/dir"])) == 1
    other = s3fs.S3FileSystem(skip_instance_cache=True)
    other.pipe_file("caches/dir/z.safetensors", b"")
    assert len(expand(["s3://caches/dir"])) == 2
    assert locate("s3://caches/dir/z.safetensors").exists()
    other.rm_file("caches/dir/z.safetensors")
    assert not locate("s3://caches/dir/z.safetensors").exists()


def test_shards_are_read(server: Server) -> None:
    tensors = cache_tensors(layers=2)
    for part in range(2):
        own = {name: held for name, held in tensors.items() if f".{part}." in name}
        put(f"s3://caches/m/part{part}.safetensors", safetensors_bytes(own, None))
    weight_map = {name: f"part{name.split('.')[1]}.safetensors" for name in tensors}
    put("s3://caches/m/m.safetensors.index.json", json.dumps({"weight_map": weight_map}).encode())
    [source] = expand(["s3://caches/m"])
    assert source.name == "m.safetensors"
    with Cache(source.location) as cache:
        assert len(cache.check_values()) == 6
        cache.file.check_unchanged(cache.file.identity)


@pytest.mark.parametrize("url", ["s3://caches/missing.safetensors", "s3://nobucket/x.safetensors"])
def test_what_is_missing_is_named(server: Server, url: str) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        Cache(url)
    assert missing.value.filename == url
    ended = said("inspect", url)
    assert (ended.code, f"{url} does not exist" in ended.err) == (2, True)


def test_wrong_and_missing_credentials_are_told(
    server: Server, stored: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "s3://caches/dir/x.safetensors"

    def check_told(place: str) -> None:
        ended = said("inspect", place)
        assert ended.code == 2
        assert re.fullmatch(f"certk: error: {place}.*\n", ended.err)

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(PermissionError) as refused:
        Cache(url)
    assert refused.value.filename == url
    check_told(url)
    check_told("s3://caches/dir")
    with pytest.raises(PermissionError):
        put("s3://caches/new")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises((CertkError, PermissionError), match=r"redentials|denied|Forbidden"):
        Cache(url)
    check_told(url)


def test_a_server_that_is_gone_is_an_error(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(OSError, match="endpoint") as gone:
        open_reader(locate("s3://caches/x"))
    assert gone.value.filename == "s3://caches/x"


def test_children_of_a_process_read_too(server: Server, stored: bytes, tmp_path: Path) -> None:
    """Threads and forked processes, as engines use them, in a process that has read before."""
    script = """
import multiprocessing, pickle, sys
from concurrent.futures import ThreadPoolExecutor
from certk_rs._files.location import locate
from certk_rs._files.cache import Cache

def first(place):
    with Cache(place) as cache:
        return cache.check_tensor("layers.1.key").sha256

place = pickle.loads(pickle.dumps(locate("s3://caches/dir/x.safetensors")))
hashes = {first(place)}
with ThreadPoolExecutor(4) as pool:
    hashes.update(pool.map(first, [place] * 4))
with multiprocessing.get_context("fork").Pool(2) as pool:
    hashes.update(pool.map(first, [place] * 4))
print(len(hashes))
"""
    here = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    ran = subprocess.run(
        [sys.executable, "-c", script], env=here, capture_output=True, text=True, timeout=120
    )
    assert (ran.stdout.strip(), ran.stderr) == ("1", "")
