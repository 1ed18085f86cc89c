"""Try the wheels of a folder: what every one holds, and the one for this machine, installed.

    python tests/install/try_wheel.py dist/

The last happens outside the repository: once with NumPy alone beside it, once with what it
depends on, which pip gets from the index that it is configured for.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from clean_machine import ROOT, Clean

sys.path.insert(0, str(ROOT / "packaging"))
import private_paths
from wheels import MOST_BYTES, PYTHONS

# Of manylinux2014.
GLIBC = (2, 17)
# Milliseconds of `import certk_rs` beyond `import numpy`.
MOST_MS = 150
RUNS = 11

ALONE = """
import sys, numpy
before = {name.partition('.')[0] for name in sys.modules}
import certk_rs as ck
more = {name.partition('.')[0] for name in sys.modules} - before - set(sys.stdlib_module_names)
assert more == {'certk_rs'}, more
for name in ('typer', 'rich'):
    try:
        __import__(name)
    except ImportError:
        continue
    raise SystemExit(f'{name} is there')
rows = numpy.random.default_rng(0).standard_normal((40, 3000)).astype(numpy.float32)
sel = ck.select(rows, 0.01)
assert (sel.tail_mass_upper <= 0.01).all() and (sel.k < 3000).all()
print(ck.__version__, ck.simd_level())
"""


def main() -> None:
    """Try all wheels of the folders given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        sys.exit(f"{folder} has no wheel: make wheels")
    for wheel in wheels:
        holds(wheel)
    with tempfile.TemporaryDirectory(prefix="certk-wheel-") as made:
        # With the links of macOS followed, or paths would differ.
        place = Path(made).resolve()
        (place / "alone").mkdir()
        (place / "whole").mkdir()
        alone = Clean(place / "alone", "numpy>=1.26")
        own = next((wheel for wheel in wheels if alone.takes(wheel)), None)
        if own is None:
            sys.exit(f"none of {[w.name for w in wheels]} is for this machine")
        alone.install("--no-deps", str(own))
        print(f"{own.name}: {alone.run('python', '-c', ALONE).strip()}, with NumPy alone")
        import_time(alone)
        commands(Clean(place / "whole", str(own)))


def holds(wheel: Path) -> None:
    """See that a wheel holds what it should, and nothing else."""
    size = wheel.stat().st_size
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        compiled = [name for name in names if re.search(r"_native\.([\w-]+\.)?(so|pyd)$", name)]
        assert len(compiled) == 1, compiled
        binary = archive.read(compiled[0])
        bills = [name for name in names if re.search(r"\.dist-info/sboms/.*\.json$", name)]
        crates = {
            each["name"] for bill in bills for each in json.loads(archive.read(bill))["components"]
        }
    assert {"certk-rs", "pyo3", "mimalloc", "rayon"} <= crates, crates
    outside = {n for n in names if not re.match(r"certk_rs/|certk_rs-[\d.]+\.dist-info/", n)}
    assert not outside, outside
    for text in ("LICENSE-MIT", "LICENSE-APACHE"):
        assert any(n.endswith(f".dist-info/licenses/{text}") for n in names), text
    assert {"certk_rs/py.typed", "certk_rs/_data/minilm_small.safetensors"} <= set(names)
    assert not [n for n in names if "__pycache__" in n]
    assert any(f"-{tags}-" in wheel.name for tags in PYTHONS), wheel.name
    told = private_paths.found(wheel, ROOT)
    assert not told, told
    assert size <= MOST_BYTES, f"{wheel.name} has {size} bytes"
    line = (
        f"{wheel.name}: {size / 1e6:.2f} MB ({len(binary) / 1e6:.2f} MB of machine code unpacked)"
    )
    if "manylinux" in wheel.name:
        # Names of versions stand in a table of strings; no other string looks like one.
        needed = {
            tuple(map(int, v.split(b"."))) for v in re.findall(rb"GLIBC_(\d+(?:\.\d+)+)\0", binary)
        }
        assert needed
        assert max(needed) <= GLIBC, sorted(needed)
        line += f", glibc {'.'.join(map(str, max(needed)))}"
    print(line)


def import_time(where: Clean) -> None:
    """Measure what the package adds to the import of NumPy, by turns.

    The time that the processor worked is judged: the clock also sees what else the machine does.
    """
    clock: dict[str, list[float]] = {"numpy": [], "numpy, certk_rs": []}
    worked: dict[str, list[float]] = {"numpy": [], "numpy, certk_rs": []}
    for round_ in range(RUNS + 1):
        for names in clock:
            code = f"import {names}, time; print(time.process_time())"
            start = time.perf_counter()
            told = where.run("python", "-c", code)
            if round_:  # the first one writes byte code
                clock[names].append(1000 * (time.perf_counter() - start))
                worked[names].append(1000 * float(told))
    for how, times in (("by the clock", clock), ("of the processor", worked)):
        alone, both = (statistics.median(held) for held in times.values())
        apart = sorted(b - a for a, b in zip(*times.values(), strict=True))
        print(
            f"import: {both - alone:.0f} ms {how} beyond NumPy's {alone:.0f} ms (medians of {RUNS} "
            f"runs by turns; pairs differ by {apart[0]:.0f} to {apart[-1]:.0f} ms)"
        )
    assert both - alone <= MOST_MS


def commands(where: Clean) -> None:
    """Run the command line, on the cache that comes with the package."""
    where.run("certk", "--help")
    where.run("certk", "demo")
    code = "import certk_rs, pathlib; print(pathlib.Path(certk_rs.__file__).parent / '_data')"
    cache = str(Path(where.run("python", "-c", code).strip()) / "minilm_small.safetensors")
    assert str(ROOT) not in cache
    where.run("certk", "prune", cache, "-o", "pruned", "--eps", "0.05")
    said = json.loads(where.run("certk", "verify", "pruned", "--against", cache, "--json"))
    assert said["holds"] is True, said
    print("certk demo, prune, verify: as they should")


if __name__ == "__main__":
    main()
