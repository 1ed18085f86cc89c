"""Interrupts `certk` at a given module that it is about to import, in processes of their own.

They are forked from a process that has imported next to nothing, so that each begins as a console
script does. A number of an import is a moment that is the same however fast the machine is and
whoever else computes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# Reads the number of an import, a signal, a folder and arguments; answers with the exit code. What
# the forked process writes, and a letter for every import, are files of that folder.
_SERVER = """
import os, signal, sys

def begin(at, kind, arguments, told):
    begun = 0

    def hook(event, details):
        nonlocal begun
        # Ours is what follows the import of the package.
        if event == "import" and (begun or details[0] == "certk_rs"):
            os.write(told, b"x")
            begun += 1
            if begun == at + 1:
                signal.raise_signal(kind)

    sys.argv = ["certk", *arguments]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.addaudithook(hook)
    code = 1
    try:
        from certk_rs.cli import main

        sys.exit(main())
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    os._exit(code)

for line in sys.stdin:
    at, kind, folder, *arguments = line.rstrip("\\n").split("\\t")
    child = os.fork()
    if child == 0:
        files = [os.path.join(folder, name) for name in ("out", "err", "imports")]
        out, err, told = [os.open(file, os.O_CREAT | os.O_TRUNC | os.O_WRONLY) for file in files]
        os.dup2(out, 1)
        os.dup2(err, 2)
        begin(int(at), int(kind), arguments, told)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@dataclass(frozen=True)
class Ended:
    """The exit code (negative: the signal), both streams, and how many imports were begun."""

    code: int
    out: str
    err: str
    imports: int


class Starts:
    """The process that forks; a context manager. Its children write into `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Starts:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)

    def run(self, arguments: list[str], at: int = -1, kind: int = 0) -> Ended:
        """Run it to its end; or with a signal when the import of this number (from 1) begins."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = [str(at), str(kind), str(self._folder), *arguments]
        self._process.stdin.write("\t".join(order) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        out, err, told = ((self._folder / name).read_text() for name in ("out", "err", "imports"))
        return Ended(code, out, err, len(told) - 1)
