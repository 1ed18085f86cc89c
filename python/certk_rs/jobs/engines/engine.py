"""What every engine is to a job: a place that takes calls and gives back what came of them."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ..._files.location import Location
from ..._files.reader import read_bytes
from ...errors import CertkError

_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Outcome:
    """What became of one call: its value, or the exception that it ended with."""

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
    """The witness that this file is."""
    return Witness(place, _sha256(place))


def sees(witness: Witness) -> bool:
    """Whether that very file is there, seen from this process; once seen, it is not read again."""
    if witness not in _SEEN:
        with contextlib.suppress(CertkError, OSError):
            if _sha256(witness.place) == witness.sha256:
                _SEEN.add(witness)
    return witness in _SEEN


def _sha256(place: Location) -> str:
    return hashlib.sha256(read_bytes(place, _MOST_BYTES)).hexdigest()


class Engine(Protocol):
    """Takes calls of functions that a worker can import by name, and says what came of them.

    Calls may be done in any order and more than once (a worker may be lost), so they must be the
    same whenever and wherever they are done.
    """

    @property
    def slots(self) -> int:
        """So many calls at a time keep all workers busy; this may change."""

    threads: int | None
    """So many threads a call may use."""

    def begin(self, witness: Witness) -> None:
        """Be told, before any call, by what workers know that they see what the job sees."""

    def submit(self, key: int, function: Callable[..., Any], *arguments: Any) -> None:
        """Have a call done; it is known by `key`."""

    def give_up(self, key: int) -> None:
        """Be told that nobody waits for a call: its end comes, but need not be a good one."""

    def next(self) -> Outcome:
        """Wait for the next call to end. There must be one under way."""

    def close(self) -> None:
        """Let go of everything. Calls under way are stopped as soon as they can be."""
