"""Scratch files without a name, for data beyond memory; and files that are mapped.

A scratch file loses its name before anything is written: no other process can open it or cut it
off, and nothing is left of it when this process ends. Its room is allocated before a write, so a
full disk is an error here, and does not kill a process that writes to a map.
"""

from __future__ import annotations

import contextlib
import errno
import os
import weakref
from pathlib import Path

from ..errors import CertkError
from .atomic import names_the_file
from .reader import Identity, identity_of

# Answers of systems, and file systems, without nameless files.
_NOT_HERE = {errno.EOPNOTSUPP, errno.ENOTSUP, errno.EISDIR, errno.EINVAL, errno.ENOSYS}
_ZEROS = 1 << 20


class MappableFile:
    """An open file, closed with its last reference."""

    def __init__(self, place: Path, descriptor: int, *, writable: bool) -> None:
        self.place = place
        self.descriptor = descriptor
        self.writable = writable
        self._opened = self.identity
        weakref.finalize(self, os.close, descriptor)

    def check_unchanged(self) -> None:
        """Raise `CertkError` if a file that is only read here has another size or time of change.

        A file that has lost its name, or whose name another has taken, is unchanged.
        """
        if not self.writable and self.identity != self._opened:
            raise CertkError(
                f"{self.place} was written to or cut off while its keys and values were in use: "
                "load it again, and save under another name or by save(path), which replaces it"
            )

    @property
    def identity(self) -> Identity:
        """The present identity of the file, as readers have it."""
        return identity_of(self.descriptor)

    def need(self, size: int) -> None:
        """Raise `CertkError` if the file is shorter: reading a map behind its end is a crash."""
        if (there := os.fstat(self.descriptor).st_size) < size:
            raise CertkError(
                f"{self.place} was cut off meanwhile: it has {there} bytes, and {size} are needed"
            )


def open_to_map(path: Path) -> MappableFile:
    """Open a file that is there, to read."""
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)
    return MappableFile(path, os.open(path, flags), writable=False)


class ScratchFile(MappableFile):
    """A file without a name, which grows."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, _nameless(directory), writable=True)
        self.size = 0
        self._process = os.getpid()

    def grow(self, more: int) -> int:
        """Allocate more bytes and return their offset; an error leaves the file as it was."""
        self._need_own()
        at = self.size
        try:
            _set_aside(self.descriptor, at, more)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self.descriptor, at)
            what = f"{error.strerror} (a file of {at} bytes without a name, and {more} bytes more)"
            raise OSError(error.errno, what, str(self.place)) from None
        self.size += more
        return at

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write bytes into allocated room."""
        self._need_own()
        with names_the_file(self.place):
            _write(self.descriptor, offset, data)

    def write_out(self, offset: int, size: int) -> None:
        """Ask the system to write these bytes to the disk and drop them from memory."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.descriptor, offset, size, os.POSIX_FADV_DONTNEED)

    def _need_own(self) -> None:
        if os.getpid() != self._process:
            raise CertkError(
                f"this process was forked from the one whose keys and values are in {self.place}, "
                "and would write over them: save the cache there and load it here"
            )


def _nameless(directory: Path) -> int:
    kind = getattr(os, "O_TMPFILE", None)
    with names_the_file(directory):
        if kind is not None:
            try:
                return os.open(directory, os.O_RDWR | os.O_CLOEXEC | kind, 0o600)
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        path = directory / f".certk-{os.urandom(16).hex()}.scratch"
        descriptor = os.open(path, flags, 0o600)
        try:
            path.unlink()
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def _set_aside(descriptor: int, at: int, more: int) -> None:
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, at, more)
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
        else:
            return
    for start in range(at, at + more, _ZEROS):
        _write(descriptor, start, memoryview(bytes(min(_ZEROS, at + more - start))))


def _write(descriptor: int, offset: int, data: memoryview) -> None:
    while len(data):
        done = os.pwrite(descriptor, data, offset)
        offset, data = offset + done, data[done:]
