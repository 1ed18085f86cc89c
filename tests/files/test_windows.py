"""Windows imitated: locks of bytes, drives, and files that are opened once.

Nothing here runs on Windows itself; what it is said to do is imitated as its documentation has it.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from certk_rs._files import location, new_file
from certk_rs._files.location import locate
from certk_rs._jobs import folder as job_folder
from certk_rs._jobs.folder import JobFolder
from certk_rs._jobs.plan import _check_out, missing_directories
from certk_rs.errors import CertkError


class Locks:
    """`msvcrt.locking`: bytes of a file, from where its descriptor stands."""

    LK_NBLCK, LK_UNLCK = 2, 0

    def __init__(self) -> None:
        self.held: dict[tuple[int, int, int], int] = {}

    def locking(self, fd: int, mode: int, count: int) -> None:
        place = (os.fstat(fd).st_ino, os.lseek(fd, 0, os.SEEK_CUR), count)
        if mode == self.LK_UNLCK:
            if self.held.pop(place, None) != fd:
                raise OSError(errno.EACCES, "Permission denied")
        elif self.held.setdefault(place, fd) != fd:
            raise OSError(errno.EACCES, "Permission denied")


def test_two_jobs_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locks = Locks()
    monkeypatch.setattr(job_folder, "fcntl", None)
    monkeypatch.setattr(job_folder, "msvcrt", locks)
    out = locate(tmp_path)
    with JobFolder(out).lock():
        assert len(locks.held) == 1
        # Nobody could read the bytes that are locked.
        assert all(at > 1 << 20 for _, at, _ in locks.held)
        with pytest.raises(CertkError, match=f"process {os.getpid()} on .* prunes into it"):
            JobFolder(out).lock().__enter__()
    assert not locks.held
    with JobFolder(out).lock():
        pass


def test_without_any_locks_a_job_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_folder, "fcntl", None)
    monkeypatch.setattr(job_folder, "msvcrt", None)
    with JobFolder(locate(tmp_path)).lock(), JobFolder(locate(tmp_path)).lock():
        pass


def test_a_drive_that_is_not_there_is_no_endless_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "lexists", lambda _: False)
    out = SimpleNamespace(is_local=True, path=Path("/no/such"))
    assert [*missing_directories(out)] == [Path("/no/such"), Path("/no")]  # type: ignore[arg-type]
    monkeypatch.setattr(Path, "is_dir", lambda _: False)
    with pytest.raises(CertkError, match="is not a directory"):
        _check_out(out)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "local"),
    [("file:///C:/x y", "C:/x y"), ("file:///C%3A/x", "C:/x"), ("file:///ab/c", "/ab/c")],
)
def test_urls_of_files_name_drives(monkeypatch: pytest.MonkeyPatch, text: str, local: str) -> None:
    monkeypatch.setattr(location, "_DRIVES", True)
    assert locate(text).place == local


def test_a_url_that_became_a_path_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(location, "_DRIVES", True)
    with pytest.raises(CertkError, match="two slashes after s3:"):
        locate("s3:\\bucket\\x")
    assert locate("C:\\x").place == "C:\\x"


def test_what_is_uploaded_can_be_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    lexists = os.path.lexists
    monkeypatch.setattr(os.path, "lexists", lambda p: "/proc/" not in str(p) and lexists(p))
    made = []
    real = tempfile.NamedTemporaryFile

    def noted(*, delete: bool) -> object:
        assert not delete
        made.append(real(delete=delete))
        return made[-1]

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", noted)
    place = locate("memory://windows/x")
    with new_file.new_file(place) as file:
        file.write_at(0, b"whole")
        file.commit()
        assert Path(made[0].name).exists()
    assert place.exists()
    assert not Path(made[0].name).exists()
    place.remove()
