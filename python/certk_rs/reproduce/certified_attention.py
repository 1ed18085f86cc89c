"""Experiment 9: certified attention against plain attention, time and error of the output."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import sparse_attention
from .._display.page import Table, legend_below, panels, plain_ticks, svg
from ..cache_format import Cache, nearest_rsqrt, widen
from ..key_index import KeyIndex
from ..results import AttentionResult
from .settings import (
    Settings,
    Tell,
    chosen,
    described,
    lengths_up_to,
    mean,
    medians,
    prefix_limit,
)

NAME = "certified-attention"
TITLE = "Certified attention against plain attention: time and error"
ABOUT = (
    "One query of a decoding step, and a group of 4 that share their keys, attend to n keys with "
    "eps = 0.01, an index of the keys and a ball around the values, both made beforehand; the "
    "proven error bound is part of the work. Gaussian keys have d = 128 and scores of standard "
    "deviation sigma; real ones are the first n of all heads of a layer. Everything is float32 and "
    "on one thread. The measured error is the distance from attention in float64. Times are "
    "medians, and errors means over the heads and queries of one case, without intervals: every "
    "case is shown."
)
NEEDS: tuple[str, ...] = ()
EPS = 0.01
D = 128
SIGMAS = (1.0, 2.5, 4.0, 5.0)
GROUP = 4
REAL = "real"
SDPA = "torch SDPA"
PLAIN = "our own plain attention"
CHUNK = 4096

Array = NDArray[Any]


def run(settings: Settings, tell: Tell) -> dict[str, Any]:
    """Every kind of scores at every length, one query and a group."""
    lengths = (1024, 4096) if settings.brief else (2048, 8192, 32768, 131072)
    repeat = 5 if settings.brief else 11
    rows: list[dict[str, Any]] = []
    times: list[dict[str, Any]] = []

    def measure(case: _Case, **about: Any) -> None:
        for group in sorted({1, case.group}):
            row, time = case.measure(group, repeat)
            rows.append({**about, **row})
            times.append(time)

    rng = settings.random(9)
    keys, values = (rng.standard_normal((1, lengths[-1], D), dtype=np.float32) for _ in range(2))
    directions = rng.standard_normal((1, GROUP, D))
    directions *= math.sqrt(D) / np.linalg.norm(directions, axis=-1, keepdims=True)
    for i, n in enumerate(lengths):
        some = _Keys(keys[:, :n], values[:, :n])
        for sigma in SIGMAS:
            case = _Case(some, (sigma * directions).astype(np.float32), nearest_rsqrt(D))
            measure(case, kind=f"sigma = {sigma:g}", sigma=sigma)
        tell(0.7 * (i + 1) / len(lengths))
    with Cache(settings.data) as cache:
        longest = prefix_limit(settings.data, GROUP)
        for i, layer in enumerate(cache.layers):
            query, key, value = (
                widen(cache.read(layer, role), layer.dtypes[role]).astype(np.float32)
                for role in ("query", "key", "value")
            )
            # Of the first query head of each kv head.
            query = query[:: layer.heads // layer.kv_heads]
            for n in lengths_up_to(longest, settings.brief):
                last, _ = chosen(cache, layer, GROUP, n)
                case = _Case(
                    _Keys(key[:, :n], value[:, :n]), query[:, last], cache.scales[layer.index]
                )
                measure(case, kind=REAL, layer=layer.index)
            tell(0.7 + 0.3 * (i + 1) / len(cache.layers))
    peer = PLAIN if times[0][SDPA] is None else SDPA
    timing = {"seen": _fast(_timed(rows, times), peer), "peer": peer, "rows": times}
    about = described(settings, prefixes=True)
    return {"seen": _seen(rows), "about": about, "rows": rows, "timing": timing}


class _Keys:
    """Keys and values (heads, n, d) in float32, with what is made of them once."""

    def __init__(self, keys: Array, values: Array) -> None:
        self.keys, self.values = np.ascontiguousarray(keys), np.ascontiguousarray(values)
        self.index = KeyIndex.build(self.keys, threads=1)
        self.ball = sparse_attention.ValueBall(self.values, threads=1)


class _Case:
    """Queries (heads, m, d) in float32 on some keys."""

    def __init__(self, keys: _Keys, queries: Array, scale: float) -> None:
        self.keys, self.queries, self.scale = keys, queries, scale
        self.group = queries.shape[1]

    def measure(self, group: int, repeat: int) -> tuple[dict[str, Any], dict[str, float | None]]:
        """What is kept, errors, and times as ratios; `group` queries of each head."""
        queries = np.ascontiguousarray(self.queries[:, -group:])
        heads, n, _ = self.keys.keys.shape
        found = self._ours(queries, EPS)
        real, spread = self._real(queries)

        def errors(out: Array) -> Array:
            return np.asarray(np.linalg.norm(out.reshape(real.shape) - real, axis=-1))

        # Values of zero have no scale, and errors of zero.
        size = mean(np.linalg.norm(self.keys.values, axis=-1)) or 1.0
        error, bound = errors(found.out), found.error_bound.reshape(heads, group)
        sdpa = _sdpa(queries, self.keys.keys, self.keys.values, self.scale)
        row = {
            "n": n,
            "queries": group,
            "spread": spread,
            "kept": mean(found.k) / n,
            "scored": mean(found.scored) / n,
            "tail": float(found.tail_mass_upper.max()),
            "error": mean(error) / size,
            "bound": mean(bound) / size,
            "plain": None if sdpa is None else mean(errors(sdpa())) / size,
            "wrong": int((error > bound).sum()),
            "rows": error.size,
        }
        works: dict[str, Callable[[], object]] = {
            "ours": lambda: self._ours(queries, EPS).error_bound,
            PLAIN: lambda: self._ours(queries, 0.0),
        }
        self._ours(queries, 0.0)  # the others have run
        if sdpa is not None:
            works[SDPA] = sdpa
        spent = medians(works, repeat)
        return row, {
            peer: spent["ours"] / spent[peer] if peer in spent else None for peer in (SDPA, PLAIN)
        }

    def _ours(self, queries: Array, eps: float) -> AttentionResult:
        """Attention of a group of query heads a kv head."""
        keys = self.keys
        return sparse_attention.attention(
            queries.reshape(-1, 1, queries.shape[-1]), keys.keys, keys.values, eps,
            index=keys.index if eps else None, ball=keys.ball if eps else None,
            scale=self.scale, threads=1,
        )  # fmt: skip

    def _real(self, queries: Array) -> tuple[Array, float]:
        """Attention in float64, and the mean standard deviation of a row of scores."""
        places = [slice(at, at + CHUNK) for at in range(0, self.keys.keys.shape[1], CHUNK)]
        wide = queries.astype(np.float64)
        scores = np.concatenate(
            [wide @ self.keys.keys[:, at].astype(np.float64).swapaxes(1, 2) for at in places], -1
        )
        scores *= self.scale
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out = sum(weights[..., at] @ self.keys.values[:, at].astype(np.float64) for at in places)
        return np.asarray(out), mean(scores.std(axis=-1))


def _sdpa(queries: Array, keys: Array, values: Array, scale: float) -> Callable[[], Array] | None:
    """Attention by torch on one thread, a group being queries of one head; None without torch."""
    try:
        import torch
    except ImportError:
        return None
    q, k, v = (torch.from_numpy(array)[None] for array in (queries, keys, values))

    def work() -> Array:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)
        finally:
            torch.set_num_threads(threads)
        return np.asarray(out.numpy())

    return work


def _seen(rows: list[dict[str, Any]]) -> str:
    """What is kept and lost."""
    made, real = _longest(rows)
    wrong, judged = sum(row["wrong"] for row in rows), sum(row["rows"] for row in rows)
    loose = [row["bound"] / row["error"] for row in rows if row["error"] > 0 and row["kept"] < 1]
    far = (
        f"where keys are dropped the bound is {np.median(loose):.1f} times the error, in the median"
        if loose
        else "no key is dropped"
    )
    at = [row for row in made if row["queries"] == 1]
    return (
        f"At n = {made[0]['n']} one query keeps "
        + ", ".join(f"{row['kept']:.3f} of the keys (sigma = {row['sigma']:g})" for row in at)
        + f"; on {real[0]['n']} real keys layers keep from {min(r['kept'] for r in real):.3f} to "
        f"{max(r['kept'] for r in real):.3f}. {wrong} of {judged} outputs are further from float64 "
        f"than their bound says; {far}. The mean error of a case is at most "
        f"{max(row['error'] for row in rows):.2g} of the mean norm of a value."
    )


def _longest(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of Gaussian keys at their greatest n, and those of real keys at theirs."""
    made = [row for row in rows if row["kind"] != REAL]
    real = [row for row in rows if row["kind"] == REAL]
    n, n_real = (max(row["n"] for row in part) for part in (made, real))
    return [row for row in made if row["n"] == n], [row for row in real if row["n"] == n_real]


def _timed(rows: list[dict[str, Any]], times: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with their times."""
    return [{**row, **time} for row, time in zip(rows, times, strict=True)]


def _fast(rows: list[dict[str, Any]], peer: str) -> str:
    """How long it takes, as ratios."""
    made, real = _longest(rows)

    def of(group: bool) -> str:
        return ", ".join(
            f"{row[peer]:.2f} (sigma = {row['sigma']:g})"
            for row in made
            if (row["queries"] > 1) == group
        )

    spent = [row[peer] for row in real if row["queries"] == 1]
    without = (
        "torch is not installed here, so that times stand beside plain attention of this library "
        "(eps = 0) only. "
        if peer == PLAIN
        else ""
    )
    return (
        f"{without}In time, against {peer}, one query takes {of(False)} there, a group of {GROUP} "
        f"takes {of(True)}; on {real[0]['n']} real keys one query of every head takes from "
        f"{min(spent):.2f} to {max(spent):.2f} by layer (medians of interleaved repetitions, one "
        "thread, indices built beforehand; machines differ, and so do these ratios)."
    )


COLOURS = dict(zip(SIGMAS, ("#bdd7e7", "#6baed6", "#3182bd", "#08519c"), strict=True))


def plots(data: dict[str, Any]) -> list[str]:
    """Time, then error, each over n and over sharpness."""
    rows, peer = _timed(data["rows"], data["timing"]["rows"]), data["timing"]["peer"]
    time, axes = _panels(rows, {peer: "o-"}, groups=True)
    axes[0].set_ylabel(f"time / time of {peer}")
    spent = [row[peer] for row in rows]
    ticks = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
    plain_ticks(axes[0].yaxis, [x for x in ticks if min(spent) / 1.3 < x < 1.3 * max(spent)])
    for axis in axes:
        axis.axhline(1, color="black", lw=0.8)
    error, axes = _panels(rows, {"error": "o-", "bound": "^--"}, groups=False)
    axes[0].set_ylabel("error / mean norm of a value")
    error.suptitle("error of the output: measured (circles) and proven bound (triangles)")
    return [svg(time), svg(error)]


def _panels(rows: list[dict[str, Any]], fields: dict[str, str], groups: bool) -> tuple[Any, Any]:
    """One query over n, and at the greatest n over sharpness, there with groups if asked for."""
    figure, axes = panels(1, 2, figsize=(9.5, 4.6), sharey=True)
    one = [row for row in rows if row["kind"] != REAL and row["queries"] == 1]
    alone = [row for row in rows if row["kind"] == REAL and row["queries"] == 1]
    longest, longest_real = _longest(rows)
    n, n_real = longest[0]["n"], longest_real[0]["n"]
    lengths = sorted({row["n"] for row in alone})
    for field, style in fields.items():
        # A colour is named once.
        name = (lambda text: text) if field == next(iter(fields)) else (lambda _: None)
        for sigma, colour in COLOURS.items():
            some = [row for row in one if row["sigma"] == sigma]
            axes[0].plot([r["n"] for r in some], [r[field] for r in some], style, ms=4,
                         color=colour, label=name(f"sigma = {sigma:g}"))  # fmt: skip
        means = [mean([r[field] for r in alone if r["n"] == n]) for n in lengths]
        label = name("real, mean of layers")
        axes[0].plot(lengths, means, style, ms=4, color="#d95f02", label=label)
        for many, who, colour in ((False, "one query", "#1b9e77"), (True, "group of 4", "#7570b3")):
            if groups or not many:
                some = [row for row in longest if (row["queries"] > 1) == many]
                axes[1].plot([r["spread"] for r in some], [r[field] for r in some], style, ms=4,
                             color=colour, label=name(f"{who}, n = {n}"))  # fmt: skip
        some = [row for row in longest_real if row["queries"] == 1]
        label = name(f"real, each layer, n = {n_real}")
        axes[1].plot([r["spread"] for r in some], [r[field] for r in some], style[0], ms=5,
                     color="#d95f02", label=label)  # fmt: skip
    axes[0].set(title="one query", xlabel="n", xscale="log", yscale="log")
    axes[1].set(title="at the greatest n", xlabel="standard deviation of a row of scores")
    shown = sorted({row["n"] for row in rows})
    plain_ticks(axes[0].xaxis, [n for i, n in enumerate(shown) if i in _spaced(shown)])
    left, right = (axis.get_legend_handles_labels() for axis in axes)
    legend_below(figure, left[0] + right[0], left[1] + right[1], ncols=4)
    return figure, axes


def _spaced(lengths: list[int]) -> set[int]:
    """Which of ascending lengths have room for their number on a logarithmic axis."""
    chosen = [0]
    for i, n in enumerate(lengths):
        if n >= 4 * lengths[chosen[-1]]:
            chosen.append(i)
    return set(chosen)


def tables(data: dict[str, Any]) -> list[Table]:
    """A row per kind of scores, length and number of queries."""
    heads = (
        "scores", "n", "queries", "standard deviation", "kept", "scored", "dropped mass, at most",
        "error", "bound", "error of SDPA", "beyond bound", "time / SDPA", "time / eps = 0",
    )  # fmt: skip

    def cell(value: float | None, form: str) -> str:
        return "no torch" if value is None else format(value, form)

    rows = [
        (
            f"{REAL}, layer {r['layer']}" if r["kind"] == REAL else r["kind"],
            str(r["n"]), str(r["queries"]), f"{r['spread']:.2f}", f"{r['kept']:.3f}",
            f"{r['scored']:.3f}", f"{r['tail']:.4f}", f"{r['error']:.2e}", f"{r['bound']:.2e}",
            cell(r["plain"], ".1e"), f"{r['wrong']} of {r['rows']}", cell(r[SDPA], ".2f"),
            cell(r[PLAIN], ".2f"),
        )
        for r in _timed(data["rows"], data["timing"]["rows"])
    ]  # fmt: skip
    return [Table(heads, rows)]
