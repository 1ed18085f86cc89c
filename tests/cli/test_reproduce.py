"""`certk reproduce`: every experiment runs, is computed, and shows up on one page."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import certk_rs as ck
from certk_rs import reproduce, sparse_attention
from certk_rs._display.page import Table
from certk_rs.errors import CertkError
from certk_rs.reproduce import (
    EXPERIMENTS,
    Settings,
    gap_rules,
    power_windows,
    run_experiments,
)
from certk_rs.reproduce.settings import require_at_most
from cli_fixtures import certk, write_cache
from page_reader import Page
from real_rows import Cache
from repository import EXAMPLE

NAMES = [experiment.NAME for experiment in EXPERIMENTS]

Captured = pytest.CaptureFixture[str]


def figures(path: Path) -> dict[str, Any]:
    """What an experiment found, but for how long things took."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["data"]
    timing = data.pop("timing", None)
    assert timing is None or sum(c.isdigit() for c in timing["seen"]) > 3
    return data


def plan_without_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected values depend on no seed, and take long."""
    plan = SimpleNamespace(k=1.0)
    monkeypatch.setattr(ck.gaussian, "plan", lambda *_: plan)


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_is_computed_anew(name: str, tmp_path: Path) -> None:
    """Twice the same from one seed, shown on the page, with more than one digit in its sentence."""
    for folder in ("a", "b"):
        [done] = run_experiments(tmp_path / folder, [name], Settings(EXAMPLE, brief=True))
        assert done["name"] == name
        assert sum(c.isdigit() for c in done["seen"]) > 3
    assert figures(tmp_path / "a" / f"{name}.json") == figures(tmp_path / "b" / f"{name}.json")
    page = Page()
    page.feed((tmp_path / "a" / "index.html").read_text(encoding="utf-8"))
    assert page.fetched == []
    assert page.tags.count("svg") >= 1
    assert page.tags.count("h2") == 1
    assert len(page.ids) == len(set(page.ids))


def test_runs_add_up_on_one_page(tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "page"
    assert certk("reproduce", "-o", out, "gap-rules", "--brief") == 0
    assert certk("reproduce", "-o", out, "output-error", "--brief", "--json") == 0
    page = Page()
    page.feed((out / "index.html").read_text(encoding="utf-8"))
    assert page.tags.count("h2") == 2
    assert sorted(path.name for path in out.iterdir()) == [
        "gap-rules.json", "index.html", "output-error.json",
    ]  # fmt: skip
    capsys.readouterr()


def test_simulations_depend_on_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_without_time(monkeypatch)
    for seed in (0, 1):
        settings = Settings(EXAMPLE, brief=True, seed=seed)
        run_experiments(tmp_path / str(seed), ["gaussian-rule"], settings)
    one, other = (figures(tmp_path / str(seed) / "gaussian-rule.json") for seed in (0, 1))
    assert one != other


def test_what_cannot_run_is_left_out_or_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> dict[str, object]:
        raise AssertionError("it ran")

    needy = SimpleNamespace(**vars(gap_rules) | {"NAME": "needy", "NEEDS": ("no_such_module",)})
    needy.run = never
    monkeypatch.setattr(reproduce, "EXPERIMENTS", (needy, gap_rules))
    settings, told = Settings(EXAMPLE, brief=True), []
    [done] = run_experiments(tmp_path / "all", [], settings, warn=told.append)
    assert done["name"] == "gap-rules"
    assert len(told) == 1
    assert "no_such_module" in told[0]
    with pytest.raises(CertkError, match="needy needs no_such_module, not installed"):
        run_experiments(tmp_path / "x", ["gap-rules", "needy"], settings)
    assert not (tmp_path / "x").exists()


def test_an_experiment_is_one_file_and_one_registration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = SimpleNamespace(
        NAME="mine", TITLE="Mine", ABOUT="About.", NEEDS=(),
        run=lambda settings, tell: {"seen": "It is 42."},
        plots=lambda data: [], tables=lambda data: [Table(("a",), [("42",)])],
    )  # fmt: skip
    monkeypatch.setattr(reproduce, "EXPERIMENTS", (mine,))
    run_experiments(tmp_path, ["mine"], Settings(EXAMPLE))
    assert "It is 42." in (tmp_path / "index.html").read_text(encoding="utf-8")


def test_refusals(tmp_path: Path, capsys: Captured) -> None:
    with pytest.raises(CertkError, match="there is no experiment 'nothing'"):
        run_experiments(tmp_path / "x", ["nothing"], Settings(EXAMPLE))
    assert not (tmp_path / "x").exists()
    (tmp_path / "index.html").write_text("mine")
    with pytest.raises(CertkError, match="is not a page of certk reproduce"):
        run_experiments(tmp_path, ["rounding"], Settings(EXAMPLE))
    assert (tmp_path / "index.html").read_text() == "mine"
    assert certk("reproduce", "-o", tmp_path / "y", "--data", tmp_path / "none", "rounding") == 2
    assert "none" in capsys.readouterr().err
    assert certk("reproduce", "-o", tmp_path / "index.html", "rounding") == 2
    assert "is not a directory" in capsys.readouterr().err
    assert not (tmp_path / "y").exists()


@pytest.mark.parametrize(
    ("shape", "metadata", "words"),
    [
        ({"n": 200, "m": 4}, {"causal_offset": "120"}, "no query of layer 0 sees more than 124"),
        ({"n": 100}, None, "has 100 keys: the experiments need at least 128"),
    ],
)
def test_data_that_will_not_do_is_refused_first(
    shape: dict[str, int], metadata: dict[str, str] | None, words: str, tmp_path: Path
) -> None:
    write_cache(tmp_path / "x.safetensors", metadata=metadata, **shape)
    with pytest.raises(CertkError, match=words):
        run_experiments(tmp_path / "out", [], Settings(tmp_path / "x.safetensors", brief=True))
    assert not (tmp_path / "out").exists()


def test_layers_of_unequal_length_are_refused(tmp_path: Path) -> None:
    shapes = [(0, 128), (1, 256)]
    tensors = {
        f"layers.{i}.{role}": np.ones((1, 1, n, 4), np.float32)
        for i, n in shapes
        for role in ("query", "key", "value")
    }
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(CertkError, match="layers of 128 and of 256 keys"):
        run_experiments(tmp_path / "out", [], Settings(tmp_path / "x.safetensors"))


def test_flat_data_end_without_a_crash(tmp_path: Path) -> None:
    write_cache(tmp_path / "x.safetensors", n=128, spread=0.0)
    settings = Settings(tmp_path / "x.safetensors", brief=True)
    [done] = run_experiments(tmp_path / "out", ["gap-rules"], settings)
    assert "save 0 %" in done["seen"]
    with pytest.raises(CertkError, match="changes no output"):
        run_experiments(tmp_path / "out", ["output-error"], settings)


def test_flat_data_are_searched_and_attended_to(tmp_path: Path) -> None:
    write_cache(tmp_path / "x.safetensors", n=128, spread=0.0)
    settings = Settings(tmp_path / "x.safetensors", brief=True)
    done = run_experiments(tmp_path / "out", ["key-search", "certified-attention"], settings)
    assert ", 0 break their promise" in done[0]["seen"]
    assert " 0 of " in done[1]["seen"]


WITH_ROWS = ["bert-table", "gap-rules", "output-error", "key-search", "certified-attention"]
# Most of their time goes to rows of their own.
MOSTLY_OWN_ROWS = ["power-windows", "rounding"]


@pytest.mark.parametrize(
    "names", [WITH_ROWS, pytest.param(MOSTLY_OWN_ROWS, marks=pytest.mark.heavy)], ids=len
)
def test_rows_that_are_given_are_what_every_experiment_looks_at(
    names: list[str], tmp_path: Path
) -> None:
    """A causal cache whose length is no multiple of anything, of which only the last 20 queries."""
    path = tmp_path / "mine.safetensors"
    write_cache(path, n=203, m=20, d=8, metadata={"causal_offset": "183"}, layers=1)
    settings = Settings(path, brief=True, given=True)
    run_experiments(tmp_path / "out", names, settings)
    for name in names:
        about = figures(tmp_path / "out" / f"{name}.json")["about"]
        assert "mine.safetensors (1 layers, 4 heads each, d = 8, n = 203); causal: " in about
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert page.count("mine.safetensors") == len(names)
    if "key-search" not in names:
        return
    # The prefix that the last 4 queries of all see, and nothing that one of them does not.
    rows = figures(tmp_path / "out" / "key-search.json")["rows"]
    assert {row["n"] for row in rows} == {128, 200}
    assert all(row["wrong"] == 0 for row in rows)


def test_the_figures_of_the_bert_table_are_true(tmp_path: Path) -> None:
    """The smallest k and the Gaussian rule of each causal row over its own prefix."""
    from scipy.stats import norm

    path = tmp_path / "mine.safetensors"
    metadata = {"causal_offset": "183"}
    tensors = write_cache(path, n=203, m=20, d=8, metadata=metadata, layers=1)
    run_experiments(tmp_path / "out", ["bert-table"], Settings(path, brief=True, given=True))
    q, k = tensors["layers.0.query"][0], tensors["layers.0.key"][0]
    least, rule, seen = [], [], []
    for head in range(4):
        for i in range(12, 20):
            scores = k[head // 2, : 184 + i] @ q[head, i] / math.sqrt(8)
            weights = np.sort(np.exp((scores - scores.max()).astype(np.longdouble)))
            least.append(len(scores) - np.sum(np.cumsum(weights) <= 0.01 * weights.sum()))
            rule.append(len(scores) * norm.sf(scores.std() + norm.ppf(0.01)))
            seen.append(len(scores))
    [row] = figures(tmp_path / "out" / "bert-table.json")["rows"]
    assert row["n"] == np.mean(seen)
    assert row["k"] == np.mean(least)
    assert row["predicted"] == pytest.approx(np.mean(rule), rel=1e-9)
    for rule_name in ("mass", "gap"):
        for over in ("balls", "cells", "codes"):
            assert row["k"] <= row[f"{rule_name}_{over}"] <= row["n"]
    assert row["mass_cells"] <= row["mass_balls"]


def letters(folder: Path) -> Path:
    """A tokenizer of single letters."""
    pytest.importorskip("torch")
    zoo = pytest.importorskip("model_zoo")
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    alphabet = {chr(c): c % zoo.VOCABULARY for c in range(32, 32 + zoo.VOCABULARY)}
    inner = Tokenizer(models.WordLevel(alphabet, unk_token=" "))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    zoo.hf.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=" ").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_rows_of_a_model_of_ones_own(kind: str, tmp_path: Path, capsys: Captured) -> None:
    """An encoder and a decoder over two texts; a cache beside them is refused."""
    model = letters(tmp_path / "model")
    import model_zoo

    model_zoo.build(kind).save_pretrained(model)
    texts: list[str | Path] = []
    for i, word in enumerate(("a stitch in time ", "saves nine ")):
        texts += ["--text", tmp_path / f"text{i}"]
        (tmp_path / f"text{i}").write_text(word * 60, encoding="utf-8")
    out = tmp_path / "out"
    names = ("bert-table", "gap-rules", "key-search")
    arguments = ("reproduce", "-o", out, "--brief", "--model", model)
    assert certk(*arguments, *texts, *names, "--quiet") == 0
    about = [figures(out / f"{name}.json")["about"] for name in names]
    assert "over 2 texts" in about[0]
    assert all("first 512 tokens" in each and "n = 512" in each for each in about[1:])
    assert all(("; causal" in each) == (kind == "llama") for each in about[1:])
    [row] = figures(out / "bert-table.json")["rows"]
    assert row["windows"] == 2
    assert row["n"] == 128 if kind == "bert" else 120 < row["n"] < 128
    capsys.readouterr()
    assert certk(*arguments, "--data", EXAMPLE, *names) == 2
    assert "--data or --model, not both" in capsys.readouterr().err
    assert certk("reproduce", "-o", out, "--text", texts[1], *names) == 2
    assert "give --model DIR, too" in capsys.readouterr().err
    (tmp_path / "short").write_text("short")
    assert certk(*arguments, "--text", tmp_path / "short", *names) == 2
    assert "less than 128 tokens" in capsys.readouterr().err


def test_a_bound_on_the_wrong_side_is_found() -> None:
    require_at_most("it", [1.0, 2.0, math.inf], [1.0, 2.0 - 1e-12, math.inf])
    require_at_most("it", -math.inf, 0.0)
    with pytest.raises(CertkError, match=r"it is broken in 1 of 2 cases .* that is a fault"):
        require_at_most("it", [1.0, 2.0], [1.0, 1.99])
    with pytest.raises(CertkError, match="it is broken"):
        require_at_most("it", math.nan, 1.0)


@pytest.mark.parametrize("form", ["exact", "diameter", "ball", "spectral", "variance"])
def test_a_bound_on_the_output_that_is_too_small_is_found(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output_error = ck.bounds.output_error

    def worse(*args: Any) -> Any:
        found = output_error(*args)
        forms = ("exact", "diameter", "ball", "spectral", "variance")
        fields = {name: getattr(found, name) for name in forms}
        return SimpleNamespace(**fields | {form: fields[form] * 0.01})

    monkeypatch.setattr(ck.bounds, "output_error", worse)
    with pytest.raises(CertkError, match=f"the {form} form is broken"):
        run_experiments(tmp_path, ["output-error"], Settings(EXAMPLE, brief=True))


def test_a_gap_rule_that_keeps_too_little_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smallest_k = ck.bounds.smallest_k

    def worse(*args: Any, **options: Any) -> Any:
        return smallest_k(*args, **options) // 4

    monkeypatch.setattr(ck.bounds, "smallest_k", worse)
    with pytest.raises(CertkError, match="the budget of the rule 'single gap' is broken"):
        run_experiments(tmp_path, ["gap-rules"], Settings(EXAMPLE, brief=True))


@pytest.mark.parametrize("n", [130, 128 + 15, 144])
def test_blocks_cover_every_key(n: int) -> None:
    """The heavy keys are in the last block, which may be short: their mass is not forgotten."""
    last = n - (n - 1) // 16 * 16
    row = np.random.default_rng(n).standard_normal(n)
    row[-last:] = 20.0
    # That block alone carries all but a millionth, so it is what is kept.
    weights = np.exp(row - 20.0)
    kept, lost = gap_rules._blocks(row, 0.01)
    assert kept == last
    assert lost == pytest.approx(weights[:-last].sum() / weights.sum(), rel=1e-9)
    # Equal scores: all blocks but as many as eps of the keys fill.
    assert gap_rules._blocks(np.zeros(n), 0.5)[0] >= n / 2
    assert gap_rules._blocks(np.zeros(n), 0.0) == (n, 0.0)


def real_head(cache: Cache, layer: int, head: int, queries: int) -> list[np.ndarray]:
    """The last queries, the keys and the values of a head of the example, in float64."""
    q, k, v = (cache[f"layers.{layer}.{role}"] for role in ("query", "key", "value"))
    return [part[0, head].astype(np.float64) for part in (q[:, :, -queries:], k, v)]


def test_the_figures_of_key_search_are_true(tmp_path: Path, small_cache: Cache) -> None:
    """k and the gap rule by sums in long double; what was scored by the searches themselves."""
    run_experiments(tmp_path, ["key-search"], Settings(EXAMPLE, brief=True))
    rows = figures(tmp_path / "key-search.json")["rows"]
    n, eps, least, gaps, scored = 512, 0.01, [], [], []
    for layer in range(6):
        for head in range(4):
            q, k, _ = real_head(small_cache, layer, head, 4)
            index = ck.KeyIndex.build(k.astype(np.float32))
            for row in q:
                scores = -np.sort(-(k @ row) / math.sqrt(32)).astype(np.longdouble)
                mass = np.cumsum(np.exp(scores - scores[0])[::-1])[::-1]
                least.append(int(np.argmax(np.append(mass[1:], 0) <= eps * mass[0])) + 1)
                need = [math.log((n - j) * (1 - eps) / (j * eps)) for j in range(1, n)]
                enough = np.flatnonzero(scores[:-1] - scores[1:] >= need)
                gaps.append(enough[0] + 1 if len(enough) else n)
                found = index.search(row.astype(np.float32), eps, rule="mass", over="cells")
                scored.append(int(found.scored))
    [row] = [
        row
        for row in rows
        if (row["n"], row["eps"], row["rule"], row["over"]) == (n, eps, "mass", "cells")
    ]
    assert row["k"] == np.mean(least)
    assert row["gap"] == pytest.approx(np.mean(np.divide(gaps, least)), rel=1e-12)
    assert row["fewer"] == pytest.approx(n / np.mean(scored), rel=1e-12)
    assert row["fewest"] == pytest.approx(n / np.mean(least), rel=1e-12)
    assert row["scored"] == pytest.approx(np.mean(np.divide(scored, least)), rel=1e-12)
    for row in rows:
        assert row["wrong"] == 0
        assert 1 <= row["kept"] <= row["scored"] <= row["worst"] <= row["n"]
        assert row["searches"] == len(least)
    # Balls alone around runs of 16 bound no better than balls and boxes do.
    cells = figures(tmp_path / "key-search.json")["cells"]
    assert {(r["n"], r["eps"]) for r in cells} == {(r["n"], r["eps"]) for r in rows}
    for each in cells:
        key = (each["n"], each["eps"], "mass", "cells")
        [both] = [r for r in rows if (r["n"], r["eps"], r["rule"], r["over"]) == key]
        assert 1 <= each["fewer"] <= both["fewest"]
        if each["size"] == 16 and each["partition"] == "runs of keys":
            assert each["fewer"] <= both["fewer"] * (1 + 1e-9)
    # Over codes few keys more than k are scored unless all are; the gap rule keeps far more.
    codes = [row for row in rows if row["rule"] == "mass" and row["over"] == "codes"]
    # In the mean: of a dozen keys, one more is a tenth.
    assert all(row["in_part"] <= 1.06 for row in codes if (row["n"], row["eps"]) == (n, eps))
    assert all(row["gap"] > 2 for row in codes)


@pytest.mark.parametrize("rule", ["mass", "gap", "top_k"])
def test_a_search_that_keeps_a_wrong_set_is_found(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A set without its best key breaks every rule."""
    search = ck.KeyIndex.search

    def worse(self: ck.KeyIndex, q: np.ndarray, eps: float, **options: Any) -> ck.SearchResult:
        found = search(self, q, eps, **options)
        if options["rule"] != rule or options["over"] != "codes":
            return found
        kept, keys = found.row(()), self._kept
        assert keys is not None
        kept = np.delete(kept, int(np.argmax(keys[kept] @ q)))
        return replace(found, indices=kept, indptr=np.array([0, len(kept)]))

    monkeypatch.setattr(ck.KeyIndex, "search", worse)
    [done] = run_experiments(tmp_path, ["key-search"], Settings(EXAMPLE, brief=True))
    rows = figures(tmp_path / "key-search.json")["rows"]
    broken = {(row["rule"], row["over"]) for row in rows if row["wrong"]}
    assert broken == {(rule, "codes")}
    assert f"{sum(row['wrong'] for row in rows)} break their promise" in done["seen"]


def test_the_figures_of_certified_attention_are_true(tmp_path: Path, small_cache: Cache) -> None:
    """The errors on a layer's real keys, by attention in long double."""
    run_experiments(tmp_path, ["certified-attention"], Settings(EXAMPLE, brief=True))
    rows = figures(tmp_path / "certified-attention.json")["rows"]
    layer = 1
    q, k, v = (
        np.stack(part)
        for part in zip(*(real_head(small_cache, layer, head, 1) for head in range(4)), strict=True)
    )
    scores = (q.astype(np.longdouble) @ k.swapaxes(1, 2)) / np.sqrt(np.longdouble(32))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    exact = weights @ v / weights.sum(axis=-1, keepdims=True)
    k32, v32 = k.astype(np.float32), v.astype(np.float32)
    found = ck.attention(q.astype(np.float32), k32, v32, 0.01, index=ck.KeyIndex.build(k32))
    size = np.linalg.norm(v, axis=-1).mean()
    [row] = [r for r in rows if r.get("layer") == layer and r["n"] == 512 and r["queries"] == 1]
    error = np.linalg.norm((found.out - exact).astype(float), axis=-1)
    assert row["error"] == pytest.approx(error.mean() / size, rel=1e-6)
    assert row["bound"] == pytest.approx(found.error_bound.mean() / size, rel=1e-3)
    assert row["kept"] == found.k.mean() / 512
    assert row["spread"] == pytest.approx(float(scores.std(axis=-1).mean()), rel=1e-9)
    for row in rows:
        assert row["wrong"] == 0
        assert row["error"] <= row["bound"]
        assert row["tail"] <= 0.01
        assert row["kept"] <= row["scored"] <= 1
        if "sigma" in row:
            assert row["spread"] == pytest.approx(row["sigma"], rel=0.1)
    assert {row["queries"] for row in rows} == {1, 4}


def test_a_bound_that_is_too_small_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = sparse_attention.attention

    def worse(*args: Any, **options: Any) -> Any:
        found = attention(*args, **options)
        return SimpleNamespace(
            out=found.out, k=found.k, scored=found.scored, tail_mass_upper=found.tail_mass_upper,
            error_bound=found.error_bound / 1e4,
        )  # fmt: skip

    monkeypatch.setattr(sparse_attention, "attention", worse)
    [done] = run_experiments(tmp_path, ["certified-attention"], Settings(EXAMPLE, brief=True))
    rows = figures(tmp_path / "certified-attention.json")["rows"]
    wrong, judged = sum(row["wrong"] for row in rows), sum(row["rows"] for row in rows)
    assert wrong > judged / 4
    assert f"{wrong} of {judged} outputs are further" in done["seen"]


def test_certified_attention_does_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    [done] = run_experiments(tmp_path, ["certified-attention"], Settings(EXAMPLE, brief=True))
    assert "torch is not installed here" in done["seen"]
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "time / time of our own plain attention" in page
    assert "no torch" in page


def test_times_are_ratios_of_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    """Works take turns, so that what slows the machine down slows all of them."""
    order: list[str] = []
    clock = iter([0.0, 1.0, 1.0, 3.0, 3.0, 4.0, 4.0, 104.0, 104.0, 109.0, 109.0, 111.0])
    monkeypatch.setattr("certk_rs.reproduce.settings.time.perf_counter", lambda: next(clock))
    works = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    assert reproduce.settings.medians(works, 3) == {"a": 1.0, "b": 2.0}
    assert order == ["a", "b"] * 3


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_foreign_table_is_refused_before_anything_runs(text: str, tmp_path: Path) -> None:
    (tmp_path / "rounding.json").write_text(text)
    with pytest.raises(CertkError, match=r"rounding\.json is not a table"):
        run_experiments(tmp_path, ["gap-rules"], Settings(EXAMPLE, brief=True))
    assert not (tmp_path / "gap-rules.json").exists()


def test_another_seed_stays_within_the_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what is drawn: simulated rows, draws of keys, and runs."""
    plan_without_time(monkeypatch)
    pairs: dict[str, list[tuple[float, float, float]]] = {}
    for name, what, width in (("gaussian-rule", "simulated", "error"),
                              ("sampling", "width", "width_error")):  # fmt: skip
        both = []
        for seed in (5, 6):
            settings = Settings(EXAMPLE, brief=True, seed=seed)
            run_experiments(tmp_path / str(seed), [name], settings)
            both.append(figures(tmp_path / str(seed) / f"{name}.json")["rows"])
        of = 2 if width == "error" else 1
        pairs[name] = [
            (a[what], b[what], of * (a[width] + b[width])) for a, b in zip(*both, strict=True)
        ]
    pairs["power-windows"] = []
    for n in (128, 512, 2048):
        one, other = (
            [power_windows._drawn(Settings(EXAMPLE, seed=seed), n, draw) for draw in range(8)]
            for seed in (5, 6)
        )
        for name in (*power_windows.SCALES, *power_windows.ERRORS):
            what = "k" if name in power_windows.SCALES else "tail"
            a, b = power_windows._summed(one, name), power_windows._summed(other, name)
            width = a[f"{what}_error"] + b[f"{what}_error"]
            pairs["power-windows"].append((a[what], b[what], width))
    for name, found in pairs.items():
        a, b, widths = np.transpose(found)
        assert (a != b).any()
        # Two intervals of two standard errors rarely miss each other, the more of few draws.
        assert np.mean(np.abs(a - b) > widths) < 0.1, name
