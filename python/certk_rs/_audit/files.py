"""The audit of one output: its bytes, its certificate, and every layer.

Threads hash tensors and compare heads in any order. The results are taken in the order of the work,
so findings do not depend on the number of threads.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from operator import add
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .._files.certificate import Certificate, read_certificate
from .._files.layers import Layer, layout, read_metadata
from .._files.names import Names, detect
from .._files.output import output_header
from .._files.safetensors import Form
from .._files.sharded import open_tensors
from .._files.tensor_file import SafetensorsFile
from .._files.transposed import HEAD_MAJOR
from ..errors import CertkError, one_line
from .checks import (
    CERTIFICATE,
    budgets_complaint,
    check_layer,
    check_whole,
    promised,
    visible_keys,
)
from .claims import Claims, Note, read_claims, shown, tensors_of
from .judge import Verdict, is_proven
from .recompute import Proof
from .report import Notes, OutputAudit, Sampled, unknown_by_a_sample, unknown_without_input
from .sources import Source, Sources
from .truth import Head
from .workers import SMALL, Workers

_log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
Told = Generator[tuple[str, int, int], None, None]
"""A run of work, which yields the arguments of `Progress`."""
Identity = tuple[Any, ...]
_File = TypeVar("_File", bound=SafetensorsFile)
_R = TypeVar("_R")

Sample = float | int
"""Rows to look at: a share of all, or a number of them."""


@dataclass
class OutputJob:
    """One output under audit."""

    path: Path
    sources: Sources
    expected: Names | None
    order: str | None
    sample: Sample | None
    workers: Workers

    def __post_init__(self) -> None:
        self.result = OutputAudit(path=self.path)
        self._open = ExitStack()
        self._opened: list[tuple[SafetensorsFile, Identity]] = []
        self._proofs: dict[str, tuple[Proof, Claims]] = {}
        # Findings about the bytes are told before those about statements.
        self._notes, self._later = Notes(), Notes()

    def run(self) -> Told:
        """Judge the output, and yield the progress; `result` is the answer then."""
        with self._open:
            try:
                yield from self._judge()
                for file, identity in self._opened:
                    file.check_unchanged(identity)
            except Exception as error:  # of any kind: other outputs are judged all the same
                # Earlier findings may be of other bytes.
                self._tell_failure(self._cause(error))
                return
        self.result.take(self._notes)

    def _each(
        self, label: str, work: Sequence[Callable[[], _R]], take: Callable[[_R], None]
    ) -> Told:
        """Run work, take its results in order, and yield the progress."""
        small = self._opened[0][0].size < SMALL
        with closing(self.workers.run(work, small=small)) as run:
            for number, result in enumerate(run):
                yield f"{label} {self.result.path.name}", number, len(work)
                take(result)

    def _cause(self, error: Exception) -> Exception:
        """Return the cause of an error: a file that was changed meanwhile may cause any."""
        for file, identity in reversed(self._opened):
            try:
                file.check_unchanged(identity)
            except (CertkError, OSError) as changed:
                return changed
        return error

    def _tell_failure(self, error: Exception) -> None:
        """Report why nothing is known: a wrong file, a refusal of the system, or an error here."""
        result = self.result
        if isinstance(error, CertkError):
            result.add("file", str(error).removeprefix(str(result.path)).lstrip(": "))
        elif isinstance(error, MemoryError):
            result.error = "not enough memory: give fewer threads (--jobs)"
        elif isinstance(error, OSError):
            place = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
            result.error = f"{place}{error.strerror or one_line(error)}"
        else:
            what = f"unexpected {type(error).__name__}: {one_line(error)}"
            result.add("file", f"judging it ended with an {what}; nothing of it is confirmed")
            _log.debug("%s: %s", result.path, what, exc_info=error)

    def _reading(self, file: _File, identity: Identity) -> _File:
        self._open.enter_context(file)
        file.check_unchanged(identity)
        self._opened.append((file, identity))
        return file

    def _judge(self) -> Told:
        file = SafetensorsFile(self.result.path)
        self._reading(file, file.identity)
        certificate = _certificate(file, self._notes)
        if certificate is None:
            return
        heads = self._read(file, certificate)
        yield from self._check_bytes(file, certificate)
        self._notes.take(self._later)
        yield from self._each("recomputing", heads, self._take_verdict)
        self._prove()

    def _read(self, file: SafetensorsFile, certificate: Certificate) -> list[Callable[[], Verdict]]:
        """Check the statements of the output; return the work of comparing heads with the input."""
        result, note = self.result, self._later.add
        options = result.options = certificate.options
        result.unchecked = unknown_without_input(options)
        forms = certificate.input_forms
        try:
            layers = layout(
                "inputs", forms, Names(certificate.names), options.layout, certificate.queries
            )
        except CertkError as error:
            note(CERTIFICATE, f"cannot be of a prune job: {error}")
            return []
        if not any(layer.m for layer in layers):
            result.warnings += ("its input has no queries: no row was judged",)
        if (complaint := budgets_complaint(certificate, layers)) is not None:
            note(CERTIFICATE, complaint)
            return []
        _check_names(certificate, self.expected, result, note)
        _check_layout(certificate, forms, self.order, note)
        source = self._match(certificate)
        complete = self._read_layers(file, layers, certificate)
        self._tell_statements(complete, certificate)
        return [] if source is None else self._heads(source, file, complete, certificate)

    def _check_bytes(self, file: SafetensorsFile, certificate: Certificate) -> Told:
        """Check that the writer makes this file of the certificate and tensors with its hashes."""
        held, said, note = file.header.forms, certificate.output_forms, self._notes.add
        hashes = []
        for name in sorted(held.keys() | said.keys()):
            if name not in held:
                note(name, "the certificate lists it, the file has no such tensor")
            elif name not in said:
                note(name, "the file has it, the certificate does not list it")
            elif held[name] != said[name]:
                note(name, f"is {shown(held[name])}, the certificate says {shown(said[name])}")
            else:
                sha256 = certificate.outputs[name].sha256
                hashes.append(partial(self._check_hash, file, name, sha256))
        yield from self._each("checking", hashes, self._notes.take)
        if self._notes.found:
            return
        raw, canonical = file.header.raw, output_header(certificate).raw
        if raw != canonical:
            pairs = enumerate(zip(raw, canonical, strict=False))
            place = next((i for i, (a, b) in pairs if a != b), min(len(raw), len(canonical)))
            note("header", f"is not in canonical form from byte {place} on")

    def _check_hash(self, file: SafetensorsFile, name: str, said: str) -> Notes:
        digest, notes = hashlib.sha256(), Notes()
        for piece in file.chunks(name):
            self.workers.pause()
            digest.update(piece.data)
        if digest.hexdigest() != said:
            notes.add(name, "its bytes were changed: their SHA-256 is not that in the certificate")
        return notes

    def _match(self, certificate: Certificate) -> Source | None:
        """Find the input with the recorded hashes; without one, note how the nearest differs."""
        if not self.sources:
            return None
        inputs, headers, note = certificate.inputs, certificate.input_headers, self._later.add
        name = self.result.path.name
        source = self.sources.find(inputs, headers, name)
        if source is not None:
            self.result.source = source.path
            if source.name != name:
                other = f", though {name} is among the inputs" * self.sources.has_name(name)
                what = f"it is the output of {source.path}, which has another name{other}"
                self.result.warnings += (what,)
            if source.headers != headers:
                note(
                    "input header",
                    f"the header of {source.path} is not the one that was pruned: its names, order "
                    "or metadata were changed",
                )
            return source
        best, same = self.sources.nearest(inputs, headers)
        if (lost := self.sources.lost(inputs)) is not None:
            raise lost
        if not same:
            note("inputs", "none of the files given with --against is its input")
            return None
        there = best.tensors
        for name, facts in inputs.items():
            if there.get(name) != facts:
                how = "was changed" if name in there else "is missing"
                note(f"input {name}", f"{how} in {best.path}: it is not what was pruned")
        for name in sorted(set(there) - set(inputs)):
            what = f"was not in the input that was pruned, but is in {best.path}"
            note(f"input {name}", what)
        return None

    def _read_layers(
        self, file: SafetensorsFile, layers: Sequence[Layer], certificate: Certificate
    ) -> list[Claims]:
        """Read the statements of all layers; return those that make sense."""
        note, wanted, complete = self._later.add, set[str](), []
        visible = visible_keys(layers, certificate)
        for layer in layers:
            wanted.update(tensors_of(file, layer, certificate))
            claims = read_claims(file, layer, visible[layer.index], certificate, note)
            if claims is None:
                continue
            full = claims.upper is not None
            self.result.rows += layer.heads * layer.m if full else claims.promised
            self.result.lower_bounds += len(claims.lower_bound)
            if check_layer(claims, certificate, note):
                complete.append(claims)
        if certificate.options.granularity == "token":
            # Every layer states the one bound.
            self.result.lower_bounds = min(self.result.lower_bounds, 1)
        complete = check_whole(complete, certificate, note)
        if certificate.options.granularity == "token" and len(complete) < len(layers):
            complete = []
        for name in sorted(set(file.header.entries) - wanted):
            note(name, "no output has such a tensor")
        return complete

    def _tell_statements(self, complete: Sequence[Claims], certificate: Certificate) -> None:
        result, options = self.result, certificate.options
        result.budgets, result.bound_eps = certificate.eps, certificate.bound_eps
        budgets = {budget for groups in certificate.eps.values() for budget in groups}
        result.eps = budgets.pop() if len(budgets) == 1 else None
        counted = complete[:1] if options.granularity == "token" else complete
        result.kept = sum(claims.kept for claims in counted)
        result.total = sum(claims.total for claims in counted)
        result.held_out = sum(claims.aside for claims in complete)
        result.left_out = sum(len(claims.left_out) for claims in complete)
        for claims in complete:
            worst, over, violations = _said(claims)
            known = result.worst_tail_mass, result.rows_over_budget
            result.worst_tail_mass = _both(max, known[0], worst)
            result.rows_over_budget = _both(add, known[1], over)
            if violations is not None and options.holdout > 0:
                result.violations = (result.violations or 0) + violations

    def _heads(
        self,
        source: Source,
        file: SafetensorsFile,
        layers: Sequence[Claims],
        certificate: Certificate,
    ) -> list[Callable[[], Verdict]]:
        """Return the work of comparing every kv head with the input."""
        given = self._reading(open_tensors(source.path), source.identity)
        metadata = given.header.metadata
        said = read_metadata(str(source.path), metadata, [claims.layer for claims in layers])
        scales = {claims.layer.index: certificate.scales[claims.layer.index] for claims in layers}
        if said != (scales, certificate.causal_offset):
            self._later.add(CERTIFICATE, f"scale or causal_offset is not that of {source.path}")
            return []
        sampled = self.sample is not None
        self.result.unchecked = unknown_by_a_sample(certificate.options) if sampled else ()
        judged = any(claims.layer.m for claims in layers)
        if judged and certificate.options.proof != "full":
            self.result.rows_over_budget, self._recount = 0, True
        if judged and certificate.options.proof == "none":
            self.result.worst_tail_mass = 0.0
        chosen = None if self.sample is None else self._draw(layers, certificate)
        work: list[Callable[[], Verdict]] = []
        first, pause = 0, self.workers.pause
        for claims in layers:
            rows = claims.layer.heads // claims.layer.kv_heads * claims.layer.m
            for kv_head in range(claims.layer.kv_heads):
                sample = None
                if chosen is not None:
                    begin = first + kv_head * rows
                    low, high = np.searchsorted(chosen, (begin, begin + rows))
                    sample = chosen[low:high] - first
                    if not len(sample):
                        continue
                head = Head(given, file, claims, kv_head, certificate, sample, pause)
                work.append(head.check)
            first += claims.layer.heads * claims.layer.m
        return work

    _recount = False

    def _draw(self, layers: Sequence[Claims], certificate: Certificate) -> NDArray[np.int64]:
        """Draw the rows to look at: the same for the same output."""
        count = sum(claims.layer.heads * claims.layer.m for claims in layers)
        sample = self.sample or 0
        wanted = math.ceil(sample * count) if isinstance(sample, float) else sample
        rows = min(wanted, count)
        seed = int(hashlib.sha256(certificate.to_json().encode()).hexdigest()[:12], 16)
        self.result.sampled = Sampled(rows, count, seed)
        chosen = np.random.default_rng(seed).choice(count, rows, replace=False, shuffle=False)
        return np.sort(chosen).astype(np.int64)

    def _take_verdict(self, verdict: Verdict) -> None:
        result = self.result
        self._notes.take(verdict.notes)
        result.confirmed_rows += verdict.confirmed
        result.confirmed_lower_bounds += int(verdict.proved)
        if self._recount:
            result.rows_over_budget = (result.rows_over_budget or 0) + verdict.over
        if result.options is not None and result.options.proof == "none" and result.rows:
            result.worst_tail_mass = max(result.worst_tail_mass or 0.0, verdict.worst)
        if verdict.proof is not None:
            token = result.options is not None and result.options.granularity == "token"
            name = "all layers" if token else verdict.claims.name_of(0)
            if name in self._proofs:
                self._proofs[name][0].join(verdict.proof)
            else:
                self._proofs[name] = verdict.proof, verdict.claims

    def _prove(self) -> None:
        """Prove the lower bounds of sets that several heads share."""
        for name, (proof, claims) in self._proofs.items():
            proved = is_proven(proof, claims, 0, name, self._notes)
            self.result.confirmed_lower_bounds += int(proved)


def _said(claims: Claims) -> tuple[float | None, int | None, int | None]:
    """Return a layer's worst promised mass, its rows over eps, and its violations."""
    if claims.upper is not None:
        every = slice(0, claims.layer.heads)
        mine, beyond = promised(claims, every), claims.upper > claims.eps_of_rows()
        aside = int(beyond[:, claims.held_out].sum())
        worst = float(claims.upper[mine].max(initial=0.0))
        return worst, int((mine & beyond).sum()), aside
    if claims.worst is None:
        return None, None, None
    heads = np.repeat(claims.eps, claims.layer.heads // len(claims.eps))
    violations = None if claims.violations is None else int(claims.violations.sum())
    over = None if (claims.worst > heads).any() else 0
    return float(claims.worst.max()), over, violations


_N = TypeVar("_N", int, float)


def _both(join: Callable[[_N, _N], _N], left: _N | None, right: _N | None) -> _N | None:
    """Join two numbers; None if one of them is."""
    return None if left is None or right is None else join(left, right)


def _certificate(file: SafetensorsFile, notes: Notes) -> Certificate | None:
    metadata = file.header.metadata
    if "certk" not in metadata:
        notes.add("metadata", "there is no certificate (key certk): not an output of certk prune")
        return None
    for key in sorted(set(metadata) - {"certk"}):
        notes.add("metadata", f"foreign key {key!r}")
    try:
        certificate, complaint = read_certificate(metadata["certk"])
    except ValueError as error:
        notes.add(CERTIFICATE, f"cannot be read: {' '.join(str(error).split())}")
        return None
    if complaint is not None:
        notes.add(CERTIFICATE, complaint)
    return certificate


def _check_names(
    certificate: Certificate, expected: Names | None, result: OutputAudit, note: Note
) -> None:
    """Check that layers and roles are those of the input's own names."""
    said, inputs = Names(certificate.names), sorted(certificate.inputs)
    result.names = certificate.names
    result.covered = tuple(name for name in inputs if said.match(name) is not None)
    result.not_covered = tuple(name for name in inputs if said.match(name) is None)
    remedy = f"give --names {certificate.names!r} if they are"
    if expected is None:
        try:
            expected = detect("its input", inputs)
        except CertkError as error:
            note(CERTIFICATE, str(error))
            return
    else:
        remedy = f"--names {expected.pattern!r} says so"
    for name in inputs:
        meant, taken = expected.match(name), said.match(name)
        if meant != taken:
            note(
                CERTIFICATE,
                f"its names {certificate.names!r} are not those of its input: by them {name!r} is "
                f"{_part(taken)}, by those of the input {_part(meant)}; {remedy}",
            )
            return


def _check_layout(
    certificate: Certificate, forms: Mapping[str, Form], given: str | None, note: Note
) -> None:
    """Check that the order of axes is that of the input, as given or by its shapes."""
    said, remedy = certificate.options.layout, f"--layout {given} says so"
    if given is None:
        given, remedy = HEAD_MAJOR, f"give --layout {said} if it is"
        names = Names(certificate.names)
        if (doubt := _doubt(forms, names, None)) is not None:
            if said == HEAD_MAJOR or _doubt(forms, names, HEAD_MAJOR) is None:
                note(CERTIFICATE, doubt)
            return
    if said != given:
        note(CERTIFICATE, f"its layout {said} is not that of its input, which is {given}; {remedy}")


def _doubt(forms: Mapping[str, Form], names: Names, order: str | None) -> str | None:
    """Return why shapes cannot be read in this order of axes; None if they can."""
    try:
        layout("its input", forms, names, order, "any")
    except CertkError as error:
        return str(error)
    return None


def _part(match: tuple[int, str] | None) -> str:
    return "no part of the cache" if match is None else f"the {match[1]} of layer {match[0]}"
