"""Engines: they take calls of a job and give back the outcomes. The local one has threads.

Reading, hashing and choosing happen without the lock of the interpreter, and a thread costs no
start and no copy, so threads measure better than processes do.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from .. import _native
from .._files.location import Location
from .._files.reader import read_bytes
from ..errors import CertkError

_MOST_BYTES = 1 << 30
# More local calls at a time need more memory and gain little: calls have threads of their own.
_MOST_CALLS = 4
# Seconds that `close` waits for calls to notice that nobody wants them any longer.
_PATIENCE = 0.5
# How often waiting is left to see whether the user has pressed Ctrl-C.
_GLANCE = 0.2


@dataclass(frozen=True)
class Outcome:
    """The outcome of one call: its value, or the exception that it ended with."""

    key: int
    value: Any = None
    error: BaseException | None = None


@dataclass(frozen=True)
class Witness:
    """A file that the job has written where the outputs go, by which a worker knows the place."""

    place: Location
    sha256: str


def check_count(name: str, value: object) -> None:
    """Raise `CertkError` unless it is None or a count of at least one."""
    if value is not None and (type(value) is not int or value < 1):
        raise CertkError(f"{name} is {value!r}: give a count of 1 or more")


_SEEN: set[Witness] = set()


def witness_of(place: Location) -> Witness:
    """Return the witness that this file is."""
    return Witness(place, _sha256(place))


def sees(witness: Witness) -> bool:
    """Return whether this process sees that very file; once seen, it is not read again."""
    if witness not in _SEEN:
        with contextlib.suppress(CertkError, OSError):
            if _sha256(witness.place) == witness.sha256:
                _SEEN.add(witness)
    return witness in _SEEN


def _sha256(place: Location) -> str:
    return hashlib.sha256(read_bytes(place, _MOST_BYTES)).hexdigest()


class Engine(Protocol):
    """Takes calls of functions that a worker can import by name, and gives back their outcomes.

    Calls may be done in any order and more than once (a worker may be lost), so they must be the
    same whenever and wherever they are done.
    """

    @property
    def slots(self) -> int:
        """So many calls at a time keep all workers busy; this may change."""

    threads: int | None
    """So many threads a call may use."""

    def begin(self, witness: Witness) -> None:
        """Take the witness by which workers know the job's OUT; before any call."""

    def submit(self, key: int, function: Callable[..., Any], *arguments: Any) -> None:
        """Have a call done; it is known by `key`."""

    def give_up(self, key: int) -> None:
        """Take note that nobody waits for a call; any outcome will do."""

    def next(self) -> Outcome:
        """Wait for the next call to end. There must be one under way."""

    def close(self) -> None:
        """Let go of everything. Calls under way are stopped as soon as they can be."""


def cores() -> int:
    """Return the number of processors that this process may use."""
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
        self.slots = min(every, _MOST_CALLS) if jobs is None else jobs
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
