"""`certk reproduce`: the experiments of the papers."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from ..errors import CertkError
from .example import example
from .options import Argument, Option, read_text
from .terminal import print_json, progress_bar, say, warn

OPTIONS = {
    "out": Option("-o", "--out", metavar="DIR", help="Where the page and tables go."),
    "experiments": Argument(metavar="NAME", help="Some experiments only."),
    "data": Option(metavar="FILE", help="A cache file with the real rows; default: the example."),
    "model": Option(
        metavar="DIR", help="A saved model of transformers, with tokenizer, for real rows."
    ),
    "texts": Option(
        "--text", metavar="FILE", help="What the model reads, in UTF-8; may be repeated."
    ),
    "brief": Option("--brief", help="Small sizes: minutes become seconds."),
    "seed": Option(metavar="N", min=0, help="Of all random numbers."),
    "force": Option("--force", help="Replace the tables of earlier runs of the same name."),
}


def reproduce(
    out: Path,
    experiments: list[str] | None = None,
    data: Path | None = None,
    model: Path | None = None,
    texts: list[Path] | None = None,
    brief: bool = False,
    seed: int = 0,
    force: bool = False,
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """Run the experiments of the papers.

    Each writes a JSON table and a plot, and all of them one HTML page, which shows all tables in
    DIR, those of earlier runs included. Real rows are those of a cache, or of a local model over
    texts (default: the text of a licence). Nothing is downloaded.
    """
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
        print_json({"out": str(out), "experiments": done})
    else:
        for entry in done:
            say(f"{entry['name']}: {entry['seen']}")
        say(f"written to {out / 'index.html'}")
    return 0
