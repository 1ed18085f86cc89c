"""`certk select`: the fewest keys of every row of scores."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ..errors import CertkError
from .options import Argument, Option, need_new
from .terminal import print_json, say, warn

OPTIONS = {
    "scores": Argument(metavar="SCORES", help="A .npy or .npz file (..., n)."),
    "eps": Option(metavar="EPS", help="Tail mass that a row may lose, 0 <= eps < 1."),
    "out": Option("-o", "--out", metavar="FILE", help="Write the selection (.npz)."),
    "array": Option(metavar="NAME", help="The array of an .npz with several."),
    "kind": Option(help="The scale of the scores."),
    "scale": Option(metavar="X", help="Multiplies the scores."),
    "mask": Option(metavar="FILE", help="Boolean or additive mask (.npy)."),
    "lengths": Option(metavar="FILE", help="Valid prefix of each row (.npy)."),
    "indptr": Option(metavar="FILE", help="Row starts of ragged flat scores (.npy)."),
    "causal_offset": Option(metavar="N", help="Row i sees the keys <= i + N."),
    "min_keep": Option(metavar="N", min=0, help="Keep at least N keys."),
    "prove_minimal": Option("--prove-minimal", help="Decide open rows again in float64."),
}


def select(
    scores: Path,
    eps: float,
    out: Path | None = None,
    array: str | None = None,
    kind: Literal["logits", "logprobs", "probs"] = "logits",
    scale: float = 1.0,
    mask: Path | None = None,
    lengths: Path | None = None,
    indptr: Path | None = None,
    causal_offset: int | None = None,
    min_keep: int = 1,
    max_keep: int | float | None = None,
    keep_first: int = 0,
    keep_last: int = 0,
    block_size: int = 1,
    prove_minimal: bool = False,
    threads: int | None = None,
    as_json: bool = False,
) -> int:
    """Select the fewest keys of every row of scores.

    What is dropped of a row is proven to weigh at most eps of its softmax mass.
    """
    from .._files.npy import read_array
    from ..results import Status
    from ..selection import select as select_rows

    if out is not None:
        need_new(out)
        # A name must not say something else than what is in the file.
        if not out.name.lower().endswith(".npz"):
            raise CertkError(
                f"{out}: a selection is several arrays, which are written as .npz: call it "
                f"{out.stem}.npz"
            )
    found = select_rows(
        read_array(scores, array),
        eps,
        kind=kind,
        scale=scale,
        mask=None if mask is None else read_array(mask),
        lengths=None if lengths is None else read_array(lengths),
        indptr=None if indptr is None else read_array(indptr),
        causal_offset=causal_offset,
        min_keep=min_keep,
        max_keep=max_keep,
        keep_first=keep_first,
        keep_last=keep_last,
        block_size=block_size,
        prove_minimal=prove_minimal,
        threads=threads,
    )
    if out is not None:
        found._write(out, replace=False)
    over = int((found.status == Status.OVER_BUDGET).sum())
    if over:
        warn(f"{over} of {found.k.size} rows are over eps because of --max-keep")
    if as_json:
        print_json(
            {
                "scores": str(scores),
                "output": None if out is None else str(out),
                "shape": list(found.shape),
                "eps": eps,
                "rows": found.k.size,
                "kept": int(found.k.sum()),
                "worst_tail_mass": float(found.tail_mass_upper.max(initial=0.0)),
                "rows_minimal": int(found.minimal.sum()),
                "rows_over_budget": over,
                "rows_empty": int((found.status == Status.EMPTY).sum()),
            }
        )
        return 0
    for line in found.summary().splitlines():
        say(line)
    if out is not None:
        say(f"written to {out}")
    return 0
