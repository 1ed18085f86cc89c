"""With --json there is one JSON object on stdout, however the command ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from certk_rs._cli import terminal
from certk_rs._cli.answer import SCHEMA, Answer
from cli_fixtures import certk, write_cache
from signalled import certk_signalled

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _keep_signal_handlers() -> Any:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    path = tmp_path / "x.safetensors"
    write_cache(path)
    return path


def failed(capsys: Captured, *arguments: object, code: int = 2) -> dict[str, Any]:
    """The object of a command that fails; stderr has its one line all the same."""
    capsys.readouterr()
    assert certk(*arguments, "--json") == code
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    body: dict[str, Any] = json.loads(out)
    assert body["schema"] == SCHEMA
    assert body["error"]["exit_code"] == code
    assert body["error"]["message"] in err.replace("\\\\", "\\")
    assert err.startswith("certk: ")
    return body


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (["plan"], "usage", "Missing option"),
        (["plan", "--n", "1.5", "--sigma", "1", "--eps", "0.1"], "usage", "not a whole number"),
        (["plan", "--wrong"], "usage", "--wrong"),
        (["prune", "none", "-o", "out", "--eps", "0.1", "--granularity", "row"], "usage", "row"),
        (["plan", "--n", "9", "--sigma", "1", "--eps", "2"], "input", "eps is 2"),
        (["prune", "none", "-o", "out", "--eps", "0.1"], "input", "none does not exist"),
        (["select", "none.npy", "--eps", "0.1"], "io", "none.npy: No such file or directory"),
        (["verify", "none"], "input", "none does not exist"),
        (["analyze", "none"], "input", "none does not exist"),
        (["demo", "--data", "none"], "input", "none does not exist"),
        (["capture", "--model", "m", "--text", "none", "-o", "x"], "io", "none: No such file"),
    ],
)
def test_every_command_says_why_it_failed(
    arguments: list[str], kind: str, words: str, capsys: Captured, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    body = failed(capsys, *arguments)
    assert body["command"] == arguments[0]
    assert body.keys() == {"schema", "command", "error"}
    assert body["error"]["kind"] == kind
    assert words in body["error"]["message"]


def test_an_unknown_command_is_a_usage_error_of_none(capsys: Captured) -> None:
    body = failed(capsys, "prun")
    assert body["command"] is None
    assert body["error"]["kind"] == "usage"
    assert body["error"]["message"].startswith("there is no command 'prun': did you mean prune?")


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (MemoryError(), "memory", 2),
        (KeyboardInterrupt(), "interrupted", 130),
        (RuntimeError("two\nlines"), "unexpected", 2),
        (OSError(28, "No space left on device", "x"), "io", 2),
    ],
)
def test_kinds_of_what_goes_wrong_inside(
    error: BaseException, kind: str, code: int, cache: Path, capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("certk_rs.gaussian.plan", broken)
    arguments = ("plan", "--n", "10", "--sigma", "1", "--eps", "0.1")
    assert failed(capsys, *arguments, code=code)["error"]["kind"] == kind


def test_without_it_nothing_is_on_stdout(capsys: Captured) -> None:
    assert certk("plan") == 2
    assert capsys.readouterr().out == ""
    # Behind -- it is no option.
    assert certk("verify", "--", "--json") == 2
    assert capsys.readouterr().out == ""


def test_what_does_not_hold_is_told_with_the_result(
    cache: Path, tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "out" / "x.safetensors"
    assert certk("prune", cache, "-o", out.parent, "--eps", "0.1") == 0
    content = bytearray(out.read_bytes())
    content[-1] ^= 1
    out.write_bytes(content)
    body = failed(capsys, "verify", out, code=1)
    assert body["holds"] is False
    assert body["outputs"][0]["findings"]
    assert body["error"]["kind"] == "does-not-hold"
    assert body["error"]["message"].startswith("1 of 1 outputs do not hold")


@pytest.mark.parametrize(
    ("kind", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)]
)
def test_an_interrupted_command_says_so(tmp_path: Path, kind: signal.Signals, code: int) -> None:
    write_cache(tmp_path / "x.safetensors", layers=2)
    job = ["prune", tmp_path / "x.safetensors", "-o", tmp_path / "out", "--eps", "0.1", "--json"]
    ended = certk_signalled(
        job, "certk_rs.jobs.file_job:run_unit", tmp_path / "calls", kind=int(kind)
    )
    assert ended.code == code
    assert ended.err.count("\n") == 1
    body = json.loads(ended.out)
    assert body["command"] == "prune"
    assert body["error"]["kind"] == "interrupted"
    assert body["error"]["exit_code"] == code


def test_a_stdout_that_takes_nothing_is_tried_once(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    command = [sys.executable, "-m", "certk_rs", "plan", "--n", "9", "--sigma", "1", "--json"]
    for more, line in (
        (["--eps", "0.1"], b"certk: error: No space left on device\n"),
        (["--eps", "2"], b"certk: error: eps is 2"),
    ):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [*command, *more], stdout=full, stderr=subprocess.PIPE, timeout=60, check=False
            )
        assert done.returncode == 2
        assert done.stderr.startswith(line)
        assert done.stderr.count(b"\n") == 1
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*command, "--eps", "0.1"], stdout=write, stderr=subprocess.PIPE,
                          timeout=60, check=False)  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr) == (2, b"")


def test_results_have_the_schema_and_are_json_for_everybody(
    tmp_path: Path, capsys: Captured
) -> None:
    np.save(tmp_path / "s.npy", np.zeros((2, 9)))
    assert certk("select", tmp_path / "s.npy", "--eps", "0.1", "--json") == 0
    text = capsys.readouterr().out
    assert text.startswith('{"schema": 1, "command": "select", ')
    assert "error" not in json.loads(text)


def test_the_answer() -> None:
    answer = Answer()
    assert answer.take(0) is None
    answer.failed("error: x", "input")
    assert answer.take(2) is None  # nobody asked
    answer.begin(True, "plan")
    assert answer.take(0) is None  # --help
    answer.begin(True, "plan")
    # NaN and Infinity are no JSON, DEL is a control character, and all is ASCII.
    answer.hold({"a": [float("nan"), (1.5, float("-inf"))], "b": {"c": "\x7f\u202e"}, "d": True})
    text = answer.take(0)
    assert text == (
        '{"schema": 1, "a": [null, [1.5, null]], "b": {"c": "\\u007f\\u202e"}, "d": true}'
    )
    assert answer.take(0) is None
    answer.begin(True, "plan")
    answer.hold({"command": "plan"})
    with pytest.raises(RuntimeError, match="a second JSON object"):
        answer.hold({})
    # Code 1 without a word is a failure all the same.
    assert json.loads(answer.take(1) or "")["error"]["kind"] == "does-not-hold"
    with pytest.raises(TypeError):
        answer.hold({"a": object()})


def test_a_failure_that_was_survived_is_none(capsys: Captured) -> None:
    terminal.begin_answer(True, "x")
    terminal.fail("failed: once", 1)
    terminal.print_json({"command": "x"})
    terminal.print_answer(0)
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "command": "x"}
