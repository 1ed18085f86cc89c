"""The report of a prune job as one self-contained HTML page.

Every figure is one of the report (`job_report`): nothing is computed here but units, shares and
roundings, and a bound is rounded to the side on which it stays one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR
from typing import Any

from .._display.numbers import percent_of_bound, rounded
from .._display.page import Section, Table, page
from .job_plots import kept_maps, lost_by_layer, saved_by_output, spread_plot

Row = Mapping[str, Any]
Marks = Callable[[str], str]
Cell = Callable[[Row], str]
"""The text of a row's cell in one column."""

DASH = "–"  # noqa: RUF001 - what is not known, or does not apply
FEW = 24
"""Tables of more rows than this are folded (`_display.page`), and of more than `MOST` are cut."""
MOST = 1000
NOTED = "*"
SHORT = 9
IN = ("in output",)


def job_page(report: Mapping[str, Any]) -> str:
    """Return the page; needs matplotlib."""
    sections = [
        _outcome(report),
        _asked(report),
        _sizes(report),
        _kept(report),
        _masses(report),
        _held_out(report),
        _left_out(report),
        _worst_rows(report),
        _trouble(report),
        _hashes(report),
        _unknown(report),
    ]
    total = report["totals"]
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


def count(value: int | None) -> str:
    """Format a count with thousands apart, or a dash if it is not known."""
    return DASH if value is None else f"{value:,}".replace(",", " ")


def up(value: float | None) -> str:
    """Format an upper bound: six digits, rounded up."""
    return DASH if value is None else rounded(value, ROUND_CEILING)


def down(value: float | None) -> str:
    """Format a lower bound: six digits, rounded down."""
    return DASH if value is None else rounded(value, ROUND_FLOOR)


def number(value: float | None) -> str:
    """Format a budget or another given number: as it is if that is short, else rounded up."""
    if value is None:
        return DASH
    text = repr(value)
    return text if len(text) <= SHORT else up(value)


def share(value: float | None) -> str:
    """Format a share that is no bound, in per cent."""
    return DASH if value is None else f"{100 * value:.1f} %"


def share_up(value: float | None) -> str:
    """Format an upper bound of a share or a probability, in per cent, rounded up to six digits."""
    return DASH if value is None else percent_of_bound(value, ROUND_CEILING)


def megabytes(value: int | None) -> str:
    """Bytes in millions, six digits."""
    return DASH if value is None else f"{value / 1e6:.6g} MB"


def seconds(value: float | None) -> str:
    """Format a time in seconds."""
    return DASH if value is None else f"{value:.1f} s"


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


def of(name: str, form: Callable[[Any], str] = str, mark: str = "") -> Cell:
    """Return the cells of a column: a figure by its name, formatted, and a mark behind it."""
    return lambda row: form(row[name]) + mark


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
        marks = _marks(report["outputs"])
        # With a size for a target, bounds are of a smaller budget than that of the sets.
        needed = None if total["gap"] is None else total["lower_bound"]
        rows += [
            ["keep-sets", count(total["sets"])],
            ["keys kept", f"{count(total['kept'])} of {count(total['total'])}"],
            ["share of the keys kept", share(total["kept_share"])],
            ["keys that any such sets need", count(needed) + marks("lower_bound")],
            ["gap: at most so many too many", count(total["gap"]) + marks("lower_bound")],
            ["rows promised", count(total["rows"])],
            ["worst tail mass of a promised row", _worst(total, marks)],
            ["promised rows over eps", _over(total, marks)],
            ["rows left out by coverage", count(total["rows_left_out"])],
            [
                "held-out queries, summed over sets",
                count(total["held_out_queries"]) + marks("held_out_queries"),
            ],
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
        "guard": of("guard"),
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
        "guard": of("guard_bytes", megabytes),
        "keys kept": of("kept", count),
        "of": of("total", count),
        "share": of("kept_share", share),
        "time of workers": of("seconds", seconds),
    }
    guard = f", {megabytes(total['guard_bytes'])} are guards" if total["guard_bytes"] else ""
    text = [
        f"{megabytes(total['cache_bytes'])} of keys and values became "
        f"{megabytes(total['output_bytes'])}: {share(total['saved'])} saved. Of what was written, "
        f"{megabytes(total['proof_bytes'])} are indices and proof{guard}. The inputs have "
        f"{megabytes(total['input_bytes'])} with all their tensors.",
    ]
    plots = [saved_by_output(outputs)] if len(outputs) > 1 else []
    tables = [tabled("By output", outputs, columns)]
    return Section("Sizes", _cut(text, outputs), plots, tables, "sizes")


def _kept(report: Mapping[str, Any]) -> Section | None:
    if not report["sets"]:
        return None
    marks = _marks(report["outputs"])
    text = [
        "The lower bounds are proven: no sets that keep the same promise (or that lose as little, "
        "where they are over budget) have fewer keys, so the gap is the most that a better choice "
        "could save. In blocks, a bound counts the keys that so many blocks hold at least."
    ]
    total = report["totals"]
    smaller = total["gap"] is None and total["lower_bound"] is not None
    # Beside fewer kept keys "at least needed" would read as a contradiction.
    needed = "needed at the smaller budget" if smaller else "at least needed"
    bound = marks("lower_bound")
    layer, head_of = {"layer": of("layer")}, {"kv head": of("head", head)}
    kept = {
        "sets": of("sets", count),
        "kept": of("kept", count),
        "of": of("total", count),
        "share": of("kept_share", share),
    }
    shares = {
        "least share": of("least_kept_share", share),
        "largest share": of("most_kept_share", share),
    }
    bounds: dict[str, Cell] = {
        needed: of("lower_bound", count, bound),
        "gap": of("gap", count, bound),
        "budget": budget,
        "worst tail mass": lambda row: _worst(row, marks),
        "in output": lambda row: row["worst_output"] or DASH,
    }
    tables = [
        tabled("By layer, all outputs together", report["layers"], layer | kept | bounds, IN),
        tabled(
            "By layer and kv head, all outputs together",
            report["sets"],
            layer | head_of | kept | shares | bounds,
            IN,
        ),
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
        "worst tail mass": lambda row: up(row["worst_tail_mass"]) + _mark(row, "worst_tail_mass"),
        "no less is possible than": lambda row: (
            down(row["worst_at_least"]) + _mark(row, "worst_at_least")
        ),
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
        rows = [
            [_bin(edges[i], edges[i + 1]), *(count(spread[kind][i]) for kind in
             ("promised", "held_out", "left_out"))]
            for i in range(len(edges) - 1)
        ]  # fmt: skip
        tables.append(
            Table(
                ("upper end over budget", "promised", "held out", "left out"),
                rows,
                "Rows by tail mass over budget",
            )
        )
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
    marks = _marks(report["outputs"])
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
    tables = [
        tabled("Held-out queries by layer and kv head", sets, place | _held_out_columns(marks)),
        tabled(
            "Held-out queries by output",
            outputs,
            {"output": of("output")} | _held_out_columns(None),
        ),
    ]
    return Section("Queries held out", _cut(text, outputs), (), tables, "held-out")


def _held_out_columns(marks: Marks | None) -> dict[str, Cell]:
    """Return the columns about held-out queries, with the marks of all outputs or of the row."""

    def marked(row: Row, text: str, name: str) -> str:
        return text + (_mark(row, name) if marks is None else marks(name))

    return {
        "queries held out": lambda row: marked(
            row, count(row["held_out_queries"]), "held_out_queries"
        ),
        "over budget": lambda row: marked(
            row,
            between(row["held_out_violations_low"], row["held_out_violations_high"]),
            "held_out_violations",
        ),
        "probability at most, in the worst set": lambda row: marked(
            row, share_up(row["held_out_high"]), "held_out_violations"
        ),
    }


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
    tables = []
    if report["failures"]:
        rows = [[each["name"], each["kind"], each["message"]] for each in report["failures"]]
        tables.append(
            Table(("input", "kind", "why"), rows[:MOST], "Inputs that failed", {"why", "kind"})
        )
    if report["missing"]:
        rows = [[name] for name in report["missing"]]
        tables.append(Table(("input",), rows[:MOST], "Inputs without an output"))
    if report["unreadable"]:
        rows = [[each["output"], each["message"]] for each in report["unreadable"]]
        tables.append(Table(("output", "why"), rows[:MOST], "Outputs that cannot be read", {"why"}))
    warned = [[each["output"], text] for each in report["outputs"] for text in each["warnings"]]
    if warned:
        tables.append(
            Table(("output", "warning"), warned[:MOST], "Warnings of the job", {"warning"})
        )
    if report["notes"]:
        tables.append(Table(("note",), [[each] for each in report["notes"]][:MOST], "Notes"))
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
    heads = ("output", "header of the output", "header of its input")
    rows = [
        [each["output"], each["header_sha256"], " ".join(each["input_headers"])]
        for each in report["outputs"]
    ]
    table = Table(heads, rows[:MOST], "Headers of outputs and inputs")
    return Section("Hashes", _cut(text, rows), (), [table], "hashes")


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


def _worst(row: Row, marks: Marks) -> str:
    return up(row["worst_tail_mass"]) + marks("worst_tail_mass")


def _over(row: Row, marks: Marks) -> str:
    if row["worst_tail_mass"] is None:
        return DASH
    if row["rows_over_budget"] is None:
        return "at least one: a compact proof does not tell how many"
    return count(row["rows_over_budget"]) + marks("rows_over_budget")


def _mark(output: Row, name: str) -> str:
    return NOTED if name in output["from_record"] else ""


def _marks(outputs: Sequence[Row]) -> Marks:
    """Mark a figure over all outputs that takes something from the record of a job."""
    borrowed = {name for each in outputs for name in each["from_record"]}

    def mark(name: str) -> str:
        return NOTED if name in borrowed else ""

    return mark


def _cut(text: Sequence[str], rows: Sequence[object]) -> list[str]:
    if len(rows) <= MOST:
        return list(text)
    return [*text, f"Tables show the first {MOST} of {len(rows)}; certk report --json has all."]
