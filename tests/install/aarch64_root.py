"""Try the aarch64 wheel on another machine, under emulation, and compare bits.

    python tests/install/aarch64_root.py dist/

Makes a folder of Debian's Python for arm64 (`apt-get download`, nothing is installed), lets pip put
the wheel and what it depends on beside it, and runs both with `qemu-aarch64-static -L`. What the
x86_64 wheel says on this machine is compared with. Needs Debian with the architecture arm64 and the
emulator (`make install-aarch64`).
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from clean_machine import Clean, run

HERE = Path(__file__).resolve().parent
EMULATOR = "qemu-aarch64-static"


def main() -> None:
    """Compare the wheels of a folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    [here], [there] = (
        list(folder.glob(f"*-abi3-manylinux*_{m}.whl")) for m in ("x86_64", "aarch64")
    )
    if shutil.which(EMULATOR) is None:
        sys.exit(f"{EMULATOR} is missing: make install-aarch64")
    with tempfile.TemporaryDirectory(prefix="certk-aarch64-") as made:
        place = Path(made).resolve()
        root = place / "root"
        python = debian_python(place / "packages", root)
        version = python.name.removeprefix("python")
        (place / "x86_64").mkdir()
        native = Clean(place / "x86_64", "numpy>=1.26")
        native.install("--no-deps", str(here))
        site = place / "site"
        native.install(*for_aarch64(version), f"--target={site}", str(there))

        def emulated(*arguments: str, **variables: str) -> str:
            command = [EMULATOR, "-L", str(root), str(python), *arguments]
            return run(command, place, PYTHONPATH=str(site), **variables)

        def lines(text: str) -> list[str]:
            return text.split("\n")

        script = str(HERE / "rows_digest.py")
        want = lines(native.run("python", script))
        code = "import certk_rs, platform; print(platform.machine(), certk_rs.simd_level())"
        machine, best = emulated("-c", code).split()
        assert machine == "aarch64", machine
        for level in sorted({"portable", best}):
            got = lines(emulated(script, CERTK_LEVEL=level))
            apart = [(w, g) for w, g in zip(want, got, strict=True) if w != g]
            assert not apart, apart
            print(f"{there.name}, level {level}: {len(want) - 1} calls, the bits of {here.name}")
        emulated("-m", "certk_rs", "demo")
        print("certk demo under emulation: as it should")


def debian_python(packages: Path, root: Path) -> Path:
    """Unpack Python for arm64, and all that it needs, into a folder; return the interpreter."""
    packages.mkdir()
    asked = [
        "apt-cache",
        "depends",
        "--recurse",
        "--no-recommends",
        "--no-suggests",
        "--no-conflicts",
    ]
    asked += ["--no-breaks", "--no-replaces", "--no-enhances", "python3:arm64"]
    # Indented lines say why.
    told = run(asked, packages).splitlines()
    needed = {line for line in told if line.endswith(":arm64") and not line.startswith(" ")}
    if not needed:
        sys.exit("apt knows no python3:arm64: make install-aarch64")
    # Read by the user `_apt`, or not at all in a folder of ours.
    run(
        ["apt-get", "download", "--quiet", "-o", "APT::Sandbox::User=root", *sorted(needed)],
        packages,
    )
    for each in sorted(packages.glob("*.deb")):
        run(["dpkg", "-x", str(each), str(root)], packages)
    return next(p for p in (root / "usr" / "bin").glob("python3.*") if p.name[8:].isdigit())


def for_aarch64(version: str) -> list[str]:
    """Return the options of pip for that Python on that machine."""
    tags = ("manylinux2014", "manylinux_2_27", "manylinux_2_28")
    arguments = ["--only-binary=:all:", *(f"--platform={tag}_aarch64" for tag in tags)]
    arguments += [f"--python-version={version}", "--implementation=cp", "--abi=abi3"]
    return [*arguments, f"--abi=cp{version.replace('.', '')}"]


if __name__ == "__main__":
    main()
