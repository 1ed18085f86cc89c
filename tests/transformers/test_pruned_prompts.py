"""Pruning a prompt in memory, and what a pruned cache refuses to be fed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as hf

import certk_rs as ck
import model_zoo as zoo
from certk_rs import transformers as ct
from model_caches import last_queries, logits_of, prefilled, prompt, run, same_cache, seen_by

N = 48
FULL = ["llama", "qwen3", "gpt2"]
RECALL: dict[str, Any] = {"rest": "file", "on_breach": "recall"}
GREEDY: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
modern = pytest.mark.skipif(not zoo.MODERN, reason="what transformers 5 feeds a filled cache")


# ----------------------------------------------------------------------------- prune_prompt


@pytest.mark.older
@pytest.mark.parametrize("options", [{}, {"compact": True, "keep_last": 8}, {"rest": "file"}])
@pytest.mark.parametrize("name", FULL)
def test_a_prompt_is_pruned_as_its_cache_would_be(name: str, options: dict[str, Any]) -> None:
    model, ids = zoo.peaked(name), zoo.tokens(1, N)
    calls = seen_by(model, ids)
    # Of the forward pass that captures, as rounding differs from that which fills a cache.
    cache = hf.DynamicCache()
    for layer, call in enumerate(calls):
        cache.update(call["key"], call["value"], layer)
    wanted = ct.prune_cache(cache, last_queries(model, ids, 16), 0.2, **options)
    found = ct.prune_prompt(model, ids, 0.2, 16, **options)
    assert same_cache(found, wanted)
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
    assert same_cache(found, ct.prune_prompt(model, ids, 0.2, 1000))
    assert found.certificates[0].tail_mass_upper.shape == (6, N)
    assert ct.prune_prompt(model, ids, 0.2, 1).kept_fraction < found.kept_fraction


PADDED = {"input_ids": zoo.tokens(1, 9), "attention_mask": zoo.padding(2, 9, "left")[1:]}


@pytest.mark.parametrize(
    ("model", "inputs", "options", "says"),
    [
        *(
            ("llama", zoo.tokens(1, 9), {"window": window}, "window is")
            for window in (0, -1, 2.5, True, None)
        ),
        ("llama", zoo.tokens(2, 9), {}, "a batch of 2"),
        (None, zoo.tokens(1, 9), {}, "model is a str"),
        ("llama", PADDED, {}, "sees less than"),
        # Also of a prompt shorter than the window: what is generated is not.
        (
            "mistral-window", zoo.tokens(1, 5), {},
            "DynamicSlidingWindowLayer: pruned caches are for",
        ),
        ("llama", zoo.tokens(1, 9), {"on_breach": "recall"}, "not for rest='drop'"),
        *(
            pytest.param(
                name, zoo.tokens(1, 9), {}, r"of another kind, (Linear|IndexedHybrid)", marks=modern
            )
            for name in ("lfm2", "falcon-h1")
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_pruned_says_why(
    model: str | None, inputs: Any, options: dict[str, Any], says: str
) -> None:
    given = "model" if model is None else zoo.build(model)
    with pytest.raises(ck.CertkError, match=says):
        ct.prune_prompt(given, inputs, 0.2, **options)
    assert model is None or given.config._attn_implementation == "sdpa"


# ------------------------------------------------------------------------------------ bytes


def test_bytes_of_a_pruned_cache_and_of_the_whole() -> None:
    model, ids, whole, _ = prompt()
    full = sum(layer.keys.nbytes + layer.values.nbytes for layer in whole.layers)
    assert full == 3 * 2 * N * 2 * 8 * 4
    pruned = ct.prune_prompt(model, ids, 0.3, 4)
    kept = sum(sum(each.kept) for each in pruned.certificates)
    row = 2 * 8 * 4
    assert pruned.whole_nbytes == full
    assert pruned.nbytes == kept * row < full * pruned.kept_fraction + 1
    guarded = ct.prune_prompt(model, ids, 0.3, 4, rest="file")
    assert guarded.nbytes == pruned.nbytes + guarded.guard_bytes
    recalling = ct.prune_prompt(model, ids, 0.01, 4, promote=True, **RECALL)
    before = recalling.nbytes
    held = sum(sum(each.kept) for each in recalling.certificates) * row
    # The whole cache is what dropped keys are fetched from.
    assert before == held + recalling.guard_bytes + full
    ct.use(model, eps=0)
    logits_of(model, zoo.tokens(1, 3, seed=5), recalling)
    back = sum(map(sum, recalling.promoted))
    assert back > 0
    assert max(call.left.max() for call in recalling.lost) <= 0.01
    assert recalling.whole_nbytes == full * (N + 3) // N
    # Where heads keep different numbers there is room for sixteen more of each.
    more = sum(2 * (3 if layer.ragged is None else 16) for layer in recalling.layers)
    assert recalling.nbytes == before + (more + back) * row


# --------------------------------------------------------------------------- tokens to go on with


def ragged(name: str, compact: bool = False) -> tuple[Any, Any, Any]:
    """A model, the ids of a prompt and three more, and the pruned cache of the prompt."""
    model, ids = zoo.peaked(name), zoo.tokens(1, N)
    pruned = ct.prune_prompt(model, ids, 0.3, 16, compact=compact)
    if not compact:
        ct.use(model, eps=0)
    return model, torch.cat([ids, zoo.tokens(1, 3, seed=9)], -1), pruned


@modern
@pytest.mark.parametrize("length", [N, N - 18, N - 43])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_ids_no_longer_than_the_cache_are_refused(name: str, length: int) -> None:
    model, ids, pruned = ragged(name)
    with pytest.raises(ck.CertkError, match=r"stands for 48.*at least one token longer than"):
        model.generate(ids[:, :length], past_key_values=pruned, **GREEDY)


@modern
def test_texts_with_padding_are_refused() -> None:
    """Generation takes token 0 for padding, which a mask over other positions cannot hide."""
    model, ids, pruned = ragged("llama")
    ids[:, 5] = 0
    with pytest.raises(ck.CertkError, match=r"has padding .*attention_mask=torch\.ones_like"):
        model.generate(ids, past_key_values=copy.deepcopy(pruned), **GREEDY)
    model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=pruned, **GREEDY)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("name", FULL)
def test_no_token_and_beams_without_repeat_say_what_to_call(name: str, compact: bool) -> None:
    model, ids, pruned = ragged(name, compact)
    if name != "gpt2":  # which looks at the last token before
        with pytest.raises(ck.CertkError, match="no token is fed to a pruned"):
            run(model, ids[:, :0], past_key_values=copy.deepcopy(pruned))
    with pytest.raises(ck.CertkError, match=r"call cache\.batch_repeat_interleave\(3\) first"):
        model.generate(ids, past_key_values=copy.deepcopy(pruned), num_beams=3, **GREEDY)
    pruned.batch_repeat_interleave(3)
    assert model.generate(ids, past_key_values=pruned, num_beams=3, **GREEDY).shape == (1, N + 8)


@modern
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("name", FULL)
def test_assisted_generation_would_fill_it_twice(name: str, compact: bool) -> None:
    model, ids, pruned = ragged(name, compact)
    for how in ({"assistant_model": copy.deepcopy(model)}, {"prompt_lookup_num_tokens": 3}):
        with pytest.raises(ck.CertkError, match=r"assisted generation .* feeds the whole text"):
            model.generate(ids, past_key_values=copy.deepcopy(pruned), **GREEDY, **how)


@pytest.mark.older
@pytest.mark.parametrize("name", FULL)
def test_what_is_right_goes_on(name: str) -> None:
    """In chunks, new ids alone under a mask of the whole text, and much text at once."""
    model, ids, pruned = ragged(name)

    def generated(ids: Any, **more: Any) -> Any:
        return model.generate(ids, past_key_values=copy.deepcopy(pruned), **GREEDY, **more)

    found = generated(ids)
    if zoo.MODERN:
        new = generated(ids[:, N:], attention_mask=torch.ones_like(ids))
        assert torch.equal(new, found[:, N:])
        assert torch.equal(generated(ids, prefill_chunk_size=2), found)
    long = torch.cat([ids[:, :N], zoo.tokens(1, 150, seed=9)], -1)
    model.generate(long, past_key_values=pruned, **GREEDY)
    assert pruned.get_seq_length() == N + 154
    logits_of(model, zoo.tokens(1, 7, seed=2), pruned)
    assert pruned.get_seq_length() == N + 161


# ---------------------------------------------------------------------- sources of dropped keys


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["torch", "data", "numpy"])
def test_a_source_in_memory_that_was_written_to_is_refused(how: str, dtype: torch.dtype) -> None:
    """Rows that come back are those that were dropped, whoever has the cache still."""
    model, ids = zoo.peaked("llama").to(dtype), zoo.tokens(1, N)
    queries, more = last_queries(model, ids, 4), zoo.tokens(1, 3, seed=5)
    for role in ("keys", "values"):
        cache = prefilled(model, ids)
        pruned = ct.prune_cache(cache, queries, 0.02, **RECALL)
        certified = ct.use(copy.deepcopy(model), eps=0)
        run(certified, more, past_key_values=copy.deepcopy(pruned))
        with torch.inference_mode():
            for layer in cache.layers:
                rows = getattr(layer, role)
                if how == "torch":
                    rows.neg_()
                elif how == "data":
                    rows.data[..., 3] += 0.25
                else:
                    bits = rows.view(torch.int16 if dtype is torch.bfloat16 else torch.int32)
                    bits.numpy()[..., 1] ^= 1
        with pytest.raises(ck.CertkError, match=f"the {role} of the cache .* are others now"):
            run(certified, more, past_key_values=pruned)


def test_a_source_that_grows_is_none_that_was_written_to() -> None:
    """A `CertkCache` writes behind what was pruned."""
    model, ids = zoo.peaked("llama"), zoo.tokens(1, N)
    cache = prefilled(model, ids, past_key_values=ct.CertkCache())
    pruned = ct.prune_cache(cache, last_queries(model, ids, 4), 0.02, **RECALL)
    ct.use(model, eps=0)
    for each in (cache, pruned):
        run(model, zoo.tokens(1, 3, seed=5), past_key_values=each)
    assert any(call.recalled.any() for call in pruned.lost)
