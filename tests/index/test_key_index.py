"""`KeyIndex` against exact arithmetic: traps, growth, files, memory, refusals.

Random searches of every kind are in test_search_soundness.py, of many heads in
test_search_combinations.py. The oracle is `exact_rows`. A test that guards against one mistake
names it as a trap.
"""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from time import process_time
from typing import Any, get_args

import numpy as np
import pytest
import safetensors.numpy

import certk_rs as ck
from certk_rs import _native, key_index
from real_rows import Cache

RULES = get_args(key_index.Rule)
EPS = 0.05

Array = np.ndarray


def ask(index: ck.KeyIndex, q: Array, rule: Any, **options: Any) -> ck.SearchResult:
    """Search with k for the one rule that needs it."""
    k = max(1, index.shape[-2] // 4) if rule == "top_k" else None
    return index.search(q, EPS, rule=rule, k=k, **options)


def test_the_gap_rule_stops_at_the_first_rank_that_proves_the_budget() -> None:
    rng = np.random.default_rng(3)
    for _ in range(40):
        scores = np.sort(rng.standard_normal(80) * 6)[::-1]
        keys = np.zeros((80, 4), np.float32)
        keys[:, 0] = scores
        at = rng.permutation(80)
        found = ck.KeyIndex.build(keys[at]).search(
            np.array([1.0, 0, 0, 0], np.float32), 0.2, rule="gap", scale=1.0
        )
        exact = np.sort(keys[:, 0].astype(np.float64))[::-1]
        k = np.arange(1, 80)
        enough = exact[:-1] - exact[1:] >= np.log((80 - k) * 0.8 / (k * 0.2))
        first = int(k[enough][0]) if enough.any() else 80
        assert found.k == first


def test_long_queries_of_one_sign_do_not_overflow() -> None:
    # Trap: 16-bit queries times 8-bit codes overflow 32 bits above d = 512.
    for d in (512, 513, 1024, 4096):
        rng = np.random.default_rng(d)
        keys = np.ones((40, d), np.float32)
        keys[1::2] = -1.0
        keys *= rng.uniform(0.5, 1.0, (40, 1)).astype(np.float32)
        q = np.ones(d, np.float32)
        found = ck.KeyIndex.build(keys, rotate=False).search(q, 0.01, scale=8 / d)
        scores = keys.astype(np.float64).sum(1) * 8 / d
        weights = np.exp(scores - scores.max())
        tail = 1 - weights[found.row(())].sum() / weights.sum()
        assert float(found.tail_mass_lower) - 1e-12 <= tail <= found.tail_mass_upper <= 0.01
        best = ck.KeyIndex.build(keys).search(q, None, rule="top_k", k=5, scale=8 / d)
        assert set(best.row(()).tolist()) == set(np.argsort(-scores, kind="stable")[:5].tolist())


def test_a_spike_among_equal_keys_is_found() -> None:
    # Trap: a sample of the keys says that the row is flat, and everything is scored.
    rng = np.random.default_rng(11)
    keys = (rng.standard_normal((20000, 16)) * 0.01).astype(np.float32)
    q = rng.standard_normal(16).astype(np.float32)
    for at in (0, 7777, 19999):
        spiked = keys.copy()
        spiked[at] = q * np.float32(20 / float(q @ q))
        found = ck.KeyIndex.build(spiked).search(q, 0.01, scale=1.0)
        assert found.row(()).tolist() == [at]
        assert found.scored < 300
        assert found.rung != ck.Rung.DENSE


def decoded(index: ck.KeyIndex) -> tuple[Array, tuple[Array, ...]]:
    """Return the vectors that an index of (n, d) stores, not rotated, and its parts."""
    n, d = index.shape
    parts = tuple(np.asarray(part) for part in index._index.parts()[0])
    steps = -(-d // 4)
    # A line of four dimensions of sixteen keys, line by line.
    lines = parts[0].reshape(-1, steps, 16, 4).transpose(0, 2, 1, 3).reshape(-1, 4 * steps)
    scales = (parts[1].astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return (lines[:n, :d].astype(np.float64) - 128) * scales[:n, None], parts


@pytest.mark.parametrize("d", [1, 7, 16, 33, 64])
def test_losses_of_codes_are_within_their_radii_and_their_sums(d: int) -> None:
    # Trap: radii, and the sum of outer products, must be rounded up where they are stored.
    rng = np.random.default_rng(d)
    keys = rng.standard_normal((700, d)) * 10.0 ** rng.uniform(-2, 1, (700, 1))
    keys = keys.astype(np.float32)
    index = ck.KeyIndex.build(keys, rotate=False)
    codes, (_, _, radii, bare, mean, gram, numbers, _) = decoded(index)
    coded = np.setdiff1d(np.arange(700), bare)
    losses = ((keys - mean[:d]).astype(np.float64) - codes)[coded]
    norms = np.sqrt((losses.astype(np.longdouble) ** 2).sum(1))
    stored = (radii.astype(np.uint32) << 16).view(np.float32)[coded]
    assert (stored >= norms).all()
    assert (stored <= norms * 1.01 + 1e-18).all()
    assert numbers[1] >= norms.max()
    width = -(-d // 16) * 16
    upper = np.triu(gram.reshape(width, width))[:d, :d]
    whole = upper + np.triu(upper, 1).T
    rounded = (numbers[3] + 2 * width) * 2.0**-52 * np.trace(whole)
    for y in [*rng.standard_normal((50, d)), *np.linalg.svd(losses)[2][:3]]:
        form, length = float(y @ whole @ y), float(np.linalg.norm(y))
        bound = np.sqrt(form + rounded * length**2) + length * np.sqrt(numbers[0])
        real = np.sqrt(((losses @ y) ** 2).sum())
        assert bound >= real * (1 - 1e-12)
        assert bound <= real * 1.5 + 1e-6 * length * norms.max()


def test_squares_of_weights_below_float32_are_in_the_bounds() -> None:
    # Trap: 60 nats below the top, squares of weights are nothing in float32, but their root counts.
    rng = np.random.default_rng(15)
    near, far = rng.standard_normal((2, 16))
    far[0] = near[0] + 4.0
    keys = np.concatenate([np.tile(near, (4000, 1)), np.tile(far, (300, 1))])
    keys[:, 0] += rng.standard_normal(4300) * 1e-3
    keys = keys.astype(np.float32)
    index = ck.KeyIndex.build(keys, rotate=False)
    codes, (_, _, _, bare, mean, _, _, _) = decoded(index)
    assert len(bare) < 300
    low = np.arange(4000)
    losses = (keys - mean[:16]).astype(np.float64) - codes
    # What codes lose is all for the many that are far below the top.
    loss, code = losses[low].mean(0), codes[low].mean(0)
    loss[0] = code[0] = 0.0
    q = loss - code * (loss @ code) / (code @ code)
    q *= 1.5 / (q @ loss)
    q[0] = (60 - q @ (far - near)) / 4
    scores = keys.astype(np.longdouble) @ q.astype(np.longdouble)
    weights = np.exp(scores - scores.max())
    by_codes = np.exp(scores - losses @ q - scores.max())
    share = float(weights[low].sum() / weights.sum())
    # Codes alone would promise much less than there is.
    assert by_codes[low].sum() < 0.8 * weights[low].sum()
    assert 1e-40 < share < 1e-18
    found = index.search(q, 50 * share, scale=1.0)
    kept = found.row(())
    assert not np.isin(kept, low).any()
    dropped = np.ones(4300, bool)
    dropped[kept] = False
    tail = weights[dropped].sum() / weights.sum()
    assert found.tail_mass_lower <= tail <= found.tail_mass_upper <= 50 * share


def test_equal_scores_rank_by_position_even_where_rounding_hides_it() -> None:
    keys = np.zeros((300, 8), np.float32)
    keys[::3, 0] = 1.0
    found = ck.KeyIndex.build(keys).search(np.eye(8, dtype=np.float32)[0], None, rule="top_k", k=30)
    assert found.row(()).tolist() == list(range(0, 90, 3))
    assert found.eps == 1.0
    assert found.status == ck.Status.CERTIFIED
    for scale in (-1.0, 0.0):
        found = ck.KeyIndex.build(keys).search(
            np.eye(8, dtype=np.float32)[0], None, rule="top_k", k=5, scale=scale
        )
        want = [1, 2, 4, 5, 7] if scale < 0 else [0, 1, 2, 3, 4]
        assert found.row(()).tolist() == want


def test_nothing_is_scored_where_nothing_is_dropped() -> None:
    keys = np.random.default_rng(1).standard_normal((50, 8)).astype(np.float32)
    index = ck.KeyIndex.build(keys)
    for rule, k in (("mass", None), ("gap", None), ("top_k", 50)):
        found = index.search(keys[0], 0.0, rule=rule, k=k)  # type: ignore[arg-type]
        assert found.k == 50
        assert found.scored == 0
        assert found.tail_mass_upper == 0.0
    many = index.search(keys[0], None, rule="top_k", k=99)
    assert many.k == 50


def test_results_are_selections(tmp_path: Path) -> None:
    keys = np.random.default_rng(1).standard_normal((90, 8)).astype(np.float32)
    found = ck.KeyIndex.build(keys).search(keys[:4] * 4, 0.1)
    assert isinstance(found, ck.Selection)
    assert "scored" in repr(found)
    assert "rungs" in found.summary()
    again = pickle.loads(pickle.dumps(found))
    assert type(again) is ck.SearchResult
    assert np.array_equal(again.scored, found.scored)
    assert np.array_equal(again.rung, found.rung)
    assert not found.scored.flags.writeable
    found.save(tmp_path / "found.npz")
    loaded = ck.SearchResult.load(tmp_path / "found.npz")
    assert type(loaded) is ck.SearchResult
    assert np.array_equal(loaded.scored, found.scored)
    assert type(ck.Selection.load(tmp_path / "found.npz")) is ck.Selection
    ck.select(keys.astype(np.float64), 0.1).save(tmp_path / "plain.npz")
    with pytest.raises(ck.CertkError, match="other fields"):
        ck.SearchResult.load(tmp_path / "plain.npz")
    cert = ck.certify(keys[:4].astype(np.float64) * 4 @ keys.T.astype(float) / 8**0.5, found)
    assert (cert.tail_mass_lower <= found.tail_mass_upper + 1e-12).all()


def test_memory_is_below_d_plus_8_bytes_a_key() -> None:
    """Beside the matrix of what codes lose, and a few vectors, in whole groups of sixteen."""
    for d in (1, 5, 32, 128):
        keys = np.random.default_rng(d).standard_normal((4096, d)).astype(np.float32)
        width = -(-d // 16) * 16
        assert ck.KeyIndex.build(keys).nbytes <= (d + 8) * 4096 + 8 * width * (width + 4)


def test_keys_are_kept_and_grow_by_doubling() -> None:
    rng = np.random.default_rng(14)
    keys = rng.standard_normal((2, 300, 8)).astype(np.float32)
    index = ck.KeyIndex.build(keys[:, :10])
    buffers = set()
    for at in range(10, 300):
        index.append(keys[:, at : at + 1])
        buffers.add(id(index._room))
    assert len(buffers) <= 8
    index.check()
    index.check(keys)
    whole = ck.KeyIndex.build(keys)
    q = rng.standard_normal((2, 4, 8)).astype(np.float32) * 3
    grown, at_once = index.search(q, 0.01), whole.search(q, 0.01)
    assert (grown.tail_mass_upper <= 0.01).all()
    assert (at_once.tail_mass_upper <= 0.01).all()
    top = [x.search(q, None, rule="top_k", k=9).indices for x in (index, whole)]
    assert np.array_equal(*top)


@pytest.mark.parametrize("heads", [(), (3,)])
@pytest.mark.parametrize("n", [0, 16, 39])
def test_a_failed_append_leaves_no_trace(heads: tuple[int, ...], n: int) -> None:
    """Not of a head before the bad one, and not behind the last key, in a group that has begun."""
    keys = np.random.default_rng(4).standard_normal((*heads, 60, 8)).astype(np.float32)
    index = ck.KeyIndex.build(keys[..., :n, :])
    before = [array.tobytes() for array in index.arrays()]
    for value, (size, place) in product((np.nan, np.inf, -np.inf), ((1, 0), (7, 6), (21, 20))):
        bad = keys[..., :size, :].copy()
        where = (*(heads and (2,)), place, 7)
        bad[where] = value
        with pytest.raises(ck.CertkError, match=re.escape(f"keys{[*where]} is not finite")):
            index.append(bad)
        assert [array.tobytes() for array in index.arrays()] == before
        assert len(index) == n
    with pytest.raises(ck.CertkError, match="float16"):
        index.append(keys.astype(np.float16))
    index.append(keys[..., n:, :])
    index.check(keys)
    found = index.search(keys[..., :1, :], 0.1)
    again = pickle.loads(pickle.dumps(index)).search(keys[..., :1, :], 0.1)
    assert (found.status == ck.Status.CERTIFIED).all()
    assert np.array_equal(found.tail_mass_upper, again.tail_mass_upper)


_REFUSED = """
import resource
import numpy as np
import certk_rs as ck

keys = np.random.default_rng(1).standard_normal((2, 39, 64)).astype(np.float32)
index = ck.KeyIndex.build(keys, keep_keys=False)
before = [array.tobytes() for array in index.arrays()]
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
# One key again and again: it takes no memory, its codes do.
many = np.broadcast_to(keys[:, :1], (2, 1 << 26, 64))
try:
    index.append(many, threads=1)
except ck.CertkError as error:
    assert "keys takes" in str(error) and "more than there is" in str(error), error
else:
    raise AssertionError("there was memory")
assert [array.tobytes() for array in index.arrays()] == before
index.append(keys)
index.check(np.concatenate([keys, keys], axis=1))
"""


def test_an_append_that_the_system_refuses_changes_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", _REFUSED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_append_without_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = np.random.default_rng(1).standard_normal((60, 8)).astype(np.float32)
    index = ck.KeyIndex.build(keys)

    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "empty", full)
    with pytest.raises(MemoryError):
        index.append(keys)
    monkeypatch.undo()
    assert len(index) == 60
    assert index.search(keys[0], 0.1).status == ck.Status.CERTIFIED
    index.append(keys)
    index.check(np.concatenate([keys, keys]))


def test_an_append_that_a_signal_ends_keeps_what_has_codes() -> None:
    keys = np.random.default_rng(1).standard_normal((2, 60, 8)).astype(np.float32)
    index = ck.KeyIndex.build(keys[:, :20])
    index.append(keys[:, 20:21])

    def ended() -> None:
        index._index.append((keys[:, 21:40], index.dtype), None)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index._grow((keys[:, 21:40], index.dtype), ended)
    index.append(keys[:, 40:])
    index.check(keys)
    index.check()


def test_appends_from_several_threads_keep_keys_and_codes_together() -> None:
    rng = np.random.default_rng(2)
    keys = rng.standard_normal((50, 8)).astype(np.float32)
    index = ck.KeyIndex.build(keys)
    more = rng.standard_normal((4, 100, 3, 8)).astype(np.float32)

    def append(parts: Array) -> None:
        for part in parts:
            index.append(part)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(append, more))
    assert len(index) == 50 + 4 * 300
    index.check()


def test_an_index_that_grows_while_it_is_searched_tells_the_truth() -> None:
    rng = np.random.default_rng(3)
    keys = rng.standard_normal((1500, 8)).astype(np.float32)
    index = ck.KeyIndex.build(keys[:500])
    q = rng.standard_normal(8).astype(np.float32) * 4
    weights = np.exp(keys.astype(np.longdouble) @ q.astype(np.longdouble))

    def grow() -> None:
        for at in range(500, 1500, 10):
            index.append(keys[at : at + 10])

    answered = 0
    with ThreadPoolExecutor(1) as pool:
        growing = pool.submit(grow)
        while not growing.done() or answered == 0:
            try:
                found = index.search(q, 0.05, scale=1.0, threads=1)
            except ck.CertkError as error:
                assert "the index was built of keys of shape" in str(error)  # noqa: PT017
                continue
            n = found.shape[-1]
            dropped = np.ones(n, bool)
            dropped[found.row(())] = False
            tail = weights[:n][dropped].sum() / weights[:n].sum()
            assert found.tail_mass_lower * (1 - 1e-15) <= tail
            assert tail <= found.tail_mass_upper * (1 + 1e-15) <= 0.05 * (1 + 1e-14)
            answered += 1
    growing.result()
    index.check(keys)


def test_appending_takes_no_longer_for_a_longer_index() -> None:
    def least(n: int) -> float:
        keys = np.zeros((2, n, 16), np.float32)
        keys[..., ::7, :] = 1.0
        index = ck.KeyIndex.build(keys, keep_keys=False)
        times = []
        for _ in range(30):
            start = process_time()
            index.append(keys[:, :1], threads=1)
            times.append(process_time() - start)
        return min(times)

    assert least(500_000) < 20 * least(1000)


def test_heads_that_are_none_have_keys_all_the_same() -> None:
    index = ck.KeyIndex.build(np.empty((0, 5, 8), np.float32))
    assert index.shape == (0, 5, 8)
    assert index.search(np.empty((0, 3, 8), np.float32), 0.1).shape == (0, 3, 5)
    index.append(np.empty((0, 2, 8), np.float32))
    assert len(index) == 7
    index.check()


# Searches of several portions, appends and looks at the length, all at once.
THREE = """
import threading, time
import numpy as np
import certk_rs as ck

keys = np.random.default_rng(0).standard_normal((4000, 64)).astype(np.float32)
index, end = ck.KeyIndex.build(keys, keep_keys=False), time.monotonic() + 4

def repeat(work):
    while time.monotonic() < end:
        work()

def search():
    try:
        index.search(keys[:600], 1e-9, threads=1)
    except ck.CertkError as error:
        assert "keys" in str(error)

def append():
    index.append(keys[:1], threads=1)
    time.sleep(0.0005)

works = (search, append, lambda: len(index), lambda: index.dtype)
threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_no_thread_waits_for_another_forever() -> None:
    # Trap: a search waits for the interpreter, an append for the search, the interpreter for that.
    subprocess.run([sys.executable, "-c", THREE], check=True, timeout=60)


def test_copies_and_pickles_grow_apart() -> None:
    rng = np.random.default_rng(4)
    keys = rng.standard_normal((2, 60, 8)).astype(np.float32)
    q = rng.standard_normal((4, 3, 8)).astype(np.float32)
    for keep in (True, False):
        index = ck.KeyIndex.build(keys, keep_keys=keep)
        for other in (copy.copy(index), copy.deepcopy(index), pickle.loads(pickle.dumps(index))):
            other.append(keys[:, :5])
            assert (len(index), len(other)) == (60, 65)
            grown = np.concatenate([keys, keys[:, :5]], axis=1)
            other.check(grown)
            index.check(keys)
            lent = None if keep else keys
            one = index.search(q, 0.1, keys=lent)
            again = pickle.loads(pickle.dumps(index)).search(q, 0.1, keys=lent)
            assert np.array_equal(one.indices, again.indices)
            assert np.array_equal(one.tail_mass_upper, again.tail_mass_upper)


def test_rust_writes_the_same_bytes(tmp_path: Path) -> None:
    """`tests/index_files.rs` reads and writes this file, too."""
    steps = np.arange(2 * 40 * 8)
    keys = ((steps * steps % 23) / 8).astype(np.float32).reshape(2, 40, 8)
    keys[1, 5] *= 1000
    path = tmp_path / "keys.index"
    ck.KeyIndex.build(keys).save(path)
    stored = Path(__file__).parents[1] / "vectors" / "index.safetensors"
    assert path.read_bytes() == stored.read_bytes()
    ck.KeyIndex.load(stored, keys)


def test_saved_indexes_answer_alike(tmp_path: Path) -> None:
    rng = np.random.default_rng(17)
    path = tmp_path / "index.safetensors"
    for dtype in ("float32", "float16"):
        keys = rng.standard_normal((2, 3, 130, 20)).astype(dtype)
        index = ck.KeyIndex.build(keys)
        index.append(keys[:, :, :7])
        grown = np.concatenate([keys, keys[:, :, :7]], axis=2)
        index.save(path)
        loaded = ck.KeyIndex.load(path, keys=grown)
        bare = ck.KeyIndex.load(path)
        assert loaded.shape == bare.shape == grown.shape
        assert bare.dtype == dtype
        q = rng.standard_normal((2, 3, 2, 20)).astype(np.float32) * 3
        for rule in RULES:
            want = ask(index, q, rule)
            for found in (ask(loaded, q, rule), ask(bare, q, rule, keys=grown)):
                assert np.array_equal(found.indices, want.indices)
                assert found.tail_mass_upper.tobytes() == want.tail_mass_upper.tobytes()
        more = rng.standard_normal((2, 3, 5, 20)).astype(dtype)
        loaded.append(more)
        index.append(more)
        assert np.array_equal(ask(loaded, q, "mass").indices, ask(index, q, "mass").indices)
        loaded.check()
    assert list(tmp_path.iterdir()) == [path]


def test_files_that_are_no_index_are_refused(tmp_path: Path) -> None:
    """Every damage to a header, and many to what is behind it, are in test_foreign_files.py."""
    keys = np.random.default_rng(18).standard_normal((100, 16)).astype(np.float32)
    path = tmp_path / "index.safetensors"
    ck.KeyIndex.build(keys).save(path)
    whole = path.read_bytes()
    foreign = safetensors.numpy.save({"a": keys})
    for content in (*(whole[:size] for size in (0, 5, 100, len(whole) - 1)), whole + b"x", foreign):
        path.write_bytes(content)
        with pytest.raises(ck.CertkError, match=r"index\.safetensors: .*; (build|save)"):
            ck.KeyIndex.load(path)
    with pytest.raises(ck.CertkError, match="is not a regular file"):
        ck.KeyIndex.load(tmp_path)
    with pytest.raises(FileNotFoundError) as missing:
        ck.KeyIndex.load(tmp_path / "none")
    assert missing.value.filename == str(tmp_path / "none")


def test_parts_that_no_index_has_are_refused() -> None:
    keys = np.random.default_rng(18).standard_normal((100, 16)).astype(np.float32)
    index = ck.KeyIndex.build(keys)._index
    (good,) = index.parts()

    def load(at: int, change: Any, shape: tuple[int, ...] = (100, 16)) -> None:
        parts = [part.copy() for part in good]
        parts[at] = change(parts[at])
        _native.KeyIndex.of_parts(shape, "float32", [tuple(parts)])  # type: ignore[list-item]

    def put(position: int, value: float) -> Any:
        def change(part: Array) -> Array:
            part[position] = value
            return part

        return change

    load(0, lambda part: part)
    changes: list[tuple[int, Any]] = [
        *((at, lambda part: part[:-1]) for at in (0, 1, 2, 4, 5)),
        (1, put(3, 0x7F80)),  # an infinite scale
        (1, put(3, 0)),  # no scale, but not listed as a key without a code
        (2, put(3, 0xBF80)),  # a negative radius
        (2, put(3, 0x7FC0)),  # NaN
        (3, lambda _: np.array([100], np.uint32)),
        (3, lambda _: np.array([5, 5], np.uint32)),
        (4, put(0, np.nan)),
        (5, put(0, np.nan)),
        (5, put(0, -1.0)),
        *((6, put(at, value)) for at in range(4) for value in (-1.0, np.nan, np.inf)),
        (6, put(3, 0.5)),
        (6, put(4, np.nan)),
        (6, put(5, np.inf)),
        (6, put(6, 4.0)),
    ]
    for at, change in changes:
        with pytest.raises(ck.CertkError):
            load(at, change)
    for shape in ((101, 17), (100, 0), (2, 100, 16), (16,)):
        with pytest.raises(ck.CertkError, match=r"shape|codes"):
            load(0, lambda part: part, shape)


def test_other_keys_are_caught(tmp_path: Path) -> None:
    rng = np.random.default_rng(19)
    keys = rng.standard_normal((2, 300, 16)).astype(np.float32)
    path = tmp_path / "index.safetensors"
    index = ck.KeyIndex.build(keys)
    index.save(path)
    index.check()
    changed = keys.copy()
    changed[1, 299, 15] = np.nextafter(changed[1, 299, 15], np.float32(9))
    for other in (changed, keys[:, ::-1].copy(), -keys):
        with pytest.raises(ck.CertkError, match=r"keys\[[01]\] changed since they were indexed"):
            index.check(other)
        with pytest.raises(ck.CertkError, match="pass those that it was built of"):
            ck.KeyIndex.load(path, keys=other)
    with pytest.raises(ck.CertkError, match="shape"):
        ck.KeyIndex.load(path, keys=keys[:, :299])
    with pytest.raises(ck.CertkError, match="shape"):
        index.search(keys[:, :1], 0.1, keys=keys[..., :15])
    with pytest.raises(ck.CertkError, match="are float16, but were float32"):
        index.search(keys[:, :1], 0.1, keys=keys.astype(np.float16))
    # Written to while they are kept.
    keys[0, 7, 3] += 1.0
    with pytest.raises(ck.CertkError, match=re.escape("keys[0] changed")):
        index.check()
    with pytest.raises(ck.CertkError, match="does not keep them"):
        ck.KeyIndex.load(path).check()


def test_bad_input_is_named() -> None:
    keys = np.random.default_rng(1).standard_normal((60, 8)).astype(np.float32)
    q = keys[0]
    index = ck.KeyIndex.build(keys)

    def refuses(message: str, work: Any) -> None:
        with pytest.raises(ck.CertkError, match=message):
            work()

    for value, place in ((np.nan, 5), (np.inf, 0), (-np.inf, 59)):
        bad = keys.copy()
        bad[place, 3] = value
        refuses(rf"keys\[{place}, 3\] is not finite", lambda bad=bad: ck.KeyIndex.build(bad))
    refuses("float64", lambda: ck.KeyIndex.build(keys.astype(np.float64)))
    refuses("at least one entry", lambda: ck.KeyIndex.build(keys[:, :0]))
    refuses("keys", lambda: ck.KeyIndex.build(keys[0]))
    for bits in (4, 6, True, "8"):
        refuses("bits is", lambda bits=bits: ck.KeyIndex.build(keys, bits=bits))
    refuses("8 entries", lambda: index.search(keys[:, :7], 0.1))
    heads = ck.KeyIndex.build(np.stack([keys] * 3))
    refuses("multiple", lambda: heads.search(np.stack([keys] * 5), 0.1))
    refuses("eps is 1", lambda: index.search(q, 1.0))
    refuses("eps is None", lambda: index.search(q, None))
    refuses(r"eps\[1\] is NaN", lambda: index.search(keys[:2], [0.1, np.nan]))
    refuses("scale is NaN", lambda: index.search(q, 0.1, scale=np.nan))
    refuses("rule is 'best'", lambda: index.search(q, 0.1, rule="best"))  # type: ignore[arg-type]
    refuses("without k", lambda: index.search(q, 0.1, rule="top_k"))
    refuses("k is 0", lambda: index.search(q, 0.1, rule="top_k", k=0))
    refuses("finds k itself", lambda: index.search(q, 0.1, k=3))
    refuses("rotate is 1; pass True or False", lambda: ck.KeyIndex.build(keys, rotate=1))  # type: ignore[arg-type]
    refuses("max_scored is -1", lambda: index.search(q, 0.1, max_scored=-1))
    wrong = keys[:2].copy()
    wrong[1, 4] = np.nan
    refuses(r"q\[1, 4\] is not finite", lambda: index.search(wrong, 0.1))
    huge = q.astype(np.float64) * 1e30
    refuses("tell scores apart", lambda: index.search(huge, 0.1, rule="gap"))
    assert index.search(huge, 0.1).k == 60
    lone = ck.KeyIndex.build(keys, keep_keys=False)
    for options in ({"rule": "gap"}, {"rule": "top_k", "k": 3}):
        refuses("keys are needed", lambda options=options: lone.search(q, 0.1, **options))


def minimal_k(scores: Array, eps: float) -> Array:
    """Fewest keys per row, float64."""
    weights = -np.sort(-np.exp(scores - scores.max(-1, keepdims=True)), axis=-1)
    kept = np.cumsum(weights, axis=-1) / weights.sum(-1, keepdims=True)
    return (kept < 1 - eps).sum(-1) + 1


def true_in_float64(found: ck.SearchResult, scores: Array) -> None:
    """Every row's interval holds the tail mass computed in float64."""
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mask = found.to_mask()
    tail = np.where(mask, 0.0, weights).sum(-1) / weights.sum(-1)
    assert (tail <= found.tail_mass_upper * (1 + 1e-9)).all()
    assert (tail >= found.tail_mass_lower * (1 - 1e-9) - 1e-15).all()


def test_real_rows(small_cache: Cache) -> None:
    layers = sum(name.endswith(".key") for name in small_cache)
    for layer in range(layers):
        keys, q = (small_cache[f"layers.{layer}.{name}"][0] for name in ("key", "query"))
        index = ck.KeyIndex.build(keys)
        scores = q.astype(np.float64) @ np.swapaxes(keys, 1, 2).astype(np.float64)
        scores *= keys.shape[-1] ** -0.5
        for eps in (0.1, 0.01):
            least = minimal_k(scores, eps)
            found = index.search(q, eps)
            true_in_float64(found, scores)
            assert (found.tail_mass_upper <= eps).all()
            assert (found.k >= least).all()
        top = index.search(q, None, rule="top_k", k=20)
        order = np.sort(np.argsort(-scores, axis=-1, kind="stable")[..., :20], axis=-1)
        assert np.array_equal(top.to_padded(), order)
        assert (top.status == ck.Status.CERTIFIED).all()


def test_few_keys_are_scored_where_few_matter(cache_65536: Cache) -> None:
    eps, codes = 0.01, []
    for layer in range(4):
        keys, q = (cache_65536[f"layers.{layer}.{name}"][0, 0] for name in ("key", "query"))
        index = ck.KeyIndex.build(keys)
        scores = q.astype(np.float64) @ keys.T.astype(np.float64) * keys.shape[-1] ** -0.5
        least = minimal_k(scores, eps)
        found = index.search(q, eps)
        true_in_float64(found, scores)
        thin = found.rung == ck.Rung.RESCORED
        codes.append((found.scored / least)[thin])
        top = index.search(q[:8], None, rule="top_k", k=100)
        order = np.sort(np.argsort(-scores[:8], axis=-1, kind="stable")[:, :100], axis=-1)
        assert np.array_equal(top.to_padded(), order)
        assert (top.scored < 300).all()
    ratio = np.concatenate(codes)
    assert ratio.mean() <= 1.06
    assert ratio.max() <= 1.1
