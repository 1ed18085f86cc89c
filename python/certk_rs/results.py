"""The results of the functions: frozen, picklable, with read-only arrays.

`...` stands for the batch shape, the leading axes of the scores; for one row of shape (n,) it is
(), and the fields are 0-d arrays. Tail masses are fractions of a row's softmax mass. Constructors
take over the arrays that they are given and make them read-only.
"""

from __future__ import annotations

import operator
import os
from dataclasses import dataclass, fields
from enum import IntEnum
from math import prod
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from . import _native
from ._display.numbers import count, masses, percent, rows_of, span, tally, worst
from ._display.shown import Shown, per_row, row_index
from ._files.selections import read_selection, write_selection
from ._ragged import padded
from .errors import CertkError

RowIndex = int | tuple[int, ...]
Indices = NDArray[np.int32] | NDArray[np.int64]


class Status(IntEnum):
    """The status of a row and its budget."""

    CERTIFIED = 0
    """The reported upper end of the tail mass is within eps."""
    OVER_BUDGET = 1
    """`max_keep` does not allow eps; `tail_mass_upper` says what is lost."""
    EMPTY = 2
    """The row has no visible key: nothing kept, tail mass 0."""


class Rung(IntEnum):
    """The way in which a row was answered."""

    CODES = 0
    """No key was scored exactly: codes decided, or there was nothing to decide."""
    RESCORED = 1
    """Some keys were scored exactly, and bounds stand for the others."""
    DENSE = 2
    """All visible keys were scored exactly: the row is too flat, or the codes too coarse for it."""
    CODED = 3
    """Most weights and values came from codes, with a `KvIndex`; some keys were scored exactly."""


_KINDS: dict[str, type[IntEnum]] = {"status": Status, "rung": Rung}


class _Frozen:
    """Arrays are made read-only, and stay so through pickle."""

    @classmethod
    def _of(cls: type[_Result], found: object, **other: Any) -> _Result:
        """Make a result of what `_native` found; its attributes are the fields not given."""
        result = object.__new__(cls)
        result.__dict__.update(other, _found=found)
        if other:
            result.__post_init__()
        return result

    def __post_init__(self) -> None:
        for value in self.__dict__.values():
            if isinstance(value, np.ndarray):
                value.setflags(write=False)

    def __reduce__(self) -> tuple[Any, ...]:
        values = (getattr(self, field.name) for field in fields(cast(Any, self)))
        return type(self), tuple(values)


_Result = TypeVar("_Result", bound=_Frozen)


class _OnDemand:
    """A field that stays with `_native` until it is read; then the instance has it.

    For one short row, making all the arrays of a result takes longer than computing them.
    Like `functools.cached_property` this has no `__set__`, so what the instance has comes first.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, result: _Frozen | None, owner: type) -> Any:
        values = {} if result is None else result.__dict__
        if "_found" not in values:
            raise AttributeError(f"{owner.__name__} has no {self.name}")
        # Where several threads come at once, all get what the first of them has put down.
        return values.setdefault(self.name, getattr(values["_found"], self.name))


def _on_demand(cls: type[_Result]) -> type[_Result]:
    """Let the fields of a dataclass come from `_native`; its constructor works as before."""
    for field in fields(cast(Any, cls)):
        setattr(cls, field.name, _OnDemand(field.name))
    return cls


class _OfRows(_Frozen, Shown):
    """A result with a tail mass for each row, whose shape is the batch shape."""

    _COLUMNS: ClassVar[tuple[str, ...]]
    """The fields that `to_pandas` shows, a number per row each."""
    tail_mass_upper: NDArray[np.float64]

    def summary(self) -> str:
        """Return a few lines on what is kept and what is proven."""
        title, facts = self._facts()
        return "\n".join([title, *(f"  {name:<10} {text}" for name, text in facts.items())])

    def _facts(self) -> tuple[str, dict[str, str]]:
        """Return the first line of the summary, and the others by their names."""
        raise NotImplementedError

    def _columns(self) -> dict[str, Any]:
        columns = {name: getattr(self, name) for name in self._COLUMNS}
        for name in _KINDS.keys() & columns.keys():
            names = [kind.name.lower() for kind in _KINDS[name]]
            columns[name] = np.array(names, object)[columns[name]]
        return per_row(self._batch, **columns)

    def _index(self, pandas: Any) -> Any:
        return row_index(pandas, self._batch)

    @property
    def _batch(self) -> tuple[int, ...]:
        return self.tail_mass_upper.shape


@_on_demand
@dataclass(frozen=True, eq=False, repr=False)
class Selection(_OfRows):
    """The kept keys of each row, each with a proven interval for the tail mass that was dropped.

    The promise, per row: for the real-number softmax of exactly the stored scores (times the given
    scale, plus the given mask), tail_mass_lower <= dropped mass <= tail_mass_upper.
    """

    _COLUMNS: ClassVar[tuple[str, ...]]
    _COLUMNS = ("k", "eps", "tail_mass_lower", "tail_mass_upper", "minimal", "status")
    shape: tuple[int | None, ...]
    """Shape of the scores, (..., n); (rows, None) for ragged rows."""
    eps: NDArray[np.float64]
    """The budgets asked for, shape () or (...)."""
    k: NDArray[np.int64]
    """Keys kept, (...)."""
    indptr: NDArray[np.int64]
    """Row r keeps indices[indptr[r] : indptr[r + 1]]; (rows + 1,)."""
    indices: Indices
    """Positions within the row, ascending; int64 only where n >= 2**31."""
    tail_mass_upper: NDArray[np.float64]
    """Proven upper end of the dropped mass, (...)."""
    tail_mass_lower: NDArray[np.float64]
    """Proven lower end of the dropped mass, (...)."""
    minimal: NDArray[np.bool_]
    """True where k is proven minimal under all given constraints, (...)."""
    status: NDArray[np.uint8]
    """A `Status` per row, (...)."""
    score_indptr: NDArray[np.int64] | None = None
    """Where each ragged row starts in the flat scores, (rows + 1,); else None."""

    @property
    def kl_upper(self) -> NDArray[np.float64]:
        """Upper bound in nats on KL(renormalised kept softmax || full softmax), (...).

        It is -ln(1 - tail_mass_upper), rounded outward; inf where the upper end is 1.
        """
        upper = self.tail_mass_upper
        with np.errstate(divide="ignore"), _native.DefaultFloats():
            kl = -np.log1p(-upper)
            # Raised by more than log1p can be off; where nothing is dropped it is exactly 0.
            return np.where(upper == 0.0, 0.0, np.nextafter(kl * (1.0 + 2.0**-48), np.inf))

    def row(self, i: RowIndex) -> Indices:
        """Return the kept positions of one row, ascending.

        Args:
            i: The row's flat number, or its multi-index in the batch shape; negative counts from
                the end.

        Raises:
            CertkError: No such row.
        """
        flat = _flat_row(i, cast("tuple[int, ...]", self.shape[:-1]))
        return self.indices[self.indptr[flat] : self.indptr[flat + 1]]

    def to_mask(self) -> NDArray[np.bool_]:
        """Return a new bool array of the scores' shape (flat for ragged rows), True where kept."""
        if self.score_indptr is None:
            mask = np.zeros((self.k.size, _dense(self.shape)[-1]), dtype=np.bool_)
            mask[np.repeat(np.arange(self.k.size), self.k.reshape(-1)), self.indices] = True
            return mask.reshape(_dense(self.shape))
        mask = np.zeros(self.score_indptr[-1], dtype=np.bool_)
        mask[np.repeat(self.score_indptr[:-1], self.k) + self.indices] = True
        return mask

    def to_padded(self, fill: int = -1) -> Indices:
        """Return a new array (..., max k) of each row's kept positions, `fill` after the last."""
        table: Indices = padded(self.indices, self.k.reshape(-1), fill)
        return table.reshape(*self.k.shape, table.shape[1])

    def to_blocks(self, block_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the blocks of so many positions that hold a kept key: block-sparse rows (BSR).

        Row r has the blocks numbers[indptr[r] : indptr[r + 1]], ascending, where a block begins at
        its number times block_size. All of its keys are kept then, so that a row loses no more than
        the selection does. Of a paged cache, `block_table[numbers]` are a row's pages.

        Args:
            block_size: Positions of a block, 1 or more.

        Returns:
            indptr (rows + 1,), and numbers.

        Raises:
            CertkError: A block_size below 1.
        """
        if block_size < 1:
            raise CertkError(f"block_size is {block_size}; pass 1 or more")
        numbers = self.indices.astype(np.int64) // block_size
        new = np.ones(numbers.size, np.bool_)
        new[1:] = numbers[1:] != numbers[:-1]
        starts = self.indptr[:-1]
        new[starts[starts < numbers.size]] = True
        before = np.zeros(numbers.size + 1, np.int64)
        np.cumsum(new, out=before[1:])
        return before[self.indptr], numbers[new]

    @property
    def _n_scores(self) -> int:
        ragged = self.score_indptr
        return prod(_dense(self.shape)) if ragged is None else int(ragged[-1])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an npz file with the field names at exactly `path`; written aside, then renamed.

        Raises:
            OSError: The file cannot be written; an old file of that name is left as it was.
        """
        self._write(path, replace=True)

    def _write(self, path: str | os.PathLike[str], *, replace: bool) -> None:
        fields_by_name = {field.name: getattr(self, field.name) for field in fields(self)}
        write_selection(path, fields_by_name, replace=replace)

    @classmethod
    def load(cls: type[_Result], path: str | os.PathLike[str]) -> _Result:
        """Read what `save` wrote. Nothing is unpickled.

        Raises:
            CertkError: The file is not one, or its fields contradict each other.
            OSError: The file cannot be read.
        """
        return cls(**read_selection(path, searched=issubclass(cls, SearchResult)))

    def _facts(self) -> tuple[str, dict[str, str]]:
        kept, total, rows = self.indices.size, self._n_scores, self.k.size
        title = f"Selection of {rows_of(rows)}, scores of shape {self.shape}"
        return f"{title}, eps = {span(self.eps)}", {
            "kept": f"{kept} of {total} scores ({percent(kept, total)}), k {span(self.k)}",
            "tail mass": masses(self.tail_mass_lower, self.tail_mass_upper),
            "minimal": f"{percent(count(self.minimal), rows)} of the rows, proven",
            "status": _statuses(self.status),
        }

    def __repr__(self) -> str:
        kept, total = self.indices.size, self._n_scores
        return (
            f"Selection(shape={self.shape}, eps={span(self.eps)}, "
            f"kept {percent(kept, total)} (k {span(self.k)}), "
            f"tail mass <= {worst(self.tail_mass_upper)}, "
            f"minimal {percent(count(self.minimal), self.k.size)}, {_statuses(self.status)})"
        )


@_on_demand
@dataclass(frozen=True, eq=False, repr=False)
class SearchResult(Selection):
    """The result of a search over an index of keys: a `Selection`, and how it was reached.

    The promise is that of `Selection` for the scores scale * q.k, in real numbers, of exactly the
    stored queries and keys. `shape` is (..., n), n the keys; after rule "top_k" without a budget
    `eps` is 1. OVER_BUDGET means that the given k, or `max_scored`, does not allow eps, or that the
    k keys kept are not proven to be the true top k; what is lost is in `tail_mass_upper`.
    """

    _COLUMNS = (*Selection._COLUMNS, "scored", "rung")
    # Behind a field with a default, but there is always a value.
    scored: NDArray[np.int64] = None  # type: ignore[assignment]
    """Keys whose scores were computed exactly, (...)."""
    rung: NDArray[np.uint8] = None  # type: ignore[assignment]
    """A `Rung` per row, (...)."""

    def _facts(self) -> tuple[str, dict[str, str]]:
        scored, total = int(self.scored.sum()), self._n_scores
        title = f"SearchResult of {rows_of(self.k.size)} over {self.shape[-1]} keys"
        return f"{title}, eps = {span(self.eps)}", super()._facts()[1] | {
            "scored": f"{scored} of {total} scores exactly ({percent(scored, total)})",
            "rungs": tally(self.rung, Rung) or "none",
        }

    def __repr__(self) -> str:
        share = percent(int(self.scored.sum()), self._n_scores)
        inner = super().__repr__().removeprefix("Selection(").removesuffix(")")
        return f"SearchResult({inner}, scored {share})"


@_on_demand
@dataclass(frozen=True, eq=False, repr=False)
class Certificate(_OfRows):
    """A proven interval for the mass that a given kept set drops from each row.

    The promise is that of `Selection`. An empty set of a row with visible keys has mass [1, 1].
    """

    _COLUMNS = ("k", "eps", "tail_mass_lower", "tail_mass_upper", "holds", "minimal")
    shape: tuple[int | None, ...]
    """Shape of the scores, (..., n); (rows, None) for ragged rows."""
    k: NDArray[np.int64]
    """Keys kept, (...)."""
    tail_mass_upper: NDArray[np.float64]
    """Proven upper end of the dropped mass, (...)."""
    tail_mass_lower: NDArray[np.float64]
    """Proven lower end of the dropped mass, (...)."""
    eps: NDArray[np.float64] | None = None
    """The budgets asked about, shape () or (...), or None."""
    holds: NDArray[np.bool_] | None = None
    """True where tail_mass_upper <= eps, (...); None without eps."""
    minimal: NDArray[np.bool_] | None = None
    """True where no smaller set meets eps, proven, (...); None without eps."""

    def _facts(self) -> tuple[str, dict[str, str]]:
        facts = {
            "kept": f"{int(self.k.sum())} scores, k = {span(self.k)}",
            "tail mass": masses(self.tail_mass_lower, self.tail_mass_upper),
        }
        if self.eps is not None and self.holds is not None and self.minimal is not None:
            holds = percent(count(self.holds), self.k.size)
            minimal = percent(count(self.minimal), self.k.size)
            facts["holds"] = f"{holds} of the rows, eps = {span(self.eps)}"
            facts["minimal"] = f"{minimal} of the rows, proven"
        return f"Certificate for {rows_of(self.k.size)}, scores of shape {self.shape}", facts

    def __repr__(self) -> str:
        verdict = ""
        if self.eps is not None and self.holds is not None:
            share = percent(count(self.holds), self.k.size)
            verdict = f", holds {share} at eps={span(self.eps)}"
        return (
            f"Certificate(shape={self.shape}, k {span(self.k)}, "
            f"tail mass <= {worst(self.tail_mass_upper)}{verdict})"
        )


@_on_demand
@dataclass(frozen=True, eq=False, repr=False)
class KeepSet(_OfRows):
    """One kept set for many rows, with a proven lower bound on its size.

    The promise covers the listed rows only: nothing is said about queries that were not given.
    """

    _COLUMNS = ("eps", "tail_mass_lower", "tail_mass_upper")
    shape: tuple[int, ...]
    """Shape of the scores, (..., n)."""
    eps: NDArray[np.float64]
    """The budgets asked for, shape () or (...)."""
    indices: NDArray[np.int64]
    """Positions kept for every row, ascending, (k,)."""
    status: Status
    """CERTIFIED iff every row is within its budget; EMPTY iff no row has a visible key."""
    tail_mass_upper: NDArray[np.float64]
    """Proven upper end of the mass that each row loses, (...)."""
    tail_mass_lower: NDArray[np.float64]
    """Proven lower end of the mass that each row loses, (...)."""
    lower_bound: int
    """No set under the same constraints is smaller (over budget: none that reaches as much)."""
    weights: NDArray[np.float64]
    """Weights >= 0 of the rows, (...), whose mixture proves `lower_bound`.

    float32 holds each of them exactly, and the proof is that of these numbers. 0 for every row that
    has no say.
    """

    @property
    def k(self) -> int:
        """Number of keys kept."""
        return self.indices.size

    @property
    def optimality_gap(self) -> int:
        """The most keys that could be saved: k - lower_bound."""
        return self.k - self.lower_bound

    def to_mask(self) -> NDArray[np.bool_]:
        """Return a new boolean array (n,), True where kept; it broadcasts to the scores' shape."""
        mask = np.zeros(self.shape[-1], dtype=np.bool_)
        mask[self.indices] = True
        return mask

    def summary(self) -> str:
        """Return a few lines on how much is kept, what is proven, and for which queries."""
        return f"{super().summary()}\n  The promise covers the listed queries only."

    def _facts(self) -> tuple[str, dict[str, str]]:
        n, status = self.shape[-1], self.status.name.lower().replace("_", " ")
        title = f"KeepSet for {rows_of(self.tail_mass_upper.size)}, scores of shape {self.shape}"
        return f"{title}, eps = {span(self.eps)}: {status}", {
            "kept": f"{self.k} of {n} keys ({percent(self.k, n)}); proven minimum >= "
            f"{self.lower_bound}, gap <= {self.optimality_gap}",
            "tail mass": masses(self.tail_mass_lower, self.tail_mass_upper),
        }

    def _columns(self) -> dict[str, Any]:
        return super()._columns() | {"weight": self.weights.reshape(-1)}

    def __repr__(self) -> str:
        n = self.shape[-1]
        return (
            f"KeepSet(shape={self.shape}, eps={span(self.eps)}, kept {self.k} of {n} "
            f"({percent(self.k, n)}), lower bound {self.lower_bound}, "
            f"tail mass <= {worst(self.tail_mass_upper)}, {self.status.name}; "
            f"covers the {rows_of(self.tail_mass_upper.size)} listed only)"
        )


def _dense(shape: tuple[int | None, ...]) -> tuple[int, ...]:
    return tuple(axis for axis in shape if axis is not None)


def _flat_row(i: RowIndex, batch: tuple[int, ...]) -> int:
    index, axes = (i, batch) if isinstance(i, tuple) else ((i,), (prod(batch),))
    flat = 0
    try:
        for step, n in zip(index, axes, strict=True):
            step = operator.index(step)
            if not -n <= step < n:
                raise IndexError
            flat = flat * n + step % n
    except (TypeError, ValueError, IndexError):
        raise CertkError(f"i is {i!r}; there is no such row in the batch shape {batch}") from None
    return flat


@_on_demand
@dataclass(frozen=True, eq=False, repr=False)
class AttentionResult(_OfRows):
    """Attention's output, and what is proven of each row; `...` is q.shape[:-1].

    The promise, per row: the real-number softmax of exactly the stored q, k and scale loses at most
    `tail_mass_upper` of its mass, and `out` as it is stored is at most `error_bound` away from the
    real-number attention over everything that the row sees. All rounding is inside.
    """

    _COLUMNS = (
        *("k", "tail_mass_upper", "error_bound", "scored", "rung"),
        *("log_mass_lower", "log_mass_upper"),
    )
    out: Any
    """(..., d_v), of the dtype and kind of q: a read-only NumPy array, or a torch tensor."""
    tail_mass_upper: NDArray[np.float64]
    """Proven upper end of the dropped mass, (...). Where weights came from codes (`Rung.CODED`) it
    is one of the total variation distance between the weights used and the softmax."""
    error_bound: NDArray[np.float64]
    """Upper bound on the Euclidean norm over d_v of `out` minus the real attention, (...).

    Computed when it is first read (then kept) unless `out_tol` was given, since it takes a pass
    over the values: those in memory at that moment, so read it before they are overwritten. Until
    then the result holds on to them. inf where a dropped value may not be finite.
    """
    k: NDArray[np.int64]
    """Keys that went into each average, (...)."""
    scored: NDArray[np.int64]
    """Keys that were scored exactly, (...)."""
    rung: NDArray[np.uint8]
    """A `Rung` per row, (...)."""
    log_mass_lower: NDArray[np.float64]
    """Proven lower end of ln(sum of e^score) over the keys of the average and the sink, in nats,
    (...); -inf where there may be none."""
    log_mass_upper: NDArray[np.float64]
    """Its proven upper end. With both ends parts of one softmax that were computed apart are put
    together; `KeyIndex.recall` takes them as `beside`."""

    def _facts(self) -> tuple[str, dict[str, str]]:
        facts = {
            "averaged": f"{span(self.k)} keys a row",
            "scored": f"{span(self.scored)} keys a row exactly",
            "tail mass": f"at most {worst(self.tail_mass_upper)}",
        }
        # Computing it takes a pass over the values.
        if "error_bound" in self.__dict__:
            facts["error"] = f"at most {worst(self.error_bound)}"
        facts["rungs"] = tally(self.rung, Rung) or "none"
        return f"AttentionResult of {rows_of(self.k.size)}, batch shape {self.k.shape}", facts

    def __repr__(self) -> str:
        if self.k.size == 0:
            return f"AttentionResult(no rows, batch shape {self.k.shape})"
        return (
            f"AttentionResult({rows_of(self.k.size)}, batch shape {self.k.shape}, "
            f"k {span(self.k)}, scored {span(self.scored)}, "
            f"tail mass <= {worst(self.tail_mass_upper)}, "
            f"{tally(self.rung, Rung)})"
        )


@_on_demand
@dataclass(frozen=True, eq=False, repr=False)
class RecallResult(_OfRows):
    """The weight of keys that are elsewhere by their codes, and those that a row must have back.

    The promise, per row: of the real-number softmax over the keys that are kept elsewhere and the
    visible ones of the index, those of the index that are not in `indices` have a share of at least
    `tail_mass_lower` and at most `tail_mass_upper`, which is within the budget.
    """

    _COLUMNS = (
        *("k", "lost_upper", "tail_mass_upper", "tail_mass_lower"),
        *("log_mass_lower", "log_mass_upper"),
    )
    lost_upper: NDArray[np.float64]
    """Proven upper end of the share of all visible keys of the index, (...): what a row loses that
    has none of them back."""
    indptr: NDArray[np.int64]
    """Where each row's part of `indices` begins, and the last one's ends, (rows + 1,)."""
    indices: NDArray[np.int64]
    """Positions in the index of the keys to be fetched, ascending in each row; flat."""
    tail_mass_upper: NDArray[np.float64]
    """Proven upper end of the share of all other keys of the index, (...)."""
    tail_mass_lower: NDArray[np.float64]
    """Its proven lower end, (...)."""
    log_mass_lower: NDArray[np.float64]
    """Proven lower end of ln(sum of e^score) over all visible keys of the index, (...), in nats."""
    log_mass_upper: NDArray[np.float64]
    """Its proven upper end, (...)."""

    @property
    def k(self) -> NDArray[np.int64]:
        """The number of keys that each row must have back, (...)."""
        return np.diff(self.indptr).reshape(self.tail_mass_upper.shape)

    def row(self, *place: int) -> NDArray[np.int64]:
        """Return the positions of one row, named by its indices in the batch shape."""
        at = int(np.ravel_multi_index(place, self.tail_mass_upper.shape)) if place else 0
        return self.indices[self.indptr[at] : self.indptr[at + 1]]

    def _facts(self) -> tuple[str, dict[str, str]]:
        shape = self.tail_mass_upper.shape
        return f"RecallResult of {rows_of(prod(shape))}, batch shape {shape}", {
            "to fetch": f"{span(self.k)} keys a row, {len(self.indices)} in all",
            "tail mass": f"of the others at most {worst(self.tail_mass_upper)}",
        }

    def __repr__(self) -> str:
        if self.tail_mass_upper.size == 0:
            return f"RecallResult(no rows, batch shape {self.tail_mass_upper.shape})"
        return (
            f"RecallResult({rows_of(self.tail_mass_upper.size)}, k {span(self.k)}, "
            f"tail mass <= {worst(self.tail_mass_upper)})"
        )


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(_OfRows):
    """The cost of another cache to each row of attention; `...` is q.shape[:-1].

    The promise, per row: the total variation distance between the real-number softmax over the
    original keys and that over the other keys lies in [tv_lower, tv_upper]. The real-number outputs
    over the two caches are at most `error_upper` apart.
    """

    _COLUMNS = ("tv_lower", "tv_upper", "error_upper")
    tv_lower: NDArray[np.float64]
    """Proven lower end of the total variation distance, in [0, 1], (...)."""
    tv_upper: NDArray[np.float64]
    """Proven upper end of the total variation distance, in [0, 1], (...)."""
    error_upper: NDArray[np.float64]
    """Upper bound on the distance of the outputs, (...): Euclidean over d_v, in the units of v."""

    @property
    def worst(self) -> float:
        """The largest upper end of the total variation distance; 0 without rows."""
        return float(self.tv_upper.max(initial=0.0))

    @property
    def worst_row(self) -> tuple[int, ...]:
        """The place in the batch shape of a row with that upper end."""
        return tuple(map(int, np.unravel_index(self.tv_upper.argmax(), self._batch)))

    @property
    def _batch(self) -> tuple[int, ...]:
        return self.tv_upper.shape

    def _facts(self) -> tuple[str, dict[str, str]]:
        return f"Comparison of {rows_of(self.tv_upper.size)}, batch shape {self._batch}", {
            "distance": f"total variation {masses(self.tv_lower, self.tv_upper)}",
            "error": f"at most {worst(self.error_upper)}",
        }

    def __repr__(self) -> str:
        return (
            f"Comparison({rows_of(self.tv_upper.size)}, batch shape {self._batch}, total variation "
            f"<= {worst(self.tv_upper)}, error <= {worst(self.error_upper)})"
        )


def _statuses(status: NDArray[np.uint8]) -> str:
    return tally(status, Status) or "no rows"
