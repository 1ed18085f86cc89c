"""Caches of codes: what they answer, how they grow and are taken apart, and what they refuse."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import certk_rs as ck
import model_zoo as zoo
from certk_rs import transformers as ct
from certk_rs.transformers.coded_layer import CodedLayer
from model_caches import last_queries, logits_of, prefilled

N, MORE = 90, 10
EPS = 0.02
NAMES = ["llama", "qwen3", "gpt2"]
modern = pytest.mark.skipif(not zoo.MODERN, reason="how transformers 5 crops and repeats caches")


def prepared(name: str = "llama", dtype: Any = torch.float32) -> tuple[Any, Any, Any]:
    """A model, ids of a text that goes on, and the whole cache of its first N tokens."""
    model = zoo.peaked(name).to(dtype)
    ids = zoo.tokens(1, N + MORE, seed=3)
    return model, ids, prefilled(model, ids[:, :N])


def off(call: dict[str, Any], keys: torch.Tensor, values: torch.Tensor) -> np.ndarray:
    """Distances (heads, m) of a call's outputs from attention in float64, causal at the end."""
    q, out = call["query"][0].double().numpy(), call["out"][0].double().transpose(0, 1).numpy()
    group = len(q) // len(keys)
    k, v = (np.repeat(x.double().numpy(), group, 0) for x in (keys, values))
    scores = np.einsum("hmd,hnd->hmn", q, k) * q.shape[-1] ** -0.5
    m, n = scores.shape[1:]
    scores[:, ~np.tril(np.ones((m, n), bool), n - m)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    real = weights @ v / weights.sum(axis=-1, keepdims=True)
    return np.sqrt(np.square(out - real).sum(axis=-1))  # type: ignore[no-any-return]


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """The keys and values that layers of codes are given, in order."""
    seen: list[tuple[Any, Any]] = []
    update = CodedLayer.update

    def noted(self: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((keys.clone(), values.clone()))
        return update(self, keys, values, *args, **kwargs)

    monkeypatch.setattr(CodedLayer, "update", noted)
    return seen


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [(16, 8), (12, 4), (8, 8)])
def test_outputs_are_as_near_as_is_proven(
    name: str, dtype: Any, bits: tuple[int, int], updates: list[tuple[Any, Any]]
) -> None:
    model, ids, whole = prepared(name, dtype)
    coded = ct.encode_cache(whole, key_bits=bits[0], value_bits=bits[1])
    assert coded.get_seq_length() == N
    ct.use(model, eps=EPS)
    near = []
    for at in range(N, N + MORE, 2):
        updates.clear()
        with zoo.spied() as calls, ct.Recorder() as recorder:
            logits_of(model, ids[:, at : at + 2], coded)
        for call, said, new in zip(calls, recorder.calls, updates, strict=True):
            # Other outputs make other keys: the whole cache is given the same ones.
            layer = whole.layers[said.layer]
            layer.update(*new)
            assert said.error_bound is not None
            assert np.isfinite(said.error_bound).all()
            apart = off(call, layer.keys[0], layer.values[0])
            assert (apart <= said.error_bound[0]).all()
            near.append((apart / said.error_bound[0]).max())
            assert (said.k == said.n).all()
            assert (said.scored == 0).all()
            if bits[0] == 16:
                assert (said.tail_mass_upper <= EPS).all()
    assert max(near) > 0.01


@modern
@pytest.mark.parametrize("name", NAMES)
def test_text_goes_on_as_over_the_whole_cache(name: str) -> None:
    model, ids, whole = prepared(name)
    more: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    wanted = model.generate(ids, past_key_values=copy.deepcopy(whole), **more)
    ct.use(model, eps=0.001)
    coded = ct.encode_cache(whole)
    again = pickle.loads(pickle.dumps(coded))
    for each in (coded, again):
        assert torch.equal(model.generate(ids, past_key_values=each, **more), wanted)
        assert each.get_seq_length() == N + MORE + 5
    batch = ct.encode_cache(whole)
    batch.batch_repeat_interleave(2)
    found = model.generate(ids.repeat(2, 1), past_key_values=batch, **more)
    assert torch.equal(found, wanted.repeat(2, 1))
    batch.batch_select_indices(torch.tensor([1]))
    assert batch.layers[0].index.shape[0] == 1
    beams = [copy.deepcopy(whole), ct.encode_cache(whole)]
    for each in beams:
        each.batch_repeat_interleave(3)
    ct.use(model, eps=0)
    first = model.generate(ids, past_key_values=beams[0], num_beams=3, **more)
    ct.use(model, eps=0.001)
    assert torch.equal(model.generate(ids, past_key_values=beams[1], num_beams=3, **more), first)


@modern
def test_what_was_cropped_comes_again_as_before() -> None:
    model, ids, whole = prepared()
    ct.use(model, eps=EPS)
    coded = ct.encode_cache(whole, key_bits=12)
    first = logits_of(model, ids[:, N : N + 4], coded)
    coded.crop(-3)
    assert coded.get_seq_length() == N + 1
    assert all(torch.isnan(layer.keys).all() for layer in coded.layers)
    again = logits_of(model, ids[:, N + 1 : N + 4], coded)
    assert torch.allclose(again, first[:, 1:], atol=1e-4)
    with pytest.raises(ck.CertkError, match="only the 4 tokens"):
        coded.crop(-5)


@pytest.mark.parametrize("outlying", [False, True])
def test_rows_stay_exact_where_asked_or_needed(outlying: bool) -> None:
    model, ids, whole = prepared()
    if outlying:
        # Far from all others, so that it has no code: kept, and scored exactly.
        for layer in whole.layers:
            layer.keys = layer.keys.clone()
            layer.keys[:, 1, 7] *= 300
    kept = [[np.array([3, 80]), np.array([5])]] * 3
    coded = ct.encode_cache(whole, kept=kept)
    added = [each for layer in coded.layers for each in layer.kept_counts]
    assert added == ([2, 2] * 3 if outlying else [2, 1] * 3)
    assert coded.kept_fraction == sum(added) / (6 * N)
    n_bytes = sum(layer.index.nbytes for layer in coded.layers) + sum(added) * (2 * 8 * 4 + 4)
    assert coded.nbytes == n_bytes
    ct.use(model, eps=EPS)
    logits_of(model, ids[:, N : N + 2], coded)
    # A new key without a code is kept as well, and goes again.
    coded.layers[0]._watch.unused = None
    new = torch.zeros(1, 2, 1, 8)
    new[:, 0] = 1e31
    coded.layers[0].update(new, torch.zeros(1, 2, 1, 8))
    assert coded.layers[0].kept_counts[0] == added[0] + 1
    coded.layers[0].crop(-1)
    assert coded.layers[0].kept_counts == added[:2]


def test_pruning_with_codes_of_the_rest() -> None:
    model, ids = zoo.peaked("llama"), zoo.tokens(1, N)
    cache, queries = prefilled(model, ids), last_queries(model, ids, 16)
    dropping = ct.prune_cache(cache, queries, 0.1)
    coded = ct.prune_cache(cache, queries, 0.1, rest="codes", key_bits=12)
    assert isinstance(coded, ct.CodedCache)
    for layer, about in zip(coded.layers, dropping.certificates, strict=True):
        assert tuple(layer.kept_counts) == about.kept
        assert layer.index.bits == 12
    few = ct.prune_prompt(model, ids, 0.1, 16, rest="codes", keep=2, value_bits=4)
    assert max(max(layer.kept_counts) for layer in few.layers) == 2
    assert few.layers[0].index.value_bits == 4
    with pytest.raises(ck.CertkError, match="keep: not for rest='drop'; pass rest='codes'"):
        ct.prune_cache(cache, queries, 0.1, keep=3)


def test_what_is_refused() -> None:
    model, ids, whole = prepared()
    coded = ct.encode_cache(whole)
    ct.use(model, out_tol=1e-7)
    with pytest.raises(ck.CertkError, match="out_tol = 1e-07"):
        logits_of(model, ids[:, N : N + 1], coded)
    ct.use(model, out_tol=10.0)
    coded = ct.encode_cache(whole)
    assert torch.isfinite(logits_of(model, ids[:, N : N + 1], coded)).all()
    model.set_attn_implementation("sdpa")
    with pytest.raises(ck.CertkError, match="by another implementation"):
        logits_of(model, ids[:, N : N + 1], ct.encode_cache(whole))
    with pytest.raises(ck.CertkError, match="cannot be reset"):
        coded.reset()
    coded = ct.encode_cache(whole)
    with pytest.raises(ck.CertkError, match="batch_repeat_interleave"):
        coded.layers[0].update(*(torch.zeros(2, 2, 1, 8) for _ in range(2)))
    new = torch.zeros(1, 2, 1, 8)
    new[0, 1, 0, 3] = torch.nan
    with pytest.raises(ck.CertkError, match=r"values\[0, 1, 0, 3\] is not finite"):
        coded.layers[0].update(torch.zeros(1, 2, 1, 8), new)
    for cache in (coded, hf.DynamicCache(), None):
        with pytest.raises(ck.CertkError, match=r"holds keys and values|pass one"):
            ct.encode_cache(cache)
    with pytest.raises(ck.CertkError, match="kept has 1 entries for 3 layers"):
        ct.encode_cache(whole, kept=[[]])
    with pytest.raises(ck.CertkError, match="layer 0: kept has 0 lists"):
        ct.encode_cache(whole, kept=[[]] * 3)
    with pytest.raises(ck.CertkError, match="layer 0: bits is 7"):
        ct.encode_cache(whole, key_bits=7)
    with pytest.raises(ck.CertkError, match="without all keys"):
        ct.prune_cache(coded, last_queries(zoo.peaked("llama"), ids), 0.1)
    double = prefilled(model.double(), ids[:, :N])
    with pytest.raises(ck.CertkError, match=r"layer 0: .*float64"):
        ct.encode_cache(double)
