"""Forged outputs: rewritten as a whole, hashes and all, by somebody who knows the format.

What an output claims must then be refuted by its own numbers or by the input; and whatever it
claims, the audit ends with a verdict: no exception, and no memory for what is not there.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import certk_rs as ck
from certk_rs import CertkError
from certk_rs.audit import MOST_FINDINGS, OutputAudit, audit
from cli_fixtures import (
    Job,
    cache_tensors,
    certk,
    forge,
    forge_input,
    raw_file,
    safetensors_bytes,
    tensor,
    write_cache,
)

Arrays = dict[str, np.ndarray]
Body = dict[str, Any]
Captured = pytest.CaptureFixture[str]

EDGE = 1 << 63


def jobs(**made: Any) -> Any:
    """A fixture: a fresh copy of a finished job, which is made once."""

    @pytest.fixture(scope="module")
    def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("finished")
        Job(folder, **made)
        return folder

    return finished


finished = jobs(cache={"m": 5, "kv_heads": 3, "heads": 6, "metadata": {"causal_offset": "19"}})
finished_by_layer = jobs(cache={"m": 5}, granularity="layer", keep_first=2, keep_last=1)
finished_at_cap = jobs(eps=0.01, max_keep=5, cache={"m": 5})


def copied(folder: Path, to: Path) -> Job:
    shutil.copytree(folder, to, dirs_exist_ok=True)
    copy = Job.__new__(Job)
    copy.source, copy.output = to / "in" / "x.safetensors", to / "out" / "x.safetensors"
    return copy


@pytest.fixture
def job(finished: Path, tmp_path: Path) -> Job:
    """Two layers of three kv heads, causal, no max_keep."""
    return copied(finished, tmp_path)


@pytest.fixture
def by_layer(finished_by_layer: Path, tmp_path: Path) -> Job:
    """One set per layer, the first two and the last position forced."""
    return copied(finished_by_layer, tmp_path)


@pytest.fixture
def at_cap(finished_at_cap: Path, tmp_path: Path) -> Job:
    """Five keys a head, which is too few for the budget."""
    return copied(finished_at_cap, tmp_path)


def refuted(job: Job, words: str, *, alone: bool) -> None:
    """The input refutes it in these words; without it, they are said if `alone` or it holds."""
    said = job.lines(against=True)
    assert re.search(words, said, re.M), said
    said = job.lines()
    assert bool(re.search(words, said, re.M)) == alone, said
    assert alone or not said


def arrays_of(path: Path) -> Arrays:
    found: Arrays = {}
    forge(path, found.update)
    return found


@pytest.mark.parametrize("which", ["job", "by_layer", "at_cap"])
def test_the_forger_knows_the_format(which: str, request: pytest.FixtureRequest) -> None:
    job: Job = request.getfixturevalue(which)
    good = job.output.read_bytes()
    forge(job.output)
    assert job.output.read_bytes() == good
    assert job.check(against=True).holds


# ------------------------------------------------------------------------------ integers of tensors


@pytest.mark.parametrize(
    "indptr",
    [
        [0, EDGE - 1, -2, None],
        [0, -EDGE, EDGE - 1, None],
        [0, -1, 0, None],
        [0, 5, 4, None],
        [0, None, None, EDGE - 1],
        [0, 0, 0, -1],
        [-1, 0, 0, None],
        [1, 1, 1, None],
        [-EDGE, 0, 0, None],
    ],
)
def test_row_starts_that_wrap_or_fall(job: Job, indptr: list[int | None]) -> None:
    def edit(arrays: Arrays) -> None:
        total = len(arrays["layers.1.indices"])
        ends = [total if end is None else end for end in indptr]
        arrays["layers.1.indptr"] = np.array(ends, np.int64)

    forge(job.output, edit)
    refuted(job, r"^layers.1.indptr: does not rise from 0 to the \d+ kept positions$", alone=True)


def test_row_starts_that_give_one_key_to_two_heads(tmp_path: Path) -> None:
    """Cut as slices are, [0, 2^63 - 1, -2, 1] is one key, none, and the one again."""
    shape = {"m": 5, "layers": 1, "kv_heads": 3, "heads": 3}
    job = Job(tmp_path, cache=shape)
    cache = write_cache(job.source, **shape)

    def edit(arrays: Arrays) -> None:
        arrays["layers.0.indices"] = np.array([17], np.int32)
        arrays["layers.0.indptr"] = np.array([0, EDGE - 1, -2, 1])
        for role in ("key", "value"):
            arrays[f"layers.0.{role}"] = cache[f"layers.0.{role}"][0, :1, 17].astype("<f2")
        arrays["layers.0.tail_mass_upper"] = np.ones((3, 5), "<f4")
        arrays["layers.0.tail_mass_lower"] = np.zeros((3, 5), "<f4")
        arrays["layers.0.lower_bound"] = np.zeros(3, np.int64)
        no_proof(arrays, 0)

    forge(job.output, edit, lambda body: body["options"].update(max_keep=1))
    refuted(job, "^layers.0.indptr: does not rise from 0 to the 1 kept positions$", alone=True)


def test_any_row_starts_end_in_a_verdict(job: Job) -> None:
    good, rng = job.output.read_bytes(), np.random.default_rng(3)
    right = arrays_of(job.output)["layers.0.indptr"]
    pool = [0, 1, -1, 2, int(right[1]), int(right[-1]), EDGE - 1, -EDGE, 1 << 31, 1 << 62]
    for _ in range(150):
        wrong = rng.choice(np.array(pool, np.int64), 4)
        wrong[0] *= int(rng.integers(2))
        job.output.write_bytes(good)
        forge(job.output, lambda arrays, to=wrong: arrays.update({"layers.0.indptr": to}))
        assert not job.check(against=True).holds, wrong


def test_a_head_without_keys(job: Job) -> None:
    """Its keys are given to its neighbour, or are gone."""

    def move(arrays: Arrays) -> None:
        arrays["layers.0.indptr"] = arrays["layers.0.indptr"][[0, 1, 1, 3]]

    good = job.output.read_bytes()
    forge(job.output, move)
    refuted(job, "^layers.0.indices: layer 0, kv head 2: not ascending", alone=True)
    job.output.write_bytes(good)

    def gone(arrays: Arrays) -> None:
        start, stop = arrays["layers.0.indptr"][1:3]
        for name in ("indices", "key", "value"):
            name = f"layers.0.{name}"
            arrays[name] = np.delete(arrays[name], slice(start, stop), axis=0)
        arrays["layers.0.indptr"] = np.array([0, start, start, len(arrays["layers.0.indices"])])
        arrays["layers.0.lower_bound"] = arrays["layers.0.lower_bound"] * np.array([1, 0, 1])

    forge(job.output, gone)
    refuted(
        job,
        r"layer 0, head 2, query 0: tail mass in .* is refuted: it is in \[1.0, 1.0\]",
        alone=False,
    )


def test_all_heads_without_keys(at_cap: Job) -> None:
    """Everything is lost, as it says; but five keys a head were allowed."""

    def edit(arrays: Arrays) -> None:
        for i in range(2):
            for name in ("indices", "key", "value"):
                arrays[f"layers.{i}.{name}"] = arrays[f"layers.{i}.{name}"][:0]
            for name in ("lower_bound", "lower_bound_weights", "indptr"):
                arrays[f"layers.{i}.{name}"] = np.zeros_like(arrays[f"layers.{i}.{name}"])
            for end in ("upper", "lower"):
                name = f"layers.{i}.tail_mass_{end}"
                arrays[name] = np.ones_like(arrays[name])

    forge(at_cap.output, edit)
    refuted(at_cap, "kv head 0: over eps with 0 kept, though max_keep allows 5", alone=True)


def no_proof(arrays: Arrays, layer: int) -> None:
    """Rows without weights."""
    for name in ("lower_bound_rows", "lower_bound_weights"):
        arrays[f"layers.{layer}.{name}"] = arrays[f"layers.{layer}.{name}"][:0]


def equal_weights(arrays: Arrays, layer: int, value: float, shape: tuple[int, int]) -> None:
    """The same weight for all rows (heads, m)."""
    count = shape[0] * shape[1]
    arrays[f"layers.{layer}.lower_bound_rows"] = np.arange(count)
    arrays[f"layers.{layer}.lower_bound_weights"] = np.full(count, value, "<f4")


def say_eps(eps: Any) -> Callable[[Body], None]:
    """One budget for all groups."""

    def say(body: Body) -> None:
        body["eps"] = {index: [eps] * len(groups) for index, groups in body["eps"].items()}

    return say


def keep_only(arrays: Arrays, kept: list[int], cache: dict[str, np.ndarray]) -> None:
    """Keep these positions in every head of layers of 2 kv heads, 4 heads; claim nothing else."""
    for i in range(2):
        arrays[f"layers.{i}.indices"] = np.array(kept * 2, np.int32)
        arrays[f"layers.{i}.indptr"] = np.array([0, len(kept), 2 * len(kept)])
        for role in ("key", "value"):
            rows = cache[f"layers.{i}.{role}"].reshape(2, -1, 4)[:, kept].astype("<f2")
            arrays[f"layers.{i}.{role}"] = rows.reshape(-1, 4)
        for name, value in (("tail_mass_upper", 1.0), ("tail_mass_lower", 0.0)):
            name = f"layers.{i}.{name}"
            arrays[name] = np.full_like(arrays[name], value)
        arrays[f"layers.{i}.lower_bound"] = np.zeros(2, np.int64)
        no_proof(arrays, i)


def test_one_arbitrary_key_is_told(tmp_path: Path, capsys: Captured) -> None:
    """It holds, since nothing is claimed; the verdict says that nothing is."""
    job = Job(tmp_path, cache={"m": 5})
    cache = write_cache(job.source, m=5)
    good = audit([job.output], [job.source]).outputs[0]
    assert (good.rows_over_budget, good.total, good.eps) == (0, 2 * 2 * 24, 0.1)
    assert 0.05 < good.worst_tail_mass <= 0.1
    assert certk("verify", job.output, "--against", job.source) == 0
    before = capsys.readouterr().out.splitlines()[-1]

    forge(
        job.output,
        lambda arrays: keep_only(arrays, [17], cache),
        lambda body: body["options"].update(max_keep=1),
    )
    found = job.check(against=True)
    assert found.holds
    assert (found.kept, found.total) == (4, 96)
    assert (found.rows_over_budget, found.rows, found.worst_tail_mass) == (40, 40, 1.0)
    assert certk("verify", job.output, "--against", job.source) == 0
    after = capsys.readouterr().out.splitlines()[-1]
    assert "max_keep = 1, " in after
    assert after.endswith(": kept 4 of 96 keys, 40 of 40 rows over eps, worst tail mass 1")
    assert before.endswith(f", worst tail mass {before.split()[-1]}")
    assert f"kept {good.kept} of 96 keys, 0 of 40 rows over eps" in before
    assert certk("verify", job.output, "--json") == 0
    [said] = json.loads(capsys.readouterr().out)["outputs"]
    assert (said["eps"], said["options"]["max_keep"]) == (0.1, 1)
    assert (said["kept"], said["total"]) == (4, 96)
    assert (said["rows_over_budget"], said["worst_tail_mass"]) == (40, 1.0)


@pytest.mark.parametrize("max_keep", [2, 24, 0.1, 1.0, 1 << 70])
def test_over_budget_is_excused_by_the_cap_alone(tmp_path: Path, max_keep: float) -> None:
    """A set that is over its budget has as many keys as it may."""
    job = Job(tmp_path, cache={"m": 5})
    cache = write_cache(job.source, m=5)
    forge(
        job.output,
        lambda arrays: keep_only(arrays, [17], cache),
        lambda body: body["options"].update(max_keep=max_keep),
    )
    refuted(job, r"kv head 1: over eps with 1 kept, though max_keep allows \d+$", alone=True)


@pytest.mark.parametrize("max_keep", [1, 3, 0.2, 0.041])
@pytest.mark.parametrize("eps", [0.0, 1e-9, 0.02])
def test_who_is_over_budget_is_at_the_cap(tmp_path: Path, eps: float, max_keep: float) -> None:
    for granularity in ("head", "layer"):
        shape = {"m": 5, "metadata": {"causal_offset": "3"}}
        job = Job(
            tmp_path / granularity, eps=eps, max_keep=max_keep, granularity=granularity, cache=shape
        )
        assert not job.lines(against=True)
        assert job.check().rows_over_budget > 0


@pytest.mark.parametrize("layer", [0, 1])
def test_the_worst_and_the_number_of_rows_are_of_all_layers(at_cap: Job, layer: int) -> None:
    def edit(arrays: Arrays) -> None:
        for i in range(2):
            mass = np.full((4, 5), 0.375 if i == layer else 0.25, "<f4")
            mass[i, :2] = np.nextafter(np.float32(0.01), np.float32(0))  # within eps
            arrays[f"layers.{i}.tail_mass_upper"] = mass
            arrays[f"layers.{i}.tail_mass_lower"] = mass / 2

    forge(at_cap.output, edit)
    found = at_cap.check()
    assert found.holds
    assert (found.worst_tail_mass, found.rows_over_budget, found.rows) == (0.375, 36, 40)
    assert (found.kept, found.total, found.lower_bounds) == (20, 96, 4)


@pytest.mark.parametrize("row", [(0, 0), (3, 4)])
def test_one_row_over_budget_is_enough(tmp_path: Path, row: tuple[int, int]) -> None:
    job = Job(tmp_path, cache={"m": 5})

    def edit(arrays: Arrays) -> None:
        arrays["layers.1.tail_mass_upper"] = arrays["layers.1.tail_mass_upper"].copy()
        arrays["layers.1.tail_mass_upper"][row] = 0.11

    forge(job.output, edit, lambda body: body["options"].update(max_keep=23))
    [finding] = job.check().findings
    assert re.search(
        rf"^layers.1.indices: .* kv head {row[0] // 2}: over eps with \d+", str(finding)
    )


@pytest.mark.parametrize("mass", [1 + 2.0**-23, 1.5, np.inf])
def test_a_mass_above_one_is_none(at_cap: Job, mass: float) -> None:
    """Also where the cap excuses what is over eps."""

    def edit(arrays: Arrays) -> None:
        arrays["layers.1.tail_mass_upper"] = arrays["layers.1.tail_mass_upper"].copy()
        arrays["layers.1.tail_mass_upper"][2, 3] = mass

    forge(at_cap.output, edit)
    refuted(at_cap, r"^layers.1.tail_mass_upper\[2, 3\]: .* is no interval of masses$", alone=True)


def test_positions_that_make_no_sense_are_told_once(by_layer: Job) -> None:
    def edit(arrays: Arrays) -> None:
        arrays["layers.0.indices"] = arrays["layers.0.indices"][::-1].copy()

    forge(by_layer.output, edit)
    [finding] = by_layer.check().findings
    assert str(finding) == "layers.0.indices: layer 0: not ascending positions from 0 to 23"


def test_a_head_below_the_cap_beside_one_that_is_over(tmp_path: Path) -> None:
    """The cap bites head by head."""
    job, rng = Job.__new__(Job), np.random.default_rng(2)
    job.source, job.output = tmp_path / "x.safetensors", tmp_path / "out" / "x.safetensors"
    shape = {"key": (2, 24, 4), "value": (2, 24, 4), "query": (2, 5, 4)}
    arrays = {role: rng.standard_normal(size) for role, size in shape.items()}
    arrays["key"][0] *= 20  # sharp; the other is flat
    tensors = {f"layers.0.{role}": tensor(array, "F32") for role, array in arrays.items()}
    job.source.write_bytes(safetensors_bytes(tensors, None))
    command = ["prune", job.source, "-o", job.output.parent, "--eps", "0.05", "--max-keep", "9"]
    assert certk(*command) == 0
    first, second = np.diff(arrays_of(job.output)["layers.0.indptr"])
    assert first < second == 9
    found = job.check(against=True)
    assert found.holds
    assert found.rows_over_budget > 0


@pytest.mark.parametrize("name", ["indices", "key"])
def test_an_index_twice(job: Job, name: str) -> None:
    """The same key counted twice would weigh twice among the kept ones."""

    def edit(arrays: Arrays) -> None:
        place = int(arrays["layers.0.indptr"][1])
        for what in ("indices", "key", "value"):
            rows = arrays[f"layers.0.{what}"]
            if name == "indices":  # another row makes room
                rows = rows.copy()
                rows[place + 1] = rows[place]
            else:
                rows = np.insert(rows, place, rows[place], axis=0)
            arrays[f"layers.0.{what}"] = rows
        if name == "key":
            arrays["layers.0.indptr"] = arrays["layers.0.indptr"] + np.array([0, 0, 1, 1])

    forge(job.output, edit)
    refuted(job, "^layers.0.indices: layer 0, kv head 1: not ascending positions", alone=True)


def claim_keys(n: int, heads: int = 2) -> Callable[[Body], None]:
    """Say that the input had n keys."""

    def say(body: Body) -> None:
        for name, facts in body["inputs"].items():
            if not name.endswith("query"):
                facts["shape"] = [1, heads, n, 4]

    return say


def wide_indices(arrays: Arrays) -> None:
    for i in range(2):
        arrays[f"layers.{i}.indices"] = arrays[f"layers.{i}.indices"].astype(np.int64)


@pytest.mark.parametrize(
    "kept", [[0, EDGE - 1, -EDGE, -1, 5], [0, 1, 1 << 32], [-EDGE, 5], [EDGE - 1], [-1]]
)
def test_wide_indices_that_wrap(tmp_path: Path, kept: list[int]) -> None:
    """Differences of int64 may all be positive where the numbers fall."""
    job = Job(tmp_path, cache={"m": 5, "layers": 1}, granularity="layer")

    def edit(arrays: Arrays) -> None:
        arrays["layers.0.indices"] = np.array(kept, np.int64)
        for role in ("key", "value"):
            arrays[f"layers.0.{role}"] = np.zeros((2, len(kept), 4), "<f2")
        arrays["layers.0.lower_bound"] = np.zeros(1, np.int64)

    forge(job.output, edit, claim_keys((1 << 32) - 1))
    assert "layers.0.indices: layer 0: not ascending positions" in job.lines()
    assert not job.check(against=True).holds


# -------------------------------------------------------------------------------- sizes and memory


def peak(path: Path) -> tuple[OutputAudit, int]:
    """An audit without the input, and the most memory that it had."""
    audit([path])
    tracemalloc.start()
    try:
        [found] = audit([path]).outputs
        return found, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("n", [50_000_000, (1 << 31) - 1, (1 << 32) - 1])
@pytest.mark.parametrize("forced", ["none", "few", "all"])
def test_memory_is_that_of_the_file_whatever_it_claims(tmp_path: Path, n: int, forced: str) -> None:
    job = Job(tmp_path, cache={"m": 5})
    size = {"none": 0, "few": 2, "all": n}[forced]

    def say(body: Body) -> None:
        claim_keys(n)(body)
        body["options"].update(keep_first=size, keep_last=size)

    forge(job.output, wide_indices if n >= 1 << 31 else lambda _: None, say)
    found, most = peak(job.output)
    assert most < 2_000_000
    if forced == "none":
        assert found.holds, found.findings  # nothing speaks against it
        assert found.total == 4 * n
    else:
        assert "must be kept and is not" in str(found.findings[0])


@pytest.mark.parametrize("n", [1 << 32, 1 << 62, EDGE - 1, EDGE, 1 << 64, 10**400])
def test_more_keys_than_there_can_be(tmp_path: Path, n: int) -> None:
    job = Job(tmp_path, cache={"m": 5})
    forge(job.output, wide_indices, claim_keys(n))
    found, most = peak(job.output)
    assert most < 2_000_000
    words = (
        "cannot be read: what it says" if n >= EDGE else "cannot be of a prune job: inputs: tensor"
    )
    assert words in str(found.findings[0])
    assert not job.check(against=True).holds


@pytest.mark.parametrize("size", [0, 1 << 31, 1 << 62])
@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("role", ["key", "query", "both"])
def test_other_sizes_claimed(tmp_path: Path, role: str, axis: int, size: int) -> None:
    job = Job(tmp_path, cache={"m": 5})

    def say(body: Body) -> None:
        for name, facts in body["inputs"].items():
            if role == "both" or name.endswith("query") == (role == "query"):
                facts["shape"][axis] = size

    forge(job.output, say=say)
    found, most = peak(job.output)
    assert most < 2_000_000
    assert not found.holds
    assert not job.check(against=True).holds


@pytest.mark.parametrize("name", ["indices", "indptr", "key", "tail_mass_upper", "lower_bound"])
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (0, 0, 0), (0, 1 << 40), (1 << 62, 0), ()])
def test_tensors_without_entries(job: Job, name: str, shape: tuple[int, ...]) -> None:
    def edit(arrays: Arrays) -> None:
        kind = arrays[f"layers.0.{name}"].dtype
        try:
            arrays[f"layers.0.{name}"] = np.zeros(shape, kind)
        except ValueError:  # NumPy cannot say it, the file can
            arrays[f"layers.0.{name}"] = Shaped(kind, shape)  # type: ignore[assignment]

    forge(job.output, edit)
    # A size that no file can have is told before what it is of.
    wrong = (
        r"^layers\.0\.\w+: is .*, must be|^file: tensor 'layers\.0\.\w+': shape .* has more entries"
    )
    for against in (False, True):
        assert re.search(wrong, job.lines(against=against), re.M)


@pytest.mark.parametrize("kind", ["?", "u1", "<u2", "<f4", "<i4", "<u8", "<c8"])
def test_tensors_of_another_type(job: Job, kind: str) -> None:
    """Right in shape, and some of them of a type that is in no array here."""
    right = arrays_of(job.output)
    for name in [name for name in right if name.startswith("layers.0.")]:
        forge(job.output, lambda arrays, name=name: arrays.update({name: right[name].astype(kind)}))
        changed = right[name].dtype != np.dtype(kind)
        for against in (False, True):
            said = job.lines(against=against)
            assert bool(re.search(rf"^{name}: is \w+ \[.*\], must be", said, re.M)) == changed
        forge(job.output, lambda arrays, name=name: arrays.update({name: right[name]}))


class Shaped:
    """An empty tensor of a shape that NumPy refuses."""

    nbytes = 0

    def __init__(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.dtype, self.itemsize, self.shape = dtype, dtype.itemsize, shape

    def tobytes(self) -> bytes:
        return b""


def test_findings_are_counted_when_they_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("certk_rs._audit.report.MOST_FINDINGS", 7)
    job = Job(tmp_path, cache={"m": 5, "layers": 1})
    forge(
        job.output,
        lambda arrays: arrays.update({"layers.0.tail_mass_upper": np.full((4, 5), np.nan, "<f4")}),
    )
    found = job.check()
    assert (len(found.findings), found.more_findings, found.found) == (7, 13, 20)
    assert not found.holds
    assert MOST_FINDINGS > 1000
    monkeypatch.setattr("certk_rs._cli.audit_report._SHOWN_FINDINGS", 5)
    assert certk("verify", job.output) == 1
    assert "... and 15 more\n" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------- names


def named(folder: Path, names: str, **cache: Any) -> Job:
    return Job(folder, names=names, cache={"m": 5, **cache})


def test_key_and_value_exchanged(tmp_path: Path, capsys: Captured) -> None:
    names = "layers.{i}.{value|key|query}"
    job = named(tmp_path, names)
    words = (
        f"metadata certk: its names {names!r} are not those of its input: by them 'layers.0.key' "
        f"is the value of layer 0, by those of the input the key of layer 0; "
        f"give --names {names!r} if they are"
    )
    for against in (False, True):
        assert job.lines(against=against) == words
        assert job.check(against=against, names=names).holds
        other = job.check(against=against, names="layers.{i}.{key|value|query}")
        assert "; --names 'layers.{i}.{key|value|query}' says so" in str(other.findings[0])
    assert certk("verify", job.output, "--against", job.source) == 1
    assert words in capsys.readouterr().out
    assert certk("verify", job.output, "--against", job.source, "--names", names) == 0


def test_layers_left_out_or_renumbered(tmp_path: Path, capsys: Captured) -> None:
    names = "layers.1{i}.{key|value|query}"
    job = named(tmp_path, names, layers=12)
    said = job.lines(against=True)
    words = (
        "by them 'layers.0.key' is no part of the cache, by those of the input the key of layer 0"
    )
    assert words in said
    found = job.check(against=True, names=names)
    assert found.holds
    assert found.names == names
    assert set(found.covered) == {
        f"layers.1{i}.{r}" for i in (0, 1) for r in ("key", "query", "value")
    }
    assert len(found.not_covered) == 30
    assert certk("verify", job.output, "--against", job.source, "--names", names) == 0
    text = capsys.readouterr().out
    assert "covers 6 of the 36 tensors of its input" in text
    assert "not covered: 'layers.0.key', 'layers.0.query', 'layers.0.value', ..." in text
    assert certk("verify", job.output, "--names", names, "--json") == 0
    [output] = json.loads(capsys.readouterr().out)["outputs"]
    assert (len(output["covered"]), len(output["not_covered"])) == (6, 30)
    assert output["names"] == names


def test_names_of_nobody_are_for_the_caller_to_confirm(tmp_path: Path) -> None:
    tensors = cache_tensors(layers=1) | cache_tensors(layers=1, seed=1, names="other.{i}.{role}")
    job = Job.__new__(Job)
    job.source, job.output = tmp_path / "x.safetensors", tmp_path / "out" / "x.safetensors"
    job.source.write_bytes(safetensors_bytes(tensors, None))
    for names, known in (
        ("layers.{i}.{key|value|query}", True),
        ("other.{i}.{key|value|query}", False),
    ):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        assert (
            certk("prune", job.source, "-o", job.output.parent, "--eps", ".1", "--names", names)
            == 0
        )
        found = job.check(against=True)
        assert found.holds == known
        assert len(found.covered) == len(found.not_covered) == 3
        assert job.check(against=True, names=names).holds


def test_names_where_none_is_known(tmp_path: Path) -> None:
    names = "m.{i}.{key|value|query}"
    job = Job(tmp_path, names=names, cache={"m": 5, "names": "m.{i}.{role}"})
    words = "by them 'm.0.key' is the key of layer 0, by those of the input no part of the cache"
    assert words in job.lines()
    assert job.check(against=True, names=names).holds


def test_two_known_spellings_in_one_input(tmp_path: Path) -> None:
    tensors = cache_tensors(layers=1) | cache_tensors(layers=1, seed=1, names="layer.{i}.{role}")
    job = Job.__new__(Job)
    job.source, job.output = tmp_path / "x.safetensors", tmp_path / "out" / "x.safetensors"
    job.source.write_bytes(safetensors_bytes(tensors, None))
    names = "layer.{i}.{key|value|query}"
    assert (
        certk("prune", job.source, "-o", job.output.parent, "--eps", "0.1", "--names", names) == 0
    )
    assert "metadata certk: its input: its tensors fit" in job.lines(against=True)
    assert "say which with --names" in job.lines()
    assert job.check(against=True, names=names).holds


def test_other_tensors_are_told_and_no_finding(tmp_path: Path, capsys: Captured) -> None:
    source, out = tmp_path / "x.safetensors", tmp_path / "out"
    tensors = cache_tensors(layers=1) | {"mask\x1b[2J": tensor(np.zeros(3), "F32")}
    source.write_bytes(safetensors_bytes(tensors, None))
    assert certk("prune", source, "-o", out, "--eps", "0.1") == 0
    capsys.readouterr()
    assert certk("verify", out, "--against", source) == 0
    text = capsys.readouterr().out
    assert "covers 3 of the 4 tensors of its input" in text
    assert r"not covered: 'mask\x1b[2J'" in text
    assert "\x1b" not in text


def test_a_pattern_that_is_none_is_refused(job: Job, capsys: Captured) -> None:
    with pytest.raises(CertkError, match="--names 'x': give one"):
        audit([job.output], names="x")
    assert certk("verify", job.output, "--names", "x") == 2


# ------------------------------------------------------------------------------------------- layout


def turned(folder: Path, layout: str, **cache: Any) -> Job:
    """A cache whose shapes fit both orders of axes, pruned as if it were stored so."""
    shape = {"kv_heads": 2, "heads": 4, "m": 24, "n": 24}
    return Job(folder, cache=shape | cache, layout=layout)


def test_the_layout_is_that_of_the_input(tmp_path: Path, capsys: Captured) -> None:
    """Two kv heads of 24 keys, certified as 24 kv heads of two: true of another cache."""
    job = turned(tmp_path, "nhd")
    words = (
        "metadata certk: its layout nhd is not that of its input, which is hnd; "
        "give --layout nhd if it is"
    )
    for against in (False, True):
        assert job.lines(against=against) == words
        assert job.check(against=against, layout="nhd").holds
        other = job.check(against=against, layout="hnd")
        assert str(other.findings[0]).endswith("which is hnd; --layout hnd says so")
    command = ("verify", job.output, "--against", job.source)
    assert certk(*command) == 1
    assert words in capsys.readouterr().out
    assert certk(*command, "--layout", "nhd") == 0
    assert not ck.verify(job.output, job.source).holds
    assert ck.verify(job.output, job.source, layout="nhd").holds
    with pytest.raises(CertkError, match="layout is 'dnh': give hnd"):
        audit([job.output], layout="dnh")


def test_the_layout_that_is_usual_is_refused_where_another_is_given(tmp_path: Path) -> None:
    job = turned(tmp_path, "hnd")
    for against in (False, True):
        assert job.check(against=against).holds
        assert job.check(against=against, layout="hnd").holds
        [finding] = job.check(against=against, layout="nhd").findings
        assert "its layout hnd is not that of its input, which is nhd" in str(finding)


@pytest.mark.parametrize(
    ("sizes", "tensor", "layout"),
    [
        ((24, 24, 2, 2), "key", "hnd"),
        ((24, 24, 2, 2), "key", "nhd"),
        ((4, 8, 16, 8), "query", "hnd"),
        ((4, 8, 16, 8), "query", "nhd"),
        ((4, 8, 4, 8), "query", "hnd"),
    ],
)
def test_shapes_that_look_like_either_layout(
    tmp_path: Path, sizes: tuple[int, ...], tensor: str, layout: str
) -> None:
    """They are refused by prune, too, until somebody says which it is."""
    shape = dict(zip(("kv_heads", "heads", "m", "n"), sizes, strict=True))
    with pytest.raises(CertkError, match="--layout"):
        Job(tmp_path / "refused", cache=shape)
    job = Job(tmp_path, cache=shape, layout=layout)
    for against in (False, True):
        said = job.lines(against=against)
        assert said.startswith(f"metadata certk: its input: tensor 'layers.0.{tensor}'"), said
        assert "--layout hnd if" in said
        assert job.check(against=against, layout=layout).holds


def test_a_layout_that_alone_fits_need_not_be_given(tmp_path: Path) -> None:
    """(rows, heads, d) of few queries: 24 kv heads would not go into 3 query heads."""
    tensors = cache_tensors(layers=1, kv_heads=24, heads=3, m=4, n=2)
    job = Job.__new__(Job)
    job.source, job.output = tmp_path / "x.safetensors", tmp_path / "out" / "x.safetensors"
    job.source.write_bytes(safetensors_bytes(tensors, None))
    command = ["prune", job.source, "-o", job.output.parent, "--eps", ".1", "--layout", "nhd"]
    assert certk(*command) == 0
    for layout in (None, "nhd"):
        assert job.check(against=True, layout=layout).holds
    assert not job.check(against=True, layout="hnd").holds


# ------------------------------------------------------------------------ what the certificate says


def body_of(path: Path) -> Body:
    found: Body = {}
    forge(path, say=found.update)
    return found


def leaves(node: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """All that is no object in a certificate, with its place."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in pairs:
        if isinstance(value, dict | list):
            yield from leaves(value, (*place, key))
        else:
            yield (*place, key), value


NONSENSE = [
    *[-1, 0, 1, 2, 7, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 62, EDGE - 1, EDGE, 1 << 64, -EDGE],
    *["@1" + "0" * 400, "@1" + "0" * 4200, "@1" + "0" * 5000, "@1e999", "@-1e999", "@NaN"],
    *[0.5, 1.0, -0.0, 5e-324, 1e308, True, None, "", "1", "nan", [], {}, [1], {"1": 1}],
    *["\ud800", "\0", "layers.{i}.{key|value|query}", "@" + "[" * 900 + "]" * 900],
]
# Nobody can know who wrote it; and a set may keep to other options by chance.
HARMLESS = {("library",), *(("options", name) for name in ("max_keep", "keep_last", "out_tol"))}


def test_any_value_at_any_place_ends_in_a_verdict(tmp_path: Path) -> None:
    """And with the input no other than a harmless one passes."""
    job = Job(tmp_path, cache={"layers": 1, "kv_heads": 1, "heads": 2}, keep_last=1)
    good, body = job.output.read_bytes(), body_of(job.output)
    passed = set()
    for number, (place, value) in enumerate(leaves(body)):
        # Tensors have many like fields, of which each is given some of the values.
        for other in NONSENSE[number % 4 :: 4] if place[0] in ("inputs", "outputs") else NONSENSE:
            if place == ("sha256",) or (other == value and type(other) is type(value)):
                continue

            def say(body: Body, place: Any = place, other: Any = other) -> None:
                for key in place[:-1]:
                    body = body[key]
                body[place[-1]] = other

            job.output.write_bytes(good)
            forge(job.output, say=say)
            alone, with_input = job.check(), job.check(against=True)
            assert alone.holds or not with_input.holds
            if with_input.holds:
                passed.add(place)
    assert passed == HARMLESS


@pytest.mark.parametrize(
    "eps", ["@NaN", "@1e999", "@-1e999", "nan", "inf", None, [], "@1e400", "@1" + "0" * 400]
)
def test_a_budget_that_is_no_number(job: Job, eps: Any) -> None:
    good = job.output.read_bytes()
    for say in (lambda body: body.update(eps=eps), say_eps(eps)):
        job.output.write_bytes(good)
        forge(job.output, say=say)
        refuted(job, "^metadata certk: (cannot be read: |its eps is nan)", alone=True)


@pytest.mark.parametrize("eps", [1.0, 1.5, -1e-300, -1.0, 1e308])
def test_a_budget_that_cannot_be(job: Job, eps: float) -> None:
    forge(job.output, say=say_eps(eps))
    refuted(job, "^metadata certk: its eps is ", alone=True)


def test_a_budget_just_met_and_just_missed(job: Job) -> None:
    arrays = arrays_of(job.output)
    worst = max(float(arrays[f"layers.{i}.tail_mass_upper"].max()) for i in range(2))
    forge(job.output, say=say_eps(worst))
    assert job.check().holds
    assert job.check().rows_over_budget == 0
    forge(job.output, say=say_eps(math.nextafter(worst, 0.0)))
    [finding] = job.check().findings
    assert "without a max_keep to excuse it" in str(finding)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep_first": 3}, "position 2 must be kept and is not"),
        ({"keep_first": 1 << 70}, "position 2 must be kept and is not"),
        ({"keep_last": 24}, "position 2 must be kept and is not"),
        ({"keep_last": 2}, r"position 22 must be kept and is not"),
        ({"keep_last": 1 << 70}, "position 2 must be kept and is not"),
        ({"max_keep": 4}, "5 kept, max_keep allows 4"),
        ({"max_keep": 4.9 / 24}, "5 kept, max_keep allows 4"),
        ({"max_keep": 1e-9}, "5 kept, max_keep allows 1"),
        ({"max_keep": 0}, "cannot be read: options"),
        ({"max_keep": 1.5}, "cannot be read: options"),
        ({"max_keep": 0.0}, "cannot be read: options"),
        ({"max_keep": True}, "cannot be read: options"),
        ({"keep_first": -1}, "cannot be read: options"),
        ({"keep_last": 1.0}, "cannot be read: options"),
        ({"granularity": "rows"}, "cannot be read: options"),
        ({"min_keep": 1}, "cannot be read: a field is missing or of the wrong kind"),
    ],
)
def test_options_that_were_not_kept_to(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    """The set holds positions 0, 1, 4, 9 and 23, in every head, and claims nothing else."""
    job = Job(tmp_path, cache={"m": 5})
    cache = write_cache(job.source, m=5)

    def rows(arrays: Arrays) -> None:
        keep_only(arrays, [0, 1, 4, 9, 23], cache)

    allowed = {"max_keep": 5, "keep_first": 2, "keep_last": 1}
    forge(job.output, rows, lambda body: body["options"].update(allowed))
    assert job.check(against=True).holds
    allowed = {"max_keep": 5.01 / 24, "keep_first": 0, "keep_last": 0}
    forge(job.output, say=lambda body: body["options"].update(allowed))
    assert job.check(against=True).holds
    forge(job.output, say=lambda body: body["options"].update({"max_keep": 5} | options))
    refuted(job, words, alone=True)


@pytest.mark.parametrize("offset", [18, 20, 0, -1, -5, -100, 1 << 62, 1 << 63, -(1 << 64), None])
def test_a_forged_causal_offset(job: Job, offset: int | None) -> None:
    forge(job.output, say=lambda body: body.update(causal_offset=offset))
    assert (
        "scale or causal_offset is not that of" in job.lines(against=True) or not job.check().holds
    )
    assert not job.check(against=True).holds
    if offset is not None and offset < 0:  # fewer keys can be seen than were kept
        assert "not ascending positions from 0 to" in job.lines()


@pytest.mark.parametrize("scale", [0.5 + 2**-53, -0.5, 0.0, 1e308, 5e-324])
def test_a_forged_scale(job: Job, scale: float) -> None:
    forge(job.output, say=lambda body: body["scales"].update({"1": scale}))
    refuted(job, "scale or causal_offset is not that of", alone=False)


@pytest.mark.parametrize(
    "scales", [{}, {"0": 0.5}, {"0": 0.5, "1": 0.5, "2": 0.5}, {"0": 0.5, "7": 0.5}]
)
def test_scales_of_other_layers(job: Job, scales: dict[str, float]) -> None:
    forge(job.output, say=lambda body: body.update(scales=scales))
    refuted(job, "its scales are not one for each layer", alone=True)


@pytest.mark.parametrize(
    ("scale", "exact"), [("-1e308", False), ("1e308", False), ("1e-320", True), ("0.0", True)]
)
def test_scores_beyond_arithmetic_confirm_nothing(tmp_path: Path, scale: str, exact: bool) -> None:
    """Scores that overflow to -inf must not pass for keys that are not seen, and weigh nothing."""
    job = Job(tmp_path, cache={"m": 5})
    cache = write_cache(job.source, m=5, metadata={"scale": scale})
    with job.source.open("rb") as file:
        content = file.read()
    import hashlib

    header = content[: 8 + int.from_bytes(content[:8], "little")]

    def edit(arrays: Arrays) -> None:
        keep_only(arrays, [17], cache)
        for i in range(2):
            name = f"layers.{i}.tail_mass_upper"
            arrays[name] = np.full_like(arrays[name], 23 / 24 + 1e-7 if exact else 0.0)

    def say(body: Body) -> None:
        body["scales"] = {"0": float(scale), "1": float(scale)}
        body["input_headers"] = [hashlib.sha256(header).hexdigest()]
        body["options"]["max_keep"] = 1

    forge(job.output, edit, say)
    found = job.check(against=True)
    assert found.holds == exact, found.findings
    assert found.confirmed_rows == (40 if exact else 0)


def test_what_arithmetic_says_nothing_of_may_be_all(tmp_path: Path) -> None:
    """Hot keys may lose what they like, but the worst of it is not that of the other rows."""
    shape = {"m": 5, "dtype": "F32", "spread": 1.0}
    job = Job(tmp_path, eps=0.05, cache=shape, hot=0.6, guard="codes", proof="none")
    before = job.check(against=True)
    assert before.worst_tail_mass is not None
    assert before.worst_tail_mass < 1

    def far(arrays: Arrays) -> None:
        query = arrays["layers.1.query"].copy()
        query[0, 2, 3] *= np.float32(1e18)  # one row of forty, whose scores nobody can tell apart
        arrays["layers.1.query"] = query

    forge_input(job.source, job.output, far)
    after = job.check(against=True)
    assert after.holds
    assert after.worst_tail_mass == 1.0


def of_another_shape(body: Body) -> None:
    body["outputs"]["layers.0.key"]["shape"].append(1)


def of_another_type(body: Body) -> None:
    body["outputs"]["layers.0.key"]["dtype"] = "BF16"


def of_other_bytes(body: Body) -> None:
    body["outputs"]["layers.0.key"]["sha256"] = "0" * 64


@pytest.mark.parametrize(
    ("say", "words"),
    [
        (lambda body: body["outputs"].pop("layers.0.key"), "layers.0.key: the file has it, the"),
        (
            lambda body: body["outputs"].update(x=body["outputs"]["layers.0.key"]),
            "x: the certificate lists it, the file has no such tensor",
        ),
        (of_another_shape, r"layers.0.key: is F16 .*, the certificate says F16 \[\d+, 4, 1\]"),
        (of_another_type, r"layers.0.key: is F16 .*, the certificate says BF16 \[\d+, 4\]"),
        (of_other_bytes, "layers.0.key: its bytes were changed"),
        (lambda body: body.update(library="@ 1"), "metadata certk: its text is not in the canon"),
    ],
)
def test_what_is_said_of_the_outputs(job: Job, say: Callable[[Body], None], words: str) -> None:
    forge(job.output, say=say)
    refuted(job, "^" + words, alone=True)


def test_a_certificate_changed_afterwards(job: Job) -> None:
    content = job.output.read_bytes()
    place = content.index(b'\\"sha256\\":\\"', content.index(b'\\"scales\\"')) + 13
    job.output.write_bytes(content[:place] + b"0" * 64 + content[place + 64 :])
    refuted(job, "^metadata certk: its SHA-256 is not that of its text", alone=True)


def test_a_header_of_another_form(job: Job) -> None:
    """As valid as the canonical one, but there is one only."""
    content = job.output.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    job.output.write_bytes(raw_file(content[8:start] + b" " * 8, content[start:]))
    refuted(job, "^header: is not in canonical form from byte 0 on$", alone=True)


def test_other_metadata(job: Job) -> None:
    content = job.output.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = content[8:start].replace(b'{"__metadata__":{', b'{"__metadata__":{"scale":"1",', 1)
    job.output.write_bytes(raw_file(header, content[start:]))
    refuted(job, "^metadata: foreign key 'scale'$", alone=True)


def test_all_that_does_not_hold_is_told(job: Job) -> None:
    """Names that nobody gave do not keep the rest from being judged, nor one output another."""
    whole = job.output.with_name("whole.safetensors")
    shutil.copy(job.output, whole)

    def edit(arrays: Arrays) -> None:
        for end in ("upper", "lower"):
            arrays[f"layers.0.tail_mass_{end}"] = arrays[f"layers.0.tail_mass_{end}"] * 0.5

    forge(job.output, edit)
    report = audit([job.output, whole], [job.source], names="layers.1{i}.{key|value|query}")
    assert not report.holds
    said = "\n".join(map(str, report.outputs[0].findings))
    assert "its names" in said
    assert "layer 0, head 0, query 0: tail mass in" in said
    report = audit([job.output, whole], [job.source])
    assert [output.holds for output in report.outputs] == [False, True]
    assert not report.holds


def test_rows_are_placed_beyond_the_first_block(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("certk_rs._audit.truth._BLOCK", 48)

    def edit(arrays: Arrays) -> None:
        for end in ("upper", "lower"):
            arrays[f"layers.0.tail_mass_{end}"] = arrays[f"layers.0.tail_mass_{end}"].copy()
            arrays[f"layers.0.tail_mass_{end}"][4, 3] *= 0.5

    forge(job.output, edit)
    [finding] = job.check(against=True).findings
    assert finding.where == "layers.0.tail_mass_upper[4, 3]"
    assert "layer 0, head 4, query 3: tail mass in" in finding.what


def test_text_that_is_nested_too_deep(job: Job) -> None:
    good = job.output.read_bytes()
    for depth in (100, 900, 950, 970, 980, 990, 1000, 5000, 100_000):
        job.output.write_bytes(good)
        forge(job.output, say=lambda body, d=depth: body.update(library="@" + "[" * d + "]" * d))
        assert not job.check().holds
        nest = "[" * depth + "]" * depth
        for entry in (f'"dtype":"F32","shape":{nest}', f'"dtype":{nest},"shape":[1]'):
            job.output.write_bytes(raw_file(f'{{"x":{{{entry},"data_offsets":[0,4]}}}}', bytes(4)))
            assert job.check().findings[0].where == "file"


@pytest.mark.parametrize("shape", [f"[1{'0' * 4000},1{'0' * 4000}]", f"[{'9,' * 300_000}9]"])
def test_a_product_of_sizes_that_nobody_can_print(tmp_path: Path, shape: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(
        raw_file(f'{{"x":{{"dtype":"F32","shape":{shape},"data_offsets":[0,4]}}}}', bytes(4))
    )
    [output] = audit([path]).outputs
    assert "is not a list of sizes" in str(output.findings[0])


def test_sizes_of_outputs_that_nobody_can_print(job: Job) -> None:
    def say(body: Body) -> None:
        body["outputs"]["layers.0.key"]["shape"] = ["@9" + "0" * 4000] * 2

    forge(job.output, say=say)
    assert "is not a dtype, a shape and a SHA-256" in job.lines()


# --------------------------------------------------------------------------------------- the proofs


def masses(cache: dict[str, np.ndarray], layer: int) -> np.ndarray:
    """The softmax of every row (heads, m, n), 4 heads over 2 kv heads, d = 4."""
    q, k = (cache[f"layers.{layer}.{role}"].reshape(-1, n, 4) for role, n in SHAPES)
    scores = 0.5 * np.einsum("hmd,hnd->hmn", q, np.repeat(k, 2, axis=0))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


SHAPES = (("query", 5), ("key", 24))


@pytest.mark.parametrize(
    ("kept", "last"), [([3, 7, 11, 17, 20], 0), ([7, 20, 21, 22, 23], 4), ([2, 9, 21, 22, 23], 3)]
)
def test_raised_lower_bounds_under_a_cap(tmp_path: Path, kept: list[int], last: int) -> None:
    """Arbitrary keys, and true masses: what they lose is the budget, and proves less than eps.

    Forced keys cannot be dropped, wherever they are.
    """
    job = Job(tmp_path, cache={"m": 5})
    cache = write_cache(job.source, m=5)
    soft = [masses(cache, i) for i in range(2)]
    lost = [np.delete(rows, kept, axis=-1).sum(axis=-1) for rows in soft]
    free = 24 - last
    mixed = [np.sort(rows[..., :free].reshape(2, 10, free).sum(axis=1), axis=1) for rows in soft]

    def best(budgets: list[np.ndarray]) -> np.ndarray:
        """The largest bounds that equal weights prove, by layer and kv head."""
        sums = [np.cumsum(rows, axis=1) for rows in mixed]
        return np.array([24 - (s <= b[:, None]).sum(1) for s, b in zip(sums, budgets, strict=True)])

    right = best([np.maximum(rows, 0.1).reshape(2, 10).sum(axis=1) for rows in lost])
    assert (right > max(1, last)).any()
    assert (right <= 5).all()
    assert (right < best([np.ones(2)] * 2)).all()

    def edit(arrays: Arrays) -> None:
        keep_only(arrays, kept, cache)
        for i in range(2):
            arrays[f"layers.{i}.tail_mass_upper"] = (lost[i] * (1 + 2e-7)).astype("<f4")
            arrays[f"layers.{i}.tail_mass_lower"] = (lost[i] * (1 - 2e-7)).astype("<f4")
            arrays[f"layers.{i}.lower_bound"] = bounds[i]
            equal_weights(arrays, i, 0.25, (4, 5))

    bounds = right
    forge(job.output, edit, lambda body: body["options"].update(max_keep=5, keep_last=last))
    assert job.check(against=True).holds, job.lines(against=True)
    assert job.check().rows_over_budget > 0
    bounds = np.minimum(right + 1, 5)
    forge(job.output, edit)
    for i in range(2):
        for group in np.flatnonzero(right[i] < 5):
            words = (
                rf"^layers.{i}.lower_bound\[{group}\]: layer {i}, kv head {group}: \d is not proven"
            )
            refuted(job, words, alone=False)


def test_a_bound_that_the_budget_alone_would_prove(at_cap: Job) -> None:
    """With eps for every row it would be larger; this set loses more, and so may others."""

    def edit(arrays: Arrays) -> None:
        for i in range(2):
            upper = f"layers.{i}.tail_mass_upper"
            arrays[upper] = np.where(arrays[upper] > 0.01, np.float32(0.999), arrays[upper])

    forge(at_cap.output, edit)
    refuted(at_cap, "is not proven by the recorded weights", alone=False)


@pytest.mark.parametrize("factor", [2.0**-120, 2.0**120, 1.0])
def test_weights_count_by_their_ratio(job: Job, factor: float) -> None:
    """Any multiple of the mixture proves the same."""

    def edit(arrays: Arrays) -> None:
        for i in range(2):
            name = f"layers.{i}.lower_bound_weights"
            arrays[name] = (arrays[name] * factor).astype("<f4")

    forge(job.output, edit)
    assert job.check(against=True).holds


@pytest.mark.parametrize("value", [0.0, 2.0**-149, 1e-40, 1.0, 2.0**127])
def test_weights_that_are_all_the_same(job: Job, value: float) -> None:
    """They prove less, and none of them breaks the arithmetic; 0 stands for rows without any."""
    expected = {}
    for this in (1.0, value):

        def edit(arrays: Arrays, this: float = this) -> None:
            for i in range(2):
                equal_weights(arrays, i, this, (6, 5))
                if not this:
                    no_proof(arrays, i)

        forge(job.output, edit)
        found = job.check(against=True)
        expected[this] = [str(finding) for finding in found.findings]
        assert all("is not proven by the recorded weights" in line for line in expected[this])
        assert found.confirmed_rows == found.rows
        assert found.confirmed_lower_bounds == found.lower_bounds - len(expected[this])
    if value:
        assert expected[value] == expected[1.0]
    else:
        assert len(expected[value]) == 6
    assert len(expected[1.0]) > 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -(2.0**-149), -1.0, 0.0])
def test_weights_that_are_none(job: Job, value: float) -> None:
    def edit(arrays: Arrays) -> None:
        arrays["layers.1.lower_bound_weights"] = arrays["layers.1.lower_bound_weights"].copy()
        arrays["layers.1.lower_bound_weights"][3] = value

    forge(job.output, edit)
    refuted(job, r"^layers.1.lower_bound_weights\[3\]: is not a finite weight > 0$", alone=True)


@pytest.mark.parametrize("role", ["key", "value"])
def test_the_last_row_of_the_last_head(by_layer: Job, role: str) -> None:
    def edit(arrays: Arrays) -> None:
        changed = arrays[f"layers.1.{role}"].copy()
        changed[1, -1, -1] += 1
        arrays[f"layers.1.{role}"] = changed

    forge(by_layer.output, edit)
    refuted(
        by_layer,
        rf"^layers.1.{role}\[1, \d+\]: is not position 23 of kv head 1 of the input$",
        alone=False,
    )


@pytest.mark.parametrize("bits", [0x8000, 0x0001])
def test_rows_are_compared_as_bits(tmp_path: Path, bits: int) -> None:
    """-0 for 0, and another NaN for one, are other rows."""
    job = Job(tmp_path, cache={"m": 5, "spread": 0.0}, eps=0.3)

    def edit(arrays: Arrays) -> None:
        changed = arrays["layers.0.value"].view("<u2").copy()
        changed[2, 1] ^= bits
        arrays["layers.0.value"] = changed.view("<f2")

    forge(job.output, edit)
    refuted(job, r"^layers.0.value\[2\]: is not position", alone=False)


def test_rows_of_one_head_given_to_another(job: Job) -> None:
    def edit(arrays: Arrays) -> None:
        ends = arrays["layers.0.indptr"]
        arrays["layers.0.key"] = arrays["layers.0.key"].copy()
        arrays["layers.0.key"][ends[2]] = arrays["layers.0.key"][ends[1]]

    start = int(arrays_of(job.output)["layers.0.indptr"][2])
    forge(job.output, edit)
    refuted(
        job,
        rf"^layers.0.key\[{start}\]: is not position \d+ of kv head 2 of the input$",
        alone=False,
    )


@pytest.mark.parametrize("which", ["output", "source"])
@pytest.mark.parametrize("when", ["checking", "recomputing"])
def test_a_file_that_changes_meanwhile(job: Job, which: str, when: str) -> None:
    """What was hashed is what was judged."""
    path = getattr(job, which)

    def tell(label: str, done: int, _total: int) -> None:
        if label.startswith(when) and done == 1:
            with path.open("r+b") as file:
                file.write(path.read_bytes()[:9])
            os.utime(path, ns=(1, 1))

    assert audit([job.output], [job.source]).holds
    [output] = audit([job.output], [job.source], tell).outputs
    [finding] = output.findings
    assert finding.where == "file"
    assert "was changed while it was being used" in finding.what


def test_an_input_that_is_another_meanwhile(job: Job, tmp_path: Path) -> None:
    """Nothing of it is read as what it was."""
    other = tmp_path / "other.safetensors"
    write_cache(other, m=2, n=3, layers=1)

    def tell(label: str, _done: int, _total: int) -> None:
        if label.startswith("checking"):
            shutil.copy(other, job.source)

    [output] = audit([job.output], [job.source], tell).outputs
    [finding] = output.findings
    assert "was changed while it was being used" in finding.what
