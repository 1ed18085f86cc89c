"""The calls of a `Recorder` in time: records, frames, lines of JSON, and the plot."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import certk_rs as ck
import model_zoo as zoo
from certk_rs import transformers as ct
from certk_rs.transformers.attention import certified_attention
from certk_rs.transformers.recorder import record
from certk_rs.transformers.settings import Budget
from model_caches import run

FIELDS = [
    *("call", "layer", "name", "rows", "n", "kept", "scored", "tail_mass_upper"),
    *("budget", "kind", "error_bound", "holds"),
]


def decoded(recorder: ct.Recorder, steps: int = 3, **budget: Any) -> ct.Recorder:
    """Record a prompt and a few steps behind it."""
    model = ct.use(zoo.peaked("llama"), **(budget or {"eps": 0.1}), even_if_slower=True)
    ids = zoo.tokens(2, 24)
    with recorder:
        cache = run(model, ids, use_cache=True).past_key_values
        for step in range(steps):
            run(model, ids[:, step : step + 1], past_key_values=cache)
    return recorder


def by_hand(recorder: ct.Recorder) -> list[dict[str, Any]]:
    """Return the records that the figures of single rows give."""
    found, before = [], Counter[int]()
    for call in recorder.calls:
        some, kind = call.n > 0, "eps" if call.budget.out_tol is None else "out_tol"
        k, scored, n = (x[some].astype(float) for x in (call.k, call.scored, call.n))
        mass, limit = call.tail_mass_upper[some], getattr(call.budget, kind)
        bounds = None if call.error_bound is None else call.error_bound[some]
        figures = [
            *(before[call.layer], call.layer, recorder.layers[call.layer].name, len(n)),
            *(max(n, default=0), np.mean(k / n) if n.size else None),
            *(np.mean(scored / n) if n.size else None, max(mass, default=0.0), limit, kind),
            None if bounds is None else max(bounds, default=0.0),
            all((mass if kind == "eps" else bounds) <= limit),
        ]
        found.append(dict(zip(FIELDS, figures, strict=True)))
        before[call.layer] += 1
    return found


def near(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return them for a comparison in which means may be rounded otherwise."""
    return [
        each | {name: pytest.approx(each[name], rel=1e-14) for name in ("kept", "scored")}
        if each["rows"]
        else each
        for each in records
    ]


@contextmanager
def two_calls(**budget: Any) -> Iterator[ct.Recorder]:
    """Record rows of which some, and in the second call all, see no key."""
    torch.manual_seed(0)
    layer, q, k = torch.nn.Module(), 6 * torch.randn(1, 2, 3, 8), torch.randn(1, 2, 40, 8)
    mask = torch.ones(1, 1, 3, 40, dtype=torch.bool)
    mask[:, :, 1] = False
    mask[:, :, 2, 30:] = False
    with ct.budget(**budget, even_if_slower=True), ct.Recorder() as recorder:
        certified_attention(layer, q, k, k, mask)
        certified_attention(layer, q, k, k, mask & False)
        yield recorder


def made(
    rows: list[tuple[int, float, float]],
    *,
    budget: Budget | None = None,
    n: int = 8,
    **options: Any,
) -> ct.Recorder:
    """Record calls of one row each, of two of n keys, by layer, tail mass and error bound."""
    modules = {layer: torch.nn.Module() for layer, _, _ in rows}
    for layer, module in modules.items():
        module.layer_idx = layer
    with ct.Recorder(**options) as recorder:
        for layer, mass, bound in rows:
            mass_of, bound_of = (np.full((1, 1, 1), x) for x in (mass, bound))
            count, seen = np.full((1, 1, 1), 2), SimpleNamespace(counts=np.full((1, 1, 1), n))
            result = ck.AttentionResult(
                *(None, mass_of, bound_of, count, count, count.astype(np.uint8), mass_of, mass_of)
            )
            record(modules[layer], result, seen, budget or Budget(0.1))  # type: ignore[arg-type]
    return recorder


# ---------------------------------------------------------------------------------- records


@pytest.mark.parametrize("budget", [{"eps": 0.1}, {"eps": 0}, {"out_tol": 0.5}])
def test_records_are_what_the_rows_say(budget: dict[str, float]) -> None:
    recorder = decoded(ct.Recorder(), **budget)
    records = recorder.records()
    assert [list(each) for each in records] == [FIELDS] * 12
    assert [(each["call"], each["layer"]) for each in records] == [
        (call, layer) for call in range(4) for layer in range(3)
    ]
    assert records == near(by_hand(recorder))
    assert {type(each["n"]) for each in records} == {int}
    if budget.get("eps") != 0:
        assert any(each["kept"] < 1 and each["tail_mass_upper"] > 0 for each in records)


def test_the_certificates_are_those_of_the_records() -> None:
    recorder = decoded(ct.Recorder())
    for layer in recorder.layers:
        own = [each for each in recorder.records() if each["layer"] == layer.layer]
        assert layer.calls == len(own)
        assert layer.rows == sum(each["rows"] for each in own)
        for name in ("tail_mass_upper", "error_bound", "budget"):
            assert getattr(layer, name) == max(each[name] for each in own)
        kept = sum(each["kept"] * each["rows"] for each in own) / layer.rows
        assert layer.kept == pytest.approx(kept, rel=1e-14)


@pytest.mark.parametrize("budget", [{"eps": 0.3}, {"out_tol": 0.3}])
def test_rows_that_see_no_key_are_not_counted(budget: dict[str, float]) -> None:
    with two_calls(**budget) as recorder:
        first, second = recorder.records()
    assert [first, second] == near(by_hand(recorder))
    assert (first["rows"], first["n"]) == (4, 40)
    assert (second["rows"], second["n"], second["kept"], second["scored"]) == (0, 0, None, None)
    assert (second["tail_mass_upper"], second["error_bound"], second["holds"]) == (0, 0, True)
    [layer] = recorder.layers
    assert (layer.rows, layer.kept) == (4, pytest.approx(first["kept"]))


def test_records_need_no_rows_and_tell_what_was_not_asked_for() -> None:
    full = decoded(ct.Recorder())
    brief = decoded(ct.Recorder(rows=False, error_bounds=False))
    assert brief.calls == []
    assert brief.records() == [each | {"error_bound": None} for each in full.records()]
    # A budget on the output asks for them all the same.
    told = decoded(ct.Recorder(error_bounds=False), out_tol=0.5).records()
    assert all(0 <= each["error_bound"] <= 0.5 for each in told)


def test_a_breach_is_told_of_the_call_that_it_is_in() -> None:
    records = made([(3, 0.05, 1.0), (3, 0.2, 1.0), (3, 0.1, math.inf)]).records()
    assert [each["holds"] for each in records] == [True, False, True]
    assert [each["error_bound"] for each in records] == [1.0, 1.0, math.inf]
    [layer] = made([(3, 0.1, 1.0), (3, 0.1, 2.0), (3, 0.1, 0.5)]).layers
    assert (layer.holds, layer.error_bound) == (True, 2.0)
    by_output = made([(3, 0.2, 1.0), (3, 0, math.inf)], budget=Budget(None, 2.0)).records()
    assert [each["holds"] for each in by_output] == [True, False]


def test_only_who_may_drop_more_is_told_how() -> None:
    told = [(3, 0.0, 0.0)] * 2
    assert "even_if_slower=True" in made(told, n=2).summary()
    for other in (Budget(0.0), Budget(0.1, even_if_slower=True)):
        assert "even_if_slower" not in made(told, n=2, budget=other).summary()
    assert "even_if_slower" not in made(told).summary()


def test_a_recorder_that_saw_nothing_has_no_records() -> None:
    with ct.Recorder() as recorder:
        assert recorder.records() == []
        assert recorder.layers == []
    into = io.StringIO()
    recorder.to_jsonl(into)
    assert into.getvalue() == ""


def test_a_recorder_may_be_read_while_it_records() -> None:
    model = ct.use(zoo.build("llama"), eps=0)
    with ct.Recorder() as recorder:
        for calls in (1, 2):
            run(model, zoo.tokens(1, 4))
            assert len(recorder.records()) == 3 * calls
            assert recorder.summary() == str(recorder)
    assert "tail mass &lt;=" in recorder._repr_html_()


# ------------------------------------------------------------------------------ lines of JSON


def strict(text: str) -> list[dict[str, Any]]:
    """Parse lines of JSON, without what Python adds to it."""

    def refuse(token: str) -> Any:
        raise AssertionError(f"{token} is not JSON")

    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


@pytest.fixture
def many_turns() -> Iterator[None]:
    """Let threads change turns as often as they can, as they do without the lock of Python."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-7)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("many_turns")
def test_threads_of_one_context_record_every_call_once() -> None:
    modules = [torch.nn.Module() for _ in range(4)]
    count, mass = np.full((1, 1, 1), 2), np.full((1, 1, 1), 0.01)
    seen: Any = SimpleNamespace(counts=np.full((1, 1, 1), 8))

    def calls(order: list[int]) -> None:
        for i in order:
            result = ck.AttentionResult(
                *(None, mass, mass, count, count, count.astype(np.uint8), mass, mass)
            )
            record(modules[i], result, seen, Budget(0.1))

    with ct.Recorder() as recorder, ThreadPoolExecutor(4) as pool:
        orders = [[(i + start) % 4 for i in range(400)] for start in range(4)]
        # As asyncio.to_thread does it, and threads of free-threaded Python by themselves.
        running = [pool.submit(copy_context().run, calls, order) for order in orders]
        while not all(each.done() for each in running):
            recorder.records()
        for each in running:
            each.result()
    told = [(each["layer"], each["call"]) for each in recorder.records()]
    assert sorted(told) == [(layer, call) for layer in range(4) for call in range(400)]
    assert [call.layer for call in recorder.calls] == [layer for layer, _ in told]


def test_lines_of_json_are_the_records(tmp_path: Path) -> None:
    recorder, into = decoded(ct.Recorder()), io.StringIO()
    recorder.to_jsonl(into)
    assert strict(into.getvalue()) == recorder.records()
    recorder.to_jsonl(tmp_path / "calls.jsonl")
    assert (tmp_path / "calls.jsonl").read_text() == into.getvalue()


def test_lines_have_no_number_that_json_has_not() -> None:
    least, into = 5e-324, io.StringIO()
    recorder = made([(3, least, math.inf), (4, 0.1, 1e308), (3, 0.1 + 0.2, 0.0)])
    recorder.to_jsonl(into)
    lines = strict(into.getvalue())
    # Null has no finite bound; every other number is the same again, and so still a bound.
    assert [each["error_bound"] for each in lines] == [None, 1e308, 0.0]
    assert [each["tail_mass_upper"] for each in lines] == [least, 0.1, 0.1 + 0.2]
    unasked = io.StringIO()
    made([(3, 0.0, math.inf)], error_bounds=False).to_jsonl(unasked)
    assert "error_bound" not in strict(unasked.getvalue())[0]
    with two_calls(eps=0.3) as recorder:
        recorder.to_jsonl(empty := io.StringIO())
    assert strict(empty.getvalue())[1]["kept"] is None


@pytest.mark.parametrize("name", ["calls.jsonl", "calls.svg"])
def test_a_file_is_replaced_only_when_asked(name: str, tmp_path: Path) -> None:
    recorder, path = made([(3, 0.1, 1.0)]), tmp_path / name
    write = recorder.plot if name.endswith("svg") else recorder.to_jsonl
    path.write_text("mine")
    with pytest.raises(ck.CertkError, match="exists already"):
        write(str(path))
    assert path.read_text() == "mine"
    write(path, replace=True)
    assert path.read_text() != "mine"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_fails_midway_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, path = made([(3, 0.1, 1.0), (3, 0.2, 1.0)]), tmp_path / "calls.jsonl"
    whole, left = json.dumps, [1]

    def fail(*args: Any, **options: Any) -> str:
        if not left:
            raise MemoryError
        left.pop()
        return whole(*args, **options)

    path.write_text("mine")
    monkeypatch.setattr(json, "dumps", fail)
    with pytest.raises(MemoryError):
        recorder.to_jsonl(path, replace=True)
    assert [each.read_text() for each in tmp_path.iterdir()] == ["mine"]


# ------------------------------------------------------------------------------------ frames


def test_a_frame_has_the_records() -> None:
    pytest.importorskip("pandas")
    recorder = decoded(ct.Recorder())
    frame = recorder.to_pandas()
    assert list(frame.columns) == FIELDS
    assert frame.to_dict("records") == recorder.records()
    assert {frame[name].dtype.kind for name in ("call", "layer", "rows", "n")} == {"i"}
    # A frame is the caller's own.
    frame.loc[:, "tail_mass_upper"] = 2.0
    assert max(each["tail_mass_upper"] for each in recorder.records()) <= 0.1


def test_numbers_of_a_frame_that_are_not_there_are_nan() -> None:
    pytest.importorskip("pandas")
    assert made([(3, 0.1, 1.0)], error_bounds=False).to_pandas()["error_bound"].isna().all()
    assert made([(3, 0.1, math.inf)]).to_pandas()["error_bound"].tolist() == [math.inf]
    with two_calls(eps=0.3) as recorder:
        assert recorder.to_pandas()["kept"].isna().tolist() == [False, True]
    assert len(ct.Recorder().to_pandas()) == 0


@pytest.mark.parametrize(
    ("package", "call", "says"),
    [
        ("pandas", lambda recorder, _: recorder.to_pandas(), r"pip install 'pandas>=2\.1'$"),
        ("matplotlib", lambda recorder, _: recorder.plot(), r"pip install 'matplotlib>=3\.9'$"),
        (
            "matplotlib", lambda recorder, path: recorder.plot(path),
            r"pip install 'matplotlib>=3\.9'$",
        ),
    ],
)  # fmt: skip
def test_a_package_that_is_missing_is_named(
    package: str, call: Any, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ck.CertkError, match=says):
        call(made([(3, 0.1, 1.0)]), tmp_path / "plot.png")
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------------- plot


@pytest.fixture
def plt() -> Iterator[Any]:
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def lines_of(axes: Any) -> dict[str, Any]:
    """Return the lines of a panel that have points, by their labels: calls and values."""
    lines = {line.get_label(): np.array(line.get_data(), float) for line in axes.get_lines()}
    lines = {label: data[:, ~np.isnan(data[1])] for label, data in lines.items()}
    return {label: data.tolist() for label, data in lines.items() if data.size}


@pytest.mark.parametrize("budget", [{"eps": 0.1}, {"eps": 1e-9}])
def test_a_plot_has_a_line_per_layer_and_the_budget(plt: Any, budget: dict[str, float]) -> None:
    recorder = decoded(ct.Recorder(), **budget)
    axes = recorder.plot()
    records = recorder.records()
    assert plt.fignum_exists(axes[0].figure.number)  # `show` and notebooks show it
    for panel, name in zip(axes, ("tail_mass_upper", "error_bound"), strict=True):
        assert panel.get_yscale() == "log"
        drawn = lines_of(panel)
        assert [line.get_label() for line in panel.get_lines()].count("budget") <= 1
        for layer in range(3):
            told = {each["call"]: each[name] for each in records if each["layer"] == layer}
            calls, values = drawn.pop(f"layer {layer}", [[], []])
            assert dict(zip(calls, values, strict=True)) == {
                call: value for call, value in told.items() if value > 0
            }
            calls, _ = drawn.pop(f"_off {layer}", [[], []])
            assert calls == [call for call, value in told.items() if value == 0]
        limit = budget["eps"]
        assert drawn == ({"budget": [[0, 1, 2, 3], [limit] * 4]} if panel is axes[0] else {})
    assert "red: eps" in axes[0].get_title()
    assert "eps" not in axes[1].get_title()


def test_a_budget_on_the_output_is_in_its_panel(plt: Any) -> None:
    first, second = made([(3, 0.1, 1.0)] * 2, budget=Budget(None, 2.0)).plot()
    assert "budget" not in lines_of(first)
    assert lines_of(second)["budget"] == [[0, 1], [2.0, 2.0]]
    assert "out_tol" in second.get_title()


def test_budgets_that_differ_have_lines_of_their_own(plt: Any) -> None:
    model, ids = ct.use(zoo.build("llama"), eps=0.3), zoo.tokens(1, 8)
    with ct.Recorder() as recorder:
        run(model, ids)
        with ct.budget(out_tol=0.5):
            run(model, ids)
        with ct.budget(eps=0.2):
            run(model, ids)
    first, second = recorder.plot()
    assert lines_of(first)["budget"] == [[0, 2], [0.3, 0.2]]
    assert lines_of(second)["budget"] == [[1], [0.5]]


def test_zero_and_infinity_are_drawn_at_the_ends_which_are_named(plt: Any) -> None:
    told = [(3, 0.0, math.inf), (3, 0.05, 0.2), (4, 2e-5, 0.0), (4, 0.0, 30.0)]
    first, second = made(told).plot()
    assert lines_of(first) == {
        **{"layer 3": [[1], [0.05]], "_off 3": [[0], [1e-5]], "budget": [[0, 1], [0.1, 0.1]]},
        **{"layer 4": [[0], [2e-5]], "_off 4": [[1], [1e-5]]},
    }
    assert lines_of(second) == {
        **{"layer 3": [[1], [0.2]], "_off 3": [[0], [100.0]]},
        **{"layer 4": [[1], [30.0]], "_off 4": [[0], [0.1]]},
    }
    assert "(0 is drawn at $10^{-5}$)" in first.get_ylabel()
    assert "(0 is drawn at $10^{-1}$)" in second.get_ylabel()
    assert "(inf is drawn at $10^{2}$)" in second.get_ylabel()
    # Nothing is said where nothing is moved.
    assert all("drawn" not in panel.get_ylabel() for panel in made([(3, 0.1, 0.1)]).plot())


def test_numbers_far_from_all_others_leave_the_axis_as_it_is(plt: Any) -> None:
    first, second = made([(3, 5e-324, 1e308), (3, 0.01, 1e308)]).plot()
    assert lines_of(first)["_off 3"] == [[0], [1e-16]]
    assert "(less is drawn at $10^{-16}$)" in first.get_ylabel()
    assert lines_of(second)["_off 3"] == [[0, 1], [1e301, 1e301]]
    assert "(more is drawn at $10^{301}$)" in second.get_ylabel()
    second.figure.canvas.draw()
    for told in ([(3, 0.0, math.inf)], [(3, 5e-324, 5e-324)]):
        for panel in made(told, budget=Budget(0.0)).plot():
            [value] = lines_of(panel)["_off 3"][1]
            assert 0 < value < math.inf
            panel.figure.canvas.draw()


def test_what_was_not_computed_is_not_drawn(plt: Any) -> None:
    _, second = made([(3, 0.1, 1.0)], error_bounds=False).plot()
    assert lines_of(second) == {}
    assert "not computed" in second.get_title()
    with two_calls(eps=0.3) as recorder:
        first, _ = recorder.plot()
    assert lines_of(first).keys() == {"layer 0", "budget"}
    assert lines_of(first)["layer 0"][0] == [0]
    for panel in ct.Recorder().plot():
        assert lines_of(panel) == {}


@pytest.mark.parametrize("layers", [1, 2, 24])
def test_layers_are_told_apart_by_a_bar_of_colours(layers: int, plt: Any) -> None:
    axes = made([(3 + 2 * i, 0.1, 1.0) for i in range(layers)]).plot()
    [bar] = [each for each in axes[0].figure.axes if each not in list(axes)]
    assert bar.get_ylabel() == "layer"
    ticks = [int(label.get_text()) for label in bar.get_yticklabels()]
    assert ticks[0] == 3
    assert len(ticks) == min(layers, 12)
    colours = {str(line.get_color()) for line in axes[0].get_lines()}
    assert len(colours - {"tab:red"}) == layers
    left, right = axes[0].get_xlim()
    assert [tick for tick in axes[0].get_xticks() if left <= tick <= right] == [0]  # no halves


def test_a_plot_goes_to_a_file_and_to_no_window(plt: Any, tmp_path: Path) -> None:
    axes = made([(3, 0.1, 1.0)]).plot(tmp_path / "plot.PNG")
    assert (tmp_path / "plot.PNG").read_bytes().startswith(b"\x89PNG")
    assert plt.get_fignums() == []
    assert len(axes) == 2
    for name in ("plot", "plot.docx"):
        with pytest.raises(ck.CertkError, match=r"path is .*plot.*: give a name that ends in"):
            made([(3, 0.1, 1.0)]).plot(str(tmp_path / name))
    assert [each.name for each in tmp_path.iterdir()] == ["plot.PNG"]


def test_a_plot_goes_into_axes_that_are_there(plt: Any, tmp_path: Path) -> None:
    figure, own = plt.subplots(2, 1)
    axes = made([(3, 0.1, 1.0)]).plot(tmp_path / "plot.svg", axes=own)
    assert list(axes) == list(own)
    assert axes[0].figure is figure
    assert "layer 3" in lines_of(own[1])
    assert "<svg" in (tmp_path / "plot.svg").read_text()
    with pytest.raises(ck.CertkError, match="axes: 1 given; pass two"):
        made([(3, 0.1, 1.0)]).plot(axes=own[0])


# ---------------------------------------------------------------------------------- Prometheus

SAMPLE = re.compile(r'([a-z_]+)\{layer="(\d+)"\} (\+Inf|NaN|[0-9][0-9.e+-]*)')


def exposed(text: str) -> dict[str, dict[int, float]]:
    """Read the text format by its rules: each family once, HELP and TYPE first, all lines ended."""
    assert text.endswith("\n")
    found: dict[str, dict[int, float]] = {}
    lines = text.removesuffix("\n").split("\n")
    while lines:
        about = re.fullmatch(r"# HELP ([a-z_]+) ([^\\]+)", lines.pop(0))
        assert about is not None
        kind = re.fullmatch(rf"# TYPE {about[1]} (counter|gauge)", lines.pop(0))
        assert kind is not None
        assert (kind[1] == "counter") == about[1].endswith("_total")
        assert about[1] not in found
        samples = found[about[1]] = {}
        while lines and lines[0][0] != "#":
            sample = SAMPLE.fullmatch(lines.pop(0))
            assert sample is not None
            assert sample[1] == about[1]
            assert int(sample[2]) not in samples
            samples[int(sample[2])] = float(sample[3])
    return found


def test_prometheus_gets_the_certificates_of_layers() -> None:
    recorder = decoded(ct.Recorder())
    found = exposed(recorder.to_prometheus())
    for each in recorder.layers:
        assert {name: samples[each.layer] for name, samples in found.items()} == {
            "certk_calls_total": each.calls,
            "certk_calls_unproven_total": 0,
            "certk_rows_total": each.rows,
            "certk_tail_mass_upper": each.tail_mass_upper,
            "certk_error_bound": each.error_bound,
            "certk_kept_share": each.kept,
            "certk_scored_share": each.scored,
        }
    assert all(len(samples) == len(recorder.layers) for samples in found.values())


def test_prometheus_of_calls_that_are_not_proven() -> None:
    rows = [(3, 1e-320, 0.5), (3, 0.2, math.inf), (7, 0.1, 1.0), (3, 0.3, 1.0)]
    found = exposed(made(rows).to_prometheus())
    assert found["certk_calls_unproven_total"] == {3: 2, 7: 0}
    assert found["certk_calls_total"] == {3: 3, 7: 1}
    assert found["certk_error_bound"] == {3: math.inf, 7: 1.0}
    assert found["certk_tail_mass_upper"] == {3: 0.3, 7: 0.1}
    unasked = exposed(made(rows, error_bounds=False).to_prometheus())
    assert unasked["certk_error_bound"] == {}
    with ct.Recorder() as recorder:
        assert set(map(len, exposed(recorder.to_prometheus()).values())) == {0}


def test_records_pass_a_gate(tmp_path: Path) -> None:
    recorder, path = decoded(ct.Recorder()), tmp_path / "calls.jsonl"
    recorder.to_jsonl(path)
    worst = max(each.tail_mass_upper for each in recorder.layers)
    error = max(each.error_bound or 0.0 for each in recorder.layers)
    assert ck.gate(path, tv=worst, error=error).passes
    assert not ck.gate(path, tv=math.nextafter(worst, 0)).passes
    assert not ck.gate(path, error=math.nextafter(error, 0)).passes
    for rows, unproven in ([(3, 0.2, 1.0), (3, 0.1, 1.0)], 0.5), ([(0, 0.1, 1.0)], 0):
        made(rows, error_bounds=False).to_jsonl(path, replace=True)
        assert ck.gate(path, unproven=unproven).passes
        assert not ck.gate(path, unproven=unproven, error=9).passes
        assert ck.gate(path, tv=1).passes == (unproven == 0)
