"""Work on several threads, with results in the order of the work."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Stopped(BaseException):
    """Raised by `Workers.pause` in work that nobody waits for any more.

    It is no `Exception`, as `KeyboardInterrupt` is none, so code that catches all errors of a piece
    of work does not catch it.
    """


@dataclass(frozen=True)
class Work(Generic[T]):
    """A piece of work; a small one does not pay for a thread."""

    do: Callable[[], T]
    small: bool = False


class Workers:
    """A number of threads; with one, work is done when its result is asked for.

    NumPy and hashing release the interpreter, so threads of one process suffice and big arrays need
    not travel. Leaving the block stops work at its next `pause`.
    """

    def __init__(self, count: int | None) -> None:
        self.count = count or available()
        self._pool = ThreadPoolExecutor(self.count) if self.count > 1 else None
        self._stop = threading.Event()

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def pause(self) -> None:
        """Raise `Stopped` if nobody waits any more; long work calls it often."""
        if self._stop.is_set():
            raise Stopped

    def in_order(self, work: Iterable[Work[T]], ahead: int) -> Iterator[T]:
        """Yield the results of `work`; at most `ahead` more are under way or done."""
        waiting: deque[Future[T]] = deque()
        for each in work:
            if not waiting and (each.small or self._pool is None):
                yield each.do()
                continue
            assert self._pool is not None
            if each.small:
                done: Future[T] = Future()
                done.set_result(each.do())
                waiting.append(done)
            else:
                waiting.append(self._pool.submit(each.do))
            while waiting and (len(waiting) > ahead or waiting[0].done()):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def available() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
