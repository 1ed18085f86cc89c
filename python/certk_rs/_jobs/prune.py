"""Prune jobs: many caches, one output each, resumable, on an engine of choice."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..errors import CertkError
from .engine import Engine, LocalEngine, Outcome, Progress, Unit, UnitResult, peak_memory
from .folder import JobFolder, JobRecord
from .plan import FileTask, Manner, Plan, make_plan, missing_directories, read_shard
from .ray import RayEngine
from .request import Request
from .results import (
    Failure,
    FileOutcome,
    FileReport,
    JobResult,
    Skipped,
    failure,
    file_json,
    read_file_report,
)
from .steps import Call, Steps, steps
from .write import is_of_bytes, is_of_input, is_whole

ENGINES = ("local", "ray")
# A unit that took less is not worth a file of its own.
_WORTH_KEEPING = 0.1


def prune(
    caches: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    eps: float | str | Path | Mapping[str | int, float] | None = None,
    *,
    size: float | int | None = None,
    size_bytes: int | None = None,
    hot: float | int | None = None,
    out_tol: float | None = None,
    granularity: str = "head",
    max_keep: int | float | None = None,
    keep_first: int = 0,
    keep_last: int = 0,
    block_size: int = 1,
    coverage: float = 1.0,
    holdout: float = 0.0,
    proof: str = "auto",
    rest: str = "drop",
    key_bits: int | None = None,
    value_bits: int | None = None,
    effort: str = "default",
    names: str | None = None,
    layout: str | None = None,
    queries: str = "file",
    recursive: bool = False,
    resume: bool = False,
    existing: str = "refuse",
    fail_fast: bool = False,
    engine: str = "local",
    address: str | None = None,
    jobs: int | None = None,
    threads: int | None = None,
    unit: str = "auto",
    shard: str | None = None,
    on_file: Callable[[FileOutcome], None] | None = None,
    progress: Progress | None = None,
) -> JobResult:
    """Make saved KV caches smaller, with a certificate of what was lost in every output.

    Exactly one of `eps`, `size`, `size_bytes` and `out_tol` says how much smaller, but without
    queries. The promise covers the queries in the files, but for those that `coverage` leaves out;
    docs/files.md says what is in an output, docs/prune.md how a job behaves. No output replaces an
    input.

    Args:
        caches: Files, directories, glob patterns and URLs of input caches, one or several.
        out: The directory (or URL) to write to; each output has its input's name.
        eps: Tail mass that every row (one query of one query head) may lose, 0 or 1e-300 <= eps <
            1; or by layer: a rule such as "0-3=0.01,*=0.05", a mapping {"0-3": 0.01, "*": 0.05},
            or a `.json` file that holds one.
        size: The keys that each file may keep in all, a count or a fraction of the visible ones:
            distributed over heads and layers so that the worst tail mass is least.
        size_bytes: The same, as the bytes that each output may have. With codes, both keep the keys
            that are needed most at a loss of 0.05, as `hot` does.
        hot: With `eps` and a `rest` of "codes" or "file": how many keys each file keeps in all, a
            count or a fraction; those stay that its queries need most often, in any head. eps is
            then what later queries may lose. With "codes" it may be 0.
        out_tol: The Euclidean error, in the unit of the values, that dropping keys may cause in
            the attention output of a row.
        granularity: One keep-set per kv "head", per "layer", or one for all layers ("token").
        max_keep: The most keys of a set, a count or a fraction of the visible keys; rows may then
            lose more than eps, and the output says how much.
        keep_first: So many visible positions at the start are always kept.
        keep_last: So many visible positions at the end are always kept.
        block_size: Whole blocks of so many positions are kept, as paged caches need it.
        coverage: Share of the rows of each set that must be within the budget, in (0, 1].
        holdout: Share of the queries, in [0, 1), that is set aside in a trial: sets are made for
            the others, and `held_out` of their reports says how many of these lose more than the
            budget. The sets that are written are then made for all queries. It doubles the work.
        proof: How much of the proof is written: "full", "compact", "none", or "auto": full where
            that takes at most 2 % of the bytes of keys and values, else compact.
        rest: What there is of keys and values that are not kept, for later queries
            (`certk_rs.transformers.from_cache`): "drop", nothing; "codes", codes of all keys and
            values, from which any query is answered with a proof of what it lost; "file", a byte an
            entry of every dropped key, which proves the loss and names rows of the input to fetch.
        key_bits: With codes, bits of an entry of a key: 8, 12 or 16; None: 16 for float32, else 12.
        value_bits: With codes, bits of an entry of a value: 8, the default, or 4.
        effort: How far the search for small sets goes: "fast", "default" or "thorough"; see
            `certk_rs.keep_set`.
        names: Pattern of the tensor names, None to find out; see docs/files.md.
        layout: Order of the axes, "hnd" (heads, n, d) or "nhd"; None: hnd, with doubts an error.
        queries: "file", or with `rest` "codes" "none" for caches without queries: no target is
            given, sets are what `keep_first` and `keep_last` say, and nothing is promised.
        recursive: Whether directories within directories are searched.
        resume: Go on with a job that was interrupted, after a check of what is there.
        existing: What to do about outputs that exist: "refuse" the job, "skip" or "replace" them.
        fail_fast: Whether the first bad input ends the job with its exception.
        engine: "local" (threads of this process) or "ray" (workers of a cluster).
        address: Of the Ray cluster; None: a local one.
        jobs: How many units are under way at a time; None: what suits the engine.
        threads: Threads of all units here together, or of each unit in a cluster.
        unit: What one unit of work is, a "layer" or a "head" of one; "auto": a head where layers
            are too few to keep all workers busy.
        shard: "I/N" takes every N-th input, beginning with the I-th (1 <= I <= N), as one of N jobs
            that write into the same `out` at the same time. Together they write the bytes of one
            job without it. A shard with no input does nothing.
        on_file: Called with the report, the failure or the skip of each input, once it is known.
        progress: Called with (name of the input, units done, units known of).

    Returns:
        A `JobResult`: reports of the outputs, and the failures of inputs that could not be pruned.

    Raises:
        CertkError: Bad arguments, no input, an output that exists or that would have the place of
            an input, another job in `out`.
        OSError: The system refuses something that all inputs need.
    """
    given = locals()  # a parameter for each option of the request, of the same name
    request = Request.of(**{each.name: given[each.name] for each in fields(Request)})
    manner = Manner(resume, existing, fail_fast, unit, read_shard(shard))
    several = [caches] if isinstance(caches, (str, os.PathLike)) else caches
    plan = make_plan(several, out, request, manner, recursive)
    return run_plan(plan, make_engine(engine, address, jobs, threads), on_file, progress)


def make_engine(
    engine: str = "local",
    address: str | None = None,
    jobs: int | None = None,
    threads: int | None = None,
) -> Engine:
    """Return the engine of that name; a `CertkError` if there is none, or it cannot be had."""
    if engine not in ENGINES:
        raise CertkError(f"engine is {engine!r}: give {' or '.join(ENGINES)}")
    if engine == "ray":
        return RayEngine(address, jobs, threads)
    if address is not None:
        raise CertkError("address is that of a Ray cluster: give engine ray with it")
    return LocalEngine(jobs, threads)


def run_plan(
    plan: Plan,
    engine: Engine,
    on_file: Callable[[FileOutcome], None] | None = None,
    progress: Progress | None = None,
) -> JobResult:
    """Do a job; on_file is told of every input as soon as its end is known.

    Finished outputs stay in any case, and so does what `resume` needs.

    Raises:
        CertkError: Another job is under way in OUT, an unfinished one is there, or the one that is
            to be resumed is another one. With `fail_fast`, also what the first bad input raises.
        KeyboardInterrupt: As it comes; the engine is stopped first.
    """
    return _Job(plan, engine, on_file or (lambda _outcome: None), progress).run()


class _Job:
    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        on_file: Callable[[FileOutcome], None],
        progress: Progress | None,
    ) -> None:
        self._plan, self._engine, self._manner = plan, engine, plan.manner
        self._on_file, self._progress = on_file, progress
        shard = self._manner.shard
        self._folder = JobFolder(plan.out, "" if shard is None else "{}-of-{}".format(*shard))
        self._outcomes: list[FileOutcome] = []
        self._resumed = 0
        layers = sum(len(task.layers) for task in plan.tasks)
        few = layers < 2 * engine.slots
        self._by_head = self._manner.unit == "head" or (self._manner.unit == "auto" and few)
        self._of_name = {task.source.name: task for task in plan.tasks}

    def run(self) -> JobResult:
        begun = time.monotonic()
        made = list(missing_directories(self._plan.out))
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
            driver = Driver(self._engine, self._folder, self._manner.resume, self._progress)
            for name, end in driver.run(self._steps()):
                self._end(end if isinstance(end, FileReport) else self._failed(name, end))
            if not any(isinstance(outcome, Failure) for outcome in self._outcomes):
                self._folder.remove_all_parts()
            spent = {"seconds": time.monotonic() - begun, "peak_memory": peak_memory()}
            self._folder.write_manifest(self._plan.manifest("ended") | spent)
        return self._result(time.monotonic() - begun)

    def _clear(self, fresh: bool) -> None:
        """Leave nothing where nothing came of the job."""
        done = any(isinstance(outcome, (FileReport, Skipped)) for outcome in self._outcomes)
        if fresh and not done and not self._folder.has_parts():
            self._folder.discard()

    def _begin(self) -> None:
        """Look at what was here before, and begin or resume the job."""
        before = self._folder.read_manifest()
        if self._manner.resume and before is not None:
            self._plan.check_same(before)
        elif (
            before is not None
            and before.get("state") == "running"
            and self._manner.existing == "refuse"
        ):
            raise CertkError(
                f"{self._plan.out}: an unfinished job is there: go on with --resume, or begin anew "
                "with --force"
            )
        if self._manner.shard is not None and self._manner.existing == "refuse":
            self._check_shards(self._manner.shard)
        if not self._manner.resume:
            self._folder.forget()
        self._folder.write_manifest(self._plan.manifest("running"))
        self._engine.begin(self._folder.manifest)

    def _check_shards(self, shard: tuple[int, int]) -> None:
        """See that other shards, as many in all, are of the same inputs and request."""
        now = self._plan.manifest("running")
        for folder, said in JobRecord.of(self._plan.out).jobs:
            same = all(said.get(name) == now[name] for name in ("all_inputs", "request"))
            if folder.shard.endswith(f"-of-{shard[1]}") and not same:
                raise CertkError(
                    f"{self._plan.out}: shard {folder.shard} is of other inputs or options: give "
                    "all shards the same, and an OUT apart from the inputs"
                )

    def _steps(self) -> Iterator[tuple[str, Steps]]:
        """Return the inputs that there is work for; the others are told of at once."""
        for task in self._plan.tasks:
            replace = self._manner.existing == "replace"
            if self._manner.resume:
                finished = self._finished(task)
                if finished is not None:
                    self._resumed += 1
                    self._end(finished)
                    continue
                replace = replace or is_of_input(task.target, task.input.headers)
            elif self._manner.existing == "skip" and task.target.exists():
                self._end(Skipped(task.source.name, str(task.target)))
                continue
            yield task.source.name, steps(task, replace, self._by_head, self._engine.threads)

    def _finished(self, task: FileTask) -> FileReport | None:
        """Return the report of an earlier run, if its output is still what it was."""
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

    def _failed(self, name: str, error: BaseException) -> Failure:
        if self._manner.fail_fast or not isinstance(error, Exception):
            raise error
        return failure(self._of_name[name].source, error)

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


def _remove_empty(directories: list[Path]) -> None:
    for directory in directories:
        with contextlib.suppress(OSError):  # not empty
            directory.rmdir()


@dataclass(eq=False)
class _Running:
    """One input under way: its steps, and the values of the calls that it waits for."""

    name: str
    steps: Steps
    values: list[Any] = field(default_factory=list)
    missing: int = 0
    units: list[Unit] = field(default_factory=list)


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
        self._ended: deque[tuple[str, FileReport | BaseException]] = deque()

    def run(
        self, jobs: Iterator[tuple[str, Steps]]
    ) -> Iterator[tuple[str, FileReport | BaseException]]:
        """Run all of them; return the name and the end of each as soon as it is known."""
        more = True
        while True:
            while self._ended:
                yield self._ended.popleft()
            while more and len(self._waiting) + len(self._under_way) < self._engine.slots:
                begun = next(jobs, None)
                more = begun is not None
                if begun is not None:
                    running = _Running(*begun)
                    self._alive.add(running)
                    self._go_on(running, None)
            self._submit()
            if self._ended:
                continue
            if self._under_way:
                self._take(self._engine.next())
            elif not more and not self._waiting:
                return

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
            self._ended.append((running.name, end.value))
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
        self._ended.append((running.name, error))
