"""One index that many threads read, grow and shorten at once, with and without Python's lock."""

from __future__ import annotations

import copy
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import certk_rs as ck

BASE, MOST, DIM = 300, 600, 16


@pytest.fixture(autouse=True)
def many_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_every_answer_is_right_or_a_refusal() -> None:
    rng = np.random.default_rng(0)
    keys, values = rng.standard_normal((2, MOST, DIM)).astype(np.float32)
    # Rows behind the first are all one row, so that a length says what the index holds.
    keys[BASE:], values[BASE:] = keys[BASE], values[BASE]
    q = 5 * rng.standard_normal(DIM).astype(np.float32)
    weights = np.exp(keys.astype(np.longdouble) @ q)
    means = np.cumsum(weights[:, None] * values, 0) / np.cumsum(weights)[:, None]
    index = ck.KvIndex.build(keys[:BASE], values[:BASE], bits=16, keep_keys=False)

    def append() -> None:
        if (n := len(index)) > MOST - 100:  # appends under way at once are of 80 rows at most
            index.crop(BASE)
        else:
            more = slice(BASE, BASE + n % 20 + 1)
            index.append(keys[more], values[more], threads=1)
        time.sleep(1e-4)  # who only reads must come to the index, too

    def crop() -> None:
        index.crop(max(len(index) - 1, BASE))
        time.sleep(1e-4)

    def search() -> None:
        found = index.search(q, 0.05, keys=keys[: len(index)], scale=1.0, threads=2)
        n = found.shape[-1]
        dropped = np.ones(n, bool)
        dropped[found.row(())] = False
        tail = weights[:n][dropped].sum() / weights[:n].sum()
        assert BASE <= n <= MOST
        assert float(found.tail_mass_lower) * (1 - 1e-15) <= tail
        assert tail <= float(found.tail_mass_upper) * (1 + 1e-15) <= 0.05 * (1 + 1e-14)

    def attend() -> None:
        found = index.attention(q[None], 0.5, scale=1.0, threads=1)
        off = np.linalg.norm((found.out - means[BASE - 1 :]).astype(float), axis=1)
        assert off.min() <= found.error_bound[0] < 1.0

    def attend_to_rows() -> None:
        n = len(index)
        given = (q[None], keys[:n], values[:n])
        found = ck.attention(*given, 0.01, scale=1.0, index=index, threads=1)
        off = np.linalg.norm((found.out - means[n - 1]).astype(float))
        assert off <= found.error_bound[0] + 1e-6
        assert found.tail_mass_upper[0] <= 0.01

    def copied() -> None:
        other = copy.copy(index)  # nobody else has it
        n, found = len(other), other.attention(q[None], 0.5, scale=1.0, threads=1)
        off = np.linalg.norm((found.out - means[n - 1]).astype(float))
        assert off <= found.error_bound[0] < 1.0

    answers, end = Counter[str](), time.monotonic() + 3

    def repeat(work: Callable[[], None]) -> None:
        while time.monotonic() < end:
            try:
                work()
            except ck.CertkError as error:
                if not re.search("has shape|holds fewer keys|pass a whole number", str(error)):
                    raise
            else:
                answers[work.__name__] += 1

    works = (append, append, crop, search, attend, attend_to_rows, copied)
    with ThreadPoolExecutor(len(works)) as pool:
        for each in [pool.submit(repeat, work) for work in works]:
            each.result()
    assert all(answers[work.__name__] for work in works), answers
    # No lock is left behind that an earlier call has spoilt.
    index.crop(BASE)
    index.append(keys[BASE:], values[BASE:])
    attend()
