"""Reaching a Ray cluster in bounded time, without a word on the user's terminal.

Left to itself, Ray tries an address where nobody answers for minutes, writes what it thinks of that
to stderr past Python, and takes signals over. So somebody is seen to answer first, and Ray connects
in a thread that can be given up.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from ...errors import CertkError, one_line, pip_install

# Seconds for somebody to answer at an address, and for Ray to connect or to start.
_ANSWER = 5.0
_CONNECT = 90.0
# Seconds between two looks for the head, and those after which Ray gives up by itself.
_LOOK = 1.0
_RECONNECT = 60.0
_SETTING = "RAY_gcs_rpc_server_reconnect_timeout_s"
_GLANCE = 0.1
_ADDRESS = re.compile(
    r"(?:ray://)?(?:\[(?P<v6>[0-9A-Fa-f:.%]+)\]|(?P<host>[^\s\[\]/:]+)):(?P<port>\d+)"
)
# [2026-01-31 12:00:00,000 W 123 456] file.cc:78: what Ray says
_LOGGED = re.compile(rb"\[\d{4}-\d\d-\d\d [\d:,.]+ [A-Z] [\d ]+\] (\(\w+\) )?[\w.]+:\d+: ")
# How every HTTP/2 client begins, with an empty SETTINGS frame; the type of such a frame is 4.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_SETTINGS = 4


def load_ray() -> Any:
    """The package; a `CertkError` if it is not there."""
    try:
        with _silence():
            import ray
    except ImportError:
        raise CertkError(
            f"the engine ray needs Ray, which is not installed: {pip_install('ray')}"
        ) from None
    return ray


def connect(ray: Any, address: str | None, processors: int) -> None:
    """Connect this process to a cluster.

    Args:
        ray: The package.
        address: "HOST:PORT", "auto" (what `ray start` has started on this machine), or "local" (one
            of this process, which ends with it). None: what the environment variable RAY_ADDRESS
            says, or else "local".
        processors: How many a local one has.

    Raises:
        CertkError: Nobody answers, or what answers is no Ray that this one can talk to.
    """
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {"address": address}
    if address == "local":
        options["num_cpus"] = processors
        # Nobody was asked whether what is private to this process may be told of.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    elif address != "auto":
        _see_that_it_answers(address)
    with _gag() as said:
        failed = _try(ray, address, options)
    if failed is not None:
        with contextlib.suppress(Exception):
            ray.shutdown()
        why = "; ".join(dict.fromkeys([one_line(failed), *said[-1:]]))
        raise CertkError(
            f"address {address!r}: Ray cannot be reached ({why[:400]}): give the HOST:PORT of a "
            "running cluster, of the same versions of Ray and Python (where it asks for a "
            "token, with that and RAY_AUTH_MODE=token), or none for a local one"
        )
    _mute(ray, True)


class Head:
    """The head of a cluster, and whether it is still there.

    Ray ends this process, with an exit code of its own, when the head has not answered for a minute
    (or as long as RAY_gcs_rpc_server_reconnect_timeout_s says). So it is looked for here, and given
    up after a third of that time.
    """

    def __init__(self, ray: Any) -> None:
        self.address = str(ray.get_runtime_context().gcs_address)
        self._patience = _reconnect_timeout() / 3
        self._seen = self._looked = time.monotonic()

    def check(self) -> None:
        """Look for it now and then; raise `CertkError` where it has not answered for too long."""
        now = time.monotonic()
        if now < self._looked + _LOOK:
            return
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _LOOK).close()
            self._seen = now
        except OSError as error:
            said = getattr(error, "strerror", None) or one_line(error)
            if now > self._seen + self._patience:
                raise CertkError(
                    f"the head of the Ray cluster at {self.address} is gone ({said}; no answer for "
                    f"{now - self._seen:.0f} s): start a cluster again and go on with --resume"
                ) from None
        self._looked = time.monotonic()


def _reconnect_timeout() -> float:
    with contextlib.suppress(ValueError):
        return float(os.environ.get(_SETTING, ""))
    return _RECONNECT


def disconnect(ray: Any) -> None:
    """Undo `connect`; a local cluster ends."""
    _mute(ray, False)
    with contextlib.suppress(Exception), _gag():
        ray.shutdown()


def _mute(ray: Any, silent: bool) -> None:
    """Let Ray print nothing of workers that have died, which is told here in other words."""
    # As its own debugger does; there is no public way.
    worker = getattr(getattr(ray, "_private", None), "worker", None)
    if worker is not None and hasattr(worker, "_worker_logs_enabled"):
        worker._worker_logs_enabled = not silent


def _try(ray: Any, address: str, options: dict[str, Any]) -> BaseException | None:
    if address == "local":
        # Not in a thread: the system ends what a thread has started when that thread ends.
        return _called(lambda: _init(ray, {**options, "include_dashboard": False}), Exception)
    return within(_CONNECT, lambda: _init(ray, options))


def _init(ray: Any, options: dict[str, Any]) -> None:
    with _silence(), _own_signals():
        ray.init(log_to_driver=False, logging_level=logging.CRITICAL, **options)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Take the handling of SIGTERM back, which Ray gives an exit code of its own."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Let Ray neither warn nor log: what matters is raised."""
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _gag() -> Iterator[list[str]]:
    """Keep what Ray writes to stderr past Python; it is in the list afterwards.

    What others write there meanwhile comes afterwards, too.
    """
    said: list[str] = []
    try:
        stderr = os.dup(2)
    except OSError:  # closed
        yield said
        return
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield said
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            kept.seek(0)
            for line in kept.read().splitlines(keepends=True):
                if found := _LOGGED.match(line):
                    said.append(line[found.end() :].decode(errors="replace").strip())
                else:
                    with contextlib.suppress(OSError):
                        os.write(2, line)


def _called(function: Callable[[], None], caught: type[BaseException]) -> BaseException | None:
    """Call a function; what it raises of this kind."""
    try:
        function()
    except caught as error:
        return error
    return None


def within(seconds: float, function: Callable[[], None]) -> BaseException | None:
    """Call a function; what it raises, or a `TimeoutError` if it takes too long.

    In a thread, so that Ctrl-C is heard meanwhile and handlers of signals stay what they are.
    """
    failed: list[BaseException | None] = []
    thread = threading.Thread(
        # Ray ends with SystemExit, too.
        target=lambda: failed.append(_called(function, BaseException)),
        name="certk-ray-connect",
        daemon=True,
    )
    thread.start()
    until = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < until:
        thread.join(_GLANCE)
    if thread.is_alive():
        return TimeoutError(f"no answer in {seconds:.0f} s")
    return failed[0]


def _see_that_it_answers(address: str) -> None:
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found["port"]) < 1 << 16:
        raise CertkError(
            f"address {address!r} is none of a Ray cluster: give HOST:PORT (6379 is what ray start "
            "takes), or auto for the one that was started on this machine"
        )
    try:
        place = (found["v6"] or found["host"], int(found["port"]))
        with socket.create_connection(place, _ANSWER) as connection:
            if not os.environ.get("RAY_USE_TLS", "").strip("0"):
                _greet(connection)
    except (OSError, UnicodeError) as error:
        said = getattr(error, "strerror", None) or one_line(error)
        raise CertkError(
            f"address {address!r}: no Ray cluster answers there ({said}): check that it runs and "
            "can be reached from here (ray status), or leave --address out for a local one"
        ) from None


def _greet(connection: socket.socket) -> None:
    """See that who listens speaks HTTP/2, as Ray does."""
    connection.settimeout(_ANSWER)
    connection.sendall(_HELLO)
    frame = b""
    while len(frame) < 4 and (more := connection.recv(4 - len(frame))):
        frame += more
    if len(frame) < 4 or frame[3] != _SETTINGS:
        raise ConnectionError("what listens there is something else")
