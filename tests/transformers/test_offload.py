"""Caches whose keys and values are in files: the same results, bounded memory, nothing left."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import certk_rs as ck
import model_zoo as zoo
from certk_rs import transformers as ct
from certk_rs._files import scratch
from certk_rs.transformers.paired_rows import PAGE, Form, PairedRows
from fresh_process import run_forked
from model_caches import logits_of, same_cache
from page_cache import drop, held

pytestmark = pytest.mark.skipif(os.name == "nt", reason="files are mapped as POSIX does")


def said(calls: list[dict[str, Any]], recorder: Any) -> list[Any]:
    """Return the results of calls, and every number of their certificates."""
    told = [(call.k, call.tail_mass_upper, call.error_bound) for call in recorder.calls]
    return [[call["out"].float().numpy().tobytes() for call in calls], pickle.dumps(told)]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("llama", dtype) for dtype in ("float32", "float16", "bfloat16")),
        *(("qwen2", "bfloat16"), ("gpt2", "float32")),
    ],
)
def test_results_are_those_of_memory_bit_for_bit(name: str, dtype: str, tmp_path: Path) -> None:
    model = ct.use(zoo.peaked(name).to(getattr(torch, dtype)), eps=0.05)
    ids, found = zoo.tokens(2, 330), []
    for cache in (ct.CertkCache(reserve=16), ct.CertkCache(reserve=16, offload=tmp_path)):
        with zoo.spied() as calls, ct.Recorder() as recorder:
            for start, stop in ((0, 200), (200, 290), *((i, i + 1) for i in range(290, 330))):
                logits = logits_of(model, ids[:, start:stop], cache)
        found.append((logits, said(calls, recorder), cache))
    memory, files = found
    assert torch.equal(memory[0], files[0])
    assert memory[1] == files[1]
    assert same_cache(memory[2], files[2])
    assert all(layer.keys.certk_mapped for layer in files[2].layers)
    assert memory[2].index_bytes == files[2].index_bytes > 0
    assert memory[2].offloaded_bytes == 0 < files[2].offloaded_bytes
    # Whatever happens to this process, nothing stays behind.
    assert not list(tmp_path.iterdir())


def filled(cache: Any, n: int, seed: int, layers: int = 2) -> None:
    """Append made keys and values."""
    generator = torch.Generator().manual_seed(seed)
    for layer in range(layers):
        keys, values = torch.randn(2, 1, 3, n, 20, generator=generator)
        cache.update(keys, values, layer)


def test_copies_share_what_they_have_and_go_on_alone(tmp_path: Path) -> None:
    """In the middle of a page and at its end, again and again, shorter and longer."""
    memory, files = ct.CertkCache(8), ct.CertkCache(8, offload=tmp_path)
    pairs = [(memory, files)]
    for cache in pairs[0]:
        filled(cache, 400, 0)
    for step in range(1, 5):
        pairs += [copy.deepcopy(pair) for pair in pairs]
        for at, pair in enumerate(pairs):
            for cache in pair:
                if (at + step) % 3 == 0:
                    cache.crop(-7 * step)
                for i in range(at % 3):
                    filled(cache, 1 + 40 * i, 100 * step + at)
    assert len({pair[0].get_seq_length() for pair in pairs}) > 5
    for one, other in pairs:
        assert same_cache(one, other)
        assert one.index_bytes == other.index_bytes
    copied = copy.deepcopy(files)
    before = copied.offloaded_bytes
    del files, pairs
    filled(copied, 1, 9)
    assert before == 0 < copied.offloaded_bytes
    assert torch.equal(copied.layers[0].keys[:, :, :-1], memory.layers[0].keys)


@pytest.mark.skipif(sys.platform != "linux", reason="pages are counted as Linux does")
@pytest.mark.parametrize("saved", [False, True])
def test_a_step_reads_few_pages(saved: bool, tmp_path: Path) -> None:
    """Of a file without a name, and of a saved one; and none before it is needed."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 1, 2, 16_384, 64, generator=generator)
    q = 10 * torch.randn(1, 2, 1, 64, generator=generator)
    cache = ct.CertkCache(offload=tmp_path)
    cache.update(*rows, 0)
    path = Path(f"/proc/self/fd/{cache.layers[0]._rows._own.descriptor}")
    if saved:
        cache.save(path := tmp_path / "session")
        cache = ct.CertkCache.load(path, offload=tmp_path)
        cache.layers[0].let_go()
    layer = cache.layers[0]
    layer.let_go()
    drop(path)
    found = ck.attention(
        q, layer.keys, layer.values, 0.01, index=layer.index, ball=layer.ball, threads=1
    )
    pages = int(held(path).sum())
    few = int(found.scored.sum()) + int((layer.index.arrays()[3] != -1).sum())
    assert 0 < pages <= 2 * few
    assert pages < held(path).size / 3


def test_beams_and_batches_are_written_anew(tmp_path: Path) -> None:
    ours = ct.use(zoo.build("llama"), eps=0)
    ids, options = zoo.tokens(1, 300), {"max_new_tokens": 6, "do_sample": False, "num_beams": 3}
    own = ours.generate(ids, past_key_values=ct.CertkCache(offload=tmp_path), **options)
    assert torch.equal(own, ours.generate(ids, past_key_values=ct.CertkCache(), **options))
    memory, files = ct.CertkCache(8), ct.CertkCache(8, offload=tmp_path)
    for cache in (memory, files):
        filled(cache, 300, 0)
        cache.batch_repeat_interleave(3)
        for layer in cache.layers:
            layer.update(*torch.ones(2, 3, 3, 1, 20) * torch.arange(3)[:, None, None, None])
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.reorder_cache(torch.tensor([1, 0]))
    assert same_cache(memory, files)
    files.reset()
    assert files.get_seq_length() == 0
    filled(files, 5, 1)
    filled(reset := ct.CertkCache(8), 5, 1)
    assert same_cache(reset, files)


def test_keys_that_somebody_else_set_are_written(tmp_path: Path) -> None:
    memory, files = ct.CertkCache(8), ct.CertkCache(8, offload=tmp_path)
    for cache in (memory, files):
        filled(cache, 300, 0)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys * 2, layer.values[..., :]
        filled(cache, 2, 1)
    assert same_cache(memory, files)
    assert memory.layers[0].index_bytes == files.layers[0].index_bytes


@pytest.mark.parametrize("offload", [False, True])
def test_what_could_not_be_indexed_is_not_forgotten(
    offload: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values of a step that failed are in the next ball."""
    cache = ct.CertkCache(8, **({"offload": tmp_path} if offload else {}))
    filled(cache, 300, 0, layers=1)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ck.ValueBall, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.update(torch.ones(1, 3, 1, 20), torch.full((1, 3, 1, 20), 1e3), 0)
    filled(cache, 1, 1, layers=1)
    layer = cache.layers[0]
    assert len(layer.ball) == len(layer.index) == layer.keys.shape[2] == 302
    assert (layer.ball.radius > 2e3).all()


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ck.CertkError, match="which is no directory: make it first"):
        ct.CertkCache(offload=tmp_path / "none")
    cache = ct.CertkCache(offload=tmp_path)
    filled(cache, 300, 0)
    with pytest.raises(ck.CertkError, match=r"write it by save\(path\)"):
        pickle.dumps(cache)
    with pytest.raises(ck.CertkError, match="begin with a new cache"):
        cache.update(*torch.zeros(2, 1, 3, 1, 20, dtype=torch.bfloat16), 0)
    with pytest.raises(ck.CertkError, match="hold them side by side"):
        ct.CertkCache(offload=tmp_path).update(
            torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4, dtype=torch.float16), 0
        )


def test_a_forked_process_does_not_write_over_its_parent(tmp_path: Path) -> None:
    cache = ct.CertkCache(offload=tmp_path)
    cache.update(torch.ones(1, 1, 9, 4), torch.ones(1, 1, 9, 4), 0)

    def work() -> None:
        with pytest.raises(ck.CertkError, match="forked"):
            cache.update(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4), 0)

    run_forked(work)
    assert (cache.layers[0].keys == 1).all()


def test_a_full_disk_is_an_error_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, twin = ct.CertkCache(8, offload=tmp_path), ct.CertkCache(8)
    for each in (cache, twin):
        filled(each, 300, 0)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(scratch, "_set_aside", full)
        with pytest.raises(OSError, match=r"No space left on device.*bytes more") as caught:
            filled(cache, 3000, 1)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path)
    assert same_cache(cache, twin)
    for each in (cache, twin):
        filled(each, 3000, 1)
    assert same_cache(cache, twin)


def test_room_that_the_system_does_not_give_is_an_error(tmp_path: Path) -> None:
    """A real refusal, of a limit on the length of files: not a signal, and not a torn file."""
    import resource

    def work() -> None:
        cache = ct.CertkCache(8, offload=tmp_path)
        cache.update(*torch.ones(2, 1, 2, 100, 64), 0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (cache.offloaded_bytes + 5000,) * 2)
        with pytest.raises(OSError, match="File too large") as caught:
            cache.update(*torch.zeros(2, 1, 2, 5000, 64), 0)
        assert caught.value.errno == errno.EFBIG
        assert cache.get_seq_length() == 100
        assert (cache.layers[0].keys == 1).all()

    run_forked(work)


def test_files_that_were_cut_off_are_not_mapped(tmp_path: Path) -> None:
    form = Form(torch.float32, 1, 1, 8, 8)
    rows = PairedRows(tmp_path, PAGE, form)
    rows.append(0, torch.ones(1, 1, 9, 8), torch.ones(1, 1, 9, 8))
    os.ftruncate(rows._pieces[0].file.descriptor, PAGE)
    with pytest.raises(ck.CertkError, match="was cut off meanwhile"):
        rows.fork(9000)


def test_systems_without_nameless_files_or_room_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    cache, twin = ct.CertkCache(8, offload=tmp_path), ct.CertkCache(8)
    for each in (cache, twin):
        filled(each, 300, 0)
        filled(each, 3000, 1)
    assert same_cache(cache, twin)
    assert not list(tmp_path.iterdir())


AT_ONCE = {"MIMALLOC_PURGE_DELAY": "0", "MALLOC_MMAP_THRESHOLD_": str(1 << 18)}
LIMITED = """
import hashlib, resource, sys
import torch, transformers
from certk_rs import transformers as ct
torch.set_num_threads(1)
torch.manual_seed(0)
N, LAYERS, HEADS, D = 16_384, 8, 4, 64
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=256, intermediate_size=64, num_hidden_layers=LAYERS,
    num_attention_heads=2 * HEADS, num_key_value_heads=HEADS, head_dim=D,
    max_position_embeddings=2 * N, initializer_range=0.2, pad_token_id=0,
)
model = ct.use(transformers.LlamaForCausalLM(config).eval(), eps=0.05, threads=1)
whole = N * LAYERS * HEADS * 2 * D * 4
def mine():
    status = open("/proc/self/status").read()
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in status.splitlines()
            if line.endswith("kB")}
def fill(cache, n, chunk):
    for start in range(0, n, chunk):
        for layer in range(LAYERS):
            made = torch.Generator().manual_seed(start + layer)
            rows = torch.randn(2, 1, HEADS, chunk, D, generator=made)
            cache.update(rows[0], rows[1], layer)
            seen.append(mine())
def step(cache, token):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([[token]]), past_key_values=cache).logits
options = {"weights": "exact", **({"offload": sys.argv[1]} if sys.argv[1] else {})}
seen = []
# What is loaded and started once.
warm = ct.CertkCache(**options)
fill(warm, 512, 512)
step(warm, 1)
del warm
before = mine()
seen.clear()
if sys.argv[2] == "limited":
    resource.setrlimit(resource.RLIMIT_DATA, (before["VmData"] + whole // 4,) * 2)
cache = ct.CertkCache(**options)
fill(cache, N, 512)
if sys.argv[1]:
    # Of its maps it holds those of one layer at most.
    here = max(now["RssFile"] for now in seen) - before["RssFile"]
    assert here < 1.3 * whole / LAYERS, here
digest = hashlib.sha256()
with ct.Recorder() as recorder:
    for token in range(12):
        digest.update(step(cache, token).numpy().tobytes())
        seen.append(mine())
for call in recorder.calls:
    for part in (call.k, call.tail_mass_upper, call.error_bound):
        digest.update(part.tobytes())
assert all((call.tail_mass_upper <= 0.05).all() for call in recorder.calls)
kept = sum(call.k.mean() for call in recorder.calls) / len(recorder.calls)
assert kept < N / 4, kept
if sys.argv[1]:
    held = max(now["RssAnon"] for now in seen) - before["RssAnon"]
    assert held < whole // 4, held
print(digest.hexdigest())
"""


def limited(offload: str, limit: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LIMITED, offload, limit],
        env={**os.environ, **AT_ONCE, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted as Linux does")
@pytest.mark.parametrize("beside", [False, pytest.param(True, marks=pytest.mark.heavy)])
def test_a_quarter_of_the_memory_is_enough(beside: bool, tmp_path: Path) -> None:
    """16384 tokens of 256 MiB keys and values in a process that may have 64 MiB of its own.

    What counts is memory that no file stands behind. The system refuses more of it (RLIMIT_DATA;
    but the extension's allocator has set aside room ahead that counts already), and what is really
    there is looked at after each step. Allocators are told to give back at once what was freed, as
    they do in the end. Pages of files come and go as the system has room: of those the process
    itself holds those of a layer.
    """
    held = limited(str(tmp_path), "limited")
    assert held.returncode == 0, held.stderr
    if beside:
        free = limited("", "free")
        assert free.returncode == 0, free.stderr
        assert held.stdout == free.stdout
        # The limit is one: in memory it does not do.
        assert limited("", "limited").returncode != 0
