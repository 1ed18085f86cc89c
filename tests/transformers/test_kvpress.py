"""The press for kvpress: its certificates are true, what it drops is gone, and nothing else is."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import flint
import kvpress
import numpy as np
import pytest
import torch
import transformers as hf
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import certk_rs as ck
import doc_pages as pages
import model_caches as caches
import model_zoo as zoo
from certk_rs import transformers as ct
from certk_rs.kvpress import CertkPress
from fresh_process import run_python
from model_caches import pressed

pytestmark = pytest.mark.older

N = 60
NAMES = ["llama", "mistral", "phi3", "qwen2", "qwen3"]
WAYS = [False, True]

Kept = list[list[list[np.ndarray]]]
"""Kept positions by layer, sequence and kv head."""


@pytest.fixture
def bits_200() -> Iterator[None]:
    before, flint.ctx.prec = flint.ctx.prec, 200
    yield
    flint.ctx.prec = before


def kept_in(cache: Any, dense: list[dict[str, Any]]) -> Kept:
    """Return the keys left to attention: by the mask, or by looking rows up among all keys."""
    found: Kept = []
    for layer, call in zip(cache.layers, dense, strict=True):
        if layer.keys.shape[2] == call["key"].shape[2] and hasattr(layer, "_dropped"):
            found.append([[np.flatnonzero(~g) for g in b] for b in layer._dropped.numpy()])
            assert torch.equal(layer.keys, call["key"])
            continue
        sequences = []
        for b in range(layer.keys.shape[0]):
            heads = []
            for g in range(layer.keys.shape[1]):
                same = (layer.keys[b, g][:, None] == call["key"][b, g]).all(-1)
                assert (same.sum(-1) == 1).all()
                rows = same.int().argmax(-1)
                assert torch.equal(layer.values[b, g], call["value"][b, g][rows])
                heads.append(rows.numpy())
            sequences.append(heads)
        found.append(sequences)
    return found


def ball(x: float) -> Any:
    return flint.arb(flint.fmpq(*float(x).as_integer_ratio()))


def lost(query: Any, keys: Any, scale: float, kept: np.ndarray, m: int) -> list[Any]:
    """Return the true losses of the last m queries (m, d), as Arb balls."""
    n = len(keys)
    q, k = (
        flint.arb_mat([[ball(x) for x in row] for row in t.double().tolist()])
        for t in (query, keys)
    )
    scores = q * k.transpose()
    masses = []
    for i in range(m):
        weights = [(ball(scale) * scores[i, j]).exp() for j in range(n - m + i + 1)]
        gone = sorted(set(range(len(weights))) - set(kept.tolist()))
        masses.append(sum((weights[j] for j in gone), flint.arb(0)) / sum(weights, flint.arb(0)))
    return masses


@pytest.mark.parametrize("compact", WAYS)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in NAMES), ("llama", "bfloat16"), ("qwen3", "float16")],
)
@pytest.mark.usefixtures("bits_200")
def test_certificates_are_true(name: str, dtype: str, compact: bool) -> None:
    """Of the queries that attention gets, by Arb, in every head of two sequences."""
    model, ids, m, eps = zoo.peaked(name).to(getattr(torch, dtype)), zoo.tokens(2, N), 6, 0.15
    press = CertkPress(eps, window=m, compact=compact)
    dense = caches.seen_by(model, ids)
    cache = pressed(press, model, ids)
    kept = kept_in(cache, dense)
    scale = model.model.layers[0].self_attn.scaling
    assert [c.layer for c in press.certificates] == [0, 1, 2]
    for told, call, sets in zip(press.certificates, dense, kept, strict=True):
        heads, kv_heads = call["query"].shape[1], call["key"].shape[1]
        assert told.n == N
        assert told.kept.shape == (2, kv_heads)
        assert told.tail_mass_upper.shape == (2, heads, m)
        assert (told.tail_mass_upper <= eps).all()
        for b, h in itertools.product(range(2), range(heads)):
            g = h // (heads // kv_heads)
            if not compact:
                assert told.kept[b, g] == len(sets[b][g])
            assert told.kept[b, g] <= len(sets[b][g])
            query, keys = call["query"][b, h, -m:], call["key"][b, g]
            masses = lost(query, keys, scale, sets[b][g], m)
            for mass, upper in zip(masses, told.tail_mass_upper[b, h], strict=True):
                assert mass <= ball(upper)
                if not compact:
                    assert float(upper) <= float(mass.mid()) + 1e-10, "far from what is lost"
    sizes = [len(g) for layer in kept for b in layer for g in b]
    assert 0 < press.compression_ratio == pytest.approx(1 - np.mean(sizes) / N)
    assert (len(set(sizes)) == 1) == compact


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("name", NAMES)
def test_decoding_is_that_over_the_kept_keys(name: str, steps: int) -> None:
    model, ids, more = zoo.peaked(name), zoo.tokens(1, N), zoo.tokens(1, steps, seed=5)
    dense, full = caches.seen_by(model, ids), caches.prefilled(model, ids)
    where = torch.arange(N, N + steps)[None]
    for compact in WAYS:
        cache = pressed(CertkPress(0.2, window=8, compact=compact), model, ids)
        kept = [layer[0] for layer in kept_in(cache, dense)]
        found = [
            caches.logits_of(switched, more, copy.deepcopy(cache), position_ids=where)
            for switched in (model, ct.use(copy.deepcopy(model), eps=0))
        ]
        theirs = caches.reference_step(model, full, kept, more)
        exact = copy.deepcopy(model).double()
        truth = caches.reference_step(exact, caches.prefilled(exact, ids), kept, more)
        for logits in found:
            zoo.as_close_as(logits, theirs, truth)
        assert (caches.reference_step(model, full, whole(kept), more) - theirs).abs().max() > 1e-2


def whole(kept: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    return [[np.arange(N) for _ in heads] for heads in kept]


@pytest.mark.parametrize("beams", [1, 3])
def test_generate_goes_on_with_what_is_kept(beams: int) -> None:
    model, ids = zoo.peaked("llama"), zoo.tokens(2, N)
    press = CertkPress(0.3, window=8)
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": beams}
    with press(model):
        cache = hf.DynamicCache()
        out = model.generate(ids, past_key_values=cache, **options)
    assert out.shape == (2, N + 6)
    assert press.compression_ratio > 0.3
    if beams > 1:
        return
    every = kept_in(pressed(press, model, ids), caches.seen_by(model, ids))
    for b in range(2):
        alone = ids[b : b + 1]
        kept = [layer[b] for layer in every]
        more = out[b : b + 1, N:]
        logits = caches.reference_step(model, caches.prefilled(model, alone), kept, more[:, :-1])
        assert torch.equal(logits.argmax(-1), more[:, 1:])


def test_eps_zero_keeps_all_and_changes_no_bit() -> None:
    model, ids, more = zoo.peaked("qwen2"), zoo.tokens(1, N), zoo.tokens(1, 1, seed=5)
    plain = caches.prefilled(model, ids)
    for compact in WAYS:
        press = CertkPress(0.0, compact=compact)
        cache = pressed(press, model, ids)
        assert press.compression_ratio == 0
        assert all((c.kept == N).all() and not c.tail_mass_upper.any() for c in press.certificates)
        one = caches.logits_of(model, more, cache)
        assert torch.allclose(
            one, caches.logits_of(model, more, copy.deepcopy(plain)), rtol=1e-5, atol=1e-5
        )
        for layer, same in zip(cache.layers, plain.layers, strict=True):
            assert torch.equal(layer.keys[:, :, :N], same.keys)


def test_first_last_and_window_are_what_they_say() -> None:
    model, ids = zoo.peaked("llama"), zoo.tokens(1, N)
    dense = caches.seen_by(model, ids)
    cache = pressed(CertkPress(0.4, window=1, keep_first=3, keep_last=5), model, ids)
    for layer in kept_in(cache, dense):
        for heads in layer[0]:
            assert {0, 1, 2, *range(N - 5, N)} <= set(heads.tolist())
    for window, m in ((None, N), (1000, N), (1, 1)):
        press = CertkPress(0.4, window=window)
        pressed(press, model, ids)
        assert all(c.tail_mass_upper.shape == (1, 6, m) for c in press.certificates)
    wide, narrow = CertkPress(0.1, window=40), CertkPress(0.1, window=1)
    for press in (wide, narrow):
        pressed(press, model, ids)
    assert wide.compression_ratio < narrow.compression_ratio


def test_nothing_is_left_behind() -> None:
    model, ids = zoo.peaked("llama"), zoo.tokens(1, N)
    before = caches.prefilled(model, ids).layers[-1].keys
    pressed(CertkPress(0.2), model, ids)
    function = ALL_ATTENTION_FUNCTIONS["sdpa"]
    pressed(CertkPress(0.2), model, ids)
    with (
        pytest.raises(ZeroDivisionError),
        CertkPress(0.2)(model),
    ):
        1 / 0  # noqa: B018
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is function
    assert not any(layer.self_attn._forward_hooks for layer in model.model.layers)
    assert torch.equal(caches.prefilled(model, ids).layers[-1].keys, before)
    # What is registered later is not hidden by what was put back.
    pressed(CertkPress(0.2), ct.use(model, eps=0), ids)
    with zoo.spied() as calls:
        caches.prefilled(model, ids)
    assert len(calls) == 3


# ------------------------------------------------------------------------------- the pipeline


@pytest.fixture(scope="module")
def pipeline() -> Any:
    tokenizer = zoo.letters(bos_token="<s>", model_max_length=512)
    return hf.pipeline("kv-press-text-generation", model=zoo.peaked("llama"), tokenizer=tokenizer)


CONTEXT = "Call me Ishmael. Some years ago, never mind how long precisely, I thought I would sail."


@pytest.mark.parametrize(
    "press",
    [
        CertkPress(0.2, window=16),
        CertkPress(0.2, window=16, compact=True),
        kvpress.SnapKVPress(0.5, window_size=16),
    ],
    ids=["certk", "certk-compact", "snapkv"],
)
def test_the_pipeline_runs_presses_side_by_side(pipeline: Any, press: Any) -> None:
    asked = ["who?", "how long ago was it?"]
    options = {"press": press, "max_new_tokens": 8}
    together = pipeline(CONTEXT, questions=asked, **options)["answers"]
    alone = [pipeline(CONTEXT, question=question, **options)["answer"] for question in asked]
    assert together == alone, "an answer was left in the cache"
    assert 0.2 < press.compression_ratio < 1


def test_the_pipeline_at_eps_zero_answers_as_without_a_press(pipeline: Any) -> None:
    asked = {"question": "who?", "max_new_tokens": 12}
    plain = pipeline(CONTEXT, **asked)
    for compact in WAYS:
        assert pipeline(CONTEXT, press=CertkPress(0.0, compact=compact), **asked) == plain


def test_the_page_runs(pipeline: Any) -> None:
    given = {
        "model": pipeline.model, "tokenizer": pipeline.tokenizer, "context": CONTEXT,
        "question": "who?",
    }  # fmt: skip
    pages.run_page("docs/kvpress.md", given)


def test_the_page_says_when_fake_keys_do_not_vanish() -> None:
    from kvpress.attention_patch import search_hyperplane

    torch.manual_seed(0)
    for queries in (64, 8, 4):
        failed = 0
        for _ in range(200):
            q = torch.randn(1, queries, 128)
            fake = search_hyperplane(q.clone())
            weights = ((q @ fake[..., None]) * 128**-0.5).exp()
            failed += bool((weights > 0).any())
        assert failed == (198 if queries == 64 else 0)


# ----------------------------------------------------------------------------------- refusals


def refused(says: str, model: Any, press: Any = None, **more: Any) -> None:
    given = {"input_ids": zoo.tokens(2, N), "past_key_values": hf.DynamicCache()} | more
    with pytest.raises(ck.CertkError, match=says), press or CertkPress(0.1, window=8)(model):
        caches.run(model, given.pop("input_ids"), **given)


def eager() -> Any:
    model = zoo.build("llama")
    model.set_attn_implementation("eager")
    return model


def gemma2() -> Any:
    more = {"num_key_value_heads": 2, "head_dim": 12, "layer_types": ["full_attention"] * 2}
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(**zoo.SMALL, **more)).eval()


def training() -> Any:
    model = zoo.build("llama")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    return model.train()


@pytest.mark.parametrize(
    ("says", "model", "more"),
    [
        *(
            ("padding", "llama", {"attention_mask": zoo.padding(2, N, side)})
            for side in ("left", "right")
        ),
        ("sliding window of 7", "mistral-window", {}),
        ("sliding window", "gemma3", {}),
        ("where GPT2LMHeadModel has its layers", "gpt2", {}),
        ("is in float64", lambda: zoo.build("llama").double(), {}),
        ("'eager' passes", eager, {}),
        ("asks for softcap", gemma2, {}),
        ("at random", training, {}),
        (
            "use attn_implementation|is a StaticLayer", "llama",
            {"past_key_values": lambda config: hf.StaticCache(config=config, max_cache_len=N + 4)},
        ),
        ("is a IndexedLayer", "llama", {"past_key_values": lambda _: ct.CertkCache()}),
        ("is a NoneType", "llama", {"use_cache": False, "past_key_values": None}),
    ],
)  # fmt: skip
def test_unsupported_models_masks_and_caches_are_refused(
    says: str, model: Any, more: dict[str, Any]
) -> None:
    made = zoo.build(model) if isinstance(model, str) else model()
    refused(says, made, **{k: x(made.config) if callable(x) else x for k, x in more.items()})


def test_a_mask_that_hides_nothing_is_none() -> None:
    model, ids = zoo.peaked("llama"), zoo.tokens(2, N)
    causal = torch.ones(N, N, dtype=torch.bool).tril().expand(2, 1, N, N)
    for mask in (torch.ones(2, N), causal, torch.zeros(2, 1, N, N).masked_fill(~causal, -1e38 * 3)):
        press, plain = CertkPress(0.1), CertkPress(0.1)
        pressed(plain, model, ids)
        with torch.inference_mode(), press(model):
            model(input_ids=ids, attention_mask=mask, past_key_values=hf.DynamicCache())
        for one, other in zip(press.certificates, plain.certificates, strict=True):
            assert np.array_equal(one.kept, other.kept)


def test_a_window_longer_than_the_model_is_none() -> None:
    model = zoo.build("mistral")
    model.config.sliding_window = 4096
    press = CertkPress(0.1, window=8)
    pressed(press, model, zoo.tokens(1, N))
    assert len(press.certificates) == 3


def test_other_presses_around_it_are_refused() -> None:
    model, inner = zoo.build("llama"), CertkPress(0.1, window=8)
    composed = kvpress.ComposedPress([inner, kvpress.KnormPress(0.5)])
    refused("works on its own", model, composed(model))
    both = kvpress.PrefillDecodingPress(
        prefilling_press=inner, decoding_press=kvpress.DecodingPress(kvpress.KnormPress())
    )
    refused("works on its own", model, both(model))
    with inner(model):
        refused("at work already", model, inner(model))
    with pytest.raises(AssertionError):
        kvpress.AdaKVPress(inner)


def test_gemma_3_is_masked_where_it_attends_to_all() -> None:
    text = zoo.SMALL | {
        "num_hidden_layers": 6, "num_key_value_heads": 2, "head_dim": 12,
        "sliding_window": 16, "initializer_range": zoo.SPREAD, "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 8, "patch_size": 4,
    }  # fmt: skip
    torch.manual_seed(0)
    config = hf.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4,
        image_token_index=90, boi_token_index=91, eoi_token_index=92,
    )  # fmt: skip
    model = hf.Gemma3ForConditionalGeneration(config).eval()
    press, ids = CertkPress(0.2, window=8), zoo.tokens(1, N) % 90
    cache = pressed(press, model, ids)
    assert [c.layer for c in press.certificates] == [5]
    assert 0 < press.compression_ratio < 1
    with torch.inference_mode():
        assert model(input_ids=ids[:, :1], past_key_values=cache).logits.isfinite().all()
    refused("leaves 5 layers", model, CertkPress(0.2, compact=True)(model))


def test_a_masked_cache_is_not_attended_to_without_its_mask() -> None:
    model, ids, more = zoo.peaked("llama"), zoo.tokens(1, N), zoo.tokens(1, 1)
    cache = pressed(CertkPress(0.2), model, ids)
    model.set_attn_implementation("eager")
    with pytest.raises(ck.CertkError, match="has been changed since the prompt"):
        caches.prefilled(model, more, past_key_values=copy.deepcopy(cache))
    model.set_attn_implementation("sdpa")
    after = kvpress.DecodingPress(kvpress.KnormPress(), compression_interval=1, target_size=30)
    with torch.inference_mode(), after(model):
        model(input_ids=more, past_key_values=cache)
        with pytest.raises(ck.CertkError, match="the keys were replaced"):
            model(input_ids=more, past_key_values=cache)
    with pytest.raises(ck.CertkError, match="cannot be reset"):
        cache.reset()


def test_a_masked_cache_is_cropped_selected_and_repeated() -> None:
    model, ids, more = zoo.peaked("llama"), zoo.tokens(2, N), zoo.tokens(2, 3, seed=7)
    first = pressed(CertkPress(0.2, window=8), model, ids)

    def step(cache: Any, rows: Any) -> Any:
        return caches.logits_of(model, rows, cache)

    plain = step(copy.deepcopy(first), more)
    # Batches of another size are multiplied in another order, and rounded by the largest.
    rounding = 1e-5 * float(plain.abs().max())
    grown = copy.deepcopy(first)
    step(grown, zoo.tokens(2, 5))
    grown.crop(N)
    assert torch.equal(step(grown, more), plain)
    swapped = copy.deepcopy(first)
    swapped.reorder_cache(torch.tensor([1, 0]))
    assert torch.allclose(step(swapped, more.flip(0)), plain.flip(0), rtol=0, atol=rounding)
    doubled = copy.deepcopy(first)
    doubled.batch_repeat_interleave(2)
    out = step(doubled, more.repeat_interleave(2, 0))
    assert torch.allclose(out[::2], plain, rtol=0, atol=rounding)
    one = copy.deepcopy(first)
    one.batch_select_indices(torch.tensor([1]))
    assert torch.allclose(step(one, more[1:]), plain[1:], rtol=0, atol=rounding)
    # What is cropped away and appended anew is another key, and is not hidden.
    short = copy.deepcopy(first)
    short.crop(N - 10)
    step(short, ids[:, -10:])
    assert all(not layer._dropped[..., N - 10 :].any() for layer in short.layers)


def test_dropped_keys_are_hidden_whatever_the_mask() -> None:
    model, ids = zoo.peaked("llama"), zoo.tokens(2, N)
    cache, m = pressed(CertkPress(0.2, window=8), model, ids), 3
    layer, total = cache.layers[0], N + m
    heads, groups = 6, layer.keys.shape[1]
    layer.update(torch.zeros(2, groups, m, 8), torch.zeros(2, groups, m, 8))
    seen = torch.ones(2, heads, m, total, dtype=torch.bool)
    for b, h in itertools.product(range(2), range(heads)):
        seen[b, h, :, :N] = ~layer._dropped[b, h // (heads // groups)]
    causal = torch.tensor([[j <= N + i for j in range(total)] for i in range(m)])
    query = torch.zeros(2, heads, m, 8)
    assert torch.equal(layer.hide(query, None), seen & causal)
    assert torch.equal(layer.hide(query, causal.expand(2, 1, m, total)), seen & causal)
    least = torch.finfo(torch.float32).min
    additive = torch.zeros(2, 1, m, total).masked_fill(~causal, least)
    found = layer.hide(query, additive)
    assert torch.equal(found == 0, seen & causal)
    assert torch.equal(found == least, ~(seen & causal))
    with pytest.raises(ck.CertkError, match="has no room"):
        layer.hide(query, torch.ones(2, total))


# ------------------------------------------------------------- presses of others, under certk


def scored(**more: Any) -> Any:
    return kvpress.KnormPress(0.5, **more)


# Presses that need a ratio alone, those around another one, and those with more to say.
SIMPLE = [
    *("KnormPress", "CURPress", "CompactorPress", "KeyDiffPress", "LeverageScorePress"),
    *("NonCausalAttnPress", "StreamingLLMPress", "TOVAPress"),
]
AROUND = [
    *("AdaKVPress", "CriticalAdaKVPress", "CriticalKVPress", "KeyRerotationPress", "MergingPress"),
]
SNAP: dict[str, Any] = {"compression_ratio": 0.5, "window_size": 8}
SETTLED: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "BlockPress": ([scored], {"block_size": 10}),
    "CAMPress": ([scored], {"compression_interval": 2, "target_size": 30}),
    "CapPress": ([0.5], {"n_future_positions": 16}),
    "ChunkKVPress": ([lambda: kvpress.SnapKVPress(**SNAP)], {"chunk_length": 5}),
    "ChunkPress": ([scored], {"chunk_length": 20}),
    "ComposedPress": ([lambda: [scored(), kvpress.ThinKPress(0.5, window_size=8)]], {}),
    "CompressionRatioDecodingPress": ([scored], {"compression_interval": 2}),
    "DMSPress": ([scored], {"threshold": -1.5, "sliding_window_size": 8, "decoding": True}),
    "DecodingPress": ([scored], {"compression_interval": 2, "target_size": 30}),
    "EntropyGatedChunkKVPress": ([lambda: kvpress.SnapKVPress(**SNAP)], {}),
    "ExpectedAttentionPress": ([0.5], {"n_future_positions": 16}),
    "KVComposePress": ([], {"structured": False, "compression_ratio": 0.5}),
    "LagKVPress": ([0.5], {"lag_size": 8}),
    "PerLayerCompressionPress": ([scored, [0.2, 0.4, 0.6]], {}),
    "PrefillDecodingPress": ([scored, lambda: other("DecodingPress")], {}),
    "PyramidKVPress": ([0.5], {"window_size": 8, "beta": 5}),
    "RandomPress": ([0.5], {"seed": 1}),
    "SimLayerKVPress": ([0.0], {"n_recent": 10, "n_initial": 2}),
    "SnapKVPress": ([], SNAP),
    "ThinKPress": ([0.5], {"window_size": 8}),
}
OTHERS = [*SIMPLE, *AROUND, *SETTLED, "DuoAttentionPress", "FinchPress", "KVzipPress"]


def other(name: str) -> Any:
    """Make a press of kvpress."""
    if name == "DuoAttentionPress":
        # Its pattern of heads is downloaded for known models.
        press = kvpress.DuoAttentionPress(0.5)
        press.post_init_from_model = lambda _model: None
        press.sink_size, press.recent_size = 2, 10
        press.streaming_mask = torch.tensor([[True, False], [False, True], [True, True]])
        return press
    if name == "FinchPress":
        press = kvpress.FinchPress(0.5)
        press.delimiter_token, press.delimiter_token_id, press.window_size = "<s>", 50, 4
        return press
    given, more = SETTLED.get(name, ([scored if name in AROUND else 0.5], {}))
    return getattr(kvpress, name)(*(x() if callable(x) else x for x in given), **more)


# They say so themselves, or certified attention does; or they need files that are downloaded.
REFUSED = {"ObservedAttentionPress", "KVgradPress"}
DOWNLOADING = {
    *{"ExpectedAttentionStatsPress", "FastKVzipPress", "KVzapPress", "LUKVPress"},
    *{"QFilterPress", "RestoreKVPress"},
}
NO_PRESS = {"BasePress", "ScorerPress", "KVPressTextGenerationPipeline"}


def test_every_press_that_kvpress_exports_is_in_a_list() -> None:
    assert set(kvpress.__all__) == {*OTHERS, *REFUSED, *DOWNLOADING, *NO_PRESS}


@pytest.fixture
def twins(pipeline: Any, tmp_path: Any) -> tuple[Any, Any]:
    """A model under sdpa, and under certified attention; some presses load its tokenizer."""
    model = zoo.peaked("llama")
    pipeline.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    pipeline.tokenizer.save_pretrained(tmp_path)
    model.config.name_or_path = str(tmp_path)
    model.config.head_dim = model.model.layers[0].self_attn.head_dim
    return model, ct.use(copy.deepcopy(model), eps=0)


def decoded(press: Any, model: Any, steps: list[int]) -> Any:
    """Logits of the steps after a prompt under a press, which some follow while decoding."""
    more, cache, n, out = zoo.tokens(1, sum(steps), seed=5), hf.DynamicCache(), N, []
    torch.manual_seed(0)
    decoding = any(word in type(press).__name__ for word in ("Decoding", "DMS", "CAM"))
    with torch.no_grad(), contextlib.ExitStack() as stack:
        if press is not None:
            stack.enter_context(press(model))
        model(input_ids=zoo.tokens(1, N), past_key_values=cache)
        if not decoding:
            stack.close()
        for m in steps:
            where = torch.arange(n, n + m)[None]
            chunk = more[:, n - N : n - N + m]
            out.append(model(input_ids=chunk, past_key_values=cache, position_ids=where).logits)
            n += m
    return torch.cat(out, 1)


@pytest.mark.parametrize(
    "name",
    [
        *(name for name in OTHERS if name not in SIMPLE[1:]),
        # They differ in scores alone.
        *(pytest.param(name, marks=pytest.mark.heavy) for name in SIMPLE[1:]),
    ],
)
def test_presses_of_others_do_what_they_do_under_sdpa(name: str, twins: tuple[Any, Any]) -> None:
    model, ours = twins
    with ct.Recorder() as recorder:
        found = decoded(other(name), ours, [1, 1, 1, 1])
    theirs, without = (decoded(press, model, [1, 1, 1, 1]) for press in (other(name), None))
    scale = theirs.abs().max()
    assert (found - theirs).abs().max() < 1e-4 * scale
    assert (found - without).abs().max() > 1e-2 * scale, "the press did nothing"
    assert [layer.layer for layer in recorder.layers] == [0, 1, 2]


@pytest.mark.parametrize("name", ["AdaKVPress", "CriticalAdaKVPress"])
def test_head_wise_presses_are_obeyed_exactly_by_several_queries(
    name: str, twins: tuple[Any, Any]
) -> None:
    """For which kvpress itself need not find a key that all dislike."""
    model, ours = twins
    ids, more, m = zoo.tokens(1, N), zoo.tokens(1, 12, seed=5), 12
    full = caches.prefilled(model, ids)
    cache = pressed(other(name), ours, ids)
    kept = []
    for layer in ours.model.layers:
        gone = torch.zeros(2, N, dtype=torch.bool)
        _, heads, places = layer.self_attn.masked_key_indices
        gone[heads, places] = True
        kept.append([np.flatnonzero(~each) for each in gone.numpy()])
    assert len({len(each) for heads in kept for each in heads}) > 1
    with torch.inference_mode(), ct.Recorder() as recorder:
        where = torch.arange(N, N + m)[None]
        found = ours(input_ids=more, past_key_values=cache, position_ids=where).logits
    theirs = caches.reference_step(model, full, kept, more)
    exact = copy.deepcopy(model).double()
    truth = caches.reference_step(exact, caches.prefilled(exact, ids), kept, more)
    zoo.as_close_as(found, theirs, truth)
    assert all((call.n < N + m).any() for call in recorder.calls)


def test_a_new_prompt_forgets_what_a_press_has_dropped(twins: tuple[Any, Any]) -> None:
    model, ours = twins
    decoded(other("AdaKVPress"), ours, [1])
    assert torch.allclose(
        decoded(None, ours, [1, 2]), decoded(None, model, [1, 2]), rtol=1e-4, atol=1e-4
    )


def test_what_a_press_dropped_of_another_cache_is_an_error(twins: tuple[Any, Any]) -> None:
    _, ours = twins
    short = caches.prefilled(ours, zoo.tokens(1, 10))
    decoded(other("AdaKVPress"), ours, [1])
    with pytest.raises(ck.CertkError, match=r"LlamaAttention\.masked_key_indices does not go"):
        caches.prefilled(ours, zoo.tokens(1, 1), past_key_values=short)


def test_presses_that_cannot_run_say_so(twins: tuple[Any, Any]) -> None:
    _, ours = twins
    with pytest.raises(AssertionError, match="eager"):
        decoded(kvpress.ObservedAttentionPress(0.5), ours, [1])
    with pytest.raises(ck.CertkError, match="gradients do not flow"):
        decoded(kvpress.KVgradPress(0.5), ours, [1])
    # Layers of different lengths, for which a model's one mask cannot serve several queries.
    for name in ("PerLayerCompressionPress", "PyramidKVPress"):
        with pytest.raises(ck.CertkError, match="LlamaAttention: attention_mask has shape"):
            decoded(other(name), ours, [3])


@pytest.mark.heavy  # a process that imports everything anew
def test_kvpress_may_be_imported_later() -> None:
    """It wraps the attention functions that it finds, and ours is taken out again."""
    code = """
import sys
import torch, transformers, model_zoo as zoo
torch.set_num_threads(1)
from certk_rs import transformers as ct
model = zoo.peaked("llama")
ours = ct.use(zoo.peaked("llama"), eps=0)
assert "kvpress" not in sys.modules
import kvpress
ids, more = zoo.tokens(1, 60), zoo.tokens(1, 4, seed=5)
def go(model, press, m):
    cache = transformers.DynamicCache()
    with torch.no_grad():
        with press(model):
            model(input_ids=ids, past_key_values=cache)
        return model(input_ids=more[:, :m], past_key_values=cache).logits
press = kvpress.AdaKVPress(kvpress.KnormPress(0.5))
plain = kvpress.KnormPress(0.0)
for each in (plain, press):
    one, other = go(ours, each, 1), go(model, each, 1)
    assert (one - other).abs().max() < 1e-4 * other.abs().max()
assert (go(ours, press, 1) - go(ours, plain, 1)).abs().max() > 1e-2
assert go(ours, press, 4).isfinite().all()
from certk_rs.kvpress import CertkPress
go(ours, CertkPress(0.1), 1)
assert go(ours, press, 4).isfinite().all()
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
