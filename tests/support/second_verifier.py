"""The verifier of `examples/verify_one_file.py`, which shares nothing with the package."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from pathlib import Path
from types import ModuleType

from repository import ROOT

PATH = ROOT / "examples" / "verify_one_file.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("verify_one_file", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_MODULE = _load()


def second_verdict(output: Path, source: Path, layout: str | None = None) -> tuple[int, str]:
    """Its exit code, and what it says."""
    arguments = [str(output), str(source)] + ([] if layout is None else [layout])
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = _MODULE.main(arguments)
    return code, said.getvalue()
