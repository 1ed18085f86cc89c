"""Results as JSON files: whole under their name, or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from .location import Location, locate
from .new_file import write_text


def write_json(
    place: str | os.PathLike[str] | Location, body: Mapping[str, Any], *, replace: bool = False
) -> None:
    """Write an object of plain values, indented, in ASCII.

    Raises:
        CertkError: The name is taken and not to be replaced.
        OSError: The system refuses.
    """
    write_text(locate(place), json.dumps(body, indent=1, allow_nan=False) + "\n", replace=replace)
