"""`KvIndex`: growth, files, copies and refusals; its bounds are tested in src/index/spread.rs."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import numpy as np
import pytest

import certk_rs as ck

Array = np.ndarray


def pair(n: int, dtype: type = np.float16, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((2, n, 20)).astype(np.float32)
    return keys, rng.standard_normal((2, n, 30)).astype(dtype)


def stored(index: ck.KvIndex) -> bytes:
    """Return the index of values as bytes."""
    file = io.BytesIO()
    index._values.write_to(file)
    return file.getvalue()


@pytest.mark.parametrize("bits", [8, 4])
def test_an_index_survives_files_copies_and_growth(tmp_path: Path, bits: int) -> None:
    keys, values = pair(70)
    index = ck.KvIndex.build(keys[:, :50], values[:, :50], value_bits=bits)
    one = copy.copy(index)
    index.append(keys[:, 50:], values[:, 50:])
    one.check(None, values[:, :50])
    index.save(tmp_path / "both")
    read = ck.KvIndex.load(tmp_path / "both", keys)
    for other in (index, read, pickle.loads(pickle.dumps(index))):
        other.check(None, values)
        assert stored(other) == stored(index)
        assert other.value_bits == bits
        codes = other.nbytes - ck.KeyIndex.build(keys).nbytes
        assert 0 <= codes - 2 * 80 * (32 * bits // 8 + 4) - 2 * 2 * 32 * 48 // 2 * 8 < 2560
        assert f"float16 values of 30 entries in {bits} bits" in repr(other)
    q = keys[:, :1]
    found, same = index.search(q, 0.05), ck.KeyIndex.search(read, q, 0.05)
    assert np.array_equal(found.indices, same.indices)
    changed = values.copy()
    changed[1, 69, 29] += 1
    with pytest.raises(ck.CertkError, match=r"^values\[1\].*changed"):
        index.check(None, changed)
    with pytest.raises(ck.CertkError, match=r"^values are needed"):
        index.check()


def test_a_file_of_another_kind_or_damaged_is_refused(tmp_path: Path) -> None:
    index = ck.KvIndex.build(*pair(40))
    both, keys, damaged = tmp_path / "both", tmp_path / "keys", tmp_path / "damaged"
    index.save(both)
    ck.KeyIndex.build(pair(40)[0]).save(keys)
    data = both.read_bytes()
    # The first part is a file of keys as ever.
    assert data.startswith(keys.read_bytes())
    with pytest.raises(ck.CertkError, match="more behind the index"):
        ck.KeyIndex.load(both)
    with pytest.raises(ck.CertkError, match="cut off"):
        ck.KvIndex.load(keys)
    damaged.write_bytes(data[len(keys.read_bytes()) :])
    with pytest.raises(ck.CertkError, match="it holds values, and an index of keys is read here"):
        ck.KeyIndex.load(damaged)
    damaged.write_bytes(keys.read_bytes() * 2)
    with pytest.raises(ck.CertkError, match="it holds keys, and an index of values is read here"):
        ck.KvIndex.load(damaged)
    damaged.write_bytes(keys.read_bytes() + stored(ck.KvIndex.build(*pair(41))))
    with pytest.raises(ck.CertkError, match="not of one index"):
        ck.KvIndex.load(damaged)
    for at in range(len(keys.read_bytes()), len(data), 997):
        damaged.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(ck.CertkError):
            ck.KvIndex.load(damaged)


@pytest.mark.parametrize("kept", [True, False])
def test_a_failed_append_changes_neither_part(kept: bool) -> None:
    keys, values = pair(50)
    index = ck.KvIndex.build(keys, values, keep_keys=kept)
    before = stored(index)
    more, beside = pair(3, seed=1)
    not_finite = beside.copy()
    not_finite[1, 2, 29] = np.nan
    wrong: list[tuple[Array, Array, str]] = [
        (more, not_finite, r"^values\[1, 2, 29\]"),
        (more, beside[:, :2], r"^values have shape \(2, 2, 30\), keys \(2, 3, 20\)"),
        (more, beside[..., :20], r"^values has shape \[2, 3, 20\]"),
        (more, beside.astype(np.float32), "float32"),
        (more.astype(np.float16), beside, "^keys .*float16"),
        (np.full_like(more, np.inf), beside, r"^keys\[0, 0, 0\]"),
    ]
    for some, others, message in wrong:
        with pytest.raises(ck.CertkError, match=message):
            index.append(some, others)
        index.check(keys, values)
        assert stored(index) == before
        assert len(index) == 50
    with pytest.raises(TypeError, match="values"):
        index.append(more)  # type: ignore[call-arg]
    index.append(more, beside)
    index.check(np.concatenate([keys, more], 1), np.concatenate([values, beside], 1))


def test_values_beside_other_keys_are_refused() -> None:
    keys, values = pair(50)
    for bits in (5, "8", None):
        with pytest.raises(ck.CertkError, match=r"^value_bits is .*: pass 8 or 4"):
            ck.KvIndex.build(keys, values, value_bits=bits)  # type: ignore[arg-type]
    with pytest.raises(
        ck.CertkError, match=r"^values have shape \(1, 50, 30\), keys \(2, 50, 20\)"
    ):
        ck.KvIndex.build(keys, values[:1])
    with pytest.raises(ck.CertkError, match="float64"):
        ck.KvIndex.build(keys, values.astype(np.float64))
