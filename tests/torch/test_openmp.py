"""Calls beside PyTorch use the threads that it keeps, and no others."""

from __future__ import annotations

import sys
import textwrap

import numpy as np
import pytest
import torch

import certk_rs as ck
import certk_rs.torch as ct
from certk_rs import _native
from fresh_process import run_python

ROWS = np.random.default_rng(5).normal(size=(64, 20_000)).astype(np.float32) * 4

BEGIN = """
import os, pathlib, threading
import numpy as np, torch
import certk_rs as ck, certk_rs.torch as ct

torch.set_num_threads(2)
scores = torch.randn(64, 20_000, generator=torch.Generator().manual_seed(1)) * 4
want = ck.select(scores.numpy(), 0.01, threads=1)

def names():
    tasks = pathlib.Path("/proc/self/task").iterdir()
    return sorted((task / "comm").read_text().strip() for task in tasks)

def check():
    found = ct.select(scores, 0.01)
    assert np.array_equal(found.indices.numpy(), want.indices)
    assert found.tail_mass_upper.numpy().tobytes() == want.tail_mass_upper.tobytes()

scores.exp().sum()  # torch's threads are there
"""


def run(code: str) -> None:
    """In a process whose first threads are torch's."""
    done = run_python(BEGIN + textwrap.dedent(code))
    assert done.returncode == 0, done.stderr


linux = pytest.mark.skipif(sys.platform != "linux", reason="libgomp is looked for on Linux")


@linux
def test_operators_start_no_threads_of_their_own() -> None:
    run("""
    before = names()
    check()
    assert names() == before, (before, names())
    # Elsewhere calls have the package's own.
    for _ in range(1000):  # a thread gives itself its name, once it runs
        ck.select(scores.numpy(), 0.01, threads=2)
        if own := any(name.startswith("certk-") for name in names()):
            break
    assert own or len(os.sched_getaffinity(0)) == 1
    # And none asks for more than torch has.
    with ck._native.OpenMpTeam():
        found = ck.select(scores.numpy(), 0.01, threads=500)
    assert np.array_equal(found.indices, want.indices)
    assert len(names()) < 50
    """)


@linux
def test_children_of_a_fork_and_other_threads_get_the_same_bits() -> None:
    """Before the first operator has run, and behind it."""
    run("""
    for more in (None, 2):
        if (child := os.fork()) == 0:
            if more:
                torch.set_num_threads(more)  # more than a careful child has
                ck.select(scores.numpy(), 0.01, threads=2)
            with ck._native.OpenMpTeam():
                found = ck.select(scores.numpy(), 0.01, threads=2)
            os._exit(0 if np.array_equal(found.indices, want.indices) else 1)
        assert os.waitpid(child, 0)[1] == 0
        check()
    errors = []
    def work():
        try:
            for _ in range(3):
                check()
        except BaseException as error:
            errors.append(error)
    threads = [threading.Thread(target=work) for _ in range(4)]
    [each.start() for each in threads], [each.join() for each in threads]
    assert not errors
    """)


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_blocks_change_no_bits_and_nest(threads: int) -> None:
    want = ck.select(ROWS, 0.01, threads=1)
    with _native.OpenMpTeam(), _native.OpenMpTeam():
        found = ck.select(ROWS, 0.01, threads=threads)
    assert np.array_equal(found.indices, want.indices)
    assert found.tail_mass_upper.tobytes() == want.tail_mass_upper.tobytes()


def test_errors_leave_the_block_as_it_was() -> None:
    bad = torch.from_numpy(ROWS.copy())
    bad[3, 4] = float("nan")
    for _ in range(3):
        with pytest.raises(ck.CertkError, match="NaN"):
            ct.select(bad, 0.01)
    ct.select(torch.from_numpy(ROWS), 0.01)
