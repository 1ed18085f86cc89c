"""The state of a job beside its outputs: a lock, a manifest, and a record of each input.

Everything is below `.certk` in the output directory:

    lock                  held while a job runs there (local directories only: see `lock`)
    job.json              the manifest: request, inputs, and whether all of it is done
    files/NAME.json       the outcome of one input
    long/HASH.json        the same, where the name is too long for an ending of ours
    parts/KEY.part        the result of one unit of an input that is not finished
    shards/I-of-N/        all of this for a job that takes only every N-th input

Names of outputs have no part that begins with a dot, so nothing here is taken for one. The record
is a help, not a proof: it tells times, failures and requests, and what an output with less than a
full proof does not hold. It is taken for an output only if that has the header which it says.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import socket
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from .. import __version__
from .._files.atomic import NewFile
from .._files.location import Location, locate
from .._files.new_file import write_text
from .._files.reader import read_bytes
from ..errors import CertkError, one_line
from .engine import Unit, UnitResult, pack, unpack
from .inputs import Source, expand
from .results import FileReport, read_file_report

FOLDER = ".certk"
SHARDS = "shards"
SCHEMA = 1
_MOST_BYTES = 1 << 30
# Bytes of a name to which another ending may be added: 255 are what most systems take.
_LONG = 200
_LOCK = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        return None


# The first is that of POSIX, the second of Windows.
fcntl: Any
msvcrt: Any
fcntl, msvcrt = (_module(name) for name in ("fcntl", "msvcrt"))
_LOCKED_BYTE = 1 << 30


class JobFolder:
    """The state of a job in `out`. Nothing is made before `begin`."""

    def __init__(self, out: Location, shard: str = "") -> None:
        self.out, self.shard = out, shard
        self._folder = out / FOLDER
        if shard:
            self._folder = self._folder / SHARDS / shard
        self.manifest = self._folder / "job.json"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from pruning into the same directory meanwhile.

        On a local directory the system lets go of the lock when the process ends, however it ends.
        Windows locks bytes, which nobody else can read then: one far behind the end.
        Object stores have no locks: there nothing keeps two jobs apart but the refusal of each to
        overwrite.
        """
        if not self.out.is_local or fcntl is msvcrt is None:
            yield
            return
        path = self._folder.path / "lock"
        self._folder.make_directory()
        fd = _open_lock(path)
        try:
            if not _taken(fd):
                who = os.read(fd, 200).decode(errors="replace").strip() or "another process"
                raise CertkError(
                    f"{self.out}: {who} prunes into it: wait for its end, or choose another OUT"
                )
            # Only said to others: on a full disk it is left to the manifest to fail.
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)
                os.write(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            try:
                yield
            finally:
                _let_go(fd)
        finally:
            os.close(fd)

    def read_manifest(self) -> dict[str, Any] | None:
        """Return the manifest of the last job here; None if there is none."""
        return self._read_json(self.manifest)

    def write_manifest(self, body: Mapping[str, Any]) -> None:
        """Write the manifest: a job begins, or ends."""
        self._folder.make_directory()
        text = json.dumps({"schema": SCHEMA, "library": __version__, **body}, indent=1)
        write_text(self.manifest, text + "\n", replace=True)

    def read_state(self, name: str) -> dict[str, Any] | None:
        """Return the state of an input; None if nothing is known."""
        return self._read_json(self._state(name))

    def write_state(self, name: str, body: Mapping[str, Any]) -> None:
        """Write the state of an input."""
        place = self._state(name)
        place.beside("").make_directory()
        text = json.dumps({"schema": SCHEMA, "name": name, **body})
        write_text(place, text + "\n", replace=True)

    def read_part(self, unit: Unit) -> UnitResult | None:
        """Return the result of a unit, if it is here and whole."""
        place = self._part(unit)
        if place is None or not place.exists():
            return None
        try:
            return unpack(read_bytes(place, _MOST_BYTES))
        except CertkError:  # no regular file, or too long
            return None

    def write_part(self, unit: Unit, result: UnitResult) -> None:
        """Keep the result of a unit until its output is finished.

        It is renamed into place but not flushed to the disk: a part that is damaged is made anew.
        """
        place = self._part(unit)
        if place is None:
            return
        place.path.parent.mkdir(parents=True, exist_ok=True)
        with NewFile(place.path, replace=True, durable=False) as file:
            file.write_at(0, pack(result))
            file.commit()

    def remove_parts(self, units: list[Unit]) -> None:
        """Remove the results of units that are not needed any longer."""
        for unit in units:
            place = self._part(unit)
            if place is not None:
                place.path.unlink(missing_ok=True)

    def remove_all_parts(self) -> None:
        """Remove what is left of them: of other bytes, or of units cut in another way."""
        parts = self._folder.path / "parts" if self.out.is_local else None
        if parts is not None and parts.is_dir():
            for part in parts.iterdir():
                part.unlink(missing_ok=True)

    def has_parts(self) -> bool:
        """Return whether there is anything that `resume` could use."""
        if not self.out.is_local:
            return True
        parts = self._folder.path / "parts"
        return parts.is_dir() and any(parts.iterdir())

    def forget(self) -> None:
        """Remove what an earlier job has left, but for its outputs."""
        if self.out.is_local:
            for name in ("files", "long", "parts"):
                shutil.rmtree(self._folder.path / name, ignore_errors=True)

    def discard(self) -> None:
        """Remove all of it: nothing came of the job."""
        if self.out.is_local:
            shutil.rmtree(self._folder.path, ignore_errors=True)
            # Of a shard: what is above it, unless others are there.
            for above in self._folder.path.relative_to(self.out.path).parents[:-1]:
                with contextlib.suppress(OSError):
                    (self.out.path / above).rmdir()

    def _part(self, unit: Unit) -> Location | None:
        if not self.out.is_local:
            return None  # a store of objects is too slow for them: a file is begun anew there
        return self._folder / "parts" / f"{unit.key()[:32]}.part"

    def _state(self, name: str) -> Location:
        if len(os.fsencode(name)) > _LONG:
            return self._folder / "long" / f"{hashlib.sha256(os.fsencode(name)).hexdigest()}.json"
        return self._folder / "files" / f"{name}.json"

    def _read_json(self, place: Location) -> dict[str, Any] | None:
        if not place.exists():
            return None
        try:
            body = json.loads(read_bytes(place, _MOST_BYTES))
        except (ValueError, RecursionError) as error:
            raise CertkError(
                f"{place} is not what a job has written ({one_line(error)}): remove it, or begin "
                "anew with --force"
            ) from None
        return body if isinstance(body, dict) else None


def _open_lock(path: Path) -> int:
    """Open the lock, made if it is not there; a `CertkError` for what is no regular file."""
    fd = -1
    try:
        # Without waiting: the other end of a pipe may never be opened.
        fd = os.open(path, _LOCK, 0o666)
        regular = stat.S_ISREG(os.fstat(fd).st_mode)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        regular = False
    if not regular:
        if fd >= 0:
            os.close(fd)
        raise CertkError(f"{path} is not a regular file, as the lock of a job is: remove it")
    return fd


def _taken(fd: int) -> bool:
    """Lock a file, unless another open file has done so; file systems without locks let all."""
    if fcntl is not None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True
    os.lseek(fd, _LOCKED_BYTE, os.SEEK_SET)
    try:
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EDEADLK)
    finally:
        os.lseek(fd, 0, os.SEEK_SET)
    return True


def _let_go(fd: int) -> None:
    """Unlock what would be unlocked some time after it is closed."""
    if fcntl is None:
        with contextlib.suppress(OSError):
            os.lseek(fd, _LOCKED_BYTE, os.SEEK_SET)
            msvcrt.locking(fd, msvcrt.LK_UNLCK, 1)


@dataclass
class JobRecord:
    """The records in one directory: of the job there, and of each of its shards.

    `jobs` are the manifests with their folders, none where nothing was recorded. `notes` say what
    is wrong.
    """

    out: Location
    jobs: list[tuple[JobFolder, dict[str, Any]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, out: Location) -> JobRecord:
        """Read the manifests of a directory, if they can be read."""
        record = cls(out)
        try:
            shards = out / FOLDER / SHARDS
            names = [name for name, _ in shards.children()] if shards.is_directory() else []
            for folder in (JobFolder(out, name) for name in ["", *names]):
                if (manifest := folder.read_manifest()) is not None:
                    record.jobs.append((folder, manifest))
        except (CertkError, OSError) as error:
            record.notes.append(f"the record of the job cannot be read: {error}")
        return record

    @property
    def inputs(self) -> list[str]:
        """Names of all inputs."""
        return sorted({name for _, manifest in self.jobs for name in inputs_of(manifest)})

    def report(self, name: str, header_sha256: str) -> FileReport | None:
        """Return the job's report of an output with that header, if it has one."""
        wrong = None
        for state in self._states(name, "done"):
            try:
                report = read_file_report(state["report"])
            except (AttributeError, KeyError, TypeError, ValueError):
                wrong = f"{name}: the record of the job is damaged"
                continue
            if report.header_sha256 == header_sha256:
                return report.placed(report.source, str(self.out / name))
            wrong = f"{name}: the record of the job is about another output"
        self.notes += [] if wrong is None else [wrong]
        return None

    def failure(self, name: str) -> dict[str, str] | None:
        """Return the failure of an input, if a job has noted one."""
        keys = ("name", "source", "message", "kind")
        for state in self._states(name, "failed"):
            return {key: str(state.get(key, "")) for key in keys}
        return None

    def _states(self, name: str, kind: str) -> Iterator[dict[str, Any]]:
        for folder, _ in self.jobs:
            try:
                state = folder.read_state(name)
            except (CertkError, OSError) as error:
                self.notes.append(f"{name}: {error}")
                continue
            if state is not None and state.get("state") == kind:
                yield state


def inputs_of(manifest: Mapping[str, Any]) -> set[str]:
    """Return the names of the inputs of one job."""
    inputs, refused = manifest.get("inputs"), manifest.get("refused")
    names = set(inputs) if isinstance(inputs, dict) else set()
    return names | set(map(str, refused if isinstance(refused, list) else []))


@dataclass(frozen=True)
class Found:
    """Some outputs, and the record of the job they are of; `whole` if they are all of its."""

    record: JobRecord
    sources: tuple[Source, ...]
    whole: bool


def find_outputs(outs: Sequence[str]) -> list[Found]:
    """Find the outputs in directories, and those that patterns and names mean.

    Raises:
        CertkError: There is none, and no record of a job that has made none.
        OSError: A directory cannot be read.
    """
    found = []
    for text in outs:
        place = locate(text)
        if not place.is_directory():
            for source in expand([text], recursive=True, same_names=True):
                found.append(Found(JobRecord.of(source.location.beside("")), (source,), False))
            continue
        record = JobRecord.of(place)
        try:
            sources = expand([text], recursive=True)
        except CertkError:
            if not record.jobs:
                raise CertkError(
                    f"{place} holds no .safetensors file, nor the record of a job: give the OUT of "
                    "certk prune, or outputs"
                ) from None
            sources = []
        found.append(Found(record, tuple(sources), True))
    if not found:
        raise CertkError("no output: give the OUT of certk prune, or outputs")
    return found
