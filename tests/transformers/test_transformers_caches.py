"""Capturing, pruning and going on: files, caches and what `generate` makes of them."""

from __future__ import annotations

import copy
import itertools
import json
import operator
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file as read

import certk_rs as ck
import model_zoo as zoo
from certk_rs import prune
from certk_rs import transformers as ct
from certk_rs._files.cache import Cache as CacheFile
from certk_rs.cli import main
from cli_fixtures import forge, opened, said, write_cache
from model_caches import (
    last_queries,
    logits_of,
    prefilled,
    prompt,
    reference_step,
    run,
    same_cache,
    seen_by,
)

N = 48
FULL = ["llama", "qwen2", "qwen3", "gpt2"]
ZEROS = [torch.zeros(1, 6, 4, 8)] * 3


def prune_file(source: Path, *arguments: str) -> Path:
    """Prune a file on the command line; return its output."""
    out = source.parent / "out"
    assert main(["prune", str(source), "-o", str(out), "-q", *arguments]) == 0
    return out / source.name


# ---------------------------------------------------------------------------------- capture


@pytest.mark.older
@pytest.mark.parametrize(
    ("name", "dtype", "queries"),
    [*((name, torch.float32, None) for name in [*FULL, "bert"]), ("llama", torch.bfloat16, 5)],
)
def test_a_captured_file_holds_what_attention_gets(
    name: str, dtype: torch.dtype, queries: int | None, tmp_path: Path
) -> None:
    model, ids = zoo.build(name).to(dtype), zoo.tokens(1, N)
    before, path = model.config._attn_implementation, tmp_path / "cache.safetensors"
    more = {} if queries is None else {"queries": queries}
    assert ct.capture(model, {"input_ids": ids}, path, **more) == [0, 1, 2]
    assert model.config._attn_implementation == before
    held = read(path)
    assert len(held) == 9
    for i, call in enumerate(seen_by(model, ids)):
        call["query"] = call["query"][:, :, -(queries or N) :]
        assert all(torch.equal(held[f"layers.{i}.{role}"], x) for role, x in call.items())
        assert held[f"layers.{i}.query"].dtype is dtype
    with CacheFile(path) as file:
        assert file.causal_offset == (None if name == "bert" else N - (queries or N))
        group = 3 if name in ("llama", "qwen2", "qwen3") else 1
        assert all(layer.heads == group * layer.kv_heads for layer in file.layers)


@pytest.mark.parametrize(
    ("name", "batch", "more", "says"),
    [
        ("llama", 2, {}, "a batch of 2"),
        ("llama", 1, {"attention_mask": zoo.padding(2, 12, "left")[1:]}, "sees less than"),
        ("mistral-window", 1, {}, "sees less than"),
        ("bart", 1, {}, "layer 0 attends twice"),
        ("llama", 1, {"queries": 0}, "queries is 0"),
    ],
)
def test_what_a_file_cannot_say_is_refused_and_leaves_nothing(
    name: str, batch: int, more: dict[str, Any], says: str, tmp_path: Path
) -> None:
    model, options = zoo.build(name), {k: more[k] for k in more if k == "queries"}
    inputs = {"input_ids": zoo.tokens(batch, 12)} | {k: more[k] for k in more.keys() - options}
    with pytest.raises(ck.CertkError, match=says):
        ct.capture(model, inputs, tmp_path / "cache.safetensors", **options)
    assert list(tmp_path.iterdir()) == []
    assert model.config._attn_implementation == "sdpa"


def test_capturing_leaves_frozen_parts_frozen(tmp_path: Path) -> None:
    model = zoo.build("gpt2").train()
    model.transformer.h[0].eval()
    ct.capture(model, zoo.tokens(1, 8), tmp_path / "cache.safetensors")
    assert [block.training for block in model.transformer.h] == [False, True, True]
    assert model.training


def test_writers_do_not_write_over_each_other(tmp_path: Path) -> None:
    """The writer that is ready first has the name. The other is told, and leaves nothing."""
    model, path = zoo.build("llama"), tmp_path / "cache.safetensors"
    written = []

    def again(*_: Any) -> None:
        ct.to_cache(*filled, path)
        written.append(path.read_bytes())

    filled = (prefilled(model, zoo.tokens(1, 8)), ZEROS)
    model.model.layers[1].register_forward_pre_hook(again)
    with pytest.raises(ck.CertkError, match="exists already"):
        ct.capture(model, zoo.tokens(1, 8), path)
    assert written == [path.read_bytes()]
    assert list(tmp_path.iterdir()) == [path]
    assert ct.from_cache(path).get_seq_length() == 8


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), "0.3", True])
def test_a_scale_that_a_file_cannot_hold_is_refused(scale: Any, tmp_path: Path) -> None:
    cache = prefilled(zoo.build("llama"), zoo.tokens(1, 8))
    for call in (
        lambda: ct.to_cache(cache, ZEROS, tmp_path / "cache", scale=scale),
        lambda: ct.prune_cache(cache, ZEROS, 0.1, scale=scale),
    ):
        with pytest.raises(ck.CertkError, match="scale is"):
            call()
    assert list(tmp_path.iterdir()) == []
    ct.to_cache(cache, ZEROS, tmp_path / "cache", scale=np.float64(0.3))
    with CacheFile(tmp_path / "cache") as file:
        assert file.scales == dict.fromkeys(range(3), 0.3)


def test_capture_and_prune_from_the_command_line(tmp_path: Path) -> None:
    model, text, out = tmp_path / "model", tmp_path / "text.txt", tmp_path / "cache.safetensors"
    zoo.letters().save_pretrained(model)
    zoo.build("llama").save_pretrained(model)
    text.write_text("It was a bright cold day in April, and the clocks were striking thirteen.")

    def capture(model: Path, out: Path) -> tuple[int, str, str]:
        asked = ("--max-tokens", 60, "--queries", 20)
        return said("capture", "--model", model, "--text", text, "-o", out, *asked)

    done = capture(model, out)
    assert (done.code, "60 tokens" in done.out) == (0, True)
    with CacheFile(out) as file:
        assert [(layer.m, layer.n) for layer in file.layers] == [(20, 60)] * 3
    pruned = prune_file(out, "--eps", "0.2")
    assert main(["verify", str(pruned), "--against", str(out), "-q"]) == 0
    assert ct.from_cache(pruned).get_seq_length() == 60
    for wrong, says in (((model, out), "exists already"), ((text, tmp_path / "x"), "no directory")):
        found = capture(*wrong)
        assert (found.code, says in found.err) == (2, True)


# ------------------------------------------------------------------------- files and caches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cache_goes_to_a_file_and_back(dtype: torch.dtype, tmp_path: Path) -> None:
    model, ids = zoo.build("llama").to(dtype), zoo.tokens(1, N)
    cache = prefilled(model, ids)
    ct.to_cache(cache, last_queries(model, ids), tmp_path / "one.safetensors")
    ct.capture(model, ids, tmp_path / "two.safetensors")
    one, two = read(tmp_path / "one.safetensors"), read(tmp_path / "two.safetensors")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    back = ct.from_cache(tmp_path / "one.safetensors")
    assert type(back) is hf.DynamicCache
    assert same_cache(back, cache)


def positions_kept(path: Path) -> list[list[np.ndarray]]:
    held = read(path)
    found = []
    for i in range(3):
        flat, ptr = held[f"layers.{i}.indices"].numpy(), held[f"layers.{i}.indptr"].numpy()
        found.append([flat[a:b].astype(np.int64) for a, b in itertools.pairwise(ptr)])
    return found


@pytest.mark.older
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("name", FULL)
def test_a_pruned_file_goes_on_where_the_text_ended(name: str, steps: int, tmp_path: Path) -> None:
    model = zoo.peaked(name)
    ids, more = zoo.tokens(1, N), zoo.tokens(1, steps, seed=5)
    source = tmp_path / "cache.safetensors"
    ct.capture(model, ids, source)
    output = prune_file(source, "--eps", "0.3")
    pruned, kept = ct.from_cache(output), positions_kept(output)
    assert isinstance(pruned, ct.PrunedCache)
    assert pruned.get_seq_length() == N
    counts = [[len(head) for head in layer] for layer in kept]
    assert [list(c.kept) for c in pruned.certificates] == counts
    assert len({count for layer in counts for count in layer}) > 1, "nothing ragged to try"
    assert all((c.tail_mass_upper <= 0.3).all() for c in pruned.certificates)
    theirs = reference_step(model, prefilled(model, ids), kept, more)
    # Positions too are in double.
    truth = reference_step(model.double(), prefilled(model, ids), kept, more)
    ours = ct.use(model.float(), eps=0)
    zoo.as_close_as(logits_of(ours, more, pruned), theirs, truth)
    assert pruned.get_seq_length() == N + steps


@pytest.mark.parametrize("name", FULL)
def test_pruning_in_memory_keeps_within_eps_and_generates(name: str) -> None:
    model, ids, cache, queries = prompt(name)
    pruned = ct.prune_cache(cache, queries, 0.1)
    assert 0 < pruned.kept_fraction < 1
    for call, told in zip(seen_by(model, ids), pruned.certificates, strict=True):
        weights, _ = zoo.dense(call | {"mask": None, "scaling": None, "module": None})
        least = 1 - weights.sort(-1, descending=True).values.cumsum(-1)
        group = weights.shape[1] // len(told.kept)
        assert (told.tail_mass_upper <= 0.1).all()
        for head in range(weights.shape[1]):
            loses = least[0, head, :, told.kept[head // group] - 1].numpy()
            assert (told.tail_mass_upper[head] >= loses - 1e-12).all()
    ct.use(model, eps=0)
    ids = torch.cat([ids, zoo.tokens(1, 1, seed=9)], -1)
    for beams in (1, 2):
        past = copy.deepcopy(pruned)
        past.batch_repeat_interleave(beams)
        options = {"max_new_tokens": 5, "do_sample": False, "num_beams": beams}
        assert model.generate(ids, past_key_values=past, **options).shape == (1, N + 6)


@pytest.mark.older
@pytest.mark.parametrize("name", FULL)
def test_a_compact_cache_needs_no_certified_attention(name: str) -> None:
    model, _, cache, queries = prompt(name)
    ragged = ct.prune_cache(cache, queries, 0.3)
    compact = ct.prune_cache(cache, queries, 0.3, compact=True)
    most = max(max(each.kept) for each in ragged.certificates)
    assert {layer.keys.shape[2] for layer in compact.layers} == {most}
    more = zoo.tokens(1, 3, seed=5)
    theirs = logits_of(model, more, copy.deepcopy(compact))
    ours = logits_of(ct.use(model, eps=0), more, compact)
    assert (theirs - ours).abs().max() <= 1e-4 * theirs.abs().max()


def test_empty_slots_do_not_go_unnoticed_in_other_attention() -> None:
    model, _, cache, queries = prompt(m=9)
    pruned = ct.prune_cache(cache, queries, 0.3)
    with pytest.raises(ck.CertkError, match="this cache needs certified attention"):
        run(model, zoo.tokens(1, 1), past_key_values=copy.deepcopy(pruned))
    # Behind the last layer none follows that could refuse.
    last = pruned.layers[-1]
    assert len(set(pruned.certificates[-1].kept)) > 1
    keys, values = last.update(last.keys[:, :, -1:], last.values[:, :, -1:])
    attend = torch.nn.functional.scaled_dot_product_attention
    out = attend(queries[-1][:, :, -1:], keys, values, enable_gqa=True)
    assert bool(out.isnan().any())


def test_a_pruned_cache_is_cropped_only_where_it_grew() -> None:
    model, _, cache, queries = prompt()
    pruned = ct.prune_cache(cache, queries, 0.3)
    run(ct.use(model, eps=0), zoo.tokens(1, 3), past_key_values=pruned)
    pruned.crop(0)
    assert pruned.get_seq_length() == N + 3
    pruned.crop(-2)
    assert pruned.get_seq_length() == N + 1
    with pytest.raises(ck.CertkError, match="only the 1 tokens"):
        pruned.crop(-2)
    with pytest.raises(ck.CertkError, match="cannot be reset"):
        pruned.reset()


def test_caches_that_cannot_be_pruned_say_why(tmp_path: Path) -> None:
    window, ids = zoo.build("mistral-window"), zoo.tokens(1, N)
    cache = prefilled(zoo.build("llama"), ids)
    windowed = prefilled(window, ids, past_key_values=hf.DynamicCache(config=window.config))
    for wrong, queries, says in (
        (windowed, ZEROS, "has a sliding window"),
        (cache, ZEROS[:2], "queries has 2 entries"),
        (cache, [torch.zeros(1, 5, 4, 8)] * 3, "layer 0: queries"),
        (cache, [torch.zeros(1, 6, N + 1, 8)] * 3, "49 queries, but 48 keys"),
    ):
        with pytest.raises(ck.CertkError, match=says):
            ct.prune_cache(wrong, queries, 0.1)
    with pytest.raises(ck.CertkError, match="is a PrunedCache"):
        ct.to_cache(ct.prune_cache(cache, ZEROS, 0.1), ZEROS, tmp_path / "cache.safetensors")


def test_a_damaged_pruned_file_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "cache.safetensors"
    ct.capture(zoo.peaked("llama"), zoo.tokens(1, N), source)
    out = prune_file(source, "--eps", "0.3")
    with pytest.raises(ck.CertkError, match="a file cannot fill them"):
        ct.from_cache(out, compact=True)
    data = out.read_bytes()
    header = json.dumps({"__metadata__": {"certk": "[" * 100_000}}).encode()
    for wrong, says in (
        (data[:-1] + bytes([data[-1] ^ 1]), "is not the one that was certified"),
        (
            data.replace(b'"layers.2.value":{', b'"layers.2.vague":{', 1),
            "is not the one that was certified",
        ),
        (len(header).to_bytes(8, "little") + header, "cannot be read"),
    ):
        out.write_bytes(wrong)
        with pytest.raises(ck.CertkError, match=says):
            ct.from_cache(out)
    out.write_bytes(data)
    forge(out, say=lambda body: body.update(format=1))
    with pytest.raises(ck.CertkError, match=r"of format 1, .* prune its input anew"):
        ct.from_cache(out)


FORGERIES: list[tuple[str, Any]] = [
    ("indptr", lambda starts: np.array([0, 2**63 - 1, -2, *starts[3:]], np.int64)),
    ("indptr", lambda starts: np.concatenate([starts[:-2], starts[-1:], starts[-2:-1]])),
    ("indptr", lambda starts: starts + 1),
    ("indptr", lambda starts: starts[1:]),
    ("indptr", lambda starts: starts.astype(np.int32)),
    ("key", lambda rows: rows[1:]),
    ("value", lambda rows: rows.reshape(-1)),
    ("value", lambda rows: rows.astype(np.float64)),
    ("tail_mass_upper", lambda upper: upper[..., :1]),
    ("indices", lambda indices: indices[:-1]),
]


def test_consistently_forged_pruned_files_are_refused(tmp_path: Path) -> None:
    """Hashes that are right, of tensors that do not fit together."""
    source = tmp_path / "x.safetensors"
    write_cache(source, kv_heads=4, heads=4)
    out = prune_file(source, "--eps", "0.3", "--proof", "full")
    assert len(ct.from_cache(out).layers) == 2
    right = out.read_bytes()
    for name, change in FORGERIES:
        place = f"layers.1.{name}"
        _, arrays = opened(out)
        forge(out, operator.methodcaller("update", {place: change(arrays[place])}))
        with pytest.raises(ck.CertkError, match=rf"{re.escape(str(out))}: tensor '?layers\.1\."):
            ct.from_cache(out)
        out.write_bytes(right)


# ---------------------------------------------------------------------- decoding by an index


@pytest.mark.older
@pytest.mark.parametrize("name", FULL)
def test_an_indexed_cache_decodes_like_a_plain_one(name: str) -> None:
    models, ids = zoo.twins(name), zoo.tokens(2, 300)
    ct.use(models[0], eps=0)
    caches = [ct.CertkCache(reserve=64), hf.DynamicCache(), hf.DynamicCache()]
    for chunk in (slice(0, 290), *(slice(i, i + 1) for i in range(290, 294))):
        pairs = zip(models, caches, strict=True)
        zoo.as_close_as(*(logits_of(model, ids[:, chunk], cache) for model, cache in pairs))
    assert caches[0].index_bytes > 0
    for layer, other in zip(caches[0].layers, caches[1].layers, strict=True):
        assert layer.keys.shape == other.keys.shape


def test_an_index_scores_few_keys_and_its_certificates_hold() -> None:
    model = ct.use(zoo.peaked("llama"), eps=0.05)
    ids, cache = zoo.tokens(1, 512), ct.CertkCache()
    run(model, ids[:, :500], past_key_values=cache)
    with zoo.spied() as calls, ct.Recorder() as recorder:
        for i in range(500, 506):
            run(model, ids[:, i : i + 1], past_key_values=cache)
    zoo.hold(calls, recorder, 0.05, slack=1e-13)
    assert all(layer.kept < 0.5 for layer in recorder.layers)


def test_an_index_follows_beams_copies_and_crops() -> None:
    ours, theirs, _ = zoo.twins("llama")
    ct.use(ours, eps=0)
    ids = zoo.tokens(1, 300)
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": 3}
    own = ours.generate(ids, past_key_values=ct.CertkCache(), **options)
    assert torch.equal(own, theirs.generate(ids, **options))

    ours = ct.use(zoo.sharpened(ours, 4.0), eps=0.05)
    cache, untouched = ct.CertkCache(), ct.CertkCache()
    for each in (cache, untouched):
        run(ours, ids, past_key_values=each)
    copied = copy.deepcopy(cache)
    run(ours, zoo.tokens(1, 5, seed=3), past_key_values=cache)
    cache.crop(-5)
    # A copy goes on like what it is a copy of: with its index, or with a new one.
    with zoo.spied() as calls:
        for each in (copied, untouched, cache, copy.deepcopy(cache)):
            run(ours, zoo.tokens(1, 1), past_key_values=each)
    for four in zip(calls[:3], calls[3:6], calls[6:9], calls[9:], strict=True):
        before = [each["key"][:, :, :300] for each in four]
        assert all(torch.equal(before[0], each) for each in before)
        for one, other in (four[:2], four[2:]):
            assert torch.equal(one["key"], other["key"])
            assert torch.equal(one["out"], other["out"])
    cache.reset()
    assert cache.get_seq_length() == 0
    with pytest.raises(ck.CertkError, match="reserve is 0"):
        ct.CertkCache(0)


def test_a_few_tokens_behind_a_long_cache_score_few_keys() -> None:
    plain = zoo.peaked("llama", 30.0)
    config = plain.config
    size = (2, 1, config.num_key_value_heads, 8192, config.head_dim)
    ours, cache = ct.use(plain, eps=0.02), ct.CertkCache()
    for layer in range(config.num_hidden_layers):
        cache.update(*torch.randn(size, generator=torch.Generator().manual_seed(layer)), layer)
    with ct.Recorder(rows=False) as recorder:
        run(ours, zoo.tokens(1, 4), past_key_values=cache)
    assert all(layer.holds for layer in recorder.layers)
    assert recorder.layers[0].scored < 0.5


# ------------------------------------------------------------------------ in memory and on disk


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_pruning_in_memory_is_pruning_on_disk(name: str, tmp_path: Path) -> None:
    _, _, cache, queries = prompt(name, m=9)
    source = tmp_path / "cache.safetensors"
    ct.to_cache(cache, queries, source)
    more = ("--keep-first", "2", "--keep-last", "3", "--proof", "full")
    disk = ct.from_cache(prune_file(source, "--eps", "0.15", *more))
    memory = ct.prune_cache(cache, queries, 0.15, keep_first=2, keep_last=3)
    for one, other in zip(disk.certificates, memory.certificates, strict=True):
        assert one.kept == other.kept
        # On the disk they are F32, rounded up, and of rows far from their budget from float32
        # scores: upper ends of the same masses, a little wider.
        assert (one.tail_mass_upper >= other.tail_mass_upper * (1 - 1e-6)).all()
        assert np.allclose(one.tail_mass_upper, other.tail_mass_upper, rtol=1e-4, atol=0)
    assert same_cache(disk, memory)


@pytest.mark.parametrize("granularity", ["head", "layer"])
def test_pruned_files_of_every_level_of_proof_are_read(tmp_path: Path, granularity: str) -> None:
    """The same cache; what is known of its queries is what the file tells."""
    source = tmp_path / "x.safetensors"
    write_cache(source, kv_heads=2, heads=4, m=3)
    caches = {}
    for level in ("full", "compact", "none"):
        prune(source, tmp_path / level, 0.3, granularity=granularity, proof=level)
        caches[level] = ct.from_cache(tmp_path / level / source.name)
        assert same_cache(caches["full"], caches[level])
    assert not any(torch.equal(x.keys.nan_to_num(), x.values) for x in caches["full"].layers)
    for full, compact, none in zip(*(each.certificates for each in caches.values()), strict=True):
        assert full.kept == compact.kept == none.kept
        assert full.tail_mass_upper.shape == (4, 3)
        assert compact.tail_mass_upper.tolist() == full.tail_mass_upper.max(axis=1).tolist()
        assert none.tail_mass_upper is None
