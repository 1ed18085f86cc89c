"""Every certificate is true against exact arithmetic, on rows made to break it.

One sweep is: select, select with prove_minimal, certify of both selections, certify of sets of
other kinds, each with the kernels and with the independent checker; all compared with the oracle.
`make test` runs some 5 * 10**4 rows; `make test-heavy` runs over 10**6.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import certk_rs as ck
from checks import selection_faults
from generators import (
    CHUNK_LENGTHS,
    FAMILIES,
    LONG_LENGTHS,
    MEDIUM_LENGTHS,
    SHARED_LENGTHS,
    SHORT_LENGTHS,
    make_case,
)
from sweep import sweep_faults


def run(lengths: tuple[int, ...], seeds: range, rows: int) -> int:
    """Sweep every length and seed; stop at the first faulty case. Returns the rows seen."""
    seen = 0
    for n in lengths:
        for seed in seeds:
            case = make_case(seed, rows, n, options=seed % 2 == 1)
            faults = sweep_faults(case, seed)
            assert not faults, f"{len(faults)} faults, the first:\n{faults[0]}"
            seen += case.rows
    return seen


@pytest.mark.parametrize("n", SHORT_LENGTHS)
def test_short_rows(n: int) -> None:
    """Lengths around the lanes and registers."""
    run((n,), range(4), 450)


@pytest.mark.parametrize("n", MEDIUM_LENGTHS)
def test_medium_rows(n: int) -> None:
    """Lengths around the sum blocks and the usual ends of short-row paths."""
    run((n,), range(2), 180)


@pytest.mark.parametrize("n", LONG_LENGTHS)
def test_long_rows(n: int) -> None:
    """Lengths around sampling thresholds."""
    run((n,), range(2), 45)


@pytest.mark.parametrize("n", CHUNK_LENGTHS)
def test_rows_of_chunks(n: int) -> None:
    """Lengths around the fixed edges at which a row is split."""
    run((n,), range(2), 3)


@pytest.mark.parametrize("n", SHARED_LENGTHS)
def test_rows_shared_by_threads(n: int) -> None:
    """Lengths around the one from which on a single row is worth several threads."""
    run((n,), range(3), 1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["logits", "probs"])
def test_each_family_in_float32(family: str, kind: str) -> None:
    """Every family by name, float32, one short and one long length."""
    for n, rows in ((61, 240), (4099, 12)):
        case = make_case(7, rows, n, dtype=np.dtype(np.float32), kind=kind, family=family)
        faults = sweep_faults(case, 7)
        assert not faults, f"{len(faults)} faults, the first:\n{faults[0]}"


@pytest.mark.parametrize("block_size", [2, 3, 16, 64])
def test_whole_blocks(block_size: int) -> None:
    """The fewest whole blocks, the last one short, with forced keys and masks."""
    for seed in range(8):
        case = make_case(seed, 20, (48, 65, 130, 200)[seed % 4], options=seed % 2 == 1)
        case = replace(case, block_size=block_size, max_keep=None)
        for more in ({}, {"prove_minimal": True}):
            sel = ck.select(case.scores, case.eps, **case.select_options(), **more)
            faults = selection_faults(case, sel)
            assert not faults, f"{len(faults)} faults, the first:\n{faults[0]}"


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("lengths", "seeds", "rows"),
    [
        (SHORT_LENGTHS, range(1000, 1060), 1200),
        (MEDIUM_LENGTHS, range(1000, 1050), 400),
        (LONG_LENGTHS, range(1000, 1040), 60),
        (CHUNK_LENGTHS, range(1000, 1020), 4),
        (SHARED_LENGTHS, range(1000, 1020), 1),
    ],
    ids=["short", "medium", "long", "chunks", "shared"],
)
def test_over_a_million_rows(lengths: tuple[int, ...], seeds: range, rows: int) -> None:
    """The same sweep, over 1.4 million rows in all."""
    seen = run(lengths, seeds, rows)
    print(f"{seen} rows, no violation")
