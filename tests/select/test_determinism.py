"""The same bytes for any number of threads, any level, any split of the rows into calls."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import certk_rs as ck
from calls import calls
from cases import Case
from fresh_process import run_python
from generators import DTYPES, make_case
from levels import LEVELS, each_level
from same_bytes import bits, fields

SHAPES = (
    (400, 1), (300, 3), (300, 16), (200, 32), (200, 33), (150, 100), (100, 257), (60, 512),
    (40, 1024), (40, 1025), (12, 2049), (12, 3073), (8, 4096), (8, 4097), (3, 65537), (1, 300001),
)  # fmt: skip


def of_case(case: Case, threads: int | None) -> Any:
    """Return all that select, certify and keep_set say of a case."""
    more = {"threads": threads, **case.row_options()}
    plain, proven = (
        ck.select(case.scores, case.eps, prove_minimal=p, threads=threads, **case.select_options())
        for p in (False, True)
    )
    judged = [
        ck.certify(case.scores, plain, eps=case.eps, independent=i, **more) for i in (False, True)
    ]
    few = case.rows <= 60 and case.n <= 4096
    return plain, proven, judged, ck.keep_set(case.scores, case.eps, **more) if few else None


def made() -> Iterator[Callable[[int | None], Any]]:
    """Yield calls of every function that takes a number of threads; long rows are split."""
    for seed, (rows, n) in enumerate(SHAPES):
        for dtype in DTYPES:
            for more in (0, 50):
                case = make_case(seed + more, rows, n, dtype=dtype, options=bool(more))
                yield partial(of_case, case)
    for function, arguments in calls(rows=700, n=300, keys=3000).values():
        if "threads" in arguments:
            yield lambda threads, f=function, a=arguments: f(**{**a, "threads": threads})
    rng = np.random.default_rng(7)
    ranked = rng.standard_normal((1000, 24)) / np.sqrt(1.0 + np.arange(24))
    for rows, n, more in (
        (7, 33000, {"keep_first": 4}),
        (1000, 512, {}),
        (40, 700, {"max_keep": 90}),
    ):
        scores = (2 * ranked[:rows] @ rng.standard_normal((24, n))).astype(np.float32)
        yield lambda t, s=scores, m=more: ck.keep_set(s, 0.05, threads=t, **m)
    for heads, m, n, d, more in (
        (4, 50, 333, 33, {}), (2, 400, 200, 64, {"causal_offset": 3}),
        (1, 700, 150, 7, {"block_size": 4}), (2, 20, 100, 16, {"max_keep": 20}),
    ):  # fmt: skip
        q = rng.standard_normal((1, 1, d)) + 0.7 * rng.standard_normal((heads, m, d))
        q, k = q.astype(np.float16), rng.standard_normal((1, n, d)).astype(np.float16)
        yield lambda t, q=q, k=k, m=more: ck.keep_set_of_queries(
            q, k, 0.07, scale=0.4, threads=t, **m
        )


@cache
def everything() -> list[Callable[[int | None], Any]]:
    """Return all calls, whose arguments take longer to make than their answers."""
    return list(made())


def digest(threads: int | None = None) -> str:
    """Return one hash over all answers."""
    state = hashlib.sha256()
    for call in everything():
        state.update(*fields(call(threads)))
    return state.hexdigest()


@pytest.fixture(scope="module")
def reference() -> str:
    """Return the digest of this process, one thread."""
    return digest(1)


@pytest.mark.parametrize("threads", [2, 8])
def test_threads_argument(reference: str, threads: int) -> None:
    assert digest(threads) == reference


def test_every_level(reference: str) -> None:
    for level in each_level():
        assert digest(2) == reference, level


def elsewhere(**environment: str) -> Any:
    """Return level and digest of a fresh process with these environment variables."""
    code = "import certk_rs, test_determinism as t; print(certk_rs.simd_level(), t.digest())"
    return run_python(code, beside=Path(__file__), **environment)


def test_levels_and_numbers_of_threads_of_the_environment(reference: str) -> None:
    done = elsewhere(CERTK_LEVEL="portable", RAYON_NUM_THREADS="2")
    assert done.stdout.split() == ["portable", reference], done.stderr
    assert {"portable", "avx2"} <= set(LEVELS)
    done = run_python("import certk_rs; certk_rs.simd_level()", CERTK_LEVEL="mmx")
    assert done.returncode != 0
    assert "CERTK_LEVEL" in done.stderr


@pytest.mark.parametrize("seed", range(6))
def test_any_chunking_of_the_rows(seed: int) -> None:
    """Rows split over several calls give what one call gives."""
    case = make_case(seed, 60, (17, 130, 700, 1500, 3073, 5000)[seed])
    options = case.select_options()
    whole = ck.select(case.scores, case.eps, **options)
    for size in (1, 7, 16, 59):
        for start in range(0, case.rows, size):
            rows = slice(start, start + size)
            part = case.part(rows)
            sel = ck.select(part.scores, part.eps, **options)
            for name in ("k", "tail_mass_upper", "tail_mass_lower", "minimal", "status"):
                assert getattr(sel, name).tobytes() == getattr(whole, name)[rows].tobytes()
            first, last = whole.indptr[start], whole.indptr[min(start + size, case.rows)]
            assert sel.indices.tobytes() == whole.indices[first:last].tobytes()


def test_any_order_of_calls() -> None:
    """Earlier calls leave no trace, though scratch memory is reused between calls."""
    some = [make_case(seed, 20, 300, options=seed % 2 == 1) for seed in range(6)]
    first = [bits(of_case(case, 1)) for case in some]
    assert [bits(of_case(case, 2)) for case in reversed(some)][::-1] == first
