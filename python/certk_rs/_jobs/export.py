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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._files.location import Location
from .._files.new_file import new_file
from ..errors import CertkError, pip_install
from .sets import KINDS, PROMISED, LayerRecord, SetRecord

Columns = Mapping[str, Sequence[Any]]
Append = Callable[[Columns], None]
"""Writes columns of equal length at the end of a table."""
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
# Rows of a group of Parquet, about: the file's footer, in memory to the end, has a line of each.
_GROUP = 1 << 18


class Table:
    """A sink of a report (`report.RowSink`): a row per query, or with `sets` one per keep-set."""

    def __init__(self, files: Sequence[Append], sets: bool) -> None:
        self._files, self._sets = files, sets

    def take(
        self, output: str, record: LayerRecord, kinds: Kinds, sets: Sequence[SetRecord]
    ) -> None:
        """Write the rows or the sets of a layer."""
        for columns in [_sets(output, sets)] if self._sets else _rows(output, record, kinds):
            for append in self._files:
                append(columns)


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
        given = ((_csv_file, csv_to), (_parquet_file, parquet_to))
        files = [
            stack.enter_context(opened(place, names, replace))
            for opened, place in given
            if place is not None
        ]
        yield Table(files, sets)


def _no_formula(name: str) -> str:
    return f"./{name}" if name.startswith(_FORMULA) else name


@contextmanager
def _csv_file(place: Location, names: Mapping[str, str], replace: bool) -> Iterator[Append]:
    with new_file(place, replace=replace) as file:
        with file.stream() as stream:
            text = io.TextIOWrapper(stream, encoding="utf-8", newline="")
            writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
            writer.writerow(names)

            def append(columns: Columns) -> None:
                columns = {**columns, "output": list(map(_no_formula, columns["output"]))}
                writer.writerows(zip(*columns.values(), strict=True))

            yield append
            text.flush()
            text.detach()
        file.commit()


@contextmanager
def _parquet_file(place: Location, names: Mapping[str, str], replace: bool) -> Iterator[Append]:
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
            # Parts are few rows where queries or sets are few.
            parts: list[Any] = []
            waiting = 0

            def flush() -> None:
                nonlocal waiting
                if parts:
                    writer.write_table(arrow.concat_tables(parts), _GROUP + _PART)
                parts.clear()
                waiting = 0

            def append(columns: Columns) -> None:
                nonlocal waiting
                parts.append(arrow.table(dict(columns), schema=schema))
                waiting += parts[-1].num_rows
                if waiting >= _GROUP:
                    flush()

            yield append
            flush()
        file.commit()


def _rows(output: str, record: LayerRecord, kinds: Kinds) -> Iterator[Columns]:
    layer, m = record.layer, record.layer.m
    words, unknown = np.array(KINDS, object), np.full(kinds.shape, None)
    weights: NDArray[np.float32] = np.zeros(kinds.size, np.float32)
    weights[record.weight_rows] = record.weights
    upper = record.upper
    if upper is None and record.worst is not None:
        # That of the head, which holds for promised rows only.
        worst = record.worst.astype(np.float64).astype(object)[:, None]
        upper = np.where(kinds == PROMISED, worst, unknown)
    # Of no row is anything known where there are no bounds.
    known = {
        "tail_mass_lower": record.lower,
        "tail_mass_upper": upper,
        "weight": None if record.lower_bounds is None else weights.reshape(kinds.shape),
    }
    for head in range(layer.heads):
        group = head // record.heads_of_set
        for start in range(0, m, _PART):
            part = slice(start, min(start + _PART, m))
            size = part.stop - start
            yield {
                "output": [output] * size,
                "layer": [layer.index] * size,
                "head": [head] * size,
                "query": range(start, part.stop),
                "group": [group] * size,
                "kind": words[kinds[head, part]].tolist(),
                "eps": [float(record.eps[group])] * size,
                **{
                    name: (unknown if values is None else values)[head, part].tolist()
                    for name, values in known.items()
                },
            }


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
