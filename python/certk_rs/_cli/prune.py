"""`certk prune`: saved KV caches made smaller, with certificates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..cache_format import Options
from ..jobs.plan import make_plan
from ..jobs.report import report_json
from ..jobs.run import run
from .options import (
    AsJson,
    Caches,
    Eps,
    Granularity,
    Job,
    KeepFirst,
    KeepLast,
    MaxKeep,
    Names,
    OneSetPer,
    Quiet,
    Threads,
    read_max_keep,
)
from .terminal import print_json, progress_bar, round_up, say, warn


def prune(
    caches: Caches,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="OUT", help="Output directory.")],
    eps: Eps,
    granularity: OneSetPer = Granularity.head,
    max_keep: MaxKeep = None,
    keep_first: KeepFirst = 0,
    keep_last: KeepLast = 0,
    names: Names = None,
    threads: Threads = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Job:
    """Prune saved KV caches, with certificates.

    Every query in a file loses at most eps of its attention mass, and the output says how much: the
    certificate is in the same file. One keep-set serves all queries of a kv head (or of a layer).
    """

    def job() -> int:
        options = Options(granularity.value, read_max_keep(max_keep), keep_first, keep_last)
        with progress_bar(quiet) as progress:
            plan = make_plan(caches, out, eps, options, names, progress)
            for warning in (text for task in plan.tasks for text in task.warnings):
                warn(warning)
            results = run(plan, progress, threads)
        outputs = [report_json(result) for result in results]
        for output in outputs:
            if over := output["rows_over_budget"]:
                warn(
                    f"{output['output']}: {over} of {output['rows']} rows are over eps because of "
                    f"--max-keep, the worst loses {round_up(output['worst_tail_mass'])}"
                )
        if as_json:
            print_json({"command": "prune", "eps": eps, "outputs": outputs})
            return 0
        for output in outputs:
            kept, total = output["kept"], output["total"]
            say(
                f"{output['output']}: kept {kept} of {total} keys ({100 * kept / total:.1f} %; at "
                f"least {output['lower_bound']} are needed), worst tail mass "
                f"{round_up(output['worst_tail_mass'])} of {output['rows']} rows"
            )
        return 0

    return job
