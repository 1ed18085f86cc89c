"""`certk gate`: thresholds at the recorded numbers and just below, and all that must not pass."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import certk_rs as ck
from certk_rs._jobs.report import job_report
from cli_fixtures import answered, certk, forge, said, write_cache
from repository import EXAMPLE

JOBS: dict[str, dict[str, Any]] = {
    "full": {"eps": 0.05, "proof": "full"},
    "compact": {"eps": 0.05, "proof": "compact"},
    "none": {"eps": 0.05, "proof": "none"},
    "bounded": {"out_tol": 0.1},
    "capped": {"eps": 0.05, "max_keep": 10, "proof": "full"},
    "uncounted": {"eps": 0.05, "max_keep": 10, "proof": "compact"},
    "covered": {"eps": 0.05, "coverage": 0.8, "proof": "full"},
    "covered-compact": {"eps": 0.05, "coverage": 0.8, "proof": "compact"},
    "codes": {"eps": 0.05, "rest": "codes"},
    "layers": {"eps": 0.05, "granularity": "layer"},
}


@pytest.fixture(scope="module")
def outs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gate")
    for name, options in JOBS.items():
        ck.prune(EXAMPLE, folder / name, **options)
    return folder


def output(outs: Path, name: str) -> Path:
    return outs / name / EXAMPLE.name


def call(**changes: Any) -> dict[str, Any]:
    """A record as `Recorder.to_jsonl` writes it."""
    told = {"call": 0, "layer": 0, "name": "Attention", "rows": 4, "n": 8, "kept": 0.5}
    told |= {"scored": 0.5, "tail_mass_upper": 0.01, "budget": 0.02, "kind": "eps"}
    told |= {"error_bound": 0.25, "holds": True} | changes
    return {name: value for name, value in told.items() if value != "absent"}


def recorded(path: Path, *calls: dict[str, Any]) -> Path:
    path.write_text("".join(f"{json.dumps(each)}\n" for each in calls))
    return path


# ------------------------------------------------------------------------------ outputs


@pytest.mark.parametrize("name", ["full", "compact", "codes", "layers", "capped", "covered"])
def test_a_threshold_decides_at_the_recorded_number(outs: Path, name: str) -> None:
    total = job_report([str(outs / name)])["totals"]
    rows = total["rows"] + total["rows_left_out"]
    unproven = (total["rows_over_budget"] + total["rows_left_out"]) / rows
    assert (unproven > 0) == (name in ("capped", "covered"))
    found = {"tv": total["worst_tail_mass"], "keys": total["kept_share"], "unproven": unproven}
    for threshold, number in found.items():
        for limit in (number, math.nextafter(number, 1)):
            limits = {"unproven": 1.0} | {threshold: limit}
            assert ck.gate(outs / name, **limits).passes, limits
        if number:
            limits = {"unproven": 1.0} | {threshold: math.nextafter(number, 0)}
            [file] = ck.gate(outs / name, **limits).failed
            [broken] = [check for check in file.checks if not check.passes]
            assert (broken.name, broken.value) == (threshold, number)
            # What is shown is a number that is above the threshold.
            shown, limit = re.findall(r"([\d.e-]+) > ([\d.e-]+)$", str(file))[0]
            assert float(shown) > float(limit) == limits[threshold]


def test_the_masses_are_those_of_the_file(outs: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    tensors = safetensors.load_file(output(outs, "full"))
    worst = max(float(a.max()) for name, a in tensors.items() if name.endswith("mass_upper"))
    [file] = ck.gate(output(outs, "full"), tv=worst).files
    assert file.checks[0].value == worst
    assert 0.04 < worst <= 0.05


def test_rows_without_a_promise_are_unproven(outs: Path) -> None:
    left_out = job_report([str(outs / "covered")])["totals"]["rows_left_out"] / 768
    assert left_out > 0
    for name in ("covered", "covered-compact"):
        assert not ck.gate(outs / name, tv=0.05).passes
        assert ck.gate(outs / name, tv=0.05, unproven=left_out).passes
        assert not ck.gate(outs / name, tv=0.05, unproven=math.nextafter(left_out, 0)).passes


def test_the_error_is_what_budgets_were_made_for(outs: Path) -> None:
    assert certk("gate", outs / "bounded", "--error", 0.1) == 0
    found = said("gate", outs / "bounded", "--error", 0.0999999)
    assert (found.code, found.out.partition(": ")[2]) == (1, "output error 0.1 > 0.0999999\n")
    # A row over its budget may be off by more.
    capped = ck.prune(EXAMPLE, outs / "loose", out_tol=0.1, max_keep=10, proof="full")
    assert not capped.failures
    assert "output error is not proven" in said("gate", outs / "loose", "--error", 1).out


@pytest.mark.parametrize(
    ("name", "threshold", "remedy"),
    [
        ("none", "tv", "tail mass is not recorded: prune with --proof full"),
        ("none", "keys", "unproven share is not recorded: prune with --proof full"),
        ("uncounted", "unproven", "rows are over budget: prune with --proof full"),
        ("full", "error", "output error is not recorded: prune with --out-tol"),
    ],
)
def test_a_number_that_is_not_there_does_not_pass(
    outs: Path, name: str, threshold: str, remedy: str
) -> None:
    code, shown, errors = said("gate", outs / name, f"--{threshold}", "1.0")
    assert (code, shown.count("\n")) == (1, 1)
    assert shown.startswith("FAIL ")
    assert remedy in shown
    assert remedy in errors
    body = answered("gate", outs / name, f"--{threshold}", "1.0", code=1)
    missing = [check for check in body["files"][0]["checks"] if check["value"] is None]
    assert any(check["missing"] in shown for check in missing)
    assert body["error"]["kind"] == "does-not-hold"


# ------------------------------------------------------------------------------ damage


def test_any_changed_byte_fails(outs: Path, tmp_path: Path) -> None:
    whole, path = output(outs, "full").read_bytes(), tmp_path / "x.safetensors"
    header = 8 + int.from_bytes(whole[:8], "little")
    for at in (8, 200, header - 40, header, (header + len(whole)) // 2, len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        code, shown, _ = said("gate", path, "--tv", 1)
        assert code == 1, at
        assert shown.startswith(f"FAIL {path}: does not hold: "), at
    for cut in (0, 7, header - 1, header, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert certk("gate", path, "--tv", 1) == 1, cut


def test_a_forged_mass_that_is_none_fails(outs: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for value in (math.nan, -1.0):
        shutil.copy(output(outs, "full"), path)

        def edit(arrays: dict[str, np.ndarray], value: float = value) -> None:
            arrays["layers.0.tail_mass_upper"][0, 0] = value

        forge(path, edit)
        assert "does not hold" in said("gate", path, "--tv", 1).out


def test_files_of_another_kind_fail(outs: Path, tmp_path: Path) -> None:
    assert "not an output of certk prune" in said("gate", EXAMPLE, "--tv", 1).out
    for content in (b"", b"text", b"\x93NUMPY", b"{", b'{"a": 1}\n', b"{\xff}", b"[1]\n", b"\n"):
        for name in ("x.safetensors", "x.jsonl"):
            (tmp_path / name).write_bytes(content)
            found = said("gate", tmp_path / name, "--tv", 1)
            assert (found.code, found.out[:5]) == (1, "FAIL "), (name, content)
            assert found.out.count("\n") == found.err.count("\n") == 1


def test_a_file_that_the_system_refuses_is_an_error(
    outs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error", "x")

    (tmp_path / "link.safetensors").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop.safetensors").symlink_to(tmp_path / "loop.safetensors")
    for name, words in (("link", "No such file"), ("loop", "Too many levels")):
        body = answered("gate", tmp_path / f"{name}.safetensors", "--tv", 1, code=2)
        assert words in body["files"][0]["error"]
        assert body["error"]["kind"] == "io"
    monkeypatch.setattr("certk_rs._files.tensor_file.SafetensorsFile.chunks", refuse)
    assert said("gate", outs / "full", "--tv", 1).code == 2


# ------------------------------------------------------------------------------ many


def test_one_bad_file_does_not_end_the_others(
    outs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "all"
    for name in ("a", "b", "deep/c", "deep/d"):
        path = folder / f"{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(output(outs, "full"), path)
    code, shown, errors = said("gate", folder, "--tv", 0.05)
    assert (code, errors) == (0, "")
    assert re.fullmatch(r"4 of 4 files pass: tail mass 0.0499993 <= 0.05; .* 0 <= 0\n", shown)
    (folder / "a.safetensors").write_bytes(b"no")
    shutil.copy(output(outs, "capped"), folder / "deep" / "c.safetensors")
    code, shown, errors = said("gate", folder, "--tv", 0.05)
    assert code == 1
    assert [line.split(":")[0] for line in shown.splitlines()] == [
        f"FAIL {folder}/a.safetensors",
        f"FAIL {folder}/deep/c.safetensors",
    ]
    assert errors.startswith(f"certk: failed: 2 of 4 files fail (first: {folder}/a.safetensors: ")
    files = answered("gate", folder, "--tv", 0.05, code=1)["files"]
    assert [each["passes"] for each in files] == [False, True, False, True]
    # Patterns and lists take what is below directories, too, and all that have one name.
    assert len(ck.gate(f"{tmp_path}/al*", tv=1.0).files) == 4
    (tmp_path / "one").mkdir()
    shutil.copy(output(outs, "full"), tmp_path / "one" / "a.safetensors")
    listed = io.BytesIO(f"{folder}\n{tmp_path}/one/a.safetensors\n".encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(listed))
    assert "2 of 5 files fail" in said("gate", "-", "--tv", 0.05).err
    # A file that is given twice is judged once.
    assert len(ck.gate([folder, folder / "b.safetensors"], tv=1.0).files) == 4


def test_an_input_without_an_output_fails(tmp_path: Path) -> None:
    write_cache(tmp_path / "in" / "good.safetensors")
    (tmp_path / "in" / "bad.safetensors").write_bytes(b"no cache" * 9)
    assert certk("prune", tmp_path / "in", "-o", tmp_path / "out", "--eps", 0.1, "-q") == 1
    found = said("gate", tmp_path / "out", "--tv", 0.1)
    assert found.code == 1
    assert re.search(r"^FAIL .*/out/bad.safetensors: .* there is no such output", found.out)
    assert "1 of 2 files fail" in found.err
    # Asked for by its name, the good one is all that counts.
    assert certk("gate", tmp_path / "out" / "good.safetensors", "--tv", 0.1) == 0
    job = tmp_path / "out" / ".certk" / "job.json"
    told = job.read_text()
    job.write_text(told[:-9])
    assert "record of the job cannot be read" in said("gate", tmp_path / "out", "--tv", 0.1).out
    job.write_text(told)
    (tmp_path / "out" / "good.safetensors").unlink()
    assert "2 of 2 files fail" in said("gate", tmp_path / "out", "--tv", 0.1).err


# ------------------------------------------------------------------------------ records


def test_a_record_is_judged_by_its_worst_call(tmp_path: Path) -> None:
    calls = [call(), call(layer=1, tail_mass_upper=0.015, rows=12, kept=0.25, error_bound=0.5)]
    path = recorded(tmp_path / "run.jsonl", *calls)
    for limits, passes in (
        ({"tv": 0.015}, True),
        ({"tv": math.nextafter(0.015, 0)}, False),
        ({"error": 0.5}, True),
        ({"error": math.nextafter(0.5, 0)}, False),
        ({"keys": 0.3125}, True),
        ({"keys": math.nextafter(0.3125, 0)}, False),
        ({"unproven": 0}, True),
    ):
        assert ck.gate(path, **limits).passes == passes, limits
    [file] = ck.gate(path, tv=1).files
    assert file.kind == "record"
    for changes in (
        {"tail_mass_upper": 0.03, "holds": False},
        {"tail_mass_upper": 0.03},  # a record that contradicts itself
        {"kind": "out_tol"},
        {"kind": "out_tol", "error_bound": None},
    ):
        recorded(path, call(), call(**changes))
        assert not ck.gate(path, tv=1).passes
        assert not ck.gate(path, unproven=math.nextafter(0.5, 0)).passes
        assert ck.gate(path, unproven=0.5).passes


@pytest.mark.parametrize(
    ("calls", "threshold", "remedy"),
    [
        ([], "tv", "does not hold: no certified attention ran: switch the model over"),
        ([], "unproven", "does not hold: no certified attention ran"),
        ([call(), call(error_bound="absent")], "error", "use Recorder(error_bounds=True)"),
        ([call(), call(error_bound=None)], "error", "is not proven to be finite"),
        ([call(rows=0, kept=None)], "keys", "no row sees a key"),
    ],
)
def test_numbers_that_a_record_lacks(
    calls: list[dict[str, Any]], threshold: str, remedy: str, tmp_path: Path
) -> None:
    found = said("gate", recorded(tmp_path / "run.jsonl", *calls), f"--{threshold}", "1.0")
    assert (found.code, found.out.count("\n")) == (1, 1)
    assert remedy in found.out


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("tail_mass_upper", [math.nan, math.inf, -0.1, "0", None, True, "absent"]),
        ("error_bound", [math.nan, -1, "0"]),
        ("kept", [None, 1.5, math.nan, "absent"]),
        ("rows", [-1, 0.5, None, True, "absent"]),
        ("holds", [1, None, "absent"]),
        ("budget", [math.nan, None, "absent"]),
        ("kind", ["other", 1, "absent"]),
    ],
)
def test_a_record_with_a_number_that_is_none_fails(
    name: str, values: list[Any], tmp_path: Path
) -> None:
    for value in values:
        path = recorded(tmp_path / "run.jsonl", call(), call(**{name: value}))
        code, shown, _ = said("gate", path, "--tv", 1, "--error", 9, "--unproven", "1.0")
        assert code == 1, value
        assert "does not hold: line 2 is not what Recorder.to_jsonl writes" in shown, value
    path.write_text('{"rows": 1}\n'.replace("1", "1e999"))
    assert certk("gate", path, "--tv", 1) == 1


# ------------------------------------------------------------------------------ results


def test_json_is_the_result_of_the_function(outs: Path, tmp_path: Path) -> None:
    asked = [outs / "full", recorded(tmp_path / "run.jsonl", call())]
    found = ck.gate(asked, tv=0.05, keys=0.7)
    body = answered("gate", *asked, "--tv", 0.05, "--keys", 0.7)
    assert (body.pop("schema"), body.pop("command")) == (1, "gate")
    assert body == found.to_json()
    assert body["passes"] is True
    assert body["thresholds"] == {"tv": 0.05, "keys": 0.7, "unproven": 0.0}
    assert [each["kind"] for each in body["files"]] == ["output", "record"]
    found.save(tmp_path / "gate.json")
    assert json.loads((tmp_path / "gate.json").read_text()) == body
    assert "2 of 2 files pass" in found.summary()
    assert repr(found) == "Gate(passes=True, 2 files, 0 fail)"


def test_a_frame_has_a_line_per_file(outs: Path) -> None:
    pytest.importorskip("pandas")
    frame = ck.gate([outs / "full", outs / "none"], tv=0.05).to_pandas()
    assert frame["passes"].tolist() == [True, False]
    assert frame["tv"].isna().tolist() == [False, True]


def test_what_is_no_threshold_is_refused(outs: Path) -> None:
    for limits in ({}, {"tv": True}, {"tv": "0.1"}, {"keys": 1}, {"unproven": 2}, {"error": -1}):
        with pytest.raises(ck.CertkError, match=r"no threshold|give a number"):
            ck.gate(outs / "full", **limits)  # type: ignore[arg-type]
    with pytest.raises(ck.CertkError, match="inputs is a path"):
        ck.gate(7, tv=0.1)  # type: ignore[arg-type]
    with pytest.raises(ck.CertkError, match="no output"):
        ck.gate([], tv=0.1)
    assert ck.gate(outs / "full", tv=np.float32(0.06)).passes
