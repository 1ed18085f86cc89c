"""The example cache of the repository."""

from __future__ import annotations

from pathlib import Path

from ..errors import CertkError

_EXAMPLE = Path("examples") / "data" / "minilm_small.safetensors"


def example() -> Path:
    """The example of the repository, from its root or from anywhere in a checkout."""
    here = Path.cwd()
    roots = [here, *here.parents, *Path(__file__).resolve().parents]
    for root in roots:
        if (root / _EXAMPLE).is_file():
            found = root / _EXAMPLE
            return found.relative_to(here) if found.is_relative_to(here) else found
    raise CertkError(
        f"{_EXAMPLE} was not found: run certk demo inside a checkout of the repository, or give a "
        "cache of your own with --data FILE"
    )
