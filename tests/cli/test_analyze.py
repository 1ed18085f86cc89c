"""`certk analyze`: its numbers against float64 from the file, its page, and what it refuses."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from certk_rs._display.tables import tidy
from certk_rs._jobs import analyze
from certk_rs._jobs.analyze import CacheAnalysis, analyze_cache
from certk_rs._jobs.analyze_page import verdict
from cli_fixtures import answered, said
from page_reader import Page
from repository import EXAMPLE

KNOWN: dict[tuple[float, ...], CacheAnalysis] = {}


def fewest(weights: np.ndarray, eps: float) -> int:
    ordered = np.sort(weights)[::-1] / weights.sum()
    return int((np.cumsum(ordered) < 1 - eps).sum()) + 1


def save_layer(
    folder: Path, query: np.ndarray, key: np.ndarray, metadata: dict[str, str] | None = None
) -> Path:
    """Save a cache of one layer whose values are its keys."""
    path = folder / "x.safetensors"
    tensors = {"layers.0.query": query, "layers.0.key": key, "layers.0.value": key.copy()}
    save_file(tensors, path, metadata=metadata)
    return path


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Analyze the example once, however often it is shown."""

    def analyzed(source: Any, eps: tuple[float, ...], *more: Any) -> CacheAnalysis:
        if str(source.location) != str(EXAMPLE):
            return analyze_cache(source, eps, *more)
        if eps not in KNOWN:
            KNOWN[eps] = analyze_cache(source, eps, *more)
        return KNOWN[eps]

    monkeypatch.setattr(analyze, "analyze_cache", analyzed)


def test_the_numbers_of_the_example() -> None:
    [cache] = answered("analyze", EXAMPLE)["caches"]
    assert cache["eps"] == [0.1, 0.01, 0.001]
    assert cache["main_eps"] == 0.01
    assert len(cache["heads"]) == 24
    tensors = load_file(EXAMPLE)
    for head in cache["heads"]:
        query = tensors[f"layers.{head['layer']}.query"][0, head["head"]].astype(np.float64)
        key = tensors[f"layers.{head['layer']}.key"][0, head["head"]].astype(np.float64)
        scores = query @ key.T / np.sqrt(32)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        share = weights / weights.sum(1, keepdims=True)
        assert head["sigma"] == pytest.approx(scores.std(1).mean(), rel=1e-12)
        for eps, kept in zip(cache["eps"], head["kept"], strict=True):
            assert kept == pytest.approx(np.mean([fewest(row, eps) for row in weights]) / 512)
        assert head["effective_entries"] == pytest.approx((share >= 0.01).sum(1).mean())
        assert head["participation"] == pytest.approx((1 / (share**2).sum(1)).mean(), rel=1e-9)
        assert head["kept"][1] <= head["multi_gap"] <= head["single_gap"] <= 1
        assert head["kept"][1] <= head["shared"]
        assert 0 < head["shared_lower_bound"] <= head["shared"] <= 1
        few, one = head["kept"][1] <= 0.5, head["shared"]
        alone = "per query" if few else "leave dense"
        together = "prune" if one <= 0.5 else "prune a little"
        assert head["advice"] == (together if one <= 0.85 else alone)
    # Layers are means of their heads.
    assert [layer["layer"] for layer in cache["layers"]] == list(range(6))
    for layer in cache["layers"]:
        heads = [head for head in cache["heads"] if head["layer"] == layer["layer"]]
        assert layer["heads"] == len(heads) == 4
        assert layer["shared"] == pytest.approx(np.mean([head["shared"] for head in heads]))
        for i in range(3):
            kept = [head["kept"][i] for head in heads]
            off = [abs(head["kept"][i] - head["predicted"][i]) for head in heads]
            assert layer["kept"][i] == pytest.approx(np.mean(kept))
            assert layer["rule_error"][i] == pytest.approx(np.mean(off))


@pytest.mark.parametrize(
    ("m", "heads", "kv_heads", "offset"), [(400, 1, 1, None), (40, 2, 1, 24), (40, 4, 2, None)]
)
def test_every_query_counts_over_what_it_sees(
    m: int, heads: int, kv_heads: int, offset: int | None, tmp_path: Path
) -> None:
    rng = np.random.default_rng(3)
    query = rng.standard_normal((1, heads, m, 8)).astype(np.float32)
    # A few queries need far more keys than the others; those with gap bounds may miss them.
    query *= np.where(np.arange(m) % 37 == 5, 0.1, 6.0)[:, None].astype(np.float32)
    key = rng.standard_normal((1, kv_heads, 64, 8)).astype(np.float32)
    told = None if offset is None else {"causal_offset": str(offset)}
    [cache] = answered("analyze", save_layer(tmp_path, query, key, told), "--eps", "0.05")["caches"]
    assert len(cache["heads"]) == heads
    for head in cache["heads"]:
        keys = key[0, head["head"] * kv_heads // heads].astype(np.float64)
        kept = []
        for i, q in enumerate(query[0, head["head"]].astype(np.float64)):
            scores = keys[: 64 if offset is None else i + offset + 1] @ q / np.sqrt(8)
            kept.append(fewest(np.exp(scores - scores.max()), 0.05) / len(scores))
        assert head["queries"] == m
        assert head["kept"] == [pytest.approx(np.mean(kept))]
        assert head["kept"][0] <= head["multi_gap"] <= head["single_gap"] <= 1


def test_the_tables_fit_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    most = "rule, 1 gap, 8 cuts, at least, effective, 1/sum P^2"
    for columns, last, of_heads, left_out in [
        (120, "pays", "P^2", []),
        (80, "pays", "advice", ["8 cuts, effective, 1/sum P^2"]),
        (60, "set", "advice", ["at least, pays", most]),
        (40, "0.01", "set", ["eps = 0.001, one set, at least, pays", most]),
    ]:
        monkeypatch.setenv("COLUMNS", str(columns))
        code, out, _ = said("analyze", EXAMPLE, "-v")
        assert code == 0
        lines = [line for line in out[out.index("\n\n") :].splitlines() if line.strip()]
        assert lines[0].split()[-1] == last
        by_head = lines[lines.index("By layer.head:") + 1]
        assert by_head.split()[0] == "head"
        assert of_heads in by_head
        assert not any("…" in line for line in lines)
        assert max(map(len, out.splitlines()[1:])) <= max(columns, 80)
        words = " ".join(out.split())
        assert re.findall(r"Left out, for want of room: (.*?) \(see", words) == left_out


def test_one_file_is_one_sentence_and_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = said("analyze", EXAMPLE)
    assert code == 0
    first, *lines = out.splitlines()
    assert first == (
        f"{EXAMPLE}: pruning pays in few heads at eps = 0.01: in 10 of 24 heads; one set per head "
        "keeps 80 % of the keys, a query on its own needs 61 %."
    )
    later = lines[: lines.index("")]
    assert len(later) <= 6
    said_of_both = re.findall(
        r"eps = (0.0[15]): sets .* lose up to 0\.\d+, .* proven", " ".join(later)
    )
    assert said_of_both == ["0.05"] or len(later) == 6
    lines = lines[len(later) :]
    assert len(lines) <= 16
    begins = ["layer", lines[2].strip(), *"012345", "all"]
    assert [line.split()[0] for line in lines[1:10]] == begins
    # What columns are is said below them.
    below = " ".join(lines[11:])
    for heading in ("eps = ...:", "one set:", "at least", "pays:"):
        assert heading in below


def verdict_of(*advice: str) -> str:
    return verdict(Counter(advice), 0.05, 0.3, 0.9)


def test_the_verdict_is_what_most_heads_ask_for() -> None:
    assert verdict_of("prune", "prune a little", "leave dense") == (
        "pruning pays at eps = 0.05: in 2 of 3 heads; one set per head keeps 90 % of the keys, a "
        "query on its own needs 30 %."
    )
    assert verdict_of("prune", "per query").startswith(
        "pruning pays in few heads at eps = 0.05: in"
    )
    assert verdict_of("per query", "leave dense").startswith("do not prune at eps = 0.05, select ")
    assert verdict_of("leave dense").startswith("leave it dense at eps = 0.05: one set per head wo")


def test_no_table_has_a_column_or_a_row_that_says_nothing(tmp_path: Path) -> None:
    heads = ["layer", "k", "nothing", "mass"]
    rows = [["0", "a", "", "1"], ["1", "a", "", "1"], ["2", "b", "", "1"], ["all", "b", "", "1"]]
    assert tidy(heads, rows) == (
        ["layer", "k", "mass"], [["0-1", "a", "1"], ["2", "b", "1"], ["all", "b", "1"]],
    )  # fmt: skip
    assert tidy(heads, []) == (["layer"], [])
    # Alike in all five layers; rows of one length.
    tensors = {}
    rng = np.random.default_rng(0)
    query, key = (rng.standard_normal((1, 2, n, 8)).astype(np.float32) for n in (4, 12))
    for layer in range(5):
        tensors |= {f"layers.{layer}.{role}": key.copy() for role in ("key", "value")}
        tensors[f"layers.{layer}.query"] = query.copy()
    save_file(tensors, tmp_path / "x.safetensors")
    code, out, _ = said("analyze", tmp_path / "x.safetensors", "-v")
    assert code == 0
    assert [line.split()[0] for line in out[out.index("\n\n") :].splitlines()[3:6]][1:] == [
        "0-4",
        "all",
    ]
    assert "By length" not in out


def test_vast_scores_do_not_tear_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    key = np.zeros((1, 1, 4, 8), np.float32)
    key[0, 0] = np.float32(3e38) * np.array([1, -1, 0.5, 0], np.float32)[:, None]
    path = save_layer(tmp_path, key, key.copy())
    code, out, _ = said("analyze", path, "--html", tmp_path / "vast.html")
    assert code == 0
    assert max(map(len, out.splitlines()[1:-1])) <= 100


def test_the_page_stands_alone(tmp_path: Path) -> None:
    html = tmp_path / "page.html"
    code, shown, _ = said("analyze", EXAMPLE, "-v", "--html", html)
    assert code == 0
    assert "pruning pays in few heads" in shown
    text = html.read_text(encoding="utf-8")
    page = Page(text)
    assert page.fetched == []
    assert page.tags.count("svg") == 1 + 3 + 2
    assert page.tags.count("tr") == (1 + 6 + 1) + (1 + 24)
    # First whether to prune, a plot and a table; the rest is folded.
    first, *folds = text.split('<details class="fold"><summary>')
    assert first.count("<svg") == first.count("<table") == 1
    assert first.index("Pruning pays in few heads") < first.index("<svg") < first.index("<table")
    titles = [fold.partition("<")[0] for fold in folds]
    assert titles == ["Each head", "Rules and bounds"]
    # Small enough for a small screen, and drawn in the colour of the text, whichever that is.
    assert all(float(width) <= 320 for width in re.findall(r'<svg [^>]*width="([\d.]+)pt"', text))
    assert "prefers-color-scheme: dark" in text
    assert "stroke: currentColor" in text
    assert not re.search(r": #(000000|222222|ffffff)", text)
    assert len(page.ids) == len(set(page.ids))
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', text)) <= set(page.ids)
    assert not re.search(r"<script|@import|url\((?!#)", text)
    found = said("analyze", EXAMPLE, "--html", html)
    assert found.code == 2
    assert "exists already" in found.err
