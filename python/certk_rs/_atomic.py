"""A file that appears whole under its name, or not at all, and never replaces another.

The bytes go to a temporary name in the same directory (`.NAME.PID.partial`, so it can never be
taken for an output), are flushed to the disk, and only then get their name, by a hard link: linking
fails when the name is taken, so that not even a race can overwrite a file. Whatever ends the
writing early (an error, a full disk, Ctrl-C) removes the temporary file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from .errors import CertkError

# File systems without hard links answer with one of these.
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


# Names that this process is writing under: nothing that was left behind.
_WRITTEN: set[Path] = set()
_LOCK = threading.Lock()


@contextlib.contextmanager
def names_the_file(path: Path) -> Iterator[None]:
    """Let an `OSError` say which file it was about, whatever descriptor or name it came from."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


class NewFile:
    """Context manager around one file to be written; leaving it without `commit` leaves nothing.

    Raises `CertkError` when `path` exists (at once, and again when the name is taken) unless it is
    to be replaced, `OSError` with its `filename` set for everything that the system refuses.
    """

    def __init__(self, path: Path, *, replace: bool = False) -> None:
        self.path = path
        self._replace = replace
        self._mine = False
        self._partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        self._fd = -1

    def __enter__(self) -> NewFile:
        if not self._replace and os.path.lexists(self.path):
            raise already_exists(self.path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        with _LOCK:
            if self._partial in _WRITTEN:
                raise CertkError(
                    f"{self.path} is being written by another thread: give each its own file"
                )
            with names_the_file(self.path):
                # Left behind by a killed process that had the same number.
                self._partial.unlink(missing_ok=True)
                self._fd = os.open(self._partial, flags, 0o666)
            _WRITTEN.add(self._partial)
            self._mine = True
        return self

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        """Write all of `data` at byte `offset`."""
        view = memoryview(data).cast("B")
        with names_the_file(self.path):
            while len(view):
                os.lseek(self._fd, offset, os.SEEK_SET)
                done = os.write(self._fd, view[: 1 << 24])
                offset, view = offset + done, view[done:]

    def commit(self) -> None:
        """Flush to the disk and give the file its name."""
        with names_the_file(self.path):
            os.fsync(self._fd)
            fd, self._fd = self._fd, -1
            os.close(fd)
        try:
            with names_the_file(self.path):
                self._take_name()
        except FileExistsError:
            raise already_exists(self.path) from None
        self._flush_directory()

    def _take_name(self) -> None:
        if self._replace:
            self._partial.replace(self.path)
            return
        try:
            os.link(self._partial, self.path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if os.path.lexists(self.path):
                raise FileExistsError(errno.EEXIST, "File exists") from None
            self._partial.rename(self.path)

    def _flush_directory(self) -> None:
        # The name is on the disk only when its directory is. Not every system lets one open
        # directories.
        with contextlib.suppress(OSError):
            fd = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1
        with _LOCK:
            self._partial.unlink(missing_ok=True)
            if self._mine:
                _WRITTEN.discard(self._partial)


def already_exists(path: Path) -> CertkError:
    """The refusal to write over something."""
    return CertkError(
        f"{path} exists already: nothing is overwritten; choose another output or remove it"
    )


def write_text(path: Path, text: str) -> None:
    """Write a new file of text in UTF-8."""
    with NewFile(path) as file:
        file.write_at(0, text.encode())
        file.commit()


def replace_text(path: Path, text: str) -> None:
    """Write a file of text in UTF-8 and let it take the place of one of the same name."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with names_the_file(path):
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
