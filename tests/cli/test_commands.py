"""The commands that prune, verify, demonstrate, select and plan: results, files and exit codes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import certk_rs as ck
from certk_rs import gaussian
from cli_fixtures import answered, certk, forge, said, write_cache
from repository import EXAMPLE, ROOT


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    path = tmp_path / "x.safetensors"
    write_cache(path)
    return path


@pytest.fixture
def scores(tmp_path: Path) -> Path:
    rng = np.random.default_rng(3)
    np.save(tmp_path / "scores.npy", rng.standard_normal((2, 5, 40)).astype(np.float32) * 3)
    return tmp_path / "scores.npy"


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


# ------------------------------------------------------------------------------ prune and verify


def test_prune_then_verify(cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = said("prune", cache, "-o", out, "--eps", "0.1", "--proof", "full")
    assert done.code == 0
    assert re.search(r"out/x.safetensors: kept \d+ of 96 keys", done.out)
    assert "is larger" in done.err  # the proof of so small a cache
    assert "not known without --against: whether" in said("verify", out).out
    known = said("verify", out, "--against", cache)
    assert known.code == 0
    assert "holds: 24 tail masses and 4 lower bounds recomputed" in known.out
    assert [name for name in names(out) if not name.startswith(".certk")] == ["x.safetensors"]
    assert [o["holds"] for o in answered("verify", out, "--against", cache)["outputs"]] == [True]


def test_a_mass_that_is_shown_is_rounded_up(cache: Path, tmp_path: Path) -> None:
    assert certk("prune", cache, "-o", tmp_path / "out", "--eps", "0.1", "--proof", "full") == 0

    def edit(arrays: dict[str, np.ndarray]) -> None:
        for i in range(2):
            # As F32 a little more than 0.05.
            arrays[f"layers.{i}.tail_mass_upper"][:] = 0.05
            arrays[f"layers.{i}.tail_mass_lower"][:] = 0.0

    forge(tmp_path / "out" / cache.name, edit)
    assert said("verify", tmp_path / "out").out.endswith("worst tail mass 0.0500001\n")


def test_prune_as_json(cache: Path, tmp_path: Path) -> None:
    body = answered("prune", cache, "-o", tmp_path / "out", "--eps", "0.1")
    [output] = body["outputs"]
    assert (body["command"], body["eps"]) == ("prune", 0.1)
    assert (output["input"], output["total"]) == (str(cache), 96)
    assert [layer["layer"] for layer in output["layers"]] == [0, 1]
    assert output["gap"] == output["kept"] - output["lower_bound"]


def test_options_of_prune_reach_the_job(tmp_path: Path) -> None:
    cache, pattern = tmp_path / "x.safetensors", "m.{i}.{key|value|query}"
    write_cache(cache, names="m.{i}.{role}")
    arguments = ["--granularity", "layer", "--max-keep", "7", "--keep-first", "1", "--keep-last"]
    arguments += ["2", "--names", pattern, "--threads", "1", "--quiet", "--proof", "full"]
    done = said("prune", cache, "-o", tmp_path / "out", "--eps", "1e-6", *arguments)
    assert done.code == 0
    assert "kept 14 of 48 keys" in done.out
    warning = r"\ncertk: warning: .*: \d+ of 24 rows are over eps because of [^\n]+\n"
    assert re.search(warning, done.err)
    verify = ["verify", tmp_path / "out", "--against", cache]
    assert certk(*verify) == 1  # whose names these are, only the caller can know
    covered, verdict = said(*verify, "--names", pattern).out.splitlines()
    assert covered.endswith(f"covers 6 of the 6 tensors of its input (names {pattern!r})")
    asked = "eps = 1e-06, granularity = layer, max_keep = 7, keep_first = 1, keep_last = 2"
    assert f"{asked}, " in verdict
    assert ": kept 14 of 48 keys, " in verdict
    assert re.search(r", \d+ of 24 rows over eps, worst tail mass 0\.\d+$", verdict)


@pytest.mark.parametrize(("text", "kept"), [("12", 48), ("0.5", 48), ("1", 4), ("1.0", 96)])
def test_max_keep_is_a_count_or_a_fraction(
    cache: Path, tmp_path: Path, text: str, kept: int
) -> None:
    body = answered("prune", cache, "-o", tmp_path / "o", "--eps", "0", "--max-keep", text)
    assert body["outputs"][0]["kept"] == kept


def test_directories_in_and_out(tmp_path: Path) -> None:
    for seed, name in enumerate(("a", "b", "sub/a")):
        write_cache(tmp_path / "in" / f"{name}.safetensors", seed=seed)
    out, inputs = tmp_path / "new" / "out", tmp_path / "in"
    assert certk("prune", inputs, "-r", "-o", out, "--eps", "0.1") == 0
    body = answered("verify", out, "-r", "--against", inputs)
    found = {Path(each["output"]).relative_to(out).as_posix() for each in body["outputs"]}
    assert found == {"a.safetensors", "b.safetensors", "sub/a.safetensors"}
    assert all(each["holds"] and each["input"] for each in body["outputs"])
    # Several jobs have outputs of one name.
    some = (out / "a.safetensors", out / "sub" / "a.safetensors")
    assert certk("verify", *some, "-r", "--against", inputs / "a.safetensors", "--against",
                 inputs / "sub" / "a.safetensors") == 0  # fmt: skip
    assert certk("verify", out, (out / "a.safetensors").absolute().as_uri()) == 0
    lacking = said("verify", out, "--against", inputs / "a.safetensors")
    assert lacking.code == 1
    assert "none of the files given with --against" in lacking.out
    beyond = said("verify", out / "a.safetensors", "--against", inputs)
    assert beyond.code == 1
    assert "is the input of no output here" in beyond.out


def test_verify_names_the_tensor_that_is_wrong(cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "x.safetensors"
    certk("prune", cache, "-o", out.parent, "--eps", "0.1")
    content = bytearray(out.read_bytes())
    content[-1] ^= 1
    out.write_bytes(content)
    found = said("verify", out)
    assert found.code == 1
    assert f"{out}: layers.1.value: its bytes were changed" in found.out
    assert re.fullmatch(r"certk: failed: 1 of 1 outputs do not hold \(first: [^\n]+\)\n", found.err)
    body = answered("verify", out, code=1)
    [finding] = body["outputs"][0]["findings"]
    assert finding["where"] == "layers.1.value"
    assert (body["schema"], body["holds"]) == (1, False)
    assert (body["error"]["kind"], body["error"]["exit_code"]) == ("does-not-hold", 1)
    assert body["error"]["message"].startswith("1 of 1 outputs do not hold")
    assert body["error"]["message"] in found.err
    out.write_bytes(b"no")  # an output that is none
    assert certk("verify", out) == 1


def test_a_consistent_forgery_needs_the_input(cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "x.safetensors"
    certk("prune", cache, "-o", out.parent, "--eps", "0.1", "--proof", "full")

    def halve(arrays: dict[str, np.ndarray]) -> None:
        for end in ("upper", "lower"):
            arrays[f"layers.0.tail_mass_{end}"] = arrays[f"layers.0.tail_mass_{end}"] / 2

    forge(out, halve)
    alone, known = said("verify", out), said("verify", out, "--against", cache)
    assert (alone.code, known.code) == (0, 1)
    assert "not known without --against" in alone.out
    assert "layer 0, head 0, query 0: tail mass in" in known.out
    # Many findings are cut short.
    forge(out, say=lambda body: body.update(eps={"0": [1e-12] * 2, "1": [1e-12] * 2}))
    lines = said("verify", out).out.splitlines()
    assert len(lines) == 22
    assert "and 4 more" in lines[-2]


def test_a_dry_run_writes_nothing(cache: Path, tmp_path: Path) -> None:
    arguments = ("prune", tmp_path, "-o", tmp_path / "out", "--eps", "0.1")
    assert certk(*arguments) == 0
    before = names(tmp_path)
    body = answered(*arguments, "--dry-run")  # also where outputs exist
    assert [Path(each["source"]) for each in body["outputs"]] == [cache]
    assert (body["dry_run"], body["failures"]) == (True, [])
    found = said(*arguments, "--dry-run")
    assert found.out.startswith(f"{cache}: keys and values of 0.001536 MB, about ")
    assert found.out.endswith("Nothing was written.\n")
    assert names(tmp_path) == before
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    found = said(*arguments, "--dry-run")
    assert found.code == 1
    assert "bad.safetensors" in found.err


def test_a_place_that_cannot_be_written_to(cache: Path) -> None:
    if Path("/proc/self").is_dir():
        assert certk("prune", cache, "-o", "/proc/self/certk-out", "--eps", "0.1") == 2
    folder = cache.parent / "locked"
    folder.mkdir(mode=0o500)
    if folder.stat().st_uid:  # root may write anywhere
        found = said("prune", cache, "-o", folder / "out", "--eps", "0.1")
        assert found.code == 2
        assert "cannot be written to" in found.err


# ------------------------------------------------------------------------------ demo


@pytest.mark.parametrize("place", ["root", "inside", "outside"])
def test_demo(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir({"root": ROOT, "inside": ROOT / "tests", "outside": tmp_path}[place])
    arguments = ["--data", EXAMPLE] if place == "inside" else []
    code, text, errors = said("demo", *arguments)
    assert (code, errors) == (0, "")
    assert re.search(r"5 +\d+ / 2048 +\d+\.\d % +\d+ +\d+ +0\.0\d+", text)
    assert "layer 5 head 0" in text
    assert "holds: 768 tail masses and 24 lower bounds recomputed" in text
    assert names(tmp_path) == []


def test_demo_keeps_its_output_and_speaks_json(tmp_path: Path) -> None:
    body = answered("demo", "--data", EXAMPLE, "-o", tmp_path / "kept")
    assert body["verify"]["holds"] is True
    assert len(body["layers"]) == 6
    assert certk("verify", tmp_path / "kept", "--against", EXAMPLE) == 0


def test_demo_without_its_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("certk_rs._cli.demo.__file__", str(tmp_path / "demo.py"))
    found = said("demo")
    assert found.code == 2
    assert "--data FILE" in found.err


# ------------------------------------------------------------------------------ select and plan


def test_select(scores: Path, tmp_path: Path) -> None:
    for name in ("keep.npz", "X.NPZ"):
        out = tmp_path / name
        code, text, errors = said("select", scores, "--eps", "0.01", "-o", out)
        assert (code, errors) == (0, "")
        assert "Selection of 10 rows" in text
        loaded, expected = ck.Selection.load(out), ck.select(np.load(scores), 0.01)
        np.testing.assert_array_equal(loaded.indices, expected.indices)
        np.testing.assert_array_equal(loaded.tail_mass_upper, expected.tail_mass_upper)
    assert "exists already" in said("select", scores, "--eps", "0.01", "-o", out).err


def test_options_of_select_reach_it(scores: Path, tmp_path: Path) -> None:
    array = np.load(scores)
    mask = np.random.default_rng(0).random(array.shape) < 0.9
    lengths = np.full((2, 5), 35)
    np.savez(tmp_path / "all.npz", a=array, mask=mask)
    np.save(tmp_path / "mask.npy", mask)
    np.save(tmp_path / "lengths.npy", lengths)
    options = {"kind": "logprobs", "scale": 0.5, "causal_offset": 20, "min_keep": 2}
    options |= {"max_keep": 0.5, "keep_first": 1, "keep_last": 1, "threads": 1}
    words = [w for name, v in options.items() for w in (f"--{name.replace('_', '-')}", v)]
    words += ["--array", "a", "--mask", tmp_path / "mask.npy"]
    words += ["--lengths", tmp_path / "lengths.npy", "--prove-minimal", "--json"]
    out = tmp_path / "k.npz"
    found = said("select", tmp_path / "all.npz", "--eps", "1e-3", "-o", out, *words)
    expected = ck.select(array, 1e-3, mask=mask, lengths=lengths, prove_minimal=True, **options)
    np.testing.assert_array_equal(ck.Selection.load(out).indices, expected.indices)
    over = int((expected.status == ck.Status.OVER_BUDGET).sum())
    assert over > 0
    assert f'"kept": {expected.indices.size}, ' in found.out
    assert f'"rows_over_budget": {over}, ' in found.out
    assert re.fullmatch(rf"certk: warning: {over} of 10 rows are over eps [^\n]+\n", found.err)
    blocks = answered("select", scores, "--eps", "0.1", "--block-size", "8")["kept"]
    assert blocks == ck.select(array, 0.1, block_size=8).indices.size


def test_select_of_ragged_rows(tmp_path: Path) -> None:
    np.save(tmp_path / "flat.npy", np.linspace(0, 5, 12))
    np.save(tmp_path / "indptr.npy", np.array([0, 3, 12]))
    more = ("--eps", "0.1", "--indptr", tmp_path / "indptr.npy")
    assert answered("select", tmp_path / "flat.npy", *more)["shape"] == [2, None]


PLAN = ("plan", "--n", 4096, "--sigma", 3, "--eps", 0.01)


def test_plan_as_json_has_every_figure() -> None:
    body = answered(*PLAN, "--seed", 5, "--threads", 1)
    want = gaussian.plan(4096, 3.0, 0.01, seed=5)
    assert (body.pop("command"), body.pop("schema")) == ("plan", 1)
    assert {"n", "k", "asymptotic_k", "frozen", "speedup", "worthwhile"} <= body.keys()
    assert body == {name: getattr(want, name) for name in body}


@pytest.mark.parametrize(
    ("n", "sigma", "words"),
    [
        (4096, 3, "n = 4096, sigma = 3, eps = 0.01"),
        (4096, 3, "Advice: prune."),
        (128, 5, "Frozen: sigma is past sqrt(2 ln n) = 3.115"),
        (4096, 0.5, "Advice: leave dense."),
        (1, 0.5, "exact"),
    ],
)
def test_plan_as_text(n: int, sigma: float, words: str) -> None:
    code, out, err = said("plan", "--n", n, "--sigma", sigma, "--eps", 0.01)
    want = gaussian.plan(n, sigma, 0.01)
    assert (code, err) == (0, "")
    assert all(text in out for text in (words, f"{want.k:.6g}", f"{want.asymptotic_k:.6g}"))
    assert ("Frozen" in out) == want.frozen
