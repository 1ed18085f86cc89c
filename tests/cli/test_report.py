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
from cli_fixtures import certk, write_cache

Captured = pytest.CaptureFixture[str]
UNKNOWN = "\N{EN DASH}"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    for i in range(2):
        write_cache(folder / "in" / f"c{i}.safetensors", seed=i)
    assert certk("prune", folder / "in", "-o", folder / "out", "--eps", 0.1, "--proof", "full") == 0
    return folder / "out"


def test_it_prints_layers_and_sizes(capsys: Captured, out: Path) -> None:
    capsys.readouterr()
    assert certk("report", out) == 0
    shown, said = capsys.readouterr()
    report = job_report([str(out)])
    assert f"2 outputs: kept {report['totals']['kept']} of 192 keys" in shown
    assert "worst tail mass" in shown
    assert said == ""


def test_json_is_the_report(capsys: Captured, out: Path) -> None:
    capsys.readouterr()
    assert certk("report", out, "--json") == 0
    body = json.loads(capsys.readouterr().out)
    assert body.pop("schema") == 1
    assert body.pop("command") == "report"
    assert body == json.loads(json.dumps(job_report([str(out)])))


def test_it_writes_what_it_is_told_to_and_replaces_nothing(
    capsys: Captured, out: Path, tmp_path: Path
) -> None:
    html, table = tmp_path / "r.html", tmp_path / "r.csv"
    capsys.readouterr()
    assert certk("report", out, "--html", html, "--csv", table) == 0
    assert f"written to {html}" in capsys.readouterr().out
    assert html.read_text(encoding="utf-8") == job_page(job_report([str(out)]))
    with table.open(newline="") as file:
        assert len(list(csv.reader(file))) == 1 + 2 * 2 * 4 * 3
    before = html.read_bytes(), table.read_bytes()
    for arguments in (["--html", html], ["--csv", table], ["--parquet", html]):
        assert certk("report", out, *arguments) == 2
        assert "exists already" in capsys.readouterr().err
    assert (html.read_bytes(), table.read_bytes()) == before
    html.write_text("old")
    assert certk("report", out, "--html", html, "--csv", table, "--sets", "--force") == 0
    assert html.read_bytes() == before[0]
    with table.open(newline="") as file:
        assert len(list(csv.reader(file))) == 1 + 2 * 2 * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.csv", "r.html"]


def test_no_report_replaces_what_it_is_about(capsys: Captured, out: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(out, folder)
    (tmp_path / "link.csv").symlink_to(folder / "c1.safetensors")
    before = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    for place in (
        folder / "c0.safetensors",
        tmp_path / "link.csv",
        folder / "../out/c1.safetensors",
    ):
        for option in ("--html", "--csv", "--parquet"):
            capsys.readouterr()
            assert certk("report", folder, option, place, "--force") == 2
            assert "is an output that the report is about" in capsys.readouterr().err
    assert certk("report", folder, "--csv", tmp_path / "t", "--parquet", tmp_path / "t") == 2
    assert "is given twice" in capsys.readouterr().err
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


def test_an_output_that_cannot_be_read_is_exit_1(capsys: Captured, tmp_path: Path) -> None:
    write_cache(tmp_path / "in" / "a.safetensors")
    assert certk("prune", tmp_path / "in", "-o", tmp_path / "out", "--eps", 0.1) == 0
    (tmp_path / "out" / "b.safetensors").write_text("nonsense")
    capsys.readouterr()
    assert certk("report", tmp_path / "out", "--json") == 1
    shown, said = capsys.readouterr()
    body = json.loads(shown)
    assert body["totals"]["outputs"] == 1
    assert [each["output"] for each in body["unreadable"]] == ["b.safetensors"]
    assert "b.safetensors" in said


def test_refusals(capsys: Captured, out: Path, tmp_path: Path) -> None:
    for arguments, words in [
        ((tmp_path / "none",), "does not exist"),
        ((tmp_path,), "holds no .safetensors file"),
        ((out, "--sets"), "--sets is about tables"),
        ((out, "--html", tmp_path / "no" / "x.html"), "give the name of a file"),
        ((out, "--csv", tmp_path), "give the name of a file"),
    ]:
        capsys.readouterr()
        assert certk("report", *arguments) == 2
        shown, said = capsys.readouterr()
        assert (shown, words in said) == ("", True), said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("package", "option"), [("matplotlib", "html"), ("pyarrow", "parquet")])
def test_packages_that_are_not_there_are_named(
    capsys: Captured,
    out: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    option: str,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    capsys.readouterr()
    assert certk("report", out, f"--{option}", tmp_path / "x") == 2
    assert f"pip install '{package}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert certk("report", out, "--json") == 0


def test_bounds_of_a_smaller_budget_are_not_called_needed(capsys: Captured, tmp_path: Path) -> None:
    write_cache(tmp_path / "x.safetensors")
    certk("prune", tmp_path / "x.safetensors", "-o", tmp_path / "o", "--size", 0.4, "-q")
    capsys.readouterr()
    assert certk("report", tmp_path / "o", "--html", tmp_path / "p.html") == 0
    printed = capsys.readouterr().out
    assert "are needed" not in printed
    [first] = [line for line in printed.splitlines() if line.split()[:1] == ["0"]]
    # Layer, sets, kept, of, share and its sign, and then the bound and the gap.
    assert first.split()[6:8] == [UNKNOWN, UNKNOWN]
    page = (tmp_path / "p.html").read_text()
    assert "needed at the smaller budget" in page
    assert "at least needed" not in page
    cell = page[page.index("keys that any such sets need") :]
    assert UNKNOWN in cell[: cell.index("</tr>")]


def test_inputs_that_could_not_be_planned_for_are_told_of(capsys: Captured, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_cache(tmp_path / "in" / "a.safetensors")
    (tmp_path / "in" / "b.safetensors").write_bytes(b"no cache" * 9)
    prune = ("prune", tmp_path / "in", "-o", tmp_path / "o", "--eps", 0.1, "-q")
    assert certk(*prune) == 1
    assert certk(*prune, "--resume") == 1
    capsys.readouterr()
    assert certk("report", tmp_path / "o") == 0
    assert "failed:" in (printed := capsys.readouterr().out)
    assert "b.safetensors" in printed


def test_a_table_in_a_pipe_has_the_columns_that_are_asked_for(
    capsys: Captured, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert certk("report", out) == 0
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert table
    assert all(len(line) <= 40 for line in table)


def test_verify_takes_directories_in_directories(capsys: Captured, tmp_path: Path) -> None:
    for name in ("a", "sub/a"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        write_cache(tmp_path / "in" / f"{name}.safetensors", seed=len(name))
    certk("prune", tmp_path / "in", "-r", "-o", tmp_path / "o", "--eps", 0.1, "-q")
    capsys.readouterr()
    assert certk("verify", tmp_path / "o", "-r", "--against", tmp_path / "in", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["outputs"]) == 2


def test_verify_takes_urls_for_what_they_are(capsys: Captured, out: Path) -> None:
    assert certk("verify", f"file://{out}") == 0
    capsys.readouterr()
    assert certk("verify", "memory://nothing/here") == 2
    assert "two slashes" not in capsys.readouterr().err


def test_what_left_out_rows_lose_is_said_only_where_it_is_known(
    capsys: Captured, tmp_path: Path
) -> None:
    write_cache(tmp_path / "x.safetensors")
    page = tmp_path / "p.html"
    for proof, known in (("full", True), ("compact", False)):
        out = tmp_path / proof
        asked = ("--eps", 0.1, "--coverage", 0.8, "--proof", proof)
        assert certk("prune", tmp_path / "x.safetensors", "-o", out, *asked, "-q") == 0
        assert certk("report", out, "--html", page, "--force") == 0
        assert ("of them loses at most" in page.read_text()) is known
        assert f"at most {UNKNOWN} of" not in page.read_text()


@pytest.mark.parametrize("proof", ["full", "none"])
def test_bounds_of_another_budget_are_not_shown_as_what_is_needed(
    capsys: Captured, tmp_path: Path, proof: str
) -> None:
    write_cache(tmp_path / "in" / "a.safetensors")
    out = tmp_path / "out"
    assert certk("prune", tmp_path / "in", "-o", out, "--size", 0.5, "--proof", proof) == 0
    capsys.readouterr()
    assert certk("report", out) == 0
    shown = capsys.readouterr().out
    report = job_report([str(out)])
    assert f"kept {report['totals']['kept']} of 96 keys (" in shown
    assert "are needed" not in shown
    rows = [line.split() for line in shown.splitlines() if re.match(r" +[01] +2 ", line)]
    assert [row[6:8] for row in rows] == [["\N{EN DASH}"] * 2] * 2
