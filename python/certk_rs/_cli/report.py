"""`certk report`: the outcome of a prune job, as a page, as tables and as data."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ..errors import CertkError
from .options import Argument, Option
from .terminal import print_json, print_table, progress_bar, say, warn

if TYPE_CHECKING:
    from .._files.location import Location
    from .._jobs.report import RowSink

OPTIONS = {
    "outs": Argument(metavar="OUT", help="The OUT of a prune job, or outputs of one."),
    "html": Option(metavar="FILE", help="Write one self-contained page with plots and tables."),
    "csv": Option(metavar="FILE", help="Write a table, a line per row (query)."),
    "parquet": Option(metavar="FILE", help="Write the same table as Parquet (needs pyarrow)."),
    "sets": Option("--sets", help="Tables have a line per keep-set, not per row."),
    "force": Option("--force", help="Replace files that exist."),
}


def report(
    outs: list[str],
    html: str | None = None,
    csv: str | None = None,
    parquet: str | None = None,
    sets: bool = False,
    force: bool = False,
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """Tell what a prune job has done, from its outputs.

    Figures are those of the certificates; what a job has noted beside its outputs (times, memory,
    failures) is told where it is there. Nothing is verified: certk verify does that. Exit code 1 if
    an output cannot be read.
    """
    from .._display.page import pyplot
    from .._files.new_file import new_file
    from .._jobs.export import table_files
    from .._jobs.job_page import job_page
    from .._jobs.report import job_report

    if sets and csv is None and parquet is None:
        raise CertkError("--sets is about tables: give --csv FILE or --parquet FILE with it")
    page = _new(html, force)
    if page is not None:
        pyplot()
    tables = (_new(csv, force), _new(parquet, force))
    places = [place for place in (page, *tables) if place is not None]
    if places:
        _check_apart(places, outs)
    with ExitStack() as stack:
        sinks: list[RowSink] = []
        if tables != (None, None):
            sinks = [stack.enter_context(table_files(*tables, sets=sets, replace=force))]
        with progress_bar(quiet) as progress:
            found = job_report(outs, sinks, progress)
    if page is not None:
        with new_file(page, replace=force) as file:
            file.write_at(0, job_page(found).encode())
            file.commit()
    for bad in found["unreadable"]:
        warn(f"not read: {bad['message']}")
    if as_json:
        print_json(found)
    else:
        _show(found)
        for place in (page, *tables):
            if place is not None:
                say(f"written to {place}")
    return 1 if found["unreadable"] else 0


def _new(path: str | None, force: bool) -> Location | None:
    """Return a place to write to; a `CertkError` if that is known to fail, before any work."""
    from .._files.location import locate

    if path is None:
        return None
    place = locate(path)
    if place.is_local:
        if place.is_directory() or not place.path.absolute().parent.is_dir():
            raise CertkError(f"{place} is a directory, or in none: give the name of a file in one")
        if not force and place.exists():
            raise CertkError(
                f"{place} exists already: nothing is overwritten; choose another name or --force"
            )
    return place


def _check_apart(places: list[Location], outs: list[str]) -> None:
    """Raise `CertkError` if two reports would have one place, or one that of an output."""
    from .._jobs.folder import find_outputs

    outputs = {
        source.location.key(): source.location
        for found in find_outputs(outs)
        for source in found.sources
    }
    for at, place in enumerate(places):
        if place.place in [other.place for other in places[:at]]:
            raise CertkError(f"{place} is given twice: give each table and page a name of its own")
        if place.exists() and place.key() in outputs:
            raise CertkError(
                f"{place} is an output that the report is about, and is not replaced by it: choose "
                "another name"
            )


_HEADS = ("layer", "sets", "kept", "of", "share", "needed", "gap", "eps", "worst tail mass")
# What goes first where there is no room: sets, of, eps, gap, share, needed.
_BEYOND = (1, 3, 7, 6, 4, 5)


def _show(found: dict[str, Any]) -> None:
    from .._jobs.job_page import count, megabytes, share, up

    total = found["totals"]
    for job in found["jobs"]:
        if job["state"] != "ended":
            say(f"{job['out']}: the job is {job['state']}: certk prune --resume goes on with it")
    if total["outputs"]:
        needed = f"; at least {count(total['lower_bound'])} are needed" if _bounds(total) else ""
        worst = f"worst tail mass {up(total['worst_tail_mass'])} of {count(total['rows'])} rows"
        worst = worst if total["rows"] else "no query was judged"
        say(
            f"{count(total['outputs'])} outputs: kept {count(total['kept'])} of "
            f"{count(total['total'])} keys ({share(total['kept_share'])}{needed}), {worst}"
        )
        say(
            f"{megabytes(total['cache_bytes'])} of keys and values are "
            f"{megabytes(total['output_bytes'])} ({share(total['saved'])} saved)"
        )
        if total["held_out_queries"]:
            say(_held_out(total, found["options"]))
        print_table(_HEADS, [_cells(layer) for layer in found["layers"]], drop=_BEYOND)
    borrowed = sorted({name for each in found["outputs"] for name in each["from_record"]})
    if borrowed:
        say(f"taken from the record of the job, not from outputs: {', '.join(borrowed)}")
    for failed in found["failures"]:
        say(f"failed: {failed['message']}")
    if found["missing"]:
        say(f"{len(found['missing'])} inputs have no output (first: {found['missing'][0]})")
    for note in found["notes"]:
        say(f"note: {note}")


def _held_out(total: dict[str, Any], options: list[dict[str, Any]]) -> str:
    """Say what is known of queries that sets were made without."""
    from .._jobs.job_page import between, count

    lost = between(total["held_out_violations_low"], total["held_out_violations_high"])
    text = (
        f"{lost} of {count(total['held_out_queries'])} queries set aside, summed over sets, may "
        "lose more than the budget to sets made without them"
    )
    if any(each["holdout"] for each in options):
        return text
    return f"{text}; the sets of the outputs are made for all queries"


def _bounds(figures: dict[str, Any]) -> bool:
    """Tell whether bounds are of the sets' budgets; where a size was asked for, of smaller ones."""
    return figures["gap"] is not None


def _cells(layer: dict[str, Any]) -> list[str]:
    from .._jobs.job_page import budget, count, share, up

    return [
        str(layer["layer"]),
        count(layer["sets"]),
        count(layer["kept"]),
        count(layer["total"]),
        share(layer["kept_share"]),
        count(layer["lower_bound"] if _bounds(layer) else None),
        count(layer["gap"]),
        budget(layer),
        up(layer["worst_tail_mass"]),
    ]
