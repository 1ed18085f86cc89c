"""Inputs that change while an output is made of them: no output is made of two of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from certk_rs import prune
from certk_rs._files.output import OutputFile
from certk_rs._jobs.plan import Manner, make_plan
from certk_rs._jobs.prune import make_engine, run_plan
from certk_rs._jobs.request import Request
from cli_fixtures import write_cache


def over_in_place(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def another_file(path: Path, data: bytes) -> None:
    (path.parent / "new").write_bytes(data)
    (path.parent / "new").replace(path)


@pytest.mark.parametrize("change", [over_in_place, another_file])
@pytest.mark.parametrize(
    "options", [{}, {"rest": "file"}, {"rest": "codes"}, {"granularity": "token"}]
)
def test_rows_are_copied_of_what_the_sets_were_chosen_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, options: dict[str, Any]
) -> None:
    """The input becomes another one at each moment of the copying, before and after each tensor."""
    source, other = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    write_cache(source, seed=1)
    write_cache(other, seed=2)
    one, two = source.read_bytes(), other.read_bytes()
    assert len(one) == len(two)
    own, moments, at = OutputFile.write, 0, -1

    def write(self: OutputFile, name: str, array: Any) -> None:
        nonlocal moments
        own(self, name, array)
        if moments == at:
            change(source, two)
        moments += 1

    monkeypatch.setattr(OutputFile, "write", write)
    whole = prune(source, tmp_path / "whole", 0.1, holdout=0.0, **options)
    assert not whole.failures
    expected, count = (tmp_path / "whole" / source.name).read_bytes(), moments
    assert count > 8
    for at in range(count):
        change(source, one)
        moments, out = 0, tmp_path / f"out{at}"
        result = prune(source, out, 0.1, holdout=0.0, **options)
        if change is another_file and not result.failures:
            # What had been opened is still there, and was copied to its end.
            assert (out / source.name).read_bytes() == expected
            continue
        [failure] = result.failures
        assert "was changed while it was being used" in failure.message
        assert not result.outputs
        assert not [path for path in out.rglob("*") if "safetensors" in path.name]


def test_a_header_of_the_same_size_and_time_is_another(tmp_path: Path) -> None:
    """Else sets of one scale would be certified for the other."""
    source, out = tmp_path / "x.safetensors", tmp_path / "out"
    write_cache(source, metadata={"scale": "0.5"})
    status, plan = source.stat(), make_plan([source], out, Request.of(eps=0.1), Manner())
    write_cache(source, metadata={"scale": "2.5"})
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    result = run_plan(plan, make_engine())
    assert not result.outputs
    assert "was changed while it was being used" in result.failures[0].message
