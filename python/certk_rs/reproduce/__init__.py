"""The experiments of the two papers, run anew, and more: `certk reproduce -o DIR [NAME...]`.

Each experiment is a module with a `NAME`, a `TITLE`, a function `run` that measures and hands back
plain data (what JSON can hold; "seen" says in sentences what came out, "about" where real rows are
from, and "notes" has what the page says more), and functions `plots` and `tables` that show such
data. So the page is drawn from the tables in DIR, those of earlier runs included, and no figure on
it was stored beforehand.

To add one: a module here with what `settings.Experiment` asks for, and its name in EXPERIMENTS.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .. import __version__
from .._display.page import Section, page
from .._files.atomic import write_text
from ..errors import CertkError, pip_install
from . import (
    bert_table,
    certified_attention,
    gap_rules,
    gaussian_rule,
    identity,
    key_search,
    output_error,
    power_windows,
    rounding,
    sampling,
)
from .captures import settings_of_model
from .settings import Experiment, Progress, Settings, check_data

__all__ = ["Settings", "run_experiments", "settings_of_model"]

EXPERIMENTS: tuple[Experiment, ...] = (
    gaussian_rule,
    bert_table,
    identity,
    gap_rules,
    output_error,
    power_windows,
    sampling,
    rounding,
    key_search,
    certified_attention,
)
_FORMAT = "certk reproduce 2"


def run_experiments(
    out: Path,
    names: Sequence[str],
    settings: Settings,
    progress: Progress | None = None,
    warn: Callable[[str], None] = lambda _: None,
    replace: bool = False,
) -> list[dict[str, Any]]:
    """Run experiments by name, all if none is named, and write tables and the page into `out`.

    The page shows all tables in `out`, those of earlier runs included, and is drawn anew. Tables of
    earlier runs are replaced if `replace` says so; anything else in `out` is left alone. If none is
    named, those whose packages are not installed are left out, and `warn` is told.

    Raises:
        CertkError: For an unknown name, a missing package, an `out` that holds another index.html,
            or a table of an earlier run that is not to be replaced.
    """
    known = {experiment.NAME: experiment for experiment in EXPERIMENTS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise CertkError(f"there is no experiment {unknown[0]!r}: there are {', '.join(known)}")
    index = out / "index.html"
    if index.exists() and _FORMAT not in index.read_text(encoding="utf-8", errors="replace"):
        raise CertkError(f"{index} is not a page of certk reproduce: choose another directory")
    chosen = [known[name] for name in dict.fromkeys(names)] or list(EXPERIMENTS)
    for experiment in list(chosen):
        needs = () if settings.given else experiment.NEEDS
        missing = [module for module in needs if find_spec(module) is None]
        if missing:
            what = (
                f"{experiment.NAME} needs {', '.join(missing)}, not installed here: "
                f"{pip_install('reproduce')}"
            )
            if names:
                raise CertkError(what)
            warn(f"left out: {what}")
            chosen.remove(experiment)
    check_data(settings.data)
    if out.exists() and not out.is_dir():
        raise CertkError(f"{out} is not a directory: choose another one")
    for experiment in EXPERIMENTS:
        if experiment not in chosen:
            _table(out, experiment)
    if not replace:
        _need_none(out, chosen)
    out.mkdir(parents=True, exist_ok=True)
    done = []
    for i, experiment in enumerate(chosen):
        start = time.monotonic()

        def tell(share: float, i: int = i, name: str = experiment.NAME) -> None:
            if progress is not None:
                progress(name, round(1000 * (i + share)), 1000 * len(chosen))

        tell(0.0)
        data = experiment.run(settings, tell)
        body = {
            "format": _FORMAT,
            "library": __version__,
            "name": experiment.NAME,
            "brief": settings.brief,
            "seed": settings.seed,
            "seconds": round(time.monotonic() - start, 1),
            "data": data,
        }
        table = json.dumps(body, indent=1) + "\n"
        write_text(out / f"{experiment.NAME}.json", table, replace=replace)
        done.append({"name": experiment.NAME, "seen": _seen(data), "seconds": body["seconds"]})
        write_text(index, _page(out), replace=True)
    return done


def _seen(data: dict[str, Any]) -> str:
    """What came out, in sentences: first what would come out anywhere, then the times."""
    timing = data.get("timing")
    return data["seen"] if timing is None else f"{data['seen']} {timing['seen']}"


def _need_none(out: Path, chosen: Sequence[Experiment]) -> None:
    """Refuse to run for minutes what could not be written then."""
    taken = [one.NAME for one in chosen if os.path.lexists(out / f"{one.NAME}.json")]
    if taken:
        others = f" (and {len(taken) - 1} more)" if len(taken) > 1 else ""
        raise CertkError(
            f"{out / taken[0]}.json exists already{others}: nothing is overwritten; name other "
            "experiments, choose another directory, or replace with --force"
        )


def _table(out: Path, experiment: Experiment) -> dict[str, Any] | None:
    """What an experiment has left in a directory, now or in an earlier run; None if nothing."""
    path = out / f"{experiment.NAME}.json"
    if not path.exists():
        return None
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        body = None
    if not isinstance(body, dict) or body.get("format") != _FORMAT:
        raise CertkError(f"{path} is not a table of certk reproduce: remove it")
    return body


def _page(out: Path) -> str:
    """The page of all tables in a directory."""
    sections = []
    for experiment in EXPERIMENTS:
        body = _table(out, experiment)
        if body is None:
            continue
        try:
            data = body["data"]
            brief = " Brief run: small sizes." if body["brief"] else ""
            about = [data["about"]] if "about" in data else []
            text = [experiment.ABOUT, *about, _seen(data) + brief, *data.get("notes", [])]
            plots, tables = experiment.plots(data), experiment.tables(data)
            section = Section(experiment.TITLE, text, plots, tables, experiment.NAME)
        except Exception as error:  # whatever drawing makes of the tables of an earlier run
            what = " ".join(f"{type(error).__name__}: {error}".split())
            path = out / f"{experiment.NAME}.json"
            raise CertkError(f"{path} cannot be shown ({what}): remove it") from error
        sections.append(section)
    lead = (
        "Top-k sparse attention keeps the keys of largest weight. Two papers say how many are "
        "needed and what is lost (arXiv 2512.07647 and 2404.02690); here their experiments are run "
        "again, and their searches and certified attention are measured, every figure computed on "
        "this machine. Cells of 16 consecutive keys, boxes, codes, Monte-Carlo sampling, rounding "
        "and certified attention are ours and in neither paper. What is said of the second paper "
        "rests on a summary; its first version has another title, other authors and other theorems "
        "than the later ones."
    )
    return page("certk reproduce", lead, sections, f"{_FORMAT}; certk_rs {__version__}")
