"""The audit: what it must notice, in which words, and what it cannot know."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from certk_rs import prune
from certk_rs._audit import recompute
from certk_rs._files.tensor_file import SafetensorsFile
from certk_rs.audit import WITHOUT_INPUT, audit
from cli_fixtures import Job, write_cache
from made_outputs import Honest


@pytest.fixture
def job(honest: Honest, tmp_path: Path) -> Job:
    """A fresh copy of one small finished job."""
    return honest.copy("eights", tmp_path)


def flip(path: Path, position: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def test_what_was_written_holds(job: Job) -> None:
    alone, with_input = job.check(), job.check(against=True)
    assert alone.holds
    assert alone.unchecked == WITHOUT_INPUT
    assert (alone.confirmed_rows, alone.rows) == (0, 64)
    assert with_input.holds
    assert with_input.unchecked == ()
    assert with_input.confirmed_rows == with_input.rows == 64
    assert with_input.confirmed_lower_bounds == with_input.lower_bounds == 4
    assert with_input.source == job.source


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_of_the_progress_is_no_finding(job: Job, threads: int) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        audit([job.output], progress=broken, threads=threads)


def test_a_changed_byte_is_placed(job: Job) -> None:
    with SafetensorsFile(job.output) as file:
        start = {name: len(file.header.raw) + e.start for name, e in file.header.entries.items()}
    flip(job.output, start["layers.1.value"] + 3, 0)
    assert "layers.1.value: its bytes were changed" in job.lines()


def test_a_changed_byte_of_the_input_is_placed(job: Job) -> None:
    with SafetensorsFile(job.source) as file:
        start = len(file.header.raw) + file.header.entries["layers.1.query"].start
    flip(job.source, start, 0)
    assert f"input layers.1.query: was changed in {job.source}" in job.lines(against=True)
    assert audit([job.output], [job.source]).unmatched == (job.source,)


@pytest.mark.parametrize("change", ["cut", "longer", "empty", "text"])
def test_files_that_are_no_outputs(job: Job, change: str) -> None:
    content = job.output.read_bytes()
    job.output.write_bytes(
        {"cut": content[:-1], "longer": content + b"\0", "empty": b"", "text": b"hello" * 9}[change]
    )
    [finding] = job.check().findings
    assert finding.where == "file"
    assert str(job.output) not in str(finding)


def test_an_input_is_no_output(job: Job) -> None:
    [output] = audit([job.source]).outputs
    assert "there is no certificate" in str(output.findings[0])


def test_missing_paths_are_not_findings(job: Job, tmp_path: Path) -> None:
    """An output that is not there is an error of that one; nothing can be done without an input."""
    lone, whole = audit([tmp_path / "none", job.output], [job.source]).outputs
    assert (lone.findings, lone.holds, whole.holds) == ([], False, True)
    assert lone.error == f"{tmp_path / 'none'}: No such file or directory"
    with pytest.raises(FileNotFoundError):
        audit([job.output], [tmp_path / "none"])


def test_inputs_are_matched_by_content(job: Job, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    write_cache(other, seed=5)
    renamed = tmp_path / "renamed.safetensors"
    shutil.copy(job.source, renamed)
    report = audit([job.output], [other, renamed])
    assert report.outputs[0].source == renamed
    assert report.outputs[0].holds
    assert report.unmatched == (other,)
    assert not report.holds
    report = audit([job.output], [job.source, renamed])
    assert report.holds  # the same tensors twice
    report = audit([job.output], [other])
    assert "none of the files given with --against" in str(report.outputs[0].findings[0])


def test_one_input_may_have_several_outputs(job: Job, tmp_path: Path) -> None:
    prune(job.source, tmp_path / "more", 0.3, proof="full")
    report = audit([job.output, tmp_path / "more" / "x.safetensors"], [job.source])
    assert report.holds
    assert all(output.confirmed_rows == 64 for output in report.outputs)


@pytest.mark.parametrize("offset", [10**18 - 1, -4, 1 - 10**18])
def test_offsets_far_beyond_the_keys(tmp_path: Path, offset: int) -> None:
    cache = {"n": 7, "m": 6, "metadata": {"causal_offset": str(offset)}}
    output = Job(tmp_path, cache=cache).check(against=True)
    assert output.holds
    assert output.confirmed_rows == 2 * 4 * 6


def test_many_rows_and_keys_are_checked_block_by_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = {"n": 70, "m": 13, "metadata": {"causal_offset": "40"}}
    job = Job(tmp_path, cache=cache, granularity="layer")
    monkeypatch.setattr("certk_rs._audit.truth._BLOCK", 200)
    monkeypatch.setattr(recompute, "_CHUNK", 16)
    output = job.check(against=True)
    assert output.holds, job.lines(against=True)
    assert output.confirmed_rows == 2 * 4 * 13


def test_the_arithmetic_imports_nothing_of_the_package() -> None:
    tree = ast.parse(Path(recompute.__file__).read_text())
    imported = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert imported <= {
        "__future__",
        "math",
        "collections.abc",
        "dataclasses",
        "numpy",
        "numpy.typing",
    }
