"""Small random models of each architecture that certified attention is tried on."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

# Before 5 encoders do not ask for their attention; one test says so, and the others are skipped.
MODERN = int(hf.__version__.partition(".")[0]) >= 5
# From 5.24 on caches are passed as `cache`.
NEWEST = tuple(map(int, hf.__version__.split(".")[:2])) >= (5, 24)
VOCABULARY = 97
# So large that attention is peaked and keys can be dropped.
SPREAD = 0.25

# Sizes as configs of most families name them, and those of decoders, and encoders with decoders.
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
_TOKENS: dict[str, Any] = {
    "initializer_range": SPREAD, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
_DECODER: dict[str, Any] = SMALL | _TOKENS | {
    "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}  # fmt: skip
_ENCODER: dict[str, Any] = SMALL | {
    "num_hidden_layers": 3, "max_position_embeddings": 512, "initializer_range": SPREAD,
    "pad_token_id": 0,
}  # fmt: skip
PAIRED: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "pad_token_id": 0, "init_std": SPREAD,
}  # fmt: skip

# Of each family the name of its config, what its model does, and sizes.
Family = tuple[str, str, dict[str, Any]]
_CAUSAL, _MASKED = "ForCausalLM", "ForMaskedLM"
DECODERS: dict[str, Family] = {
    "llama": ("Llama", _CAUSAL, _DECODER),
    "qwen2": ("Qwen2", _CAUSAL, _DECODER),
    "qwen3": ("Qwen3", _CAUSAL, _DECODER | {"head_dim": 16}),
    "mistral": ("Mistral", _CAUSAL, _DECODER | {"sliding_window": None}),
    "mistral-window": ("Mistral", _CAUSAL, _DECODER | {"sliding_window": 7}),
    "gpt2": ("GPT2", "LMHeadModel", _TOKENS | {"vocab_size": VOCABULARY, "n_embd": 48, "n_layer": 3,
        "n_head": 4, "n_positions": 512}),
    # A sliding window in every second layer, and sinks in all of them, heavy and light.
    "gpt-oss": ("GptOss", _CAUSAL, _DECODER | {"head_dim": 12, "sliding_window": 7,
        "num_local_experts": 2, "num_experts_per_tok": 1, "max_position_embeddings": 131072,
        "hidden_act": "silu"}),
}  # fmt: skip
ENCODERS: dict[str, Family] = {
    "bert": ("Bert", _MASKED, _ENCODER),
    "roberta": ("Roberta", _MASKED, _ENCODER),
}
# Tried more briefly: other families, some of which cannot be switched over.
OTHERS: dict[str, Family] = {
    "phi3": ("Phi3", _CAUSAL, _DECODER),
    "gemma3": ("Gemma3Text", _CAUSAL, SMALL | {"num_hidden_layers": 6, "num_key_value_heads": 2,
        "head_dim": 12, "sliding_window": 6}),
    "gpt_neox": ("GPTNeoX", _CAUSAL, _DECODER),
    "opt": ("OPT", _CAUSAL, {"vocab_size": VOCABULARY, "hidden_size": 48, "ffn_dim": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128,
        "word_embed_proj_dim": 48}),
    "albert": ("Albert", _MASKED, SMALL | {"embedding_size": 24, "initializer_range": SPREAD}),
    "distilbert": ("DistilBert", _MASKED, {"vocab_size": VOCABULARY, "dim": 48, "n_layers": 2,
        "n_heads": 4, "hidden_dim": 64}),
    "modernbert": ("ModernBert", _MASKED, SMALL | {"global_attn_every_n_layers": 2,
        "local_attention": 6, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}),
    "bart": ("Bart", "ForConditionalGeneration", PAIRED | {"forced_eos_token_id": None}),
    "bloom": ("Bloom", _CAUSAL, {"vocab_size": VOCABULARY, "hidden_size": 48, "n_layer": 2,
        "n_head": 4}),
    "falcon": ("Falcon", _CAUSAL, {"vocab_size": VOCABULARY, "hidden_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4}),
}  # fmt: skip

# Beside full attention: sliding windows, convolutions, recurrent states, layers without a cache.
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1,
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts": 2, "num_experts_per_tok": 1}
_MIXED: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    "qwen3-next": ("Qwen3Next", _DELTA | _EXPERTS
        | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}),
    "jamba": ("Jamba", _EXPERTS | {"attn_layer_period": 2, "attn_layer_offset": 1,
        "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False}),
    "bamba": ("Bamba", _MAMBA2 | {"attn_layer_indices": [1, 3]}),
    "granite-hybrid": ("GraniteMoeHybrid", _MAMBA2 | {"num_local_experts": 2,
        "num_experts_per_tok": 1, "layer_types": ["linear_attention", "full_attention"] * 2,
        "shared_intermediate_size": 32}),
    "falcon-h1": ("FalconH1", _MAMBA2 | {"num_hidden_layers": 3, "head_dim": 12,
        "mamba_d_ssm": 48, "mamba_n_heads": 4, "mamba_d_head": 12}),
    "nemotron-h": ("NemotronH", {"layers_block_type": ["mamba", "attention", "mlp", "attention"],
        "head_dim": 12, "mamba_num_heads": 6, "mamba_head_dim": 16, "ssm_state_size": 8,
        "n_groups": 1}),
    "zamba2": ("Zamba2", {"layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 8,
        "mamba_ngroups": 1, "n_mamba_heads": 8, "mamba_headdim": 12, "num_mem_blocks": 1,
        "use_shared_attention_adapter": False, "num_key_value_heads": 4}),
    "qwen3.5": ("Qwen3_5Text", _DELTA),
    "gemma3n": ("Gemma3nText", {"num_hidden_layers": 6, "head_dim": 12, "sliding_window": 32,
        "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 3,
        "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}),
    "gemma3-window": ("Gemma3Text", {"num_hidden_layers": 6, "head_dim": 12,
        "sliding_window": 32}),
}  # fmt: skip
MIXED: dict[str, Family] = {
    name: (kind, _CAUSAL, SMALL | _TOKENS
        | {"num_hidden_layers": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
        | more)
    for name, (kind, more) in _MIXED.items()
}  # fmt: skip

# Families that ask for their attention from transformers 5 on.
LATE = {*ENCODERS, "albert", "distilbert", "modernbert"}


@functools.cache
def _made(name: str) -> Any:
    kind, head, sizes = (DECODERS | ENCODERS | OTHERS | MIXED)[name]
    torch.manual_seed(0)
    config = getattr(hf, kind + "Config")(**sizes)
    model = getattr(hf, kind.removesuffix("Text") + head)(config)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others know no float64
    if name == "gpt-oss":
        for layer in model.model.layers:
            layer.self_attn.sinks.data.uniform_(-2.0, 6.0)
    return model.eval()


def build(name: str, *, late: bool = False) -> Any:
    """A copy of the random model of a family, in evaluation mode."""
    if not MODERN and name in LATE and not late:
        pytest.skip(f"{name} cannot be switched over in transformers {hf.__version__}")
    model = copy.deepcopy(_made(name))
    torch.manual_seed(0)
    return model


def sharpened(model: Any, factor: float = 6.0) -> Any:
    """The model with longer queries, so that most rows need few keys."""
    for name, parameter in model.named_parameters():
        if "c_attn" in name:
            parameter.data[..., : parameter.shape[-1] // 3] *= factor
        elif "q_norm" in name and not parameter.any():
            parameter.data += factor - 1  # a norm that multiplies by 1 + weight
        elif any(part in name for part in ("q_proj", "q_norm", "q_layernorm", "self.query")):
            parameter.data *= factor
    return model


def peaked(name: str, factor: float = 4.0) -> Any:
    """A random model most of whose rows need few keys."""
    return sharpened(build(name), factor)


def twins(name: str) -> tuple[Any, Any, Any]:
    """The same model three times: to be switched over, under sdpa, and under sdpa in float64.

    Those that sdpa cannot run are under "eager" instead.
    """
    model = build(name)
    plain = copy.deepcopy(model)
    with contextlib.suppress(ValueError):  # some have no choice
        plain.set_attn_implementation("sdpa")
    return model, plain, copy.deepcopy(plain).double()


def letters(first: int = 0, **more: Any) -> Any:
    """A tokenizer of single letters, 97 at most; `first` is the id of a blank."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    known = {chr(c): first + c - 32 for c in range(32, 127)}
    if first == 0:
        known |= {"\n": 95, "<s>": 96}
    inner = Tokenizer(models.WordLevel(known, unk_token=" "))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(".|\n"), "isolated")
    return hf.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=" ", **more)


def tokens(batch: int, n: int, seed: int = 1) -> Any:
    """Random token ids (batch, n), none of them padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (batch, n), generator=generator)


def padding(batch: int, n: int, side: str) -> Any:
    """A mask (batch, n) in which each sequence but the first lacks more tokens on one side."""
    mask = torch.ones(batch, n, dtype=torch.long)
    for row in range(1, batch):
        gone = min(3 * row + 1, n - 1)
        if side == "left":
            mask[row, :gone] = 0
        else:
            mask[row, n - gone :] = 0
    return mask


def as_close_as(ours: Any, theirs: Any, truth: Any) -> None:
    """Assert that float32 results of ours are as near the float64 truth as those of theirs."""
    scale = truth.abs().max()
    own, other = (ours.double() - truth).abs().max(), (theirs.double() - truth).abs().max()
    assert torch.isfinite(own)
    assert own <= 4 * other + 1e-7 * scale, (float(own), float(other), float(scale))


@contextlib.contextmanager
def spied() -> Iterator[list[dict[str, Any]]]:
    """Note what every certified attention call got and gave; enter it after `use`."""
    from certk_rs.transformers import attention

    calls: list[dict[str, Any]] = []

    def spy(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        out, weights = attention.certified_attention(module, query, key, value, mask, **kwargs)
        calls.append(
            {
                "module": module, "query": query.clone(), "key": key.clone(),
                "value": value.clone(), "mask": mask, "out": out.clone(),
                "scaling": kwargs.get("scaling"), "is_causal": kwargs.get("is_causal"),
                "sinks": kwargs.get("s_aux"),
            }
        )  # fmt: skip
        return out, weights

    hf.AttentionInterface.register("certk", spy)
    try:
        yield calls
    finally:
        hf.AttentionInterface.register("certk", attention.certified_attention)


def dense(call: dict[str, Any]) -> tuple[Any, Any]:
    """Weights (batch, heads, m, n) and output (batch, m, heads, d_v) of a call in float64."""
    q, k, v = (call[name].double() for name in ("query", "key", "value"))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = q.shape[-1] ** -0.5 if call["scaling"] is None else call["scaling"]
    scores = (q @ k.transpose(-1, -2)) * scale
    m, n = scores.shape[-2:]
    if call["mask"] is not None:
        mask = call["mask"]
        seen = (mask if mask.dtype is torch.bool else mask == 0).expand_as(scores)
    elif m > 1 and getattr(call["module"], "is_causal", True):
        seen = torch.ones(m, n, dtype=torch.bool).tril().expand_as(scores)
    else:
        seen = torch.ones_like(scores, dtype=torch.bool)
    scores = scores.masked_fill(~seen, -torch.inf)
    if call.get("sinks") is not None:
        sinks = call["sinks"].detach().double()[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., :n]
    return weights, (weights @ v).transpose(1, 2)


def hold(calls: list[dict[str, Any]], recorder: Any, eps: float, slack: float = 0.0) -> float:
    """Assert that every recorded row is as float64 has it; return the mean of k/n."""
    assert len(calls) == len(recorder.calls) > 0
    fractions = []
    for call, told in zip(calls, recorder.calls, strict=True):
        weights, out = dense(call)
        k, some = told.k, told.n > 0
        assert (told.n >= (weights > 0).sum(-1).numpy()).all()
        # No k keys lose less than all but the k heaviest.
        heaviest = weights.sort(-1, descending=True).values.cumsum(-1).numpy()
        heaviest = np.concatenate([np.zeros((*k.shape, 1)), heaviest], axis=-1)
        lost = weights.sum(-1).numpy() - np.take_along_axis(heaviest, k[..., None], -1)[..., 0]
        assert (told.tail_mass_upper >= np.where(some, lost, 0) - 1e-12).all()
        assert (told.tail_mass_upper <= eps).all()
        off = (call["out"].double() - out).norm(dim=-1).transpose(1, 2).numpy()
        assert told.error_bound is not None
        assert (off <= told.error_bound + slack * float(call["value"].abs().max())).all()
        fractions.append((k[some] / told.n[some]).mean())
    return float(np.mean(fractions))
