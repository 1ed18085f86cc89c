"""`certk select`: the fewest keys of every row of scores."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import CertkError
from .options import (
    AT_LEAST_ONE,
    COUNT,
    NUMBER,
    WHOLE,
    AsJson,
    Eps,
    Job,
    KeepFirst,
    KeepLast,
    MaxKeep,
    Quiet,
    Threads,
    need_new,
    read_max_keep,
)
from .terminal import print_json, say, warn

if TYPE_CHECKING:
    from ..results import Selection


class Kind(str, Enum):
    """What scores are."""

    logits = "logits"
    logprobs = "logprobs"
    probs = "probs"


def select(
    scores: Annotated[Path, typer.Argument(metavar="SCORES", help="A .npy or .npz file (..., n).")],
    eps: Eps,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="Write the selection (.npz).")
    ] = None,
    array: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which array of an .npz with several.")
    ] = None,
    kind: Annotated[Kind, typer.Option(help="What the scores are.")] = Kind.logits,
    scale: Annotated[
        float, typer.Option(parser=NUMBER, metavar="X", help="Multiplies the scores.")
    ] = 1.0,
    mask: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Boolean or additive mask (.npy).")
    ] = None,
    lengths: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Valid prefix of each row (.npy).")
    ] = None,
    indptr: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Row starts of ragged flat scores (.npy).")
    ] = None,
    causal_offset: Annotated[
        int | None, typer.Option(parser=WHOLE, metavar="N", help="Row i sees the keys <= i + N.")
    ] = None,
    min_keep: Annotated[
        int, typer.Option(parser=COUNT, metavar="N", help="Keep at least N keys.")
    ] = 1,
    max_keep: MaxKeep = None,
    keep_first: KeepFirst = 0,
    keep_last: KeepLast = 0,
    block_size: Annotated[
        int, typer.Option(parser=AT_LEAST_ONE, metavar="N", help="Keep whole blocks of N keys.")
    ] = 1,
    prove_minimal: Annotated[
        bool, typer.Option("--prove-minimal", help="Decide open rows again in float64.")
    ] = False,
    threads: Threads = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Job:
    """Select the fewest keys of every row of scores.

    What is dropped of a row is proven to weigh at most eps of its softmax mass.
    """

    def job() -> int:
        from .._files.npy import read_array
        from ..results import Status
        from ..selection import select as select_rows

        if out is not None:
            need_new(out)
            _need_npz(out)
        selection = select_rows(
            read_array(scores, array),
            eps,
            kind=kind.value,
            scale=scale,
            mask=None if mask is None else read_array(mask),
            lengths=None if lengths is None else read_array(lengths),
            indptr=None if indptr is None else read_array(indptr),
            causal_offset=causal_offset,
            min_keep=min_keep,
            max_keep=read_max_keep(max_keep),
            keep_first=keep_first,
            keep_last=keep_last,
            block_size=block_size,
            prove_minimal=prove_minimal,
            threads=threads,
        )
        if out is not None:
            selection._write(out, replace=False)
        over = int((selection.status == Status.OVER_BUDGET).sum())
        if over:
            warn(f"{over} of {selection.k.size} rows are over eps because of --max-keep")
        if as_json:
            print_json(_selection_json(selection, scores, eps, out))
        else:
            for line in selection.summary().splitlines():
                say(line)
            if out is not None:
                say(f"written to {out}")
        return 0

    return job


def _need_npz(out: Path) -> None:
    """Refuse a name that says something else than what would be in the file."""
    if not out.name.lower().endswith(".npz"):
        raise CertkError(
            f"{out}: a selection is several arrays, which are written as .npz: call it "
            f"{out.stem}.npz"
        )


def _selection_json(
    selection: Selection, scores: Path, eps: float, out: Path | None
) -> dict[str, Any]:
    from ..results import Status

    return {
        "command": "select",
        "scores": str(scores),
        "output": None if out is None else str(out),
        "shape": list(selection.shape),
        "eps": eps,
        "rows": selection.k.size,
        "kept": int(selection.k.sum()),
        "worst_tail_mass": float(selection.tail_mass_upper.max(initial=0.0)),
        "rows_minimal": int(selection.minimal.sum()),
        "rows_over_budget": int((selection.status == Status.OVER_BUDGET).sum()),
        "rows_empty": int((selection.status == Status.EMPTY).sum()),
    }
