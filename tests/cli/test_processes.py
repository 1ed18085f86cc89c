"""The program as a process: signals, disks that are full, streams that are closed."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli_fixtures import certk, write_cache
from repository import EXAMPLE
from signalled import certk_signalled

CERTK = [sys.executable, "-m", "certk_rs"]
PLAN = ["plan", "--n", "9", "--sigma", "1", "--eps", "0.1", "--json"]
FULL = "certk: error: No space left on device\n"


def run(command: list[str], *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    if "stdout" not in options:
        options["stdout"] = subprocess.PIPE
    words = [*command, *map(str, arguments)]
    return subprocess.run(
        words, stderr=subprocess.PIPE, text=True, timeout=120, check=False, **options
    )


@pytest.fixture
def prune(tmp_path: Path) -> list[object]:
    """A job of a small cache."""
    write_cache(tmp_path / "x.safetensors", layers=2)
    return ["prune", tmp_path / "x.safetensors", "-o", tmp_path / "out", "--eps", "0.1"]


def left(folder: Path) -> list[str]:
    files = (each for each in folder.rglob("*") if each.suffix in (".safetensors", ".partial"))
    return [each.name for each in files]


def test_a_full_disk(tmp_path: Path) -> None:
    """The kernel refuses to let files grow, in the middle of the data."""
    write_cache(tmp_path / "x.safetensors", n=2000, d=16)

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    job = ("prune", tmp_path / "x.safetensors", "-o", tmp_path / "out", "--eps", "0.01")
    done = run(CERTK, *job, preexec_fn=limited)
    assert done.returncode == 2
    name = r"out/x\.safetensors"
    assert re.fullmatch(rf"certk: error: .*{name}: File too large\n", done.stderr)
    assert left(tmp_path) == ["x.safetensors"]


def test_a_terminated_job_ends_soon_and_leaves_no_output(tmp_path: Path) -> None:
    write_cache(tmp_path / "x.safetensors", layers=8, m=64, n=2048, d=64)
    job = ["prune", tmp_path / "x.safetensors", "-o", tmp_path / "out", "--eps", "0.001", "--json"]
    ended = certk_signalled(
        [*job, "--jobs", 2, "--unit", "layer"],
        "certk_rs._jobs.steps:run_unit", tmp_path / "calls", at=2, kind=int(signal.SIGTERM),
    )  # fmt: skip
    assert (ended.code, ended.err) == (128 + signal.SIGTERM, "certk: terminated\n")
    body = json.loads(ended.out)
    assert body["command"] == "prune"
    assert body["error"]["kind"] == "interrupted"
    assert body["error"]["exit_code"] == 128 + signal.SIGTERM
    # Of eight layers: no thread begins another one than it was about to.
    assert ended.calls <= 3
    assert left(tmp_path) == ["x.safetensors"]


@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&- <&-"])
def test_closed_streams_are_no_fault(prune: list[object], tmp_path: Path, closed: str) -> None:
    done = run(["sh", "-c", f'"$@" {closed}', "sh", *CERTK], *prune)
    assert "unexpected" not in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 0
    assert certk("verify", tmp_path / "out", "--against", tmp_path / "x.safetensors") == 0


def test_a_closed_pipe_is_silent(prune: list[object], tmp_path: Path) -> None:
    certk(*prune)
    for call in (["verify", tmp_path / "out"], PLAN):
        read, write = os.pipe()
        os.close(read)
        done = run(CERTK, *call, stdout=write)
        os.close(write)
        assert (done.returncode, done.stderr) == (2, "")


def test_a_full_stdout_is_an_error_and_is_tried_once(prune: list[object], tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    certk(*prune)
    for call, words in (
        (["verify", tmp_path / "out"], FULL),
        (PLAN, FULL),
        ([*PLAN, "--eps", "2"], "certk: error: eps is 2"),
    ):
        with Path("/dev/full").open("w") as full:
            done = run(CERTK, *call, stdout=full)
        assert done.returncode == 2
        assert done.stderr.startswith(words)
        assert done.stderr.count("\n") == 1


def test_the_console_script_speaks_plain_ascii() -> None:
    plain = os.environ | {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    script = Path(sys.executable).with_name("certk")
    command = [str(script)] if script.exists() else CERTK
    done = run(command, "demo", "--data", EXAMPLE, env=plain)
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert "####" in done.stdout
    assert "----" in done.stdout
    assert "\\u" not in done.stdout
