"""Figures of every call of every layer, in the order of calls: packed, as columns, as records."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..results import AttentionResult
from .settings import Budget

# The fields of a record (names by their number, `kind` True for out_tol, NaN where there is none),
# and `spared`: keys might have been dropped but for the time it takes.
_PACKED = np.dtype(
    [
        *(("call", "i4"), ("layer", "i4"), ("name", "i4"), ("rows", "i8"), ("n", "i8")),
        *(("kept", "f8"), ("scored", "f8"), ("tail_mass_upper", "f8"), ("budget", "f8")),
        *(("kind", "?"), ("error_bound", "f8"), ("holds", "?"), ("spared", "?")),
    ]
)
_STRETCH = 4096


@dataclass(frozen=True)
class Found:
    """The result of a call, the keys that each row sees, and the budget."""

    result: AttentionResult
    n: NDArray[np.int64]
    budget: Budget
    eps: NDArray[np.float64] | None = None
    """Budgets of mass of the heads, (heads,), where these have their own."""


class History:
    """All calls so far; rows that see no key are not counted."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._calls = Counter[int]()
        self._packed = bytearray()

    def add(self, layer: int, name: str, call: Found, with_bounds: bool) -> None:
        """Take in a call of a layer; a budget on the error asks for bounds on it, too."""
        some, result, budget = call.n > 0, call.result, call.budget
        n, upper = call.n[some], result.tail_mass_upper[some]
        limit, by_error = float(budget.eps or budget.out_tol or 0.0), budget.eps is None
        limits: Any = limit
        if call.eps is not None and not by_error:
            limits = np.broadcast_to(call.eps[:, None], call.n.shape)[some]
        asked = with_bounds or by_error
        bounds = result.error_bound[some] if asked else upper
        if name not in self.names:
            self.names.append(name)
        figures = (
            *(self._calls[layer], layer, self.names.index(name), n.size, n.max(initial=0)),
            *((keys[some] / n).sum() / (n.size or math.nan) for keys in (result.k, result.scored)),
            *(upper.max(initial=0.0), limit, by_error),
            bounds.max(initial=0.0) if asked else math.nan,
            ((bounds if by_error else upper) <= limits).all(),
            limit > 0 and not budget.even_if_slower,
        )
        self._packed += np.array(figures, _PACKED).tobytes()
        self._calls[layer] += 1

    def packed(self) -> NDArray[Any]:
        """Return an entry per call, with fields."""
        return np.frombuffer(bytes(self._packed), _PACKED)

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return the columns of the records."""
        told = self.packed()
        columns = {name: told[name] for name in _PACKED.names or () if name != "spared"}
        for name, words in (("name", self.names), ("kind", ["eps", "out_tol"])):
            columns[name] = np.array(words, object)[columns[name].astype(int)]
        return columns

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield a record per call; None is a number that is not there."""
        columns = self.columns()
        for start in range(0, len(columns["call"]), _STRETCH):
            stretch = (column[start : start + _STRETCH].tolist() for column in columns.values())
            for values in zip(*stretch, strict=True):
                # Of all values NaN alone is not itself.
                told = (value if value == value else None for value in values)
                yield dict(zip(columns, told, strict=True))

    def lines(self) -> Iterator[str]:
        """Yield the records as lines of JSON, which has no inf: see `Recorder.to_jsonl`."""
        for record in self.records():
            if record["error_bound"] is None:
                del record["error_bound"]
            elif record["error_bound"] == math.inf:
                record["error_bound"] = None
            with _native.DefaultFloats():
                line = json.dumps(record, allow_nan=False)
            yield f"{line}\n"
