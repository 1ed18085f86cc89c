"""`certk report`: what it prints, writes and refuses."""

from __future__ import annotations

import csv
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from certk_rs._display.plain import plain
from certk_rs._jobs.job_page import job_page
from certk_rs._jobs.report import job_report
from cli_fixtures import answered, certk, said, write_cache

UNKNOWN = "\N{EN DASH}"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    for i in range(2):
        write_cache(folder / "in" / f"c{i}.safetensors", seed=i)
    assert certk("prune", folder / "in", "-o", folder / "out", "--eps", 0.1, "--proof", "full") == 0
    return folder / "out"


def test_it_prints_layers_and_sizes(out: Path) -> None:
    code, shown, errors = said("report", out)
    report = job_report([str(out)])
    assert f"2 outputs: kept {report['totals']['kept']} of 192 keys" in shown
    assert "worst tail mass" in shown
    assert (code, errors) == (0, "")


def test_json_is_the_report(out: Path) -> None:
    body = answered("report", out)
    assert body.pop("schema") == 1
    assert body.pop("command") == "report"
    assert body == json.loads(json.dumps(job_report([str(out)])))


def lines_of(table: Path) -> int:
    with table.open(newline="") as file:
        return len(list(csv.reader(file)))


def test_it_writes_what_it_is_told_to_and_replaces_nothing(out: Path, tmp_path: Path) -> None:
    html, table = tmp_path / "r.html", tmp_path / "r.csv"
    assert f"written to {html}" in said("report", out, "--html", html, "--csv", table).out
    assert html.read_text(encoding="utf-8") == job_page(job_report([str(out)]))
    assert lines_of(table) == 1 + 2 * 2 * 4 * 3
    before = html.read_bytes(), table.read_bytes()
    for arguments in (["--html", html], ["--csv", table], ["--parquet", html]):
        assert "exists already" in said("report", out, *arguments).err
    assert (html.read_bytes(), table.read_bytes()) == before
    html.write_text("old")
    assert certk("report", out, "--html", html, "--csv", table, "--sets", "--force") == 0
    assert html.read_bytes() == before[0]
    assert lines_of(table) == 1 + 2 * 2 * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.csv", "r.html"]


def test_no_report_replaces_what_it_is_about(out: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(out, folder)
    (tmp_path / "link.csv").symlink_to(folder / "c1.safetensors")
    before = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    linked, dotted = tmp_path / "link.csv", folder / "../out/c1.safetensors"
    for place in (folder / "c0.safetensors", linked, dotted):
        for option in ("--html", "--csv", "--parquet"):
            found = said("report", folder, option, place, "--force")
            assert found.code == 2
            assert "is an output that the report is about" in found.err
    assert before == {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.csv", "out"]


FORMULAS = ["=1+1", "+1", "-1", "@SUM(1)", "\uff1d1", "x;=1+1", "\t=1", '",=1+1', "a,=1+1"]


@pytest.mark.parametrize("sets", [(), ("--sets",)])
def test_no_name_of_a_file_is_a_formula_in_a_table(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sets: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [f"{name}.safetensors" for name in FORMULAS]
    for name in names:
        shutil.copy(out / "c0.safetensors", name)
    # One output is named alone, several by their places; a directory's by their names.
    for at, outs in enumerate([["."], [f"./{name}" for name in names], ["./*.safetensors", out]]):
        assert certk("report", *outs, "--csv", f"{at}.csv", *sets) == 0
        text = Path(f"{at}.csv").read_text(encoding="utf-8")
        found = {row["output"] for row in csv.DictReader(text.splitlines())}
        assert {Path(each).name for each in found} >= {plain(name) for name in names}
        # However a spreadsheet cuts lines into cells, none begins like a formula.
        for sign in ",;":
            for row in csv.reader(text.splitlines(), delimiter=sign):
                assert not [cell for cell in row if re.match("[=+@\uff1d]|-[^0-9]", cell)]
                assert not re.match(r"-\d", row[0])


def test_an_output_that_cannot_be_read_is_exit_1(tmp_path: Path) -> None:
    write_cache(tmp_path / "in" / "a.safetensors")
    assert certk("prune", tmp_path / "in", "-o", tmp_path / "out", "--eps", 0.1) == 0
    (tmp_path / "out" / "b.safetensors").write_text("nonsense")
    code, shown, errors = said("report", tmp_path / "out", "--json")
    body = json.loads(shown)
    assert code == 1
    assert body["totals"]["outputs"] == 1
    assert [each["output"] for each in body["unreadable"]] == ["b.safetensors"]
    assert "b.safetensors" in errors


@pytest.mark.parametrize(("wanted", "option"), [("matplotlib", "html"), ("pyarrow>=15", "parquet")])
def test_packages_that_are_not_there_are_named(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str, option: str
) -> None:
    monkeypatch.setitem(sys.modules, wanted.partition(">")[0], None)
    found = said("report", out, f"--{option}", tmp_path / "x")
    assert found.code == 2
    assert f"pip install '{wanted}" in found.err
    assert list(tmp_path.iterdir()) == []
    assert certk("report", out, "--json") == 0


def test_bounds_of_a_smaller_budget_are_not_called_needed(tmp_path: Path) -> None:
    write_cache(tmp_path / "x.safetensors")
    for proof in ("none", "auto"):
        out = tmp_path / proof
        job = ("prune", tmp_path / "x.safetensors", "-o", out, "--size", 0.4, "--proof", proof)
        assert certk(*job) == 0
        printed = said("report", out, "--html", tmp_path / "p.html", "--force").out
        kept = job_report([str(out)])["totals"]["kept"]
        assert f"kept {kept} of 96 keys (" in printed
        assert "are needed" not in printed
        rows = [line.split() for line in printed.splitlines() if re.match(r" +[01] +2 ", line)]
        # Layer, sets, kept, of, share and its sign, and then the bound and the gap.
        assert [row[6:8] for row in rows] == [[UNKNOWN, UNKNOWN]] * 2
    page = (tmp_path / "p.html").read_text()
    assert "needed at the smaller budget" in page
    assert "at least needed" not in page
    cell = page[page.index("keys that any such sets need") :]
    assert UNKNOWN in cell[: cell.index("</tr>")]


def test_inputs_that_could_not_be_planned_for_are_told_of(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_cache(tmp_path / "in" / "a.safetensors")
    (tmp_path / "in" / "b.safetensors").write_bytes(b"no cache" * 9)
    prune = ("prune", tmp_path / "in", "-o", tmp_path / "o", "--eps", 0.1, "-q")
    assert certk(*prune) == 1
    assert certk(*prune, "--resume") == 1
    printed = said("report", tmp_path / "o").out
    assert "failed:" in printed
    assert "b.safetensors" in printed


def test_a_table_in_a_pipe_has_the_columns_that_are_asked_for(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    table = [line for line in said("report", out).out.splitlines() if line.startswith("  ")]
    assert table
    assert all(len(line) <= 40 for line in table)


def test_verify_takes_urls_for_what_they_are(out: Path) -> None:
    assert certk("verify", f"file://{out}") == 0
    found = said("verify", "memory://nothing/here")
    assert found.code == 2
    assert "two slashes" not in found.err


def test_what_left_out_rows_lose_is_said_only_where_it_is_known(tmp_path: Path) -> None:
    write_cache(tmp_path / "x.safetensors")
    page = tmp_path / "p.html"
    for proof, known in (("full", True), ("compact", False)):
        out = tmp_path / proof
        asked = ("--eps", 0.1, "--coverage", 0.8, "--proof", proof)
        assert certk("prune", tmp_path / "x.safetensors", "-o", out, *asked, "-q") == 0
        assert certk("report", out, "--html", page, "--force") == 0
        assert ("of them loses at most" in page.read_text()) is known
        assert f"at most {UNKNOWN} of" not in page.read_text()
