"""Calls on threads of this process.

Reading, hashing and choosing all happen without the lock of the interpreter, and a thread costs no
start and no copy, so threads measure better than processes do.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any

from ... import _native
from .engine import Outcome, Witness, check_count

# More calls at a time need more memory and gain little: calls have threads of their own.
_MOST = 4
# Seconds that `close` waits for calls to notice that nobody wants them any longer.
_PATIENCE = 0.5
# How often waiting is left to see whether the user has pressed Ctrl-C.
_GLANCE = 0.2


def cores() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class LocalEngine:
    """An `Engine` of some threads.

    Args:
        jobs: How many calls at a time; None: one per processor, at most four.
        threads: Threads for all calls together; None: all there are.
    """

    def __init__(self, jobs: int | None = None, threads: int | None = None) -> None:
        check_count("jobs", jobs)
        check_count("threads", threads)
        every = cores() if threads is None else threads
        self.slots = min(every, _MOST) if jobs is None else jobs
        self.threads: int | None = max(1, every // self.slots)
        self._calls: queue.SimpleQueue[tuple[int, Callable[..., Any], tuple[Any, ...]] | None]
        self._calls = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._cancel = _native.Cancellation()
        # Daemons, so that a call that is slow to stop does not hold up the end of the process.
        self._workers = [
            threading.Thread(target=self._work, name=f"certk-{i}", daemon=True)
            for i in range(self.slots)
        ]
        for worker in self._workers:
            worker.start()

    def begin(self, witness: Witness) -> None:
        """See `Engine`; threads see what this process sees."""

    def submit(self, key: int, function: Callable[..., Any], *arguments: Any) -> None:
        """See `Engine`."""
        self._calls.put((key, function, arguments))

    def give_up(self, key: int) -> None:
        """See `Engine`; a call here takes no longer than it does."""

    def next(self) -> Outcome:
        """See `Engine`."""
        while True:
            try:
                return self._done.get(timeout=_GLANCE)
            except queue.Empty:
                continue

    def close(self) -> None:
        """See `Engine`."""
        self._cancel.cancel()
        for _ in self._workers:
            self._calls.put(None)
        for worker in self._workers:
            worker.join(_PATIENCE)

    def _work(self) -> None:
        with self._cancel:
            while (call := self._calls.get()) is not None:
                if self._cancel.cancelled:
                    return
                key, function, arguments = call
                try:
                    outcome = Outcome(key, function(*arguments))
                except BaseException as error:  # all of it is for whoever waits
                    outcome = Outcome(key, error=error)
                self._done.put(outcome)
