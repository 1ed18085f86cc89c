"""The engine of a Ray cluster: calls are tasks, done again here where a worker is lost.

Ray's own retries have no end where a worker has no memory, so tasks have none: a call that was
lost, or that the system refused, is handed in anew, a few times.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import socket
import time
from dataclasses import dataclass
from typing import Any

from .. import __version__
from .._files.location import Location
from .._files.reader import of_another_machine, read_bytes
from ..errors import CertkError, one_line, pip_install
from .engine import Outcome, check_count, cores

# A call whose worker was lost, or to which the system refused something, is done again so often.
_RETRIES = 3
# Seconds for somebody to answer at an address, between looks for the head, and for a call.
_ANSWER, _LOOK, _GLANCE = 5.0, 1.0, 0.2
# Seconds without a head after which Ray ends the process; a job ends after a third of them.
_LOST = "RAY_gcs_rpc_server_reconnect_timeout_s"
_MOST_BYTES = 1 << 30
# Calls at a time by processor, so that none waits for the next one to arrive.
_AHEAD = 1.5
_SHARED = "must be on a file system that all machines share, or behind a URL such as s3://"


@dataclass(frozen=True)
class _Witness:
    """A file that the job has written where the outputs go, by which a worker knows the place."""

    place: Location
    sha256: str


class RayEngine:
    """An `Engine` of the tasks of a Ray cluster.

    A connection that this process has already is used, and left as it is.

    Args:
        address: "HOST:PORT", "auto" (a cluster of this machine) or "local" (one of this process).
            None: the environment variable RAY_ADDRESS, or else "local".
        jobs: Calls at a time; None: one and a half per processor of the cluster.
        threads: Threads of each call, and processors that it asks for.

    Raises:
        CertkError: Ray is not installed, or cannot be reached; no machine has so many processors.
    """

    def __init__(
        self, address: str | None = None, jobs: int | None = None, threads: int | None = None
    ) -> None:
        check_count("jobs", jobs)
        check_count("threads", threads)
        self.threads: int | None = threads or 1
        self._jobs = jobs
        try:
            import ray
        except ImportError:
            said = f"the engine ray needs Ray, which is not installed: {pip_install('ray')}"
            raise CertkError(said) from None
        self._ray: Any = ray
        self._own = not ray.is_initialized()
        if self._own:
            _connect(ray, address, max(cores(), self.threads))
        self._head = str(ray.get_runtime_context().gcs_address)
        self._seen = self._looked = time.monotonic()
        machines = [each["Resources"] for each in self._ray.nodes() if each["Alive"]]
        self._processors = sum(each.get("CPU", 0) for each in machines)
        most = max(each.get("CPU", 0) for each in machines)
        if 0 < most < self.threads:
            self.close()
            said = f"the largest machine of the Ray cluster has {most:g} processors"
            raise CertkError(f"threads is {threads}, and {said}: give fewer threads")
        # SPREAD reads with the network of every machine, and tries again elsewhere.
        options = {"num_cpus": self.threads, "max_retries": 0, "scheduling_strategy": "SPREAD"}
        self._task = self._ray.remote(**options)(_call)
        # Key, function, arguments, and how often it was done again, by Ray's reference.
        self._under_way: dict[Any, tuple[int, Any, tuple[Any, ...], int]] = {}
        self._unwanted: set[int] = set()
        self._witness: _Witness | None = None

    @property
    def slots(self) -> int:
        """Calls at a time that keep all workers busy; a cluster may grow."""
        return self._jobs or max(2, int(_AHEAD * self._processors / (self.threads or 1)))

    def begin(self, witness: Location) -> None:
        """See `Engine`; workers compare its hash, for each may have another file of that name."""
        self._witness = _Witness(witness, _sha256(witness))

    def submit(self, key: int, function: Any, *arguments: Any, tries: int = 0) -> None:
        """See `Engine`; `tries` counts the times that the call was done before."""
        reference = self._task.remote(__version__, self._witness, function, arguments)
        self._under_way[reference] = (key, function, arguments, tries)

    def give_up(self, key: int) -> None:
        """See `Engine`; the call is not cancelled, but not done again either."""
        self._unwanted.add(key)

    def next(self) -> Outcome:
        """See `Engine`."""
        while True:
            self._check_head()
            done, _ = self._ray.wait(list(self._under_way), timeout=_GLANCE)
            for reference in done:
                key, function, arguments, tries = self._under_way.pop(reference)
                outcome, passing = self._outcome(key, arguments, tries, reference)
                if not passing or key in self._unwanted or tries >= _RETRIES:
                    return outcome
                time.sleep(_GLANCE)  # what goes wrong everywhere at once is often over soon
                self.submit(key, function, *arguments, tries=tries + 1)

    def close(self) -> None:
        """See `Engine`; a connection that was made here ends."""
        if self._own:
            with contextlib.suppress(Exception):
                self._ray.shutdown()

    def _check_head(self) -> None:
        """Raise `CertkError` where the head of the cluster has not answered for some time."""
        now = time.monotonic()
        if now < self._looked + _LOOK:
            return
        try:
            _see(self._head)
            self._seen = now
            # Only now: a head that is gone would keep us waiting.
            self._processors = self._ray.cluster_resources().get("CPU", 0)
        except OSError as error:
            if now > self._seen + float(os.environ.get(_LOST, "60")) / 3:
                said = f"the head of the Ray cluster at {self._head} is gone ({one_line(error)})"
                remedy = "start a cluster again and go on with --resume"
                raise CertkError(f"{said}: {remedy}") from None
        self._looked = time.monotonic()

    def _outcome(self, key: int, given: Any, tries: int, reference: Any) -> tuple[Outcome, bool]:
        """Return the outcome of a call, and whether doing it again may change it."""
        try:
            value, error = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as failed:
            # `_call` raises nothing by itself: it was not found there.
            why = one_line(failed.cause or failed)[-300:]
            said = f"a worker of Ray cannot do its work ({why}): install certk-rs {__version__}"
            return Outcome(key, error=CertkError(f"{said} on every machine of the cluster")), False
        except self._ray.exceptions.RayError as failed:
            label = getattr(given[0], "label", "") if given else ""
            said = f"{label}: {tries + 1} workers died over this ({one_line(failed)[:200]}): give"
            said += " them more memory, smaller units (--unit head) or fewer at a time (--jobs)"
            return Outcome(key, error=CertkError(said)), True
        return Outcome(key, value, error), isinstance(error, OSError)


def _connect(ray: Any, address: str | None, processors: int) -> None:
    """Connect this process to a cluster; a `CertkError` where that fails."""
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {"address": address, "log_to_driver": False}
    if address == "local":
        options |= {"num_cpus": processors, "include_dashboard": False}
        # Nobody was asked whether what is private to this process may be told of.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    handler = signal.getsignal(signal.SIGTERM)  # which Ray takes over
    try:
        if address not in ("local", "auto"):
            _see(address.removeprefix("ray://"))
        ray.init(logging_level=logging.CRITICAL, **options)
    except (Exception, SystemExit) as error:
        raise CertkError(
            f"address {address!r}: Ray cannot be reached ({one_line(error)[:300]}): give HOST:PORT "
            "of a running cluster with the same Ray and Python (and its token, if it has one, with "
            "RAY_AUTH_MODE=token), or no address for a local one"
        ) from None
    finally:
        with contextlib.suppress(TypeError, ValueError):  # of C, or not in the main thread
            signal.signal(signal.SIGTERM, handler)


def _see(address: str) -> None:
    """Raise `OSError` where nobody answers at HOST:PORT, and `ValueError` for other texts."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), _ANSWER).close()


_SEEN: set[_Witness] = set()


def _sees(witness: _Witness) -> bool:
    """Return whether this process sees that very file; once seen, it is not read again."""
    if witness not in _SEEN:
        with contextlib.suppress(CertkError, OSError):
            if _sha256(witness.place) == witness.sha256:
                _SEEN.add(witness)
    return witness in _SEEN


def _sha256(place: Location) -> str:
    return hashlib.sha256(read_bytes(place, _MOST_BYTES)).hexdigest()


def _call(version: str, witness: _Witness | None, function: Any, arguments: Any) -> Any:
    """Do a call on a worker; return its value, or the exception, not in a wrapper of Ray's."""
    host = socket.gethostname()
    try:
        if version != __version__:
            has = f"{host}, a machine of the Ray cluster, has certk-rs {__version__}"
            raise CertkError(f"{has}, and the job was begun with {version}: install the same")
        if witness is not None and not _sees(witness):
            place = witness.place  # below OUT/.certk
            other = f"{place} on {host}, where a worker is, is not what it is where the job began"
            raise CertkError(f"{other}: OUT {_SHARED}")
        with of_another_machine():
            return function(*arguments), None
    except FileNotFoundError as error:
        name = error.filename or one_line(error)
        where = f"{name} is not to be found on {host}, where a worker of Ray looked for it"
        return None, CertkError(f"{where}: inputs {_SHARED}")
    except Exception as error:
        return None, error
