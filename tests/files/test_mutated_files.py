"""Eleven thousand damaged files: a right answer or a clean error, in little time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mutation_run
from certk_rs import CertkError, prune
from certk_rs._files.cache import Cache
from cli_fixtures import Job, cache_tensors, safetensors_bytes
from mutated_files import damage

# Of each kind so many; in batches, so that a crash says where. `make test` has the first of each.
COUNTS = {"cache": 4000, "output": 3000, "coded": 1000, "index": 3000}
BATCH = 250


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sound files: a cache, two outputs that prune makes of it, another cache in two parts."""
    top = tmp_path_factory.mktemp("mutated")
    job = Job(top / "job", eps=0.1, cache={"layers": 2, "n": 24, "dtype": "F16"})
    coded = job.output.parent.with_name("coded") / "x.safetensors"
    prune(job.source, coded.parent, 0.1, rest="codes", key_bits=12, value_bits=4)
    for kind, path in (("cache", job.source), ("output", job.output), ("coded", coded)):
        (top / "sound" / kind).mkdir(parents=True)
        (top / "sound" / kind / "x.safetensors").write_bytes(path.read_bytes())
    index = top / "sound" / "index"
    index.mkdir()
    tensors = cache_tensors(layers=2, dtype="F32", n=24)
    for part in range(2):
        own = {name: held for name, held in tensors.items() if f".{part}." in name}
        content = safetensors_bytes(own, {"scale": "0.5"})
        (index / f"part{part}.safetensors").write_bytes(content)
    body = {
        "metadata": {"total_size": 3, "causal_offset": "30"},
        "weight_map": {name: f"part{name.split('.')[1]}.safetensors" for name in tensors},
    }
    (index / "x.safetensors.index.json").write_text(json.dumps(body))
    return top


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        pytest.param(kind, first, marks=pytest.mark.heavy if first else ())
        for kind, count in COUNTS.items()
        for first in range(0, count, BATCH)
    ],
)
def test_damaged_files_are_refused_or_read_as_they_are(folder: Path, kind: str, first: int) -> None:
    ran = subprocess.run(
        [sys.executable, mutation_run.__file__, folder, kind, str(first), str(first + BATCH)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    ended = json.loads(ran.stdout)
    for reader in mutation_run.READERS[kind]:
        # Both ways are taken, or nothing was tried.
        done = {how: ended.get(f"{reader.__name__} {how}", 0) for how in ("read", "refused")}
        assert sum(done.values()) >= BATCH
        if reader in (mutation_run.read_cache, mutation_run.verify_against):
            assert min(done.values()) > 10, done
        if reader is mutation_run.pruned:
            assert done["refused"] > 10
            # An output has no queries.
            assert (done["read"] > 10) == (kind != "output"), done


def test_the_sound_files_are_read(folder: Path) -> None:
    for kind in COUNTS:
        readers = mutation_run.READERS[kind]
        place = folder / "sound" / kind
        path = next(iter(place.glob("*.json")), place / "x.safetensors")
        for reader in readers + mutation_run.RARELY:
            case = mutation_run.Case(path, path)
            if kind == "output" and reader is mutation_run.pruned:
                with pytest.raises(CertkError, match="no queries to certify for"):
                    reader(case)
            elif reader is not mutation_run.read_nhd:
                reader(case)
    with Cache(folder / "sound" / "index" / "x.safetensors.index.json") as cache:
        assert cache.causal_offset == 30


def test_damage_is_the_same_each_time_and_is_damage(folder: Path) -> None:
    content = (folder / "sound" / "cache" / "x.safetensors").read_bytes()
    files = {"x.safetensors": content}
    made = [damage(files, seed)["x.safetensors"] for seed in range(300)]
    assert made == [damage(files, seed)["x.safetensors"] for seed in range(300)]
    assert len(set(made)) > 280
    assert made.count(content) < 15


def test_a_wrong_answer_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "sound" / "cache" / "x.safetensors"
    case = mutation_run.Case(path, path)
    read = Cache.read

    def wrong(*arguments: object, **options: object) -> object:
        found = read(*arguments, **options)  # type: ignore[arg-type]
        return found[:, ::-1]

    monkeypatch.setattr(Cache, "read", wrong)
    with pytest.raises(mutation_run.WrongError, match="bytes of key"):
        mutation_run.read_cache(case)
