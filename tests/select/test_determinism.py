"""The same bytes for any number of threads, any level, any split of the rows into calls."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import certk_rs as ck
from cases import Case
from fresh_process import run_python
from generators import DTYPES, make_case
from levels import LEVELS
from same_bytes import fields

SHAPES = (
    (400, 1), (300, 3), (300, 16), (200, 32), (200, 33), (150, 100), (100, 257), (60, 512),
    (40, 1024), (40, 1025),
)  # fmt: skip
LONG_SHAPES = ((12, 2049), (12, 3073), (8, 4096), (8, 4097), (3, 65537), (1, 300001))


def cases() -> Iterator[Case]:
    """Rows of all families, dtypes and options; long ones are split over threads."""
    for seed, (rows, n) in enumerate(SHAPES + LONG_SHAPES):
        for dtype in DTYPES:
            yield make_case(seed, rows, n, dtype=dtype, options=False)
            yield make_case(seed + 50, rows, n, dtype=dtype, options=True)


def results(case: Case, threads: int | None) -> list[bytes]:
    """All outputs for a case."""
    out = []
    for prove in (False, True):
        sel = ck.select(
            case.scores, case.eps, prove_minimal=prove, threads=threads, **case.select_options()
        )
        out.append(sel)
    for independent in (False, True):
        out.append(
            ck.certify(
                case.scores, out[0], eps=case.eps, independent=independent, threads=threads,
                **case.row_options(),
            )
        )  # fmt: skip
    if case.rows <= 60 and case.n <= 4096:
        out.append(ck.keep_set(case.scores, case.eps, threads=threads, **case.row_options()))
    return fields(*out)


def digest(threads: int | None = None, some: Iterable[Case] | None = None) -> str:
    """One hash over all outputs for all cases."""
    state = hashlib.sha256()
    for case in some or cases():
        for part in results(case, threads):
            state.update(part)
    return state.hexdigest()


@pytest.fixture(scope="module")
def reference() -> str:
    """The digest of this process, one thread."""
    return digest(1)


def elsewhere(threads: int | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Level and digest of a fresh process with these environment variables."""
    code = (
        "import certk_rs, test_determinism;"
        f"print(certk_rs.simd_level(), test_determinism.digest({threads}))"
    )
    return run_python(code, beside=Path(__file__), **environment)


@pytest.mark.parametrize("threads", [2, 8])
def test_threads_argument(reference: str, threads: int) -> None:
    assert digest(threads) == reference


@pytest.mark.parametrize(("level", "lent"), [*zip(LEVELS, ("1", "8", "2", "2"), strict=True)])
def test_forced_levels_and_numbers_of_threads(reference: str, level: str, lent: str) -> None:
    done = elsewhere(CERTK_LEVEL=level, RAYON_NUM_THREADS=lent)
    if done.returncode != 0 and level != "portable":
        assert "CertkError" in done.stderr, done.stderr
        pytest.skip(f"this machine or build has no {level}: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [level, reference]


def test_an_unknown_level_is_refused() -> None:
    done = elsewhere(CERTK_LEVEL="mmx")
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
            part = case.part(slice(start, start + size))
            sel = ck.select(part.scores, part.eps, **options)
            rows = slice(start, start + size)
            assert sel.k.tobytes() == whole.k[rows].tobytes()
            assert sel.tail_mass_upper.tobytes() == whole.tail_mass_upper[rows].tobytes()
            assert sel.tail_mass_lower.tobytes() == whole.tail_mass_lower[rows].tobytes()
            assert sel.minimal.tobytes() == whole.minimal[rows].tobytes()
            first, last = whole.indptr[start], whole.indptr[min(start + size, case.rows)]
            assert sel.indices.tobytes() == whole.indices[first:last].tobytes()


def test_any_order_of_calls() -> None:
    """Earlier calls leave no trace, though scratch memory is reused between calls."""
    some = [make_case(seed, 20, 300, options=seed % 2 == 1) for seed in range(6)]
    first = [results(case, 1) for case in some]
    assert [results(case, 2) for case in reversed(some)][::-1] == first
