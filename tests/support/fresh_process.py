"""Python code in a process of its own, which finds the modules that this one finds."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from repository import ROOT


def run_python(
    code: str, *arguments: str, beside: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `code` with these environment variables; it may import what lies beside a file."""
    folders = [] if beside is None else [str(beside.parent)]
    path = os.pathsep.join([*folders, *sys.path])
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


def run_script(script: Path, *arguments: object) -> str:
    """Return the output of a script on one thread: small models take longer with several."""
    done = subprocess.run(
        [sys.executable, script, *map(str, arguments)],
        capture_output=True, text=True, cwd=ROOT, timeout=600, check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_forked(work: Callable[[], object]) -> None:
    """Do `work` in a fork of this process, which need not import anything anew."""
    if (child := os.fork()) == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
