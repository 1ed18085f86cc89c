"""Certificates as tables: a row per query of each query head, or one per keep-set.

Written as they are read, one layer in memory, and appearing whole under their name or not at all.
CSV is what the standard library writes (floats in their shortest form, an empty cell for what is
not known); Parquet needs pyarrow.

Names of files are anybody's, and a spreadsheet runs a cell of CSV that begins like a formula. So
text is in quotes, in which no separator begins another cell, and a name that begins so is given as
`./name`, which is the same file.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .._files.location import Location
from .._files.new_file import new_file
from ..errors import CertkError, pip_install
from .sets import KINDS, PROMISED, LayerRecord, SetRecord

Columns = Mapping[str, Sequence[Any]]
Kinds = NDArray[np.uint8]

ROWS = {
    "output": "string",
    "layer": "int32",
    "head": "int32",
    "query": "int64",
    "group": "int32",
    "kind": "string",
    "eps": "float64",
    "tail_mass_lower": "float64",
    "tail_mass_upper": "float64",
    "weight": "float32",
}
"""The columns of a table of rows, with their Parquet types."""

SETS = {
    "output": "string",
    "layer": "int32",
    "head": "int32",
    "eps": "float64",
    "bound_eps": "float64",
    "kept": "int64",
    "total": "int64",
    "lower_bound": "int64",
    "gap": "int64",
    "worst_tail_mass": "float64",
    "rows": "int64",
    "rows_over_budget": "int64",
    "rows_left_out": "int64",
    "worst_left_out": "float64",
    "held_out_queries": "int64",
    "held_out_violations_low": "int64",
    "held_out_violations_high": "int64",
    "held_out_low": "float64",
    "held_out_high": "float64",
}
"""The columns of a table of sets."""

# What a formula begins with, also in the wide forms that some spreadsheets take for the same.
_FORMULA = tuple("=+-@\uff1d\uff0b\uff0d\uff20")
# Rows at a time: some tens of megabytes as Python objects.
_PART = 1 << 16
# Rows of a group of Parquet, about.
_GROUP = 1 << 18


class Writer(Protocol):
    """Appends columns of equal length to a table."""

    def append(self, columns: Columns) -> None:
        """Write them."""


class Table:
    """A sink of a report (`report.RowSink`) that makes tables of what it is handed.

    Args:
        writers: Where the tables go.
        sets: A row per keep-set, not per query.
    """

    def __init__(self, writers: Sequence[Writer], sets: bool) -> None:
        self._writers, self._sets = writers, sets

    def take(
        self, output: str, record: LayerRecord, kinds: Kinds, sets: Sequence[SetRecord]
    ) -> None:
        """Write the rows or the sets of a layer."""
        for columns in [_sets(output, sets)] if self._sets else _rows(output, record, kinds):
            for writer in self._writers:
                writer.append(columns)


@contextmanager
def table_files(
    csv_to: Location | None, parquet_to: Location | None, *, sets: bool, replace: bool
) -> Iterator[Table]:
    """Open the tables that are wanted; they get their names if nothing goes wrong meanwhile.

    Raises:
        CertkError: A name is taken and not to be replaced, or pyarrow is missing.
        OSError: The system refuses.
    """
    names = SETS if sets else ROWS
    with ExitStack() as stack:
        writers: list[Writer] = []
        if csv_to is not None:
            writers.append(stack.enter_context(_csv_file(csv_to, names, replace)))
        if parquet_to is not None:
            writers.append(stack.enter_context(_parquet_file(parquet_to, names, replace)))
        yield Table(writers, sets)


class _Csv:
    def __init__(self, stream: Any, names: Mapping[str, str]) -> None:
        self._writer = csv.writer(stream, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
        self._writer.writerow(names)

    def append(self, columns: Columns) -> None:
        columns = {**columns, "output": list(map(_no_formula, columns["output"]))}
        self._writer.writerows(zip(*columns.values(), strict=True))


def _no_formula(name: str) -> str:
    return f"./{name}" if name.startswith(_FORMULA) else name


@contextmanager
def _csv_file(place: Location, names: Mapping[str, str], replace: bool) -> Iterator[_Csv]:
    with new_file(place, replace=replace) as file:
        with file.stream() as stream:
            text = io.TextIOWrapper(stream, encoding="utf-8", newline="")
            yield _Csv(text, names)
            text.flush()
            text.detach()
        file.commit()


class _Parquet:
    """Collects parts into row groups: the file's footer, in memory to the end, has a line of each.

    Parts are few rows where queries or sets are few.
    """

    def __init__(self, arrow: Any, writer: Any, schema: Any) -> None:
        self._arrow, self._writer, self._schema = arrow, writer, schema
        self._parts: list[Any] = []
        self._rows = 0

    def append(self, columns: Columns) -> None:
        part = self._arrow.table(dict(columns), schema=self._schema)
        self._parts.append(part)
        self._rows += part.num_rows
        if self._rows >= _GROUP:
            self.flush()

    def flush(self) -> None:
        if self._parts:
            self._writer.write_table(self._arrow.concat_tables(self._parts), _GROUP + _PART)
        self._parts, self._rows = [], 0


@contextmanager
def _parquet_file(place: Location, names: Mapping[str, str], replace: bool) -> Iterator[_Parquet]:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError:
        raise CertkError(
            f"Parquet needs pyarrow, which is not installed: {pip_install('export')}; or write CSV"
        ) from None
    schema = arrow.schema([(name, getattr(arrow, kind)()) for name, kind in names.items()])
    with new_file(place, replace=replace) as file:
        with file.stream() as stream, parquet.ParquetWriter(stream, schema) as writer:
            table = _Parquet(arrow, writer, schema)
            yield table
            table.flush()
        file.commit()


def _rows(output: str, record: LayerRecord, kinds: Kinds) -> Iterator[Columns]:
    layer, m = record.layer, record.layer.m
    words = np.array(KINDS, object)
    weights: NDArray[np.float32] = np.zeros(layer.heads * m, np.float32)
    weights[record.weight_rows] = record.weights
    for head in range(layer.heads):
        group = head // record.heads_of_set
        for start in range(0, m, _PART):
            part = slice(start, min(start + _PART, m))
            size = part.stop - start
            own = slice(head * m + start, head * m + part.stop)
            yield {
                "output": [output] * size,
                "layer": [layer.index] * size,
                "head": [head] * size,
                "query": range(start, part.stop),
                "group": [group] * size,
                "kind": words[kinds[head, part]].tolist(),
                "eps": [float(record.eps[group])] * size,
                "tail_mass_lower": _lower(record, head, part),
                "tail_mass_upper": _upper(record, kinds, head, part),
                # Of no row is anything known where there are no bounds.
                "weight": [None] * size if record.lower_bounds is None else weights[own].tolist(),
            }


def _lower(record: LayerRecord, head: int, part: slice) -> list[Any]:
    if record.lower is None:
        return [None] * (part.stop - part.start)
    masses: list[Any] = record.lower[head, part].tolist()
    return masses


def _upper(record: LayerRecord, kinds: Kinds, head: int, part: slice) -> list[Any]:
    """Upper ends; of a compact proof that of the head, which holds for promised rows only."""
    if record.upper is not None:
        masses: list[Any] = record.upper[head, part].tolist()
        return masses
    if record.worst is None:
        return [None] * (part.stop - part.start)
    worst = float(record.worst[head])
    return [worst if kind == PROMISED else None for kind in kinds[head, part].tolist()]


def _sets(output: str, sets: Sequence[SetRecord]) -> Columns:
    rows = [_set(output, one) for one in sets]
    return {name: [row[name] for row in rows] for name in SETS}


def _set(output: str, one: SetRecord) -> dict[str, Any]:
    held_out = one.held_out
    known = held_out.queries > 0 and held_out.violations is not None
    return {
        **vars(one),
        "output": output,
        "gap": one.gap,
        "held_out_queries": held_out.queries,
        "held_out_violations_low": held_out.violations if known else None,
        "held_out_violations_high": held_out.most if known else None,
        "held_out_low": held_out.low if known else None,
        "held_out_high": held_out.high if known else None,
    }
