"""Caches by a model's config: an index where attention is full, all else as transformers has it."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers.cache_utils import DynamicLayer

import certk_rs as ck
import model_zoo as zoo
from certk_rs import transformers as ct
from model_caches import logits_of, run

modern = pytest.mark.skipif(not zoo.MODERN, reason="before 5 they have caches of their own")
mapped = pytest.mark.skipif(os.name == "nt", reason="files are mapped as POSIX does")
WINDOWED = ["gemma3n", "gemma3-window"]
# One of each kind of state beside full attention.
KINDS = ["lfm2", "falcon-h1", "zamba2", "gemma3-window"]


def generated(model: Any, ids: Any, cache: Any, **more: Any) -> Any:
    return model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False, **more)


def states(layer: Any) -> list[Any]:
    """The tensors of a layer, in an order."""
    found = []
    for _, value in sorted(vars(layer).items()):
        each = value.values() if isinstance(value, dict) else (value,)
        found += [part for part in each if isinstance(part, torch.Tensor)]
    return found


@modern
@pytest.mark.parametrize("name", zoo.MIXED)
def test_tokens_and_states_are_those_of_a_dynamic_cache(name: str) -> None:
    model, plain, _ = zoo.twins(name)
    ids = zoo.tokens(1, 300)
    theirs = hf.DynamicCache(config=model.config)
    wanted = generated(plain, ids, theirs)
    ours = ct.CertkCache(config=ct.use(model, eps=0).config)
    assert torch.equal(generated(model, ids, ours), wanted)
    assert len(ours.layers) == len(theirs.layers)
    indexed = 0
    for own, other in zip(ours.layers, theirs.layers, strict=True):
        if "FullAttention" in type(other).__name__ or type(other) is DynamicLayer:
            assert own.index.shape[2] == own.get_seq_length() == other.get_seq_length() == 307
            assert torch.allclose(own.keys, other.keys, atol=1e-3)
            indexed += 1
        else:
            assert type(own) is type(other)
            assert [each.shape for each in states(own)] == [each.shape for each in states(other)]
    assert indexed
    assert ours.whole_nbytes == sum(each.nbytes for x in theirs.layers for each in states(x))
    assert ours.whole_nbytes < ours.nbytes
    assert 0 < ours.index_bytes < ours.nbytes
    # Without a config it says what is missing.
    if name not in WINDOWED:
        with pytest.raises(ck.CertkError, match=r"CertkCache\(config=model\.config\)"):
            run(model, ids[:, :9], past_key_values=ct.CertkCache())
    if name in KINDS:
        beams = generated(plain, ids, hf.DynamicCache(config=model.config), num_beams=3)
        cache = ct.CertkCache(config=model.config)
        assert torch.equal(generated(model, ids, cache, num_beams=3), beams)


@modern
@pytest.mark.parametrize("name", zoo.MIXED)
def test_certificates_are_true(name: str) -> None:
    """Against float64, in layers of every kind that attend, behind keys that were made up."""
    model = zoo.peaked(name, 30.0)
    ct.use(model, eps=0.05)
    cache = ct.CertkCache(config=model.config)
    few = 0
    logits_of(model, zoo.tokens(1, 1800), cache)
    for token in range(2, 6):
        with zoo.spied() as calls, ct.Recorder() as recorder:
            logits_of(model, torch.full((1, 1), token), cache)
        zoo.hold(calls, recorder, 0.05)
        few += sum(int((told.k < 0.5 * told.n).sum()) for told in recorder.calls)
    assert few > 0, "nothing was dropped"


@modern
def test_windows_hold_what_they_show() -> None:
    """31 keys of Gemma 3's window of 32 beside all of the layer of full attention."""
    model = ct.use(zoo.build("gemma3-window"), eps=0)
    ids = zoo.tokens(1, 2001)
    with_config, without = ct.CertkCache(config=model.config), ct.CertkCache()
    for cache in (with_config, without):
        for part in (ids, zoo.tokens(1, 1)):
            logits = logits_of(model, part, cache)
    held = [layer.keys.shape[2] for layer in with_config.layers]
    assert held == [31] * 5 + [2002]
    assert [layer.keys.shape[2] for layer in without.layers] == [2002] * 6
    assert with_config.nbytes < without.nbytes / 4
    assert with_config.get_seq_length() == without.get_seq_length() == 2002
    assert torch.isfinite(logits).all()


@modern
@pytest.mark.parametrize("name", KINDS)
def test_copies_go_on_alone(name: str) -> None:
    model = ct.use(zoo.build(name), eps=0)
    cache = ct.CertkCache(config=model.config)
    logits_of(model, zoo.tokens(1, 300), cache)
    for again in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert again.index_bytes == cache.index_bytes > 0
        logits_of(model, zoo.tokens(1, 40, seed=3), copy.deepcopy(cache))
        more, own = zoo.tokens(1, 5, seed=4), copy.deepcopy(cache)
        assert torch.equal(*(logits_of(model, more, each) for each in (own, again)))


@modern
@mapped
@pytest.mark.parametrize("name", KINDS)
def test_what_is_in_files_is_as_in_memory(name: str, tmp_path: Path) -> None:
    model = ct.use(zoo.build(name), eps=0.05)
    ids, step = zoo.tokens(2, 300), torch.tensor([[5], [9]])
    options: tuple[dict[str, Any], ...] = ({}, {"offload": tmp_path}, {})
    memory, files, plain = (ct.CertkCache(config=model.config, **more) for more in options)
    found = []
    for cache in (memory, files, plain):
        logits_of(model, ids, cache)
        # States are reordered with keys, wherever those are.
        swapped = cache is not plain and name not in WINDOWED
        if swapped:
            cache.reorder_cache(torch.tensor([1, 0]))
        logits = logits_of(model, step.flip(0) if swapped else step, cache)
        found.append(logits.flip(0) if swapped else logits)
    assert torch.equal(*found[:2])
    assert torch.allclose(found[0], found[2], atol=1e-2 * found[2].abs().max())
    assert memory.offloaded_bytes == 0 < files.offloaded_bytes
    assert files.whole_nbytes == memory.whole_nbytes
    assert files.nbytes == memory.nbytes - sum(
        layer.held_bytes for layer in memory.layers if hasattr(layer, "held_bytes")
    )


def test_what_is_no_config_is_refused() -> None:
    model = zoo.build("llama")
    with pytest.raises(ck.CertkError, match=r"config is a LlamaForCausalLM; pass model\.config"):
        ct.CertkCache(config=model)
    cache = ct.CertkCache(config=hf.LlamaConfig(num_hidden_layers=2))
    with pytest.raises(ck.CertkError, match="layer 2 has keys, and the config of this cache 2"):
        run(ct.use(model, eps=0), zoo.tokens(1, 5), past_key_values=cache)


def test_a_plain_config_changes_nothing(tmp_path: Path) -> None:
    model = ct.use(zoo.build("llama"), eps=0)
    ids, cache = zoo.tokens(1, 300), ct.CertkCache(config=model.config)
    assert torch.equal(generated(model, ids, cache), generated(model, ids, ct.CertkCache()))
    cache.save(tmp_path / "session")
    loaded = ct.CertkCache.load(tmp_path / "session")
    assert loaded.whole_nbytes == cache.whole_nbytes < loaded.nbytes < cache.nbytes


@modern
def test_sessions_hold_full_attention_alone(tmp_path: Path) -> None:
    model = ct.use(zoo.build("lfm2"), eps=0)
    cache = ct.CertkCache(config=model.config)
    generated(model, zoo.tokens(1, 9), cache)
    with pytest.raises(ck.CertkError, match=r"layer 0 is a LinearAttentionLayer.*pickle"):
        cache.save(tmp_path / "session")
    assert not list(tmp_path.iterdir())


@pytest.mark.older
@pytest.mark.skipif(zoo.MODERN, reason="from 5 on there are caches for them")
def test_layers_that_an_older_transformers_has_no_cache_for() -> None:
    config = hf.Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"])
    with pytest.raises(ck.CertkError, match=r"layers of conv: .* install 5 or newer"):
        ct.CertkCache(config=config)


@pytest.mark.older
def test_windows_under_any_transformers() -> None:
    """A window in every layer, of a family that all versions have."""
    model = ct.use(zoo.build("mistral-window"), eps=0)
    ids = zoo.tokens(1, 60)
    cache = ct.CertkCache(config=model.config)
    found = generated(model, ids, cache)
    assert torch.equal(found, generated(model, ids, hf.DynamicCache(config=model.config)))
    assert [layer.keys.shape[2] for layer in cache.layers] == [6] * 3
    assert cache.index_bytes == 0
