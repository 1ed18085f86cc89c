"""The example cache, which comes with the package."""

from __future__ import annotations

from pathlib import Path

from ..errors import CertkError

_EXAMPLE = Path("_data") / "minilm_small.safetensors"


def example() -> Path:
    """Return the example, as a path from here where it lies below."""
    here, found = Path.cwd(), Path(__file__).resolve().parents[1] / _EXAMPLE
    if not found.is_file():
        raise CertkError(
            f"{found} is missing from this installation: install certk-rs anew, or give a cache of "
            "your own with --data FILE"
        )
    return found.relative_to(here) if found.is_relative_to(here) else found
