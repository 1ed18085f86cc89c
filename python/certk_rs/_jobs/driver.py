"""The driver of a job: it keeps an engine busy with the steps of many inputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .engine import Engine, Outcome
from .folder import JobFolder
from .results import FileReport
from .steps import Call, Steps
from .units import Unit, UnitResult

# A unit that took less is not worth a file of its own.
_WORTH_KEEPING = 0.1


@dataclass(eq=False)
class _Running:
    """One input under way: its steps, and the values of the calls that it waits for."""

    name: str
    steps: Steps
    values: list[Any] = field(default_factory=list)
    missing: int = 0
    units: list[Unit] = field(default_factory=list)


@dataclass(frozen=True)
class Ended:
    """The end of one input: a report, or the exception that ended it."""

    name: str
    report: FileReport | None = None
    error: BaseException | None = None


class Driver:
    """Runs the steps of inputs on an engine. Not more inputs are begun than keep it busy.

    Args:
        engine: Where calls are done.
        folder: Where the results of units are kept while their output is not finished.
        reuse: Whether results that are there already are taken.
        tell: Told (name, calls done, calls known of) of an input after every call.
    """

    def __init__(
        self,
        engine: Engine,
        folder: JobFolder,
        reuse: bool,
        tell: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self._engine = engine
        self._folder = folder
        self._reuse = reuse
        self._tell = tell or (lambda _name, _done, _known: None)
        self._waiting: deque[tuple[_Running, int, Call]] = deque()
        self._under_way: dict[int, tuple[_Running, int, Call]] = {}
        self._next_key = 0
        self._alive: set[_Running] = set()
        self._ended: deque[Ended] = deque()

    def run(self, jobs: Iterator[tuple[str, Steps]]) -> Iterator[Ended]:
        """Run all of them; the end of each comes as soon as it is known."""
        more = True
        while True:
            while more and len(self._waiting) + len(self._under_way) < self._engine.slots:
                begun = next(jobs, None)
                more = begun is not None
                if begun is not None:
                    running = _Running(*begun)
                    self._alive.add(running)
                    self._go_on(running, None)
            yield from self._drain()
            self._submit()
            if not self._under_way:
                if not more and not self._waiting:
                    return
                continue
            self._take(self._engine.next())
            yield from self._drain()

    def _drain(self) -> Iterator[Ended]:
        while self._ended:
            yield self._ended.popleft()

    def _submit(self) -> None:
        while self._waiting and len(self._under_way) < self._engine.slots:
            running, place, call = self._waiting.popleft()
            if running not in self._alive:
                continue
            function, arguments = call
            if self._reuse and isinstance(arguments[0], Unit):
                kept = self._folder.read_part(arguments[0])
                if kept is not None:
                    self._deliver(running, place, kept)
                    continue
            self._under_way[self._next_key] = (running, place, call)
            self._engine.submit(self._next_key, function, *arguments)
            self._next_key += 1

    def _take(self, outcome: Outcome) -> None:
        running, place, call = self._under_way.pop(outcome.key)
        if running not in self._alive:
            return
        if outcome.error is not None:
            self._fail(running, outcome.error)
            return
        value = outcome.value
        if isinstance(value, UnitResult):
            unit = call[1][0]
            if value.seconds >= _WORTH_KEEPING:
                try:
                    self._folder.write_part(unit, value)
                except OSError as error:
                    self._fail(running, error)
                    return
        self._deliver(running, place, value)

    def _deliver(self, running: _Running, place: int, value: Any) -> None:
        running.values[place] = value
        running.missing -= 1
        self._tell(running.name, len(running.values) - running.missing, len(running.values))
        if not running.missing:
            self._go_on(running, running.values)

    def _go_on(self, running: _Running, values: list[Any] | None) -> None:
        try:
            calls = next(running.steps) if values is None else running.steps.send(values)
        except StopIteration as end:
            self._alive.discard(running)
            self._folder.remove_parts(running.units)
            self._ended.append(Ended(running.name, report=end.value))
            return
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            self._fail(running, error)
            return
        running.values, running.missing = [None] * len(calls), len(calls)
        running.units += [call[1][0] for call in calls if isinstance(call[1][0], Unit)]
        # Ahead of inputs that were begun later, so that outputs come in about their order.
        self._waiting.extendleft(
            (running, place, call) for place, call in reversed(list(enumerate(calls)))
        )

    def _fail(self, running: _Running, error: BaseException) -> None:
        self._alive.discard(running)
        running.steps.close()
        for key, (other, _, _) in self._under_way.items():
            if other is running:
                self._engine.give_up(key)
        self._ended.append(Ended(running.name, error=error))
