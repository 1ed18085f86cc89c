"""`certk reproduce`: the experiments of the papers."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from ..errors import CertkError
from .example import example
from .options import COUNT, AsJson, Job, Quiet, read_text
from .terminal import print_json, progress_bar, say, warn


def reproduce(
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="DIR", help="Where the page and tables go.")
    ],
    experiments: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Some experiments only.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A cache file with the real rows; default: the example."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="A saved model of transformers, with tokenizer, for real rows."
        ),
    ] = None,
    texts: Annotated[
        list[Path] | None,
        typer.Option(
            "--text", metavar="FILE", help="What the model reads, in UTF-8; may be repeated."
        ),
    ] = None,
    brief: Annotated[
        bool, typer.Option("--brief", help="Small sizes: minutes become seconds.")
    ] = False,
    seed: Annotated[
        int, typer.Option(parser=COUNT, metavar="N", help="Of all random numbers.")
    ] = 0,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the tables of earlier runs of the same name.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Job:
    """Run the experiments of the papers.

    Each writes a JSON table and a plot, and all of them one HTML page, which shows all tables in
    DIR, those of earlier runs included. Real rows are those of a cache, or of a local model over
    texts (default: the text of a licence). Nothing is downloaded.
    """

    def job() -> int:
        from .._display.page import pyplot
        from ..reproduce import Settings, run_experiments, settings_of_model

        pyplot()
        if model is not None and data is not None:
            raise CertkError("give --data or --model, not both: each says where real rows are from")
        if texts and model is None:
            raise CertkError("--text is what a model reads: give --model DIR, too")
        with ExitStack() as stack:
            if model is not None:
                read = [read_text(path) for path in texts or ()]
                settings = stack.enter_context(settings_of_model(model, read, brief, seed))
            else:
                settings = Settings(data or example(), brief, seed, given=data is not None)
            progress = stack.enter_context(progress_bar(quiet))
            done = run_experiments(out, experiments or [], settings, progress, warn, replace=force)
        if as_json:
            print_json({"command": "reproduce", "out": str(out), "experiments": done})
        else:
            for entry in done:
                say(f"{entry['name']}: {entry['seen']}")
            say(f"written to {out / 'index.html'}")
        return 0

    return job
