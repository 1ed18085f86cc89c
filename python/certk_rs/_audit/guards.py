"""The audit's own judgement of guards: whether codes and balls are true of dropped rows.

A guard has one plane of codes, of the dropped keys of each kv head, and a ball around the dropped
values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .layouts import Bytes, of_keys
from .matrices import NO_ENTRY, Floats, Wrong, norms
from .planes import Plane, PlaneJudge, Singles, turning


@dataclass(frozen=True, eq=False)
class GuardClaims:
    """The guard of one layer, without its codes.

    `starts` and `code_starts` are where the scales and the codes of each kv head begin.
    """

    starts: list[int]
    code_starts: list[int]
    plane: Plane
    ball: Floats


def nonsense(claims: GuardClaims, d: int) -> Wrong | None:
    """Return a tensor that no guard of any rows has, and why; None if there is none."""
    wrong = claims.plane.nonsense((1, turning(d)))
    if wrong is None and not (np.isfinite(claims.ball).all() and (claims.ball[:, -1] >= 0).all()):
        wrong = "guard_ball", NO_ENTRY
    return wrong


def untruths(
    claims: GuardClaims, head: int, codes: Bytes, rows: Iterable[tuple[Singles, Floats]]
) -> list[Wrong]:
    """Return the tensors of the guard of one kv head that do not bound its rows, and why.

    Args:
        claims: A guard without `nonsense`.
        head: The kv head.
        codes: Its part of the codes.
        rows: Dropped keys (r, d), widened to float32, and values (r, d), some at a time.
    """
    d, wrong = claims.plane.mean.shape[1], dict[str, str]()
    every = of_keys(codes, d)
    places = slice(claims.starts[head], claims.starts[head + 1])
    judge = PlaneJudge(claims.plane, head, places, wrong)
    centre, radius = claims.ball[head, :-1], float(claims.ball[head, -1])
    at, away = 0, np.float64(0)
    for keys, values in rows:
        judge.take(keys, every[at : at + len(keys)])
        at += len(keys)
        away = np.maximum(away, norms(values - centre).max(initial=0))
    judge.end(every[at:])
    # Users of the ball add twice as much (`Guard.moved`): this distance is rounded, too.
    if not away <= radius * (1 + (d + 8) * 2.0**-53):
        wrong["guard_ball"] = "a dropped value lies outside of it"
    return [(name, f"kv head {head}: {what}") for name, what in wrong.items()]
