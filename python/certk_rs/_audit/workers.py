"""Work on several threads, with results in the order of the work."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import TypeVar

T = TypeVar("T")

SMALL = 1 << 19
"""The work on a file of fewer bytes does not pay for threads."""


class Stopped(BaseException):
    """Raised by `Workers.pause` in work whose result is not needed any more.

    It is no `Exception`, as `KeyboardInterrupt` is none, so code that catches all errors of a piece
    of work does not catch it.
    """


class Workers(ExitStack):
    """A number of threads; with one, work is done when its result is asked for.

    NumPy and hashing release the interpreter, so threads of one process suffice and big arrays need
    not travel.
    """

    def __init__(self, count: int | None) -> None:
        super().__init__()
        count = count or available()
        self._pool = self.enter_context(ThreadPoolExecutor(count)) if count > 1 else None
        self._stop = threading.Event()

    def pause(self) -> None:
        """Raise `Stopped` if the run has ended; long work calls it often."""
        if self._stop.is_set():
            raise Stopped

    def run(
        self, work: Iterable[Callable[[], T]], *, small: bool = False
    ) -> Generator[T, None, None]:
        """Yield the results of `work` in order; closing it stops what is under way.

        One run at a time, always of the thread that made the workers.

        Args:
            work: The pieces of work; an error of a piece ends the run.
            small: True to do all of them on this thread.
        """
        if self._pool is None or small:
            for each in work:
                yield each()
            return
        waiting = deque([self._pool.submit(each) for each in work])
        try:
            while waiting:
                yield waiting.popleft().result()
        finally:
            self._stop.set()
            for future in waiting:
                future.cancel()
            wait(waiting)
            self._stop.clear()


def available() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
