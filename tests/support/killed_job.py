"""Prune jobs in processes of their own that are killed in the middle; run as a script by a test.

A process that has imported everything forks for every job, so that a job costs no start. What a job
does is told through a pipe as it does it. The system ends it by an alarm that nobody handles, some
time after a phase was begun: as `kill -9` does, but without the milliseconds that a killer takes to
wake up. Each line of standard input is an `Order` as JSON, each line of output a `Told`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Phases lie within each other, and those of several units are under way at once.
PHASES = ("job", "choosing", "part-writing", "assembling", "renaming")


@dataclass(frozen=True)
class Order:
    """The arguments of `certk`, and the end: `delay` after `phase` begins for the `number`-th time.

    Phases count from 0; without a phase the job comes to its end.
    """

    arguments: list[str]
    phase: str | None = None
    number: int = 0
    delay: float = 0.0


@dataclass(frozen=True)
class Told:
    """The exit code (negative: the signal), and all (phase, 1 or -1, seconds) until then."""

    code: int
    events: list[tuple[str, int, float]]

    def under_way(self) -> set[str]:
        """The phases in which the job ended."""
        depth: Counter[str] = Counter()
        for phase, step, _ in self.events:
            depth[phase] += step
        return {phase for phase, count in depth.items() if count > 0}

    def lengths(self, phase: str) -> list[float]:
        """Return the time of each run of a phase; approximate where several overlap."""
        begun = [at for each, step, at in self.events if (each, step) == (phase, 1)]
        ended = [at for each, step, at in self.events if (each, step) == (phase, -1)]
        return [last - first for first, last in zip(begun, ended, strict=True)]


class Jobs:
    """The process that forks; a context manager."""

    def __enter__(self) -> Jobs:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "OPENBLAS_NUM_THREADS": "1",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)

    def run(self, order: Order) -> Told:
        """Do a job until it ends or is killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(order)) + "\n")
        self._process.stdin.flush()
        said = json.loads(self._process.stdout.readline())
        return Told(said["code"], [tuple(each) for each in said["events"]])


def _fork(order: Order) -> Told:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os._exit(_job(order, writing))
    os.close(writing)
    with os.fdopen(reading) as lines:
        events = [tuple(json.loads(line)) for line in lines]
    _, status = os.waitpid(child, 0)
    return Told(os.waitstatus_to_exitcode(status), events)


def _job(order: Order, writing: int) -> int:
    from certk_rs._files.atomic import NewFile
    from certk_rs._jobs import prune, steps
    from certk_rs._jobs.folder import JobFolder
    from certk_rs.cli import main

    def told(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def telling(*arguments: Any, **options: Any) -> Any:
            tell(phase, 1)
            try:
                return function(*arguments, **options)
            finally:
                tell(phase, -1)

        return telling

    begun = itertools.count()

    def tell(phase: str, step: int) -> None:
        # Short enough to be written in one piece, whatever other threads write.
        os.write(writing, (json.dumps([phase, step, time.monotonic()]) + "\n").encode())
        if (phase, step) == (order.phase, 1) and next(begun) == order.number:
            signal.setitimer(signal.ITIMER_REAL, max(order.delay, 1e-6))

    signal.signal(signal.SIGALRM, signal.SIG_DFL)

    # The result of a unit that takes as little as here would not be kept otherwise.
    prune._WORTH_KEEPING = 0.0
    steps.run_unit = told("choosing", steps.run_unit)
    steps.assemble = told("assembling", steps.assemble)
    JobFolder.write_part = told("part-writing", JobFolder.write_part)  # type: ignore[method-assign]
    NewFile.commit = told("renaming", NewFile.commit)  # type: ignore[method-assign]
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    code: int = told("job", main)(order.arguments)
    return code


if __name__ == "__main__":
    from certk_rs.cli import main

    # Whatever else a command imports; but no thread may be there when a process is forked.
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):
        main(["prune", "no such file", "-o", os.devnull, "--eps", "0.1"])
    for text in sys.stdin:
        print(json.dumps(asdict(_fork(Order(**json.loads(text))))), flush=True)
