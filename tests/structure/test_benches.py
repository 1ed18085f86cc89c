"""The benchmark's own logic: its oracle sees wrong results, its table fits, its figures add up.

Nothing here judges a time.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import certk_rs as ck

pytest.importorskip("torch")
pytest.importorskip("transformers")

import bench_attention
import bench_select
from harness import levels, peers, rows, table
from harness.clock import LEAST_REPEAT, Arena, Entrant, Times, contest, in_turn
from harness.report import HEADER, WIDTH, Line, Note, mean, row_text, section_text, summary
from harness.verify import CheckFailedError, check_keep_set, check_selection
from sections import growth
from sections.growth_plot import curves, spread

EPS = 0.01


def scores_of(n: int, many: int = 6) -> rows.F32:
    return rows.gaussian(np.random.default_rng(n), many, n)


def with_kept(sel: ck.Selection, kept: list[np.ndarray]) -> ck.Selection:
    """The same certificates for other sets."""
    k = np.array([len(one) for one in kept])
    indptr = np.concatenate([[0], np.cumsum(k)])
    return dataclasses.replace(sel, k=k, indptr=indptr, indices=np.concatenate(kept))


@pytest.mark.parametrize("n", [1, 2, 64, 4097])
def test_the_oracle_accepts_what_is_right(n: int) -> None:
    for dtype in (np.float16, np.float32, np.float64):
        scores = scores_of(n).astype(dtype)
        check_selection(scores, ck.select(scores, EPS), EPS)
    tied = np.round(scores_of(n))
    check_selection(tied, ck.select(tied, EPS), EPS)


def test_the_oracle_sees_each_fault() -> None:
    scores = scores_of(300)
    sel = ck.select(scores, EPS, prove_minimal=True)
    assert sel.minimal.all()
    kept = [sel.row(i).copy() for i in range(len(scores))]
    order = [np.argsort(-row, kind="stable") for row in scores]
    k = int(sel.k[3])

    def refused(one: np.ndarray, why: str) -> None:
        wrong = with_kept(sel, [*kept[:3], np.sort(one), *kept[4:]])
        with pytest.raises(CheckFailedError, match=f"row 3: .*{why}"):
            check_selection(scores, wrong, EPS)

    refused(order[3][: k - 1], "tail mass is outside")
    refused(np.append(order[3][: k - 1], order[3][k]), "not the top k")
    refused(np.append(order[3][: k - 1], order[3][0]), "listed twice")
    looser = ck.select(scores, EPS, min_keep=k + 1)
    with pytest.raises(CheckFailedError, match="row 3: fewer keys would do"):
        check_selection(scores, looser, EPS)
    with pytest.raises(CheckFailedError, match="exceeds eps"):
        check_selection(scores, sel, EPS / 2)
    lower, upper = sel.tail_mass_lower.copy(), sel.tail_mass_upper.copy()
    upper[3] = lower[3] = lower[3] * (1 - 1e-3)
    told = dataclasses.replace(sel, tail_mass_lower=lower, tail_mass_upper=upper)
    with pytest.raises(CheckFailedError, match="row 3: the tail mass is outside"):
        check_selection(scores, told, EPS)


def test_the_oracle_wants_the_lower_index_of_equal_scores() -> None:
    scores = np.array([[0.0, 5.0, 5.0, 5.0, -9.0]], dtype=np.float32)
    sel = ck.select(scores, 0.4)
    check_selection(scores, sel, 0.4)
    assert sel.row(0).tolist() == [1, 2]
    other = with_kept(sel, [np.array([1, 3])])
    with pytest.raises(CheckFailedError, match="not the top k"):
        check_selection(scores, other, 0.4)


def test_the_oracle_sees_a_wrong_keep_set() -> None:
    scores = scores_of(200)
    found = ck.keep_set(scores, 0.05)
    check_keep_set(scores, found, 0.05)
    fewer = dataclasses.replace(found, indices=found.indices[:-1])
    with pytest.raises(CheckFailedError, match="outside"):
        check_keep_set(scores, fewer, 0.05)


def test_the_peers_do_what_they_are_timed_for() -> None:
    scores = scores_of(512)
    k = ck.select(scores, EPS).k
    peers.check_peers(scores, k, EPS)
    with pytest.raises(CheckFailedError, match="top-p"):
        peers.check_peers(scores, k, 0.2)


def test_hostile_rows_are_rows() -> None:
    for name, make in rows.HOSTILE.items():
        made = make(np.random.default_rng(1), 3, 130)
        assert made.shape == (3, 130), name
        assert made.dtype == np.float32, name
        assert made.flags.c_contiguous, name
        assert (made > -np.inf).any(axis=1).all(), name
    assert rows.real().shape == (768, 512)


def test_an_arena_places_at_random_and_copies() -> None:
    rng = np.random.default_rng(0)
    data = np.arange(1000, dtype=np.float64).reshape(10, 100)
    arena = Arena(data.nbytes)
    places = set()
    for _ in range(20):
        placed = arena.put(rng, data)
        assert np.array_equal(placed, data)
        assert placed.ctypes.data % 8 == 0
        places.add(placed.ctypes.data % 4096)
    assert len(places) > 5


def test_a_contest_runs_everybody_and_charges_by_score() -> None:
    data = scores_of(100, 8)
    seen: list[tuple[int, ...]] = []

    def bind(array: rows.Array) -> object:
        seen.append(array.shape)
        return lambda: array.sum()

    entrants = [Entrant.of("all", data, bind), Entrant.of("some", data, bind, 250)]
    times = contest(entrants, 1)
    assert set(seen) == {(8, 100), (2, 100)}
    assert [e.scores for e in entrants] == [800, 200]
    assert all(len(one) == LEAST_REPEAT for one in times.readings.values())
    with pytest.raises(ValueError, match="one name"):
        contest(entrants[:1] * 2, 1)


def test_works_are_timed_in_turn() -> None:
    seen: list[str] = []
    works = {name: lambda name=name: seen.append(name) for name in "abc"}
    times = in_turn(works, 1)
    assert all(len(one) == LEAST_REPEAT for one in times.readings.values())
    rounds = [tuple(seen[at : at + 3]) for at in range(0, len(seen), 3)]
    assert len(rounds) == LEAST_REPEAT + 1
    assert all(set(each) == set("abc") for each in rounds)
    assert len(set(rounds)) > 1


@pytest.mark.skipif(levels.SECOND is None, reason="one level")
def test_ours_is_timed_at_a_second_level_too() -> None:
    seen: list[str] = []
    works = {name: lambda: seen.append(ck.simd_level()) for name in ("a", "b")}
    both = levels.beside(works, "a")
    assert list(both) == ["a", "b", levels.named("a")]
    for work in both.values():
        work()
    assert seen == [levels.BEST, levels.BEST, levels.SECOND]
    assert ck.simd_level() == levels.BEST
    times = Times({"a": [1.0, 1.0], "b": [4.0, 4.0], levels.named("a"): [2.0, 2.0]})
    assert times.lower("a", "b") == 0.5
    assert times.lower("b", "a") is None
    levels.agree("equal", lambda: 1.0)
    with pytest.raises(CheckFailedError, match="unequal differs"):
        levels.agree("unequal", lambda: float(ck.simd_level() == levels.BEST))


def test_a_line_judges_the_ratio_of_medians() -> None:
    times = Times({"a": [1.0, 2.0, 9.0], "b": [4.0, 4.0, 4.0]})
    ratio, low, high = times.ratio("a", "b")
    assert ratio == 0.5
    assert low <= 0.5 <= high
    assert "0.500" in (line := table.ratio_line("x", times, "a", "b", 0.5, "rest"))
    assert line.endswith("<=0.50 ok   rest")
    assert "<=0.49 MISS" in table.ratio_line("x", times, "a", "b", 0.49)
    assert "<=" not in table.ratio_line("x", times, "a", "b", None)


def test_a_run_measures_what_is_wanted_and_fails_with_its_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "RESULTS", tmp_path)

    def body(run: table.Run) -> None:
        run.tell(f"{sorted(run.wanted)} {run.repeat} {run.pick('full', 'small')}")
        if "B" in run.wanted:
            raise CheckFailedError("made up")

    def of(*arguments: str) -> int:
        return table.run("About.", {"A": "a", "B": "b"}, "x", 21, body, list(arguments))

    assert of("A", "--quick", "--save") == 0
    assert "['A'] 7 small" in capsys.readouterr().out
    [saved] = tmp_path.iterdir()
    assert saved.name.endswith("-x.md")
    assert "\n['A'] 7 small\n" in saved.read_text()
    assert of() == 1
    told = capsys.readouterr().out
    assert "['A', 'B'] 21 full" in told
    assert "CHECK FAILED: made up" in told
    with pytest.raises(SystemExit):
        of("C")


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_compared_with_float64(causal: bool) -> None:
    import torch

    data = bench_attention.Data.of(2, 600, 600, 16, 3.0, torch.float32)
    found = ck.attention(data.q, data.k, data.v, EPS, causal=causal, even_if_slower=True)
    seen = np.arange(1, 601).mean() if causal else 600
    assert data.check(found, causal) == pytest.approx(found.k.mean() / seen)
    with pytest.raises(CheckFailedError, match="off by"):
        data.check(found, not causal)
    far = dataclasses.replace(found, out=found.out + 1e-3 + np.max(found.error_bound))
    with pytest.raises(CheckFailedError, match="off by"):
        data.check(far, causal)


def test_the_table_fits_and_judges() -> None:
    full = Line("S2", "x" * 23, 0.0123, 0.02, 1 << 24, 16384, 16384, 0.5, 12345, 1234, 0.01, 0.014)
    missed = dataclasses.replace(full, ratio=0.03)
    text = section_text("S2", "title " * 40, [full, missed, Note("S2", "word " * 60)])
    assert all(len(line) <= WIDTH for line in text.splitlines())
    assert len(HEADER) == WIDTH
    assert (full.mark, missed.mark) == ("ok", "MISS")
    assert mean("S2", "mean", [full, missed], 0.02).mark == "MISS"
    assert summary([full, missed]) == "1 of 2 targets met; missed: S2 (1)"
    cells = row_text(full).split()
    assert len(cells) == 11, "two cells that touch look like one"


def test_labels_are_spread_without_changing_their_order() -> None:
    assert spread([0.1, 0.5, 0.9], 0.1) == [0.1, 0.5, 0.9]
    moved = spread([0.50, 0.2, 0.51, 0.49], 0.1)
    assert sorted(range(4), key=lambda i: moved[i]) == [1, 3, 0, 2]
    gaps = np.diff(np.sort(moved))
    assert (gaps > 0.1 - 1e-9).all()


def test_curves_read_the_growth_section() -> None:
    lines = [
        Line("G2", "numpy.argpartition", 0.5, n=n, ours=1.0, peer=2.0) for n in (4096, 64, 256)
    ]
    found = curves([*lines, Note("G2", "text"), Line("S1", "numpy.argpartition", 9.0, n=1)])
    assert found["numpy.argpartition"] == [(64, 2.0), (256, 2.0), (4096, 2.0)]
    assert found["select f32"] == [(64, 1.0), (256, 1.0), (4096, 1.0)]


def test_growth_grants_what_plain_max_pays_and_no_more() -> None:
    def at(n: int, ours: float, least: float) -> growth.Measured:
        times = Times({growth.OURS: [ours], growth.MAX: [least]})
        return growth.Measured(n, 1, 0.25, times, {})

    short, middle, long = at(4096, 1.5, 0.1), at(65536, 1.0, 0.1), at(1 << 24, 3.0, 0.6)
    assert growth.grown(long, short).ratio == pytest.approx(3.0 / 2.0)
    assert growth.grown(middle, long).peer == 3.0, "nothing is granted for cheaper memory"
    worst = growth.band([short, middle, long])
    assert worst.ratio == pytest.approx(3.0 / 1.5)
    assert worst.n == 1 << 24
    assert worst.mark == ""


def test_every_section_is_listed_once() -> None:
    assert sorted(bench_select.ORDER) == sorted(bench_select.TITLES)
    assert sum(len(part.SECTIONS) for part in bench_select.MODULES) == len(bench_select.ORDER)


def test_the_command_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench_select.main(["S7", "--quick", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["failures"] == []
    assert {entry["section"] for entry in report["entries"]} == {"S7"}
    assert report["machine"]["numpy"] == np.__version__

    def broken(*_: object) -> None:
        raise CheckFailedError("row 0: made up")

    monkeypatch.setattr("sections.settings.check_selection", broken)
    assert bench_select.main(["S7", "--quick"]) == 1
    assert "CHECK FAILED in S5, S7: row 0: made up" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench_select.main(["S99"])
    assert "no section S99" in capsys.readouterr().err
