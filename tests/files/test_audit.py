"""The audit: what it must notice, in which words, and what it cannot know."""

from __future__ import annotations

import ast
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from certk_rs import CertkError, prune
from certk_rs._audit import recompute
from certk_rs.audit import WITHOUT_INPUT, audit
from certk_rs.cache_format import Options, SafetensorsFile
from cli_fixtures import Job, rewrite, write_cache

Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    Job(folder, cache={"m": 8, "metadata": {"scale": "0.5", "note": "any"}})
    return folder


@pytest.fixture
def job(finished: Path, tmp_path: Path) -> Job:
    """A fresh copy of one small finished job."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    copy = Job.__new__(Job)
    copy.source = tmp_path / "in" / "x.safetensors"
    copy.output = tmp_path / "out" / "x.safetensors"
    return copy


def flip(path: Path, position: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def test_what_was_written_holds(job: Job) -> None:
    alone, with_input = job.check(), job.check(against=True)
    assert alone.holds
    assert alone.unchecked == WITHOUT_INPUT
    assert (alone.confirmed_rows, alone.rows) == (0, 64)
    assert with_input.holds
    assert with_input.unchecked == ()
    assert with_input.confirmed_rows == with_input.rows == 64
    assert with_input.confirmed_lower_bounds == with_input.lower_bounds == 4
    assert with_input.source == job.source


def test_any_byte_of_the_output(job: Job) -> None:
    good = job.output.read_bytes()
    for position in [*range(0, len(good), 7), len(good) - 1]:
        flip(job.output, position, position % 8)
        assert not job.check().holds, f"byte {position}"
        job.output.write_bytes(good)


def test_any_byte_of_the_input(job: Job) -> None:
    """A damaged header may make it unreadable, which is an error; nothing passes."""
    good = job.source.read_bytes()
    unreadable = 0
    for position in range(0, len(good), 5):
        flip(job.source, position, position % 8)
        try:
            assert not audit([job.output], [job.source]).holds, f"byte {position}"
        except CertkError:
            unreadable += 1
        job.source.write_bytes(good)
    assert unreadable < 200


def test_a_changed_byte_is_placed(job: Job) -> None:
    with SafetensorsFile(job.output) as file:
        start = {name: len(file.header.raw) + e.start for name, e in file.header.entries.items()}
    flip(job.output, start["layers.1.value"] + 3, 0)
    assert "layers.1.value: its bytes were changed" in job.lines()


def test_a_changed_byte_of_the_input_is_placed(job: Job) -> None:
    with SafetensorsFile(job.source) as file:
        start = len(file.header.raw) + file.header.entries["layers.1.query"].start
    flip(job.source, start, 0)
    assert f"input layers.1.query: was changed in {job.source}" in job.lines(against=True)
    assert audit([job.output], [job.source]).unmatched == (job.source,)


@pytest.mark.parametrize("change", ["cut", "longer", "empty", "text"])
def test_files_that_are_no_outputs(job: Job, change: str) -> None:
    content = job.output.read_bytes()
    job.output.write_bytes(
        {"cut": content[:-1], "longer": content + b"\0", "empty": b"", "text": b"hello" * 9}[change]
    )
    [finding] = job.check().findings
    assert finding.where == "file"
    assert str(job.output) not in str(finding)


def test_an_input_is_no_output(job: Job) -> None:
    [output] = audit([job.source]).outputs
    assert "there is no certificate" in str(output.findings[0])


def test_missing_paths_are_not_findings(job: Job, tmp_path: Path) -> None:
    """An output that is not there is an error of that one; nothing can be done without an input."""
    lone, whole = audit([tmp_path / "none", job.output], [job.source]).outputs
    assert (lone.findings, lone.holds, whole.holds) == ([], False, True)
    assert lone.error == f"{tmp_path / 'none'}: No such file or directory"
    with pytest.raises(FileNotFoundError):
        audit([job.output], [tmp_path / "none"])


def drop_index(arrays: Arrays) -> None:
    """Drop the first kept key of kv head 1 of layer 0 with its rows, as a careful forger would."""
    place = int(arrays["layers.0.indptr"][1])
    for name in ("indices", "key", "value"):
        arrays[f"layers.0.{name}"] = np.delete(arrays[f"layers.0.{name}"], place, axis=0)
    indptr = arrays["layers.0.indptr"].copy()
    indptr[2:] -= 1
    arrays["layers.0.indptr"] = indptr
    bound = arrays["layers.0.lower_bound"].copy()
    bound[1] = min(bound[1], indptr[2] - indptr[1])
    arrays["layers.0.lower_bound"] = bound


def scale_masses(name: str, factor: float) -> Callable[[Arrays], None]:
    def edit(arrays: Arrays) -> None:
        changed = arrays[name].copy()
        changed[2, 1] *= factor
        arrays[name] = changed
        if name.endswith("upper"):
            lower = name.replace("upper", "lower")
            arrays[lower] = np.minimum(arrays[lower], changed)

    return edit


def other_rows(arrays: Arrays) -> None:
    changed = arrays["layers.1.value"].copy()
    changed[3, 0] += 1
    arrays["layers.1.value"] = changed


def other_index(arrays: Arrays) -> None:
    """Keep another key than was kept, under the old rows."""
    kept = arrays["layers.0.indices"].copy()
    free = sorted(set(range(24)) - set(kept[: arrays["layers.0.indptr"][1]].tolist()))
    first = kept[: arrays["layers.0.indptr"][1]]
    first[0] = free[0]
    first.sort()
    arrays["layers.0.indices"] = kept


def shift_masses(arrays: Arrays) -> None:
    """Claim that a row loses more than it does."""
    for end, factor in (("upper", 1.002), ("lower", 1.001)):
        scale_masses(f"layers.0.tail_mass_{end}", factor)(arrays)


def raise_bounds(arrays: Arrays) -> None:
    for i in range(2):
        arrays[f"layers.{i}.lower_bound"] = np.diff(arrays[f"layers.{i}.indptr"])


def no_weights(arrays: Arrays) -> None:
    for name in ("rows", "weights"):
        name = f"layers.1.lower_bound_{name}"
        arrays[name] = arrays[name][:0]


# Consistent rewritings (hashes, shapes, header, own SHA-256), and what the input says of them.
FORGERIES: dict[str, tuple[Callable[[Arrays], None], str]] = {
    "index dropped": (drop_index, r"layer 0, head [23], query \d: tail mass in .* is refuted"),
    "upper lowered": (
        scale_masses("layers.1.tail_mass_upper", 0.5),
        "layer 1, head 2, query 1: tail mass in .* is refuted: it is in",
    ),
    "upper lowered a little": (
        scale_masses("layers.1.tail_mass_upper", 0.999),
        "layer 1, head 2, query 1: tail mass in .* is refuted: it is in",
    ),
    "both raised": (shift_masses, "layer 0, head 2, query 1: tail mass in .* is refuted"),
    "other rows": (
        other_rows,
        r"layers.1.value\[3\]: is not position \d+ of kv head 0 of the input",
    ),
    "other index": (other_index, r"layers.0.key\[\d+\]: is not position \d+ of kv head 0"),
    "bounds raised": (raise_bounds, r"lower_bound\[\d\]: layer \d, kv head \d: \d+ is not proven"),
    "no proof": (no_weights, r"layers.1.lower_bound\[0\].* is not proven by the recorded weights"),
}


@pytest.mark.parametrize("case", FORGERIES)
def test_a_consistent_forgery_is_refuted_by_the_input_alone(job: Job, case: str) -> None:
    edit, words = FORGERIES[case]
    rewrite(job.output, edit)
    alone = job.check()
    assert alone.holds, job.lines()
    assert alone.unchecked == WITHOUT_INPUT
    assert re.search(words, job.lines(against=True)), job.lines(against=True)


def set_entry(name: str, place: Any, value: float) -> Callable[[Arrays], None]:
    def edit(arrays: Arrays) -> None:
        changed = arrays[name].copy()
        changed[place] = value
        arrays[name] = changed

    return edit


def swap(arrays: Arrays) -> None:
    changed = arrays["layers.0.indices"].copy()
    changed[[0, 1]] = changed[[1, 0]]
    arrays["layers.0.indices"] = changed


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (swap, "layers.0.indices: layer 0, kv head 0: not ascending"),
        (set_entry("layers.0.indices", 0, -1), "layers.0.indices: layer 0, kv head 0: not ascend"),
        (set_entry("layers.1.indices", -1, 24), "layers.1.indices: layer 1, kv head 1: not ascen"),
        (set_entry("layers.0.indptr", 1, 1000), "layers.0.indptr: does not rise"),
        (set_entry("layers.0.indptr", 0, 1), "layers.0.indptr: does not rise"),
        (set_entry("layers.0.tail_mass_upper", (1, 2), 0.2), r"upper\[1, 2\]: 0.2\d* is over eps"),
        (set_entry("layers.0.tail_mass_upper", (1, 2), np.nan), r"upper\[1, 2\]: .* no interval"),
        (set_entry("layers.0.tail_mass_lower", (1, 2), -0.5), r"upper\[1, 2\]: .* no interval"),
        (set_entry("layers.0.tail_mass_lower", (1, 2), 0.5), r"upper\[1, 2\]: .* no interval"),
        (set_entry("layers.0.lower_bound", 1, -1), "layers.0.lower_bound: layer 0, kv head 1: -1"),
        (set_entry("layers.0.lower_bound", 1, 25), "layers.0.lower_bound: layer 0, kv head 1: 25"),
        (
            set_entry("layers.0.lower_bound_weights", 0, -1.0),
            r"lower_bound_weights\[0\]: is not a finite weight > 0",
        ),
        (
            set_entry("layers.0.lower_bound_weights", 3, np.inf),
            r"lower_bound_weights\[3\]: is not a finite weight > 0",
        ),
        (lambda arrays: arrays.pop("layers.1.lower_bound"), "layers.1.lower_bound: is missing"),
        (
            lambda arrays: arrays.update({"layers.0.key": arrays["layers.0.key"][:, :3].copy()}),
            r"layers.0.key: is F16 \[\d+, 3\], must be F16 \[\d+, 4\]",
        ),
    ],
)
def test_consistent_nonsense_is_seen_without_the_input(
    job: Job, edit: Callable[[Arrays], None], words: str
) -> None:
    rewrite(job.output, edit)
    assert re.search(words, job.lines()), job.lines()
    assert not job.check(against=True).holds


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"eps": 1e-9}, "is over eps = 1e-09"),
        ({"eps": 1.5}, "its eps is 1.5"),
        ({"eps": -0.1}, "its eps is -0.1"),
        ({"options": Options(max_keep=1)}, "kept, max_keep allows 1"),
        ({"options": Options(granularity="layer")}, "its eps is not one budget for each group"),
        ({"scales": {0: 0.5}}, "its scales are not one for each layer"),
        ({"names": "l.{i}.{key|value|query}"}, "cannot be of a prune job"),
        ({"inputs": {}}, "cannot be of a prune job"),
    ],
)
def test_consistent_nonsense_in_the_certificate(
    job: Job, fields: dict[str, Any], words: str
) -> None:
    rewrite(job.output, lambda _: None, **fields)
    assert words in job.lines()


def test_forced_positions_must_be_kept(tmp_path: Path) -> None:
    job = Job(tmp_path, keep_first=1)
    rewrite(job.output, drop_index, options=Options(keep_first=2))
    assert "must be kept and is not" in job.lines()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"scales": {0: 0.25, 1: 0.5}}, "scale or causal_offset is not that of"),
        ({"causal_offset": 30}, "scale or causal_offset is not that of"),
        ({"eps": 0.5}, "is not proven by the recorded weights"),
        ({"input_headers": ("0" * 64,)}, "input header: the header of"),
    ],
)
def test_a_consistently_forged_certificate(job: Job, fields: dict[str, Any], words: str) -> None:
    rewrite(job.output, lambda _: None, **fields)
    assert job.check().holds
    assert words in job.lines(against=True)


def test_inputs_are_matched_by_content(job: Job, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    write_cache(other, seed=5)
    renamed = tmp_path / "renamed.safetensors"
    shutil.copy(job.source, renamed)
    report = audit([job.output], [other, renamed])
    assert report.outputs[0].source == renamed
    assert report.outputs[0].holds
    assert report.unmatched == (other,)
    assert not report.holds
    report = audit([job.output], [job.source, renamed])
    assert report.holds  # the same tensors twice
    report = audit([job.output], [other])
    assert "none of the files given with --against" in str(report.outputs[0].findings[0])


def test_one_input_may_have_several_outputs(job: Job, tmp_path: Path) -> None:
    prune(job.source, tmp_path / "more", 0.3, proof="full")
    report = audit([job.output, tmp_path / "more" / "x.safetensors"], [job.source])
    assert report.holds
    assert all(output.confirmed_rows == 64 for output in report.outputs)


@pytest.mark.parametrize("offset", [10**18 - 1, -4, 1 - 10**18])
def test_offsets_far_beyond_the_keys(tmp_path: Path, offset: int) -> None:
    cache = {"n": 7, "m": 6, "metadata": {"causal_offset": str(offset)}}
    output = Job(tmp_path, cache=cache).check(against=True)
    assert output.holds
    assert output.confirmed_rows == 2 * 4 * 6


def test_many_rows_and_keys_are_checked_block_by_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = {"n": 70, "m": 13, "metadata": {"causal_offset": "40"}}
    job = Job(tmp_path, cache=cache, granularity="layer")
    monkeypatch.setattr("certk_rs._audit.truth._BLOCK", 200)
    monkeypatch.setattr(recompute, "_CHUNK", 16)
    output = job.check(against=True)
    assert output.holds, job.lines(against=True)
    assert output.confirmed_rows == 2 * 4 * 13


def recomputed(
    q: np.ndarray, k: np.ndarray, scale: float, kept: np.ndarray, seen: np.ndarray
) -> recompute.Rows:
    sides = (recompute.Keys(k[side], np.flatnonzero(side)) for side in (kept, ~kept))
    return recompute.recompute(q, *sides, scale, seen)


def test_recomputed_masses_enclose_the_exact_ones() -> None:
    """Against balls of 200 bits, over scores from flat to far beyond the range of exp."""
    flint = pytest.importorskip("flint")
    rng = np.random.default_rng(7)
    before, flint.ctx.prec = flint.ctx.prec, 200
    try:
        for spread in (0.0, 0.1, 1.0, 5.0, 40.0):
            q, k = (spread * rng.standard_normal(shape) for shape in ((4, 3), (9, 3)))
            q, k = (a.astype(np.float32).astype(np.float64) for a in (q, k))
            kept, scale = rng.random(9) < 0.5, -0.7
            kept[0] = True
            seen = np.array([9, 5, 1, 0])
            rows = recomputed(q, k, scale, kept, seen)
            for j in range(4):
                dots = [
                    sum((flint.arb(a) * b for a, b in zip(q[j].tolist(), ki, strict=True)))
                    for ki in k[: seen[j]].tolist()
                ]
                exact = [(flint.arb(scale) * dot).exp() for dot in dots]
                total = sum(exact, flint.arb(0))
                if seen[j] == 0:
                    assert rows.tail_low[j] == rows.tail_high[j] == 0
                    continue
                for inside, low, high in (
                    (~kept, rows.tail_low[j], rows.tail_high[j]),
                    (kept, rows.kept_low[j], rows.kept_high[j]),
                ):
                    parts = [e for e, use in zip(exact, inside, strict=False) if use]
                    if len(parts) in (0, len(exact)):
                        assert low == high == bool(parts)
                        continue
                    mass = sum(parts, flint.arb(0)) / total
                    assert flint.arb(float(low)) <= mass
                    assert high == 1 or mass <= flint.arb(float(high))
                    if low > 0 and spread < 5:
                        assert high <= low * (1 + 1e-9)
    finally:
        flint.ctx.prec = before


def test_masses_near_one_are_told_apart() -> None:
    """1 - 1e-14 and 1 - 2e-14: their float64 are 90 steps apart, the kept masses a factor 2."""
    gap = math.log(1e14)
    q, k = np.array([[1.0]]), np.array([[0.0], [gap]])
    rows = recomputed(q, k, 1.0, np.array([True, False]), np.array([2]))
    assert rows.lose_at_most(np.array([1 - 0.99e-14]))
    assert not rows.lose_at_most(np.array([1 - 1.02e-14]))
    assert rows.lose_at_least(np.array([1 - 1.02e-14]))
    assert rows.refute(np.array([0.0]), np.array([1 - 1.02e-14]))
    assert rows.refute(np.array([1 - 0.98e-14]), np.array([1.0]))
    assert not rows.refute(np.array([0.0]), np.array([1.0]))


def test_the_arithmetic_imports_nothing_of_the_package() -> None:
    tree = ast.parse(Path(recompute.__file__).read_text())
    imported = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert imported <= {
        "__future__",
        "math",
        "collections.abc",
        "dataclasses",
        "numpy",
        "numpy.typing",
    }
