"""Pruning a prompt in memory, and what a pruned cache refuses to be fed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import certk_rs as ck
import model_zoo as zoo
from certk_rs import transformers as ct
from model_caches import logits_of, prefilled, seen_by

N = 48
FULL = ["llama", "qwen3", "gpt2"]
GREEDY: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
modern = pytest.mark.skipif(not zoo.MODERN, reason="what transformers 5 feeds a filled cache")


def same(one: Any, other: Any) -> bool:
    return all(
        torch.equal(a.keys.nan_to_num(), b.keys.nan_to_num()) and torch.equal(a.values, b.values)
        for a, b in zip(one.layers, other.layers, strict=True)
    )


# ----------------------------------------------------------------------------- prune_prompt


@pytest.mark.older
@pytest.mark.parametrize("options", [{}, {"compact": True, "keep_last": 8}, {"guard": "codes"}])
@pytest.mark.parametrize("name", FULL)
def test_a_prompt_is_pruned_as_its_cache_would_be(name: str, options: dict[str, Any]) -> None:
    model, ids = zoo.peaked(name), zoo.tokens(1, N)
    calls = seen_by(model, ids)
    # Of the forward pass that captures, as rounding differs from that which fills a cache.
    cache = hf.DynamicCache()
    for layer, call in enumerate(calls):
        cache.update(call["key"], call["value"], layer)
    last = [call["query"][:, :, -16:] for call in calls]
    wanted = ct.prune_cache(cache, last, 0.2, **options)
    found = ct.prune_prompt(model, ids, 0.2, 16, **options)
    assert same(found, wanted)
    assert model.config._attn_implementation == "sdpa"
    for one, other in zip(found.certificates, wanted.certificates, strict=True):
        assert one.kept == other.kept
        assert (one.tail_mass_upper == other.tail_mass_upper).all()
        assert one.tail_mass_upper.shape == (calls[0]["query"].shape[1], 16)
    assert found.get_seq_length() == N
    assert found.kept_fraction < 1
    assert found.guard_bytes == wanted.guard_bytes
    ct.use(model, eps=0)
    more = torch.cat([ids, zoo.tokens(1, 2, seed=9)], -1)
    out = [model.generate(more, past_key_values=each, **GREEDY) for each in (found, wanted)]
    assert torch.equal(*out)


def test_inputs_of_a_tokenizer_and_long_windows() -> None:
    model, ids = zoo.peaked("llama"), zoo.tokens(1, N)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    found = ct.prune_prompt(model, given, 0.2)
    assert same(found, ct.prune_prompt(model, ids, 0.2, 1000))
    assert found.certificates[0].tail_mass_upper.shape == (6, N)
    wide = ct.prune_prompt(model, ids, 0.2, 1)
    assert wide.kept_fraction < found.kept_fraction
    recalled = ct.prune_prompt(model, ids, 0.01, 4, guard="codes", on_breach="recall")
    ct.use(model, eps=0)
    model.generate(torch.cat([ids, ids[:, :1]], 1), past_key_values=recalled, **GREEDY)
    assert any(call.recalled.any() for call in recalled.lost)
    assert max(call.left.max() for call in recalled.lost) <= 0.01


def test_what_cannot_be_pruned_says_why() -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, N)
    for window in (0, -1, 2.5, True, None):
        with pytest.raises(ck.CertkError, match="window is"):
            ct.prune_prompt(model, ids, 0.2, window)
    with pytest.raises(ck.CertkError, match="a batch of 2"):
        ct.prune_prompt(model, zoo.tokens(2, 9), 0.2)
    with pytest.raises(ck.CertkError, match="model is a str"):
        ct.prune_prompt("model", ids, 0.2)
    with pytest.raises(ck.CertkError, match="sees less than"):
        ct.prune_prompt(
            model, {"input_ids": ids[:, :9], "attention_mask": zoo.padding(2, 9, "left")[1:]}, 0.2
        )
    with pytest.raises(ck.CertkError, match="DynamicSlidingWindowLayer: pruned caches are for"):
        # Also of a prompt shorter than the window: what is generated is not.
        ct.prune_prompt(zoo.build("mistral-window"), zoo.tokens(1, 5), 0.2)
    with pytest.raises(ck.CertkError, match="go with a guard"):
        ct.prune_prompt(model, ids, 0.2, on_breach="recall")
    assert model.config._attn_implementation == "sdpa"


@modern
@pytest.mark.parametrize("name", ["lfm2", "falcon-h1"])
def test_states_cannot_be_pruned(name: str) -> None:
    with pytest.raises(ck.CertkError, match=r"of another kind, (Linear|IndexedHybrid)"):
        ct.prune_prompt(zoo.build(name), zoo.tokens(1, 9), 0.2)


# ------------------------------------------------------------------------------------ bytes


def test_bytes_of_a_pruned_cache_and_of_the_whole() -> None:
    model, ids = zoo.peaked("llama"), zoo.tokens(1, N)
    whole = prefilled(model, ids)
    full = sum(layer.keys.nbytes + layer.values.nbytes for layer in whole.layers)
    assert full == 3 * 2 * N * 2 * 8 * 4
    pruned = ct.prune_prompt(model, ids, 0.3, 4)
    most = max(max(each.kept) for each in pruned.certificates)
    assert pruned.whole_nbytes == full
    assert pruned.nbytes == full * most // N < full
    guarded = ct.prune_prompt(model, ids, 0.3, 4, guard="codes")
    assert guarded.nbytes == pruned.nbytes + guarded.guard_bytes
    recalling = ct.prune_prompt(
        model, ids, 0.01, 4, guard="codes", on_breach="recall", promote=True
    )
    before = recalling.nbytes
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in recalling.layers)
    # The whole cache is what dropped keys are fetched from.
    assert before == held + recalling.guard_bytes + full
    ct.use(model, eps=0)
    logits_of(model, zoo.tokens(1, 3, seed=5), recalling)
    back = sum(map(sum, recalling.promoted))
    assert back > 0
    assert recalling.whole_nbytes == full * (N + 3) // N
    assert recalling.nbytes == before + 3 * full // N + back * 2 * 8 * 4


# ------------------------------------------------------------------- what a cache is fed with


def ragged(name: str, **options: Any) -> tuple[Any, Any, Any]:
    model, ids = zoo.peaked(name), zoo.tokens(1, N)
    return model, ids, ct.prune_prompt(model, ids, 0.3, 16, **options)


@modern
@pytest.mark.parametrize("length", [N, N - 18, N - 43])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_ids_no_longer_than_the_cache_are_refused(name: str, length: int) -> None:
    model, ids, pruned = ragged(name)
    ct.use(model, eps=0)
    with pytest.raises(ck.CertkError, match=r"stands for 48.*at least one token longer than"):
        model.generate(ids[:, :length], past_key_values=pruned, **GREEDY)


@modern
def test_texts_with_padding_are_refused() -> None:
    """Generation takes token 0 for padding, which a mask over other positions cannot hide."""
    model, ids, pruned = ragged("llama")
    ct.use(model, eps=0)
    more = torch.cat([ids, zoo.tokens(1, 2, seed=9)], -1)
    more[:, 5] = 0
    with pytest.raises(ck.CertkError, match=r"has padding .*attention_mask=torch\.ones_like"):
        model.generate(more, past_key_values=copy.deepcopy(pruned), **GREEDY)
    mask = torch.ones_like(more)
    model.generate(more, attention_mask=mask, past_key_values=pruned, **GREEDY)


@pytest.mark.parametrize("compact", [False, True])
def test_no_token_is_refused(compact: bool) -> None:
    model, ids, pruned = ragged("llama", compact=compact)
    if not compact:
        ct.use(model, eps=0)
    with torch.inference_mode(), pytest.raises(ck.CertkError, match="no token is fed to a pruned"):
        model(input_ids=ids[:, :0], past_key_values=pruned)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("name", FULL)
def test_beams_without_repeat_say_what_to_call(name: str, compact: bool) -> None:
    model, ids, pruned = ragged(name, compact=compact)
    if not compact:
        ct.use(model, eps=0)
    more = torch.cat([ids, zoo.tokens(1, 2, seed=9)], -1)
    with pytest.raises(ck.CertkError, match=r"call cache\.batch_repeat_interleave\(3\) first"):
        model.generate(more, past_key_values=copy.deepcopy(pruned), num_beams=3, **GREEDY)
    pruned.batch_repeat_interleave(3)
    assert model.generate(more, past_key_values=pruned, num_beams=3, **GREEDY).shape == (1, N + 7)


@modern
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("by", ["assistant", "lookup"])
@pytest.mark.parametrize("name", FULL)
def test_assisted_generation_would_fill_it_twice(name: str, by: str, compact: bool) -> None:
    model, ids, pruned = ragged(name, compact=compact)
    how = (
        {"assistant_model": copy.deepcopy(model)}
        if by == "assistant"
        else {"prompt_lookup_num_tokens": 3}
    )
    if not compact:
        ct.use(model, eps=0)
    more = torch.cat([ids, zoo.tokens(1, 2, seed=9)], -1)
    with pytest.raises(ck.CertkError, match=r"assisted generation .* feeds the whole text"):
        model.generate(more, past_key_values=pruned, **GREEDY, **how)


@pytest.mark.older
@pytest.mark.parametrize("name", FULL)
def test_what_is_right_goes_on(name: str) -> None:
    """In chunks, new ids alone under a mask of the whole text, and much text at once."""
    model, ids, pruned = ragged(name)
    ct.use(model, eps=0)
    more = torch.cat([ids, zoo.tokens(1, 3, seed=9)], -1)
    found = model.generate(more, past_key_values=copy.deepcopy(pruned), **GREEDY)
    if zoo.MODERN:
        mask = torch.ones_like(more)
        new = model.generate(
            more[:, N:], attention_mask=mask, past_key_values=copy.deepcopy(pruned), **GREEDY
        )
        assert torch.equal(new, found[:, N:])
        chunks = model.generate(
            more, past_key_values=copy.deepcopy(pruned), prefill_chunk_size=2, **GREEDY
        )
        assert torch.equal(chunks, found)
    long = torch.cat([ids, zoo.tokens(1, 150, seed=9)], -1)
    model.generate(long, past_key_values=pruned, **GREEDY)
    assert pruned.get_seq_length() == N + 154
    logits_of(model, zoo.tokens(1, 7, seed=2), pruned)
    assert pruned.get_seq_length() == N + 161


# -------------------------------------------------------------- where dropped keys come from


@pytest.mark.parametrize("role", ["keys", "values"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", ["torch", "data", "numpy"])
def test_a_source_in_memory_that_was_written_to_is_refused(
    role: str, dtype: str, how: str, tmp_path: Path
) -> None:
    """Rows that come back are those that were dropped, whoever has the cache still."""
    model = zoo.peaked("llama").to(getattr(torch, dtype))
    ids = zoo.tokens(1, N)
    cache, calls = prefilled(model, ids), seen_by(model, ids)
    queries = [call["query"][:, :, -4:] for call in calls]
    options = {"guard": "codes", "on_breach": "recall"}
    pruned = ct.prune_cache(cache, queries, 0.02, **options)
    ct.use(model, eps=0)
    with torch.inference_mode():
        model(input_ids=zoo.tokens(1, 3, seed=5), past_key_values=copy.deepcopy(pruned))
        for layer in cache.layers:
            rows = getattr(layer, role)
            if how == "torch":
                rows.neg_()
            elif how == "data":
                rows.data[..., 3] += 0.25
            else:
                bits = rows.view(torch.int16 if dtype == "bfloat16" else torch.int32)
                bits.numpy()[..., 1] ^= 1
        with pytest.raises(ck.CertkError, match=f"the {role} of the cache .* are others now"):
            model(input_ids=zoo.tokens(1, 3, seed=5), past_key_values=pruned)


def test_a_source_that_grows_is_none_that_was_written_to() -> None:
    """A `CertkCache` writes behind what was pruned."""
    model, ids = zoo.peaked("llama"), zoo.tokens(1, N)
    cache = prefilled(model, ids, past_key_values=ct.CertkCache())
    queries = [call["query"][:, :, -4:] for call in seen_by(model, ids)]
    pruned = ct.prune_cache(cache, queries, 0.02, guard="codes", on_breach="recall")
    ct.use(model, eps=0)
    with torch.inference_mode():
        for each in (cache, pruned):
            model(input_ids=zoo.tokens(1, 3, seed=5), past_key_values=each)
    assert any(call.recalled.any() for call in pruned.lost)
