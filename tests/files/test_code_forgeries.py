"""Forged codes, of what prune writes, judged by the audit alone: no other verifier has a say here.

Every kv head is looked at in pieces, of which the last is not whole, and has keys without a code.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
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
"""For a layer and a kv head, how its codes are changed."""

HEADS, N, M = 2, 37, 5
MOST = np.finfo(np.float32).max
# Bits of keys and values, and entries: where there are missing ones, and where keys may be turned.
KINDS = {"12 and 4": (12, 4, 18), "16 and 8": (16, 8, 16)}
BARE = (20, 36)  # of kv head 0 and of kv head 1


@cache
def drawn(d: int) -> Arrays:
    """Draw the cache of vectors of d entries."""
    rng, arrays = np.random.default_rng(5), {}
    for i in range(2):
        for role, rows in (("key", (HEADS, N)), ("value", (HEADS, N)), ("query", (2 * HEADS, M))):
            array = 1.5 * rng.standard_normal((*rows, d))
            if role == "key":
                if i == 1:  # one large entry each, which turning spreads
                    place = rng.integers(d, size=(HEADS, N))
                    array[np.arange(HEADS)[:, None], np.arange(N), place] *= 15
                array[range(HEADS), BARE] *= 1e4
            arrays[f"layers.{i}.{role}"] = array.astype(np.float32)
    return arrays


@pytest.fixture(scope="module", params=KINDS)
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coded")
    key_bits, value_bits, d = KINDS[request.param]
    source = folder / "in" / "x.safetensors"
    source.parent.mkdir()
    tensors = {name: tensor(array, "F32") for name, array in drawn(d).items()}
    source.write_bytes(safetensors_bytes(tensors, {}))
    options: dict[str, Any] = {"key_bits": key_bits, "value_bits": value_bits, "jobs": 1}
    prune(source, folder / "out", 0.1, proof="full", rest="codes", **options)
    return folder


@pytest.fixture
def coded(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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


def in_codes(layer: int, head: int, *names: str) -> set[str]:
    return {f"layers.{layer}.{name} kv head {head}" for name in names}


# ------------------------------------------------------------------------- bytes, by docs/files.md


def byte_of_key(arrays: Arrays, layer: int, head: int, at: tuple[int, int]) -> Any:
    """Return the place of the byte of a key's entry among `key_codes`."""
    key, entry = at
    return head, key // 16, entry // 4 * 64 + key % 16 * 4 + entry % 4


def byte_of_value(arrays: Arrays, layer: int, head: int, at: tuple[int, int]) -> Any:
    """Return the place of the byte that has a value's entry, among `value_codes`."""
    value, entry = at
    block = arrays[f"layers.{layer}.value_codes"].shape[2]
    width = -(-arrays[f"layers.{layer}.value_mean"].shape[1] // 16) * 16
    line = value % 16 % (block // width)
    return head, value // 16, line // 4 * 4 * width + entry * 4 + line % 4


def is_high(arrays: Arrays, layer: int, value: int) -> bool | None:
    """Return True if a value has the high half of its byte; None if it has all of it."""
    block = arrays[f"layers.{layer}.value_codes"].shape[2]
    width = -(-arrays[f"layers.{layer}.value_mean"].shape[1] // 16) * 16
    return None if block == 16 * width else value % 16 >= 8


def byte_of_low(arrays: Arrays, layer: int, head: int, at: tuple[int, int]) -> Any:
    """Return the place of the byte that has a key's entry, among `key_low`."""
    return head, at[0], at[1] % arrays[f"layers.{layer}.key_low"].shape[2]


def low_is_high(arrays: Arrays, layer: int, entry: int) -> bool | None:
    """Return True if an entry has the high half of its byte; None if it has all of it."""
    row, d = (arrays[f"layers.{layer}.key_{each}"].shape[-1] for each in ("low", "mean"))
    return None if row >= d else entry >= row


def at_key(key: int, entry: int, change: Callable[[int], int]) -> Change:
    """Change a byte of the codes of keys; a negative entry is counted from the last place."""

    def of(layer: int, head: int) -> Edit:
        def edit(arrays: Arrays) -> None:
            places = arrays[f"layers.{layer}.key_codes"].shape[2] // 16
            place = byte_of_key(arrays, layer, head, (key, entry % places))
            put(f"{layer}.key_codes", place, change)(arrays)

        return edit

    return of


def at_value(value: int, entry: int, bits: int) -> Change:
    """Change these bits of four of a value's code, of eight the upper ones."""

    def of(layer: int, head: int) -> Edit:
        def edit(arrays: Arrays) -> None:
            width = -(-arrays[f"layers.{layer}.value_mean"].shape[1] // 16) * 16
            place = byte_of_value(arrays, layer, head, (value, entry % width))
            shift = 0 if is_high(arrays, layer, value) is False else 4
            put(f"{layer}.value_codes", place, lambda byte: byte ^ (bits << shift))(arrays)

        return edit

    return of


def at_low(key: int, entry: int, number: Callable[[int, int], int]) -> Change:
    """Change a number of the low plane, given it and the bits of one."""

    def of(layer: int, head: int) -> Edit:
        def edit(arrays: Arrays) -> None:
            width = -(-arrays[f"layers.{layer}.key_mean"].shape[1] // 16) * 16
            at = key, entry % width
            place, high = byte_of_low(arrays, layer, head, at), low_is_high(arrays, layer, at[1])
            byte = int(arrays[f"layers.{layer}.key_low"][place])
            if high is None:
                byte = number(byte - 128, 8) + 128
            else:
                halves = [byte & 15, byte >> 4]
                halves[high] = number(halves[high] - 8, 4) + 8
                byte = halves[0] | halves[1] << 4
            put(f"{layer}.key_low", place, byte)(arrays)

        return edit

    return of


# ---------------------------------------------------------------------------------------- forgeries


def times(name: str, place: int | slice, factor: float) -> Change:
    return lambda layer, head: put(f"{layer}.{name}", (head, place), lambda x: x * factor)


def to(name: str, place: Any, value: Any) -> Change:
    return lambda layer, head: put(f"{layer}.{name}", (head, place), value)


def both(*changes: Change) -> Change:
    def of(layer: int, head: int) -> Edit:
        def edit(arrays: Arrays) -> None:
            for change in changes:
                change(layer, head)(arrays)

        return edit

    return of


def at_bare(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Change:
    """Change the row of the only key of a kv head without a code, or of the value beside it."""
    return lambda layer, head: put(f"{layer}.{name}", (head, -1), change)


def another_without(layer: int, head: int) -> Edit:
    """Leave out the code of key 5 and have its row, and say nothing of what that changes."""

    def edit(arrays: Arrays) -> None:
        d = arrays[f"layers.{layer}.key_mean"].shape[1]
        put(f"{layer}.key_scales", (head, 5), 0)(arrays)
        for entry in range(d):
            at_key(5, entry, lambda _: 128)(layer, head)(arrays)
            at_low(5, entry, lambda *_: 0)(layer, head)(arrays)
        for role in ("key", "value"):
            name, rows = f"layers.{layer}.{role}_bare", drawn(d)[f"layers.{layer}.{role}"]
            arrays[name] = np.insert(arrays[name], head, rows[head, 5], axis=0)

    return edit


def exchanged(name: str) -> Change:
    """Give each kv head what is said of the other."""
    return lambda layer, _: new(f"{layer}.{name}", lambda array: array[::-1])


def of_plane(role: str) -> dict[str, tuple[Change, tuple[str, ...]]]:
    """Return what makes one tensor of a plane false, for keys or for values."""
    bounds, gram = f"{role}_bounds", f"{role}_gram"
    return {
        f"{role}: the largest error is less": (times(bounds, 1, 0.9999), (bounds,)),
        f"{role}: the longest is less": (times(bounds, 2, 0.9999), (bounds,)),
        f"{role}: the largest entry is less": (times(bounds, 4, 1 - 2.0**-52), (bounds,)),
        f"{role}: nothing was lost by rounding": (times(bounds, 0, 0.0), (gram,)),
        f"{role}: squares of errors are less": (times(gram, slice(None), 0.9), (gram,)),
        f"{role}: the last square is less": (times(gram, -1, 0.9), (gram,)),
        f"{role}: the first radius is less": (
            to(f"{role}_radii", 0, lambda bits: bits - 2),
            (f"{role}_radii",),
        ),
        f"{role}: the last radius is less": (
            to(f"{role}_radii", 35, lambda bits: bits - 2),
            (f"{role}_radii",),
        ),
        f"{role}: a matrix that is not of squares": (
            both(to(bounds, 0, 1e9), to(gram, 1, lambda x: x + 1e6)),
            (gram,),
        ),
    }


WIDE_LOW = both(to("key_low_bounds", 0, 1e9), to("key_low_bounds", 1, 1e9))
# How codes are changed, and which tensors are not true then.
FORGED: dict[str, tuple[Change, tuple[str, ...]]] = {
    **of_plane("key"),
    **of_plane("value"),
    "a byte of no key": (at_key(37, 0, lambda x: x + 1), ("key_codes",)),
    "the last byte of no key": (at_key(47, -1, lambda x: x - 1), ("key_codes",)),
    "a half of no value": (at_value(37, 0, 1), ("value_codes",)),
    "a low half of no value": (at_value(39, 3, 8), ("value_codes",)),
    "a high half of no value": (at_value(41, 3, 8), ("value_codes",)),
    "the last half of no value": (at_value(47, -1, 1), ("value_codes",)),
    "the low plane of both bounds": (times("key_low_bounds", 1, 0.9999), ("key_low_bounds",)),
    "the low plane lost nothing by rounding": (times("key_low_bounds", 0, 0.0), ("key_low_gram",)),
    "squares of the low plane are less": (
        times("key_low_gram", slice(None), 0.9),
        ("key_low_gram",),
    ),
    "the last square of the low plane is less": (times("key_low_gram", -1, 0.9), ("key_low_gram",)),
    "a number beyond the low plane": (
        both(WIDE_LOW, at_low(5, 2, lambda _, bits: -(1 << (bits - 1)))),
        ("key_low",),
    ),
    "the last number beyond the low plane": (
        both(WIDE_LOW, at_low(35, 15, lambda _, bits: -(1 << (bits - 1)))),
        ("key_low",),
    ),
    "values are more": (times("value_spread", slice(None), 0.9), ("value_spread",)),
    "the last entry of values is more": (times("value_spread", -1, 0.9), ("value_spread",)),
    "the matrix of values is not of squares": (
        both(to("value_spread_bounds", 0, 1e9), to("value_spread", 1, lambda x: x + 1e4)),
        ("value_spread",),
    ),
    "another row of a key": (at_bare("key_bare", lambda x: -x), ("key_bare",)),
    "another row of a value": (
        at_bare("value_bare", lambda x: np.nextafter(x, np.float32(9))),
        ("value_bare",),
    ),
    "a key without a code, and no less of errors": (another_without, ("key_gram", "key_low_gram")),
    # What is moved is no number then, and no bound of anything.
    "a mean of keys is as far as can be": (
        lambda layer, head: put(
            f"{layer}.key_mean", head, lambda x: np.where(np.arange(len(x)) % 2, 1, -1) * MOST
        ),
        (*("key_bounds", "key_radii", "key_gram", "key_low_bounds", "key_low_gram"),),
    ),
}
OF_KEYS = ("key_bounds", "key_radii", "key_gram", "key_low_bounds", "key_low_gram")
OF_VALUES = ("value_bounds", "value_radii", "value_gram", "value_spread")
# What may make more than one tensor false, of which one is enough.
FALSE: dict[str, tuple[Change, tuple[str, ...]]] = {
    "the first code is another": (at_key(0, 0, lambda byte: byte ^ 64), OF_KEYS),
    "the last code is another": (at_key(35, 15, lambda byte: byte ^ 64), OF_KEYS),
    "the first value is another": (at_value(0, 0, 4), OF_VALUES),
    "a value in the other half is another": (at_value(8, 1, 4), OF_VALUES),
    "the last value is another": (at_value(36, 15, 4), OF_VALUES),
    "a low code is another": (at_low(0, 0, lambda x, _: 7 if x < 0 else -7), OF_KEYS),
    "the last low code is another": (
        at_low(35, 15, lambda x, bits: (1 if x < 0 else -1) * ((1 << (bits - 1)) - 1)),
        OF_KEYS,
    ),
    "a scale is another": (to("key_scales", 35, lambda bits: bits + 9), OF_KEYS),
    "a scale of a value is another": (to("value_scales", -1, lambda bits: bits + 9), OF_VALUES),
    "a scale is huge": (to("key_scales", 0, lambda bits: bits + 0x3000), OF_KEYS),
    "a mean of keys is another": (times("key_mean", slice(None), 1.1), OF_KEYS),
    "a mean of values is another": (times("value_mean", slice(None), 1.1), OF_VALUES),
    "keys are turned, or not": (
        lambda layer, head: (
            lambda arrays: put(
                f"{layer}.key_bounds",
                (head, 5),
                lambda block: (
                    1
                    + (
                        arrays[f"layers.{layer}.key_mean"].shape[1]
                        & -arrays[f"layers.{layer}.key_mean"].shape[1]
                    )
                    - block
                ),
            )(arrays)
        ),
        OF_KEYS,
    ),
    **{
        f"{name} of the other head": (exchanged(name), OF_KEYS)
        for name in ("key_gram", "key_mean", "key_low_gram")
    },
    **{
        f"{name} of the other head": (exchanged(name), OF_VALUES)
        for name in ("value_gram", "value_mean", "value_spread")
    },
    "rows of the other head": (exchanged("key_bare"), ("key_bare",)),
    "values of the other head": (exchanged("value_bare"), ("value_bare",)),
}
# What bounds more than it need do.
TRUE: dict[str, Change] = {
    **{
        f"{name}[{place}] is more": times(name, place, 1.1)
        for name, places in {
            **{"key_bounds": (0, 1, 2, 4), "value_bounds": (0, 1, 2, 4)},
            **{"key_low_bounds": (0, 1), "value_spread_bounds": (0,)},
        }.items()
        for place in places
    },
    **{
        f"a radius of a {role} is more": to(f"{role}_radii", 0, lambda bits: bits + 1)
        for role in ("key", "value")
    },
    "every appended key gets a code": to("key_bounds", 6, np.inf),
    "next to none gets one": to("key_bounds", 6, 5e-324),
}
WHERE = [(0, 1), (1, 0)]


@pytest.mark.parametrize(("layer", "head"), WHERE)
@pytest.mark.parametrize("name", [*FORGED, *FALSE, *TRUE])
def test_false_codes_are_found(coded: Path, name: str, layer: int, head: int) -> None:
    """Of `FORGED`, these tensors and no others; of `FALSE`, one of this head at least."""
    change = TRUE[name] if name in TRUE else (FORGED | FALSE)[name][0]
    forge(coded / "out" / "x.safetensors", change(layer, head))
    found = found_in(coded)
    if name in FALSE:
        may = in_codes(layer, head, *FALSE[name][1])
        if "other head" in name:  # which may happen to bound this one
            may |= in_codes(layer, 1 - head, *FALSE[name][1])
        assert found
        assert found <= may
    else:
        assert found == in_codes(layer, head, *(FORGED[name][1] if name in FORGED else ()))


@pytest.mark.parametrize("head", [0, 1])
@pytest.mark.parametrize("entry", [0, 7])
def test_a_key_without_a_code_has_no_bytes(coded: Path, head: int, entry: int) -> None:
    output = coded / "out" / "x.safetensors"
    for name, change in {
        "key_codes": at_key(BARE[head], entry, lambda byte: byte + 1),
        "key_low": at_low(BARE[head], entry, lambda *_: 1),
    }.items():
        good = output.read_bytes()
        forge(output, change(1, head))
        assert found_in(coded) == in_codes(1, head, name)
        output.write_bytes(good)
        forge(output, to("key_radii", BARE[head], 0x7F80)(1, head))
        assert found_in(coded) == set()


def test_entries_that_are_missing_have_bytes_of_none(coded: Path) -> None:
    output = coded / "out" / "x.safetensors"
    d = read_output(output)["layers.0.key_mean"].shape[1]
    if d % 16 == 0:
        return
    good = output.read_bytes()
    for key, entry in ((0, d), (35, -1)):
        for name, change in {
            "key_codes": at_key(key, entry, lambda byte: byte + 1),
            "key_low": at_low(key, entry, lambda *_: -1),
            "value_codes": at_value(key, entry, 8),
        }.items():
            output.write_bytes(good)
            forge(output, change(0, 1))
            assert found_in(coded) == in_codes(0, 1, name)


def no_numbers(name: str, places: tuple[int, ...] = (0, 3)) -> list[tuple[str, Any, float]]:
    return [
        (name, (1, place), number) for place in places for number in (np.nan, np.inf, -np.inf, -1.0)
    ]


def no_squares(name: str) -> list[tuple[str, Any, float]]:
    return [
        *((name, (1, 1), number) for number in (np.nan, -np.inf)),
        (name, 1, np.finfo(float).max),
        *((name, (0, place), -1e-9) for place in (0, -1)),
    ]


# A tensor, a place in it, and a number that is of no codes, whatever the input was.
NONSENSE: list[tuple[str, Any, float]] = [
    *(
        (f"{role}_{name}", (1, 3), bits)
        for role in ("key", "value")
        for name in ("scales", "radii")
        for bits in (0x7F80, 0x7FC0, 0xBF80, 0xFF80)
    ),
    # Whoever reads bits takes it for a code of a key.
    ("key_scales", (0, BARE[0]), 0x8000),
    ("key_radii", (0, BARE[0]), 0x7FC0),
    *((f"{role}_mean", (1, 2), n) for role in ("key", "value") for n in (np.nan, np.inf)),
    *no_squares("key_gram"),
    *no_squares("value_gram"),
    *no_squares("key_low_gram"),
    *no_squares("value_spread"),
    *no_numbers("key_bounds", tuple(range(6))),
    *no_numbers("value_bounds", tuple(range(6))),
    *no_numbers("key_low_bounds", (0, 1, 2)),
    *no_numbers("value_spread_bounds", (0, 1)),
    *(("key_bounds", (1, 6), number) for number in (np.nan, 0.0, -0.0, -1.0, -np.inf)),
    *((f"{role}_bounds", (1, 3), number) for role in ("key", "value") for number in (0.5, 1e15)),
    *(("key_low_bounds", (1, 2), number) for number in (0.5, 1e15)),
    *(("value_spread_bounds", (1, 1), number) for number in (0.5, 1e15)),
    *((f"{role}_bounds", (0, 4), 1e39) for role in ("key", "value")),
    *((f"{role}_bounds", (0, 5), block) for role in ("key", "value") for block in (0.0, 3.0, 32.0)),
    *(("value_bounds", (0, 5), block) for block in (2.0, 16.0)),
    ("value_scales", (1, 36), 0),
]


@pytest.mark.parametrize(("name", "place", "number"), NONSENSE)
def test_numbers_of_no_codes_are_found_without_the_input(
    coded: Path, name: str, place: Any, number: float
) -> None:
    output = coded / "out" / "x.safetensors"
    forge(output, put(f"1.{name}", place, number))
    [found] = audit([output], threads=1).outputs
    assert [finding.where for finding in found.findings] == [f"layers.1.{name}"]


def test_another_number_of_keys_without_a_code_is_found_without_the_input(coded: Path) -> None:
    output = coded / "out" / "x.safetensors"
    good = output.read_bytes()

    def fewer(arrays: Arrays) -> None:
        for role in ("key", "value"):
            arrays[f"layers.0.{role}_bare"] = arrays[f"layers.0.{role}_bare"][:1]

    for edit in (fewer, put("0.key_scales", (0, 5), 0), put("0.key_scales", (1, BARE[1]), 5)):
        output.write_bytes(good)
        forge(output, edit)
        [finding] = audit([output], threads=1).outputs[0].findings
        assert finding.where == "layers.0.key_bare"
        assert "keys have no code" in finding.what
    output.write_bytes(good)
    forge(output, new("0.value_bare", lambda rows: rows[:1]))
    [finding] = audit([output], threads=1).outputs[0].findings
    assert finding.where == "layers.0.value_bare"
    assert "must be F32" in finding.what


def test_what_is_not_known_without_the_input_or_by_a_sample(coded: Path) -> None:
    source, output = (coded / each / "x.safetensors" for each in ("in", "out"))
    what = "whether the codes are true of all keys and values"
    [alone] = audit([output]).outputs
    assert what in alone.unchecked
    assert alone.holds
    [found] = audit([output], [source]).outputs
    assert found.holds
    assert found.unchecked == ()
    forge(output, times("key_gram", slice(None), 0.9)(0, 0))
    [sampled] = audit([output], [source], sample=3).outputs
    assert not sampled.findings
    assert not sampled.holds
    assert sampled.unchecked == (what,)


@pytest.mark.parametrize("role", ["key", "value"])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [7, BARE[0]])
def test_a_number_of_the_input_that_is_not_finite_is_found(
    coded: Path, role: str, number: float, place: int
) -> None:
    source, output = (coded / each / "x.safetensors" for each in ("in", "out"))
    forge_input(source, output, put(f"1.{role}", (0, place, 3), number))
    [found] = audit([output], [source], threads=1).outputs
    said = {str(finding) for finding in found.findings}
    assert f"input layers.1.{role}: kv head 0: holds a number that is not finite" in said
    assert any(each.startswith(f"layers.1.{role}_bounds: kv head 0:") for each in said)


# ------------------------------------------------------------------------------- what codes say


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(float)[:, None]


def single(rows: np.ndarray) -> np.ndarray:
    return rows.astype(np.float32).astype(float)


def vectors_of(arrays: Arrays, keys: np.ndarray, values: np.ndarray, head: int) -> Arrays:
    """Return all that the matrices of layer 0 are of, by their tensors and by docs/files.md."""
    said = {name.removeprefix("layers.0."): array for name, array in arrays.items()}
    d = keys.shape[1]
    of_keys, of_values, low = np.zeros((3, N, d))
    for place in np.ndindex(N, d):
        of_keys[place] = said["key_codes"][byte_of_key(arrays, 0, head, place)]
        byte = int(said["value_codes"][byte_of_value(arrays, 0, head, place)])
        half = is_high(arrays, 0, place[0])
        of_values[place] = byte if half is None else 16 * (byte >> 4 if half else byte & 15)
        byte = int(said["key_low"][byte_of_low(arrays, 0, head, place)])
        half = low_is_high(arrays, 0, place[1])
        low[place] = byte - 128 if half is None else (byte >> 4 if half else byte & 15) - 8
    bits = 8 if low_is_high(arrays, 0, 0) is None else 4
    scales, of_value = (widened(said[f"{role}_scales"][head]) for role in ("key", "value"))
    moved = turned(keys - said["key_mean"][head], int(said["key_bounds"][head, 5])).astype(float)
    errors = single(moved - scales * (of_keys - 128)) * (scales > 0)
    step = (scales.astype(np.float32) / np.float32((1 << bits) - 1)).astype(float)
    decoded = of_value * (of_values - 128)
    moved = (values - said["value_mean"][head]).astype(float)
    return {
        "key_gram": errors,
        "key_low_gram": single(errors - step * low),
        "value_gram": single(moved - decoded),
        "value_spread": decoded,
    }


def turned(rows: np.ndarray, block: int) -> np.ndarray:
    """Turn vectors by blocks, one pair of entries after the other."""
    rows, d = rows.copy(), rows.shape[1]
    for j in range(d if block > 1 else 0):
        bits = (j + 1) * 0x9E3779B97F4A7C15 % 2**64
        if (bits ^ bits >> 29) * 0xBF58476D1CE4E5B9 % 2**64 >> 63:
            rows[:, j] *= -1
    half = 1
    while half < block:
        for j in range(d):
            if j // half % 2 == 0:
                low, high = rows[:, j].copy(), rows[:, j + half].copy()
                rows[:, j], rows[:, j + half] = low + high, low - high
        half *= 2
    return rows


BESIDE = {
    **{"key_gram": "key_bounds", "key_low_gram": "key_low_bounds", "value_gram": "value_bounds"},
    "value_spread": "value_spread_bounds",
}


@pytest.mark.parametrize("head", [0, 1])
@pytest.mark.parametrize("name", BESIDE)
def test_a_matrix_without_allowance_is_the_sum_of_all_squares(
    coded: Path, name: str, head: int
) -> None:
    """And nothing less, by as little as roundings of float64 can be told from."""
    output = coded / "out" / "x.safetensors"
    given = read_output(coded / "in" / "x.safetensors")
    keys, values = (given[f"layers.0.{role}"][head] for role in ("key", "value"))
    rows = vectors_of(read_output(output), keys, values, head)[name]
    sums = (rows.T @ rows)[np.triu_indices(rows.shape[1])]
    forge(output, to(BESIDE[name], 0, 0.0)(0, head))
    for factor, wrong in ((1.0, ()), (1 - 1e-10, (name,)), (0.999, (name,)), (1.0, ())):
        forge(output, put(f"0.{name}", head, factor * sums))
        assert found_in(coded) == in_codes(0, head, *wrong), factor


@pytest.mark.parametrize("name", ["key_gram", "key_low_gram"])
def test_what_a_key_is_off_by_is_rounded_to_float32(coded: Path, name: str) -> None:
    """Of codes that are far off, which nobody would write, so that there is something to round."""
    output = coded / "out" / "x.safetensors"
    given = read_output(coded / "in" / "x.safetensors")
    keys, values = (given[f"layers.0.{role}"][0] for role in ("key", "value"))
    low = name == "key_low_gram"
    far = at_low if low else at_key
    for entry in range(keys.shape[1]):
        change = far(0, entry, lambda x, _=8: (7 if x < 0 else -7) if low else x ^ 64)
        forge(output, change(0, 0))
    rows = vectors_of(read_output(output), keys, values, 0)[name]
    forge(output, put(f"0.{name}", 0, (rows.T @ rows)[np.triu_indices(rows.shape[1])]))
    forge(output, to(BESIDE[name], 0, 0.0)(0, 0))
    assert in_codes(0, 0, name).isdisjoint(found_in(coded))


def test_keys_of_both_kinds_are_tried(finished: Path) -> None:
    """Turned and not, with and without a code, in more than one piece."""
    arrays = read_output(finished / "out" / "x.safetensors")
    d = arrays["layers.0.key_mean"].shape[1]
    blocks = [arrays[f"layers.{layer}.key_bounds"][:, 5] for layer in range(2)]
    assert {*np.concatenate(blocks)} == {1, d & -d}
    for layer in range(2):
        bare = np.argwhere(arrays[f"layers.{layer}.key_scales"] == 0)
        assert bare.tolist() == [[0, BARE[0]], [1, BARE[1]]]


def extreme(kind: str, rng: np.random.Generator, shape: tuple[int, int, int]) -> np.ndarray:
    """Draw keys or values of a kind."""
    rows = rng.standard_normal(shape)
    if kind == "constant":
        rows[:] = rows[:, :1]
    elif kind == "zero":
        rows *= 0
    elif kind == "offset":
        rows = 0.01 * rows + 1e3 * rng.standard_normal((shape[0], 1, shape[2]))
    elif kind == "huge":
        rows[:, rng.integers(shape[1])] *= 1e4
    elif kind == "tiny":
        rows *= 1e-7
    elif kind == "mixed":
        rows *= 10.0 ** rng.integers(-3, 4, (*shape[:2], 1))
    elif kind == "whole":
        rows = np.round(40 * rows)
    return rows


@pytest.mark.parametrize(
    "kind", ["plain", "constant", "zero", "offset", "huge", "tiny", "mixed", "whole"]
)
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_what_prune_writes_is_always_confirmed(tmp_path: Path, kind: str, dtype: str) -> None:
    rng, number = np.random.default_rng(1), 0
    for n in (1, 17, 40):
        for d in (1, 3, 20, 64):
            tensors = {
                "layers.0.key": tensor(extreme(kind, rng, (2, n, d)), dtype),
                "layers.0.value": tensor(extreme(kind, rng, (2, n, d)), dtype),
                "layers.0.query": tensor(rng.standard_normal((4, 3, d)), dtype),
            }
            check_confirmed(tmp_path / str(number), tensors, number)
            number += 1


@pytest.mark.parametrize("size", [3e38, 1e-40])
@pytest.mark.parametrize("n", [2, 17, 300])
def test_keys_of_which_none_has_a_code_or_all_are_next_to_nothing(
    tmp_path: Path, size: float, n: int
) -> None:
    rng = np.random.default_rng(2)
    tensors = {
        "layers.0.key": tensor(size * np.sign(rng.standard_normal((2, n, 5))), "F32"),
        "layers.0.value": tensor(rng.standard_normal((2, n, 5)), "F32"),
        "layers.0.query": tensor(1e-30 * rng.standard_normal((4, 3, 5)), "F32"),
    }
    for number in range(6):
        arrays = check_confirmed(tmp_path / str(number), tensors, number)
        assert len(arrays["layers.0.key_bare"]) == (2 * n if size > 1 else 0)


def check_confirmed(folder: Path, tensors: Any, number: int) -> Arrays:
    """Prune with some bits of codes, of which all have their turn; return the output."""
    source = folder / "x.safetensors"
    folder.mkdir()
    source.write_bytes(safetensors_bytes(tensors, {}))
    bits: dict[str, Any] = {"key_bits": (8, 12, 16)[number % 3], "value_bits": (8, 4)[number % 2]}
    prune(source, folder / "out", 0.1, rest="codes", layout="hnd", jobs=1, **bits)
    output = folder / "out" / "x.safetensors"
    [found] = audit([output], [source], layout="hnd", threads=1).outputs
    assert found.holds, (bits, list(map(str, found.findings)))
    return read_output(output)
