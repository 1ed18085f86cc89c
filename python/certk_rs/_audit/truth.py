"""Comparison of one kv head of an output with the input.

It covers the copies of the head, the radius of its values, its guard or codes, and every row of the
query heads that share it. Memory is about that of the head and of one block of scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._files.certificate import Certificate
from .._files.layers import Layer
from .._files.safetensors import ITEMSIZE
from .._files.tensor_file import SafetensorsFile
from .._files.values import FiniteCheck, widen
from . import codes, guards
from .checks import forced_positions, inside
from .claims import Claims, Floats, Integers, among
from .codes import CodeClaims, Piece
from .guards import GuardClaims
from .judge import Judge, Verdict, is_proven
from .layouts import GROUP
from .recompute import Keys, Proof, ball_radius, recompute
from .report import Finding

_BLOCK = 1 << 20  # scores at a time: 8 MiB, and a few temporaries of that size
_ROWS = 1 << 14  # rows of keys or values at a time, in whole groups of codes
# The tolerance for budgets that were chosen for a bound on outputs.
_LENIENT = 1 + 2.0**-20


@dataclass(frozen=True)
class Head:
    """One kv head of one layer, to be compared with the input.

    Attributes:
        given: The input.
        file: The output.
        claims: The statements about the layer.
        kv_head: The number of the head.
        certificate: The certificate of the output.
        sample: The ascending rows (head * m + query) to look at; None for all.
        pause: Called between blocks; it may raise.
    """

    given: SafetensorsFile
    file: SafetensorsFile
    claims: Claims
    kv_head: int
    certificate: Certificate
    sample: Integers | None
    pause: Callable[[], None]

    def check(self) -> Verdict:
        """Compare the head with the input; prove the lower bound of a set of its own."""
        claims, verdict = self.claims, Verdict(self.claims)
        for role in ("key", "value"):
            self._check_copies(role, verdict)
        if self.certificate.options.out_tol is not None:
            self._check_radius(self.certificate.options.out_tol, verdict)
        if claims.guard is not None and self.sample is None:
            self._check_guard(claims.guard, verdict)
        if claims.codes is not None and self.sample is None:
            self._check_codes(claims.codes, verdict)
        self._check_rows(verdict)
        if verdict.proof is not None and claims.by_head:
            name = claims.name_of(self.kv_head)
            verdict.proved = is_proven(verdict.proof, claims, self.kv_head, name, verdict.notes)
            verdict.proof = None
        return verdict

    @property
    def _layer(self) -> Layer:
        return self.claims.layer

    def _read(self, role: str, head: int, rows: slice) -> NDArray[Any]:
        """Read some rows of one head of the input as stored, (rows, d)."""
        name, heads = self._layer.names[role], slice(head, head + 1)
        layout = self.certificate.options.layout
        found: NDArray[Any] = self.given.read_heads(name, heads, rows, layout=layout)[0]
        return found

    def _pieces(self, role: str, end: int) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield the first `end` rows of this head in pieces, each with its first row's number."""
        for start in range(0, end, _ROWS):
            self.pause()
            yield start, self._read(role, self.kv_head, slice(start, min(start + _ROWS, end)))

    def _check_copies(self, role: str, verdict: Verdict) -> None:
        """Check that kept rows are those of the input, bit for bit, and all rows finite.

        Rows that no query sees must be finite, too.
        """
        claims, name = self.claims, self.claims.stem + role
        kept = claims.indices[claims.group_of(self.kv_head)]
        first = claims.starts[self.kv_head] if claims.by_head else self.kv_head * len(kept)
        width = self._layer.d * (4 if self._layer.dtypes[role] == "F32" else 2)
        told = done = 0
        for start, rows in self._pieces(role, self._layer.n):
            self._check_finite(role, rows, verdict)
            end = done + int(np.searchsorted(kept[done:], start + len(rows)))
            copies = np.empty((end - done, self._layer.d), rows.dtype)
            copies_bytes = copies.reshape(-1).view(np.uint8)
            self.file.read_into(name, copies_bytes.data, (first + done) * width)
            bits = f"<u{rows.itemsize}"
            wrong = copies.view(bits) != rows.view(bits)[kept[done:end] - start]
            for row in np.flatnonzero(wrong.any(axis=1))[: 3 - told] + done:
                place = f"{first + row}" if claims.by_head else f"{self.kv_head}, {row}"
                what = f"is not position {kept[row]} of kv head {self.kv_head} of the input"
                verdict.notes.add(f"{name}[{place}]", what)
                told += 1
            done = end

    def _check_finite(self, role: str, rows: NDArray[Any], verdict: Verdict) -> None:
        """Check that rows are finite: prune refuses others."""
        check = FiniteCheck(self._layer.dtypes[role])
        if check.first_bad(rows.reshape(-1).view(np.uint8)) is not None:
            what = f"kv head {self.kv_head}: holds a number that is not finite"
            finding = Finding(f"input {self._layer.names[role]}", what)
            if finding not in verdict.notes.findings:
                verdict.notes.add(finding.where, finding.what)

    def _check_radius(self, out_tol: float, verdict: Verdict) -> None:
        """Check budget times twice the radius of the values, which bounds the error of outputs."""
        group, visible = self.claims.group_of(self.kv_head), self.claims.visible
        dtype = self._layer.dtypes["value"]

        def pieces() -> Iterator[Floats]:
            for _, rows in self._pieces("value", visible):
                yield widen(rows, dtype)

        with np.errstate(all="ignore"):
            radius = ball_radius(pieces, visible)
        eps = self.claims.eps[group]
        if not eps * 2 * radius <= out_tol * _LENIENT:
            verdict.notes.add(
                "metadata certk",
                f"{self.claims.name_of(group)}: eps = {eps!r} over values of kv head "
                f"{self.kv_head} within a radius of {radius!r} is not proven to keep outputs "
                f"within out_tol = {out_tol!r}",
            )

    def _check_guard(self, guard: GuardClaims, verdict: Verdict) -> None:
        """Check that the guard bounds the dropped keys and values."""
        head, dtypes = self.kv_head, self._layer.dtypes
        kept = self.claims.indices[self.claims.group_of(head)]
        first, end = guard.code_starts[head], guard.code_starts[head + 1]
        lines = self._bytes("guard_codes", first, end)

        def rows() -> Iterator[tuple[NDArray[np.float32], Floats]]:
            # Keys that no query of the file sees are dropped, too; later queries see them.
            for start in range(0, self._layer.n, _ROWS):
                self.pause()
                part = slice(start, min(start + _ROWS, self._layer.n))
                gone = np.setdiff1d(np.arange(part.start, part.stop), kept) - start
                keys, values = (
                    widen(self._read(role, head, part)[gone], dtypes[role])
                    for role in ("key", "value")
                )
                yield keys.astype(np.float32), values

        with np.errstate(all="ignore"):
            for name, what in guards.untruths(guard, head, lines, rows()):
                verdict.notes.add(self.claims.stem + name, what)

    def _check_codes(self, said: CodeClaims, verdict: Verdict) -> None:
        """Check that the codes are true of all keys and values."""
        with np.errstate(all="ignore"):
            for name, what in codes.untruths(said, self.kv_head, self._coded(said)):
                verdict.notes.add(self.claims.stem + name, what)

    def _coded(self, said: CodeClaims) -> Iterator[Piece]:
        """Yield all keys and values with their codes, some at a time."""
        head, n, dtypes = self.kv_head, self._layer.n, self._layer.dtypes
        bare = said.bare_in(slice(head))
        for start in range(0, n, _ROWS):
            self.pause()
            part = slice(start, min(start + _ROWS, n))
            more = bare + said.bare_in(head, part)
            rows = {role: self._read(role, head, part) for role in ("key", "value")}
            groups = slice(start // GROUP, -(-part.stop // GROUP))
            yield Piece(
                rows,
                {role: widen(rows[role], dtypes[role]).astype(np.float32) for role in rows},
                {
                    role: self._part(f"{role}_bare", slice(bare, more)).view(rows[role].dtype)
                    for role in rows
                },
                {role: self._part(f"{role}_codes", groups, head) for role in rows},
                None if said.low is None else self._part("key_low", part, head),
            )
            bare = more

    def _part(self, name: str, rows: slice, head: int = 0) -> NDArray[np.uint8]:
        """Return the bytes of some rows of a tensor of the output, of a kv head if it has them."""
        entry = self.file.header.entries[self.claims.stem + name]
        count, width = entry.shape[-2:]
        row = width * ITEMSIZE[entry.dtype]
        first = (head * count + rows.start) * row
        found = self._bytes(name, first, first + (rows.stop - rows.start) * row)
        return found.reshape(rows.stop - rows.start, row)

    def _bytes(self, name: str, first: int, end: int) -> NDArray[np.uint8]:
        """Return some bytes of a tensor of the output."""
        found = np.empty(end - first, np.uint8)
        self.file.read_into(self.claims.stem + name, found.data, first)
        return found

    def _check_rows(self, verdict: Verdict) -> None:
        claims, visible = self.claims, self.claims.visible
        kept = claims.indices[claims.group_of(self.kv_head)]
        dropped = np.setdiff1d(np.arange(visible), kept, assume_unique=True)
        order = np.concatenate([kept, dropped])
        options = self.certificate.options
        if options.proof != "none" and self.sample is None:
            forced = np.logical_or.reduce(
                [inside(order, each) for each in forced_positions(self.certificate, visible)]
            )
            verdict.proof = Proof(order, forced, options.block_size)
        keys = self._keys(kept), self._keys(dropped)
        judge = Judge(claims, self.kv_head, self.certificate, verdict)
        for batch in self._batches():
            self.pause()
            numbers = [self._numbers(head, part) for head, part in batch]
            heads = np.repeat([head for head, _ in batch], [len(each) for each in numbers])
            which = np.stack([heads, np.concatenate(numbers)], axis=1)
            if len(which):
                parts = zip(batch, numbers, strict=True)
                queries = np.concatenate([self._queries(*at, some, verdict) for at, some in parts])
                seen = self._seen(which[:, 1])
                scale = self.certificate.scales[self._layer.index]
                judge.take(which, recompute(queries, *keys, scale, seen), seen)
        if self.sample is None:
            judge.compare_violations()

    def _numbers(self, head: int, part: slice) -> Integers:
        """Return the numbers of the queries to look at."""
        numbers = np.arange(part.start, part.stop)
        if self.sample is None:
            return numbers
        return numbers[among(head * self._layer.m + numbers, self.sample)]

    def _queries(self, head: int, part: slice, numbers: Integers, verdict: Verdict) -> Floats:
        rows = self._read("query", head, part)
        self._check_finite("query", rows, verdict)
        return widen(rows[numbers - part.start], self._layer.dtypes["query"])

    def _seen(self, queries: Integers) -> Integers:
        """Return how many of the visible keys each query sees."""
        visible, offset = self.claims.visible, self.certificate.causal_offset
        if offset is None:
            return np.full(len(queries), visible)
        # The offset may be beyond int64; this clip changes no query.
        near = min(max(offset + 1, -self._layer.m), visible)
        return np.clip(queries + near, 0, visible)

    def _keys(self, positions: Integers) -> Keys:
        dtype = self._layer.dtypes["key"]
        vectors = np.empty((len(positions), self._layer.d))
        done = 0
        for start, rows in self._pieces("key", self.claims.visible):
            end = done + int(np.searchsorted(positions[done:], start + len(rows)))
            vectors[done:end] = widen(rows[positions[done:end] - start], dtype)
            done = end
        return Keys(vectors, positions)

    def _batches(self) -> Iterator[list[tuple[int, slice]]]:
        """Yield rows of the query heads that share this kv head, a block of scores at a time."""
        size, m = self._layer.heads // self._layer.kv_heads, self._layer.m
        step = max(1, _BLOCK // max(self.claims.visible, 1))
        batch: list[tuple[int, slice]] = []
        room = step
        for head in range(self.kv_head * size, (self.kv_head + 1) * size):
            start = 0
            while start < m:
                stop = min(start + room, m)
                batch.append((head, slice(start, stop)))
                room -= stop - start
                start = stop
                if not room:
                    yield batch
                    batch, room = [], step
        if batch:
            yield batch
