"""Imports of other programs' caches, against files that those programs wrote.

`make_foreign.py` made the files in `foreign` by mlx-lm, LMCache, SGLang, llama.cpp and vLLM. Files
of earlier versions of vLLM and mlx-lm are made here, as their sources did.
"""

from __future__ import annotations

import json
import resource
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from certk_rs import CertkError, prune
from certk_rs._foreign.convert import FORMATS, export_cache, import_cache
from certk_rs._foreign.source import Given
from certk_rs.cli import main
from make_foreign import KV_HEADS, LAYERS, TOKENS, D, first_layer, numbers
from repository import EXAMPLE

HERE = Path(__file__).parent / "foreign"
SHAPE = {"layers": LAYERS, "kv_heads": KV_HEADS, "head_dim": D}
DISK = ("abc0", "abb9", "abb2")


def order(folder: Path, *hashes: str) -> tuple[str, ...]:
    """Return the names of LMCache's chunks with these hashes."""
    return tuple(next(p.name for p in folder.iterdir() if f"@{each}@" in p.name) for each in hashes)


def widened(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Read a cache by another library, bfloat16 as its upper half of a float32."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load

    return {name: tensor.to(torch.float32).numpy() for name, tensor in load(path).items()}


def is_numbers(path: Path, n: int, dtype: str | None = None) -> None:
    """See that a cache holds `numbers`, exactly."""
    held, truth = widened(path), numbers(n)
    assert set(held) == {f"layers.{i}.{r}" for i in range(LAYERS) for r in ("key", "value")}
    for layer in range(LAYERS):
        for at, role in enumerate(("key", "value")):
            np.testing.assert_array_equal(held[f"layers.{layer}.{role}"], truth[layer, at])
    if dtype is not None:
        assert f'"dtype":"{dtype}"'.encode() in path.read_bytes()


def refused(form: str, place: Path, out: Path, words: str, **given: Any) -> None:
    with pytest.raises(CertkError, match=words) as caught:
        import_cache(form, place, out, Given(**given))
    assert "\n" not in str(caught.value)
    assert not out.exists()


def test_mlx(tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    found = import_cache("mlx", HERE / "mlx_kv.safetensors", out, Given())
    assert found.about == {"source": "mlx", "mlx.model": "tiny"}
    is_numbers(out, 7, "BF16")
    assert load_file(HERE / "mlx_whole.safetensors")["0.0"].shape == (1, KV_HEADS, 7, D)
    out = tmp_path / "whole.safetensors"
    import_cache("mlx", HERE / "mlx_whole.safetensors", out, Given(**SHAPE))
    is_numbers(out, 7, "F32")
    bad = tmp_path / "bad"
    refused("mlx", HERE / "mlx_quantized.safetensors", bad, "QuantizedKVCache.*without quant")
    refused("mlx", HERE / "mlx_kv.safetensors", bad, "its kv_heads is 2, not 3", kv_heads=3)
    refused("mlx", HERE / "llama_f16_flash.session", bad, "safetensors")


def test_mlx_before_032(tmp_path: Path) -> None:
    keys = numbers(5)
    held = {f"{i}.{k}": keys[i, k][None] for i in range(LAYERS) for k in range(2)}
    about = {"0.0": "", "0.1": "", "1.model": "tiny", "2.0": "KVCache", "2.1": "KVCache"}
    save_file(held, tmp_path / "in", about)
    out = tmp_path / "out.safetensors"
    assert import_cache("mlx", tmp_path / "in", out, Given()).about["mlx.model"] == "tiny"
    is_numbers(out, 5)
    save_file(held, tmp_path / "in", {**about, "2.0": "RotatingKVCache"})
    refused("mlx", tmp_path / "in", tmp_path / "bad", "layer 0 is a RotatingKVCache")


@pytest.mark.parametrize("tokens", [-1, 0, 9, 1 << 30])
def test_mlx_counts(tmp_path: Path, tokens: int) -> None:
    keys = numbers(8)
    held: dict[str, Any] = {f"{i}.{k}": keys[i, k][None] for i in range(LAYERS) for k in range(2)}
    held |= {f"{i}.2": np.array(tokens, np.int32) for i in range(LAYERS)}
    save_file(held, tmp_path / "in", {"1.0": "KVCache", "1.1": "KVCache", "2.0": ""})
    refused("mlx", tmp_path / "in", tmp_path / "out", f"has {tokens} tokens in room for 8")


@pytest.mark.parametrize(("folder", "dtype"), [("lmcache_disk", "BF16"), ("lmcache_fs", "F16")])
def test_lmcache(tmp_path: Path, folder: str, dtype: str) -> None:
    place, out = HERE / folder, tmp_path / "out.safetensors"
    listed = order(place, *DISK)
    # Only files of the connector have a head, which tells layers and the width of rows.
    given = SHAPE if folder == "lmcache_disk" else {"kv_heads": KV_HEADS}
    found = import_cache("lmcache", place, out, Given(order=listed, **given))
    assert found.about["model"] in ("org-tiny", "org-SEP-tiny")
    is_numbers(out, 11, dtype)
    one = tmp_path / "one.safetensors"
    import_cache("lmcache", place / listed[0], one, Given(**given))
    is_numbers(one, 4)
    bad = tmp_path / "bad"
    refused("lmcache", place, bad, "do not tell the order.*--order", **given)
    refused("lmcache", place, bad, "which is not here", order=("x.pt",), **given)
    refused("lmcache", place, bad, "twice", order=(listed[0],) * 2, **given)
    refused("lmcache", place, bad, "lists no file", order=(), **given)
    refused("lmcache", place / listed[0], bad, "give --kv-heads|tell kv_heads", layers=LAYERS)
    refused("lmcache", place / listed[0], bad, "not 9|multiple", **{**SHAPE, "layers": 9})
    refused("lmcache", place / listed[0], bad, "not float32", dtype="float32", **given)


def test_lmcache_names_and_heads(tmp_path: Path) -> None:
    place, bad = HERE / "lmcache_fs", tmp_path / "bad"
    whole = (place / order(place, "abc0")[0]).read_bytes()

    def written(name: str, data: bytes) -> Path:
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    for name, words in (
        ("m@2@1@ab@half.data", "one of 2 workers"),
        ("m@1@0@ab@half@3.data", "layer of a chunk"),
        ("m@1@0@ab@int8.data", "dtype int8 is not taken"),
        ("chunk.pt", "give the files as they were named"),
    ):
        refused("lmcache", written(name, whole), bad, words, **SHAPE)
    name = "m@1@0@ab@half@tag%1.data"
    import_cache("lmcache", written(name, whole), tmp_path / "out", Given(kv_heads=2))
    # Cut off, so that rows of the wrong size fit; longer; of another format; with another shape.
    for data, words in (
        (whole[:-28], "its head says 256"),
        (whole + bytes(36), "its head says 256"),
        (whole[:4] + struct.pack("<i", 2) + whole[8:], "format 2"),
        (whole[:12] + struct.pack("<i", 1) + whole[16:], "shape .1, 2, 4, 8"),
        (whole[:12] + struct.pack("<i", -2) + whole[16:], "shape .-2"),
    ):
        refused("lmcache", written(name, data), bad, words, **SHAPE)
    for size in range(0, len(whole)):
        with pytest.raises(CertkError):
            import_cache("lmcache", written(name, whole[:size]), bad, Given(kv_heads=KV_HEADS))


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_hicache(tmp_path: Path, layout: str) -> None:
    place, out, bad = tmp_path / "pages", tmp_path / "out.safetensors", tmp_path / "bad"
    shutil.copytree(HERE / f"hicache_{layout}", place)
    names = tuple(sorted((path.name for path in place.iterdir()), reverse=True))
    given: dict[str, Any] = {**SHAPE, "dtype": "bfloat16", "page_layout": layout}
    found = import_cache("hicache", place, out, Given(order=names, **given))
    assert found.about == {"source": "hicache", "model": "org-tiny", "pages": "2"}
    is_numbers(out, 8, "BF16")
    refused("hicache", place, bad, "do not tell the order", **given)
    for name in ("layers", "kv_heads", "head_dim", "dtype", "page_layout"):
        left = {key: value for key, value in given.items() if key != name}
        refused(
            "hicache", place, bad, f"do not tell {name}: give --{name.replace('_', '-')}", **left
        )
    refused("hicache", place, bad, "has 256 bytes", order=names, **{**given, "head_dim": 5})
    (place / names[1]).write_bytes(bytes(128))
    refused("hicache", place, bad, "4 tokens of 64 bytes", order=names, **given)
    for name, words in (
        (f"{'a' * 64}_m_1_2.bin", "with one rank"),
        (f"{'a' * 64}_m_0_1_2_1.bin", "with one rank"),
        (f"{'a' * 64}.mamba_m_0_1.bin", "not hash_model"),
    ):
        shutil.copy(place / names[0], tmp_path / name)
        refused("hicache", tmp_path / name, bad, words, **given)


def folder_of_vllm(folder: Path, version: str, n: int = 6) -> None:
    """Write a folder of the connector, taken from pages as its sources take it."""
    folder.mkdir()
    block, ids = 2, np.array([5, 0, 3])
    slots = (ids[:, None] * block + np.arange(block)).ravel()[:n]
    for layer, (key, value) in enumerate(numbers(n).swapaxes(2, 3)):  # (n, heads, d)
        at = slots // block, slice(None), slots % block
        if version == "2026":
            paged = np.zeros((6, KV_HEADS, block, 2 * D), np.float32)
            paged[at] = np.concatenate([key, value], axis=2)
            taken = paged[at]
        elif version == "triton":
            paged = np.zeros((6, 2, block, KV_HEADS, D), np.float32)
            paged[at] = np.stack([key, value], axis=1)
            taken = paged[at]
        else:
            paged = np.zeros((2, 6 * block, KV_HEADS, D), np.float32)
            paged[:, slots] = np.stack([key, value])
            taken = paged.reshape(2, 6 * block, -1)[:, slots]
        name = f"model.layers.{layer}.self_attn.attn.safetensors"
        save_file({"kv_cache": np.ascontiguousarray(taken)}, folder / name)


@pytest.mark.parametrize("version", ["2026", "triton", "flash"])
def test_vllm(tmp_path: Path, version: str) -> None:
    place, out, bad = tmp_path / "0a1b", tmp_path / "out.safetensors", tmp_path / "bad"
    folder_of_vllm(place, version)
    found = import_cache("vllm", place, out, Given(**SHAPE))
    assert found.about == {"source": "vllm", "prompt": "0a1b"}
    is_numbers(out, 6)
    refused("vllm", place, bad, "neither|its head_dim is 4", **{**SHAPE, "head_dim": 5})
    refused("vllm", place, bad, "its layers is 2, not 3", **{**SHAPE, "layers": 3})
    (tmp_path / "root" / "0a1b").mkdir(parents=True)
    refused("vllm", tmp_path / "root", bad, "one of the folders")
    save_file({"kv_cache": np.zeros((2, 2, 2 * D), np.float32)}, place / "layers.7.safetensors")
    refused("vllm", place, bad, "both", kv_heads=2, head_dim=D)
    save_file({"kv_cache": np.zeros((6, 9), np.float32)}, place / "layers.7.safetensors")
    refused("vllm", place, bad, "MLA", kv_heads=2, head_dim=D)
    save_file({"kv_cache": np.zeros((9, 2, 2, D), np.float32)}, place / "layers.7.safetensors")
    refused("vllm", place, bad, "6 to 9 tokens", kv_heads=2, head_dim=D)
    (place / "layers.7.safetensors").rename(place / "a.1.safetensors")
    refused("vllm", place, bad, "does not name one layer", kv_heads=2, head_dim=D)


def test_vllm_as_written(tmp_path: Path) -> None:
    [place] = (HERE / "vllm").iterdir()
    out = tmp_path / "out"
    import_cache("vllm", place, out, Given(kv_heads=KV_HEADS, head_dim=D))
    is_numbers(out, 8, "F16")


LLAMA = {"f16_flash": ("F16", 2e-3), "f32_plain": ("F32", 1e-4), "bf16_plain": ("BF16", 2e-2)}


@pytest.mark.parametrize("kind", ["session", "sequence"])
@pytest.mark.parametrize("name", LLAMA)
def test_llama(tmp_path: Path, name: str, kind: str) -> None:
    out, (dtype, tolerance) = tmp_path / "out.safetensors", LLAMA[name]
    place = HERE / f"llama_{name}.{kind}"
    found = import_cache("llama", place, out, Given(kv_heads=2))
    assert found.about["tokens"] == str(len(TOKENS))
    assert found.about.get("model") == (None if kind == "sequence" else "llama")
    held = widened(out)
    for role, truth in zip(("key", "value"), first_layer(), strict=True):
        np.testing.assert_allclose(held[f"layers.0.{role}"], truth, rtol=tolerance, atol=tolerance)
    assert f'"dtype":"{dtype}"'.encode() in out.read_bytes()
    # Values with and without flash attention, which are stored in two ways, are those of one model.
    other = tmp_path / "other.safetensors"
    import_cache("llama", HERE / f"llama_f32_plain.{kind}", other, Given(head_dim=8))
    for key, truth in widened(other).items():
        np.testing.assert_allclose(held[key], truth, rtol=5 * tolerance, atol=5 * tolerance)
    bad = tmp_path / "bad"
    refused("llama", place, bad, "a row has 16 entries.*--kv-heads or --head-dim")
    refused("llama", place, bad, "16 entries, not kv_heads 3", kv_heads=3)


def test_llama_sorts_cells_by_position(tmp_path: Path) -> None:
    place, out = tmp_path / "state", [tmp_path / "a", tmp_path / "b"]
    data = bytearray((HERE / "llama_f16_flash.sequence").read_bytes())
    cells = 12 + 4 * len(TOKENS) + 8
    import_cache("llama", HERE / "llama_f16_flash.sequence", out[0], Given(kv_heads=2))
    positions = np.array([4, 0, 6, 1, 5, 2, 3])
    for at, position in enumerate(positions):
        struct.pack_into("<i", data, cells + 12 * at, position)
    place.write_bytes(data)
    import_cache("llama", place, out[1], Given(kv_heads=2))
    before, after = (load_file(path) for path in out)
    for name, rows in before.items():
        np.testing.assert_array_equal(after[name], rows[:, np.argsort(positions)])
    for position, words in ((6, "not consecutive"), (-1, "not consecutive"), (99, "not consec")):
        struct.pack_into("<i", data, cells, position)
        place.write_bytes(data)
        refused("llama", place, tmp_path / "bad", words, kv_heads=2)


@pytest.mark.parametrize("name", ["llama_f16_flash.session", "llama_f32_plain.sequence"])
def test_damaged_states_are_errors(tmp_path: Path, name: str) -> None:
    """Cut off anywhere, and with any word replaced by a huge or a negative one."""
    whole, place, bad = (HERE / name).read_bytes(), tmp_path / "state", tmp_path / "bad"
    for size in range(0, len(whole), 7):
        place.write_bytes(whole[:size])
        refused("llama", place, bad, "state", kv_heads=2)
    place.write_bytes(whole + b"\0\0\0\0")
    refused("llama", place, bad, "4 bytes behind", kv_heads=2)
    tokens = range(12, 12 + 4 * len(TOKENS))
    named = name.endswith("session")
    head = tokens.stop + (4 + len("llama")) * named
    # The stream before the one with cells is empty.
    cells = head + 8 + 4 * ("f32" in name)
    types = cells + 12 * len(TOKENS) + 8
    fields = [0, 4, 8, *range(head, types + 12, 4), *([tokens.stop] if named else [])]
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for at in fields:
        for word in (0xFFFFFFFF, 0x7FFFFFFF, 0x80000000):
            data = bytearray(whole)
            struct.pack_into("<I", data, at, word)
            place.write_bytes(data)
            refused("llama", place, bad, "state", kv_heads=2)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begin < 1 << 17  # KiB
    for number, words in ((8, "key.* q8_0.*-ctk f16"), (99, "key.* of type 99")):
        data = bytearray(whole)
        struct.pack_into("<i", data, types, number)
        place.write_bytes(data)
        refused("llama", place, bad, words, kv_heads=2)


def test_nan_and_existing_outputs_are_refused(tmp_path: Path) -> None:
    place, out = tmp_path / "0a", tmp_path / "out"
    folder_of_vllm(place, "triton")
    path = place / "model.layers.1.self_attn.attn.safetensors"
    rows = load_file(path)["kv_cache"]
    rows[3, 1, 0, 2] = np.nan
    save_file({"kv_cache": rows}, path)
    refused("vllm", place, out, r"layer 1: value has NaN or an infinity at \[0, 3, 2\]")
    out.write_bytes(b"mine")
    for form, source in (("vllm", place), ("mlx", HERE / "mlx_kv.safetensors")):
        with pytest.raises(CertkError, match="exists already"):
            import_cache(form, source, out, Given())
    assert out.read_bytes() == b"mine"


def test_options_and_places(tmp_path: Path) -> None:
    with pytest.raises(CertkError, match="format is 'gguf'"):
        import_cache("gguf", tmp_path, tmp_path / "out", Given())
    for given in ({"layers": 0}, {"kv_heads": -1}, {"head_dim": 1 << 31}, {"dtype": "int8"}):
        with pytest.raises(CertkError, match="give"):
            Given(**given)
    whole = Given(**SHAPE, dtype="float16", page_layout="layer_first")
    for form in FORMATS:
        with pytest.raises((CertkError, OSError)):
            import_cache(form, tmp_path / "nothing", tmp_path / "out", whole)


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    place = HERE / "lmcache_disk"
    Path("list.txt").write_text("\n".join(order(place, *DISK)) + "\n\n")
    shape = ["--layers", "2", "--kv-heads", "2", "--head-dim", "4"]
    base = ["import", "lmcache", str(place), "-o", "c.safetensors"]
    assert main([*base, *shape]) == 2
    assert "give --order LIST" in capsys.readouterr().err
    assert main([*base, *shape, "--order", "list.txt"]) == 0
    assert capsys.readouterr().out == "c.safetensors: 2 layers of 2 heads, 11 tokens, d 4, BF16\n"
    is_numbers(Path("c.safetensors"), 11)
    assert main([*base, *shape, "--order", "list.txt"]) == 2
    assert "exists already" in capsys.readouterr().err
    json_to = ["import", "mlx", str(HERE / "mlx_kv.safetensors"), "-o", "m.safetensors", "--json"]
    assert main(json_to) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layers"]["1"] == {"dtype": "BF16", "shape": [2, 7, 4]}
    assert found["about"]["mlx.model"] == "tiny"


def test_export_to_mlx(tmp_path: Path, capsys: Any) -> None:
    """An exported cache comes back as it was, in the form that mlx-lm 0.32 writes."""
    cache, out, back = (tmp_path / name for name in ("c", "mlx", "back"))
    import_cache("mlx", HERE / "mlx_kv.safetensors", cache, Given())
    assert export_cache("mlx", cache, out) == (LAYERS, 7)
    import_cache("mlx", out, back, Given())
    assert {k: v.tolist() for k, v in widened(cache).items()} == {
        k: v.tolist() for k, v in widened(back).items()
    }
    ours, theirs = (
        json.loads(p.read_bytes()[8 : 8 + int.from_bytes(p.read_bytes()[:8], "little")])
        for p in (out, HERE / "mlx_kv.safetensors")
    )
    about, known = ours.pop("__metadata__"), theirs.pop("__metadata__")
    own = ("0.source", "0.model")
    assert {k: v for k, v in about.items() if k not in own} == {
        k: v for k, v in known.items() if k not in own
    }
    # Theirs has room behind the tokens.
    assert {k: (v["dtype"], len(v["shape"])) for k, v in ours.items()} == {
        k: (v["dtype"], len(v["shape"])) for k, v in theirs.items()
    }
    with pytest.raises(CertkError, match="exists already"):
        export_cache("mlx", cache, out)
    with pytest.raises(CertkError, match="give mlx"):
        export_cache("vllm", cache, tmp_path / "no")
    prune(cache, tmp_path / "out", queries="none", rest="codes")
    with pytest.raises(CertkError, match="output of certk prune"):
        export_cache("mlx", tmp_path / "out" / "c", tmp_path / "no")
    held = numbers(5)
    roles = [(i, k, role) for i in range(2) for k, role in enumerate(("key", "value"))]
    save_file({f"layers.{2 * i}.{role}": held[i, k] for i, k, role in roles}, tmp_path / "gap")
    with pytest.raises(CertkError, match="not 0 to 1"):
        export_cache("mlx", tmp_path / "gap", tmp_path / "no")
    arrays = {f"layers.{i}.{role}": held[i, k][:, i:].copy() for i, k, role in roles}
    save_file(arrays, tmp_path / "short")
    with pytest.raises(CertkError, match="4 to 5 keys"):
        export_cache("mlx", tmp_path / "short", tmp_path / "no")
    assert not (tmp_path / "no").exists()
    assert main(["export", "mlx", str(EXAMPLE), "-o", str(tmp_path / "x"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "mlx"
