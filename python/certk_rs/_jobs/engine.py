"""Units of work, and the engines that do them.

A `Unit` is a piece of a prune job that can be done anywhere. Units and their results are plain
values that can be pickled, and a result does not tell where it was made. An engine takes calls,
such as of `run_unit`, and gives back their outcomes. The local one has threads: reading, hashing
and choosing happen without the lock of the interpreter, and a thread costs no start and no copy, so
threads measure better than processes do.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .. import __version__, _native
from .._files.certificate import TensorFacts
from .._files.layers import Layer
from .._files.location import Location
from ..errors import CertkError
from .choose import Ask, choose_layers
from .inputs import Input
from .sets import Answer, Demands, LayerRecord, Probe

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with (label, done so far, total); totals are bytes or steps, and may grow."""

_PART = b"certk-part-2\n"
# More local calls at a time need more memory and gain little: calls have threads of their own.
_MOST_CALLS = 4
# Seconds that `close` waits for calls to notice that nobody wants them any longer.
_PATIENCE = 0.5
# How often waiting is left to see whether the user has pressed Ctrl-C.
_GLANCE = 0.2


@dataclass(frozen=True)
class Unit:
    """A piece of the work on one input.

    `layers` are chosen for, kv heads `heads` of them (None: all); the tensors of `hashes` are
    hashed and seen to be finite. `ask` is None where nothing is chosen. `needs` bytes of memory are
    what some unit of this input has to have at once: where they are not to be had, that is found
    out before anything is read. `content` is a hash of the bytes that the input is known to have,
    where it is known; two units that differ in it are not taken for each other.
    """

    input: Input
    layers: tuple[int, ...] = ()
    heads: tuple[int, int] | None = None
    ask: Ask | None = None
    hashes: tuple[str, ...] = ()
    label: str = ""
    needs: int = 0
    content: str = ""

    def key(self) -> str:
        """Return a name for the result, equal for equal work only."""
        given = self.input
        text = repr((__version__, str(given.location), given.names, given.layout, given.identity))
        text += repr((self.layers, self.heads, self.ask, self.hashes, self.content))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class UnitResult:
    """The result of a unit: an answer for every layer, and the facts of what was hashed.

    `seconds` is the time that it took, which no output depends on. `kept` results were left by an
    earlier run, and are of the bytes that the input had then.
    """

    answers: tuple[Answer, ...]
    facts: dict[str, TensorFacts]
    seconds: float
    kept: bool = False


def run_unit(unit: Unit, threads: int | None) -> UnitResult:
    """Do one unit. The result does not depend on `threads`, nor on where this runs.

    Raises:
        CertkError: The input is not what it should be, or has changed since it was planned.
        MemoryError: There is not as much as the unit needs.
        OSError: The system refuses it.
    """
    begun = time.monotonic()
    # Asked for and let go of: a file may claim to be of any size.
    np.empty(unit.needs, np.uint8)
    with unit.input.read() as cache:
        cache.check_while_reading(unit.hashes)
        answers: tuple[Answer, ...] = ()
        if unit.ask is not None:
            layers = [layer for layer in cache.layers if layer.index in unit.layers]
            answers = choose_layers(cache, layers, unit.heads, unit.ask, threads)
        facts = {name: cache.check_tensor(name) for name in unit.hashes}
        cache.file.check_unchanged(unit.input.identity)
    return UnitResult(answers, facts, time.monotonic() - begun)


def hash_now(given: Input, tensor: str) -> TensorFacts:
    """Return the facts of a tensor as it is now; raises as a unit does."""
    with given.read() as cache:
        return cache.check_tensor(tensor)


def pack(result: UnitResult) -> bytes:
    """Return a result as bytes that tell whether they were damaged."""
    arrays: dict[str, NDArray[Any]] = {}
    answers = []
    for i, answer in enumerate(result.answers):
        kind, layer = type(answer).__name__, vars(answer.layer)
        answers.append({"kind": kind, "layer": layer, "first_head": answer.first_head})
        for name, value in vars(answer).items():
            if isinstance(value, np.ndarray):
                arrays[f"{i}.{name}"] = value
    said = {
        "facts": {name: vars(facts) for name, facts in result.facts.items()},
        "seconds": result.seconds,
        "answers": answers,
    }
    arrays["body"] = np.frombuffer(json.dumps(said).encode(), np.uint8)
    stream = io.BytesIO()
    np.savez(stream, **arrays)  # type: ignore[arg-type]  # no name is that of an option
    data = stream.getvalue()
    return _PART + hashlib.sha256(data).digest() + data


def unpack(data: bytes) -> UnitResult | None:
    """Return the result that `pack` made into these bytes; None for other bytes."""
    head = len(_PART) + 32
    body = data[head:]
    if not data.startswith(_PART) or hashlib.sha256(body).digest() != data[len(_PART) : head]:
        return None
    try:
        with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
            said = json.loads(arrays["body"].tobytes())
            answers = tuple(_answer(i, each, arrays) for i, each in enumerate(said["answers"]))
        facts = {
            name: TensorFacts(**each | {"shape": tuple(each["shape"])})
            for name, each in said["facts"].items()
        }
        return UnitResult(answers, facts, float(said["seconds"]), kept=True)
    except (ValueError, KeyError, TypeError):  # of another version
        return None


def _answer(i: int, body: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Answer:
    kinds: dict[str, type[Answer]] = {each.__name__: each for each in (LayerRecord, Probe, Demands)}
    kind = kinds[body["kind"]]
    rest: dict[str, Any] = {each.name: arrays.get(f"{i}.{each.name}") for each in fields(kind)[2:]}
    return kind(Layer(**body["layer"]), int(body["first_head"]), **rest)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one call: its value, or the exception that it ended with."""

    key: int
    value: Any = None
    error: BaseException | None = None


def check_count(name: str, value: object) -> None:
    """Raise `CertkError` unless it is None or a count of at least one."""
    if value is not None and (type(value) is not int or value < 1):
        raise CertkError(f"{name} is {value!r}: give a count of 1 or more")


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

    def begin(self, witness: Location) -> None:
        """Take a file that is where the outputs go, before any call: workers must see it."""

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

    def begin(self, witness: Location) -> None:
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


def peak_memory() -> int:
    """Return the bytes that were resident at most; 0 where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
