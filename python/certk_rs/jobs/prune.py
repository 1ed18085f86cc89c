"""Prune jobs: many caches, one output each, resumable, on an engine of choice."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._files.atomic import already_exists
from .._files.location import Location, locate
from ..errors import CertkError, one_line
from .driver import Driver, Ended
from .engines.engine import Engine
from .file_job import FileTask, Steps, plan_file, steps
from .file_report import FileReport, file_json, read_file_report
from .finished import is_of_bytes, is_of_input, is_whole
from .inputs import Source, check_apart, expand
from .job_folder import FOLDER, JobFolder
from .job_result import Failure, FileOutcome, JobResult, Skipped
from .manifest import check_same, manifest
from .memory import peak_memory
from .progress import Progress
from .request import Request


@dataclass(frozen=True)
class Manner:
    """How a job is done; none of it has a say in the bytes of an output.

    `existing` says what is done about an output that is there: "refuse" (the job), "skip" or
    "replace" (it). `unit` is what one unit of work is, a "layer", a "head", or "auto": a head where
    layers are too few to keep the engine busy.
    """

    resume: bool = False
    existing: str = "refuse"
    fail_fast: bool = False
    unit: str = "auto"


@dataclass(frozen=True)
class Plan:
    """A whole job, every header of it read: what can be done, and what cannot."""

    out: Location
    request: Request
    tasks: tuple[FileTask, ...]
    failures: tuple[Failure, ...]


def make_plan(
    caches: Iterable[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    request: Request,
    manner: Manner | None = None,
    recursive: bool = False,
) -> Plan:
    """Read the headers of all inputs, and see what can be done. Nothing is made.

    Raises:
        CertkError: There is no input, two inputs have one name, an output would have the place of
            an input, or OUT cannot be written to.
    """
    manner = manner or Manner()
    place = locate(out)
    sources = expand(list(caches), recursive=recursive)
    _check_out(place)
    check_apart(sources, place)
    tasks: list[FileTask] = []
    failures: list[Failure] = []
    for source in sources:
        target = place / source.name
        if manner.existing == "refuse" and not manner.resume and target.exists():
            raise CertkError(
                f"{already_exists_text(target)}; or go on with --resume or --skip-existing, or "
                "begin anew with --force"
            )
        try:
            tasks.append(plan_file(source, target, request))
        except (CertkError, OSError) as error:
            if manner.fail_fast or len(sources) == 1:
                raise
            failures.append(failure(source, error))
    return Plan(place, request, tuple(tasks), tuple(failures))


def already_exists_text(target: Location) -> str:
    """What is said of an output that is there."""
    return str(already_exists(target))


def run_plan(
    plan: Plan,
    engine: Engine,
    manner: Manner | None = None,
    on_file: Callable[[FileOutcome], None] | None = None,
    progress: Progress | None = None,
) -> JobResult:
    """Do a job; on_file is told of every input as soon as its end is known.

    Outputs that are finished stay whatever happens afterwards, and so does what `resume` needs.

    Raises:
        CertkError: Another job is under way in OUT, an unfinished one is there, or the one that is
            to be resumed is another one. With `fail_fast`, whatever the first bad input raises.
        KeyboardInterrupt: As it comes; the engine is stopped first.
    """
    return _Job(plan, engine, manner or Manner(), on_file, progress).run()


class _Job:
    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        manner: Manner,
        on_file: Callable[[FileOutcome], None] | None,
        progress: Progress | None,
    ) -> None:
        self._plan, self._engine, self._manner = plan, engine, manner
        self._on_file = on_file or (lambda _outcome: None)
        self._progress = progress
        self._folder = JobFolder(plan.out)
        self._outcomes: list[FileOutcome] = []
        self._resumed = 0
        layers = sum(len(task.layers) for task in plan.tasks)
        few = layers < 2 * engine.slots
        self._by_head = self._manner.unit == "head" or (self._manner.unit == "auto" and few)
        self._of_name = {task.source.name: task for task in plan.tasks}

    def run(self) -> JobResult:
        begun = time.monotonic()
        made = list(_missing_directories(self._plan.out))
        with contextlib.ExitStack() as stack:
            stack.callback(self._engine.close)
            # Last of all, and only where the lock was had: what is there may be another job's.
            stack.callback(_remove_empty, made)
            stack.enter_context(self._folder.lock())
            fresh = self._folder.read_manifest() is None
            stack.callback(lambda: self._clear(fresh))
            self._begin()
            for bad in self._plan.failures:
                self._end(bad)
            self._work()
            if not any(isinstance(outcome, Failure) for outcome in self._outcomes):
                self._folder.remove_all_parts()
            ended = self._manifest("ended")
            spent = {"seconds": time.monotonic() - begun, "peak_memory": peak_memory()}
            self._folder.write_manifest({**ended, **spent})
        return self._result(time.monotonic() - begun)

    def _manifest(self, state: str) -> dict[str, Any]:
        refused = [bad.name for bad in self._plan.failures]
        return manifest(self._plan.request, self._plan.tasks, state, refused)

    def _clear(self, fresh: bool) -> None:
        """Leave nothing where nothing came of the job."""
        done = any(isinstance(outcome, (FileReport, Skipped)) for outcome in self._outcomes)
        if fresh and not done and not self._folder.has_parts():
            self._folder.discard()

    def _begin(self) -> None:
        """See what was here before, and begin (or go on with) the job."""
        before = self._folder.read_manifest()
        if self._manner.resume and before is not None:
            check_same(before, self._plan.request, self._plan.tasks)
        elif (
            before is not None
            and before.get("state") == "running"
            and self._manner.existing == "refuse"
        ):
            raise CertkError(
                f"{self._plan.out}: an unfinished job is there: go on with --resume, or begin anew "
                "with --force"
            )
        if not self._manner.resume:
            self._folder.forget()
        self._folder.write_manifest(self._manifest("running"))
        self._engine.begin(self._folder.witness())

    def _work(self) -> None:
        driver = Driver(self._engine, self._folder, self._manner.resume, self._progress)
        for ended in driver.run(self._steps()):
            self._end(self._outcome(ended))

    def _steps(self) -> Iterator[tuple[str, Steps]]:
        """The inputs that there is work for; the others are told of at once."""
        for task in self._plan.tasks:
            replace = self._manner.existing == "replace"
            if self._manner.resume:
                finished = self._finished(task)
                if finished is not None:
                    self._resumed += 1
                    self._end(finished)
                    continue
                replace = replace or is_of_input(task.target, task.header_sha256s)
            elif self._manner.existing == "skip" and task.target.exists():
                self._end(Skipped(task.source.name, str(task.target)))
                continue
            yield (
                task.source.name,
                steps(task, replace, self._by_head, self._engine.threads),
            )

    def _finished(self, task: FileTask) -> FileReport | None:
        """What an earlier run has said of this input, if its output is still what it was."""
        state = self._folder.read_state(task.source.name)
        if state is None or state.get("state") != "done":
            return None
        try:
            report = read_file_report(state["report"])
        except (KeyError, TypeError):
            return None
        if not is_whole(task.target, report.header_sha256):
            return None
        same = task.changed is not None and state.get("changed") == list(task.changed)
        # If not, it may have other bytes now, of the same size, time and header.
        if not same and not is_of_bytes(task.target, task.source.location):
            return None
        return report.placed(str(task.source.location), str(task.target))

    def _outcome(self, ended: Ended) -> FileOutcome:
        if ended.report is not None:
            return ended.report
        error = ended.error
        assert error is not None
        if self._manner.fail_fast or not isinstance(error, Exception):
            raise error
        return failure(self._of_name[ended.name].source, error)

    def _end(self, outcome: FileOutcome) -> None:
        self._outcomes.append(outcome)
        if isinstance(outcome, FileReport):
            changed = self._of_name[outcome.name].changed
            state = {"state": "done", "report": file_json(outcome), "changed": changed}
            self._folder.write_state(outcome.name, state)
        elif isinstance(outcome, Failure):
            self._folder.write_state(outcome.name, {"state": "failed", **vars(outcome)})
        self._on_file(outcome)

    def _result(self, seconds: float) -> JobResult:
        order = {task.source.name: number for number, task in enumerate(self._plan.tasks)}
        outcomes = sorted(self._outcomes, key=lambda each: order.get(each.name, -1))
        return JobResult(
            self._plan.out,
            self._plan.request,
            tuple(each for each in outcomes if isinstance(each, FileReport)),
            tuple(each for each in outcomes if isinstance(each, Failure)),
            tuple(each for each in outcomes if isinstance(each, Skipped)),
            self._resumed,
            seconds,
            peak_memory(),
        )


def failure(source: Source, error: BaseException) -> Failure:
    """An input that failed, with a line that names it."""
    message = one_line(error)
    if isinstance(error, OSError):
        place = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
        message = f"{place}{error.strerror or message}"
    elif isinstance(error, MemoryError):
        message = "not enough memory: give fewer queries or keys in one file, or fewer --jobs"
    elif not isinstance(error, CertkError):
        message = f"unexpected {type(error).__name__}: {message}; please report it"
    if str(source.location) not in message and source.location.name not in message:
        message = f"{source.location}: {message}"
    kind = "OSError" if isinstance(error, OSError) else type(error).__name__
    return Failure(source.name, str(source.location), message, kind)


def _check_out(out: Location) -> None:
    """OUT must be, or be possible to make, a directory that can be written to."""
    if not out.is_local:
        return
    missing = [*_missing_directories(out)]
    place = missing[-1].parent if missing else out.path
    if not place.is_dir():
        raise CertkError(f"{place} is not a directory: OUT ({out}) must be one, or not exist yet")
    if not os.access(place, os.W_OK | os.X_OK):
        raise CertkError(f"{place} cannot be written to: choose another OUT than {out}")


def _missing_directories(out: Location) -> Iterator[Path]:
    """The directories that have to be made for OUT, the innermost first."""
    if out.is_local:
        place = out.path
        # A drive that is not there is its own parent.
        while not os.path.lexists(place) and place != place.parent:
            yield place
            place = place.parent


def _remove_empty(directories: list[Path]) -> None:
    for directory in directories:
        with contextlib.suppress(OSError):  # not empty
            directory.rmdir()


__all__ = ["FOLDER", "Failure", "FileOutcome", "JobResult", "Manner", "Plan", "Skipped"]
