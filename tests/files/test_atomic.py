"""Files that appear whole or not at all, whoever else writes, dies or meddles meanwhile."""

from __future__ import annotations

import ast
import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import certk_rs as ck
from certk_rs._files import atomic
from certk_rs._files.atomic import NewFile
from certk_rs._files.new_file import write_text
from certk_rs._jobs.inputs import expand
from certk_rs.errors import CertkError
from cli_fixtures import said, write_cache

linux = pytest.mark.skipif(sys.platform != "linux", reason="names of descriptors and systems")
posix = pytest.mark.skipif(os.name != "posix", reason="stops processes, or locks files")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_new_file_that_is_given_up(tmp_path: Path, error: type[BaseException]) -> None:
    def give_up() -> None:
        with NewFile(tmp_path / "new") as file:
            file.write_at(0, b"ab")
            raise error

    with pytest.raises(error):
        give_up()
    assert not list(tmp_path.iterdir())


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(CertkError, match=f"{name} is no regular file"):
            write_text(tmp_path / name, "new", replace=True)
    assert (tmp_path / "pipe").is_fifo()


def test_a_new_file_replaces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "new"

    def race(content: str | None) -> None:
        with NewFile(path) as file:
            if content is not None:
                path.write_text(content)
            file.commit()

    with pytest.raises(CertkError, match="exists already"):
        race("somebody was faster")
    with pytest.raises(CertkError, match="exists already"):
        race(None)
    assert path.read_text() == "somebody was faster"
    assert list(tmp_path.iterdir()) == [path]
    path.unlink()
    path.symlink_to("nowhere")
    with pytest.raises(CertkError, match="exists already"):
        race(None)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EINVAL, errno.ENOTSUP, 524])
def test_a_new_file_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def no_links(*_: object) -> None:
        raise OSError(number, "no links here")

    monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / "new"
    with NewFile(path) as file:
        file.write_at(0, b"ab")
        file.commit()
    assert path.read_bytes() == b"ab"
    with pytest.raises(CertkError, match="exists already"), NewFile(path):
        pass
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write

    def full(fd: int, data: memoryview) -> int:
        if len(data) > 10:
            return real(fd, data[:10])  # a short write first, as the kernel does it
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with (
        pytest.raises(OSError, match="No space left") as refused,
        NewFile(tmp_path / "new") as file,
    ):
        file.write_at(0, bytes(100))
    assert refused.value.filename == str(tmp_path / "new")
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------- several writers of the same file

WRITER = """
import os, sys
from pathlib import Path
os.getpid = lambda: 1  # as in containers
from certk_rs._files.atomic import NewFile
from certk_rs.errors import CertkError

try:
    with NewFile(Path(sys.argv[1]), replace=sys.argv[3] == "replace") as file:
        half, rest = sys.argv[2].encode() * 50_000, sys.argv[2].encode() * 50_000
        file.write_at(0, half)
        print("half", flush=True)
        sys.stdin.readline()
        file.write_at(len(half), rest)
        file.commit()
        print("done", flush=True)
except CertkError as error:
    print("refused:", error, flush=True)
"""


@contextlib.contextmanager
def writer(path: Path, letter: str, how: str) -> Iterator[subprocess.Popen[str]]:
    """A process with the number 1 that has written half of a file and waits for a line."""
    command = [sys.executable, "-c", WRITER, str(path), letter, how]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def answer(process: subprocess.Popen[str]) -> str:
    """Let a writer go on to its end."""
    out, _ = process.communicate("\n", timeout=60)
    return out


@posix
@pytest.mark.parametrize("how", ["new", "replace"])
@pytest.mark.parametrize("stopped_writes_first", [True, False])
def test_two_processes_of_the_same_number(
    tmp_path: Path, how: str, stopped_writes_first: bool
) -> None:
    """One is stopped half-way; the other writes the same file to its end; the first goes on."""
    path = tmp_path / "out"
    with contextlib.ExitStack() as stack:
        if stopped_writes_first:
            stopped = stack.enter_context(writer(path, "a", how))
            stopped.send_signal(signal.SIGSTOP)
            other = stack.enter_context(writer(path, "b", how))
        else:
            other = stack.enter_context(writer(path, "b", how))
            stopped = stack.enter_context(writer(path, "a", how))
            stopped.send_signal(signal.SIGSTOP)
        assert answer(other) == "done\n"
        assert path.read_bytes() == b"b" * 100_000
        stopped.send_signal(signal.SIGCONT)
        end = answer(stopped)
    if how == "new":
        assert end == f"refused: {atomic.already_exists(path)}\n"
        assert path.read_bytes() == b"b" * 100_000
    else:
        assert end == "done\n"
        assert path.read_bytes() == b"a" * 100_000
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("replace", [False, True])
def test_many_threads_write_one_file(tmp_path: Path, replace: bool) -> None:
    path, start, ends = tmp_path / "out", threading.Barrier(8), []

    def write(letter: bytes) -> None:
        start.wait()
        try:
            with NewFile(path, replace=replace) as file:
                for part in range(8):
                    file.write_at(1000 * part, letter * 1000)
                file.commit()
            ends.append("done")
        except CertkError as error:
            ends.append(str(error))

    threads = [threading.Thread(target=write, args=(bytes([97 + i]),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends.count("done") == (8 if replace else 1)
    assert {*ends} <= {"done", str(atomic.already_exists(path))}
    assert len(ends) == 8
    content = path.read_bytes()
    assert content == content[:1] * 8000
    assert list(tmp_path.iterdir()) == [path]


# ----------------------------------------------------------------- a partial name that is not ours


@pytest.mark.parametrize("kind", ["symlink", "dangling symlink", "file", "directory", "fifo"])
@pytest.mark.parametrize("replace", [False, True])
def test_what_has_the_partial_name_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, replace: bool
) -> None:
    path, victim = tmp_path / "out", tmp_path / "victim"
    victim.write_text("precious")
    names = [bytes(8), bytes(7) + b"\1"]
    planted = tmp_path / f".certk-{atomic._host()}-{names[0].hex()}.partial"
    if kind == "file":
        planted.write_text("precious")
        lock = planted.open("rb+")  # somebody is at it
        assert atomic._lock(lock.fileno()) is not False
    elif kind == "directory":
        planted.mkdir()
    elif kind == "fifo":
        os.mkfifo(planted)
    else:
        planted.symlink_to(victim if kind == "symlink" else tmp_path / "nowhere")
    monkeypatch.setattr(os, "urandom", lambda count: names.pop(0))
    before = os.lstat(planted)
    write_text(path, "whole", replace=replace)
    assert path.read_text() == "whole"
    assert victim.read_text() == "precious"
    assert os.path.samestat(os.lstat(planted), before)
    assert sorted(child.name for child in tmp_path.iterdir()) == [planted.name, "out", "victim"]


def test_no_free_partial_name_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "urandom", bytes)
    (tmp_path / f".certk-{atomic._host()}-{bytes(8).hex()}.partial").mkdir()
    with pytest.raises(OSError, match="No free name") as refused:
        write_text(tmp_path / "out", "whole")
    assert refused.value.filename == str(tmp_path / "out")


def without_links(*_: object, **__: object) -> None:
    raise OSError(errno.EPERM, "no links here")


@pytest.mark.parametrize("links", ["by descriptor", "by name", "none", "not even a function"])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize(
    "meddling", ["removed", "replaced", "replaced by a symlink", "moved behind a symlink"]
)
def test_a_partial_file_that_was_taken_away_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: str, replace: bool, meddling: str
) -> None:
    set_links(monkeypatch, links)
    path, half, moved = (tmp_path / name for name in ("out", "half", "moved"))
    half.write_text("half")

    def write() -> None:
        with NewFile(path, replace=replace) as file:
            file.write_at(0, b"whole")
            file._partial.replace(moved)
            if meddling == "replaced":
                file._partial.write_text("half")
            elif meddling == "moved behind a symlink":
                file._partial.symlink_to(moved)
            elif meddling != "removed":
                file._partial.symlink_to(half)
            file.commit()

    with pytest.raises(CertkError, match=r"out was not written: its partial file was removed or"):
        write()
    assert not os.path.lexists(path)
    left = set(tmp_path.iterdir()) - {half, moved}
    assert len(left) == (meddling != "removed")  # that one is somebody else's


def swapped(partial: Path, _: Path) -> None:
    partial.unlink()
    partial.write_text("half")
    without_links()


def taken(_: Path, path: Path) -> None:
    path.write_text("faster")
    without_links()


def exchanged(_: Path, path: Path) -> None:
    path.write_text("half")


def exists(_: Path, path: Path) -> None:
    raise FileExistsError(errno.EEXIST, "File exists", str(path))


LINK = os.link


def twice(partial: Path, path: Path) -> None:
    LINK(partial, path)
    LINK(partial, path)


@pytest.mark.parametrize(
    ("patches", "message", "left"),
    [
        ({"link": swapped}, "removed or replaced meanwhile", {".partial": "half"}),
        ({"link": taken}, "exists already", {"out": "faster"}),
        # A file exchanged after the last look is found, where links go by name.
        ({"link": exchanged}, "is not the file that was written", {"out": "half"}),
        # As on Windows, where the name is taken between the last look and the renaming.
        ({"link": without_links, "rename": exists}, "exists already", {}),
        # As on a network: the first answer is lost, the second says that the name is taken.
        ({"link": twice}, None, {"out": "whole"}),
    ],
)
def test_files_that_change_hands_while_they_are_linked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    patches: Any,
    message: Any,
    left: dict[str, str],
) -> None:
    for name, function in patches.items():
        monkeypatch.setattr(os, name, function)
    refused = pytest.raises(CertkError, match=message) if message else contextlib.nullcontext()
    with refused:
        write_text(tmp_path / "out", "whole")
    assert {path.suffix or path.name: path.read_text() for path in tmp_path.iterdir()} == left


@linux
def test_a_partial_file_that_vanishes_before_the_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = NewFile(tmp_path / "out")
    real = file._check_partial

    def look() -> None:
        monkeypatch.setattr(file, "_check_partial", real)
        file._partial.unlink()

    monkeypatch.setattr(file, "_check_partial", look)
    with pytest.raises(CertkError, match="removed or replaced meanwhile"), file:
        file.commit()
    assert not list(tmp_path.iterdir())


@linux
def test_what_is_linked_is_the_file_and_not_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the partial name changes hands between the last look and the link."""
    path = tmp_path / "out"
    file = NewFile(path)

    def look() -> None:
        other = tmp_path / "kept"
        os.link(file._partial, other)
        file._partial.unlink()
        file._partial.write_text("half")

    monkeypatch.setattr(file, "_check_partial", look)
    with file:
        file.write_at(0, b"whole")
        file.commit()
    assert path.read_text() == "whole"


def set_links(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Give the process another kind of file system."""
    if how == "not even a function":
        monkeypatch.delattr(os, "link")
    elif how == "none":
        monkeypatch.setattr(os, "link", without_links)
    elif how == "by name":
        real = os.link
        monkeypatch.setattr(os, "link", lambda source, target: real(source, target))


# ------------------------------------------------------------------------------ other systems


@pytest.mark.parametrize("links", ["by name", "none", "not even a function"])
@pytest.mark.parametrize("replace", [False, True])
def test_as_on_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: str, replace: bool
) -> None:
    """Open files can neither be renamed nor removed, names taken are not renamed over, no locks."""
    set_links(monkeypatch, links)
    path = tmp_path / "out"
    file = NewFile(path, replace=replace)

    def closed(name: object) -> None:
        if file._fd >= 0 and Path(str(name)) == file._partial:
            raise PermissionError(errno.EACCES, "The process cannot access the file", str(name))

    real = {name: getattr(os, name) for name in ("rename", "replace", "unlink")}

    def rename(source: Path, target: Path) -> None:
        closed(source)
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "File exists", str(target))
        real["rename"](source, target)

    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "replace", lambda a, b: (closed(a), real["replace"](a, b)))
    monkeypatch.setattr(Path, "unlink", lambda self: (closed(self), real["unlink"](self)))
    monkeypatch.setattr(atomic, "_fcntl", None)
    monkeypatch.setattr(atomic, "_CLOSE_FIRST", True)

    def write(text: bytes, meanwhile: str | None = None) -> None:
        with file:
            file.write_at(0, text)
            if meanwhile is not None:
                path.write_text(meanwhile)
            if text != b"given up":
                file.commit()

    write(b"given up")
    assert list(tmp_path.iterdir()) == []
    write(b"whole")
    assert path.read_bytes() == b"whole"
    if replace:
        write(b"again")
        assert path.read_bytes() == b"again"
    else:
        path.unlink()
        with pytest.raises(CertkError, match="exists already"):
            write(b"slower", "faster")
        assert path.read_text() == "faster"
    assert list(tmp_path.iterdir()) == [path]


def test_a_name_as_long_as_a_name_may_be(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    write_text(path, "whole")
    write_text(path, "again", replace=True)
    assert path.read_text() == "again"


# --------------------------------------------------------------------- what killed writers leave


def left_behind(folder: Path, host: str | None = None, days: float = 0.0) -> Path:
    """A partial file that nobody has open."""
    path = folder / f".certk-{host or atomic._host()}-{os.urandom(8).hex()}.partial"
    path.write_text("half")
    then = time.time() - days * 86400
    os.utime(path, (then, then))
    return path


@linux
def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with writer(path, "a", "new") as process:
        [partial] = tmp_path.iterdir()
        process.send_signal(signal.SIGSTOP)
        write_text(tmp_path / "other", "whole")
        assert partial.exists()  # its writer is alive
        os.utime(partial, (0, 0))
        write_text(tmp_path / "other", "whole", replace=True)
        assert partial.exists()  # however long it pauses
        process.kill()
        process.wait()
    assert partial.exists()
    write_text(tmp_path / "other", "whole", replace=True)
    assert list(tmp_path.iterdir()) == [tmp_path / "other"]


@pytest.mark.parametrize("locks", [True, False])
def test_what_another_host_left_is_removed_after_a_week(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    if not locks:
        monkeypatch.setattr(atomic, "_fcntl", None)
    theirs, unknown = "12345678", atomic._NOWHERE
    young = [left_behind(tmp_path, host, 6.9) for host in (theirs, unknown)]
    old = [left_behind(tmp_path, host, 7.1) for host in (theirs, unknown)]
    ours = left_behind(tmp_path, days=6.9)
    write_text(tmp_path / "out", "whole")
    assert all(path.exists() for path in young)
    assert not any(path.exists() for path in old)
    seen = locks and atomic._fcntl is not None and atomic._host() != unknown
    assert ours.exists() == (not seen)


def test_files_of_others_are_never_removed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    stem = f".certk-{atomic._host()}-"
    others = [
        tmp_path / name
        for name in (
            ".out.1.partial", "out.partial", ".certk-1.partial", f"{stem}{'0' * 15}.partial",
            f"{stem}{'0' * 16}.partial.safetensors", f"{stem}{'0' * 15}G.partial",
        )
    ]  # fmt: skip
    for path in others:
        path.write_text("precious")
        os.utime(path, (0, 0))
    link, folder = tmp_path / f"{stem}{'1' * 16}.partial", tmp_path / f"{stem}{'2' * 16}.partial"
    link.symlink_to(victim)
    folder.mkdir()
    os.utime(victim, (0, 0))
    os.utime(folder, (0, 0))
    write_text(tmp_path / "out", "whole")
    assert all(path.read_text() == "precious" for path in [victim, *others])
    assert link.is_symlink()
    assert folder.is_dir()


@posix
def test_a_file_that_is_cleaned_away_before_it_is_locked_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = atomic._lock, []

    def late(fd: int) -> bool | None:
        calls.append(fd)
        if len(calls) == 1:
            [partial] = tmp_path.iterdir()
            partial.unlink()
        elif len(calls) == 2:
            return False
        return real(fd)

    monkeypatch.setattr(atomic, "_lock", late)
    write_text(tmp_path / "out", "whole")
    assert len(calls) == 3
    assert (tmp_path / "out").read_text() == "whole"
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


# ------------------------------------------------------------------------------- every writer


def every_writer(folder: Path) -> dict[str, Any]:
    """All that the package writes, as calls that write into `folder`."""
    cache = folder.parent / "cache.safetensors"
    write_cache(cache, n=128)
    rows = np.linspace(0, 5, 60, dtype=np.float32).reshape(3, 20)
    np.save(folder.parent / "rows.npy", rows)
    index = ck.KeyIndex.build(np.ones((20, 4), np.float32))
    return {
        "select": lambda: said(
            "select", folder.parent / "rows.npy", "--eps", "0.1", "-o", folder / "keep.npz"
        ),
        "save a selection": lambda: ck.select(rows, 0.1).save(folder / "keep.npz"),
        "save an index": lambda: index.save(folder / "index"),
        "capture": lambda: capture(folder / "captured.safetensors"),
        "prune": lambda: said("prune", cache, "-o", folder, "--eps", "0.1"),
        "analyze": lambda: said("analyze", cache, "--html", folder / "page.html"),
    }


WRITERS = ["select", "save a selection", "save an index", "prune", "analyze", "capture"]


def capture(path: Path) -> None:
    """Write one layer as a model that runs does."""
    import torch

    from certk_rs.transformers.capture_file import CacheWriter

    with CacheWriter(path, 1) as writer:
        writer.write(0, *[torch.ones(1, 1, 3, 4)] * 3, None, None)
        writer.commit()


@pytest.mark.parametrize("name", WRITERS)
def test_every_writer_writes_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """No file gets its name except by a link or rename, from a partial name that no scan takes."""
    folder = tmp_path / "out"
    folder.mkdir()
    write, seen = every_writer(folder)[name], []
    real = NewFile.commit

    def commit(self: NewFile) -> None:
        here = self.path.parent
        # What a job keeps for itself is below .certk, which no scan looks into either.
        assert here == folder or here.is_relative_to(folder / ".certk")
        assert self._partial.parent == here
        partials = [path for path in here.iterdir() if path.suffix == ".partial"]
        assert partials == [self._partial]
        try:
            found = [source.location.path for source in expand([folder])]
        except CertkError:  # none as yet
            found = []
        assert self._partial not in found
        assert self.path.name not in ("", *(path.name for path in partials))
        real(self)
        seen.append(self.path)

    monkeypatch.setattr(NewFile, "commit", commit)
    ended = write()
    assert ended is None or ended.code == 0
    assert seen
    left = {path for path in folder.rglob("*") if path.is_file() and path.name != "lock"}
    assert left == {path for path in seen if "parts" not in path.parts}


@pytest.mark.parametrize("name", WRITERS)
def test_every_writer_tells_when_its_file_was_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    write = every_writer(folder)[name]
    real = NewFile.commit

    def commit(self: NewFile) -> None:
        self._partial.unlink()
        self._partial.write_text("half")
        real(self)

    monkeypatch.setattr(NewFile, "commit", commit)
    if name.startswith(("save", "capture")):
        with pytest.raises(CertkError, match="was not written"):
            write()
    else:
        ended = write()
        assert (ended.code, "was not written: its partial file" in ended.err) == (2, True)
    left = {path.suffix for path in folder.rglob("*") if path.is_file()}
    # Prune writes its manifest first, and leaves nothing where nothing came of it.
    assert left <= ({".partial"} if name != "prune" else set())
    assert left or name == "prune"


def test_a_selection_that_somebody_else_wrote_meanwhile_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`certk select` overwrites nothing, not even what appears while it works."""
    out = tmp_path / "keep.npz"
    np.save(tmp_path / "rows.npy", np.zeros((2, 4), np.float32))
    real = ck.Selection._write

    def late(self: ck.Selection, path: Path, *, replace: bool) -> None:
        out.write_text("faster")
        real(self, path, replace=replace)

    monkeypatch.setattr(ck.Selection, "_write", late)
    found = said("select", tmp_path / "rows.npy", "--eps", "0.1", "-o", out)
    assert found.code == 2
    assert "exists already" in found.err
    assert out.read_text() == "faster"


FINE = {
    "system.open(path, 'rb', cache_type='none', size=self.size)",
    "os.open(location.place, flags)",  # to read
    "os.open(path, _LOCK, 438)",  # a lock
    "archive.open(info)",
    "path.open('rb')",
    "text.read_text(encoding='utf-8')",
    # Files without a name, and what is mapped as it is.
    "os.open(directory, os.O_RDWR | os.O_CLOEXEC | kind, 384)",
    "os.open(path, flags, 384)",
    "os.open(path, flags)",
    "os.open(os.devnull, os.O_WRONLY)",
    "Path(os.devnull).open('w', encoding='utf-8')",
    "np.savez(stream, **arrays)",
    # What is uploaded is collected here first; it has no name, or is removed.
    "tempfile.NamedTemporaryFile(delete=False)",
    "os.fdopen(os.dup(spool.fileno()), 'wb')",
    "figure.savefig(text, format='svg', bbox_inches='tight', metadata={'Date': None}, "
    "transparent=True)",
    "formatter.write_text(line)",  # a help text
}


def test_nothing_in_the_package_writes_files_in_another_way() -> None:
    """Whatever writes goes through `_files.atomic`; the rest are streams that it has opened."""
    package, wrong = Path(atomic.__file__).parents[1], []
    names = {"open", "fdopen", "write_text", "write_bytes", "tofile", "save_file", "savetxt"}
    names |= {"save", "savez", "savez_compressed", "savefig", "mkstemp", "NamedTemporaryFile"}
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and file.name != "atomic.py":
                called, text = ast.unparse(node.func), ast.unparse(node)
                if called.split(".")[-1] in names - {called} | {"open"} and text not in FINE:
                    wrong.append(f"{file.name}: {text}")
    assert not wrong
