"""Prune jobs: what is chosen, written and refused, and that nothing half-done stays."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
from collections.abc import Callable
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
from cli_fixtures import cache_tensors, read_output, safetensors_bytes, said, tensor, write_cache
from repository import EXAMPLE


def job(tmp_path: Path, eps: float = 0.1, **options: Any) -> JobResult:
    options = {"proof": "full", "fail_fast": True} | options
    return prune(tmp_path / "x.safetensors", tmp_path / "out", eps, **options)


@pytest.mark.parametrize("jobs", [1, 2])
def test_outputs_of_directories_in_directories_are_where_their_inputs_are(
    tmp_path: Path, jobs: int
) -> None:
    names = ["a.safetensors", "sub/b.safetensors", "sub/deep/a.safetensors"]
    for seed, name in enumerate(names):
        write_cache(tmp_path / "in" / name, seed=seed, dtype="BF16" if seed else "F16")
    (tmp_path / "in" / "notes.txt").write_text("not a cache")
    write_cache(tmp_path / "c.safetensors", seed=3, names="layer_{i}_{role}")
    told: list[str] = []
    given = [tmp_path / "in", tmp_path / "c.safetensors"]
    found = prune(
        given, tmp_path / "out", 0.1, recursive=True, jobs=jobs,
        on_file=lambda outcome: told.append(outcome.name),
    )  # fmt: skip
    assert not found.failures
    expected = sorted([*names, "c.safetensors"])
    assert sorted(file.name for file in found.outputs) == sorted(told) == expected
    written = (tmp_path / "out").rglob("*.safetensors")
    assert sorted(str(path.relative_to(tmp_path / "out")) for path in written) == expected


def test_shapes_and_dtypes_of_the_output(tmp_path: Path) -> None:
    write_cache(tmp_path / "x.safetensors")
    job(tmp_path)
    output = read_output(tmp_path / "out" / "x.safetensors")
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
    job(tmp_path, granularity="layer", existing="replace")
    output = read_output(tmp_path / "out" / "x.safetensors")
    total = len(output["layers.0.indices"])
    assert "layers.0.indptr" not in output
    assert output["layers.0.key"].shape == output["layers.0.value"].shape == (2, total, 4)
    assert output["layers.0.lower_bound"].shape == (1,)


def test_the_certificate_says_what_was_asked(tmp_path: Path) -> None:
    given = {"metadata": {"scale": "-0.25", "causal_offset": "21"}, "names": "layer_{i}_{role}"}
    options = {"max_keep": 0.75, "keep_first": 1, "keep_last": 2}
    write_cache(tmp_path / "x.safetensors", **given)
    job(tmp_path, 0.2, **options)
    with SafetensorsFile(tmp_path / "out" / "x.safetensors") as file:
        assert list(file.header.metadata) == ["certk"]
        certificate, complaint = read_certificate(file.header.metadata["certk"])
    assert complaint is None
    assert certificate.eps == {0: (0.2, 0.2), 1: (0.2, 0.2)}
    assert certificate.options == Options("head", **options)
    assert certificate.names == "layer_{i}_{key|value|query}"
    assert (certificate.scales, certificate.causal_offset) == ({0: -0.25, 1: -0.25}, 21)
    assert set(certificate.inputs) == set(cache_tensors(names="layer_{i}_{role}"))


@pytest.mark.parametrize("options", [{}, {"hot": 0.3, "rest": "file"}], ids=str)
@pytest.mark.parametrize("granularity", ["head", "layer"])
def test_the_output_is_the_same_bytes_however_it_is_done(
    tmp_path: Path, granularity: str, options: dict[str, Any]
) -> None:
    write_cache(tmp_path / "x.safetensors", m=40, n=60, spread=1.5)
    ways: list[dict[str, Any]] = [{"threads": 1}, {"threads": 3, "jobs": 2}, {"unit": "layer"}]
    if granularity == "head":
        ways.append({"unit": "head", "jobs": 3})
    made = set()
    for way in ways:
        asked = {"granularity": granularity, "existing": "replace"} | options | way
        [report] = job(tmp_path, 0.05, **asked).outputs
        made.add(Path(report.target).read_bytes())
        assert "hot" not in options or report.count.kept == int(0.3 * report.count.total)
    assert len(made) == 1


@pytest.mark.parametrize("scale", ["1e-50", "1", "1e300"])
def test_scores_that_float64_cannot_tell_apart_are_refused(tmp_path: Path, scale: str) -> None:
    write_cache(tmp_path / "x.safetensors", spread=1e37, dtype="F32", metadata={"scale": scale})
    with pytest.raises(CertkError, match=r"layer 0: .*scores are so large \(scale 1"):
        job(tmp_path)
    assert not (tmp_path / "out").exists()


def test_tensors_that_are_left_out_are_told(tmp_path: Path) -> None:
    tensors = cache_tensors() | {"rope": tensor(np.full(3, np.nan), "F32")}
    (tmp_path / "x.safetensors").write_bytes(safetensors_bytes(tensors, None))
    [report] = job(tmp_path).outputs
    [warning] = [text for text in report.warnings if "named" in text]
    assert "'rope'" in warning


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.safetensors"
    write_cache(path)
    data = path.read_bytes()
    listed = SimpleNamespace(buffer=io.BytesIO(f"{path}\n".encode()))
    monkeypatch.setattr(sys, "stdin", listed)
    ended = said("prune", "-", "-o", tmp_path, "--eps", "0.1", "--force")
    assert (ended.code, "is an input of this job" in ended.err) == (2, True)
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


@pytest.mark.parametrize("layout", ["hnd", "nhd"])
def test_queries_are_read_once_and_keys_and_values_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """Tensors read to choose are hashed as they come; kept rows are read again to be copied."""
    tensors = cache_tensors(n=30, m=5)
    if layout == "nhd":
        for name, (dtype, (one, heads, rows, d), data) in tensors.items():
            array = np.frombuffer(data, np.uint16).reshape(heads, rows, d).swapaxes(0, 1)
            tensors[name] = dtype, (one, rows, heads, d), array.tobytes()
    source = tmp_path / "x.safetensors"
    source.write_bytes(safetensors_bytes(tensors, None))
    read: dict[str, int] = {}
    plain = SafetensorsFile.read_into

    def counted(self: Any, name: str, buffer: memoryview, start: int = 0) -> None:
        read[name] = read.get(name, 0) + len(buffer)
        plain(self, name, buffer, start)

    monkeypatch.setattr(SafetensorsFile, "read_into", counted)
    job(tmp_path, unit="layer", layout=layout)
    times = {name: read[name] / len(data) for name, (_, _, data) in tensors.items()}
    assert times == {name: 1 if "query" in name else 2 for name in tensors}
