"""Environments outside the repository, in which a wheel is tried."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Clean:
    """A virtual environment in a folder of its own, which knows nothing of the repository."""

    def __init__(self, folder: Path, *installed: str) -> None:
        self.folder = folder
        venv.create(folder / "venv", with_pip=True)
        self.bin = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
        if installed:
            self.install(*installed)

    def install(self, *arguments: str) -> None:
        """Have pip install something."""
        self.run("python", "-m", "pip", "install", "--quiet", *arguments)

    def takes(self, wheel: Path) -> bool:
        """Return True if pip would install a wheel here."""
        command = [str(self.bin / "python"), "-m", "pip", "install", "--quiet", "--dry-run"]
        command += ["--no-deps", "--no-index", str(wheel)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def run(self, program: str, *arguments: str) -> str:
        """Run a program of the environment and return its output; a failure ends this process."""
        suffix = ".exe" if os.name == "nt" else ""
        return run([str(self.bin / (program + suffix)), *arguments], self.folder)


def run(command: list[str], folder: Path, **variables: str) -> str:
    """Run a command in a folder and return its output; an exit code but 0 ends this process."""
    held = {
        k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "CERTK"))
    }
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, encoding="utf-8", check=False,
        env={**held, "PYTHONUTF8": "1", **variables},
    )  # fmt: skip
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout
