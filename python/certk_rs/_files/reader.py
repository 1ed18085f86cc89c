"""Readers of byte ranges, local or remote, into memory of the caller.

A reader is one state of one file: `identity` tells it from a later file of the same name. Nothing
is mapped: a file that shrinks is an error and not a crash. Of a remote file only the ranges asked
for are fetched, and its first 64 KiB at once, which usually hold the header.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, TypeAlias

from ..errors import CertkError
from . import remote
from .atomic import names_the_file
from .location import Location

Identity = tuple[Any, ...]
"""Plain values that are equal only for the same state of the same file."""

# True while identities come from another machine (see `of_another_machine`).
_ELSEWHERE: ContextVar[bool] = ContextVar("_ELSEWHERE", default=False)
# Bytes read between two checks for Ctrl-C.
_PIECE = 1 << 24
_RANGE = 1 << 23
_RANGES = 4  # at once
_HEAD = 1 << 16
# Names that file systems give the state of a file, the most precise first.
_TAGS = ("ETag", "etag", "md5Hash", "content_md5", "checksum", "generation", "VersionId")
_TIMES = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")


def identity_of(descriptor: int) -> Identity:
    """Return the present identity of an open local file."""
    status = os.fstat(descriptor)
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


Reader: TypeAlias = "_LocalReader | _RemoteReader"
"""An open file with `identity` and `size`; reads may come from several threads."""


@contextlib.contextmanager
def of_another_machine() -> Iterator[None]:
    """Compare identities that were taken on another machine.

    Machines that share a file system agree on the size and time of a file, but not on the numbers
    of device and inode.
    """
    token = _ELSEWHERE.set(True)
    try:
        yield
    finally:
        _ELSEWHERE.reset(token)


def same_state(one: Identity, other: Identity) -> bool:
    """Return True if two identities are of the same state of a file."""
    return _shared(one) == _shared(other) if _ELSEWHERE.get() else one == other


def _shared(identity: Identity) -> Identity:
    """Return the part of an identity that all machines agree on."""
    if identity and isinstance(identity[0], tuple):
        return tuple(map(_shared, identity))
    return identity[2:] if identity and isinstance(identity[0], int) else identity


def open_reader(location: Location) -> Reader:
    """Open a file to read.

    Raises:
        CertkError: It is not a regular file.
        OSError: The system or the server refuses; `filename` is set.
    """
    return _LocalReader(location) if location.is_local else _RemoteReader(location)


def read_bytes(location: Location, limit: int) -> bytes:
    """Read a whole file of at most `limit` bytes; a `CertkError` if it has more."""
    return read_state(location, limit)[0]


def read_state(location: Location, limit: int) -> tuple[bytes, Identity]:
    """Read a whole file as `read_bytes` does; also return its identity."""
    reader = open_reader(location)
    try:
        if reader.size > limit:
            raise CertkError(
                f"{location} has {reader.size} bytes, and {limit} are the most that are read: "
                "it is not what was expected here"
            )
        content = bytearray(reader.size)
        reader.read_into(0, memoryview(content))
        return bytes(content), reader.identity
    finally:
        reader.close()


class _LocalReader:
    def __init__(self, location: Location) -> None:
        self._location = location
        with names_the_file(location.path):
            if not stat.S_ISREG(location.path.stat().st_mode):
                raise CertkError(f"{location} is not a regular file: give a .safetensors file")
            flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
            self._fd = os.open(location.place, flags)
        self._turn = threading.Lock()
        self.identity: Identity = self.current_identity()
        self.size: int = self.identity[2]

    def current_identity(self) -> Identity:
        """Return the present identity of the file."""
        return identity_of(self._fd)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill all of `buffer` (bytes) from byte `offset` on."""
        done = 0
        with names_the_file(self._location.path):
            while done < len(buffer):
                count = self._read(buffer[done : done + _PIECE], offset + done)
                if not count:
                    raise _ends_early(self._location)
                done += count

    def _read(self, buffer: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._fd, [buffer], offset)
        with self._turn:
            os.lseek(self._fd, offset, os.SEEK_SET)
            data = os.read(self._fd, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Close it; closing twice is harmless."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


class _RemoteReader:
    def __init__(self, location: Location) -> None:
        self._location = location
        self._head = b""
        found = remote.info(location.place)
        if found.get("type") == "directory":
            raise CertkError(f"{location} is a directory: give a .safetensors file")
        if found.get("size") is None:
            raise CertkError(f"{location}: its server does not say how long it is: copy it first")
        if found.get("partial") is False:
            raise _no_ranges(location)
        self.size = int(found["size"])
        self.identity = self._identity(found)

    def current_identity(self) -> Identity:
        return self._identity(remote.info(self._location.place))

    def _identity(self, found: dict[str, Any]) -> Identity:
        system, path = remote.filesystem(self._location.place)
        tag = next((f"{tag} {found[tag]}" for tag in _TAGS if found.get(tag)), None)
        if tag is None:
            tag = next((f"{tag} {found[tag]}" for tag in _TIMES if found.get(tag)), None)
        if tag is None:
            with remote.remote_errors(self._location.text):
                tag = str(system.ukey(path))
        return (self._location.protocol, path, int(found.get("size") or 0), tag)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        done = 0
        if offset < _HEAD and self.size:
            if not self._head:
                [self._head] = self._fetch([(0, min(_HEAD, self.size))])
            done = len(part := self._head[offset : offset + len(buffer)])
            buffer[:done] = part
        if offset + len(buffer) > self.size:
            raise _ends_early(self._location)
        while done < len(buffer):
            ranges: list[tuple[int, int]] = []
            at, stop = offset + done, offset + len(buffer)
            while at < stop and len(ranges) < _RANGES:
                ranges.append((at, min(at + _RANGE, stop)))
                at = ranges[-1][1]
            for data in self._fetch(ranges):
                buffer[done : done + len(data)] = data
                done += len(data)

    def _fetch(self, ranges: list[tuple[int, int]]) -> list[bytes]:
        """Fetch byte ranges, at once where the file system can."""
        system, path = remote.filesystem(self._location.place)
        starts, stops = [start for start, _ in ranges], [stop for _, stop in ranges]
        found: list[Any]
        with remote.remote_errors(self._location.text):
            if self._location.protocol in ("http", "https"):
                found = self._read_carefully(system, path, ranges)
            else:
                found = system.cat_ranges([path] * len(ranges), starts, stops, on_error="raise")
        for (start, stop), data in zip(ranges, found, strict=True):
            if isinstance(data, Exception):  # some versions return errors
                raise remote.translated(self._location.text, data)
            if len(data) > stop - start:
                raise _no_ranges(self._location)
            if len(data) < stop - start:
                raise _ends_early(self._location)
        return [bytes(data) for data in found]

    def _read_carefully(self, system: Any, path: str, ranges: list[tuple[int, int]]) -> list[bytes]:
        """Read ranges of a server that may know none, and must not send the whole file."""
        found = []
        with system.open(path, "rb", cache_type="none", size=self.size) as file:
            for start, stop in ranges:
                file.seek(start)
                found.append(file.read(stop - start))
        return found

    def close(self) -> None:
        self._head = b""


def _no_ranges(location: Location) -> CertkError:
    return CertkError(
        f"{location} cannot be read by byte range, since its server does not do that: copy it first"
    )


def _ends_early(location: Location) -> CertkError:
    return CertkError(f"{location} ends early: it was cut off while it was being read")
