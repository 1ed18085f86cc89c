"""Jobs in shards: N of them, side by side in one directory, write the bytes of one job."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from certk_rs import CertkError, prune
from certk_rs._jobs.report import job_report
from cli_fixtures import answered, certk, said, write_cache


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("caches")
    for i in range(5):
        write_cache(folder / f"{'deep/' * (i % 2)}{i}.safetensors", seed=i)
    return folder


def outputs(folder: Path) -> dict[str, bytes]:
    found = sorted(folder.rglob("*.safetensors"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shards_write_the_bytes_of_one_job(count: int, caches: Path, tmp_path: Path) -> None:
    whole = prune(caches, tmp_path / "whole", 0.1, recursive=True)
    out, taken = tmp_path / "out", []

    def run(number: int) -> None:
        shard = f"{number}/{count}"
        taken.append(prune(caches, out, 0.1, recursive=True, shard=shard, jobs=1))

    threads = [threading.Thread(target=run, args=(i + 1,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs(out) == outputs(tmp_path / "whole")
    names = [report.name for result in taken for report in result.outputs]
    assert sorted(names) == sorted(report.name for report in whole.outputs)
    assert max(len(each.outputs) for each in taken) - min(len(each.outputs) for each in taken) <= 1
    one, many = (job_report([str(each)]) for each in (tmp_path / "whole", out))
    assert many["sets"] == one["sets"]
    assert (many["missing"], many["failures"], many["notes"]) == ([], [], [])
    assert all(each["input"] is not None for each in many["outputs"])
    assert sum(job["inputs"] for job in many["jobs"]) == 5
    assert certk("verify", out, "--against", caches, "-r", "-q") == 0


def test_a_shard_is_resumed_alone(caches: Path, tmp_path: Path) -> None:
    first = prune(caches, tmp_path / "out", 0.1, shard="1/2")
    done = outputs(tmp_path / "out")
    for name in list(done)[:1]:
        (tmp_path / "out" / name).unlink()
    prune(caches, tmp_path / "out", 0.1, shard="2/2")
    again = prune(caches, tmp_path / "out", 0.1, shard="1/2", resume=True)
    assert (len(again.outputs), again.resumed) == (len(first.outputs), len(first.outputs) - 1)
    prune(caches, tmp_path / "whole", 0.1)
    assert outputs(tmp_path / "out") == outputs(tmp_path / "whole")
    with pytest.raises(CertkError, match="exists already"):
        prune(caches, tmp_path / "out", 0.1, shard="1/2")


def test_inputs_that_a_shard_has_not_finished_are_missing_or_failed(
    caches: Path, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    for i in (0, 2):
        (tmp_path / "in" / f"{i}.safetensors").symlink_to(caches / f"{i}.safetensors")
    (tmp_path / "in" / "1.safetensors").write_bytes(b"nothing")
    for number in (1, 2, 3):
        if number == 2:
            with pytest.raises(CertkError, match=r"1\.safetensors"):
                prune(tmp_path / "in", tmp_path / "out", 0.1, shard="2/3")
        else:
            prune(tmp_path / "in", tmp_path / "out", 0.1, shard=f"{number}/3")
    (tmp_path / "out" / "2.safetensors").unlink()
    report = job_report([str(tmp_path / "out")])
    assert [each["output"] for each in report["outputs"]] == ["0.safetensors"]
    assert report["missing"] == ["2.safetensors"]


def test_shards_of_different_jobs_do_not_mix(caches: Path, tmp_path: Path) -> None:
    given, out = [caches / "0.safetensors", caches / "2.safetensors"], tmp_path / "out"
    prune(given, out, 0.1, shard="1/2")
    done = outputs(out)
    more = [*given, caches / "4.safetensors"]
    for eps, inputs in ((0.1, more), (0.2, given)):
        with pytest.raises(CertkError, match="shard 1-of-2 is of other inputs or options"):
            prune(inputs, out, eps, shard="2/2")
    assert outputs(out) == done
    assert not (out / ".certk" / "shards" / "2-of-2").exists()
    prune(given, out, 0.1, shard="2/2")
    assert len(outputs(out)) == 2


def test_what_is_no_shard_is_refused(caches: Path, tmp_path: Path) -> None:
    for text in ("", "1", "0/2", "3/2", "1/0", "-1/2", "1/2/3", "a/b", "1" * 30 + "/2"):
        with pytest.raises(CertkError, match="give I/N with 1 <= I <= N"):
            prune(caches, tmp_path / "out", 0.1, shard=text)
    assert not (tmp_path / "out").exists()


def test_the_command(caches: Path, tmp_path: Path) -> None:
    arguments = ("prune", caches, "-o", tmp_path / "out", "--eps", 0.1, "--shard")
    for number in (1, 2, 3, 4):
        assert len(answered(*arguments, f"{number}/4")["outputs"]) == (number <= 3)
    ended = said(*arguments, "5/4")
    assert (ended.code, "shard is '5/4'" in ended.err) == (2, True)
