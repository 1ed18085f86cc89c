"""Comparison of recomputed rows with the statements of an output, at every level of proof."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .._files.certificate import Certificate
from .checks import is_at_the_cap
from .claims import Claims, Floats, Integers
from .recompute import Proof, Rows
from .report import Notes

# Rows this little below eps may be counted as violations.
_LENIENT = 1 - 2.0**-20


@dataclass
class Verdict:
    """The result for one kv head.

    Attributes:
        notes: Findings.
        confirmed: Recomputed rows of which the output states the truth.
        over: Promised rows that are not proven to be within their budgets.
        worst: The largest recomputed upper end of a promised row.
        proof: The share of these rows in the proof of the group's lower bound; None without a
            bound, or in a sample.
        claims: The statements about the layer.
        proved: Whether the bound of a set of this head alone is proved.
    """

    claims: Claims
    notes: Notes = field(default_factory=Notes)
    confirmed: int = 0
    over: int = 0
    worst: float = 0.0
    proof: Proof | None = None
    proved: bool = False


class Judge:
    """The judge of one kv head; adds its rows, some at a time, to a verdict."""

    def __init__(
        self, claims: Claims, kv_head: int, certificate: Certificate, verdict: Verdict
    ) -> None:
        self._claims = claims
        self._verdict = verdict
        group = claims.group_of(kv_head)
        self._eps = claims.eps[group]
        self._bound_eps = None if claims.bound_eps is None else claims.bound_eps[group]
        kept = len(claims.indices[group])
        self._excused = is_at_the_cap(kept, certificate, claims.visible)
        size = claims.layer.heads // claims.layer.kv_heads
        self._heads = range(kv_head * size, (kv_head + 1) * size)
        self._violations = np.zeros((2, claims.layer.heads), np.int64)

    def take(self, which: Integers, rows: Rows, seen: Integers) -> None:
        """Judge recomputed rows, given by head and query (b, 2), and the keys that each sees."""
        claims, verdict = self._claims, self._verdict
        promised = claims.is_promised(*which.T)
        within = rows.lose_at_most(np.full(len(which), self._eps))
        verdict.over += int((promised & ~within).sum())
        # A row of which arithmetic proves nothing (NaN) may lose everything.
        highest = np.where(np.isnan(rows.tail_high), 1.0, rows.tail_high)
        verdict.worst = max(verdict.worst, float(highest[promised].max(initial=0.0)))
        self._compare(which, rows, promised, within)
        if claims.violations is not None:
            self._count_violations(which, rows)
        if verdict.proof is not None:
            weights = claims.weights_of(*which.T) / claims.heaviest
            limits = np.where(promised, self._limits(which), 1.0)
            verdict.proof.add(rows, weights, limits, seen)

    def _limits(self, which: Integers) -> Floats:
        """Return the loss that the lower bounds allow each row.

        A row over budget, as max_keep allows, may lose what the certificate states for it.
        """
        claims = self._claims
        if self._bound_eps is not None:
            return np.full(len(which), self._bound_eps)
        said = np.zeros(len(which))
        if claims.upper is not None:
            said = claims.upper[tuple(which.T)]
        elif claims.worst is not None:
            said = claims.worst[which[:, 0]]
        limits: Floats = np.maximum(self._eps, said)
        return limits

    def _compare(
        self,
        which: Integers,
        rows: Rows,
        promised: NDArray[np.bool_],
        within: NDArray[np.bool_],
    ) -> None:
        """Compare recorded masses with recomputed ones; without a record, rows with their budgets.

        A level of proof that records less than every row speaks of the promised rows only.
        """
        claims, every = self._claims, np.ones(len(which), bool)
        lower, upper = np.zeros(len(which)), np.full(len(which), self._eps)
        name, judged, confirmed = "indices", promised, every if self._excused else within
        if claims.upper is not None and claims.lower is not None:
            lower, upper = claims.lower[tuple(which.T)], claims.upper[tuple(which.T)]
            name, judged = "tail_mass_upper", every
            confirmed = rows.lose_at_most(upper) & rows.lose_at_least(lower)
        elif claims.worst is not None:
            name, upper = "worst_tail_mass", claims.worst[which[:, 0]]
            confirmed = rows.lose_at_most(upper)
        refuted = rows.refute(lower, upper)
        self._verdict.confirmed += int((judged & confirmed).sum())
        for row in np.flatnonzero(judged & ~confirmed):
            head, query = which[row].tolist()
            mine = f"[{float(rows.tail_low[row])!r}, {float(rows.tail_high[row])!r}]"
            said = f"[{float(lower[row])!r}, {float(upper[row])!r}]"
            how = f"refuted: it is in {mine}" if refuted[row] else f"not confirmed, only {mine} is"
            at = {"tail_mass_upper": f"[{head}, {query}]", "worst_tail_mass": f"[{head}]"}
            self._verdict.notes.add(
                f"{claims.stem}{name}{at.get(name, '')}",
                f"layer {claims.layer.index}, head {head}, query {query}: "
                f"tail mass in {said} is {how}",
            )

    def _count_violations(self, which: Integers, rows: Rows) -> None:
        held = np.isin(which[:, 1], self._claims.held_out)
        budgets = np.full(len(which), self._eps)
        above = held & rows.refute(np.zeros(len(which)), budgets)
        perhaps = held & ~rows.lose_at_most(budgets * _LENIENT)
        for counts, some in zip(self._violations, (above, perhaps), strict=True):
            counts += np.bincount(which[some, 0], minlength=len(counts))

    def compare_violations(self) -> None:
        """Compare the recorded counts of violations with those of all rows."""
        said = self._claims.violations
        for head in self._heads:
            least, most = self._violations[:, head]
            if said is not None and not least <= said[head] <= most:
                self._verdict.notes.add(
                    f"{self._claims.stem}violations[{head}]",
                    f"{said[head]} is not from the {least} held-out queries that lose more than "
                    f"eps to the {most} that may",
                )


def is_proven(proof: Proof, claims: Claims, group: int, name: str, notes: Notes) -> bool:
    """Return True if the lower bound of a group is proven; else note that it is not."""
    bound = int(claims.lower_bound[group])
    if proof.holds_for(bound):
        return True
    what = f"{name}: {bound} is not proven by the recorded weights"
    notes.add(f"{claims.stem}lower_bound[{group}]", what)
    return False
