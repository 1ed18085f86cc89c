"""`certk capture`: the queries, keys and values of a local model over a text."""

from __future__ import annotations

from pathlib import Path

from ..errors import CertkError
from .options import Option, need_new, read_text
from .terminal import print_json, say

OPTIONS = {
    "model": Option(metavar="DIR", help="A saved model of transformers, with tokenizer."),
    "text": Option(metavar="FILE", help="A text file in UTF-8, one sequence."),
    "out": Option("-o", "--out", metavar="CACHE", help="The cache file."),
    "max_tokens": Option(metavar="N", min=1, help="Cut the text after N tokens."),
    "queries": Option(metavar="N", min=1, help="Write the last N queries only."),
}


def capture(
    model: Path,
    text: Path,
    out: Path,
    max_tokens: int | None = None,
    queries: int | None = None,
    as_json: bool = False,
) -> int:
    """Write queries, keys and values of a local model over a text.

    Each layer is written as it runs. Nothing is downloaded. Needs torch and transformers.
    """
    need_new(out)
    written = read_text(text)
    try:
        from ..transformers import capture_text
    except ImportError as error:
        raise CertkError(f"certk capture cannot run: {error}") from None
    found = capture_text(model, written, out, max_tokens=max_tokens, queries=queries)
    if as_json:
        print_json({"output": str(out), **found})
    else:
        layers = len(found["layers"])
        say(f"{out}: {layers} layers of {found['tokens']} tokens, {found['dtype']}")
    return 0
