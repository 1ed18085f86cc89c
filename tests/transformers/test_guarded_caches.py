"""Pruned caches with guards: what later queries lose is proven, and fetched back where asked."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import certk_rs as ck

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")
zoo = pytest.importorskip("model_zoo")

from certk_rs import transformers as ct  # noqa: E402
from model_caches import prefilled, seen_by  # noqa: E402

N, MORE = 96, 12
pytestmark = pytest.mark.usefixtures("one_thread")
one_thread = zoo.one_thread
EPS = 0.02


def prepared(name: str, dtype: Any = torch.float32) -> tuple[Any, Any, Any, list[Any]]:
    """A model whose heads look at few keys, tokens, the cache of the first N, its queries."""
    model, ids = zoo.build(name).to(dtype), zoo.tokens(1, N + MORE)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 6
    calls = seen_by(model, ids[:, :N])
    cache = prefilled(model, ids[:, :N])
    return model, ids, cache, [call["query"][:, :, -8:] for call in calls]


def calls_of(model: Any, cache: Any, ids: Any) -> tuple[list[dict[str, Any]], Any]:
    """Each call's queries, keys and outputs on the way through certified attention, and logits."""
    from certk_rs.transformers.attention import certified_attention as certified

    calls: list[dict[str, Any]] = []

    def spy(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        found = certified(module, query, key, value, *args, **kwargs)
        calls.append({"query": query.clone(), "layer": module.layer_idx, "out": found[0].clone()})
        return found

    hf.AttentionInterface.register("certk", spy)
    try:
        with torch.inference_mode():
            logits = [
                model(input_ids=ids[:, at : at + 1], past_key_values=cache).logits
                for at in range(N, N + MORE)
            ]
    finally:
        hf.AttentionInterface.register("certk", certified)
    return calls, torch.cat(logits, 1)


def truth(query: Any, full: Any, kept: list[np.ndarray], n: int, layer: int) -> np.ndarray:
    """The share of the first N keys that are not kept, of each head's query."""
    keys = full.layers[layer].keys[0, :, :n].double().numpy()
    size, lost = query.shape[1] // len(keys), []
    for head in range(query.shape[1]):
        scores = keys[head // size] @ query[0, head, -1].double().numpy() * query.shape[-1] ** -0.5
        weights = np.exp(scores - scores.max())
        gone = np.ones(n, bool)
        gone[kept[head // size]] = False
        gone[N:] = False
        lost.append(weights[gone].sum() / weights.sum())
    return np.array(lost)


def positions(guard: Any) -> list[np.ndarray]:
    return [np.setdiff1d(np.arange(N), gone) for gone in guard.positions]


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_later_queries_lose_is_proven(name: str, dtype: Any) -> None:
    model, ids, cache, queries = prepared(name, dtype)
    pruned = ct.prune_cache(cache, queries, EPS, guard="codes")
    assert pruned.guard_bytes > 0
    ct.use(model, eps=0)
    with ct.Recorder() as recorder:
        calls, _ = calls_of(model, pruned, ids)
    kept = [positions(layer.guarded.guard) for layer in pruned.layers]
    assert len(pruned.lost) == len(calls) == MORE * len(kept)
    over, near = 0, []
    # What the model was asked depends on what it lost, so the full cache is made of its own keys.
    for at, (call, said) in enumerate(zip(calls, pruned.lost, strict=True)):
        layer = call["layer"]
        assert said.layer == layer
        n = N + at // len(kept) + 1
        own = pruned.layers[layer].keys[0]
        grown = copy.copy(cache.layers[layer])
        grown.keys = torch.cat([grown.keys[:, :, :N], own[None, :, own.shape[1] - MORE :]], 2)
        whole = type("Whole", (), {"layers": {layer: grown}})
        real = truth(call["query"], whole, kept[layer], n, layer)
        assert (real <= said.lost[:, 0] * (1 + 1e-9)).all()
        near += (said.lost[:, 0] <= 1.3 * real + 1e-3).tolist()
        over += int((real > EPS).sum())
        assert (said.left == said.lost).all()
        assert not said.recalled.any()
    assert np.mean(near) > 0.8
    assert over > 0, "no query lost more than the budget: nothing was tried"
    worst = max(float(call.lost.max()) for call in pruned.lost)
    table = recorder.layers
    assert max(layer.tail_mass_upper for layer in table) == worst
    assert not all(layer.holds for layer in table)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("promote", [False, True])
def test_recall_keeps_every_query_within_its_budget(name: str, promote: bool) -> None:
    model, ids, cache, queries = prepared(name)
    pruned = ct.prune_cache(cache, queries, EPS, guard="codes", on_breach="recall", promote=promote)
    ct.use(model, eps=0)
    with ct.Recorder() as recorder:
        calls_of(model, pruned, ids)
    assert all((call.left <= EPS).all() for call in pruned.lost)
    assert any(call.recalled.any() for call in pruned.lost)
    assert all(layer.holds and layer.error_bound is not None for layer in recorder.layers)
    fetched = sum(int(call.recalled.sum()) for call in pruned.lost)
    if promote:
        assert sum(map(sum, pruned.promoted)) == fetched
    else:
        assert not any(map(any, pruned.promoted))


def distances(call: dict[str, Any], pruned: Any, cache: Any, n: int) -> np.ndarray:
    """How far each head's output of a call is from real attention over all n keys."""
    own, full = pruned.layers[call["layer"]], cache.layers[call["layer"]]
    keys, values = (
        torch.cat([whole[0, :, :N], new[0, :, new.shape[2] - MORE :]], 1)[:, :n]
        for whole, new in ((full.keys, own.keys), (full.values, own.values))
    )
    size, off = call["query"].shape[1] // len(keys), []
    for head in range(call["query"].shape[1]):
        q = call["query"][0, head, -1].double()
        scores = keys[head // size].double() @ q * q.shape[0] ** -0.5
        real = torch.softmax(scores, 0) @ values[head // size].double()
        off.append(float((call["out"][0, -1, head].double() - real).norm()))
    return np.array(off)


def test_outputs_are_as_near_as_is_said() -> None:
    for on_breach in ("report", "recall"):
        model, ids, cache, queries = prepared("llama")
        pruned = ct.prune_cache(
            cache, queries, 0.05, guard="codes", on_breach=on_breach, promote=True
        )
        ct.use(model, eps=0)
        with ct.Recorder() as recorder:
            calls, _ = calls_of(model, pruned, ids)
        for at, (call, lost) in enumerate(zip(calls, pruned.lost, strict=True)):
            off = distances(call, pruned, cache, N + at // len(pruned.layers) + 1)
            bound = recorder.calls[at].error_bound
            assert bound is not None
            assert (off <= bound[0, :, 0] * (1 + 1e-9)).all()
            assert (off <= lost.moved[:, 0] + 1e-4).all()
            assert (lost.moved <= bound[0]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("promote", [False, True])
def test_outputs_are_kept_within_a_budget_of_their_own(dtype: Any, promote: bool) -> None:
    model, ids, cache, queries = prepared("llama", dtype)
    options: dict[str, Any] = {"guard": "codes", "out_tol": 0.05}
    noted = ct.prune_cache(cache, queries, 0.3, **options)
    pruned = ct.prune_cache(cache, queries, 0.3, on_breach="recall", promote=promote, **options)
    ct.use(model, eps=0)
    with ct.Recorder() as recorder:
        calls_of(model, noted, ids)
    assert not all(layer.holds for layer in recorder.layers)
    assert any((call.moved > 0.05).any() for call in noted.lost)
    with ct.Recorder() as recorder:
        calls, _ = calls_of(model, pruned, ids)
    assert all(layer.holds and layer.budget == 0.05 for layer in recorder.layers)
    fetched = [int(call.recalled.sum()) for call in pruned.lost]
    gone = sum(map(len, pruned.layers[0].guarded.guard.positions)) * len(pruned.layers)
    assert 0 < sum(fetched) < 0.9 * gone * MORE
    # A larger share than the budget of mass may be left where it does not move the output.
    for at, call in enumerate(calls):
        off = distances(call, pruned, cache, N + at // len(pruned.layers) + 1)
        assert (off <= 0.05).all()


def test_rounding_may_be_more_than_a_budget() -> None:
    model, ids, cache, queries = prepared("llama", torch.bfloat16)
    options: dict[str, Any] = {"guard": "codes", "out_tol": 1e-5}
    ct.use(model, eps=0)
    for on_breach, message in (
        ("recall", r"layer \d, head \d: an output may be off by .* out_tol = 1e-05: that is round"),
        ("raise", r"out_tol = 1e-05: pass on_breach='recall'"),
    ):
        pruned = ct.prune_cache(cache, queries, 0.3, on_breach=on_breach, **options)
        with pytest.raises(ck.CertkError, match=message):
            calls_of(model, pruned, ids)
    noted = ct.prune_cache(cache, queries, 0.3, **options)
    with ct.Recorder() as recorder:
        calls_of(model, noted, ids)
    assert not any(layer.holds for layer in recorder.layers)


def test_nothing_is_lost_with_a_budget_of_nothing() -> None:
    model, ids, cache, queries = prepared("llama")
    pruned = ct.prune_cache(cache, queries, 0.0, guard="codes", on_breach="recall")
    # Of a set that keeps everything nothing is dropped: drop half of it by hand.
    thin = ct.prune_cache(cache, queries, 0.3, guard="codes", on_breach="recall")
    for layer in thin.layers:
        layer.guarded._eps[:] = 0
    ct.use(model, eps=0)
    _, logits = calls_of(model, thin, ids)
    _, whole = calls_of(model, pruned, ids)
    with torch.inference_mode():
        full = [
            model(input_ids=ids[:, at : at + 1], past_key_values=cache).logits
            for at in range(N, N + MORE)
        ]
    assert all((call.left == 0).all() for call in thin.lost)
    assert torch.allclose(logits, torch.cat(full, 1), atol=1e-4)
    assert torch.allclose(whole, torch.cat(full, 1), atol=1e-4)


def test_few_stay_and_the_oldest_go() -> None:
    model, ids, cache, queries = prepared("llama")
    pruned = ct.prune_cache(
        cache, queries, EPS, guard="codes", on_breach="recall", promote=True, most_promoted=3
    )
    ct.use(model, eps=0)
    calls_of(model, pruned, ids)
    assert all(count <= 3 for layer in pruned.promoted for count in layer)
    assert all((call.left <= EPS).all() for call in pruned.lost)
    for layer in pruned.layers:
        for head, (there, held) in enumerate(
            zip(layer.guarded._there, layer.guarded._held, strict=True)
        ):
            if len(there):
                full = cache.layers[layer.guarded.layer].keys[0, head]
                assert torch.equal(held[0], full[torch.from_numpy(there)])


def test_a_breach_can_be_an_error() -> None:
    model, ids, cache, queries = prepared("llama")
    pruned = ct.prune_cache(cache, queries, EPS, guard="codes", on_breach="raise")
    ct.use(model, eps=0)
    with pytest.raises(
        ck.CertkError, match=r"layer \d, head \d: a query may lose .* more than eps"
    ):
        calls_of(model, pruned, ids)


def test_attention_that_loses_more_itself_is_refused() -> None:
    model, ids, cache, queries = prepared("llama")
    pruned = ct.prune_cache(cache, queries, 0.001, guard="codes")
    ct.use(model, eps=0.5, even_if_slower=True)
    with pytest.raises(ck.CertkError, match="use with a smaller eps"):
        calls_of(model, pruned, ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_breach": "recall"}, "go with a guard"),
        ({"promote": True}, "go with a guard"),
        ({"guard": "balls"}, "guard is 'balls'"),
        ({"guard": "codes", "on_breach": "shrug"}, "on_breach is 'shrug'"),
        ({"guard": "codes", "most_promoted": -1}, "most_promoted is -1"),
        ({"guard": "codes", "out_tol": -1.0}, "out_tol is -1.0"),
        ({"guard": "codes", "out_tol": float("nan")}, "out_tol is nan"),
        ({"guard": "codes", "out_tol": True}, "out_tol is True"),
        ({"out_tol": 1.0}, "go with a guard"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    _, _, cache, queries = prepared("llama")
    with pytest.raises(ck.CertkError, match=message):
        ct.prune_cache(cache, queries, EPS, **options)


def test_copies_and_pickles_go_on_alike() -> None:
    model, ids, cache, queries = prepared("llama")
    pruned = ct.prune_cache(cache, queries, EPS, guard="codes", on_breach="recall", promote=True)
    twins = [copy.deepcopy(pruned), pickle.loads(pickle.dumps(pruned))]
    ct.use(model, eps=0)
    texts = []
    for each in (pruned, *twins):
        with torch.inference_mode():
            options = {"max_new_tokens": 6, "do_sample": False}
            texts.append(model.generate(ids[:, : N + 1], past_key_values=each, **options))
    assert all(torch.equal(text, texts[0]) for text in texts)
    assert all(each.promoted == pruned.promoted for each in twins)
    assert any(map(any, pruned.promoted))


def test_every_beam_and_every_new_token_is_judged() -> None:
    model, ids, cache, queries = prepared("llama")
    ct.use(model, eps=0)
    pruned = ct.prune_cache(cache, queries, EPS, guard="codes", on_breach="recall")
    pruned.batch_repeat_interleave(3)
    with torch.inference_mode():
        options = {"max_new_tokens": 4, "num_beams": 3, "do_sample": False}
        model.generate(ids[:, : N + 1], past_key_values=pruned, **options)
    assert len(pruned.lost) == 3 * len(pruned.layers) * 4
    several = ct.prune_cache(cache, queries, EPS, guard="codes", on_breach="recall")
    with torch.inference_mode():
        model(input_ids=ids[:, N:], past_key_values=several)
        several.crop(-3)
        model(input_ids=ids[:, -3:], past_key_values=several)
    assert [call.lost.shape[1] for call in several.lost] == [MORE] * 3 + [3] * 3
    assert all((call.left <= EPS).all() for call in [*pruned.lost, *several.lost])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_come_back_from_a_file(dtype: Any, tmp_path: Path) -> None:
    model, ids, cache, queries = prepared("llama", dtype)
    path = tmp_path / "cache.safetensors"
    ct.to_cache(cache, queries, path)
    options = {"guard": "codes", "on_breach": "recall"}
    own = ct.prune_cache(cache, queries, EPS, **options)
    filed = ct.prune_cache(ct.from_cache(path), queries, EPS, source=path, **options)
    copied = pickle.loads(pickle.dumps(filed))
    ct.use(model, eps=0)
    logits = [calls_of(model, each, ids)[1] for each in (own, filed, copied)]
    assert any(call.recalled.any() for call in filed.lost)
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    filed = ct.prune_cache(cache, queries, EPS, source=path, **options)
    os.utime(path, ns=(1, 1))
    with pytest.raises(ck.CertkError, match="was changed"):
        calls_of(model, filed, ids)


def test_a_file_of_another_cache_is_no_source(tmp_path: Path) -> None:
    _, _, cache, queries = prepared("llama")
    path = tmp_path / "cache.safetensors"
    ct.to_cache(cache, queries, path)
    with torch.inference_mode():
        cache.layers[1].values[0, 1, 7, 0] += 1
    with pytest.raises(ck.CertkError, match=r"layer 1 does not hold the values of the cache"):
        ct.prune_cache(cache, queries, EPS, guard="codes", on_breach="recall", source=path)
    with pytest.raises(ck.CertkError, match="go with a guard"):
        ct.prune_cache(cache, queries, EPS, source=path)
