"""`certk capture`: the queries, keys and values of a local model over a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import CertkError
from .options import AT_LEAST_ONE, AsJson, Job, need_new, read_text
from .terminal import print_json, say


def capture(
    model: Annotated[
        Path,
        typer.Option(
            "--model", metavar="DIR", help="A saved model of transformers, with tokenizer."
        ),
    ],
    text: Annotated[
        Path, typer.Option("--text", metavar="FILE", help="A text file in UTF-8, one sequence.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="CACHE", help="The cache file.")],
    max_tokens: Annotated[
        int | None,
        typer.Option(parser=AT_LEAST_ONE, metavar="N", help="Cut the text after N tokens."),
    ] = None,
    queries: Annotated[
        int | None,
        typer.Option(parser=AT_LEAST_ONE, metavar="N", help="Write the last N queries only."),
    ] = None,
    as_json: AsJson = False,
) -> Job:
    """Write queries, keys and values of a local model over a text.

    Each layer is written as it runs. Nothing is downloaded. Needs torch and transformers.
    """

    def job() -> int:
        need_new(out)
        written = read_text(text)
        try:
            from ..transformers import capture_text
        except ImportError as error:
            raise CertkError(f"certk capture cannot run: {error}") from None
        found = capture_text(model, written, out, max_tokens=max_tokens, queries=queries)
        if as_json:
            print_json({"command": "capture", "output": str(out), **found})
        else:
            layers = len(found["layers"])
            say(f"{out}: {layers} layers of {found['tokens']} tokens, {found['dtype']}")
        return 0

    return job
