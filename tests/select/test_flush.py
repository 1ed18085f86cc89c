"""A host that takes subnormal numbers for zero (torch.set_flush_denormal) changes no bit.

Every public function, on numbers that such a host would lose: float32 of 1e-39, float64 of 1e-310,
and answers as small as that. Inputs are made beforehand.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import certk_rs as ck
from certk_rs import bounds, gaussian, montecarlo, output, prune, windows
from certk_rs._files.values import widen
from certk_rs.audit import audit
from cli_fixtures import forge, read_output, safetensors_bytes, tensor
from same_bytes import bits

torch = pytest.importorskip("torch")
DTYPES = ("float32", "float64", "float16", "bfloat16")


@contextmanager
def flushing() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def test_the_mode_does_something() -> None:
    with flushing():
        assert np.array([1e-310]) * np.array([1.0]) == 0.0
        assert np.array([1e-39], np.float32).astype(np.float64) == 0.0


def stored(values: np.ndarray, dtype: str) -> Any:
    if dtype == "bfloat16":
        return torch.from_numpy(values.astype(np.float32)).to(torch.bfloat16)
    return values.astype(dtype)


def attended(dtype: str, size: float) -> Callable[[], Any]:
    """Attention over values, or keys, that would be lost."""
    rng = np.random.default_rng(7)
    q, k, v = rng.standard_normal((3, 2, 40, 8))
    parts = [stored(x, dtype) for x in (q, k, v * size)]
    large = {"float16": 1e3, "float64": 1e300}.get(dtype, 1e37)
    tiny = [stored(x, dtype) for x in (q * large, k * size, v)]

    def run() -> Any:
        answers: list[Any] = []
        for queries, keys, values in (parts, tiny):
            for options in ({}, {"sinks": [1e-310, 700.0]}, {"ball": ck.ValueBall(values)}):
                found = ck.attention(queries, keys, values, 0.2, scale=0.5, **options)
                answers += [found, found.error_bound]
            within = ck.attention(queries, keys, values, out_tol=1.0, scale=0.5)
            answers += [within, within.error_bound]
        return answers

    return run


# Made before any flushing, as all inputs here are.
KEYS = (np.random.default_rng(8).standard_normal((200, 8)) * 1e-39).astype(np.float32)
QUERIES = (np.random.default_rng(8).standard_normal((3, 8)) * 3e37).astype(np.float32)
TINY = np.float32(1e-39)
TENSORS = tuple(torch.arange(24.0).reshape(3, 8) * s for s in (1e-39, 1e36, 1e-39))
SCORES = torch.tensor([[1e-39, 0.0, -1e-39, 2e-39]])
BUDGET = torch.tensor(1e-39, dtype=torch.float32)


def indexed() -> Any:
    keys, q = KEYS, QUERIES
    index = ck.KeyIndex.build(keys[:150])
    index.append(keys[150:])
    found = [index.search(q, 0.1, scale=scale) for scale in (40.0, TINY, 1e-310)]
    found += [index.search(q, 1e-310), index.search(q, None, rule="top_k", k=3)]
    index.check(keys)
    again = pickle.loads(pickle.dumps(index))
    ball = ck.ValueBall(keys[:10])
    ball.append(keys[10:])
    return [found, list(index.arrays()), again.search(q, 0.1).indices, ball.radius]


def rows(dtype: str) -> Callable[[], Any]:
    """Selection and its kin: scores of which a flush makes ties, masses among subnormal numbers."""
    size = {"float32": 1e-39, "float64": 1e-310, "float16": 1e-7, "bfloat16": 1e-39}[dtype]
    rng = np.random.default_rng(9)
    scores = stored(rng.integers(-9, 9, (4, 60)) * size, dtype)
    deep = stored(np.linspace(0.0, -1.0, 60) * (720.0 if dtype == "float64" else 100.0), dtype)
    values = stored(rng.standard_normal((60, 3)) * size, dtype)
    eps = np.array([0.3, 1e-3, 1e-310, 0.0])
    mask = stored(np.where(np.arange(60) % 7 > 0, 0.0, -np.inf) + size, dtype)

    def run() -> Any:
        answers: list[Any] = []
        for options in ({}, {"scale": 1e-310}, {"scale": 1e300}, {"mask": mask}, {"keep_last": 3}):
            chosen = ck.select(scores, eps, prove_minimal=True, **options)
            answers += [chosen, chosen.kl_upper]
        few = ck.select(deep, 1e-300)
        answers += [few.indices, few.tail_mass_upper, few.kl_upper, few.summary(), repr(few)]
        for independent in (False, True):
            for row, keep in ((scores, [[0, 1]] * 4), (deep, [0])):
                judged = ck.certify(row, keep, eps=1e-310, independent=independent)
                answers += [judged, judged.summary()]
        answers += [ck.keep_set(scores, eps, scale=3.0)]
        answers += [bounds.single_gap(scores, 5), bounds.score_gap(scores, 5)]
        answers += [bounds.multi_gap(scores, 5), bounds.smallest_k(scores, 1e-310, "threshold")]
        answers += [bounds.best_cuts(scores, 5), gaussian.fit(scores, eps=eps)]
        answers += [windows.participation(deep), windows.effective(deep, 1e-310)]
        answers += [bounds.output_error(scores, values, [[0, 1]] * 4)]
        answers += [output.select_output(scores, values, size)]
        answers += [montecarlo.tail_mass(deep, [0, 1], delta=0.1, draws=20, seed=1)]
        return answers

    return run


def numbers() -> Any:
    tiny = np.array([5e-324, 1e-310, 1e-300])
    weights = np.array([[1e-310, 1.0, 1e-320]])
    chosen = ck.select(weights, 1e-311, kind="probs")
    return [
        bounds.kl_from_tail_mass(tiny),
        bounds.tail_mass_from_kl(tiny),
        bounds.required_gap(10, 3, tiny),
        bounds.blockwise([1, 1], [1e-310, -1.0], [1e-320, -2.0], [True, False]),
        gaussian.keep_fraction(tiny, 0.5),
        gaussian.tail_mass(38.0, 0.5),
        gaussian.threshold(1.0, tiny),
        gaussian.plan(1, 1e-310, 0.1),
        gaussian.plan(10, 1.0, 1e-310),
        windows.WindowPolicy(1e-310, 0.5).size([5, 10]),
        windows.fit([2.0, 4.0, 8.0], [1e-310, 2e-310, 3e-310]),
        windows.scale_r(1e-310, [[1e-310, 1.0]], [[1.0, 1e-310]]),
        montecarlo.clt_interval(tiny, 0.1),
        montecarlo.Confidence(0.1).feed(tiny).interval(),
        [chosen.indices, chosen.tail_mass_upper, chosen.kl_upper, chosen.summary()],
        ck.certify(weights, [[1]], eps=1e-310, kind="probs").summary(),
        [
            ck.certify(weights, [[1]], kind="probs", independent=i).tail_mass_upper
            for i in (False, True)
        ],
    ]


def compiled() -> Any:
    import certk_rs.torch as ct

    scores = SCORES
    return [
        *ct.attention(*TENSORS, 0.1),
        *ct.select(scores, BUDGET, scale=3.0),
        *ct.select_mask(scores, 0.3),
        *ct.certify(scores, torch.tensor([[0]]), eps=0.3)[:3],
        *ct.keep_set(scores, 0.3),
    ]


CALLS: dict[str, Callable[[], Any]] = {
    **{f"attention of {d}": attended(d, 1e-39) for d in ("float32", "bfloat16")},
    "attention of float16": attended("float16", 1e-7),
    "attention of float64": attended("float64", 1e-310),
    "index": indexed,
    **{f"rows of {d}": rows(d) for d in DTYPES},
    "numbers": numbers,
    "torch": compiled,
}


@pytest.mark.parametrize("name", CALLS)
def test_no_bit_changes(name: str) -> None:
    want = bits(CALLS[name]())
    with flushing():
        got = bits(CALLS[name]())
    assert got == want


def test_an_answer_is_not_lost_where_it_is_narrowed() -> None:
    """The output is rounded to float32 once, and that is what the bound is about."""
    q, k = np.ones((1, 1), np.float32), np.zeros((3, 1), np.float32)
    v = np.full((3, 1), 1e-39, np.float32)
    with flushing():
        found = ck.attention(q, k, v, 0.0)
        bound = found.error_bound.tobytes()
    assert found.out.view(np.uint32)[0, 0] == v.view(np.uint32)[0, 0]
    assert np.frombuffer(bound)[0] >= abs(float(found.out[0, 0]) - float(v[0, 0]))


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_the_audit_widens_all_there_is(dtype: str) -> None:
    words = np.uint32 if dtype == "F32" else np.uint16
    steps = 65536 if dtype != "F32" else 1 << 20
    raw = np.linspace(0, np.iinfo(words).max, steps).astype(words)
    raw = np.concatenate(
        [raw, np.arange(1000, dtype=words), words(1 << 15) + np.arange(9, dtype=words)]
    )
    infinite = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}[dtype]
    raw = raw[(raw & words(infinite)) != infinite]
    lent = raw if dtype == "BF16" else raw.view(np.float32 if dtype == "F32" else np.float16)
    if dtype == "BF16":
        want = (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    else:
        want = lent.astype(np.float64)
    assert np.array_equal(widen(lent, dtype).view(np.uint64), want.view(np.uint64))
    with flushing():
        got = widen(lent, dtype)
    assert np.array_equal(got.view(np.uint64), want.view(np.uint64))


def test_a_pruned_cache_is_the_same_file_and_its_audit_the_same(tmp_path: Path) -> None:
    """Keys of 1e-39 and queries of 1e38: an audit that lost the keys would refute what is true."""
    rng = np.random.default_rng(3)
    sizes = {"key": 1e-39, "value": 1e-39, "query": 1e38}
    tensors = {
        f"layers.0.{role}": tensor(
            (rng.standard_normal((1, 2, rows, 8)) * sizes[role]).clip(-3e38, 3e38), "F32"
        )
        for role, rows in (("key", 60), ("value", 60), ("query", 9))
    }
    source = tmp_path / "x.safetensors"
    source.write_bytes(safetensors_bytes(tensors, {"scale": "40"}))

    def pruned(out: str) -> list[bytes]:
        prune(source, tmp_path / out, 0.2, proof="full")
        return [
            np.ascontiguousarray(x).tobytes()
            for x in read_output(tmp_path / out / source.name).values()
        ]

    plain = pruned("plain")
    with flushing():
        assert pruned("flushed") == plain
        report = audit([tmp_path / "plain" / source.name], [source])
        [output] = report.outputs
        assert report.holds, list(map(str, output.findings))
        assert output.confirmed_rows == output.rows > 0


def test_codes_of_subnormal_keys_are_not_judged_by_a_host_that_loses_them(tmp_path: Path) -> None:
    """Codes of zeros with claims of no loss would be confirmed: the host is told to stop that."""
    rng = np.random.default_rng(0)
    sizes = {"key": 1e-39, "value": 1.0, "query": 1.0}
    tensors = {
        f"layers.0.{role}": tensor(rng.standard_normal((1, rows, 16)) * sizes[role], "F32")
        for role, rows in (("key", 40), ("value", 40), ("query", 3))
    }
    source = tmp_path / "x.safetensors"
    source.write_bytes(safetensors_bytes(tensors, {"scale": "1e39"}))
    prune(source, tmp_path / "out", 0.1, proof="full", rest="codes")
    output = tmp_path / "out" / source.name
    assert audit([output], [source]).holds

    def lose_nothing(stored: dict[str, np.ndarray]) -> None:
        bounds = stored["layers.0.key_bounds"].copy()
        bounds[:, [0, 1, 2, 4]] = 0
        stored["layers.0.key_bounds"] = bounds
        for name in ("layers.0.key_radii", "layers.0.key_gram"):
            stored[name] = np.zeros_like(stored[name])

    forge(output, lose_nothing)
    assert not audit([output], [source]).holds
    for threads in (1, 2):
        with flushing():
            report = audit([output], [source], threads=threads)
        [judged] = report.outputs
        assert not judged.holds
        assert "takes subnormal numbers for zero" in str(judged.findings[0])


def test_a_recorder_sees_the_smallest_loss() -> None:
    pytest.importorskip("transformers")
    from certk_rs.transformers.history import Found
    from certk_rs.transformers.recorder import Recorder
    from certk_rs.transformers.settings import Budget

    q, k = np.full((1, 1, 1, 1), 1.0, np.float32), np.array([0.0] + [-600.0] * 30)
    lent = k.astype(np.float32).reshape(1, 1, 31, 1)
    found = ck.attention(
        q, lent, lent, 0.1, sinks=115.0, even_if_slower=True, index=ck.KeyIndex.build(lent)
    )
    assert found.k[0, 0, 0] < 31
    assert 0.0 < found.tail_mass_upper[0, 0, 0] < np.finfo(np.float64).tiny
    nothing = ck.attention(q, lent, lent, 0.0)
    with flushing():
        budget, recorder, module = Budget(0.1, None, None), Recorder(), torch.nn.Module()
        for each in (nothing, found, nothing):
            recorder._add(module, Found(each, np.full((1, 1, 1), 31), budget))
        [layer], calls = recorder.layers, recorder.records()
        recorder.to_jsonl(lines := io.StringIO())
    least = found.tail_mass_upper[0, 0, 0]
    assert layer.tail_mass_upper == least
    assert [call["tail_mass_upper"] for call in calls] == [0.0, least, 0.0]
    assert [json.loads(line) for line in lines.getvalue().splitlines()] == calls
