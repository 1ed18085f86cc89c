"""A line for each result that the package has, to compare two builds of it bit by bit.

A change that should change no result is checked by running this before and after, at each level:

    PYTHONPATH=python CERTK_LEVEL=portable .venv/bin/python tests/support/digest.py > before
    ... the change, a build ...
    PYTHONPATH=python CERTK_LEVEL=portable .venv/bin/python tests/support/digest.py | diff before -

A line names a call and has a hash of all fields of its result; of an error, its text. It says
whether bits have changed, and nothing of whether they are right. Levels and processors may differ
where a docstring says that a result depends on them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import certk_rs as ck
from certk_rs import output, prune
from certk_rs._jobs.analyze import analysis_json, analyze

REAL = Path(__file__).parents[2] / "python" / "certk_rs" / "_data" / "minilm_small.safetensors"
DTYPES = ("float64", "float32", "float16", "bfloat16")
Line = tuple[str, str]


def _bytes(value: Any) -> bytes:
    """Return the bytes of a result, without addresses and times."""
    if dataclasses.is_dataclass(value):
        return b"".join(_bytes(getattr(value, f.name)) for f in dataclasses.fields(value))
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes()
    if isinstance(value, tuple | list):
        return b"(" + b",".join(_bytes(item) for item in value) + b")"
    if isinstance(value, bytes):
        return value
    if isinstance(value, dict):
        return json.dumps(value, sort_keys=True, default=repr).encode()
    return repr(value).encode()


def effective_entries(scores: Any, **rows: Any) -> Any:
    return ck.windows.effective(scores, 0.01, **rows).count


def line(name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Line:
    """A name, and what came of the call."""
    try:
        return name, hashlib.sha256(_bytes(call(*args, **options))).hexdigest()[:24]
    except ck.CertkError as error:
        return name, f"CertkError: {error}"


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Numbers as a dtype; bfloat16 as the upper half of their float32."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    import ml_dtypes

    return values.astype(ml_dtypes.bfloat16)


def batches(rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    """Rows of many lengths and shapes: Gaussian, flat, tied, with infinities, with one winner."""
    for n in (1, 2, 15, 16, 17, 64, 200, 777, 5000):
        rows = 3 if n > 200 else 19
        gaussian = rng.normal(size=(rows, n)) * rng.choice([0.01, 1.0, 4.0, 30.0], size=(rows, 1))
        yield f"gaussian{n}", gaussian
        yield f"tied{n}", np.round(gaussian)
        hidden = gaussian.copy()
        hidden[rng.random(hidden.shape) < 0.3] = -np.inf
        yield f"hidden{n}", hidden
    peak = rng.normal(size=(4, 300))
    peak[:, 7] = 80.0
    yield "peak", peak


def row_options(rng: np.random.Generator, shape: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Every option that says how rows are read, alone, and some together."""
    rows, n = shape
    allowed = rng.random(shape) < 0.7
    bias = np.where(allowed, rng.normal(size=shape), -np.inf)
    lengths = rng.integers(0, n + 1, size=rows)
    yield {}
    yield {"scale": 0.37}
    yield {"mask": allowed}
    yield {"mask": bias.astype(np.float32)}
    yield {"mask": bias, "scale": 2.0, "lengths": lengths}
    yield {"lengths": lengths}
    yield {"causal_offset": n - rows}
    yield {"kind": "logprobs"}


def set_options(n: int) -> Iterator[dict[str, Any]]:
    """Every option that says what a set must satisfy, alone, and some together."""
    yield {}
    yield {"prove_minimal": True}
    yield {"min_keep": min(5, n), "prove_minimal": True}
    yield {"max_keep": max(1, n // 9)}
    yield {"max_keep": 0.3, "keep_last": n // 8}
    yield {"keep_first": n // 3, "keep_last": n // 4, "prove_minimal": True}
    yield {"block_size": 4}
    yield {"block_size": 16, "keep_first": n // 9, "max_keep": 0.5}


def of_rows(rng: np.random.Generator) -> Iterator[Line]:
    """Select, certify, keep_set, fits and tails of rows."""
    for name, base in batches(rng):
        for dtype in DTYPES:
            scores, n = stored(base, dtype), base.shape[1]
            for eps, more in itertools.product((0.3, 1e-3, 0.0), set_options(n)):
                call = f"select {name} {dtype} {eps} {more}"
                yield line(call, ck.select, scores, eps, **more)
        scores = base.astype(np.float32)
        budgets = rng.choice([0.0, 1e-6, 0.01, 0.2], size=len(scores))
        keep = rng.random(scores.shape) < 0.5
        for i, rows in enumerate(row_options(rng, scores.shape)):
            at = f"{name} options{i}"
            yield line(f"select {at}", ck.select, scores, budgets, **rows)
            proven = rows | {"prove_minimal": True, "threads": 2}
            yield line(f"select {at} proven", ck.select, base, budgets, **proven)
            for independent in (False, True):
                given = rows | {"eps": budgets, "independent": independent}
                yield line(f"certify {at} {independent}", ck.certify, scores, keep, **given)
            yield line(f"keep_set {at}", ck.keep_set, scores, 0.05, **rows)
            capped = rows | {"max_keep": 0.2, "keep_first": base.shape[1] // 20}
            yield line(f"keep_set {at} capped", ck.keep_set, scores, 0.01, **capped)
            yield line(f"fit {at}", ck.gaussian.fit, base, eps=0.01, **rows)
            for method in ("betting", "bernstein", "hoeffding"):
                drawn = rows | {
                    "seed": 7,
                    "draws": 1 + base.shape[1] // 16,
                    "method": method,
                    "delta": 0.1,
                }
                yield line(
                    f"tail_mass {at} {method}",
                    ck.montecarlo.tail_mass,
                    base,
                    keep,
                    **drawn,
                )
            if "kind" not in rows and "mask" not in rows:
                above = base * rows.get("scale", 1.0) + 0.5
                drawn = rows | {"seed": 3, "draws": 60, "delta": 0.1, "upper_bounds": above}
                yield line(
                    f"tail_mass {at} importance",
                    ck.montecarlo.tail_mass,
                    base,
                    keep,
                    **drawn,
                )
            yield line(f"effective {at}", effective_entries, base, **rows)
            yield line(f"participation {at}", ck.windows.participation, base, **rows)
        probs = np.exp(base - base.max(axis=1, keepdims=True, initial=-1e300))
        yield line(f"probs {name}", ck.select, probs, 0.02, kind="probs")
    flat = rng.normal(size=4000)
    indptr = np.array([0, 0, 5, 700, 701, 4000])
    yield line("ragged", ck.select, flat, 0.01, indptr=indptr)
    for offset in (0, 1):
        cut = np.ascontiguousarray(rng.normal(size=(8, 101)))[:, offset : 100 + offset]
        yield line(f"strided {offset}", ck.select, cut, 0.01, threads=2)


def of_bounds(rng: np.random.Generator) -> Iterator[Line]:
    """The bounds on tails and outputs."""
    scores = np.sort(rng.normal(size=(6, 400)) * 3.0)[:, ::-1]
    ks = np.array([1, 2, 30, 100, 399, 400])
    for function in (ck.bounds.score_gap, ck.bounds.single_gap, ck.bounds.multi_gap):
        yield line(function.__name__, function, scores, ks)
    yield line("best_cuts", ck.bounds.best_cuts, scores, ks, 3)
    for rule in ("single_gap", "multi_gap", "exact"):
        yield line(f"smallest_k {rule}", ck.bounds.smallest_k, scores, 0.01, rule=rule)
    for shape, d in (((5, 90), 8), ((2, 3, 4, 64), 16), ((1, 1), 1)):
        rows = rng.normal(size=shape) * 2.0
        values = rng.normal(size=(*shape[:-2], shape[-1], d))
        keep = rng.random(shape) < 0.4
        keep[..., 0] = True
        for dtype in DTYPES:
            v = stored(values, dtype)
            yield line(f"output_error {shape} {dtype}", output.output_error, rows, v, keep)
            for tol in (0.5, 0.01):
                yield line(
                    f"select_output {shape} {dtype} {tol}",
                    output.select_output,
                    rows,
                    v,
                    tol,
                )
    grid = np.linspace(0.1, 5.0, 17)
    for n, eps in itertools.product((64, 4096, 10**6), (0.1, 1e-3)):
        yield line(f"keep_fraction {eps}", ck.gaussian.keep_fraction, grid, eps)
        yield line(f"plan {n} {eps}", ck.gaussian.plan, n, 1.5, eps)


def of_keys(rng: np.random.Generator, folder: Path) -> Iterator[Line]:
    """Indexes, searches, attention."""
    for n, d, m in ((5, 3, 2), (300, 32, 4), (4000, 64, 3), (700, 64, 90)):
        q, k, v = (rng.normal(size=(2, length, d)) * 1.5 for length in (m, n, n))
        sees = rng.random((2, m, n)) < 0.8
        for dtype in ("float32", "float16", "bfloat16"):
            at = f"{n} {d} {m} {dtype}"
            queries, keys, values = (stored(x, dtype) for x in (q, k, v))
            index = ck.KeyIndex.build(keys)
            path = folder / "index.safetensors"
            index.save(path)
            yield line(f"index {at}", path.read_bytes)
            path.unlink()
            for rule, eps in itertools.product(("mass", "gap"), (0.1, 1e-3)):
                yield line(
                    f"search {at} {rule} {eps}", index.search, queries, eps, keys=keys, rule=rule
                )
            yield line(
                f"top_k {at}",
                index.search,
                queries,
                None,
                keys=keys,
                rule="top_k",
                k=min(5, n),
            )
            options: list[dict[str, Any]] = [
                {"eps": 0.02},
                {"eps": 0.02, "causal": n >= m},
                {"eps": 0.01, "mask": sees},
                {"eps": 0.01, "sinks": np.array([0.5, 2.0])},
                {"eps": 0.01, "lengths": rng.integers(0, n + 1, size=(2, m))},
                {"out_tol": 0.1},
                {"eps": 0.0, "even_if_slower": True},
                {"eps": 0.05, "even_if_slower": True, "threads": 2},
            ]
            for i, more in enumerate(options):
                for with_index in (False, True):
                    given = more | ({"index": index} if with_index else {})
                    call = f"attention {at} {i} {with_index}"
                    yield line(call, ck.attention, queries, keys, values, **given)


def _pruned(out: Path, eps: float, options: dict[str, Any]) -> bytes:
    prune(REAL, out, eps, proof="full", **options)
    return (out / REAL.name).read_bytes()


def of_files(folder: Path) -> Iterator[Line]:
    """Yield the outputs of jobs."""
    options = [
        (0.2, {}),
        (0.02, {"granularity": "layer"}),
        (0.05, {"keep_first": 2, "keep_last": 3, "max_keep": 0.5}),
    ]
    for i, (eps, how) in enumerate(options):
        yield line(f"prune {i}", _pruned, folder / f"out{i}", eps, how)
    for found in analyze([REAL], [0.05, 0.2]).caches:
        text = json.dumps(analysis_json(found), sort_keys=True)
        yield line("analyze", text.replace, str(REAL), "")


def lines() -> Iterator[Line]:
    """Every line, in an order that is always the same."""
    yield from of_rows(np.random.default_rng(1))
    yield from of_bounds(np.random.default_rng(2))
    with tempfile.TemporaryDirectory() as folder:
        yield from of_keys(np.random.default_rng(3), Path(folder))
        yield from of_files(Path(folder))


if __name__ == "__main__":
    for name, hashed in lines():
        sys.stdout.write(f"{name}\t{hashed}\n")
