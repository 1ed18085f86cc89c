"""Caches with codes of values beside those of keys: every certificate is held against float64."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import certk_rs as ck
import model_zoo as zoo
from certk_rs import transformers as ct
from certk_rs.transformers.indexed_layer import IndexedLayer, known_of
from model_caches import run

N, EPS = 1500, 0.05
MAPPED = pytest.param(True, marks=pytest.mark.skipif(os.name == "nt", reason="no maps"))


def model_of(name: str = "llama", factor: float = 1.0, **options: Any) -> Any:
    """A model most of whose rows need many keys."""
    return ct.use(zoo.sharpened(zoo.build(name), factor), eps=EPS, **options)


def filled(model: Any, cache: Any, n: int = N, batch: int = 1) -> Any:
    """A cache of made keys and values, behind which a step has been."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    plain = config.hidden_size // config.num_attention_heads
    size = getattr(config, "head_dim", None) or plain
    with torch.inference_mode():
        for layer in range(config.num_hidden_layers):
            made = torch.Generator().manual_seed(layer)
            rows = torch.randn(2, batch, heads, n, size, generator=made)
            cache.update(*rows.to(model.dtype), layer)
    return cache


def step(model: Any, cache: Any, token: int = 7) -> tuple[list[bytes], Any, list[Any]]:
    """Check a step of decoding and the index behind it; return all that it gave."""
    batch = len(cache.layers[0].keys)
    with zoo.spied() as calls, ct.Recorder() as recorder:
        run(model, torch.full((batch, 1), token), past_key_values=cache)
    zoo.hold(calls, recorder, EPS)
    found = [call["out"].float().numpy().tobytes() for call in calls]
    for call in recorder.calls:
        found += [x.tobytes() for x in (call.k, call.scored, call.tail_mass_upper)]
    for layer in cache.layers:
        if isinstance(layer.index, ck.KvIndex):
            layer.index.check(layer.keys, layer.values)
    return found, recorder, calls


def coded(recorder: Any) -> bool:
    """Return True if rows kept all keys, scored few of them, and proved more than nothing."""
    return any(
        bool(((call.k == call.n) & (call.scored < call.n / 4) & (call.tail_mass_upper > 0)).any())
        for call in recorder.calls
    )


@pytest.mark.older
@pytest.mark.parametrize("offload", [False, MAPPED])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_flat_rows_are_answered_by_codes(dtype: str, offload: bool, tmp_path: Path) -> None:
    model = model_of().to(getattr(torch, dtype))
    cache = filled(model, ct.CertkCache(**({"offload": tmp_path} if offload else {})))
    for token in range(2, 6):
        _, recorder, _ = step(model, cache, token)
        assert coded(recorder)
        assert all(layer.holds and layer.scored < 0.25 for layer in recorder.layers)
    assert "even_if_slower" not in str(recorder)


@pytest.mark.parametrize("name", ["gpt-oss", "mistral-window", "gpt2"])
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_sinks_windows_and_single_heads(name: str, factor: float) -> None:
    """Windows in a cache without a config hold all keys, and their masks are obeyed."""
    model = model_of(name, factor)
    cache = filled(model, ct.CertkCache(), 500 if name == "gpt2" else N)
    for token in range(2, 5):
        step(model, cache, token)
    assert all(isinstance(layer.index, ck.KvIndex) for layer in cache.layers)


@pytest.mark.older
@pytest.mark.parametrize("offload", [False, MAPPED])
def test_codes_follow_beams_batches_crops_and_copies(offload: bool, tmp_path: Path) -> None:
    model, options = model_of(), {"offload": tmp_path} if offload else {}
    cache = filled(model, ct.CertkCache(**options), batch=2)
    step(model, cache)
    twin = copy.deepcopy(cache)
    if not offload:
        other = pickle.loads(pickle.dumps(cache))
        assert other.index_bytes == cache.index_bytes
        assert step(model, other)[0] == step(model, twin)[0]
    assert step(model, copy.deepcopy(twin))[0] == step(model, twin)[0]
    for change in (
        lambda: cache.crop(-3),
        lambda: cache.reorder_cache(torch.tensor([1, 0])),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.batch_select_indices(torch.tensor([3, 0, 1])),
        lambda: cache.layers[1].values[:, :, ::2].mul_(3) if not offload else None,
    ):
        change()
        for _ in range(2):
            assert coded(step(model, cache)[1])
        assert all(isinstance(layer.index, ck.KvIndex) for layer in cache.layers)


def test_an_index_that_grows_is_built_anew_with_its_values() -> None:
    layer = IndexedLayer(8, None, None, "codes")
    made = torch.Generator().manual_seed(0)
    for n in (600, 1, 599, 30, 500):
        layer.update(*torch.randn(2, 1, 2, n, 16, generator=made))
        assert isinstance(layer.index, ck.KvIndex)
        layer.index.check(layer.keys, layer.values)
    assert layer.built == 1200
    assert layer.index_bytes == layer.index.nbytes > ck.KeyIndex.build(layer.keys).nbytes * 1.8


# ------------------------------------------------------------------ values that have no codes


def rows(n: int, seed: int, key: torch.dtype, value: torch.dtype) -> list[torch.Tensor]:
    made = torch.randn(2, 1, 2, n, 16, generator=torch.Generator().manual_seed(seed))
    return [made[0].to(key), made[1].to(value)]


@pytest.mark.parametrize("value", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("key", ["float32", "bfloat16", "float64"])
def test_keys_and_values_of_unlike_types(key: str, value: str) -> None:
    types = getattr(torch, key), getattr(torch, value)
    layer = IndexedLayer(8, None, None, "codes")
    for seed, n in enumerate((700, 3)):
        layer.update(*rows(n, seed, *types))
    known, ball = known_of(layer.keys, layer.values)
    q = torch.randn(1, 4, 1, 16, generator=torch.Generator().manual_seed(9))
    found = ck.attention(q, layer.keys, layer.values, EPS, index=known, ball=ball)
    if key == "float64":
        assert known is None
    elif value == "float64":
        assert type(known) is ck.KeyIndex
    else:
        known.check(layer.keys, layer.values)
        assert (found.rung == ck.Rung.CODED).any()
    k, v = (x.double().repeat_interleave(2, 1) for x in (layer.keys, layer.values))
    real = torch.softmax(q.double() @ k.mT / 4, -1) @ v
    off = (found.out.double() - real).norm(dim=-1).numpy()
    assert (off <= found.error_bound).all()
    assert (found.tail_mass_upper <= EPS).all()


@pytest.mark.parametrize("late", [False, True])
def test_values_that_are_not_finite_leave_an_index_of_keys(late: bool) -> None:
    """It is the one that a cache of exact weights has."""
    layer, exact = (IndexedLayer(8, None, None, weights) for weights in ("codes", "exact"))
    for seed, n in enumerate((700, 3, 2)):
        keys, values = rows(n, seed, torch.float32, torch.float32)
        if seed == late:
            values[0, 1, 1, 5] = torch.inf
        for each in (layer, exact):
            each.update(keys, values)
        assert isinstance(layer.index, ck.KvIndex) is (seed < late)
    layer.index.check(layer.keys)
    pairs = zip(layer.index.arrays(), exact.index.arrays(), strict=True)
    assert all(np.array_equal(*pair) for pair in pairs)
    # Once they are gone, values have codes again.
    layer.crop(-5)
    layer.update(*rows(2, 7, torch.float32, torch.float32))
    assert isinstance(layer.index, ck.KvIndex) is late
    with pytest.raises(ck.CertkError, match=r"^keys\[0, 0, 0, 0\]"):
        layer.update(torch.full((1, 2, 1, 16), torch.nan), torch.zeros(1, 2, 1, 16))


def test_other_values_have_no_codes() -> None:
    """Written to, or not those of the cache: the index is one of the keys alone."""
    layer = IndexedLayer(8, None, None, "codes")
    layer.update(*rows(700, 0, torch.float32, torch.float32))
    assert known_of(layer.keys, layer.values)[0] is layer.index
    others = [layer.values + 1, layer.values[..., :]]
    other = IndexedLayer(8, None, None, "codes")
    other.update(*rows(700, 1, torch.float32, torch.float32))
    others.append(other.values)
    for values in others:
        assert type(known_of(layer.keys, values)[0]) is ck.KeyIndex
    layer.values.mul_(2)
    index, ball = known_of(layer.keys, layer.values)
    assert (type(index), ball) == (ck.KeyIndex, None)


# ------------------------------------------------------------------------------ exact weights


def test_exact_weights_are_those_of_an_index_of_keys(tmp_path: Path) -> None:
    """In a cache without codes of values, or of a model that leaves them out: the same bits."""
    for factor in (1.0, 30.0):
        model, by_use = model_of(factor=factor), model_of(factor=factor, weights="exact")
        exact, codes = (filled(model, ct.CertkCache(weights=w)) for w in ("exact", "codes"))
        assert exact.index_bytes < 0.6 * codes.index_bytes
        assert codes.nbytes - codes.index_bytes == exact.nbytes - exact.index_bytes
        codes.save(tmp_path / "codes")
        loaded = ct.CertkCache.load(tmp_path / "codes", weights="exact")
        assert loaded.index_bytes == exact.index_bytes
        history = copy.deepcopy(exact)
        found, recorder, calls = step(model, exact)
        assert step(by_use, codes)[0] == step(model, loaded)[0] == found
        assert not coded(recorder)
        # As attention has always been given them.
        for at, (call, told) in enumerate(zip(calls, recorder.calls, strict=True)):
            index = ck.KeyIndex.build(history.layers[at].keys)
            index.append(call["key"][:, :, N:])
            q, k, v = (call[name] for name in ("query", "key", "value"))
            same = ck.attention(q, k, v, EPS, index=index, scale=call["scaling"])
            assert torch.equal(call["out"], same.out.transpose(1, 2))
            assert np.array_equal(told.scored, same.scored)
            assert np.array_equal(told.tail_mass_upper, same.tail_mass_upper)
        with ct.budget(eps=EPS, weights="exact"):
            run(model, torch.full((1, 1), 3), past_key_values=codes)


def test_a_session_goes_on_with_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = model_of(), tmp_path / "session"
    cache = filled(model, ct.CertkCache())
    step(model, cache)
    cache.save(path)
    exact = filled(model, ct.CertkCache(weights="exact"))
    exact.save(tmp_path / "exact")
    with monkeypatch.context() as patch:
        patch.setattr(ck.KvIndex, "build", None)
        for options in ({}, {"offload": tmp_path})[: 1 if os.name == "nt" else 2]:
            loaded = ct.CertkCache.load(path, **options)
            assert loaded.index_bytes == cache.index_bytes
            found, recorder, _ = step(model, loaded)
            assert coded(recorder)
            assert found == step(model, copy.deepcopy(cache))[0]
    # Codes that a file lacks are made at the next step.
    loaded = ct.CertkCache.load(tmp_path / "exact")
    assert loaded.index_bytes == 0
    assert coded(step(model, loaded)[1])


def test_other_weights_are_refused() -> None:
    for call in (
        lambda: ct.CertkCache(weights="fast"),
        lambda: ct.use(zoo.build("llama"), eps=0.1, weights="fast"),
        lambda: ct.budget(0.1, weights="fast").__enter__(),
    ):
        with pytest.raises(ck.CertkError, match='weights is \'fast\'; pass "codes" or "exact"'):
            call()
