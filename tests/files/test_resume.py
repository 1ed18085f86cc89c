"""Jobs that were killed, interrupted, starved of space or disturbed, and go on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from certk_rs import CertkError, prune
from certk_rs._files.safetensors import canonical
from certk_rs._jobs import prune as prune_module
from certk_rs._jobs import steps
from certk_rs._jobs.report import job_report
from certk_rs.audit import audit
from cli_fixtures import answered, cache_tensors, safetensors_bytes, tensor, write_cache
from fresh_process import run_python
from signalled import certk_signalled

posix = pytest.mark.skipif(os.name != "posix", reason="signals, locks and mounts of POSIX")


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "certk_rs", *map(str, arguments)]


def outputs(folder: Path) -> dict[str, bytes]:
    """Return the outputs of a job, without its own records."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".certk" not in path.relative_to(folder).parts
    }


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few caches, and outputs of some hundred kilobytes."""
    folder = tmp_path_factory.mktemp("caches")
    for i in range(3):
        shape = {"layers": 3, "kv_heads": 2, "heads": 4, "m": 16, "n": 1000, "d": 32}
        write_cache(folder / f"{i}.safetensors", seed=i, **shape)
    return folder


@pytest.fixture(scope="module")
def undisturbed(caches: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    assert len(prune(caches, out, 0.1).outputs) == 3
    return outputs(out)


# Ends as by `kill -9` before the change of the file system of the number that comes first.
DIES = """
import itertools, os, signal, sys
from certk_rs._jobs import prune
from certk_rs.cli import main

left = itertools.count(int(sys.argv.pop(1)), -1)

def dying(change):
    def dies(*arguments, **options):
        if next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return change(*arguments, **options)
    return dies

for name in ("open", "write", "pwrite", "ftruncate", "fsync", "link", "replace", "unlink", "mkdir"):
    setattr(os, name, dying(getattr(os, name)))
# The result of a unit that takes as little as here would not be kept otherwise.
prune._WORTH_KEEPING = 0.0
code = main()
print(-next(left))
sys.exit(code)
"""


@posix
@pytest.mark.parametrize("step", [19, pytest.param(1, marks=pytest.mark.heavy)])
def test_a_job_killed_at_any_moment_is_resumed_to_the_same_bytes(tmp_path: Path, step: int) -> None:
    """Killed before every change that it makes to files, or before some of them."""
    for i in range(3):
        shape = {"layers": 2, "kv_heads": 2, "heads": 4, "m": 8, "n": 200, "d": 16}
        write_cache(tmp_path / "in" / f"{i}.safetensors", seed=i, **shape)

    def killed(at: int, out: Path) -> subprocess.CompletedProcess[str]:
        job = ["prune", tmp_path / "in", "-o", out, "--eps", 0.1, "--resume", "-q", "--jobs", 1]
        return run_python(DIES, *map(str, [at, *job]))

    whole = killed(-1, tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    undisturbed, count = outputs(tmp_path / "whole"), int(whole.stdout.split()[-1])
    assert (len(undisturbed), count > 100) == (3, True)
    seen: Counter[str] = Counter()
    for at in range(0, count - 1, step):
        out = tmp_path / str(at)
        assert killed(at, out).returncode == -signal.SIGKILL
        # Whatever has its final name is whole.
        found = outputs(out) if out.exists() else {}
        named = {name: data for name, data in found.items() if not name.endswith(".partial")}
        assert named == {name: undisturbed[name] for name in named}
        seen["a part"] += any(out.glob(".certk/parts/*"))
        seen["a partial file"] += len(found) > len(named)
        seen["some outputs"] += 0 < len(named) < 3
        assert not prune(tmp_path / "in", out, 0.1, resume=True).failures
        assert outputs(out) == undisturbed
        assert not any(out.glob(".certk/parts/*"))
    assert len(+seen) == 3, seen


def test_what_is_missing_or_damaged_is_made_anew_and_nothing_else(
    caches: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    def times() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}

    first = prune(caches, tmp_path, 0.1, resume=True)
    assert (first.resumed, outputs(tmp_path)) == (0, undisturbed)
    before = times()
    again = prune(caches, tmp_path, 0.1, resume=True)
    assert (again.resumed, again.outputs, times()) == (3, first.outputs, before)
    broken = tmp_path / "1.safetensors"
    data = bytearray(broken.read_bytes())
    data[-1] ^= 1
    broken.write_bytes(data)
    (tmp_path / "2.safetensors").unlink()
    result = prune(caches, tmp_path, 0.1, resume=True)
    assert (result.resumed, len(result.outputs)) == (1, 3)
    assert outputs(tmp_path) == undisturbed
    assert times()["0.safetensors"] == before["0.safetensors"]


def test_a_job_with_other_options_is_not_resumed(caches: Path, tmp_path: Path) -> None:
    prune(caches, tmp_path, 0.1)
    before = outputs(tmp_path)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"eps": 0.2}, "eps was '0.1', is '0.2'"),
        ({"keep_first": 3}, "keep_first was 0, is 3"),
        ({"granularity": "layer"}, "granularity was 'head', is 'layer'"),
        ({"proof": "none"}, "proof was 'auto', is 'none'"),
    ]
    for change, words in changes:
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
    """In the middle of a unit that would take minutes, and of another file than the first."""
    rng = np.random.default_rng(0)
    shapes = {"key": (2, 20_000, 64), "value": (2, 20_000, 64), "query": (16, 256, 64)}
    large = {
        f"layers.0.{role}": tensor(rng.standard_normal(shape), "F16")
        for role, shape in shapes.items()
    }
    (tmp_path / "in").mkdir()
    write_cache(tmp_path / "in" / "a.safetensors", layers=1)
    (tmp_path / "in" / "b.safetensors").write_bytes(safetensors_bytes(large, None))
    job = ["prune", tmp_path / "in", "-o", tmp_path / "out", "--eps", 1e-3, "--unit", "layer"]
    # One at a time: the second unit is that of the second file.
    ended = certk_signalled(
        [*job, "--jobs", 1], "certk_rs._jobs.steps:run_unit", tmp_path / "calls", at=2
    )
    assert (ended.code, ended.calls) == (130, 2)
    assert "a.safetensors: kept" in ended.out
    assert "1 of 2 files are finished" in ended.err
    assert "--resume" in ended.err
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


# ------------------------------------------------------------- what changes while no job looks


def stopped_before_it_writes(
    monkeypatch: pytest.MonkeyPatch, source: Path, out: Path, **options: Any
) -> None:
    """Choose all sets, keep each as a part, and be interrupted."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(prune_module, "_WORTH_KEEPING", 0.0)
        patched.setattr(steps, "assemble", stop)
        with pytest.raises(KeyboardInterrupt):
            prune(source, out, 0.1, **options)
    assert list((out / ".certk" / "parts").iterdir())


def change(path: Path, other: Path) -> None:
    """Give a file the bytes of another one, in place: it shows the same size and time as before."""
    before = path.stat()
    with path.open("r+b") as file:
        file.write(other.read_bytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    shown = [(each.st_ino, each.st_size, each.st_mtime_ns) for each in (before, after)]
    assert shown[0] == shown[1]


@pytest.mark.parametrize(
    "options",
    [
        {"unit": "layer"},
        {"unit": "head"},
        {"granularity": "token"},
        {"unit": "head", "holdout": 0.3},
        {"hot": 0.3, "rest": "file"},
        {"rest": "codes"},
    ],
)
@pytest.mark.parametrize("role", ["key", "value"])
def test_bytes_that_changed_under_the_same_time_are_chosen_for_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], role: str
) -> None:
    source, other = tmp_path / "x.safetensors", tmp_path / "other" / "x.safetensors"
    shape = {"m": 20, "n": 60, "d": 8}
    tensors = cache_tensors(**shape)
    source.write_bytes(safetensors_bytes(tensors, None))
    # One tensor of one layer has other bytes.
    tensors[f"layers.1.{role}"] = cache_tensors(**shape, seed=1)[f"layers.1.{role}"]
    other.parent.mkdir()
    other.write_bytes(safetensors_bytes(tensors, None))
    stopped_before_it_writes(monkeypatch, source, tmp_path / "out", **options)
    change(source, other)
    [report] = prune(source, tmp_path / "out", 0.1, resume=True, **options).outputs
    [expected] = prune(other, tmp_path / "expected", 0.1, **options).outputs
    assert outputs(tmp_path / "out") == outputs(tmp_path / "expected")
    assert [layer.held_out for layer in report.layers] == [
        layer.held_out for layer in expected.layers
    ]
    assert audit([Path(report.target)], [source]).holds
    assert not list((tmp_path / "out" / ".certk" / "parts").iterdir())


def test_parts_of_the_same_bytes_are_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "x.safetensors"
    write_cache(source, m=20, n=60, d=8)
    stopped_before_it_writes(monkeypatch, source, tmp_path / "out")
    done: list[object] = []
    monkeypatch.setattr(steps, "run_unit", lambda *unit: done.append(unit))
    assert len(prune(source, tmp_path / "out", 0.1, resume=True).outputs) == 1
    assert done == []
    monkeypatch.undo()
    prune(source, tmp_path / "expected", 0.1)
    assert outputs(tmp_path / "out") == outputs(tmp_path / "expected")


def test_an_output_whose_input_has_other_bytes_is_made_anew(tmp_path: Path) -> None:
    for i in range(3):
        write_cache(tmp_path / "in" / f"{i}.safetensors", seed=i)
    write_cache(tmp_path / "other.safetensors", seed=7)
    prune(tmp_path / "in", tmp_path / "out", 0.1)
    change(tmp_path / "in" / "1.safetensors", tmp_path / "other.safetensors")
    # The system notes this as a change, too: only bytes count.
    (tmp_path / "in" / "2.safetensors").chmod(0o600)
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.s*")}
    result = prune(tmp_path / "in", tmp_path / "out", 0.1, resume=True)
    assert (len(result.outputs), result.resumed) == (3, 2)
    prune(tmp_path / "in", tmp_path / "expected", 0.1)
    assert outputs(tmp_path / "out") == outputs(tmp_path / "expected")
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.s*")}
    assert [name for name in times if after[name] != times[name]] == ["1.safetensors"]
    assert prune(tmp_path / "in", tmp_path / "out", 0.1, resume=True).resumed == 3


def test_a_copied_job_speaks_of_the_places_that_it_is_in(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    # Each saves so little that there is a warning, and has a tensor that is not read.
    for i in range(2):
        tensors = cache_tensors(seed=i) | {"more": tensor(np.ones(3), "F32")}
        path = old / "in" / f"{i}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(safetensors_bytes(tensors, None))
    first = prune(old / "in", old / "out", 0.1)
    assert all(len(report.warnings) == 2 for report in first.outputs)
    shutil.copytree(old, new)
    shutil.rmtree(old)
    [job] = answered("report", new / "out")["jobs"]
    assert job["out"] == str(new / "out")
    again = prune(new / "in", new / "out", 0.1, resume=True)
    assert again.resumed == 2
    assert str(old) not in json.dumps(again.to_json())
    assert [report.warnings for report in again.outputs] == [
        tuple(each.replace(str(old), str(new)) for each in report.warnings)
        for report in first.outputs
    ]
    assert str(old) not in json.dumps(answered("report", new / "out"))


# --------------------------------------------------------------------- names, locks and memory


@posix
@pytest.mark.parametrize("length", [200, 201, 250, 251, 255])
def test_names_of_every_length_that_the_system_takes(tmp_path: Path, length: int) -> None:
    end = ".safetensors"
    names = [("x" * (length - len(end) - 1)) + f"{i}{end}" for i in range(2)]
    names.append("\u20ac" * ((length - len(end)) // 3) + end)
    for seed, name in enumerate(names):
        write_cache(tmp_path / "in" / "sub" / name, seed=seed)
    (tmp_path / "in" / "sub" / names[1]).write_bytes(b"no cache")
    options = {"recursive": True}
    result = prune(tmp_path / "in", tmp_path / "out", 0.1, **options)
    assert (len(result.outputs), len(result.failures)) == (2, 1)
    assert prune(tmp_path / "in", tmp_path / "out", 0.1, resume=True, **options).resumed == 2
    report = job_report([str(tmp_path / "out")])
    assert all(each["seconds"] is not None for each in report["outputs"])
    assert [each["name"] for each in report["failures"]] == [f"sub/{names[1]}"]
    shutil.rmtree(tmp_path / "out")


@posix
@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "link to nowhere", "socket"])
def test_what_is_no_lock_is_named_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    write_cache(tmp_path / "x.safetensors")
    mine = tmp_path / "mine"
    mine.write_text("mine")
    lock = tmp_path / "out" / ".certk" / "lock"
    lock.parent.mkdir(parents=True)
    if kind == "pipe":
        os.mkfifo(lock)
    elif kind == "folder":
        lock.mkdir()
    elif kind == "socket":
        monkeypatch.chdir(lock.parent)  # a path of more than about 100 bytes is refused
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("lock")
    else:
        lock.symlink_to(mine if kind == "link" else tmp_path / "nowhere")
    with pytest.raises(CertkError, match=r"\.certk/lock is not a regular file.*remove it"):
        prune(tmp_path / "x.safetensors", tmp_path / "out", 0.1)
    assert mine.read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()
    assert os.path.lexists(lock)


@posix
def test_a_part_that_is_no_file_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tmp_path / "x.safetensors", tmp_path / "out"
    write_cache(source)
    stopped_before_it_writes(monkeypatch, source, out)
    for part in (out / ".certk" / "parts").iterdir():
        part.unlink()
        os.mkfifo(part)
    assert len(prune(source, out, 0.1, resume=True).outputs) == 1
    prune(source, tmp_path / "expected", 0.1)
    assert outputs(out) == outputs(tmp_path / "expected")


@posix
@pytest.mark.parametrize("unit", ["layer", "head"])
def test_memory_that_a_file_claims_to_need_is_asked_for_before_it_is_read(
    tmp_path: Path, unit: str
) -> None:
    """Hashing the 275 GB that this file says it has takes minutes; it has a hole for them."""
    n, d = 1 << 26, 1024
    forms = {
        "layers.0.key": ("F16", (1, n, d)),
        "layers.0.value": ("F16", (1, n, d)),
        "layers.0.query": ("F16", (1, 4, d)),
    }
    header = canonical(forms, {})
    source = tmp_path / "x.safetensors"
    with source.open("wb") as file:
        file.write(header.raw)
        file.truncate(len(header.raw) + max(e.stop for e in header.entries.values()))
    assert source.stat().st_size > 274e9
    code = f"""
import resource, sys
from certk_rs._files.tensor_file import SafetensorsFile
from certk_rs import prune
resource.setrlimit(resource.RLIMIT_AS, (1 << 35, 1 << 35))
SafetensorsFile.read_into = lambda *_: sys.exit("it was read")
[failure] = prune({str(source)!r}, {str(tmp_path / "out")!r}, 0.1, unit={unit!r}).failures
print(failure.kind, failure.message)
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("MemoryError")
    assert "not enough memory" in done.stdout
