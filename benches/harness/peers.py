"""The peers, each as a `Bind`: it takes (rows, n) float32 scores in place and returns the work.

All run over the last axis in one call for all rows. Those that are told k get the mean k of the
rows; they neither find it nor prove anything. Threads are pinned with `torch.set_num_threads`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from . import ort
from .clock import Arena, Bind, Work
from .rows import Array, Rng
from .verify import CheckFailedError


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Torch on that many threads, and on as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _out(nbytes: int, rng: Rng, rows: Array, cache: dict[int, Arena]) -> Array:
    """An output like the rows in memory that was touched before, randomly aligned."""
    arena = cache.setdefault(nbytes, Arena(nbytes))
    return arena.view(rng, rows.shape, rows.dtype)


def softmax_out() -> Bind:
    """`torch.softmax` into an output that exists: every probability, nothing chosen."""
    arenas: dict[int, Arena] = {}
    rng = np.random.default_rng(1)

    def bind(rows: Array) -> Work:
        into = torch.from_numpy(_out(rows.nbytes, rng, rows, arenas))
        scores = torch.from_numpy(rows)
        return lambda: torch.softmax(scores, -1, out=into)

    return bind


def softmax(rows: Array) -> Work:
    """`torch.softmax` that allocates its result, as it is usually called."""
    scores = torch.from_numpy(rows)
    return lambda: torch.softmax(scores, -1)


def scipy_softmax(rows: Array) -> Work:
    """`scipy.special.softmax`."""
    from scipy import special

    return lambda: special.softmax(rows, axis=-1)


def top_p(eps: float) -> Bind:
    """Softmax, sort, cumsum, count: the fewest keys whose mass reaches 1 - eps, in f32."""

    def bind(rows: Array) -> Work:
        scores = torch.from_numpy(rows)

        def work() -> tuple[torch.Tensor, torch.Tensor]:
            mass, order = torch.sort(torch.softmax(scores, -1), dim=-1, descending=True)
            before = torch.cumsum(mass, -1) - mass
            return (before < 1.0 - eps).sum(-1), order

        return work

    return bind


def warper(eps: float) -> Bind:
    """transformers' `TopPLogitsWarper(top_p=1 - eps)`."""
    from transformers import TopPLogitsWarper

    warp: Any = TopPLogitsWarper(top_p=1.0 - eps)

    def bind(rows: Array) -> Work:
        scores = torch.from_numpy(rows)
        return lambda: warp(None, scores)

    return bind


def topk(k: int) -> Bind:
    """`torch.topk`, unsorted, told k."""

    def bind(rows: Array) -> Work:
        scores = torch.from_numpy(rows)
        return lambda: torch.topk(scores, k, dim=-1, sorted=False)

    return bind


def partition(k: int) -> Bind:
    """`numpy.partition` told k: the k largest values, and not where they are."""

    def bind(rows: Array) -> Work:
        at = min(rows.shape[-1] - k, rows.shape[-1] - 1)
        return lambda: np.partition(rows, at, axis=-1)

    return bind


def argpartition(k: int) -> Bind:
    """`numpy.argpartition` told k."""

    def bind(rows: Array) -> Work:
        at = min(rows.shape[-1] - k, rows.shape[-1] - 1)
        return lambda: np.argpartition(rows, at, axis=-1)

    return bind


def numpy_max(rows: Array) -> Work:
    """`numpy.max` of each row: one read of the scores, and next to no arithmetic."""
    return lambda: rows.max(axis=-1)


def numpy_exp() -> Bind:
    """`numpy.exp` into an output that exists."""
    arenas: dict[int, Arena] = {}
    rng = np.random.default_rng(2)

    def bind(rows: Array) -> Work:
        into = _out(rows.nbytes, rng, rows, arenas)
        return lambda: np.exp(rows, out=into)

    return bind


def torch_exp() -> Bind:
    """`torch.exp` into an output that exists."""
    arenas: dict[int, Arena] = {}
    rng = np.random.default_rng(3)

    def bind(rows: Array) -> Work:
        into = torch.from_numpy(_out(rows.nbytes, rng, rows, arenas))
        scores = torch.from_numpy(rows)
        return lambda: torch.exp(scores, out=into)

    return bind


def check_peers(rows: Array, k: Array, eps: float) -> None:
    """Raise unless the peers do, on the first row, the work that they are timed for."""
    row, told, n = rows[:1], int(k[0]), rows.shape[1]
    weight = np.exp(row.astype(np.float64) - row.max())
    mass = weight / weight.sum()
    for bind in (softmax_out(), softmax, scipy_softmax):
        result = np.asarray(bind(row)())
        if not np.allclose(result, mass, rtol=1e-3, atol=1e-9):
            raise CheckFailedError(f"{bind} is no softmax")
    best = np.sort(row[0])[n - told :]
    chosen: Any = topk(told)(row)()
    if not np.array_equal(np.sort(chosen.values[0].numpy()), best):
        raise CheckFailedError("torch.topk does not hold the k largest")
    parted: Any = argpartition(told)(row)()
    if not np.array_equal(np.sort(row[0][parted[0, n - told :]]), best):
        raise CheckFailedError("numpy.argpartition does not hold the k largest")
    values: Any = partition(told)(row)()
    if not np.array_equal(np.sort(values[0, n - told :]), best):
        raise CheckFailedError("numpy.partition does not hold the k largest")
    if ort.HERE:
        topmost: Any = ort.topk(told)(row)()
        if not np.array_equal(np.sort(topmost.copy_outputs_to_cpu()[0][0]), best):
            raise CheckFailedError("ONNX Runtime's TopK does not hold the k largest")
    counted: Any = top_p(eps)(row)()
    warped: Any = warper(eps)(row)()
    # Their sums are float32, so their k need not be ours, but it is near.
    for found in (int(counted[0][0]), int((~torch.isneginf(warped)).sum())):
        if abs(found - told) > max(2, n // 50):
            raise CheckFailedError(f"top-p keeps {found} keys of {n}, and not about {told}")
