"""Certified attention as the CPU backend of vLLM, against a stand-in for vLLM's classes.

The last test runs vLLM itself where it is installed.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from repository import ROOT

torch = pytest.importorskip("torch")

import vllm_stand_in as stand_in  # noqa: E402
from certk_rs import CertkError  # noqa: E402

HEADS, KV_HEADS, D, SCALE = 4, 2, 32, 0.25
LAYER = SimpleNamespace(layer_name="model.layers.0.attn", _k_scale_float=1.0, _v_scale_float=1.0)
# New queries and keys of each request: decoding, parts of prompts, first tokens.
BATCH = [(1, 200), (40, 100), (1, 33), (17, 17), (1, 1), (2, 130)]
COUNTS, LENGTHS = map(list, zip(*BATCH, strict=True))
TOKENS = sum(COUNTS)


@pytest.fixture
def certk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`certk_rs.vllm` as a new process has it, beside the stand-in."""
    monkeypatch.delenv("CERTK_VLLM_EPS", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("certk_rs.vllm.backend", "certk_rs.vllm"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    stand_in.OVERRIDES.clear()
    yield importlib.import_module("certk_rs.vllm")
    for name in ("certk_rs.vllm.backend", "certk_rs.vllm"):
        sys.modules.pop(name, None)


def made(certk: Any, **other: Any) -> Any:
    backend = importlib.import_module("certk_rs.vllm.backend").CertkBackend
    return backend.get_impl_cls()(HEADS, D, SCALE, KV_HEADS, **other)


class Batch:
    """A batch in shuffled blocks, with tokens of no request behind it."""

    def __init__(self, size: int = 32, dtype: Any = torch.float32, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        need = [-(-n // size) for n in LENGTHS]
        numbers = torch.randperm(sum(need) + 3, generator=draw).int()
        self.table = torch.full((len(need), max(need) + 1), -1, dtype=torch.int32)
        for row, first in enumerate(np.cumsum([0, *need[:-1]])):
            self.table[row, : need[row]] = numbers[first : first + need[row]]
        self.cache = torch.full((len(numbers), KV_HEADS, size, 2 * D), torch.nan, dtype=dtype)
        self.keys, self.values = (
            [torch.randn(n, KV_HEADS, D, generator=draw).to(dtype) for n in LENGTHS]
            for _ in range(2)
        )
        self.query = (4 * torch.randn(TOKENS + 5, HEADS, D, generator=draw)).to(dtype)
        slots = [
            self.table[row, torch.arange(n) // size].long() * size + torch.arange(n) % size
            for row, n in enumerate(LENGTHS)
        ]
        self.slots = torch.cat([*slots, torch.full((5,), -1)])
        self.size = size
        self.metadata = stand_in.metadata(COUNTS, LENGTHS, self.table)

    def run(self, impl: Any, flat: bool = False, **other: Any) -> torch.Tensor:
        pad = torch.full((5, KV_HEADS, D), torch.nan, dtype=self.cache.dtype)
        new = [torch.cat([*part, pad]) for part in (self.keys, self.values)]
        impl.do_kv_cache_update(LAYER, *new, self.cache, self.slots)
        shape = (TOKENS + 5, HEADS * D) if flat else (TOKENS + 5, HEADS, D)
        output = torch.full(shape, 7.0, dtype=self.cache.dtype)
        given = (self.query, *new, self.cache, self.metadata)
        assert impl.forward(LAYER, *given, output=output, **other) is output
        return output.view(-1, HEADS, D)

    def truth(self, *more: Any) -> torch.Tensor:
        parts = self.query[:TOKENS].split(COUNTS)
        rows = zip(parts, self.keys, self.values, strict=True)
        return torch.cat(
            [
                stand_in.plain(q, k.transpose(0, 1), v.transpose(0, 1), SCALE, *more)
                for q, k, v in rows
            ]
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize("eps", [1e-6, 0.02])
def test_certificates_of_a_mixed_batch_are_true(
    certk: Any, dtype: Any, size: int, eps: float
) -> None:
    bounds = torch.full((TOKENS, HEADS), torch.nan, dtype=torch.float64)
    starts = np.cumsum([0, *COUNTS])

    def on_call(layer: str, requests: Any, result: Any) -> None:
        assert layer == LAYER.layer_name
        assert (result.tail_mass_upper <= eps).all()
        for row, request in enumerate(requests):
            bound = torch.tensor(result.error_bound[row].T)
            bounds[starts[request] : starts[request + 1]] = bound

    certk.set_budget(eps, on_call)
    batch = Batch(size, dtype)
    found = batch.run(made(certk))
    distance = (found[:TOKENS].double() - batch.truth()).norm(dim=2)
    assert (distance <= bounds).all()
    assert bounds.max() < (0.5 if eps > 1e-3 or dtype != torch.float32 else 2e-3)
    assert (found[TOKENS:] == 7).all()
    (told,) = certk.report()
    assert (told.layer, told.calls, told.rows) == (LAYER.layer_name, 4, TOKENS * HEADS)
    assert told.eps == eps >= told.tail_mass_upper
    assert told.kept <= 1
    assert certk.report() == []


def test_decoding_drops_keys(certk: Any) -> None:
    certk.set_budget(0.05)
    batch = Batch()
    one = batch.metadata.query_start_loc
    batch.metadata.query_start_loc = torch.arange(len(one), dtype=torch.int32)
    batch.run(made(certk))
    (told,) = certk.report()
    assert (told.calls, told.rows) == (1, len(BATCH) * HEADS)
    assert told.kept < 0.9
    assert 0 < told.tail_mass_upper <= 0.05


def test_layouts_of_output_and_other_budgets(certk: Any) -> None:
    certk.set_budget(0.02)
    impl = made(certk)
    assert torch.equal(Batch().run(impl), Batch().run(impl, flat=True))
    certk.set_budget(0)  # a certified layer then is exact
    batch = Batch()
    assert torch.allclose(batch.run(impl)[:TOKENS].double(), batch.truth(), atol=1e-4)
    assert impl.calls == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_join_the_softmax(certk: Any, dtype: Any) -> None:
    certk.set_budget(1e-6)
    sinks = torch.tensor([0.0, 3.0, -torch.inf, 9.0], dtype=dtype)
    batch = Batch()
    found = batch.run(made(certk, sinks=sinks))[:TOKENS].double()
    assert torch.allclose(found, batch.truth(sinks), atol=1e-4)


@pytest.mark.parametrize(
    ("cap", "slopes"), [(5.0, None), (None, [0.5, 0.1, 0.02, 2.0]), (3.0, [0.3] * 4)]
)
def test_caps_and_slopes_change_scores(certk: Any, cap: Any, slopes: Any) -> None:
    certk.set_budget(1e-6)
    batch = Batch()
    impl = made(certk, logits_soft_cap=cap, alibi_slopes=slopes)
    found = batch.run(impl)[:TOKENS].double()
    assert impl.certified
    assert torch.allclose(found, batch.truth(None, cap, slopes), atol=1e-4)


def test_slopes_beside_sinks_count_from_each_query(certk: Any) -> None:
    certk.set_budget(1e-6)
    batch, slopes = Batch(), [0.5, 0.1, 0.02, 2.0]
    sinks = torch.tensor([0.0, 3.0, -torch.inf, 9.0])
    found = batch.run(made(certk, sinks=sinks, alibi_slopes=slopes))[:TOKENS].double()
    assert torch.allclose(found, batch.truth(sinks, None, slopes), atol=1e-4)


def test_rows_that_are_not_causal_see_everything(certk: Any) -> None:
    certk.set_budget(1e-6)
    batch = Batch()
    batch.metadata.causal = False
    found = batch.run(made(certk))[:TOKENS].double().split(COUNTS)
    for q, k, v, out in zip(
        batch.query[:TOKENS].split(COUNTS), batch.keys, batch.values, found, strict=True
    ):
        rows = (part.transpose(0, 1) for part in (k, v))
        keys, values = rows
        each = [stand_in.plain(one[None], keys, values, SCALE) for one in q]
        assert torch.allclose(out, torch.cat(each), atol=1e-4)


@pytest.mark.parametrize("eps", [None, 0.0])
def test_without_a_budget_layers_are_vllms(certk: Any, eps: float | None) -> None:
    if eps is not None:
        certk.set_budget(eps)
    impl, batch = made(certk), Batch()
    assert torch.allclose(batch.run(impl)[:TOKENS].double(), batch.truth(), atol=1e-5)
    assert (impl.certified, impl.calls) == (False, 1)
    # What vLLM's kernels read is not what a budget of later would read.
    certk.set_budget(0.1)
    batch.run(impl)
    assert (impl.calls, certk.report()) == (2, [])


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"sliding_window": 8}, "a sliding window"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "a cache of fp8_e4m3"),
        ({"attn_type": stand_in.AttentionType.ENCODER_ONLY}, "attention of type"),
    ],
)
def test_what_is_not_supported_stays_vllms_with_one_warning(
    certk: Any, other: dict[str, Any], why: str, recwarn: pytest.WarningsRecorder
) -> None:
    certk.set_budget(0.1)
    for _ in range(2):
        impl = made(certk, **other)
        Batch().run(impl)
        assert (impl.certified, impl.calls) == (False, 1)
    (warning,) = recwarn.list
    assert f"layers with {why}" in str(warning.message)
    assert "stay vLLM's own" in str(warning.message)
    assert made(certk).certified
    assert certk.report() == []


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (SimpleNamespace(kv_transfer_config=1, model_config=None), "transferred"),
        (
            SimpleNamespace(
                kv_transfer_config=None, model_config=SimpleNamespace(is_diffusion=True)
            ),
            "causality by request",
        ),
    ],
)
def test_what_a_whole_model_asks_for_is_looked_at(
    certk: Any, config: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_in, "CONFIG", config)
    certk.set_budget(0.1)
    with pytest.warns(UserWarning, match=why):
        assert not made(certk).certified


def test_what_cannot_be_left_to_vllm_is_an_error(certk: Any) -> None:
    certk.set_budget(0.1)
    for other in ({}, {"sliding_window": 8}):
        with pytest.raises(CertkError, match="share caches"):
            made(certk, kv_sharing_target_layer_name="model.layers.1.attn", **other)
    batch, impl = Batch(), made(certk)
    with pytest.raises(NotImplementedError):
        batch.run(impl, output_scale=torch.ones(1))
    batch.metadata.dynamic_causal = torch.ones(len(BATCH))
    with pytest.raises(CertkError, match="causality by request"):
        batch.run(impl)


def test_a_warm_up_leaves_the_output(certk: Any) -> None:
    certk.set_budget(0.1)
    batch = Batch()
    batch.metadata = None
    assert (batch.run(made(certk)) == 7).all()


def test_registering_changes_vllm_only_with_a_budget(
    certk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    certk.register()
    assert stand_in.OVERRIDES == {}
    monkeypatch.setenv("CERTK_VLLM_EPS", "0.25")
    certk.register()
    ((name, path),) = stand_in.OVERRIDES.items()
    assert name is stand_in.AttentionBackendEnum.CPU_ATTN
    module, _, backend = path.rpartition(".")
    found = getattr(importlib.import_module(module), backend)
    assert found.get_name() == "CPU_ATTN"
    assert certk.budget() == 0.25


@pytest.mark.parametrize("value", ["1", "-0.1", "nan", "a lot"])
def test_what_is_no_budget_is_named(
    certk: Any, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CERTK_VLLM_EPS", value)
    with pytest.raises(CertkError, match="CERTK_VLLM_EPS is"):
        certk.register()
    with pytest.raises(CertkError, match="eps is"):
        certk.set_budget(value)


def test_a_worker_reports_in_plain_numbers(certk: Any) -> None:
    certk.set_budget(0.1)
    Batch().run(made(certk))
    (told,) = certk.WorkerExtension().certk_report()
    assert told["layer"] == LAYER.layer_name
    assert {type(value) for value in told.values()} == {str, int, float}


IN_VLLM = """
import json, os, sys
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
from certk_rs import vllm as certk
folder, eps = sys.argv[1], float(sys.argv[2])
if eps:
    certk.set_budget(eps)
    certk.register()
from vllm import LLM, SamplingParams
model = LLM(folder, dtype="float32", skip_tokenizer_init=True, enforce_eager=True,
            max_model_len=512, max_num_batched_tokens=64, kv_cache_memory_bytes=1 << 26)
prompts = [{"prompt_token_ids": [3 + i * i % 61 for i in range(n)]} for n in (3, 50, 200)]
how = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
tokens = [list(one.outputs[0].token_ids) for one in model.generate(prompts, how)]
print("\\n" + json.dumps([tokens, [(c.layer, c.rows, c.tail_mass_upper) for c in certk.report()]]))
"""


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_model_in_vllm_says_the_same(tmp_path: Path) -> None:
    hf = pytest.importorskip("transformers")
    small = {"hidden_size": 64, "head_dim": D, "num_attention_heads": 4, "num_key_value_heads": 2}
    small |= {"intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    torch.manual_seed(0)
    hf.LlamaForCausalLM(hf.LlamaConfig(**small, initializer_range=0.3)).save_pretrained(tmp_path)

    def said(eps: float) -> Any:
        command = [sys.executable, "-c", IN_VLLM, str(tmp_path), str(eps)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return json.loads(done.stdout.splitlines()[-1])

    tokens, layers = said(0)
    assert layers == []
    same, layers = said(1e-9)
    assert same == tokens
    assert len(layers) == 2
    _, layers = said(0.05)
    assert all(tail <= 0.05 for _, _, tail in layers)


def test_the_plugin_is_an_entry_point_that_loads_nothing() -> None:
    said = '[project.entry-points."vllm.general_plugins"]\ncertk = "certk_rs.vllm:register"\n'
    assert said in (ROOT / "pyproject.toml").read_text()
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "import certk_rs.vllm as plugin; plugin.register()\n"
        "assert not {'torch', 'transformers', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
