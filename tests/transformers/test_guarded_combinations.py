"""Guards beside attention that drops keys itself, and of heads that differ by much.

What is said of a call must hold for both losses together, and of each kv head by its own budget and
its own values. The truth is computed in float64 from what the model asked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import certk_rs as ck

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")
zoo = pytest.importorskip("model_zoo")

from certk_rs import transformers as ct  # noqa: E402
from certk_rs.cache_format import SafetensorsFile, read_certificate  # noqa: E402
from model_caches import prefilled, seen_by  # noqa: E402

N, MORE = 96, 12
pytestmark = pytest.mark.usefixtures("one_thread")
one_thread = zoo.one_thread


def prepared(sharp: float = 6) -> tuple[Any, Any, Any, list[Any]]:
    """A model with unlike heads, tokens, the cache of the first N, its queries."""
    model, ids = zoo.build("llama"), zoo.tokens(1, N + MORE)
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.q_proj.weight *= sharp
            d = attention.head_dim
            # The second kv head has small keys, which its queries make up for, and large values.
            attention.k_proj.weight[d:] /= 4
            attention.q_proj.weight[attention.q_proj.weight.shape[0] // 2 :] *= 4
            attention.v_proj.weight[d:] *= 30
            attention.o_proj.weight[:, attention.o_proj.weight.shape[1] // 2 :] /= 30
    cache = prefilled(model, ids[:, :N])
    return model, ids, cache, [call["query"][:, :, -8:] for call in seen_by(model, ids[:, :N])]


def calls_of(model: Any, cache: Any, ids: Any) -> list[dict[str, Any]]:
    """Each call's layer, queries and outputs on the way through certified attention."""
    from certk_rs.transformers.attention import certified_attention as certified

    calls: list[dict[str, Any]] = []

    def spy(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        found = certified(module, query, *args, **kwargs)
        calls.append({"layer": module.layer_idx, "query": query.clone(), "out": found[0].clone()})
        return found

    hf.AttentionInterface.register("certk", spy)
    try:
        with torch.inference_mode():
            for at in range(N, N + MORE):
                model(input_ids=ids[:, at : at + 1], past_key_values=cache)
    finally:
        hf.AttentionInterface.register("certk", certified)
    return calls


class Truth:
    """Real attention of one call over all keys, those that were dropped and the new ones."""

    def __init__(self, call: dict[str, Any], pruned: Any, full: Any, step: int) -> None:
        own, whole = pruned.layers[call["layer"]], full.layers[call["layer"]]
        keys, values = (
            torch.cat([old[0, :, :N], new[0, :, new.shape[2] - MORE :][:, : step + 1]], 1)
            for old, new in ((whole.keys, own.keys), (whole.values, own.values))
        )
        q = call["query"][0, :, -1].double().numpy()
        group = len(q) // len(keys)
        keys, values = (np.repeat(x.double().numpy(), group, 0) for x in (keys, values))
        scores = np.einsum("hd,hnd->hn", q, keys) * q.shape[-1] ** -0.5
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        self.weights = weights / weights.sum(axis=-1, keepdims=True)
        real = np.einsum("hn,hnd->hd", self.weights, values)
        out = call["out"][0, -1].double().numpy()
        self.off = np.sqrt(np.square(out - real).sum(axis=-1))
        self.here = np.ones(scores.shape, bool)
        for head in range(len(q)):
            self.here[head, own.guarded.guard.positions[head // group]] = False

    def lost(self, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The share of the dropped keys, and what keeping k of the others loses at least."""
        here = np.where(self.here, self.weights, 0)
        best = np.cumsum(-np.sort(-here, axis=-1), axis=-1)
        kept = np.take_along_axis(best, k[:, None] - 1, axis=-1)[:, 0]
        return 1 - here.sum(axis=-1), here.sum(axis=-1) - kept


@pytest.mark.parametrize("on_breach", ["report", "recall"])
def test_what_attention_drops_is_lost_beside_what_was_pruned(on_breach: Any) -> None:
    model, ids, cache, queries = prepared(sharp=0.4)
    eps, own = 0.4, 0.25
    pruned = ct.prune_cache(cache, queries, eps, guard="codes", on_breach=on_breach)
    ct.use(model, eps=own, even_if_slower=True)
    with ct.Recorder() as recorder:
        calls = calls_of(model, pruned, ids)
    both = recalled = 0
    every = zip(calls, recorder.calls, pruned.lost, strict=True)
    for at, (call, said, lost) in enumerate(every):
        truth = Truth(call, pruned, cache, at // len(pruned.layers))
        upper = said.tail_mass_upper[0, :, -1]
        assert said.error_bound is not None
        assert (truth.off <= said.error_bound[0, :, -1] * (1 + 1e-9)).all()
        if on_breach == "recall":
            assert (upper <= eps).all()
            recalled += int(lost.recalled.sum())
            continue
        gone, dropped = truth.lost(said.k[0, :, -1])
        assert (gone + dropped <= upper * (1 + 1e-9)).all()
        assert (upper <= lost.lost[:, -1]).all()
        # Neither loss is as large alone, the guard's as a share of what was not dropped before.
        both += int((gone + dropped > 1.05 * np.maximum(gone / (1 - dropped), own)).sum())
    assert recalled > 0 if on_breach == "recall" else both > 100


@pytest.mark.parametrize("promote", [False, True])
def test_each_kv_head_keeps_to_its_own_budget(promote: bool, tmp_path: Path) -> None:
    """Budgets of mass that follow from one on the output: the second head's is a thirtieth."""
    model, ids, cache, queries = prepared()
    source = tmp_path / "x.safetensors"
    ct.to_cache(cache, queries, source)
    job = ck.prune(source, tmp_path / "out", out_tol=0.3, guard="codes", holdout=0.0)
    output = Path(job.outputs[0].target)
    with SafetensorsFile(output) as file:
        certificate, _ = read_certificate(file.header.metadata["certk"])
    budgets = {layer: tuple(map(float, each)) for layer, each in certificate.eps.items()}
    assert all(one > 5 * two > 0 for one, two in budgets.values())
    pruned = ct.from_cache(output, on_breach="recall", source=source, promote=promote)
    ct.use(model, eps=0)
    with ct.Recorder() as recorder:
        calls = calls_of(model, pruned, ids)
    more = 0
    every = zip(calls, recorder.calls, pruned.lost, strict=True)
    for at, (call, said, lost) in enumerate(every):
        eps = np.repeat(budgets[call["layer"]], len(lost.left) // 2)
        assert (lost.left[:, -1] <= eps).all()
        more += int((lost.left[:, -1] > 2 * min(eps)).sum())
        truth = Truth(call, pruned, cache, at // len(pruned.layers))
        assert said.error_bound is not None
        assert (truth.off <= said.error_bound[0, :, -1] * (1 + 1e-9)).all()
        if not promote:
            gone, _ = truth.lost(np.ones(len(eps), np.int64))
            assert (gone <= lost.lost[:, -1] * (1 + 1e-9)).all()
    assert more > 0
    assert any(lost.recalled[1] for lost in pruned.lost)
