"""Forks, threads, Ctrl-C, calls that others end, and an array that changes while it is read."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import certk_rs as ck
from certk_rs import _native
from fresh_process import run_python
from same_bytes import same

RNG = np.random.default_rng(41)
ROWS = (RNG.standard_normal((64, 5000)) * 2.5).astype(np.float32)

FORK = """
import os, signal, sys
import numpy as np
import certk_rs as ck

def run(threads):
    sel = ck.select(rows, 0.01, threads=threads)
    cert = ck.certify(rows, sel, threads=threads)
    ks = ck.keep_set(rows[:8], 0.1, threads=threads)
    arrays = sel.indices, sel.tail_mass_upper, cert.tail_mass_upper, ks.indices
    return b"".join(array.tobytes() for array in arrays)

rows = (np.random.default_rng(1).standard_normal((64, 70000)) * 3).astype(np.float32)
want = {threads: run(threads) for threads in (1, 2, 3, None)}
pid = os.fork()
if pid == 0:
    signal.alarm(60)
    again = os.fork() if all(run(t) == w for t, w in want.items()) else -1
    if again == 0:
        os._exit(0 if all(run(t) == w for t, w in want.items()) else 4)
    os._exit(3 if again < 0 else os.waitstatus_to_exitcode(os.waitpid(again, 0)[1]))
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
ok = all(run(t) == w for t, w in want.items())
sys.exit(status if status else 0 if ok else 5)
"""

# The first process of a namespace, and in it the first of another: both have the number 1.
NAMESPACES = """
import ctypes, os, signal, sys, time

def unshare():
    if ctypes.CDLL(None).unshare(0x20000000):  # CLONE_NEWPID, for children
        os._exit(77)

unshare()
first = os.fork()
if first:
    until, ended = time.monotonic() + 120, (0, 0)
    while ended[0] == 0:
        if time.monotonic() > until:
            os.kill(first, signal.SIGKILL)
        time.sleep(0.1)
        ended = os.waitpid(first, os.WNOHANG)
    os._exit(os.waitstatus_to_exitcode(ended[1]) & 127)
assert os.getpid() == 1
"""

COUNT_THREADS = """
import os
import numpy as np
import certk_rs as ck

def tasks():
    return len(os.listdir("/proc/self/task"))

def work(threads):
    ck.select(rows, 0.01, threads=threads)
    ck.select(rows, 0.01, threads=threads, prove_minimal=True, block_size=7, scale=0.3)
    ck.select(abs(rows), 0.01, threads=threads, kind="probs")
    ck.certify(rows, rows > 0, threads=threads)
    ck.certify(rows, rows > 0, threads=threads, independent=True)
    ck.keep_set(rows[:, :50000], 0.1, threads=threads)
    return tasks() - before

rows = np.random.default_rng(1).standard_normal((4, 300000)).astype(np.float32)
before = tasks()
print(work(1), work(3), work(64))
"""

FAULTS = """
import resource
import numpy as np
import certk_rs as ck

rows = (3 * np.random.default_rng(0).standard_normal((64, 131072))).astype(np.float32)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    ck.select(rows, 0.01, threads=2)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for _ in range(5):
    faults()
print(sorted(faults() for _ in range(21))[10])
"""

# Time is that of the processor: who else computes does not count.
LONG_CALL = """
import os, signal, threading, time
import numpy as np
import certk_rs as ck

row = np.zeros(1 << 16, dtype=np.float32)
row[7] = 60.0
many = np.broadcast_to(row, (4_000_000, 1 << 16))
noise = np.random.default_rng(0).standard_normal((128, 1 << 17)).astype(np.float32)

def press():
    global pressed
    while time.process_time() < begun + 1.0:
        time.sleep(0.01)
    pressed = time.process_time()
    os.kill(os.getpid(), signal.SIGINT)

begun = time.process_time()
threading.Thread(target=press, daemon=True).start()
try:
    {call}
except KeyboardInterrupt:
    print(time.process_time() - pressed)
"""


def total(rows: np.ndarray) -> int:
    """Kept keys, computed in a worker process."""
    return int(ck.select(rows, 0.01).k.sum())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_select_fork_select_fork_select() -> None:
    """The parent's pools are of no use to a child, whatever size it asks for."""
    done = run_python(FORK, PYTHONWARNINGS="ignore::DeprecationWarning")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.skipif(not Path("/proc/self/ns/pid").exists(), reason="needs namespaces")
def test_a_child_with_the_number_of_its_parent() -> None:
    """Containers and sandboxes do this; the number does not tell whose pool it is."""
    code = NAMESPACES + FORK.replace("pid = os.fork()", "unshare()\npid = os.fork()", 1)
    done = run_python(code, PYTHONWARNINGS="ignore::DeprecationWarning")
    if done.returncode == 77:
        pytest.skip("this system allows no namespaces")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
@pytest.mark.parametrize(("lent", "started"), [("3", "2"), ("1", "0")])
def test_a_process_starts_no_more_threads_than_it_was_lent(lent: str, started: str) -> None:
    """The caller is one of them; one pool serves every number; no pool of the host's is used."""
    done = run_python(COUNT_THREADS, RAYON_NUM_THREADS=lent)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", started, started]


@pytest.mark.skipif(sys.platform != "linux", reason="counts page faults as Linux does")
def test_a_warm_call_touches_no_new_page() -> None:
    """Memory of results that worker threads allocate stays with the process between calls."""
    done = run_python(FAULTS, RAYON_NUM_THREADS="2")
    assert done.returncode == 0, done.stderr
    # The allocator gives pages back about once a second, so a call now and then finds fewer.
    assert int(done.stdout) <= 20


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_worker_pools(method: str) -> None:
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} here")
    want = total(ROWS)
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map_async(total, [ROWS] * 4).get(timeout=120) == [want] * 4
        # Workers end by themselves. Leaving terminates them, and one that has a handler of Python's
        # for it (Ray leaves one in this process) may go to sleep before it runs.
        pool.close()
        pool.join()


def test_python_threads_at_once() -> None:
    """Calls of many sizes and thread counts at the same time give what they give alone."""
    inputs = [(ROWS[: 8 * (i + 1)], (1, 2, None)[i % 3]) for i in range(8)]
    want = [ck.select(rows, 0.01) for rows, _ in inputs]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            got = pool.map(lambda one: ck.select(one[0], 0.01, threads=one[1]), inputs)
            assert all(same(one, two) for one, two in zip(want, got, strict=True))


@pytest.mark.parametrize(
    "call",
    ["ck.select(many, 0.5)", "ck.select(many, 0.5, threads=1)", "ck.certify(many, row > 1)",
     "ck.certify(many, row > 1, independent=True)", "ck.keep_set(noise, 0.01, max_keep=20000)"],
)  # fmt: skip
@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_ctrl_c_is_heard(call: str) -> None:
    """A call that would take long ends with KeyboardInterrupt within about a second."""
    done = run_python(LONG_CALL.format(call=call), RAYON_NUM_THREADS="2")
    assert done.stderr == ""
    assert float(done.stdout) < 2 * 3.0  # seconds of two threads


@pytest.mark.parametrize("n", [512, 5000, 5008])
def test_an_array_written_meanwhile_does_no_harm(n: int) -> None:
    """The rows change under the reader, who copies those of 5000 and not those of 5008."""
    rows = np.random.default_rng(1).standard_normal((64, n)).astype(np.float32)
    stop = threading.Event()

    def write() -> None:
        rng = np.random.default_rng(0)
        while not stop.is_set():
            rows[:] = rng.choice([0.0, 5.0, -30.0, np.nan], (64, 1))
            rows[:] = rng.standard_normal(n).astype(np.float32)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            try:
                sel = ck.select(rows, 0.1)
            except ck.CertkError:
                continue
            assert np.array_equal(np.diff(sel.indptr), sel.k)
            assert ((sel.tail_mass_lower >= 0) & (sel.tail_mass_upper <= 1)).all()
            assert (sel.tail_mass_lower <= sel.tail_mass_upper).all()
            for i in range(64):
                kept = sel.row(i)
                assert (np.diff(kept) > 0).all()
                assert kept[0] >= 0
                assert kept[-1] < n
    finally:
        stop.set()
        writer.join()


# --------------------------------------------------- calls that other threads end

# So many rows of one row's scores, which take no memory, that a call takes minutes.
LONG = np.broadcast_to(
    np.random.default_rng(0).standard_normal((1, 1 << 15)).astype(np.float32), (1 << 17, 1 << 15)
)


def cancelled(call: Callable[[], object]) -> BaseException | None:
    """Return the exception of a call that another thread cancels while it is under way."""
    token, raised = _native.Cancellation(), list[BaseException]()
    began = threading.Event()

    def work() -> None:
        with token:
            began.set()
            try:
                call()
            except BaseException as error:
                raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    began.wait()
    # Most often it is at its rows by now; where it is not yet, it ends as well.
    time.sleep(0.3)
    assert thread.is_alive()
    token.cancel()
    thread.join(120)
    assert not thread.is_alive()
    return raised[0] if raised else None


@pytest.mark.parametrize("threads", [None, 1])
def test_another_thread_ends_a_call(threads: int | None) -> None:
    """It runs beside the call, which has released the interpreter."""
    for function in (ck.keep_set, ck.select):
        assert (
            type(cancelled(lambda f=function: f(LONG, 0.1, threads=threads))) is KeyboardInterrupt
        )


def test_only_threads_inside_are_stopped() -> None:
    token = _native.Cancellation()
    rows = np.random.default_rng(1).standard_normal((64, 4096))
    assert token.cancelled is False
    with token:
        assert ck.keep_set(rows, 0.1).k > 0
    token.cancel()
    token.cancel()
    assert token.cancelled is True
    assert ck.keep_set(rows, 0.1).k > 0
    with token, pytest.raises(KeyboardInterrupt):
        ck.keep_set(rows, 0.1)
    assert ck.keep_set(rows, 0.1).k > 0


def test_tokens_nest_and_are_left_by_exceptions() -> None:
    rows = np.random.default_rng(1).standard_normal((64, 4096))
    outer, inner = _native.Cancellation(), _native.Cancellation()
    with pytest.raises(ZeroDivisionError), outer, inner, inner:
        raise ZeroDivisionError
    inner.cancel()
    assert ck.keep_set(rows, 0.1).k > 0
    with outer:
        with pytest.raises(KeyboardInterrupt), inner:
            ck.keep_set(rows, 0.1)
        assert ck.keep_set(rows, 0.1).k > 0
        outer.cancel()
        with pytest.raises(KeyboardInterrupt):
            ck.keep_set(rows, 0.1)
