"""The report of a prune job as one self-contained HTML page.

Every figure is one of the report (`job_report`): nothing is computed here but units, shares and
roundings, and a bound is rounded to the side on which it stays one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR
from itertools import pairwise
from typing import Any

import numpy as np

from .._display.numbers import percent_of_bound, rounded
from .._display.page import WIDTH, Section, Table, page, panels, svg
from .._display.plots import heat_map

Row = Mapping[str, Any]
Cell = Callable[[Row], str]
"""The text of a row's cell in one column."""

DASH = "–"  # noqa: RUF001 - what is not known, or does not apply
FEW = 24
"""Tables of more rows than this are folded (`_display.page`), and of more than `MOST` are cut."""
MOST = 1000
NOTED = "*"
SHORT = 9
IN = ("in output",)
_COLOURS = {"promised": "#3b6fb6", "held_out": "#e8a33d", "left_out": "#b5473c"}


def job_page(report: Mapping[str, Any]) -> str:
    """Return the page; needs matplotlib."""
    # A figure over all outputs is marked where that of any output is.
    borrowed = {"from_record": {name for each in report["outputs"] for name in each["from_record"]}}
    total = report["totals"] | borrowed
    sums = {name: [each | borrowed for each in report[name]] for name in ("layers", "sets")}
    report = {**report, **sums, "totals": total}
    makers = (_outcome, _asked, _sizes, _kept, _masses, _held_out, _left_out, _worst_rows)
    sections = [make(report) for make in (*makers, _trouble, _hashes, _unknown)]
    lead = (
        f"{_files(total['outputs'])} made smaller: {count(total['kept'])} of "
        f"{count(total['total'])} keys are kept ({share(total['kept_share'])}), and "
        f"{megabytes(total['cache_bytes'])} of keys and values are "
        f"{megabytes(total['output_bytes'])}, proof included ({share(total['saved'])} saved). "
        "Every figure here is of the outputs themselves, unless it is marked: "
        f"{NOTED} is taken from the record of the job."
    )
    if not total["outputs"]:
        lead = "There is no output that can be read."
    shown = [section for section in sections if section is not None]
    foot = f"certk_rs {report['library']}. Nothing here was verified: certk verify does that."
    return page("certk report", lead, shown, foot)


# --------------------------------------------------------------------------------- how figures read


def _known(form: Callable[[Any], str]) -> Callable[[Any], str]:
    """Return a form of figures that writes a dash for what is not known."""
    return lambda value: DASH if value is None else form(value)


count = _known(lambda value: f"{value:,}".replace(",", " "))
share = _known(lambda value: f"{100 * value:.1f} %")
megabytes = _known(lambda value: f"{value / 1e6:.6g} MB")
seconds = _known(lambda value: f"{value:.1f} s")
# Bounds have six digits, rounded so that they are still bounds.
up = _known(lambda value: rounded(value, ROUND_CEILING))
down = _known(lambda value: rounded(value, ROUND_FLOOR))
share_up = _known(lambda value: percent_of_bound(value, ROUND_CEILING))
# A budget or another given number is shown as it is, if that is short.
number = _known(lambda value: repr(value) if len(repr(value)) <= SHORT else up(value))


def between(low: int | None, high: int | None) -> str:
    """Format a count that is known, or known to lie between two."""
    if low is None or high is None:
        return DASH
    return count(low) if low == high else f"{count(low)} to {count(high)}"


def budget(row: Row) -> str:
    """One budget, or the range of several."""
    low, high = row["eps_low"], row["eps_high"]
    return number(low) if low == high else f"{number(low)} to {number(high)}"


def head(value: int) -> str:
    """Format a kv head, or the whole layer."""
    return "all" if value < 0 else str(value)


def of(name: str, form: Callable[[Any], str] = str, mark: str | None = None) -> Cell:
    """Return the cells of a column: a figure by its name, formatted, with its mark."""
    return lambda row: form(row[name]) + _mark(row, mark or name)


def _mark(row: Row, name: str) -> str:
    """Return the mark of a figure that is taken from the record of the job."""
    return NOTED if name in row.get("from_record", ()) else ""


def tabled(
    caption: str, rows: Sequence[Row], columns: Mapping[str, Cell], text: Collection[str] = ()
) -> Table:
    """Return a table of rows, with the columns by their heads; cut at `MOST` rows."""
    cells = [[cell(row) for cell in columns.values()] for row in rows[:MOST]]
    return Table(tuple(columns), cells, caption, text)


def _files(n: int) -> str:
    return "1 cache" if n == 1 else f"{count(n)} caches"


# ---------------------------------------------------------------------------------------- sections


def _outcome(report: Mapping[str, Any]) -> Section:
    total = report["totals"]
    rows = [
        ["outputs", count(total["outputs"])],
        ["inputs that failed", count(len(report["failures"]))],
        ["inputs without an output", count(len(report["missing"]))],
        ["outputs that cannot be read", count(len(report["unreadable"]))],
    ]
    if total["outputs"]:
        # With a size for a target, bounds are of a smaller budget than that of the sets.
        needed = None if total["gap"] is None else total["lower_bound"]
        rows += [
            ["keep-sets", count(total["sets"])],
            ["keys kept", f"{count(total['kept'])} of {count(total['total'])}"],
            ["share of the keys kept", share(total["kept_share"])],
            ["keys that any such sets need", count(needed) + _mark(total, "lower_bound")],
            ["gap: at most so many too many", of("gap", count, "lower_bound")(total)],
            ["rows promised", count(total["rows"])],
            ["worst tail mass of a promised row", of("worst_tail_mass", up)(total)],
            ["promised rows over eps", _over(total)],
            ["rows left out by coverage", count(total["rows_left_out"])],
            ["held-out queries, summed over sets", of("held_out_queries", count)(total)],
        ]
    text = [] if total["outputs"] else ["No output was found that could be read."]
    tables = [Table(("what", "how much"), rows)]
    if report["jobs"]:
        columns = {
            "directory": of("out"),
            "state": of("state"),
            "certk_rs": of("library"),
            "inputs": of("inputs", count),
            "time of its last run": of("seconds", seconds),
            "most memory": of("peak_memory", megabytes),
        }
        tables.append(tabled("Jobs, by their own record", report["jobs"], columns))
    else:
        text.append(
            "There is no record of a job (.certk) beside the outputs: times, memory and failures "
            "are not known."
        )
    return Section("Outcome", text, (), tables, "outcome")


def _asked(report: Mapping[str, Any]) -> Section:
    columns = {
        "outputs": of("outputs", count),
        "one set per": of("granularity"),
        "eps": budget,
        "max keep": of("max_keep", number),
        "keep first": of("keep_first", count),
        "keep last": of("keep_last", count),
        "block size": of("block_size", count),
        "coverage": of("coverage", number),
        "hold out": of("holdout", number),
        "proof": of("proof"),
        "rest": of("rest"),
        "error allowed": of("out_tol", number),
        "keys in all": lambda row: f"{count(row['size'])}{', hot' if row['hot'] else ''}",
        "layout": of("layout"),
    }
    requests = [
        [name, DASH if value is None else str(value)]
        for job in report["jobs"]
        for name, value in job["request"].items()
    ]
    tables = [tabled("By the certificates of the outputs", report["options"], columns)]
    if requests:
        tables.append(Table(("option", "value"), requests, "As the job was asked", {"value"}))
    return Section("Options", [], (), tables, "options")


def _sizes(report: Mapping[str, Any]) -> Section | None:
    outputs = report["outputs"]
    if not outputs:
        return None
    total = report["totals"]
    columns = {
        "output": of("output"),
        "keys and values before": of("cache_bytes", megabytes),
        "after, proof included": of("output_bytes", megabytes),
        "saved": of("saved", share),
        "indices, proof": of("proof_bytes", megabytes),
        "codes": of("rest_bytes", megabytes),
        "keys kept": of("kept", count),
        "of": of("total", count),
        "share": of("kept_share", share),
        "time of workers": of("seconds", seconds),
    }
    rest = f", {megabytes(total['rest_bytes'])} are codes" if total["rest_bytes"] else ""
    text = [
        f"{megabytes(total['cache_bytes'])} of keys and values became "
        f"{megabytes(total['output_bytes'])}: {share(total['saved'])} saved. Of what was written, "
        f"{megabytes(total['proof_bytes'])} are indices and proof{rest}. The inputs have "
        f"{megabytes(total['input_bytes'])} with all their tensors.",
    ]
    plots = [saved_by_output(outputs)] if len(outputs) > 1 else []
    tables = [tabled("By output", outputs, columns)]
    return Section("Sizes", _cut(text, outputs), plots, tables, "sizes")


def _kept(report: Mapping[str, Any]) -> Section | None:
    if not report["sets"]:
        return None
    text = [
        "The lower bounds are proven: no sets that keep the same promise (or that lose as little, "
        "where they are over budget) have fewer keys, so the gap is the most that a better choice "
        "could save. In blocks, a bound counts the keys that so many blocks hold at least."
    ]
    total = report["totals"]
    smaller = total["gap"] is None and total["lower_bound"] is not None
    # Beside fewer kept keys "at least needed" would read as a contradiction.
    needed = "needed at the smaller budget" if smaller else "at least needed"
    columns: dict[str, Cell] = {
        "layer": of("layer"),
        "kv head": of("head", head),
        "sets": of("sets", count),
        "kept": of("kept", count),
        "of": of("total", count),
        "share": of("kept_share", share),
        "least share": of("least_kept_share", share),
        "largest share": of("most_kept_share", share),
        needed: of("lower_bound", count),
        "gap": of("gap", count, "lower_bound"),
        "budget": budget,
        "worst tail mass": of("worst_tail_mass", up),
        "in output": lambda row: row["worst_output"] or DASH,
    }
    apart = ("kv head", "least share", "largest share")
    by_layer = {name: cell for name, cell in columns.items() if name not in apart}
    tables = [
        tabled("By layer, all outputs together", report["layers"], by_layer, IN),
        tabled("By layer and kv head, all outputs together", report["sets"], columns, IN),
    ]
    sized = _sized(report["outputs"])
    if sized:
        text.append(
            "Where a size was asked for, bounds are those at the smaller budget that is below: all "
            "together they are more than was allowed, so no worst tail mass is less than that."
        )
    tables += sized
    plots = kept_maps(report["sets"])
    return Section("Keys kept, and lower bounds", _cut(text, report["sets"]), plots, tables, "kept")


def _sized(outputs: Sequence[Row]) -> list[Table]:
    """Return the worst row's loss at a given number of keys, and the least possible one."""
    sized = [each for each in outputs if each["size"] is not None and not each["hot"]]
    columns: dict[str, Cell] = {
        "output": of("output"),
        "keys allowed": of("size", count),
        "kept": of("kept", count),
        "worst tail mass": of("worst_tail_mass", up),
        "no less is possible than": of("worst_at_least", down),
    }
    return [tabled("Outputs with a size for a target", sized, columns)] if sized else []


def _masses(report: Mapping[str, Any]) -> Section | None:
    if not report["layers"]:
        return None
    spread = report["tail_masses"]
    text = [
        "The tail mass of a row is what it loses of its attention, by proof: an upper end that is "
        "within the budget is a promise kept. Rows that were held out or left out are not promised."
    ]
    plots = []
    tables = []
    if spread["rows"]:
        text.append(f"{count(spread['rows'])} rows have a tail mass of their own in the outputs.")
        plots.append(spread_plot(spread))
        edges = spread["edges"]
        bins = [_bin(low, high) for low, high in pairwise(edges)]
        counts = [map(count, spread[kind]) for kind in _COLOURS]
        rows = [[*each] for each in zip(bins, *counts, strict=True)]
        heads = ("upper end over budget", "promised", "held out", "left out")
        tables.append(Table(heads, rows, "Rows by tail mass over budget"))
    if any(each["worst_tail_mass"] is not None for each in report["layers"]):
        plots.append(lost_by_layer(report["layers"]))
    return Section("Tail masses", text, plots, tables, "masses")


def _bin(low: float, high: float | None) -> str:
    if high is None:
        return f"above {number(low)}"
    return f"up to {number(high)}" if low == 0 else f"{number(low)} to {number(high)}"


def _held_out(report: Mapping[str, Any]) -> Section | None:
    sets = [each for each in report["sets"] if each["held_out_queries"]]
    if not sets:
        return None
    confidence, total = report["confidence"], report["totals"]
    low, high = total["held_out_violations_low"], total["held_out_violations_high"]
    ways = []
    if any("held_out_queries" in each["from_record"] for each in report["outputs"]):
        ways.append(
            f"In a trial ({NOTED}), some queries were set aside at random and sets were made for "
            "the others; the sets in the outputs were then made for all queries."
        )
    if any(each["holdout"] for each in report["options"]):
        ways.append(
            "Outputs with a share to hold out have sets that were made without some queries, set "
            "aside at random, which are not promised."
        )
    text = [
        f"Promised, without any probability: every promised row ({count(total['rows'])} of them) "
        f"is within its budget or told above as over it. {' '.join(ways)} Of "
        f"{count(total['held_out_queries'])} queries set aside, summed over sets, "
        f"{between(low, high)} may lose more than the budget in some query head of a set that was "
        "made without them.",
        "The bound is the upper end of the interval of Clopper and Pearson (confidence "
        f"{number(confidence)}, so {number(1 - (1 - confidence) / 2)} one-sided) for the "
        "probability that a query drawn like those of the file loses more than the budget; it is "
        "that of the one set where it is largest. It says nothing about queries of another kind.",
    ]
    outputs = [each for each in report["outputs"] if each["held_out_queries"]]
    place = {"layer": of("layer"), "kv head": of("head", head), "sets": of("sets", count)}
    columns: dict[str, Cell] = {
        "queries held out": of("held_out_queries", count),
        "over budget": lambda row: (
            between(row["held_out_violations_low"], row["held_out_violations_high"])
            + _mark(row, "held_out_violations")
        ),
        "probability at most, in the worst set": of(
            "held_out_high", share_up, "held_out_violations"
        ),
    }
    by_output = {"output": of("output")} | columns
    tables = [
        tabled("Held-out queries by layer and kv head", sets, place | columns),
        tabled("Held-out queries by output", outputs, by_output),
    ]
    return Section("Queries held out", _cut(text, outputs), (), tables, "held-out")


def _left_out(report: Mapping[str, Any]) -> Section | None:
    if all(each["coverage"] == 1 for each in report["options"]):
        return None
    total = report["totals"]
    lost = "what they lose is not in the outputs."
    if total["worst_left_out"] is not None:
        lost = f"the worst of them loses at most {up(total['worst_left_out'])} of its mass."
    text = [
        f"Coverage leaves out {count(total['rows_left_out'])} rows, of which nothing is promised; "
        f"{lost}"
        if total["rows_left_out"]
        else "Coverage was asked for, and leaves out no row."
    ]
    columns = {
        "layer": of("layer"),
        "promised": of("rows", count),
        "left out": of("rows_left_out", count),
        "worst of these": of("worst_left_out", up),
    }
    table = tabled("Left out", report["layers"], columns)
    return Section("Rows left out", text, (), [table], "left-out")


def _worst_rows(report: Mapping[str, Any]) -> Section | None:
    named = {"promised": "Promised", "held_out": "Held out", "left_out": "Left out"}
    columns = {
        "output": of("output"),
        "layer": of("layer"),
        "query head": of("head"),
        "query": of("query", count),
        "tail mass from": of("tail_mass_lower", down),
        "to": of("tail_mass_upper", up),
        "budget": of("eps", number),
    }
    worst = report["worst_rows"]
    tables = [
        tabled(f"{name}: the rows that lose most", worst[kind], columns)
        for kind, name in named.items()
        if worst[kind]
    ]
    if not tables:
        return None
    text = ["A compact proof names the worst promised row of each query head, not its query."]
    compact = any(row["query"] is None for row in report["worst_rows"]["promised"])
    return Section("Worst rows", text if compact else [], (), tables, "worst")


def _trouble(report: Mapping[str, Any]) -> Section:
    warned = [(each["output"], text) for each in report["outputs"] for text in each["warnings"]]
    failed = [(each["name"], each["kind"], each["message"]) for each in report["failures"]]
    unread = [(each["output"], each["message"]) for each in report["unreadable"]]
    tables = [
        Table(heads, rows[:MOST], caption, text)
        for caption, heads, rows, text in (
            ("Inputs that failed", ("input", "kind", "why"), failed, {"why", "kind"}),
            ("Inputs without an output", ("input",), [(n,) for n in report["missing"]], ()),
            ("Outputs that cannot be read", ("output", "why"), unread, {"why"}),
            ("Warnings of the job", ("output", "warning"), warned, {"warning"}),
            ("Notes", ("note",), [(note,) for note in report["notes"]], ()),
        )
        if rows
    ]
    text = [] if tables else ["None is known."]
    return Section("Failures and warnings", text, (), tables, "trouble")


def _hashes(report: Mapping[str, Any]) -> Section | None:
    if not report["outputs"]:
        return None
    text = [
        "SHA-256 of all that precedes the data, of each output and of the input it was made of (of "
        "each part, if that was in parts). The header of an output holds its certificate, and with "
        "it the SHA-256 of every tensor of both."
    ]
    columns: dict[str, Cell] = {
        "output": of("output"),
        "header of the output": of("header_sha256"),
        "header of its input": of("input_headers", " ".join),
    }
    table = tabled("Headers of outputs and inputs", report["outputs"], columns)
    return Section("Hashes", _cut(text, report["outputs"]), (), [table], "hashes")


def _unknown(report: Mapping[str, Any]) -> Section | None:
    if not report["unknown"]:
        return None
    proofs = [each["proof"] for each in report["outputs"]]
    rows = [
        [proof, count(proofs.count(proof)), text]
        for proof, texts in report["unknown"].items()
        for text in texts
    ]
    heads = ("proof", "outputs", "what they leave open")
    table = Table(heads, rows, "By level of proof", {heads[-1]})
    return Section("What is not known", [], (), [table], "unknown")


# ----------------------------------------------------------------------------------------- details


def _over(row: Row) -> str:
    if row["worst_tail_mass"] is None:
        return DASH
    if row["rows_over_budget"] is None:
        return "at least one: a compact proof does not tell how many"
    return of("rows_over_budget", count)(row)


def _cut(text: Sequence[str], rows: Sequence[object]) -> list[str]:
    if len(rows) <= MOST:
        return list(text)
    return [*text, f"Tables show the first {MOST} of {len(rows)}; certk report --json has all."]


# ------------------------------------------------------------------------------------------- plots


def kept_maps(sets: Sequence[Row]) -> list[str]:
    """Kept share, gap and worst tail mass over budget by layer and kv head."""
    series: list[tuple[str, float | None, dict[tuple[int, int], float]]] = [
        ("keys kept, mean share", 1.0, _grid(sets, lambda one: one["kept_share"])),
        ("gap over kept", None, _grid(sets, _gap)),
        ("worst tail mass over eps", None, _grid(sets, lambda one: one["worst_over_eps"])),
    ]
    # What is within its budget everywhere is all of one colour, and so are sets without a gap.
    beyond = any(number > 1 for number in series[2][2].values())
    gaps = any(number > 0 for number in series[1][2].values())
    shown = [each for each, tells in zip(series, (True, gaps, beyond), strict=True) if tells]
    layers = len({one["layer"] for one in sets})
    heads = len({one["head"] for one in sets})
    drawings = []
    for title, top, grid in shown:
        size = (min(WIDTH, 2.4 + 0.14 * heads), min(9.0, 0.26 * layers + 1.7))
        figure, axis = panels(figsize=size)
        heat_map(axis, grid, title, top)
        drawings.append(svg(figure))
    return drawings


def _gap(one: Row) -> float | None:
    return None if one["gap"] is None else one["gap"] / max(one["kept"], 1)


def _grid(sets: Sequence[Row], value: Any) -> dict[tuple[int, int], float]:
    found = {(one["layer"], one["head"]): value(one) for one in sets}
    return {place: number for place, number in found.items() if number is not None}


def saved_by_output(outputs: Sequence[Row]) -> str:
    """Plot the savings of outputs in rising order."""
    saved = np.sort([100 * each["saved"] for each in outputs])
    figure, axis = panels(figsize=(WIDTH, 2.8))
    place = np.arange(1, len(saved) + 1)
    axis.fill_between(place, 0, saved, step="mid", color=_COLOURS["promised"], alpha=0.25)
    axis.step(place, saved, where="mid", color=_COLOURS["promised"])
    if len(saved) <= 40:
        axis.plot(place, saved, "o", ms=4, color=_COLOURS["promised"])
    axis.axhline(0, color="#888", lw=0.8)
    axis.set(
        title="saved by each output", xlabel="outputs, in rising order",
        ylabel="per cent of the bytes", ylim=(min(0, saved[0] * 1.1), max(100, saved[-1])),
    )  # fmt: skip
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    return svg(figure)


def spread_plot(spread: Mapping[str, Any]) -> str:
    """Plot a histogram of rows by tail mass over budget, in groups of the promise.

    Bins beyond the budget are of unequal width, and drawn twice as wide as those within.
    """
    edges = spread["edges"]
    within = edges.index(1.0)
    widths = np.array([1.0] * within + [2.0] * (len(edges) - 1 - within))
    used = [kind for kind in _COLOURS if any(spread[kind])]
    if not any(any(spread[kind][within:]) for kind in used):
        widths = widths[:within]
    place = np.concatenate([[0.0], np.cumsum(widths)])
    figure, axis = panels(figsize=(WIDTH, 3.0))
    floor = np.zeros(len(widths))
    for kind in used:
        counts = np.array(spread[kind][: len(widths)], float)
        label = kind.replace("_", " ")
        axis.bar(place[:-1], counts, 0.94 * widths, floor, align="edge",
                 color=_COLOURS[kind], label=label)  # fmt: skip
        floor += counts
    ticks = [i for i in range(len(place)) if (i >= within and i % 2 == within % 2) or i % 8 == 0]
    names = ["more" if edges[i] is None else f"{edges[i]:g}" for i in ticks]
    axis.set_xticks(place[ticks], names, fontsize=9)
    axis.axvline(place[within], color="#222", lw=1, ls="--")
    axis.set(
        title="rows by what they lose (dashed: the budget)",
        xlabel="upper end of the tail mass over eps", ylabel="rows", xlim=(0, place[-1] + 0.3),
        ylim=(0, 1.06 * max(floor.max(), 1)),
    )  # fmt: skip
    if len(used) > 1:
        axis.legend(frameon=False, fontsize=9)
    return svg(figure)


def lost_by_layer(layers: Sequence[Row]) -> str:
    """Plot the worst tail mass of each layer beside its budgets."""
    shown = [each for each in layers if each["worst_tail_mass"] is not None]
    figure, axis = panels(figsize=(WIDTH, 2.8))
    place = np.arange(len(shown))
    worst = [each["worst_tail_mass"] for each in shown]
    axis.bar(place, worst, 0.7, color=_COLOURS["promised"], label="worst promised row")
    low = [each["eps_low"] for each in shown]
    same = all(each["eps_low"] == each["eps_high"] for each in shown)
    label = "budget" if same else "least budget of an output"
    axis.hlines(low, place - 0.45, place + 0.45, color="#222", lw=1.5, label=label)
    step = -(-len(shown) // 12)
    axis.set_xticks(place[::step], [str(each["layer"]) for each in shown[::step]])
    axis.set(
        title="worst tail mass of a promised row", xlabel="layer", ylabel="tail mass",
        ylim=(0, 1.28 * max(*worst, *low, 1e-300)),
    )  # fmt: skip
    axis.legend(frameon=False, fontsize=8, ncols=2, loc="upper right")
    return svg(figure)
