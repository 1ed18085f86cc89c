"""A bar chart of keep-sets for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from .layer_report import LayerReport

# More bars than this are one per layer, not one per keep-set.
_MOST_BARS = 36


def bars(reports: Sequence[LayerReport], width: int, symbols: str = "█▒·") -> list[str]:
    """Lines of a bar chart: of all keys, those proven necessary, those kept beyond, those dropped.

    One bar per keep-set if these are few, else one per layer. `symbols` are those of the three
    parts.
    """
    if sum(len(report.sets) for report in reports) <= _MOST_BARS:
        rows = [
            (f"layer {report.layer}" if number == 0 else "", f"head {number}", one.count)
            for report in reports
            for number, one in enumerate(report.sets)
        ]
        if all(len(report.sets) == 1 for report in reports):
            rows = [(layer, "", count) for layer, _, count in rows]
    else:
        rows = [(f"layer {report.layer}", "", report.count) for report in reports]
    first = max(len(layer) for layer, _, _ in rows)
    second = max(len(head) for _, head, _ in rows)
    lines = []
    for layer, head, count in rows:
        needed = count.lower_bound * width // count.total
        kept = max(needed, -(-count.kept * width // count.total))
        bar = symbols[0] * needed + symbols[1] * (kept - needed) + symbols[2] * (width - kept)
        share = f"{100 * count.kept / count.total:5.1f} %"
        lines.append(f"{layer:<{first}} {head:<{second}} {bar} {share}")
    return lines
