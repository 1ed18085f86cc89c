"""Results of jobs in Python: the names that all results have, and files of JSON."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import certk_rs as ck
from cli_fixtures import answered, write_cache


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two caches, pruned, and one file that is none."""
    folder = tmp_path_factory.mktemp("results")
    write_cache(folder / "in" / "a.safetensors", seed=1)
    write_cache(folder / "in" / "b.safetensors", seed=2)
    (folder / "in" / "<i>.safetensors").write_text("none")
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    """A result of each kind."""
    caches = [folder / "in" / name for name in ("a.safetensors", "b.safetensors")]
    pruned = ck.prune(folder / "in", folder / "out", 0.1, proof="full", holdout=0.34)
    return {
        "JobResult": pruned,
        "Verdict": ck.verify(folder / "out", caches),
        "Analysis": ck.analyze(caches, [0.1, 0.01]),
    }


NAMES = ("JobResult", "Verdict", "Analysis")


@pytest.mark.parametrize("name", NAMES)
def test_summaries_say_what_it_is_and_notebooks_show_it_escaped(
    results: dict[str, Any], name: str
) -> None:
    result = results[name]
    summary = result.summary()
    assert summary.startswith(name if name != "Verdict" else "Verdict on 2 outputs: holds")
    assert repr(result).startswith(f"{name}(")
    assert "\n" not in repr(result)
    shown = result._repr_html_()
    assert html.unescape(re.sub("<[^>]*>", "", shown)) == summary
    assert not re.search(r"src=|href=|url\(|<script|<i>", shown)


def test_the_frame_of_a_job_has_a_line_per_set(results: dict[str, Any], folder: Path) -> None:
    pytest.importorskip("pandas")
    job = results["JobResult"]
    frame = job.to_pandas()
    assert len(frame) == 2 * 2 * 2
    assert frame["kept"].sum() == sum(report.count.kept for report in job.outputs)
    assert (frame["gap"] == frame["kept"] - frame["lower_bound"]).all()
    assert (frame["worst_tail_mass"] <= frame["eps"]).all()
    one = frame[(frame.output == "b.safetensors") & (frame.layer == 1) & (frame["head"] == 0)]
    said = job.outputs[1].layers[1].sets[0]
    assert one.iloc[0]["kept"] == said.kept
    assert one.iloc[0]["held_out_high"] == said.held_out.high


def test_frames_of_verdicts_and_analyses_have_a_line_per_output_and_head(
    results: dict[str, Any],
) -> None:
    pytest.importorskip("pandas")
    outputs = results["Verdict"].outputs
    frame = results["Verdict"].to_pandas()
    assert frame["holds"].tolist() == [True, True]
    assert frame["rows_confirmed"].tolist() == [each.confirmed_rows for each in outputs]
    assert (frame["rows_confirmed"] > 0).all()
    heads = [head for cache in results["Analysis"].caches for head in cache.heads]
    frame = results["Analysis"].to_pandas()
    assert frame["shared"].tolist() == [head.shared for head in heads]
    assert frame["advice"].tolist() == [head.advice for head in heads]
    assert set(frame["eps"]) == {0.01}


@pytest.mark.parametrize("name", NAMES)
def test_they_are_saved_as_json_and_replace_nothing_unasked(
    results: dict[str, Any], name: str, tmp_path: Path
) -> None:
    result, path = results[name], tmp_path / "result.json"
    result.save(path)
    assert json.loads(path.read_text()) == json.loads(json.dumps(result.to_json()))
    path.write_text("mine")
    with pytest.raises(ck.CertkError, match="exists already"):
        result.save(path)
    assert path.read_text() == "mine"
    result.save(str(path), replace=True)
    assert json.loads(path.read_text())
    with pytest.raises(FileNotFoundError):
        result.save(tmp_path / "no" / "result.json")
    assert [each.name for each in tmp_path.iterdir()] == ["result.json"]


def test_saved_results_are_what_the_commands_print(results: dict[str, Any], folder: Path) -> None:
    caches = [folder / "in" / name for name in ("a.safetensors", "b.safetensors")]
    against = [argument for cache in caches for argument in ("--against", cache)]
    for name, arguments in [
        ("Verdict", ["verify", folder / "out", *against]),
        ("Analysis", ["analyze", *caches, "--eps", 0.1, "--eps", 0.01]),
    ]:
        printed = answered(*arguments)
        saved = json.loads(json.dumps(results[name].to_json()))
        assert {k: v for k, v in printed.items() if k not in ("schema", "command")} == saved
    printed = answered("prune", *caches, "-o", folder / "again", "--eps", 0.1)
    assert set(results["JobResult"].to_json()) <= set(printed)


def test_failures_are_in_the_summary(results: dict[str, Any]) -> None:
    summary = results["JobResult"].summary()
    assert "2 of 3 caches" in summary
    assert "failed     1" in summary
    assert "<i>.safetensors" in summary
    assert "&lt;i&gt;.safetensors" in results["JobResult"]._repr_html_()


def test_a_verdict_that_does_not_hold_says_so(folder: Path, tmp_path: Path) -> None:
    data = bytearray((folder / "out" / "a.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "a.safetensors").write_bytes(data)
    told: list[Any] = []
    verdict = ck.verify(tmp_path / "a.safetensors", on_output=told.append)
    assert not verdict.holds
    assert "DOES NOT HOLD" in verdict.summary()
    assert str(verdict.outputs[0].findings[0]) in verdict.summary()
    assert told == list(verdict.outputs)
    assert "not known" in verdict.summary()


def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: ck.verify([]), "no input"),
        (lambda: ck.verify(tmp_path / "none"), "does not exist"),
        (lambda: ck.verify(folder / "out", sample=3), "give against"),
        (lambda: ck.analyze(folder / "in" / "a.safetensors", []), "eps is empty"),
    ]
    for call, words in calls:
        with pytest.raises(ck.CertkError, match=words):
            call()


def test_a_job_without_outputs_is_told(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.safetensors").write_text("none")
    job = ck.prune(tmp_path, tmp_path / "out", 0.1)
    assert "0 of 2 caches" in job.summary()
    assert job._repr_html_()
    if pytest.importorskip("pandas"):
        assert len(job.to_pandas()) == 0


def test_layers_may_be_numbers(folder: Path, tmp_path: Path) -> None:
    by_number: Any = {0: 0.1, "*": 0.2}
    cache = folder / "in" / "a.safetensors"
    ck.prune(cache, tmp_path / "number", by_number)
    ck.prune(cache, tmp_path / "text", {"0": 0.1, "*": 0.2})
    written = [(tmp_path / way / "a.safetensors").read_bytes() for way in ("number", "text")]
    assert written[0] == written[1]
