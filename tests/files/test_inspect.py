"""`certk inspect`: what it says of caches, outputs and other files, by headers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from certk_rs import CertkError
from certk_rs._files.cache import Cache
from certk_rs._files.location import locate
from certk_rs._jobs.inspect import inspect
from cli_fixtures import (
    Job,
    answered,
    cache_tensors,
    forge,
    raw_file,
    safetensors_bytes,
    said,
    tensor,
    write_cache,
)
from repository import EXAMPLE


def inspected(*arguments: object, code: int = 0) -> list[Any]:
    body = answered("inspect", *arguments, code=code)
    assert body["command"] == "inspect"
    files: list[Any] = body["files"]
    return files


def test_a_cache_is_told_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_cache(path, metadata={"scale": "0.25", "causal_offset": "19"}, layers=3, n=24, m=3)
    [found] = inspected(path)
    assert (found["kind"], found["is_ready"], found["parts"]) == ("cache", True, 1)
    assert found["bytes"] == path.stat().st_size
    assert found["metadata"] == {"scale": "0.25", "causal_offset": "19"}
    assert found["tensors"][0] == {
        "name": "layers.0.key", "dtype": "F16", "shape": [1, 2, 24, 4], "bytes": 384
    }  # fmt: skip
    cache = found["cache"]
    assert (cache["names"], cache["layout"]) == ("layers.{i}.{key|value|query}", "hnd")
    assert [layer["layer"] for layer in cache["layers"]] == [0, 1, 2]
    assert cache["layers"][1] == {
        "layer": 1, "kv_heads": 2, "heads": 4, "group": 2, "queries": 3, "keys": 24, "visible": 22,
        "d": 4, "dtypes": "F16", "scale": 0.25, "rows": 6, "bytes": 2 * 384 + 96,
    }  # fmt: skip
    assert cache["needs"] == []
    assert "hides the last 2 of 24 keys" in cache["warnings"][0]


def test_the_text_has_every_tensor() -> None:
    text = said("inspect", EXAMPLE).out
    assert "24 sets among 12288 keys" in text
    with Cache(EXAMPLE) as cache:
        for name in cache.file.header.entries:
            assert name in text


def test_layers_that_are_alike_are_one_line(tmp_path: Path) -> None:
    tensors = cache_tensors(layers=5) | {
        name: held for name, held in cache_tensors(layers=3, n=30).items() if ".2." in name
    }
    (tmp_path / "x.safetensors").write_bytes(safetensors_bytes(tensors, None))
    lines = [line.split()[:5] for line in said("inspect", tmp_path).out.splitlines()]
    assert ["0-1", "2", "4", "3", "24"] in lines
    assert ["2", "2", "4", "3", "30"] in lines
    assert ["3-4", "2", "4", "3", "24"] in lines


def test_what_prune_must_be_told_is_found(tmp_path: Path) -> None:
    shapes = {"key": (24, 2, 4), "value": (24, 2, 4), "query": (3, 4, 4)}
    tensors = {
        f"past_{i}_{role}": tensor(np.ones(shape), "F16")
        for i in range(2)
        for role, shape in shapes.items()
    }
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes(tensors, None))
    [found] = inspected(path, code=1)
    assert (found["kind"], found["is_ready"]) == ("cache", False)
    names = "past_{i}_{key|value|query}"
    assert found["cache"]["needs"] == [f"--names {names!r}", "--layout nhd"]
    [found] = inspected(path, "--names", names, "--layout", "nhd")
    assert found["cache"]["needs"] == []
    assert found["cache"]["layers"][0]["keys"] == 24
    assert f"prune needs --names {names!r} --layout nhd" in said("inspect", path).err


def test_other_tensors_are_shown_with_why_they_are_no_cache(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes({"weight": tensor(np.ones(3), "F32")}, {"format": "pt"}))
    [found] = inspected(path, code=1)
    assert (found["kind"], found["cache"]) == ("other", None)
    assert "no tensor is named like" in found["complaint"]
    code, out, err = said("inspect", path)
    assert code == 1
    assert "weight" in out
    assert "no cache: " in err


@pytest.mark.parametrize("granularity", ["head", "layer"])
def test_an_output_is_summed_up(tmp_path: Path, granularity: str) -> None:
    job = Job(tmp_path, eps=0.2, granularity=granularity, cache={"layers": 2, "n": 24})
    [found] = inspected(job.output)
    assert (found["kind"], found["complaint"]) == ("output", None)
    output, audit = found["output"], job.check()
    assert (output["kept"], output["total"]) == (audit.kept, audit.total)
    assert (output["eps"], output["layers"], output["complaint"]) == (0.2, 2, None)
    assert output["options"]["granularity"] == granularity
    assert output["output_bytes"] == job.output.stat().st_size
    assert output["input_bytes"] == sum(len(held) for _, _, held in cache_tensors().values())
    assert f"kept {audit.kept} of {audit.total} keys" in said("inspect", job.output).out


def test_an_output_whose_certificate_was_changed_is_told(tmp_path: Path) -> None:
    job = Job(tmp_path)
    content = job.output.read_bytes()
    job.output.write_bytes(content.replace(b"[0.1,0.1]", b"[0.2,0.1]"))
    [found] = inspected(job.output, code=1)
    assert "was changed after" in found["output"]["complaint"]
    forge(job.output, say=lambda body: body.pop("names") if "names" in body else body.clear())
    [found] = inspected(job.output, code=1)
    assert "cannot be read" in found["output"]["complaint"]
    assert "its certificate cannot be read" in said("inspect", job.output).err


def test_shards_are_one_file(tmp_path: Path) -> None:
    tensors = cache_tensors(layers=2)
    for part in range(2):
        own = {name: held for name, held in tensors.items() if f".{part}." in name}
        (tmp_path / f"part{part}.safetensors").write_bytes(safetensors_bytes(own, None))
    weight_map = {name: f"part{name.split('.')[1]}.safetensors" for name in tensors}
    (tmp_path / "x.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    [found] = inspected(tmp_path)
    assert (found["kind"], found["parts"]) == ("cache", 2)
    assert len(found["tensors"]) == 6


def test_a_file_that_cannot_be_read_does_not_stop_the_others(tmp_path: Path) -> None:
    write_cache(tmp_path / "good.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"PK\x03\x04" + bytes(100))
    (tmp_path / "lost.safetensors").symlink_to("nowhere")
    found = inspected(tmp_path, code=2)
    assert [each["kind"] for each in found] == ["unreadable", "cache", "unreadable"]
    assert "a zip archive" in found[0]["complaint"]
    code, out, err = said("inspect", tmp_path)
    assert code == 2
    assert "good.safetensors: 6 tensors" in out
    assert err.count("error: ") == 2
    with pytest.raises(FileNotFoundError):
        inspect(locate(tmp_path / "lost.safetensors"))
    with pytest.raises(CertkError, match="--names"):
        inspect(locate(tmp_path / "good.safetensors"), "nonsense")


def test_only_headers_are_read(tmp_path: Path) -> None:
    """Of a file with a hole of 64 GiB where the data are."""
    shape = [1, 8, 1 << 22, 512]
    size = 2 * 8 * (1 << 22) * 512
    header = {
        "layers.0.key": {"dtype": "F16", "shape": shape, "data_offsets": [0, size]},
        "layers.0.value": {"dtype": "F16", "shape": shape, "data_offsets": [size, 2 * size]},
        "layers.0.query": {
            "dtype": "F16", "shape": [32, 1, 512], "data_offsets": [2 * size, 2 * size + 32768],
        },
    }  # fmt: skip
    content = raw_file(json.dumps(header))
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with path.open("r+b") as file:
        file.truncate(len(content) + 2 * size + 32768)
    [found] = inspected(path)
    assert found["cache"]["layers"][0]["keys"] == 1 << 22


def test_what_is_shown_is_plain(tmp_path: Path) -> None:
    evil = "a\x1b[31m\n\u202e"
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes({evil: tensor(np.ones(3), "F32")}, {evil: evil}))
    code, out, err = said("inspect", path)
    assert code == 1
    assert not set("\x1b\u202e") & set(out + err)
