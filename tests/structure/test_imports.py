"""`import certk_rs` loads no package and a call NumPy alone, and both are quick: services do it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import certk_rs
from cli_fixtures import said
from repository import ROOT

HEAVY = {
    *("torch", "transformers", "kvpress", "ray", "matplotlib", "typer", "rich", "safetensors"),
    *("scipy", "ml_dtypes", "pandas", "pyarrow"),
}
ALLOWED_MS = 150


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_none_of_the_optional_packages() -> None:
    loaded = run("import sys, certk_rs; print(*sys.modules)").split()
    assert [name for name in loaded if name.startswith("certk_rs")] == ["certk_rs"]
    assert not {name.partition(".")[0] for name in loaded} & {"numpy", *HEAVY}


def test_import_loads_nothing_but_numpy_and_the_standard_library() -> None:
    code = """
import sys, numpy
before = {name.partition('.')[0] for name in sys.modules}
import certk_rs
for name in {"analyze", "gate", "prune", "verify"} ^ set(certk_rs.__all__):
    getattr(certk_rs, name)
after = {name.partition('.')[0] for name in sys.modules}
print(*(after - before - set(sys.stdlib_module_names)))
"""
    assert run(code).split() == ["certk_rs"]


def test_calls_load_none_of_the_optional_packages() -> None:
    calls = "ck.select(x, 0.1), ck.certify(x, [0]), ck.keep_set([x], 0.1)"
    code = f"import sys, numpy, certk_rs as ck; x = [0.0, 1.0]; {calls}; print(*sys.modules)"
    assert not {name.partition(".")[0] for name in run(code).split()} & HEAVY


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["verify", "none"]])
def test_the_command_line_loads_what_the_command_needs(arguments: list[str]) -> None:
    code = f"import sys; from certk_rs.cli import main; main({arguments}); print(*sys.modules)"
    loaded = set(run(code).split())
    assert "certk_rs.cli" in loaded
    assert not {name.partition(".")[0] for name in loaded} & (HEAVY - {"typer", "rich"})
    assert "statistics" not in loaded
    if arguments == ["--help"]:  # parsing arguments, typer loads it itself
        assert "importlib.metadata" not in loaded


def test_import_is_quick() -> None:
    # Beyond NumPy's own import, with what a first call needs. Time of the processor, the best of a
    # few fresh processes: what else the machine does is not to count.
    code = """
import time, numpy
start = time.process_time()
import certk_rs
certk_rs.select, certk_rs.keep_set, certk_rs.KeyIndex, certk_rs.attention
print(1000 * (time.process_time() - start))
"""
    run(code)  # writes the byte code, reads the files once
    times = [float(run(code)) for _ in range(3)]
    assert min(times) <= ALLOWED_MS, times


def test_the_public_names() -> None:
    assert all(hasattr(certk_rs, name) for name in certk_rs.__all__)
    results = {"Selection", "Certificate", "KeepSet", "Status", "CertkError"}
    functions = {"select", "certify", "keep_set", "simd_level", "__version__"}
    assert results | functions <= set(certk_rs.__all__)


def test_jobs_come_when_they_are_named() -> None:
    code = """
import sys, certk_rs
assert {"prune", "verify", "gate", "analyze"} <= set(dir(certk_rs)) & set(certk_rs.__all__)
print(*sys.modules)
"""
    own = {name for name in run(code).split() if name.startswith("certk_rs.")}
    assert not {name for name in own if name.startswith(("certk_rs._jobs", "certk_rs.audit"))}
    code = """
import sys, certk_rs
from certk_rs import prune, verify, analyze
assert prune is certk_rs.prune is certk_rs._jobs.prune.prune
assert verify is certk_rs._jobs.verify.verify and analyze is certk_rs._jobs.analyze.analyze
assert "prune" in vars(certk_rs)
try:
    certk_rs.prunes
except AttributeError as error:
    assert "certk_rs" in str(error) and "prunes" in str(error)
else:
    raise SystemExit("a name that is none")
print(*sys.modules)
"""
    assert not {name.partition(".")[0] for name in run(code).split()} & HEAVY


def test_checkers_are_told_of_every_name_that_comes_later() -> None:
    """The imports that only a checker sees are those that the package makes later."""
    tree = ast.parse((ROOT / "python" / "certk_rs" / "__init__.py").read_text())
    told, *_ = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        (each.module, name.name)
        for each in told.body
        if isinstance(each, ast.ImportFrom)
        for name in each.names
    }
    later = {(module, name) for module, names in certk_rs._NAMES.items() for name in names}
    assert seen == later | {(None, module) for module in certk_rs._MODULES}
    assert {name for _, name in seen} == set(certk_rs.__all__)


@pytest.mark.heavy  # mypy reads NumPy's stubs anew: half a minute
def test_checkers_see_the_signatures_of_what_comes_later(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    file = tmp_path / "user.py"
    file.write_text(
        "import certk_rs as ck\n"
        "reveal_type(ck.prune('a', 'b', 0.1).failures)\n"
        "reveal_type(ck.verify('b').holds)\n"
        "reveal_type(ck.analyze('a').caches)\n"
        "ck.prunes\n"
        "ck.prune('a')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", os.devnull, str(file)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "MYPYPATH": str(ROOT / "python")},
        cwd=tmp_path,
    )
    said = [line for line in done.stdout.splitlines() if "user.py" in line]
    assert "tuple[certk_rs._jobs.results.Failure, ...]" in said[0]
    assert '"bool"' in said[1] or "builtins.bool" in said[1]
    assert "CacheAnalysis" in said[2]
    assert 'no attribute "prunes"' in said[3]
    assert "out" in said[4]
    assert len(said) == 5


PIP = "pip install 'torch>=2.6'"


@pytest.mark.parametrize(
    ("module", "missing", "install"),
    [
        ("torch", "torch", PIP),
        ("transformers", "torch", f"{PIP} 'transformers>=5'"),
        ("transformers", "transformers", f"{PIP} 'transformers>=5'"),
        ("kvpress", "kvpress", f"{PIP} 'kvpress>=0.5.5' 'transformers>=4.57,<5.3'"),
    ],
)
def test_without_a_package_it_says_what_to_install(module: str, missing: str, install: str) -> None:
    if missing != "torch":
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
    code = f"import sys; sys.modules[{missing!r}] = None\ntry:\n    import certk_rs.{module}\n"
    told = run(code + "except ImportError as error:\n    print(error)")
    named = "PyTorch" if module == "torch" else missing
    assert f"certk_rs.{module} needs {named}" in told
    assert install in told


def test_the_command_line_says_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("certk_rs.transformers")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "text").write_text("word")
    found = said("capture", "--model", tmp_path, "--text", tmp_path / "text", "-o", tmp_path / "o")
    assert (found.code, found.out) == (2, "")
    told = "certk: error: certk capture cannot run: certk_rs.transformers needs torch"
    assert found.err.startswith(told)
