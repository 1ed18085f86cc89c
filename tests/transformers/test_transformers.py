"""Models under certified attention: the same as sdpa at eps = 0, and as certified at eps > 0."""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

import pytest
import torch
import transformers as hf

import certk_rs as ck
import model_zoo as zoo
from certk_rs import transformers as ct
from certk_rs.transformers.attention import certified_attention
from model_caches import run

DECODERS, ENCODERS = sorted(zoo.DECODERS), sorted(zoo.ENCODERS)
N = 40
PADDED = [(1, "none"), (3, "left"), (3, "right")]


# ----------------------------------------------------------------------------------- eps = 0


@pytest.mark.older
@pytest.mark.parametrize(("batch", "side"), PADDED)
@pytest.mark.parametrize("name", DECODERS + ENCODERS)
def test_a_model_at_eps_zero_is_sdpa(name: str, batch: int, side: str) -> None:
    """Of a decoder prefill, a second chunk of several tokens, and single steps."""
    models = zoo.twins(name)
    ct.use(models[0], eps=0)
    ids, mask = zoo.tokens(batch, N), zoo.padding(batch, N, side)
    # Nothing is appended behind padding.
    stops = (N,) if side == "right" or name in ENCODERS else (N - 8, N - 3, N - 2, N - 1, N)
    caches = [hf.DynamicCache(config=model.config) for model in models]
    start = 0
    for stop in stops:
        chunk, logits = slice(start, stop), []
        for model, cache in zip(models, caches, strict=True):
            more = {} if side == "none" else {"attention_mask": mask[:, :stop]}
            if name in DECODERS:
                where = (mask.cumsum(-1) - 1).clamp(min=0)[:, chunk]
                more |= {"past_key_values": cache, "position_ids": where}
            logits.append(run(model, ids[:, chunk], **more).logits[mask[:, chunk] == 1])
        zoo.as_close_as(*logits)
        start = stop


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


def _nllb() -> tuple[Any, dict[str, Any]]:
    """A family that knows eager only: its decoder relies on masks, its routers read them."""
    more = {"num_experts": 4, "encoder_sparse_step": 1, "decoder_sparse_step": 1}
    config = hf.NllbMoeConfig(**zoo.PAIRED, **more, decoder_start_token_id=1)
    ids, mask = zoo.tokens(2, 12), zoo.padding(2, 12, "right")
    inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, :7]}
    return hf.NllbMoeForConditionalGeneration(config), inputs


def _clip() -> tuple[Any, dict[str, Any]]:
    """Before transformers 5 this vision tower does not say that it is not causal."""
    picture = {"image_size": 32, "patch_size": 8, "initializer_range": zoo.SPREAD}
    config = hf.ChineseCLIPVisionConfig(**zoo.SMALL, **picture)
    return hf.ChineseCLIPVisionModel(config), {"pixel_values": torch.randn(2, 3, 32, 32)}


def _gemma2() -> tuple[Any, dict[str, Any]]:
    """Without a cap on its scores it is a model as any other."""
    more = {"num_key_value_heads": 2, "head_dim": 12, "attn_logit_softcapping": None}
    config = hf.Gemma2Config(**zoo.SMALL, **more)
    return hf.Gemma2ForCausalLM(config), {"input_ids": zoo.tokens(1, 12)}


def _gemma4(last: int) -> tuple[Any, dict[str, Any]]:
    """Layers that run on the last queries only."""
    if not hasattr(hf, "Gemma4TextConfig"):
        pytest.skip("too old for Gemma 4")
    config = hf.Gemma4TextConfig(
        **(zoo.SMALL | {"num_hidden_layers": 4}),
        num_key_value_heads=2, head_dim=12, global_head_dim=12,
        num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=64, hidden_size_per_layer_input=8, vocab_size_per_layer_input=97,
        initializer_range=zoo.SPREAD,
    )  # fmt: skip
    inputs = {"input_ids": zoo.tokens(1, 24), "logits_to_keep": last}
    return hf.Gemma4ForCausalLM(config), inputs


@pytest.mark.parametrize("name", ["nllb", "clip", "gemma2", "gemma4-1", "gemma4-3"])
def test_a_family_of_its_own_manner_is_sdpa(name: str) -> None:
    if name == "nllb" and not zoo.MODERN:
        pytest.skip("before transformers 5 it does not run in float64")
    torch.manual_seed(0)
    family, _, last = name.partition("-")
    model, inputs = _gemma4(int(last)) if last else globals()[f"_{family}"]()
    theirs, truth = copy.deepcopy(model.eval()), copy.deepcopy(model).double()
    ct.use(model, eps=0)
    wide = {k: x.double() if torch.is_tensor(x) and x.is_floating_point() else x
            for k, x in inputs.items()}  # fmt: skip
    with torch.inference_mode():
        zoo.as_close_as(model(**inputs)[0], theirs(**inputs)[0], truth(**wide)[0])


def test_arguments_come_in_the_order_of_the_interface() -> None:
    """As who wraps attention functions hands them on: kvpress gives dropout by position."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    theirs = list(inspect.signature(sdpa_attention_forward).parameters)
    ours = inspect.signature(certified_attention).parameters
    by_position = [n for n, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert by_position == theirs[: len(by_position)]
    assert by_position[5:7] == ["dropout", "scaling"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_stay_what_they_are(dtype: torch.dtype) -> None:
    ours, plain, truth = zoo.twins("llama")
    ct.use(ours.to(dtype), eps=0)
    found = [run(model, zoo.tokens(2, N)).logits for model in (ours, plain.to(dtype), truth)]
    assert found[0].dtype is dtype
    zoo.as_close_as(*found)


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


@pytest.mark.parametrize(
    "mode", [torch.inference_mode, pytest.param(torch.no_grad, marks=pytest.mark.heavy)]
)
def test_a_compiled_model_is_that_of_eager_mode(mode: Any) -> None:
    """Certified attention and the cache run between the graphs, in prefill and by an index."""
    torch.compiler.reset()
    model = zoo.peaked("llama")
    # One layer takes a third of the time to compile.
    del model.model.layers[1:]
    model.config.num_hidden_layers = 1
    compiled, ids, found = torch.compile(model, backend="eager"), zoo.tokens(1, 300), []
    assert ct.use(compiled, eps=0.1, even_if_slower=True) is compiled
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


def test_a_model_with_sinks_can_be_captured(tmp_path: Any) -> None:
    models = zoo.twins("gpt-oss")
    ids = zoo.tokens(1, 6)
    ct.capture(models[0], ids, tmp_path / "cache.safetensors")
    # Capturing computed what the model computes.
    ct.use(models[0], eps=0)
    zoo.as_close_as(*(run(model, ids).logits for model in models))


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
    with ct.Recorder() as full, ct.Recorder(rows=False, error_bounds=False) as brief:
        run(model, zoo.tokens(2, N))
    assert brief.calls == []
    assert [layer.error_bound for layer in brief.layers] == [None] * 3
    for one, other in zip(full.layers, brief.layers, strict=True):
        assert (one.tail_mass_upper, one.kept) == (other.tail_mass_upper, other.kept)
    with pytest.raises(ck.CertkError, match="entered before"), full:
        pass


# ----------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "more", "says"),
    [
        ("gpt2", {"training": True}, "dropout is 0.1 in GPT2Attention"),
        ("llama", {"output_attentions": True}, "output_attentions"),
        # Before 5 it keeps the wish to itself, and returns no weights.
        pytest.param(
            "gpt2", {"output_attentions": True}, "output_attentions",
            marks=pytest.mark.skipif(not zoo.MODERN, reason="does not say so"),
        ),
        ("bert", {"output_attentions": True}, "output_attentions"),
        ("llama", {"tilt": 0.5}, "asks for tilt"),
    ],
)  # fmt: skip
def test_arguments_that_are_refused(name: str, more: dict[str, Any], says: str) -> None:
    model = ct.use(zoo.build(name).train(more.pop("training", False)), eps=0.1)
    with pytest.raises(ck.CertkError, match=says):
        run(model, zoo.tokens(1, 12), **more)


def test_gradients_tangents_and_traces_are_refused_and_training_without_dropout_is_not() -> None:
    from torch.autograd import forward_ad
    from torch.fx.experimental.proxy_tensor import make_fx

    model, ids = ct.use(zoo.build("llama"), eps=0), zoo.tokens(1, 12)
    with pytest.raises(ck.CertkError, match="gradients do not flow"):
        model(input_ids=ids)
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
    run(model.train(), ids)


def test_masks_of_zeros_and_minima_and_of_other_numbers_are_read() -> None:
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
    bias = (-0.5 * torch.arange(12.0).expand(2, 1, 12, 12)).masked_fill(~seen, torch.finfo().min)
    logits = [run(model, ids, attention_mask=bias).logits for model in (ours, theirs)]
    zoo.as_close_as(*logits, run(truth, ids, attention_mask=bias.double()).logits)
    with pytest.raises(ck.CertkError, match="does not broadcast"):
        run(ours, ids, attention_mask=seen[..., :-1])


def test_packed_sequences_do_not_see_each_other() -> None:
    models, ids = zoo.twins("llama"), zoo.tokens(1, 20)
    ct.use(models[0], eps=0)
    where = torch.cat([torch.arange(8), torch.arange(12)])[None]
    more = {"position_ids": where, "use_cache": False}
    zoo.as_close_as(*(run(model, ids, **more).logits for model in models))
