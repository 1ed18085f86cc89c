"""The statements of an output about one layer, as they are read.

The sizes of the input are only claimed: no memory is taken in proportion to them, only to what the
file holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .._files.certificate import Certificate
from .._files.layers import Layer
from .._files.output import counts_in, output_tensors, rises
from .._files.safetensors import Form
from .._files.tensor_file import SafetensorsFile
from .._files.values import widen
from .codes import LOW_ADDITIONS, SPREAD_ADDITIONS, CodeClaims, LowPlane
from .guards import GuardClaims
from .layouts import code_bytes
from .matrices import Matrix
from .planes import ADDITIONS, Plane

Note = Callable[[str, str], None]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Claims:
    """One layer of an output, as read.

    Masses are widened. What the level of proof leaves out is None, or empty.

    Attributes:
        layer: The layer of the input, as claimed.
        stem: The beginning of the names of its tensors.
        by_head: Whether each kv head has its own set.
        visible: The number of candidates.
        eps: The budget of each group.
        bound_eps: The budgets of the lower bounds, None for `eps`.
        indices: The kept positions of each group.
        starts: The ends of the groups' rows in the file.
        blocks: The kept blocks of each group; empty where block_size is 1.
        rows: The rows with a weight in a lower bound.
        weights: Their weights.
        heaviest: At least the largest weight of all rows that prove one bound together.
        guard: The guard of the dropped keys, if there is one.
        codes: The codes of all keys and values, if there are any.
    """

    layer: Layer
    stem: str
    by_head: bool
    visible: int
    eps: tuple[float, ...]
    bound_eps: tuple[float, ...] | None
    indices: list[Integers]
    starts: list[int]
    blocks: list[Integers]
    held_out: Integers
    left_out: Integers
    upper: Floats | None
    lower: Floats | None
    worst: Floats | None
    violations: Integers | None
    lower_bound: Integers
    rows: Integers
    weights: Floats
    heaviest: float
    guard: GuardClaims | None
    codes: CodeClaims | None

    @property
    def kept(self) -> int:
        """The number of kept keys of all groups."""
        return sum(map(len, self.indices))

    @property
    def total(self) -> int:
        """The number of keys of all groups."""
        return self.layer.n * len(self.indices)

    def needed(self, block_size: int) -> int:
        """Return the keys that the lower bounds of all groups ask for, at least."""
        last = (self.visible - 1) % block_size + 1
        bounds = [bound for bound in self.lower_bound.tolist() if bound > 0]
        return sum((bound - 1) * block_size + last for bound in bounds)

    @property
    def aside(self) -> int:
        """The number of rows that are held out."""
        return self.layer.heads * len(self.held_out)

    @property
    def promised(self) -> int:
        """The number of rows with a promise."""
        return self.layer.heads * self.layer.m - self.aside - len(self.left_out)

    def group_of(self, kv_head: int) -> int:
        """Return the group of a kv head."""
        return kv_head if self.by_head else 0

    def name_of(self, group: int) -> str:
        """Return the name of a group for messages."""
        name = f"layer {self.layer.index}"
        return f"{name}, kv head {group}" if self.by_head else name

    def heads_of(self, group: int) -> slice:
        """Return the query heads of a group."""
        if not self.by_head:
            return slice(0, self.layer.heads)
        size = self.layer.heads // self.layer.kv_heads
        return slice(group * size, (group + 1) * size)

    def groups(self) -> Iterator[tuple[int, str, slice]]:
        """Yield number, name and query heads of every group."""
        for group in range(len(self.indices)):
            yield group, self.name_of(group), self.heads_of(group)

    def eps_of_rows(self) -> Floats:
        """Return the budget of every query head as a column, (heads, 1)."""
        return np.repeat(self.eps, self.layer.heads // len(self.eps))[:, None]

    def is_promised(self, heads: Integers, queries: Integers) -> NDArray[np.bool_]:
        """Return which rows have a promise; heads and queries broadcast."""
        rows = heads * self.layer.m + queries
        return ~(among(queries, self.held_out) | among(rows, self.left_out))

    def weights_of(self, heads: Integers, queries: Integers) -> Floats:
        """Return the weights of rows in the lower bounds."""
        weights = np.append(self.weights, 0.0)
        rows = heads * self.layer.m + queries
        place = np.where(among(rows, self.rows), np.searchsorted(self.rows, rows), -1)
        found: Floats = weights[place]
        return found


def among(numbers: Integers, ascending: Integers) -> NDArray[np.bool_]:
    """Return which of the numbers are in an ascending list."""
    if not len(ascending):
        return np.zeros(numbers.shape, bool)
    place = np.minimum(np.searchsorted(ascending, numbers), len(ascending) - 1)
    return np.asarray(ascending[place] == numbers)


def shown(form: Form) -> str:
    """Return a dtype and a shape for messages."""
    dtype, shape = form
    return f"{dtype} {list(shape)}"


def tensors_of(file: SafetensorsFile, layer: Layer, certificate: Certificate) -> dict[str, Form]:
    """Return the tensors that this layer must have, given their lengths."""
    counts = counts_in(file.header.forms, layer)
    return output_tensors(layer, certificate.options, counts, certificate.mass_dtype)


def read_claims(
    file: SafetensorsFile, layer: Layer, visible: int, certificate: Certificate, note: Note
) -> Claims | None:
    """Read the tensors of one layer but its kept rows; None (noted) if they do not fit."""
    stem, by_head = f"layers.{layer.index}.", certificate.options.granularity == "head"
    entries, forms = file.header.entries, file.header.forms
    needed = tensors_of(file, layer, certificate)
    for name, form in needed.items():
        if name not in forms:
            note(name, "is missing")
        elif forms[name] != form:
            note(name, f"is {shown(forms[name])}, must be {shown(form)}")
    if any(forms.get(name) != form for name, form in needed.items()):
        return None

    def integers(name: str) -> Integers:
        there = stem + name in entries
        return file.read(stem + name).astype(np.int64) if there else np.empty(0, np.int64)

    def floats(name: str) -> Floats | None:
        if stem + name not in entries:
            return None
        raw = file.read(stem + name)
        return widen(raw, "F32") if entries[stem + name].dtype == "F32" else raw

    def starts_of(name: str, count: int, what: str) -> list[int] | None:
        # As Python integers, whose differences do not wrap.
        starts = file.read(stem + name).tolist() if by_head else [0, count]
        if rises(starts, count):
            return starts
        note(stem + name, f"does not rise from 0 to the {count} kept {what}")
        return None

    indices, blocks = integers("indices"), integers("blocks")
    starts = starts_of("indptr", len(indices), "positions")
    in_blocks = certificate.options.block_size > 1
    ends = starts_of("block_indptr", len(blocks), "blocks") if in_blocks else []
    if starts is None or ends is None:
        return None
    guard = None
    if certificate.options.rest == "file":
        counts = [layer.n - (stop - start) for start, stop in pairwise(starts)]
        guard = _read_guard(file, layer, counts if by_head else counts * layer.kv_heads, note)
        if guard is None:
            return None
    codes = _read_codes(file, layer, certificate) if certificate.options.rest == "codes" else None
    bound_eps, weights = certificate.bound_eps, floats("lower_bound_weights")
    return Claims(
        layer,
        stem,
        by_head,
        visible,
        certificate.eps[layer.index],
        None if bound_eps is None else bound_eps[layer.index],
        [indices[start:stop] for start, stop in pairwise(starts)],
        starts,
        [blocks[start:stop] for start, stop in pairwise(ends)],
        integers("held_out"),
        integers("left_out"),
        floats("tail_mass_upper"),
        floats("tail_mass_lower"),
        floats("worst_tail_mass"),
        integers("violations") if stem + "violations" in entries else None,
        integers("lower_bound"),
        integers("lower_bound_rows"),
        np.empty(0) if weights is None else weights,
        1.0 if weights is None else float(weights.max(initial=0.0)) or 1.0,
        guard,
        codes,
    )


def _read_guard(
    file: SafetensorsFile, layer: Layer, counts: list[int], note: Note
) -> GuardClaims | None:
    """Read the guard of so many dropped keys of each kv head; None (noted) if it does not fit."""
    stem = f"layers.{layer.index}.guard_"
    starts, code_starts = [0], [0]
    for count in counts:
        starts.append(starts[-1] + count)
        code_starts.append(code_starts[-1] + code_bytes(count, layer.d))
    there = file.header.entries[stem + "codes"].shape[0]
    if min(counts) < 0 or there != code_starts[-1]:
        what = f"has {there} bytes, which are not those of the keys that are dropped"
        note(stem + "codes", what)
        return None
    plane = _read_plane(file, layer, "guard_", "key", file.read(stem + "bounds"))
    return GuardClaims(starts, code_starts, plane, file.read(stem + "ball"))


def _read_codes(file: SafetensorsFile, layer: Layer, certificate: Certificate) -> CodeClaims:
    """Read what is said of the codes of all keys and values."""
    stem, bits = f"layers.{layer.index}.", certificate.options.bits

    def matrix(name: str, beside: str, additions: int) -> Matrix:
        packed, bounds = file.read(stem + name), file.read(stem + beside)
        return Matrix(name, packed, beside, bounds, additions)

    of_keys, low = file.read(stem + "key_bounds"), None
    if bits["key"] > 8:
        low = LowPlane(bits["key"] - 8, matrix("key_low_gram", "key_low_bounds", LOW_ADDITIONS))
    return CodeClaims(
        _read_plane(file, layer, "key_", "key", of_keys[:, :-1]),
        of_keys[:, -1],
        low,
        _read_plane(file, layer, "value_", "value", file.read(stem + "value_bounds")),
        bits["value"],
        matrix("value_spread", "value_spread_bounds", SPREAD_ADDITIONS),
        file.header.entries[stem + "key_bare"].shape[0],
    )


def _read_plane(file: SafetensorsFile, layer: Layer, role: str, of: str, bounds: Floats) -> Plane:
    """Read what is said of a plane whose tensors begin so, given the six bounds of it."""
    stem = f"layers.{layer.index}.{role}"
    matrix = Matrix(f"{role}gram", file.read(stem + "gram"), f"{role}bounds", bounds, ADDITIONS)
    scales, radii, mean = (file.read(stem + name) for name in ("scales", "radii", "mean"))
    return Plane(role, of, scales, radii, mean, matrix)
