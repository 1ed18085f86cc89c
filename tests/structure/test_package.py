"""The published crate has no stray file, and brings no Python to its dependents."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from doc_pages import blocks
from repository import ROOT

# Before it is compressed; today it is less than half of that.
MOST_BYTES = 4 << 20
# What cargo adds of its own, and the file that it renames.
ADDED = {".cargo_vcs_info.json", "Cargo.toml.orig", "Cargo.lock", "Cargo.toml"}
KINDS = {".rs", ".md", ".json", ".safetensors"}
# The crate and what the example's manifest names beside it.
MANIFEST = """\
[package]
name = "host"
version = "0.0.0"
edition = "2024"

[dependencies]
certk-rs = {{ path = {crate}, features = ["ndarray"] }}
ndarray = "{ndarray}"

# Nobody looks into it with a debugger, and it is built soonest so.
[profile.dev]
debug = false
incremental = false

[workspace]
"""


def cargo(*arguments: str, folder: Path = ROOT) -> str:
    program = shutil.which("cargo")
    assert program is not None, "cargo is not on the PATH"
    done = subprocess.run(
        [program, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_archive_has_what_it_should_and_nothing_else() -> None:
    listed = cargo("package", "--list", "--allow-dirty", "-p", "certk-rs").splitlines()
    files = {Path(name) for name in listed if name not in ADDED}
    # What the documentation includes.
    included = {Path("README.md"), Path("docs/package.md"), Path("docs/howto/rust.md")}
    assert included <= files
    stray = {f for f in files if f.suffix not in KINDS and not f.name.startswith("LICENSE-")}
    assert not stray
    # All sources, and nothing among them that is none.
    assert {f for f in files if f.parts[0] == "src"} == {
        f.relative_to(ROOT) for f in (ROOT / "src").rglob("*.rs")
    }
    assert sum((ROOT / f).stat().st_size for f in files) < MOST_BYTES
    assert "[package.metadata.docs.rs]\nall-features = true\n" in (ROOT / "Cargo.toml").read_text()


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A crate outside the repository: the README's program, and the versions of our lock file."""
    [shown] = [b.text for b in blocks((ROOT / "README.md").read_text()) if b.language == "rust"]
    ndarray = re.search(r'^ndarray = \{ version = "(.*?)"', (ROOT / "Cargo.toml").read_text(), re.M)
    assert ndarray is not None
    text = MANIFEST.format(crate=json.dumps(str(ROOT)), ndarray=ndarray[1])
    (tmp_path / "Cargo.toml").write_text(text)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "main.rs").write_text(shown)
    shutil.copy(ROOT / "Cargo.lock", tmp_path)
    return tmp_path


def test_a_service_gets_the_crate_and_no_python(host: Path) -> None:
    """Crates that it is built of are told by cargo, not read off manifests."""
    told = cargo("tree", "--offline", "--edges=normal,build", "--prefix=none", folder=host)
    names = {line.split()[0] for line in told.splitlines() if line}
    assert {"certk-rs", "ndarray", "host"} <= names
    assert not {name for name in names if re.search(r"pyo3|numpy|mimalloc|python", name)}
    # No library for Python to load: its kinds are those that rustc has by default.
    manifest = json.loads(cargo("read-manifest"))
    kinds = [each["crate_types"] for each in manifest["targets"] if "lib" in each["kind"]]
    assert kinds == [["lib"]]


@pytest.mark.heavy  # compiles the crate without what the other tests have compiled
def test_a_service_compiles_and_runs(host: Path) -> None:
    # Kept from run to run, so that only what has changed is compiled.
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "host"
    build = ["build", "--offline", "--target-dir", str(target), "--message-format=json"]
    made: list[dict[str, Any]] = [
        each
        for each in map(json.loads, cargo(*build, folder=host).splitlines())
        if each["reason"] == "compiler-artifact"
    ]
    assert not [each for each in made if "cdylib" in each["target"]["crate_types"]]
    [program] = [each["executable"] for each in made if each["target"]["name"] == "host"]
    assert subprocess.run([program], check=False).returncode == 0
