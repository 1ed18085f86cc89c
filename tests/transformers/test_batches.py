"""Continuous batching of transformers under certified attention, beside sdpa and float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "ContinuousBatchingConfig"):
    pytest.skip("no continuous batching in this transformers", allow_module_level=True)

from certk_rs import CertkError  # noqa: E402
from certk_rs import transformers as certified  # noqa: E402
from certk_rs.transformers import batches  # noqa: E402

LENGTHS = (40, 7, 1, 100)


def model_of(**changed: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=128, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        eos_token_id=None, bos_token_id=None, pad_token_id=0, attn_implementation="sdpa", **changed,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def tokens_of(model: Any) -> list[list[int]]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 97, n).tolist() for n in LENGTHS]
    config = transformers.GenerationConfig(
        max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    # Small: transformers takes most of the memory that there is otherwise.
    cache = transformers.ContinuousBatchingConfig(
        num_blocks=16, max_batch_tokens=256, cpu_offload_space=0.0
    )
    found = model.generate_batch(
        prompts,
        generation_config=config,
        continuous_batching_config=cache,
        progress_bar=False,
    )
    by_number = sorted(found.values(), key=lambda each: int(each.request_id.rpartition("_")[2]))
    return [list(each.generated_tokens) for each in by_number]


def test_tokens_are_those_of_sdpa_and_each_call_is_recorded() -> None:
    model = model_of()
    wanted = tokens_of(model)
    assert [len(each) for each in wanted] == [12] * len(LENGTHS)
    certified.use(model, eps=0.0)
    with certified.Recorder() as recorder:
        assert tokens_of(model) == wanted
    # Each query of a prompt, and each token but the last, once in each layer and query head.
    rows = 4 * sum(n + 11 for n in LENGTHS)
    assert [(each.layer, each.rows, each.holds) for each in recorder.layers] == [
        (layer, rows, True) for layer in range(2)
    ]
    model.set_attn_implementation("sdpa")
    assert tokens_of(model) == wanted


def test_certificates_are_true(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of each sequence lie within their bounds around float64 attention."""
    model = model_of()
    # Scores of a model that was never trained are nearly flat.
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 12
    certified.use(model, eps=0.05, even_if_slower=True)
    plain, checked = batches.attend, [0, 0]

    def attend(
        module: Any, tensors: Any, kwargs: Mapping[str, Any], attention_of: Any, record: Any
    ) -> Any:
        bounds: list[Any] = []

        def told(result: Any, rows: Any) -> None:
            bounds.append(result)
            record(result, rows)

        out = plain(module, tensors, kwargs, attention_of, told)
        q, k, v = (each[0].double().numpy() for each in tensors)
        starts, ends = (kwargs[f"cu_seq_lens_{side}"].tolist() for side in "qk")
        spread = np.concatenate([np.ravel(each.error_bound) for each in bounds]).max()
        lost = max(float(each.tail_mass_upper.max()) for each in bounds)
        assert lost <= 0.05
        checked[1] += lost > 0.01
        for i in range(len(starts) - 1):
            queries, keys = slice(*starts[i : i + 2]), slice(*ends[i : i + 2])
            m, n = queries.stop - queries.start, keys.stop - keys.start
            for head in range(q.shape[0]):
                scores = module.scaling * q[head, queries] @ k[head // 2, keys].T
                scores[np.arange(n) > np.arange(m)[:, None] + n - m] = -np.inf
                weights = np.exp(scores - scores.max(axis=1, keepdims=True))
                wanted = weights @ v[head // 2, keys] / weights.sum(axis=1, keepdims=True)
                off = np.linalg.norm(out[0, queries, head].double().numpy() - wanted, axis=1)
                assert off.max() <= spread + 1e-6
                checked[0] += 1
        return out

    monkeypatch.setattr(batches, "attend", attend)
    with certified.Recorder() as recorder:
        tokens_of(model)
    assert checked[0] >= 12 * 4 * len(LENGTHS)
    assert checked[1]
    assert all(each.holds and each.kept < 0.95 for each in recorder.layers)


def test_budgets_around_the_call_hold_in_the_thread_that_runs_it() -> None:
    model = model_of()
    certified.switch.switch(model)
    with certified.budget(eps=0.01):
        tokens_of(model)
    with pytest.raises(CertkError, match="no certified attention ran"), certified.budget(eps=0.01):
        pass


def test_what_is_not_supported_is_refused() -> None:
    q, k = torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 3, 8)
    lists = {"cu_seq_lens_q": torch.tensor([0, 1]), "cu_seq_lens_k": torch.tensor([0, 3])}
    for more in ({"sliding_window": 4}, {"block_table": torch.zeros(1, 1)}):
        with pytest.raises(CertkError, match="continuous batching"):
            batches.attend(torch.nn.Identity(), (q, k, k), lists | more, None, None)  # type: ignore[arg-type]
