"""The options that only `certk prune` has."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from .quantities import AT_LEAST_ONE, BUDGETS, MAX_KEEP, NUMBER, SIZE


class SetPer(str, Enum):
    """One keep-set per kv head, per layer, or one for all layers."""

    head = "head"
    layer = "layer"
    token = "token"


class Proof(str, Enum):
    """How much of the proof is written."""

    auto = "auto"
    full = "full"
    compact = "compact"
    none = "none"


class Guard(str, Enum):
    """What is remembered of the dropped keys."""

    none = "none"
    codes = "codes"


class EngineName(str, Enum):
    """Where the work is done."""

    local = "local"
    ray = "ray"


class UnitName(str, Enum):
    """What one unit of work is."""

    auto = "auto"
    layer = "layer"
    head = "head"


EpsRule = Annotated[
    str | None,
    typer.Option(
        "--eps",
        parser=BUDGETS,
        metavar="EPS|RULE|FILE",
        help="Tail mass that a row may lose, 0 <= eps < 1; by layer: '0-3=0.01,*=0.05', or a "
        ".json file with such an object.",
    ),
]
Size = Annotated[
    str | None,
    typer.Option(
        "--size",
        parser=MAX_KEEP,
        metavar="N|F",
        help="Instead of --eps: keep at most N keys of a file, or a fraction F, so distributed "
        "that the worst tail mass is least.",
    ),
]
Hot = Annotated[
    str | None,
    typer.Option(
        "--hot",
        parser=MAX_KEEP,
        metavar="N|F",
        help="With --eps and --guard: keep N keys of a file, or a fraction F, those that queries "
        "need most often; eps is what later ones may lose with recall.",
    ),
]
SizeBytes = Annotated[
    int | None,
    typer.Option(
        "--bytes", parser=SIZE, metavar="SIZE", help="Instead of --eps: the bytes of an output."
    ),
]
OutTol = Annotated[
    float | None,
    typer.Option(
        "--out-tol",
        parser=NUMBER,
        metavar="X",
        help="Instead of --eps: the Euclidean error that a row's output may get.",
    ),
]
OneSetPer = Annotated[
    SetPer, typer.Option(metavar="KIND", help="One set per head, per layer, or per file (token).")
]
BlockSize = Annotated[
    int, typer.Option(parser=AT_LEAST_ONE, metavar="N", help="Keep whole blocks of N positions.")
]
Coverage = Annotated[
    float,
    typer.Option(
        parser=NUMBER,
        metavar="F",
        help="Share of the rows that must be within the budget, in (0, 1].",
    ),
]
Holdout = Annotated[
    float,
    typer.Option(
        parser=NUMBER,
        metavar="F",
        help="First try sets on a share of the queries that they were made without; what is "
        "written is then made for all queries.",
    ),
]
ProofKind = Annotated[
    Proof,
    typer.Option(
        metavar="KIND",
        help="How much proof is written: full (every row), compact, none, or auto: full where "
        "that is at most 2 % of the cache.",
    ),
]
GuardKind = Annotated[
    Guard,
    typer.Option(
        metavar="KIND",
        help="What is remembered of dropped keys, to prove what later queries lose: codes (a byte "
        "an entry), or none.",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an interrupted job.")]
SkipExisting = Annotated[
    bool, typer.Option("--skip-existing", help="Leave outputs that exist, and do the others.")
]
Force = Annotated[
    bool, typer.Option("--force", help="Replace outputs that exist, but never an input.")
]
FailFast = Annotated[bool, typer.Option("--fail-fast", help="End at the first bad input.")]
Shard = Annotated[
    str | None,
    typer.Option(metavar="I/N", help="Take every N-th input, from the I-th on: one of N jobs."),
]
Strict = Annotated[bool, typer.Option("--strict", help="Exit code 1 if any row is over eps.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Tell what it would cost and save; write nothing.")
]
WhichEngine = Annotated[
    EngineName, typer.Option(metavar="NAME", help="Where the work is done: local or ray.")
]
Address = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="Of the Ray cluster; default: a local one.")
]
HowManyJobs = Annotated[
    int | None,
    typer.Option("--jobs", parser=AT_LEAST_ONE, metavar="N", help="Units under way at a time."),
]
UnitKind = Annotated[
    UnitName,
    typer.Option("--unit", metavar="KIND", help="A unit of work: a layer, a head, or auto."),
]
