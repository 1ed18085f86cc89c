"""Guards of outputs: what later queries lose is proven from a file, and fetched from another."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import certk_rs as ck

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
zoo = pytest.importorskip("model_zoo")

from certk_rs import transformers as ct  # noqa: E402
from model_caches import prefilled, seen_by  # noqa: E402

N, MORE, EPS = 96, 10, 0.02
pytestmark = pytest.mark.usefixtures("one_thread")
one_thread = zoo.one_thread


def model_of(name: str) -> tuple[Any, Any]:
    model, ids = zoo.build(name), zoo.tokens(1, N + MORE)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 6
    return model, ids


def written(tmp_path: Path, name: str = "llama", **options: Any) -> tuple[Any, Any, Path, Path]:
    """A model, tokens, the capture of the first N, and its output with a guard."""
    model, ids = model_of(name)
    calls = seen_by(model, ids[:, :N])
    source = tmp_path / "x.safetensors"
    queries = [call["query"][:, :, -8:] for call in calls]
    ct.to_cache(prefilled(model, ids[:, :N]), queries, source)
    options = {"guard": "codes"} | options
    [report] = ck.prune(source, tmp_path / "out", options.pop("eps", EPS), **options).outputs
    assert ck.verify(tmp_path / "out", against=source).holds
    return model, ids, source, Path(report.target)


def decoded(model: Any, cache: Any, ids: Any) -> Any:
    ct.use(model, eps=0)
    with torch.inference_mode():
        steps = [
            model(input_ids=ids[:, at : at + 1], past_key_values=cache).logits
            for at in range(N, N + MORE)
        ]
    return torch.cat(steps, 1)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_as_if_it_had_been_pruned_in_memory(name: str, tmp_path: Path) -> None:
    model, ids, source, output = written(tmp_path, name)
    cache = prefilled(model, ids[:, :N])
    queries = [call["query"][:, :, -8:] for call in seen_by(model, ids[:, :N])]
    for on_breach in ("report", "recall"):
        here = ct.prune_cache(cache, queries, EPS, guard="codes", on_breach=on_breach)
        rows = source if on_breach == "recall" else None
        there = ct.from_cache(output, on_breach=on_breach, source=rows)
        logits = [decoded(model, each, ids) for each in (here, there)]
        assert torch.equal(*logits)
        assert len(here.lost) == len(there.lost) == MORE * len(here.layers)
        for one, two in zip(here.lost, there.lost, strict=True):
            assert np.array_equal(one.lost, two.lost)
            assert np.array_equal(one.left, two.left)
            assert np.array_equal(one.recalled, two.recalled)
        over = [bool((call.lost > EPS).any()) for call in there.lost]
        assert any(over)
        if on_breach == "recall":
            assert all((call.left <= EPS).all() for call in there.lost)


def test_each_head_keeps_to_its_own_budget(tmp_path: Path) -> None:
    model, ids, source, output = written(tmp_path, eps="0=0.2,*=0.01")
    cache = ct.from_cache(output, on_breach="recall", source=source)
    decoded(model, cache, ids)
    left = {call.layer: 0.0 for call in cache.lost}
    for call in cache.lost:
        left[call.layer] = max(left[call.layer], float(call.left.max()))
    assert 0.01 < left[0] <= 0.2
    assert max(most for layer, most in left.items() if layer) <= 0.01
    # Or to one that is asked for now.
    cache = ct.from_cache(output, on_breach="recall", source=source, eps=0.05)
    decoded(model, cache, ids)
    most = max(float(call.left.max()) for call in cache.lost)
    assert 0.01 < most <= 0.05
    # Or to one on the output.
    cache = ct.from_cache(output, on_breach="recall", source=source, out_tol=0.01)
    with ct.Recorder() as recorder:
        decoded(model, cache, ids)
    assert all(layer.holds and layer.budget == 0.01 for layer in recorder.layers)
    assert any(call.recalled.any() for call in cache.lost)
    with pytest.raises(ck.CertkError, match="both given"):
        ct.from_cache(output, eps=0.1, out_tol=0.1)


@pytest.mark.parametrize("granularity", ["layer", "token"])
def test_sets_of_several_heads(granularity: str, tmp_path: Path) -> None:
    model, ids, source, output = written(tmp_path, granularity=granularity)
    cache = ct.from_cache(output, on_breach="recall", source=source)
    decoded(model, pickle.loads(pickle.dumps(cache)), ids)
    decoded(model, cache, ids)
    assert all((call.left <= EPS).all() for call in cache.lost)


def test_raise(tmp_path: Path) -> None:
    model, ids, _, output = written(tmp_path)
    with pytest.raises(
        ck.CertkError, match=r"layer \d.*: a query may lose .* prune with a smaller"
    ):
        decoded(model, ct.from_cache(output, on_breach="raise"), ids)


def test_what_is_refused(tmp_path: Path) -> None:
    _, _, source, output = written(tmp_path)
    with pytest.raises(ck.CertkError, match="nothing says where the dropped keys are"):
        ct.from_cache(output, on_breach="recall")
    with pytest.raises(ck.CertkError, match="is no output of certk prune, which on_breach"):
        ct.from_cache(source, on_breach="raise")
    ck.prune(source, tmp_path / "bare", EPS)
    for asked in (
        {"source": source},
        {"eps": 0.1},
        {"out_tol": 0.1},
        {"on_breach": "raise"},
        {"promote": True},
    ):
        with pytest.raises(ck.CertkError, match=r"has no guard.*--guard codes"):
            ct.from_cache(tmp_path / "bare" / source.name, **asked)
    for eps in (-0.1, 1.0):
        with pytest.raises(ck.CertkError, match="eps is"):
            ct.from_cache(output, eps=eps)
    # Another cache of the same shapes, and the same one changed since.
    other = tmp_path / "other.safetensors"
    content = bytearray(source.read_bytes())
    content[-1] ^= 1
    other.write_bytes(content)
    with pytest.raises(ck.CertkError, match="is not the one that was pruned"):
        ct.from_cache(output, on_breach="recall", source=other)
    cache = ct.from_cache(output, on_breach="recall", source=source)
    source.write_bytes(content)
    model, ids = model_of("llama")
    with pytest.raises(ck.CertkError, match="changed"):
        decoded(model, cache, ids)


def test_damaged_guards_are_refused(tmp_path: Path) -> None:
    *_, output = written(tmp_path)
    content = output.read_bytes()
    size = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + size])
    for name, entry in entries.items():
        if ".guard_" in name and entry["data_offsets"][0] < entry["data_offsets"][1]:
            damaged = bytearray(content)
            damaged[8 + size + entry["data_offsets"][0]] ^= 1
            output.write_bytes(damaged)
            with pytest.raises(ck.CertkError, match="is not the one that was certified"):
                ct.from_cache(output)
