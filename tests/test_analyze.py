"""`certk analyze`: its numbers against float64 from the file, its page, and what it refuses."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cli_fixtures import certk, write_cache

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "data" / "minilm_small.safetensors"

Captured = pytest.CaptureFixture[str]


def analyzed(capsys: Captured, *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    assert certk("analyze", *arguments, "--json") == 0
    body: dict[str, Any] = json.loads(capsys.readouterr().out)
    return body


def fewest(weights: np.ndarray, eps: float) -> int:
    ordered = np.sort(weights)[::-1] / weights.sum()
    return int((np.cumsum(ordered) < 1 - eps).sum()) + 1


def test_the_numbers_of_the_example(capsys: Captured) -> None:
    [cache] = analyzed(capsys, EXAMPLE)["caches"]
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
        assert (head["advice"] == "leave dense") == (head["shared"] > 0.85)
        assert (head["advice"] == "prune") == (head["shared"] <= 0.5)


def test_causal_rows_count_what_they_see(capsys: Captured, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    query = rng.standard_normal((1, 2, 40, 8)).astype(np.float32)
    key = rng.standard_normal((1, 1, 64, 8)).astype(np.float32)
    path = tmp_path / "causal.safetensors"
    tensors = {"layers.0.query": query, "layers.0.key": key, "layers.0.value": key.copy()}
    save_file(tensors, path, metadata={"causal_offset": "24"})
    [cache] = analyzed(capsys, path, "--eps", "0.05")["caches"]
    for head in cache["heads"]:
        kept = []
        for i, q in enumerate(query[0, head["head"]].astype(np.float64)):
            scores = key[0, 0, : i + 25].astype(np.float64) @ q / np.sqrt(8)
            kept.append(fewest(np.exp(scores - scores.max()), 0.05) / (i + 25))
        assert head["kept"] == pytest.approx([np.mean(kept)])
        assert head["queries"] == 40


def test_grouped_heads_use_their_keys(capsys: Captured, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_cache(path)
    body = analyzed(capsys, path, "--eps", "0.5")
    assert all(0 < head["kept"][0] <= 1 for head in body["caches"][0]["heads"])


class Page(HTMLParser):
    """Counts what is drawn and collects what would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            outside = name in ("src", "href", "xlink:href") and value
            if outside and not str(value).startswith(("#", "data:")):
                self.fetched.append(str(value))


def test_the_page_stands_alone(capsys: Captured, tmp_path: Path) -> None:
    html = tmp_path / "page.html"
    assert certk("analyze", EXAMPLE, "--html", html) == 0
    shown = capsys.readouterr().out
    assert "leave dense" in shown or "prune" in shown
    text = html.read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert page.fetched == []
    assert page.tags.count("svg") == 3
    assert page.tags.count("tr") == 25
    assert not re.search(r"<script|@import|url\((?!#)", text)
    assert certk("analyze", EXAMPLE, "--html", html) == 2
    assert "exists already" in capsys.readouterr().err


def test_refusals(capsys: Captured, tmp_path: Path) -> None:
    for arguments, words in [
        ((tmp_path / "none.safetensors",), "does not exist"),
        ((EXAMPLE, "--eps", "0"), "eps is 0"),
        ((EXAMPLE, "--eps", "1"), "eps is 1"),
        ((EXAMPLE, "--eps", "nan"), "eps is nan"),
        ((EXAMPLE, "--names", "x"), "--names"),
        ((tmp_path,), "no input"),
    ]:
        capsys.readouterr()
        assert certk("analyze", *arguments) == 2
        out, err = capsys.readouterr()
        assert (out, words in err) == ("", True), err
