"""Calls that fail: one line on stderr, nothing made, with --json an object that says the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from certk_rs._cli import terminal
from certk_rs._cli.answer import SCHEMA, Answer
from certk_rs._cli.commands import BRIEF
from cli_fixtures import (
    answered,
    cache_tensors,
    certk,
    safetensors_bytes,
    said,
    tensor,
    write_cache,
)

PRUNE = "prune x.safetensors -o out --eps 0.1"
AGAINST = "verify o --against x.safetensors"
PLAN = "plan --n 9 --sigma 1 --eps 0.1"

# A call, in a folder that has the files of `here`, the kind of its error, and words of it. Those of
# the parser differ between its versions.
REFUSED = [
    # Usage.
    ("prun", "usage", r"No such command '?prun'?.* Did you mean '?prune'?\?? \(see certk --help\)"),
    ("--zzz", "usage", r"No such option:? '?--zzz'? \(see certk --help\)"),
    ("plan", "usage", r"Missing option '--n' \(see certk plan --help\)"),
    ("plan --wrong", "usage", "--wrong"),
    (f"{PLAN} x", "usage", r"unexpected extra arguments?(\(s\))? \(x\) \(see certk plan --help\)"),
    ("plan --n 1.5 --sigma 1 --eps 0.1", "usage", "'--n'"),
    ("plan --n 1e6 --sigma 1 --eps 0.1", "usage", "'--n'"),
    ("plan --n 9 --sigma 1", "usage", "--eps"),
    ("prune", "usage", "CACHE"),
    ("prune x.safetensors --eps 0.1", "usage", "'-o'|--out"),
    (f"{PRUNE} --granularity row", "usage", "row"),
    (f"{PRUNE} --max-keep x", "usage", "'--max-keep': 'x': give a whole number or"),
    (f"{PRUNE} --keep-first 3.5", "usage", "'--keep-first'"),
    (f"{PRUNE} --threads 0", "usage", "'--threads'"),
    (f"{PRUNE} --bytes 512MB", "usage", "'--bytes'"),
    (f"{PRUNE} --wrong", "usage", "--wrong"),
    ("verify", "usage", "OUT"),
    ("select", "usage", r"Missing argument 'SCORES' \(see certk select --help\)"),
    ("select s.npy --eps much", "usage", "'--eps'"),
    ("select s.npy --eps 0.1 --kind other", "usage", "'--kind'"),
    # Values.
    ("plan --n 0 --sigma 1 --eps 0.1", "input", "n is 0"),
    ("plan --n 10 --sigma -1 --eps 0.1", "input", "sigma is -1"),
    ("plan --n 10 --sigma nan --eps 0.1", "input", "sigma is NaN"),
    ("plan --n 10 --sigma 1 --eps 1", "input", "eps is 1"),
    ("plan --n 10 --sigma 1 --eps 0", "input", "eps is 0"),
    ("prune x.safetensors -o out", "input", "how small. Give --eps"),
    ("prune x.safetensors -o out --eps much", "input", "eps"),
    ("prune x.safetensors -o out --eps 1", "input", "eps is 1"),
    ("prune x.safetensors -o out --eps nan", "input", "eps is nan"),
    (f"{PRUNE} --size 4", "input", "the target is eps and size"),
    (f"{PRUNE} --max-keep 0", "input", "max_keep is 0"),
    (f"{PRUNE} --max-keep 2.5", "input", "max_keep is 2.5"),
    (f"{PRUNE} --keep-first -1", "input", "keep_first is -1: give a count of 0 or more"),
    (f"{PRUNE} --names {{i}}", "input", "--names"),
    (f"{PRUNE} --skip-existing --force", "input", "exclude each other"),
    ("verify o --sample 2", "input", "sample chooses rows to recompute: give against"),
    (f"{AGAINST} --sample x", "usage", "'--sample': 'x': give a whole number"),
    (f"{AGAINST} --sample 0", "input", "sample is 0: give at least one row"),
    (f"{AGAINST} --sample 1.5", "input", "sample is 1.5: give a share in"),
    ("analyze", "input", "no input"),
    ("analyze x.safetensors --eps 0", "input", "eps is 0"),
    ("analyze x.safetensors --eps 1", "input", "eps is 1"),
    ("analyze x.safetensors --eps -1", "input", "give a number from 1e-300"),
    ("analyze x.safetensors --eps nan", "input", "eps is nan"),
    ("analyze x.safetensors --names x", "input", "--names"),
    ("analyze x.safetensors --text t", "input", "give --model DIR"),
    ("analyze x.safetensors --model m", "input", "--model does not go with CACHE"),
    ("gate", "usage", "FILE"),
    ("gate o", "input", "no threshold: give at least one"),
    ("gate o --tv x", "usage", "'--tv'"),
    ("gate o --tv nan", "input", "tv is nan: give a number from 0 to 1"),
    ("gate o --tv 1.1", "input", "tv is 1.1: give a number from 0 to 1"),
    ("gate o --tv -0.1", "input", "tv is -0.1"),
    ("gate o --error inf", "input", "error is inf: give a number of 0 or more"),
    ("gate o --error nan", "input", "error is nan"),
    ("gate o --keys nan", "input", "keys is nan"),
    ("gate o --keys 1", "input", "keys is 1: give a number with a point"),
    ("gate o --unproven nan", "input", "unproven is nan"),
    ("gate none --tv 0.1", "input", "none does not exist"),
    ("gate empty --tv 0.1", "input", "holds no .safetensors file"),
    ("gate memory://x --tv 0.1", "input", "memory://x"),
    ("report o --sets", "input", "--sets is about tables"),
    # Files.
    (f"{PRUNE} -o x.safetensors", "input", "is not a directory"),
    (f"{PRUNE} -o x.safetensors/sub", "input", "is not a directory"),
    (f"{PRUNE} -o .", "input", "is an input of this job"),
    (f"{PRUNE} -o o", "input", "exists already"),
    (f"{PRUNE} -o o --max-keep 3", "input", "exists already"),
    ("prune none -o out --eps 0.1", "input", "none does not exist"),
    ("verify none", "input", "none does not exist"),
    ("verify o --against none", "input", "none does not exist"),
    ("verify o --against bad.safetensors", "input", "too few"),
    ("verify empty", "input", "there is no .safetensors file in"),
    ("verify empty --against x.safetensors", "input", "there is no .safetensors file in"),
    ("verify o --against empty", "input", "there is no .safetensors file in"),
    ("analyze none", "input", "none does not exist"),
    ("analyze empty", "input", "no .safetensors file in empty"),
    ("analyze x.safetensors --html no/x.html", "input", "there is no directory"),
    ("report none", "input", "does not exist"),
    ("report empty", "input", "holds no .safetensors file"),
    ("report o --html no/x.html", "input", "give the name of a file"),
    ("report o --csv empty", "input", "give the name of a file"),
    ("report o --csv t --parquet t", "input", "is given twice"),
    ("demo --data none", "input", "none does not exist"),
    # The name of the file, and the words on it: other faults are in the tests of files.
    ("prune scale.safetensors -o out --eps 0.1", "input", "scale.safetensors: .*scale 'big'"),
    ("prune after.safetensors -o out --eps 0.1", "input", "after.safetensors: .*causal_offset 'x'"),
    ("select nan.npy --eps 0.1 -o k.npz", "input", r"scores\[1, 2\] is NaN"),
    ("select objects.npy --eps 0.1 -o k.npz", "input", "objects.npy cannot be read"),
    ("select whole.npy --eps 0.1 -o k.npz", "input", "scores"),
    ("capture --model m --text none -o x", "io", "none: No such file"),
    ("select none.npy --eps 0.1", "io", "none.npy: No such file or directory"),
    ("select x.safetensors --eps 0.1", "input", "is not a .npy or .npz file"),
    ("select s.npy --eps 0.1 -o none/k.npz", "input", "no directory"),
    ("select s.npy --eps 0.1 -o s.npy/k.npz", "input", "no directory"),
    ("select s.npy --eps 0.1 -o empty", "input", "exists already"),
    *(
        (f"select s.npy --eps 0.1 -o {name}", "input", r"written as \.npz: call it \S+\.npz")
        for name in ("x.npy", "x", "x.csv", "x.npz.gz", "npz")
    ),
]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("here")
    write_cache(folder / "x.safetensors")
    np.save(folder / "s.npy", np.zeros((2, 9)))
    (folder / "bad.safetensors").write_bytes(b"no")
    good, values = cache_tensors(), np.ones((1, 2, 24, 4))
    values[0, 1, 7, 2] = np.nan
    for name, tensors, metadata in (
        ("scale", good, {"scale": "big"}),
        ("after", good, {"causal_offset": "x"}),
        ("nan", good | {"layers.1.key": tensor(values, "F16")}, None),
    ):
        (folder / f"{name}.safetensors").write_bytes(safetensors_bytes(tensors, metadata))
    np.save(folder / "nan.npy", np.where(np.arange(12).reshape(3, 4) == 6, np.nan, 0.0))
    np.save(folder / "objects.npy", np.array([{}], object), allow_pickle=True)
    np.save(folder / "whole.npy", np.zeros((3, 4), int))
    (folder / "empty").mkdir()
    assert certk("prune", folder / "x.safetensors", "-o", folder / "o", "--eps", "0.1") == 0
    return folder


def made(folder: Path) -> dict[str, bytes | None]:
    """Return the contents of all files, and None for directories."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def failed(*arguments: object, code: int = 2) -> dict[str, Any]:
    """The error of a call with --json, which is that on stderr."""
    found = said(*arguments, "--json")
    assert found.code == code
    assert found.out.count("\n") == 1
    body: dict[str, Any] = json.loads(found.out)
    assert body["schema"] == SCHEMA
    assert body["error"]["exit_code"] == code
    assert body["error"]["message"] in found.err.replace("\\\\", "\\")
    assert found.err.startswith("certk: ")
    return body


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED, ids=[call for call, _, _ in REFUSED])
def test_a_refusal_is_one_line_and_makes_nothing(
    call: str, kind: str, words: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    before, arguments = made(here), call.split()
    found = said(*arguments)
    assert (found.code, found.out) == (2, "")
    assert re.fullmatch(r"certk: error: [^\n]+\n", found.err)
    assert re.search(words, found.err), found.err
    body = failed(*arguments)
    assert body.keys() == {"schema", "command", "error"}
    assert body["command"] == (arguments[0] if arguments[0] in BRIEF else None)
    assert body["error"]["kind"] == kind
    assert made(here) == before


@pytest.mark.parametrize(
    ("name", "words"), [("bad", "too few"), ("nan", r"'layers.1.key' is nan at \[0, 1, 7, 2\]")]
)
def test_a_bad_cache_is_one_line_that_names_it_and_makes_nothing(
    name: str, words: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    before = made(here)
    found = said("prune", f"{name}.safetensors", "-o", "out", "--eps", "0.1")
    assert (found.code, found.out, found.err.count("\n")) == (2, "", 1)
    assert re.search(rf"{name}\.safetensors.*{words}", found.err)
    assert made(here) == before


@pytest.mark.parametrize(
    ("error", "kind", "code", "words"),
    [
        (MemoryError(), "memory", 2, "not enough memory"),
        (KeyboardInterrupt(), "interrupted", 130, "interrupted"),
        (RuntimeError("two\nlines"), "unexpected", 2, r"RuntimeError: two lines \(at test_\w+.py:"),
        (OSError(28, "No space left on device", "x"), "io", 2, "x: No space left on device"),
    ],
)
def test_kinds_of_faults_inside(
    error: BaseException, kind: str, code: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("certk_rs.gaussian.plan", broken)
    body = failed(*PLAN.split(), code=code)
    assert body["error"]["kind"] == kind
    assert re.search(words, body["error"]["message"])
    found = said(*PLAN.split())
    assert (found.code, found.out, found.err.count("\n")) == (code, "", 1)


def test_behind_two_dashes_json_is_no_option() -> None:
    assert said("verify", "--", "--json")[:2] == (2, "")


def test_results_begin_with_schema_and_command(here: Path) -> None:
    found = said("select", here / "s.npy", "--eps", "0.1", "--json")
    assert found.out.startswith('{"schema": 1, "command": "select", ')
    assert "error" not in answered("select", here / "s.npy", "--eps", "0.1")


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
    assert answer.take(0) == (
        '{"schema": 1, "command": "plan", "a": [null, [1.5, null]], "b": {"c": "\\u007f\\u202e"}, '
        '"d": true}'
    )
    assert answer.take(0) is None
    answer.begin(True, "plan")
    answer.hold({})
    with pytest.raises(RuntimeError, match="a second JSON object"):
        answer.hold({})
    # Code 1 without a word is a failure all the same.
    assert json.loads(answer.take(1) or "")["error"]["kind"] == "does-not-hold"
    with pytest.raises(TypeError):
        answer.hold({"a": object()})


def test_a_failure_that_was_survived_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.begin_answer(True, "x")
    terminal.fail("failed: once", 1)
    terminal.print_json({"a": 1})
    terminal.print_answer(0)
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "command": "x", "a": 1}
