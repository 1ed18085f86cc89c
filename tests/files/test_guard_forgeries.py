"""Forged guards, of what prune writes, judged by the audit alone: no other verifier has a say here.

Keys of layer 0 are not turned, those of layer 1 are, and every kv head is looked at in pieces.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from certk_rs import prune
from certk_rs.audit import audit
from cli_fixtures import Arrays, forge, forge_input, read_output, safetensors_bytes, tensor
from forgeries import new, put

Edit = Callable[[Arrays], None]
Change = Callable[[int, int], Edit]
"""For a layer and a kv head, how its guard is changed."""

HEADS, N, D, M = 2, 70, 16, 5
MOST = np.finfo(np.float32).max
OFFSET = 40  # keys behind 44, more than a piece, are seen by no query, and guarded all the same


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guarded")
    rng, tensors = np.random.default_rng(5), {}
    for i in range(2):
        for role, rows in (("key", (HEADS, N)), ("value", (HEADS, N)), ("query", (2 * HEADS, M))):
            array = 1.5 * rng.standard_normal((*rows, D))
            if role == "key" and i == 1:  # one large entry each, which turning spreads
                place = rng.integers(D, size=(HEADS, N))
                array[np.arange(HEADS)[:, None], np.arange(N), place] *= 15
            tensors[f"layers.{i}.{role}"] = tensor(array, "F32")
    source = folder / "in" / "x.safetensors"
    source.parent.mkdir()
    source.write_bytes(safetensors_bytes(tensors, {"causal_offset": str(OFFSET)}))
    prune(source, folder / "out", 0.1, proof="full", rest="file", jobs=1)
    return folder


@pytest.fixture
def guarded(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh copy; rows are read sixteen at a time."""
    monkeypatch.setattr("certk_rs._audit.truth._ROWS", 16)
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path


def found_in(folder: Path) -> set[str]:
    """Of every finding the tensor and the kv head."""
    source, output = (folder / each / "x.safetensors" for each in ("in", "out"))
    [found] = audit([output], [source], threads=1).outputs
    assert (found.confirmed_rows, found.confirmed_lower_bounds) == (found.rows, found.lower_bounds)
    return {f"{each.where} {each.what.partition(':')[0]}" for each in found.findings}


def in_guards(layer: int, head: int, *names: str) -> set[str]:
    return {f"layers.{layer}.guard_{name} kv head {head}" for name in names}


def of_head(arrays: Arrays, layer: int, head: int, what: str) -> slice:
    """Return the place of the scales, or of the codes (whole groups of 16 keys), of a kv head."""
    counts = N - np.diff(arrays[f"layers.{layer}.indptr"])
    sizes = counts if what == "scales" else -(-counts // 16) * 16 * D
    ends = np.cumsum([0, *sizes])
    return slice(int(ends[head]), int(ends[head + 1]))


def at_key(role: str, which: int, change: Callable[[np.ndarray], np.ndarray]) -> Change:
    """Change the scale or the radius of the first (0) or the last (-1) dropped key of a head."""

    def of(layer: int, head: int) -> Edit:
        def edit(arrays: Arrays) -> None:
            place = range(HEADS * N)[of_head(arrays, layer, head, "scales")][which]
            put(f"{layer}.guard_{role}", place, change)(arrays)

        return edit

    return of


def at_code(byte: Callable[[int], int], change: Callable[[np.ndarray], np.ndarray]) -> Change:
    """Change a byte of a head's codes; `byte` finds it from the number of dropped keys."""

    def of(layer: int, head: int) -> Edit:
        def edit(arrays: Arrays) -> None:
            count = len(range(HEADS * N)[of_head(arrays, layer, head, "scales")])
            start = of_head(arrays, layer, head, "codes").start
            put(f"{layer}.guard_codes", start + byte(count), change)(arrays)

        return edit

    return of


def byte_of(key: int, entry: int) -> int:
    """Return the place of an entry's byte among the codes of a head."""
    return key // 16 * 16 * D + entry // 4 * 64 + key % 16 * 4 + entry % 4


def times(role: str, place: int | slice, factor: float) -> Change:
    def of(layer: int, head: int) -> Edit:
        return put(f"{layer}.guard_{role}", (head, place), lambda x: x * factor)

    return of


def without_first_key(layer: int, head: int) -> Edit:
    """Leave out the code of a key, its bytes too, and say nothing of what that changes."""

    def edit(arrays: Arrays) -> None:
        at_key("scales", 0, lambda bits: bits * 0)(layer, head)(arrays)
        codes = arrays[f"layers.{layer}.guard_codes"].copy()
        start = of_head(arrays, layer, head, "codes").start
        codes[[start + byte_of(0, entry) for entry in range(D)]] = 128
        arrays[f"layers.{layer}.guard_codes"] = codes

    return edit


def no_squares(layer: int, head: int) -> Edit:
    def edit(arrays: Arrays) -> None:
        put(f"{layer}.guard_bounds", (head, 0), 1e9)(arrays)
        put(f"{layer}.guard_gram", (head, 1), lambda x: x + 1)(arrays)

    return edit


def exchanged(role: str) -> Change:
    """Give each kv head what is said of the other."""
    return lambda layer, _: new(f"{layer}.guard_{role}", lambda array: array[::-1])


# How a guard is changed, and which of its tensors do not bound what they should then.
FORGED: dict[str, tuple[Change, tuple[str, ...]]] = {
    "the largest error is less": (times("bounds", 1, 0.9999), ("bounds",)),
    "the longest key is less": (times("bounds", 2, 0.9999), ("bounds",)),
    "the largest entry is less": (times("bounds", 4, 1 - 2.0**-52), ("bounds",)),
    "nothing was lost by rounding": (times("bounds", 0, 0.0), ("gram",)),
    "squares of errors are less": (times("gram", slice(None), 0.9), ("gram",)),
    "the last square is less": (times("gram", -1, 0.9), ("gram",)),
    "a ball is smaller": (times("ball", -1, 1 - 1e-12), ("ball",)),
    "a ball is elsewhere": (times("ball", slice(0, D), 10.0), ("ball",)),
    "the first radius is less": (at_key("radii", 0, lambda bits: bits - 2), ("radii",)),
    "the last radius is less": (at_key("radii", -1, lambda bits: bits - 2), ("radii",)),
    "a byte of no key": (at_code(lambda count: byte_of(count, 0), lambda x: x + 1), ("codes",)),
    "the last byte of no key": (
        at_code(lambda count: byte_of(-(-count // 16) * 16 - 1, D - 1), lambda x: x - 1),
        ("codes",),
    ),
    "bytes of a key without a scale": (
        at_key("scales", -1, lambda bits: bits * 0),
        ("codes", "gram"),
    ),
    "a key without a code": (without_first_key, ("gram",)),
    # Whatever else is lost: no vectors have such products.
    "a matrix that is not of squares": (no_squares, ("gram",)),
    # What is turned is no number then, and no bound of anything.
    "a mean is as far as can be": (
        lambda layer, head: put(
            f"{layer}.guard_mean", head, np.where(np.arange(D) % 2, 1, -1) * MOST
        ),
        ("bounds", "radii", "gram"),
    ),
}
# What makes more than one tensor false, of which one is enough.
FALSE: dict[str, Change] = {
    "the first code is another": at_code(lambda _: byte_of(0, 0), lambda byte: byte ^ 64),
    "the last code is another": at_code(
        lambda count: byte_of(count - 1, D - 1), lambda byte: byte ^ 64
    ),
    "the last scale is another": at_key("scales", -1, lambda bits: bits + 9),
    "the last scale is huge": at_key("scales", -1, lambda bits: bits | 0x4000),
    "a mean is another": times("mean", slice(None), 1.1),
    "keys are turned, or not": lambda layer, head: put(
        f"{layer}.guard_bounds", (head, 5), lambda block: 17 - block
    ),
    "matrices of the other head": exchanged("gram"),
    "means of the other head": exchanged("mean"),
    "balls of the other head": exchanged("ball"),
}
# What bounds more than it need do.
TRUE: dict[str, Change] = {
    "the largest error is more": times("bounds", 1, 1.1),
    "the longest key is more": times("bounds", 2, 1.1),
    "the largest entry is more": times("bounds", 4, 1.1),
    "more was lost by rounding": times("bounds", 0, 1.1),
    "a ball is larger": times("ball", -1, 1.1),
    "the first radius is more": at_key("radii", 0, lambda bits: bits + 1),
}
WHERE = [(layer, head) for layer in (0, 1) for head in (0, 1)]


@pytest.mark.parametrize(("layer", "head"), WHERE)
@pytest.mark.parametrize("name", [*FORGED, *FALSE, *TRUE])
def test_false_guards_are_found(guarded: Path, name: str, layer: int, head: int) -> None:
    """Of `FORGED`, these tensors and no others; of `FALSE`, one of this head at least."""
    change, wrong = FORGED.get(name) or (FALSE.get(name) or TRUE[name], ())
    forge(guarded / "out" / "x.safetensors", change(layer, head))
    found = found_in(guarded)
    if name in FALSE:
        every = ("bounds", "radii", "gram", "ball")
        may = in_guards(layer, head, *every)
        if "other head" in name:  # which may happen to bound this one
            may |= in_guards(layer, 1 - head, *every)
        assert found
        assert found <= may
    else:
        assert found == in_guards(layer, head, *wrong)


# A tensor of a guard, a place in it, and a number that is of no guard, whatever the input was.
NONSENSE: list[tuple[str, Any, float]] = [
    *(("scales", 3, bits) for bits in (0x7F80, 0x7FC0, 0xBF80)),
    *(("radii", -1, bits) for bits in (0x7F80, 0x7FC0, 0xBF80)),
    *(("mean", (1, 2), number) for number in (np.nan, np.inf)),
    *(("gram", (1, 1), number) for number in (np.nan, -np.inf)),
    ("gram", 1, np.finfo(float).max),
    *(("gram", (0, place), -1e-9) for place in (0, D, D * (D + 1) // 2 - 1)),
    *(("bounds", (1, place), number) for place in range(6) for number in (np.nan, np.inf, -1.0)),
    *(("bounds", (1, 3), number) for number in (0.5, 1e15)),
    ("bounds", (0, 4), 1e39),
    *(("bounds", (0, 5), number) for number in (0.0, 2.0, 32.0)),
    *(("ball", (1, 0), number) for number in (np.nan, np.inf)),
    *(("ball", (0, D), number) for number in (np.nan, np.inf, -1.0)),
]


@pytest.mark.parametrize(("role", "place", "number"), NONSENSE)
def test_numbers_of_no_guard_are_found_without_the_input(
    guarded: Path, role: str, place: Any, number: float
) -> None:
    output = guarded / "out" / "x.safetensors"
    forge(output, put(f"1.guard_{role}", place, number))
    [found] = audit([output], threads=1).outputs
    assert [finding.where for finding in found.findings] == [f"layers.1.guard_{role}"]


@pytest.mark.parametrize("more", [-64, 64])
def test_codes_of_another_number_of_keys_are_found_without_the_input(
    guarded: Path, more: int
) -> None:
    output = guarded / "out" / "x.safetensors"
    forge(output, new("1.guard_codes", lambda codes: np.resize(codes, len(codes) + more)))
    [found] = audit([output], threads=1).outputs
    [finding] = found.findings
    assert finding.where == "layers.1.guard_codes"
    assert "which are not those of the keys that are dropped" in finding.what


def errors_of(arrays: Arrays, keys: np.ndarray, head: int) -> np.ndarray:
    """Return the errors of the codes of the dropped keys of layer 0, by docs/files.md."""
    kept = arrays["layers.0.indices"][slice(*arrays["layers.0.indptr"][head : head + 2])]
    moved = np.delete(keys, kept, axis=0) - arrays["layers.0.guard_mean"][head]
    bits = arrays["layers.0.guard_scales"][of_head(arrays, 0, head, "scales")]
    scales = (bits.astype(np.uint32) << 16).view(np.float32).astype(float)
    codes = arrays["layers.0.guard_codes"][of_head(arrays, 0, head, "codes")]
    places = [[byte_of(key, entry) for entry in range(D)] for key in range(len(moved))]
    left = moved.astype(float) - scales[:, None] * (codes[places].astype(float) - 128)
    return left.astype(np.float32).astype(float)


@pytest.mark.parametrize("head", [0, 1])
def test_a_matrix_without_allowance_is_the_sum_of_all_squares(guarded: Path, head: int) -> None:
    """And nothing less, by as little as roundings of float64 can be told from."""
    output = guarded / "out" / "x.safetensors"
    keys = read_output(guarded / "in" / "x.safetensors")["layers.0.key"].reshape(HEADS, N, D)
    errors = errors_of(read_output(output), keys[head], head)
    sums = (errors.T @ errors)[np.triu_indices(D)]
    forge(output, times("bounds", 0, 0.0)(0, head))
    for factor, wrong in ((1.0, ()), (1 - 1e-10, ("gram",)), (0.999, ("gram",)), (1.0, ())):
        forge(output, put("0.guard_gram", head, factor * sums))
        assert found_in(guarded) == in_guards(0, head, *wrong), factor


def test_keys_of_both_kinds_are_tried(finished: Path) -> None:
    """Turned and not, more than one piece of each, and places for keys behind the last."""
    arrays = read_output(finished / "out" / "x.safetensors")
    for layer, block in ((0, 1.0), (1, float(D))):
        assert (arrays[f"layers.{layer}.guard_bounds"][:, 5] == block).all()
        counts = N - np.diff(arrays[f"layers.{layer}.indptr"])
        assert (counts > 16).all()
        assert (counts % 16 != 0).all()


@pytest.mark.parametrize("role", ["key", "value"])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("seen", [True, False])
def test_a_number_of_the_input_that_is_not_finite_is_found(
    guarded: Path, role: str, number: float, seen: bool
) -> None:
    """In a dropped row, of which the output holds nothing but its guard."""
    source, output = (guarded / each / "x.safetensors" for each in ("in", "out"))
    arrays = read_output(output)
    kept = arrays["layers.1.indices"][: arrays["layers.1.indptr"][1]]
    gone = [j for j in range(N) if j not in kept][0 if seen else -1]
    forge_input(source, output, put(f"1.{role}", (0, gone, 3), number))
    [found] = audit([output], [source], threads=1).outputs
    said = {str(finding) for finding in found.findings}
    assert f"input layers.1.{role}: kv head 0: holds a number that is not finite" in said
    guard = "bounds" if role == "key" else "ball"
    assert any(each.startswith(f"layers.1.guard_{guard}: kv head 0:") for each in said)
