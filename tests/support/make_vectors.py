"""Writes `vectors/rows.json`: rows with the exact answers, for every language that has tests.

    python tests/support/make_vectors.py            write the file
    python tests/support/make_vectors.py --check    exit 1 when the file would change

The same bytes come out on every machine: scores are made from `random.Random.random()`, which
Python keeps stable, with operations that IEEE 754 rounds in one way only.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import sys
from collections.abc import Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from functools import partial, reduce
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from flint import arb

from cases import Case
from checks import LOGITS_SLACK, PROBS_SLACK, limit
from generators import BFLOAT16, DTYPES
from oracle import ExactRow, Precision, outward

PATH = Path(__file__).parents[1] / "vectors" / "rows.json"
DIGITS = 40
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)


def normals(rng: random.Random, n: int, sigma: float) -> list[float]:
    """Nearly normal numbers: sums of 12 uniform ones, rounded alike everywhere."""
    # One by one: `sum` has another rounding from Python 3.12 on.
    total = partial(reduce, float.__add__)
    return [(total(rng.random() for _ in range(12)) - 6.0) * sigma for _ in range(n)]


def row(name: str, scores: Any, eps: float, dtype: np.dtype = F32, **options: Any) -> Case:
    """A case of one row."""
    stored = np.asarray(scores, dtype=np.float64).astype(dtype).reshape(1, -1)
    if "mask" in options:
        options["mask"] = options["mask"].reshape(1, -1)
    if "length" in options:
        options["lengths"] = np.array([options.pop("length")])
    return Case(stored, np.array([eps]), name=name, **options)


def killers() -> Iterator[Case]:
    """Rows that broke earlier versions of the arithmetic (or of somebody else's)."""
    below = np.nextafter(0.25, 0.0)
    yield row("underflow at the exp's edge", [0.0, -103.6], 0.5)
    yield row("tail below every float32", [0.0, -200.0], 1e-80)
    yield row("tail below every float32, double", [0.0, -200.0], 1e-80, F64)
    yield row("far from zero with a scale", [1e5, 99990.0, 99999.9, 99900.0], 0.01, scale=0.1)
    yield row("largest floats, tiny scale", [3.4e38, -3.4e38, 0.0, 3.3e38], 0.1, scale=1e-38)
    yield row("two largest weights", [3e38, 3e38], 0.5, kind="probs")
    yield row("uniform at a quarter", [0.7] * 4, 0.25)
    yield row("uniform just below a quarter", [0.7] * 4, below)
    yield row("uniform probs at a quarter", [0.1] * 4, 0.25, kind="probs")
    yield row("two equal at a half", [3.0, 3.0], 0.5)
    yield row("two zeros and nothing", [0.0, 0.0, -1e38], 0.5)
    yield row("zeros of both signs tie", [-0.0, 0.0, -0.0, 0.0], 0.5)
    yield row("subnormals tie for exp", [1e-45, 0.0, -1e-45, 2e-45], 0.3)
    yield row("every score -inf", [-np.inf] * 5, 0.1)
    yield row("every score the lowest float", [np.finfo(np.float32).min] * 4, 0.3)
    lowest = np.full(4, np.finfo(np.float32).min, dtype=np.float32)
    yield row("finfo.min mask on a whole row", [1.0, 2.0, 3.0, 4.0], 0.1, mask=lowest)
    yield row("scale 0 makes all equal", [5.0, -3.0, 1e30, 0.0, 2.0], 0.4, scale=0.0)
    yield row("negative scale reverses", [5.0, -3.0, 1.0, 0.0, 2.0], 0.05, scale=-1.0)
    yield row("eps 0 keeps all that is finite", [0.0, -300.0, -np.inf, 2.0], 0.0)
    yield row("one key", [-7.0], 0.0)
    yield row("scores of +-1e30", [1e30, -1e30, 1e30, 0.0], 0.5)
    yield row("zero weights are masks", [0.0, -0.0, 0.5, 0.25], 0.3, kind="probs")
    yield row("all weights zero", [0.0, -0.0, 0.0], 0.3, kind="probs")
    yield row("subnormal weights", [1e-40, 1e-45, 3e-41], 0.3, kind="probs")


def constrained() -> Iterator[Case]:
    """The constraints and row options, one at a time and together."""
    scores = normals(random.Random(1), 40, 2.0)
    keep = np.array([i % 3 != 1 for i in range(40)])
    bias = np.array(normals(random.Random(2), 40, 1.0), dtype=np.float32)
    bias[::7] = np.finfo(np.float32).min
    yield row("min_keep", scores, 0.5, min_keep=17)
    yield row("max_keep over budget", scores, 0.01, max_keep=5)
    yield row("max_keep not reached", scores, 0.5, max_keep=30)
    yield row("keep_first and keep_last", scores, 0.2, keep_first=3, keep_last=4)
    yield row("prefix of 23", scores, 0.1, length=23)
    yield row("prefix of 0", scores, 0.1, length=0)
    yield row("boolean mask", scores, 0.1, mask=keep)
    yield row("additive mask", scores, 0.1, mask=bias, scale=0.125)
    yield row("blocks of 8, the last one short", scores[:37], 0.1, block_size=8)
    yield row("blocks with forced keys", scores, 0.3, block_size=5, keep_first=1, keep_last=1)
    yield row(
        "everything together", scores, 0.2, mask=keep, length=33, keep_first=2, keep_last=2,
        min_keep=6, scale=-0.7,
    )  # fmt: skip


def lengths() -> Iterator[Case]:
    """Both sides of the lanes, of the sum blocks and of two longer steps, in every dtype."""
    for n in (2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257):
        for dtype in DTYPES:
            rng = random.Random(n)
            for eps, sigma in ((0.1, 1.0), (1e-3, 4.0)):
                name = f"normal n={n} {dtype.name} sigma={sigma}"
                yield row(name, normals(rng, n, sigma), eps, dtype)
    for n in (1024, 2049):
        yield row(f"normal n={n}", normals(random.Random(n), n, 3.0), 0.01)
    for dtype in DTYPES:
        weights = [rng.random() ** 8 for _ in range(100)]
        yield row(f"probs {dtype.name}", weights, 0.05, dtype, kind="probs")


def edges() -> Iterator[Case]:
    """Budgets just above and just below the true tail mass of a top-k set: k and k + 1."""
    for dtype in (F32, F64, BFLOAT16):
        scores = normals(random.Random(99), 48, 2.0)
        exact = row("", scores, 0.5, dtype).exact(0)
        for k in (1, 9, 30):
            low, high = outward(exact.tail_mass(exact.order[:k]))
            yield row(f"tail mass of the best {k} fits, {dtype.name}", scores, high, dtype)
            yield row(f"tail mass of the best {k} is too much, {dtype.name}", scores, low, dtype)


def hexadecimal(values: np.ndarray) -> str:
    """Bit patterns, most significant digit first, a fixed number of digits per value."""
    stored = np.ascontiguousarray(values)
    bits = stored.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[stored.dtype.itemsize])
    return "".join(f"{v:0{2 * stored.dtype.itemsize}x}" for v in bits.tolist())


def bits64(value: float) -> str:
    """Bit pattern of one float64."""
    return struct.pack(">d", value).hex()


def decimals(ball: arb) -> list[str]:
    """Enclosing decimal numbers of DIGITS digits."""
    if not ball > arb((1, -1200)):
        return ["0", "0"] if ball.is_zero() else ["0", "1e-330"]
    both = []
    with Precision(512):
        ends = (ball.lower(), ball.upper())
    for end, rounding in zip(ends, (ROUND_FLOOR, ROUND_CEILING), strict=True):
        mantissa, exponent = (int(part) for part in end.man_exp())
        exact = Fraction(mantissa) * Fraction(2) ** exponent
        context = Context(prec=DIGITS, rounding=rounding)
        value = context.divide(Decimal(exact.numerator), Decimal(exact.denominator))
        both.append(f"{context.normalize(value):e}" if value else "0")
    return both


def mass(exact: ExactRow, kept: list[int]) -> dict[str, Any]:
    """The true tail mass of a set: enclosing decimals, and the enclosing float64 neighbours."""
    ball = exact.tail_mass(kept, 256)
    return {"decimal": decimals(ball), "bits": [bits64(end) for end in outward(ball)]}


def answer(case: Case) -> dict[str, Any]:
    """Return the exact answer for the row."""
    exact = case.exact(0)
    forced = np.flatnonzero(case.forced(case.visible())[0]).tolist()
    eps = Fraction(float(case.eps[0]))
    factor, flush = PROBS_SLACK if case.kind == "probs" else LOGITS_SLACK
    slack_eps = eps * (1 - Fraction(factor)) - case.n * Fraction(flush)

    def fewest(budget: Fraction) -> list[int]:
        if case.block_size > 1:
            return exact.minimal_blocks(
                budget, case.block_size, forced=forced, min_keep=case.min_keep
            )
        return exact.minimal_set(budget, forced=forced, min_keep=case.min_keep)

    kept, loose = fewest(eps), fewest(max(slack_eps, Fraction(0)))
    most = int(limit(case, np.array([len(exact.value)]))[0])
    status = "EMPTY" if not exact.value else "CERTIFIED"
    if len(kept) > most:
        kept, status = sorted(exact.ranked(forced)[:most]), "OVER_BUDGET"
    elif len(loose) > most:
        raise ValueError(f"{case.name}: the slack decides whether max_keep bites")
    given = exact.visible.tolist()[::2]
    return {
        "visible": len(exact.value),
        "status": status,
        "k_min": len(kept),
        "k_most": len(kept) if status == "OVER_BUDGET" else len(loose),
        "indices": kept,
        "tail_mass": mass(exact, kept),
        "given": {"indices": given, "tail_mass": mass(exact, given)},
    }


def vector(case: Case) -> dict[str, Any]:
    """One entry of the file."""
    mask: dict[str, str] | None = None
    if case.mask is not None:
        boolean = case.mask.dtype == np.bool_
        text = "".join("01"[int(v)] for v in case.mask[0]) if boolean else hexadecimal(case.mask[0])
        mask = {"dtype": case.mask.dtype.name, "bits": text}
    return {
        "name": case.name,
        "dtype": ml_dtypes.finfo(case.scores.dtype).dtype.name,
        "n": case.n,
        "scores": hexadecimal(case.scores[0]),
        "kind": case.kind,
        "scale": bits64(case.scale),
        "eps": bits64(float(case.eps[0])),
        "mask": mask,
        "length": None if case.lengths is None else int(case.lengths[0]),
        "min_keep": case.min_keep,
        "max_keep": case.max_keep,
        "keep_first": case.keep_first,
        "keep_last": case.keep_last,
        "block_size": case.block_size,
        "expect": answer(case),
    }


def text() -> str:
    """The whole file: one vector per line."""
    with np.errstate(over="ignore"):
        cases = [*killers(), *constrained(), *lengths(), *edges()]
    lines = [json.dumps(vector(case)) for case in cases]
    head = json.dumps("How to read this file: README.md beside it.")
    return f'{{"comment": {head},\n"vectors": [\n' + ",\n".join(lines) + "\n]}\n"


def main() -> int:
    """Write the file, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    made = text()
    if check:
        same = PATH.exists() and PATH.read_text() == made
        print(f"{PATH.name}: {'the same bytes' if same else 'differs'}")
        return 0 if same else 1
    PATH.write_text(made)
    print(f"{PATH.name}: {made.count(chr(10)) - 2} vectors, {len(made)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
