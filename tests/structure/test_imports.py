"""`import certk_rs` loads no package and a call NumPy alone, and both are quick: services do it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from repository import ROOT

HEAVY = (
    "torch",
    "transformers",
    "kvpress",
    "ray",
    "matplotlib",
    "typer",
    "rich",
    "safetensors",
    "scipy",
    "ml_dtypes",
    "pandas",
    "pyarrow",
)
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
for name in {"analyze", "prune", "verify"} ^ set(certk_rs.__all__):
    getattr(certk_rs, name)
after = {name.partition('.')[0] for name in sys.modules}
print(*(after - before - set(sys.stdlib_module_names)))
"""
    assert run(code).split() == ["certk_rs"]


def test_calls_load_none_of_the_optional_packages() -> None:
    calls = "ck.select(x, 0.1), ck.certify(x, [0]), ck.keep_set([x], 0.1)"
    code = f"import sys, numpy, certk_rs as ck; x = [0.0, 1.0]; {calls}; print(*sys.modules)"
    assert not {name.partition(".")[0] for name in run(code).split()} & set(HEAVY)


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["verify", "none"]])
def test_the_command_line_loads_what_the_command_needs(arguments: list[str]) -> None:
    code = f"import sys; from certk_rs.cli import main; main({arguments}); print(*sys.modules)"
    loaded = set(run(code).split())
    assert "certk_rs.cli" in loaded
    assert not {name.partition(".")[0] for name in loaded} & (set(HEAVY) - {"typer", "rich"})
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
    code = "import certk_rs as ck; assert all(hasattr(ck, name) for name in ck.__all__); print("
    names = run(code + "*ck.__all__)").split()
    results = {"Selection", "Certificate", "KeepSet", "Status", "CertkError"}
    assert results | {"select", "certify", "keep_set", "simd_level", "__version__"} <= set(names)


def test_jobs_come_when_they_are_named() -> None:
    code = """
import sys, certk_rs
assert {"prune", "verify", "analyze"} <= set(dir(certk_rs)) & set(certk_rs.__all__)
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
    assert not {name.partition(".")[0] for name in run(code).split()} & set(HEAVY)


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


def test_without_kvpress_it_says_what_to_install() -> None:
    pytest.importorskip("transformers")
    code = "import sys; sys.modules['kvpress'] = None; import certk_rs.kvpress"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: certk_rs.kvpress needs kvpress" in done.stderr
    assert "pip install 'torch>=2.6' 'kvpress>=0.5.5' 'transformers>=4.57,<5.3'" in done.stderr
