"""Calls on the workers of a Ray cluster, which need this package and the same view of the files.

Whatever Ray does over again by itself it may do without end (a worker that has no memory, say), so
it does nothing: a call that was lost, or that the system refused, is handed in anew from here, a
few times.
"""

from __future__ import annotations

import logging
import pickle
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ... import __version__
from ..._files.location import Location
from ..._files.reader import of_another_machine
from ...errors import CertkError, one_line
from .engine import Outcome, Witness, check_count, sees
from .local import cores
from .ray_cluster import Head, connect, disconnect, load_ray, within

_log = logging.getLogger(__name__)

# A call whose worker was lost, or to which the system refused something, is done again so often.
_RETRIES = 3
# Before it is handed in again: what goes wrong everywhere at once is often over soon.
_PAUSE = 0.2
_GLANCE = 0.2
# A cluster may grow: how often it is asked what it has.
_ASK = 5.0
# Calls at a time by processor, so that none waits for the next one to arrive.
_AHEAD = 1.5


@dataclass
class _Task:
    """One call under way."""

    key: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    tries: int = 0


@dataclass(frozen=True)
class _Answer:
    """What a worker sends back: a value or an exception, and where it was."""

    value: Any = None
    error: BaseException | None = None
    host: str = ""


class RayEngine:
    """An `Engine` of the tasks of a Ray cluster.

    A cluster that this process is connected to already is used, and left as it is: calls under way
    when the engine is closed run to their end there, and nobody hears of them.

    Args:
        address: Of the cluster, see `ray_cluster.connect`; None: RAY_ADDRESS, or a local one.
        jobs: How many calls at a time; None: one and a half per processor of the cluster.
        threads: Threads of each call, and processors that it asks for.
    """

    def __init__(
        self, address: str | None = None, jobs: int | None = None, threads: int | None = None
    ) -> None:
        check_count("jobs", jobs)
        check_count("threads", threads)
        self.threads: int | None = threads or 1
        self._jobs = jobs
        self._ray = load_ray()
        self._own = not self._ray.is_initialized()
        if self._own:
            connect(self._ray, address, max(cores(), self.threads))
        try:
            self._head = Head(self._ray)
            self._processors = self._count(self.threads)
            # SPREAD reads with the network of every machine, and tries again elsewhere.
            self._call = self._ray.remote(
                num_cpus=self.threads, max_retries=0, scheduling_strategy="SPREAD"
            )(_call)
        except BaseException:
            self.close()
            raise
        self._asked = time.monotonic()
        self._under_way: dict[Any, _Task] = {}
        self._later: list[tuple[float, _Task]] = []
        self._witness: Witness | None = None

    @property
    def slots(self) -> int:
        """So many calls at a time keep all workers busy."""
        if self._jobs is not None:
            return self._jobs
        if time.monotonic() > self._asked + _ASK:
            # Not for longer: a head that is gone keeps whoever asks it waiting.
            found: list[float] = []
            within(_ASK, lambda: found.append(self._count(None)))
            self._processors = found[0] if found else self._processors
            self._asked = time.monotonic()
        return max(2, int(_AHEAD * self._processors / (self.threads or 1)))

    def begin(self, witness: Witness | None) -> None:
        """See `Engine`."""
        self._witness = witness

    def submit(self, key: int, function: Callable[..., Any], *arguments: Any) -> None:
        """See `Engine`."""
        self._hand_in(_Task(key, function, arguments))

    def next(self) -> Outcome:
        """See `Engine`."""
        while True:
            # Before whatever else would ask it, and wait for it.
            self._head.check()
            self._hand_in_again()
            if not self._under_way:
                time.sleep(_GLANCE)
                continue
            done, _ = self._ray.wait(list(self._under_way), timeout=_GLANCE)
            for reference in done:
                task = self._under_way.pop(reference)
                outcome = self._outcome(task, reference)
                if outcome is not None:
                    return outcome

    def give_up(self, key: int) -> None:
        """See `Engine`."""
        # Not by `ray.cancel`: where an answer arrives at the same moment, it ends this process
        # (2.60, "Tried to complete task that was not pending"). They are few, and not done again.
        for task in (*self._under_way.values(), *(task for _, task in self._later)):
            if task.key == key:
                task.tries = _RETRIES

    def close(self) -> None:
        """See `Engine`."""
        self._under_way = {}
        # Whoever leaves a cluster takes its calls along.
        if self._own:
            disconnect(self._ray)

    def _count(self, threads: int | None) -> float:
        """The processors of the cluster, of which one machine must have so many."""
        machines = [each["Resources"].get("CPU", 0) for each in self._ray.nodes() if each["Alive"]]
        most = max(machines, default=0)
        if threads is not None and 0 < most < threads:
            raise CertkError(
                f"threads is {threads}, and the largest machine of the Ray cluster has {most:g} "
                "processors: give fewer threads"
            )
        if not most:
            _log.warning("the Ray cluster has no processors yet: calls wait until it has some")
        return float(sum(machines))

    def _hand_in(self, task: _Task) -> None:
        call = (task.function, task.arguments)
        reference = self._call.remote(__version__, self._witness, *call)
        self._under_way[reference] = task

    def _hand_in_again(self) -> None:
        now = time.monotonic()
        ready = [task for when, task in self._later if when <= now]
        self._later = [(when, task) for when, task in self._later if when > now]
        for task in ready:
            self._hand_in(task)

    def _outcome(self, task: _Task, reference: Any) -> Outcome | None:
        """What became of a call; None if it is done once more."""
        errors = self._ray.exceptions
        try:
            answer: _Answer = self._ray.get(reference)
        except errors.RayTaskError as error:
            # `_call` raises nothing by itself: it was not found there, or nothing else was.
            return Outcome(task.key, error=_no_worker(error.cause or error))
        except errors.RayError as error:
            return self._lost(task, error)
        if isinstance(answer.error, OSError) and task.tries < _RETRIES:
            self._again(task, f"{answer.host}: {one_line(answer.error)}")
            return None
        if answer.error is None:
            return Outcome(task.key, answer.value)
        return Outcome(task.key, error=_placed(answer))

    def _again(self, task: _Task, why: str) -> None:
        task.tries += 1
        _log.info("done again (%d of %d): %s", task.tries, _RETRIES, why)
        self._later.append((time.monotonic() + _PAUSE * task.tries, task))

    def _lost(self, task: _Task, error: BaseException) -> Outcome | None:
        """A worker or its result is gone."""
        if task.tries < _RETRIES:
            self._again(task, one_line(error))
            return None
        memory = isinstance(error, getattr(self._ray.exceptions, "OutOfMemoryError", ()))
        why = "had no memory left" if memory else "died"
        return Outcome(
            task.key,
            error=CertkError(
                f"{_label(task)}{_RETRIES + 1} workers {why} over this, one after the other: give "
                "them more memory, smaller units (--unit head) or fewer at a time (--jobs); the "
                "logs of Ray on their machines say more"
            ),
        )


def _label(task: _Task) -> str:
    label = getattr(task.arguments[0], "label", "") if task.arguments else ""
    return f"{label}: " if label else ""


def _placed(answer: _Answer) -> BaseException:
    """The exception of a worker; where a file is missing there, it says where that is."""
    error = answer.error
    assert error is not None
    if isinstance(error, FileNotFoundError):
        name = error.filename or one_line(error)
        return CertkError(
            f"{name} is not to be found on {answer.host}, where a worker of Ray looked for it: "
            "workers need the same files under the same names, on a file system that all machines "
            "share or behind a URL such as s3://"
        )
    return error


def _no_worker(error: BaseException) -> CertkError:
    return CertkError(
        f"a worker of Ray cannot do its work ({one_line(error)[-300:]}): every machine of the "
        f"cluster needs certk-rs {__version__}, and the packages behind URLs if there are any"
    )


# ------------------------------------------------------------------------------ on the worker


def _call(
    version: str,
    witness: Witness | None,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> _Answer:
    """Do a call; whatever it raises comes back as it is, and not in a wrapper of Ray's."""
    host = socket.gethostname()
    try:
        if version != __version__:
            raise CertkError(
                f"{host}, a machine of the Ray cluster, has certk-rs {__version__}, and the job "
                f"was begun with {version}: install the same on all"
            )
        if witness is not None and not sees(witness):
            raise CertkError(
                f"{_folder(witness.place)} on {host}, where a worker of Ray is, is not what it is "
                "where the job was begun: OUT must be on a file system that all machines share, or "
                "behind a URL such as s3://"
            )
        with of_another_machine():
            return _Answer(function(*arguments), host=host)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return _Answer(error=_portable(error), host=host)


def _folder(place: Location) -> str:
    # OUT/.certk/job.json
    return str(place.beside("").path.parent) if place.is_local else str(place)


def _portable(error: BaseException) -> BaseException:
    """The exception, or one that says the same, if it cannot travel."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    try:
        again = pickle.loads(pickle.dumps(error))
        if str(again) == str(error):
            return error
    except Exception:  # whatever somebody's __reduce__ does
        pass
    return RuntimeError(f"{type(error).__name__}: {one_line(error)}")
