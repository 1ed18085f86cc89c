"""A file that appears whole under its name, or not at all, and replaces another only when told to.

The bytes go to a partial file in the same directory, `.certk-HOST-RANDOM.partial`, and are flushed
to the disk. Then a hard link gives them their name, which fails if the name is taken, or a rename
replaces the old file. Process ids are not unique on a shared volume, so the partial name is random.
The descriptor stays open until the end: it identifies the writer's own file, and no other file is
ever linked, renamed or removed.

The next writer into the directory removes the partial file of a killed one (see `_stale`). A paused
writer keeps its file; if it is removed all the same, `commit` is an error.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, TypeVar

from ..errors import CertkError

try:
    import fcntl
except ImportError:  # Windows
    _fcntl: ModuleType | None = None
else:
    _fcntl = fcntl

# Errors of file systems without hard links. On Windows EINVAL stands for any error without a number
# of its own; 524 is the kernel's ENOTSUPP.
_NO_LINKS = {
    *(errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK),
    *(errno.EXDEV, errno.EINVAL, 524),
}
# Windows neither renames nor removes an open file, so no other process can either.
_CLOSE_FIRST = os.name == "nt"
_NEW = (
    os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
)
_OLD = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_PARTIAL = re.compile(r"\.certk-([0-9a-f]{8})-[0-9a-f]{16}\.partial")
_NOWHERE = "0" * 8
# Seconds without a write after which a writer on another host counts as dead: more than a weekend,
# since some network file systems do not share locks.
_STALE_AFTER = 7 * 86400.0
_TRIES = 100

_File = TypeVar("_File", bound="NewFile")


@contextlib.contextmanager
def names_the_file(path: Path) -> Iterator[None]:
    """Make every `OSError` name this file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


class NewFile:
    """Context manager around one file to be written; leaving it without `commit` leaves nothing.

    Raises `CertkError` if `path` exists and is not to be replaced, checked at once and at `commit`,
    or if the partial file was removed; `OSError` with its `filename` set if the system refuses. Of
    several writers of one path the first to commit has it, or the last if all replace. `durable`
    files survive a loss of power, which takes waiting for the disk.
    """

    def __init__(self, path: Path, *, replace: bool = False, durable: bool = True) -> None:
        self.path = path
        self._replace = replace
        self._durable = durable
        self._partial = path
        self._fd = -1
        self._identity: os.stat_result | None = None

    def __enter__(self: _File) -> _File:
        if os.path.lexists(self.path):
            if not self._replace:
                raise already_exists(self.path)
            if not self.path.is_file() and not self.path.is_symlink():
                raise CertkError(f"{self.path} is no regular file: give the name of a new file")
        try:
            with names_the_file(self.path):
                own = self._open()
            _remove_stale(self._partial, own)
        except BaseException:
            self._leave()
            raise
        return self

    def _open(self) -> os.stat_result:
        for _ in range(_TRIES):
            name = f".certk-{_host()}-{os.urandom(8).hex()}.partial"
            self._partial = self.path.parent / name
            try:
                self._fd = os.open(self._partial, _NEW, 0o666)
            except FileExistsError:
                continue  # another writer's
            self._identity = os.fstat(self._fd)
            # Before it was locked, the file may have looked like one that was left behind.
            if _lock(self._fd) is not False and self._is_at(self._partial):
                return self._identity
            self._leave()
        raise FileExistsError(errno.EEXIST, "No free name for a partial file beside it")

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        """Write all of `data` at byte `offset`."""
        view = memoryview(data).cast("B")
        with names_the_file(self.path):
            while len(view):
                os.lseek(self._fd, offset, os.SEEK_SET)
                done = os.write(self._fd, view[: 1 << 24])
                offset, view = offset + done, view[done:]

    @contextlib.contextmanager
    def stream(self) -> Iterator[BinaryIO]:
        """Open the file as a stream from its beginning."""
        with names_the_file(self.path), os.fdopen(os.dup(self._fd), "wb") as stream:
            yield stream

    def commit(self) -> None:
        """Flush to the disk and give the file its name."""
        with names_the_file(self.path):
            if self._durable:
                os.fsync(self._fd)
            self._check_partial()
            if _CLOSE_FIRST:
                self._close()
            self._take_name()
        if self._durable:
            self._flush_directory()

    def _take_name(self) -> None:
        if self._replace:
            # No look afterwards: another writer may rightly have replaced it by then.
            self._rename(os.replace)
            return
        try:
            self._link()
        except FileExistsError:
            # A network file system may have linked, and been heard only the second time.
            if not self._is_at(self.path):
                raise already_exists(self.path) from None
        except OSError as error:
            if error.errno not in _NO_LINKS:
                self._check_partial()
                raise
            # Except on Windows, renaming replaces what gets the name between these two lines.
            if os.path.lexists(self.path):
                raise already_exists(self.path) from None
            self._rename(os.rename)
        if not self._is_at(self.path):
            raise CertkError(
                f"{self.path} is not the file that was written: another process has changed it "
                "meanwhile; choose another output"
            )

    def _link(self) -> None:
        link = getattr(os, "link", None)
        if link is None:
            raise OSError(errno.ENOSYS, "Function not implemented")
        # By its descriptor where the system can: the name may have gone to another file.
        opened = f"/proc/self/fd/{self._fd}"
        if link in os.supports_dir_fd and os.path.lexists(opened):
            # With a directory, which an absolute path makes meaningless, Python follows links.
            link(opened, self.path, src_dir_fd=self._fd)
        else:
            link(self._partial, self.path)

    def _rename(self, rename: Callable[[Path, Path], None]) -> None:
        self._check_partial()
        try:
            rename(self._partial, self.path)
        except FileNotFoundError:
            self._check_partial()
            raise
        except FileExistsError:  # Windows
            raise already_exists(self.path) from None

    def _check_partial(self) -> None:
        if not self._is_at(self._partial):
            raise CertkError(
                f"{self.path} was not written: its partial file was removed or replaced meanwhile "
                "by another process; run the command again"
            )

    def _is_at(self, path: Path) -> bool:
        """Return True if the file of that name is this writer's."""
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return False
        return self._identity is not None and os.path.samestat(found, self._identity)

    def _flush_directory(self) -> None:
        # The name is on the disk only when its directory is. Some systems open no directories.
        with contextlib.suppress(OSError):
            fd = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _leave(self) -> None:
        """Remove the partial file if it is still ours, and close it."""
        with contextlib.suppress(OSError):
            mine = self._is_at(self._partial)
            if _CLOSE_FIRST:
                self._close()
            if mine:
                self._partial.unlink()
        self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def __exit__(self, *_: object) -> None:
        self._leave()


def already_exists(path: object) -> CertkError:
    """Return the error for a name that is taken."""
    return CertkError(
        f"{path} exists already: nothing is overwritten; choose another output or remove it"
    )


@cache
def _host() -> str:
    """Return eight digits that name the running system whose locks this process sees."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return _NOWHERE
    return hashlib.sha256(boot).hexdigest()[:8]


def _lock(fd: int) -> bool | None:
    """Lock a partial file until it is closed; False if it is locked, None if locks do not exist.

    The lock belongs to the open file, not to the process, so that it also tells threads apart.
    """
    if _fcntl is None:
        return None
    try:
        _fcntl.flock(fd, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        return False if error.errno == errno.EACCES else None
    return True


def _remove_stale(partial: Path, own: os.stat_result) -> None:
    """Remove the files of killed writers in the directory of a partial file just made."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(partial.parent):
            host = _PARTIAL.fullmatch(entry.name)
            if host is None or entry.name == partial.name:
                continue
            with contextlib.suppress(OSError):
                found = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(found.st_mode):
                    _remove_if_stale(partial.with_name(entry.name), host[1], own)


def _remove_if_stale(path: Path, host: str, own: os.stat_result) -> None:
    fd = os.open(path, _OLD)
    try:
        found = os.fstat(fd)
        stale = _stale(_lock(fd), host, own.st_mtime - found.st_mtime)
        if stale and not _CLOSE_FIRST and os.path.samestat(os.lstat(path), found):
            path.unlink()
    finally:
        os.close(fd)
    if stale and _CLOSE_FIRST:
        path.unlink()


def _stale(locked: bool | None, host: str, age: float) -> bool:
    """Return True if the writer of a partial file is dead.

    Every writer locks its file, and the system releases the lock when the writer ends, but not
    while it is paused. On the same running system the lock decides at once. Elsewhere (another
    host, no locks, a system started anew) the file must also be unchanged for a week, by the clock
    of the file system.
    """
    if locked is False:
        return False
    return age > _STALE_AFTER or (locked is True and host == _host() != _NOWHERE)
