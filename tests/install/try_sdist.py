"""Try a source archive: what it holds, and that a wheel is built from it and nothing else.

    python tests/install/try_sdist.py dist/certk_rs-VERSION.tar.gz

pip unpacks it outside the repository and gets what `pyproject.toml` asks for to build it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tarfile
import tempfile
from pathlib import Path

from clean_machine import ROOT, Clean

sys.path.insert(0, str(ROOT / "packaging"))
import private_paths

MOST_BYTES = 5_000_000
# What a reader expects, and what the build needs.
MUST = {
    *{"README.md", "CHANGELOG.md", "LICENSE-MIT", "LICENSE-APACHE", "PKG-INFO"},
    *{"Cargo.toml", "Cargo.lock", "pyproject.toml", "src/lib.rs", "crates/certk-py/src/lib.rs"},
    *{"docs/install.md", "docs/package.md", "docs/architecture.md", "docs/figures/example.png"},
    *{"python/certk_rs/__init__.py", "python/certk_rs/py.typed"},
    "python/certk_rs/_data/minilm_small.safetensors",
}
# What only a work tree has, or only those who work on the library read.
MUST_NOT = (
    *(".git", "target", ".venv", "dist", "fuzz", "experiments", "benches/results", "__pycache__"),
    "pruned",
)


def main() -> None:
    """Try the archive given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("archive", type=Path)
    archive = parser.parse_args().archive.resolve()
    holds(archive)
    with tempfile.TemporaryDirectory(prefix="certk-sdist-") as made:
        place = Path(made).resolve()
        clean = Clean(place)
        # Built anew, not with what the repository has built.
        os.environ.pop("CARGO_TARGET_DIR", None)
        print(
            clean.run(
                "python", "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", "made", str(archive)
            ),
            end="",
        )
        [wheel] = (place / "made").glob("*.whl")
        clean.run("python", "-m", "pip", "install", "--quiet", str(wheel))
        clean.run("certk", "demo")
        print(f"{archive.name}: built {wheel.name} outside the repository; certk demo as it should")


def holds(archive: Path) -> None:
    """See that the archive holds what it should, and no junk."""
    with tarfile.open(archive) as opened:
        members = [member for member in opened if member.isfile()]
    names = {member.name.partition("/")[2] for member in members}
    assert names >= MUST, MUST - names
    junk = {n for n in names if any(f"/{n}/".find(f"/{each}/") >= 0 for each in MUST_NOT)}
    junk |= {n for n in names if n.endswith((".so", ".pyd", ".pyc", ".whl"))}
    assert not junk, junk
    # Every page that another one points at.
    pages = {p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").rglob("*.md")}
    assert pages <= names, pages - names
    told = private_paths.found(archive, ROOT)
    assert not told, told
    size = archive.stat().st_size
    assert size <= MOST_BYTES, size
    print(f"{archive.name}: {len(names)} files, {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
