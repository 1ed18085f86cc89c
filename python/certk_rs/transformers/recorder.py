"""Certificates of each layer while a model runs."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context

import numpy as np
from numpy.typing import NDArray
from torch import nn

from .. import _native
from ..errors import CertkError
from ..results import AttentionResult
from .masks import Visibility
from .settings import Budget

_OPEN: ContextVar[tuple[Recorder, ...]] = ContextVar("certk_recorders", default=())


@dataclass(frozen=True, eq=False)
class Call:
    """One call of one layer; the arrays have shape (batch, heads, m)."""

    layer: int
    budget: Budget
    tail_mass_upper: NDArray[np.float64]
    """Proven upper end of the dropped mass."""
    k: NDArray[np.int64]
    """Keys that went into each average."""
    scored: NDArray[np.int64]
    """Keys that were scored exactly."""
    n: NDArray[np.int64]
    """Keys that each row sees."""
    error_bound: NDArray[np.float64] | None
    """Bound on the Euclidean distance of the output from real attention; None if not asked for."""


@dataclass(frozen=True)
class LayerCertificate:
    """A certificate of all calls of one layer; rows that see no key are not counted."""

    layer: int
    name: str
    """Class of the module that asked."""
    calls: int
    rows: int
    budget: float
    """The largest eps, or out_tol, of its calls."""
    tail_mass_upper: float
    """The most that any row has lost, or was off by where its weights came from codes, proven."""
    kept: float
    """Mean of k/n over rows."""
    scored: float
    """Mean over rows of the share of keys that were scored exactly."""
    error_bound: float | None
    """The largest bound on the error of a row's output."""
    holds: bool
    """True if every row is within its budget."""


class Recorder:
    """Context manager that keeps what every certified attention call inside has proven.

    At its end `layers` is a certificate per layer, and `str(recorder)` a table of them, with a
    remark where nothing ran or nothing was dropped. Like `budget` it sees the calls of this thread.
    """

    def __init__(self, *, error_bounds: bool = True, rows: bool = True) -> None:
        """Make one; it may be entered once.

        Args:
            error_bounds: Compute the bound on each output's error, which takes a pass over the
                values in every call.
            rows: Keep the figures of every row in `calls`, about 32 bytes a row; without, only
                the summary of each layer.
        """
        self.calls: list[Call] = []
        """Every call in its order, if `rows`."""
        self._error_bounds = error_bounds
        self._rows = rows
        self._sums: dict[int, _Sum] = {}
        self._modules: dict[nn.Module, int] = {}
        self._entered = self._over = False

    def __enter__(self) -> Recorder:
        if self._entered:
            raise CertkError("this Recorder has been entered before; make a new one")
        self._entered = True
        _OPEN.set((*_OPEN.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        # Not by a token: contexts in generators end in any order, and even in another task.
        self._over = True
        _OPEN.set(tuple(each for each in _OPEN.get() if not each._over))
        # Models must not live on because someone kept the figures.
        self._modules.clear()

    @property
    def layers(self) -> list[LayerCertificate]:
        """A certificate per layer, by its number."""
        return [self._sums[layer].certificate(layer) for layer in sorted(self._sums)]

    def table(self) -> str:
        """Return the certificates as a table of text."""
        heads = (
            "layer",
            "calls",
            "rows",
            "kept k/n",
            "exact",
            "tail mass <=",
            "budget",
            "error <=",
            "holds",
        )
        body = [
            (
                str(c.layer),
                str(c.calls),
                str(c.rows),
                f"{c.kept:.4f}",
                f"{c.scored:.4f}",
                _up(c.tail_mass_upper),
                f"{c.budget:g}",
                "-" if c.error_bound is None else _up(c.error_bound),
                "yes" if c.holds else "NO",
            )
            for c in self.layers
        ]
        widths = [max(map(len, column)) for column in zip(heads, *body, strict=True)]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
            for line in (heads, *body)
        )

    def __str__(self) -> str:
        """Return the table, and a remark below it where nothing ran or nothing was dropped."""
        return "\n".join([self.table(), *self._remarks()])

    def _remarks(self) -> list[str]:
        sums = self._sums.values()
        if not sums:
            return [
                "No certified attention ran inside: switch the model over by "
                "certk_rs.transformers.use(model, eps=...), and run it in this thread."
            ]
        if all(each.spared and each.kept == each.scored == each.rows for each in sums):
            return [
                "Nothing was dropped: in prefill, in encoders and without an index all keys are "
                "computed where that is faster. To drop what the budget allows all the same: "
                "use(model, ..., even_if_slower=True)."
            ]
        return []

    def _add(self, module: nn.Module, call: _Found) -> None:
        layer = self._number(module)
        # A host that flushes subnormal numbers would find none larger than 0.
        with _native.DefaultFloats():
            self._sums.setdefault(layer, _Sum(type(module).__name__)).add(call, self._error_bounds)
        if self._rows:
            bound = call.result.error_bound if self._error_bounds else None
            r = call.result
            told = (r.tail_mass_upper, r.k, r.scored, call.n, bound)
            self.calls.append(Call(layer, call.budget, *told))

    def _number(self, module: nn.Module) -> int:
        """Return the layer's own number if it has one that is free, else the next."""
        if module not in self._modules:
            taken = set(self._modules.values())
            own = getattr(module, "layer_idx", None)
            free = next(i for i in range(len(taken) + 1) if i not in taken)
            self._modules[module] = own if isinstance(own, int) and own not in taken else free
        return self._modules[module]


@dataclass(frozen=True)
class _Found:
    result: AttentionResult
    n: NDArray[np.int64]
    budget: Budget


class _Sum:
    """All calls of a layer so far."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = self.rows = 0
        self.budget = self.upper = self.kept = self.scored = 0.0
        self.bound: float | None = None
        self.holds = True
        self.spared = False
        """True if a call might have dropped keys but for the time it takes."""

    def add(self, call: _Found, with_bounds: bool) -> None:
        some = call.n > 0
        upper = call.result.tail_mass_upper[some]
        self.calls += 1
        self.rows += int(np.count_nonzero(some))
        self.upper = max(self.upper, float(upper.max(initial=0.0)))
        self.kept += float((call.result.k[some] / call.n[some]).sum())
        self.scored += float((call.result.scored[some] / call.n[some]).sum())
        limit = call.budget.out_tol if call.budget.eps is None else call.budget.eps
        self.spared |= bool(limit) and not call.budget.even_if_slower
        assert limit is not None
        self.budget = max(self.budget, float(limit))
        within = upper
        if with_bounds or call.budget.eps is None:
            bounds = call.result.error_bound[some]
            self.bound = max(self.bound or 0.0, float(bounds.max(initial=0.0)))
            within = upper if call.budget.eps is not None else bounds
        self.holds &= bool((within <= limit).all())

    def certificate(self, layer: int) -> LayerCertificate:
        rows = max(self.rows, 1)
        return LayerCertificate(
            layer,
            self.name,
            self.calls,
            self.rows,
            self.budget,
            self.upper,
            self.kept / rows,
            self.scored / rows,
            self.bound,
            self.holds,
        )


def record(module: nn.Module, result: AttentionResult, rows: Visibility, budget: Budget) -> None:
    """Tell every open recorder of a call, before the values it was about can change."""
    if recorders := [each for each in _OPEN.get() if not each._over]:
        call = _Found(result, rows.counts, budget)
        for each in recorders:
            each._add(module, call)


def _up(value: float) -> str:
    """Three digits, rounded up: what is shown is still a bound."""
    with _native.DefaultFloats():
        return f"{Context(prec=3, rounding=ROUND_CEILING).create_decimal(value).normalize():g}"
