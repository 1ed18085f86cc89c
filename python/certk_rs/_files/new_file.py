"""New files, local or behind a URL, that appear whole under their name or not at all.

A local file is an `atomic.NewFile`. The bytes of a remote file go to a local temporary file (see
`tempfile`), which `commit` uploads. Object stores show an object when its upload is complete. On
other file systems it is uploaded under a partial name and renamed.

A taken name is refused when writing begins and again at `commit`. A store that can refuse to
replace an object (S3 with `If-None-Match`) is asked to, so one of several writers wins. Elsewhere,
of two that commit at the same moment, the last one's object stays.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeAlias

from ..errors import CertkError
from . import remote
from .atomic import NewFile, already_exists
from .location import Location, Place, locate

WritableFile: TypeAlias = "NewFile | _Upload"
"""A file being written; a context manager that leaves nothing without `commit`."""


def new_file(location: Location, *, replace: bool = False) -> WritableFile:
    """Begin a file; a `CertkError` if its name is taken and not to be replaced."""
    if location.is_local:
        return NewFile(location.path, replace=replace)
    return _Upload(location, replace)


@contextlib.contextmanager
def written(place: Place, *, replace: bool = False) -> Iterator[BinaryIO]:
    """Open a new file as a stream; it gets its name when the block ends without an error."""
    with new_file(locate(place), replace=replace) as file:
        with file.stream() as stream:
            yield stream
        file.commit()


def write_text(place: Place, text: str, *, replace: bool = False) -> None:
    """Write a file of text in UTF-8."""
    with written(place, replace=replace) as stream:
        stream.write(text.encode())


def write_json(place: Place, body: Mapping[str, Any], *, replace: bool = False) -> None:
    """Write an object of plain values as indented ASCII.

    Raises:
        CertkError: The name is taken and not to be replaced.
        OSError: The system refuses.
    """
    write_text(place, json.dumps(body, indent=1, allow_nan=False) + "\n", replace=replace)


class _Upload:
    def __init__(self, location: Location, replace: bool) -> None:
        self._location = location
        self._replace = replace
        self._named: Path | None = None

    def __enter__(self) -> _Upload:
        self._refuse_existing()
        with self._names_the_file():
            # A nameless file, where it can be opened by its number, is gone when this process ends.
            if os.path.lexists("/proc/self/fd"):
                self._spool: IO[bytes] = tempfile.TemporaryFile()
            else:
                # Windows cannot open a file twice that is removed when it is closed.
                self._spool = tempfile.NamedTemporaryFile(delete=False)
                self._named = Path(self._spool.name)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._spool.close()
            if self._named is not None:
                self._named.unlink()

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        """Write all of `data` at byte `offset`."""
        with self._names_the_file():
            self._spool.seek(offset)
            self._spool.write(data)

    @contextlib.contextmanager
    def stream(self) -> Iterator[BinaryIO]:
        """Open the file as a stream from its beginning."""
        spool = self._spool
        spool.flush()
        with self._names_the_file(), os.fdopen(os.dup(spool.fileno()), "wb") as stream:
            yield stream

    def commit(self) -> None:
        """Upload the file."""
        spool = self._spool
        with self._names_the_file():
            spool.flush()
        self._refuse_existing()
        system, path = remote.filesystem(self._location.place)
        try:
            with remote.remote_errors(self._location.text):
                if self._location.protocol in remote.OBJECT_STORES:
                    self._put(system, spool, path)
                else:
                    self._put_and_rename(system, spool, path)
                system.invalidate_cache(path)
        except FileExistsError:
            raise already_exists(self._location) from None

    def _put(self, system: Any, spool: IO[bytes], path: str) -> None:
        if self._location.protocol == "memory":
            spool.seek(0)
            mode = "overwrite" if self._replace else "create"
            system.pipe_file(path, spool.read(), mode=mode)
            return
        put = getattr(system, "_put_file", system.put_file)
        if not self._replace and "mode" in inspect.signature(put).parameters:
            try:
                system.put_file(_path_of(spool), path, mode="create")
            except Exception as error:  # every package has classes of its own
                said = f"{type(error).__name__} {error}"
                if "precondition" in said.lower():
                    raise FileExistsError from None
                if "NotImplemented" not in said and "not implemented" not in said.lower():
                    raise
            else:
                return
        system.put_file(_path_of(spool), path)

    def _put_and_rename(self, system: Any, spool: IO[bytes], path: str) -> None:
        directory, slash, _ = path.rpartition("/")
        partial = f"{directory}{slash}.certk-00000000-{os.urandom(8).hex()}.partial"
        try:
            system.put_file(_path_of(spool), partial)
            if self._replace and system.exists(path):
                system.rm_file(path)
            system.mv(partial, path)
        except BaseException:
            with contextlib.suppress(Exception):
                system.rm_file(partial)
            raise

    def _refuse_existing(self) -> None:
        if not self._replace and self._location.exists():
            raise already_exists(self._location)

    @contextlib.contextmanager
    def _names_the_file(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = f"{self._location} (in a temporary file in {tempfile.gettempdir()})"
            raise OSError(error.errno, error.strerror, where) from None
        except ValueError as error:  # closed
            raise CertkError(f"{self._location}: {error}") from None


def _path_of(spool: IO[bytes]) -> str:
    name = f"/proc/self/fd/{spool.fileno()}"
    return name if os.path.lexists(name) else str(spool.name)
