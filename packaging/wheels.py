"""Build wheels that can be published: old C libraries, no paths of this machine, small.

Three wheels serve a target: abi3 for every CPython from 3.10 on, one for free-threaded CPython
3.14, and abi3t for free-threaded CPython from 3.15 on. For Linux zig is the linker, which knows the
C libraries of old systems, and no Python of the target is needed. Elsewhere the last two are built
where their Python is on the PATH. Needs what `packaging/requirements.txt` names, and the standard
library of Rust for each target (`rustup target add`, or a compiler that has it, named in RUSTC).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import private_paths

ROOT = Path(__file__).resolve().parents[1]
LINUX = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu")
# glibc 2.17, the oldest that Rust's standard library runs with, and musl 1.2.
COMPATIBILITY = {"gnu": "manylinux2014", "musl": "musllinux_1_2"}
MOST_BYTES = 5_500_000
# Tags of each wheel, and the Python that it is built for: any for the first, which needs none.
PYTHONS = {"cp310-abi3": None, "cp314-cp314t": "python3.14t", "cp315-abi3.abi3t": "python3.15t"}


def main() -> None:
    """Build a wheel for each target into a folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "targets", nargs="*", default=LINUX, help="of rustc; default: " + " ".join(LINUX)
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    arguments = parser.parse_args()
    for target in arguments.targets:
        for tags, python in PYTHONS.items():
            if python and not by_zig(target) and shutil.which(python) is None:
                print(f"{target}, {tags}: NOT BUILT, as {python} is not on the PATH")
                continue
            wheel = build(target, tags, arguments.out)
            size = wheel.stat().st_size
            print(f"{wheel}: {size / 1e6:.2f} MB")
            if size > MOST_BYTES:
                sys.exit(f"{wheel.name} has {size} bytes, and {MOST_BYTES} are the most")


def by_zig(target: str) -> bool:
    """Return True if zig links the wheels of a target."""
    return "linux" in target and target.rpartition("-")[2] in COMPATIBILITY


def build(target: str, tags: str, out: Path) -> Path:
    """Build a wheel for a target, without paths of this machine."""
    own = out / target
    for old in own.glob("*.whl"):
        old.unlink()
    command = [sys.executable, "-m", "maturin", "build", "--release", "--locked"]
    # Without the level "portable" at a speed for tests: see Cargo.toml.
    command += ["--target", target, "--out", str(own), "--no-default-features"]
    if by_zig(target):
        command += ["--zig", "--compatibility", COMPATIBILITY[target.rpartition("-")[2]]]
    if python := PYTHONS[tags]:
        command += ["--interpreter", python]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True)
    [made] = own.glob("*.whl")
    if f"-{tags}-" not in made.name:
        sys.exit(f"{made.name} was built, and {tags} is wanted: build by a Python before 3.15")
    private_paths.clean(made, ROOT)
    if found := private_paths.found(made, ROOT):
        sys.exit(f"{made.name} holds paths of this machine:\n" + "\n".join(found))
    wheel = made.replace(out / made.name)
    own.rmdir()
    return wheel


def environment() -> dict[str, str]:
    """Return the settings of the compiler that are not in the manifest."""
    rustc = os.environ.get("RUSTC", "rustc")
    sysroot = subprocess.run(
        [rustc, "--print", "sysroot"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    cargo = os.environ.get("CARGO_HOME", str(Path.home() / ".cargo"))
    flags = os.environ.get("RUSTFLAGS", "").split()
    # The last one that fits holds.
    flags += [f"--remap-path-prefix={old}={new}" for old, new in remapped(cargo, sysroot)]
    return {
        "SOURCE_DATE_EPOCH": commit_time(),
        "CARGO_TARGET_DIR": str(ROOT / "target" / "wheels-build"),
        **os.environ,
        # Where maturin looks for zig's package.
        "PATH": str(Path(sys.executable).parent) + os.pathsep + os.environ.get("PATH", ""),
        "CARGO_ENCODED_RUSTFLAGS": "\x1f".join(flags),
        # Lines of the sources, for the traces of panics; they would be stripped anyway.
        "CARGO_PROFILE_RELEASE_DEBUG": "0",
    }


def remapped(cargo: str, sysroot: str) -> list[tuple[str, str]]:
    """Folders of this machine, and what stands for them in the wheel."""
    return [(cargo, "cargo"), (sysroot, "rust"), (str(ROOT), "certk_rs")]


def commit_time() -> str:
    """Return the time of files in the wheel: that of the commit, or a fixed one without git."""
    told = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return told.stdout.strip() if told.returncode == 0 else "1577836800"


if __name__ == "__main__":
    main()
