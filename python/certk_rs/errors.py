"""The one exception of the package; Rust raises this same class. And how to get other packages."""

from __future__ import annotations

import os

# The extras of pyproject.toml. Their packages are named, since certk-rs is in no index as yet, and
# `pip install 'certk-rs[torch]'` would fetch nothing, or somebody else's.
_EXTRAS = {
    "torch": ("torch>=2.6",),
    "transformers": ("torch>=2.6", "transformers>=5"),
    "kvpress": ("torch>=2.6", "kvpress>=0.5.5", "transformers>=4.57,<5.3"),
    "ray": ("ray>=2.40",),
    "remote": ("fsspec>=2024.6", "s3fs>=2024.6"),
    "plot": ("matplotlib>=3.9",),
    "export": ("pyarrow>=15",),
    "pandas": ("pandas>=2.1",),
}


def pip_install(extra: str) -> str:
    """Return the command that installs an extra, from a clone or without one."""
    return f"pip install {' '.join(repr(package) for package in _EXTRAS[extra])}"


def one_line(error: BaseException) -> str:
    """Return the message of a foreign exception as one line, or its class if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def told(error: BaseException) -> str:
    """Return an exception as one line: of the system's, the file and the reason."""
    if not isinstance(error, OSError):
        return one_line(error)
    place = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
    return f"{place}{error.strerror or one_line(error)}"


class CertkError(ValueError):
    """Bad input, or a file that is not what it should be.

    The message is one line that names the argument, the place (full multi-index of the row or
    entry) and the remedy. Nothing has been written when it is raised. Picklable.
    """
