"""Calls of any thread end when another one says so; signals reach the main thread only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

import certk_rs as ck
from certk_rs import _native

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


@pytest.mark.parametrize(
    "call",
    [lambda: ck.keep_set(LONG, 0.1), lambda: ck.select(LONG, 0.1)],
    ids=["keep_set", "select"],
)
def test_another_thread_ends_a_call(call: Callable[[], object]) -> None:
    assert type(cancelled(call)) is KeyboardInterrupt


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
