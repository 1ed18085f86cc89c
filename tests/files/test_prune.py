"""Prune jobs: what is chosen, written and refused, and that nothing half-done stays."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from certk_rs import CertkError, prune
from certk_rs._cli.demo import bars
from certk_rs._files.cache import Cache
from certk_rs._files.certificate import Options, read_certificate
from certk_rs._files.tensor_file import SafetensorsFile
from certk_rs._jobs.results import JobResult, file_json
from certk_rs.audit import audit
from cli_fixtures import cache_tensors, certk, read_output, safetensors_bytes, tensor, write_cache
from repository import EXAMPLE

LAYERS = (0, 1)


def job(tmp_path: Path, eps: float = 0.1, **options: Any) -> JobResult:
    options = {"proof": "full", "fail_fast": True} | options
    return prune(tmp_path / "x.safetensors", tmp_path / "out", eps, **options)


def pruned(
    tmp_path: Path, eps: float = 0.1, *, cache: dict[str, Any] | None = None, **options: Any
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Write a cache, prune it, hold it against the audit; the tensors in and out."""
    given = write_cache(tmp_path / "x.safetensors", **(cache or {}))
    job(tmp_path, eps, **options)
    confirm(tmp_path)
    return given, read_output(tmp_path / "out" / "x.safetensors")


def confirm(tmp_path: Path) -> None:
    """The audit confirms every row and every lower bound."""
    report = audit([tmp_path / "out" / "x.safetensors"], [tmp_path / "x.safetensors"])
    [output] = report.outputs
    assert report.holds, list(map(str, output.findings))
    assert output.confirmed_rows == output.rows > 0
    assert output.confirmed_lower_bounds == output.lower_bounds > 0
    assert output.unchecked == ()


def kept_sets(output: dict[str, np.ndarray], layer: int) -> list[np.ndarray]:
    indices = output[f"layers.{layer}.indices"]
    indptr = output.get(f"layers.{layer}.indptr", np.array([0, len(indices)]))
    return np.split(indices, indptr[1:-1])


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("jobs", [1, 2])
def test_outputs_of_directories_in_directories_are_where_their_inputs_are(
    tmp_path: Path, jobs: int
) -> None:
    names = ["a.safetensors", "sub/b.safetensors", "sub/deep/a.safetensors"]
    for seed, name in enumerate(names):
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True, parents=True)
        write_cache(tmp_path / "in" / name, seed=seed)
    found = prune(tmp_path / "in", tmp_path / "out", 0.1, recursive=True, jobs=jobs)
    assert [file.name for file in found.outputs] == names
    assert not found.failures
    written = (tmp_path / "out").rglob("*.safetensors")
    assert sorted(str(path.relative_to(tmp_path / "out")) for path in written) == names


def test_query_heads_of_a_group_share_the_set_of_their_kv_head(tmp_path: Path) -> None:
    given, output = pruned(tmp_path, cache={"kv_heads": 2, "heads": 6})
    for i in LAYERS:
        query, key = given[f"layers.{i}.query"][0], given[f"layers.{i}.key"][0]
        sets = kept_sets(output, i)
        assert len(sets) == 2
        for head in range(6):
            weights = softmax(query[head] @ key[head // 3].T / 2)
            lost = np.delete(weights, sets[head // 3], axis=1).sum(axis=1)
            upper = output[f"layers.{i}.tail_mass_upper"][head]
            assert (lost <= 0.1).all()
            assert (upper <= 0.1).all()
            np.testing.assert_allclose(upper, lost, rtol=1e-3)


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("granularity", ["head", "layer"])
def test_kept_rows_are_copies(tmp_path: Path, dtype: str, granularity: str) -> None:
    pruned(tmp_path, cache={"dtype": dtype}, granularity=granularity)
    output = read_output(tmp_path / "out" / "x.safetensors")
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        for i in LAYERS:
            sets = kept_sets(output, i)
            for role in ("key", "value"):
                rows = file.read(f"layers.{i}.{role}")[0]
                if granularity == "head":
                    expected = np.concatenate([rows[h][kept] for h, kept in enumerate(sets)])
                else:
                    expected = rows[:, sets[0]]
                assert output[f"layers.{i}.{role}"].dtype == rows.dtype
                np.testing.assert_array_equal(output[f"layers.{i}.{role}"], expected)


def test_shapes_and_dtypes_of_the_output(tmp_path: Path) -> None:
    _, output = pruned(tmp_path)
    total, rows = len(output["layers.0.indices"]), len(output["layers.0.lower_bound_rows"])
    assert 0 < rows <= 12
    assert {name: (str(a.dtype), a.shape) for name, a in output.items() if "s.0." in name} == {
        "layers.0.indices": ("int32", (total,)),
        "layers.0.indptr": ("int64", (3,)),
        "layers.0.key": ("float16", (total, 4)),
        "layers.0.value": ("float16", (total, 4)),
        "layers.0.tail_mass_upper": ("float32", (4, 3)),
        "layers.0.tail_mass_lower": ("float32", (4, 3)),
        "layers.0.lower_bound": ("int64", (2,)),
        "layers.0.lower_bound_rows": ("int64", (rows,)),
        "layers.0.lower_bound_weights": ("float32", (rows,)),
    }


def test_shapes_of_the_output_by_layer(tmp_path: Path) -> None:
    _, output = pruned(tmp_path, granularity="layer")
    total = len(output["layers.0.indices"])
    assert "layers.0.indptr" not in output
    assert output["layers.0.key"].shape == output["layers.0.value"].shape == (2, total, 4)
    assert output["layers.0.lower_bound"].shape == (1,)


def test_the_certificate_says_what_was_asked(tmp_path: Path) -> None:
    given = {"metadata": {"scale": "-0.25", "causal_offset": "21"}, "names": "layer_{i}_{role}"}
    options = {"max_keep": 0.75, "keep_first": 1, "keep_last": 2}
    write_cache(tmp_path / "x.safetensors", **given)
    job(tmp_path, 0.2, **options)
    confirm(tmp_path)
    with SafetensorsFile(tmp_path / "out" / "x.safetensors") as file:
        assert list(file.header.metadata) == ["certk"]
        certificate, complaint = read_certificate(file.header.metadata["certk"])
    assert complaint is None
    assert certificate.eps == {0: (0.2, 0.2), 1: (0.2, 0.2)}
    assert certificate.options == Options("head", **options)
    assert certificate.names == "layer_{i}_{key|value|query}"
    assert (certificate.scales, certificate.causal_offset) == ({0: -0.25, 1: -0.25}, 21)
    assert set(certificate.inputs) == set(cache_tensors(names="layer_{i}_{role}"))


def test_the_output_is_the_same_bytes_every_time(tmp_path: Path) -> None:
    contents = []
    for name, threads in (("a", 1), ("b", 2), ("c", None)):
        write_cache(tmp_path / name / "x.safetensors")
        job(tmp_path / name, threads=threads, unit="head" if name == "b" else "layer")
        contents.append((tmp_path / name / "out" / "x.safetensors").read_bytes())
    assert contents[0] == contents[1] == contents[2]


@pytest.mark.parametrize("eps", [0.0, 1e-300, 1e-80, 1e-6, 0.01, 0.5, 0.99, 1 - 1e-12])
@pytest.mark.parametrize("granularity", ["head", "layer"])
def test_every_budget_is_confirmed(tmp_path: Path, eps: float, granularity: str) -> None:
    _, output = pruned(tmp_path, eps, granularity=granularity)
    assert all((output[f"layers.{i}.tail_mass_upper"] <= eps).all() for i in LAYERS)


@pytest.mark.parametrize("spread", [1e-4, 0.3, 3.0, 30.0, 250.0])
@pytest.mark.parametrize("scale", ["0.5", "-0.5", "0", "1e-30", "1000"])
def test_scores_of_every_size_are_confirmed(tmp_path: Path, spread: float, scale: str) -> None:
    pruned(tmp_path, cache={"spread": spread, "metadata": {"scale": scale}})


def test_vectors_at_the_end_of_float32_are_confirmed(tmp_path: Path) -> None:
    huge = {"spread": 1e37, "dtype": "F32", "metadata": {"scale": "1e-74"}}
    pruned(tmp_path / "huge", cache=huge)
    pruned(tmp_path / "tiny", cache={"spread": 1e-44, "dtype": "F32"})


@pytest.mark.parametrize("scale", ["1e-50", "1", "1e300"])
def test_scores_that_float64_cannot_tell_apart_are_refused(tmp_path: Path, scale: str) -> None:
    write_cache(tmp_path / "x.safetensors", spread=1e37, dtype="F32", metadata={"scale": scale})
    with pytest.raises(CertkError, match=r"layer 0: .*scores are so large \(scale 1"):
        job(tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("offset", [-100, -2, 0, 5, 21, 100, 10**17])
@pytest.mark.parametrize("granularity", ["head", "layer"])
def test_causal_rows(tmp_path: Path, offset: int, granularity: str) -> None:
    cache = {"m": 6, "metadata": {"causal_offset": str(offset)}}
    _, output = pruned(tmp_path, cache=cache, granularity=granularity)
    visible = min(max(6 + offset, 0), 24)
    for i in LAYERS:
        assert (output[f"layers.{i}.indices"] < max(visible, 0)).all()
        for kept in kept_sets(output, i):
            assert len(kept) == 0 if visible == 0 else len(kept) > 0
        for query in range(6):
            if query + offset < 0:  # sees nothing, loses nothing
                assert (output[f"layers.{i}.tail_mass_upper"][:, query] == 0).all()


@pytest.mark.parametrize("granularity", ["head", "layer"])
@pytest.mark.parametrize("offset", [None, 10])
def test_forced_positions_are_kept(tmp_path: Path, granularity: str, offset: int | None) -> None:
    metadata = {} if offset is None else {"causal_offset": str(offset)}
    forced = {"keep_first": 2, "keep_last": 3}
    _, output = pruned(
        tmp_path, 0.9, cache={"metadata": metadata}, granularity=granularity, **forced
    )
    end = 24 if offset is None else 3 + offset
    for i in LAYERS:
        for kept in kept_sets(output, i):
            assert {0, 1, end - 3, end - 2, end - 1} <= set(kept)
        assert (output[f"layers.{i}.lower_bound"] >= 5).all()


@pytest.mark.parametrize(("max_keep", "count"), [(5, 5), (0.25, 6), (1, 1), (0.001, 1), (1000, 24)])
def test_max_keep_limits_and_says_what_is_lost(tmp_path: Path, max_keep: float, count: int) -> None:
    _, output = pruned(tmp_path, 1e-9, max_keep=max_keep)
    for i in LAYERS:
        assert all(len(kept) <= count for kept in kept_sets(output, i))
        over = output[f"layers.{i}.tail_mass_upper"] > 1e-9
        assert over.any() == (count < 24)


def test_true_tail_masses_lie_in_the_recorded_intervals(tmp_path: Path) -> None:
    """Real-number softmax of the exact q.k, in balls of 200 bits; shares no code with anything."""
    flint = pytest.importorskip("flint")
    given, output = pruned(tmp_path, 0.05, cache={"kv_heads": 2, "heads": 4, "metadata": None})
    before, flint.ctx.prec = flint.ctx.prec, 200
    try:
        for i in LAYERS:
            query, key = given[f"layers.{i}.query"][0], given[f"layers.{i}.key"][0]
            for head, m in np.ndindex(4, 3):
                keys = key[head // 2]
                terms = []
                for k in keys:
                    dot = sum(
                        (Fraction(a) * Fraction(b) for a, b in zip(query[head, m], k, strict=True)),
                        Fraction(0),
                    ) * Fraction(0.5)
                    terms.append((flint.arb(dot.numerator) / dot.denominator).exp())
                kept = set(kept_sets(output, i)[head // 2].tolist())
                tail = sum((t for j, t in enumerate(terms) if j not in kept), flint.arb(0))
                mass = tail / sum(terms, flint.arb(0))
                upper = flint.arb(float(output[f"layers.{i}.tail_mass_upper"][head, m]))
                lower = flint.arb(float(output[f"layers.{i}.tail_mass_lower"][head, m]))
                assert lower <= mass
                assert mass <= upper
                assert upper <= flint.arb(0.05)
    finally:
        flint.ctx.prec = before


def test_lower_bounds_hold_against_every_smaller_set(tmp_path: Path) -> None:
    """n = 10 is small enough to try all sets."""
    from itertools import combinations

    given, output = pruned(tmp_path, 0.1, cache={"n": 10, "layers": 1, "m": 5})
    query, key = given["layers.0.query"][0], given["layers.0.key"][0]
    for h in range(2):
        scores = (query[2 * h : 2 * h + 2] @ key[h].T / 2).reshape(-1, 10)
        weights = softmax(scores)
        smallest = min(
            size
            for size in range(11)
            for kept in combinations(range(10), size)
            if (1 - weights[:, kept].sum(axis=1) <= 0.1).all()
        )
        assert output["layers.0.lower_bound"][h] <= smallest <= len(kept_sets(output, 0)[h])


def test_several_files_and_directories(tmp_path: Path) -> None:
    write_cache(tmp_path / "in" / "b.safetensors", seed=1)
    write_cache(tmp_path / "in" / "a.safetensors", seed=2, dtype="BF16")
    (tmp_path / "in" / "notes.txt").write_text("not a cache")
    write_cache(tmp_path / "c.safetensors", seed=3, names="layer_{i}_{role}")
    told: list[str] = []
    result = prune(
        [tmp_path / "in", tmp_path / "c.safetensors"],
        tmp_path / "o",
        0.1,
        on_file=lambda outcome: told.append(outcome.name),
    )
    names = ["a.safetensors", "b.safetensors", "c.safetensors"]
    assert [report.name for report in result.outputs] == sorted(told) == names
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == [".certk", *names]


def test_tensors_that_are_left_out_are_told(tmp_path: Path) -> None:
    tensors = cache_tensors() | {"rope": tensor(np.full(3, np.nan), "F32")}
    (tmp_path / "x.safetensors").write_bytes(safetensors_bytes(tensors, None))
    [report] = job(tmp_path).outputs
    [warning] = [text for text in report.warnings if "named" in text]
    assert "'rope'" in warning
    confirm(tmp_path)


def test_inputs_that_are_refused(tmp_path: Path) -> None:
    good, again, empty = (tmp_path / name for name in ("x.safetensors", "again", "empty"))
    write_cache(good)
    write_cache(again / "x.safetensors")
    empty.mkdir()
    calls: list[tuple[list[Path], str, str | None, str]] = [
        ([tmp_path / "none.safetensors"], "out", None, "does not exist"),
        ([empty], "out", None, "no input"),
        ([good, again], "out", None, "have the same name"),
        ([good], ".", None, "is an input of this job"),
        ([good], "x.safetensors", None, "is not a directory"),
        ([good], "x.safetensors/below", None, "is not a directory"),
        ([good], "out", "nonsense", "--names"),
        ([good], "out", "l.{i}.{key|value|query}", "no tensor is named like"),
    ]
    for caches, out, names, words in calls:
        with pytest.raises(CertkError, match=words):
            prune(caches, tmp_path / out, 0.1, names=names, fail_fast=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "empty", "x.safetensors"]


def bad_cache(path: Path) -> None:
    """A cache whose last value is a NaN."""
    values = np.ones((1, 2, 24, 4))
    values[0, 1, 23, 3] = np.nan
    tensors = cache_tensors() | {"layers.1.value": tensor(values, "F16")}
    path.write_bytes(safetensors_bytes(tensors, None))


def test_a_bad_file_does_not_stop_the_others(tmp_path: Path) -> None:
    write_cache(tmp_path / "in" / "a.safetensors")
    bad_cache(tmp_path / "in" / "b.safetensors")
    (tmp_path / "in" / "c.safetensors").write_bytes(b"nonsense")
    write_cache(tmp_path / "in" / "d.safetensors")
    result = prune(tmp_path / "in", tmp_path / "out", 0.1)
    assert [report.name for report in result.outputs] == ["a.safetensors", "d.safetensors"]
    cut, nan = sorted(result.failures, key=lambda failure: failure.name, reverse=True)
    assert re.search(r"b\.safetensors.*'layers.1.value'.*\[0, 1, 23, 3\]", nan.message)
    assert "c.safetensors" in cut.message
    with pytest.raises(CertkError, match=r"[bc]\.safetensors"):
        prune(tmp_path / "in", tmp_path / "again", 0.1, fail_fast=True)


def arranged(tmp_path: Path, kind: str) -> tuple[list[str], Path]:
    """Inputs, and an OUT where an output would have the place of one of them."""
    folder, other = tmp_path / "in", tmp_path / "other"
    other.mkdir()
    data = folder / "x.safetensors"
    if kind == "folder":
        return [str(folder)], folder
    if kind == "linked folder":
        (tmp_path / "link").symlink_to(folder)
        return [str(tmp_path / "link" / "*.safetensors")], folder
    if kind == "link to the input":
        (other / "x.safetensors").symlink_to(data)
        return [str(data)], other
    if kind == "input is a link":
        (other / "x.safetensors").symlink_to(data)
        return [str(other)], folder
    if kind == "hard link":
        (other / "x.safetensors").hardlink_to(data)
        return [str(data)], other
    if kind == "another input":
        write_cache(other / "y.safetensors", seed=1)
        (other / "x.safetensors").symlink_to(other / "y.safetensors")
        return [str(data), str(other / "y.safetensors")], other
    if kind == "refused input":
        bad_cache(other / "bad.safetensors")
        (other / "x.safetensors").hardlink_to(other / "bad.safetensors")
        return [str(data), str(other / "bad.safetensors")], other
    if kind == "output within":
        (folder / "out").mkdir()
        (folder / "out" / "x.safetensors").write_bytes(data.read_bytes())
        return [str(folder)], folder / "out"
    assert kind == "part"
    names = dict.fromkeys(cache_tensors(), data.name)
    index = folder / "x.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    return [str(index)], folder


@pytest.mark.parametrize(
    "kind",
    [
        *("folder", "linked folder", "link to the input", "input is a link", "hard link"),
        *("another input", "refused input", "output within", "part"),
    ],
)
@pytest.mark.parametrize("existing", ["replace", "refuse", "skip"])
def test_an_output_never_replaces_an_input(tmp_path: Path, kind: str, existing: str) -> None:
    write_cache(tmp_path / "in" / "x.safetensors")
    given, out = arranged(tmp_path, kind)

    def state() -> dict[str, bytes]:
        files = (path for path in tmp_path.rglob("*") if path.is_file())
        return {str(path): path.read_bytes() for path in files}

    before = state()
    with pytest.raises(CertkError, match=r"x\.safetensors is an input of this job.*another OUT"):
        prune(given, out, 0.1, recursive=True, existing=existing)
    with pytest.raises(CertkError, match="is an input of this job"):
        prune(given, out, 0.1, recursive=True, resume=True)
    assert state() == before


def test_an_output_never_replaces_an_input_of_a_list_or_a_url(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.safetensors"
    write_cache(path)
    data = path.read_bytes()
    listed = SimpleNamespace(buffer=io.BytesIO(f"{path}\n".encode()))
    monkeypatch.setattr(sys, "stdin", listed)
    assert certk("prune", "-", "-o", tmp_path, "--eps", "0.1", "--force") == 2
    assert "is an input of this job" in capsys.readouterr().err
    assert path.read_bytes() == data
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.pipe("/own/x.safetensors", data)
    with pytest.raises(CertkError, match="is an input of this job"):
        prune("memory://own/x.safetensors", "memory://own/", 0.1, existing="replace")
    assert memory.cat("/own/x.safetensors") == data


def test_where_nothing_could_be_pruned_nothing_is_left(tmp_path: Path) -> None:
    bad_cache(tmp_path / "x.safetensors")
    result = job(tmp_path, fail_fast=False)
    assert not result.outputs
    assert len(result.failures) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def change(folder: Path) -> None:
    write_cache(folder / "in" / "b.safetensors", seed=2)
    os.utime(folder / "in" / "b.safetensors", (1, 1))


def appear(folder: Path) -> None:
    (folder / "out" / "b.safetensors").write_text("mine")


@pytest.mark.parametrize(
    ("meddle", "words", "left"), [(change, "was changed", []), (appear, "exists already", ["mine"])]
)
def test_files_that_others_touch_meanwhile(
    tmp_path: Path, meddle: Callable[[Path], None], words: str, left: list[str]
) -> None:
    for name in "ab":
        write_cache(tmp_path / "in" / f"{name}.safetensors", seed=1)
    result = prune(
        tmp_path / "in", tmp_path / "out", 0.1, on_file=lambda _: meddle(tmp_path), jobs=1
    )
    [failure] = result.failures
    assert words in failure.message
    assert [path.read_text() for path in (tmp_path / "out").glob("b.safetensors")] == left


def check_no_output(folder: Path) -> None:
    left = [path.name for path in folder.rglob("*") if path.is_file()]
    assert [name for name in left if "safetensors" in name] == ["x.safetensors"]
    assert not [name for name in left if name.endswith(".partial")]


@pytest.mark.parametrize("moment", range(3))
def test_an_interrupted_job_of_one_file_leaves_no_output(tmp_path: Path, moment: int) -> None:
    write_cache(tmp_path / "x.safetensors")

    def interrupt(_label: str, done: int, _total: int) -> None:
        if done > moment:
            raise KeyboardInterrupt

    out = tmp_path / "deep" / "er"
    with pytest.raises(KeyboardInterrupt):
        prune(tmp_path / "x.safetensors", out, 0.1, progress=interrupt, unit="head")
    check_no_output(tmp_path)


@pytest.mark.parametrize("call", ["write", "fsync", "link"])
def test_a_full_disk_leaves_no_output(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cache(tmp_path / "x.safetensors")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left"):
        job(tmp_path)
    check_no_output(tmp_path)


def test_progress_reaches_its_end(tmp_path: Path) -> None:
    write_cache(tmp_path / "x.safetensors")
    told: list[tuple[str, int, int]] = []
    job(tmp_path, progress=lambda *state: told.append(state))
    assert told[-1][1] == told[-1][2]
    assert {label for label, _, _ in told} == {"x.safetensors"}


def test_reports_count_the_same_as_the_file(tmp_path: Path) -> None:
    write_cache(tmp_path / "x.safetensors")
    [done] = job(tmp_path).outputs
    output = read_output(tmp_path / "out" / "x.safetensors")
    said = file_json(done)
    for i, report in enumerate(done.layers):
        assert report.count.kept == len(output[f"layers.{i}.indices"])
        assert report.count.total == 2 * 24
        assert report.count.lower_bound == output[f"layers.{i}.lower_bound"].sum()
        assert report.count.gap == report.count.kept - report.count.lower_bound
        assert report.worst_tail_mass == output[f"layers.{i}.tail_mass_upper"].max()
        assert said["layers"][i]["kept"] == report.count.kept
    assert said["kept"] == sum(layer["kept"] for layer in said["layers"])
    assert said["rows_over_budget"] == 0


@pytest.mark.parametrize(("granularity", "count"), [("head", 4), ("layer", 2)])
def test_bars_are_as_wide_as_asked(tmp_path: Path, granularity: str, count: int) -> None:
    write_cache(tmp_path / "x.safetensors")
    [report] = job(tmp_path, granularity=granularity).outputs
    lines = bars(report.layers, 30, "#+.")
    assert len(lines) == count
    assert all(sum(map(line.count, "#+")) > 0 for line in lines)
    assert len({len(line) for line in lines}) == 1


def test_the_real_cache(tmp_path: Path) -> None:
    with Cache(EXAMPLE) as opened:
        layers = len(opened.layers)
    [result] = prune(EXAMPLE, tmp_path / "out", 0.05).outputs
    report = audit([Path(result.target)], [EXAMPLE])
    assert report.holds
    assert report.outputs[0].confirmed_lower_bounds == 4 * layers
    for entry in result.layers:
        assert entry.count.gap <= 0.15 * entry.count.total


def test_an_output_behind_a_url_that_exists_is_named_by_its_url(tmp_path: Path) -> None:
    write_cache(tmp_path / "x.safetensors")
    out = "memory://named-by-its-url"
    prune(tmp_path / "x.safetensors", out, 0.1)
    with pytest.raises(CertkError, match=re.escape(f"{out}/x.safetensors exists already")):
        prune(tmp_path / "x.safetensors", out, 0.1)
