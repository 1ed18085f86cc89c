"""Tables without what says nothing: empty columns, and rows that repeat the one above."""

from __future__ import annotations

from collections.abc import Sequence


def tidy(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Leave out columns without an entry, and join numbered rows that say the same.

    Args:
        heads: The heading of each column; the first names the rows.
        rows: Cells, as many in each row. Rows that follow each other and differ in their number
            alone become one, as "2-5".
    """
    shown = [i for i in range(len(heads)) if i == 0 or any(row[i] for row in rows)]
    runs: list[tuple[list[str], list[str]]] = []
    for row in rows:
        name, *cells = (row[i] for i in shown)
        if runs and cells == runs[-1][1] and name.isdecimal() and runs[-1][0][0].isdecimal():
            runs[-1][0].append(name)
        else:
            runs.append(([name], cells))
    joined = [
        [names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}", *cells]
        for names, cells in runs
    ]
    return [heads[i] for i in shown], joined
