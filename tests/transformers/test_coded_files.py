"""Outputs of `certk prune --rest codes` as caches, and exact rows where codes prove too little."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import certk_rs as ck
import model_zoo as zoo
from certk_rs import transformers as ct
from cli_fixtures import Arrays, forge
from model_caches import last_queries, logits_of, prefilled

N, MORE = 90, 8
EPS = 0.02


def written(
    folder: Path, dtype: Any = torch.float32, outlier: bool = False, **options: Any
) -> tuple[Any, Any, Any, Path, Path]:
    """A model, ids, its cache, that cache as a file, and the output with codes of it."""
    model, ids = zoo.peaked("llama").to(dtype), zoo.tokens(1, N + MORE, seed=3)
    cache = prefilled(model, ids[:, :N])
    if outlier:
        # A key without a code in one head, and one that no query has been given.
        cache.layers[1].keys = cache.layers[1].keys.clone()
        cache.layers[1].keys[0, 1, 40] *= 1000
    source = folder / "x.safetensors"
    ct.to_cache(cache, last_queries(model, ids[:, :N], 16), source)
    [report] = ck.prune(source, folder / "out", 0.1, rest="codes", **options).outputs
    return model, ids, cache, source, Path(report.target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("granularity", ["head", "layer", "token"])
@pytest.mark.parametrize("bits", [(None, 8), (12, 4), (8, 8)])
def test_a_file_is_what_encoding_gives(
    dtype: Any, granularity: str, bits: tuple[Any, int], tmp_path: Path
) -> None:
    options = {"granularity": granularity, "key_bits": bits[0], "value_bits": bits[1]}
    model, ids, cache, _, output = written(tmp_path, dtype, outlier=True, **options)
    read = ct.from_cache(output)
    assert isinstance(read, ct.CodedCache)
    kept = [layer._positions for layer in read.layers]
    assert any(40 in places for places in kept[1])
    made = ct.encode_cache(cache, key_bits=bits[0], value_bits=bits[1], kept=kept)
    for one, other in zip(read.layers, made.layers, strict=True):
        assert one.index.bits == other.index.bits
        assert one.index.value_bits == other.index.value_bits
        assert one.kept_counts == other.kept_counts
        assert all(map(torch.equal, one._rows, other._rows))
    twins = [made, copy.deepcopy(read), pickle.loads(pickle.dumps(read)), read]
    ct.use(model, eps=EPS)
    wanted, *found = [logits_of(model, ids[:, N:], each) for each in twins]
    assert torch.isfinite(wanted).all()
    assert all(torch.equal(each, wanted) for each in found)
    assert read.get_seq_length() == N + MORE


def test_nothing_need_be_kept(tmp_path: Path) -> None:
    *_, output = written(tmp_path, hot=0)
    assert ct.from_cache(output).kept_fraction < 0.02


@pytest.mark.parametrize("from_file", [False, True])
def test_what_codes_do_not_prove_comes_from_exact_rows(from_file: bool, tmp_path: Path) -> None:
    how: dict[str, Any] = {"key_bits": 8, "value_bits": 8}
    model, ids, cache, source, output = written(tmp_path, hot=0, **how)
    queries = last_queries(model, ids[:, :N], 16)

    def coded(**options: Any) -> ct.CodedCache:
        if from_file:
            given = options.pop("source", source if options else None)
            return ct.from_cache(output, source=given, **options)  # type: ignore[return-value]
        return ct.prune_cache(cache, queries, 0.1, rest="codes", keep=1, **how, **options)

    ct.use(model, eps=1e-3)
    with ct.Recorder() as recorder:
        logits_of(model, ids[:, N : N + 2], coded())
    assert max(call.tail_mass_upper.max() for call in recorder.calls) > 1e-3
    with pytest.raises(ck.CertkError, match=r"layer \d, head \d: codes prove .*'recall', or"):
        logits_of(model, ids[:, N : N + 2], coded(on_breach="raise"))
    recalling = coded(on_breach="recall")
    for each in (copy.deepcopy(recalling), pickle.loads(pickle.dumps(recalling)), recalling):
        with ct.Recorder() as recorder:
            logits_of(model, ids[:, N : N + 2], each)
        assert max(call.tail_mass_upper.max() for call in recorder.calls) <= 1e-3
        assert each.recalled > 0
    # Beams have the rows of the one sequence.
    beams = coded(on_breach="recall")
    beams.batch_repeat_interleave(2)
    with ct.Recorder() as recorder:
        logits_of(model, ids[:, N : N + 2].repeat(2, 1), beams)
    assert max(call.tail_mass_upper.max() for call in recorder.calls) <= 1e-3
    ct.use(model, out_tol=1e-4)
    with pytest.raises(ck.CertkError, match=r"out_tol = 0\.0001"):
        logits_of(model, ids[:, N : N + 1], coded(on_breach="raise"))
    with ct.Recorder() as recorder:
        logits_of(model, ids[:, N : N + 1], coded(on_breach="recall"))
    assert all(call.error_bound.max() <= 1e-4 for call in recorder.calls)


def test_a_refused_step_can_be_tried_again(tmp_path: Path) -> None:
    """Layers that had appended their keys give them up: lengths stay equal."""
    model, ids, _, _, output = written(tmp_path, hot=0, key_bits=8)
    cache = ct.from_cache(output, on_breach="raise")
    ct.use(model, eps=1e-3)
    for _ in range(2):
        with pytest.raises(ck.CertkError, match="codes prove"):
            logits_of(model, ids[:, N : N + 2], cache)
        assert {layer.get_seq_length() for layer in cache.layers} == {N}
    ct.use(model, eps=0.9)
    found = logits_of(model, ids[:, N : N + 2], cache)
    assert torch.equal(found, logits_of(model, ids[:, N : N + 2], ct.from_cache(output)))


def test_scores_that_codes_cannot_hold_are_recalled(tmp_path: Path) -> None:
    model, ids = zoo.peaked("llama"), zoo.tokens(1, N + MORE, seed=3)
    cache = prefilled(model, ids[:, :N])
    for layer in cache.layers:
        layer.keys = layer.keys.clone()
        layer.keys[0, 0, 5, 3] *= 1e14
    queries = last_queries(model, ids[:, :N], 16)
    ct.use(model, eps=0.1)
    with pytest.raises(ck.CertkError, match="overflow float32"):
        logits_of(model, ids[:, N : N + 1], ct.encode_cache(cache))
    coded = ct.prune_cache(cache, queries, 0.1, rest="codes", on_breach="recall")
    with ct.Recorder() as recorder:
        logits_of(model, ids[:, N : N + 1], coded)
    assert max(call.tail_mass_upper.max() for call in recorder.calls) <= 0.1
    assert coded.nbytes > sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def test_what_is_refused(tmp_path: Path) -> None:
    *_, source, output = written(tmp_path)
    other = tmp_path / "other.safetensors"
    content = bytearray(source.read_bytes())
    content[-1] ^= 1
    other.write_bytes(content)
    for options, message in [
        ({"compact": True}, "has codes of all keys: compact"),
        ({"eps": 0.1}, "give eps or out_tol to use"),
        ({"out_tol": 0.1}, "give eps or out_tol to use"),
        ({"promote": True}, "has codes of all keys"),
        ({"on_breach": "shrug"}, "on_breach is 'shrug'"),
        ({"source": 5}, "source is a int; pass the path"),
        ({"on_breach": "recall"}, "nothing says where the exact rows are"),
        ({"on_breach": "recall", "source": other}, "is not the one that was pruned"),
    ]:
        with pytest.raises(ck.CertkError, match=message):
            ct.from_cache(output, **options)  # type: ignore[arg-type]


def test_nonsense_is_refused_or_harmless(tmp_path: Path) -> None:
    """Re-sealed files of which a tensor is zero, infinite or NaN: an error, or no wrong number."""
    model, ids, _, _, output = written(tmp_path)
    content = output.read_bytes()
    ct.use(model, eps=EPS)
    refused, names = set(), []

    def fill(byte: int, name: str | None) -> None:
        def edit(arrays: Arrays) -> None:
            names[:] = [
                each for each in arrays if each.startswith(("layers.1.key_", "layers.1.value_"))
            ]
            if name is not None:
                arrays[name] = (
                    np.full(arrays[name].nbytes, byte, np.uint8)
                    .view(arrays[name].dtype)
                    .reshape(arrays[name].shape)
                )

        output.write_bytes(content)
        forge(output, edit)

    fill(0, None)
    for name in list(names):
        for byte in (0x00, 0x7F, 0xFF):
            fill(byte, name)
            try:
                with ct.Recorder() as recorder:
                    logits_of(model, ids[:, N : N + 1], ct.from_cache(output))
                assert all((call.tail_mass_upper >= 0).all() for call in recorder.calls)
            except ck.CertkError:
                refused.add(name.removeprefix("layers.1."))
    assert refused >= {
        "key_scales",
        "key_gram",
        "key_bounds",
        "key_low_gram",
        "key_low_bounds",
        "value_gram",
        "value_spread",
        "value_bounds",
        "value_spread_bounds",
    }


@pytest.mark.parametrize("last", [0, 6])
def test_a_file_without_queries_is_gone_on_from(last: int, tmp_path: Path) -> None:
    model, ids, cache, source, _ = written(tmp_path)
    arrays = {name: array for name, array in load_file(source).items() if "query" not in name}
    bare = tmp_path / "bare.safetensors"
    save_file(arrays, bare)
    whole = ct.from_cache(bare)
    for one, other in zip(whole.layers, cache.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)
    how: dict[str, Any] = {"queries": "none", "rest": "codes"}
    [report] = ck.prune(bare, tmp_path / "bare", keep_last=last, **how).outputs
    truth = logits_of(model, ids[:, N:], whole)
    ct.use(model, eps=EPS)
    coded = ct.from_cache(report.target)
    made = ct.encode_cache(cache, kept=[[np.arange(N - last, N)] * 2] * len(cache.layers))
    assert torch.equal(logits_of(model, ids[:, N:], coded), logits_of(model, ids[:, N:], made))
    with ct.Recorder() as recorder:
        logits_of(model, ids[:, N:], ct.from_cache(report.target))
    assert max(call.tail_mass_upper.max() for call in recorder.calls) <= EPS
    recalling = ct.from_cache(report.target, source=bare, on_breach="recall")
    ct.use(model, eps=1e-6)
    with ct.Recorder() as recorder:
        found = logits_of(model, ids[:, N:], recalling)
    assert max(call.tail_mass_upper.max() for call in recorder.calls) <= 1e-6
    assert (found - truth).abs().max() < 1e-2
