"""The command line: exit codes, what goes to stdout and stderr, and never a traceback."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import certk_rs as ck
from cli_fixtures import cache_tensors, certk, rewrite, safetensors_bytes, tensor, write_cache
from repository import EXAMPLE, ROOT
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


def refused(capsys: Captured, *arguments: object, code: int = 2) -> str:
    """Run a command that must fail; return its one line on stderr."""
    capsys.readouterr()
    assert certk(*arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"certk: error: [^\n]+\n", err), err
    return err


def in_a_process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "certk_rs", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_prune_then_verify(cache: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "out"
    assert certk("prune", cache, "-o", out, "--eps", "0.1", "--proof", "full") == 0
    text, errors = capsys.readouterr()
    assert re.search(r"out/x.safetensors: kept \d+ of 96 keys", text)
    assert "is larger" in errors  # the proof of so small a cache
    assert certk("verify", out) == 0
    assert "not known without --against: whether" in capsys.readouterr().out
    assert certk("verify", out, "--against", cache) == 0
    assert "holds: 24 tail masses and 4 lower bounds recomputed" in capsys.readouterr().out
    assert [name for name in names(out) if not name.startswith(".certk")] == ["x.safetensors"]


def test_prune_as_json(cache: Path, tmp_path: Path, capsys: Captured) -> None:
    arguments = ("prune", cache, "-o", tmp_path / "out", "--eps", "0.1", "--json")
    assert certk(*arguments) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["command"] == "prune"
    [output] = said["outputs"]
    assert output["input"] == str(cache)
    assert output["total"] == 96
    assert [layer["layer"] for layer in output["layers"]] == [0, 1]
    assert output["gap"] == output["kept"] - output["lower_bound"]
    assert certk("verify", tmp_path / "out", "--against", cache, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["holds"] is True
    assert said["outputs"][0]["tail_masses_confirmed"] == 24


def test_options_of_prune_reach_the_job(tmp_path: Path, capsys: Captured) -> None:
    cache = tmp_path / "x.safetensors"
    write_cache(cache, names="m.{i}.{role}")
    arguments = ["--granularity", "layer", "--max-keep", "7", "--keep-first", "1", "--keep-last"]
    pattern = "m.{i}.{key|value|query}"
    arguments += ["2", "--names", pattern, "--threads", "1", "--quiet", "--proof", "full"]
    assert certk("prune", cache, "-o", tmp_path / "out", "--eps", "1e-6", *arguments) == 0
    out, err = capsys.readouterr()
    assert "kept 14 of 48 keys" in out
    assert re.search(r"\ncertk: warning: .*: \d+ of 24 rows are over eps because of [^\n]+\n", err)
    verify = ["verify", tmp_path / "out", "--against", cache]
    assert certk(*verify) == 1  # whose names these are, only the caller can know
    capsys.readouterr()
    assert certk(*verify, "--names", pattern) == 0
    covered, verdict = capsys.readouterr().out.splitlines()
    assert covered.endswith(f"covers 6 of the 6 tensors of its input (names {pattern!r})")
    asked = "eps = 1e-06, granularity = layer, max_keep = 7, keep_first = 1, keep_last = 2"
    assert f"{asked}, " in verdict
    assert ": kept 14 of 48 keys, " in verdict
    assert re.search(r", \d+ of 24 rows over eps, worst tail mass 0\.\d+$", verdict)


@pytest.mark.parametrize(("text", "kept"), [("12", 48), ("0.5", 48), ("1", 4), ("1.0", 96)])
def test_max_keep_is_a_count_or_a_fraction(
    cache: Path, tmp_path: Path, text: str, kept: int, capsys: Captured
) -> None:
    out = tmp_path / "out"
    assert certk("prune", cache, "-o", out, "--eps", "0", "--max-keep", text, "--json") == 0
    assert json.loads(capsys.readouterr().out)["outputs"][0]["kept"] == kept


def test_directories_in_and_out(tmp_path: Path, capsys: Captured) -> None:
    for name in "ab":
        write_cache(tmp_path / "in" / f"{name}.safetensors", seed=ord(name))
    out = tmp_path / "new" / "out"
    assert certk("prune", tmp_path / "in", "-o", out, "--eps", "0.1") == 0
    outputs = [path.name for path in out.glob("*.safetensors")]
    assert sorted(outputs) == ["a.safetensors", "b.safetensors"]
    assert certk("verify", out, "--against", tmp_path / "in") == 0
    one = ("--against", tmp_path / "in" / "a.safetensors")
    assert certk("verify", out, *one) == 1
    assert "none of the files given with --against" in capsys.readouterr().out
    assert certk("verify", out, *one, "--against", tmp_path / "in" / "b.safetensors") == 0
    assert certk("verify", out / "a.safetensors", "--against", tmp_path / "in") == 1
    assert "is the input of no output here" in capsys.readouterr().out


def test_outputs_in_directories_within_are_verified(tmp_path: Path, capsys: Captured) -> None:
    for seed, name in enumerate(("a", "sub/a")):
        path = tmp_path / "in" / f"{name}.safetensors"
        path.parent.mkdir(parents=True)
        write_cache(path, seed=seed)
    out, against = tmp_path / "out", ("--against", tmp_path / "in")
    assert certk("prune", tmp_path / "in", "-r", "-o", out, "--eps", "0.1") == 0
    capsys.readouterr()
    assert certk("verify", out, "-r", *against, "--json") == 0
    outputs = json.loads(capsys.readouterr().out)["outputs"]
    assert {Path(each["output"]).relative_to(out).as_posix() for each in outputs} == {
        *("a.safetensors", "sub/a.safetensors")
    }
    assert all(each["holds"] and each["input"] for each in outputs)
    # Several jobs have outputs of one name.
    assert (
        certk("verify", out / "a.safetensors", out / "sub" / "a.safetensors", "-r", *against) == 0
    )
    assert certk("verify", out, (out / "a.safetensors").absolute().as_uri()) == 0


def test_verify_names_what_is_wrong_where(cache: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "out" / "x.safetensors"
    certk("prune", cache, "-o", out.parent, "--eps", "0.1")
    content = bytearray(out.read_bytes())
    content[-1] ^= 1
    out.write_bytes(content)
    capsys.readouterr()
    assert certk("verify", out) == 1
    text, errors = capsys.readouterr()
    assert f"{out}: layers.1.value: its bytes were changed" in text
    assert re.fullmatch(r"certk: failed: 1 of 1 outputs do not hold \(first: [^\n]+\)\n", errors)
    assert certk("verify", out, "--json") == 1
    text = capsys.readouterr().out
    [finding] = json.loads(text)["outputs"][0]["findings"]
    assert finding["where"] == "layers.1.value"


def test_a_consistent_forgery_needs_the_input(
    cache: Path, tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "out" / "x.safetensors"
    certk("prune", cache, "-o", out.parent, "--eps", "0.1", "--proof", "full")

    def halve(arrays: dict[str, np.ndarray]) -> None:
        for end in ("upper", "lower"):
            arrays[f"layers.0.tail_mass_{end}"] = arrays[f"layers.0.tail_mass_{end}"] / 2

    rewrite(out, halve)
    capsys.readouterr()
    assert certk("verify", out) == 0
    assert "not known without --against" in capsys.readouterr().out
    assert certk("verify", out, "--against", cache) == 1
    assert "layer 0, head 0, query 0: tail mass in" in capsys.readouterr().out


def test_many_findings_are_cut_short(cache: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "out" / "x.safetensors"
    certk("prune", cache, "-o", out.parent, "--eps", "0.1", "--proof", "full")
    rewrite(out, lambda arrays: None, eps={0: (1e-12, 1e-12), 1: (1e-12, 1e-12)})
    capsys.readouterr()
    assert certk("verify", out) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 22
    assert "and 4 more" in lines[-2]


def test_unreadable_paths(cache: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "out"
    certk("prune", cache, "-o", out, "--eps", "0.1")
    missing = tmp_path / "missing"
    assert "missing does not exist" in refused(capsys, "verify", missing)
    assert "missing does not exist" in refused(capsys, "verify", out, "--against", missing)
    assert "missing does not exist" in refused(capsys, "prune", missing, "-o", out, "--eps", ".1")
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    assert "too few" in refused(capsys, "verify", out, "--against", tmp_path / "bad.safetensors")
    assert certk("verify", tmp_path / "bad.safetensors") == 1  # an output that is not one
    (tmp_path / "empty").mkdir()
    for against in ((), ("--against", cache)):
        said = refused(capsys, "verify", tmp_path / "empty", *against)
        assert "there is no .safetensors file in" in said
    said = refused(capsys, "verify", out, "--against", tmp_path / "empty")
    assert "there is no .safetensors file in" in said


BAD_USAGE: list[tuple[list[str], str]] = [
    (["nonsense"], "nonsense"),
    (["prune"], "CACHE"),
    (["prune", "x.safetensors", "--eps", "0.1"], "--out|-o"),
    (["prune", "x.safetensors", "-o", "out"], "--eps"),
    (["prune", "x.safetensors", "-o", "out", "--eps", "much"], "--eps"),
    (["prune", "x.safetensors", "-o", "out", "--eps", "1"], "eps is 1"),
    (["prune", "x.safetensors", "-o", "out", "--eps", "nan"], "eps is nan"),
    (["prune", "x.safetensors", "-o", "out", "--eps", "0.1", "--granularity", "row"], "row"),
    (
        ["prune", "x.safetensors", "-o", "out", "--eps", "0.1", "--max-keep", "x"],
        "'--max-keep': 'x'",
    ),
    (["prune", "x.safetensors", "-o", "out", "--eps", "0.1", "--max-keep", "0"], "max_keep is 0"),
    (["prune", "x.safetensors", "-o", "out", "--eps", "0.1", "--max-keep", "2.5"], "max_keep is 2"),
    (["prune", "x.safetensors", "-o", "out", "--eps", "0.1", "--keep-first", "-1"], "keep-first"),
    (["prune", "x.safetensors", "-o", "out", "--eps", "0.1", "--threads", "0"], "threads"),
    (["prune", "x.safetensors", "-o", "out", "--eps", "0.1", "--names", "{i}"], "--names"),
    (["prune", "x.safetensors", "-o", "out", "--eps", "0.1", "--wrong"], "--wrong"),
    (["prune", "x.safetensors", "-o", "x.safetensors", "--eps", "0.1"], "is not a directory"),
    (["prune", "x.safetensors", "-o", "x.safetensors/sub", "--eps", "0.1"], "is not a directory"),
    (["prune", "x.safetensors", "-o", ".", "--eps", "0.1"], "is an input of this job"),
    (["verify"], "OUT"),
    (["select", "x.safetensors", "--eps", "0.1"], "is not a .npy or .npz file"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD_USAGE)
def test_usage_errors_are_one_line_and_create_nothing(
    cache: Path,
    arguments: list[str],
    words: str,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(cache.parent)
    assert re.search(words, refused(capsys, *arguments))
    assert names(cache.parent) == ["x.safetensors"]


def bad_caches() -> dict[str, tuple[bytes, str]]:
    good = safetensors_bytes(cache_tensors(), None)

    def cache_with(**changes: Any) -> bytes:
        return safetensors_bytes(cache_tensors() | changes.pop("tensors", {}), **changes)

    values = np.ones((1, 2, 24, 4))
    values[0, 1, 7, 2] = np.nan
    no_query = {k: v for k, v in cache_tensors().items() if k != "layers.1.query"}
    odd_heads = {"layers.0.query": tensor(np.ones((1, 3, 3, 4)), "F16")}
    return {
        "truncated": (good[:-5], "cut off"),
        "empty": (b"", "too few"),
        "foreign": (b"\x93NUMPY" + bytes(200), "header length"),
        "pickle": (b"\x80\x04}q\x00." + bytes(100), "header length"),
        "no queries": (safetensors_bytes(no_query, None), "layer 1 has no query tensor"),
        "odd heads": (cache_with(tensors=odd_heads, metadata=None), "not a multiple of"),
        "nan": (
            cache_with(tensors={"layers.1.key": tensor(values, "F16")}, metadata=None),
            r"'layers.1.key' is nan at \[0, 1, 7, 2\]",
        ),
        "scale": (cache_with(metadata={"scale": "big"}), "scale 'big'"),
        "offset": (cache_with(metadata={"causal_offset": "x"}), "causal_offset 'x'"),
    }


@pytest.mark.parametrize("case", bad_caches())
def test_bad_caches_are_one_line_and_create_nothing(
    tmp_path: Path, case: str, capsys: Captured
) -> None:
    content, words = bad_caches()[case]
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    line = refused(capsys, "prune", path, "-o", tmp_path / "out", "--eps", "0.1")
    assert re.search(words, line)
    assert str(path) in line
    assert names(tmp_path) == ["x.safetensors"]


def test_an_output_is_never_overwritten(cache: Path, tmp_path: Path, capsys: Captured) -> None:
    arguments = ("prune", cache, "-o", tmp_path / "out", "--eps", "0.1")
    assert certk(*arguments) == 0
    before = (tmp_path / "out" / "x.safetensors").read_bytes()
    assert "exists already" in refused(capsys, *arguments)
    assert (tmp_path / "out" / "x.safetensors").read_bytes() == before


def test_a_place_that_cannot_be_written_to(cache: Path, capsys: Captured) -> None:
    if os.access("/proc/self", os.W_OK) and Path("/proc/self").is_dir():
        refused(capsys, "prune", cache, "-o", "/proc/self/certk-out", "--eps", "0.1")
    folder = cache.parent / "locked"
    folder.mkdir(mode=0o500)
    if os.geteuid():  # root may write anywhere
        line = refused(capsys, "prune", cache, "-o", folder / "out", "--eps", "0.1")
        assert "cannot be written to" in line


def test_a_full_disk(tmp_path: Path) -> None:
    """The kernel refuses to let the file grow, in the middle of the data."""
    write_cache(tmp_path / "x.safetensors", n=2000, d=16)

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    arguments = ("prune", tmp_path / "x.safetensors", "-o", tmp_path / "out", "--eps", "0.01")
    done = in_a_process(*arguments, preexec_fn=limit)
    assert done.returncode == 2
    assert re.fullmatch(r"certk: error: .*out/x\.safetensors: File too large\n", done.stderr)
    left = [path for path in tmp_path.rglob("*") if path.suffix in (".safetensors", ".partial")]
    assert [path.name for path in left] == ["x.safetensors"]


def test_a_disk_that_is_full_from_the_start(tmp_path: Path) -> None:
    write_cache(tmp_path / "x.safetensors")

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    arguments = ("prune", tmp_path / "x.safetensors", "-o", tmp_path / "out", "--eps", "0.1")
    done = in_a_process(*arguments, preexec_fn=limit)
    assert done.returncode == 2
    assert re.fullmatch(r"certk: error: .*out/\S+: File too large\n", done.stderr)
    assert names(tmp_path) == ["x.safetensors"]


@pytest.mark.parametrize("kind", ["SIGINT", "SIGTERM"])
def test_an_interrupted_job_ends_soon_and_leaves_no_output(tmp_path: Path, kind: str) -> None:
    write_cache(tmp_path / "x.safetensors", layers=8, m=64, n=2048, d=64)
    job = ["prune", tmp_path / "x.safetensors", "-o", tmp_path / "out", "--eps", "0.001"]
    job += ["--jobs", 2, "--unit", "layer"]
    ended = certk_signalled(
        job, "certk_rs._jobs.steps:run_unit", tmp_path / "calls", at=2, kind=getattr(signal, kind)
    )
    assert ended.out == ""
    if kind == "SIGINT":
        assert ended.code == 130
        assert ended.err.startswith("certk: interrupted: 0 of 1 files are finished; ")
        assert ended.err.count("\n") == 1
    else:
        assert (ended.code, ended.err) == (128 + signal.SIGTERM, "certk: terminated\n")
    # Of eight layers: no thread begins another one than it was about to.
    assert ended.calls <= 3
    left = [path for path in tmp_path.rglob("*") if path.suffix in (".safetensors", ".partial")]
    assert [path.name for path in left] == ["x.safetensors"]


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_closed_streams_are_no_fault(cache: Path, tmp_path: Path, closed: str) -> None:
    prune = [sys.executable, "-m", "certk_rs", "prune", str(cache), "-o", str(tmp_path / "out")]
    done = subprocess.run(
        ["sh", "-c", f'"$@" {closed}', "sh", *prune, "--eps", "0.1"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "unexpected" not in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 0
    assert certk("verify", tmp_path / "out", "--against", cache) == 0


def test_a_closed_pipe_is_silent(cache: Path, tmp_path: Path) -> None:
    certk("prune", cache, "-o", tmp_path / "out", "--eps", "0.1")
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "certk_rs", "verify", str(tmp_path / "out")]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(write)
    assert done.stderr == b""
    assert done.returncode == 2


def test_a_full_stdout_is_an_error(cache: Path, tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    certk("prune", cache, "-o", tmp_path / "out", "--eps", "0.1")
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "certk_rs", "verify", str(tmp_path / "out")]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "certk: error: No space left on device\n"


def test_an_unexpected_error_is_one_line(
    cache: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("certk_rs._jobs.prune.make_plan", broken)
    line = refused(capsys, "prune", cache, "-o", tmp_path / "out", "--eps", "0.1")
    assert "unexpected RuntimeError: two lines" in line


def test_too_little_memory_is_one_line(
    cache: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_much(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("certk_rs._jobs.prune.make_plan", too_much)
    line = refused(capsys, "prune", cache, "-o", tmp_path / "out", "--eps", "0.1")
    assert "not enough memory" in line


def test_version_and_help(capsys: Captured) -> None:
    assert certk("--version") == 0
    assert capsys.readouterr().out == f"certk {ck.__version__}\n"
    assert certk("--help") == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("select", "prune", "verify", "demo"))
    for command in ("select", "prune", "verify", "demo"):
        assert certk(command, "--help") == 0
        assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["root", "inside", "outside"])
def test_demo(
    tmp_path: Path, place: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir({"root": ROOT, "inside": ROOT / "tests", "outside": tmp_path}[place])
    arguments = ["--data", str(EXAMPLE)] if place == "outside" else []
    assert certk("demo", *arguments) == 0
    text, errors = capsys.readouterr()
    assert re.search(r"5 +\d+ / 2048 +\d+\.\d % +\d+ +\d+ +0\.0\d+", text)
    assert "layer 5 head 0" in text
    assert "holds: 768 tail masses and 24 lower bounds recomputed" in text
    assert errors == ""
    assert names(tmp_path) == []


def test_demo_keeps_its_output_and_speaks_json(tmp_path: Path, capsys: Captured) -> None:
    assert certk("demo", "--data", EXAMPLE, "-o", tmp_path / "kept", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["verify"]["holds"] is True
    assert len(said["layers"]) == 6
    assert certk("verify", tmp_path / "kept", "--against", EXAMPLE) == 0


def test_demo_without_its_example(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("certk_rs._cli.example.__file__", str(tmp_path / "example.py"))
    assert "--data FILE" in refused(capsys, "demo")


def test_demo_in_plain_ascii() -> None:
    done = in_a_process(
        "demo", "--data", EXAMPLE, env=os.environ | {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    )
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert "####" in done.stdout


@pytest.fixture
def scores(tmp_path: Path) -> Path:
    rng = np.random.default_rng(3)
    np.save(tmp_path / "scores.npy", rng.standard_normal((2, 5, 40)).astype(np.float32) * 3)
    return tmp_path / "scores.npy"


def test_select(scores: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "keep.npz"
    assert certk("select", scores, "--eps", "0.01", "-o", out) == 0
    text, errors = capsys.readouterr()
    assert "Selection of 10 rows" in text
    assert errors == ""
    loaded = ck.Selection.load(out)
    expected = ck.select(np.load(scores), 0.01)
    np.testing.assert_array_equal(loaded.indices, expected.indices)
    np.testing.assert_array_equal(loaded.tail_mass_upper, expected.tail_mass_upper)
    assert "exists already" in refused(capsys, "select", scores, "--eps", "0.01", "-o", out)


def test_options_of_select_reach_it(scores: Path, tmp_path: Path, capsys: Captured) -> None:
    array = np.load(scores)
    mask = np.random.default_rng(0).random(array.shape) < 0.9
    lengths = np.full((2, 5), 35)
    np.savez(tmp_path / "all.npz", a=array, mask=mask)
    np.save(tmp_path / "mask.npy", mask)
    np.save(tmp_path / "lengths.npy", lengths)
    arguments = ["--array", "a", "--scale", "0.5", "--mask", tmp_path / "mask.npy", "--lengths"]
    arguments += [tmp_path / "lengths.npy", "--causal-offset", "20", "--min-keep", "2"]
    arguments += ["--max-keep", "0.5", "--keep-first", "1", "--keep-last", "1", "--kind"]
    arguments += ["logprobs", "--threads", "1", "--prove-minimal", "--json"]
    out = tmp_path / "k.npz"
    assert certk("select", tmp_path / "all.npz", "--eps", "1e-3", "-o", out, *arguments) == 0
    text, errors = capsys.readouterr()
    said = json.loads(text)
    expected = ck.select(
        array,
        1e-3,
        kind="logprobs",
        scale=0.5,
        mask=mask,
        lengths=lengths,
        causal_offset=20,
        min_keep=2,
        max_keep=0.5,
        keep_first=1,
        keep_last=1,
        prove_minimal=True,
    )
    np.testing.assert_array_equal(ck.Selection.load(out).indices, expected.indices)
    assert said["kept"] == expected.indices.size
    assert said["rows_over_budget"] == int((expected.status == ck.Status.OVER_BUDGET).sum()) > 0
    assert re.fullmatch(r"certk: warning: \d+ of 10 rows are over eps [^\n]+\n", errors)


def test_select_of_ragged_rows(tmp_path: Path, capsys: Captured) -> None:
    np.save(tmp_path / "flat.npy", np.linspace(0, 5, 12))
    np.save(tmp_path / "indptr.npy", np.array([0, 3, 12]))
    arguments = ("--eps", "0.1", "--indptr", tmp_path / "indptr.npy", "--json")
    assert certk("select", tmp_path / "flat.npy", *arguments) == 0
    assert json.loads(capsys.readouterr().out)["shape"] == [2, None]


def bad_scores(case: str, path: Path) -> str:
    good = np.zeros((3, 4), np.float32)
    if case == "truncated":
        np.save(path, good)
        path.write_bytes(path.read_bytes()[:-3])
        return "cannot be read"
    if case == "pickle":
        np.save(path, np.array([{}], object), allow_pickle=True)
        return "cannot be read"
    if case == "several":
        with path.open("wb") as file:
            np.savez(file, a=good, b=good)
        return "holds the arrays a, b: name one with --array"
    if case == "damaged zip":
        path.write_bytes(b"PK\x03\x04" + bytes(50))
        return "cannot be read"
    if case == "foreign":
        path.write_bytes(b"hello, world")
        return "is not a .npy or .npz file"
    array = {
        "nan": np.where(np.arange(12).reshape(3, 4) == 6, np.nan, 0.0),
        "inf": np.where(np.arange(12).reshape(3, 4) == 6, np.inf, 0.0),
        "ints": np.zeros((3, 4), int),
        "complex": np.zeros((3, 4), complex),
        "longdouble": np.zeros((3, 4), np.longdouble),
    }[case]
    np.save(path, array)
    return r"1, 2" if case in ("nan", "inf") else "scores"


@pytest.mark.parametrize(
    "case",
    [
        "truncated",
        "pickle",
        "several",
        "damaged zip",
        "foreign",
        "nan",
        "inf",
        "ints",
        "complex",
        "longdouble",
    ],
)
def test_bad_scores_are_one_line_and_create_nothing(
    tmp_path: Path, case: str, capsys: Captured
) -> None:
    words = bad_scores(case, tmp_path / "s.npy")
    line = refused(capsys, "select", tmp_path / "s.npy", "--eps", "0.1", "-o", tmp_path / "k.npz")
    assert re.search(words, line)
    assert names(tmp_path) == ["s.npy"]


def test_places_that_select_cannot_write_to(scores: Path, tmp_path: Path, capsys: Captured) -> None:
    arguments = ("select", scores, "--eps", "0.1", "-o")
    assert "no directory" in refused(capsys, *arguments, tmp_path / "none" / "k.npz")
    assert "no directory" in refused(capsys, *arguments, scores / "k.npz")
    assert "exists already" in refused(capsys, *arguments, tmp_path)
    assert names(tmp_path) == ["scores.npy"]


def test_the_console_script_is_this(cache: Path, tmp_path: Path) -> None:
    script = shutil.which("certk", path=str(Path(sys.executable).parent))
    if script is None:
        pytest.skip("the package is not installed")
    arguments = ["prune", str(cache), "-o", str(tmp_path / "out"), "--eps", "0.1"]
    assert subprocess.run([script, *arguments], capture_output=True, timeout=60).returncode == 0
