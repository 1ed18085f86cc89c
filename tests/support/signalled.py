"""A `certk` that gets a signal where a test wants it: when some function of it is called.

No test has to guess how long it takes to come there, or how long a signal is on its way.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# The function is called as ever; the signal is sent from within its `at`-th call. Calls on other
# threads that begin after it wait until the main thread has heard it, so that their number does not
# depend on who is faster.
_CODE = """
import importlib, os, signal, sys, threading
from certk_rs._cli import signals
from certk_rs.cli import main

module, name, at, kind, told, *sys.argv[1:] = sys.argv[1:]
place = importlib.import_module(module)
*path, name = name.split(".")
for each in path:
    place = getattr(place, each)
called, heard, lock, begun = getattr(place, name), threading.Event(), threading.Lock(), 0
raises = signals.Signals._raise

def hears(self, number, frame):
    heard.set()
    raises(self, number, frame)

def calls(*arguments, **options):
    global begun
    with lock:
        begun += 1
        mine = begun
    if mine == int(at):
        os.kill(os.getpid(), int(kind))
    if mine >= int(at) and threading.current_thread() is not threading.main_thread():
        assert heard.wait(120)
    return called(*arguments, **options)

signals.Signals._raise = hears
setattr(place, name, calls)
try:
    code = main()
finally:
    with open(told, "w") as file:
        file.write(str(begun))
sys.exit(code)
"""


@dataclass(frozen=True)
class Ended:
    """The exit code, both streams, and how often the function was called in all."""

    code: int
    out: str
    err: str
    calls: int


def certk_signalled(
    arguments: list[object], function: str, told: Path, *, at: int = 1, kind: int = 2
) -> Ended:
    """Run `certk` with these arguments and a signal.

    Args:
        arguments: Of the command line.
        function: "module:name", as whoever calls it finds it.
        told: A file for the number of calls.
        at: In which of its calls the signal comes.
        kind: SIGINT if not given.
    """
    module, _, name = function.partition(":")
    command = [sys.executable, "-c", _CODE, module, name, at, kind, told, *arguments]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    return Ended(done.returncode, done.stdout, done.stderr, int(told.read_text()))
