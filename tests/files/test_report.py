"""The report of a job: its figures are those of the outputs, and its page shows nothing else."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from certk_rs import CertkError, prune
from certk_rs._files.location import locate
from certk_rs._files.tensor_file import SafetensorsFile
from certk_rs._jobs.export import table_files
from certk_rs._jobs.job_page import job_page
from certk_rs._jobs.report import EDGES, MOST, job_report
from certk_rs._jobs.results import JobResult
from cli_fixtures import forge, write_cache
from forgeries import field, option
from page_reader import Page, tables_of

KINDS = ("promised", "held_out", "left_out")
NONE = np.empty(0, int)


Make = Callable[..., Path]


@pytest.fixture(scope="module")
def make_job(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return what prunes some small caches, once of each kind, and copies the outputs.

    With `aside` these are changed to what the format allows and no job writes any more: sets that
    were made without some queries, which are in the output and not promised.
    """
    made: dict[str, Path] = {}

    def make(files: int = 3, eps: Any = 0.1, *, aside: bool = False, **options: Any) -> Path:
        kind = f"{files} {eps} {aside} {options}"
        if kind not in made:
            made[kind] = folder = tmp_path_factory.mktemp("made")
            for i in range(files):
                write_cache(folder / "in" / f"c{i}.safetensors", seed=i, m=12, n=40)
            result = prune(folder / "in", folder / "out", eps, **{"proof": "full"} | options)
            assert not result.failures
            for report in result.outputs if aside else ():
                set_aside(Path(report.target))
        return shutil.copytree(made[kind] / "out", tmp_path_factory.mktemp("job") / "out")

    return make


def set_aside(path: Path) -> None:
    def edit(arrays: dict[str, np.ndarray]) -> None:
        for i in (0, 1):
            arrays[f"layers.{i}.held_out"] = held_out = np.array([2, 7, 9])
            if f"layers.{i}.tail_mass_upper" in arrays:
                upper = arrays[f"layers.{i}.tail_mass_upper"]
                upper[:, held_out] = np.minimum(1, 3 * upper[:, held_out])
            elif f"layers.{i}.worst_tail_mass" in arrays:
                arrays[f"layers.{i}.violations"] = np.array([0, 1, 2, 3 - i])

    forge(path, edit, option("holdout", 0.25).change)


@pytest.fixture(scope="module")
def job(make_job: Make) -> Path:
    """A job with a full proof whose second output leaves out rows, and whose rows vary."""
    out = make_job(aside=True, coverage=0.9)

    def leave_out(arrays: dict[str, np.ndarray]) -> None:
        for i in (0, 1):
            promised = np.flatnonzero(rows_of(arrays, i, NONE) == 0)
            arrays[f"layers.{i}.left_out"] = promised[3:5]

    forge(out / "c1.safetensors", leave_out)
    return out


def rows_of(arrays: dict[str, np.ndarray], i: int, left_out: np.ndarray) -> np.ndarray:
    """Return the kind of each row, flat, as in the format: 0 promised, 1 held out, 2 left out."""
    heads, m = arrays[f"layers.{i}.tail_mass_upper"].shape
    kinds = np.zeros((heads, m), int)
    kinds.reshape(-1)[left_out] = 2
    kinds[:, arrays[f"layers.{i}.held_out"]] = 1
    return kinds.reshape(-1)


def all_rows(out: Path) -> list[tuple[str, int, int, int, str, float, float]]:
    """Every row of every output, read by another reader."""
    found = []
    for path in sorted(out.glob("*.safetensors")):
        arrays = load_file(path)
        for i in (0, 1):
            kinds = rows_of(arrays, i, arrays.get(f"layers.{i}.left_out", NONE))
            upper = arrays[f"layers.{i}.tail_mass_upper"]
            lower = arrays[f"layers.{i}.tail_mass_lower"]
            for row, kind in enumerate(kinds):
                head, query = divmod(row, upper.shape[1])
                masses = float(lower[head, query]), float(upper[head, query])
                found.append((path.name, i, head, query, KINDS[kind], *masses))
    return found


# ------------------------------------------------------------------------------------- the figures


def check_told(report: dict[str, Any], told: JobResult) -> None:
    """Hold the figures of each output against those that the job told."""
    for each, said in zip(report["outputs"], told.outputs, strict=True):
        count, layers = said.count, said.layers
        assert (each["kept"], each["total"]) == (count.kept, count.total)
        assert (each["lower_bound"], each["gap"]) == (count.lower_bound, count.gap)
        assert each["worst_tail_mass"] == max(layer.worst_tail_mass for layer in layers)
        assert (each["rows"], each["rows_over_budget"]) == (count.rows, count.rows_over_budget)
        assert each["held_out_queries"] == sum(layer.held_out.queries for layer in layers) > 0
        violations = sum(layer.held_out.violations for layer in layers)
        assert each["held_out_violations_low"] == violations
        assert each["held_out_violations_high"] == violations
        sets = [one.held_out for layer in layers for one in layer.sets]
        assert each["held_out_high"] == max(one.high for one in sets)


@pytest.mark.parametrize(
    "options",
    [
        *({"granularity": each} for each in ("head", "layer", "token")),
        *({"block_size": 8}, {"max_keep": 9}),
    ],
    ids=str,
)
def test_figures_are_those_that_the_job_told(tmp_path: Path, options: dict[str, Any]) -> None:
    write_cache(tmp_path / "in" / "a.safetensors", seed=1, m=12, n=40)
    write_cache(tmp_path / "in" / "b.safetensors", seed=2, m=9, n=33, dtype="F32")
    told = prune(tmp_path / "in", tmp_path / "out", 0.1, proof="full", holdout=0.3, **options)
    report = job_report([str(tmp_path / "out")])
    assert report["failures"] == report["missing"] == report["unreadable"] == []
    check_told(report, told)
    for each, said in zip(report["outputs"], told.outputs, strict=True):
        assert each["output"] == said.name
        for name in ("cache_bytes", "output_bytes", "proof_bytes", "saved", "seconds"):
            assert each[name] == getattr(said, name), name
        assert each["output_bytes"] == (tmp_path / "out" / said.name).stat().st_size
        assert each["header_sha256"] == said.header_sha256
        assert each["from_record"] == ["held_out_queries", "held_out_violations"]
    page = job_page(report)
    assert "the sets in the outputs were then made for all queries" in page
    rows = tables_of(page)["Held-out queries by output"].rows
    assert [row[1] for row in rows] == [
        f"{each['held_out_queries']}*" for each in report["outputs"]
    ]
    [told_of] = report["jobs"]
    assert told_of["state"] == "ended"
    assert told_of["seconds"] > 0
    assert told_of["peak_memory"] > 1_000_000


def test_figures_are_those_of_the_tensors(job: Path) -> None:
    report = job_report([str(job)])
    rows = all_rows(job)
    promised = [row for row in rows if row[4] == "promised"]
    total = report["totals"]
    assert total["rows"] == len(promised)
    assert total["rows_left_out"] == sum(row[4] == "left_out" for row in rows) >= 4
    assert total["worst_tail_mass"] == max(row[6] for row in promised)
    assert total["worst_left_out"] == max(row[6] for row in rows if row[4] == "left_out")
    kept = bound = 0
    for path in job.glob("*.safetensors"):
        arrays = load_file(path)
        kept += sum(len(arrays[f"layers.{i}.indices"]) for i in (0, 1))
        bound += sum(int(arrays[f"layers.{i}.lower_bound"].sum()) for i in (0, 1))
    assert (total["kept"], total["lower_bound"]) == (kept, bound)
    assert total["total"] == 3 * 2 * 2 * 40
    for layer in report["layers"]:
        own = [row for row in promised if row[1] == layer["layer"]]
        assert layer["worst_tail_mass"] == max(row[6] for row in own)
        [worst] = [row for row in own if row[6] == layer["worst_tail_mass"]][:1]
        assert layer["worst_output"] == worst[0]
    for one in report["sets"]:
        own = [row for row in promised if row[1] == one["layer"] and row[2] // 2 == one["head"]]
        assert one["rows"] == len(own)
        assert one["worst_tail_mass"] == max(row[6] for row in own)
        lost = {
            (row[0], row[3])
            for row in rows
            if row[4] == "held_out" and row[6] > 0.1
            if (row[1], row[2] // 2) == (one["layer"], one["head"])
        }
        assert one["held_out_violations_low"] == one["held_out_violations_high"] == len(lost)


def test_the_worst_rows_are_the_worst(job: Path) -> None:
    report = job_report([str(job)])
    for kind in KINDS:
        of_kind = [row for row in all_rows(job) if row[4] == kind]
        expected = sorted((row[6] for row in of_kind), reverse=True)[:MOST]
        found = report["worst_rows"][kind]
        assert [row["tail_mass_upper"] for row in found] == expected
        for row in found:
            place = (row["output"], row["layer"], row["head"], row["query"], kind)
            assert (*place, row["tail_mass_lower"], row["tail_mass_upper"]) in of_kind
            assert row["eps"] == 0.1


def test_the_spread_counts_every_row_once_and_none_over_budget_as_within(job: Path) -> None:
    spread = job_report([str(job)])["tail_masses"]
    assert spread["edges"][-1] is None
    for kind in KINDS:
        uppers = [Fraction(row[6]) for row in all_rows(job) if row[4] == kind]
        eps = Fraction(0.1)
        for i, count in enumerate(spread[kind]):
            low, high = EDGES[i], EDGES[i + 1]
            above = [u for u in uppers if i == 0 or u / eps > Fraction(low)]
            within = [u for u in above if math.isinf(high) or u / eps <= Fraction(high)]
            # Quotients beside an edge may fall to either side of it, but not beside the budget.
            near = sum(
                abs(u / eps - Fraction(edge)) < 1e-12 and edge != 1
                for u in uppers
                for edge in (low, high)
                if not math.isinf(edge)
            )
            assert abs(count - len(within)) <= near
    assert spread["rows"] == sum(sum(spread[kind]) for kind in KINDS) == len(all_rows(job))


def test_outputs_alone_are_enough(job: Path, tmp_path: Path) -> None:
    whole = job_report([str(job)])
    shutil.copytree(job, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / ".certk")
    alone = job_report([str(tmp_path / "out")])
    assert alone["jobs"] == []
    for name in ("layers", "sets", "tail_masses", "worst_rows", "options"):
        assert alone[name] == whole[name]
    assert alone["totals"] == {**whole["totals"], "seconds": None}
    assert all(each["seconds"] is None for each in alone["outputs"])
    one = job_report([str(job / "c0.safetensors")])
    assert one["totals"]["outputs"] == 1
    assert one["missing"] == []


@pytest.mark.parametrize("proof", ["compact", "none"])
def test_what_a_proof_does_not_hold_is_unknown_or_marked(make_job: Make, proof: str) -> None:
    full = job_report([str(make_job())])
    out = make_job(proof=proof)
    marked = job_report([str(out)])
    shutil.rmtree(out / ".certk")
    unknown = job_report([str(out)])
    missing = ["lower_bound", "worst_tail_mass", "rows_over_budget"]
    for name in ("kept", "rows", "rows_left_out"):
        assert unknown["totals"][name] == marked["totals"][name] == full["totals"][name]
    for name in missing if proof == "none" else []:
        assert unknown["totals"][name] is None
        assert marked["totals"][name] == full["totals"][name]
    if proof == "none":
        assert unknown["worst_rows"]["promised"] == []
        assert all(set(each["from_record"]) == set(missing) for each in marked["outputs"])
        assert "*" in tables_of(job_page(marked))["By layer, all outputs together"].rows[0][5]
    else:
        for name in missing:
            assert unknown["totals"][name] == full["totals"][name]
        assert all(row["query"] is None for row in unknown["worst_rows"]["promised"])
    assert unknown["tail_masses"]["rows"] == 0
    assert list(unknown["unknown"]) == [proof]
    job_page(unknown)
    assert all(each["from_record"] == [] for each in unknown["outputs"])


@pytest.mark.parametrize("proof", ["full", "compact", "none"])
def test_a_trial_is_told_from_the_record_alone(make_job: Make, proof: str) -> None:
    full = job_report([str(make_job(holdout=0.25))])
    out = make_job(proof=proof, holdout=0.25)
    told = job_report([str(out)])
    names = [
        f"held_out_{name}" for name in ("queries", "violations_low", "violations_high", "high")
    ]
    for name in names:
        assert told["totals"][name] == full["totals"][name] > 0
    assert all("held_out_queries" in each["from_record"] for each in told["outputs"])
    assert told["totals"]["rows"] == 3 * 2 * 4 * 12
    shutil.rmtree(out / ".certk")
    alone = job_report([str(out)])
    assert [alone["totals"][name] for name in names] == [0, None, None, None]
    assert "Queries held out" not in job_page(alone)


def test_sets_that_share_heads_leave_open_how_many_queries_violate(make_job: Make) -> None:
    """Two query heads share a set: a compact proof counts violations in each, not in either."""
    out = make_job(aside=True, proof="compact")
    total = job_report([str(out)])["totals"]
    assert total["held_out_queries"] == 3 * 2 * 2 * 3
    assert total["held_out_violations_low"] == 3 * (1 + 3 + 1 + 2)
    assert total["held_out_violations_high"] == 3 * (1 + 3 + 1 + 3)
    none = job_report([str(make_job(aside=True, proof="none"))])["totals"]
    assert none["held_out_queries"] == 3 * 2 * 2 * 3
    assert none["held_out_violations_high"] is None


def test_a_record_about_another_output_is_not_used(make_job: Make) -> None:
    out = make_job(files=2, proof="none")
    forge(out / "c0.safetensors", say=field(library="other").change)
    report = job_report([str(out)])
    assert report["outputs"][0]["seconds"] is None
    assert report["outputs"][0]["from_record"] == []
    assert report["outputs"][1]["seconds"] is not None
    assert report["totals"]["worst_tail_mass"] is None
    assert any("another output" in note for note in report["notes"])


# ------------------------------------------------------------------------------------ bad outputs


def flip_a_mass(path: Path) -> None:
    """Change one bit of a mass, and nothing else: it is a mass still, but not the one hashed."""
    data = bytearray(path.read_bytes())
    with SafetensorsFile(path) as file:
        entry = file.header.entries["layers.1.tail_mass_upper"]
        data[len(file.header.raw) + entry.start] ^= 1
    path.write_bytes(data)


def assign(name: str, at: Any, value: Any) -> Callable[[Path], None]:
    """Return what changes one number of a tensor, and the hashes with it."""
    return lambda path: forge(path, lambda arrays: arrays[name].__setitem__(at, value))


BROKEN: dict[str, Any] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-5]),
    "text": lambda path: path.write_text("no safetensors"),
    "a bit": flip_a_mass,
    "bound above what is kept": assign("layers.0.lower_bound", 1, 41),
    "a cache": lambda path: path.unlink() or write_cache(path),
    "mass above 1": assign("layers.1.tail_mass_upper", (0, 0), 2.0),
    "mass NaN": assign("layers.1.tail_mass_upper", (0, 0), np.nan),
    "lower above upper": assign("layers.1.tail_mass_lower", (0, 0), 1.0),
    "indptr": assign("layers.1.indptr", 1, -1),
    "held out twice": lambda path: forge(
        path, lambda a: a["layers.1.held_out"].__setitem__(1, a["layers.1.held_out"][0])
    ),
    "bound below 0": assign("layers.1.lower_bound", 0, -1),
    "rows of weights": assign("layers.1.lower_bound_rows", 0, 10**9),
    "a weight of 0": assign("layers.1.lower_bound_weights", 0, 0.0),
    "too few budgets": lambda path: forge(path, say=field(eps={"0": [0.1], "1": [0.1]}).change),
}


@pytest.mark.parametrize("how", BROKEN)
def test_an_output_that_cannot_be_believed_is_named_and_not_counted(
    make_job: Make, tmp_path: Path, how: str
) -> None:
    out = make_job(files=2, aside=True)
    shutil.copytree(out, tmp_path / "one")
    (tmp_path / "one" / "c0.safetensors").unlink()
    shutil.rmtree(tmp_path / "one" / ".certk")
    BROKEN[how](out / "c0.safetensors")
    report = job_report([str(out)])
    [bad] = report["unreadable"]
    assert bad["output"] == "c0.safetensors"
    assert "\n" not in bad["message"]
    one = job_report([str(tmp_path / "one")])
    for name in ("layers", "sets", "tail_masses", "worst_rows"):
        assert report[name] == one[name]
    assert bad["message"] in tables_of(job_page(report))["Outputs that cannot be read"].rows[0]


def test_failures_and_what_is_missing_are_told(tmp_path: Path) -> None:
    write_cache(tmp_path / "in" / "a.safetensors")
    write_cache(tmp_path / "in" / "c.safetensors")
    (tmp_path / "in" / "b.safetensors").write_text("nonsense")
    result = prune(tmp_path / "in", tmp_path / "out", 0.1)
    (tmp_path / "out" / "c.safetensors").unlink()
    report = job_report([str(tmp_path / "out")])
    assert [each["name"] for each in report["failures"]] in (["b.safetensors"], [])
    assert len(result.failures) == 1
    assert report["missing"] == ["c.safetensors"]
    tables = tables_of(job_page(report))
    assert tables["Inputs without an output"].rows == [["c.safetensors"]]


# --------------------------------------------------------------------------------------- the page


def exact(text: str) -> Fraction:
    """A number as it is shown, marks and units aside."""
    found = re.fullmatch(r"(-?[0-9][0-9 ]*(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)( MB| %| s)?\*?", text)
    assert found, text
    factor = {" MB": Fraction(10**6), " %": Fraction(1, 100)}.get(found[2] or "", Fraction(1))
    return Fraction(found[1].replace(" ", "")) * factor


def check(shown: str, value: Any, how: str) -> None:
    """Hold one cell against the number it stands for."""
    if value is None:
        assert shown.rstrip("*") == "–"  # noqa: RUF001
    elif how == "text":
        assert shown == str(value)
    elif how == "exact":
        assert exact(shown) == Fraction(repr(value))
    elif how == "near":
        slack = {"%": Fraction(5001, 10**7), "s": Fraction(5001, 10**5)}.get(shown[-1])
        assert abs(exact(shown) - Fraction(value)) <= (slack or Fraction(value) / 10**5)
    else:  # a bound: on its side, and by no more than the sixth digit
        apart = (exact(shown) - Fraction(value)) * (1 if how == "up" else -1)
        assert 0 <= apart <= max(Fraction(value) / 10**4, Fraction(1, 10**40))


# What a column of the page shows: a figure of the report, and how it is rounded.
SHOWN = {
    "layer": ("layer", "exact"), "sets": ("sets", "exact"), "kept": ("kept", "exact"),
    "of": ("total", "exact"), "share": ("kept_share", "near"), "kv head": ("head", "exact"),
    "at least needed": ("lower_bound", "exact"), "gap": ("gap", "exact"),
    "worst tail mass": ("worst_tail_mass", "up"), "in output": ("worst_output", "text"),
    "least share": ("least_kept_share", "near"), "largest share": ("most_kept_share", "near"),
    "output": ("output", "text"), "keys and values before": ("cache_bytes", "near"),
    "after, proof included": ("output_bytes", "near"), "saved": ("saved", "near"),
    "indices, proof": ("proof_bytes", "near"), "keys kept": ("kept", "exact"),
    "time of workers": ("seconds", "near"), "queries held out": ("held_out_queries", "exact"),
    "over budget": ("held_out_violations_low", "exact"),
    "probability at most, in the worst set": ("held_out_high", "up"),
    "query head": ("head", "exact"), "query": ("query", "exact"),
    "tail mass from": ("tail_mass_lower", "down"), "to": ("tail_mass_upper", "up"),
    "header of the output": ("header_sha256", "text"), "promised": ("rows", "exact"),
    "left out": ("rows_left_out", "exact"), "worst of these": ("worst_left_out", "up"),
    "directory": ("out", "text"), "state": ("state", "text"), "inputs": ("inputs", "exact"),
    "time of its last run": ("seconds", "near"), "most memory": ("peak_memory", "near"),
    "outputs": ("outputs", "exact"), "one set per": ("granularity", "text"),
    "eps": ("eps_low", "exact"), "coverage": ("coverage", "exact"),
    "hold out": ("holdout", "exact"), "proof": ("proof", "text"),
    "block size": ("block_size", "exact"), "max keep": ("max_keep", "exact"),
}  # fmt: skip


def test_every_figure_of_the_page_is_in_the_json(job: Path) -> None:
    report = json.loads(json.dumps(job_report([str(job)]), allow_nan=False))
    tables = tables_of(job_page(report))
    expected: dict[str, tuple[list[dict[str, Any]], int]] = {
        "By layer, all outputs together": (report["layers"], 10),
        "By layer and kv head, all outputs together": (report["sets"], 13),
        "By output": (report["outputs"], 9),
        "Held-out queries by layer and kv head": (report["sets"], 6),
        "Held-out queries by output": (report["outputs"], 4),
        "Left out": (report["layers"], 4),
        "Headers of outputs and inputs": (report["outputs"], 2),
        "Jobs, by their own record": (report["jobs"], 5),
        "By the certificates of the outputs": (report["options"], 8),
        "Promised: the rows that lose most": (report["worst_rows"]["promised"], 7),
        "Held out: the rows that lose most": (report["worst_rows"]["held_out"], 7),
        "Left out: the rows that lose most": (report["worst_rows"]["left_out"], 7),
    }
    for caption, (rows, count) in expected.items():
        table = tables.pop(caption)
        assert len(table.rows) == len(rows) > 0, caption
        budget = {"budget": ("eps" if "rows that" in caption else "eps_low", "exact")}
        columns = [(SHOWN | budget).get(head) for head in table.heads]
        assert len(columns) - columns.count(None) == count, (caption, table.heads)
        for cells, row in zip(table.rows, rows, strict=True):
            for column, cell in zip(columns, cells, strict=True):
                if column is not None:
                    check(cell, row[column[0]], column[1])
    spread = tables.pop("Rows by tail mass over budget")
    for i, kind in enumerate(KINDS):
        assert [int(row[i + 1].replace(" ", "")) for row in spread.rows] == (
            report["tail_masses"][kind]
        )
    outcome = dict(tables.pop("").rows)
    total = report["totals"]
    for name, key, how in [
        ("outputs", "outputs", "exact"),
        ("keep-sets", "sets", "exact"),
        ("share of the keys kept", "kept_share", "near"),
        ("keys that any such sets need", "lower_bound", "exact"),
        ("gap: at most so many too many", "gap", "exact"),
        ("rows promised", "rows", "exact"),
        ("worst tail mass of a promised row", "worst_tail_mass", "up"),
        ("promised rows over eps", "rows_over_budget", "exact"),
        ("rows left out by coverage", "rows_left_out", "exact"),
        ("held-out queries, summed over sets", "held_out_queries", "exact"),
    ]:
        check(outcome[name], total[key], how)
    # What is left has no figures of outputs.
    words = {"As the job was asked", "By level of proof", "Notes", "Warnings of the job"}
    assert tables.keys() <= words


def test_a_bound_that_is_shown_is_still_a_bound(job: Path) -> None:
    report = job_report([str(job)])
    report["totals"]["worst_tail_mass"] = 0.1000000001
    report["totals"]["held_out_high"] = 0.1000000001
    report["sets"][0]["held_out_high"] = 0.2500000001
    report["worst_rows"]["promised"][0] |= {"tail_mass_lower": 0.0999999999}
    tables = tables_of(job_page(report))
    assert dict(tables[""].rows)["worst tail mass of a promised row"] == "0.100001"
    assert tables["Held-out queries by layer and kv head"].rows[0][-1] == "25.0001 %"
    assert tables["Promised: the rows that lose most"].rows[0][4] == "0.0999999"


def test_the_page_stands_alone(job: Path) -> None:
    text = job_page(job_report([str(job)]))
    page = Page(text)
    assert page.fetched == []
    assert page.tags.count("svg") == 6
    assert len(page.ids) == len(set(page.ids))
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', text)) <= set(page.ids)
    assert not re.search(r"<script|@import|url\((?!#)", text)
    assert any("certk verify" in each for each in [*Page(text).paragraphs, text])


def test_foreign_text_is_shown_and_not_obeyed(make_job: Make) -> None:
    out = make_job(files=1)
    nasty = "<img src=x onerror=alert(1)>\x1b[31m\u202e.safetensors"
    (out / "c0.safetensors").rename(out / nasty)
    (out / ("<b>bad\n" + ".safetensors")).write_text("nonsense")
    report = job_report([str(out)])
    text = job_page(report)
    page = Page(text)
    assert "img" not in page.tags
    assert page.tags.count("b") == 0
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e]", text)
    assert r"\x1b[31m\u202e" in report["outputs"][0]["output"]
    assert all("\n" not in each["message"] for each in report["unreadable"])


def test_hundreds_of_outputs_make_a_page_that_opens(make_job: Make) -> None:
    out = make_job(files=1, aside=True)
    whole = (out / "c0.safetensors").read_bytes()
    for i in range(1, 300):
        (out / f"a-name-of-some-length-{i:05}.safetensors").write_bytes(whole)
    report = job_report([str(out)])
    text = job_page(report)
    assert report["totals"]["outputs"] == 300
    assert report["sets"][0]["sets"] == 300
    assert len(text) < 1_000_000
    assert len(report["worst_rows"]["promised"]) == MOST
    folded = text.count("<details>")
    assert folded >= 3  # sizes, held out, hashes
    assert len(re.findall(r"a-name", re.sub(r"<details>.*?</details>", "", text, flags=re.S))) < 50


# ------------------------------------------------------------------------------------- the tables


def export(out: Path, folder: Path, sets: bool) -> tuple[Path, Path]:
    folder.mkdir(exist_ok=True)
    places = folder / "t.csv", folder / "t.parquet"
    with table_files(*(locate(p) for p in places), sets=sets, replace=False) as table:
        job_report([str(out)], [table])
    return places


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_rows_come_back_from_the_tables(job: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    csv_file, parquet_file = export(job, tmp_path, sets=False)
    # Many small outputs make few groups of rows.
    assert parquet.ParquetFile(parquet_file).num_row_groups == 1
    arrow = parquet.read_table(parquet_file).to_pylist()
    text = read_csv(csv_file)
    expected = all_rows(job)
    assert len(arrow) == len(text) == len(expected)
    for row, cells, (name, layer, head, query, kind, lower, upper) in zip(
        arrow, text, expected, strict=True
    ):
        assert (row["output"], row["layer"], row["head"]) == (name, layer, head)
        assert (row["query"], row["kind"], row["group"]) == (query, kind, head // 2)
        assert (row["tail_mass_lower"], row["tail_mass_upper"]) == (lower, upper)
        assert row["eps"] == 0.1
        assert list(cells) == list(row)
        assert {k: type(row[k])(cells[k]) for k in row} == row
    for path in job.glob("*.safetensors"):
        arrays = load_file(path)
        for i in (0, 1):
            own = [r for r in arrow if r["output"] == path.name and r["layer"] == i]
            weights = {
                r["head"] * 12 + r["query"]: np.float32(r["weight"]) for r in own if r["weight"]
            }
            rows = arrays[f"layers.{i}.lower_bound_rows"].tolist()
            stored = arrays[f"layers.{i}.lower_bound_weights"].tolist()
            assert weights == dict(zip(rows, stored, strict=True))


def test_sets_come_back_from_the_tables(job: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    csv_file, parquet_file = export(job, tmp_path, sets=True)
    arrow, text = parquet.read_table(parquet_file).to_pylist(), read_csv(csv_file)
    report = job_report([str(job)])
    assert len(arrow) == len(text) == report["totals"]["sets"]
    for name in ("kept", "total", "lower_bound", "gap", "rows", "held_out_queries"):
        assert sum(row[name] for row in arrow) == report["totals"][name]
        assert sum(int(cells[name]) for cells in text) == report["totals"][name]
    assert max(row["worst_tail_mass"] for row in arrow) == report["totals"]["worst_tail_mass"]
    assert max(row["held_out_high"] for row in arrow) == report["totals"]["held_out_high"]
    for row, cells in zip(arrow, text, strict=True):
        same = {k: None if cells[k] == "" else type(row[k])(cells[k]) for k in row}
        assert same == row


@pytest.mark.parametrize("proof", ["compact", "none"])
def test_tables_of_lesser_proofs_leave_empty_what_is_not_known(
    make_job: Make, tmp_path: Path, proof: str
) -> None:
    out = make_job(files=1, proof=proof, aside=True)
    csv_file, _ = export(out, tmp_path / "tables", sets=False)
    rows = read_csv(csv_file)
    assert len(rows) == 2 * 4 * 12
    assert {row["tail_mass_lower"] for row in rows} == {""}
    arrays = load_file(out / "c0.safetensors")
    for row in rows:
        if proof == "none":
            assert row["tail_mass_upper"] == row["weight"] == ""
        elif row["kind"] == "promised":
            worst = arrays[f"layers.{row['layer']}.worst_tail_mass"][int(row["head"])]
            assert float(row["tail_mass_upper"]) == float(worst)
        else:
            assert row["tail_mass_upper"] == ""


def test_a_table_appears_whole_or_not_at_all(job: Path, tmp_path: Path) -> None:
    place = locate(tmp_path / "t.csv")

    def fail(label: str, done: int, _total: int) -> None:
        if done:
            raise RuntimeError

    with (
        pytest.raises(RuntimeError),
        table_files(place, locate(tmp_path / "t.parquet"), sets=False, replace=False) as table,
    ):
        job_report([str(job)], [table], fail)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "t.csv").write_text("mine")
    with (
        pytest.raises(CertkError, match="exists already"),
        table_files(place, None, sets=False, replace=False),
    ):
        pass
    with table_files(place, None, sets=False, replace=True) as table:
        job_report([str(job)], [table])
    assert len(read_csv(tmp_path / "t.csv")) == len(all_rows(job))


def test_a_size_is_shown_beside_what_it_costs_at_least(make_job: Make) -> None:
    out = make_job(files=2, eps=None, size=0.5)
    report = job_report([str(out)])
    page = job_page(report)
    rows = tables_of(page)["Outputs with a size for a target"].rows
    # Bounds at a smaller budget say nothing about how many keys could be saved at this one.
    assert report["totals"]["gap"] is None
    assert all(each["lower_bound"] > each["size"] for each in report["outputs"])
    for row, each in zip(rows, report["outputs"], strict=True):
        assert each["kept"] <= each["size"] == 2 * 2 * 40 // 2
        assert each["worst_at_least"] <= each["worst_tail_mass"]
        check(row[1], each["size"], "exact")
        check(row[2], each["kept"], "exact")
        check(row[3], each["worst_tail_mass"], "up")
        check(row[4], each["worst_at_least"], "down")


@pytest.mark.parametrize("granularity", ["head", "layer", "token"])
def test_what_a_size_costs_at_least_is_proven_by_bounds(make_job: Make, granularity: str) -> None:
    """A file's own word for it is none: the bounds that it holds must be more than the size."""
    size = 15 if granularity == "token" else 0.5
    out = make_job(files=1, eps=None, size=size, granularity=granularity)
    [before] = job_report([str(out)])["outputs"]
    assert 0 < before["worst_at_least"] < before["worst_tail_mass"]
    [path] = out.glob("*.safetensors")

    def less(arrays: dict[str, np.ndarray]) -> None:
        for name in [name for name in arrays if name.endswith("lower_bound")]:
            arrays[name] = arrays[name] * 0

    budgets = dict.fromkeys("01", [0.99] * (2 if granularity == "head" else 1))
    forge(path, less, field(bound_eps=budgets).change)
    [after] = job_report([str(out)])["outputs"]
    assert after["worst_at_least"] == 0


def test_a_row_at_its_budget_is_within_it_and_the_next_number_is_not(make_job: Make) -> None:
    out = make_job(files=1, eps=0.125)
    within = EDGES.index(1.0) - 1

    def at_budget(arrays: dict[str, np.ndarray]) -> None:
        upper = arrays["layers.0.tail_mass_upper"]
        upper[:] = 0.0625 + 2.0**-20
        upper[0, :3] = 0.125
        upper[1, :2] = np.nextafter(np.float32(0.125), np.float32(1))
        arrays["layers.0.tail_mass_lower"][:] = 0.0
        arrays["layers.1.tail_mass_upper"][:] = 0.0
        arrays["layers.1.tail_mass_lower"][:] = 0.0

    forge(out / "c0.safetensors", at_budget)
    report = job_report([str(out)])
    counts = report["tail_masses"]["promised"]
    assert counts[within] == 3
    assert counts[within + 1] == 2
    assert counts[EDGES.index(0.5)] == 4 * 12 - 5
    assert counts[0] == 4 * 12
    assert report["totals"]["rows_over_budget"] == 2


def test_without_a_budget_rows_are_at_it_or_beyond_all_bins(make_job: Make) -> None:
    out = make_job(files=1, eps=0.0)
    assign("layers.0.tail_mass_upper", (0, 0), 0.5)(out / "c0.safetensors")
    report = job_report([str(out)])
    counts = report["tail_masses"]["promised"]
    assert (counts[0], counts[-1], sum(counts)) == (2 * 4 * 12 - 1, 1, 2 * 4 * 12)
    assert report["sets"][0]["worst_over_eps"] is None
    job_page(report)
