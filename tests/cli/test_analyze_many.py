"""`certk analyze` over many files: bad ones, what all of them need together, and what it costs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from certk_rs import CertkError
from certk_rs._jobs import analyze_page
from certk_rs._jobs.analyze import QUANTILES, Analysis, CacheAnalysis, analyze
from cli_fixtures import answered, said, write_cache
from page_reader import Page


@pytest.fixture
def caches(tmp_path: Path) -> Path:
    """Five caches in two directories, one of more layers; and two that are none."""
    folder = tmp_path / "in"
    for i in range(4):
        write_cache(folder / f"{i}.safetensors", seed=i, spread=1 + i / 2, m=40)
    write_cache(folder / "deep" / "x.safetensors", seed=9, layers=3, m=40)
    (folder / "2b.safetensors").write_bytes(b"no cache")
    (folder / "deep" / "cut.safetensors").write_bytes((folder / "0.safetensors").read_bytes()[:-9])
    return folder


def test_a_bad_file_does_not_stop_the_others(caches: Path) -> None:
    code, out, err = said("analyze", caches, "-r", "--eps", "0.05")
    assert code == 1
    bad = err.splitlines()
    assert [line.partition(": ")[2].partition(":")[0] for line in bad] == ["error", "error"]
    assert "2b.safetensors" in bad[0]
    assert "deep/cut.safetensors" in bad[1]
    lines = out.splitlines()
    # A line for each as it comes, then all together, then the tables of each.
    names = ["0", "1", "2", "3", "deep/x"]
    for line, name in zip(lines, names, strict=False):
        assert line.startswith(f"{caches / name}.safetensors: ")
        assert re.search(r" at eps = 0\.05.* keeps? \d+ % of the keys", line)
    assert re.match(r"5 of 7 files: .* at eps = 0\.05.*\(worst \d+ %, in \S+\)", lines[5])
    assert [line for line in lines if line.startswith("All files, by ")] == ["All files, by layer:"]
    code, out, _ = said("analyze", caches, "-r", "--eps", "0.05", "-v")
    assert code == 1
    lines = out.splitlines()
    together = [i for i, line in enumerate(lines) if line.startswith("All files, by ")]
    own = [i for i, line in enumerate(lines) if line == "By layer.head:"]
    assert len(together) == 2
    assert len(own) == 5
    assert max(together) < min(own)


def test_fail_fast_and_an_only_file_end_it(caches: Path) -> None:
    code, out, err = said("analyze", caches, "--fail-fast", "--json")
    assert code == 2
    assert "2b.safetensors" in err
    assert json.loads(out)["error"]["exit_code"] == 2
    code, _, err = said("analyze", caches / "2b.safetensors")
    assert (code, len(err.splitlines())) == (2, 1)
    with pytest.raises(CertkError, match="2b"):
        analyze(caches, fail_fast=True)


def test_the_aggregate_is_that_of_the_files(caches: Path) -> None:
    body = answered("analyze", caches / "?.safetensors", caches / "deep" / "x*")
    every = body["aggregate"]
    assert (every["files"], every["main_eps"], every["quantiles"]) == (5, 0.01, [0.1, 0.5, 0.9])
    heads = [(cache["name"], head) for cache in body["caches"] for head in cache["heads"]]
    keys = sorted({(head["layer"], head["head"]) for _, head in heads})
    assert len(keys) == 3 * 4
    assert [(each["layer"], each["head"]) for each in every["heads"]] == keys
    assert [(each["layer"], each["head"]) for each in every["layers"]] == [
        (layer, None) for layer in range(3)
    ]
    for each in [every["all"], *every["layers"], *every["heads"]]:
        own = [
            (name, head)
            for name, head in heads
            if each["layer"] in (None, head["layer"]) and each["head"] in (None, head["head"])
        ]
        assert each["files"] == len({name for name, _ in own})
        measures: list[tuple[dict[str, Any], list[float]]] = [
            (each["shared"], [head["shared"] for _, head in own]),
            (each["sigma"], [head["sigma"] for _, head in own]),
            *((each["kept"][i], [head["kept"][i] for _, head in own]) for i in range(3)),
        ]
        for spread, values in measures:
            assert spread["mean"] == pytest.approx(sum(values) / len(values))
            assert spread["worst"] == max(values)
            assert spread["worst_in"] == own[values.index(max(values))][0]
            ordered = sorted(values)
            for q, quantile in zip(QUANTILES, spread["quantiles"], strict=True):
                place = q * (len(ordered) - 1)
                low, part = ordered[int(place)], place % 1
                high = ordered[min(int(place) + 1, len(ordered) - 1)]
                assert quantile == pytest.approx(low + part * (high - low))
        advice = [head["advice"] for _, head in own]
        assert each["advice"] == {word: advice.count(word) for word in set(advice)}


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for i, folder in enumerate("ab"):
        write_cache(tmp_path / folder / "x.safetensors", seed=i, layers=1)
    body = answered("analyze", tmp_path / "a", tmp_path / "b")
    named = {each["shared"]["worst_in"] for each in body["aggregate"]["heads"]}
    assert named <= {str(tmp_path / folder / "x.safetensors") for folder in "ab"}


def test_inputs_are_those_of_prune(caches: Path) -> None:
    for given, files in [
        ((caches / "[01].safetensors",), 2),
        ((f"file://{caches}/0.safetensors", caches / "1.safetensors"), 2),
        ((caches / "0.safetensors", "--layout", "hnd"), 1),
    ]:
        assert len(answered("analyze", *given)["caches"]) == files
    found = said("analyze", caches / "none*")
    assert found.code == 2
    assert "matches no file" in found.err


def test_the_page_has_all_files_together_and_then_each(caches: Path) -> None:
    html = caches.parent / "page.html"
    for i in range(1, 4):
        (caches / f"{i}.safetensors").unlink()
    code, out, _ = said("analyze", caches, "-r", "--eps", "0.05", "--html", html)
    assert code == 1
    text = html.read_text(encoding="utf-8")
    page = Page(text)
    assert page.fetched == []
    assert page.tags.count("svg") == 2 + 2 * 4
    titles = re.findall(r"<h2[^>]*>([^<]*)</h2>", text)
    assert titles == ["All files", "0.safetensors", "deep/x.safetensors"]
    assert text.count("2b.safetensors") == 2
    assert len(page.ids) == len(set(page.ids))
    # The same cells as on the terminal, where there is room for all of them.
    rows = out.splitlines()
    first = next(row.split()[:8] for row in rows if row.split()[:1] == ["all"])
    assert "<tr>" + "".join(f"<td>{cell}</td>" for cell in first) in text


def test_pages_of_very_many_files_have_sections_of_those_that_need_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(analyze_page, "SECTIONS", 2)
    write_cache(tmp_path / "x.safetensors", layers=1, kv_heads=1, heads=1)
    one = analyze(tmp_path / "x.safetensors", [0.05])
    [head] = one.caches[0].heads
    caches = []
    for i, shared in enumerate([0.3, 0.9, 0.1, 0.8, 0.8]):
        heads = (replace(head, shared=shared),)
        name = f"{i}.safetensors"
        caches.append(CacheAnalysis(name, f"/{name}", one.eps, 0, heads))
    text = analyze_page.analysis_page(Analysis(one.eps, one.main, tuple(caches), ()))
    titles = re.findall(r"<h2[^>]*>([^<]*)\.safetensors</h2>", text)
    assert titles == ["1", "3"]
    assert "The 2 files of which one set takes most" in text
    assert all(f"<td>/{i}.safetensors</td>" in text for i in range(5))


def test_the_object_tells_in_words_and_of_each_file(caches: Path) -> None:
    told: list[str] = []
    steps: list[tuple[str, int, int]] = []
    found = analyze(
        str(caches), [0.05, 0.2], recursive=True,
        on_file=lambda each: told.append(each.name), progress=lambda *each: steps.append(each),
    )  # fmt: skip
    assert told == ["0.safetensors", "1.safetensors", "2.safetensors", "2b.safetensors",
                    "3.safetensors", "deep/cut.safetensors", "deep/x.safetensors"]  # fmt: skip
    assert [cache.name for cache in found.caches] == [name for name in told if len(name) != 14
                                                      and "cut" not in name]  # fmt: skip
    assert [each.name for each in found.failures] == ["2b.safetensors", "deep/cut.safetensors"]
    assert found.summary().startswith("Analysis of 5 of 7 caches\n  at eps = 0.05 rows need 0.")
    assert found.eps == (0.2, 0.05)
    assert steps[0][:2] == ("analyzing 0.safetensors (1 of 7)", 1)
    assert all(done <= total for _, done, total in steps)
    assert steps[-1] == ("analyzing deep/x.safetensors (7 of 7)", 4 * 8 + 12, 4 * 8 + 12)
    with pytest.raises(AttributeError):
        found.eps = ()  # type: ignore[misc]


@pytest.mark.parametrize("layers", [6, 17, 128])
def test_names_of_many_layers_do_not_run_into_each_other(
    monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(analyze_page, "svg", lambda figure: figure)
    heads = [
        SimpleNamespace(layer=layer, kept=[0.5], multi_gap=0.6, single_gap=0.9, shared=0.7)
        for layer in range(layers)
    ]
    found: Any = SimpleNamespace(heads=heads, main=0, eps=[0.1])
    figure: Any = analyze_page._rules(found)
    figure.canvas.draw()
    labels = [each for each in figure.axes[0].get_xticklabels() if each.get_text()]
    boxes = [each.get_window_extent() for each in labels]
    assert len(boxes) > 2
    assert all(left.x1 + 2 < right.x0 for left, right in pairwise(boxes))
