"""The local engine: the tasks of a plan one after the other, in this process."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

from .plan import Plan, Progress, counting
from .prune import prune
from .report import TaskReport, layer_report


def run(
    plan: Plan, progress: Progress | None = None, threads: int | None = None
) -> list[TaskReport]:
    """Do the job. `plan.out` is made if need be, and removed again if nothing came of it.

    Outputs that were finished before a failure or Ctrl-C stay; nothing else does.
    """
    made: list[Path] = []
    try:
        _make_directories(plan.out, made)
        return [_one(plan, number, progress, threads) for number in range(len(plan.tasks))]
    except BaseException:
        for directory in reversed(made):
            with contextlib.suppress(OSError):  # not empty: it holds a finished output
                directory.rmdir()
        raise


def _one(plan: Plan, number: int, progress: Progress | None, threads: int | None) -> TaskReport:
    task = plan.tasks[number]
    label = f"pruning {task.source.name} ({number + 1} of {len(plan.tasks)})"
    step = partial(counting(progress, 2 * task.layers), label, 1)
    chosen = prune(task, plan, step, threads)
    return TaskReport(task, tuple(layer_report(sets, plan.eps) for sets in chosen))


def _make_directories(path: Path, made: list[Path]) -> None:
    """Make a directory and its missing parents, and list what was made."""
    if not path.exists():
        _make_directories(path.parent, made)
        with contextlib.suppress(FileExistsError):  # somebody else was faster
            path.mkdir()
            made.append(path)
