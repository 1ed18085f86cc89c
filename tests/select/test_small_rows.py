"""Property tests on rows of at most 8 arbitrary floats, shrunk to the smallest failure.

`generators.py` makes rows that are hard in known ways; here Hypothesis looks for unknown ones.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cases import Case
from sweep import sweep_faults

QUIET = settings(
    max_examples=400,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
DTYPES = {"float16": 16, "float32": 32, "float64": 64, "bfloat16": 16}


@st.composite
def rows(draw: st.DrawFn, kind: str) -> Case:
    """One row of any stored bits, with a budget of any size."""
    name = draw(st.sampled_from(sorted(DTYPES)))
    dtype = np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)
    highest = float(ml_dtypes.finfo(dtype).max)
    near = st.floats(-200.0, 200.0) | st.floats(-2.0, 2.0)
    if kind == "probs":
        # Eight weights whose sum float64 cannot hold are refused (test_bad_input.py).
        highest = min(highest, 2.0**1020)
        entry = st.floats(0.0, highest) | st.floats(0.0, 1.0) | st.sampled_from([0.0, 0.25, 1.0])
    else:
        entry = st.floats(-highest, highest) | near | st.sampled_from([0.0, 1.0, -np.inf])
    pool = draw(st.lists(entry, min_size=1, max_size=4))
    values = draw(st.lists(st.sampled_from(pool) | entry, min_size=1, max_size=8))
    eps = draw(
        st.floats(0.0, 1.0, exclude_max=True)
        | st.sampled_from([0.0, 0.25, 0.5, 1 / 3, 0.1, 1e-6, 1e-38, 1e-80, 5e-324, 1 - 2.0**-53])
    )
    scale = 1.0
    if kind != "probs":
        scale = draw(st.floats(-1e3, 1e3) | st.sampled_from([0.0, 1.0, -1.0, 1e-38, 5e-324]))
    with np.errstate(over="ignore"):
        stored = np.array([values]).astype(dtype)
    stored = np.where(stored == np.inf, dtype.type(0), stored)
    return Case(stored, np.array([eps]), kind=kind, scale=scale, name="hypothesis")


@st.composite
def constrained(draw: st.DrawFn) -> Case:
    """A row with masks and constraints as well."""
    case: Any = draw(rows("logits"))
    n = case.n
    changes: dict[str, Any] = {"keep_first": draw(st.integers(0, 2)), "min_keep": 1}
    changes["keep_last"] = draw(st.integers(0, 2))
    changes["min_keep"] = draw(st.integers(1, n))
    if draw(st.booleans()):
        changes["mask"] = np.array([draw(st.lists(st.booleans(), min_size=n, max_size=n))])
    if draw(st.booleans()):
        changes["lengths"] = np.array([draw(st.integers(0, n))])
    return Case(**{**case.__dict__, **changes})


@QUIET
@given(rows("logits"))
def test_any_scores(case: Case) -> None:
    assert sweep_faults(case) == []


@QUIET
@given(rows("probs"))
def test_any_weights(case: Case) -> None:
    assert sweep_faults(case) == []


@QUIET
@given(constrained())
def test_any_constraints(case: Case) -> None:
    assert sweep_faults(case) == []
