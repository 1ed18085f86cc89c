"""A small Ray cluster in a process of its own, and what tests have done there.

Ray and its threads stay out of the process that runs the tests. Functions here are what that other
process, and the workers of its cluster, import by name.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from certk_rs import CertkError, prune
from certk_rs._jobs import ray as ray_engine
from certk_rs._jobs import steps
from certk_rs._jobs.engine import Unit, UnitResult, run_unit
from cli_fixtures import write_cache
from repository import EXAMPLE

_PATIENCE = 120.0


class Host:
    """The process that has the cluster; `run` calls a function of this module in it."""

    def __init__(self, pool: ProcessPoolExecutor, environment: dict[str, str]) -> None:
        self._pool = pool
        self.environment = environment
        self.address: str = self.run(_begin, list(sys.path), environment)

    def run(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return self._pool.submit(function, *arguments, **options).result(timeout=_PATIENCE)


@contextlib.contextmanager
def ray_host() -> Iterator[Host]:
    """A cluster of two processors; all of its processes must be gone afterwards."""
    # A short name: sockets are below it.
    folder = Path(tempfile.mkdtemp(prefix="certk-", dir="/tmp" if Path("/tmp").is_dir() else None))
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    try:
        host = Host(pool, {**ray_environment(folder)})
        began: set[int] = host.run(_family)
        yield host
        began |= host.run(_family)
        host.run(_end)
        pool.shutdown()
        assert_gone(began)
    finally:
        pool.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def ray_environment(folder: Path) -> dict[str, str]:
    """Environment variables that keep a cluster, and the key to it, in a directory of its own."""
    return {
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }


def assert_gone(processes: set[int]) -> None:
    """Wait a little for processes to end; fail if one does not."""
    until = time.monotonic() + 10
    while left := {pid for pid in processes if _parent(pid) is not None}:
        assert time.monotonic() < until, f"still running: {left}"
        time.sleep(0.05)


def family(pid: int) -> set[int]:
    """A process and all below it."""
    parents = {int(p.name): _parent(int(p.name)) for p in Path("/proc").glob("[0-9]*")}
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _parent(pid: int) -> int | None:
    """The parent of a process; None if it has ended."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return None if state in "ZX" else int(parent)


def title(pid: int) -> str:
    """The command line of a process, its arguments ended by NUL; empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return ""


# ------------------------------------------------------------------------------- in the process


def _begin(path: list[str], environment: dict[str, str]) -> str:
    os.environ |= environment
    sys.path[:] = path
    import ray

    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
        logging_level=logging.CRITICAL,
    )
    # Workers are where the cluster was started; the job is somewhere else.
    os.chdir("/")
    address: str = ray.get_runtime_context().gcs_address
    return address


def _end() -> None:
    import ray

    ray.shutdown()


def _family() -> set[int]:
    return family(os.getpid()) - {os.getpid()}


def pruned(caches: str, out: str, engine: str = "ray", **options: Any) -> dict[str, Any]:
    """Prune there, on the connection that there is; what came of it."""
    import ray

    told: list[tuple[str, int, int]] = []
    try:
        result = prune(
            caches, out, 0.1, engine=engine, progress=lambda *each: told.append(each), **options
        )
    except (CertkError, OSError) as error:
        return {"error": (type(error).__name__, str(error))}
    finally:
        assert ray.is_initialized()
        assert ray.get(ray.remote(_one).remote()) == 1
    return {
        "outputs": [each.name for each in result.outputs],
        "failures": {each.name: (each.kind, each.message) for each in result.failures},
        "told": told,
    }


def _one() -> int:
    return 1


def pruned_while_workers_are_killed(caches: str, out: str, moments: set[int]) -> dict[str, Any]:
    """Prune, and after some calls kill every worker that is at one."""
    killed: list[int] = []
    calls = 0

    def kill(_name: str, _done: int, _known: int) -> None:
        nonlocal calls
        calls += 1
        if calls in moments:
            # Against a hang alone: workers are at work again and again.
            until = time.monotonic() + 120
            while not (busy := [p for p in _family() if title(p).startswith("ray::_call")]):
                assert time.monotonic() < until, "no worker is at work"
            for pid in busy:
                os.kill(pid, signal.SIGKILL)
            killed.extend(busy)

    before = steps.run_unit
    # So that there are workers in the middle of a unit whenever one looks.
    steps.run_unit = run_slowly
    try:
        result = prune(caches, out, 0.1, engine="ray", unit="head", jobs=4, progress=kill)
    finally:
        steps.run_unit = before
    assert not result.failures, result.failures
    return {"killed": len(killed), "outputs": len(result.outputs)}


def run_slowly(unit: Unit, threads: int | None) -> UnitResult:
    """Do as `run_unit`, over half a second."""
    time.sleep(0.5)
    return run_unit(unit, threads)


def pruned_without_a_head(folder: str) -> tuple[str, str]:
    """Prune, where nobody answers any more at what is taken for the address of the head."""
    write_cache(Path(folder, "in", "x.safetensors"))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = "{}:{}".format(*closed.getsockname())
    see = ray_engine._see

    def slowly(unit: Unit, threads: int | None) -> UnitResult:
        time.sleep(5)
        return run_unit(unit, threads)

    ray_engine._see = lambda _: see(nobody)
    os.environ[ray_engine._LOST] = "0"
    steps.run_unit, kept = slowly, steps.run_unit
    try:
        prune(Path(folder, "in"), Path(folder, "out"), 0.1, engine="ray")
    except CertkError as error:
        return type(error).__name__, str(error)
    finally:
        ray_engine._see, steps.run_unit = see, kept
        del os.environ[ray_engine._LOST]
    return "", ""


def pruned_with_a_deadly_file(caches: str, out: str) -> dict[str, Any]:
    """Prune, where every worker dies that looks at 1.safetensors."""
    before = steps.run_unit, ray_engine._RETRIES
    # A new worker takes seconds.
    steps.run_unit, ray_engine._RETRIES = run_or_die, 1
    try:
        return pruned(caches, out)
    finally:
        steps.run_unit, ray_engine._RETRIES = before


def run_or_die(unit: Unit, threads: int | None) -> UnitResult:
    if unit.input.location.name == "1.safetensors":
        os.kill(os.getpid(), signal.SIGKILL)
    return run_unit(unit, threads)


def called(function: Callable[..., Any], *arguments: Any, version: str | None = None) -> Any:
    """One call through the engine: ("value", value), or the kind and the text of its error."""
    before = ray_engine.__version__
    if version is not None:
        ray_engine.__version__ = version
    engine = ray_engine.RayEngine(jobs=1)
    try:
        engine.submit(7, function, *arguments)
        outcome = engine.next()
    finally:
        engine.close()
        ray_engine.__version__ = before
    assert outcome.key == 7
    if outcome.error is None:
        return "value", outcome.value
    error = outcome.error
    return type(error).__name__, str(error), getattr(error, "filename", None)


def refused(**options: Any) -> str:
    """Return the message of an engine that is not available."""
    try:
        ray_engine.RayEngine(**options).close()
    except CertkError as error:
        return str(error)
    return ""


# ---------------------------------------------------------------------------------- on a worker


def raise_(kind: str) -> None:
    if kind == "certk":
        raise CertkError("row (3, 5): NaN, ü and \x1b: mask it")
    if kind == "system":
        raise PermissionError(13, "Permission denied", "/a/b")
    raise MemoryError


def die_once(mark: str) -> str:
    """Die at the first call."""
    if not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def refuse_twice(mark: str) -> str:
    """Raise what may pass, two times."""
    with Path(mark).open("a") as file:
        file.write("x")
    if len(Path(mark).read_text()) < 3:
        raise OSError(5, "Input/output error", mark)
    return "read"


def page_runs(page: str, folder: str) -> None:
    """Run the blocks of a page of the documentation there."""
    from doc_pages import run_page

    shutil.copy(EXAMPLE, Path(folder, "cache.safetensors"))
    os.chdir(folder)
    try:
        run_page(page, {})
    finally:
        os.chdir("/")
