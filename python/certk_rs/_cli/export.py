"""`certk export`: a cache file as another program stores it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from .options import Argument, Option, need_new
from .terminal import print_json, say

OPTIONS = {
    "form": Argument(metavar="FORMAT", help="mlx: a prompt cache of mlx-lm 0.32."),
    "source": Argument(metavar="CACHE", help="A cache file, with or without queries."),
    "out": Option("-o", "--out", metavar="FILE", help="The file."),
}


def export(
    form: Literal["mlx"],
    source: str,
    out: Path,
    names: str | None = None,
    layout: str | None = None,
    as_json: bool = False,
) -> int:
    """Write a cache file as another program stores it.

    All keys and values are written. Outputs of prune are refused, since other programs count
    positions by the keys that they hold.
    """
    from .._foreign.convert import export_cache

    need_new(out)
    layers, keys = export_cache(form, source, out, names, layout)
    if as_json:
        print_json({"output": str(out), "format": form, "layers": layers, "keys": keys})
    else:
        say(f"{out}: {layers} layers of {keys} keys, for {form}")
    return 0
