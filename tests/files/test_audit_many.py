"""Audits of many outputs, of large ones, of some rows only, and what is printed of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from certk_rs import CertkError, prune, verify
from certk_rs._files.tensor_file import SafetensorsFile
from certk_rs.audit import audit
from cli_fixtures import (
    Job,
    answered,
    forge,
    forge_input,
    read_output,
    said,
    write_cache,
)
from forgeries import budget, field, put, scale_masses
from signalled import Ended, certk_signalled

MANY = 32


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small caches and their outputs, in two directories."""
    folder = tmp_path_factory.mktemp("many")
    for i in range(MANY):
        write_cache(folder / "in" / f"{i:03}.safetensors", seed=i, layers=1)
    prune(folder / "in", folder / "out", 0.1, proof="full", jobs=2)
    shutil.rmtree(folder / "out" / ".certk")
    return folder


@pytest.fixture
def copied(many: Path, tmp_path: Path) -> Path:
    shutil.copytree(many, tmp_path, dirs_exist_ok=True)
    return tmp_path


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_input_is_hashed_once_and_found(
    copied: Path, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Path] = []
    lock, real = threading.Lock(), SafetensorsFile.sha256

    def counted(file: SafetensorsFile, name: str) -> str:
        with lock:
            hashed.append(Path(str(file.path)))
        return real(file, name)

    monkeypatch.setattr(SafetensorsFile, "sha256", counted)
    inputs, outputs = files(copied / "in"), files(copied / "out")
    # Other names, so that names are no help.
    for place, output in enumerate(outputs):
        output.rename(output.with_name(f"{MANY - place:03}-of.safetensors"))
    outputs = files(copied / "out")
    told = []
    report = audit(outputs, inputs, threads=threads, each=lambda o: told.append(o.path))
    assert report.holds
    assert told == outputs
    assert sorted(o.source for o in report.outputs if o.source is not None) == inputs
    assert len(hashed) == 3 * MANY


def test_the_answer_is_that_of_one_thread(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Else all of it would be done on this thread.
    monkeypatch.setattr("certk_rs._audit.files.SMALL", 0)
    monkeypatch.setattr("certk_rs._audit.sources.SMALL", 0)
    outputs = files(copied / "out")
    name = "layers.0.tail_mass_upper"
    for number in (3, 7, 8, 20):
        forge(outputs[number], lambda arrays: arrays.update({name: arrays[name] / 2}))
    outputs[30].write_bytes(b"nonsense")
    reports = [audit(outputs, files(copied / "in"), threads=n) for n in (1, 2, 4)]
    assert reports[0] == reports[1] == reports[2]
    assert [i for i, o in enumerate(reports[0].outputs) if not o.holds] == [3, 7, 8, 20, 30]
    assert reports[0].unmatched == (copied / "in" / "030.safetensors",)


def test_fail_fast_stops_behind_the_first(copied: Path) -> None:
    outputs = files(copied / "out")
    outputs[5].write_bytes(b"nonsense")
    report = audit(outputs, files(copied / "in"), fail_fast=True)
    assert [o.path for o in report.outputs] == outputs[:6]
    assert report.not_reached == tuple(outputs[6:])
    assert report.found
    assert not report.holds
    ended = said("verify", copied / "out", "--against", copied / "in", "--fail-fast")
    assert ended.code == 1
    assert f"{MANY - 6} outputs were not looked at" in ended.out
    assert f"1 of {MANY} outputs do not hold" in ended.err


# Before the heads of the last output are looked at, it waits for a line, and not forever.
WAITS = """
import os, select, sys
from certk_rs._audit.truth import Head
from certk_rs.cli import main

check = Head.check

def waits(self):
    if LAST in str(self.file.path) and not select.select([sys.stdin], [], [], 120)[0]:
        os._exit(9)
    return check(self)

Head.check = waits
sys.exit(main())
""".replace("LAST", repr(f"{MANY - 1:03}"))


def test_results_come_through_a_pipe_as_they_are_known(copied: Path) -> None:
    """The lines of the others are there while the last output waits for its input."""
    command = ["verify", copied / "out", "--against", copied / "in", "--jobs", "1"]
    with subprocess.Popen(
        [sys.executable, "-c", WAITS, *map(str, command)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2 * MANY - 2)]
        assert "000.safetensors: covers 3 of the 3" in lines[0]
        assert f"{MANY - 2:03}.safetensors: holds" in lines[-1]
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert len(process.stdout.readlines()) == 2
    assert process.returncode == 0


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """An output whose rows are recomputed in eight blocks."""
    shape = {"layers": 1, "kv_heads": 4, "heads": 4, "m": 100, "n": 20_000, "d": 8}
    # Under so small a budget sets are found at once.
    return Job(tmp_path_factory.mktemp("blocks"), eps=1e-5, cache=shape)


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("jobs", [1, 2])
def test_an_interrupt_is_heard_within_a_block(blocks: Job, jobs: int, tmp_path: Path) -> None:
    command = ["verify", blocks.output, "--jobs", jobs, "--against", blocks.source]

    def ended(at: int) -> Ended:
        function = "certk_rs._audit.truth:recompute"
        return certk_signalled(command, function, tmp_path / "calls", at=at)

    whole = ended(at=99)
    assert (whole.code, whole.err, whole.calls) == (0, "", 8)
    interrupted = ended(at=2)
    assert (interrupted.code, interrupted.err) == (130, "certk: interrupted\n")
    # No thread begins another block than the one that it was about to.
    assert interrupted.calls <= 2 + jobs - 1


def test_memory_is_that_of_a_head_and_of_a_block(tmp_path: Path) -> None:
    """Neither a whole layer nor all scores of a head."""
    kv_heads, n, d, m = 8, 2048, 64, 512
    job = Job(
        tmp_path, cache={"layers": 1, "kv_heads": kv_heads, "heads": 8, "m": m, "n": n, "d": d}
    )
    head, scores = 8 * n * d, 8 * m * n
    assert audit([job.output], [job.source], threads=1).holds
    tracemalloc.start()
    try:
        report = audit([job.output], [job.source], threads=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert report.holds
    block = 8 << 20
    assert peak < 3 * head + 4 * block + (8 << 20) < kv_heads * head + scores + 5 * block


# --------------------------------------------------------------------- one that cannot be judged

STAGES = {
    "begins": "certk_rs._audit.files.OutputJob._match",
    "is hashed": "certk_rs._audit.files.OutputJob._check_hash",
    "is recomputed": "certk_rs._audit.truth.Head.check",
    "is taken in": "certk_rs._audit.files.OutputJob._take_verdict",
    "ends": "certk_rs._audit.files.OutputJob._prove",
}


def broken(monkeypatch: pytest.MonkeyPatch, where: str, path: Path, error: Exception) -> None:
    """An error at one stage of the audit of one output."""
    module, kind, name = where.rsplit(".", 2)
    place = getattr(sys.modules[module], kind)
    real = getattr(place, name)

    def wrong(self: Any, *args: Any) -> Any:
        file = self.file.path if kind == "Head" else self.result.path
        if Path(str(file)) == path:
            raise error
        return real(self, *args)

    monkeypatch.setattr(place, name, wrong)


UNEXPECTED = RuntimeError("a line\nand another")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (UNEXPECTED, None),
        (OSError(5, "Input/output error", "/place"), "/place: Input/output error"),
        (MemoryError(), "not enough memory: give fewer threads (--jobs)"),
    ],
)
def test_what_goes_wrong_is_of_its_output_alone(
    copied: Path, stage: str, error: Exception, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refusals of the system are errors; all else is a finding, and nothing is confirmed."""
    outputs, inputs = files(copied / "out")[:4], files(copied / "in")[:4]
    broken(monkeypatch, STAGES[stage], outputs[1], error)
    for threads in (1, 2):
        report = audit(outputs, inputs, threads=threads)
        assert [o.holds for o in report.outputs] == [True, False, True, True]
        assert report.outputs[1].error == words
        assert [str(finding) for finding in report.outputs[1].findings] == [
            "file: judging it ended with an unexpected RuntimeError: a line and another; nothing "
            "of it is confirmed"
        ] * (words is None)
        # Where nobody has looked for its input, nobody can say that it has an output.
        assert bool(report.unmatched) == (stage == "begins")
    if words is None:
        return
    command = ["verify", *outputs, *(each for path in inputs for each in ("--against", path))]
    code, out, err = said(*command)
    assert (code, out.count(": holds: ")) == (2, 3)
    assert f"{outputs[1]}: could not be judged: {words}\n" in out
    assert "1 of 4 outputs could not be judged" in err
    told = answered(*command, code=2)["outputs"]
    assert [each["error"] for each in told] == [None, words, None, None]
    # What is known not to hold comes first.
    outputs[3].write_bytes(b"nonsense")
    ended = said(*command)
    assert (ended.code, "1 of 4 outputs do not hold" in ended.err) == (1, True)


@pytest.mark.parametrize("damage", ["a code's scale", "a dropped key", "a dropped value"])
def test_one_forged_guard_does_not_end_the_run(tmp_path: Path, damage: str) -> None:
    """Numbers that linear algebra raises errors of, sealed anew with all hashes."""
    for name in "abc":
        shape = {"seed": ord(name), "d": 16, "dtype": "F32", "layers": 1}
        write_cache(tmp_path / "in" / f"{name}.safetensors", **shape)
    prune(tmp_path / "in", tmp_path / "out", 0.1, proof="full", rest="file", jobs=1)
    source, output = (tmp_path / each / "b.safetensors" for each in ("in", "out"))
    if damage == "a code's scale":
        forge(output, put("0.guard_scales", 3, lambda bits: bits ^ 0x4000))
    else:
        kept = read_output(output)["layers.0.indices"]
        gone = next(j for j in range(24) if j not in kept)
        place = (0, slice(None), gone, 5)
        forge_input(source, output, put(f"0.{damage.split()[-1]}", place, np.nan))
    code, out, err = said("verify", tmp_path / "out", "--against", tmp_path / "in")
    assert code == 1
    assert "1 of 3 outputs do not hold" in err
    assert "unexpected" not in out + err
    words = "layers.0.guard_radii" if "scale" in damage else "holds a number that is not finite"
    assert words in out
    for name, holds in (("a", True), ("b", False), ("c", True)):
        assert (f"{name}.safetensors: holds: " in out) == holds


@pytest.mark.parametrize("threads", [1, 2])
def test_an_input_that_is_lost_ends_nothing(
    copied: Path, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was opened, and cannot be read when it is to be hashed."""
    outputs, inputs = files(copied / "out")[:4], files(copied / "in")[:4]
    real = SafetensorsFile.sha256

    def refused(file: SafetensorsFile, name: str) -> str:
        if Path(str(file.path)) == inputs[1]:
            raise OSError(5, "Input/output error", str(inputs[1]))
        return real(file, name)

    monkeypatch.setattr(SafetensorsFile, "sha256", refused)
    for output in outputs:  # so that the search for an input goes through all of them
        output.rename(output.with_name(f"of-{output.name}"))
    outputs = files(copied / "out")[-4:]
    report = audit(outputs, inputs, threads=threads)
    assert [o.holds for o in report.outputs] == [True, False, True, True]
    assert report.outputs[1].error == f"{inputs[1]}: Input/output error"
    assert report.unmatched == (inputs[1],)


# -------------------------------------------------------------------------------------------- names


def test_outputs_under_exchanged_names_are_told(copied: Path) -> None:
    """They hold, since inputs are found by what they are; but somebody may open the wrong one."""
    out, given = copied / "out", copied / "in"
    other = out / "other.safetensors"
    (out / "001.safetensors").rename(other)
    (out / "002.safetensors").rename(out / "001.safetensors")
    other.rename(out / "002.safetensors")
    (out / "003.safetensors").rename(other)
    report = audit(files(out), files(given))
    assert report.holds
    told = {o.path.name: o.warnings for o in report.outputs if o.warnings}
    words = "it is the output of {}, which has another name"
    known = ", though {} is among the inputs"
    assert told == {
        name: ((words + known * (name != other.name)).format(given / of, name),)
        for name, of in (
            ("001.safetensors", "002.safetensors"),
            ("002.safetensors", "001.safetensors"),
            ("other.safetensors", "003.safetensors"),
        )
    }
    shown = said("verify", out, "--against", given).out
    assert shown.count(": warning: it is the output of ") == 3
    warned = [each["warnings"] for each in answered("verify", out, "--against", given)["outputs"]]
    assert sum(map(len, warned)) == 3


def test_of_equal_inputs_that_of_the_name_is_meant(tmp_path: Path) -> None:
    for name in "ab":
        write_cache(tmp_path / "in" / f"{name}.safetensors")
    prune(tmp_path / "in", tmp_path / "out", 0.1, jobs=1)
    outputs, inputs = (sorted((tmp_path / each).glob("*.safetensors")) for each in ("out", "in"))
    report = audit(outputs, inputs)
    assert report.holds
    assert [o.source for o in report.outputs] == inputs
    assert [o.warnings for o in report.outputs] == [(), ()]


# ------------------------------------------------------------------------------------------ samples


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path, cache={"m": 20})


@pytest.mark.parametrize(("sample", "rows"), [(1, 1), (7, 7), (10**9, 160), (0.1, 16), (1.0, 160)])
def test_a_sample_confirms_nothing(job: Job, sample: float, rows: int) -> None:
    report = audit([job.output], [job.source], sample=sample)
    [found] = report.outputs
    assert not found.findings
    assert not report.found
    assert not found.holds
    assert not report.holds
    assert found.sampled is not None
    assert (found.sampled.rows, found.sampled.of) == (rows, 160)
    assert found.confirmed_rows == rows
    assert found.confirmed_lower_bounds == 0
    assert audit([job.output], [job.source], sample=sample, threads=3) == report


def test_a_sample_finds_as_often_as_it_looks(job: Job) -> None:
    """One row of eight is forged; whether it is drawn depends on nothing but the certificate."""
    good, found = job.output.read_bytes(), 0
    for number in range(40):
        job.output.write_bytes(good)
        fourth = (slice(None), slice(None, None, 4))  # of 20 queries each
        library = field(library=str(number)).change
        forge(job.output, scale_masses(0, fourth, 0.5, 0.5), library)
        drawn = [audit([job.output], [job.source], sample=4) for _ in range(2)]
        assert drawn[0] == drawn[1]
        found += drawn[0].found
    assert 8 <= found <= 28  # of 40, each with probability 1 - (7/8)^4 = 0.41


def test_a_sample_looks_at_all_bytes(job: Job) -> None:
    content = bytearray(job.output.read_bytes())
    content[-1] ^= 1
    job.output.write_bytes(content)
    assert audit([job.output], [job.source], sample=1).found


def test_a_sample_is_labelled_wherever_it_is_told(job: Job) -> None:
    command = ("verify", job.output, "--against", job.source, "--sample", "5")
    code, out, err = said(*command)
    assert code == 3
    assert "holds:" not in out
    assert "sampled, not verified: nothing was found in 5 of 160 rows of" in out
    assert err == "certk: sampled, not verified: nothing was found in the rows looked at\n"
    told = answered(*command, code=3)
    [output] = told["outputs"]
    assert (told["holds"], output["holds"], output["findings"]) == (False, False, [])
    assert (output["sampled"]["rows"], output["sampled"]["of"]) == (5, 160)
    assert answered(*command[:4])["outputs"][0]["sampled"] is None


@pytest.mark.parametrize("sample", ["0", "-1", "0.0", "1.5", "nan", "x", "", 0, 1.5, None])
def test_samples_that_are_none(job: Job, sample: Any) -> None:
    if isinstance(sample, str):
        ended = said("verify", job.output, "--against", job.source, f"--sample={sample}")
        assert (ended.code, "sample" in ended.err) == (2, True)
    elif sample is None:
        ended = said("verify", job.output, "--sample", "5")
        assert (ended.code, "give against" in ended.err) == (2, True)
    else:
        with pytest.raises(CertkError, match=f"sample is {sample}"):
            audit([job.output], [job.source], sample=sample)


# ------------------------------------------------------------------------------- levels of proof


@pytest.mark.parametrize(
    ("proof", "says", "unknown"),
    [
        ("full", r"holds: 24 tail masses and 4 lower bounds recomputed", "tail masses are true"),
        ("compact", r"holds: 24 .* only the worst of each head .* and 4 lower", "tail masses are"),
        ("none", r"holds: 24 .* none is recorded, nor a lower bound", "within their budgets"),
    ],
)
def test_what_can_be_verified_is_said(tmp_path: Path, proof: str, says: str, unknown: str) -> None:
    job = Job(tmp_path, proof=proof)
    assert re.search(says, said("verify", job.output, "--against", job.source).out)
    assert unknown in said("verify", job.output).out
    [told] = answered("verify", job.output)["outputs"]
    assert (told["worst_tail_mass"] is None) == (proof == "none")
    assert (told["rows_over_budget"] is None) == (proof == "none")
    [found] = audit([job.output], [job.source]).outputs
    assert found.rows_over_budget == 0
    assert found.worst_tail_mass is not None
    assert 0.01 < found.worst_tail_mass <= 0.1


def test_an_output_of_the_format_before(job: Job) -> None:
    forge(job.output, say=lambda body: body.update(format=1))
    code, out, _ = said("verify", job.output)
    assert code == 1
    assert "of format 1, which nothing from 0.2.0 on reads" in out
    assert "prune its input anew" in out


def test_several_budgets_are_told_as_a_range(job: Job) -> None:
    forge(job.output, say=budget("1", 1, 0.1000001).change)
    [told] = answered("verify", job.output)["outputs"]
    assert told["eps"] is None
    assert told["budgets"] == {"0": [0.1, 0.1], "1": [0.1, 0.1000001]}
    assert "eps = 0.1 to 0.1000001, " in said("verify", job.output).out


def test_a_loop_of_links_is_one_output_that_cannot_be_judged(copied: Path) -> None:
    (copied / "out" / "loop.safetensors").symlink_to("loop.safetensors")
    found = verify(copied / "out")
    assert len(found.outputs) == MANY + 1
    [bad] = [each for each in found.outputs if each.error is not None]
    assert "symbolic links" in str(bad.error)
