"""Certificates of each layer while a model runs."""

from __future__ import annotations

import os
from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context
from math import inf
from pathlib import Path
from threading import Lock
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray
from torch import nn

from .. import _native
from .._display.by_call import draw, new_axes
from .._display.shown import Shown
from .._files.new_file import written
from ..errors import CertkError
from ..results import AttentionResult
from .history import Found, History
from .masks import Visibility
from .settings import Budget

_OPEN: ContextVar[tuple[Recorder, ...]] = ContextVar("certk_recorders", default=())
# Name of each number for Prometheus, field of `LayerCertificate`, and meaning. Totals are counters.
_METRICS = (
    ("calls_total", "calls", "Certified attention calls."),
    ("calls_unproven_total", "unproven", "Calls with a row not proven to be within its budget."),
    ("rows_total", "rows", "Rows, each a query of a head, that see a key."),
    ("tail_mass_upper", "tail_mass_upper", "Proven bound on the softmax mass that a row lost."),
    ("error_bound", "error_bound", "Proven bound on the error of a row's output."),
    ("kept_share", "kept", "Mean share of keys kept, over rows."),
    ("scored_share", "scored", "Mean share of keys scored exactly, over rows."),
)


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


class Recorder(Shown):
    """Context manager that keeps what every certified attention call inside has proven.

    At its end `layers` is a certificate per layer, and `str(recorder)` a table of them, with a
    remark where nothing ran or nothing was dropped. `records` follows the layers call by call, and
    so do `to_jsonl`, `plot` and `to_pandas`, whose frame has a line per record. `to_prometheus`
    returns `layers` for a monitor. Like `budget` it sees the calls of this thread, and of threads
    in a copy of its context: those of `asyncio.to_thread`, and of free-threaded Python all that are
    started inside.
    """

    def __init__(self, *, error_bounds: bool = True, rows: bool = True) -> None:
        """Make one; it may be entered once.

        Args:
            error_bounds: Compute the bound on each output's error, which takes a pass over the
                values in every call.
            rows: Keep the figures of every row in `calls`, about 32 bytes a row; without, only
                the record of each call, 71 bytes.
        """
        self.calls: list[Call] = []
        """Every call in its order, if `rows`."""
        self._error_bounds = error_bounds
        self._rows = rows
        self._history = History()
        self._modules: dict[nn.Module, int] = {}
        # One call at a time: its number, its layer's and its place in `calls` are of one moment.
        self._adding = Lock()
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
        with _native.DefaultFloats():
            told = self._history.packed()
            return [self._certificate(told[told["layer"] == i]) for i in np.unique(told["layer"])]

    def _certificate(self, told: NDArray[Any]) -> LayerCertificate:
        rows, bounds = told["rows"], told["error_bound"]
        all_rows = max(int(rows.sum()), 1)
        return LayerCertificate(
            int(told["layer"][0]),
            self._history.names[told["name"][0]],
            len(told),
            int(rows.sum()),
            float(told["budget"].max()),
            float(told["tail_mass_upper"].max()),
            float(np.nansum(told["kept"] * rows)) / all_rows,
            float(np.nansum(told["scored"] * rows)) / all_rows,
            None if np.isnan(bounds).all() else float(np.nanmax(bounds)),
            bool(told["holds"].all()),
        )

    def records(self) -> list[dict[str, Any]]:
        """Return a record per call and layer, in the order of calls.

        `call` counts the calls of the layer from 0. `rows` that see no key are not counted: `n` is
        the most keys that one sees, `kept` and `scored` are means of k/n and of the share that was
        scored exactly (None without rows), `tail_mass_upper` and `error_bound` (None if not asked
        for, inf if nothing finite is proven) the largest of any. `kind` is "eps" or "out_tol", of
        which `budget` is the largest. `holds` is True if every row is within its own.
        """
        return list(self._history.records())

    def to_jsonl(self, to: str | os.PathLike[str] | TextIO, *, replace: bool = False) -> None:
        """Write the records as lines of JSON, to a stream or as a new file, which is whole or not.

        Numbers are read back as they are, so that bounds are still bounds. An `error_bound` that
        was not asked for is left out, and null if it is infinite.

        Raises:
            CertkError: The file is there, and `replace` is not set.
            OSError: It cannot be written.
        """
        if not isinstance(to, str | os.PathLike):
            to.writelines(self._history.lines())
            return
        with written(to, replace=replace) as stream:
            stream.writelines(line.encode() for line in self._history.lines())

    def to_prometheus(self) -> str:
        """Return the certificates of all layers in the text format of Prometheus.

        Counters grow with the recorder, and may be read while it is open. Bounds are written in
        full, so that they are still bounds.
        """
        told = self._history.packed()
        unproven = Counter(told["layer"][~told["holds"]].tolist())
        layers = [vars(each) | {"unproven": unproven[each.layer]} for each in self.layers]
        lines = []
        for name, field, about in _METRICS:
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP certk_{name} {about}", f"# TYPE certk_{name} {kind}"]
            for each in layers:
                if each[field] is not None:
                    layer, value = each["layer"], _exactly(each[field])
                    lines.append(f'certk_{name}{{layer="{layer}"}} {value}')
        return "\n".join([*lines, ""])

    def plot(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        axes: Any = None,
        replace: bool = False,
    ) -> Any:
        """Draw tail mass and error bound of each layer over its calls, and return the two axes.

        Args:
            path: A new file, in the format that its name ends in. Without, the figure is one of
                pyplot, which notebooks and `pyplot.show()` show.
            axes: Two axes of matplotlib to draw into.
            replace: Replace the file if there is one.

        Raises:
            CertkError: Matplotlib is not installed, the file is there, or is of no known format.
            OSError: It cannot be written.
        """
        axes = draw(self._history.columns(), new_axes(path is None) if axes is None else axes)
        if path is not None:
            canvas, kind = axes[0].figure.canvas, Path(path).suffix[1:].lower()
            if kind not in (kinds := canvas.get_supported_filetypes()):
                raise CertkError(
                    f"path is {os.fspath(path)!r}: give a name that ends in .{', .'.join(kinds)}"
                )
            with written(path, replace=replace) as stream:
                canvas.print_figure(stream, format=kind, dpi=150)
        return axes

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

    def summary(self) -> str:
        """Return the same as `str(recorder)`."""
        return str(self)

    def _columns(self) -> dict[str, NDArray[Any]]:
        return self._history.columns()

    def _remarks(self) -> list[str]:
        told = self._history.packed()
        if not told.size:
            return [
                "No certified attention ran inside: switch the model over by "
                "certk_rs.transformers.use(model, eps=...), and run it in this thread."
            ]
        if told["spared"].any() and not ((told["kept"] < 1) | (told["scored"] < 1)).any():
            return [
                "Nothing was dropped: in prefill, in encoders and without an index all keys are "
                "computed where that is faster. To drop what the budget allows all the same: "
                "use(model, ..., even_if_slower=True)."
            ]
        return []

    def _add(self, module: nn.Module, call: Found) -> None:
        r = call.result
        # Computed when it is first read, which takes longer than all else here.
        bound = r.error_bound if self._error_bounds else None
        # A host that flushes subnormal numbers would find none larger than 0.
        with self._adding, _native.DefaultFloats():
            layer = self._number(module)
            self._history.add(layer, type(module).__name__, call, self._error_bounds)
            if self._rows:
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


def record(
    module: nn.Module,
    result: AttentionResult,
    rows: Visibility,
    budget: Budget,
    eps: NDArray[np.float64] | None = None,
) -> None:
    """Tell every open recorder of a call, before the values it was about can change.

    `eps` (heads,) are budgets of mass where each head has its own, of which `budget` has the most.
    """
    if recorders := [each for each in _OPEN.get() if not each._over]:
        call = Found(result, rows.counts, budget, eps)
        for each in recorders:
            each._add(module, call)


def _exactly(value: float) -> str:
    """Return a number as Prometheus reads it: all digits, or +Inf."""
    with _native.DefaultFloats():
        return "+Inf" if value == inf else repr(value)


def _up(value: float) -> str:
    """Three digits, rounded up: what is shown is still a bound."""
    with _native.DefaultFloats():
        return f"{Context(prec=3, rounding=ROUND_CEILING).create_decimal(value).normalize():g}"
