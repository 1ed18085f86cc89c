"""Models under certified attention: the same as sdpa at eps = 0, and as certified at eps > 0."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
import transformers as hf

import certk_rs as ck
import model_zoo as zoo
from certk_rs import transformers as ct
from certk_rs.transformers.attention import certified_attention

DECODERS, ENCODERS = sorted(zoo.DECODERS), sorted(zoo.ENCODERS)
N = 40
PADDED = [(1, "none"), (3, "left"), (3, "right")]


def run(model: Any, ids: Any, **more: Any) -> Any:
    with torch.inference_mode():
        return model(input_ids=ids, **more)


def positions(mask: Any) -> Any:
    return (mask.cumsum(-1) - 1).clamp(min=0)


# ----------------------------------------------------------------------------------- eps = 0


@pytest.mark.older
@pytest.mark.parametrize(("batch", "side"), PADDED)
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_at_eps_zero_is_sdpa(name: str, batch: int, side: str) -> None:
    """Prefill, a second chunk of several tokens, and single steps."""
    ours, theirs, truth = zoo.twins(name)
    ct.use(ours, eps=0)
    ids = zoo.tokens(batch, N)
    mask = zoo.padding(batch, N, side)
    caches: list[Any] = [hf.DynamicCache(config=model.config) for model in (ours, theirs, truth)]
    start = 0
    for stop in (N - 8, N - 3, N - 2, N - 1, N):
        if side == "right" and start:
            break  # nothing is appended behind padding
        if side == "right":
            stop = N
        chunk, logits = slice(start, stop), []
        for model, cache in zip((ours, theirs, truth), caches, strict=True):
            more = {} if side == "none" else {"attention_mask": mask[:, :stop]}
            where = positions(mask)[:, chunk]
            found = run(model, ids[:, chunk], past_key_values=cache, position_ids=where, **more)
            logits.append(found.logits[mask[:, chunk] == 1])
        zoo.as_close_as(*logits)
        start = stop


@pytest.mark.parametrize(("batch", "side"), PADDED)
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_at_eps_zero_is_sdpa(name: str, batch: int, side: str) -> None:
    ours, theirs, truth = zoo.twins(name)
    ct.use(ours, eps=0)
    ids, mask = zoo.tokens(batch, N), zoo.padding(batch, N, side)
    found = [run(model, ids, attention_mask=mask).logits for model in (ours, theirs, truth)]
    zoo.as_close_as(*(logits[mask == 1] for logits in found))


@pytest.mark.older
@pytest.mark.parametrize(
    ("name", "more"),
    [
        *((name, {}) for name in DECODERS),
        ("qwen2", {"num_beams": 3}),
        ("llama", {"cache_implementation": "static", "disable_compile": True}),
    ],
)
def test_generation_at_eps_zero_is_that_of_sdpa(name: str, more: dict[str, Any]) -> None:
    ours, theirs, _ = zoo.twins(name)
    ct.use(ours, eps=0)
    ids, mask = zoo.tokens(3, 12), zoo.padding(3, 12, "left")
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False} | more
    assert torch.equal(ours.generate(ids, **options), theirs.generate(ids, **options))


@pytest.mark.older
@pytest.mark.parametrize("name", sorted(zoo.OTHERS))
def test_other_architectures_are_sdpa_or_refused(name: str) -> None:
    models = zoo.twins(name)
    ids, mask = zoo.tokens(2, 24), zoo.padding(2, 24, "left")
    if name in ("bloom", "falcon"):
        with pytest.raises(ck.CertkError, match="does not take its attention") as error:
            ct.use(models[0], eps=0)
        assert type(models[0]).__name__ in str(error.value)
        assert "BERT" not in str(error.value)
        assert "transformers 5 on" not in str(error.value)
        return
    ct.use(models[0], eps=0)
    with ct.Recorder() as recorder:
        found = [run(model, ids, attention_mask=mask).logits for model in models]
    # Bart's decoder is not told of the padding.
    zoo.as_close_as(*(logits if name == "bart" else logits[mask == 1] for logits in found))
    assert len(recorder.calls) == {"gemma3": 6, "phi3": 3, "gpt_neox": 3, "bart": 6}.get(name, 2)


def as_sdpa(kind: Any, config: Any, **inputs: Any) -> None:
    """Compare a model of a config at eps = 0 with itself as it is, and in float64."""
    torch.manual_seed(0)
    ours = kind(copy.deepcopy(config)).eval()
    theirs, truth = copy.deepcopy(ours), copy.deepcopy(ours).double()
    ct.use(ours, eps=0)
    wide = {k: x.double() if torch.is_tensor(x) and x.is_floating_point() else x
            for k, x in inputs.items()}  # fmt: skip
    with torch.inference_mode():
        found = [model(**inputs)[0] for model in (ours, theirs)]
        zoo.as_close_as(*found, truth(**wide)[0])


@pytest.mark.skipif(not zoo.MODERN, reason="before transformers 5 it does not run in float64")
def test_a_family_that_knows_eager_only_gets_the_masks_of_eager() -> None:
    """NLLB-MoE: its decoder relies on causal masks that are there, its routers read them."""
    more = {"num_experts": 4, "encoder_sparse_step": 1, "decoder_sparse_step": 1}
    config = hf.NllbMoeConfig(**zoo.PAIRED, **more, decoder_start_token_id=1)
    ids = zoo.tokens(2, 12)
    more = {"attention_mask": zoo.padding(2, 12, "right"), "decoder_input_ids": ids[:, :7]}
    as_sdpa(hf.NllbMoeForConditionalGeneration, config, input_ids=ids, **more)


def test_without_a_mask_a_family_without_sdpa_sees_everything() -> None:
    """Before transformers 5 the vision tower of Chinese CLIP does not say that it is not causal."""
    picture = {"image_size": 32, "patch_size": 8, "initializer_range": zoo.SPREAD}
    config = hf.ChineseCLIPVisionConfig(**zoo.SMALL, **picture)
    as_sdpa(hf.ChineseCLIPVisionModel, config, pixel_values=torch.randn(2, 3, 32, 32))


def test_arguments_come_in_the_order_of_the_interface() -> None:
    """As who wraps attention functions hands them on: kvpress gives dropout by position."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    theirs = list(inspect.signature(sdpa_attention_forward).parameters)
    ours = inspect.signature(certified_attention).parameters
    by_position = [n for n, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert by_position == theirs[: len(by_position)]
    assert by_position[5:7] == ["dropout", "scaling"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes_stay_what_they_are(dtype: str) -> None:
    model, _, truth = zoo.twins("llama")
    kind = getattr(torch, dtype)
    model = model.to(kind)
    plain = zoo.twins("llama")[1].to(kind)
    ct.use(model, eps=0)
    ids = zoo.tokens(2, N)
    ours, theirs = run(model, ids).logits, run(plain, ids).logits
    assert ours.dtype is kind
    zoo.as_close_as(ours, theirs, run(truth, ids).logits)


# ----------------------------------------------------------------------------------- eps > 0


@pytest.mark.older
@pytest.mark.parametrize(
    ("side", "eps"), [("none", 0.2), ("left", 0.2), ("right", 0.2), ("left", 0.01)]
)
@pytest.mark.parametrize("name", DECODERS + ENCODERS)
def test_every_certificate_of_every_layer_is_true(name: str, side: str, eps: float) -> None:
    model = ct.use(zoo.sharpened(zoo.build(name)), eps=eps, even_if_slower=eps == 0.2)
    ids, mask = zoo.tokens(2, N), zoo.padding(2, N, side)
    more: dict[str, Any] = {} if side == "none" else {"attention_mask": mask}
    with zoo.spied() as calls, ct.Recorder() as recorder:
        if name in ENCODERS:
            run(model, ids, **more)
        else:
            cache = run(model, ids, use_cache=True, **more).past_key_values
            if side != "right":
                if more:
                    more["attention_mask"] = torch.cat([mask, mask[:, -1:]], -1)
                run(model, ids[:, :1], past_key_values=cache, **more)
    kept = zoo.hold(calls, recorder, eps, slack=1e-13)
    if eps == 0.2:
        assert kept < 0.8, "nothing was dropped, so nothing was tried"
    layers = recorder.layers
    assert [layer.layer for layer in layers] == [0, 1, 2]
    assert all(layer.holds and layer.tail_mass_upper <= eps for layer in layers)
    assert all(layer.calls == len(calls) // 3 for layer in layers)


def test_a_budget_on_the_output_is_kept() -> None:
    model = ct.use(zoo.build("llama"), out_tol=0.05)
    with zoo.spied() as calls, ct.Recorder() as recorder:
        run(model, zoo.tokens(2, N))
    zoo.hold(calls, recorder, 1.0, slack=1e-13)
    assert all((told.error_bound <= 0.05).all() for told in recorder.calls)
    assert all(layer.holds and layer.budget == 0.05 for layer in recorder.layers)


# -------------------------------------------------------------------------------- the switch


def test_the_budget_of_a_context_goes_before_that_of_the_model() -> None:
    model = ct.use(zoo.build("llama"), eps=0.3)
    ids = zoo.tokens(1, N)
    with ct.Recorder() as recorder:
        run(model, ids)
        with ct.budget(eps=0):
            run(model, ids)
            with ct.budget(eps=0.1):
                run(model, ids)
        run(model, ids)
    told = [call.budget.eps for call in recorder.calls]
    assert told == [0.3] * 3 + [0] * 3 + [0.1] * 3 + [0.3] * 3
    assert all((c.tail_mass_upper <= c.budget.eps).all() for c in recorder.calls)


def test_a_budget_that_nobody_spent_is_an_error() -> None:
    model = zoo.build("llama")
    model.set_attn_implementation("sdpa")
    with pytest.raises(ck.CertkError, match="no certified attention ran"), ct.budget(eps=0.1):
        run(model, zoo.tokens(1, 8))


def test_an_error_inside_a_budget_is_not_covered_up() -> None:
    with pytest.raises(KeyError, match="mine"), ct.budget(eps=0.1):
        raise KeyError("mine")


def test_a_model_loaded_under_the_name_needs_a_budget(tmp_path: Any) -> None:
    zoo.build("llama").save_pretrained(tmp_path)
    ct.register()
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="certk").eval()
    with pytest.raises(ck.CertkError, match="no budget for LlamaAttention"):
        run(model, zoo.tokens(1, 8))
    with ct.budget(eps=0.1):
        run(model, zoo.tokens(1, 8))


def test_the_budget_is_not_saved_and_goes_along_with_copies(tmp_path: Any) -> None:
    model = ct.use(zoo.build("llama"), eps=0.1)
    model.save_pretrained(tmp_path)
    saved = (tmp_path / "config.json").read_text()
    assert "certk" not in saved
    with ct.Recorder() as recorder:
        run(copy.deepcopy(model), zoo.tokens(1, 8))
    assert [layer.budget for layer in recorder.layers] == [0.1] * 3


def test_switching_back() -> None:
    model, plain, _ = zoo.twins("llama")
    ct.use(model, eps=0.3)
    assert model.config._attn_implementation == "certk"
    model.set_attn_implementation("sdpa")
    ids = zoo.tokens(1, N)
    assert torch.equal(run(model, ids).logits, run(plain, ids).logits)


@pytest.mark.older
@pytest.mark.skipif(zoo.MODERN, reason="from transformers 5 on BERT asks the registry")
@pytest.mark.parametrize("name", [*ENCODERS, "albert", "distilbert", "modernbert"])
def test_the_bert_family_before_transformers_5_is_an_error(name: str) -> None:
    """The families that `model_zoo.build` skips there are errors."""
    with pytest.raises(ck.CertkError, match="this family does from transformers 5 on"):
        ct.use((zoo.ENCODERS | zoo.OTHERS)[name](), eps=0.1)


def test_a_model_that_does_not_ask_the_registry_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = zoo.build("llama")
    for kind in (type(model), type(model.model)):
        monkeypatch.setattr(kind, "_can_set_attn_implementation", classmethod(lambda _: False))
    with pytest.raises(ck.CertkError, match="does not take its attention from"):
        ct.use(model, eps=0.1)


def _git() -> Any:
    config = hf.GitConfig(**zoo.SMALL)
    config.vision_config = hf.GitVisionConfig(**zoo.SMALL, image_size=32, patch_size=8)
    return hf.GitForCausalLM(config)


def _informer() -> Any:
    config = hf.InformerConfig(prediction_length=5, context_length=20, d_model=32)
    return hf.InformerModel(config)


@pytest.mark.parametrize("build", [_git, _informer], ids=["git", "informer"])
def test_a_model_of_which_a_part_computes_attention_by_itself_is_an_error(build: Any) -> None:
    model = build()
    parts = [part for part in model.modules() if isinstance(part, hf.PreTrainedModel)]
    before = [part.config._attn_implementation for part in parts]
    with pytest.raises(ck.CertkError, match=r"computes attention by itself|does not take its"):
        ct.use(model, eps=0)
    assert [part.config._attn_implementation for part in parts] == before


def test_a_model_loaded_under_the_name_is_judged_too(tmp_path: Any) -> None:
    config = hf.BigBirdPegasusConfig(**zoo.PAIRED, attention_type="original_full")
    hf.BigBirdPegasusForConditionalGeneration(config).save_pretrained(tmp_path)
    ct.register()
    load = hf.AutoModelForSeq2SeqLM.from_pretrained
    model = load(tmp_path, attn_implementation="certk").eval()
    with pytest.raises(ck.CertkError, match="compute attention by themselves"), ct.budget(eps=0):
        run(model, zoo.tokens(1, 8))


def test_a_model_that_is_refused_late_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("bart")
    model.set_attn_implementation("sdpa")
    encoder = model.get_encoder()
    encoder.config = copy.deepcopy(encoder.config)
    monkeypatch.setattr(type(model), "set_attn_implementation", _all_but_the_encoder)
    with pytest.raises(ck.CertkError, match=r"BartEncoder|cannot be switched"):
        ct.use(model, eps=0)
    for part in (model, encoder, model.get_decoder()):
        assert part.config._attn_implementation == "sdpa"


def _all_but_the_encoder(model: Any, name: str) -> None:
    model.config._attn_implementation = name
    model.get_encoder().config._attn_implementation = "eager"


@pytest.mark.skipif(not hasattr(hf, "Gemma4TextConfig"), reason="too old for Gemma 4")
def test_layers_that_run_on_the_last_queries_only_stay_causal() -> None:
    config = hf.Gemma4TextConfig(
        **(zoo.SMALL | {"num_hidden_layers": 4}),
        num_key_value_heads=2, head_dim=12, global_head_dim=12,
        num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=64, hidden_size_per_layer_input=8, vocab_size_per_layer_input=97,
        initializer_range=zoo.SPREAD,
    )  # fmt: skip
    for last in (1, 3):
        as_sdpa(hf.Gemma4ForCausalLM, config, input_ids=zoo.tokens(1, 24), logits_to_keep=last)


def test_contexts_may_end_in_any_order() -> None:
    model, ids = ct.use(zoo.build("llama"), eps=0), zoo.tokens(1, 8)

    def steps(eps: float) -> Iterator[ct.Recorder]:
        with ct.budget(eps=eps), ct.Recorder() as recorder:
            run(model, ids)
            yield recorder

    first, second = steps(0.5), steps(0.4)
    early, late = next(first), next(second)
    first.close()
    run(model, ids)
    assert [len(each.calls) for each in (early, late)] == [6, 6]
    second.close()
    with ct.Recorder() as recorder:
        run(model, ids)
    assert [layer.budget for layer in recorder.layers] == [0] * 3
    assert len(late.calls) == 6


def test_a_context_may_end_in_another_task() -> None:
    model, ids = ct.use(zoo.build("llama"), eps=0), zoo.tokens(1, 8)

    async def steps() -> AsyncIterator[None]:
        with ct.budget(eps=0.5), ct.Recorder():
            run(model, ids)
            yield

    async def main() -> list[float]:
        begun = steps()
        await anext(begun)
        await asyncio.create_task(begun.aclose())
        with ct.Recorder() as recorder:
            run(model, ids)
        return [layer.budget for layer in recorder.layers]

    assert asyncio.run(main()) == [0] * 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "neither given"),
        ({"eps": 0.1, "out_tol": 0.1}, "both given"),
        ({"eps": 1.0}, "eps is 1.0"),
        ({"eps": -0.1}, "eps is -0.1"),
        ({"eps": float("nan")}, "eps is nan"),
        ({"eps": "much"}, "eps is a str"),
        ({"out_tol": float("inf")}, "out_tol is inf"),
    ],
)
def test_bad_budgets(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ck.CertkError, match=says):
        ct.use(zoo.build("llama"), **options)
    with pytest.raises(ck.CertkError, match=says), ct.budget(**options):
        pass


def test_a_model_without_attention_is_refused() -> None:
    config = hf.MambaConfig(
        vocab_size=zoo.VOCABULARY, hidden_size=32, num_hidden_layers=1, state_size=4
    )
    with pytest.raises(ck.CertkError, match="MambaModel has no attention"):
        ct.use(hf.MambaModel(config), eps=0.1)


# ---------------------------------------------------------------------------------- recorder


def test_the_table_has_a_line_per_layer() -> None:
    model = ct.use(zoo.build("bert"), eps=0.1)
    with ct.Recorder() as recorder:
        run(model, zoo.tokens(2, N))
    lines = recorder.table().splitlines()
    assert len(lines) == 4
    assert str(recorder).splitlines()[:4] == lines
    assert lines[0].split()[:3] == ["layer", "calls", "rows"]
    assert lines[1].split()[:3] == ["0", "1", str(2 * 4 * N)]
    assert lines[1].split()[-1] == "yes"
    assert float(lines[1].split()[4]) >= recorder.layers[0].tail_mass_upper


def test_a_recorder_says_why_nothing_was_dropped() -> None:
    model, ids = zoo.sharpened(zoo.build("bart")), zoo.tokens(2, N)

    def told(**options: Any) -> str:
        ct.use(model, **options)
        with ct.Recorder() as recorder:
            run(model, ids)
        return str(recorder)

    assert "even_if_slower=True" in told(eps=0.1)
    assert "even_if_slower" not in told(eps=0.1, even_if_slower=True)
    assert "even_if_slower" not in told(eps=0)
    with ct.Recorder() as recorder:
        pass
    assert "No certified attention ran" in str(recorder)


def test_a_recorder_without_rows_keeps_the_summary_only() -> None:
    model = ct.use(zoo.build("bert"), eps=0.1)
    ids = zoo.tokens(2, N)
    with ct.Recorder() as full, ct.Recorder(rows=False, error_bounds=False) as brief:
        run(model, ids)
    assert brief.calls == []
    assert [layer.error_bound for layer in brief.layers] == [None] * 3
    for one, other in zip(full.layers, brief.layers, strict=True):
        assert (one.tail_mass_upper, one.kept) == (other.tail_mass_upper, other.kept)
    with pytest.raises(ck.CertkError, match="entered before"), full:
        pass


# --------------------------------------------------------------------- what is not supported


def refuses(model: Any, says: str, **more: Any) -> None:
    ct.use(model, eps=0.1)
    with pytest.raises(ck.CertkError, match=says):
        run(model, zoo.tokens(1, 12), **more)


def test_dropout_in_training_is_refused_and_none_is_fine() -> None:
    model = ct.use(zoo.build("llama").train(), eps=0.1)
    run(model, zoo.tokens(1, 12))
    refuses(zoo.build("gpt2").train(), "dropout is 0.1 in GPT2Attention")


def test_gradients_are_refused() -> None:
    model = ct.use(zoo.build("llama"), eps=0.1)
    with pytest.raises(ck.CertkError, match="gradients do not flow"):
        model(input_ids=zoo.tokens(1, 12))


def test_tangents_and_traces_are_refused() -> None:
    from torch.autograd import forward_ad
    from torch.fx.experimental.proxy_tensor import make_fx

    model, ids = ct.use(zoo.build("llama"), eps=0), zoo.tokens(1, 12)
    embedded = model.get_input_embeddings()(ids).detach()
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(embedded, embedded)
        with pytest.raises(ck.CertkError, match="tangents"):
            model(inputs_embeds=dual, use_cache=False)
    # Either would take the outputs of the first run for constants.
    attend = functools.partial(certified_attention, model.model.layers[0].self_attn)
    vectors = torch.randn(1, 6, 4, 8)
    for trace in (lambda call: make_fx(call)(vectors), lambda call: torch.jit.trace(call, vectors)):
        with torch.no_grad(), pytest.raises(ck.CertkError, match="cannot be traced"):
            trace(lambda x: attend(x, x, x, None)[0])


def test_output_attentions_is_refused() -> None:
    refuses(zoo.build("llama"), "output_attentions", output_attentions=True)
    if zoo.MODERN:  # before 5, GPT-2 keeps the wish to itself, and returns no weights
        refuses(zoo.build("gpt2"), "output_attentions", output_attentions=True)
    refuses(zoo.build("bert"), "output_attentions", output_attentions=True)


def refused_at_once_and_late(model: Any, at_once: str, late: str, tmp_path: Any) -> None:
    """By `use`, which names the class, and where the model was loaded under the name."""
    with pytest.raises(ck.CertkError, match=at_once):
        ct.use(model, eps=0.1)
    model.save_pretrained(tmp_path)
    ct.register()
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="certk").eval()
    with pytest.raises(ck.CertkError, match=late), ct.budget(eps=0.1):
        run(loaded, zoo.tokens(1, 12))


def test_softcap_is_refused(tmp_path: Any) -> None:
    sizes = zoo.SMALL | {"num_key_value_heads": 2, "head_dim": 12}
    model = hf.Gemma2ForCausalLM(hf.Gemma2Config(**sizes)).eval()
    at_once = "Gemma2Attention, a part of Gemma2ForCausalLM, soft-caps"
    refused_at_once_and_late(model, at_once, "Gemma2Attention asks for softcap", tmp_path)
    # Without a cap it is a model as any other.
    config = hf.Gemma2Config(**sizes, attn_logit_softcapping=None)
    as_sdpa(hf.Gemma2ForCausalLM, config, input_ids=zoo.tokens(1, 12))


def test_a_model_with_sinks_can_be_captured(tmp_path: Any) -> None:
    model, _, truth = zoo.twins("gpt-oss")
    ids = zoo.tokens(1, 6)
    ct.capture(model, ids, tmp_path / "cache.safetensors")
    # Capturing computed what the model computes.
    ct.use(model, eps=0)
    zoo.as_close_as(
        run(model, ids).logits, run(zoo.twins("gpt-oss")[1], ids).logits, run(truth, ids).logits
    )


@pytest.mark.parametrize(
    "mode", [torch.inference_mode, pytest.param(torch.no_grad, marks=pytest.mark.heavy)]
)
def test_a_compiled_model_is_that_of_eager_mode(mode: Any) -> None:
    """Certified attention and the cache run between the graphs, in prefill and by an index."""
    torch.compiler.reset()
    model = ct.use(zoo.peaked("llama"), eps=0.1, even_if_slower=True)
    # One layer takes a third of the time to compile.
    del model.model.layers[1:]
    model.config.num_hidden_layers = 1
    compiled, ids, found = torch.compile(model, backend="aot_eager"), zoo.tokens(1, 300), []
    for each in (compiled, model):
        cache = ct.CertkCache(config=model.config)
        with ct.Recorder() as recorder, mode():
            for part in (ids[:, :298], ids[:, 298:299], ids[:, 299:]):
                logits = each(part, past_key_values=cache).logits
        kept = [(layer.layer, layer.kept) for layer in recorder.layers]
        found.append((logits, cache.index_bytes, kept))
    assert torch.allclose(found[0][0], found[1][0], rtol=1e-4, atol=1e-4)
    assert found[0][1:] == found[1][1:]
    assert found[0][1] > 0
    compiled.model.layers[0].self_attn.attention_dropout = 0.5
    compiled.train()
    with pytest.raises(ck.CertkError, match="dropout"), mode():
        compiled(ids[:, :9])


@pytest.mark.older
def test_position_bias_is_refused(tmp_path: Any) -> None:
    config = hf.T5Config(
        vocab_size=zoo.VOCABULARY, d_model=48, d_kv=12, d_ff=64, num_layers=2, num_heads=4
    )
    model = hf.T5EncoderModel(config).eval()
    if zoo.MODERN:
        at_once = "T5Attention, a part of T5EncoderModel, adds a bias"
        refused_at_once_and_late(model, at_once, "asks for position_bias", tmp_path)
        return
    with pytest.raises(ck.CertkError, match="T5EncoderModel does not take its attention"):
        ct.use(model, eps=0.1)


def test_unknown_arguments_are_refused() -> None:
    refuses(zoo.build("llama"), "asks for tilt", tilt=0.5)


def test_an_additive_bias_as_mask_is_refused_and_zeros_and_minima_are_read() -> None:
    ours, theirs, truth = zoo.twins("llama")
    ct.use(ours, eps=0)
    ids = zoo.tokens(2, 12)
    # Row i sees the keys of its own parity up to i: no run of keys.
    seen = torch.ones(12, 12, dtype=torch.bool).tril()
    seen &= (torch.arange(12)[:, None] - torch.arange(12)) % 2 == 0
    seen = seen.expand(2, 1, 12, 12)
    for mask in (seen, torch.zeros(2, 1, 12, 12).masked_fill(~seen, torch.finfo().min)):
        as_double = mask.double() if mask.is_floating_point() else mask
        logits = [run(model, ids, attention_mask=mask).logits for model in (ours, theirs)]
        zoo.as_close_as(*logits, run(truth, ids, attention_mask=as_double).logits)
    bias = -0.5 * torch.arange(12.0).expand(2, 1, 12, 12)
    with pytest.raises(ck.CertkError, match="takes no attention bias"):
        run(ours, ids, attention_mask=bias)
    with pytest.raises(ck.CertkError, match="does not broadcast"):
        run(ours, ids, attention_mask=seen[..., :-1])


def test_packed_sequences_do_not_see_each_other() -> None:
    ours, theirs, truth = zoo.twins("llama")
    ct.use(ours, eps=0)
    ids = zoo.tokens(1, 20)
    where = torch.cat([torch.arange(8), torch.arange(12)])[None]
    logits = [
        run(model, ids, position_ids=where, use_cache=False).logits
        for model in (ours, theirs, truth)
    ]
    zoo.as_close_as(*logits)
