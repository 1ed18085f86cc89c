"""Pruned caches with guards: later losses are proven, and dropped keys fetched back where asked.

The truth is computed in float64 from what the model asked, over the kept keys and the dropped ones.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import certk_rs as ck
import model_zoo as zoo
from certk_rs import transformers as ct
from certk_rs._files.certificate import read_certificate
from certk_rs._files.tensor_file import SafetensorsFile
from certk_rs.transformers.guarded import GuardedLayer, Manner, _Part
from certk_rs.transformers.history import Found
from certk_rs.transformers.settings import Budget
from cli_fixtures import forge
from forgeries import put
from model_caches import last_queries, logits_of, prefilled, rows_of

N, MORE, EPS = 96, 12, 0.02
CODES: dict[str, Any] = {"rest": "file"}
RECALL: dict[str, Any] = {"rest": "file", "on_breach": "recall"}
NAMES = ["llama", "qwen3", "mistral"]

Prepared = tuple[Any, Any, Any, list[Any]]


def prepared(
    name: str = "llama", dtype: Any = torch.float32, *, sharp: float = 6, unlike: bool = False
) -> Prepared:
    """A model whose heads look at few keys, tokens, the cache of the first N, its queries."""
    return copy.deepcopy(_prepared(name, dtype, sharp, unlike))


@functools.cache
def _prepared(name: str, dtype: Any, sharp: float, unlike: bool) -> Prepared:
    model, ids = zoo.build(name).to(dtype), zoo.tokens(1, N + MORE)
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.q_proj.weight *= sharp
            if unlike:
                # The second kv head has small keys, which its queries make up for, and large
                # values.
                d = attention.head_dim
                attention.k_proj.weight[d:] /= 4
                attention.q_proj.weight[attention.q_proj.weight.shape[0] // 2 :] *= 4
                attention.v_proj.weight[d:] *= 30
                attention.o_proj.weight[:, attention.o_proj.weight.shape[1] // 2 :] /= 30
    return model, ids, prefilled(model, ids[:, :N]), last_queries(model, ids[:, :N], 8)


def decoded(model: Any, cache: Any, ids: Any, **use: Any) -> tuple[list[dict[str, Any]], Any, Any]:
    """The calls of certified attention, token by token, the logits, and what was recorded."""
    ct.use(model, **({"eps": 0} | use))
    with zoo.spied() as calls, ct.Recorder() as recorder:
        steps = [logits_of(model, ids[:, at : at + 1], cache) for at in range(N, N + MORE)]
    return calls, torch.cat(steps, 1), recorder


class Truth:
    """Real attention of a call over all keys, the dropped and the new ones."""

    def __init__(self, at: int, call: dict[str, Any], pruned: Any, full: Any) -> None:
        layer, step = call["module"].layer_idx, at // len(pruned.layers)
        own, whole = pruned.layers[layer], full.layers[layer]
        heads = rows_of(own)
        new = [
            torch.stack([rows[-MORE:] for rows in part])
            for part in (heads[: len(heads) // 2], heads[len(heads) // 2 :])
        ]
        keys, values = (
            torch.cat([old[0, :, :N], more[:, : step + 1]], 1)
            for old, more in zip((whole.keys, whole.values), new, strict=True)
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

    @property
    def gone(self) -> np.ndarray:
        """The share of the keys that were pruned."""
        return np.where(self.here, 0, self.weights).sum(axis=-1)

    def dropped(self, k: np.ndarray) -> np.ndarray:
        """The least share that keeping k of the others loses."""
        here = np.where(self.here, self.weights, 0)
        best = np.cumsum(-np.sort(-here, axis=-1), axis=-1)
        return here.sum(axis=-1) - np.take_along_axis(best, k[:, None] - 1, axis=-1)[:, 0]


# ------------------------------------------------------------------------------------- proofs


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_later_queries_lose_is_proven(name: str, dtype: Any) -> None:
    model, ids, cache, queries = prepared(name, dtype)
    pruned = ct.prune_cache(cache, queries, EPS, **CODES)
    assert pruned.guard_bytes > 0
    calls, _, recorder = decoded(model, pruned, ids)
    assert len(pruned.lost) == len(calls) == MORE * len(pruned.layers)
    over, near = 0, []
    for at, (call, said) in enumerate(zip(calls, pruned.lost, strict=True)):
        assert said.layer == call["module"].layer_idx
        real = Truth(at, call, pruned, cache).gone
        assert (real <= said.lost[:, 0] * (1 + 1e-9)).all()
        near += (said.lost[:, 0] <= 1.3 * real + 1e-3).tolist()
        over += int((real > EPS).sum())
        assert (said.left == said.lost).all()
        assert not said.recalled.any()
    assert np.mean(near) > 0.8
    assert over > 0, "no query lost more than the budget: nothing was tried"
    worst = max(float(call.lost.max()) for call in pruned.lost)
    assert max(layer.tail_mass_upper for layer in recorder.layers) == worst
    assert not all(layer.holds for layer in recorder.layers)


@pytest.mark.older
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("promote", [False, True])
def test_recall_keeps_every_query_within_its_budget(name: str, promote: bool) -> None:
    model, ids, cache, queries = prepared(name)
    pruned = ct.prune_cache(cache, queries, EPS, promote=promote, **RECALL)
    *_, recorder = decoded(model, pruned, ids)
    assert all((call.left <= EPS).all() for call in pruned.lost)
    assert any(call.recalled.any() for call in pruned.lost)
    assert all(layer.holds and layer.error_bound is not None for layer in recorder.layers)
    fetched = sum(int(call.recalled.sum()) for call in pruned.lost)
    assert sum(map(sum, pruned.promoted)) == (fetched if promote else 0)


@pytest.mark.parametrize("on_breach", ["report", "recall"])
def test_outputs_are_as_near_as_is_said(on_breach: Any) -> None:
    model, ids, cache, queries = prepared()
    options = CODES | {"on_breach": on_breach}
    pruned = ct.prune_cache(cache, queries, 0.05, promote=True, **options)
    calls, _, recorder = decoded(model, pruned, ids)
    for at, (call, lost) in enumerate(zip(calls, pruned.lost, strict=True)):
        off, bound = Truth(at, call, pruned, cache).off, recorder.calls[at].error_bound
        assert bound is not None
        assert (off <= bound[0, :, 0] * (1 + 1e-9)).all()
        assert (off <= lost.moved[:, 0] + 1e-4).all()
        assert (lost.moved <= bound[0]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("promote", [False, True])
def test_outputs_are_kept_within_a_budget_of_their_own(dtype: Any, promote: bool) -> None:
    model, ids, cache, queries = prepared(dtype=dtype)
    noted = ct.prune_cache(cache, queries, 0.3, out_tol=0.05, **CODES)
    pruned = ct.prune_cache(cache, queries, 0.3, out_tol=0.05, promote=promote, **RECALL)
    *_, recorder = decoded(model, noted, ids)
    assert not all(layer.holds for layer in recorder.layers)
    assert any((call.moved > 0.05).any() for call in noted.lost)
    calls, _, recorder = decoded(model, pruned, ids)
    assert all(layer.holds and layer.budget == 0.05 for layer in recorder.layers)
    fetched = sum(int(call.recalled.sum()) for call in pruned.lost)
    gone = sum(map(len, pruned.layers[0].guarded.guard.positions)) * len(pruned.layers)
    assert 0 < fetched < 0.9 * gone * MORE
    # A larger share than the budget of mass may be left where it does not move the output.
    for at, call in enumerate(calls):
        assert (Truth(at, call, pruned, cache).off <= 0.05).all()


@pytest.mark.parametrize("on_breach", ["report", "recall"])
def test_what_attention_drops_is_lost_beside_what_was_pruned(on_breach: Any) -> None:
    model, ids, cache, queries = prepared(sharp=0.4, unlike=True)
    eps, own = 0.4, 0.25
    pruned = ct.prune_cache(cache, queries, eps, rest="file", on_breach=on_breach)
    calls, _, recorder = decoded(model, pruned, ids, eps=own, even_if_slower=True)
    both = recalled = 0
    every = zip(calls, recorder.calls, pruned.lost, strict=True)
    for at, (call, said, lost) in enumerate(every):
        truth = Truth(at, call, pruned, cache)
        upper = said.tail_mass_upper[0, :, -1]
        assert said.error_bound is not None
        assert (truth.off <= said.error_bound[0, :, -1] * (1 + 1e-9)).all()
        if on_breach == "recall":
            assert (upper <= eps).all()
            recalled += int(lost.recalled.sum())
            continue
        gone, dropped = truth.gone, truth.dropped(said.k[0, :, -1])
        assert (gone + dropped <= upper * (1 + 1e-9)).all()
        assert (upper <= lost.lost[:, -1]).all()
        # Neither loss is as large alone, the guard's as a share of what was not dropped before.
        both += int((gone + dropped > 1.05 * np.maximum(gone / (1 - dropped), own)).sum())
    assert recalled > 0 if on_breach == "recall" else both > 100


def test_what_a_part_has_dropped_weighs_where_parts_are_put_together() -> None:
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal(shape) for shape in ((1, 9, 16), (1, 80, 16)))
    # Within a part all values are alike: only the shares of the parts can be wrong.
    v = np.repeat(rng.standard_normal((1, 2, 3)), 40, axis=1)
    query, keys, values = (torch.from_numpy(x.astype(np.float32)) for x in (q, k, v))
    halves = [
        _Part.of(
            ck.attention(query, keys[:, part], values[:, part], eps, even_if_slower=True), None
        )
        for part, eps in ((slice(40), 0.3), (slice(40, 80), 0.0))
    ]
    assert halves[0].tail.max() > 0.2
    both = halves[0].joined(halves[1])
    real = ck.attention(query.double(), keys.double(), values.double(), 0.0).out
    off = np.linalg.norm((both.out.double() - real).numpy(), axis=-1)
    assert (off <= both.error() * (1 + 1e-9)).all()
    assert off.max() > 0.01


def test_what_is_left_to_dropped_keys_is_rounded_down() -> None:
    rng = np.random.default_rng(0)
    eps = 10.0 ** -rng.uniform(0.1, 12, (2, 5000))
    here: Any = SimpleNamespace(tail=0.9 * eps * rng.random(eps.shape))
    layer: Any = SimpleNamespace(losses=SimpleNamespace(manner=Manner(0.5)))
    both = here.tail + GuardedLayer._most(layer, here, eps)
    assert (both * (1 + 2.0**-51) <= eps).all()
    assert (both >= 0.999 * eps).all()


def test_a_call_beyond_its_budget_is_not_forgotten() -> None:
    layer, n = torch.nn.Module(), np.array([4])
    with ct.Recorder(error_bounds=False) as recorder:
        for lost in (0.1, 0.3, 0.1):
            k = np.array([2])
            result: Any = SimpleNamespace(tail_mass_upper=np.array([lost]), k=k, scored=k)
            recorder._add(layer, Found(result, n, Budget(0.2)))
    [told] = recorder.layers
    assert (told.holds, told.tail_mass_upper, told.calls) == (False, 0.3, 3)


def test_nothing_is_lost_with_a_budget_of_nothing() -> None:
    model, ids, cache, queries = prepared()
    pruned = ct.prune_cache(cache, queries, 0.0, **RECALL)
    # A set that keeps everything drops nothing: make the budget nothing of one that drops half.
    thin = ct.prune_cache(cache, queries, 0.3, **RECALL)
    for layer in thin.layers:
        layer.guarded._eps[:] = 0
    full = copy.deepcopy(cache)
    steps = [logits_of(model, ids[:, at : at + 1], full) for at in range(N, N + MORE)]
    for each in (thin, pruned):
        assert torch.allclose(decoded(model, each, ids)[1], torch.cat(steps, 1), atol=1e-4)
    assert all((call.left == 0).all() for call in thin.lost)


def test_few_stay_and_the_oldest_go() -> None:
    model, ids, cache, queries = prepared()
    pruned = ct.prune_cache(cache, queries, EPS, promote=True, most_promoted=3, **RECALL)
    decoded(model, pruned, ids)
    assert all(count <= 3 for layer in pruned.promoted for count in layer)
    assert all((call.left <= EPS).all() for call in pruned.lost)
    for layer in pruned.layers:
        guarded, full = layer.guarded, cache.layers[layer.guarded.layer].keys[0]
        for head, (there, held) in enumerate(zip(guarded._there, guarded._held, strict=True)):
            assert not len(there) or torch.equal(held[0], full[head, torch.from_numpy(there)])
            calls = (call for call in pruned.lost if call.layer == guarded.layer)
            latest = [at for at, call in enumerate(calls, 1) if call.recalled[head]][-1:]
            assert guarded._since[head].max(initial=0) == max(latest, default=0)


@pytest.mark.parametrize(
    ("prune", "use", "dtype", "message"),
    [
        ({"on_breach": "raise"}, {}, torch.float32, "head .: a query may lose .* more than eps"),
        ({}, {"eps": 0.5, "even_if_slower": True}, torch.float32, "use with a smaller eps"),
        (
            {"on_breach": "recall", "out_tol": 1e-5}, {}, torch.bfloat16,
            "head .: an output may be off by .* out_tol = 1e-05: that is round",
        ),
        (
            {"on_breach": "raise", "out_tol": 1e-5}, {}, torch.bfloat16,
            "out_tol = 1e-05: pass on_breach='recall'",
        ),
    ],
)  # fmt: skip
def test_breaches_that_are_errors(
    prune: dict[str, Any], use: dict[str, Any], dtype: Any, message: str
) -> None:
    model, ids, cache, queries = prepared(dtype=dtype)
    eps = 0.3 if "out_tol" in prune else 0.001
    pruned = ct.prune_cache(cache, queries, eps, **CODES, **prune)
    with pytest.raises(ck.CertkError, match=rf"layer \d, .*{message}|{message}"):
        decoded(model, pruned, ids, **use)


def test_rounding_beyond_a_budget_is_recorded() -> None:
    model, ids, cache, queries = prepared(dtype=torch.bfloat16)
    *_, recorder = decoded(model, ct.prune_cache(cache, queries, 0.3, out_tol=1e-5, **CODES), ids)
    assert not any(layer.holds for layer in recorder.layers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_breach": "recall"}, "on_breach and source: not for rest='drop'"),
        ({"promote": True}, "promote and most_promoted: not for rest='drop'"),
        ({"out_tol": 1.0}, "out_tol: not for rest='drop'; pass rest='file'"),
        ({"source": "x"}, "on_breach and source: not for rest='drop'"),
        ({"rest": "codes", "most_promoted": 3}, "promote and most_promoted: not for rest='codes'"),
        ({"rest": "codes", "compact": True}, "compact: not for rest='codes'"),
        ({"rest": "balls"}, "rest is 'balls'"),
        ({"rest": "file", "on_breach": "shrug"}, "on_breach is 'shrug'"),
        ({"rest": "file", "most_promoted": -1}, "most_promoted is -1"),
        ({"rest": "file", "out_tol": -1.0}, "out_tol is -1.0"),
        ({"rest": "file", "out_tol": float("nan")}, "out_tol is nan"),
        ({"rest": "file", "out_tol": True}, "out_tol is True"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    _, _, cache, queries = prepared()
    with pytest.raises(ck.CertkError, match=message):
        ct.prune_cache(cache, queries, EPS, **options)


# -------------------------------------------------------------------- copies, beams and sources


def test_copies_and_pickles_go_on_alike() -> None:
    model, ids, cache, queries = prepared()
    pruned = ct.prune_cache(cache, queries, EPS, promote=True, **RECALL)
    twins = [copy.deepcopy(pruned), pickle.loads(pickle.dumps(pruned))]
    ct.use(model, eps=0)
    texts = [
        model.generate(ids[:, : N + 1], past_key_values=each, max_new_tokens=6, do_sample=False)
        for each in (pruned, *twins)
    ]
    assert all(torch.equal(text, texts[0]) for text in texts)
    assert all(each.promoted == pruned.promoted for each in twins)
    assert any(map(any, pruned.promoted))


def test_every_beam_and_every_new_token_is_judged() -> None:
    model, ids, cache, queries = prepared()
    ct.use(model, eps=0)
    pruned = ct.prune_cache(cache, queries, EPS, **RECALL)
    pruned.batch_repeat_interleave(3)
    options = {"max_new_tokens": 4, "num_beams": 3, "do_sample": False}
    model.generate(ids[:, : N + 1], past_key_values=pruned, **options)
    assert len(pruned.lost) == 3 * len(pruned.layers) * 4
    several = ct.prune_cache(cache, queries, EPS, **RECALL)
    logits_of(model, ids[:, N:], several)
    several.crop(-3)
    logits_of(model, ids[:, -3:], several)
    assert [call.lost.shape[1] for call in several.lost] == [MORE] * 3 + [3] * 3
    assert all((call.left <= EPS).all() for call in [*pruned.lost, *several.lost])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_come_back_from_a_file(dtype: Any, tmp_path: Path) -> None:
    model, ids, cache, queries = prepared(dtype=dtype)
    path = tmp_path / "cache.safetensors"
    ct.to_cache(cache, queries, path)
    own = ct.prune_cache(cache, queries, EPS, **RECALL)
    filed = ct.prune_cache(ct.from_cache(path), queries, EPS, source=path, **RECALL)
    copied = pickle.loads(pickle.dumps(filed))
    found = [decoded(model, each, ids)[1] for each in (own, filed, copied)]
    assert any(call.recalled.any() for call in filed.lost)
    assert all(torch.equal(found[0], each) for each in found)
    filed = ct.prune_cache(cache, queries, EPS, source=path, **RECALL)
    os.utime(path, ns=(1, 1))
    with pytest.raises(ck.CertkError, match="was changed"):
        decoded(model, filed, ids)
    with torch.inference_mode():
        cache.layers[1].values[0, 1, 7, 0] += 1
    with pytest.raises(ck.CertkError, match=r"layer 1 does not hold the values of the cache"):
        ct.prune_cache(cache, queries, EPS, source=path, **RECALL)


# ----------------------------------------------------------------------- guards of pruned files


def written(
    tmp_path: Path, given: Prepared | None = None, **options: Any
) -> tuple[Prepared, Path, Path]:
    """A prepared model and cache, its cache file, and the output of that with a guard."""
    given = prepared() if given is None else given
    source = tmp_path / "x.safetensors"
    ct.to_cache(given[2], given[3], source)
    options = CODES | ({} if "out_tol" in options else {"eps": EPS}) | options
    [report] = ck.prune(source, tmp_path / "out", **options).outputs
    assert ck.verify(tmp_path / "out", against=source).holds
    return given, source, Path(report.target)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_as_if_it_had_been_pruned_in_memory(name: str, tmp_path: Path) -> None:
    (model, ids, cache, queries), source, output = written(tmp_path, prepared(name))
    for on_breach in ("report", "recall"):
        here = ct.prune_cache(cache, queries, EPS, rest="file", on_breach=on_breach)
        rows = source if on_breach == "recall" else None
        there = ct.from_cache(output, on_breach=on_breach, source=rows)
        assert torch.equal(*(decoded(model, each, ids)[1] for each in (here, there)))
        assert len(here.lost) == len(there.lost) == MORE * len(here.layers)
        for one, two in zip(here.lost, there.lost, strict=True):
            for part in ("lost", "left", "recalled"):
                assert np.array_equal(getattr(one, part), getattr(two, part))
        assert any((call.lost > EPS).any() for call in there.lost)
        assert on_breach == "report" or all((call.left <= EPS).all() for call in there.lost)


def test_each_layer_keeps_to_its_own_budget(tmp_path: Path) -> None:
    (model, ids, _, _), source, output = written(tmp_path, eps="0=0.2,*=0.01")

    def most(**options: Any) -> dict[int, float]:
        cache = ct.from_cache(output, on_breach="recall", source=source, **options)
        decoded(model, cache, ids)
        return {
            layer: max(float(call.left.max()) for call in cache.lost if call.layer == layer)
            for layer in range(3)
        }

    left = most()
    assert 0.01 < left[0] <= 0.2
    assert max(left[1], left[2]) <= 0.01
    # Or to one that is asked for now, of the mass or of the output.
    assert 0.01 < max(most(eps=0.05).values()) <= 0.05
    with ct.Recorder() as recorder:
        most(out_tol=0.01)
    assert all(layer.holds and layer.budget == 0.01 for layer in recorder.layers)
    with pytest.raises(ck.CertkError, match="both given"):
        ct.from_cache(output, eps=0.1, out_tol=0.1)


@pytest.mark.parametrize("promote", [False, True])
def test_each_kv_head_keeps_to_its_own_budget(promote: bool, tmp_path: Path) -> None:
    """Budgets of mass that follow from one on the output: the second head's is a thirtieth."""
    given, source, output = written(tmp_path, prepared(unlike=True), out_tol=0.3, holdout=0.0)
    model, ids, cache, _ = given
    with SafetensorsFile(output) as file:
        certificate, _ = read_certificate(file.header.metadata["certk"])
    budgets = {layer: tuple(map(float, each)) for layer, each in certificate.eps.items()}
    assert all(one > 5 * two > 0 for one, two in budgets.values())
    pruned = ct.from_cache(output, on_breach="recall", source=source, promote=promote)
    calls, _, recorder = decoded(model, pruned, ids)
    more = 0
    every = zip(calls, recorder.calls, pruned.lost, strict=True)
    for at, (call, said, lost) in enumerate(every):
        eps = np.repeat(budgets[lost.layer], len(lost.left) // 2)
        assert (lost.left[:, -1] <= eps).all()
        more += int((lost.left[:, -1] > 2 * min(eps)).sum())
        truth = Truth(at, call, pruned, cache)
        assert said.error_bound is not None
        assert (truth.off <= said.error_bound[0, :, -1] * (1 + 1e-9)).all()
        assert promote or (truth.gone <= lost.lost[:, -1] * (1 + 1e-9)).all()
    assert more > 0
    assert any(lost.recalled[1] for lost in pruned.lost)


def test_rows_beyond_the_budget_of_their_own_head_are_recorded() -> None:
    model, ids, cache, queries = prepared()
    pruned = ct.prune_cache(cache, queries, EPS, **CODES)
    pruned._set_guards(
        [layer.guarded.guard for layer in pruned.layers], pruned._losses, [(0.999, EPS)] * 3
    )
    _, _, recorder = decoded(model, pruned, ids)
    eps = np.repeat([0.999, EPS], 3)[:, None]
    over = [(call.tail_mass_upper[0] > eps).any() for call in recorder.calls]
    assert [not record["holds"] for record in recorder.records()] == over
    assert any(
        beyond and (call.tail_mass_upper <= 0.999).all()
        for beyond, call in zip(over, recorder.calls, strict=True)
    )


@pytest.mark.parametrize("granularity", ["layer", "token"])
def test_sets_of_several_heads(granularity: str, tmp_path: Path) -> None:
    (model, ids, _, _), source, output = written(tmp_path, granularity=granularity)
    cache = ct.from_cache(output, on_breach="recall", source=source)
    for each in (pickle.loads(pickle.dumps(cache)), cache):
        decoded(model, each, ids)
        assert all((call.left <= EPS).all() for call in each.lost)


def test_what_is_refused(tmp_path: Path) -> None:
    (model, ids, _, _), source, output = written(tmp_path)
    ck.prune(source, tmp_path / "bare", EPS)
    # Another cache of the same shapes.
    other = tmp_path / "other.safetensors"
    content = bytearray(source.read_bytes())
    content[-1] ^= 1
    other.write_bytes(content)
    bare = tmp_path / "bare" / source.name
    asked = ({"source": source}, {"eps": 0.1}, {"out_tol": 0.1}, {"on_breach": "raise"},
             {"promote": True})  # fmt: skip
    for path, options, message in [
        (output, {"on_breach": "recall"}, "nothing says where the dropped keys are"),
        (source, {"on_breach": "raise"}, "is no output of certk prune, which on_breach"),
        *((bare, each, r"has no guard.*--rest file") for each in asked),
        (output, {"eps": -0.1}, "eps is"),
        (output, {"eps": 1.0}, "eps is"),
        (output, {"on_breach": "recall", "source": other}, "is not the one that was pruned"),
    ]:
        with pytest.raises(ck.CertkError, match=message):
            ct.from_cache(path, **options)
    with pytest.raises(ck.CertkError, match=r"layer \d.*: a query may lose .* with a smaller"):
        decoded(model, ct.from_cache(output, on_breach="raise"), ids)
    # The same cache, changed since.
    cache = ct.from_cache(output, on_breach="recall", source=source)
    source.write_bytes(content)
    with pytest.raises(ck.CertkError, match="changed"):
        decoded(model, cache, ids)


def test_damaged_guards_are_refused(tmp_path: Path) -> None:
    *_, output = written(tmp_path)
    content = output.read_bytes()
    size = int.from_bytes(content[:8], "little")
    for name, entry in json.loads(content[8 : 8 + size]).items():
        if ".guard_" in name and entry["data_offsets"][0] < entry["data_offsets"][1]:
            damaged = bytearray(content)
            damaged[8 + size + entry["data_offsets"][0]] ^= 1
            output.write_bytes(damaged)
            with pytest.raises(ck.CertkError, match="is not the one that was certified"):
                ct.from_cache(output)


def test_forged_sets_are_refused(tmp_path: Path) -> None:
    """Hashes that are right, of positions behind the text, before it, and out of order."""
    *_, output = written(tmp_path)
    right = output.read_bytes()
    for place, position in ((-1, N), (0, -1), (1, 0)):
        forge(output, put("1.indices", place, position))
        with pytest.raises(ck.CertkError, match="does not ascend from 0"):
            ct.from_cache(output)
        output.write_bytes(right)


def test_a_part_of_nearly_no_share_still_has_an_error() -> None:
    """Values of 1e30 beside a share of e^-40: the share rounds to 0, and their error does not."""
    q = torch.tensor([[[1.0, 1.0]]])
    one = ck.attention(q, torch.full((1, 1, 2), 20.0), torch.zeros(1, 1, 2), 0.0, scale=1.0)
    keys = torch.tensor([[[0.1, 1e-9], [0.1, 0.0]]])
    values = torch.tensor([[[1e30, 0.0], [-1e30, 0.0]]])
    two = ck.attention(q, keys, values, 0.0, scale=1.0)
    joined = _Part.of(one, None).joined(_Part.of(two, None))
    score = float(keys[0, 0].double().sum()) - float(keys[0, 1].double().sum())
    off = float(values[0, 0, 0]) * np.expm1(score) * np.exp(0.1 - 40.0)
    assert off > 1000
    assert abs(float(joined.out[0, 0, 0]) - off) <= joined.error()[0, 0]
