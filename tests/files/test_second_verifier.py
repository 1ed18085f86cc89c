"""Two verifiers that share no code, on honest outputs of every option and on changed ones.

`Job.check` holds the verdicts of both against each other, here and in all other tests that check an
output against its input.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from certk_rs.audit import audit
from cli_fixtures import Job, write_cache
from made_outputs import MADE, PRUNED, Honest
from resealed import KINDS, change_at_random
from second_verifier import PATH, second_verdict


@pytest.mark.parametrize("name", [*PRUNED, *MADE])
def test_honest_outputs_hold(name: str, honest: Honest, tmp_path: Path) -> None:
    job = honest.copy(name, tmp_path)
    layout = "nhd" if name in PRUNED and "nhd" in name else None
    found, alone = job.check(against=True, layout=layout), job.check(layout=layout)
    assert found.holds, found.findings
    assert alone.holds
    assert found.unchecked == () != alone.unchecked
    assert found.confirmed_rows == found.rows > 0
    assert found.confirmed_lower_bounds == found.lower_bounds
    assert (found.lower_bounds > 0) == ("none" not in name)
    assert (found.rows_over_budget > 0) == ("cap" in name or "hot" in name)
    [again] = audit([job.output], [job.source], threads=3, layout=layout).outputs
    assert again == found


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=pytest.mark.heavy if first else ())
        for first in range(0, 1000, 100)
    ],
)
def test_both_agree_on_what_was_changed_at_random(
    first: int, honest: Honest, tmp_path: Path
) -> None:
    """Neither gives up with an error of its own; what holds with the input holds without it."""
    kinds = ("aside", "covered", "coded")
    names = [*PRUNED, *(name for name in MADE if name.endswith(kinds))]
    holding, seen = 0, set()
    for seed in range(first, first + 100):
        name, layout = names[seed % len(names)], {3: "hnd", 7: "nhd"}.get(seed % 10)
        job = honest.copy(name, tmp_path)
        done = change_at_random(job, seed)
        seen |= {each.partition(":")[0] for each in done.split("; ")}
        [found] = audit([job.output], [job.source], threads=1, layout=layout).outputs
        [alone] = audit([job.output], threads=1, layout=layout).outputs
        code, said = second_verdict(job.output, job.source, layout)
        about = f"seed {seed}, {name}, {layout}: {done}\n{said}{found.findings}"
        assert found.holds == (code == 0), about
        assert alone.holds or not found.holds, f"{about}\n{alone.findings[:3]}"
        assert (found.error, alone.error) == (None, None), about
        assert "judging it ended" not in f"{found.findings}{alone.findings}", about
        holding += found.holds
    # Enough of both, or the agreement would say nothing.
    assert 8 <= holding <= 50
    assert len(seen) >= len(KINDS) - 1


def test_it_imports_neither_the_package_nor_safetensors() -> None:
    tree = ast.parse(PATH.read_text())
    imported = {
        (alias.name if isinstance(node, ast.Import) else str(node.module)).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert imported <= {*sys.stdlib_module_names, "numpy"}


def test_exit_codes(tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert second_verdict(job.output, job.source)[0] == 0
    assert second_verdict(job.source, job.source)[0] == 1
    assert second_verdict(tmp_path / "none", job.source)[0] == 2
    assert second_verdict(job.output, tmp_path / "none")[0] == 2
    write_cache(job.source, seed=9)
    code, said = second_verdict(job.output, job.source)
    assert code == 1
    assert "this is not the input that was pruned" in said
    job.source.write_bytes(b"hello")
    assert second_verdict(job.output, job.source)[0] == 2


def test_it_runs_as_a_script(tmp_path: Path) -> None:
    job = Job(tmp_path)
    command = [sys.executable, str(PATH), str(job.output), str(job.source)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "holds: 24 rows recomputed" in ran.stdout
    ran = subprocess.run(command[:3], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "verify_one_file.py OUT.safetensors INPUT.safetensors" in ran.stderr
