"""`certk reproduce`: the experiments of the papers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .._display.page import pyplot
from .example import example
from .options import AsJson, CacheFile, Job, Quiet
from .terminal import print_json, progress_bar, say, warn


def reproduce(
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="DIR", help="Where the page and tables go.")
    ],
    experiments: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Some experiments only.")
    ] = None,
    data: CacheFile = None,
    brief: Annotated[
        bool, typer.Option("--brief", help="Small sizes: minutes become seconds.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of all random numbers.")] = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Job:
    """Run the experiments of the papers: a JSON table and a plot each, and one HTML page."""

    def job() -> int:
        # The one command with so much behind it that the others should not have to load it.
        from ..reproduce import Settings, run_experiments

        pyplot()
        settings = Settings(example() if data is None else data, brief, seed)
        with progress_bar(quiet) as progress:
            done = run_experiments(out, experiments or [], settings, progress, warn)
        if as_json:
            print_json({"command": "reproduce", "out": str(out), "experiments": done})
        else:
            for entry in done:
                say(f"{entry['name']}: {entry['seen']}")
            say(f"written to {out / 'index.html'}")
        return 0

    return job
