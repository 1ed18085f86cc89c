"""Jobs that were killed, interrupted, starved of space or disturbed, and go on."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import killed_job
from certk_rs import CertkError
from certk_rs.pruning import prune
from cli_fixtures import safetensors_bytes, tensor, write_cache

posix = pytest.mark.skipif(os.name != "posix", reason="signals, locks and mounts of POSIX")


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "certk_rs", *map(str, arguments)]


def outputs(folder: Path) -> dict[str, bytes]:
    """What a job has written, but for what is its own."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".certk" not in path.relative_to(folder).parts
    }


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few caches that take about half a second to prune."""
    folder = tmp_path_factory.mktemp("caches")
    for i in range(3):
        shape = {"layers": 3, "kv_heads": 2, "heads": 4, "m": 48, "n": 3000, "d": 32}
        write_cache(folder / f"{i}.safetensors", seed=i, **shape)
    return folder


@pytest.fixture(scope="module")
def undisturbed(caches: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    assert len(prune(caches, out, 0.1).outputs) == 3
    return outputs(out)


@posix
def test_a_job_killed_at_any_moment_is_resumed_to_the_same_bytes(tmp_path: Path) -> None:
    """Fifty kills: for each phase, ten at random moments of the time that it takes in all."""
    for i in range(3):
        shape = {"layers": 2, "kv_heads": 2, "heads": 4, "m": 16, "n": 500, "d": 32}
        write_cache(tmp_path / "in" / f"{i}.safetensors", seed=i, **shape)

    def job(name: str) -> list[str]:
        place, out = str(tmp_path / "in"), str(tmp_path / name)
        return ["prune", place, "-o", out, "--eps", "0.1", "--resume", "-q"]

    moments = random.Random(18)
    ended_in: Counter[str] = Counter()
    with killed_job.Jobs() as jobs:
        for warm in ("first", "second"):
            whole = jobs.run(killed_job.Order(job(warm)))
            assert whole.code == 0
        undisturbed = outputs(tmp_path / "first")
        assert len(undisturbed) == 3
        assert outputs(tmp_path / "second") == undisturbed
        for i in range(50):
            phase = killed_job.PHASES[i % len(killed_job.PHASES)]
            lengths = whole.lengths(phase)
            [number] = moments.choices(range(len(lengths)), lengths)
            # No run takes as long as another, so rather early than when the phase is over.
            delay = lengths[number] * moments.random() ** 2
            out = tmp_path / str(i)
            told = jobs.run(killed_job.Order(job(str(i)), phase, number, delay))
            if told.code == -signal.SIGALRM:
                ended_in.update(told.under_way())
            # Whatever has its final name is whole.
            half_way = outputs(out) if out.exists() else {}
            named = {name: data for name, data in half_way.items() if not name.endswith(".partial")}
            assert named == {name: undisturbed[name] for name in named}
            assert jobs.run(killed_job.Order(job(str(i)))).code == 0
            assert outputs(out) == undisturbed
            assert not list((out / ".certk" / "parts").iterdir())
            shutil.rmtree(out)
    assert ended_in["job"] >= 40
    assert all(ended_in.get(phase, 0) >= 2 for phase in killed_job.PHASES), ended_in
    assert sum(ended_in[phase] >= 5 for phase in killed_job.PHASES) >= 4, ended_in


def test_what_was_damaged_meanwhile_is_made_anew(
    caches: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    prune(caches, tmp_path, 0.1)
    broken = tmp_path / "1.safetensors"
    data = bytearray(broken.read_bytes())
    data[-1] ^= 1
    broken.write_bytes(data)
    (tmp_path / "2.safetensors").unlink()
    result = prune(caches, tmp_path, 0.1, resume=True)
    assert result.resumed == 1
    assert len(result.outputs) == 3
    assert outputs(tmp_path) == undisturbed


def test_a_finished_job_that_is_resumed_does_nothing(
    caches: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    first = prune(caches, tmp_path, 0.1)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    again = prune(caches, tmp_path, 0.1, resume=True)
    assert again.resumed == 3
    assert again.outputs == first.outputs
    assert times == {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    assert outputs(tmp_path) == undisturbed


def test_there_may_be_nothing_to_resume(
    caches: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    assert prune(caches, tmp_path / "out", 0.1, resume=True).resumed == 0
    assert outputs(tmp_path / "out") == undisturbed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"eps": 0.2}, "eps was '0.1', is '0.2'"),
        ({"keep_first": 3}, "keep_first was 0, is 3"),
        ({"granularity": "layer"}, "granularity was 'head', is 'layer'"),
        ({"proof": "none"}, "proof was 'auto', is 'none'"),
    ],
)
def test_a_job_with_other_options_is_not_resumed(
    caches: Path, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    prune(caches, tmp_path, 0.1)
    before = outputs(tmp_path)
    with pytest.raises(CertkError, match=words):
        prune(caches, tmp_path, **({"eps": 0.1} | change), resume=True)
    assert outputs(tmp_path) == before


def test_a_job_with_other_inputs_is_not_resumed(tmp_path: Path) -> None:
    for name in "ab":
        write_cache(tmp_path / "in" / f"{name}.safetensors")
    prune(tmp_path / "in", tmp_path / "out", 0.1)

    def refused(words: str) -> None:
        with pytest.raises(CertkError, match=words):
            prune(tmp_path / "in", tmp_path / "out", 0.1, resume=True)

    write_cache(tmp_path / "in" / "c.safetensors")
    refused(r"input c\.safetensors is new")
    (tmp_path / "in" / "c.safetensors").unlink()
    write_cache(tmp_path / "in" / "b.safetensors", seed=7)
    os.utime(tmp_path / "in" / "b.safetensors", (1, 1))
    refused(r"input b\.safetensors was changed")
    (tmp_path / "in" / "b.safetensors").unlink()
    refused(r"input b\.safetensors is gone")


def test_an_unfinished_job_is_not_begun_anew_by_accident(caches: Path, tmp_path: Path) -> None:
    def stop(_outcome: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune(caches, tmp_path / "out", 0.1, on_file=stop, jobs=1)
    [finished] = (tmp_path / "out").glob("*.safetensors")
    finished.unlink()
    with pytest.raises(CertkError, match="an unfinished job is there: go on with --resume"):
        prune(caches, tmp_path / "out", 0.1)
    assert len(prune(caches, tmp_path / "out", 0.1, existing="replace").outputs) == 3


def test_outputs_that_exist_are_refused_skipped_or_replaced(caches: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    taken = tmp_path / "out" / "1.safetensors"
    taken.write_text("mine")
    with pytest.raises(CertkError, match=r"1\.safetensors exists already.*--skip-existing"):
        prune(caches, tmp_path / "out", 0.1)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["1.safetensors"]
    result = prune(caches, tmp_path / "out", 0.1, existing="skip")
    assert [each.name for each in result.skipped] == ["1.safetensors"]
    assert len(result.outputs) == 2
    assert taken.read_text() == "mine"
    assert len(prune(caches, tmp_path / "out", 0.1, existing="replace").outputs) == 3
    assert taken.stat().st_size > 1000


def test_a_foreign_file_is_not_replaced_by_resuming(caches: Path, tmp_path: Path) -> None:
    prune(caches, tmp_path, 0.1)
    (tmp_path / "1.safetensors").write_text("mine")
    result = prune(caches, tmp_path, 0.1, resume=True)
    [failure] = result.failures
    assert "exists already" in failure.message
    assert (tmp_path / "1.safetensors").read_text() == "mine"


@posix
def test_a_second_process_on_the_same_output_is_refused(caches: Path, tmp_path: Path) -> None:
    seen: list[subprocess.CompletedProcess[str]] = []

    def meanwhile(_outcome: object) -> None:
        if not seen:
            second = command("prune", caches, "-o", tmp_path / "out", "--eps", 0.1, "--resume")
            seen.append(subprocess.run(second, capture_output=True, text=True, check=False))

    result = prune(caches, tmp_path / "out", 0.1, on_file=meanwhile)
    assert len(result.outputs) == 3
    assert seen[0].returncode == 2
    assert f"process {os.getpid()} on" in seen[0].stderr
    # And what it was refused for is unharmed.
    assert prune(caches, tmp_path / "out", 0.1, resume=True).resumed == 3


@posix
def test_ctrl_c_says_how_far_it_came_and_how_to_go_on(tmp_path: Path) -> None:
    """Within a second, however long a unit takes."""
    rng = np.random.default_rng(0)
    shapes = {"key": (2, 20_000, 64), "value": (2, 20_000, 64), "query": (16, 256, 64)}
    large = {
        f"layers.0.{role}": tensor(rng.standard_normal(shape), "F16")
        for role, shape in shapes.items()
    }
    (tmp_path / "in").mkdir()
    write_cache(tmp_path / "in" / "a.safetensors")
    (tmp_path / "in" / "b.safetensors").write_bytes(safetensors_bytes(large, None))
    job = command(
        "prune", tmp_path / "in", "-o", tmp_path / "out", "--eps", 1e-3, "--unit", "layer"
    )
    process = subprocess.Popen(job, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    # Results come as they are found, into a pipe too.
    assert "a.safetensors: kept" in process.stdout.readline()
    time.sleep(0.3)
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - begun < 2
    assert process.returncode == 130
    assert "1 of 2 files are finished" in errors
    assert "--resume" in errors
    assert not list((tmp_path / "out").glob("*.partial"))


def test_the_manifest_tells_what_was_asked_of_which_inputs(caches: Path, tmp_path: Path) -> None:
    prune(caches, tmp_path, "0=0.2,*=0.1")
    body = json.loads((tmp_path / ".certk" / "job.json").read_text())
    assert body["state"] == "ended"
    assert body["request"]["eps"] == "0=0.2,*=0.1"
    assert sorted(body["inputs"]) == ["0.safetensors", "1.safetensors", "2.safetensors"]


FULL_DISK = """
set -e
mount -t tmpfs -o size={size} none {out}
{job} || echo "first $?"
find {out} -name '*.safetensors' | xargs -r ls -l
mount -o remount,size=200m {out}
{job} || echo "second $?"
cp {out}/*.safetensors {copy}
"""


@posix
@pytest.mark.parametrize("share", [0.05, 0.4, 0.8])
def test_a_full_disk_is_a_clean_error_and_resume_works_afterwards(
    caches: Path, undisturbed: dict[str, bytes], tmp_path: Path, share: float
) -> None:
    """A real file system without space: a small tmpfs, in a namespace of its own."""
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "-rm"]
    (tmp_path / "probe").mkdir()
    probe = [*unshare, "mount", "-t", "tmpfs", "none", str(tmp_path / "probe")]
    if shutil.which("unshare") is None or subprocess.run(probe, check=False).returncode:
        pytest.skip("this system lets nobody mount a tmpfs")
    out, copy = tmp_path / "out", tmp_path / "copy"
    out.mkdir()
    copy.mkdir()
    size = int(share * sum(map(len, undisturbed.values())))
    job = " ".join(command("prune", caches, "-o", out, "--eps", 0.1, "--resume", "-q"))
    script = FULL_DISK.format(size=size, out=out, job=job, copy=copy)
    done = subprocess.run(
        [*unshare, "sh", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "first 1" in done.stdout or "first 2" in done.stdout
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr
    assert "second" not in done.stdout
    assert outputs(copy) == undisturbed
