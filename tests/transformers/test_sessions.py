"""Caches that are saved, loaded, pickled and shared: nothing is built anew, nothing is another."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import certk_rs as ck
import model_zoo as zoo
from certk_rs import transformers as ct
from certk_rs._files.tensor_file import SafetensorsFile
from certk_rs.transformers import session
from fresh_process import run_forked
from model_caches import logits_of, run

MAPPED = pytest.param(True, marks=pytest.mark.skipif(os.name == "nt", reason="no maps"))


def decoded(model: Any, cache: Any, steps: int = 5) -> list[bytes]:
    """Outputs and certificates of some steps."""
    found = []
    with zoo.spied() as calls, ct.Recorder() as recorder:
        for token in range(2, 2 + steps):
            run(model, torch.full((1, 1), token), past_key_values=cache)
    found = [call["out"].float().numpy().tobytes() for call in calls]
    for call in recorder.calls:
        found += [part.tobytes() for part in (call.k, call.tail_mass_upper, call.error_bound)]
    return found


def prompt(tmp_path: Path, dtype: str = "float32", **options: Any) -> tuple[Any, Any]:
    """A model, and a cache in which a prompt and some steps are."""
    model = ct.use(zoo.peaked("llama").to(getattr(torch, dtype)), eps=0.05)
    cache = ct.CertkCache(32, **options)
    run(model, zoo.tokens(1, 300), past_key_values=cache)
    decoded(model, cache, 3)
    return model, cache


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: object, **__: object) -> None:
        raise AssertionError("built anew")

    monkeypatch.setattr(ck.KeyIndex, "build", build)
    monkeypatch.setattr(ck.ValueBall, "__init__", build)


@pytest.mark.older
@pytest.mark.parametrize(
    ("dtype", "mapped", "offloaded"),
    [
        *(("float32", mapped, offloaded) for mapped in (0, 1) for offloaded in (0, 1)),
        *(("float16", 0, 1), ("bfloat16", 1, 0)),
    ],
)
def test_a_loaded_cache_goes_on_as_if_nothing_had_been(
    dtype: str, mapped: bool, offloaded: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if os.name == "nt" and (mapped or offloaded):
        pytest.skip("no maps")
    model, cache = prompt(tmp_path, dtype, **({"offload": tmp_path} if offloaded else {}))
    path = tmp_path / "session.safetensors"
    cache.save(path)
    request.getfixturevalue("unbuilt")
    loaded = ct.CertkCache.load(path, 32, **({"offload": tmp_path} if mapped else {}))
    assert loaded.index_bytes == cache.index_bytes > 0
    assert loaded.get_seq_length() == cache.get_seq_length()
    assert loaded.offloaded_bytes == 0
    for one, other in zip(loaded.layers, cache.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)
    assert decoded(model, loaded) == decoded(model, cache)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.name == "nt", reason="no maps")
def test_sessions_share_a_prefix_and_do_not_change_it(tmp_path: Path) -> None:
    model, cache = prompt(tmp_path)
    path = tmp_path / "prefix"
    cache.save(path)
    before = path.read_bytes()
    caches = [ct.CertkCache.load(path, 8, offload=tmp_path) for _ in range(3)]
    # The file may be replaced meanwhile.
    cache.save(path)
    twins = [copy.deepcopy(cache) for _ in caches]
    for at, (one, other) in enumerate(zip(caches, twins, strict=True)):
        ids = zoo.tokens(1, 20 + 40 * at, seed=at)
        assert torch.equal(*(logits_of(model, ids, each) for each in (one, other)))
        if at == 2:
            # Back into the prefix, and on.
            for each in (one, other):
                each.crop(-(20 + 40 * at + 5))
        assert decoded(model, one) == decoded(model, other)
    assert path.read_bytes() == before
    again = tmp_path / "again"
    caches[0].save(again)
    assert decoded(model, ct.CertkCache.load(again, 8)) == decoded(model, twins[0])


def test_caches_are_pickled_and_copied(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model, cache = prompt(tmp_path)
    request.getfixturevalue("unbuilt")
    text = pickle.dumps(cache)
    # Not what was set aside ahead.
    assert len(text) < cache.whole_nbytes + 1.25 * cache.index_bytes + 40_000
    torch.save(cache, stream := io.BytesIO())
    saved = torch.load(io.BytesIO(stream.getvalue()), weights_only=False)
    others = [pickle.loads(text), saved, copy.deepcopy(cache)]
    wanted = decoded(model, cache)
    assert all(decoded(model, again) == wanted for again in others)
    empty = pickle.loads(pickle.dumps(ct.CertkCache(7)))
    run(model, zoo.tokens(1, 9), past_key_values=empty)
    assert empty.get_seq_length() == 9


def test_beams_of_a_loaded_cache_say_what_to_call(tmp_path: Path) -> None:
    model = ct.use(zoo.build("llama"), eps=0)
    ids, cache = zoo.tokens(1, 300), ct.CertkCache()
    logits_of(model, ids[:, :-1], cache)
    cache.save(tmp_path / "session")
    options = {"max_new_tokens": 4, "do_sample": False, "num_beams": 3}
    loaded = ct.CertkCache.load(tmp_path / "session")
    with pytest.raises(ck.CertkError, match="batch_repeat_interleave"):
        model.generate(ids, past_key_values=copy.deepcopy(loaded), **options)
    loaded.batch_repeat_interleave(3)
    found = model.generate(ids, past_key_values=loaded, **options)
    assert torch.equal(found, model.generate(ids, **options))


@pytest.mark.skipif(os.name == "nt", reason="no forks")
def test_another_process_builds_nothing(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model, cache = prompt(tmp_path)
    path = tmp_path / "session"
    cache.save(path)
    wanted = decoded(model, cache)
    request.getfixturevalue("unbuilt")

    def work() -> None:
        assert decoded(model, ct.CertkCache.load(path, 32)) == wanted

    run_forked(work)


def test_layers_of_any_state_come_back(tmp_path: Path) -> None:
    """Too short for an index, empty, cropped, float64, values of another size."""
    path = tmp_path / "session"
    ways = [{}, {"offload": tmp_path}][: 1 if os.name == "nt" else 2]
    cache = ct.CertkCache(4)
    generator = torch.Generator().manual_seed(0)
    for layer, (n, d_v, dtype) in enumerate(((9, 5, torch.float32), (300, 7, torch.float64))):
        keys = torch.randn(2, 3, n, 10, generator=generator).to(dtype)
        cache.update(keys, torch.randn(2, 3, n, d_v, generator=generator).to(dtype), layer)
    cache.update(torch.randn(1, 1, 400, 33), torch.randn(1, 1, 400, 33), 3)
    cache.layers[3].crop(-50)
    cache.save(path)
    for options in ways:
        loaded = ct.CertkCache.load(path, **options)
        assert loaded.layers[2].keys is None
        for at in (0, 1, 3):
            assert torch.equal(loaded.layers[at].keys, cache.layers[at].keys)
            assert torch.equal(loaded.layers[at].values, cache.layers[at].values)
            new = torch.ones(*cache.layers[at].keys.shape[:2], 1, cache.layers[at].keys.shape[3])
            other = new.new_ones((*new.shape[:3], cache.layers[at].values.shape[3]))
            twin = copy.deepcopy(cache.layers[at])
            kind = cache.layers[at].keys.dtype
            for layer in (loaded.layers[at], twin):
                layer.update(new.to(kind), other.to(kind))
            assert torch.equal(loaded.layers[at].keys, twin.keys)
            assert loaded.layers[at].index_bytes == twin.index_bytes
    ct.CertkCache().save(path)
    assert len(ct.CertkCache.load(path)) == 0
    cache = ct.CertkCache()
    cache.update(torch.ones(0, 2, 5, 4), torch.ones(0, 2, 5, 4), 0)
    cache.update(torch.ones(1, 2, 5, 0), torch.ones(1, 2, 5, 0), 1)
    cache.save(path)
    for options in ways:
        loaded = ct.CertkCache.load(path, **options)
        assert [layer.keys.shape for layer in loaded.layers] == [(0, 2, 5, 4), (1, 2, 5, 0)]
        assert (
            loaded.layers[0].update(torch.ones(0, 2, 1, 4), torch.ones(0, 2, 1, 4))[0].shape[2] == 6
        )


@pytest.mark.parametrize("offload", [False, MAPPED])
def test_files_that_are_damaged_are_refused(offload: bool, tmp_path: Path) -> None:
    """A flipped bit anywhere, in the rows of any layer, in the last page or behind the keys."""
    _, cache = prompt(tmp_path)
    path, damaged = tmp_path / "session", tmp_path / "torn"
    cache.save(path)
    data = path.read_bytes()
    with SafetensorsFile(path) as file:
        begin, entries = len(file.header.raw), file.header.entries
    options = {"offload": tmp_path} if offload else {}

    def refused(says: str, at: int, bit: int = 1, **more: Any) -> None:
        torn = bytearray(data)
        torn[at] ^= bit
        damaged.write_bytes(torn)
        with pytest.raises(ck.CertkError, match=says):
            ct.CertkCache.load(damaged, **options, **more)

    rng = np.random.default_rng(0)
    for at in (*rng.integers(len(data), size=150), *range(0, 400, 7)):
        refused("torn", at, 1 << int(rng.integers(8)))
    for length in (0, 7, 100, begin, len(data) // 2, len(data) - 1):
        damaged.write_bytes(data[:length])
        with pytest.raises(ck.CertkError, match=r"torn.*cut off"):
            ct.CertkCache.load(damaged, **options)
    # Rows are compared unless that is not wanted; the rest always is.
    for layer in range(3):
        entry = entries[f"{layer}.rows"]
        for at in (entry.start, (entry.start + entry.stop) // 2, entry.stop - 1):
            refused(f"torn.*keys and values of layer {layer} have another SHA", begin + at, 4)
            ct.CertkCache.load(damaged, check=False, **options)
    for name in ("1.ball", "2.ball", "0.index.codes", "0.values"):
        says = "does not have the SHA-256 that it states"
        refused(says, begin + entries[name].start, check=False)
    ck.KeyIndex.build(cache.layers[0].keys).save(damaged)
    with pytest.raises(ck.CertkError, match="its metadata do not say that it is one"):
        ct.CertkCache.load(damaged, **options)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ct.CertkCache.load(tmp_path / "nowhere", **options)


@pytest.mark.skipif(os.name == "nt", reason="no such signal")
def test_a_file_that_is_written_to_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, cache = prompt(tmp_path)
    path = tmp_path / "session"
    cache.save(path)
    check = session._check

    def checked(*given: Any) -> None:
        check(*given)
        os.utime(path, ns=(1, 1))

    monkeypatch.setattr(session, "_check", checked)
    with pytest.raises(ck.CertkError, match="written to while it was read"):
        ct.CertkCache.load(path)


def test_a_process_that_is_killed_leaves_the_old_file(tmp_path: Path) -> None:
    """Killed at many moments of saving, the second time over the first file."""
    path = tmp_path / "session"
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        cache = ct.CertkCache()
        for token in range(2):
            cache.update(*torch.full((2, 1, 4, 8000, 64), float(token)), 0)
            if token == 1:
                os.write(writer, b"now")
            for _ in range(1 + 1000 * token):
                cache.save(path)
        os._exit(1)
    try:
        assert os.read(reader, 3) == b"now"
        _read_while_it_is_saved(path, child)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    left = [each for each in tmp_path.iterdir() if each != path]
    assert len(left) <= 1
    ct.CertkCache().save(path)
    # What the dead process left is removed by who writes next.
    assert list(tmp_path.iterdir()) == [path]


def _read_while_it_is_saved(path: Path, child: int) -> None:
    sizes = set()
    for at in range(6):
        if at == 5:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        loaded = ct.CertkCache.load(path)
        sizes.add(loaded.get_seq_length())
    assert sizes <= {8000, 16000}
