"""Configuration files: what is found, what is in force, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from certk_rs.errors import CertkError
from cli_fixtures import certk, write_cache

Captured = pytest.CaptureFixture[str]
NEEDED = ("plan", "--n", "100", "--sigma", "2", "--eps", "0.1")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def planned(capsys: Captured, *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    assert certk("plan", *arguments, "--json") == 0
    body: dict[str, Any] = json.loads(capsys.readouterr().out)
    return body


def refused(capsys: Captured, *arguments: object) -> str:
    capsys.readouterr()
    assert certk(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("certk: error: ")
    assert err.count("\n") == 1
    return err


def test_a_file_sets_what_the_command_line_does_not(here: Path, capsys: Captured) -> None:
    (here / "certk.toml").write_text("[plan]\nn = 1e3\nsigma = 2\neps = 0.1\nseed = '1_0'\n")
    found = planned(capsys)
    assert [found[name] for name in ("n", "sigma", "eps", "seed")] == [1000, 2.0, 0.1, 10]
    found = planned(capsys, "--eps", "0.2")
    assert (found["n"], found["eps"]) == (1000, 0.2)
    assert "Missing option '--n'" in refused(capsys, "plan", "--no-config")


def test_the_nearest_file_counts_and_certk_toml_is_first(
    here: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "[{}plan]\nn = {}\nsigma = 2\neps = 0.1\n"
    (tmp_path / "certk.toml").write_text(text.format("", 11))
    assert planned(capsys)["n"] == 11
    (here / "pyproject.toml").write_text("[tool.other]\nx = 1\n")
    assert planned(capsys)["n"] == 11  # that one is not about certk
    (here / "pyproject.toml").write_text("not TOML, and none of our business")
    assert planned(capsys)["n"] == 11
    (here / "pyproject.toml").write_bytes(b"\xff certk")
    assert planned(capsys)["n"] == 11
    (here / "pyproject.toml").write_text(text.format("tool.certk.", 12))
    assert planned(capsys)["n"] == 12
    (here / "certk.toml").write_text(text.format("", 13))
    assert planned(capsys)["n"] == 13
    (here / "other.toml").write_text(text.format("", 14))
    assert planned(capsys, "--config", "other.toml")["n"] == 14
    (here / "inner").mkdir()
    monkeypatch.chdir(here / "inner")
    assert planned(capsys)["n"] == 13
    (here / "certk.toml").write_text("")  # a file with nothing in it ends the search, too
    assert "Missing option '--n'" in refused(capsys, "plan")


def test_options_of_all_types_and_paths_from_the_folder_of_the_file(
    here: Path, tmp_path: Path, capsys: Captured
) -> None:
    write_cache(here / "x.safetensors")
    (tmp_path / "certk.toml").write_text(
        "[prune]\nout = 'pruned'\neps = 1e-6\ngranularity = 'layer'\nmax-keep = 7\n"
        "keep_first = 1\nkeep-last = 2\nthreads = 1\nquiet = true\n"
        "[analyze]\neps = [0.2, 0.1]\n[demo]\neps = 0.5\n"
    )
    assert certk("prune", "x.safetensors") == 0
    assert "kept 14 of 48 keys" in capsys.readouterr().out
    assert (tmp_path / "pruned" / "x.safetensors").is_file()
    assert certk("verify", tmp_path / "pruned") == 0
    assert "granularity = layer, max_keep = 7, keep_first = 1, keep_last = 2" in (
        capsys.readouterr().out
    )
    assert certk("analyze", "x.safetensors", "--json") == 0
    assert json.loads(capsys.readouterr().out)["caches"][0]["eps"] == [0.2, 0.1]
    assert certk("analyze", "x.safetensors", "--eps", "0.3", "--json") == 0
    assert json.loads(capsys.readouterr().out)["caches"][0]["eps"] == [0.3]


def test_a_fraction_stays_one(here: Path, capsys: Captured) -> None:
    write_cache(here / "x.safetensors")
    for value, kept in (("1.0", 96), ("1", 4), ("'12'", 48), ("0.5", 48)):
        (here / "certk.toml").write_text(f"[prune]\nmax-keep = {value}\neps = 0\n")
        out = here / f"out{value.strip(chr(39))}"
        assert certk("prune", "x.safetensors", "-o", out, "--json") == 0
        assert json.loads(capsys.readouterr().out)["outputs"][0]["kept"] == kept


def test_verbose_says_what_is_in_force(here: Path, capsys: Captured) -> None:
    (here / "certk.toml").write_text("[plan]\nsigma = 2\neps = 0.1\n")
    assert certk("plan", "--n", "50", "--eps", "0.2", "-v") == 0
    lines = capsys.readouterr().err.splitlines()
    assert f"certk: info: configuration: {here / 'certk.toml'}, 2 options for plan" in lines
    assert "certk: info:   sigma = 2.0" in lines
    assert "certk: info:   eps = 0.1 (overruled: given here)" in lines
    assert certk(*NEEDED, "-v", "--no-config") == 0
    assert "certk: info: no configuration file" in capsys.readouterr().err.splitlines()


BAD: list[tuple[str, str]] = [
    ("[prun]\neps = 1", r"\[prun\] is no command of certk: did you mean prune\?"),
    ("[completion]", r"\[completion\] is no command of certk"),
    ("eps = 1", "'eps' stands outside any section: put it under the command"),
    ("plan = 3", r"'plan' is no section: write \[plan\]"),
    ("[plan]\nepps = 1", r"\[plan\] epps is no option of certk plan: did you mean eps\?"),
    ("[prune]\ncaches = ['a']", r"\[prune\] caches is no option of certk prune: there are out, "),
    ("[plan]\njson = true", r"\[plan\] json cannot be set in a file: give --json on the command"),
    ("[plan]\nconfig = 'x'", "give --config on the command line"),
    ("[plan]\neps = 'x'", r"\[plan\] eps: 'x' is not a number: give one such as"),
    ("[plan]\neps = true", r"\[plan\] eps is true: give a number"),
    ("[plan]\neps = [0.1]", r"\[plan\] eps is an array: give a number"),
    ("[plan]\neps = {}", r"\[plan\] eps is a table, empty: give a number"),
    ("[plan]\nn = 1.5", r"\[plan\] n: 1.5 is not a whole number"),
    ("[plan]\nn = 1979-05-27", r"\[plan\] n is 1979-05-27: give a whole number"),
    ("[plan]\nthreads = 0", r"\[plan\] threads: 0 is too small: give 1 or more"),
    ("[prune]\nquiet = 1", r"\[prune\] quiet is 1: give true or false"),
    ("[prune]\nverbose = 'a'", r"\[prune\] verbose is the string 'a': give a whole number"),
    ("[prune]\nverbose = 1.0", r"\[prune\] verbose is 1.0: give a whole number"),
    ("[prune]\nnames = 5", r"\[prune\] names is 5: give a string"),
    ("[prune]\nout = 5", r"\[prune\] out: 5 is no path: give text"),
    ("[prune]\nmax-keep = 'x'", r"\[prune\] max-keep: 'x': give a whole number of keys or"),
    ("[prune]\ngranularity = 'row'", "is the string 'row': give one of head, layer"),
    ("[prune]\nkeep-first = 1\nkeep_first = 2", "keep_first is there twice, with - and with _"),
    ("[analyze]\neps = 0.1", r"\[analyze\] eps is 0.1: give an array of values"),
    ("[analyze]\neps = []", r"\[analyze\] eps is an array, empty: give an array of values"),
    ("[analyze]\neps = [0.1, 'x']", r"\[analyze\] eps: 'x' is not a number"),
    ("[plan", "is no TOML .*mend it, or use --no-config"),
    ("a = " + "[" * 100_000, "is no TOML"),
]


@pytest.mark.parametrize(("text", "words"), BAD)
def test_what_no_command_can_use_is_refused(
    text: str, words: str, here: Path, capsys: Captured
) -> None:
    """Also for commands that are not run, and with file, key and remedy."""
    (here / "certk.toml").write_text(text)
    line = refused(capsys, *NEEDED)
    with pytest.raises(CertkError, match=words):
        raise CertkError(line)
    assert str(here / "certk.toml") in line
    assert certk(*NEEDED, "--no-config") == 0
    assert certk("plan", "--help") == 0  # help helps whatever is in the file
    assert certk("completion", "bash") == 0


def test_files_that_cannot_be_read(here: Path, capsys: Captured) -> None:
    assert "none.toml: No such file" in refused(capsys, *NEEDED, "--config", "none.toml")
    (here / "certk.toml").write_bytes(b"\xff")
    assert "is not text in UTF-8" in refused(capsys, *NEEDED)
    line = refused(capsys, *NEEDED, "--config", "certk.toml", "--no-config")
    assert "--config and --no-config contradict each other" in line
    (here / "certk.toml").unlink()
    (here / "pyproject.toml").write_text("[tool]\ncertk = 5\n")
    assert "tool.certk is no table" in refused(capsys, *NEEDED)
    (here / "pyproject.toml").write_text("[tool.certk.plan]\nepps = 1\n")
    assert "[tool.certk.plan] epps is no option" in refused(capsys, *NEEDED)
    (here / "pyproject.toml").write_text("[tool.certk.plan\n")
    assert "pyproject.toml is no TOML" in refused(capsys, *NEEDED)


def test_names_in_a_file_are_foreign_text(here: Path, capsys: Captured) -> None:
    (here / "certk.toml").write_text('[plan]\n"\\u001b[2J\\n" = 1\n')
    assert "\\x1b[2J\\n is no option" in refused(capsys, *NEEDED)


def test_every_option_of_every_command_can_be_judged(here: Path, capsys: Captured) -> None:
    """No option has a type that the judge of files does not know."""
    (here / "certk.toml").write_text("")
    assert certk(*NEEDED, "-v") == 0
    assert "0 options for plan" in capsys.readouterr().err
