"""Fixtures of tests of files: honest outputs, made once in a session, and a server of objects."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from made_outputs import Honest
from s3_server import Server, environment, only_loopback, s3_server


@pytest.fixture(scope="session")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Honest:
    """Return honest outputs by name, of which every test gets copies of its own."""
    return Honest(tmp_path_factory.mktemp("honest"))


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    """Run an S3 server on loopback."""
    pytest.importorskip("moto.server")
    with s3_server() as server:
        yield server


@pytest.fixture
def server(running: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Return the server with an empty bucket, and an environment in which s3fs finds it."""
    s3fs = pytest.importorskip("s3fs")
    for name, value in environment(running.url, tmp_path).items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "FSSPEC_S3_KEY", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    only_loopback(monkeypatch)
    s3fs.S3FileSystem.clear_instance_cache()
    system = s3fs.S3FileSystem()
    with contextlib.suppress(FileNotFoundError):
        system.rm("caches", recursive=True)
    system.mkdir("caches")
    running.forget()
    yield running
    running.refuse = lambda _method, _path: None
    s3fs.S3FileSystem.clear_instance_cache()
