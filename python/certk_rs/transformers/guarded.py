"""Pruned layers with a guard: losses of each call are proven, and dropped keys fetched back.

A call's own attention is over the kept keys and what was appended. Its guard then bounds the share
of the dropped keys, which is what the call lost. Where that is more than the cache's budget, the
keys that matter are read from where they are, scored exactly, and the two parts of the softmax are
put together by what their keys weigh.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal, NoReturn, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from .. import _native
from ..errors import CertkError
from ..guard import Guard, Judged
from ..results import AttentionResult
from ..sparse_attention import attention as attention_of
from .masks import Visibility
from .settings import Budget

OnBreach = Literal["recall", "report", "raise"]
# Calls that a cache remembers: of longer texts the latest.
_CALLS = 65_536
# A share that nothing exceeds but what is not known at all.
_ALL_BUT = 1 - 2.0**-53
# How often keys are named anew where an output is not yet within its budget.
_TRIES = 3


class Rows(Protocol):
    """A source of dropped keys and values."""

    def fetch(
        self, layer: int, head: int, positions: NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (k, d) and values (k, d_v) of a kv head, in the order of their positions."""


@dataclass(frozen=True)
class Manner:
    """The answer of a cache to losses; `eps` is the budget of kv heads without one of their own.

    With `out_tol` a loss is what it does to the output, and budgets of mass play no part.
    """

    eps: float
    on_breach: OnBreach = "report"
    promote: bool = False
    most_promoted: int | None = None
    out_tol: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.eps < 1:
            raise CertkError(f"eps is {self.eps!r}; pass a number with 0 <= eps < 1")
        tol: Any = self.out_tol
        real = isinstance(tol, Real) and not isinstance(tol, bool)
        if tol is not None and not (real and 0 <= tol < math.inf):
            raise CertkError(f"out_tol is {tol!r}; pass a finite number >= 0, or None")
        if self.on_breach not in get_args(OnBreach):
            raise CertkError(f"on_breach is {self.on_breach!r}; pass one of {get_args(OnBreach)}")
        most = self.most_promoted
        if most is not None and (type(most) is not int or most < 0):
            raise CertkError(f"most_promoted is {most!r}; pass a count of keys, or None")


@dataclass(frozen=True, eq=False)
class LostCall:
    """Proven losses of one call of one layer, for one sequence; arrays (heads, m)."""

    layer: int
    lost: NDArray[np.float64]
    """The share of the softmax that the kept keys alone would have lost, at most."""
    left: NDArray[np.float64]
    """The most that the call has lost in the end: less where keys were fetched back."""
    moved: NDArray[np.float64]
    """The furthest that moves a query's output, in the Euclidean norm over d_v. Rounding is not in
    it, but in the bounds of a `Recorder`."""
    recalled: NDArray[np.int64]
    """Keys that were fetched for it, (kv_heads,)."""


class Losses:
    """Losses of the calls of a cache, and its answer to them."""

    def __init__(self, manner: Manner, rows: Rows | None) -> None:
        self.manner = manner
        self.rows = rows
        self.calls: deque[LostCall] = deque(maxlen=_CALLS)
        if manner.on_breach == "recall" and rows is None:
            raise CertkError(
                'on_breach is "recall", but nothing says where the dropped keys are: pass source='
            )


class GuardedLayer:
    """The guard of one layer, and the dropped keys that have come back for good."""

    def __init__(
        self,
        layer: int,
        guard: Guard,
        losses: Losses,
        eps: Sequence[float] | None = None,
    ) -> None:
        """`eps` are the budgets of the kv heads, None for that of the cache."""
        self.layer = layer
        self._eps = np.full(guard.kv_heads, losses.manner.eps) if eps is None else np.asarray(eps)
        self.guard = guard
        self.losses = losses
        none = np.empty(0, np.int64)
        self._there: list[NDArray[np.int64]] = [none] * guard.kv_heads
        """Positions that are back for good, of each kv head, ascending."""
        self._since: list[NDArray[np.int64]] = [none] * guard.kv_heads
        """The call that each of these was fetched in."""
        self._held: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * guard.kv_heads
        self._calls = 0

    @property
    def promoted(self) -> tuple[int, ...]:
        """Counts of dropped keys of each kv head that are back for good."""
        return tuple(map(len, self._there))

    @property
    def nbytes(self) -> int:
        """Bytes of the guard, and of the keys and values that are back for good."""
        back = [each for pair in self._held if pair is not None for each in pair]
        return self.guard.nbytes + sum(each.nbytes for each in back)

    def answer(
        self,
        query: torch.Tensor,
        result: AttentionResult,
        *,
        scale: float | None,
        threads: int | None,
    ) -> AttentionResult:
        """Answer a call: queries (batch, heads, m, d) and its attention over what is here."""
        self._calls += 1
        parts = [
            self._one(query[b], _Part.of(result, b), scale, threads) for b in range(len(query))
        ]
        return AttentionResult._of(_Answers(parts), out=torch.stack([part.out for part in parts]))

    def promise(self, budget: Budget) -> Budget:
        """Return the budget of a call in all, where `budget` is that of the keys that are here."""
        tol = self.losses.manner.out_tol
        if tol is not None:
            return replace(budget, eps=None, out_tol=float(tol))
        return budget if budget.eps is None else replace(budget, eps=float(self._eps.max()))

    def budgets(self, heads: int) -> NDArray[np.float64]:
        """Return the budget of mass of each of so many query heads."""
        return np.repeat(self._eps, heads // len(self._eps))

    def whole(self, rows: Visibility) -> Visibility:
        """Return the counts of keys that rows see, dropped keys and all."""
        size = rows.shape[1] // self.guard.kv_heads
        more = np.repeat([len(each) for each in self.guard.positions], size)[None, :, None]
        counts = rows.counts + more
        return Visibility(rows.shape, np.zeros_like(counts), counts, None)

    def _one(
        self, query: torch.Tensor, here: _Part, scale: float | None, threads: int | None
    ) -> _Part:
        manner = self.losses.manner
        how: dict[str, Any] = {"scale": scale, "threads": threads}
        kept = here
        if any(map(len, self._there)):
            here = here.joined(self._attend(query, self._there, self._held, how))
        first = here
        # What the call itself has dropped among the keys that are here counts, too.
        eps = self.budgets(len(query))[:, None]
        needs = self._most(here, eps)
        judged = self._judge(query, here, needs, how)
        recalled = np.zeros(self.guard.kv_heads, np.int64)
        final = here.without(judged.lost, self.guard)
        lost, left = final.tail, judged.lost
        if manner.on_breach == "raise":
            over = judged.lost > needs if manner.out_tol is None else self._over(final)
            if over.any():
                self._refuse(final, over)
        for more in reversed(range(_TRIES) if manner.on_breach == "recall" else ()):
            if any(map(len, judged.back)):
                fetched = self._fetch(judged.back)
                recalled = np.array([len(back) for back in judged.back], np.int64)
                back, held = self._with(judged.back, fetched)
                here = kept.joined(self._attend(query, back, held, how))
                final, left = here.without(judged.left, self.guard), judged.left
            over = self._over(final)
            if not over.any():
                if manner.promote and recalled.any():
                    self._promote(judged.back, back, held)
                break
            if not more:
                self._refuse(final, over)
            # Putting parts together rounds, which was not known before. At last all must come.
            less = self._most(here, eps) if more > 1 else np.zeros(needs.shape)
            needs = np.where(over, np.minimum(needs, less), needs)
            judged = self._judge(query, first, needs, how)
        moved = self.guard.moved(final.out, left)
        self.losses.calls.append(LostCall(self.layer, lost, final.tail, moved, recalled))
        return final

    def _judge(
        self, query: torch.Tensor, here: _Part, most: NDArray[np.float64], how: dict[str, Any]
    ) -> Judged:
        # Where nothing is to come back, nothing needs to be named.
        if self.losses.manner.on_breach != "recall":
            most = np.full(most.shape, _ALL_BUT)
        return self.guard.judge(query, here.ends, most, there=self._there, **how)

    def _most(self, here: _Part, eps: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the share of the softmax that dropped keys may have, of each query."""
        tol = self.losses.manner.out_tol
        if tol is not None:
            # Sums of bounds round, too.
            return self.guard.spare(here.out, tol * (1 - 2.0**-38) - here.error())
        most = (eps - here.tail) * (1 - 2.0**-40)
        if (most < 0).any():
            head, row = np.unravel_index(most.argmin(), most.shape)
            raise CertkError(
                f"layer {self.layer}, head {head}: attention over the kept keys may lose "
                f"{float(here.tail[head, row]):g} itself, and eps of the cache is "
                f"{float(eps[head, 0]):g}: call certk_rs.transformers.use with a smaller eps, such "
                "as 0"
            )
        return most

    def _over(self, part: _Part) -> NDArray[np.bool_]:
        """Mark queries whose outputs are not proven to be within `out_tol`, if there is one."""
        tol = self.losses.manner.out_tol
        if tol is None:
            return np.zeros(part.tail.shape, np.bool_)
        return ~(part.error() <= tol)  # type: ignore[no-any-return]

    def _refuse(self, part: _Part, which: NDArray[np.bool_]) -> NoReturn:
        head, row = np.argwhere(which)[0]
        tol = self.losses.manner.out_tol
        if tol is None:
            group = head // (which.shape[0] // self.guard.kv_heads)
            raise CertkError(
                f"layer {self.layer}, head {head}: a query may lose {part.tail[head, row]:.6g} of "
                f"its mass to dropped keys, more than eps = {self._eps[group]:g}: pass "
                "on_breach='recall', or prune with a smaller eps"
            )
        remedy = "pass on_breach='recall', or prune with a smaller eps"
        if self.losses.manner.on_breach == "recall":
            remedy = "that is rounding, so pass a larger out_tol or run the model in a wider dtype"
        raise CertkError(
            f"layer {self.layer}, head {head}: an output may be off by "
            f"{part.error()[head, row]:.6g}, more than out_tol = {tol:g}: {remedy}"
        )

    def _fetch(
        self, back: Sequence[NDArray[np.int64]]
    ) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
        rows = self.losses.rows
        assert rows is not None
        return [
            rows.fetch(self.layer, head, positions) if len(positions) else None
            for head, positions in enumerate(back)
        ]

    def _with(
        self,
        back: Sequence[NDArray[np.int64]],
        fetched: Sequence[tuple[torch.Tensor, torch.Tensor] | None],
    ) -> tuple[list[NDArray[np.int64]], list[tuple[torch.Tensor, torch.Tensor] | None]]:
        """Join rows that are back for good with those just fetched."""
        places: list[NDArray[np.int64]] = []
        tensors: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        for head, positions in enumerate(back):
            held, new = self._held[head], fetched[head]
            pairs = [pair for pair in (held, new) if pair is not None]
            places.append(np.concatenate([self._there[head], positions]))
            if not pairs:
                tensors.append(None)
                continue
            order = torch.from_numpy(np.argsort(places[-1], kind="stable"))
            places[-1] = places[-1][order.numpy()]
            keys, values = (torch.cat(parts)[order] for parts in zip(*pairs, strict=True))
            tensors.append((keys, values))
        return places, tensors

    def _promote(
        self,
        new: Sequence[NDArray[np.int64]],
        places: list[NDArray[np.int64]],
        held: list[tuple[torch.Tensor, torch.Tensor] | None],
    ) -> None:
        """Keep what was fetched; beyond the limit, what was fetched the longest ago goes."""
        most = self.losses.manner.most_promoted
        for head, every in enumerate(places):
            since = np.full(len(every), self._calls, np.int64)
            old = ~np.isin(every, new[head])
            since[old] = self._since[head]
            pair = held[head]
            if most is not None and len(every) > most and pair is not None:
                stay = np.sort(np.argsort(since, kind="stable")[len(every) - most :])
                every, since = every[stay], since[stay]
                chosen = torch.from_numpy(stay)
                pair = (pair[0][chosen], pair[1][chosen]) if most else None
            self._there[head], self._since[head], self._held[head] = every, since, pair

    def _attend(
        self,
        query: torch.Tensor,
        places: Sequence[NDArray[np.int64]],
        held: Sequence[tuple[torch.Tensor, torch.Tensor] | None],
        how: dict[str, Any],
    ) -> _Part:
        """Attention of all queries over the keys that have come back, each kv head its own."""
        first = next(pair for pair in held if pair is not None)
        counts = np.array([len(each) for each in places], np.int64)
        shape = (len(held), int(counts.max()))
        keys, values = (each.new_zeros((*shape, each.shape[-1])) for each in first)
        for head, pair in enumerate(held):
            if pair is not None:
                keys[head, : counts[head]], values[head, : counts[head]] = pair
        size = query.shape[0] // len(held)
        lengths = np.broadcast_to(np.repeat(counts, size)[:, None], query.shape[:2])
        result = attention_of(query, keys, values, 0.0, lengths=lengths, **how)
        return _Part.of(result, None)


class _Part:
    """Attention over a part of the keys: its output, what it lost, what its keys weigh."""

    def __init__(
        self,
        out: torch.Tensor,
        tail: NDArray[np.float64],
        ends: tuple[NDArray[np.float64], NDArray[np.float64]],
        counts: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]],
        error: Any,
    ) -> None:
        self.out, self.tail, self.ends, self.counts = out, tail, ends, counts
        self.error = error
        """Computes a bound on the error of `out`; it takes a pass over values."""

    @classmethod
    def of(cls, result: AttentionResult, b: int | None) -> _Part:
        """Take one sequence of a result, or all of one that has no such axis."""
        at: Any = ... if b is None else b
        return cls(
            result.out[at],
            result.tail_mass_upper[at],
            (result.log_mass_lower[at], result.log_mass_upper[at]),
            (result.k[at], result.scored[at], result.rung[at]),
            lambda: result.error_bound[at],
        )

    def joined(self, other: _Part) -> _Part:
        """Return the softmax over both parts' keys."""
        with _native.DefaultFloats(), np.errstate(over="ignore", invalid="ignore"):
            # Beside what this part keeps there is what it dropped of its own keys.
            own = self.ends[0], self.ends[1] - np.log1p(-self.tail)
            more = other.ends
            middles = [(low + high) / 2 for low, high in (own, more)]
            unsure = sum((high - low) / 2 for low, high in (own, more)) + 2.0**-40
            unsure = unsure + sum(np.abs(middle) for middle in middles) * 2.0**-50
            gap = middles[0] - middles[1]
            # An empty part has no weight, and what it puts out does not matter.
            gap = np.where(more[1] == -np.inf, np.inf, np.where(own[1] == -np.inf, -np.inf, gap))
            # Infinite for another reason, it says nothing.
            empty = np.minimum(more[1], own[1]) == -np.inf
            if not (np.isfinite(gap) | empty).all():
                raise CertkError(
                    "scores of a pruned cache are so large that float64 cannot tell them apart: "
                    "its parts cannot be put together"
                )
            share = 1 / (1 + np.exp(-gap))
            unsure = np.where(np.isfinite(gap), unsure, 0.0)
            outs = [part.out.double().numpy() for part in (self, other)]
            exact = share[..., None] * outs[0] + (1 - share[..., None]) * outs[1]
            stored = torch.from_numpy(exact).to(self.out.dtype)
            rounding = np.sqrt(np.square(stored.double().numpy() - exact).sum(axis=-1))
            apart = np.sqrt(np.square(outs[0] - outs[1]).sum(axis=-1))
            size = np.sqrt(np.square(outs[0]).sum(axis=-1) + np.square(outs[1]).sum(axis=-1))
            rounding = (rounding + size * 2.0**-48) * (1 + 2.0**-40)

            def error() -> NDArray[np.float64]:
                with _native.DefaultFloats():
                    both = (
                        np.where(own[1] > -np.inf, self.error(), 0),
                        np.where(more[1] > -np.inf, other.error(), 0),
                    )
                    # Log-odds that are off by x move a share by x / 4 at most.
                    moved = np.minimum(unsure / 4, 1) * (apart + both[0] + both[1])
                    found: NDArray[np.float64] = np.maximum(*both) + moved + rounding
                    return found * (1 + 2.0**-40)

            both_low = np.logaddexp(self.ends[0], more[0])
            both_high = np.logaddexp(self.ends[1], more[1])
            sizes = [np.abs(np.where(np.isfinite(end), end, 0)) for end in (both_low, both_high)]
            slack = 2.0**-45 * (1 + np.maximum(*sizes))
        counts = (
            self.counts[0] + other.counts[0],
            self.counts[1] + other.counts[1],
            np.maximum(self.counts[2], other.counts[2]),
        )
        # The share of what this part dropped is less beside more keys.
        return _Part(stored, self.tail, (both_low - slack, both_high + slack), counts, error)

    def without(self, lost: NDArray[np.float64], guard: Guard) -> _Part:
        """Return the same as an answer over all keys; absent ones have at most these shares."""
        own = self.error

        def error() -> NDArray[np.float64]:
            return (own() + guard.moved(self.out, lost)) * (1 + 2.0**-40)  # type: ignore[no-any-return]

        tail = np.minimum((self.tail + lost) * (1 + 2.0**-51), 1.0)
        return _Part(self.out, tail, self.ends, self.counts, error)


class _Answers:
    """The lazy fields of an `AttentionResult`."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts = parts

    def __getattr__(self, name: str) -> Any:
        take = {
            "tail_mass_upper": lambda part: part.tail,
            "error_bound": lambda part: part.error(),
            "k": lambda part: part.counts[0],
            "scored": lambda part: part.counts[1],
            "rung": lambda part: part.counts[2],
            "log_mass_lower": lambda part: part.ends[0],
            "log_mass_upper": lambda part: part.ends[1],
        }.get(name)
        if take is None:
            raise AttributeError(name)
        return np.stack([take(part) for part in self._parts])
