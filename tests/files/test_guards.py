"""Guards in outputs: what prune writes of dropped rows, and whether audits can be fooled."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from certk_rs import prune
from certk_rs._audit.guards import GuardClaims, nonsense, untruths
from certk_rs._audit.matrices import Matrix, Rows
from certk_rs._audit.planes import ADDITIONS, Plane
from certk_rs._files.guards import guard_tensors, guarded_bytes, guarded_heads
from certk_rs._files.tensor_file import SafetensorsFile
from certk_rs._jobs.results import FileReport
from certk_rs.audit import audit
from certk_rs.guard import Guard, guard_head
from cli_fixtures import safetensors_bytes, tensor
from second_verifier import second_verdict

Tensors = dict[str, np.ndarray]


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def judged(tensors: Tensors, keys: np.ndarray, values: np.ndarray) -> Any:
    """Return the findings of an audit about the guard of one kv head."""
    count, d = keys.shape
    said = {name.removeprefix("guard_"): array for name, array in tensors.items()}
    matrix = Matrix("guard_gram", said["gram"], "guard_bounds", said["bounds"], ADDITIONS)
    plane = Plane("guard_", "key", *(said[name] for name in ("scales", "radii", "mean")), matrix)
    claims = GuardClaims([0, count], [0, len(said["codes"])], plane, said["ball"])
    found = nonsense(claims, d)
    if found is not None:
        return [found]
    pieces = [(keys[at : at + 100], values[at : at + 100]) for at in range(0, count, 100)]
    return untruths(claims, 0, said["codes"], pieces)


def drawn(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Keys of many kinds: few, equal, whole, of all sizes, zero, far from the origin."""
    count = int(rng.choice([0, 1, 2, 3, 15, 16, 17, 40, 130]))
    d = int(rng.choice([1, 2, 3, 4, 5, 8, 16, 20, 32, 48, 64]))
    keys = rng.standard_normal((count, d)) * 10.0 ** rng.integers(-25, 20)
    size = np.abs(keys).max(initial=1e-30)
    kind = int(rng.integers(6))
    if kind == 0:
        keys[:] = keys[:1]
    elif kind == 1:
        keys = np.round(keys / size * 127)
    elif kind == 2:
        keys *= np.exp(2 * rng.standard_normal((count, 1)))
    elif kind == 3:
        keys *= 0
    elif kind == 4:
        keys += 5 * size * rng.standard_normal(d)
    return keys.astype(np.float32), rng.standard_normal((count, d)).astype(np.float32)


def written(keys: np.ndarray, values: np.ndarray) -> Tensors:
    return guard_tensors([guard_head((keys, "float32"), (values, "float32"), 1)], keys.shape[1])


def test_what_prune_writes_is_always_confirmed() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        keys, values = drawn(rng)
        found = judged(written(keys, values), keys, values.astype(np.float64))
        assert not found, (keys.shape, found)


def errors_of(tensors: Tensors, keys: np.ndarray) -> np.ndarray:
    """Return the errors of codes that are not rotated, from their bytes."""
    count, d = keys.shape
    lines = tensors["guard_codes"].reshape(-1, -(-d // 4), 16, 4).swapaxes(1, 2)
    numbers = lines.reshape(-1, -(-d // 4) * 4)[:count, :d].astype(np.float64) - 128
    moved = (keys - tensors["guard_mean"][0]).astype(np.float64)
    return moved - widened(tensors["guard_scales"])[:, None] * numbers


def test_what_an_audit_confirms_bounds_every_direction() -> None:
    """Of forged matrices those that pass are true, and they are tried along their worst ways."""
    rng = np.random.default_rng(1)
    passed = refused = 0
    for _ in range(600):
        count, d = int(rng.choice([1, 2, 5, 30, 200])), int(rng.choice([1, 2, 3, 6]))
        keys = rng.standard_normal((count, d)).astype(np.float32)
        values = np.zeros((count, d))
        tensors = written(keys, values.astype(np.float32))
        if tensors["guard_bounds"][0, 5] != 1 or not tensors["guard_scales"].all():
            continue
        tensors = {name: array.copy() for name, array in tensors.items()}
        gram, bounds = tensors["guard_gram"], tensors["guard_bounds"]
        gram *= 1 + rng.choice([0, 1e-9, 1e-4, 0.01, 0.3]) * rng.standard_normal(gram.shape)
        bounds[0, 0] *= rng.choice([0, 0.1, 0.9, 1, 1 + 1e-6, 10.0])
        if judged(tensors, keys, values):
            refused += 1
            continue
        passed += 1
        matrix = np.zeros((d, d))
        matrix[np.triu_indices(d)] = gram[0]
        matrix += np.triu(matrix, 1).T
        errors = errors_of(tensors, keys).astype(np.float32).astype(np.float64)
        worst = np.linalg.eigh(errors.T @ errors - matrix)[1]
        ways = np.concatenate([worst.T, np.eye(d), rng.standard_normal((200, d))])
        real = np.square(ways @ errors.T).sum(axis=1)
        size = np.square(ways).sum(axis=1)
        form = np.einsum("id,de,ie->i", ways, matrix, ways) + 1e-12 * np.trace(matrix) * size
        most = np.sqrt(np.maximum(form, 0)) + np.sqrt(bounds[0, 0] * size)
        assert (np.sqrt(real) <= most * (1 + 1e-14)).all(), (count, d)
    assert passed > 100
    assert refused > 100


@pytest.mark.parametrize("name", ["qr", "eigh", "svd"])
def test_factors_need_not_be_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices that are too small by a thousandth, which wrong factors would make look large."""
    vectors = np.random.default_rng(4).standard_normal((50, 6))
    real, wrong = getattr(np.linalg, name), 0.999**0.5

    def rough(*args: Any, **options: Any) -> Any:
        found = real(*args, **options)
        if name == "qr":
            return found * wrong
        return (found[0] / wrong, *found[1:]) if name == "svd" else (found[0] / wrong**2, found[1])

    monkeypatch.setattr(np.linalg, name, rough)
    rows = Rows(6)
    rows.add(vectors)
    sums = (vectors.T @ vectors)[np.triu_indices(6)]
    for factor, holds in ((1, True), (0.999, False)):
        # With a little allowance, without which only the sums themselves would do.
        bounds = np.array([[1e-7, 0, 0, 1]])
        matrix = Matrix("gram", factor * sums[None], "bounds", bounds, ADDITIONS)
        assert matrix.bounds_all(0, rows) is holds


def ball_of(values: np.ndarray, centre: float, radius: float) -> tuple[Tensors, Any]:
    """Return a guard with this ball around its values, and what an audit finds."""
    tensors = written(np.ones_like(values), values)
    tensors["guard_ball"][0] = [*[centre] * values.shape[1], radius]
    return tensors, judged(tensors, np.ones_like(values), values.astype(np.float64))


def test_balls_that_audits_confirm_bound_outputs() -> None:
    """The radius that passes need not be the real one, to the last bits; outputs allow for that."""
    for seed in range(20):
        value = np.random.default_rng(seed).standard_normal((1, 128)).astype(np.float32)
        square = sum((Fraction(float(entry)) ** 2 for entry in value[0]), Fraction(0))
        low, high = (float(square) ** 0.5 * (1 + off) for off in (-1e-12, 1e-12))
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (middle, high) if ball_of(value, 0, middle)[1] else (low, middle)
        tensors, found = ball_of(value, 0, high)
        assert not found
        heads = guarded_heads(tensors, [1], 128)
        guard = Guard.of_heads((1, 1, 128), "float32", heads, [np.arange(1)])
        # All but nothing is lost, so that the output moves from the centre to the value.
        [[moved]] = guard.moved(np.zeros((1, 1, 128), np.float32), np.ones((1, 1)))
        assert Fraction(float(moved)) ** 2 >= square


def test_a_distance_whose_square_is_no_float64_is_one() -> None:
    value = np.zeros((1, 4), np.float32)
    for centre, radius, holds in ((1e-170, 0, False), (1e-170, 2.1e-170, True), (0, 0, True)):
        assert (not ball_of(value, centre, radius)[1]) is holds


def test_tensors_are_what_was_remembered() -> None:
    rng = np.random.default_rng(2)
    keys = rng.standard_normal((3, 200, 20)).astype(np.float32)
    keys[1, 7] *= 1e4  # which gets no code
    values = rng.standard_normal((3, 200, 20)).astype(np.float32)
    kept = [np.arange(90), np.arange(0, 200, 3) + 1, np.empty(0, np.int64)]
    kept[1] = np.setdiff1d(kept[1], 7)
    whole = Guard.build(keys, values, kept)
    gone = [np.setdiff1d(np.arange(200), each) for each in kept]
    heads = [
        guard_head((keys[h, each], "float32"), (values[h, each], "float32"), 1)
        for h, each in enumerate(gone)
    ]
    tensors = guard_tensors(heads, 20)
    assert (tensors["guard_scales"] == 0).sum() == 1
    back = guarded_heads(tensors, [len(each) for each in gone], 20)
    again = Guard.of_heads((3, 200, 20), "float32", back, gone)
    q = 3 * rng.standard_normal((6, 4, 20)).astype(np.float32)
    ends = np.zeros((6, 4)), np.zeros((6, 4)) + 1e-3
    one, two = (each.judge(q, ends, 0.02) for each in (whole, again))
    assert np.array_equal(one.lost, two.lost)
    assert np.array_equal(one.left, two.left)
    assert all(map(np.array_equal, one.back, two.back))
    out = rng.standard_normal((6, 4, 20)).astype(np.float32)
    assert np.array_equal(whole.moved(out, one.lost), again.moved(out, one.lost))


@pytest.mark.parametrize("name", ["codes", "scales", "radii"])
def test_tensors_of_other_keys_are_refused(name: str) -> None:
    keys = np.ones((20, 4), np.float32)
    tensors = written(keys, keys)
    tensors[f"guard_{name}"] = tensors[f"guard_{name}"][:-1]
    with pytest.raises(ValueError, match=f"guard_{name} has"):
        guarded_heads(tensors, [20], 4)


def cache_of(path: Path, dtype: str, layout: str, n: int = 300, d: int = 16) -> None:
    rng, tensors = np.random.default_rng(3), {}
    for i in range(2):
        for role, heads, rows in (("key", 2, n), ("value", 2, n), ("query", 4, 24)):
            array = 1.5 * rng.standard_normal((heads, rows, d))
            array = array.swapaxes(0, 1) if layout == "nhd" else array
            tensors[f"layers.{i}.{role}"] = tensor(array, dtype)
    path.write_bytes(safetensors_bytes(tensors, {"causal_offset": str(n - 40)}))


@pytest.mark.parametrize("granularity", ["head", "layer", "token"])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("layout", ["hnd", "nhd"])
def test_outputs_with_guards_hold(
    tmp_path: Path, granularity: str, dtype: str, layout: str
) -> None:
    source = tmp_path / "x.safetensors"
    cache_of(source, dtype, layout)
    options: dict[str, Any] = {"granularity": granularity, "layout": layout, "rest": "file"}
    [report] = prune(source, tmp_path / "out", 0.1, **options).outputs
    found = audit([Path(report.target)], [source])
    [output] = found.outputs
    assert found.holds, list(map(str, output.findings))
    assert output.unchecked == ()
    assert second_verdict(Path(report.target), source)[0] == 0
    with SafetensorsFile(report.target) as file:
        entries = file.header.entries
        guard = sum(e.stop - e.start for name, e in entries.items() if ".guard_" in name)
        dropped = entries["layers.0.guard_scales"].shape[0]
        kept = entries["layers.0.indices"].shape[0]
        # Keys that no query of the file sees are dropped, too.
        assert dropped == 600 - kept * (1 if granularity == "head" else 2)
    assert (report.rest, report.rest_bytes) == ("file", guard)


def test_what_is_not_known_without_the_input(tmp_path: Path) -> None:
    source = tmp_path / "x.safetensors"
    cache_of(source, "F32", "hnd")
    [report] = prune(source, tmp_path / "out", 0.1, rest="file").outputs
    [output] = audit([Path(report.target)], []).outputs
    assert "whether the guard bounds what was dropped" in output.unchecked
    assert not output.findings


def test_bytes_count_the_guard(tmp_path: Path) -> None:
    source = tmp_path / "x.safetensors"
    cache_of(source, "F32", "hnd", n=400, d=64)
    every = 2 * 2 * 2 * 400 * 64 * 4
    found: dict[str, FileReport] = {}
    for rest in ("drop", "file", "codes"):
        [report] = prune(source, tmp_path / rest, size_bytes=int(0.9 * every), rest=rest).outputs
        assert Path(report.target).stat().st_size <= 0.9 * every
        found[rest] = report
    counts = [found[rest].count.kept for rest in ("drop", "file", "codes")]
    assert counts == sorted(counts, reverse=True)
    assert found["file"].rest_bytes > 2 * guarded_bytes(100, 64)
    assert found["codes"].rest_bytes > found["file"].rest_bytes
