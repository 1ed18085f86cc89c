"""Calls that memory cannot hold: an error or the right answer, never the end of the process.

Arrays of few bytes stand for huge ones: axes of length 0, and axes of stride 0. A process of its
own runs each call in a forked child, under limits of address space on both sides of what the call
needs, so that the refusal falls in another allocation each time.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import certk_rs as ck
from certk_rs import bounds, gaussian, montecarlo, output, windows

Call = Callable[[], Any]

# Beyond what the process has, in MiB; None is no limit. One call asks for up to a few hundred,
# and beside that for some 200 for two threads.
LIMITS = (4, 9, 16, 28, 72, 204, None)
# Around what two threads need that search together, where each may have what the other asks for.
NEAR = (*range(120, 280, 3), None)
# Seconds that a call may take.
PATIENCE = 30
# Rows for whose answers there is no memory, in an array that needs none.
HUGE = 2**40

RNG = np.random.default_rng(7)
F32 = np.float32


def _rows(n: int) -> Any:
    return np.broadcast_to(np.array([2.0, 1.0, 0.0, -1.0], F32), (n, 4))


def _keep(scores: Any) -> Any:
    kept = np.zeros(scores.shape[-1], np.bool_)
    kept[:2] = True
    return np.broadcast_to(kept, scores.shape)


def _of_scores(scores: Any, few: Any) -> dict[str, Call]:
    """Every function of scores; `few` are scores for those that take long."""
    bias = np.broadcast_to(-np.linspace(0, 1, scores.shape[-1], dtype=F32), scores.shape)
    values = np.broadcast_to(F32(1.0), (few.shape[-1], 1))
    estimate = {"delta": 0.1, "draws": 2, "seed": 1}
    return {
        "select": lambda: ck.select(scores, 0.1),
        "select one thread": lambda: ck.select(scores, 0.1, threads=1),
        "select prove_minimal": lambda: ck.select(scores, 0.1, prove_minimal=True),
        "select block_size": lambda: ck.select(scores, 0.1, block_size=2),
        "select keep_first": lambda: ck.select(scores, 0.1, keep_first=1),
        "select mask": lambda: ck.select(scores, 0.1, mask=np.broadcast_to(True, scores.shape)),
        "select bias": lambda: ck.select(scores, 0.1, mask=bias),
        "select probs": lambda: ck.select(np.abs(few), 0.1, kind="probs"),
        "select to_mask": lambda: ck.select(scores, 0.1).to_mask(),
        "certify": lambda: ck.certify(scores, _keep(scores), eps=0.1),
        "certify independent": lambda: ck.certify(few, _keep(few), eps=0.1, independent=True),
        "keep_set": lambda: ck.keep_set(few, 0.1),
        "score_gap": lambda: bounds.score_gap(scores, 2),
        "single_gap": lambda: bounds.single_gap(scores, 2),
        "multi_gap": lambda: bounds.multi_gap(few, 2, n_cuts=2),
        "best_cuts": lambda: bounds.best_cuts(few, 2, n_cuts=2),
        "smallest_k": lambda: bounds.smallest_k(few, 0.1, "threshold"),
        "smallest_k exact": lambda: bounds.smallest_k(few, 0.1),
        "smallest_k single_gap": lambda: bounds.smallest_k(few, 0.1, "single_gap"),
        "gaussian.fit": lambda: gaussian.fit(few, eps=0.1),
        "windows.effective": lambda: windows.effective(few, 0.01),
        "windows.participation": lambda: windows.participation(few),
        "tail_mass": lambda: montecarlo.tail_mass(few, _keep(few), **estimate),
        "tail_mass bounds": lambda: montecarlo.tail_mass(
            few, _keep(few), upper_bounds=few, **estimate
        ),
        "output_error": lambda: output.output_error(few, values, _keep(few)),
        "select_output": lambda: output.select_output(few, values, 0.1),
    }


@cache
def limited() -> dict[str, Call]:
    """The calls that run under limits."""
    long = (3 * RNG.standard_normal(2**20)).astype(F32)
    # Nothing narrows down where the boundary is.
    flat = np.zeros(2**20, F32)
    of_flat = _of_scores(flat, flat[: 2**18])
    calls = {
        **{f"rows: {name}": call for name, call in _of_scores(_rows(2**18), _rows(2**15)).items()},
        **{f"long: {name}": call for name, call in _of_scores(long, long[: 2**18]).items()},
        **{f"flat: {name}": of_flat[name] for name in of_flat if re.match("select|keep_set", name)},
    }
    one = RNG.standard_normal((32, 64)).astype(F32)
    many = np.broadcast_to(one[:1], (2**15, 64))
    keys = np.broadcast_to(one[:1], (2**18, 64))
    heads = np.broadcast_to(one[:4], (2**12, 4, 64))
    wide = np.broadcast_to(F32(1.0), (64, 4096))
    small = ck.KeyIndex.build(one, keep_keys=True)
    large_keys = RNG.standard_normal((2**16, 64)).astype(F32)
    large = ck.KeyIndex.build(large_keys, keep_keys=True)
    draws = np.broadcast_to(0.5, 2**18)

    def appended() -> Any:
        index = ck.KeyIndex.build(one)
        index.append(keys)
        return index.search(one, 0.1)

    def attended(*arguments: Any, **options: Any) -> Any:
        found = ck.attention(*arguments, **options)
        return found.out, found.k, found.error_bound

    def saved() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            large.save(Path(folder) / "index.safetensors")
            return ck.KeyIndex.load(Path(folder) / "index.safetensors").arrays()

    calls |= {
        "required_gap": lambda: bounds.required_gap(np.broadcast_to(9, 2**18), 2, 0.1),
        "kl_from_tail_mass": lambda: bounds.kl_from_tail_mass(np.broadcast_to(0.1, 2**18)),
        "tail_mass_from_kl": lambda: bounds.tail_mass_from_kl(np.broadcast_to(0.1, 2**18)),
        "blockwise": lambda: bounds.blockwise(
            np.broadcast_to(3, (2**18, 2)), 1.0, 0.0, np.array([True, False])
        ),
        "keep_fraction": lambda: gaussian.keep_fraction(np.broadcast_to(3.0, 2**18), 0.1),
        "gaussian.threshold": lambda: gaussian.threshold(np.broadcast_to(3.0, 2**18), 0.1),
        "gaussian.tail_mass": lambda: gaussian.tail_mass(np.broadcast_to(3.0, 2**18), 0.1),
        "plan": lambda: gaussian.plan(2**10, 3.0, 0.1),
        "window sizes": lambda: windows.WindowPolicy(1.0, 0.5).size(np.broadcast_to(9, 2**20)),
        "windows.fit": lambda: windows.fit(np.arange(4.0, 2**18), np.arange(4.0, 2**18)),
        "Confidence": lambda: montecarlo.Confidence(0.1).feed(draws).interval(),
        "build": lambda: ck.KeyIndex.build(keys).search(one, 0.1),
        "build of heads": lambda: ck.KeyIndex.build(heads).shape,
        "build of transposed keys": lambda: ck.KeyIndex.build(wide).shape,
        "append": appended,
        "save and load": saved,
        "search of many": lambda: small.search(many, 0.1),
        "search of long": lambda: large.search(one, 0.1),
        "search of long by gap": lambda: large.search(one[:4], 0.1, rule="gap"),
        "search for top_k": lambda: large.search(one[:4], None, rule="top_k", k=9),
        "attention of many": lambda: attended(many, one, one, 0.1),
        "attention over long": lambda: attended(one[:4], keys, keys, 0.1),
        "attention over long, together": lambda: attended(one, keys, keys, 0.0),
        "attention within out_tol": lambda: attended(one[:4], keys, keys, out_tol=0.1),
        "attention by an index": lambda: attended(one, large_keys, large_keys, 0.1, index=large),
        "attention of heads": lambda: attended(heads, heads, heads, 0.1),
        "attention with a mask": lambda: attended(
            many, one, one, 0.1, mask=np.broadcast_to(np.arange(32) < 9, (2**15, 32))
        ),
        "attention of wide values": lambda: attended(one, one, np.ones((32, 2**16), F32), 0.1),
        "ValueBall": lambda: ck.ValueBall(heads).radius,
    }
    return calls


@cache
def refused() -> dict[str, Call]:
    """Calls for whose answers no memory is enough, whatever the limit."""
    scores = np.empty((HUGE, 0), F32)
    keep = _keep_none(scores)
    many, wide = np.empty((HUGE, 0, 64), F32), np.empty((0, HUGE), F32)
    small = ck.KeyIndex.build(np.ones((4, 64), F32), keep_keys=True)
    none = np.empty((0, 64), F32)
    estimate = {"delta": 0.1, "draws": 2, "seed": 1}
    blocks = [np.empty((HUGE, 0), kind) for kind in (np.int64, F32, F32, np.bool_)]
    return {
        "select": lambda: ck.select(scores, 0.1),
        "select one thread": lambda: ck.select(scores, 0.1, threads=1),
        "certify": lambda: ck.certify(scores, keep, eps=0.1),
        "certify independent": lambda: ck.certify(scores, keep, eps=0.1, independent=True),
        "keep_set": lambda: ck.keep_set(scores, 0.1),
        "score_gap": lambda: bounds.score_gap(scores, 0),
        "single_gap": lambda: bounds.single_gap(scores, 0),
        "multi_gap": lambda: bounds.multi_gap(scores, 0),
        "best_cuts": lambda: bounds.best_cuts(scores, 0),
        "smallest_k": lambda: bounds.smallest_k(scores, 0.1),
        "smallest_k threshold": lambda: bounds.smallest_k(scores, 0.1, "threshold"),
        "blockwise": lambda: bounds.blockwise(*blocks),
        "gaussian.fit": lambda: gaussian.fit(scores),
        "gaussian.fit eps": lambda: gaussian.fit(scores, eps=0.1),
        "windows.effective": lambda: windows.effective(scores, 0.1),
        "windows.participation": lambda: windows.participation(scores),
        "tail_mass": lambda: montecarlo.tail_mass(scores, keep, **estimate),
        "tail_mass bounds": lambda: montecarlo.tail_mass(
            scores, keep, upper_bounds=scores, **estimate
        ),
        "output_error": lambda: output.output_error(scores, np.empty((0, 3)), keep),
        "output_error of own values": lambda: output.output_error(
            scores, np.empty((HUGE, 0, 3)), keep
        ),
        "select_output": lambda: output.select_output(scores, np.empty((0, 3)), 0.1),
        "build of heads": lambda: ck.KeyIndex.build(many),
        "build of transposed keys": lambda: ck.KeyIndex.build(wide),
        "build of many keys": lambda: ck.KeyIndex.build(np.empty((0, HUGE, 4), F32)),
        "search": lambda: small.search(many, 0.1),
        "attention of heads": lambda: ck.attention(many, many, many, 0.1),
        "attention of wide values": lambda: ck.attention(none, none, wide, 0.1),
        "attention within out_tol": lambda: ck.attention(none, none, wide, out_tol=0.1),
        "ValueBall of heads": lambda: ck.ValueBall(many),
        "ValueBall of wide values": lambda: ck.ValueBall(wide),
    }


def _keep_none(scores: Any) -> Any:
    return np.broadcast_to(np.zeros(0, np.bool_), scores.shape)


@cache
def of_torch() -> dict[str, Call]:
    """The torch operators, which run under limits, too."""
    import torch

    import certk_rs.torch as ct

    scores = torch.tensor([2.0, 1.0, 0.0, -1.0]).expand(2**17, 4)
    kept = torch.tensor([True, False, False, False]).expand(2**17, 4)
    long = torch.linspace(-9, 0, 2**20)
    one = torch.linspace(-1, 1, 64).expand(8, 64).contiguous()
    many = one[:1].expand(2**16, 64)
    calls: dict[str, Call] = {
        "select": lambda: ct.select(scores, 0.1),
        "select long": lambda: ct.select(long, 0.1),
        "select_mask": lambda: ct.select_mask(scores, 0.1),
        "certify": lambda: ct.certify(scores, kept, eps=0.1),
        "keep_set": lambda: ct.keep_set(scores, 0.1),
        "attention": lambda: ct.attention(many, one, one, 0.1),
        "attention over long": lambda: ct.attention(one, many, many, 0.1),
    }

    def arrays(call: Call) -> Call:
        # A pickle of a tensor has all of its storage, also what nobody has written to.
        return lambda: [np.array(part.numpy()) for part in call()]

    return {name: arrays(call) for name, call in calls.items()}


@cache
def together() -> dict[str, Call]:
    """A call in which two threads ask for much, row after row."""
    name = "search of long"
    return {name: limited()[name]}


TABLES: dict[str, Callable[[], dict[str, Call]]] = {
    "limited": limited,
    "together": together,
    "refused": refused,
    "torch": of_torch,
}


def _size() -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmSize:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def _outcome(call: Call, limit: int | None) -> str:
    """In a child: "refused", or "right" and a digest of what came out, or what went wrong."""
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_AS, (_size() + limit * 2**20, resource.RLIM_INFINITY))
    try:
        found = call()
    except (ck.CertkError, MemoryError, RuntimeError) as error:
        problem = f"{type(error).__name__}: {error}"
    else:
        problem = ""
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if not problem:
        return "right " + sha256(pickle.dumps(found)).hexdigest()
    told = r"what is made of|matrices of d x d|fewer than 2\^32|pool of|MemoryError|can't allocate"
    return "refused" if re.search(told, problem) else problem


def _in_a_child(call: Call, limit: int | None) -> str:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        signal.alarm(PATIENCE)
        try:
            answer = _outcome(call, limit)
        except BaseException as error:  # a panic is one, too
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
            answer = repr(error)
        os.write(write, answer.encode()[:2000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return answer or f"ended with {status}"


@cache
def outcomes(table: str) -> dict[str, dict[str, str]]:
    """Return each call's outcome under each limit, from a process without pytest."""
    command = [sys.executable, __file__, table]
    # What is freed goes back at once: it would be room beyond the limit.
    small = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    # So does what the extension's own allocator holds.
    small |= {"MIMALLOC_DISALLOW_ARENA_ALLOC": "1", "MIMALLOC_PURGE_DELAY": "0"}
    if table in {"limited", "together"}:
        # And no thread has space set aside. Under the other tables threads have what they like.
        small["MALLOC_ARENA_MAX"] = "1"
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, **small, "RUST_BACKTRACE": "0"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, str]] = json.loads(done.stdout)
    return found


def _names(table: str) -> list[str]:
    return list(TABLES[table]())


@pytest.mark.parametrize("name", [*_names("limited")])
def test_a_limit_is_an_error_or_no_matter(name: str) -> None:
    judge(outcomes("limited")[name])


def test_what_one_thread_is_promised_another_does_not_take() -> None:
    judge(outcomes("together")["search of long"])


def test_torch_operators_under_limits() -> None:
    pytest.importorskip("torch")
    for found in outcomes("torch").values():
        judge(found)


def judge(found: dict[str, str]) -> None:
    right = found.pop("None")
    assert right.startswith("right "), right
    assert {*found.values()} <= {right, "refused"}, found


@pytest.mark.parametrize("table", ["limited", "torch"])
def test_limits_are_felt(table: str) -> None:
    """Otherwise nothing was tested."""
    felt = ["refused" in found.values() for found in outcomes(table).values()]
    assert sum(felt) > 0.8 * len(felt)


@pytest.mark.parametrize("name", _names("refused"))
def test_rows_beyond_memory_are_refused(name: str) -> None:
    assert {*outcomes("refused")[name].values()} == {"refused"}


def test_transposed_keys_are_asked_about() -> None:
    with pytest.raises(ck.CertkError, match=r"keys has shape .*pass the transpose") as told:
        ck.KeyIndex.build(np.empty((0, HUGE), F32))
    assert "\n" not in str(told.value)
    # Where there is memory, nothing is wrong with them.
    assert ck.KeyIndex.build(np.ones((4, 200), F32)).shape == (4, 200)


@pytest.mark.parametrize(
    "call",
    [
        lambda rows: ck.select(rows, 0.1, threads=1),
        lambda rows: ck.certify(rows, _keep_none(rows), eps=0.1, threads=1),
        lambda rows: bounds.score_gap(rows, 0, threads=1),
        lambda rows: windows.participation(rows, threads=1),
    ],
    ids=["select", "certify", "score_gap", "participation"],
)
def test_signals_are_heard_between_empty_rows(call: Callable[[Any], Any]) -> None:
    """Python runs handlers when a call asks for signals: between portions, of no scores, too."""
    heard = 0

    def hear(*_: object) -> None:
        nonlocal heard
        heard += 1

    before = signal.signal(signal.SIGALRM, hear)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        call(np.empty((2**21, 0), F32))
        during = heard
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert during >= 4


def main(table: str) -> None:
    # As many threads as are counted on below, whatever the machine.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    limits = {"refused": (None,), "together": NEAR}.get(table, LIMITS)
    calls = TABLES[table]()
    found = {
        name: {str(limit): _in_a_child(call, limit) for limit in limits}
        for name, call in calls.items()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
