"""Caches whose keys or values somebody writes to: no certificate of what they were before."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import certk_rs as ck
import model_zoo as zoo
from certk_rs import transformers as ct
from certk_rs._files.tensor_file import SafetensorsFile

N = 3000
mapped = pytest.mark.skipif(os.name == "nt", reason="files are mapped as POSIX does")
MODES: dict[str, Callable[[], Any]] = {"inference": torch.inference_mode, "no_grad": torch.no_grad}


def model_of() -> Any:
    return ct.use(zoo.peaked("llama", 30.0), eps=0.05)


def filled(model: Any, mode: str = "inference", **options: Any) -> Any:
    """A cache of made keys and values with an index, behind which a step has been."""
    cache, config = ct.CertkCache(**options), model.config
    size = (2, 1, config.num_key_value_heads, N, config.head_dim)
    with MODES[mode]():
        for layer in range(config.num_hidden_layers):
            cache.update(*torch.randn(size, generator=torch.Generator().manual_seed(layer)), layer)
    step(model, cache, mode)
    return cache


def step(model: Any, cache: Any, mode: str = "inference") -> list[dict[str, Any]]:
    """A step of decoding, of which every certificate is held against float64."""
    with zoo.spied() as calls, ct.Recorder() as recorder, MODES[mode]():
        model(input_ids=torch.full((1, 1), 7), past_key_values=cache)
    zoo.hold(calls, recorder, 0.05)
    return calls


EDITS: dict[str, Callable[[Any], Any]] = {
    "keys": lambda layer: layer.keys[:, :, 100:2000].neg_(),
    "values": lambda layer: layer.values[:, 1, ::2].mul_(1e5),
    "detached": lambda layer: layer.keys.detach()[:, :, ::2].mul_(-3),
}


@pytest.mark.older
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("mode", MODES)
def test_what_was_written_to_is_indexed_anew(edit: str, mode: str) -> None:
    model = model_of()
    cache = filled(model, mode)
    with MODES[mode]():
        for layer in cache.layers:
            EDITS[edit](layer)
    assert all(layer.index is None and layer.ball is None for layer in cache.layers)
    wanted = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    calls = step(model, cache, mode)
    for call, (keys, values) in zip(calls, wanted, strict=True):
        assert torch.equal(call["key"][:, :, :-1], keys)
        assert torch.equal(call["value"][:, :, :-1], values)
    assert all(layer.index is not None for layer in cache.layers)


@pytest.mark.parametrize("mode", MODES)
def test_steps_copy_nothing(mode: str) -> None:
    """Writes are counted, in inference mode too, without holding keys twice."""
    model = model_of()
    cache = filled(model, mode)
    before = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]
    other = {"inference": "no_grad", "no_grad": "inference"}[mode]
    for step_mode in (mode, other, mode):
        step(model, cache, step_mode)
        assert before == [(x.keys.data_ptr(), x.values.data_ptr()) for x in cache.layers]
        assert all(layer.index is not None for layer in cache.layers)


@pytest.mark.parametrize("how", ["copy", "pickle", "session"])
@pytest.mark.parametrize("edit", EDITS)
def test_copies_and_caches_from_files_notice_it_before_their_first_step(
    how: str, edit: str, tmp_path: Path
) -> None:
    model = model_of()
    cache = filled(model)
    with torch.inference_mode():
        if how == "copy":
            again = copy.deepcopy(cache)
        elif how == "pickle":
            again = pickle.loads(pickle.dumps(cache))
        else:
            cache.save(tmp_path / "session")
            again = ct.CertkCache.load(tmp_path / "session")
        assert all(layer.index is not None for layer in again.layers)
        EDITS[edit](again.layers[1])
    step(model, again)
    step(model, cache)


@pytest.mark.parametrize("edit", EDITS)
def test_between_the_cache_and_attention(edit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handed-out cache that is written to is attended to without its index."""
    model = model_of()
    cache = filled(model)
    own = cache.update

    def update(keys: Any, values: Any, layer: int, *rest: Any, **more: Any) -> Any:
        found = own(keys, values, layer, *rest, **more)
        EDITS[edit](cache.layers[layer])
        return found

    with monkeypatch.context() as patch:
        patch.setattr(cache, "update", update)
        step(model, cache)
    step(model, cache)


@mapped
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("edit", EDITS)
def test_what_is_in_files_is_refused_once_it_was_written_to(
    edit: str, saved: bool, tmp_path: Path
) -> None:
    model = model_of()
    cache = filled(model, offload=tmp_path)
    if saved:
        cache.save(path := tmp_path / "session")
        bytes_before = path.read_bytes()
        cache = ct.CertkCache.load(path, offload=tmp_path)
    other = copy.deepcopy(cache)
    with torch.inference_mode():
        EDITS[edit](cache.layers[1])
    for each in (cache, other, cache):
        with pytest.raises(ck.CertkError, match=r"written to in place.*layer\.keys = "):
            step(model, each)
        with pytest.raises(ck.CertkError, match="written to in place"):
            each.save(tmp_path / "new")
        assert each.layers[1].index is None
    if saved:
        assert path.read_bytes() == bytes_before
    assert not (tmp_path / "new").exists()


@mapped
def test_other_tensors_take_the_place_of_what_was_written_to(tmp_path: Path) -> None:
    model = model_of()
    cache = filled(model, offload=tmp_path)
    cache.layers[1].keys[:, :, 5:500].neg_()
    wanted = cache.layers[1].keys = cache.layers[1].keys.clone()
    cache.layers[1].values = cache.layers[1].values.clone()
    cache.layers[0].crop(-1)
    cache.layers[2].crop(-1)
    cache.layers[1].crop(-1)
    calls = step(model, cache)
    assert torch.equal(calls[1]["key"][:, :, :-1], wanted[:, :, :-1])


@mapped
def test_a_copy_notices_what_has_gone_since(tmp_path: Path) -> None:
    """The writer is gone, or maps the files anew because they have grown."""
    for gone in (True, False):
        model = model_of()
        cache = filled(model, offload=tmp_path)
        other = copy.deepcopy(cache)
        EDITS["keys"](cache.layers[1])
        if gone:
            del cache
        else:
            rows = cache.layers[1]._rows
            rows._make_room(N * rows.form.row, 9 * N * rows.form.row)
        with pytest.raises(ck.CertkError, match="written to in place"):
            step(model, other)


# ------------------------------------------------------------- sessions that are written over


def overwrite(path: Path) -> None:
    """Negate the rows of layer 1, in place."""
    with SafetensorsFile(path) as file:
        entry, start = file.header.entries["1.rows"], len(file.header.raw)
    before = path.stat()
    with path.open("r+b") as stream:
        stream.seek(start + entry.start)
        raw = bytearray(stream.read(entry.stop - entry.start))
        raw[3::4] = bytes(byte ^ 0x80 for byte in raw[3::4])
        stream.seek(start + entry.start)
        stream.write(raw)
    # As whoever writes later does; clocks of file systems go by some milliseconds.
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000))


@mapped
@pytest.mark.parametrize("cut", [False, True])
def test_a_session_that_is_written_over_or_cut_off_is_refused(cut: bool, tmp_path: Path) -> None:
    model = model_of()
    filled(model).save(path := tmp_path / "session")
    cache = ct.CertkCache.load(path, offload=tmp_path)
    step(model, cache)
    other = copy.deepcopy(cache)
    if cut:
        os.truncate(path, path.stat().st_size // 2)
    else:
        overwrite(path)
    for each in (cache, other):
        with pytest.raises(ck.CertkError, match=r"session was written to or cut off while .* use"):
            step(model, each)
        with pytest.raises(ck.CertkError, match="was written to or cut off"):
            each.save(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(ck.CertkError, match="cut off" if cut else "layer 1 have another SHA-256"):
        ct.CertkCache.load(path, offload=tmp_path)


@mapped
def test_names_may_be_taken_from_a_mapped_session(tmp_path: Path) -> None:
    """Removed, renamed, linked, replaced: the file that is mapped is as it was."""
    model = model_of()
    filled(model).save(path := tmp_path / "session")
    cache = ct.CertkCache.load(path, offload=tmp_path)
    os.link(path, tmp_path / "linked")
    step(model, cache)
    path.rename(tmp_path / "renamed")
    (tmp_path / "linked").unlink()
    step(model, cache)
    (tmp_path / "renamed").unlink()
    path.write_bytes(b"another")
    step(model, cache)


@pytest.mark.parametrize("offload", [False, pytest.param(True, marks=mapped)])
def test_a_session_that_is_written_over_while_it_is_loaded(
    offload: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the hash of its rows and the reading of them."""
    from certk_rs.transformers import session

    model = model_of()
    filled(model).save(path := tmp_path / "session")
    check = session._check

    def checked(file: Any, entry: Any, sha256: str, layer: int) -> None:
        check(file, entry, sha256, layer)
        if layer == 1:
            overwrite(path)

    monkeypatch.setattr(session, "_check", checked)
    with pytest.raises(ck.CertkError, match="was written to while it was read"):
        ct.CertkCache.load(path, **({"offload": tmp_path} if offload else {}))


# -------------------------------------------------------------------- other keys, other sizes


@pytest.mark.parametrize("offload", [False, pytest.param(True, marks=mapped)])
def test_keys_of_other_sizes_do_not_go_behind(offload: bool, tmp_path: Path) -> None:
    cache = ct.CertkCache(8, **({"offload": tmp_path} if offload else {}))
    cache.update(*torch.randn(2, 2, 3, 300, 8), 0)
    for shape, dtype in (
        ((1, 3, 1, 8), torch.float32),
        ((2, 1, 1, 8), torch.float32),
        ((2, 3, 1, 1), torch.float32),
        ((6, 3, 1, 8), torch.float32),
        ((2, 3, 1, 8), torch.bfloat16),
    ):
        rows = torch.ones(shape, dtype=dtype)
        with pytest.raises(ck.CertkError, match="do not go behind those of this cache"):
            cache.update(rows, rows, 0)
        assert cache.get_seq_length() == 300
        assert cache.layers[0].index is not None
