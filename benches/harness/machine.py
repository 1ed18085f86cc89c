"""The machine, versions and command of a table."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import certk_rs as ck

from . import levels

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("certk-rs", "numpy", "torch", "transformers", "scipy", "onnx", "onnxruntime")
# Commits of x86-simd-sort in NumPy's releases, from its git; NumPy itself does not tell.
SORTS = dict.fromkeys(("2.4.3", "2.4.4", "2.4.5", "2.4.6", "2.5.0", "2.5.1"), "5adb33411f3c")
FLAGS = re.compile(r"^(sse4_2|avx.*|fma|f16c|bmi2|asimd.*|sve.*)$")


def _output(*command: str) -> str | None:
    """Return the output of a command, or None if it cannot run."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpuinfo() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def cpu() -> str:
    """The CPU's name, with family and model where the system tells them."""
    info = _cpuinfo()
    name = info.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in info:
        name += f" (family {info['cpu family']}, model {info.get('model', '?')})"
    return name


def cpu_slug() -> str:
    """The CPU's name as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", cpu().lower()).strip("-")


def cores() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load() -> str:
    """The three load averages; empty where there are none."""
    return " ".join(f"{one:.2f}" for one in os.getloadavg()) if hasattr(os, "getloadavg") else ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ck.__version__ if package == "certk-rs" else "not installed"


def commit() -> str:
    """The commit of the checkout, and whether anything but what a run writes differs."""
    head = _output("git", "rev-parse", "--short=12", "HEAD")
    if head is None:
        return "unknown"
    made_here = (":!benches/results", ":!docs/figures/growth.png")
    changed = _output("git", "status", "--porcelain", "--", ".", *made_here)
    return f"{head}, {'with changes' if changed else 'clean'}"


def describe() -> dict[str, str]:
    """Everything that a reader of the figures should know, in order."""
    import torch

    info = _cpuinfo()
    sets = [
        flag for flag in info.get("flags", info.get("Features", "")).split() if FLAGS.match(flag)
    ]
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", f"benches/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "commit": commit(),
        "cpu": cpu(),
        "cores": str(cores()),
        "instruction sets": " ".join(sets) or "unknown",
        "level of certk_rs": f"{levels.BEST}; lower: {levels.SECOND}",
        "level of torch": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "x86-simd-sort": f"{SORTS.get(_version('numpy'), 'that of numpy')}, in numpy",
        "rustc": _output("rustc", "--version") or "unknown",
        "real rows": "examples/data" + (" and CERTK_DATA" if os.environ.get("CERTK_DATA") else ""),
        "load average at the start": load(),
    }
