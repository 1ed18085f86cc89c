"""Results make their arrays when they are asked for, and nobody can tell.

What was found stays in Rust until then; see `results._OnDemand`.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import pydoc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import certk_rs as ck

RNG = np.random.default_rng(8)
SCORES = (3 * RNG.standard_normal((2, 3, 64))).astype(np.float32)
EPS = 0.05
EACH = np.linspace(0.01, 0.2, 6).reshape(2, 3)
INDPTR = np.array([0, 30, 30, 384])
KEEP = SCORES > 2

MAKERS: dict[str, Callable[[], Any]] = {
    "one row": lambda: ck.select(SCORES[0, 0], EPS),
    "one row in a batch": lambda: ck.select(SCORES[0, :1], EPS),
    "batch": lambda: ck.select(SCORES, EPS),
    "eps per row": lambda: ck.select(SCORES, EACH, max_keep=4),
    "ragged": lambda: ck.select(SCORES.reshape(-1), EPS, indptr=INDPTR),
    "no rows": lambda: ck.select(SCORES[:0], EPS),
    "released interpreter": lambda: ck.select(np.tile(SCORES, (20, 1, 1)), EPS),
    "certify": lambda: ck.certify(SCORES[0, 0], KEEP[0, 0], eps=EPS),
    "certify without eps": lambda: ck.certify(SCORES, KEEP),
    "certify, eps per row": lambda: ck.certify(SCORES, KEEP, eps=EACH),
}
every = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


def names(result: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(result)]


def values(result: Any) -> dict[str, Any]:
    return {name: getattr(result, name) for name in names(result)}


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert type(value) is type(b[name]), name
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(value, b[name], strict=True)
        else:
            assert value == b[name], name


@every
def test_untouched_results_can_be_pickled_and_copied(make: Callable[[], Any]) -> None:
    want = values(make())
    for again in (
        pickle.loads(pickle.dumps(make())),
        copy.copy(make()),
        copy.deepcopy(make()),
        dataclasses.replace(make()),
    ):
        same(values(again), want)
    same(dataclasses.asdict(make()), want)


def test_an_untouched_selection_can_be_saved_shown_and_certified(tmp_path: Path) -> None:
    want = ck.select(SCORES, EPS)
    _ = values(want)
    ck.select(SCORES, EPS).save(tmp_path / "keep.npz")
    same(values(ck.Selection.load(tmp_path / "keep.npz")), values(want))
    assert repr(ck.select(SCORES, EPS)) == repr(want)
    assert ck.select(SCORES, EPS).summary() == want.summary()
    np.testing.assert_array_equal(ck.select(SCORES, EPS).row((1, 2)), want.row(5), strict=True)
    np.testing.assert_array_equal(ck.select(SCORES, EPS).to_mask(), want.to_mask(), strict=True)
    certificate = ck.certify(SCORES, ck.select(SCORES, EPS), eps=EPS)
    same(values(certificate), values(ck.certify(SCORES, want, eps=EPS)))


@every
def test_a_field_is_one_object_whenever_it_is_asked_for(make: Callable[[], Any]) -> None:
    result = make()
    first = values(result)
    assert all(getattr(result, name) is value for name, value in first.items())


@every
def test_fields_do_not_depend_on_the_order_of_asking(make: Callable[[], Any]) -> None:
    result, want = make(), values(make())
    same({name: getattr(result, name) for name in reversed(want)}, dict(reversed(want.items())))


@every
def test_threads_that_ask_at_once_get_one_object(make: Callable[[], Any]) -> None:
    threads = 4
    for _ in range(20):
        result = make()
        barrier = threading.Barrier(threads)
        got: list[dict[str, Any]] = []

        def ask(result: Any = result, barrier: Any = barrier, got: Any = got) -> None:
            barrier.wait()
            got.append(values(result))

        workers = [threading.Thread(target=ask) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert len(got) == threads
        for name, value in values(result).items():
            assert all(other[name] is value for other in got)


@every
def test_arrays_are_read_only_for_good(make: Callable[[], Any]) -> None:
    result = make()
    for name, value in values(result).items():
        if not isinstance(value, np.ndarray):
            continue
        assert not value.flags.writeable, name
        if name not in ("eps", "score_indptr"):  # copies of what the caller gave
            with pytest.raises(ValueError, match="WRITEABLE"):
                value.setflags(write=True)


def test_what_the_caller_overwrites_does_not_show() -> None:
    scores, eps, starts = SCORES.copy(), EACH.copy(), INDPTR.copy()
    keep = KEEP.copy()
    flat = scores.reshape(-1)
    made = [
        lambda: ck.select(scores, eps),
        lambda: ck.select(scores[0, 0], EPS),
        lambda: ck.select(flat, EPS, indptr=starts),
        lambda: ck.certify(scores, keep, eps=eps),
    ]
    want = [values(make()) for make in made]
    results = [make() for make in made]
    scores[...] = np.nan
    eps[...] = np.nan
    starts[...] = 0
    keep[...] = False
    for result, fields in zip(results, want, strict=True):
        same(values(result), fields)


def test_results_outlive_the_scores() -> None:
    results = [ck.select(SCORES.copy(), EPS) for _ in range(50)]
    want = values(ck.select(SCORES, EPS))
    for result in results:
        same(values(result), want)


def test_results_still_look_like_dataclasses() -> None:
    assert names(ck.Selection)[:3] == ["shape", "eps", "k"]
    parameters = inspect.signature(ck.Certificate).parameters
    required = [name for name, p in parameters.items() if p.default is inspect.Parameter.empty]
    assert required == ["shape", "k", "tail_mass_upper", "tail_mass_lower"]
    for kind in (ck.Selection, ck.Certificate):
        assert "Proven upper end" in inspect.getsource(kind)
        assert kind.__name__ in pydoc.render_doc(kind)
        with pytest.raises(AttributeError):
            _ = kind.k
        with pytest.raises(AttributeError):
            _ = object.__new__(kind).k


def test_a_budget_of_any_number_type_is_the_same_budget() -> None:
    want = values(ck.select(SCORES, 0.25))
    for eps in (np.float64(0.25), np.float32(0.25), np.array(0.25), np.float16(0.25)):
        same(values(ck.select(SCORES, eps)), want)
    # Budgets whose memory is laid out the other way round belong to the same rows.
    turned = np.asfortranarray(EACH)
    same(values(ck.select(SCORES, turned)), values(ck.select(SCORES, EACH)))
    same(values(ck.keep_set(SCORES, turned)), values(ck.keep_set(SCORES, EACH)))
