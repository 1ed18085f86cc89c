"""Jobs on a real Ray cluster of two workers: the same bytes, whatever becomes of the workers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ray_host
from certk_rs import CertkError, prune
from certk_rs._files.cache import Cache
from certk_rs._files.location import locate
from certk_rs._jobs import steps
from certk_rs._jobs.engine import Unit, run_unit
from certk_rs._jobs.inputs import Input
from certk_rs._jobs.ray import RayEngine
from certk_rs._jobs.write import assemble
from cli_fixtures import cache_tensors, safetensors_bytes, tensor, write_cache
from fresh_process import run_python

pytest.importorskip("ray")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")

SHAPE = {"layers": 3, "kv_heads": 2, "heads": 4, "m": 32, "n": 2000, "d": 32}


@pytest.fixture(scope="module")
def host() -> Iterator[ray_host.Host]:
    with ray_host.ray_host() as started:
        yield started


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("caches")
    for i in range(3):
        write_cache(folder / f"{i}.safetensors", seed=i, **SHAPE)
    return folder


@pytest.fixture(scope="module")
def local(caches: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("local") / "out"
    assert len(prune(caches, out, 0.1).outputs) == 3
    return outputs(out)


def outputs(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "certk_rs", *map(str, arguments)]


# ----------------------------------------------------------------------------------- the same


@pytest.mark.parametrize("unit", ["layer", pytest.param("head", marks=pytest.mark.heavy)])
def test_the_bytes_are_those_of_the_local_engine(
    unit: str, host: ray_host.Host, caches: Path, local: dict[str, bytes], tmp_path: Path
) -> None:
    told = host.run(ray_host.pruned, str(caches), str(tmp_path / "out"), unit=unit)
    assert told["outputs"] == sorted(local)
    assert outputs(tmp_path / "out") == local
    # Every unit is told of, and then the one call that writes.
    units = 3 * 2 if unit == "head" else 3
    for name in local:
        counts = [(done, known) for each, done, known in told["told"] if each == name]
        ends = [known for done, known in counts if done == known]
        assert counts == [(i + 1, known) for known in ends for i in range(known)], name
        assert ends[-1] == 1
        assert sum(ends) > units


def test_what_is_wrong_with_an_input_is_said_as_locally(
    host: ray_host.Host, tmp_path: Path
) -> None:
    for i in range(3):
        tensors = cache_tensors(seed=i)
        if i == 1:
            query = np.ones((1, 4, 3, 4))
            query[0, 2, 1, 3] = np.nan
            tensors["layers.1.query"] = tensor(query, "F16")
        path = tmp_path / "in" / f"{i}.safetensors"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(safetensors_bytes(tensors, None))
    said = {
        engine: host.run(ray_host.pruned, str(tmp_path / "in"), str(tmp_path / engine), engine)
        for engine in ("local", "ray")
    }
    assert list(said["local"]["failures"]) == ["1.safetensors"]
    assert "nan" in said["local"]["failures"]["1.safetensors"][1].lower()
    assert said["ray"]["failures"] == said["local"]["failures"]
    assert outputs(tmp_path / "ray") == outputs(tmp_path / "local")
    assert len(outputs(tmp_path / "ray")) == 2


def test_errors_of_workers_keep_kind_and_message(host: ray_host.Host, tmp_path: Path) -> None:
    gone = Unit(Input(locate(tmp_path / "gone.safetensors"), None, None, (), ()), hashes=("x",))
    lost = rf"gone.safetensors is not to be found on {re.escape(socket.gethostname())}.*share"
    calls: list[tuple[tuple[Any, ...], str, str, str | None]] = [
        ((ray_host.raise_, "certk"), "CertkError", "row .3, 5.: NaN, ü and \x1b: mask it$", None),
        ((ray_host.raise_, "memory"), "MemoryError", "^$", None),
        ((ray_host.raise_, "system"), "PermissionError", r"\[Errno 13\].*/a/b", None),
        ((run_unit, gone, 1), "CertkError", lost, None),
        ((ray_host.raise_, "certk"), "CertkError", "begun with 0.0.1: install the same", "0.0.1"),
    ]
    for call, kind, words, version in calls:
        found = host.run(ray_host.called, *call, version=version)
        assert found[0] == kind
        assert re.search(words, found[1]), found
        assert found[2] == ("/a/b" if kind == "PermissionError" else None)


# ----------------------------------------------------------------------------- lost workers


def test_workers_that_are_killed_in_the_middle_change_nothing(
    host: ray_host.Host, caches: Path, local: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    told = host.run(ray_host.pruned_while_workers_are_killed, str(caches), str(out), {3})
    assert told["killed"] >= 1
    assert outputs(out) == local
    assert not [path for path in out.iterdir() if path.suffix == ".partial"]


@pytest.mark.heavy
def test_a_file_that_kills_every_worker_fails_alone(host: ray_host.Host, tmp_path: Path) -> None:
    for i in range(3):
        write_cache(tmp_path / "in" / f"{i}.safetensors", seed=i, layers=1)
    out = tmp_path / "out"
    told = host.run(ray_host.pruned_with_a_deadly_file, str(tmp_path / "in"), str(out))
    [(name, (kind, message))] = told["failures"].items()
    assert (name, kind) == ("1.safetensors", "CertkError")
    assert "1.safetensors" in message
    assert "2 workers died over this" in message
    assert "\n" not in message
    assert list(outputs(out)) == ["0.safetensors", "2.safetensors"]


def test_a_lost_call_and_one_that_the_system_refused_are_done_again(
    host: ray_host.Host, tmp_path: Path
) -> None:
    mark = str(tmp_path / "died")
    assert host.run(ray_host.called, ray_host.die_once, mark) == ("value", "alive")
    mark = str(tmp_path / "refused")
    assert host.run(ray_host.called, ray_host.refuse_twice, mark) == ("value", "read")
    assert Path(mark).read_text() == "xxx"


def test_an_output_that_is_written_twice_is_the_same_one(
    caches: Path, local: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a worker that was lost after it had written it."""
    monkeypatch.setattr(steps, "assemble", lambda *order: (assemble(*order), assemble(*order))[1])
    one = prune(caches / "0.safetensors", tmp_path / "twice", 0.1).outputs[0]
    assert outputs(tmp_path / "twice")["0.safetensors"] == local["0.safetensors"]
    assert one.output_bytes == len(local["0.safetensors"])

    # What is not the same, to the last byte, is somebody else's.
    for change in (lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: data[:-1]):
        out = tmp_path / str(len(change(b"abc")) + change(b"abc")[-1])

        def after_another(given: Any, target: Any, *order: Any, change: Any = change) -> Any:
            target.path.write_bytes(change(local["0.safetensors"]))
            return assemble(given, target, *order)

        monkeypatch.setattr(steps, "assemble", after_another)
        [failure] = prune(caches / "0.safetensors", out, 0.1).failures
        assert "exists already" in failure.message
        assert outputs(out)["0.safetensors"] == change(local["0.safetensors"])


# ------------------------------------------------------------------------- what workers see


def test_files_are_known_again_on_machines_that_number_them_otherwise(
    host: ray_host.Host, caches: Path
) -> None:
    place = locate(caches / "0.safetensors")
    with Cache(place) as cache:
        device, inode, size, time_ns = cache.file.identity
        headers = tuple(cache.file.header_sha256s())
    elsewhere = (device + 1, inode + 1, size, time_ns)
    unit = Unit(Input(place, None, None, elsewhere, headers), hashes=("layers.0.key",))
    with pytest.raises(CertkError, match="was changed"):
        run_unit(unit, 1)
    kind, result = host.run(ray_host.called, run_unit, unit, 1)
    assert (kind, list(result.facts)) == ("value", ["layers.0.key"])
    touched = replace(unit, input=replace(unit.input, identity=(device, inode, size, time_ns + 1)))
    assert "was changed" in host.run(ray_host.called, run_unit, touched, 1)[1]


def test_a_worker_with_another_output_directory_is_found_out(
    host: ray_host.Host, caches: Path
) -> None:
    # Memory is what no two processes share.
    told = host.run(ray_host.pruned, str(caches), "memory://certk-test-ray/out")
    assert len(told["failures"]) == 3
    for kind, message in told["failures"].values():
        assert kind == "CertkError"
        assert "memory://certk-test-ray/out" in message
        assert "OUT must be on a file system that all machines share" in message


# ------------------------------------------------------------------------------ the command


def test_the_command_prunes_by_an_address_and_says_nothing_else(
    host: ray_host.Host, caches: Path, local: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "in").symlink_to(caches)
    done = subprocess.run(
        command("prune", "in", "-o", "out", "--eps", 0.1, "--engine", "ray", "--json",
                "--address", host.address),
        cwd=tmp_path, env={**os.environ, **host.environment},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)["outputs"]) == 3
    assert outputs(tmp_path / "out") == local


@pytest.mark.parametrize(
    "own", [False, pytest.param(True, marks=pytest.mark.heavy)], ids=["cluster", "own cluster"]
)
def test_ctrl_c_ends_it_soon_and_it_can_be_resumed(
    own: bool, host: ray_host.Host, tmp_path: Path
) -> None:
    for i in range(20):
        write_cache(tmp_path / "in" / f"{i:02}.safetensors", seed=i, **{**SHAPE, "layers": 1})
    job = ["prune", tmp_path / "in", "-o", tmp_path / "out", "--eps", 0.1]
    where = ["--engine", "ray", *([] if own else ["--address", host.address])]
    process = subprocess.Popen(
        command(*job, *where), env={**os.environ, **host.environment}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert "kept" in process.stdout.readline()
    family = ray_host.family(process.pid)
    # As a terminal does it: to all of the foreground.
    os.killpg(process.pid, signal.SIGINT)
    _, complaints = process.communicate(timeout=60)
    assert (process.returncode, len(complaints.splitlines())) == (130, 1), complaints
    [said] = complaints.splitlines()
    assert re.fullmatch(
        r"certk: interrupted: \d+ of 20 files are finished; .* --resume goes on", said
    )
    ray_host.assert_gone(family)
    finished = len(outputs(tmp_path / "out"))
    assert 1 <= finished < 20
    result = prune(tmp_path / "in", tmp_path / "out", 0.1, resume=True)
    assert (len(result.outputs), len(result.failures)) == (20, 0)
    assert 1 <= result.resumed <= finished
    some = [tmp_path / "in" / f"{i:02}.safetensors" for i in (0, finished, 19)]
    prune(some, tmp_path / "undisturbed", 0.1)
    assert outputs(tmp_path / "undisturbed").items() <= outputs(tmp_path / "out").items()


def test_a_head_that_answers_no_more_ends_the_job(host: ray_host.Host, tmp_path: Path) -> None:
    kind, message = host.run(ray_host.pruned_without_a_head, str(tmp_path))
    assert kind == "CertkError"
    assert re.fullmatch(
        r"the head of the Ray cluster at \S+ is gone \(.*\): start a cluster again "
        "and go on with --resume",
        message,
    )


@pytest.mark.heavy  # Ray takes its time to begin and to end
def test_a_head_that_is_killed_ends_the_job_in_our_words(tmp_path: Path) -> None:
    """Ray by itself ends the process, with exit code 1: that of what does not hold."""
    for i in range(20):
        write_cache(tmp_path / "in" / f"{i:02}.safetensors", seed=i, **{**SHAPE, "layers": 1})
    folder = Path(tempfile.mkdtemp(prefix="certk-", dir="/tmp"))
    process = subprocess.Popen(
        command("prune", tmp_path / "in", "-o", tmp_path / "out", "--eps", 0.1, "--engine", "ray"),
        # Ray gives up after this time, and a job after a third of it.
        env={**os.environ, **ray_host.ray_environment(folder),
             "RAY_gcs_rpc_server_reconnect_timeout_s": "15"},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    family = {process.pid}
    try:
        assert process.stdout is not None
        assert "kept" in process.stdout.readline()
        family = ray_host.family(process.pid)
        [head] = [pid for pid in family if "gcs_server" in ray_host.title(pid).split("\0")[0]]
        os.kill(head, signal.SIGKILL)
        _, complaints = process.communicate(timeout=100)
    finally:
        # Its agents do not notice that their head was killed.
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
    assert process.returncode == 2
    [said] = complaints.splitlines()
    assert re.fullmatch(
        r"certk: error: the head of the Ray cluster at \S+ is gone \(.*Connection refused\): "
        r"start a cluster again and go on with --resume",
        said,
    )
    assert 1 <= len(outputs(tmp_path / "out")) < 20
    result = prune(tmp_path / "in", tmp_path / "out", 0.1, resume=True)
    assert (len(result.outputs), len(result.failures)) == (20, 0)


def test_an_address_that_nobody_answers_at_is_an_error_soon() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = "{}:{}".format(*free.getsockname())
    for address in (place, "nonsense", "x:99999"):
        with pytest.raises(CertkError, match=f"address '{address}': Ray cannot be reached") as info:
            RayEngine(address)
        assert "\n" not in str(info.value)


@pytest.mark.heavy  # Ray tries for 20 s
def test_a_token_that_is_not_the_cluster_s_is_said(host: ray_host.Host) -> None:
    code = f"""
from certk_rs._jobs.inputs import Input
from certk_rs._jobs.ray import RayEngine
try:
    RayEngine({host.address!r})
except ValueError as error:
    print(error)
"""
    done = run_python(code, **{**host.environment, "RAY_AUTH_TOKEN": "0" * 64})
    assert "Ray cannot be reached" in done.stdout
    assert "token" in done.stdout


def test_more_threads_than_any_machine_has_are_refused(host: ray_host.Host) -> None:
    assert "the largest machine of the Ray cluster has 2" in host.run(ray_host.refused, threads=3)
    assert host.run(ray_host.refused, threads=2) == ""
    assert "jobs is 0" in host.run(ray_host.refused, jobs=0)


def test_the_page_about_clusters_runs(host: ray_host.Host, tmp_path: Path) -> None:
    # run_page("docs/cluster.md"), where there is a cluster.
    host.run(ray_host.page_runs, "docs/cluster.md", str(tmp_path))
    same, pruned = (tmp_path / each / "cache.safetensors" for each in ("local", "pruned"))
    assert same.read_bytes() == pruned.read_bytes()
