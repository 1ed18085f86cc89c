"""Two verifiers that share no code, on honest outputs of every option and on changed ones.

`Job.check` holds the verdicts of both against each other, here and in all other tests that check an
output against its input.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from certk_rs.audit import audit
from cli_fixtures import Arrays, Body, Job, forge, write_cache
from made_outputs import MADE, Honest
from second_verifier import PATH, second_verdict


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Honest:
    return Honest(tmp_path_factory.mktemp("honest"))


@pytest.mark.parametrize("name", MADE)
def test_honest_outputs_hold(name: str, honest: Honest, tmp_path: Path) -> None:
    job = honest.copy(name, tmp_path)
    found, alone = job.check(against=True), job.check()
    assert found.holds, job.lines(against=True)
    assert alone.holds
    assert found.unchecked == () != alone.unchecked
    assert found.confirmed_rows == found.rows > 0
    assert found.confirmed_lower_bounds == found.lower_bounds
    assert (found.lower_bounds > 0) == ("none" not in name)
    assert (found.rows_over_budget == 0) == ("capped" not in name and "hot" not in name)
    for threads in (1, 3):
        [again] = audit([job.output], [job.source], threads=threads).outputs
        assert again == found


@pytest.mark.parametrize("name", [name for name in MADE if "full" in name or "compact" in name])
def test_any_number_changed_is_judged_alike(name: str, honest: Honest, tmp_path: Path) -> None:
    """Numbers of any tensor, and budgets, made a little or much larger or smaller."""
    rng = np.random.default_rng(7)
    job, held = honest.copy(name, tmp_path), 0
    good = job.output.read_bytes()
    for _ in range(12):

        def edit(arrays: Arrays) -> None:
            tensor = sorted(arrays)[int(rng.integers(len(arrays)))]
            if not arrays[tensor].size:
                return
            changed = arrays[tensor].copy()
            flat = changed.reshape(-1)
            place = int(rng.integers(flat.size))
            if changed.dtype.kind == "f":
                flat[place] *= rng.choice(np.array([0.5, 0.99, 1.01, 1.5], changed.dtype))
            else:
                # Of an array, which wraps.
                flat[[place]] += rng.choice(np.array([-1, 1]).astype(changed.dtype))
            arrays[tensor] = changed

        def say(body: Body) -> None:
            if rng.random() < 0.3:
                groups = body["eps"][str(rng.integers(2))]
                groups[int(rng.integers(len(groups)))] *= float(rng.choice([0.9, 0.999, 1.1]))

        job.output.write_bytes(good)
        forge(job.output, edit, say)
        held += job.check(against=True).holds
    assert held < 12


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
