"""Locations: paths and URLs, and files behind either, read and written."""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from certk_rs import CertkError
from certk_rs._files.cache import Cache
from certk_rs._files.location import Location, locate, split_magic
from certk_rs._files.new_file import new_file, write_text
from certk_rs._files.reader import open_reader, read_bytes
from certk_rs._jobs.inputs import expand
from cli_fixtures import cache_tensors, safetensors_bytes, write_cache

fsspec = pytest.importorskip("fsspec")
MemoryFileSystem = pytest.importorskip("fsspec.implementations.memory").MemoryFileSystem


@pytest.fixture
def memory() -> Iterator[Location]:
    """An empty directory in fsspec's memory."""
    yield locate("memory://tests")
    fsspec.filesystem("memory").store.clear()


def put(location: Location, content: bytes) -> Location:
    with new_file(location, replace=True) as file:
        file.write_at(0, content)
        file.commit()
    return location


@pytest.mark.parametrize(
    ("text", "local"),
    [
        ("x.safetensors", "x.safetensors"),
        ("/a/b c", "/a/b c"),
        ("C:\\x", "C:\\x"),
        ("C:/x", "C:/x"),
        ("C://x", "C://x"),
        ("./s3://b/x", "./s3://b/x"),
        ("/tmp/s3://b/x", "/tmp/s3://b/x"),
        ("a:b", "a:b"),
        ("run 1:x/y", "run 1:x/y"),
        ("file:///a/b", "/a/b"),
        ("FILE:///a/b", "/a/b"),
        ("file://localhost/a", "/a"),
        (Path("/a/b c%é").as_uri(), "/a/b c%é"),
    ],
)
def test_paths_and_file_urls_are_local(text: str, local: str) -> None:
    place = locate(text)
    assert place.is_local
    assert place.path == Path(local)
    assert str(place) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no path"),
        ("a\0b", "is no path"),
        ("\ud800", "is no path"),
        ("s3:/bucket/x", r"two slashes after s3: .*\./s3:/bucket/x"),
        (Path("s3://bucket/x"), "two slashes after s3:"),
        ("memory:/x", "two slashes"),
        ("nosuch://b/x", r"no installed file system knows nosuch://.*\./nosuch://b/x"),
        ("gs://b/x", r"not installed: pip install gcsfs"),
        ("://x", "no protocol"),
        ("a b://x", "no protocol"),
        ("1s3://x", "no protocol"),
        ("file://host/x", "three slashes"),
        ("file://x", "three slashes"),
        ("file:///a%00b", "is no path"),
        ("memory://", "nothing follows"),
        ("zip::memory://x", "URLs within URLs"),
        ("simplecache::s3://b/x", "URLs within URLs"),
    ],
)
def test_what_looks_like_a_url_and_is_none_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | Path, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if words.endswith("gcsfs"):
        monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(CertkError, match=words) as refused:
        locate(text)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_without_fsspec_a_url_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "fsspec"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(CertkError, match=r"needs fsspec.*pip install 'fsspec.*' 's3fs"):
        locate("s3://b/x")
    assert locate("x").is_local


def test_a_location_is_a_value() -> None:
    for text in ("/a/x.safetensors", "memory://a/x.safetensors", "a/x.safetensors"):
        place = locate(text)
        assert locate(place) == place
        # Who unpickles it may be in another directory.
        again = pickle.loads(pickle.dumps(place))
        assert str(again) == text
        assert again.place == (place.place if place.protocol else str(Path(text).absolute()))
        assert {place: 1}[locate(text)] == 1
        assert place.name == "x.safetensors"
        assert place.beside("y").name == "y"
        assert str(place.beside("y")) == text.replace("x.safetensors", "y")
    assert str(locate("memory://a") / "b" / "c") == "memory://a/b/c"
    assert str(locate("memory://a/") / "b/c") == "memory://a/b/c"
    with pytest.raises(CertkError, match="not a local path"):
        _ = locate("memory://a").path


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a/b*/c", ("a", "b*/c")),
        ("*.x", (".", "*.x")),
        ("/*", ("/", "*")),
        ("a/**/[xy]?", ("a", "**/[xy]?")),
        ("memory://b/c/*/d", ("memory://b/c", "*/d")),
        ("plain", None),
        ("memory://b*/c", None),
        ("file:///a/*", ("/a", "*")),
    ],
)
def test_patterns_are_split_at_their_first_sign(text: str, parts: tuple[str, str] | None) -> None:
    found = split_magic(locate(text))
    assert (None if found is None else (str(found[0]), found[1])) == parts


class Volume(MemoryFileSystem):
    """A file system that is no store of objects: files are uploaded beside, then renamed."""

    protocol = "volume"
    store: ClassVar[dict[str, Any]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("volume://")))


@pytest.fixture(params=["local", "memory", "s3", "volume"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """Return an empty directory of each kind."""
    if request.param == "volume":
        fsspec.register_implementation("volume", Volume, clobber=True)
        Volume.store.clear()
        return locate("volume://tests")
    if request.param == "s3":
        request.getfixturevalue("server")
        return locate("s3://caches/tests")
    return request.getfixturevalue("memory") if request.param == "memory" else locate(tmp_path)


def test_files_are_written_whole_or_not_at_all(place: Location) -> None:
    target = place / "x"
    with new_file(target) as file:
        file.write_at(3, b"def")
        file.write_at(0, b"abc")
        assert not target.exists()
    assert not target.exists()
    with new_file(target) as file:
        with file.stream() as stream:
            stream.write(b"abc")
        file.write_at(5, b"f")
        file.commit()
    assert target.exists()
    assert target.size() == 6
    assert read_bytes(target, 6) == b"abc\0\0f"
    with pytest.raises(CertkError, match="has 6 bytes"):
        read_bytes(target, 5)
    with pytest.raises(CertkError, match="exists already"):
        write_text(target, "x")
    with new_file(place / "y") as file:
        file.write_at(0, b"slow")
        put(place / "y", b"fast")
        with pytest.raises(CertkError, match="exists already"):
            file.commit()
    assert read_bytes(place / "y", 99) == b"fast"
    write_text(target, "new é", replace=True)
    assert read_bytes(target, 99).decode() == "new é"
    target.remove()
    assert not target.exists()
    with pytest.raises(FileNotFoundError) as missing:
        open_reader(target)
    assert missing.value.filename == str(target)
    assert place.children() == [("y", False)]


def test_reads_by_range_and_knows_a_changed_file(place: Location) -> None:
    content = np.random.default_rng(0).bytes(300_000)
    target = put(place / "x", content)
    reader = open_reader(target)
    assert reader.size == len(content)
    for start, count in ((0, 8), (65_530, 20), (0, 300_000), (299_999, 1), (70_000, 0)):
        buffer = bytearray(count)
        reader.read_into(start, memoryview(buffer))
        assert buffer == content[start : start + count]
    for start in (0, 299_999):
        with pytest.raises(CertkError, match="ends early"):
            reader.read_into(start, memoryview(bytearray(300_001)))
    assert reader.current_identity() == reader.identity
    assert pickle.loads(pickle.dumps(reader.identity)) == reader.identity
    reader.close()
    reader.close()
    put(target, content[::-1])
    assert open_reader(target).identity != reader.identity


def test_directories_are_listed_and_matched(place: Location) -> None:
    for name in ("b/x.s", "b/c/y.s", "a.s", ".hidden.s", ".h/z.s", "b/[1].s", "b/1.s"):
        if place.is_local:
            (place / name).beside("").make_directory()
        put(place / name, b"")
    (place / "d").make_directory()
    assert [each for each in place.children() if each[0] != "d"] == [
        *((".h", True), (".hidden.s", False), ("a.s", False), ("b", True)),
    ]

    def matched(pattern: str) -> list[str]:
        return [name for name, _, _ in place.matches(pattern)]

    assert matched("*.s") == ["a.s"]
    assert matched(".*.s") == [".hidden.s"]
    assert matched("*/*.s") == ["b/1.s", "b/[1].s", "b/x.s"]
    assert matched("**/*.s") == ["a.s", "b/1.s", "b/[1].s", "b/c/y.s", "b/x.s"]
    assert matched("b/[[]1].s") == ["b/[1].s"]
    assert matched("b/[1].s") == ["b/1.s"]
    assert matched("*/c/y.s") == ["b/c/y.s"]
    assert matched("**/c/?.s") == ["b/c/y.s"]
    assert matched("*/nothing") == []
    assert place.matches("?.s") == [("a.s", place / "a.s", False)]


def test_a_cache_behind_a_url_is_that_cache(memory: Location, tmp_path: Path) -> None:
    values = write_cache(tmp_path / "x.safetensors", n=3000)
    put(memory / "x.safetensors", (tmp_path / "x.safetensors").read_bytes())
    with Cache("memory://tests/x.safetensors") as cache, Cache(tmp_path / "x.safetensors") as local:
        assert cache.check_values() == local.check_values()
        assert cache.file.header_sha256s() == local.file.header_sha256s()
        np.testing.assert_array_equal(
            cache.read(cache.layers[0], "key", slice(1, 2)), values["layers.0.key"][0, 1:]
        )
        cache.file.check_unchanged(cache.file.identity)
        put(memory / "x.safetensors", safetensors_bytes(cache_tensors(seed=1, n=3000), None))
        with pytest.raises(CertkError, match=r"memory://tests/x.safetensors was changed"):
            cache.file.check_unchanged(cache.file.identity)
        put(memory / "x.safetensors", b"short")
        with pytest.raises(CertkError, match="ends early"):
            cache.read(cache.layers[1], "value")


class Stubborn(fsspec.AbstractFileSystem):
    """A file system in which everything goes wrong in a way of its own."""

    protocol = "stubborn"
    error: BaseException = OSError("?")

    def info(self, path: str, **_: object) -> dict[str, object]:
        if "missing" in path:
            raise FileNotFoundError(path)
        if "lengthless" in path:
            return {"name": path, "size": None, "type": "file"}
        if "readable" in path:
            return {"name": path, "size": 100_000, "type": "file", "mtime": 1.0}
        raise self.error

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        if "whole" in path:
            return bytes(100_000)
        if "broken" in path:
            raise self.error
        return bytes(max(0, (end or 0) - (start or 0) - 1))

    def ls(self, path: str, detail: bool = True, **_: object) -> list[dict[str, object]]:
        return [{"name": f"{path}/..", "type": "directory", "size": 0}]


class NoCredentialsError(Exception):
    """As botocore's."""


@pytest.fixture
def stubborn() -> type[Stubborn]:
    fsspec.register_implementation("stubborn", Stubborn, clobber=True)
    return Stubborn


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (FileNotFoundError(), FileNotFoundError, "No such file"),
        (PermissionError("Access\nDenied"), PermissionError, "Access Denied"),
        (TimeoutError(), TimeoutError, "timed out"),
        (OSError(5, "Slow down"), OSError, "Slow down"),
        (RuntimeError("weird"), OSError, "weird"),
        (KeyError("Contents"), OSError, "Contents"),
        (NoCredentialsError("Unable to locate"), CertkError, "give credentials"),
        (ImportError("No module named 'x'"), CertkError, "package is missing"),
    ],
)
def test_errors_of_file_systems_become_ours(
    stubborn: type[Stubborn], error: BaseException, kind: type[Exception], words: str
) -> None:
    stubborn.error = error
    attempts = [
        lambda: open_reader(locate("stubborn://tests/x")),
        lambda: open_reader(locate("stubborn://readable/broken")).read_into(
            0, memoryview(bytearray(9))
        ),
        lambda: Cache("stubborn://tests/x"),
    ]
    for attempt in attempts:
        with pytest.raises(kind, match=words) as raised:
            attempt()
        if isinstance(raised.value, OSError):
            assert str(raised.value.filename).startswith("stubborn://")
            assert raised.value.errno
        assert "\n" not in str(raised.value)


def test_servers_that_do_not_do_ranges_are_told(stubborn: type[Stubborn]) -> None:
    with pytest.raises(CertkError, match="does not say how long"):
        open_reader(locate("stubborn://lengthless"))
    with pytest.raises(CertkError, match="cannot be read by byte range"):
        open_reader(locate("stubborn://readable/whole")).read_into(0, memoryview(bytearray(9)))
    with pytest.raises(CertkError, match="ends early"):
        open_reader(locate("stubborn://readable/short")).read_into(0, memoryview(bytearray(9)))
    with pytest.raises(CertkError, match="leads elsewhere"):
        locate("stubborn://readable").children()
    assert not locate("stubborn://missing").exists()


class Http(BaseHTTPRequestHandler):
    """Serves `content` under any name but "missing"; byte ranges only below /ranges/."""

    content = b""
    sent = 0

    def do_GET(self) -> None:
        if "missing" in self.path:
            self.send_error(404)
            return
        wanted = self.headers.get("Range", "")
        body = self.content
        if self.path.startswith("/ranges/") and wanted:
            start, stop = (int(end) for end in wanted.removeprefix("bytes=").split("-"))
            body = body[start : stop + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop}/{len(self.content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        for start in range(0, len(body) * (self.command != "HEAD"), 1 << 16):
            with contextlib.suppress(ConnectionError):
                type(self).sent += self.wfile.write(body[start : start + (1 << 16)])

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


def test_http_is_read_by_ranges_or_refused(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    write_cache(tmp_path / "x.safetensors", n=300_000)
    Http.content = (tmp_path / "x.safetensors").read_bytes()
    with ThreadingHTTPServer(("127.0.0.1", 0), Http) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        base = f"http://127.0.0.1:{server.server_port}"
        try:
            url = f"{base}/ranges/x.safetensors?signed=*"
            [source] = expand([url])
            assert source.name == "x.safetensors"
            with Cache(url) as cache, Cache(tmp_path / "x.safetensors") as local:
                assert Http.sent < 1_000_000
                assert cache.check_values() == local.check_values()
            Http.sent = 0
            with (
                Cache(f"{base}/whole/x.safetensors") as cache,
                pytest.raises(OSError, match="support range requests"),
            ):
                cache.read(cache.layers[1], "value")
            assert Http.sent < len(Http.content) / 2
            with pytest.raises(FileNotFoundError):
                Cache(f"{base}/missing.safetensors")
            with pytest.raises((OSError, CertkError)):
                write_text(locate(f"{base}/new/missing"), "x")
        finally:
            server.shutdown()
            thread.join()


def test_a_full_disk_under_an_upload_is_told(
    memory: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.BytesIO):
        def write(self, _: object) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", Full)
    with new_file(memory / "x") as file, pytest.raises(OSError, match="No space left") as full:
        file.write_at(0, b"x")
    assert str(memory / "x") in str(full.value.filename)
    assert not (memory / "x").exists()


def test_nothing_is_left_of_an_upload_that_ends_early(
    memory: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def write() -> None:
        with new_file(memory / "x") as file:
            file.write_at(0, bytes(100))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert not (memory / "x").exists()
    assert list(tmp_path.iterdir()) == []
